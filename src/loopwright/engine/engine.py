"""The engine: accelerate behind one interface.

It places and wraps the model for precision and processes, runs backward, unscales and clips, and unwraps at the end.
loopwright shards data and weights losses itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import is_
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from loopwright.engine import processes
from loopwright.engine.nested import map_tensors
from loopwright.engine.sharding import clip_norm, create_sharding, is_sharded, local, reshard, shard
from loopwright.engine.temporary import replaced
from loopwright.errors import ConfigError

if TYPE_CHECKING:
    from accelerate import Accelerator

_ABSENT = object()
_HALVES = (torch.bfloat16, torch.float16)
_NOT_OFFERED = ("DEEPSPEED", "MEGATRON_LM")


def create_accelerator(
    mixed_precision: str | None = None,
    use_cpu: bool = False,
    sharding: Any = None,
    ddp_options: Mapping[str, Any] | None = None,
) -> Accelerator:
    """Create a new Accelerator; without precision or sharding, accelerate's own configuration decides."""
    from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs, PartialState

    # Under torchrun without an accelerator, accelerate needs this: it would join the process group, and still treat
    # each process as the only one.
    on_cpu = "LOCAL_RANK" in os.environ and not torch.accelerator.is_available()
    is_alone = PartialState._shared_state.get("num_processes") == 1
    if on_cpu and is_alone and processes.is_distributed():  # a library asked first, without it
        PartialState._reset_state()
        forget_precision()
    patience = InitProcessGroupKwargs(init_method=processes.joining_method(), timeout=processes.collective_timeout())
    with replaced(os.environ, {"ACCELERATE_USE_CPU": "true"} if use_cpu else {}):  # read by its constructor
        handlers = [patience, DistributedDataParallelKwargs(**(ddp_options or {}))]
        make = partial(Accelerator, mixed_precision=mixed_precision, cpu=on_cpu, kwargs_handlers=handlers)
        return create_sharding(make, sharding)


def forget_precision() -> None:
    """Allow the next Accelerator another precision: accelerate keeps one per process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state()  # accelerate's own tests use it; there is no public way
    GradientState._reset_state()


@contextmanager
def outputs_as_computed(model: Any) -> Iterator[None]:
    """Run a block in which accelerate casts only scalars of a model's outputs to float32: nobody reads the others."""
    forward = vars(model).get("forward") if isinstance(model, nn.Module) else None
    # accelerate's casts around its autocast.
    inner = getattr(getattr(getattr(forward, "__func__", forward), "__wrapped__", None), "model_forward", None)
    if inner is None:
        yield
        return
    inner = MethodType(inner, model) if isinstance(forward, MethodType) else inner

    def computed(*args: Any, **kwargs: Any) -> Any:
        outputs = inner(*args, **kwargs)
        return map_tensors(outputs, lambda each: each.float() if each.numel() == 1 and each.dtype in _HALVES else each)

    with replaced(vars(model), {"forward": computed}):
        yield


def check_reduction(reduction: str, model: Any) -> None:
    """Refuse exact gradient sums for modules that depend on the number of processes; the ConfigError names them."""
    if reduction != "exact" or not isinstance(model, nn.Module):
        return
    names = [
        name
        for name, module in model.named_modules()
        # The common base of all batch norms, lazy and synchronized ones included.
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats
    ]
    if names:
        raise ConfigError(
            f'reduction="exact" cannot be exact for {", ".join(names[:3])}: the running means of batch norm depend on '
            'how many processes there are. Use GroupNorm or LayerNorm, or reduction="fast".'
        )


def _held_by(optimizer: Any) -> list[nn.Parameter]:
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else []
    return [parameter for group in groups for parameter in group["params"]]


