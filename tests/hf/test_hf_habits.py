"""Scripts as people write them for transformers: methods copied from it, and undocumented names."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

from loopwright.hf import ProgressCallback, Trainer, TrainerCallback, TrainingArguments

from .tiny import TOKENS, Classifier, bert, fit, largest_difference, losses, made, rows, same, weights


class Copied(Trainer):
    """The methods of transformers 5, as they are copied to be changed in one place."""

    def get_train_dataloader(self):
        collator = self._get_collator_with_removed_columns(self.data_collator, description="training")
        options = {"batch_size": self._train_batch_size, "collate_fn": collator, "sampler": self._get_train_sampler()}
        return self.accelerator.prepare(DataLoader(self.train_dataset, **options))

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        if (not self.model_accepts_loss_kwargs or num_items_in_batch is None) and self.compute_loss_func is None:
            loss = loss / self.current_gradient_accumulation_steps
        self.accelerator.backward(loss)
        return loss.detach()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels") if self.label_smoother is not None and "labels" in inputs else None
        outputs = model(**inputs)
        loss = outputs["loss"] if labels is None else self.label_smoother(outputs, labels)
        return (loss, outputs) if return_outputs else loss

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        inputs = self._prepare_input(inputs)
        with torch.no_grad(), self.autocast_smart_context_manager():
            outputs = model(**inputs)
        return outputs["loss"], None if prediction_loss_only else outputs["logits"], inputs["labels"]

    def save_model(self, output_dir=None, _internal_call=False):
        assert not self.is_deepspeed_enabled and not self.is_fsdp_enabled
        super().save_model(output_dir, _internal_call)


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2}, {"label_smoothing_factor": 0.2}],
    ids=["plain", "accumulated", "smoothed"],
)
def test_methods_copied_from_transformers_train_like_ours(tmp_path, options):
    data = [{**sample, "note": "text"} for sample in rows(20)]
    options = {**options, "eval_strategy": "epoch", "eval_dataset": rows(6), "data": data}
    copied, plain = fit(tmp_path, kind=Copied, **options), fit(tmp_path, **options)
    assert same(copied, plain)
    if "label_smoothing_factor" not in options:  # the copied prediction_step has the model's own loss
        assert copied.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]
    copied.save_model(tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_a_training_step_of_transformers_4_that_returns_its_share_logs_the_mean(tmp_path):
    class Share(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
            self.accelerator.backward(loss)
            return loss.detach() / self.args.gradient_accumulation_steps

    options = {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2}
    share, plain = fit(tmp_path, kind=Share, **options), fit(tmp_path, **options)
    assert losses(share) == pytest.approx(losses(plain), rel=1e-6)
    assert largest_difference(weights(share), weights(plain)) == 0


@pytest.mark.parametrize("divides", [True, False])
def test_a_training_step_that_divides_before_backward_has_the_same_gradients(divides, tmp_path):
    """Libraries do, since transformers 5 adds up what it is given; some only if there are no items."""

    class Divided(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
            if self.args.gradient_accumulation_steps > 1 and (divides or num_items_in_batch is None):
                loss = loss / self.args.gradient_accumulation_steps
            self.accelerator.backward(loss)
            return loss.detach()

    options = {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2}
    divided, plain = fit(tmp_path, kind=Divided, **options), fit(tmp_path, **options)
    assert losses(divided) == pytest.approx(losses(plain), rel=1e-6)
    assert largest_difference(weights(divided), weights(plain)) < 1e-6


def test_accelerate_does_not_shard_data_that_the_loop_shards(tmp_path):
    accelerator = made(tmp_path).accelerator
    first, second = DataLoader(rows(4)), DataLoader(rows(4))
    assert accelerator.prepare(first) is first and accelerator.prepare(first, second) == (first, second)
    loader, model = accelerator.prepare(first, Classifier())
    assert loader is first and isinstance(model, Classifier)


def test_columns_are_removed_from_a_dataset_of_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"x": [[1.0] * 4] * 4, "label": [0] * 4, "text": ["a"] * 4})
    assert made(tmp_path)._remove_unused_columns(data).column_names == ["x", "label"]
    keeps = made(tmp_path, remove_unused_columns=False)
    assert keeps._remove_unused_columns(data, description="training") is data


def test_an_optimizer_may_be_created_from_the_class_and_options_of_the_arguments(tmp_path):
    class Layered(Trainer):
        def create_optimizer(self):
            kind, options = Trainer.get_optimizer_cls_and_kwargs(self.args)
            self.optimizer = kind([{"params": list(self.model.parameters()), "weight_decay": 0.0}], **options)
            return self.optimizer

    class Named(Trainer):
        @staticmethod
        def get_optimizer_cls_and_kwargs(args, model=None):
            return torch.optim.SGD, {"lr": args.learning_rate}

    assert losses(fit(tmp_path, kind=Layered)) == losses(fit(tmp_path))
    assert isinstance(fit(tmp_path, kind=Named).optimizer, torch.optim.SGD)


def test_distillation_with_arguments_that_have_their_own_constructor(tmp_path):
    class DistillationArguments(TrainingArguments):
        def __init__(self, *args, alpha=0.5, **kwargs):
            super().__init__(*args, **kwargs)
            self.alpha = alpha

    class Distillation(Trainer):
        def __init__(self, *args, teacher=None, **kwargs):
            super().__init__(*args, **kwargs)
            self.teacher = teacher
            self._move_model_to_device(self.teacher, self.args.device)

        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            outputs, taught = model(**inputs), self.teacher(**inputs)
            loss = outputs["loss"] * self.args.alpha + nn.functional.mse_loss(outputs["logits"], taught["logits"])
            return (loss, outputs) if return_outputs else loss

    args = DistillationArguments(str(tmp_path), alpha=0.25, max_steps=2, save_strategy="no", disable_tqdm=True)
    trainer = Distillation(Classifier(), args, teacher=Classifier(), train_dataset=rows(8), eval_dataset=rows(4))
    assert trainer.train().global_step == 2 and "eval_loss" in trainer.evaluate() and args.alpha == 0.25


def test_an_overridden_save_is_what_save_model_calls(tmp_path, caplog):
    class Own(Trainer):
        def _save(self, output_dir=None, state_dict=None):
            super()._save(output_dir, {name: torch.ones_like(value) for name, value in self.model.state_dict().items()})

    made(tmp_path, kind=Own).save_model()
    assert all(bool((value == 1).all()) for value in load_file(tmp_path / "model.safetensors").values())
    assert "never calls" not in caplog.text


def test_an_overridden_evaluation_sampler_is_used(tmp_path):
    class Backwards(Trainer):
        def _get_eval_sampler(self, eval_dataset):
            return list(reversed(range(len(eval_dataset))))

    plain, own = (
        fit(tmp_path, kind=kind, per_device_eval_batch_size=3).predict(rows(7)) for kind in (Trainer, Backwards)
    )
    assert np.array_equal(own.label_ids, plain.label_ids[::-1])


def test_a_class_of_transformers_matches_our_callback_of_its_name(tmp_path):
    transformers = pytest.importorskip("transformers")
    trainer = made(tmp_path, disable_tqdm=False)
    trainer.remove_callback(transformers.ProgressCallback)
    assert not any(isinstance(each, ProgressCallback) for each in trainer.callback_handler.callbacks)

    assert trainer.pop_callback(type("DefaultFlowCallback", (TrainerCallback,), {})) is None


def test_labels_of_another_task_give_no_loss(tmp_path):
    class Span(Classifier):
        def forward(self, x, start_positions=None, end_positions=None, **kwargs):
            logits = self.linear(x)
            if start_positions is None:
                return {"start_logits": logits, "end_logits": logits}
            loss = sum(nn.functional.cross_entropy(logits, each) for each in (start_positions, end_positions))
            return {"loss": loss, "start_logits": logits, "end_logits": logits}

    trainer = made(tmp_path, model=Span())
    output = trainer.predict(rows(5))
    assert "test_loss" not in output.metrics and output.label_ids is None and len(output.predictions) == 2
    spans = [{"x": sample["x"], "start_positions": 1, "end_positions": 2} for sample in rows(5)]
    assert "test_loss" in trainer.predict(spans).metrics


def test_metrics_intervals_and_the_best_checkpoint_are_as_in_transformers(tmp_path, monkeypatch):
    options = {"eval_strategy": "epoch", "eval_dataset": rows(6), "logging_steps": 2}
    trainer = fit(tmp_path, compute_metrics=lambda _: {"accuracy": 1.0}, **options)
    assert list(trainer.evaluate())[:2] == ["eval_loss", "eval_accuracy"]
    assert (trainer.state.logging_steps, trainer.state.eval_steps, trainer.state.save_steps) == (2, 500, 500)
    monkeypatch.chdir(tmp_path)  # the best checkpoint is below the folder as the user wrote it
    assert fit("./run", load_best_model_at_end=True, **options).state.best_model_checkpoint == "./run/checkpoint-5"


def test_a_checkpoint_has_the_configuration_of_save_model(tmp_path):
    trainer = fit(tmp_path, model=bert(), data=TOKENS, save_strategy="epoch")
    trainer.save_model(tmp_path / "model")
    saved, whole = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("checkpoint-2", "model"))
    assert saved == whole
    assert saved["architectures"] == ["BertForSequenceClassification"]
    assert (saved["problem_type"], saved["dtype"]) == ("single_label_classification", "float32")
