"""Train parts of a model: frozen layers and low-rank adapters; and set its dropout."""

from __future__ import annotations

import copy
import math
import re
import shlex
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from loopwright.errors import InputError, near_names, nearest
from loopwright.run_folder import write_atomically

ALL_LINEAR = "all-linear"
_OF_PEFT = re.compile(r"lora_|\.(modules_to_save|original_module)\.")  # weights that its own files have


@dataclass(frozen=True)
class LoraOptions:
    """The options of `--lora`; `targets` are module names or patterns, every linear layer if empty."""

    r: int = 8
    alpha: float = 16
    dropout: float = 0.0
    targets: list[str] = field(default_factory=list)
    dora: bool = False
    rslora: bool = False


_OTHER_NAMES = {"rank": "r", "target": "targets", "modules": "targets"}  # without lora_, use_ and target_
_FLAGS = {"r": "lora_rank", "alpha": "lora_alpha", "dropout": "lora_dropout", "targets": "lora_target"}
_EXPECTED = {
    **{"r": "a whole number from 1", "alpha": "a number above 0", "dropout": "a number from 0 to below 1"},
    **dict.fromkeys(("dora", "rslora"), "true or false"),
}


def lora_options(args: Any) -> LoraOptions:
    """Return the options of `--lora r=16,alpha=32,...`; the flags --lora_rank, ... stand for those it leaves out."""
    by_flag = LoraOptions(args.lora_rank, args.lora_alpha, args.lora_dropout, list(args.lora_target))
    text = getattr(args, "lora", True)
    if isinstance(text, bool):
        return by_flag
    given: dict[str, Any] = {}
    items = _items(text)
    for place, item in enumerate(items):
        _, sign, value = (part.strip() for part in item.partition("="))
        name = _name_of(item)
        if not sign and next(reversed(given), None) == "targets":
            given["targets"] += item.split()
            continue
        rest = items[:place] + items[place + 1 :]
        if not sign or name not in LoraOptions.__dataclass_fields__:
            known = [*LoraOptions.__dataclass_fields__]
            near = nearest(name, known)
            fixed = [*items[:place], f"{near}={value}", *items[place + 1 :]] if near and sign else rest
            what = f"--lora has no option {name!r}" if sign else f"--lora {item}: expected name=value"
            raise _wrong(what, [f"its options are {', '.join(known)}"], fixed)
        if name in given and name != "targets":
            raise _wrong(f"--lora gives {name} twice", [], rest)
        given[name] = given.get(name, []) + value.split() if name == "targets" else _converted(name, value, rest)
    for name, value in given.items():
        flag, default = _FLAGS.get(name, ""), getattr(LoraOptions(), name)
        if flag and value != getattr(by_flag, name) != default:
            what = f"--lora {name}={value} and --{flag} {getattr(by_flag, name)} contradict each other"
            raise InputError("args.value", what, fix=f"leave out --{flag}", flag="--lora")
    targets = given.get("targets", by_flag.targets)
    return replace(by_flag, **{**given, "targets": [] if targets == [ALL_LINEAR] else targets})


def _items(text: str) -> list[str]:
    return [f"r={text}"] if text.isdigit() else [item.strip() for item in text.split(",") if item.strip()]


def _name_of(item: str) -> str:
    name = item.partition("=")[0].strip().removeprefix("lora_").removeprefix("use_").removeprefix("target_")
    return _OTHER_NAMES.get(name, name)


def _converted(name: str, value: str, rest: list[str]) -> Any:
    kind = type(getattr(LoraOptions(), name))
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    try:
        number = words[value.lower()] if kind is bool else int(value) if value.isdigit() else float(value)
        if kind is bool or {"r": value.isdigit() and number >= 1, "alpha": 0 < number < 1e6}.get(name, 0 <= number < 1):
            return number
    except (KeyError, ValueError):
        pass
    raise _wrong(f"--lora {name}={value}: expected {_EXPECTED[name]}", [], rest)


def _wrong(what: str, saw: list[str], items: list[str]) -> InputError:
    fix = f"--lora {shlex.quote(','.join(items))}" if items else "--lora"
    return InputError("args.value", what, saw=saw, fix=fix, flag="--lora")


