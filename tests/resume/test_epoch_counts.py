"""One meaning of `epoch` and one of `epochs`, in every place that shows them."""

import math

import pytest

import toys
from hf import tiny
from loopwright import Checkpointing
from loopwright.errors import StopTrainingError
from loopwright.report.run_view import view
from loopwright.report.summary import card_of
from loopwright.run_folder import RunFolder, read_status

PER_EPOCH = 4  # updates of an epoch of 16 samples


def shown(folder, finished, current):
    """Check every place in a run folder that has the finished epochs or the current one."""
    status = read_status(folder)
    assert (status["epochs"], status["epoch"]) == (finished, current)
    assert dict(card_of(view(RunFolder(folder))).facts)["epochs"] == str(finished)
    for record in toys.records(folder, "start", "log", "speed", "training", "evaluation", "epoch"):
        assert record["epoch"] == max(math.ceil(record["update"] / PER_EPOCH), 1), record


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("limit", "stop_at", "finished", "current"),
    [(None, None, 3, 3), (4, None, 1, 1), (5, None, 1, 2), (3, None, 0, 1), (None, 6, 1, 2), (None, 1, 0, 1),
     (None, 8, 1, 2)],  # the last one stops before the end of its epoch: the evaluation is left
)  # fmt: skip
def test_a_run_counts_its_epochs_alike_also_after_a_resume(tmp_path, limit, stop_at, finished, current, is_stream):
    dataset = toys.Stream(toys.data(16)) if is_stream else toys.data(16)
    policy = Checkpointing(tmp_path, every_epochs=1, asynchronous=False)
    options = {"eval_dataset": toys.data(8), "checkpoints": policy, "log_every": 1}
    trainer = toys.trained([toys.stop_at(stop_at)], dataset, 3, max_num_train_steps=limit, **options)
    assert trainer.result.epochs == trainer.progress.epoch == finished
    shown(tmp_path, finished, current)
    assert toys.trained([], dataset, 4, resume_from="auto", **options).result.epochs == 4
    shown(tmp_path, 4, 4)


def test_a_run_that_stops_before_its_first_update_has_no_epoch_finished(tmp_path):
    stop = toys.raising("on_train_step_start", StopTrainingError("enough"))
    trainer = toys.trained([stop], num_epochs=3, checkpoints=Checkpointing(tmp_path, asynchronous=False))
    assert (trainer.result.updates, trainer.result.epochs) == (0, 0)
    shown(tmp_path, 0, 1)


@pytest.mark.parametrize(("steps", "finished", "current"), [(-1, 2, 2), (4, 1, 1), (6, 1, 2), (3, 0, 1)])
def test_an_hf_run_counts_its_epochs_alike(tmp_path, steps, finished, current):
    options = {"eval_dataset": tiny.rows(4), "eval_strategy": "epoch", "save_strategy": "epoch"}
    trainer = tiny.fit(tmp_path, data=tiny.rows(16), num_train_epochs=2, max_steps=steps, **options)
    assert trainer.state.epoch == trainer.state.global_step / PER_EPOCH
    assert all(log["epoch"] == log["step"] / PER_EPOCH for log in trainer.state.log_history)
    shown(tmp_path, finished, current)
