"""Structural types: what parts of loopwright expect of each other without importing each other."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch

from loopwright.progress import Progress


class TrainerLike(Protocol):
    """The trainer, as callbacks know it: its public attributes and methods."""

    model: Any
    optimizer: Any
    scheduler: Any
    loss_func: Any
    run_history: Any
    run_config: Any
    callback_handler: Any

    @property
    def progress(self) -> Progress:
        """Where the run is."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        ...

    @property
    def num_processes(self) -> int:
        """How many processes take part in the run."""
        ...

    @property
    def train_loader(self) -> Any:
        """The training loader of the run, or None."""
        ...

    @property
    def eval_loader(self) -> Any:
        """The evaluation loader of the run, or None."""
        ...

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once per node."""
        ...

    def notify(self, kind: str, text: str, **fields: Any) -> None:
        """Report something about the run to a person."""
        ...

    def get_model(self, keep_torch_compile: bool = True) -> Any:
        """Return the model without its distributed wrapper."""
        ...

    def request_log(self) -> None:
        """Ask for a log at the next update boundary."""
        ...

    def request_evaluation(self) -> None:
        """Ask for an evaluation at the next update boundary."""
        ...

    def request_save(self, directory: str | Path, metadata: dict[str, Any] | None = None) -> None:
        """Ask for a saved training state at the next update boundary."""
        ...

    def request_load(self, checkpoint_path: str | Path) -> None:
        """Ask for a checkpoint file to be loaded at the end of the run, once everything asked for is saved."""
        ...

    def request_stop(self, reason: str) -> None:
        """Ask for the run to end at the next update boundary."""
        ...

    def write_record(self, event: str, **fields: Any) -> None:
        """Append an event to metrics.jsonl of the run."""
        ...

    def evaluate_copy(self, model: Any, callbacks: Iterable[Any], metric_prefix: str) -> None:
        """Run an evaluation epoch of another model beside the run's own."""
        ...

    def save_checkpoint(
        self,
        save_path: str | Path,
        checkpoint_kwargs: dict[str, Any] | None = ...,
        save_optimizer: bool = ...,
        save_scheduler: bool = ...,
        save_per_node: bool = ...,
        *,
        model: Any = ...,
    ) -> None:
        """Write weights, and optionally optimizer and scheduler, into one file."""
        ...

    def load_checkpoint(
        self, checkpoint_path: str | Path, load_optimizer: bool = ..., load_scheduler: bool = ...
    ) -> dict[str, Any]:
        """Read what `save_checkpoint` wrote."""
        ...

    def load_training_state(self, input_dir: str | Path) -> dict[str, Any]:
        """Restore what `save_training_state` wrote; return its metadata."""
        ...
