"""Every metric of a task and of images: batches, order and processes change no bit; JSON states; intervals; errors."""

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
from tests.metrics.samples import batch_of, columns_of, create, objects

from loopwright import metrics
from loopwright.errors import ConfigError, DataError, InputError

KINDS = {**metrics.TASK_METRICS, **metrics.VISION_METRICS}
NAMES = list(KINDS)
COUNTED = [name for name in NAMES if name not in {"cosine_spearman", "confusion_matrix", "coco_ap", "ece", "auroc"}]
NUM_SAMPLES = 40


@pytest.fixture(scope="module")
def wholes():
    return {name: create(name).compute(**columns_of(name)) for name in NAMES}


@settings(max_examples=15)
@given(batch_size=st.integers(1, 13), num_processes=st.integers(1, 4), seed=st.integers(0, 10**6))
@pytest.mark.parametrize("name", NAMES)
def test_batches_order_and_processes_change_no_bit(wholes, name, batch_size, num_processes, seed):
    columns = columns_of(name)
    order = list(range(NUM_SAMPLES))
    random.Random(seed).shuffle(order)
    processes = [create(name) for _ in range(num_processes)]
    for index, start in enumerate(range(0, NUM_SAMPLES, batch_size)):
        processes[index % num_processes].add_batch(**batch_of(columns, order[start : start + batch_size]))
    merged = create(name)
    merged.load_state_dict(json.loads(json.dumps(processes[0].state_dict())))
    for other in processes[1:]:
        merged.merge(other)
    assert merged.num_samples == NUM_SAMPLES
    assert merged.compute() == wholes[name]


def test_every_metric_has_a_direction_and_results_that_json_keeps(wholes):
    lower = {name for name, kind in KINDS.items() if not kind.greater_is_better}
    assert lower == {"bits_per_byte", "ece", "reconstruction_error"}
    assert len(metrics.TASK_METRICS) == 14 and len(metrics.VISION_METRICS) == 4
    assert len({*metrics.METRICS, *NAMES}) == len(metrics.METRICS) + 18
    for name, result in wholes.items():
        types = {type(value) for value in result.values()}
        assert types <= ({list} if name == "confusion_matrix" else {float, int} if name == "squad_v2" else {float}), (
            name
        )
        assert json.loads(json.dumps(result)) == result


@pytest.mark.parametrize("name", COUNTED)
def test_intervals_hold_the_result_and_do_not_depend_on_batches_or_processes(name):
    columns = columns_of(name)
    intervals = []
    for batch_size, num_processes in ((NUM_SAMPLES, 1), (7, 3)):
        processes = [metrics.Bootstrap(create(name), replicates=40) for _ in range(num_processes)]
        for index, start in enumerate(range(0, NUM_SAMPLES, batch_size)):
            places = range(start, min(start + batch_size, NUM_SAMPLES))
            processes[-1 - index % num_processes].add_batch(**batch_of(columns, places), positions=places)
        metric = metrics.Bootstrap(create(name), replicates=40)
        for process in processes:
            sent = metrics.Bootstrap(create(name), replicates=40)
            sent.load_state_dict(json.loads(json.dumps(process.state_dict())))
            metric.merge(sent)
        intervals.append(metric.interval(0.99))
    assert intervals[0] == intervals[1]
    result = metric.compute()
    for key, (low, high) in intervals[0].items():
        assert low <= result[key] <= high and low < high, key


@pytest.mark.parametrize("name", COUNTED)
def test_the_sums_for_intervals_give_the_result(wholes, name):
    metric = create(name)
    counted = metric.count(metric.as_columns(columns_of(name)))
    for key, value in metric.score(counted.sum(axis=0), metric.options).items():
        assert float(value) == pytest.approx(wholes[name][key], rel=1e-8), key


@pytest.mark.parametrize("name", NAMES)
def test_no_samples_are_an_error_and_an_empty_batch_changes_nothing(wholes, name):
    metric, columns = create(name), columns_of(name)
    with pytest.raises(DataError, match=f"{name} has no samples"):
        metric.compute()
    metric.add_batch(**columns)
    metric.add_batch(**{side: values[:0] for side, values in columns.items()})
    metric.add_batch(**{side: [] for side in columns})
    assert metric.compute() == wholes[name]
    with pytest.raises(DataError, match=f"{name} has no samples"):
        metric.compute()


