"""Metrics of images: against numpy, scikit-learn and numbers worked out by hand; merged over processes to the bit."""

from __future__ import annotations

import json
import math
import random
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import confusion_matrix, jaccard_score, recall_score, top_k_accuracy_score

from loopwright import metrics
from loopwright.errors import ConfigError, DataError, InputError

NAMES = list(metrics.VISION_METRICS)
NUM_SAMPLES = 24
OPTIONS = {"coco_ap": {"iou_types": ("bbox", "segm")}, "reconstruction_error": {"mean_image": np.full((4, 4), 0.4)}}


def scene(seed):
    """Return what was there and what was found in an image of 40 x 50 pixels."""
    draw = np.random.default_rng(seed)
    masks = np.zeros((draw.integers(0, 5), 40, 50), dtype=bool)
    for mask in masks:
        top, left = draw.integers(0, 20, 2)
        mask[top : top + draw.integers(4, 20), left : left + draw.integers(4, 20)] = True
    corners = [[*np.argwhere(mask).min(axis=0)[::-1], *(np.argwhere(mask).max(axis=0)[::-1] + 1)] for mask in masks]
    boxes = np.asarray(corners, dtype=np.float64).reshape(-1, 4)
    classes = draw.integers(0, 3, len(masks))
    reference = {"boxes": boxes, "classes": classes, "masks": masks, "crowd": draw.random(len(masks)) < 0.1}
    found = {
        "boxes": boxes + draw.normal(size=boxes.shape),
        "classes": np.where(draw.random(len(masks)) < 0.8, classes, 0),
        "scores": np.round(draw.random(len(masks)), 1),
        "masks": np.roll(masks, draw.integers(0, 3), axis=1),
    }
    return reference, found


def columns_of(name, num_samples=NUM_SAMPLES):
    draw = np.random.default_rng(0)
    if name == "top_k_accuracy":
        return {
            "predictions": np.round(draw.normal(size=(num_samples, 8)), 1),
            "references": draw.integers(0, 8, num_samples),
        }
    if name == "mean_iou":
        shapes = [(5, 3 + place % 3) for place in range(num_samples)]
        references = [np.where(draw.random(shape) < 0.1, 255, draw.integers(0, 6, shape)) for shape in shapes]
        return {
            "predictions": [np.where(draw.random(each.shape) < 0.5, each % 7, 1) for each in references],
            "references": references,
        }
    if name == "reconstruction_error":
        references = draw.random((num_samples, 3, 4, 4))
        return {
            "predictions": references + 0.1 * draw.normal(size=references.shape),
            "references": references,
            "masks": draw.random((num_samples, 4, 4)) < 0.5,
        }
    pairs = [scene(place) for place in range(num_samples)]
    return {
        "predictions": [found for _, found in pairs],
        "references": [reference for reference, _ in pairs],
        "positions": np.arange(num_samples),
    }


def made(name):
    return metrics.load(name, **OPTIONS.get(name, {}))


def batch_of(columns, places):
    return {name: [values[place] for place in places] for name, values in columns.items()}


@pytest.fixture(scope="module")
def wholes():
    return {name: made(name).compute(**columns_of(name)) for name in NAMES}


@settings(max_examples=6)
@given(batch_size=st.integers(1, 13), num_processes=st.integers(1, 4), seed=st.integers(0, 10**6))
@pytest.mark.parametrize("name", NAMES)
def test_batches_order_and_processes_change_no_bit_of_metrics_of_images(wholes, name, batch_size, num_processes, seed):
    columns = columns_of(name)
    order = list(range(NUM_SAMPLES))
    random.Random(seed).shuffle(order)
    processes = [made(name) for _ in range(num_processes)]
    for index, start in enumerate(range(0, NUM_SAMPLES, batch_size)):
        processes[index % num_processes].add_batch(**batch_of(columns, order[start : start + batch_size]))
    merged = made(name)
    merged.load_state_dict(json.loads(json.dumps(processes[0].state_dict())))
    for other in processes[1:]:
        merged.merge(other)
    assert merged.num_samples == NUM_SAMPLES
    assert merged.compute() == wholes[name]


