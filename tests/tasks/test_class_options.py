"""Flags about classes, from the command line to the finished run: names, maps, weights, columns of 0 and 1."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import loopwright
from loopwright import api
from loopwright.cli import main
from loopwright.config.files import read_mapping
from loopwright.errors import ConfigError, InputError
from loopwright.runs.job import build_job
from loopwright.runs.settings import settle
from loopwright.tasks import get_task
from loopwright.tasks.base import Origin
from loopwright.tasks.class_options import label_map, listed_names
from loopwright.tasks.data import RunData
from tasks.conftest import FLAGS
from tasks.reviews import read_lines, rows, write_csv, write_jsonl
from tasks.runs import train_in


def settled(task, **flags):
    """Return the data plan and the settled class weights."""
    settings = settle(get_task(task), flags)
    plan = get_task(task).preflight(settings.args)
    return plan, [float(weight) for weight in settings.args.class_weights]


def imbalanced(path):
    """Write reviews of which few are negative."""
    good, bad = ([row for row in rows(240) if row["stars"] == stars] for stars in ("pos", "neg"))
    return write_csv(path, bad[:10] + good)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["neg,pos"], ["neg", "pos"]),
        (["neg", "pos, or so"], ["neg", "pos, or so"]),
        (["neg,", "pos"], ["neg", "pos"]),
        (['["a, b", "c"]'], ["a, b", "c"]),
        (["好,坏,"], ["好", "坏"]),
    ],
)
def test_names_are_words_or_have_commas_or_are_json(words, names):
    assert listed_names("label_names", words) == names


@pytest.mark.parametrize(
    "words",
    [["a=b", "c=d"], ["a=b,c=d"], ["a=b, c = d"], ['{"a": "b", "c": "d"}'], ['{"a": "b"}', "c=d"], ["map.json"]],
)
def test_a_label_map_is_pairs_or_json_or_a_json_file(words):
    Path("map.json").write_text('{"a": "b", "c": "d"}')
    assert label_map(words) == {"a": "b", "c": "d"}
    assert label_map(['{"a=1, b": "x, y"}', "k,l=m"]) == {"a=1, b": "x, y", "k,l": "m"}


@pytest.mark.parametrize(
    ("flags", "code", "fix"),
    [
        (["--label_names", "a,,b"], "args.value", "--label_names a,b"),
        (["--label_names", "a,b,a"], "args.value", "--label_names a,b"),
        (["--label_names", '["a", 1'], "args.value", """--label_names '["one", "two"]'"""),
        (["--label_map", '{"a": ["b"]}'], "args.value", """--label_map '{"old": "new"}'"""),
        (["--label_map", "pos="], "args.value", "--drop_labels pos instead of --label_map pos="),
        (["--label_map", "none.json"], "data.file", "--label_map positive=pos"),
        (["--label_column", "stars", "--label_columns", "stars,x"], "args.value", "leave out --label_column"),
        (["--class_weights", "pso=2"], "data.labels", "--class_weights pos=2"),
        (["--class_weights", "pos=-1"], "args.value", "--class_weights balanced"),
        (["--class_weights", "1,2,3"], "args.value", "--class_weights balanced"),
        (["--class_weights", "0", "0"], "args.value", "--class_weights balanced"),
    ],
)
def test_flags_about_classes_that_cannot_be_followed_are_refused(reviews, flags, code, fix):
    task = get_task("text-classification")
    with pytest.raises(InputError) as caught:
        task.preflight(settle(task, ["--data", str(reviews), *flags]).args)
    assert caught.value.code == code and fix in caught.value.fix


def test_repeated_flags_add_up_and_python_takes_mappings():
    task = get_task("text-classification")
    words = "--label_map a=b --drop_labels x,y --label_map c=d e=f --drop_labels z"
    args = settle(task, words.split()).args
    assert args.label_map == ["a=b", "c=d", "e=f"] and task.data_options(args).drop_labels == ["x", "y", "z"]
    Path("map.json").write_text('{"a": "b"}')
    assert settle(task, ["--label_map", "map.json"]).args.label_map == ['{"a": "b"}']  # a resume needs no file
    args = settle(task, {"label_map": {"a,b": "c"}, "class_weights": {"a": 2}, "label_names": ["x", "y"]}).args
    assert label_map(args.label_map) == {"a,b": "c"} and args.class_weights == ['{"a": 2}']
    assert task.data_options(args).label_names == ["x", "y"]


def test_strong_imbalance_is_noted_and_balanced_weights_count_classes_the_same(tmp_path):
    data = imbalanced(tmp_path / "rare.csv")
    plan, weights = settled("text-classification", data=data)
    assert any("--class_weights balanced" in note for note in plan.warnings) and not weights
    plan, weights = settled("text-classification", data=data, class_weights="balanced")
    counts = list(plan.counts["train"].values())
    shares = [weight * count / sum(counts) for weight, count in zip(weights, counts, strict=True)]
    assert shares == pytest.approx([0.5, 0.5], rel=1e-4)
    assert not any("class_weights" in note for note in plan.warnings)
    for given in ({"pos": 0.5}, "pos=0.5,neg=1", ["1", "0.5"], "1,0.5"):
        assert settled("text-classification", data=data, class_weights=given)[1] == [1, 0.5]
    few, weights = settled("text-classification", data=data, class_weights="balanced", max_train_samples=30)
    labels = [few.rows("train")[index]["label"] for index in range(30)]
    assert weights == pytest.approx([30 / (2 * labels.count(number)) for number in range(2)], rel=1e-4)
    with pytest.raises(ConfigError, match="exclude"):
        settle(get_task("image-classification"), {"class_weights": "balanced", "label_smoothing": 0.1})
    numbers = write_csv(tmp_path / "numbers.csv", [{**row, "stars": str(k / 7)} for k, row in enumerate(rows(40))])
    with pytest.raises(InputError, match="numbers to predict"):
        settled("text-classification", data=numbers, class_weights="balanced")


def token_rows(count=24):
    return [
        {"tokens": [f"w{k % 7}", "in", "Rome"], "tags": ["O", "O", "B-LOC" if k % 3 else "O"]} for k in range(count)
    ]


@pytest.mark.parametrize("task", ["text-classification", "token-classification", "image-classification", "several"])
def test_the_weighted_loss_is_a_mean_over_weights_whatever_the_batches(task, tmp_path, squares):
    """Batches that are combined by their items give the loss of all samples, and torch's own weighted loss."""
    flags = (
        {"data": squares}
        if task == "image-classification"
        else {"data": write_jsonl(tmp_path / "t.jsonl", token_rows())}
    )
    if task in ("text-classification", "several"):
        made = [{**row, "stars": f"{row['stars']};x" if k % 5 == 0 else row["stars"]} for k, row in enumerate(rows(40))]
        flags = {"data": write_csv(tmp_path / "rows.csv", made if task == "several" else rows(40))}
        flags |= {"label_separator": ";"} if task == "several" else {}
    named = get_task("text-classification" if task == "several" else task)
    settings = settle(named, {**flags, "class_weights": "balanced"})
    plan = named.preflight(settings.args)
    job = build_job(named, RunData(plan), settings, Origin(None))
    job.model.eval()
    dataset = named.create_dataset(job, job.data.rows("train"), is_labelled=True, is_training=True)
    features = [dataset[index] for index in range(len(dataset))]

    def loss_of(size):
        total = weight = 0.0
        for start in range(0, len(features), size):
            batch = job.collate_fn(features[start : start + size])
            number = named.count_items(batch)
            loss, outputs = named.compute_loss(job, job.model, batch)
            total, weight = total + loss.item() * number, weight + number
        return total / weight, outputs, batch

    whole, outputs, batch = loss_of(len(features))
    assert loss_of(3)[0] == pytest.approx(whole, rel=1e-4)
    weights = torch.tensor([float(each) for each in settings.args.class_weights])
    if task == "several":
        expected = functional.binary_cross_entropy_with_logits(outputs.logits, batch["labels"], pos_weight=weights)
    else:
        logits = outputs.logits.transpose(1, 2) if outputs.logits.dim() == 3 else outputs.logits
        expected = functional.cross_entropy(logits, batch["labels"], weight=weights)
    assert whole == pytest.approx(expected.item(), rel=1e-4)
    # Evaluation is without weights, so that runs with other weights can be compared.
    plain = named.create_dataset(job, job.data.rows("train"), is_labelled=True)
    assert "num_items" not in job.collate_fn([plain[0], plain[1]])


