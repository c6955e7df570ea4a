"""Shared code of the text tasks: find and load models and tokenizers, small ones from scratch, lengths, datasets."""

from __future__ import annotations

import contextlib
import json
import logging as stdlib_logging
import math
import operator
import os
import shlex
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from loopwright.config.start_clock import lap
from loopwright.errors import InputError, near_names, nearest
from loopwright.metrics.words import subword_patterns
from loopwright.sources.files import read_data
from loopwright.tasks import pretrained
from loopwright.tasks.base import Origin

# Heads whose weights differ in meaning under the same names.
_HEADS = ("SequenceClassification", "TokenClassification", "QuestionAnswering", "MultipleChoice")
IGNORED = -100  # the label of tokens that the loss ignores
TEXT_NAMES = (
    *("text", "sentence", "sentence1", "review", "content", "premise", "question1", "body", "comment", "tweet"),
    *("message", "document", "description"),
)
TEXT_PAIR_NAMES = ("text_pair", "sentence2", "hypothesis", "question2", "text2")
# Suggestions in place of a model that does not fit.
_FITTING = {
    "AutoModelForSeq2SeqLM": "an encoder and a decoder for text, such as a T5, a BART or a Marian",
    "AutoModelForCausalLM": "a decoder, such as a GPT-2",
    "AutoModelForImageClassification": "a model of images, such as a ViT or a ResNet",
    "AutoModelForMaskedImageModeling": "a model of images, such as a ViT or a Swin",
    "AutoModelForSemanticSegmentation": "a model of images, such as a SegFormer",
    "AutoModelForObjectDetection": "a detector, such as a DETR",
    "AutoModelForUniversalSegmentation": "a model of masks, such as a Mask2Former",
}
_GENERATION = "generation_config.json"
_NO_LIMIT = 100_000  # tokenizers without a limit report a larger number
_LENGTH_ROWS = 2_000
TOKENIZER_ROWS = 50_000
SPECIAL_TOKENS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}


