"""Flaws 1 to 12: resume and checkpoints. One test per flaw, each named after the right behaviour."""

import contextlib
import math
import resource
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import StepLR

import toys

from . import subject


def save_states(folder: Path, **kwargs):
    return subject.callbacks.SaveTrainingStateCallback(save_dir=folder, **kwargs)


def test_flaw_01_a_resumed_run_trains_only_the_epochs_that_are_left(tmp_path):
    dataset = subject.data(16)
    whole = subject.trainer(model=subject.network(8, dropout=0.5))
    subject.fit(whole, dataset, num_epochs=4)

    first = subject.trainer([save_states(tmp_path, save_every_n_epochs=2)], subject.network(8, dropout=0.5))
    subject.fit(first, dataset, num_epochs=2)

    for state in ("epoch_2", "final"):
        resumed = subject.trainer(model=subject.network(8, dropout=0.5))
        subject.fit(resumed, dataset, num_epochs=4, resume_from=tmp_path / state)
        assert resumed.epochs == [3] * 4 + [4] * 4, state
        assert resumed.seen == whole.seen[8:], state
        assert torch.equal(subject.weights(resumed), subject.weights(whole)), state
        assert resumed.run_history.current_epoch == 5, state


def test_flaw_02_a_state_saved_inside_an_epoch_goes_on_with_the_next_batch(tmp_path):
    dataset = subject.data(16)
    whole = subject.trainer(
        [save_states(tmp_path, save_every_n_steps=3, save_at_end=False)], subject.network(8, dropout=0.5)
    )
    subject.fit(whole, dataset, num_epochs=2)
    assert toys.names_in(tmp_path) == {"step_3", "step_6"}

    for num_batches in (3, 6):
        resumed = subject.trainer(model=subject.network(8, dropout=0.5))
        subject.fit(resumed, dataset, num_epochs=2, resume_from=tmp_path / f"step_{num_batches}")
        assert resumed.seen == whole.seen[num_batches:]
        assert resumed.epochs == whole.epochs[num_batches:]
        assert torch.equal(subject.weights(resumed), subject.weights(whole))


def test_flaw_03_a_state_saved_many_times_with_a_scheduler_can_be_resumed(tmp_path):
    dataset = subject.data(16)
    schedule = partial(StepLR, step_size=4, gamma=0.5)
    whole = subject.trainer([save_states(tmp_path, save_every_n_epochs=1)])
    subject.fit(whole, dataset, num_epochs=4, create_scheduler_fn=schedule)
    assert whole.lrs == pytest.approx([0.05] * 4 + [0.025] * 4 + [0.0125] * 4 + [0.00625] * 4)

    resumed = subject.trainer()
    subject.fit(resumed, dataset, num_epochs=4, create_scheduler_fn=schedule, resume_from=tmp_path / "epoch_3")
    assert resumed.lrs == whole.lrs[12:]
    assert torch.equal(subject.weights(resumed), subject.weights(whole))


def test_flaw_04_a_state_named_after_a_step_holds_the_weights_after_its_update(tmp_path):
    dataset = subject.data(16)
    whole = subject.trainer([save_states(tmp_path / "plain", save_every_n_steps=2, save_at_end=False)])
    subject.fit(whole, dataset)
    resumed = subject.trainer()
    subject.fit(resumed, dataset, resume_from=tmp_path / "plain" / "step_2")
    assert torch.equal(resumed.weights_before[0], whole.weights_before[2])

    # Windows of two: a save that falls due inside one waits for its update, so no gradient is lost.
    dataset = subject.data(32)
    whole = subject.trainer([save_states(tmp_path / "windows", save_every_n_steps=3, save_at_end=False)])
    subject.fit(whole, dataset, gradient_accumulation_steps=2)
    assert toys.names_in(tmp_path / "windows") == {"step_4", "step_6"}
    for num_batches in (4, 6):
        resumed = subject.trainer()
        state = tmp_path / "windows" / f"step_{num_batches}"
        subject.fit(resumed, dataset, gradient_accumulation_steps=2, resume_from=state)
        assert torch.equal(resumed.weights_before[0], whole.weights_before[num_batches])
        assert torch.equal(subject.weights(resumed), subject.weights(whole))


