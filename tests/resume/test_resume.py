"""A resumed run is the run that was never interrupted: every weight, moment, metric and counter, bit by bit."""

import os
import random
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

import toys
from distributed.launcher import exit_code
from loopwright import Checkpointing, Trainer, TrainerPlaceholderValues
from loopwright.callbacks import (
    EarlyStoppingCallback,
    ModelEmaCallback,
    SaveBestModelCallback,
    SaveTrainingStateCallback,
    StopTrainingError,
    TrainerCallback,
)
from loopwright.checkpoint import read
from loopwright.errors import CheckpointError, ConfigError
from loopwright.schedulers import CosineLrScheduler, WSDLrScheduler, get_scheduler
from toys import Augmented, assert_same, save_at_updates, state_of

NUM_EPOCHS = 2
UPDATES_PER_EPOCH = 5  # nine micro-batches of two, in windows of two: the last one is short
NUM_UPDATES = NUM_EPOCHS * UPDATES_PER_EPOCH
EVERY_UPDATE = range(1, NUM_UPDATES + 1)
SEED = 11


# What is trained


class Net(nn.Module):
    """Dropout, batch norm with its integer buffer (unless told otherwise), and weights that are tied."""

    def __init__(self, width: int = 6, has_norm: bool = True):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.inner, self.again = nn.Linear(4, width), nn.Linear(4, width)
            self.norm = nn.BatchNorm1d(width) if has_norm else nn.Identity()
            self.dropout, self.outer = nn.Dropout(0.3), nn.Linear(width, 1)
        self.again.weight = self.inner.weight

    def forward(self, x):
        return self.outer(self.dropout(torch.tanh(self.norm(self.inner(x) + self.again(x)))))


class Measured(Trainer):
    """Records metrics of several types, and which samples each micro-batch held."""

    def __init__(self, *args, **kwargs):
        self.seen = []
        super().__init__(*args, **kwargs)

    def calculate_train_batch_loss(self, batch):
        self.seen.append(batch[0])
        return super().calculate_train_batch_loss(batch)

    def eval_epoch_end(self):
        total = sum(parameter.detach().sum() for parameter in self.model.parameters())
        self.run_history.update_metric("tensor", total)
        self.run_history.update_metric("numpy", np.float64(total.item()))


class Totals(TrainerCallback):
    """A callback with state of its own: a number, a tensor, a string, and a tuple that grows."""

    def __init__(self):
        self.losses, self.total, self.where = 0, torch.zeros(3), ()
        self.logs = []  # not part of the state: what this process saw

    def on_train_step_end(self, trainer, batch_output=None, **kwargs):
        self.losses += 1
        self.total += batch_output["loss"].detach()

    def on_update_end(self, trainer, **kwargs):
        self.where = (*self.where, (trainer.progress.epoch, trainer.progress.samples))

    def on_log(self, trainer, logs=None, **kwargs):
        self.logs.append(logs)

    def state_dict(self):
        return {"losses": self.losses, "total": self.total, "where": self.where}

    def load_state_dict(self, state):
        self.losses, self.total, self.where = state["losses"], state["total"].clone(), state["where"]


def one_cycle():
    epochs, steps = TrainerPlaceholderValues.NUM_EPOCHS, TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH
    return partial(lr_scheduler.OneCycleLR, max_lr=0.05, epochs=epochs, steps_per_epoch=steps)


