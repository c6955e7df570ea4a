"""Low-rank adapters: the options of --lora, their errors, what is saved, and how they are merged."""

import json
import re
import shlex
from hashlib import sha256

import pytest
import torch
from safetensors.torch import load_file, save_file

from loopwright import api
from loopwright.checkpoint import read
from loopwright.cli import main
from loopwright.errors import InputError
from loopwright.runs.settings import settle
from loopwright.tasks.adapters import LoraOptions, add_adapters, lora_options
from loopwright.tasks.registry import get_task
from tasks.dialogues import tiny_decoder, write_dialogues
from tasks.forked import run_lines
from tasks.reviews import rows, write_csv
from tasks.runs import assert_same_files, check_kill
from tasks.texts import lines, tiny_bert, tiny_gpt2, write_text


def options(*words: str) -> LoraOptions:
    return lora_options(settle(get_task("causal-lm"), ["--data", "x.txt", *words]).args)


def small_llama(**changes):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes}, num_attention_heads=4, num_key_value_heads=2))


def adapted(*words: str):
    return add_adapters(small_llama(), settle(get_task("causal-lm"), ["--data", "x.txt", *words]).args, "CAUSAL_LM")


def test_the_options_of_lora_are_read_beside_its_flags():
    assert options("--lora") == options("--lora", "true") == LoraOptions()
    assert options("--lora", "16").r == 16
    assert options("--lora", "--lora_rank", "4", "--lora_target", "q_proj") == LoraOptions(4, targets=["q_proj"])
    text = "r=16,alpha=32,dropout=0.05,targets=q_proj,v_proj,dora=true,rslora=yes"
    assert options("--lora", text) == LoraOptions(16, 32, 0.05, ["q_proj", "v_proj"], True, True)
    assert options("--lora", "rank=2,target_modules=all-linear", "--lora_alpha", "4") == LoraOptions(2, 4)
    for text in ("targets=q_proj v_proj", "targets=q_proj,targets=v_proj"):
        assert options("--lora", text) == LoraOptions(targets=["q_proj", "v_proj"])
    assert not settle(get_task("causal-lm"), ["--data", "x.txt", "--lora", "false"]).args.lora


@pytest.mark.parametrize(
    ("text", "saw", "fix"),
    [
        ("r=16,alhpa=32", "no option 'alhpa'", "--lora r=16,alpha=32"),
        ("r=0", "a whole number from 1", "--lora"),
        ("r=4,dropout=1.5", "from 0 to below 1", "--lora r=4"),
        ("r=4,dora=maybe", "true or false", "--lora r=4"),
        ("alpha=nan,r=4", "a number above 0", "--lora r=4"),
        ("fast", "expected name=value", "--lora"),
        ("r=4,alpha=8,r=16", "gives r twice", "--lora r=4,alpha=8"),
    ],
)
def test_a_wrong_option_is_refused_with_a_fix_that_works(text, saw, fix):
    with pytest.raises(InputError, match=saw) as caught:
        options("--lora", text)
    assert caught.value.fix == fix
    assert options(*fix.split())


def test_an_option_and_a_flag_that_contradict_each_other_are_refused():
    with pytest.raises(InputError, match="contradict") as caught:
        options("--lora", "r=16", "--lora_rank", "4")
    assert caught.value.fix == "leave out --lora_rank"


def test_targets_are_all_linear_layers_names_or_patterns():
    def targets(*words: str) -> set[str]:
        names = (name for name, parameter in adapted(*words).named_parameters() if parameter.requires_grad)
        return {name.partition(".lora")[0].removeprefix("base_model.model.model.") for name in names}

    assert len(targets("--lora", "r=2,targets=all-linear")) == 14
    assert targets("--lora", "r=2,targets=q_proj,o_proj") == {
        f"layers.{layer}.self_attn.{name}_proj" for layer in (0, 1) for name in "qo"
    }
    assert targets("--lora", "r=2,targets=q_proj,,") == targets("--lora", "r=2,targets=q_proj")
    assert targets("--lora", "r=2,targets=*layers.1.self_attn.*") == {
        f"layers.1.self_attn.{name}_proj" for name in "qkvo"
    }


