"""One pass over all rows of a file: content hashes, lengths, labels, missing and unusable values."""

from __future__ import annotations

import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from loopwright.errors import InputError
from loopwright.metrics.words import count_words
from loopwright.sources.chats.roles import CHAT_KINDS, as_chat, chat_text, count_turns
from loopwright.sources.column_roles import Columns, column_names
from loopwright.sources.files import Say
from loopwright.sources.images.scene_scan import SceneOptions, SceneScan
from loopwright.sources.images.tables import ImageTable
from loopwright.sources.label_checks import TagSchemes
from loopwright.sources.labels import SEPARATOR, BadRows, LabelScan, has_value, label_list, label_text
from loopwright.sources.options import DataOptions
from loopwright.sources.schema import GROUP, PICTURE_KINDS, Role, Schema
from loopwright.sources.splits import Hashes, Mask, hash_texts
from loopwright.sources.tables import Block, Row, Table
from loopwright.sources.values import UnusableValueError, as_role, without_empty_end

LONGEST_COUNTED = 1 << 18  # Longer lengths share a bin; the maximum stays exact.
MOST_ROWS_NAMED = 5
IGNORED_TAG = "-100"  # the value in transformers' features for an ignored tag


class LengthHistogram:
    """A histogram of lengths."""

    def __init__(self) -> None:
        self._counts: npt.NDArray[np.int64] = np.zeros(1, np.int64)
        self._longest = 0

    def add(self, lengths: Iterable[int]) -> None:
        array = lengths if isinstance(lengths, np.ndarray) else np.fromiter(lengths, np.int64)
        if not len(array):
            return
        self._longest = max(self._longest, int(array.max()))
        counts = np.bincount(np.minimum(array, LONGEST_COUNTED), minlength=len(self._counts))
        counts[: len(self._counts)] += self._counts
        self._counts = counts

    def summary(self) -> dict[str, int]:
        total = np.cumsum(self._counts)
        places = {name: int(np.searchsorted(total, share * total[-1])) for name, share in (("p50", 0.5), ("p95", 0.95))}
        return {name: min(place, self._longest) for name, place in places.items()} | {"max": self._longest}


Lengths = dict[str, defaultdict[str, LengthHistogram]]  # by role, of characters and of words


@dataclass
class Scan:
    """The findings of one pass over a file.

    Attributes:
        keys: Hashes by row. content: of the model's inputs, so equal rows are duplicates; near: of the same without
            case, blanks and punctuation; split and near_split: likewise of the roles that split rows; label; group.
        missing: Which rows lack the value of a required role, by role.
        bad_rows: Rows that cannot be read or used, with the reason.
    """

    keys: Mapping[str, Hashes]
    missing: dict[str, Mask]
    labels: LabelScan | None
    scenes: SceneScan | None = None
    notes: Sequence[str] = ()  # about tags
    bad_rows: Mapping[int, InputError] = field(default_factory=dict)
    chats: Counter[tuple[str, str]] = field(default_factory=Counter)  # formats, turns by role


