"""Checkpoints of transformers, read as the state of a run without running code from them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from loopwright.checkpoint import Checkpoint, store
from loopwright.checkpoint.fingerprint import Change
from loopwright.checkpoint.state_by_name import untied
from loopwright.engine.sharding import is_sharded
from loopwright.errors import CheckpointError
from loopwright.hf.boundary import owner_of
from loopwright.hf.files import is_adapter
from loopwright.hf.state import STATE_FILE, TrainerState, shallow
from loopwright.progress import Progress
from loopwright.training.hyper_parameters import as_json
from loopwright.training.model_files import check_shapes, read_file
from loopwright.training.run import TrainingRun

# The state of numpy's generator is an array; `_reconstruct`, by its names in numpy 1 and 2, makes an empty one.
_ARRAYS: list[Any] = [np.ndarray, np.dtype, type(np.dtype(np.uint32))]
_ARRAYS += [(np.empty(0).__reduce__()[0], f"numpy.{each}.multiarray._reconstruct") for each in ("core", "_core")]

_WEIGHTS = ("model.safetensors", "model-*-of-*.safetensors", "pytorch_model.bin", "pytorch_model-*-of-*.bin")
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")

# Entries of a scheduler or a parameter group that come and go with versions of torch, or are not options.
_NOT_COMPARED = {"params", "initial_lr", "foreach", "maximize", "capturable", "differentiable", "fused", "verbose"}
_NOT_COMPARED |= {"decoupled_weight_decay"}


def is_foreign(folder: Path) -> bool:
    """Whether transformers wrote this checkpoint, and its last file."""
    is_ours = any(os.path.lexists(folder / name) for name in (store.MANIFEST, "state.json"))
    return (folder / STATE_FILE).is_file() and not is_ours


def foreign_checkpoints(directory: str | Path) -> list[tuple[int, Path]]:
    """Return transformers' checkpoints in a folder with their updates, oldest first."""
    paths = [path for path in Path(directory).glob("checkpoint-*") if path.name[11:].isdecimal() and is_foreign(path)]
    return sorted((int(path.name[11:]), path) for path in paths)


def read_foreign(folder: Path, run: TrainingRun, state: dict[str, Any]) -> Checkpoint:
    """Return a checkpoint of transformers as one of ours; `state`, that of the new run, has what is not in it."""
    model, about, has_scaler = run.bare_model(), run.checkpoints.metadata, run.engine.accelerator.scaler is not None
    needed = {"optimizer.pt": True, "scheduler.pt": True, "scaler.pt": has_scaler}
    if wrong := [name for name, is_needed in needed.items() if (folder / name).is_file() != is_needed]:
        raise CheckpointError(
            f"{folder} has {'no' if needed[wrong[0]] else 'a'} {wrong[0]}: it is incomplete, or was saved with "
            "save_only_model=True, another fp16, DeepSpeed or FSDP. Resume it with the settings of its run, or load "
            "its weights with from_pretrained and start a new run."
        )
    if is_sharded(model):
        raise CheckpointError(f"{folder} is transformers': continue it without fsdp; our checkpoints resume with fsdp")
    with store.refusing_damage(folder):
        saved, weights = TrainerState.load_from_json(folder / STATE_FILE), read_weights(folder, model)
        check_shapes(str(folder), model.state_dict(), weights, resized=())
        files = {name: read_file(folder / name) for name, is_needed in needed.items() if is_needed}
        schedule, state["scaler"] = files["scheduler.pt"], files.get("scaler.pt")
        _check_names(folder / "scheduler.pt", schedule, state["scheduler"])
        groups = _name_parameters(folder / "optimizer.pt", files["optimizer.pt"], state["optimizer"], model)
        state |= {"optimizer": files["optimizer.pt"], "scheduler": schedule}
        begun = {group["params"][0]: {**group, "lr": group.get("initial_lr", group["lr"])} for group in groups}
        made = as_json({"optimizer": begun, "scheduler": {each: schedule[each] for each in {"base_lrs"} & {*schedule}}})
        state["run"] |= {"progress": _position(folder, run, saved), "made": made, "stop": None}
        state["record"] = {"offset": 0, "recorded": {}, "seconds": 0.0}
        if (folder / "rng_state.pth").is_file():
            with torch.serialization.safe_globals(_ARRAYS):
                states = read_file(folder / "rng_state.pth")
            name, words, *rest = states["numpy"]
            numpy = [name, torch.from_numpy(words.astype(np.int64)), *rest]
            state["generators"] |= {"python": states["python"], "numpy": numpy, "torch": states["cpu"]}
        for callback in state["callbacks"]:
            if callback["class"] == owner_of(run).core.hf_run.name_in_checkpoints:
                callback["state"] |= {"state": shallow(saved), "logged": [0.0, 0.0, saved.global_step], "arguments": {}}
        lengths = {"num_epochs": saved.num_train_epochs, "max_num_train_steps": saved.max_steps}
        then = {name: value for name, value in {**lengths, "batch_size": saved.train_batch_size}.items() if value}
        settings = {name: value and then.get(name, value) for name, value in about["settings"].items()}
        text = f"counted: transformers wrote {folder.name} in another data order; samples may repeat or be left out"
        about = {**about, "settings": settings, "tier": "T3", "guarantee": text}
        return Checkpoint(weights, state, saved.global_step, about)


