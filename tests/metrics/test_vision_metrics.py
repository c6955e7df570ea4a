"""Metrics of images: against numpy, scikit-learn and numbers worked out by hand."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix, jaccard_score, recall_score, top_k_accuracy_score
from tests.metrics.samples import batch_of, columns_of, create, objects

from loopwright import metrics


@pytest.mark.parametrize("name", list(metrics.VISION_METRICS))
def test_tensors_and_arrays_are_the_same_to_metrics_of_images(name):
    def as_tensors(values):
        if isinstance(values, dict):
            return {key: as_tensors(each) for key, each in values.items()}
        return [as_tensors(each) for each in values] if isinstance(values, list) else torch.as_tensor(values)

    columns = columns_of(name)
    assert create(name).compute(**as_tensors(columns)) == create(name).compute(**columns)


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
def test_k_is_capped_by_the_classes_and_nan_is_never_right(row, label, expected):
    result = metrics.load("top_k_accuracy").compute(predictions=[row], references=[label])
    assert list(result.values()) == expected


def test_mean_iou_has_the_numbers_of_scikit_learn_without_ignored_pixels():
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
    recall = recall_score(referred, predicted, average="macro")
    overall = (referred == predicted).mean()
    expected = {"mean_iou": ious.mean(), "mean_accuracy": recall, "overall_accuracy": overall}
    assert metric.compute() == pytest.approx(expected, rel=1e-12)
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


def average_precision(found, reference, **options):
    return metrics.load("coco_ap", **options).compute(predictions=[found], references=[reference], positions=[3])


def test_average_precision_by_hand():
    # Three objects of a class, four predictions by falling score: hit, miss, hit, and a second hit of the first object.
    boxes = [[0, 0, 10, 10], [20, 0, 30, 10], [0, 20, 10, 30]]
    reference = objects(boxes, [0, 0, 0])
    found = objects([boxes[0], [40, 40, 50, 50], boxes[1], boxes[0]], [0] * 4, [0.9, 0.8, 0.7, 0.6])
    result = average_precision(found, reference)
    # Precision is 1 up to a recall of 1/3 (34 of the 101 points), 2/3 up to 2/3 (33 more), then 0.
    expected = (34 * 1 + 33 * 2 / 3) / 101
    assert result["map"] == pytest.approx(expected, abs=1e-12) and result["map_50"] == pytest.approx(expected)
    assert result["mar_1"] == pytest.approx(1 / 3) and result["mar_100"] == pytest.approx(2 / 3)
    assert result["map_small"] == result["map"] and not any("large" in name for name in result)


def test_a_box_counts_up_to_the_threshold_of_its_overlap_and_a_crowd_not_at_all():
    # 8 of 10 columns overlap: IoU 0.8, a hit at 0.5, 0.55, ..., 0.8 (7 of 10 thresholds).
    reference, found = objects([[0, 0, 10, 10]], [2]), objects([[0, 0, 8, 10]], [2], [0.5])
    result = average_precision(found, reference)
    assert (result["map_50"], result["map_75"]) == pytest.approx((1.0, 1.0))
    assert result["map"] == pytest.approx(0.7, abs=0.1 + 1e-9)  # 0.8 itself is a matter of rounding
    assert result["map"] in (pytest.approx(0.6), pytest.approx(0.7))
    reference = objects([[0, 0, 10, 10], [20, 20, 60, 60]], [0, 0], crowd=[False, True])
    found = objects([[0, 0, 10, 10], [25, 25, 35, 35]], [0, 0], [0.5, 0.9])
    assert average_precision(found, reference)["map"] == pytest.approx(1.0)


def test_masks_of_any_form_are_compared_as_masks():
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
        results.append(average_precision(found, reference, iou_types=("bbox", "segm")))
    assert results[0] == results[1]
    assert results[0]["map"] == pytest.approx(1.0)
    assert results[0]["mask_map_75"] == 0.0 and results[0]["mask_map"] <= 0.1  # IoU 0.5


def test_an_image_that_comes_twice_counts_once():
    columns = columns_of("coco_ap")
    once, twice = create("coco_ap"), create("coco_ap")
    once.add_batch(**columns)
    twice.add_batch(**columns)
    twice.add_batch(**batch_of(columns, [3, 4, 5]))
    padded = create("coco_ap")
    padded.add_batch(**batch_of(columns, [0, 1]))
    twice.merge(padded)
    assert twice.num_samples == len(columns["positions"])
    assert twice.state_dict() == once.state_dict() and twice.compute() == once.compute()


def test_only_the_hundred_most_confident_objects_of_a_class_are_kept():
    far = [[50.0, 50.0, 51.0, 51.0]] * 150
    found = objects([*far, [0, 0, 10, 10]], [0] * 150 + [1], [0.5 + place / 1000 for place in range(150)] + [0.1])
    metric = metrics.load("coco_ap")
    metric.add_batch(predictions=[found], references=[objects([[0, 0, 10, 10]], [1])], positions=[0])
    (kept,) = metric.state_dict()["images"]
    assert kept[1]["classes"].count(0) == 100 and min(kept[1]["scores"][:100]) == pytest.approx(0.55)
    assert set(kept[1]) == {"boxes", "classes", "scores"} and metric.compute()["map"] == pytest.approx(1.0)


def test_the_table_of_classes_has_the_mean_of_the_result_and_nothing_to_find_is_no_number():
    nothing, one = objects([], [], []), objects([[0, 0, 5, 5]], [0])
    assert average_precision(nothing, one, labels=["cat", "dog"])["map"] == 0.0
    metric = metrics.load("coco_ap", labels=["cat", "dog"])
    metric.add_batch(predictions=[objects([[0, 0, 5, 5]], [1], [0.5])], references=[nothing], positions=[0])
    row = {"label": "dog", "map": None, "map_50": None, "num_references": 0, "num_predictions": 1}
    assert metric.table() == [row]
    assert math.isnan(metric.compute()["map"])
    metric = create("coco_ap")
    metric.add_batch(**columns_of("coco_ap"))
    rows = metric.table()
    result = metric.compute()
    assert [row["label"] for row in rows] == [0, 1, 2]
    assert np.mean([row["map"] for row in rows]) == pytest.approx(result["map"], rel=1e-12)
    assert np.mean([row["mask_map_50"] for row in rows]) == pytest.approx(result["mask_map_50"], rel=1e-12)


def test_reconstruction_error_is_a_mean_over_hidden_pixels_next_to_the_mean_image():
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
