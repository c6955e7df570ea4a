"""Callbacks that end a run: early stopping, to the last digit of its arithmetic, and the stop at a bad loss."""

import math
import operator

import pytest
import torch
from torch.utils.data import TensorDataset

import toys
from loopwright.callbacks import DEFAULT_CALLBACKS, EarlyStoppingCallback, StopTrainingError, TerminateOnNaNCallback

NAN, INF = math.nan, math.inf


class Scored(toys.RecordingTrainer):
    def train_epoch_end(self):
        self.run_history.update_metric("score", self.scores.pop(0))


def run_with_scores(scores, trainer=None, **kwargs):
    """Train as many epochs as there are scores; return the callback, the trainer and the result."""
    if trainer is None:
        early_stopping = EarlyStoppingCallback(watch_metric="score", **kwargs)
        trainer = toys.trainer_of([early_stopping], cls=Scored)
    trainer.scores = list(scores)
    result = toys.fit(trainer, toys.data(4), num_epochs=len(scores))
    return trainer.callback_handler.callbacks[0], trainer, result


def test_early_stopping_has_the_documented_arguments_and_attributes():
    names = ("watch_metric", "greater_is_better", "reset_on_train", "operator")
    found = operator.attrgetter("early_stopping_patience", "early_stopping_threshold", *names)
    default = EarlyStoppingCallback()
    assert found(default) == (1, 0.01, "eval_loss_epoch", False, True, operator.lt)
    assert (default.best_metric, default.early_stopping_patience_counter) == (None, 0)
    given = (3, 0.5, "accuracy", True, False)
    assert found(EarlyStoppingCallback(*given)) == (*given, operator.gt)


@pytest.mark.parametrize(
    ("scores", "greater_is_better", "threshold", "patience", "best", "counter", "epochs"),
    [
        # The first value is the best one so far, and counts as nothing.
        ([1.0], False, 0.5, 1, 1.0, 0, 1),
        # The change must be above the threshold: 0.5 is not above 0.5, 0.75 is.
        ([1.0, 0.5], False, 0.5, 1, 1.0, 1, 2),
        ([1.0, 0.25], False, 0.5, 1, 0.25, 0, 2),
        # Absolute, not a share of the value: 100 -> 99.75 is a change of 0.25.
        ([100.0, 99.75], False, 0.5, 1, 100.0, 1, 2),
        ([-1.0, -2.0], False, 0.5, 1, -2.0, 0, 2),
        # Small steps are compared with the best, not with the last: they add up.
        ([1.0, 0.75, 0.5, 0.25], False, 0.5, 3, 0.25, 0, 4),
        # Worse by much is no improvement.
        ([1.0, 9.0], False, 0.5, 1, 1.0, 1, 2),
        ([1.0, 9.0], True, 0.5, 1, 9.0, 0, 2),
        ([1.0, 1.5], True, 0.5, 1, 1.0, 1, 2),
        ([1.0, 0.0], True, 0.5, 1, 1.0, 1, 2),
        # A threshold of 0 asks for any change.
        ([1.0, 1.0], False, 0.0, 1, 1.0, 1, 2),
        ([1.0, math.nextafter(1.0, 0.0)], False, 0.0, 1, math.nextafter(1.0, 0.0), 0, 2),
        # Patience counts epochs in a row; an improvement starts the count anew.
        ([1.0, 1.0, 0.0, 0.0, 0.0, 5.0], False, 0.5, 2, 0.0, 2, 5),
        ([1.0, 1.0, 1.0, 1.0], False, 0.5, 3, 1.0, 3, 4),
        # A nan never improves anything, and is never the best.
        ([NAN, NAN, 1.0], False, 0.5, 3, 1.0, 0, 3),
        ([NAN, 1.0], True, 0.5, 2, 1.0, 0, 2),
        ([NAN, NAN, 1.0], False, 0.5, 2, None, 2, 2),
        ([1.0, NAN, 0.0], False, 0.5, 2, 0.0, 0, 3),
        ([1.0, NAN, NAN, 0.0], False, 0.5, 2, 1.0, 2, 3),
        # Infinities are numbers: anything finite is better than the worst, nothing is better than the best.
        ([INF, 1.0], False, 0.5, 1, 1.0, 0, 2),
        ([-INF, 1.0], False, 0.5, 1, -INF, 1, 2),
        ([INF, INF], False, 0.5, 1, INF, 1, 2),
    ],
)
def test_early_stopping_counts_epochs_without_an_improvement_above_the_threshold(
    scores, greater_is_better, threshold, patience, best, counter, epochs
):
    options = {"early_stopping_patience": patience, "early_stopping_threshold": threshold}
    early_stopping, trainer, result = run_with_scores(scores, greater_is_better=greater_is_better, **options)
    assert (early_stopping.best_metric, early_stopping.early_stopping_patience_counter) == (best, counter)
    assert len(trainer.seen) == epochs
    reason = f"Stopping training due to no improvement after {patience} epochs"
    assert result.stop_reason == (reason if counter >= patience else None)


