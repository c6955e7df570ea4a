"""DataLoaders from a dataset and the arguments: their order, their columns, and the bucket lengths of their batches.

The collate function sees the columns of a sample that the model can use. Any other column is still found by name:
`sample["text"]`. The batch does the same for an overridden `compute_loss`: `model(**inputs)` passes what the model
takes, `inputs["weight"]` finds the rest.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sized
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from loopwright.data import collators
from loopwright.data.buckets import LengthGroupedSampler, chosen_lengths, may_be_graphs, sample_lengths, with_buckets
from loopwright.engine.nested import to_device
from loopwright.errors import ConfigError, ConfigTypeError, DataError, nearest

DataCollator = Callable[[list[Any]], Any]
_LABELS = ("label", "label_ids", "labels")
_LENGTHS = "lengths.bin"
_NO_LIMIT = 100_000  # tokenizers without a limit report a larger number
_FEW = 4  # bucket lengths for inputs, and as many for targets: each pair is a graph


def train_sampler(dataset: Any, args: Any, main_input: str) -> Sampler[int] | None:
    """Return the sampler that the arguments request for a training dataset; None without random access."""
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        return None
    if isinstance(dataset, Mapping) or len(dataset) == 0:
        return None  # its loader raises later
    if args.train_sampling_strategy == "sequential":
        return SequentialSampler(dataset)
    if args.train_sampling_strategy == "group_by_length":
        folder = Path(args.output_dir)
        cache = folder / _LENGTHS if folder.is_dir() and args.should_save else None
        lengths = sample_lengths(dataset, args.length_column_name, main_input, cache=cache)
        return LengthGroupedSampler(lengths, args.train_batch_size, args.data_seed)
    generator = None if args.data_seed is None else torch.Generator().manual_seed(args.data_seed)
    return RandomSampler(dataset, generator=generator)


def named_dataset(datasets: Any, name: str) -> Any:
    """Return one of a dict of datasets."""
    if not isinstance(datasets, Mapping):
        raise ConfigError(f"{name!r} is not a dataset: to select one by its name, eval_dataset must be a dict of them")
    if name not in datasets:
        names = ", ".join(map(str, datasets))
        near = nearest(name, map(str, datasets))
        raise ConfigError(f"eval_dataset has no {name!r}, it has {names}", flag="eval_dataset", nearest=near)
    return datasets[name]


def create_dataloader(
    dataset: Any, args: Any, batch_size: int, collate: DataCollator, sampler_fn: Callable[..., Any] | None
) -> Any:
    """Return the DataLoader of a dataset; a DataLoader is returned unchanged.

    `sampler_fn` returns a sampler of the dataset, or None for its own order; transformers 4 calls it without arguments.
    """
    if isinstance(dataset, DataLoader):
        return dataset
    if isinstance(dataset, Mapping):
        names = list(map(str, dataset)) or ["train"]
        raise ConfigError(
            f"got a dict of datasets ({', '.join(names)}): pass one of them, as in datasets[{names[0]!r}]"
        )
    if isinstance(dataset, str) or (not hasattr(dataset, "__getitem__") and not hasattr(dataset, "__iter__")):
        raise ConfigError(f"a dataset must have __getitem__ and __len__, or __iter__; got a {type(dataset).__name__}")
    can_be_read: bool = isinstance(dataset, (Sized, IterableDataset))
    if not can_be_read:
        raise ConfigError(
            f"a {type(dataset).__name__} has no length and is not an IterableDataset: add a __len__, or derive its "
            "class from torch.utils.data.IterableDataset"
        )
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "collate_fn": collate,
        "num_workers": args.dataloader_num_workers,
        "pin_memory": args.dataloader_pin_memory and torch.accelerator.is_available(),
    }
    if args.dataloader_num_workers:
        options["prefetch_factor"] = args.dataloader_prefetch_factor
        options["multiprocessing_context"] = args.dataloader_multiprocessing_context
    if not isinstance(dataset, IterableDataset):
        takes_dataset = sampler_fn is not None and bool(inspect.signature(sampler_fn).parameters)
        sampler = None if sampler_fn is None else sampler_fn(dataset) if takes_dataset else sampler_fn()
        options["sampler"] = SequentialSampler(dataset) if sampler is None else sampler
        options["drop_last"] = args.dataloader_drop_last
        options["persistent_workers"] = args.dataloader_persistent_workers
    loader: Any = DataLoader(dataset, **options)
    loader.total_batch_size = batch_size * args.world_size  # as accelerate's loaders have it
    return loader


def chosen_collator(given: DataCollator | None, processing_class: Any) -> DataCollator:
    """Return the trainer's collator: the given one, a padding one for a tokenizer, or a stacking one.

    An image processor can pad too, but not tokens: only a tokenizer has a padding side.
    """
    if given is not None:
        if not callable(given):
            raise ConfigTypeError(
                f"data_collator must be a function from a list of samples to a batch, got a {type(given).__name__}"
            )
        return given
    if callable(getattr(processing_class, "pad", None)) and hasattr(processing_class, "padding_side"):
        return collators.DataCollatorWithPadding(processing_class)
    return collators.default_data_collator


def training_collator(collate: DataCollator, args: Any, model: Any, tokenizer: Any) -> DataCollator:
    """Return the training collator; it pads to `length_buckets` if any are set.

    Padding collators of transformers are replaced by ours of the same name, which create the same batches.
    """
    is_paired = type(collate).__name__ == "DataCollatorForSeq2Seq"
    lengths = chosen_lengths(
        args.length_buckets,
        _longest_input(tokenizer, getattr(model, "config", None)),
        may_graph=may_be_graphs(args, args.device, args.world_size),
        **({"most": _FEW} if is_paired else {}),
    )
    if lengths is None:
        return collate
    padding = _as_ours(collate)
    if not hasattr(padding, "bucket_lengths"):
        if args.length_buckets == "auto":
            return collate
        raise ConfigError(
            f"length_buckets={args.length_buckets!r} needs a collator that pads, and "
            f"{getattr(collate, '__name__', type(collate).__name__)} does not: pass DataCollatorWithPadding(tokenizer) "
            'as data_collator, or set length_buckets="off"'
        )
    return with_buckets(padding, lengths)  # type: ignore[no-any-return]


def _as_ours(collate: Any) -> Any:
    """Return our equivalent of a transformers collator that only pads; any other one unchanged."""
    ours = getattr(collators, type(collate).__name__, None)
    is_theirs = type(collate).__module__ == "transformers.data.data_collator"
    is_padding = isinstance(ours, type) and issubclass(ours, collators.PaddingCollator)
    if not is_theirs or not is_padding or collate.return_tensors != "pt":
        return collate
    values = {field.name: getattr(collate, field.name) for field in dataclasses.fields(ours)}  # type: ignore[arg-type]
    return ours(**values)  # type: ignore[misc]


def _longest_input(tokenizer: Any, config: Any) -> int | None:
    limits = [getattr(tokenizer, "model_max_length", None)]
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int):
        # RoBERTa-style models number positions from the pad token on.
        taken = (config.pad_token_id or 0) + 1 if "roberta" in str(config.model_type) else 0
        limits.append(positions - taken)
    return min((int(limit) for limit in limits if limit and 0 < limit < _NO_LIMIT), default=None)


class KeptColumns(dict[str, Any]):
    """A mapping whose `others` are found by `[]`, `get`, `pop` and `in`, but not seen by iteration, `**` and `len`."""

    def __init__(self, kept: Mapping[str, Any], others: Mapping[str, Any] | None = None) -> None:
        super().__init__(kept)
        self.others: dict[str, Any] = dict(others or {})

    def __missing__(self, name: str) -> Any:
        return self.others[name]

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self.others

    def get(self, name: str, default: Any = None) -> Any:
        """Return an entry, also one of the others."""
        return super().get(name, self.others.get(name, default))

    def pop(self, name: str, *default: Any) -> Any:
        """Remove and return an entry, also one of the others."""
        return super().pop(name, *default) if super().__contains__(name) else self.others.pop(name, *default)

    def copy(self) -> KeptColumns:
        """Return a shallow copy."""
        return KeptColumns(self, self.others)

    def to(self, device: torch.device) -> KeptColumns:
        """Return a copy on a device."""
        return KeptColumns(to_device(dict(self), device), to_device(self.others, device))

    def __reduce__(self) -> tuple[type[KeptColumns], tuple[dict[str, Any], dict[str, Any]]]:
        return KeptColumns, (dict(self), self.others)


class ColumnCollator:
    """Collates the columns that the model can use: the parameters of its forward, and the labels.

    With `keeps_others` the other columns stay available by name for `compute_loss`; if the forward takes none of the
    columns, the batch has all of them.
    """

    def __init__(self, collate: DataCollator, names: list[str], label_names: list[str], keeps_others: bool) -> None:
        self.collate, self.names, self.keeps_others = collate, names, keeps_others
        self._labels = {*_LABELS, *label_names}

    @property
    def bucket_lengths(self) -> Any:
        """The lengths that the collator pads batches to; a collator that never does has no such attribute."""
        return self.collate.bucket_lengths  # type: ignore[attr-defined]

    def __call__(self, samples: list[Any]) -> Any:
        """Return the batch."""
        has_columns = bool(samples and self.names) and isinstance(samples[0], Mapping)
        kept = self._kept(samples[0]) if has_columns else None
        if kept is None:
            return self.collate(samples)
        views = []
        for sample in samples:
            others = {name: value for name, value in sample.items() if name not in kept}
            views.append(KeptColumns({name: sample[name] for name in kept if name in sample}, others))
        batch = self.collate(views)
        if self.keeps_others and isinstance(batch, Mapping):
            names = {name for view in views for name in view.others}
            columns = {name: [view.others.get(name) for view in views] for name in names if name not in batch}
            return KeptColumns(batch, {name: _stacked(values) for name, values in columns.items()})
        return batch

    def _kept(self, sample: Mapping[str, Any]) -> list[str] | None:
        """Return the columns that the model can use; None to keep all."""
        wanted = {*self.names, *self._labels}
        kept = [name for name in sample if name in wanted]
        if len(kept) == len(sample):
            return None
        if any(name not in self._labels for name in kept):
            return kept
        if self.keeps_others:
            return None
        raise DataError(
            f"the model takes none of the columns: a sample has {', '.join(map(str, sample)) or 'none'}, the model's "
            f"forward takes {', '.join(self.names)}. Rename the columns (or tokenize the text), or pass "
            "remove_unused_columns=False with a data_collator that creates the model's inputs from them."
        )


def _stacked(values: list[Any]) -> Any:
    if all(isinstance(value, (bool, int, float)) for value in values):
        return torch.tensor(values)
    if all(isinstance(value, torch.Tensor) and value.shape == values[0].shape for value in values):
        return torch.stack(values)
    return values
