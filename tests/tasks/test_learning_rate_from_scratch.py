"""A model that begins with random weights has a learning rate that it can learn with, unless one is given."""

import pytest

from loopwright.runs.settings import SCRATCH_LEARNING_RATE, settle
from loopwright.tasks import TASKS, get_task


@pytest.mark.parametrize("name", sorted(TASKS))
def test_a_model_from_scratch_has_a_larger_default_learning_rate(name):
    task = get_task(name)
    settings = settle(task, ["--data", "rows"])
    assert (settings.training.learning_rate, settings.sources["learning_rate"]) == (SCRATCH_LEARNING_RATE, "task")
    assert settle(task, ["--data", "rows", "--model", "folder"]).training.learning_rate < SCRATCH_LEARNING_RATE


def test_a_given_learning_rate_is_used_also_from_a_config(tmp_path):
    task = get_task("text-classification")
    assert settle(task, ["--lr", "5e-5"]).training.learning_rate == 5e-5
    config = tmp_path / "config.yaml"
    config.write_text('task: "text-classification"\nlearning_rate: 5e-05\nmodel: null\n')
    assert settle(task, [], config).sources["learning_rate"] == "file"
    (tmp_path / "run.json").write_text('{"id": "x", "sources": {"learning_rate": "task"}}')
    kept = settle(task, [], config)
    assert (kept.training.learning_rate, kept.sources["learning_rate"]) == (5e-5, "task")


def test_lr_auto_and_a_passed_module_keep_the_default_rate():
    task = get_task("image-classification")
    assert settle(task, ["--lr", "auto"]).args.auto == ["learning_rate"]
    assert settle(task, [], has_module=True).training.learning_rate == task.defaults["learning_rate"]
