"""What is said while a person waits: lines, the line that changes, long work, the table of evaluations, the clock."""

import io
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

import toys
from loopwright.config.safe_text import SafeStream
from loopwright.run_folder import RunFolder
from loopwright.runs.clock import Pace, RunLength, TimeSpent
from loopwright.runs.console import screen
from loopwright.runs.console import status_line as live_line
from loopwright.runs.console.end import mistake_text
from loopwright.runs.console.evaluation_table import EvalTable
from loopwright.runs.console.screen import Screen
from loopwright.runs.console.status_line import bar_of, fitted
from loopwright.runs.data import ReadingProgress, describe
from loopwright.runs.settings import settle
from loopwright.sources import check_unchanged
from loopwright.tasks import get_task
from loopwright.tasks.data import RunData


def in_terminal(monkeypatch):
    """Let both streams be a terminal, and return it; pytest's own are put back after each fixture."""
    stream = toys.Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setattr("sys.stderr", stream)
    return stream


@pytest.fixture
def at_once(monkeypatch):
    """Let long work be long from its start."""
    monkeypatch.setattr(screen, "_SILENT_SECONDS", 0.0)
    monkeypatch.setattr(screen, "_SECONDS_BETWEEN", 0.0)


def test_a_plain_screen_on_a_terminal_prints_what_a_pipe_gets(monkeypatch, at_once):
    stream = in_terminal(monkeypatch)
    plain = Screen(is_plain=True)
    assert plain.open_line(lambda done, columns: "a line that changes", 3) is None
    plain.print_wrapped("word " * 60)
    plain.block("name", "word " * 60)
    with plain.waiting("reading") as waiting:
        waiting.to(1, 2)
    said = stream.getvalue()
    assert said.startswith(f"{'word ' * 60}\nname    {'word ' * 60}\nreading: 1 in ")
    assert said.count("\n") == 3 and "\r" not in said


def test_lines_are_printed_and_logged_and_a_quiet_screen_logs_only(tmp_path, capsys):
    loud, quiet, other = Screen(), Screen(is_quiet=True), Screen(is_main=False)
    for place, one in (("loud", loud), ("quiet", quiet), ("other", other)):
        (tmp_path / place).mkdir()
        one.print("before")
        one.attach(RunFolder(tmp_path / place))
        one.print("short", "the whole line")
        one.log("only in the log")
        one.block("name", "first", "second")
    assert capsys.readouterr().out == "before\nshort\nname    first\n        second\n"
    logged = "before\nthe whole line\nonly in the log\nname    first\n        second\n"
    assert (tmp_path / "loud" / "log.txt").read_text() == (tmp_path / "quiet" / "log.txt").read_text() == logged
    assert not (tmp_path / "other" / "log.txt").exists()


def test_a_long_line_of_a_block_is_broken_between_words_on_a_terminal_and_whole_in_the_log(monkeypatch, tmp_path):
    terminal = in_terminal(monkeypatch)
    made = Screen()
    made.attach(RunFolder(tmp_path))
    made.block("data", "word " * 20 + "end", "short")
    made.block("next", "lw " + "x" * 90, wraps=False)
    wide, rest, *others = terminal.getvalue().splitlines()
    assert wide == "data    " + "word " * 13 + "word" and rest == " " * 8 + "word " * 6 + "end"
    assert others == ["        short", "next    lw " + "x" * 90]
    assert (tmp_path / "log.txt").read_text().splitlines()[0] == "data    " + "word " * 20 + "end"


def test_a_stream_without_a_character_gets_another_one_for_it(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, "ascii", write_through=True))
    Screen().print("a × b · c")
    assert raw.getvalue() == b"a ? b ? c\n"


def test_only_a_terminal_has_a_line_that_changes(monkeypatch):
    in_terminal(monkeypatch)
    assert Screen().is_live and Screen().columns == 80
    assert not Screen(is_quiet=True).is_live and not Screen(is_main=False).is_live
    monkeypatch.setenv("TERM", "dumb")
    assert not Screen().is_live and Screen().open_line(lambda done, columns: "", 3) is None
    monkeypatch.setattr("sys.stdout", io.StringIO())
    monkeypatch.setenv("TERM", "xterm")
    assert not Screen().is_live and Screen().columns is None