def find_model(name: str) -> str:
    """Resolve `--model` to a folder or a Hub id; imports neither torch nor transformers."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        if (folder / "run.json").is_file():
            folder = folder / "model"
        if (folder / "config.json").is_file():
            return str(folder)
        held = sorted(entry.name for entry in folder.iterdir())[:8] if folder.is_dir() else []
        is_adapter = "adapter_config.json" in held
        what = f"--model {name} is not a model folder: it has no config.json"
        fix = _base_of(folder) if is_adapter else _near_folder(folder)
        raise InputError("model.folder", what, saw=[f"it has {', '.join(held) or 'no files'}"], fix=fix)
    if folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        what = f"--model {name} is not a folder" if folder.exists() else f"--model {name} does not exist"
        raise InputError("model.folder", what, saw=[f"looked in {folder.absolute().parent}"], fix=_near_folder(folder))
    return name


def _near_folder(folder: Path) -> str:
    parent = folder.absolute().parent
    names = [entry.name for entry in parent.iterdir() if (entry / "config.json").is_file()] if parent.is_dir() else []
    near = nearest(folder.name, names)
    return f"--model {shlex.quote(str(parent / near))}" if near else "leave out --model"


def _base_of(adapter: Path) -> str:
    """Return the flag for the model that an adapter was made for."""
    with contextlib.suppress(OSError, ValueError):
        base = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8")).get("base_model_name_or_path")
        if base:
            return f"--model {shlex.quote(str(base))}"
    return "leave out --model"


def load_config(name: str, **changes: Any) -> Any:
    with pretrained.refusing_large(name):
        config = _load_config(name, changes)
    pretrained.check_config(name, config)
    if not Path(name).is_dir():
        _download(name)
    return config


def _load_config(name: str, changes: Mapping[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    try:
        return pretrained.open_pretrained(AutoConfig, name, "config.json", local_files_only=True, **changes)
    except InputError as error:
        if Path(name).is_dir():
            with pretrained.opening(name, "config.json"):
                kind = json.loads(read_data(Path(name) / "config.json")).get("model_type")
                is_known = kind is None or kind in CONFIG_MAPPING
            if not is_known:
                raise pretrained.needs_code(name, f"transformers does not know its model type {kind!r}") from error
            raise
        if not isinstance(error.__cause__, OSError):  # it is in the cache
            raise
    _check_online(name)
    try:
        return pretrained.open_pretrained(AutoConfig, name, "config.json", **changes)
    except InputError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        raise _offline(name, f"and the Hub request failed: {error.saw[0]}") from error


def _download(name: str) -> None:
    """Download the weights of a Hub model with a progress bar; transformers would do it silently here."""
    from huggingface_hub import snapshot_download, try_to_load_from_cache

    endings = ("json", "txt", "model", "safetensors", *(("bin",) if pretrained.allows_pickle() else ()))
    if any(isinstance(try_to_load_from_cache(name, file), str) for file in pretrained.WEIGHTS):
        return
    _check_online(name)
    try:
        snapshot_download(name, allow_patterns=[f"*.{ending}" for ending in endings], ignore_patterns=["*/*"])
    except (OSError, ValueError, RuntimeError) as error:  # of the Hub's client, whatever it uses
        reason = " ".join(str(error).split())[:200]
        fix = "give the same command again, and the download continues   or   leave out --model"
        raise InputError("model.offline", f"the download of {name} failed", saw=[reason], fix=fix) from error


def _check_online(name: str) -> None:
    if any(os.environ.get(each, "0") not in ("", "0") for each in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")):
        raise _offline(name, "and the network is off (HF_HUB_OFFLINE)")
    if not _can_reach_hub():
        raise _offline(name, "and the Hub cannot be reached")


def _can_reach_hub() -> bool:
    """Whether the Hub answers within seconds; checked once, since transformers would retry for most of a minute."""
    from huggingface_hub.constants import ENDPOINT

    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    address = urlsplit(ENDPOINT)
    try:
        socket.create_connection((address.hostname, address.port or 443), timeout=5).close()
    except OSError:
        return False
    return True


def _offline(name: str, why: str) -> InputError:
    from huggingface_hub.constants import HF_HUB_CACHE

    cache = Path(HF_HUB_CACHE)
    cached = [path.name[8:].replace("--", "/") for path in cache.glob("models--*")] if cache.is_dir() else []
    near = near_names(name, cached)
    what = f"{name!r} is neither a folder here nor in the Hub cache, {why}"
    saw = [f"similar names in the cache: {', '.join(near)}" if near else f"the cache has {len(cached)} models"]
    fix = f"--model {near[0]}" if near else "leave out --model"
    return InputError("model.offline", what, saw=saw, fix=fix)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars and warnings while a block runs; we report the relevant ones.

    And those of bitsandbytes, which logs as soon as it is imported, and peft imports it wherever it is installed.
    """
    from transformers.utils import logging

    quantizer = stdlib_logging.getLogger("bitsandbytes")
    level, has_bars, own_level = logging.get_verbosity(), logging.is_progress_bar_enabled(), quantizer.level
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    quantizer.setLevel(stdlib_logging.ERROR)
    try:
        yield
    finally:
        quantizer.setLevel(own_level)
        logging.set_verbosity(level)
        if has_bars:
            logging.enable_progress_bar()


@dataclass
class Loaded:
    """A loaded or newly built model, the names of weights that are in no file, and its tokenizer or image processor."""

    model: Any
    new: list[str] = field(default_factory=list)
    processor: Any = None


def load_or_build(
    origin: Origin, auto_class: str, texts: Iterable[str], *, lowercase: bool = True, **changes: Any
) -> Loaded:
    """Return the model of an origin with its tokenizer, or a small encoder with a tokenizer trained on the texts."""
    if origin.path is None:
        tokenizer = train_tokenizer(texts, lowercase=lowercase)
        loaded = small_encoder(auto_class, tokenizer, **changes)
    else:
        tokenizer = load_tokenizer(origin.path)
        loaded = load_model(origin, auto_class, **changes)
        num_rows = int(loaded.model.get_input_embeddings().weight.shape[0])
        ids = {name: getattr(tokenizer, f"{name}_id") or 0 for name in SPECIAL_TOKENS}
        if unknown := [name for name, number in ids.items() if number >= num_rows]:
            what, fix = f"the model of {origin.path} has no {unknown[0]}", "leave out --model"
            saw = [f"it has {num_rows:,} tokens, and the {unknown[0]} is number {ids[unknown[0]]:,}"]
            raise InputError("model.tokenizer", what, saw=saw, fix=fix)
    match_pad_token(loaded.model, tokenizer)
    loaded.processor = tokenizer
    return loaded


