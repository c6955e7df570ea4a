"""Continuing a saved run: which checkpoint, whether it is this run, and what has changed since it was written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from loopwright.checkpoint import Checkpointing, store
from loopwright.checkpoint.atomic_replace import restore_moved
from loopwright.checkpoint.fingerprint import EXACT, TIERS, Change, differences, tier
from loopwright.checkpoint.state_by_name import parameter_names
from loopwright.data import Loader
from loopwright.engine.engine import check_reduction
from loopwright.engine.processes import gather_objects, world_process_zero_only
from loopwright.errors import CheckpointError, ConfigError, ConfigTypeError, DataError
from loopwright.progress import Parts, StopKind, StopReason
from loopwright.settings import RunSettings
from loopwright.stepping.recordings import Recordings
from loopwright.training.hyper_parameters import apply_changes, begin_schedule

if TYPE_CHECKING:
    from loopwright.training.run import TrainingRun

Notify = Callable[..., None]  # Trainer.notify

_SETTLED = "gradient_accumulation_steps"  # follows from the number of processes, and was reported when it was settled
LENGTHS = ("num_epochs", "max_num_train_steps")  # a run that is made longer is still the same run


def find_resume_path(resume_from: str | Path | None, checkpoints: Checkpointing | None, notify: Notify) -> Path | None:
    """Return the checkpoint to continue from, or None for a fresh start.

    Raises:
        ConfigError: "auto" without checkpoints, a path that does not exist, or one of another run than the
            checkpoints in the folder to save to.
        CheckpointError: there are checkpoints, but none can be trusted.
    """
    if resume_from is None:
        if checkpoints is not None and store.has_checkpoints(checkpoints.directory):
            raise ConfigError(
                f'{checkpoints.directory} holds checkpoints of an earlier run. Resume it with resume_from="auto", '
                "or choose another folder for a new run."
            )
        return None
    if not isinstance(resume_from, (str, PathLike)):
        raise ConfigTypeError(
            f'resume_from must be the folder of a saved training state, or "auto" for the newest of `checkpoints`, got '
            f"{resume_from!r}"
        )
    if str(resume_from) == "auto":
        if checkpoints is None:
            raise ConfigError('resume_from="auto" needs checkpoints=Checkpointing(directory, ...) to look in')
        folder = Path(checkpoints.directory)
    else:
        folder = Path(resume_from)
        restore_moved(folder)
        if not folder.is_dir():
            raise ConfigError(
                f"resume_from={str(resume_from)!r} is not a folder: pass one that holds a saved training state, or "
                '"auto" to take the newest of `checkpoints` if there is one'
            )
        if (folder / store.MANIFEST).exists():
            _check_same_run(folder, checkpoints)
            return folder
    found, problems = store.find_newest(folder, quarantine=str(resume_from) == "auto")
    for problem in problems:
        notify("checkpoint.passed_over", f"Skipping a bad checkpoint: {problem}", problem=problem)
    if found is None and str(resume_from) != "auto":
        raise ConfigError(
            f"resume_from={str(resume_from)!r} holds no checkpoint (no {store.MANIFEST} in it or below it)"
        )
    if found is not None:
        _check_same_run(found, checkpoints)
    return found


def stored_window(folder: str | Path) -> int | None:
    """Return the micro-batches per update, over all processes, of all checkpoints of a saved run; None if unknown."""
    path = Path(folder)
    for each in (path, *store.checkpoint_folders(path)):
        try:
            about = store.read_manifest(each).get("about", {})
        except CheckpointError:
            continue  # a bad one is dealt with where it is read
        processes = about.get("fingerprint", {}).get("processes")
        accumulation = about.get("settings", {}).get("gradient_accumulation_steps")
        if isinstance(processes, int) and isinstance(accumulation, int):
            return processes * accumulation
    return None


def leave_newer_behind(run: TrainingRun, folder: Path, update: int) -> None:
    """Set aside the checkpoints newer than the one to resume from: they belong to an abandoned continuation."""
    policy = run.settings.checkpoints
    for path in [] if policy is None else run.checkpoints.set_aside_newer(policy.directory, update):
        text = f"Set aside {path.name}: the run resumes from {folder.name}"
        run.trainer.notify("checkpoint.set_aside", text, path=path, resumed_from=folder)


def _check_same_run(folder: Path, checkpoints: Checkpointing | None) -> None:
    """Raise a ConfigError for a run among the checkpoints of another: they could not be told apart afterwards."""
    run_id = _run_of(folder)
    for path in store.checkpoint_folders(checkpoints.directory) if checkpoints is not None else ():
        if _run_of(path) not in (run_id, None):
            raise ConfigError(
                f"{folder} belongs to another run than the checkpoints in {path.parent}. Save the resumed run to a "
                "separate folder."
            )


def _run_of(folder: Path) -> str | None:
    try:
        return str(store.read_manifest(folder)["identity"]["run_id"])
    except CheckpointError:
        return None  # a bad one is dealt with where it is read


def settings_of(settings: RunSettings, loader: Loader) -> dict[str, Any]:
    """Return the numbers of a run that decide its result, as its checkpoints keep them."""
    names = (*LENGTHS, _SETTLED, "gradient_clip_value", "gradient_clip_norm", "nan", "bad_samples")
    return {**{name: getattr(settings, name) for name in names}, "batch_size": getattr(loader, "batch_size", None)}


def sizes_of(**loaders: Loader | None) -> dict[str, int | None]:
    """Return how many samples each of these loaders' datasets has; None where that is not known."""
    datasets = {name: getattr(loader, "dataset", None) for name, loader in loaders.items()}
    return {name: len(dataset) if isinstance(dataset, Sized) else None for name, dataset in datasets.items()}


