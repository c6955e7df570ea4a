"""Whole updates as CUDA graphs: their capture, inputs and replay.

An update of one micro-batch is one graph: forward, backward, clipping and the optimizer. An update of several has one
graph per micro-batch, which accumulates into fixed gradients, and one for clipping and the optimizer; so each
micro-batch keeps its own seed. All graphs share one memory pool. Batch, loss weights and learning rates are copied into
static buffers before each replay.

`UpdateGraphs` is independent of CUDA: a `Capturer` records and replays. CPU tests pass their own.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from loopwright.engine import memory
from loopwright.engine.host_state import HostState
from loopwright.engine.nested import is_container, iter_leaves, iter_tensors, map_children, map_leaves, map_tensors
from loopwright.engine.seeding import generator_states, preserved_generators, restore_generator_states
from loopwright.engine.temporary import replaced
from loopwright.errors import LoopwrightError, StopTrainingError

_OWN_ERRORS = (LoopwrightError, StopTrainingError)


class NotCapturableError(LoopwrightError):
    """Updates cannot be recorded; the message gives the reason, to be logged once.

    `key` is the shape that cannot be, while others may; None if it is not due to a shape.
    """

    key: str | None = None
    is_out_of_memory = False


class NotYetCapturableError(NotCapturableError):
    """This update cannot be recorded, but later ones can: the optimizer creates its state in its first step."""


class Capturer(Protocol):
    """Records the device work of a function, to replay it."""

    def warm_up(self, function: Callable[[], Any]) -> None:
        """Run a function the way it will be recorded."""

    def capture(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Record a function without running it; return a function that replays it, and its result."""

    def forget(self) -> None:
        """Free what was recorded; it is not replayed any more."""


class CudaCapturer:
    """Records on its own stream; all recordings share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self.forget()

    def forget(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # Kept, since torch refuses to record into a pool whose graphs are all gone.
        self._first: torch.cuda.CUDAGraph | None = None

    def warm_up(self, function: Callable[[], Any]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), as_if_capturing(True):
            function()
        torch.cuda.current_stream().wait_stream(self._stream)

    def capture(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        # `torch.cuda.graph` always empties the cache, which makes later allocations slow. That is needed only if memory
        # is short: during a recording torch does not free cached blocks.
        # The first time it returns the memory of warm-ups: graphs have their own.
        is_short = torch.cuda.mem_get_info(self._device)[0] < torch.cuda.memory_reserved(self._device)
        if self._first is None or is_short:
            torch.cuda.empty_cache()
        is_collecting = gc.isenabled()
        gc.disable()  # garbage may hold other graphs, which must not be destroyed now
        try:
            with torch.cuda.stream(self._stream):
                # Only for this thread: a loader's pinning thread and a checkpoint writer may call CUDA meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = function()
                finally:
                    graph.capture_end()
        except BaseException:
            self._recover()
            raise
        finally:
            if is_collecting:
                gc.enable()
        self._first = self._first or graph
        return graph.replay, result

    def _recover(self) -> None:
        """Reset the torch state that an aborted recording leaves behind."""
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        # Otherwise the generator would refuse to draw, and the allocator would assume a recording in progress and never
        # free memory used by several streams.
        generator = torch.cuda.default_generators[index]
        generator.graphsafe_set_state(generator.clone_state())
        # torch.cuda.graph itself calls it at the end of a recording, but not of one that fails.
        with contextlib.suppress(RuntimeError):  # it had not begun
            torch._C._cuda_endAllocateToPool(index, self._pool)
        torch.cuda.synchronize(self._device)
        self._stream = torch.cuda.Stream(self._device)
        self.forget()  # later recordings have nothing to do with the aborted one


def as_if_capturing(is_capturing: bool) -> contextlib.AbstractContextManager[None]:
    """Give code that asks whether its stream is captured this answer, as transformers' masks do."""
    return replaced(vars(torch.cuda), {"is_current_stream_capturing": lambda: is_capturing})


def signature(value: Any) -> tuple[Hashable, Hashable]:
    """Return the shapes and the constants of a value: one graph fits all values that share both.

    Constants are texts and whole numbers. NotCapturableError is raised for values of other kinds.
    """
    shapes: list[Hashable] = []
    constants: list[Hashable] = []

    def note(part: Any) -> Any:
        if isinstance(part, Tensor) and part.layout is torch.strided and not part.is_nested:
            shapes.append((tuple(part.shape), part.dtype, None if part.is_contiguous() else part.stride()))
        elif isinstance(part, float):
            shapes.append("float")  # becomes a buffer
        elif part is None or isinstance(part, (int, str)):
            shapes.append(type(part).__name__)
            constants.append(part)
        elif is_container(part):
            names = tuple(part) if isinstance(part, Mapping) else len(part) if isinstance(part, (list, tuple)) else None
            shapes.append((type(part).__name__, names))
            map_children(part, note)
        else:
            raise NotCapturableError(f"a batch holds a {type(part).__name__}, which cannot become a buffer")
        return part

    note(value)
    return tuple(shapes), tuple(constants)


