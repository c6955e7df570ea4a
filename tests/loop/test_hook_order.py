"""The exact sequence of hooks and events, for every way a run can go.

One run is written out in full, because it is what users' subclasses and callbacks are built on: a hook or event that
moves, comes twice or stays away is a change of the API. The others are made of the parts that they share with it.
"""

from functools import partial

import pytest
import torch
from torch import nn

import toys
from loopwright import Trainer
from loopwright.callbacks import (
    EVENTS,
    EarlyStoppingCallback,
    StepBasedEvaluationCallback,
    StopTrainingError,
    TerminateOnNaNCallback,
    TrainerCallback,
)
from loopwright.checkpoint import Checkpointing
from loopwright.hooks import TrainerHooks
from toys import pairs, raising


def names(*texts: str) -> list[str]:
    """The names in texts, so that a golden list can be laid out as the run goes."""
    return " ".join(texts).split()


HOOKS = names("""
    create_train_dataloader create_eval_dataloader create_scheduler training_run_start train_epoch_start
    calculate_train_batch_loss backward_step _clip_gradients optimizer_step scheduler_step optimizer_zero_grad
    train_epoch_end eval_epoch_start calculate_eval_batch_loss eval_epoch_end training_run_epoch_end training_run_end
    evaluation_run_start evaluation_run_end calculate_prediction
""")
# Asked for a value, not told of a moment: their place is no promise.
QUESTIONS = names("""
    get_default_train_dl_kwargs get_default_eval_dl_kwargs count_batch_items get_model cut_batch why_not_cut
    checkpoint_files create_capturer create_compiled_model notify print
    remedy_of_policy remedies_of_batch remedies_of_evaluation remedies_of_step remedies_of_unused_parameters
""")
NEW_EVENTS = names("on_before_optimizer_step on_optimizer_step_end on_update_end on_log on_checkpoint_saved")

# Parts of a run without a scheduler and clipping.
STEP = "on_train_step_start calculate_train_batch_loss on_train_step_end backward_step"
UPDATE = f"{STEP} on_before_optimizer_step optimizer_step on_optimizer_step_end optimizer_zero_grad on_update_end"
LOADERS = "on_init_end create_train_dataloader create_eval_dataloader"
EPOCH_START = "train_epoch_start on_train_epoch_start"
START = f"training_run_start on_training_run_start {EPOCH_START}"
TRAINED = "on_log train_epoch_end on_train_epoch_end"
EVALUATION = """
    eval_epoch_start on_eval_epoch_start on_eval_step_start calculate_eval_batch_loss on_eval_step_end
    eval_epoch_end on_eval_epoch_end
"""
EPOCH_END = "training_run_epoch_end on_training_run_epoch_end"
END = "training_run_end on_training_run_end"
STOPPED = f"on_stop_training_error {END}"


class Recording(Trainer):
    """Writes down every hook that is called, and every event that its journal callback gets."""

    def __init__(self, *args, **kwargs):
        self.journal = []
        super().__init__(*args, **kwargs)


def _recorded(hook: str):
    def method(self, *args, **kwargs):
        self.journal.append(hook)
        return getattr(super(Recording, self), hook)(*args, **kwargs)

    return method


for _hook in HOOKS:
    setattr(Recording, _hook, _recorded(_hook))


def _written_down(event: str):
    def method(self, trainer, **kwargs):
        trainer.journal.append(event)
        self.details.append((event, kwargs))

    return method


class Journal(TrainerCallback):
    def __init__(self):
        self.details = []

    def of(self, event: str) -> list[dict]:
        return [kwargs for name, kwargs in self.details if name == event]


for _event in EVENTS:
    setattr(Journal, _event, _written_down(_event))


def recording(*callbacks: TrainerCallback, cls=Recording, **kwargs) -> Recording:
    return toys.trainer_of([*callbacks, Journal()], nn.Linear(4, 1), 0.01, 0.0, cls, **kwargs)


def journal_of(trainer: Recording) -> Journal:
    return trainer.callback_handler.callbacks[-1]


schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=1)


def test_every_hook_and_every_event_is_watched():
    overridable = {name for name, value in vars(TrainerHooks).items() if callable(value) and not name.startswith("_")}
    assert overridable == set(HOOKS) - {"_clip_gradients"} | set(QUESTIONS)
    assert (len(HOOKS) + len(QUESTIONS), len(EVENTS)) == (36, 20)
    assert set(NEW_EVENTS) <= set(EVENTS)


