"""Start a run: check the data and create the folder.

torch is imported only when a model is needed.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopwright.errors import InputError
from loopwright.run_folder import Lease, RunFolder, runs_root, write_atomically
from loopwright.runs.console.screen import Screen
from loopwright.runs.creation import check_new_folder, create_run, option_of_folder, remove_stale
from loopwright.runs.data import ReadingProgress, has_known_ending, print_data
from loopwright.runs.ownership import Ownership
from loopwright.runs.provenance import write_command
from loopwright.runs.settings import Settings, check_trackers, settle
from loopwright.sources import DataPlan
from loopwright.sources.locations import split_of_file
from loopwright.tasks import get_task
from loopwright.tasks.base import Task
from loopwright.tasks.consent import check_foreign, trusts
from loopwright.tasks.data import RunData
from loopwright.version import package_version

if TYPE_CHECKING:
    from loopwright.results import LearningRateCurve, TrainResult

DATA_FLAGS = ("data", "train_file", "validation_file", "test_file")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run."""

    run: RunFolder
    state: str  # "done", "stopped" (by a file, resumable) or "diverged"
    result: TrainResult | None


def start(
    settings: Settings,
    screen: Screen,
    command: Sequence[str] | None = None,
    *,
    known: DataPlan | None = None,  # the plan of data already read
    word: str | None = None,  # becomes a part of the run id
    previous: Ownership | None = None,  # of the run with the seed before; a request to stop it now is for this one
) -> Outcome:
    """Train in a new run folder."""
    task = get_task(settings.args.task)
    folder = settings.training.output_dir if settings.is_given("output_dir") else None
    if folder is not None:
        check_new_folder(folder, option_of_folder(command))
    plan = check_files(task, settings, screen) if known is None else known
    screen.clock.import_modules("torch")
    from loopwright.runs.job import RunJob
    from loopwright.runs.train import train

    def create_folder() -> RunFolder:
        metadata = {"task": task.name, "created": datetime.now(timezone.utc).isoformat(timespec="seconds")}
        run = create_run(_data_name(plan), metadata, folder, word=word, fill=fill)
        owner.take(run, "start")
        if previous is not None:
            previous.hand_over(run)
        trusts(run, is_given=True)
        return run

    def fill(run: RunFolder) -> None:
        write_atomically(run.data, plan.to_json())
        write_command(run, command)
        settings.write(run)

    with Ownership() as owner:
        return train(RunJob(task, settings, RunData(plan), screen, owner=owner), create_folder)


def _data_name(plan: DataPlan) -> str:
    """Return the name of the data: of its file or, if that is only `train`, `data` or the like, of its folder."""
    path = Path(plan.files[0].path)
    stem = path.name.partition(".")[0] or path.name
    is_common = split_of_file(path) or stem.lower() in ("data", "dataset", "rows", "annotations", "images", "coco")
    return path.absolute().parent.name or stem if is_common or len(plan.files) > 1 else stem


def check_files(task: Task, settings: Settings, screen: Screen, known: DataPlan | None = None) -> DataPlan:
    """Check the installation, the model's name and the data files, and return the plan; does not import torch."""
    screen.clock.lap("import")
    task.check_installed()
    check_trackers(settings.training.report_to)
    if settings.args.model is not None:
        task.find_model(settings.args.model)
    if all(getattr(settings.args, name) is None for name in DATA_FLAGS):
        what = "there is no data: neither --data nor --train_file is given"
        here = sorted(path.name for path in Path().iterdir() if path.is_file() and has_known_ending(path.name))
        offers = [*(f"--data {shlex.quote(name)}" for name in here[:1]), f"lw demo {task.name}"]
        saw = [f"files here: {', '.join(here[:5]) or 'none'}"]
        raise InputError("data.file", what, saw=saw, fix="   or   ".join(offers))
    check_foreign(settings, *(getattr(settings.args, name) for name in DATA_FLAGS))
    screen.print(f"loopwright {package_version()} · {task.name}")
    print_left_out(settings, screen)
    with ReadingProgress(screen) as progress:
        plan = task.preflight(settings.args, progress) if known is None else known
    print_data(plan, settings.args, screen)
    screen.clock.lap("read and check data")
    for warning in plan.warnings:
        screen.events.emit("warning", message=warning)
    return plan


