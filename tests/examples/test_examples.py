"""Every example runs as its docstring says, finishes, and prints what it promises."""

import ast
import multiprocessing
import os
import re
import runpy
import sys
import warnings
from pathlib import Path

import pytest

import toys

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MOST_LINES = 79


def output_of(name, folder):
    """Run an example in a process of its own, in another folder; return what it printed."""
    said = folder.with_name("said.txt")
    process = multiprocessing.get_context("fork").Process(target=run, args=(ROOT / "examples" / name, folder, said))
    process.start()
    process.join()
    assert process.exitcode == 0, said.read_text(encoding="utf-8")
    assert list(folder.iterdir()) == [], "an example leaves no files behind"
    return said.read_text(encoding="utf-8")


def run(example, folder, said):
    os.chdir(folder)
    sys.argv = [str(example)]
    with said.open("w", encoding="utf-8") as sys.stdout:
        os.dup2(sys.stdout.fileno(), 2)
        warnings.filterwarnings("error", category=UserWarning, module="__main__")
        runpy.run_path(str(example), run_name="__main__")


def numbers(pattern, text):
    """Return every number in the text that stands where the pattern has its group."""
    found = [float(number) for number in re.findall(pattern, text)]
    assert found, f"nothing matches {pattern!r} in:\n{text}"
    return found


def test_there_are_no_more_and_no_fewer_examples_than_are_tested_here():
    tested = ["digits.py", *re.findall(r'output_of\("(\w+\.py)"', Path(__file__).read_text(encoding="utf-8"))]
    elsewhere = ["hf_manual_loop.py", "hf_text_pair.py", "hf_two_tower.py", "own_loop.py"]
    assert sorted({*tested, *elsewhere}) == [path.name for path in EXAMPLES]
    assert len(EXAMPLES) == 10


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short_and_says_what_it_shows_and_how_to_run_it(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES
    docstring = ast.get_docstring(ast.parse(text))
    assert len(docstring.splitlines()[0]) > 40
    assert f"`python examples/{path.name}`" in docstring


def test_digits_reaches_95_percent_and_is_no_wall_of_text(tmp_path):
    output = toys.python("-W", "error::UserWarning:__main__", ROOT / "examples" / "digits.py", cwd=tmp_path).stdout
    losses = numbers(r"train loss ([\d.]+)", output)
    assert len(losses) == 8 and losses[-1] < losses[0] / 10
    assert numbers(r"accuracy on 359 unseen digits: ([\d.]+)", output)[0] >= 0.95
    assert len(output.splitlines()) <= 12
    assert max(map(len, output.splitlines())) <= 80


def test_metrics_by_name_and_of_torchmetrics_are_in_the_table(tmp_path):
    output = output_of("metrics_in_subclass.py", tmp_path)
    table = [line.split() for line in output.splitlines() if line.startswith("    ")]
    assert "eval accuracy" in output and len(table) >= 4
    text = (ROOT / "examples" / "metrics_in_subclass.py").read_text(encoding="utf-8").rpartition('"""')[2]
    assert sum(map(bool, text.splitlines())) <= 20
    assert numbers(r"epochs: ([\d.]+), F1", output)[0] >= 0.93
    assert numbers(r"F1 ([\d.]+)", output)[-1] >= 0.9


def test_custom_callback_event_collects_mistakes(tmp_path):
    output = output_of("custom_callback_event.py", tmp_path)
    mistakes = numbers(r"epoch \d+: (\d+) mistakes", output)
    assert len(mistakes) == 10 and mistakes[-1] < mistakes[0] / 2
    assert numbers(r"was taken for a \d (\d+) times", output)[0] > 1


def test_custom_loss_makes_the_model_more_robust(tmp_path):
    output = output_of("custom_loss.py", tmp_path)
    without, with_consistency = numbers(r"accuracy under noise ([\d.]+)", output)
    assert with_consistency > without + 0.02


def test_onecycle_placeholders_plans_the_updates_that_happen(tmp_path):
    output = output_of("onecycle_placeholders.py", tmp_path)
    done, planned = numbers(r"(\d+) updates", output)[0], numbers(r"(\d+) planned", output)[0]
    assert done == planned == 10 * 23
    # Two epochs of 23 updates.
    assert numbers(r"at update (\d+)", output) == [46]
    assert numbers(r"accuracy: ([\d.]+)", output)[0] >= 0.93


def test_own_task_trains_and_predicts(tmp_path):
    output = output_of("own_task.py", tmp_path)
    assert numbers(r"mean absolute error ([\d.]+); 80", output)[0] < 0.6
    assert abs(numbers(r"10 years: ([\d.]+)", output)[0] - 14.3) < 1
    example = (ROOT / "examples" / "own_task.py").read_text(encoding="utf-8")
    shown = example[example.index("@dataclass") : example.index("\n\n\nif __name__")]
    assert shown in (ROOT / "docs" / "tasks" / "index.md").read_text(encoding="utf-8")
