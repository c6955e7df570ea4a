"""Model and optimizer state by parameter name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from loopwright.engine.sharding import local
from loopwright.errors import CheckpointError

# Packages whose optimizers keep objects, tensors of own classes, or tensors as keys in their state.
_UNSAVABLE = ("apollo_torch", "galore_torch", "grokadamw", "torchao")


def untied(state: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Split a state dict into tensors that are each stored once, and a map from tied names to stored ones."""
    kept: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in state.items():
        if tensor.layout is not torch.strided:
            kept[name] = tensor  # it has no single address
            continue
        place = (tensor.device, _address(tensor), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and place in seen:
            tied[name] = seen[place]
        else:
            seen[place] = name
            kept[name] = tensor
    return kept, tied


def _address(tensor: torch.Tensor) -> Any:
    """Return the address of a tensor; for a sharded one, of the local part, which may be empty."""
    part = local(tensor)
    if part is tensor or part.numel():
        return part.data_ptr()
    memory = part.untyped_storage()  # FSDP2 allocates a full-size part everywhere
    return memory.data_ptr() if memory.nbytes() else object()


def parameter_names(**modules: Any) -> dict[int, str]:
    """Return the name of every parameter by its id; the first module's names have no prefix."""
    names: dict[int, str] = {}
    for index, (prefix, module) in enumerate(modules.items()):
        if isinstance(module, nn.Module):
            for name, parameter in module.named_parameters():
                names.setdefault(id(parameter), name if index == 0 else f"{prefix}.{name}")
    return names


def optimizer_state(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return the optimizer's state, keyed by parameter name instead of number."""
    if (package := type(optimizer).__module__.partition(".")[0]) in _UNSAVABLE:
        text = f"the state of an optimizer of {package} cannot be saved: it holds objects of its own"
        raise CheckpointError(f"{text}. Take another one, or set save_only_model=True to save the model alone")
    plain = optimizer.state_dict()
    name_of = _numbered_names(optimizer, names)
    groups = [{**group, "params": [name_of[index] for index in group["params"]]} for group in plain["param_groups"]]
    return {"state": {name_of[index]: entry for index, entry in plain["state"].items()}, "param_groups": groups}


def fitted_state(optimizer: torch.optim.Optimizer, saved: dict[str, Any], names: Mapping[int, str]) -> dict[str, Any]:
    """Return a state from `optimizer_state` in the optimizer's format; CheckpointError if it has other parameters."""
    name_of = _numbered_names(optimizer, names)
    saved_group = {name: group for group in saved["param_groups"] for name in group["params"]}
    missing = [name for name in name_of.values() if name not in saved_group]
    extra = sorted(set(saved_group) - set(name_of.values()))
    if missing or extra:
        raise CheckpointError(
            "the optimizer does not hold the parameters that were saved",
            code="checkpoint.state",
            saw=[f"not saved: {missing[:5] or 'none'}", f"saved, but not in the optimizer: {extra[:5] or 'none'}"],
            fix="give the optimizer the parameters that it had",
        )
    groups = []
    for group in optimizer.state_dict()["param_groups"]:
        who = {key: group[key] for key in ("params", "param_names") if key in group}
        members = [name_of[index] for index in group["params"]]
        options = [_options(saved_group[name]) for name in members] or [_options(group)]
        if any(other != options[0] for other in options):
            raise CheckpointError(
                f"the optimizer puts {members[:5]} into one group, but they were saved with different options",
                code="checkpoint.state",
                fix="group the parameters as in the run that was saved",
            )
        groups.append({**options[0], **who})
    state = {index: saved["state"][name] for index, name in name_of.items() if name in saved["state"]}
    return in_their_layout(optimizer, {"state": state, "param_groups": groups})


def in_their_layout(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state with the strides of its parameters: a fused kernel walks through memory.

    Files hold contiguous tensors, and parameters may be `channels_last`.
    """
    parameters = dict(enumerate(parameter for group in optimizer.param_groups for parameter in group["params"]))

    def laid_out(value: Any, parameter: Tensor) -> Any:
        is_like = isinstance(value, Tensor) and value.shape == parameter.shape
        if not is_like or value.stride() == parameter.stride():
            return value
        return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)

    state = {
        index: {name: laid_out(value, parameters[index].detach()) for name, value in entries.items()}
        for index, entries in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _numbered_names(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[int, str]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {index: names.get(id(parameter), f"unnamed.{index}") for index, parameter in enumerate(parameters)}
