"""loopwright.hf on a CUDA device: precisions, exact resume, evaluation."""

import pytest
import torch
from torch import nn

from loopwright.hf import Trainer, TrainerCallback, TrainingArguments

pytestmark = pytest.mark.gpu


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))

    def forward(self, inputs, labels=None):
        logits = self.layers(inputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def rows(number):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(number, 8, generator=generator)
    return [{"inputs": row, "labels": int(row[:3].argmax())} for row in inputs]


def fit(folder, resume=None, callbacks=None, **kwargs):
    arguments = TrainingArguments(
        str(folder),
        num_train_epochs=3,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        save_steps=5,
        logging_steps=5,
        eval_strategy="epoch",
        disable_tqdm=True,
        report_to="none",
        seed=3,
        **kwargs,
    )
    data = rows(160)
    trainer = Trainer(
        Net(), arguments, train_dataset=data, eval_dataset=data, callbacks=callbacks,
        compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("precision", [{}, {"bf16": True}, {"fp16": True}], ids=["fp32", "bf16", "fp16"])
def test_a_model_learns_on_the_device_in_every_precision(precision, tmp_path):
    trainer = fit(tmp_path, **precision)
    assert next(trainer.model.parameters()).device.type == "cuda"
    evaluated = [record for record in trainer.state.log_history if "eval_accuracy" in record]
    assert evaluated[-1]["eval_accuracy"] > 0.6
    assert trainer.state.global_step == 30


class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 17


@pytest.mark.parametrize("precision", [{}, {"bf16": True}, {"fp16": True}], ids=["fp32", "bf16", "fp16"])
def test_a_run_that_was_stopped_continues_with_the_same_bits_on_the_device(precision, tmp_path):
    whole = fit(tmp_path / "whole", **precision)
    fit(tmp_path / "parts", callbacks=[Stop()], **precision)
    resumed = fit(tmp_path / "parts", resume=True, **precision)
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
