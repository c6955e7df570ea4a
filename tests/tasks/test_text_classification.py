"""text-classification end to end: training, scoring, predicting, other kinds of labels, bad models."""

import json
import math
import random
import sys
from functools import partial

import pytest
import torch

import loopwright
from loopwright import api
from loopwright.cli import main
from loopwright.errors import ConfigError, InputError
from loopwright.run_folder import read_json
from loopwright.sources import DataPlan
from loopwright.sources.splits import group_number
from loopwright.tasks.scoring import MetricScorer
from tasks.conftest import FLAGS
from tasks.recomputed import assert_recomputed
from tasks.reviews import events, read_lines, rows, write_csv, write_jsonl
from tasks.runs import check_resume, refusal
from tasks.texts import save_bert, small_tokenizer


def tiny_bert(folder, kind="BertForSequenceClassification", **options):
    """Write a BERT of a few thousand weights with a tokenizer, and return its folder."""
    tokenizer = small_tokenizer(row["review"] for row in rows())
    return save_bert(folder, kind, tokenizer, num_hidden_layers=2, **options)


def test_a_small_model_learns_words_predicts_them_and_keeps_its_scores(finished):
    assert finished.status == "done"
    assert finished.metrics["accuracy"] >= 0.9
    low, high = finished.result["intervals"]["accuracy"]
    assert low <= finished.metrics["accuracy"] <= high
    predicted = finished.predict(["great lovely superb film", "awful dull boring plot"])
    assert [each["label"] for each in predicted] == ["pos", "neg"]
    assert finished.evaluate() == finished.metrics
    kept = read_json(finished.path / "baselines.json")
    assert kept == finished.result["baselines"] and set(kept) == {"majority", "word-count"}


def test_the_run_folder_holds_what_it_should(finished):
    names = {path.name for path in finished.path.iterdir()}
    assert names >= {"run.json", "config.yaml", "command.txt", "data.json", "metrics.jsonl", "log.txt", "result.json"}
    assert not [name for name in names if name.startswith(".") and name != ".lock"]
    predictions = read_lines(finished.path / "eval" / "predictions.jsonl")
    assert [each["position"] for each in predictions] == list(range(len(predictions)))
    assert_recomputed(finished)
    worst = [each["loss"] for each in read_lines(finished.path / "eval" / "worst.jsonl")]
    assert worst == sorted(worst, reverse=True)
    assert "accuracy" in (finished.path / "model" / "README.md").read_text()


def test_transformers_opens_the_model_folder(finished, tmp_path):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = finished.export(tmp_path / "exported")
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logits = model(**tokenizer("great lovely superb film", return_tensors="pt")).logits
    assert model.config.id2label[int(logits.argmax())] == "pos"
    (predicted,) = finished.predict(["great lovely superb film"])
    assert logits.softmax(-1).max().item() == pytest.approx(predicted["score"], 1e-4)
    with pytest.raises(InputError, match="is not empty"):
        finished.export(folder)


def test_other_data_is_evaluated_with_the_labels_of_the_model(finished, tmp_path):
    only_good = [row for row in rows(40, seed=5) if row["stars"] == "pos"]
    metrics = finished.evaluate(write_csv(tmp_path / "good.csv", only_good))
    assert metrics["accuracy"] >= 0.9
    assert (finished.path / "eval" / "good" / "predictions.jsonl").is_file()


def test_a_file_and_rows_are_predicted_in_their_order(finished, tmp_path):
    made = rows(20, seed=3)
    from_file = finished.predict(write_csv(tmp_path / "new.csv", [{"review": row["review"]} for row in made]))
    from_rows = finished.predict([{"text": row["review"]} for row in made])
    assert from_file == from_rows == finished.predict([row["review"] for row in made])
    assert sum(each["label"] == row["stars"] for each, row in zip(from_file, made, strict=True)) >= 17


