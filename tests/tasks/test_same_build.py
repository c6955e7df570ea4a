"""Every task builds the same model from a run's folder as at the first start, whatever the flags."""

import pytest

from loopwright.checkpoint.hidden_state import changed_modules, describe_modules
from loopwright.errors import InputError
from loopwright.runs.console.screen import Screen
from loopwright.runs.job import build_job, given_origin, prepare_torch
from loopwright.runs.start import check_files, demo_settings
from loopwright.tasks.base import Origin
from loopwright.tasks.data import RunData
from loopwright.tasks.registry import get_task, task_names

VARIANTS = [{"dropout": 0.1, "freeze": "backbone"}, {"lora": True, "lora_dropout": 0.2, "dropout": 0.3}]


@pytest.mark.parametrize("name", task_names())
def test_the_model_of_a_run_is_built_as_at_the_first_start(name, tmp_path):
    task, screen, num_built = get_task(name), Screen(is_quiet=True), 0
    plan = None
    for number, flags in enumerate([{}, *VARIANTS]):
        settings = demo_settings(task, {**flags, "threads": 1}, screen)
        plan = plan or check_files(task, settings, screen)
        prepare_torch(settings)
        try:
            first = build_job(task, RunData(plan), settings, given_origin(task, settings))
        except InputError as error:
            assert "no effect" in error.what or "matches no layer" in error.what or "leaves nothing" in error.what
            continue
        folder = tmp_path / f"model-{number}"
        folder.mkdir()
        task.save_skeleton(first, folder)
        again = build_job(task, RunData(plan), settings, Origin(str(folder), is_run=True))
        trees = [describe_modules(model=job.model) for job in (first, again)]
        assert sorted(map(str, changed_modules(*trees, ()))) == []
        num_built += 1
    assert num_built >= 1