@pytest.mark.parametrize("name", NAMES)
def test_two_halves_make_the_whole_and_an_empty_batch_changes_nothing(wholes, name):
    columns = columns_of(name)
    first, second = made(name), made(name)
    first.add_batch(**batch_of(columns, range(11)))
    second.add_batch(**batch_of(columns, range(11, NUM_SAMPLES)))
    second.add_batch(**{side: [] for side in columns})
    second.merge(first)
    assert second.compute() == wholes[name]
    with pytest.raises(DataError, match=f"{name} has no samples"):
        second.compute()


def test_metrics_of_images_say_which_way_is_better_and_tell_numbers(wholes):
    lower = {name for name, kind in metrics.VISION_METRICS.items() if not kind.greater_is_better}
    assert lower == {"reconstruction_error"} and len(NAMES) == 4
    assert not set(NAMES) & {*metrics.METRICS, *metrics.TASK_METRICS}
    for result in wholes.values():
        assert {type(value) for value in result.values()} == {float}


@pytest.mark.parametrize("name", ["top_k_accuracy", "mean_iou", "reconstruction_error"])
def test_intervals_of_metrics_of_images_hold_the_result(wholes, name):
    columns = columns_of(name)
    intervals = []
    for batch_size in (NUM_SAMPLES, 5):
        metric = metrics.Bootstrap(made(name), replicates=40)
        for start in range(0, NUM_SAMPLES, batch_size):
            metric.add_batch(**batch_of(columns, range(start, min(start + batch_size, NUM_SAMPLES))))
        intervals.append(metric.interval(0.99))
    assert intervals[0] == intervals[1]
    for key, (low, high) in intervals[0].items():
        assert low <= wholes[name][key] <= high and low < high, key


@pytest.mark.parametrize("name", NAMES)
def test_tensors_and_arrays_are_the_same_to_metrics_of_images(wholes, name):
    def as_tensors(values):
        if isinstance(values, dict):
            return {key: as_tensors(each) for key, each in values.items()}
        return [as_tensors(each) for each in values] if isinstance(values, list) else torch.as_tensor(values)

    assert made(name).compute(**as_tensors(columns_of(name))) == wholes[name]


# ------------------------------------------------------------------------------------------------ top k accuracy


def test_top_k_accuracy_has_the_numbers_of_scikit_learn():
    draw = np.random.default_rng(1)
    scores, labels = draw.normal(size=(300, 12)), draw.integers(0, 12, 300)
    result = metrics.load("top_k_accuracy", ks=(1, 3, 5)).compute(predictions=scores, references=labels)
    assert list(result) == ["accuracy", "top_3_accuracy", "top_5_accuracy"]
    for k, value in zip((1, 3, 5), result.values(), strict=True):
        assert value == top_k_accuracy_score(labels, scores, k=k)


@pytest.mark.parametrize(
    ("row", "label", "expected"),
    [
        ([0.1, 0.9, 0.5], 1, [1.0, 1.0]),
        ([0.1, 0.9, 0.5], 2, [0.0, 1.0]),
        ([0.5, 0.5, 0.5], 0, [1.0, 1.0]),
        ([0.5, 0.5, 0.5], 1, [0.0, 1.0]),
        ([0.5, math.nan, 0.1], 0, [0.0, 1.0]),
        ([math.nan, 0.2, 0.1], 0, [0.0, 0.0]),
        ([math.nan, math.nan, math.nan], 2, [0.0, 0.0]),
    ],
)
def test_k_is_capped_by_the_classes_and_what_is_not_a_number_is_never_right(row, label, expected):
    result = metrics.load("top_k_accuracy").compute(predictions=[row], references=[label])
    assert list(result.values()) == expected


# ------------------------------------------------------------------------------------------------------ mean iou


def test_mean_iou_has_the_numbers_of_scikit_learn():
    columns = columns_of("mean_iou")
    predicted, referred = (np.concatenate([each.ravel() for each in columns[side]]) for side in columns)
    predicted, referred = predicted[referred != 255], referred[referred != 255]
    metric = metrics.load("mean_iou")
    metric.add_batch(**columns)
    ious = jaccard_score(referred, predicted, average=None)
    table = metric.table()
    assert [row["iou"] for row in table] == pytest.approx(list(ious), rel=1e-12)
    assert metric.confusion_matrix() == confusion_matrix(referred, predicted).tolist()
    assert [row["num_references"] for row in table] == np.bincount(referred).tolist()
    assert metric.compute() == pytest.approx(
        {
            "mean_iou": ious.mean(),
            "mean_accuracy": recall_score(referred, predicted, average="macro"),
            "overall_accuracy": (referred == predicted).mean(),
        },
        rel=1e-12,
    )


