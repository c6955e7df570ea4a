"""Pairs of answers as samples: tokens, datasets, batches, and the log-probabilities of answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from loopwright.errors import InputError
from loopwright.quantities import agreeing, counted
from loopwright.sources.chats import Chat
from loopwright.sources.chats.pairs import Pair
from loopwright.tasks.base import Job, Rows
from loopwright.tasks.data import KeptRows, RowDataset
from loopwright.tasks.text import conversations as chats
from loopwright.tasks.text import language_model as language
from loopwright.tasks.text import models as text

PARTS = ("prompt", "chosen", "rejected")
_FIX = "correct this row in the data file   or   --chat_template chatml"
_MOST_LOGITS = 2**26  # maximum logits that an evaluation holds at a time


class PairEncoder:
    """Encodes a pair: both answers after their prompt, and the length of the prompt that they have in common.

    Texts are tokenized as they are, with the end token; messages by the chat template. A long answer loses its end.
    `end` is the token that ends an answer of messages; None for the last one.
    """

    def __init__(self, tokenizer: Any, max_length: int | None = None, end: int | None = None) -> None:
        self.tokenizer, self.max_length, self.end = tokenizer, max_length, end
        self._write = chats.TemplateTokens(tokenizer)

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        pair, answers, loses = row["pair"], (row["pair"].chosen, row["pair"].rejected), False
        if pair.is_chat:
            _, prompt = self._write(Chat(pair.prompt, pair.tools), prompt=True)
            wholes = [Chat([*pair.prompt, *each], pair.tools) for each in answers]
            written = [self._write(each) for each in wholes]
            both = [self._ended(ids) for _, ids in written]
            loses = any(self._write.loses(each, rendered) for each, (rendered, _) in zip(wholes, written, strict=True))
        else:
            end = self.tokenizer.eos_token or ""
            whole = [pair.prompt + answer + ("" if answer.endswith(end) else end) for answer in answers]
            prompt, *both = (self.tokenizer(each, verbose=False)["input_ids"] for each in (pair.prompt, *whole))
        start = min(_num_common(prompt, ids) for ids in both)
        if both[0] == both[1] or start == min(map(len, both)):
            what = "the tokenizer or its chat template leaves nothing of an answer, or makes both answers the same"
            texts = {"prompt": shown(pair.prompt)}
            texts |= {name: self.tokenizer.decode(both[place][start:]) for place, name in enumerate(PARTS[1:])}
            saw = [f"{name}: {each!r}"[:200] for name, each in texts.items()]
            raise InputError("data.pair", what, saw=saw, fix=_FIX)
        if self.max_length is not None and start >= self.max_length:
            what = f"a prompt has {start} tokens, and --max_length {self.max_length} leaves none for the answers"
            raise InputError("model.length", what, fix=f"--max_length {max(map(len, both))}")
        ids = [each[: self.max_length] for each in both]
        if ids[0] == ids[1]:
            what = f"the answers are the same in the first {self.max_length} tokens, which --max_length leaves"
            raise InputError("model.length", what, fix=f"--max_length {max(map(len, both))}")
        return {"input_ids": ids, "start": start, "is_unlike": len(prompt) > start, "loses": loses}

    def _ended(self, ids: list[int]) -> list[int]:
        return ids[: len(ids) - ids[::-1].index(self.end)] if self.end is not None and self.end in ids else ids


class PairDataset(RowDataset):
    """Pairs, encoded once; `reference` has the log-probabilities of the reference model, if the loss needs them."""

    def __init__(self, rows: Rows, encode: PairEncoder, max_length: int, overlong: str, name: str = "training") -> None:
        from loopwright.data.results import results_of

        self.reference: Any = None
        self._name = name  # of the split, for errors and notes
        self._pairs: list[tuple[int, list[Any]]] = []
        self._num_unlike = self._num_lost = 0
        kept, long = [], {}
        for position, found in enumerate(results_of(partial(_encoded, rows, encode), len(rows))):
            both = [np.array(ids[:max_length], np.int32) for ids in found["input_ids"]]
            if (longest := max(map(len, found["input_ids"]))) > max_length:
                long[position] = longest
                if overlong != "truncate" or found["start"] >= max_length or np.array_equal(both[0], both[1]):
                    continue
            kept.append(position)
            self._num_unlike += found["is_unlike"]
            self._num_lost += found["loses"]
            self._pairs.append((found["start"], both))
        self.num_long, self.num_dropped, self._size = len(long), len(rows) - len(kept), len(rows)
        if long and (overlong == "refuse" or not kept):
            raise _too_long(rows, name, long, max_length, overlong)
        super().__init__(KeptRows(rows, kept))

    def features(self, position: int) -> dict[str, Any]:
        start, both = self._pairs[position]
        return {"input_ids": [ids.tolist() for ids in both], "start": start}

    def __getitem__(self, position: int) -> dict[str, Any]:
        found = super().__getitem__(position)
        return found if self.reference is None else {**found, "reference": self.reference[position]}

    def notes(self, max_length: int) -> list[str]:
        notes, size = [], counted(self._size, "pair")
        if self.num_long:
            cut = self.num_long - self.num_dropped
            done = f"{f'{cut:,} truncated, ' if cut else ''}{self.num_dropped:,} left out"
            is_long = f"{agreeing(self.num_long, 'is')} longer than {max_length} tokens"
            notes.append(f"{self._name}: {self.num_long:,} of {size} {is_long}: {done}")
        if self._num_unlike:
            where = f"{self._name}: in {self._num_unlike:,} of {size}"
            notes.append(f"{where} the prompt has other tokens before an answer: the answer begins where they differ")
        if self._num_lost:
            what = f"{self._name}: the template drops texts or tools of {self._num_lost:,} of {size}"
            notes.append(f"{what}, such as a system message or earlier thinking")
        return notes


def _encoded(rows: Rows, encode: PairEncoder, position: int) -> dict[str, Any]:
    try:
        return encode(rows[position])
    except InputError as error:
        error.what = f"{_place(rows, position)}: {error.what}"
        raise


def _place(rows: Rows, position: int) -> str:
    return str(rows.place(position)) if hasattr(rows, "place") else f"row {position}"


def _too_long(rows: Rows, name: str, long: Mapping[int, int], max_length: int, overlong: str) -> InputError:
    position, longest = next(iter(long.items()))
    verb = agreeing(len(long), "is")
    what = f"{len(long):,} of {counted(len(rows), f'{name} pair')} {verb} longer than {max_length} tokens"
    saw = [f"{_place(rows, position)}: {longest:,} tokens", f"the longest has {max(long.values()):,}"]
    others = (f"--overlong {each}" for each in ("truncate", "drop") if overlong == "refuse")
    return InputError("model.length", what, saw=saw, fix="   or   ".join(others) or "leave out --max_length")


class PairCollator:
    """Makes batches of shape (pairs, 2, tokens); "is_answer" marks the tokens whose log-probability counts."""

    bucket_lengths: Sequence[int] | None = None

    def __init__(self, pad_id: int | None, multiple: int | None = None) -> None:
        self._pad_id = pad_id or 0
        self._prompts = language.PaddingCollator("left", pad_id=pad_id)
        self._multiple = multiple or 1

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        import torch

        from loopwright.data.buckets import bucket_length

        if "text" in features[0]:
            return self._prompts(features)
        longest = max(len(ids) for each in features for ids in each["input_ids"])
        width = -(-longest // self._multiple) * self._multiple
        width = width if self.bucket_lengths is None else bucket_length(longest, self.bucket_lengths)
        shape = len(features), 2, width
        ids, mask, is_answer = np.full(shape, self._pad_id), np.zeros(shape, np.int64), np.zeros(shape, np.bool_)
        for index, each in enumerate(features):
            for place, tokens in enumerate(each["input_ids"]):
                ids[index, place, : len(tokens)] = tokens
                mask[index, place, : len(tokens)] = 1
                is_answer[index, place, each["start"] : len(tokens)] = True
        arrays = {"input_ids": ids, "attention_mask": mask, "is_answer": is_answer}
        if "reference" in features[0]:
            arrays["reference"] = np.stack([each["reference"] for each in features])
        arrays["position"] = np.array([each["position"] for each in features])
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


def answer_log_probs(model: Any, batch: Mapping[str, Any], job: Job | None = None) -> tuple[Any, Any]:
    """Return the log-probability of each answer, a sum over its tokens, and their number: (pairs, 2) each.

    Logits never exist for a whole batch: without gradients a few rows are computed at a time, and in the training of
    `job` a few tokens.
    """
    import torch

    ids, mask, is_answer = (batch[name].flatten(0, 1) for name in ("input_ids", "attention_mask", "is_answer"))
    labels = ids.masked_fill(~is_answer, text.IGNORED)
    num_tokens = is_answer.sum(-1).view(-1, 2)
    if torch.is_grad_enabled() and job is not None:
        inputs = {"input_ids": ids, "attention_mask": mask}
        shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=text.IGNORED)
        losses = language.training_loss(job, model, inputs, shifted, reduction="none", use_cache=False)
        return -losses.sum(-1).view(-1, 2), num_tokens
    step = max(1, _MOST_LOGITS // (ids.shape[1] * language.num_embeddings(getattr(model, "module", model))))
    parts = []
    for start in range(0, len(ids), step):
        rows = slice(start, start + step)
        logits = model(input_ids=ids[rows], attention_mask=mask[rows], use_cache=False).logits
        parts.append(-text.token_losses(logits[:, :-1], labels[rows, 1:]).sum(-1))
    return torch.cat(parts).view(-1, 2), num_tokens


def shown(turns: Any) -> str:
    if isinstance(turns, str):
        return turns
    return "\n".join(f"{each['role']}: {chats.content_of(each)}" for each in turns)


def last(turns: Any) -> str:
    return turns if isinstance(turns, str) else chats.content_of(turns[-1])


def as_messages(pair: Pair) -> Pair:
    """Return a pair of texts as messages: a question and two answers."""
    chosen, rejected = ([{"role": "assistant", "content": each}] for each in (pair.chosen, pair.rejected))
    return Pair([{"role": "user", "content": pair.prompt}], chosen, rejected)


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    unlike = (place for place, (mine, its) in enumerate(zip(one, other, strict=False)) if mine != its)
    return next(unlike, min(len(one), len(other)))
