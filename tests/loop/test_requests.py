"""Callbacks ask, the loop acts: logs, evaluations, saves and stops are served at update boundaries."""

import json
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

import toys
from loopwright import Trainer
from loopwright.callbacks import StopTrainingError, TerminateOnNaNCallback, TrainerCallback
from loopwright.checkpoint import Checkpointing
from loopwright.errors import ConfigError
from toys import NanFrom, pairs


class Journal(TrainerCallback):
    """Notes (event, updates done) of what is served."""

    def __init__(self):
        self.entries = []
        self.logs = []

    def on_log(self, trainer, logs=None, **kwargs):
        self.entries.append(("log", trainer.progress.update))
        self.logs.append(logs)

    def on_eval_epoch_start(self, trainer, is_intermediate=False, **kwargs):
        self.entries.append(("look" if is_intermediate else "evaluate", trainer.progress.update))

    def on_checkpoint_saved(self, trainer, path=None, **kwargs):
        self.entries.append(("save", trainer.progress.update))

    def on_stop_training_error(self, trainer, **kwargs):
        self.entries.append(("stop", trainer.progress.update))

    def of(self, kind: str) -> list[int]:
        return [update for entry, update in self.entries if entry == kind]


class Asking(TrainerCallback):
    """Calls a function at the n-th call of an event (counted from 1)."""

    def __init__(self, event: str, call: int, ask):
        self.calls = 0

        def method(trainer, **kwargs):
            self.calls += 1
            if self.calls == call:
                ask(trainer)

        setattr(self, event, method)


def run(*callbacks, num_epochs: int = 1, loss_func=None, **kwargs):
    """Train on six batches of 4; return trainer, result and journal."""
    options = {"cls": Trainer, "loss_func": loss_func or nn.MSELoss(), "seed": 0, **kwargs}
    journal = Journal()
    trainer = toys.trained([*callbacks, journal], pairs(24), num_epochs, lr=0.01, momentum=0.0, **options)
    return trainer, trainer.result, journal


def saving(folder):
    return lambda trainer: trainer.request_save(folder)


@pytest.mark.parametrize("call", ["evaluate", "predict"])
def test_a_call_that_is_refused_inside_a_run_leaves_the_run_as_it_was(call):
    refused = []

    def ask(trainer):
        with pytest.raises(ConfigError, match="in the middle of a training run") as error:
            getattr(trainer, call)(pairs())
        refused.append(error)

    noisy = {"collate_fn": lambda samples: [part + 0.1 * torch.randn(()) for part in default_collate(samples)]}
    undisturbed, _, _ = run(num_epochs=2, **noisy)
    trainer, result, _ = run(Asking("on_update_end", 3, ask), num_epochs=2, **noisy)
    assert len(refused) == 1 and result.updates == 12
    assert torch.equal(trainer.model.weight, undisturbed.model.weight)


def ask_for_everything(folder):
    def ask(trainer):
        trainer.request_stop("asked to")
        trainer.request_save(folder / "state", {"why": "asked to"})
        trainer.request_evaluation()
        trainer.request_log()

    return ask


@pytest.mark.parametrize(
    "event", ["on_train_step_start", "on_train_step_end", "on_before_optimizer_step", "on_update_end"]
)
def test_requests_are_served_at_the_next_boundary_in_the_order_log_evaluate_save_stop(event, tmp_path):
    _, result, journal = run(Asking(event, 2, ask_for_everything(tmp_path)), eval_dataset=pairs(4))
    assert journal.entries == [("log", 2), ("look", 2), ("save", 2), ("stop", 2)]
    assert result.stop_reason == "asked to"
    assert (result.epochs, result.updates) == (0, 2)


def test_requests_made_inside_a_window_wait_for_its_update(tmp_path):
    # The third micro-batch is the first of the second window.
    asking = Asking("on_train_step_start", 3, ask_for_everything(tmp_path))
    trainer, _, journal = run(asking, eval_dataset=pairs(4), gradient_accumulation_steps=2)
    assert journal.entries == [("log", 2), ("look", 2), ("save", 2), ("stop", 2)]
    assert trainer.progress.batch == 4


def test_a_saved_request_keeps_its_metadata_and_can_be_resumed(tmp_path):
    def save(trainer):
        trainer.request_save(tmp_path / "state", {"why": "asked to"})

    trainer, _, _ = run(Asking("on_train_step_end", 2, save))
    metadata = trainer.load_training_state(tmp_path / "state")
    assert metadata["why"] == "asked to"
    assert metadata["current_epoch"] == 1
    _, result, journal = run(resume_from=tmp_path / "state", log_every=1)
    assert result.updates == 6
    assert journal.of("log") == [3, 4, 5, 6]


