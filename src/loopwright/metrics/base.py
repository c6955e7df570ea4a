"""The interface of every metric, and metrics of counts.

A metric is updated batch by batch and computed once. It keeps counts and sums, not samples, wherever its formula
allows, so its memory does not grow with the data. Counts of several processes are merged exactly: the result has the
same bits for every batch size, order and number of processes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from loopwright.errors import ConfigError, DataError, InputError
from loopwright.metrics.intervals import LEAST_FOR_SHARES, LEAST_ROWS, Bounds, Resampled, class_trials, equal_units
from loopwright.metrics.sums import Counts, Totals
from loopwright.metrics.words import describe_tokens

Column = NDArray[Any]
Columns = Mapping[str, Column]
Options = Mapping[str, Any]
Scores = dict[str, NDArray[np.float64]]


class Metric(ABC):
    """One or a few numbers about predictions and references.

    A subclass defines `update` and `result`. What it keeps of the samples is created by `state`, or by `create_state`
    if it depends on options, and has `num_samples`, `merge`, `state_dict` and `load_state_dict`.

    Attributes:
        name: the name in the registry, and usually the key of the result.
        greater_is_better: the direction in which the metric improves.
        columns: the names of `add_batch`'s arguments.
        forms: the function that reads each column; `as_column` if it has none.
        options: the options of this metric and their values.
        options_apply_early: whether options apply when samples are added. They then belong to `load`, or to a
            `compute` that gets all the samples.
        token_names: the results whose tokens depend on the script of the references.
        other_words: the tokens for scripts with spaces other than Latin.
        needs: a module of another package, the name of the package, and the extra that installs it.
        scripts: the number of samples by the script of their references, if there are such results.
    """

    name: ClassVar[str]
    greater_is_better: bool = True
    columns: tuple[str, ...] = ("predictions", "references")
    forms: ClassVar[Mapping[str, Callable[[str, Any], Column]]] = {}
    defaults: ClassVar[Options] = {}
    options_apply_early: ClassVar[bool] = False
    token_names: ClassVar[tuple[str, ...]] = ()
    other_words: ClassVar[str] = "words"
    needs: ClassVar[tuple[str, str, str] | None] = None
    state: ClassVar[Callable[[], Any]] = Totals

    def __init__(self, **options: Any) -> None:
        self.options: dict[str, Any] = {**self.defaults, **self._known(options)}
        self._module: Any = extra_module(*self.needs[:2], self.name, self.needs[2]) if self.needs else None
        self.scripts: Counter[str] = Counter()
        self._state: Any = self.create_state()

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
            ConfigError: an option is unknown, or differs from the one that earlier samples were added with.
        """
        batch = {name: given.pop(name) for name in self.columns if name in given}
        batch = {name: values for name, values in batch.items() if values is not None}
        options = self._known(given)
        if self.options_apply_early and self.num_samples:
            late = [name for name, value in options.items() if value != self.options[name]]
            if late:
                raise _late_options(self.name, late)
        # If this call fails, its own samples are lost; earlier ones can be computed again.
        is_to_reset = self.num_samples == 0
        before, self.options = self.options, {**self.options, **options}
        try:
            if batch:
                self.add_batch(**batch)
            if self.num_samples == 0:
                raise DataError(f"{self.name} has no samples: pass {_listed(self.columns)} to add_batch or compute")
            result = self.result(self.options)
            is_to_reset = True
        finally:
            self.options = before
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
        return self.forms.get(name, as_column)(name, values)

    def _known(self, options: Options) -> dict[str, Any]:
        """Return the options, validated; called with those given to the constructor or to `compute`."""
        unknown = [name for name in options if name not in self.defaults]
        if unknown:
            takes = f"its options are {', '.join(self.defaults)}" if self.defaults else "it has no options"
            raise ConfigError(f"{self.name} does not know {', '.join(unknown)}: {takes}")
        return dict(options)

    @property
    def tokens(self) -> dict[str, str]:
        """The tokens of results that are not the official ones, such as "Chinese characters"; ask before `compute`."""
        found = describe_tokens(self.scripts, self.other_words)
        return dict.fromkeys(self.token_names, found) if found else {}

    @property
    def counting_parts(self) -> list[CountingMetric]:
        """The metrics of counts that this metric consists of; empty if it has no interval."""
        return []

    def own_interval(self, level: float, groups: Mapping[int, Any] | None = None) -> dict[str, Bounds | str]:
        """Return the intervals of a metric that does not count, or why it has none; called before `compute`.

        `groups` has a metric of this kind for each group of samples, by its number, if samples come in groups.
        """
        return {}

    @property
    def num_samples(self) -> int:
        """The number of samples since the last result."""
        return int(self._state.num_samples)

    def create_state(self) -> Any:
        """Return the state of a metric without samples; called by the constructor and by `reset`."""
        return type(self).state()

    @abstractmethod
    def update(self, columns: Columns) -> None:
        """Add the samples of these columns; called by `add_batch` with the result of `as_columns`."""

    @abstractmethod
    def result(self, options: Options) -> dict[str, Any]:
        """Return the result by name; called by `compute` when there are samples."""

    def reset(self) -> None:
        """Forget every sample."""
        self.scripts = Counter()
        self._state = self.create_state()

    def merge(self, other: Any) -> None:
        """Merge another metric of the same kind, for example from another process."""
        check_same_kind(self, other)
        self.scripts.update(other.scripts)
        self._state.merge(other._state)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as numbers, strings, lists and dicts."""
        return {**self._state.state_dict(), **({"scripts": dict(self.scripts)} if self.scripts else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        self.reset()
        self.scripts.update(state.get("scripts", {}))
        self._state.load_state_dict(state)


class CountingMetric(Metric):
    """A metric that is a function of integer sums over the samples.

    A subclass defines the summands of a sample (`count`) and the result of the sums (`score`). `Bootstrap` uses both
    for intervals.

    Attributes:
        limits: the lowest and the highest value of the results; None for means without limits.
        micro_f1: the result that is an F1 over all decisions, if there is one.
        has_independent_parts: whether a row is at most one of `num_parts`.
    """

    limits: ClassVar[Bounds | None] = None
    micro_f1: ClassVar[str | None] = None
    has_independent_parts: ClassVar[bool] = False

    @abstractmethod
    def count(self, columns: Columns) -> Counts:
        """Return the summands of each sample: (samples, sums). Later calls may have more sums, never fewer."""

    @abstractmethod
    def score(self, totals: Counts, options: Options) -> Scores:
        """Return the result by name for sums of shape (..., sums); each result has shape (...)."""

    def columns_of(self, totals: Counts, other: Any) -> Counts:
        """Return another metric's sums, in the order of this one's sums."""
        return totals

    def interval(self, sample: Resampled) -> dict[str, Bounds | str]:
        """Return (low, high) of each result, or why it has none; called by `Bootstrap`."""
        values, parts = self.scores_of(sample.totals), self.num_parts(sample.totals)
        classes, drawn_parts = self.num_per_class(sample.totals), self.num_parts(sample.replicates)
        found: dict[str, Bounds | str] = {
            name: sample.too_few(LEAST_FOR_SHARES) if name in parts else sample.too_few(LEAST_ROWS, classes)
            for name in values
        }
        replicates = {} if all(found.values()) else self.scores_of(sample.replicates)
        for name in [name for name, few in found.items() if not few]:
            given = float(values[name]), replicates[name]
            if self.limits is None:
                found[name] = sample.mean(*given)
            elif name not in parts:
                found[name] = sample.score(*given, class_trials(classes), self.limits)
            else:
                size = float(parts[name])
                trials = size if self.has_independent_parts and not sample.is_grouped else None
                units = equal_units(size, drawn_parts[name])
                found[name] = sample.score(*given, units, self.limits, is_f1=name == self.micro_f1, trials=trials)
        return found

    @property
    def names(self) -> tuple[str, ...]:
        """The results that are a share or a mean of as many things as the last sum counts."""
        return ()

    def num_parts(self, totals: Counts) -> Scores:
        """Return the number of things that a result is a share or a mean of, for all such results between limits.

        They have intervals from few rows on. Without an entry a result needs more.
        """
        return dict.fromkeys(self.names, totals[..., -1].astype(np.float64))

    def num_per_class(self, totals: Counts) -> Counts:
        """Return the references of each class that occurs, if results without parts are means over classes."""
        return np.zeros(0, dtype=np.int64)

    def scores_of(self, totals: Counts) -> Scores:
        """Return the results of sums, nan where there is none."""
        with np.errstate(invalid="ignore", divide="ignore"):
            scores = self.score(totals, self.options)
        if odd := [name for name, values in scores.items() if np.shape(values) != totals.shape[:-1]]:
            raise ConfigError(f"an interval of {odd[0]} needs one number: choose an average")
        return scores

    @property
    def counting_parts(self) -> list[CountingMetric]:
        return [self]

    def update(self, columns: Columns) -> None:
        counted = self.count(columns)
        self._state.add(len(counted), counted.sum(axis=0))

    def result(self, options: Options) -> dict[str, Any]:
        scores = self.score(self._state.sums, options)
        return {name: float(value.item()) if np.size(value) == 1 else value for name, value in scores.items()}


class ShareMetric(CountingMetric):
    """One or several shares of the samples; a subclass defines their `names`, and which samples count (`hits`)."""

    limits = (0.0, 1.0)
    has_independent_parts = True

    @abstractmethod
    def hits(self, columns: Columns) -> list[Column]:
        """Return whether each sample counts, for each name."""

    def count(self, columns: Columns) -> Counts:
        hits = self.hits(columns)
        return np.stack([*hits, np.ones_like(hits[0])], axis=-1).astype(np.int64)

    def score(self, totals: Counts, options: Options) -> Scores:
        return {name: ratio(totals[..., index], totals[..., -1], np.nan) for index, name in enumerate(self.names)}


class Combined(Metric):
    """Several metrics of the same columns, used as one.

    An option goes to each part that knows it. The direction is the first part's.
    """

    name = "combined"

    def __init__(self, parts: Sequence[Metric]) -> None:
        if not parts:
            raise ConfigError("a combined metric needs at least one metric")
        self.parts = list(parts)
        super().__init__()
        self.columns = self.parts[0].columns
        self.greater_is_better = self.parts[0].greater_is_better
        odd = [part.name for part in self.parts if part.columns != self.columns]
        if odd:
            raise ConfigError(
                f"{self.parts[0].name} takes {_listed(self.columns)}, but {', '.join(odd)} does not: "
                "metrics of different columns cannot be combined"
            )

    def _known(self, options: Options) -> dict[str, Any]:
        unknown = [name for name in options if not any(name in part.defaults for part in self.parts)]
        if unknown:
            raise ConfigError(f"none of {', '.join(part.name for part in self.parts)} knows {', '.join(unknown)}")
        for part in self.parts:
            late = [name for name in options if part.options_apply_early and name in part.defaults]
            if late:
                raise _late_options(part.name, late)
        return dict(options)

    def column(self, name: str, values: Any) -> Column:
        """Return a column in the form of the part that takes several values per sample, if there is one."""
        wider = [part for part in self.parts if part.forms or type(part).column is not Metric.column]
        return (wider or self.parts)[0].column(name, values)

    @property
    def tokens(self) -> dict[str, str]:
        return {name: tokens for part in self.parts for name, tokens in part.tokens.items()}

    @property
    def counting_parts(self) -> list[CountingMetric]:
        parts = [part.counting_parts for part in self.parts]
        return [each for part in parts for each in part] if all(parts) else []

    def own_interval(self, level: float, groups: Mapping[int, Any] | None = None) -> dict[str, Bounds | str]:
        found: dict[str, Bounds | str] = {}
        for index, part in enumerate(self.parts):
            own = None if groups is None else {number: group.parts[index] for number, group in groups.items()}
            found |= part.own_interval(level, own)
        return found

    @property
    def num_samples(self) -> int:
        return self.parts[0].num_samples

    def update(self, columns: Columns) -> None:
        for part in self.parts:
            part.update(columns)

    def result(self, options: Options) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for part in self.parts:
            own = {name: value for name, value in options.items() if name in part.defaults}
            merged |= part.result({**part.options, **own})
        return merged

    def reset(self) -> None:
        for part in self.parts:
            part.reset()

    def merge(self, other: Any) -> None:
        check_same_kind(self, other)
        for mine, theirs in zip(self.parts, other.parts, strict=True):
            mine.merge(theirs)

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for part, each in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(each)


def as_column(name: str, values: Any) -> Column:
    """Return the values as a one-dimensional array; dimensions of size 1 after the first are dropped."""
    values = _iterable(name, values, "value")
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


def as_integers(name: str, values: Any) -> Counts:
    """Return the values as one integer per sample."""
    array = as_column(name, values)
    if len(array) and array.dtype.kind not in "iu":
        raise DataError(f"{name} must be whole numbers, got an array of type {array.dtype}")
    return array.astype(np.int64)


def as_items(name: str, values: Any) -> Column:
    """Return the values as an array of one object per sample: a text, a list, a row of a tensor."""
    listed = list(_iterable(name, values, "entry"))
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


def as_ks(metric: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with `ks` as a tuple of whole numbers from 1."""
    if "ks" in options:
        ks = options["ks"] = tuple(options["ks"]) if hasattr(options["ks"], "__iter__") else (options["ks"],)
        if not ks or any(isinstance(k, bool) or not isinstance(k, int) or k < 1 for k in ks):
            raise ConfigError(f"ks of {metric} are whole numbers from 1, such as (1, 5), got {ks}")
    return options


