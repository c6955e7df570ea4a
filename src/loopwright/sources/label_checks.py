"""Checks of labels: errors about those that cannot be used, as values, and notes about those that look odd."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence

from loopwright.errors import InputError
from loopwright.sources.column_roles import is_number
from loopwright.sources.labels import LabelScan, label_text, ordered
from loopwright.sources.tables import Table

MOST_SHOWN = 12
MOST_NAMED = 5
_MOST_NEAR = 8
_MOST_COMPARED = 1_000
_LONGEST_SHOWN = 40
_TRUTH = {"false": "0", "true": "1"}
_NO_VALUES = ("nan", "na", "n/a", "null", "#n/a")
_NO_NUMBERS = frozenset((*_NO_VALUES, "none", "inf", "-inf", "infinity", "-infinity", "-", "?", "#div/0!", "unknown"))
_DECIMAL_COMMA = re.compile(r"-?\d+,\d+")


def mixed_types(scan: LabelScan) -> InputError | None:
    """Return the error about labels of mixed kinds: two JSON types, or numbers among words."""
    table, types = scan.table, scan.types
    if "object" in types or ("list" in types and scan.kind == "class"):
        kind, article = ("object", "an") if "object" in types else ("list", "a")
        what = f"the label in {table.place(types[kind])} of {table.name} is {article} {kind}"
        fix = "--label_kind multi if rows have several labels, or --label_column with another column"
        return InputError("data.value", what, saw=[f"column {scan.column!r}"], fix=fix)
    as_classes = "--label_kind class to take all of them as classes"
    if len(types) > 1 and not set(types) <= {"whole number", "number"}:
        saw = [f"{name}: first in {table.place(row)}" for name, row in types.items()]
        fix = f"write all labels in the same way, or {as_classes}"
        return InputError("data.label_type", f"{scan.name} holds values of {len(types)} kinds", saw=saw, fix=fix)
    texts = scan.texts
    numbers = [place for place, text in enumerate(texts) if text and is_number(text)]
    words = [place for place, text in enumerate(texts) if text and not is_number(text)]
    if not numbers or not words:
        return None
    if all(texts[place].strip().lower() in _NO_NUMBERS for place in words):
        saw = [f"{texts[place]!r}, first in {scan.place(place)}" for place in words[:MOST_SHOWN]]
        fix = "write numbers there, or leave these cells empty, and --missing_values drop"
        what = f"{scan.name} holds numbers, and words that stand for none"
        return InputError("data.label_type", what, saw=saw, fix=fix)
    first = {"numbers": numbers[0], "words": words[0]}
    saw = [f"{name}: e.g. {texts[place]!r}, first in {scan.place(place)}" for name, place in first.items()]
    fix = f"{map_flag([(texts[words[0]], texts[numbers[0]])])} if they mean the same, or {as_classes}"
    return InputError("data.label_type", f"{scan.name} holds numbers and words", saw=saw, fix=fix)


def unknown_labels(
    noun: str,
    number: int,
    table: Table,
    lead: Table,
    names: Sequence[str],
    first: Mapping[str, str],
    saw: list[str],
    fix: str = "",
) -> InputError:
    """Return the error about labels of a table that are not among the names, which the table `lead` defines.

    `first` has the first unknown labels, each with its frequency and place; `saw` the first lines of evidence.
    """
    pairs = []
    for text, place in first.items():
        near = did_you_mean(text, names) if not fix else None
        saw = [*saw, f"unknown {text!r}: {place}" + (f" -- did you mean {near!r}?" if near else "")]
        pairs += [(text, near)] if near else []
    fix = fix or (f"{map_flag(pairs)}   or   " if pairs else "") + "--unknown_labels drop"
    is_one = number == 1
    counted = f"{number} {noun if is_one else 'classes' if noun == 'class' else noun + 's'} of {table.name}"
    what = f"{counted} never occur{'s' if is_one else ''} in {lead.name}"
    if table is lead:
        what = f"{counted} {'is' if is_one else 'are'} unknown"
    return InputError("data.labels", what, saw=saw, fix=fix)


def known_names(names: Sequence[str]) -> str:
    return f"known: {', '.join(names[:20])}" + (" ..." if len(names) > 20 else "")


def unique_labels(scan: LabelScan, num_rows: int) -> InputError:
    fix = f"{scan.role.flag} with another column, or rows with labels that repeat"
    if all(_DECIMAL_COMMA.fullmatch(label_text(text)) for text in scan.texts if text.strip()):
        fix = "write the numbers with a decimal point: 3.5 instead of 3,5"
    examples = ", ".join(repr(shortened(text)) for text in scan.texts[:MOST_NAMED])
    what = f"{num_rows:,} rows of {scan.table.name} have {len(scan.texts):,} classes: hardly any occurs twice"
    return InputError("data.labels", what, saw=[f"{scan.column!r} holds {examples}, ..."], fix=fix)


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


def odd_classes(counts: Mapping[str, int], column: str, is_guessed: bool) -> Iterator[str]:
    """Yield notes about suspicious classes; the name of a guessed column may be a row of a file without a header."""
    empty = [name for name in counts if name.lower() in _NO_VALUES]
    if empty:
        are = "is a class" if len(empty) == 1 else "are classes"
        yield f"{_quoted(empty)} {are} of {column!r}: for no value leave the cell empty, and --missing_values drop"
    spellings: dict[str, list[str]] = {}
    for name in counts:
        spellings.setdefault(name.casefold(), []).append(name)
    twins = [found for found in spellings.values() if len(found) > 1]
    if twins:
        usual = [max(found, key=counts.__getitem__) for found in twins[:MOST_NAMED]]
        pairs = [(name, best) for best, found in zip(usual, twins, strict=False) for name in found if name != best]
        yield f"{_quoted(twins[0])} differ only in case and are separate classes: {map_flag(pairs)} makes them one"
    if is_guessed and column in counts:
        yield f"the first line names the columns, and {column!r} is also a class: if it is a row, put names above it"


def listing(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED:,} more" if len(names) > MOST_NAMED else ""
    return ", ".join(map(shortened, names[:MOST_NAMED])) + more


def did_you_mean(text: str, names: Sequence[str]) -> str | None:
    """Return the label that was probably meant: another spelling, the same number, a prefix, a similar text."""
    lower, number = text.lower(), _TRUTH.get(text.lower(), text)
    for name in names:
        if name.lower() == lower:
            return name
    for name in names if is_number(number) else ():
        if is_number(other := _TRUTH.get(name.lower(), name)) and float(other) == float(number):
            return name
    for name in names:
        if min(len(name), len(text)) >= 2 and (lower.startswith(name.lower()) or name.lower().startswith(lower)):
            return name
    return next(iter(difflib.get_close_matches(text, names, n=1)), None)


def map_flag(pairs: Iterable[tuple[str, str]]) -> str:
    return " ".join(["--label_map", *(shlex.quote(f"{old}={new}") for old, new in pairs)])


def never_renamed(label_map: Mapping[str, str], found: Iterable[str], what: str = "row has the label") -> Iterator[str]:
    """Yield a warning for each renamed label that no split has; not an error, as the map may cover more data."""
    names = list(dict.fromkeys(found))
    for old, new in label_map.items() if names else ():
        if old in names:
            continue
        near = did_you_mean(old, names)
        # With very many labels only some are compared letter by letter.
        like = difflib.get_close_matches(old, names[:_MOST_COMPARED], n=_MOST_NEAR, cutoff=0)
        shown = ", ".join(map(repr, list(dict.fromkeys([near, *like] if near else like))[:_MOST_NEAR]))
        more = f" and {len(names) - _MOST_NEAR} more" if len(names) > _MOST_NEAR else ""
        yield f"{map_flag([(old, new)])} changes nothing: no {what} {old!r}, but {shown}{more}"


def shown_counts(counts: Mapping[str, int]) -> str:
    """Return "neg 26, pos 34" in the order of ids, truncated if there are many."""
    shown = [f"{name} {counts[name]:,}" for name in ordered(list(counts))[:MOST_SHOWN]]
    return ", ".join(shown) + (f" and {len(counts) - MOST_SHOWN} more" if len(counts) > MOST_SHOWN else "")


def shortened(name: str) -> str:
    name = " ".join(name.split())
    return name if len(name) <= _LONGEST_SHOWN else name[: _LONGEST_SHOWN - 1] + "…"


def _quoted(names: Sequence[str]) -> str:
    return " and ".join(map(repr, names[:MOST_NAMED]))
