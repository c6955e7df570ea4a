"""Intervals: exact and simulated coverage, no width of 0, groups, and the replicates of average precision."""

import json
import math
import random

import numpy as np
import pytest
from tests.metrics.samples import columns_of, create, scene

from loopwright import metrics
from loopwright.metrics.detection import RESAMPLED, Matches, resampled
from loopwright.tasks.scoring import JointScorer, LossInterval, MetricScorer

COUNTED = [
    name
    for name in (*metrics.TASK_METRICS, *metrics.VISION_METRICS)
    if name not in {"cosine_spearman", "confusion_matrix", "coco_ap"}
]


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
            low, high = interval(
                metrics.Accuracy(), "accuracy", predictions=[1] * size, references=[1] * hits + [0] * (size - hits)
            )
            assert 0 <= low <= hits / size <= high <= 1
            covered, width = covered + share * (low <= rate <= high), width + share * (high - low)
            spread = hits / size * (1 - hits / size) / size + 0.9604 / size**2
            wilson += share * 2 * 1.96 * math.sqrt(spread) / (1 + 3.8416 / size)
    assert covered >= least and width <= 1.3 * wilson


def test_the_interval_of_f1_covers_for_ten_samples():
    covered = printed = 0.0
    shares = {"tp": 0.475, "fp": 0.025, "fn": 0.025, "tn": 0.475}
    for tp in range(11):
        for fp in range(11 - tp):
            for fn in range(11 - tp - fp):
                counts = {"tp": tp, "fp": fp, "fn": fn, "tn": 10 - tp - fp - fn}
                share = math.factorial(10) * math.prod(
                    shares[name] ** count / math.factorial(count) for name, count in counts.items()
                )
                if share > 1e-4 and counts["tn"] < 10:
                    bounds = interval(
                        metrics.F1(),
                        "f1",
                        predictions=[1] * (tp + fp) + [0] * (10 - tp - fp),
                        references=[1] * tp + [0] * fp + [1] * fn + [0] * counts["tn"],
                    )
                    printed, covered = printed + share, covered + share * (bounds[0] <= 0.95 <= bounds[1])
    assert covered / printed >= 0.91


def test_intervals_of_skewed_losses_and_of_rare_classes_cover():
    draw = np.random.default_rng(0)
    hits = {"lognormal": [], "mixture": [], "macro F1": []}
    for _ in range(300):
        skewed = draw.lognormal(0, 1, 50)
        mixture = np.where(draw.random(50) < 0.9, draw.exponential(0.01, 50), 4 + draw.exponential(1, 50))
        for name, values, truth in (("lognormal", skewed, math.exp(0.5)), ("mixture", mixture, 0.509)):
            low, high = interval(metrics.MeanLoss(), "loss", sums=values, counts=[1] * 50)
            hits[name].append(low <= truth <= high)
        references = draw.choice(3, 50, p=(0.6, 0.3, 0.1))
        predictions = np.where(draw.random(50) < 0.9, references, (references + draw.integers(1, 3, 50)) % 3)
        bounds = interval(metrics.F1(average="macro"), "f1", predictions=predictions, references=references)
        assert (bounds is None) == (min(np.bincount(references, minlength=3)) < 5)
        if bounds is not None:
            hits["macro F1"].append(bounds[0] <= 0.8560 <= bounds[1])
    assert all(np.mean(each) >= 0.91 for each in hits.values()), {name: np.mean(each) for name, each in hits.items()}


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("size", [3, 7, 60])
def test_no_interval_has_width_zero_and_all_that_are_missing_have_a_reason(name, size):
    columns = columns_of(name, size)
    if "references" in columns and name not in {"retrieval", "top_k_accuracy", "reconstruction_error"}:
        texts = [each if isinstance(each, str) else (list(each) or [""])[0] for each in columns["references"]]
        is_text = name in {"squad", "squad_v2", "rouge", "sacrebleu", "chrf"}
        columns["predictions"] = texts if is_text else columns["references"]
    bootstrap = metrics.Bootstrap(create(name))
    bootstrap.add_batch(**columns)
    found, result = bootstrap.interval(), bootstrap.compute()
    assert {*found, *found.missing} >= {key for key in result if "best" not in key and "total" not in key} - {
        "mean_image_mse"
    }
    assert all(low < high and low <= result[key] <= high for key, (low, high) in found.items())
    assert all(found.missing.values()) and (size > 3 or not found)


