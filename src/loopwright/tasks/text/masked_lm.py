"""masked-lm: masked tokens, in blocks of the joined text or line by line.

In training each batch gets new masks from the seeded generators. In an evaluation a sample's masks depend only on its
position: every evaluation, at any batch size, has the same targets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from loopwright.errors import InputError
from loopwright.metrics import load as load_metric
from loopwright.metrics.words import WITHOUT_SPACES, count_words, first_words, script_of
from loopwright.tasks.arguments import TaskTrainingArguments, flag
from loopwright.tasks.base import Job, Origin, Rows
from loopwright.tasks.data import RowDataset, RunData
from loopwright.tasks.scoring import JointScorer, MetricScorer, Scorer
from loopwright.tasks.text import language_model as language
from loopwright.tasks.text import models as text
from loopwright.tasks.text.samples import tokens_of

AUTO_CLASS = "AutoModelForMaskedLM"
_LARGEST_BLOCK = 512
_MASK_SHARE, _RANDOM_SHARE = 0.8, 0.1
_EVALUATION_SEED = 20
_NUM_CANDIDATES = 5
_WRITTEN_MASK = "[MASK]"


@dataclass
class MaskedArguments(language.LanguageArguments):
    mlm_probability: float = flag(0.15, "Fraction of the tokens to predict.", above=0, below=1)


class MaskedLanguageModel(language.LanguageTask):
    name = "masked-lm"
    summary = "a model that fills in masked tokens, from scratch or fine-tuned"
    explanation = {
        "data": "txt (a row is a line, or a paragraph with --text_unit paragraph), or csv, tsv, json, jsonl or "
        "parquet with a column of texts.",
        "blocks": "All rows are joined, with a separator after each, and cut into blocks of --block_size tokens. "
        "Nothing is dropped. --line_by_line keeps rows separate.",
        "masks": "--mlm_probability of the tokens are predicted: 80 % masked, 10 % replaced by another token, 10 % "
        "unchanged; new ones in each epoch, always the same in evaluations.",
        "model": "--model FOLDER, or from scratch a small ModernBERT with byte pairs trained on the data.",
        "metric": "Accuracy and perplexity over the predicted tokens.",
        "predict": "Fills each [MASK] of a text.",
    }
    example = "lw train masked-lm --data book.txt --epochs 3 --batch 16 --lr 1e-3"
    pretrained, pretrained_megabytes = "distilbert/distilroberta-base", 331
    scratch_updates = 500
    kept_flags = ("line_by_line", "block_size", "mlm_probability")
    predicted = ("text", "masks")
    arguments = MaskedArguments
    defaults = {**language.DEFAULTS, "per_device_train_batch_size": 16, "per_device_eval_batch_size": 16}
    demo = {
        **{"block_size": 128, "vocab_size": 300, "mlm_probability": 0.2, "max_steps": 700, "batch": 16, "lr": 2e-3},
        **{"warmup_steps": 0.1, "threads": 1},
    }
    demo_note = "a small ModernBERT fills in letters of Python's docstrings: accuracy 0.45 (unigram 0.09), 120 s"

    def baselines(self, job: Job) -> Mapping[str, Mapping[str, float]]:
        tokenizer = job.processor
        metrics = ("token_accuracy", "perplexity")
        return {"unigram": language.unigram(job, _encoder(tokenizer), metrics, tokenizer.all_special_ids)}

    def build(self, data: RunData, args: Any, training: TaskTrainingArguments, origin: Origin) -> Job:
        notes: list[str] = []
        if origin.path is None:
            texts = partial(language.training_texts, data)
            tokenizer = train_tokenizer(texts(), language.choose_vocabulary(args, texts()))
            notes += language.choose_block(args, data, _counter(tokenizer), None, language.small_largest(args))
            tokenizer.model_max_length = args.block_size
            loaded = text.small_encoder(AUTO_CLASS, tokenizer)
        else:
            tokenizer = text.load_tokenizer(origin.path, needs_pad=False)
            loaded = text.load_model(origin, AUTO_CLASS)
            if not origin.is_run:
                _check_mask_token(origin.path, tokenizer)
                notes += language.match_vocabulary(loaded.model, tokenizer)
                limit = text.longest_allowed(tokenizer, loaded.model.config)
                notes += language.choose_block(args, data, _counter(tokenizer), limit, _LARGEST_BLOCK)
        masking = Masking(tokenizer, args.mlm_probability)
        collator = language.PaddingCollator(before=masking.mask_batch, pad_id=tokenizer.pad_token_id)
        return Job(self, data, args, training, loaded.model, tokenizer, collator, notes, loaded.new)

    def create_dataset(self, job: Job, rows: Rows, *, is_labelled: bool, is_training: bool = False) -> Any:
        tokenizer, size = job.processor, job.args.block_size
        if not is_labelled:
            return RowDataset(rows, PromptEncoder(tokenizer, size))
        masking = None if is_training else Masking(tokenizer, job.args.mlm_probability)
        if job.args.line_by_line:
            return MaskedDataset(RowDataset(rows, LineEncoder(tokenizer, size)), masking)
        stream = language.read_stream(rows, _encoder(tokenizer))
        return MaskedDataset(BlockDataset(tokenizer, stream, size), masking)

    @staticmethod
    def score_tokens(logits: Any, labels: Any) -> dict[str, Any]:
        return {**language.LanguageTask.score_tokens(logits, labels), "predictions": logits.argmax(-1)}

    def create_scorer(self, job: Job) -> Scorer:
        accuracy = MetricScorer(partial(load_metric, "token_accuracy"), {"token_accuracy": True})
        return JointScorer([accuracy, MetricScorer(partial(load_metric, "perplexity"), {"perplexity": False})])

    def score_batch(self, job: Job, batch: Mapping[str, Any], outputs: Any) -> list[dict[str, Any]]:
        samples = language.sample_sums(batch, outputs)
        labels, predictions = batch["labels"].cpu().numpy(), outputs["predictions"].cpu().numpy()
        for sample, wanted, predicted in zip(samples, labels, predictions, strict=True):
            is_asked = wanted != text.IGNORED
            sample |= {"prediction": predicted[is_asked].tolist(), "reference": wanted[is_asked].tolist()}
        return samples

    def readable(self, job: Job, sample: Mapping[str, Any], row: Mapping[str, Any] | None) -> dict[str, Any]:
        sides = ("prediction", "reference")
        tokens = {name: [job.processor.decode([each]) for each in sample[name]] for name in sides}
        tokens |= {f"{name}_ids": sample[name] for name in sides}  # parts of a character have the same text
        return {"position": sample["position"], "loss": sample["loss"], "num_tokens": sample["count"], **tokens}

    def predict_batch(self, job: Job, model: Any, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        tokenizer = job.processor
        logits = model(**self.model_inputs(batch)).logits
        is_mask = batch["input_ids"] == tokenizer.mask_token_id
        found = []
        for given, row, places in zip(batch["text"], logits, is_mask, strict=True):
            shares, ids = row[places].float().softmax(-1).topk(min(_NUM_CANDIDATES, row.shape[-1]))
            masks = [
                [
                    {"token": tokenizer.decode([number]), "score": round(share, 6)}
                    for number, share in zip(numbers, mask_shares, strict=True)
                ]
                for numbers, mask_shares in zip(ids.tolist(), shares.tolist(), strict=True)
            ]
            pieces = given.split(tokenizer.mask_token)
            fills = [each[0]["token"].strip() or each[0]["token"] for each in masks]
            filled = "".join(piece + fill for piece, fill in zip(pieces, [*fills, ""], strict=True))
            found.append({"text": filled, "masks": masks})
        return found

    def example_input(self, job: Job, text: str) -> str:
        between = "" if script_of([text]) in WITHOUT_SPACES else " "
        return f"{first_words(text, count_words(text) - 1)}{between}{job.processor.mask_token}".strip()

    def describe_sample(self, job: Job, batch: Mapping[str, Any], index: int) -> list[tuple[str, str]]:
        wanted = [token for token in batch["labels"][index].tolist() if token != text.IGNORED]
        asked = " · ".join(job.processor.decode([token]) for token in wanted)
        return [("text", tokens_of(job, batch, index)), (f"{len(wanted)} asked for", asked)]


class Masking:
    def __init__(self, tokenizer: Any, probability: float) -> None:
        self._mask_id = int(tokenizer.mask_token_id)
        self._vocabulary = len(tokenizer)
        self._probability = probability

    def mask_batch(self, arrays: dict[str, language.Numbers]) -> None:
        """Mask a training batch in place, with torch's generator."""
        from loopwright.data.masking import TorchDraws

        is_special = arrays["special_tokens_mask"].astype(np.bool_)
        arrays["input_ids"], arrays["labels"] = self._mask(arrays["input_ids"], is_special, TorchDraws(None))

    def mask_sample(self, features: Mapping[str, Any], position: int) -> dict[str, Any]:
        """Return an evaluation sample with masks that depend only on its position."""
        from loopwright.data.masking import NumpyDraws

        draws = NumpyDraws(np.random.default_rng((_EVALUATION_SEED, position)))
        is_special = np.asarray(features["special_tokens_mask"], np.bool_)[None]
        masked, labels = self._mask(np.asarray(features["input_ids"], np.int64)[None], is_special, draws)
        return {**features, "input_ids": masked[0], "labels": labels[0]}

    def _mask(
        self, ids: language.Numbers, is_special: npt.NDArray[np.bool_], draws: Any
    ) -> tuple[language.Numbers, language.Numbers]:
        from loopwright.data.masking import Recipe, mask_tokens

        recipe = Recipe(self._probability, _MASK_SHARE, _RANDOM_SHARE, self._mask_id, self._vocabulary)
        masked, labels = mask_tokens(ids, is_special, None, recipe, draws)
        is_without = (labels == text.IGNORED).all(1) & ~is_special.all(1)
        for row in np.flatnonzero(is_without):
            places = np.flatnonzero(~is_special[row])
            place = places[draws.tokens(len(places), np.ones(1, np.bool_))[0]]
            labels[row, place], masked[row, place] = ids[row, place], self._mask_id
        return masked, labels


