"""Every metric that a run reports, computed again from its eval/predictions.jsonl by independent code."""

import json
import math
import re
import string
from collections import Counter
from typing import Any

import numpy as np
import pytest
import sacrebleu
import yaml
from rouge_score.rouge_scorer import RougeScorer
from scipy import stats
from sklearn import metrics as sklearn

from loopwright import api
from tasks.reviews import events, read_lines

Lines = list[dict[str, Any]]
AREAS = {"": (0, 1e10), "_small": (0, 32**2), "_medium": (32**2, 96**2), "_large": (96**2, 1e10)}


def assert_recomputed(run: api.Run) -> None:
    """Assert that predictions.jsonl gives every metric of a run that has ended, and of its best evaluation."""
    lines = read_lines(run.path / "eval" / "predictions.jsonl")
    labels = json.loads((run.path / "data.json").read_text()).get("labels") or {}
    settings = yaml.safe_load((run.path / "config.yaml").read_text())
    found = {**FORMULAS[run.result["task"]](lines, settings, labels.get("names", [])), "loss": loss_of(lines)}
    assert run.metrics and set(run.metrics) <= set(found), set(run.metrics) - set(found)
    assert run.metrics == pytest.approx({key: found[key] for key in run.metrics}, rel=1e-9, abs=1e-12)
    best = [each for each in events(run.path) if each.get("update") == run.result["update"]]
    reported = {key: value for each in best for key, value in each.items() if key.startswith("eval_")}
    for key, value in run.metrics.items() if reported else ():
        assert reported["eval_loss_epoch" if key == "loss" else f"eval_{key}"] == pytest.approx(value, rel=1e-9), key


def loss_of(lines: Lines) -> float:
    names = ("num_target_tokens", "num_windows", "num_items", "num_tokens")
    weights = [next((line[name] for name in names if name in line), 1) for line in lines]
    losses = [line.get("batch_loss", line.get("image_loss", line.get("loss"))) for line in lines]
    return mean(
        [loss for loss, weight in zip(losses, weights, strict=True) if weight], [each for each in weights if each]
    )


def mean(values: list[float], weights: list[float] | None = None) -> float:
    weights = [1.0] * len(values) if weights is None else weights
    return math.fsum(map(math.prod, zip(values, weights, strict=True))) / math.fsum(weights)


def calibration_error(decisions: list[tuple[float, bool]], bins: int = 15) -> float:
    gaps = []
    for place in range(bins):
        inside = [each for each in decisions if place / bins < each[0] <= (place + 1) / bins]
        gaps.append(abs(math.fsum(share for share, _ in inside) - sum(is_right for _, is_right in inside)))
    return math.fsum(gaps) / len(decisions)


def of_classes(lines: Lines, settings: dict, names: list[str]) -> dict[str, float]:
    true, predicted = ([line[side] for line in lines] for side in ("reference", "prediction"))
    if isinstance(predicted[0], float):
        return of_numbers(lines)
    if isinstance(predicted[0], list):
        true, predicted = ([[name in row for name in names] for row in side] for side in (true, predicted))
        found = {
            f"f1_{kind}": sklearn.f1_score(true, predicted, average=kind, zero_division=0)
            for kind in ("micro", "macro")
        }
        hits = [one == other for pair in zip(true, predicted, strict=True) for one, other in zip(*pair, strict=True)]
        shares = [line["confidences"][name] for line in lines for name in names]
        return {**found, "subset_accuracy": sklearn.accuracy_score(true, predicted), "ece": ece_of(shares, hits)}
    average = {"average": "binary", "pos_label": names[1]} if len(names) == 2 else {"average": "macro"}
    hits = [line["prediction"] == line["reference"] for line in lines]
    return {
        "accuracy": mean(hits),
        "f1": sklearn.f1_score(true, predicted, zero_division=0, **average) if names else math.nan,
        "matthews_correlation": sklearn.matthews_corrcoef(true, predicted),
        "top_5_accuracy": mean([line.get("rank", 0) < 5 for line in lines]),
        "ece": ece_of([line["confidence"] for line in lines], hits),
    }


