"""Callbacks that save: the best model, training states, and a warmup-stable-decay schedule's checkpoints."""

import json
import math
import operator
from datetime import datetime
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

import toys
from loopwright.callbacks import (
    SaveBestModelCallback,
    SaveTrainingStateCallback,
    StopTrainingError,
    TrainerCallback,
    WSDCheckpointCallback,
)
from loopwright.checkpoint import Checkpointing, read
from loopwright.errors import CheckpointError, ConfigError
from loopwright.schedulers import WSDLrScheduler
from toys import names_in


def stop_when(event, is_there):
    """A callback that raises a stop at an event, once the condition on the trainer holds."""

    def stop(trainer, **kwargs):
        if is_there(trainer):
            raise StopTrainingError("enough")

    return toys.callback(**{event: stop})


class Scored(toys.RecordingTrainer):
    """Records the scores it is given as the metric `score`, one per epoch, and the weights after each epoch."""

    def train_epoch_end(self):
        self.run_history.update_metric("score", self.scores.pop(0))
        self.weights_after = [*getattr(self, "weights_after", []), toys.weights(self)]


def run_with_scores(scores, callbacks, **kwargs):
    trainer = toys.trainer_of(callbacks, cls=Scored)
    trainer.scores = list(scores)
    toys.fit(trainer, toys.data(8), num_epochs=len(scores), **kwargs)
    return trainer


def saved_file(path):
    return torch.load(path, weights_only=True)


def row(model_state):
    return toys.row(model_state[name] for name in ("weight", "bias"))


def test_save_best_has_the_documented_arguments_and_attributes():
    names = ("save_path", "watch_metric", "greater_is_better", "reset_on_train", "save_optimizer", "save_scheduler")
    found = operator.attrgetter(*names, "load_saved_checkpoint", "operator")
    default = SaveBestModelCallback()
    assert found(default) == ("best_model.pt", "eval_loss_epoch", False, True, True, True, True, operator.lt)
    assert (default.best_metric, default.best_metric_epoch) == (None, None)
    given = ("a.pt", "accuracy", True, False, False, False, False)
    assert found(SaveBestModelCallback(*given)) == (*given, operator.gt)


@pytest.mark.parametrize(
    ("scores", "greater_is_better", "best_epoch"),
    [
        ([3.0, 1.0, 2.0], False, 2),
        ([3.0, 1.0, 2.0], True, 1),
        ([1.0, 1.0, 1.0], False, 1),  # strictly better: an equal one is not
        ([1.0, 1.0, 1.0], True, 1),
        ([math.nan, 2.0, 1.0], True, 2),
        ([math.nan, 2.0, math.nan], False, 2),
        ([-math.inf, 0.0], False, 1),
        ([math.inf, 0.0], False, 2),
    ],
)
def test_the_best_model_is_in_the_file_and_at_the_end_in_the_trainer(
    scores, greater_is_better, best_epoch, tmp_path, capsys
):
    path = tmp_path / "best.pt"
    best = SaveBestModelCallback(str(path), "score", greater_is_better)
    trainer = run_with_scores(scores, [best])

    assert (best.best_metric, best.best_metric_epoch) == (scores[best_epoch - 1], best_epoch)
    saved = saved_file(path)
    assert set(saved) == {"model_state_dict", "optimizer_state_dict", "score"}
    assert saved["score"] == scores[best_epoch - 1]
    expected = trainer.weights_after[best_epoch - 1]
    assert torch.equal(row(saved["model_state_dict"]), expected)
    assert torch.equal(toys.weights(trainer), expected)
    momentum = [state["momentum_buffer"] for state in saved["optimizer_state_dict"]["state"].values()]
    assert torch.equal(trainer.optimizer.state[trainer.model.weight]["momentum_buffer"], momentum[0])
    said = f"Loading checkpoint with score: {scores[best_epoch - 1]} from epoch {best_epoch}\n"
    assert capsys.readouterr().out.endswith(said)


