"""Coverage of the printed 95 % intervals: how often they contain the true value, on simulated evaluations.

Each line has a population of rows; its value on the whole population is the truth. A data set is drawn from it with
replacement, and gets the interval that the metric itself computes. Data sets for which the metric has no interval (too
few rows, too few references of a class) are left out; "printed" is the share of the others. The width is the mean one.

    python benchmarks/intervals.py --jobs 16 --output benchmarks/results/intervals.md

Lines whose package is not installed are skipped; --output keeps those of an earlier table.
"""

import argparse
import math
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from loopwright import metrics
from loopwright.errors import InputError
from loopwright.metrics.bootstrap import poisson_weights
from loopwright.metrics.detection import Matches, resampled
from loopwright.metrics.intervals import LEAST_ROWS, Resampled, class_trials, correlation

LEVEL, REPLICATES = 0.95, 1000
SIZES = (10, 20, 50, 200, 1000)
BATCH = 20  # data sets that are resampled in one product
Needed = Callable[[int], float]
Columns = dict[str, Any]


def of_shares(size: int) -> float:
    return 0.91 if size < 50 else 0.925


def of_means(size: int) -> float:
    return 0.0 if size < 50 else 0.92


def of_resampled(size: int) -> float:
    return 0.0 if size < 50 else 0.87 if size < 200 else 0.92


# --------------------------------------------------------------------------------------------------- populations


def labels(shares: tuple[float, ...], accuracy: float, size: int = 20_000) -> Columns:
    """Return references with exactly these shares, of which this share of each class is right."""
    references, predictions = [], []
    for label, share in enumerate(shares):
        count = round(share * size)
        wrong = np.arange(count) >= round(accuracy * count)
        references += [label] * count
        predictions += list(np.where(wrong, (label + 1 + np.arange(count) % (len(shares) - 1)) % len(shares), label))
    return {"references": np.asarray(references), "predictions": np.asarray(predictions)}


def as_texts() -> Columns:
    return {name: list(map(str, values.tolist())) for name, values in labels((0.5, 0.5), 0.9).items()}


def losses(kind: str, size: int = 200_000) -> Columns:
    random = np.random.default_rng(1)
    sums = {
        "exponential": lambda: random.exponential(1, size),
        "lognormal(1)": lambda: random.lognormal(0, 1, size),
        "90/10 mixture": lambda: np.where(
            random.random(size) < 0.9, random.exponential(0.01, size), 4 + random.exponential(1, size)
        ),
    }[kind]()
    return {"sums": sums, "counts": np.ones(size, dtype=np.int64)}


def token_losses(size: int = 100_000) -> Columns:
    """Return the losses of texts of 5 to 60 tokens, with their lengths in bytes."""
    random = np.random.default_rng(1)
    counts = random.integers(5, 60, size)
    return {"sums": counts * random.exponential(1, size), "counts": counts, "num_bytes": 4 * counts}


def errors(size: int = 5_000) -> Columns:
    """Return images of 6 x 6 pixels, half of them hidden, whose error varies from image to image."""
    random = np.random.default_rng(1)
    references = random.random((size, 6, 6))
    noise = random.normal(size=references.shape) * random.exponential(0.2, (size, 1, 1))
    masks = np.arange(36).reshape(6, 6) % 2 == 0
    return {"references": list(references), "predictions": list(references + noise), "masks": [masks] * size}


def answers(share_of_right: float, size: int = 2_000) -> Columns:
    """Return answers of four words, all right, or 0 to 3 of them; every fifth question has no answer."""
    random = np.random.default_rng(1)
    num_right = np.where(random.random(size) < share_of_right, 4, random.integers(0, 4, size))
    predictions = [" ".join(f"w{k}" if k < right else f"x{k}" for k in range(4)) for right in num_right]
    references: list[list[str]] = [["w0 w1 w2 w3"]] * size
    for index in range(0, size, 5):
        references[index] = []
        predictions[index] = "" if num_right[index] == 4 else predictions[index]
    return {"predictions": predictions, "references": references, "no_answer_scores": np.zeros(size)}


