"""Intervals: exact and simulated coverage, no width of 0, groups, and the replicates of average precision."""

import json
import math
import random
from itertools import product

import numpy as np
import pytest
from tests.metrics.samples import columns_of, create, scene

from loopwright import metrics
from loopwright.errors import DataError
from loopwright.metrics.detection import RESAMPLED, Matches, resampled
from loopwright.tasks.scoring import JointScorer, LossInterval, MetricScorer

COUNTED = [name for name in (*metrics.TASK_METRICS, *metrics.VISION_METRICS) if create(name).counting_parts]


def interval(metric, result, **columns):
    bootstrap = metrics.Bootstrap(metric)
    bootstrap.add_batch(**columns)
    return bootstrap.interval().get(result)


@pytest.mark.parametrize(
    ("size", "rate", "least"),
    [(10, 0.9, 0.91), (10, 0.95, 0.91), (10, 0.99, 0.91), (20, 0.95, 0.91), (50, 0.99, 0.925), (200, 0.99, 0.925)],
)
def test_the_interval_of_an_accuracy_covers_and_is_hardly_wider_than_wilsons(size, rate, least):
    covered, width, wilson = 0.0, 0.0, 0.0
    for hits in range(size + 1):
        share = math.comb(size, hits) * rate**hits * (1 - rate) ** (size - hits)
        if share > 1e-4:
            columns = {"predictions": [1] * size, "references": [1] * hits + [0] * (size - hits)}
            low, high = interval(metrics.Accuracy(), "accuracy", **columns)
            assert 0 <= low <= hits / size <= high <= 1
            covered, width = covered + share * (low <= rate <= high), width + share * (high - low)
            spread = hits / size * (1 - hits / size) / size + 0.9604 / size**2
            wilson += share * 2 * 1.96 * math.sqrt(spread) / (1 + 3.8416 / size)
    assert covered >= least and width <= 1.3 * wilson


def test_the_interval_of_f1_covers_for_ten_samples():
    covered = printed = 0.0
    for tp, fp, fn in product(range(11), repeat=3):
        tn = 10 - tp - fp - fn
        if 0 <= tn < 10:
            ways = math.factorial(10) / math.prod(map(math.factorial, (tp, fp, fn, tn)))
            share = ways * 0.475 ** (tp + tn) * 0.025 ** (fp + fn)
            predictions = [1] * (tp + fp) + [0] * (fn + tn)
            references = [1] * tp + [0] * fp + [1] * fn + [0] * tn
            low, high = interval(metrics.F1(), "f1", predictions=predictions, references=references)
            printed, covered = printed + share, covered + share * (low <= 0.95 <= high)
    assert covered / printed >= 0.91


def test_intervals_of_skewed_losses_and_of_rare_classes_cover():
    draw = np.random.default_rng(0)
    hits = {"lognormal": [], "mixture": [], "macro F1": []}
    for _ in range(200):
        skewed = draw.lognormal(0, 1, 50)
        mixture = np.where(draw.random(50) < 0.9, draw.exponential(0.01, 50), 4 + draw.exponential(1, 50))
        for name, values, truth in (("lognormal", skewed, math.exp(0.5)), ("mixture", mixture, 0.509)):
            low, high = interval(metrics.MeanLoss(), "loss", sums=values, counts=[1] * 50)
            hits[name].append(low <= truth <= high)
        references = draw.choice(3, 50, p=(0.6, 0.3, 0.1))
        predictions = np.where(draw.random(50) < 0.9, references, (references + draw.integers(1, 3, 50)) % 3)
        bounds = interval(metrics.F1(average="macro"), "f1", predictions=predictions, references=references)
        assert (bounds is None) == (min(np.bincount(references, minlength=3)) < 5)
        hits["macro F1"] += [] if bounds is None else [bounds[0] <= 0.8560 <= bounds[1]]
    assert all(np.mean(each) >= 0.91 for each in hits.values()), {name: np.mean(each) for name, each in hits.items()}


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("size", [3, 7, 60])
def test_no_interval_has_width_zero_and_all_that_are_missing_have_a_reason(name, size):
    columns = columns_of(name, size)
    if name in {"squad", "squad_v2", "rouge", "sacrebleu", "chrf"}:  # all are right
        columns["predictions"] = [(list(each) or [""])[0] for each in columns["references"]]
    elif name in {"entities", "token_accuracy", "multilabel", "mean_iou"}:
        columns["predictions"] = columns["references"]
    bootstrap = metrics.Bootstrap(create(name))
    bootstrap.add_batch(**columns)
    found, result = bootstrap.interval(), bootstrap.compute()
    scores = [key for key in result if not key.startswith(("best", "mean_image")) and not key.endswith("total")]
    assert all(key in found or found.missing[key] for key in scores)
    assert all(low < high and low <= result[key] <= high for key, (low, high) in found.items())
    assert size > 3 or not found


