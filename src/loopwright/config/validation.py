"""Check the fields of `TrainingArguments` against each other, and fill in dependent ones.

This is idempotent: a filled-in value is taken as given the second time.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

from loopwright.config.accelerator import AcceleratorConfig
from loopwright.config.choices import IntervalStrategy, SaveStrategy, SchedulerType, choose, must_be, not_among, shown
from loopwright.config.fields import DEFAULT_OUTPUT_DIR, TrainingFields
from loopwright.config.files import check_depth
from loopwright.errors import ConfigError, ConfigTypeError, nearest

METRIC_INPUTS = ("inputs", "loss")

_FIELDS = {field.name: field for field in dataclasses.fields(TrainingFields)}
_BOOLS = {name for name, field in _FIELDS.items() if field.type in ("bool", "bool | None")}  # a parser changes types
_AT_LEAST_ONE = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps")
_AT_LEAST_ONE_OR_NONE = (
    "save_total_limit",
    "dataloader_prefetch_factor",
    "eval_accumulation_steps",
    "ddp_bucket_cap_mb",
    "torch_empty_cache_steps",
)
_NOT_NEGATIVE = ("learning_rate", "weight_decay", "adam_epsilon", "max_grad_norm", "eval_delay")
_AUTO_OF_TASKS = {
    "learning_rate": "loopwright.Trainer has find_lr()",
    "per_device_train_batch_size": "here auto_find_batch_size=True splits batches that do not fit",
}
_BELOW_ONE = ("adam_beta1", "adam_beta2", "label_smoothing_factor")
_JSON = ("lr_scheduler_kwargs", "gradient_checkpointing_kwargs", "liger_kernel_config", "fsdp_config")


def settle(args: TrainingFields) -> None:
    """Check all fields, and fill in dependent ones."""
    args.output_dir = os.path.expanduser(args.output_dir or DEFAULT_OUTPUT_DIR)
    for name in {*args._VALID_DICT_FIELDS, *_JSON}:
        _read_json(args, name)
    _settle_accelerator_config(args)
    check_refused(args, TrainingFields)
    if isinstance(args.include_num_input_tokens_seen, bool):
        args.include_num_input_tokens_seen = "all" if args.include_num_input_tokens_seen else "no"
    _check_kinds(args)
    _check_numbers(args)
    _settle_choices(args)
    _settle_intervals(args)
    _settle_best_model(args)
    _check_combinations(args)


def check_refused(args: Any, kind: type[TrainingFields]) -> None:
    """Refuse the fields of a class that are set but have no effect here."""
    for field in dataclasses.fields(kind):
        value = getattr(args, field.name)
        help_text = field.metadata["help"]
        if help_text.kind != "refused" or value == field.default:
            continue
        if value not in help_text.also_fine:
            raise ConfigError(f"{field.name}={shown(field.name, value)} is not supported: {help_text}")
        setattr(args, field.name, field.default)


def check_whole(args: Any, names: Iterable[str], least: int | None, is_optional: bool = False) -> None:
    """Check that fields are integers, and convert them to plain ones."""
    for name in names:
        value = getattr(args, name)
        if value is None and is_optional:
            continue
        if isinstance(value, bool) or not isinstance(value, Integral) or (least is not None and value < least):
            limit = "" if least is None else f" of at least {least}"
            unset = ", or None" if is_optional else ""
            raise must_be(name, f"a whole number{limit}{unset}", value, _instead(name, value))
        setattr(args, name, int(value))


def _instead(name: str, value: Any) -> str:
    """Return the advice for a value left to the run, which only a task can determine."""
    if value != "auto" or name not in _AUTO_OF_TASKS:
        return ""
    return f": 'auto' is for lw train and loopwright.train(); {_AUTO_OF_TASKS[name]}"


def _number(name: str, value: Any, expected: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value) >= 0:
        raise must_be(name, expected, value, _instead(name, value))
    return int(value) if isinstance(value, Integral) else float(value)


def _read_json(args: TrainingFields, name: str) -> None:
    value = getattr(args, name, None)
    if not isinstance(value, str) or (name not in _JSON and not value.startswith("{")):
        return
    try:
        read = json.loads(value)
        check_depth(read)
    except (ValueError, RecursionError) as error:
        raise must_be(name, "a dict, or one as JSON text", value, f", which is not: {error}") from error
    if not isinstance(read, dict):
        raise must_be(name, "a dict, or one as JSON text", value)
    setattr(args, name, read)


def _settle_accelerator_config(args: TrainingFields) -> None:
    config: Any = AcceleratorConfig.of(args.accelerator_config)
    given = args.gradient_accumulation_steps
    steps = (config.gradient_accumulation_kwargs or {}).get("num_steps", given)
    if given not in (1, steps):
        text = f"num_steps={steps!r} in accelerator_config contradicts gradient_accumulation_steps={given!r}"
        raise ConfigError(f"{text}: give only gradient_accumulation_steps")
    args.accelerator_config, args.gradient_accumulation_steps = config, steps


def _check_kinds(args: TrainingFields) -> None:
    for name, field in _FIELDS.items():
        value = getattr(args, name)
        if name in _BOOLS and not isinstance(value, bool):
            if value is None and field.default is None:
                continue
            raise ConfigTypeError(f"{name} must be True or False, got {value!r}", flag=name)
        choices = field.metadata.get("choices")
        if choices and value not in choices and not (value is None and field.default is None):
            raise not_among(f"{name} must be", value, choices, flag=name)


def _check_numbers(args: TrainingFields) -> None:
    check_whole(args, _AT_LEAST_ONE, 1)
    args.save_total_limit = None if args.save_total_limit == 0 else args.save_total_limit  # as in transformers
    check_whole(args, _AT_LEAST_ONE_OR_NONE, 1, is_optional=True)
    check_whole(args, ["dataloader_num_workers"], 0)
    check_whole(args, ["max_steps", "seed"], None)
    if args.neftune_noise_alpha is not None:
        _number("neftune_noise_alpha", args.neftune_noise_alpha, "a number of at least 0, or None")
    check_whole(args, ["data_seed"], None, is_optional=True)
    if args.max_steps < 1 and args.max_steps != -1:
        raise must_be("max_steps", "at least 1, or -1 to train num_train_epochs", args.max_steps)
    for name in _NOT_NEGATIVE:
        setattr(args, name, _number(name, getattr(args, name) or 0, "a number of at least 0"))
    if args.learning_rate == float("inf"):
        raise must_be("learning_rate", "a number of at least 0", args.learning_rate)
    for name in _BELOW_ONE:
        value = _number(name, getattr(args, name), "at least 0 and below 1")
        if value >= 1:
            raise must_be(name, "at least 0 and below 1", value)
        setattr(args, name, value)
    epochs = _number("num_train_epochs", args.num_train_epochs, "a number above 0")
    if not 0 < epochs < float("inf"):
        raise must_be("num_train_epochs", "a number above 0", epochs, "; an evaluation needs no training")
    args.num_train_epochs = epochs


def _settle_choices(args: TrainingFields) -> None:
    args.eval_strategy = choose(IntervalStrategy, "eval_strategy", args.eval_strategy)
    args.logging_strategy = choose(IntervalStrategy, "logging_strategy", args.logging_strategy)
    args.save_strategy = choose(SaveStrategy, "save_strategy", args.save_strategy)
    args.lr_scheduler_type = choose(SchedulerType, "lr_scheduler_type", args.lr_scheduler_type)
    args.fsdp = " ".join(args.fsdp) if isinstance(args.fsdp, list) else args.fsdp
    args.optim = str(getattr(args.optim, "value", args.optim))
    if args.hub_token == "<HUB_TOKEN>":  # read from a file, which never holds the token itself
        args.hub_token = None
    if args.hub_model_id and args.hub_model_id.endswith("/"):  # from push_to_hub_organization
        args.hub_model_id += os.path.basename(os.path.abspath(args.output_dir))
    named = _listed(args.report_to)
    args.report_to = [] if named == ["none"] else named
    _settle_buckets(args)
    args.label_names = None if args.label_names is None else _listed(args.label_names)
    args.include_for_metrics = _listed(args.include_for_metrics)
    for name in args.include_for_metrics:
        if name not in METRIC_INPUTS:
            near = nearest(str(name), METRIC_INPUTS)
            takes = f"include_for_metrics takes {' and '.join(METRIC_INPUTS)}, got {name!r}"
            raise ConfigError(takes, flag="include_for_metrics", nearest=near)
    if args.eval_strategy != IntervalStrategy.NO:
        args.do_eval = True
    args.debug = []  # refused otherwise
    args.dataloader_pin_memory = args.dataloader_pin_memory and not args.use_cpu
    if args.torch_compile_backend is not None or args.torch_compile_mode is not None:
        args.torch_compile = True
    if args.torch_compile and args.torch_compile_backend is None:
        args.torch_compile_backend = "inductor"


def _listed(given: Any) -> list[Any]:
    return [given] if isinstance(given, str) else list(given or [])


def _settle_buckets(args: TrainingFields) -> None:
    """Normalize the bucket lengths to "auto", "off" or ascending integers."""
    is_off = args.length_buckets == "off"
    if args.padding == "longest" and args.length_buckets not in ("auto", "off", None):
        raise ConfigError('padding="longest" and length_buckets exclude each other: leave one of them out')
    if args.padding == "bucket" and is_off:
        raise ConfigError('padding="bucket" and length_buckets="off" exclude each other: leave one of them out')
    if args.padding == "longest":
        args.length_buckets = "off"
    # transformers' parser has no default for a list.
    given: Any = "auto" if args.length_buckets is None else args.length_buckets
    words = [given] if isinstance(given, str) else list(given or ["off"])
    if words in (["auto"], ["off"]):
        args.length_buckets = words[0]
        return
    if not all(str(word).isdigit() and int(word) > 0 for word in words):
        raise must_be("length_buckets", '"auto", "off" or lengths such as 32 64 128', given)
    lengths: Any = sorted({int(word) for word in words})  # converted to numbers, from a file or a flag
    args.length_buckets = lengths


def _settle_intervals(args: TrainingFields) -> None:
    args.warmup_steps = _steps("warmup_steps", args.warmup_steps, "a fraction of all updates")
    if not args.eval_steps and args.eval_strategy == IntervalStrategy.STEPS:
        args.eval_steps = args.logging_steps
    for prefix in ("logging", "eval", "save"):
        name = f"{prefix}_steps"
        value = getattr(args, name)
        if value is None:
            continue
        meaning = f'a fraction of all updates; to do it never set {prefix}_strategy="no"'
        steps = _steps(name, value, meaning)
        if steps == 0 and getattr(args, f"{prefix}_strategy") == "steps":
            raise must_be(name, f'above 0 with {prefix}_strategy="steps"', value)
        setattr(args, name, steps)


def _steps(name: str, value: Any, meaning: str) -> float:
    """Return a number of updates as an integer, or a fraction of all updates unchanged."""
    steps = _number(name, value, f"a whole number of updates, or {meaning}")
    if steps < 1 and steps != 0:
        return steps
    if steps != int(steps):
        raise must_be(name, f"a whole number from 1 on, or {meaning}", value)
    return int(steps)


def _settle_best_model(args: TrainingFields) -> None:
    schedule = args.lr_scheduler_type
    reasons = {
        "load_best_model_at_end=True": args.load_best_model_at_end,
        'save_strategy="best"': args.save_strategy == SaveStrategy.BEST,
        f'lr_scheduler_type="{schedule}"': schedule in (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY),
    }
    needs_metric = [reason for reason, is_so in reasons.items() if is_so]
    if needs_metric and args.eval_strategy == IntervalStrategy.NO:
        raise ConfigError(
            f'{needs_metric[0]} needs evaluations to go by, and eval_strategy is "no": set eval_strategy="epoch" or '
            'eval_strategy="steps"'
        )
    if needs_metric and args.metric_for_best_model is None:
        args.metric_for_best_model = "loss"
    if not isinstance(args.metric_for_best_model, (str, type(None))):
        raise must_be("metric_for_best_model", "the name of a metric", args.metric_for_best_model)
    if args.greater_is_better is None and args.metric_for_best_model is not None:
        args.greater_is_better = not args.metric_for_best_model.endswith("loss")


def _check_combinations(args: TrainingFields) -> None:
    if args.fp16 and args.bf16:
        raise ConfigError("fp16=True and bf16=True exclude each other: set one of them (bf16 where the device has it)")
    if args.fp16_full_eval and args.bf16_full_eval:
        raise ConfigError("fp16_full_eval=True and bf16_full_eval=True exclude each other: set one of them")
    if (args.fp16_full_eval or args.bf16_full_eval) and args.fsdp:
        raise ConfigError("bf16_full_eval and fp16_full_eval cannot cast the weights of a sharded model: set bf16=True")
    if args.ddp_static_graph and (args.gradient_accumulation_steps > 1 or args.auto_find_batch_size):
        raise ConfigError(
            "ddp_static_graph=True needs gradients to be shared in every backward pass, and those of an update in "
            "several micro-batches are shared once: leave it out, or set gradient_accumulation_steps=1 and "
            "auto_find_batch_size=False"
        )
    if (args.optim_target_modules is None) is (args.optim == "apollo_adamw"):
        raise ConfigError('optim_target_modules names the layers of optim="apollo_adamw": set both, or neither')
    if args.torch_compile and args.step_mode == "eager":
        raise ConfigError('torch_compile=True and step_mode="eager" exclude each other: leave step_mode at "auto"')
    if args.dataloader_num_workers == 0:
        for name in ("prefetch_factor", "persistent_workers", "multiprocessing_context"):
            value = getattr(args, f"dataloader_{name}")
            if value:
                raise ConfigError(
                    f"dataloader_{name}={value!r} is about worker processes, and dataloader_num_workers is 0: set "
                    f"dataloader_num_workers to 1 or more, or leave dataloader_{name} out"
                )