def test_classes_that_never_occur_are_left_out_and_ignored_pixels_do_not_count():
    metric = metrics.load("mean_iou", labels=["sky", "sea", "ship", "moon"])
    reference = np.asarray([[0, 0, 1], [1, 255, 255]])
    prediction = np.asarray([[0, 2, 1], [1, 2, 3]])
    metric.add_batch(predictions=[prediction], references=[reference])
    rows = metric.table()
    assert [(row["label"], row["iou"], row["accuracy"]) for row in rows] == [
        ("sky", 0.5, 0.5),
        ("sea", 1.0, 1.0),
        ("ship", 0.0, None),  # predicted, though it is nowhere
        ("moon", None, None),  # predicted only where nothing counts
    ]
    assert metric.compute() == {"mean_iou": 0.5, "mean_accuracy": 0.75, "overall_accuracy": 0.75}


# ------------------------------------------------------------------------------------------------------- coco ap


def objects(boxes, classes, scores=None, **others):
    return {"boxes": boxes, "classes": classes, **({} if scores is None else {"scores": scores}), **others}


def test_average_precision_is_what_is_worked_out_by_hand():
    # Three objects of a class, four predictions by falling score: hit, miss, hit, and a second hit of the first object.
    boxes = [[0, 0, 10, 10], [20, 0, 30, 10], [0, 20, 10, 30]]
    reference = objects(boxes, [0, 0, 0])
    found = objects([boxes[0], [40, 40, 50, 50], boxes[1], boxes[0]], [0] * 4, [0.9, 0.8, 0.7, 0.6])
    result = metrics.load("coco_ap").compute(predictions=[found], references=[reference], positions=[0])
    # Precision is 1 up to a recall of 1/3 (34 of the 101 points), 2/3 up to 2/3 (33 more), then 0.
    expected = (34 * 1 + 33 * 2 / 3) / 101
    assert result["map"] == pytest.approx(expected, abs=1e-12) and result["map_50"] == pytest.approx(expected)
    assert result["mar_1"] == pytest.approx(1 / 3) and result["mar_100"] == pytest.approx(2 / 3)
    assert result["map_small"] == result["map"] and not any("large" in name for name in result)


def test_a_box_counts_up_to_the_threshold_of_its_overlap():
    # 8 of 10 columns overlap: IoU 0.8, a hit at 0.5, 0.55, ..., 0.8 (7 of 10 thresholds).
    reference, found = objects([[0, 0, 10, 10]], [2]), objects([[0, 0, 8, 10]], [2], [0.5])
    result = metrics.load("coco_ap").compute(predictions=[found], references=[reference], positions=[3])
    assert (result["map_50"], result["map_75"]) == pytest.approx((1.0, 1.0))
    assert result["map"] == pytest.approx(0.7, abs=0.1 + 1e-9)  # 0.8 itself is a matter of rounding
    assert result["map"] in (pytest.approx(0.6), pytest.approx(0.7))


def test_masks_are_compared_as_masks_whichever_way_they_are_given():
    mask = np.zeros((20, 30), dtype=bool)
    mask[2:12, 5:15] = True
    half = mask.copy()
    half[2:7] = False
    changes = np.flatnonzero(np.diff(np.concatenate([[0], mask.ravel(order="F")])))
    lengths = np.diff(np.concatenate([[0], changes, [mask.size]])).tolist()
    results = []
    for form in (mask, {"size": [20, 30], "counts": lengths}):
        reference = objects([[5, 2, 15, 12]], [0], masks=[form])
        found = objects([[5, 2, 15, 12]], [0], [0.9], masks=[half])
        metric = metrics.load("coco_ap", iou_types=("bbox", "segm"))
        results.append(metric.compute(predictions=[found], references=[reference], positions=[0]))
    assert results[0] == results[1]
    assert results[0]["map"] == pytest.approx(1.0)
    assert results[0]["mask_map_75"] == 0.0 and results[0]["mask_map"] <= 0.1  # IoU 0.5


