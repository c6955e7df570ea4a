"""Collators with the names and fields of transformers': from a list of samples to a batch.

They need neither transformers nor its tokenizers: anything with `pad`, or with `pad_token_id`, works. Samples may be
dicts, dataclasses or objects with attributes, and are never modified. Labels may be called "label", "label_ids" or
"labels" and come out as "labels"; text is left out.

Example:
    collator = DataCollatorWithPadding(tokenizer)
    batch = collator([{"input_ids": [5, 6, 7], "label": 1}, {"input_ids": [8], "label": 0}])

The random masks of `DataCollatorForLanguageModeling` are drawn from the global generators. loopwright's loaders seed
these from (seed, epoch, position) before every micro-batch, so that evaluations and resumed runs see the same masks.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loopwright.data.columns import (
    IGNORED,
    Batch,
    BucketCollator,
    Collator,
    Columns,
    Padding,
    as_list,
    checked_kind,
    checked_strategy,
    has_length,
    main_name,
    pad_lists,
    padded_batch,
    padding_side,
    stack,
    stack_labels,
    take_labels,
    to_columns,
)
from loopwright.data.masking import DataCollatorForLanguageModeling
from loopwright.errors import DataError

__all__ = [
    "DataCollatorForLanguageModeling",
    "DataCollatorForMultipleChoice",
    "DataCollatorForSeq2Seq",
    "DataCollatorForTokenClassification",
    "DataCollatorWithFlattening",
    "DataCollatorWithPadding",
    "DefaultDataCollator",
    "default_data_collator",
]


def default_data_collator(features: Sequence[Any], return_tensors: str = "pt") -> Batch:
    """Return a batch of samples whose values have the same shapes; nothing is padded.

    A "label" becomes "labels": int64 if it is one integer, float32 if it is anything else (so a list of zeros and ones
    is ready for a multi-label loss). "label_ids" become "labels" with integers as int64.
    """
    kind = checked_kind(return_tensors)
    columns = to_columns(features)
    batch: dict[str, Any] = {}
    label, label_ids = columns.pop("label", None), columns.pop("label_ids", None)
    if "labels" in columns:
        pass  # already under its final name
    elif label is not None:
        batch["labels"] = _stack_single_labels(label, kind)
    elif label_ids is not None:
        labels = stack_labels(label_ids, kind)
        batch["labels"] = _as_float32(labels) if not isinstance(label_ids[0], (Tensor, np.ndarray)) else labels
    batch.update((name, stack(name, values, kind)) for name, values in columns.items())
    return batch


@dataclass
class DefaultDataCollator(Collator):
    """`default_data_collator` as an object."""

    return_tensors: str = "pt"

    def __post_init__(self) -> None:
        checked_kind(self.return_tensors)

    def _collate(self, features: Sequence[Any], kind: str) -> Batch:
        return default_data_collator(features, kind)


@dataclass
class DataCollatorWithFlattening(DefaultDataCollator):
    """Joins all samples of a batch into one row without padding, for models that separate sequences by position ids.

    A batch has "input_ids" and "labels" of shape (1, tokens), and the options below. Labels are the samples' "labels"
    or else their ids. The first label of each sample is `separator_id`, since no token of the sample precedes it.

    Attributes:
        return_position_ids: add "position_ids", which restart with each sample.
        separator_id: the label of the first token of each sample.
        return_flash_attn_kwargs: add "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q" and "max_length_k".
        return_seq_idx: add "seq_idx", the sample number of each token.
        position_ids_start: the first position; models like RoBERTa begin with 2.
    """

    return_position_ids: bool = True
    separator_id: int = IGNORED
    return_flash_attn_kwargs: bool = False
    return_seq_idx: bool = False
    position_ids_start: int = 0

    def __call__(
        self, features: Sequence[Any], return_tensors: str | None = None, separator_id: int | None = None
    ) -> Batch:
        """Return the row of these samples; the arguments override the collator's own."""
        if separator_id is None:
            return super().__call__(features, return_tensors)
        return replace(self, separator_id=separator_id)(features, return_tensors)

    def _collate(self, features: Sequence[Any], kind: str) -> Batch:
        columns = to_columns(features)
        if "input_ids" not in columns:
            raise DataError(f"there are no 'input_ids' to join in samples with the names {sorted(columns)}")
        _check_aligned(columns.get("labels", columns["input_ids"]), columns["input_ids"])
        ids = [as_list(value) for value in columns["input_ids"]]
        targets = [as_list(value) for value in columns["labels"]] if "labels" in columns else ids
        lengths = [len(row) for row in ids]
        rows = {"input_ids": ids, "labels": [[self.separator_id, *row[1:]] if row else [] for row in targets]}
        if self.return_position_ids:
            first = self.position_ids_start
            rows["position_ids"] = [list(range(first, first + length)) for length in lengths]
        batch = {name: _joined(values, np.int64, kind) for name, values in rows.items()}
        if self.return_seq_idx:
            batch["seq_idx"] = _joined([[index] * length for index, length in enumerate(lengths)], np.int32, kind)
        if self.return_flash_attn_kwargs:
            for name in ("q", "k"):
                bounds = np.cumsum([0, *lengths], dtype=np.int32)
                batch[f"cu_seq_lens_{name}"] = torch.from_numpy(bounds) if kind == "pt" else bounds
                batch[f"max_length_{name}"] = max(lengths)
        return batch


