"""The engine: accelerate behind one door.

It places the model, wraps it for precision and processes, runs backward, unscales and clips, and
undoes the wrapping at the end. Data and losses are not its business: loopwright shards and weighs
them itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from loopwright.engine.processes import Agreement

if TYPE_CHECKING:
    from accelerate import Accelerator


def create_accelerator(mixed_precision: str | None = None) -> Accelerator:
    """Make a fresh Accelerator.

    Args:
        mixed_precision: "no", "fp16", "bf16", "fp8"; None follows accelerate's configuration.
    """
    from accelerate import Accelerator

    # Where torchrun started this and there is no accelerator, accelerate must be told: it would join the process
    # group, and still take each process for the only one.
    on_cpu = "LOCAL_RANK" in os.environ and not torch.accelerator.is_available()
    return Accelerator(mixed_precision=mixed_precision, cpu=on_cpu)


def forget_precision() -> None:
    """Let the next Accelerator have another precision than an earlier one: accelerate alone keeps one per process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state()
    GradientState._reset_state()


class Engine:
    """What the loop needs from device, precision and processes, for one run."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.device: torch.device = accelerator.device
        self.num_processes: int = accelerator.num_processes
        self.rank: int = accelerator.process_index
        self.is_distributed = str(accelerator.distributed_type.value) != "NO" and self.num_processes > 1
        self.agreement = Agreement()
        self._needs_wrapping = accelerator.scaler is not None or self._kind in (
            "FSDP",
            "DEEPSPEED",
            "MEGATRON_LM",
            "XLA",
        )

    @property
    def _kind(self) -> str:
        return str(self.accelerator.distributed_type.value)

    def prepare(self, model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
        """Place and wrap the model and the optimizer for this run; either may be None-like and is then left alone."""
        if self._kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
            prepared = self.accelerator.prepare(model, optimizer)
            return prepared[0], prepared[1]
        if isinstance(model, nn.Module):
            model = self.accelerator.prepare_model(model)
        if isinstance(optimizer, torch.optim.Optimizer):
            if optimizer.state:
                # Casts an earlier run's state to wherever the parameters are now.
                optimizer.load_state_dict(optimizer.state_dict())
            if self._needs_wrapping:
                optimizer = self.accelerator.prepare_optimizer(optimizer)
        return model, optimizer

    def release(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        """Undo `prepare`: the bare model and optimizer."""
        return self.unwrap(model, keep_precision=False), self.unwrap_optimizer(optimizer)

    def unwrap(self, model: Any, keep_torch_compile: bool = True, keep_precision: bool = True) -> Any:
        """Return the model without its distributed wrapper.

        Args:
            model: as `prepare` returned it.
            keep_torch_compile: whether a compiled model stays compiled.
            keep_precision: whether its forward stays under autocast.
        """
        if not isinstance(model, nn.Module):
            return model
        bare = self.accelerator.unwrap_model(
            model, keep_fp32_wrapper=keep_precision, keep_torch_compile=keep_torch_compile
        )
        inner = getattr(bare, "_orig_mod", bare)
        forward = inner.__dict__.get("forward")
        if getattr(forward, "__func__", None) is type(inner).forward:
            del inner.__dict__["forward"]  # accelerate leaves the class's own method on the instance
        return bare

    @staticmethod
    def unwrap_optimizer(optimizer: Any) -> Any:
        """Return the optimizer that the user made."""
        while hasattr(optimizer, "accelerator_state"):
            optimizer = optimizer.optimizer
        return optimizer

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward, with loss scaling where the precision needs it."""
        if self._needs_wrapping:
            self.accelerator.backward(loss)
        else:
            # accelerate's backward divides by its own accumulation count first: one more kernel per call.
            loss.backward()

    def clip(self, model: nn.Module, value: float | None, norm: float | None) -> torch.Tensor | None:
        """Clip the gradients by value, by norm, or both (in this order); return the norm if it was computed.

        Called once per update, on the full gradient; gradients are unscaled first.
        """
        parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
        if self._kind in ("FSDP", "DEEPSPEED"):
            parameters = list(model.parameters())
        elif self.accelerator.scaler is not None:
            self.accelerator.unscale_gradients()
        if value is not None:
            nn.utils.clip_grad_value_(parameters, value)
        if norm is None:
            return None
        if self._kind in ("FSDP", "DEEPSPEED"):
            total: torch.Tensor | None = self.accelerator.clip_grad_norm_(parameters, norm)
            return total
        return nn.utils.clip_grad_norm_(parameters, norm)

    def step_was_skipped(self, optimizer: Any) -> bool:
        """Whether the loss scaler refused the last optimizer step."""
        return bool(getattr(optimizer, "step_was_skipped", False))

    def share_gradients(self, model: Any, is_shared: bool) -> None:
        """Say whether the next backward shares its gradients with the other processes (only a window's last does)."""
        if not self.is_distributed:
            return
        if hasattr(model, "require_backward_grad_sync"):
            model.require_backward_grad_sync = is_shared
        elif hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(is_shared)

    @contextmanager
    def independent_forward(self, model: Any) -> Iterator[None]:
        """Run a block in which forward passes of the processes need not match (evaluation)."""
        # DDP broadcasts buffers in every forward, also in evaluation: with uneven batches that hangs.
        sync = getattr(model, "require_forward_param_sync", None)
        if sync is not None:
            model.require_forward_param_sync = False
        try:
            yield
        finally:
            if sync is not None:
                model.require_forward_param_sync = sync
