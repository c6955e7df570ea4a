"""Simulate verdicts on equally good models, and on one that is better: how often is it called better?

    python benchmarks/verdicts.py [--trials 4000] [--jobs 2] [--write benchmarks/results/verdicts.md]

Every data set has rows of different difficulty. The baseline and all evaluations of a run are drawn independently for
each row, with the same chance of success: the harshest case for the best of many evaluations, since those of a real run
resemble each other. "0/1" are rows that are right or wrong, "skewed" have exponential losses, "F1" is macro-averaged
over four classes. Every verdict comes from `loopwright.metrics.paired.judge`, as that of a run does.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from loopwright import metrics
from loopwright.metrics.paired import RowKeeper, judge, rows_of

SIZES, PICKS, KINDS = (5, 10, 20, 50, 100, 200), (1, 3, 10, 30), ("0/1", "skewed", "F1")
MOST = 0.03


def draw(kind: str, size: int, count: int, gain: float, random: np.random.Generator) -> tuple[np.ndarray, list]:
    """Return the rows of a baseline, and those of `count` evaluations of a model that is better by `gain`."""
    chance = random.beta(2, 2, size) * (1 - gain)
    if kind == "0/1":
        return (random.random(size) < chance) * 1.0, list((random.random((count, size)) < chance + gain) * 1.0)
    if kind == "skewed":
        return -random.exponential(0.5 + chance), list(-random.exponential(0.5 + chance, (count, size)))
    truth = random.integers(0, 4, size)
    guesses = np.where(random.random((count + 1, size)) < chance, truth, random.integers(0, 4, (count + 1, size)))
    kept = []
    for guess in guesses:
        metric = metrics.load("f1", average="macro")
        keeper = RowKeeper(metric)
        keeper.add({"predictions": guess, "references": truth}, range(size))
        metric.add_batch(predictions=guess, references=truth)
        scores = keeper.scores()["f1"][2]  # before `compute`, which resets the metric
        kept.append((metric.compute()["f1"], scores))
    best = max(kept[1:], key=lambda each: each[0])
    return kept[0][1], [best[1]]


def cell(task: tuple[str, int, int, float, int]) -> float:
    """Return how often the best of some evaluations is called better than the baseline."""
    kind, size, picks, gain, trials = task
    random, num_better = np.random.default_rng([KINDS.index(kind), size, picks, int(100 * gain)]), 0
    for _ in range(trials):
        theirs, ours = draw(kind, size, picks, gain, random)
        best = max(ours, key=np.mean)
        found = judge(rows_of(best), rows_of(theirs), greater_is_better=True, num_picked=picks)
        num_better += found["kind"] == "better"
    return num_better / trials


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=4000)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--write", type=Path)
    asked = parser.parse_args()
    cells = [
        (kind, size, picks, 0.0, asked.trials if kind != "F1" else asked.trials // 4)
        for kind in KINDS
        for size in SIZES
        for picks in PICKS
    ]
    power = [("0/1", 200, picks, 0.1, asked.trials) for picks in PICKS]
    with ProcessPoolExecutor(asked.jobs) as pool:
        found = dict(zip([*cells, *power], pool.map(cell, [*cells, *power]), strict=True))
    lines = [f"`python benchmarks/verdicts.py --trials {asked.trials}`", ""]
    lines += ['Equally good models called "better", by the number of evaluations of which the best was picked:', ""]
    lines += [
        f"| scores | rows | {' | '.join(f'best of {picks}' for picks in PICKS)} |",
        f"|---|---|{'---|' * len(PICKS)}",
    ]
    for kind in KINDS:
        for size in SIZES:
            shares = [share for each, share in found.items() if each[:2] == (kind, size) and each[3] == 0]
            lines.append(f"| {kind} | {size} | {' | '.join(f'{100 * share:.1f} %' for share in shares)} |")
    worst = max(share for each, share in found.items() if each[3] == 0)
    lines += ["", f"At most {100 * worst:.1f} %. F1 has a quarter of the trials, and is not judged below 50 rows."]
    shown = ", ".join(f"{100 * found[each]:.0f} % (best of {each[2]})" for each in power)
    lines += [f"A model that is better by 10 points of accuracy on 200 rows is called so in {shown} of the cases."]
    text = "\n".join(lines) + "\n"
    sys.stdout.write(text)
    if asked.write is not None:
        asked.write.write_text(text, encoding="utf-8")
    return int(worst > MOST)


if __name__ == "__main__":
    sys.exit(main())
