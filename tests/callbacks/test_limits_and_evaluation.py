"""Callbacks that cut epochs short, and the one that evaluates inside them."""

import copy
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import toys
from loopwright import Trainer, TrainerPlaceholderValues
from loopwright.callbacks import (
    LimitBatchesCallback,
    LimitEvalStepsCallback,
    ModelEmaCallback,
    PrintProgressCallback,
    SaveTrainingStateCallback,
    StepBasedEvaluationCallback,
    TrainerCallback,
)
from loopwright.errors import ConfigError
from loopwright.utils import LimitBatches


class Counter(TrainerCallback):
    """Counts training and evaluation batches, the latter by epoch: [(is_intermediate, batches), ...]."""

    def __init__(self):
        self.train_batches = 0
        self.evaluations = []

    def on_train_step_end(self, trainer, **kwargs):
        self.train_batches += 1

    def on_eval_epoch_start(self, trainer, is_intermediate, **kwargs):
        self.evaluations.append((is_intermediate, 0))

    def on_eval_step_end(self, trainer, **kwargs):
        is_intermediate, batches = self.evaluations[-1]
        self.evaluations[-1] = (is_intermediate, batches + 1)


@pytest.mark.parametrize("number", [0, -1, 1.5, True])
@pytest.mark.parametrize(
    "make", [LimitBatchesCallback, LimitEvalStepsCallback, StepBasedEvaluationCallback], ids=lambda make: make.__name__
)
def test_numbers_that_cannot_be_are_refused_when_the_callback_is_made(make, number):
    with pytest.raises(ConfigError, match=f"must be a whole number of at least 1, got {number}"):
        make(number)


def test_limited_epochs_and_evaluation_runs_have_so_many_batches_and_everybody_knows(capsys):
    counter = Counter()
    schedule = partial(StepLR, step_size=TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH)
    options = {"eval_dataset": toys.data(32), "gradient_accumulation_steps": 2, "create_scheduler_fn": schedule}
    trainer = toys.trained([LimitBatchesCallback(3), counter], toys.data(32), num_epochs=2, **options)
    assert counter.train_batches == 6 and counter.evaluations == [(False, 3)] * 2
    assert trainer.result.updates == 4  # each epoch has a window of two and one of one
    assert trainer.run_config.num_local_update_steps_per_epoch == 2
    assert trainer.scheduler.step_size == 2
    assert "Limiting epochs to 3 batches\n" in capsys.readouterr().out
    trainer.evaluate(toys.data(16), 4, dataloader_kwargs=toys.NO_WORKERS)
    assert counter.evaluations == [(False, 3)] * 3


def test_a_limit_takes_the_first_batches_of_the_whole_epoch_and_above_its_length_changes_nothing():
    def run(*limits):
        return toys.trained([LimitBatchesCallback(limit) for limit in limits], toys.data(30), 2)

    whole, limited, above = run(), run(3), run(100)
    assert above.seen == whole.seen
    assert torch.equal(toys.weights(above), toys.weights(whole))
    assert limited.seen == whole.seen[:3] + whole.seen[8:11]
    assert LimitBatchesCallback(3).num_batches == LimitBatchesCallback(np.int64(3)).num_batches == 3


def test_a_limited_run_resumes_inside_its_short_epoch(tmp_path):
    saver = SaveTrainingStateCallback(tmp_path, save_every_n_steps=1)
    whole = toys.trained([LimitBatchesCallback(3), saver], toys.data(32), num_epochs=2)
    resumed = toys.trained([LimitBatchesCallback(3)], toys.data(32), num_epochs=2, resume_from=tmp_path / "step_2")
    assert resumed.seen == whole.seen[2:]
    assert torch.equal(toys.weights(resumed), toys.weights(whole))


def test_a_trainer_made_inside_limit_batches_is_limited_for_its_life():
    with LimitBatches(2):
        limited = toys.trainer_of()
    unlimited = toys.trainer_of()
    for trainer, batches in ((limited, 2), (unlimited, 8)):
        toys.fit(trainer, toys.data(32))
        assert len(trainer.seen) == batches
    assert limited.callback_handler.callback_list == ["LimitBatchesCallback"]


