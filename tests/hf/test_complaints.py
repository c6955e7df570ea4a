"""What people complain about in transformers' Trainer, by its number in the list, and the right result here."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest
import torch
from torch import nn

from loopwright.errors import ConfigError, DataError
from loopwright.hf import Trainer, TrainerCallback

from .tiny import (
    Classifier,
    GreedyKeywords,
    arguments,
    bert,
    gpt2,
    largest_difference,
    llama,
    losses,
    rows,
    token_rows,
    weights,
)


def one_update(folder, model, data, size, accumulation, kind=Trainer, **options):
    """Train one update over all data, and return its loss and the norm of its gradient."""
    options = {"train_sampling_strategy": "sequential", "optim": "sgd", "max_grad_norm": 0, **options}
    args = arguments(
        folder, per_device_train_batch_size=size, gradient_accumulation_steps=accumulation, max_steps=1, **options
    )
    trainer = kind(model, args, train_dataset=data)
    trainer.train()
    return trainer.state.log_history[0]["loss"], trainer.state.log_history[0]["grad_norm"]


def seeded(kind, **options):
    torch.manual_seed(0)
    return kind(**options)


class OwnLoss(Trainer):
    """Computes its loss as a plain mean."""

    def compute_loss(self, model, inputs, return_outputs=False):
        outputs = model(inputs["x"])
        loss = nn.functional.cross_entropy(outputs["logits"], inputs["labels"])
        return (loss, outputs) if return_outputs else loss


class SummedLoss(Trainer):
    """Computes its loss as a sum divided by what it is told."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(inputs["x"])
        loss = nn.functional.cross_entropy(outputs["logits"], inputs["labels"], reduction="sum") / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("kind", [Trainer, OwnLoss, SummedLoss], ids=["model", "mean", "sum"])
@pytest.mark.parametrize("model", [Classifier, GreedyKeywords], ids=["plain", "kwargs"])
def test_1_accumulation_never_scales_loss_or_gradient(tmp_path, kind, model):
    whole = one_update(tmp_path, seeded(model), rows(8), 8, 1, kind)
    parts = one_update(tmp_path, seeded(model), rows(8), 1, 8, kind)
    uneven = one_update(tmp_path, seeded(model), rows(8), 3, 3, kind)
    assert parts == pytest.approx(whole, rel=1e-5) and uneven == pytest.approx(whole, rel=1e-5)


def test_1_a_loss_function_may_divide_by_what_it_is_told(tmp_path):
    def summed(outputs, labels, num_items_in_batch=None):
        return nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch

    def run(size, accumulation):
        def make(model, args, train_dataset):
            return Trainer(model, args, train_dataset=train_dataset, compute_loss_func=summed)

        return one_update(tmp_path, seeded(Classifier), rows(8), size, accumulation, make)

    assert run(1, 8) == pytest.approx(run(8, 1), rel=1e-5)
    assert run(8, 1) == pytest.approx(one_update(tmp_path, seeded(Classifier), rows(8), 8, 1), rel=1e-6)


def token_mean(model, data):
    """Return the mean loss over all targets, computed by hand."""
    batch = {name: torch.stack([sample[name] for sample in data]) for name in ("input_ids", "attention_mask")}
    labels = torch.stack([sample["labels"] for sample in data])[:, 1:]
    with torch.no_grad():
        logits = model.eval()(**batch).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()