def test_save_best_prints_when_it_saves_and_without_loading_the_last_weights_stay_in_the_trainer(tmp_path, capsys):
    path = tmp_path / "best.pt"
    trainer = run_with_scores(
        [3.0, 4.0, 2.0, 5.0], [SaveBestModelCallback(path, "score", False, load_saved_checkpoint=False)]
    )
    assert torch.equal(toys.weights(trainer), trainer.weights_after[3])
    assert torch.equal(row(saved_file(path)["model_state_dict"]), trainer.weights_after[2])
    assert capsys.readouterr().out == (
        f"\nscore improved to 3 (lower is better). Saving to {path}\n"
        f"\nscore improved from 3 to 2 (lower is better). Saving to {path}\n"
    )


def test_optimizer_and_scheduler_are_saved_from_the_first_file_on_as_asked(tmp_path):
    schedule = partial(StepLR, step_size=100)
    for scores in ([1.0], [2.0, 1.0]):
        both = SaveBestModelCallback(tmp_path / "both.pt", "score")
        neither = SaveBestModelCallback(tmp_path / "neither.pt", "score", save_optimizer=False, save_scheduler=False)
        trainer = run_with_scores(scores, [both, neither], create_scheduler_fn=schedule)
        states = {"model_state_dict", "optimizer_state_dict", "scheduler_state_dict"}
        assert set(saved_file(tmp_path / "both.pt")) == {*states, "score"}
        assert set(saved_file(tmp_path / "neither.pt")) == {"model_state_dict", "score"}
        assert saved_file(tmp_path / "both.pt")["scheduler_state_dict"]["last_epoch"] == 2 * len(scores)
        assert trainer.scheduler.last_epoch == 2 * len(scores)


def test_the_best_model_is_loaded_after_a_stop_too(tmp_path):
    stopper = stop_when("on_train_step_end", lambda trainer: trainer.run_history.current_epoch == 2)
    trainer = run_with_scores([1.0, 2.0], [SaveBestModelCallback(tmp_path / "best.pt", "score"), stopper])
    assert torch.equal(toys.weights(trainer), trainer.weights_after[0])


@pytest.mark.parametrize("stale", [False, True])
def test_where_nothing_was_saved_nothing_is_loaded(stale, tmp_path):
    path = tmp_path / "best.pt"
    if stale:
        run_with_scores([1.0, 2.0], [SaveBestModelCallback(path, "score")])
    best = SaveBestModelCallback(path, "score")
    trainer = run_with_scores([math.nan], [best])  # a nan is never saved
    assert best.best_metric is None
    assert path.exists() == stale
    assert torch.equal(toys.weights(trainer), trainer.weights_after[0])


def test_two_of_them_watch_two_metrics(tmp_path):
    low = SaveBestModelCallback(tmp_path / "low.pt", "score")
    high = SaveBestModelCallback(tmp_path / "high.pt", "score", greater_is_better=True, load_saved_checkpoint=False)
    loss = SaveBestModelCallback(tmp_path / "loss.pt", "train_loss_epoch", load_saved_checkpoint=False)
    trainer = run_with_scores([2.0, 1.0, 3.0], [low, high, loss])
    assert torch.equal(row(saved_file(tmp_path / "low.pt")["model_state_dict"]), trainer.weights_after[1])
    assert torch.equal(row(saved_file(tmp_path / "high.pt")["model_state_dict"]), trainer.weights_after[2])
    assert loss.best_metric == min(trainer.run_history.get_metric_values("train_loss_epoch"))
    assert saved_file(tmp_path / "loss.pt")["train_loss_epoch"] == loss.best_metric
    assert torch.equal(toys.weights(trainer), trainer.weights_after[1])


def test_the_best_value_is_forgotten_at_the_start_of_a_run_unless_told_not_to(tmp_path):
    for reset, best_metric in ((True, 5.0), (False, 1.0)):
        best = SaveBestModelCallback(tmp_path / f"{reset}.pt", "score", reset_on_train=reset)
        trainer = run_with_scores([1.0], [best])
        trainer.scores = [5.0]
        toys.fit(trainer, toys.data(8))
        assert (best.best_metric, best.best_metric_epoch) == (best_metric, 1)
        assert saved_file(tmp_path / f"{reset}.pt")["score"] == best_metric


