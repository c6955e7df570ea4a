"""chat end to end: packing, the right sums, pretrained models, added tokens, predictions, export, bad input."""

import html
import io
import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from graphs.flash import kernel
from loopwright import api
from loopwright.cli import main
from loopwright.data import packing, results
from loopwright.demos.dialogue_rows import dialogue_rows, right_answer
from loopwright.engine import segments
from loopwright.errors import InputError
from loopwright.run_folder import RunFolder
from loopwright.runs.console.screen import Screen
from loopwright.runs.resume import resume_run
from loopwright.runs.trained_model import load_run
from loopwright.sources.chats import Chat, read_chat
from loopwright.tasks.data import RowDataset
from loopwright.tasks.text import chat
from loopwright.tasks.text import conversations as chats
from loopwright.tasks.text import language_model as language
from loopwright.tasks.text import models as text_models
from loopwright.tasks.text.causal_lm import PackedLines
from loopwright.tasks.text.chat import PAD_TOKEN
from tasks.dialogues import FLAGS, dialogues, tiny_decoder, write_dialogues
from tasks.recomputed import assert_recomputed
from tasks.reviews import read_lines, write_jsonl
from tasks.runs import check_kill, refusal, train_in

END = "<|im_end|>"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_decoder(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    folder = tmp_path_factory.mktemp("learnt")
    data = write_dialogues(folder, 200)
    flags = {**FLAGS, "max_steps": 40, "vocab_size": 400, "exact_match_rows": 5, "rehearsal": True}
    return train_in(folder, "chat", data=data, **flags)


@pytest.fixture
def data(tmp_path):
    return write_dialogues(tmp_path)


def test_a_small_model_learns_from_scratch_and_beats_the_unigrams(learnt):
    result = learnt.result
    assert result["metric"] == "perplexity" and set(result["baselines"]) == {"unigram", "bigram", "usual answer"}
    for name in ("perplexity", "conversation_perplexity"):
        assert learnt.metrics[name] < 0.5 * result["baselines"]["unigram"][name]
    assert set(result["no_intervals"]) | set(result["intervals"]) >= {"perplexity", "conversation_perplexity"}
    assert_recomputed(learnt)
    log = (learnt.path / "log.txt").read_text()
    assert "conversations packed into rows of 128 tokens" in log and "turns user" in log
    assert "40 updates will hardly do for a model from scratch: --max_steps 500" in log
    evaluations = read_lines(learnt.path / "eval" / "samples.jsonl")
    assert evaluations[-1]["update"] is None and all(len(each["samples"]) == 2 for each in evaluations)
    shown = evaluations[0]["samples"][0]
    assert set(shown) == {"source", "written", "true"} and f"{shown['source']!r} -> " in log
    assert f"lw chat {learnt.path}\n" in log
    first = (learnt.path / "samples" / "train_batch0.txt").read_text()
    assert first.count(f".{END}⟧") == first.count("⟦") > 20 and "none of which sees another" in first
    assert f".{html.escape(END)}⟧" in (learnt.path / "report.html").read_text()


def test_the_demo_follows_its_rule_and_holds_out_other_dialogues():
    demo = dialogue_rows()
    for row in [*demo.train[:500], *demo.validation]:
        turns = row["messages"]
        for place, turn in enumerate(turns):
            assert turn["role"] != "assistant" or turn["content"] == right_answer(turns[:place])
    assert len(demo.validation) > 150 and not {str(row) for row in demo.train} & {str(row) for row in demo.validation}


def test_a_sample_asks_for_the_last_answer_whatever_follows_it():
    turns = [{"role": role, "content": role} for role in ("user", "assistant", "user", "assistant", "user")]
    until = chats.until_answer(Chat(turns))
    assert (chats.before_answer(until).messages, chats.last_answer(until)) == (turns[:3], "assistant")
    assert chats.before_answer(Chat(turns)).messages == turns


@pytest.mark.parametrize("way", ["mask", "bounds", "kernel"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_packed_conversations_get_the_logits_that_each_has_alone(kind, way, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    from loopwright.data.chats import ChatEncoder

    folder = tiny_decoder(tmp_path / kind, kind)
    tokenizer = text_models.load_tokenizer(str(folder))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = [{"chat": read_chat(row)} for row in dialogues(12)]
    lines = chats.Conversations(rows, ChatEncoder(tokenizer))
    packed = PackedLines(lines, 128)
    assert chats.separates_packed(model) and len(packed) < len(lines)
    job = type("Job", (), {"model": model, "train_dataset": packed})()
    if way != "mask":
        segments.use_segments(model)
        monkeypatch.setattr(segments, "_flash_kernel", lambda: kernel)
        monkeypatch.setattr(segments, "_is_for_flash", lambda *args: way == "kernel")
        monkeypatch.setattr(packing, "block_diagonal_mask", None)  # not called
    seen = 0
    collate = language.PaddingCollator(pad_id=0, row_width=None if way == "mask" else 128)
    for place, numbers in enumerate(packed.rows.groups):
        batch = collate([packed[place]])
        assert ("segment_bounds" in batch) == (way != "mask")
        with torch.no_grad():
            logits = model(**language.packed_inputs(job, batch)).logits[0]
        for number, row in enumerate(numbers):
            alone = torch.from_numpy(lines[row]["input_ids"])[None]
            with torch.no_grad():
                own = model(alone).logits[0]
            mine = batch["sequence_ids"][0] == number
            assert torch.allclose(logits[mine], own, atol=1e-5, rtol=0)
            assert batch["labels"][0][mine].tolist() == lines[row]["labels"].tolist()
            seen += 1
    assert seen == 12


def test_packed_rows_train_alike_by_bounds_and_by_a_mask(llama, data, monkeypatch):
    flags = {**FLAGS, "data": data, "model": llama, "max_steps": 3, "optim": "sgd", "lr": 0.1, "packing": True}
    runs = [api.train("chat", **flags, lora=lora) for lora in ("", "r=2")]

    def separate_rows(model, training, length):
        segments.use_segments(model)
        return []

    monkeypatch.setattr(language, "separate_rows", separate_rows)
    monkeypatch.setattr(language, "packed_width", lambda training, capacity, **more: capacity)
    monkeypatch.setattr(packing, "block_diagonal_mask", lambda *args: pytest.fail("a mask was made"))
    monkeypatch.setattr(chats, "separates_packed", lambda model: True)
    for run, lora in zip(runs, ("", "r=2"), strict=True):
        own = api.train("chat", **flags, lora=lora)
        for first, second in zip(run.model.parameters(), own.model.parameters(), strict=True):
            assert torch.allclose(first, second, atol=1e-6)
        assert own.metrics == pytest.approx(run.metrics, rel=1e-5)
        assert "loopwright_segments" not in (own.folder.model / "config.json").read_text()


def test_rows_take_bounds_on_cuda_in_half_precision_and_a_mask_elsewhere(llama):
    from transformers import AutoModelForCausalLM, BloomConfig, BloomForCausalLM

    def training(device="cuda", precision="bf16", mode="auto"):
        precisions = {"mixed_precision": precision, "step_mode": mode, "torch_compile": False}
        return SimpleNamespace(device=torch.device(device), **precisions)

    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    for other in (training("cpu"), training(precision="no")):
        assert language.separate_rows(model, other) == [] and not segments.has_segments(model)
    assert language.separate_rows(model, training()) == [] and segments.has_segments(model)
    bloom = BloomForCausalLM(BloomConfig(vocab_size=30, hidden_size=8, n_layer=1, n_head=2))
    (note,) = language.separate_rows(bloom, training())
    assert "by a mask, which is slower: BloomForCausalLM does not take flash attention" in note
    trainings = training("cpu"), training(), training("cpu", mode="compile")
    assert [language.packed_width(each, 64, is_packing=True) for each in trainings] == [None, 64, 64]
    assert language.packed_width(training(), 64, is_packing=False) is None


@pytest.mark.parametrize("window", [16, 200])
def test_packed_conversations_keep_to_the_window_of_a_model(window):
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_hidden_layers": 6}
    config = Gemma3TextConfig(vocab_size=60, hidden_size=16, intermediate_size=16, sliding_window=window, **sizes)
    model = Gemma3ForCausalLM(config).eval()
    for module in model.model.layers:
        module.self_attn.q_proj.weight.data.mul_(30)  # so that the distant tokens matter
    cpu = SimpleNamespace(device=torch.device("cpu"), mixed_precision="no", torch_compile=False, step_mode="eager")
    assert language.why_not_packed(model, 96) is None and language.separate_rows(model, cpu, 96) == []
    assert segments.has_segments(model) == (window == 16)
    width = language.packed_width(cpu, 96, is_packing=True, model=model)
    assert width == (96 if window == 16 else None)
    rows = [torch.randint(0, 60, (size,)).numpy() for size in (50, 30)]
    lines = RowDataset([{"input_ids": ids, "labels": ids} for ids in rows])
    job = type("Job", (), {"model": model, "train_dataset": PackedLines(lines, 96)})()
    batch = language.PaddingCollator(pad_id=0, row_width=width)([job.train_dataset[0]])
    with torch.no_grad():
        logits = model(**language.packed_inputs(job, batch)).logits[0]
        for number, ids in enumerate(rows):
            own = model(torch.from_numpy(ids)[None]).logits[0]
            assert torch.allclose(logits[batch["sequence_ids"][0] == number], own, atol=1e-5, rtol=0)


def test_a_model_that_would_look_past_its_window_is_not_packed(llama):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llama)
    assert language.why_not_packed(model, 128) is None
    model.config.sliding_window = 16
    assert language.why_not_packed(model, 16) is None and language.why_not_packed(model, 17) is None
    model.set_attn_implementation("eager")
    assert language.why_not_packed(model, 16) is None
    args = SimpleNamespace(packing=True, max_length=17, tokens_per_update=None)
    with pytest.raises(InputError) as caught:
        chat._choose_packing(args, model, True)
    assert caught.value.fix == "--no_packing" and "the last 16 tokens" in caught.value.saw[0]
    assert chat._choose_packing(args, model, False) == [] and not args.packing
    model.config.attention_chunk_size = 12
    assert "chunks of 12" in language.why_not_packed(model, 16)


def test_the_loss_is_the_mean_over_trained_tokens_for_every_batch_size(llama, data):
    flags = {**FLAGS, "data": data, "model": llama, "max_steps": 2}
    small, large = (api.train("chat", per_device_eval_batch_size=size, **flags) for size in (3, 32))
    assert large.metrics == pytest.approx(small.metrics, rel=1e-5)
    total = count = 0.0
    means = []
    model, tokenizer = small.model, text_models.load_tokenizer(str(small.folder.model))
    for row in small.folder and api.DataPlan.read(small.folder.data).rows("validation"):
        ids, labels = _trained(tokenizer, row["chat"])
        with torch.no_grad():
            loss = model(input_ids=ids, labels=labels).loss.item()
        num = int((labels[0, 1:] != -100).sum())
        total, count, means = total + loss * num, count + num, [*means, loss]
    assert small.metrics["loss"] == pytest.approx(total / count, rel=1e-5)
    assert small.metrics["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-5)
    assert small.metrics["conversation_perplexity"] == pytest.approx(math.exp(np.mean(means)), rel=1e-5)


def _trained(tokenizer, chat):
    """Return tokens and labels of a conversation in ChatML, written down independently."""
    ids, labels = [], []
    for turn in chat.messages:
        head, body, end = (
            tokenizer(part, add_special_tokens=False)["input_ids"]
            for part in (f"<|im_start|>{turn['role']}\n", turn["content"] + END, "\n")
        )
        ids += [*head, *body, *end]
        labels += [*[-100] * len(head), *(body if turn["role"] == "assistant" else [-100] * len(body)), -100]
    return torch.tensor([ids]), torch.tensor([labels])


@pytest.mark.parametrize("packing", [True, False])
def test_accumulated_batches_train_as_one_large_batch_does(llama, data, packing):
    flags = {**FLAGS, "data": data, "model": llama, "max_steps": 3, "optim": "sgd", "packing": packing, "lr": 0.1}
    whole = api.train("chat", **{**flags, "batch": 4})
    parts = api.train("chat", gradient_accumulation_steps=4, **{**flags, "batch": 1})
    for first, second in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        assert torch.allclose(first, second, atol=1e-6)


def test_tokens_per_update_are_packed_rows(llama, data):
    run = api.train("chat", data=data, model=llama, **{**FLAGS, "batch": 2, "max_steps": 1, "tokens_per_update": 1024})
    assert "2 × accum 4 × 1 device = 8" in (run.path / "log.txt").read_text()
    assert ", 0 full epochs, 1 update, " in (run.path / "model" / "README.md").read_text()
    text = refusal("chat", {**FLAGS, "data": data, "model": llama}, "args.value", tokens_per_update=1000)
    assert "--packing --tokens_per_update 896" in text
    flags = {**FLAGS, "data": data, "model": llama, "tokens_per_update": 1024}
    assert "leave out --effective_batch" in refusal("chat", flags, "args.value", effective_batch=9)
    text = refusal("chat", flags, "args.value", batch=3)
    assert "--tokens_per_update 1024: " in text and text.endswith("fix: --tokens_per_update 1152")
    for batch, steps in ((2, 2), (None, 3)):
        text = refusal("chat", flags, "args.value", batch=batch, gradient_accumulation_steps=steps)
        assert "--tokens_per_update 1024" in text and text.endswith("fix: leave out --gradient_accumulation_steps")
    again = api.resume(run.path, max_steps=2, quiet=True)
    assert again.result["updates"] == 2


def test_a_pretrained_model_gets_a_pad_token_and_ends_its_turns_and_a_pipeline_answers(llama, data, tmp_path):
    from transformers import AutoTokenizer, GenerationConfig, pipeline

    run = api.train("chat", data=data, model=llama, **FLAGS)
    folder = run.export(tmp_path / "exported")
    tokenizer, settings = AutoTokenizer.from_pretrained(folder), GenerationConfig.from_pretrained(folder)
    assert tokenizer.pad_token == PAD_TOKEN and tokenizer.pad_token_id != tokenizer.eos_token_id
    assert settings.eos_token_id[0] == tokenizer.convert_tokens_to_ids(END)
    assert settings.pad_token_id == tokenizer.pad_token_id
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(llama).chat_template
    asked = [{"role": "user", "content": "Where does Ada live?"}]
    answer = pipeline("text-generation", str(folder))(asked, max_new_tokens=6, do_sample=False)[0]["generated_text"]
    assert answer[:-1] == asked and answer[-1]["role"] == "assistant"
    assert run.predict([asked[0]["content"]]) == [{"answer": answer[-1]["content"].strip()}]


@pytest.mark.parametrize("tied", [True, False])
def test_tokens_that_a_template_adds_are_trained_beside_adapters_and_no_others(tied, data, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tiny_decoder(tmp_path / "plain", template=None, tie_word_embeddings=tied)
    run = api.train("chat", data=data, model=folder, chat_template="chatml", lora=True, weight_decay=0.1, **FLAGS)
    before, after = (AutoModelForCausalLM.from_pretrained(each) for each in (folder, run.folder.model))
    tokenizer = AutoTokenizer.from_pretrained(run.folder.model)
    num_old = before.get_input_embeddings().weight.shape[0]
    new = tokenizer.convert_tokens_to_ids(["<|im_start|>", END])
    assert min(new) >= num_old and len(tokenizer) == after.get_input_embeddings().weight.shape[0]
    for name in ("get_input_embeddings", "get_output_embeddings"):
        old, now = getattr(before, name)().weight, getattr(after, name)().weight
        assert torch.equal(old, now[:num_old])
    started = api.train("chat", data=data, model=folder, chat_template="chatml", lora=True, **{**FLAGS, "lr": 0.0})
    start = AutoModelForCausalLM.from_pretrained(started.folder.model).get_input_embeddings().weight
    assert all(not torch.equal(start[token], after.get_input_embeddings().weight[token]) for token in new)


def test_predictions_are_one_per_row_whatever_the_format(learnt, tmp_path, capsys):
    prompts = [row["messages"][:1] for row in dialogues(5)]
    texts = [turns[-1]["content"] for turns in prompts if len(turns) == 1 and turns[0]["role"] == "user"]
    assert len(texts) >= 3
    one_by_one = [learnt.predict([each])[0]["answer"] for each in texts]
    assert [each["answer"] for each in learnt.predict(texts)] == one_by_one
    rows = [{"messages": [{"role": "user", "content": each}]} for each in texts]
    rows += [{"messages": [*rows[0]["messages"], {"role": "assistant", "content": "no"}]}, {"messages": "nothing"}]
    rows.insert(1, {"messages": [{"role": "nobody", "content": "hello"}]})
    rows.insert(2, {"messages": [{"role": "user", "content": "Ada " * 200}]})
    path = write_jsonl(tmp_path / "prompts.jsonl", rows)
    found = learnt.predict(path)
    assert len(found) == len(rows)
    assert [each.get("answer") for each in found[:1] + found[3:-2]] == one_by_one
    assert found[-2]["answer"] == one_by_one[0] and isinstance(found[-1]["answer"], str)
    assert found[1]["error"].startswith("data.chat: line 2 of prompts.jsonl, message 1")
    assert found[2]["error"].startswith("model.length")
    mixed = [{"messages": [], "prompt": texts[0]}, {"conversations": [{"from": "human", "value": texts[1]}]}]
    mixed = learnt.predict(write_jsonl(tmp_path / "mixed.jsonl", [*mixed, {"messages": rows[0]["messages"]}]))
    assert [each["answer"] for each in mixed] == [*one_by_one[:2], one_by_one[0]]
    named = learnt.predict([{"prompt": each} for each in texts])
    assert [each["answer"] for each in named] == one_by_one
    out = tmp_path / "out.jsonl"
    assert main(["predict", str(learnt.path), str(path), "--out", str(out)]) == 0
    assert main(["predict", str(learnt.path), str(tmp_path / "mixed.jsonl")]) == 0
    assert "chat is read from 'messages', 'conversations', 'prompt'" in capsys.readouterr().err
    assert [json.loads(line)["messages"] for line in out.read_text().splitlines()] == [row["messages"] for row in rows]


def test_lw_chat_answers_each_line_and_remembers_until_it_is_reset(learnt, monkeypatch, capsys):
    lines = ["Ben lives in Rome. Ada lives in Oslo.", "Where does Ben live?", "/reset", "Where does Ben live?", "/quit"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join([*lines, "never asked"])))
    assert main(["chat", str(learnt.path), "--max_new_tokens", "8"]) == 0
    told = capsys.readouterr().out.splitlines()
    turns = [{"role": "user", "content": lines[0]}]
    expected = [learnt.predict([{"messages": turns}], max_new_tokens=8)[0]["answer"]]
    turns += [{"role": "assistant", "content": expected[0]}, {"role": "user", "content": lines[1]}]
    expected.append(learnt.predict([{"messages": turns}], max_new_tokens=8)[0]["answer"])
    expected.append(learnt.predict([lines[3]], max_new_tokens=8)[0]["answer"])
    assert [each.strip() for each in told] == [each for answer in expected for each in answer.splitlines()]
    monkeypatch.setattr("sys.stdin", io.StringIO(" ".join(["Ada"] * 200)))
    assert main(["chat", str(learnt.path), "--system", "Answer with the place alone."]) == 0
    assert "/reset starts again" in capsys.readouterr().err


class Echo:
    """A dialogue that repeats what is said; "wait" is interrupted, and "long" is too long."""

    turns: list[str]

    def __init__(self, *_):
        self.reset()

    def reset(self):
        self.turns = []

    def answer(self, said, write):
        write(f"{len(self.turns)} {said}")
        if said == "wait":
            raise KeyboardInterrupt
        if said == "long":
            raise InputError("model.length", "the conversation is too long", saw=["9 tokens"], fix="/reset")
        self.turns.append(said)


@pytest.mark.parametrize(
    "given, said",
    [
        (b"caf\xe9 \xff\xfe\n\xef\xbb\xbf\n \xc3\xa9\n", ["0 caf� ��", "1 é"]),
        (b"a\nwait\nlong\n/reset\nb\n", ["0 a", "1 wait", "1 long", "0 b"]),
        (b"/help\n/rest\n/QUIT\na\n", []),
        (b"/etc/hosts\n/help me\r\n/exit", ["0 /etc/hosts", "1 /help me"]),
        (None, []),
    ],
)
def test_lw_chat_takes_any_bytes_and_explains_its_commands(given, said, learnt, monkeypatch, capsys):
    monkeypatch.setattr(api, "open_dialogue", Echo)
    monkeypatch.setattr("sys.stdin", None if given is None else io.TextIOWrapper(io.BytesIO(given), "ascii"))
    assert main(["chat", str(learnt.path)]) == 0
    told = capsys.readouterr()
    assert told.out.splitlines() == said
    hints = sum(given.count(word) for word in (b"/help\n", b"/rest\n", b"wait", b"long")) if given else 0
    assert len(told.err.strip().splitlines()) == hints


def test_a_turn_that_the_template_refuses_is_left_out_of_the_dialogue(learnt):
    job = load_run(learnt.folder)
    job.processor.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}a"
    dialogue = chats.Dialogue(job, "Be brief")
    with pytest.raises(InputError) as caught:
        dialogue.answer("Hi")
    assert caught.value.code == "model.chat_template" and len(dialogue.messages) == 1
    job.processor.chat_template = None  # as of a run of preference on texts
    with pytest.raises(InputError) as caught:
        chats.Dialogue(job, None)
    assert caught.value.code == "model.chat_template"


def test_lw_chat_is_for_models_that_answer(finished, capsys):
    assert main(["chat", str(finished.path)]) == 2
    assert "error[args.task]" in capsys.readouterr().err


def test_lw_check_marks_the_trained_tokens(llama, data, capsys, monkeypatch):
    words = ["check", "chat", "--data", str(data), "--model", str(llama), "--threads", "1"]
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(words) == 0
    told = capsys.readouterr().out
    turns = api.check("chat", data=data, model=llama, threads=1, quiet=True).rows("train")[0]["chat"].messages
    said = [turn["content"] for turn in turns if turn["role"] == "assistant"]
    assert [f"⟦{each}{END}⟧" in told for each in said] == [True] * len(said)
    assert told.count("⟦") == len(said) and "row 1   <|im_start|>" in told
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(words) == 0
    assert f"\x1b[32m{said[0]}{END}\x1b[0m" in capsys.readouterr().out


def test_a_trained_line_break_after_the_end_of_a_turn_is_noted_and_marked(llama, capsys):
    from loopwright.data.chats import BUILT_IN, ChatEncoder

    tokenizer = text_models.load_tokenizer(str(llama))
    row = {"chat": read_chat({"prompt": "Who?", "completion": "Ada."})}
    for is_marked in (True, False):
        template = BUILT_IN["chatml"] if is_marked else re.sub(r"\{% (end)?generation %\}", "", BUILT_IN["chatml"])
        for train_on, name in (("assistant", "training"), ("assistant", "validation"), ("all", "training")):
            encode = ChatEncoder(tokenizer, chat_template=template, train_on=train_on)
            tail = [each for each in chats.Conversations([row], encode, name).notes() if "never generated" in each]
            is_noted = not is_marked and (train_on, name) == ("assistant", "training")
            assert len(tail) == is_noted and all("'\\n' after the end of a turn" in each for each in tail)
    Screen().marked("row 1", [("Who?\n", False), ("Ada.<|im_end|>\n", True)])
    assert "⟦Ada.<|im_end|>⏎⟧\n" in capsys.readouterr().out


def test_long_conversations_are_refused_truncated_or_dropped_with_counts(llama, data):
    flags = {**FLAGS, "data": data, "model": llama, "max_steps": 1, "max_length": 64, "num_samples": 0}
    text = refusal("chat", flags, "model.length")
    assert "--overlong truncate" in text and "line " in text
    for overlong in ("truncate", "drop"):
        run = api.train("chat", overlong=overlong, **flags)
        log = (run.path / "log.txt").read_text()
        counted = re.search(r"(\d+) training conversations (truncated|dropped): longer than 64 tokens", log)
        assert counted[2] == {"truncate": "truncated", "drop": "dropped"}[overlong] and 0 < int(counted[1]) < 60
    refusal("chat", {**flags, "max_length": 129}, "model.length")


STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}"
    "{% endif %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
)


def encoded(tokenizer, rows, most=None, overlong="refuse", **options):
    from loopwright.data.chats import ChatEncoder

    encode = ChatEncoder(tokenizer, chat_template=STRICT, max_length=most, overlong=overlong)
    return chats.Conversations([{"chat": read_chat(row)} for row in rows], encode, **options)


@pytest.mark.parametrize("fewest", [2_000, 3], ids=["one process", "two processes"])
def test_rows_that_the_template_refuses_are_refused_or_dropped_with_a_count(llama, monkeypatch, fewest):
    monkeypatch.setattr(results, "_FEWEST", fewest)
    monkeypatch.setattr(results, "default_num_workers", lambda dataset: 2)
    tokenizer = text_models.load_tokenizer(str(llama))
    good = [{"prompt": f"Who {number}?", "completion": "Ada."} for number in range(5)]
    twice = {"messages": [{"role": "user", "content": "Hi"}, *read_chat(good[0]).messages]}
    private = {"prompt": "\U00100001", "completion": "Ada."}
    for bad, code in ((twice, "model.chat_template"), (private, "data.chat")):
        for rows in ([bad, *good], [*good, bad]):
            with pytest.raises(InputError) as caught:
                encoded(tokenizer, rows)
            assert caught.value.code == code and caught.value.fix.startswith("--bad_rows drop")
            assert f"row {rows.index(bad) + 1}" in caught.value.what
            found = encoded(tokenizer, rows, bad_rows="drop")
            assert len(found) == 5 and "1 training conversation dropped" in found.notes()[0]
        for options in ({}, {"bad_rows": "drop"}):
            with pytest.raises(InputError) as caught:
                encoded(tokenizer, [bad, bad], **options)
            assert caught.value.code == code and "--bad_rows" not in caught.value.fix
    found = encoded(tokenizer, [{**row, "tools": [{"name": "f"}]} for row in good])
    assert found.notes() == ["the template drops the tools in 5 training conversations"]


def test_conversations_are_the_same_from_several_processes(llama, monkeypatch):
    tokenizer = text_models.load_tokenizer(str(llama))
    rows = [{"prompt": f"Who {number}?", "completion": "Ada " * number} for number in range(100)]
    found = []
    for fewest in (2_000, 3):
        monkeypatch.setattr(results, "_FEWEST", fewest)
        monkeypatch.setattr(results, "default_num_workers", lambda dataset: 2)
        found.append(encoded(tokenizer, rows, 60, "drop"))
    one, two = found
    assert 10 < len(one) == len(two) < 100 and one.notes() == two.notes()
    for first, second in zip(one, two, strict=True):
        assert all(np.array_equal(first[name], second[name]) for name in ("input_ids", "labels"))


def test_the_fixes_for_long_conversations_leave_something_to_train_on(llama):
    tokenizer = text_models.load_tokenizer(str(llama))
    short, cut = {"prompt": "Who?", "completion": "Ada."}, {"prompt": "Who?", "completion": "Ada " * 30}
    hopeless = {"prompt": "Who? " * 30, "completion": "Ada."}
    longest = max(len(each["input_ids"]) + 1 for each in encoded(tokenizer, [cut, hopeless]))
    drop, truncate, longer = "--overlong drop", "--overlong truncate", f"--max_length {longest}"
    for rows, overlong, limit, fixes in (
        ([short, hopeless, cut], "refuse", None, [truncate, drop, longer]),
        ([hopeless, cut], "refuse", longest, [truncate, longer]),
        ([hopeless, cut], "drop", longest - 1, [truncate]),
        ([hopeless], "truncate", 999, [f"--max_length {len(encoded(tokenizer, [hopeless])[0]['input_ids']) + 1}"]),
        ([hopeless], "refuse", 40, ["shorten the conversations in the data file"]),
    ):
        with pytest.raises(InputError) as caught:
            encoded(tokenizer, rows, 40, overlong, limit=limit, name="validation")
        assert caught.value.code == "model.length" and caught.value.fix.split("   or   ") == fixes
        number = len(rows) - (short in rows)
        size = f"{len(rows)} validation conversations" if len(rows) > 1 else "1 validation conversation"
        assert caught.value.what == f"{number} of {size} {'have' if number > 1 else 'has'} more than 40 tokens"
    for overlong, kept in (("truncate", 2), ("drop", 1)):
        assert len(encoded(tokenizer, [short, hopeless, cut], 40, overlong)) == kept


def test_a_run_drops_what_its_template_refuses_and_samples_prompts_with_room(llama, tmp_path):
    (tmp_path / "strict.jinja").write_text(STRICT)
    rows = [{"prompt": f"Who is {number}?" * (1 + 9 * (number % 2)), "completion": "Ada."} for number in range(40)]
    rows += [{"prompt": f"Who is {number}?", "completion": "Ada.", "system": "Be kind."} for number in range(20)]
    data = write_jsonl(tmp_path / "chats.jsonl", rows)
    flags = {**FLAGS, "data": data, "model": llama, "max_steps": 1, "max_new_tokens": 80, "num_samples": 9}
    flags["chat_template"] = tmp_path / "strict.jinja"
    text = refusal("chat", flags, "model.chat_template")
    assert "fix: --bad_rows drop" in text and "line " in text
    run = api.train("chat", bad_rows="drop", **flags)
    log = (run.path / "log.txt").read_text()
    dropped = [int(each) for each in re.findall(r"(\d+) \w+ conversations? dropped", log)]
    assert sum(dropped) == 20 and "no samples" not in log
    sources = [each["source"] for each in read_lines(run.path / "eval" / "samples.jsonl")[-1]["samples"]]
    assert sources and all(len(each) < 20 for each in sources)


def test_padding_is_no_end_of_a_generation(llama):
    from transformers import AutoModelForCausalLM

    for ends, is_new in (([6, 5], True), ([6], False)):
        tokenizer = text_models.load_tokenizer(str(llama))
        model = AutoModelForCausalLM.from_pretrained(llama)
        tokenizer.pad_token, model.generation_config.eos_token_id = tokenizer.convert_ids_to_tokens(5), ends
        chat._set_generation(text_models.Loaded(model, processor=tokenizer), 7)
        settings = model.generation_config
        assert settings.eos_token_id == [7, *ends] and settings.pad_token_id == tokenizer.pad_token_id
        assert settings.pad_token_id not in settings.eos_token_id and (tokenizer.pad_token == PAD_TOKEN) == is_new


@pytest.mark.parametrize("content", ["", "{% for m in messages %}{{ m.content"])
def test_a_template_file_that_is_empty_or_not_valid_is_refused_by_its_name(content, llama, data, tmp_path):
    (tmp_path / "own.jinja").write_text(content)
    flags = {**FLAGS, "data": data, "model": llama, "chat_template": tmp_path / "own.jinja"}
    assert "own.jinja" in refusal("chat", flags, "model.chat_template")


@pytest.mark.parametrize("kind", ["headless", "no template", "bidirectional"])
def test_models_that_cannot_chat_are_refused(kind, data, tmp_path):
    from tasks.texts import tiny_bert

    if kind == "bidirectional":
        folder = tiny_bert(tmp_path / "bert")
        text_models.load_tokenizer(str(folder))
        flags = {"chat_template": "chatml", "max_length": 64, "overlong": "drop"}
        text = refusal("chat", {**FLAGS, "data": data, "model": folder}, "model.task", **flags)
        assert "chat needs a causal" in text and "masked-lm" not in text and "fix: --model HuggingFaceTB" in text
    elif kind == "headless":
        folder = tiny_decoder(tmp_path / "headless", "headless")
        text = refusal("chat", {**FLAGS, "data": data, "model": folder}, "model.task")
        assert "is a base model" in text and "LlamaModel" in text and "missing: lm_head.weight" in text
        assert "fix: save it as a LlamaForCausalLM   or   --model HuggingFaceTB" in text
    else:
        folder = tiny_decoder(tmp_path / "plain", template=None)
        text = refusal("chat", {**FLAGS, "data": data, "model": folder}, "model.chat_template")
        assert "zephyr" in text and "--chat_template chatml" in text
        assert api.train("chat", data=data, model=folder, chat_template="plain", **{**FLAGS, "max_steps": 1}).metrics


@pytest.mark.parametrize("lora", [(), ("--lora", "--chat_template", "chatml")], ids=["packed", "lora"])
def test_a_killed_run_resumes_to_the_same_bits(lora, tmp_path):
    model = tiny_decoder(tmp_path / "model", template=None if lora else "chatml")
    data = write_dialogues(tmp_path)
    words = ["train", "chat", "--data", data, "--model", model, "--max_steps", 8, "--batch", 4, "--lr", 1e-2]
    words += ["--packing", "--max_length", 128, "--save_strategy", "steps", "--save_steps", 2, "--threads", 1]
    words += ["--eval_strategy", "steps", "--eval_steps", 3, "--temperature", 0.8, "--max_new_tokens", 4]
    words += ["--exact_match_rows", 3, "--no_rehearsal", *lora]
    whole = check_kill(tmp_path, words, 5, "eval/samples.jsonl", "baselines.json", "samples/train_batch0.txt")
    lines = read_lines(whole / "eval" / "samples.jsonl")
    assert [line["update"] for line in lines] == [3, 6, 8, None]


@pytest.mark.parametrize(
    ("flag", "value"),
    [("chat_template", "llama-3"), ("vocab_size", 700), ("train_on", "last"), ("packing", False), ("max_length", 256)]
    + [("overlong", "drop"), ("exact_match_rows", 0), ("tokens_per_update", 1024), ("effective_batch", 16)],
)
def test_a_resumed_run_keeps_its_tokenizer_and_what_is_counted(learnt, flag, value):
    with pytest.raises(InputError) as caught:
        api.resume(learnt.path, max_steps=1000, quiet=True, **{flag: value})
    assert caught.value.code == "args.value" and caught.value.fix == f"leave out --{flag}"
    if value is False:
        with pytest.raises(InputError) as caught:
            resume_run(RunFolder(learnt.path), [f"--no_{flag}", "--max_steps", "1000"], Screen(is_quiet=True))
        assert caught.value.fix == f"leave out --no_{flag}"


def test_a_model_that_mixes_packed_conversations_is_not_packed(data, tmp_path, monkeypatch):
    monkeypatch.setattr(chats, "separates_packed", lambda model: False)
    flags = {**FLAGS, "data": data, "vocab_size": 400, "max_steps": 1}
    with pytest.raises(InputError) as caught:
        api.train("chat", **flags)
    assert caught.value.fix == "--no_packing"
    assert "packed" not in (api.train("chat", **{**flags, "packing": None}).path / "log.txt").read_text()


def test_packed_training_rows_are_scored_by_conversation_and_other_files_are_evaluated(llama, data, tmp_path):
    run = api.train(
        "chat", data=data, model=llama, eval_on_train=True, num_train_epochs=1, **{**FLAGS, "max_steps": -1}
    )
    last = [line for line in read_lines(run.path / "metrics.jsonl") if "train_perplexity" in line][-1]
    rows = api.DataPlan.read(run.folder.data).rows("train")
    turns = [rows[index]["chat"].messages for index in range(len(rows))]
    again = write_jsonl(tmp_path / "again.jsonl", [{"conversations": _as_sharegpt(each)} for each in turns])
    found = run.evaluate(again)
    assert last["train_perplexity"] == pytest.approx(found["perplexity"], rel=1e-5)
    assert last["train_conversation_perplexity"] == pytest.approx(found["conversation_perplexity"], rel=1e-5)
    assert len(read_lines(run.path / "eval" / "again" / "predictions.jsonl")) == len(turns)


def _as_sharegpt(messages):
    return [{"from": turn["role"], "value": turn["content"]} for turn in messages]


def test_tools_and_calls_are_rendered_and_the_calls_are_trained(llama, tmp_path):
    tools = [{"type": "function", "function": {"name": "total", "parameters": {"type": "object", "properties": {}}}}]
    call = {"type": "function", "function": {"name": "total", "arguments": {"of": 3}}}
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"Add {number}."},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "3", "name": "total"},
                {"role": "assistant", "content": "The total is 3."},
            ],
            "tools": tools,
        }
        for number in range(30)
    ]
    data = write_jsonl(tmp_path / "tools.jsonl", rows)
    flags = {**FLAGS, "max_length": 1024, "max_steps": 1, "vocab_size": 600}
    run = api.train("chat", data=data, **flags)
    first = (run.path / "samples" / "train_batch0.txt").read_text()
    assert "<tools>" in first and '"name": "total"' in first
    trained = re.findall("⟦(.*?)⟧", first)
    assert {each.removesuffix(END) for each in trained if "total is" in each} == {"The total is 3."}
    assert any("<tool_call>" in each and '"of": 3' in each for each in trained)
    assert "30 conversations with tools" in (run.path / "log.txt").read_text()
