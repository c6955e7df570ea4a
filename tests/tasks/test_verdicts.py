"""Tests of the verdict on a run, from its data to its words, and of the baselines that it is against."""

import itertools
import json
import random

import numpy as np
import pytest

from loopwright import api, baselines
from loopwright.cli.main import main
from loopwright.runs.verdicts import verdict_of_seeds
from tasks.recomputed import assert_judged
from tasks.reviews import rows, write_csv

FLAGS = {"lr": 2e-3, "batch": 16, "threads": 1, "quiet": True, "epochs": 3}


def coin_flips(count, seed):
    chosen = random.Random(seed)
    return [{**row, "stars": chosen.choice(["neg", "pos"])} for row in rows(count, seed)]


def test_a_model_of_coin_flips_is_not_called_better_and_a_test_file_decides(tmp_path, capsys):
    train, held = (
        write_csv(tmp_path / f"{name}.csv", coin_flips(*made)) for name, made in (("a", (60, 3)), ("b", (20, 103)))
    )
    run = api.train("text-classification", train_file=train, validation_file=held, output_dir=tmp_path / "run", **FLAGS)
    verdict = run.result["verdict"]
    assert verdict["kind"] != "better" and (verdict["evaluations"], verdict["split"], verdict["rows"]) == (
        3,
        "validation",
        20,
    )
    assert_judged(run)
    test = write_csv(tmp_path / "c.csv", rows(40, 9))
    learnt = write_csv(tmp_path / "d.csv", rows(60, 5))
    tested = api.train("text-classification", train_file=learnt, validation_file=held, test_file=test, **FLAGS)
    verdict = tested.result["verdict"]
    assert (verdict["evaluations"], verdict["split"], verdict["rows"]) == (1, "test", 40)
    assert verdict["value"] == tested.result["test_metrics"]["accuracy"]
    assert_judged(tested)
    assert "On the test data: " in (tested.path / "model" / "README.md").read_text()
    assert main(["compare", str(run.path), str(tested.path), "--json"]) == 0
    (compared,) = json.loads(capsys.readouterr().out)["verdicts"]
    assert compared["rows"] == 20 and compared["text"].startswith("By accuracy on the validation data, ")


def test_a_resumed_run_reaches_the_same_verdict(tmp_path, reviews):
    flags = {**FLAGS, "epochs": 1, "lr_scheduler_type": "constant"}
    whole = api.train("text-classification", data=reviews, **{**flags, "epochs": 2}, output_dir=tmp_path / "whole")
    part = api.train("text-classification", data=reviews, **flags, output_dir=tmp_path / "part")
    resumed = api.resume(part.path, epochs=2, quiet=True)
    assert resumed.result["verdict"] == whole.result["verdict"] and whole.result["evaluations"] == 2
    assert (resumed.path / "eval" / "rows.npz").read_bytes() == (whole.path / "eval" / "rows.npz").read_bytes()


@pytest.mark.parametrize(
    ("values", "ps", "kind"),
    [
        ([0.8, 0.82, 0.81, 0.79], [0.001, 0.002, 0.001, 0.2], "better"),
        ([0.8, 0.82, 0.81, 0.79], [0.2, 0.3, 0.2, 0.4], "indistinct"),  # of the same rows, by chance
        ([0.9, 0.5, 0.7, 0.45], [0.001, 0.6, 0.001, 0.7], "indistinct"),
        ([0.3, 0.32, 0.31, 0.29], [0.001, 0.002, 0.001, 0.2], "worse"),
        ([0.5, 0.5, 0.5], [1.0, 1.0, 1.0], "indistinct"),
        ([0.8, 0.8], [0.001, 0.001], "better"),
        ([0.8], [0.001], None),
    ],
)
def test_seeds_are_judged_by_a_t_test_and_by_their_own_verdicts(values, ps, kind):
    same = {"metric": "accuracy", "direction": "max", "baseline": "majority", "baseline_value": 0.5, "split": "test"}
    found = verdict_of_seeds([{**same, "value": v, "p": p, "rows": 40} for v, p in zip(values, ps, strict=True)])
    assert (found and found["kind"]) == kind
    assert verdict_of_seeds([]) is None and verdict_of_seeds([{"kind": None}, {"kind": None}]) is None


def test_the_baselines_have_the_best_constant_of_each_metric():
    labels = baselines.FrequentLabels()
    targets = [[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 1, 0]]
    labels.learn(None, targets)
    sets = np.asarray(list(itertools.product([0, 1], repeat=3)))
    micro = 2 * (sets @ np.transpose(targets)).sum(axis=1) / (4 * sets.sum(axis=1) + 7)
    assert labels.predict([None]) == [sets[micro.argmax()].tolist()]
    median = baselines.MedianValue()
    median.learn(None, [1.0, 2.0, 30.0])
    assert median.predict([0, 0]) == [2.0, 2.0] and baselines.Constant("").predict([1]) == [""]
