"""Long texts in narrow terminals, and what is said of guessed columns and of where a mistake stands."""

import csv
import json

import pytest

from loopwright.cli import main
from loopwright.cli.help_text import folded, hanging
from loopwright.runs.data import describe
from loopwright.sources import DataPlan


def test_a_text_is_broken_between_words_and_goes_on_below_where_it_began(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert hanging("  name  ", "a-long-word and others that do not fit here") == (
        "  name  a-long-word and others that do\n        not fit here"
    )
    assert hanging(f"  {'n' * 30} ", "a text") == f"  {'n' * 30}\n        a text"
    assert folded(f"error: short\n  fix: {'word ' * 9}end") == (
        "error: short\n  fix: word word word word word word\n  word word word end"
    )


def test_without_a_terminal_nothing_is_broken(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert hanging("  name  ", "word " * 60) == "  name  " + ("word " * 60).rstrip()


@pytest.mark.parametrize("words", [["--help"], ["demo"], ["tasks"], ["explain", "errors"]], ids=" ".join)
def test_lists_fit_into_sixty_columns(capsys, monkeypatch, words):
    monkeypatch.setenv("COLUMNS", "60")
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 15 and [line for line in lines if len(line) > 60] == []


def test_a_guessed_column_is_named_once_with_a_word_that_it_was_guessed(finished):
    plan = DataPlan.from_json((finished.path / "data.json").read_text())
    lines = describe(plan)
    assert [line for line in lines if "guessed" in line] == ["text='review' (guessed)  label='stars' (guessed)"]


def test_the_worst_samples_name_the_file_and_the_line_that_they_stand_in(finished):
    plan = DataPlan.from_json((finished.path / "data.json").read_text())
    with open(plan.files[0].path, newline="") as file:
        lines = list(csv.reader(file))
    worst = [json.loads(line) for line in (finished.path / "eval" / "worst.jsonl").read_text().splitlines()]
    assert worst
    for sample in worst:
        number, name = sample["place"].removeprefix("line ").split(" of ")
        assert name == "reviews.csv" and sample["text"] in lines[int(number) - 1]
