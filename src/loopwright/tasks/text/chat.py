"""chat: a decoder tuned on conversations, with the loss on the assistant's turns.

All rows are encoded when a run starts, so that the mask of each is proven before the first update. Short conversations
are packed into rows of `max_length` tokens; each attends only to itself, and its positions start at 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from loopwright.errors import ConfigError, InputError
from loopwright.metrics import load as load_metric
from loopwright.metrics.paired import RowScores
from loopwright.sources import DataPlan, Role
from loopwright.sources.chats import Chat
from loopwright.tasks.arguments import ShortName, TaskArguments, TaskTrainingArguments, flag
from loopwright.tasks.base import Job, Origin, Rows, Task
from loopwright.tasks.data import RunData
from loopwright.tasks.scoring import BaselineScores, JointScorer, MetricScorer, PartScorer, Scorer, score_rows
from loopwright.tasks.text import causal_lm, decoders
from loopwright.tasks.text import conversations as chats
from loopwright.tasks.text import language_model as language
from loopwright.tasks.text import models as text

TEMPLATE = "chatml"  # of a model from scratch
PAD_TOKEN = "<|pad|>"
_LEAST_LENGTH, _LEAST_SCRATCH_LENGTH = 1_024, 256
_ROWS_MEASURED = 2_000
_WIDTH = 128  # of a model from scratch
_BACKOFF = 5.0  # the weight of the frequencies of tokens in those of pairs


@dataclass
class ChatArguments(TaskArguments):
    chat_column: str | None = flag(None, "Column of the conversations, a list of messages each; inferred if unset.")
    chat_template: str | None = flag(
        None, "Chat template: the name of a built-in one, or a file; the tokenizer's own if unset."
    )
    train_on: str = flag("assistant", "Which tokens are trained.", choices=("assistant", "all", "last", "completion"))
    max_length: int | None = flag(
        None, "Maximum tokens of a conversation, and of a packed row; chosen from the data if unset.", at_least=8
    )
    overlong: str = flag("refuse", "What to do with longer conversations.", choices=("refuse", "truncate", "drop"))
    packing: bool | None = flag(
        None, "Pack several conversations into a row; on if most are at most half of --max_length, if unset."
    )
    tokens_per_update: int | None = flag(
        None, "Tokens of an update, over all processes: a multiple of --max_length; needs --packing.", at_least=8
    )
    vocab_size: int | None = language.vocab_size_flag()
    max_new_tokens: int = flag(128, "Maximum number of tokens of an answer.", at_least=1)
    temperature: float = flag(0.0, "Sampling temperature of answers; 0 takes the likeliest token.", at_least=0)
    num_samples: int = flag(3, "Held-out prompts to answer at each evaluation, for log and report.", at_least=0)
    exact_match_rows: int = flag(
        0, "Validation rows whose last answer is generated and compared at each evaluation.", at_least=0
    )
    trained_tokens: list[str] = decoders.trained_tokens_flag()
    loss_chunk: str = language.loss_chunk_flag()

    max_seq_length = ShortName("max_length", int)

    def __post_init__(self) -> None:
        super().__post_init__()
        language.check_flags(self)
        if self.exact_match_rows and self.train_on == "all":
            raise ConfigError("exact_match_rows compares answers, and train_on='all' trains everything: leave out one")


class ChatTuning(Task):
    name = "chat"
    summary = "a model that answers, tuned on conversations"
    explanation = {
        "data": "csv, json, jsonl or parquet with conversations: messages (role, content), ShareGPT's conversations, "
        "prompt and completion, or instruction, input and output; and optionally system and tools.",
        "tokens": "The loss is on the assistant's turns and their end tokens (--train_on), proven for every row; "
        "lw check chat shows them for the first row.",
        "template": "The tokenizer's own chat template, or --chat_template NAME or FILE.",
        "lengths": "--max_length limits a conversation; a longer one is refused, truncated by turns or dropped "
        "(--overlong). Short ones are packed into rows of --max_length tokens and never see each other; "
        "--tokens_per_update sets the size of an update.",
        "model": "--model FOLDER, or from scratch a small Llama with byte pairs trained on the data (--vocab_size).",
        "metric": "Perplexity per trained token, and per conversation, where each counts the same (lower is better).",
        "predict": 'lw predict RUN "text" answers; files have prompts or conversations. lw chat RUN talks with it.',
    }
    example = "lw train chat --data chats.jsonl --model ./smollm --epochs 2 --lr 2e-5"
    roles = (Role("chat", "chat"),)
    arguments = ChatArguments
    defaults = {**language.DEFAULTS, "learning_rate": 2e-5, "per_device_train_batch_size": 8}
    scratch_updates = 500
    pretrained, pretrained_megabytes = "HuggingFaceTB/SmolLM2-135M-Instruct", 269
    adapter_kind = "CAUSAL_LM"
    forward_options = {"use_cache": False}
    predicted = ("answer",)
    prediction_flags = ("max_new_tokens", "temperature")
    kept_flags = ("train_on", "max_length", "overlong", "packing", "tokens_per_update", "exact_match_rows")
    keeps_generation = True
    counts_labels = True
    logs_samples = samples_at_end = True
    dialogue = chats.Dialogue
    demo = {
        **dict(max_length=256, packing=True, vocab_size=400, max_new_tokens=16, exact_match_rows=100),
        **dict(epochs=2, batch=4, lr=3e-3, warmup_steps=0.1, threads=1),
    }
    demo_rows = ("dialogue_rows", "dialogue_rows", None)
    demo_note = "a small Llama learns to keep a running total: perplexity 1.04 (bigram 2.02), 89 % right answers, 90 s"

    def build(self, data: RunData, args: Any, training: TaskTrainingArguments, origin: Origin) -> Job:
        is_asked = bool(args.packing)
        if origin.path is None:
            loaded, notes = _from_scratch(args, data)
        else:
            loaded, notes = text.load_model(origin, causal_lm.AUTO_CLASS), []
            loaded.processor = text.load_tokenizer(origin.path, needs_pad=False)
            if origin.is_run:
                text.open_generation(loaded.model, Path(origin.path))
            else:
                notes = _fit(self, args, loaded, origin.path, data)
        if not origin.is_run:
            notes += _choose_packing(args, loaded.model, is_asked)
        if args.packing:
            notes += language.separate_rows(loaded.model, training, args.max_length)
        row_width = language.packed_width(training, args.max_length, is_packing=args.packing, model=loaded.model)
        collator = language.PaddingCollator("left", pad_id=loaded.processor.pad_token_id, row_width=row_width)
        return Job(self, data, args, training, loaded.model, loaded.processor, collator, notes, loaded.new)

    def create_dataset(self, job: Job, rows: Rows, *, is_labelled: bool, is_training: bool = False) -> Any:
        args = job.args
        if not is_labelled:
            return chats.prompts(job, rows)
        most = None if args.model is None else text.longest_allowed(job.processor, job.model.config)
        with text.quiet():
            encoder, name = _encoder(args, job.processor), "training" if is_training else "validation"
            found = chats.Conversations(rows, encoder, name, bad_rows=args.bad_rows, limit=most)
        job.notes += found.notes()
        return causal_lm.PackedLines(found, args.max_length) if is_training and args.packing else found

    def compute_loss(self, job: Job, model: Any, batch: Mapping[str, Any]) -> tuple[Any, Any]:
        return language.token_loss(job, model, batch, language.LanguageTask.score_tokens, self.forward_options)

    def create_scorer(self, job: Job) -> Scorer:
        parts: list[Scorer] = [_perplexity(), PartScorer(_perplexity(), "conversation_perplexity", _as_one_token)]
        if job.args.exact_match_rows:
            exact = MetricScorer(partial(load_metric, "exact_match"), {"exact_match": True})
            parts.append(PartScorer(exact, "exact_match", lambda sample: sample if "prediction" in sample else None))
        return JointScorer(parts)

    def score_batch(self, job: Job, batch: Mapping[str, Any], outputs: Any) -> list[dict[str, Any]]:
        if "sequence_ids" in batch:
            return chats.packed_sums(batch, outputs)
        samples = language.sample_sums(batch, outputs)
        chosen = {index: sample for index, sample in enumerate(samples) if self._is_answered(job, sample)}
        turns = [chats.last_turn(batch, index) for index in chosen]
        written = chats.answers(job, [prompt for prompt, _ in turns], 0.0) if turns else []
        for sample, (_, ids), answer in zip(chosen.values(), turns, written, strict=True):
            true = job.processor.decode(ids, skip_special_tokens=True).strip()
            sample |= {"prediction": answer, "reference": true}
        return samples

    def _is_answered(self, job: Job, sample: Mapping[str, Any]) -> bool:
        # With a sharded model, all processes would have to take part.
        return sample["position"] < job.args.exact_match_rows and sample["count"] > 0 and not job.training.fsdp

    def readable(self, job: Job, sample: Mapping[str, Any], row: Mapping[str, Any] | None) -> dict[str, Any]:
        shown = {"position": sample["position"], "loss": sample["loss"], "num_tokens": sample["count"]}
        answers = {"answer": sample["prediction"], "true": sample["reference"]} if "prediction" in sample else {}
        return {**shown, **answers}

    def describe_row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {"text": "\n".join(f"{turn['role']}: {chats.content_of(turn)}" for turn in row["chat"].messages)}

    def predict_batch(self, job: Job, model: Any, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [{"answer": each} for each in chats.generated(job, batch, job.args.temperature)]

    def rows_of_texts(self, plan: DataPlan, texts: Sequence[str]) -> list[dict[str, Any]]:
        return [{"chat": Chat([{"role": "user", "content": each}]) if each.strip() else None} for each in texts]

    def model_card_lines(self, job: Job) -> list[str]:
        opened = "model=model, tokenizer=tokenizer"
        return [
            f'It has its chat template: transformers.pipeline("text-generation", {opened}) answers a list of messages.'
        ]

    def preview(self, job: Job) -> list[tuple[str, bool]]:
        lines = getattr(job.train_dataset, "lines", job.train_dataset)
        return chats.marked_tokens(job.processor, lines[0]["input_ids"], lines[0]["labels"])

    def describe_sample(self, job: Job, batch: Mapping[str, Any], index: int) -> list[tuple[str, str]]:
        ids, labels = batch["input_ids"][index], batch["labels"][index]
        fields = []
        if "sequence_ids" in batch:
            numbers = batch["sequence_ids"][index]
            ids, labels = ids[numbers >= 0], labels[numbers >= 0]
            fields = [("packed", f"{int(numbers.max()) + 1} conversations, none of which sees another")]
        elif "attention_mask" in batch:
            is_real = batch["attention_mask"][index].bool()
            ids, labels = ids[is_real], labels[is_real]
        pieces = chats.marked_tokens(job.processor, ids.tolist(), labels.tolist())
        shown = "".join(f"⟦{piece}⟧" if is_on else piece for piece, is_on in pieces)
        return [("trained in brackets", shown), *fields]

    def written_samples(self, job: Job, samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        asked = []
        for place in language.sample_places(job, len(job.eval_dataset)):
            chat = chats.until_answer(job.eval_dataset.rows[place]["chat"])
            prompt = chats.before_answer(chat)
            with suppress(InputError):  # one without room for an answer
                tokens = self.create_dataset(job, [{"chat": prompt}], is_labelled=False)[0]["input_ids"]
                asked.append((tokens, chats.content_of(prompt.messages[-1]), chats.last_answer(chat)))
        return chats.answered(job, asked)

    def finish_adapters(self, job: Job) -> None:
        decoders.train_tokens(job)

    def parameter_groups(self, job: Job) -> list[dict[str, Any]]:
        return decoders.without_decay(job, super().parameter_groups(job))

    def baselines(self, job: Job) -> Mapping[str, Mapping[str, float]]:
        """Score the frequencies of trained tokens, and of them after the token before; and the usual answer."""
        train = getattr(job.train_dataset, "lines", job.train_dataset)
        makers = {"unigram": _unigram, "bigram": _bigram}
        found = {name: _scored(job, make(train, len(job.processor))) for name, make in makers.items()}
        if job.args.exact_match_rows:
            found["usual answer"] = _usual_answer(job)
        return found


def _perplexity() -> MetricScorer:
    return MetricScorer(partial(load_metric, "perplexity"), {"perplexity": False})


def _as_one_token(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Count a conversation once, with its mean loss."""
    return {**sample, "sum": sample["loss"] or 0.0, "count": min(sample["count"], 1)}


