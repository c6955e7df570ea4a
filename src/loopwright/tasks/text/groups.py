"""Samples of several texts each: the choices of a question, the two texts of a pair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from loopwright.tasks.text.models import PadsToBuckets


class GroupCollator(PadsToBuckets):
    """Makes batches of shape (samples, texts, tokens); "is_text" is false for copies that pad a sample's texts."""

    def __init__(self, tokenizer: Any, pad_to_multiple_of: int | None = None) -> None:
        from loopwright.data.collators import DataCollatorForMultipleChoice

        self._pad = DataCollatorForMultipleChoice(tokenizer, pad_to_multiple_of=pad_to_multiple_of)

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        import torch

        counts = torch.tensor([len(sample["input_ids"]) for sample in features])
        most = int(counts.max())
        batch = dict(self._pad([_filled(sample, most) for sample in features]))
        batch["is_text"] = torch.arange(most) < counts[:, None]
        batch["position"] = torch.tensor([sample["position"] for sample in features])
        return batch


def _filled(sample: Mapping[str, Any], most: int) -> dict[str, Any]:
    return {
        name: [*value, *[value[0]] * (most - len(value))] if isinstance(value, list) else value
        for name, value in sample.items()
        if name != "position"
    }