def test_a_target_that_matches_no_layer_names_the_nearest_ones():
    for words, fix in (
        (["--lora", "r=2,targets=q_prj,v_proj"], "--lora r=2,targets=q_proj,v_proj"),
        (["--lora", "--lora_target", "q_prj"], "--lora_target q_proj"),
        (["--lora", "targets=query"], "--lora targets=all-linear"),
        (["--lora", "r=2,targets=*.attention.*"], "--lora r=2,targets=all-linear"),
        (["--lora", "r=2,targets=*norm*,dora=true"], "--lora r=2,dora=true,targets=all-linear"),
        (["--lora", "r=2,targets=wte,c_attn"], "--lora r=2,targets=all-linear"),
        (["--lora", "targets=self_attn,q_proj"], "--lora 'targets=*.self_attn.*,q_proj'"),
    ):
        with pytest.raises(InputError, match="matches no (linear )?layer of the model") as caught:
            adapted(*words)
        assert caught.value.fix == fix and "model.layers.N.self_attn.q_proj" in str(caught.value)
        assert adapted("--lora", *shlex.split(fix)[-2:] if "_target" in fix else shlex.split(fix)[1:])


@pytest.mark.parametrize(
    "words, fix", [("r=2,targets=lm_head,dora=true", "all-linear"), ("targets=embed_tokens,q_proj", "q_proj")]
)
def test_adapters_on_a_weight_of_two_layers_are_refused_and_patterns_leave_it_out(words, fix):
    def tied(words):
        model = small_llama(tie_word_embeddings=True)
        return add_adapters(
            model, settle(get_task("causal-lm"), ["--data", "x.txt", "--lora", words]).args, "CAUSAL_LM"
        )

    with pytest.raises(InputError, match="has the same weight") as caught:
        tied(words)
    assert caught.value.fix.endswith(f"targets={fix}") and ("dora" in words) == ("dora=true" in caught.value.fix)
    assert tied(caught.value.fix.split()[1])
    names = [name for name, _ in tied("r=2,targets=*").named_parameters() if ".lora_A" in name]
    assert len(names) == 14 and not any("embed" in name or "head" in name for name in names)


def test_dora_and_rank_stabilised_scales_come_from_peft():
    model = adapted("--lora", "r=4,alpha=8,dora=true,rslora=true")
    layer = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    assert layer.scaling["default"] == 8 / 4**0.5 and "default" in layer.lora_magnitude_vector


# ------------------------------------------------------------------------------------------------- checkpoints

LORA_RUN = "--block_size 32 --batch 4 --max_steps 4 --save_strategy steps --save_steps 1 --lr 1e-2 --threads 1"


def lora_words(tmp_path, *more):
    data = write_text(tmp_path / "lines.txt", lines(120))
    words = ["train", "causal-lm", "--data", data, "--model", tiny_gpt2(tmp_path / "gpt2"), "--no_rehearsal"]
    return [*words, *LORA_RUN.split(), "--lora", "r=4,alpha=8,dropout=0.1,dora=true", *more]


def test_a_killed_run_with_adapters_resumes_bit_for_bit_from_checkpoints_without_the_base(tmp_path):
    words = lora_words(tmp_path, "--dropout", 0.1)
    whole = check_kill(tmp_path, words, 3)
    (*_, newest) = sorted((whole / "checkpoints").glob("step-*"))
    saved = read(newest).model
    assert {name.partition(".lora_")[1] for name in saved} == {".lora_"}
    base = sum(tensor.nbytes for tensor in load_file(tmp_path / "gpt2" / "model.safetensors").values())
    assert sum(tensor.nbytes for tensor in saved.values()) < base / 2
    kept = json.loads((whole / "model/skeleton/base.json").read_text())
    assert kept["model"] == str(tmp_path / "gpt2")
    assert kept["sha256"] == {
        "model.safetensors": sha256((tmp_path / "gpt2/model.safetensors").read_bytes()).hexdigest()
    }


