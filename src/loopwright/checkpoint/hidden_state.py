"""What modules hold beside their `state_dict`: how they were built, and state that training changes."""

from __future__ import annotations

import copy
import hashlib
import io
import itertools
import json
import logging
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Container, Iterator, Mapping
from contextlib import suppress
from marshal import dumps
from pickle import Pickler
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Sampler

from loopwright.checkpoint.encoding import encode
from loopwright.checkpoint.fingerprint import Change
from loopwright.engine.buffers import OF_TORCH, STATES, TAG, is_of_library, put, state_of
from loopwright.engine.nested import map_tensors
from loopwright.engine.processes import gather_objects
from loopwright.engine.sharding import local
from loopwright.errors import CheckpointError

_FUNCTIONS = (FunctionType, BuiltinFunctionType, type)  # an activation
_NAMED = (*_FUNCTIONS, MethodType, ModuleType, io.IOBase, logging.Logger)  # compared by name alone
_CLASS, _FROZEN, _LIBRARY = "class", "frozen parameters", "of a library"  # none is the name of an attribute
_NOT_OF_A_MODEL = ("transformers_version", "architectures", "dtype", "torch_dtype")  # entries of a config
_LONGEST = 200  # characters of a value; of a longer one the hash is compared
_MOST_BYTES = 100_000_000  # of the objects in one attribute that are compared
_WORDS = 1 << 20  # of a tensor, added up at once
_DELETED = {TAG: "deleted"}
_NUMBERS = itertools.count()
_EXACT = frozenset((bool, int, float, str, bytes, NoneType, Tensor, np.ndarray))  # restored as they were saved
_CONTAINERS = frozenset((list, tuple, set, frozenset, deque, dict, OrderedDict, Counter))


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, None, or a tuple of them."""
    return type(value) in (bool, int, float, str, NoneType) or (type(value) is tuple and all(map(is_plain, value)))


def describe_modules(**modules: Any) -> dict[str, list[str]]:
    """Return the paths of modules by how they are built: class, plain attributes, frozen parameters, config."""
    found: dict[str, list[str]] = {}
    configs: set[int] = set()
    for path, part in _parts(modules):
        values = {name: value for name, value in vars(part).items() if name[0] != "_" and name not in OF_TORCH}
        kept = {name: _short(value) for name, value in values.items() if _is_setting(value)}
        kept |= {name: each.__name__ for name, each in values.items() if isinstance(each, _FUNCTIONS)}
        bases = type(part).__bases__
        kept[_CLASS] = (bases[1] if bases[0].__name__ == "FSDPModule" else type(part)).__name__
        kept |= {_LIBRARY: True} if is_of_library(part) else {}
        kept[_FROZEN] = _frozen(part._parameters)
        config = getattr(part, "config", None)
        if id(config) not in configs and _is_config(config):
            configs.add(id(config))
            # transformers' setting, which its configs keep under another private name.
            entries = {**vars(config), "attention": getattr(config, "_attn_implementation", None)}
            names = [name for name in entries if name[0] != "_" and name not in _NOT_OF_A_MODEL]
            kept |= {f"config.{name}": _short(entries[name]) for name in names if _is_setting(entries[name])}
        found.setdefault(json.dumps(kept, sort_keys=True), []).append(path)
    return found


def changed_modules(
    saved: Mapping[str, Any], current: Mapping[str, Any], moved: Container[str]
) -> tuple[list[Change], list[Change]]:
    """Return how modules differ from the saved ones, without what only one side has and the attributes in `moved`.

    The second list has attributes of classes that no library defines. They may be a rank, a time or a name.
    """
    before, after = ({path: json.loads(text) for text in tree for path in tree[text]} for tree in (saved, current))
    changes: tuple[list[Change], list[Change]] = [], []
    for path in {**before, **after}:
        old, new = before.get(path, {}), after.get(path, {})
        if old.get(_CLASS) != new.get(_CLASS):
            changes[0].append(Change(path, old.get(_CLASS), new.get(_CLASS)))
            continue
        names = [name for name in old if name in new and f"{path}.{name}" not in moved]
        # A config's None is decided by the first forward pass.
        names = [name for name in names if not name.startswith("config.") or None not in (old[name], new[name])]
        for name in names:
            if repr(old[name]) != repr(new[name]):  # as texts: nan equals nan
                is_own = _LIBRARY not in new and name != _FROZEN and not name.startswith("config.")
                changes[is_own].append(Change(f"{path}.{name}", old[name], new[name]))
    return changes


class Attributes(NamedTuple):
    """An object whose plain attributes, and the weights of whose modules, are state; but for some names."""

    owner: Any
    without: Container[str]


class HiddenState:
    """State of modules outside their `state_dict`: attributes, non-persistent buffers, which parameters are frozen.

    Only what has changed since this object was made is state; the rest follows from how the modules are built.
    """

    def __init__(self, **modules: Any) -> None:
        self._roots = modules
        self._restored: set[str] = set()
        self._look()
        self._initial = {key: self._digest(key) for key in self._entries}
        self._copies: dict[str, Any] = {}

    def changed(self) -> tuple[dict[str, Any], list[str], dict[str, Any]]:
        """Return the changed entries by path, the paths of those that cannot be saved, and digests of both."""
        self._look()
        saved, lost, digests = {}, [], {key: self._digest(key) for key in self._entries}
        keys = [key for key in {**self._initial, **digests} if digests.get(key) != self._initial.get(key)]
        keys = [key for key in keys if not self._is_other(key)]
        for key in dict.fromkeys((*keys, *(key for key in self._restored if key in digests))):
            try:
                saved[key] = self._packed(key) if key in digests else _DELETED
            except (CheckpointError, RecursionError):
                lost.append(key)
        return saved, lost, {key: digests.get(key) for key in (*saved, *lost)}

    def changed_anywhere(self) -> dict[str, Any]:
        """Return `changed` over all processes: what all have in common, what each has, and what cannot be saved."""
        saved, lost, digests = self.changed()
        everyone = gather_objects((digests, lost))
        first = everyone[0][0]
        differing = {key for own, _ in everyone for key in own | first if own.get(key) != first.get(key)}
        own = {key: value for key, value in saved.items() if key in differing}
        by_rank = gather_objects(map_tensors(own, Tensor.cpu)) if differing else []
        common = {key: value for key, value in saved.items() if key not in differing}
        return {"common": common, "by_rank": by_rank, "lost": sorted({key for _, names in everyone for key in names})}

    def restore(self, saved: Mapping[str, Any], device: torch.device) -> list[str]:
        """Restore what `changed` returned, and return the paths of what could not be; `device` is for new tensors."""
        self._look()
        self._restored |= set(saved)
        return [key for key, value in saved.items() if not self._put(key, value, device)]

    def keep(self) -> None:
        """Copy everything that can be copied, for `put_back`; called before anything changes."""
        for key in self._entries:
            with suppress(CheckpointError, RecursionError):
                self._copies[key] = copy.deepcopy(self._packed(key))

    def put_back(self, device: torch.device) -> None:
        """Put back what has changed since `keep`, and remove what is new; objects, as of a wrapper, stay."""
        saved, _, changed = self.changed()
        new = {key: _DELETED for key in saved if key not in self._initial}
        self.restore(new | {key: self._copies[key] for key in changed if key in self._copies}, device)

    def _look(self) -> None:
        """Find the attributes of modules and configs, and the memory of what is in the `state_dict`."""
        self._entries: dict[str, tuple[dict[str, Any], str]] = {}
        self._owners: dict[str, Any] = dict(_parts(self._roots))
        self._owned = {id(part) for part in self._owners.values()}
        for path, part in list(self._owners.items()):
            held, weights, buffers = vars(part), part._parameters, part._buffers  # also those that are None
            hidden = part._non_persistent_buffers_set  # torch has no public way to tell them from the saved ones
            tensors = [*weights.values(), *(buffers[name] for name in buffers if name not in hidden)]
            self._owned.update([_memory(tensor) for tensor in tensors if tensor is not None])
            self._entries |= {f"{path}.{name}": (buffers, name) for name in buffers if name in hidden}
            own = [name for name in held if name not in OF_TORCH]
            # What a library keeps under a private name is a cache, or a mark of what it has done to this very object.
            own = [name for name in own if name[0] != "_"] if is_of_library(part) else own
            self._entries |= {f"{path}.{name}": (held, name) for name in own}
            self._entries |= {f"{path}.{_FROZEN}": (weights, _FROZEN)} if weights else {}
            config = held.get("config")
            if id(config) not in self._owned and _is_config(config):
                self._owned.add(id(config))
                self._owners[f"{path}.config"] = config
                self._entries |= {f"{path}.config.{name}": (vars(config), name) for name in vars(config)}
        for path, root in self._roots.items():
            if isinstance(root, Attributes):
                held, self._owners[path] = vars(root.owner), root.owner
                for name in [name for name in held if name not in root.without]:
                    if isinstance(held[name], nn.Module) or _is_exact(_plain_dicts(held[name])):
                        self._entries[f"{path}.{name}"] = held, name
        self._owned.discard(0)

    def _is_other(self, key: str) -> bool:
        """Whether something that is not state has this name: an object, or an attribute of those left out."""
        path, _, name = key.rpartition(".")
        root = self._roots.get(path) if key not in self._entries else None
        return isinstance(root, Attributes) and (name in root.without or name in vars(root.owner))

    def _value(self, key: str) -> Any:
        holder, name = self._entries[key]
        if name == _FROZEN:
            return _frozen(holder)
        value = holder[name]
        if isinstance(value, nn.Module) and isinstance(self._roots.get(key.rpartition(".")[0]), Attributes):
            # A reference model or a loss function; what it shares with the model is saved there.
            return {each: tensor for each, tensor in value.state_dict().items() if not self._is_owned(tensor)}
        return _plain_dicts(value)

    def _is_owned(self, value: Any) -> bool:
        return isinstance(value, Tensor) and _memory(value) in self._owned

    def _digest(self, key: str) -> Any:
        """Return a digest of a value: bit by bit, and whatever the identity of the objects."""
        value = self._value(key)
        try:
            # Plain values, in C; this version of the format looks at no identity. An array would lose its shape.
            text = dumps(value if type(value) is not np.ndarray else NotImplemented, 2)
        except ValueError:
            try:
                text = _pickled(value, self._owned)
            except Exception:  # noqa: BLE001 - whatever an object raises that cannot be looked at: never equal
                return object()
        return text if len(text) < _LONGEST else hashlib.sha256(text).digest()

    def _packed(self, key: str) -> Any:
        """Return a value in the types that a checkpoint restores as they are, or raise a CheckpointError."""
        value = self._value(key)
        value = state_of(value) if type(value) in STATES else value
        if not _is_exact(value):
            raise CheckpointError(f"{key} is a {type(value).__qualname__}, which cannot be saved")
        encode(value, {})
        return value

    @torch.no_grad()
    def _put(self, key: str, saved: Any, device: torch.device) -> bool:
        path, _, name = key.rpartition(".")
        owner = self._owners.get(path)
        if owner is None or (key not in self._entries and (_is_taken(owner, name) or self._is_other(key))):
            return False
        holder, name = self._entries.get(key, (vars(owner), name))
        try:
            if type(saved) is dict and saved == _DELETED:
                holder.pop(name, None)
            elif name == _FROZEN:
                for each, parameter in holder.items():
                    if parameter is not None and parameter.requires_grad != (each not in saved):
                        parameter.requires_grad_(each not in saved)
            elif isinstance(holder.get(name), nn.Module) and type(saved) is dict:
                holder[name].load_state_dict(saved, strict=False)
            else:
                now = holder.get(name)
                saved = map_tensors(saved, lambda tensor: tensor.to(getattr(now, "device", device)))
                holder[name] = put(now, saved)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError):
            return False  # there is another object than in the saved run
        return True


class SamplerState(HiddenState):
    """State of samplers, and of samplers inside them: their `state_dict`, or else their attributes without `data`."""

    def _look(self) -> None:
        data, found = self._roots.get("data"), [root for root in self._roots.items() if root[0] != "data"]
        self._entries, self._owned = {}, set()
        for path, part in found:  # which grows
            if id(part) in self._owned:
                continue
            self._owned.add(id(part))
            is_stateful = hasattr(part, "load_state_dict")
            held = {"state_dict": part.state_dict()} if is_stateful else getattr(part, "__dict__", {})
            for name, value in held.items():
                is_plain_type = type(value) in _EXACT or isinstance(value, (*_CONTAINERS,))
                if value is not data and (is_plain_type or not hasattr(value, "__getitem__")):  # not a dataset
                    self._entries[f"{path}.{name}"] = held, name
                inner = enumerate(value[:1000] if type(value) is list else [value])  # a longer one is of numbers
                found += [(f"{path}.{name}.{i}", one) for i, one in inner if isinstance(one, Sampler)]
        self._owners = dict(found)

    def _put(self, key: str, saved: Any, device: torch.device) -> bool:
        path, _, name = key.rpartition(".")
        if name != "state_dict":
            return super()._put(key, saved, device)
        if is_there := hasattr(self._owners.get(path), "load_state_dict"):
            self._owners[path].load_state_dict(copy.deepcopy(saved))
        return is_there


class _Digest(Pickler):
    """Pickles an object to compare it, never to load it; tensors are checksums, and what the model owns is a name."""

    def __init__(self, file: io.BytesIO, owned: set[int]) -> None:
        super().__init__(file)
        self._file, self._owned = file, owned
        self.fast = True  # without references to objects that came before

    def persistent_id(self, value: Any) -> Any:
        """Return the text or checksum to compare instead of an object; None to compare its parts."""
        if isinstance(value, Tensor):
            return "weight" if _memory(value) in self._owned else (value.dtype, tuple(value.shape), _checksum(value))
        if type(value) in STATES:
            return _pickled(state_of(value), self._owned)
        is_of_others = hasattr(value, "__dict__") and is_of_library(value) and not isinstance(value, nn.Module)
        if is_of_others or id(value) in self._owned or isinstance(value, _NAMED) or self._file.tell() > _MOST_BYTES:
            return getattr(value, "__qualname__", type(value).__qualname__)
        try:
            value.__reduce_ex__(4)
        except Exception:  # noqa: BLE001 - a lock, say; an iterator is never known to be where it was
            return type(value).__qualname__, next(_NUMBERS) if isinstance(value, Iterator) else 0
        return None


def _pickled(value: Any, owned: set[int]) -> bytes:
    file = io.BytesIO()
    _Digest(file, owned).dump(value)
    return file.getvalue()


def _is_exact(value: Any) -> bool:
    """Whether a checkpoint restores a value as it is, with all its types."""
    if type(value) in _CONTAINERS:
        children = value if not isinstance(value, Mapping) else [*value, *value.values()]
        return all(map(_is_exact, children))
    return type(value) in _EXACT


def _plain_dicts(value: Any) -> Any:
    """Return a value with plain dicts in place of defaultdicts, which take their entries back on a resume."""
    if type(value) not in (dict, defaultdict):
        return value
    return {name: _plain_dicts(each) for name, each in value.items()}


def _memory(tensor: Tensor) -> int:
    """Return the address of a tensor's memory, which its views share; 0 if it has none."""
    try:
        return (tensor if type(tensor) in (Tensor, nn.Parameter) else local(tensor)).untyped_storage().data_ptr()
    except RuntimeError:  # sparse, or of a subclass without a storage
        return 0


