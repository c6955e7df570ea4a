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
from faster_coco_eval import mask as masks
from rouge_score.rouge_scorer import RougeScorer
from scipy import stats
from sklearn import metrics as sklearn

from loopwright import api
from tasks.reviews import events, read_lines

Lines = list[dict[str, Any]]
Numbers = dict[str, float]
AREAS = {"": (0, 1e10), "_small": (0, 32**2), "_medium": (32**2, 96**2), "_large": (96**2, 1e10)}
THRESHOLDS = np.linspace(0.5, 0.95, 10)


def assert_recomputed(run: api.Run) -> None:
    """Assert that predictions.jsonl gives every metric of a run that has ended, and of its best evaluation."""
    lines = read_lines(run.path / "eval" / "predictions.jsonl")
    names = (json.loads((run.path / "data.json").read_text()).get("labels") or {}).get("names", [])
    settings = yaml.safe_load((run.path / "config.yaml").read_text())
    found = {**FORMULAS[run.result["task"]](lines, names, settings), "loss": loss_of(lines)}
    assert run.metrics and set(run.metrics) <= set(found), set(run.metrics) - set(found)
    assert run.metrics == pytest.approx({key: found[key] for key in run.metrics}, rel=1e-9, abs=1e-12)
    best = [each for each in events(run.path) if each.get("update") == run.result["update"]]
    reported = {key: value for each in best for key, value in each.items() if key.startswith("eval_")}
    assert_judged(run)
    for key, value in run.metrics.items() if reported else ():
        assert reported["eval_loss_epoch" if key == "loss" else f"eval_{key}"] == pytest.approx(value, rel=1e-9), key


def assert_judged(run: api.Run) -> None:
    """Assert that the verdict is against the strongest baseline, with the p of the differences of the rows."""
    verdict = run.result["verdict"]
    name, prefix, sign = verdict["metric"], verdict["split"].replace("validation", ""), verdict["direction"] == "max"
    prefix, sign = f"{prefix}_" if prefix else "", 1 if sign else -1
    known = {key: sign * each[prefix + name] for key, each in run.result["baselines"].items() if prefix + name in each}
    assert known[verdict["baseline"]] == max(known.values())
    with (
        np.load(run.path / "eval" / prefix.rstrip("_") / "rows.npz") as ours,
        np.load(run.path / "baselines.npz") as theirs,
    ):
        own, other = ours[name], theirs[f"{verdict['baseline']}:{prefix}{name}"]
    gains = sign * (own[2][np.argsort(own[0])][: len(other[0])] - other[2])
    gains = gains[np.isfinite(gains)]
    if verdict["kind"] is None:
        assert verdict["reason"] == "rows" and verdict["rows"] == len(own[0]) < 50
        return
    flips = np.random.default_rng(0).choice([-1, 1], (4000, len(gains))) @ gains
    is_more, total = gains.sum() > -1e-9, gains.sum()
    p = np.mean(flips >= total - 1e-9) * verdict["evaluations"] if is_more else np.mean(flips <= total + 1e-9)
    assert verdict["rows"] == len(gains) and (verdict["kind"] == "indistinct") == (verdict["p"] > 0.025)
    assert verdict["p"] == pytest.approx(min(1.0, p), abs=0.02 * verdict["evaluations"])


def loss_of(lines: Lines) -> float:
    names = ("num_target_tokens", "num_windows", "num_items", "num_tokens")
    weights = [next((line[name] for name in names if name in line), 1) for line in lines]
    losses = [line.get("batch_loss", line.get("image_loss", line.get("loss"))) for line in lines]
    return mean([loss if weight else 0.0 for loss, weight in zip(losses, weights, strict=True)], weights)


def mean(values: list[float], weights: list[float] | None = None) -> float:
    weights = [1.0] * len(values) if weights is None else weights
    return math.fsum(map(math.prod, zip(values, weights, strict=True))) / math.fsum(weights)


def sides(lines: Lines, *names: str) -> list[list[Any]]:
    return [[line[name] for line in lines] for name in names or ("reference", "prediction")]


def calibration_error(shares: list[float], hits: list[bool], bins: int = 15) -> float:
    gaps = [
        math.fsum(share - hit for share, hit in zip(shares, hits, strict=True) if place < bins * share <= place + 1)
        for place in range(bins)
    ]
    return math.fsum(map(abs, gaps)) / sum(share > 0 for share in shares)


