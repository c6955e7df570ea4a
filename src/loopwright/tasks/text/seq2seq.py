"""Shared code of summarization and translation: a text is read, another is generated and compared with the reference.

An encoder-decoder is trained on the tokens of the target, and evaluated on its own generation. The loss is a mean over
target tokens; padding (-100) is ignored.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from loopwright.baselines import Predictor, UsualTarget
from loopwright.config.start_clock import lap
from loopwright.errors import InputError
from loopwright.metrics import Metric
from loopwright.tasks.arguments import ShortName, TaskArguments, TaskTrainingArguments, flag
from loopwright.tasks.base import Job, Origin, Rows, Task
from loopwright.tasks.data import RowDataset, RunData
from loopwright.tasks.scoring import JointScorer, LossInterval, MetricScorer, Scorer, samples_of, score_baselines
from loopwright.tasks.text import models as text

AUTO_CLASS = "AutoModelForSeq2SeqLM"
_BASELINE_ROWS = 5_000
# Sampling settings, which transformers refuses to save with do_sample=False.
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
# T5's tokens: the first also starts the decoder.
_SPECIAL_TOKENS = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}


@dataclass
class SequenceToSequenceArguments(TaskArguments):
    source_column: str | None = flag(None, "Column of the text to read; inferred if unset.")
    target_column: str | None = flag(None, "Column of the text to write; inferred if unset.")
    source_prefix: str | None = flag(None, "Text to put before each source; the model's own prefix if unset.")
    max_source_length: int | None = flag(
        None, "Maximum number of tokens of a source; chosen from the data if unset.", at_least=1
    )
    max_target_length: int | None = flag(
        None, "Maximum number of tokens of a target; chosen from the data if unset.", at_least=1
    )
    generation_max_length: int | None = flag(
        None, "Maximum number of tokens to generate; max_target_length if unset.", at_least=1
    )
    num_beams: int | None = flag(None, "Beams to generate with; the model's own, mostly 1, if unset.", at_least=1)
    tokenizer_unit: str = flag(
        "subwords", "What the tokens of a model from scratch are.", choices=("subwords", "characters")
    )
    vocabulary_size: int = flag(8_000, "Maximum vocabulary size of a model from scratch.", above=len(_SPECIAL_TOKENS))

    prefix = ShortName("source_prefix", str)
    max_length = ShortName("max_source_length", int)
    val_max_target_length = ShortName("generation_max_length", int)
    max_new_tokens = ShortName("generation_max_length", int)
    generation_num_beams = ShortName("num_beams", int)


class SequenceToSequence(Task):
    """Fine-tunes an encoder-decoder; a subclass defines the comparison."""

    scratch_updates = 1_000
    keeps_generation = True
    counts_labels = True
    params_of_model: ClassVar[str]  # its name among the `task_specific_params` of a config, which has a source prefix
    rivals: ClassVar[Mapping[str, Predictor]]  # the baselines to beat, by name
    directions: ClassVar[Mapping[str, bool]]  # of the metric's results, the decisive one first
    adapter_kind = "SEQ_2_SEQ_LM"
    not_inputs = ("position", "reference")
    prediction_flags = ("generation_max_length", "max_new_tokens", "num_beams")

    @abstractmethod
    def create_metric(self, args: Any) -> Metric:
        """Return a new metric of texts."""

    def set_languages(self, model: Any, tokenizer: Any, args: Any) -> None:
        """Set the languages of a multilingual tokenizer and model; a no-op for others."""

    def baselines(self, job: Job) -> Mapping[str, Mapping[str, float]]:
        most = min(job.args.max_eval_samples or _BASELINE_ROWS, _BASELINE_ROWS)
        create = partial(self.create_metric, job.args)
        rivals = {**self.rivals, "usual text": UsualTarget(create, next(iter(self.directions)))}
        return score_baselines(job.data, rivals, "source", "target", create, most)

    def build(self, data: RunData, args: Any, training: TaskTrainingArguments, origin: Origin) -> Job:
        if origin.path is None:
            texts = (row[side] for row in data.each_row("train") for side in ("source", "target"))
            tokenizer = train_tokenizer(texts, args.tokenizer_unit, args.vocabulary_size)
            loaded = small_model(tokenizer)
        else:
            tokenizer = text.load_tokenizer(origin.path)
            loaded = text.load_model(origin, AUTO_CLASS)
            if origin.is_run:
                text.open_generation(loaded.model, Path(origin.path))
        model, notes = loaded.model, []
        text.match_pad_token(model, tokenizer)
        if not origin.is_run:
            num_rows = model.get_input_embeddings().weight.shape[0]
            if len(tokenizer) > num_rows:
                model.resize_token_embeddings(len(tokenizer))
                notes.append(f"the tokenizer has {len(tokenizer) - num_rows} tokens that the model does not have yet")
        self.set_languages(model, tokenizer, args)
        starts = (getattr(model.config, "decoder_start_token_id", None), model.generation_config.decoder_start_token_id)
        if all(start is None for start in starts):
            what = f"{origin.path}: its config.json has no start token for the decoder"
            fix = 'set "decoder_start_token_id" in its config.json'
            raise InputError("model.folder", what, saw=["decoder_start_token_id is not set"], fix=fix)
        if not origin.is_run:
            if args.source_prefix is None:
                known = getattr(model.config, "task_specific_params", None) or {}
                own = known.get(self.params_of_model.format(**vars(args))) or {}
                args.source_prefix = str(own.get("prefix") or "")
            if args.source_prefix:
                notes.append(f"each source begins with {args.source_prefix!r}")
            notes += _choose_lengths(args, tokenizer, model.config, data.rows("train"))
        notes += _set_generation(model, tokenizer, args)
        collator = text.ReferenceCollator(tokenizer, text.padding_multiple(training))
        return Job(self, data, args, training, model, tokenizer, collator, notes, loaded.new)

    def create_dataset(self, job: Job, rows: Rows, *, is_labelled: bool, is_training: bool = False) -> Any:
        args = job.args
        target_length = args.max_target_length if is_labelled else None
        encode = partial(_encode, job.processor, args.source_prefix, args.max_source_length, target_length)
        return RowDataset(rows, encode)

    def compute_loss(self, job: Job, model: Any, batch: Mapping[str, Any]) -> tuple[Any, Any]:
        outputs = model(**self.model_inputs(batch), use_cache=False)
        return outputs.loss, outputs

    def create_scorer(self, job: Job) -> Scorer:
        scorer = MetricScorer(lambda: self.create_metric(job.args), self.directions)
        return JointScorer([scorer, LossInterval()])

    def score_batch(self, job: Job, batch: Mapping[str, Any], outputs: Any) -> list[dict[str, Any]]:
        """The reference is the whole text of the file, even if the labels are cut to `max_target_length`."""
        import torch
        from torch.nn import functional

        loss_of = partial(functional.cross_entropy, ignore_index=text.IGNORED)
        pairs = zip(outputs.logits, batch["labels"], strict=True)
        losses = torch.stack([loss_of(logits.float(), labels) for logits, labels in pairs])
        counts = (batch["labels"] != text.IGNORED).sum(-1)
        columns = {"position": batch["position"], "prediction": self.generate(job, job.model, batch)}
        return samples_of(**columns, reference=batch["reference"], loss=losses, num_target_tokens=counts)

    def written_samples(self, job: Job, samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        rows = job.eval_dataset.rows
        return [
            {"source": rows[sample["position"]]["source"], "written": sample["prediction"], "true": sample["reference"]}
            for sample in sorted(samples, key=lambda sample: int(sample["position"]))
        ]

    def generate(self, job: Job, model: Any, batch: Mapping[str, Any]) -> list[str]:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        with text.quiet():
            tokens = model.generate(**inputs, do_sample=False)
        written = job.processor.batch_decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return [each.strip() for each in written]

    def predict_batch(self, job: Job, model: Any, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        (name,) = self.predicted
        return [{name: each} for each in self.generate(job, model, batch)]


def _encode(
    tokenizer: Any, prefix: str, source_length: int, target_length: int | None, row: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the features of a row; called in loader workers. `target_length` is None for rows without targets."""
    read = tokenizer(prefix + row["source"], truncation=True, max_length=source_length)
    features = {name: read[name] for name in ("input_ids", "attention_mask")}
    if target_length is not None:
        target = row["target"]
        written = tokenizer(text_target=target, truncation=True, max_length=target_length)
        features |= {"labels": written["input_ids"], "reference": target.strip()}
    return features