def freeze(model: Any, what: str) -> int:
    """Freeze a part of a model, and return the number of frozen parameters.

    N freezes the embeddings and the lowest N layers; "backbone" everything but the head (or the decoder); anything else
    is a comma-separated list of patterns of parameter names. One must match, and something be left to train.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    if what == "backbone":
        chosen = backbone_parameters(model)
    elif what.isdigit():
        base = _base_of(model)
        chosen = [*_embeddings(base), *_lowest(base, int(what))]
        chosen += [one for name, module in base.named_children() if "embed" in name for one in module.parameters()]
    else:
        patterns = [pattern.strip() for pattern in what.split(",") if pattern.strip()]
        chosen = [one for one in model.parameters() if any(fnmatchcase(names[id(one)], each) for each in patterns)]
    for parameter in chosen:
        parameter.requires_grad_(False)
    if not chosen or not any(parameter.requires_grad for parameter in model.parameters()):
        shown = list(names.values())
        raise InputError(
            "args.value",
            f"--freeze {what} leaves nothing to train"
            if chosen
            else f"--freeze {what} matches no parameter of the model",
            saw=[f"its parameters are {', '.join(shown[:3])}, ... {shown[-1]}"],
            fix="--freeze backbone   or   leave out --freeze",
        )
    return sum(parameter.numel() for parameter in {id(one): one for one in chosen}.values())


def backbone_parameters(model: Any) -> list[Any]:
    """Return the parameters below the head; for an encoder-decoder, the encoder's.

    Outside transformers, the head is the child modules with such a name, or else the last child.
    """
    base = _base_of(model)
    if base is not model:
        return list(base.parameters())
    children = [(name, module) for name, module in model.named_children() if any(True for _ in module.parameters())]
    if len(children) == 1:
        return backbone_parameters(children[0][1])
    heads = [module for name, module in children if _is_head(name)]
    of_heads = {id(one) for module in heads or [module for _, module in children[-1:]] for one in module.parameters()}
    return [parameter for parameter in model.parameters() if id(parameter) not in of_heads]


def _base_of(model: Any) -> Any:
    """Return the base of a transformers model below its head; any other model as it is."""
    if bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False)) and hasattr(model, "get_encoder"):
        return model.get_encoder()
    return getattr(model, "base_model", model)


def _embeddings(base: Any) -> list[Any]:
    try:
        return list(base.get_input_embeddings().parameters())
    except (AttributeError, RuntimeError):  # raised by transformers for convolutional nets
        return []


def _lowest(base: Any, count: int) -> list[Any]:
    from torch import nn

    stacks: list[Any] = [module for module in base.modules() if isinstance(module, nn.ModuleList)]
    stacks = stacks or [module for module in base.modules() if isinstance(module, nn.Sequential)]
    layers = max(stacks, key=lambda stack: sum(p.numel() for p in stack.parameters()), default=None)
    if layers is None or count > len(layers):
        what = f"--freeze {count} is more layers than the model has"
        fix = f"--freeze {max(0, (0 if layers is None else len(layers)) - 1)}"
        raise InputError("args.value", what, saw=[f"it has {0 if layers is None else len(layers)}"], fix=fix)
    return [parameter for layer in layers[:count] for parameter in layer.parameters()]


_HEADS = {"TOKEN_CLS": ["classifier", "score"], "QUESTION_ANS": ["qa_outputs"]}


def set_dropout(model: Any, share: float) -> None:
    """Set every dropout probability of a model and its config, even one of 0, but not layerdrop or drop path."""
    from torch import nn

    is_found = False
    configs = {}
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):  # the common base of all dropout modules
            module.p = share
            is_found = True
        for name in _dropouts(module):
            setattr(module, name, share)
            is_found = True
        config = getattr(module, "config", None)
        if hasattr(config, "__dict__"):  # a user's module may have a dict or something else of that name
            configs[id(config)] = config
    if not is_found:
        what, fix = f"--dropout {share} has no effect: the model has no dropout", "leave out --dropout"
        raise InputError("args.value", what, saw=[f"it is a {type(model).__name__}"], fix=fix)
    for config in configs.values():
        for name in _dropouts(config):
            setattr(config, name, share)
    _rebuild_dropout(model)


def _rebuild_dropout(model: Any) -> None:
    """Give a model the modules that its config now asks for: some classes build no dropout where the rate is 0.

    A resumed run builds its model from this config, and must get the same modules.
    """
    import torch

    if not hasattr(model, "config_class"):  # not of transformers; perhaps it contains one
        for child in model.children():
            _rebuild_dropout(child)
        return
    with torch.device("meta"):
        twin = type(model)(copy.deepcopy(model.config))
    built = dict(model.named_modules())
    for path, part in twin.named_modules():
        own = built.get(path)
        if own is None or [type(each) for each in part._modules.values()] == [type(e) for e in own._modules.values()]:
            continue
        # The public iterators leave out children that are None, and cannot set their order.
        for name, child in [*part._modules.items()]:
            is_alike = name in own._modules and type(own._modules[name]) is type(child)
            if not is_alike and child is not None and not [*child.parameters(), *child.buffers()]:
                own._modules[name] = child.train(own.training)
        own._modules = {name: own._modules[name] for name in part._modules if name in own._modules}


def _dropouts(owner: Any) -> list[str]:
    """Return the names of dropout probabilities that are plain numbers on a module or config."""
    named = {name: value for name, value in vars(owner).items() if "dropout" in name or name.endswith("pdrop")}
    return [name for name, each in named.items() if isinstance(each, (int, float)) and not isinstance(each, bool)]


def add_adapters(model: Any, args: Any, kind: str | None) -> Any:
    """Return a model that trains only low-rank adapters and its head."""
    from loopwright.tasks.text.models import quiet

    try:
        with quiet():
            from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise InputError("install.extra", "--lora needs peft", fix="pip install 'loopwright[lora]'") from error
    options, heads = lora_options(args), _HEADS.get(kind or "") if kind is not None else _heads_of(model)
    config = LoraConfig(
        r=options.r,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        target_modules=_matching(model, options.targets, args) or ALL_LINEAR,
        # The head is trained fully, and peft cannot do both with one layer.
        exclude_modules=None if options.targets else heads,
        modules_to_save=None if kind is not None else heads,
        task_type=kind,
        use_dora=options.dora,
        use_rslora=options.rslora,
    )
    try:
        with quiet(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "fan_in_fan_out is set")  # for GPT-2's layers; peft sets it itself
            found = get_peft_model(model, config)
    except ValueError as error:
        what = f"--lora: peft has no adapters for {', '.join(options.targets) or 'the linear layers of this model'}"
        fix = _with_targets(args, [ALL_LINEAR]) if options.targets else "leave out --lora"
        raise InputError("args.value", what, saw=[str(error)[:200], _layers(model)], fix=fix) from error
    if hasattr(found, "base_model_prepare_inputs_for_generation"):  # as peft leaves it once it has generated a text
        found.base_model.prepare_inputs_for_generation = found.base_model_prepare_inputs_for_generation
    return found


def keeps_half(args: Any, training: Any) -> bool:
    """Whether 16-bit weights keep their type: only frozen ones under adapters, and only if their inputs are 16-bit too.

    Most updates of a 16-bit weight are lost in rounding.
    """
    return bool(args.lora) and (training.bf16 or training.fp16 or args.load_in is not None)


def four_bits(is_bf16: bool) -> Any:
    """Return how `--load_in 4bit` quantizes weights: nf4, with quantized scales."""
    if find_spec("bitsandbytes") is None:
        what, fix = "--load_in 4bit needs bitsandbytes", "pip install 'loopwright[qlora]'"
        raise InputError("install.extra", what, fix=fix, flag="--load_in")
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(**quantization_options(is_bf16))


def quantization_options(is_bf16: bool) -> dict[str, Any]:
    """Return the arguments of the `BitsAndBytesConfig` of `four_bits`."""
    kind = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    return {**kind, "bnb_4bit_compute_dtype": "bfloat16" if is_bf16 else "float32"}


def _matching(model: Any, targets: list[str], args: Any) -> list[str]:
    """Return the targets, patterns replaced by the names of the linear layers that they match; each must match one.

    Adapters on a weight that two layers share are refused: merged, they would change the other layer too.
    """
    weights = {name: getattr(module, "weight", None) for name, module in model.named_modules(remove_duplicate=False)}
    own = {name: each for name, each in weights.items() if each is not None and name}
    shared = {name: [one for one, each in own.items() if each is own[name] and one != name] for name in own}
    found: list[str] = []
    for target in targets:
        is_pattern = any(sign in target for sign in "*?[")
        hits = [name for name in _fitting(own, target) if not is_pattern or (own[name].dim() > 1 and not shared[name])]
        tied = next((name for name in hits if shared[name]), None)
        if hits and tied is None:
            found += hits if is_pattern else [target]
            continue
        near = [] if tied else _nearest_targets(own, target)
        fitting = ([each] if _fitting(own, each) else _nearest_targets(own, each)[:1] for each in targets)
        better = [each for found in fitting for each in found if each != target]
        what = f"--lora: the target {target} matches no {'linear ' if is_pattern else ''}layer of the model"
        if tied is not None:
            what = f"--lora: adapters of {tied} cannot be merged: {', '.join(shared[tied])} has the same weight"
        saw = [*([f"nearest: {', '.join(near)}"] if near else []), _layers(model)]
        fix = _with_targets(args, [*dict.fromkeys(better)] or [ALL_LINEAR])
        raise InputError("args.value", what, saw=saw, fix=fix, flag="--lora")
    return list(dict.fromkeys(found))


def _fitting(names: Iterable[str], target: str) -> list[str]:
    """Return the layers whose name, or the end of it, is a target or matches it."""
    return [name for name in names if fnmatchcase(name, target) or fnmatchcase(name, f"*.{target}")]


def _nearest_targets(names: Iterable[str], target: str) -> list[str]:
    """Return a pattern for all layers of a block, or the names that are nearest."""
    blocks = [pattern for pattern in (f"{target}.*", f"*.{target}.*") if _fitting(names, pattern)]
    return blocks[-1:] or near_names(target, [*dict.fromkeys(name.rpartition(".")[2] for name in names), *names])


def _with_targets(args: Any, targets: list[str]) -> str:
    """Return the flags that give the adapters other targets."""
    text = getattr(args, "lora", True)
    if args.lora_target:
        return "leave out --lora_target" if targets == [ALL_LINEAR] else f"--lora_target {' '.join(targets)}"
    items = [] if text is True else _items(str(text))
    chosen = ",".join(targets)
    kept = [item for item in items if "=" in item and _name_of(item) != "targets"]
    return f"--lora {shlex.quote(','.join([*kept, f'targets={chosen}']))}"


def _layers(model: Any) -> str:
    layers = sorted({re.sub(r"\d+", "N", name) for name, module in model.named_modules() if not [*module.children()]})
    return f"its layers are {', '.join(layers[:12])}{', ...' if len(layers) > 12 else ''}"


def _heads_of(model: Any) -> list[str] | None:
    """Name the children above a model's base, or those named as heads if the base is the model, as in UperNet."""
    base = _base_of(model)
    named = [name for name, module in model.named_children() if module is not base and list(module.parameters())]
    if base is model:
        named = [name for name in named if _is_head(name)]
    return named or None


