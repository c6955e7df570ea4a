"""The base of all callbacks and the handler: who is called, in which order, with what, and what is refused."""

import copy
import inspect
import re
import warnings

import pytest

import loopwright.callbacks as callbacks_module
import toys
from loopwright import Trainer
from loopwright.callbacks import (
    CONSOLE_CALLBACKS,
    DEFAULT_CALLBACKS,
    EVENTS,
    CallbackHandler,
    CallbackMethodNotImplementedError,
    EpochTableCallback,
    LimitBatchesCallback,
    LogMetricsCallback,
    ModelEmaCallback,
    MoveModulesToDeviceCallback,
    PrintProgressCallback,
    ProgressBarCallback,
    StepBasedEvaluationCallback,
    StopTrainingError,
    TerminateOnNaNCallback,
    TrainerCallback,
    get_default_callbacks,
)
from loopwright.errors import ConfigTypeError

CONTRACT_EVENTS = {
    *("on_init_end", "on_training_run_start", "on_training_run_epoch_end", "on_training_run_end"),
    *("on_train_epoch_start", "on_train_step_start", "on_train_step_end", "on_train_epoch_end"),
    *("on_eval_epoch_start", "on_eval_step_start", "on_eval_step_end", "on_eval_epoch_end"),
    *("on_evaluation_run_start", "on_evaluation_run_end", "on_stop_training_error"),
}
NEW_EVENTS = ["on_before_optimizer_step", "on_optimizer_step_end", "on_update_end", "on_log", "on_checkpoint_saved"]


class Recorder(TrainerCallback):
    """Writes down each call of two events: (its name, the event, the positional and keyword arguments)."""

    custom_events = ("on_my_event",)
    calls: list = []

    def __init__(self, name="first"):
        self.name = name

    def on_train_epoch_start(self, trainer, **kwargs):
        self.calls.append((self.name, "on_train_epoch_start", (trainer,), kwargs))

    def on_my_event(self, *args, **kwargs):
        self.calls.append((self.name, "on_my_event", args, kwargs))


class Second(Recorder):
    def __init__(self):
        super().__init__("second")


class Silent(TrainerCallback):
    pass


@pytest.fixture(autouse=True)
def forget_calls():
    Recorder.calls.clear()


def test_there_are_the_fifteen_events_of_the_contract_and_five_new_ones_which_take_any_keyword_and_do_nothing():
    assert sorted(EVENTS) == sorted([*CONTRACT_EVENTS, *NEW_EVENTS])
    callback = TrainerCallback()
    assert [getattr(callback, event)("a trainer", step=3, something_new=1) for event in EVENTS] == [None] * 20


def test_step_end_events_work_without_batch_arguments():
    for event in ("on_train_step_end", "on_eval_step_end"):
        parameters = inspect.signature(getattr(TrainerCallback, event)).parameters
        assert list(parameters) == ["self", "trainer", "batch", "batch_output", "kwargs"]
        assert parameters["batch"].default is None and parameters["batch_output"].default is None


def test_a_callback_limits_nothing_and_has_no_state_unless_it_says_so():
    callback = Silent()
    assert callback.batch_limit(None, training=True) is None
    assert callback.batch_limit(None, training=False, is_intermediate=True) is None
    assert callback.state_dict() == {}
    assert callback.load_state_dict({"anything": 1}) is None


def test_every_callback_of_the_package_is_exported_and_made_of_known_events():
    exported = [getattr(callbacks_module, name) for name in callbacks_module.__all__]
    classes = [item for item in exported if isinstance(item, type) and issubclass(item, TrainerCallback)]
    assert len(classes) == 21  # the base among them
    for cls in classes:
        events = {name for name in dir(cls) if name.startswith("on_")}
        assert events == set(EVENTS), cls.__name__


def test_the_default_callbacks_are_five_classes_in_this_order():
    first = (MoveModulesToDeviceCallback, TerminateOnNaNCallback, PrintProgressCallback)
    expected = (*first, ProgressBarCallback, LogMetricsCallback)
    assert get_default_callbacks() == DEFAULT_CALLBACKS == expected
    assert get_default_callbacks(progress_bar=False) == (*first, LogMetricsCallback)
    assert inspect.signature(Trainer.__init__).parameters["callbacks"].default is CONSOLE_CALLBACKS
    assert (*first[:2], EpochTableCallback) == CONSOLE_CALLBACKS


