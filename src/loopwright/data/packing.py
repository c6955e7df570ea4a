"""Several short sequences in one row, each attending only to itself, to avoid padding.

`PackedDataset` groups samples into nearly full rows by their lengths alone, so the order of a run is still a function
of (seed, epoch, position), over rows. `PackingCollator` makes the rows: positions restart with each sequence, and the
attention mask is block-diagonal, so a sequence gets the same logits as in its own row.

Example:
    packed = PackedDataset(dataset, sample_lengths(dataset), capacity=512)
    trainer.train(packed, collate_fn=PackingCollator(512, pad_id=tokenizer.pad_token_id), ...)
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loopwright.data.columns import IGNORED, Batch, as_list
from loopwright.errors import ConfigError, DataError

NO_SEQUENCE = -1  # the sequence number of padding


def packed_groups(lengths: Sequence[int] | npt.NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Return the ids of each row by best fit: longest first, each into the fullest row with room for it.

    A sample longer than a row (`capacity` tokens) gets its own row, and is truncated by the collator.
    """
    if capacity < 1:
        raise ConfigError(f"the capacity of a row must be at least 1 token, got {capacity}")
    clipped = np.minimum(np.asarray(lengths, np.int64), capacity)
    groups: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (room, row), ascending: the first with enough room is the fullest
    for index in np.argsort(-clipped, kind="stable").tolist():
        length = int(clipped[index])
        place = bisect_left(open_rows, (length, -1))
        if place == len(open_rows):
            room, row = capacity, len(groups)
            groups.append([])
        else:
            room, row = open_rows.pop(place)
        groups[row].append(index)
        if room > length:
            insort(open_rows, (room - length, row))
    return groups


class PackedDataset:
    """Rows of several samples of a map-style dataset, by their lengths in tokens; an item is a list of samples."""

    def __init__(self, dataset: Any, lengths: Sequence[int] | npt.NDArray[np.int64], capacity: int) -> None:
        if len(lengths) != len(dataset):
            raise DataError(f"there are {len(lengths)} lengths for {len(dataset)} samples; there must be one for each")
        self._dataset = dataset
        self.groups = packed_groups(lengths, capacity)

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, index: int) -> list[Any]:
        return [self._dataset[each] for each in self.groups[index]]


class PackingCollator:
    """Makes a batch of rows of the same width from lists of samples.

    A batch has "input_ids", "labels", "position_ids" and "sequence_ids" of shape (rows, capacity), and by default the
    "attention_mask" of `block_diagonal_mask`. Every batch has the same shapes, so an update can be one CUDA graph.

    Args:
        capacity: tokens of a row; samples are truncated to it.
        is_shifted: the labels are already shifted. Otherwise the model shifts them, and the first of each sample is
            -100, since nothing precedes it.
        makes_mask: add the mask, for models that are called with the batch. Otherwise the caller creates it on the
            device, which saves the copy.
    """

    def __init__(self, capacity: int, pad_id: int = 0, *, is_shifted: bool = False, makes_mask: bool = True) -> None:
        self._capacity = capacity
        self._pad_id = pad_id
        self._is_shifted = is_shifted
        self._makes_mask = makes_mask

    def __call__(self, rows: Sequence[Sequence[Mapping[str, Any]]]) -> Batch:
        """Return the batch; a row is a list of samples with "input_ids", and "labels" if they differ."""
        shape = (len(rows), self._capacity)
        batch = {
            "input_ids": np.full(shape, self._pad_id, np.int64),
            "labels": np.full(shape, IGNORED, np.int64),
            "position_ids": np.zeros(shape, np.int64),
            "sequence_ids": np.full(shape, NO_SEQUENCE, np.int64),
        }
        for index, samples in enumerate(rows):
            for name, values in joined(samples, self._capacity, is_shifted=self._is_shifted).items():
                batch[name][index, : len(values)] = values
        tensors: dict[str, Any] = {name: torch.from_numpy(values) for name, values in batch.items()}
        if self._makes_mask:
            tensors["attention_mask"] = block_diagonal_mask(tensors.pop("sequence_ids"))
        return tensors


def joined(
    samples: Sequence[Mapping[str, Any]], capacity: int, *, is_shifted: bool = False
) -> dict[str, npt.NDArray[np.int64]]:
    """Return samples joined into a row, as `PackingCollator` does; DataError if they do not fit."""
    parts: dict[str, list[Any]] = {"input_ids": [], "labels": [], "position_ids": [], "sequence_ids": []}
    for number, sample in enumerate(samples):
        ids = np.array(as_list(sample["input_ids"])[:capacity], np.int64)
        labels = np.array(as_list(sample.get("labels", ids))[:capacity], np.int64)
        if not is_shifted:
            labels[:1] = IGNORED
        parts["input_ids"].append(ids)
        parts["labels"].append(labels)
        parts["position_ids"].append(np.arange(len(ids)))
        parts["sequence_ids"].append(np.full(len(ids), number))
    row = {name: np.concatenate(values) for name, values in parts.items()}
    if len(row["input_ids"]) > capacity:
        raise DataError(
            f"the samples of a row have {len(row['input_ids'])} tokens, and it has room for {capacity}: they were "
            "packed by other lengths than they have now"
        )
    return row


def row_bounds(lengths: Sequence[int], capacity: int, longest: int, number: int) -> npt.NDArray[np.int64]:
    """Return the bounds of a row's samples as `segment_bounds` takes them: `number` of them, from 0 to `capacity`.

    Padding is divided into segments of up to `longest` tokens, and equal bounds at the end are segments of none.
    """
    ends = np.cumsum([0, *lengths])
    padding = np.arange(ends[-1] + longest, capacity, longest)
    return np.pad(np.append(ends, padding), (0, number - len(ends) - len(padding)), constant_values=capacity)


def most_bounds(rows: Sequence[npt.NDArray[np.int64]], capacity: int, longest: int) -> int:
    """Return how many bounds hold for each of these rows, given as the lengths of their samples."""
    return max((1 + len(row) + -(-(capacity - int(row.sum())) // longest) for row in rows), default=1)


def block_diagonal_mask(sequence_ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the additive attention mask: 0 for the token itself and earlier tokens of its sequence.

    `sequence_ids` (rows, tokens) has the number of each token's sequence in its row. The mask has the shape (rows, 1,
    tokens, tokens) and the model's dtype, as transformers' models take it for "eager" and "sdpa".
    """
    width = sequence_ids.shape[1]
    is_same = sequence_ids[:, None, :, None] == sequence_ids[:, None, None, :]
    may_look = is_same & torch.ones(width, width, dtype=torch.bool, device=sequence_ids.device).tril()
    return torch.zeros_like(may_look, dtype=dtype).masked_fill_(~may_look, torch.finfo(dtype).min)
