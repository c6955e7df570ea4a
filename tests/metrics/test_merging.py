"""Every metric of a task: batches, order and processes change no bit; states are JSON; intervals; errors."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.metrics.samples import batch_of, columns_of

from loopwright import metrics
from loopwright.errors import ConfigError, DataError, InputError

NAMES = list(metrics.TASK_METRICS)
COUNTED = [name for name in NAMES if name not in {"cosine_spearman", "confusion_matrix"}]
NUM_SAMPLES = 40


@pytest.fixture(scope="module")
def wholes():
    return {name: metrics.load(name).compute(**columns_of(name)) for name in NAMES}


@settings(max_examples=15)
@given(batch_size=st.integers(1, 13), num_processes=st.integers(1, 4), seed=st.integers(0, 10**6))
@pytest.mark.parametrize("name", NAMES)
def test_batches_order_and_processes_change_no_bit(wholes, name, batch_size, num_processes, seed):
    columns = columns_of(name)
    order = list(range(NUM_SAMPLES))
    random.Random(seed).shuffle(order)
    processes = [metrics.load(name) for _ in range(num_processes)]
    for index, start in enumerate(range(0, NUM_SAMPLES, batch_size)):
        processes[index % num_processes].add_batch(**batch_of(columns, order[start : start + batch_size]))
    merged = metrics.load(name)
    merged.load_state_dict(json.loads(json.dumps(processes[0].state_dict())))
    for other in processes[1:]:
        merged.merge(other)
    assert merged.num_samples == NUM_SAMPLES
    assert merged.compute() == wholes[name]


def test_every_metric_says_which_way_is_better_and_tells_numbers():
    lower = {name for name, kind in metrics.TASK_METRICS.items() if not kind.greater_is_better}
    assert lower == {"bits_per_byte"}
    assert len(NAMES) == 12 and not set(NAMES) & set(metrics.METRICS)
    for name in NAMES:
        result = metrics.load(name).compute(**columns_of(name))
        kinds = {type(value) for value in result.values()}
        assert kinds <= ({list} if name == "confusion_matrix" else {float, int}), name
        assert json.loads(json.dumps(result)) == result


@pytest.mark.parametrize("name", COUNTED)
def test_intervals_hold_the_result_and_do_not_depend_on_batches_or_processes(name):
    columns = columns_of(name)
    intervals = []
    for batch_size, num_processes in ((NUM_SAMPLES, 1), (7, 3)):
        processes = [metrics.Bootstrap(metrics.load(name), replicates=40) for _ in range(num_processes)]
        for index, start in enumerate(range(0, NUM_SAMPLES, batch_size)):
            places = range(start, min(start + batch_size, NUM_SAMPLES))
            processes[-1 - index % num_processes].add_batch(**batch_of(columns, places), positions=places)
        metric = metrics.Bootstrap(metrics.load(name), replicates=40)
        for process in processes:
            sent = metrics.Bootstrap(metrics.load(name), replicates=40)
            sent.load_state_dict(json.loads(json.dumps(process.state_dict())))
            metric.merge(sent)
        intervals.append(metric.interval(0.99))
    assert intervals[0] == intervals[1]
    result = metric.compute()
    for key, (low, high) in intervals[0].items():
        assert low <= result[key] <= high and low < high, key


@pytest.mark.parametrize("name", COUNTED)
def test_the_sums_for_intervals_give_the_result(name):
    metric, columns = metrics.load(name), columns_of(name)
    counted = metric.count(metric.as_columns(columns))
    scores = metric.score(counted.sum(axis=0), metric.options)
    result = metrics.load(name).compute(**columns)
    for key, value in scores.items():
        assert float(value) == pytest.approx(result[key], rel=1e-8), key


@pytest.mark.parametrize("name", NAMES)
def test_no_samples_are_told_and_an_empty_batch_changes_nothing(name):
    metric = metrics.load(name)
    with pytest.raises(DataError, match=f"{name} has no samples"):
        metric.compute()
    columns = columns_of(name)
    whole = metrics.load(name).compute(**columns)
    metric.add_batch(**columns)
    metric.add_batch(**{side: values[:0] for side, values in columns.items()})
    metric.add_batch(**{side: [] for side in columns})
    assert metric.compute() == whole


@pytest.mark.parametrize("name", ["retrieval", "cosine_spearman", "multilabel", "bits_per_byte", "confusion_matrix"])
def test_tensors_arrays_and_lists_are_the_same(name):
    arrays = {side: np.asarray(values) for side, values in columns_of(name).items()}
    whole = metrics.load(name).compute(**arrays)
    assert metrics.load(name).compute(**{side: torch.tensor(each) for side, each in arrays.items()}) == whole
    assert metrics.load(name).compute(**{side: each.tolist() for side, each in arrays.items()}) == whole
    assert metrics.load(name).compute(**{side: [*torch.tensor(each)] for side, each in arrays.items()}) == whole


def test_metrics_of_texts_are_combined():
    both = metrics.combine(["exact_match", "sacrebleu", metrics.load("rouge", use_stemmer=True)])
    both.add_batch(predictions=["two dogs run", "a cat"], references=["two dogs ran", "a cat"])
    with pytest.raises(ConfigError, match="use_stemmer of rouge applies when samples are added: pass it to load"):
        both.compute(use_stemmer=False)
    result = both.compute()
    assert list(result) == ["exact_match", "bleu", "rouge1", "rouge2", "rougeL", "rougeLsum"]
    assert result["exact_match"] == 0.5 and result["rouge1"] == pytest.approx((2 / 3 + 1) / 2)


def test_options_that_come_after_the_samples_are_told():
    metric = metrics.load("rouge")
    metric.add_batch(predictions=["dogs"], references=["dog"])
    with pytest.raises(ConfigError, match="use_stemmer of rouge applies when samples are added"):
        metric.compute(use_stemmer=True)
    assert metric.compute()["rouge1"] == 0.0
    assert metric.compute(predictions=["running"], references=["runs"], use_stemmer=True)["rouge1"] == 1.0
    with pytest.raises(ConfigError, match="ks of retrieval apply when queries are added"):
        metrics.load("retrieval").compute(predictions=[[1.0]], references=[0], ks=(1,))


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [
        ("entities", "nervaluate", "nervaluate"),
        ("rouge", "rouge_score", "rouge-score"),
        ("sacrebleu", "sacrebleu", "sacrebleu"),
        ("chrf", "sacrebleu", "sacrebleu"),
    ],
)
def test_a_missing_package_is_told_with_the_line_that_installs_it(monkeypatch, name, module, package):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError) as caught:
        metrics.load(name)
    assert caught.value.code == "install.extra"
    assert caught.value.what == f"the metric '{name}' needs the package {package}"
    assert caught.value.fix == "pip install 'loopwright[text]'"


def test_importing_metrics_and_baselines_imports_none_of_the_extras():
    names = ("torch", "nervaluate", "sacrebleu", "rouge_score", "nltk", "sklearn", "scipy")
    code = f"import sys, loopwright.metrics, loopwright.baselines; print([n for n in {names!r} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("name", "options", "columns", "expected"),
    [
        ("squad", {}, {"predictions": [1], "references": ["a"]}, "predictions of squad must be texts, got 1"),
        ("squad", {}, {"predictions": ["a"], "references": [[]]}, "sample 0 of squad has no answer: use squad_v2"),
        ("squad", {}, {"predictions": ["a"], "references": [[1]]}, "must be the answers to a question, as texts"),
        ("squad", {}, {"predictions": "a", "references": ["a"]}, "must be a list with one entry per sample, got 'a'"),
        (
            "squad_v2",
            {},
            {"predictions": ["a"], "references": ["a"], "no_answer_scores": [math.nan]},
            "no_answer_scores must be numbers",
        ),
        ("entities", {}, {"predictions": [["O"]], "references": [["O", "O"]]}, "has 1 predictions and 2 references"),
        ("entities", {}, {"predictions": [[1]], "references": [[1]]}, "pass the list of tags"),
        ("entities", {}, {"predictions": ["O"], "references": ["O"]}, "is a sequence of tags, got 'O'"),
        ("entities", {"labels": ["O"]}, {"predictions": [[1]], "references": [[0]]}, "index 1, but there are 1 labels"),
        (
            "token_accuracy",
            {},
            {"predictions": np.zeros((1, 3, 5)), "references": np.zeros((1, 3))},
            "take the argmax first",
        ),
        ("rouge", {}, {"predictions": ["a"], "references": [[]]}, "references of rouge must be texts, got []"),
        ("chrf", {}, {"predictions": [["a"]], "references": ["a"]}, "predictions of chrf must be texts, got ['a']"),
        ("retrieval", {}, {"predictions": [[1.0, 2.0]], "references": [2]}, "into rows of 2 similarities, got 2"),
        ("retrieval", {}, {"predictions": [1.0], "references": [0]}, "must be one row of numbers per sample"),
        ("retrieval", {}, {"predictions": [[1.0]], "references": [0.5]}, "must be indices into the rows"),
        ("retrieval", {}, {"predictions": [[1.0], [1.0, 2.0]], "references": [0, 0]}, "rows of different lengths"),
        (
            "cosine_spearman",
            {},
            {"first": [[1.0]], "second": [[1.0, 2.0]], "scores": [1.0]},
            "must have the same shape, got (1, 1) and (1, 2)",
        ),
        ("bits_per_byte", {}, {"sums": [1.0], "counts": [1], "num_bytes": [0.5]}, "num_bytes must be whole numbers"),
        ("multilabel", {}, {"predictions": [[0.2]], "references": [[1]]}, "got 0.2: give threshold= for scores"),
        ("multilabel", {}, {"predictions": [[1, 0]], "references": [[1]]}, "must have 2 columns, got"),
        ("multilabel", {"labels": ["a"]}, {"predictions": [[1, 0]], "references": [[1, 0]]}, "must have 1 columns"),
        ("confusion_matrix", {}, {"predictions": [0.5], "references": [1]}, "must be labels, got 0.5"),
    ],
)
def test_samples_that_cannot_be_used_are_told(name, options, columns, expected):
    metric = metrics.load(name, **options)
    with pytest.raises(ValueError) as caught:
        metric.add_batch(**columns)
    assert expected in str(caught.value)
    assert metric.num_samples == 0


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("sacrebleu", {"tokenize": "flores200"}, "tokenize='flores200' of sacrebleu is not known: use 13a, intl"),
        ("sacrebleu", {"smooth_method": "x"}, "use exp, floor, add-k, none"),
        ("retrieval", {"ks": (0, 1)}, "ks of retrieval are whole numbers from 1"),
        ("rogue", {}, "did you mean 'rouge'?"),
        ("chrf", {"word_ordr": 2}, "its options are word_order, lowercase"),
    ],
)
def test_names_and_options_that_do_not_exist_are_told(name, options, expected):
    with pytest.raises(ConfigError) as caught:
        metrics.load(name, **options)
    assert expected in str(caught.value)