def test_a_metric_that_was_never_recorded_is_an_error(tmp_path):
    trainer = toys.trainer_of([SaveBestModelCallback(tmp_path / "best.pt", watch_metric="accuracy")])
    with pytest.raises(ValueError, match="No values have been recorded for the metric accuracy"):
        toys.fit(trainer, toys.data(8))


def test_the_best_weights_can_be_saved_as_safetensors(tmp_path):
    from safetensors.torch import load_file

    path = tmp_path / "best.safetensors"
    trainer = run_with_scores([2.0, 1.0, 3.0], [SaveBestModelCallback(path, "score")])
    assert torch.equal(row(load_file(path)), trainer.weights_after[1])
    assert torch.equal(toys.weights(trainer), trainer.weights_after[1])


def test_save_training_state_has_the_documented_arguments():
    arguments = {"save_every_n_epochs": None, "save_every_n_steps": None, "save_at_end": True, "max_checkpoints": None}
    assert vars(SaveTrainingStateCallback()).items() >= {"save_dir": Path("training_states"), **arguments}.items()


@pytest.mark.parametrize("name", ["save_every_n_epochs", "save_every_n_steps", "max_checkpoints"])
def test_states_of_which_none_would_be_kept_or_asked_for_are_refused(name, tmp_path):
    with pytest.raises(ConfigError, match=f"{name} must be a whole number of at least 1, got 0"):
        SaveTrainingStateCallback(tmp_path, **{name: 0})


def test_states_are_named_by_epochs_and_by_micro_batches_seen(tmp_path, capsys):
    # 20 samples: five micro-batches and three updates per epoch, the last one short.
    saver = SaveTrainingStateCallback(tmp_path / "new" / "folder", save_every_n_epochs=2, save_every_n_steps=3)
    toys.trained([saver], toys.data(20), num_epochs=2, gradient_accumulation_steps=2)
    # Every third micro-batch, or the boundary after it: 3 -> 4, 6 -> 7, 9 -> 9.
    folder = tmp_path / "new" / "folder"
    assert names_in(folder) == {"step_4", "step_7", "step_9", "epoch_2", "final"}

    expected = {
        "step_4": {"epoch": 0, "update": 2, "samples": 16, "batch": 4, "total_batches": 4, "stage": 0},
        "step_7": {"epoch": 1, "update": 4, "samples": 8, "batch": 2, "total_batches": 7, "stage": 0},
        "step_9": {"epoch": 1, "update": 5, "samples": 16, "batch": 4, "total_batches": 9, "stage": 0},
        "epoch_2": {"epoch": 2, "update": 6, "samples": 0, "batch": 0, "total_batches": 10, "stage": 0},
        "final": {"epoch": 2, "update": 6, "samples": 0, "batch": 0, "total_batches": 10, "stage": 0},
    }
    for name, progress in expected.items():
        checkpoint = read(folder / name)
        found = checkpoint.state["run"]["progress"]
        assert {field: found[field] for field in progress} == progress, name
        assert checkpoint.state["metadata"]["global_step"] == progress["total_batches"], name
        assert checkpoint.update == progress["update"], name
    said = capsys.readouterr().out
    assert [f"\nSaved training state to {folder / name}\n" in said for name in expected] == [True] * 5


def test_a_state_of_an_epoch_holds_the_metrics_of_its_evaluation(tmp_path):
    saver = SaveTrainingStateCallback(tmp_path, save_every_n_epochs=1, save_at_end=False)
    trainer = toys.trained([saver], toys.data(8), num_epochs=2, eval_dataset=toys.data(8))
    assert names_in(tmp_path) == {"epoch_1", "epoch_2"}
    metrics = read(tmp_path / "epoch_1").state["history"]["metrics"]
    for name in ("train_loss_epoch", "eval_loss_epoch"):
        assert metrics[name] == trainer.run_history.get_metric_values(name)[:1]


