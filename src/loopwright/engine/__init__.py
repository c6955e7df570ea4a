"""Device, precision and processes: accelerate and torch.distributed behind one interface."""

from loopwright.engine.engine import Engine, create_accelerator, forget_precision

__all__ = ["Engine", "create_accelerator", "forget_precision"]
