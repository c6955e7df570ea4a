"""From a batch to a loss, and from several losses to one update: a loss is a sum and a count."""

from __future__ import annotations

import contextlib
import inspect
import math
import re
import weakref
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from loopwright.data import Window
from loopwright.engine import Engine
from loopwright.engine.nested import iter_tensors, num_rows
from loopwright.engine.processes import sum_on_device, sum_over_processes
from loopwright.errors import BatchLossError, ConfigError, LoopwrightError
from loopwright.failpoints import failpoint
from loopwright.tracking import LossTracker
from loopwright.tracking.loss import combined

if TYPE_CHECKING:
    from loopwright.training.run import TrainingRun

_NEVER = 2**62
# Losses of torch that broadcast outputs and targets, as classes or functions; the others refuse such shapes.
_BROADCASTING = ("mseloss", "l1loss", "smoothl1loss", "huberloss", "poissonnllloss", "softmarginloss")
# Per model, by the names of a batch: the forward, and what `_left_out` returns for it.
_LEFT_OUT: WeakKeyDictionary[nn.Module, dict[tuple[str, ...], tuple[Any, list[str], bool]]] = WeakKeyDictionary()
_WRAPPERS = r"^(_orig_mod\.)?module\.(_orig_mod\.)?"  # what is before the name of a parameter of a wrapped model


