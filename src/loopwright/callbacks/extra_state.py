"""Extra state of a run, such as a second optimizer, saved and restored with it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from loopwright.callbacks.base import TrainerCallback
from loopwright.engine.sharding import load_weights, whole_state
from loopwright.errors import CheckpointError, ConfigTypeError
from loopwright.protocols import TrainerLike


class KeepStateCallback(TrainerCallback):
    """Saves the state of extra parts with every training state, and restores it on a resume.

    Example:
        KeepStateCallback(discriminator=discriminator, discriminator_optimizer=optimizer)

    Args:
        parts: each has `state_dict` and `load_state_dict`: optimizers, modules, schedulers, or your own class.

    Raises:
        ConfigTypeError: a part lacks one of them.
    """

    def __init__(self, **parts: Any) -> None:
        for name, part in parts.items():
            missing = [method for method in ("state_dict", "load_state_dict") if not hasattr(part, method)]
            if missing:
                kind, methods = type(part).__name__, " and no ".join(missing)
                raise ConfigTypeError(
                    f"KeepStateCallback({name}=...) got a {kind}, which has no {methods}. "
                    "Pass optimizers, modules, or objects of a class that has both."
                )
        self.parts = parts

    def state_dict(self) -> dict[str, Any]:
        parts = self.parts.items()
        return {name: whole_state(part) if isinstance(part, nn.Module) else part.state_dict() for name, part in parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of every part; raise a CheckpointError, changing nothing, if the parts differ."""
        if state.keys() != self.parts.keys():
            raise CheckpointError(
                f"KeepStateCallback has {', '.join(self.parts) or 'no parts'}, and the checkpoint holds "
                f"{', '.join(state) or 'none'}: pass the same names to continue that run"
            )
        for name, part in self.parts.items():
            if isinstance(part, nn.Module):
                load_weights(part, state[name])
            else:
                part.load_state_dict(state[name])


def warn_of_unsaved(trainer: TrainerLike, optimizer: Any, callbacks: Iterable[Any]) -> None:
    """Warn before a run about optimizers among a trainer's attributes that no state or callback saves."""
    held: list[Any] = [optimizer]
    for callback in callbacks:
        for value in getattr(callback, "__dict__", {}).values():
            held += value.values() if isinstance(value, dict) else [value]
    for name, value in vars(trainer).items():
        plain = getattr(value, "optimizer", value)  # inside accelerate's wrapper
        if isinstance(plain, Optimizer) and not any(plain is other for other in held):
            warnings.warn(
                f"trainer.{name} is an optimizer that training states do not hold: a resumed run would start it from "
                f"scratch, and end with other weights. Add KeepStateCallback({name}=...) to the callbacks to save it.",
                stacklevel=3,
            )
