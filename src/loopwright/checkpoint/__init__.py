"""Checkpoints: verified, written atomically, and free of pickle."""

from loopwright.checkpoint.report import Finding, verify_all
from loopwright.checkpoint.resumable import ResumableState
from loopwright.checkpoint.saver import Checkpointing
from loopwright.checkpoint.store import Checkpoint, find_newest, prune, read, verify, write
from loopwright.checkpoint.whole_weights import export_weights

__all__ = [
    "Checkpoint",
    "Checkpointing",
    "Finding",
    "ResumableState",
    "export_weights",
    "find_newest",
    "prune",
    "read",
    "verify",
    "verify_all",
    "write",
]
