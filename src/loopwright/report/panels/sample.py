"""The samples of an evaluation, even from a damaged file, and each in readable form: texts, prediction and truth."""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, Final

from loopwright.metrics.words import WITHOUT_SPACES, same_answer, script_of
from loopwright.report.blocks import Example, Piece
from loopwright.report.formats import cut, metric, number, percent
from loopwright.run_folder.files import DamagedFileError, read_json, read_json_lines

_TEXTS: Final = ("question", "context", "start", "source", "text", "text_pair")
_HEAD: Final = {"loss": metric, "confidence": percent, "rank": number, "similarity": metric, "f1": metric}
_CONTEXT_AROUND: Final = 160
_MOST_TOKENS: Final = 120


Sample = Mapping[str, Any]
Fields = list[tuple[str, list[Piece]]]


def json_lines(path: Path) -> Iterator[Sample]:
    """Yield the objects of a JSON lines file; an empty one for an invalid line."""
    with contextlib.suppress(DamagedFileError):  # the page can do without
        for sample in read_json_lines(path, for_bad={}):
            words = sample.get("nonfinite")
            try:
                yield sample | {name: float(word) for name, word in words.items()} if words else sample
            except (AttributeError, TypeError, ValueError):
                yield {}


def json_or_none(path: Path) -> Any:
    """Return the contents of a JSON file; None if it is missing or damaged, since the page can do without."""
    try:
        return read_json(path)
    except (OSError, DamagedFileError):
        return None


def example(sample: Sample) -> Example:
    if "tokens" in sample and isinstance(sample.get("prediction"), list):
        fields = _tagged(sample)
    elif "choices" in sample:
        fields = [*_texts(sample), _choices(sample)]
    elif "n_best" in sample or isinstance(sample.get("reference"), list) and "question" in sample:
        fields = _answered(sample)
    elif isinstance(sample.get("prediction"), list) and "num_tokens" in sample:
        fields = [*_texts(sample), ("masked", _masked(sample))]
    elif "source" in sample and isinstance(sample.get("prediction"), str):
        fields = [*_texts(sample), *differing(str(sample["prediction"]), str(sample.get("reference", "")))]
    else:
        fields = [*_texts(sample), *_others(sample)]
    return Example(_head(sample), fields, is_right(sample))


def is_right(sample: Sample) -> bool | None:
    """Return whether a prediction is correct; None if the task has no right and wrong."""
    predicted, true = sample.get("prediction"), sample.get("reference")
    if "question" in sample and isinstance(true, list):
        return any(same_answer(str(predicted or ""), str(answer)) for answer in true or [""])
    if "rank" in sample and "similarity" in sample:
        return bool(sample["rank"] == 1)
    if predicted is None or true is None or isinstance(predicted, float) or "num_tokens" in sample:
        return None
    return bool(predicted == true)


def _head(sample: Sample) -> str:
    parts = [f"row {sample['position']:,}"] if isinstance(sample.get("position"), int) else []
    parts = [str(sample["place"])] if sample.get("place") else parts
    if "image" in sample:
        parts.append(PurePath(str(sample["image"])).name)
    for name, form in _HEAD.items():
        value = sample.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            parts.append(f"{name} {form(value)}" if math.isfinite(value) else f"{name} is {value}")
    return " · ".join(parts)


def _texts(sample: Sample) -> Fields:
    return [(name.replace("_", " "), [Piece(cut(sample[name]))]) for name in _TEXTS if sample.get(name)]


def _others(sample: Sample) -> Fields:
    fields = []
    right = is_right(sample)
    for name, key in (("predicted", "prediction"), ("true", "reference")):
        if key in sample:
            mark = "" if right is None else "right" if right or key == "reference" else "wrong"
            fields.append((name, [Piece(_label_text(sample[key]), mark)]))
    if "counts" in sample and isinstance(sample["counts"], Mapping):
        parts = [
            Piece(f"{label}: {hits} found, {wrong} wrong, {missed} missed", "right" if not wrong + missed else "wrong")
            for label, (hits, wrong, missed) in sample["counts"].items()
        ]
        fields.append(("objects", _spaced(parts)))
    if isinstance(sample.get("iou"), float):
        fields.append(("mean IoU", [Piece(metric(sample["iou"]))]))
    return fields


