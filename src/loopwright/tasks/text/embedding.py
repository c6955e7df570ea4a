"""sentence-embedding: an encoder whose vectors are close for texts that belong together."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopwright.errors import InputError
from loopwright.metrics import Combined, Metric
from loopwright.metrics import load as load_metric
from loopwright.metrics.words import tokenize
from loopwright.sources import DataPlan, Role, Schema, open_table
from loopwright.sources.column_roles import choose_columns
from loopwright.sources.tables import value_at
from loopwright.sources.values import UnusableValueError, as_text
from loopwright.tasks import scoring
from loopwright.tasks.arguments import ShortName, TaskArguments, TaskTrainingArguments, flag
from loopwright.tasks.base import COMMON_DEFAULTS, Job, Origin, Rows, Task
from loopwright.tasks.data import RowDataset, RunData
from loopwright.tasks.text import models as text
from loopwright.tasks.text.pools import PoolScorer

AUTO_CLASS = "AutoModel"
_MOST_UNTRAINED = 2_000  # maximum rows for scoring the untrained model, which costs as much as an evaluation
_NUM_NEAREST = 5
_WORD_DIMENSIONS = 512
_SCORE_NAMES = ("score", "similarity", "similarity_score", "label", "labels", "rating")
_pair = itemgetter("text", "text_pair")


@dataclass
class SentenceEmbeddingArguments(TaskArguments):
    text_column: str | None = flag(None, "Column of the first text; inferred if unset.")
    text_pair_column: str | None = flag(None, "Column of the text that belongs to it or is compared with it.")
    score_column: str | None = flag(None, "Column of their similarity; without it, all pairs belong together.")
    objective: str | None = flag(
        None,
        "What to learn: scores (the cosine is the score), or negatives (each text is nearest to its partner among "
        "those of the batch); scores if unset and the data has them.",
        choices=("scores", "negatives"),
    )
    temperature: float = flag(0.05, "Divisor of the cosines in the loss of negatives.", above=0)
    lowest_score: float | None = flag(None, "Score of texts that have nothing in common; from the data if unset.")
    highest_score: float | None = flag(None, "Score of texts that mean the same; from the data if unset.")
    pool_size: int = flag(5_000, "Rows among which each text has to find its partner in an evaluation.", at_least=2)
    max_length: int | None = flag(None, "Maximum number of tokens of a text; chosen from the data if unset.")
    candidates: str | None = flag(None, "predict: a file of texts, of which the nearest to each input is returned.")

    max_seq_length = ShortName("max_length", int)


@dataclass(frozen=True)
class PairSchema(Schema):
    def for_prediction(self) -> Schema:
        given = {role.name: role for role in self.roles}
        other = Role("other", names=given["text_pair"].names, is_required=False, may_be_empty=True)
        candidates = Role("candidates", "texts", names=("candidates",), is_required=False, may_be_empty=True)
        return replace(self, roles=(given["text"], other, candidates))


class SentenceEmbedding(Task):
    """Fine-tunes one encoder for both texts of a pair."""

    name = "sentence-embedding"
    summary = "vectors that are close for texts that belong together"
    roles = (
        Role("text", names=("text", "sentence1", "query", "anchor", "question", "text1", "premise")),
        Role("text_pair", names=(*text.TEXT_PAIR_NAMES, "positive", "answer", "document", "passage")),
        Role("score", "float", names=_SCORE_NAMES, is_required=False, is_input=False),
    )
    explanation = {
        "data": "csv, tsv, json, jsonl or parquet with two columns of texts, with or without a column of scores.",
        "scores": "With scores, the cosine of the two vectors learns the score; STS-B's 0 to 5 becomes 0 to 1. The "
        "metric is Spearman's correlation.",
        "pairs": "Without scores, each text learns to be nearest to its partner among those of the batch, so larger "
        "batches learn more. The metrics are the mean reciprocal rank, recall@1, @5, @10 and NDCG@10 among --pool_size "
        "rows.",
        "columns": "--text_column, --text_pair_column and --score_column; inferred if they are clear.",
        "vector": "The mean over the last layer's tokens, normalised to length 1. transformers' AutoModel opens the "
        "encoder.",
        "predict": "For a text, its vector; for two texts with a tab between them, their cosine; for more, the one "
        "nearest to the first. A file has a column of texts and, to compare, a column of partners or of lists named "
        "candidates. --candidates FILE finds the nearest text of a file for each input.",
    }
    example = "lw train sentence-embedding --data pairs.csv --model ./minilm --epochs 2 --batch 64 --lr 5e-5"
    pretrained, pretrained_megabytes = "sentence-transformers/all-MiniLM-L6-v2", 91
    predicted = ("embedding",)
    arguments = SentenceEmbeddingArguments
    defaults = {**COMMON_DEFAULTS, "learning_rate": 5e-5, "per_device_train_batch_size": 32}
    adapter_kind = "FEATURE_EXTRACTION"
    not_inputs = ("position", "is_text", "labels")
    prediction_flags = ("candidates",)
    kept_flags = ("pool_size",)
    demo = {"freeze": "4", "max_length": 32, "epochs": 1, "batch": 32, "lr": 3e-4, "warmup_steps": 0.1, "threads": 1}
    demo_model = "minilm"
    demo_rows = ("function_rows", "pair_rows", "csv")
    demo_note = "the paragraph about a function among 500: recall@1 0.63, mrr 0.73 (untrained 0.53, 0.65), 105 s"

    def schema(self, args: Any) -> Schema:
        roles: tuple[Role, ...] = self.roles
        if args.objective == "negatives":
            roles = tuple(role for role in roles if role.name != "score")
        elif args.objective == "scores":
            roles = tuple(replace(role, is_required=True) for role in roles)
        return PairSchema(self.name, roles)

    def columns(self, args: Any) -> dict[str, Any]:
        named = super().columns(args)
        return {role: column for role, column in named.items() if role != "score" or args.objective != "negatives"}

    def preflight(self, args: Any, say: Any = None) -> DataPlan:
        plan = super().preflight(args, say)
        if plan.label_range is not None and plan.label_range[0] == plan.label_range[1]:
            what = f"all scores are {plan.label_range[0]:g}: there is nothing to learn"
            fix = "--objective negatives"
            raise InputError("data.one_class", what, saw=[f"column {plan.columns['score']!r}"], fix=fix)
        return plan

    def rows_of_texts(self, plan: DataPlan, texts: Sequence[str]) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for each in texts:
            first, *others = each.split("\t")
            rows.append({"text": first})
            if others:
                rows[-1] |= {"other": others[0]} if len(others) == 1 else {"candidates": others}
        return rows

    def baselines(self, job: Job) -> Mapping[str, Mapping[str, float]]:
        from loopwright.engine.modes import evaluating

        data, args, vectors = job.data, job.args, WordVectors()
        vectors.learn(each for row in data.each_row("train") for each in _pair(row))
        found = {"word-overlap": _score_rows(data, args, vectors)}
        num_rows = min(len(data.rows("validation")), args.max_eval_samples or math.inf)
        if args.model is None or num_rows > _MOST_UNTRAINED:
            return found
        model = job.model.to(job.training.device)
        with evaluating(model):
            untrained = partial(_embed, model, job.processor, args.max_length)
            return {**found, "untrained": _score_rows(data, args, untrained)}

    def build(self, data: RunData, args: Any, training: TaskTrainingArguments, origin: Origin) -> Job:
        notes = []
        if not origin.is_run:
            self._settle(data.plan, args, training)
            notes.append(_objective_note(args))
        if origin.path is not None and text.load_config(origin.path).is_encoder_decoder:
            what = f"{origin.path} is an encoder-decoder, not an encoder"
            raise InputError("model.task", what, fix="leave out --model")
        texts = (each for row in data.each_row("train") for each in _pair(row))
        loaded = text.load_or_build(origin, AUTO_CLASS, texts)
        tokenizer = loaded.processor
        if origin.path is not None:  # the mean does not use the pooler, and a part without gradients must not train
            for name, parameter in loaded.model.named_parameters():
                if name.startswith("pooler."):
                    parameter.requires_grad_(False)
            loaded.new = [name for name in loaded.new if not name.startswith("pooler.")]

        def count(row: Mapping[str, Any]) -> int:
            return max(map(len, tokenizer(list(_pair(row)))["input_ids"]))

        if not origin.is_run:
            notes.append(text.settle_length(args, loaded, data.rows("train"), count))
        collator = text.GroupCollator(tokenizer, text.padding_multiple(training))
        return Job(self, data, args, training, loaded.model, tokenizer, collator, notes, loaded.new)

    def _settle(self, plan: DataPlan, args: Any, training: TaskTrainingArguments) -> None:
        args.objective = args.objective or ("scores" if "score" in plan.columns else "negatives")
        if args.objective == "negatives":
            if training.train_batch_size < 2:
                raise InputError(
                    "args.value",
                    "--batch 1 leaves nothing to learn: a text is compared with its own partner alone",
                    saw=["without scores, the partners of the other rows of a batch are the wrong answers"],
                    fix="--batch 32",
                )
            return
        assert plan.label_range is not None, "scores are numbers"
        lowest, highest = plan.label_range
        if args.lowest_score is None:
            args.lowest_score = 0.0 if lowest >= 0 else -1.0 if lowest >= -1 and highest <= 1 else lowest
        if args.highest_score is None:
            args.highest_score = max(1.0, highest) if args.lowest_score in (0.0, -1.0) else highest
        if args.lowest_score >= args.highest_score:
            what = f"--lowest_score {args.lowest_score:g} is not below --highest_score {args.highest_score:g}"
            fix = f"--lowest_score {lowest:g} --highest_score {highest:g}"
            raise InputError("args.value", what, saw=[f"scores are from {lowest:g} to {highest:g}"], fix=fix)

    def create_dataset(self, job: Job, rows: Rows, *, is_labelled: bool, is_training: bool = False) -> Any:
        has_score = is_labelled and job.args.objective == "scores"
        return RowDataset(rows, partial(_encode, job.processor, job.args.max_length, is_labelled, has_score))

    def model_inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value.flatten(0, 1) for name, value in super().model_inputs(batch).items()}

    def why_not_cut(self, job: Job) -> str | None:
        if job.args.objective == "scores":
            return None
        return "the loss compares each pair with all others of its batch, so that a part of it is another loss"

    def compute_loss(self, job: Job, model: Any, batch: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return the mean loss, and the vectors: (samples, 2, dimensions)."""
        from torch.nn import functional

        vectors = self._vectors(model, batch)
        first, second = vectors.unbind(1)
        if job.args.objective == "scores":
            targets = _targets(job.args, batch["labels"])
            return functional.mse_loss((first * second).sum(-1), targets), vectors
        import torch

        logits = first @ second.T / job.args.temperature
        logits = logits.masked_fill(_is_no_rival(batch["input_ids"], batch["attention_mask"]), -float("inf"))
        right = torch.arange(len(logits), device=logits.device)
        return (functional.cross_entropy(logits, right) + functional.cross_entropy(logits.T, right)) / 2, vectors

    def _vectors(self, model: Any, batch: Mapping[str, Any]) -> Any:
        """Return the unit vectors of each sample's texts: (samples, texts, dimensions)."""
        return _pooled(model, self.model_inputs(batch)).unflatten(0, batch["is_text"].shape)

    def create_scorer(self, job: Job) -> scoring.Scorer:
        from torch import distributed

        from loopwright.engine.processes import gather_objects, is_distributed

        if job.args.objective == "scores":
            scorer = scoring.MetricScorer(_correlations, {"spearmanr": True, "pearsonr": True})
            return scoring.JointScorer([scorer, scoring.LossInterval()])
        rank = distributed.get_rank() if is_distributed() else 0
        return PoolScorer(job.args.pool_size, job.args.temperature, gather_objects, rank)

    def score_batch(self, job: Job, batch: Mapping[str, Any], outputs: Any) -> list[dict[str, Any]]:
        positions = batch["position"].tolist()
        if job.args.objective == "scores":
            cosines = (outputs[:, 0] * outputs[:, 1]).sum(-1)
            losses = (cosines - _targets(job.args, batch["labels"])).square()
            columns = {"position": positions, "prediction": cosines, "reference": batch["labels"], "loss": losses}
            return scoring.samples_of(**columns)
        first, second = outputs.cpu().numpy().swapaxes(0, 1)
        rows = zip(batch["input_ids"].tolist(), batch["attention_mask"].tolist(), strict=True)
        keys = [[_key(repr(_kept(*each)).encode()) for each in zip(*row, strict=True)] for row in rows]
        return scoring.samples_of(position=positions, first=list(first), second=list(second), keys=keys)

    def predict_batch(self, job: Job, model: Any, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [{"embedding": vector} for vector in self._vectors(model, batch)[:, 0].tolist()]

    def predict_rows(self, job: Job, rows: Rows) -> Iterator[dict[str, Any]]:
        size = job.training.eval_batch_size
        if job.args.candidates is not None:
            yield from self._nearest(job, rows, _texts_of_file(job.args.candidates))
            return
        for start in range(0, len(rows), size):
            some = [rows[index] for index in range(start, min(start + size, len(rows)))]
            texts = list(dict.fromkeys(each for row in some for each in _compared(row)))
            found = super().predict_rows(job, [{"text": each} for each in texts])
            vectors = dict(zip(texts, (each["embedding"] for each in found), strict=True))
            yield from (_answer(row, vectors) for row in some)

    def _nearest(self, job: Job, rows: Rows, texts: list[str]) -> Iterator[dict[str, Any]]:
        embedded = super().predict_rows(job, [{"text": each} for each in texts])
        known = np.asarray([each["embedding"] for each in embedded], dtype=np.float32)
        for found in super().predict_rows(job, rows):
            cosines = known @ np.asarray(found["embedding"], dtype=np.float32)
            best = [
                {"nearest": texts[place], "place": int(place), "similarity": round(float(cosines[place]), 6)}
                for place in np.argsort(-cosines, kind="stable")[:_NUM_NEAREST]
            ]
            yield {**best[0], "next": best[1:]}


def _encode(tokenizer: Any, max_length: int, is_pair: bool, has_score: bool, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the features of a pair, with or without a score, or of a single text; called in loader workers."""
    texts = list(_pair(row)) if is_pair else [row["text"]]
    features = dict(tokenizer(texts, truncation=True, max_length=max_length, return_attention_mask=True))
    if has_score:
        features["labels"] = float(row["score"])
    return features


def _embed(model: Any, tokenizer: Any, max_length: int, texts: Sequence[str]) -> NDArray[Any]:
    """Return the vectors of texts outside a run, by a model in evaluation mode."""
    import torch

    options = {"truncation": True, "max_length": max_length, "padding": True, "return_tensors": "pt"}
    inputs = tokenizer(list(texts), **options)
    with torch.inference_mode():
        found = _pooled(model, {name: value.to(model.device) for name, value in inputs.items()})
    return np.asarray(found.cpu().numpy())


class WordVectors:
    """Bag-of-words vectors: the overlap of two texts, without their meaning."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._num_texts = 0

    def learn(self, texts: Iterable[str]) -> None:
        for each in texts:
            self._counts.update(set(self._places(each)))
            self._num_texts += 1

    def __call__(self, texts: Sequence[str]) -> NDArray[Any]:
        vectors = np.zeros((len(texts), _WORD_DIMENSIONS), dtype=np.float32)
        for row, each in enumerate(texts):
            for place in self._places(each):
                vectors[row, place] += math.log((1 + self._num_texts) / (1 + self._counts[place])) + 1e-3
        lengths = np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return np.asarray(vectors / lengths)

    def _places(self, given: str) -> list[int]:
        return [_key(word.encode()) % _WORD_DIMENSIONS for word in tokenize(given)]


def _pooled(model: Any, inputs: Mapping[str, Any]) -> Any:
    from torch.nn import functional

    hidden = model(**inputs).last_hidden_state.float()
    mask = inputs["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    means = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)
    return functional.normalize(means, dim=-1)


def _is_no_rival(ids: Any, mask: Any) -> Any:
    """Return (samples, samples): whether two samples share their first text or their partner."""
    import torch

    tokens = ids.masked_fill(mask == 0, -1)
    same = (tokens[:, None] == tokens[None, :]).all(-1).any(-1)
    return same & ~torch.eye(len(same), dtype=torch.bool, device=same.device)


def _targets(args: Any, scores: Any) -> Any:
    """Return scores as cosines: from 0 to 1, or from -1 to 1 if scores can be negative."""
    shares = (scores.float() - args.lowest_score) / (args.highest_score - args.lowest_score)
    return 2 * shares - 1 if args.lowest_score < 0 else shares


def _kept(ids: list[int], mask: list[int]) -> list[int]:
    return [token for token, is_kept in zip(ids, mask, strict=True) if is_kept]


def _key(content: bytes) -> int:
    """Return a 63-bit hash of a text, the same in every process."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 1


def _compared(row: Mapping[str, Any]) -> list[str]:
    other = row.get("other") or row.get("text_pair")
    return [row["text"], *(row.get("candidates") or ([other] if other else []))]


def _answer(row: Mapping[str, Any], vectors: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    first, *others = _compared(row)
    if not others:
        return {"embedding": list(vectors[first])}
    cosines = [round(float(np.dot(vectors[first], vectors[other])), 6) for other in others]
    if not row.get("candidates"):
        return {"similarity": cosines[0]}
    place = int(np.argmax(cosines))
    return {"nearest": others[place], "place": place, "similarity": cosines[place], "similarities": cosines}


def _texts_of_file(path: str) -> list[str]:
    table = open_table(path, flag="--candidates")
    only = {"text": table.columns[0]} if len(table.columns) == 1 else {}
    columns, _ = choose_columns(Schema(SentenceEmbedding.name, SentenceEmbedding.roles[:1]), table, only)
    fix = f"write a text per line into {path}"
    try:
        texts = [as_text(value_at(row, str(columns["text"]))) for row in table]
    except UnusableValueError as error:
        raise InputError("data.value", f"--candidates {path}: {error}", fix=fix) from error
    if not any(each.strip() for each in texts):
        raise InputError("data.empty", f"--candidates {path} contains no text", fix=fix)
    return [each for each in texts if each.strip()]


def _objective_note(args: Any) -> str:
    if args.objective == "scores":
        return f"the cosine of two texts learns their score, from {args.lowest_score:g} to {args.highest_score:g}"
    return "each text is trained to find its partner within the batch"


def _correlations() -> Metric:
    return Combined([load_metric("spearmanr"), load_metric("pearsonr")])


def _score_rows(data: RunData, args: Any, embed: Any) -> scoring.BaselineScores:
    def batches() -> Iterator[tuple[list[dict[str, Any]], Any, Any]]:
        for rows in data.batches("validation", size=64, most=args.max_eval_samples or 50_000):
            yield rows, embed([row["text"] for row in rows]), embed([row["text_pair"] for row in rows])

    if args.objective == "scores":
        columns = (
            {"predictions": (first * second).sum(-1), "references": [row["score"] for row in rows]}
            for rows, first, second in batches()
        )
        return scoring.score_rows(_correlations, columns)
    pools, position = PoolScorer(args.pool_size, args.temperature), 0
    (keeper,) = pools.keep_rows()
    for rows, first, second in batches():
        positions = range(position, position + len(rows))
        keys = [[_key(each.encode()) for each in _pair(row)] for row in rows]
        pools.add(scoring.samples_of(position=positions, first=list(first), second=list(second), keys=keys))
        position += len(rows)
    pools.finish()
    scores = keeper.scores()
    found = {name: value for name, value in pools.compute().items() if name != "pool_loss"}
    return scoring.BaselineScores(found, scores)