class EpochLosses:
    """The losses of one epoch: weighed into updates, summed and counted, read only when something is logged.

    Each micro-batch's loss is a mean over its items. In an update of several it is weighted by its items over the
    update's items before backward; alone it is left untouched. Where a micro-batch's items are known only after its
    forward pass (the `num_items_in_batch` key), the division by the update's items is done on the gradients instead.
    """

    def __init__(self, engine: Engine) -> None:
        self.index = 0  # of the current micro-batch within its update
        self._engine = engine
        self._tracker = LossTracker()
        self._logged_loss = 0.0
        self._logged_items = 0.0

    def follow(self, engine: Engine) -> None:
        """Switch to another engine; called when a run is prepared, whose first epoch may continue earlier sums."""
        self._engine = engine

    def begin_update(self, window: Window, counts: list[float | None]) -> None:
        """Start an update, given the items of each micro-batch: none, or with a None, if they are samples."""
        self._window, pieces = window, window.pieces
        self._counts: list[float] | None = None
        if counts and None not in counts:
            pairs = zip(counts, pieces, strict=True)
            self._counts = [float(count or 0) if piece.rows else 0.0 for count, piece in pairs]
        self._is_alone = len(pieces) == 1 and pieces[0].rows > 0 and not self._engine.is_distributed
        self._entries: list[tuple[Tensor, float | Tensor]] = []
        self._late_items: list[float | Tensor] = []
        self._total = 0.0
        self._engine.begin_gradients([piece.rows for piece in pieces])
        if not self._is_alone:
            own: list[float] | None = self._counts
            if own is None and window.is_counted:
                own = [piece.rows for piece in pieces]
            self._total = float(window.samples) if own is None else self._engine.agreement.total(sum(own))

    @property
    def counts_items(self) -> bool:
        """Whether the items of the current update were counted before its forward passes."""
        return self._counts is not None

    def weighted(self, output: dict[str, Any]) -> Tensor | None:
        """Return the current micro-batch's loss, weighted for backward, and remember the loss.

        None for a part of a micro-batch without any item: its mean of nothing has no gradient.
        """
        if not hasattr(self, "_window"):
            raise ConfigError(
                "a micro-batch was run outside of an update, by an overridden epoch, so its weight is unknown. Call "
                "calculate_train_batch_loss and backward_step there, or do not override _run_train_epoch."
            )
        loss: Tensor = output["loss"]
        index = self.index
        rows = self._window.pieces[index].rows
        items = output.get("num_items_in_batch") if self._counts is None else None
        if rows:
            counted = output["batch_size"] if self._counts is None else self._counts[index]
            # Detached: a kept graph would keep everything that a custom function of it holds.
            self._entries.append((loss.detach(), counted if items is None else items))
        if self._is_alone:
            return loss
        if items is not None:
            is_needed = index == len(self._window.pieces) - 1 and not self._late_items  # one of an update is always run
            if self._window.numbers is not None and not is_needed and not items:  # this waits for the device
                return None
            if isinstance(items, Tensor):
                # An integer count would be divided in float32, whatever the loss is.
                precise = torch.promote_types(loss.dtype, torch.float32)
                items = items.to(loss.device, precise, non_blocking=True)
            self._late_items.append(items if rows else items * 0)  # of the same type on every process
            return loss * (self._late_items[-1] / self._window.samples)
        weight = self.weight_of(index)
        return loss if weight is None or weight == 1.0 else loss * weight

    def weight_of(self, index: int) -> float | None:
        """Return the weight of a micro-batch's loss in its update, from items on the host; None for a single one."""
        if self._is_alone:
            return None
        count = self._window.pieces[index].rows if self._counts is None else self._counts[index]
        return count * self._engine.num_averaged / self._total if self._total else 0.0

    def note(self, index: int, loss: Tensor, output: Mapping[str, Any]) -> None:
        """Record the loss of a micro-batch whose backward has been run elsewhere; nothing writes to it any more."""
        if self._counts is not None:
            items: float | Tensor = self._counts[index]
        else:
            items = output.get("num_items_in_batch", output["batch_size"])
        self._entries.append((loss, items.clone() if isinstance(items, Tensor) else items))

    def finish_update(self) -> None:
        """End the update's backward passes: share what no wrapper shares, finish the division if items came late."""
        failpoint("after_backward")
        self._engine.finish_gradients()
        if self._late_items:
            total = sum(self._late_items)
            if isinstance(total, Tensor):
                total = sum_on_device(total)
            else:
                total = self._engine.agreement.total(total)
            total = total + (total == 0)  # a window without items has no gradient to divide
            torch._foreach_mul_(self._engine.gradients(), self._window.samples * self._engine.num_averaged / total)

    def count_update(self) -> None:
        """Keep the losses of the update, once its weights are in the model."""
        failpoint("after_optimizer_step")
        for loss, items in self._joined_entries():
            self._tracker.update(loss, items, is_ours=True)
        self._entries = []  # what led to a loss goes with it: recording a graph must not meet it again

    def _joined_entries(self) -> list[tuple[Tensor, float | Tensor]]:
        """Return an entry per micro-batch, also of an update that was run in parts: they are what an epoch counts."""
        window = self._window
        if window.numbers is None or not self._entries:
            return self._entries
        numbers = [number for number, piece in zip(window.numbers, window.pieces, strict=True) if piece.rows]
        by_batch: dict[int, list[tuple[Tensor, float | Tensor]]] = {}
        for number, entry in zip(numbers, self._entries, strict=True):
            by_batch.setdefault(number, []).append(entry)
        return [_joined(entries) for entries in by_batch.values()]

    def update_is_finite(self, gradients: list[Tensor]) -> bool:
        """Whether the losses of the current update and these gradients are all finite; this waits for the device."""
        values = [loss.detach() for loss, _ in self._joined_entries()] + gradients
        return not values or bool(torch.stack([value.isfinite().all() for value in values]).all())

    def drop_update(self) -> None:
        self._entries = []

    def mean(self) -> float:
        """Return the mean loss of the epoch so far, over all processes; nan without items."""
        return reduced_mean(self._tracker, self._engine)[0]

    @property
    def running(self) -> float:
        """The mean loss of the epoch so far on this process; waits for the device."""
        return self._tracker.average

    def has_nonfinite(self) -> bool:
        """Whether any loss of the epoch, on any process, was nan or infinite."""
        return reduced_mean(self._tracker, self._engine)[1]

    def first_nonfinite_window(self, accumulation: int) -> int | None:
        """Return the index of the epoch's first update with a non-finite loss anywhere; every process must call it."""
        finite = self._tracker.first_nonfinite()
        own = _NEVER if finite is None else finite // accumulation
        first = -self._engine.agreement.largest(-own)[0]
        return None if first == _NEVER else first

    def mean_since_last_log(self) -> float | None:
        """Return the mean loss since this was last asked, over all processes; None if there was none."""
        loss, items = self._tracker.total_loss, self._tracker.running_count
        new = [loss - self._logged_loss, items - self._logged_items]
        self._logged_loss, self._logged_items = loss, items
        new_loss, new_items = sum_over_processes(new, self._engine.device)
        return new_loss / new_items if new_items else None

    def state_dict(self) -> dict[str, Any]:
        return {"tracker": self._tracker.state_dict(), "logged": [self._logged_loss, self._logged_items]}

    def load_process_states(self, states: list[dict[str, Any]]) -> None:
        """Continue the sums that every process saved: each its own, or rank 0 all of them."""
        if len(states) == self._engine.num_processes:
            own = states[self._engine.rank]
        elif self._engine.rank == 0:
            own = {
                "tracker": combined([state["tracker"] for state in states]),
                "logged": [sum(sums) for sums in zip(*(state["logged"] for state in states), strict=True)],
            }
        else:
            return
        self._tracker.load_state_dict(own["tracker"])
        self._logged_loss, self._logged_items = own["logged"]


