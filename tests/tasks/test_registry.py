"""Tasks of other packages: found by their entry points, registered in Python, and harmless when they are broken."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import loopwright
from loopwright.cli import main
from loopwright.demos import write_demo
from loopwright.errors import ConfigError, InputError
from loopwright.runs.settings import settle
from loopwright.tasks import TASKS, Task, get_task, load_tasks, register, registry, summaries, task_names
from tasks.reviews import read_lines

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_task.py"
NAME = "tabular-regression"
FLAGS = ["--features_column", "area,age", "--epochs", "2", "--lr", "0.05", "--quiet"]


def install(folder: Path, package: str, *entries: str, **modules: str) -> Path:
    """Lay out a package as pip would: its modules, and a dist-info folder with entry points."""
    information = folder / f"{package}-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("\n".join(["[loopwright.tasks]", *entries, ""]))
    for name, content in modules.items():
        (folder / f"{name}.py").write_text(content)
    return folder


@pytest.fixture
def site(tmp_path, monkeypatch) -> Path:
    """Return a folder on the path of Python with the example as an installed package."""
    folder = install(tmp_path / "site", "own-task", f"{NAME} = own_task:TabularRegression")
    shutil.copy(EXAMPLE, folder / "own_task.py")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "own_task", raising=False)
    return folder


@pytest.fixture
def nothing_registered(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})


def lw(site: Path, *argv: str) -> str:
    """Run a command in its own process, which finds the package only on its path; return what it printed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "loopwright", *argv]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_task_of_a_package_is_trained_and_predicts_in_processes_of_their_own(site, tmp_path):
    write_demo(NAME, tmp_path / "flats")
    folder = lw(site, "train", NAME, "--data", str(tmp_path / "flats"), *FLAGS, "--epochs", "10").strip()
    result = json.loads((Path(folder) / "result.json").read_text())
    assert result["metrics"]["mae"] < 1 < 2.5 < result["baselines"]["mean"]["mae"]
    prediction = json.loads(lw(site, "predict", folder, "80 10").splitlines()[0])
    assert abs(prediction["value"] - (0.12 * 80 - 0.03 * 10 + 5)) < 2
    code = "import sys; from loopwright.cli import main; main(['tasks']); print('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert "a number for a row of numbers" in done.stdout and done.stdout.endswith("False\n")


def test_every_verb_knows_the_task_of_a_package(site, tmp_path, capsys):
    assert task_names()[: len(TASKS)] == list(TASKS) and task_names()[-1] == NAME
    assert summaries()[NAME] == "a number for a row of numbers"
    for argv, expected in (
        (["tasks"], f"  {NAME}"),
        (["tasks", "--json"], f'{{"task":"{NAME}"'),
        (["explain", NAME], "Columns of the numbers to predict from"),
        (["train", NAME, "--help"], "--features_column"),
        (["train", "--help"], NAME),
        (["demo"], f"lw demo {NAME}"),
    ):
        assert main(argv) == 0
        captured = capsys.readouterr()
        assert expected in captured.out and captured.err == ""
    assert main(["demo", NAME, *FLAGS, "--out", "run"]) == 0
    assert main(["evaluate", "run"]) == 0
    run = loopwright.resume("run", epochs=3, quiet=True)
    assert run.metrics["mae"] < 3 and len(run.predict([{"features": [80, 10]}, {"features": ["30", "5"]}])) == 2
    assert read_lines(run.path / "eval" / "predictions.jsonl")[0]["features"]
    assert loopwright.evaluate(run)["mae"] == pytest.approx(run.metrics["mae"])


@pytest.mark.usefixtures("nothing_registered")
def test_a_task_is_registered_in_python_and_again(site):
    from own_task import TabularRegression

    assert register(TabularRegression) is TabularRegression and isinstance(get_task(NAME), TabularRegression)
    again = register(type("Again", (TabularRegression,), {"name": "again"}))
    assert isinstance(get_task("again"), again) and "again" in task_names()
    newer = register(type("Again", (TabularRegression,), {"name": "again"}))
    assert isinstance(get_task("again"), newer)


@pytest.mark.usefixtures("nothing_registered")
def test_only_complete_tasks_with_a_free_name_are_registered(site):
    from own_task import TabularRegression

    for wrong, why in (
        (dict, "not a subclass"),
        (type("Half", (Task,), {"name": "half", "summary": ""}), "does not define build, create_dataset"),
        (type("Nameless", (Task,), dict.fromkeys(Task.__abstractmethods__)), "does not define name, summary"),
        (type("Taken", (TabularRegression,), {"name": "translation"}), "taken by a built-in task"),
    ):
        with pytest.raises(ConfigError, match=why):
            register(wrong)
    assert task_names() == [*TASKS, NAME]


BROKEN = {
    "raises": ("raises = broken_raises:Anything", "RuntimeError: no luck"),
    "missing": ("missing = no_such_module:Task", "No module named 'no_such_module'"),
    "number": ("number = broken_number:VALUE", "it is not a subclass of loopwright.tasks.Task"),
    "renamed": ("renamed = own_task:TabularRegression", f"the class is named '{NAME}'"),
    "translation": ("translation = own_task:TabularRegression", "the name is taken by a built-in task"),
}


def test_a_broken_entry_point_names_its_package_and_harms_no_other_task(site, capsys):
    entries = [entry for entry, _ in BROKEN.values()]
    install(site, "broken-pack", *entries, broken_raises="raise RuntimeError('no luck')\n", broken_number="VALUE = 1\n")
    tasks, errors = load_tasks()
    assert [task.name for task in tasks] == [*TASKS, NAME]
    assert len(errors) == len(BROKEN) and {error.code for error in errors} == {"install.task"}
    for name, (entry, why) in BROKEN.items():
        (error,) = (error for error in errors if f"the task {name!r}" in error.what)
        assert "broken-pack 1.0" in error.what and why in error.what and error.saw == (f"entry point {entry}",)
    assert main(["tasks"]) == 0
    captured = capsys.readouterr()
    assert "image-classification" in captured.out and NAME in captured.out
    assert captured.err.count("warning: the task") == captured.err.count("broken-pack") == len(BROKEN)
    assert isinstance(get_task("translation"), Task) and get_task("translation").roles[0].name == "source"
    assert main(["train", "raises", "--data", "x.csv"]) == 2
    assert "error[install.task]" in capsys.readouterr().err


def test_two_packages_with_a_task_of_one_name_are_both_named(site):
    install(site, "rival", f"{NAME} = own_task:TabularRegression2")
    with pytest.raises(InputError) as error:
        get_task(NAME)
    assert error.value.code == "install.task"
    assert "own-task 1.0" in error.value.what and "rival 1.0" in error.value.what
    assert [task.name for task in load_tasks()[0]] == list(TASKS)


def test_a_switch_that_the_data_decides_if_unset_can_be_switched_off():
    found = []
    for name in task_names():
        task = get_task(name)
        for field in dataclasses.fields(task.arguments):
            if field.type == "bool | None":
                found.append(field.name)
                assert getattr(settle(task, [f"--no_{field.name}"]).args, field.name) is False
    assert {"packing", "channels_last", "ordered_tags"} <= set(found)