def test_nothing_is_saved_that_was_not_asked_for(tmp_path):
    toys.trained([SaveTrainingStateCallback(tmp_path, save_at_end=False)], toys.data(8))
    assert names_in(tmp_path) == set()
    toys.trained([SaveTrainingStateCallback(tmp_path)], toys.data(8))
    assert names_in(tmp_path) == {"final"}


def test_only_the_newest_states_are_kept_across_a_resume_too(tmp_path):
    def saver():
        return SaveTrainingStateCallback(tmp_path, save_every_n_steps=1, save_at_end=False, max_checkpoints=2)

    toys.trained([saver()], toys.data(12))
    assert names_in(tmp_path) == {"step_2", "step_3"}
    toys.trained([saver()], toys.data(12), num_epochs=2, resume_from=tmp_path / "step_3")
    assert names_in(tmp_path) == {"step_5", "step_6"}


def test_states_of_others_are_not_counted_and_not_removed(tmp_path):
    saver = SaveTrainingStateCallback(tmp_path, save_every_n_steps=1, max_checkpoints=1)
    toys.trained([saver, toys.save_at_updates(tmp_path)], toys.data(8))
    assert names_in(tmp_path) == {"update_1", "update_2", "final"}


def test_a_stopped_run_saves_its_final_state_at_its_last_finished_update(tmp_path):
    def stop_in_the_second_window(trainer, step, **kwargs):
        if step == 3:
            raise StopTrainingError("enough")

    stopper = toys.callback(on_train_step_end=stop_in_the_second_window)
    train = partial(toys.trained, dataset=toys.data(32), gradient_accumulation_steps=2)
    result = train([SaveTrainingStateCallback(tmp_path), stopper]).result
    assert result.stop_reason == "enough" and result.updates == 1
    toys.assert_resumed(train(resume_from=tmp_path / "final"), train(), 2)


def test_a_stop_between_gradients_and_update_loses_and_repeats_nothing(tmp_path):
    for event in ("on_before_optimizer_step", "on_update_end"):
        stopper = stop_when(event, lambda trainer: trainer.progress.update == 1)
        stopped = toys.trained([SaveTrainingStateCallback(tmp_path / event), stopper])
        assert stopped.result.updates == 1
        toys.assert_resumed(toys.trained(resume_from=tmp_path / event / "final"), toys.trained(), 1)


def test_a_stop_inside_an_update_saves_no_state_that_is_neither_before_nor_after_it(tmp_path):
    stopper = stop_when("on_optimizer_step_end", lambda trainer: trainer.progress.update == 2)
    toys.trained([SaveTrainingStateCallback(tmp_path, save_every_n_steps=1), stopper])
    assert names_in(tmp_path) == {"step_1", "step_2"}


def test_every_state_resumes_to_the_end_of_the_run(tmp_path):
    model = partial(toys.network, 6, dropout=0.3)
    saver = SaveTrainingStateCallback(tmp_path, save_every_n_steps=2, save_every_n_epochs=1)
    whole = toys.trained([saver], toys.data(12), model=model(), num_epochs=2, eval_dataset=toys.data(8))
    assert names_in(tmp_path) == {"step_2", "step_4", "step_6", "epoch_1", "epoch_2", "final"}
    for name in sorted(names_in(tmp_path)):
        resumed = toys.trainer_of([SaveTrainingStateCallback(tmp_path / "again")], model())
        toys.fit(resumed, toys.data(12), num_epochs=2, eval_dataset=toys.data(8), resume_from=tmp_path / name)
        assert torch.equal(toys.weights(resumed), toys.weights(whole)), name
        for metric in ("train_loss_epoch", "eval_loss_epoch"):
            expected = whole.run_history.get_metric_values(metric)
            assert resumed.run_history.get_metric_values(metric) == expected, (name, metric)


