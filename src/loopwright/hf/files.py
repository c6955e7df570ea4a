"""Model folders and metric files: the model files in a checkpoint, adapters, and the output of `save_model`."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import importlib
import json
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from loopwright.checkpoint import Checkpoint
from loopwright.checkpoint.state_by_name import untied
from loopwright.checkpoint.store import stored, write_file
from loopwright.engine.trackers import check_installed
from loopwright.errors import CheckpointError, ConfigError, nearest
from loopwright.run_folder.files import give_usual_mode, write_atomically

_logger = logging.getLogger("loopwright.hf")

WEIGHTS = "model.safetensors"
_PROBED = 256  # values of each frozen tensor that identify the base model of an adapter


def save_model(folder: Path, model: Any, processing_class: Any, args: Any, state_dict: Any = None) -> None:
    """Write the model as `from_pretrained` reads it, its tokenizer, and the arguments as JSON.

    A module without `save_pretrained` is saved as model.safetensors. `state_dict` replaces the model's own weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if callable(getattr(model, "save_pretrained", None)):
        model.save_pretrained(folder, **({} if state_dict is None else {"state_dict": state_dict}))
        give_usual_mode(folder)
    else:
        from safetensors.torch import save_file

        weights, _ = untied(dict(model.state_dict() if state_dict is None else state_dict))
        write_file(folder / WEIGHTS, lambda aside: save_file(stored(weights), aside, {"format": "pt"}))
    if callable(getattr(processing_class, "save_pretrained", None)):
        processing_class.save_pretrained(folder)
    (folder / "training_args.json").write_text(args.to_json_string(), encoding="utf-8")


def holds_exactly(path: Path, weights: Mapping[str, Tensor]) -> bool:
    """Whether a safetensors file has these weights, under the same names and bit for bit; tied ones once."""
    kept, _ = untied(weights)
    with safe_open(path, "pt") as file:
        return set(file.keys()) == set(kept) and all(
            torch.equal(file.get_tensor(name), tensor.cpu()) for name, tensor in kept.items()
        )


def configuration_files(model: Any) -> dict[str, bytes]:
    """Return the files of a model's configuration, or of a peft model's adapter.

    They may differ between checkpoints: the first labels set the problem type in a forward pass.
    """
    if is_adapter(model):
        return pretrained_files(model)
    configuration: Any = copy.deepcopy(getattr(model, "config", None))
    if hasattr(configuration, "architectures") and callable(getattr(model, "save_pretrained", None)):
        # As its save_pretrained would fill it in.
        configuration.architectures = [type(model).__name__.removeprefix("FSDP")]
        configuration.dtype = str(model.dtype).partition(".")[2]
    return {**pretrained_files(configuration), **pretrained_files(getattr(model, "generation_config", None))}


def pretrained_files(what: Any) -> dict[str, bytes]:
    """Return the files that an object's `save_pretrained` writes; none without one."""
    if not callable(getattr(what, "save_pretrained", None)):
        return {}
    with tempfile.TemporaryDirectory() as name:
        try:
            what.save_pretrained(name)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"the {type(what).__name__} cannot be saved with checkpoints: {error}") from error
        return {path.name: path.read_bytes() for path in Path(name).iterdir() if path.is_file()}


def is_adapter(model: Any) -> bool:
    """Whether a model is a peft model, whose `save_pretrained` writes the adapter alone."""
    return hasattr(model, "peft_config") and callable(getattr(model, "get_base_model", None))


