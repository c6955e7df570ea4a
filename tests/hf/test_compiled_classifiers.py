"""Compiled classifiers of transformers, which set their problem type in the first forward pass."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.utils import counters

from loopwright.engine.compilation import compile_model
from loopwright.hf.model_setup import problem_type_of, settle_labels_before

from .tiny import SIZES, VOCABULARY, Classifier, bert, fit, losses


@pytest.fixture(autouse=True)
def _compiles_anew():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def albert(labels):
    """Return a tiny classifier of transformers whose own forward sets it, not its loss function."""
    from transformers import AlbertConfig, AlbertForSequenceClassification

    torch.manual_seed(0)
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout_prob": 0.0}
    config = AlbertConfig(vocab_size=VOCABULARY, num_labels=labels, embedding_size=8, **SIZES, **rates)
    return AlbertForSequenceClassification(config)


def trained(model, label, folder, **options):
    rows = [{"input_ids": [1 + number % 9] * 6, "labels": label(number)} for number in range(8)]
    return losses(fit(folder, model=model, data=rows, use_cpu=True, learning_rate=5e-5, **options))


@pytest.mark.parametrize(
    ("make", "label", "kind"),
    [
        (albert, lambda number: number % 3, "single_label_classification"),
        (bert, lambda number: [float(number % 2), 1.0, 0.0], "multi_label_classification"),
    ],
    ids=["by itself", "by its loss function"],
)
def test_a_classifier_is_compiled_once(make, label, kind, tmp_path):
    model = make(3)
    assert model.config.problem_type is None
    compiled = trained(model, label, tmp_path, torch_compile_backend="eager")
    assert counters["stats"]["unique_graphs"] == 1
    assert model.config.problem_type == kind
    assert compiled == trained(make(3), label, tmp_path) and len(compiled) == 2


@pytest.mark.parametrize("dtype", [torch.long, torch.int, torch.float, torch.half])
@pytest.mark.parametrize("num_labels", [1, 2])
def test_labels_have_the_problem_type_that_transformers_infers(num_labels, dtype):
    from transformers.loss.loss_utils import ForSequenceClassificationLoss

    config = SimpleNamespace(num_labels=num_labels, problem_type=None)
    is_class = num_labels > 1 and not dtype.is_floating_point
    labels = torch.zeros((4,) if is_class else (4, num_labels), dtype=dtype)
    with contextlib.suppress(RuntimeError):  # not every type of numbers has a loss
        ForSequenceClassificationLoss(labels, torch.zeros(4, num_labels), config)
    assert config.problem_type == problem_type_of(num_labels, labels)


def tagger():
    """Return a tiny model of transformers that does not read the problem type."""
    from transformers import BertConfig, BertForTokenClassification

    return BertForTokenClassification(BertConfig(vocab_size=VOCABULARY, **SIZES))


@pytest.mark.parametrize(
    "make", [tagger, Classifier, lambda: bert(3, problem_type="regression")], ids=["tagger", "own module", "given"]
)
def test_models_without_a_problem_type_to_set_are_not_patched(make):
    model = make()
    compile_model(model, backend="eager")
    compiled = model._compiled_call_impl
    settle_labels_before(model, model)
    assert model._compiled_call_impl is compiled
