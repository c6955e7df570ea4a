"""masked-lm end to end: masks that repeat, blocks, resuming, filling in, bad models."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM

from loopwright import api
from loopwright.errors import ConfigError
from loopwright.tasks.text import language_model as language
from loopwright.tasks.text import masked_lm
from loopwright.tasks.text import models as text_models
from tasks.dirty_inputs import assert_aligned
from tasks.recomputed import assert_recomputed
from tasks.reviews import read_lines
from tasks.runs import refusal, train_in
from tasks.texts import FLAGS, lines, tiny_bert, tiny_gpt2, write_text


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return tiny_bert(tmp_path_factory.mktemp("models") / "bert")


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    folder = tmp_path_factory.mktemp("learnt")
    data = write_text(folder / "lines.txt", lines(300))
    flags = {**FLAGS, "lr": 3e-3, "block_size": 32, "vocab_size": 400, "epochs": 8, "rehearsal": True}
    return train_in(folder, "masked-lm", data=data, mlm_probability=0.3, **flags)


def test_a_small_model_learns_to_fill_in_words(learnt):
    baseline = learnt.result["baselines"]["unigram"]
    assert learnt.result["metric"] == "token_accuracy"
    assert learnt.metrics["token_accuracy"] > baseline["token_accuracy"] + 0.15
    assert learnt.metrics["perplexity"] < baseline["perplexity"]
    (found,) = learnt.predict(["the cat sat [MASK] the mat and said naïve"])
    assert found["text"] == "the cat sat on the mat and said naïve"
    assert len(found["masks"]) == 1 and len(found["masks"][0]) == 5
    scores = [each["score"] for each in found["masks"][0]]
    assert scores == sorted(scores, reverse=True)


def test_several_masks_and_rows_are_filled_in_their_order_and_no_mask_or_a_long_text_is_refused(learnt):
    texts = ["the cat [MASK] on the [MASK] and said", "the [MASK] sat", "[MASK] cow sat on the bed"]
    found = learnt.predict(texts)
    assert [len(each["masks"]) for each in found] == [2, 1, 1]
    assert not any("[MASK]" in each["text"] for each in found)
    alone = [learnt.predict([each])[0]["text"] for each in texts]
    assert [each["text"] for each in found] == alone
    for code, given in {"args.value": "the cat", "model.length": "the cat " * 40 + "[MASK]"}.items():
        assert_aligned(learnt, texts[:2], {given: code})


def test_evaluations_predict_the_same_tokens_each_time(learnt):
    before = read_lines(learnt.path / "eval" / "predictions.jsonl")
    assert learnt.evaluate() == learnt.metrics
    assert read_lines(learnt.path / "eval" / "predictions.jsonl") == before
    assert_recomputed(learnt)


@pytest.mark.parametrize("line_by_line", [False, True])
def test_the_metrics_are_the_same_for_every_batch_size_and_seed(bert, text_file, line_by_line):
    found, asked = [], []
    flags = {**FLAGS, "data": text_file, "model": bert, "lr": 0.0, "max_steps": 1, "block_size": 24}
    for size, seed in ((3, 2), (32, 3)):
        run = api.train("masked-lm", line_by_line=line_by_line, per_device_eval_batch_size=size, seed=seed, **flags)
        found.append(run.metrics)
        asked.append([each["reference"] for each in read_lines(run.path / "eval" / "predictions.jsonl")])
    assert asked[0] == asked[1] and found[1] == pytest.approx(found[0], rel=1e-5)


def test_blocks_cover_the_text_between_their_special_tokens(bert):
    tokenizer = text_models.load_tokenizer(str(bert), needs_pad=False)
    rows = [{"text": each} for each in lines(1_200)]
    stream = language.read_stream(rows, masked_lm._encoder(tokenizer))
    dataset = masked_lm.BlockDataset(tokenizer, stream, 40)
    blocks = [dataset[index]["input_ids"] for index in range(len(dataset))]
    assert {len(each) for each in blocks[:-1]} == {40}
    assert np.concatenate([each[1:-1] for each in blocks]).tolist() == stream.ids.tolist()
    assert all(each[0] == tokenizer.cls_token_id and each[-1] == tokenizer.sep_token_id for each in blocks)


def test_training_masks_differ_from_batch_to_batch_and_leave_special_tokens_alone(bert):
    tokenizer = text_models.load_tokenizer(str(bert), needs_pad=False)
    masking = masked_lm.Masking(tokenizer, 0.15)
    collate = language.PaddingCollator(before=masking.mask_batch)
    encode = masked_lm.LineEncoder(tokenizer, 64)
    features = [{**encode({"text": text}), "position": 0} for text in [*lines(40), "a"]]
    torch.manual_seed(1)
    first, second = collate(features), collate(features)
    torch.manual_seed(1)
    again = collate(features)
    assert torch.equal(first["labels"], again["labels"]) and torch.equal(first["input_ids"], again["input_ids"])
    assert not torch.equal(first["labels"], second["labels"])
    is_asked = first["labels"] != -100
    assert is_asked.any(1).all()  # also of the text of one token
    assert not torch.isin(first["labels"][is_asked], torch.tensor(tokenizer.all_special_ids)).any()
    assert 0.1 < is_asked.sum() / first["attention_mask"].sum() < 0.2


def test_models_that_cannot_be_masked_are_refused(text_file, tmp_path, bert):
    folder = tiny_bert(tmp_path / "bert")
    tokenizer = text_models.load_tokenizer(str(folder), needs_pad=False)
    tokenizer.mask_token = None
    tokenizer.save_pretrained(folder)
    refusal("masked-lm", FLAGS, "model.task", data=text_file, model=tiny_gpt2(tmp_path / "gpt2"))
    refusal("masked-lm", FLAGS, "model.length", data=text_file, model=bert, block_size=65)
    refusal("masked-lm", FLAGS, "model.mask_token", data=text_file, model=folder)
    with pytest.raises(ConfigError, match="mlm_probability"):
        api.train("masked-lm", data=text_file, mlm_probability=1.5, **FLAGS)


def test_the_bias_of_a_merged_head_is_saved_though_it_was_tied(text_file, tmp_path):
    model = AutoModelForMaskedLM.from_pretrained(tiny_bert(tmp_path / "bert"))
    torch.nn.init.normal_(model.cls.predictions.bias, std=3)
    model.save_pretrained(tmp_path / "bert")
    flags = {**FLAGS, "max_steps": 3, "block_size": 32, "lora": "r=2"}
    run = train_in(tmp_path, "masked-lm", data=text_file, model=tmp_path / "bert", **flags)
    assert run.evaluate()["loss"] == pytest.approx(run.metrics["loss"], rel=1e-4)
