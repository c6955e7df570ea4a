"""`auto_find_batch_size`: if memory runs out, the same update runs in smaller micro-batches."""

from collections import Counter

import pytest
import torch
from torch import nn

from loopwright.errors import MemoryLimitError
from loopwright.hf import Trainer
from loopwright.training.run import run_of

from .tiny import Classifier, assert_refused, fit, largest_difference, made, on, rows, weights

EVENTS = ("step_begin", "step_end", "prediction_step")


class Limited(Classifier):
    def __init__(self, train_room: int = 1000, eval_room: int = 1000) -> None:
        super().__init__()
        self.rooms = (eval_room, train_room)
        self.counts: list[int] = []

    def forward(self, x, labels=None):
        if len(x) > self.rooms[self.training]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        self.counts.append(len(x))
        return super().forward(x, labels)


def limited(folder, train_room: int = 1000, eval_room: int = 1000, labels: int | None = None, **options):
    """Train with limited memory; `trainer.counts` has the number of some events."""
    data = [{"x": row["x"].double(), "labels": row["labels"]} for row in rows()]
    if labels is not None:  # most rows have no label that counts
        data = [{**row, "labels": row["labels"] if index % labels == 0 else -100} for index, row in enumerate(data)]

    def compute_metrics(given):
        hits = int((given.predictions.argmax(-1) == given.label_ids).sum())
        return {"hits": hits, "seen": len(given.label_ids)}

    torch.manual_seed(0)
    options |= {"model": Limited(train_room, eval_room).double(), "data": data, "eval_dataset": data}
    options |= {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 8, "learning_rate": 5e-5}
    options |= {"num_train_epochs": 2, "gradient_accumulation_steps": 2, "use_cpu": True, "logging_steps": 500}
    counts = Counter()
    events = {name: lambda *given, name=name, **kwargs: counts.update([name]) for name in EVENTS}
    trainer = fit(folder, on(**events), compute_metrics=compute_metrics, **options)
    trainer.counts = counts
    return trainer


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return limited(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("labels", [None, 3])
def test_an_update_in_parts_trains_the_same_weights(tmp_path, whole, labels):
    whole = whole if labels is None else limited(tmp_path / "whole", labels=labels)
    split = limited(tmp_path / "split", train_room=2, labels=labels, auto_find_batch_size=True)
    assert max(split.model.counts) == 2
    for one, other in zip(whole.model.parameters(), split.model.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)
    assert split.output.training_loss == pytest.approx(whole.output.training_loss, abs=1e-7)  # kept in float32
    assert split.counts["step_begin"] == split.counts["step_end"] == split.state.global_step == whole.state.global_step


def test_running_out_of_memory_otherwise_ends_the_run(tmp_path):
    with pytest.raises(MemoryLimitError) as caught:
        limited(tmp_path, train_room=4)
    assert "that was not asked for" in caught.value.saw[1]
    fix = "auto_find_batch_size=True   or   per_device_train_batch_size=4 with twice the"
    assert caught.value.fix.startswith(fix) and "bytes)" in caught.value.fix


def test_an_evaluation_in_parts_has_the_metrics_of_a_whole_one(tmp_path, whole):
    parts = limited(tmp_path, eval_room=3)
    first, second = whole.evaluate(), parts.evaluate()
    assert parts.counts["prediction_step"] == 3, "the bar counts batches, not parts"
    assert second["eval_hits"] == first["eval_hits"] and second["eval_seen"] == first["eval_seen"] == 24
    assert second["eval_loss"] == pytest.approx(first["eval_loss"], abs=1e-12)
    assert parts.predict(parts.eval_dataset).predictions.shape == (24, 3)
    assert isinstance(parts.model, nn.Module)


def test_a_batch_whose_logits_do_not_fit_twice_is_counted_once(tmp_path, whole):
    parts = limited(tmp_path)

    def narrowed(logits, labels):
        if len(logits) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        return logits.clone()

    parts.preprocess_logits_for_metrics = narrowed
    outcomes = [each.evaluation_loop(each.get_eval_dataloader(), "Evaluation") for each in (whole, parts)]
    assert [outcome.num_samples for outcome in outcomes] == [24, 24]
    assert outcomes[1].predictions.shape == (24, 3)
    assert outcomes[1].metrics["eval_hits"] == outcomes[0].metrics["eval_hits"]


@pytest.mark.parametrize("event", ["step_begin", "substep_end", "prediction_step"])
def test_a_callback_that_runs_out_of_memory_does_not_split_batches(tmp_path, event):
    def fail(args, state, control, **kwargs):
        raise MemoryError("of the callback")

    trainer = limited(tmp_path, auto_find_batch_size=True)
    trainer.add_callback(on(**{event: fail}))
    call = trainer.evaluate if event == "prediction_step" else trainer.train
    assert_refused("^of the callback$", call, error=MemoryError)
    assert trainer.core.num_parts == run_of(trainer.core).memory.parts.evaluation == 1


def test_the_next_evaluations_use_the_same_parts(tmp_path, capsys):
    trainer = made(tmp_path, model=Limited(eval_room=3), eval_dataset=rows(24), per_device_eval_batch_size=8)
    trainer.evaluate()
    assert capsys.readouterr().out.count("Out of memory while evaluating") == 2
    trainer.evaluate()
    trainer.predict(rows(24))
    assert capsys.readouterr().out.count("Out of memory while evaluating") == 0
    assert run_of(trainer.core).memory.parts.evaluation == 4


def test_training_inside_a_run_is_refused_and_the_run_is_finished(tmp_path):
    refused = []

    def nest(args, state, control, **kwargs):
        assert_refused("in the middle of a training run", trainer.train)
        refused.append(state.global_step)

    trainer = made(tmp_path, on(step_end=nest), max_steps=3)
    assert trainer.train().global_step == 3 and refused == [1, 2, 3]


def test_get_batch_samples_is_called_once_per_update_with_whole_batches(tmp_path):
    calls = []

    class Doubled(Trainer):
        def get_batch_samples(self, epoch_iterator, num_batches, device):
            batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
            calls.append([len(batch["x"]) for batch in batches])
            return [{**batch, "x": batch["x"] * 2} for batch in batches], count

    options = {"kind": Doubled, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    data = [{"x": row["x"].double(), "labels": row["labels"]} for row in rows()]
    ends = []
    for room in (1000, 3):
        torch.manual_seed(0)
        model = Limited(room).double()
        ends.append(weights(fit(tmp_path, model=model, data=data, auto_find_batch_size=True, **options)))
    assert calls == [[8, 8], [8]] * 2
    assert largest_difference(*ends) < 1e-12
