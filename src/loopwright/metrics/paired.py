"""Which of two models is better, judged on the rows that both were scored on.

Every row has a score whose mean over the rows is the metric: whether it is right, its loss, or for a metric like F1 or
BLEU, which is not a mean, the jackknife's pseudo-value of the row. If two models are equally good, their scores of a
row may be swapped: p is the share of swaps, one keyed coin per row, with a difference as large as the observed one.
Where all differences have one size, as for right and wrong, that is a binomial distribution: McNemar's exact test.

    keeper.add({"predictions": [1, 0, 1], "references": [1, 0, 0]}, positions=[0, 1, 2])
    judge(keeper.scores()["accuracy"], others["accuracy"], greater_is_better=True, num_picked=3)
"""

from __future__ import annotations

import io
import math
import os
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopwright.keys import KeyStream
from loopwright.metrics.base import Columns, Combined, CountingMetric, Metric, ShareMetric
from loopwright.metrics.bootstrap import random_words
from loopwright.metrics.means import MeanLoss, MeanMetric
from loopwright.metrics.question_answering import SquadV2
from loopwright.metrics.regression import PearsonCorrelation, SpearmanCorrelation, centred_ranks
from loopwright.metrics.spans import TokenAccuracy
from loopwright.metrics.sums import Numbers
from loopwright.run_folder.files import DamagedFileError, read_bytes

LEVEL = 0.025
"""The largest one-sided p that is called better or worse."""
LEAST_ROWS, LEAST_ROWS_OF_OTHERS = 5, 50
"""The fewest rows that are compared; the latter for a metric that is not a mean: the pseudo-values of few are wild."""
_MEANS = (ShareMetric, MeanMetric, MeanLoss, TokenAccuracy, SquadV2)
_WORDS, _FEWEST_WORDS = 157, 32  # of 64 swaps each; fewer for more rows than `_MOST_COINS` allow
_MOST_COINS = 1 << 30
_AT_ONCE = 4096
_MOST_BYTES = 1 << 28  # of a file of rows unpacked; 16 times its size for a larger one
_MOST_NUMBERS = 1 << 27  # of a table in memory: some metrics have three per class and row

RowScores = Numbers
"""The position, the group (or again the position) and the score of each row: (3, rows)."""


