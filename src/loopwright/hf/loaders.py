"""DataLoaders from a dataset and the arguments: their order, and the bucket lengths of their batches."""

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
from loopwright.errors import ConfigError, ConfigTypeError, nearest
from loopwright.hf.columns import DataCollator

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
