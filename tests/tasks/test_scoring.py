"""What an evaluation collects: metrics that merge, bounded lists of examples, files that are whole or not there."""

import json
import math
import random

import hypothesis.strategies as st
import pytest
from hypothesis import given

from loopwright import api
from loopwright.metrics import Bootstrap, load
from loopwright.report.panels import read_findings
from loopwright.tasks.scoring import Examples, LossInterval, MetricScorer, prediction_file, write_lines, write_table
from tasks.conftest import FLAGS
from tasks.reviews import read_lines, write_csv


def samples(count=200):
    chosen = random.Random(0)
    return [
        {"position": n, "prediction": chosen.randint(0, 2), "reference": chosen.randint(0, 2), "loss": chosen.random()}
        for n in range(count)
    ]


def scorer(name="accuracy"):
    return MetricScorer(lambda: load(name), {name: True})


@pytest.mark.parametrize("name", ["accuracy", "pearsonr"])
def test_merged_scorers_of_several_processes_equal_one(name):
    whole, parts = scorer(name), [scorer(name), scorer(name)]
    whole.add(samples())
    for index, part in enumerate(parts):
        part.add(samples()[index::2])
        part.add([])
    merged = scorer(name)
    for part in parts:
        merged.merge_state(json.loads(json.dumps(part.state_dict())))
    assert merged.intervals() == whole.intervals()
    assert set(whole.intervals()) == {name}
    assert merged.compute() == pytest.approx(whole.compute(), abs=1e-12)


def test_the_worst_and_most_confident_samples_are_kept_in_any_order_unless_they_have_no_loss():
    made = samples()
    for sample in made[::7]:
        sample["sure"] = sample["loss"]
    first, second = Examples(5, 3), Examples(5, 3)
    first.add(made)
    second.add(reversed(made))
    expected = sorted(made, key=lambda sample: -sample["loss"])[:5]
    assert first.worst == second.worst == expected
    assert first.suspects == second.suspects == sorted(made[::7], key=lambda sample: -sample["loss"])[:3]
    found = Examples()
    found.add([{"position": 0, "prediction": 1}])
    assert found.worst == found.suspects == []


