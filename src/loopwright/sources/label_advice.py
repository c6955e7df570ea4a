"""Notes about labels that are accepted but look odd, and fixes for those that are refused."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from loopwright.errors import InputError
from loopwright.sources.labels import label_text, map_flag
from loopwright.sources.schema import Role

_CLASSES_FOR_NOTHING = ("nan", "na", "n/a", "null", "#n/a")
_DECIMAL_COMMA = re.compile(r"-?\d+,\d+")
_MOST_NAMED = 5
_LONGEST_SHOWN = 40


def notes_on_classes(counts: Mapping[str, int], column: str, is_guessed: bool) -> list[str]:
    """Return notes about suspicious classes; called once all labels are known.

    Args:
        counts: the frequency of each class.
        column: of the labels.
        is_guessed: whether the column was guessed, so that its name may be a row of a file without a header.
    """
    notes = []
    empty = [name for name in counts if name.lower() in _CLASSES_FOR_NOTHING]
    if empty:
        notes.append(
            f"{_quoted(empty)} {'is a class' if len(empty) == 1 else 'are classes'} of {column!r}: where it stands for "
            "no value, leave the cell empty, and --missing_values drop"
        )
    spellings: dict[str, list[str]] = {}
    for name in counts:
        spellings.setdefault(name.casefold(), []).append(name)
    twins = [found for found in spellings.values() if len(found) > 1]
    if twins:
        usual = [max(found, key=counts.__getitem__) for found in twins[:_MOST_NAMED]]
        pairs = [(name, best) for best, found in zip(usual, twins, strict=False) for name in found if name != best]
        notes.append(
            f"{_quoted(twins[0])} differ in their capitals alone and are classes of their own: "
            f"{map_flag(pairs)} makes them one"
        )
    if is_guessed and column in counts:
        notes.append(
            f"the first line is read as the names of the columns, and {column!r} is also a class: if that line is a "
            "row, put one with names above it"
        )
    return notes


def notes_on_absent(counts: Mapping[str, int]) -> list[str]:
    """Return a note about classes without training rows, for multi-label rows."""
    absent = [name for name, number in counts.items() if not number]
    if not absent:
        return []
    what = "1 class never occurs" if len(absent) == 1 else f"{len(absent):,} classes never occur"
    more = f" and {len(absent) - _MOST_NAMED:,} more" if len(absent) > _MOST_NAMED else ""
    return [f"{what} in training: {', '.join(map(shortened, absent[:_MOST_NAMED]))}{more}"]


def a_label_for_each_row(texts: Sequence[str], num_rows: int, column: str, name: str, role: Role) -> InputError:
    """Return the error about labels that hardly repeat, so that no class can be learnt and validated."""
    fix = f"{role.flag} with another column, or rows with labels that come again"
    if all(_DECIMAL_COMMA.fullmatch(label_text(text)) for text in texts if text.strip()):
        fix = "write the numbers with a decimal point: 3.5 instead of 3,5"
    return InputError(
        "data.labels",
        f"{num_rows:,} rows of {name} have {len(texts):,} classes: hardly any comes twice, so none can be held back",
        saw=[f"{column!r} holds {', '.join(repr(shortened(text)) for text in texts[:_MOST_NAMED])}, ..."],
        fix=fix,
    )


def fix_of_positions(found: Sequence[str], num_choices: int) -> str:
    """Return how to read labels that should be positions from 0: letters, numbers from 1, or numbers with a point."""
    letters = [chr(ord("a") + place) for place in range(num_choices)]
    forms = ([letter.upper() for letter in letters], letters, [f"{place}.0" for place in range(num_choices)])
    for form in (*forms, [str(place + 1) for place in range(num_choices)]):
        if set(found) <= set(form):
            return map_flag((text, str(place)) for place, text in enumerate(form))
    if all(text.removeprefix("-").isdecimal() for text in found):
        return "--unknown_labels drop   or write the position of the right choice, from 0"
    return "write the position of the right choice, from 0, as the label"


def shortened(name: str) -> str:
    """Return a label for display: on one line, truncated if very long."""
    name = " ".join(name.split())
    return name if len(name) <= _LONGEST_SHOWN else name[: _LONGEST_SHOWN - 1] + "…"


def _quoted(names: Sequence[str]) -> str:
    return " and ".join(map(repr, names[:_MOST_NAMED]))