def test_flaw_05_history_and_callbacks_go_on_where_they_stood(tmp_path):
    train_set, eval_set = subject.data(16), subject.data(8)

    def run(folder: Path, num_epochs: int, **kwargs):
        best = subject.callbacks.SaveBestModelCallback(str(folder / "best.pt"), load_saved_checkpoint=False)
        # No change is ever above this threshold: every epoch but the first counts as no improvement.
        patience = subject.callbacks.EarlyStoppingCallback(100, early_stopping_threshold=1e9)
        ema = subject.callbacks.ModelEmaCallback(decay=0.9, save_path=str(folder / "ema.pt"))
        saver = save_states(folder / "states", save_every_n_steps=6)
        folder.mkdir()
        trainer = subject.trainer([best, patience, ema, saver])
        subject.fit(trainer, train_set, num_epochs, eval_dataset=eval_set, **kwargs)
        return trainer, best, patience, ema

    whole, best, patience, ema = run(tmp_path / "whole", 4)
    first, *_ = run(tmp_path / "first", 2)

    for state in ("final", "step_6"):  # the end of epoch 2, and the middle of it
        resumed, best_again, patience_again, ema_again = run(
            tmp_path / f"resumed_{state}", 4, resume_from=tmp_path / "first" / "states" / state
        )
        for metric in ("train_loss_epoch", "eval_loss_epoch", "ema_model_eval_loss_epoch"):
            values = resumed.run_history.get_metric_values(metric)
            assert values == pytest.approx(whole.run_history.get_metric_values(metric)), (state, metric)
            assert len(values) == 4
        assert best_again.best_metric == pytest.approx(best.best_metric)
        assert best_again.best_metric_epoch == best.best_metric_epoch
        assert patience_again.early_stopping_patience_counter == patience.early_stopping_patience_counter == 3
        assert torch.allclose(subject.weights(ema_again.ema_model.module), subject.weights(ema.ema_model.module))


def test_flaw_06_the_newest_states_are_the_ones_that_are_kept(tmp_path):
    dataset = subject.data(16)
    trainer = subject.trainer([save_states(tmp_path, save_every_n_epochs=1, max_checkpoints=2)])
    subject.fit(trainer, dataset)
    assert toys.names_in(tmp_path) == {"epoch_1", "final"}

    subject.fit(trainer, dataset)  # writes states of the same two names
    assert toys.names_in(tmp_path) == {"epoch_1", "final"}
    for state in ("epoch_1", "final"):
        resumed = subject.trainer()
        subject.fit(resumed, dataset, num_epochs=2, resume_from=tmp_path / state)
        assert torch.equal(resumed.weights_before[0], subject.weights(trainer)), state

    subject.fit(trainer, dataset, num_epochs=3)
    assert toys.names_in(tmp_path) == {"epoch_3", "final"}


def test_flaw_07_a_resumed_run_does_not_overwrite_states_of_the_same_name(tmp_path):
    dataset = subject.data(16)
    first = subject.trainer([save_states(tmp_path, save_every_n_steps=2, save_at_end=False)])
    subject.fit(first, dataset)
    assert toys.names_in(tmp_path) == {"step_2", "step_4"}
    before = {name: toys.contents(tmp_path / name) for name in ("step_2", "step_4")}

    resumed = subject.trainer([save_states(tmp_path, save_every_n_steps=2, save_at_end=False)])
    subject.fit(resumed, dataset, num_epochs=2, resume_from=tmp_path / "step_4")
    assert toys.names_in(tmp_path) == {"step_2", "step_4", "step_6", "step_8"}
    assert before == {name: toys.contents(tmp_path / name) for name in ("step_2", "step_4")}


