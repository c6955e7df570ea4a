"""Checks of labels: errors about those that cannot be used, as values, and notes about those that look odd."""

from __future__ import annotations

import difflib
import json
import re
import shlex
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from loopwright.config.display_width import truncate
from loopwright.errors import InputError, nearest
from loopwright.quantities import counted
from loopwright.sources.column_roles import is_number
from loopwright.sources.delimited import THOUSANDS
from loopwright.sources.labels import LabelScan, is_whole, label_text, ordered
from loopwright.sources.tables import Table

MOST_SHOWN = 12
MOST_NAMED = 5
_MOST_NEAR = 8
_MOST_COMPARED = 1_000
_LONGEST_SHOWN = 40
FEW_ROWS = 5  # A class with fewer training rows is noted,
IMBALANCE = 10  # and one with so many times fewer than another.
_TIMES_RARER = 10  # a misspelt class, than the right one
_SHORTEST_TYPO = 4
_LIKE = 0.85  # the similarity of a misspelt word
_DIGITS = re.compile(r"\d")
_WORD_ENDS = re.compile(r"[\s_-]+")
_ANSWERS = ("no", "n", "false", "f", "0", "0.0"), ("yes", "y", "true", "t", "1", "1.0")
_FEW_ODD = 3  # rows of numbers among words, or of words among numbers, that are rather mistakes
_SEPARATORS = ";|,/&+"
_TRUTH = {"false": "0", "true": "1"}
_NO_VALUES = ("nan", "na", "n/a", "null", "#n/a")
_NO_NUMBERS = frozenset((*_NO_VALUES, "none", "inf", "-inf", "infinity", "-infinity", "-", "?", "#div/0!", "unknown"))
_DECIMAL_COMMA = re.compile(r"-?\d+,\d+")
_BEGIN, _END = frozenset("BSU"), frozenset("ESLU")  # letters of tags