class OwnLanguageModel(nn.Module):
    """A plain module that shifts its labels, as nobody could know from outside."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 8)
        self.head = nn.Linear(8, 32)

    def forward(self, input_ids, attention_mask=None, labels=None, **kwargs):
        logits = self.head(self.embedding(input_ids))
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return type("Outputs", (dict,), {"logits": logits})({"loss": loss, "logits": logits})


@pytest.mark.parametrize("make", [gpt2, llama, OwnLanguageModel])
def test_2_the_items_are_the_targets_that_the_loss_uses(tmp_path, make):
    pytest.importorskip("transformers")
    data = token_rows(9)
    expected = token_mean(seeded(make), data)
    for size, accumulation in ((9, 1), (1, 9), (4, 3)):
        loss, _ = one_update(tmp_path, seeded(make), data, size, accumulation)
        assert loss == pytest.approx(expected, rel=1e-5)


def test_2_token_labels_that_are_not_shifted_are_all_counted(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = bert().config
    data = token_rows(9)

    def make():
        torch.manual_seed(0)
        return transformers.BertForMaskedLM(config)

    whole = one_update(tmp_path, make(), data, 9, 1)
    assert one_update(tmp_path, make(), data, 1, 9) == pytest.approx(whole, rel=1e-5)
    assert one_update(tmp_path, make(), data, 4, 3) == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("make", [llama, gpt2])
def test_3_the_evaluation_loss_does_not_depend_on_the_batch_size(tmp_path, make):
    pytest.importorskip("transformers")
    data = token_rows(33)
    expected = token_mean(make(), data)
    for size in (1, 4, 8, 33):
        trainer = Trainer(make(), arguments(tmp_path, per_device_eval_batch_size=size))
        assert trainer.evaluate(data)["eval_loss"] == pytest.approx(expected, rel=1e-6)


def test_4_evaluation_keeps_nothing_without_metrics_and_joins_once(tmp_path, monkeypatch):
    from loopwright.hf import prediction

    kept, joins = [], []
    as_array, join = prediction.as_array, prediction._joined_arrays
    monkeypatch.setattr(prediction, "as_array", lambda tensor: (kept.append(tensor), as_array(tensor))[1])
    monkeypatch.setattr(prediction, "_joined_arrays", lambda *args: (joins.append(1), join(*args))[1])
    Trainer(Classifier(), arguments(tmp_path)).evaluate(rows(40))
    assert kept == []
    Trainer(Classifier(), arguments(tmp_path), compute_metrics=lambda prediction: {}).evaluate(rows(40))
    assert len(kept) == 10 and len(joins) == 2  # five batches of predictions and labels, each joined at the end


def test_5_a_half_written_checkpoint_does_not_exist(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2}
    Trainer(seeded(Classifier), arguments(tmp_path, **options), train_dataset=rows(20)).train()
    (tmp_path / "checkpoint-5" / "state.safetensors").unlink()
    (tmp_path / ".tmp-checkpoint-6-abc").mkdir()
    resumed = Trainer(seeded(Classifier), arguments(tmp_path, **options, num_train_epochs=2), train_dataset=rows(20))
    resumed.train(resume_from_checkpoint=True)
    whole = Trainer(seeded(Classifier), arguments(tmp_path / "whole", num_train_epochs=2), train_dataset=rows(20))
    # The rate falls over ten updates from the start here, and over five at first there.
    assert resumed.state.global_step == whole.train().global_step == 10
    assert not (tmp_path / ".tmp-checkpoint-6-abc").exists()


class RandomRows(torch.utils.data.Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        row = rows(20)[index]
        return {"x": row["x"] + float(np.random.rand()) + random.random() + torch.rand(4), "labels": row["labels"]}


@pytest.mark.parametrize("workers", [0, 2])
def test_6_a_resume_in_the_middle_of_an_epoch_is_exact_with_random_data(tmp_path, workers):
    def trainer(folder):
        options = {"save_strategy": "steps", "save_steps": 3, "num_train_epochs": 2}
        args = arguments(tmp_path / folder, dataloader_num_workers=workers, **options)
        return Trainer(seeded(Classifier, dropout=0.3), args, train_dataset=RandomRows())

    whole = trainer("a")
    whole.train()
    resumed = trainer("a")
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    assert largest_difference(weights(whole), weights(resumed)) == 0


def test_10_the_loss_and_the_time_of_a_resumed_run_are_those_of_all_of_it(tmp_path):
    class Dies(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 4:
                raise RuntimeError("the machine is gone")

    def trainer(folder, *callbacks):
        options = {"save_strategy": "steps", "save_steps": 2, "num_train_epochs": 2, "logging_steps": 3}
        args = arguments(tmp_path / folder, **options)
        return Trainer(seeded(Classifier), args, train_dataset=rows(20), callbacks=list(callbacks))

    whole = trainer("whole").train()
    with pytest.raises(RuntimeError, match="gone"):
        trainer("cut", Dies()).train()
    resumed = trainer("cut")
    output = resumed.train(resume_from_checkpoint=True)
    assert output.training_loss == whole.training_loss and output.global_step == whole.global_step
    before = json.loads((tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()[0])
    assert before["event"] == "start" and output.metrics["train_runtime"] > before["seconds"]
    assert [entry["step"] for entry in resumed.state.log_history] == [3, 6, 9, 10]


def test_11_changed_intervals_hold_after_a_resume_and_are_told(tmp_path, capsys):
    args = arguments(tmp_path, save_strategy="steps", save_steps=4, logging_steps=4)
    Trainer(seeded(Classifier), args, train_dataset=rows(20)).train()
    args = arguments(tmp_path, save_strategy="steps", save_steps=3, logging_steps=2, num_train_epochs=2)
    trainer = Trainer(seeded(Classifier), args, train_dataset=rows(20))
    trainer.train(resume_from_checkpoint=True)
    assert "save_steps: 4 -> 3" in capsys.readouterr().out
    assert {path.name for path in tmp_path.glob("checkpoint-*")} >= {"checkpoint-6", "checkpoint-9", "checkpoint-10"}
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == [4, 6, 8, 10]


def test_11_of_another_seed_it_is_said_once_that_the_saved_one_holds(tmp_path, capsys):
    options = {"save_strategy": "steps", "save_steps": 5}
    Trainer(seeded(Classifier), arguments(tmp_path, **options), train_dataset=rows(20)).train()
    capsys.readouterr()
    args = arguments(tmp_path, **options, num_train_epochs=2, seed=7)
    Trainer(seeded(Classifier), args, train_dataset=rows(20)).train(resume_from_checkpoint=True)
    told = [line for line in capsys.readouterr().out.splitlines() if " seed" in line]
    assert told == ["Resuming with the saved seed 42: the order of samples follows from it"]


def test_12_a_loss_that_is_not_finite_ends_the_run_and_names_update_and_samples(tmp_path, capsys):
    data = rows(20)
    data[9] = {"x": torch.full((4,), math.nan), "labels": 0}
    args = arguments(tmp_path, save_strategy="steps", save_steps=1, train_sampling_strategy="sequential")
    trainer = Trainer(seeded(Classifier), args, train_dataset=data)
    trainer.train()
    assert trainer.state.global_step == 3
    assert "the loss of update 3 is not finite (samples 8, 9, 10, 11)" in capsys.readouterr().out
    assert math.isnan(losses(trainer)[2]) and len(losses(trainer)) == 3
    assert not (tmp_path / "checkpoint-3").exists() and (tmp_path / "checkpoint-2").exists()


def test_12_it_is_seen_at_the_end_of_an_epoch_even_if_nothing_is_logged(tmp_path):
    data = rows(20)
    data[9] = {"x": torch.full((4,), math.nan), "labels": 0}
    args = arguments(tmp_path, logging_strategy="no", num_train_epochs=5)
    trainer = Trainer(seeded(Classifier), args, train_dataset=data)
    trainer.train()
    assert trainer.state.global_step == 5


def test_13_the_host_waits_for_losses_only_when_they_are_logged(tmp_path, monkeypatch):
    reads = []
    item, tolist = torch.Tensor.item, torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "item", lambda self: (reads.append("item"), item(self))[1])
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: (reads.append("list"), tolist(self))[1])

    class Counts(TrainerCallback):
        before: list[int] = []

        def on_step_end(self, args, state, control, **kwargs):
            self.before.append(len(reads))

    args = arguments(tmp_path, logging_steps=5, max_steps=10)
    Trainer(Classifier(), args, train_dataset=rows(40), callbacks=[Counts()]).train()
    spent = np.diff(Counts.before)
    assert spent[4] > 0 and all(spent[index] == 0 for index in (0, 1, 2, 3, 5, 6, 7, 8))


def test_14_columns_are_never_dropped_before_a_transform(tmp_path):
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"raw": [[1.0, 2.0, 3.0, 4.0]] * 8, "label": [0, 1] * 4})
    lazy = table.with_transform(lambda batch: {"x": torch.tensor(batch["raw"]), "labels": batch["label"]})
    trainer = Trainer(Classifier(), arguments(tmp_path), train_dataset=lazy)
    assert trainer.train().global_step == 2


def test_14_the_collator_gets_what_it_asks_for_and_the_model_what_it_takes(tmp_path):
    data = [{**sample, "text": "abc", "weight": 2.0} for sample in rows(8)]
    seen = []

    def collate(samples):
        seen.append((list(samples[0]), samples[0]["text"]))
        return {
            "x": torch.stack([each["x"] for each in samples]),
            "labels": torch.tensor([e["labels"] for e in samples]),
        }

    Trainer(Classifier(), arguments(tmp_path), train_dataset=data, data_collator=collate).train()
    assert seen[0] == (["x", "labels"], "abc")


def test_14_an_overridden_loss_finds_every_column_and_the_model_is_given_its_own(tmp_path):
    data = [{**sample, "text": "abc", "idx": index, "weight": 2.0} for index, sample in enumerate(rows(8))]

    class Weighted(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            weight = inputs["weight"]
            assert "weight" in inputs and "weight" not in list(inputs)
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            each = nn.functional.cross_entropy(outputs["logits"], labels, reduction="none")
            loss = (each * weight).mean()
            return (loss, outputs) if return_outputs else loss

    doubled = Weighted(seeded(Classifier), arguments(tmp_path, max_steps=1), train_dataset=data, eval_dataset=data)
    plain = Trainer(seeded(Classifier), arguments(tmp_path, max_steps=1), train_dataset=rows(8), eval_dataset=rows(8))
    assert doubled.train().training_loss == pytest.approx(2 * plain.train().training_loss, rel=1e-6)


def test_14_nothing_left_for_the_model_shows_both_lists(tmp_path):
    trainer = Trainer(Classifier(), arguments(tmp_path), train_dataset=[{"sentence": "a", "label": 0}] * 4)
    with pytest.raises(DataError, match="sentence, label.*forward takes x, labels"):
        trainer.train()


def test_15_metrics_without_labels_are_refused_at_the_first_batch(tmp_path):
    trainer = Trainer(Classifier(), arguments(tmp_path), compute_metrics=lambda prediction: {"a": 1.0})
    with pytest.raises(DataError, match="no labels: a batch has x; labels are called labels"):
        trainer.evaluate([{"x": torch.zeros(4)}] * 4)
    assert trainer.predict([{"x": torch.zeros(4)}] * 4).predictions.shape == (4, 3)


def test_15_labels_are_found_where_the_forward_does_not_show_them(tmp_path):
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Classifier()

        def forward(self, **batch):
            return self.inner(**batch)

    trainer = Trainer(
        Hidden(), arguments(tmp_path), compute_metrics=lambda prediction: {"rows": len(prediction.label_ids)}
    )
    metrics = trainer.evaluate(rows(6))
    assert metrics["eval_rows"] == 6 and metrics["eval_loss"] > 0


def test_15_metrics_with_a_loss_that_returns_no_outputs_are_refused(tmp_path):
    class LossOnly(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False):
            return model(**inputs)["loss"]

    assert LossOnly(Classifier(), arguments(tmp_path)).evaluate(rows(6))["eval_loss"] > 0
    with pytest.raises(ConfigError, match="must return .loss, outputs."):
        LossOnly(Classifier(), arguments(tmp_path), compute_metrics=lambda prediction: {}).evaluate(rows(6))