def changing(model: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights that training changes: trained parameters and buffers."""
    trained = {name for name, value in model.named_parameters(remove_duplicate=False) if value.requires_grad}
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    return {name: value for name, value in weights.items() if name in trained or name in buffers}


def base_digest(model: Any) -> str:
    """Return a digest of the frozen parameters, computed from a few values of each."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            values = parameter.detach().flatten()
            probed = values[:: max(1, values.numel() // _PROBED)][:_PROBED].contiguous().cpu()
            digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
            digest.update(probed.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def completed(model: Any, checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint completed with the model's own frozen weights, which must be the ones it was trained on."""
    saved = checkpoint.state.get("adapter_base")
    if saved is None or not is_adapter(model):
        return checkpoint
    if saved != base_digest(model):
        raise CheckpointError(
            "the checkpoint holds an adapter that was trained on another base model: the frozen weights differ. "
            "Load the base model that the run was started with."
        )
    current = model.state_dict()
    frozen = current.keys() - changing(model, current).keys()
    own = {name: value for name, value in current.items() if name in frozen and isinstance(value, Tensor)}
    return dataclasses.replace(checkpoint, model={**own, **checkpoint.model})


def align_special_tokens(model: Any, processing_class: Any) -> None:
    """Copy the tokenizer's special tokens to the model's configuration where they differ, and log it."""
    changed = {}
    tokenizer = getattr(processing_class, "tokenizer", processing_class)  # a processor has one
    configurations = [getattr(model, name, None) for name in ("config", "generation_config")]
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        wanted = getattr(tokenizer, name, None)
        for configuration in configurations if wanted is not None else ():
            present = getattr(configuration, name, wanted)
            if present != wanted and not (isinstance(present, (list, tuple)) and wanted in present):
                setattr(configuration, name, wanted)
                changed[name] = wanted
    if changed:
        _logger.info("the model now uses the tokenizer's special tokens: %s", changed)


def log_metrics(split: str, metrics: dict[str, Any]) -> None:
    """Print sorted metrics, one per line: numbers with four digits, times as hours, minutes and seconds."""
    shown = {name: _shown(name, value) for name, value in metrics.items()}
    width, widest = (max(map(len, texts), default=0) for texts in (shown, shown.values()))
    lines = [f"  {name:{width}} = {shown[name]:>{widest}}" for name in sorted(shown)]
    print("\n".join([f"***** {split} metrics *****", *lines]))  # noqa: T201 - its purpose


def _shown(name: str, value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    if not name.endswith("_runtime"):
        return str(round(value, 4))
    minutes, seconds = divmod(value, 60)
    return f"{int(minutes) // 60}:{int(minutes) % 60:02}:{seconds:05.2f}"


def save_metrics(folder: Path, split: str, metrics: dict[str, Any], combined: bool) -> None:
    """Write `<split>_results.json`, and add to `all_results.json` if `combined`."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / f"{split}_results.json", metrics)
    if combined:
        path = folder / "all_results.json"
        try:
            earlier = dict(json.loads(path.read_text(encoding="utf-8")) if path.exists() else {})
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{path} is not a JSON object, so no metrics can be added: {error}. Remove it."
            ) from error
        _write_json(path, {**earlier, **metrics})


def _write_json(path: Path, values: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(values, indent=4, sort_keys=True) + "\n")


def reporting_callbacks(report_to: list[str], logging_dir: str | None) -> list[Any]:
    """Return transformers' callbacks for these trackers ("all": the installed ones), with TensorBoard's folder.

    An exception in one of their events is logged once, and training continues.
    """
    if not report_to:
        return []
    try:
        integrations = importlib.import_module("transformers.integrations")
        names = integrations.get_available_reporting_integrations() if "all" in report_to else report_to
        for name in names:
            check_installed(name)
        callbacks = [kind() for kind in integrations.get_reporting_integration_callbacks(names)]
    except ConfigError:
        raise
    except ImportError as error:
        raise ConfigError(f"report_to={report_to} needs transformers' callbacks: {error}") from error
    except (RuntimeError, ValueError) as error:  # a tracker whose package is missing, or that does not exist
        near = nearest(str(error).partition(" ")[0], integrations.INTEGRATION_TO_CALLBACK)
        hint = f" Did you mean {near!r}?" if near and isinstance(error, ValueError) else ""
        raise ConfigError(f"report_to={report_to}: {error}{hint}") from error
    for callback in callbacks:
        if hasattr(callback, "logging_dir") and logging_dir is not None:
            callback.logging_dir = logging_dir
        # By its name, also after install().
        base = next(kind for kind in type(callback).__mro__ if kind.__name__ == "TrainerCallback")
        for event in (name for name in dir(base) if name.startswith("on_")):
            # The other events are no-ops; replacing them would make this callback look like it needs every step.
            if getattr(type(callback), event, None) is not getattr(base, event):
                setattr(callback, event, _guarded(callback, event))
    return callbacks


def _guarded(callback: Any, event: str) -> Any:
    """Return an event that never raises; its first exception is logged."""
    method, has_failed = getattr(callback, event), False

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_failed
        try:
            return method(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - no tracker error may stop training
            if not has_failed:
                place, kind = f"{type(callback).__name__}.{event}", type(error).__name__
                _logger.warning("%s failed, and training continues: %s: %s", place, kind, error)
            has_failed = True
            return None

    return call
