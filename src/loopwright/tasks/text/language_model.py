"""Shared code of causal-lm and masked-lm: flags, the text as one token stream, blocks, batches, scores, baselines.

Rows follow one another in one stream, with an end token after each. The stream is cut into blocks once, so nothing is
dropped: the last block is shorter. Bytes are counted along with the tokens; an end token counts as one byte, for its
line break.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from loopwright.config.choices import must_be
from loopwright.errors import ConfigError, InputError, nearest
from loopwright.metrics import load as load_metric
from loopwright.sources import Role
from loopwright.tasks.arguments import ShortName, TaskArguments, flag
from loopwright.tasks.base import COMMON_DEFAULTS, Job, Rows, Task
from loopwright.tasks.data import RunData
from loopwright.tasks.scoring import BaselineScores, samples_of, score_rows
from loopwright.tasks.text import models as text

DEFAULTS = MappingProxyType({**COMMON_DEFAULTS, "learning_rate": 5e-4, "validation_ratio": 0.1})
_ROWS_AT_ONCE = 1_000
_MOST_LOGITS = 2**26  # maximum logits that an evaluation holds at a time
_MOST_BASELINE = 50_000  # samples that baselines are scored on
_SMALL_BLOCK = 128
_LONGEST_SMALL_LINE = 512
_SMALLEST_VOCABULARY, _LARGEST_VOCABULARY = 512, 8_000
_BYTES_PER_TOKEN_TYPE = 2_000

Numbers = npt.NDArray[np.int64]


def loss_chunk_flag() -> Any:
    return flag(
        "auto", "Tokens whose logits exist at a time in training: a number, off, or auto: in chunks if they are large."
    )


def vocab_size_flag() -> Any:
    return flag(
        None, "Vocabulary size of a model from scratch, 300 or more; chosen from the data if unset.", at_least=300
    )


def check_flags(args: Any) -> None:
    """Refuse unusable values of the flags that language models share."""
    if args.vocab_size is not None and args.model is not None:
        raise ConfigError("vocab_size is for a model from scratch, but --model has a vocabulary: leave it out")
    given = args.loss_chunk
    if given not in ("auto", "off") and not (given.isdecimal() and int(given)):
        near = nearest(given, ["auto", "off"])
        raise must_be("loss_chunk", "a number of tokens, 'auto' or 'off'", given, nearest=near)


@dataclass
class LanguageArguments(TaskArguments):
    text_column: str | None = flag(None, "Column of the text; inferred if unset.")
    text_unit: str = flag("line", "What a row of a txt file is.", choices=("line", "paragraph"))
    line_by_line: bool = flag(False, "Keep rows separate, cut to --block_size, instead of joining them into blocks.")
    block_size: int | None = flag(
        None, "Tokens of a block; what the model allows, but at most 1024, if unset.", at_least=4
    )
    vocab_size: int | None = vocab_size_flag()
    loss_chunk: str = loss_chunk_flag()

    max_length = ShortName("block_size", int)
    max_seq_length = ShortName("block_size", int)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flags(self)


class LanguageTask(Task):
    roles = (Role("text", names=(*text.TEXT_NAMES, "article", "story", "docstring", "code"), may_be_empty=True),)
    arguments = LanguageArguments
    demo_rows = ("text_rows", "language_rows", "jsonl")
    counts_labels = True
    forward_options: ClassVar[Mapping[str, Any]] = {}

    def model_inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tokens, and the mask if rows are padded: the loss is computed here, not by the model."""
        return {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}

    def compute_loss(self, job: Job, model: Any, batch: Mapping[str, Any]) -> tuple[Any, Any]:
        return token_loss(job, model, batch, self.score_tokens, self.forward_options)

    @staticmethod
    def score_tokens(logits: Any, labels: Any) -> dict[str, Any]:
        return {"losses": text.token_losses(logits, labels)}


