"""The hyper-parameters of an optimizer and a scheduler: as the user made them, and changed since a checkpoint."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import SequentialLR

from loopwright.checkpoint.fingerprint import Change
from loopwright.schedulers import StatefulSchedulerBase

# What a scheduler or optimizer keeps of its past; never a setting.
_NOT_SETTINGS = frozenset(("params", "param_names", "initial_lr", "_last_lr", "last_epoch", "_step_count"))
_NOT_PLAIN = object()


def hyper_parameters(optimizer: Any, scheduler: Any, names: Mapping[int, str]) -> dict[str, Any] | None:
    """Return the plain settings of an optimizer and a scheduler (or None) as the user created them, by parameter name.

    None for an optimizer that was used before: what it holds is then not what the user asks for.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        return None
    if any(float(entry.get("step", 1)) > 0 for entry in optimizer.state.values()):
        return None  # some make their state when they are made: it counts no steps then
    groups = {}
    for index, group in enumerate(optimizer.param_groups):
        values = {name: value for name, value in group.items() if name not in _NOT_SETTINGS}
        groups[_label(index, group, names)] = _plain({**values, "lr": group.get("initial_lr", group.get("lr"))})
    try:
        state = scheduler.state_dict() if hasattr(scheduler, "state_dict") else {}
    except Exception:  # noqa: BLE001 - a scheduler of the user's own; one without a state can be trained with
        state = {}
    return {"optimizer": groups, "scheduler": _plain(state)}


def apply_changes(
    optimizer: Any,
    scheduler: Any,
    saved: Mapping[str, Any],
    current: Mapping[str, Any],
    names: Mapping[int, str],
    rates: Mapping[str, Any],
) -> list[Change]:
    """Let current settings win over restored ones where they differ; return the changes.

    If the learning rate or the schedule has changed, the scheduler's curve gives the new learning rate where it can.
    Otherwise a changed learning rate scales the current one.

    Args:
        saved: what `hyper_parameters` returned in the saved run.
        current: what it returned now, before anything was restored.
        rates: the saved learning rates, by the name of the first parameter of the group.
    """
    changes: list[Change] = []
    has_new_curve = False
    for index, group in enumerate(optimizer.param_groups):
        label = _label(index, group, names)
        old, new = saved["optimizer"].get(label, {}), current["optimizer"].get(label, {})
        for name in sorted(old.keys() & new.keys()):
            if _are_same(old[name], new[name]):
                continue
            changes.append(Change(f"{name} of {label}", old[name], new[name]))
            if name == "lr":
                has_new_curve = True
                is_scaled = scheduler is not None and bool(old["lr"])
                # Not the group's own: a scheduler may have recomputed it when its state was loaded.
                rate = float(rates.get(label, group["lr"])) * new["lr"] / old["lr"] if is_scaled else new["lr"]
                set_learning_rate(group, rate)
                if "initial_lr" in group:
                    group["initial_lr"] = new["lr"]
            else:
                group[name] = tuple(new[name]) if isinstance(group[name], tuple) else new[name]
    if changes:
        optimizer.load_state_dict(optimizer.state_dict())  # some options decide where the state has to be
    old, new = saved["scheduler"], current["scheduler"]
    if old and new and (paths := _changed_paths(old, new)):
        changes += [Change(f"scheduler's {path}", before, after) for path, before, after in paths]
        load = getattr(scheduler, "resume_state_dict", scheduler.load_state_dict)
        load(_merged(scheduler.state_dict(), old, new))
        has_new_curve = True
    if has_new_curve:
        _take_rates_of(scheduler, optimizer)
    return changes


def begin_schedule(optimizer: Any, groups: list[dict[str, Any]]) -> None:
    """Give an optimizer back what a new scheduler had set in its groups, as in these copies of them."""
    for group, made in zip(optimizer.param_groups, groups, strict=True):
        group.update({name: value for name, value in made.items() if name not in group or name == "lr"})