def run(folder, callbacks=(), model=None, num_workers=0, seed=None, num_epochs=NUM_EPOCHS, **kwargs):
    """Train with everything that can go wrong on resume; everything is made anew. Return what came of it."""
    folder.mkdir(parents=True, exist_ok=True)
    model = Net() if model is None else model
    totals = Totals()
    early_stopping = EarlyStoppingCallback(early_stopping_patience=100, early_stopping_threshold=10.0)
    best = SaveBestModelCallback(folder / "best.pt", load_saved_checkpoint=False)
    ema = ModelEmaCallback(decay=0.7, save_path=folder / "ema.pt")
    callbacks = [totals, early_stopping, best, ema, *callbacks]
    trainer = Measured(model, nn.MSELoss(), torch.optim.AdamW(model.parameters(), lr=0.01), callbacks)
    often = {"log_every": 2, "evaluate_every": 3}
    windows = {"per_device_batch_size": 2, "gradient_accumulation_steps": 2, "gradient_clip_norm": 1.0}
    loading = dict.fromkeys(("train_dataloader_kwargs", "eval_dataloader_kwargs"), {"num_workers": num_workers})
    kwargs = {"create_scheduler_fn": one_cycle(), "seed": seed, **often, **windows, **loading, **kwargs}
    result = trainer.train(Augmented(18), num_epochs, Augmented(7), **kwargs)
    history = trainer.run_history
    return {
        "weights": state_of(trainer.model),
        "tied": trainer.model.inner.weight is trainer.model.again.weight,
        "optimizer": trainer.optimizer.state_dict(),
        "scheduler": None if trainer.scheduler is None else trainer.scheduler.state_dict(),
        "lr": trainer.optimizer.param_groups[0]["lr"],
        "history": {name: list(history.get_metric_values(name)) for name in history.get_metric_names()},
        "epoch": history.current_epoch,
        "progress": trainer.progress.state_dict(),
        "ema": state_of(ema.ema_model.module),
        "ema_best": (ema.best_metric, ema.best_metric_epoch),
        "best": (best.best_metric, best.best_metric_epoch),
        "early_stopping": (early_stopping.best_metric, early_stopping.early_stopping_patience_counter),
        "totals": totals.state_dict(),
        "result": {"seed": result.seed, "updates": result.updates, "epochs": result.epochs, "metrics": result.metrics},
        # What this process saw: compared by its tail.
        "_logs": totals.logs,
        "_seen": trainer.seen,
        "_stop_reason": result.stop_reason,
    }