def test_what_is_said_goes_above_the_line_that_changes_and_leaves_no_rest_of_it(monkeypatch):
    terminal = in_terminal(monkeypatch)
    made = Screen()
    line = made.open_line(lambda done, columns: f"at {done} of {columns}", 5, 2)
    line.update(1)
    made.print("a row")
    made.close_line()
    text = terminal.getvalue()
    assert text.startswith("\rat 2 of 77") and "\r\x1b[Ka row\n\rat 3 of 77" in text
    assert text.endswith("\r" + " " * len("at 3 of 77") + "\r")
    made.close_line()  # twice is fine


def test_a_thousand_counts_write_the_line_a_few_times_and_cost_little(monkeypatch):
    terminal = in_terminal(monkeypatch)
    line = Screen().open_line(lambda done, columns: f"at {done}", 1000)
    begun = time.perf_counter()
    for _ in range(1000):
        line.update(1)
    assert time.perf_counter() - begun < 0.02 * 5  # 20 us each, with room for a busy machine
    assert terminal.getvalue().count("at ") < 20


def test_a_notebook_has_the_bar_of_tqdm(monkeypatch, capfd):
    shell = SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    made = Screen()
    assert made.is_live and made.columns is None
    line = made.open_line(lambda done, columns: f"at {done}, {columns}", 4)
    assert isinstance(line, live_line.NotebookBar)
    line.update(4)
    line.nudge()
    made.print("a row")
    made.close_line()
    said = capfd.readouterr()
    assert said.out == "a row\n" and "100%" in said.err and "at 4, None" in said.err


def test_short_work_says_nothing(monkeypatch):
    terminal = in_terminal(monkeypatch)
    with Screen().waiting("tokenising", 3) as waiting:
        assert list(waiting.over("abc")) == ["a", "b", "c"]
    assert terminal.getvalue() == ""


def test_long_work_has_one_line_on_a_terminal_that_goes_away(at_once, monkeypatch, tmp_path):
    terminal = in_terminal(monkeypatch)
    made = Screen()
    made.attach(RunFolder(tmp_path))
    with made.waiting("tokenising") as waiting:
        waiting.to(500, 1000)
        waiting.to(1000)
    text = terminal.getvalue()
    assert "\rtokenising: 50 % of 1,000 · left 0:00" in text and "\n" not in text
    assert text.endswith("\r") and text.split("\r")[-2].strip() == ""
    assert (tmp_path / "log.txt").read_text() == "tokenising: 1,000 in 0.0 s\n"


def test_long_work_in_one_step_shows_the_seconds_on_a_terminal(at_once, monkeypatch):
    terminal = in_terminal(monkeypatch)
    monkeypatch.setattr(screen, "_SECONDS_BETWEEN", 1e-3)
    with Screen().waiting("verifying", is_one_step=True) as waiting:
        waiting.to(1, 3)
        while terminal.getvalue().count("verifying: 1 of 3, 0 s") < 2:
            time.sleep(1e-3)
    text = terminal.getvalue()
    assert "\n" not in text and text.split("\r")[-2].strip() == "" and text.endswith("\r")
    assert not [thread for thread in threading.enumerate() if thread.name == "loopwright waiting"]


def test_long_work_has_one_plain_line_in_a_pipe(at_once, capsys):
    with Screen().waiting("tokenising", 2) as waiting:
        for done in range(3):
            waiting.to(done)
    with Screen(is_quiet=True).waiting("tokenising", 2) as waiting:
        waiting.to(2)
    with pytest.raises(KeyError), Screen().waiting("breaking off") as waiting:
        raise KeyError
    assert capsys.readouterr() == ("tokenising: 2 in 0.0 s\n", "")


