"""Resume a run in its folder: settings, data, and whether there is anything left to do. No torch before that."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

from loopwright.config.secrets import command_without_secrets
from loopwright.errors import CheckpointError, DataError, InputError
from loopwright.run_folder import RunFolder, write_atomically
from loopwright.run_folder.files import read_bytes
from loopwright.runs.console.screen import Screen
from loopwright.runs.creation import is_half_made
from loopwright.runs.data import ReadingProgress, print_data
from loopwright.runs.kept_config import config_of
from loopwright.runs.ownership import Ownership
from loopwright.runs.settings import Settings, settle
from loopwright.runs.start import DATA_FLAGS, Outcome, print_left_out
from loopwright.sources import DataOptions, DataPlan, check_unchanged
from loopwright.tasks import get_task
from loopwright.tasks.adapters import lora_options
from loopwright.tasks.base import Task
from loopwright.tasks.consent import check_foreign
from loopwright.tasks.data import RunData
from loopwright.tasks.pretrained import CONSENTS

_TOKENIZER_FLAGS = ("vocab_size", "vocabulary_size", "tokenizer_unit", "chat_template")
_ADAPTER_FLAGS = ("lora", "load_in", "lora_rank", "lora_target")
# Of an error: the flags that may have caused it, and what else is a fix.
_CAUSES = {
    "checkpoint.state": (("freeze", "lr_scheduler_type", "model", "optim", "trained_tokens"), ""),
    "resume.data": (("max_eval_samples", "max_train_samples"), "   or   --allow_changed_data"),
}
_DATA_OPTIONS = {*(field.name for field in fields(DataOptions)), "group_column", "class_weights"}


def resume_run(
    folder: RunFolder, changes: Sequence[str] | Mapping[str, Any], screen: Screen, module: Any = None
) -> Outcome:
    """Resume a run in its folder; `changes` override its settings, `module` is the model it was given in Python."""
    if is_half_made(folder.path):
        what = f"{folder.path} has half a run, whose creation was interrupted: there is nothing to resume"
        fix = "start the run again with the command that was interrupted; it removes what is left"
        raise InputError("run.unknown", what, fix=fix)
    with Ownership() as owner:
        owner.take(folder, "start")
        return _resume(folder, changes, screen, module, owner)


def _resume(
    folder: RunFolder, changes: Sequence[str] | Mapping[str, Any], screen: Screen, module: Any, owner: Ownership
) -> Outcome:
    task = get_task(str(folder.metadata["task"]))
    config = config_of(folder)
    settings = replace(settle(task, changes, config), module=module)
    if "output_dir" in settings.given:
        again = "leave out --output_dir"
        raise InputError("args.value", "a run is resumed in its own folder", fix=again, flag="--output_dir")
    if settings.args.seeds > 1:
        again = f"lw train {shlex.quote(str(folder.path))} --seeds {settings.args.seeds}"
        fix = f"leave out --seeds   or   {again}"
        raise InputError("args.value", "a resumed run has a single seed", fix=fix, flag="--seeds")
    check_foreign(settings, links=True)
    screen.attach(folder)
    shown = [f"{name}={value}" for name, value in changes.items()] if isinstance(changes, Mapping) else changes
    screen.print(f"resume {folder.id}  {' '.join(command_without_secrets(shown))}")
    print_left_out(settings, screen)
    if config != folder.config:
        copy = config.parent.relative_to(folder.path)
        screen.remark("note", f"config.yaml was truncated; it is restored from {copy}")
        write_atomically(folder.config, read_bytes(config))
    if settings.training.max_steps > 0 and "num_train_epochs" in settings.given:
        screen.remark("note", f"--max_steps {settings.training.max_steps} sets the length of the run, not --epochs")
    changed = _changed(settings, settle(task, config=config), changes, task)
    with ReadingProgress(screen) as progress:
        plan = _same_plan(task, settings, folder, progress)
    status, updates = folder.status, folder.read_result().get("updates")  # of an earlier end, after a kill
    is_done = status.get("state") == "done" and status.get("update") == updates
    if is_done and not _is_changed(settings, task, folder):
        steps = settings.training.max_steps
        longer = f"--max_steps {2 * steps}" if steps > 0 else f"--epochs {2 * settings.training.num_train_epochs:g}"
        screen.print(f"already done: result.json has the metrics; {longer} trains on")
        return Outcome(folder, "done", None)
    print_data(plan, settings.args, screen)
    screen.clock.import_modules("torch")
    from loopwright.runs.job import RunJob
    from loopwright.runs.train import train

    with _naming(changed):
        return train(RunJob(task, settings, RunData(plan), screen, folder, owner=owner))


@contextmanager
def _naming(changed: Sequence[str]) -> Iterator[None]:
    """Name the changed flag that explains an error about a state or data that does not fit."""
    try:
        yield
    except (CheckpointError, DataError) as error:
        flags, others = _CAUSES.get(error.code or "", ((), ""))
        flag = next((name for name in changed if name in flags), None)
        if flag is not None:
            error.fix = f"leave out --{flag}{others}"
        raise


def _changed(settings: Settings, then: Settings, changes: Collection[str], task: Task) -> list[str]:
    """Return the given flags that differ from the run's; refuse those that it keeps, such as those of its data."""
    before, now = then.values(), settings.values()
    changed = [name for name in sorted(settings.given) if before.get(name) != now.get(name)]
    kept_flags = {*task.kept_flags, "effective_batch"}
    has_other = _adapters(settings.args) != _adapters(then.args)
    for name in changed:
        kept = "tokenizer" if name in _TOKENIZER_FLAGS else name if name in kept_flags else ""
        kept = "adapters" if name in _ADAPTER_FLAGS and has_other else kept
        if not settings.args.allow_changed_data:
            kept = "columns" if name.endswith(("_column", "_columns")) else kept
            kept = "own value" if name in _DATA_OPTIONS else kept
        if kept:
            flag = f"--no_{name}" if f"--no_{name}" in changes else f"--{name}"
            raise InputError(
                "args.value", f"{flag}: a resumed run keeps its {kept}", fix=f"leave out {flag}", flag=flag
            )
    return changed