def test_a_changed_base_is_refused_on_resume_and_a_moved_one_is_found(tmp_path):
    words = lora_words(tmp_path, "--out", "run")
    run_lines(words, folder=tmp_path, failpoint="after_optimizer_step:3:kill")
    base = (tmp_path / "gpt2").rename(tmp_path / "elsewhere")
    code, said = run_lines(["resume", "run"], folder=tmp_path)
    assert code != 0 and "gpt2 does not exist" in said and "give the folder it is in now as --model" in said, said
    weights = load_file(base / "model.safetensors")
    changed = {**weights, "transformer.wpe.weight": weights["transformer.wpe.weight"].clone()}
    changed["transformer.wpe.weight"][0, 0] += 1
    save_file(changed, base / "model.safetensors", {"format": "pt"})
    code, said = run_lines(["resume", "run", "--model", base], folder=tmp_path)
    assert code != 0 and "error[resume.model]" in said and "model.safetensors: sha256" in said, said
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    for verb in (["evaluate", "run"], ["predict", "run", "a b c"], ["export", "run", "--to", "merged", "--merge"]):
        code, said = run_lines(verb, folder=tmp_path)
        assert code != 0 and "give the folder it is in now as --model" in said, said
        code, said = run_lines([*verb, "--model", base], folder=tmp_path)
        assert code == 0, said
    code, said = run_lines(["resume", "run", "--model", base], folder=tmp_path)
    assert code == 0 and "resume  T0" in said and "T2" not in said, said


def test_embeddings_that_were_resized_and_new_heads_are_in_the_checkpoints(tmp_path):
    from transformers import AutoTokenizer

    words = lora_words(tmp_path, "--out", "run")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "gpt2")
    tokenizer.add_tokens([f"<new{number}>" for number in range(1200)])
    tokenizer.save_pretrained(tmp_path / "gpt2")
    run_lines(words, folder=tmp_path, failpoint="after_optimizer_step:3:kill")
    code, said = run_lines(["resume", "run"], folder=tmp_path)
    assert code == 0 and "resume  T0" in said, said
    (*_, newest) = sorted((tmp_path / "run/checkpoints").glob("step-*"))
    kept = {name.removeprefix("base_model.model.") for name in read(newest).model if ".lora_" not in name}
    assert kept == {"transformer.wte.weight", "lm_head.weight"}


# ----------------------------------------------------------------------------------------------------- merging


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    code, said = run_lines(lora_words(folder, "--out", "run"), folder=folder)
    assert code == 0, said
    return api.Run.find(folder / "run")


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(20)[None]).logits