def resume(folder, state, callbacks=(), **kwargs):
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(99)
    return run(folder, callbacks, resume_from=state, **kwargs)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that was never interrupted; its states after each update are in the folder."""
    folder = tmp_path_factory.mktemp("whole")
    outcome = run(folder, [save_at_updates(folder)], seed=SEED)
    assert outcome["progress"]["update"] == NUM_UPDATES
    return outcome, folder


def assert_tail(found, expected):
    """What the resumed process saw is the end of what the whole run saw."""
    for name in ("_logs", "_seen"):
        assert_same(found[name], expected[name][len(expected[name]) - len(found[name]) :], name)


def num_micro_batches_after(update: int) -> int:
    epochs, rest = divmod(update, UPDATES_PER_EPOCH)
    return (NUM_EPOCHS - epochs) * 9 - 2 * rest


# Every update


def compared(outcome):
    """What is compared as a whole, with metrics as plain numbers: numpy scalars are saved as Python ones."""
    history = {name: [float(value) for value in outcome["history"][name]] for name in sorted(outcome["history"])}
    metrics = {name: float(value) for name, value in sorted(outcome["result"]["metrics"].items())}
    outcome = {**outcome, "history": history, "result": {**outcome["result"], "metrics": metrics}}
    return {name: value for name, value in outcome.items() if not name.startswith("_")}


def assert_same_run(found, expected):
    assert_same(compared(found), compared(expected))
    assert_tail(found, expected)


@pytest.mark.parametrize("update", EVERY_UPDATE)
def test_a_run_resumed_after_any_update_ends_as_if_never_interrupted(update, whole, tmp_path):
    expected, folder = whole
    found = resume(tmp_path, folder / f"update_{update}")
    assert_same_run(found, expected)
    assert len(found["_seen"]) == num_micro_batches_after(update)
    assert found["tied"] and found["result"]["seed"] == SEED


def test_the_run_under_test_uses_everything_it_claims_to(whole):
    expected, _ = whole
    history = expected["history"]
    per_epoch = {
        "train_loss_epoch",
        "eval_loss_epoch",
        "ema_model_eval_loss_epoch",
        "ema_model_tensor",
        "ema_model_numpy",
    }
    lengths = {**dict.fromkeys(per_epoch, 2), "intermediate_eval_loss": 3, "tensor": 5, "numpy": 5}
    assert {name: len(values) for name, values in history.items()} == lengths
    assert len(set(map(float, history["tensor"]))) >= 4
    assert expected["early_stopping"][1] == 1
    assert len({log["lr"] for log in expected["_logs"]}) == 6
    assert expected["totals"]["losses"] == 18 and len(expected["totals"]["where"]) == NUM_UPDATES
    assert [log["update"] for log in expected["_logs"]] == [2, 4, 5, 6, 8, 10]
    # The same samples in both epochs, in another order and with other noise.
    first, second = torch.cat(expected["_seen"][:9]), torch.cat(expected["_seen"][9:])
    assert not torch.allclose(first.sort(0).values, second.sort(0).values, atol=1e-3)


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (2, 2)])
def test_the_number_of_workers_may_change(before, after, whole, tmp_path):
    expected, folder = whole
    if before:
        folder = tmp_path / "first"
        run(folder, [save_at_updates(folder), toys.stop_at(3)], seed=SEED, num_workers=before)
    found = resume(tmp_path / "second", folder / "update_3", num_workers=after)
    assert_same_run(found, expected)


def test_several_resumes_in_a_row_change_nothing(whole, tmp_path):
    expected, folder = whole
    state = folder / "update_1"
    for update in (2, 5, 9):
        here = tmp_path / str(update)
        partial_run = resume(here, state, [save_at_updates(here), toys.stop_at(update, "again")])
        assert partial_run["_stop_reason"] == "again" and partial_run["progress"]["update"] == update
        state = here / f"update_{update}"
    assert_same_run(resume(tmp_path / "last", state), expected)


def test_a_resumed_run_writes_the_same_states_as_the_whole_one(whole, tmp_path):
    _, folder = whole
    resume(tmp_path, folder / "update_4", [save_at_updates(tmp_path)])
    for update in (5, 8, 10):
        found, expected = read(tmp_path / f"update_{update}"), read(folder / f"update_{update}")
        assert_same(found.model, expected.model)
        for name in ("run", "optimizer", "scheduler", "history", "generators", "metadata"):
            assert_same(found.state[name], expected.state[name], name)


# In processes of their own


def test_a_run_that_dies_in_one_process_ends_in_another_as_if_nothing_had_happened(whole, tmp_path):
    expected, _ = whole
    assert exit_code(die_at, tmp_path, 7) == 9
    assert (tmp_path / "checkpoints" / "step-0000000006").is_dir()
    assert exit_code(end, tmp_path) == 0
    found = torch.load(tmp_path / "outcome.pt", weights_only=False)
    assert_same_run(found, expected)
    assert found["result"]["seed"] == SEED
    assert len(found["_seen"]) == num_micro_batches_after(6)


def every_update(folder):
    return Checkpointing(folder / "checkpoints", every_updates=1, asynchronous=False)


def die_at(folder, update):
    die = toys.at_update(update, lambda trainer: os._exit(9))
    run(folder, [die], seed=SEED, checkpoints=every_update(folder))


def end(folder):
    torch.save(run(folder, checkpoints=every_update(folder), resume_from="auto"), folder / "outcome.pt")


# Ends of epochs and of runs


@pytest.mark.parametrize("name", ["epoch_1", "epoch_2", "final"])
def test_a_state_saved_at_the_end_of_an_epoch_continues_with_the_next(name, whole, tmp_path):
    expected, _ = whole
    first = run(tmp_path, [SaveTrainingStateCallback(tmp_path, save_every_n_epochs=1)], seed=SEED)
    assert_same_run(first, expected)
    found = resume(tmp_path / "again", tmp_path / name)
    assert_same_run(found, expected)
    assert len(found["_seen"]) == (9 if name == "epoch_1" else 0)


def test_resuming_a_finished_run_trains_nothing(whole, tmp_path):
    expected, _ = whole
    run(tmp_path, [SaveTrainingStateCallback(tmp_path)], seed=SEED)
    names = ("on_training_run_start", "on_train_epoch_start", "on_eval_epoch_start", "on_training_run_end")
    watch = toys.watch(**{name: lambda trainer, name=name, **kwargs: name for name in names})
    found = resume(tmp_path / "again", tmp_path / "final", [watch])
    assert_same_run(found, expected)
    assert found["_seen"] == [] and found["_stop_reason"] is None
    assert watch.seen == ["on_training_run_start", "on_training_run_end"]


def test_a_finished_run_given_more_epochs_continues_as_the_longer_run_would(tmp_path):
    constant = {"create_scheduler_fn": None}
    longer = run(tmp_path / "longer", seed=SEED, num_epochs=4, **constant)
    run(tmp_path / "short", [SaveTrainingStateCallback(tmp_path / "short")], seed=SEED, num_epochs=2, **constant)
    found = resume(tmp_path / "again", tmp_path / "short" / "final", num_epochs=4, **constant)
    assert_same_run(found, longer)
    assert len(found["_seen"]) == 18


@pytest.mark.parametrize("limit", [1, 5, 7])
def test_a_run_cut_short_by_a_limit_continues_with_a_larger_one(limit, tmp_path):
    schedule = {"create_scheduler_fn": partial(lr_scheduler.StepLR, step_size=3, gamma=0.5)}
    expected = run(tmp_path / "whole", seed=SEED, **schedule)
    checkpoints = Checkpointing(tmp_path / "checkpoints", every_updates=2)
    first = run(tmp_path, seed=SEED, max_num_train_steps=limit, checkpoints=checkpoints, **schedule)
    assert first["progress"]["update"] == limit
    found = resume(tmp_path / "again", "auto", checkpoints=checkpoints, max_num_train_steps=NUM_UPDATES, **schedule)
    for name in ("weights", "optimizer", "scheduler", "ema", "totals", "progress", "lr", "epoch"):
        assert_same(found[name], expected[name], name)
    assert_tail(found, {**expected, "_logs": found["_logs"]})
    assert len(found["_seen"]) == num_micro_batches_after(limit)
    # The run that was cut short has reported the epoch it was cut in; the rest is as it would have been.
    reports = 2 if limit == 5 else 3
    for metric in ("train_loss_epoch", "eval_loss_epoch", "ema_model_eval_loss_epoch"):
        values, wanted = found["history"][metric], expected["history"][metric]
        assert len(values) == reports and values[-1] == wanted[-1] and wanted[0] in values


@pytest.mark.parametrize("limit", [5, 7, 10])
def test_a_limited_run_that_dies_after_its_last_update_still_reports_its_last_epoch(limit, tmp_path):
    saver = save_at_updates(tmp_path)
    limited = run(tmp_path, [saver], seed=SEED, max_num_train_steps=limit)
    found = resume(tmp_path / "again", tmp_path / f"update_{limit}", max_num_train_steps=limit)
    assert_same_run(found, limited)
    assert found["_seen"] == []
    # Once the epoch is reported, resuming does nothing.
    run(tmp_path / "b", [SaveTrainingStateCallback(tmp_path / "b")], seed=SEED, max_num_train_steps=limit)
    again = resume(tmp_path / "c", tmp_path / "b" / "final", max_num_train_steps=limit)
    assert_same_run({**again, "epoch": limited["epoch"]}, limited)
    assert again["_seen"] == []


def stop_where(event, is_there):
    def stop(trainer, **kwargs):
        if is_there(trainer, **kwargs):
            raise StopTrainingError("enough")

    return toys.callback(**{event: stop})


@pytest.mark.parametrize(
    ("event", "is_there", "updates"),
    [
        ("on_train_step_start", lambda trainer, **kwargs: trainer.progress.update == 4, 4),
        ("on_train_step_end", lambda trainer, step, **kwargs: trainer.progress.epoch == 1 and step == 5, 7),
        ("on_before_optimizer_step", lambda trainer, **kwargs: trainer.progress.update == 6, 6),
        ("on_update_end", lambda trainer, **kwargs: trainer.progress.update == 4, 4),
        ("on_update_end", lambda trainer, **kwargs: trainer.progress.update == 5, 5),
        ("on_train_epoch_start", lambda trainer, **kwargs: trainer.progress.epoch == 1, 5),
    ],
)
def test_a_stopped_run_can_be_resumed_to_the_end_it_would_have_had(event, is_there, updates, tmp_path):
    # Without batch norm: the forward passes of a window that is stopped have moved its running means.
    expected = run(tmp_path / "whole", model=Net(has_norm=False), seed=SEED)
    callbacks = [SaveTrainingStateCallback(tmp_path), stop_where(event, is_there)]  # last: nobody misses the event
    stopped = run(tmp_path, callbacks, Net(has_norm=False), seed=SEED)
    assert stopped["_stop_reason"] == "enough" and stopped["progress"]["update"] == updates
    found = resume(tmp_path / "again", tmp_path / "final", model=Net(has_norm=False))
    if event in ("on_train_step_end", "on_before_optimizer_step"):
        # This callback has counted the losses of the stopped window, and counts them again when it is repeated.
        found["totals"] = expected["totals"]
    assert_same(compared(found), compared(expected))
    assert_same(found["_seen"], expected["_seen"][-len(found["_seen"]) :], "seen")


def test_a_run_stopped_early_continues_with_the_next_epoch(tmp_path):
    def trained(patience, **kwargs):
        early_stopping = EarlyStoppingCallback(patience, early_stopping_threshold=100.0)
        callbacks = [early_stopping, SaveTrainingStateCallback(tmp_path / f"{patience}")]
        return toys.trained(callbacks, num_epochs=4, eval_dataset=toys.data(8), **kwargs)

    whole = trained(100)
    stopped = trained(2)
    assert stopped.result.epochs == 3 and stopped.progress.batch == 0
    resumed = trained(3, resume_from=tmp_path / "2" / "final")
    early_stopping = resumed.callback_handler.callbacks[0]
    assert early_stopping.early_stopping_patience_counter == 3, "the count went on from 2"
    assert resumed.epochs == [4] * 4
    assert torch.equal(toys.weights(resumed), toys.weights(whole))
    assert resumed.run_history.latest() == whole.run_history.latest()


# Checkpointing, and "auto"


def saved_updates(folder):
    return sorted(int(path.name.removeprefix("step-")) for path in folder.iterdir() if path.is_dir())


def test_checkpoints_are_written_as_often_as_asked_and_only_the_last_are_kept(tmp_path):
    def saved(**kwargs):
        folder = tmp_path / str(kwargs)
        toys.trained((), toys.data(20), 4, checkpoints=Checkpointing(folder, **kwargs))
        return saved_updates(folder)

    # Five updates per epoch, twenty in all; the last one is always saved.
    assert saved(every_updates=6, keep_last=10) == [6, 12, 18, 20]
    assert saved(every_updates=6, keep_last=2) == [18, 20]
    assert saved(every_epochs=2, keep_last=10) == [10, 20]
    assert saved(every_epochs=3, every_updates=8, keep_last=10) == [8, 15, 16, 20]
    assert saved(keep_last=10) == [20]
    assert saved(every_updates=5) == [10, 15, 20]


def test_auto_starts_from_scratch_where_there_is_nothing_and_continues_where_there_is_something(whole, tmp_path):
    expected, _ = whole
    checkpoints = Checkpointing(tmp_path / "checkpoints", every_updates=2)
    first = run(tmp_path / "a", [toys.stop_at(5)], seed=SEED, checkpoints=checkpoints, resume_from="auto")
    assert first["_stop_reason"] == "enough"
    assert saved_updates(tmp_path / "checkpoints") == [2, 4, 5]
    found = resume(tmp_path / "b", "auto", checkpoints=checkpoints)
    assert_same_run(found, expected)
    assert len(found["_seen"]) == num_micro_batches_after(5)
    again = resume(tmp_path / "c", "auto", checkpoints=checkpoints)
    assert_same_run(again, expected)
    assert again["_seen"] == []


def test_auto_falls_back_over_a_damaged_newest_checkpoint_and_reports_it(whole, tmp_path, capsys):
    expected, _ = whole
    checkpoints = Checkpointing(tmp_path / "checkpoints", every_updates=3, keep_best=None)
    run(tmp_path / "a", seed=SEED, checkpoints=checkpoints)
    assert saved_updates(tmp_path / "checkpoints") == [6, 9, 10]
    for update, name in ((9, "state.safetensors"), (10, "model.safetensors")):
        path = checkpoints.path(update) / name
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    capsys.readouterr()
    found = resume(tmp_path / "b", "auto", checkpoints=checkpoints)
    assert_same_run(found, expected)
    assert len(found["_seen"]) == num_micro_batches_after(6)
    said = capsys.readouterr().out
    assert said.count("Skipping a bad checkpoint") == 2
    assert f"Resumed training state from {checkpoints.path(6)} (epoch 2)" in said
    # The damaged ones of the same name have been written anew, and the one resumed from is kept.
    assert read(checkpoints.path(10)).update == 10
    assert checkpoints.path(6).is_dir()


def test_auto_refuses_to_start_from_scratch_where_every_checkpoint_is_bad(tmp_path):
    checkpoints = Checkpointing(tmp_path, every_updates=2)
    toys.trained((), toys.data(8), checkpoints=checkpoints)
    for path in tmp_path.glob("step-*"):
        (path / "state.json").write_text("{}")
    trainer = toys.trainer_of()
    with pytest.raises(CheckpointError, match="no checkpoint can be trusted"):
        toys.fit(trainer, toys.data(8), checkpoints=checkpoints, resume_from="auto")
    assert trainer.seen == []


def test_a_folder_of_checkpoints_stands_for_its_newest(whole, tmp_path):
    expected, folder = whole
    found = resume(tmp_path, folder)
    assert_same_run(found, expected)
    assert len(found["_seen"]) == num_micro_batches_after(NUM_UPDATES)


def test_a_checkpoint_that_is_named_is_not_replaced_by_another_when_it_is_bad(whole, tmp_path):
    _, folder = whole
    shutil.copytree(folder / "update_3", tmp_path / "bad")
    (tmp_path / "bad" / "extra").write_text("x")
    with pytest.raises(CheckpointError, match=r"unlisted files \['extra'\]"):
        resume(tmp_path / "again", tmp_path / "bad")


@pytest.mark.parametrize(
    ("resume_from", "message"),
    [("auto", "needs checkpoints=Checkpointing"), ("nowhere", "is not a folder"), ("empty", "holds no checkpoint")],
)
def test_a_resume_from_nothing_is_refused_before_anything_is_touched(resume_from, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    trainer = toys.trained((), toys.data(8))
    before = trainer.run_history.latest()
    with pytest.raises(ConfigError, match=message):
        toys.fit(trainer, toys.data(8), resume_from=resume_from)
    assert trainer.run_history.latest() == before


# What is not the same run


def test_a_model_of_another_shape_is_refused_by_name(whole, tmp_path):
    _, folder = whole
    with pytest.raises(CheckpointError, match=r"of another model\. .*inner\.weight: \(6, 4\) saved, \(7, 4\) in the"):
        resume(tmp_path, folder / "update_3", model=Net(width=7))

    class WithMore(Net):
        def __init__(self):
            super().__init__()
            self.more = nn.Linear(1, 1)

    with pytest.raises(CheckpointError, match=r"more\.bias: absent saved, \(1,\) in the model; more\.weight"):
        resume(tmp_path, folder / "update_3", model=WithMore())


def test_an_optimizer_of_other_parameters_is_refused_by_name_and_nothing_is_loaded(tmp_path):
    toys.trained((), toys.data(8), model=toys.network(6), checkpoints=Checkpointing(tmp_path))
    model = toys.network(6)
    optimizer = torch.optim.SGD(model[3].parameters(), lr=0.05, momentum=0.9)
    with pytest.raises(CheckpointError, match=r"not in the optimizer: \['0\.bias', '0\.weight'\]"):
        toys.trained((), toys.data(8), 2, model=model, optimizer=optimizer, resume_from=tmp_path)
    toys.assert_same_weights(model, toys.network(6))


def test_an_optimizer_whose_groups_are_in_another_order_resumes_exactly(tmp_path):
    def run_with(groups_of, **kwargs):
        model = toys.network(6, dropout=0.2)
        optimizer = torch.optim.AdamW(groups_of(model), lr=0.05)
        return toys.weights(toys.trained(num_epochs=2, model=model, optimizer=optimizer, **kwargs))

    def head_apart(model):
        return [{"params": model[3].parameters(), "lr": 0.01}, {"params": model[0].parameters()}]

    checkpoints = Checkpointing(tmp_path, every_updates=3, keep_last=10)
    expected = run_with(head_apart, checkpoints=checkpoints)
    found = run_with(lambda model: reversed(head_apart(model)), resume_from=tmp_path / "step-0000000003")
    assert torch.equal(found, expected)


# Schedulers, losses with weights, and other kinds of data


SCHEDULERS = {
    "StepLR": partial(lr_scheduler.StepLR, step_size=3, gamma=0.5),
    "MultiStepLR": partial(lr_scheduler.MultiStepLR, milestones=[2, 2, 6], gamma=0.5),
    "LambdaLR": partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
    "OneCycleLR": partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=15),
    "CosineAnnealingWarmRestarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=3, T_mult=2),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer, 0.1, 4), lr_scheduler.ExponentialLR(optimizer, 0.9)], [4]
    ),
    "ReduceLROnPlateau": partial(lr_scheduler.ReduceLROnPlateau, mode="max", patience=0, factor=0.5),
    "CosineLrScheduler": CosineLrScheduler.create_scheduler_fn(),
    "WSDLrScheduler": WSDLrScheduler.create_scheduler_fn(decay_phase_ratio=0.3, num_checkpoints=2),
    "linear": lambda optimizer: get_scheduler("linear", optimizer, 2, 15),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_resumes_where_it_was(name, tmp_path):
    def run_with(callbacks=(), **kwargs):
        options = {"eval_dataset": toys.data(8), "create_scheduler_fn": SCHEDULERS[name], **kwargs}
        return toys.trained(callbacks, toys.data(20), 3, **options)

    whole = run_with([save_at_updates(tmp_path)])
    assert len(set(whole.lrs)) > 1 and len(whole.lrs) == 15
    for update in (2, 5, 12):
        resumed = run_with(resume_from=tmp_path / f"update_{update}")
        assert resumed.lrs == whole.lrs[update:], update
        assert torch.equal(toys.weights(resumed), toys.weights(whole)), update
        assert resumed.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]


class WeightedLoss(nn.Module):
    """A loss with a weight of its own, which is trained, and a count, which is not."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, outputs, targets):
        self.calls += 1
        return (nn.functional.mse_loss(outputs, targets) * self.scale.exp() - self.scale).sum()


