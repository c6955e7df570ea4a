"""What an evaluation collects while its batches pass: metrics, the worst examples, suspected labels, predictions.

Nothing here grows with the data, apart from the predictions, which go to a file as they come. numpy only.
"""

from __future__ import annotations

import csv
import heapq
import io
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from loopwright.metrics import Bootstrap, CountingMetric, Metric
from loopwright.metrics.base import Combined
from loopwright.metrics.mean_loss import MeanLoss
from loopwright.run_folder import write_atomically

NUM_WORST = 50
NUM_SUSPECTS = 200
_UNITS_OF_WEIGHT = 2**16  # weights of samples are counted in such parts of 1: a metric of counts takes whole numbers
_SAME_LOSS = 1e-3  # relative: 16 bits make a difference, another term in the loss makes a larger one


class Scorer(ABC):
    """The metrics of one evaluation; a new one is made for each.

    Attributes:
        directions: for each metric that a best model can be chosen by, whether more is better; the first one decides
            unless told otherwise.
    """

    directions: Mapping[str, bool]

    def check_loss(self, samples: Sequence[Mapping[str, Any]], loss: float) -> None:  # noqa: B027
        """Hold the samples of a batch against its mean loss; called before `add`, with the same samples."""

    @abstractmethod
    def add(self, samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Take in the samples of a batch, as the task's `score_batch` returned them; return those that are complete.

        What is complete goes to the predictions and the worst examples. Where one row has several features, these are
        the rows whose last feature has come.
        """

    def finish(self) -> list[dict[str, Any]]:
        """Return the samples that are complete only now that all batches have come; called before `compute`."""
        return []

    @abstractmethod
    def compute(self) -> dict[str, float]:
        """Return the metrics by name; called once, at the end."""

    @abstractmethod
    def intervals(self) -> dict[str, tuple[float, float]]:
        """Return (low, high) of the metrics that have an interval; called before `compute`."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state, to be merged on another process."""

    @abstractmethod
    def merge_state(self, state: Mapping[str, Any]) -> None:
        """Take in the state of a scorer of another process."""


class MetricScorer(Scorer):
    """Scores by a metric of `loopwright.metrics`.

    A sample is a dict; its "position" numbers it in the evaluated data, and the metric's columns are taken from its
    keys of the same names without their last s ("prediction", "reference").

    Args:
        make: makes the metric.
        directions: for each of its results, whether more is better.
    """

    def __init__(self, make: Any, directions: Mapping[str, bool]) -> None:
        self._make = make
        self._metric: Any = self._wrapped()
        self.directions = directions

    def add(self, samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Add the samples to the metric."""
        if not samples:
            return []
        metric: Metric = self._metric.metric if isinstance(self._metric, Bootstrap) else self._metric
        columns = {name: [sample[name.removesuffix("s")] for sample in samples] for name in metric.columns}
        if isinstance(self._metric, Bootstrap):
            self._metric.add_batch(positions=[sample["position"] for sample in samples], **columns)
        else:
            self._metric.add_batch(**columns)
        return samples

    def compute(self) -> dict[str, float]:
        """Return the metric's results."""
        return {name: float(value) for name, value in self._metric.compute().items()}

    def intervals(self) -> dict[str, tuple[float, float]]:
        """Return the bootstrap's intervals, where the metric has one."""
        return self._metric.interval() if isinstance(self._metric, Bootstrap) else {}

    def state_dict(self) -> dict[str, Any]:
        """Return the metric's state."""
        state: dict[str, Any] = self._metric.state_dict()
        return state

    def merge_state(self, state: Mapping[str, Any]) -> None:
        """Merge the state of another process."""
        other = self._wrapped()
        other.load_state_dict(state)
        self._metric.merge(other)

    def _wrapped(self) -> Any:
        metric: Metric = self._make()
        parts = metric.parts if isinstance(metric, Combined) else [metric]
        return Bootstrap(metric) if all(isinstance(part, CountingMetric) for part in parts) else metric


class JointScorer(Scorer):
    """Several scorers of the same samples; the first one with a metric decides, the last one says what is complete.

    Args:
        parts: the scorers.
    """

    def __init__(self, parts: Sequence[Scorer]) -> None:
        self._parts = list(parts)
        self.directions = {name: is_more for part in parts for name, is_more in part.directions.items()}

    def check_loss(self, samples: Sequence[Mapping[str, Any]], loss: float) -> None:
        """Let each part hold the samples against the loss."""
        for part in self._parts:
            part.check_loss(samples, loss)

    def add(self, samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Add the samples to each part; return what the last one does."""
        return [part.add(samples) for part in self._parts][-1]

    def finish(self) -> list[dict[str, Any]]:
        """Finish each part; return what the last one does."""
        return [part.finish() for part in self._parts][-1]

    def compute(self) -> dict[str, float]:
        """Return the results of all parts."""
        return {name: value for part in self._parts for name, value in part.compute().items()}

    def intervals(self) -> dict[str, tuple[float, float]]:
        """Return the intervals of all parts."""
        return {name: bounds for part in self._parts for name, bounds in part.intervals().items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the parts."""
        return {"parts": [part.state_dict() for part in self._parts]}

    def merge_state(self, state: Mapping[str, Any]) -> None:
        """Merge the states of the parts of another process."""
        for part, other in zip(self._parts, state["parts"], strict=True):
            part.merge_state(other)


class LossInterval(Scorer):
    """The interval of the mean loss of samples that have one each; the loss itself is what the loop has recorded.

    There is none where a sample has no loss, or where those of a batch do not make up the loss of the batch: that of a
    model may have terms that no sample has.

    Args:
        loss: the key of a sample's loss, a mean over its items.
        weight: the key of how many items these are, not necessarily a whole number; a sample without it has one.
    """

    directions: Mapping[str, bool] = {}

    def __init__(self, loss: str = "loss", weight: str = "num_target_tokens") -> None:
        self._loss = loss
        self._weight = weight
        self._losses = Bootstrap(MeanLoss())
        self._is_whole = True

    def check_loss(self, samples: Sequence[Mapping[str, Any]], loss: float) -> None:
        """Give up where the mean over the samples is another number than the loss of the batch."""
        sums, weights = (sum(column) for column in zip(*map(self._term, samples), strict=True))
        if weights and not math.isclose(sums / weights, loss, rel_tol=_SAME_LOSS, abs_tol=1e-6):
            self._is_whole = False

    def add(self, samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Add the losses of the samples."""
        if samples:
            sums, weights = zip(*map(self._term, samples), strict=True)
            positions = [sample["position"] for sample in samples]
            counts = [round(weight * _UNITS_OF_WEIGHT) for weight in weights]
            self._losses.add_batch(positions=positions, sums=sums, counts=counts)
            self._is_whole = self._is_whole and all(map(math.isfinite, sums))
        return samples

    def compute(self) -> dict[str, float]:
        """Return nothing."""
        return {}

    def intervals(self) -> dict[str, tuple[float, float]]:
        """Return that of the loss, where it has one."""
        found = self._losses.interval() if self._is_whole else {}
        return {name: (low * _UNITS_OF_WEIGHT, high * _UNITS_OF_WEIGHT) for name, (low, high) in found.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of the losses."""
        return {"losses": self._losses.state_dict(), "is_whole": self._is_whole}

    def merge_state(self, state: Mapping[str, Any]) -> None:
        """Merge the sums of another process."""
        other = Bootstrap(MeanLoss())
        other.load_state_dict(state["losses"])
        self._losses.merge(other)
        self._is_whole = self._is_whole and bool(state["is_whole"])

    def _term(self, sample: Mapping[str, Any]) -> tuple[float, float]:
        """Return what a sample adds to the sum of the loss, not a number where that is unknown, and to the weights."""
        weight, loss = float(sample.get(self._weight, 1)), sample.get(self._loss)
        return (0.0 if weight == 0 else math.nan if loss is None else weight * float(loss)), weight


class Examples:
    """The samples with the largest losses, and those whose label the model is sure is wrong.

    Args:
        num_worst: how many of the first kind to keep.
        num_suspects: how many of the second.
    """

    def __init__(self, num_worst: int = NUM_WORST, num_suspects: int = NUM_SUSPECTS) -> None:
        self._worst = Top(num_worst, "loss")
        self._suspects = Top(num_suspects, "sure")

    def add(self, samples: Iterable[Mapping[str, Any]]) -> None:
        """Take in samples; those without a loss are passed over, those with "sure" are suspected."""
        for sample in samples:
            self._worst.add(sample)
            self._suspects.add(sample)

    @property
    def worst(self) -> list[dict[str, Any]]:
        """The samples with the largest losses, the largest first."""
        return self._worst.sorted()

    @property
    def suspects(self) -> list[dict[str, Any]]:
        """The suspected samples, the surest first."""
        return self._suspects.sorted()


class Top:
    """The samples with the largest values of a key; ties go to the lower position, so the order of batches is nothing.

    Args:
        size: how many to keep.
        key: of the samples; one that lacks it is passed over.
    """

    def __init__(self, size: int, key: str) -> None:
        self._size = size
        self._key = key
        self._heap: list[tuple[float, int, dict[str, Any]]] = []

    def add(self, sample: Mapping[str, Any]) -> None:
        """Keep the sample if it is among the largest so far."""
        value = sample.get(self._key)
        if value is None:
            return
        entry = (float(value), -int(sample["position"]), dict(sample))
        if len(self._heap) < self._size:
            heapq.heappush(self._heap, entry)
        elif entry[:2] > self._heap[0][:2]:
            heapq.heapreplace(self._heap, entry)

    def sorted(self) -> list[dict[str, Any]]:
        """Return the samples, the largest first."""
        return [sample for _, _, sample in sorted(self._heap, key=lambda entry: entry[:2], reverse=True)]


class PredictionFile:
    """Writes predictions as JSON lines while they come; the file has its name only when it is whole.

    Args:
        path: the file, whose folder is made; None writes nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: Any = None

    def add(self, samples: Iterable[Mapping[str, Any]]) -> None:
        """Write samples, one line each."""
        if self._file is not None:
            self._file.writelines(_line(sample) for sample in samples)

    def __enter__(self) -> PredictionFile:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.with_name(f".{self._path.name}.part").open("w", encoding="utf-8")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is None or self._path is None:
            return
        self._file.close()
        aside = Path(self._file.name)
        if kind is None:
            aside.replace(self._path)
        else:
            aside.unlink(missing_ok=True)


def finite(values: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that are numbers; a correlation of predictions that are all alike is none."""
    return {name: value for name, value in values.items() if math.isfinite(value)}


def finite_intervals(intervals: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """Return the intervals whose ends are numbers; a score of rows of which there are none has no interval."""
    return {name: bounds for name, bounds in intervals.items() if all(map(math.isfinite, bounds))}


def as_json(metrics: Mapping[str, float]) -> dict[str, Any]:
    """Return metrics as result.json has them: what is no finite number stands under "nonfinite" in words."""
    others = {name: str(value) for name, value in metrics.items() if not math.isfinite(value)}
    return {"metrics": finite(metrics), **({"nonfinite": others} if others else {})}


def write_lines(path: Path, samples: Iterable[Mapping[str, Any]]) -> None:
    """Write samples as JSON lines, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(map(_line, samples)))


def write_table(path: Path, samples: list[dict[str, Any]]) -> None:
    """Write samples as csv, atomically; the columns are the keys of all of them, in the order they come."""
    columns = list(dict.fromkeys(key for sample in samples for key in sample))
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(samples)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, buffer.getvalue())


def _line(sample: Mapping[str, Any]) -> str:
    return json.dumps(dict(sample), ensure_ascii=False, default=str) + "\n"