def test_reading_hashing_and_passes_over_rows_are_long_work(at_once, reviews, capsys, tmp_path):
    task, made = get_task("text-classification"), Screen()
    with ReadingProgress(made) as progress:
        plan = task.preflight(settle(task, ["--data", str(reviews)]).args, progress)
        check_unchanged(plan, progress)
    data = RunData(plan)
    rows = data.rows("train")
    with data.watched(made, "tokenising"):
        assert rows[1] and data.rows("validation")[2]
        assert rows.on_read is not None
    assert rows.on_read is None and data.rows("validation").on_read is None
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said[-2:]] == ["hashing reviews.csv", "tokenising"]
    assert said[-1] == "tokenising: 5 in 0.0 s"  # the farthest row of each split
    assert f"{reviews.stat().st_size / 1000:.1f} kB" in describe(plan)[0]
    assert any(line.startswith("text: words p50 ") for line in describe(plan))


def test_a_narrow_line_leaves_out_what_matters_least():
    parts = [(9, "step 5"), (3, "epoch 1"), (8, "loss 2"), (3, "lr 1")]
    assert fitted(parts, 80) == "step 5 · epoch 1 · loss 2 · lr 1"
    assert fitted(parts, 26) == "step 5 · epoch 1 · loss 2"
    assert fitted(parts, 20) == "step 5 · loss 2"
    assert fitted(parts, 3) == "ste" and fitted(parts, 0) == ""
    assert bar_of(0.5) == "━" * 9 + "─" * 9 and bar_of(2.0) == "━" * 18


def test_evaluations_are_rows_of_one_table_that_marks_the_best_fits_and_repeats_its_header():
    table = EvalTable("f1")
    metrics, bounds = {"accuracy": 0.5, "f1": 0.25, "loss": 1.5}, {"f1": (0.2, 0.26)}
    rows = [table.lines(10 * i, i, metrics, bounds, 2.0, is_best=i != 2, columns=120)[0] for i in (1, 2, 3)]
    assert rows == [
        [
            "        update  epoch  f1             accuracy  loss    seconds",
            "eval        10   1.00  0.2500 ±0.050  0.5000    1.5000      2.0  best",
        ],
        ["eval        20   2.00  0.2500 ±0.050  0.5000    1.5000      2.0"],
        ["eval        30   3.00  0.2500 ±0.050  0.5000    1.5000      2.0  best"],
    ]
    shown, whole = table.lines(40, 4, metrics, bounds, 2.0, is_best=True, columns=52)
    assert shown == ["eval        40  0.2500 ±0.050  1.5000      2.0  best"] and "0.5000" in whole[0]
    shown, _ = EvalTable("f1").lines(40, 4, metrics, bounds, 2.0, is_best=True, columns=20)
    assert [" ".join(line.split()) for line in shown] == ["update f1 seconds", "eval 40 0.2500 ±0.050 2.0 best"]
    # No row is wider than the terminal, and the interval of the loss gives way first.
    bounds = {name: (value - 0.1, value + 0.1) for name, value in metrics.items()}
    for columns in range(44, 100):
        shown, whole = EvalTable("accuracy").lines(10, 1, metrics, bounds, 2.0, is_best=True, columns=columns)
        assert max(map(len, shown)) <= columns and "1.5000 ±0.100" in whole[1]
        assert ("1.5000 ±0.100" in shown[1]) == (columns >= 81) and ("0.2500 ±0.100" in shown[1]) == (columns >= 74)
    table = EvalTable("f1")
    lines = [line for i in range(41) for line in table.lines(i, i, {"f1": 0.5}, {}, 1.0, is_best=False)[1]]
    assert sum("update" in line for line in lines) == 3 and len(lines) == 44


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ({"text": "not bad\n at all", "prediction": "neg", "reference": "pos", "sure": 0.97, "loss": 3.5},
         "'not bad at all' → neg, true pos · sure 0.97 · loss 3.5"),
        ({"image": "/data/owl.png", "prediction": 3, "reference": 4}, "'owl.png' → 3, true 4"),
        ({"position": 7, "prediction": [1, 2], "loss": 1.0}, "row 7 · loss 1"),
        ({"question": "why " * 40, "loss": None}, f"'{'why ' * 15}…'"),
    ],
    ids=["text", "image", "numbers", "long"],
)  # fmt: skip
def test_a_mistake_is_told_on_one_line(sample, words):
    assert mistake_text(sample) == words


