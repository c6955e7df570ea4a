"""Tests of the comparison of two models on the same rows."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from loopwright import metrics
from loopwright.metrics.paired import RowKeeper, judge, rows_of, t_tail


def kept(metric, columns, order=None, groups=()):
    """Return the scores of the rows, kept in batches of 7 in some order, half of them on another process."""
    order = list(range(len(columns["references"]))) if order is None else order
    sides = [(metric(), []), (metric(), [])]
    keepers = [RowKeeper(side[0]) for side in sides]
    for number, start in enumerate(range(0, len(order), 7)):
        rows = order[start : start + 7]
        batch = {name: [values[row] for row in rows] for name, values in columns.items()}
        sides[number % 2][0].add_batch(**batch)
        keepers[number % 2].add(batch, rows, [groups[row] for row in rows] if len(groups) else ())
    keepers[0].merge(keepers[1].state_dict())
    return keepers[0].scores()


@pytest.mark.parametrize(("only_ours", "only_theirs"), [(0, 0), (5, 5), (9, 1), (1, 9), (40, 17), (300, 250)])
def test_right_and_wrong_are_compared_by_the_exact_binomial_test(only_ours, only_theirs):
    ours = [1] * only_ours + [0] * only_theirs + [1] * 20
    theirs = [0] * only_ours + [1] * only_theirs + [1] * 20
    found = judge(rows_of(ours), rows_of(theirs), greater_is_better=True, num_picked=2)
    is_more, trials = only_ours >= only_theirs, only_ours + only_theirs
    p = stats.binomtest(max(only_ours, only_theirs), max(trials, 1), alternative="greater").pvalue if trials else 1.0
    p = min(1.0, 2 * p) if is_more else p  # of the best of two
    assert found["p"] == pytest.approx(p) and (found["test"], found["rows"]) == ("mcnemar", len(ours))
    assert found["kind"] == ("indistinct" if p > 0.025 else "better" if is_more else "worse")


def test_other_scores_are_compared_by_swapping_rows_or_groups_of_rows():
    gains = np.asarray([0.9, 0.4, -0.2, 0.7, 0.3, -0.1, 0.8, 0.6, 0.25])
    signs = np.asarray(list(itertools.product([1, -1], repeat=len(gains))))
    p = np.mean(signs @ gains >= gains.sum() - 1e-9)
    found = judge(rows_of(gains), rows_of(0 * gains), greater_is_better=True)
    assert found["p"] == pytest.approx(p, abs=0.004) and found["test"] == "sign-flip" and found["kind"] == "better"
    opposite = judge(rows_of(gains), rows_of(0 * gains), greater_is_better=False, num_picked=9)
    assert (opposite["kind"], opposite["p"]) == ("worse", found["p"])
    grouped = rows_of(gains)
    grouped[1] = [0, 0, 0, 1, 1, 2, 2, 3, 3]
    assert judge(grouped, rows_of(0 * gains), greater_is_better=True) == {
        "kind": None, "p": None, "rows": 4, "unit": "group", "test": None}  # fmt: skip
    assert judge(rows_of(gains[:4]), rows_of(gains[:4]), greater_is_better=True)["kind"] is None


def test_scores_of_rows_average_to_the_metric_and_their_bits_do_not_depend_on_batches_order_or_processes():
    random = np.random.default_rng(0)
    labels, texts = (
        random.integers(0, 3, (2, 60)),
        [[f"a b c d e f {each}" for each in row] for row in random.integers(0, 3, (2, 60))],
    )
    cases = [
        (lambda: metrics.load("accuracy"), labels), (lambda: metrics.load("f1", average="macro"), labels),
        (lambda: metrics.load("sacrebleu"), texts), (lambda: metrics.load("rouge"), texts),
        (lambda: metrics.combine(["spearmanr", "mse"]), random.normal(size=(2, 60))),
    ]  # fmt: skip
    for create, (predictions, references) in cases:
        columns = {"predictions": list(predictions), "references": list(references)}
        found, order = kept(create, columns), random.permutation(60).tolist()
        again = kept(create, columns, order)
        for name, value in create().compute(**columns).items():
            assert found[name][2].mean() == pytest.approx(value, rel=0.05)
            worse = kept(create, {**columns, "predictions": [*predictions[::2], *predictions[1::2]]})[name]
            verdicts = [judge(each[name], worse, greater_is_better=True) for each in (found, again)]
            assert verdicts[0] == verdicts[1]
    few = {"predictions": [0, 1] * 10, "references": [1, 1] * 10}
    assert np.isnan(kept(lambda: metrics.load("f1"), few)["f1"][2]).all()  # below 50 rows


def test_equally_good_models_are_rarely_called_better_even_the_best_of_ten():
    random, num_better = np.random.default_rng(0), {"hits": 0, "scores": 0}
    for _ in range(300):
        rate = random.beta(2, 2, 20)
        runs = {"hits": (random.random((11, 20)) < rate) * 1.0, "scores": rate + random.gamma(1, 1, (11, 20))}
        for kind, (theirs, *ours) in runs.items():
            best = max(ours, key=np.mean)
            verdict = judge(rows_of(best), rows_of(theirs), greater_is_better=True, num_picked=10)
            num_better[kind] += verdict["kind"] == "better"
    assert max(num_better.values()) <= 0.03 * 300


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 9, 30])
@pytest.mark.parametrize("t", [0.0, 0.3, 2.0, 12.0, math.inf])
def test_the_tail_of_students_t_is_exact(t, freedom):
    assert t_tail(t, freedom) == pytest.approx(stats.t.sf(t, freedom), abs=1e-12)