class PaddingCollator(BucketCollator):
    """The common base of the padding collators; each has these fields, in transformers' order."""

    tokenizer: Any
    padding: Any
    max_length: int | None
    pad_to_multiple_of: int | None

    def __post_init__(self) -> None:
        checked_kind(self.return_tensors)
        if checked_strategy(self.padding) != "max_length" and self.max_length is not None:
            warnings.warn(
                f"max_length={self.max_length} has no effect with padding={self.padding!r}: nothing is truncated here. "
                "Pass padding='max_length', or leave it out and truncate with the tokenizer.",
                stacklevel=3,  # the creator of the collator
            )

    def _padded(self, columns: Columns, kind: str) -> Batch:
        padding = Padding(checked_strategy(self.padding), self.max_length, self.pad_to_multiple_of, self.bucket_lengths)
        return padded_batch(self.tokenizer, columns, padding, kind)


@dataclass
class DataCollatorWithPadding(PaddingCollator):
    """Pads tokenized samples, and stacks everything else; a batch has the type that the tokenizer's `pad` returns.

    Attributes:
        tokenizer: something with `pad`, or with `pad_token_id`.
        padding: True or "longest", "max_length", False or "do_not_pad".
        max_length: what "max_length" pads to; the tokenizer's own limit if None. Nothing is truncated.
        pad_to_multiple_of: lengths are rounded up to it.
        return_tensors: "pt" or "np".
    """

    tokenizer: Any
    padding: Any = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"

    def _collate(self, features: Sequence[Any], kind: str) -> Batch:
        columns = to_columns(features)
        labels = take_labels(columns)
        batch = self._padded(columns, kind)
        if labels is not None:
            batch["labels"] = stack_labels(labels, kind)
        return batch


@dataclass
class DataCollatorForTokenClassification(PaddingCollator):
    """Pads tokenized samples, and their labels for each token with `label_pad_token_id`, on the same side.

    The other fields are those of `DataCollatorWithPadding`.
    """

    tokenizer: Any
    padding: Any = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    label_pad_token_id: int = IGNORED
    return_tensors: str = "pt"

    def _collate(self, features: Sequence[Any], kind: str) -> Batch:
        columns = to_columns(features)
        labels = take_labels(columns)
        main = main_name(self.tokenizer)
        if labels is not None:
            _check_aligned(labels, columns.get(main, labels))
        batch = self._padded(columns, kind)
        if labels is not None:
            width = batch[main].shape[1]
            rows = pad_lists(labels, width, self.label_pad_token_id, padding_side(self.tokenizer))
            batch["labels"] = stack_labels(rows, kind)
        return batch


