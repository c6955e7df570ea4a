"""Model files: the weights of a trainer, and optionally its optimizer and scheduler, in one file."""

from __future__ import annotations

import collections
import warnings
from collections.abc import Container, Mapping
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.serialization import get_unsafe_globals_in_checkpoint

from loopwright.checkpoint import store
from loopwright.checkpoint.state_by_name import in_their_layout, untied
from loopwright.checkpoint.whole_weights import gathered, split_optimizer, with_state, write_gathered
from loopwright.engine import sharding
from loopwright.engine.processes import local_process_zero_only, world_process_zero_only
from loopwright.engine.sharding import buffer_shapes, is_sharded, load_weights, reshard
from loopwright.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from loopwright.trainer import Trainer

_WHAT_FILES_HOLD = (
    "A checkpoint file holds tensors, arrays, numbers, texts, None, and lists, tuples, sets and dicts of them "
    "(vars(config) instead of a config)."
)


def save_checkpoint(
    trainer: Trainer,
    save_path: str | Path,
    checkpoint_kwargs: dict[str, Any] | None = None,
    save_optimizer: bool = True,
    save_scheduler: bool = True,
    save_per_node: bool = True,
    *,
    model: Any = None,
) -> None:
    """Write the model, and optionally optimizer and scheduler, into one file.

    Args:
        save_path: a ".safetensors" file gets the weights alone, any other a dict as `torch.save` writes it.
        checkpoint_kwargs: further entries at the dict's top level.
        save_per_node: write on one process of each node, not only of the first.
    """
    run, extra = trainer._current_run, checkpoint_kwargs or {}
    weights = run.bare_model() if model is None else run.engine.unwrap(model, keep_torch_compile=False)
    optimizer = run.bare_optimizer() if save_optimizer else None
    on_one = local_process_zero_only if save_per_node else world_process_zero_only
    with run.logbook.spending("save"):
        if is_sharded(weights):
            reshard(weights)
            is_writer = bool(on_one(lambda: True)())
            if Path(save_path).suffix == ".safetensors":
                texts = {name: str(value) for name, value in extra.items()}
                write_gathered(save_path, weights.state_dict(), texts, is_writer)
                return
            weights = with_state(gathered(weights.state_dict(), is_writer))
            optimizer = None if optimizer is None else with_state(gathered(optimizer.state_dict(), is_writer))
        on_one(save_model_file)(save_path, weights, optimizer, trainer.scheduler if save_scheduler else None, extra)


def load_checkpoint(
    trainer: Trainer, checkpoint_path: str | Path, load_optimizer: bool = True, load_scheduler: bool = True
) -> dict[str, Any]:
    """Read what `save_checkpoint` wrote, into the model and, where the file has them, optimizer and scheduler.

    A scheduler's state is left alone while the trainer has no scheduler: one exists only during `train`. A file that is
    missing, damaged, or of another model raises a CheckpointError, and nothing is changed.
    """
    run, path, scheduler = trainer._current_run, checkpoint_path, trainer.scheduler
    model, optimizer, built = run.bare_model(), run.bare_optimizer(), run.checkpoints.buffers
    resized = [name for name, shape in buffer_shapes(model).items() if built.get(name, shape) != shape]  # by the run
    if is_sharded(model):
        reshard(model)
        optimizer = None if optimizer is None else split_optimizer(optimizer)
    if not Path(path).exists():
        raise CheckpointError(f"there is no checkpoint file {path}")
    if Path(path).is_dir():
        raise CheckpointError(
            f"{path} is a folder, not a checkpoint file. Resume a training state with train(resume_from=...), or "
            "read it with load_training_state."
        )
    has_all = Path(path).suffix != ".safetensors"  # else each tied weight once
    checkpoint: Any = read_file(path) if has_all else {"model_state_dict": read_file(path)}
    if not isinstance(checkpoint, dict) or "model_state_dict" not in checkpoint:
        found = ", ".join(map(str, checkpoint))[:200] if isinstance(checkpoint, dict) else type(checkpoint).__name__
        raise CheckpointError(f"{path} was not written by save_checkpoint: it has no model_state_dict, but {found}")
    current, saved = model.state_dict(), checkpoint["model_state_dict"]
    tied = {} if has_all else untied(current)[1]
    expected = {name: value for name, value in current.items() if name not in tied or name in saved}
    restores_optimizer = load_optimizer and "optimizer_state_dict" in checkpoint
    if restores_optimizer and optimizer is None:
        raise ConfigError(
            f"{path} holds optimizer state but the trainer has no optimizer. Pass one, or load_optimizer=False."
        )
    check_shapes(str(path), expected, saved, resized)
    if restores_optimizer:
        _check_groups(str(path), optimizer, checkpoint["optimizer_state_dict"])
    load_weights(model, saved, strict=has_all)
    if restores_optimizer:
        optimizer.load_state_dict(in_their_layout(optimizer, checkpoint["optimizer_state_dict"]))
    if load_scheduler and "scheduler_state_dict" in checkpoint and scheduler is not None:
        scheduler.load_state_dict(checkpoint["scheduler_state_dict"])
    return checkpoint


def whole_model(trainer: Trainer) -> Any:
    """Return the model; of a split one rank 0 gets a whole copy on the host. Every process must call it."""
    return sharding.whole_model(trainer._current_run.bare_model())