def with_answers(share_of_right: float) -> Columns:
    rows = answers(share_of_right)
    kept = [index for index, each in enumerate(rows["references"]) if each]
    return {name: [rows[name][index] for index in kept] for name in ("predictions", "references")}


def many_labels(share_of_right: float, size: int = 20_000) -> Columns:
    """Return three labels per sample; errors come in clusters."""
    random = np.random.default_rng(1)
    references = (random.random((size, 3)) < (0.5, 0.3, 0.2)).astype(int)
    accuracy = random.beta(9 * share_of_right, 9 * (1 - share_of_right), (size, 1))
    return {
        "references": references,
        "predictions": np.where(random.random(references.shape) < accuracy, references, 1 - references),
    }


def pixels(size: int = 4_000) -> Columns:
    """Return images of 8 x 8 pixels of three classes, whose accuracy varies from image to image."""
    random = np.random.default_rng(1)
    references = random.choice(3, (size, 8, 8), p=(0.5, 0.3, 0.2))
    accuracy = random.beta(9, 1, (size, 1, 1))
    others = (references + random.integers(1, 3, references.shape)) % 3
    predictions = np.where(random.random(references.shape) < accuracy, references, others)
    return {"predictions": list(predictions), "references": list(references)}


def tokens(share_of_right: float, size: int = 10_000) -> Columns:
    """Return sentences of 5 to 20 tokens, whose accuracy varies from sentence to sentence."""
    random = np.random.default_rng(1)
    references = [random.integers(0, 5, length) for length in random.integers(5, 20, size)]
    accuracy = random.beta(9 * share_of_right, 9 * (1 - share_of_right), size)
    predictions = [
        np.where(random.random(len(row)) < each, row, 9) for row, each in zip(references, accuracy, strict=True)
    ]
    return {"predictions": predictions, "references": references}


def spans(rate: float, share_without: float = 0.0, size: int = 3_000) -> Columns:
    """Return sentences of 12 words with 0 to 4 names, which are missed and invented together; a share has none."""
    random = np.random.default_rng(1)
    predictions, references = [], []
    for count, accuracy in zip(random.integers(0, 5, size), random.beta(9 * rate, 9 * (1 - rate), size), strict=True):
        tags, found = ["O"] * 12, ["O"] * 12
        for index in range(0 if random.random() < share_without else count):
            tags[3 * index] = found[3 * index] = "B-PER"
            if random.random() >= accuracy:
                found[3 * index] = "O" if random.random() < 0.5 else "B-LOC"
        references.append(tags)
        predictions.append(found)
    return {"predictions": predictions, "references": references}


def similarities(size: int = 20_000) -> Columns:
    """Return the similarities of queries to a pool of 20; a few queries are much harder than the others."""
    random = np.random.default_rng(1)
    rows = random.normal(size=(size, 20))
    rows[:, 0] += random.choice([0.5, 4.0], size, p=(0.2, 0.8))
    return {"predictions": rows, "references": np.zeros(size, dtype=np.int64)}


def class_scores(size: int = 20_000) -> Columns:
    rows = similarities(size)
    return {**rows, "predictions": rows["predictions"][:, :12]}


def texts(size: int = 2_000) -> Columns:
    """Return sentences of 12 words, of which a share that varies is replaced."""
    random = np.random.default_rng(1)
    words = np.asarray([f"word{k}" for k in range(50)])
    references = words[random.integers(0, 50, (size, 12))]
    changed = random.random((size, 12)) < random.beta(1, 4, (size, 1))
    predictions = np.where(changed, words[random.integers(0, 50, (size, 12))], references)
    return {"predictions": [" ".join(row) for row in predictions], "references": [" ".join(row) for row in references]}