@pytest.mark.parametrize(
    "name", ["retrieval", "ece", "cosine_spearman", "multilabel", "bits_per_byte", "confusion_matrix"]
)
def test_tensors_arrays_and_lists_are_the_same(name):
    arrays = {side: np.asarray(values) for side, values in columns_of(name).items()}
    whole = metrics.load(name).compute(**arrays)
    assert metrics.load(name).compute(**{side: torch.tensor(each) for side, each in arrays.items()}) == whole
    assert metrics.load(name).compute(**{side: each.tolist() for side, each in arrays.items()}) == whole
    assert metrics.load(name).compute(**{side: [*torch.tensor(each)] for side, each in arrays.items()}) == whole


def test_metrics_of_texts_are_combined_and_options_after_the_samples_refused():
    both = metrics.combine(["exact_match", "sacrebleu", metrics.load("rouge", use_stemmer=True)])
    both.add_batch(predictions=["two dogs run", "a cat"], references=["two dogs ran", "a cat"])
    with pytest.raises(ConfigError, match="use_stemmer of rouge applies when samples are added: pass it to load"):
        both.compute(use_stemmer=False)
    result = both.compute()
    assert list(result) == ["exact_match", "bleu", "rouge1", "rouge2", "rougeL", "rougeLsum"]
    assert result["exact_match"] == 0.5 and result["rouge1"] == pytest.approx((2 / 3 + 1) / 2)
    metric = metrics.load("rouge")
    metric.add_batch(predictions=["dogs"], references=["dog"])
    with pytest.raises(ConfigError, match="use_stemmer of rouge applies when samples are added"):
        metric.compute(use_stemmer=True)
    assert metric.compute()["rouge1"] == 0.0
    assert metric.compute(predictions=["running"], references=["runs"], use_stemmer=True)["rouge1"] == 1.0
    with pytest.raises(ConfigError, match="ks of retrieval apply when queries are added"):
        metrics.load("retrieval").compute(predictions=[[1.0]], references=[0], ks=(1,))


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [
        ("entities", "nervaluate", "text"),
        ("rouge", "rouge-score", "text"),
        ("sacrebleu", "sacrebleu", "text"),
        ("chrf", "sacrebleu", "text"),
        ("coco_ap", "faster-coco-eval", "vision"),
    ],
)
def test_a_missing_package_is_named_with_its_install_command(monkeypatch, name, package, extra):
    monkeypatch.setitem(sys.modules, package.replace("-", "_"), None)
    with pytest.raises(InputError) as caught:
        metrics.load(name)
    error = caught.value
    assert (error.code, error.fix) == ("install.extra", f"pip install 'loopwright[{extra}]'")
    assert error.what == f"the metric '{name}' needs the package {package}"


def test_importing_metrics_and_baselines_imports_none_of_the_extras():
    names = ("torch", "nervaluate", "sacrebleu", "rouge_score", "nltk", "sklearn", "scipy")
    code = f"import sys, loopwright.metrics, loopwright.baselines; print([n for n in {names!r} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


def bad(expected, name, predictions=None, references=None, options=None, **others):
    """Return samples that a metric refuses, with a part of its error."""
    both = {} if predictions is None else {"predictions": predictions, "references": references}
    return pytest.param(name, options or {}, {**both, **others}, expected, id=f"{name}: {expected}")


EMPTY, BOX, IMAGES = objects([], [], []), [[0, 0, 1, 1]], np.zeros((1, 3, 4, 4))


