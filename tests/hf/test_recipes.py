"""Recipes for subclasses and callbacks that circulate: adversarial training, own logs, late unfreezing."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from loopwright.hf import CallbackHandler, Trainer

from .tiny import Classifier, fit, folders, logged, losses, made, on, same, weights

SAVES = {"save_strategy": "steps", "save_steps": 2}


class Adversarial(Trainer):
    """Trains on each batch a second time, on shifted inputs, and divides its losses as transformers 4 did."""

    returned = staticmethod(lambda loss, shifted: loss)

    def training_step(self, model, inputs, num_items_in_batch=None):
        found = []
        for shift in (0.0, 0.5):
            loss = self.compute_loss(model, {**inputs, "x": inputs["x"] + shift})
            found.append(loss / self.args.gradient_accumulation_steps)
            self.accelerator.backward(found[-1])
        return self.returned(*found).detach()


@pytest.mark.parametrize("returned", [lambda loss, shifted: loss, lambda loss, shifted: loss + shifted])
def test_a_step_with_two_losses_that_are_divided_logs_the_mean(returned, tmp_path):
    class Chosen(Adversarial):
        pass

    Chosen.returned = staticmethod(returned)
    whole = fit(tmp_path, kind=Chosen, per_device_train_batch_size=4)
    parts = fit(tmp_path, kind=Chosen, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-5)


def test_a_training_step_gets_the_number_of_items_under_any_name(tmp_path):
    class Summed(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            logits = model(inputs["x"])["logits"]
            return nn.functional.cross_entropy(logits, inputs["labels"], reduction="sum") / num_items_in_batch

    class Passing(Summed):
        def training_step(self, *args, **kwargs):
            return super().training_step(*args, **kwargs)

    class Renaming(Summed):
        def training_step(self, model, inputs, items):
            return super().training_step(model, inputs, items)

    plain = fit(tmp_path)
    assert losses(fit(tmp_path, kind=Passing)) == losses(fit(tmp_path, kind=Renaming)) == pytest.approx(losses(plain))


def test_gradients_of_parameters_outside_the_optimizer_are_dropped_after_every_update(tmp_path):
    def unfreeze(args, state, control, model=None, **kwargs):
        model.linear.bias.requires_grad = state.global_step > 0

    model, data = Classifier(), [{"x": torch.ones(4), "labels": 0}] * 20
    model.linear.bias.requires_grad = False
    norms = logged(fit(tmp_path, on(step_begin=unfreeze), model=model, data=data, learning_rate=0.0), "grad_norm")
    assert norms[0] < norms[1] and norms[1:] == [norms[1]] * 4


def test_an_overridden_call_event_of_the_handler_leaves_the_flags_to_the_run(tmp_path):
    class Handler(CallbackHandler):
        def call_event(self, event, args, state, control, **kwargs):
            for callback in self.callbacks:
                control = getattr(callback, event)(args, state, control, **kwargs) or control
            return control

    trainer = made(tmp_path, **SAVES)
    trainer.callback_handler = Handler(trainer.callback_handler.callbacks)
    trainer.train()
    assert folders(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-5"]


@pytest.mark.parametrize("calls_super", [True, False])
def test_an_overridden_maybe_log_save_evaluate_logs_and_changes_nothing_else(calls_super, tmp_path):
    class Copied(Trainer):
        def _maybe_log_save_evaluate(
            self, tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time, learning_rate=None
        ):
            if calls_super:
                given = (tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time)
                return super()._maybe_log_save_evaluate(*given, learning_rate)
            if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
                mean = float(tr_loss) / (self.state.global_step - self._globalstep_last_logged)
                self._total_loss_scalar += float(tr_loss)
                self.log({"loss": mean, "grad_norm": grad_norm, "learning_rate": learning_rate, "own": 1}, start_time)
            assert not (self.control.should_evaluate or self.control.should_save)

    options = {"logging_steps": 2, "eval_strategy": "steps", "eval_steps": 2, **SAVES}
    options["eval_dataset"] = [{"x": torch.ones(4), "labels": 0}] * 4
    plain, own = fit(tmp_path / "plain", **options), fit(tmp_path / "own", kind=Copied, **options)
    assert losses(own) == pytest.approx(losses(plain)) and folders(tmp_path / "own") == folders(tmp_path / "plain")
    assert len(own.state.log_history) == len(plain.state.log_history)
    assert calls_super or logged(own, "own") == [1, 1]


def test_a_replaced_model_gets_an_optimizer_of_its_own(tmp_path):
    trainer = fit(tmp_path)
    before = weights(trainer)
    torch.manual_seed(0)
    trainer.model = Classifier()
    trainer.train()
    assert all(torch.equal(value, before[name]) for name, value in weights(trainer).items())


def test_a_limit_of_zero_keeps_every_checkpoint(tmp_path):
    unlimited, zero = fit(tmp_path / "none", **SAVES), fit(tmp_path / "zero", save_total_limit=0, **SAVES)
    assert same(unlimited, zero) and folders(tmp_path / "zero") == folders(tmp_path / "none")


def test_libraries_may_log_with_accelerate_once_there_are_arguments(tmp_path):
    pytest.importorskip("transformers")
    code = "from loopwright.hf import TrainingArguments, install; install()\n"
    code += f"from accelerate.logging import get_logger; TrainingArguments({str(tmp_path)!r})\n"
    code += "get_logger('a').warning('said')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "said" in done.stderr, done.stderr
