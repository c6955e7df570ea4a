"""causal-lm: the next token, over blocks of the joined text or line by line.

Each token is a target exactly once: a block's last target is the first token of the next block. The sums over tokens
are exact, so perplexity and bits per byte do not depend on the batch size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from loopwright.baselines import compressed_bits_per_byte
from loopwright.config.choices import must_be
from loopwright.errors import ConfigError, InputError
from loopwright.metrics import load as load_metric
from loopwright.run_folder import RunFolder
from loopwright.tasks.arguments import TaskTrainingArguments, flag
from loopwright.tasks.base import COMMON_DEFAULTS, Job, Origin, Rows
from loopwright.tasks.data import RowDataset, RunData
from loopwright.tasks.scoring import MetricScorer, Scorer
from loopwright.tasks.text import language_model as language
from loopwright.tasks.text import models as text
from loopwright.tasks.text.samples import SAMPLES, add_samples, tokens_of

AUTO_CLASS = "AutoModelForCausalLM"
END_TOKEN = "<|endoftext|>"
_LARGEST_BLOCK = 1_024
_WORDS_GIVEN = 5  # words of a text to be continued for the report
_TOKENS_SHOWN = 48
_SHOWN_TEMPERATURE = 0.7  # greedy decoding repeats itself


@dataclass
class CausalArguments(language.LanguageArguments):
    """The flags of causal-lm."""

    max_new_tokens: int = flag(64, "Tokens that `predict` adds to a text at most.")
    packing: bool = flag(False, "With --line_by_line: several rows in one block, each of which sees only itself.")
    temperature: float = flag(0.0, "How freely `predict` chooses tokens; 0 takes the likeliest.")
    num_samples: int = flag(3, "Texts that are continued at each evaluation, for the report; 0 for none.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_new_tokens < 1:
            raise must_be("max_new_tokens", "at least 1", self.max_new_tokens)
        if self.packing and not self.line_by_line:
            raise ConfigError("packing is for rows by themselves, and blocks are full already: add --line_by_line")
        if self.temperature < 0:
            raise ConfigError(f"temperature must not be negative, got {self.temperature}")
        if self.num_samples < 0:
            raise ConfigError(f"num_samples must not be negative, got {self.num_samples}")


class CausalLanguageModel(language.LanguageTask):
    """Trains a model that continues texts."""

    name = "causal-lm"
    summary = "a model that continues texts, from scratch or fine-tuned"
    explanation = (
        "data      txt (a row is a line, or --text_unit paragraph), csv, tsv, json, jsonl or parquet: a column of text",
        "blocks    all rows are joined, with an end token after each, and cut into blocks of --block_size tokens;",
        "          nothing is dropped, and each token is asked for once. --line_by_line: each row by itself;",
        "          with --packing several rows share a block, and none sees another",
        "model     --model FOLDER, or from scratch: a small GPT-2 with byte pairs trained on the data (--vocab_size)",
        "metric    bits per byte (less is better; to be compared with gzip) and perplexity per token",
        "predict   continues a text by --max_new_tokens tokens; --temperature 0 takes the likeliest",
    )
    example = "lw train causal-lm --data book.txt --epochs 3 --batch 16 --lr 1e-3"
    arguments = CausalArguments
    defaults = MappingProxyType(
        {
            **COMMON_DEFAULTS,
            "learning_rate": 5e-4,
            "per_device_train_batch_size": 8,
            "per_device_eval_batch_size": 8,
            "validation_ratio": 0.1,
        }
    )
    adapter_kind = "CAUSAL_LM"
    prediction_flags = ("max_new_tokens", "temperature")
    demo = MappingProxyType(
        {"block_size": 128, "vocab_size": 1024, "epochs": 1, "batch": 16, "lr": 3e-3, "warmup_steps": 0.1, "threads": 1}
    )
    demo_note = "a small GPT-2 learns Python's docstrings from scratch: bits per byte 2.48 (gzip 2.55), 75 s"

    def baselines(self, job: Job) -> dict[str, dict[str, float]]:
        """Return gzip's bits per byte on the validation data, and the unigram scores."""
        data, tokenizer = job.data, job.processor
        found = language.unigram(data, _encoder(tokenizer), len(tokenizer))
        texts = (f"{row['text']}\n" for rows in data.batches("validation") for row in rows)
        kept: dict[str, float] = {name: found[name] for name in ("bits_per_byte", "perplexity") if name in found}
        return {"gzip": compressed_bits_per_byte(texts), "unigram": kept}

    # --- model --------------------------------------------------------------------------------------------------

    def build(self, data: RunData, args: Any, training: TaskTrainingArguments, origin: Origin) -> Job:
        """Load a model, or build a small one and its tokenizer."""
        notes: list[str] = []
        if origin.path is None:
            tokenizer = train_tokenizer(language.training_texts(data), language.choose_vocabulary(args, data))
            notes += language.choose_block(args, data, _counter(tokenizer), None, language.small_largest(args))
            tokenizer.model_max_length = args.block_size
            loaded = small_decoder(tokenizer, args.block_size)
        else:
            tokenizer = language.load_tokenizer(origin.path)
            loaded = text.load_model(origin, AUTO_CLASS)
            if not origin.is_run:
                _check_causal(origin.path, loaded.model)
                notes += language.match_vocabulary(loaded.model, tokenizer)
                limit = text.longest_allowed(tokenizer, loaded.model.config)
                notes += language.choose_block(args, data, _counter(tokenizer), limit, _LARGEST_BLOCK)
        collator = language.PaddingCollator("left", pad_id=tokenizer.pad_token_id)
        return Job(self, data, args, training, loaded.model, tokenizer, collator, notes, loaded.new)

    def create_dataset(
        self, job: Job, rows: Rows, *, is_labelled: bool, is_training: bool = False, limit: int | None = None
    ) -> Any:
        """Return blocks or single rows; for `predict`, the texts to continue."""
        tokenizer, size = job.processor, job.args.block_size
        if not is_labelled:
            most = text.longest_allowed(tokenizer, job.model.config) or size
            room = most - min(job.args.max_new_tokens, most // 2)
            return RowDataset(rows, PromptEncoder(tokenizer, _start(tokenizer), room), limit)
        if job.args.line_by_line:
            lines = RowDataset(rows, LineEncoder(_encoder(tokenizer), _start(tokenizer), size), limit)
            return PackedLines(lines, size) if is_training and job.args.packing else lines
        stream = language.read_stream(rows, limit, _encoder(tokenizer), _start(tokenizer))
        return BlockDataset(tokenizer, stream, size)

    def compute_loss(self, job: Job, model: Any, batch: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return the mean loss over tokens; in an evaluation also the loss of each."""
        import torch

        inputs, labels = self._inputs(job, batch), batch["labels"]
        if torch.is_grad_enabled():
            return language.training_loss(model(**inputs, use_cache=False).logits, labels), None
        outputs = language.scored_in_slices(
            lambda piece: model(**piece, use_cache=False).logits,
            inputs,
            labels,
            language.num_embeddings(job.model),
            lambda logits, wanted: {"losses": language.token_losses(logits, wanted)},
        )
        return language.mean_of(outputs, labels), outputs

    def _inputs(self, job: Job, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the model inputs; packed rows get positions, and a mask that separates them."""
        if "sequence_ids" not in batch:
            return self.model_inputs(batch)
        from loopwright.data.packing import block_diagonal_mask

        mask = block_diagonal_mask(batch["sequence_ids"], job.model.dtype)
        return {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "attention_mask": mask}

    # --- scoring ------------------------------------------------------------------------------------------------

    def create_scorer(self, job: Job) -> Scorer:
        """Return a scorer of bits per byte, perplexity and loss over all tokens."""
        return MetricScorer(lambda: load_metric("bits_per_byte"), {"bits_per_byte": False, "perplexity": False})

    def score_batch(self, job: Job, batch: Mapping[str, Any], outputs: Any) -> list[dict[str, Any]]:
        """Return the sums, tokens and bytes of each block or row."""
        samples = language.sample_sums(batch, outputs)
        sizes = batch["num_bytes"].tolist()
        return [{**sample, "num_byte": size} for sample, size in zip(samples, sizes, strict=True)]

    def readable(self, job: Job, sample: Mapping[str, Any], row: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return tokens, bytes, loss and bits per byte."""
        size = sample["num_byte"]
        return {
            "position": sample["position"],
            "loss": sample["loss"],
            "bits_per_byte": sample["sum"] / np.log(2) / size if size else None,
            "num_tokens": sample["count"],
            "num_bytes": size,
        }

    def predict_batch(self, job: Job, model: Any, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return each text with the model's continuation."""
        added = _continued(job, model, batch, job.args.max_new_tokens, job.args.temperature)
        return [{"text": given + each, "continuation": each} for given, each in zip(batch["text"], added, strict=True)]

    # --- for the report -----------------------------------------------------------------------------------------

    def describe_sample(self, job: Job, batch: Mapping[str, Any], index: int) -> list[tuple[str, str]]:
        """Return the tokens, and the number of targets among them."""
        num_asked = int((batch["labels"][index] != language.IGNORED).sum())
        fields = [("text", tokens_of(job, batch, index)), ("asked for", f"{num_asked} next tokens")]
        if "sequence_ids" in batch:
            num_texts = int(batch["sequence_ids"][index].max()) + 1
            fields.append(("packed", f"{num_texts} texts, none of which sees another"))
        return fields

    def written_samples(self, job: Job, samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the beginnings of some validation texts with the model's continuations, sampled with a fixed seed.

        Exceptions of the model are raised: the caller protects the run.
        """
        import torch

        from loopwright.engine.nested import to_device
        from loopwright.engine.seeding import preserved_generators, seed_torch

        rows, number = job.data.rows("validation"), job.args.num_samples
        if not number or job.training.fsdp:  # with a sharded model, all processes would have to take part
            return []
        places = sorted({index * len(rows) // number for index in range(number)})
        starts = [" ".join(rows[place]["text"].split()[:_WORDS_GIVEN]) for place in places]
        starts = [start for start in dict.fromkeys(starts) if start]
        if not starts:
            return []
        dataset = self.create_dataset(job, [{"text": start} for start in starts], is_labelled=False)
        batch = job.collate_fn([dataset[index] for index in range(len(starts))])
        device = next(job.model.parameters()).device
        modes = [(module, module.training) for module in job.model.modules()]
        job.model.eval()
        try:
            with preserved_generators(device), torch.no_grad():
                seed_torch(job.training.seed, device)
                most = min(_TOKENS_SHOWN, job.args.max_new_tokens)
                added = _continued(job, job.model, to_device(batch, device), most, _SHOWN_TEMPERATURE)
        finally:
            for module, mode in modes:
                module.training = mode
        return [{"start": start, "written": each} for start, each in zip(starts, added, strict=True)]

    def illustrate(self, job: Job, run: RunFolder, worst: Sequence[Mapping[str, Any]]) -> list[Path]:
        """Add the best model's texts to the samples of the evaluations."""
        drawn = super().illustrate(job, run, worst)
        add_samples(run.evaluation / SAMPLES, None, self.written_samples(job, []))
        return drawn


def _continued(job: Job, model: Any, batch: Mapping[str, Any], most: int, temperature: float = 0.0) -> list[str]:
    """Return the model's continuation of each text in a batch, up to `most` tokens or the model's limit."""
    from transformers import GenerationConfig

    tokenizer, ids = job.processor, batch["input_ids"]
    limit = text.longest_allowed(tokenizer, job.model.config)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
    config = GenerationConfig(
        max_new_tokens=most if limit is None else min(most, limit - ids.shape[1]),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id if tokenizer.eos_token_id is not None else 0,
        **sampling,
    )
    mask = batch.get("attention_mask", ids.new_ones(ids.shape))
    with text.quiet():
        generated = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
    return list(tokenizer.batch_decode(generated[:, ids.shape[1] :], skip_special_tokens=True))


class BlockDataset:
    """Blocks of a stream; the target of each token, including the last, is the next one.

    Args:
        tokenizer: of the model.
        stream: with a start token, so that each token of the text is a target.
        size: tokens of a block.

    Attributes:
        rows: the texts of the blocks.
    """

    def __init__(self, tokenizer: Any, stream: language.TokenStream, size: int) -> None:
        self._ids = stream.ids
        self._size = size
        self._num_bytes = np.add.reduceat(stream.sizes[1:].astype(np.int64), np.arange(0, len(self._ids) - 1, size))
        self.rows = language.BlockRows(tokenizer, self._ids[1:], size)

    def __len__(self) -> int:
        return len(self._num_bytes)

    def __getitem__(self, position: int) -> dict[str, Any]:
        if not 0 <= position < len(self):
            raise IndexError(position)
        start = position * self._size
        tokens = self._ids[start : start + self._size + 1].astype(np.int64)
        return {
            "input_ids": tokens[:-1],
            "labels": tokens[1:],
            "num_bytes": int(self._num_bytes[position]),
            "position": position,
        }


class PackedLines:
    """Separate rows, several packed into one block if they fit.

    Args:
        lines: the rows as features.
        size: tokens of a block.

    Attributes:
        rows: the texts of the blocks.
    """

    def __init__(self, lines: RowDataset, size: int) -> None:
        from loopwright.data.buckets import sample_lengths
        from loopwright.data.packing import PackedDataset

        self._packed = PackedDataset(lines, sample_lengths(lines), size)
        self._size = size
        self.rows = PackedRows(lines.rows, self._packed.groups)

    def __len__(self) -> int:
        return len(self._packed)

    def __getitem__(self, position: int) -> dict[str, Any]:
        from loopwright.data.packing import joined

        samples = self._packed[position]
        num_bytes = sum(sample["num_bytes"] for sample in samples)
        return {**joined(samples, self._size, is_shifted=True), "num_bytes": num_bytes, "position": position}


class PackedRows:
    """The texts of each block of several rows, for display; `groups` has the row numbers of each block."""

    def __init__(self, rows: Rows, groups: list[list[int]]) -> None:
        self._rows = rows
        self._groups = groups

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"text": "\n".join(self._rows[each]["text"] for each in self._groups[index])}


class LineEncoder:
    """Encodes a row in loader workers, with a `start` token, cut to `size` tokens."""

    def __init__(self, encode: language.RowEncoder, start: int | None, size: int) -> None:
        self._encode = encode
        self._start = start
        self._size = size

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return tokens, targets, and the bytes of the targets."""
        ((ids, sizes),) = self._encode([row["text"]])
        if self._start is not None:
            ids, sizes = np.append(self._start, ids), np.append(0, sizes)
        if len(ids) < 2:  # a single token without a predecessor: nothing to predict
            return {"input_ids": ids, "labels": np.full(len(ids), language.IGNORED), "num_bytes": 0}
        ids, sizes = ids[: self._size + 1], sizes[: self._size + 1]
        return {"input_ids": ids[:-1], "labels": ids[1:], "num_bytes": int(sizes[1:].sum())}


class PromptEncoder:
    """Encodes a prompt with a `start` token; a long one keeps only its last `room` tokens."""

    def __init__(self, tokenizer: Any, start: int | None, room: int) -> None:
        self._tokenizer = tokenizer
        self._start = start
        self._room = room

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tokens and the text."""
        ids = self._tokenizer(row["text"], add_special_tokens=False, verbose=False)["input_ids"]
        ids = [*([] if self._start is None else [self._start]), *ids][-self._room :]
        if not ids:
            raise InputError(
                "args.value",
                "there is no text to go on with, and the tokenizer has no token to begin one",
                fix="give a text of at least one word",
            )
        return {"input_ids": ids, "text": row["text"]}


def train_tokenizer(texts: Any, vocabulary: int) -> Any:
    """Train a lossless byte-level BPE tokenizer with one special token, the end of a text."""
    import os
    from itertools import islice

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(islice(texts, 50_000), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_TOKEN, eos_token=END_TOKEN, pad_token=END_TOKEN
    )


def small_decoder(tokenizer: Any, num_positions: int) -> text.Loaded:
    """Return a small GPT-2 with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=num_positions,
        n_embd=128,
        n_layer=3,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return text.Loaded(GPT2LMHeadModel(config))


def _check_causal(path: str, model: Any) -> None:
    """Refuse a model whose outputs depend on later tokens: it would only copy them."""
    import torch

    ids = torch.arange(8).remainder(language.num_embeddings(model))[None]
    other = ids.clone()
    other[0, -1] = 0
    was_training = model.training
    model.eval()
    with torch.no_grad():
        change = (model(input_ids=ids).logits - model(input_ids=other).logits).float().abs().amax((0, 2))
    model.train(was_training)
    if change[:-1].max() > 1e-4 * change[-1]:
        raise InputError(
            "model.task",
            f"{path} sees the tokens that it is asked for: it is no causal language model",
            saw=[f"it was saved as {', '.join(model.config.architectures or ['no known class'])}"],
            fix="train it with masked-lm   or   --model with another kind, such as a GPT-2",
        )


def _start(tokenizer: Any) -> int | None:
    """Return the start token of a text, or else the end token of the text before it."""
    found = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    return None if found is None else int(found)


def _encoder(tokenizer: Any) -> language.RowEncoder:
    return language.RowEncoder(tokenizer, tokenizer.eos_token_id, counts_bytes=True)


def _counter(tokenizer: Any) -> Any:
    """Return a function that counts the tokens of a single row."""
    encode, start = _encoder(tokenizer), _start(tokenizer)
    return lambda row: max(1, len(encode([row["text"]])[0][0]) - (start is None))
