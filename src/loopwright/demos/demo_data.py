"""Demo rows, and selection by hash, so that every run gets the same ones."""

from __future__ import annotations

import csv
import io
import json
import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import blake2b, sha256
from typing import Any, TypeVar

Row = dict[str, Any]
Item = TypeVar("Item")


@dataclass(frozen=True)
class DemoFiles:
    """The files of a demo, before they are written."""

    files: dict[str, bytes]  # contents by path, with "/" between the parts
    splits: dict[str, str]  # the file or folder of "train" and of "validation"
    notes: dict[str, Any]  # for demo.json


@dataclass(frozen=True)
class DemoData:
    """The rows of a demo; `kind` of their files is "csv" for values of one line, "jsonl" for any others."""

    task: str
    train: list[Row]
    validation: list[Row]
    source: str
    licence: str
    kind: str = "jsonl"

    @property
    def columns(self) -> list[str]:
        return list(self.train[0])

    @property
    def fingerprint(self) -> str:
        rows = {"train": self.train, "validation": self.validation}
        return sha256(json.dumps(rows, ensure_ascii=False, separators=(",", ":")).encode()).hexdigest()

    def files(self) -> DemoFiles:
        rows = {"train": self.train, "validation": self.validation}
        splits = {split: f"{split}.{self.kind}" for split in rows}
        notes = {
            "source": self.source,
            "licence": self.licence,
            "python": platform.python_version(),
            "columns": self.columns,
            "rows": {split: len(each) for split, each in rows.items()},
            "fingerprint": self.fingerprint,
        }
        return DemoFiles({splits[split]: self._encode(each) for split, each in rows.items()}, splits, notes)

    def _encode(self, rows: list[Row]) -> bytes:
        if self.kind != "csv":
            return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, fieldnames=self.columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue().encode()


def rank(purpose: str, text: str) -> int:
    """Return a number from 0 to 2**64 - 1 determined by the two texts only."""
    return int.from_bytes(blake2b(f"{purpose}\n{text}".encode(), digest_size=8).digest(), "big")


def shuffled(items: Iterable[Item], purpose: str, key: Callable[[Item], str]) -> list[Item]:
    """Return the items in an order determined by their keys only, which should be distinct."""
    return sorted(items, key=lambda item: (rank(purpose, key(item)), key(item)))


def is_held_out(name: str, share: float) -> bool:
    """Return whether a function, module or page is held out for validation.

    All demos use the same names, so a validation function of one is in no training set with the same share or more.
    """
    return rank("held out", name) < share * 2**64


def mixed(rows: list[Row], key: str) -> list[Row]:
    return shuffled(rows, "rows", lambda row: str(row[key]))


def first_paragraph(text: str) -> str:
    return " ".join(text.split("\n\n", 1)[0].split())
