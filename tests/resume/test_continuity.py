"""Continuing a run: which guarantee holds, what may have changed since, what is refused, and where it goes on."""

import itertools
import json
import math
import os
import shutil
import signal
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import toys
from distributed.launcher import exit_code
from loopwright import Checkpointing, Trainer, TrainerPlaceholderValues
from loopwright.callbacks import SaveTrainingStateCallback, StopTrainingError, TrainerCallback
from loopwright.checkpoint import find_newest, write
from loopwright.errors import CheckpointError, ConfigError, DataError
from loopwright.schedulers import CosineLrScheduler, WSDLrScheduler, get_scheduler
from toys import contents, step, stop_at

NUM_UPDATES = 8  # two epochs of four updates
CHANGED = "Changed since the checkpoint (new value used): "


def sgd(parameters, lr=0.05, **options):
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, **options)


def adamw(parameters, lr=0.05, **options):
    return torch.optim.AdamW(parameters, lr=lr, **options)


def fit(folder, make_optimizer=sgd, callbacks=(), num_epochs=2, cls=None, model=None, **kwargs):
    """Train a small model with dropout, saving after every update; everything is made anew."""
    model = toys.network(6, dropout=0.2) if model is None else model
    policy = kwargs.pop("policy", {})
    if folder is not None:
        kwargs["checkpoints"] = toys.saving(folder, **policy)
    kwargs = {"model": model, "cls": cls, "optimizer": make_optimizer(model.parameters()), **kwargs}
    return toys.trained(callbacks, num_epochs=num_epochs, **kwargs)


def said(capsys, start=CHANGED):
    """Return what was printed after this start of a line, and forget it."""
    return [line.removeprefix(start) for line in capsys.readouterr().out.splitlines() if line.startswith(start)]


@pytest.fixture
def resume(tmp_path, capsys):
    """Stop a run after update 3, resume it with other settings, and return it with what it says has changed."""

    def stop_and_resume(before, after):
        fit(tmp_path, callbacks=[stop_at(3)], **before)
        capsys.readouterr()
        return fit(tmp_path, **after, resume_from="auto"), said(capsys)

    return stop_and_resume


def about(folder, update):
    """What the manifest of a checkpoint says about its run."""
    return json.loads((step(folder, update) / "MANIFEST.json").read_text())["about"]


# Which guarantee holds


def test_the_guarantee_is_reported_at_the_start_and_at_a_resume_and_kept_in_every_manifest(tmp_path, capsys):
    fit(None)
    assert said(capsys, "Resume guarantee ") == [], "it saves nothing and resumes nothing"
    fit(tmp_path, callbacks=[stop_at(3)], eval_dataset=toys.data(8))
    assert said(capsys, "Resume guarantee ") == [
        "T0, bit-exact: weights, optimizer and metrics as in a run that was never interrupted"
    ]
    fit(tmp_path, resume_from="auto", eval_dataset=toys.data(8))
    assert [text[:2] for text in said(capsys, "Resume guarantee ")] == ["T0"]
    fingerprint = {"threads": 1, "torch": torch.__version__, "processes": 1, "precision": "no"}
    settings = {"num_epochs": 2, "batch_size": 4, "gradient_clip_norm": None, "nan": "stop"}
    for update in range(1, NUM_UPDATES + 1):
        found = about(tmp_path, update)
        assert found["tier"] == "T0" and found["data"] == {"train_dataset": 16, "eval_dataset": 8}
        assert found["fingerprint"].items() >= fingerprint.items()
        assert found["settings"].items() >= settings.items()


def test_an_iterable_is_counted_and_that_is_reported(tmp_path, capsys):
    stream = toys.Stream(toys.data(16))
    whole = fit(None, dataset=stream)
    fit(tmp_path, dataset=stream, callbacks=[stop_at(3)])
    assert [text[:11] for text in said(capsys, "Resume guarantee ")] == ["T3, counted"]
    resumed = fit(tmp_path, dataset=stream, resume_from="auto")
    assert [text[:11] for text in said(capsys, "Resume guarantee ")] == ["T3, counted"]
    assert torch.equal(toys.weights(resumed), toys.weights(whole))
    assert about(tmp_path, 8)["data"]["train_dataset"] is None
    with pytest.raises(CheckpointError, match="nothing; the data source has no random access"):
        fit(tmp_path, dataset=stream, resume_from="auto", policy={"require_exact": True})


@pytest.fixture
def two_threads():
    yield partial(torch.set_num_threads, 2)
    torch.set_num_threads(1)