@given(
    losses=st.lists(st.sampled_from([math.nan, math.inf, -math.inf, 0.0, 1.0, 2.5]), min_size=1), seed=st.integers(0, 9)
)
def test_samples_without_a_finite_loss_come_first_in_any_order_and_their_lines_are_json(losses, seed, tmp_path_factory):
    made = [{"position": place, "loss": loss} for place, loss in enumerate(losses)]
    found = Examples(5)
    found.add(random.Random(seed).sample(made, len(made)))
    finite = sorted((one for one in made if math.isfinite(one["loss"])), key=lambda one: -one["loss"])
    worst = [*(one for one in made if not math.isfinite(one["loss"])), *finite][:5]
    assert found.worst == worst
    folder = tmp_path_factory.mktemp("worst")
    write_lines(folder / "worst.jsonl", worst)
    for line in (folder / "worst.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)
    heads = [item.head for item in read_findings(folder, []).worst.items]
    names = (
        f"loss {loss:.4f}" if math.isfinite(loss) else f"loss is {loss}" for loss in (one["loss"] for one in worst)
    )
    assert heads == [f"row {one['position']} · {name}" for one, name in zip(worst, names, strict=True)]


def test_a_prediction_file_is_renamed_into_place_when_complete(tmp_path):
    path = tmp_path / "eval" / "predictions.jsonl"
    with pytest.raises(KeyError), prediction_file(path) as add:
        add(samples(3))
        raise KeyError
    assert list(path.parent.iterdir()) == []
    with prediction_file(path) as add:
        add(samples(3))
    assert [json.loads(line)["position"] for line in path.read_text().splitlines()] == [0, 1, 2]
    with prediction_file(None) as add:
        add(samples(3))


def test_a_table_has_the_union_of_all_columns(tmp_path):
    write_table(tmp_path / "t.csv", [{"a": 1}, {"a": 2, "b": "x, y"}])
    assert (tmp_path / "t.csv").read_text() == 'a,b\n1,\n2,"x, y"\n'


def test_baselines_are_fitted_and_scored_on_the_rows_of_the_run(tmp_path, capsys):
    labels = {"train": ["neg"] * 20 + ["pos"] * 40, "validation": ["pos"] * 4 + ["neg"] * 16}
    labels["test"] = ["neg", "pos", "neg", "neg", "pos", "pos"]
    for split, column in labels.items():
        rows = [{"text": f"{label} {split} number {number}", "label": label} for number, label in enumerate(column)]
        write_csv(tmp_path / f"{split}.csv", rows)
    files = {f"{split}_file": tmp_path / f"{split}.csv" for split in labels}
    flags = {**FLAGS, "epochs": 1, "rehearsal": False, "quiet": False}
    limits = {"max_train_samples": 24, "max_eval_samples": 5, "max_test_samples": 4}
    run = api.train("text-classification", **files, **limits, **flags)
    assert run.result["baselines"]["majority"]["test_accuracy"] == 0.75
    assert len(read_lines(run.path / "eval" / "test" / "predictions.jsonl")) == 4
    assert run.result["baselines"]["majority"]["accuracy"] == 0.2  # 20 of 24 are neg, 1 of 5
    used = "used: the first 24 of train (--max_train_samples), the first 5 of validation (--max_eval_samples)"
    used += ", the first 4 of test (--max_test_samples)"
    assert f"        {used}\n" in capsys.readouterr().out
    assert f"- {used}\n" in (run.path / "model" / "README.md").read_text()


def test_the_loss_is_the_mean_of_the_samples_and_few_have_no_interval(finished):
    num_rows = len(read_lines(finished.path / "eval" / "predictions.jsonl"))
    reason = f"at least 50 samples are needed, there are {num_rows}"
    assert finished.result["no_intervals"]["loss"] == reason and "loss" not in finished.result["intervals"]
    texts = [finished.path / "log.txt", finished.path / "report.html", finished.path / "model" / "README.md"]
    assert all(f"No interval for loss: {reason}." in path.read_text() for path in texts)
    losses = [sample["loss"] for sample in read_lines(finished.path / "eval" / "predictions.jsonl")]
    assert sum(losses) / len(losses) == pytest.approx(finished.metrics["loss"], rel=1e-12)


def test_the_interval_of_a_loss_over_tokens_weighs_samples_by_them_and_merges():
    made = [{"position": n, "loss": float(n % 3), "num_target_tokens": 1 + n % 5} for n in range(60)]
    expected = Bootstrap(load("loss"))
    counts = [sample["num_target_tokens"] for sample in made]
    expected.add_batch(sums=[sample["loss"] * count for sample, count in zip(made, counts, strict=True)], counts=counts)
    whole, first, second = LossInterval(), LossInterval(), LossInterval()
    whole.add(made)
    first.add(made[:20])
    second.add(made[20:])
    first.merge_state(second.state_dict())
    assert whole.intervals() == first.intervals() == expected.interval() and whole.compute() == {}


def test_weights_of_losses_need_not_be_whole_and_a_sample_without_items_counts_for_nothing():
    made = [{"position": n, "own": float(n % 3), "share": 0.3 * (n % 5)} for n in range(90)]
    half, nothing = LossInterval("own", "share"), LossInterval("own", "share")
    half.add([{**sample, "share": sample["share"] / 2} for sample in made])
    nothing.add([{**sample, "own": sample["own"] if sample["share"] else float("nan")} for sample in made])
    assert half.intervals()["loss"] == pytest.approx(nothing.intervals()["loss"], rel=1e-4)


def test_the_loss_has_no_interval_if_samples_lack_it_or_do_not_add_up():
    made = [{"position": n, "loss": float(n % 3)} for n in range(60)]
    lacking, other, fitting = LossInterval(), LossInterval(), LossInterval()
    lacking.add([*made, {"position": 60}])
    assert other.exact_loss(made, 1.01) is None
    other.add(made)
    assert fitting.exact_loss(made, 1.0001) == 1.0
    fitting.add(made)
    assert lacking.intervals() == other.intervals() == {} and set(fitting.intervals()) == {"loss"}
    fitting.merge_state(json.loads(json.dumps(other.state_dict())))
    assert fitting.intervals() == {}
    broken, nan = LossInterval(), float("nan")
    assert broken.exact_loss([{**made[0], "loss": nan}], nan) is None and broken.exact_loss(made, 1.01) is None
    fitting.merge_state(broken.state_dict())
    assert broken.intervals().missing == fitting.intervals().missing == {"loss": "it is undefined on this data"}
