"""The logbook of a run: logs, losses that are not finite, throughput, metrics.jsonl, status.json and the lease."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from loopwright.back_reference import BackReference
from loopwright.checkpoint import store
from loopwright.checkpoint.fingerprint import TIERS
from loopwright.data import Window
from loopwright.engine.nested import iter_tensors
from loopwright.engine.processes import local_process_zero_first, world_process_zero_only
from loopwright.errors import Preempted, StopTrainingError
from loopwright.progress import StopKind, StopReason
from loopwright.run_folder import RunRecord
from loopwright.tracking.throughput import Stopwatch, Throughput, peak_flops

if TYPE_CHECKING:
    from loopwright.training.run import TrainingRun

_MOST_SKIPPED_IN_A_ROW = 10


class Logbook:
    """Logs and records a run."""

    run = BackReference["TrainingRun"]()

    def __init__(self, run: TrainingRun) -> None:
        # metrics.jsonl, status.json and the lease; writes nothing for a run without `checkpoints`.
        self.record = RunRecord()
        self.speed: Mapping[str, float] = {}  # between the last two logs (`tracking.throughput`)
        self.stopwatch = Stopwatch()  # the seconds of this process by activity
        self._seconds_before: Mapping[str, float] = {}  # of the processes that this one continues
        self.num_graphed_updates = 0
        self.first_update_of_epoch = 1
        self.skipped_in_a_row = 0
        self.run = run
        self._num_graphed_logged = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Own the run folder while the block runs, and record how the run ended."""
        run, policy = self.run, self.run.settings.checkpoints
        is_here = policy is not None and run.engine.rank == 0
        self.record = RunRecord(policy.record_folder if policy is not None and is_here else None)
        previous = world_process_zero_only(self.record.open)()
        if previous is not None:
            text = f"Taking over from {previous}, which ended without releasing the run"
            run.trainer.notify("run.takeover", text, previous=previous)
        state, error = "failed", None
        message: str | None = None
        try:
            yield
            world_process_zero_only(self.record.is_ours)()  # raises if the folder was moved or deleted
            message = run.stop_reason
            state = "done" if message is None else "stopped"
        except (Preempted, KeyboardInterrupt) as interruption:
            state, message = "preempted", str(interruption) or type(interruption).__name__
            run.checkpoints.report_last()
            raise
        except BaseException as failure:
            error, message = failure, f"{type(failure).__name__}: {failure}"
            run.checkpoints.wait()  # a save in flight is good, and the process may end with the error
            run.checkpoints.report_last()
            raise
        finally:
            place = {**self._position(), "epochs": run.progress.epoch}
            self.record.close(state, message, error, self.seconds_spent(), **place)

    def begin(self) -> None:
        """Begin metrics.jsonl, or cut it back to the checkpoint, and report the guarantee."""
        run, checkpoints = self.run, self.run.checkpoints
        loaded, tier = checkpoints.loaded, checkpoints.metadata["tier"]
        with store.refusing_damage(checkpoints.resumed_from or self.record.folder):
            local_process_zero_first(self.record.begin)(None if loaded is None else loaded["record"])
            self._seconds_before = {} if loaded is None else dict(loaded["record"].get("spent", {}))
        if run.settings.checkpoints is not None or loaded is not None:
            but = ", but for the changes above" if checkpoints.is_changed else ""
            if run.settings.step_mode == "compile":
                but += ". Compiled updates have their own bits: the same on this kind of machine with these versions"
            guarantee = f"{tier}, {checkpoints.metadata.get('guarantee') or TIERS[tier]}{but}"
            run.trainer.notify("resume.guarantee", f"Resume guarantee {guarantee}", tier=tier, guarantee=guarantee)
        source = None if checkpoints.resumed_from is None else checkpoints.resumed_from.name
        self.write("start", run_id=run.run_id, resumed_from=source, tier=tier, seed=run.seed)
        self.update_status(state="running", last_checkpoint=source)

    def _position(self) -> dict[str, int]:
        return {"update": self.run.progress.update, "epoch": self.run.epoch}

    def update_status(self, **fields: Any) -> None:
        """Write where the run is to status.json, and further fields."""
        self.record.set_status(**self._position(), epochs=self.run.progress.epoch, **fields)

    def write(self, event: str, **fields: Any) -> None:
        """Append an event to metrics.jsonl, with the update and the epoch."""
        self.record.write(event, **self._position(), **fields)

    def write_metrics(self, event: str) -> None:
        """Append everything that was recorded in the history since the last time to metrics.jsonl."""
        self.record.write_metrics(event, self.run.trainer.run_history, **self._position())

    def log(self) -> None:
        """Bring the losses since the last log to the host and hand them to the callbacks."""
        run, trainer = self.run, self.run.trainer
        run.requests.log = False
        loss = run.losses.mean_since_last_log()
        if loss is None:
            return
        logs = {**self._position(), "loss": loss}
        group = trainer.optimizer.param_groups[0]
        if "lr" in group:  # an optimizer need not have one
            logs["lr"] = float(group["lr"])
        if run.gradient_norm is not None:
            logs["gradient_norm"] = float(run.gradient_norm)
        logs |= self.graph_counts()
        self.record.write("log", **logs)
        self.measure_speed()
        self.write_speed()
        self.update_status()
        first, samples = self.find_nonfinite()
        trainer.call_event("on_log", logs=logs, first_nonfinite_update=first, nonfinite_samples=samples)
        self.stop_if_nonfinite(first, samples)  # also where no callback does it

    def graph_counts(self) -> dict[str, int]:
        """Return how many updates since the last log were graphs, where some can be."""
        graphed = self.num_graphed_updates - self._num_graphed_logged
        self._num_graphed_logged = self.num_graphed_updates
        return {"graphed_updates": graphed} if graphed or self.run.stepper.rounds_rates else {}

    def start_clock(self) -> None:
        engine = self.run.engine
        peak = peak_flops(engine.device, engine.accelerator.mixed_precision)
        num_parameters = sum(each.numel() for each in engine.parameters) if peak is not None else None
        self._throughput = Throughput(engine.device, num_parameters, peak, self.stopwatch)

    def spending(self, activity: str | None) -> AbstractContextManager[None]:
        """Return a context that counts its time as "evaluation" or "save", or with None as nothing; not as training."""
        self._finish_work()
        return self.stopwatch.during(activity)

    def pause(self) -> None:
        """Stop counting as training, until the next window is requested."""
        self._finish_work()
        self.stopwatch.switch(None)

    def _finish_work(self) -> None:
        """Wait for the device: what it still has to do belongs to what came before."""
        device = None if self.run.engine is None else self.run.engine.device
        if device is not None and device.type == "cuda":
            torch.cuda.synchronize(device)

    def seconds_spent(self) -> dict[str, float]:
        """Return the seconds of the run by activity, for its records; earlier processes of the run are included."""
        now, before = self.stopwatch.read(), self._seconds_before
        return {f"{name}_seconds": before.get(f"{name}_seconds", 0.0) + seconds for name, seconds in now.items()}

    def timed(self, windows: Iterator[Window]) -> Iterator[Window]:
        return self._throughput.watch(windows)

    def measure_speed(self) -> None:
        self.speed = self._throughput.take()

    def write_speed(self) -> None:
        if self.speed:
            self.write("speed", **self.speed, **self.seconds_spent())

    @property
    def data_wait_seconds(self) -> float:
        return self.stopwatch.read()["wait"]

    def find_nonfinite(self) -> tuple[int | None, list[int] | None]:
        """Return the first update of the epoch with a loss that was not finite, if there is one, and its samples."""
        index = self.run.losses.first_nonfinite_window(self.run.settings.gradient_accumulation_steps)
        if index is None:
            return None, None
        first = self.first_update_of_epoch + index
        samples = self._report_nonfinite(first, index)
        self._note_bad_inputs(samples or [])
        return first, samples

    def _note_bad_inputs(self, samples: list[int]) -> None:
        """Name the samples of an update that is not finite whose own values are not; the run ends, or has ended."""
        dataset = self.run.trainer.train_dataset
        bad = []
        with contextlib.suppress(Exception):
            for index in samples if self.run.settings.nan == "stop" else []:
                values = [each for each in iter_tensors(dataset[index]) if each.is_floating_point()]
                bad += [index] if not all(bool(each.isfinite().all()) for each in values) else []
        if bad:
            text = f"train_dataset holds values that are nan or infinite: sample {', '.join(map(str, bad[:8]))}"
            self.run.trainer.notify("data.nonfinite", text, samples=bad)

    def stop_if_nonfinite(self, update: int | None, samples: list[int] | None) -> None:
        """Stop the run at a loss that was not finite, unless such updates are skipped."""
        if update is not None and self.run.settings.nan == "stop":
            text = f"Stopping training: the loss of update {update} is not finite{_listed(samples)}"
            raise StopTrainingError(StopReason(text, StopKind.NOT_FINITE))

    def _report_nonfinite(self, update: int, index: int) -> list[int] | None:
        """Record the samples of an update, the index-th of its epoch, that is not finite; return their ids if known."""
        run = self.run
        is_pure = not run.checkpoints.samplers.changed()[0]  # else the sampler would change if it drew the ids again
        batches = run.train_loader.samples_of(run.progress.epoch, index) if is_pure else None
        listed = [{"position": position, "samples": ids} for position, ids in batches or []]
        self.record.keep("nan_batch.json", {"update": update, "epoch": run.epoch, "micro_batches": listed})
        return None if batches is None else [index for _, ids in batches for index in ids]

    def skips_update(self) -> bool:
        """Whether this update of a run with `nan="skip"` is left out; all processes agree on it."""
        run, engine = self.run, self.run.engine
        gradients = [] if engine.accelerator.scaler is not None else engine.gradients()
        is_bad = not run.losses.update_is_finite(gradients)
        if not engine.agreement.largest(is_bad)[0]:
            self.skipped_in_a_row = 0
            return False
        self.skipped_in_a_row += 1
        update = run.progress.update + 1
        samples = self._report_nonfinite(update, update - self.first_update_of_epoch)
        text = f"Skipping update {update}: its loss or gradient is not finite{_listed(samples)}"
        run.trainer.notify("update.skipped", text, update=update, samples=samples)
        self.record.write("skipped_update", update=update, epoch=run.epoch, samples=samples)
        run.micro_batch_step.discard()
        run.buffers.restore()
        if self.skipped_in_a_row >= _MOST_SKIPPED_IN_A_ROW:
            text = f"Stopping training: {_MOST_SKIPPED_IN_A_ROW} updates in a row were not finite"
            run.trainer.request_stop(StopReason(text, StopKind.NOT_FINITE))
        return True


def _listed(samples: list[int] | None) -> str:
    if samples is None:
        return ""
    more = "" if len(samples) <= 8 else f" and {len(samples) - 8} more"
    return f" (samples {', '.join(map(str, samples[:8]))}{more})"