def _joined(entries: list[tuple[Tensor, float | Tensor]]) -> tuple[Tensor, float | Tensor]:
    """Return the mean loss of several parts, and their items; a part without items is ignored."""
    if len(entries) == 1:
        return entries[0]
    total = sum(items for _, items in entries)
    if not isinstance(total, Tensor):
        counted = [loss.detach() * (items / total) for loss, items in entries if items]
        return (sum(counted[1:], counted[0]) if counted else entries[0][0]), total
    sums = [torch.where(torch.as_tensor(items) > 0, loss.detach() * items, 0.0) for loss, items in entries]
    return sum(sums[1:], sums[0]) / (total + (total == 0)), total


def reduced_mean(tracker: LossTracker, engine: Engine) -> tuple[float, bool]:
    """Return a tracker's mean over all processes (nan without items), and whether any loss was not finite."""
    bad = tracker.first_nonfinite() is not None
    total, count, bad_anywhere = sum_over_processes(
        [tracker.total_loss, tracker.running_count, float(bad)], engine.device
    )
    return (total / count if count else math.nan), bad_anywhere > 0


def batch_loss(model: Any, loss_func: Any, batch: Any, run: TrainingRun | None = None) -> dict[str, Any]:
    """Return loss, model outputs and batch size of a batch, the default way.

    A mapping goes to the model as keywords; without a loss function the loss is `outputs.loss`, with one
    it is `loss_func(outputs, batch["labels"])`. Anything else is taken as (inputs, targets, ...).
    """
    if isinstance(batch, Mapping):
        return _mapping_loss(model, loss_func, batch, run)
    if loss_func is None:
        raise BatchLossError(
            "loss_func is None, so the loss has to come from the model: that needs a mapping batch (passed as "
            f"model(**batch)) and outputs with a .loss; got a batch of type {type(batch).__name__}. "
            "Pass a loss_func, or override calculate_train_batch_loss."
        )
    if not isinstance(batch, (list, tuple)) or len(batch) < 2:
        held = f" of {len(batch)}" if isinstance(batch, (list, tuple)) else ""
        raise BatchLossError(
            f"a batch must be (inputs, targets, ...) or a mapping, got a {type(batch).__name__}{held}. "
            "Let the dataset return (input, target), as TensorDataset(inputs, targets) does, or override "
            "calculate_train_batch_loss and calculate_eval_batch_loss."
        )
    inputs, targets = batch[0], batch[1]
    outputs = _outputs(model, inputs)
    return {"loss": _loss(loss_func, outputs, targets, run), "model_outputs": outputs, "batch_size": targets.size(0)}


def unused_parameters(model: Any, error: BaseException, remedies: Callable[[], tuple[str, str]]) -> ConfigError | None:
    """Return an error that names the parameters that no loss depends on, which DDP refuses; None for other errors.

    `remedies` returns how to train them all the same, and how to freeze them.
    """
    if "finished reduction in the prior iteration" not in str(error):
        return None
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    listed = re.search(r"did not receive grad for rank \d+:((?: \d+)+)", str(error))
    indices = [int(number) for number in listed[1].split()] if listed else []
    names = [re.sub(_WRAPPERS, "", trained[index]) for index in indices if index < len(trained)]
    named = f": {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}" if names else ""
    sharing, freezing = remedies()
    return ConfigError(
        f"the loss does not depend on some of the trained parameters{named}. With several processes, "
        f"{sharing}; or freeze them, which is faster: {freezing}"
    )


def prediction(model: Any, batch: Any) -> Any:
    """Return the model's outputs for a batch, the default way: labels and further tuple entries are left out."""
    if isinstance(batch, Mapping):
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        outputs = _outputs(model, **_accepted(model, inputs))
    else:
        outputs = _outputs(model, batch[0] if isinstance(batch, (list, tuple)) else batch)
    return getattr(outputs, "logits", outputs)