def test_the_average_of_a_model_is_evaluated_on_as_many_batches_as_the_model(tmp_path):
    for limiter in (LimitBatchesCallback(2), LimitEvalStepsCallback(2, limit_intermediate_only=False)):
        counter, inside = Counter(), Counter()
        ema = ModelEmaCallback(decay=0.0, save_path=tmp_path / "ema.pt", callbacks=[inside])
        trainer = toys.trained([limiter, counter, ema], eval_dataset=toys.data(32))
        assert counter.evaluations == inside.evaluations == [(False, 2)]
        # With a decay of 0 the average is the model itself.
        latest = trainer.run_history.latest()
        assert latest["ema_model_eval_loss_epoch"] == latest["eval_loss_epoch"]


def test_limited_evaluation_is_short_where_it_is_intermediate(capsys):
    counter = Counter()
    trainer = toys.trainer_of([LimitEvalStepsCallback(3), StepBasedEvaluationCallback(2), counter])
    toys.fit(trainer, toys.data(24), eval_dataset=toys.data(32))
    assert counter.evaluations == [(True, 3), (True, 3), (False, 8)]
    assert counter.train_batches == 6
    assert capsys.readouterr().out.count("Limiting evaluation to 3 steps per process\n") == 2


def test_limited_evaluation_is_short_everywhere_when_asked(capsys):
    counter = Counter()
    limit = LimitEvalStepsCallback(num_eval_steps=3, limit_intermediate_only=False)
    assert (limit.num_eval_steps, limit.limit_intermediate_only) == (3, False)
    trainer = toys.trainer_of([StepBasedEvaluationCallback(4), counter, limit])  # any order will do
    toys.fit(trainer, toys.data(24), eval_dataset=toys.data(32))
    assert counter.evaluations == [(True, 3), (False, 3)]
    assert capsys.readouterr().out.count("Limiting evaluation to 3 steps per process\n") == 2


def test_the_limit_of_evaluation_is_shared_by_the_processes_and_at_least_one():
    for steps, expected in ((3, 1), (4, 1), (9, 2), (16, 4)):
        limit = partial(LimitEvalStepsCallback(steps).batch_limit, SimpleNamespace(num_processes=4))
        assert limit(training=False, is_intermediate=True) == expected
        assert limit(training=False, is_intermediate=False) is None and limit(training=True) is None


def test_the_loss_of_a_limited_evaluation_is_that_of_its_batches():
    eval_set = toys.data(32)
    trainer = toys.trainer_of([LimitEvalStepsCallback(2, limit_intermediate_only=False)])
    toys.fit(trainer, toys.data(8), eval_dataset=eval_set)
    x, y, _ = eval_set[:8]
    with torch.no_grad():
        loss = nn.functional.mse_loss(trainer.model(x), y).item()
    assert trainer.run_history.get_latest_metric("eval_loss_epoch") == pytest.approx(loss, rel=1e-5)


def test_evaluation_comes_after_every_nth_micro_batch_but_the_first(capsys):
    def place(trainer, is_intermediate, **kwargs):
        return trainer.progress.update, is_intermediate

    watch = toys.watch(on_eval_epoch_start=place)
    callback = StepBasedEvaluationCallback(eval_every_n_steps=2)
    assert callback.eval_every_n_steps == 2
    trainer = toys.trained([callback, watch], toys.data(24), num_epochs=2, eval_dataset=toys.data(8))
    # Steps 2 and 4 of each epoch, that is after its third and fifth update, and each epoch's own evaluation.
    assert watch.seen == [(3, True), (5, True), (6, False), (9, True), (11, True), (12, False)]
    assert capsys.readouterr().out == "".join(
        f"\nRunning evaluation after {step} training steps\n\nResuming training...\n" for step in (2, 4, 2, 4)
    )
    assert len(trainer.run_history.get_metric_values("intermediate_eval_loss")) == 4
    assert len(trainer.run_history.get_metric_values("eval_loss_epoch")) == 2