def _adapters(args: Any) -> tuple[Any, ...]:
    """Return what decides which adapters a model has, and on what weights."""
    options = lora_options(args) if args.lora else None
    return (args.load_in, None) if options is None else (args.load_in, options.r, options.targets, options.dora)


def _is_changed(settings: Settings, task: Task, folder: RunFolder) -> bool:
    """Whether the settings differ from the run's; epochs are ignored if max_steps sets the length."""
    then, now = settle(task, config=folder.config).values(), settings.values()
    ignored = [*CONSENTS, *(["num_train_epochs"] if settings.training.max_steps > 0 else [])]
    return {**then, **dict.fromkeys(ignored)} != {**now, **dict.fromkeys(ignored)}


def _same_plan(task: Task, settings: Settings, folder: RunFolder, progress: ReadingProgress) -> DataPlan:
    """Return the run's plan if its data is unchanged, or a new plan of the changed data if that is allowed."""
    plan = DataPlan.read(folder.data)
    is_changed_allowed = settings.args.allow_changed_data
    if not settings.given & set(DATA_FLAGS) and not is_changed_allowed:
        check_foreign(settings, files=plan.files)
        check_unchanged(plan, progress)
        return plan
    check_foreign(settings, *(getattr(settings.args, name) for name in DATA_FLAGS))
    fresh = task.preflight(settings.args, progress)
    is_same = [file.sha256 for file in fresh.files] == [file.sha256 for file in plan.files]
    if not is_same and not is_changed_allowed:
        raise InputError(
            "resume.data",
            "the given data is not the data that the run began with",
            saw=[f"then: {file.path} {file.sha256[:12]}" for file in plan.files]
            + [f"now:  {file.path} {file.sha256[:12]}" for file in fresh.files],
            fix="--allow_changed_data   or   leave out --data",
        )
    if fresh.labels != plan.labels:
        what, fix = "the labels of the data differ from those of the model", "put the data back, or start a new run"
        raise InputError("resume.data", what, saw=[f"then: {plan.labels}", f"now:  {fresh.labels}"], fix=fix)
    if not is_changed_allowed:
        fresh = replace(plan, files=fresh.files, tables=fresh.tables)  # the run keeps its splits
    write_atomically(folder.data, fresh.to_json())
    return fresh
