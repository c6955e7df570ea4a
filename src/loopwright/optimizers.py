"""Optimizers by name, parameter groups for weight decay, steps, and dropping gradients.

The names are transformers' names (`adamw_torch`, `adamw_torch_fused`, `sgd`, `adagrad`, `rmsprop`, `adafactor`, and if
their packages are installed `adamw_8bit`, `schedule_free_adamw`, ...), and every class of `torch.optim`,
case-insensitively: "AdamW", "nadam", "RAdam". The prefix "torch.optim." always selects torch's class. That matters only
for Adafactor, where transformers has another variant.

    groups = weight_decay_groups(model, weight_decay=0.01)
    optimizer = create_optimizer("adamw_torch", groups, lr=2e-5)
    optimizer = create_optimizer("sgd", model.parameters(), lr=0.1, optim_args="momentum=0.9,nesterov=true")
"""

from __future__ import annotations

import ast
import importlib
import math
import re
from collections.abc import Callable, Collection, Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

# The hooks of all optimizers: registered by public functions, but listed only there.
from torch.optim.optimizer import ParamsT, _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from loopwright.errors import ConfigError, nearest


def drop_gradients(optimizer: Any) -> None:
    """Drop the gradients of an optimizer's parameters, like `zero_grad`; an overridden `zero_grad` is called."""
    if getattr(type(optimizer), "zero_grad", None) is not Optimizer.zero_grad or "zero_grad" in vars(optimizer):
        optimizer.zero_grad()
        return
    # torch's own version adds a profiler range, which takes twenty times as long as these lines.
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def apply_gradients(optimizer: Any) -> None:
    """Step an optimizer like its `step`, without torch's profiler range around it where no profiler runs."""
    method = getattr(type(optimizer), "step", None)
    is_torchs = getattr(method, "__code__", None) is _RANGE_AND_HOOKS and "step" not in vars(optimizer)
    # Whether a profiler runs has no public name.
    if not is_torchs or torch.autograd._profiler_enabled() or _has_hooks(optimizer):  # type: ignore[attr-defined]
        optimizer.step()
    else:
        # It alone takes up to a tenth of an update of a small model.
        method.__wrapped__(optimizer)  # type: ignore[union-attr] # made by functools.wraps


def _has_hooks(optimizer: Optimizer) -> bool:
    # Registered by public methods, but listed only there.
    everyones = _global_optimizer_pre_hooks or _global_optimizer_post_hooks
    return bool(everyones or optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


# The code of torch's wrapper around the `step` of each class of optimizers; a wrapper by others has another.
_RANGE_AND_HOOKS = Optimizer.profile_hook_step(lambda: None).__code__


# Matched against the whole lower-case parameter name: biases and the many spellings of a norm layer.
_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:\.|$)|_norm(?:\.|$)")


