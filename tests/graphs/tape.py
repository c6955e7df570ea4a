"""CUDA graphs on the CPU: operations are recorded with their memory, and replayed without any Python."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from loopwright import Trainer
from loopwright.engine.graphs import as_if_capturing

WAITS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}


def tensors(*values: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


class Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Callable[[], Any], list[torch.Tensor | None]]] = []
        self.before: dict[int, tuple[Any, Any]] = {}  # memory from outside, as it was
        self.own: dict[int, Any] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in WAITS:
            raise RuntimeError("operation not permitted when stream is capturing")
        kwargs = kwargs or {}
        given = {each.untyped_storage()._cdata: each.untyped_storage() for each in tensors(args, kwargs)}
        self.before |= {key: (each, each.clone()) for key, each in given.items() if key not in self.own | self.before}
        result = function(*args, **kwargs)
        new = [each if each.untyped_storage()._cdata not in given else None for each in tensors(result)]
        self.own |= {each.untyped_storage()._cdata: each.untyped_storage() for each in new if each is not None}
        self.operations.append((lambda: function(*args, **kwargs), new))
        return result

    def undo(self) -> None:
        for memory, numbers in self.before.values():
            memory.copy_(numbers)

    @torch.no_grad()
    def replay(self) -> None:
        for operation, results in self.operations:
            for old, new in zip(results, tensors(operation()), strict=True):
                if old is not None:
                    old.copy_(new)


class TapeCapturer:
    def warm_up(self, function: Callable[[], Any]) -> None:
        with as_if_capturing(True):
            function()

    def capture(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        tape = Tape()
        with torch.random.fork_rng():
            try:
                with tape, as_if_capturing(True):
                    result = function()
            finally:
                tape.undo()
        return tape.replay, result

    def forget(self) -> None:
        pass


class TapedTrainer(Trainer):
    def create_capturer(self) -> TapeCapturer:
        return TapeCapturer()