def test_another_number_of_threads_lowers_the_guarantee_and_is_named(tmp_path, capsys, two_threads):
    fit(tmp_path, callbacks=[stop_at(3)])
    two_threads()
    capsys.readouterr()
    resumed = fit(tmp_path, resume_from="auto")
    out = capsys.readouterr().out
    assert "Changed environment since the checkpoint: threads: 1 -> 2\n" in out
    assert "Resume guarantee T2, sequence-exact" in out and CHANGED not in out
    assert resumed.progress.update == NUM_UPDATES
    assert about(tmp_path, 8)["tier"] == "T2" and about(tmp_path, 8)["fingerprint"]["threads"] == 2


def test_where_exactness_is_required_a_difference_is_refused_and_nothing_is_touched(tmp_path, two_threads):
    fit(tmp_path, callbacks=[stop_at(3)])
    before = contents(tmp_path)
    two_threads()
    model = toys.network(6, dropout=0.2)
    weights = toys.weights(model)
    with pytest.raises(CheckpointError, match=r"cannot be resumed bit-exactly \(T2.*require_exact.*threads: 1 -> 2"):
        fit(tmp_path, resume_from="auto", model=model, policy={"require_exact": True})
    assert contents(tmp_path) == before and torch.equal(toys.weights(model), weights)
    torch.set_num_threads(1)
    resumed = fit(tmp_path, resume_from="auto", policy={"require_exact": True})
    assert torch.equal(toys.weights(resumed), toys.weights(fit(None)))


# Settings of the optimizer


def changing(update: int, **options):
    """A callback that writes these options into every group after an update: what a change on resume must come to."""
    return toys.at_update(update, lambda trainer: [group.update(options) for group in trainer.optimizer.param_groups])


