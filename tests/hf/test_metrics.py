"""Metrics by name: scikit-learn's and scipy's numbers, closed forms, exact merging, and intervals."""

import itertools
import json
import math
import random
import re
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
import torch
from hypothesis import given
from hypothesis import strategies as st

import toys
from loopwright import metrics
from loopwright.errors import DataError
from loopwright.keys import key
from loopwright.metrics.bootstrap import poisson_weights
from loopwright.metrics.sums import ExactSum

from .tiny import assert_refused


def labels(num_samples, num_labels, seed=0):
    """Return references and predictions that agree more often than by chance."""
    draw = np.random.default_rng(seed)
    references = draw.integers(0, num_labels, num_samples)
    others = draw.integers(0, num_labels, num_samples)
    return references, np.where(draw.random(num_samples) < 0.6, references, others)


def numbers(num_samples, seed=0):
    draw = np.random.default_rng(seed)
    references = draw.normal(size=num_samples)
    return references, references + 0.5 * draw.normal(size=num_samples)


def computed(name, references, predictions, **options):
    return metrics.load(name, **options).compute(predictions=predictions, references=references)


@pytest.mark.parametrize("name", ["f1", "precision", "recall"])
def test_scores_are_the_same_as_in_scikit_learn(name):
    theirs = getattr(sklearn.metrics, f"{name}_score")
    averages = ["micro", "macro", "weighted"]
    for num_labels in (2, 3, 7):
        samples = labels(200, num_labels)
        for average, subset in itertools.product(averages, [None, [1, 0], [0, 9]]):
            options = {"average": average, "labels": subset}
            expected = theirs(*samples, **options, zero_division=0)
            assert computed(name, *samples, **options) == {name: float(expected)}, (num_labels, options)
        per_label = computed(name, *samples, average=None)[name]
        assert per_label.tolist() == theirs(*samples, average=None).tolist()
    for positive in (0, 1):
        samples = labels(50, 2)
        assert computed(name, *samples, pos_label=positive) == {name: theirs(*samples, pos_label=positive)}
    without_denominator = ([[0, 0], [0, 0]], [[0, 0], [1, 1]], [[1, 1], [0, 0]])
    for samples, average, otherwise in itertools.product(without_denominator, ["binary", *averages], (0, 1)):
        options = {"average": average, "labels": [1], "zero_division": otherwise}
        assert computed(name, *samples, **options) == {name: theirs(*samples, **options)}, (samples, options)


def test_matthews_correlation_and_errors_are_the_same_as_in_scikit_learn():
    for num_labels in (2, 5):
        samples = labels(100, num_labels)
        expected = pytest.approx(sklearn.metrics.matthews_corrcoef(*samples), rel=1e-15)
        assert computed("matthews_correlation", *samples) == {"matthews_correlation": expected}
    assert computed("matthews_correlation", [0, 1], [1, 1]) == {"matthews_correlation": 0.0}
    samples = numbers(300)
    mse, mae = sklearn.metrics.mean_squared_error(*samples), sklearn.metrics.mean_absolute_error(*samples)
    assert computed("mse", *samples)["mse"] == pytest.approx(mse, rel=1e-14)
    assert computed("mse", *samples, squared=False)["mse"] == pytest.approx(math.sqrt(mse), rel=1e-14)
    assert computed("mae", *samples)["mae"] == pytest.approx(mae, rel=1e-14)


def test_every_glue_task_has_its_keys_and_the_numbers_worked_out_by_hand():
    tasks = {
        "accuracy": ["sst2", "mnli", "mnli_matched", "mnli_mismatched", "qnli", "rte", "wnli", "hans"],
        "matthews_correlation": ["cola"],
        "accuracy f1": ["mrpc", "qqp"],
        "pearson spearmanr": ["stsb"],
    }
    keys_of = {name: keys.split() for keys, names in tasks.items() for name in names}
    assert sorted(keys_of) == sorted(metrics.GLUE) and len(keys_of) == 12
    for name, keys in keys_of.items():
        metric = metrics.load("glue", name)
        result = metric.compute(predictions=[0, 1, 1, 0], references=[0, 1, 0, 0])
        assert list(result) == keys and {type(value) for value in result.values()} == {float}
        assert metric.greater_is_better
    # 6 right positives, 3 right negatives, 1 wrong positive, 2 wrong negatives.
    predictions, references = [1] * 6 + [0] * 3 + [1] + [0] * 2, [1] * 6 + [0] * 3 + [0] + [1] * 2
    ours = metrics.load("glue", "cola").compute(predictions=predictions, references=references)
    assert ours["matthews_correlation"] == pytest.approx((6 * 3 - 1 * 2) / math.sqrt(7 * 8 * 4 * 5), rel=1e-15)
    metric = metrics.load("glue", "mrpc")
    # 2 right positives, 1 wrong one, 1 missed: F1 = 4 / (4 + 2).
    assert metric.compute(predictions=[1, 1, 1, 0, 0], references=[1, 1, 0, 1, 0]) == {"accuracy": 0.6, "f1": 4 / 6}