def check_batch_output(output: Any, method: str, *, is_training: bool) -> None:
    """Raise a BatchLossError if the output of a batch-loss method cannot work."""
    if not isinstance(output, Mapping):
        raise BatchLossError(
            f"{method} returned a {type(output).__name__}; it must return a dict with "
            "loss, model_outputs and batch_size"
        )
    missing = [name for name in ("loss", "batch_size") if name not in output]
    if missing:
        raise BatchLossError(
            f"{method} returned a dict without {', '.join(missing)}; it must have loss, model_outputs and batch_size, "
            f"and has {', '.join(map(str, output)) or 'no keys'}"
        )
    loss = output["loss"]
    if not isinstance(loss, Tensor):
        raise BatchLossError(f"{method} returned a loss of type {type(loss).__name__}; it must be a scalar tensor")
    if not is_training:
        return
    if loss.numel() != 1:
        raise BatchLossError(
            f"{method} returned a loss of shape {tuple(loss.shape)}; it must be a scalar. "
            "Reduce it, for example with reduction='mean' or .mean()."
        )
    if not loss.requires_grad:
        raise BatchLossError(
            f"{method} returned a loss without a gradient, so nothing can be trained. "
            "Compute it from the model's outputs without detach(), .item() or torch.no_grad()."
        )


def _mapping_loss(model: Any, loss_func: Any, batch: Mapping[str, Any], run: TrainingRun | None) -> dict[str, Any]:
    if loss_func is None:
        outputs = _outputs(model, **_accepted(model, batch, run))
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
        if loss is None:
            raise BatchLossError(
                f"the model's outputs have no loss for a batch with {', '.join(batch)}; with loss_func=None the model "
                "must return one (transformers models do when the batch has labels). Pass a loss_func otherwise."
            )
    else:
        if "labels" not in batch:
            raise BatchLossError(
                f"a mapping batch needs labels for the loss_func, got {', '.join(batch)}. "
                "Rename the target to labels, or override calculate_train_batch_loss."
            )
        outputs = _outputs(model, **_accepted(model, batch, run, has_loss=True))
        loss = _loss(loss_func, getattr(outputs, "logits", outputs), batch["labels"], run)
    return {"loss": loss, "model_outputs": getattr(outputs, "logits", outputs), "batch_size": num_rows(batch)}


def _loss(loss_func: Any, outputs: Any, targets: Any, run: TrainingRun | None) -> Any:
    """Return the loss; raise a BatchLossError if targets are of a kind that a loss of torch does not take."""
    # A module without the attribute would search its parameters for it, and raise, at every batch.
    is_module = isinstance(loss_func, nn.Module)
    name = type(loss_func).__name__ if is_module else getattr(loss_func, "__name__", type(loss_func).__name__)
    are_tensors = isinstance(outputs, Tensor) and isinstance(targets, Tensor)
    are_unequal = are_tensors and outputs.shape != targets.shape
    if are_unequal and name.replace("_", "").lower() in _BROADCASTING:
        raise BatchLossError(_unequal(name, outputs, targets))
    try:
        loss = loss_func(outputs, targets)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        reason = f"loss_func is of type {name}, which cannot be called" if not callable(loss_func) else None
        if are_tensors and reason is None:
            reason = _why_no_loss(name, outputs, targets, getattr(loss_func, "ignore_index", -100))
        if reason is None:
            raise
        raise BatchLossError(reason) from error
    if are_unequal and run is not None and isinstance(loss_func, FunctionType) and run.is_first("loss.shapes"):
        with torch.no_grad(), contextlib.suppress(Exception):  # other sizes, or a function that takes no other shape
            if not torch.allclose(loss_func(outputs.reshape(targets.shape), targets), loss, rtol=1e-3):
                text = f"The loss may be wrong: {_unequal(name, outputs, targets)}"
                run.trainer.notify("loss.shapes", text)
    return loss


def _unequal(name: str, outputs: Tensor, targets: Tensor) -> str:
    sizes = ", ".join(["-1", *map(str, outputs.shape[1:])])
    fix = f". Pass targets.reshape({sizes})." if outputs.numel() == targets.numel() else ""
    shapes = f"the outputs have the shape {tuple(outputs.shape)}, and the targets {tuple(targets.shape)}"
    return f"{shapes}: {name} needs equal shapes{fix}"


def describe_batch(error: Exception, batch: Any, model: Any) -> None:
    """Add the types and shapes of a batch to an error of the model; Python has notes from 3.11 on."""
    if hasattr(error, "add_note") and not isinstance(error, LoopwrightError) and isinstance(model, nn.Module):
        kinds = ", ".join(sorted({str(parameter.dtype) for parameter in model.parameters()}))
        held = ", ".join(f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in iter_tensors(batch))
        error.add_note(f"The first batch holds {held}. The model's parameters are {kinds}.")


