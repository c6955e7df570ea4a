"""What modules hold beside their `state_dict`: how they were built, and state that forward passes change."""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any

import torch
from torch import Tensor, nn

from loopwright.checkpoint.fingerprint import Change

# Of every module; accelerate wraps its forward, and recomputed activations change no number.
_OF_TORCH = frozenset(vars(nn.Module())) | {"forward", "gradient_checkpointing"}
_FUNCTIONS = (FunctionType, BuiltinFunctionType, type)  # an activation
_COMPARED_NUMBERS = 65536  # a larger tensor has changed if autograd says so; smaller ones are compared
_CLASS, _FROZEN = "class", "frozen parameters"  # neither is the name of an attribute
_NOT_OF_A_MODEL = ("transformers_version", "architectures", "dtype", "torch_dtype")  # entries of a config


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, None, or a tuple of them."""
    return type(value) in (bool, int, float, str, NoneType) or (type(value) is tuple and all(map(is_plain, value)))


def plain_values(model: nn.Module) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the attributes of each module and config, and a copy of the plain ones: `update` puts them back."""
    holders = {id(each): vars(each) for part in model.modules() for each in (part, _config(part)) if each is not None}
    return [(held, {name: value for name, value in held.items() if is_plain(value)}) for held in holders.values()]


def describe_modules(**modules: Any) -> dict[str, list[str]]:
    """Return the paths of modules by how they are built: class, plain attributes, frozen parameters, config."""
    found: dict[str, list[str]] = {}
    configs: set[int] = set()
    for path, part in _parts(modules):
        values = {name: value for name, value in vars(part).items() if name[0] != "_" and name not in _OF_TORCH}
        kept = {name: value for name, value in values.items() if _is_setting(value)}
        kept |= {name: each.__name__ for name, each in values.items() if isinstance(each, _FUNCTIONS)}
        bases = type(part).__bases__
        kept[_CLASS] = (bases[1] if bases[0].__name__ == "FSDPModule" else type(part)).__name__
        weights = part._parameters.items()  # without those of the children
        kept[_FROZEN] = [name for name, each in weights if each is not None and not each.requires_grad]
        config = _config(part)
        if config is not None and id(config) not in configs:
            configs.add(id(config))
            # transformers' setting, which its configs keep under another private name.
            entries = {**vars(config), "attention": getattr(config, "_attn_implementation", None)}
            names = [name for name in entries if name[0] != "_" and name not in _NOT_OF_A_MODEL]
            kept |= {f"config.{name}": entries[name] for name in names if _is_setting(entries[name])}
        found.setdefault(json.dumps(kept, sort_keys=True), []).append(path)
    return found


def changed_modules(saved: Mapping[str, Any], current: Mapping[str, Any], moved: Container[str]) -> list[Change]:
    """Return how modules differ from the saved ones, without what only one side has and the attributes in `moved`."""
    before, after = ({path: json.loads(text) for text in tree for path in tree[text]} for tree in (saved, current))
    changes = []
    for path in {**before, **after}:
        old, new = before.get(path, {}), after.get(path, {})
        if old.get(_CLASS) != new.get(_CLASS):
            changes.append(Change(path, old.get(_CLASS), new.get(_CLASS)))
            continue
        names = [name for name in old if name in new and f"{path}.{name}" not in moved]
        # A config's None is decided by the first forward pass.
        names = [name for name in names if not name.startswith("config.") or None not in (old[name], new[name])]
        differ = [name for name in names if repr(old[name]) != repr(new[name])]  # as texts: nan equals nan
        changes += [Change(f"{path}.{name}", old[name], new[name]) for name in differ]
    return changes


class HiddenState:
    """State of modules outside their `state_dict`: non-persistent buffers, plain attributes, small tensor attributes.

    Only what has changed since this object was made is state; the rest follows from how the modules are built.
    """

    def __init__(self, **modules: Any) -> None:
        self._roots = modules
        self._restored: set[str] = set()
        values = {key: holder[name] for key, holder, name in self._entries()}
        # Autograd counts the in-place changes of a tensor.
        self._versions = {key: value._version for key, value in values.items() if isinstance(value, Tensor)}
        self._initial = {key: value.detach().clone() if _is_small(value) else value for key, value in values.items()}

    def changed(self) -> dict[str, Any]:
        """Return the changed entries, by path."""
        values = ((key, holder[name]) for key, holder, name in self._entries())
        return {key: value for key, value in values if key in self._restored or self._is_changed(key, value)}

    @torch.no_grad()
    def restore(self, saved: Mapping[str, Any], device: torch.device) -> None:
        """Restore what `changed` returned; `device` is for tensors that the modules do not have yet."""
        parts = dict(_parts(self._roots))
        self._restored = set(saved)
        for key, value in saved.items():
            path, _, name = key.rpartition(".")
            part = parts.get(path)
            if part is None or (name not in part._buffers and name not in vars(part) and hasattr(part, name)):
                continue
            holder: dict[str, Any] = part._buffers if name in part._buffers else vars(part)
            now = holder.get(name)
            if isinstance(value, Tensor):
                value = value.to(getattr(now, "device", device))
                if isinstance(now, Tensor) and (now.shape, now.dtype) == (value.shape, value.dtype):
                    value = now.copy_(value)
            holder[name] = value

    def _entries(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        for path, part in _parts(self._roots):
            # Torch has no public way to tell them from those in the state.
            for name in sorted(part._non_persistent_buffers_set & part._buffers.keys()):
                yield f"{path}.{name}", part._buffers, name
            for name, value in vars(part).items():
                if name not in _OF_TORCH and (is_plain(value) or (type(value) is Tensor and _is_small(value))):
                    yield f"{path}.{name}", vars(part), name

    def _is_changed(self, key: str, value: Any) -> bool:
        before = self._initial.get(key, self)  # itself, which no value is, if it is new
        if not isinstance(value, Tensor) or not isinstance(before, Tensor):
            return not (value is before or (type(value) is type(before) and value == before))
        if not _is_small(value):
            return value is not before or value._version != self._versions[key]
        return value.dtype != before.dtype or not torch.equal(value, before.to(value.device))


def _parts(modules: Mapping[str, Any]) -> Iterator[tuple[str, nn.Module]]:
    for root, module in modules.items():
        if isinstance(module, nn.Module):
            yield from module.named_modules(prefix=root)


def _config(part: nn.Module) -> Any:
    config = getattr(part, "config", None)
    return config if hasattr(config, "to_dict") and hasattr(config, "__dict__") else None


def _is_setting(value: Any) -> bool:
    return is_plain(value) and not (isinstance(value, str) and ("/" in value or "\\" in value or not value))  # a path


def _is_small(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.requires_grad and value.numel() <= _COMPARED_NUMBERS
