"""Third-party callbacks run unchanged; our own callbacks and their handler."""

from types import SimpleNamespace

import pytest

from loopwright.hf import CallbackHandler, ExportableState, ProgressCallback, TrainerControl, TrainerState

from .tiny import assert_refused, fit, losses, made, on, rows

EVALUATED = {"eval_strategy": "epoch", "eval_dataset": rows(8)}


class ExperimentTracker:
    """A callback as trackers write them: set up once, renames the logs, reads the model's size, has `on_train_end`."""

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


def assert_tracked(tracker, trainer):
    """The tracker has seen all of a run of one epoch."""
    assert tracker.is_finished and tracker.config["parameters"] == 15 and tracker.config["learning_rate"] == 0.01
    assert [values["train/loss"] for _, values in tracker.rows if "train/loss" in values] == losses(trainer)
    assert [step for step, values in tracker.rows if "eval/loss" in values] == [5]
    assert "single_value/train_loss" in tracker.rows[-1][1] and tracker.saved == [5]


@pytest.mark.parametrize("has_base", [False, True], ids=["no base", "transformers"])
def test_the_callback_of_a_tracker_runs_unchanged(tmp_path, has_base):
    bases = (pytest.importorskip("transformers").TrainerCallback,) if has_base else ()
    tracker = type("Tracker", (ExperimentTracker, *bases), {})()
    assert_tracked(tracker, fit(tmp_path, tracker, save_strategy="epoch", **EVALUATED))


def test_the_early_stopping_of_transformers_ends_our_run_and_keeps_its_counter(tmp_path):
    transformers = pytest.importorskip("transformers")
    stopping = transformers.EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=10.0)
    options = {**EVALUATED, "metric_for_best_model": "loss", "eval_strategy": "steps", "eval_steps": 1}
    trainer = fit(tmp_path, stopping, load_best_model_at_end=True, num_train_epochs=3, **options)
    assert trainer.state.global_step == 3 and stopping.early_stopping_patience_counter == 2
    state = TrainerState.load_from_json(tmp_path / "checkpoint-3" / "trainer_state.json")
    assert state.stateful_callbacks["EarlyStoppingCallback"]["attributes"] == {"early_stopping_patience_counter": 2}


def test_flags_that_are_set_while_serving_are_served_too(tmp_path):
    seen = []

    def log(args, state, control, logs=None, **kwargs):
        seen.append("log")
        control.should_evaluate = "loss" in logs and state.global_step == 2

    def evaluate(args, state, control, **kwargs):
        seen.append("evaluate")
        control.should_save = True

    chained = on(log=log, evaluate=evaluate, save=lambda *given, **kwargs: seen.append("save"))
    fit(tmp_path, chained, eval_dataset=rows(8), max_steps=3)
    assert seen == ["log", "log", "log", "evaluate", "save", "log", "log"]


def test_evaluating_and_predicting_inside_a_callback_changes_nothing(tmp_path):
    probed = []

    def probe(*given, **kwargs):
        probed.append(trainer.evaluate(rows(6), metric_key_prefix="probe")["probe_loss"])
        trainer.predict(rows(3))

    plain, trainer = fit(tmp_path, **EVALUATED), made(tmp_path, on(step_end=probe), **EVALUATED)
    trainer.train()
    assert losses(trainer) == losses(plain) and len(probed) == 5
    assert probed[0] != probed[-1]


def test_the_handler_can_be_called_by_event_and_what_is_no_callback_or_returns_a_flag_is_refused(tmp_path):
    seen = []
    handler = CallbackHandler([on(log=lambda args, state, control, logs=None, **kwargs: seen.append(logs))])
    control = TrainerControl(should_log=True)
    assert handler.on_log(None, TrainerState(), control, {"a": 1}) is control
    assert seen == [{"a": 1}] and not control.should_log
    assert handler.callback_list == "Functions"
    assert_refused("on_nothing", getattr, handler, "on_nothing", error=AttributeError)
    assert_refused("object is not a callback", CallbackHandler, [object()])
    wrong = on(step_end=lambda *given, **kwargs: True)
    assert_refused("Functions.on_step_end returned a bool", fit, tmp_path, wrong)


def test_the_states_of_several_callbacks_of_one_class_are_restored_in_order():
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


def test_long_texts_in_logs_are_cut_above_the_bar(tmp_path, capsys):
    trainer = fit(tmp_path, disable_tqdm=False)
    trainer.callback_handler.on_train_begin(trainer.args, trainer.state, trainer.control)
    trainer.log({"text": "x" * 200})
    trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
    output = capsys.readouterr()
    assert "x" * 100 + "..." in output.out and "x" * 101 not in output.out


def test_the_bar_of_an_evaluation_counts_the_batches_of_its_process():
    bar, state, loader = ProgressCallback(), TrainerState(), range(7)
    for _ in range(4):
        bar.on_prediction_step(SimpleNamespace(world_size=2), state, TrainerControl(), eval_dataloader=loader)
    assert (bar.prediction_bar.n, bar.prediction_bar.total) == (4, 4)
    bar.on_evaluate(None, state, TrainerControl())


def test_there_are_new_bars_after_an_error(tmp_path, capsys):
    def fail(*given, **kwargs):
        raise ArithmeticError

    trainer, fails = made(tmp_path, disable_tqdm=False, eval_dataset=rows(4), compute_metrics=fail), on(step_end=fail)
    with pytest.raises(ArithmeticError):
        trainer.evaluate()
    trainer.compute_metrics = None
    trainer.evaluate()
    trainer.add_callback(fails)
    with pytest.raises(ArithmeticError):
        trainer.train()
    trainer.remove_callback(fails)
    trainer.train()
    shown = capsys.readouterr().err
    assert "2it [" not in shown and shown.count("| 0/5") == 2 and "5/5" in shown


def test_the_share_of_padding_is_shown_only_if_there_is_padding(tmp_path):
    core = made(tmp_path).core
    core.speed = {"padding_waste": 0.0}
    assert core.shown({"loss": 1.0}) == {"loss": 1.0}
    core.speed = {"padding_waste": 0.25}
    assert core.shown({"loss": 1.0}) == {"loss": 1.0, "padding_waste": 0.25}
