"""The tests in tests/tasks that train the demos check their reports; these tests check that none is left out."""

import re
from pathlib import Path

import pytest

from loopwright.report.blocks import Examples, Facts, Histogram, Lines, Matrix, Table
from loopwright.tasks import task_names
from report.demo_panels import IMAGES, PANELS, assert_have_data, has_data
from tasks.recomputed import FORMULAS
from tasks.test_demos import SHORT

TASKS = Path(__file__).parents[1] / "tasks"


def test_what_a_report_shows_is_said_for_each_task():
    assert set(PANELS) == set(task_names()) and len(PANELS) == 16
    assert all(blocks for blocks, _ in PANELS.values())


def test_the_report_and_every_number_of_each_trained_demo_are_checked():
    calls = {}
    assert set(FORMULAS) == set(task_names())
    for path in sorted(set(TASKS.glob("test_*.py")) - {TASKS / "test_registry.py"}):  # its task is a stranger's
        text = path.read_text(encoding="utf-8")
        for test in re.split(r"\n(?=@pytest|def )", text):
            if 'main(["demo", ' in test and "== 0" in test:
                calls[path.stem] = "assert_every_panel_has_data(" in test and "assert_recomputed(" in test
    assert set(calls) == {"test_demos", *(f"test_{name.replace('-', '_')}" for name in set(IMAGES) - set(SHORT))}
    assert set(SHORT) | set(IMAGES) == set(task_names())
    assert all(calls.values())


@pytest.mark.parametrize(
    "block",
    [
        Table("a", ["x", "y"], [["row", "–"], ["row", 0]]),
        Matrix("a", ["x"], [[0]]),
        Histogram("a", [0, 1], [("x", [0])]),
        Lines("a", "x", "y", [("x", [(0.0, 1.0)])]),
        Examples("a", []),
        Facts("a", []),
    ],
    ids=lambda block: block.kind,
)
def test_a_block_with_nothing_in_it_does_not_pass_for_one_with_data(block):
    assert not has_data(block)
    with pytest.raises(AssertionError):
        assert_have_data([block], ["a"])
    with pytest.raises(AssertionError, match="b"):
        assert_have_data([block], ["b"])
