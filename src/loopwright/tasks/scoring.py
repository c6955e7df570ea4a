"""The results of an evaluation, collected batch by batch: metrics, worst examples, suspected labels, predictions.

Memory does not grow with the data: predictions are streamed to a file. numpy only.
"""

from __future__ import annotations

import csv
import heapq
import io
import json
import math
import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from loopwright.baselines import Constant, Predictor
from loopwright.metrics import Bootstrap, Combined, ExpectedCalibrationError, Intervals, MeanLoss, Metric
from loopwright.metrics import load as load_metric
from loopwright.metrics.intervals import UNDEFINED
from loopwright.metrics.paired import RowKeeper, RowScores
from loopwright.run_folder import write_atomically
from loopwright.tasks.data import RunData

NUM_WORST = 50
NUM_SUSPECTS = 200
_UNITS_OF_WEIGHT = 2**16  # sample weights are counted in units of 1/65536: a counting metric takes integers
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_ALONE = 2**62  # above all numbers of groups
_UNLIKE = "the losses of the samples do not add up to it"
_SAME_LOSS = 1e-3  # relative: above 16-bit rounding, below the effect of another loss term


class Scorer(ABC):
    """The metrics of one evaluation; each evaluation makes a new one.

    Attributes:
        directions: for each metric that can select the best model, whether higher is better; the first is the default.
    """

    directions: Mapping[str, bool]

    def exact_loss(self, samples: Sequence[Mapping[str, Any]], loss: float) -> float | None:
        """Return the mean loss of a batch from the losses of its samples, in double precision.

        None if samples have no loss, or if theirs differ from the batch's, `loss`, by more than rounding. Called before
        `add`, with the same samples.
        """
        return None

    @abstractmethod
    def add(self, samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Add the samples of a batch, as returned by the task's `score_batch`; return the complete ones.

        Complete samples go to the predictions and the worst examples. If a row has several features, it is complete
        with its last feature.
        """

    def finish(self) -> list[dict[str, Any]]:
        """Return the samples that only the end of the data completes; called before `compute`."""
        return []

    @abstractmethod
    def compute(self) -> dict[str, float]:
        """Return the metrics by name; called once, at the end."""

    @abstractmethod
    def intervals(self) -> Intervals:
        """Return (low, high) of the metrics, and why some have none; called before `compute`."""

    def tokens(self) -> dict[str, str]:
        """Return the tokens of metrics for which the script of the texts decides; called before `compute`."""
        return {}

    def keep_rows(self) -> list[RowKeeper]:
        """Keep what each row adds to the metrics, and return the keepers; called before the first `add`."""
        return []

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state, for a merge on another process."""

    @abstractmethod
    def merge_state(self, state: Mapping[str, Any]) -> None:
        """Merge the state of another process's scorer."""


class MetricScorer(Scorer):
    """Scores by a metric of `loopwright.metrics`.

    A sample is a dict; "position" is its index in the evaluated data, and "group", if given, the number of a group of
    samples that are resampled together. The metric's columns are read from the keys of the same names in the singular
    ("prediction", "reference"). `drops_columns` drops them once the metric has them: a column of images or masks is
    large.
    """

    def __init__(self, make: Any, directions: Mapping[str, bool], *, drops_columns: bool = False) -> None:
        self._make = make
        self._plain: Metric = make()
        self._metric: Any = _resampled(self._plain)
        self._groups: dict[int, Any] = defaultdict(make)  # of a metric without a bootstrap
        self._drops_columns = drops_columns
        self._keeper: RowKeeper | None = None
        self.directions = directions

    def add(self, samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if not samples:
            return []
        columns = {name: [sample[name.removesuffix("s")] for sample in samples] for name in self._plain.columns}
        groups, positions = groups_of(samples), [sample["position"] for sample in samples]
        if isinstance(self._metric, Bootstrap):
            self._metric.add_batch(positions=positions, groups=groups, **columns)
        else:
            self._metric.add_batch(**columns)
            for index, group in enumerate(groups or ()):
                self._groups[group].add_batch(**{name: values[index : index + 1] for name, values in columns.items()})
        if self._keeper is not None:
            self._keeper.add(columns, positions, groups or ())
        if not self._drops_columns:
            return samples
        dropped = {name.removesuffix("s") for name in columns} - {"position"}
        return [{name: value for name, value in sample.items() if name not in dropped} for sample in samples]

    def compute(self) -> dict[str, float]:
        return {name: float(value) for name, value in self._metric.compute().items()}

    def intervals(self) -> Intervals:
        if isinstance(self._metric, Bootstrap):
            return self._metric.interval()
        return Intervals(self._metric.own_interval(0.95, self._groups or None))

    def tokens(self) -> dict[str, str]:
        return self._plain.tokens

    def keep_rows(self) -> list[RowKeeper]:
        self._keeper = RowKeeper(self._plain)
        return [self._keeper]

    def state_dict(self) -> dict[str, Any]:
        groups = [[number, group.state_dict()] for number, group in sorted(self._groups.items())]
        return {"metric": self._metric.state_dict(), "groups": groups}

    def merge_state(self, state: Mapping[str, Any]) -> None:
        triples = [(self._metric, _resampled(self._make()), state["metric"])]
        triples += [(self._groups[number], self._make(), saved) for number, saved in state["groups"]]
        for metric, other, saved in triples:
            other.load_state_dict(saved)
            metric.merge(other)


class CalibrationScorer(MetricScorer):
    """The expected calibration error, by the "confidence" of a sample in its prediction.

    A sample with lists of predictions has a list of "confidences"; 0 means that the model has not seen that part of it.
    """

    def __init__(self) -> None:
        super().__init__(ExpectedCalibrationError, {"ece": False})

    def add(self, samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
        found: list[tuple[float, bool]] = []
        for sample in samples:
            shares, *sides = (sample.get(name) for name in ("confidences", "prediction", "reference"))
            each = [(sample["confidence"], *sides)] if shares is None else zip(shares, *sides, strict=True)
            found += ((share, predicted == true) for share, predicted, true in each if share)
        confidences, hits = np.asarray(found, dtype=np.float64).reshape(-1, 2).T
        self._metric.update({"confidences": confidences, "hits": hits})
        return samples

    def compute(self) -> dict[str, float]:
        return super().compute() if self._metric.num_samples else {"ece": math.nan}


class JointScorer(Scorer):
    """Several scorers of the same samples; the first metric decides, the last scorer returns the complete samples."""

    def __init__(self, parts: Sequence[Scorer]) -> None:
        self._parts = list(parts)
        self.directions = {name: is_more for part in parts for name, is_more in part.directions.items()}

    def exact_loss(self, samples: Sequence[Mapping[str, Any]], loss: float) -> float | None:
        found = [part.exact_loss(samples, loss) for part in self._parts]
        return next((each for each in found if each is not None), None)

    def add(self, samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [part.add(samples) for part in self._parts][-1]

    def finish(self) -> list[dict[str, Any]]:
        return [part.finish() for part in self._parts][-1]

    def compute(self) -> dict[str, float]:
        return {name: value for part in self._parts for name, value in part.compute().items()}

    def intervals(self) -> Intervals:
        return Intervals({name: each for part in self._parts for name, each in part.intervals().entries.items()})

    def tokens(self) -> dict[str, str]:
        return {name: tokens for part in self._parts for name, tokens in part.tokens().items()}

    def keep_rows(self) -> list[RowKeeper]:
        return [keeper for part in self._parts for keeper in part.keep_rows()]

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self._parts]}

    def merge_state(self, state: Mapping[str, Any]) -> None:
        for part, other in zip(self._parts, state["parts"], strict=True):
            part.merge_state(other)


class PartScorer(Scorer):
    """Scores samples that a function changes, or leaves out with None, and names the result of the only metric."""

    def __init__(
        self, scorer: MetricScorer, name: str, change: Callable[[Mapping[str, Any]], Mapping[str, Any] | None]
    ) -> None:
        self._scorer, self._change, self._name = scorer, change, name
        ((self._own, is_more),) = scorer.directions.items()
        self.directions = {name: is_more}

    def add(self, samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
        changed = map(self._change, samples)
        self._scorer.add([dict(each) for each in changed if each is not None])
        return samples

    def compute(self) -> dict[str, float]:
        return {self._name: self._scorer.compute()[self._own]}

    def intervals(self) -> Intervals:
        return Intervals({self._name: self._scorer.intervals().entries[self._own]})

    def state_dict(self) -> dict[str, Any]:
        return self._scorer.state_dict()

    def merge_state(self, state: Mapping[str, Any]) -> None:
        self._scorer.merge_state(state)


class LossInterval(Scorer):
    """The interval of the mean loss over samples; the loss itself is recorded by the loop.

    There is no interval if a sample has no loss, or if the sample losses do not add up to the batch loss: a model's
    loss may have terms that no sample has.
    """

    directions: Mapping[str, bool] = {}

    def __init__(self, loss: str = "loss", weight: str = "num_target_tokens") -> None:
        self._loss = loss  # the key of a sample's loss, a mean over its items
        self._weight = weight  # the key of the number of items, possibly fractional; 1 without the key
        self._losses = Bootstrap(MeanLoss())
        self._missing = ""  # why there is none

    def exact_loss(self, samples: Sequence[Mapping[str, Any]], loss: float) -> float | None:
        terms, weights = zip(*map(self._term, samples), strict=True)
        weight = math.fsum(weights)
        exact = math.fsum(terms) / weight if weight and all(map(math.isfinite, terms)) else math.nan
        is_same = math.isclose(exact, loss, rel_tol=_SAME_LOSS, abs_tol=1e-6)
        if weight and not is_same:
            is_number = math.isfinite(loss) and self._missing != UNDEFINED
            self._missing = _UNLIKE if is_number else UNDEFINED
        return exact if is_same else None

    def add(self, samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if samples:
            sums, weights = zip(*map(self._term, samples), strict=True)
            positions = [sample["position"] for sample in samples]
            counts = [round(weight * _UNITS_OF_WEIGHT) for weight in weights]
            self._losses.add_batch(positions=positions, groups=groups_of(samples), sums=sums, counts=counts)
            if not all(map(math.isfinite, sums)):
                self._missing = self._missing or _UNLIKE
        return samples

    def compute(self) -> dict[str, float]:
        return {}

    def intervals(self) -> Intervals:
        if self._missing:
            return Intervals({"loss": self._missing})
        found = self._losses.interval()
        scaled = {name: (low * _UNITS_OF_WEIGHT, high * _UNITS_OF_WEIGHT) for name, (low, high) in found.items()}
        return Intervals({**scaled, **found.missing})

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self._losses.state_dict(), "missing": self._missing}

    def merge_state(self, state: Mapping[str, Any]) -> None:
        other = Bootstrap(MeanLoss())
        other.load_state_dict(state["losses"])
        self._losses.merge(other)
        missing = self._missing or state["missing"]
        self._missing = UNDEFINED if state["missing"] == UNDEFINED else missing

    def _term(self, sample: Mapping[str, Any]) -> tuple[float, float]:
        """Return a sample's term in the sum of losses, NaN if unknown, and its weight."""
        weight, loss = float(sample.get(self._weight, 1)), sample.get(self._loss)
        return (0.0 if weight == 0 else math.nan if loss is None else weight * float(loss)), weight


class Examples:
    """The samples with the largest losses, and the samples with suspected labels."""

    def __init__(self, num_worst: int = NUM_WORST, num_suspects: int = NUM_SUSPECTS) -> None:
        self._worst = Top(num_worst, "loss")
        self._suspects = Top(num_suspects, "sure")

    def add(self, samples: Iterable[Mapping[str, Any]]) -> None:
        """Add samples; those without a loss are skipped, those with "sure" are suspected."""
        for sample in samples:
            self._worst.add(sample)
            self._suspects.add(sample)

    @property
    def worst(self) -> list[dict[str, Any]]:
        return self._worst.sorted()

    @property
    def suspects(self) -> list[dict[str, Any]]:
        return self._suspects.sorted()


class Top:
    """The samples with the largest values of a key, non-finite ones first.

    Ties go to the lower position, whatever the batch order.
    """

    def __init__(self, size: int, key: str) -> None:
        self._size = size
        self._key = key
        self._heap: list[tuple[float, float, int, dict[str, Any]]] = []

    def add(self, sample: Mapping[str, Any]) -> None:
        value = sample.get(self._key)
        if value is None:
            return
        rank = (0.0, float(value)) if math.isfinite(value) else (1.0, 0.0)  # nan is neither larger nor smaller
        entry = (*rank, -int(sample["position"]), dict(sample))
        if len(self._heap) < self._size:
            heapq.heappush(self._heap, entry)
        elif entry[:3] > self._heap[0][:3]:
            heapq.heapreplace(self._heap, entry)

    def sorted(self) -> list[dict[str, Any]]:
        return [entry[3] for entry in sorted(self._heap, key=lambda entry: entry[:3], reverse=True)]


@contextmanager
def prediction_file(path: Path | None) -> Iterator[Callable[[Iterable[Mapping[str, Any]]], None]]:
    """Yield a function that adds samples to a file of JSON lines, renamed into place when complete, if there is one."""
    if path is None:
        yield lambda samples: None
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.part")
    aside.unlink(missing_ok=True)
    try:
        with aside.open("x", encoding="utf-8") as file:
            yield lambda samples: file.writelines(map(_line, samples))
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _resampled(metric: Metric) -> Any:
    return Bootstrap(metric) if metric.counting_parts else metric


def groups_of(samples: Sequence[Mapping[str, Any]]) -> list[int] | None:
    """Return the group of each sample; None if they have none.

    Windows of a row are a group, and so is a sample without one beside others.
    """
    if any("group" in sample for sample in samples):
        return [sample.get("group", _ALONE + sample["position"]) for sample in samples]
    return [sample["position"] for sample in samples] if any("window" in sample for sample in samples) else None


def samples_of(**columns: Any) -> list[dict[str, Any]]:
    """Return a dict per sample from columns of one length: tensors or lists."""
    lists = [column.tolist() if hasattr(column, "tolist") else column for column in columns.values()]
    return [dict(zip(columns, values, strict=True)) for values in zip(*lists, strict=True)]


def mark_suspects(samples: list[dict[str, Any]], least: float = 0.9) -> list[dict[str, Any]]:
    """Return samples with "sure" where the model is confident of another label than the one given."""
    for sample in samples:
        if sample["prediction"] != sample["reference"] and sample["confidence"] >= least:
            sample["sure"] = sample["confidence"]
    return samples


def class_metric(num_labels: int) -> Metric:
    """Return accuracy and F1, which is macro-averaged for more than two classes."""
    f1 = load_metric("f1") if num_labels == 2 else load_metric("f1", average="macro")
    return Combined([load_metric("accuracy"), f1])


class BaselineScores(dict[str, float]):
    """The metrics of a baseline by name, without NaN; `rows` has the scores of each row."""

    def __init__(self, metrics: Mapping[str, Any], rows: Mapping[str, RowScores]) -> None:
        super().__init__({name: float(value) for name, value in metrics.items() if value == value})
        self.rows = rows


def score_rows(create_metric: Callable[[], Metric], batches: Iterable[Mapping[str, Any]]) -> BaselineScores:
    """Score batches of a metric's columns, whose rows are at the positions 0, 1, 2, ..."""
    metric, start = create_metric(), 0
    keeper = RowKeeper(metric)
    for columns in batches:
        metric.add_batch(**columns)
        end = start + len(columns[metric.columns[0]])
        keeper.add(columns, range(start, end))
        start = end
    rows = keeper.scores()
    return BaselineScores(metric.compute(), rows)


def score_baselines(
    data: RunData,
    baselines: Mapping[str, Predictor],
    inputs: str | Callable[[Any], Any],
    targets: str | Callable[[Any], Any],
    create_metric: Callable[[], Metric],
    most: int = 50_000,
) -> dict[str, BaselineScores]:
    """Fit baselines on the training rows, and return their scores on the validation rows by name; NaN is left out.

    Args:
        baselines: by name; those with `learn` are fitted.
        inputs: the role of a row that they predict from, or a function of the row.
        targets: the role that they predict, or a function of the row.
        create_metric: called for each baseline.
        most: the maximum number of rows of either split.
    """

    sides = [itemgetter(side) if isinstance(side, str) else side for side in (inputs, targets)]

    def pairs(split: str) -> Iterator[tuple[list[Any], list[Any]]]:
        for rows in data.batches(split, most=most):
            yield [sides[0](row) for row in rows], [sides[1](row) for row in rows]

    learners = [baseline for baseline in baselines.values() if hasattr(baseline, "learn")]
    for batch in pairs("train") if learners else ():
        for learner in learners:
            learner.learn(*batch)

    def columns(baseline: Predictor) -> Iterator[dict[str, Any]]:
        for given, references in pairs("validation"):
            yield {"predictions": baseline.predict(given), "references": references}

    found: dict[str, BaselineScores] = {}
    for name, baseline in baselines.items():
        scores = score_rows(create_metric, columns(baseline))
        if not (isinstance(baseline, Constant) and scores in found.values()):  # the same constant as another baseline's
            found[name] = scores
    return found


def finite(values: Mapping[str, float]) -> dict[str, float]:
    """Return the finite metrics; a correlation of constant predictions is not a number."""
    return {name: value for name, value in values.items() if math.isfinite(value)}


def as_json(metrics: Mapping[str, float], tokens: Mapping[str, str]) -> dict[str, Any]:
    """Return metrics for result.json, with non-finite values as text under "nonfinite", and their tokens if any."""
    others = {name: str(value) for name, value in metrics.items() if not math.isfinite(value)}
    found = {"metrics": finite(metrics), "nonfinite": others, "tokens": dict(tokens)}
    return {name: values for name, values in found.items() if values or name == "metrics"}


def intervals_as_json(intervals: Intervals) -> dict[str, Any]:
    """Return intervals for result.json, with those that are missing and why under "no_intervals"."""
    found = {"intervals": {name: list(bounds) for name, bounds in intervals.items()}}
    return {**found, **({"no_intervals": intervals.missing} if intervals.missing else {})}


def write_lines(path: Path, samples: Iterable[Mapping[str, Any]]) -> None:
    """Write samples as JSON lines, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(map(_line, samples)))


def write_table(path: Path, samples: list[dict[str, Any]], is_safe: bool = False) -> None:
    """Write samples as csv, atomically; the columns are the keys of all samples, in order of appearance."""
    columns = list(dict.fromkeys(key for sample in samples for key in sample))
    buffer = io.StringIO()
    write_csv(buffer, columns, samples, is_safe)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, buffer.getvalue())


def write_csv(file: Any, columns: list[str], rows: Iterable[Mapping[str, Any]], is_safe: bool) -> None:
    """Write rows as csv; if `is_safe`, with ' before each text that a spreadsheet would take for a formula."""
    keep = without_formula if is_safe else str
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(map(keep, columns))
    for row in rows:
        cells = (row.get(name, "") for name in columns)
        writer.writerow([keep(cell) if isinstance(cell, str) else cell for cell in cells])


def without_formula(text: str) -> str:
    """Return a text with ' before it if a spreadsheet would run it; numbers are left alone."""
    is_formula = text.lstrip(" \t\r\n\0\ufeff")[:1] in tuple("=+-@＝＋－＠") or text[:1] in tuple("\t\r\n")
    return f"'{text}" if is_formula and not _NUMBER.fullmatch(text) else text


def _line(sample: Mapping[str, Any]) -> str:
    """Return a line of JSON; a number that is not finite is null, and its text is under "nonfinite"."""
    try:
        return json.dumps(dict(sample), ensure_ascii=False, default=str, allow_nan=False) + "\n"
    except ValueError:
        odd = [name for name, value in sample.items() if isinstance(value, float) and not math.isfinite(value)]
        others = {name: str(sample[name]) for name in odd}
        plain = json.loads(json.dumps(dict(sample), default=str), parse_constant=lambda word: None)
        return json.dumps({**plain, **({"nonfinite": others} if others else {})}, ensure_ascii=False) + "\n"
