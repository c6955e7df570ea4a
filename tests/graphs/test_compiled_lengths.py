"""Compiled models whose inputs come in several lengths: how often they are compiled."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import toys
from hf import tiny
from loopwright import Trainer
from loopwright.data.buckets import with_buckets
from loopwright.data.collators import DataCollatorWithPadding
from loopwright.engine.compilation import compile_model

LENGTHS = (4, 8, 12, 16, 20, 24)


class Reader(nn.Module):
    """Reads tokens, with a position for each, and tells two classes apart."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.tokens = nn.Embedding(9, 6)
        self.positions = nn.Embedding(32, 6)
        self.layer = nn.Linear(6, 2)

    def forward(self, input_ids, attention_mask, labels):
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = (self.tokens(input_ids) + self.positions(places)) * attention_mask.unsqueeze(-1)
        logits = self.layer(hidden.sum(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.fixture(autouse=True)
def compile_counts():
    torch._dynamo.reset()
    counters.clear()
    yield counters["stats"]
    torch._dynamo.reset()


def samples(batch_size=4):
    rows = [length for length in LENGTHS for _ in range(batch_size)]
    return [{"input_ids": [1 + number % 8] * (length - 1), "labels": number % 2} for number, length in enumerate(rows)]


def collator():
    return with_buckets(DataCollatorWithPadding(toys.Pads()), LENGTHS)


def test_one_compilation_serves_all_lengths_that_a_collator_pads_to_and_a_short_batch():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    model, plain, collate = Reader(), Reader(), collator()
    compile_model(model, collate, backend=backend)
    rows = samples()
    for start in range(0, len(rows), 4):
        batch = collate(rows[start : start + 4])
        assert batch["input_ids"].shape == (4, LENGTHS[start // 4])
        assert torch.equal(model(**batch)["logits"], plain(**batch)["logits"])
    model(**collate(rows[:2]))
    assert len(compiled) == 1


def test_a_run_with_bucket_lengths_compiles_its_model_at_most_twice(tmp_path, compile_counts):
    def losses(**options):
        options |= {
            "length_buckets": list(LENGTHS),
            "data_collator": DataCollatorWithPadding(toys.Pads()),
            "use_cpu": True,
        }
        options |= {"num_train_epochs": 2, "learning_rate": 5e-5, "report_to": "none"}
        return tiny.losses(tiny.fit(tmp_path, model=Reader(), data=samples(), **options))

    compiled = losses(torch_compile_backend="eager")
    assert 1 <= compile_counts["unique_graphs"] <= 2
    assert compiled == losses() and len(compiled) == 12


def test_a_model_is_as_it_was_when_a_run_that_compiled_it_is_over(monkeypatch):
    class Named(Trainer):
        def calculate_train_batch_loss(self, batch):
            return {"loss": self.model(**batch)["loss"], "batch_size": len(batch["labels"])}

    used = []
    compile_here = torch.nn.Module.compile

    def compile_with_eager(model, **options):
        used.append(model)
        compile_here(model, backend="eager")

    monkeypatch.setattr(torch.nn.Module, "compile", compile_with_eager)
    model = Reader()
    trainer = Named(model, None, torch.optim.SGD(model.parameters(), lr=0.1), callbacks=[])
    trainer.train(samples(), num_epochs=1, per_device_batch_size=4, collate_fn=collator(), step_mode="compile")
    assert used == [model] and counters["stats"]["unique_graphs"] <= 2
    assert model._compiled_call_impl is None