def test_a_handler_takes_instances_and_classes_and_keeps_their_order():
    recorder = Recorder()
    handler = CallbackHandler([Second, recorder, Silent])
    assert handler.callbacks[1] is recorder
    assert [type(callback) for callback in handler.callbacks] == [Second, Recorder, Silent]
    assert handler.callback_list == ["Second", "Recorder", "Silent"]
    assert list(handler) == handler.callbacks

    handler.call_event("on_train_epoch_start", "a trainer", extra=1)
    assert Recorder.calls == [
        ("second", "on_train_epoch_start", ("a trainer",), {"extra": 1}),
        ("first", "on_train_epoch_start", ("a trainer",), {"extra": 1}),
    ]


def test_a_trainer_skips_events_without_a_listener_but_not_a_handler_with_its_own_call_event():
    class Handler(CallbackHandler):
        def call_event(self, event, *args, **kwargs):
            events.append(event)
            super().call_event(event, *args, **kwargs)

    events, trainer = [], Trainer(None, None, None, callbacks=[])
    trainer.call_event("on_update_end")
    assert "on_update_end" in trainer.callback_handler.unheard
    trainer.callback_handler.add_callback(toys.callback(on_update_end=lambda trainer, **kwargs: events.append("late")))
    trainer.call_event("on_update_end")
    trainer.callback_handler = Handler([])
    trainer.call_event("on_update_end"), trainer.call_event("on_update_end")
    assert events == ["late", "on_update_end", "on_update_end"]


def test_callbacks_can_be_added_and_cleared_at_any_time():
    handler = CallbackHandler(())
    handler.call_event("on_train_epoch_start", "a trainer")  # nobody listens, and the next one must still be found
    handler.add_callback(Second)
    handler.add_callbacks([Recorder("third"), Silent, Recorder])  # two of one class are both called
    handler.call_event("on_train_epoch_start", "a trainer")
    assert [name for name, *_ in Recorder.calls] == ["second", "third", "first"]

    handler.clear_callbacks()
    assert handler.callbacks == [] and handler.callback_list == [] and list(handler) == []
    handler.call_event("on_train_epoch_start", "a trainer")
    assert len(Recorder.calls) == 3


@pytest.mark.parametrize(
    "given", [["accuracy"], "accuracy", [print], [lambda outputs, targets: 0.0], [object()], [dict]]
)
def test_an_object_without_an_event_is_refused_and_metrics_are_sent_to_their_argument(given):
    with pytest.raises(ConfigTypeError, match="metrics="):
        Trainer(None, None, None, given)
    with pytest.raises(ConfigTypeError, match=r"pass \(\) for none"):
        Trainer(None, None, None, None)


def test_a_custom_event_reaches_those_who_have_it_with_any_arguments():
    handler = CallbackHandler([Silent, Recorder("a"), Silent, Recorder("b")])
    handler.call_event("on_my_event", trainer="a trainer", answer=42)
    handler.call_event("on_my_event", "one", "two")
    handler.call_event("on_an_event_of_nobody", trainer="a trainer")
    assert Recorder.calls == [
        ("a", "on_my_event", (), {"trainer": "a trainer", "answer": 42}),
        ("b", "on_my_event", (), {"trainer": "a trainer", "answer": 42}),
        ("a", "on_my_event", ("one", "two"), {}),
        ("b", "on_my_event", ("one", "two"), {}),
    ]


def test_a_custom_event_may_be_any_callable_also_one_set_on_the_instance():
    calls = []

    static = toys.callback(Recorder, on_my_event=lambda **kwargs: calls.append("static"))
    on_instance = Silent()
    on_instance.on_my_event = lambda **kwargs: calls.append("instance")
    CallbackHandler([static, on_instance]).call_event("on_my_event", trainer="a trainer")
    assert calls == ["static", "instance"]


def test_a_trainer_subclass_can_call_an_event_of_its_own_inside_a_run():
    class WithEvent(toys.RecordingTrainer):
        def optimizer_step(self):
            super().optimizer_step()
            self.callback_handler.call_event("on_my_event", trainer=self, lr=self.lrs[-1])

    trainer = toys.trained([Recorder()], toys.data(8), cls=WithEvent)
    assert [call for call in Recorder.calls if call[1] == "on_my_event"] == [
        ("first", "on_my_event", (), {"trainer": trainer, "lr": 0.05})
    ] * 2


def test_a_callback_that_says_not_implemented_is_skipped_and_the_others_are_called():
    not_here = toys.raising("on_train_epoch_start", CallbackMethodNotImplementedError())
    result = toys.trained([Recorder("before"), not_here, Recorder("after")], toys.data(8)).result
    assert result.stop_reason is None
    assert [name for name, *_ in Recorder.calls] == ["before", "after"]