def _is_head(name: str) -> bool:
    return any(word in name for word in ("head", "classifier"))


def leave_out_base(model: Any, new_weights: Iterable[str]) -> None:
    """Make the `state_dict` of a model that of its adapters: without frozen weights, unless they are in no file."""
    is_new, trained = {*map(_base_name, new_weights)}, {id(each) for each in model.parameters() if each.requires_grad}
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    left_out = {
        name
        for name in model.state_dict()
        if name not in buffers and id(parameters.get(name)) not in trained and _base_name(name) not in is_new
    }
    model.register_state_dict_post_hook(partial(_drop, left_out))
    model.register_load_state_dict_post_hook(partial(_excuse, left_out))


def _base_name(name: str) -> str:
    """Return the name of a weight in the model that the adapters were added to."""
    name = re.sub(r"\.(base_layer|original_module|modules_to_save\.default)(?=\.)", "", name)
    return name.removeprefix("base_model.model.")


def _drop(names: set[str], model: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name in names:
        state.pop(prefix + name, None)


def _excuse(names: set[str], model: Any, keys: Any) -> None:
    keys.missing_keys[:] = [name for name in keys.missing_keys if name not in names]


def save_adapters(model: Any, folder: Path) -> None:
    """Write adapters as peft reads them, with all other weights that a model without its base has in `state_dict`.

    peft by itself leaves these out: embeddings with trained rows, layers that are in no file of the base, buffers.
    """
    from safetensors.torch import load_file, save

    from loopwright.tasks.text.models import quiet

    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder, save_embedding_layers=False)
    state = {name: each for name, each in model.state_dict().items() if not _OF_PEFT.search(name)}
    weights = {name: each.detach().cpu().contiguous().clone() for name, each in state.items()}
    file = folder / "adapter_model.safetensors"
    write_atomically(file, save({**weights, **load_file(file)}, metadata={"format": "pt"}))