def test_the_same_flags_give_the_same_weights(reviews, tmp_path):
    flags = {**FLAGS, "data": reviews, "epochs": 1}
    first = api.train("text-classification", output_dir=tmp_path / "first", **flags)
    second = api.train("text-classification", output_dir=tmp_path / "second", rehearsal=False, **flags)
    weights = [(run.path / "model" / "model.safetensors").read_bytes() for run in (first, second)]
    assert weights[0] == weights[1]  # the rehearsal leaves no trace
    kept = {"config": first.path / "config.yaml", "quiet": True}
    again = api.train("text-classification", output_dir=tmp_path / "third", **kept)
    assert (again.path / "model" / "model.safetensors").read_bytes() == weights[0]


def test_a_resumed_run_equals_an_uninterrupted_one(reviews, tmp_path):
    flags = {**FLAGS, "data": reviews, "eval_on_train": True}
    _, resumed, _ = check_resume("text-classification", tmp_path, {}, {"epochs": 3}, "model/config.json", **flags)
    assert [event for event in events(resumed.path) if "train_accuracy" in event]


def test_pairs_are_read_and_predicted_as_pairs(tmp_path):
    chosen = random.Random(1)
    words = [f"w{number}" for number in range(12)]
    made = []
    for number in range(80):
        first, is_same = chosen.choice(words), number % 2 == 0
        pair = {"sentence1": f"{first} {number}", "sentence2": first if is_same else "other"}
        made.append({**pair, "label": int(is_same)})
    data = write_jsonl(tmp_path / "pairs.jsonl", made)
    run = api.train("text-classification", data=data, task_name="mrpc", **FLAGS)
    assert set(run.metrics) == {"accuracy", "f1", "ece", "loss"} and run.result["metric"] == "accuracy"
    assert_recomputed(run)
    assert len(run.predict(["w1", "w1", "w2", "other"])) == len(run.predict(["w1\tw1", "w2\tother"])) == 2
    with pytest.raises(InputError, match="pairs of texts"):
        run.predict(["alone"])


def test_numbers_are_predicted_as_numbers(tmp_path):
    made = [{"text": row["review"], "score": 1.5 if row["stars"] == "pos" else -0.5} for row in rows()]
    run = api.train("text-classification", data=write_jsonl(tmp_path / "numbers.jsonl", made), **FLAGS)
    assert set(run.metrics) == {"pearsonr", "spearmanr", "mse", "loss"}
    assert run.metrics["mse"] == pytest.approx(run.metrics["loss"], rel=1e-4)
    assert_recomputed(run)
    good, bad = run.predict(["great lovely superb", "awful dull boring"])
    assert good["value"] > bad["value"]


def test_each_of_several_labels_is_predicted(tmp_path):
    made = [
        {"text": row["review"], "labels": [row["stars"], *(["film"] if "film" in row["review"] else [])]}
        for row in rows()
    ]
    flags = {**FLAGS, "epochs": 5}
    run = api.train("text-classification", data=write_jsonl(tmp_path / "several.jsonl", made), **flags)
    assert set(run.metrics) == {"f1_micro", "f1_macro", "subset_accuracy", "ece", "loss"}
    assert_recomputed(run)
    assert run.metrics["f1_micro"] >= 0.8
    (found,) = run.predict(["great lovely superb film"])
    assert set(found) == {"labels", "scores"} and set(found["scores"]) == {"film", "neg", "pos"}


def test_labels_that_the_model_confidently_contradicts_are_listed(tmp_path):
    wrong = rows(30, seed=9)
    for row in wrong[:3]:
        row["stars"] = "neg" if row["stars"] == "pos" else "pos"
    run = api.train(
        "text-classification",
        train_file=write_csv(tmp_path / "train.csv", rows(160)),
        validation_file=write_csv(tmp_path / "validation.csv", wrong),
        **{**FLAGS, "epochs": 4},
    )
    listed = (run.path / "eval" / "suspects.csv").read_text()
    assert all(row["review"] in listed for row in wrong[:3])
    assert run.result["num_suspects"] == len(listed.splitlines()) - 1 <= 6


