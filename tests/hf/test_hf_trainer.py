"""What the trainer does beyond the mainstream: override points, evaluation's options, bad input, import."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from loopwright.errors import BatchLossError, ConfigError, DataError
from loopwright.hf import (
    EvalPrediction,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from loopwright.run_folder.lease import LeaseError

from .tiny import Classifier, arguments, bert, largest_difference, losses, rows, t5, weights


def made(folder, kind=Trainer, model=None, data=None, eval_data=None, **options):
    names = ("compute_metrics", "callbacks", "data_collator", "compute_loss_func", "optimizer_cls_and_kwargs")
    given = {name: options.pop(name) for name in names if name in options}
    torch.manual_seed(0)
    model = Classifier() if model is None else model
    args = arguments(folder, **options)
    return kind(model, args, train_dataset=rows(20) if data is None else data, eval_dataset=eval_data, **given)


def fit(folder, **options):
    trainer = made(folder, **options)
    trainer.train()
    return trainer


def test_a_training_step_of_ones_own_with_the_old_signature(tmp_path):
    class Own(Trainer):
        def training_step(self, model, inputs):
            model.train()
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
            self.accelerator.backward(loss)
            return loss.detach()

    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    own, plain = fit(tmp_path, kind=Own, **options), fit(tmp_path, **options)
    assert losses(own) == losses(plain) and largest_difference(weights(own), weights(plain)) == 0


def test_a_bare_backward_is_fine_alone_and_refused_in_a_window(tmp_path):
    class Bare(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = self.compute_loss(model, inputs)
            loss.backward()
            return loss.detach()

    assert losses(fit(tmp_path, kind=Bare)) == losses(fit(tmp_path))
    with pytest.raises(BatchLossError, match="accelerator.backward"):
        fit(tmp_path, kind=Bare, gradient_accumulation_steps=2)


def test_a_loss_of_one_number_may_have_a_dimension_and_one_of_several_is_told(tmp_path):
    class InABox(Classifier):
        def forward(self, x, labels=None):
            outputs = super().forward(x, labels)
            return {**outputs, "loss": outputs["loss"].reshape(1)} if labels is not None else outputs

    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    torch.manual_seed(0)
    boxed, plain = fit(tmp_path, model=InABox(), **options), fit(tmp_path, **options)
    assert losses(boxed) == losses(plain) and largest_difference(weights(boxed), weights(plain)) == 0

    class Several(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            return super().training_step(model, inputs, num_items_in_batch).repeat(2)

    with pytest.raises(BatchLossError, match=r"training_step returned a loss of shape \(2,\)"):
        fit(tmp_path, kind=Several)


def test_two_losses_may_go_backward_in_one_step(tmp_path):
    class Twice(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            first = self.compute_loss(model, inputs)
            self.accelerator.backward(first)
            second = self.compute_loss(model, inputs)
            self.accelerator.backward(second)
            return first.detach()

    class Doubled(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = self.compute_loss(model, inputs)
            self.accelerator.backward(2 * loss)
            return loss.detach()

    options = {"gradient_accumulation_steps": 2, "optim": "sgd", "max_grad_norm": 0}
    twice, doubled = fit(tmp_path, kind=Twice, **options), fit(tmp_path, kind=Doubled, **options)
    assert largest_difference(weights(twice), weights(doubled)) < 1e-6 and losses(twice) == losses(doubled)


def test_a_prediction_step_and_an_evaluation_loop_of_ones_own(tmp_path):
    class Own(Trainer):
        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            loss, logits, labels = super().prediction_step(model, inputs, False, ignore_keys)
            return loss * 2, logits.argmax(-1), labels

        def evaluation_loop(self, dataloader, description, **kwargs):
            output = super().evaluation_loop(dataloader, description, **kwargs)
            return output._replace(metrics={**output.metrics, "eval_extra": 1.0})

    kind = made(tmp_path, kind=Own, compute_metrics=lambda prediction: {"dims": prediction.predictions.ndim})
    metrics, plain = kind.evaluate(rows(6)), made(tmp_path).evaluate(rows(6))
    assert metrics["eval_loss"] == pytest.approx(2 * plain["eval_loss"]) and metrics["eval_dims"] == 1
    assert metrics["eval_extra"] == 1.0


def test_an_evaluation_loop_by_hand_over_the_raw_loader(tmp_path):
    class Own(Trainer):
        def evaluation_loop(self, dataloader, description, prediction_loss_only=None, ignore_keys=None, **kwargs):
            self.model.eval()
            total = sum(float(self.prediction_step(self.model_wrapped, batch, True)[0]) for batch in dataloader)
            return super().evaluation_loop(dataloader, description)._replace(metrics={"eval_total": total})

    trainer = fit(tmp_path, kind=Own, eval_data=rows(8), eval_strategy="epoch", num_train_epochs=2)
    assert trainer.evaluate()["eval_total"] > 0 and losses(trainer) == losses(fit(tmp_path, num_train_epochs=2))


def test_metrics_batch_by_batch(tmp_path):
    calls = []

    def compute_metrics(prediction, compute_result):
        calls.append((len(prediction.predictions), compute_result))
        return {"batches": float(len(calls))} if compute_result else {}

    trainer = made(tmp_path, compute_metrics=compute_metrics, batch_eval_metrics=True)
    trainer.args.per_device_eval_batch_size = 4
    assert trainer.evaluate(rows(10))["eval_batches"] == 3
    assert calls == [(4, False), (4, False), (2, True)]


def test_metrics_may_see_inputs_and_losses(tmp_path):
    seen = {}

    def compute_metrics(prediction):
        seen.update(inputs=prediction.inputs, losses=prediction.losses, parts=len(list(prediction)))
        return {}

    class Named(Classifier):
        main_input_name = "x"

    options = {"include_for_metrics": ["inputs", "loss"], "per_device_eval_batch_size": 4}
    metrics = made(tmp_path, model=Named(), compute_metrics=compute_metrics, **options).evaluate(rows(6))
    assert np.array_equal(seen["inputs"], torch.stack([sample["x"] for sample in rows(6)]).numpy())
    assert seen["parts"] == 4 and seen["losses"].shape == (6,)
    assert seen["losses"].mean() == pytest.approx(metrics["eval_loss"], rel=1e-5)


def test_batches_may_stay_apart(tmp_path):
    output = made(tmp_path, eval_do_concat_batches=False, per_device_eval_batch_size=4).predict(rows(6))
    assert [batch.shape for batch in output.predictions] == [(4, 3), (2, 3)]


def test_several_outputs_are_padded_each_for_itself(tmp_path):
    class Several(Classifier):
        def forward(self, x, labels=None):
            outputs = super().forward(x, labels)
            return {**outputs, "hidden": outputs["logits"][:, None, :].repeat(1, len(x), 1), "past": None}

    trainer = made(tmp_path, model=Several(), per_device_eval_batch_size=4)
    logits, hidden = trainer.predict(rows(6), ignore_keys=["past"]).predictions
    assert logits.shape == (6, 3) and hidden.shape == (6, 4, 3) and (hidden[4:, 2:] == -100).all()


def test_a_prediction_unpacks_into_two():
    predictions, labels = EvalPrediction(np.zeros(2), np.ones(2))
    assert labels.sum() == 2 and EvalPrediction(predictions, labels)[1] is labels


def test_a_class_of_optimizers_or_a_factory(tmp_path):
    trainer = made(tmp_path, optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.5}))
    assert trainer.create_optimizer().param_groups[0]["lr"] == 0.5
    factory = (lambda model, lr: torch.optim.SGD(model.parameters(), lr=lr), {"lr": 0.25})
    assert fit(tmp_path, optimizer_cls_and_kwargs=factory).optimizer.param_groups[0]["lr"] < 0.25


def test_training_twice_goes_on_with_the_weights_and_a_new_schedule(tmp_path):
    trainer = fit(tmp_path)
    first = weights(trainer)
    trainer.train()
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    assert rates[0] == 1e-2 and largest_difference(first, weights(trainer)) > 0


def test_an_evaluation_before_during_and_after_leaves_the_run_as_it_is(tmp_path):
    plain = fit(tmp_path, model=Classifier(dropout=0.5))
    torch.manual_seed(0)
    trainer = made(tmp_path, model=Classifier(dropout=0.5), eval_data=rows(8), eval_strategy="steps", eval_steps=1)
    trainer.model.load_state_dict(made(tmp_path, model=Classifier(dropout=0.5)).model.state_dict())
    plain = made(tmp_path, model=Classifier(dropout=0.5))
    plain.model.load_state_dict(trainer.model.state_dict())
    trainer.evaluate()
    trainer.train()
    plain.train()
    assert losses(trainer) == losses(plain)


def test_a_model_can_be_compiled(tmp_path):
    trainer = fit(tmp_path, torch_compile_backend="eager", max_steps=2)
    assert trainer.args.torch_compile and losses(trainer) == losses(fit(tmp_path, max_steps=2))


def test_an_iterable_that_ends_early_stops_the_run(tmp_path, capsys):
    class Once(torch.utils.data.IterableDataset):
        used = False

        def __iter__(self):
            is_used, Once.used = Once.used, True
            return iter([] if is_used else rows(8))

    assert fit(tmp_path, data=Once(), max_steps=10).state.global_step == 2
    assert "not a single batch" in capsys.readouterr().out


def test_column_names_of_a_loss_of_ones_own_need_no_flag(tmp_path):
    class Similarity(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False):
            first, second = model(inputs["left"])["logits"], model(inputs["right"])["logits"]
            return nn.functional.mse_loss(nn.functional.cosine_similarity(first, second), inputs["labels"])

    data = [{"left": torch.randn(4), "right": torch.randn(4), "labels": torch.rand(())} for _ in range(8)]
    trainer = fit(tmp_path, kind=Similarity, data=data, eval_data=data, eval_strategy="epoch")
    assert "eval_loss" in trainer.state.log_history[-2] and len(losses(trainer)) == 2


def test_generated_tokens_are_padded_with_the_pad_token(tmp_path):
    pytest.importorskip("transformers")
    args = Seq2SeqTrainingArguments(
        str(tmp_path), predict_with_generate=True, per_device_eval_batch_size=2, disable_tqdm=True
    )
    lengths = iter((6, 3, 6, 3))

    class Shorter(Seq2SeqTrainer):
        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None, **gen_kwargs):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, max_length=next(lengths))

    data = [{"input_ids": torch.arange(3, 8), "labels": torch.arange(3, 3 + 2)} for _ in range(4)]
    output = Shorter(t5(), args).predict(data)
    assert output.predictions.shape[0] == 4 and (output.predictions >= 0).all()
    assert (output.predictions[2:, 3:] == 0).all() and "test_loss" in output.metrics


def test_the_argument_set_that_people_copy_runs_as_written(tmp_path):
    pytest.importorskip("transformers")
    with pytest.warns(UserWarning) as notices:
        args = TrainingArguments(
            output_dir=str(tmp_path),
            overwrite_output_dir=True,
            num_train_epochs=3,
            per_device_train_batch_size=4,
            per_device_eval_batch_size=4,
            warmup_steps=500,
            weight_decay=0.01,
            logging_dir=str(tmp_path / "logs"),
            logging_steps=10,
            save_steps=10,
            evaluation_strategy="steps",
            eval_steps=500,
            learning_rate=2e-5,
            load_best_model_at_end=True,
        )
    text = " ".join(str(notice.message) for notice in notices)
    assert all(name in text for name in ("overwrite_output_dir", "logging_dir", "evaluation_strategy"))
    data = [{"input_ids": torch.arange(3, 9), "labels": index % 3} for index in range(48)]
    trainer = Trainer(bert(), args, train_dataset=data, eval_dataset=data[:8])
    assert trainer.train().global_step == 36
    names = {path.name for path in tmp_path.glob("checkpoint-*")}
    assert names == {"checkpoint-10", "checkpoint-20", "checkpoint-30", "checkpoint-36"}
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-36")


def test_what_is_not_there_says_what_to_do_instead(tmp_path):
    trainer = made(tmp_path)
    for call in (trainer.push_to_hub, trainer.hyperparameter_search):
        with pytest.raises(ConfigError, match="is not supported"):
            call()
    trainer.create_model_card(model_name="tiny", dataset="rows")
    assert "# tiny" in (tmp_path / "README.md").read_text()
    trainer.evaluate({"a": rows(4), "b": rows(4)})
    trainer.create_model_card()
    card = (tmp_path / "README.md").read_text()
    assert "- eval_a_loss: " in card and "- eval_b_loss: " in card


def test_a_sampler_of_ones_own_is_used_and_a_method_that_is_never_called_is_told(tmp_path, caplog):
    class Own(Trainer):
        def _get_train_sampler(self, train_dataset=None):
            return torch.utils.data.SubsetRandomSampler(range(6))

        def _save_checkpoint(self, model, trial):
            raise AssertionError

    assert fit(tmp_path, kind=Own, per_device_train_batch_size=2).state.global_step == 3
    assert "never calls Own._save_checkpoint" in caplog.text and "on_save" in caplog.text


def test_a_folder_that_another_run_owns_is_left_alone(tmp_path):
    owner = made(tmp_path, save_strategy="steps", save_steps=1)

    class Second(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                with pytest.raises(LeaseError):
                    fit(tmp_path, save_strategy="steps", save_steps=1)

    owner.add_callback(Second())
    owner.train()
    assert len(list(tmp_path.glob("checkpoint-*"))) == 5 and not list(tmp_path.glob(".superseded-*"))


def test_bad_input_is_told(tmp_path):
    with pytest.raises(ConfigError, match="model or model_init, got neither"):
        Trainer(args=arguments(tmp_path))
    with pytest.raises(ConfigError, match="args must be TrainingArguments, got a dict"):
        Trainer(Classifier(), {"output_dir": "x"})
    with pytest.raises(ConfigError, match="nothing to train on"):
        Trainer(Classifier(), arguments(tmp_path)).train()
    with pytest.raises(ConfigError, match="nothing to evaluate"):
        Trainer(Classifier(), arguments(tmp_path)).evaluate()
    with pytest.raises(ConfigError, match="must be a torch.nn.Module"):
        Trainer("bert-base-uncased", arguments(tmp_path))
    with pytest.raises(ConfigError, match='as in "eval_a_loss"'):
        options = {"eval_strategy": "epoch", "load_best_model_at_end": True}
        Trainer(Classifier(), arguments(tmp_path, **options), eval_dataset={"a": rows(4)})
    with pytest.raises(ConfigError, match='as in "eval_a_loss"'):
        options = {"eval_strategy": "epoch", "save_strategy": "best"}
        Trainer(Classifier(), arguments(tmp_path, **options), eval_dataset={"a": rows(4)})
    with pytest.raises(BatchLossError, match="returned a loss of shape"):

        class PerSample(Trainer):
            def compute_loss(self, model, inputs, return_outputs=False):
                return nn.functional.cross_entropy(model(inputs["x"])["logits"], inputs["labels"], reduction="none")

        fit(tmp_path, kind=PerSample)
    with pytest.raises(DataError, match="different numbers of dimensions"):

        class Odd(Classifier):
            def forward(self, x, labels=None):
                logits = super().forward(x)["logits"]
                return {"logits": logits if len(x) > 2 else logits[:, 0]}

        made(tmp_path, model=Odd(), per_device_eval_batch_size=4).predict([{"x": torch.ones(4)}] * 6)


def test_importing_it_needs_no_transformers(tmp_path):
    code = """
import sys
for name in ("transformers", "datasets", "tokenizers", "peft"):
    sys.modules[name] = None
import torch
from loopwright.hf import Trainer, TrainingArguments
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
    def forward(self, x, labels=None):
        logits = self.linear(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}
data = [{"x": torch.randn(2), "labels": 0} for _ in range(8)]
args = TrainingArguments(sys.argv[1], max_steps=2, save_steps=1, eval_strategy="steps", eval_steps=1, disable_tqdm=True)
trainer = Trainer(Model(), args, train_dataset=data, eval_dataset=data)
print("updates", trainer.train().global_step)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=100)
    assert "updates 2" in done.stdout, done.stderr
