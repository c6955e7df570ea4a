"""causal-lm: the next token, over blocks of the joined text or line by line.

Each token is a target exactly once: a block's last target is the first token of the next block. The sums over tokens
are exact, so perplexity and bits per byte do not depend on the batch size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from loopwright.baselines import compressed_bits_per_byte
from loopwright.errors import ConfigError, InputError
from loopwright.metrics import load as load_metric
from loopwright.metrics.paired import rows_of
from loopwright.metrics.words import first_words
from loopwright.tasks.arguments import TaskTrainingArguments, flag
from loopwright.tasks.base import Job, Origin, Rows, Task
from loopwright.tasks.data import RowDataset, RunData
from loopwright.tasks.scoring import BaselineScores, MetricScorer, Scorer
from loopwright.tasks.text import language_model as language
from loopwright.tasks.text import models as text
from loopwright.tasks.text.samples import tokens_of

AUTO_CLASS = "AutoModelForCausalLM"
END_TOKEN = "<|endoftext|>"
_LARGEST_BLOCK = 1_024
_WORDS_GIVEN = 5  # words of a text to be continued for the report
_TOKENS_SHOWN = 48
_SHOWN_TEMPERATURE = 0.7  # greedy decoding repeats itself


@dataclass
class CausalArguments(language.LanguageArguments):
    max_new_tokens: int = flag(64, "predict: maximum number of tokens to add to a text.", at_least=1)
    packing: bool = flag(False, "With --line_by_line: pack several rows into a block; none attends to another.")
    temperature: float = flag(0.0, "predict: sampling temperature; 0 takes the likeliest token.", at_least=0)
    num_samples: int = flag(3, "Texts to continue at each evaluation, for the report.", at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.packing and not self.line_by_line:
            raise ConfigError("packing is for separate rows, and blocks are full already: add --line_by_line")


class CausalLanguageModel(language.LanguageTask):
    name = "causal-lm"
    summary = "a model that continues texts, from scratch or fine-tuned"
    explanation = {
        "data": "txt (a row is a line, or a paragraph with --text_unit paragraph), or csv, tsv, json, jsonl or "
        "parquet with a column of texts.",
        "blocks": "All rows are joined, with an end token after each, and cut into blocks of --block_size tokens. "
        "Nothing is dropped, and each token is predicted once. --line_by_line keeps rows separate; with --packing "
        "several share a block without attending to each other.",
        "model": "--model FOLDER, or from scratch a small GPT-2 with byte pairs trained on the data (--vocab_size).",
        "metric": "Bits per byte (lower is better; compare it with gzip) and perplexity per token.",
        "predict": "Continues a text by --max_new_tokens tokens; --temperature 0 takes the likeliest.",
    }
    example = "lw train causal-lm --data book.txt --epochs 3 --batch 16 --lr 1e-3"
    pretrained, pretrained_megabytes = "HuggingFaceTB/SmolLM2-135M", 269
    scratch_updates = 500
    predicted = ("text", "continuation")
    arguments = CausalArguments
    defaults = {**language.DEFAULTS, "per_device_train_batch_size": 8, "per_device_eval_batch_size": 8}
    adapter_kind = "CAUSAL_LM"
    forward_options = {"use_cache": False}
    samples_at_end = True
    prediction_flags = ("max_new_tokens", "temperature")
    kept_flags = ("line_by_line", "block_size", "packing")
    demo = dict(block_size=128, vocab_size=1024, epochs=1, batch=16, lr=3e-3, warmup_steps=0.1, threads=1)
    demo_note = "a small GPT-2 learns Python's docstrings from scratch: bits per byte 2.48 (gzip 2.55), 75 s"

    def baselines(self, job: Job) -> Mapping[str, Mapping[str, float]]:
        texts = (f"{row['text']}\n" for row in job.data.each_row("validation"))
        gzip = compressed_bits_per_byte(texts)
        rows = {name: rows_of([value] * len(job.eval_dataset)) for name, value in gzip.items()}  # it has one rate
        unigram = language.unigram(job, _encoder(job.processor), ("bits_per_byte",))
        return {"gzip": BaselineScores(gzip, rows), "unigram": unigram}

    def build(self, data: RunData, args: Any, training: TaskTrainingArguments, origin: Origin) -> Job:
        notes: list[str] = []
        if origin.path is None:
            texts = partial(language.training_texts, data)
            tokenizer = train_tokenizer(texts(), language.choose_vocabulary(args, texts()))
            notes += language.choose_block(args, data, _counter(tokenizer), None, language.small_largest(args))
            tokenizer.model_max_length = args.block_size
            loaded = small_decoder(tokenizer, args.block_size)
        else:
            tokenizer = text.load_tokenizer(origin.path, needs_pad=False)
            loaded = text.load_model(origin, AUTO_CLASS)
            if not origin.is_run:
                check_causal(self, origin.path, loaded.model)
                notes += language.match_vocabulary(loaded.model, tokenizer)
                limit = text.longest_allowed(tokenizer, loaded.model.config)
                notes += language.choose_block(args, data, _counter(tokenizer), limit, _LARGEST_BLOCK)
        if args.packing:
            if (reason := language.why_not_packed(loaded.model, args.block_size)) is not None:
                what = "--packing: this model does not keep packed rows apart"
                raise InputError("args.value", what, saw=[reason], fix="leave out --packing")
            notes += language.separate_rows(loaded.model, training, args.block_size)
        row_width = language.packed_width(training, args.block_size, is_packing=args.packing, model=loaded.model)
        collator = language.PaddingCollator("left", pad_id=tokenizer.pad_token_id, row_width=row_width)
        return Job(self, data, args, training, loaded.model, tokenizer, collator, notes, loaded.new)

    def create_dataset(self, job: Job, rows: Rows, *, is_labelled: bool, is_training: bool = False) -> Any:
        tokenizer, size = job.processor, job.args.block_size
        if not is_labelled:
            most = text.longest_allowed(tokenizer, job.model.config) or size
            room = most - min(job.args.max_new_tokens, most // 2)
            return RowDataset(rows, partial(_encode_prompt, tokenizer, _start(tokenizer), room))
        if job.args.line_by_line:
            lines = RowDataset(rows, partial(_encode_line, _encoder(tokenizer), _start(tokenizer), size))
            return PackedLines(lines, size) if is_training and job.args.packing else lines
        stream = language.read_stream(rows, _encoder(tokenizer), _start(tokenizer))
        return BlockDataset(tokenizer, stream, size)

    def create_scorer(self, job: Job) -> Scorer:
        return MetricScorer(lambda: load_metric("bits_per_byte"), {"bits_per_byte": False, "perplexity": False})

    def score_batch(self, job: Job, batch: Mapping[str, Any], outputs: Any) -> list[dict[str, Any]]:
        samples = language.sample_sums(batch, outputs)
        sizes = batch["num_bytes"].tolist()
        return [{**sample, "num_byte": size} for sample, size in zip(samples, sizes, strict=True)]

    def readable(self, job: Job, sample: Mapping[str, Any], row: Mapping[str, Any] | None) -> dict[str, Any]:
        size = sample["num_byte"]
        shown = {"position": sample["position"], "loss": sample["loss"]}
        shown["bits_per_byte"] = sample["sum"] / np.log(2) / size if size else None
        return {**shown, "num_tokens": sample["count"], "num_bytes": size}

    def predict_batch(self, job: Job, model: Any, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        added = continued(job, model, batch, job.args.max_new_tokens, job.args.temperature)
        return [{"text": given + each, "continuation": each} for given, each in zip(batch["text"], added, strict=True)]

    def describe_sample(self, job: Job, batch: Mapping[str, Any], index: int) -> list[tuple[str, str]]:
        num_asked = int((batch["labels"][index] != text.IGNORED).sum())
        fields = [("text", tokens_of(job, batch, index)), ("asked for", f"{num_asked} next tokens")]
        if "sequence_ids" in batch:
            num_texts = int(batch["sequence_ids"][index].max()) + 1
            fields.append(("packed", f"{num_texts} texts, none of which sees another"))
        return fields

    def written_samples(self, job: Job, samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        from loopwright.engine.nested import to_device

        rows = job.data.rows("validation")
        places = language.sample_places(job, len(rows))
        starts = [first_words(rows[place]["text"], _WORDS_GIVEN) for place in places]
        starts = [start for start in dict.fromkeys(starts) if start]
        if not starts:
            return []
        dataset = self.create_dataset(job, [{"text": start} for start in starts], is_labelled=False)
        batch = job.collate_fn([dataset[index] for index in range(len(starts))])
        with generating(job) as device:
            most = min(_TOKENS_SHOWN, job.args.max_new_tokens)
            added = continued(job, job.model, to_device(batch, device), most, _SHOWN_TEMPERATURE)
        return [{"start": start, "written": each} for start, each in zip(starts, added, strict=True)]


@contextmanager
def generating(job: Job) -> Iterator[Any]:
    """Put the model into evaluation mode with keyed sampling, and restore modes and generators; yields its device."""
    import torch

    from loopwright.engine.modes import evaluating
    from loopwright.engine.seeding import preserved_generators, seed_torch

    device = next(job.model.parameters()).device
    with evaluating(job.model), preserved_generators(device), torch.no_grad():
        seed_torch(job.training.seed, device)
        yield device


def continued(
    job: Job,
    model: Any,
    batch: Mapping[str, Any],
    most: int,
    temperature: float = 0.0,
    streamer: Any = None,
    **options: Any,
) -> list[str]:
    """Return the model's continuation of each text in a batch, up to `most` tokens or the model's limit."""
    from transformers import GenerationConfig

    tokenizer, ids = job.processor, batch["input_ids"]
    limit = text.longest_allowed(tokenizer, job.model.config)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
    end = tokenizer.eos_token_id
    ends = {"eos_token_id": end, "pad_token_id": 0 if end is None else end}
    room = most if limit is None else min(most, limit - ids.shape[1])
    config = GenerationConfig(**{"max_new_tokens": room, **ends, **sampling, **options})
    mask = batch.get("attention_mask", ids.new_ones(ids.shape))
    model = getattr(model, "get_base_model", lambda: model)()  # it has the adapters, and peft's own would be patched
    with text.quiet():
        generated = model.generate(input_ids=ids, attention_mask=mask, generation_config=config, streamer=streamer)
    return list(tokenizer.batch_decode(generated[:, ids.shape[1] :], skip_special_tokens=True))


class BlockDataset(RowDataset):
    """Blocks of a stream; the target of each token, including the last, is the next one."""

    def __init__(self, tokenizer: Any, stream: language.TokenStream, size: int) -> None:
        super().__init__(language.BlockRows(tokenizer, stream.ids[1:], size))
        self.stream = stream
        self._ids = stream.ids
        self._size = size
        self._num_bytes = np.add.reduceat(stream.sizes[1:].astype(np.int64), np.arange(0, len(self._ids) - 1, size))

    def features(self, position: int) -> dict[str, Any]:
        start = position * self._size
        tokens = self._ids[start : start + self._size + 1].astype(np.int64)
        return {"input_ids": tokens[:-1], "labels": tokens[1:], "num_bytes": int(self._num_bytes[position])}


class PackedLines(RowDataset):
    """Separate rows, several packed into one block if they fit; `longest` is the most tokens of a row."""

    def __init__(self, lines: RowDataset, size: int) -> None:
        from loopwright.data.buckets import sample_lengths
        from loopwright.data.packing import PackedDataset, most_bounds

        lengths = np.minimum(sample_lengths(lines), size)
        self._packed = PackedDataset(lines, lengths, size)
        self._size = size
        self.lines = lines
        self.longest = int(lengths.max(initial=1))
        self._num_bounds = most_bounds([lengths[group] for group in self._packed.groups], size, self.longest)
        super().__init__(PackedRows(lines.rows, self._packed.groups))

    def features(self, position: int) -> dict[str, Any]:
        from loopwright.data.packing import joined, row_bounds

        samples = self._packed[position]
        sizes = {"num_bytes": sum(each["num_bytes"] for each in samples)} if "num_bytes" in samples[0] else {}
        lengths = [min(len(each["input_ids"]), self._size) for each in samples]
        bounds = row_bounds(lengths, self._size, self.longest, self._num_bounds)
        return {**joined(samples, self._size, is_shifted=True), "segment_bounds": bounds, **sizes}


@dataclass(frozen=True)
class PackedRows:
    """The rows of each block, texts joined, for display; `groups` has the row numbers of each block."""

    rows: Rows
    groups: list[list[int]]

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, index: int) -> dict[str, Any]:
        rows = [self.rows[each] for each in self.groups[index]]
        return {"text": "\n".join(row["text"] for row in rows)} if "text" in rows[0] else rows[0]


def _encode_line(encode: language.RowEncoder, start: int | None, size: int, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the features of a row with a `start` token, cut to `size` tokens; called in loader workers."""
    ((ids, sizes),) = encode([row["text"]])
    if start is not None:
        ids, sizes = np.append(start, ids), np.append(0, sizes)
    if len(ids) < 2:  # a single token without a predecessor: nothing to predict
        return {"input_ids": ids, "labels": np.full(len(ids), text.IGNORED), "num_bytes": 0}
    ids, sizes = ids[: size + 1], sizes[: size + 1]
    return {"input_ids": ids[:-1], "labels": ids[1:], "num_bytes": int(sizes[1:].sum())}