CHANGES = {
    "nothing": (adamw, {}, []),
    "lr of SGD": (sgd, {"lr": 0.01}, ["lr of 0.weight: 0.05 -> 0.01"]),
    "weight decay of SGD": (sgd, {"weight_decay": 0.5}, ["weight_decay of 0.weight: 0 -> 0.5"]),
    "lr and betas of AdamW": (
        adamw,
        {"lr": 0.1, "betas": (0.5, 0.6)},
        ["betas of 0.weight: [0.9, 0.999] -> [0.5, 0.6]", "lr of 0.weight: 0.05 -> 0.1"],
    ),
    "an option that was none": (sgd, {"foreach": False}, ["foreach of 0.weight: None -> False"]),
    "lr of Adagrad": (torch.optim.Adagrad, {"lr": 0.3}, ["lr of 0.weight: 0.01 -> 0.3"]),
    "lr of Adam without steps": (torch.optim.Adam, {"lr": 0.0}, ["lr of 0.weight: 0.001 -> 0.0"]),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_current_options_of_an_optimizer_win_and_are_shown(kind, resume):
    make, options, lines = CHANGES[kind]
    expected = fit(None, make, [changing(3, **options)])
    resumed, shown = resume({"make_optimizer": make}, {"make_optimizer": partial(make, **options)})
    assert shown == lines
    assert torch.equal(toys.weights(resumed), toys.weights(expected))
    group = resumed.optimizer.param_groups[0]
    assert all(group[name] == value and type(group[name]) is type(value) for name, value in options.items())


def test_a_second_resume_compares_with_the_settings_of_the_first(tmp_path, capsys):
    expected = fit(None, sgd, [changing(2, lr=0.2), changing(5, lr=0.01)])
    fit(tmp_path, sgd, [stop_at(2)])
    fit(tmp_path, partial(sgd, lr=0.2), [stop_at(4)], resume_from="auto")
    assert said(capsys) == ["lr of 0.weight: 0.05 -> 0.2"]
    fit(tmp_path, partial(sgd, lr=0.2), [stop_at(5)], resume_from="auto")
    assert said(capsys) == []
    resumed = fit(tmp_path, partial(sgd, lr=0.01), resume_from="auto")
    assert said(capsys) == ["lr of 0.weight: 0.2 -> 0.01"]
    assert torch.equal(toys.weights(resumed), toys.weights(expected))


def in_two_groups(parameters, lr=0.05, head_lr=0.01, is_reversed=False):
    first, *rest = parameters
    groups = [{"params": rest, "lr": head_lr}, {"params": [first]}]
    return sgd(groups[::-1] if is_reversed else groups, lr=lr)


def test_of_several_groups_the_one_that_was_changed_is_named_by_its_first_parameter(resume):
    change = toys.at_update(3, lambda trainer: trainer.optimizer.param_groups[0].update(lr=0.2))
    expected = fit(None, in_two_groups, [change])
    changed = partial(in_two_groups, head_lr=0.2, is_reversed=True)
    resumed, shown = resume({"make_optimizer": in_two_groups}, {"make_optimizer": changed})
    assert shown == ["lr of 0.bias: 0.01 -> 0.2"]
    assert torch.equal(toys.weights(resumed), toys.weights(expected))


@pytest.mark.parametrize("schedule", [None, partial(lr_scheduler.ExponentialLR, gamma=0.9)], ids=["none", "schedule"])
def test_a_learning_rate_that_is_a_tensor_stays_one(schedule, tmp_path, capsys):
    def make(parameters, lr=0.05):
        return torch.optim.AdamW(parameters, lr=torch.tensor(lr, dtype=torch.float64), foreach=False)

    whole = fit(None, make, create_scheduler_fn=schedule)
    fit(tmp_path, make, [stop_at(3)], create_scheduler_fn=schedule)
    copy = shutil.copytree(tmp_path, tmp_path.parent / f"{tmp_path.name}-copy")
    capsys.readouterr()
    resumed = fit(tmp_path, make, create_scheduler_fn=schedule, resume_from="auto")
    assert said(capsys) == [] and torch.equal(toys.weights(resumed), toys.weights(whole))
    resumed = fit(copy, partial(make, lr=0.1), create_scheduler_fn=schedule, resume_from="auto")
    assert "lr of 0.weight: 0.05 -> 0.1" in said(capsys)
    rate = resumed.optimizer.param_groups[0]["lr"]
    assert isinstance(rate, torch.Tensor) and rate.dtype == torch.float64
    assert float(rate) == pytest.approx(0.1 * (1 if schedule is None else 0.9**NUM_UPDATES), rel=1e-12)


@pytest.mark.parametrize("make", [sgd, adamw, torch.optim.SGD, torch.optim.Adagrad], ids=lambda make: make.__name__)
@pytest.mark.parametrize("has_schedule", [False, True])
def test_a_run_resumed_with_the_very_same_optimizer_object_is_exact(make, has_schedule, tmp_path, capsys):
    schedule = partial(lr_scheduler.CosineAnnealingLR, T_max=NUM_UPDATES) if has_schedule else None
    whole = fit(None, make, create_scheduler_fn=schedule)
    model = toys.network(6, dropout=0.2)
    trainer = toys.trainer_of([stop_at(3)], model, cls=Trainer, optimizer=make(model.parameters()))
    checkpoints = Checkpointing(tmp_path, keep_best=None)
    kwargs = {"num_epochs": 2, "checkpoints": checkpoints, "create_scheduler_fn": schedule}
    toys.fit(trainer, toys.data(16), **kwargs)
    capsys.readouterr()
    trainer.callback_handler.clear_callbacks()
    toys.fit(trainer, toys.data(16), **kwargs, resume_from="auto")
    assert said(capsys) == []
    assert torch.equal(toys.weights(trainer), toys.weights(whole))


def test_more_epochs_continue_a_finished_run_and_are_shown(tmp_path, capsys):
    whole = fit(None, num_epochs=3)
    fit(tmp_path)
    capsys.readouterr()
    resumed = fit(tmp_path, num_epochs=3, resume_from="auto")
    assert said(capsys) == ["num_epochs: 2 -> 3"]
    assert torch.equal(toys.weights(resumed), toys.weights(whole))


def test_other_settings_of_the_run_are_shown_and_hold(tmp_path, capsys):
    fit(tmp_path, callbacks=[stop_at(4)])
    capsys.readouterr()
    changes = {"per_device_batch_size": 8, "gradient_clip_norm": math.inf, "max_num_train_steps": 6}
    resumed = fit(tmp_path, resume_from="auto", **changes)
    lines = ["batch_size: 4 -> 8", "gradient_clip_norm: None -> 'Infinity'", "max_num_train_steps: None -> 6"]
    assert said(capsys) == lines
    assert [len(ids) for ids in resumed.seen] == [8, 8] and resumed.progress.update == 6


# Settings of the scheduler


def one_cycle(total=NUM_UPDATES, peak=0.1):
    return partial(lr_scheduler.OneCycleLR, max_lr=peak, total_steps=total)


def warmup_then_cosine(warmup=2, length=NUM_UPDATES):
    def make(optimizer):
        parts = [
            lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=warmup),
            lr_scheduler.CosineAnnealingLR(optimizer, T_max=length),
        ]
        return lr_scheduler.SequentialLR(optimizer, parts, [warmup])

    return make


