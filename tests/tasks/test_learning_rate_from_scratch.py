"""A model that begins with random weights has a learning rate that it can learn with, unless one is given."""

from __future__ import annotations

import pytest

from loopwright.runs.settings import SCRATCH_LEARNING_RATE, settle
from loopwright.tasks import TASKS, get_task


@pytest.mark.parametrize("name", sorted(TASKS))
def test_without_a_model_the_rate_is_that_of_a_model_from_scratch(name):
    task = get_task(name)
    settings = settle(task, ["--data", "rows"])
    assert (settings.training.learning_rate, settings.sources["learning_rate"]) == (SCRATCH_LEARNING_RATE, "task")
    assert settle(task, ["--data", "rows", "--model", "folder"]).training.learning_rate < SCRATCH_LEARNING_RATE


def test_a_rate_that_is_given_holds_also_from_the_config_of_a_run(tmp_path):
    task = get_task("text-classification")
    assert settle(task, ["--lr", "5e-5"]).training.learning_rate == 5e-5
    config = tmp_path / "config.yaml"
    config.write_text('task: "text-classification"  # flag\nlearning_rate: 5e-05  # task\nmodel: null  # default\n')
    kept = settle(task, [], config)
    assert (kept.training.learning_rate, kept.sources["learning_rate"]) == (5e-5, "task")


def test_a_rate_that_is_left_to_the_run_and_a_module_that_was_handed_over_are_left_alone():
    task = get_task("image-classification")
    assert settle(task, ["--lr", "auto"]).args.auto == ["learning_rate"]
    assert settle(task, [], has_module=True).training.learning_rate == task.defaults["learning_rate"]