def test_the_state_saved_at_the_end_of_a_run_holds_the_last_weights_not_the_best(tmp_path):
    # Score 1 is best after the first epoch, so the end of the run loads those weights into the trainer.
    best = SaveBestModelCallback(tmp_path / "best.pt", "score")
    trainer = run_with_scores([1.0, 2.0], [best], checkpoints=Checkpointing(tmp_path / "run", every_updates=100))
    assert torch.equal(toys.weights(trainer), trainer.weights_after[0])
    assert torch.equal(row(read(toys.step(tmp_path / "run", 4)).model), trainer.weights_after[1])


def test_a_final_state_holds_the_last_weights_also_beside_a_callback_that_loads_the_best(tmp_path):
    best = SaveBestModelCallback(tmp_path / "best.pt", "score")
    for name in ("before", "after"):  # the best model is loaded when everything is saved
        saver = SaveTrainingStateCallback(tmp_path / name)
        trainer = run_with_scores([1.0, 2.0], [saver, best] if name == "before" else [best, saver])
        assert torch.equal(toys.weights(trainer), trainer.weights_after[0])
        assert torch.equal(row(read(tmp_path / name / "final").model), trainer.weights_after[1])


@pytest.mark.parametrize("is_saved_too", [False, True])
def test_callbacks_after_the_one_that_loads_the_best_model_see_it(is_saved_too, tmp_path, capsys):
    """As an export at the end of the run needs it; a state of the run's end cannot be had any more then."""
    seen = []

    def export(trainer, **kwargs):
        seen.append(toys.weights(trainer))
        trainer.request_save(tmp_path / "too_late")

    best = SaveBestModelCallback(tmp_path / "best.pt", "score")
    savers = [SaveTrainingStateCallback(tmp_path / name) for name in ("before", "after")] if is_saved_too else []
    exports = [toys.callback(on_training_run_end=export) for _ in range(2)]
    trainer = run_with_scores([1.0, 2.0], [exports[0], *savers[:1], best, *savers[1:], exports[1]])
    first, last = trainer.weights_after
    assert torch.equal(seen[0], last) and torch.equal(seen[1], first)
    assert torch.equal(row(read(tmp_path / "too_late").model), last), "asked for before, it was saved before"
    told = f"Not saving {tmp_path / 'too_late'}: another model was loaded after the end of the run"
    assert told in capsys.readouterr().out
    for saver in savers:
        assert torch.equal(row(read(saver.save_dir / "final").model), last)


def test_a_best_model_that_is_gone_at_the_end_is_reported_when_the_run_is_over_and_saved(tmp_path):
    remove = toys.callback(on_training_run_epoch_end=lambda trainer, **kwargs: (tmp_path / "best.pt").unlink())
    best, save = SaveBestModelCallback(tmp_path / "best.pt", "score"), SaveTrainingStateCallback(tmp_path / "states")
    with pytest.raises(CheckpointError, match="there is no checkpoint file"):
        run_with_scores([1.0], [best, remove, save])
    assert names_in(tmp_path / "states") == {"final"}


def test_the_folder_is_written_when_the_event_says_so(tmp_path):
    def look(trainer, path, **kwargs):
        assert (path / "MANIFEST.json").exists()
        return path.name, trainer.progress.update

    watch = toys.watch(on_checkpoint_saved=look)
    toys.trained([SaveTrainingStateCallback(tmp_path, None, 1), watch], toys.data(8))
    assert watch.seen == [("step_1", 1), ("step_2", 2), ("final", 2)]


def wsd(**kwargs):
    return WSDLrScheduler.create_scheduler_fn(decay_phase_ratio=0.25, num_warmup_epochs=0, **kwargs)


def run_wsd(folder, num_epochs=4, num_checkpoints=2, callbacks=(), initial_checkpoint=None, scheduler=None, **kwargs):
    """Four updates per epoch; two checkpoints of 16 updates end at 8 and 16 and decay from 6 and 14 on."""
    callback = WSDCheckpointCallback(folder, initial_checkpoint=initial_checkpoint)
    schedule = scheduler or wsd(num_checkpoints=num_checkpoints)
    return toys.trained([callback, *callbacks], num_epochs=num_epochs, create_scheduler_fn=schedule, **kwargs), callback


