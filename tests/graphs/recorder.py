"""A stand-in for CUDA graphs on the CPU: it records nothing, and runs the function again at every replay."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from loopwright import Trainer
from loopwright.engine.graphs import single_precision_rates
from loopwright.engine.nested import iter_tensors, map_tensors


class FakeCapturer:
    """Behaves as CUDA does: capturing changes nothing, and a replay writes to the tensors that the capture returned."""

    is_active = False  # while something is captured or replayed: a model may have other bits then, as on a GPU

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, fails_with: str = "") -> None:
        self.model, self.optimizer, self.fails_with = model, optimizer, fails_with
        self.num_captures = self.num_replays = self.num_warm_ups = self.num_aborted = self.num_forgotten = 0

    def warm_up(self, function: Callable[[], Any]) -> None:
        self.num_warm_ups += 1
        function()

    def capture(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        if self.fails_with:
            raise RuntimeError(self.fails_with)
        parameters = list(self.model.parameters())
        kept = [parameter.detach().clone() for parameter in parameters]
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        gradients = [parameter.grad for parameter in parameters]
        numbers = [None if gradient is None else gradient.clone() for gradient in gradients]
        state = copy.deepcopy(dict(self.optimizer.state_dict()["state"]))
        groups = [dict(group) for group in self.optimizer.param_groups]
        self.num_aborted += 1
        with torch.random.fork_rng(), self._active():
            output = function()
        self.num_aborted -= 1
        made_at = self.num_aborted, self.num_forgotten
        self.num_captures += 1
        held = self._hold(output)
        with torch.no_grad():
            for parameter, value in zip(parameters, kept, strict=True):
                parameter.copy_(value)
            for buffer, value in zip(self.model.buffers(), buffers, strict=True):
                buffer.copy_(value)
            for gradient, value in zip(gradients, numbers, strict=True):
                if gradient is not None and value is not None:
                    gradient.copy_(value)
            ordered = [each for group in self.optimizer.param_groups for each in group["params"]]
            for number, entries in state.items():
                for name, value in entries.items():
                    if isinstance(value, torch.Tensor):
                        self.optimizer.state[ordered[number]][name].copy_(value)
        rates = [group["lr"] for group in groups]

        def replay() -> None:
            # An aborted recording replaces the generator's state, from which graphs draw.
            assert made_at == (self.num_aborted, self.num_forgotten)
            self.num_replays += 1
            current = [group["lr"] for group in self.optimizer.param_groups]
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            with self._active():
                again = self._hold(function())
            for old, new in zip(iter_tensors(held), iter_tensors(again), strict=True):
                old.copy_(new)
            for parameter in parameters:
                parameter.grad = None
            for group, rate in zip(self.optimizer.param_groups, current, strict=True):
                group["lr"] = rate

        return replay, held

    def forget(self) -> None:
        self.num_forgotten += 1

    @staticmethod
    @contextlib.contextmanager
    def _active() -> Iterator[None]:
        FakeCapturer.is_active = True
        try:
            yield
        finally:
            FakeCapturer.is_active = False

    @staticmethod
    def _hold(output: Any) -> Any:
        return map_tensors(output, lambda tensor: tensor.detach().clone())


class GraphedTrainer(Trainer):
    fails_with = ""
    capturer: FakeCapturer | None = None

    def create_capturer(self) -> FakeCapturer:
        self.capturer = FakeCapturer(self.model, self.optimizer, self.fails_with)
        return self.capturer


class EagerTrainer(Trainer):
    """A trainer that runs every update operation by operation, with learning rates as graphs have them: in float32."""

    def optimizer_step(self) -> None:
        with single_precision_rates(self.optimizer):
            super().optimizer_step()
