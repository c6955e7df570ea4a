"""translation end to end: training, generating, scoring, resuming, languages, bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from loopwright import api
from loopwright.errors import ConfigError, InputError
from sample_data import SAMPLES
from tasks.intervals import assert_loss_has_interval
from tasks.phrases import SIZES, pairs, tiny_bart, tiny_t5
from tasks.reviews import events, read_lines, write_csv, write_jsonl

FLAGS = {"lr": 5e-3, "epochs": 6, "batch": 8, "threads": 1, "vocabulary_size": 400, "quiet": True}
SHORT = {**FLAGS, "epochs": 1, "max_train_samples": 16, "rehearsal": False}
TEXTS = [text for row in pairs() for text in row.values()]
WMT16 = SAMPLES / "wmt16" / "sample.json"


@pytest.fixture
def phrases(tmp_path) -> Path:
    """Return a csv file of phrases."""
    return write_csv(tmp_path / "phrases.csv", pairs())


@pytest.fixture(scope="module")
def translated(tmp_path_factory) -> api.Run:
    """Return a run that has ended; its folder must be left as it is."""
    folder = tmp_path_factory.mktemp("translated")
    data = write_csv(folder / "phrases.csv", pairs())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HF_HUB_OFFLINE", "1")
        return api.train("translation", data=data, output_dir=folder / "run", **FLAGS)


def nested() -> list[dict]:
    """Return the phrases in the form of WMT."""
    return [{"translation": {"en": row["source"], "de": row["target"]}} for row in pairs()]


# ------------------------------------------------------------------------------------------- training and scoring


def test_a_small_model_learns_words_and_writes_them(translated):
    assert translated.metrics["exact_match"] >= 0.5
    assert translated.metrics["bleu"] > 5 * translated.result["baselines"]["copy"]["bleu"]
    assert translated.metrics["chrf"] > 2 * translated.result["baselines"]["copy"]["chrf"]
    assert translated.result["metric"] == "bleu" and set(translated.result["intervals"]) == {
        "bleu",
        "chrf",
        "exact_match",
        "loss",
    }
    assert_loss_has_interval(translated)
    seen = pairs()[:20]
    written = translated.predict([row["source"] for row in seen])
    assert sum(each == {"translation": row["target"]} for each, row in zip(written, seen, strict=True)) >= 14


def test_predictions_and_worst_examples_are_texts(translated):
    predictions = read_lines(translated.path / "eval" / "predictions.jsonl")
    expected = {row["source"]: row["target"] for row in pairs()}
    assert all(each["reference"] == expected[each["source"]] for each in predictions)
    share = sum(each["prediction"] == each["reference"] for each in predictions) / len(predictions)
    assert share == pytest.approx(translated.metrics["exact_match"], abs=1e-12)
    worst = [each["loss"] for each in read_lines(translated.path / "eval" / "worst.jsonl")]
    assert worst == sorted(worst, reverse=True)


def test_the_loss_is_the_mean_over_tokens_whatever_the_batch(translated):
    from loopwright.runs.finish import evaluate

    job = api.load_run(translated.folder)
    job.model.eval()
    dataset = job.task.create_dataset(job, job.data.rows("validation"), is_labelled=True)
    total = count = 0
    for index in range(len(dataset)):
        labels = torch.tensor([dataset[index]["labels"]])
        with torch.no_grad():
            logits = job.model(input_ids=torch.tensor([dataset[index]["input_ids"]]), labels=labels).logits
        total += torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="sum").item()
        count += labels.numel()
    for size in (1, 3, 32):
        job.training.per_device_eval_batch_size = size
        metrics, _, _ = evaluate(job, dataset, None, lambda line: None)
        assert metrics["loss"] == pytest.approx(total / count, rel=1e-5)
        assert metrics["bleu"] == translated.metrics["bleu"]


def test_accumulated_batches_train_as_one_large_batch(phrases, tmp_path):
    from safetensors.torch import load_file

    flags = {**SHORT, "data": phrases, "optim": "sgd", "lr": 0.1}
    whole = api.train("translation", output_dir=tmp_path / "whole", **{**flags, "batch": 8})
    parts = api.train(
        "translation", output_dir=tmp_path / "parts", gradient_accumulation_steps=4, **{**flags, "batch": 2}
    )
    first, second = (load_file(run.path / "model" / "model.safetensors") for run in (whole, parts))
    for name, tensor in first.items():
        assert torch.allclose(tensor, second[name], atol=1e-5), name


def test_evaluating_again_and_elsewhere_gives_the_same(translated, tmp_path):
    assert translated.evaluate() == translated.metrics
    folder = translated.export(tmp_path / "exported")
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    tokens = model.generate(**tokenizer("the red house", return_tensors="pt"))
    assert (
        tokenizer.decode(tokens[0], skip_special_tokens=True).strip()
        == translated.predict(["the red house"])[0]["translation"]
    )


def test_a_file_and_rows_are_predicted_in_their_order(translated, tmp_path):
    sources = [row["source"] for row in pairs()[:7]]
    from_file = translated.predict(write_csv(tmp_path / "new.csv", [{"source": each} for each in sources]))
    assert from_file == translated.predict(sources) == translated.predict([{"source": each} for each in sources])
    with pytest.raises(InputError, match=r"data\.column.*\n.*it has text"):
        translated.predict([{"text": "the red house"}])


def test_a_stopped_run_goes_on_as_if_it_had_not_been(phrases, tmp_path):
    # The model has dropout, and settings of its own for generating: both must be there after the run folder has moved.
    model = tiny_t5(tmp_path / "t5", TEXTS, {"num_beams": 2, "min_length": 3, "repetition_penalty": 1.3})
    flags = {**SHORT, "data": phrases, "model": model, "save_strategy": "steps", "save_steps": 1}
    flags["lr_scheduler_type"] = "constant"
    api.train("translation", output_dir=tmp_path / "part", **flags)
    longer = api.train("translation", output_dir=tmp_path / "longer", **{**flags, "epochs": 2})
    moved = (tmp_path / "part").rename(tmp_path / "moved")
    resumed = api.resume(moved, epochs=2, quiet=True)
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        assert (resumed.path / "model" / name).read_bytes() == (longer.path / "model" / name).read_bytes()
    settings = json.loads((resumed.path / "model" / "generation_config.json").read_text())
    assert settings["num_beams"] == 2 and settings["min_length"] == 3 and settings["repetition_penalty"] == 1.3
    assert resumed.metrics == longer.metrics and events(resumed.path) == events(longer.path)
    assert resumed.predict(["the red house"]) == longer.predict(["the red house"])


def test_a_run_without_a_finished_model_generates_as_it_would_have(phrases, tmp_path):
    model = tiny_t5(tmp_path / "t5", TEXTS, {"num_beams": 3})
    run = api.train("translation", data=phrases, model=model, **SHORT)
    expected = run.evaluate()
    (run.path / "model" / "model.safetensors").unlink()  # as before the end of a run: config and tokenizer only
    job = api.load_run(run.folder)
    assert job.model.generation_config.num_beams == 3
    assert run.evaluate() == expected


def test_characters_are_tokens_of_their_own(tmp_path):
    made = [{"source": f"{number:02}:é", "target": f"{number:02}"} for number in range(40)]
    run = api.train("translation", data=write_csv(tmp_path / "numbers.csv", made), tokenizer_unit="characters", **SHORT)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(run.path / "model")
    tokens = tokenizer("é 1\n?")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(tokens) == ["é", "<unk>", "1", "<unk>", "<unk>", "</s>"]
    assert tokenizer.decode(tokenizer("12:é")["input_ids"], skip_special_tokens=True) == "12:é"
    assert len(run.predict(["03:é"])) == 1


def test_adapters_are_trained_and_generate(phrases, tmp_path):
    model = tiny_t5(tmp_path / "t5", TEXTS)
    run = api.train("translation", data=phrases, model=model, lora=True, **SHORT)
    before = run.predict(["the red house"])
    resumed = api.resume(run, epochs=2, quiet=True)
    assert resumed.status == "done" and len(before) == len(resumed.predict(["the red house"])) == 1


def test_beams_and_lengths_are_those_asked_for(phrases, tmp_path):
    model = tiny_t5(tmp_path / "t5", TEXTS)
    file = model / "generation_config.json"
    own = {"min_length": 20, "do_sample": True, "temperature": 0.7, "typical_p": 0.9, "length_penalty": 2.0}
    file.write_text(json.dumps({**json.loads(file.read_text()), **own}))
    flags = {**SHORT, "data": phrases, "model": model, "num_beams": 2, "generation_max_length": 3}
    run = api.train("translation", max_target_length=4, **flags)
    settings = json.loads((run.path / "model" / "generation_config.json").read_text())
    assert (settings["num_beams"], settings["max_new_tokens"], settings["min_length"]) == (2, 3, 0)
    assert settings["do_sample"] is False and settings["length_penalty"] == 2.0  # nothing is left to chance
    assert "min_length 20 is longer" in (run.path / "log.txt").read_text()
    predictions = read_lines(run.path / "eval" / "predictions.jsonl")
    # Targets are cut for the loss, not for the comparison.
    assert {each["reference"] for each in predictions} <= {row["target"] for row in pairs()}


def test_tokens_that_are_new_to_the_model_get_weights(phrases, tmp_path):
    from transformers import AutoTokenizer

    model = tiny_t5(tmp_path / "t5", TEXTS)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["<colour>", "<thing>"])
    tokenizer.save_pretrained(model)
    run = api.train("translation", data=phrases, model=model, **SHORT)
    assert "2 tokens that are new to the model" in (run.path / "log.txt").read_text()
    assert api.load_run(run.folder).model.get_input_embeddings().weight.shape[0] == len(tokenizer)
    assert run.predict(["the <colour> <thing>"]) and api.resume(run, epochs=2, quiet=True).status == "done"


# ----------------------------------------------------------------------------------------------------- languages


def test_languages_name_the_entries_of_a_translation(tmp_path):
    data = write_jsonl(tmp_path / "wmt.jsonl", nested())
    run = api.train("translation", data=data, source_lang="de", target_lang="en", **SHORT)
    assert run.folder.data.read_text().count("translation.de") and len(run.predict(["rot Haus"])) == 1
    same = run.predict([{"translation": {"de": "rot Haus"}}])
    assert same == run.predict(["rot Haus"]) == run.predict([{"translation.de": "rot Haus"}])
    assert set(run.evaluate(write_jsonl(tmp_path / "other.jsonl", nested()[:9]))) == set(run.metrics)


def test_a_language_that_the_data_has_not_is_refused(tmp_path):
    data = write_jsonl(tmp_path / "wmt.jsonl", nested())
    with pytest.raises(InputError, match="--source_lang fr: there is no column") as caught:
        api.train("translation", data=data, source_lang="fr", target_lang="de", **SHORT)
    assert caught.value.code == "data.column" and "--source_lang en" in caught.value.fix
    with pytest.raises(InputError, match=r"data\.column.*cannot be guessed") as caught:
        api.train("translation", data=data, **SHORT)
    first, second = nested()[0]["translation"]
    assert caught.value.fix == f"--source_lang {first} --target_lang {second}"
    flat = write_jsonl(tmp_path / "flat.jsonl", [row["translation"] for row in nested()])
    plan = api.check("translation", data=flat, source_lang="en_XX", target_lang="de_DE", **SHORT)
    assert plan.columns == {"source": "en", "target": "de"}


def tiny_nllb(folder: Path) -> Path:
    """Write a model of two languages, with characters as tokens, and return its folder."""
    from transformers import M2M100Config, M2M100ForConditionalGeneration, NllbTokenizer

    characters = sorted({character for text in TEXTS for character in text.replace(" ", "▁")} | {"▁"})
    known = ["<s>", "<pad>", "</s>", "<unk>", *characters]
    languages = ["eng_Latn", "deu_Latn"]
    tokenizer = NllbTokenizer({token: number for number, token in enumerate(known)}, [], extra_special_tokens=languages)
    sizes = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in SIZES.items()}
    config = M2M100Config(vocab_size=len(tokenizer), d_model=16, max_position_embeddings=64, **sizes)
    M2M100ForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_model_of_many_languages_is_told_which(phrases, tmp_path):
    model = tiny_nllb(tmp_path / "nllb")
    assert "which to read and which to write" in refused("args.value", data=phrases, model=model)
    wrong = {"source_lang": "eng_Latn", "target_lang": "xyz_Latn"}
    assert "no language 'xyz_Latn'" in refused("args.value", data=phrases, model=model, **wrong)
    run = api.train("translation", data=phrases, model=model, source_lang="eng_Latn", target_lang="deu_Latn", **SHORT)
    job = api.load_run(run.folder)
    features = job.task.create_dataset(job, [pairs()[0]], is_labelled=True)[0]
    first = [job.processor.convert_ids_to_tokens(features[name])[0] for name in ("input_ids", "labels")]
    assert first == ["eng_Latn", "deu_Latn"]
    written = job.model.generate(input_ids=torch.tensor([features["input_ids"]]))
    assert job.processor.convert_ids_to_tokens(written[0])[1] == "deu_Latn"


# ----------------------------------------------------------------------------------------------------- bad input


def refused(code, **flags):
    """Assert that training is refused with a code, and that nothing is left behind; return the text."""
    before = sorted(Path().rglob("*"))
    with pytest.raises(InputError) as caught:
        api.train("translation", **{**SHORT, **flags})
    assert caught.value.code == code
    assert sorted(Path().rglob("*")) == before
    return str(caught.value)


def test_a_model_that_cannot_write_is_refused(phrases, tmp_path):
    from transformers import BertConfig, BertModel

    bert = tmp_path / "bert"
    BertModel(BertConfig(vocab_size=400, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)).save_pretrained(
        bert
    )
    tiny_bart(tmp_path / "bart", TEXTS)
    for file in (tmp_path / "bart").glob("tokenizer*"):
        (bert / file.name).write_bytes(file.read_bytes())
    assert "such as a T5" in refused("model.task", data=phrases, model=bert)


def test_lengths_that_the_model_has_no_positions_for_are_refused(phrases, tmp_path):
    bart = tiny_bart(tmp_path / "bart", TEXTS)
    for name in ("max_source_length", "max_target_length", "generation_max_length"):
        assert f"fix: --{name} 32" in refused("model.length", data=phrases, model=bart, **{name: 40})
    run = api.train("translation", data=phrases, model=bart, max_source_length=32, **SHORT)
    assert len(run.predict(["the house " * 40])) == 1  # cut to what the model can read
    # A T5 counts distances, not places: its tokenizer's 512 is no limit.
    t5 = tiny_t5(tmp_path / "t5", TEXTS)
    assert api.train("translation", data=phrases, model=t5, max_source_length=600, **SHORT).status == "done"


def test_a_decoder_that_has_nothing_to_start_with_is_refused(phrases, tmp_path):
    bart = tiny_bart(tmp_path / "bart", TEXTS)
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((bart / name).read_text())
        settings.update(decoder_start_token_id=None)
        (bart / name).write_text(json.dumps(settings))
    assert "decoder_start_token_id" in refused("model.folder", data=phrases, model=bart)


def test_numbers_that_cannot_be_are_refused(phrases):
    for name in ("num_beams", "max_target_length"):
        with pytest.raises(ConfigError, match=f"{name} must be at least 1"):
            api.train("translation", data=phrases, **{name: 0}, **SHORT)
    with pytest.raises(ConfigError, match="vocabulary_size must be above 3"):
        api.train("translation", data=phrases, **{**SHORT, "vocabulary_size": 3})


# ----------------------------------------------------------------------------------------------------- real data


def test_the_sample_of_wmt16_is_trained_resumed_and_predicted(tmp_path):
    flags = {**SHORT, "source_lang": "en", "target_lang": "ro", "keep_duplicates": True, "validation_file": WMT16}
    flags["model"] = tiny_t5(
        tmp_path / "t5", [text for row in read_lines(WMT16) for text in row["translation"].values()]
    )
    flags["metric_for_best_model"] = "loss"
    run = api.train("translation", train_file=WMT16, output_dir=tmp_path / "run", **flags)
    before = run.metrics
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    resumed = api.resume(moved, epochs=3, quiet=True)
    assert resumed.metrics["loss"] < before["loss"] and resumed.result["baselines"]["copy"]["bleu"] > 0
    assert resumed.predict(WMT16) == resumed.predict([row["translation"]["en"] for row in read_lines(WMT16)])
    assert resumed.evaluate() == resumed.metrics


def test_beams_and_lengths_can_be_said_when_a_translation_is_asked_for(translated):
    (short,) = translated.predict(["the red house"], max_new_tokens=1, num_beams=2)
    (whole,) = translated.predict(["the red house"])
    assert whole["translation"].startswith(short["translation"]) and short != whole
    assert translated.evaluate(num_beams=2)["loss"] == translated.metrics["loss"]
    assert translated.predict(["the red house"]) == [whole]


@pytest.mark.parametrize("what", ["1", "backbone"])
def test_the_encoder_is_what_is_frozen(phrases, tmp_path, what):
    model = tiny_t5(tmp_path / "t5", TEXTS)
    run = api.train("translation", data=phrases, model=model, freeze=what, **SHORT)
    before, after = (load_file(folder / "model.safetensors") for folder in (model, run.path / "model"))
    same = {name for name in before if torch.equal(before[name], after[name])}
    encoder = {name for name in before if name.startswith("encoder.block")} | {"shared.weight"}
    assert encoder <= same and len(encoder) >= 5
    assert [name for name in same if name.startswith("decoder")] == []
    assert ("encoder.final_layer_norm.weight" in same) == (what == "backbone")