def test_several_saves_are_all_served_and_one_request_is_served_once(tmp_path):
    def save(trainer):
        trainer.request_save(tmp_path / "one")
        trainer.request_save(str(tmp_path / "two"))
        trainer.request_log()
        trainer.request_log()

    _, _, journal = run(Asking("on_update_end", 3, save))
    assert journal.entries == [("log", 3), ("save", 3), ("save", 3), ("log", 6)]


@pytest.mark.parametrize("event", ["on_train_epoch_end", "on_eval_epoch_end", "on_training_run_epoch_end"])
def test_a_stop_asked_for_at_the_end_of_an_epoch_ends_the_run_there(event):
    trainer, result, journal = run(
        Asking(event, 1, lambda trainer: trainer.request_stop("one is enough")), num_epochs=3, eval_dataset=pairs(4)
    )
    assert result.stop_reason == "one is enough"
    # An epoch whose evaluation or last events are missing is not finished: a resumed run would go on there.
    assert (result.epochs, result.updates) == (int(event == "on_training_run_epoch_end"), 6)
    assert journal.of("stop") == [6]
    assert "train_loss_epoch" in result.metrics
    assert ("eval_loss_epoch" in result.metrics) == (event != "on_train_epoch_end")


def test_a_save_asked_for_at_the_end_of_the_run_is_of_its_end(tmp_path):
    trainer, _, journal = run(Asking("on_training_run_end", 1, saving(tmp_path / "final")), num_epochs=2)
    assert journal.entries[-1] == ("save", 12)
    trainer.load_training_state(tmp_path / "final")
    _, result, again = run(resume_from=tmp_path / "final", num_epochs=2)
    assert (result.epochs, result.updates, again.entries) == (2, 12, [])


def test_the_first_reason_to_stop_is_reported_and_the_next_run_forgets_it():
    def ask(trainer):
        trainer.request_stop("first")
        trainer.request_stop("second")

    trainer, result, _ = run(Asking("on_train_step_end", 1, ask))
    assert result.stop_reason == "first"
    assert trainer.train(pairs(), 1).stop_reason is None


def test_an_evaluation_that_cannot_be_had_is_not_waited_for():
    _, result, journal = run(Asking("on_train_step_end", 1, lambda trainer: trainer.request_evaluation()))
    assert journal.entries == [("log", 6)]
    assert result.updates == 6


@pytest.mark.parametrize(
    ("log_every", "logged_at"), [(1, list(range(1, 13))), (4, [4, 6, 8, 12]), (5, [5, 6, 10, 12]), (50, [6, 12])]
)
def test_logs_come_every_so_many_updates_of_the_run_and_at_the_end_of_each_epoch(log_every, logged_at):
    _, _, journal = run(num_epochs=2, log_every=log_every)
    assert journal.of("log") == logged_at


def test_a_log_says_update_epoch_loss_and_learning_rate_and_the_gradient_norm_where_it_is_known():
    halving = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    _, result, journal = run(num_epochs=2, log_every=3, create_scheduler_fn=halving)
    assert [list(log) for log in journal.logs] == [["update", "epoch", "loss", "lr"]] * 4
    assert [log["update"] for log in journal.logs] == [3, 6, 9, 12]
    assert [log["epoch"] for log in journal.logs] == [1, 1, 2, 2]
    assert [log["lr"] for log in journal.logs] == [0.01 * 0.5**update for update in (3, 6, 9, 12)]
    assert all(type(log["loss"]) is float for log in journal.logs)
    mean = (journal.logs[2]["loss"] + journal.logs[3]["loss"]) / 2
    assert mean == pytest.approx(result.metrics["train_loss_epoch"])

    norms = toys.watch(on_before_optimizer_step=lambda trainer, **kwargs: float(trainer.gradient_norm))
    trainer, _, journal = run(norms, log_every=3, gradient_clip_norm=0.5)
    assert [log["gradient_norm"] for log in journal.logs] == [norms.seen[2], norms.seen[5]]
    assert max(log["gradient_norm"] for log in journal.logs) > 0.5, "the norm before clipping"
    assert "gradient_norm" not in run(gradient_clip_value=0.5)[2].logs[0]


@pytest.mark.parametrize(
    ("evaluate_every", "looks", "evaluations"),
    [
        (None, [], [6, 12, 18]),
        (4, [4, 8, 12, 16], [6, 12, 18]),
        ("4", [4, 8, 12, 16], [6, 12, 18]),
        ("4 updates", [4, 8, 12, 16], [6, 12, 18]),
        ("1 update", list(range(1, 19)), [6, 12, 18]),
        ("1 epoch", [], [6, 12, 18]),
        ("2 epochs", [], [12, 18]),
        ("9 epochs", [], [18]),
    ],
)
def test_evaluations_come_as_often_as_asked_for_and_always_after_the_last_epoch(evaluate_every, looks, evaluations):
    trainer, _, journal = run(num_epochs=3, eval_dataset=pairs(4), evaluate_every=evaluate_every)
    assert journal.of("look") == looks
    assert journal.of("evaluate") == evaluations
    assert len(trainer.run_history.get_metric_values("intermediate_eval_loss")) == len(looks)
    assert len(trainer.run_history.get_metric_values("eval_loss_epoch")) == len(evaluations)


