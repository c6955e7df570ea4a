"""The boundary between two updates: count the update, then log, evaluate, save or stop, as requested.

Several processes first agree on the requests, so that all of them serve the same ones.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from loopwright.back_reference import BackReference
from loopwright.data import Window
from loopwright.engine.processes import gather_objects
from loopwright.errors import StopTrainingError
from loopwright.progress import TRAINED, StopKind, StopReason
from loopwright.stepping.eager import is_foreign

if TYPE_CHECKING:
    from loopwright.training.run import TrainingRun

# Called between the backward pass that shares the gradients and the end of an update.
LATE_HOOKS = ("backward_step", "optimizer_step", "scheduler_step", "optimizer_zero_grad")
LATE_EVENTS = ("on_before_optimizer_step", "on_optimizer_step_end", "on_update_end")
# Called between two epochs, of a trainer; the events of callbacks begin with on_.
_BETWEEN = ("train_epoch", "eval_epoch", "eval_step", "evaluation_run")
_EPOCH_HOOKS = (f"{part}_{place}" for part in _BETWEEN for place in ("start", "end"))
EPOCH_HOOKS = (*_EPOCH_HOOKS, "_run_train_epoch", "_run_eval_epoch", "training_run_epoch_end")


class Boundary:
    """Serves the requests of a run, and knows when it is complete."""

    run = BackReference["TrainingRun"]()

    def __init__(self, run: TrainingRun) -> None:
        self.run = run
        self._stop: StopReason | None = None  # being served
        self.rules: dict[int, dict[str, str]] = {}  # as the run began, by the id of the callback or trainer

    def decision(self) -> StopReason | None:
        """Return why the run ends by its own rules, if it does; a signal or a stop file interrupts it instead."""
        reason = self.run.stop_reason or self._stop or self.run.requests.stop
        is_ours = reason is not None and reason.kind not in (StopKind.FILE, StopKind.SIGNAL)
        return reason if is_ours and self.run.signals.received is None else None

    def deciders(self) -> list[Any]:
        """Return who may stop the run, its callbacks and its trainer; first the callback whose event runs, if any."""
        trainer = self.run.trainer
        return [trainer.callback_handler.calling or trainer, *trainer.callback_handler, trainer]

    def stay_ended(self, reason: StopReason) -> None:
        """End a resumed run at once: it had ended by its own rules."""
        raise StopTrainingError(reason)

    def begin(self) -> None:
        """Called once, when the run is ready for its first update."""

    def after_update(self, window: Window) -> None:
        run = self.run
        run.progress.advance(window.num_batches, window.samples)
        run.micro_batch_step.commit(window)
        run.is_in_window = run.is_torn = False  # from here on it can be saved
        run.trainer.call_event("on_update_end")
        self.request_due()
        self.serve()

    def request_due(self) -> None:
        run, settings, update = self.run, self.run.settings, self.run.progress.update
        if update % settings.log_every == 0:
            run.requests.log = True
        if run.eval_loader is not None and settings.evaluate_every.is_due(update, "update"):
            run.requests.evaluate = True
        has_folder = settings.checkpoints is not None
        if has_folder:
            run.logbook.record.beat()
            run.checkpoints.request_due(update)
        if (has_folder or run.signals.received is not None) and not run.engine.agreement.is_begun:
            self.heed_signals()

    def serve(self) -> None:
        """Serve the requests: log, evaluate, save, stop."""
        run, requests = self.run, self.run.requests
        if run.engine.is_distributed:
            self._agree()
        elif not requests.any():
            return
        stop, requests.stop = requests.stop, None
        self._stop = stop
        if requests.log:
            with run.logbook.spending(None):
                run.logbook.log()
        if requests.evaluate:
            requests.evaluate = False
            with run.logbook.spending("evaluation"):
                run.trainer._run_eval_epoch(run.eval_loader, is_intermediate=True)
            if stop is None and not run.engine.is_distributed:  # several processes agree a little later
                self.heed_signals()  # of a signal that came meanwhile
                stop, requests.stop = requests.stop, None
        run.checkpoints.serve()
        if stop is not None:
            raise StopTrainingError(stop)

    def serve_stop(self) -> None:
        """Stop if requested. An epoch that the limit cut short is reported first, or a resume would report it twice."""
        if self.has_reached_limit() and not self.run.epoch_is_whole:
            return
        self.heed_signals()
        requests = self.run.requests
        self._stop_with_others(*self.run.engine.agreement.largest(*self._stop_requests()))
        reason, requests.stop = requests.stop, None
        if reason is not None:
            raise StopTrainingError(reason)

    def during_evaluation(self) -> None:
        """Called before every evaluation batch: a signal or `lw stop` interrupts an evaluation that can be repeated."""
        run = self.run
        run.logbook.record.beat()
        is_whole_epoch = run.is_running and run.progress.stage == TRAINED and run.epoch_is_whole
        if not is_whole_epoch or run.trainer.run_history.metric_name_prefix:
            return
        agreement = run.engine.agreement
        is_requested = run.signals.received is not None or run.logbook.record.is_asked_to_stop()
        if run.engine.is_distributed:
            # The answer to the batch before has arrived by now: nobody waits.
            is_agreed = agreement.is_begun and bool(agreement.end()[0])
            agreement.begin(is_requested)
            is_requested = is_agreed
        if is_requested:
            self.serve_stop()

    def has_reached_limit(self) -> bool:
        limit = self.run.settings.max_num_train_steps
        return limit is not None and self.run.progress.update >= limit

    def is_complete(self) -> bool:
        return self.has_reached_limit() or self.run.progress.epoch >= self.run.settings.num_epochs

    def is_over(self) -> bool:
        """Whether nothing is left, not even to report an epoch that a limit cut short before the run was saved."""
        progress = self.run.progress
        is_reported = progress.batch == 0 or progress.reported == progress.update
        is_past_end: bool = progress.epoch >= self.run.settings.num_epochs
        return is_past_end or (self.has_reached_limit() and is_reported)

    def num_epochs(self, num_updates: int | None) -> int:
        """Return the epochs that the run begins, if each has this many updates (None: unknown).

        0 if code from outside runs between epochs: what it changes in the data must not have been read before.
        """
        run, most, limit = self.run, self.run.settings.num_epochs, self.run.settings.max_num_train_steps
        libraries = ("loopwright", "transformers")  # whose callbacks change no data
        for each, name in self.between_epochs():
            if name in getattr(each, "__dict__", ()) or is_foreign(type(each), name, libraries):
                return 0
        if limit is None or not num_updates:
            return most
        left = limit - run.logbook.first_update_of_epoch + 1
        return min(most, run.progress.epoch - (-left // num_updates))

    def between_epochs(self) -> list[tuple[Any, str]]:
        """Return every object that is called between epochs, each with the name of a method."""
        callbacks = [(each, f"on_{hook}") for each in self.run.trainer.callback_handler for hook in EPOCH_HOOKS]
        return [*((self.run.trainer, hook) for hook in EPOCH_HOOKS), *callbacks]

    def ends_epoch(self, is_at_end: bool) -> bool:
        """Whether the current epoch counts as finished, even if some of its data is left."""
        return is_at_end

    def evaluation_is_due(self) -> bool:
        settings, epoch = self.run.settings, self.run.progress.epoch + 1
        every = settings.evaluate_every
        is_last = epoch >= settings.num_epochs or self.has_reached_limit()
        is_due = every.unit == "update" or every.is_due(epoch, "epoch") or is_last
        return self.run.eval_loader is not None and is_due

    def heed_signals(self) -> None:
        """Turn a signal, or a stop file in the run folder, into a request to stop."""
        run = self.run
        if run.is_ending:
            return
        if run.signals.received is not None:
            text = f"Received {run.signals.received.name}: stopping gracefully"
            run.trainer.request_stop(StopReason(text, StopKind.SIGNAL))
        elif run.logbook.record.is_asked_to_stop():
            text = "Found a stop file in the run folder: stopping gracefully"
            run.trainer.request_stop(StopReason(text, StopKind.FILE))

    def plan_agreement(self) -> None:
        """Decide when the processes agree on requests; called when an epoch begins.

        A message sent before gradients are shared has arrived when they are, and costs no waiting. But then no single
        process may request anything later in the update; otherwise they agree when it is over.
        """
        engine = self.run.engine
        if not engine.is_distributed:
            return
        is_late = engine.agreement.largest(bool(self.late_requesters()))[0]
        engine.before_sharing = None if is_late else self._begin_to_agree
        if not is_late:
            engine.agreement.prepare()

    def _begin_to_agree(self) -> None:
        self.heed_signals()
        self.run.engine.agreement.begin(*self.own_requests())

    def _agree(self) -> None:
        """Make the requests of all processes the same: all serve what any of them requests."""
        requests, agreement = self.run.requests, self.run.engine.agreement
        agreed = agreement.end() if agreement.is_begun else agreement.largest(*self.own_requests())
        log, evaluate, saves, *stop = agreed[:5]
        # Anything requested since the agreement began was requested by all processes.
        requests.log, requests.evaluate = requests.log or bool(log), requests.evaluate or bool(evaluate)
        self._stop_with_others(*stop)
        self.take_over(agreed[5:])
        if saves:
            everyone = [save for one in gather_objects(requests.saves) for save in one]
            requests.saves = list({path: (path, metadata) for path, metadata in reversed(everyone)}.values())[::-1]

    def own_requests(self) -> tuple[int, ...]:
        """Return this process's requests as integers; the largest over all processes holds."""
        requests = self.run.requests
        return requests.log, requests.evaluate, len(requests.saves), *self._stop_requests()

    def take_over(self, agreed: list[int]) -> None:
        """Take the agreed values of what a subclass has added to `own_requests`."""

    def late_requesters(self) -> list[str]:
        """Return the names of whatever may request something on one process alone after gradients are shared."""
        trainer, policy = self.run.trainer, self.run.settings.checkpoints
        clocks = [] if policy is None else ["every_seconds", "spare_seconds"]
        found = [name for name in clocks if getattr(policy, name) is not None]
        found += [name for name in LATE_HOOKS if is_foreign(type(trainer), name)]
        for callback in trainer.callback_handler:
            found += [f"{type(callback).__name__}.{name}" for name in LATE_EVENTS if requests_alone(callback, name)]
        return found

    def _stop_requests(self) -> tuple[bool, int]:
        return self.run.requests.stop is not None, self.run.signals.received or 0

    def _stop_with_others(self, is_requested: int, number: int) -> None:
        """Take over a stop that any process requested, and the signal behind it."""
        signals = self.run.signals
        if number and signals.received is None:
            signals.received = signal.Signals(number)  # raised at the end of the run, on all of them
        if is_requested:
            self.run.trainer.request_stop(StopReason("Stopped by another process", StopKind.OTHER_PROCESS))


def requests_alone(callback: Any, event: str) -> bool:
    """Whether a callback may request something at an event on one process alone: its class does not rule it out."""
    if event in getattr(callback, "__dict__", ()):
        return True
    owner = next((each for each in type(callback).__mro__ if event in vars(each)), None)
    return owner is not None and owner.__name__ != "TrainerCallback" and not vars(owner).get("asks_alike", False)