def _label_text(value: Any) -> str:
    if isinstance(value, float):
        return metric(value)
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return cut(value, 200)


def _tagged(sample: Sample) -> Fields:
    """Return the words of a sentence, with the tags that the prediction or the truth has."""
    pieces = []
    triples = list(zip(sample["tokens"], sample["prediction"], sample["reference"], strict=False))
    for token, predicted, true in triples[:_MOST_TOKENS]:
        if predicted == true:
            pieces.append(Piece(str(token) if true == "O" else f"{token}/{true}", "" if true == "O" else "right"))
        else:
            pieces.append(Piece(f"{token}/{predicted} (true {true})", "wrong"))
    if len(triples) > _MOST_TOKENS:
        pieces.append(Piece(f"… ({len(triples)} words)"))
    return [("words", _spaced(pieces))]


def _choices(sample: Sample) -> tuple[str, list[Piece]]:
    pieces = []
    for index, choice in enumerate(sample["choices"]):
        is_true, is_chosen = index == sample.get("reference"), index == sample.get("prediction")
        notes = ", ".join(name for name, holds in (("true", is_true), ("chosen", is_chosen)) if holds)
        text = cut(choice, 160) + (f" ({notes})" if notes else "")
        pieces.append(Piece(text, "right" if is_true else "wrong" if is_chosen else ""))
    return ("choices", _spaced(pieces))


def _answered(sample: Sample) -> Fields:
    best = (sample.get("n_best") or [{}])[0]
    context, start, end = str(sample.get("context", "")), best.get("start"), best.get("end")
    right = bool(is_right(sample))
    if isinstance(start, int) and isinstance(end, int) and 0 <= start < end <= len(context):
        low, high = max(start - _CONTEXT_AROUND, 0), min(end + _CONTEXT_AROUND, len(context))
        pieces = [
            Piece(("… " if low else "") + context[low:start]),
            Piece(context[start:end], "right" if right else "wrong"),
            Piece(context[end:high] + (" …" if high < len(context) else "")),
        ]
    else:
        pieces = [Piece(cut(context))]
    true = [cut(answer, 160) for answer in sample.get("reference") or []] or ["no answer"]
    return [
        ("question", [Piece(cut(sample.get("question", "")))]),
        ("context", pieces),
        ("predicted", [Piece(cut(sample.get("prediction") or "no answer", 160), "right" if right else "wrong")]),
        ("true", [Piece(" | ".join(dict.fromkeys(true)), "right")]),
    ]


def _masked(sample: Sample) -> list[Piece]:
    pairs = list(zip(sample["prediction"], sample["reference"], strict=False))
    pieces = [
        Piece(repr(true)[1:-1], "right") if predicted == true else Piece(f"{predicted!r} for {true!r}", "wrong")
        for predicted, true in pairs[:_MOST_TOKENS]
    ]
    return _spaced([*pieces, *([Piece(f"… ({len(pairs)} tokens)")] if len(pairs) > _MOST_TOKENS else [])])


def differing(predicted: str, true: str) -> Fields:
    """Return the generated and the expected text, with differing words marked; characters in scripts without spaces."""
    joint = "" if script_of([true]) in WITHOUT_SPACES else " "
    ours, theirs = (cut(each, 600).split() if joint else list(cut(each, 600)) for each in (predicted, true))
    matcher = difflib.SequenceMatcher(None, ours, theirs, autojunk=False)
    generated: list[Piece] = []
    expected: list[Piece] = []
    for change, start, end, other_start, other_end in matcher.get_opcodes():
        if end > start:
            generated.append(Piece(joint.join(ours[start:end]), "" if change == "equal" else "wrong"))
        if other_end > other_start:
            expected.append(Piece(joint.join(theirs[other_start:other_end]), "" if change == "equal" else "right"))
    if joint:
        generated, expected = _spaced(generated), _spaced(expected)
    return [("generated", generated or [Piece("nothing")]), ("true", expected or [Piece("nothing")])]


def _spaced(pieces: Sequence[Piece]) -> list[Piece]:
    return [part for piece in pieces for part in (Piece(" "), piece)][1:]
