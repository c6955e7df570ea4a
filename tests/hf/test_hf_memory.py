"""`auto_find_batch_size`: too little memory means smaller micro-batches of the same update."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf.tiny import Classifier, rows
from loopwright.errors import ConfigError, MemoryLimitError
from loopwright.hf import Trainer, TrainerCallback, TrainingArguments
from loopwright.training.run import run_of


class Limited(Classifier):
    """A classifier with room for so many rows."""

    def __init__(self, train_room: int = 1000, eval_room: int = 1000) -> None:
        super().__init__()
        self.rooms = (eval_room, train_room)
        self.counts: list[int] = []

    def forward(self, x, labels=None):
        if len(x) > self.rooms[self.training]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        self.counts.append(len(x))
        return super().forward(x, labels)


class Steps(TrainerCallback):
    """Counts the beginnings and the ends of steps, and the batches of evaluations."""

    def __init__(self):
        self.begun = self.ended = self.predicted = 0

    def on_step_begin(self, args, state, control, **kwargs):
        self.begun += 1

    def on_step_end(self, args, state, control, **kwargs):
        self.ended += 1

    def on_prediction_step(self, args, state, control, **kwargs):
        self.predicted += 1


def fit(folder, train_room: int = 1000, eval_room: int = 1000, labels: int | None = None, **options):
    torch.manual_seed(0)
    data = [{"x": row["x"].double(), "labels": row["labels"]} for row in rows()]
    if labels is not None:  # most rows have no label that counts
        data = [{**row, "labels": row["labels"] if index % labels == 0 else -100} for index, row in enumerate(data)]
    steps = Steps()
    args = TrainingArguments(
        folder,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        num_train_epochs=2,
        gradient_accumulation_steps=2,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    model = Limited(train_room, eval_room).double()
    trainer = Trainer(
        model,
        args,
        train_dataset=data,
        eval_dataset=data,
        callbacks=[steps],
        compute_metrics=lambda given: {
            "hits": int((given.predictions.argmax(-1) == given.label_ids).sum()),
            "seen": len(given.label_ids),
        },
    )
    trainer.output = trainer.train()
    return trainer, steps


@pytest.mark.parametrize("labels", [None, 3])
def test_it_trains_the_same_weights_in_parts(tmp_path, labels):
    whole, _ = fit(tmp_path / "whole", labels=labels)
    split, steps = fit(tmp_path / "split", train_room=2, labels=labels, auto_find_batch_size=True)
    assert max(split.model.counts) == 2
    for one, other in zip(whole.model.parameters(), split.model.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)
    assert split.output.training_loss == pytest.approx(whole.output.training_loss, abs=1e-7)  # kept in float32
    assert steps.begun == steps.ended == split.state.global_step == whole.state.global_step


def test_without_it_memory_that_runs_out_ends_the_run(tmp_path):
    with pytest.raises(MemoryLimitError) as caught:
        fit(tmp_path, train_room=4)
    assert "that was not asked for" in caught.value.saw[1]
    fix = "auto_find_batch_size=True, which keeps the maths   or   per_device_train_batch_size=4 with twice the"
    assert caught.value.fix.startswith(fix) and "bytes)" in caught.value.fix


def test_an_evaluation_in_parts_has_the_metrics_of_a_whole_one(tmp_path):
    whole, _ = fit(tmp_path / "whole")
    parts, steps = fit(tmp_path / "parts", eval_room=3)
    first, second = whole.evaluate(), parts.evaluate()
    assert steps.predicted == 3, "the bar counts batches, not parts"
    assert second["eval_hits"] == first["eval_hits"] and second["eval_seen"] == first["eval_seen"] == 24
    assert second["eval_loss"] == pytest.approx(first["eval_loss"], abs=1e-12)
    assert parts.predict(parts.eval_dataset).predictions.shape == (24, 3)
    assert isinstance(parts.model, nn.Module)


def test_a_batch_whose_logits_do_not_fit_twice_is_counted_once(tmp_path):
    whole, _ = fit(tmp_path / "whole")
    parts, _ = fit(tmp_path / "parts")

    def narrowed(logits, labels):
        if len(logits) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        return logits.clone()

    parts.preprocess_logits_for_metrics = narrowed
    outcomes = [each.evaluation_loop(each.get_eval_dataloader(), "Evaluation") for each in (whole, parts)]
    assert [outcome.num_samples for outcome in outcomes] == [24, 24]
    assert outcomes[1].predictions.shape == (24, 3)
    assert outcomes[1].metrics["eval_hits"] == outcomes[0].metrics["eval_hits"]


@pytest.mark.parametrize("event", ["on_step_begin", "on_substep_end", "on_prediction_step"])
def test_memory_that_runs_out_in_a_callback_is_not_taken_for_a_batch_that_is_too_large(tmp_path, event):
    class Greedy(TrainerCallback):
        pass

    def fail(self, args, state, control, **kwargs):
        raise MemoryError("of the callback")

    setattr(Greedy, event, fail)
    trainer, _ = fit(tmp_path, auto_find_batch_size=True)
    trainer.add_callback(Greedy())
    with pytest.raises(MemoryError, match="^of the callback$"):
        trainer.evaluate() if event == "on_prediction_step" else trainer.train()
    assert trainer.core.num_parts == run_of(trainer.core).memory.parts.evaluation == 1


def test_the_parts_of_an_evaluation_hold_for_the_next_ones(tmp_path, capsys):
    args = TrainingArguments(str(tmp_path), per_device_eval_batch_size=8, report_to=[], disable_tqdm=True)
    trainer = Trainer(Limited(eval_room=3), args, eval_dataset=rows(24))
    trainer.evaluate()
    assert capsys.readouterr().out.count("Out of memory while evaluating") == 2
    trainer.evaluate()
    trainer.predict(rows(24))
    assert capsys.readouterr().out.count("Out of memory while evaluating") == 0
    assert run_of(trainer.core).memory.parts.evaluation == 4


def test_training_inside_a_run_is_refused_and_the_run_is_finished(tmp_path):
    refused = []

    class Nested(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            with pytest.raises(ConfigError, match="in the middle of a training run"):
                trainer.train()
            refused.append(state.global_step)

    args = TrainingArguments(str(tmp_path), max_steps=3, report_to=[], disable_tqdm=True, save_strategy="no")
    trainer = Trainer(Classifier(), args, train_dataset=rows(24), callbacks=[Nested()])
    assert trainer.train().global_step == 3 and refused == [1, 2, 3]
