"""metrics.jsonl as the report reads it: curves, marks, time, damage, growth."""

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopwright.report.charts import MARK_NAMES
from loopwright.report.formats import duration, metric
from loopwright.report.metrics import Metrics
from loopwright.report.series import Series, thinned
from report.folders import records, write_lines


def read(path) -> Metrics:
    metrics = Metrics(path)
    metrics.read()
    return metrics


def read_rows(folder, rows) -> Metrics:
    write_lines(folder / "m.jsonl", rows)
    return read(folder / "m.jsonl")


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400), st.integers(1, 50))
def test_a_thinned_curve_keeps_its_extremes_its_ends_and_only_points_of_its_own(values, num_columns):
    points = thinned(range(len(values)), values, num_columns)
    assert set(points) <= set(enumerate(values))
    assert points == sorted(points, key=lambda point: point[0])
    assert points[0] == (0, values[0]) and points[-1] == (len(values) - 1, values[-1])
    assert min(value for _, value in points) == min(values)
    assert max(value for _, value in points) == max(values)
    assert len(points) <= 2 * num_columns + 2


def test_a_thinned_curve_keeps_the_extremes_of_every_column_and_of_all_its_points():
    chance = random.Random(0)
    values = [chance.random() for _ in range(1000)]
    points = dict(thinned(range(1000), values, 10))
    for column in range(10):
        low, high = column * 99.9, (column + 1) * 99.9
        inside = [values[index] for index in range(1000) if low < index <= high or index == column == 0]
        kept = [value for update, value in points.items() if low < update <= high or update == column == 0]
        assert min(kept) == min(inside) and max(kept) == max(inside)
    series, wave = Series(), [math.sin(update / 1000) for update in range(300_000)]
    for update, value in enumerate([*wave, 7.0, -7.0, *[0.0] * 99_998]):
        series.add(update, value)
    points = series.points(600)
    values = [value for _, value in points]
    assert max(values) == 7.0 and min(values) == -7.0 and len(values) <= 1202
    assert points[-1] == (399_999, 0.0)
    assert series.mean() == pytest.approx(math.fsum(wave) / 400_000)


def test_numbers_and_times_at_their_limits_are_readable():
    assert (metric(12.3456), metric(1e300), metric(math.nan)) == ("12.35", "1.00e+300", "nan")
    assert [duration(each) for each in (59.94, 59.96, math.nan)] == ["59.9 s", "1:00 min", "nan"]


def test_curves_hold_the_logged_values_by_metric(tmp_path):
    series = read_rows(tmp_path, records()).series
    assert series["loss"].points(600) == [(update, 2.0 / update) for update in (10, 20, 30, 40)]
    assert series["eval_accuracy"].points(600) == [(20, 0.6), (40, 0.7)]
    names = {"lr", "gradient_norm", "samples_per_second", "data_wait", "padding_waste", "peak_memory_bytes"}
    assert names <= set(series)
    assert not {"update", "epoch", "seconds", "time", "seed", "train_seconds", "save_seconds"} & set(series)


def test_saves_resumes_splits_skips_guarantees_and_values_that_are_no_number_are_marked(tmp_path):
    rows = records(resumed_at=20)
    rows.insert(-1, {"event": "oom_split", "update": 33, "seconds": 8.0})
    rows.insert(-1, {"event": "skipped_update", "update": 35, "seconds": 8.0})
    rows.insert(-1, {"event": "log", "update": 37, "loss": None, "nonfinite": {"loss": "nan"}, "seconds": 8.1})
    metrics = read_rows(tmp_path, rows)
    marks = [(mark.kind, mark.update) for mark in metrics.marks]
    assert marks == [("save", 20), ("resume", 20), ("save", 40), ("split", 33), ("skip", 35), ("nan", 37)]
    assert metrics.marks[-1].text == "loss was nan"
    assert [point[0] for point in metrics.series["loss"].points(9)] == [10, 20, 30, 40]
    rows = records()
    rows.insert(-1, {"event": "oom_eval_split", "update": 40, "parts": 2, "seconds": 8.0})
    assert read_rows(tmp_path, rows).tier == "T0"
    rows.insert(-1, {"event": "tier", "update": 40, "tier": "T2", "reason": "out of memory", "seconds": 8.0})
    metrics = read_rows(tmp_path, rows)
    assert [(mark.kind, mark.update) for mark in metrics.marks[-2:]] == [("evalsplit", 40), ("tier", 40)]
    assert metrics.marks[-1].text == "resume guarantee T2 from here on (out of memory)" and metrics.tier == "T2"
    assert {mark.kind for mark in metrics.marks} <= MARK_NAMES.keys()


