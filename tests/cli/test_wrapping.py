"""Long texts in narrow terminals, and what is said of guessed columns and of where a mistake stands."""

import csv
import json

import pytest

from loopwright.cli import main
from loopwright.cli.help_text import folded, hanging
from loopwright.runs.data import describe
from loopwright.sources import DataPlan


def test_a_text_is_broken_between_words_on_a_terminal_alone(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert hanging("  name  ", "a-long-word and others that do not fit here") == (
        "  name  a-long-word and others that do\n        not fit here"
    )
    assert hanging(f"  {'n' * 30} ", "a text") == f"  {'n' * 30}\n        a text"
    assert folded(f"error: short\n  fix: {'word ' * 9}end") == (
        "error: short\n  fix: word word word word word word\n  word word word end"
    )
    monkeypatch.delenv("COLUMNS", raising=False)
    assert hanging("  name  ", "word " * 60) == "  name  " + ("word " * 60).rstrip()


@pytest.mark.parametrize("words", [["--help"], ["demo"], ["tasks"], ["explain", "errors"]], ids=" ".join)
def test_lists_fit_into_sixty_columns(capsys, monkeypatch, words):
    monkeypatch.setenv("COLUMNS", "60")
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 15 and [line for line in lines if len(line) > 60] == []


def test_guessed_columns_and_the_places_of_the_worst_samples_are_named(finished):
    plan = DataPlan.from_json((finished.path / "data.json").read_text())
    assert [line for line in describe(plan) if "guessed" in line] == [
        "text='review' (guessed)  label='stars' (guessed)"
    ]
    with open(plan.files[0].path, newline="") as file:
        lines = list(csv.reader(file))
    worst = [json.loads(line) for line in (finished.path / "eval" / "worst.jsonl").read_text().splitlines()]
    assert worst
    for sample in worst:
        number, name = sample["place"].removeprefix("line ").split(" of ")
        assert name == "reviews.csv" and sample["text"] in lines[int(number) - 1]