def decay_parameter_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters that weight decay applies to, in the model's order.

    It excludes biases, everything inside an `nn.LayerNorm`, and norms by name: `layernorm`, `rmsnorm`, `norm` as a
    whole part, or a part that ends in `_norm`. A tied parameter is listed under each of its names.
    """
    # The model itself is not checked: a model that is one LayerNorm decays its weight, as in transformers.
    modules = model.named_modules(remove_duplicate=False)
    norms = tuple(f"{name}." for name, module in modules if name and isinstance(module, nn.LayerNorm))
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return [name for name in names if not name.startswith(norms) and not _NO_DECAY.search(name.lower())]


def weight_decay_groups(
    model: nn.Module, weight_decay: float, decay_names: Collection[str] | None = None
) -> list[dict[str, Any]]:
    """Return two parameter groups: with decay, then without; one of them may be empty.

    Frozen parameters are in neither. A tied parameter appears once, by the first of its names. `decay_names` are
    `decay_parameter_names(model)` by default.
    """
    decays = set(decay_parameter_names(model) if decay_names is None else decay_names)
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for name, parameter in trainable if name in decays], "weight_decay": weight_decay},
        {"params": [parameter for name, parameter in trainable if name not in decays], "weight_decay": 0.0},
    ]


class Adafactor(Optimizer):
    """Adafactor (Shazeer and Stern, 2018) with the lr you give: the variant that transformers calls `adafactor`.

    For a matrix it keeps the mean square of each row and column instead of one number per weight. It differs from
    `torch.optim.Adafactor` in that the lr is not bounded by the update's number, and scaled by the size of the weights
    only with `scale_parameter`. No step syncs with the device.

    Args:
        params: the parameters, or groups of them.
        lr: the learning rate.
        eps: added to squared gradients, and the minimum weight size for `scale_parameter`.
        clip_threshold: the root mean square above which an update is scaled down to it.
        decay_rate: the negative power of the update's number that decays older gradients.
        beta1: the momentum of the updates; None for none.
        weight_decay: decoupled weight decay, times the lr, applied before each update.
        scale_parameter: whether to multiply the lr by the root mean square of the weights.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = False,
    ) -> None:
        for name, value in (("lr", lr), ("weight_decay", weight_decay), ("eps", min(eps))):
            if not value >= 0:
                raise ConfigError(f"{name} of Adafactor must not be negative, got {value}")
        if not clip_threshold > 0:
            raise ConfigError(f"clip_threshold of Adafactor must be positive, got {clip_threshold}")
        if not decay_rate <= 0:
            raise ConfigError(f"decay_rate of Adafactor must not be positive, got {decay_rate}; -0.8 is usual")
        defaults = {"lr": lr, "eps": eps, "clip_threshold": clip_threshold, "decay_rate": decay_rate}
        super().__init__(
            params, {**defaults, "beta1": beta1, "weight_decay": weight_decay, "scale_parameter": scale_parameter}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return the result of the closure, if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group, self.state[parameter])
        return loss

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; the running means of half-precision parameters stay in float32."""
        super().load_state_dict(state_dict)  # It casts them to the parameter's dtype, and a resumed run would differ.
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor):
                    self.state[parameter][name] = value.to(parameter.device, copy=True)

    def _update(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        assert parameter.grad is not None
        gradient, weights = _in_full(parameter.grad), _in_full(parameter)
        state["step"] = state.get("step", 0) + 1
        fresh_share = state["step"] ** group["decay_rate"]
        squared = gradient.square().add_(group["eps"][0])
        if gradient.dim() >= 2:
            # rows: (..., n), columns: (..., m) of a gradient (..., n, m). Their outer product over the mean of the
            # rows stands for the running mean square.
            rows = _faded(state, "exp_avg_sq_row", squared.mean(dim=-1), fresh_share)
            columns = _faded(state, "exp_avg_sq_col", squared.mean(dim=-2), fresh_share)
            row_factor = (rows / rows.mean(dim=-1, keepdim=True)).rsqrt_()
            update = (row_factor.unsqueeze(-1) * columns.rsqrt().unsqueeze(-2)).mul_(gradient)
        else:
            update = _faded(state, "exp_avg_sq", squared, fresh_share).rsqrt().mul_(gradient)
        update.div_((_root_mean_square(update) / group["clip_threshold"]).clamp_(min=1.0))
        lr = group["lr"]
        if group["scale_parameter"]:
            lr = lr * _root_mean_square(weights).clamp_(min=group["eps"][1])
        update.mul_(lr)
        if group["beta1"] is not None:
            update = _faded(state, "exp_avg", update, 1 - group["beta1"])
        if group["weight_decay"] != 0:
            weights.sub_(weights * (group["weight_decay"] * lr))
        weights.sub_(update)
        if weights is not parameter:
            parameter.copy_(weights)


def _in_full(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _faded(state: dict[str, Any], name: str, fresh: Tensor, fresh_share: float) -> Tensor:
    if name not in state:
        state[name] = torch.zeros_like(fresh)
    mean: Tensor = state[name]
    return mean.mul_(1 - fresh_share).add_(fresh, alpha=fresh_share)


def _root_mean_square(tensor: Tensor) -> Tensor:
    norm: Tensor = tensor.norm(2)
    return norm / math.sqrt(tensor.numel())


_OWN_NAMES: Mapping[str, tuple[type[Optimizer], Mapping[str, Any]]] = {
    "adamw_torch": (torch.optim.AdamW, {}),
    "adamw_torch_fused": (torch.optim.AdamW, {"fused": True}),
    "sgd": (torch.optim.SGD, {}),
    "adagrad": (torch.optim.Adagrad, {}),
    "rmsprop": (torch.optim.RMSprop, {}),
    "adafactor": (Adafactor, {}),
}

# Names of transformers that need another package: the package, the class, and the nearest alternative without it.
# Without a class they are refused: the first entry says why.
_IN_BACKWARD = "updates weights within the backward pass, where nothing can be accumulated or clipped"
_FOREIGN = (
    ("bitsandbytes", "optim.AdamW", "adafactor", "adamw_bnb_8bit adamw_8bit paged_adamw_32bit paged_adamw_8bit"),
    ("bitsandbytes", "optim.AdEMAMix", "adamw_torch", "ademamix ademamix_8bit paged_ademamix_32bit"),
    ("bitsandbytes", "optim.AdEMAMix", "adamw_torch", "paged_ademamix_8bit"),
    ("bitsandbytes", "optim.Lion", "adamw_torch", "lion_32bit lion_8bit paged_lion_32bit paged_lion_8bit"),
    ("bitsandbytes", "optim.RMSprop", "rmsprop", "rmsprop_bnb rmsprop_bnb_8bit rmsprop_bnb_32bit"),
    ("torchao", "optim.AdamW4bit", "adafactor", "adamw_torch_4bit"),
    ("torchao", "optim.AdamW8bit", "adafactor", "adamw_torch_8bit"),
    ("apollo-torch", "APOLLOAdamW", "adafactor", "apollo_adamw"),
    ("grokadamw", "GrokAdamW", "adamw_torch", "grokadamw"),
    ("torch-optimi", "StableAdamW", "adamw_torch", "stable_adamw"),
    ("schedulefree", "AdamWScheduleFree", "adamw_torch", "schedule_free_adamw"),
    ("schedulefree", "RAdamScheduleFree", "RAdam", "schedule_free_radam"),
    ("schedulefree", "SGDScheduleFree", "sgd", "schedule_free_sgd"),
    (_IN_BACKWARD, "", "adafactor", "lomo adalomo apollo_adamw_layerwise galore_adamw_layerwise"),
    (_IN_BACKWARD, "", "adafactor", "galore_adamw_8bit_layerwise galore_adafactor_layerwise"),
    ("keeps state that no checkpoint can hold", "", "adafactor", "galore_adamw galore_adamw_8bit galore_adafactor"),
    ("is not built in", "", "adamw_torch", "adamw_anyprecision adamw_torch_xla adamw_torch_npu_fused adamw_apex_fused"),
)
_FOREIGN_NAMES = {name: each[:3] for each in _FOREIGN for name in each[3].split()}

_FUSED_DEVICES = frozenset({"cpu", "cuda", "mps", "xpu"})

# The options of APOLLO's projection, which only the groups of projected layers have.
_PROJECTION = {"rank": 128, "proj": "random", "scale_type": "channel", "update_proj_gap": 200, "scale": 1.0}
_PROJECTION |= {"proj_type": "std"}


def projected_groups(
    model: nn.Module, groups: list[dict[str, Any]], targets: Any, optim_args: str | None
) -> tuple[list[dict[str, Any]], str]:
    """Return APOLLO's groups, the linear layers that `targets` name apart, and the rest of the `optim_args`."""
    texts, is_list = _parsed(optim_args), not isinstance(targets, str)
    options = {key: _typed(key, texts.pop(key, str(usual)), usual) for key, usual in _PROJECTION.items()}
    patterns = targets if is_list else [".*" if targets in ("all-linear", "all_linear") else targets]
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    chosen = {
        id(module.weight)
        for name, module in layers
        if any(re.fullmatch(each, name) or (is_list and each in name) for each in patterns)
    }
    if not chosen:
        raise ConfigError(f"optim_target_modules={targets!r} names no linear layer of the model: 'all-linear' is all")
    split = [
        {**group, **extra, "params": [each for each in group["params"] if (id(each) in chosen) is bool(extra)]}
        for extra in ({}, options)
        for group in groups
    ]
    return [group for group in split if group["params"]], ",".join(f"{key}={text}" for key, text in texts.items())