def test_a_training_run_with_scheduler_evaluation_and_clipping():
    trainer = recording()
    trainer.train(pairs(8), 2, pairs(4), 4, gradient_clip_value=1.0, create_scheduler_fn=schedule)
    update = """
        on_train_step_start calculate_train_batch_loss on_train_step_end backward_step
        _clip_gradients on_before_optimizer_step
        optimizer_step on_optimizer_step_end scheduler_step optimizer_zero_grad on_update_end
    """
    end = """
        on_log
        train_epoch_end on_train_epoch_end
        eval_epoch_start on_eval_epoch_start
        on_eval_step_start calculate_eval_batch_loss on_eval_step_end
        eval_epoch_end on_eval_epoch_end
        training_run_epoch_end on_training_run_epoch_end
    """
    epoch = names("train_epoch_start on_train_epoch_start", update, update, end)
    begin = names("on_init_end create_train_dataloader create_eval_dataloader create_scheduler")
    run = [*names("training_run_start on_training_run_start"), *epoch, *epoch]
    assert trainer.journal == [*begin, *run, *names("training_run_end on_training_run_end")]


def test_without_the_new_events_a_run_goes_as_pytorch_accelerated_documents_it():
    trainer = recording()
    trainer.train(pairs(8), 1, pairs(8), 4, gradient_clip_value=1.0, create_scheduler_fn=schedule)
    assert [name for name in trainer.journal if name not in NEW_EVENTS] == names("""
        on_init_end
        create_train_dataloader create_eval_dataloader create_scheduler
        training_run_start on_training_run_start
        train_epoch_start on_train_epoch_start
        on_train_step_start calculate_train_batch_loss on_train_step_end backward_step
        _clip_gradients optimizer_step scheduler_step optimizer_zero_grad
        on_train_step_start calculate_train_batch_loss on_train_step_end backward_step
        _clip_gradients optimizer_step scheduler_step optimizer_zero_grad
        train_epoch_end on_train_epoch_end
        eval_epoch_start on_eval_epoch_start
        on_eval_step_start calculate_eval_batch_loss on_eval_step_end
        on_eval_step_start calculate_eval_batch_loss on_eval_step_end
        eval_epoch_end on_eval_epoch_end
        training_run_epoch_end on_training_run_epoch_end
        training_run_end on_training_run_end
    """)


def test_a_run_without_scheduler_evaluation_and_clipping_leaves_their_hooks_out():
    trainer = recording()
    trainer.train(pairs(4), 1, per_device_batch_size=4)
    assert trainer.journal == names("on_init_end create_train_dataloader", START, UPDATE, TRAINED, EPOCH_END, END)


def test_accumulation_over_two_with_a_short_tail_clips_and_updates_once_per_window():
    trainer = recording()
    options = {"gradient_accumulation_steps": 2, "gradient_clip_norm": 1.0, "create_scheduler_fn": schedule}
    trainer.train(pairs(10), 1, per_device_batch_size=4, **options)
    update = """
        _clip_gradients on_before_optimizer_step
        optimizer_step on_optimizer_step_end scheduler_step optimizer_zero_grad on_update_end
    """
    begin = names("on_init_end create_train_dataloader create_scheduler", START)
    assert trainer.journal == [*begin, *names(STEP, STEP, update, STEP, update, TRAINED, EPOCH_END, END)]
    assert [kwargs["step"] for kwargs in journal_of(trainer).of("on_train_step_end")] == [0, 1, 2]


def test_intermediate_evaluation_comes_after_the_update_whose_micro_batch_asked_for_it():
    trainer = recording(StepBasedEvaluationCallback(1))
    trainer.train(pairs(8), 1, pairs(4), per_device_batch_size=4)
    assert trainer.journal == names(LOADERS, START, UPDATE, UPDATE, EVALUATION, TRAINED, EVALUATION, EPOCH_END, END)
    for event in ("on_eval_epoch_start", "on_eval_epoch_end"):
        assert [kwargs["is_intermediate"] for kwargs in journal_of(trainer).of(event)] == [True, False]
    assert len(trainer.run_history.get_metric_values("intermediate_eval_loss")) == 1
    assert len(trainer.run_history.get_metric_values("eval_loss_epoch")) == 1


