"""What a demo is made of, and the choices that make it the same on every run: by hash, never by chance."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import blake2b, sha256
from typing import Any, TypeVar

Row = dict[str, Any]
Item = TypeVar("Item")


@dataclass(frozen=True)
class DemoData:
    """The rows of a demo: both splits, what they were made from, and under which licence.

    Attributes:
        task: the task they are for.
        train: the rows to train on.
        validation: rows that have nothing to do with those: other functions, modules or days.
        source: what they were made from.
        licence: the licence of their texts.
    """

    task: str
    train: list[Row]
    validation: list[Row]
    source: str
    licence: str

    @property
    def columns(self) -> list[str]:
        """Return the names of the columns, in their order."""
        return list(self.train[0])

    @property
    def fingerprint(self) -> str:
        """Return a digest of all rows: the same on two machines only if they have the same data."""
        rows = {"train": self.train, "validation": self.validation}
        return sha256(json.dumps(rows, ensure_ascii=False, separators=(",", ":")).encode()).hexdigest()


def rank(purpose: str, text: str) -> int:
    """Return a number from 0 to 2**64 - 1 that follows from the two texts and from nothing else."""
    return int.from_bytes(blake2b(f"{purpose}\n{text}".encode(), digest_size=8).digest(), "big")


def shuffled(items: Iterable[Item], purpose: str, key: Callable[[Item], str]) -> list[Item]:
    """Return the items in an order that follows from their keys only, which should differ from item to item."""
    return sorted(items, key=lambda item: (rank(purpose, key(item)), key(item)))


def is_held_out(name: str, share: float) -> bool:
    """Return whether a function, module or page is for validation.

    All demos ask with the same names, so that a function of the validation of one is in the training of none that holds
    out as large a share.
    """
    return rank("held out", name) < share * 2**64


def split_by_name(
    named: list[tuple[str, Row]], share: float, most: tuple[int, int], key: str
) -> tuple[list[Row], list[Row]]:
    """Return rows for training and for validation, mixed and at most so many, by the names they are held out by.

    Args:
        named: the rows, each with a name; rows of one name go to one side.
        share: the share of names to hold out.
        most: how many rows to keep for training and for validation.
        key: a column whose values differ from row to row.
    """
    train = [row for name, row in named if not is_held_out(name, share)]
    validation = [row for name, row in named if is_held_out(name, share)]
    return mixed(train, key)[: most[0]], mixed(validation, key)[: most[1]]


def mixed(rows: list[Row], key: str) -> list[Row]:
    """Return the rows in an order that follows from this column."""
    return shuffled(rows, "rows", lambda row: str(row[key]))


def first_paragraph(text: str) -> str:
    """Return the text up to the first blank line, on one line."""
    return " ".join(text.split("\n\n", 1)[0].split())