def test_a_loss_with_weights_is_part_of_the_state(tmp_path):
    def run_with(callbacks=(), **kwargs):
        model, loss = toys.network(), WeightedLoss()
        optimizer = torch.optim.Adam([*model.parameters(), *loss.parameters()], lr=0.05)
        kwargs = {"model": model, "loss_func": loss, "optimizer": optimizer, "cls": Trainer, **kwargs}
        return toys.trained(callbacks, num_epochs=2, **kwargs)

    whole = run_with([save_at_updates(tmp_path)])
    resumed = run_with(resume_from=tmp_path / "update_3")
    toys.assert_same_weights(resumed.loss_func, whole.loss_func)
    assert int(whole.loss_func.calls) == 8
    assert torch.equal(toys.weights(resumed), toys.weights(whole))


class Stream(IterableDataset):
    def __iter__(self):
        for x, y, index in toys.data(20):
            yield x + random.random() + torch.rand(1), y, index


DATA = {
    "sampler": lambda: (toys.data(20), {"sampler": WeightedRandomSampler(torch.rand(20), 20)}),
    "batch_sampler": lambda: (toys.data(20), {"batch_sampler": [[0, 1, 2], [5, 6], [3, 3, 3, 4], [19], [7, 8, 9]]}),
    "drop_last": lambda: (toys.data(18), {"drop_last": True}),
    "loader": lambda: (DataLoader(toys.data(20), batch_size=4, shuffle=True), {}),
    "iterable": lambda: (Stream(), {}),
}