def keep_embeddings_precise(optimizer: Any, model: nn.Module) -> None:
    """Let an optimizer of bitsandbytes keep 32 bits for embeddings, which 8 bits would make unstable."""
    if type(optimizer).__module__.startswith("bitsandbytes"):
        manager = importlib.import_module("bitsandbytes.optim").GlobalOptimManager.get_instance()
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                manager.register_module_override(module, "weight", {"optim_bits": 32})


def create_optimizer(
    name: str,
    params: ParamsT,
    *,
    lr: float,
    adam_betas: tuple[float, float] | None = None,
    adam_eps: float | None = None,
    optim_args: str | None = None,
    **options: Any,
) -> Optimizer:
    """Return the optimizer of this name over the parameters.

    `adamw_torch_fused` uses torch's fused kernel if every parameter is a float on a device that has one (CPU and CUDA
    do).

    Args:
        name: a name of transformers, or of a class of `torch.optim`, in any case.
        params: the parameters, or groups of them such as `weight_decay_groups` returns.
        lr: the learning rate of groups without their own.
        adam_betas: `betas` of an optimizer that has them; others ignore it.
        adam_eps: `eps` of an optimizer that has `betas`; others ignore it.
        optim_args: extra options as text, "momentum=0.9,nesterov=true".
        options: extra options by name, as in the optimizer's class.

    Raises:
        ConfigError: the name or an option is unknown, a value is invalid, or there is nothing to train.
    """
    kind, settings = optimizer_class_and_options(
        name, adam_betas=adam_betas, adam_eps=adam_eps, optim_args=optim_args, **options
    )
    entries = [_listed(entry) for entry in params]
    held = [each for entry in entries for each in (entry["params"] if isinstance(entry, dict) else [entry])]
    parameters = [each[1] if isinstance(each, tuple) else each for each in held]
    if not parameters:
        raise ConfigError(
            f"the optimizer {str(name)!r} got no parameters to train: is the whole model frozen (requires_grad=False)?"
        )
    groups = [entry for entry in entries if isinstance(entry, dict)]
    overruled = [option for option in [*_parsed(optim_args), *options] if groups and all(option in g for g in groups)]
    if overruled:
        raise ConfigError(
            f"{', '.join(overruled)} would have no effect: every parameter group has its own. "
            "Set it where the groups are created (weight_decay of TrainingArguments or weight_decay_groups)"
        )
    is_fusable = all(each.is_floating_point() and each.device.type in _FUSED_DEVICES for each in parameters)
    if "fused" not in options and settings.get("fused") and not is_fusable:
        del settings["fused"]
    make: Callable[..., Optimizer] = kind
    try:
        return make(entries, lr=lr, **settings)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"the optimizer {str(name)!r} cannot be created: {error}") from error