def test_evaluation_waits_for_the_end_of_the_update():
    def place(trainer, is_intermediate, **kwargs):
        return (trainer.progress.update, trainer.progress.batch) if is_intermediate else None

    watch = toys.watch(on_eval_epoch_start=place)
    trainer = toys.trainer_of([StepBasedEvaluationCallback(3), watch])
    toys.fit(trainer, toys.data(32), eval_dataset=toys.data(8), gradient_accumulation_steps=2)
    # Asked for at step 3 (the end of the second window) and at step 6 (inside the fourth).
    assert watch.seen == [(2, 4), (4, 8), None]


def test_evaluation_inside_an_epoch_changes_nothing_of_the_training():
    plain, evaluating = (
        toys.trainer_of(callbacks, toys.network(6, dropout=0.4)) for callbacks in ([], [StepBasedEvaluationCallback(1)])
    )
    for trainer in (plain, evaluating):
        toys.fit(trainer, toys.data(20), num_epochs=2, eval_dataset=toys.data(12))
    assert torch.equal(toys.weights(plain), toys.weights(evaluating))
    for name in ("train_loss_epoch", "eval_loss_epoch"):
        assert plain.run_history.get_metric_values(name) == evaluating.run_history.get_metric_values(name)


def test_every_module_is_put_back_into_the_mode_it_was_in():
    """A batch norm that the user keeps in evaluation mode stays in it, and the others train on."""
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))

    def modes(trainer, **kwargs):
        return [module.training for module in trainer.model]

    in_training, in_evaluation = toys.watch(on_train_step_start=modes), toys.watch(on_eval_step_end=modes)

    class WithFrozenNorm(Trainer):
        def train_epoch_start(self):
            super().train_epoch_start()
            self.model[0].eval()

    frozen = dict(copy.deepcopy(model[0]).named_buffers())
    callbacks = [StepBasedEvaluationCallback(1), in_training, in_evaluation]
    toys.trained(callbacks, model=model, cls=WithFrozenNorm, eval_dataset=toys.data(4))
    assert in_training.seen == [[False, True, True, True, True]] * 4
    assert in_evaluation.seen == [[False] * 5] * 4  # three inside the epoch and one after it
    toys.assert_same(dict(model[0].named_buffers()), frozen)
    assert int(model[2].num_batches_tracked) == 4


def test_what_the_hooks_record_in_it_is_kept():
    class Measured(Trainer):
        def eval_epoch_end(self):
            self.run_history.update_metric("answer", 42)

    trainer = toys.trained([StepBasedEvaluationCallback(1)], toys.data(12), cls=Measured, eval_dataset=toys.data(8))
    assert trainer.run_history.get_metric_values("answer") == [42] * 3
    x, y, _ = toys.data(8).tensors
    with torch.no_grad():
        loss = nn.functional.mse_loss(trainer.model(x), y).item()
    # The last one comes after the last update: the same weights as the epoch's own.
    assert trainer.run_history.get_latest_metric("intermediate_eval_loss") == pytest.approx(loss, rel=1e-5)
    assert trainer.run_history.get_latest_metric("eval_loss_epoch") == pytest.approx(loss, rel=1e-5)


def test_without_an_evaluation_dataset_it_asks_in_vain():
    counter = Counter()
    trainer = toys.trained([StepBasedEvaluationCallback(1), counter])
    assert trainer.result.updates == 4 and counter.evaluations == []
    assert "intermediate_eval_loss" not in trainer.run_history.get_metric_names()


def test_what_is_printed_around_an_evaluation_follows_the_order_of_the_list(capsys):
    trainer = toys.trainer_of([PrintProgressCallback(), StepBasedEvaluationCallback(1)])
    toys.fit(trainer, toys.data(8), eval_dataset=toys.data(4))
    assert capsys.readouterr().out == (
        "\nStarting training run\n\nStarting epoch 1\n"
        "\nStarting eval epoch\n\nRunning evaluation after 1 training steps\n\nResuming training...\n"
        "\nStarting eval epoch\nFinishing training run\n"
    )


def test_two_of_them_and_evaluate_every_share_one_evaluation():
    counter = Counter()
    trainer = toys.trainer_of([StepBasedEvaluationCallback(1), StepBasedEvaluationCallback(2), counter])
    toys.fit(trainer, toys.data(16), eval_dataset=toys.data(4), evaluate_every=1)
    assert counter.evaluations == [(True, 1)] * 4 + [(False, 1)]
