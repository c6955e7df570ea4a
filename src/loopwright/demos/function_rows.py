"""Rows about functions: signatures and their paragraphs, names to choose from, questions about defaults."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import count

from loopwright.demos.demo_data import Row, first_paragraph, is_held_out, mixed, rank, shuffled
from loopwright.demos.stdlib_docs import Doc, Parameter, StdlibDocs

# The rows to keep for training and validation, and the fraction of names to hold out for that.
_MOST_PAIRS, _SHARE_OF_PAIRS = (2000, 500), 0.22
_MOST_CHOICES, _SHARE_OF_CHOICES = (900, 200), 0.22
_MOST_QUESTIONS, _SHARE_OF_QUESTIONS = (1400, 200), 0.14

_NUM_CHOICES = 4
_NUM_SIGNATURES = 3
_MOST_SIGNATURE_CHARACTERS = 120
# Most defaults are None. So few questions about them that guessing None does not pay off.
_MOST_NONE = 0.25


def pair_rows(found: StdlibDocs) -> tuple[list[Row], list[Row]]:
    """Return `anchor`, name and signature, and `positive`, the first paragraph, each once; held out by name."""
    rows = []
    for doc in _described_functions(found):
        owner = doc.name.rpartition(".")[0]
        anchor = f"{owner}.{doc.signature}" if owner else doc.signature
        rows.append((doc.short_name, {"anchor": anchor, "positive": first_paragraph(doc.text)}))
    anchors = Counter(row["anchor"] for _, row in rows)
    sides: tuple[list[Row], list[Row]] = ([], [])
    for name, row in rows:
        if anchors[row["anchor"]] == 1:
            sides[is_held_out(name, _SHARE_OF_PAIRS)].append(row)
    return mixed(sides[0], "anchor")[: _MOST_PAIRS[0]], mixed(sides[1], "anchor")[: _MOST_PAIRS[1]]


def choice_rows(found: StdlibDocs) -> tuple[list[Row], list[Row]]:
    """Return rows in the columns of SWAG: which of four functions of a package does this paragraph describe?

    All four names of a validation row are held out. Paragraphs that contain the function's name are skipped.
    """
    packages: dict[tuple[str, bool], dict[str, Doc]] = defaultdict(dict)
    for doc in _described_functions(found):
        if doc.short_name not in first_paragraph(doc.text):
            side = is_held_out(doc.short_name, _SHARE_OF_CHOICES)
            packages[doc.module.partition(".")[0], side].setdefault(doc.short_name, doc)
    sides: tuple[list[Row], list[Row]] = ([], [])
    for (_, side), functions in packages.items():
        if len(functions) >= _NUM_CHOICES:
            sides[side].extend(_choice_row(doc, functions) for doc in functions.values())
    return mixed(sides[0], "sent1")[: _MOST_CHOICES[0]], mixed(sides[1], "sent1")[: _MOST_CHOICES[1]]


def question_rows(found: StdlibDocs) -> tuple[list[Row], list[Row]]:
    """Return rows in SQuAD's format: three signatures, held out by name, and a question about a default value."""
    short = [doc for doc in found.docs if doc.kind == "function" and len(doc.signature) <= _MOST_SIGNATURE_CHARACTERS]
    functions = {doc.signature: doc for doc in short if any(map(_is_answer, doc.parameters))}
    sides: tuple[list[Doc], list[Doc]] = ([], [])
    for doc in functions.values():
        sides[is_held_out(doc.short_name, _SHARE_OF_QUESTIONS)].append(doc)
    return _questions(sides[0], _MOST_QUESTIONS[0]), _questions(sides[1], _MOST_QUESTIONS[1])


def _described_functions(found: StdlibDocs) -> list[Doc]:
    public = [doc for doc in found.docs if doc.kind == "function" and not doc.short_name.startswith("_")]
    functions = [doc for doc in public if 5 <= len(first_paragraph(doc.text).split()) <= 60]
    counts = Counter(first_paragraph(doc.text) for doc in functions)
    return [doc for doc in functions if counts[first_paragraph(doc.text)] == 1]


def _choice_row(doc: Doc, names: Iterable[str]) -> Row:
    text = first_paragraph(doc.text)
    others = shuffled((name for name in names if name != doc.short_name), f"choice {text}", str)[: _NUM_CHOICES - 1]
    label = rank("label", text) % _NUM_CHOICES
    endings = [*others[:label], doc.short_name, *others[label:]]
    columns = {f"ending{index}": name for index, name in enumerate(endings)}
    return {"sent1": text, "sent2": "The function is called", **columns, "label": label}


def _is_answer(part: Parameter) -> bool:
    # A scorer that drops punctuation would treat '' or () as no answer.
    return part.default is not None and len(part.default) <= 30 and any(map(str.isalnum, part.default))


def _questions(functions: list[Doc], most: int) -> list[Row]:
    asked = [(doc, part) for doc in functions for part in doc.parameters if _is_answer(part)]
    asked = shuffled(asked, "questions", lambda pair: f"{pair[0].signature} {pair[1].name}")
    about_none = [pair for pair in asked if pair[1].default == "None"]
    others = [pair for pair in asked if pair[1].default != "None"]
    num_none = min(len(about_none), int(most * _MOST_NONE), len(others) // 3)
    chosen = others[: most - num_none] + about_none[:num_none]
    return mixed([_question_row(doc, part, functions) for doc, part in chosen], "id")


def _question_row(doc: Doc, part: Parameter, functions: list[Doc]) -> Row:
    place = f"{doc.module}.{doc.signature} {part.name}"
    beside: list[Doc] = []
    for attempt in count():
        other = functions[rank(f"beside {attempt}", place) % len(functions)]
        if other.short_name not in {doc.short_name, *(taken.short_name for taken in beside)}:
            beside.append(other)
        if len(beside) == _NUM_SIGNATURES - 1:
            break
    position = rank("position", place) % _NUM_SIGNATURES
    signatures = [*(other.signature for other in beside[:position]), doc.signature]
    # The answer starts after the preceding lines, the name, the bracket, and the preceding parameters.
    start = sum(len(signature) + 1 for signature in signatures[:-1]) + len(doc.short_name) + 1
    for earlier in doc.parameters:
        if earlier is part:
            break
        start += len(earlier.name) + (0 if earlier.default is None else len(earlier.default) + 1) + len(", ")
    start += len(part.name) + 1
    context = "\n".join([*signatures, *(other.signature for other in beside[position:])])
    question = f"What is the default value of {part.name} in {doc.short_name}?"
    answers = {"text": [part.default], "answer_start": [start]}
    return {"id": f"{rank('id', place):016x}", "question": question, "context": context, "answers": answers}