def ece_of(shares: list[float], hits: list[bool]) -> float:
    return calibration_error([each for each in zip(shares, hits, strict=True) if each[0]])


def of_numbers(lines: Lines) -> dict[str, float]:
    true, predicted = ([line[side] for line in lines] for side in ("reference", "prediction"))
    pearson, squares = stats.pearsonr(true, predicted).statistic, np.subtract(true, predicted) ** 2
    spearman = stats.spearmanr(true, predicted).statistic
    return {"pearsonr": pearson, "pearson": pearson, "spearmanr": spearman, "mse": mean(squares.tolist())}


def spans(tags: list[str]) -> set[tuple[str, int, int]]:
    """Return the entities of IOB2 tags."""
    found: list[list[Any]] = []
    for place, tag in enumerate(tags):
        if tag.startswith("I-") and found and found[-1][2] == place and found[-1][0] == tag[2:]:
            found[-1][2] += 1
        elif tag != "O":
            found.append([tag[2:], place, place + 1])
    return {tuple(each) for each in found}


def of_tags(lines: Lines, settings: dict, names: list[str]) -> dict[str, float]:
    sides = [[spans(line[side]) for line in lines] for side in ("prediction", "reference")]
    right, found, there = (sum(map(len, each)) for each in ([a & b for a, b in zip(*sides, strict=True)], *sides))
    hits = [a == b for line in lines for a, b in zip(line["prediction"], line["reference"], strict=True)]
    shares = [share for line in lines for share in line["confidences"]]
    scores = {
        "precision": right / max(found, 1),
        "recall": right / max(there, 1),
        "f1": 2 * right / max(found + there, 1),
    }
    return {**scores, "accuracy": mean(hits), "token_accuracy": mean(hits), "ece": ece_of(shares, hits)}


