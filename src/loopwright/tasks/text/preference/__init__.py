"""preference: a decoder tuned on pairs of answers, to prefer the chosen one (DPO, IPO, SimPO).

The log-probability of an answer is a sum over its tokens and the end of its turn. Both answers of a pair are one
sample, so they are in the same forward pass, and a batch of pairs gives the mean of their losses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from loopwright.errors import ConfigError, InputError
from loopwright.metrics.paired import rows_of
from loopwright.metrics.preferences import RewardAccuracy, Rewards
from loopwright.run_folder import RunFolder
from loopwright.sources import DataPlan, Role
from loopwright.sources.chats.pairs import Pair, read_pair
from loopwright.sources.schema import Schema
from loopwright.tasks import scoring
from loopwright.tasks.adapters import four_bits, keeps_half
from loopwright.tasks.arguments import ShortName, TaskArguments, TaskTrainingArguments, flag
from loopwright.tasks.base import Job, Origin, Rows, Task
from loopwright.tasks.data import RowDataset, RunData
from loopwright.tasks.pretrained import consenting, finding_base
from loopwright.tasks.text import causal_lm, decoders
from loopwright.tasks.text import conversations as chats
from loopwright.tasks.text import language_model as language
from loopwright.tasks.text import models as text
from loopwright.tasks.text.preference import answers
from loopwright.tasks.text.preference.losses import DEFAULT_BETAS, DEFAULT_GAMMA, LOSSES, PreferenceLoss
from loopwright.tasks.text.preference.reference import Reference, digest_of_weights

_MOST_BASELINE = 50_000


@dataclass
class PreferenceArguments(TaskArguments):
    prompt_column: str | None = flag(None, "Column of the prompts, texts or lists of messages; inferred if unset.")
    chosen_column: str | None = flag(None, "Column of the chosen answers; inferred if unset.")
    rejected_column: str | None = flag(None, "Column of the rejected answers; inferred if unset.")
    chat_template: str | None = flag(
        None, "Chat template for messages: the name of a built-in one, or a file; the tokenizer's own if unset."
    )
    answer_end: str = flag(
        "template",
        "What an answer of messages ends with: all that the template writes, as in trl, or its end-of-turn token.",
        choices=("template", "turn"),
    )
    loss: str = flag("dpo", "Loss; simpo needs no reference model.", choices=LOSSES)
    beta: float | None = flag(None, "Scale of the rewards; 0.1, or 2 for simpo, if unset.", above=0)
    gamma: float | None = flag(None, "simpo: by how much the chosen reward should be higher; 1 if unset.", at_least=0)
    label_smoothing: float = flag(
        0.0, "dpo, simpo: share of pairs assumed to be labelled the wrong way round.", at_least=0, below=0.5
    )
    max_length: int | None = flag(
        None, "Maximum tokens of a prompt with an answer; the longest of the data if unset.", at_least=8
    )
    overlong: str = flag("refuse", "What to do with longer pairs.", choices=("refuse", "truncate", "drop"))
    vocab_size: int | None = language.vocab_size_flag()

    max_new_tokens: int = flag(64, "Maximum number of tokens of an answer.", at_least=1)
    temperature: float = flag(0.0, "Sampling temperature of answers; 0 takes the likeliest token.", at_least=0)
    num_samples: int = flag(3, "Held-out prompts to answer at each evaluation, for log and report.", at_least=0)
    trained_tokens: list[str] = decoders.trained_tokens_flag()
    loss_chunk: str = language.loss_chunk_flag()

    max_seq_length = ShortName("max_length", int)

    def __post_init__(self) -> None:
        super().__post_init__()
        language.check_flags(self)
        named = [name for name in (self.prompt_column, self.chosen_column, self.rejected_column) if name is not None]
        if len({*named}) < len(named):
            raise ConfigError(f"prompt, chosen and rejected are columns of their own, but {named} has one twice")
        if self.gamma is not None and self.loss != "simpo":
            raise ConfigError(f"gamma is for loss='simpo', not for {self.loss!r}: leave it out", flag="gamma")
        if self.label_smoothing and self.loss == "ipo":
            raise ConfigError("label_smoothing is for loss='dpo' and 'simpo': leave it out", flag="label_smoothing")


@dataclass
class PreferenceJob(Job):
    reference: Reference | None = None  # None for a loss without one
    is_initial: bool = False  # whether the model has the weights that the run began with


class PreferenceTuning(Task):
    name = "preference"
    summary = "a model tuned to prefer chosen answers to rejected ones"
    explanation = {
        "data": "csv, json, jsonl or parquet with prompt, chosen and rejected, as texts or lists of messages; or with "
        "chosen and rejected alone, as whole conversations that begin with the same prompt.",
        "columns": "--prompt_column, --chosen_column, --rejected_column; inferred if they are clear. A column of tools "
        "is rendered.",
        "loss": "--loss dpo (with --label_smoothing), ipo or simpo (with --gamma); --beta scales the rewards.",
        "reference": "The model as it was before training. Its log-probabilities are computed once, before the first "
        "update, and kept in reference.json of the run; with --lora and without it, training holds one model.",
        "texts": "Rows of texts are tokenized as they are, with the end token; messages by the chat template. What it "
        "writes after an answer's end-of-turn token counts, as in trl; --answer_end turn leaves it out.",
        "model": "--model FOLDER, usually one that was tuned on conversations; from scratch it is a small decoder.",
        "metric": "Reward accuracy: how often the chosen answer has the higher reward, beta times the log-ratio to the "
        "reference (for simpo, beta times the mean log-probability). Chance is 0.5.",
        "predict": 'lw predict RUN pairs.jsonl, or lw predict RUN "prompt" "answer" "answer": the preferred one.',
    }
    example = "lw train preference --data pairs.jsonl --model ./smollm --epochs 1 --lr 5e-6"
    roles = (Role("pair", "pair"),)
    arguments = PreferenceArguments
    defaults = {**language.DEFAULTS, "learning_rate": 5e-6, "per_device_train_batch_size": 8}
    scratch_updates = 300
    pretrained, pretrained_megabytes = "HuggingFaceTB/SmolLM2-135M-Instruct", 269
    adapter_kind = "CAUSAL_LM"
    forward_options = {"use_cache": False}
    prediction_flags = ("max_new_tokens", "temperature")
    kept_flags = ("answer_end", "loss", "max_length", "overlong")
    keeps_generation = True
    logs_samples = True
    dialogue = chats.Dialogue
    predicted = ("preferred", "margin", "chosen_reward", "rejected_reward")
    demo = {"answer_end": "turn", "epochs": 1, "batch": 16, "lr": 1e-3, "threads": 1}
    demo_model = "chat"
    demo_first = {
        **{"data": "dialogues", "max_length": 64, "vocab_size": 400, "packing": False, "num_samples": 0},
        **{"max_steps": 200, "batch": 16, "lr": 3e-3, "threads": 1, "rehearsal": False},
    }
    demo_rows = ("preference_rows", "preference_rows", None)
    demo_note = (
        "a small model that learnt dialogues learns when to answer briefly: reward accuracy 1.0 (chance 0.5), 26 s"
    )

    def demo_files(self, variant: str | None = None, source: str | Path | None = None) -> Any:
        from loopwright.demos.preference_rows import preference_files

        return preference_files()

    def schema(self, args: Any) -> Schema:
        given = tuple(getattr(args, f"{name}_column", None) or "" for name in answers.PARTS)
        return Schema(self.name, (Role("pair", "pair", names=given if any(given) else ()),))

    def columns(self, args: Any) -> dict[str, Any]:
        return {} if args.group_column is None else {"group": args.group_column}

    def build(self, data: RunData, args: Any, training: TaskTrainingArguments, origin: Origin) -> Job:
        notes: list[str] = []
        if origin.path is None:
            tokenizer = causal_lm.train_tokenizer(_texts(data), language.choose_vocabulary(args, _texts(data)))
        else:
            tokenizer = text.load_tokenizer(origin.path, needs_pad=False)
        end = None if origin.is_run else _settle_template(args, tokenizer, data, origin)
        if origin.is_run:
            loaded = text.load_model(origin, causal_lm.AUTO_CLASS)
            text.open_generation(loaded.model, Path(str(origin.path)))
        elif origin.path is None:
            notes.append(_choose_length(args, tokenizer, data, None))
            loaded = _create_model(args, training, tokenizer, origin)
        else:
            loaded = _create_model(args, training, tokenizer, origin)
            decoders.check_decoder(self, origin.path, loaded)
            notes.append(_choose_length(args, tokenizer, data, text.longest_allowed(tokenizer, loaded.model.config)))
        notes += [] if origin.is_run else _note_tail(args, tokenizer, data, end)
        if end is not None:
            decoders.end_generation(loaded.model, tokenizer, end)
        collator = answers.PairCollator(tokenizer.pad_token_id, text.padding_multiple(training))
        job = PreferenceJob(self, data, args, training, loaded.model, tokenizer, collator, notes, loaded.new)
        if _loss(args).needs_reference:
            weights = None if origin.is_run else digest_of_weights(loaded.model)
            create = partial(_reference_model, args, training, tokenizer)
            job.reference = Reference(create, weights, args.load_in is not None, keeps_half(args, training))
            job.is_initial = not origin.is_run
        return job

    def create_dataset(self, job: Job, rows: Rows, *, is_labelled: bool, is_training: bool = False) -> Any:
        assert isinstance(job, PreferenceJob)
        if not is_labelled and len(rows) and "chat" in rows[0]:  # of a dialogue
            return chats.prompts(job, rows)
        if not is_labelled:
            return RowDataset(rows, _encoder(job.args, job.processor, job.args.max_length))
        encoder, name = _encoder(job.args, job.processor), "training" if is_training else "validation"
        dataset = answers.PairDataset(rows, encoder, job.args.max_length, job.args.overlong, name)
        job.notes += dataset.notes(job.args.max_length)
        if job.reference is not None:
            model = job.model if job.is_initial else None
            compute = partial(_log_probs_of_rows, job)
            dataset.reference = job.reference.log_probs(dataset, compute, model, job.folder)
            job.notes += job.reference.take_notes()
        return dataset

    def callbacks(self, job: Job, run: RunFolder) -> list[Any]:
        """Keep the reference in the run folder: from here on the model changes."""
        assert isinstance(job, PreferenceJob)
        if job.reference is not None and job.is_initial and job.training.process_index == 0:
            job.reference.write(run.path)
        job.is_initial = False
        return super().callbacks(job, run)

    def compute_loss(self, job: Job, model: Any, batch: Mapping[str, Any]) -> tuple[Any, Any]:
        log_probs, num_tokens = answers.answer_log_probs(model, batch, job)
        found = _loss(job.args)(log_probs, num_tokens, batch.get("reference"))
        return found.losses.mean(), None if found.losses.requires_grad else found

    def create_scorer(self, job: Job) -> scoring.Scorer:
        accuracy = scoring.MetricScorer(RewardAccuracy, {"reward_accuracy": True})
        rewards = scoring.MetricScorer(Rewards, {"reward_margin": True})
        return scoring.JointScorer([accuracy, rewards, scoring.LossInterval()])

    def score_batch(self, job: Job, batch: Mapping[str, Any], outputs: Any) -> list[dict[str, Any]]:
        chosen, rejected = outputs.rewards.double().unbind(-1)
        columns = {"position": batch["position"], "chosen_reward": chosen, "rejected_reward": rejected}
        return scoring.samples_of(**columns, loss=outputs.losses.double())

    def readable(self, job: Job, sample: Mapping[str, Any], row: Mapping[str, Any] | None) -> dict[str, Any]:
        preferred = _preferred(sample["chosen_reward"], sample["rejected_reward"])
        kept = ("position", "loss", "chosen_reward", "rejected_reward")
        return {**{name: sample[name] for name in kept}, "preferred": preferred}

    def describe_row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {name: answers.shown(getattr(row["pair"], name)) for name in answers.PARTS}

    def describe_sample(self, job: Job, batch: Mapping[str, Any], index: int) -> list[tuple[str, str]]:
        ids, mask, is_answer = (batch[name][index] for name in ("input_ids", "attention_mask", "is_answer"))
        prompt = ids[0][mask[0].bool() & ~is_answer[0]]
        parts = [prompt, *(ids[place][is_answer[place]] for place in (0, 1))]
        return [(name, job.processor.decode(part.tolist())) for name, part in zip(answers.PARTS, parts, strict=True)]

    def baselines(self, job: Job) -> Mapping[str, Mapping[str, float]]:
        """Score chance, the longer and the shorter answer, and the reference model's own log-probabilities."""
        dataset = job.eval_dataset
        size = min(len(dataset), _MOST_BASELINE)
        pairs = [dataset.rows[place]["pair"] for place in range(size)]
        sides = [[len(answers.shown(side)) for side in (pair.chosen, pair.rejected)] for pair in pairs]
        lengths = np.array(sides, np.float64)
        scores = {"longer answer": lengths, "shorter answer": -lengths}
        if dataset.reference is not None:
            scores["reference model"] = dataset.reference[:size].astype(np.float64)
        found = {"chance": scoring.BaselineScores({"reward_accuracy": 0.5}, {"reward_accuracy": rows_of([0.5] * size)})}
        columns = ("chosen_rewards", "rejected_rewards")
        for name, values in scores.items():
            found[name] = scoring.score_rows(RewardAccuracy, [dict(zip(columns, values.T, strict=True))])
        return found

    def rows_of_texts(self, plan: DataPlan, texts: Sequence[str]) -> list[dict[str, Any]]:
        groups = [each.split("\t") for each in texts] if any("\t" in each for each in texts) else [list(texts)]
        if any(len(group) != 3 for group in groups):
            what = (
                f"a prompt and two answers are compared, got {len(groups[0])} text{'s' if len(groups[0]) > 1 else ''}"
            )
            fix = 'give three texts: "prompt" "answer" "answer", or a line with tabs between them'
            raise InputError("args.value", what, saw=[repr(each)[:80] for each in texts], fix=fix)
        formats = plan.chats.get("format", {})
        is_chat = not any(name.endswith("texts") for name in formats)
        return [{"pair": _typed_pair(group, is_chat)} for group in groups]

    def predict_batch(self, job: Job, model: Any, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        assert isinstance(job, PreferenceJob)
        log_probs, num_tokens = answers.answer_log_probs(model, batch)
        reference = None
        if job.reference is not None:
            if job.folder is not None and job.reference.weights is None:
                job.reference.read(job.folder)
            reference, _ = answers.answer_log_probs(job.reference.model.to(log_probs.device), batch)
        rewards = _loss(job.args)(log_probs, num_tokens, reference).rewards.tolist()
        rows = ((_preferred(a, b), round(a - b, 6), round(a, 6), round(b, 6)) for a, b in rewards)
        return [dict(zip(self.predicted, row, strict=True)) for row in rows]

    def written_samples(self, job: Job, samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        asked = []
        for place in language.sample_places(job, len(job.eval_dataset)):
            found, pair = job.eval_dataset.features(place), job.eval_dataset.rows[place]["pair"]
            prompt = found["input_ids"][0][: found["start"]]
            asked.append((prompt, answers.last(pair.prompt), answers.last(pair.chosen)))
        return chats.answered(job, asked)

    def preview(self, job: Job) -> list[tuple[str, bool]]:
        """Return the first chosen answer after its prompt, with the tokens that count."""
        first = job.train_dataset[0]
        ids = first["input_ids"][0]
        labels = [text.IGNORED] * first["start"] + ids[first["start"] :]
        return chats.marked_tokens(job.processor, ids[:-1], labels[1:])

    def finish_adapters(self, job: Job) -> None:
        decoders.train_tokens(job)

    def parameter_groups(self, job: Job) -> list[dict[str, Any]]:
        return decoders.without_decay(job, super().parameter_groups(job))


def _log_probs_of_rows(job: Job, model: Any, dataset: Any) -> Any:
    """Return a model's log-probabilities of all pairs, with its adapters switched off; processes share the batches."""
    import torch

    from loopwright.config.processes import gather_bytes
    from loopwright.engine.modes import evaluating
    from loopwright.engine.nested import to_device

    training, size = job.training, job.training.eval_batch_size
    device = torch.device("cpu") if training.fsdp else training.device
    precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(str(training.mixed_precision))
    if next(model.parameters()).device != device:
        model.to(device)
    batches = [range(start, min(start + size, len(dataset))) for start in range(0, len(dataset), size)]
    found = [np.zeros((0, 2), np.float32)]
    with (
        evaluating(model),
        torch.no_grad(),
        getattr(model, "disable_adapter", nullcontext)(),
        torch.autocast(device.type, precision, enabled=precision is not None),
    ):
        for batch in batches[training.process_index :: training.world_size]:
            features = job.collate_fn([dataset[position] for position in batch])
            log_probs, _ = answers.answer_log_probs(model, to_device(features, device))
            found.append(log_probs.float().cpu().numpy())
    parts = gather_bytes(np.concatenate(found).tobytes())
    values = np.empty((len(dataset), 2), np.float32)
    for rank, part in enumerate(parts):
        positions = [position for batch in batches[rank :: len(parts)] for position in batch]
        values[positions] = np.frombuffer(part, np.float32).reshape(-1, 2)
    return values


def _encoder(args: Any, tokenizer: Any, max_length: int | None = None) -> answers.PairEncoder:
    from loopwright.data.chats import ChatEncoder

    is_cut = args.answer_end == "turn" and tokenizer.chat_template
    return answers.PairEncoder(tokenizer, max_length, ChatEncoder(tokenizer).end_of_turn if is_cut else None)


def _note_tail(args: Any, tokenizer: Any, data: RunData, end: int | None) -> list[str]:
    """Say what the template writes after the end of an answer: it counts, but is never generated."""
    pair = data.rows("train")[0]["pair"]
    ids = answers.PairEncoder(tokenizer)({"pair": pair})["input_ids"][0] if end is not None and pair.is_chat else []
    tail = tokenizer.decode(ids[len(ids) - ids[::-1].index(end) :]) if end in ids else ""
    if not tail or args.answer_end == "turn":
        return []
    return [f"the template writes {tail!r} after an answer, which counts, as in trl: --answer_end turn leaves it out"]


def _settle_template(args: Any, tokenizer: Any, data: RunData, origin: Origin) -> int | None:
    """Give a tokenizer its chat template with the tokens it writes, and return the one that ends a turn, if any."""
    from loopwright.data.chats import ChatEncoder

    if all(name.endswith("texts") for name in data.plan.chats.get("format", {})):
        if args.chat_template is not None:
            what, fix = "--chat_template has no effect: the rows are texts", "leave out --chat_template"
            raise InputError("args.value", what, fix=fix)
        decoders.choose_trained_tokens(args, tokenizer, [])
        return None
    added = decoders.set_template(tokenizer, args.chat_template or (None if origin.path else "chatml"))
    if origin.path is not None:
        decoders.choose_trained_tokens(args, tokenizer, added)
    return ChatEncoder(tokenizer).end_of_turn if tokenizer.is_fast else None


def _create_model(args: Any, training: Any, tokenizer: Any, origin: Origin) -> text.Loaded:
    """Return the model that a run begins with: the same one each time."""
    from loopwright.engine.seeding import preserved_generators, seed_generators

    with preserved_generators():
        seed_generators(training.seed)
        if origin.path is None:
            return causal_lm.small_decoder(tokenizer, args.max_length)
        loaded = text.load_model(origin, causal_lm.AUTO_CLASS)
        language.match_vocabulary(loaded.model, tokenizer)
        return loaded


def _reference_model(args: Any, training: Any, tokenizer: Any, is_quantized: bool, keeps_half: bool) -> Any:
    with consenting(args):
        with finding_base(args.model, "it is the reference that answers are compared with"):
            path = None if args.model is None else text.find_model(args.model)
        quantization = four_bits(training.bf16) if is_quantized else None
        origin = Origin(path, quantization=quantization, keeps_half=keeps_half)
        return _create_model(args, training, tokenizer, origin).model


def _choose_length(args: Any, tokenizer: Any, data: RunData, limit: int | None) -> str:
    text.check_length("max_length", args.max_length, limit)
    encode = _encoder(args, tokenizer)
    splits = [split for split in ("train", "validation") if data.has(split)]
    lengths = [max(map(len, encode(row)["input_ids"])) for split in splits for row in data.each_row(split)]
    if args.max_length is None:
        args.max_length = max(8, min(-(-max(lengths) // 8) * 8, limit or max(lengths) + 7))
    half, most = (int(np.quantile(lengths, share, method="inverted_cdf")) for share in (0.5, 0.95))
    return f"tokens of a pair's longer side p50 {half} p95 {most} max {max(lengths)} -> max_length {args.max_length}"


def _loss(args: Any) -> PreferenceLoss:
    beta = DEFAULT_BETAS[args.loss] if args.beta is None else args.beta
    gamma = DEFAULT_GAMMA if args.gamma is None else args.gamma
    return PreferenceLoss(args.loss, beta, gamma if args.loss == "simpo" else 0.0, args.label_smoothing)


def _texts(data: RunData) -> Iterator[str]:
    for row in data.each_row("train"):
        yield from (answers.shown(getattr(row["pair"], name)) for name in answers.PARTS)


def _typed_pair(texts: Sequence[str], is_chat: bool) -> Pair | None:
    """Return three texts as a pair; None if they would be refused in a file."""
    try:
        pair = read_pair(dict(zip(answers.PARTS, texts, strict=True)))
    except InputError:
        return None
    return answers.as_messages(pair) if is_chat and not pair.is_chat else pair


def _preferred(chosen: float, rejected: float) -> str:
    return "chosen" if chosen > rejected else "rejected"