def test_merged_and_alone_the_exported_adapters_compute_the_same(lora_run, tmp_path, capsys):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    assert main(["export", str(lora_run.path), "--to", str(tmp_path / "merged"), "--merge"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{tmp_path / 'merged'}\n" and "(tolerance 0.0001, fp32)" in printed.err
    assert main(["export", str(lora_run.path), "--to", str(tmp_path / "alone"), "--adapters"]) == 0
    assert not (tmp_path / "alone/model.safetensors").exists()
    base = AutoModelForCausalLM.from_pretrained(lora_run.path.parent / "gpt2")
    before = logits(base)
    with_adapters = logits(PeftModel.from_pretrained(base, tmp_path / "alone"))
    whole = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    assert (whole - with_adapters).abs().max() < 1e-4 * whole.abs().max()
    assert (whole - before).abs().max() > 1e-2 * whole.abs().max()
    config = json.loads((tmp_path / "alone/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(lora_run.path.parent / "gpt2")
    assert_same_files(tmp_path / "merged", lora_run.path / "model", "model.safetensors")


def assert_opens_as_its_card_says(folder, whole):
    """Run the lines of a model card, and compare the model with the merged one of the run; return it."""
    names = {}
    code = re.search("```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)[1]
    exec(code.replace("FOLDER", str(folder)), names)
    model = names["model"]
    merged = type(model.get_base_model()).from_pretrained(whole)
    ids = torch.arange(len(merged.get_input_embeddings().weight) - 60, len(merged.get_input_embeddings().weight))[None]
    with torch.no_grad():
        one, other = (each.eval()(input_ids=ids).logits for each in (merged, model))
    assert one.shape == other.shape and (one - other).abs().max() < 1e-4 * one.abs().max()
    return model, merged, names["tokenizer"]


@pytest.mark.parametrize("spare", [0, 40])
def test_adapters_with_trained_embeddings_open_as_their_card_says(spare, tmp_path):
    from transformers import AutoModelForCausalLM, pipeline

    tiny_decoder(tmp_path / "base", template=None)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    base.resize_token_embeddings(base.config.vocab_size + spare)
    base.save_pretrained(tmp_path / "base")
    words = ["train", "chat", "--data", write_dialogues(tmp_path), "--model", tmp_path / "base", "--out", "run"]
    words += [
        "--lora",
        "r=2",
        "--chat_template",
        "chatml",
        "--lr",
        1e-1,
        "--max_steps",
        4,
        "--batch",
        4,
        "--max_length",
        128,
    ]
    export = ["export", "run", "--to", "alone", "--adapters"]
    code, said = run_lines(words, folder=tmp_path)
    assert code == 0, said
    base = (tmp_path / "base").rename(tmp_path / "moved")
    code, said = run_lines(export, folder=tmp_path)
    assert code != 0 and "give the folder it is in now as --model" in said, said
    code, said = run_lines([*export, "--model", "moved"], folder=tmp_path)
    assert code == 0 and re.fullmatch(r"outputs of the exported adapters differ by .*fp32\)\nalone\n", said), said
    model, merged, tokenizer = assert_opens_as_its_card_says(tmp_path / "alone", tmp_path / "run/model")
    assert model.generation_config.eos_token_id == merged.generation_config.eos_token_id
    assert len(model.generation_config.eos_token_id) == 2
    turn, answer = [{"role": "user", "content": "add 1"}], {"max_new_tokens": 4, "do_sample": False}
    texts = [pipeline("text-generation", each, tokenizer=tokenizer)(turn, **answer) for each in (model, merged)]
    assert texts[0] == texts[1]
    code, said = run_lines(["predict", "run", "a text", "--model", "moved"], folder=tmp_path)
    assert code != 0 and "error[args.value]: --model has no effect" in said, said


def test_adapters_with_new_layers_and_labels_open_as_their_card_says(tmp_path):
    made = [{**row, "stars": ("pos", "neg", "none")[number % 3]} for number, row in enumerate(rows(60))]
    words = ["train", "text-classification", "--data", write_csv(tmp_path / "d.csv", made), "--out", "run"]
    words += ["--model", tiny_bert(tmp_path / "base"), "--lora", "--max_steps", 2, "--threads", 1]
    code, said = run_lines(words, ["export", "run", "--to", "alone", "--adapters"], folder=tmp_path)
    assert code == 0, said
    model, _, _ = assert_opens_as_its_card_says(tmp_path / "alone", tmp_path / "run/model")
    assert list(model.config.id2label.values()) == ["neg", "none", "pos"]


def test_adapters_of_random_weights_are_not_exported_alone(tmp_path):
    data = write_text(tmp_path / "lines.txt", lines(60))
    flags = {"block_size": 32, "vocab_size": 300, "max_steps": 1, "rehearsal": False, "quiet": True, "lora": True}
    run = api.train("causal-lm", data=data, output_dir=tmp_path / "run", **flags)
    with pytest.raises(InputError, match="from random weights") as caught:
        run.export(tmp_path / "to", adapters=True)
    assert caught.value.fix == "leave out --adapters" and run.export(tmp_path / "to")


def test_no_library_logs_on_the_terminal_when_adapters_are_trained_with_checkpointing(tmp_path):
    words = ["train", "text-classification", "--data", write_csv(tmp_path / "d.csv", rows(60)), "--out", "run"]
    words += ["--model", tiny_decoder(tmp_path / "base"), "--max_steps", 1, "--lora", "--gradient_checkpointing"]
    code, said = run_lines(words, folder=tmp_path)
    assert code == 0 and "use_cache" not in said and "Failed to load" not in said, said


def test_a_merge_that_changes_the_outputs_is_refused_with_figures(lora_run, tmp_path, monkeypatch):
    from peft.tuners.lora.layer import Linear

    monkeypatch.setattr(Linear, "merge", lambda layer, **options: None)  # as if merging forgot the adapters
    with pytest.raises(InputError, match=r"differ by \d\.\de[-+]\d\d of the largest \(tolerance 0.0001") as caught:
        lora_run.export(tmp_path / "merged", merge=True)
    assert caught.value.code == "model.merge" and not (tmp_path / "merged").exists()


def test_a_run_without_adapters_has_nothing_to_merge(tmp_path):
    data = write_text(tmp_path / "lines.txt", lines(60))
    flags = {"block_size": 32, "vocab_size": 300, "max_steps": 1, "rehearsal": False, "quiet": True}
    run = api.train("causal-lm", data=data, output_dir=tmp_path / "run", **flags)
    for flag in ("merge", "adapters"):
        with pytest.raises(InputError, match=f"--{flag}: .* has no adapters") as caught:
            run.export(tmp_path / "to", **{flag: True})
        assert caught.value.fix == f"leave out --{flag}"


# ---------------------------------------------------------------------------------------------- 4-bit base weights


def test_weights_in_4_bits_need_adapters_a_pretrained_model_and_bitsandbytes(tmp_path, monkeypatch):
    from loopwright.tasks import adapters

    data = write_text(tmp_path / "lines.txt", lines(60))
    with pytest.raises(InputError, match="needs --lora") as caught:
        api.train("causal-lm", data=data, load_in="4bit")
    assert caught.value.fix == "--lora   or   leave out --load_in"
    with pytest.raises(InputError, match="^error.*: load_in must be one of 4bit"):
        api.train("causal-lm", data=data, load_in="3bit", lora=True)
    monkeypatch.setattr(adapters, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="needs bitsandbytes") as caught:
        api.train("causal-lm", data=data, load_in="4bit", lora=True)
    assert caught.value.code == "install.extra" and caught.value.fix == "pip install 'loopwright[qlora]'"


def test_a_run_on_4_bit_weights_resumes_bit_for_bit_and_merges_into_what_they_stand_for(tmp_path, capsys):
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM

    words = lora_words(tmp_path, "--load_in", "4bit")
    small_llama(hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / "gpt2")
    whole = check_kill(tmp_path, words, 3)
    (*_, newest) = sorted((whole / "checkpoints").glob("step-*"))
    assert {name.partition(".lora_")[1] for name in read(newest).model} == {".lora_"}
    assert main(["export", str(whole), "--to", str(tmp_path / "merged"), "--merge"]) == 0
    assert "(tolerance 0.01, fp32 from 4-bit weights)" in capsys.readouterr().err
    config = json.loads((tmp_path / "merged/config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert "quantization_config" not in config and model.lm_head.weight.dtype is torch.float32
    with pytest.raises(InputError, match="is for pretrained models"):
        api.train("causal-lm", data=tmp_path / "lines.txt", load_in="4bit", lora=True)
