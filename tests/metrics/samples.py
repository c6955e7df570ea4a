"""Samples for each metric of a task."""

import numpy as np

from loopwright import metrics

TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "the", "dog", "run", "far", "away", "from", "home."]
OPTIONS = {"coco_ap": {"iou_types": ("bbox", "segm")}, "reconstruction_error": {"mean_image": np.full((4, 4), 0.4)}}


def sentences(draw, num_samples, longest=9):
    return [" ".join(draw.choice(WORDS, draw.integers(0, longest))) for _ in range(num_samples)]


def scene(seed):
    """Return the true and the predicted objects of an image of 40 x 50 pixels."""
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


def objects(boxes, classes, scores=None, **others):
    return {"boxes": boxes, "classes": classes, **({} if scores is None else {"scores": scores}), **others}


def columns_of(name, num_samples=40, seed=0):
    """Return columns of samples for a metric of `TASK_METRICS` or `VISION_METRICS`."""
    draw = np.random.default_rng(seed)
    if name in {"squad", "squad_v2", "rouge", "sacrebleu", "chrf"}:
        first, second = sentences(draw, num_samples), sentences(draw, num_samples)
        references = [[text, " ".join(text.split()[1:])] if len(text) % 2 else [text] for text in second]
        columns = {"predictions": [one if len(one) % 3 else two for one, two in zip(first, second, strict=True)]}
        if name == "squad_v2":
            references = [[] if len(each[0]) % 4 == 0 else each for each in references]
            columns["no_answer_scores"] = np.round(draw.random(num_samples), 1)
        return {**columns, "references": references}
    if name in {"entities", "token_accuracy"}:
        lengths = draw.integers(1, 9, num_samples)
        references = [draw.integers(0, 5, length) for length in lengths]
        predictions = [np.where(draw.random(len(each)) < 0.7, each, 0) for each in references]
        if name == "entities":
            references = [[TAGS[tag] for tag in row] for row in references]
            predictions = [[TAGS[tag] for tag in row] for row in predictions]
        return {"predictions": predictions, "references": references}
    if name == "retrieval":
        similarities = np.round(draw.normal(size=(num_samples, 12)), 1)
        return {"predictions": similarities, "references": draw.integers(0, 12, num_samples)}
    if name in {"ece", "auroc"}:
        return {"predictions": draw.dirichlet(np.ones(5), num_samples), "references": draw.integers(0, 5, num_samples)}
    if name == "cosine_spearman":
        first = draw.normal(size=(num_samples, 7))
        second = first + draw.normal(size=first.shape)
        return {"first": first, "second": second, "scores": np.round(draw.random(num_samples), 1)}
    if name == "bits_per_byte":
        counts = draw.integers(1, 30, num_samples)
        return {"sums": draw.exponential(20, num_samples), "counts": counts, "num_bytes": 4 * counts}
    if name == "multilabel":
        references = draw.integers(0, 2, (num_samples, 4))
        return {
            "predictions": np.where(draw.random(references.shape) < 0.8, references, 1 - references),
            "references": references,
        }
    if name == "top_k_accuracy":
        scores = np.round(draw.normal(size=(num_samples, 8)), 1)
        return {"predictions": scores, "references": draw.integers(0, 8, num_samples)}
    if name == "mean_iou":
        shapes = [(5, 3 + place % 3) for place in range(num_samples)]
        references = [np.where(draw.random(shape) < 0.1, 255, draw.integers(0, 6, shape)) for shape in shapes]
        predictions = [np.where(draw.random(each.shape) < 0.5, each % 7, 1) for each in references]
        return {"predictions": predictions, "references": references}
    if name == "reconstruction_error":
        references = draw.random((num_samples, 3, 4, 4))
        predictions = references + 0.1 * draw.normal(size=references.shape)
        return {"predictions": predictions, "references": references, "masks": draw.random((num_samples, 4, 4)) < 0.5}
    if name == "coco_ap":
        references, predictions = zip(*map(scene, range(num_samples)), strict=True)
        positions = np.arange(num_samples)
        return {"predictions": list(predictions), "references": list(references), "positions": positions}
    assert name == "confusion_matrix"
    return {side: draw.integers(0, 4, num_samples) for side in ("predictions", "references")}


def create(name):
    return metrics.load(name, **OPTIONS.get(name, {}))


def batch_of(columns, places):
    return {name: [values[place] for place in places] for name, values in columns.items()}