def optimizer_class_and_options(
    name: str,
    *,
    adam_betas: tuple[float, float] | None = None,
    adam_eps: float | None = None,
    optim_args: str | None = None,
    **options: Any,
) -> tuple[type[Optimizer], dict[str, Any]]:
    """Return the class of a name, and its options except the lr; the arguments are those of `create_optimizer`.

    It needs no model, so it can check a configuration early: an unknown name or option, or a value of the wrong type,
    raises a ConfigError.
    """
    kind, preset = _found(str(getattr(name, "value", name)))
    accepted = {key: each.default for key, each in list(signature(kind).parameters.items())[1:] if key != "lr"}
    settings = dict(preset)
    if "betas" in accepted and adam_betas is not None:
        settings["betas"] = (*adam_betas, *accepted["betas"][2:])  # AdEMAMix has a third
    if {"betas", "eps"} <= accepted.keys() and adam_eps is not None:
        settings["eps"] = adam_eps
    texts = _parsed(optim_args)
    if "betas" in settings:
        betas = enumerate(settings["betas"], 1)
        settings["betas"] = tuple(_typed(f"beta{n}", texts.pop(f"beta{n}", str(beta)), beta) for n, beta in betas)
    for key in [*options, *texts]:
        if key == "lr":
            raise ConfigError("lr is not an option here: pass it as learning_rate, or lr=")
        if key not in accepted:
            near = nearest(key, accepted)
            hint = f"did you mean {near!r}? " if near else ""
            raise ConfigError(
                f"the optimizer {kind.__name__} has no option {key!r}: {hint}It takes {', '.join(accepted)}"
            )
    given = {key: _typed(key, text, accepted[key]) for key, text in texts.items()}
    return kind, settings | options | given


