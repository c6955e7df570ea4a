"""Known complaints about transformers' Trainer, by their number in the list, and the right result here."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from loopwright.errors import DataError
from loopwright.hf import Trainer
from toys import seeded

from . import tiny
from .tiny import Classifier, assert_refused, fit, largest_difference, logged, losses, made, on, rows, weights


def one_update(folder, model, data, size, accumulation, **options):
    """Train one update over all data, and return its loss and the norm of its gradient."""
    options = {"train_sampling_strategy": "sequential", "optim": "sgd", "max_grad_norm": 0, **options}
    options |= {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation, "max_steps": 1}
    trainer = fit(folder, model=model, data=data, **options)
    return losses(trainer)[0], logged(trainer, "grad_norm")[0]


class OwnLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False):
        outputs = model(inputs["x"])
        loss = nn.functional.cross_entropy(outputs["logits"], inputs["labels"])
        return (loss, outputs) if return_outputs else loss


class SummedLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(inputs["x"])
        loss = nn.functional.cross_entropy(outputs["logits"], inputs["labels"], reduction="sum") / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


def summed(outputs, labels, num_items_in_batch=None):
    return nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch


LOSSES = {
    "model": {},
    "mean": {"kind": OwnLoss},
    "sum": {"kind": SummedLoss},
    "function": {"compute_loss_func": summed},
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("model", [Classifier, tiny.GreedyKeywords], ids=["plain", "kwargs"])
def test_1_accumulation_never_scales_loss_or_gradient(tmp_path, loss, model):
    def run(size, accumulation, **options):
        return one_update(tmp_path, seeded(model), rows(8), size, accumulation, **options)

    whole = run(8, 1, **LOSSES[loss])
    assert whole == pytest.approx(run(8, 1), rel=1e-6)
    for sizes in ((1, 8), (3, 3)):
        assert run(*sizes, **LOSSES[loss]) == pytest.approx(whole, rel=1e-5)


def token_mean(model, data):
    """Return the mean loss over all targets, computed by hand."""
    batch = {name: torch.stack([sample[name] for sample in data]) for name in ("input_ids", "attention_mask")}
    labels = torch.stack([sample["labels"] for sample in data])[:, 1:]
    with torch.no_grad():
        logits = model.eval()(**batch).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()


class OwnLanguageModel(nn.Module):
    """A plain module that shifts its labels, which nothing reveals."""

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


@pytest.mark.parametrize("make", [tiny.gpt2, tiny.llama, OwnLanguageModel])
def test_2_the_items_are_the_targets_that_the_loss_uses(tmp_path, make):
    data = tiny.token_rows(9)
    expected = token_mean(seeded(make), data)
    for size, accumulation in ((9, 1), (1, 9), (4, 3)):
        loss, _ = one_update(tmp_path, seeded(make), data, size, accumulation)
        assert loss == pytest.approx(expected, rel=1e-5)


def test_2_token_labels_that_are_not_shifted_are_all_counted(tmp_path):
    transformers = pytest.importorskip("transformers")
    config, data = tiny.bert().config, tiny.token_rows(9)
    whole, *others = (
        one_update(tmp_path, seeded(lambda: transformers.BertForMaskedLM(config)), data, *sizes)
        for sizes in ((9, 1), (1, 9), (4, 3))
    )
    for other in others:
        assert other == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("make", [tiny.llama, tiny.gpt2])
def test_3_the_evaluation_loss_does_not_depend_on_the_batch_size(tmp_path, make):
    data = tiny.token_rows(33)
    expected = token_mean(make(), data)
    for size in (1, 4, 8, 33):
        trainer = Trainer(make(), tiny.arguments(tmp_path, per_device_eval_batch_size=size))
        assert trainer.evaluate(data)["eval_loss"] == pytest.approx(expected, rel=1e-6)


def test_4_evaluation_keeps_nothing_without_metrics_and_joins_once(tmp_path, monkeypatch):
    from loopwright.hf import prediction

    kept, joins = [], []
    as_array, join = prediction.as_array, prediction._joined_arrays
    monkeypatch.setattr(prediction, "as_array", lambda tensor: (kept.append(tensor), as_array(tensor))[1])
    monkeypatch.setattr(prediction, "_joined_arrays", lambda *args: (joins.append(1), join(*args))[1])
    made(tmp_path).evaluate(rows(40))
    assert kept == []
    made(tmp_path, compute_metrics=lambda prediction: {}).evaluate(rows(40))
    assert len(kept) == 10 and len(joins) == 2  # five batches of predictions and labels, each joined at the end


def test_5_a_half_written_checkpoint_does_not_exist(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2}
    fit(tmp_path, **options)
    (tmp_path / "checkpoint-5" / "state.safetensors").unlink()
    (tmp_path / ".tmp-checkpoint-6-abc").mkdir()
    resumed = fit(tmp_path, **options, num_train_epochs=2, resume=True)
    whole = fit(tmp_path / "whole", num_train_epochs=2)
    # Only the steps: the rate falls over ten updates from the start here, and over five at first there.
    assert resumed.state.global_step == whole.state.global_step == 10
    assert not (tmp_path / ".tmp-checkpoint-6-abc").exists()


@pytest.mark.parametrize("workers", [0, 2])
def test_6_a_resume_in_the_middle_of_an_epoch_is_exact_with_random_data(tmp_path, workers):
    options = {"save_strategy": "steps", "save_steps": 3, "num_train_epochs": 2, "dataloader_num_workers": workers}
    whole, resumed = (
        fit(tmp_path, model=seeded(Classifier, dropout=0.3), data=tiny.NoisyRows(), resume=source, **options)
        for source in (None, str(tmp_path / "checkpoint-3"))
    )
    assert largest_difference(weights(whole), weights(resumed)) == 0


def test_10_the_loss_and_the_time_of_a_resumed_run_cover_all_of_it(tmp_path):
    def die(args, state, control, **kwargs):
        if state.global_step == 4:
            raise RuntimeError("the machine is gone")

    options = {"save_strategy": "steps", "save_steps": 2, "num_train_epochs": 2, "logging_steps": 3}
    whole = fit(tmp_path / "whole", **options).output
    assert_refused("gone", fit, tmp_path / "cut", on(step_begin=die), error=RuntimeError, **options)
    resumed = fit(tmp_path / "cut", resume=True, **options)
    output = resumed.output
    assert output.training_loss == whole.training_loss and output.global_step == whole.global_step
    before = json.loads((tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()[0])
    assert before["event"] == "start" and output.metrics["train_runtime"] > before["seconds"]
    assert [entry["step"] for entry in resumed.state.log_history] == [3, 6, 9, 10]


def test_11_changed_intervals_are_used_after_a_resume_and_reported(tmp_path, capsys):
    fit(tmp_path, save_strategy="steps", save_steps=4, logging_steps=4)
    options = {"save_strategy": "steps", "save_steps": 3, "logging_steps": 2, "num_train_epochs": 2}
    trainer = fit(tmp_path, resume=True, **options)
    assert "save_steps: 4 -> 3" in capsys.readouterr().out
    assert {*tiny.folders(tmp_path)} >= {"checkpoint-6", "checkpoint-9", "checkpoint-10"}
    assert logged(trainer, "step") == [4, 6, 8, 10]


def test_11_another_seed_is_reported_once_and_the_saved_one_used(tmp_path, capsys):
    options = {"save_strategy": "steps", "save_steps": 5}
    fit(tmp_path, **options)
    capsys.readouterr()
    fit(tmp_path, **options, num_train_epochs=2, seed=7, resume=True)
    reported = [line for line in capsys.readouterr().out.splitlines() if " seed" in line]
    assert reported == ["Resuming with the saved seed 42: it determines the order of samples"]


NAN_ROWS = rows(20)
NAN_ROWS[9] = {"x": torch.full((4,), math.nan), "labels": 0}


def test_12_a_non_finite_loss_ends_the_run_and_names_update_and_samples(tmp_path, capsys):
    options = {"save_strategy": "steps", "save_steps": 1, "train_sampling_strategy": "sequential"}
    trainer = fit(tmp_path, data=NAN_ROWS, **options)
    assert trainer.state.global_step == 3
    assert "the loss of update 3 is not finite (samples 8, 9, 10, 11)" in capsys.readouterr().out
    assert math.isnan(losses(trainer)[2]) and len(losses(trainer)) == 3
    assert not (tmp_path / "checkpoint-3").exists() and (tmp_path / "checkpoint-2").exists()
    # Found at the end of an epoch even if nothing is logged.
    trainer = fit(tmp_path / "silent", data=NAN_ROWS, logging_strategy="no", num_train_epochs=5)
    assert trainer.state.global_step == 5


def test_13_the_host_waits_for_losses_only_when_they_are_logged(tmp_path, monkeypatch):
    reads, before = [], []
    item, tolist = torch.Tensor.item, torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "item", lambda self: (reads.append("item"), item(self))[1])
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: (reads.append("list"), tolist(self))[1])

    counts = on(step_end=lambda *given, **kwargs: before.append(len(reads)))
    fit(tmp_path, counts, data=rows(40), logging_steps=5, max_steps=10)
    spent = np.diff(before)
    assert spent[4] > 0 and all(spent[index] == 0 for index in (0, 1, 2, 3, 5, 6, 7, 8))


def test_14_columns_are_not_dropped_before_a_transform_or_a_collator_and_the_model_gets_those_it_takes(tmp_path):
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"raw": [[1.0, 2.0, 3.0, 4.0]] * 8, "label": [0, 1] * 4})
    lazy = table.with_transform(lambda batch: {"x": torch.tensor(batch["raw"]), "labels": batch["label"]})
    assert fit(tmp_path, data=lazy).output.global_step == 2
    seen = []

    def collate(samples):
        seen.append((list(samples[0]), samples[0]["text"]))
        labels = torch.tensor([each["labels"] for each in samples])
        return {"x": torch.stack([each["x"] for each in samples]), "labels": labels}

    fit(tmp_path, data=[{**sample, "text": "abc", "weight": 2.0} for sample in rows(8)], data_collator=collate)
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

    doubled = fit(tmp_path, kind=Weighted, max_steps=1, data=data, eval_dataset=data).output
    plain = fit(tmp_path, max_steps=1, data=rows(8), eval_dataset=rows(8)).output
    assert doubled.training_loss == pytest.approx(2 * plain.training_loss, rel=1e-6)


def test_15_metrics_without_labels_or_outputs_are_refused_at_the_first_batch(tmp_path):
    class LossOnly(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False):
            return model(**inputs)["loss"]

    trainer, data = made(tmp_path, compute_metrics=lambda prediction: {"a": 1.0}), [{"x": torch.zeros(4)}] * 4
    assert_refused("no labels: a batch has x; labels are called labels", trainer.evaluate, data, error=DataError)
    assert trainer.predict(data).predictions.shape == (4, 3)
    assert made(tmp_path, kind=LossOnly).evaluate(rows(6))["eval_loss"] > 0
    trainer = made(tmp_path, kind=LossOnly, compute_metrics=lambda prediction: {})
    assert_refused("must return .loss, outputs.", trainer.evaluate, rows(6))


def test_15_labels_are_found_where_the_forward_does_not_show_them(tmp_path):
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Classifier()

        def forward(self, **batch):
            return self.inner(**batch)

    options = {"compute_metrics": lambda prediction: {"rows": len(prediction.label_ids)}}
    metrics = made(tmp_path, model=Hidden(), **options).evaluate(rows(6))
    assert metrics["eval_rows"] == 6 and metrics["eval_loss"] > 0