def whole_weights(trainer: Trainer) -> dict[str, Any]:
    """Return the weights by name, on rank 0's host, and {} on the others; every process must call it."""
    model = trainer._current_run.bare_model()
    reshard(model)
    is_first = trainer._current_run.engine.rank == 0
    weights: dict[str, Any] = gathered(dict(model.state_dict()), is_first)
    return weights if is_first else {}


def save_model_file(path: str | Path, model: nn.Module, optimizer: Any, scheduler: Any, extra: dict[str, Any]) -> None:
    """Write the documented checkpoint file: a dict by torch.save, or weights alone for a .safetensors path.

    The state of a scheduler that cannot be saved is left out, with a warning. If anything else cannot be saved so that
    `load_checkpoint` reads it, a CheckpointError is raised and nothing is written.
    """
    state: dict[str, Any] = {"model_state_dict": model.state_dict()}
    if Path(path).suffix == ".safetensors":
        from safetensors.torch import save_file

        weights, _ = untied(state["model_state_dict"])
        texts = {name: str(value) for name, value in extra.items()}
        store.write_file(path, lambda aside: save_file(store.stored(weights), aside, {"format": "pt", **texts}))
        return
    if optimizer is not None:
        state["optimizer_state_dict"] = optimizer.state_dict()
    if scheduler is None or not hasattr(scheduler, "state_dict"):
        _write_readable(path, {**state, **extra})
        return
    try:
        _write_readable(path, {**state, "scheduler_state_dict": scheduler.state_dict(), **extra})
    except OSError:
        raise
    except Exception as problem:  # noqa: BLE001 - a scheduler of the user's own may raise anything
        _write_readable(path, {**state, **extra})
        kind = type(scheduler).__name__
        warnings.warn(f"{path} lacks the state of the {kind}, which cannot be saved: {problem}", stacklevel=2)


def _write_readable(path: str | Path, state: dict[str, Any]) -> None:
    """Write a dict with torch.save; raise a CheckpointError if it cannot be written or read back."""

    def write(aside: Path) -> None:
        try:
            torch.save(_plain(state), aside)
        except (OSError, RuntimeError):
            raise  # of the disk
        except Exception as error:
            raise CheckpointError(f"{path} is not written: {error}. {_WHAT_FILES_HOLD}") from error
        if refused := get_unsafe_globals_in_checkpoint(aside):
            raise CheckpointError(
                f"{path} is not written: it would hold {', '.join(refused[:5])}, which could not be read again, "
                f"because files are read without running code from them. {_WHAT_FILES_HOLD}"
            )

    store.write_file(path, write)


def read_file(path: str | Path) -> Any:
    """Return the content of a .safetensors file, or of one that `torch.save` wrote; no code from it is run."""
    try:
        if Path(path).suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # torch and safetensors raise many kinds for a file that is not theirs
        try:
            refused = get_unsafe_globals_in_checkpoint(path)
        except Exception:  # noqa: BLE001 - a file that is not torch's
            refused = []
        if refused:
            raise CheckpointError(
                f"{path} is not read: it holds {', '.join(refused[:5])}, which would run code from the file. If you "
                "trust it, read it with torch.load(path, weights_only=False), and save the tensors, numbers and texts "
                "in it again."
            ) from error
        raise CheckpointError(f"{path} is damaged, or not a checkpoint file ({type(error).__name__})") from error


def check_class(what: str, saved: str, current: Any, fix: str) -> None:
    if saved != type(current).__name__:
        raise CheckpointError(
            f"the {what} of the checkpoint is of class {saved}, that of the trainer of class {type(current).__name__}",
            code="checkpoint.state",
            fix=fix,
        )


def check_shapes(source: str, current: Mapping[str, Any], saved: Mapping[str, Any], resized: Container[str]) -> None:
    """Raise a CheckpointError for weights of other names or shapes than the model's, unless they are `resized`."""
    found = {name: tuple(getattr(value, "shape", ())) for name, value in saved.items()}
    here = {
        # A lazy parameter takes any shape.
        name: found.get(name) if is_lazy(value) else tuple(getattr(value, "shape", ()))
        for name, value in current.items()
    }
    differences = [
        f"{name}: {found.get(name, 'absent')} saved, {here.get(name, 'absent')} in the model"
        for name in sorted(here.keys() | found.keys())
        if here.get(name) != found.get(name) and (name not in resized or name not in found)
    ]
    if differences:
        more = f"; and {len(differences) - 5} more" if len(differences) > 5 else ""
        raise CheckpointError(f"{source} is of another model. {'; '.join(differences[:5])}{more}")


def _check_groups(source: str, optimizer: Any, saved: Mapping[str, Any]) -> None:
    """Raise a CheckpointError for an optimizer with other parameter groups, before the model's weights are loaded."""
    here, found = (
        [len(group["params"]) for group in groups]
        for groups in (getattr(optimizer, "param_groups", ()), saved.get("param_groups", ()))
    )
    if here != found:
        raise CheckpointError(
            f"{source} is of another optimizer: its parameter groups have the sizes {found}, the trainer's {here}. "
            "Group the parameters as when it was saved, or pass load_optimizer=False."
        )


def _plain(value: Any) -> Any:
    """Convert what the safe loader refuses (numpy scalars and arrays, paths, deques) to types that it reads."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.array(value, order="C"))
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, collections.OrderedDict):
        return collections.OrderedDict((name, _plain(item)) for name, item in value.items())
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, collections.deque)):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    return value