def _encoder(args: Any, tokenizer: Any) -> Any:
    from loopwright.data.chats import ChatEncoder

    return ChatEncoder(tokenizer, train_on=args.train_on, max_length=args.max_length, overlong=args.overlong)


def _from_scratch(args: Any, data: RunData) -> tuple[text.Loaded, list[str]]:
    """Return a small Llama with byte pairs trained on the data."""
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    def texts() -> Iterator[str]:
        turns = (turn for row in data.each_row("train") for turn in row["chat"].messages)
        return (part for turn in turns for part in (turn["role"], chats.content_of(turn)))

    ends = {"eos_token": causal_lm.END_TOKEN, "bos_token": causal_lm.END_TOKEN, "pad_token": PAD_TOKEN}
    vocabulary = language.choose_vocabulary(args, texts())
    pairs = text.train_byte_pairs(texts(), vocabulary, [causal_lm.END_TOKEN, PAD_TOKEN], prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pairs, **ends)
    decoders.set_template(tokenizer, args.chat_template or TEMPLATE)
    encoder = _encoder(args, tokenizer)
    notes = _choose_length(args, encoder, data, None)
    tokenizer.model_max_length = args.max_length
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=_WIDTH,
        initializer_range=_WIDTH**-0.5,  # with the usual 0.02, a model this narrow learns several times slower
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=384,
        max_position_embeddings=args.max_length,
        tie_word_embeddings=True,
        **{f"{name}_id": getattr(tokenizer, f"{name}_id") for name in ends},
    )
    loaded = text.Loaded(LlamaForCausalLM(config), processor=tokenizer)
    _set_generation(loaded, encoder.end_of_turn)
    return loaded, notes