def linear(total):
    return lambda optimizer: get_scheduler("linear", optimizer, 1, total)


def wsd(**options):
    return WSDLrScheduler.create_scheduler_fn(**{"decay_phase_ratio": 0.3, "lr_min": 0.1, **options})


def both(make, old: dict, new: dict, *lines: str):
    """What was saved, what it is resumed with, and how the lines of what changed begin."""
    return partial(make, **old), partial(make, **new), [f"scheduler's {line}" for line in lines]


SCHEDULES = {
    "StepLR": both(
        lr_scheduler.StepLR,
        {"step_size": 2, "gamma": 0.5},
        {"step_size": 3, "gamma": 0.9},
        *("gamma: 0.5 -> 0.9", "step_size: 2 -> 3"),
    ),
    "MultiStepLR": both(
        partial(lr_scheduler.MultiStepLR, gamma=0.5),
        {"milestones": [2, 6]},
        {"milestones": [5, 5, 7]},
        "milestones: {2: 1, 6: 1} -> {5: 2, 7: 1}",
    ),
    "ExponentialLR": both(lr_scheduler.ExponentialLR, {"gamma": 0.9}, {"gamma": 0.5}, "gamma: 0.9 -> 0.5"),
    "CosineAnnealingLR": both(lr_scheduler.CosineAnnealingLR, {"T_max": 4}, {"T_max": NUM_UPDATES}, "T_max: 4 -> 8"),
    "CosineAnnealingWarmRestarts": both(
        partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=8), {}, {"eta_min": 0.01}, "eta_min: 0.0 -> 0.01"
    ),
    "LinearLR": both(
        partial(lr_scheduler.LinearLR, start_factor=0.1), {"total_iters": 4}, {"total_iters": 8}, "total_iters: 4 -> 8"
    ),
    "OneCycleLR": (one_cycle(), one_cycle(12), ["scheduler's _schedule_phases", "scheduler's total_steps: 8 -> 12"]),
    "SequentialLR": (warmup_then_cosine(), warmup_then_cosine(length=20), ["scheduler's _schedulers.1.T_max: 8 -> 20"]),
    "linear": (linear(NUM_UPDATES), linear(20), []),
    "CosineLrScheduler": (
        CosineLrScheduler.create_scheduler_fn(lr_min=0.001),
        CosineLrScheduler.create_scheduler_fn(lr_min=0.02),
        ["scheduler's "],
    ),
    "WSDLrScheduler": (wsd(), wsd(lr_min=0.5), ["scheduler's lr_min: 0.1 -> 0.5"]),
    "continued WSDLrScheduler": (
        wsd(is_continuation_from_checkpoint=True),
        wsd(is_continuation_from_checkpoint=True, lr_min=0.5),
        ["scheduler's lr_min: 0.1 -> 0.5"],
    ),
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_current_settings_of_a_scheduler_win_and_its_counters_continue(kind, resume):
    old, new, lines = SCHEDULES[kind]
    resumed, shown = resume({"create_scheduler_fn": old}, {"create_scheduler_fn": new})
    assert all(any(line.startswith(start) for line in shown) for start in lines)
    assert all(any(line.startswith(start) for start in lines) for line in shown)
    # From the second update on the rates are those of a run that had the new settings from its start.
    expected = fit(None, create_scheduler_fn=new).lrs
    assert resumed.lrs[1:] == pytest.approx(expected[4:], rel=1e-9)
    assert expected[4:] != pytest.approx(fit(None, create_scheduler_fn=old).lrs[4:], rel=1e-3)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_scheduler_that_was_not_changed_prints_nothing_and_changes_no_bit(kind, resume):
    schedule = {"create_scheduler_fn": SCHEDULES[kind][0]}
    whole = fit(None, **schedule)
    resumed, shown = resume(schedule, schedule)
    assert shown == [] and resumed.lrs == whole.lrs[3:]
    assert torch.equal(toys.weights(resumed), toys.weights(whole))


ON_A_CURVE = [kind for kind in SCHEDULES if kind not in ("OneCycleLR", "CosineAnnealingWarmRestarts")]


@pytest.mark.parametrize("kind", ON_A_CURVE)
def test_a_changed_learning_rate_lifts_the_whole_curve_of_the_scheduler(kind, resume):
    schedule = {"create_scheduler_fn": SCHEDULES[kind][0]}
    expected = fit(None, partial(sgd, lr=0.1), **schedule)
    resumed, shown = resume(schedule, {"make_optimizer": partial(sgd, lr=0.1), **schedule})
    assert "lr of 0.weight: 0.05 -> 0.1" in shown
    assert resumed.lrs == pytest.approx(expected.lrs[3:], rel=1e-9)