class RowKeeper:
    """Keeps what each row adds to the results of a metric, which is given the same rows and not yet reset."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._parts = metric.parts if isinstance(metric, Combined) else [metric]
        self._places: list[Numbers] = []
        self._tables: list[list[NDArray[Any]]] = [[] for _ in self._parts]
        self._names: list[list[str]] = [[] for _ in self._parts]

    def add(self, columns: Mapping[str, Any], positions: Iterable[int], groups: Sequence[int] = ()) -> None:
        """Add rows, in the columns of the metric; rows of the same group are swapped together."""
        arrays, places = self._metric.as_columns(columns), np.asarray(list(positions), np.float64)
        self._places.append(np.stack([places, np.asarray(groups, np.float64) if len(groups) else places]))
        for index, part in enumerate(self._parts):
            self._names[index], table = _table_of(part, arrays)
            self._tables[index].append(table)
            if sum(each.size for each in self._tables[index]) > _MOST_NUMBERS:
                self._tables[index] = []

    def scores(self) -> dict[str, RowScores]:
        found: dict[str, RowScores] = {}
        places = np.concatenate([np.zeros((2, 0)), *self._places], axis=1)
        for part, names, tables in zip(self._parts, self._names, self._tables, strict=True):
            if sum(map(len, tables)) != places.shape[1] or not tables:
                continue
            width = max(each.shape[1] for each in tables)
            table = np.concatenate([np.pad(each, ((0, 0), (0, width - each.shape[1]))) for each in tables])
            for name, values in zip(names, _pseudo_values(part, names, table), strict=True):
                found.setdefault(name, np.concatenate([places, values[None]]))
        return found

    def state_dict(self) -> dict[str, Any]:
        states = [part.state_dict() if isinstance(part, CountingMetric) else {} for part in self._parts]
        return {"places": self._places, "names": self._names, "tables": self._tables, "parts": states}

    def merge(self, state: Mapping[str, Any]) -> None:
        self._places += state["places"]
        for index, part in enumerate(self._parts):
            self._names[index] = self._names[index] or state["names"][index]
            tables = state["tables"][index]
            if isinstance(part, CountingMetric):
                other = type(part)(**part.options)
                other.load_state_dict(state["parts"][index])
                part.merge(other)
                tables = [part.columns_of(table.astype(np.int64), other) for table in tables]
            self._tables[index] += tables


def rows_of(values: Any) -> RowScores:
    """Return the scores of rows at the positions 0, 1, 2, ..."""
    places = np.arange(len(values), dtype=np.float64)
    return np.stack([places, places, np.asarray(values, np.float64)])


def judge(ours: RowScores, theirs: RowScores, *, greater_is_better: bool, num_picked: int = 1) -> dict[str, Any]:
    """Judge whether the first model is better than the second on the rows that both have.

    Args:
        num_picked: the number of evaluations of which the best was picked to be `ours`; p is multiplied by it.

    Returns:
        "kind": "better", "worse" or "indistinct", None for too few rows. "p": one-sided, of the observed direction.
        "rows": the number of compared rows, or of groups if the "unit" is "group". "test": "mcnemar" or "sign-flip".
    """
    _, mine, other = np.intersect1d(ours[0], theirs[0], return_indices=True)
    gains = (ours[2, mine] - theirs[2, other]) * (1 if greater_is_better else -1)
    is_known = np.isfinite(gains)
    units, codes = np.unique(ours[1, mine][is_known], return_inverse=True)
    gains = np.bincount(codes, weights=gains[is_known], minlength=len(units))
    counted = {"rows": len(units), "unit": "group" if len(units) < is_known.sum() else "row"}
    if len(units) < LEAST_ROWS:
        return {"kind": None, "p": None, **counted, "test": None}
    largest = np.abs(gains).max()
    # In whole numbers, whose sums are exact in any order; what is left of rounding becomes 0.
    whole = np.rint(gains / (largest or 1) * 2.0 ** min(40, 52 - len(units).bit_length()))
    total, is_moving = whole.sum(), whole != 0
    is_even = np.allclose(np.abs(gains[is_moving]), largest, rtol=1e-6)
    if is_even:
        trials, wins = int(is_moving.sum()), int((whole > 0).sum())
        better, worse = tail(trials, wins), tail(trials, trials - wins)
    else:
        better, worse = _sampled(units[is_moving], whole[is_moving], num_picked)
    p = min(1.0, better * num_picked) if total >= 0 else worse
    kind = "indistinct" if p > LEVEL else "better" if total >= 0 else "worse"
    return {"kind": kind, "p": p, **counted, "test": "mcnemar" if is_even else "sign-flip"}


def _sampled(units: Numbers, gains: Numbers, num_picked: int) -> tuple[float, float]:
    """Return p of better and of worse by swapping at random; the coins of a row follow from its position."""
    stream = KeyStream(0, purpose="verdict")
    keys = np.asarray([stream.at(int(unit)) for unit in units.tolist()], dtype=np.uint64)
    most = max(_FEWEST_WORDS, _MOST_COINS // (64 * len(keys)))
    num_words = min(max(_WORDS, math.ceil(100 * num_picked / 64)), most)
    swapped = np.zeros(64 * num_words)
    for start in range(0, len(keys), _AT_ONCE):
        some = keys[start : start + _AT_ONCE]
        step = max(1, _AT_ONCE**2 // (1024 * len(some)))
        for first in range(0, num_words, step):
            words = random_words(some, range(first, min(first + step, num_words)))
            coins = np.unpackbits(words.astype("<u8").view(np.uint8), axis=1)
            swapped[64 * first : 64 * (first + step)] += gains[start : start + _AT_ONCE] @ coins
    # What is swapped changes the difference by twice its own: no less than before if it is 0 or less.
    better, worse = (1 + int(each.sum()) for each in (swapped <= 0, swapped >= 0))
    return better / (1 + len(swapped)), worse / (1 + len(swapped))


def read_rows(path: Path) -> dict[str, RowScores]:
    """Return the row scores of an .npz file by name; empty without one."""
    if not os.path.lexists(path):
        return {}
    try:
        data = io.BytesIO(read_bytes(path, 1 << 32))
        with zipfile.ZipFile(data) as packed:
            size, most = sum(each.file_size for each in packed.infolist()), max(_MOST_BYTES, 16 * len(data.getbuffer()))
        if size > most:
            raise ValueError(f"unpacked, it takes {size:,} bytes, and {most:,} are the limit")
        with np.load(data) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except DamagedFileError:
        raise
    except Exception as error:  # noqa: BLE001 - zipfile, zlib and numpy raise many kinds for a damaged file
        what = f"{path} is damaged: {type(error).__name__}: {error}"
        raise DamagedFileError(what, "move it away, and continue without verdicts on rows") from None


def tail(trials: int, least: int) -> float:
    """Return the probability of at least so many heads of a fair coin."""
    whole = math.lgamma(trials + 1) - trials * math.log(2)  # by logarithms, since the counts may be large
    logs = (whole - math.lgamma(heads + 1) - math.lgamma(trials - heads + 1) for heads in range(least, trials + 1))
    return min(1.0, math.fsum(map(math.exp, logs)))


def t_tail(t: float, freedom: int) -> float:
    """Return the probability that Student's t exceeds a value (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan2(t, math.sqrt(freedom))
    cosine, term, total = math.cos(angle), 1.0, 0.0
    for index in range(freedom % 2, freedom - 1, 2):
        total += term
        term *= cosine**2 * (index + 1) / (index + 2)
    share = math.sin(angle) * total if freedom % 2 == 0 else (angle + math.sin(angle) * cosine * total) * 2 / math.pi
    return (1 - share) / 2