class Line(NamedTuple):
    """What is simulated: a metric, one of its results, the population, and the coverage that is needed."""

    name: str
    metric: Callable[[], Any]
    result: str
    population: Callable[[], Columns]
    needed: Needed
    largest_group: int = 1


def lines() -> list[Line]:
    """Return all that is simulated with sums; correlations and average precision follow below."""
    found = [
        Line(f"accuracy, {rate}", metrics.Accuracy, "accuracy", lambda r=rate: labels((0.5, 0.5), r), of_shares)
        for rate in (0.5, 0.7, 0.9, 0.95, 0.99)
    ]
    found.append(Line("top-5 accuracy", metrics.TopKAccuracy, "top_5_accuracy", class_scores, of_shares))
    for shares, rate in (((0.5, 0.5), 0.8), ((0.5, 0.5), 0.95), ((0.5, 0.5), 0.99), ((0.7, 0.3), 0.9)):
        name = f"F1, {shares[1]} positive, {rate} right"
        found.append(Line(name, metrics.F1, "f1", lambda s=shares, r=rate: labels(s, r), of_shares))
    found += [
        Line(f"{metric.name}, 0.3 positive, 0.9 right", metric, metric.name, lambda: labels((0.7, 0.3), 0.9), of_shares)
        for metric in (metrics.Precision, metrics.Recall)
    ]
    found.append(Line("exact match, 0.9", metrics.ExactMatch, "exact_match", as_texts, of_shares))
    found += [
        Line(f"mean loss, {kind}", metrics.MeanLoss, "loss", lambda k=kind: losses(k), of_means)
        for kind in ("exponential", "lognormal(1)", "90/10 mixture")
    ]
    found += [
        Line(f"{name.replace('_', ' ')} over tokens", metrics.BitsPerByte, name, token_losses, of_means)
        for name in ("loss", "perplexity", "bits_per_byte")
    ]
    found.append(Line("masked MSE", metrics.ReconstructionError, "masked_mse", errors, of_means))
    for rate in (0.6, 0.95):
        found.append(Line(f"answer F1, {rate} right", metrics.Squad, "f1", lambda r=rate: with_answers(r), of_shares))
    found += [
        Line(f"SQuAD 2 {name}", metrics.SquadV2, name, lambda: answers(0.8), of_shares)
        for name in ("exact", "f1", "HasAns_f1", "NoAns_exact")
    ]
    for rate in (0.9, 0.99):
        found.append(
            Line(
                f"token accuracy, {rate}", metrics.TokenAccuracy, "token_accuracy", lambda r=rate: tokens(r), of_shares
            )
        )
    for rate in (0.7, 0.95):
        found += [
            Line(f"entities, {name}, {rate} right", metrics.Entities, name, lambda r=rate: spans(r), of_shares)
            for name in ("precision", "recall", "f1")
        ]
    rare = "entities in every tenth sentence, f1, 0.9 right"
    found.append(Line(rare, metrics.Entities, "f1", lambda: spans(0.9, 0.9), of_shares))
    found += [
        Line(name, metrics.Retrieval, name, similarities, of_shares)
        for name in ("mrr", "ndcg@10", "recall@1", "recall@5")
    ]
    for rate in (0.8, 0.95):
        found += [
            Line(f"multi-label {name}, {rate} right", metrics.MultiLabel, name, lambda r=rate: many_labels(r), needed)
            for name, needed in (("f1_micro", of_shares), ("subset_accuracy", of_shares), ("f1_macro", of_resampled))
        ]
    for shares, rate in (
        ((0.5, 0.3, 0.2), 0.8),
        ((0.6, 0.3, 0.1), 0.9),
        ((0.8, 0.1, 0.1), 0.97),
        ((0.4, 0.3, 0.3), 0.97),
        ((0.5, 0.5), 0.99),
    ):
        name = f"{len(shares)} classes from {min(shares)}, {rate} right"
        draw = lambda s=shares, r=rate: labels(s, r)  # noqa: E731
        found.append(Line(f"macro F1, {name}", lambda: metrics.F1(average="macro"), "f1", draw, of_resampled))
        found.append(Line(f"MCC, {name}", metrics.MatthewsCorrelation, "matthews_correlation", draw, of_resampled))
    found += [
        Line(name.replace("_", " "), metrics.MeanIoU, name, pixels, needed)
        for name, needed in (
            ("mean_iou", of_resampled),
            ("mean_accuracy", of_resampled),
            ("overall_accuracy", of_shares),
        )
    ]
    found += [Line(f"ROUGE, {name}", metrics.Rouge, name, texts, of_shares) for name in ("rouge1", "rougeL")]
    found.append(Line("BLEU", metrics.Bleu, "bleu", texts, of_resampled))
    found.append(Line("chrF", metrics.ChrF, "chrf", texts, of_resampled))
    title = "over n groups of 1 to 6 equal rows"
    for name, metric, result in (("accuracy", metrics.Accuracy, "accuracy"), ("F1", metrics.F1, "f1")):
        found.append(Line(f"{name} {title}", metric, result, lambda: labels((0.5, 0.5), 0.9), of_shares, 6))
    found.append(Line(f"loss {title}", metrics.MeanLoss, "loss", lambda: losses("exponential"), of_resampled, 6))
    return found