def test_a_change_of_something_else_leaves_the_learning_rates_as_they_are(resume):
    schedule = {"create_scheduler_fn": partial(lr_scheduler.CosineAnnealingLR, T_max=NUM_UPDATES)}
    whole = fit(None, **schedule)
    resumed, shown = resume(schedule, {"make_optimizer": partial(sgd, weight_decay=0.1), **schedule})
    assert shown == ["weight_decay of 0.weight: 0 -> 0.1"]
    assert resumed.lrs == whole.lrs[3:] and not torch.equal(toys.weights(resumed), toys.weights(whole))


def test_a_changed_peak_of_a_cycle_holds(resume):
    resumed, shown = resume({"create_scheduler_fn": one_cycle()}, {"create_scheduler_fn": one_cycle(peak=0.4)})
    assert "max_lr of 0.weight: 0.1 -> 0.4" in shown
    assert resumed.lrs == pytest.approx(fit(None, create_scheduler_fn=one_cycle(peak=0.4)).lrs[3:], rel=1e-9)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_scheduler_that_the_saved_run_did_not_have_starts_from_its_beginning(kind, tmp_path, capsys):
    schedule = SCHEDULES[kind][0]
    fit(tmp_path, callbacks=[stop_at(3)])
    capsys.readouterr()
    resumed = fit(tmp_path, create_scheduler_fn=schedule, resume_from="auto")
    name = type(resumed.scheduler).__name__
    assert f"Starting a {name}: the saved run had no scheduler\n" in capsys.readouterr().out
    assert resumed.lrs == fit(None, create_scheduler_fn=schedule).lrs[:5]


def test_a_finished_cosine_schedule_that_is_made_longer_does_not_stay_at_zero(tmp_path):
    # The recursion that torch uses would multiply the last rate, which is 0, for ever.
    length = TrainerPlaceholderValues.NUM_EPOCHS * TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH
    schedule = partial(lr_scheduler.CosineAnnealingLR, T_max=length)
    finished = fit(tmp_path, create_scheduler_fn=schedule)
    assert finished.optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-12)
    resumed = fit(tmp_path, num_epochs=4, create_scheduler_fn=schedule, resume_from="auto")
    expected = [0.05 * (1 + math.cos(math.pi * update / 16)) / 2 for update in range(8, 16)]
    assert resumed.lrs == pytest.approx(expected, rel=1e-9)


def test_a_plateau_that_changes_its_direction_starts_to_compare_again(tmp_path, capsys):
    kwargs = {"eval_dataset": toys.data(8), "num_epochs": 4}
    plateau = partial(lr_scheduler.ReduceLROnPlateau, factor=0.5)
    make = partial(torch.optim.SGD, lr=0.01)
    fit(tmp_path, make, [stop_at(8)], create_scheduler_fn=partial(plateau, mode="min", patience=9), **kwargs)
    capsys.readouterr()
    kwargs["create_scheduler_fn"] = partial(plateau, mode="max", patience=0)
    resumed = fit(tmp_path, make, resume_from="auto", **kwargs)
    shown = said(capsys)
    assert "scheduler's mode: 'min' -> 'max'" in shown and "scheduler's patience: 9 -> 0" in shown
    losses = resumed.run_history.get_metric_values("eval_loss_epoch")
    assert resumed.scheduler.best == max(losses[1:]) and losses[0] > max(losses[1:])


def test_another_class_of_optimizer_or_scheduler_is_refused_by_name_before_anything_is_loaded(tmp_path):
    fit(tmp_path, callbacks=[stop_at(3)], create_scheduler_fn=partial(lr_scheduler.StepLR, step_size=1))
    before = contents(tmp_path)
    for message, make, schedule in (
        ("StepLR, that of the trainer of class ExponentialLR", sgd, partial(lr_scheduler.ExponentialLR, gamma=0.5)),
        ("SGD, that of the trainer of class AdamW", adamw, partial(lr_scheduler.StepLR, step_size=1)),
    ):
        model = toys.network(6, dropout=0.2)
        optimizer, weights = make(model.parameters()), toys.weights(model)
        with pytest.raises(CheckpointError, match=message) as caught:
            fit(tmp_path, lambda _, made=optimizer: made, model=model, create_scheduler_fn=schedule, resume_from="auto")
        assert caught.value.code == "checkpoint.state"
        assert torch.equal(toys.weights(model), weights) and not optimizer.state
    assert contents(tmp_path) == before


