"""Callbacks that print, draw bars, and put modules where they belong."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import toys
from loopwright import Trainer, callbacks
from loopwright.callbacks import progress as progress_module
from loopwright.checkpoint.fingerprint import TIERS


def test_progress_is_printed_in_these_words(capsys):
    trainer = toys.trained([callbacks.PrintProgressCallback], toys.data(8), num_epochs=2, eval_dataset=toys.data(4))
    assert capsys.readouterr().out == (
        "\nStarting training run\n"
        "\nStarting epoch 1\n\nStarting eval epoch\n"
        "\nStarting epoch 2\n\nStarting eval epoch\n"
        "Finishing training run\n"
    )
    trainer.evaluate(toys.data(4), dataloader_kwargs={"num_workers": 0})
    assert capsys.readouterr().out == "\nStarting evaluation run\n\nStarting eval epoch\nFinishing evaluation run\n"


def test_the_end_of_a_stopped_run_is_printed_after_its_reason(capsys):
    toys.trained([callbacks.PrintProgressCallback, toys.raising("on_train_step_end")], toys.data(8))
    assert capsys.readouterr().out == "\nStarting training run\n\nStarting epoch 1\nenough\nFinishing training run\n"


def test_a_resumed_run_prints_the_epoch_it_is_in(tmp_path, capsys):
    saver = callbacks.SaveTrainingStateCallback(tmp_path, save_every_n_steps=3)
    toys.trained([saver], toys.data(8), num_epochs=2)
    capsys.readouterr()
    toys.trained([callbacks.PrintProgressCallback], toys.data(8), 2, resume_from=tmp_path / "step_3")
    assert capsys.readouterr().out == (
        "Resuming without the saved state of 1 SaveTrainingStateCallback\n"
        f"Resumed training state from {tmp_path / 'step_3'} (epoch 2)\n"
        f"Resume guarantee T0, {TIERS['T0']}\n"
        "\nStarting training run\n\nStarting epoch 2\nFinishing training run\n"
    )


class Measured(Trainer):
    def train_epoch_end(self):
        self.run_history.update_metric("a_train_metric", 1)

    def eval_epoch_end(self):
        self.run_history.update_metric("accuracy", 0.5)


def test_metrics_are_printed_after_each_epoch_training_apart_from_the_rest(capsys):
    trainer = toys.trained([callbacks.LogMetricsCallback], toys.data(8), cls=Measured, eval_dataset=toys.data(4))
    latest = trainer.run_history.latest()
    assert capsys.readouterr().out == (
        f"\na_train_metric: 1\n\ntrain_loss_epoch: {latest['train_loss_epoch']}\n"
        f"\naccuracy: 0.5\n\neval_loss_epoch: {latest['eval_loss_epoch']}\n"
    )


class CountEvaluations(callbacks.TrainerCallback):
    """Records a metric after the evaluation of an epoch, and one after the epoch."""

    def __init__(self):
        self.count = 0

    def on_eval_epoch_end(self, trainer, **kwargs):
        self.count += 1
        trainer.run_history.update_metric("accuracy", self.count / 10)

    def on_training_run_epoch_end(self, trainer, **kwargs):
        trainer.run_history.update_metric("late", self.count)


class LogNames(callbacks.LogMetricsCallback):
    def __init__(self):  # a constructor that calls no other
        self.logged = []

    def log_metrics(self, trainer, metrics):
        self.logged.append(metrics)


def test_a_metric_that_a_later_callback_records_is_logged_in_its_own_epoch_and_once():
    log = LogNames()
    trainer = toys.trained([log, CountEvaluations()], toys.data(8), num_epochs=2, eval_dataset=toys.data(4))
    names = ("train_loss_epoch", "eval_loss_epoch")
    losses = [{name: trainer.run_history.get_metric_values(name)[epoch]} for epoch in (0, 1) for name in names]
    assert log.logged == [*losses[:2], {"accuracy": 0.1}, {"late": 1}, *losses[2:], {"accuracy": 0.2}, {"late": 2}]


def test_metrics_of_an_earlier_run_are_not_logged_again_and_equal_ones_of_a_new_run_are():
    log = LogNames()
    trainer = toys.trained([log], toys.data(8), eval_dataset=toys.data(4))
    toys.fit(trainer, toys.data(8), reset_run_history=False)
    names = [[f"{kind}_loss_epoch"] for kind in ("train", "eval")]
    assert [list(metrics) for metrics in log.logged] == [*names, names[0]]
    log.logged.clear()
    toys.fit(trainer, toys.data(8), eval_dataset=toys.data(4))
    assert [list(metrics) for metrics in log.logged] == names


def test_metrics_can_be_logged_elsewhere_by_overriding_one_method(capsys):
    logged = []

    class LogToList(callbacks.LogMetricsCallback):
        def log_metrics(self, trainer, metrics):
            logged.append((trainer, metrics))

    trainer = toys.trained([LogToList], toys.data(8), cls=Measured, num_epochs=2, eval_dataset=toys.data(4))
    assert capsys.readouterr().out == ""
    names = [{"a_train_metric", "train_loss_epoch"}, {"accuracy", "eval_loss_epoch"}]
    assert [set(metrics) for _, metrics in logged] == names * 2
    assert all(logged_trainer is trainer for logged_trainer, _ in logged)
    losses = trainer.run_history.get_metric_values("train_loss_epoch")
    assert [metrics["train_loss_epoch"] for _, metrics in logged[::2]] == losses


def test_an_evaluation_run_logs_its_metrics_also_under_the_other_name_of_the_callback(capsys):
    assert callbacks.PrintMetricsCallback is callbacks.LogMetricsCallback
    result = toys.trainer_of([callbacks.LogMetricsCallback]).evaluate(
        toys.data(4), dataloader_kwargs={"num_workers": 0}
    )
    assert capsys.readouterr().out == f"\nevaluation_loss: {result.metrics['evaluation_loss']}\n"


class Bar:
    def __init__(self, **kwargs):
        self.kwargs, self.count, self.is_closed = kwargs, 0, False

    @property
    def n(self):
        return self.kwargs["initial"] + self.count

    def update(self, count):
        assert not self.is_closed
        self.count += count

    def close(self):
        self.is_closed = True

    @property
    def summary(self):
        return (self.kwargs["total"], self.kwargs["initial"], self.count)


@pytest.fixture
def bars(monkeypatch):
    """Every bar made during the test, in order."""
    made = []
    monkeypatch.setattr(progress_module, "tqdm", lambda **kwargs: made.append(Bar(**kwargs)) or made[-1])
    return made


def test_each_epoch_has_a_bar_that_counts_its_micro_batches(bars):
    callback = callbacks.ProgressBarCallback()
    assert callback.pbar is None and callback.eval_pbar is None
    trainer = toys.trainer_of([callback])
    toys.fit(trainer, toys.data(18), num_epochs=2, eval_dataset=toys.data(9), gradient_accumulation_steps=2)
    assert [bar.summary for bar in bars] == [(5, 0, 5), (3, 0, 3)] * 2
    assert all(bar.is_closed for bar in bars)
    assert [bar.kwargs["disable"] for bar in bars] == [False] * 4
    assert callback.pbar is bars[2] and callback.eval_pbar is bars[3]


def test_a_bar_knows_of_the_limits(bars):
    limits = [callbacks.LimitBatchesCallback(3), callbacks.LimitEvalStepsCallback(1)]
    trainer = toys.trainer_of([*limits, callbacks.StepBasedEvaluationCallback(2), callbacks.ProgressBarCallback])
    toys.fit(trainer, toys.data(32), eval_dataset=toys.data(32))
    # The bar of the epoch stays open while a bar inside it comes and goes.
    assert [bar.summary for bar in bars] == [(3, 0, 3), (1, 0, 1), (3, 0, 3)]
    assert all(bar.is_closed for bar in bars)


def test_the_bar_of_a_resumed_epoch_starts_where_the_epoch_does(bars, tmp_path):
    saver = callbacks.SaveTrainingStateCallback(tmp_path, save_every_n_steps=2)
    toys.trained([saver], toys.data(20), num_epochs=2)
    toys.trained([callbacks.ProgressBarCallback], toys.data(20), 2, resume_from=tmp_path / "step_8")
    assert [bar.summary for bar in bars] == [(5, 3, 2)]


def test_a_bar_without_a_known_length_has_no_total_and_an_evaluation_run_has_a_bar(bars):
    trainer = toys.trained([callbacks.ProgressBarCallback], toys.Stream(toys.data(10)))
    trainer.evaluate(toys.data(9), 4, dataloader_kwargs=toys.NO_WORKERS)
    assert [bar.summary for bar in bars] == [(None, 0, 3), (3, 0, 3)]
    assert all(bar.is_closed for bar in bars)


@pytest.mark.parametrize("error", [callbacks.StopTrainingError, KeyboardInterrupt])
@pytest.mark.parametrize("event", ["on_train_step_end", "on_eval_step_end"])
def test_no_bar_is_left_open_by_a_run_that_is_cut_short(error, event, bars):
    with pytest.raises(KeyboardInterrupt) if error is KeyboardInterrupt else nullcontext():
        toys.trained(
            [callbacks.ProgressBarCallback, toys.raising(event, error())], toys.data(8), eval_dataset=toys.data(8)
        )
    assert len(bars) == (1 if event == "on_train_step_end" else 2)
    assert all(bar.is_closed for bar in bars)


def test_a_trainer_with_the_default_callbacks_prints_all_of_it_and_draws_the_real_bars_to_the_end(capsys):
    trainer = toys.trained(callbacks.DEFAULT_CALLBACKS, toys.data(20), eval_dataset=toys.data(8))
    captured = capsys.readouterr()
    metrics = trainer.run_history.latest()
    assert captured.out == (
        "\nStarting training run\n\nStarting epoch 1\n"
        f"\ntrain_loss_epoch: {metrics['train_loss_epoch']}\n"
        "\nStarting eval epoch\n"
        f"\neval_loss_epoch: {metrics['eval_loss_epoch']}\n"
        "Finishing training run\n"
    )
    assert "5/5" in captured.err and "2/2" in captured.err


class Moved(nn.Module):
    def __init__(self):
        super().__init__()
        self.moves = []

    def to(self, device):
        self.moves.append(device)
        return self


@pytest.mark.parametrize("run", ["train", "evaluate"])
def test_modules_that_are_attributes_of_the_trainer_are_moved_to_its_device(run):
    trainer = toys.trainer_of([callbacks.MoveModulesToDeviceCallback])
    trainer.metric, trainer.nothing, trainer.list_of_modules = Moved(), None, [Moved()]
    if run == "train":
        toys.fit(trainer, toys.data(4))
    else:
        trainer.evaluate(toys.data(4), dataloader_kwargs={"num_workers": 0})
    assert trainer.metric.moves == [trainer.device]
    assert trainer.list_of_modules[0].moves == []


def test_the_model_itself_is_left_to_the_engine():
    moved_by_callback = []

    def look(trainer, **kwargs):
        trainer.model.to = moved_by_callback.append
        callbacks.MoveModulesToDeviceCallback().on_training_run_start(trainer)
        del trainer.model.to

    toys.trained([toys.callback(on_training_run_start=look)], toys.data(4))
    assert moved_by_callback == []


def test_batch_norms_are_left_alone_where_there_is_one_process():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    trainer = toys.trained([callbacks.ConvertSyncBatchNormCallback], toys.data(8), model=model)
    assert trainer.model is model and type(model[1]) is nn.BatchNorm1d


@pytest.mark.parametrize(("device", "expected"), [("cpu", nn.BatchNorm1d), ("cuda", nn.SyncBatchNorm)])
def test_batch_norms_of_a_distributed_run_on_accelerators_are_converted(device, expected):
    model, several = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), SimpleNamespace(is_distributed=True)
    trainer = SimpleNamespace(model=model, run_config=several, device=torch.device(device))
    callbacks.ConvertSyncBatchNormCallback().on_training_run_start(trainer)
    assert type(trainer.model[1]) is expected
