"""Callbacks of other people's making run unchanged, and what ours do beside the events."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from loopwright.errors import ConfigError
from loopwright.hf import (
    CallbackHandler,
    ExportableState,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)

from .tiny import Classifier, arguments, losses, rows


def fit(folder, *callbacks, **options):
    torch.manual_seed(0)
    options = {"eval_strategy": "epoch", **options}
    args = arguments(folder, **options)
    trainer = Trainer(Classifier(), args, train_dataset=rows(20), eval_dataset=rows(8), callbacks=list(callbacks))
    trainer.train()
    return trainer


class ExperimentTracker:
    """A tracker's callback as trackers write them: set up once, logs rewritten, the model's size, `on_train_end`."""

    def __init__(self):
        self.is_set_up = False
        self.config, self.rows, self.is_finished, self.saved = {}, [], False, []

    def setup(self, args, state, model, **kwargs):
        self.is_set_up = True
        if not state.is_world_process_zero:
            return
        self.config = {**args.to_dict()}
        if getattr(model, "config", None) is not None:
            self.config |= model.config.to_dict()
        self.config["parameters"] = sum(parameter.numel() for parameter in model.parameters())

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        if not self.is_set_up:
            self.setup(args, state, model, **kwargs)

    def on_log(self, args, state, control, model=None, logs=None, **kwargs):
        if not self.is_set_up:
            self.setup(args, state, model)
        single = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss")
        values = {f"single_value/{name}": value for name, value in logs.items() if name in single}
        values |= {
            f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}": value
            for name, value in logs.items()
            if name not in single
        }
        self.rows.append((state.global_step, values))

    def on_save(self, args, state, control, **kwargs):
        self.saved.append(state.global_step)

    def on_train_end(self, args, state, control, **kwargs):
        self.is_finished = True


def rows_agree(tracker, trainer) -> bool:
    """Check what a tracker has seen of a run of one epoch, piece by piece."""
    assert tracker.is_finished and tracker.config["parameters"] == 15 and tracker.config["learning_rate"] == 0.01
    assert [values["train/loss"] for _, values in tracker.rows if "train/loss" in values] == losses(trainer)
    assert [step for step, values in tracker.rows if "eval/loss" in values] == [5]
    assert "single_value/train_loss" in tracker.rows[-1][1] and tracker.saved == [5]
    return True


def test_a_trackers_callback_runs_unchanged(tmp_path):
    tracker = ExperimentTracker()
    assert rows_agree(tracker, fit(tmp_path, tracker, save_strategy="epoch"))


def test_it_does_so_on_the_base_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    tracker = type("Tracker", (ExperimentTracker, transformers.TrainerCallback), {})()
    assert rows_agree(tracker, fit(tmp_path, tracker, save_strategy="epoch"))


def test_the_early_stopping_of_transformers_ends_our_run_and_keeps_its_counter(tmp_path):
    transformers = pytest.importorskip("transformers")
    stopping = transformers.EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=10.0)
    options = {"metric_for_best_model": "loss", "eval_strategy": "steps", "eval_steps": 1}
    trainer = fit(tmp_path, stopping, load_best_model_at_end=True, num_train_epochs=3, **options)
    assert trainer.state.global_step == 3 and stopping.early_stopping_patience_counter == 2
    state = TrainerState.load_from_json(tmp_path / "checkpoint-3" / "trainer_state.json")
    assert state.stateful_callbacks["EarlyStoppingCallback"]["attributes"] == {"early_stopping_patience_counter": 2}


def test_flags_that_are_set_while_serving_are_served_too(tmp_path):
    seen = []

    class Chained(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append("log")
            control.should_evaluate = "loss" in logs and state.global_step == 2

        def on_evaluate(self, args, state, control, **kwargs):
            seen.append("evaluate")
            control.should_save = True

        def on_save(self, args, state, control, **kwargs):
            seen.append("save")

    fit(tmp_path, Chained(), eval_strategy="no", max_steps=3)
    assert seen == ["log", "log", "log", "evaluate", "save", "log", "log"]


def test_evaluating_and_predicting_inside_a_callback_disturbs_nothing(tmp_path):
    class Looks(TrainerCallback):
        losses: list[float] = []

        def on_step_end(self, args, state, control, **kwargs):
            Looks.losses.append(trainer.evaluate(rows(6), metric_key_prefix="probe")["probe_loss"])
            trainer.predict(rows(3))

    plain = fit(tmp_path)
    torch.manual_seed(0)
    args = arguments(tmp_path, eval_strategy="epoch")
    trainer = Trainer(Classifier(), args, train_dataset=rows(20), eval_dataset=rows(8), callbacks=[Looks()])
    trainer.train()
    assert losses(trainer) == losses(plain) and len(Looks.losses) == 5
    assert Looks.losses[0] != Looks.losses[-1]


def test_a_callback_without_events_and_a_wrong_return_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="object is not a callback"):
        CallbackHandler([object()])

    class Wrong(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            return True

    with pytest.raises(ConfigError, match="Wrong.on_step_end returned a bool"):
        fit(tmp_path, Wrong())


def test_the_handler_can_be_called_by_event():
    class Notes(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            self.logs = logs

    notes = Notes()
    handler = CallbackHandler([notes])
    control = TrainerControl(should_log=True)
    assert handler.on_log(None, TrainerState(), control, {"a": 1}) is control
    assert notes.logs == {"a": 1} and not control.should_log
    assert handler.callback_list == "Notes"
    with pytest.raises(AttributeError):
        handler.on_nothing  # noqa: B018 - looking it up is what is tested


def test_a_state_of_several_callbacks_of_one_class_is_handed_out_in_order():
    class Counts(ExportableState):
        def __init__(self, count=0):
            self.count = count

        def state(self):
            return {"args": {}, "attributes": {"count": self.count}}

    state = TrainerState()
    state.collect([Counts(1), Counts(2)])
    again = [Counts(), Counts()]
    state.hand_out(again)
    assert [each.count for each in again] == [1, 2]
    assert Counts.from_state({"args": {}, "attributes": {"count": 3}}).count == 3


def test_long_texts_in_logs_are_cut_in_the_bar(tmp_path, capsys):
    trainer = fit(tmp_path, disable_tqdm=False, eval_strategy="no")
    trainer.callback_handler.on_train_begin(trainer.args, trainer.state, trainer.control)
    trainer.log({"text": "x" * 200})
    trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
    output = capsys.readouterr()
    assert "x" * 100 + "..." in output.out and "x" * 101 not in output.out


def test_the_bar_of_an_evaluation_counts_the_batches_of_its_own_process():
    bar, state, loader = ProgressCallback(), TrainerState(), range(7)
    for _ in range(4):
        bar.on_prediction_step(SimpleNamespace(world_size=2), state, TrainerControl(), eval_dataloader=loader)
    assert (bar.prediction_bar.n, bar.prediction_bar.total) == (4, 4)
    bar.on_evaluate(None, state, TrainerControl())


def test_the_bars_after_an_error_are_new_ones(tmp_path, capsys):
    def fails(prediction):
        raise ArithmeticError

    class Fails(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise ArithmeticError

    args = arguments(tmp_path, disable_tqdm=False)
    trainer = Trainer(Classifier(), args, train_dataset=rows(20), eval_dataset=rows(4), compute_metrics=fails)
    with pytest.raises(ArithmeticError):
        trainer.evaluate()
    trainer.compute_metrics = None
    trainer.evaluate()
    trainer.add_callback(Fails())
    with pytest.raises(ArithmeticError):
        trainer.train()
    trainer.remove_callback(Fails)
    trainer.train()
    shown = capsys.readouterr().err
    assert "2it [" not in shown and shown.count("| 0/5") == 2 and "5/5" in shown


def test_where_nothing_is_padded_no_share_of_padding_is_shown(tmp_path):
    core = fit(tmp_path, eval_strategy="no").core
    core.speed = {"padding_waste": 0.0}
    assert core.shown({"loss": 1.0}) == {"loss": 1.0}
    core.speed = {"padding_waste": 0.25}
    assert core.shown({"loss": 1.0}) == {"loss": 1.0, "padding_waste": 0.25}
