"""Progress: all the state the loop itself has. Requests: what callbacks asked of it. RunState: its flags."""

from __future__ import annotations

import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# How far an epoch is. A state saved by an epoch-end event knows by it what a resumed run must not do twice.
TRAINING, TRAINED, EVALUATED, FINISHED = range(4)


@dataclass(slots=True)
class Progress:
    """Where a run stands, always at an update boundary.

    Attributes:
        epoch: epochs finished.
        update: optimizer updates finished, over the whole run.
        samples: position in the current epoch: samples that its finished updates consumed, over
            all processes.
        batch: micro-batches of the current epoch consumed by this process.
        total_batches: micro-batches consumed by this process over the whole run.
        reported: the update after which an epoch was last reported, whole or cut short by a limit.
        stage: of the current epoch: TRAINING, TRAINED (all of it), EVALUATED or FINISHED.
    """

    epoch: int = 0
    update: int = 0
    samples: int = 0
    batch: int = 0
    total_batches: int = 0
    reported: int = 0
    stage: int = TRAINING

    def advance(self, batches: int, samples: int) -> None:
        """Count one finished update of so many micro-batches (here) and samples (everywhere)."""
        self.update += 1
        self.samples += samples
        self.batch += batches
        self.total_batches += batches

    def end_epoch(self) -> None:
        """Count the epoch and go back to position 0."""
        self.epoch += 1
        self.samples = 0
        self.batch = 0
        self.stage = TRAINING

    def state_dict(self) -> dict[str, int]:
        """The integers, by name."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        for name in self.state_dict():
            setattr(self, name, int(state[name]))


@dataclass(slots=True)
class Parts:
    """Into how many parts batches are cut since memory ran out; saved with a run, which goes on in the same parts.

    Attributes:
        train: of a micro-batch.
        evaluation: of an evaluation batch.
    """

    train: int = 1
    evaluation: int = 1


@dataclass(slots=True)
class Requests:
    """What was asked of the loop, to be served at the next update boundary.

    Attributes:
        log: write a log.
        evaluate: run an intermediate evaluation.
        load: a checkpoint file to load when the run is over.
        saves: folders to save the training state to, each with its metadata.
        stop: end the run, for this reason.
    """

    log: bool = False
    evaluate: bool = False
    load: Path | None = None
    saves: list[tuple[Path, dict[str, Any]]] = field(default_factory=list)
    stop: str | None = None

    def any(self) -> bool:
        """Whether anything is asked for."""
        return bool(self.log or self.evaluate or self.saves or self.stop is not None)


@dataclass(slots=True)
class RunState:
    """What the loop remembers while a run lasts; none of it decides a number.

    Attributes:
        first_epoch: the history's epoch when the run began, before any resume.
        first_update_of_epoch: number of the current epoch's first update.
        piece_index: of the current micro-batch within its update.
        eval_batch: index of the current batch within its evaluation, however many parts it is run in.
        is_first_batch: the next batch output is still to be checked.
        epoch_is_whole: every update of the current epoch is done.
        is_running: between the first and the last event of the run.
        has_loaded: at the end of the run another model was loaded, such as the best one.
        is_ending: what is saved now is the last, and is waited for.
        run_id: names the run in its checkpoints, over all processes that continue it.
        is_in_window: some micro-batches of an update have run, and it is not finished.
        update_is_torn: the weights are ahead of the progress; nothing may be saved now.
        skipped_in_a_row: updates just before this one that were left out, their loss not being finite.
        stop_reason: why the run was stopped, or None.
        resumed_from: the checkpoint it continued, or None.
        is_changed: it was continued with other settings or other data.
        loaded: everything else that checkpoint held, or None.
    """

    first_epoch: int = 1
    first_update_of_epoch: int = 1
    piece_index: int = 0
    eval_batch: int = 0
    is_first_batch: bool = True
    epoch_is_whole: bool = False
    is_running: bool = False
    has_loaded: bool = False
    is_ending: bool = False
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    is_in_window: bool = False
    update_is_torn: bool = False
    skipped_in_a_row: int = 0
    stop_reason: str | None = None
    resumed_from: Path | None = None
    is_changed: bool = False
    loaded: dict[str, Any] | None = None
