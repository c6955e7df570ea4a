"""When to save, and saving while training continues: one snapshot in flight, errors raised at the next update."""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch

from loopwright.checkpoint import sharded_checkpoint as sharded
from loopwright.checkpoint import store
from loopwright.checkpoint.encoding import encode
from loopwright.checkpoint.files import TOO_LARGE
from loopwright.checkpoint.staging import Staging
from loopwright.checkpoint.state_by_name import untied
from loopwright.engine.memory import is_out_of_memory
from loopwright.errors import CheckpointError, ConfigError, Preempted
from loopwright.failpoints import failpoint
from loopwright.run_folder.files import DamagedFileError, make_folder, read_json, warn_once, write_json
from loopwright.run_folder.lease import LeaseError

_BEST = "best.json"
_MOST_TIME_FOR_SPARES = 0.2  # share of the time in which a spare checkpoint is being written
_EVALUATED = "eval_loss_epoch"  # in the metrics of every run of the Trainer that was evaluated after an epoch
_logger = logging.getLogger("loopwright")
Captured = tuple[Mapping[str, torch.Tensor], dict[str, Any], store.Files]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*-\{update(:0?\d*d)?\}")
_WHOLE = ("every_updates", "every_epochs", "keep_last")
_SECONDS = ("every_seconds", "max_stall_seconds", "spare_seconds")


@dataclass(frozen=True)
class Checkpointing:
    """Where and when a run saves itself; passed to `train(checkpoints=...)`.

    A state is also saved when the run ends. `resume_from="auto"` continues from the newest one.

    Args:
        directory: the folder; each checkpoint is a folder `step-<update>` in it.
        every_updates: save every N updates.
        every_epochs: save after every N epochs.
        every_seconds: save when N seconds have passed since the last save.
        keep_last: how many to keep; the best one and the one resumed from are kept as well.
        keep_best: the metric that decides which checkpoint is best, and "min" or "max"; None keeps no best one. The
            first of equal ones is kept; a third name is of a loss that decides between them.
        asynchronous: write in the background, so that training waits only for a copy in host memory.
        max_stall_seconds: how long training waits for the save before this one; then this one is skipped.
        run_folder: where metrics.jsonl, status.json and the lease are; None is the directory itself.
        allow_changed_data: resume even if the length of the dataset has changed.
        allow_changed_model: resume even if the model is built differently, with other modules or other dropout.
        name: of a checkpoint's folder; `{update}` is replaced by the number of the update.
        is_open: others may add files to a checkpoint's folder; they are never read. Otherwise an unknown file
            invalidates it.
        require_exact: refuse to resume if the result might differ from an uninterrupted run.
        spare_seconds: also save when N seconds have passed since the last save, or five times as long as a save takes.
            Of these checkpoints only the newest two are kept; they do not count as `keep_last`.
    """

    directory: str | Path
    every_updates: int | None = None
    every_epochs: int | None = None
    every_seconds: float | None = None
    keep_last: int = 3
    keep_best: tuple[str, str] | tuple[str, str, str] | None = ("eval_loss_epoch", "min")
    asynchronous: bool = True
    max_stall_seconds: float = 30.0
    run_folder: str | Path | None = None
    allow_changed_data: bool = False
    allow_changed_model: bool = False
    name: str = "step-{update:010d}"
    is_open: bool = False
    require_exact: bool = False
    spare_seconds: float | None = None

    def __post_init__(self) -> None:
        for name in (*_WHOLE, *_SECONDS):
            kind: Any = Integral if name in _WHOLE else Real
            least, what = (1, "a whole number") if name in _WHOLE else (0, "a number")
            value = getattr(self, name)
            is_number = isinstance(value, kind) and not isinstance(value, bool) and value >= least
            if not is_number and not (value is None and name.startswith(("every_", "spare_"))):
                raise ConfigError(f"Checkpointing: {name} must be {what} of at least {least}, got {value!r}")
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                "Checkpointing: name must be letters and digits, a hyphen and the update, such as 'step-{update}' or "
                f"'step-{{update:010d}}', got {self.name!r}"
            )
        if self.keep_best is not None and (
            len(self.keep_best) not in (2, 3) or self.keep_best[1] not in ("min", "max")
        ):
            raise ConfigError(
                'Checkpointing: keep_best must be a metric and "min" or "max", such as ("eval_loss_epoch", "min"), '
                f"got {self.keep_best!r}"
            )

    @property
    def record_folder(self) -> Path:
        """The folder of metrics.jsonl, status.json and the lease."""
        return Path(self.directory if self.run_folder is None else self.run_folder)

    def path(self, update: int) -> Path:
        """Return the folder of the checkpoint written after an update."""
        return Path(self.directory) / self.name.format(update=update)

    @property
    def pattern(self) -> str:
        """The glob pattern that the names of all checkpoints match."""
        return self.name.partition("{")[0] + "*"

    def is_due_after_update(self, update: int) -> bool:
        """Whether to save after this update."""
        return self.every_updates is not None and update % self.every_updates == 0

    def is_due_after_epoch(self, epoch: int) -> bool:
        """Whether to save after this epoch."""
        return self.every_epochs is not None and epoch % self.every_epochs == 0


