"""Freezing and unfreezing parts of a model, for transfer learning.

A *layer group* is a direct child of the model, in definition order; a *layer* is a module within a group that has no
children or holds parameters of its own (an attention block's projection, a class token). Parameters held by the model
itself belong to group 0, since they are used at its input. A model without children is its own only group.

    freezer = ModelFreezer(model)
    freezer.freeze()                                    # all groups but the last
    optimizer = SGD(freezer.get_trainable_parameters(), lr=0.1)
    ...
    for group in freezer.unfreeze().values():
        optimizer.add_param_group(group)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from loopwright.errors import ConfigError

BN_MODULES = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""The modules that `ModelFreezer` takes for batch norms."""


class Layer(NamedTuple):
    """A module within a layer group that has no children or holds its own parameters.

    Its group has an index from the front and one from the back. It is frozen if its own parameters are; without any, if
    it is in eval mode.
    """

    layer_group_idx: tuple[int, int]
    module: nn.Module
    is_frozen: bool


class LayerGroup(NamedTuple):
    """A direct child of a model, with its index from the front and from the back; frozen if any parameter of it is."""

    layer_group_idx: tuple[int, int]
    module: nn.Module
    is_frozen: bool


class ModelFreezer:
    """Freezes and unfreezes the layer groups of a model.

    Creating one unfreezes every parameter of the model. Every call inspects the model again, so a head replaced later
    is found.

    Args:
        freeze_batch_norms: whether `freeze` also freezes batch norm layers.
    """

    def __init__(self, model: nn.Module, freeze_batch_norms: bool = False) -> None:
        self.model = model
        self.freeze_bn = freeze_batch_norms
        for parameter in model.parameters():
            if _can_train(parameter):
                parameter.requires_grad_(True)

    @property
    def num_groups(self) -> int:
        """The number of layer groups."""
        return len(self._groups())

    def get_layer_groups(self) -> list[LayerGroup]:
        """Return every layer group, in definition order."""
        groups, found = self._groups(), []
        for index, group in enumerate(groups):
            is_frozen = any(not parameter.requires_grad for parameter in self._group_parameters(index, group))
            found.append(LayerGroup((index, index - len(groups)), group, is_frozen))
        return found

    def get_layers(self) -> list[Layer]:
        """Return every layer of every group, in definition order, a module before its children.

        A layer with shared parameters is judged by its own ones, if it has any: a head tied to a frozen embedding is
        not frozen while its bias is trained. A layer that is only partly frozen raises a ValueError.
        """
        groups = self._groups()
        num_holders = Counter(id(parameter) for module in self.model.modules() for parameter in _own_parameters(module))
        return [
            Layer((index, index - len(groups)), layer, self._is_layer_frozen(layer, num_holders))
            for index, group in enumerate(groups)
            for layer in self._group_layers(index, group)
        ]

    def get_trainable_parameters(self) -> list[nn.Parameter]:
        """Return every parameter that is not frozen, each once."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def freeze(self, from_index: int = 0, to_index: int = -2, set_modules_as_eval: bool = False) -> None:
        """Freeze the layer groups between two indexes, both included, in either order; by default all but the last.

        Batch norm layers keep their state and mode, unless `freeze_batch_norms` is set. Negative indexes count from the
        back.

        Args:
            set_modules_as_eval: whether the modules also go into eval mode (no dropout). It lasts until something calls
                `model.train()`, as the trainer does at the start of every epoch.
        """
        for index, group in self._groups_between(from_index, to_index):
            for layer in self._group_layers(index, group):
                if not self._is_spared(layer):
                    for parameter in _own_parameters(layer):
                        parameter.requires_grad_(False)
            if set_modules_as_eval:
                # Containers too: many call functional dropout under their own mode.
                for module in group.modules():
                    if not self._is_spared(module):
                        _set_mode(module, training=False)

    def unfreeze(
        self, from_index: int = -1, to_index: int = 0, set_modules_as_training: bool = True
    ) -> dict[int, dict[str, list[nn.Parameter]]]:
        """Unfreeze the layer groups between two indexes, both included, in either order; by default all of them.

        Returns:
            `{group index: {"params": [...]}}` with the newly unfrozen parameters, each once, ready for
            `optimizer.add_param_group`. Groups without any are left out.
        """
        unfrozen: dict[int, dict[str, list[nn.Parameter]]] = {}
        for index, group in self._groups_between(from_index, to_index):
            for parameter in self._group_parameters(index, group):
                if not parameter.requires_grad:
                    parameter.requires_grad_(True)
                    unfrozen.setdefault(index, {"params": []})["params"].append(parameter)
            if set_modules_as_training:
                for module in group.modules():
                    _set_mode(module, training=True)
        return unfrozen

    def _groups(self) -> list[nn.Module]:
        return list(self.model.children()) or [self.model]

    def _groups_between(self, from_index: int, to_index: int) -> Iterator[tuple[int, nn.Module]]:
        groups = self._groups()
        first, last = sorted(self._position(index, len(groups)) for index in (from_index, to_index))
        return ((index, groups[index]) for index in range(first, last + 1))

    def _position(self, index: int, num_groups: int) -> int:
        if not -num_groups <= index < num_groups:
            names = ", ".join(name for name, _ in self.model.named_children()) or "the model itself"
            advice = " Use index 0 for both bounds to take its only group." if num_groups == 1 else ""
            raise ConfigError(
                f"There is no layer group {index}: {type(self.model).__name__} has {num_groups} ({names}), "
                f"with indexes 0 to {num_groups - 1}, or {-num_groups} to -1 from the back.{advice}"
            )
        return index % num_groups

    def _group_layers(self, index: int, group: nn.Module) -> Iterator[nn.Module]:
        if index == 0 and group is not self.model and _own_parameters(self.model):
            yield self.model
        for module in group.modules():
            if _own_parameters(module) or not any(True for _ in module.children()):
                yield module

    def _group_parameters(self, index: int, group: nn.Module) -> Iterator[nn.Parameter]:
        for layer in self._group_layers(index, group):
            yield from _own_parameters(layer)

    def _is_spared(self, module: nn.Module) -> bool:
        return isinstance(module, BN_MODULES) and not self.freeze_bn

    def _is_layer_frozen(self, layer: nn.Module, num_holders: Counter[int]) -> bool:
        parameters = _own_parameters(layer)
        if not parameters:
            return not layer.training
        unshared = [parameter for parameter in parameters if num_holders[id(parameter)] == 1]
        states = {parameter.requires_grad for parameter in unshared or parameters}
        if len(states) > 1:
            raise ValueError(self._mixed_state_text(layer))
        return states == {False}

    def _mixed_state_text(self, layer: nn.Module) -> str:
        name = next(name for name, module in self.model.named_modules() if module is layer)
        owner = f"The layer {name!r} ({type(layer).__name__})" if name else f"{type(layer).__name__} itself"
        own = [(name, each) for name, each in layer.named_parameters(recurse=False) if _can_train(each)]
        frozen = ", ".join(name for name, parameter in own if not parameter.requires_grad)
        trained = ", ".join(name for name, parameter in own if parameter.requires_grad)
        return (
            f"{owner} is neither frozen nor unfrozen: {frozen} frozen, {trained} not. "
            "Give all of them the same requires_grad, or call freeze or unfreeze on their group."
        )


def _own_parameters(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters(recurse=False) if _can_train(parameter)]


def _can_train(parameter: nn.Parameter) -> bool:
    # Quantised weights are integer parameters, which cannot require a gradient.
    return parameter.is_floating_point() or parameter.is_complex()


def _set_mode(module: nn.Module, training: bool) -> None:
    # `train` on a container would reach its batch norms; on a leaf a subclass may override it.
    if any(True for _ in module.children()):
        module.training = training
    else:
        module.train(training)
