"""`--supervise`: a run whose process dies is restarted, and ends like one that was never disturbed."""

import json
import time

import pytest

import toys
from distributed.test_failures import is_alive, wait_until
from loopwright.cli import main
from loopwright.run_folder import LeaseError, RunFolder
from loopwright.runs.ownership import Ownership
from tasks.reviews import events
from tasks.squares import write_squares

WORDS = ["train", "text-classification", "--data", "reviews.csv", "--batch", "8", "--threads", "1", "--lr", "2e-3"]
ENDS = """
import os, signal, sys, time
from pathlib import Path
from loopwright.cli.supervise import supervise
from argparse import Namespace

import loopwright.cli.supervise as module

def child(argv):
    assert not os.isatty(0) and float(os.environ["LOOPWRIGHT_BEGUN"]) < time.time()
    count = len(Path("starts").read_text()) if Path("starts").exists() else 0
    Path("starts").write_text("x" * (count + 1))
    end = ends[min(count, len(ends) - 1)]
    if end < 0:
        os.kill(os.getpid(), -end)
    if end > 200:  # a signal to the supervisor
        signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
        Path("pid").write_text(str(os.getpid()))
        os.kill(os.getppid(), end - 200)
        time.sleep(9)
    return end

sys.modules["loopwright.cli.main"].main = child
module._Supervisor._run_child = lambda self, argv, furthest, pipe: (os.write(pipe, b'["os", '), child(argv))[1]
os.dup2(os.openpty()[1], 0)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
Path("runs/run-2").mkdir(parents=True)
Path("runs/run-2/run.json").write_text('{"id": "run-2"}')  # another run, whose id begins alike
supervisor = os.getpid()
for ends in ([-9, 0], [-9], [-11, 2], [1], [-9, 74], [75], [130], [215], [209]):
    Path("starts").unlink(missing_ok=True)
    code = supervise(Namespace(json=False, no_standby=False), Path("run"), ["train"])
    if os.getpid() != supervisor:
        os._exit(code)
    print(ends, code, len(Path("starts").read_text()))
"""


def test_a_restart_is_for_deaths_only_and_signals_are_passed_on(tmp_path):
    done = toys.python("-uc", ENDS, cwd=tmp_path)
    told = [
        "[-9, 0] 0 2",
        "[-9] 137 6",
        "[-11, 2] 2 2",
        "[1] 1 1",
        "[-9, 74] 74 2",
        "[75] 75 1",
        "[130] 130 1",
        "[215] 75 1",
    ]
    assert done.stdout.splitlines() == told, done.stderr
    assert done.returncode == -9 and wait_until(lambda: not is_alive(int((tmp_path / "pid").read_text())), 2)
    assert "gave up: the process was ended by SIGKILL, 6 times without a new update" in done.stderr


def test_a_request_to_stop_outlives_a_restart_but_not_its_run(tmp_path, monkeypatch):
    for begun, is_kept in (("inf", False), (time.time() + 60, False), (time.time() - 60, True)):
        monkeypatch.setenv("LOOPWRIGHT_BEGUN", str(begun))
        (tmp_path / "stop").write_text("stop")
        with Ownership() as owner:
            owner.take(RunFolder(tmp_path), "start")
            assert owner.is_asked_to_stop() == is_kept


def test_an_error_after_the_folder_was_moved_is_that_it_was_moved(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    with pytest.raises(LeaseError, match="was moved to .*elsewhere"), Ownership() as owner:
        owner.take(run, "start")
        run.path.rename(tmp_path / "elsewhere")
        run.config.write_text("")


def test_what_cannot_be_supervised_is_refused(capsys, monkeypatch, reviews):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([*WORDS, "--supervise"]) == 2
    assert "--max-restarts" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_is_killed_ends_with_the_same_model_and_metrics(tmp_path):
    write_squares(tmp_path / "squares", 90)
    words = ["train", "image-classification", "--data", "squares", *WORDS[4:], "--max_steps", "48", "--no_rehearsal"]
    assert main([*words, "--out", "whole"]) == 0
    kills = "after_optimizer_step:30:kill"  # counted by each process
    done = toys.python("-m", "loopwright", *words, "--out", "killed", "--supervise", "--json", LW_FAILPOINT=kills)
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == told[-1]["exit_code"] == 0 and told[-1]["event"] == "end", done.stderr
    assert {each["exit_code"] for each in told if each["event"] == "restart"} == {-9}
    for name in ("model/model.safetensors", "eval/predictions.jsonl"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert events(tmp_path / "killed") == events(tmp_path / "whole")