def intervals_of(name, rows, rows_per_group=None):
    """Return the intervals of the rows, which two processes score in this order, and of their losses."""
    make = create if name == "coco_ap" else metrics.load
    *parts, whole = (JointScorer([MetricScorer(lambda: make(name), {}), LossInterval()]) for _ in range(3))
    for part, half in zip(parts, (rows[::2], rows[1::2]), strict=True):
        for start in range(0, len(half), 7):
            batch = half[start : start + 7]
            if rows_per_group:
                batch = [{**row, "group": row["position"] // rows_per_group} for row in batch]
            part.add(batch)
        whole.merge_state(json.loads(json.dumps(part.state_dict())))
    return whole.intervals()


@pytest.mark.parametrize("name", ["accuracy", "mse", "mae", "pearsonr", "spearmanr", "coco_ap"])
def test_groups_are_the_units_in_any_order(name):
    rows = []
    for position in range(240):
        first, second = np.random.default_rng(position // 4).normal(size=2).tolist()  # four rows are equal
        row = {"position": position, "loss": first**2, "prediction": first, "reference": first + second}
        if name == "accuracy":
            row |= {"prediction": 1, "reference": int(first > -0.8)}
        elif name == "coco_ap":
            row |= dict(zip(("reference", "prediction"), scene(position // 4), strict=True))
        rows.append(row)
    alone, together = intervals_of(name, rows), intervals_of(name, rows, 4)
    random.Random(0).shuffle(rows)
    assert intervals_of(name, rows, 4) == together and set(alone) == set(together) and len(together) >= 2
    for key, (low, high) in together.items():
        assert 1.6 < (high - low) / (alone[key][1] - alone[key][0]) < 3, key
    few = intervals_of(name, rows, 8)
    assert set(few) == ({"accuracy"} if name == "accuracy" else set())
    assert set(few.missing.values()) == {"at least 50 independent rows or groups are needed, there are 30"}


@pytest.mark.parametrize(("kind", "prefix"), [("bbox", ""), ("segm", "mask_")])
def test_a_replicate_of_average_precision_is_that_of_the_drawn_images(kind, prefix):
    pairs = [scene(seed) for seed in range(40)]
    once, times = np.ones(40, dtype=np.int64), np.random.default_rng(0).poisson(1, 40)

    def filled(copies):
        metric = metrics.CocoAP(iou_types=(kind,))
        for position, place in enumerate(np.repeat(np.arange(40), copies)):
            metric.add_batch(predictions=[pairs[place][1]], references=[pairs[place][0]], positions=[position])
        return metric

    metric = filled(once)
    _, _, overlaps = metric._evaluated(kind)
    matches = [Matches.of([metric._state[position] for position in range(40)], each, overlaps) for each in range(3)]
    found = resampled(matches, np.stack([once, times]))
    assert set(metric.own_interval(0.95).values()) == {"at least 50 samples are needed, there are 40"}
    whole, drawn = metric.compute(), filled(times).compute()
    for name in RESAMPLED:
        assert found[name][0] == pytest.approx(whole[prefix + name], rel=1e-12)
        assert found[name][1] == pytest.approx(drawn[prefix + name], abs=0.02)  # copies of an image are not ordered


def test_groups_that_are_refused_are_not_kept():
    bootstrap, columns = metrics.Bootstrap(metrics.Accuracy()), {"predictions": [1, 0], "references": [1, 1]}
    with pytest.raises(DataError, match="groups must be one whole number for each"):
        bootstrap.add_batch(groups=[7], **columns)
    bootstrap.add_batch(groups=[1, 2], **columns)
    assert bootstrap.state_dict()["groups"] == [1, 2]