def mixed_types(scan: LabelScan, dropped: Sequence[str]) -> InputError | None:
    """Return the error about labels of mixed kinds: two JSON types, or numbers among words."""
    table, types = scan.table, scan.types
    if "object" in types or ("list" in types and scan.kind == "class"):
        kind, article = ("object", "an") if "object" in types else ("list", "a")
        what = f"the label in {table.place(types[kind])} of {table.name} is {article} {kind}"
        return InputError("data.value", what, saw=[f"column {scan.column!r}"], fix="--label_kind multi")
    as_classes = "--label_kind class"
    if len(types) > 1 and not set(types) <= {"whole number", "number"}:
        saw = [f"{name}: first in {table.place(row)}" for name, row in types.items()]
        fix = f"{as_classes}   or   write all labels in the same way"
        return InputError("data.label_type", f"{scan.name} holds values of {len(types)} kinds", saw=saw, fix=fix)
    texts = scan.texts
    kept = [place for place, text in enumerate(texts) if text and label_text(text) not in dropped]
    numbers = [place for place in kept if is_number(texts[place])]
    words = [place for place in kept if not is_number(texts[place])]
    if not numbers or not words:
        return None
    if all(texts[place].strip().lower() in _NO_NUMBERS for place in words):
        saw = [f"{texts[place]!r}, first in {scan.place(place)}" for place in words[:MOST_SHOWN]]
        fix = "--label_kind float --bad_rows drop   or   write numbers there"
        what = f"{scan.name} holds numbers, and words that stand for none"
        return InputError("data.label_type", what, saw=saw, fix=fix)
    first = {"numbers": numbers[0], "words": words[0]}
    saw = [f"{name}: e.g. {texts[place]!r}, first in {scan.place(place)}" for name, place in first.items()]
    counts = np.bincount(scan.codes, minlength=len(texts)) if scan.kind == "class" else np.zeros(len(texts), int)
    rare = min(numbers, words, key=lambda places: counts[places].sum())
    meanings = [
        {text: counts[place] for place, text in enumerate(texts) if text.strip().lower() in each} for each in _ANSWERS
    ]
    fix = as_classes
    if sum(map(len, meanings)) == len(numbers + words):  # yes, Y, 1 and so on: by the usual spelling of each
        usual = [max(each, key=each.__getitem__) for each in meanings]
        pairs = ((text, name) for each, name in zip(meanings, usual, strict=True) for text in each if text != name)
        fix = f"{map_flag(pairs)}   or   {as_classes}"
    elif 0 < counts[rare].sum() <= max(_FEW_ODD, counts.sum() // 50):
        fix = f"{names_flag('drop_labels', [label_text(texts[place]) for place in rare])}   or   {as_classes}"
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
        near = did_you_mean(text, names) if not fix or "--label_names" in fix else None
        saw = [*saw, f"unknown {text!r}: {place}" + (f" -- did you mean {near!r}?" if near else "")]
        pairs += [(text, near)] if near else []
    is_listed = "--label_names" in fix
    fix = (f"{map_flag(pairs)}   or   " if pairs and (is_listed or not fix) else "") + (fix or "--unknown_labels drop")
    is_one = number == 1
    counted = f"{number} {noun if is_one else 'classes' if noun == 'class' else noun + 's'} of {table.name}"
    what = f"{counted} never occur{'s' if is_one else ''} in {lead.name}"
    if table is lead or is_listed:
        what = f"{counted} {'is' if is_one else 'are'} {'not in --label_names' if is_listed else 'unknown'}"
    return InputError("data.labels", what, saw=saw, fix=fix)


def known_names(names: Sequence[str]) -> str:
    return f"known: {', '.join(names[:20])}" + (" ..." if len(names) > 20 else "")


def unique_labels(scan: LabelScan, num_rows: int) -> InputError:
    fix = f"write labels that repeat into {scan.table.name}"
    numbers = [label_text(text) for text in scan.texts if text.strip()]
    if all(map(_DECIMAL_COMMA.fullmatch, numbers)):
        fix = "--decimal comma"
        if all(map(THOUSANDS.fullmatch, numbers)):
            fix = f"--decimal point   or   {fix}"
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
        return "--unknown_labels drop   or   write the position of the right choice, from 0"
    return "write the position of the right choice, from 0, as the label"


def names_of_numbers(names: Sequence[str], found: Sequence[str], label_map: Mapping[str, str]) -> dict[str, str]:
    """Return the label map, also from 0, 1, ... to the names if all labels are such numbers, or false and true."""
    texts = {text: label_map.get(text, text).casefold() for text in found}
    mapped = {text: _TRUTH.get(new, new).removesuffix(".0") for text, new in texts.items()}
    numbers = list(map(str, range(len(names))))
    if not set(mapped.values()) <= set(numbers) or not {name.casefold() for name in names}.isdisjoint(texts.values()):
        return dict(label_map)
    return dict(zip(numbers, names, strict=True)) | {text: names[int(number)] for text, number in mapped.items()}


def fix_of_names(names: Sequence[str], unknown: Sequence[str]) -> str:
    """Return how to read labels that `--label_names` does not list: numbers from 1 by the map, others as classes."""
    if set(unknown) <= (numbers := {str(place): name for place, name in enumerate(names, 1)}).keys():
        return map_flag(numbers.items())
    listed = [*names, *unknown[:MOST_SHOWN]]
    return f"{names_flag('label_names', listed)}   or   --unknown_labels drop"


def odd_separator(scan: LabelScan) -> Iterator[str]:
    """Yield notes about a separator that is never used, and rows without a label."""
    if scan.most_labels < 2:
        yield f"no row of {scan.table.name} has two labels: {scan.separator!r} never separates any (--label_separator)"
    if scan.num_without:
        have = "has" if scan.num_without == 1 else "have"
        yield f"{counted(scan.num_without, 'row')} of {scan.table.name} {have} no label"


def rare_classes(counts: Mapping[str, Mapping[str, int]], kind: str) -> Iterator[str]:
    """Yield notes about classes with few training rows, with none, or with none to validate on."""
    training, validation = counts["train"], counts.get("validation", {})
    absent = [name for name, number in training.items() if not number]
    if absent:
        occur = "occurs" if len(absent) == 1 else "occur"
        yield f"{counted(len(absent), 'class')} never {occur} in training: {listing(absent)}"
    if kind == "tags":
        return
    rare = [f"{name} ({number})" for name, number in training.items() if 0 < number < FEW_ROWS]
    if rare:
        yield f"{counted(len(rare), 'class', 'has')} fewer than {FEW_ROWS} training rows: {listing(rare)}"
    alone = [name for name, number in validation.items() if not number and training[name]]
    if alone and sum(map(bool, validation.values())) > 1:  # one class alone has a note of its own
        yield f"{counted(len(alone), 'class', 'has')} no validation rows: {listing(alone)}"


def imbalance(counts: Mapping[str, int]) -> str | None:
    """Return a note about classes of very different sizes, for tasks with class weights."""
    present = {name: number for name, number in counts.items() if number}
    most, least = max(present, key=present.__getitem__, default=""), min(present, key=present.__getitem__, default="")
    if not present or present[most] < IMBALANCE * present[least]:
        return None
    rows = f"{most!r} has {present[most]:,} training rows, {least!r} only {present[least]:,}"
    return f"{rows}: --class_weights balanced makes rare classes count more"


def odd_classes(counts: Mapping[str, int], column: str, has_typos: bool = True) -> Iterator[str]:
    """Yield notes about suspicious classes."""
    empty = [name for name in counts if name.lower() in _NO_VALUES]
    if empty:
        are = "is a class" if len(empty) == 1 else "are classes"
        yield f"{_quoted(empty)} {are} of {column!r}: for no value leave the cell empty, and --missing_values drop"
    names = sorted(counts, key=lambda name: -counts[name])[:_MOST_COMPARED]  # the usual spelling comes first
    pairs = [
        (name, next((best for best in names[:place] if _is_spelling(name, best, counts, has_typos)), ""))
        for place, name in enumerate(names)
    ]
    if pairs := [(name, best) for name, best in pairs if best]:
        shown = [f"{name!r} ({counts[name]:,}) and {best!r} ({counts[best]:,})" for name, best in pairs[:MOST_NAMED]]
        are = f"{', '.join(shown)} are separate classes: did you mean the same?"
        yield f"{are} {map_flag(pairs)} makes them one"


def joined_classes(counts: Mapping[str, int]) -> Iterator[str]:
    """Yield notes about classes such as a;b, where a and b are classes, too, alone or in others."""
    for sign in _SEPARATORS:
        parts = {name: [part.strip() for part in name.split(sign)] for name in counts}
        total = Counter(part for each in parts.values() for part in each)
        found = [name for name, each in parts.items() if len(each) > 1 and all(total[part] > 1 for part in each)]
        if found:
            several = f"{_quoted(found)} may be several labels of a row"
            yield f"{several}: --label_separator {shlex.quote(sign)} reads them so"


def _is_spelling(name: str, usual: str, counts: Mapping[str, int], has_typos: bool) -> bool:
    """Whether a name differs from a more frequent one in case, width, blanks, _ and - alone; or looks like a typo."""
    one, other = (_WORD_ENDS.sub(" ", unicodedata.normalize("NFKC", each).casefold()) for each in (name, usual))
    if one == other:
        return True
    # Names of rare and frequent classes; those that differ in a number, a letter or their beginning are meant.
    if not has_typos or one[:1] != other[:1] or counts[name] * _TIMES_RARER > counts[usual]:
        return False
    words, others = one.split(), other.split()
    differ = [(word, right) for word, right in zip(words, others, strict=False) if word != right]
    return len(words) == len(others) and all(
        min(len(word), len(right)) >= _SHORTEST_TYPO
        and _DIGITS.findall(word) == _DIGITS.findall(right)
        and difflib.SequenceMatcher(None, word, right).ratio() >= _LIKE
        for word, right in differ
    )


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
    return nearest(text, names)


def map_flag(pairs: Iterable[tuple[str, str]]) -> str:
    found = list(pairs)
    if any("=" in old or "," in old + new or old.startswith("{") for old, new in found):
        return f"--label_map {shlex.quote(json.dumps(dict(found), ensure_ascii=False))}"
    return " ".join(["--label_map", *(shlex.quote(f"{old}={new}") for old, new in found)])


def names_flag(flag: str, names: Sequence[str]) -> str:
    has_commas = any("," in name or name.startswith("[") for name in names)
    return f"--{flag} {shlex.quote(json.dumps(names, ensure_ascii=False) if has_commas else ','.join(names))}"


def absent_labels(
    label_map: Mapping[str, str], dropped: Sequence[str], found: Iterable[str], what: str = "row has the label"
) -> InputError | None:
    """Return the error about labels to rename or to drop that no split has; a map may name more numbers than occur."""
    names = list(dict.fromkeys(found))
    if not names or (not dropped and all(map(is_whole, [*names, *label_map]))):
        return None
    known = {*names, *label_map.values()}
    absent = [*(old for old in label_map if old not in names), *(name for name in dropped if name not in known)]
    if not absent:
        return None
    near, saw = {name: name for name in known} | {name: did_you_mean(name, names) or "" for name in absent}, []
    for name in absent:
        # With very many labels only some are compared letter by letter.
        like = difflib.get_close_matches(name, names[:_MOST_COMPARED], n=_MOST_NEAR, cutoff=0)
        shown = ", ".join(map(repr, list(dict.fromkeys([near[name], *like] if near[name] else like))[:_MOST_NEAR]))
        more = f" and {len(names) - _MOST_NEAR} more" if len(names) > _MOST_NEAR else ""
        saw.append(f"no {what} {name!r}, but {shown}{more}")
    pairs = [(near[old], new) for old, new in label_map.items() if near[old] not in ("", new)]
    kept = list(filter(None, (near[name] for name in dropped)))
    flag = "--label_map" if absent[0] in label_map else "--drop_labels"
    fixes = [map_flag(pairs) if pairs else "", names_flag("drop_labels", kept) if kept else ""]
    fix = " ".join(filter(None, fixes)) or f"leave out {flag}"
    return InputError("data.labels", f"{flag} {absent[0]!r}: there is no such label", saw=saw, fix=fix, flag=flag)


def shown_counts(counts: Mapping[str, int]) -> str:
    """Return "neg 26, pos 34" in the order of ids, truncated if there are many."""
    shown = [f"{name} {counts[name]:,}" for name in ordered(list(counts))[:MOST_SHOWN]]
    return ", ".join(shown) + (f" and {len(counts) - MOST_SHOWN} more" if len(counts) > MOST_SHOWN else "")


def shortened(name: str) -> str:
    return truncate(" ".join(name.split()), _LONGEST_SHOWN)


def _quoted(names: Sequence[str]) -> str:
    return " and ".join(map(repr, names[:MOST_NAMED]))


class TagSchemes:
    """Counts the rows of a file by how they begin and end entities (IOB1, IOB2, BIOES), each with its first row."""

    def __init__(self, table: Table, label_map: Mapping[str, str]) -> None:
        self._table = table
        self._label_map = label_map
        self._found: dict[str, list[int]] = {}  # the number of rows, and the first one

    def add(self, row: int, tags: Sequence[str]) -> None:
        names = ("O", *(self._label_map.get(tag, tag) for tag in tags), "O")
        entities = [(name[:1], name[2:]) if name[1:2] == "-" else ("O", "") for name in names]
        seen = set()
        for (before, kind_before), (letter, kind), (after, kind_after) in zip(
            entities, entities[1:], entities[2:], strict=False
        ):
            if letter == "O":
                continue
            if before == "O" or kind_before != kind or before in _END:  # an entity begins here
                seen.add("B-" if letter in _BEGIN else "I-" if letter == "I" else "")
            if after in _BEGIN or after == "O" or kind_after != kind:  # and ends here
                seen.add("end" if letter in _END else "no end")
        for name in seen:
            self._found.setdefault(name, [0, row])[0] += 1

    def notes(self) -> Iterator[str]:
        """Yield a note for each pair of schemes in one file."""
        pairs = (
            ("B-", "I-", "begin an entity with B-", "with I-", "I- after O begins an entity too"),
            ("end", "no end", "end entities with E- or S- (BIOES)", "without (BIO)", "write all rows in one scheme"),
        )
        for one, other, what, rather, advice in pairs:
            if one in self._found and other in self._found:
                (number, row), (others, other_row) = self._found[one], self._found[other]
                first, place = self._table.place(row), self._table.place(other_row)
                found = f"{counted(number, 'row')} {what} (first: {first}), {others:,} {rather} (first: {place})"
                yield f"mixed tag schemes in {self._table.name}: {found}; {advice}"