def test_a_stop_keeps_the_event_from_the_callbacks_after_it():
    trainer = toys.trained([Recorder("before"), toys.raising("on_train_epoch_start"), Recorder("after")], toys.data(8))
    assert trainer.result.stop_reason == "enough"
    assert [name for name, *_ in Recorder.calls] == ["before"]
    assert issubclass(StopTrainingError, Exception)


def test_an_unknown_event_is_warned_about_with_the_nearest_name():
    class Misspelt(TrainerCallback):
        def on_train_epoch_finish(self, trainer, **kwargs):
            pass

    with pytest.warns(UserWarning, match="Did you mean on_train_epoch_end") as caught:
        CallbackHandler([Misspelt])
    assert len(caught) == 1
    assert re.match(r"Misspelt\.on_train_epoch_finish is not an event", str(caught[0].message))
    with pytest.warns(UserWarning, match="Misspelt.on_train_epoch_finish"):
        toys.trainer_of([Misspelt])
    with pytest.warns(UserWarning, match="on_zzz") as caught:
        CallbackHandler([toys.callback(on_zzz=lambda trainer, **kwargs: None)])
    assert "Did you mean" not in str(caught[0].message)


def test_an_event_named_in_custom_events_is_not_warned_about():
    class Meant(TrainerCallback):
        custom_events = ("on_train_epoch_finish",)

        def on_train_epoch_finish(self, trainer, **kwargs):
            pass

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handler = CallbackHandler([Meant, Recorder, *DEFAULT_CALLBACKS, ModelEmaCallback])
    assert len(handler.callbacks) == 8


def test_a_method_replaced_between_two_runs_is_called_in_the_second():
    calls = []
    callback = toys.callback(on_train_epoch_start=lambda trainer, **kwargs: calls.append("old"))
    silent = Silent()
    trainer = toys.trained([callback, silent], toys.data(8))

    type(callback).on_train_epoch_start = staticmethod(lambda trainer, **kwargs: calls.append("new"))
    silent.on_train_epoch_start = lambda trainer, **kwargs: calls.append("no longer silent")
    trainer.callback_handler.callbacks.append(Recorder("appended"))
    toys.fit(trainer, toys.data(8))
    assert calls == ["old", "new", "no longer silent"]
    assert [name for name, *_ in Recorder.calls] == ["appended"]


def test_the_smallest_limit_of_all_callbacks_counts():
    handler = CallbackHandler([Silent, LimitBatchesCallback(5), LimitBatchesCallback(3), LimitBatchesCallback(4)])
    assert handler.batch_limit(None, training=True) == 3
    assert CallbackHandler([Silent, StepBasedEvaluationCallback(2)]).batch_limit(None, training=True) is None


def test_an_object_that_is_not_a_trainer_callback_gets_its_events_and_nothing_else():
    seen = []
    duck = toys.callback(object, on_train_epoch_start=lambda trainer, **kwargs: seen.append(trainer))
    trainer = toys.trained([duck], toys.data(8), num_epochs=2)
    assert seen == [trainer] * 2
    assert trainer.callback_handler.state_dict() == []
    assert trainer.callback_handler.batch_limit(trainer, training=True) is None


def test_a_deep_copy_of_a_handler_calls_the_copied_callbacks():
    class Counter(TrainerCallback):
        count = 0

        def on_train_epoch_start(self, trainer, **kwargs):
            self.count += 1

    handler = CallbackHandler([Counter])
    handler.call_event("on_train_epoch_start", None)
    twin = copy.deepcopy(handler)
    twin.call_event("on_train_epoch_start", None)
    assert (handler.callbacks[0].count, twin.callbacks[0].count) == (1, 2)


class Counting(TrainerCallback):
    def __init__(self, count=0):
        self.count = count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def test_the_nth_callback_of_a_class_gets_the_nth_state_of_that_class():
    class CountingElse(Counting):
        pass

    saved = CallbackHandler([Counting(1), Silent, CountingElse(2), Counting(3), Counting(4)]).state_dict()
    assert [entry["class"] for entry in saved] == ["Counting", "Silent", "CountingElse", "Counting", "Counting"]

    handler = CallbackHandler([CountingElse(), Counting(), Counting()])  # another order, and one of them is gone
    handler.load_state_dict(saved)
    assert [callback.count for callback in handler] == [2, 1, 3]


def test_a_callback_without_a_saved_state_keeps_its_own():
    handler = CallbackHandler([Counting(7), Counting(8)])
    handler.load_state_dict([{"class": "Counting", "state": {"count": 1}}, {"class": "Gone", "state": {}}])
    assert [callback.count for callback in handler] == [1, 8]