def ratio(numerator: NDArray[Any], denominator: NDArray[Any], otherwise: float) -> NDArray[np.float64]:
    """Return the ratio, or `otherwise` where the denominator is 0."""
    result = np.full(np.broadcast(numerator, denominator).shape, otherwise, dtype=np.float64)
    np.divide(numerator, denominator, out=result, where=denominator != 0)
    return result


def check_same_kind(metric: Metric, other: Any) -> None:
    """Refuse to merge metrics with incompatible sums."""
    if type(metric) is not type(other) or metric.options != other.options:
        raise ConfigError(
            f"only metrics of one kind and with the same options can be merged: {metric.name} {metric.options} and "
            f"{getattr(other, 'name', type(other).__name__)} {getattr(other, 'options', '')}"
        )


def extra_module(module: str, package: str, metric: str, extra: str = "text") -> Any:
    """Return a module that a metric needs; raise an InputError if the `extra` with its package is not installed."""
    if find_spec(module.partition(".")[0]) is None:
        needs = f"the metric {metric!r} needs the package {package}"
        raise InputError("install.extra", needs, fix=f"pip install 'loopwright[{extra}]'")
    return import_module(module)


def _iterable(name: str, values: Any, what: str) -> Any:
    values = without_torch(values)
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__iter__"):
        raise DataError(f"{name} must be a list with one {what} per sample, got {values!r:.80}")
    return values


def _late_options(metric: str, names: list[str]) -> ConfigError:
    what = f"{', '.join(names)} of {metric} applies when samples are added: pass it to load({metric!r}, ...)"
    return ConfigError(what)


def _listed(names: Any) -> str:
    return ", ".join(f"{name}=" for name in names) or "nothing"
