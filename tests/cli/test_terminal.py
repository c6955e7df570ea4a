"""What a person sees: on a terminal, in a pipe, with --quiet, after Ctrl-C and a resume, with several processes."""

import fcntl
import io
import json
import os
import pty
import re
import struct
import termios
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

import toys
from distributed.launcher import run
from loopwright.cli import main
from loopwright.cli.launch import work
from tasks.forked import start

SHORT = ["--max_train_samples", "192", "--max_eval_samples", "64", "--threads", "1"]
DEMO = ["demo", "image-classification", *SHORT]
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
WAITED = re.compile(r"[a-z].*: ([\d,]+ in )?[\d.]+ s$")  # work that took long, on a busy machine
BLOCK = ["data", "model", "device", "batch", "naive", "memory", "check", "time", "run", "resume"]
END = ["best", "worst", "files", "next"]


def drawn(text):
    rows, column = [""], 0
    for piece in re.findall(r"\x1b\[K|\x1b\[A|\r|\n|[^\x1b\r\n]+", text):
        if piece == "\r":
            column = 0
        elif piece == "\n":
            rows.append("")
            column = 0
        elif piece == "\x1b[K":
            rows[-1] = rows[-1][:column]
        else:
            rows[-1] = rows[-1][:column].ljust(column) + piece + rows[-1][column + len(piece) :]
            column += len(piece)
    return [row.rstrip() for row in rows]


class Shown:
    """What was seen of a run that was interrupted by Ctrl-C on a terminal of 110 columns."""

    def __init__(self, folder):
        self.folder = folder
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 110, 0, 0))
        process = start([*DEMO, "--epochs", "500"], folder=folder, out=os.ttyname(theirs), TERM="xterm")
        found, is_interrupted = os.read(ours, 65536), False
        os.close(theirs)
        try:
            while True:
                try:
                    found += os.read(ours, 65536)
                except OSError:  # everybody has closed it
                    break
                if not is_interrupted and found.count(b"eval  ") >= 3:
                    os.write(ours, b"\x03")
                    is_interrupted = True
            process.join(60)
            self.code = process.exitcode
        finally:
            process.kill()
            os.close(ours)
        self.text = found.decode().replace("\r\n", "\n")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return the folder of all runs here: the data of the demo is written once."""
    return tmp_path_factory.mktemp("terminal")


@pytest.fixture(scope="module")
def shown(place):
    return Shown(place)


@pytest.mark.slow
def test_a_terminal_shows_one_line_that_changes_and_a_table_with_one_header(shown):
    states = [part for part in re.split(r"[\r\n]", shown.text) if re.match(r" *\d+% .*step \d", part)]
    assert len(states) >= 5 and max(map(len, states)) < 110
    steps = [int(re.search(r"step ([\d,]+)/1,500", state)[1].replace(",", "")) for state in states]
    assert steps == sorted(steps) and len(set(steps)) > 3
    assert "─" in states[0] and "left " in states[0] and "done " in states[0]  # from the rehearsal
    assert all(word in states[-1] for word in ("loss ", "accuracy ", "ex/s", "left "))
    rows = drawn(re.sub(r"\x1b\[\d+m", "", shown.text))
    assert not [row for row in rows if re.match(r" *\d+% ", row)]  # nothing of it is left
    table = [index for index, row in enumerate(rows) if row.startswith("eval ")]
    header = rows[table[0] - 1].split()
    assert header[:4] == ["update", "epoch", "accuracy", "f1"] and header[-2:] == ["loss", "seconds"]
    assert sum(row.split()[:2] == ["update", "epoch"] for row in rows) == 1
    assert table == list(range(table[0], table[0] + len(table)))
    assert rows[table[0]].endswith("best") and "±" in rows[table[0]]
    assert [row.split()[0] for row in rows[: table[0]] if row[:1].isalpha()] == ["loopwright", *BLOCK]


@pytest.mark.slow
def test_ctrl_c_says_what_was_saved_and_a_resume_says_where_it_goes_on(shown, capfd, monkeypatch):
    assert shown.code == 130
    rows = drawn(re.sub(r"\x1b\[\d+m", "", shown.text))
    stopped = next(row for row in rows if row.startswith("stopped after step "))
    update = int(stopped.split()[3].rstrip(",").replace(",", ""))
    assert stopped.endswith("saving; a second Ctrl-C drops that")
    saved = next(row for row in rows if row.startswith("saved "))
    assert f"checkpoints/step-{update:010d} (" in saved
    run = saved.split("lw resume ")[1]
    monkeypatch.chdir(shown.folder)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["runs"]) == 0
    assert f"{run}  image-classification  interrupted, resumable  accuracy " in capfd.readouterr().out
    assert main(["resume", run, "--max_steps", str(update + 2)]) == 0
    out = capfd.readouterr().out
    epochs, place = update // 3, update % 3 * 64 + 1
    due = f"sample {place} of epoch {epochs + 1}" if update % 3 else rf"(the evaluation|the end) of epoch {epochs}"
    assert f"resumed at step {update:,} of {update + 2:,} · data unchanged" in out
    assert re.search(rf"· {due} is next\n", out)
    assert "data    train" in out and "\ndone in " in out and "start " in out


@pytest.fixture(scope="module")
def piped(place):
    """Return the folder of a demo whose output went elsewhere than to a terminal, and what came out."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(place)
        patch.setenv("HF_HUB_OFFLINE", "1")
        code = main([*DEMO, "--epochs", "2", "--logging_steps", "1", "--out", "run"])
    assert (code, err.getvalue()) == (0, "")
    return place, out.getvalue()


