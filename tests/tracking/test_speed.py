"""The speed of a run counts training time alone, whatever is logged, evaluated and saved in between."""

from itertools import product
from types import SimpleNamespace

import pytest
from torch.utils.data import default_collate

import toys
from hf import tiny
from loopwright import Checkpointing, Trainer
from loopwright.tracking import throughput

# Seconds, exact in binary: of a batch, an update, an evaluation batch, a save, a log and an epoch's end.
WAIT, UPDATE, EVALUATION, SAVE, LOG, END = 1.0, 2.0, 16.0, 64.0, 1024.0, 4096.0
BATCH, UPDATES = 4, 10  # in two epochs


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: clock.now)
    return clock


class Timed(Trainer):
    """Takes its time, and counts its evaluations and saves."""

    num_saves, num_evaluated = -1, 0  # the first state is captured before the first update, to see whether it can be

    def calculate_train_batch_loss(self, batch):
        self.clock.now += UPDATE
        return super().calculate_train_batch_loss(batch)

    def calculate_eval_batch_loss(self, batch):
        self.num_evaluated += 1
        self.clock.now += EVALUATION
        return super().calculate_eval_batch_loss(batch)

    def checkpoint_files(self):
        self.num_saves += 1
        self.clock.now += SAVE
        return {}


def train(clock, folder, stop_at=None, is_busy=False, dataset=None, save_every=None, **kwargs):
    """Train two epochs of 5 updates; a busy callback evaluates and saves on its own."""

    def spend(seconds):
        clock.now += seconds

    def act(trainer, **kwargs):
        if is_busy and trainer.progress.update % 2:
            trainer.evaluate_copy(trainer.model, [], "copy_")
            trainer.save_training_state(folder / "own")
            with trainer.spending(None):
                spend(LOG)

    events = {"on_log": lambda *_, **__: spend(LOG), "on_training_run_epoch_end": lambda *_, **__: spend(END)}
    trainer = toys.trainer_of([toys.stop_at(stop_at), toys.callback(on_update_end=act, **events)], cls=Timed)
    trainer.clock = clock
    kwargs["checkpoints"] = Checkpointing(folder, asynchronous=False, keep_best=None, every_updates=save_every)
    kwargs["collate_fn"] = lambda samples: spend(WAIT) or default_collate(samples)
    toys.fit(trainer, dataset or toys.pairs(20), 2, eval_dataset=toys.pairs(20), **kwargs)
    for record in toys.records(folder, "speed"):
        assert record["samples_per_second"] == BATCH / (UPDATE + WAIT)
        assert record["data_wait"] == WAIT / (UPDATE + WAIT) and record["peak_memory_bytes"] > 1e6
        assert (record["train_seconds"], record["wait_seconds"]) == (record["update"] * UPDATE, record["update"] * WAIT)
    return trainer, toys.records(folder, "end")[-1]


@pytest.mark.parametrize(("log_every", "is_busy"), [(1, False), (2, True), (3, False), (50, True)])
def test_evaluations_saves_and_logs_are_in_no_figure(clock, tmp_path, log_every, is_busy):
    for evaluate_every, save_every in product((None, 1, 2, 3), repeat=2):
        folder = tmp_path / f"{evaluate_every}-{save_every}"
        every = {"log_every": log_every, "evaluate_every": evaluate_every, "save_every": save_every}
        trainer, end = train(clock, folder, is_busy=is_busy, **every)
        assert len(toys.records(folder, "speed")) == len(toys.records(folder, "log")) >= 2
        assert (end["train_seconds"], end["wait_seconds"]) == (UPDATES * UPDATE, UPDATES * WAIT)
        assert end["evaluation_seconds"] == trainer.num_evaluated * (EVALUATION + WAIT)
        assert end["save_seconds"] == trainer.num_saves * SAVE and trainer.num_saves >= UPDATES // (save_every or 10)


@pytest.mark.parametrize("stop_at", [3, 5, 8])
def test_a_resumed_run_continues_the_time_of_the_run_and_not_its_speed(clock, tmp_path, stop_at):
    every = {"log_every": 2, "evaluate_every": 3, "save_every": 2}
    train(clock, tmp_path, stop_at, **every)
    clock.now += 1e6
    _, end = train(clock, tmp_path, resume_from="auto", **every)
    assert (end["train_seconds"], end["wait_seconds"]) == (UPDATES * UPDATE, UPDATES * WAIT)


def test_a_stream_that_a_limit_cuts_short_counts_only_the_samples_it_trained_on(clock, tmp_path):
    train(clock, tmp_path, dataset=toys.Stream(toys.pairs(20)), max_num_train_steps=3)
    assert len(toys.records(tmp_path, "speed")) == 1


@pytest.mark.parametrize(("logs", "evaluations", "saves"), [*product((1, 2, 3), repeat=3)])
def test_the_speed_of_an_hf_trainer_counts_training_alone(clock, tmp_path, logs, evaluations, saves):
    speeds = []

    def spend(module, *_):
        clock.now += UPDATE if module.training else EVALUATION

    def log(*_, **__):
        speeds.append(trainer.core.speed.get("samples_per_second", BATCH / UPDATE))
        clock.now += LOG

    def evaluate_and_save(*_, **__):
        trainer.evaluate(tiny.rows(4))
        trainer.save_model(str(tmp_path / "own"))

    steps = {"logging_steps": logs, "eval_steps": evaluations, "save_steps": saves, "max_steps": 6}
    strategies = {"eval_strategy": "steps", "save_strategy": "steps", "eval_dataset": tiny.rows(8)}
    trainer = tiny.made(tmp_path, tiny.on(log=log, step_end=evaluate_and_save), **steps, **strategies)
    trainer.compute_metrics = lambda _: spend(trainer.model) or {}
    trainer.model.register_forward_hook(spend)
    trainer.train()
    assert len(speeds) > 6 // logs and set(speeds) == {BATCH / UPDATE}
