"""Conversations as features: encoded with their masks, as prompts, as marked text, and as answers of a model."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from loopwright.errors import InputError
from loopwright.quantities import agreeing, counted
from loopwright.sources.chats import Chat
from loopwright.tasks.base import Job, Rows
from loopwright.tasks.data import KeptRows, RowDataset
from loopwright.tasks.text import causal_lm
from loopwright.tasks.text import language_model as language
from loopwright.tasks.text import models as text

Ids = npt.NDArray[np.int32]


class Conversations(RowDataset):
    """Encoded rows, kept in memory, with the labels of the next token.

    Args:
        encode: encodes a conversation, and says what happens to one that is too long.
        name: of the split, for errors and notes.
        bad_rows: "refuse" or "drop" rows that cannot be trained on, such as those that the template refuses.
        limit: the most tokens that the model takes.
    """

    def __init__(
        self,
        rows: Rows,
        encode: Any,
        name: str = "training",
        *,
        bad_rows: str = "refuse",
        limit: int | None = None,
    ) -> None:
        from loopwright.data.results import results_of

        kept, ids, labels = list[int](), list[Ids](), list[Ids]()
        long, bad, first = dict[int, int](), list[str](), ""
        self._lost: Counter[str] = Counter()
        self._name = name
        problem: InputError | None = None
        for index, (encoded, length, error) in enumerate(results_of(partial(_encoded, rows, encode), len(rows))):
            if length is not None:
                long[index] = length
            if error is not None:
                problem = problem or error
                bad.append(error.what)
            if problem is not None and bad_rows == "refuse" and (encoded is not None or kept or long):
                problem.fix = f"--bad_rows drop   or   {problem.fix}"
                raise problem
            if encoded is not None:
                kept.append(index)
                first = first or encoded.text
                ids.append(np.array(encoded.input_ids, np.int32))
                labels.append(np.array(encoded.labels, np.int32))
                self._lost.update([*["assistant"] * bool(encoded.dropped), *encoded.ignored])
        if long and (encode.overlong == "refuse" or not kept):
            raise _too_long(rows, name, encode, long, kept, limit)
        if problem is not None and not kept:
            raise problem
        num_cut = sum(index in long for index in kept)
        too_long = f"longer than {encode.max_length or 0:,} tokens (--overlong)"
        self._reduced = [(num_cut, f"truncated: {too_long}"), (len(long) - num_cut, f"dropped: {too_long}")]
        self._reduced.append((len(bad), f"dropped (--bad_rows), the first because {bad[0]}" if bad else ""))
        super().__init__(KeptRows(rows, kept))
        self._ends = np.cumsum([len(each) for each in ids])
        self._ids, self._labels = np.concatenate(ids), np.concatenate(labels)
        encode.check(labels, first)
        self._tail = _trained_tail(encode, labels[0]) if name == "training" else ""

    @property
    def targets(self) -> tuple[Ids, Ids]:
        """The trained tokens of all rows, and the token before each."""
        is_target = self._labels != text.IGNORED
        is_target[np.concatenate([[0], self._ends[:-1]])] = False  # nothing precedes the first token of a row
        places = np.flatnonzero(is_target)
        return self._labels[places], self._ids[places - 1]

    def features(self, position: int) -> dict[str, Any]:
        start, end = (int(self._ends[position - 1]) if position else 0), int(self._ends[position])
        ids, labels = (each[start:end].astype(np.int64) for each in (self._ids, self._labels))
        return {"input_ids": ids[:-1], "labels": labels[1:]}

    def notes(self) -> list[str]:
        """Describe what was lost: conversations that are bad or too long, and texts that the template drops."""
        noun = f"{self._name} conversation"
        found = [f"{counted(number, noun)} {what}" for number, what in self._reduced if number]
        for whose, number in self._lost.items():
            what = "the tools" if whose == "tools" else f"texts of the {whose}"
            more = ", such as earlier thinking" if whose == "assistant" else ""
            found.append(f"the template drops {what} in {counted(number, noun)}{more}")
        if self._tail:
            what = "which is trained, as in trl, but never generated; generation marks leave it out"
            found.append(f"the template writes {self._tail!r} after the end of a turn, {what}")
        return found


def _encoded(rows: Rows, encode: Any, index: int) -> tuple[Any, int | None, InputError | None]:
    """Return an encoded row, its length if it is too long, and the error of a bad one."""
    length = None
    try:
        chat = placed_chat(rows, index)
        encoded = encode.whole(chat)
        if encode.max_length is not None and len(encoded.input_ids) > encode.max_length:
            length = len(encoded.input_ids)
            encoded = encode.truncated(chat) if encode.overlong == "truncate" else None
        return encoded, length, None
    except InputError as error:
        return None, length, error


def _trained_tail(encode: Any, labels: Ids) -> str:
    """Return what is trained after the end-of-turn token."""
    ends = np.flatnonzero(labels == encode.end_of_turn)
    if not len(ends) or encode.train_on == "all":
        return ""
    after = labels[ends[-1] + 1 :]
    return str(encode.tokenizer.decode(after[np.cumsum(after == text.IGNORED) == 0]))


def _too_long(
    rows: Rows, name: str, encode: Any, long: Mapping[int, int], kept: Sequence[int], limit: int | None
) -> InputError:
    """Return the error for rows that are too long, with the fixes that would leave something to train on."""
    first, longest = next(iter(long)), max(long.values())
    fixes = []
    if kept or any(encode.truncated(placed_chat(rows, index)) for index in long):
        fixes.append("--overlong truncate")
    if kept:
        fixes.append("--overlong drop")
    if limit is None or longest <= limit:
        fixes.append(f"--max_length {longest}")
    size, has = counted(len(rows), f"{name} conversation"), agreeing(len(long), "has")
    what = f"{len(long):,} of {size} {has} more than {encode.max_length:,} tokens"
    saw = [f"{placed_chat(rows, first).where}: {long[first]:,} tokens", f"the longest has {longest:,}"]
    return InputError(
        "model.length", what, saw=saw, fix="   or   ".join(fixes) or "shorten the conversations in the data file"
    )


def placed_chat(rows: Rows, index: int) -> Chat:
    """Return a conversation that knows its row, for errors."""
    where = rows.place(index) if hasattr(rows, "place") else f"row {index + 1:,}"
    chat: Chat = rows[index]["chat"]
    return replace(chat, where=where)


class TemplateTokens:
    """Conversations as the tokenizer's chat template writes them, and their tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _renderer(self) -> Any:
        from loopwright.data.chats import Renderer, resolve_template

        return Renderer(self._tokenizer, resolve_template(self._tokenizer))

    def __call__(self, chat: Chat, *, prompt: bool = False) -> tuple[str, list[int]]:
        _, rendered = self._renderer(chat, prompt=prompt)
        return rendered, self._tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"]

    def loses(self, chat: Chat, rendered: str) -> bool:
        """Whether the template dropped the text of a turn, or the tools."""
        if any(str(turn.get("content") or "").strip() not in rendered for turn in chat.messages):
            return True
        return bool(chat.tools) and self._renderer.ignores_tools(self._renderer(chat)[0], chat.tools, rendered)


