"""From samples to columns, and from columns to tensors or arrays: shared by all collators.

A column is the list of all samples' values under one name. Nothing here modifies a sample.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from loopwright.data.buckets import bucket_length
from loopwright.errors import ConfigError, DataError

Batch = MutableMapping[str, Any]
Columns = dict[str, list[Any]]

IGNORED = -100  # the label that losses ignore

_LABEL_NAMES = ("labels", "label", "label_ids")
_MOST_SHOWN = 8
_UNLIMITED = 10**20  # a tokenizer without a limit reports a number beyond this


class Collator(ABC):
    """Makes a batch of a list of samples; a subclass may override `torch_call` or `numpy_call`, as in transformers."""

    return_tensors: str

    def __call__(self, features: Sequence[Any], return_tensors: str | None = None) -> Batch:
        """Return the batch of these samples; the argument overrides the collator's own kind."""
        kind = checked_kind(self.return_tensors if return_tensors is None else return_tensors)
        return self.torch_call(features) if kind == "pt" else self.numpy_call(features)

    def torch_call(self, features: Sequence[Any]) -> Batch:
        """Return a batch of torch tensors; called for return_tensors="pt"."""
        return self._collate(features, "pt")

    def numpy_call(self, features: Sequence[Any]) -> Batch:
        """Return a batch of numpy arrays; called for return_tensors="np"."""
        return self._collate(features, "np")

    @abstractmethod
    def _collate(self, features: Sequence[Any], kind: str) -> Batch:
        """Return the batch as "pt" or "np"."""


class BucketCollator(Collator):
    """A collator that pads to the longest sample of a batch or to the next bucket length."""

    # Ascending; if set, "longest" pads to the next of these, or further for a longer sample. Not a field, so that the
    # constructor has the arguments of transformers.
    bucket_lengths: Sequence[int] | None = None
    tokenizer: Any


def to_columns(features: Sequence[Any]) -> Columns:
    """Return the columns of samples: mappings, dataclasses, or objects with attributes.

    Columns of text, or with only None, are left out: they cannot become tensors. All samples must have the same names.
    """
    if not len(features):
        raise DataError("a batch needs at least one sample; check the sampler, or the filter of the data")
    rows = [_as_mapping(feature) for feature in features]
    names = list(rows[0].keys())
    if not names:
        raise DataError("the samples are empty: all their columns were removed, or the dataset returns empty dicts")
    expected = set(names)
    for index, row in enumerate(rows):
        if len(row) != len(expected) or not expected.issuperset(row.keys()):
            raise DataError(
                f"the samples of a batch must have the same names: sample 0 has {sorted(expected)}, "
                f"sample {index} has {sorted(row.keys())}"
            )
    columns = {}
    for name in names:
        values = [row[name] for row in rows]
        num_missing = sum(value is None for value in values)
        if 0 < num_missing < len(values):
            index = next(i for i, value in enumerate(values) if value is None)
            raise DataError(
                f"{name!r} is None in sample {index} of the batch ({num_missing} of {len(values)} in all), but not in "
                "others. Give every sample a value, or leave out the column."
            )
        if not num_missing and not _is_text(values[0]):
            columns[name] = values
    return columns


def take_labels(columns: Columns) -> list[Any] | None:
    """Remove and return the labels ("labels", else "label", else "label_ids") of the columns; None without any."""
    found = [columns.pop(name, None) for name in _LABEL_NAMES]
    return next((values for values in found if values is not None), None)


def _as_mapping(feature: Any) -> Mapping[str, Any]:
    if isinstance(feature, Mapping):
        return feature
    if dataclasses.is_dataclass(feature) and not isinstance(feature, type):
        return {field.name: getattr(feature, field.name) for field in dataclasses.fields(feature)}
    fields = getattr(feature, "__dict__", None)
    if not fields:  # none, or empty, as for a tensor
        raise DataError(
            f"samples must be dicts, dataclasses or objects with attributes, got {type(feature).__name__}. "
            "Return {'name': value, ...} from the dataset, or pass your own collator."
        )
    return fields  # type: ignore[no-any-return]


def _is_text(value: Any) -> bool:
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    return isinstance(value, (str, bytes))


def checked_kind(return_tensors: str) -> str:
    """Return "pt" or "np"; raise a ConfigError for anything else."""
    if return_tensors not in ("pt", "np"):
        raise ConfigError(f"return_tensors must be 'pt' (torch tensors) or 'np' (numpy arrays), got {return_tensors!r}")
    return return_tensors