@pytest.mark.slow
def test_a_pipe_gets_plain_lines_and_log_txt_the_same(piped):
    folder, said = piped
    assert CONTROL.findall(said) == []
    assert (folder / "run" / "log.txt").read_text() == said
    rows = [row for row in said.splitlines() if not WAITED.match(row)]
    names = [row.split()[0] for row in rows if re.match(r"[a-z]+ ", row) and not row.startswith("eval ")]
    assert names == ["loopwright", *BLOCK, "done", *END]
    steps = [row for row in rows if "% " in row[:6]]
    assert [re.search(r"step (\d)/6", row)[1] for row in steps] == list("123456")
    words = ("epoch ", "loss ", "lr ", "ex/s", "mem ", "data-wait ", "left ", "done ")
    assert all(word in steps[-1] for word in words)


@pytest.mark.slow
def test_the_end_says_where_the_time_went_how_good_it_is_and_what_to_run_next(piped):
    folder, said = piped
    end = said[said.index("\ndone in ") :]
    shares = dict(re.findall(r"([a-z-]+) (\d+) %", end.splitlines()[1]))
    assert {"start", "train", "eval"} <= shares.keys() and 97 <= sum(map(int, shares.values())) <= 103
    result = json.loads((folder / "run" / "result.json").read_text())
    assert f"best    step {result['update']}  accuracy {result['metrics']['accuracy']:.4f} ±" in end
    assert "(majority " in end and "majority (" in end.splitlines()[3]  # the baseline, and a sentence about it
    assert re.search(r"\nworst   '\d+\.png' → \d, true \d · sure 0\.\d\d · loss ", end)
    assert "files   run/model   run/report.html" in end
    for command in re.findall(r"lw (.*)", end):
        verb, target, *_ = command.split()
        assert verb in ("report", "predict", "resume") and target == "run"
    basis = next(row for row in said.splitlines() if row.startswith("time "))
    assert re.search(r"about \d+:\d\d in all, from the rehearsal: [\d.]+ s an update and [\d.]+ s an evaluation", basis)


