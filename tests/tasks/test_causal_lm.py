"""causal-lm end to end: blocks, exact sums, resuming, continuing texts, bad models."""

import json
import math
import weakref

import numpy as np
import pytest
import torch

from loopwright import api
from loopwright.cli import main
from loopwright.errors import ConfigError, InputError
from loopwright.sources import DataPlan
from loopwright.tasks.text import causal_lm
from loopwright.tasks.text import language_model as language
from loopwright.tasks.text import models as text_models
from sample_data import SAMPLES
from tasks.recomputed import assert_recomputed
from tasks.reviews import read_lines, write_jsonl
from tasks.runs import refusal, train_in
from tasks.texts import FLAGS, lines, tiny_bert, tiny_gpt2, write_text


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return tiny_gpt2(tmp_path_factory.mktemp("models") / "gpt2")


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    folder = tmp_path_factory.mktemp("learnt")
    data = write_text(folder / "lines.txt", lines(300))
    flags = {**FLAGS, "block_size": 32, "vocab_size": 320, "epochs": 3, "rehearsal": True}
    return train_in(folder, "causal-lm", data=data, **flags)


def test_a_small_model_learns_the_text_and_continues_it(learnt):
    baselines = learnt.result["baselines"]
    assert set(baselines) == {"gzip", "unigram"} and learnt.result["metric"] == "bits_per_byte"
    assert learnt.metrics["bits_per_byte"] < 0.6 * baselines["unigram"]["bits_per_byte"]
    assert learnt.metrics["perplexity"] == pytest.approx(math.exp(learnt.metrics["loss"]), rel=1e-6)
    assert learnt.metrics["perplexity"] < baselines["unigram"]["perplexity"]
    assert learnt.result["no_intervals"]["bits_per_byte"].startswith("at least 50 samples are needed, there are ")
    (found,) = learnt.predict(["the cat sat on"])
    assert found["text"] == "the cat sat on" + found["continuation"]
    assert found["continuation"].startswith(" the ")