@pytest.fixture(scope="module")
def weighted(tmp_path_factory):
    """Return a run with names, a map, dropped labels and weights, and its data."""
    folder = tmp_path_factory.mktemp("weighted")
    made = rows(96)
    for number, row in enumerate(made):
        row["stars"] = {0: "spam", 1: "zero"}.get(number % 9) or {"pos": "1", "neg": "0"}[row["stars"]]
    flags = {"label_names": "bad,good", "label_map": {"zero": "0"}, "drop_labels": ["spam"]}
    flags |= {"class_weights": "balanced"}
    return train_in(folder, "text-classification", data=write_csv(folder / "data.csv", made), **flags, **FLAGS), folder


def test_names_map_drops_and_weights_are_kept_by_the_run(weighted, capsys, tmp_path):
    run, folder = weighted
    config = read_mapping(run.path / "config.yaml")
    assert len(config["class_weights"]) == 2 and config["drop_labels"] == ["spam"]
    labels = read_mapping(run.path / "data.json")["labels"]
    assert labels["names"] == ["bad", "good"] and labels["label_map"] == {"0": "bad", "1": "good", "zero": "bad"}
    assert json.loads((run.path / "model" / "config.json").read_text())["id2label"] == {"0": "bad", "1": "good"}
    assert {each["reference"] for each in read_lines(run.path / "eval" / "predictions.jsonl")} == {"bad", "good"}
    assert run.predict(["great film"])[0]["label"] in ("bad", "good")
    assert run.evaluate() == run.metrics
    other = run.evaluate(folder / "data.csv")  # the same map, and the dropped rows are left out
    made = write_csv(
        tmp_path / "new.csv", [{"review": row["review"], "stars": f"is {row['stars']}"} for row in rows(20)]
    )
    with pytest.raises(InputError) as caught:
        run.evaluate(made)
    assert caught.value.code == "data.labels" and other["accuracy"] > 0
    words = ["evaluate", str(run.path), "--data", str(made), "--label_map", "is pos=good", "is neg=0", "--quiet"]
    assert main(words) == 0 and "accuracy" in capsys.readouterr().out
    assert main([*words[:4], "--unknown_labels", "drop"]) == 2  # nothing is left
    resumed = api.resume(shutil.copytree(run.path, tmp_path / "copied"), epochs=3, quiet=True)
    assert resumed.status == "done"
    assert read_mapping(resumed.path / "config.yaml")["class_weights"] == config["class_weights"]


def test_columns_of_0_and_1_are_trained_evaluated_and_predicted(tmp_path):
    made = [
        {
            "text": row["review"],
            "good": str(int(row["stars"] == "pos")),
            "odd": ["no", "0", "1"][1 + k % 2],
            "never": "0",
        }
        for k, row in enumerate(rows(64))
    ]
    data = write_csv(tmp_path / "columns.csv", made)
    run = loopwright.train(
        "text-classification", data=data, label_columns=["good", "odd", "never"], class_weights="balanced", **FLAGS
    )
    assert "f1_micro" in run.metrics and run.evaluate(data)["f1_micro"] > 0
    bare = write_csv(tmp_path / "bare.csv", [{"text": row["text"]} for row in made[:3]])
    assert [set(each["scores"]) for each in run.predict(bare)] == [{"good", "odd", "never"}] * 3