# --------------------------------------------------------------------------------------------------------- simulation


class Coverage(NamedTuple):
    """Of one line and size: the share of intervals with the truth in them, their width, and how many were printed."""

    covered: float
    width: float
    printed: float
    ratio: float | None


def coverage(bounds: list[Any], truth: float, wilsons: list[float] | None = None) -> Coverage:
    found = [each for each in bounds if not isinstance(each, str)]
    if not found:
        return Coverage(math.nan, math.nan, 0.0, None)
    hits = sum(low <= truth <= high for low, high in found)
    width = float(np.mean([high - low for low, high in found]))
    ratio = width / float(np.mean(wilsons)) if wilsons else None
    return Coverage(hits / len(found), width, len(found) / len(bounds), ratio)


def simulate(line: Line, size: int, num_sets: int) -> Coverage:
    """Draw the data sets and count; every one is resampled with the draws that the product uses."""
    metric = line.metric()
    columns = metric.as_columns(line.population())
    metric.update(columns)
    counts = metric.count(columns).astype(np.float64)
    if line.largest_group > 1:
        counts *= np.random.default_rng(2).integers(1, line.largest_group + 1, (len(counts), 1))
    truth = float(metric.scores_of(np.rint(counts.sum(axis=0)).astype(np.int64))[line.result])
    random = np.random.default_rng([7, size])
    weights = np.concatenate([np.ones((size, 1)), poisson_weights(0, np.arange(size), REPLICATES)], axis=1).T
    is_grouped, bounds, wilsons = line.largest_group > 1, [], []
    for start in range(0, num_sets, BATCH):
        drawn = random.integers(0, len(counts), (min(BATCH, num_sets - start), size))
        sums = weights @ counts[drawn].transpose(1, 0, 2).reshape(size, -1)
        for each in np.rint(sums).astype(np.int64).reshape(len(weights), len(drawn), -1).transpose(1, 0, 2):
            bounds.append(metric.interval(Resampled(each[0], each[1:], size, is_grouped, LEVEL))[line.result])
            if line.result == "accuracy" and isinstance(metric, metrics.Accuracy) and not is_grouped:
                wilsons.append(wilson_width(each[0][0], size))
    return coverage(bounds, truth, wilsons)