@pytest.mark.parametrize("decimals", [1, 8], ids=["with_ties", "without_ties"])
def test_correlations_are_the_same_as_in_scipy(decimals):
    references, predictions = (np.round(each, decimals) for each in numbers(500))
    given = {"predictions": predictions, "references": references}
    pearson = float(scipy.stats.pearsonr(predictions, references).statistic)
    spearman = float(scipy.stats.spearmanr(predictions, references).statistic)
    assert metrics.load("pearsonr").compute(**given) == {"pearsonr": pytest.approx(pearson, rel=1e-13)}
    assert metrics.load("spearmanr").compute(**given) == {"spearmanr": pytest.approx(spearman, rel=1e-13)}
    assert metrics.load("glue", "stsb").compute(**given) == {
        "pearson": pytest.approx(pearson, rel=1e-13),
        "spearmanr": pytest.approx(spearman, rel=1e-13),
    }


def test_correlations_are_exact_far_from_zero_and_nan_for_constants():
    x, y = np.asarray([0.0, 1.0, 2.0, 3.0]), np.asarray([1.0, 3.0, 2.0, 4.0])
    assert computed("pearsonr", y - 2.0**45, x + 2.0**40) == {"pearsonr": 0.8}
    assert computed("spearmanr", -y, x) == {"spearmanr": -0.8}
    for name in ["pearsonr", "spearmanr"]:
        for predictions in ([1.0, 1.0, 1.0], [1.0, math.nan, 2.0], [5.0]):
            assert math.isnan(computed(name, [1.0, 2.0, 3.0][: len(predictions)], predictions)[name])


def test_exact_match_ignores_case_punctuation_numbers_or_a_pattern():
    texts = {"predictions": ["The cat!", "dog 7", "a bird"], "references": ["the cat", "dog 8", "the bird"]}
    assert metrics.load("exact_match").compute(**texts) == {"exact_match": 0.0}
    metric = metrics.load("exact_match", ignore_case=True, ignore_punctuation=True)
    assert metric.compute(**texts) == {"exact_match": 1 / 3}
    assert metric.compute(**texts, ignore_numbers=True) == {"exact_match": 2 / 3}
    articles = metric.compute(**texts, ignore_numbers=True, regexes_to_ignore=[r"\b(a|the|The) "])
    assert articles == {"exact_match": 1.0}
    assert metric.compute(**texts) == {"exact_match": 1 / 3}
    metric.add_batch(**texts)
    text = "ignore_numbers of exact_match applies when samples are added"
    assert_refused(text, metric.compute, ignore_numbers=True)


def test_the_mean_loss_weights_samples_by_their_items():
    metric = metrics.load("perplexity")
    metric.add_batch(sums=[12.5, 40.25], counts=[5, 16])
    metric.add(sum=0.25, count=4)
    assert metric.compute() == {"loss": 53 / 25, "perplexity": math.exp(53 / 25)}
    assert metrics.load("loss").compute(sums=torch.tensor([1.0, 2.0]), counts=torch.tensor([1, 3])) == {"loss": 0.75}
    assert metrics.load("perplexity").compute(sums=[8000.0], counts=[1]) == {"loss": 8000.0, "perplexity": math.inf}
    assert math.isnan(metrics.load("loss").compute(sums=[1.0, math.nan], counts=[1, 1])["loss"])


def test_samples_come_as_lists_arrays_or_tensors_one_by_one_or_in_batches():
    metric = metrics.load("accuracy")
    metric.add(prediction=1, reference=1)
    metric.add(predictions=torch.tensor(1), references=np.int64(0))
    metric.add_batch(predictions=[0, 1], references=(0, 0))
    metric.add_batch(predictions=np.asarray([[2], [1]]), references=torch.tensor([2, 1], requires_grad=False))
    metric.add_batch(predictions=torch.tensor([1.0, 0.0], requires_grad=True), references=[True, False])
    metric.add_batch(predictions=[torch.tensor(3)], references=[torch.tensor(3)])
    metric.add_batch(predictions=torch.ones(1, dtype=torch.bfloat16), references=[1])
    metric.add_batch(predictions=[], references=[])
    assert metric.compute() == {"accuracy": 8 / 10}


