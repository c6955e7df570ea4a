"""Train a run: everything before its first update, the training, and its end; also the parts of it that only try."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

from loopwright.callbacks import TerminateOnNaNCallback
from loopwright.engine.processes import gather_objects
from loopwright.errors import InputError, Preempted
from loopwright.metrics.paired import read_rows
from loopwright.progress import StopKind
from loopwright.report import LiveReport
from loopwright.results import LearningRateCurve
from loopwright.run_folder import RunFolder, RunStatus, note_in_index, read_json, runs_root, write_json
from loopwright.runs.auto.batch_size import choose_batch
from loopwright.runs.auto.learning_rate import Search, choose_rate, find_rate
from loopwright.runs.auto.memory import print_expected
from loopwright.runs.clock import Pace, TimeSpent
from loopwright.runs.console import start as start_block
from loopwright.runs.console.progress import ReportProgress
from loopwright.runs.finish import finish, model_source, replace_folder
from loopwright.runs.job import RunJob
from loopwright.runs.model_sums import BASE, write_sums
from loopwright.runs.ownership import StopAskedError
from loopwright.runs.provenance import place_facts, run_facts
from loopwright.runs.start import Outcome
from loopwright.runs.trial import plan_time, rehearse
from loopwright.runs.verdicts import BASELINE_ROWS, save_rows
from loopwright.runs.weights import newest_checkpoint
from loopwright.tasks.base import Origin
from loopwright.training.run import run_of

_BASELINES = "baselines.json"


def train(run: RunJob, create_folder: Callable[[], RunFolder] | None = None) -> Outcome:
    """Train in a new run folder, or resume in an existing one; `create_folder` is called when all else is ready."""
    try:
        folder = _prepare(run, create_folder)
    except StopAskedError:
        assert run.folder is not None
        if run.checkpoint is None and run.trainer.is_first:
            RunStatus(run.path).update(state="stopped", message="stopped before the first update")
            note_in_index(run.folder, task=run.task.name, state="stopped")
        return Outcome(run.folder, "stopped", None)
    pace, before = Pace(run.length), time.monotonic() - run.screen.began
    if run.checkpoint is not None and run.trainer.is_first:
        run.trainer.on_begun = partial(run.settings.write, folder)
    watch, trainer, screen = TerminateOnNaNCallback(), run.trainer, run.screen
    live = LiveReport(folder.path) if trainer.is_first else None
    trainer.on_record = screen.events.record
    trainer.callback_handler.add_callbacks([watch, ReportProgress(run, pace, live), *run.callbacks()])
    with run.data.watched(screen, "measuring the lengths of the rows"):
        arguments = run.train_arguments()
    screen.clock.lap("rows")
    state = "failed"
    try:
        result = trainer.train(run.job.train_dataset, **arguments)
        # Only rank 0 checks for the stop file; the other ranks learn of it here.
        kind = getattr(gather_objects(result.stop_reason)[0], "kind", None)
        state = "stopped" if kind is StopKind.FILE else "done"
        if watch.triggered or kind is StopKind.NOT_FINITE:
            state = "diverged"
        if state == "done":
            run.owner.take(folder, "finish")
            finish(run, result, TimeSpent(before, **run_of(trainer).logbook.stopwatch.read()))
    except StopAskedError:
        state = "stopped"
    except (KeyboardInterrupt, Preempted) as interruption:
        interruption.__notes__ = [start_block.print_saved(folder, pace.end_saves(), screen)]  # add_note needs 3.11
        raise
    finally:
        screen.close_line()
        if trainer.is_first:
            value = folder.read_result().get("metrics", {}).get(run.best.short_name)
            ended = state if state != "failed" else folder.status.get("state", state)
            note_in_index(folder, state=ended, value=value)
    return Outcome(folder, state, result)


def _prepare(run: RunJob, create_folder: Callable[[], RunFolder] | None) -> RunFolder:
    settings, screen, is_new = run.settings, run.screen, run.folder is None
    origin = None
    if run.folder is not None:
        with screen.waiting("verifying the newest checkpoint", is_one_step=True):
            run.checkpoint = newest_checkpoint(run.folder)
        screen.clock.lap("checkpoint")
    if run.folder is not None and run.checkpoint is not None:
        for name in run.args.auto:
            value = f"{getattr(run.training, name):g}"
            what = f"--{name} auto: the run began with {value}"
            raise InputError("args.value", what, fix=f"--{name} {value}")
        origin = Origin(str(model_source(run.folder)), is_run=True, module=settings.module)
    is_planned = settings.is_planned_by_time(not is_new)
    _build(run, origin, is_planned)
    folder: RunFolder = gather_objects(create_folder() if create_folder and run.trainer.is_first else run.folder)[0]
    run.folder, run.job.folder = folder, folder.path
    with _removed_on_failure(folder, is_new and run.trainer.is_first):
        _write_start(run, is_planned)
        _heed_stop(run)
        if settings.args.rehearsal and run.checkpoint is None:
            rehearse(run)
            run.measure()
            screen.clock.lap("rehearsal")
            _heed_stop(run)
        if "learning_rate" in settings.args.auto:
            choose_rate(run)
            screen.clock.lap("learning rate")
            _heed_stop(run)
            run.trainer = run.create_trainer()
        if is_planned:
            plan_time(run)
            screen.clock.lap("timing")
            _heed_stop(run)
            start_block.print_batch(run)
            if run.trainer.is_first and run.checkpoint is None:
                settings.write(folder)
            run.trainer = run.create_trainer()
    screen.attach(folder)
    if run.checkpoint is None and not is_planned:
        start_block.print_time(run)
    screen.block("run", f"{folder.id} -> {os.path.normpath(folder.path)}")
    if run.trainer.is_first:
        best = run.best
        folder.record(**run.notes)
        note_in_index(folder, task=run.task.name, state="running", metric=best.short_name, direction=best.direction)
    screen.events.add("start", **place_facts(folder), **run_facts(run))
    return folder


def _build(run: RunJob, origin: Origin | None, is_planned: bool) -> None:
    run.build(origin)
    if run.folder is None or run.checkpoint is None:
        run.score_baselines()
        run.screen.clock.lap("baselines")
        choose_batch(run)
        run.screen.clock.lap("batch size")
    else:
        run.baselines = read_json(run.folder.path / _BASELINES, {})
        run.baseline_rows = read_rows(run.folder.path / BASELINE_ROWS)
    run.measure()
    run.screen.clock.lap("device")
    start_block.print_device(run)
    if not is_planned:
        start_block.print_batch(run)
        start_block.print_few_updates(run)
    start_block.print_baselines(run)


def _write_start(run: RunJob, is_planned: bool) -> None:
    """Write settings, baselines and model config; a resumed run writes its settings once it is restored."""
    folder, is_begun = run.folder, run.checkpoint is not None
    if folder is None or not run.trainer.is_first:
        return
    if not is_begun:
        run.settings.write(folder)
        write_json(folder.path / _BASELINES, run.baselines, is_sealed=True)
        save_rows(folder.path / BASELINE_ROWS, run.baseline_rows)
        replace_folder(folder.model, lambda aside: _write_skeleton(run, aside))  # also if links are in its place


def _write_skeleton(run: RunJob, folder: Path) -> None:
    try:
        run.task.save_skeleton(run.job, folder)
    except ValueError as error:  # of transformers: a name of a chat template that is a path, say
        what, fix = f"the files of {run.args.model} cannot be saved", "leave out --model"
        raise InputError("model.folder", what, saw=[str(error)[:200]], fix=fix) from error
    if run.job.base is not None:
        write_json(folder / BASE, run.job.base)
    write_sums(folder)


def rehearse_only(run: RunJob) -> None:
    """Do everything up to the first update, then stop; called by `check` with a temporary folder."""
    is_planned = run.settings.is_planned_by_time(is_begun=False)
    expected = print_expected(run)
    _build(run, None, is_planned)
    start_block.print_preview(run)
    found = rehearse(run, is_check=True)
    run.measure()
    if is_planned:
        plan_time(run)
        start_block.print_batch(run)
    else:
        start_block.print_time(run)
    facts = {} if expected is None else {"expected_memory": asdict(expected)}
    run.screen.events.emit("check", **run_facts(run), rehearsal=asdict(found), **facts)


def find_rate_only(run: RunJob, search: Search) -> LearningRateCurve:
    run.build()
    choose_batch(run)
    run.measure()
    start_block.print_device(run)
    return find_rate(run, search)


def _heed_stop(run: RunJob) -> None:
    """Raise a StopAskedError on all processes if `lw stop` was called."""
    if gather_objects(run.owner.is_asked_to_stop())[0]:
        raise StopAskedError


@contextlib.contextmanager
def _removed_on_failure(run: RunFolder, is_ours: bool) -> Iterator[None]:
    """Remove the folder of a run that did not reach its first update."""
    try:
        yield
    except BaseException as error:
        if is_ours and not isinstance(error, StopAskedError):
            shutil.rmtree(run.path, ignore_errors=True)
            with contextlib.suppress(OSError):
                runs_root().rmdir()  # if empty: this was the first run
        raise
