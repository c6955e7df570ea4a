"""The speed of a run counts training time alone, whatever is logged, evaluated and saved in between."""

from itertools import product
from types import SimpleNamespace

import pytest
from torch.utils.data import Dataset

import toys
from hf import tiny
from loopwright import Checkpointing, Trainer, hf
from loopwright.callbacks import TrainerCallback
from loopwright.tracking import throughput
from toys import callback

# Seconds, exact in binary: of a sample, an update, an evaluation batch, a save, a log and an epoch's end.
SAMPLE, UPDATE, EVALUATION, SAVE, LOG, END = 0.25, 2.0, 16.0, 64.0, 1024.0, 4096.0
ROWS, BATCH = 20, 4
SPEED = BATCH / (UPDATE + BATCH * SAMPLE)


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: clock.now)
    return clock


class Slow(Dataset):
    """Samples that take a while; those of an evaluation are part of it."""

    def __init__(self, clock):
        self.clock, self.samples = clock, toys.pairs(ROWS)

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        self.clock.now += SAMPLE
        return self.samples[index]


class Timed(Trainer):
    """Takes its time for everything."""

    num_saves = -1  # the first state is captured before the first update, to see whether it can be saved

    def calculate_train_batch_loss(self, batch):
        self.clock.now += UPDATE
        return super().calculate_train_batch_loss(batch)

    def calculate_eval_batch_loss(self, batch):
        self.clock.now += EVALUATION
        return super().calculate_eval_batch_loss(batch)

    def checkpoint_files(self):
        self.num_saves += 1
        self.clock.now += SAVE
        return {}


class Busy(TrainerCallback):
    """Takes its time at logs and ends of epochs; evaluates a copy, and saves a model, on its own."""

    def __init__(self, clock, folder, is_busy):
        self.clock, self.folder, self.is_busy, self.evaluations = clock, folder, is_busy, 0

    def on_log(self, trainer, **kwargs):
        self.clock.now += LOG

    def on_training_run_epoch_end(self, trainer, **kwargs):
        self.clock.now += END

    def on_update_end(self, trainer, **kwargs):
        if self.is_busy and trainer.progress.update % 2:
            trainer.evaluate_copy(trainer.model, [], "copy_")
            trainer.save_training_state(self.folder / "own")
            with trainer.spending(None):
                self.clock.now += LOG

    def on_eval_epoch_start(self, trainer, **kwargs):
        self.evaluations += 1


def train(clock, folder, callbacks=(), is_busy=False, **kwargs):
    trainer = toys.trainer_of([*callbacks], cls=Timed)
    trainer.clock, trainer.busy = clock, Busy(clock, folder, is_busy)
    trainer.callback_handler.add_callback(trainer.busy)
    kwargs["checkpoints"] = Checkpointing(folder, asynchronous=False, keep_best=None, **kwargs.pop("saves", {}))
    trainer.result = toys.fit(trainer, Slow(clock), 2, eval_dataset=Slow(clock), **kwargs)
    return trainer


def assert_is_training_alone(folder, updates):
    speeds = toys.records(folder, "speed")
    assert [record["update"] for record in speeds] == [record["update"] for record in toys.records(folder, "log")]
    for record in speeds:
        assert record["samples_per_second"] == SPEED
        assert record["data_wait"] == BATCH * SAMPLE / (UPDATE + BATCH * SAMPLE)
        assert record["train_seconds"] == record["update"] * UPDATE
    (end,) = toys.records(folder, "end")
    assert (end["train_seconds"], end["wait_seconds"]) == (updates * UPDATE, updates * BATCH * SAMPLE)
    return end


@pytest.mark.parametrize("is_busy", [False, True])
@pytest.mark.parametrize("log_every", [1, 2, 3, 50])
def test_evaluations_saves_and_logs_are_in_no_figure(clock, tmp_path, log_every, is_busy):
    for evaluate_every, save_every in product((None, 1, 2, 3), repeat=2):
        folder = tmp_path / f"{evaluate_every}-{save_every}"
        saves = {} if save_every is None else {"every_updates": save_every}
        trainer = train(clock, folder, is_busy=is_busy, log_every=log_every, evaluate_every=evaluate_every, saves=saves)
        end = assert_is_training_alone(folder, updates=10)
        copies = 5 * is_busy
        assert end["evaluation_seconds"] == (trainer.busy.evaluations + copies) * 5 * (EVALUATION + BATCH * SAMPLE)
        assert (
            end["save_seconds"] == trainer.num_saves * SAVE and trainer.num_saves >= 10 // (save_every or 10) + copies
        )


@pytest.mark.parametrize("stop_at", [3, 5, 8])
def test_a_resumed_run_continues_the_time_of_the_run_and_not_its_speed(clock, tmp_path, stop_at):
    settings = {"log_every": 2, "evaluate_every": 3, "saves": {"every_updates": 2}}
    train(clock, tmp_path, [toys.stop_at(stop_at)], **settings)
    clock.now += 1e6
    assert train(clock, tmp_path, resume_from="auto", **settings).result.updates == 10
    for record in toys.records(tmp_path, "speed"):
        assert record["samples_per_second"] == SPEED
    end = toys.records(tmp_path, "end")[-1]
    assert (end["train_seconds"], end["wait_seconds"]) == (10 * UPDATE, 10 * BATCH * SAMPLE)


def test_a_stream_that_a_limit_cuts_short_counts_only_the_samples_it_trained_on(clock, tmp_path):
    trainer = toys.trainer_of([Busy(clock, tmp_path, False)], cls=Timed)
    trainer.clock = clock
    toys.fit(trainer, toys.Stream(toys.pairs(ROWS)), 1, max_num_train_steps=3)
    assert trainer.speed["samples_per_second"] == BATCH / UPDATE


class TimedClassifier(tiny.Classifier):
    """Takes its time, more of it in evaluations."""

    def forward(self, x, labels=None):
        self.clock.now += UPDATE if self.training else EVALUATION
        return super().forward(x, labels)


@pytest.mark.parametrize(("logs", "evaluations", "saves"), [*product((1, 2, 3), repeat=3)])
def test_the_speed_of_an_hf_trainer_counts_training_alone(clock, tmp_path, logs, evaluations, saves):
    model, speeds = TimedClassifier(), []
    model.clock = clock
    steps = {"logging_steps": logs, "eval_steps": evaluations, "save_steps": saves, "eval_strategy": "steps"}
    args = hf.TrainingArguments(
        str(tmp_path), max_steps=6, per_device_train_batch_size=BATCH, use_cpu=True, report_to="none",
        disable_tqdm=True, save_strategy="steps", **steps,
    )  # fmt: skip

    def metrics(prediction):
        clock.now += EVALUATION
        return {}

    def on_log(args, state, control, logs=None, **kwargs):
        speeds.append(dict(trainer.core.speed))
        clock.now += LOG

    def on_step_end(args, state, control, **kwargs):
        trainer.evaluate(tiny.rows(4))
        trainer.save_model(str(tmp_path / "own"))

    callbacks = [callback(hf.TrainerCallback, on_log=on_log, on_step_end=on_step_end)]
    trainer = hf.Trainer(model, args, None, tiny.rows(), tiny.rows(8), compute_metrics=metrics, callbacks=callbacks)
    trainer.train()
    speeds = [speed["samples_per_second"] for speed in speeds if speed]
    assert len(speeds) >= 6 // logs and set(speeds) == {BATCH / UPDATE}