def test_compute_starts_over_and_a_failed_one_keeps_only_earlier_samples():
    metric = metrics.load("f1")
    assert metric.compute(predictions=[1, 0], references=[1, 1]) == {"f1": 2 / 3}
    assert metric.compute(predictions=[1, 1], references=[1, 1]) == {"f1": 1.0}
    text = "f1 has no samples: pass predictions=, references= to add_batch"
    assert_refused(text, metric.compute, error=DataError)
    metric.add_batch(predictions=[1], references=[0])
    assert metric.compute(predictions=[1], references=[1]) == {"f1": 2 / 3}
    samples = {"predictions": [0, 1, 2], "references": [0, 1, 1]}
    assert_refused("is for two labels, but 3 occur", metric.compute, **samples)
    assert metric.num_samples == 0
    metric.add_batch(**samples)
    assert_refused("is for two labels", metric.compute)
    assert metric.compute(average="micro") == {"f1": 2 / 3}


def test_labels_may_be_texts():
    metric = metrics.load("f1", average=None)
    metric.add_batch(predictions=["dog", "cat"], references=["dog", "dog"])
    metric.add_batch(predictions=["ant", "cat"], references=["cat", "cat"])
    # In the order of the alphabet: ant 0 / 1, cat 2 / (2 + 2), dog 2 / (1 + 2).
    assert metric.compute()["f1"].tolist() == [0.0, 0.5, 2 / 3]
    by_name = metrics.load("recall", pos_label="yes")
    assert by_name.compute(predictions=["yes", "no"], references=["yes", "yes"]) == {"recall": 0.5}


def test_metrics_are_combined():
    metric = metrics.combine(["accuracy", metrics.Recall(average="macro")])
    metric.add_batch(predictions=[0, 1, 1], references=[0, 1, 0])
    assert metric.compute() == {"accuracy": 2 / 3, "recall": 0.75}
    metric.add_batch(predictions=[0, 1, 1], references=[0, 1, 0])
    assert metric.compute(average="binary") == {"accuracy": 2 / 3, "recall": 1.0}
    text = "none of accuracy, recall knows averages"
    assert_refused(text, metric.compute, predictions=[1], references=[1], averages="macro")
    assert_refused("cannot be combined", metrics.combine, ["accuracy", "loss"])


@pytest.mark.parametrize(
    ("name", "columns", "expected"),
    [
        ("accuracy", {"predictions": [1, 2], "references": [1]}, "got 2 predictions and 1 references"),
        ("accuracy", {"predictions": np.zeros((3, 2)), "references": [1, 1, 1]}, "take the argmax first"),
        ("f1", {"predictions": [0.3], "references": [1]}, "must be labels, got 0.3: turn scores into labels"),
        ("f1", {"predictions": ["a"], "references": [1]}, "both be texts, got 'a' and 1"),
        ("f1", {"predictions": [None], "references": [1]}, "must be whole numbers or texts"),
        ("accuracy", {"predictions": [[1], [1, 2]], "references": [1, 2]}, "got lists of different lengths"),
        ("accuracy", {"predictions": [1], "labels": [1]}, "takes predictions=, references=, got predictions=, labels="),
        ("mse", {"predictions": ["1"], "references": [1.0]}, "predictions must be numbers"),
        ("exact_match", {"predictions": [1], "references": ["1"]}, "must be texts, got 1: use accuracy"),
        ("loss", {"sums": [1.0], "counts": [0.5]}, "counts must be whole numbers"),
        ("loss", {"sums": 1.0, "counts": 1}, "sums must be a list with one value per sample, got 1.0"),
        ("accuracy", {"predictions": "cat", "references": "dog"}, "predictions must be a list with one value per sam"),
    ],
)
def test_unusable_samples_are_refused(name, columns, expected):
    metric = metrics.load(name)
    assert_refused(re.escape(expected), metric.add_batch, error=ValueError, **columns)
    assert metric.num_samples == 0