class PromptEncoder:
    """Encodes a conversation as the prompt of an answer; one of more than `room` tokens is an error."""

    def __init__(self, tokenizer: Any, room: int) -> None:
        self.room, self._write = room, TemplateTokens(tokenizer)

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        rendered, ids = self._write(before_answer(row["chat"]), prompt=True)
        if len(ids) > self.room:
            what = f"the conversation has {len(ids):,} tokens, and the model has room for {self.room:,} and an answer"
            raise InputError("model.length", what, fix="give a shorter conversation   or   --max_new_tokens 1")
        return {"input_ids": ids, "text": rendered}


def before_answer(chat: Chat) -> Chat:
    """Return a conversation up to the last answer of the assistant, or all of it if it ends with another turn."""
    places = [place for place, turn in enumerate(chat.messages) if turn["role"] == "assistant"]
    if not places or places[-1] != len(chat.messages) - 1:
        return chat
    end = places[-1]
    while end > 1 and chat.messages[end - 1]["role"] == "assistant":
        end -= 1
    return Chat(chat.messages[:end], chat.tools)


def until_answer(chat: Chat) -> Chat:
    """Return a conversation without the turns that follow the last answer."""
    end = max((place + 1 for place, turn in enumerate(chat.messages) if turn["role"] == "assistant"), default=0)
    return Chat(chat.messages[:end], chat.tools)


def last_answer(chat: Chat) -> str:
    """Return the last turn of the assistant."""
    return next(content_of(turn).strip() for turn in reversed(chat.messages) if turn["role"] == "assistant")


def content_of(turn: Mapping[str, Any]) -> str:
    calls = turn.get("tool_calls") or ()
    return "\n".join([*filter(None, [turn.get("content")]), *(str(call["function"]) for call in calls)])


def generated(job: Job, batch: Mapping[str, Any], temperature: float, streamer: Any = None) -> list[str]:
    """Return the model's answer to each prompt of a batch."""
    settings = job.model.generation_config
    ends = {"eos_token_id": settings.eos_token_id, "pad_token_id": settings.pad_token_id}
    found = causal_lm.continued(job, job.model, batch, job.args.max_new_tokens, temperature, streamer, **ends)
    return [each.strip() for each in found]


def answers(job: Job, prompts: Iterable[Any], temperature: float, streamer: Any = None) -> list[str]:
    """Return the model's answer to each prompt, given as tokens."""
    from loopwright.engine.nested import to_device

    features = [{"input_ids": ids, "text": "", "position": index} for index, ids in enumerate(prompts)]
    batch = to_device(job.collate_fn(features), next(job.model.parameters()).device)
    return generated(job, batch, temperature, streamer)


