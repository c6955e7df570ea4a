"""The evaluation and prediction loops."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from loopwright.data import Loader, MicroBatch
from loopwright.data.batch_parts import part_of
from loopwright.engine import Engine
from loopwright.engine.memory import forget_frames, is_out_of_memory
from loopwright.engine.nested import iter_tensors, map_tensors, to_device
from loopwright.engine.processes import gather_parts, sum_over_processes
from loopwright.engine.seeding import preserved_generators, seed_torch
from loopwright.errors import DataError, StopTrainingError
from loopwright.failpoints import failpoint
from loopwright.keys import forward_key
from loopwright.protocols import TrainerLike
from loopwright.tracking import LossTracker
from loopwright.training.losses import check_batch_output, reduced_mean

if TYPE_CHECKING:
    from loopwright.training.run import TrainingRun


def run_evaluation(run: TrainingRun) -> None:
    """Run `Trainer.evaluate` once everything is prepared: hooks, events, one evaluation epoch."""
    trainer = run.trainer
    try:
        trainer.evaluation_run_start()
        trainer.call_event("on_evaluation_run_start")
        trainer._run_eval_epoch(run.eval_loader, is_training=False)
        run.boundary.serve_stop()
    except StopTrainingError as error:
        run.stop(error)
    try:
        trainer.evaluation_run_end()
        trainer.call_event("on_evaluation_run_end")
    except StopTrainingError as error:
        run.stop(error)


def evaluate_epoch(run: TrainingRun, valid_dl: Any, is_training: bool, is_intermediate: bool) -> None:
    """Evaluate once on the run's own data; the metric's name says where in the run that was."""
    trainer, agreement = run.trainer, run.engine.agreement
    loader = run.as_loader(valid_dl, is_evaluation=True)
    loader.limit = trainer.callback_handler.batch_limit(trainer, training=False, is_intermediate=is_intermediate)
    name = "intermediate_eval_loss" if is_intermediate else "eval_loss_epoch" if is_training else "evaluation_loss"
    run.logbook.write_metrics("evaluation" if trainer.run_history.metric_name_prefix else "training")
    run_eval_epoch(run, loader, name, is_intermediate)
    if agreement.is_begun:
        agreement.end()
    run.logbook.write_metrics("evaluation")


def run_eval_epoch(run: TrainingRun, loader: Loader, metric_name: str, is_intermediate: bool) -> None:
    """Evaluate once over a loader and record the mean loss; it has its own random keys, and restores the generators."""
    with run.logbook.spending("evaluation"):
        trainer, event = run.trainer, run.trainer.call_event
        parts = trainer.model.modules() if is_intermediate and isinstance(trainer.model, nn.Module) else ()
        modes = [(part, part.training) for part in parts]
        trainer.eval_epoch_start()
        tracker = LossTracker()
        event("on_eval_epoch_start", is_intermediate=is_intermediate)

        def compute(batch: Any) -> Any:
            event("on_eval_step_start")
            return trainer.calculate_eval_batch_loss(batch)

        def use(piece: MicroBatch, batch: Any, output: Any) -> None:
            if piece.rows:
                check_batch_output(output, "calculate_eval_batch_loss", is_training=False)
                counted = trainer.count_batch_items(piece.batch)
                items = output.get("num_items_in_batch", output["batch_size"]) if counted is None else counted
                tracker.update(output["loss"], items)
            event("on_eval_step_end", batch=batch, batch_output=output, step=run.eval_batch)

        _run_batches(run, loader, compute, use, has_loss=True)
        trainer.eval_epoch_end()
        loss, has_nonfinite_loss = reduced_mean(tracker, run.engine)
        trainer.run_history.update_metric(metric_name, loss)
        for part, mode in modes:
            part.training = mode
        event("on_eval_epoch_end", is_intermediate=is_intermediate, has_nonfinite_loss=has_nonfinite_loss)


def run_prediction(run: TrainingRun) -> tuple[Any, int]:
    """Return the outputs of `calculate_prediction` for every sample, in order, on the CPU, and how many samples."""
    outputs: list[Any] = []
    rows: list[int] = []

    def use(piece: MicroBatch, batch: Any, output: Any) -> None:
        whole = output if piece.rows else map_tensors(output, lambda tensor: tensor[:0])
        outputs.extend(_of_all_processes(whole, run.engine))
        rows.append(piece.rows)

    with run.logbook.spending("evaluation"), torch.no_grad():
        _run_batches(run, run.eval_loader, run.trainer.calculate_prediction, use, has_loss=False)
    return _joined(outputs), int(sum_over_processes([sum(rows)], run.engine.device)[0])


@contextmanager
def swapped(trainer: TrainerLike, model: Any, handler: Any, metric_prefix: str) -> Iterator[None]:
    """Run a block with another model, other callbacks and a metric prefix, and put everything back whatever happens."""
    history = trainer.run_history
    before = trainer.model, trainer.callback_handler, history.metric_name_prefix
    try:
        trainer.model, trainer.callback_handler = model, handler
        history.set_metric_name_prefix(metric_prefix)
        yield
    finally:
        trainer.model, trainer.callback_handler = before[:2]
        history.set_metric_name_prefix(before[2])


def _pieces(run: TrainingRun, loader: Loader) -> Generator[MicroBatch, None, None]:
    device, rows = run.engine.device, run.current_rows  # a callback may evaluate within an update
    with preserved_generators(device), run.engine.independent_forward(run.trainer.model):
        try:
            for window in loader.windows():
                for piece in window.pieces:
                    run.boundary.during_evaluation()
                    run.current_rows = piece.rows
                    seed_torch(forward_key(piece.key), device)
                    failpoint("mid_eval")
                    yield piece
        finally:
            run.current_rows = rows


def _run_batches(
    run: TrainingRun, loader: Loader, compute: Callable[[Any], Any], use: Callable[..., None], has_loss: bool
) -> None:
    """Compute and use the output of every batch; in parts where memory runs out, each sample once."""
    with closing(_pieces(run, loader)) as pieces:
        for run.eval_batch, piece in enumerate(pieces):
            done, may_be_whole = 0, True
            while done < max(piece.rows, 1):
                part = _part(run, piece, done, may_be_whole)
                failure = _run_batch(run, part, compute, use)
                if failure is None:
                    done += max(part.rows, 1)
                else:
                    may_be_whole = False
                    run.memory.cut_evaluation(part, failure, has_loss)


def _run_batch(
    run: TrainingRun, part: MicroBatch, compute: Callable[[Any], Any], use: Callable[..., None]
) -> Exception | None:
    """Run one batch, whose inputs and output live no longer than this; return the error if memory ran out."""
    inputs = None
    try:
        inputs = to_device(part.batch, run.engine.device)
        output = compute(inputs)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        forget_frames(error)
        inputs = None  # the traceback keeps this frame
        return error
    use(part, inputs, output)
    return None


def _part(run: TrainingRun, piece: MicroBatch, start: int, may_be_whole: bool) -> MicroBatch:
    """Return a batch, or its part from a row on, under its own key; one that cannot be cut stays whole if it may."""
    most = -(-piece.rows // run.memory.parts.evaluation)
    stop = min(start + most, piece.rows)
    if stop - start == piece.rows:
        return piece
    try:
        part = part_of(piece, start, stop, run.trainer.cut_batch)
    except DataError:
        if start or not may_be_whole:
            raise
        return piece
    run.current_rows = part.rows
    seed_torch(forward_key(part.key), run.engine.device)
    return part


def _of_all_processes(output: Any, engine: Engine) -> list[Any]:
    """Return the outputs of all processes for a window, in order, on the CPU, without empty ones."""
    leaves = [gather_parts(tensor, engine.device) for tensor in iter_tensors(output)] if engine.is_distributed else []
    if not leaves:
        return [map_tensors(output, lambda tensor: tensor.detach().cpu())]
    of_processes = [iter(parts) for parts in zip(*leaves, strict=True) if any(len(part) for part in parts)]
    return [map_tensors(output, lambda _, rest=rest: next(rest).cpu()) for rest in of_processes]  # type: ignore[misc]


def _joined(outputs: list[Any]) -> Any:
    if not outputs:
        return []
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        if len({output.shape[1:] for output in outputs}) == 1:
            return torch.cat(outputs)
        return [row for output in outputs for row in output]
    if isinstance(first, dict):
        return {name: _joined([output[name] for output in outputs]) for name in first}
    if isinstance(first, (list, tuple)) and any(True for _ in iter_tensors(first)):
        columns = [_joined(list(column)) for column in zip(*outputs, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    return outputs