def scan_table(
    table: Table,
    schema: Schema,
    columns: Columns,
    label_kind: str | None,
    options: DataOptions,
    lengths: Lengths,
    say: Say | None,
) -> Scan:
    """Read all rows of a table once, and count their lengths; refuse or collect those with unusable values."""
    bad = BadRows(options.bad_rows == "drop")
    roles = [role for role in schema.roles if role.name in columns]
    names = {role.name: column_names(columns[role.name]) for role in roles}
    missing = {role.name: np.zeros(len(table), np.bool_) for role in roles if not role.may_be_empty}
    label = schema.label_role
    labels, schemes = None, TagSchemes(table, options.label_map)
    if label is not None and label_kind is not None:
        labels = LabelScan(table, names[label.name], label, label_kind, options.label_separator, bad)
    scenes = None
    if isinstance(table, ImageTable):
        has_outlines = schema.scene_role is not None and schema.scene_role.has_outlines
        meaning = options.ignore_index, options.reduce_labels, tuple(options.mask_values)
        scenes = SceneScan(table, SceneOptions(*meaning, options.bad_annotations, has_outlines), say)
    keys: defaultdict[str, list[bytes]] = defaultdict(list)
    chats: Counter[tuple[str, str]] = Counter()
    for block in table.blocks(list(dict.fromkeys(name for group in names.values() for name in group)), say):
        bad.update(block.damaged)
        values: dict[str, list[Any]] = {}
        for role in roles:
            given = [block.values[name] for name in names[role.name]]
            if role.kind in CHAT_KINDS:
                cells = [dict(zip(names[role.name], row, strict=True)) for row in zip(*given, strict=True)]
                values[role.name] = _convert_chats(role, cells, table, block, bad)
                chats += count_turns(cells, values[role.name])
                _measure(role, values[role.name], lengths.setdefault(role.name, defaultdict(LengthHistogram)))
                continue
            raw = given[0] if len(given) == 1 else [without_empty_end(list(row)) for row in zip(*given, strict=True)]
            if role.is_label and labels is not None:
                raw = labels.cells(block)
            if role.kind in PICTURE_KINDS:
                assert scenes is not None, "images are read from tables of images"
                values[role.name] = scenes.add(role, names[role.name][0], block.start, raw)
            else:
                values[role.name] = raw if role.is_label else _convert(role, raw, values, table, block.start, bad)
            is_multi = role.is_label and label_kind == "multi"
            # With a separator an empty cell means no class.
            if role.name in missing and not (is_multi and options.label_separator is not None and len(given) == 1):
                _find_missing(role, values[role.name], is_multi, missing[role.name][block.start :])
            if role.kind in ("text", "tokens") and role.name not in ("id", "image_id", GROUP.name):
                _measure(role, values[role.name], lengths.setdefault(role.name, defaultdict(LengthHistogram)))
            if role.is_label and labels is not None:
                labels.add(block.start, raw)
                if role.kind == "tags":
                    _check_tags(values["tokens"], raw, table, block.start, schemes, bad)
        for name, found in _row_keys(schema, roles, values, label_kind, options).items():
            keys[name].append(found)
    arrays = {name: np.frombuffer(b"".join(parts), "<u8") for name, parts in keys.items()}
    for name, other in (("near", "content"), ("split", "content"), ("near_split", "near")):
        arrays.setdefault(name, arrays[other])
    if labels is not None and label_kind == "class":
        texts = (_label_key(text, label_kind, options) for text in labels.texts)
        arrays["label"] = np.frombuffer(hash_texts(texts), "<u8")[labels.codes]
    return Scan(arrays, missing, labels, scenes, list(schemes.notes()), bad, chats)


def _convert_chats(role: Role, cells: list[Row], table: Table, block: Block, bad: BadRows) -> list[Any]:
    converted: list[Any] = []
    errors: dict[int, InputError] = {}
    for row, values in enumerate(cells, block.start):
        where = f"{table.place(row)} of {table.name}"
        try:
            converted.append([] if row in block.damaged else as_chat(role.kind, values, where))
        except InputError as error:
            errors[row] = error
            converted.append([])
    may_drop = len(cells) < len(table) or sum(map(bool, converted)) > 1  # else nothing to train on would be left
    for row, problem in errors.items():
        problem.fix = f"{BadRows.FIX}   or   {problem.fix}" if may_drop else problem.fix
        bad.add(row, error=problem)
    return converted


def _convert(
    role: Role, raw: list[Any], others: dict[str, list[Any]], table: Table, start: int, bad: BadRows
) -> list[Any]:
    if role.kind == "text" and set(map(type, raw)) == {str}:
        return raw
    contexts = others["context"] if role.kind == "answers" else [""] * len(raw)
    converted, unusable = [], []
    for row, (value, context) in enumerate(zip(raw, contexts, strict=True), start):
        try:
            converted.append(as_role(role.kind, value, context))
        except UnusableValueError as error:
            unusable.append((row, str(error)))
            converted.append("" if role.kind == "text" else [])
    if unusable:
        row, reason = unusable[0]
        what = f"{table.name}: the {role.name} in {table.place(row)} cannot be used"
        fix = f"{BadRows.FIX}   or   correct"
        problem = InputError("data.value", what, saw=[reason], fix=f"{fix} the {role.name} there")
        if role.kind == "answers":
            last = table.place(start + len(raw) - 1)
            what = f"{table.name}: {len(unusable):,} of the rows up to {last} have an answer that cannot be found"
            saw = [f"{table.place(row)}: {reason}" for row, reason in unusable[:MOST_ROWS_NAMED]]
            problem = InputError("data.answers", what, saw=saw, fix=f"{fix} answer_start there (characters, from 0)")
        bad.add(*(row for row, _ in unusable), error=problem)
    return converted


def _find_missing(role: Role, values: list[Any], is_multi: bool, is_missing: Mask) -> None:
    """Mark the rows without a value. A multi-label row may have no class at all."""
    if set(map(type, values)) == {str} and all(values) and not any(map(str.isspace, values)):
        return
    for place, value in enumerate(values):
        is_present = has_value(value) and (role.kind != "texts" or all(map(has_value, value)))
        is_missing[place] = not is_present and not (is_multi and value == [])


