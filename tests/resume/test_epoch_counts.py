"""One meaning of `epoch` and one of `epochs`, in every place that shows them."""

import json
import math

import pytest

import loopwright
import toys
from hf import tiny
from loopwright import Checkpointing, hf
from loopwright.errors import StopTrainingError
from loopwright.report.run_view import view
from loopwright.report.summary import card_of
from loopwright.run_folder import RunFolder, read_status
from tasks.reviews import rows, write_csv

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
def test_a_run_counts_its_epochs_alike_everywhere_also_after_a_resume(
    tmp_path, limit, stop_at, finished, current, is_stream
):
    def train(num_epochs, *callbacks, **kwargs):
        dataset = toys.Stream(toys.data(16)) if is_stream else toys.data(16)
        policy = Checkpointing(tmp_path, every_epochs=1, asynchronous=False)
        kwargs = {"eval_dataset": toys.data(8), "checkpoints": policy, "log_every": 1, **kwargs}
        return toys.trained(callbacks, dataset, num_epochs, **kwargs)

    trainer = train(3, toys.stop_at(stop_at), max_num_train_steps=limit)
    assert trainer.result.epochs == trainer.progress.epoch == finished
    shown(tmp_path, finished, current)
    again = train(4, resume_from="auto")
    assert (again.result.epochs, again.result.updates) == (4, 16)
    shown(tmp_path, 4, 4)


def test_a_run_that_stops_before_its_first_update_has_no_epoch_finished(tmp_path):
    stop = toys.raising("on_train_step_start", StopTrainingError("enough"))
    trainer = toys.trained([stop], toys.data(16), 3, checkpoints=Checkpointing(tmp_path, asynchronous=False))
    assert (trainer.result.updates, trainer.result.epochs) == (0, 0)
    shown(tmp_path, 0, 1)


@pytest.mark.parametrize(("steps", "finished", "current"), [(-1, 2, 2), (4, 1, 1), (6, 1, 2), (3, 0, 1)])
def test_an_hf_run_counts_its_epochs_alike_everywhere(tmp_path, steps, finished, current):
    args = hf.TrainingArguments(
        str(tmp_path), num_train_epochs=2, max_steps=steps, per_device_train_batch_size=4, logging_steps=1,
        eval_strategy="epoch", use_cpu=True, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = hf.Trainer(tiny.Classifier(), args, train_dataset=tiny.rows(16), eval_dataset=tiny.rows(4))
    trainer.train()
    assert trainer.state.epoch == trainer.state.global_step / PER_EPOCH
    assert all(log["epoch"] == log["step"] / PER_EPOCH for log in trainer.state.log_history)
    shown(tmp_path, finished, current)


def test_a_task_counts_its_epochs_alike_everywhere(tmp_path):
    data = write_csv(tmp_path / "data.csv", rows(20))  # 16 of them to train on
    options = {"epochs": 2, "batch": 4, "quiet": True, "rehearsal": False, "use_cpu": True, "threads": 1}
    loopwright.train("text-classification", data=data, output_dir=tmp_path / "run", **options)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["epochs"] == 2
    assert "2 epochs" in (tmp_path / "run" / "model" / "README.md").read_text()
    shown(tmp_path / "run", 2, 2)