def open_adapters(model: Any, folder: Path) -> Any:
    """Return a base model with the adapters of `save_adapters`, in evaluation mode."""
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(model, folder, trust_remote_code=False).eval()


class MergeCheck(NamedTuple):
    """Whether a merged or reopened model has the outputs of the one with adapters, within a tolerance; and figures."""

    is_passed: bool
    text: str


def merged(model: Any) -> tuple[Any, MergeCheck | None]:
    """Return a model with its adapters merged into its weights, and a check; unchanged without adapters."""
    if not hasattr(model, "merge_and_unload"):
        return model, None
    is_quantized, was_training = bool(getattr(model, "is_loaded_in_4bit", False)), model.training
    computed_in = [model.config.quantization_config.bnb_4bit_compute_dtype] if is_quantized else []
    model.eval()
    before, was_tied = outputs_of(model), getattr(model.config, "tie_word_embeddings", False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Input and output embeddings are no longer tied")
        whole = (_dequantized(model) if is_quantized else model).merge_and_unload()
    check = compared("merged outputs", before, whole, computed_in)
    if was_tied and not whole.config.tie_word_embeddings:
        _untie(whole)
    if not is_quantized and len(_types(whole)) > 1:
        whole.float()  # the head was trained in float32, and transformers loads a model in one type
    whole.train(was_training)
    return whole, check


def _untie(model: Any) -> None:
    """Give each parameter its own tensor: transformers saves a tied bias once, and no longer ties it on loading."""
    from torch import nn

    known: set[int] = set()
    for module in model.modules():
        for name, each in list(module.named_parameters(recurse=False)):
            if id(each) in known:
                setattr(module, name, nn.Parameter(each.detach().clone(), each.requires_grad))
            known.add(id(each))


def _types(model: Any) -> set[Any]:
    return {each.dtype for each in model.parameters() if each.is_floating_point()}


def compared(what: str, before: list[Any], model: Any, computed_in: Sequence[Any] = ()) -> MergeCheck | None:
    """Compare the outputs of a model with earlier ones; `computed_in` is the type of a base in 4 bits, if it is."""
    after, types = outputs_of(model), [*computed_in, *(each.dtype for each in model.parameters())]
    is_coarse = min(each.itemsize for each in types if each.is_floating_point) < 4
    kind = ("16 bits" if is_coarse else "fp32") + (" from 4-bit weights" if computed_in else "")
    tolerance = 5e-2 if is_coarse else 1e-2 if computed_in else 1e-4
    largest = max((each.abs().max().item() for each in before), default=0.0) or 1.0
    pairs = zip(before, after, strict=True) if len(before) == len(after) else ()
    differences = [(one - other).abs().max().item() / largest for one, other in pairs]
    if not differences:
        return None
    text = f"{what} differ by {max(differences):.1e} of the largest (tolerance {tolerance:g}, {kind})"
    return MergeCheck(max(differences) <= tolerance, text)


def outputs_of(model: Any) -> list[Any]:
    """Return the outputs of a model for a made-up input, as 32-bit tensors; none for a model that takes others."""
    import torch

    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    types = _types(inner)
    half = next(iter(types & {torch.bfloat16, torch.float16}), None) if len(types) > 1 else None
    device = next(inner.parameters()).device.type
    try:
        with torch.no_grad(), torch.autocast(device, half, enabled=half is not None):
            found = inner(**made_up_inputs(inner, 2, 12))
    except Exception:  # noqa: BLE001 - it takes other inputs, and raises whatever it likes
        return []
    values = found.values() if hasattr(found, "values") else [found]
    return [each.float() for each in values if isinstance(each, torch.Tensor) and each.is_floating_point()]


def made_up_inputs(model: Any, num_rows: int, num_tokens: int) -> dict[str, Any]:
    """Return inputs for a transformers model, of images or of this many tokens."""
    import torch

    config, device = getattr(model, "config", None), next(model.parameters()).device
    if getattr(model, "main_input_name", "") == "pixel_values":
        side = getattr(config, "image_size", 224)
        shape = (num_rows, getattr(config, "num_channels", 3), *([side, side] if isinstance(side, int) else side))
        return {"pixel_values": torch.linspace(-1, 1, math.prod(shape), device=device).reshape(shape)}
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    ids = (torch.arange(num_rows * num_tokens, device=device) * 7919 % vocabulary).reshape(num_rows, num_tokens)
    ids = ids[:, None] if type(model).__name__.endswith("MultipleChoice") else ids
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return inputs | ({"decoder_input_ids": ids} if getattr(config, "is_encoder_decoder", False) else {})


def _dequantized(model: Any) -> Any:
    """Return a model with adapters whose 4-bit base weights have become ordinary ones of the same values."""
    from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    from loopwright.tasks.text.models import quiet

    config, state = model.peft_config["default"], get_peft_model_state_dict(model, save_embedding_layers=False)
    with quiet():
        found = get_peft_model(model.unload().dequantize(), config)
    set_peft_model_state_dict(found, state)
    return found.eval()