def as_json(value: Any) -> Any:
    """Return a value as it is after a round trip through JSON, so that it can be compared with one that was read."""
    return json.loads(json.dumps(_plain(value)), parse_constant=str)


def _label(index: int, group: Mapping[str, Any], names: Mapping[int, str]) -> str:
    """Return a group's label: the name of its first parameter, which no other group has."""
    first = names.get(id(group["params"][0])) if group["params"] else None
    return first or f"group {index}"


def set_learning_rate(group: dict[str, Any], rate: float) -> None:
    """Set the learning rate of a parameter group; a tensor, as capturable optimizers need, is written in place."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _take_rates_of(scheduler: Any, optimizer: Any) -> None:
    """Set the learning rates of a scheduler's curve at its current step, if it can compute them directly."""
    # torch has no public way to ask a scheduler for the learning rate of its curve.
    if isinstance(scheduler, SequentialLR):
        _take_rates_of(scheduler._schedulers[bisect_right(scheduler._milestones, scheduler.last_epoch)], optimizer)
    elif isinstance(scheduler, StatefulSchedulerBase):
        scheduler.step_update(max(scheduler._num_updates, 0))
    elif hasattr(scheduler, "_get_closed_form_lr"):  # of torch's, if their curve does not depend on its past
        for group, rate in zip(optimizer.param_groups, scheduler._get_closed_form_lr(), strict=True):
            set_learning_rate(group, float(rate))


def _merged(restored: Any, old: Any, new: Any) -> Any:
    """Return a restored state with the new value wherever the old and the new initial state differ."""
    if _have_names(restored, old, new):
        shared = old.keys() & new.keys()
        return {
            name: _merged(value, old[name], new[name]) if name in shared and name not in _NOT_SETTINGS else value
            for name, value in restored.items()
        }
    if _are_alike(restored, old, new):
        return type(restored)(_merged(*items) for items in zip(restored, old, new, strict=True))
    if _are_same(old, new):
        return restored
    is_container = isinstance(restored, (Mapping, list, tuple)) and new is not None
    return type(restored)(new) if is_container else new


def _changed_paths(old: Any, new: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """Return where two plain states differ, with both values; only names in both are compared."""
    if _have_names(old, new):
        names = [name for name in sorted(old.keys() & new.keys()) if name not in _NOT_SETTINGS]
        pairs = [(name, old[name], new[name]) for name in names]
    elif _are_alike(old, new):
        pairs = [(str(index), old[index], new[index]) for index in range(len(old))]
    else:
        return [] if _are_same(old, new) else [(path, old, new)]
    return [
        found
        for name, before, after in pairs
        for found in _changed_paths(before, after, f"{path}.{name}".removeprefix("."))
    ]


def _have_names(*values: Any) -> bool:
    """Whether these are mappings of names to values, as states are; others are values themselves."""
    return all(isinstance(value, Mapping) and all(isinstance(name, str) for name in value) for value in values)


def _are_alike(*values: Any) -> bool:
    return all(isinstance(value, (list, tuple)) and len(value) == len(values[0]) for value in values)


def _are_same(old: Any, new: Any) -> bool:
    return bool(old == new) or repr(old) == repr(new)  # nan is the same as nan here


def _plain(value: Any) -> Any:
    """Keep None, numbers, strings and containers of them; drop the rest."""
    if isinstance(value, Mapping):
        kept = {
            name: _plain(item)
            for name, item in value.items()
            if isinstance(name, (str, int)) and name not in _NOT_SETTINGS
        }
        return {name: item for name, item in kept.items() if item is not _NOT_PLAIN}
    if isinstance(value, (list, tuple)):
        return [None if (item := _plain(one)) is _NOT_PLAIN else item for one in value]
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else _NOT_PLAIN
    if isinstance(value, np.generic):
        return value.item()
    return value if value is None or isinstance(value, (bool, int, float, str)) else _NOT_PLAIN
