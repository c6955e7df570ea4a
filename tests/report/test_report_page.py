"""The page: its result and notices for each state of a run; it is complete, small and safe."""

import json
import re
import shutil
import time
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from loopwright.errors import InputError
from loopwright.report import LiveReport, open_run, write_comparison, write_report
from loopwright.report.blocks import Table
from loopwright.report.charts import Chart, Curve, draw, ticks
from loopwright.report.comparison import notes_of, panels_of, sample_table, verdicts_of
from loopwright.report.curves import charts_of
from loopwright.report.page import MOST_BYTES, _numeric_columns, _with_flags
from loopwright.report.panels.sample import json_lines
from loopwright.report.provenance import advice_for, again_panel, data_panel, speed_panel, time_shares
from loopwright.report.run_view import RunView, view
from loopwright.report.summary import card_of
from loopwright.run_folder import RunFolder, read_json
from report.folders import (
    LABELS,
    RESULT,
    classified,
    data_plan,
    finished_run,
    make_run,
    records,
    write_json,
    write_lines,
)
from tasks.conftest import finished

__all__ = ["finished"]


def look(path: Path) -> RunView:
    return view(RunFolder(path))


def text_of(path: Path) -> str:
    return write_report(path).read_text(encoding="utf-8")


def by_title(blocks) -> dict:
    return {block.title: block for block in blocks}