def print_left_out(settings: Settings, screen: Screen) -> None:
    if settings.left_out:
        names = " ".join(settings.left_out)
        what = f"the run's trackers ({names}) are not started: you have not allowed them here"
        screen.remark("note", f"{what}; --report_to {names} starts them")


def check_settings(settings: Settings, screen: Screen) -> DataPlan:
    """Do everything up to the first update, including the rehearsal, and leave nothing behind."""
    task = get_task(settings.args.task)
    plan = check_files(task, settings, screen)
    from loopwright.runs.job import RunJob
    from loopwright.runs.train import rehearse_only

    root = runs_root()
    had_root = root.exists()
    folder = root / f".check-{datetime.now():%H%M%S%f}"
    if had_root:
        remove_stale(root, ".check-")
    try:
        with Lease(folder):
            rehearse_only(RunJob(task, settings, RunData(plan), screen, RunFolder(folder)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if not had_root:
            root.rmdir()
    return plan


def search_rate(settings: Settings, screen: Screen, **bounds: Any) -> LearningRateCurve:
    """Return the learning-rate curve of a run, and leave nothing behind; `bounds` are those of `Search`."""
    task = get_task(settings.args.task)
    plan = check_files(task, settings, screen)
    from loopwright.runs.auto.learning_rate import Search
    from loopwright.runs.job import RunJob
    from loopwright.runs.train import find_rate_only

    return find_rate_only(RunJob(task, settings, RunData(plan), screen), Search(**bounds))


def demo_settings(
    task: Task, given: Sequence[str] | Mapping[str, Any], screen: Screen, variant: str | None = None
) -> Settings:
    """Write the data of a task's demo into the runs folder, and return its settings, which `given` overrides."""
    from loopwright.demos import find_minilm, write_demo

    if variant is not None and variant not in task.demo_variants:
        what, fix = f"the demo of {task.name} has no variant {variant!r}", f"lw demo {task.name}"
        raise InputError("args.value", what, saw=[f"its variants: {', '.join(task.demo_variants) or 'none'}"], fix=fix)
    task.check_installed()
    folder = runs_root() / "demo-data" / (task.name if variant is None else f"{task.name}-{variant}")
    screen.clock.import_modules("torch")
    import_module("loopwright.runs.train")  # needed soon, and not a part of making the data
    screen.clock.lap("import")
    write_demo(task.name, folder, variant=variant)
    screen.clock.lap("demo data")
    flags = {"data": folder, **task.demo, **({} if variant is None else task.demo_variants[variant])}
    if task.demo_first and not any(str(name).startswith(("model", "--model")) for name in given):
        flags["model"] = _train_first(task, folder, screen)
    minilm = find_minilm() if task.demo_model == "minilm" else None
    if minilm is not None and minilm.folder is not None:
        flags["model"] = minilm.folder
    elif minilm is not None:
        screen.print(f"{minilm.problem}: a small model from scratch is trained instead")
        flags = {name: value for name, value in flags.items() if name != "freeze"}
    return settle(task, given, base=flags)


def _train_first(task: Task, folder: Path, screen: Screen) -> Path:
    """Train the model that a demo starts from, in a run of its own, and return its folder."""
    first = get_task(task.demo_model)
    flags = {**task.demo_first, "data": folder / task.demo_first["data"]}
    screen.print(f"first, a small model is trained for this demo: {first.name}, {flags['max_steps']} updates")
    run = start(settle(first, {}, base=flags), Screen(is_quiet=True), word=first.name).run
    result = run.read_result()
    score = result.get("metrics", {}).get(result.get("metric"))
    screen.print(f"it has reached {result.get('metric')} {score:.4g} -> {run.path}")
    return run.path