def test_early_stopping_prints_what_it_sees(capsys):
    run_with_scores([1.0, 0.25, 0.25, 1 / 6], early_stopping_patience=2, early_stopping_threshold=0.5)
    assert capsys.readouterr().out == (
        "score: lower is better (default of EarlyStoppingCallback); pass greater_is_better=True if higher is, "
        "or greater_is_better=False to leave out this note\n"
        "\nImprovement of 0.75 observed, resetting counter. "
        "score: 0.25, to beat: 1 by more than 0.5 (lower is better)\n"
        "Early stopping counter: 0/2\n"
        "\nNo improvement observed, incrementing counter. "
        "score: 0.25, to beat: 0.25 by more than 0.5 (lower is better)\n"
        "Early stopping counter: 1/2\n"
        "\nImprovement of 0.08333 is too small, incrementing counter. "
        "score: 0.1667, to beat: 0.25 by more than 0.5 (lower is better)\n"
        "Early stopping counter: 2/2\n"
        "Stopping training due to no improvement after 2 epochs\n"
    )


def test_early_stopping_starts_over_with_every_run_unless_told_not_to():
    for reset, best in ((True, 5.0), (False, 1.0)):
        early_stopping, trainer, _ = run_with_scores([1.0, 2.0], early_stopping_patience=3, reset_on_train=reset)
        assert early_stopping.early_stopping_patience_counter == 1
        run_with_scores([5.0, 5.0], trainer)
        assert early_stopping.best_metric == best
        assert early_stopping.early_stopping_patience_counter == (1 if reset else 3)


def test_early_stopping_takes_a_tensor_metric():
    early_stopping, _, result = run_with_scores([torch.tensor(1.0), torch.tensor(1.0)])
    assert early_stopping.best_metric == 1.0 and result.stop_reason is not None


def test_a_metric_that_was_never_recorded_is_an_error():
    trainer = toys.trainer_of([EarlyStoppingCallback(watch_metric="accuracy")])
    with pytest.raises(ValueError, match="No values have been recorded for the metric accuracy"):
        toys.fit(trainer, toys.data(4))


def test_an_early_stop_runs_the_closing_events_and_keeps_the_epoch():
    watch = toys.watch(
        on_training_run_epoch_end=lambda trainer, **kwargs: "epoch end",
        on_stop_training_error=lambda trainer, error, **kwargs: str(error),
        on_training_run_end=lambda trainer, **kwargs: "run end",
    )
    trainer = toys.trainer_of([EarlyStoppingCallback(watch_metric="score"), watch], cls=Scored)
    trainer.scores = [1.0, 1.0, 1.0]
    result = toys.fit(trainer, toys.data(4), num_epochs=3)
    # The stop of epoch 2 comes before the next callback hears of that epoch's end.
    assert watch.seen == ["epoch end", "Stopping training due to no improvement after 1 epochs", "run end"]
    assert result.epochs == 2 and result.updates == 2
    assert trainer.run_history.get_metric_values("score") == [1.0, 1.0]


def poisoned(num_samples, bad_ids, value=NAN):
    x, y, ids = toys.data(num_samples).tensors
    is_bad = torch.isin(ids, torch.tensor(bad_ids)).unsqueeze(1)
    return TensorDataset(x, torch.where(is_bad, torch.tensor(value), y), ids)


NAN_IN_UPDATE_4 = "Stopping training due to NaN loss in training step (first at update 4, samples 12, 13, 14, 15)"


def fit_in_order(trainer, dataset, **kwargs):
    return toys.fit(trainer, dataset, train_dataloader_kwargs={"shuffle": False}, **kwargs)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_bad_training_loss_is_seen_at_the_next_log_which_names_the_first_bad_update(value, capsys):
    # Micro-batches of 4: sample 13 is in the fourth update; logs come after updates 3 and 6.
    terminate = TerminateOnNaNCallback()
    trainer = toys.trainer_of([terminate], momentum=0.0)
    result = fit_in_order(trainer, poisoned(40, [13], value), num_epochs=2, log_every=3)
    assert result.stop_reason == NAN_IN_UPDATE_4 and result.updates == 6 and terminate.triggered
    assert NAN_IN_UPDATE_4 in capsys.readouterr().out
    assert list(trainer.run_history.get_metric_values("train_loss_epoch")) == []