def label_config(names: Sequence[str]) -> dict[str, Any]:
    numbers = {name: number for number, name in enumerate(names)}
    return {"num_labels": len(names), "id2label": dict(enumerate(names)), "label2id": numbers}


def padding_multiple(training: Any) -> int | None:
    """Return the multiple that batches are padded to, which 16-bit kernels prefer; None in 32 bits."""
    return 8 if training.fp16 or training.bf16 else None


def load_model(origin: Origin, auto_class: str, **changes: Any) -> Loaded:
    import torch
    import transformers

    path = str(origin.path)
    config = load_config(path, **changes)
    kind = getattr(transformers, auto_class)
    suffix = auto_class.removeprefix("AutoModel")
    # from_config would raise a ValueError that lists a hundred classes.
    if type(config) not in kind._model_mapping and not pretrained.has_trusted_code(config, auto_class):
        what = f"{path} is a {config.model_type} model, which has no {suffix.removeprefix('For') or auto_class}"
        saw = [f"it was saved as {', '.join(config.architectures or ['no known class'])}"]
        saw.append(f"the task needs {_FITTING.get(auto_class, 'an encoder, such as a BERT')}")
        fix = "leave out --model"
        raise InputError("model.task", what, saw=saw, fix=fix)
    # Without a suffix the head is dropped, and the rest is the same for every task.
    for architecture in (config.architectures or ()) if suffix else ():
        head = next((head for head in _HEADS if architecture.endswith(f"For{head}")), None)
        if head is not None and not suffix.endswith(head):
            what = f"{path} is a model of another task: it was saved as {architecture}"
            saw = [f"this task needs a {suffix.removeprefix('For')} head, whose weights have the same names"]
            raise InputError("model.task", what, saw=saw, fix="leave out --model")
    with quiet():
        has_weights = any((Path(path) / name).is_file() for name in pretrained.WEIGHTS)
        if not origin.keeps_half and (origin.is_empty or not origin.is_run):
            config.dtype = torch.float32
        if origin.is_empty or (origin.is_run and origin.base is None and not has_weights):
            return Loaded(pretrained.build(kind, path, config))
        options = {} if origin.quantization is None else {"quantization_config": origin.quantization}
        model, info = pretrained.open_weights(
            kind, origin.base or path, config, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
        size = getattr(config.get_text_config(), "vocab_size", None)
        if options and len(model.get_input_embeddings().weight) != size:  # quantized models keep that of the files
            model.resize_token_embeddings(size)
    for module in model.modules() if options else ():
        module.support_avx512bf16_for_cpu = False  # or bitsandbytes rounds and repacks its weights in evaluations
    mismatched = [entry[0] if isinstance(entry, tuple) else entry for entry in info.get("mismatched_keys", ())]
    return Loaded(model, sorted({*info["missing_keys"], *mismatched}))


def open_generation(model: Any, folder: Path) -> None:
    """Take over the generation settings of a run: it generates in the same way when it is resumed."""
    from transformers import GenerationConfig

    if (folder / _GENERATION).is_file():
        model.generation_config = pretrained.open_pretrained(GenerationConfig, str(folder), _GENERATION)


def load_tokenizer(path: str, *, needs_pad: bool = True, **options: Any) -> Any:
    """Return the tokenizer of a folder or a Hub id, with a pad token if it needs one."""
    from transformers import AutoTokenizer

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # workers are forked after its first use
    try:
        tokenizer = pretrained.open_pretrained(AutoTokenizer, path, "tokenizer_config.json", **options)
        with pretrained.opening(path, "tokenizer_config.json"):
            tokenizer.model_max_length = operator.pos(tokenizer.model_max_length)  # a number
    except InputError as error:
        saw, fix = [error.what, *error.saw], "put tokenizer.json and tokenizer_config.json into the folder of the model"
        raise InputError("model.tokenizer", f"the tokenizer of {path} cannot be opened", saw=saw, fix=fix) from error
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token is None and needs_pad:
        what = f"the tokenizer of {path} has no pad token, and no end token to use instead"
        saw = [f"its special tokens are {', '.join(tokenizer.all_special_tokens) or 'none'}"]
        raise InputError("model.pad_token", what, saw=saw, fix='set "pad_token" in its tokenizer_config.json')
    lap("tokenizer")
    return tokenizer


def check_fast(tokenizer: Any, path: str | None) -> None:
    if not tokenizer.is_fast:
        what = f"the tokenizer of {path} cannot map its tokens to words and characters"
        fix = "leave out --model"
        raise InputError("model.tokenizer", what, saw=[f"{type(tokenizer).__name__} is written in Python"], fix=fix)


def match_pad_token(model: Any, tokenizer: Any) -> None:
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id


def train_byte_pairs(
    texts: Iterable[str], vocabulary: int, special: Iterable[str], *, prefix_space: bool = True, lowercase: bool = False
) -> Any:
    """Train a byte-level BPE tokenizer, which is lossless; the same texts give the same tokenizer.

    Words begin with a space, also the first one with `prefix_space`; scripts without spaces are split by character.
    With a continuation prefix they would not: the order of its alphabet differs from process to process.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    tokenizer = Tokenizer(models.BPE())
    changes = [*[normalizers.Lowercase()] * lowercase, *[normalizers.Prepend(" ")] * prefix_space]
    tokenizer.normalizer = normalizers.Sequence(changes)
    pieces, superfluous = map(Regex, subword_patterns())
    steps = [*[pre_tokenizers.Split(superfluous, "removed")] * prefix_space, pre_tokenizers.Split(pieces, "isolated")]
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, in_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(islice(texts, TOKENIZER_ROWS), trainer)
    lap("tokenizer")
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocabulary: int = 8_000, *, lowercase: bool = True) -> Any:
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = train_byte_pairs(texts, vocabulary, SPECIAL_TOKENS.values(), lowercase=lowercase)
    ids = {token: tokenizer.token_to_id(token) for token in ("[CLS]", "[SEP]")}
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=list(ids.items())
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **SPECIAL_TOKENS)


def small_encoder(auto_class: str, tokenizer: Any, **changes: Any) -> Loaded:
    """Return a small random ModernBERT: it learns within a few hundred updates, unlike a BERT of this size."""
    import transformers

    config = transformers.ModernBertConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=192,
        max_position_embeddings=tokenizer.model_max_length,
        global_attn_every_n_layers=1,
        classifier_pooling="mean",
        pad_token_id=tokenizer.pad_token_id,
        cls_token_id=tokenizer.cls_token_id,
        sep_token_id=tokenizer.sep_token_id,
        bos_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.sep_token_id,
        **changes,
    )
    return Loaded(getattr(transformers, auto_class).from_config(config, trust_remote_code=False))


class Lengths(NamedTuple):
    """The maximum number of tokens of a text, and how many are counted, alone and with what is cut."""

    max_length: int
    counted: str
    note: str


def longest_allowed(tokenizer: Any, config: Any) -> int | None:
    limits = []
    if tokenizer.model_max_length < _NO_LIMIT:
        limits.append(int(tokenizer.model_max_length))
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions > 0:
        # RoBERTa-like models number positions from the pad token on.
        taken = (config.pad_token_id or 0) + 1 if "roberta" in str(config.model_type) else 0
        limits.append(positions - taken)
    return min(limits) if limits else None


def check_length(name: str, asked: int | None, limit: int | None) -> None:
    if asked is not None and limit is not None and asked > limit:
        what = f"--{name} {asked} is longer than the model allows"
        raise InputError("model.length", what, saw=[f"it has positions for {limit} tokens"], fix=f"--{name} {limit}")


def choose_length(
    asked: int | None,
    count_tokens: Callable[[Mapping[str, Any]], int],
    rows: Any,
    limit: int | None,
    name: str = "max_length",
) -> Lengths:
    """Return the length that was asked for, or one at which few of the training rows are cut."""
    check_length(name, asked, limit)
    step = max(1, len(rows) // _LENGTH_ROWS)
    counted = sorted(count_tokens(rows[index]) for index in range(0, len(rows), step))
    half, most, longest = (counted[math.ceil(share * len(counted)) - 1] for share in (0.5, 0.95, 1.0))
    length = asked
    if length is None:
        # Batches are padded to their own longest row: a high limit costs only for long rows.
        length = -(-longest // 8) * 8 if longest <= 128 else -(-most // 32) * 32
        length = length if limit is None else min(length, limit)
    num_cut = sum(count > length for count in counted)
    about = "about " if step > 1 else ""
    cut = f"cuts {about}{100 * num_cut / len(counted):.1f} % of rows" if num_cut else "cuts nothing"
    tokens = f"tokens p50 {half} p95 {most} max {longest}"
    return Lengths(length, tokens, f"{tokens} -> {name} {length} {cut}")


def settle_length(args: Any, loaded: Loaded, rows: Any, count_tokens: Callable[[Mapping[str, Any]], int]) -> str:
    limit = longest_allowed(loaded.processor, loaded.model.config)
    lengths = choose_length(args.max_length, count_tokens, rows, limit)
    args.max_length = lengths.max_length
    return lengths.note


def token_losses(logits: Any, labels: Any) -> Any:
    """Return the loss of each token in 32 bits, 0 for ignored ones."""
    from torch.nn import functional

    return functional.cross_entropy(logits.float().transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")


def encode(
    tokenizer: Any,
    max_length: int,
    texts: Callable[[Mapping[str, Any]], tuple[Any, ...]],
    target: Callable[[Mapping[str, Any]], Any] | None,  # None for rows without labels
    row: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the features of the texts of a row; called in loader workers."""
    features = dict(tokenizer(*texts(row), truncation=True, max_length=max_length))
    return features if target is None else {**features, "labels": target(row)}


class PadsToBuckets:
    """A collator around a padding one, `_pad`, whose bucket lengths it shares."""

    _pad: Any

    @property
    def bucket_lengths(self) -> Sequence[int] | None:
        """The lengths that batches are padded to; None pads to the longest row of each."""
        lengths: Sequence[int] | None = self._pad.bucket_lengths
        return lengths

    @bucket_lengths.setter
    def bucket_lengths(self, lengths: tuple[int, ...]) -> None:
        from loopwright.data.buckets import with_buckets

        self._pad = with_buckets(self._pad, lengths)


class ReferenceCollator(PadsToBuckets):
    """Pads sources and targets to the longest of the batch, labels with -100, and keeps the reference texts."""

    def __init__(self, tokenizer: Any, multiple: int | None) -> None:
        from loopwright.data.collators import DataCollatorForSeq2Seq

        self._pad = DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=multiple)

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        plain = [{name: value for name, value in each.items() if name != "reference"} for each in features]
        references = {"reference": [each["reference"] for each in features]} if "reference" in features[0] else {}
        return {**self._pad(plain), **references}


