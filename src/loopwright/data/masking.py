"""Language modelling: which tokens are predicted, what replaces them, and the collator.

Everything random comes from a `Draws`: torch's or numpy's global generator, which loopwright's loaders seed before
every micro-batch, or your own generator. The numbers are drawn in transformers' order, so that the same seed gives the
same masks.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import get_worker_info

from loopwright.data.columns import (
    IGNORED,
    Batch,
    BucketCollator,
    Padding,
    as_list,
    checked_kind,
    pad_lists,
    padded_batch,
    padding_side,
    stack,
    take_labels,
    to_columns,
)
from loopwright.errors import ConfigError, DataError

_CONTINUATION = "##"  # WordPiece's prefix of a token that continues a word


class Recipe(NamedTuple):
    """How to mask."""

    probability: float  # of a token, or a word, to be predicted
    mask_share: float  # the fraction of these that become the mask token
    random_share: float  # the fraction of these that become a random token; the rest stay
    mask_id: int  # of the mask token
    vocabulary_size: int  # random tokens are below it


class TorchDraws:
    """Draws from a torch generator, the global one if None: chances, and random tokens for some places."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self._generator = generator

    def chances(self, probabilities: NDArray[np.float64]) -> NDArray[np.bool_]:
        drawn = torch.bernoulli(torch.from_numpy(probabilities.astype(np.float32)), generator=self._generator)
        return drawn.numpy().astype(np.bool_)

    def tokens(self, vocabulary_size: int, places: NDArray[np.bool_]) -> NDArray[np.int64]:
        drawn: NDArray[np.int64] = torch.randint(vocabulary_size, places.shape, generator=self._generator).numpy()
        return drawn[places]


class NumpyDraws:
    """Draws from a numpy generator, the global one if None."""

    def __init__(self, generator: np.random.Generator | None) -> None:
        self._generator = generator

    def chances(self, probabilities: NDArray[np.float64]) -> NDArray[np.bool_]:
        draw = np.random.binomial if self._generator is None else self._generator.binomial
        return np.asarray(draw(1, probabilities)).astype(np.bool_)

    def tokens(self, vocabulary_size: int, places: NDArray[np.bool_]) -> NDArray[np.int64]:
        draw: Any = np.random.randint if self._generator is None else self._generator.integers
        drawn: NDArray[np.int64] = draw(0, vocabulary_size, size=np.count_nonzero(places), dtype=np.int64)
        return drawn


Draws: TypeAlias = TorchDraws | NumpyDraws