def of_classes(lines: Lines, names: list[str], _settings: dict) -> Numbers:
    true, predicted = sides(lines)
    if isinstance(predicted[0], float):
        return of_numbers(lines)
    hits, flat = [a == b for a, b in zip(true, predicted, strict=True)], {"zero_division": 0}
    if isinstance(predicted[0], list):
        rows = [np.array([[name in row for name in names] for row in side]) for side in (true, predicted)]
        shares = [line["confidences"][name] for line in lines for name in names]
        found = {f"f1_{kind}": sklearn.f1_score(*rows, average=kind, **flat) for kind in ("micro", "macro")}
        found["ece"] = calibration_error(shares, (rows[0] == rows[1]).ravel().tolist())
        return {**found, "subset_accuracy": sklearn.accuracy_score(*rows)}
    average = {"average": "binary", "pos_label": names[1]} if len(names) == 2 else {"average": "macro"}
    return {
        "accuracy": mean(hits),
        "f1": sklearn.f1_score(true, predicted, **average, **flat),
        "top_5_accuracy": mean([line.get("rank", 0) < 5 for line in lines]),
        "ece": calibration_error(*sides(lines, "confidence"), hits),
    }


def of_numbers(lines: Lines) -> Numbers:
    true, predicted = sides(lines)
    squares = np.subtract(true, predicted) ** 2
    correlations = (each(true, predicted).statistic for each in (stats.pearsonr, stats.spearmanr))
    return {**dict(zip(("pearsonr", "spearmanr"), correlations, strict=True)), "mse": mean(squares.tolist())}


def spans(tags: list[str]) -> set[tuple[str, int, int]]:
    found: list[list[Any]] = []
    for place, tag in enumerate(tags):
        if tag.startswith("I-") and found and found[-1][0] == tag[2:] and found[-1][2] == place:
            found[-1][2] += 1
        elif tag != "O":
            found.append([tag[2:], place, place + 1])
    return {tuple(each) for each in found}


def of_tags(lines: Lines, _names: list[str], _settings: dict) -> Numbers:
    true, predicted = ([spans(tags) for tags in side] for side in sides(lines))
    right, found, there = (sum(map(len, each)) for each in (map(set.__and__, true, predicted), predicted, true))
    hits = [a == b for rows in zip(*sides(lines), strict=True) for a, b in zip(*rows, strict=True)]
    scores = {
        "precision": right / max(found, 1),
        "recall": right / max(there, 1),
        "f1": 2 * right / max(found + there, 1),
    }
    error = calibration_error([share for line in lines for share in line["confidences"]], hits)
    # Words that were cut off have no confidence, and count as predicted wrongly in the accuracy alone.
    return {**scores, "accuracy": mean(hits), "token_accuracy": mean(hits), "ece": error}


