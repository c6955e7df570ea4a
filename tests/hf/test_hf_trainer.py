"""The trainer beyond the mainstream: override points, options of evaluation, bad input, import."""

import numpy as np
import pytest
import torch
from torch import nn

import toys
from loopwright.errors import BatchLossError, DataError
from loopwright.hf import EvalPrediction, Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments
from loopwright.run_folder.lease import LeaseError

from . import tiny
from .tiny import Classifier, arguments, assert_refused, fit, largest_difference, losses, made, rows, same, weights

IN_PARTS = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}


@pytest.fixture(scope="module")
def in_parts(tmp_path_factory):
    return fit(tmp_path_factory.mktemp("plain"), **IN_PARTS)


def test_an_overridden_training_step_may_have_the_old_signature(tmp_path, in_parts):
    class Own(Trainer):
        def training_step(self, model, inputs):
            model.train()
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
            self.accelerator.backward(loss)
            return loss.detach()

    assert same(fit(tmp_path, kind=Own, **IN_PARTS), in_parts)


def test_a_bare_backward_is_refused_in_an_update_of_several_micro_batches(tmp_path):
    class Bare(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = self.compute_loss(model, inputs)
            loss.backward()
            return loss.detach()

    assert losses(fit(tmp_path, kind=Bare)) == losses(fit(tmp_path))
    options = {"kind": Bare, "gradient_accumulation_steps": 2}
    assert_refused("accelerator.backward", fit, tmp_path, error=BatchLossError, **options)


def test_a_loss_of_one_number_may_have_a_dimension_and_one_of_several_is_refused(tmp_path, in_parts):
    class InABox(Classifier):
        def forward(self, x, labels=None):
            outputs = super().forward(x, labels)
            return {**outputs, "loss": outputs["loss"].reshape(1)} if labels is not None else outputs

    torch.manual_seed(0)
    assert same(fit(tmp_path, model=InABox(), **IN_PARTS), in_parts)

    class Several(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            return super().training_step(model, inputs, num_items_in_batch).repeat(2)

    text = r"training_step returned a loss of shape \(2,\)"
    assert_refused(text, fit, tmp_path, kind=Several, error=BatchLossError)


def test_two_losses_may_go_backward_in_one_step(tmp_path):
    class Twice(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            for _ in range(2):
                loss = self.compute_loss(model, inputs)
                self.accelerator.backward(loss)
            return loss.detach()

    class Doubled(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = self.compute_loss(model, inputs)
            self.accelerator.backward(2 * loss)
            return loss.detach()

    options = {"gradient_accumulation_steps": 2, "optim": "sgd", "max_grad_norm": 0}
    twice, doubled = fit(tmp_path, kind=Twice, **options), fit(tmp_path, kind=Doubled, **options)
    assert largest_difference(weights(twice), weights(doubled)) < 1e-6 and losses(twice) == losses(doubled)


def test_prediction_step_and_evaluation_loop_are_overridden(tmp_path):
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


def test_an_overridden_evaluation_loop_may_iterate_over_the_loader(tmp_path):
    class Own(Trainer):
        def evaluation_loop(self, dataloader, description, prediction_loss_only=None, ignore_keys=None, **kwargs):
            self.model.eval()
            total = sum(float(self.prediction_step(self.model_wrapped, batch, True)[0]) for batch in dataloader)
            return super().evaluation_loop(dataloader, description)._replace(metrics={"eval_total": total})

    trainer = fit(tmp_path, kind=Own, eval_dataset=rows(8), eval_strategy="epoch", num_train_epochs=2)
    assert trainer.evaluate()["eval_total"] > 0 and losses(trainer) == losses(fit(tmp_path, num_train_epochs=2))


def test_metrics_are_computed_batch_by_batch(tmp_path):
    calls = []

    def compute_metrics(prediction, compute_result):
        calls.append((len(prediction.predictions), compute_result))
        return {"batches": float(len(calls))} if compute_result else {}

    options = {"batch_eval_metrics": True, "per_device_eval_batch_size": 4}
    assert made(tmp_path, compute_metrics=compute_metrics, **options).evaluate(rows(10))["eval_batches"] == 3
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
    text = "a batch has no input_ids: it has x, labels. Set main_input_name"
    options = {"compute_metrics": compute_metrics, "include_for_metrics": "inputs"}
    assert "eval_loss" in made(tmp_path, model=Named(), **options).evaluate(rows(4)) and len(seen["inputs"]) == 4
    assert_refused(text, made(tmp_path, **options).evaluate, rows(4))


def test_batches_may_stay_separate_and_several_outputs_are_padded_separately(tmp_path):
    output = made(tmp_path, eval_do_concat_batches=False, per_device_eval_batch_size=4).predict(rows(6))
    assert [batch.shape for batch in output.predictions] == [(4, 3), (2, 3)]

    class Several(Classifier):
        def forward(self, x, labels=None):
            outputs = super().forward(x, labels)
            return {**outputs, "hidden": outputs["logits"][:, None, :].repeat(1, len(x), 1), "past": None}

    trainer = made(tmp_path, model=Several(), per_device_eval_batch_size=4)
    logits, hidden = trainer.predict(rows(6), ignore_keys=["past"]).predictions
    assert logits.shape == (6, 3) and hidden.shape == (6, 4, 3) and (hidden[4:, 2:] == -100).all()
    predictions, labels = EvalPrediction(np.zeros(2), np.ones(2))
    assert labels.sum() == 2 and EvalPrediction(predictions, labels)[1] is labels


def test_the_optimizer_is_created_by_a_class_or_a_factory(tmp_path):
    class Factory:
        def __call__(self, model, lr):
            return torch.optim.SGD(model.parameters(), lr=lr)

    for kind in (torch.optim.SGD, Factory):
        trainer = made(tmp_path, optimizer_cls_and_kwargs=(kind, {"lr": 0.25}))
        assert trainer.create_optimizer().param_groups[0]["lr"] == 0.25
    factory = (lambda model, lr: torch.optim.SGD(model.parameters(), lr=lr), {"lr": 0.25})
    assert fit(tmp_path, optimizer_cls_and_kwargs=factory).optimizer.param_groups[0]["lr"] < 0.25


def test_evaluations_do_not_change_a_run_and_a_second_run_continues_with_the_weights(tmp_path):
    evaluated = {"eval_dataset": rows(8), "eval_strategy": "steps", "eval_steps": 1}
    trainer, plain = (made(tmp_path, model=Classifier(dropout=0.5), **options) for options in (evaluated, {}))
    plain.model.load_state_dict(trainer.model.state_dict())
    trainer.evaluate()
    trainer.train()
    plain.train()
    assert losses(trainer) == losses(plain)
    first = weights(plain)
    plain.train()
    assert tiny.logged(plain, "learning_rate")[0] == 1e-2 and largest_difference(first, weights(plain)) > 0


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


def test_an_overridden_loss_sees_every_column(tmp_path):
    class Similarity(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False):
            first, second = model(inputs["left"])["logits"], model(inputs["right"])["logits"]
            return nn.functional.mse_loss(nn.functional.cosine_similarity(first, second), inputs["labels"])

    data = [{"left": torch.randn(4), "right": torch.randn(4), "labels": torch.rand(())} for _ in range(8)]
    trainer = fit(tmp_path, kind=Similarity, data=data, eval_dataset=data, eval_strategy="epoch")
    assert "eval_loss" in trainer.state.log_history[-2] and len(losses(trainer)) == 2


def test_generated_tokens_are_padded_with_the_pad_token(tmp_path):
    options = {"predict_with_generate": True, "per_device_eval_batch_size": 2, "disable_tqdm": True}
    args = Seq2SeqTrainingArguments(str(tmp_path), **options)
    lengths = iter((6, 3, 6, 3))

    class Shorter(Seq2SeqTrainer):
        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None, **gen_kwargs):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, max_length=next(lengths))

    data = [{"input_ids": torch.arange(3, 8), "labels": torch.arange(3, 3 + 2)} for _ in range(4)]
    output = Shorter(tiny.t5(), args).predict(data)
    assert output.predictions.shape[0] == 4 and (output.predictions >= 0).all()
    assert (output.predictions[2:, 3:] == 0).all() and "test_loss" in output.metrics


def test_the_arguments_that_people_copy_run_as_written(tmp_path):
    options = {"num_train_epochs": 3, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
    options |= {"warmup_steps": 500, "weight_decay": 0.01, "logging_dir": str(tmp_path / "logs"), "logging_steps": 10}
    options |= {"save_steps": 10, "evaluation_strategy": "steps", "eval_steps": 500, "learning_rate": 2e-5}
    with pytest.warns(UserWarning) as notices:
        args = TrainingArguments(str(tmp_path), overwrite_output_dir=True, load_best_model_at_end=True, **options)
    assert len(notices) == 3
    assert (args.eval_strategy, args.eval_steps, args.save_steps) == ("steps", 500, 10)
    assert (args.metric_for_best_model, args.greater_is_better) == ("loss", False)
    text = " ".join(str(notice.message) for notice in notices)
    assert all(name in text for name in ("overwrite_output_dir", "logging_dir", "evaluation_strategy"))
    data = [{"input_ids": torch.arange(3, 9), "labels": index % 3} for index in range(48)]
    trainer = Trainer(tiny.bert(), args, train_dataset=data, eval_dataset=data[:8])
    assert trainer.train().global_step == 36
    names = {path.name for path in tmp_path.glob("checkpoint-*")}
    assert names == {"checkpoint-10", "checkpoint-20", "checkpoint-30", "checkpoint-36"}
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-36")


def test_a_model_card_is_written(tmp_path):
    trainer = made(tmp_path)
    trainer.create_model_card(model_name="tiny", dataset="rows")
    assert "# tiny" in (tmp_path / "README.md").read_text()
    trainer.evaluate({"a": rows(4), "b": rows(4)})
    trainer.create_model_card()
    card = (tmp_path / "README.md").read_text()
    assert "- eval_a_loss: " in card and "- eval_b_loss: " in card


def test_an_overridden_sampler_is_used_and_a_method_that_is_never_called_is_reported(tmp_path, caplog):
    class Own(Trainer):
        def _get_train_sampler(self, train_dataset=None):
            return torch.utils.data.SubsetRandomSampler(range(6))

        def _clip_grad_norm(self, model):
            raise AssertionError

    assert fit(tmp_path, kind=Own, per_device_train_batch_size=2).state.global_step == 3
    assert "never calls Own._clip_grad_norm" in caplog.text and "max_grad_norm" in caplog.text


def test_a_folder_that_another_run_owns_is_left_alone(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 1}
    again = tiny.at_step(3, lambda control: assert_refused(".", fit, tmp_path, error=LeaseError, **options))
    fit(tmp_path, again, **options)
    assert len(list(tmp_path.glob("checkpoint-*"))) == 5 and not list(tmp_path.glob(".superseded-*"))


def test_bad_input_is_refused(tmp_path):
    class PerSample(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False):
            return nn.functional.cross_entropy(model(inputs["x"])["logits"], inputs["labels"], reduction="none")

    class Odd(Classifier):
        def forward(self, x, labels=None):
            logits = super().forward(x)["logits"]
            return {"logits": logits if len(x) > 2 else logits[:, 0]}

    empty, odd = Trainer(Classifier(), arguments(tmp_path)), made(tmp_path, model=Odd(), per_device_eval_batch_size=4)
    assert_refused("model or model_init, got neither", Trainer, args=arguments(tmp_path))
    assert_refused("args must be TrainingArguments, got a dict", Trainer, Classifier(), {"output_dir": "x"})
    assert_refused("nothing to train on", empty.train)
    assert_refused("nothing to evaluate", empty.evaluate)
    assert_refused("must be a torch.nn.Module", Trainer, "bert-base-uncased", arguments(tmp_path))
    for more in ({"load_best_model_at_end": True}, {"save_strategy": "best"}):
        options = {"eval_strategy": "epoch", "eval_dataset": {"a": rows(4)}, **more}
        assert_refused('as in "eval_a_loss"', made, tmp_path, **options)
    assert_refused("returned a loss of shape", fit, tmp_path, kind=PerSample, error=BatchLossError)
    assert_refused("different numbers of dimensions", odd.predict, [{"x": torch.ones(4)}] * 6, error=DataError)


WITHOUT_TRANSFORMERS = """
import sys
for name in ("transformers", "datasets", "tokenizers", "peft"):
    sys.modules[name] = None  # importing it fails, as if it were not installed
import torch
from loopwright.hf import EarlyStoppingCallback, HfArgumentParser, Seq2SeqTrainer, Trainer, TrainingArguments
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
    def forward(self, x, labels=None):
        logits = self.linear(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}
data = [{"x": torch.randn(2), "labels": index % 2} for index in range(20)]
options = {"num_train_epochs": 1, "save_strategy": "epoch", "eval_strategy": "steps", "eval_steps": 1}
args = TrainingArguments(sys.argv[1], disable_tqdm=True, report_to="none", **options)
trainer = Trainer(Model(), args, train_dataset=data, eval_dataset=data)
print("updates", trainer.train().global_step)
assert "eval_loss" in trainer.evaluate()
trainer.save_model()
print("done")
"""


def test_a_plain_module_trains_where_transformers_is_not_installed(tmp_path):
    done = toys.python("-c", WITHOUT_TRANSFORMERS, tmp_path)
    assert "updates 3\n" in done.stdout and done.stdout.endswith("done\n"), done.stderr
    assert (tmp_path / "checkpoint-3" / "MANIFEST.json").exists()
    assert (tmp_path / "model.safetensors").exists()