def _table_of(part: Metric, arrays: Columns) -> tuple[list[str], NDArray[Any]]:
    """Return the names of a metric's results, and of each row its sums, its two numbers, or its results alone."""
    if isinstance(part, CountingMetric):
        counts = part.count(arrays)
        smallest = np.min_scalar_type(-1 - int(np.abs(counts).max(initial=0)))  # signed
        return list(_results(part, counts[:1])), counts.astype(smallest)
    is_correlation = isinstance(part, PearsonCorrelation | SpearmanCorrelation)
    alone = []
    for row in range(1 if is_correlation else len(next(iter(arrays.values())))):
        other = type(part)(**part.options)
        other.update({name: array[row : row + 1] for name, array in arrays.items()})
        alone.append(other.result(part.options))
    if is_correlation:
        return list(alone[0]), np.column_stack([arrays["predictions"], arrays["references"]]).astype(np.float64)
    return list(alone[0]), np.asarray([[each.get(name, math.nan) for name in alone[0]] for each in alone], np.float64)


def _pseudo_values(part: Metric, names: Sequence[str], table: NDArray[Any]) -> list[Numbers]:
    number = len(table)
    if isinstance(part, CountingMetric):
        if number < LEAST_ROWS_OF_OTHERS and not isinstance(part, _MEANS):
            return [np.full(number, np.nan) for _ in names]
        totals = table.sum(axis=0, dtype=np.int64)
        chunks = [_results(part, totals - table[start : start + _AT_ONCE]) for start in range(0, number, _AT_ONCE)]
        whole, without = _results(part, totals[None]), {name: [chunk[name] for chunk in chunks] for name in names}
        return [number * whole[name] - (number - 1) * np.concatenate(without[name]) for name in names]
    if not isinstance(part, PearsonCorrelation | SpearmanCorrelation):
        return list(table.T)
    sides = [centred_ranks(each) if isinstance(part, SpearmanCorrelation) else each - each.mean() for each in table.T]
    with np.errstate(invalid="ignore", divide="ignore"):
        scaled = [each / math.sqrt(math.fsum(np.square(each.astype(np.float64)))) for each in sides]
    return [number * scaled[0] * scaled[1] for _ in names]


def _results(part: CountingMetric, totals: NDArray[Any]) -> dict[str, Numbers]:
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        return part.score(totals, part.options)
