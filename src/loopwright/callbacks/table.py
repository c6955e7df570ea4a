"""The console of a trainer: a progress bar while an epoch runs, and a row of a table when it is over."""

# ruff: noqa: D102 - methods that override events

from __future__ import annotations

import math
import shutil
import sys
import time
from typing import Any

from loopwright.callbacks.base import TrainerCallback
from loopwright.callbacks.console import report_seed
from loopwright.callbacks.metrics import MetricsCallback, direction_of
from loopwright.callbacks.progress import num_batches
from loopwright.protocols import TrainerLike
from loopwright.terminal import bar_class, is_notebook, is_terminal, paint

_SECONDS_BETWEEN = 0.5  # readings of the loss for the bar: each waits for the device
_PIPE_COLUMNS = 120
_LEAST_WIDTH, _SHORT_TITLE = 9, 14
_OTHER_COLUMNS = 23  # epoch, seconds and the mark of the best


class EpochTableCallback(TrainerCallback):
    """Prints a row per epoch, the best one so far marked, and draws a bar with loss, metrics and time left.

    The best row is that of the metric that a callback with a `watch_metric` watches, else of the evaluation loss, else
    of the training loss. The bar is drawn on a terminal or in a notebook only.
    """

    asks_alike = True

    def __init__(self) -> None:
        self.bar: Any = None
        self._columns: list[str] = []
        self._titles: dict[str, str] = {}
        self._began = self._read_at = 0.0

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._columns = []
        report_seed(trainer)

    def on_train_epoch_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._began = time.monotonic()
        epoch = f"epoch {trainer.run_history.current_epoch}/{trainer.run_config.num_epochs}"
        self._draw(trainer, trainer.train_loader, epoch, trainer.progress.batch)

    def on_update_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        if self.bar is None:
            return
        now = time.monotonic()
        if now - self._read_at >= _SECONDS_BETWEEN:
            self._read_at = now
            values = {"loss": trainer.running_loss}
            for callback in trainer.callback_handler:
                values |= callback.running() if isinstance(callback, MetricsCallback) else {}
            self.bar.set_postfix_str("  ".join(f"{name} {rounded(value)}" for name, value in values.items()), False)
        self.bar.update(trainer.progress.batch - self.bar.n)

    def on_train_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self.release()

    def on_eval_epoch_start(self, trainer: TrainerLike, is_intermediate: bool = False, **kwargs: Any) -> None:
        self._began = self._began or time.monotonic()
        if not is_intermediate:
            self._draw(trainer, trainer.eval_loader, "evaluation")

    def on_eval_step_end(self, trainer: TrainerLike, *args: Any, step: int = 0, **kwargs: Any) -> None:
        if self.bar is not None and self.bar.desc.startswith("evaluation"):
            self.bar.update(max(step + 1 - self.bar.n, 0))

    def on_eval_epoch_end(self, trainer: TrainerLike, is_intermediate: bool = False, **kwargs: Any) -> None:
        if not is_intermediate:
            self.release()

    def on_training_run_epoch_end(self, trainer: TrainerLike, has_evaluated: bool = True, **kwargs: Any) -> None:
        history = trainer.run_history
        values = {name: value for name, value in history.latest().items() if _is_shown(name, value)}
        values = {name: value for name, value in values.items() if has_evaluated or "train" in name}
        is_new = [name for name in values if name not in self._columns]
        if is_new:
            # Losses before metrics, and training before evaluation.
            names = {*self._columns, *values}
            self._columns = sorted(names, key=lambda name: ("loss" not in name, "train" not in name, name))
            self._titles = _fitted(self._columns)
            if hidden := [_title(name) for name in self._columns if name not in self._titles]:
                text = f"Not in the table, which is too narrow: {', '.join(hidden)}"
                trainer.notify("epoch.hidden", text, names=hidden)
            trainer.notify("epoch.header", self._row(["epoch", *self._titles.values(), "seconds"]))
        epoch, seconds = history.current_epoch, time.monotonic() - self._began
        shown = [rounded(values[name]) if name in values else "-" for name in self._titles]
        best = self._best(trainer)
        is_best = best is not None and best[1] == len(list(history.get_metric_values(best[0]))) - 1
        is_best = is_best and (has_evaluated or "train" in best[0])  # type: ignore[index]
        row = self._row([str(epoch), *shown, f"{seconds:.1f}"]) + ("  * best" if is_best else "")
        row = paint(row, "green", sys.stdout) if is_best else row
        trainer.notify("epoch", row, epoch=epoch, metrics=values, is_best=is_best)

    def on_evaluation_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._began = time.monotonic()

    def on_evaluation_run_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        values = trainer.run_history.latest()
        shown = [f"{_title(name)} {rounded(value)}" for name, value in values.items() if _is_shown(name, value)]
        text = f"{'  '.join(shown)}  ({time.monotonic() - self._began:.1f} s)"
        trainer.notify("evaluation", text, metrics=values)

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self.release()
        best, history = self._best(trainer), trainer.run_history
        loading = (each for each in trainer.callback_handler if getattr(each, "load_saved_checkpoint", False))
        if best is not None and all(each.best_metric is None for each in loading):  # else it names the best
            values = list(history.get_metric_values(best[0]))
            is_of_epochs = len(values) == len(list(history.get_metric_values("train_loss_epoch")))
            where = f" in epoch {best[1] + 1}" if is_of_epochs else ""
            text = f"Best {_title(best[0])}: {rounded(values[best[1]])}{where}"
            trainer.notify("epoch.best", text, metric=best[0], value=values[best[1]])

    def on_stop_training_error(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self.release()

    def release(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def _draw(self, trainer: TrainerLike, loader: Any, text: str, initial: int = 0) -> None:
        self.release()
        stream = sys.stdout if is_notebook() else sys.stderr
        if not trainer.run_config.is_local_process_zero or not (is_notebook() or is_terminal(stream)):
            return
        total = num_batches(loader)
        # What does not fit is cut off at the end, the bar first.
        layout = "{desc}: {percentage:3.0f}%{postfix}  {n_fmt}/{total_fmt}  {elapsed}<{remaining}  {bar}"
        layout = layout if total is not None else "{desc}: {n_fmt} batches{postfix}  {elapsed}"
        options = {"total": total, "initial": initial, "desc": text, "bar_format": layout, "leave": False}
        self.bar = bar_class()(file=stream, dynamic_ncols=True, **options)
        self._read_at = time.monotonic()

    def _row(self, cells: list[str]) -> str:
        widths = [5, *(max(len(title), _LEAST_WIDTH) for title in self._titles.values()), 8]
        return "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))

    def _best(self, trainer: TrainerLike) -> tuple[str, int] | None:
        """Return the metric that decides, and the index of its best value so far."""
        history = trainer.run_history
        watching = [each for each in trainer.callback_handler if getattr(each, "watch_metric", None)]
        loss = "train_loss_epoch" if trainer.eval_loader is None else "eval_loss_epoch"
        name = watching[0].watch_metric if watching else loss
        name = name if name in history.get_metric_names() else f"eval_{name}"
        is_greater = watching[0].greater_is_better if watching else direction_of(name, trainer)
        numbers = [(float(value), -index) for index, value in enumerate(history.get_metric_values(name))]
        numbers = [(value if is_greater else -value, index) for value, index in numbers if not math.isnan(value)]
        return (name, -max(numbers)[1]) if numbers else None


def rounded(value: Any) -> str:
    """Return a number for people: four significant digits, and no more than four decimals from 1 on."""
    number = float(value)
    if not math.isfinite(number) or number == int(number) and 10 <= abs(number) < 1e6:
        return f"{number:.0f}"
    return f"{number:.4f}" if 0.001 <= abs(number) < 1000 or number == 0 else f"{number:.4g}"


def _is_shown(name: str, value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not name.startswith("intermediate")


def _title(name: str, longest: int = 99) -> str:
    title = name.removesuffix("_epoch").replace("_", " ")
    return title if len(title) <= longest else f"{title[: longest // 2 - 1]}..{title[1 - longest // 2 :]}"


def _fitted(names: list[str]) -> dict[str, str]:
    """Return the titles of the columns that fit: short ones if need be, else without those that matter least."""
    width = shutil.get_terminal_size((_PIPE_COLUMNS, 24)).columns if is_terminal(sys.stdout) else _PIPE_COLUMNS
    # Metrics of evaluation matter most, then its loss, others, and training.
    order = sorted(names[::-1], key=lambda name: (name.startswith("eval_"), "train" not in name, "loss" not in name))
    order = [*(each for each in order if "train" in each and "loss" not in each), *order]
    kept = list(names)
    for gone in ("", *order):
        kept = [name for name in kept if name != gone or len(kept) == 1]
        for longest in (width, _SHORT_TITLE):
            titles = {name: _title(name, longest) for name in kept}
            if sum(max(len(each), _LEAST_WIDTH) + 2 for each in titles.values()) + _OTHER_COLUMNS <= width:
                return titles
    return titles