def simulate_correlation(is_of_ranks: bool, truth: float, size: int, num_sets: int) -> Coverage:
    """Draw pairs from a normal distribution with this correlation."""
    random = np.random.default_rng([1, size])
    metric = metrics.SpearmanCorrelation if is_of_ranks else metrics.PearsonCorrelation
    expected = 6 / math.pi * math.asin(truth / 2) if is_of_ranks else truth
    bounds = []
    for _ in range(num_sets):
        first = random.normal(size=size)
        second = truth * first + math.sqrt(1 - truth**2) * random.normal(size=size)
        [value] = metric().compute(predictions=first, references=second).values()
        bounds.append(correlation(value, size, LEVEL, is_of_ranks=is_of_ranks))
    return coverage(bounds, expected)


def simulate_error(name: str, size: int, num_sets: int) -> Coverage:
    """Draw errors from a normal distribution."""
    random = np.random.default_rng([2, size])
    bounds = []
    for _ in range(num_sets):
        metric = metrics.load(name)
        metric.add_batch(predictions=random.normal(size=size), references=np.zeros(size))
        bounds.append(metric.own_interval(LEVEL)[name])
    return coverage(bounds, 1.0 if name == "mse" else math.sqrt(2 / math.pi))


def scenes(size: int = 300) -> tuple[list[Matches], int]:
    """Return the matches of images with up to four objects of three classes, and the number of images."""
    random = np.random.default_rng(1)
    metric = metrics.CocoAP()
    for position in range(size):
        count = random.integers(1, 5)
        corners = random.uniform(0, 60, (count, 2)) + 100 * np.arange(count)[:, None]
        boxes = np.concatenate([corners, corners + random.uniform(10, 40, (count, 2))], axis=1)
        classes = random.choice(3, count, p=(0.5, 0.3, 0.2))
        noise = random.exponential(1.5)
        shifted = np.concatenate([boxes + noise * random.normal(size=boxes.shape), random.uniform(0, 99, (1, 4))])
        shifted[-1, 2:] += shifted[-1, :2]
        guesses = np.append(np.where(random.random(count) < 0.85, classes, 0), random.integers(0, 3))
        scores = np.append(random.beta(5, 2, count), random.beta(2, 5))
        found = {"boxes": shifted, "classes": guesses, "scores": scores}
        metric.add_batch(predictions=[found], references=[{"boxes": boxes, "classes": classes}], positions=[position])
    _, _, overlaps = metric._evaluated("bbox")
    sides = [metric._state[position] for position in range(size)]
    return [Matches.of(sides, each, overlaps) for each in range(3)], size


def simulate_precision(result: str, size: int, num_sets: int) -> Coverage:
    """Draw images; a data set and its replicates only weigh the matches of the population."""
    matches, num_images = scenes()
    truth = float(resampled(matches, np.ones((1, num_images), dtype=np.int64))[result][0])
    random = np.random.default_rng([3, size])
    weights = poisson_weights(0, np.arange(size), REPLICATES).T.astype(np.float64)
    bounds: list[Any] = []
    for _ in range(num_sets):
        drawn = np.zeros((size, num_images))
        drawn[np.arange(size), random.integers(0, num_images, size)] = 1
        copies = drawn.sum(axis=0).astype(np.int64)
        counts = [int(copies @ each.num_references) for each in matches]
        sample = Resampled(copies, copies, size, False, LEVEL)
        few = sample.too_few(LEAST_ROWS, counts)
        if not few:
            value = float(resampled(matches, copies[None])[result][0])
            replicates = resampled(matches, (weights @ drawn).astype(np.int64))[result]
        bounds.append(few or sample.score(value, replicates, class_trials(counts)))
    return coverage(bounds, truth)


def wilson_width(hits: Any, size: int) -> float:
    """Return the width of Wilson's interval of a share."""
    z, share = 1.959964, hits / size
    return float(2 * z * math.sqrt(share * (1 - share) / size + z * z / (4 * size * size)) / (1 + z * z / size))


# -------------------------------------------------------------------------------------------------------------- table