@functools.lru_cache(maxsize=256)
def _digest(signature: Hashable) -> str:
    return hashlib.sha256(repr(signature).encode()).hexdigest()[:16]


def shape_key(value: Any, *, is_alone: bool) -> str:
    """Return the name of the graph that fits a micro-batch, the same in every process: kind, shapes, constants."""
    shapes, constants = signature(value)
    return f"{'update' if is_alone else 'micro-batch'} {_digest(shapes)} {_digest(constants)}"


class StaticInputs:
    """Reusable device buffers in the structure of a value. Floats become buffers too, of a precision."""

    def __init__(self, value: Any, device: torch.device, precision: torch.dtype) -> None:
        self._value = map_leaves(value, lambda leaf: _buffer(leaf, device, precision))
        self._buffers = list(iter_tensors(self._value))
        self._numbers: dict[int, float] = {}

    @property
    def value(self) -> Any:
        """The buffers, in new containers: a model may take things out of them."""
        return map_tensors(self._value, lambda buffer: buffer)

    @torch.no_grad()  # a model may ask for the gradient of its inputs
    def fill(self, value: Any) -> None:
        """Copy a value of the same signature into the buffers, without a device sync."""
        leaves = [leaf for leaf in iter_leaves(value) if isinstance(leaf, (Tensor, float))]
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
            torch._foreach_copy_(targets, sources)  # one kernel for all tensors


def _buffer(leaf: Any, device: torch.device, precision: torch.dtype) -> Any:
    if isinstance(leaf, Tensor):
        return torch.empty_like(leaf, device=device)
    return torch.zeros((), dtype=precision, device=device) if isinstance(leaf, float) else leaf


@dataclass
class _Recorded:
    inputs: StaticInputs
    replay: Callable[[], None]
    output: Any
    held: list[Any]  # what the warm-up made and the model holds no more, such as a mask of this shape


@dataclass
class Step:
    """An update, as the graphs see it."""

    micro_batch: Callable[[Any], Any]  # forward and backward on inputs; returns the outputs to read after a replay
    apply: Callable[[], Tensor | None]  # clips and steps the optimizer; returns the gradient's norm, or None
    refresh: Callable[[], None]  # called at the start of every update, before its first micro-batch
    begin: Callable[[], None]  # called before any recording, to wait for other work on the device
    restore: Callable[[], None]  # restores the buffers of the model after a warm-up
    num_idle_draws: int  # random numbers that a forward pass draws on the host, and that change nothing
    parameters: list[nn.Parameter]  # everything with gradients
    optimizer: torch.optim.Optimizer  # its learning rates are read from buffers
    device: torch.device
    host_state: Callable[[], HostState] = partial(HostState, (), ())  # everything else that Python reads