def token_loss(
    job: Job,
    model: Any,
    batch: Mapping[str, Any],
    score: Callable[[Any, Any], dict[str, Any]],
    options: Mapping[str, Any],
) -> tuple[Any, Any]:
    """Return the mean loss over targets and, without gradients, the scores of all tokens.

    An evaluation scores a few rows at a time, so that logits never exist for a whole batch.
    """
    import torch

    inputs, labels = packed_inputs(job, batch), batch["labels"]
    num_targets = (labels != text.IGNORED).sum().clamp(min=1)
    if torch.is_grad_enabled():
        return training_loss(job, model, inputs, labels, **options) / num_targets, None
    num_rows, width = labels.shape
    step = max(1, _MOST_LOGITS // (width * num_embeddings(job.model)))
    parts = []
    for start in range(0, num_rows, step):
        piece = {name: value[start : start + step] for name, value in inputs.items()}
        parts.append(score(model(**piece, **options).logits, labels[start : start + step]))
    outputs = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return outputs["losses"].double().sum() / num_targets, outputs


def packed_inputs(job: Job, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model inputs; packed rows get positions, and bounds or a mask that separates them."""
    if "sequence_ids" not in batch:
        return {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
    from loopwright.data.packing import block_diagonal_mask
    from loopwright.engine.segments import has_segments, segment_bounds

    if "segment_bounds" in batch and has_segments(job.model):
        mask = segment_bounds(batch["segment_bounds"], job.train_dataset.longest)
    else:
        mask = block_diagonal_mask(batch["sequence_ids"], job.model.dtype)
    return {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "attention_mask": mask}


def why_not_packed(model: Any, length: int) -> str | None:
    """Return why a model cannot attend within packed rows of this length as it does within each alone, or None."""
    from loopwright.engine.segments import why_no_segments

    chunk, window = getattr(_text_config(model), "attention_chunk_size", None), window_of(model, length)
    if chunk is not None and chunk < length:
        return f"it attends within chunks of {chunk:,} tokens, from the start of a row"
    reason = None if window is None else why_no_segments(model)
    return None if reason is None else f"it attends to the last {window:,} tokens alone, and {reason}"


def window_of(model: Any, length: int) -> int | None:
    """Return how many tokens some layers see, if rows are longer: a mask for packed rows would not know it."""
    config = _text_config(model)
    window, layers = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    is_used = not layers or any("sliding" in each for each in layers)
    return window if window is not None and window < length and is_used else None


def _text_config(model: Any) -> Any:
    return model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config


def separate_rows(model: Any, training: Any, length: int = 0) -> list[str]:
    """Let packed rows of this length take the flash kernel, or keep to the model's window; or note that they cannot."""
    import torch

    from loopwright.engine.segments import use_segments, why_no_segments

    is_half = training.mixed_precision in ("bf16", "fp16") or model.dtype in (torch.bfloat16, torch.float16)
    if window_of(model, length) is None and (training.device.type != "cuda" or not is_half):
        return []
    if (reason := why_no_segments(model)) is not None:
        return [f"packed rows are kept apart by a mask, which is slower: {reason}"]
    use_segments(model)
    return []


def packed_width(training: Any, capacity: int, *, is_packing: bool, model: Any = None) -> int | None:
    """Return the width that packed rows are padded to, so that graphs and compiled models have one shape."""
    from loopwright.engine.segments import has_segments

    is_compiled = training.torch_compile or training.step_mode == "compile"
    is_even = is_compiled or training.device.type == "cuda" or has_segments(model)
    return capacity if is_packing and is_even else None


def training_loss(job: Job, model: Any, inputs: Mapping[str, Any], labels: Any, **options: Any) -> Any:
    """Return the loss of a training batch, in chunks of tokens as `--loss_chunk` says; summed without a reduction."""
    from loopwright.tasks.text import chunked_loss

    training = job.training
    # The output layer is replaced for the time of a forward pass, and its gradients are scaled only afterwards.
    reasons = {"--fsdp is set": training.fsdp, "--fp16 is set": training.fp16}
    why_not = next((reason for reason, is_so in reasons.items() if is_so), None)
    how = {"chunk": job.args.loss_chunk, "ignored": text.IGNORED, "why_not": why_not}
    return chunked_loss.token_loss(model, job.model, inputs, labels, **how, **options)


@dataclass(frozen=True)
class RowEncoder:
    """Tokenises texts, with an end token after each, or with a line break if there is no such token."""

    tokenizer: Any
    end: int | None
    counts_bytes: bool

    def __call__(self, texts: Sequence[str]) -> list[tuple[Numbers, Numbers]]:
        """Return the tokens of each text and the bytes of each token, which add up to the text's bytes plus one."""
        whole = list(texts) if self.end is not None else [f"{each}\n" for each in texts]
        has_offsets = self.counts_bytes and bool(self.tokenizer.is_fast)
        unused = ("add_special_tokens", "return_attention_mask", "return_token_type_ids", "verbose")
        encoded = self.tokenizer(whole, return_offsets_mapping=has_offsets, **dict.fromkeys(unused, False))
        found = []
        for index, each in enumerate(whole):
            ids = np.array(encoded["input_ids"][index], np.int64)
            ends = [end for _, end in encoded["offset_mapping"][index]] if has_offsets else None
            sizes = _bytes_of_tokens(each, len(ids), ends)
            if self.end is not None:
                ids, sizes = np.append(ids, self.end), np.append(sizes, 1)
            found.append((ids, sizes))
        return found


def _bytes_of_tokens(whole: str, num_tokens: int, ends: list[int] | None) -> Numbers:
    """Return the bytes of each token by its end; the last one gets the rest. Without ends they are spread evenly."""
    if num_tokens == 0:
        return np.zeros(0, np.int64)
    if ends is None:
        places = np.arange(1, num_tokens + 1) * len(whole.encode()) // num_tokens
    else:
        characters = np.frombuffer(whole.encode("utf-32-le"), np.uint32)
        sizes = 1 + (characters >= 0x80) + (characters >= 0x800) + (characters >= 0x10000)
        up_to = np.concatenate([[0], np.cumsum(sizes)])
        places = up_to[np.maximum.accumulate(np.array(ends, np.int64))]
        places[-1] = up_to[-1]
    return np.diff(places, prepend=0).astype(np.int64)


@dataclass(frozen=True)
class TokenStream:
    """The tokens of all rows, one after the other, and the bytes of each."""

    ids: npt.NDArray[np.int32]
    sizes: npt.NDArray[np.int32]
    num_before: int = 0  # tokens before the first row


def read_stream(rows: Rows, encode: RowEncoder, start: int | None = None) -> TokenStream:
    ids = [np.array([] if start is None else [start], np.int32)]
    sizes = [np.zeros(len(ids[0]), np.int32)]
    has_text = False
    num_rows = len(rows)
    for first in range(0, num_rows, _ROWS_AT_ONCE):
        texts = [rows[index]["text"] for index in range(first, min(first + _ROWS_AT_ONCE, num_rows))]
        has_text = has_text or any(each.strip() for each in texts)
        for row_ids, row_sizes in encode(texts):
            ids.append(row_ids.astype(np.int32))
            sizes.append(row_sizes.astype(np.int32))
    if not has_text:
        what = f"there is no text in {num_rows} row{'s' if num_rows != 1 else ''}: all are blank"
        raise InputError("data.empty", what, fix="give rows with text")
    return TokenStream(np.concatenate(ids), np.concatenate(sizes), 0 if start is None else 1)


@dataclass(frozen=True, eq=False)
class BlockRows:
    """The text of each block, for display; decoded on demand."""

    tokenizer: Any
    ids: npt.NDArray[np.int32]
    size: int

    def __len__(self) -> int:
        return -(-len(self.ids) // self.size)

    def __getitem__(self, index: int) -> dict[str, Any]:
        start = index * self.size
        return {"text": self.tokenizer.decode(self.ids[start : start + self.size].tolist())}


class PaddingCollator:
    """Collates samples of any lengths. No pad token is needed: padding is masked."""

    bucket_lengths: Sequence[int] | None = None

    def __init__(
        self,
        side: str = "right",
        before: Callable[[dict[str, Numbers]], None] | None = None,  # changes the arrays of unlabelled training samples
        pad_id: int | None = None,
        row_width: int | None = None,  # of packed rows, which then have one; the longest of a batch if None
    ) -> None:
        self._side = side
        self._before = before
        self.row_width = row_width
        self._fills = {
            "input_ids": pad_id or 0,
            "labels": text.IGNORED,
            "special_tokens_mask": 1,
            "position_ids": 0,
            "sequence_ids": -1,
        }

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Packed rows have position_ids and sequence_ids instead of the attention mask, and bounds if they are full."""
        import torch

        from loopwright.data.buckets import bucket_length

        is_prompt = "text" in features[0]
        lengths = [len(each["input_ids"]) for each in features]
        width = max(lengths) if self.bucket_lengths is None else bucket_length(max(lengths), self.bucket_lengths)
        is_packed = "sequence_ids" in features[0]
        if is_packed and self.row_width is not None:
            width = self.row_width
        is_left = is_prompt and self._side == "left"
        arrays = {
            name: _padded([each[name] for each in features], width, fill, is_left)
            for name, fill in self._fills.items()
            if name in features[0]
        }
        arrays["attention_mask"] = _padded([np.ones(length, np.int64) for length in lengths], width, 0, is_left)
        if self._before is not None and not is_prompt and "labels" not in arrays:
            self._before(arrays)
        arrays.pop("special_tokens_mask", None)
        if min(lengths) == width or is_packed:
            del arrays["attention_mask"]
        has_bounds = is_packed and width == self.row_width  # the bounds of a row end at its width
        for name in ("position", "num_bytes", *(["segment_bounds"] if has_bounds else [])):
            if name in features[0]:
                arrays[name] = np.array([each[name] for each in features], np.int64)
        batch: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if is_prompt:
            batch["text"] = [each["text"] for each in features]
        return batch


def _padded(values: Sequence[Any], width: int, fill: int, is_left: bool) -> Numbers:
    padded = np.full((len(values), width), fill, np.int64)
    for row, value in zip(padded, values, strict=True):
        row[width - len(value) if is_left else 0 : width if is_left else len(value)] = value
    return padded


def match_vocabulary(model: Any, tokenizer: Any) -> list[str]:
    rows = num_embeddings(model)
    if len(tokenizer) <= rows:
        return []
    with text.quiet():
        model.resize_token_embeddings(len(tokenizer))
    for module in model.modules():  # as a model is built that has the new size from the start
        if getattr(module, "vocab_size", None) == rows:
            module.vocab_size = len(tokenizer)
    return [f"embeddings: {rows:,} -> {len(tokenizer):,}, to match the tokenizer"]


def training_texts(data: RunData) -> Iterator[str]:
    return (row["text"] for row in data.each_row("train"))


def choose_vocabulary(args: Any, texts: Iterable[str]) -> int:
    if args.vocab_size is None:
        num_bytes = sum(len(each.encode()) for each in texts)
        wanted = num_bytes // _BYTES_PER_TOKEN_TYPE
        args.vocab_size = max(_SMALLEST_VOCABULARY, min(_LARGEST_VOCABULARY, wanted))
    return int(args.vocab_size)


def choose_block(
    args: Any, data: RunData, count_tokens: Callable[[Mapping[str, Any]], int], limit: int | None, largest: int
) -> list[str]:
    text.check_length("block_size", args.block_size, limit)
    if args.line_by_line:
        lengths = text.choose_length(args.block_size, count_tokens, data.rows("train"), limit or largest, "block_size")
        args.block_size = max(4, lengths.max_length)
        return [lengths.note]
    if args.block_size is None:
        args.block_size = min(limit or largest, largest)
    return [f"rows joined and cut into blocks of {args.block_size} tokens"]


def small_largest(args: Any) -> int:
    return int(args.block_size or (_LONGEST_SMALL_LINE if args.line_by_line else _SMALL_BLOCK))


def sample_places(job: Job, num_rows: int) -> list[int]:
    """Return the validation rows that the model continues or answers at each evaluation."""
    number = 0 if job.training.fsdp else job.args.num_samples  # with a sharded model, all processes would take part
    return sorted({index * num_rows // number for index in range(number)})


def num_embeddings(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


def sample_sums(batch: Mapping[str, Any], outputs: Mapping[str, Any]) -> list[dict[str, Any]]:
    sums = outputs["losses"].double().sum(-1).tolist()
    counts = (batch["labels"] != text.IGNORED).sum(-1).tolist()
    losses = [total / count if count else None for total, count in zip(sums, counts, strict=True)]
    return samples_of(position=batch["position"], sum=sums, count=counts, loss=losses)


def unigram(job: Job, encode: RowEncoder, metrics: Sequence[str], skipped: Sequence[int] = ()) -> BaselineScores:
    """Score the token frequencies of the training data, smoothed by adding one, on what the model has to predict."""
    vocabulary = len(job.processor)
    stream: TokenStream | None = getattr(job.train_dataset, "stream", None)
    learnt = np.zeros(vocabulary, np.int64)
    if stream is not None:  # tokenized already
        learnt += np.bincount(stream.ids[stream.num_before :], minlength=vocabulary)
    for rows in job.data.batches("train") if stream is None else ():
        for ids, _ in encode([row["text"] for row in rows]):
            learnt += np.bincount(ids, minlength=vocabulary)
    learnt[list(skipped)] = 0
    losses, usual = -np.log((learnt + 1) / (learnt.sum() + vocabulary)), int(learnt.argmax())
    samples = [job.eval_dataset[place] for place in range(min(len(job.eval_dataset), _MOST_BASELINE))]
    labels = [np.asarray(sample["labels"]) for sample in samples]
    targets = [each[each != text.IGNORED] for each in labels]
    columns: dict[str, list[Any]] = {
        "predictions": [[usual] * len(ids) for ids in targets],
        "references": [ids.tolist() for ids in targets],
        "sums": [float(losses[ids].sum()) for ids in targets],
        "counts": [len(ids) for ids in targets],
        "num_bytes": [sample.get("num_bytes", 0) for sample in samples],
    }
    found = BaselineScores({}, {})
    for name in metrics if sum(columns["counts"]) else ():
        create = partial(load_metric, name)
        one = score_rows(create, [{each: columns[each] for each in create().columns}])
        one.pop("loss", None)
        found = BaselineScores({**found, **one}, {**found.rows, **one.rows})
    return found