class Row(NamedTuple):
    """A row of the table: its name, the simulation of a size, the coverage needed, and the most data sets."""

    name: str
    simulate: Callable[[int, int], Coverage]
    needed: Needed
    most: int = 2000


def table_rows() -> list[Row]:
    rows = [Row(line.name, lambda size, sets, each=line: simulate(each, size, sets), line.needed) for line in lines()]
    for is_of_ranks in (False, True):
        for truth in (0.0, 0.5, 0.9):
            name = f"{'Spearman' if is_of_ranks else 'Pearson'}, {truth}"
            run = lambda size, sets, r=is_of_ranks, t=truth: simulate_correlation(r, t, size, sets)  # noqa: E731
            rows.append(Row(name, run, of_shares))
    for name in ("mse", "mae"):
        rows.append(Row(name, lambda size, sets, n=name: simulate_error(n, size, sets), of_means))
    for name in ("map", "map_50", "mar_100"):
        rows.append(Row(name, lambda size, sets, n=name: simulate_precision(n, size, sets), of_resampled, 300))
    return rows


def cell(found: Coverage, needed: float) -> str:
    if found.printed == 0:
        return "none"
    is_missed = found.covered < needed and found.printed >= 0.05
    is_wide = found.ratio is not None and found.ratio > 1.3
    ratio = "" if found.ratio is None else f", {found.ratio:.2f} of Wilson's"
    printed = "" if found.printed > 0.999 else f", {found.printed:.0%} printed"
    return f"{found.covered:.1%} ({found.width:.3g}{ratio}{printed}){' MISSED' if is_missed or is_wide else ''}"


def run_cell(job: tuple[int, int, int]) -> tuple[int, int, str, float]:
    """Return the place of a cell, its text, and its CPU seconds; empty if a package is missing."""
    index, size, num_sets = job
    began = time.process_time()
    row = table_rows()[index]
    try:
        text = cell(row.simulate(size, min(num_sets, row.most)), row.needed(size))
    except InputError:
        text = ""
    return index, size, text, time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", type=int, default=2000, help="data sets of each cell; average precision draws 300")
    parser.add_argument("--only", default="", help="lines whose name contains this")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    rows = table_rows()
    chosen = [index for index, row in enumerate(rows) if options.only in row.name]
    jobs = [(index, size, options.sets) for size in reversed(SIZES) for index in reversed(chosen)]
    cells: dict[tuple[int, int], str] = {}
    seconds = 0.0
    with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
        for index, size, text, spent in pool.imap_unordered(run_cell, jobs):
            cells[index, size] = text
            seconds += spent
            print(f"{rows[index].name}, n = {size}: {text or 'skipped'} ({spent:.1f} s)", flush=True)
    lines = {
        rows[index].name: f"| {rows[index].name} | {' | '.join(cells[index, size] for size in SIZES)} |"
        for index in chosen
        if all(cells[index, size] for size in SIZES)
    }
    if options.output is not None:
        if options.output.exists():
            kept = [line for line in options.output.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
            lines = {line.split(" | ")[0].removeprefix("| "): line for line in kept[1:]} | lines
        names = [row.name for row in rows if row.name in lines]
        head = [
            "# Coverage of intervals",
            "",
            f"`python benchmarks/intervals.py --sets {options.sets}`: the share of 95 % intervals that contain the "
            'true value, and their mean width. "none": no interval is printed. MISSED: below the target. Average '
            "precision and recall (map, mar) draw at most 300 data sets, the others all.",
            "",
            f"| result | {' | '.join(f'n = {size}' for size in SIZES)} |",
            f"|---|{'---|' * len(SIZES)}",
        ]
        options.output.write_text("\n".join([*head, *(lines[name] for name in names)]) + "\n", encoding="utf-8")
    print(f"{sum('MISSED' in text for text in cells.values())} cells missed; {seconds:.0f} s of CPU time")


if __name__ == "__main__":
    main()