def _fit(task: Task, args: Any, loaded: text.Loaded, path: str, data: RunData) -> list[str]:
    """Prepare a pretrained model for its template: added tokens, padding, the end of a turn, the length."""
    model, tokenizer = loaded.model, loaded.processor
    decoders.check_decoder(task, path, loaded)
    added = decoders.set_template(tokenizer, args.chat_template)
    encoder = _encoder(args, tokenizer)
    decoders.choose_trained_tokens(args, tokenizer, added)
    notes = [f"tokens added to the tokenizer: {' '.join(added)}"] if added else []
    if encoder.end_of_turn is None:
        notes.append("the template ends turns without a special token, so nothing trained ends an answer")
    _set_generation(loaded, encoder.end_of_turn)
    notes += language.match_vocabulary(model, tokenizer)
    return notes + _choose_length(args, encoder, data, text.longest_allowed(tokenizer, model.config))


def _set_generation(loaded: text.Loaded, end_of_turn: int | None) -> None:
    """Set what ends a generation; padding never does."""
    tokenizer, settings = loaded.processor, loaded.model.generation_config
    decoders.end_generation(loaded.model, tokenizer, end_of_turn)
    if tokenizer.pad_token_id in (None, tokenizer.eos_token_id, *(settings.eos_token_id or ())):
        tokenizer.add_special_tokens({"pad_token": PAD_TOKEN})
    settings.pad_token_id = tokenizer.pad_token_id  # in the config it would change how the embeddings are built


