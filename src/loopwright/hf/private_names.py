"""Undocumented names of transformers' Trainer that users' methods rely on.

Methods copied from transformers and edited read these names. Each has the value that keeps such a copy correct.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from loopwright.config import TrainingArguments
from loopwright.engine.nested import to_device
from loopwright.engine.processes import gather_objects
from loopwright.errors import ConfigError
from loopwright.hf.callbacks import follows_metric, metric_value
from loopwright.hf.loss import forward_parameters, names_in
from loopwright.hf.outputs import TrainOutput
from loopwright.hf.run import HfRun
from loopwright.optimizers import create_optimizer, optimizer_class_and_options, projected_groups, weight_decay_groups
from loopwright.training.run import run_of

if TYPE_CHECKING:
    from loopwright.hf.checkpoints import HfCheckpoints
    from loopwright.hf.trainer import Trainer

_logger = logging.getLogger("loopwright.hf")

# An `_inner_training_loop` that reads one of these is a copy of transformers' loop.
_NAMES_OF_LOOPS = frozenset(("training_step", "_run_epoch", "on_step_begin", "on_epoch_begin"))

# Among an optimizer's options: given to it instead of the trainer's groups; the last one wins.
_GROUPS = ("params", "model", "optimizer_dict")


def optimizer_options(args: TrainingArguments, num_steps: int) -> dict[str, Any]:
    """Return the options of `optimizers.create_optimizer` that the arguments set, for a run of so many updates."""
    betas = (args.adam_beta1, args.adam_beta2)
    options = {"adam_betas": betas, "adam_eps": args.adam_epsilon, "optim_args": args.optim_args}
    if args.optim in ("schedule_free_adamw", "schedule_free_sgd"):
        options["warmup_steps"] = args.get_warmup_steps(num_steps)
    return options


def created_optimizer(trainer: Any, model: nn.Module) -> Any:
    """Create the optimizer of a trainer: by its name, from a class, or by a factory that takes the model."""
    args, given = trainer.args, trainer.optimizer_cls_and_kwargs
    groups = weight_decay_groups(model, args.weight_decay, trainer.get_decay_parameter_names(model))
    is_plain = trainer.uses_default("get_optimizer_cls_and_kwargs") and args.optim != "apollo_adamw"
    if given is None and is_plain:
        options = optimizer_options(args, trainer.state.max_steps)
        return create_optimizer(args.optim, groups, lr=args.learning_rate, **options)
    kind, options = trainer.get_optimizer_cls_and_kwargs(args, model) if given is None else given
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer):
        chosen: Any = [groups, *(options[name] for name in _GROUPS if name in options)]
        return kind(chosen[-1], **{name: value for name, value in options.items() if name not in _GROUPS})
    makes_factories = isinstance(kind, type) and any("__call__" in vars(each) for each in kind.__mro__)
    factory = kind() if makes_factories else kind
    return factory(model, **options)


def chosen_loop(trainer: PrivateNames) -> Callable[..., TrainOutput]:
    """Return the function that trains: an overridden `_inner_training_loop`, unless it is a loop of its own."""
    own = PrivateNames._inner_training_loop
    if _NAMES_OF_LOOPS.isdisjoint(names_in(trainer._inner_training_loop)):
        return trainer._inner_training_loop
    _logger.warning(
        "%s._inner_training_loop is not called: it is a loop of its own, and loopwright's is the one that saves and "
        "resumes. Call super()._inner_training_loop(...) in it, or override training_step.",
        type(trainer).__name__,
    )
    return functools.partial(own, trainer)


class PrivateNames:
    """The part of `Trainer` that exists only for code written for transformers.

    Attributes:
        current_gradient_accumulation_steps: the divisor in a copied `training_step`; 1, since
            `accelerator.backward` weights the loss.
        model_accepts_loss_kwargs: whether a copied `compute_loss` passes `num_items_in_batch` to the model; never.
        loss_is_scaled_for_ga: True for a `compute_loss` that divides by the items of the whole update; its losses are
            added up, not averaged.
        current_flos: floating-point operations of this process since the last `store_flos`.
        graph_safe: whether an overridden `compute_loss` or `training_step` may be captured as a CUDA graph.
    """

    model: Any
    args: TrainingArguments
    processing_class: Any
    label_names: list[str]
    optimizer: Any
    state: Any
    core: Any
    item_counter: Any
    current_flos: float
    current_gradient_accumulation_steps: float = 1
    loss_is_scaled_for_ga: bool | None = None
    model_accepts_loss_kwargs = False
    graph_safe = False
    place_model_on_device = True
    is_model_parallel = is_fsdp_xla_enabled = is_distributed_loading_by_transformers = False
    deepspeed = None
    _signature_columns: list[str] | None = None

    @property
    def tokenizer(self) -> Any:
        """Old name of `processing_class`."""
        return self.processing_class

    @property
    def is_deepspeed_enabled(self) -> bool:
        """Whether accelerate's configuration asks for DeepSpeed."""
        return getattr(self.core.accelerator.state, "deepspeed_plugin", None) is not None

    @property
    def is_fsdp_enabled(self) -> bool:
        """Whether accelerate's configuration asks for FSDP."""
        return getattr(self.core.accelerator.state, "fsdp_plugin", None) is not None

    @property
    def gather_function(self) -> Any:
        """accelerate's function that gathers the predictions of all processes."""
        gather, as_objects = self.core.accelerator.gather_for_metrics, self.args.eval_use_gather_object
        return functools.partial(gather, use_gather_object=as_objects)

    @property
    def _train_batch_size(self) -> int:
        return self.args.train_batch_size

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Return the samples of an update, over all processes."""
        return self._train_batch_size * args.gradient_accumulation_steps * args.world_size

    def get_tp_size(self) -> int:
        """Return 1: tensor, context and sequence parallelism are not built in."""
        return 1

    get_cp_size = get_sp_size = get_tp_size

    def _get_learning_rate(self: Any) -> Any:
        return self.get_learning_rates()[0]

    _globalstep_last_logged, _total_loss_scalar = 0, 0.0

    def _maybe_log_save_evaluate(self: Any, *given: Any, **options: Any) -> None:
        """Log what is due; called for every log of a run."""
        self.log(self.core.hf_run.logs)

    def _evaluate(self: Any, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> dict[str, Any]:
        """Evaluate during a run, and step a schedule that follows a metric; called by the loop."""
        metrics: dict[str, Any] = self.evaluate(ignore_keys=ignore_keys_for_eval) or {}  # an override may return None
        if not skip_scheduler or self.state.global_step == 0:
            self._report_to_hp_search(trial, self.state.global_step, metrics)
        if follows_metric(self.lr_scheduler) and not skip_scheduler:
            self.lr_scheduler.step(metric_value(metrics, self.args.metric_for_best_model or "loss"))
        return metrics

    def _load_callback_state(self: Any) -> None:
        """Restore callbacks and the control from the state of a checkpoint; called when a run is resumed."""
        callbacks = [*self.callback_handler.callbacks, self.control]
        missing = self.state.hand_out(callbacks, self.args.restore_callback_states_from_checkpoint)
        *self.callback_handler.callbacks, self.control = callbacks
        if missing:
            _logger.warning("the checkpoint holds the state of callbacks that this run does not have: %s", missing)

    def autocast_smart_context_manager(self, cache_enabled: bool = True) -> contextlib.AbstractContextManager[Any]:
        """Old name of `compute_loss_context_manager`; the core applies autocast."""
        return contextlib.nullcontext()

    def _prepare_input(self, data: Any) -> Any:
        return to_device(data, self.core.device)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Move an extra model, such as a teacher; the loop moves the trained one."""
        model.to(device)

    def _set_signature_columns_if_needed(self) -> None:
        """Set `_signature_columns`, the columns that reach the collator; empty if the model takes any."""
        if self._signature_columns is None:
            names = forward_parameters(self.model)
            self._signature_columns = [*names, "label", "label_ids", *self.label_names] if names else []

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """Return a Hugging Face dataset without the columns that are not in `_signature_columns`."""
        self._set_signature_columns_if_needed()
        wanted = self._signature_columns
        if not self.args.remove_unused_columns or not wanted:
            return dataset
        return dataset.remove_columns([name for name in dataset.column_names or () if name not in wanted])

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: Any = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Run the loop; `batch_size` and `args` are the trainer's own."""
        run = HfRun(cast("Trainer", self), ignore_keys_for_eval, trial)
        self.core.replace_run(run)
        self.core.train(**run.prepare(resume_from_checkpoint))
        assert run.output is not None
        return run.output

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Return the micro-batches of an update, and the number of their items; called for each if overridden."""
        batches = list(itertools.islice(epoch_iterator, num_batches))
        return batches, self._get_num_items_in_batch(batches, device)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        counts = [self.item_counter.count(batch) for batch in batch_samples]
        return None if None in counts else sum(counts)

    def _save_checkpoint(self, model: Any, trial: Any = None) -> None:
        """Write the checkpoint of the current update; called by the loop for each."""
        cast("HfCheckpoints", run_of(self.core).checkpoints).write()

    def _load_from_checkpoint(self, resume_from_checkpoint: Any, model: Any = None) -> None:
        """Load the weights of a checkpoint; a resume calls only an override of it, then restores the state exactly."""
        self.core.hf_run.load_weights(Path(resume_from_checkpoint))

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        missing, unexpected = load_result.missing_keys, load_result.unexpected_keys
        if missing or unexpected:
            _logger.warning("weights that were loaded: %s are missing, %s are not in the model", missing, unexpected)

    def _load_best_model(self) -> None:
        """Load the best checkpoint; called at the end with `load_best_model_at_end`."""
        self.core.hf_run.load_best()

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        """Called when the optimizer and schedule of a resumed run are restored; an override may read its own files."""

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: Any = None) -> tuple[Any, dict[str, Any]]:
        """Return the optimizer class that the arguments name, and its keyword arguments."""
        given, groups = optimizer_options(args, max(args.max_steps, 0)), {}
        if args.optim == "apollo_adamw" and model is not None:
            decaying = weight_decay_groups(model, args.weight_decay)
            own = projected_groups(model, decaying, args.optim_target_modules, args.optim_args)
            groups["params"], given["optim_args"] = own
        kind, options = optimizer_class_and_options(args.optim, **given)
        return kind, {"lr": args.learning_rate, **options, **groups}

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return the operations of forward and backward of a micro-batch; called for each."""
        return self.core.hf_run.counters.flops_of(inputs)  # type: ignore[no-any-return]

    def store_flos(self) -> None:
        """Add the operations of all processes to `state.total_flos`; called at logs, evaluations and saves."""
        self.state.total_flos += sum(gather_objects(self.current_flos))
        self.current_flos = 0

    @staticmethod
    def num_tokens(train_dl: Any, max_steps: int | None = None) -> int:
        """Return the tokens of a loader, or those of its first batch times `max_steps`."""
        if max_steps is not None:
            return int(next(iter(train_dl))["input_ids"].numel()) * max_steps
        return sum(batch["input_ids"].numel() for batch in train_dl)

    def get_optimizer_group(self, param: Any = None) -> Any:
        """Return the optimizer group of a parameter or its name; without one, the parameters of every group."""
        if self.optimizer is None:
            raise ConfigError("there is no optimizer yet: train() creates it")
        groups = self.optimizer.param_groups
        if param is None:
            return [group["params"] for group in groups]
        wanted = dict(self.model.named_parameters()).get(param) if isinstance(param, str) else param
        for group in groups:
            if any(each is wanted for each in group["params"]):
                return group
        named = repr(param) if isinstance(param, str) else f"a parameter of shape {tuple(param.shape)}"
        raise ConfigError(f"the optimizer has no group with {named}: it is not a parameter of the model, or is frozen")
