"""Checkpoints: verified, written atomically, and free of pickle."""

from loopwright.checkpoint.policy import Checkpointing
from loopwright.checkpoint.store import Checkpoint, find_newest, prune, read, verify, write

__all__ = ["Checkpoint", "Checkpointing", "find_newest", "prune", "read", "verify", "write"]