def answer_words(text: str) -> list[str]:
    plain = "".join(each for each in text.lower() if each not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def answer_score(text: str, answers: list[str]) -> tuple[float, float]:
    pairs = [(answer_words(text), answer_words(answer)) for answer in answers or [""]]
    shared = [2 * sum((Counter(a) & Counter(b)).values()) / max(len(a) + len(b), 1) for a, b in pairs]
    return max(float(a == b) for a, b in pairs), max(
        score if a and b else float(a == b) for score, (a, b) in zip(shared, pairs, strict=True)
    )


def of_answers(lines: Lines, settings: dict, names: list[str]) -> dict[str, float]:
    scores = [answer_score(line["prediction"], line["reference"]) for line in lines]
    found = {"exact_match": 100 * mean([each[0] for each in scores])}
    for place, name in enumerate(("exact", "f1")):
        for prefix, kept in (("", (True, False)), ("HasAns_", (True,)), ("NoAns_", (False,))):
            chosen = [each[place] for each, line in zip(scores, lines, strict=True) if bool(line["reference"]) in kept]
            found[prefix + name] = 100 * mean(chosen) if chosen else math.nan
        margins = [line.get("no_answer_score", 0.0) for line in lines]
        texts = [line["n_best"][0]["text"] if line.get("n_best") else line["prediction"] for line in lines]
        answered = [answer_score(text, line["reference"])[place] for text, line in zip(texts, lines, strict=True)]
        tried = []
        for limit in (min(margins) - 1, *sorted(set(margins))):
            rows = zip(margins, answered, lines, strict=True)
            score = mean([float(not line["reference"]) if margin > limit else value for margin, value, line in rows])
            tried.append((100 * score, -limit))
        best = max(tried, key=lambda each: (round(each[0], 9), each[1]))
        found |= {f"best_{name}": best[0], f"best_{name}_thresh": -best[1]}
    return found


def of_pairs(lines: Lines, settings: dict, names: list[str]) -> dict[str, float]:
    if "rank" not in lines[0]:
        return of_numbers(lines)
    ranks = [line["rank"] for line in lines]
    found = {f"recall@{k}": mean([rank <= k for rank in ranks]) for k in (1, 5, 10)}
    gains = [1 / math.log2(1 + rank) if rank <= 10 else 0.0 for rank in ranks]
    losses = mean([line["loss"] for line in lines])
    return {**found, "mrr": mean([1 / rank for rank in ranks]), "ndcg@10": mean(gains), "pool_loss": losses}


def of_language(lines: Lines, settings: dict, names: list[str]) -> dict[str, float]:
    found = {"perplexity": math.exp(loss_of(lines))}
    if "num_bytes" in lines[0]:
        total = math.fsum(line["loss"] * line["num_tokens"] for line in lines if line["num_tokens"])
        return {**found, "bits_per_byte": total / math.log(2) / sum(line["num_bytes"] for line in lines)}
    pairs = (zip(line["prediction_ids"], line["reference_ids"], strict=True) for line in lines)
    return {**found, "token_accuracy": mean([a == b for row in pairs for a, b in row])}


def of_summaries(lines: Lines, settings: dict, names: list[str]) -> dict[str, float]:
    kinds = ["rouge1", "rouge2", "rougeL", "rougeLsum"]
    scorer = RougeScorer(kinds, use_stemmer=settings["use_stemmer"])
    sides = (
        [re.sub(r"(?<=[.!?])\s+", "\n", line[side].strip()) for line in lines] for side in ("reference", "prediction")
    )
    scores = [scorer.score(*pair) for pair in zip(*sides, strict=True)]
    return {kind: mean([score[kind].fmeasure for score in scores]) for kind in kinds}


def of_translations(lines: Lines, settings: dict, names: list[str]) -> dict[str, float]:
    written, true = ([line[side] for line in lines] for side in ("prediction", "reference"))
    return {
        "bleu": sacrebleu.corpus_bleu(written, [true]).score,
        "chrf": sacrebleu.corpus_chrf(written, [true]).score,
        "exact_match": mean([a == b for a, b in zip(written, true, strict=True)]),
    }


def of_pixels(lines: Lines, settings: dict, names: list[str]) -> dict[str, float]:
    pairs: Counter[tuple[str, str]] = Counter()
    for line in lines:
        for true, row in line["pixels"].items():
            pairs.update({(true, predicted): count for predicted, count in row.items()})
    right = {name: pairs[name, name] for name in names}
    there, found = (
        {name: sum(n for pair, n in pairs.items() if pair[side] == name) for name in names} for side in (0, 1)
    )
    union = {name: there[name] + found[name] - right[name] for name in names}
    return {
        "mean_iou": mean([right[name] / union[name] for name in names if union[name]]),
        "mean_accuracy": mean([right[name] / there[name] for name in names if there[name]]),
        "overall_accuracy": sum(right.values()) / sum(there.values()),
    }


def of_objects(lines: Lines, settings: dict, names: list[str]) -> dict[str, float]:
    found = {}
    has_masks = any("mask" in each for line in lines for each in line["truth"])
    for kind, prefix in (("mask", "mask_"), ("box", "")) if has_masks else (("box", ""),):
        images = [prepared(line, kind) for line in lines]
        for area, limits in AREAS.items():
            curves = [curve_of(images, name, limits) for name in names]
            curves = [curve for curve in curves if curve is not None]
            if curves:
                precisions, recalls = (np.stack(each) for each in zip(*curves, strict=True))
                found |= {f"{prefix}map{area}": precisions.mean(), f"{prefix}mar_100{area}": recalls.mean()}
                if not area:
                    found |= {f"{prefix}map_{50 + 5 * at}": precisions[:, at].mean() for at in (0, 5)}
    return found


def prepared(line: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return objects and truth of an image, and the overlap of each pair: over the object itself if it is a crowd."""
    from faster_coco_eval import mask as tools

    sides, areas = [], []
    for side in ("objects", "truth"):
        boxes = np.array([each["box"] for each in line[side]], np.float32).astype(float).reshape(-1, 4)
        masks = [tools.decode(each["mask"]).astype(bool) for each in line[side] if "mask" in each]
        sides.append(masks if kind == "mask" else boxes)
        sizes = np.prod(boxes[:, 2:] - boxes[:, :2], axis=1)
        areas.append(
            np.array([each.sum() for each in masks]) if masks and (kind == "mask" or side == "truth") else sizes
        )
    overlaps = np.zeros((len(sides[0]), len(sides[1])))
    for place in np.ndindex(overlaps.shape):
        mine, true = sides[0][place[0]], sides[1][place[1]]
        if kind == "mask":
            shared = float((mine & true).sum())
        else:
            shared = float(np.prod(np.maximum(np.minimum(mine[2:], true[2:]) - np.maximum(mine[:2], true[:2]), 0)))
        size = areas[0][place[0]]
        if not line["truth"][place[1]].get("crowd"):
            other = true.sum() if kind == "mask" else np.prod(true[2:] - true[:2])
            size = size + other - shared
        overlaps[place] = shared / size if size else 0.0
    return {**line, "areas": areas, "overlaps": overlaps}


def curve_of(images: Lines, name: str, limits: tuple[float, float]) -> tuple[np.ndarray, np.ndarray] | None:
    """Return COCO's precision at 101 recalls, and the recall, for ten thresholds; None without true objects."""
    verdicts: list[tuple[float, list[float]]] = []
    num_true = 0
    for image in images:
        mine = [place for place, each in enumerate(image["objects"]) if each["label"] == name]
        mine = sorted(mine, key=lambda place: -image["objects"][place]["score"])[:100]
        true = [place for place, each in enumerate(image["truth"]) if each["label"] == name]
        sizes = image["areas"]
        ignored = {
            at: bool(image["truth"][at].get("crowd")) or not limits[0] <= sizes[1][at] <= limits[1] for at in true
        }
        num_true += sum(not each for each in ignored.values())
        taken: list[set[int]] = [set() for _ in range(10)]
        for place in mine:
            row = []
            for step, threshold in enumerate(np.linspace(0.5, 0.95, 10)):
                free = [at for at in true if at not in taken[step] or image["truth"][at].get("crowd")]
                fits = [at for at in free if image["overlaps"][place, at] >= threshold]
                counted = [at for at in fits if not ignored[at]] or fits
                best = max(counted, key=lambda at: (image["overlaps"][place, at], at), default=None)
                if best is not None:
                    taken[step].add(best)
                    row.append(math.nan if ignored[best] else 1.0)
                else:
                    row.append(0.0 if limits[0] <= sizes[0][place] <= limits[1] else math.nan)
            verdicts.append((image["objects"][place]["score"], row))
    if not num_true:
        return None
    verdicts.sort(key=lambda each: -each[0])
    table = np.array([row for _, row in verdicts]).reshape(-1, 10).T
    precisions, recalls = np.zeros((10, 101)), np.zeros(10)
    for step, column in enumerate(table):
        hits, misses = np.cumsum(column == 1), np.cumsum(column == 0)
        recall, precision = hits / num_true, hits / np.maximum(hits + misses, 1)
        precision = np.maximum.accumulate(precision[::-1])[::-1]
        places = np.searchsorted(recall, np.linspace(0, 1, 101))
        precisions[step] = [precision[at] if at < len(precision) else 0.0 for at in places]
        recalls[step] = recall[-1] if len(recall) else 0.0
    return precisions, recalls


def of_rebuilt(lines: Lines, settings: dict, names: list[str]) -> dict[str, float]:
    return {"masked_mse": mean([line["masked_mse"] for line in lines], [line["num_hidden"] for line in lines])}


FORMULAS = {
    "text-classification": of_classes,
    "token-classification": of_tags,
    "question-answering": of_answers,
    "multiple-choice": of_classes,
    "sentence-embedding": of_pairs,
    "causal-lm": of_language,
    "masked-lm": of_language,
    "summarization": of_summaries,
    "translation": of_translations,
    "image-classification": of_classes,
    "semantic-segmentation": of_pixels,
    "object-detection": of_objects,
    "instance-segmentation": of_objects,
    "masked-image-modeling": of_rebuilt,
}