def stack(name: str, values: Any, kind: str) -> Any:
    """Return one tensor ("pt") or array ("np") of a column's values: tensors, arrays, numbers, lists of them.

    Tensors and arrays keep their dtype. Python integers become int64, floats torch's default dtype or float64. Values
    that differ in shape or are not numbers raise a DataError.
    """
    is_python = not isinstance(values[0], (Tensor, np.ndarray, np.generic))
    try:
        if isinstance(values[0], Tensor):
            tensor = torch.stack([torch.as_tensor(value) for value in values])
            return tensor if kind == "pt" else tensor.numpy(force=True)
        array = np.asarray(values) if is_python else np.stack([np.asarray(value) for value in values])
    except (ValueError, TypeError, RuntimeError) as error:
        shown = ", ".join(_described(value) for value in values[:_MOST_SHOWN])
        more = ", ..." if len(values) > _MOST_SHOWN else ""
        raise DataError(
            f"the values of {name!r} differ and do not fit into one tensor: {shown}{more}. Pad them "
            "(DataCollatorWithPadding pads a tokenizer's output, DataCollatorForTokenClassification and "
            "DataCollatorForSeq2Seq also pad labels), truncate them in the dataset, or leave out the column."
        ) from error
    if array.dtype.kind not in "biufc":
        raise DataError(
            f"the values of {name!r} ({type(values[0]).__name__}) are not numbers and cannot become a tensor. Convert "
            "them to numbers in the dataset, or leave out the column."
        )
    if array.dtype.kind == "i" and is_python:
        array = array.astype(np.int64, copy=False)  # numpy 1 on Windows makes int32
    if kind == "np":
        return array
    tensor = torch.from_numpy(array)
    return tensor.to(torch.get_default_dtype()) if is_python and array.dtype == np.float64 else tensor


def stack_labels(labels: Any, kind: str) -> Any:
    """Return one tensor or array of labels; integers of any size become int64, as losses expect."""
    stacked = stack("labels", labels, kind)
    if isinstance(stacked, Tensor):
        is_integer = not (stacked.is_floating_point() or stacked.is_complex() or stacked.dtype == torch.bool)
        return stacked.long() if is_integer else stacked
    return stacked.astype(np.int64) if stacked.dtype.kind in "iu" else stacked


def _described(value: Any) -> str:
    if isinstance(value, (Tensor, np.ndarray)):
        return f"shape {tuple(value.shape)}"
    if isinstance(value, (list, tuple)):
        is_nested = any(isinstance(item, (list, tuple)) for item in value)
        lengths = [len(item) if isinstance(item, (list, tuple)) else 1 for item in value]
        return f"lengths {lengths}" if is_nested else f"length {len(value)}"
    return f"a single {type(value).__name__}"


