"""Compiled classifiers of transformers, which set their problem type in the first forward pass."""

import pytest
import torch
from torch._dynamo.utils import counters

from .tiny import SIZES, VOCABULARY, bert, fit, losses


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
    rows = [{"input_ids": [1 + number % 9] * 6, "labels": label(number)} for number in range(12)]
    return losses(fit(folder, model=model, data=rows, use_cpu=True, learning_rate=5e-5, **options))


@pytest.mark.parametrize(
    ("make", "label", "kind"),
    [
        (albert, lambda number: number % 3, "single_label_classification"),
        (bert, lambda number: [float(number % 2), 1.0, 0.0], "multi_label_classification"),
    ],
    ids=["by itself", "by its loss function"],
)
def test_a_classifier_is_compiled_for_the_problem_that_it_finds_in_its_first_batch(make, label, kind, tmp_path):
    model = make(3)
    assert model.config.problem_type is None
    compiled = trained(model, label, tmp_path, torch_compile_backend="eager")
    assert counters["stats"]["unique_graphs"] == 2  # and once before it has found it
    assert model.config.problem_type == kind
    assert compiled == trained(make(3), label, tmp_path) and len(compiled) == 3