def scorer(name, groups, rows):
    """Return the intervals of a scorer that was fed rows of two processes in any order, and one for the loss."""
    kinds = {"coco_ap": create, "accuracy": metrics.load, "pearsonr": metrics.load, "spearmanr": metrics.load}
    whole, parts = None, []
    for half in (rows[::2], rows[1::2]):
        part = JointScorer([MetricScorer(lambda: kinds[name](name), {}), LossInterval()])
        for start in range(0, len(half), 7):
            part.add([{**row, **({} if groups is None else {"group": groups(row)})} for row in half[start : start + 7]])
        parts.append(json.loads(json.dumps(part.state_dict())))
    whole = JointScorer([MetricScorer(lambda: kinds[name](name), {}), LossInterval()])
    for state in parts:
        whole.merge_state(state)
    return whole.intervals()


@pytest.mark.parametrize("name", ["accuracy", "pearsonr", "spearmanr", "coco_ap"])
def test_groups_are_the_units_in_any_order(name):
    draw = np.random.default_rng(0)
    rows = []
    for position in range(240):
        number = position // 4  # four rows alike
        value = float(np.random.default_rng(number).normal())
        row = {
            "position": position,
            "loss": value**2,
            "prediction": value,
            "reference": value + float(draw.normal()) / 9,
        }
        row["reference"] = value + float(np.random.default_rng(900 + number).normal())
        if name == "accuracy":
            row |= {"prediction": 1, "reference": int(value > -0.8)}
        elif name == "coco_ap":
            row |= dict(zip(("reference", "prediction"), scene(number), strict=True))
        rows.append(row)
    alone, together = scorer(name, None, rows), scorer(name, lambda row: row["position"] // 4, rows)
    random.Random(0).shuffle(rows)
    assert scorer(name, lambda row: row["position"] // 4, rows) == together
    assert set(alone) == set(together) and len(together) >= 2
    for key, (low, high) in together.items():
        assert 1.6 < (high - low) / (alone[key][1] - alone[key][0]) < 2.5, key
    few = scorer(name, lambda row: row["position"] // 8, rows)
    assert not few and set(few.missing.values()) == {"at least 50 groups are needed, there are 30"}


def test_a_replicate_of_average_precision_is_that_of_the_drawn_images():
    pairs = [scene(seed) for seed in range(40)]
    times = np.random.default_rng(0).poisson(1, 40)

    def filled(copies):
        metric = metrics.CocoAP(iou_types=("bbox", "segm"))
        places = np.repeat(np.arange(40), copies)
        metric.add_batch(
            predictions=[pairs[place][1] for place in places],
            references=[pairs[place][0] for place in places],
            positions=np.arange(len(places)),
        )
        return metric

    metric, sides = filled(np.ones(40, dtype=int)), None
    for kind, prefix in (("bbox", ""), ("segm", "mask_")):
        _, _, overlaps = metric._evaluated(kind)
        sides = [metric._state[position] for position in range(40)]
        matches = [Matches.of(sides, each, overlaps) for each in range(3)]
        found = resampled(matches, np.stack([np.ones(40, dtype=int), times]))
        once, drawn = metric.result({}), filled(times).compute()
        for name in RESAMPLED:
            assert found[name][0] == pytest.approx(once[prefix + name], rel=1e-12)
            assert found[name][1] == pytest.approx(drawn[prefix + name], abs=0.02)  # copies of an image are not ordered
    assert set(metric.own_interval(0.95).values()) == {"at least 50 samples are needed, there are 40"}
