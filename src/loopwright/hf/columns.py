"""Which columns of a sample reach the model: those its forward takes; the others are available by name.

A sample is a mapping of columns. The collate function sees the columns that the model can use. Any other column is
still found by name: `sample["text"]`. The batch does the same for an overridden `compute_loss`: `model(**inputs)`
passes what the model takes, `inputs["weight"]` finds the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from loopwright.engine.nested import to_device
from loopwright.errors import DataError

_LABELS = ("label", "label_ids", "labels")

DataCollator = Callable[[list[Any]], Any]


class KeptColumns(dict[str, Any]):
    """A mapping whose `others` are found by `[]`, `get`, `pop` and `in`, but not seen by iteration, `**` and `len`."""

    def __init__(self, kept: Mapping[str, Any], others: Mapping[str, Any] | None = None) -> None:
        super().__init__(kept)
        self.others: dict[str, Any] = dict(others or {})

    def __missing__(self, name: str) -> Any:
        return self.others[name]

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self.others

    def get(self, name: str, default: Any = None) -> Any:
        """Return an entry, also one of the others."""
        return super().get(name, self.others.get(name, default))

    def pop(self, name: str, *default: Any) -> Any:
        """Remove and return an entry, also one of the others."""
        return super().pop(name, *default) if super().__contains__(name) else self.others.pop(name, *default)

    def copy(self) -> KeptColumns:
        """Return a shallow copy."""
        return KeptColumns(self, self.others)

    def to(self, device: torch.device) -> KeptColumns:
        """Return a copy on a device."""
        return KeptColumns(to_device(dict(self), device), to_device(self.others, device))

    def __reduce__(self) -> tuple[type[KeptColumns], tuple[dict[str, Any], dict[str, Any]]]:
        return KeptColumns, (dict(self), self.others)


class ColumnCollator:
    """Collates the columns that the model can use: the parameters of its forward, and the labels.

    With `keeps_others` the other columns stay available by name for `compute_loss`; if the forward takes none of the
    columns, the batch has all of them.
    """

    def __init__(self, collate: DataCollator, names: list[str], label_names: list[str], keeps_others: bool) -> None:
        self.collate, self.names, self.keeps_others = collate, names, keeps_others
        self._labels = {*_LABELS, *label_names}

    @property
    def bucket_lengths(self) -> Any:
        """The lengths that the collator pads batches to, if any."""
        return getattr(self.collate, "bucket_lengths", None)

    @property
    def padded_dimensions(self) -> Any:
        """The collator's function that names the length dimensions (see `BucketCollator`), or None."""
        return getattr(self.collate, "padded_dimensions", None)

    def __call__(self, samples: list[Any]) -> Any:
        """Return the batch."""
        has_columns = bool(samples and self.names) and isinstance(samples[0], Mapping)
        kept = self._kept(samples[0]) if has_columns else None
        if kept is None:
            return self.collate(samples)
        views = [
            KeptColumns(
                {name: sample[name] for name in kept if name in sample},
                {name: value for name, value in sample.items() if name not in kept},
            )
            for sample in samples
        ]
        batch = self.collate(views)
        if self.keeps_others and isinstance(batch, Mapping):
            others = {name for view in views for name in view.others}
            columns = {name: [view.others.get(name) for view in views] for name in others if name not in batch}
            return KeptColumns(batch, {name: _stacked(values) for name, values in columns.items()})
        return batch

    def _kept(self, sample: Mapping[str, Any]) -> list[str] | None:
        """Return the columns that the model can use; None to keep all."""
        wanted = {*self.names, *self._labels}
        kept = [name for name in sample if name in wanted]
        if len(kept) == len(sample):
            return None
        if any(name not in self._labels for name in kept):
            return kept
        if self.keeps_others:
            return None
        raise DataError(
            f"the model takes none of the columns: a sample has {', '.join(map(str, sample)) or 'none'}, the model's "
            f"forward takes {', '.join(self.names)}. Rename the columns (or tokenize the text), or pass "
            "remove_unused_columns=False with a data_collator that creates the model's inputs from them."
        )


def _stacked(values: list[Any]) -> Any:
    if all(isinstance(value, (bool, int, float)) for value in values):
        return torch.tensor(values)
    if all(isinstance(value, torch.Tensor) and value.shape == values[0].shape for value in values):
        return torch.stack(values)
    return values