def test_adapters_are_trained_and_merged_into_the_model(reviews, tmp_path):
    folder = tiny_bert(tmp_path / "bert")
    run = api.train("text-classification", data=reviews, model=folder, lora=True, **{**FLAGS, "epochs": 1})
    from transformers import AutoModelForSequenceClassification

    names = set(AutoModelForSequenceClassification.from_pretrained(run.path / "model").state_dict())
    assert not [name for name in names if "lora" in name]
    assert "trained" in (run.path / "log.txt").read_text()
    before = run.predict(["great film"])
    resumed = api.resume(run, epochs=2, quiet=True)
    assert resumed.status == "done" and len(before) == len(resumed.predict(["great film"])) == 1


def test_frozen_layers_stay_as_they_were(reviews, tmp_path):
    from safetensors.torch import load_file

    folder = tiny_bert(tmp_path / "bert")
    run = api.train("text-classification", data=reviews, model=folder, freeze="1", **{**FLAGS, "epochs": 1})
    before, after = load_file(folder / "model.safetensors"), load_file(run.path / "model" / "model.safetensors")
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed and not [name for name in changed if "embeddings" in name or "layer.0." in name]
    assert any("layer.1." in name for name in changed)
    with pytest.raises(InputError, match="more layers than the model has"):
        api.train("text-classification", data=reviews, model=folder, freeze="9", **FLAGS)
    with pytest.raises(InputError, match="matches no parameter"):
        api.train("text-classification", data=reviews, model=folder, freeze="nothing.*", **FLAGS)


def test_early_stopping_ends_a_run_that_does_not_improve(reviews):
    flags = {**FLAGS, "epochs": 30, "lr": 0.0, "early_stopping_patience": 1}
    run = api.train("text-classification", data=reviews, **flags)
    assert run.result["epochs"] == 2 and "no improvement" in run.result["stop_reason"]
    assert run.folder.status.items() >= {"epoch": 2, "epochs": 2}.items()
    assert "2 full epochs" in (run.path / "model" / "README.md").read_text()


def test_a_test_file_is_evaluated_once_at_the_end_also_without_evaluations_before(reviews, tmp_path):
    held_out = write_csv(tmp_path / "test.csv", rows(30, seed=4))
    run = api.train("text-classification", train_file=reviews, test_file=held_out, eval_strategy="no", **FLAGS)
    told = read_lines(run.path / "metrics.jsonl")
    assert not [event for event in told if event["event"] == "evaluation"]
    assert run.result["update"] == run.result["updates"] and run.metrics["accuracy"] >= 0.8
    assert run.result["test_metrics"]["accuracy"] == run.evaluate(held_out)["accuracy"]


def test_evaluations_within_an_epoch_keep_the_best_model(reviews):
    run = api.train("text-classification", data=reviews, eval_strategy="steps", eval_steps=2, **FLAGS)
    told = read_lines(run.path / "metrics.jsonl")
    values = [event["eval_accuracy"] for event in told if event["event"] == "evaluation"]
    assert len(values) >= 5 and run.metrics["accuracy"] == max(values)
    losses = [
        event["eval_loss"] for event in told if event["event"] == "evaluation" and event["eval_accuracy"] == max(values)
    ]
    assert read_json(run.path / "checkpoints" / "best.json")["loss"] == min(losses)


@pytest.mark.parametrize("options", [{}, {"max_steps": 8}], ids=["whole epochs", "a limit"])
def test_no_weights_are_evaluated_twice_on_the_same_data_in_a_run(reviews, options):
    run = api.train("text-classification", data=reviews, eval_strategy="steps", eval_steps=1, **{**FLAGS, **options})
    told = [event for event in read_lines(run.path / "metrics.jsonl") if event["event"] == "evaluation"]
    updates = [event["update"] for event in told]
    assert updates == list(range(1, run.result["updates"] + 1))
    assert run.folder.status["epochs"] == run.result["epochs"] and run.folder.status["epoch"] == told[-1]["epoch"]
    assert "eval_loss_epoch" in told[-1]  # the one that is left is that of the epoch


