"""Flaws 13 to 29: the loop. One test per flaw, each named after the right behaviour."""

import inspect
import multiprocessing
import os
import random
from functools import partial

import accelerate
import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import BatchSampler, Dataset, SequentialSampler, TensorDataset

import toys
from distributed.launcher import launch

from . import subject


def mean_loss(model: nn.Module, dataset: TensorDataset) -> float:
    x, y, _ = dataset.tensors
    with torch.no_grad():
        return nn.functional.mse_loss(model.cpu()(x), y).item()


def test_flaw_13_a_second_run_that_keeps_the_history_is_a_whole_run():
    dataset = subject.data(16)
    trainer = subject.trainer()
    subject.fit(trainer, dataset, num_epochs=2)
    subject.fit(trainer, dataset, num_epochs=2, reset_run_history=False)
    assert trainer.epochs == [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4
    assert len(trainer.run_history.get_metric_values("train_loss_epoch")) == 4
    assert trainer.run_history.current_epoch == 5

    subject.fit(trainer, dataset, num_epochs=2, max_num_train_steps=6, reset_run_history=False)
    assert len(trainer.seen) == 16 + 6


def test_flaw_14_accumulation_does_not_change_the_reported_loss():
    dataset = subject.data(32)
    expected = mean_loss(subject.network(), dataset)

    for accumulation in (1, 4):
        losses = []
        watch = subject.callback(
            on_train_step_end=lambda trainer, batch_output, losses=losses, **kwargs: losses.append(
                batch_output["loss"].item()
            )
        )
        trainer = subject.trainer([watch], lr=0.0)
        subject.fit(trainer, dataset, gradient_accumulation_steps=accumulation)
        assert trainer.run_history.get_latest_metric("train_loss_epoch") == pytest.approx(expected)
        assert sum(losses) / len(losses) == pytest.approx(expected)


class HostReads(TorchDispatchMode):
    """Counts the operations that make the host wait for the device: item(), float(), bool(), equal(), ..."""

    NAMES = ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name in self.NAMES
        return func(*args, **(kwargs or {}))


def test_flaw_15_the_host_reads_nothing_from_the_device_between_two_logs():
    reads = HostReads()
    at_start, at_end = [], []
    watch = subject.callback(
        on_train_step_start=lambda trainer, **kwargs: at_start.append(reads.count),
        on_train_step_end=lambda trainer, **kwargs: at_end.append(reads.count),
    )
    callbacks = (*subject.module("trainer").DEFAULT_CALLBACKS, watch)
    trainer = subject.trainer(callbacks, cls=subject.Trainer)
    with reads:
        subject.fit(trainer, subject.data(4 * 102))
    assert len(at_start) == 102
    # The default is a log every 50 updates, so one after the 50th and one after the 100th.
    assert at_end[99] - at_start[50] == 0, "reads during updates 51 to 100"


def test_flaw_16_intermediate_evaluation_leaves_training_as_it_was():
    journal = []

    class Journalled(subject.recording_trainer_class()):
        def backward_step(self, loss):
            journal.append("backward")
            super().backward_step(loss)

    def on_eval_epoch_start(trainer, is_intermediate=False, **kwargs):
        journal.append("intermediate evaluation" if is_intermediate else "evaluation")

    def watch():
        return subject.callback(
            on_train_step_start=lambda trainer, **kwargs: modes.append(trainer.model.training),
            on_train_step_end=lambda trainer, **kwargs: journal.append("forward"),
            on_eval_epoch_start=on_eval_epoch_start,
        )

    modes = []
    every_two = subject.callbacks.StepBasedEvaluationCallback(2)
    trainer = subject.trainer([every_two, watch()], subject.network(8, dropout=0.5), cls=Journalled)
    subject.fit(trainer, subject.data(24), eval_dataset=subject.data(8))

    assert modes == [True] * 6
    assert journal.count("intermediate evaluation") == 2
    after_forward = [journal[i + 1] for i, entry in enumerate(journal) if entry == "forward"]
    assert after_forward == ["backward"] * 6
    assert len(trainer.run_history.get_metric_values("intermediate_eval_loss")) == 2

    # Looking must not change what is learnt: the same weights as without it.
    plain = subject.trainer(model=subject.network(8, dropout=0.5))
    subject.fit(plain, subject.data(24))
    assert torch.equal(subject.weights(trainer), subject.weights(plain))

    # Nothing to evaluate on: train on.
    journal.clear()
    trainer = subject.trainer([subject.callbacks.StepBasedEvaluationCallback(2), watch()], cls=Journalled)
    subject.fit(trainer, subject.data(24))
    assert journal == ["forward", "backward"] * 6


def test_flaw_17_the_limit_on_evaluation_batches_is_kept():
    def batches_per_evaluation(**kwargs) -> list[tuple[bool, int]]:
        evaluations = []

        def on_eval_epoch_start(trainer, is_intermediate=False, **kwargs):
            evaluations.append((is_intermediate, 0))

        def on_eval_step_end(trainer, **kwargs):
            is_intermediate, count = evaluations[-1]
            evaluations[-1] = (is_intermediate, count + 1)

        limit = subject.callbacks.LimitEvalStepsCallback(1, **kwargs)
        every_two = subject.callbacks.StepBasedEvaluationCallback(2)
        watch = subject.callback(on_eval_epoch_start=on_eval_epoch_start, on_eval_step_end=on_eval_step_end)
        trainer = subject.trainer([limit, every_two, watch])
        subject.fit(trainer, subject.data(16), eval_dataset=subject.data(16))
        return evaluations

    assert batches_per_evaluation(limit_intermediate_only=False) == [(True, 1), (False, 1)]
    assert batches_per_evaluation() == [(True, 1), (False, 4)]


IMPORT_LEAVES_RNG_ALONE = """
import importlib, random, sys
import accelerate, numpy, torch

def states():
    return random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

random.seed(7), numpy.random.seed(7), torch.manual_seed(7)
before = states()
importlib.import_module(sys.argv[1]).Trainer
sys.exit(0 if states() == before else "importing the package changed a random state")
"""


def test_flaw_18_the_users_seed_decides_the_order():
    dataset = subject.data(16)

    def order(trainer, torch_seed: int):
        trainer.seen.clear()
        subject.fit(trainer, dataset, torch_seed=torch_seed)
        return list(trainer.seen)

    trainer = subject.trainer()
    first, second = order(trainer, 1), order(trainer, 2)
    assert first != second
    assert order(trainer, 1) == first
    assert order(subject.trainer(), 2) == second

    done = toys.python("-c", IMPORT_LEAVES_RNG_ALONE, subject.PACKAGE)
    assert done.returncode == 0, done.stderr


class Augmented(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        noise = torch.randn(4) + random.random() + np.random.rand()
        return noise.float(), torch.zeros(1), index


def test_flaw_19_the_same_seed_gives_the_same_augmentations_with_workers():
    def inputs_and_weights(num_workers: int):
        inputs = []
        watch = subject.callback(
            on_train_step_end=lambda trainer, batch, **kwargs: inputs.append(batch[0].cpu().clone())
        )
        trainer = subject.trainer([watch])
        kwargs = {"num_workers": num_workers}
        subject.fit(trainer, Augmented(), num_epochs=2, train_dataloader_kwargs=kwargs)
        return torch.cat(inputs), subject.weights(trainer)

    inputs, weights = inputs_and_weights(2)
    assert len(inputs.unique()) == inputs.numel() == 2 * 16 * 4, "no two samples share their noise"
    for num_workers in (2, 0):
        inputs_again, weights_again = inputs_and_weights(num_workers)
        assert torch.equal(inputs, inputs_again)
        assert torch.equal(weights, weights_again)


def updates_until_the_limit() -> list[int]:
    """On one of two processes: the updates made under a limit of 10, and of 20, in 3 epochs of 8."""
    counts = []
    for limit in (10, 20):
        trainer = subject.trainer()
        subject.fit(trainer, subject.data(64), num_epochs=3, max_num_train_steps=limit)
        counts.append(len(trainer.gradients))
    return counts


def test_flaw_20_a_run_ends_at_the_smaller_of_its_two_limits(tmp_path):
    for num_epochs, max_num_train_steps, expected in ((1, 100, 4), (3, 6, 6), (2, 8, 8)):
        trainer = subject.trainer()
        subject.fit(trainer, subject.data(16), num_epochs=num_epochs, max_num_train_steps=max_num_train_steps)
        assert len(trainer.gradients) == expected
    assert launch(updates_until_the_limit, tmp_path) == [[10, 20], [10, 20]]


def gradients_of_windows(trainer, dataset, accumulation: int) -> list[torch.Tensor]:
    """What each window's gradient must be at fixed weights: that of the mean loss over its samples."""
    model = subject.network()
    gradients = []
    for start in range(0, len(trainer.seen), accumulation):
        ids = sum(trainer.seen[start : start + accumulation], [])
        x, y, _ = dataset[ids]
        model.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        gradients.append(toys.row(parameter.grad for parameter in model.parameters()))
    return gradients


def test_flaw_21_gradients_are_clipped_once_per_update_and_by_norm_if_asked():
    dataset = subject.data(32)

    class Clipping(subject.recording_trainer_class()):
        unclipped: list

        def _clip_gradients(self):
            self.unclipped.append(toys.row(parameter.grad for parameter in self.model.parameters()))
            super()._clip_gradients()

    trainer = subject.trainer(lr=0.0, cls=Clipping)
    trainer.unclipped = []
    subject.fit(trainer, dataset, gradient_accumulation_steps=4, gradient_clip_value=0.5)
    assert len(trainer.unclipped) == 2
    wanted = gradients_of_windows(trainer, dataset, 4)
    for got, clipped, expected in zip(trainer.unclipped, trainer.gradients, wanted, strict=True):
        assert expected.abs().max() > 0.5
        assert torch.allclose(got, expected, atol=1e-5)
        assert torch.allclose(clipped, expected.clamp(-0.5, 0.5), atol=1e-5)

    trainer = subject.trainer(lr=0.0)
    subject.fit(trainer, dataset, gradient_accumulation_steps=4, gradient_clip_norm=0.5)
    for clipped, expected in zip(trainer.gradients, gradients_of_windows(trainer, dataset, 4), strict=True):
        assert expected.norm() > 0.5
        assert torch.allclose(clipped, 0.5 * expected / expected.norm(), atol=1e-5)


def test_flaw_22_every_sample_of_a_window_weighs_the_same():
    dataset = subject.data(18)  # batches of 4, 4, 4, 4, 2
    for accumulation, num_updates in ((3, 2), (4, 2), (5, 1)):
        trainer = subject.trainer(lr=0.0)
        subject.fit(trainer, dataset, gradient_accumulation_steps=accumulation)
        assert [len(batch) for batch in trainer.seen] == [4, 4, 4, 4, 2]
        assert len(trainer.gradients) == num_updates
        for got, expected in zip(trainer.gradients, gradients_of_windows(trainer, dataset, accumulation), strict=True):
            assert torch.allclose(got, expected, atol=1e-5)


def test_flaw_23_a_run_inherits_neither_scheduler_nor_evaluation_from_the_one_before():
    dataset = subject.data(16)
    trainer = subject.trainer()
    schedule = partial(StepLR, step_size=1, gamma=0.5)
    subject.fit(trainer, dataset, eval_dataset=subject.data(8), create_scheduler_fn=schedule)
    trainer.lrs.clear()
    subject.fit(trainer, dataset)
    assert trainer.lrs == [trainer.lrs[0]] * 4
    assert trainer.scheduler is trainer._eval_dataloader is None
    assert "eval_loss_epoch" not in trainer.run_history.get_metric_names()


def test_flaw_24_limited_batches_are_what_the_whole_run_counts_with():
    utils = subject.utils
    assert len(utils.DataLoaderSlice([1, 2, 3], 10)) == 3
    assert len(utils.DataLoaderSlice([1, 2, 3], 2)) == 2

    # A limit above the length: the window of the last two batches still gets its update.
    trainer = subject.trainer([subject.callbacks.LimitBatchesCallback(10)])
    subject.fit(trainer, subject.data(24), gradient_accumulation_steps=4)
    assert (len(trainer.seen), len(trainer.gradients)) == (6, 2)

    placeholders = subject.TrainerPlaceholderValues
    epochs, steps = placeholders.NUM_EPOCHS, placeholders.NUM_UPDATE_STEPS_PER_EPOCH
    schedule = partial(OneCycleLR, max_lr=0.1, epochs=epochs, steps_per_epoch=steps)
    with utils.LimitBatches(2):
        trainer = subject.trainer()
    subject.fit(trainer, subject.data(40), num_epochs=3, create_scheduler_fn=schedule)
    assert len(trainer.gradients) == 6
    assert trainer.run_config.num_update_steps_per_epoch == 2
    assert trainer.scheduler.total_steps == 6

    with utils.LimitBatches(3):
        with utils.LimitBatches(1):
            inner = subject.trainer()
        outer = subject.trainer()
    free = subject.trainer()
    for trainer, expected in ((inner, 1), (outer, 3), (free, 4)):
        subject.fit(trainer, subject.data(16))
        assert len(trainer.seen) == expected


def test_flaw_25_iterable_datasets_and_batch_samplers_can_be_trained_on():
    dataset = subject.data(10)
    trainer = subject.trainer()
    stream = toys.Stream(dataset)
    subject.fit(trainer, stream, num_epochs=2, eval_dataset=stream, gradient_accumulation_steps=2)
    epoch = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert trainer.seen == epoch + epoch
    assert len(trainer.gradients) == 4
    eval_loss = trainer.run_history.get_latest_metric("eval_loss_epoch")
    assert eval_loss == pytest.approx(mean_loss(trainer.model, dataset))

    trainer = subject.trainer()
    batches = BatchSampler(SequentialSampler(dataset), batch_size=3, drop_last=True)
    subject.fit(trainer, dataset, train_dataloader_kwargs={"batch_sampler": batches})
    assert trainer.seen == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


class ProcessIds(Dataset):
    """Not a tensor dataset; the id of a sample is the process that loaded it."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.zeros(4), torch.zeros(1), os.getpid()


def test_flaw_26_the_default_workers_fit_the_machine_and_live_as_long_as_the_run(monkeypatch):
    with monkeypatch.context() as machine:
        machine.setattr(os, "cpu_count", lambda: 64)
        machine.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
        trainer = subject.trainer()
        trainer.train_dataset = trainer.eval_dataset = ProcessIds()
        for kwargs in (trainer.get_default_train_dl_kwargs(8), trainer.get_default_eval_dl_kwargs(8)):
            assert 1 <= kwargs["num_workers"] <= 4
            assert kwargs["persistent_workers"] is True
            assert kwargs["batch_size"] == 8

        trainer.train_dataset = trainer.eval_dataset = TensorDataset(torch.zeros(8, 4), torch.zeros(8, 1))
        for kwargs in (trainer.get_default_train_dl_kwargs(8), trainer.get_default_eval_dl_kwargs(8)):
            assert kwargs["num_workers"] == 0
            assert not kwargs["persistent_workers"]  # the loader refuses it without workers

    for num_workers, num_processes in ((2, 2), (0, 1)):
        trainer = subject.trainer()
        kwargs = {"num_workers": num_workers}
        subject.fit(trainer, ProcessIds(), num_epochs=3, train_dataloader_kwargs=kwargs)
        loaded_by = set(sum(trainer.seen, []))
        assert len(loaded_by) == num_processes
        assert loaded_by.isdisjoint(process.pid for process in multiprocessing.active_children())


def test_flaw_27_there_are_events_around_an_update_and_a_stop_is_heard_everywhere():
    journal = []
    micro_batch = ["on_train_step_start", "on_train_step_end"]
    update = ["on_before_optimizer_step", "on_optimizer_step_end", "on_update_end"]
    watched = [*micro_batch, *update, "on_stop_training_error", "on_training_run_end"]

    def watch():
        journal.clear()
        events = {event: lambda trainer, event=event, **kwargs: journal.append(event) for event in watched}
        return subject.callback(**events)

    trainer = subject.trainer([watch()])
    subject.fit(trainer, subject.data(16), gradient_accumulation_steps=2)
    assert journal == (2 * micro_batch + update) * 2 + ["on_training_run_end"]

    trainer = subject.trainer([watch(), subject.stop_at("on_training_run_start", "not today")])
    result = subject.fit(trainer, subject.data(16))
    assert journal == ["on_stop_training_error", "on_training_run_end"]
    assert "not today" in result.stop_reason

    trainer = subject.trainer([watch(), subject.stop_at("on_training_run_end", "too late")])
    result = subject.fit(trainer, subject.data(4))
    assert journal[-2:] == ["on_training_run_end", "on_stop_training_error"]
    assert "too late" in result.stop_reason


def test_flaw_28_evaluate_returns_its_metrics():
    train_set, eval_set = subject.data(16), subject.data(10)
    trainer = subject.trainer()
    subject.fit(trainer, train_set)
    result = trainer.evaluate(eval_set, per_device_batch_size=4, dataloader_kwargs={"num_workers": 0})
    assert result is not None
    assert result.metrics["evaluation_loss"] == pytest.approx(mean_loss(trainer.model, eval_set))
    # Documented, and kept: an evaluation run starts a new history.
    assert trainer.run_history.get_metric_names() == {"evaluation_loss"}
    assert trainer.run_history.get_latest_metric("evaluation_loss") == result.metrics["evaluation_loss"]


def test_flaw_29_precision_norm_step_mode_and_seed_are_arguments_and_precisions_may_mix():
    dataset = subject.data(16)

    class Bfloat16(subject.recording_trainer_class()):
        def _create_accelerator(self):
            return accelerate.Accelerator(mixed_precision="bf16")

    plain = subject.trainer(model=toys.WatchedLinear(4, 1))
    half = subject.trainer(model=toys.WatchedLinear(4, 1), cls=Bfloat16)
    for trainer, dtype in ((plain, torch.float32), (half, torch.bfloat16), (plain, torch.float32)):
        subject.fit(trainer, dataset)
        assert trainer.get_model().dtype == dtype

    for precision, dtype in (("bf16", torch.bfloat16), ("no", torch.float32)):
        trainer = subject.trainer(model=toys.WatchedLinear(4, 1))
        subject.fit(trainer, dataset, mixed_precision=precision)
        assert trainer.get_model().dtype == dtype
        assert trainer.run_config.mixed_precision == precision

    one, same, other = subject.trainer(), subject.trainer(), subject.trainer()
    subject.fit(one, dataset, torch_seed=1, seed=5)
    subject.fit(same, dataset, torch_seed=2, seed=5, step_mode="eager")
    subject.fit(other, dataset, torch_seed=1, seed=6)
    assert one.seen == same.seen != other.seen

    parameters = inspect.signature(subject.Trainer.train).parameters
    for name in ("seed", "mixed_precision", "gradient_clip_norm", "step_mode"):
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