class Engine:
    """The loop's interface to device, precision and processes, for one run."""

    def __init__(self, accelerator: Accelerator, reduction: str = "fast") -> None:
        self.accelerator = accelerator
        self.device = torch.device(accelerator.device)  # a stand-in may have a name
        self.num_processes: int = accelerator.num_processes
        self.rank: int = accelerator.process_index if self.num_processes > 1 else 0
        self.kind = str(accelerator.distributed_type.value)
        if self.kind in _NOT_OFFERED:
            raise ConfigError(
                f"accelerate is configured for {self.kind}, which is not supported: gradients would not be shared. "
                'Configure FSDP 2, or nothing, and pass sharding="full_shard" or fsdp="full_shard" to split the model'
            )
        self.is_distributed = self.kind != "NO" and self.num_processes > 1
        self.agreement = processes.Agreement()
        # Everything with gradients: the model's parameters, and those only in the optimizer (a loss function's).
        self.parameters: list[nn.Parameter] = []
        self._is_sharded = self.kind == "FSDP"
        if reduction == "exact" and self._is_sharded:
            raise ConfigError(f'reduction="exact" needs the whole model on every process, and {self.kind} splits it')
        self._tree = processes.TreeSum() if reduction == "exact" else None
        self.num_averaged = 1 if reduction == "exact" else self.num_processes  # the divisor of summed gradients
        self._needs_wrapping = accelerator.scaler is not None or self._is_sharded or self.kind == "XLA"
        self._held: list[nn.Parameter] = []  # by the optimizer
        self._not_held: list[nn.Parameter] = []
        self._only_in_optimizer: list[nn.Parameter] = []
        self._forwards: list[tuple[nn.Module, Any]] = []
        self._optimizer: Any = None
        self._sharded: nn.Module | None = None
        # Called before the backward pass that shares gradients, so that its own communication overlaps.
        self.before_sharing: Callable[[], None] | None = None
        self._shares_next = False

    def prepare(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        """Place and wrap the model and the optimizer for this run; stand-ins for either are left alone."""
        self._optimizer = optimizer
        if isinstance(model, nn.Module):
            # `_orig_mod` is the model inside torch.compile's wrapper.
            modules = [module for module in (model, getattr(model, "_orig_mod", None)) if module is not None]
            self._forwards = [(module, module.__dict__.get("forward", _ABSENT)) for module in modules]
        if isinstance(model, nn.Module) and (self._is_sharded or is_sharded(model)):
            self._is_sharded = True
            model, optimizer = shard(self.accelerator, model, optimizer)
            self._sharded = model
        else:
            if isinstance(model, nn.Module):
                # An exact sum is built here from whole gradients, without the wrapper that averages them.
                model = self.accelerator.prepare_model(model, evaluation_mode=self._tree is not None)
                if self._tree is not None:
                    processes.broadcast_from_first([*model.parameters(), *model.buffers()])
            if isinstance(optimizer, torch.optim.Optimizer):
                if optimizer.state:
                    # Moves an earlier run's state to the parameters' current device and dtype.
                    optimizer.load_state_dict(optimizer.state_dict())
                if self._needs_wrapping:
                    optimizer = self.accelerator.prepare_optimizer(optimizer)
        if isinstance(model, nn.Module):
            self._note_parameters(model, optimizer)
        return model, optimizer

    def follow(self, model: Any, optimizer: Any) -> None:
        """Adopt a model and an optimizer that a user's `prepare` hook wrapped; a no-op for those already known."""
        if self.parameters or not isinstance(model, nn.Module):
            return
        self._optimizer = optimizer
        self._note_parameters(model, optimizer)
        for module in model.modules():
            own = module.__dict__
            # accelerate's marks of a forward that it has wrapped.
            if "_original_forward" in own or "_is_accelerate_prepared" in own:
                forward = own.get("_original_forward", own.get("forward", _ABSENT))
                is_of_class = getattr(forward, "__func__", None) is type(module).forward
                self._forwards.append((module, _ABSENT if is_of_class else forward))

    def follow_scheduler(self, optimizer: Any) -> None:
        """Let a wrapped optimizer call the inner one's `step`, as patched by a scheduler; otherwise fp16 runs warn."""
        inner = self.unwrap_optimizer(optimizer)
        if inner is not optimizer and hasattr(optimizer, "_optimizer_original_step_method"):
            from accelerate.optimizer import patch_optimizer_step

            # accelerate stores the unpatched methods in its constructor.
            optimizer._optimizer_original_step_method = inner.step
            optimizer._optimizer_patched_step_method = patch_optimizer_step(optimizer, inner.step)

    def release(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        """Undo `prepare`: the bare model, its own forward, and the optimizer as the user made it."""
        model = self.unwrap(model)
        for module, forward in self._forwards:
            # accelerate's own undo binds a compiled model's forward to the wrong object. Its marker also stays, so it
            # would skip the model of the next run, which then runs without autocast.
            for name in ("_original_forward", "forward", "_is_accelerate_prepared"):
                module.__dict__.pop(name, None)
            if forward is not _ABSENT:
                module.__dict__["forward"] = forward
        self._forwards = []
        return model, self.unwrap_optimizer(optimizer)

    def unwrap(self, model: Any, keep_torch_compile: bool = True) -> Any:
        """Return the model without its distributed wrapper; its forward stays under autocast during the run."""
        if not isinstance(model, nn.Module):
            return model
        return self.accelerator.unwrap_model(model, keep_torch_compile=keep_torch_compile)

    def _note_parameters(self, model: nn.Module, optimizer: Any) -> None:
        own = list(model.parameters())
        known = {id(parameter) for parameter in own}
        self._held = _held_by(optimizer)
        self._only_in_optimizer = [parameter for parameter in self._held if id(parameter) not in known]
        held = {id(parameter) for parameter in self._held}
        self._not_held = [parameter for parameter in own if id(parameter) not in held]
        self.parameters = [*own, *self._only_in_optimizer]

    def loose_weights(self) -> list[nn.Parameter]:
        """Return the weights that get gradients, which nothing drops, since the optimizer does not hold them."""
        return [each for each in self._not_held if each.requires_grad]

    @staticmethod
    def unwrap_optimizer(optimizer: Any) -> Any:
        while "accelerator_state" in getattr(optimizer, "__dict__", ()):  # a mock has every name, and no end
            optimizer = optimizer.optimizer
        return optimizer

    def backward(self, loss: torch.Tensor) -> None:
        if self._shares_next and self.before_sharing is not None:
            self.before_sharing()
        self._shares_next = False
        if self._needs_wrapping:
            self.accelerator.backward(loss)
        else:
            # accelerate's backward first divides by its own accumulation count: one more kernel per call.
            loss.backward()

    def gradients(self) -> list[torch.Tensor]:
        return [local(parameter.grad) for parameter in self.parameters if parameter.grad is not None]

    def follow_parameters(self, model: Any, optimizer: Any) -> None:
        """Adopt parameters that an optimizer got, or a new optimizer holds, since the last update."""
        if self.parameters and isinstance(model, nn.Module):
            held = _held_by(optimizer)
            if len(held) != len(self._held) or not all(map(is_, held, self._held)):
                self._note_parameters(model, optimizer)

    def begin_gradients(self, rows: list[int]) -> None:
        """Start the gradients of an update, given the rows of its micro-batches; a pad has none, and does not count."""
        if self._tree is not None:
            self._tree.begin(self.parameters, is_pad=not any(rows))

    def finish_gradients(self) -> None:
        """Share the gradients that no wrapper shares: those only the optimizer holds, or all of them."""
        if self._tree is not None:
            self._tree.add_gradients()
            self._tree.finish()
        elif self.is_distributed:
            if self._sharded is not None:
                # Nothing else keeps buffers such as running means equal.
                processes.broadcast_from_first(self._sharded.buffers())
            for parameter in self._only_in_optimizer:
                if parameter.grad is not None:
                    parameter.grad = processes.sum_on_device(parameter.grad) / self.num_processes

    def clip(self, value: float | None, norm: float | None) -> torch.Tensor | None:
        """Clip the full gradient by value, by norm, or both (in this order); return the norm if it was computed."""
        parameters = [parameter for parameter in self.parameters if parameter.grad is not None]
        if self.accelerator.scaler is not None:
            # Not accelerate's own unscaling, which reads process-wide state that another trainer may have changed.
            self.accelerator.scaler.unscale_(self.unwrap_optimizer(self._optimizer))
        if value is not None:
            nn.utils.clip_grad_value_(parameters, value)
        if norm is None:
            return None
        return (clip_norm if self._is_sharded else nn.utils.clip_grad_norm_)(parameters, norm)

    def share_gradients(self, model: Any, is_shared: bool) -> None:
        """Set whether the next backward syncs gradients with the other processes; only a window's last one does."""
        if self._tree is not None:
            self._tree.add_gradients()
        if not self.is_distributed:
            return
        self._shares_next = is_shared
        if hasattr(model, "require_backward_grad_sync"):
            model.require_backward_grad_sync = is_shared
        elif hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(is_shared)

    @contextmanager
    def independent_forward(self, model: Any) -> Iterator[None]:
        """Run a block in which forward passes of the processes need not match, such as an evaluation."""
        # DDP broadcasts buffers in every forward, even in evaluation, which hangs with uneven batches. Once is enough.
        sync = getattr(model, "require_forward_param_sync", None)
        if sync is not None:
            processes.broadcast_from_first(model.buffers())
            model.require_forward_param_sync = False
        try:
            yield
        finally:
            if sync is not None:
                model.require_forward_param_sync = sync
            reshard(model)