def check_sizes(saved: Mapping[str, int | None], current: Mapping[str, int | None]) -> None:
    """Raise a DataError for a dataset of another length than the run was started with."""
    for name, size in current.items():
        before = saved.get(name)
        if None not in (before, size) and before != size:
            raise DataError(
                f"{name} has {size} samples, but the run was started with {before}: the order of samples would change",
                code="resume.data",
                saw=["in Python: Checkpointing(..., allow_changed_data=True)"],
                fix="--allow_changed_data   or   put the data back",
            )


def changed_types(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[Change]:
    """Return the change of the first weight whose dtype differs from the saved one, if any."""
    names = [
        name
        for name, weight in current.items()
        if isinstance(weight, torch.Tensor) and name in saved and saved[name].dtype != weight.dtype
    ]
    if not names:
        return []
    more = f" and of {len(names) - 1} more" if len(names) > 1 else ""
    return [Change(f"type of {names[0]}{more}", saved[names[0]].dtype, current[names[0]].dtype)]


def in_stored_windows(run: TrainingRun, resume_path: Path | None) -> RunSettings:
    """Return the settings with the accumulation that keeps the number of micro-batches per update of the saved run.

    A ConfigError is raised if the current processes cannot share that many evenly, or not exactly.
    """
    settings, trainer = run.settings, run.trainer
    is_exact = settings.reduction == "exact"
    check_reduction(settings.reduction, trainer.model)
    processes, given = run.engine.num_processes, settings.gradient_accumulation_steps
    window = (None if resume_path is None else stored_window(resume_path)) or processes * given
    # A part of the tree that is summed exactly has a power of two of leaves, unless it is the whole tree.
    allowed = [
        number
        for number in range(1, window + 1)
        if window % number == 0 and (not is_exact or number == 1 or (window // number).bit_count() == 1)
    ]
    if processes not in allowed:
        why = " so that each has a power of two of them, as an exact sum needs" if is_exact else ""
        raise ConfigError(
            f"an update of this run has {window} micro-batches, which {processes} processes cannot share evenly"
            f"{why}. Start it on another number of processes: {', '.join(map(str, allowed))}."
        )
    if window // processes != given:
        text = (
            f"gradient_accumulation_steps is {window // processes} on {processes} processes, not {given}: "
            f"an update of this run has {window} micro-batches"
        )
        trainer.notify("resume.accumulation", text, given=given, used=window // processes)
    return replace(settings, gradient_accumulation_steps=window // processes)


def resume(run: TrainingRun, path: Path) -> None:
    """Resume a saved run: check that it is this one, restore it, and report what has changed since."""
    checkpoint = run.checkpoints.read(path)
    if checkpoint.about.get("model_only"):
        text = f"{path} cannot be resumed: save_only_model=True saved it without optimizer, schedule and position"
        raise CheckpointError(f"{text}. Load its weights and start a new run, or resume from a whole checkpoint.")
    if "run" not in checkpoint.state:
        raise CheckpointError(f"{path} was not written by a Trainer: it does not contain the position of a run")
    with store.refusing_damage(path):
        _restore(run, path, checkpoint)


def _restore(run: TrainingRun, path: Path, checkpoint: store.Checkpoint) -> None:
    trainer, checkpoints = run.trainer, run.checkpoints
    _check_continuity(run, path, checkpoint.about)
    types = changed_types(checkpoint.model, run.bare_model().state_dict())
    checkpoints.announce(path, types, types)
    groups = [dict(group) for group in getattr(run.bare_optimizer(), "param_groups", ())]
    checkpoints.restore(checkpoint, path)
    state, saved = checkpoint.state, checkpoint.state["run"]
    checkpoints.resumed_from = path
    schedule = state["scheduler"]
    if hasattr(trainer.scheduler, "resume_state_dict") and (schedule or {}).get("is_continuation_from_checkpoint"):
        # Such a scheduler starts over when it is given a state, unless it is told that this is the same run.
        trainer.scheduler.resume_state_dict(schedule)
    for line in _left_out(run, state):
        trainer.notify("resume.left_out", line)
    _apply_settings(run, path, state)
    if trainer.scheduler is not None and state["scheduler_class"] == type(None).__name__:
        name = type(trainer.scheduler).__name__
        trainer.notify("resume.scheduler", f"Starting a {name}: the saved run had no scheduler", name=name)
        begin_schedule(run.bare_optimizer(), groups)
    _take_position(run, saved)
    _keep_ended(run, saved.get("stop"))
    trainer.run_history.load_state_dict(state["history"])
    trainer.run_history._set_epoch(run.first_epoch + run.progress.epoch)
    world_process_zero_only(leave_newer_behind)(run, path, checkpoint.update)
    epoch = run.epoch
    trainer.notify("resume.done", f"Resumed training state from {path} (epoch {epoch})", path=path, epoch=epoch)


def _take_position(run: TrainingRun, saved: dict[str, Any]) -> None:
    run.progress.load_state_dict(saved["progress"])
    run.losses.load_process_states(saved["losses"])
    run.first_epoch, run.seed, run.run_id = saved["first_epoch"], saved["seed"], saved["run_id"]
    run.logbook.skipped_in_a_row = saved["skipped_in_a_row"]
    run.memory.parts = _restored_parts(run, saved.get("parts", {}))  # older states have none
    run.recordings = Recordings.restored(saved.get("graphs"))
    run.gradient_norm = saved["gradient_norm"]  # of the last update: the log at the end of an epoch has it
    for loader in (run.train_loader, run.eval_loader):
        if loader is not None:
            loader.seed = run.seed
    run.train_loader.skipped = dict(saved["skipped_samples"])


def _keep_ended(run: TrainingRun, stop: list[Any] | None) -> None:
    """Keep a run ended that ended by its own rules, unless the user has changed one of them, or another setting."""
    if stop is None:
        return
    text, kind, rule = stop
    is_kept = any(all(each.get(name) in rule[name] for name in rule) for each in run.boundary.rules.values())
    # Callbacks may differ from process to process: rank 0 has saved the decision.
    if gather_objects(not run.checkpoints.changes and is_kept)[0]:
        run.checkpoints.ended = StopReason(text, StopKind(kind))
        run.checkpoints.ended.rule = rule
        return
    run.trainer.notify("resume.ended", f"Training on, although the run had ended: {text}", reason=text)


def _restored_parts(run: TrainingRun, saved: dict[str, int]) -> Parts:
    """Return the saved number of parts; whole batches where parts would be refused."""
    parts = Parts(**saved)
    is_exact = run.settings.reduction == "exact"
    if parts == Parts() or not (is_exact or run.engine.is_distributed):
        return parts
    reason = 'reduction="exact" does not allow them' if is_exact else "several processes take part now"
    text = f"Resuming with whole batches, although they were split after memory ran out: {reason}"
    run.trainer.notify("resume.parts", text, reason=reason)
    run.checkpoints.metadata["tier"] = max(run.checkpoints.metadata["tier"], "T2")
    return Parts()


def _check_continuity(run: TrainingRun, path: Path, saved: dict[str, Any]) -> None:
    """Raise a DataError for other data, report all other changes, and determine the remaining guarantee."""
    policy, metadata = run.settings.checkpoints, run.checkpoints.metadata
    if policy is None or not policy.allow_changed_data:
        check_sizes(saved["data"], metadata["data"])
    now = tier(saved["fingerprint"], metadata["fingerprint"], is_counted=metadata["tier"] == "T3")
    reason = saved.get("tier_reason", "nothing; the data source has no random access")
    metadata |= {"tier": max(now, saved["tier"]), "tier_reason": reason}  # a guarantee lost once does not come back
    # Where the tier has another meaning than usual.
    metadata["guarantee"] = metadata.get("guarantee") or saved.get("guarantee")
    differing = differences(saved["fingerprint"], metadata["fingerprint"])
    if policy is not None and policy.require_exact and metadata["tier"] not in EXACT:
        found = "; ".join(map(str, differing)) or reason
        raise CheckpointError(
            f"{path} cannot be resumed bit-exactly ({metadata['tier']}, {TIERS[metadata['tier']]}), and "
            f"require_exact is set. What differs: {found}."
        )
    for change in differing:
        run.trainer.notify("resume.environment", f"Changed environment since the checkpoint: {change}", change=change)
    changes = differences(saved["settings"], metadata["settings"]) + differences(saved["data"], metadata["data"])
    changes = [change for change in changes if change.name != _SETTLED] + run.checkpoints.own_changes()
    run.checkpoints.announce(path, changes, [change for change in changes if change.name not in LENGTHS])


def _apply_settings(run: TrainingRun, path: Path, state: dict[str, Any]) -> None:
    """Let the current settings of optimizer and scheduler override the saved ones, and report the changes."""
    checkpoints, initial = run.checkpoints, state["run"]["made"]
    if initial is None or checkpoints.initial is None:
        checkpoints.initial = checkpoints.initial or initial
        return
    rates = {group["params"][0]: group.get("lr") for group in state["optimizer"]["param_groups"] if group["params"]}
    names = parameter_names(model=run.bare_model(), loss_func=run.trainer.loss_func)
    changes = apply_changes(run.bare_optimizer(), run.trainer.scheduler, initial, checkpoints.initial, names, rates)
    checkpoints.announce(path, changes, changes)


def _left_out(run: TrainingRun, state: dict[str, Any]) -> Iterator[str]:
    """Yield a message for each part of a saved state that a resumed run does not restore."""
    if state["scheduler"] is not None and run.trainer.scheduler is None:
        yield f"Resuming without the saved {state['scheduler_class']}: no create_scheduler_fn was given"
    if state["run"]["seed"] != run.seed:
        yield f"Resuming with the saved seed {state['run']['seed']}: it determines the order of samples"
    here = Counter(run.trainer.callback_handler.state_names())
    for name, count in (Counter(saved["class"] for saved in state["callbacks"] if saved["state"]) - here).items():
        yield f"Resuming without the saved state of {count} {name}"


def recount_batches(run: TrainingRun, processes_before: int) -> None:
    """Count a resumed run's micro-batches as this process would have run them; rank 0 saved its own count."""
    progress, loader = run.progress, run.train_loader
    share, per_epoch = loader.share, loader.num_batches
    before = share.window // processes_before
    done = -(-progress.batch // before)
    earlier = progress.total_batches - progress.batch
    if before != share.accumulation:
        earlier = earlier * share.accumulation // before if per_epoch is None else progress.epoch * per_epoch
    is_at_end = per_epoch is not None and done >= loader.num_updates
    progress.batch = per_epoch if is_at_end else done * share.accumulation
    progress.total_batches = earlier + progress.batch
