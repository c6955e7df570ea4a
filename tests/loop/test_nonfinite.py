"""Losses and gradients that are not finite: the run stops and names them, or such updates leave no trace."""

import json
import math
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import BatchSampler, RandomSampler

import toys
from distributed.launcher import launch
from loopwright import Checkpointing, Trainer
from loopwright.callbacks import TerminateOnNaNCallback
from loopwright.checkpoint import find_newest, read
from loopwright.errors import ConfigError
from loopwright.run_folder import read_status

NUM_SAMPLES = 22  # with micro-batches of four in windows of two: three updates per epoch, the last one short
ACCUMULATION = 2


class Poisoned(toys.RecordingTrainer):
    """Gives a loss of `value` to every micro-batch that holds a sample of `bad`, in the epochs of `when`."""

    bad: tuple[int, ...] = (5,)
    when: tuple[int, ...] = (1, 2, 3)
    value = math.nan

    def calculate_train_batch_loss(self, batch):
        output = super().calculate_train_batch_loss(batch)
        is_bad = self.run_history.current_epoch in self.when and set(batch[2].tolist()) & set(self.bad)
        return {**output, "loss": output["loss"] * self.value} if is_bad else output


class InfiniteGradient(torch.autograd.Function):
    """Leaves a value as it is, and makes its gradient infinite."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * math.inf


class BadGradient(Poisoned):
    """As `Poisoned`, but the loss is finite and only its gradient is not."""

    def calculate_train_batch_loss(self, batch):
        output = Trainer.calculate_train_batch_loss(self, batch)
        self.seen.append(batch[2].tolist())
        is_bad = self.run_history.current_epoch in self.when and set(batch[2].tolist()) & set(self.bad)
        return {**output, "loss": InfiniteGradient.apply(output["loss"])} if is_bad else output


def with_batch_norm() -> nn.Module:
    return toys.seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)))


def variant(cls=Poisoned, **attributes):
    return type(cls.__name__, (cls,), attributes)


def fit(cls=Poisoned, folder: Path | None = None, callbacks=(), num_epochs=2, **kwargs):
    """Train a model with batch norm on shuffled data, with momentum and a scheduler, saving after every update."""
    schedule = partial(lr_scheduler.StepLR, step_size=1, gamma=0.9)
    defaults = {"gradient_accumulation_steps": ACCUMULATION, "create_scheduler_fn": schedule, "log_every": 1}
    kwargs = {**defaults, "checkpoints": None if folder is None else toys.saving(folder), **kwargs}
    trainer = toys.trained(callbacks, toys.data(NUM_SAMPLES), num_epochs, model=with_batch_norm(), cls=cls, **kwargs)
    return trainer, trainer.result


def windows(seen: list[list[int]], accumulation: int = ACCUMULATION) -> list[list[list[int]]]:
    """Return the micro-batches of each update, epoch after epoch."""
    per_epoch = -(-NUM_SAMPLES // 4)
    epochs = [seen[start : start + per_epoch] for start in range(0, len(seen), per_epoch)]
    return [epoch[first : first + accumulation] for epoch in epochs for first in range(0, per_epoch, accumulation)]


def holds(window: list[list[int]], bad=(5,)) -> bool:
    return any(set(ids) & set(bad) for ids in window)


@pytest.mark.parametrize("epoch", [1, 2])
def test_a_stopped_run_names_the_update_and_writes_down_the_samples_that_were_in_it(epoch, tmp_path, capsys):
    trainer, result = fit(variant(when=(epoch,)), tmp_path, [TerminateOnNaNCallback])
    updates = windows(trainer.seen)
    update = next(number for number, window in enumerate(updates, start=1) if holds(window) and number > 3 * epoch - 3)
    ids = [index for micro_batch in updates[update - 1] for index in micro_batch]
    assert 5 in ids and ids != sorted(ids), "the order is shuffled"
    first = (update - 1) % 3 * 8
    assert json.loads((tmp_path / "nan_batch.json").read_text()) == {
        "update": update,
        "epoch": epoch,
        "micro_batches": [
            {"position": first + 4 * index, "samples": micro_batch}
            for index, micro_batch in enumerate(updates[update - 1])
        ],
    }
    assert result.stop_reason == (
        f"Stopping training due to NaN loss in training step (first at update {update}, samples "
        f"{', '.join(map(str, ids[:8]))})"
    )
    assert result.stop_reason in capsys.readouterr().out
    status = read_status(tmp_path)
    assert (status["state"], status["message"]) == ("stopped", result.stop_reason)


def test_a_stop_long_after_the_bad_update_still_names_that_one(tmp_path):
    trainer = toys.trainer_of([TerminateOnNaNCallback], with_batch_norm(), cls=Poisoned)
    result = toys.fit(trainer, toys.data(NUM_SAMPLES), num_epochs=3, checkpoints=Checkpointing(tmp_path))
    updates = windows(trainer.seen, accumulation=1)
    update = next(number for number, window in enumerate(updates, start=1) if holds(window))
    assert len(updates) == 6 and update < 6, "it was seen at the epoch's end"
    assert f"first at update {update}, " in result.stop_reason
    written = json.loads((tmp_path / "nan_batch.json").read_text())
    assert [entry["samples"] for entry in written["micro_batches"]] == updates[update - 1]


def test_a_save_that_finds_a_bad_update_ends_the_run_without_waiting_for_a_log(tmp_path):
    trainer = toys.trainer_of([], with_batch_norm(), cls=Poisoned)
    checkpoints = Checkpointing(tmp_path, every_updates=1)
    result = toys.fit(trainer, toys.data(NUM_SAMPLES), num_epochs=3, checkpoints=checkpoints, log_every=100)
    update = next(number for number, ids in enumerate(trainer.seen, start=1) if 5 in ids)
    assert update < 6, "the epoch would have gone on"
    assert result.updates == update
    assert f"the loss of update {update} is not finite" in result.stop_reason


def test_no_state_with_a_bad_update_in_it_is_ever_saved(tmp_path, capsys):
    trainer, _ = fit(variant(when=(2,)), tmp_path, [TerminateOnNaNCallback])
    update = next(number for number, window in enumerate(windows(trainer.seen), 1) if number > 3 and holds(window))
    newest, problems = find_newest(tmp_path)
    assert problems == [] and newest.name == f"step-{update - 1:010d}"
    assert all(bool(tensor.isfinite().all()) for tensor in read(newest).model.values())
    assert "Not saving" in capsys.readouterr().out


@pytest.mark.parametrize("value", ["ignore", "", None, True, "Stop"])
def test_a_policy_that_does_not_exist_is_refused(value):
    with pytest.raises(ConfigError, match=r'nan must be "stop" or "skip", got '):
        fit(nan=value)


def test_samples_of_a_custom_sampler_are_named_whatever_kind_of_numbers_it_yields(tmp_path):
    import numpy as np

    class NumpyBatches(BatchSampler):
        def __iter__(self):
            for ids in super().__iter__():
                yield [np.int64(index) for index in ids]

    sampler = NumpyBatches(RandomSampler(range(NUM_SAMPLES)), 4, False)
    kwargs = {"train_dataloader_kwargs": {"batch_sampler": sampler, "num_workers": 0}, "num_epochs": 1}
    trainer, result = fit(variant(), tmp_path / "stop", [TerminateOnNaNCallback], **kwargs)
    written = json.loads((tmp_path / "stop" / "nan_batch.json").read_text())
    assert [entry["samples"] for entry in written["micro_batches"]] == next(filter(holds, windows(trainer.seen)))
    trainer, result = fit(variant(), tmp_path / "skip", nan="skip", **kwargs)
    bad = next(filter(holds, windows(trainer.seen)))
    assert [one["samples"] for one in toys.numbers(tmp_path / "skip", "skipped_update")] == [bad[0] + bad[1]]
    assert result.stop_reason is None


def test_a_source_without_ids_is_stopped_and_skipped_without_them(tmp_path, capsys):
    stream = toys.Stream(toys.data(NUM_SAMPLES))
    result = toys.trained([TerminateOnNaNCallback], stream, cls=Poisoned, checkpoints=Checkpointing(tmp_path)).result
    assert result.stop_reason == "Stopping training due to NaN loss in training step (first at update 2)"
    assert json.loads((tmp_path / "nan_batch.json").read_text())["micro_batches"] == []
    toys.trained((), stream, cls=Poisoned, nan="skip")
    assert "Skipping update 2: its loss or gradient is not finite\n" in capsys.readouterr().out


def by_hand(updates: list[list[list[int]]], is_left_out) -> nn.Module:
    """Train as `fit` does in a plain loop over these samples, leaving out updates without a trace."""
    x, y, _ = toys.data(NUM_SAMPLES).tensors
    model = with_batch_norm()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    for window in updates:
        if is_left_out(window):
            continue
        total = sum(len(ids) for ids in window)
        for ids in window:
            (nn.functional.mse_loss(model(x[ids]), y[ids]) * (len(ids) / total)).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model


BAD = {"nan": Poisoned, "inf": variant(value=math.inf), "-inf": variant(value=-math.inf), "gradient": BadGradient}


@pytest.mark.parametrize("kind", BAD)
def test_a_skipped_update_leaves_no_trace_in_weights_momentum_schedule_and_buffers(kind, tmp_path, capsys):
    trainer, result = fit(BAD[kind], tmp_path, nan="skip")
    updates = windows(trainer.seen)
    bad = [number for number, window in enumerate(updates, start=1) if holds(window)]
    assert len(updates) == 6 and len(bad) == 2
    toys.assert_same_weights(trainer.model, by_hand(updates, holds))
    assert result.updates == 6 and result.stop_reason is None
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * 0.9**4)
    assert all(math.isfinite(value) for value in trainer.run_history.get_metric_values("train_loss_epoch"))
    said = capsys.readouterr().out
    for number in bad:
        ids = [index for micro_batch in updates[number - 1] for index in micro_batch]
        assert f"Skipping update {number}: its loss or gradient is not finite (samples {ids[0]}, " in said
    assert toys.numbers(tmp_path, "skipped_update") == [
        {
            "event": "skipped_update",
            "update": number,
            "epoch": 1 + (number > 3),
            "samples": [index for micro_batch in updates[number - 1] for index in micro_batch],
        }
        for number in bad
    ]
    assert json.loads((tmp_path / "nan_batch.json").read_text())["update"] == bad[-1]


def test_without_bad_updates_skipping_changes_no_bit():
    plain, _ = fit(variant(bad=()))
    guarded, _ = fit(variant(bad=()), nan="skip")
    toys.assert_same_weights(guarded.model, plain.model)
    assert guarded.run_history.state_dict() == plain.run_history.state_dict()


def test_the_loss_of_an_epoch_is_the_mean_of_the_updates_that_were_made():
    trainer, _ = fit(variant(), nan="skip", num_epochs=1)

    losses = []

    class Kept(Poisoned):
        def calculate_train_batch_loss(self, batch):
            output = super().calculate_train_batch_loss(batch)
            losses.append((batch[2].tolist(), output["loss"].item()))
            return output

    fit(Kept, nan="skip", num_epochs=1)
    updates = windows(trainer.seen)
    made = [ids for window in updates if not holds(window) for ids in window]
    kept = [(len(ids), loss) for ids, loss in losses if ids in made]
    expected = sum(count * loss for count, loss in kept) / sum(count for count, _ in kept)
    assert trainer.run_history.get_latest_metric("train_loss_epoch") == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("update", range(1, 7))
def test_a_run_with_skipped_updates_resumes_exactly_after_any_update(update, tmp_path):
    whole, _ = fit(folder=tmp_path / "whole", nan="skip")
    fit(folder=tmp_path / "parts", callbacks=[toys.stop_at(update)], nan="skip")
    resumed, _ = fit(folder=tmp_path / "parts", nan="skip", torch_seed=99, resume_from="auto")
    toys.assert_same_weights(resumed.model, whole.model)
    assert resumed.run_history.state_dict() == whole.run_history.state_dict()
    assert toys.numbers(tmp_path / "parts") == toys.numbers(tmp_path / "whole")


def test_ten_skipped_updates_in_a_row_end_the_run_and_one_good_one_restarts_the_count(tmp_path):
    everything = tuple(range(NUM_SAMPLES))
    trainer, result = fit(variant(bad=everything, when=tuple(range(9))), tmp_path, nan="skip", num_epochs=8)
    assert result.stop_reason == "Stopping training: 10 updates in a row were not finite"
    assert result.updates == 10
    assert read_status(tmp_path)["state"] == "stopped"
    toys.assert_same_weights(trainer.model, with_batch_norm())
    # Nine in a row, one good, nine in a row.
    _, result = fit(variant(bad=everything, when=(1, 2, 3, 5, 6, 7)), nan="skip", num_epochs=7)
    assert result.stop_reason is None and result.updates == 21


def test_the_count_of_skipped_updates_in_a_row_survives_a_resume(tmp_path):
    cls = variant(bad=tuple(range(NUM_SAMPLES)), when=tuple(range(9)))
    fit(cls, tmp_path, [toys.stop_at(7)], nan="skip", num_epochs=8)
    _, result = fit(cls, tmp_path, nan="skip", num_epochs=8, resume_from="auto")
    assert result.updates == 10 and "10 updates in a row" in result.stop_reason
    assert [one["update"] for one in toys.numbers(tmp_path, "skipped_update")] == list(range(1, 11))


def test_gradients_are_looked_at_before_they_are_clipped():
    trainer, _ = fit(BadGradient, nan="skip", gradient_clip_value=1e6, gradient_clip_norm=1e6)
    toys.assert_same_weights(trainer.model, by_hand(windows(trainer.seen), holds))


def skip_on_two() -> list:
    """Batch norm would carry a trace of the bad update."""
    watch = toys.watch(on_update_end=lambda trainer, **kwargs: toys.weights(trainer.get_model()).tolist())
    options = {
        "per_device_batch_size": 2,
        "seed": 3,
        "nan": "skip",
        "checkpoints": toys.saving(Path(os.environ["RUN"])),
    }
    trainer = toys.trained([watch], model=with_batch_norm(), momentum=0.0, cls=toys.PoisonedOnOne, **options)
    return [trainer.result.updates, watch.seen, toys.weights(trainer).tolist()]


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_skip_the_same_update_when_only_one_of_them_has_a_bad_loss(tmp_path):
    first, second = launch(skip_on_two, tmp_path, RUN=str(tmp_path / "run"))
    assert first == second
    updates, after, final = first
    assert updates == 4 and all(map(math.isfinite, final))
    assert after[1] == after[0] and after[2] != after[1], "update 2 changed nothing, update 3 did"
    skipped = toys.numbers(tmp_path / "run", "skipped_update")
    assert [one["update"] for one in skipped] == [2] and len(skipped[0]["samples"]) == 4
