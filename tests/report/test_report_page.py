"""The page: its result and notices for each state of a run; it is complete, small and safe."""

import json
import re
import shutil
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from loopwright.errors import InputError
from loopwright.report import LiveReport, open_run, write_comparison, write_report
from loopwright.report.blocks import Table
from loopwright.report.charts import Chart, Curve, draw, ticks
from loopwright.report.comparison import mcnemar, notes_of, panels_of, sample_table
from loopwright.report.curves import charts_of
from loopwright.report.page import MOST_BYTES, _numeric_columns, _with_flags
from loopwright.report.panels.sample import json_lines
from loopwright.report.provenance import advice_for, again_panel, data_panel, speed_panel, time_shares
from loopwright.report.run_view import RunView, view
from loopwright.report.summary import card_of
from loopwright.run_folder import RunFolder
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
    """Return a finished run of a text classification."""
    return finished_run(tmp_path / "run-1")


def test_the_card_has_the_metric_its_interval_the_baselines_the_verdict_and_the_rows_used(run, tmp_path):
    card = card_of(look(run))
    assert (card.metric, card.value, card.interval) == ("accuracy", 0.7, (0.62, 0.78))
    assert [(bar.name, bar.value) for bar in card.bars] == [("this run", 0.7), ("majority", 0.5), ("word-count", 0.6)]
    assert card.verdict == "Better than word-count (0.6000) by 10.0 points; the interval excludes it."
    assert ("f1", "0.6000", "") in card.others and ("updates", "40") in card.facts and ("time", "8.5 s") in card.facts
    write_json(run / "result.json", {**RESULT, "nonfinite": {"pearsonr": "nan"}})
    assert ("pearsonr", "nan", "") in card_of(look(run)).others
    run = make_run(tmp_path / "run", config={"max_train_samples": (4, "flag"), "max_eval_samples": (60, "flag")})
    facts = dict(card_of(look(run)).facts)
    assert (facts["train rows"], facts["validation rows"]) == ("4 of 10", "6")


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"intervals": {"accuracy": [0.55, 0.78]}}, "by 10.0 points, but the interval includes it: this may"),
        ({"metrics": {"accuracy": 0.4}, "intervals": {"accuracy": [0.3, 0.5]}}, "Worse than word-count (0.6000) by"),
        ({"metrics": {"accuracy": 0.6}}, "No better than word-count"),
        (
            {"metrics": {"accuracy": 1.0}, "baselines": {"word-count": {"accuracy": 1.0}}},
            "As good as word-count: both are perfect, so this data cannot tell them apart.",
        ),
        ({"intervals": {}}, "there is no interval to judge it by."),
        ({"baselines": {}}, "there is no baseline to compare it with."),
        (
            {"metric": "perplexity", "direction": "min", "metrics": {"perplexity": 20.0},
             "intervals": {"perplexity": [18.0, 22.0]}, "baselines": {"unigram": {"perplexity": 300.0}}},
            "Better than unigram (300.00) by 280; the interval excludes it.",
        ),
        (
            {"metric": "mse", "direction": "min", "metrics": {"mse": 0.25}, "intervals": {"mse": [0.25, 0.25]},
             "baselines": {"mean": {"mse": 0.125}}},
            "Worse than mean (0.1250) by 0.125; the interval excludes it.",
        ),
    ],
    ids=["touching", "worse", "equal", "both-perfect", "no-interval", "no-baseline", "less-is-better", "an-error"],
)  # fmt: skip
def test_the_verdict_follows_from_the_numbers(run, changes, verdict):
    write_json(run / "result.json", {**RESULT, **changes})
    assert verdict in card_of(look(run)).verdict


@pytest.mark.parametrize(("num_rows", "notice"), [(1, "1 row is"), (4, "4 rows are")])
def test_an_interval_of_a_handful_of_rows_is_not_judged_by(run, num_rows, notice):
    data = json.loads((run / "data.json").read_text())
    data["splits"]["validation"]["num_rows"] = num_rows
    write_json(run / "data.json", data)
    assert (
        card_of(look(run)).verdict == f"10.0 points better than word-count (0.6000); {notice} too few to judge it by."
    )


def test_before_the_end_the_card_shows_the_best_evaluation_so_far(tmp_path):
    run = make_run(tmp_path / "run", state="running")
    write_json(run / "baselines.json", {"majority": {"accuracy": 0.5}})
    best = {"checkpoint": "step-40", "metric": "eval_accuracy", "direction": "max"}
    write_json(run / "checkpoints" / "best.json", best)
    write_json(run / "lease.json", {"heartbeat": time.time()})
    card = card_of(look(run))
    assert card.value == 0.7 and card.interval == pytest.approx((0.6, 0.8))
    assert card.verdict.startswith("So far, at the best evaluation: Better than majority")


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
    svg = draw(Chart("x", [Curve("y", [(0, 0.0), (100, 10.0)])]))
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
    assert table is not None and table.rows == [["run-2", 4, 0, 2, 0, "0.5000"]]
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


@pytest.mark.parametrize(("first", "other", "p"), [(0, 0, 1.0), (5, 5, 1.0), (0, 2, 0.5), (1, 9, 22 / 1024)])
def test_mcnemar_is_a_binomial_test_of_the_samples_that_only_one_gets_right(first, other, p):
    assert mcnemar(first, other) == pytest.approx(p)
    assert mcnemar(other, first) == pytest.approx(p)