# Data


def test_weights_of_another_type_continue_and_are_shown_and_refused_where_exactness_is_required(tmp_path, capsys):
    fit(tmp_path, callbacks=[stop_at(3)])
    said(capsys)
    model = toys.network(6, dropout=0.2).bfloat16()
    with pytest.raises(CheckpointError, match=r"type of .*weight and of \d more: torch.float32 -> torch.bfloat16"):
        fit(tmp_path, model=model, policy={"require_exact": True}, cls=Trainer, resume_from="auto")
    fit(tmp_path, model=toys.network(6, dropout=0.2).double(), cls=InDouble, resume_from="auto")
    assert [line for line in said(capsys) if line.startswith("type of")][0].endswith("torch.float32 -> torch.float64")


class InDouble(Trainer):
    def calculate_train_batch_loss(self, batch):
        return super().calculate_train_batch_loss([part.double() for part in batch[:2]])


def test_data_of_another_length_are_refused_by_name_and_numbers(tmp_path):
    fit(tmp_path, callbacks=[stop_at(3)], eval_dataset=toys.data(8))
    before = contents(tmp_path)
    model = toys.network(6, dropout=0.2)
    weights = toys.weights(model)
    with pytest.raises(DataError, match="train_dataset has 20 samples, but the run was started with 16"):
        fit(tmp_path, resume_from="auto", model=model, dataset=toys.data(20), eval_dataset=toys.data(8))
    with pytest.raises(DataError, match=r"(?s)eval_dataset has 9 samples, .* started with 8.*allow_changed_data=True"):
        fit(tmp_path, resume_from="auto", model=model, eval_dataset=toys.data(9))
    assert contents(tmp_path) == before and torch.equal(toys.weights(model), weights)


def test_changed_data_that_are_allowed_continue_and_are_shown(tmp_path, resume):
    changed = {"dataset": toys.data(20), "eval_dataset": toys.data(9)}
    resumed, shown = resume({"eval_dataset": toys.data(8)}, {**changed, "policy": {"allow_changed_data": True}})
    assert shown == ["eval_dataset: 8 -> 9", "train_dataset: 16 -> 20"]
    assert resumed.progress.update == 10 and sorted(itertools.chain(*resumed.seen[2:])) == list(range(20))
    again = fit(tmp_path, resume_from="auto", num_epochs=3, **changed)
    assert again.progress.update == 15, "the new length is the run's own from then on"


def test_an_evaluation_that_is_new_or_gone_is_not_a_change_of_the_data(tmp_path):
    fit(tmp_path, callbacks=[stop_at(3)])
    fit(tmp_path, callbacks=[stop_at(5)], resume_from="auto", eval_dataset=toys.data(8))
    assert fit(tmp_path, resume_from="auto").progress.update == NUM_UPDATES


# Going back


def test_going_back_sets_newer_checkpoints_aside_and_auto_continues_with_the_new_way(tmp_path, capsys):
    fit(tmp_path)
    capsys.readouterr()
    fit(tmp_path, partial(sgd, lr=0.2), [stop_at(6)], resume_from=step(tmp_path, 4))
    names = [f"step-{update:010d}" for update in (5, 6, 7, 8)]
    assert sorted(said(capsys, "Set aside ")) == [f"{name}: the run resumes from step-0000000004" for name in names]
    aside = sorted(path.name.split("-")[2] for path in tmp_path.glob(".superseded-step-*"))
    assert aside == [name.removeprefix("step-") for name in names]
    assert set(tmp_path.glob("step-*")) == {step(tmp_path, update) for update in range(1, 7)}
    expected = fit(None, callbacks=[changing(4, lr=0.2)])
    resumed = fit(tmp_path, partial(sgd, lr=0.2), resume_from="auto")
    assert torch.equal(toys.weights(resumed), toys.weights(expected))
    assert [record["update"] for record in toys.records(tmp_path, "log")] == [4, 8]


def test_going_back_to_a_state_that_lies_elsewhere_sets_newer_checkpoints_aside_too(tmp_path):
    fit(tmp_path / "run", callbacks=[SaveTrainingStateCallback(tmp_path / "states", save_every_n_steps=3)])
    resumed = fit(tmp_path / "run", resume_from=tmp_path / "states" / "step_3", callbacks=[stop_at(5)])
    assert resumed.progress.update == 5
    assert find_newest(tmp_path / "run")[0] == step(tmp_path / "run", 5)
    final = fit(tmp_path / "run", resume_from="auto")
    assert torch.equal(toys.weights(final), toys.weights(fit(None)))


