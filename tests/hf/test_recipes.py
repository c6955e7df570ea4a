"""Recipes for subclasses and callbacks that circulate: adversarial training, own logs, late unfreezing."""

import pytest
import torch
from torch import nn

from loopwright.hf import Trainer

from .tiny import Classifier, fit, logged, losses, on

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