def prompts(job: Job, rows: Rows) -> RowDataset:
    """Return conversations as prompts that leave room for an answer."""
    most = text.longest_allowed(job.processor, job.model.config) or job.args.max_length
    return RowDataset(rows, PromptEncoder(job.processor, most - min(job.args.max_new_tokens, most // 2)))


def answered(job: Job, asked: Sequence[tuple[Any, str, str]]) -> list[dict[str, Any]]:
    """Return the model's answers to prompts, each given as tokens, its last turn and the true answer."""
    if not asked:
        return []
    with causal_lm.generating(job):
        written = answers(job, [ids for ids, _, _ in asked], job.args.temperature)
    return [{"source": source, "written": w, "true": true} for (_, source, true), w in zip(asked, written, strict=True)]


class Dialogue:
    """A conversation with a model that continues: it keeps the turns so far."""

    def __init__(self, job: Job, system: str | None) -> None:
        if not job.processor.chat_template:
            what = "a dialogue needs a chat template, and the tokenizer of this run has none"
            raise InputError("model.chat_template", what, fix="train on messages instead of texts")
        self._job = job
        self._start: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = list(self._start)

    def answer(self, said: str, write: Callable[[str], object] = lambda text: None) -> str:
        """Return the answer to a user's turn, and write it as it is generated; InputError if it is too long."""
        from transformers import TextStreamer

        class Writer(TextStreamer):  # type: ignore[misc]
            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                write(text)

        job = self._job
        messages = [*self.messages, {"role": "user", "content": said}]
        features = job.task.create_dataset(job, [{"chat": Chat(messages)}], is_labelled=False)[0]
        streamer = Writer(job.processor, skip_prompt=True, skip_special_tokens=True)
        (found,) = answers(job, [features["input_ids"]], job.args.temperature, streamer=streamer)
        self.messages = [*messages, {"role": "assistant", "content": found}]
        return found


def last_turn(batch: Mapping[str, Any], index: int) -> tuple[list[int], list[int]]:
    """Return the tokens before the last trained turn of a row, and those of the turn."""
    labels = batch["labels"][index].tolist()
    end = max((place + 1 for place, label in enumerate(labels) if label != text.IGNORED), default=0)
    start = end
    while start and labels[start - 1] != text.IGNORED:
        start -= 1
    return batch["input_ids"][index, : start + 1].tolist(), labels[start:end]


def packed_sums(batch: Mapping[str, Any], outputs: Mapping[str, Any], most: int = 2**20) -> list[dict[str, Any]]:
    """Return the sums of each conversation of packed rows, numbered by row and place."""
    samples = []
    for row, position in enumerate(batch["position"].tolist()):
        for number in range(int(batch["sequence_ids"][row].max()) + 1):
            is_own = (batch["sequence_ids"][row] == number)[None]
            part = {name: batch[name][row][None][is_own][None] for name in ("input_ids", "labels")}
            own = {"losses": outputs["losses"][row][None][is_own][None]}
            samples += language.sample_sums({**part, "position": [position * most + number]}, own)
    return samples


def separates_packed(model: Any) -> bool:
    """Whether a model gives packed conversations the logits of each alone, which a recurrent state would change."""
    import torch

    from loopwright.data.packing import block_diagonal_mask
    from loopwright.engine.modes import evaluating

    if "position_ids" not in inspect.signature(model.forward).parameters:
        return False
    ids = torch.arange(12, device=model.device).remainder(language.num_embeddings(model))[None]
    numbers, places = torch.tensor([[0] * 7 + [1] * 5]), torch.tensor([[*range(7), *range(5)]])
    mask = block_diagonal_mask(numbers.to(model.device), model.dtype)
    with evaluating(model), torch.no_grad():
        packed = model(ids, position_ids=places.to(model.device), attention_mask=mask, use_cache=False).logits
        alone = torch.cat([model(ids[:, :7]).logits, model(ids[:, 7:]).logits], 1)
    size = float(alone.float().abs().max()) * (1e-4 if model.dtype == torch.float32 else 5e-2)
    return float((packed - alone).float().abs().max()) <= size


def marked_tokens(tokenizer: Any, ids: Sequence[int], labels: Sequence[int]) -> list[tuple[str, bool]]:
    """Return the text of a conversation in pieces, each with whether it is trained; labels are of the next token."""
    is_trained = [False, *(label != text.IGNORED for label in labels)]
    everything = [*ids, *([labels[-1]] if is_trained[-1] else [])]
    pieces: list[tuple[list[int], bool]] = []
    for token, is_on in zip(everything, is_trained, strict=False):
        if not pieces or pieces[-1][1] != is_on:
            pieces.append(([], is_on))
        pieces[-1][0].append(int(token))
    return [(str(tokenizer.decode(part, skip_special_tokens=False)), is_on) for part, is_on in pieces]