class Outside(HTMLParser):
    """Collects what a page would load, and its tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        given = dict(attrs)
        self.loaded += [given[name] for name in ("src", "href", "data", "action") if given.get(name)]


@pytest.fixture
def run(tmp_path) -> Path:
    return finished_run(tmp_path / "run-1")


def test_the_card_has_the_metric_its_interval_the_baselines_the_verdict_and_the_rows_used(run, tmp_path):
    card = card_of(look(run))
    assert (card.metric, card.value, card.interval) == ("accuracy", 0.7, (0.62, 0.78))
    assert [(bar.name, bar.value) for bar in card.bars] == [("this run", 0.7), ("majority", 0.5), ("word-count", 0.6)]
    unjudged = "10.0 points better than word-count (0.6000); there are no scores of single rows to judge it by."
    assert card.verdict == unjudged  # of an older run
    assert ("f1", "0.6000", "") in card.others and ("updates", "40") in card.facts and ("time", "8.5 s") in card.facts
    write_json(run / "result.json", {**RESULT, "nonfinite": {"pearsonr": "nan"}})
    assert ("pearsonr", "nan", "") in card_of(look(run)).others
    run = make_run(tmp_path / "run", config={"max_train_samples": (4, "flag"), "max_eval_samples": (60, "flag")})
    facts = dict(card_of(look(run)).facts)
    assert (facts["train rows"], facts["validation rows"]) == ("4 of 10", "6")


JUDGED = {"metric": "accuracy", "direction": "max", "baseline": "word-count", "value": 0.7, "baseline_value": 0.6,
          "kind": "better", "p": 0.0123, "rows": 200, "evaluations": 3, "split": "validation"}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "Better than word-count (0.6000) by 10.0 points (p = 0.012, 200 rows, best of 3 evaluations)."),
        ({"split": "test", "evaluations": 1, "p": 1e-9}, "On the test data: Better than word-count (0.6000) by 10.0 "
         "points (p < 0.001, 200 rows)."),
        ({"kind": "worse", "value": 0.4}, "Worse than word-count (0.6000) by 20.0 points (p = 0.012, 200 rows)."),
        ({"kind": "indistinct", "p": 0.4}, "Not distinguishable from word-count (0.6000): 10.0 points better (p = 0.4, "
         "200 rows, best of 3 evaluations)."),
        ({"kind": "indistinct", "p": 1.0, "value": 0.6}, "(0.6000): the same score (p = 1, 200 rows)."),
        ({"kind": "indistinct", "value": 1.0, "baseline_value": 1.0},
         "As good as word-count: both are perfect, so this data cannot tell them apart."),
        ({"kind": None, "reason": "rows", "rows": 1}, "10.0 points better than word-count (0.6000); 1 row is too few "
         "to judge it by."),
        ({"kind": None, "reason": "rows", "rows": 4}, "(0.6000); 4 rows are too few to judge it by."),
        ({"kind": None, "reason": "unknown"}, "there are no scores of single rows to judge it by."),
        ({"kind": None, "reason": "undefined", "value": None}, "accuracy of the model is undefined; that of word"),
        ({"metric": "mse", "direction": "min", "value": 0.25, "baseline": "mean", "baseline_value": 0.5}, "By mse, "
         "since no baseline has accuracy: Better than mean (0.5000) by 0.250 (p = 0.012, 200 rows, best of"),
        ({"baseline": None}, "accuracy is 0.7000 (95 % interval: 0.6200 to 0.7800); there is no baseline to compare"),
    ],
)  # fmt: skip
def test_every_verdict_has_words_for_its_strength(run, changes, verdict):
    judged = {key: value for key, value in {**JUDGED, **changes}.items() if value is not None or key != "baseline"}
    baselines = RESULT["baselines"] if "baseline" in judged else {}
    write_json(run / "result.json", {**RESULT, "baselines": baselines, "verdict": judged})
    assert verdict in card_of(look(run)).verdict


def test_before_the_end_the_card_shows_the_best_evaluation_so_far(tmp_path):
    run = make_run(tmp_path / "run", state="running")
    write_json(run / "baselines.json", {"majority": {"accuracy": 0.5}})
    best = {"checkpoint": "step-40", "metric": "eval_accuracy", "direction": "max"}
    write_json(run / "checkpoints" / "best.json", best)
    write_json(run / "lease.json", {"heartbeat": time.time()})
    card = card_of(look(run))
    assert card.value == 0.7 and card.interval == pytest.approx((0.6, 0.8))
    assert card.verdict == (
        "So far, at the best evaluation: 20.0 points better than majority (0.5000); the verdict follows at the end."
    )


def test_charts_have_loss_metrics_and_all_that_is_logged_of_the_course(run):
    charts = by_title(charts_of([look(run)]))
    assert list(charts) == [
        "Loss", "accuracy", "Learning rate", "Gradient norm", "Samples per second", "Tokens per second",
        "Waiting for data", "Padding", "Peak memory",
    ]  # fmt: skip
    assert [curve.name for curve in charts["Loss"].curves] == ["training", "evaluation"]
    accuracy = charts["accuracy"]
    for found, expected in zip(accuracy.curves[0].band, [(20, 0.5, 0.7), (40, 0.6, 0.8)], strict=True):
        assert found == pytest.approx(expected)
    assert accuracy.levels == [("majority", 0.5), ("word-count", 0.6)]
    assert [(kind, update) for kind, update, *_ in accuracy.marks] == [("save", 20), ("save", 40), ("best", 40)]


def test_a_curve_is_drawn_where_its_numbers_are_with_round_ticks_or_by_its_logarithm():
    levels = [("a", 5.0), ("b", 5.1), ("c", 9.0)]  # names that would overlap share a line
    svg = draw(Chart("x", [Curve("y", [(0, 0.0), (100, 10.0)])], levels=levels))
    assert ">a 5 · b 5.10</text>" in svg and ">c 9</text>" in svg and svg.count('class="level"') == 3
    many = [(f"a long name of a baseline, number {index}", 5 + index / 100) for index in range(4)] + [("猫" * 90, 5.0)]
    svg = draw(Chart("x", [Curve("y", [(0, 0.0), (100, 10.0)])], levels=many))
    rows = [float(y) for y in re.findall(r'class="level-name" x="444" y="([\d.]+)"', svg)]
    assert len(rows) == 5 and min(abs(a - b) for a, b in combinations(rows, 2)) >= 11 and "猫猫…\u2069 5</text>" in svg
    svg = draw(Chart("x", [Curve("y", [(0, 0.0), (100, 10.0)])], levels=levels))
    path = re.search(r'class="line c0" data-curve="0" d="M([\d. ]+)L([\d. ]+)"', svg)
    assert path is not None
    (left, low), (right, high) = (map(float, place.split()) for place in path.groups())
    assert left == 52 and right == 460 - 12 and low == 190 - 24 and high > 10
    numbers = json.loads(svg.split('<script type="application/json">')[1].split("</script>")[0])
    assert numbers["curves"] == [{"name": "y", "x": [0, 100], "y": [0, 10]}]
    assert Chart("x", [Curve("y", [(1, 0.001), (2, 10.0)])]).is_log
    assert not Chart("x", [Curve("y", [(1, 0.0), (2, 10.0)])]).is_log
    assert ticks(0.13, 0.97, 5) == [0.2, 0.4, 0.6, 0.8]
    assert ticks(0, 309, 8) == [0, 50, 100, 150, 200, 250, 300]


def test_the_data_panel_has_files_counts_checks_and_the_first_training_batch(run):
    blocks = by_title(data_panel(look(run)).blocks)
    assert blocks["Files"].rows[0] == ["train.csv", "csv", 10, "1.2 kB", "a1" * 6]
    assert blocks["Labels"].rows[0] == ["cat", 6, 3, "60 %"]
    assert blocks["Lengths"].rows == [["text", "characters", 11, 30, 44]]
    facts = dict(blocks["Checks"].items)
    assert facts["rows that are also in training"] == "2 of validation" and facts["warning"] == "owl is rare"
    assert facts["left out"] == "4: empty text"
    (run / "samples").mkdir()
    summary = "2 samples of 9 tokens, 25 % of them padding"
    written = f"{summary}\n\nrow 7\ntext: [CLS] a cat [SEP] (+ 4 padding)\nlabel: cat\n"
    (run / "samples" / "train_batch0.txt").write_text(f"{written}\nrow 3\ntext: [CLS] time: 9 [SEP]\nlabel: dog\n")
    shown = by_title(data_panel(look(run)).blocks)["The first training batch, as the model saw it"]
    fields = [[(name, pieces[0].text) for name, pieces in item.fields] for item in shown.items]
    assert shown.note == summary and [item.head for item in shown.items] == ["row 7", "row 3"]
    assert fields[0] == [("text", "[CLS] a cat [SEP] (+ 4 padding)"), ("label", "cat")]
    assert fields[1][0] == ("text", "[CLS] time: 9 [SEP]")


def test_the_speed_panel_splits_the_time_and_has_advice_and_watts(run):
    seen = look(run)
    assert dict(time_shares(seen)) == {
        "preparing": 2.0, "training": pytest.approx(3.0), "waiting for data": pytest.approx(1.0),
        "evaluation": pytest.approx(4.0), "saving": pytest.approx(1.0),
    }  # fmt: skip
    facts = dict(speed_panel(seen).blocks[1].items)
    assert facts["samples per second, on average"] == "160" and facts["peak memory"] == "500.0 MB"
    assert facts["padding, on average"] == "40 %"
    assert advice_for(seen).startswith("40 % of all tokens were padding")
    watts = {"gpu_watts": 300.0}
    write_lines(run / "metrics.jsonl", [{**row, **watts} if row["event"] == "speed" else row for row in records()])
    facts = dict(speed_panel(look(run)).blocks[1].items)
    assert facts["watts of the device, on average"] == "300"
    assert facts["watt-hours of the device in training"] == "0.2500"  # 300 W in 3 seconds
    assert by_title(charts_of([look(run)]))["Watts"].curves[0].points[0][1] == 300


def test_how_to_get_it_again_has_command_settings_hashes_versions_and_guarantee(run):
    blocks = by_title(again_panel(look(run)).blocks)
    facts = dict(blocks["Command"].items)
    assert facts["command"] == "loopwright train x --data d.csv" and facts["seed"] == 42
    assert facts["resume guarantee"] == "T0, bit-exact: as ever"
    assert facts["rehearsal"] == "1 step: bit for bit the same"
    assert blocks["Non-default settings"].rows == [["learning_rate", "0.1", "flag"]]
    assert blocks["Hashes of the data"].rows[0] == ["train.csv", "a1" * 32]
    versions = dict(blocks["Versions"].items)
    assert versions["torch"] == "2.9" and versions["git commit"] == "abc"
    assert versions["uncommitted changes"].startswith("2 lines")


def test_the_page_loads_nothing_and_has_every_panel(run):
    text = text_of(run)
    found = Outside(text)
    assert all(place.startswith("#") for place in found.loaded) and len(found.loaded) >= 5
    assert "@import" not in text and "url(" not in text
    assert found.tags.count("svg") == 11 and "prefers-color-scheme: dark" in text
    for heading in ("Curves", "Classes", "Mistakes", "Data", "Speed", "How to reproduce it"):
        assert f"<h2>{heading}</h2>" in text


def test_data_is_escaped_on_the_page(tmp_path):
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    metrics = [{"event": "log", "update": 1, f"loss{evil}": 1.0, "loss": 1.0, "seconds": 1.0}]
    metrics += [{"event": "start", "update": 1, "resumed_from": evil, "seconds": 1.0}]
    run = finished_run(tmp_path / "run", predictions=classified(evil), labels=[evil, *LABELS], metrics=metrics)
    text = text_of(run)
    assert "<script>alert" not in text and "<img src=x" not in text
    assert "alert(1)" in text


def test_damaged_lines_and_files_are_named_on_the_page(run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write("{broken\n")
    (run / "data.json").write_text("{")
    text = text_of(run)
    assert f"1 line of metrics.jsonl is damaged and left out: line {len(records()) + 1}" in text
    assert "data.json cannot be read and is left out" in text
    assert "<h2>Curves</h2>" in text and "<h2>Data</h2>" not in text


@pytest.mark.parametrize(
    ("state", "beat", "notice"),
    [
        ("running", 0, "This run is in progress"),
        ("running", 3600, "its heartbeat has stopped"),
        ("running", None, "its heartbeat has stopped"),
        ("stopped", None, "This run stopped early"),
        ("failed", None, "This run failed"),
    ],
    ids=["running", "silent", "no-lease", "stopped", "failed"],
)
def test_the_page_of_a_run_without_a_result_has_a_notice_of_its_state(tmp_path, state, beat, notice):
    run = make_run(tmp_path / "run", state=state)
    if beat is not None:
        write_json(run / "lease.json", {"heartbeat": time.time() - beat})
    text = text_of(run)
    assert notice in text and "<h2>Curves</h2>" in text
    assert ('data-live="yes"' in text) == (notice == "This run is in progress")


def test_runs_without_metrics_or_a_task_have_a_page_and_no_folder_is_refused(tmp_path):
    text = text_of(make_run(tmp_path / "run", metrics=[]))
    assert "metrics.jsonl has no records yet" in text and "<h2>Curves</h2>" not in text
    write_lines(tmp_path / "plain" / "metrics.jsonl", records())
    write_json(tmp_path / "plain" / "status.json", {"state": "done", "update": 40})
    assert "<h1>plain</h1>" in text_of(open_run(tmp_path / "plain").path)
    with pytest.raises(InputError, match="run.unknown"):
        write_report(tmp_path / "none")
    with pytest.raises(InputError, match="run.unknown"):
        open_run(tmp_path / "none")


def test_pictures_are_part_of_the_page_and_made_smaller_where_they_do_not_fit(tmp_path):
    run = finished_run(tmp_path / "run", task="image-classification")
    (run / "samples").mkdir()
    Image.new("RGB", (40, 30), "red").save(run / "samples" / "train_batch0.png")
    Image.effect_noise((2200, 1400), 90).save(run / "samples" / "worst.png")
    (run / "samples" / "predictions.png").write_bytes(b"no picture" * 200_000)
    assert (run / "samples" / "worst.png").stat().st_size > MOST_BYTES
    path = write_report(run)
    text = path.read_text(encoding="utf-8")
    assert path.stat().st_size < MOST_BYTES
    assert "data:image/png;base64," in text and "data:image/webp;base64," in text
    assert "samples/predictions.png cannot be opened as an image" in text


@pytest.mark.slow
def test_a_real_run_has_a_page_with_every_panel(finished, tmp_path):
    copy = text_of(finished.path)
    for heading in ("Curves", "Classes", "Mistakes", "Data", "Speed", "How to reproduce it"):
        assert f"<h2>{heading}</h2>" in copy
    seen = look(finished.path)
    card = card_of(seen)
    assert card.value == finished.metrics["accuracy"] and seen.guarantee.startswith("T0")
    rows = list(json_lines(finished.path / "eval" / "predictions.jsonl"))
    right = sum(row["prediction"] == row["reference"] for row in rows)
    assert card.value == pytest.approx(right / len(rows))
    without = shutil.copytree(finished.path, tmp_path / "run", ignore=shutil.ignore_patterns("samples", "checkpoints"))
    for place, title in ((finished.path, "The first training batch, as the model saw it"),
                         (without, "The first rows of the training data")):  # fmt: skip
        batch = by_title(data_panel(look(place)).blocks)[title]
        assert dict(batch.items[0].fields)["label"][0].text in ("pos", "neg")
    (finished.path / "report.html").unlink()


@pytest.mark.slow
def test_a_million_logged_points_make_a_small_page_in_seconds(tmp_path):
    run = make_run(tmp_path / "run", state="running")
    line = '{{"event":"log","update":{0},"epoch":1,"loss":{1:.6f},"seconds":{2},"time":{2}}}\n'
    with (run / "metrics.jsonl").open("w") as file:
        file.writelines(line.format(update, 1 + update % 97 / 50, update / 10) for update in range(1, 1_000_001))
    began = time.process_time()
    path = write_report(run)
    assert time.process_time() - began < 10
    assert path.stat().st_size < MOST_BYTES
    first = path.read_text(encoding="utf-8").split('<script type="application/json">')[1].split("</script>")[0]
    curve = json.loads(first)["curves"][0]
    assert curve["name"] == "training" and 600 <= len(curve["x"]) <= 1202
    assert min(curve["y"]) == 1.0 and max(curve["y"]) == 2.92 and curve["x"][-1] == 1_000_000


def test_a_live_report_is_written_again_when_the_run_changed_and_time_allows(tmp_path):
    run = make_run(tmp_path / "run", state="running", metrics=records()[:4])
    live = LiveReport(run)
    path = live.refresh()
    assert path == run / "report.html"
    first = path.read_text(encoding="utf-8")
    write_lines(run / "metrics.jsonl", records())
    assert live.refresh() is None and path.read_text(encoding="utf-8") == first
    assert '"x":[10,20,30,40]' in live.page() and '"x":[10,20,30,40]' not in first
    assert live.view().metrics.num_records == len(records())


def test_a_comparison_shows_differences_and_samples_that_only_one_run_gets_right(tmp_path, run):
    right = [{**row, "prediction": row["reference"]} for row in classified()]
    config = {"learning_rate": (0.2, "flag"), "seed": (42, "default")}
    result = {**RESULT, "metrics": {"accuracy": 1.0}}
    other = finished_run(tmp_path / "run-2", predictions=right, config=config, result=result)
    write_json(other / "data.json", data_plan("text-classification", LABELS, sha="c3"))
    runs = [look(run), look(other)]
    panels = by_title(panels_of(runs))
    settings = [["learning_rate", "0.1", "0.2"], ["dataloader_num_workers", "0", "–"]]
    assert panels["What differs"].blocks[0].rows == settings
    assert panels["Data"].blocks[0].rows == [["train.csv: sha256", "a1" * 8, "c3" * 8]]
    table = sample_table(runs)
    assert table is not None and table.rows == [["run-2", 4, 0, 2, 0]]
    path = write_comparison([run, other], tmp_path / "both.html")
    text = path.read_text(encoding="utf-8")
    assert "2 runs side by side" in text and all(place.startswith("#") for place in Outside(text).loaded)
    loss = charts_of(runs)[0]
    assert len(loss.curves) == 4 and {curve.colour for curve in loss.curves} == {0, 1}


def test_a_resume_is_marked_in_the_colour_of_its_run_and_only_where_that_run_is_shown(tmp_path, run):
    resumed = make_run(tmp_path / "resumed", "causal-lm", metrics=records(resumed_at=20))
    charts = by_title(charts_of([look(run), look(resumed)]))
    assert charts["Loss, text-classification"].marks == []
    (mark,) = charts["Loss, causal-lm"].marks
    assert mark == ("resume", 20, "resumed: resumed from step-0000000020", 1)
    assert 'class="mark resume own c1"' in draw(charts["Loss, causal-lm"])


def test_cells_of_numbers_are_set_to_the_right_and_flags_are_not_broken():
    rows = [["a", "123456789012", "1.2 kB", "-0.5", "–"], ["b", "a1b2c3d4e5f6", "30 %", "1.2e-05", "1:45 min"]]
    assert _numeric_columns(Table("x", list("abcde"), rows)) == [2, 3, 4]
    assert _numeric_columns(Table("x", list("abcde"), rows, is_left=True)) == []
    assert _with_flags("<b> (--max_eval_samples)") == '&lt;b&gt; (<span class="flag">--max_eval_samples</span>)'


def test_runs_of_different_tasks_are_compared_where_that_makes_sense_with_a_note(tmp_path, run):
    other = make_run(tmp_path / "lm", "causal-lm", metrics=records(20))
    runs = [look(run), look(other)]
    notes = notes_of(runs)
    assert "different tasks (text-classification, causal-lm)" in notes[0] and "lm" in notes[1]
    assert sample_table(runs) is None
    titles = [chart.title for chart in charts_of(runs)]
    tasks = ("text-classification", "causal-lm")
    assert titles[:4] == [f"{name}, {task}" for name in ("Loss", "accuracy") for task in tasks]
    assert "Learning rate" in titles
    assert "different tasks" in write_comparison([run, other], tmp_path / "c.html").read_text(encoding="utf-8")


def test_two_runs_are_judged_on_the_rows_of_both_or_a_sentence_says_why_not(tmp_path, run):
    other = finished_run(tmp_path / "run-2", result={**RESULT, "metrics": {"accuracy": 0.9}, "evaluations": 2})
    hits = {run: [1] * 7 + [0] * 3, other: [1] * 17}
    reasons = [verdicts_of([look(run), look(other)])[0]["reason"]]
    for folder, right in hits.items():
        scores = np.stack([np.arange(20.0), np.arange(20.0), np.resize([*right, *[0] * 20], 20).astype(float)])
        np.savez(folder / "eval" / "rows.npz", accuracy=scores)
    (verdict,) = verdicts_of([look(run), look(other)])
    assert (verdict["kind"], verdict["p"], verdict["rows"]) == ("worse", pytest.approx(2 / 1024), 20)
    words = (
        "By accuracy on the validation data, run-1 is worse than run-2 (0.9000) by 20.0 points (p = 0.002, 20 rows)."
    )
    assert verdict["text"] == words in write_comparison([run, other], tmp_path / "c.html").read_text(encoding="utf-8")
    assert verdicts_of([look(other), look(run)])[0]["kind"] == "better"
    for change in ({"metric": "f1"}, None):
        write_json(other / "result.json", {**RESULT, **change} if change else {})
        reasons.append(verdicts_of([look(run), look(other)])[0]["reason"])
    write_json(other / "result.json", RESULT)
    data = read_json(other / "data.json")
    data["splits"]["validation"]["parts"] = [{"file": 0, "rows": [1]}]
    write_json(other / "data.json", data)
    reasons.append(verdicts_of([look(run), look(other)])[0]["reason"])
    assert [reason.split()[-1] for reason in reasons] == ["rows", "metric", "yet", "data"]