def mask_tokens(
    ids: NDArray[np.int64],
    is_special: NDArray[np.bool_],
    is_word_start: NDArray[np.bool_] | None,
    recipe: Recipe,
    draws: Draws,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return new ids with some tokens masked, and labels: the ids of the predicted tokens, -100 elsewhere.

    All arrays are (samples, tokens). Special tokens and padding (`is_special`) are never predicted. `is_word_start`
    marks the first token of each word, for whole words; None masks single tokens.
    """
    is_candidate = ~is_special if is_word_start is None else is_word_start
    is_asked = draws.chances(np.where(is_candidate, recipe.probability, 0.0))
    if is_word_start is not None:  # the other tokens of a word follow its first one
        firsts = np.maximum.accumulate(np.where(is_word_start, np.arange(ids.shape[1]), 0), axis=1)
        is_asked = np.take_along_axis(is_asked, firsts, axis=1) & ~is_special
    labels = np.where(is_asked, ids, IGNORED)

    is_masked = draws.chances(np.full(ids.shape, recipe.mask_share)) & is_asked
    masked = np.where(is_masked, recipe.mask_id, ids)
    if recipe.mask_share < 1 and recipe.random_share > 0:
        # Of the remaining ones; the fraction may slightly exceed 1.
        share = min(1.0, recipe.random_share / (1 - recipe.mask_share))
        is_random = draws.chances(np.full(ids.shape, share)) & is_asked & ~is_masked
        masked[is_random] = draws.tokens(recipe.vocabulary_size, is_random)
    return masked, labels


def words_as_offsets(word_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return offsets (samples, tokens, 2) in which tokens touch only within a word, from the word id of each token."""
    ends = np.broadcast_to(2 * np.arange(word_ids.shape[1]) + 1, word_ids.shape)
    starts = ends - 1
    continues = np.zeros(word_ids.shape, dtype=np.bool_)
    continues[:, 1:] = word_ids[:, 1:] == word_ids[:, :-1]
    return np.stack([np.where(continues, starts - 1, starts), ends], axis=-1)


def word_starts_from_offsets(offsets: NDArray[np.int64], is_special: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which tokens begin a word, from their offsets in the text: after a gap, or after a special token."""
    if offsets.shape != (*is_special.shape, 2):
        raise DataError(
            f"offset_mapping has the shape {offsets.shape}, and the ids {is_special.shape}: there must be two numbers "
            "for each token. Tokenize with return_offsets_mapping=True, and truncate nothing afterwards."
        )
    has_gap = np.ones(is_special.shape, dtype=np.bool_)
    has_gap[:, 1:] = offsets[:, 1:, 0] != offsets[:, :-1, 1]
    return _starts(has_gap, is_special)


def word_starts_from_tokens(ids: NDArray[np.int64], is_special: NDArray[np.bool_], tokenizer: Any) -> NDArray[np.bool_]:
    """Return which tokens begin a word: those without WordPiece's ##; ConfigError for other vocabularies."""
    if not (hasattr(tokenizer, "get_vocab") and hasattr(tokenizer, "convert_ids_to_tokens")):
        raise _no_words(tokenizer)
    unique, places = np.unique(ids, return_inverse=True)
    tokens = tokenizer.convert_ids_to_tokens(unique.tolist())
    continues = np.array([str(token).startswith(_CONTINUATION) for token in tokens])
    if not continues.any() and not any(token.startswith(_CONTINUATION) for token in tokenizer.get_vocab()):
        raise _no_words(tokenizer)
    return _starts(~continues[places].reshape(ids.shape), is_special)


def _starts(is_new: NDArray[np.bool_], is_special: NDArray[np.bool_]) -> NDArray[np.bool_]:
    after_special = np.ones(is_special.shape, dtype=np.bool_)
    after_special[:, 1:] = is_special[:, :-1]
    return (is_new | after_special) & ~is_special


def _no_words(tokenizer: Any) -> ConfigError:
    return ConfigError(
        f"whole_word_mask=True needs word boundaries, and the vocabulary of {type(tokenizer).__name__} has none: no "
        f"token begins with {_CONTINUATION}. Tokenize with return_offsets_mapping=True, or put encoding.word_ids() "
        "into the samples as 'word_ids'."
    )


@dataclass
class DataCollatorForLanguageModeling(BucketCollator):
    """Pads samples and makes the labels of a language model, masked or causal.

    Masked (`mlm=True`): some tokens become labels; of these most become the mask token, some a random token, and the
    rest stay. Special tokens and padding are never predicted. Causal (`mlm=False`): labels are the ids, with -100 for
    padding and for nothing else; an end-of-sequence token counts even if it is also the pad token.

    Samples are mappings, or lists of ids. Their labels are replaced. A "special_tokens_mask" is used if present.

    Without `seed`, masks come from the global generators, which loopwright seeds before every micro-batch. With it,
    they follow from the number of earlier batches in this process, so they change in a resumed run or a second
    evaluation.

    Attributes:
        tokenizer: something with `pad` or `pad_token_id`; for masks with `mask_token_id` and a length, and
            `all_special_ids` if samples have no special tokens mask.
        mlm: masked, not causal.
        whole_word_mask: predict whole words: by the samples' "word_ids" (from encoding.word_ids()), else their
            "offset_mapping", else WordPiece's ##. Each of a word's tokens is replaced separately.
        mlm_probability: of a token, or a word, to be predicted.
        mask_replace_prob: the fraction of these that become the mask token.
        random_replace_prob: the fraction of these that become a random token.
        pad_to_multiple_of: lengths are rounded up to it.
        return_tensors: "pt" or "np".
        seed: of its own generator, plus the number of the loader's worker.
    """

    tokenizer: Any
    mlm: bool = True
    whole_word_mask: bool = False
    mlm_probability: float | None = 0.15
    mask_replace_prob: float = 0.8
    random_replace_prob: float = 0.1
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"
    seed: int | None = None

    def __post_init__(self) -> None:
        self._own_draws: dict[tuple[str, int | None], Draws] = {}
        checked_kind(self.return_tensors)
        if self.mlm:
            self._check_masking()
        elif self.whole_word_mask:
            raise ConfigError("whole_word_mask=True is for masked language modelling: pass mlm=True, or leave it out")

    def torch_mask_tokens(
        self, inputs: Tensor, special_tokens_mask: Any = None, offset_mapping: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Return masked ids and labels, leaving `inputs` unchanged; called for every batch of tensors if `mlm`."""
        masked, labels = self._mask(inputs.numpy(force=True), special_tokens_mask, offset_mapping, "pt")
        return torch.from_numpy(masked), torch.from_numpy(labels)

    def numpy_mask_tokens(self, inputs: Any, special_tokens_mask: Any = None, offset_mapping: Any = None) -> Any:
        """Return masked ids and labels, leaving `inputs` unchanged; called for every batch of arrays if `mlm`."""
        return self._mask(np.asarray(inputs), special_tokens_mask, offset_mapping, "np")

    def _collate(self, features: Sequence[Any], kind: str) -> Batch:
        bare = (list, tuple, Tensor, np.ndarray)
        columns = to_columns([{"input_ids": value} if isinstance(value, bare) else value for value in features])
        take_labels(columns)
        word_ids, offsets = columns.pop("word_ids", None), columns.pop("offset_mapping", None)
        has_mask = "attention_mask" in columns
        lengths = [len(value) for value in columns.get("input_ids", ())]
        padding = Padding(multiple=self.pad_to_multiple_of, lengths=self.bucket_lengths)
        batch = padded_batch(self.tokenizer, columns, padding, kind)
        ids = batch["input_ids"]
        special = batch.pop("special_tokens_mask", None)
        is_padding = self._find_padding(batch, lengths, has_mask)
        if not self.mlm:
            labels = np.where(is_padding, IGNORED, np.asarray(ids))
            batch["labels"] = torch.from_numpy(labels) if kind == "pt" else labels
            return batch
        special = self._special(np.asarray(ids)) if special is None else np.asarray(special).astype(np.bool_)
        options: dict[str, Any] = {"special_tokens_mask": special | is_padding}
        if self.whole_word_mask:
            options["offset_mapping"] = self._padded_offsets(word_ids, offsets, ids.shape[1])
        mask = self.torch_mask_tokens if kind == "pt" else self.numpy_mask_tokens
        batch["input_ids"], batch["labels"] = mask(ids, **options)
        return batch

    def _mask(self, ids: Any, special: Any, offsets: Any, kind: str) -> tuple[Any, Any]:
        is_special = self._special(ids) if special is None else np.asarray(special).astype(np.bool_)
        starts = None
        if self.whole_word_mask and offsets is not None:
            starts = word_starts_from_offsets(np.asarray(offsets), is_special)
        elif self.whole_word_mask:
            starts = word_starts_from_tokens(ids, is_special, self.tokenizer)
        recipe = Recipe(
            float(self.mlm_probability or 0.0),
            float(self.mask_replace_prob),
            float(self.random_replace_prob),
            self.tokenizer.mask_token_id,
            len(self.tokenizer) if self.random_replace_prob else 0,
        )
        return mask_tokens(ids, is_special, starts, recipe, self._draws(kind))

    def _special(self, ids: Any) -> Any:
        special_ids = getattr(self.tokenizer, "all_special_ids", None)
        if special_ids is None:
            raise ConfigError(
                f"the tokenizer ({type(self.tokenizer).__name__}) has no all_special_ids, so special tokens might be "
                "masked. Define them, or put a 'special_tokens_mask' into every sample."
            )
        return np.isin(ids, list(special_ids))

    def _find_padding(self, batch: Batch, lengths: list[int], has_mask: bool) -> Any:
        """Return the positions of padding; without a mask, pad tokens count too unless they also end a sequence."""
        ids = np.asarray(batch["input_ids"])
        if has_mask and batch["attention_mask"].shape == ids.shape:
            return np.asarray(batch["attention_mask"]) == 0
        real = pad_lists([[1] * length for length in lengths], ids.shape[1], 0, padding_side(self.tokenizer))
        is_padding = np.asarray(real) == 0
        pad_id = getattr(self.tokenizer, "pad_token_id", None)
        if pad_id is not None and pad_id != getattr(self.tokenizer, "eos_token_id", None):
            is_padding |= ids == pad_id
        return is_padding

    def _padded_offsets(self, word_ids: Any, offsets: Any, width: int) -> Any:
        """Return each token's place in its text, from word ids if there are any; None if unknown."""
        side = padding_side(self.tokenizer)
        if word_ids is not None:
            rows = [[-1 if word is None else int(word) for word in as_list(value)] for value in word_ids]
            return words_as_offsets(stack("word_ids", pad_lists(rows, width, -1, side), "np"))
        if offsets is not None:
            return stack("offset_mapping", pad_lists(offsets, width, (0, 0), side), "np")
        return None

    def _draws(self, kind: str) -> Draws:
        if self.seed is None:
            return TorchDraws(None) if kind == "pt" else NumpyDraws(None)
        worker = get_worker_info()
        # A forked worker has a copy of the main process's generator, which it must not continue.
        place = (kind, None if worker is None else worker.id)
        if place not in self._own_draws:
            seed, is_torch = self.seed + (0 if worker is None else worker.id), kind == "pt"
            generator: Any = torch.Generator().manual_seed(seed) if is_torch else np.random.default_rng(seed)
            self._own_draws[place] = TorchDraws(generator) if is_torch else NumpyDraws(generator)
        return self._own_draws[place]

    def _check_masking(self) -> None:
        if getattr(self.tokenizer, "mask_token_id", None) is None:
            raise ConfigError(
                f"the tokenizer ({type(self.tokenizer).__name__}) has no mask token, which masked language modelling "
                "needs. Pass mlm=False for causal language modelling, or add one: "
                "tokenizer.add_special_tokens({'mask_token': '[MASK]'})."
            )
        for name in ("mlm_probability", "mask_replace_prob", "random_replace_prob"):
            value = getattr(self, name)
            if value is None or not 0 <= value <= 1:
                raise ConfigError(f"{name} must be between 0 and 1, got {value!r}")
        total = self.mask_replace_prob + self.random_replace_prob
        if total > 1 + 1e-9:
            raise ConfigError(f"mask_replace_prob and random_replace_prob must not exceed 1 together, got {total:g}")
        if self.random_replace_prob and not isinstance(self.tokenizer, Sized):
            raise ConfigError(
                f"random tokens are drawn from len(tokenizer), and {type(self.tokenizer).__name__} has no length. "
                "Define __len__, or pass random_replace_prob=0."
            )