refused = partial(refusal, "text-classification", FLAGS)


def test_a_missing_model_is_refused_with_the_nearest_name(reviews, tmp_path):
    tiny_bert(tmp_path / "bert")
    assert f"--model {tmp_path / 'bert'}" in refused("model.folder", data=reviews, model="./brt")
    (tmp_path / "empty").mkdir()
    assert "no config.json" in refused("model.folder", data=reviews, model="empty")
    assert "nor in the Hub cache" in refused("model.offline", data=reviews, model="some-model")


def test_a_model_with_too_few_positions_or_of_another_task_is_refused(reviews, tmp_path):
    folder = tiny_bert(tmp_path / "tagger")
    assert "fix: --max_length 64" in refused("model.length", data=reviews, model=folder, max_length=128)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["BertForTokenClassification"]
    (folder / "config.json").write_text(json.dumps(config))
    assert "BertForTokenClassification" in refused("model.task", data=reviews, model=folder)


def test_a_tokenizer_without_a_pad_token_is_refused_unless_it_has_an_end_token(reviews, tmp_path):
    folder = tiny_bert(tmp_path / "bert")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["pad_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    refused("model.pad_token", data=reviews, model=folder)
    settings["eos_token"] = "[SEP]"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert api.train("text-classification", data=reviews, model=folder, **{**FLAGS, "epochs": 1}).status == "done"
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer.json").write_text("{")
    refused("model.tokenizer", data=reviews, model=folder)


def test_settings_that_cannot_work_are_refused(reviews, monkeypatch):
    assert "accuracy, f1, ece, loss" in refused("args.metric", data=reviews, metric_for_best_model="bleu")
    with pytest.raises(ConfigError, match="label_smoothing_factor=0.1 is not supported"):
        api.train("text-classification", data=reviews, label_smoothing_factor=0.1, **FLAGS)
    assert "fewer than one batch" in refused("data.split", data=reviews, batch=500, dataloader_drop_last=True)
    monkeypatch.setitem(sys.modules, "peft", None)
    assert "pip install 'loopwright[lora]'" in refused("install.extra", data=reviews, lora=True)


def test_one_class_and_no_data_are_refused(tmp_path):
    alike = write_csv(tmp_path / "alike.csv", [{**row, "stars": "pos"} for row in rows(20)])
    refused("data.one_class", data=alike)
    assert "lw demo text-classification" in refused("data.file")


def test_changed_data_is_refused_unless_it_is_allowed(reviews):
    run = api.train("text-classification", data=reviews, **{**FLAGS, "epochs": 1})
    write_csv(reviews, rows(96, seed=1))
    for act in (run.resume, run.evaluate):
        with pytest.raises(InputError, match="resume.data"):
            act()
    assert run.predict(["great film"])  # needs no data
    assert api.resume(run, epochs=2, allow_changed_data=True, quiet=True).status == "done"
    write_csv(reviews, rows())
    with pytest.raises(InputError, match="resume.data"):
        api.resume(run, epochs=3, quiet=True)


def test_a_run_without_its_data_plan_says_so(reviews):
    run = api.train("text-classification", data=reviews, **{**FLAGS, "epochs": 1})
    (run.path / "data.json").unlink()
    for damage in (None, b"\xff\xfe", b"[]"):
        damage is None or (run.path / "data.json").write_bytes(damage)
        for act in (lambda: api.resume(run, epochs=2, quiet=True), run.evaluate):
            with pytest.raises(InputError, match="data.json cannot be read"):
                act()


def test_groups_stay_together_carry_their_number_and_a_resumed_run_keeps_its_split(tmp_path, monkeypatch):
    seen, add = [], MetricScorer.add
    note = lambda self, made: seen.append({one["position"]: one.get("group") for one in made}) or add(self, made)  # noqa: E731
    monkeypatch.setattr(MetricScorer, "add", note)
    made = [{**row, "reviewer": f"r{place % 9}"} for place, row in enumerate(rows())]
    data, copy = write_csv(tmp_path / "a.csv", made), write_csv(tmp_path / "b.csv", made)
    flags = {**FLAGS, "epochs": 1, "group_column": "reviewer", "rehearsal": False, "max_eval_samples": 9}
    run = api.train("text-classification", data=data, per_device_eval_batch_size=4, **flags)
    plan = DataPlan.read(run.path / "data.json")
    groups = [{row["group"] for row in map(plan.rows(split).__getitem__, range(9))} for split in plan.splits]
    assert groups[0] and groups[1] and not groups[0] & groups[1]
    lines = read_lines(run.path / "eval" / "predictions.jsonl")
    expected = {line["position"]: group_number(line["group"]) for line in lines}
    assert len(expected) == 9 and {**seen[0], **seen[1], **seen[2]} == expected
    seen.clear()
    run.evaluate(per_device_eval_batch_size=9)
    assert seen == [expected]
    assert run.evaluate(write_csv(tmp_path / "c.csv", [{"review": "x", "stars": "pos"}] * 2))["accuracy"] in (0, 1)
    train, held_out = (plan.splits[split].parts[0].rows for split in ("train", "validation"))
    train[0], held_out[0] = held_out[0], train[0]  # a split that today's rules would not make
    (run.path / "data.json").write_text(plan.to_json())
    for name, value in {"group_column": "stars", "validation_ratio": 0.4, "class_weights": "balanced"}.items():
        with pytest.raises(InputError) as refused:  # data.json has them, so they would be ignored
            api.resume(run, epochs=2, quiet=True, **{name: value})
        assert refused.value.flag == f"--{name}"
    api.resume(run, data=copy, epochs=2, quiet=True, lr_scheduler_type="cosine")
    assert "lr_scheduler_type: 'linear' -> 'cosine'" in (run.path / "log.txt").read_text()
    kept = DataPlan.read(run.path / "data.json")
    assert kept.files[0].path == str(copy)
    assert kept.to_json().replace("b.csv", "a.csv").split(' "sha256"')[:-1] == plan.to_json().split(' "sha256"')[:-1]


def test_the_names_are_offered_by_the_package():
    assert loopwright.train is api.train and loopwright.Run is api.Run
    assert {"train", "check", "resume", "evaluate", "predict", "Run"} <= set(dir(loopwright))


def test_files_of_every_ending_and_with_other_names_of_columns_are_predicted_and_evaluated(finished, tmp_path, capsys):
    made = [{"text": row["review"], "label": row["stars"]} for row in rows(12, seed=4)]
    texts = [row["text"] for row in made]
    expected = finished.predict(texts)
    write_jsonl(tmp_path / "new.ndjson", made)
    (tmp_path / "new.tab").write_text("text\tlabel\n" + "".join(f"{r['text']}\t{r['label']}\n" for r in made))
    (tmp_path / "new.text").write_text("".join(f"{each}\n" for each in texts))
    for name in ("new.ndjson", "new.tab", "new.text"):
        assert finished.predict(name) == expected
        assert main(["predict", str(finished.path), name]) == 0
        assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == expected
    write_csv(tmp_path / "odd.csv", [{"a": row["text"], "b": f"other {row['text']}"} for row in made])
    assert main(["predict", str(finished.path), "odd.csv"]) == 2
    assert "error[data.column]" in capsys.readouterr().err
    assert finished.predict("odd.csv", text_column="a") == expected
    assert main(["predict", str(finished.path), "odd.csv", "--text-column", "a"]) == 0
    same = write_csv(tmp_path / "same.csv", rows(12, seed=4))
    other = write_csv(tmp_path / "other.csv", made)
    assert finished.evaluate(other) == finished.evaluate(same)
    assert finished.evaluate(other, label_column="label") == finished.evaluate(same)


def test_evaluation_uses_as_many_rows_as_the_run_by_default(reviews, capsys):
    run = api.train("text-classification", data=reviews, max_eval_samples=5, **{**FLAGS, "epochs": 1})
    assert run.evaluate() == run.metrics
    assert len(read_lines(run.path / "eval" / "predictions.jsonl")) == 5
    run.evaluate(max_eval_samples=7)
    assert len(read_lines(run.path / "eval" / "predictions.jsonl")) == 7
    run.evaluate(reviews)
    assert len(read_lines(run.path / "eval" / "reviews" / "predictions.jsonl")) == 96
    assert main(["evaluate", str(run.path), "--max_eval_samples", "6"]) == 0
    assert "first 6 of" in capsys.readouterr().out
    assert main(["evaluate", str(run.path), "--max_eval_sample", "6"]) == 2
    assert "--max_eval_samples instead of " in capsys.readouterr().err


def test_only_flags_of_a_trained_model_can_be_changed(finished):
    with pytest.raises(InputError, match="learning_rate cannot be changed") as caught:
        finished.predict(["a"], learning_rate=1)
    assert caught.value.code == "args.unknown" and "per_device_eval_batch_size" in str(caught.value)
    assert finished.predict(["great film"], per_device_eval_batch_size=1) == finished.predict(["great film"])


def test_a_test_file_without_labels_is_reported_and_not_scored(reviews, tmp_path):
    test = write_csv(tmp_path / "test.csv", [{"review": row["review"]} for row in rows(8, seed=5)])
    run = api.train("text-classification", data=reviews, test_file=test, **{**FLAGS, "epochs": 1})
    assert run.status == "done" and "test_metrics" not in run.result
    assert "the test file has no label: it is not scored" in (run.path / "log.txt").read_text()
    labelled = write_csv(tmp_path / "labelled.csv", rows(8, seed=5))
    run = api.train("text-classification", data=reviews, test_file=labelled, **{**FLAGS, "epochs": 1})
    assert run.result["test_metrics"]["accuracy"] == run.evaluate(labelled)["accuracy"]


def test_a_nan_metric_does_not_break_the_end_of_a_run(tmp_path):
    made = [{"text": f"{'very ' * (n % 4)}good {n}", "label": f"{n % 4}.5"} for n in range(40)]
    train = write_csv(tmp_path / "train.csv", made)
    flat = write_csv(tmp_path / "flat.csv", [{**row, "label": "1.5", "text": f"x {row['text']}"} for row in made])
    files = {"train_file": train, "validation_file": flat, "label_kind": "float"}
    run = api.train("text-classification", **files, **{**FLAGS, "epochs": 1})
    assert run.status == "done" and run.result["nonfinite"] == {"pearsonr": "nan", "spearmanr": "nan"}
    assert math.isnan(run.metrics["pearsonr"]) and run.metrics["mse"] > 0 and "pearsonr" not in run.result["metrics"]


def test_gradient_checkpointing_gives_the_same_model(reviews):
    weights = []
    for is_on in (False, True):
        run = api.train("text-classification", data=reviews, gradient_checkpointing=is_on, **{**FLAGS, "epochs": 1})
        weights.append((run.path / "model" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_a_model_of_pairs_refuses_a_file_without_the_second_text(tmp_path):
    pairs = [{"one": f"a {n}", "two": f"b {n % 7}", "label": "yn"[n % 2]} for n in range(40)]
    columns = {"text_column": "one", "text_pair_column": "two"}
    run = api.train("text-classification", data=write_csv(tmp_path / "pairs.csv", pairs), **columns,
                    **{**FLAGS, "max_steps": 1, "rehearsal": False})  # fmt: skip
    half = write_csv(tmp_path / "half.csv", [{"one": "a 1", "label": "y"}])
    for use in (lambda: list(run.predict(half)), lambda: run.evaluate(data=half)):
        with pytest.raises(InputError, match="column for text_pair") as caught:
            use()
        assert caught.value.code == "data.column" and "text_pair" in caught.value.fix
    other = write_csv(tmp_path / "other.csv", [{"sentence1": "a 1", "sentence2": "b 2"}])
    assert len(list(run.predict(other))) == 1
