"""Several runs that differ in their seed: the spread of their metrics, the best one, and the commands that follow."""

import math

import pytest

from loopwright.run_folder import RunFolder, write_json
from loopwright.runs.seeds import SeedRun, best_of, command_of_rest, next_commands, spread_of


def made(folder, seed, state="done", metric="loss", direction="min", **metrics):
    run = RunFolder(folder / f"seed-{seed}")
    run.path.mkdir()
    write_json(run.path / "run.json", {"id": f"seed-{seed}"})
    if state == "done":
        run.write_result({"metric": metric, "direction": direction, "metrics": metrics, "intervals": {}})
    return SeedRun(seed, run, state)


def test_the_spread_is_that_of_the_runs_that_ended(tmp_path):
    runs = [made(tmp_path, 1, loss=1.0, f1=0.5), made(tmp_path, 2, "diverged"), made(tmp_path, 3, loss=3.0)]
    found = spread_of(runs)
    assert found["loss"] == {"mean": 2.0, "std": math.sqrt(2.0), "min": 1.0, "max": 3.0, "runs": 2}
    assert found["f1"] == {"mean": 0.5, "std": None, "min": 0.5, "max": 0.5, "runs": 1}
    assert best_of(runs) is runs[0] and best_of(runs[1:2]) is None and spread_of([]) == {}
    assert next_commands(runs) == ["lw compare seed-1 seed-3 --open", "lw report seed-1 --open"]
    assert next_commands(runs[1:]) == ["lw report seed-3 --open"]


def test_the_best_run_is_that_of_the_direction_and_the_first_of_equals(tmp_path):
    runs = [made(tmp_path, seed, metric="f1", direction="max", f1=f1) for seed, f1 in ((1, 0.2), (2, 0.9), (3, 0.9))]
    assert best_of(runs) is runs[1]


@pytest.mark.parametrize(
    ("words", "seeds", "folder", "line"),
    [
        ("train x --seed 7 --seeds 3", [8, 9], None, "lw train x --seed 8 --seeds 2"),
        ("train cfg.yaml --seeds=3 --seed=7 --lr 1", [9], None, "lw train cfg.yaml --lr 1 --seed 9 --seeds 1"),
        ("train x --out o --seeds 3", [43, 44], "o", "lw train x --out o --seed 43 --seeds 2"),
        ("train x --output-dir o --seeds 3", [44], "o", "lw train x --seed 44 --seeds 1 --out o/seed-44"),
        ("train x --data seed", [1], None, "lw train x --data seed --seed 1 --seeds 1"),
    ],
)
def test_the_command_of_the_rest_has_the_seeds_that_are_left(words, seeds, folder, line):
    assert command_of_rest(words.split(), seeds, folder) == line