def test_a_quiet_run_prints_its_folder_and_nothing_else(capfd, reviews):
    flags = ["--data", str(reviews), "--epochs", "1", "--threads", "1", "--quiet"]
    assert main(["train", "text-classification", *flags, "--out", "run"]) == 0
    assert capfd.readouterr() == ("run\n", "")
    log = Path("run/log.txt").read_text()
    assert all(f"\n{name}" in log for name in (*BLOCK, "eval ", "done in ", *END))
    assert main(["resume", "--quiet", "run", "--epochs", "2"]) == 0
    assert capfd.readouterr() == ("run\n", "")
    assert main(["train", "text-classification", *flags, "--data", "absent.csv"]) == 2
    said = capfd.readouterr()
    assert said.out == "" and said.err.startswith("error[data.file]")


def test_plain_runs_say_on_a_terminal_what_they_say_in_a_pipe(monkeypatch, reviews, capsys):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    flags = ["--data", str(reviews), "--threads", "1", "--plain", "--no_rehearsal", "--logging_steps", "2"]
    for verb in (
        ["train", "text-classification", *flags, "--epochs", "1", "--out", "run"],
        ["resume", "run", "--plain"],
    ):
        stream = toys.Terminal()
        with redirect_stdout(stream), redirect_stderr(stream):
            assert main([*verb, *(["--epochs", "2"] if verb[0] == "resume" else [])]) == 0
        said = stream.getvalue()
        assert CONTROL.findall(said) == [] and re.search(r"%  step \d+/\d+ · epoch ", said)
        assert max(map(len, said.splitlines())) > 60
    for verb in ("train", "resume", "demo"):
        assert main([verb, "--help"]) == 0
        assert "--plain prints whole lines" in capsys.readouterr().out


def test_quiet_verbs_that_use_a_model_print_what_was_asked_for_alone(capfd, finished):
    assert main(["evaluate", str(finished.path), "--quiet"]) == 0
    said = capfd.readouterr()
    assert said.out.startswith("accuracy ") and said.out.count("\n") == 1 and said.err == ""
    assert main(["predict", str(finished.path), "--quiet", "great film"]) == 0
    assert list(json.loads(capfd.readouterr().out)) == ["label", "score"]


def demo_on_two():
    return work([*DEMO, "--epochs", "1", "--no_rehearsal"])


@pytest.mark.slow
@pytest.mark.distributed
def test_of_several_processes_the_first_one_speaks(place):
    first, second = run(demo_on_two, place)
    assert first["returned"] == second["returned"] == 0 and second.output == ""
    assert CONTROL.findall(first.output) == []
    rows = first.output.splitlines()
    block = ("device  2 processes on CPU", "batch   64 × accum 1 × 2 devices = 128")
    for begin in ("loopwright ", *block, "eval ", "done in "):
        assert sum(row.startswith(begin) for row in rows) == 1, begin
    assert "time    known once the first updates are logged" in first.output


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "NO_COLOR"])
def test_best_rows_are_green_notes_yellow_errors_red_and_files_without_colours(capsys, reviews, monkeypatch, variable):
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name in ("FORCE_COLOR", variable):
        monkeypatch.setenv(name, "1")
    words = ["--data", str(reviews), "--max_steps", "2", "--threads", "1", "--no_rehearsal"]
    assert main(["train", "text-classification", *words, "--out", "run"]) == 0
    assert main(["train", "text-classification", *words, "--out", "run"]) == 2
    out, err = capsys.readouterr()
    painted = [line for line in out.splitlines() if line.startswith("\x1b")]
    if variable == "NO_COLOR":
        assert "\x1b" not in out + err
        return
    assert [(line[:5], line[5:9]) for line in painted] == [
        ("\x1b[33m", "note"),
        ("\x1b[32m", "eval"),
        ("\x1b[32m", "best"),
    ]
    assert all(line.endswith("\x1b[0m") for line in painted) and err.startswith("\x1b[31merror[run.exists]:\x1b[0m ")
    assert "\x1b" not in Path("run/log.txt").read_text()
    assert main(["train", "text-classification", *words, "--plain", "--out", "plain"]) == 0
    assert "\x1b" not in capsys.readouterr().out