def _found(name: str) -> tuple[type[Optimizer], Mapping[str, Any]]:
    wanted = name.strip().lower()
    if wanted in _OWN_NAMES:
        return _OWN_NAMES[wanted]
    classes = [(each, kind) for each, kind in vars(torch.optim).items() if isinstance(kind, type)]
    torch_names = {each.lower(): kind for each, kind in classes if Optimizer in kind.__mro__[1:]}
    kind = torch_names.get(wanted.removeprefix("torch.optim."))
    if kind is torch.optim.LBFGS:
        raise ConfigError(
            "the optimizer LBFGS evaluates the loss several times in one update, which the training loop does not do: "
            "use 'adamw_torch', or call LBFGS in your own loop"
        )
    if kind is not None:
        return kind, {}
    if wanted in _FOREIGN_NAMES:
        return _imported(wanted, *_FOREIGN_NAMES[wanted])
    if wanted == "adamw_hf":
        raise ConfigError("the optimizer 'adamw_hf' was removed from transformers: use 'adamw_torch'")
    others = [kind.__name__ for each, kind in torch_names.items() if each not in {*_OWN_NAMES, "lbfgs"}]
    known = [*_OWN_NAMES, *others, *(each for each, (_, path, _) in _FOREIGN_NAMES.items() if path)]
    near = nearest(wanted, [each.lower() for each in known])
    hint = f"did you mean {near!r}? " if near else ""
    what = f"there is no optimizer {name!r}: {hint}The names are {', '.join(known)}"
    raise ConfigError(what, flag="optim", given=name, nearest=near)


def _imported(name: str, package: str, path: str, instead: str) -> tuple[type[Optimizer], Mapping[str, Any]]:
    """Return the class of another package, and the options that its name stands for."""
    if not path:
        raise ConfigError(f"the optimizer {name!r} {package}: use {instead!r}, or pass an object as optimizers=")
    preset = {"block_size": 256} if package == "torchao" else {}
    if package == "bitsandbytes":
        preset = {"optim_bits": 8 if "8bit" in name else 32}
        preset |= {} if "rmsprop" in name else {"is_paged": "paged" in name}
    module, _, kind = f"{package.replace('-', '_').removeprefix('torch_')}.{path}".rpartition(".")
    try:
        return getattr(importlib.import_module(module), kind), preset
    except (ImportError, AttributeError) as error:
        text = f"the optimizer {name!r} needs the package {package} ({error})"
        raise ConfigError(f"{text}: pip install -U {package}, or use {instead!r}") from error


def _parsed(optim_args: str | None) -> dict[str, str]:
    """Return the parts of "k=v,k=v"; a comma inside brackets belongs to its value."""
    if optim_args is not None and not isinstance(optim_args, str):
        raise ConfigError(f"optim_args must be text like 'momentum=0.9,nesterov=true', got {optim_args!r}")
    texts: dict[str, str] = {}
    for part in re.split(r",(?![^(\[]*[)\]])", optim_args or ""):
        key, equals, text = (each.strip() for each in part.partition("="))
        if not part.strip():
            continue
        if not equals or not key or not text:
            raise ConfigError(f"optim_args must look like 'momentum=0.9,nesterov=true': {part.strip()!r} does not")
        if key in texts:
            raise ConfigError(f"optim_args gives {key!r} twice: {optim_args!r}")
        texts[key] = text
    return texts


_WORDS: Mapping[str, bool | None] = {"true": True, "yes": True, "false": False, "no": False, "none": None}


def _typed(key: str, text: str, default: Any) -> Any:
    """Return the value of the text, in the type of the option's default."""
    try:
        value: Any = _WORDS[text.lower()] if text.lower() in _WORDS else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(default, bool):
        if isinstance(value, bool) or (is_number and value in (0, 1)):
            return bool(value)
        raise ConfigError(f"optim_args: {key} is true or false, got {text!r}")
    if isinstance(default, int | float) and not is_number:
        raise ConfigError(f"optim_args: {key} is a number like {default}, got {text!r}")
    if isinstance(default, tuple):
        if not isinstance(value, tuple | list) or len(value) != len(default):
            example = ",".join(map(str, default))
            raise ConfigError(f"optim_args: {key} is {len(default)} numbers like ({example}), got {text!r}")
        return tuple(value)
    return value


def _listed(entry: Any) -> Any:
    """Return a group with its parameters as a list, since they are read before the optimizer gets them."""
    if not isinstance(entry, dict):
        return entry
    params = entry["params"]
    return {**entry, "params": [params] if isinstance(params, Tensor) else list(params)}