def _choose_length(args: Any, encoder: Any, data: RunData, limit: int | None) -> list[str]:
    """Set `max_length`, and `packing` by the median of some rows."""
    text.check_length("max_length", args.max_length, limit)
    if args.max_length is not None and args.packing is not None:
        return []
    rows = data.first_rows("train", args.max_train_samples)
    step = max(1, len(rows) // _ROWS_MEASURED)
    lengths, bad = [], list[InputError]()
    with text.quiet():
        for index in range(0, len(rows), step):
            try:
                lengths.append(len(encoder.whole(chats.placed_chat(rows, index)).input_ids))
            except InputError as error:  # refused or dropped when all rows are encoded
                bad.append(error)
    if not lengths:
        raise bad[0]
    lengths.sort()
    half, longest = lengths[(len(lengths) - 1) // 2], lengths[-1]
    if args.max_length is None:
        least = _LEAST_SCRATCH_LENGTH if limit is None else _LEAST_LENGTH
        args.max_length = max(-(-longest // 8) * 8, least)
        args.max_length = args.max_length if limit is None else min(args.max_length, limit)
    if args.packing is None:
        args.packing = 2 * half <= args.max_length
    return [f"tokens p50 {half:,} max {longest:,} -> max_length {args.max_length:,}"]


def _choose_packing(args: Any, model: Any, is_asked: bool) -> list[str]:
    """Check that the model separates packed conversations, and translate `tokens_per_update` into rows."""
    reason = language.why_not_packed(model, args.max_length) if args.packing else None
    if args.packing and reason is None and not chats.separates_packed(model):
        reason = f"the logits of a {type(model).__name__} differ from those of each alone"
    if reason is not None:
        if is_asked or args.tokens_per_update is not None:
            flag, fix = "--packing", "--no_packing"
            if args.tokens_per_update is not None:
                flag, fix = "--tokens_per_update", "leave out --tokens_per_update"
            what = f"{flag}: this model does not keep packed conversations apart"
            raise InputError("args.value", what, saw=[reason], fix=fix)
        args.packing = False
    if args.tokens_per_update is not None:
        rows, rest = divmod(args.tokens_per_update, args.max_length)
        if args.effective_batch not in (None, rows):  # a run that is begun again has the rows of its tokens
            what = "--tokens_per_update and --effective_batch exclude each other"
            raise InputError("args.value", what, fix="leave out --effective_batch   or   leave out --tokens_per_update")
        if rest or not args.packing:
            what = f"--tokens_per_update {args.tokens_per_update} is for packed rows of {args.max_length} tokens"
            fix = f"--packing --tokens_per_update {max(rows, 1) * args.max_length}"
            raise InputError("args.value", what, fix=fix)
        args.effective_batch = rows
    return [f"conversations packed into rows of {args.max_length:,} tokens"] if args.packing else []


def _unigram(train: chats.Conversations, vocabulary: int) -> Any:
    """Return the losses of tokens by their frequency, smoothed by adding one."""
    counts = np.bincount(train.targets[0], minlength=vocabulary) + 1.0
    losses = -np.log(counts / counts.sum())
    return lambda tokens, before: losses[tokens]


def _bigram(train: chats.Conversations, vocabulary: int) -> Any:
    """Return the losses of tokens by their frequency after the token before them, mixed with the plain one."""
    tokens, before = (each.astype(np.int64) for each in train.targets)
    plain = (np.bincount(tokens, minlength=vocabulary) + 1.0) / (len(tokens) + vocabulary)
    pairs, counts = np.unique(before * vocabulary + tokens, return_counts=True)
    firsts = np.bincount(before, minlength=vocabulary)

    def losses(tokens: Any, before: Any) -> Any:
        wanted = before * vocabulary + tokens
        place = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
        seen = np.where(pairs[place] == wanted, counts[place], 0)
        return -np.log((seen + _BACKOFF * plain[tokens]) / (firsts[before] + _BACKOFF))

    return losses


def _scored(job: Job, losses: Any) -> BaselineScores:
    """Score the losses of trained tokens, given the token before each, on the validation rows."""
    sums, counts = [], []
    for place in range(len(job.eval_dataset)):
        row = job.eval_dataset[place]
        is_target = row["labels"] != text.IGNORED
        sums.append(float(losses(row["labels"][is_target], row["input_ids"][is_target]).sum()))
        counts.append(int(is_target.sum()))
    create = partial(load_metric, "perplexity")
    by_token = score_rows(create, [{"sums": sums, "counts": counts}])
    means = [total / max(count, 1) for total, count in zip(sums, counts, strict=True)]
    by_row = score_rows(create, [{"sums": means, "counts": [min(count, 1) for count in counts]}])
    name = "conversation_perplexity"
    rows: dict[str, RowScores] = {"perplexity": by_token.rows["perplexity"], name: by_row.rows["perplexity"]}
    return BaselineScores({"perplexity": by_token["perplexity"], name: by_row["perplexity"]}, rows)


def _usual_answer(job: Job) -> BaselineScores:
    """Score the most frequent last answer of the training rows."""
    most = min(job.args.exact_match_rows, len(job.eval_dataset))
    answers = Counter(chats.last_answer(row["chat"]) for row in job.data.each_row("train"))
    usual = min(answers, key=lambda each: (-answers[each], each))
    true = [chats.last_answer(job.eval_dataset.rows[place]["chat"]) for place in range(most)]
    create = partial(load_metric, "exact_match")
    return score_rows(create, [{"predictions": [usual] * most, "references": true}])
