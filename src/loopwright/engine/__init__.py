"""Device, precision and processes: accelerate and torch.distributed behind one door."""

from loopwright.engine.engine import Engine, create_accelerator

__all__ = ["Engine", "create_accelerator"]
