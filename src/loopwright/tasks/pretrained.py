"""The only place that opens transformers models. Their code and their pickles need consent, whatever the files ask for.

A failure becomes an InputError that names the file.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from glob import escape
from pathlib import Path
from shlex import quote
from typing import Any

from loopwright.config.model_limits import MOST_MODULES, BuildLimitError, limited
from loopwright.errors import CheckpointError, InputError, LoopwrightError

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
CONSENTS = ("trust_remote_code", "allow_pickle", "allow_code", "trust_run")  # of one call; no file can give them
_SIZES = re.compile(r"^(num|n)_.*layers?$|heads?$|(hidden|intermediate|vocab)_size$")  # feature layers may be negative
_PICKLES = ("pytorch_model*.bin", "adapter_model*.bin", "*.pth", "*.ckpt", "model*.pt")
_OBJECTS = ("config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json", "vocab.json")  # no lists
_MODULE_BYTES = 1 << 12  # files of so many bytes for each module explain a model of many modules
_LEAST_BYTES = 1 << 30  # models of less than that are built, whatever the size of their files is
_CONVERT = (
    "import torch; from glob import glob; from safetensors.torch import save_file; "
    "w = {{k: v.clone() for f in sorted(glob({pickles})) "
    'for k, v in torch.load(f, map_location="cpu", weights_only=True).items()}}; '
    'save_file(w, {target}, {{"format": "pt"}})'
)
_given: ContextVar[frozenset[str]] = ContextVar("consents", default=frozenset())


@contextmanager
def consenting(args: Any) -> Iterator[None]:
    """Open models with the consents among these arguments."""
    token = _given.set(frozenset(name for name in CONSENTS if getattr(args, name)))
    try:
        yield
    finally:
        _given.reset(token)


def allows_pickle() -> bool:
    """Whether the user has allowed pickles for this call."""
    return "allow_pickle" in _given.get()


def open_pretrained(kind: Any, path: str, file: str, **options: Any) -> Any:
    """Call `from_pretrained`; `file` is blamed for an error if no file is damaged."""
    with opening(path, file):
        found = kind.from_pretrained(path, trust_remote_code="trust_remote_code" in _given.get(), **options)
    for each in (found, getattr(found, "generation_config", None)):
        if type(each).__name__ == "GenerationConfig":  # it takes the flag for one of its settings
            vars(each).pop("trust_remote_code", None)
    return found


def open_weights(kind: Any, path: str, config: Any, **options: Any) -> Any:
    """Call `from_pretrained` of a model class; without consent only safetensors files are read."""
    if not allows_pickle():
        _refuse_pickles(path)
    _check_model(kind, path, config)
    options["use_safetensors"] = None if allows_pickle() else True
    try:
        return open_pretrained(kind, path, "config.json", config=config, **options)
    except InputError as error:
        if os.path.isdir(path) or not isinstance(error.__cause__, OSError):
            raise
        fix = "--allow_pickle"
        raise InputError("model.pickle", f"{path} has no safetensors files", saw=error.saw, fix=fix) from error


def build(kind: Any, path: str, config: Any) -> Any:
    """Call `from_config` of a model class."""
    _check_model(kind, path, config)
    with opening(path, "config.json"):
        return _from_config(kind, config)


def _check_model(kind: Any, path: str, config: Any) -> None:
    with opening(path, "config.json"):
        kind._model_mapping.get(type(config), None)  # import its code first, which takes longer than to build a model
    check_size(path, lambda: _from_config(kind, config))


def _from_config(kind: Any, config: Any) -> Any:
    return kind.from_config(config, trust_remote_code="trust_remote_code" in _given.get())


def has_trusted_code(config: Any, auto_class: str) -> bool:
    """Whether the folder of a config has its own class for a task, and the user trusts its code."""
    return "trust_remote_code" in _given.get() and auto_class in (getattr(config, "auto_map", None) or {})


def check_config(path: str, config: Any) -> None:
    """Refuse a config that needs code from elsewhere, or has values that models accept and then fail with."""
    parts = [config]
    for part in parts:
        parts += [value for value in vars(part).values() if hasattr(value, "sub_configs")]
        kernel = getattr(part, "_attn_implementation", None)  # transformers has no public name for it
        kernels = kernel.values() if isinstance(kernel, dict) else [kernel]
        if any("/" in str(each) for each in kernels) and "trust_remote_code" not in _given.get():
            raise needs_code(path, f"its config.json asks for the attention kernel {kernel} of the Hub, which is code")
        for name, value in vars(part).items():
            if _SIZES.search(name) is not None and isinstance(value, int) and value < 0:
                raise _unusable(Path(path) / "config.json", f"{name}: {value!s:.40}, expected at least 0")
            if "dropout" in name and isinstance(value, (int, float)) and not 0 <= value <= 1:
                raise _unusable(Path(path) / "config.json", f"{name}: {value:g}, expected 0 to 1")
    names = config.architectures or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _unusable(Path(path) / "config.json", f"architectures: {names!s:.40}, expected a list of names")


@contextmanager
def finding_base(name: str | None, why: str) -> Iterator[None]:
    """Turn the error about a model folder that has moved since the run began into one with a fix that every verb has.

    Args:
        why: the run needs it.
    """
    try:
        yield
    except InputError as error:
        what = f"the base model of this run cannot be opened: {name}"
        fix = f"put the model back: {name}   or   give the folder it is in now as --model"
        raise InputError(str(error.code), what, saw=[error.what, why], fix=fix) from error


def needs_code(path: str, why: str) -> InputError:
    """Return the error about a model whose code is not in transformers."""
    saw = [why, "--trust_remote_code runs that code with your rights: read it first"]
    fix = "--trust_remote_code   or   leave out --model"
    return InputError("model.code", f"{path} needs code that does not come with transformers", saw=saw, fix=fix)


@contextmanager
def opening(path: str, file: str) -> Iterator[None]:
    """Turn an error of a library about a model's files into an InputError with the damaged file, or else `file`."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:  # the tokenizers of Rust panic with one
        is_ours = isinstance(error, LoopwrightError) and not isinstance(error, CheckpointError)
        if is_ours or "DefaultCPUAllocator" in str(error) or type(error).__name__ == "OutOfMemoryError":
            raise
        saw = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        damaged = find_damage(Path(path)) or (Path(path) / file if os.path.isdir(path) else Path(path),)
        raise _unusable(*damaged, saw) from error