def test_wsd_checkpoints_have_the_documented_arguments_and_attributes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    default = WSDCheckpointCallback()
    assert default.save_dir == Path("checkpoints") and (tmp_path / "checkpoints").is_dir()
    assert (default.save_optimizer, default.save_scheduler, default.initial_checkpoint) == (True, True, None)
    assert (default.last_checkpoint_step, default.checkpoint_steps) == (None, set())
    assert (default.decay_fraction, default.decay_info) == (None, None)
    assert WSDCheckpointCallback("a/b", initial_checkpoint="c/d").initial_checkpoint == Path("c/d")
    assert (tmp_path / "a" / "b").is_dir()


def test_wsd_saves_a_state_before_each_decay_and_the_model_after_it(tmp_path):
    trainer, callback = run_wsd(tmp_path)
    names = ("6_wsd_pre_decay", "8_wsd_post_decay.pt", "14_wsd_pre_decay", "16_wsd_post_decay.pt")
    assert names_in(tmp_path) == {f"checkpoint_{name}" for name in names}
    found = (callback.checkpoint_steps, callback.last_checkpoint_step, callback.decay_fraction)
    assert found == ({8, 16}, 16, 0.25)
    assert callback.decay_info == trainer.scheduler.get_decay_info()

    for step, decayed_at in ((6, 8), (14, 16)):
        state = read(tmp_path / f"checkpoint_{step}_wsd_pre_decay")
        assert state.update == step
        assert state.state["optimizer"]["param_groups"][0]["lr"] == 0.05, "not yet decayed"
        exported = saved_file(tmp_path / f"checkpoint_{decayed_at}_wsd_post_decay.pt")
        assert {"model_state_dict", "optimizer_state_dict", "scheduler_state_dict"} <= set(exported)
        for metadata, count, kind in ((state.state["metadata"], step, "pre"), (exported, decayed_at, "post")):
            assert metadata["step"] == count
            assert metadata["checkpoint_type"] == f"wsd_{kind}_decay"
            assert metadata["total_steps"] == trainer.run_config.max_num_train_steps
            assert metadata["decay_fraction"] == 0.25
            assert datetime.fromisoformat(metadata["timestamp"]).tzinfo is not None
    assert torch.equal(row(exported["model_state_dict"]), toys.weights(trainer))


def test_wsd_leaves_out_optimizer_and_scheduler_when_asked(tmp_path):
    callback = WSDCheckpointCallback(tmp_path, save_optimizer=False, save_scheduler=False)
    toys.trained([callback], create_scheduler_fn=wsd())
    exported = saved_file(tmp_path / "checkpoint_4_wsd_post_decay.pt")
    assert "model_state_dict" in exported
    assert "optimizer_state_dict" not in exported and "scheduler_state_dict" not in exported


def test_wsd_counts_updates_not_micro_batches(tmp_path):
    run_wsd(tmp_path, num_epochs=4, num_checkpoints=1, gradient_accumulation_steps=2)
    assert names_in(tmp_path) == {"checkpoint_6_wsd_pre_decay", "checkpoint_8_wsd_post_decay.pt"}


def test_a_state_before_a_decay_resumes_to_the_same_end(tmp_path):
    whole, _ = run_wsd(tmp_path / "whole")
    for step in (6, 14):
        state = tmp_path / "whole" / f"checkpoint_{step}_wsd_pre_decay"
        resumed, callback = run_wsd(tmp_path / f"resumed_{step}", resume_from=state)
        assert resumed.lrs == whole.lrs[step:]
        assert torch.equal(toys.weights(resumed), toys.weights(whole))
        assert callback.last_checkpoint_step == 16
        assert f"checkpoint_{step}_wsd_pre_decay" not in names_in(tmp_path / f"resumed_{step}")