class GroupCollator(PadsToBuckets):
    """Makes batches of shape (samples, texts, tokens); "is_text" is false for copies that pad a sample's texts."""

    def __init__(self, tokenizer: Any, pad_to_multiple_of: int | None = None) -> None:
        from loopwright.data.collators import DataCollatorForMultipleChoice

        self._pad = DataCollatorForMultipleChoice(tokenizer, pad_to_multiple_of=pad_to_multiple_of)

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        import torch

        counts = torch.tensor([len(sample["input_ids"]) for sample in features])
        most = int(counts.max())
        batch = dict(self._pad([_filled(sample, most) for sample in features]))
        batch["is_text"] = torch.arange(most) < counts[:, None]
        batch["position"] = torch.tensor([sample["position"] for sample in features])
        return batch


def _filled(sample: Mapping[str, Any], most: int) -> dict[str, Any]:
    return {
        name: [*value, *[value[0]] * (most - len(value))] if isinstance(value, list) else value
        for name, value in sample.items()
        if name != "position"
    }


def pairs_of(texts: Sequence[str], what: str, fix: str) -> list[list[str]]:
    """Return typed texts as pairs: two texts each, or one text with a tab; `what` and `fix` are for the error."""
    if any("\t" in each for each in texts):
        return [[first, second] for first, _, second in (each.partition("\t") for each in texts)]
    if len(texts) % 2:
        raise InputError("args.value", f"{what}, got {len(texts)} text{'s' if len(texts) > 1 else ''}", fix=fix)
    return [list(texts[index : index + 2]) for index in range(0, len(texts), 2)]