def test_the_course_counts_every_evaluation_to_come_also_if_it_ends_inside_an_epoch():
    by_epoch = RunLength(100, 4, update_seconds=0.5, evaluation_seconds=2.0)
    assert [by_epoch.evaluations_after(update) for update in (0, 24, 25, 99, 100)] == [5, 5, 4, 2, 1]
    assert by_epoch.expected_seconds() == 100 * 0.5 + 5 * 2.0
    whole = replace(by_epoch, test_evaluations=3.0, start_seconds=4.0, save_seconds=0.1, end_seconds=1.0)
    assert whole.expected_seconds() == pytest.approx(4.0 + 50.0 + (5 + 3) * 2.0 + 5 * 0.1 + 1.0)
    on_train = replace(by_epoch, train_evaluations=4.0)
    assert on_train.expected_seconds() == 50.0 + (5 + 4 * 4) * 2.0
    assert RunLength(100, 4, evaluates=False).evaluations_after(0) == 1
    assert RunLength(100, 4, evaluate_every=30).evaluations_after(0) == 1 + 4 + 3
    both = RunLength(100, 4, evaluate_every=5)  # the ends of epochs are among them
    assert [both.evaluations_after(update) for update in (0, 24, 25, 99, 100)] == [21, 17, 16, 2, 1]
    assert RunLength(50, 3, evaluate_every=25).evaluations_after(0) == 1 + 3 + 2 - 1  # the last one is the end's
    assert RunLength(100, 4).expected_seconds() is None and by_epoch.epoch_at(30) == 1.2
    length = RunLength(7, 3, evaluate_every=7, per_epoch=3)  # 3 + 3 + 1 updates
    assert [length.epoch_at(update) for update in (3, 6)] == [1.0, 2.0] and length.epoch_at(7) == 7 / 3
    assert [length.evaluations_after(update) for update in (0, 2, 3, 6, 7)] == [4, 4, 3, 2, 1]


def test_the_time_left_is_that_of_updates_and_evaluations_as_they_were_measured(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    pace = Pace(RunLength(100, 2, update_seconds=9.0, evaluation_seconds=7.0))
    pace.log(0, 5.0)
    assert pace.seconds_left(0) == 100 * 9.0 + 3 * 7.0
    pace.log(10, 25.0)
    assert pace.seconds_left(10) == 90 * 2.0 + 3 * 7.0
    pace.begin_evaluation()
    now += 1.0
    assert pace.seconds_left(50) == 50 * 2.0 + 6.0 + 2 * 7.0
    now += 3.0
    assert pace.end_evaluation() == 4.0
    assert pace.seconds_left(50) == 50 * 2.0 + 2 * 4.0
    pace.length = replace(pace.length, test_evaluations=10.0, end_seconds=1.5)
    assert pace.seconds_left(50) == 50 * 2.0 + 12 * 4.0 + 1.5  # the test data too, as the evaluation was measured
    assert pace.end_saves() == 0.0
    pace.end()
    now += 1.0
    assert pace.end_saves() == 1.0
    spent = TimeSpent(start=3.0, train=25.0, wait=5.0, evaluation=4.0, save=6.0)
    assert spent.text(50.0) == "start 6 % · train 50 % · data-wait 10 % · eval 8 % · save 12 % · other 14 %"


def test_a_standard_stream_writes_what_a_terminal_would_obey_as_text():
    stream = io.StringIO()
    safe = SafeStream(SafeStream(stream))  # a forked process wraps it again
    assert safe.inner is stream
    for text, expected in (
        ("\x1b]0;title\x07\n", "\\x1b]0;title\\x07\n"),
        ("\r 10 % \u202e", "\r 10 % \\u202e"),
        ("\r\x1b[K", "\r\x1b[K"),
    ):
        stream.seek(0)
        stream.truncate()
        assert safe.write(text) == len(text) and stream.getvalue() == expected
