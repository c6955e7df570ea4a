"""Whole updates as CUDA graphs: what is captured, with which inputs, and how it is replayed.

An update of one micro-batch is one graph: forward, backward, clipping and the optimizer. An update of several is a
graph per micro-batch, which adds to gradients that stay in place, and one more for clipping and the optimizer; so each
micro-batch still gets its own seed. All graphs share one pool of memory. What changes from update to update is read
from buffers that are filled before a replay: the batch, the weights of its losses, the learning rates.

`UpdateGraphs` knows nothing of CUDA: a `Capturer` records and replays. Tests on the CPU give it one of their own.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from loopwright.engine.nested import iter_tensors, map_leaves
from loopwright.engine.seeding import generator_states, preserved_generators
from loopwright.errors import LoopwrightError

_WARM_UPS = 2


class NotCapturableError(LoopwrightError):
    """Updates cannot be recorded; the text says why, to be logged once."""


class NotYetCapturableError(NotCapturableError):
    """This update cannot be recorded, later ones can: the optimizer makes its state in its first step."""


class Capturer(Protocol):
    """Records what a function does to the device, to do it again."""

    def warm_up(self, function: Callable[[], Any]) -> None:
        """Run a function as it will be recorded."""

    def capture(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Record a function without running it; return what repeats it, and what it returned."""