@torch.no_grad()
def _checksum(tensor: Tensor) -> int:
    """Return a sum of the 8-byte words of a tensor, each with its own weight, computed on its device."""
    data = local(tensor.detach()).contiguous().reshape(-1).view(torch.uint8)
    words, total = nn.functional.pad(data, (0, -data.numel() % 8)).view(torch.int64), 0
    for part in words.split(_WORDS):
        total = hash((total, int((part * torch.arange(1, 2 * len(part), 2, device=part.device) ** 3).sum())))
    return total


def _frozen(parameters: Mapping[str, Tensor | None]) -> list[str]:
    return [name for name, each in parameters.items() if each is not None and not each.requires_grad]


def _is_taken(owner: Any, name: str) -> bool:
    """Whether a name is torch's, a method's, a child's or a weight's, which no attribute may hide."""
    of_class = getattr(type(owner), name, None)
    held: list[Container[str]] = [OF_TORCH]
    # Torch has no public way to look up one name without calling the module's own code.
    held += [owner._modules, owner._parameters, owner._buffers] if isinstance(owner, nn.Module) else []
    return callable(of_class) or isinstance(of_class, property) or any(name in names for names in held)


def _parts(modules: Mapping[str, Any]) -> Iterator[tuple[str, nn.Module]]:
    for root, module in modules.items():
        if isinstance(module, nn.Module):
            yield from module.named_modules(prefix=root)


def _is_config(value: Any) -> bool:
    return hasattr(value, "to_dict") and hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module))


def _short(value: Any) -> Any:
    text = json.dumps(value) if isinstance(value, (str, tuple)) else ""
    return value if len(text) <= _LONGEST else f"sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _is_setting(value: Any) -> bool:
    return is_plain(value) and not (isinstance(value, str) and ("/" in value or "\\" in value or not value))  # a path