def read_weights(folder: Path, model: Any) -> dict[str, torch.Tensor]:
    """Return the weights of transformers' checkpoint by the model's names; an adapter's with those of the base."""
    patterns = _ADAPTERS if is_adapter(model) else _WEIGHTS
    files = next(filter(None, (sorted(folder.glob(pattern)) for pattern in patterns)), [])
    found, current = {key: value for file in files for key, value in read_file(file).items()}, model.state_dict()
    if is_adapter(model):
        from peft import get_peft_model_state_dict

        names = {id(value): name for name, value in current.items()}
        adapter = get_peft_model_state_dict(model, current, model.active_adapters[0], save_embedding_layers=False)
        trained = {name for name, value in model.named_parameters(remove_duplicate=False) if value.requires_grad}
        own = {name: value for name, value in current.items() if name not in trained}
        return {**own, **{names.get(id(adapter.get(key)), key): value for key, value in found.items()}}
    tied = untied(current)[1].items()  # each is saved under one of its names
    for name, other in (*((other, name) for name, other in tied), *tied):
        found |= {name: found[other]} if other in found and name not in found else {}
    left_out = getattr(model, "_keys_to_ignore_on_save", None) or ()  # what the model computes itself
    return {**{name: current[name] for name in left_out if name in current}, **found}


def _position(folder: Path, run: TrainingRun, saved: TrainerState) -> dict[str, int]:
    """Return the progress of a saved run; its epoch counts micro-batches in fractions."""
    loader, accumulation = run.train_loader, run.settings.gradient_accumulation_steps
    epochs, per_epoch = saved.epoch or 0.0, loader.num_batches or saved.max_steps * accumulation
    epoch, batch = divmod(round(epochs * per_epoch), per_epoch)
    updates, batch = -(-per_epoch // accumulation), batch - batch % accumulation
    if epoch * updates + batch // accumulation != saved.global_step:
        change = Change("updates per epoch", round(saved.global_step / epochs, 2), updates)
        run.checkpoints.announce(folder, [change], [change])
    window = loader.samples_of(epoch, batch // accumulation)
    size = loader.share.processes * (loader.batch_size or owner_of(run).args.train_batch_size)
    samples, total = window[0][0] if window else batch * size, epoch * per_epoch + batch
    return Progress(epoch, saved.global_step, samples, batch, total, reported=saved.global_step).state_dict()


def _name_parameters(file: Path, saved: dict[str, Any], own: dict[str, Any], model: Any) -> list[dict[str, Any]]:
    """Put names for numbers in an optimizer's state, and return its groups that are not empty."""
    sizes = [[len(group["params"]) for group in each["param_groups"]] for each in (saved, own)]
    if sizes[0] != sizes[1]:
        raise CheckpointError(
            f"{file} has parameter groups of the sizes {sizes[0]}, the trainer's optimizer {sizes[1]}: freeze and "
            "group the parameters as in that run (get_decay_parameter_names)"
        )
    parameters, by_number, saved["state"] = dict(model.named_parameters()), saved["state"], {}
    for theirs, ours in zip(saved["param_groups"], own["param_groups"], strict=True):
        _check_names(file, theirs, ours)
        for number, name in zip(theirs["params"], ours["params"], strict=True):
            entry, shape = by_number.get(number, {}), parameters[name].shape
            shapes = [value.shape for value in entry.values() if isinstance(value, torch.Tensor)]
            if shape not in shapes and any(len(each) == len(shape) for each in shapes):
                raise CheckpointError(f"{file} has {[*map(tuple, shapes)]} for {name}, which has shape {tuple(shape)}")
            saved["state"] |= {name: entry} if entry else {}
        theirs["params"] = ours["params"]
    return [group for group in saved["param_groups"] if group["params"]]


def _check_names(file: Path, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise a CheckpointError for a state with other entries than the trainer's: it is of another class."""
    found, here = ({name for name in each if name[0] != "_"} - _NOT_COMPARED for each in (saved, own))
    if found != here:
        raise CheckpointError(
            f"{file} is of another class than the trainer's: it has {sorted(found - here)}, and not "
            f"{sorted(here - found)}. Set optim and lr_scheduler_type as in that run."
        )