@pytest.mark.parametrize(
    ("arguments", "options", "expected"),
    [
        (["acuracy"], {}, "there is no metric 'acuracy': did you mean 'accuracy'?"),
        (["seqeval"], {}, "there is no metric 'seqeval': did you mean 'entities'?"),
        (["glue", "mrcp"], {}, "there is no GLUE task 'mrcp': did you mean 'mrpc'?"),
        (["glue"], {}, "needs a task as its second argument: sst2"),
        (["glue", "mrpc"], {"average": "macro"}, "have no options, got average"),
        (["accuracy", "multilabel"], {}, "has no configurations, got 'multilabel'"),
        (["accuracy"], {"average": "macro"}, "accuracy does not know average: it has no options"),
        (["f1"], {"averag": "macro"}, "its options are average, pos_label, labels, zero_division"),
        (["f1"], {"average": "samples"}, "average='samples' of f1 is not known: use one of 'binary', 'micro'"),
        (["f1"], {"zero_division": 0.5}, "zero_division of f1 is 0 or 1, got 0.5"),
    ],
)
def test_unknown_names_and_options_are_refused(arguments, options, expected):
    assert_refused(re.escape(expected), metrics.load, *arguments, **options)


def test_labels_of_mixed_kinds_and_a_positive_label_that_does_not_occur_are_refused():
    metric = metrics.load("f1", average="macro", labels=np.asarray([0, 1]))
    metric.add_batch(predictions=[1], references=[0])
    text = "must all be numbers or all be texts, got 'a' after others"
    assert_refused(text, metric.add_batch, predictions=["a"], references=["b"], error=DataError)
    assert metric.compute(predictions=[1], references=[1]) == {"f1": (2 / 3 + 0) / 2}

    text = "pos_label=1 of precision does not occur: the labels are 2 and 3"
    assert_refused(text, metrics.load("precision").compute, predictions=[2, 3], references=[3, 2])


def test_arguments_for_caches_change_nothing_each_metric_has_a_direction_and_none_imports_torch():
    assert computed("accuracy", [1], [1], cache_dir="somewhere", experiment_id="a") == {"accuracy": 1.0}
    lower = {name for name, kind in metrics.METRICS.items() if not kind().greater_is_better}
    assert lower == {"mse", "mae", "loss", "perplexity"}
    assert len(metrics.METRICS) == 13
    code = "import sys, loopwright.metrics; print([n for n in ('torch', 'sklearn', 'scipy') if n in sys.modules])"
    assert toys.python("-c", code).stdout == "[]\n"


def some_columns(name, num_samples=60):
    if name in {"loss", "perplexity"}:
        draw = np.random.default_rng(3)
        return {"sums": draw.exponential(20, num_samples), "counts": draw.integers(1, 30, num_samples)}
    if name == "exact_match":
        return {
            side: [f"text {each}" for each in values]
            for side, values in zip(("references", "predictions"), labels(num_samples, 4), strict=True)
        }
    is_regression = name in {"mse", "mae", "pearsonr", "spearmanr", "stsb"}
    references, predictions = numbers(num_samples) if is_regression else labels(num_samples, 2)
    return {"predictions": predictions, "references": references}


EVERY_METRIC = {name: partial(metrics.load, name) for name in metrics.METRICS}
EVERY_METRIC |= {name: partial(metrics.load, "glue", name) for name in metrics.GLUE}


@pytest.mark.parametrize("name", EVERY_METRIC)
def test_batches_order_and_processes_change_no_bit(name):
    assert len(EVERY_METRIC) == 25
    make, columns, order = EVERY_METRIC[name], some_columns(name), list(range(60))
    random.Random(1).shuffle(order)
    processes = [make() for _ in range(3)]
    for index, start in enumerate(range(0, 60, 7)):
        chosen = order[start : start + 7]
        processes[index % 3].add_batch(**{side: [values[each] for each in chosen] for side, values in columns.items()})
    # What another process has counted travels as JSON.
    merged = make()
    merged.load_state_dict(json.loads(json.dumps(processes[0].state_dict())))
    merged.merge(processes[1])
    merged.merge(processes[2])
    assert merged.num_samples == 60
    assert merged.compute() == make().compute(**columns)


def test_only_metrics_of_one_kind_are_merged_and_their_labels_may_have_different_orders():
    text = "only metrics of one kind and with the same options can be merged"
    assert_refused(text, metrics.F1().merge, metrics.F1(average="macro"))
    assert_refused("only metrics of one kind", metrics.Precision().merge, metrics.Recall())
    first, second = metrics.F1(average="macro"), metrics.F1(average="macro")
    first.add_batch(predictions=[5, 3], references=[5, 5])
    second.add_batch(predictions=[4, 3], references=[3, 3])
    first.merge(second)
    assert first.compute() == metrics.F1(average="macro").compute(predictions=[5, 3, 4, 3], references=[5, 5, 3, 3])