class MaskedDataset(RowDataset):
    """Evaluation samples with their masks, or training samples without."""

    def __init__(self, dataset: RowDataset, masking: Masking | None) -> None:
        super().__init__(dataset.rows)
        self._dataset = dataset
        self.stream = getattr(dataset, "stream", None)
        self._masking = masking

    def features(self, position: int) -> dict[str, Any]:
        features = self._dataset[position]
        return features if self._masking is None else self._masking.mask_sample(features, position)


class BlockDataset(RowDataset):
    """Blocks of a stream, each with the tokenizer's special tokens around it."""

    def __init__(self, tokenizer: Any, stream: language.TokenStream, size: int) -> None:
        self.stream = stream
        self._ids = stream.ids
        plain, whole = tokenizer("a", add_special_tokens=False)["input_ids"], tokenizer("a")["input_ids"]
        start = next(index for index in range(len(whole)) if whole[index : index + len(plain)] == plain)
        self._before = np.array(whole[:start], np.int64)
        self._after = np.array(whole[start + len(plain) :], np.int64)
        self._size = size - len(self._before) - len(self._after)
        self._special = np.array(tokenizer.all_special_ids, np.int64)
        super().__init__(language.BlockRows(tokenizer, self._ids, self._size))

    def features(self, position: int) -> dict[str, Any]:
        start = position * self._size
        ids = np.concatenate([self._before, self._ids[start : start + self._size], self._after]).astype(np.int64)
        return {"input_ids": ids, "special_tokens_mask": np.isin(ids, self._special).astype(np.int64)}


