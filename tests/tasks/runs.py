"""Runs that several tests look at, and runs that are interrupted, moved and resumed."""

import signal
from pathlib import Path
from typing import Any

import pytest

from loopwright import api
from loopwright.errors import InputError
from tasks.forked import run_lines
from tasks.reviews import events

WEIGHTS = "model/model.safetensors"


def train_in(folder: Path, task: str, **flags: Any) -> api.Run:
    """Return a run that has ended, for a fixture of many tests: its folder must be left as it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HF_HUB_OFFLINE", "1")
        return api.train(task, output_dir=folder / "run", **flags)


def refusal(task: str, defaults: dict[str, Any], code: str, **flags: Any) -> str:
    """Assert that training is refused with a code, and that nothing is left behind; return the text."""
    before = sorted(Path().rglob("*"))
    with pytest.raises(InputError) as caught:
        api.train(task, **{**defaults, **flags})
    assert caught.value.code == code
    assert sorted(Path().rglob("*")) == before
    return str(caught.value)


def assert_same_files(one: Path, other: Path, *names: str) -> None:
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def check_resume(
    task: str, folder: Path, shorter: dict[str, Any], longer: dict[str, Any], *files: str, **flags: Any
) -> tuple[api.Run, api.Run, api.Run]:
    """Train a shorter run, move and resume it; assert that it ends as a longer run does that was never interrupted.

    Returns:
        The shorter run, as it was before it moved; the resumed one; the longer one.
    """
    # A schedule that goes down would depend on the length of the run.
    flags = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant", **flags}
    part = api.train(task, output_dir=folder / "part", **{**flags, **shorter})
    result = part.result
    whole = api.train(task, output_dir=folder / "longer", **{**flags, **longer})
    resumed = api.resume(part.path.rename(folder / "moved"), **longer, quiet=True)
    assert_same_files(resumed.path, whole.path, WEIGHTS, *files)
    assert resumed.metrics == whole.metrics and events(resumed.path) == events(whole.path)
    return result, resumed, whole


def check_kill(
    folder: Path,
    words: list[object],
    update: int,
    *files: str,
    resume: tuple[object, ...] = (),
    then: tuple[Any, ...] = (),
) -> Path:
    """Kill a command after an update, move and resume its run, and compare it with a run that was not killed.

    The runs are "moved" and "whole" in the folder. `files` are the same in both; `resume` are more words for
    `lw resume`; `then` are commands that are run on the moved folder in between. Returns the run that was not killed.
    """
    code, said = run_lines([*words, "--out", "killed"], folder=folder, failpoint=f"after_optimizer_step:{update}:kill")
    assert code == -signal.SIGKILL, said
    moved, whole = (folder / "killed").rename(folder / "moved"), folder / "whole"
    code, said = run_lines(["resume", moved, *resume], *then, [*words, "--out", "whole"], folder=folder)
    assert code == 0, said
    assert_same_files(moved, whole, WEIGHTS, "eval/predictions.jsonl", *files)
    assert events(moved) == events(whole)
    return whole
