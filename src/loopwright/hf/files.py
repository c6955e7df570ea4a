"""Model folders and metric files: what lies in a checkpoint beside the state, and what `save_model` writes."""

from __future__ import annotations

import importlib
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

from loopwright.checkpoint.named import untied
from loopwright.checkpoint.store import stored, write_file
from loopwright.errors import CheckpointError, ConfigError

_logger = logging.getLogger("loopwright.hf")

WEIGHTS = "model.safetensors"


def save_model(folder: Path, model: Any, processing_class: Any, args: Any) -> None:
    """Write the model as `from_pretrained` reads it, its tokenizer, and the arguments as JSON.

    A module without `save_pretrained` gets its weights alone, as model.safetensors.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if callable(getattr(model, "save_pretrained", None)):
        model.save_pretrained(folder)
    else:
        from safetensors.torch import save_file

        weights, _ = untied({name: value for name, value in model.state_dict().items()})
        write_file(folder / WEIGHTS, lambda aside: save_file(stored(weights), aside, {"format": "pt"}))
    if callable(getattr(processing_class, "save_pretrained", None)):
        processing_class.save_pretrained(folder)
    (folder / "training_args.json").write_text(args.to_json_string(), encoding="utf-8")


class FolderFiles:
    """The files of a model folder that training does not change: configuration and tokenizer, read once.

    The adapter of a peft model changes with every update and is written anew each time.
    """

    def __init__(self, model: Any, processing_class: Any, args: Any) -> None:
        self._model = model
        self._files: dict[str, bytes] = {"training_args.json": args.to_json_string().encode()}
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for part in ("config", "generation_config"):
                configuration = getattr(model, part, None)
                if callable(getattr(configuration, "save_pretrained", None)):
                    self._save(configuration, folder)
            if callable(getattr(processing_class, "save_pretrained", None)):
                self._save(processing_class, folder)
            self._files |= {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    @staticmethod
    def _save(what: Any, folder: Path) -> None:
        try:
            what.save_pretrained(folder)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"the {type(what).__name__} cannot be saved with checkpoints: {error}") from error

    def current(self) -> dict[str, bytes]:
        """Return the files by name."""
        if not is_adapter(self._model):
            return dict(self._files)
        with tempfile.TemporaryDirectory() as name:
            self._model.save_pretrained(name)
            adapter = {path.name: path.read_bytes() for path in Path(name).iterdir() if path.is_file()}
        return {**self._files, **adapter}


def is_adapter(model: Any) -> bool:
    """Whether a model is a peft model, whose `save_pretrained` writes the adapter alone."""
    return hasattr(model, "peft_config") and callable(getattr(model, "get_base_model", None))


def align_special_tokens(model: Any, processing_class: Any) -> None:
    """Give the model's configuration the tokenizer's special tokens where they differ, and say so."""
    changed = {}
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        wanted = getattr(processing_class, name, None)
        for configuration in (getattr(model, "config", None), getattr(model, "generation_config", None)):
            if wanted is None or configuration is None or not hasattr(configuration, name):
                continue
            present = getattr(configuration, name)
            if present != wanted and not (isinstance(present, (list, tuple)) and wanted in present):
                setattr(configuration, name, wanted)
                changed[name] = wanted
    if changed:
        _logger.info("the model's special tokens now are the tokenizer's: %s", changed)


def log_metrics(split: str, metrics: dict[str, Any]) -> None:
    """Print metrics, a line each, sorted."""
    shown = {name: f"{value:.4f}" if isinstance(value, float) else str(value) for name, value in metrics.items()}
    width = max((len(name) for name in shown), default=0)
    lines = [f"***** {split} metrics *****", *(f"  {name:{width}} = {shown[name]}" for name in sorted(shown))]
    print("\n".join(lines))  # noqa: T201 - what it is for


def save_metrics(folder: Path, split: str, metrics: dict[str, Any], combined: bool) -> None:
    """Write `<split>_results.json`, and add to `all_results.json` if `combined`."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / f"{split}_results.json", metrics)
    if combined:
        path = folder / "all_results.json"
        earlier = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        _write_json(path, {**earlier, **metrics})


def _write_json(path: Path, values: dict[str, Any]) -> None:
    text = json.dumps(values, indent=4, sort_keys=True) + "\n"
    write_file(path, lambda aside: Path(aside).write_text(text, encoding="utf-8"))


def write_model_card(folder: Path, model: Any, state: Any, details: dict[str, Any]) -> None:
    """Write a README.md that says what was trained and how well it does; further details a line each."""
    name = details.pop("model_name", None) or folder.resolve().name
    evaluations = [entry for entry in state.log_history if "eval_loss" in entry]
    lines = [f"# {name}", "", f"A {type(model).__name__}, trained for {state.global_step} updates with loopwright.", ""]
    lines += [f"- {key}: {value}" for key, value in details.items() if value is not None]
    lines += [f"- {key}: {value}" for key, value in (evaluations[-1] if evaluations else {}).items()]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def reporting_callbacks(report_to: list[str], logging_dir: str | None) -> list[Any]:
    """Return transformers' callbacks for these trackers; importing transformers only if there are any.

    Args:
        report_to: the trackers' names.
        logging_dir: where TensorBoard's files go; None leaves it to the callback.

    Raises:
        ConfigError: transformers is not installed, or does not know the tracker.
    """
    if not report_to:
        return []
    try:
        integrations = importlib.import_module("transformers.integrations")
        callbacks = [kind() for kind in integrations.get_reporting_integration_callbacks(report_to)]
    except ImportError as error:
        raise ConfigError(
            f"report_to={report_to} uses transformers' callbacks, which cannot be had: {error}"
        ) from error
    except ValueError as error:
        raise ConfigError(f"report_to={report_to}: {error}") from error
    for callback in callbacks:
        if hasattr(callback, "logging_dir") and logging_dir is not None:
            callback.logging_dir = logging_dir
    return callbacks
