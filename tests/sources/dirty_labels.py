"""Rows with labels as people really write them, one function for each kind of dirt: a text and a label, or tags."""

from collections.abc import Sequence
from typing import Any

Rows = list[list[Any]]


def labelled(labels: Sequence[Any]) -> Rows:
    return [[f"row number {number} says {label}", label] for number, label in enumerate(labels)]


def misspelt() -> Rows:
    return labelled(["positive"] * 224 + ["negative"] * 150 + ["positve"] * 3)


def other_forms() -> Rows:
    """Case, full-width letters, underscores; blanks around a label are no other form."""
    return labelled(["very good"] * 30 + ["bad", "bad "] * 15 + ["Very Good", "ｖｅｒｙ good", "very_good", " bad"])


def alike_on_purpose() -> Rows:
    return labelled(
        ["cat1"] * 40 + ["cat2"] * 2 + ["group a"] * 40 + ["group b"] * 2 + ["legal"] * 40 + ["illegal"] * 2
    )


def separated() -> Rows:
    return labelled(["a; b ;", "b", "", " ; a;"] * 10)


def numbered_from(start: int) -> Rows:
    return labelled([number % 2 + start for number in range(40)])


def switches(odd: Any = 0) -> Rows:
    """Columns of 0 and 1; `odd` is in the second column of the row in line 9."""
    rows = [[f"row {k}", k % 2, ["false", "TRUE"][k % 3 == 0], 1.0 if k % 10 == 0 else 0] for k in range(40)]
    rows[7][2] = odd
    return rows


def tagged(*schemes: Sequence[str]) -> list[dict[str, Any]]:
    return [{"tokens": [f"{word}{row}" for word in "abcd"], "tags": list(tags)} for row, tags in enumerate(schemes)]
