"""A dataset of conversations for `Trainer` and `hf.Trainer`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from loopwright.data.chats.encoder import ChatEncoder
from loopwright.data.results import results_of
from loopwright.errors import InputError
from loopwright.quantities import counted
from loopwright.sources.chats import Chat, read_chat
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
        for encoded in results_of(lambda index: self.encoder(_chat_at(rows, index)), len(rows)):
            if encoded is None:
                self.num_dropped_rows += 1
                continue
            self._first_text = self._first_text or encoded.text
            self.num_dropped_texts += len(encoded.dropped)
            self._samples.append(np.array([encoded.input_ids, encoded.labels], np.int32))
        if not self._samples:
            raise self._nothing_left(rows)
        self.encoder.check([each[1] for each in self._samples], self._first_text)

    def _nothing_left(self, rows: Sequence[Mapping[str, Any]]) -> InputError:
        """Return the error for no rows, or rows that are all too long, with the fixes that leave some."""
        if not len(rows):
            return InputError("data.no_rows", "there are no conversations", fix="give rows with conversations")
        chats = [_chat_at(rows, index) for index in range(len(rows))]
        longest = max(len(self.encoder.whole(each).input_ids) for each in chats)
        fixes = ["--overlong truncate"] if any(map(self.encoder.truncated, chats)) else []
        what = f"nothing is left of {counted(len(rows), 'conversation')} in {self.encoder.max_length:,} tokens"
        saw = [f"the longest has {longest:,} tokens", f"overlong: {self.encoder.overlong}"]
        return InputError("model.length", what, saw=saw, fix="   or   ".join([*fixes, f"--max_length {longest}"]))

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        ids, labels = self._samples[index].tolist()
        return {"input_ids": ids, "labels": labels}


def _chat_at(rows: Sequence[Mapping[str, Any]], index: int) -> Chat:
    is_arrow = type(rows).__module__.partition(".")[0] == "datasets"
    return read_chat(as_plain(rows[index]) if is_arrow else rows[index], where=f"row {index + 1:,}")