def _encode_prompt(tokenizer: Any, start: int | None, room: int, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the features of a prompt with a `start` token; a long one keeps only its last `room` tokens."""
    ids = tokenizer(row["text"], add_special_tokens=False, verbose=False)["input_ids"]
    ids = [*([] if start is None else [start]), *ids][-room:]
    if not ids:
        what = "there is no text to continue, and the tokenizer has no start token"
        raise InputError("args.value", what, fix="give a text of at least one word")
    return {"input_ids": ids, "text": row["text"]}


def train_tokenizer(texts: Any, vocabulary: int) -> Any:
    from transformers import PreTrainedTokenizerFast

    tokenizer = text.train_byte_pairs(texts, vocabulary, [END_TOKEN], prefix_space=False)
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_TOKEN)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def small_decoder(tokenizer: Any, num_positions: int) -> text.Loaded:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": len(tokenizer), "n_positions": num_positions, "n_embd": 128, "n_layer": 3, "n_head": 4}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    return text.Loaded(GPT2LMHeadModel(GPT2Config(**sizes, **dropout, **ends)))


def check_causal(task: Task, path: str, model: Any) -> None:
    """Refuse a model whose outputs depend on later tokens: it would only copy them."""
    import torch

    from loopwright.engine.modes import evaluating

    ids = torch.arange(8).remainder(language.num_embeddings(model))[None]
    other = ids.clone()
    other[0, -1] = 0
    with evaluating(model), torch.no_grad():
        change = (model(input_ids=ids).logits - model(input_ids=other).logits).float().abs().amax((0, 2))
    if change[:-1].max() > 1e-4 * change[-1]:
        better = "masked-lm instead of causal-lm" if task.name == "causal-lm" else f"--model {task.pretrained}"
        raise InputError(
            "model.task",
            f"{path} attends to later tokens: {task.name} needs a causal language model",
            saw=[f"it was saved as {', '.join(model.config.architectures or ['no known class'])}"],
            fix=f"{better}   or   leave out --model",
        )


def _start(tokenizer: Any) -> int | None:
    """Return the start token of a text, or else the end token of the text before it."""
    found = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    return None if found is None else int(found)


def _encoder(tokenizer: Any) -> language.RowEncoder:
    return language.RowEncoder(tokenizer, tokenizer.eos_token_id, counts_bytes=True)


def _counter(tokenizer: Any) -> Any:
    encode, start = _encoder(tokenizer), _start(tokenizer)
    return lambda row: max(1, len(encode([row["text"]])[0][0]) - (start is None))