@dataclass
class UpdateGraphs:
    """The graphs of a run, each recorded when it is first replayed; `norm` is the last update's gradient norm."""

    step: Step
    capturer: Capturer
    norm: Tensor | None = None
    _graphs: dict[str, _Recorded] = field(default_factory=dict)
    _apply: tuple[Callable[[], None], Any] | None = None  # its replay, and the gradient's norm
    _gradients: dict[int, Tensor] = field(default_factory=dict)
    _rates: list[Tensor] = field(default_factory=list)
    _rate_values: list[float] = field(default_factory=list)
    _recorded_for: Any = None
    _settings: str = ""
    _has_collected: bool = False
    _host_state: HostState | None = None  # of the last replay
    _caches: set[str] = field(default_factory=set)  # its places that forward passes change, and that do not count

    def __len__(self) -> int:
        return len(self._graphs) + (self._apply is not None)

    def replay(
        self, keys: list[str], inputs: list[Any], before: Callable[[int], None], after: Callable[[int, Any], None]
    ) -> None:
        """Run an update, given the inputs of its micro-batches, on any device, and their `shape_key`s.

        `before` gets the index of each micro-batch, to seed it; `after` the index and the output, which the next replay
        overwrites. NotCapturableError means that it cannot be recorded; nothing was changed.
        """
        is_alone = len(inputs) == 1
        values = dict(zip(keys, inputs, strict=True))
        while new := [key for key in values if key not in self._graphs]:  # again after a recording that failed
            self._graphs[new[0]] = self._record(new[0], values[new[0]], is_alone=is_alone)
        graphs = [self._graphs[key] for key in keys]
        if not is_alone and self._apply is None:
            self._apply = self._record_apply()
        if self._host_state is None:
            self._host_state = self.step.host_state()
        for index, group in enumerate(self.step.optimizer.param_groups):
            rate = float(group["lr"])
            if rate != self._rate_values[index]:
                self._rates[index].fill_(rate)
                self._rate_values[index] = rate
        if not is_alone:
            self.step.refresh()
        for index, (graph, value) in enumerate(zip(graphs, inputs, strict=True)):
            graph.inputs.fill(value)
            before(index)
            graph.replay()
            after(index, graph.output[0])
        if is_alone:
            self.norm = graphs[0].output[1]
        else:
            assert self._apply is not None
            replay, self.norm = self._apply
            replay()

    def run(self, inputs: list[Any], before: Callable[[int], None], after: Callable[[int, Any], None]) -> None:
        """Run an update as it will be recorded: the first one, in which the optimizer creates its state."""
        step, outputs = self.step, []
        try:
            step.refresh()
            for index, value in enumerate(inputs):
                own = self._inputs_like(value)
                own.fill(value)
                before(index)
                self.capturer.warm_up(lambda own=own: outputs.append(step.micro_batch(own.value)))  # type: ignore[misc]
                after(index, outputs.pop())
        except _OWN_ERRORS:
            raise
        except Exception as error:
            step.restore()
            self._drop_gradients()
            raise self._not_capturable(error, None) from error
        with single_precision_rates(step.optimizer):
            self.norm = step.apply()
        self._drop_gradients()

    def rehearse(self, value: Any) -> None:
        """Run a micro-batch on inputs as for a recording, without recording it."""
        with self._no_trace():
            self.step.refresh()
            self.capturer.warm_up(lambda: self.step.micro_batch(value))

    def forget_if_changed(self) -> tuple[str, bool]:
        """Drop graphs that no longer fit; return a digest of the optimizer's settings and of which weights are trained.

        The second value is `has_moved`.
        """
        options = [
            [value for name, value in group.items() if name not in ("params", "lr")]
            for group in self.step.optimizer.param_groups
        ]
        trained = [parameter.requires_grad for parameter in self.step.parameters]
        if (options, trained) != self._recorded_for:
            self.forget()
            self._recorded_for, self._settings = (options, trained), _digest(repr((options, trained)))
        has_moved = self.has_moved()
        if has_moved:
            self.forget()
        return self._settings, has_moved

    def has_moved(self) -> bool:
        """Whether attributes, hooks, or where weights lie have changed since the last replay."""
        return self._host_state is not None and self._host_state.has_changed(self._caches)

    def forget(self) -> None:
        self._graphs, self._apply, self._host_state = {}, None, None
        self._gradients, self._rates = {}, []
        self.capturer.forget()

    def _record(self, key: str, value: Any, *, is_alone: bool) -> _Recorded:
        is_clean = not self._has_collected
        try:
            return self._record_once(key, value, is_alone=is_alone)
        except NotCapturableError as error:
            if is_clean or error.key is None or error.is_out_of_memory:
                raise
        gc.collect()  # old garbage must not decide what can be recorded: a resumed run has none
        return self._record_once(key, value, is_alone=is_alone)

    def _record_once(self, key: str, value: Any, *, is_alone: bool) -> _Recorded:
        step = self.step
        with self._no_trace(key):
            inputs = self._inputs_like(value)

            def warm_up() -> None:
                inputs.fill(value)  # each time: a model may change its inputs
                self.capturer.warm_up(lambda: step.micro_batch(inputs.value))

            step.refresh()
            before, host_state = generator_states(), step.host_state()
            warm_up()
            if draws_on_host(before, step.device, step.num_idle_draws):
                raise NotCapturableError("the forward pass draws random numbers on the host: a graph would repeat them")
            if not self._graphs:
                warm_up()
            if is_alone:
                self._drop_gradients()
            else:
                self._attach_gradients()

            def update() -> tuple[Any, Tensor | None]:
                if is_alone:
                    step.refresh()
                return step.micro_batch(inputs.value), step.apply() if is_alone else None

            inputs.fill(value)
            warm = step.host_state()
            recorded = self._capture(update)
            reason = warm.why_not_repeated()
            if reason is not None:
                host_state.restore()
                raise NotCapturableError(reason)
            changes = list(host_state.changes())
        self._caches.update(place for place, _ in changes)
        self._host_state = None
        # What has a gradient is of this pass, and would keep all of its memory.
        held = [leaf for leaf in iter_leaves(changes) if getattr(leaf, "grad_fn", None) is None]
        return _Recorded(inputs, *recorded, held)

    def _record_apply(self) -> tuple[Callable[[], None], Any]:
        with self._no_trace():
            self._attach_gradients()

            def apply() -> Tensor | None:
                norm = self.step.apply()
                if self._gradients:
                    torch._foreach_zero_(list(self._gradients.values()))  # one kernel for all tensors
                return norm

            return self._capture(apply)

    def _capture(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        if not self._rates:
            groups = self.step.optimizer.param_groups
            self._rates = [torch.zeros((), dtype=torch.float32, device=self.step.device) for _ in groups]
            self._rate_values = [float("nan")] * len(groups)
        before = _state_entries(self.step.optimizer)
        # While it is recorded, the optimizer reads its learning rates from buffers.
        options = [
            {"lr": rate, **({"capturable": True} if "capturable" in group else {})}
            for group, rate in zip(self.step.optimizer.param_groups, self._rates, strict=True)
        ]
        try:
            with _replaced_options(self.step.optimizer, options):
                recorded = self.capturer.capture(function)
        except BaseException:
            self.forget()  # an aborted recording replaces the generator's state, from which graphs draw
            raise
        if _state_entries(self.step.optimizer) != before:
            for parameter in set(self.step.optimizer.state) - set(before):
                del self.step.optimizer.state[parameter]
            raise NotYetCapturableError("the optimizer has no state yet")
        return recorded

    @contextlib.contextmanager
    def _no_trace(self, key: str | None = None) -> Iterator[None]:
        """Run a block that warms up and records, then restore what that changes: buffers, gradients, generators."""
        self.step.begin()
        # Frees autograd graphs in cycles, which would be recorded on their own streams; all of them only once.
        gc.collect(1 if self._has_collected else 2)
        self._has_collected = True
        with preserved_generators(self.step.device):
            try:
                yield
            except _OWN_ERRORS:
                raise
            except Exception as error:  # one that is not due to the recording comes again in the eager update
                raise self._not_capturable(error, key) from error
            finally:
                self.step.restore()
                self._drop_gradients()
                if self._gradients:
                    torch._foreach_zero_(list(self._gradients.values()))

    def _not_capturable(self, error: BaseException, key: str | None) -> NotCapturableError:
        first = error  # after an aborted recording, CUDA's last error is meaningless
        while isinstance(first.__context__, (RuntimeError, MemoryError)):
            first = first.__context__
        reason = (str(first).strip().splitlines() or [type(first).__name__])[0]
        found = NotCapturableError(reason)
        found.key, found.is_out_of_memory = key, memory.is_out_of_memory(first)
        if found.is_out_of_memory:
            memory.forget_frames(error)
            memory.release_memory(self.step.device)
        return found

    def _inputs_like(self, value: Any) -> StaticInputs:
        is_double = any(parameter.dtype == torch.float64 for parameter in self.step.parameters)
        return StaticInputs(value, self.step.device, torch.float64 if is_double else torch.float32)

    def _drop_gradients(self) -> None:
        for parameter in self.step.parameters:
            parameter.grad = None

    def _attach_gradients(self) -> None:
        """Give the parameters that have a gradient one that stays in place, at zero."""
        having = {id(each): each for each in self.step.parameters if each.grad is not None}
        if not self._gradients:
            self._gradients = {number: torch.zeros_like(each) for number, each in having.items()}
        elif having and having.keys() != self._gradients.keys():
            raise RuntimeError("which parameters get gradients differs from batch to batch")
        for parameter in self.step.parameters:
            parameter.grad = self._gradients.get(id(parameter))
        if self._gradients:
            torch._foreach_zero_(list(self._gradients.values()))


@contextlib.contextmanager
def _replaced_options(optimizer: torch.optim.Optimizer, options: list[dict[str, Any]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for group, others in zip(optimizer.param_groups, options, strict=True):
            stack.enter_context(replaced(group, others))
        yield


def single_precision_rates(optimizer: torch.optim.Optimizer) -> contextlib.AbstractContextManager[None]:
    """Run a block with learning rates rounded to float32, as a graph's buffer holds them."""
    rates = [group["lr"] for group in optimizer.param_groups]
    rounded = [rate if isinstance(rate, Tensor) else float(np.float32(rate)) for rate in rates]
    return _replaced_options(optimizer, [{"lr": rate} for rate in rounded])


def _state_entries(optimizer: torch.optim.Optimizer) -> dict[Any, set[str]]:
    return {
        parameter: {name for name, value in state.items() if value is not None}
        for parameter, state in optimizer.state.items()
        if state
    }


def draws_on_host(before: dict[str, Any], device: torch.device, num_idle: int) -> bool:
    """Whether anything but `num_idle` uniform numbers was drawn from the host's generators since these states."""
    after = _comparable(generator_states(), device)
    if num_idle and after != _comparable(before, device):
        restore_generator_states(before)
        for _ in range(num_idle):
            torch.rand([])
        before = generator_states()
    return after != _comparable(before, device)


def _comparable(states: dict[str, Any], device: torch.device) -> list[Any]:
    name, words, *rest = states["numpy"]
    own = [] if device.type == "cpu" else states["torch"].tolist()  # on the CPU it is the device's generator
    return [states["python"], name, words.tolist(), *rest, own]
