"""Checks of a Trainer's arguments, before anything is modified."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from loopwright.config import TrainingArguments
from loopwright.errors import ConfigError, ConfigRuntimeError, ConfigTypeError

if TYPE_CHECKING:
    from loopwright.hf.trainer import Trainer


def settled_arguments(args: Any) -> TrainingArguments:
    """Return the arguments as ours, converted from transformers' if needed; None gets a default folder."""
    if args is None:
        return TrainingArguments("tmp_trainer")
    if isinstance(args, TrainingArguments):
        return args
    if any(kind.__module__.partition(".")[0] == "transformers" for kind in type(args).__mro__):
        return TrainingArguments.from_transformers(args)
    raise ConfigTypeError(f"args must be TrainingArguments, got a {type(args).__name__}")


def given_optimizers(optimizers: Any) -> tuple[Any, Any]:
    """Return the given optimizer and scheduler, each None if missing."""
    if optimizers is None:
        return None, None
    is_sequence = isinstance(optimizers, (tuple, list))
    if is_sequence and len(optimizers) == 2:
        return optimizers[0], optimizers[1]
    given = f"{len(optimizers)} objects" if is_sequence else f"a {type(optimizers).__name__}"
    raise ConfigTypeError(
        f"optimizers must be a pair of an optimizer and a scheduler, got {given}: write (optimizer, None) to use the "
        "schedule that the arguments name"
    )


_logger = logging.getLogger("loopwright.hf")

# Methods of transformers' Trainer that are never called here, and their replacements.
_NEVER_CALLED = {
    "_run_epoch": "callbacks and training_step",
    "_prepare_for_training": "create_optimizer and create_scheduler",
    "_get_grad_norm": "max_grad_norm",
    "_save_optimizer_and_scheduler": "_save_checkpoint",
    "_save_rng_state": "_save_checkpoint",
    "_load_rng_state": "train(resume_from_checkpoint=...)",
    "_wrap_model": "accelerate's configuration",
    "_remove_unused_columns": "_set_signature_columns_if_needed",
    "create_accelerator_and_postprocess": "accelerate's configuration",
    "set_initial_training_values": "max_steps and num_train_epochs",
    "_clip_grad_norm": "max_grad_norm, or a callback's on_pre_optimizer_step",
    "_determine_best_metric": "metric_for_best_model and greater_is_better",
}


def apply_log_level(args: TrainingArguments) -> None:
    """Set loopwright's log level for this process; "passive" changes nothing.

    If logging was not set up, logs go to stderr, since a level alone would show only warnings.
    """
    if (args.log_level if args.should_log else args.log_level_replica) == "passive":
        return
    logger = logging.getLogger("loopwright")
    logger.setLevel(args.get_process_log_level())
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())


def check_trainer(trainer: Trainer, model: Any, callbacks: Any) -> None:
    """Raise a ConfigError if the arguments of a partly constructed trainer conflict."""
    args, data = trainer.args, trainer.eval_dataset
    _check_model(trainer, model)
    for name, instead in _NEVER_CALLED.items():
        if not trainer.uses_default(name):
            kind = type(trainer).__name__
            _logger.warning("loopwright never calls %s.%s; its job is done by %s", kind, name, instead)
    if Path(args.output_dir).is_file():
        raise ConfigError(f"output_dir={args.output_dir!r} is a file: give a folder, which is created if it is missing")
    if args.eval_strategy != "no" and data is None and trainer.uses_default("get_eval_dataloader"):
        raise ConfigError(
            f'eval_strategy is "{args.eval_strategy}", but there is no eval_dataset: pass one, or set it to "no"'
        )
    if isinstance(data, Mapping) and not data:
        raise ConfigError("eval_dataset is an empty dict: add a dataset, or pass None")
    metric = args.metric_for_best_model
    is_used = args.load_best_model_at_end or (args.eval_strategy != "no" and trainer.uses_default("evaluate"))
    if isinstance(data, Mapping) and metric is not None and is_used:
        bare = metric.removeprefix("eval_")
        if not any(bare.startswith(f"{name}_") for name in data):
            raise ConfigError(
                f"metric_for_best_model is {metric!r}, but eval_dataset is a dict of {', '.join(map(str, data))}: name "
                f'one of its datasets, as in "eval_{next(iter(data))}_{bare}"'
            )
    if not isinstance(callbacks, (list, tuple, type(None))):
        raise ConfigTypeError(f"callbacks must be a list, got a {type(callbacks).__name__}: write callbacks=[...]")
    _check_metric(trainer, list(callbacks or []))
    computes = trainer.compute_metrics
    if args.batch_eval_metrics and computes and "compute_result" not in inspect.signature(computes).parameters:
        raise ConfigError(
            "batch_eval_metrics=True calls compute_metrics(prediction, compute_result=...) for every batch: add the "
            "parameter compute_result, and return the metrics when it is True"
        )
    if trainer.train_dataset is not None and not isinstance(trainer.train_dataset, Sized) and args.max_steps < 1:
        raise ConfigError("train_dataset has no length, so the end of an epoch is unknown: set max_steps")


# The metrics of an evaluation without `compute_metrics`.
_ALWAYS_REPORTED = ("loss", "runtime", "samples_per_second", "steps_per_second")


def _check_metric(trainer: Trainer, callbacks: list[Any]) -> None:
    """Raise if nothing computes the metric; the user's callbacks may add one to an evaluation."""
    metric = trainer.args.metric_for_best_model
    if metric is None or trainer.args.eval_strategy == "no" or metric.endswith(_ALWAYS_REPORTED):
        return
    is_plain = trainer.uses_default("evaluate") and trainer.uses_default("evaluation_loop")
    kinds = [each if isinstance(each, type) else type(each) for each in callbacks]
    own = [kind for kind in kinds if kind.__module__.partition(".")[0] not in ("loopwright", "transformers")]
    if trainer.compute_metrics is None and is_plain and not any(hasattr(kind, "on_evaluate") for kind in own):
        raise ConfigError(
            f"metric_for_best_model is {metric!r}, but without compute_metrics an evaluation only has a loss: pass "
            'compute_metrics, or set metric_for_best_model="loss"'
        )


def _check_model(trainer: Trainer, model: Any) -> None:
    if (model is None) == (trainer.model_init is None):
        raise ConfigRuntimeError(f"a Trainer needs model or model_init, got {'neither' if model is None else 'both'}")
    if model is not None and not isinstance(model, nn.Module):
        raise ConfigTypeError(f"model must be a torch.nn.Module, got a {type(model).__name__}")
    has_optimizers = trainer.optimizer is not None or trainer.lr_scheduler is not None
    if trainer.model_init is not None and has_optimizers:
        raise ConfigRuntimeError(
            "model_init creates a new model for every train(), which an existing optimizer would not train: pass "
            "optimizer_cls_and_kwargs, or override create_optimizer"
        )
    if trainer.optimizer is not None and trainer.optimizer_cls_and_kwargs is not None:
        raise ConfigRuntimeError("optimizers and optimizer_cls_and_kwargs exclude each other: pass one of them")
    is_frozen = not getattr(getattr(model, "hf_quantizer", None), "is_qat_trainable", False)
    is_frozen = is_frozen and getattr(model, "is_quantized", False) and not getattr(model, "peft_config", None)
    if is_frozen and trainer.train_dataset is not None:
        raise ConfigError("the weights of a quantized model cannot be trained: add an adapter to it with peft")