def test_files_texts_and_rows_are_continued_alike_and_transformers_opens_the_model(learnt, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    prompts = ["the cat sat on", "the", "the hen sat on the roof and"]
    one_by_one = [learnt.predict([each])[0] for each in prompts]
    assert learnt.predict(prompts) == one_by_one
    found = learnt.predict([{"text": "the"}, {"other": "the"}])
    assert ["error" in each for each in found] == [False, True] and found[1]["error"].startswith("data.missing")
    assert [set(each) for each in learnt.predict(["", "\n", *prompts])] == [{"text", "continuation"}] * 5
    data = write_jsonl(tmp_path / "prompts.jsonl", [{"text": each} for each in prompts])
    assert learnt.predict(data) == learnt.predict([{"text": each} for each in prompts]) == one_by_one
    long = " ".join(["the cat sat on the mat"] * 40)
    assert learnt.predict([long])[0]["text"].startswith(long)
    assert learnt.evaluate() == learnt.metrics
    folder = learnt.export(tmp_path / "exported")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    text = "the cat sat on the bed and said naïve 3 €\n\twith  blanks"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert model.config.eos_token_id == tokenizer.eos_token_id


def test_every_byte_of_the_validation_data_is_counted_once(learnt):
    blocks = read_lines(learnt.path / "eval" / "predictions.jsonl")
    rows = DataPlan.from_json(learnt.folder.data.read_text()).rows("validation")
    texts = [rows[index]["text"] for index in range(len(rows))]
    num_bytes = sum(block["num_bytes"] for block in blocks)
    assert num_bytes == sum(len(each.encode()) + 1 for each in texts)
    assert "".join(block["text"] for block in blocks) == "".join(f"{each}{causal_lm.END_TOKEN}" for each in texts)
    assert_recomputed(learnt)
    assert {block["num_tokens"] for block in blocks[:-1]} == {32}
    worst = [each["loss"] for each in read_lines(learnt.path / "eval" / "worst.jsonl")]
    assert worst == sorted(worst, reverse=True)


def test_blocks_cover_the_text_and_each_token_is_a_target_once(gpt2):
    tokenizer = text_models.load_tokenizer(str(gpt2), needs_pad=False)
    rows = [{"text": each} for each in lines(2_500)]
    encode = language.RowEncoder(tokenizer, tokenizer.eos_token_id, counts_bytes=True)
    stream = language.read_stream(rows, encode, tokenizer.bos_token_id)
    dataset = causal_lm.BlockDataset(tokenizer, stream, 50)
    targets = np.concatenate([dataset[index]["labels"] for index in range(len(dataset))])
    assert targets.tolist() == stream.ids[1:].tolist()
    assert {len(dataset[index]["input_ids"]) for index in range(len(dataset) - 1)} == {50}
    text = tokenizer.decode(targets.tolist())
    assert text == "".join(f"{row['text']}{causal_lm.END_TOKEN}" for row in rows)
    with pytest.raises(IndexError):
        dataset[len(dataset)]


@pytest.mark.parametrize("is_fast", [True, False])
def test_the_bytes_of_the_tokens_are_those_of_the_text(gpt2, is_fast):
    tokenizer = text_models.load_tokenizer(str(gpt2), needs_pad=False)

    class Slow:
        is_fast = False

        def __call__(self, *args, return_offsets_mapping, **options):
            assert not return_offsets_mapping
            return tokenizer(*args, **options)

    texts = ["", "a", "naïve € 😀 text", "   blanks  "]
    for end in (tokenizer.eos_token_id, None):
        encode = language.RowEncoder(tokenizer if is_fast else Slow(), end, counts_bytes=True)
        for text, (ids, sizes) in zip(texts, encode(texts), strict=True):
            assert len(ids) == len(sizes) and sizes.sum() == len(text.encode()) + 1 and (sizes >= 0).all()


@pytest.mark.parametrize("line_by_line", [False, True])
def test_the_metrics_are_the_same_for_every_batch_size(gpt2, text_file, line_by_line):
    flags = {**FLAGS, "data": text_file, "model": gpt2, "block_size": 24, "max_steps": 2, "line_by_line": line_by_line}
    small, large = (api.train("causal-lm", per_device_eval_batch_size=size, **flags).metrics for size in (3, 32))
    assert large == pytest.approx(small, rel=1e-5)


def test_the_loss_is_that_of_the_model_itself(gpt2, text_file):
    run = api.train("causal-lm", data=text_file, model=gpt2, line_by_line=True, **{**FLAGS, "max_steps": 2})
    model, tokenizer = run.model, text_models.load_tokenizer(str(gpt2), needs_pad=False)
    total = count = 0
    for row in read_lines(run.path / "eval" / "predictions.jsonl"):
        ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id]])
        with torch.no_grad():
            total += model(input_ids=ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    assert run.metrics["loss"] == pytest.approx(total / count, rel=1e-5)
    assert_recomputed(run)


def test_accumulated_batches_train_as_one_large_batch_does(text_file, tmp_path):
    gpt2 = tiny_gpt2(tmp_path / "gpt2", dropout=0.0)
    flags = {**FLAGS, "line_by_line": True, "max_steps": 3, "optim": "sgd"}
    whole = api.train("causal-lm", data=text_file, model=gpt2, **flags)
    parts = api.train("causal-lm", data=text_file, model=gpt2, gradient_accumulation_steps=4, **{**flags, "batch": 2})
    for first, second in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        assert torch.allclose(first, second, atol=1e-6)


def test_an_evaluation_keeps_no_logits_of_a_large_vocabulary(tmp_path, text_file, monkeypatch):
    from transformers import GPT2LMHeadModel

    folder = tiny_gpt2(tmp_path / "large", vocabulary=50_257)
    seen, most, alive = [], [0], []

    def watch(module, inputs, output):
        if not torch.is_grad_enabled():
            seen.append(weakref.ref(output))
            most[0] = max(most[0], output.numel())
            alive.append(sum(each() is not None for each in seen))

    made = GPT2LMHeadModel.__init__

    def observed(self, *args, **options):
        made(self, *args, **options)
        self.lm_head.register_forward_hook(watch)

    monkeypatch.setattr(GPT2LMHeadModel, "__init__", observed)
    monkeypatch.setattr(language, "_MOST_LOGITS", 4 * 24 * 50_257)
    flags = {**FLAGS, "block_size": 24, "max_steps": 1, "batch": 2, "per_device_eval_batch_size": 32}
    assert api.train("causal-lm", data=text_file, model=folder, **flags).status == "done" and len(seen) > 4
    assert most[0] <= 4 * 24 * 50_257 and max(alive) <= 2


def test_a_tokenizer_without_a_pad_or_an_end_token_will_do(tmp_path, text_file):
    folder = tiny_gpt2(tmp_path / "bare", pad_token=None, eos_token=None, bos_token=None)
    run = api.train("causal-lm", data=text_file, model=folder, **{**FLAGS, "block_size": 24, "max_steps": 2})
    assert run.status == "done" and len(run.predict(["the cat", "the dog sat on"])) == 2
    with pytest.raises(InputError, match="no text"):
        run.predict([""], strict=True)


def test_sampled_continuations_are_the_same_each_time(gpt2, text_file):
    flags = {**FLAGS, "block_size": 24, "max_steps": 2, "temperature": 1.5, "max_new_tokens": 10}
    run = api.train("causal-lm", data=text_file, model=gpt2, **flags)
    assert run.predict(["the cat"]) == run.predict(["the cat"])


def test_embeddings_are_added_for_the_tokens_of_the_tokenizer(tmp_path, text_file):
    from transformers import AutoTokenizer

    folder = tiny_gpt2(tmp_path / "gpt2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["naïve"])
    tokenizer.save_pretrained(folder)
    run = api.train("causal-lm", data=text_file, model=folder, **{**FLAGS, "block_size": 24, "max_steps": 2})
    assert run.model.config.vocab_size == len(tokenizer)


def test_a_long_block_a_model_that_sees_later_tokens_and_rows_without_text_are_refused(gpt2, text_file, tmp_path):
    blank = write_jsonl(tmp_path / "blank.jsonl", [{"text": " " * number} for number in range(30)])
    for code, message, flags in (
        ("model.length", "fix: --block_size 64", {"data": text_file, "model": gpt2, "block_size": 65}),
        ("model.task", "BertForMaskedLM", {"data": text_file, "model": tiny_bert(tmp_path / "bert")}),
        ("data.empty", "all are blank", {"data": blank, "model": gpt2}),
    ):
        assert message in refusal("causal-lm", FLAGS, code, **flags)


def test_invalid_settings_are_refused(gpt2, text_file):
    for name, value in {"block_size": 2, "vocab_size": 10, "max_new_tokens": 0, "temperature": -1.0}.items():
        with pytest.raises(ConfigError, match=name):
            api.train("causal-lm", data=text_file, **{**FLAGS, name: value})
    with pytest.raises(ConfigError, match="leave it out"):
        api.train("causal-lm", data=text_file, model=gpt2, vocab_size=400, **FLAGS)


def test_a_page_of_an_encyclopedia_is_learnt_from(gpt2):
    flags = {**FLAGS, "file_kind": "txt", "text_unit": "paragraph", "max_steps": 20}
    run = api.train("causal-lm", data=SAMPLES / "wiki_text" / "wiki_00", model=gpt2, **flags)
    assert run.metrics["bits_per_byte"] < 8
    assert run.predict(["Anarchism is"])[0]["text"].startswith("Anarchism is")


def test_generation_flags_can_be_given_to_predict(learnt, capsys):
    (long,), (short,) = learnt.predict(["the"], max_new_tokens=20), learnt.predict(["the"], max_new_tokens=2)
    assert long["continuation"].startswith(short["continuation"]) and len(short["text"]) < len(long["text"])
    assert main(["predict", str(learnt.path), "the", "--max_new_tokens", "2"]) == 0
    assert main(["predict", str(learnt.path), "--max-new-tokens=2", "the"]) == 0
    assert capsys.readouterr().out == 2 * (json.dumps(short) + "\n")
    assert main(["predict", str(learnt.path), "the", "--max_new_tokens", "0"]) == 2
    assert "max_new_tokens must be at least 1" in capsys.readouterr().err
    assert main(["predict", str(learnt.path), "--help"]) == 0
    assert "--temperature VALUE" in capsys.readouterr().out
