"""What an evaluation collects: metrics that merge, bounded lists of examples, files that are whole or not there."""

from __future__ import annotations

import json
import random

import pytest

from loopwright.metrics import load
from loopwright.tasks.scoring import Examples, MetricScorer, PredictionFile, write_table


def samples(count=200):
    chosen = random.Random(0)
    return [
        {"position": n, "prediction": chosen.randint(0, 2), "reference": chosen.randint(0, 2), "loss": chosen.random()}
        for n in range(count)
    ]


def scorer(name="accuracy"):
    return MetricScorer(lambda: load(name), {name: True})


@pytest.mark.parametrize("name", ["accuracy", "pearsonr"])
def test_scorers_of_several_processes_merge_to_that_of_one(name):
    whole, parts = scorer(name), [scorer(name), scorer(name)]
    whole.add(samples())
    for index, part in enumerate(parts):
        part.add(samples()[index::2])
        part.add([])
    merged = scorer(name)
    for part in parts:
        merged.merge_state(json.loads(json.dumps(part.state_dict())))
    assert merged.intervals() == whole.intervals()
    assert bool(whole.intervals()) == (name == "accuracy")
    assert merged.compute() == pytest.approx(whole.compute(), abs=1e-12)


def test_the_worst_and_the_surest_are_kept_whatever_the_order():
    made = samples()
    for sample in made[::7]:
        sample["sure"] = sample["loss"]
    first, second = Examples(5, 3), Examples(5, 3)
    first.add(made)
    second.add(reversed(made))
    expected = sorted(made, key=lambda sample: -sample["loss"])[:5]
    assert first.worst == second.worst == expected
    assert first.suspects == second.suspects == sorted(made[::7], key=lambda sample: -sample["loss"])[:3]


def test_samples_without_a_loss_are_no_examples():
    found = Examples()
    found.add([{"position": 0, "prediction": 1}])
    assert found.worst == found.suspects == []


def test_a_file_of_predictions_has_its_name_only_when_it_is_whole(tmp_path):
    path = tmp_path / "eval" / "predictions.jsonl"
    with pytest.raises(KeyError), PredictionFile(path) as file:
        file.add(samples(3))
        raise KeyError
    assert list(path.parent.iterdir()) == []
    with PredictionFile(path) as file:
        file.add(samples(3))
    assert [json.loads(line)["position"] for line in path.read_text().splitlines()] == [0, 1, 2]
    with PredictionFile(None) as file:
        file.add(samples(3))


def test_a_table_has_the_columns_of_all_rows(tmp_path):
    write_table(tmp_path / "t.csv", [{"a": 1}, {"a": 2, "b": "x, y"}])
    assert (tmp_path / "t.csv").read_text() == 'a,b\n1,\n2,"x, y"\n'