def test_intermediate_evaluation_never_splits_an_accumulation_window():
    trainer = recording(StepBasedEvaluationCallback(1))
    trainer.train(pairs(16), 1, pairs(4), per_device_batch_size=4, gradient_accumulation_steps=2)
    start = trainer.journal.index("on_train_epoch_start") + 1
    assert trainer.journal[start : trainer.journal.index("on_log")] == names(STEP, UPDATE, EVALUATION) * 2


def test_an_evaluation_run():
    trainer = recording()
    trainer.evaluate(pairs(6), per_device_batch_size=4)
    assert trainer.journal == names("""
        on_init_end
        create_eval_dataloader
        evaluation_run_start on_evaluation_run_start
        eval_epoch_start on_eval_epoch_start
        on_eval_step_start calculate_eval_batch_loss on_eval_step_end
        on_eval_step_start calculate_eval_batch_loss on_eval_step_end
        eval_epoch_end on_eval_epoch_end
        evaluation_run_end on_evaluation_run_end
    """)
    assert journal_of(trainer).of("on_eval_epoch_start") == [{"is_intermediate": False}]


def test_a_prediction_run_has_no_events():
    trainer = recording()
    trainer.predict(pairs(6), per_device_batch_size=4)
    assert trainer.journal == names("on_init_end create_eval_dataloader calculate_prediction calculate_prediction")


def test_early_stopping_ends_the_run_after_its_epoch_and_later_callbacks_miss_that_event():
    trainer = recording(EarlyStoppingCallback(early_stopping_patience=1, early_stopping_threshold=1e9))
    result = trainer.train(pairs(4), 5, pairs(4), per_device_batch_size=4)
    first_epoch = names(LOADERS, START, UPDATE, TRAINED, EVALUATION, EPOCH_END)
    second_epoch = names(EPOCH_START, UPDATE, TRAINED, EVALUATION, "training_run_epoch_end", STOPPED)
    assert trainer.journal == first_epoch + second_epoch
    assert result.stop_reason == "Stopping training due to no improvement after 1 epochs"
    # The metrics of the stopped epoch stay; it is not counted in the history, as the contract says.
    assert len(trainer.run_history.get_metric_values("eval_loss_epoch")) == 2
    assert trainer.run_history.current_epoch == 2
    assert (result.epochs, result.updates) == (2, 2)


def test_a_stop_raised_in_a_step_drops_the_rest_of_it():
    stop = StopTrainingError("enough")
    trainer = recording(raising("on_train_step_end", stop))
    result = trainer.train(pairs(8), 3, pairs(4), per_device_batch_size=4)
    assert trainer.journal == names(LOADERS, START, "on_train_step_start calculate_train_batch_loss", STOPPED)
    assert journal_of(trainer).of("on_stop_training_error") == [{"error": stop}]
    assert (result.stop_reason, result.epochs, result.updates) == ("enough", 0, 0)
    assert trainer.run_history.get_metric_names() == set()


def test_a_stop_raised_in_an_evaluation_run_ends_it_with_its_closing_events():
    trainer = recording(raising("on_eval_step_end", StopTrainingError("enough")))
    result = trainer.evaluate(pairs(8), per_device_batch_size=4)
    assert trainer.journal == names("""
        on_init_end
        create_eval_dataloader
        evaluation_run_start on_evaluation_run_start
        eval_epoch_start on_eval_epoch_start
        on_eval_step_start calculate_eval_batch_loss
        on_stop_training_error
        evaluation_run_end on_evaluation_run_end
    """)
    assert (result.stop_reason, result.metrics) == ("enough", {})


OTHER_EVENTS = {"on_init_end", "on_evaluation_run_start", "on_evaluation_run_end", "on_stop_training_error"}