def _why_no_loss(name: str, outputs: Tensor, targets: Tensor, ignored: int) -> str | None:
    kind, shape = str(targets.dtype).removeprefix("torch."), tuple(targets.shape)
    if name in ("CrossEntropyLoss", "NLLLoss", "cross_entropy", "nll_loss") and outputs.dim() > 1:
        if targets.dim() == outputs.dim() and targets.shape[1] == 1 != outputs.shape[1]:
            return f"the targets have the shape {shape}; {name} needs one class per sample: targets.squeeze(1).long()"
        if targets.is_floating_point() or targets.dtype not in (torch.int64, torch.uint8):
            return f"the targets are of type {kind}; {name} needs class indices: targets.long()"
        classes, used = outputs.shape[1], targets[targets != ignored]
        if len(used) and (used.min() < 0 or used.max() >= classes):
            odd = int(used.min() if used.min() < 0 else used.max())
            return f"the target {odd} is out of range: the model has {classes} outputs, for classes 0 to {classes - 1}"
    if outputs.shape != targets.shape and outputs.numel() == targets.numel():
        return _unequal(name, outputs, targets)
    if name in ("BCEWithLogitsLoss", "BCELoss", "MSELoss", "L1Loss") and not targets.is_floating_point():
        return f"the targets are of type {kind}; {name} needs targets.float()"
    return None


def _outputs(model: Any, /, *inputs: Any, **named: Any) -> Any:
    """Return the model's outputs; raise a BatchLossError if its forward takes other inputs."""
    try:
        return model(*inputs, **named)
    except TypeError as error:
        signature = _signature(model)
        try:
            signature.bind(*inputs, **named)
        except TypeError:
            pass
        else:  # raised inside the forward
            raise
        hooks = "override calculate_train_batch_loss, calculate_eval_batch_loss and calculate_prediction"
        takes = f"the model's forward takes {', '.join(signature.parameters) or 'nothing'}"
        if named:
            raise BatchLossError(
                f"{takes}, but the batch has {', '.join(named)}, which are passed by name. Let the dataset or the "
                f"collate_fn return a mapping with the argument names of the forward (and labels), or {hooks}."
            ) from error
        raise BatchLossError(
            f"{takes}, but gets only the first entry of a tuple batch; the second goes to the loss function. Let the "
            f"dataset return a dict with the argument names of the forward, and the target as labels, or {hooks}."
        ) from error


def _signature(model: Any) -> inspect.Signature:
    """Return the signature of the forward of the model inside any wrapper: a wrapper's own accepts everything."""
    signature = inspect.signature(getattr(model, "forward", model))
    inner = getattr(model, "_orig_mod", getattr(model, "module", None))  # of torch.compile, of DDP
    return _signature(inner) if isinstance(inner, nn.Module) and _takes_all(signature) else signature


def _accepted(
    model: Any, batch: Mapping[str, Any], run: TrainingRun | None = None, has_loss: bool = False
) -> Mapping[str, Any]:
    """Return the entries of a batch that the model's forward takes; a note names the others, labels aside."""
    extra, is_complete = _left_out(model, tuple(batch))
    if not is_complete:  # the error names all that the batch has
        return {name: value for name, value in batch.items() if not has_loss or name not in {*extra} & {"labels"}}
    told = [name for name in extra if name != "labels"]
    if told and run is not None and run.is_first("batch.extra"):
        text = f"Left out of the batches, as the model's forward does not take them: {', '.join(told)}"
        run.trainer.notify("batch.extra", text, names=told)
    return {name: value for name, value in batch.items() if name not in extra}


def _left_out(model: Any, names: tuple[str, ...]) -> tuple[list[str], bool]:
    """Return the names that the model's forward does not take, and whether the others are all that it needs.

    Looked up once per model, forward and names: to inspect a signature takes longer than the forward of a small model.
    """
    forward = getattr(model, "forward", model)
    function = getattr(forward, "__func__", forward)
    is_plain = isinstance(model, nn.Module) and inspect.isfunction(function)
    known = _LEFT_OUT.setdefault(model, {}) if is_plain else {}
    if names not in known or known[names][0]() is not function:
        signature = _signature(model)
        extra = [] if _takes_all(signature) else [name for name in names if name not in signature.parameters]
        try:
            signature.bind(**dict.fromkeys(name for name in names if name not in extra))
            is_complete = True
        except TypeError:
            is_complete = False
        known[names] = (weakref.ref(function) if is_plain else None), extra, is_complete
    return known[names][1:]


def _takes_all(signature: inspect.Signature) -> bool:
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in signature.parameters.values())