def find_damage(folder: Path) -> tuple[Path, str] | None:
    """Return the first damaged file of a model folder, and what is wrong with it."""
    for path in sorted(filter(Path.is_file, folder.iterdir())) if folder.is_dir() else ():
        try:
            if path.name in _OBJECTS or path.name.endswith(("_config.json", ".index.json")):
                content = json.loads(path.read_text(encoding="utf-8"))
                if not isinstance(content, dict):
                    return path, f"it holds a {type(content).__name__}, expected an object"
                names = content.get("weight_map", {}).values() if path.name.endswith(".index.json") else ()
                if missing := sorted({str(name) for name in names if not (folder / str(name)).is_file()}):
                    return path, f"it names {', '.join(missing[:3])}, which the folder does not have"
            elif path.suffix == ".safetensors":
                from safetensors import safe_open

                with safe_open(path, "np") as tensors:
                    tensors.keys()
            if path.name == "tokenizer.json":
                from tokenizers import Tokenizer

                Tokenizer.from_file(str(path))
        except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
            raise
        except BaseException as error:  # noqa: BLE001 - whatever the libraries raise about the file is the answer
            return path, " ".join(str(error).split())[:200]
    return None


def _unusable(file: Path, *saw: str) -> InputError:
    fix = "leave out --model   or   copy or download the model again"
    return InputError("model.folder", f"{file} cannot be used", saw=saw, fix=fix)


def _refuse_pickles(path: str) -> None:
    """Refuse a folder whose weights are pickles only, or whose index of safetensors files names others."""
    folder = Path(path)
    for weights in ("model", "adapter_model"):
        index = folder / f"{weights}.safetensors.index.json"
        if index.is_file():
            with opening(path, index.name):
                names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
                others = sorted({str(name) for name in names if not re.fullmatch(r"[\w.-]+\.safetensors", str(name))})
            if others:
                raise _unusable(index, f"it names {others[0][:80]}, expected .safetensors files of the folder")
        elif not (folder / f"{weights}.safetensors").is_file():
            own = [pattern for pattern in _PICKLES if pattern.startswith("adapter") == weights.startswith("adapter")]
            for pattern in own if folder.is_dir() else ():
                if found := sorted(each.name for each in folder.glob(pattern)):
                    pickles, target = f"{escape(path)}/{pattern}", f"{path}/{weights}.safetensors"
                    command = quote(_CONVERT.format(pickles=repr(pickles), target=repr(target)))
                    what = f"{folder / found[0]} is a pickle, which can hold code"
                    fix = f"python -c {command}   or   --allow_pickle"
                    raise InputError("model.pickle", what, saw=[f"the folder has no {weights}.safetensors"], fix=fix)


def check_size(path: str, make: Callable[[], Any]) -> None:
    """Refuse a config whose model is out of all proportion to its weights, or to the memory if there are none."""
    import torch

    files = [*Path(path).glob("*.safetensors"), *Path(path).glob("*.bin")] if os.path.isdir(path) else []
    there = sum(each.stat().st_size for each in files)
    limit = max(_LEAST_BYTES, 8 * there or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))  # 4 bits or 32
    needed = 0.0
    with refusing_large(path, there // _MODULE_BYTES), torch.random.fork_rng(devices=[]), torch.device("meta"):
        try:
            needed = sum(parameter.numel() * parameter.element_size() for parameter in make().parameters())
        except Exception as error:  # noqa: BLE001 - the model is built once more, and the error reported there
            needed = math.inf if "overflow" in str(error) else 0.0
    if needed > limit:
        saw = f"it describes a model of {needed / 1e9:,.1f} GB, and the limit for these files is {limit / 1e9:,.1f} GB"
        raise _unusable(Path(path) / "config.json", saw)


@contextmanager
def refusing_large(path: str, num_modules: int = 0) -> Iterator[None]:
    """Refuse a config whose model takes too long to build; code that the user trusts may take any time."""
    try:
        with nullcontext() if "trust_remote_code" in _given.get() else limited(max(MOST_MODULES, num_modules)):
            yield
    except BuildLimitError as error:
        raise _unusable(Path(path) / "config.json", str(error)) from None
