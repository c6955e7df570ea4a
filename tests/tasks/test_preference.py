"""preference end to end: what is learnt, the kept reference, killed runs, files, evaluation, bad input."""

import json

import numpy as np
import pytest
import torch

from loopwright import api
from loopwright.errors import ConfigError, InputError, LoopwrightError
from loopwright.run_folder import read_json
from loopwright.sources.chats.pairs import Pair
from loopwright.tasks.text.preference.answers import (
    PairCollator,
    PairDataset,
    PairEncoder,
    answer_log_probs,
    as_messages,
)
from loopwright.tasks.text.preference.losses import PreferenceLoss
from loopwright.tasks.text.preference.reference import FILE
from tasks.conftest import FLAGS
from tasks.pairs import CHATML, COLOURS, chat_rows, text_rows, whole_rows, write_model
from tasks.recomputed import assert_recomputed
from tasks.reviews import read_lines, write_jsonl
from tasks.runs import check_kill, refusal, train_in

TRAINING = {**FLAGS, "epochs": 3, "batch": 8, "lr": 3e-3, "rehearsal": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a model and pairs; it must be left as it is."""
    folder = tmp_path_factory.mktemp("preference")
    write_model(folder / "model")
    write_jsonl(folder / "train.jsonl", chat_rows(160))
    write_jsonl(folder / "validation.jsonl", chat_rows(60, seed=1))
    return folder


@pytest.fixture(scope="module")
def learnt(folder):
    files = {"train_file": folder / "train.jsonl", "validation_file": folder / "validation.jsonl"}
    return train_in(folder, "preference", model=folder / "model", **files, **TRAINING)


def test_the_chosen_answers_are_preferred_and_both_rewards_are_written(learnt):
    baselines = learnt.result["baselines"]
    assert set(baselines) == {"chance", "longer answer", "shorter answer", "reference model"}
    assert learnt.metrics["reward_accuracy"] > max(each["reward_accuracy"] for each in baselines.values()) + 0.1
    assert {"reward_accuracy", "reward_margin", "loss"} <= set(learnt.result["intervals"])
    predictions = read_lines(learnt.path / "eval" / "predictions.jsonl")
    margins = [each["chosen_reward"] - each["rejected_reward"] for each in predictions]
    assert learnt.metrics["reward_margin"] == pytest.approx(np.mean(margins))
    assert learnt.metrics["reward_accuracy"] == pytest.approx(np.mean(np.array(margins) > 0))
    assert_recomputed(learnt)
    losses = -torch.tensor(margins).sigmoid().log()
    assert [each["loss"] for each in predictions] == pytest.approx(losses.tolist(), rel=1e-4)
    assert all(each["prompt"].startswith("user: it is") for each in predictions)
    first = (learnt.path / "samples" / "train_batch0.txt").read_text()
    assert "chosen: " in first and "<|im_end|>" in first


def test_files_and_typed_pairs_get_the_rewards_of_the_evaluation(learnt, folder):
    predictions = read_lines(learnt.path / "eval" / "predictions.jsonl")
    found = learnt.predict(folder / "validation.jsonl")
    assert [each["chosen_reward"] for each in found] == pytest.approx(
        [each["chosen_reward"] for each in predictions], abs=2e-6
    )
    row = chat_rows(1, seed=1)[0]
    texts = [row[side][0]["content"] for side in ("prompt", "chosen", "rejected")]
    (typed,) = learnt.predict(texts)
    assert typed == pytest.approx({**found[0]}) and set(typed) == {
        *("preferred", "margin", "chosen_reward", "rejected_reward")
    }
    (turned,) = learnt.predict([{"prompt": texts[0], "chosen": [row["rejected"][0]], "rejected": [row["chosen"][0]]}])
    assert turned["margin"] == pytest.approx(-typed["margin"], abs=1e-5) and turned["preferred"] != typed["preferred"]
    same = {"prompt": texts[0], "chosen": "a", "rejected": "a"}
    bad = learnt.predict([same, {**same, "rejected": "b"}])
    assert bad[0]["error"].startswith("data.pair") and bad[1]["preferred"] in ("chosen", "rejected")
    assert all(each["error"] for each in learnt.predict(["q\t\tb", "q\tb\tb ", " \ta\tb"]))
    with pytest.raises(InputError):
        learnt.predict(texts[:2])


def test_prompts_are_answered_at_each_evaluation_and_in_a_dialogue(learnt):
    samples = read_lines(learnt.path / "eval" / "samples.jsonl")
    assert [len(line["samples"]) for line in samples] == [3, 3, 3]  # of three epochs
    assert samples[0]["samples"][0]["true"] in COLOURS or "indeed" in samples[0]["samples"][0]["true"]
    dialogue = api.open_dialogue(learnt.folder, "Be brief", {"max_new_tokens": 4})
    said = []
    assert dialogue.answer("it is red, so", said.append) == "".join(said).strip()


def test_other_rows_are_evaluated_with_the_model_that_the_run_began_with(learnt, folder):
    whole = learnt.evaluate()
    assert whole == learnt.metrics
    path = write_jsonl(folder / "other.jsonl", chat_rows(20, seed=2))
    found = learnt.evaluate(path)
    rewards = [each["chosen_reward"] for each in read_lines(learnt.path / "eval" / "other" / "predictions.jsonl")]
    assert found["chosen_reward"] == pytest.approx(np.mean(rewards)) and found["reward_accuracy"] > 0.5


def test_transformers_opens_the_model_and_it_ends_its_turns(learnt):
    from transformers import pipeline

    generate = pipeline("text-generation", model=str(learnt.path / "model"))
    assert generate.tokenizer.chat_template
    ends = generate.model.generation_config.eos_token_id
    assert ends[0] == generate.tokenizer.convert_tokens_to_ids("<|im_end|>")
    (answer,) = generate([{"role": "user", "content": "it is red, so"}], max_new_tokens=4)
    assert answer["generated_text"][-1]["role"] == "assistant"


@pytest.mark.parametrize("lora", [[], ["--lora"]], ids=["full", "lora"])
def test_a_killed_run_resumes_to_the_same_bits_and_reads_the_same_reference(lora, folder, tmp_path):
    files = ["--train_file", folder / "train.jsonl", "--validation_file", folder / "validation.jsonl"]
    words = ["train", "preference", *files, "--model", folder / "model", "--max_train_samples", 48]
    words += ["--epochs", 2, "--batch", 8, "--lr", 1e-3, "--threads", 1, "--no_rehearsal", *lora]
    words += ["--temperature", 0.8, "--max_new_tokens", 8]
    whole = check_kill(
        tmp_path,
        [*words, "--save_strategy", "steps", "--save_steps", 2],
        7,
        FILE,
        "model/SHA256SUMS",
        "eval/samples.jsonl",
    )
    assert "T2" not in (whole / "log.txt").read_text()  # generating leaves nothing behind
    rows = read_json(whole / FILE)["log_probs"]
    assert len(rows) == 2  # training and validation


@pytest.mark.parametrize("lora", ["r=2", ""])
def test_tokens_that_a_template_adds_are_trained_beside_adapters_and_no_others(lora, folder, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = write_model(tmp_path / "model", template=None)
    files = {"train_file": folder / "train.jsonl", "validation_file": folder / "validation.jsonl"}
    flags = {**TRAINING, "epochs": 1, "max_train_samples": 32, "weight_decay": 0.1, "chat_template": "zephyr"}
    flags |= {"model": model, "lora": lora, **files}
    runs = [
        api.train("preference", output_dir=tmp_path / name, **{**flags, "lr": lr})
        for name, lr in (("still", 0.0), ("trained", 1e-2))
    ]
    start, after = (
        AutoModelForCausalLM.from_pretrained(each.folder.model).get_input_embeddings().weight for each in runs
    )
    tokenizer = AutoTokenizer.from_pretrained(runs[1].folder.model)
    num_old = AutoModelForCausalLM.from_pretrained(model).get_input_embeddings().weight.shape[0]
    new = tokenizer.convert_tokens_to_ids(["<|user|>", "<|assistant|>"])
    assert min(new) >= num_old
    assert all(not torch.equal(start[token], after[token]) for token in new)
    assert torch.equal(start[:num_old], after[:num_old]) == bool(lora)


def test_a_damaged_reference_is_computed_again_and_another_model_is_refused(folder, tmp_path):
    flags = {**TRAINING, "epochs": 1, "max_train_samples": 32, "max_eval_samples": 8, "save_strategy": "steps"}
    flags |= {"save_steps": 2, "lr_scheduler_type": "constant", "model": tmp_path / "model"}
    files = {"train_file": folder / "train.jsonl", "validation_file": folder / "validation.jsonl"}
    write_model(tmp_path / "model")
    whole = api.train("preference", output_dir=tmp_path / "whole", **files, **{**flags, "epochs": 2})
    part = api.train("preference", output_dir=tmp_path / "part", **files, **flags)
    kept = (part.path / FILE).read_text()
    (part.path / FILE).write_text(kept.replace('"log_probs"', '"log-probs"'))
    config = part.folder.config.read_text()
    for changes in ({"lora": "r=2"}, {"chosen_column": "rejected"}, {"freeze": "backbone"}):
        with pytest.raises(LoopwrightError):
            api.resume(part.path, epochs=2, quiet=True, **changes)
    assert part.folder.config.read_text() == config  # of a run that can be resumed
    resumed = api.resume(part.path, epochs=2, quiet=True, max_new_tokens=5)
    log = (part.path / "log.txt").read_text()
    assert "reference.json is damaged" in log and "max_new_tokens: 64 -> 5" in log
    assert "max_new_tokens: 5 " in part.folder.config.read_text()
    assert resumed.metrics == whole.metrics
    assert read_json(part.path / FILE) == read_json(whole.path / FILE)
    write_model(tmp_path / "model", seed=1)
    with pytest.raises(InputError) as raised:
        resumed.evaluate(write_jsonl(tmp_path / "other.jsonl", chat_rows(12, seed=3)))
    assert raised.value.code == "resume.model" and resumed.evaluate() == resumed.metrics
    write_model(tmp_path / "moved")
    (tmp_path / "model").rename(tmp_path / "away")
    with pytest.raises(InputError, match="the base model of this run cannot be opened") as raised:
        resumed.evaluate(tmp_path / "other.jsonl")
    assert raised.value.fix.endswith("give the folder it is in now as --model")
    assert resumed.evaluate(tmp_path / "other.jsonl", model=tmp_path / "moved")


def test_log_probabilities_do_not_depend_on_the_batch(folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    pairs = [Pair(**row) for row in text_rows(5)]
    pairs += [as_messages(pair) for pair in pairs]
    samples = [{**PairEncoder(tokenizer)({"pair": pair}), "position": place} for place, pair in enumerate(pairs)]
    collate = PairCollator(tokenizer.pad_token_id)
    with torch.no_grad():
        together, counts = answer_log_probs(model, collate(samples))
        alone = torch.cat([answer_log_probs(model, collate([each]))[0] for each in samples])
    assert torch.allclose(together, alone, atol=1e-5)
    ids = samples[0]["input_ids"][0]
    log_probs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    start = samples[0]["start"]
    expected = sum(float(log_probs[place - 1, ids[place]].detach()) for place in range(start, len(ids)))
    assert float(together[0, 0]) == pytest.approx(expected, abs=1e-4)
    assert counts[0].tolist() == [len(each) - start for each in samples[0]["input_ids"]]
    assert tokenizer.decode(ids[start:]) == pairs[0].chosen + "<|endoftext|>"


@pytest.mark.parametrize("lora", ["", "r=2"])
def test_a_run_learns_alike_with_logits_in_chunks(lora, folder, tmp_path, monkeypatch):
    from loopwright.tasks.text import chunked_loss

    sizes = []
    linear = torch.nn.functional.linear
    monkeypatch.setattr(
        chunked_loss.functional, "linear", lambda *args: sizes.append(len(args[0])) or linear(*args), raising=True
    )
    files = {"train_file": folder / "train.jsonl", "validation_file": folder / "validation.jsonl"}
    flags = {**TRAINING, "max_steps": 4, "optim": "sgd", "lr": 0.1, "lora": lora, "model": folder / "model", **files}
    full, chunked = (
        api.train("preference", output_dir=tmp_path / each, **{**flags, "loss_chunk": each}) for each in ("off", "13")
    )
    assert 13 in sizes
    assert chunked.metrics == pytest.approx(full.metrics, rel=1e-5)
    for one, other in zip(full.model.parameters(), chunked.model.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_what_a_template_writes_after_an_answer_counts_unless_its_turn_is_the_end(learnt, folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    row = {"pair": as_messages(Pair(**text_rows(1)[0]))}
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    whole, cut = PairEncoder(tokenizer)(row), PairEncoder(tokenizer, end=end)(row)
    assert whole["start"] == cut["start"]
    for long, short in zip(whole["input_ids"], cut["input_ids"], strict=True):
        assert tokenizer.decode(long[len(short) :]) == "\n" and short[-1] == end and long[: len(short)] == short
    assert "--answer_end turn leaves it out" in (learnt.path / "log.txt").read_text()
    files = {"train_file": folder / "train.jsonl", "validation_file": folder / "validation.jsonl"}
    flags = {**TRAINING, "epochs": 1, "max_train_samples": 16, "max_eval_samples": 8, "answer_end": "turn"}
    run = api.train("preference", model=folder / "model", **files, **flags)
    assert "--answer_end" not in (run.path / "log.txt").read_text()
    assert "<|im_end|>\n\nrow" in (run.path / "samples" / "train_batch0.txt").read_text()


def test_what_the_template_drops_of_pairs_is_counted(folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    (row,) = chat_rows(1)
    brief = Pair(**{**row, "prompt": [{"role": "system", "content": "Be brief"}, *row["prompt"]]})
    rows = [{"pair": each} for each in (Pair(**row), brief, Pair(**row, tools=[{"type": "function", "function": {}}]))]
    notes = PairDataset(rows, PairEncoder(tokenizer), 128, "refuse").notes(128)
    assert [note.partition(" pairs")[0] for note in notes] == ["training: the template drops texts or tools of 1 of 3"]
    tokenizer.chat_template = f"{{% set messages = messages | rejectattr('role', 'equalto', 'system') %}}{CHATML}"
    notes = PairDataset(rows, PairEncoder(tokenizer), 128, "refuse").notes(128)
    assert [note.partition(" pairs")[0] for note in notes] == ["training: the template drops texts or tools of 2 of 3"]


def test_label_smoothing_and_simpo_follow_their_formulas():
    log_probs, counts = torch.tensor([[-3.0, -4.0]]), torch.tensor([[2, 4]])
    reference = torch.tensor([[-3.5, -3.0]])
    logit = torch.tensor(0.5 * ((-3.0 + 3.5) - (-4.0 + 3.0)))
    found = PreferenceLoss("dpo", 0.5, label_smoothing=0.2)(log_probs, counts, reference)
    assert float(found.losses) == pytest.approx(float(-0.8 * logit.sigmoid().log() - 0.2 * (-logit).sigmoid().log()))
    assert found.rewards.tolist() == [[0.25, -0.5]]
    found = PreferenceLoss("simpo", 2.0, gamma=0.5)(log_probs, counts)
    logit = torch.tensor(2.0 * (-3.0 / 2 + 4.0 / 4) - 0.5)
    assert float(found.losses) == pytest.approx(float(-logit.sigmoid().log())) and found.rewards.tolist() == [[-3, -2]]


def test_simpo_needs_no_reference_and_a_model_from_scratch_learns(tmp_path):
    data = write_jsonl(tmp_path / "pairs.jsonl", whole_rows(120))
    run = api.train("preference", data=data, loss="simpo", **{**TRAINING, "lr": 2e-3, "epochs": 4})
    assert not (run.path / FILE).exists() and "reference model" not in run.result["baselines"]
    assert run.metrics["reward_accuracy"] > 0.6
    assert len(run.predict(data)) == 120


def test_bad_input_is_refused_with_the_row_and_a_fix(folder, tmp_path):
    data = write_jsonl(tmp_path / "pairs.jsonl", text_rows(40))
    defaults = {"data": data, "model": folder / "model", **TRAINING}
    told = refusal("preference", defaults, "model.length", max_length=8)
    assert "34 of 36 training pairs are longer than 8 tokens" in told
    assert "positions for 128" in refusal("preference", defaults, "model.length", max_length=1000)
    lora = {"lora": "r=2", "trained_tokens": ["<|im_ends|>", "<|pad|>"]}
    assert "--trained_tokens '<|pad|>' '<|im_end|>'" in refusal("preference", {**defaults, **lora}, "args.value")
    refusal("preference", {**defaults, "trained_tokens": ["pink"]}, "args.value")
    assert "the rows are texts" in refusal("preference", defaults, "args.value", chat_template="chatml")
    for flags in ({"gamma": 1.0}, {"loss": "ipo", "label_smoothing": 0.1}):
        with pytest.raises(ConfigError):
            api.train("preference", **{**defaults, **flags})
    alike = [{**row, **{side: f" as all know{row[side]}" for side in ("chosen", "rejected")}} for row in text_rows(40)]
    long = {"data": write_jsonl(tmp_path / "alike.jsonl", alike), "overlong": "truncate", "max_length": 10}
    assert "leave out --max_length" in refusal("preference", {**defaults, **long}, "model.length")
    run = api.train("preference", **{**defaults, "max_length": 10, "overlong": "truncate"})
    assert any("truncated" in line for line in (run.path / "log.txt").read_text().splitlines())


def test_a_model_without_a_head_is_refused(tmp_path):
    from transformers import AutoModel

    model = write_model(tmp_path / "model")
    AutoModel.from_pretrained(model).save_pretrained(model)
    data = write_jsonl(tmp_path / "pairs.jsonl", text_rows(40))
    assert "without the lm_head" in refusal("preference", {"data": data, "model": model, **TRAINING}, "model.task")


def test_a_tokenizer_without_a_template_is_refused_with_the_built_in_ones(folder, tmp_path):
    model = write_model(tmp_path / "model")
    (model / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": None}))
    data = write_jsonl(tmp_path / "pairs.jsonl", chat_rows(40))
    defaults = {"data": data, "model": model, **TRAINING, "epochs": 1}
    assert "--chat_template chatml" in refusal("preference", defaults, "model.chat_template")
    run = api.train("preference", chat_template="chatml", **defaults)
    assert "im_end" in json.dumps(read_lines(run.path / "eval" / "predictions.jsonl")) or run.metrics["loss"] > 0


def test_a_run_on_4_bit_weights_resumes_with_added_tokens_and_scores_other_rows(folder, tmp_path):
    pytest.importorskip("bitsandbytes")
    files = {"train_file": folder / "train.jsonl", "validation_file": folder / "validation.jsonl"}
    flags = {**TRAINING, "max_train_samples": 32, "max_eval_samples": 8, "lora": "r=2", "load_in": "4bit"}
    flags |= {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant", "chat_template": "zephyr"}
    flags |= {"model": write_model(tmp_path / "model", template=None, hidden_size=64), **files}
    whole = api.train("preference", output_dir=tmp_path / "whole", **{**flags, "epochs": 2})
    part = api.train("preference", output_dir=tmp_path / "part", **{**flags, "epochs": 1})
    assert api.resume(part.path, epochs=2, quiet=True).metrics == whole.metrics
    kept = read_json(whole.path / FILE)
    assert part.evaluate(write_jsonl(tmp_path / "other.jsonl", chat_rows(12, seed=3)))["loss"] > 0
    assert len(part.predict(folder / "validation.jsonl")) == 60
    assert kept["is_quantized"] and read_json(part.path / FILE)["weights"] == kept["weights"]
    part.export(tmp_path / "merged", merge=True)