def test_a_bad_training_loss_is_seen_at_the_end_of_the_epoch_at_the_latest():
    result = fit_in_order(toys.trainer_of([TerminateOnNaNCallback()]), poisoned(40, [13]), num_epochs=3)
    assert result.stop_reason == NAN_IN_UPDATE_4 and result.updates == 10


def test_the_first_bad_update_is_counted_over_the_run_and_in_updates_not_micro_batches():
    x, y, ids = toys.data(24).tensors
    healthy = TensorDataset(x, y.clone(), ids)
    # Three updates of two micro-batches per epoch; sample 13 is in the second update of the second epoch.
    poison = toys.callback(on_training_run_epoch_end=lambda trainer, **kwargs: healthy.tensors[1][13].fill_(NAN))
    trainer = toys.trainer_of([TerminateOnNaNCallback(), poison])
    result = fit_in_order(trainer, healthy, num_epochs=3, gradient_accumulation_steps=2)
    samples = ", ".join(map(str, range(8, 16)))
    assert result.stop_reason.endswith(f"NaN loss in training step (first at update 5, samples {samples})")
    assert result.updates == 6


def test_a_bad_evaluation_loss_stops_the_run():
    terminate = TerminateOnNaNCallback()
    trainer = toys.trained([terminate], toys.data(8), num_epochs=3, eval_dataset=poisoned(8, [7]))
    assert trainer.result.stop_reason == "Stopping training due to NaN loss in validation step"
    assert terminate.triggered and trainer.result.updates == 2
    assert math.isnan(trainer.run_history.get_latest_metric("eval_loss_epoch"))


def test_a_bad_loss_stops_an_evaluation_run_with_its_closing_events():
    watch = toys.watch(
        on_stop_training_error=lambda trainer, **kwargs: "stop", on_evaluation_run_end=lambda trainer, **kwargs: "end"
    )
    trainer = toys.trainer_of([TerminateOnNaNCallback(), watch])
    result = trainer.evaluate(poisoned(8, [7]), dataloader_kwargs=toys.NO_WORKERS)
    assert result.stop_reason == "Stopping training due to NaN loss in validation step"
    assert watch.seen == ["stop", "end"]


def test_a_healthy_run_after_a_bad_one_is_not_stopped():
    terminate = TerminateOnNaNCallback()
    trainer = toys.trainer_of([terminate], momentum=0.0)
    assert fit_in_order(trainer, poisoned(8, [0])).stop_reason is not None
    assert terminate.triggered

    trainer.model.load_state_dict(toys.network().state_dict())
    result = fit_in_order(trainer, toys.data(8), num_epochs=2, eval_dataset=toys.data(8))
    assert result.stop_reason is None and result.updates == 4
    assert not terminate.triggered


def test_the_default_callbacks_stop_a_bad_run_and_the_process_lives_on(capsys):
    trainer = toys.trainer_of(DEFAULT_CALLBACKS)
    result = fit_in_order(trainer, poisoned(8, [0]), num_epochs=2)
    assert result.stop_reason is not None and result.updates == 2
    assert "Finishing training run" in capsys.readouterr().out


def test_no_training_state_is_saved_in_an_epoch_with_a_bad_loss(tmp_path, capsys):
    # Asked for right after the bad update, long before the next log would see it.
    fit_in_order(toys.trainer_of([TerminateOnNaNCallback(), toys.save_at_updates(tmp_path)]), poisoned(16, [9]))
    assert toys.names_in(tmp_path) == {"update_1", "update_2"}
    assert f"Not saving {tmp_path / 'update_3'}: a loss of this epoch was not finite" in capsys.readouterr().out


def test_one_batch_can_be_checked_by_hand():
    terminate = TerminateOnNaNCallback()
    for healthy in (torch.tensor(1.0), torch.zeros(3), 1.0):
        terminate.check_for_nan_after_batch({"loss": healthy}, step="training")
    assert not terminate.triggered
    for bad in (torch.tensor(NAN), torch.tensor([1.0, -INF]), NAN, torch.full((2, 2), INF)):
        terminate.triggered = False
        with pytest.raises(StopTrainingError, match="^Stopping training due to NaN loss in validation step$"):
            terminate.check_for_nan_after_batch({"loss": bad}, step="validation")
        assert terminate.triggered
    with pytest.raises(StopTrainingError, match="in training step"):
        terminate.check_for_nan_after_batch({"loss": torch.tensor(NAN)})