class LineEncoder:
    """Encodes a row in loader workers, cut to `size` tokens."""

    def __init__(self, tokenizer: Any, size: int) -> None:
        self._tokenizer = tokenizer
        self._special = np.array(tokenizer.all_special_ids, np.int64)
        self._size = size

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        ids = np.array(self._tokenizer(row["text"], truncation=True, max_length=self._size)["input_ids"], np.int64)
        return {"input_ids": ids, "special_tokens_mask": np.isin(ids, self._special).astype(np.int64)}


@dataclass(frozen=True)
class PromptEncoder:
    """Encodes a text with masks, for a model that takes `size` tokens."""

    tokenizer: Any
    size: int

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        mask = self.tokenizer.mask_token
        given = row["text"].replace(_WRITTEN_MASK, mask)
        if mask not in given:
            what = f"the text has no {_WRITTEN_MASK} to fill"
            fix = f"put {_WRITTEN_MASK} in place of a word: 'the {_WRITTEN_MASK} of Python'"
            raise InputError("args.value", what, saw=[repr(given[:80])], fix=fix)
        ids = self.tokenizer(given, verbose=False)["input_ids"]
        if len(ids) > self.size:
            what = f"a text of {len(ids)} tokens is longer than the blocks that the model was trained on"
            fix = "give only the sentences around the mask"
            raise InputError("model.length", what, saw=[repr(given[:80]), f"blocks have {self.size} tokens"], fix=fix)
        return {"input_ids": ids, "text": given}


def train_tokenizer(texts: Any, vocabulary: int) -> Any:
    """Train a byte-level BPE tokenizer. A mask absorbs the space before it, as word tokens do."""
    from tokenizers import AddedToken

    tokenizer = text.train_tokenizer(texts, vocabulary, lowercase=False)
    has_words = any(token.startswith("Ġ") and len(token) > 1 for token in tokenizer.get_vocab())
    if has_words:
        tokenizer.add_special_tokens({"mask_token": AddedToken(tokenizer.mask_token, lstrip=True, special=True)})
    return tokenizer


def _check_mask_token(path: str, tokenizer: Any) -> None:
    if tokenizer.mask_token_id is None:
        raise InputError(
            "model.mask_token",
            f"the tokenizer of {path} has no mask token",
            saw=[f"its special tokens are {', '.join(tokenizer.all_special_tokens) or 'none'}"],
            fix='set "mask_token" in its tokenizer_config.json   or   causal-lm instead of masked-lm',
        )


def _encoder(tokenizer: Any) -> language.RowEncoder:
    end = tokenizer.sep_token_id if tokenizer.sep_token_id is not None else tokenizer.eos_token_id
    return language.RowEncoder(tokenizer, end, counts_bytes=False)


def _counter(tokenizer: Any) -> Any:
    return lambda row: len(tokenizer(row["text"], verbose=False)["input_ids"])