@dataclass
class DataCollatorForSeq2Seq(PaddingCollator):
    """Pads inputs and labels to separate lengths, the labels with `label_pad_token_id`.

    The model's `prepare_decoder_input_ids_from_labels`, if it has one, makes "decoder_input_ids". The other fields are
    those of `DataCollatorWithPadding`.
    """

    tokenizer: Any
    model: Any = None
    padding: Any = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    label_pad_token_id: int = IGNORED
    return_tensors: str = "pt"

    def _collate(self, features: Sequence[Any], kind: str) -> Batch:
        columns = to_columns(features)
        labels = take_labels(columns)
        batch = self._padded(columns, kind)
        if labels is None:
            return batch
        stacked = stack_labels(self._padded_labels(labels), kind)
        batch["labels"] = stacked
        prepare = getattr(self.model, "prepare_decoder_input_ids_from_labels", None)
        if prepare is not None:
            decoder_ids = prepare(labels=torch.as_tensor(stacked))
            batch["decoder_input_ids"] = decoder_ids if kind == "pt" else decoder_ids.numpy(force=True)
        return batch

    def _padded_labels(self, labels: list[Any]) -> list[Any]:
        strategy = checked_strategy(self.padding)
        if strategy == "do_not_pad":
            return labels
        if not all(map(has_length, labels)):
            raise DataError("the labels must be lists of tokens, got single numbers")
        longest = max(map(len, labels))
        padding = Padding(multiple=self.pad_to_multiple_of, lengths=self.bucket_lengths)
        is_fixed = strategy == "max_length" and self.max_length is not None
        width = padding.rounded(self.max_length or 0) if is_fixed else padding.bucketed(longest)
        return pad_lists(labels, width, self.label_pad_token_id, padding_side(self.tokenizer))


@dataclass
class DataCollatorForMultipleChoice(PaddingCollator):
    """Pads the choices of all samples to the same length: (samples, choices, tokens).

    The tokenized values of a sample are lists with one entry per choice; the label is the index of the right one. Every
    sample must have the same number of choices. A batch is a dict. The fields are those of `DataCollatorWithPadding`.
    """

    tokenizer: Any
    padding: Any = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"

    def _collate(self, features: Sequence[Any], kind: str) -> Batch:
        columns = to_columns(features)
        labels = take_labels(columns)
        num_choices = _checked_num_choices(columns, main_name(self.tokenizer))
        flat = {name: [choice for value in values for choice in value] for name, values in columns.items()}
        padded = self._padded(flat, kind)
        batch = {name: stacked.reshape(-1, num_choices, *stacked.shape[1:]) for name, stacked in padded.items()}
        if labels is not None:
            batch["labels"] = stack_labels(labels, kind)
        return batch


def _check_aligned(labels: list[Any], ids: list[Any]) -> None:
    for index, (label, row) in enumerate(zip(labels, ids, strict=True)):
        num_labels = len(label) if has_length(label) else None
        if num_labels != len(row):
            given = "a single label" if num_labels is None else f"{num_labels} labels"
            raise DataError(
                f"sample {index} of the batch has {given} for {len(row)} tokens; there must be one for each. "
                "Spread the labels of words over their tokens first, with -100 for tokens that do not count."
            )


def _checked_num_choices(columns: Columns, main: str) -> int:
    if main not in columns:
        raise DataError(f"there is no {main!r} in samples with the names {sorted(columns)}")
    first = columns[main][0]
    num_choices = len(first) if has_length(first) else 0
    for name, values in columns.items():
        counts = [len(value) if has_length(value) else 0 for value in values]
        if set(counts) != {num_choices} or not num_choices:
            raise DataError(
                f"every sample must have the same number of choices, and {name!r} has {counts}, where {num_choices} "
                "were expected. Give one entry for each choice, or leave the column out."
            )
    return num_choices


def _stack_single_labels(labels: list[Any], kind: str) -> Any:
    if isinstance(labels[0], Tensor) and labels[0].numel() == 1:
        labels = [label.reshape(()) for label in labels]
    first = labels[0]
    is_integer = not has_length(first) and isinstance(first.item() if hasattr(first, "item") else first, int)
    stacked = stack("label", labels, kind)
    if isinstance(stacked, Tensor):
        return stacked.to(torch.int64 if is_integer else torch.float32)
    return stacked.astype(np.int64 if is_integer else np.float32)


def _as_float32(labels: Any) -> Any:
    if isinstance(labels, Tensor):
        return labels.float() if labels.is_floating_point() else labels
    return labels.astype(np.float32) if labels.dtype.kind == "f" else labels


def _joined(rows: list[list[int]], dtype: Any, kind: str) -> Any:
    row = np.array([[item for values in rows for item in values]], dtype=dtype)
    return torch.from_numpy(row) if kind == "pt" else row
