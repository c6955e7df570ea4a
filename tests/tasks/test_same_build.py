"""Every task builds the same model from a run's folder as at the first start, whatever the flags."""

import signal

import pytest

from loopwright import api
from loopwright.checkpoint.hidden_state import changed_modules, describe_modules
from loopwright.runs.console.screen import Screen
from loopwright.runs.job import build_job, given_origin, prepare_torch
from loopwright.runs.settings import settle
from loopwright.runs.start import check_files
from loopwright.tasks.base import Origin
from loopwright.tasks.data import RunData
from loopwright.tasks.registry import get_task
from sample_data import SAMPLES
from tasks.forked import run_lines
from tasks.runs import WEIGHTS, assert_same_files
from tasks.test_killed_and_moved import CASES

VARIANTS = ["--dropout 0.1 --freeze 1", "--dropout 0.3 --lora --lora_dropout 0.2"]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_the_model_of_a_run_is_built_as_at_the_first_start(name, tmp_path):
    files, words, *_ = CASES[name]
    train, *others = [SAMPLES / file for file in files.split()]
    named = ["--train_file", train, "--validation_file", *others] if others else ["--data", train]
    task, screen, plan = get_task(name), Screen(is_quiet=True), None
    for number, flags in enumerate(VARIANTS):
        settings = settle(task, [*map(str, named), *words.split(), "--threads", "1", *flags.split()])
        plan = plan or check_files(task, settings, screen)
        prepare_torch(settings)
        first = build_job(task, RunData(plan), settings, given_origin(task, settings))
        folder = tmp_path / f"model-{number}"
        folder.mkdir()
        task.save_skeleton(first, folder)
        again = build_job(task, RunData(plan), settings, Origin(str(folder), is_run=True))
        trees = [describe_modules(model=job.model) for job in (first, again)]
        assert changed_modules(*trees, ()) == ([], [])


def test_a_run_that_early_stopping_ended_stays_ended_until_its_patience_is_raised(reviews, tmp_path):
    words = ["train", "text-classification", "--data", reviews, "--epochs", 4, "--batch", 32, "--no_rehearsal"]
    words += ["--early_stopping_patience", 1, "--early_stopping_threshold", 9, "--threads", 1]
    assert run_lines([*words, "--out", "cut"], folder=tmp_path, failpoint="run_end:1:kill")[0] == -signal.SIGKILL
    code, said = run_lines([*words, "--out", "whole"], ["resume", "cut"], folder=tmp_path)
    assert code == 0, said
    assert_same_files(tmp_path / "cut", tmp_path / "whole", WEIGHTS)
    updates = [api.Run.find(tmp_path / name).result["updates"] for name in ("cut", "whole")]
    assert updates[0] == updates[1] and "T0" in said
    code, said = run_lines(["resume", "cut", "--early_stopping_patience", 2], folder=tmp_path)
    assert code == 0 and api.Run.find(tmp_path / "cut").result["updates"] == updates[0] // 2 * 3, said


def test_a_changed_dropout_still_wins_after_a_kill_and_a_model_folder_moved_aside_is_found(reviews, tmp_path):
    words = "train text-classification --max_steps 4 --batch 32 --no_rehearsal --save_strategy steps --save_steps 1"
    words += " --threads 1 --dropout 0.1 --out cut --data"
    run_lines([*words.split(), reviews], folder=tmp_path, failpoint="after_optimizer_step:3:kill")
    run_lines(["resume", "cut", "--dropout", 0.3], folder=tmp_path, failpoint="before_first_update:1:kill")
    (tmp_path / "cut/model").rename(tmp_path / "cut/.old-model")
    code, said = run_lines(["resume", "cut"], folder=tmp_path)
    assert code == 0 and "0.1 -> 0.3" in said, said
    (tmp_path / "cut/model").rename(tmp_path / "cut/.old-model")
    assert [*api.Run.find(tmp_path / "cut").predict(["great film"])]


def test_a_run_with_merged_adapters_trains_on_and_is_used_in_between(tmp_path):
    files, words, inputs, _ = CASES["masked-lm"]
    words = f"train masked-lm {words} --lora --no_rehearsal --threads 1 --max_steps 2 --out run --data".split()
    again = [["resume", "run", "--max_steps", number] for number in (3, 4)]
    code, said = run_lines([*words, SAMPLES / files], *again, folder=tmp_path)
    assert code == 0, said
    run = api.Run.find(tmp_path / "run")
    finished = [*run.predict(inputs)]
    (tmp_path / "run/result.json").unlink()  # killed before it was written
    assert [*run.predict(inputs)] == finished
