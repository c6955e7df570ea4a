"""Start a run, or several that differ in their seed: check the data and create the folder.

torch is imported only when a model is needed.
"""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from loopwright.errors import InputError
from loopwright.run_folder import RunFolder, check_new_folder, create_run, runs_root, write_atomically
from loopwright.runs.command_text import command_text
from loopwright.runs.console.screen import Screen
from loopwright.runs.data import ReadingProgress, describe
from loopwright.runs.seeds import seeds_of, with_seed
from loopwright.runs.settings import Settings, check_trackers
from loopwright.sources import DataPlan
from loopwright.tasks import get_task
from loopwright.tasks.base import Task
from loopwright.tasks.data import RunData
from loopwright.version import package_version

if TYPE_CHECKING:
    from loopwright.runs.job import Outcome

DATA_FLAGS = ("data", "train_file", "validation_file", "test_file")


def start(
    settings: Settings,
    screen: Screen,
    command: Sequence[str] | None = None,
    *,
    known: DataPlan | None = None,
    word: str | None = None,
) -> Outcome:
    """Train in a new run folder; called by `train` and by the command line.

    Args:
        settings: of the run.
        screen: prints the lines.
        command: the words of the command line; None for a user's script.
        known: the plan of the data, if it was already read and shown.
        word: added to the run id after the name of the data.
    """
    task = get_task(settings.args.task)
    is_named = settings.is_given("output_dir")
    if is_named:
        check_new_folder(settings.training.output_dir, "output_dir=" if command is None else "--output_dir ")
    plan = check_files(task, settings, screen) if known is None else known
    from loopwright.runs.job import train as train_job

    def make_run() -> RunFolder:
        about = {"task": task.name, "created": datetime.now(timezone.utc).isoformat(timespec="seconds")}
        label = Path(plan.files[0].path).stem if len(plan.files) == 1 else Path(plan.files[0].path).parent.name
        folder = create_run(label, about, settings.training.output_dir if is_named else None, word=word)
        write_atomically(folder.data, plan.to_json())
        write_atomically(folder.command, command_text(command))
        return folder

    return train_job(task, settings, RunData(plan), screen, None, make_run)


class Seeds:
    """Trains the same settings with consecutive seeds, each in a separate run; data is read and split once.

    Args:
        settings: shared by all runs; `seeds` is the number of runs, `seed` the first seed.
        command: the words of the command line; None for a user's script.

    Attributes:
        seeds: all seeds.

    Raises:
        InputError: a named folder holds other files or a run of one of the seeds; or the launcher may restart lost
            processes, which works for a single run only.
    """

    def __init__(self, settings: Settings, command: Sequence[str] | None = None) -> None:
        self._settings = settings
        self._command = command
        self._plan: DataPlan | None = None
        self._updates: int | None = None
        self.seeds = seeds_of(settings)
        if len(self.seeds) > 1 and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
            raise InputError(
                "args.value",
                f"--seeds {len(self.seeds)}: several runs cannot go on by themselves after a restart",
                fix="leave out --max-restarts   or   train with one --seed after the other",
            )
        if settings.is_given("output_dir"):
            for seed in self.seeds:
                folder = with_seed(settings, seed).training.output_dir
                check_new_folder(folder, "output_dir=" if command is None else "--output_dir ")

    def train(self, seed: int, screen: Screen) -> Outcome:
        """Train with one of the seeds, and free its memory."""
        one = with_seed(self._settings, seed)
        if self._updates is not None:  # the number that fits into the given time, as found by the first run
            one.args.time, one.training.max_steps, one.sources["max_steps"] = None, self._updates, "auto"
        word = f"seed{seed}" if len(self.seeds) > 1 else None
        if word is not None:
            screen.say(f"seed {seed} ({self.seeds.index(seed) + 1} of {len(self.seeds)})")
        self._plan = check_files(get_task(one.args.task), one, screen, self._plan)
        try:
            return start(one, screen, self._command, known=self._plan, word=word)
        finally:
            if one.args.time is not None and one.training.max_steps > 0:
                self._updates = one.training.max_steps
            gc.collect()  # models have reference cycles; free their memory for the next run


def check_files(task: Task, settings: Settings, screen: Screen, known: DataPlan | None = None) -> DataPlan:
    """Check the installation, the model's name and the data files, and return the plan; does not import torch.

    Args:
        task: the task.
        settings: of the run.
        screen: prints the lines.
        known: the plan of the data, if it was already read.
    """
    task.check_installed()
    check_trackers(settings.training.report_to)
    if settings.args.model is not None:
        task.find_model(settings.args.model)
    if all(getattr(settings.args, name) is None for name in DATA_FLAGS):
        raise InputError(
            "data.file",
            "there is no data: neither --data nor --train_file is given",
            fix=f"--data FILE   or   lw demo {task.name}",
        )
    screen.say(f"loopwright {package_version()} · {task.name}")
    with ReadingProgress(screen) as progress:
        plan = task.preflight(settings.args, progress) if known is None else known
    screen.block("data", *describe(plan, settings.args))
    for warning in plan.warnings:
        screen.tell("warning", message=warning)
    return plan


def check_settings(settings: Settings, screen: Screen) -> DataPlan:
    """Do everything up to the first update, including the rehearsal, and leave nothing behind."""
    task = get_task(settings.args.task)
    plan = check_files(task, settings, screen)
    from loopwright.runs.job import rehearse_only

    root = runs_root()
    had_root = root.exists()
    folder = root / f".check-{datetime.now():%H%M%S%f}"
    folder.mkdir(parents=True)
    try:
        rehearse_only(task, settings, RunData(plan), RunFolder(folder), screen)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if not had_root:
            root.rmdir()
    return plan
