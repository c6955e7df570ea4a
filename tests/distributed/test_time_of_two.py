"""`--time` on two processes: what the first one has measured counts for both."""

import os
from dataclasses import asdict
from pathlib import Path

import pytest

from distributed.launcher import run

pytest.importorskip("transformers")
pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def measure(results) -> None:
    from loopwright.run_folder import RunFolder
    from loopwright.runs.console.screen import Screen
    from loopwright.runs.job import RunJob
    from loopwright.runs.settings import settle
    from loopwright.runs.trial import time_run
    from loopwright.tasks import get_task
    from loopwright.tasks.base import Origin
    from loopwright.tasks.data import RunData

    folder, task = Path.cwd(), get_task("text-classification")
    settings = settle(task, ["--data", str(folder / "reviews.csv"), "--batch", "8", "--threads", "1", "--time", "2s"])
    screen = Screen(is_quiet=True)
    if os.environ["RANK"] == "1":
        screen.began -= 1000  # as if this process had begun long before
    job = RunJob(task, settings, RunData(task.preflight(settings.args)), screen, RunFolder(folder))
    job.build(Origin(None))
    job.measure()
    results["costs"] = asdict(time_run(job))


def test_two_processes_stop_timing_together_and_take_what_the_first_has_measured(tmp_path):
    from tasks.reviews import rows, write_csv

    write_csv(tmp_path / "reviews.csv", rows())
    first, second = run(measure, tmp_path)
    assert first["costs"] == second["costs"]
    assert 0 < first["costs"]["start"] < 1000 and first["costs"]["update"] > 0
    assert not list(tmp_path.glob(".trial*"))