@given(st.lists(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=8), max_size=5))
def test_a_sum_is_exact(batches):
    total = ExactSum()
    for batch in batches:
        total.add(np.asarray(batch, dtype=np.float64))
    assert total.finite_part == sum((Fraction(each) for batch in batches for each in batch), Fraction(0))


def test_a_sum_of_non_finite_values_is_not_finite():
    for values, expected in (([1, math.inf], math.inf), ([-math.inf, 2], -math.inf), ([math.inf, -math.inf], math.nan)):
        total = ExactSum()
        total.add(np.asarray(values))
        assert not total.is_finite and total.mean(2) == pytest.approx(expected, nan_ok=True)


def test_the_draws_are_pinned_and_depend_on_position_and_seed_only():
    positions = np.asarray([7, 0, 12345])
    drawn = poisson_weights(3, positions, 6)
    assert drawn.shape == (3, 6)
    assert (drawn[:1] == poisson_weights(3, np.asarray([7]), 6)).all()
    assert (drawn[:, :4] == poisson_weights(3, positions, 4)).all()
    assert (drawn != poisson_weights(4, positions, 6)).any()
    # SplitMix64 of the sample's key, in plain Python; four draws of 16 bits from each number.
    bounds, cumulated = [], 0.0
    for number in range(10):
        cumulated += math.exp(-1) / math.factorial(number)
        bounds.append(math.floor(cumulated * 2**16))
    mask = 2**64 - 1
    for row, position in enumerate(positions.tolist()):
        for replicate in range(6):
            state = (key(3, "bootstrap", position) + (replicate // 4 + 1) * 0x9E3779B97F4A7C15) & mask
            state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
            state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
            share = (state ^ (state >> 31)) >> 16 * (replicate % 4) & 0xFFFF
            assert drawn[row, replicate] == sum(share >= bound for bound in bounds)


def test_the_draws_follow_the_poisson_distribution_of_mean_one():
    drawn = poisson_weights(0, np.arange(5000), 200)
    shares = np.bincount(drawn.reshape(-1), minlength=6)[:6] / drawn.size
    expected = [math.exp(-1) / math.factorial(number) for number in range(6)]
    # A million draws: three standard deviations are below 0.0015.
    assert shares == pytest.approx(expected, abs=0.0015)
    between = np.corrcoef(drawn.T)[np.triu_indices(200, 1)]
    assert abs(between.mean()) < 1e-3 and between.std() == pytest.approx(1 / math.sqrt(5000), rel=0.05)


def bootstrapped(metric, columns, batches, seed=0):
    bootstrap = metrics.Bootstrap(metric, seed=seed)
    for positions in batches:
        batch = {side: [values[each] for each in positions] for side, values in columns.items()}
        bootstrap.add_batch(**batch, positions=positions)
    return bootstrap


NAMES = ("accuracy", "f1", "exact_match", "loss", "perplexity", "matthews_correlation", "mrpc")
BOOTSTRAPPED = {name: EVERY_METRIC[name] for name in NAMES}
BOOTSTRAPPED["f1_macro"] = partial(metrics.load, "f1", average="macro")
BOOTSTRAPPED |= {
    "f1_macro": partial(metrics.load, "f1", average="macro"),
    "mrpc": partial(metrics.load, "glue", "mrpc"),
}


@pytest.mark.parametrize("name", BOOTSTRAPPED)
def test_an_interval_depends_on_no_batch_order_or_process(name):
    make, columns = BOOTSTRAPPED[name], some_columns(name)
    in_order = [list(range(60))]
    whole = bootstrapped(make(), columns, in_order)
    expected = whole.interval(0.9)
    shuffled = list(range(60))
    random.Random(2).shuffle(shuffled)
    first = bootstrapped(make(), columns, [shuffled[start : start + 7] for start in range(0, 35, 7)])
    second = bootstrapped(make(), columns, [[each] for each in shuffled[35:]])
    restored = metrics.Bootstrap(make())
    restored.load_state_dict(json.loads(json.dumps(first.state_dict())))
    restored.merge(second)
    assert restored.interval(0.9) == expected
    unnumbered = metrics.Bootstrap(make())
    unnumbered.add_batch(**columns)
    assert unnumbered.interval(0.9) == expected
    result = whole.compute()
    assert restored.compute() == result == make().compute(**columns)
    assert set(expected) == set(result)
    assert all(low < result[each] < high for each, (low, high) in expected.items())
    is_drawn = name in ("loss", "perplexity", "matthews_correlation", "f1_macro")
    assert (bootstrapped(make(), columns, in_order, seed=1).interval(0.9) != expected) == is_drawn


def test_each_replicate_is_the_metric_of_the_drawn_samples():
    class Recorded(metrics.F1):
        def interval(self, sample):
            self.replicates = self.scores_of(sample.replicates)["f1"]
            return {}

    columns = {side: np.asarray(each) for side, each in some_columns("f1_macro").items()}
    columns = {side: each + 3 * (np.arange(60) == 59) for side, each in columns.items()}  # A rare third label.
    bootstrap = bootstrapped(Recorded(average="macro"), columns, [range(60)])
    bootstrap.interval()
    expected = []
    for weights in poisson_weights(0, np.arange(60), 1000).T[:40]:
        drawn = (np.repeat(columns[side], weights) for side in ("references", "predictions"))
        expected.append(sklearn.metrics.f1_score(*drawn, average="macro"))
    assert bootstrap.metric.replicates[:40] == pytest.approx(expected, rel=1e-14)


def test_the_interval_of_an_accuracy_is_close_to_the_normal_one():
    references, predictions = labels(2000, 2)
    bootstrap = metrics.Bootstrap(metrics.load("accuracy"), replicates=1000)
    bootstrap.add_batch(predictions=predictions, references=references)
    low, high = bootstrap.interval(0.95)["accuracy"]
    accuracy = bootstrap.compute()["accuracy"]
    half = 1.96 * math.sqrt(accuracy * (1 - accuracy) / 2000)
    assert [low, high] == pytest.approx([accuracy - half, accuracy + half], abs=0.15 * half)


def test_what_has_no_honest_interval_says_what_it_would_take():
    bootstrap = metrics.Bootstrap(metrics.load("loss"))
    for values, reason in (
        ([1.0] * 49, "at least 50 samples are needed, there are 49"),
        ([1.0] * 99, "every sample has the same value"),
        ([0.5] * 60 + [math.nan], "it is undefined on this data"),
        ([math.inf] * 60, "it is undefined on this data"),
    ):
        bootstrap.add_batch(sums=values, counts=[1] * len(values))
        assert bootstrap.interval() == {} and bootstrap.interval().missing == {"loss": reason}
        bootstrap.compute()
    rare = metrics.Bootstrap(metrics.combine(["accuracy", metrics.F1(average="macro"), "matthews_correlation"]))
    for references, reason in (
        ([1, 0, 1, 1], "at least 50 samples are needed, there are 4"),
        ([0, 1] * 20, "at least 50 samples are needed, there are 40"),
        ([0] * 58 + [1, 1], "at least 5 samples of each class are needed, the rarest has 2: about 150 samples"),
    ):
        rare.add_batch(predictions=references, references=references)
        found = rare.interval()
        assert found.missing["f1"] == found.missing["matthews_correlation"] == reason
        assert ("accuracy" in found) == (len(references) > 4)
        rare.compute()
    rare.add_batch(predictions=[0] * 60, references=[0] * 60)
    found = rare.interval()
    assert set(found) == {"accuracy", "f1"} and "each class" in found.missing["matthews_correlation"]


def test_an_impossible_bootstrap_is_refused():
    bootstrap = metrics.Bootstrap(metrics.load("f1", average=None))
    samples = {"predictions": [1, 0], "references": [1, 1]}
    text = "there is no bootstrap of spearmanr"
    assert_refused(text, metrics.Bootstrap, metrics.load("glue", "stsb").parts[1])
    assert_refused("at least 2 replicates, got 1", metrics.Bootstrap, metrics.load("accuracy"), replicates=1)
    assert_refused("f1 has no samples", bootstrap.interval, error=DataError)
    text = "one whole number for each of the 2 samples"
    assert_refused(text, bootstrap.add_batch, **samples, positions=[0], error=DataError)
    bootstrap.add_batch(**samples)
    assert_refused("needs one number: choose an average", bootstrap.interval)
    assert_refused("between 0 and 1, got 95", bootstrap.interval, 95)
    other = metrics.Bootstrap(metrics.load("f1", average=None), seed=1)
    assert_refused("same seed and number of replicates", bootstrap.merge, other)
