"""The user's samplers and loaders: iterated under seeds of the epoch, and left unchanged."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import Subset

from loopwright.engine.seeding import generator_states, preserved_generators, restore_generator_states, seed_generators
from loopwright.keys import key

_STREAM_CHUNK = 1024


def keyed_stream(source: Any, seed: int, epoch: int, device: torch.device, keeps_own: bool) -> Iterator[Any]:
    """Iterate a sampler under global generators seeded by the epoch; with `keeps_own` its own ones are left alone."""
    set_epoch_of(epoch, *parts_of(source))
    own = OwnGenerators(None if keeps_own else source, epoch)
    states: dict[str, Any] | None = None
    items: Iterator[Any] | None = None
    while True:
        with preserved_generators(device), own.in_use():
            if items is None or states is None:
                seed_generators(key(seed, "sampler", epoch), device)
                items = iter(source)
            else:
                restore_generator_states(states, device)
            chunk = list(itertools.islice(items, _STREAM_CHUNK))
            if states is None and not chunk and keeps_own:
                items = iter(source)  # restored at the end of an epoch, it had nothing left of that one
                chunk = list(itertools.islice(items, _STREAM_CHUNK))
            states = generator_states(device)
        yield from chunk
        if len(chunk) < _STREAM_CHUNK:
            return


class OwnGenerators:
    """The torch generators of a sampler or loader: a new sequence per epoch, by their seed, and restored afterwards."""

    def __init__(self, source: Any, epoch: int) -> None:
        found = [getattr(part, "generator", None) for part in parts_of(source)]
        self._generators = list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())
        self._epoch = epoch
        self._states: list[torch.Tensor] | None = None

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Run a block that draws from them, continuing from the end of the last one."""
        outside = [generator.get_state() for generator in self._generators]
        for index, generator in enumerate(self._generators):
            if self._states is None:
                generator.manual_seed(key(generator.initial_seed(), "sampler", self._epoch))
            else:
                generator.set_state(self._states[index])
        try:
            yield
        finally:
            self._states = [generator.get_state() for generator in self._generators]
            for generator, state in zip(self._generators, outside, strict=True):
                generator.set_state(state)


def parts_of(source: Any) -> list[Any]:
    """Return a sampler or loader and the samplers that it iterates."""
    batch_sampler = getattr(source, "batch_sampler", None)
    return [source, getattr(source, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]


def whole_of(dataset: Any) -> Any:
    """Return the dataset that a subset, or a subset of one, is taken from."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


def set_epoch_of(epoch: int, *parts: Any) -> None:
    """Call `set_epoch` once on each of these that has it."""
    for part in {id(part): part for part in parts}.values():
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)