def test_a_crowd_is_neither_found_nor_missed():
    reference = objects([[0, 0, 10, 10], [20, 20, 60, 60]], [0, 0], crowd=[False, True])
    found = objects([[0, 0, 10, 10], [25, 25, 35, 35]], [0, 0], [0.5, 0.9])
    metric = metrics.load("coco_ap")
    assert metric.compute(predictions=[found], references=[reference], positions=[0])["map"] == pytest.approx(1.0)


def test_an_image_that_comes_twice_counts_once():
    columns = columns_of("coco_ap")
    once, twice = made("coco_ap"), made("coco_ap")
    once.add_batch(**columns)
    twice.add_batch(**columns)
    twice.add_batch(**batch_of(columns, [3, 4, 5]))
    padded = made("coco_ap")
    padded.add_batch(**batch_of(columns, [0, 1]))
    twice.merge(padded)
    assert twice.num_samples == NUM_SAMPLES
    assert twice.state_dict() == once.state_dict() and twice.compute() == once.compute()


def test_only_the_surest_hundred_of_a_class_are_kept_and_nothing_of_the_image():
    far = [[50.0, 50.0, 51.0, 51.0]] * 150
    found = objects([*far, [0, 0, 10, 10]], [0] * 150 + [1], [0.5 + place / 1000 for place in range(150)] + [0.1])
    metric = metrics.load("coco_ap")
    metric.add_batch(predictions=[found], references=[objects([[0, 0, 10, 10]], [1])], positions=[0])
    (kept,) = metric.state_dict()["images"]
    assert kept[1]["classes"].count(0) == 100 and min(kept[1]["scores"][:100]) == pytest.approx(0.55)
    assert set(kept[1]) == {"boxes", "classes", "scores"} and metric.compute()["map"] == pytest.approx(1.0)


def test_finding_nothing_scores_0_and_nothing_to_be_found_scores_no_number():
    nothing, one = objects([], [], []), objects([[0, 0, 5, 5]], [0])
    metric = metrics.load("coco_ap", labels=["cat", "dog"])
    assert metric.compute(predictions=[nothing], references=[one], positions=[0])["map"] == 0.0
    metric.add_batch(predictions=[objects([[0, 0, 5, 5]], [1], [0.5])], references=[nothing], positions=[0])
    assert metric.table() == [
        {"label": "dog", "map": None, "map_50": None, "num_references": 0, "num_predictions": 1},
    ]
    assert math.isnan(metric.compute()["map"])


def test_the_table_of_classes_has_the_mean_of_the_result():
    metric = made("coco_ap")
    metric.add_batch(**columns_of("coco_ap"))
    rows = metric.table()
    result = metric.compute()
    assert [row["label"] for row in rows] == [0, 1, 2]
    assert np.mean([row["map"] for row in rows]) == pytest.approx(result["map"], rel=1e-12)
    assert np.mean([row["mask_map_50"] for row in rows]) == pytest.approx(result["mask_map_50"], rel=1e-12)


def test_average_precision_without_its_package_is_told_with_the_line_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "faster_coco_eval", None)
    with pytest.raises(InputError) as caught:
        metrics.load("coco_ap")
    assert caught.value.code == "install.extra" and caught.value.fix == "pip install 'loopwright[vision]'"


# ------------------------------------------------------------------------------------------ reconstruction error


def test_reconstruction_error_is_the_mean_over_hidden_pixels_beside_that_of_the_mean_image():
    columns = columns_of("reconstruction_error")
    hidden = np.broadcast_to(columns["masks"][:, None], columns["references"].shape)
    mean = columns["references"].mean(axis=0)
    result = metrics.load("reconstruction_error", mean_image=mean).compute(**columns)
    assert list(result) == ["masked_mse", "mean_image_mse"]
    assert result["masked_mse"] == pytest.approx(
        np.square(columns["predictions"] - columns["references"])[hidden].mean(), rel=1e-12
    )
    assert result["mean_image_mse"] == pytest.approx(np.square(mean - columns["references"])[hidden].mean(), rel=1e-12)
    channels = metrics.load("reconstruction_error", mean_image=torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64))
    expected = np.square(np.asarray([0.1, 0.2, 0.3])[:, None, None] - columns["references"])[hidden].mean()
    assert channels.compute(**columns)["mean_image_mse"] == pytest.approx(expected, rel=1e-12)
    assert list(metrics.load("reconstruction_error").compute(**columns)) == ["masked_mse"]


