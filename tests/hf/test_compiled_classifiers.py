"""Compiled classifiers of transformers, which settle in their first forward what kind of labels they have."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from hf.tiny import VOCABULARY, Classifier, bert
from loopwright import hf
from loopwright.engine.compilation import compile_model
from loopwright.hf.classifiers import problem_type_of, settle_labels_before


@pytest.fixture(autouse=True)
def _compiles_anew() -> Any:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def albert(labels: int) -> Any:
    """Return a tiny classifier of transformers whose own forward settles it, not its loss function."""
    from transformers import AlbertConfig, AlbertForSequenceClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout_prob": 0.0}
    config = AlbertConfig(vocab_size=VOCABULARY, num_labels=labels, embedding_size=8, **sizes, **rates)
    return AlbertForSequenceClassification(config)


def trained(model: Any, label: Any, folder: Any, **options: Any) -> list[float]:
    """Train two updates and return their losses."""
    rows = [{"input_ids": [1 + number % 9] * 6, "labels": label(number)} for number in range(8)]
    settings = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True, "logging_steps": 1}
    arguments = hf.TrainingArguments(
        str(folder), per_device_train_batch_size=4, num_train_epochs=1, **settings, **options
    )
    trainer = hf.Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


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
    losses = trained(model, label, tmp_path, torch_compile_backend="eager")
    assert counters["stats"]["unique_graphs"] == 1
    assert model.config.problem_type == kind
    assert losses == trained(make(3), label, tmp_path) and len(losses) == 2


@pytest.mark.parametrize("dtype", [torch.long, torch.int, torch.float, torch.half])
@pytest.mark.parametrize("num_labels", [1, 2])
def test_labels_are_taken_for_what_transformers_takes_them_for(num_labels, dtype):
    from transformers.loss.loss_utils import ForSequenceClassificationLoss

    config = SimpleNamespace(num_labels=num_labels, problem_type=None)
    is_class = num_labels > 1 and not dtype.is_floating_point
    labels = torch.zeros((4,) if is_class else (4, num_labels), dtype=dtype)
    with contextlib.suppress(RuntimeError):  # not every type of numbers has a loss
        ForSequenceClassificationLoss(labels, torch.zeros(4, num_labels), config)
    assert config.problem_type == problem_type_of(num_labels, labels)


def tagger() -> Any:
    """Return a tiny model of transformers that does not look at what kind its labels are."""
    from transformers import BertConfig, BertForTokenClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return BertForTokenClassification(BertConfig(vocab_size=VOCABULARY, **sizes))


@pytest.mark.parametrize(
    "make", [tagger, Classifier, lambda: bert(3, problem_type="regression")], ids=["tagger", "own module", "given"]
)
def test_models_with_nothing_to_settle_are_called_as_they_are(make):
    model = make()
    compile_model(model, backend="eager")
    compiled = model._compiled_call_impl
    settle_labels_before(model, model)
    assert model._compiled_call_impl is compiled
