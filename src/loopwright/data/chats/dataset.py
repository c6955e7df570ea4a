"""A dataset of conversations for `Trainer` and `hf.Trainer`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from loopwright.data.chats.encoder import ChatEncoder
from loopwright.sources.chats import read_chat
from loopwright.sources.values import as_plain


class ChatDataset:
    """Conversations of any row format as samples with "input_ids" and "labels".

    Each row is encoded once, when the dataset is made, so bad rows are found before training starts.

    Args:
        rows: a sequence of dicts: `messages`, `conversations`, `prompt`/`completion` or `instruction`/`output`.
        tokenizer: a fast tokenizer of transformers.
        chat_template: a built-in name, a file or a Jinja text; None for the tokenizer's own template.
        train_on: "assistant" (each of its turns), "last", "completion" or "all".
        max_length: the most tokens of a conversation.
        overlong: "refuse", "truncate" or "drop" longer ones.

    Attributes:
        encoder: the `ChatEncoder`; `encoder.end_of_turn` should become the EOS of generation.
        num_dropped_rows: how many rows were too long, and left out.
        num_dropped_texts: how many texts of the assistant the template left out, such as earlier thinking.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        tokenizer: Any,
        *,
        chat_template: str | None = None,
        train_on: str = "assistant",
        max_length: int | None = None,
        overlong: str = "refuse",
    ) -> None:
        self.encoder = ChatEncoder(
            tokenizer, chat_template=chat_template, train_on=train_on, max_length=max_length, overlong=overlong
        )
        self.num_dropped_rows, self.num_dropped_texts = 0, 0
        self._samples: list[npt.NDArray[np.int32]] = []  # ids and labels
        self._first_text = ""
        is_arrow = type(rows).__module__.partition(".")[0] == "datasets"
        for index in range(len(rows)):
            row = as_plain(rows[index]) if is_arrow else rows[index]
            encoded = self.encoder(read_chat(row, where=f"row {index + 1:,}"))
            if encoded is None:
                self.num_dropped_rows += 1
                continue
            self._first_text = self._first_text or encoded.text
            self.num_dropped_texts += len(encoded.dropped)
            self._samples.append(np.array([encoded.input_ids, encoded.labels], np.int32))
        labels = [each[1] for each in self._samples]
        self.encoder.check(labels, self._first_text, f" ({self.num_dropped_rows:,} too long)")

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        ids, labels = self._samples[index].tolist()
        return {"input_ids": ids, "labels": labels}