# -------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("name", "options", "columns", "expected"),
    [
        ("top_k_accuracy", {}, {"predictions": [[1.0, 2.0]], "references": [2]}, "are classes in rows of 2, got 2"),
        ("top_k_accuracy", {}, {"predictions": [[1.0, 2.0]], "references": [0.5]}, "must be classes, got"),
        ("top_k_accuracy", {}, {"predictions": [1, 0], "references": [1, 0]}, "must be one row of numbers per sample"),
        (
            "mean_iou",
            {},
            {"predictions": np.zeros((1, 3, 2, 2)), "references": np.zeros((1, 2, 2))},
            "resize them, then take the argmax",
        ),
        ("mean_iou", {}, {"predictions": [[[0.5]]], "references": [[[1]]]}, "is the class of each pixel, got the type"),
        (
            "mean_iou",
            {"labels": ["a", "b"]},
            {"predictions": [[[0]]], "references": [[[20]]]},
            "got the class 20, expected 0 to 1 or, for pixels that do not count, 255",
        ),
        ("mean_iou", {}, {"predictions": [[[0]]], "references": [[[-100]]]}, "got the class -100, expected 0 to"),
        (
            "reconstruction_error",
            {},
            {"predictions": np.zeros((1, 3, 4, 4)), "references": np.zeros((1, 3, 4, 4)), "masks": np.zeros((1, 2, 2))},
            "and a mask of shape (2, 2)",
        ),
        (
            "reconstruction_error",
            {"mean_image": np.zeros((3, 8, 8))},
            {"predictions": np.zeros((1, 3, 4, 4)), "references": np.zeros((1, 3, 4, 4)), "masks": np.zeros((1, 4, 4))},
            "has the shape (3, 8, 8), images have (3, 4, 4)",
        ),
        (
            "coco_ap",
            {"iou_types": "segm"},
            {"predictions": [objects([], [], [])], "references": [objects([], [])], "positions": [0]},
            "the prediction of image 0 lacks masks",
        ),
        (
            "coco_ap",
            {},
            {"predictions": [objects([[0, 0, 1, 1]], [0], [])], "references": [objects([], [])], "positions": [7]},
            "the prediction of image 7 must have one of each per object",
        ),
        (
            "coco_ap",
            {},
            {"predictions": [objects([[0, 0, 1, math.nan]], [0], [0.5])], "references": [{}], "positions": [7]},
            "has boxes or scores that are not numbers",
        ),
        (
            "coco_ap",
            {"labels": ["cat"]},
            {"predictions": [objects([], [], [])], "references": [objects([[0, 0, 1, 1]], [1])], "positions": [7]},
            "the reference of image 7 has the classes [1], expected from 0 to 0",
        ),
        (
            "coco_ap",
            {},
            {"predictions": [objects([], [], [])], "references": [objects([], [])], "positions": ["a"]},
            "positions of coco_ap must be whole numbers",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value in NAMES else "",
)
def test_images_that_cannot_be_scored_are_told(name, options, columns, expected):
    metric = metrics.load(name, **options)
    with pytest.raises(ValueError) as caught:
        metric.add_batch(**columns)
    assert expected in str(caught.value)
    assert metric.num_samples == 0


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("top_k_accuracy", {"ks": (0,)}, "ks of top_k_accuracy are whole numbers from 1"),
        ("coco_ap", {"iou_types": "boxes"}, "iou_types of coco_ap are bbox or segm, got 'boxes'"),
        ("mean_iuo", {}, "did you mean 'mean_iou'?"),
    ],
)
def test_options_of_metrics_of_images_that_cannot_be_are_told(name, options, expected):
    with pytest.raises(ConfigError) as caught:
        metrics.load(name, **options)
    assert expected in str(caught.value)