@pytest.mark.parametrize("kind", DATA)
def test_every_kind_of_data_resumes_where_it_was(kind, tmp_path):
    def run_with(callbacks=(), **kwargs):
        torch.manual_seed(5)
        dataset, loader_kwargs = DATA[kind]()
        options = {"model": toys.network(6, dropout=0.3), "train_dataloader_kwargs": loader_kwargs, **kwargs}
        return toys.trained(callbacks, dataset, 2, **options)

    whole = run_with([save_at_updates(tmp_path)])
    assert len(whole.seen) in (8, 10)
    for update in (1, len(whole.seen) // 2, len(whole.seen) // 2 + 2):
        resumed = run_with(torch_seed=None, resume_from=tmp_path / f"update_{update}")
        toys.assert_resumed(resumed, whole, update)


def test_a_trainer_that_has_run_before_resumes_like_a_new_one(tmp_path):
    reference = toys.trained([save_at_updates(tmp_path)], toys.data(20), 2, model=toys.network(6, dropout=0.3))
    trainer = toys.trained((), toys.data(12), 3, model=toys.network(6, dropout=0.3), torch_seed=1)
    toys.fit(trainer, toys.data(20), num_epochs=2, torch_seed=2, resume_from=tmp_path / "update_7")
    assert torch.equal(toys.weights(trainer), toys.weights(reference))
    assert trainer.run_history.latest() == reference.run_history.latest()
    assert trainer.run_history.current_epoch == reference.run_history.current_epoch


def test_a_resumed_run_that_counts_epochs_on_from_an_earlier_one_counts_them_alike(tmp_path):
    whole = toys.trained((), toys.data(8), 3)
    whole.callback_handler.add_callback(save_at_updates(tmp_path))
    toys.fit(whole, toys.data(8), num_epochs=2, reset_run_history=False)
    resumed = toys.trained((), toys.data(8), 2, resume_from=tmp_path / "update_3")
    assert resumed.epochs == [5] and whole.epochs[-4:] == [4, 4, 5, 5]
    assert resumed.run_history.current_epoch == whole.run_history.current_epoch == 6
    losses = whole.run_history.get_metric_values("train_loss_epoch")
    assert resumed.run_history.get_metric_values("train_loss_epoch") == losses


@pytest.mark.parametrize("is_fused", [False, True])
def test_moments_of_channels_last_weights_keep_their_layout(is_fused, tmp_path):
    """A fused optimizer walks through memory: contiguous moments would belong to other weights."""

    def trained(**options):
        layers = nn.Conv2d(3, 4, 5), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
        model = toys.seeded(lambda: nn.Sequential(*layers), seed=1).to(memory_format=torch.channels_last)
        for each in layers:
            if hasattr(each, "reset_parameters"):
                toys.seeded(each.reset_parameters, seed=2)
        model.to(memory_format=torch.channels_last)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=is_fused)
        trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=[])
        images = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        rows = TensorDataset(images, torch.arange(16) % 2)
        trainer.train(rows, 2, per_device_batch_size=4, seed=3, **options)
        return trainer

    whole = trained(checkpoints=toys.saving(tmp_path))
    resumed = trained(resume_from=toys.step(tmp_path, 3))
    toys.assert_same_weights(resumed, whole)
    moments = [each["exp_avg"] for each in resumed.optimizer.state.values()]
    assert moments[0].is_contiguous(memory_format=torch.channels_last) and not moments[0].is_contiguous()