def test_one_run_is_not_continued_among_the_checkpoints_of_another(tmp_path):
    fit(tmp_path / "one", callbacks=[stop_at(3)])
    fit(tmp_path / "other", callbacks=[stop_at(5)])
    before = contents(tmp_path)
    for resume_from in (tmp_path / "one", step(tmp_path / "one", 2)):
        with pytest.raises(ConfigError, match=r"one.* belongs to another run than the checkpoints in .*other"):
            fit(tmp_path / "other", resume_from=resume_from)
    assert contents(tmp_path) == before
    assert fit(tmp_path / "third", resume_from=tmp_path / "one", callbacks=[stop_at(4)]).progress.update == 4
    again = fit(tmp_path / "third", resume_from=tmp_path / "one")
    assert torch.equal(toys.weights(again), toys.weights(fit(None))), "the same command once more"


def test_a_checkpoint_that_no_trainer_wrote_is_refused_by_name(tmp_path):
    write(tmp_path / "own", toys.state_of(toys.network(6, dropout=0.2)), {"update": 3}, 3)
    with pytest.raises(CheckpointError, match="own was not written by a Trainer"):
        fit(None, resume_from=tmp_path / "own")


def test_a_state_is_not_saved_by_a_trainer_that_has_only_evaluated(tmp_path):
    trainer = toys.trainer_of()
    trainer.evaluate(toys.data(8))
    with pytest.raises(ConfigError, match=r"prepared by train\(\)"):
        trainer.save_training_state(tmp_path / "state")
    toys.fit(trainer, toys.data(8))
    trainer.evaluate(toys.data(8))
    trainer.save_training_state(tmp_path / "state")
    assert find_newest(tmp_path)[0] == tmp_path / "state"


# State that cannot be saved


class Holds(TrainerCallback):
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"deep": {"inside": [0, self.value]}}


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (lambda: None, r"builtins\.function"),
        (object(), r"builtins\.object"),
        (torch.eye(2).to_sparse(), r"torch\.sparse_coo"),
    ],
    ids=["function", "object", "sparse tensor"],
)
@pytest.mark.parametrize("is_saved_by", ["checkpoints", "callback"])
def test_state_that_cannot_be_saved_is_refused_before_the_first_update_by_its_key_path(
    value, kind, is_saved_by, tmp_path
):
    saver = [SaveTrainingStateCallback(tmp_path / "states")] if is_saved_by == "callback" else []
    model = toys.network(6)
    weights = toys.weights(model)
    with pytest.raises(CheckpointError, match=rf"state\.callbacks\.0\.state\.deep\.inside\.1 is a {kind}"):
        fit(None if saver else tmp_path / "run", callbacks=[Holds(value), *saver], model=model)
    assert torch.equal(toys.weights(model), weights)
    assert find_newest(tmp_path / "run") == (None, [])


def test_a_run_that_saves_nothing_may_hold_anything():
    assert fit(None, callbacks=[Holds(object())]).progress.update == NUM_UPDATES


# A stop inside an update