def train_tokenizer(texts: Iterable[str], unit: str, vocabulary: int) -> Any:
    """Train a tokenizer of "subwords" or of the most frequent "characters", with T5's special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special, end = list(_SPECIAL_TOKENS.values()), _SPECIAL_TOKENS["eos_token"]
    if unit == "characters":
        counts = Counter(character for each in islice(texts, text.TOKENIZER_ROWS) for character in each)
        frequent = sorted(counts, key=lambda character: (-counts[character], character))
        known = [*special, *sorted(frequent[: vocabulary - len(special)])]
        numbers = {token: number for number, token in enumerate(known)}
        tokenizer = Tokenizer(models.WordLevel(numbers, unk_token=special[-1]))
        tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        tokenizer.decoder = decoders.Fuse()
        lap("tokenizer")
    else:
        tokenizer = text.train_byte_pairs(texts, vocabulary, special)
    ends = [(end, tokenizer.token_to_id(end))]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {end}", special_tokens=ends)
    options = {"model_max_length": 512, "model_input_names": ["input_ids", "attention_mask"], **_SPECIAL_TOKENS}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


def small_model(tokenizer: Any) -> text.Loaded:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": len(tokenizer), "d_model": 96, "d_kv": 24, "d_ff": 192, "num_layers": 2, "num_heads": 4}
    layers = {"relative_attention_max_distance": 64, "dropout_rate": 0.0, "feed_forward_proj": "gated-gelu"}
    tokens = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = T5Config(**sizes, **layers, **tokens, decoder_start_token_id=tokenizer.pad_token_id)
    return text.Loaded(T5ForConditionalGeneration(config))


def _choose_lengths(args: Any, tokenizer: Any, config: Any, rows: Any) -> list[str]:
    positions = getattr(config, "max_position_embeddings", None)  # T5-like models have none, and no limit
    limit = text.longest_allowed(tokenizer, config)
    counts: dict[str, Callable[[Mapping[str, Any]], int]] = {
        "max_source_length": lambda row: len(tokenizer(args.source_prefix + row["source"])["input_ids"]),
        "max_target_length": lambda row: len(tokenizer(text_target=row["target"])["input_ids"]),
    }
    notes = []
    with text.quiet():
        for name, count in counts.items():
            asked = getattr(args, name)
            found = text.choose_length(asked, count, rows, limit if asked is None else positions, name)
            setattr(args, name, found.max_length)
            notes.append(f"{name[4:10]} {found.note}")
    text.check_length("generation_max_length", args.generation_max_length, positions)
    if args.generation_max_length is None:
        args.generation_max_length = args.max_target_length
    return notes


def _set_generation(model: Any, tokenizer: Any, args: Any) -> list[str]:
    """Write the generation settings into the model, to apply wherever its folder is opened; return notes."""
    settings = model.generation_config
    # The decoder's start token does not count, as in labels.
    settings.max_new_tokens, settings.max_length = args.generation_max_length, None
    settings.do_sample, settings._from_model_config = False, False  # these settings win over the config
    for name in _SAMPLING:
        if getattr(settings, name, None) is not None:
            setattr(settings, name, None)
    if settings.pad_token_id is None:
        settings.pad_token_id = tokenizer.pad_token_id
    if args.num_beams is not None:
        settings.num_beams = args.num_beams
    if settings.num_beams in (None, 1):
        settings.early_stopping = settings.length_penalty = None
    notes = []
    if (settings.min_length or 0) > args.generation_max_length:
        notes.append(f"the model's min_length {settings.min_length} is longer than --generation_max_length: set to 0")
        settings.min_length = 0
    return notes
