"""The interface of every metric, and metrics of counts.

A metric is updated batch by batch and computed once. It keeps counts and sums, not samples, wherever its formula
allows, so its memory does not grow with the data. Counts of several processes are merged exactly: the result has the
same bits for every batch size, order and number of processes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from loopwright.errors import ConfigError, DataError

Column = NDArray[Any]


class Metric(ABC):
    """One or a few numbers about predictions and references.

    Attributes:
        name: the name in the registry, and usually the key of the result.
        greater_is_better: the direction in which the metric improves.
        columns: the names of `add_batch`'s arguments.
        options: the options of this metric and their values.
    """

    name: ClassVar[str]
    greater_is_better: bool = True
    columns: tuple[str, ...] = ("predictions", "references")
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    def __init__(self, **options: Any) -> None:
        self.options: dict[str, Any] = {**self.defaults, **self._known(options)}

    def add_batch(self, **columns: Any) -> None:
        """Add samples: `add_batch(predictions=..., references=...)`, as lists, numpy arrays or torch tensors."""
        self.update(self.as_columns(columns))

    def add(self, **values: Any) -> None:
        """Add one sample: `add(prediction=1, reference=0)`; the plural names work too."""
        plurals = {name.removesuffix("s"): name for name in self.columns}
        self.add_batch(**{plurals.get(name, name): [value] for name, value in values.items()})

    def compute(self, **given: Any) -> dict[str, Any]:
        """Return the results so far, by name, and reset.

        Args:
            given: `predictions` and `references` are added first. Anything else is an option, for this call only.

        Raises:
            DataError: nothing was added.
        """
        batch = {name: given.pop(name) for name in self.columns if name in given}
        batch = {name: values for name, values in batch.items() if values is not None}
        options = self._known(given)
        # If this call fails, its own samples are lost; earlier ones can be computed again.
        is_to_reset = self.num_samples == 0
        try:
            if batch:
                self.add_batch(**batch)
            if self.num_samples == 0:
                raise DataError(f"{self.name} has no samples: give {_listed(self.columns)} to add_batch, or to compute")
            result = self.result({**self.options, **options})
            is_to_reset = True
        finally:
            if is_to_reset:
                self.reset()
        return result

    def as_columns(self, columns: Mapping[str, Any]) -> dict[str, Column]:
        """Return one array of the same length for each of this metric's columns."""
        if set(columns) != set(self.columns):
            raise ConfigError(f"{self.name} takes {_listed(self.columns)}, got {_listed(columns)}")
        arrays = {name: self.column(name, columns[name]) for name in self.columns}
        if len({len(array) for array in arrays.values()}) > 1:
            lengths = " and ".join(f"{len(array)} {name}" for name, array in arrays.items())
            raise DataError(f"{self.name} needs one of each per sample, got {lengths}")
        return arrays

    def column(self, name: str, values: Any) -> Column:
        """Return a column as an array whose first dimension is the samples; called by `as_columns`."""
        return as_column(name, values)

    def _known(self, options: Mapping[str, Any]) -> dict[str, Any]:
        unknown = [name for name in options if name not in self.defaults]
        if unknown:
            takes = f"its options are {', '.join(self.defaults)}" if self.defaults else "it has no options"
            raise ConfigError(f"{self.name} does not know {', '.join(unknown)}: {takes}")
        return dict(options)

    @property
    @abstractmethod
    def num_samples(self) -> int:
        """The number of samples since the last result."""

    @abstractmethod
    def update(self, columns: Mapping[str, Column]) -> None:
        """Add the samples of these columns; called by `add_batch` with the result of `as_columns`."""

    @abstractmethod
    def result(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the result by name; called by `compute` when there are samples."""

    @abstractmethod
    def reset(self) -> None:
        """Forget every sample."""

    @abstractmethod
    def merge(self, other: Any) -> None:
        """Merge another metric of the same kind, for example from another process."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state as numbers, strings, lists and dicts."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""


class CountingMetric(Metric):
    """A metric that is a function of integer sums over the samples.

    A subclass defines the summands of a sample (`count`) and the result of the sums (`score`). `Bootstrap` uses both
    for intervals.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._num_samples = 0
        self._totals = np.zeros(0, dtype=np.int64)

    @abstractmethod
    def count(self, columns: Mapping[str, Column]) -> NDArray[np.int64]:
        """Return the summands of each sample: (samples, sums). Later calls may have more sums, never fewer."""

    @abstractmethod
    def score(self, totals: NDArray[np.int64], options: Mapping[str, Any]) -> dict[str, NDArray[np.float64]]:
        """Return the result by name for sums of shape (..., sums); each result has shape (...)."""

    def columns_of(self, totals: NDArray[np.int64], other: Any) -> NDArray[np.int64]:
        """Return another metric's sums, in the order of this one's sums."""
        return totals

    @property
    def num_samples(self) -> int:
        """The number of samples since the last result."""
        return self._num_samples

    def update(self, columns: Mapping[str, Column]) -> None:
        """Count the samples."""
        counted = self.count(columns)
        self._num_samples += len(counted)
        self._totals = padded_sum(self._totals, counted.sum(axis=0))

    def result(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the result of the sums."""
        return {name: as_number(value) for name, value in self.score(self._totals, options).items()}

    def reset(self) -> None:
        """Forget every sample."""
        self._num_samples = 0
        self._totals = np.zeros(0, dtype=np.int64)

    def merge(self, other: Any) -> None:
        """Merge another metric of the same kind."""
        check_same_kind(self, other)
        self._num_samples += other._num_samples
        self._totals = padded_sum(self._totals, self.columns_of(other._totals, other))

    def state_dict(self) -> dict[str, Any]:
        """Return the sums."""
        return {"num_samples": self._num_samples, "totals": self._totals.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the sums."""
        self._num_samples = int(state["num_samples"])
        self._totals = np.asarray(state["totals"], dtype=np.int64)


class OptionsWhenAdding(Metric):
    """A metric whose options apply when samples are added, not when the result is computed.

    Options then belong to `load`, or to a `compute` that gets all the samples. A subclass may describe in `taken_in`
    what happens to samples when they are added.
    """

    taken_in: ClassVar[str] = "samples had been counted"

    def compute(self, **given: Any) -> dict[str, Any]:
        """Return the result, and reset; options apply to the samples of this call.

        Raises:
            ConfigError: samples were added before, with other options.
        """
        options = self._known({name: given.pop(name) for name in list(given) if name not in self.columns})
        if self.num_samples and any(self.options[name] != value for name, value in options.items()):
            raise ConfigError(
                f"{', '.join(options)} of {self.name} came after {self.taken_in} without: "
                f"give them to load({self.name!r}, ...)"
            )
        before = self.options
        self.options = {**before, **options}
        try:
            return super().compute(**given)
        finally:
            self.options = before


class Combined(Metric):
    """Several metrics of the same columns, used as one.

    An option goes to each part that knows it. The direction is the first part's.
    """

    name = "combined"

    def __init__(self, parts: Sequence[Metric]) -> None:
        if not parts:
            raise ConfigError("a combined metric needs at least one metric")
        super().__init__()
        self.parts = list(parts)
        self.columns = self.parts[0].columns
        self.greater_is_better = self.parts[0].greater_is_better
        odd = [part.name for part in self.parts if part.columns != self.columns]
        if odd:
            raise ConfigError(
                f"{self.parts[0].name} takes {_listed(self.columns)}, but {', '.join(odd)} does not: "
                "metrics of different columns cannot be combined"
            )

    def _known(self, options: Mapping[str, Any]) -> dict[str, Any]:
        parts = getattr(self, "parts", [])
        unknown = [name for name in options if not any(name in part.defaults for part in parts)]
        if unknown:
            raise ConfigError(f"none of {', '.join(part.name for part in parts)} knows {', '.join(unknown)}")
        for part in parts:
            late = [name for name in options if isinstance(part, OptionsWhenAdding) and name in part.defaults]
            if late:
                raise ConfigError(
                    f"{', '.join(late)} of {part.name} is used when samples are added: "
                    f"give it to load({part.name!r}, ...)"
                )
        return dict(options)

    def column(self, name: str, values: Any) -> Column:
        """Return a column in the form of the part that takes several values per sample, if there is one."""
        wider = [part for part in self.parts if type(part).column is not Metric.column]
        return (wider or self.parts)[0].column(name, values)

    @property
    def num_samples(self) -> int:
        """The number of samples since the last result."""
        return self.parts[0].num_samples

    def update(self, columns: Mapping[str, Column]) -> None:
        """Add the samples to every part."""
        for part in self.parts:
            part.update(columns)

    def result(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the results of all parts in one mapping."""
        merged: dict[str, Any] = {}
        for part in self.parts:
            own = {name: value for name, value in options.items() if name in part.defaults}
            merged |= part.result({**part.options, **own})
        return merged

    def reset(self) -> None:
        """Forget every sample."""
        for part in self.parts:
            part.reset()

    def merge(self, other: Any) -> None:
        """Merge another combination of the same metrics."""
        check_same_kind(self, other)
        for mine, theirs in zip(self.parts, other.parts, strict=True):
            mine.merge(theirs)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every part."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of every part."""
        for part, each in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(each)


def as_column(name: str, values: Any) -> Column:
    """Return the values as a one-dimensional array; dimensions of size 1 after the first are dropped."""
    values = without_torch(values)
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__iter__"):
        raise DataError(f"{name} must be a list with one value per sample, got {values!r:.80}")
    if not isinstance(values, np.ndarray):
        listed = list(values)
        has_text = any(isinstance(each, str) for each in listed)
        try:
            values = np.asarray(listed, dtype=object if has_text else None)
        except ValueError as error:
            raise DataError(f"{name} must be one value per sample, got lists of different lengths") from error
    array: Column = values
    if array.ndim == 0 or array.size != len(array):
        hint = " (scores of several classes? take the argmax first)" if array.ndim == 2 else ""
        raise DataError(f"{name} must be one value per sample, got an array of shape {array.shape}{hint}")
    return array.reshape(-1)


def as_items(name: str, values: Any) -> Column:
    """Return the values as an array of one object per sample: a text, a list, a row of a tensor."""
    values = without_torch(values)
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__iter__"):
        raise DataError(f"{name} must be a list with one entry per sample, got {values!r:.80}")
    listed = list(values)
    items = np.empty(len(listed), dtype=object)
    for index, each in enumerate(listed):
        items[index] = without_torch(each)
    return items


def as_matrix(name: str, values: Any) -> Column:
    """Return the values as an array of numbers with one row per sample."""
    values = without_torch(values)
    if not isinstance(values, np.ndarray):
        try:
            values = np.asarray([without_torch(row) for row in values])
        except ValueError as error:
            raise DataError(f"{name} must be rows of one length, got rows of different lengths") from error
        values = values if len(values) else np.zeros((0, 0))
    array: Column = values
    if array.ndim != 2 or array.dtype.kind not in "biuf":
        raise DataError(
            f"{name} must be one row of numbers per sample, got an array of shape {array.shape} and type {array.dtype}"
        )
    return array


def without_torch(values: Any) -> Any:
    """Return a torch tensor as a numpy array, and everything else unchanged.

    Torch tensors are recognized by their methods, so this package does not import torch.
    """
    if not hasattr(values, "detach"):
        return values
    tensor = values.detach().cpu()
    return tensor.float().numpy() if "bfloat16" in str(tensor.dtype) else tensor.numpy()


def as_number(value: NDArray[np.float64]) -> Any:
    """Return a single value as a float, several unchanged."""
    return float(value.item()) if np.size(value) == 1 else value


def ratio(numerator: NDArray[Any], denominator: NDArray[Any], otherwise: float) -> NDArray[np.float64]:
    """Return the ratio, or `otherwise` where the denominator is 0."""
    result = np.full(np.broadcast(numerator, denominator).shape, otherwise, dtype=np.float64)
    np.divide(numerator, denominator, out=result, where=denominator != 0)
    return result


def padded_sum(first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sum of two arrays whose last dimensions may differ; missing values count as 0."""
    shorter, longer = sorted((first, second), key=lambda each: each.shape[-1])
    total = longer.copy()
    total[..., : shorter.shape[-1]] += shorter
    return total


def check_same_kind(metric: Metric, other: Any) -> None:
    """Refuse to merge metrics with incompatible sums."""
    if type(metric) is not type(other) or metric.options != other.options:
        raise ConfigError(
            f"only metrics of one kind and with the same options can be merged: {metric.name} {metric.options} and "
            f"{getattr(other, 'name', type(other).__name__)} {getattr(other, 'options', '')}"
        )


def _listed(names: Any) -> str:
    return ", ".join(f"{name}=" for name in names) or "nothing"
