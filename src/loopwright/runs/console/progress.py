"""The output of a run during training: a live line on a terminal, plain lines elsewhere, an evaluation table."""

from __future__ import annotations

import contextlib
import signal
import time
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, cast

from loopwright.callbacks import TrainerCallback
from loopwright.callbacks.progress import num_batches
from loopwright.progress import EVALUATED, TRAINED
from loopwright.protocols import TrainerLike
from loopwright.quantities import size
from loopwright.report import LiveReport
from loopwright.runs.clock import Pace
from loopwright.runs.console.evaluation_table import EvalTable
from loopwright.runs.console.screen import clock, eval_metrics, metrics_text
from loopwright.runs.console.status_line import bar_of, fitted
from loopwright.tasks.arguments import START
from loopwright.training.run import run_of

if TYPE_CHECKING:
    from loopwright.runs.job import RunJob
    from loopwright.runs.trainer import TaskTrainer

_MUCH_WAITING = 0.2  # share of the time
_NO_LIMIT = 1 << 16


class ReportProgress(TrainerCallback):
    """Reports progress from the logs, so that the loop never waits for the device; requests saves of the best model."""

    asks_alike = True
    graph_safe = True

    def __init__(self, run: RunJob, pace: Pace, live: LiveReport | None = None) -> None:
        self._screen = run.screen
        self._clock = run.screen.clock
        self._shows_start = run.args.profile == START
        self._pace = pace
        self._length = pace.length
        self._table = EvalTable(run.best.short_name)
        self._live = live
        self._logs_first = run.training.logging_first_step
        self._has_line = not run.training.disable_tqdm
        self._line: Any = None
        self._latest: dict[str, Any] = {}
        self._speed: dict[str, float] = {}
        self._metric = ""  # the decisive one of the last evaluation
        self._evaluated: tuple[int, int | None] | None = None

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        update = trainer.progress.update
        self._pace.log(update, 0.0)
        if update > 0:
            self._say_resumed(cast("TaskTrainer", trainer))
        if self._has_line:
            self._line = self._screen.open_line(self._compose, self._length.updates, update)

    def on_update_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        if not self._clock.is_over:
            self._end_start()
        if self._line is not None:
            self._line.update(1)
        if self._logs_first and trainer.progress.update == 1:
            trainer.request_log()

    def on_train_step_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        if "first batch" not in self._clock.seconds:
            self._clock.lap("first batch")

    def _end_start(self) -> None:
        """End the start of the command with its first update."""
        self._clock.lap("first update")
        self._clock.is_over = True
        if self._shows_start:
            self._screen.block("profile", *self._clock.lines(), wraps=False)
            seconds = {phase: round(each, 3) for phase, each in self._clock.seconds.items()}
            total = round(sum(self._clock.seconds.values()), 3)
            values = {"seconds": seconds, "total_seconds": total, "cpu_seconds": time.process_time()}
            self._screen.events.emit("start_profile", **values)

    def on_log(self, trainer: TrainerLike, logs: Any = None, **kwargs: Any) -> None:
        self._latest, self._speed = logs, dict(trainer.speed)
        spent = run_of(trainer).logbook.stopwatch.read()
        self._pace.log(logs["update"], spent["train"] + spent["wait"])
        share = 100 * logs["update"] / max(self._length.updates, 1)
        line = f"{share:3.0f}%  {' · '.join(text for _, text in self._parts(logs['update']) if text)}"
        if self._line is None:
            self._screen.print(line)
        else:
            self._screen.log(line)
            self._line.nudge()
        self._refresh()

    def on_eval_epoch_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._pace.begin_evaluation()
        self._evaluated = (0, num_batches(trainer.eval_loader))

    def on_eval_step_end(self, trainer: TrainerLike, *args: Any, step: int = 0, **kwargs: Any) -> None:
        if self._line is not None and self._evaluated is not None:
            self._evaluated = (step + 1, self._evaluated[1])
            self._line.nudge()

    def on_eval_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        history = trainer.run_history
        name = "intermediate_eval_loss" if kwargs.get("is_intermediate") else "eval_loss_epoch"
        history.update_metric("eval_loss", history.get_latest_metric(name))
        decisive = self._table.decisive
        self._metric = f"{decisive} {eval_metrics(history.latest())[decisive]:.4f}"
        seconds = self._pace.end_evaluation()
        self._evaluated = None
        is_best = trainer.improves()  # type: ignore[attr-defined] # a TaskTrainer
        self._screen.events.add("evaluation", is_best=is_best)
        update = trainer.progress.update
        shown, whole = self._table.lines(
            update,
            self._length.epoch_at(update),
            eval_metrics(history.latest()),
            getattr(trainer, "intervals", {}),
            seconds,
            is_best=is_best,
            columns=self._screen.columns,
        )
        if len(whole) > 1:  # with a header
            self._screen.print(shown[0], whole[0]) if len(shown) > 1 else self._screen.log(whole[0])
        self._screen.print(shown[-1], whole[-1], "green" if is_best else None)
        if is_best and kwargs.get("is_intermediate"):
            trainer.request_save(trainer.checkpoint_path())  # type: ignore[attr-defined] # a TaskTrainer
        self._refresh()

    def on_training_run_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        latest = trainer.run_history.latest()
        if "train_eval_loss" in latest:
            names = {name.removeprefix("train_"): value for name, value in latest.items() if name.startswith("train_")}
            shown = {name: value for name, value in names.items() if name not in ("loss_epoch", "eval_loss")}
            text = metrics_text({**shown, "loss": names["eval_loss"]}, {})
            self._screen.print(f"on the training data, update {trainer.progress.update}:  {text}")

    def on_stop_training_error(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._screen.close_line()
        self._line = None
        again = "; a second Ctrl-C drops that" if run_of(trainer).signals.received is signal.SIGINT else ""
        self._screen.print(f"stopped after step {trainer.progress.update:,}, saving{again}")

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._pace.end()
        self._screen.close_line()
        self._line = None

    def _say_resumed(self, trainer: TaskTrainer) -> None:
        progress = trainer.progress
        data = "changed data (--allow_changed_data)" if trainer.job.args.allow_changed_data else "data unchanged"
        due = f"sample {progress.samples + 1:,}"
        if progress.stage >= TRAINED:
            due = "the evaluation" if progress.stage < EVALUATED else "the end"
        self._screen.print_wrapped(
            f"resumed at step {progress.update:,} of {self._length.updates:,} · {data} · "
            f"settings unchanged or named above · {due} of epoch {progress.epoch + 1} is next"
        )

    def _refresh(self) -> None:
        if self._live is not None:
            with contextlib.suppress(OSError):
                self._live.refresh()

    def _compose(self, update: int, columns: int | None) -> str:
        """Compose the live line for the width of the terminal; without a limit there is a separate bar."""
        if columns is None:
            return fitted(self._parts(update), _NO_LIMIT)
        share = update / max(self._length.updates, 1)
        head = f"{100 * share:3.0f}% "
        parts = self._parts(update)
        text = fitted(parts, columns - len(head))
        bar = bar_of(share)
        has_room = len(text) == len(fitted(parts, _NO_LIMIT)) and len(head) + len(bar) + 2 + len(text) <= columns
        return f"{head}{bar}  {text}" if has_room else f"{head}{text}"

    def _parts(self, update: int) -> list[tuple[int, str]]:
        logs, speed = self._latest, self._speed
        waiting, left = speed.get("data_wait"), self._pace.seconds_left(update)
        parts = [(9, f"step {update:,}/{self._length.updates:,}"), (3, f"epoch {self._length.epoch_at(update):.2f}")]
        if logs:
            parts += [(8, f"loss {logs['loss']:.4g}"), (4, f"lr {logs['lr']:.2g}")]
        if self._line is not None:
            parts.append((5, self._metric))
        if "tokens_per_second" in speed:
            parts.append((6, f"{speed['tokens_per_second']:,.0f} tokens/s"))
        elif "samples_per_second" in speed:
            parts.append((6, f"{speed['samples_per_second']:,.0f} ex/s"))
        if speed.get("peak_memory_bytes"):
            parts.append((2, f"mem {size(speed['peak_memory_bytes'])}"))
        if "padding_waste" in speed:
            parts.append((1, f"padding {100 * speed['padding_waste']:.0f} %"))
        if waiting is not None:
            parts.append((5 if waiting > _MUCH_WAITING else 1, f"data-wait {100 * waiting:.0f} %"))
        if self._evaluated is not None:
            done, total = self._evaluated
            parts.append((8, f"evaluating {done}" + ("" if total is None else f"/{total}")))
        if left is not None:
            parts += [(7, f"left {clock(left)}"), (0, f"done {_at(left)}")]
        return parts


def _at(seconds_left: float) -> str:
    """Return the time of day this many seconds from now, with the date if it is another day."""
    now = datetime.now()
    then = now + timedelta(seconds=seconds_left)
    return f"{then:%H:%M:%S}" if then.date() == now.date() else f"{then:%b %d %H:%M}"