@pytest.mark.parametrize("event", [event for event in EVENTS if event not in OTHER_EVENTS])
def test_a_stop_is_heard_wherever_an_event_raises_it(event, tmp_path):
    trainer = recording(raising(event, StopTrainingError(f"stopped in {event}")))
    checkpoints = Checkpointing(tmp_path, every_updates=1, asynchronous=False)
    result = trainer.train(pairs(8), 2, pairs(4), per_device_batch_size=4, checkpoints=checkpoints)
    assert result.stop_reason == f"stopped in {event}"
    assert trainer.journal.count("training_run_end") == 1
    if event == "on_training_run_end":
        assert trainer.journal[-2:] == ["training_run_end", "on_stop_training_error"]
    else:
        closing = [name for name in trainer.journal if name != "on_checkpoint_saved"][-3:]
        assert closing == ["on_stop_training_error", "training_run_end", "on_training_run_end"]


@pytest.mark.parametrize(
    "hook", [hook for hook in HOOKS if not hook.startswith(("create_", "evaluation_", "calculate_prediction"))]
)
def test_a_stop_is_heard_wherever_a_hook_raises_it(hook):
    def method(self, *args, **kwargs):
        self.journal.append(hook)
        raise StopTrainingError(f"stopped in {hook}")

    trainer = recording(cls=type("Stopping", (Recording,), {hook: method}))
    result = trainer.train(pairs(8), 2, pairs(4), 4, gradient_clip_value=1.0, create_scheduler_fn=schedule)
    assert result.stop_reason == f"stopped in {hook}"
    if hook == "training_run_end":
        assert trainer.journal[-2:] == ["training_run_end", "on_stop_training_error"]
    else:
        assert trainer.journal[-4:] == [hook, "on_stop_training_error", "training_run_end", "on_training_run_end"]


def test_a_nan_is_seen_at_the_next_log_and_names_the_first_bad_update(capsys):
    trainer = recording(TerminateOnNaNCallback(), loss_func=toys.NanFrom(3))
    result = trainer.train(pairs(24), 2, pairs(4), per_device_batch_size=4, log_every=2)
    # The callback is before the journal, so the journal misses the log that stopped the run.
    assert trainer.journal == names(LOADERS, START, UPDATE, UPDATE, "on_log", UPDATE, UPDATE, STOPPED)
    assert "NaN loss in training step (first at update 3, samples " in result.stop_reason
    assert result.stop_reason in capsys.readouterr().out
    assert result.updates == 4
    assert "train_loss_epoch" not in trainer.run_history.get_metric_names()


# 5 micro-batches per epoch: with accumulation 2 the windows hold 2, 2 and 1 of them, with 4 they hold 4 and 1.
@pytest.mark.parametrize(
    ("accumulation", "bad_call", "bad_update"), [(1, 9, 9), (2, 4, 2), (2, 5, 3), (2, 6, 4), (4, 5, 2), (4, 9, 3)]
)
def test_the_first_bad_update_is_counted_over_the_whole_run(accumulation, bad_call, bad_update):
    trainer = recording(TerminateOnNaNCallback(), loss_func=toys.NanFrom(bad_call))
    result = trainer.train(pairs(20), 3, per_device_batch_size=4, gradient_accumulation_steps=accumulation)
    assert result.stop_reason.startswith(
        f"Stopping training due to NaN loss in training step (first at update {bad_update}, samples "
    )


def test_a_nan_in_evaluation_stops_the_run_too():
    trainer = recording(TerminateOnNaNCallback(), loss_func=toys.NanFrom(2))
    result = trainer.train(pairs(4), 2, pairs(4), per_device_batch_size=4)
    assert result.stop_reason == "Stopping training due to NaN loss in validation step"
    assert trainer.journal[-5:] == names("on_eval_step_end eval_epoch_end", STOPPED)


