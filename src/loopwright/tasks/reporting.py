"""What a run says while it trains: a line at every log and evaluation."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from loopwright.callbacks import TrainerCallback
from loopwright.protocols import TrainerLike
from loopwright.report import LiveReport
from loopwright.tasks.screen import clock, eval_metrics, metrics_text

_MUCH_WAITING = 0.2  # of the time


class ReportProgress(TrainerCallback):
    """Says a line at every log and evaluation, asks for a save after the best evaluation, and watches for `eval_loss`.

    Args:
        say: prints a line.
        num_updates: of the whole run.
        logs_first: log the first update too.
        live: keeps report.html fresh; None on processes that write no files.
    """

    asks_alike = True

    def __init__(
        self,
        say: Callable[[str], None],
        num_updates: int,
        logs_first: bool = False,
        live: LiveReport | None = None,
    ) -> None:
        self._say = say
        self._live = live
        self._num_updates = num_updates
        self._logs_first = logs_first
        self._started = self._eval_started = time.monotonic()
        self._first_update = 0

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Begin to count."""
        self._started = time.monotonic()
        self._first_update = trainer.progress.update

    def on_update_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Ask for a log of the first update, where that is wanted."""
        if self._logs_first and trainer.progress.update == 1:
            trainer.request_log()

    def on_log(self, trainer: TrainerLike, logs: Any = None, **kwargs: Any) -> None:
        """Say where the run is, how fast, and how long it will take."""
        update, elapsed = logs["update"], max(time.monotonic() - self._started, 1e-6)
        done = update - self._first_update
        rate = done * trainer.run_config.train_total_batch_size / elapsed
        left = elapsed / max(done, 1) * (self._num_updates - update)
        share = 100 * update / max(self._num_updates, 1)
        self._say(
            f"{share:3.0f}%  step {update}/{self._num_updates} · epoch {logs['epoch']} · loss {logs['loss']:.4g} · "
            f"lr {logs['lr']:.2g} · {rate:,.0f} ex/s{_lost(trainer)} · left {clock(left)}"
        )
        self._refresh()

    def on_eval_epoch_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Note the time."""
        self._eval_started = time.monotonic()

    def on_eval_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Say the metrics; if they are the best so far, ask for a checkpoint of them."""
        history = trainer.run_history
        name = "intermediate_eval_loss" if kwargs.get("is_intermediate") else "eval_loss_epoch"
        history.update_metric("eval_loss", history.get_latest_metric(name))
        seconds = time.monotonic() - self._eval_started
        text = metrics_text(eval_metrics(history.latest()), getattr(trainer, "intervals", {}))
        is_best = trainer.improves()  # type: ignore[attr-defined] # a TaskTrainer
        self._say(f"eval @{trainer.progress.update}  {text}{'   best so far' if is_best else ''}   {seconds:.1f} s")
        if is_best and kwargs.get("is_intermediate"):
            trainer.request_save(trainer.checkpoint_path())  # type: ignore[attr-defined] # a TaskTrainer
        self._refresh()

    def _refresh(self) -> None:
        """Bring the report up to date, if it is time; a disk that refuses does not end a run."""
        if self._live is not None:
            with contextlib.suppress(OSError):
                self._live.refresh()

    def on_training_run_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Say the metrics on the training data, where they were asked for."""
        latest = trainer.run_history.latest()
        if "train_eval_loss" in latest:
            names = {name.removeprefix("train_"): value for name, value in latest.items() if name.startswith("train_")}
            shown = {name: value for name, value in names.items() if name not in ("loss_epoch", "eval_loss")}
            self._say(f"train @{trainer.progress.update}  {metrics_text({**shown, 'loss': names['eval_loss']}, {})}")


def _lost(trainer: Any) -> str:
    """Return what of the last updates was lost on padding, and on waiting for data if that is much."""
    speed = trainer.speed
    padding = f" · padding {100 * speed['padding_waste']:.0f}%" if "padding_waste" in speed else ""
    is_slow = speed.get("data_wait", 0) > _MUCH_WAITING
    return padding + (f" · waits for data {100 * speed['data_wait']:.0f}%" if is_slow else "")
