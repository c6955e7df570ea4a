"""The numbers, events and calls of transformers' own Trainer, where it is right."""

from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch

import loopwright.hf as ours
from loopwright.data.order import Shuffled
from toys import seeded

from .tiny import Classifier, bert, fit, largest_difference, llama, logged, losses, rows, token_rows

theirs = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers")

EVENTS = sorted(name for name in dir(ours.TrainerCallback) if name.startswith("on_"))
QUIET = {"disable_tqdm": True, "use_cpu": True, "report_to": "none"}


def class_rows():
    generator = torch.Generator().manual_seed(1)
    return [
        {"input_ids": torch.randint(3, 32, (8,), generator=generator), "labels": int(label)}
        for label in torch.randint(3, (40,), generator=generator)
    ]


CASES = {
    "classification": (bert, class_rows(), {"gradient_accumulation_steps": 1, "weight_decay": 0.01}),
    "causal LM": (llama, token_rows(40), {"gradient_accumulation_steps": 2}),
    "plain module": (partial(seeded, Classifier), rows(40), {"gradient_accumulation_steps": 2, "warmup_steps": 5}),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_and_weights_are_those_of_transformers_after_50_updates(case, tmp_path):
    make, data, options = CASES[case]
    options = {**QUIET, **options, "max_steps": 50, "logging_steps": 1, "save_strategy": "no"}
    options |= {"per_device_train_batch_size": 4, "learning_rate": 1e-3}

    args = ours.TrainingArguments(str(tmp_path / "ours"), **options)
    one = ours.Trainer(make(), args, train_dataset=data)
    one.train()

    plan = Shuffled(len(data), args.seed)
    epochs = -(-50 * 4 * options["gradient_accumulation_steps"] // len(data))
    in_our_order = [data[index] for epoch in range(epochs) for index in plan.ids(epoch, 0, len(data))]
    args = theirs.TrainingArguments(
        str(tmp_path / "theirs"), **options, train_sampling_strategy="sequential", logging_nan_inf_filter=False
    )
    other = theirs.Trainer(make(), args, train_dataset=in_our_order)
    other.train()

    assert len(losses(one)) == len(losses(other)) == 50
    assert max(abs(a - b) for a, b in zip(losses(one), losses(other), strict=True)) < 1e-6
    assert largest_difference(one.model.state_dict(), other.model.state_dict()) < 1e-6
    rates, norms = ([logged(each, name) for each in (one, other)] for name in ("learning_rate", "grad_norm"))
    assert np.allclose(*rates, rtol=1e-12) and np.allclose(*norms, atol=1e-5)


STEPS = {"eval_strategy": "steps", "eval_steps": 2}
SCHEDULES = {
    "steps": {**STEPS, "num_train_epochs": 2, "gradient_accumulation_steps": 2, "logging_steps": 2, "save_steps": 3},
    "epochs": {
        **dict.fromkeys(("logging_strategy", "eval_strategy", "save_strategy"), "epoch"),
        **{"num_train_epochs": 2, "load_best_model_at_end": True},
    },
    "best": {
        **{"max_steps": 7, "logging_steps": 3, **STEPS, "eval_steps": 3, "eval_on_start": True},
        **{"save_strategy": "best", "metric_for_best_model": "loss"},
    },
    "none": {"max_steps": 5, "save_strategy": "no", "logging_first_step": True},
}


def recorded(library, folder, **options):
    seen = []

    def recording(event):
        def method(self, args, state, control, **kwargs):
            seen.append((event, state.global_step, round(state.epoch or 0, 6)))

        return method

    recorder = type("Recorder", (library.TrainerCallback,), {event: recording(event) for event in EVENTS})
    torch.manual_seed(0)
    args = library.TrainingArguments(str(folder), per_device_train_batch_size=4, **QUIET, **options)
    trainer = library.Trainer(Classifier(), args, train_dataset=rows(20), eval_dataset=rows(10), callbacks=[recorder()])
    trainer.train()
    trainer.evaluate()
    trainer.predict(rows(10))
    return seen, trainer


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_events_come_in_the_order_that_transformers_has(schedule, tmp_path):
    here, one = recorded(ours, tmp_path / "ours", **SCHEDULES[schedule])
    there, other = recorded(theirs, tmp_path / "theirs", **SCHEDULES[schedule])
    assert here == there
    assert len(here) >= 27
    keys = [[sorted(set(entry) - {"total_flos"}) for entry in each.state.log_history] for each in (one, other)]
    keys = [[[name for name in entry if "preparation_time" not in name] for entry in each] for each in keys]
    assert keys[0] == keys[1]


POINTS = (
    *("compute_loss", "training_step", "prediction_step", "evaluation_loop", "evaluate", "log", "_prepare_inputs"),
    *("get_train_dataloader", "get_eval_dataloader", "get_test_dataloader", "create_optimizer", "create_scheduler"),
    *("get_decay_parameter_names", "compute_loss_context_manager", "_get_dataloader", "_get_train_sampler"),
    *("_get_eval_sampler", "_get_collator_with_removed_columns", "_set_signature_columns_if_needed"),
    *(
        "get_total_train_batch_size",
        "get_batch_samples",
        "_inner_training_loop",
        "_save_checkpoint",
        "save_model",
        "_save",
    ),
)


def counted(library, folder):
    """Train five updates with every override point counted, then evaluate and predict."""
    calls = Counter()

    def counting(name):
        def method(self, *args, **kwargs):
            calls[name] += 1
            return getattr(super(trainer_class, self), name)(*args, **kwargs)

        return method

    trainer_class = type("Counting", (library.Trainer,), {name: counting(name) for name in POINTS})
    options = {"max_steps": 5, "gradient_accumulation_steps": 2, "save_steps": 2, **STEPS}
    args = library.TrainingArguments(str(folder), per_device_train_batch_size=2, **QUIET, **options)
    trainer = trainer_class(Classifier(), args, train_dataset=rows(24), eval_dataset=rows(20))
    trainer.train()
    trainer.predict(rows(10))
    return calls


def test_every_override_point_is_called_as_often_as_by_transformers(tmp_path):
    here, there = counted(ours, tmp_path / "ours"), counted(theirs, tmp_path / "theirs")
    assert here == there
    assert set(here) == set(POINTS)
    assert here["training_step"] == 10 and here["prediction_step"] == 3 * 3 + 2


def test_an_overridden_create_optimizer_and_scheduler_is_called(tmp_path):
    class Own(ours.Trainer):
        def create_optimizer_and_scheduler(self, num_training_steps):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
            self.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer, 0.5, 100)
            self.total = num_training_steps

    args = ours.TrainingArguments(str(tmp_path), max_steps=3, logging_steps=1, save_strategy="no", **QUIET)
    trainer = Own(Classifier(), args, train_dataset=rows())
    trainer.train()
    assert trainer.total == 3
    assert logged(trainer, "learning_rate") == [0.25] * 3


def test_arguments_of_transformers_are_taken(tmp_path):
    args = theirs.TrainingArguments(str(tmp_path), max_steps=3, learning_rate=0.1, save_strategy="no", **QUIET)
    trainer = ours.Trainer(Classifier(), args, train_dataset=rows())
    assert trainer.train().global_step == 3
    assert isinstance(trainer.args, ours.TrainingArguments) and trainer.args.learning_rate == 0.1


def test_the_tensorboard_callback_of_transformers_runs_unchanged(tmp_path):
    tensorboard = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations import TensorBoardCallback

    options = {"max_steps": 4, "logging_steps": 1, "save_strategy": "no", **STEPS}
    trainer = fit(tmp_path, TensorBoardCallback(SummaryWriter(str(tmp_path / "board"))), eval_dataset=rows(), **options)
    board = tensorboard.EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    values = [event.value for event in board.Scalars("train/loss")]
    assert values == pytest.approx(losses(trainer), rel=1e-6)
    assert [event.step for event in board.Scalars("eval/loss")] == [2, 4]
