"""Samples for each metric of a task."""

from __future__ import annotations

import numpy as np

TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "the", "dog", "run", "far", "away", "from", "home."]


def sentences(draw, num_samples, longest=9):
    return [" ".join(draw.choice(WORDS, draw.integers(0, longest))) for _ in range(num_samples)]


def columns_of(name, num_samples=40, seed=0):
    """Return columns of samples for a metric of `TASK_METRICS`."""
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
    assert name == "confusion_matrix"
    return {side: draw.integers(0, 4, num_samples) for side in ("predictions", "references")}


def batch_of(columns, places):
    return {name: [values[place] for place in places] for name, values in columns.items()}