class Padding(NamedTuple):
    """How to pad."""

    strategy: str = "longest"  # "longest", "max_length" or "do_not_pad"
    max_length: int | None = None  # the length of "max_length"; None is the tokenizer's `model_max_length`
    multiple: int | None = None  # lengths are rounded up to it
    # Ascending; "longest" pads to the next of these, and to a multiple only beyond them all.
    lengths: Sequence[int] | None = None

    def length(self, rows: Sequence[Any], tokenizer: Any) -> int:
        """Return the length to pad these rows to; raise a ConfigError if none is known."""
        if self.strategy == "longest":
            return self.bucketed(max(map(len, rows)))
        length = self.max_length if self.max_length is not None else getattr(tokenizer, "model_max_length", None)
        if length is None or length > _UNLIMITED:
            raise ConfigError("padding='max_length' needs a length, and the tokenizer has none: pass max_length")
        return self.rounded(length)

    def rounded(self, length: int) -> int:
        """Return the length, rounded up to the multiple."""
        return length if self.multiple is None else -(-length // self.multiple) * self.multiple

    def bucketed(self, length: int) -> int:
        """Return the next bucket length, or the rounded length beyond all of them."""
        is_within = bool(self.lengths) and length <= self.lengths[-1]  # type: ignore[index] # there is one
        return bucket_length(length, self.lengths or ()) if is_within else self.rounded(length)


def checked_strategy(padding: Any) -> str:
    """Return "longest", "max_length" or "do_not_pad" for a transformers argument; raise a ConfigError for others."""
    if isinstance(padding, bool):
        return "longest" if padding else "do_not_pad"
    name = getattr(padding, "value", padding)
    if name not in ("longest", "max_length", "do_not_pad"):
        raise ConfigError(f"padding must be True, False, 'longest', 'max_length' or 'do_not_pad', got {padding!r}")
    return str(name)


def padded_batch(tokenizer: Any, columns: Columns, padding: Padding, kind: str) -> Batch:
    """Return the columns padded by the tokenizer's rules, and stacked; the columns stay unchanged.

    The tokenizer's or feature extractor's own `pad` is used if there is one. Otherwise ids, attention mask, token types
    and special tokens mask are padded here. A missing attention mask is added if the tokenizer's models take one.
    Numbers and tables are not padded. `columns` has no labels; `kind` is "pt" or "np".
    """
    main = main_name(tokenizer)
    if main not in columns:
        raise DataError(
            f"there is no {main!r} to pad in samples with the names {sorted(columns)}. Tokenize the dataset first, and "
            "keep all columns of the tokenizer."
        )
    sequences = {
        name: values
        for name, values in columns.items()
        if name == main or (has_length(values[0]) and getattr(values[0], "ndim", 1) == 1)
    }
    if main == "input_ids":
        sequences = {name: _integers_as_lists(values) for name, values in sequences.items()}
        padding = _checked_pad_token(tokenizer, sequences[main], padding)
    if callable(getattr(tokenizer, "pad", None)):
        strategy, max_length, multiple, lengths = padding
        if lengths and strategy == "longest":
            strategy, max_length, multiple = "max_length", padding.length(sequences[main], tokenizer), None
        limit = max_length if strategy == "max_length" else None
        batch = tokenizer.pad(sequences, padding=strategy, max_length=limit, pad_to_multiple_of=multiple)
    else:
        batch = _pad_here(tokenizer, sequences, padding)
    for name in columns.keys() - sequences.keys():
        batch[name] = columns[name]
    for name in list(batch.keys()):
        batch[name] = stack(name, batch[name], kind)
    return batch  # type: ignore[no-any-return]


def pad_lists(values: Sequence[Any], length: int, fill: Any, side: str) -> list[list[Any]]:
    """Return each sequence as a new list, padded to the length on this side; longer ones keep their length."""
    rows = [as_list(value) for value in values]
    if side == "left":
        return [[fill] * (length - len(row)) + row for row in rows]
    return [row + [fill] * (length - len(row)) for row in rows]


def padding_side(tokenizer: Any) -> str:
    """Return the side the tokenizer pads on, "right" by default."""
    return str(getattr(tokenizer, "padding_side", "right"))


def main_name(tokenizer: Any) -> str:
    """Return the name of the tokenizer's main input, whose length decides the padding."""
    return str(next(iter(getattr(tokenizer, "model_input_names", None) or ()), "input_ids"))


def has_length(value: Any) -> bool:
    """Return whether this is a sequence, and not a single number."""
    return value.ndim > 0 if isinstance(value, (Tensor, np.ndarray)) else isinstance(value, (list, tuple))


def as_list(value: Any) -> list[Any]:
    """Return the items of a sequence, a tensor or an array as a new list."""
    return value.tolist() if isinstance(value, (Tensor, np.ndarray)) else list(value)


def _pad_here(tokenizer: Any, sequences: Columns, padding: Padding) -> dict[str, Any]:
    main = main_name(tokenizer)
    padded = dict(sequences)
    if "attention_mask" in getattr(tokenizer, "model_input_names", ("attention_mask",)):
        padded.setdefault("attention_mask", [[1] * len(row) for row in sequences[main]])
    if padding.strategy == "do_not_pad":
        return padded
    fills = {
        main: tokenizer.pad_token_id,
        "attention_mask": 0,
        "token_type_ids": getattr(tokenizer, "pad_token_type_id", 0),
        "special_tokens_mask": 1,
    }
    length = padding.length(sequences[main], tokenizer)
    for name, fill in fills.items():
        if name in padded:
            padded[name] = pad_lists(padded[name], length, fill, padding_side(tokenizer))
    return padded


def _checked_pad_token(tokenizer: Any, ids: list[Any], padding: Padding) -> Padding:
    """Return how to pad: not at all if nothing is short, so that a tokenizer without a pad token works."""
    if padding.strategy == "do_not_pad":
        return padding
    if getattr(tokenizer, "pad_token_id", None) is not None:
        padding.length(ids, tokenizer)
        return padding
    length = padding._replace(lengths=None).length(ids, tokenizer)
    if any(len(row) < length for row in ids):
        raise ConfigError(
            f"samples of {min(map(len, ids))} to {max(map(len, ids))} tokens must be padded to {length}, and the "
            f"tokenizer ({type(tokenizer).__name__}) has no pad token. Set one: tokenizer.pad_token = "
            "tokenizer.eos_token, or tokenizer.add_special_tokens({'pad_token': '[PAD]'}) and "
            "model.resize_token_embeddings(len(tokenizer))."
        )
    return Padding("do_not_pad")


def _integers_as_lists(values: list[Any]) -> list[Any]:
    """Return token columns as lists, as tokenizers expect; float vectors stay unchanged."""
    first = values[0]
    is_float = isinstance(first, Tensor) and first.is_floating_point()
    if is_float or (isinstance(first, np.ndarray) and first.dtype.kind not in "biu"):
        return values
    return [as_list(value) for value in values]