@pytest.mark.parametrize("event", ["on_train_step_end", "on_eval_step_end"])
def test_an_interrupt_runs_the_closing_events_and_reaches_the_caller(event):
    trainer = recording(raising(event, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        trainer.train(pairs(4), 2, pairs(4), per_device_batch_size=4)
    until_then = {
        "on_train_step_end": "on_train_step_start calculate_train_batch_loss",
        "on_eval_step_end": f"""
            {UPDATE} {TRAINED} eval_epoch_start on_eval_epoch_start on_eval_step_start calculate_eval_batch_loss
        """,
    }
    assert trainer.journal == names(LOADERS, START, until_then[event], END)


def test_any_other_error_leaves_at_once_without_closing_events():
    trainer = recording(raising("on_train_step_end", ZeroDivisionError("a bug")))
    with pytest.raises(ZeroDivisionError, match="a bug"):
        trainer.train(pairs(4), 1, per_device_batch_size=4)
    assert trainer.journal[-2:] == ["on_train_step_start", "calculate_train_batch_loss"]


def test_logs_evaluations_and_saves_of_the_loop_itself_have_their_place(tmp_path):
    trainer = recording()
    checkpoints = Checkpointing(tmp_path, every_updates=2, keep_best=None, asynchronous=False)
    trainer.train(pairs(8), 1, pairs(4), 4, log_every=1, evaluate_every=2, checkpoints=checkpoints)
    # Nothing is new between the last log and the epoch's end, so there is no log there.
    saved = "on_checkpoint_saved"
    assert trainer.journal[trainer.journal.index("on_train_epoch_start") + 1 :] == [
        *names(UPDATE, "on_log", UPDATE, "on_log", EVALUATION, saved, "train_epoch_end on_train_epoch_end"),
        *names(EVALUATION, EPOCH_END, saved, END),
    ]


def test_events_get_the_trainer_first_and_their_details_by_keyword():
    trainer = recording()
    trainer.train(pairs(10), 1, pairs(4), per_device_batch_size=4)
    journal = journal_of(trainer)
    steps = journal.of("on_train_step_end")
    assert [(kwargs["step"], len(kwargs["batch"][0])) for kwargs in steps] == [(0, 4), (1, 4), (2, 2)]
    assert [kwargs["batch_output"]["batch_size"] for kwargs in steps] == [4, 4, 2]
    assert all(kwargs["batch_output"]["loss"].requires_grad for kwargs in steps)
    (eval_step,) = journal.of("on_eval_step_end")
    assert set(eval_step) == {"batch", "batch_output", "step"} and eval_step["step"] == 0
    assert not eval_step["batch_output"]["loss"].requires_grad
    (log,) = journal.of("on_log")
    assert set(log) == {"logs", "first_nonfinite_update", "nonfinite_samples"}
    assert journal.of("on_training_run_start") == [{}]


def test_callbacks_are_called_in_the_order_of_the_list():
    order = []
    first, second, third = (
        toys.callback(on_train_epoch_start=lambda trainer, name=name, **kwargs: order.append(name)) for name in "abc"
    )
    trainer = recording(first, second)
    trainer.callback_handler.add_callback(third)
    trainer.train(pairs(4), 2, per_device_batch_size=4)
    assert order == list("abcabc")


def test_items_are_counted_once_per_micro_batch_before_its_window_runs():
    class Counting(Recording):
        def count_batch_items(self, batch):
            self.journal.append("count_batch_items")
            return super().count_batch_items(batch)

    trainer = recording(cls=Counting)
    trainer.train(pairs(12), 1, per_device_batch_size=4, gradient_accumulation_steps=2)
    watched = ("count_batch_items", "calculate_train_batch_loss")
    assert [name for name in trainer.journal if name in watched] == names("""
        count_batch_items count_batch_items calculate_train_batch_loss calculate_train_batch_loss
        count_batch_items calculate_train_batch_loss
    """)


def test_what_the_journal_shows_is_what_the_weights_feel():
    """Gradients are complete at on_before_optimizer_step, weights move between it and on_optimizer_step_end."""
    seen = []

    def look(name):
        def method(trainer, **kwargs):
            weight = trainer.model.weight
            gradient = None if weight.grad is None else weight.grad.clone()
            lr = trainer.optimizer.param_groups[0]["lr"]
            seen.append((name, weight.detach().clone(), gradient, lr, trainer.progress.update))

        return method

    names = ("on_before_optimizer_step", "on_optimizer_step_end", "on_update_end")
    trainer = recording(toys.callback(**{name: look(name) for name in names}))
    trainer.train(pairs(4), 1, per_device_batch_size=4, gradient_clip_norm=1e-3, create_scheduler_fn=schedule)
    before, stepped, after = seen
    assert before[2].norm() <= 1e-3
    assert torch.equal(before[2], stepped[2]) and after[2] is None
    assert not torch.equal(before[1], stepped[1]) and torch.equal(stepped[1], after[1])
    assert [entry[3] for entry in seen] == [0.01, 0.01, pytest.approx(0.001)]
    assert [entry[4] for entry in seen] == [0, 0, 1]
