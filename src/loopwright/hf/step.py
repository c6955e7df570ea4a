"""A micro-batch in transformers' terms: `training_step` runs forward and backward, and returns the loss."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from loopwright.data import Window
from loopwright.data.batch_parts import with_items
from loopwright.engine.nested import num_rows
from loopwright.errors import BatchLossError, StopTrainingError
from loopwright.hf.boundary import owner_of
from loopwright.hf.loss import LossCall, names_in
from loopwright.stepping.eager import MicroBatchStep
from loopwright.training.run import TrainingRun

_OURS = object()  # the items of an update are counted here
STEPS = ("training_step", "compute_loss", "_prepare_inputs")
STEP_EVENTS = ("on_substep_end", "on_pre_optimizer_step", "on_optimizer_step")


class HfStep(MicroBatchStep):
    """Calls the owner's `training_step`, and weights the loss passed to `accelerator.backward`."""

    keeps_gradients = False

    def __init__(self, run: TrainingRun) -> None:
        super().__init__(run)
        # An override that follows transformers multiplies by the processes, where the items are those of all of them.
        self._scales_by_processes = "average_tokens_across_devices" in names_in(owner_of(run).compute_loss)
        kinds = [each.kind for each in inspect.signature(owner_of(run).training_step).parameters.values()]
        num_places = kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD)  # the third has any name
        self._passes_items = num_places > 2 or inspect.Parameter.VAR_POSITIONAL in kinds
        self._items: list[Tensor | None] = []  # per micro-batch of the update; None if they are rows
        self._given: list[Any] = []  # `num_items_in_batch` of each
        # Micro-batches of an update, per process, whose losses are added up; 0 if they are averaged.
        self._num_added = 0.0
        self._entries: list[tuple[Tensor, float]] = []
        self._weight: Tensor | None = None
        self._backward_losses: list[Tensor] = []  # of a micro-batch: adversarial training has several
        self._num_shares: int | None = None
        parts = run.settings.gradient_accumulation_steps
        self._may_divide = parts > 1 and "gradient_accumulation_steps" in names_in(owner_of(run).training_step)
        self._is_divided: bool | None = None if self._may_divide else False  # before it is passed to backward
        self._computed: Tensor | None = None
        self._total: Any = _OURS

    def collect(self, window: Window) -> Window:
        """Return the window with the batches of an overridden `get_batch_samples`, and keep its number of items."""
        if owner_of(self.run).uses_default("get_batch_samples"):
            return window
        pieces, device = window.pieces, self.run.engine.device
        given = owner_of(self.run).get_batch_samples((piece.batch for piece in pieces), len(pieces), device)
        batches, self._total = given
        if len(batches) != len(pieces):
            text = f"get_batch_samples returned {len(batches)} batches for an update of {len(pieces)}"
            raise BatchLossError(f"{text}: return as many as it was called for")
        replaced = [piece._replace(batch=batch, moved=None) for piece, batch in zip(pieces, batches, strict=True)]
        return window._replace(pieces=replaced)

    def begin(self, window: Window) -> Window:
        owner = owner_of(self.run)
        self._entries = []
        counted = [(id(piece), owner.item_counter.count(piece.batch)) for piece in window.pieces]
        numbers = [None if items is None else float(items) for _, items in counted]
        window, numbers = with_items(window, numbers)
        kept = {id(piece) for piece in window.pieces}  # parts without items are left out
        self._items = [items for number, items in counted if number in kept]
        self._num_added, ones = 0.0, [float(piece.rows > 0) for piece in window.pieces]
        if owner.loss_is_scaled_for_ga:
            self._num_added = self.run.engine.agreement.total(sum(ones)) / self.run.engine.num_processes
            owner.current_gradient_accumulation_steps = self._num_added
        self._given = self._items_to_pass(window, numbers, self._total)
        if self._num_added:
            numbers = [*ones]
        self.run.losses.begin_update(window, numbers)
        return window

    def _items_to_pass(self, window: Window, numbers: list[float | None], total: Any) -> list[Any]:
        """Return the `num_items_in_batch` that `training_step` gets, for each micro-batch.

        It is the items of the micro-batch, so that a sum over them becomes a mean, which the core weights. A loss that
        is scaled for the whole update gets the items of the whole update, as in transformers.
        """
        if total is None:
            return [None] * len(window.pieces)
        own = [
            float(piece.rows) if items is None else items for piece, items in zip(window.pieces, numbers, strict=True)
        ]
        everyone = sum(own)
        factor = 1.0 if total is _OURS or not everyone else float(total) / everyone
        if self._num_added:
            read = sum(items for items, piece in zip(own, window.pieces, strict=True) if piece.rows)  # no pads
            return [torch.tensor(self.run.engine.agreement.total(read * factor))] * len(own)
        if self._scales_by_processes:
            factor *= self.run.engine.num_processes
        given: list[Any] = [
            torch.tensor(rows) if items is None else items for rows, items in zip(own, self._items, strict=True)
        ]
        return given if factor == 1.0 else [items * factor for items in given]

    def forward(self, batch: Any) -> Mapping[str, Any]:
        owner = owner_of(self.run)
        items = owner.item_counter.count(batch)
        given = torch.tensor(num_rows(batch)) if items is None else items
        return {"loss": LossCall(owner.compute_loss)(owner.core.model, batch, given)[0]}

    def perform(self, model: Any, batch: Any) -> None:
        run = self.run
        index, rows = run.losses.index, run.current_rows or 0
        # The core weights a placeholder, filled once the loss is known: `training_step` runs backward.
        loss = torch.ones((), device=run.engine.device)
        weighted = run.losses.weighted({"loss": loss, "batch_size": rows})
        self._weight = None if weighted is loss else weighted
        self._backward_losses = []
        owner_of(run).core.switch_optimizer("train")  # an event between micro-batches may have evaluated
        arguments = (model, batch, self._given[index]) if self._passes_items else (model, batch)
        try:
            with self._watching() if self._is_divided is None else nullcontext():
                loss.copy_(self._checked(owner_of(run).training_step(*arguments)))
        except StopTrainingError as error:
            run.trainer.backward_step(run.stand_in(batch, error)["loss"])
        self._note(loss, rows, index)

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Keep the loss that `compute_loss` returns: a `training_step` may divide it before backward."""
        owner = owner_of(self.run)
        compute_loss, is_own = owner.compute_loss, "compute_loss" in vars(owner)

        @functools.wraps(compute_loss)
        def watched(*args: Any, **kwargs: Any) -> Any:
            result = compute_loss(*args, **kwargs)
            self._computed = (result[0] if isinstance(result, tuple) else result).detach().clone()  # `/=` changes it
            return result

        vars(owner)["compute_loss"] = watched
        try:
            yield
        finally:
            del vars(owner)["compute_loss"]
            if is_own:
                vars(owner)["compute_loss"] = compute_loss

    def weigh(self, loss: Tensor) -> Tensor:
        """Return a micro-batch's mean loss, weighted by its share of the update's items; called before backward."""
        self.run.check_first_output({"loss": loss, "batch_size": 1}, "compute_loss")
        parts = self.run.settings.gradient_accumulation_steps
        is_divided = self._is_divided
        if is_divided is None and self._computed is not None:
            is_divided = bool(torch.isclose(loss.detach() * parts, self._computed))
            self._is_divided = is_divided if self._computed else None  # a loss of 0 does not tell
        if is_divided:
            loss = loss * parts
        self._backward_losses.append(loss.detach())
        if self._weight is None:
            return loss
        weight = self._weight.to(torch.promote_types(loss.dtype, torch.float32))
        return loss * (weight * self._num_added if self._num_added else weight)

    def _note(self, loss: Tensor, rows: int, index: int) -> None:
        items = self._items[index]
        if rows:
            self._entries.append((loss, 1.0 if self._num_added else float(rows if items is None else items)))
        if index < len(self._items) - 1:
            owner_of(self.run).call_event("on_substep_end")

    def _checked(self, loss: Any) -> Tensor:
        """Return `training_step`'s loss as the mean over its micro-batch."""
        if not isinstance(loss, Tensor):
            raise BatchLossError(f"training_step must return the detached loss, but returned a {type(loss).__name__}")
        if loss.numel() != 1:
            raise BatchLossError(
                f"training_step returned a loss of shape {tuple(loss.shape)}; it must return the mean loss, one number"
            )
        loss = loss.detach().reshape(())
        if self._num_added:
            added: Tensor = loss * self._num_added
            return added
        if not self._backward_losses and self._weight is not None:
            raise BatchLossError(
                "training_step did not call self.accelerator.backward(loss), which weights the loss of each "
                "micro-batch of an update. Call it instead of loss.backward()."
            )
        if self._num_shares is None:
            # transformers 4 returns the loss divided by `gradient_accumulation_steps`; the first loss decides.
            parts, given = self.run.settings.gradient_accumulation_steps, self._backward_losses
            known = [*given, sum(given, torch.zeros_like(loss))] if self._may_divide else []
            is_share = any(bool(torch.isclose(loss * parts, each.reshape(()))) for each in known)
            self._num_shares = None if is_share and not loss else parts if is_share else 1  # 0 is a share of 0
        mean: Tensor = loss if self._num_shares in (1, None) else loss * self._num_shares
        return mean

    def graph_inputs(self, batch: Any, index: int) -> Any:
        items = self._given[index]  # None if get_batch_samples returned none
        return {**super().graph_inputs(batch, index), "items": None if items is None else float(items)}

    def graphed(self, inputs: Any) -> Any:
        self._weight, self._backward_losses = inputs["weight"], []
        owner = owner_of(self.run)
        arguments = (inputs["batch"], inputs["items"]) if self._passes_items else (inputs["batch"],)
        with self._watching() if self._is_divided is None else nullcontext():
            return {"loss": self._checked(owner.training_step(owner.core.model, *arguments))}

    def reads_loss_alone(self) -> bool:
        owner = owner_of(self.run)
        is_default = owner.compute_loss_func is None and owner.label_smoother is None
        return is_default and all(owner.uses_default(name) for name in STEPS)

    def take_graphed(self, output: Any, index: int) -> None:
        loss, rows = output["loss"].clone(), self.run.current_rows or 0
        self.run.losses.note(index, loss, {"batch_size": rows})
        self._note(loss, rows, index)

    def participants(self) -> list[Any]:
        owner = owner_of(self.run)
        return [*(vars(owner).get(name) for name in STEPS), *owner.callback_handler.callbacks]

    def watchers(self) -> list[str]:
        owner = owner_of(self.run)
        found = [] if owner.graph_safe else [name for name in STEPS if not owner.uses_default(name)]
        for callback in owner.callback_handler.callbacks:
            if not getattr(callback, "graph_safe", False):
                found += [f"{type(callback).__name__}.{name}" for name in STEP_EVENTS if _listens(callback, name)]
        return found

    def discard(self) -> None:
        super().discard()
        self._entries = []

    def commit(self, window: Window) -> None:
        super().commit(window)
        hf_run = owner_of(self.run).core.hf_run
        hf_run.count_losses(self._entries, window.samples)
        for piece in window.pieces:
            if piece.rows:
                hf_run.counters.count(piece.batch)


def _listens(callback: Any, event: str) -> bool:
    """Whether a callback overrides an event; the base classes of both libraries share a name."""
    owner = next((each for each in type(callback).__mro__ if event in vars(each)), None)
    return event in getattr(callback, "__dict__", ()) or (owner is not None and owner.__name__ != "TrainerCallback")