@contextlib.contextmanager
def no_file_larger_than(num_bytes: int):
    """Every write beyond that size of a file fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fails(write) -> bool:
    try:
        write()
    except Exception:  # noqa: BLE001 - which one is for the package to choose
        return True
    return False


def test_flaw_08_a_save_that_fails_half_way_leaves_the_earlier_copy_intact(tmp_path):
    dataset = subject.data(8)
    file, state = tmp_path / "model.pt", tmp_path / "state"
    trainer = subject.trainer(model=subject.network(20_000), lr=1e-5)
    subject.fit(trainer, dataset)
    trainer.save_checkpoint(file)
    trainer.save_training_state(state)
    saved = subject.weights(trainer)

    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.fill_(1.0)
    with no_file_larger_than(100_000):
        file_failed = fails(lambda: trainer.save_checkpoint(file))
        state_failed = fails(lambda: trainer.save_training_state(state))
    assert file_failed and state_failed, "a save that did not succeed must say so"

    loaded = subject.trainer(model=subject.network(20_000))
    loaded.load_checkpoint(file)
    assert torch.equal(subject.weights(loaded), saved)
    resumed = subject.trainer(model=subject.network(20_000), lr=1e-5)
    subject.fit(resumed, dataset, num_epochs=2, resume_from=state)
    assert torch.equal(resumed.weights_before[0], saved)
    assert len(resumed.seen) == 2


def wsd_scheduler(total_steps: int, **kwargs):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    return optimizer, subject.schedulers.WSDLrScheduler(optimizer, total_steps=total_steps, **kwargs)


def values_of(optimizer, scheduler, num_steps: int) -> list[float]:
    return [scheduler.step() or toys.lrs(optimizer)[0] for _ in range(num_steps)]


def test_flaw_09_a_wsd_scheduler_goes_on_at_the_step_it_was_saved_at():
    optimizer, scheduler = wsd_scheduler(100)
    values_of(optimizer, scheduler, 95)

    optimizer_again, again = wsd_scheduler(100)
    again.load_state_dict(scheduler.state_dict())
    assert again.get_current_step() == 94
    values = values_of(optimizer_again, again, 5)
    assert values[0] == pytest.approx(1 - math.sqrt(0.5), abs=1e-5)  # half way down: 0.293
    assert values == values_of(optimizer, scheduler, 5)


def test_flaw_10_a_wsd_continuation_starts_a_fresh_stable_phase_without_warmup():
    optimizer, scheduler = wsd_scheduler(100, num_warmup_steps=10)
    values_of(optimizer, scheduler, 95)

    optimizer, continued = wsd_scheduler(200, num_warmup_steps=10, is_continuation_from_checkpoint=True)
    continued.load_state_dict(scheduler.state_dict())
    assert continued.is_continuation_from_checkpoint
    assert (continued.total_steps, continued.get_current_step()) == (200, -1)
    values = values_of(optimizer, continued, 191)
    assert values[:180] == [1.0] * 180
    assert values[190] == pytest.approx(1 - math.sqrt(0.5), abs=1e-5)


def test_flaw_11_what_was_saved_as_a_checkpoint_can_be_loaded_in_a_fresh_trainer(tmp_path):
    extras = {"score": np.float64(0.5), "count": np.int64(3), "source": Path("some") / "where"}
    trainer = subject.trainer()
    subject.fit(trainer, subject.data(8), create_scheduler_fn=partial(StepLR, step_size=1, gamma=0.5))
    trainer.save_checkpoint(tmp_path / "with_extras.pt", checkpoint_kwargs=extras, save_scheduler=False)
    trainer.save_checkpoint(tmp_path / "with_scheduler.pt")

    for name in ("with_extras.pt", "with_scheduler.pt"):
        fresh = subject.trainer()
        checkpoint = fresh.load_checkpoint(tmp_path / name)
        assert torch.equal(subject.weights(fresh), subject.weights(trainer)), name
        assert fresh.optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * 0.25), name
        assert ("scheduler_state_dict" in checkpoint) == (name == "with_scheduler.pt")
        if name == "with_extras.pt":
            assert (checkpoint["score"], checkpoint["count"]) == (0.5, 3)
            assert Path(checkpoint["source"]) == extras["source"]


def test_flaw_12_the_best_model_is_saved_as_asked_and_only_what_was_saved_is_loaded(tmp_path):
    class Scored(subject.recording_trainer_class()):
        def train_epoch_end(self):
            self.run_history.update_metric("score", self.scores.pop(0))

    def run(name: str, scores: list[float], more_callbacks=(), **kwargs):
        best = subject.callbacks.SaveBestModelCallback(
            str(tmp_path / name), watch_metric="score", greater_is_better=True, **kwargs
        )
        trainer = subject.trainer([best, *more_callbacks], cls=Scored)
        trainer.scores = list(scores)
        schedule = partial(StepLR, step_size=100)
        subject.fit(trainer, subject.data(8), len(scores), create_scheduler_fn=schedule)
        return trainer, best

    run("first.pt", [0.1], save_scheduler=False)
    first = torch.load(tmp_path / "first.pt", weights_only=True)
    assert "scheduler_state_dict" not in first
    assert first["score"] == 0.1

    _, best = run("later.pt", [0.1, 0.3, 0.2])
    later = torch.load(tmp_path / "later.pt", weights_only=True)
    assert later["score"] == best.best_metric == 0.3
    assert best.best_metric_epoch == 2
    assert "loss" not in later
    assert "scheduler_state_dict" in later

    _, best = run("after_nan.pt", [math.nan, 0.3, 0.2])
    assert best.best_metric == 0.3
    assert torch.load(tmp_path / "after_nan.pt", weights_only=True)["score"] == 0.3

    # A run that ends before anything was saved loads nothing: no missing file, and no stale one.
    plain = subject.trainer()
    subject.fit(plain, subject.data(8))
    for name in ("missing.pt", "later.pt"):
        trainer, best = run(name, [0.5], more_callbacks=[subject.stop_at("on_train_epoch_end")])
        assert best.best_metric is None, name
        assert torch.equal(subject.weights(trainer), subject.weights(plain)), name
    assert not (tmp_path / "missing.pt").exists()