class Saver:
    """Writes the checkpoints of one run into its folder."""

    def __init__(
        self,
        policy: Checkpointing,
        run_id: str,
        resumed_from: Path | None,
        rank: int = 0,
        num_processes: int = 1,
        is_ours: Callable[[], bool] = lambda: True,
        is_sharded: bool = False,
    ) -> None:
        self.skipped = 0  # saves skipped because the previous one was still being written
        self.refusals: list[str] = []  # why states were not saved or kept; the caller that reports them removes them
        self.last_error: CheckpointError | None = None  # of the last attempt, if it failed
        self.newest: Path | None = None  # the checkpoint committed last
        self._has_reported_no_metric = False
        self.directory = Path(policy.directory)
        self._policy = policy
        self._run_id = run_id
        self._resumed_from = resumed_from
        self._is_ours = is_ours
        # With several processes an error must reach all of them at once, so rank 0 writes while they wait.
        self.is_asynchronous = policy.asynchronous and num_processes == 1
        self._is_writer = rank == 0
        self._is_sharded = is_sharded
        self._staging = Staging() if self.is_asynchronous else None
        self._is_cold = self._staging is not None
        self._never_finite: set[str] = set()
        self._thread: threading.Thread | None = None
        self._outcome: Path | BaseException | str | None = None
        self._committed: list[Path] = []
        self._failures_in_a_row = 0
        self._commits = 0
        self._last_save, self._save_seconds = time.monotonic(), 0.0
        self._is_spare = self._saves_spare = False  # the save that is due, or under way, is by `spare_seconds` alone
        self._position: Mapping[str, Any] | None = None
        self._best = self._read_best()
        if self._is_writer:
            store.clean(policy.directory)
            make_folder(policy.directory)
        self._place = os.stat(self.directory) if self._is_writer else None
        self._take_over_best()

    def _read_best(self) -> dict[str, Any] | None:
        try:
            best: dict[str, Any] = read_json(self.directory / _BEST, {})
        except DamagedFileError:
            return None  # the manifests know it too
        if None in map(best.get, ("checkpoint", "metric", "value")):
            return None
        name, resumed = best["checkpoint"], self._resumed_from
        if (self.directory / name).exists():
            return best
        has_left = any(self.directory.glob(f".superseded-{name}-*"))  # the branch that it belongs to
        if resumed is not None and resumed.parent == self.directory and not has_left:
            what = f"The best checkpoint, {name} ({best['metric']} {best['value']:g}), is missing or damaged"
            self.refusals.append(f"{what}: the best one that is left replaces it")
        return None

    def _take_over_best(self) -> None:
        """Recover the best checkpoint from the manifests if best.json is damaged, or a kill prevented its writing."""
        folder = self._resumed_from
        if folder is None or folder.parent != self.directory or self._policy.keep_best is None:
            return
        known, (name, _, *losses) = self._best, self._policy.keep_best
        for path in [folder] if known is not None else store.checkpoint_folders(self.directory):
            with suppress(CheckpointError):  # a damaged one is never the best
                note = store.read_manifest(path).get("about", {}).get("best")
                if note is not None and note.get("checkpoint") == path.name and note.get("metric") == name:
                    metrics = {name: note.get("value"), **dict.fromkeys(losses, note.get("loss"))}
                    self._best = self.best_with(metrics, path) or self._best
        if self._best is not known and self._is_writer:
            write_json(self.directory / _BEST, self._best, is_sealed=True)

    def path(self, update: int) -> Path:
        """Return the folder of the checkpoint of an update."""
        return self._policy.path(update)

    @staticmethod
    def update_of(path: Path) -> int:
        """Return the update of a checkpoint that `path` named."""
        return int(re.search(r"\d+$", path.name)[0])  # type: ignore[index]

    def check_space(self, num_bytes: int, report: Callable[[str], None]) -> None:
        """Warn if the disk cannot hold all checkpoints to keep plus the one being written, each `num_bytes` or more."""
        free = shutil.disk_usage(self.directory).free
        needed = (self._policy.keep_last + 1) * num_bytes
        if free < needed:
            report(
                f"{self.directory} has {free:,} bytes free; {self._policy.keep_last} checkpoints and the one being "
                f"written take {needed:,} or more. Free some space, or lower keep_last."
            )

    def expect(self, model: Mapping[str, torch.Tensor]) -> None:
        """Note tensors that are not finite before the first update, such as a mask of -inf; they are saved anyway."""
        if not self._is_sharded:  # for a split model the loop checks the trained weights on every process
            with torch.no_grad():
                self._never_finite = store.nonfinite_weights(model)

    def is_due_after_update(self, update: int) -> bool:
        """Whether to save after this update: by its number, or by the clock."""
        seconds = self._policy.every_seconds
        passed, spare = time.monotonic() - self._last_save, self._policy.spare_seconds
        is_due = (seconds is not None and passed >= seconds) or self._policy.is_due_after_update(update)
        is_time = spare is not None and passed >= max(spare, self._save_seconds / _MOST_TIME_FOR_SPARES)
        self._is_spare = is_time and not is_due
        return is_due or self._is_spare

    def is_due_after_epoch(self, epoch: int, metrics: Mapping[str, Any]) -> bool:
        """Whether to save after this epoch: by its number, or because it is the best so far."""
        wanted = None if self._policy.keep_best is None else self._policy.keep_best[0]
        if wanted is not None and wanted not in metrics and _EVALUATED in metrics and not self._has_reported_no_metric:
            self._has_reported_no_metric = True
            self.refusals.append(
                f"keep_best: the evaluation recorded no {wanted}, so no checkpoint is kept as the best one; there are "
                f"{', '.join(metrics)}"
            )
        is_due = self.best_with(metrics, self.directory) is not None or self._policy.is_due_after_epoch(epoch)
        self._is_spare = self._is_spare and not is_due
        return is_due

    def warm_up(self, capture: Callable[[], Captured]) -> None:
        """Reserve memory for snapshots in the background, once the first update has created the optimizer's state."""
        staging = self._staging
        if not self._is_cold or staging is None or self._thread is not None:
            return
        self._is_cold = False
        try:
            model, state, _ = capture()
        except (OSError, CheckpointError):
            return  # the save itself will raise
        tensors: dict[str, torch.Tensor] = {}
        encode(state, tensors)
        weights, _ = untied(model)

        def job() -> None:
            try:
                staging.reserve("model/", weights)
                staging.reserve("state/", tensors)
            except (MemoryError, RuntimeError) as error:
                self._do_without_copies(error)

        self._start(job, "loopwright-staging")

    def save(
        self,
        capture: Callable[[], Captured],
        update: int,
        metrics: Mapping[str, Any],
        *,
        metadata: Mapping[str, Any] | None = None,
        position: Mapping[str, Any] | None = None,
        must_happen: bool = False,
    ) -> None:
        """Save the state at this update boundary; training waits only for the copy to host memory.

        Args:
            capture: returns the weights, the state and extra files; called only if the save will happen.
            position: the position of the run, for `holds`; None if the state is not the run's alone.
            must_happen: wait for an earlier save without limit, and for this one to be committed.
        """
        if not self.wait(None if must_happen else self._policy.max_stall_seconds):
            self.skipped += 1
            self.refusals.append(
                f"Not saving {self.path(update)}: the save before it is still being written after "
                f"{self._policy.max_stall_seconds:g} s ({self.skipped} left out so far)"
            )
            return
        self._settle()
        begin = self._last_save = time.monotonic()
        self._position, self._saves_spare, self._is_spare = None, self._is_spare and not must_happen, False
        path = self._policy.path(update)
        if self._is_sharded:
            self._save_shards(capture, path, update, metrics, metadata, position)
            return
        try:
            model, state, files = capture()
        except OSError as error:  # the metrics of this update are not on disk yet
            self._outcome = error
            return
        best = self.best_with(metrics, path)
        if not self._is_writer:
            self._best = best or self._best
            return
        try:
            snapshot = store.take_snapshot(model, state, update, staging=self._staging, files=files)
        except (MemoryError, RuntimeError) as error:
            if self._staging is None:
                raise
            self._do_without_copies(error)
            snapshot = store.take_snapshot(model, state, update, files=files)

        def job() -> None:
            try:
                failpoint("writer_start")
                if culprits := store.nonfinite_weights(snapshot.model) - self._never_finite:
                    self._outcome = f"Not saving {path}: a weight is not finite ({min(culprits)})"
                    return
                store.commit(snapshot, path, self._label(metadata, best))
                self._tidy(best)
                self._outcome, self._position = path, position
                self._save_seconds = time.monotonic() - begin
            except (KeyboardInterrupt, Preempted):  # a second signal, while training waits for the save
                raise
            except BaseException as error:  # noqa: BLE001 - a thread's error is raised by the loop, in `poll`
                self._outcome = _outcome(path, error)

        if self.is_asynchronous and not must_happen:
            self._start(job, "loopwright-checkpoint")
        else:
            job()

    def _start(self, job: Callable[[], None], name: str) -> None:
        self._thread = threading.Thread(target=job, name=name, daemon=True)
        self._thread.start()

    def _do_without_copies(self, error: BaseException) -> None:
        """Write directly from the tensors from now on, while training waits: there is no memory for copies."""
        if not is_out_of_memory(error):
            raise error
        self._staging, self.is_asynchronous = None, False
        _logger.warning("there is no host memory for a copy of the state: training waits while it is saved")

    def _save_shards(
        self,
        capture: Callable[[], Captured],
        path: Path,
        update: int,
        metrics: Mapping[str, Any],
        metadata: Mapping[str, Any] | None,
        position: Mapping[str, Any] | None,
    ) -> None:
        """Save together with the other processes; all of them call this, and a failure on one reaches all."""
        outcome: Path | BaseException | str
        try:
            model, state, files = sharded.everywhere(capture)
            snapshot = sharded.take_snapshot(model, state, update, files)
            failpoint("writer_start")
            best = self.best_with(metrics, path)
            sharded.commit(snapshot, path, self._label(metadata, best))
            self._best = best or self._best
            if self._is_writer:
                self._tidy(best)
            outcome, self._position = path, position
        except (CheckpointError, LeaseError, OSError) as error:
            outcome = _outcome(path, error)
        # Rank 0 reports it in `poll`, and the others learn it from there.
        self._outcome = outcome if self._is_writer else None

    def _label(self, metadata: Mapping[str, Any] | None, best: dict[str, Any] | None) -> store.Label:
        values = {**(metadata or {}), **({store.SPARE: True} if self._saves_spare else {})}
        values |= {} if best is None else {"best": best}
        return store.Label(self._run_id, values, self._policy.is_open, self._is_in_place)

    def _is_in_place(self) -> bool:
        """Return whether the run is still ours; raise a LeaseError if the folder of its checkpoints is another one."""
        is_ours, saved = self._is_ours(), self.newest or self._resumed_from
        if saved is not None and saved.parent == self.directory and not saved.exists():
            if self._place is None or (
                self.directory.is_dir() and os.path.samestat(self.directory.stat(), self._place)
            ):
                warn_once(f"the last checkpoint in {self.directory} was removed during the run; saving continues")
                return is_ours
            what = f"{self.directory} was moved, deleted or replaced while a run saved to it"
            lost = f"its last checkpoint was {saved.name}, and the updates since then are lost"
            raise LeaseError(f"{what}; {lost}", code="disk.write", fix="put the folder back and resume the run")
        return is_ours

    def _tidy(self, best: dict[str, Any] | None) -> None:
        """Record the best checkpoint, and remove those beyond the retention limit; called after a commit."""
        if best is not None:
            failpoint("pre_best")
            write_json(self.directory / _BEST, best, is_sealed=True)
            self._best = best
        protected = [] if self._best is None else [self.directory / self._best["checkpoint"]]
        if self._resumed_from is not None and self._commits < 2:
            protected.append(self._resumed_from)
        store.prune(self.directory, self._policy.keep_last, protected, self._policy.pattern)

    def poll(self) -> Path | None:
        """Return a committed checkpoint not reported yet, if any; two failures in a row raise a CheckpointError."""
        if self._thread is None or not self._thread.is_alive():
            self._settle()
        return self._committed.pop(0) if self._committed else None

    def _settle(self) -> None:
        outcome, self._outcome = self._outcome, None
        if isinstance(outcome, Path):
            self.last_error, self._failures_in_a_row = None, 0
            self._commits += 1
            self.newest = outcome
            self._committed.append(outcome)
        elif isinstance(outcome, str):
            self.refusals.append(outcome)
        elif isinstance(outcome, LeaseError):
            raise outcome
        elif outcome is not None:
            self._failures_in_a_row += 1
            is_ours = isinstance(outcome, CheckpointError)
            self.last_error = outcome if is_ours else CheckpointError(f"saving failed: {outcome!r}")  # type: ignore[assignment]
            if self._failures_in_a_row > 1 or not isinstance(outcome, Exception):
                raise CheckpointError(f"saving failed twice in a row: {self.last_error}") from outcome

    def finish(self) -> None:
        """Wait for a save in flight, which `poll` then reports; raise a CheckpointError if it failed."""
        self.wait()
        self._settle()
        if self._is_writer:
            self._is_in_place()
        if self.last_error is not None:
            raise self.last_error

    def holds(self, position: Mapping[str, Any]) -> bool:
        """Whether the last save was made at this position and committed; waits for a save in flight."""
        self.wait()
        return self._position == position

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the background thread, up to `seconds`; return whether it has ended. `poll` reports its result."""
        if self._thread is not None:
            self._thread.join(seconds)
            return not self._thread.is_alive()
        return True

    def best_with(self, metrics: Mapping[str, Any], path: Path) -> dict[str, Any] | None:
        """Return the content of best.json if a checkpoint with these metrics were saved; None if it is not the best."""
        if self._policy.keep_best is None:
            return None
        name, direction, *losses = self._policy.keep_best
        value, loss = metrics.get(name), metrics.get(losses[0] if losses else "")
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            return None
        found = {"checkpoint": path.name, "metric": name, "direction": direction, "value": value}
        found |= {"loss": loss} if isinstance(loss, (int, float)) and math.isfinite(loss) else {}
        old, sign = self._best, -1 if direction == "max" else 1
        rank = sign * value, found.get("loss", math.inf)
        return found if old is None or rank < (sign * old["value"], old.get("loss", -math.inf)) else None


def _outcome(path: Path, error: BaseException) -> BaseException | str:
    """Return the error, or a message for a state that is too large: the run continues without that checkpoint."""
    return f"Not saving {path}: {error}" if getattr(error, "code", None) == TOO_LARGE else error