class CudaCapturer:
    """Records on a stream of its own; all recordings share a pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, function: Callable[[], Any]) -> None:
        """Run a function on the stream that records."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            function()
        torch.cuda.current_stream().wait_stream(self._stream)

    def capture(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Record a function as a graph."""
        graph = torch.cuda.CUDAGraph()
        try:
            # Of this thread only: a loader's pinning thread and a checkpoint's writer may call CUDA meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                result = function()
        except BaseException:
            self._recover()
            raise
        return graph.replay, result

    def _recover(self) -> None:
        """Undo what a recording that was broken off leaves behind in torch."""
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        # The generator would refuse to draw ever after, and the allocator would take the recording to be under way:
        # memory that several streams have used would then never be free again.
        generator = torch.cuda.default_generators[index]
        generator.graphsafe_set_state(generator.clone_state())
        with contextlib.suppress(RuntimeError):  # it was not begun
            torch._C._cuda_endAllocateToPool(index, self._pool)
        torch.cuda.synchronize(self._device)


def signature(value: Any) -> Hashable:
    """Return what two batches must have in common to be inputs of one graph: structure, shapes, types, other values.

    Raises:
        NotCapturableError: a value is neither a tensor nor a plain one.
    """
    parts: list[Hashable] = []

    def note(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            parts.append((tuple(leaf.shape), leaf.dtype))
        elif isinstance(leaf, float):
            parts.append("float")  # becomes a buffer
        elif leaf is None or isinstance(leaf, (int, str)):
            parts.append(leaf)
        else:
            raise NotCapturableError(f"a batch holds a {type(leaf).__name__}, which no buffer can stand for")
        return leaf

    map_leaves(value, note)
    names = tuple(value) if isinstance(value, dict) else ()
    return (type(value).__name__, names, tuple(parts))


class StaticInputs:
    """Buffers on the device in the structure of a value, to be filled again and again. Floats become buffers too."""

    def __init__(self, value: Any, device: torch.device) -> None:
        self.value = map_leaves(value, lambda leaf: _buffer(leaf, device))
        self._buffers = list(iter_tensors(self.value))
        self._numbers: dict[int, float] = {}

    def fill(self, value: Any) -> None:
        """Copy a value of the same signature into the buffers; never waits for the device."""
        leaves: list[Any] = []
        map_leaves(value, lambda leaf: leaves.append(leaf) if isinstance(leaf, (Tensor, float)) else None)
        targets, sources = [], []
        for index, (buffer, leaf) in enumerate(zip(self._buffers, leaves, strict=True)):
            if isinstance(leaf, Tensor):
                if leaf.device == buffer.device:
                    targets.append(buffer)
                    sources.append(leaf)
                else:
                    buffer.copy_(leaf, non_blocking=True)
            elif self._numbers.get(index) != leaf:
                buffer.fill_(leaf)
                self._numbers[index] = leaf
        if targets:
            torch._foreach_copy_(targets, sources)


def _buffer(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, Tensor):
        return torch.empty_like(leaf, device=device)
    return torch.zeros((), dtype=torch.float32, device=device) if isinstance(leaf, float) else leaf


@dataclass
class _Recorded:
    """One graph: its inputs, what repeats it, and what it writes."""

    inputs: StaticInputs
    replay: Callable[[], None]
    output: Any


@dataclass
class Step:
    """What an update does, as the graphs see it.

    Attributes:
        micro_batch: forward and backward on inputs; returns what is to be read after a replay.
        apply: clips and steps the optimizer; returns the gradient's norm, or None.
        begin: called before anything is recorded, to wait for what else uses the device.
        restore: puts back the buffers of the model after a warm-up.
        parameters: everything that gets gradients.
        optimizer: whose learning rates are read from buffers.
        device: where all this happens.
    """

    micro_batch: Callable[[Any], Any]
    apply: Callable[[], Tensor | None]
    begin: Callable[[], None]
    restore: Callable[[], None]
    parameters: list[nn.Parameter]
    optimizer: torch.optim.Optimizer
    device: torch.device


@dataclass
class UpdateGraphs:
    """The graphs of a run, made when a planned shape comes for the first time.

    Attributes:
        step: what is recorded.
        capturer: what records it.
        norm: the gradient's norm of the last update, where it is clipped.
    """

    step: Step
    capturer: Capturer
    norm: Tensor | None = None
    _whole: dict[Hashable, _Recorded] = field(default_factory=dict)
    _parts: dict[Hashable, _Recorded] = field(default_factory=dict)
    _apply: _Recorded | None = None
    _gradients: dict[int, Tensor] = field(default_factory=dict)
    _rates: list[Tensor] = field(default_factory=list)
    _rate_values: list[float] = field(default_factory=list)
    _recorded_for: Any = None
    _has_collected: bool = False

    def __len__(self) -> int:
        """Return how many graphs there are."""
        return len(self._whole) + len(self._parts) + (self._apply is not None)

    def replay(self, inputs: list[Any], before: Callable[[int], None], after: Callable[[int, Any], None]) -> None:
        """Run an update.

        Args:
            inputs: of its micro-batches: what `Step.micro_batch` takes, of any device; floats may change too.
            before: called with the index of each micro-batch before it is replayed, to seed it.
            after: called with the index and the output of each, which the next replay writes over.

        Raises:
            NotCapturableError: it cannot be recorded; nothing has changed.
        """
        keys = [signature(value) for value in inputs]
        graphs = [self._find(key, value, is_alone=len(inputs) == 1) for key, value in zip(keys, inputs, strict=True)]
        if len(inputs) > 1 and self._apply is None:
            self._apply = self._record_apply()
        self._fill_rates()
        for index, (graph, value) in enumerate(zip(graphs, inputs, strict=True)):
            graph.inputs.fill(value)
            before(index)
            graph.replay()
            after(index, graph.output[0])
        if len(inputs) == 1:
            self.norm = graphs[0].output[1]
        else:
            assert self._apply is not None
            self._apply.replay()
            self.norm = self._apply.output

    def forget_if_changed(self) -> None:
        """Drop graphs that were recorded for other settings of the optimizer, or for other weights being trained."""
        options = [
            [value for name, value in group.items() if name not in ("params", "lr")]
            for group in self.step.optimizer.param_groups
        ]
        trained = [parameter.requires_grad for parameter in self.step.parameters]
        if (options, trained) != self._recorded_for:
            self._whole, self._parts, self._apply = {}, {}, None
            self._gradients, self._rates = {}, []
            self._recorded_for = (options, trained)

    # --- recording ----------------------------------------------------------------------------------------------

    def _find(self, key: Hashable, value: Any, *, is_alone: bool) -> _Recorded:
        known = self._whole if is_alone else self._parts
        if key not in known:
            known[key] = self._record(value, is_alone=is_alone)
        return known[key]

    def _record(self, value: Any, *, is_alone: bool) -> _Recorded:
        step = self.step
        inputs = StaticInputs(value, step.device)
        inputs.fill(value)
        with self._no_trace():
            before = _host_states(step.device)
            self.capturer.warm_up(lambda: step.micro_batch(inputs.value))
            if _host_states(step.device) != before:
                raise NotCapturableError("the forward pass draws random numbers on the host: a graph would repeat them")
            for _ in range(_WARM_UPS - 1):
                self.capturer.warm_up(lambda: step.micro_batch(inputs.value))
            if is_alone:
                self._drop_gradients()
                replay, output = self._capture(lambda: (step.micro_batch(inputs.value), step.apply()))
            else:
                self._attach_gradients()
                replay, output = self._capture(lambda: (step.micro_batch(inputs.value), None))
        return _Recorded(inputs, replay, output)

    def _record_apply(self) -> _Recorded:
        with self._no_trace():
            self._attach_gradients()

            def apply() -> Tensor | None:
                norm = self.step.apply()
                torch._foreach_zero_(list(self._gradients.values()))
                return norm

            replay, norm = self._capture(apply)
        return _Recorded(StaticInputs({}, self.step.device), replay, norm)

    def _capture(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        self._make_rates()
        before = _state_entries(self.step.optimizer)
        with self._rates_from_buffers():
            recorded = self.capturer.capture(function)
        if _state_entries(self.step.optimizer) != before:
            for parameter in set(self.step.optimizer.state) - set(before):
                del self.step.optimizer.state[parameter]
            raise NotYetCapturableError("the optimizer has no state yet")
        return recorded

    @contextlib.contextmanager
    def _no_trace(self) -> Iterator[None]:
        """Run a block that warms up and records; afterwards weights, buffers, gradients and generators are as before.

        Recording runs nothing, and warming up steps no optimizer, so weights and its state are never touched.
        """
        self.step.begin()
        if not self._has_collected:
            self._has_collected = True
            gc.collect()  # a backward pass that somebody has dropped in a cycle would take part, on its own stream
        with preserved_generators(self.step.device):
            try:
                yield
            except RuntimeError as error:
                first: BaseException = error  # of a recording that was broken off, CUDA's last error says nothing
                while isinstance(first.__context__, RuntimeError):
                    first = first.__context__
                lines = str(first).strip().splitlines()
                raise NotCapturableError(lines[0] if lines else type(first).__name__) from error
            finally:
                self.step.restore()
                self._drop_gradients()
                if self._gradients:
                    torch._foreach_zero_(list(self._gradients.values()))

    # --- gradients and learning rates ---------------------------------------------------------------------------

    def _drop_gradients(self) -> None:
        for parameter in self.step.parameters:
            parameter.grad = None

    def _attach_gradients(self) -> None:
        """Give the parameters that have a gradient one that stays in place, at zero."""
        having = {id(each): each for each in self.step.parameters if each.grad is not None}
        if not self._gradients:
            self._gradients = {number: torch.zeros_like(each) for number, each in having.items()}
        elif having and having.keys() != self._gradients.keys():
            raise NotCapturableError("which parameters get gradients differs from batch to batch")
        for parameter in self.step.parameters:
            parameter.grad = self._gradients.get(id(parameter))
        if self._gradients:
            torch._foreach_zero_(list(self._gradients.values()))

    def _make_rates(self) -> None:
        if not self._rates:
            groups = self.step.optimizer.param_groups
            self._rates = [torch.zeros((), dtype=torch.float32, device=self.step.device) for _ in groups]
            self._rate_values = [float("nan")] * len(groups)

    def _fill_rates(self) -> None:
        for index, group in enumerate(self.step.optimizer.param_groups):
            value = float(group["lr"])
            if value != self._rate_values[index]:
                self._rates[index].fill_(value)
                self._rate_values[index] = value

    @contextlib.contextmanager
    def _rates_from_buffers(self) -> Iterator[None]:
        """Let the optimizer read its learning rates from buffers, as long as it is recorded."""
        groups = self.step.optimizer.param_groups
        kept = [{name: group[name] for name in ("lr", "capturable") if name in group} for group in groups]
        for group, rate in zip(groups, self._rates, strict=True):
            group["lr"] = rate
            if "capturable" in group:
                group["capturable"] = True
        try:
            yield
        finally:
            for group, values in zip(groups, kept, strict=True):
                for name, value in values.items():
                    group[name] = value


@contextlib.contextmanager
def single_precision_rates(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Run a block in which the learning rates are what a buffer of a graph would hold: rounded to float32."""
    kept = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        if not isinstance(group["lr"], Tensor):
            group["lr"] = float(np.float32(group["lr"]))
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, kept, strict=True):
            group["lr"] = rate


def _state_entries(optimizer: torch.optim.Optimizer) -> dict[Any, set[str]]:
    """Return which entries the state of each parameter has."""
    return {
        parameter: {name for name, value in state.items() if value is not None}
        for parameter, state in optimizer.state.items()
        if state
    }


def _host_states(device: torch.device) -> tuple[Any, ...]:
    """Return the states of the generators whose numbers a graph would repeat: all but the device's own."""
    states = generator_states()
    numbers = states["numpy"]
    on_host = [] if device.type == "cpu" else states["torch"].tolist()
    return states["python"], [numbers[0], numbers[1].tolist(), *numbers[2:]], on_host