@pytest.mark.parametrize("source", ["checkpoint_6_wsd_pre_decay", "checkpoint_8_wsd_post_decay.pt"])
def test_a_new_run_starts_from_an_initial_checkpoint_folder_or_file(source, tmp_path):
    first, _ = run_wsd(tmp_path / "first")
    step = int(source.split("_")[1])

    def start(trainer, **kwargs):
        return toys.weights(trainer), trainer.callback_handler.callbacks[0].last_checkpoint_step

    watch, schedule = toys.watch(on_training_run_start=start), wsd(is_continuation_from_checkpoint=True)
    initial = {"initial_checkpoint": tmp_path / "first" / source, "scheduler": schedule}
    second, callback = run_wsd(tmp_path / "second", num_epochs=2, callbacks=[watch], **initial)
    [(weights, last_step)] = watch.seen
    assert torch.equal(weights, first.weights_before[step]) and last_step == step
    # A run of its own: eight updates in two epochs, with a stable phase at the full lr, and a history of its own.
    assert len(second.lrs) == 8 and second.epochs == [1] * 4 + [2] * 4
    assert second.lrs[:6] == [0.05] * 6
    assert len(second.run_history.get_metric_values("train_loss_epoch")) == 2
    assert second.scheduler.get_checkpoint_steps()[-1] == 8 and callback.last_checkpoint_step == 8
    assert "checkpoint_8_wsd_post_decay.pt" in names_in(tmp_path / "second")


def test_a_missing_initial_checkpoint_is_no_reason_not_to_start(tmp_path):
    trainer, callback = run_wsd(tmp_path, initial_checkpoint=tmp_path / "nowhere")
    assert len(trainer.lrs) == 16 and callback.last_checkpoint_step == 16


def test_a_resumed_run_does_not_go_back_to_its_initial_checkpoint(tmp_path):
    run_wsd(tmp_path / "first")
    initial = {"initial_checkpoint": tmp_path / "first" / "checkpoint_6_wsd_pre_decay"}
    arguments = {"num_epochs": 2, "scheduler": wsd(is_continuation_from_checkpoint=True), **initial}
    saver = SaveTrainingStateCallback(tmp_path / "states", save_every_n_steps=3)
    whole, _ = run_wsd(tmp_path / "whole", callbacks=[saver], **arguments)
    for name in ("step_3", "step_6"):
        resumed, _ = run_wsd(tmp_path / "resumed", resume_from=tmp_path / "states" / name, **arguments)
        assert resumed.lrs == whole.lrs[int(name[-1]) :], name
        assert torch.equal(toys.weights(resumed), toys.weights(whole)), name
        assert resumed.run_history.latest() == whole.run_history.latest()


@pytest.mark.parametrize("schedule", [None, partial(StepLR, step_size=1)])
def test_a_scheduler_without_decay_phases_is_refused(schedule, tmp_path):
    trainer = toys.trainer_of([WSDCheckpointCallback(tmp_path)])
    with pytest.raises(ValueError, match=r"Scheduler must implement get_checkpoint_steps\(\)"):
        toys.fit(trainer, toys.data(8), create_scheduler_fn=schedule)


def test_a_state_that_cannot_be_written_ends_the_run_with_an_error(tmp_path):
    (tmp_path / "in_the_way").write_text("a file where a folder is needed")
    with pytest.raises(CheckpointError, match="cannot write the checkpoint"):
        toys.trained([toys.save_at_updates(tmp_path / "in_the_way")], toys.data(8))


def test_a_callback_whose_state_cannot_be_saved_is_named(tmp_path):
    class Stubborn(TrainerCallback):
        def state_dict(self):
            return {"when": datetime(2020, 1, 1)}

    with pytest.raises(CheckpointError, match=r"state\.callbacks\.1\.state\.when is a datetime\.datetime"):
        toys.trained([toys.save_at_updates(tmp_path), Stubborn()], toys.data(8))
    assert names_in(tmp_path) == set()


def test_metadata_given_with_a_request_comes_back_with_the_state(tmp_path):
    ask = toys.at_update(1, lambda trainer: trainer.request_save(tmp_path / "state", {"note": "hello"}))
    trainer = toys.trained([ask], toys.data(4))
    assert json.loads((tmp_path / "state" / "MANIFEST.json").read_text())["identity"]["update"] == "1"
    assert trainer.load_training_state(tmp_path / "state") == {"current_epoch": 1, "note": "hello"}