def _measure(role: Role, values: list[Any], lengths: Mapping[str, LengthHistogram]) -> None:
    if role.kind in CHAT_KINDS:
        chats = [chat.messages for chat in values if chat]
        lengths["turns"].add(map(len, chats))
        lengths["words"].add(sum(count_words(str(turn["content"] or "")) for turn in chat) for chat in chats)
    elif role.kind == "tokens":
        lengths["characters"].add([sum(map(len, tokens)) for tokens in values])
        lengths["words"].add([len(tokens) for tokens in values])
    else:
        lengths["characters"].add(map(len, values))
        lengths["words"].add(map(count_words, values))


def _check_tags(
    tokens_of: list[list[str]], tags_of: list[Any], table: Table, start: int, schemes: TagSchemes, bad: BadRows
) -> None:
    for row, (tokens, tags) in enumerate(zip(tokens_of, tags_of, strict=True), start):
        if not has_value(tags):
            continue
        found = label_list(tags, "tags", "")
        saw = [f"tokens: {str(tokens)[:80]}", f"tags:   {str(tags)[:80]}"]
        fix = f"{BadRows.FIX}   or   give each token one tag, O for none"
        what = f"{table.name}: {table.place(row)} has {len(tokens)} tokens and {len(found)} tags"
        if len(found) != len(tokens):
            bad.add(row, error=InputError("data.tags", what, saw=saw, fix=fix))
            continue
        schemes.add(row, found)
        given = tags if isinstance(tags, list) else found
        for token, tag, value in zip(tokens, found, given, strict=True):
            if tag in ("", IGNORED_TAG) or value is None:
                what = f"{table.name}: the token {token!r} in {table.place(row)} has no tag"
                bad.add(row, error=InputError("data.tags", what, saw=saw, fix=fix))


class _Blanks(dict[int, int | None]):
    """For `str.translate`: removes blanks, punctuation and invisible characters."""

    def __missing__(self, code: int) -> int | None:
        self[code] = None if unicodedata.category(chr(code)) in _REMOVED else code
        return self[code]


_REMOVED = frozenset(("Zs", "Zl", "Zp", "Cc", "Cf", "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po"))
_BLANKS = _Blanks()


def without_spelling(text: str) -> str:
    """Return a text without case, blanks and punctuation, in NFKC; one of punctuation alone stays as it is."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return folded.translate(_BLANKS) or text


def _row_keys(
    schema: Schema, roles: list[Role], values: dict[str, list[Any]], label_kind: str | None, options: DataOptions
) -> dict[str, bytes]:
    """Return the keys of some rows, as in `Scan.keys`; near ones only for texts."""
    kinds = {role.name: role.kind for role in roles}
    values = values | {name: [*map(chat_text, values[name])] for name, kind in kinds.items() if kind in CHAT_KINDS}
    inputs = [role.name for role in roles if role.is_input]
    found = {}
    for prefix, names in (("", inputs), ("split", schema.split_by)):
        if names:
            found[prefix or "content"] = _hash([values[name] for name in names])
            if not set(PICTURE_KINDS).issuperset(kinds[name] for name in names):
                near = [_without_spelling(kinds[name], values[name]) for name in names]
                found["near_split" if prefix else "near"] = _hash(near)
    if GROUP.name in values:
        found["group"] = hash_texts(map(str.strip, values[GROUP.name]))
    label = schema.label_role
    if label is not None and label_kind not in (None, "class"):
        found["label"] = hash_texts(_label_key(value, label_kind, options) for value in values[label.name])
    return found


def _without_spelling(kind: str, values: list[Any]) -> list[Any]:
    if kind == "texts":
        return [[*map(without_spelling, parts)] for parts in values]
    texts = map(" ".join, values) if kind == "tokens" else values
    return values if kind in PICTURE_KINDS else [*map(without_spelling, texts)]


def _label_key(value: Any, kind: str, options: DataOptions) -> str:
    is_one = kind in ("class", "float")
    texts = [label_text(value)] if is_one else label_list(value, kind, options.label_separator or SEPARATOR)
    names = [options.label_map.get(text, text) for text in texts]
    return "\x1e".join(sorted(names) if kind == "multi" else names)


def _hash(columns: list[list[Any]]) -> bytes:
    """Return eight bytes per row that depend on the values only."""
    texts = [["\x1e".join(part) for part in column] if type(column[0]) is list else column for column in columns]
    return hash_texts(texts[0] if len(texts) == 1 else map("\x1f".join, zip(*texts, strict=True)))