def answer_words(text: str) -> list[str]:
    plain = "".join(each for each in text.lower() if each not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def answer_score(text: str, answer: str) -> tuple[float, float]:
    mine, true = answer_words(text), answer_words(answer)
    shared = sum((Counter(mine) & Counter(true)).values())
    return float(mine == true), 2 * shared / (len(mine) + len(true)) if mine and true else float(mine == true)


def of_answers(lines: Lines, _names: list[str], settings: dict) -> Numbers:
    found = {}
    margins = [line.get("no_answer_score", 0.0) for line in lines]
    for place, name in enumerate(("exact", "f1")):

        def score(line: dict, text: str, place: int = place) -> float:
            return max(answer_score(text, answer)[place] for answer in line["reference"] or [""])

        scores = [score(line, line["prediction"]) for line in lines]
        for prefix, kept in (("", (True, False)), ("HasAns_", (True,)), ("NoAns_", (False,))):
            chosen = [each for each, line in zip(scores, lines, strict=True) if bool(line["reference"]) in kept]
            found |= {prefix + name: 100 * mean(chosen)} if chosen else {}
        spoken = [score(line, (line.get("n_best") or [{"text": line["prediction"]}])[0]["text"]) for line in lines]
        tried = {}
        for limit in (min(margins) - 1, *sorted(set(margins))):
            rows = zip(margins, spoken, lines, strict=True)
            tried[limit] = 100 * mean(
                [each if margin <= limit else not line["reference"] for margin, each, line in rows]
            )
        best = max(tried, key=lambda limit: round(tried[limit], 9))
        found |= {f"best_{name}": tried[best], f"best_{name}_thresh": best}
    return {**found, "exact_match": found["exact"]}


def of_pairs(lines: Lines, _names: list[str], _settings: dict) -> Numbers:
    if "rank" not in lines[0]:
        return of_numbers(lines)
    (ranks,) = sides(lines, "rank")
    found = {f"recall@{k}": mean([rank <= k for rank in ranks]) for k in (1, 5, 10)}
    gains = [1 / math.log2(1 + rank) if rank <= 10 else 0.0 for rank in ranks]
    pool_loss = mean(*sides(lines, "loss"))
    return {**found, "mrr": mean([1 / rank for rank in ranks]), "ndcg@10": mean(gains), "pool_loss": pool_loss}


def of_language(lines: Lines, _names: list[str], _settings: dict) -> Numbers:
    found = {"perplexity": math.exp(loss_of(lines))}
    if "num_bytes" in lines[0]:
        tokens, sizes = map(sum, sides(lines, "num_tokens", "num_bytes"))
        return {**found, "bits_per_byte": loss_of(lines) * tokens / math.log(2) / sizes}
    pairs = zip(*sides(lines, "prediction_ids", "reference_ids"), strict=True)
    return {**found, "token_accuracy": mean([a == b for rows in pairs for a, b in zip(*rows, strict=True)])}


def of_chats(lines: Lines, _names: list[str], _settings: dict) -> Numbers:
    answered = [line["answer"] == line["true"] for line in lines if "answer" in line]
    each = mean([line["loss"] for line in lines if line["num_tokens"]])
    exact = {"exact_match": mean(answered)} if answered else {}
    return {"perplexity": math.exp(loss_of(lines)), "conversation_perplexity": math.exp(each), **exact}


def of_summaries(lines: Lines, _names: list[str], settings: dict) -> Numbers:
    kinds = ["rouge1", "rouge2", "rougeL", "rougeLsum"]
    scorer = RougeScorer(kinds, use_stemmer=settings["use_stemmer"])
    texts = ([re.sub(r"(?<=[.!?])\s+", "\n", text.strip()) for text in side] for side in sides(lines))
    scores = [scorer.score(*pair) for pair in zip(*texts, strict=True)]
    return {kind: mean([score[kind].fmeasure for score in scores]) for kind in kinds}


def of_translations(lines: Lines, _names: list[str], _settings: dict) -> Numbers:
    true, written = sides(lines)
    scores = {f"{name}": getattr(sacrebleu, f"corpus_{name}")(written, [true]).score for name in ("bleu", "chrf")}
    return {**scores, "exact_match": mean([a == b for a, b in zip(written, true, strict=True)])}


def of_pixels(lines: Lines, names: list[str], _settings: dict) -> Numbers:
    matrix = sum(np.array([[line["pixels"].get(a, {}).get(b, 0) for b in names] for a in names]) for line in lines)
    right, there, union = matrix.diagonal(), matrix.sum(1), matrix.sum(0) + matrix.sum(1) - matrix.diagonal()
    accuracies, ious = right[there > 0] / there[there > 0], right[union > 0] / union[union > 0]
    overall = right.sum() / matrix.sum()
    return {"mean_iou": ious.mean(), "mean_accuracy": accuracies.mean(), "overall_accuracy": overall}


def of_objects(lines: Lines, names: list[str], _settings: dict) -> Numbers:
    found: Numbers = {}
    has_masks = any("mask" in each for line in lines for each in line["truth"])
    for kind, prefix in (("mask", "mask_"), ("box", "")) if has_masks else (("box", ""),):
        images = [{**line, "overlaps": overlaps(line, kind)} for line in lines]
        for area, limits in AREAS.items():
            curves = [curve_of(images, kind, name, limits) for name in names]
            if curves := [curve for curve in curves if curve is not None]:
                precisions, recalls = (np.stack(each) for each in zip(*curves, strict=True))
                found |= {f"{prefix}map{area}": precisions.mean(), f"{prefix}mar_100{area}": recalls.mean()}
                if not area:
                    found |= {f"{prefix}map_{50 + 5 * at}": precisions[:, at].mean() for at in (0, 5)}
    return found


def pixels_of(each: dict[str, Any], kind: str) -> tuple[Any, float]:
    if kind == "mask":
        pixels = masks.decode(each["mask"]).astype(bool)
        return pixels, float(pixels.sum())
    box = np.array(each["box"], np.float32).astype(float)
    return box, float(np.prod(box[2:] - box[:2]))


def overlaps(line: dict[str, Any], kind: str) -> np.ndarray:
    """Return the overlap of each object with each true one: over the object itself if that is a crowd."""
    found, true = ([pixels_of(each, kind) for each in line[side]] for side in ("objects", "truth"))
    table = np.zeros((len(found), len(true)))
    for (row, (mine, area)), (column, (other, size)) in ((a, b) for a in enumerate(found) for b in enumerate(true)):
        if kind == "mask":
            shared = float((mine & other).sum())
        else:
            shared = float(np.prod(np.maximum(np.minimum(mine[2:], other[2:]) - np.maximum(mine[:2], other[:2]), 0)))
        whole = area if line["truth"][column].get("crowd") else area + size - shared
        table[row, column] = shared / whole if whole else 0.0
    return table


def curve_of(images: Lines, kind: str, name: str, limits: tuple[float, float]) -> tuple[np.ndarray, np.ndarray] | None:
    """Return COCO's precision at 101 recalls, and the recall, for ten thresholds; None without true objects."""
    scores, verdicts, num_true = [], [], 0
    for image in images:
        objects, truth = image["objects"], image["truth"]
        mine = [place for place, each in enumerate(objects) if each["label"] == name]
        true = [place for place, each in enumerate(truth) if each["label"] == name]
        areas = {at: pixels_of(truth[at], "mask" if "mask" in truth[at] else "box")[1] for at in true}
        ignored = {at for at in true if truth[at].get("crowd") or not limits[0] <= areas[at] <= limits[1]}
        num_true += len(true) - len(ignored)
        taken: list[set[int]] = [set() for _ in THRESHOLDS]
        for place in sorted(mine, key=lambda place: -objects[place]["score"])[:100]:
            is_out = not limits[0] <= pixels_of(objects[place], kind)[1] <= limits[1]
            row = []
            for step, threshold in enumerate(THRESHOLDS):
                free = [at for at in true if at not in taken[step] or truth[at].get("crowd")]
                fits = [at for at in free if image["overlaps"][place, at] >= threshold]
                fits = [at for at in fits if at not in ignored] or fits
                best = max(fits, key=lambda at: (image["overlaps"][place, at], at), default=None)
                taken[step] |= set() if best is None else {best}
                row.append(math.nan if (is_out if best is None else best in ignored) else float(best is not None))
            scores.append(objects[place]["score"])
            verdicts.append(row)
    if not num_true:
        return None
    table = np.array(verdicts).reshape(-1, 10)[np.argsort(-np.array(scores), kind="stable")]
    hits, misses = np.cumsum(table == 1, axis=0), np.cumsum(table == 0, axis=0)
    recalls, precisions = hits / num_true, hits / np.maximum(hits + misses, 1)
    precisions = np.concatenate([np.maximum.accumulate(precisions[::-1])[::-1], np.zeros((1, 10))])
    places = [np.searchsorted(recall, np.linspace(0, 1, 101)) for recall in recalls.T]
    drawn = np.stack([precision[at] for precision, at in zip(precisions.T, places, strict=True)])
    return drawn, recalls[-1] if len(recalls) else np.zeros(10)


def of_rebuilt(lines: Lines, _names: list[str], _settings: dict) -> Numbers:
    return {"masked_mse": mean(*sides(lines, "masked_mse", "num_hidden"))}


def of_rewards(lines: Lines, _names: list[str], _settings: dict) -> Numbers:
    chosen, rejected = sides(lines, "chosen_reward", "rejected_reward")
    margins = [one - other for one, other in zip(chosen, rejected, strict=True)]
    found = {"reward_margin": mean(margins), "chosen_reward": mean(chosen), "rejected_reward": mean(rejected)}
    return {**found, "reward_accuracy": mean([float(margin > 0) for margin in margins])}


FORMULAS = {
    **dict.fromkeys(("text-classification", "multiple-choice", "image-classification"), of_classes),
    **{"token-classification": of_tags, "question-answering": of_answers, "sentence-embedding": of_pairs},
    **dict.fromkeys(("causal-lm", "masked-lm"), of_language),
    **{"summarization": of_summaries, "translation": of_translations, "semantic-segmentation": of_pixels},
    **dict.fromkeys(("object-detection", "instance-segmentation"), of_objects),
    "masked-image-modeling": of_rebuilt,
    "chat": of_chats,
    "preference": of_rewards,
}