def test_the_time_spent_is_that_of_the_last_record_which_has_it(tmp_path):
    profile = {"event": "profile", "update": 10, "took_seconds": 4.0, "seconds": 5.5}
    spent = read_rows(tmp_path, [*records(), profile]).spent
    names = ("training", "waiting for data", "evaluation", "saving", "writing the profile")
    assert spent == dict(zip(names, (3.0, 1.0, 4.0, 1.0, 4.0), strict=True))
    spent = read_rows(tmp_path, [row for row in records() if row["event"] != "end"]).spent  # the last log's
    assert spent == dict(zip(names, (3.0, 1.0, 2.0, 0.5, 0.0), strict=True))


def test_damaged_lines_are_passed_over_counted_and_named(tmp_path):
    lines = [json.dumps(record) for record in records()]
    lines[3] = lines[3][:20]
    lines[5] = "[1, 2]"
    lines[6] = '{"event": "log", "update": "x"}'
    (tmp_path / "m.jsonl").write_text("\n".join(lines) + "\n")
    metrics = read(tmp_path / "m.jsonl")
    assert metrics.num_bad == 3 and metrics.bad_lines == [4, 6, 7]
    assert metrics.num_records == len(lines) - 3
    good = json.dumps({"event": "log", "update": 1, "loss": 1.0})
    (tmp_path / "m.jsonl").write_text(f"{good}\n{good},{good}\n{good}\n")
    metrics = read(tmp_path / "m.jsonl")
    assert metrics.num_records == 2 and metrics.bad_lines == [2]


def test_a_file_that_grows_is_read_on_and_ends_as_if_it_had_been_read_at_once(tmp_path):
    text = "".join(json.dumps(record) + "\n" for record in records())
    path = tmp_path / "m.jsonl"
    metrics = Metrics(path)
    assert not metrics.read()
    for end in (100, 101, 350, len(text)):
        path.write_text(text[:end])
        metrics.read()
    assert not metrics.read()
    whole = read(path)
    assert metrics.num_records == whole.num_records == len(records())
    assert metrics.num_bad == 0 and metrics.spent == whole.spent and metrics.marks == whole.marks
    assert {name: series.points(99) for name, series in metrics.series.items()} == {
        name: series.points(99) for name, series in whole.series.items()
    }


def test_a_file_truncated_by_a_resume_is_read_again_and_has_its_mark(tmp_path):
    path = tmp_path / "m.jsonl"
    write_lines(path, records())
    metrics = read(path)
    others = [*records(20)[:-1], {"event": "log", "update": 25, "loss": 9.0, "seconds": 9.0}]
    write_lines(path, [*others, *({"event": "log", "update": 26 + i, "loss": 8.0, "seconds": 9.0} for i in range(20))])
    assert metrics.read()
    assert metrics.series["loss"].points(99)[:3] == [(10, 0.2), (20, 0.1), (25, 9.0)]
    start = {"event": "start", "update": 0, "seconds": 0.0}
    rows = [start, {**start, "update": 7, "resumed_from": "step-0000000007"}]
    marks = [(mark.kind, mark.update) for mark in read_rows(tmp_path, rows).marks]
    assert marks == [("save", 7), ("resume", 7)]
