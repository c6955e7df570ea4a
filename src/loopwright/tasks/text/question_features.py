"""From rows of question-answering to features and batches: windows of a context, or a text to generate from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from loopwright.tasks.base import Rows
from loopwright.tasks.text import models as text

TARGETS = ("start_positions", "end_positions")
_ROWS_AT_ONCE = 256


def answers_of(row: Mapping[str, Any]) -> list[str]:
    """Return the answers to train on: blank ones count for the metric alone."""
    return [words for words in row["answers"]["text"] if words.strip()]


class WindowEncoder:
    """Makes the features of a row, one for each window of its context; used in loader workers."""

    def __init__(self, tokenizer: Any, max_length: int, stride: int, is_labelled: bool) -> None:
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._stride = stride
        self._is_labelled = is_labelled
        self._room = max_length - tokenizer.num_special_tokens_to_add(pair=True)
        marks = (tokenizer.cls_token_id, tokenizer.bos_token_id)
        self._mark = next((mark for mark in marks if mark is not None), None)

    def counts(self, rows: Sequence[Mapping[str, Any]]) -> list[int]:
        samples = self._encode(rows)["overflow_to_sample_mapping"]
        return np.bincount(np.asarray(samples), minlength=len(rows)).tolist()  # type: ignore[no-any-return]

    def __call__(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the features of a row.

        "offsets" has the first character and the end of each token that an answer can have, (-1, -1) for the others.
        "null_index" is the token whose score means that a window has no answer: the one that stands for the whole.
        """
        encoded = self._encode([row])
        names = [name for name in self._tokenizer.model_input_names if name in encoded]
        answers = row["answers"] if self._is_labelled else {"text": [], "answer_start": []}
        pairs = zip(answers["text"], answers["answer_start"], strict=True)
        answer = next(((start, start + len(words)) for words, start in pairs if words.strip()), None)
        features = []
        for number, ids in enumerate(encoded["input_ids"]):
            places = zip(encoded["offset_mapping"][number], encoded.sequence_ids(number), strict=True)
            offsets = [[start, end] if part == 1 and start < end else [-1, -1] for (start, end), part in places]
            null_index = ids.index(self._mark) if self._mark in ids else 0
            feature = {name: encoded[name][number] for name in names}
            feature |= {"offsets": offsets, "null_index": null_index, "context": row["context"]}
            feature |= {"window": number, "num_windows": len(encoded["input_ids"])}
            if self._is_labelled:
                place = token_span(offsets, *answer) if answer is not None else None
                feature |= dict(zip(TARGETS, place or (null_index, null_index), strict=True))
                feature["reference"] = list(answers["text"])
            features.append(feature)
        return features

    def _encode(self, rows: Sequence[Mapping[str, Any]]) -> Any:
        sides = [self._question(row) for row in rows], [row["context"] for row in rows]
        windows = {"truncation": "only_second", "max_length": self._max_length, "stride": self._stride}
        return self._tokenizer(*sides, **windows, return_overflowing_tokens=True, return_offsets_mapping=True)

    def _question(self, row: Mapping[str, Any]) -> str:
        """Return the question, stripped, and cut if it would leave no room for the context."""
        question: str = row["question"].strip()
        most = self._room - self._stride - 1
        if len(question.encode()) <= most:  # no tokenizer makes more tokens than bytes
            return question
        offsets = self._offsets(question)
        if len(offsets) <= most or len(offsets) + len(self._offsets(row["context"])) <= self._room:
            return question
        for kept in range(most, 0, -1):  # the cut text can have more tokens than it had within the whole
            question = question[: offsets[kept - 1][1]]
            offsets = self._offsets(question)
            if len(offsets) <= most:
                break
        return question

    def _offsets(self, words: str) -> list[tuple[int, int]]:
        encoded = self._tokenizer(words, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return encoded["offset_mapping"]  # type: ignore[no-any-return]


def token_span(offsets: Sequence[Sequence[int]], start: int, end: int) -> tuple[int, int] | None:
    """Return the first and the last token of the characters from `start` to `end`; None if some are missing."""
    inside = [index for index, place in enumerate(offsets) if place[0] >= 0]
    if not inside or offsets[inside[0]][0] > start or offsets[inside[-1]][1] < end:
        return None
    touched = [index for index in inside if offsets[index][1] > start and offsets[index][0] < end]
    return (touched[0], touched[-1]) if touched else None


class WindowDataset:
    """Rows as a flat list of features; a row has as many as its context needs."""

    def __init__(self, rows: Rows, encode: WindowEncoder) -> None:
        self.rows = rows
        self._encode = encode
        self._last: tuple[int, list[dict[str, Any]]] = (-1, [])
        counts: list[int] = []
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            counts += encode.counts([rows[index] for index in range(start, min(start + _ROWS_AT_ONCE, len(rows)))])
        self._ends = np.cumsum(counts, dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        position = int(np.searchsorted(self._ends, index, side="right"))
        if self._last[0] != position:
            self._last = (position, self._encode(self.rows[position]))
        features = self._last[1]
        return {**features[index - int(self._ends[position]) + len(features)], "position": position}


class SpanCollator(text.PadsToBuckets):
    """Collates features, padded on the tokenizer's side, to a length that is a multiple of `multiple`."""

    def __init__(self, tokenizer: Any, multiple: int | None) -> None:
        from loopwright.data.collators import DataCollatorWithPadding

        self._pad = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=multiple)
        self._names = tuple(tokenizer.model_input_names)
        self._is_left = tokenizer.padding_side == "left"

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        import torch

        batch = dict(self._pad([{name: each[name] for name in self._names if name in each} for each in features]))
        width = batch["input_ids"].shape[1]
        offsets = torch.full((len(features), width, 2), -1, dtype=torch.long)
        shifts = [width - len(each["input_ids"]) if self._is_left else 0 for each in features]
        for row, (each, shift) in enumerate(zip(features, shifts, strict=True)):
            offsets[row, shift : shift + len(each["offsets"])] = torch.tensor(each["offsets"])
        batch["offsets"] = offsets
        for name in ("null_index", *TARGETS):
            if name in features[0]:
                places = [each[name] + shift for each, shift in zip(features, shifts, strict=True)]
                batch[name] = torch.tensor(places)
        for name in ("position", "window", "num_windows"):
            batch[name] = torch.tensor([each[name] for each in features])
        for name in ("context", "reference"):
            if name in features[0]:
                batch[name] = [each[name] for each in features]
        return batch


def encode_text(
    tokenizer: Any, max_length: int, max_answer_length: int, is_labelled: bool, row: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the features of a row whose answer is generated; called in loader workers.

    They are the tokens of question and context, and of the first answer: only an end token if there is none.
    """
    prompt = f"question: {row['question'].strip()} context: {row['context'].strip()}"
    features = dict(tokenizer(prompt, truncation=True, max_length=max_length))
    if is_labelled:
        answer = next(iter(answers_of(row)), "")
        target = tokenizer(text_target=answer, truncation=True, max_length=max_answer_length)
        features["labels"] = target["input_ids"] or [tokenizer.eos_token_id]
        features["reference"] = list(row["answers"]["text"])
    return features