def test_a_run_cut_short_by_its_limit_is_evaluated_at_its_end_too():
    _, _, journal = run(num_epochs=9, eval_dataset=pairs(4), evaluate_every="4 epochs", max_num_train_steps=8)
    assert journal.of("evaluate") == [8]


def test_checkpoints_are_written_as_often_as_asked_for_and_at_the_end(tmp_path):
    by_updates = Checkpointing(tmp_path / "updates", every_updates=4, keep_last=2, asynchronous=False)
    _, _, journal = run(num_epochs=2, checkpoints=by_updates)
    assert journal.of("save") == [4, 8, 12, 12]
    assert saved_updates(tmp_path / "updates") == [8, 12]
    by_epochs = Checkpointing(tmp_path / "epochs", every_epochs=2, asynchronous=False)
    _, _, journal = run(num_epochs=5, checkpoints=by_epochs)
    assert journal.of("save") == [12, 24, 30]


def saved_updates(folder) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


@pytest.mark.parametrize("callbacks", [(), (TerminateOnNaNCallback(),)], ids=["going on", "terminating"])
def test_nothing_is_saved_once_a_loss_was_not_finite(tmp_path, callbacks, capsys):
    checkpoints = toys.saving(tmp_path, asynchronous=False)
    run(*callbacks, num_epochs=2, loss_func=NanFrom(4), log_every=50, checkpoints=checkpoints)
    assert saved_updates(tmp_path) == [1, 2, 3]
    assert "Not saving" in capsys.readouterr().out
    for path in tmp_path.glob("step-*"):
        numbers = [number for file in path.rglob("*.json") for number in _numbers(json.loads(file.read_text()))]
        assert len(numbers) > 10
        assert all(math.isfinite(number) for number in numbers)


def _numbers(value):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, (int, float)):
        yield value


def test_a_save_and_a_nan_in_the_same_update_do_not_meet(tmp_path):
    _, _, journal = run(Asking("on_train_step_end", 4, saving(tmp_path / "bad")), loss_func=NanFrom(4))
    assert journal.of("save") == []
    assert not (tmp_path / "bad").exists()


def test_a_stop_between_the_weights_and_the_count_saves_nothing_that_disagrees(tmp_path):
    def stop(trainer):
        raise StopTrainingError("in the middle of an update")

    _, result, journal = run(
        Asking("on_optimizer_step_end", 3, stop), checkpoints=toys.saving(tmp_path, asynchronous=False)
    )
    assert result.stop_reason == "in the middle of an update"
    assert journal.of("save") == saved_updates(tmp_path) == [1, 2]


def test_a_nan_is_reported_by_the_log_and_does_not_hide_in_the_mean():
    _, result, journal = run(loss_func=NanFrom(4), log_every=2)
    assert [math.isnan(log["loss"]) for log in journal.logs] == [False, True]
    assert "train_loss_epoch" not in result.metrics
    assert result.stop_reason.startswith("Stopping training: the loss of update 4 is not finite (samples ")


def test_an_evaluation_that_a_callback_makes_itself_does_not_replace_the_regular_one():
    evaluates_too = toys.callback(
        on_train_epoch_end=lambda trainer, **kwargs: trainer._run_eval_epoch(trainer._eval_dataloader)
    )
    trainer, result, journal = run(evaluates_too, num_epochs=2, eval_dataset=pairs(4))
    assert journal.of("evaluate") == [6, 6, 12, 12]
    assert len(trainer.run_history.get_metric_values("eval_loss_epoch")) == 4
    assert (result.epochs, result.stop_reason) == (2, None)


def test_a_stop_asked_for_in_the_regular_evaluation_ends_the_run_and_it_is_not_repeated_on_resume(tmp_path):
    checkpoints = Checkpointing(tmp_path, every_updates=None, every_epochs=None)
    options = {"num_epochs": 2, "eval_dataset": pairs(4), "checkpoints": checkpoints}
    _, result, journal = run(Asking("on_eval_epoch_end", 1, lambda trainer: trainer.request_stop("enough")), **options)
    assert (result.stop_reason, journal.of("evaluate")) == ("enough", [6])
    _, result, journal = run(**options, resume_from="auto")
    assert (result.epochs, journal.of("evaluate")) == (2, [12])