class CountedLoss(nn.Module):
    """A loss that counts its calls and keeps a mean, in buffers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, outputs, targets):
        loss = nn.functional.mse_loss(outputs, targets)
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss


def fit_with_buffers(folder, callbacks=(), cls=Trainer, **kwargs):
    def layers():
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Tanh(), nn.Linear(6, 1))

    checkpoints = None if folder is None else Checkpointing(folder, keep_best=None)
    kwargs = {"gradient_accumulation_steps": 2, "checkpoints": checkpoints, "cls": cls, **kwargs}
    return toys.trained(callbacks, toys.data(22), 2, model=toys.seeded(layers), loss_func=CountedLoss(), **kwargs)


def assert_same_state(found, expected):
    toys.assert_same_weights(found, expected)
    toys.assert_same_weights(found.loss_func, expected.loss_func)


@pytest.mark.parametrize("index", [0, 1, 3, 5, 7])
@pytest.mark.parametrize("event", ["on_train_step_start", "on_train_step_end"])
def test_a_stop_inside_an_update_of_a_model_with_buffers_continues_with_the_bits_of_the_whole_run(
    event, index, tmp_path
):
    count = itertools.count()  # of the run's micro-batches

    def stop(trainer, **kwargs):
        if next(count) == index:
            raise StopTrainingError("in the middle")

    whole = fit_with_buffers(None)
    result = fit_with_buffers(tmp_path, [toys.callback(**{event: stop})]).result
    assert result.stop_reason == "in the middle" and result.updates == index // 2
    resumed = fit_with_buffers(tmp_path, resume_from="auto")
    assert_same_state(resumed, whole)
    assert resumed.run_history.state_dict() == whole.run_history.state_dict()


def test_a_stop_raised_in_a_hook_after_the_forward_pass_leaves_no_trace_either(tmp_path):
    class Raises(Trainer):
        calls = 0

        def calculate_train_batch_loss(self, batch):
            output = super().calculate_train_batch_loss(batch)
            Raises.calls += 1
            if Raises.calls == 4:
                raise StopTrainingError("in a hook")
            return output

    result = fit_with_buffers(tmp_path, cls=Raises).result
    assert result.updates == 1 and result.stop_reason == "in a hook"
    assert_same_state(fit_with_buffers(tmp_path, resume_from="auto"), fit_with_buffers(None))


# A signal during an evaluation, in a process of its own


class SignalInEvaluation(TrainerCallback):
    """Sends this process a signal in the second batch of an evaluation, and notes every batch that was evaluated."""

    def __init__(self, folder, is_intermediate):
        self.path, self.is_intermediate = folder / "evaluated", is_intermediate

    def on_eval_epoch_start(self, trainer, is_intermediate=False, **kwargs):
        self.is_here, self.batches = is_intermediate == self.is_intermediate, 0

    def on_eval_step_end(self, trainer, batch=None, batch_output=None, **kwargs):
        self.batches += 1
        if self.is_here:
            self.path.write_text(str(self.batches))
            if self.batches == 2:
                os.kill(os.getpid(), signal.SIGTERM)


def evaluated(folder, callbacks=()):
    often = {"eval_dataset": toys.data(14), "evaluate_every": 3, "log_every": 2}
    return fit(folder / "run", callbacks=callbacks, resume_from="auto", **often)


@pytest.mark.parametrize(
    ("is_intermediate", "batches", "update"), [(False, "2", 4), (True, "4", 3)], ids=["epoch end", "intermediate"]
)
def test_a_signal_in_an_evaluation_leaves_it_or_finishes_it_and_the_resumed_run_has_the_same_numbers(
    is_intermediate, batches, update, tmp_path
):
    whole = evaluated(tmp_path / "whole")
    assert exit_code(evaluated, tmp_path, [SignalInEvaluation(tmp_path, is_intermediate)]) == 75
    assert (tmp_path / "evaluated").read_text() == batches, "of four"
    assert find_newest(tmp_path / "run")[0] == step(tmp_path / "run", update)
    resumed = evaluated(tmp_path)
    assert torch.equal(toys.weights(resumed), toys.weights(whole))
    assert resumed.run_history.state_dict() == whole.run_history.state_dict()
    assert toys.numbers(tmp_path / "run") == toys.numbers(tmp_path / "whole" / "run")


class Masked(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        mask = torch.full((3, 3), -math.inf).triu(1)
        if kind == "buffer":
            self.register_buffer("mask", mask)
        else:
            self.mask = nn.Parameter(mask, requires_grad=False)
        self.inner = toys.network(6, dropout=0.2)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, inputs):
        return self.inner(inputs)


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("kind", ["buffer", "parameter"])
def test_a_model_with_a_mask_of_infinities_is_saved_and_resumes_exactly(kind, asynchronous, tmp_path):
    policy = {"asynchronous": asynchronous}
    whole = fit(None, model=Masked(kind), cls=Trainer)
    fit(tmp_path, callbacks=[stop_at(3)], model=Masked(kind), cls=Trainer, policy=policy)
    assert step(tmp_path, 3).is_dir()
    resumed = fit(tmp_path, model=Masked(kind), cls=Trainer, policy=policy, resume_from="auto")
    assert step(tmp_path, 8).is_dir()
    toys.assert_same_weights(resumed, whole)


def test_a_buffer_that_becomes_infinite_is_named_and_not_saved(tmp_path, capsys):
    spoil = toys.at_update(3, lambda trainer: trainer.model.count.fill_(math.inf))
    fit(tmp_path, callbacks=[spoil], model=Masked("buffer"))
    assert [path.name for path in sorted(tmp_path.glob("step-*"))] == [step(tmp_path, 1).name, step(tmp_path, 2).name]
    assert "step-0000000003: a weight is not finite (count)" in capsys.readouterr().out