@pytest.mark.parametrize(
    ("name", "options", "columns", "expected"),
    [
        bad("predictions must be texts, got 1", "squad", [1], ["a"]),
        bad("sample 0 of squad has no answer: use squad_v2", "squad", ["a"], [[]]),
        bad("must be the answers to a question, as texts", "squad", ["a"], [[1]]),
        bad("must be a list with one entry per sample, got 'a'", "squad", "a", ["a"]),
        bad("no_answer_scores must be numbers", "squad_v2", ["a"], ["a"], no_answer_scores=[math.nan]),
        bad("has 1 predictions and 2 references", "entities", [["O"]], [["O", "O"]]),
        bad("pass the list of tags", "entities", [[1]], [[1]]),
        bad("is a sequence of tags, got 'O'", "entities", ["O"], ["O"]),
        bad("index 1, but there are 1 labels", "entities", [[1]], [[0]], {"labels": ["O"]}),
        bad("take the argmax first", "token_accuracy", np.zeros((1, 3, 5)), np.zeros((1, 3))),
        bad("references must be texts, got []", "rouge", ["a"], [[]]),
        bad("predictions must be texts, got ['a']", "chrf", [["a"]], ["a"]),
        bad("indices into rows of 2 similarities, got 2", "retrieval", [[1.0, 2.0]], [2]),
        bad("must be one row of numbers per sample", "retrieval", [1.0], [0]),
        bad("references must be whole numbers", "retrieval", [[1.0]], [0.5]),
        bad("rows of different lengths", "retrieval", [[1.0], [1.0, 2.0]], [0, 0]),
        bad("the same shape, got (1, 1) and (1, 2)", "cosine_spearman", first=[[1]], second=[[1, 2]], scores=[1.0]),
        bad("num_bytes must be whole numbers", "bits_per_byte", sums=[1.0], counts=[1], num_bytes=[0.5]),
        bad("got 0.2: give threshold= for scores", "multilabel", [[0.2]], [[1]]),
        bad("must have 2 columns, got", "multilabel", [[1, 0]], [[1]]),
        bad("must have 1 columns", "multilabel", [[1, 0]], [[1, 0]], {"labels": ["a"]}),
        bad("must be labels, got 0.5", "confusion_matrix", [0.5], [1]),
        bad("are classes in rows of 2, got 2", "top_k_accuracy", [[1.0, 2.0]], [2]),
        bad("references must be whole numbers", "top_k_accuracy", [[1.0, 2.0]], [0.5]),
        bad("must be one row of numbers per sample", "top_k_accuracy", [1, 0], [1, 0]),
        bad("resize them, then take the argmax", "mean_iou", np.zeros((1, 3, 2, 2)), np.zeros((1, 2, 2))),
        bad("is the class of each pixel, got the type", "mean_iou", [[[0.5]]], [[[1]]]),
        bad("got the class 20, expected 0 to 1 or, for", "mean_iou", [[[0]]], [[[20]]], {"labels": ["a", "b"]}),
        bad("for pixels that do not count, 255", "mean_iou", [[[0]]], [[[20]]], {"labels": ["a", "b"]}),
        bad("got the class -100, expected 0 to", "mean_iou", [[[0]]], [[[-100]]]),
        bad("and a mask of shape (2, 2)", "reconstruction_error", IMAGES, IMAGES, masks=np.zeros((1, 2, 2))),
        bad("has the shape (3, 8, 8), images have (3, 4, 4)", "reconstruction_error", IMAGES, IMAGES,
            {"mean_image": np.zeros((3, 8, 8))}, masks=np.zeros((1, 4, 4))),
        bad("the prediction of image 0 lacks masks", "coco_ap", [EMPTY], [EMPTY], {"iou_types": "segm"}, positions=[0]),
        bad("the prediction of image 7 must have one of each per object", "coco_ap", [objects(BOX, [0], [])], [EMPTY],
            positions=[7]),
        bad("has boxes or scores that are not numbers", "coco_ap", [objects([[0, 0, 1, math.nan]], [0], [0.5])], [{}],
            positions=[7]),
        bad("the reference of image 7 has the classes [1], expected from 0 to 0", "coco_ap", [EMPTY],
            [objects(BOX, [1])], {"labels": ["cat"]}, positions=[7]),
        bad("positions must be whole numbers", "coco_ap", [EMPTY], [EMPTY], positions=["a"]),
    ],
)  # fmt: skip
def test_unusable_samples_are_refused_and_not_counted(name, options, columns, expected):
    metric = metrics.load(name, **options)
    with pytest.raises(ValueError) as caught:
        metric.add_batch(**columns)
    assert expected in str(caught.value)
    assert metric.num_samples == 0


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("sacrebleu", {"tokenize": "flores200"}, "tokenize='flores200' of sacrebleu is not known: use auto, 13a, intl"),
        ("sacrebleu", {"smooth_method": "x"}, "use exp, floor, add-k, none"),
        ("retrieval", {"ks": (0, 1)}, "ks of retrieval are whole numbers from 1"),
        ("rogue", {}, "did you mean 'rouge'?"),
        ("chrf", {"word_ordr": 2}, "its options are word_order, lowercase"),
        ("top_k_accuracy", {"ks": (0,)}, "ks of top_k_accuracy are whole numbers from 1"),
        ("coco_ap", {"iou_types": "boxes"}, "iou_types of coco_ap are bbox or segm, got 'boxes'"),
        ("mean_iuo", {}, "did you mean 'mean_iou'?"),
    ],
)
def test_unknown_names_and_options_are_refused(name, options, expected):
    with pytest.raises(ConfigError) as caught:
        metrics.load(name, **options)
    assert expected in str(caught.value)
