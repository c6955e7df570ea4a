"""`Trainer`: the API and behaviour of transformers' Trainer, on loopwright's loop.

Every method of its API may be overridden and is then called by the loop: `compute_loss`, `training_step`,
`prediction_step`, `evaluation_loop`, `get_train_dataloader`, `create_optimizer`, ...
"""

from __future__ import annotations

import contextlib
import inspect
import math
import time
from collections.abc import Callable, Mapping, Sized
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from loopwright.config import TrainingArguments
from loopwright.engine.nested import to_device
from loopwright.engine.processes import world_process_zero_only
from loopwright.engine.sharding import is_sharded
from loopwright.errors import ConfigError, ConfigRuntimeError, DataError
from loopwright.hf import files, hub, loaders, search
from loopwright.hf import loss as losses
from loopwright.hf.callbacks import CallbackHandler, DefaultFlowCallback, PrinterCallback, ProgressCallback
from loopwright.hf.core import Core
from loopwright.hf.loaders import ColumnCollator, DataCollator
from loopwright.hf.model_setup import noisy_embeddings
from loopwright.hf.outputs import EvalLoopOutput, PredictionOutput, TrainOutput, set_seed, speed_metrics, stored_metrics
from loopwright.hf.prediction import EvaluationPass, model_predictions
from loopwright.hf.private_names import PrivateNames, chosen_loop, created_optimizer
from loopwright.hf.state import STATE_FILE, TrainerControl, TrainerState
from loopwright.hf.validation import apply_log_level, check_trainer, given_optimizers, settled_arguments
from loopwright.optimizers import decay_parameter_names, keep_embeddings_precise
from loopwright.schedulers import get_scheduler
from loopwright.settings import check_is_idle
from loopwright.training.run import run_of

_LABEL_COLUMNS = ("labels", "label", "label_ids", "start_positions", "end_positions")


class Trainer(PrivateNames):
    """Trains, evaluates and runs a model of transformers, or any module whose forward takes the batch's keys.

    Attributes:
        model: the bare model; the loop runs `model_wrapped`.
        state, control: read and set by callbacks.
        hub_model_id: the full name of the repository on the Hub, once it exists.
        optimizer, lr_scheduler: as given, or as created by `create_optimizer` and `create_scheduler`.
        prediction_padding: pads predictions of different lengths; None is -100.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: Any = None,
        data_collator: DataCollator | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., nn.Module] | None = None,
        compute_loss_func: Callable[..., Tensor] | None = None,
        compute_metrics: Callable[..., dict[str, Any]] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        *,
        tokenizer: Any = None,
    ) -> None:
        """Store everything, create the model with `model_init` if given, and seed python, numpy and torch.

        Args:
            model: the module to train, or None with `model_init`.
            args: `TrainingArguments`, ours or transformers'.
            train_dataset, eval_dataset: datasets; `eval_dataset` may be a dict of them.
            processing_class: tokenizer or processor; selects the default collator, and is saved with the model.
            model_init: creates a fresh model for every `train`.
            compute_loss_func: called with (outputs, labels, num_items_in_batch=) instead of the model's own loss.
            compute_metrics: called with an `EvalPrediction`, returns a dict.
            callbacks: added to the default ones.
            optimizers: an optimizer and a scheduler, used as given.
            optimizer_cls_and_kwargs: an optimizer class with its arguments.
            preprocess_logits_for_metrics: called with (logits, labels) before predictions are stored.
            tokenizer: old name of `processing_class`.
        """
        of_subclass = vars(self).keys() - inspect.signature(Trainer.__init__).parameters.keys()
        self.args: TrainingArguments = settled_arguments(args)
        self.model_init = model_init
        self.compute_loss_func = compute_loss_func
        self.compute_metrics = compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.processing_class = tokenizer if processing_class is None else processing_class
        self.optimizer, self.lr_scheduler = given_optimizers(optimizers)
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        check_trainer(self, model, callbacks)
        apply_log_level(self.args)
        set_seed(self.args.seed, self.args.full_determinism)
        self.model: Any = self.call_model_init() if model is None else model
        self.data_collator = loaders.chosen_collator(data_collator, self.processing_class)
        self.control = TrainerControl()
        self.state = TrainerState(
            is_local_process_zero=self.is_local_process_zero(), is_world_process_zero=self.is_world_process_zero()
        )
        bar = PrinterCallback if self.args.disable_tqdm else ProgressCallback
        reporters = files.reporting_callbacks(list(self.args.report_to or []), self.args.logging_dir)
        passed = (self.model, self.processing_class, self.optimizer, self.lr_scheduler)
        self.callback_handler = CallbackHandler([DefaultFlowCallback, *reporters, *(callbacks or []), bar], *passed)
        self.is_in_train = self.can_return_loss = False
        self.current_flos = 0
        self.neftune_noise_alpha = self.args.neftune_noise_alpha
        self.label_names: list[str] = []
        self.label_smoother: Any = None
        self.item_counter: losses.ItemCounter
        self.prediction_padding: int | None = None
        self.given_optimizer, self.given_scheduler = self.optimizer, self.lr_scheduler
        self.core = Core(self)
        _inspect_model(self)
        self.hub_model_id: str | None = None
        self.push_in_progress: hub.PushInProgress | None = None
        if self.args.push_to_hub:
            with hub.reporting_failures(self):
                self.init_hf_repo()
        if self.args.should_save:
            Path(self.args.output_dir).mkdir(parents=True, exist_ok=True)
        self.core.own_names = {*dir(Trainer), *vars(self)} - of_subclass
        self.call_event("on_init_end")

    def uses_default(self, method: str) -> bool:
        """Whether a method is this class's own or missing: neither overridden nor replaced."""
        own = getattr(Trainer, method, None)
        return getattr(type(self), method, None) is own and method not in vars(self)

    # --- training -----------------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | Path | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train the model.

        Args:
            resume_from_checkpoint: a `checkpoint-<step>` folder, or True for the newest complete one in `output_dir`.
            trial: a dict of arguments for this run only, or an optuna trial; `model_init` gets it too.
            ignore_keys_for_eval: outputs of the model that are not predictions, for evaluations during the run.
        """
        check_is_idle(run_of(self.core).is_running)
        if self.train_dataset is None and self.uses_default("get_train_dataloader"):
            raise ConfigError("there is nothing to train on: pass train_dataset to the Trainer")
        with search.applied(self, trial):
            if self.model_init is not None:
                set_seed(self.args.seed, self.args.full_determinism)
                self.model = self.call_model_init(trial)
                self.optimizer = self.callback_handler.optimizer = self.callback_handler.lr_scheduler = None
                _inspect_model(self)
            self.is_in_train = True
            loop = chosen_loop(self)
            try:
                with noisy_embeddings(self.model, self.neftune_noise_alpha):
                    return loop(self._train_batch_size, self.args, resume_from_checkpoint, trial, ignore_keys_for_eval)
            finally:
                self.is_in_train = False
                self.core.model = self.model

    hyperparameter_search = search.hyperparameter_search
    _hp_search_setup, _report_to_hp_search, _get_output_dir = search.set_up, search.report, search.output_dir
    hp_search_backend = hp_space = hp_name = compute_objective = objective = search.UNSET

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Return a fresh model from `model_init`; called by the constructor and at every `train`."""
        assert self.model_init is not None
        parameters = inspect.signature(self.model_init).parameters.values()
        takes_trial = any(each.default is each.empty or each.name == "trial" for each in parameters)
        model = self.model_init(trial) if takes_trial else self.model_init()
        if not isinstance(model, nn.Module):
            raise ConfigRuntimeError(f"model_init must return a module, it returned a {type(model).__name__}")
        return model

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Run forward and backward of a micro-batch, and return its mean loss, detached.

        Called for every micro-batch. An override calls `self.accelerator.backward(loss)` with the mean loss over the
        micro-batch, which is weighted there for the update.
        """
        if not model.training:
            model.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss: Tensor = self.core.loss_of(model, inputs, num_items_in_batch)[0]
        self.accelerator.backward(loss)
        return loss.detach()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the mean loss of a micro-batch, or (loss, outputs).

        Called by `training_step` and `prediction_step`. An override may take two arguments only, may ignore
        `return_outputs` (evaluations then have a loss and no predictions), and may return a sum divided by
        `num_items_in_batch`, which is the number of items of this micro-batch alone.
        """
        labels = None
        if (self.label_smoother is not None or self.compute_loss_func is not None) and "labels" in inputs:
            labels = inputs["labels"]
            inputs = {name: value for name, value in inputs.items() if name != "labels"}
        try:
            outputs = model(**inputs)
        except TypeError as error:
            unexpected = losses.unexpected_inputs(self.model, inputs)
            if unexpected is None:
                raise
            raise unexpected from error
        if self.compute_loss_func is not None:
            loss = self.compute_loss_func(outputs, labels, num_items_in_batch=num_items_in_batch)
        elif self.label_smoother is not None and labels is not None:
            loss = self.label_smoother(outputs, labels, self.item_counter.shifts_labels())
        else:
            loss = losses.found_loss(outputs)
            if loss is None:
                raise losses.missing_loss(outputs, inputs, self.label_names, self.train_dataset)
        return (loss, outputs) if return_outputs else loss

    def compute_loss_context_manager(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context for `compute_loss`; the core applies autocast."""
        return contextlib.nullcontext()

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Return a batch on the device; called by `training_step` and `prediction_step`."""
        if isinstance(inputs, Mapping) and len(inputs) == 0:
            names = ", ".join(losses.forward_parameters(self.model))
            raise DataError(f"the batch is empty: the samples have none of the columns that the forward takes: {names}")
        return to_device(inputs, self.core.device)

    # --- data ---------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """Return the training loader; called once per `train`. The loop makes its order resumable."""
        size = self._train_batch_size
        return self._get_dataloader(self.train_dataset, "Training", size, self._get_train_sampler, is_training=True)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Return the training sampler; called by `get_train_dataloader`."""
        dataset = self.train_dataset if train_dataset is None else train_dataset
        return loaders.train_sampler(dataset, self.args, self.main_input_name)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the loader of an evaluation; called for each. A name selects from a dict of datasets."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = loaders.named_dataset(self.eval_dataset, dataset)
        if dataset is None:
            raise ConfigError("there is nothing to evaluate: pass eval_dataset to the Trainer or to evaluate")
        return self._get_dataloader(dataset, "Evaluation", self.args.eval_batch_size, self._get_eval_sampler)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return the loader of a prediction; called by `predict`."""
        return self._get_dataloader(test_dataset, "test", self.args.eval_batch_size, self._get_eval_sampler)

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[[Any], Any] | None = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> Any:
        """Return the loader of a dataset; the three methods above call it. Their loaders are not cached."""
        collate = self.data_collator
        if is_training:
            collate = loaders.training_collator(collate, self.args, self.model, self.processing_class)
        collate = self._get_collator_with_removed_columns(collate, description)
        return loaders.create_dataloader(dataset, self.args, batch_size, collate, sampler_fn)

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        """Return the evaluation sampler, None for the dataset's own order; called for each loader."""
        return None

    def num_examples(self, dataloader: Any) -> int:
        """Return the number of samples in a loader's dataset."""
        dataset = getattr(dataloader, "dataset", None)
        return len(dataset) if isinstance(dataset, Sized) else len(dataloader) * self.args.train_batch_size

    @property
    def main_input_name(self) -> str:
        """The model's main input."""
        return str(getattr(self.model, "main_input_name", "input_ids"))

    def _get_collator_with_removed_columns(
        self, data_collator: DataCollator, description: str | None = None
    ) -> DataCollator:
        """Return a collator that passes the model the columns it takes; called for every loader."""
        if not self.args.remove_unused_columns:
            return data_collator
        self._set_signature_columns_if_needed()
        uses_own = all(map(self.uses_default, ("compute_loss", "training_step", "prediction_step")))
        return ColumnCollator(data_collator, self._signature_columns or [], self.label_names, not uses_own)

    # --- optimizer and schedule ---------------------------------------------------------------------------------

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Create both; `train` calls it only if you override it, otherwise the two below."""
        self.create_optimizer()
        self.create_scheduler(num_training_steps, self.optimizer)

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Create the optimizer unless there is one; called by `train`."""
        if self.optimizer is None:
            model = self.model if model is None else model
            self.optimizer = created_optimizer(self, model)
            keep_embeddings_precise(self.optimizer, model)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create the schedule unless one was given; called by `train`."""
        if self.lr_scheduler is None:
            self.lr_scheduler = get_scheduler(
                str(self.args.lr_scheduler_type),
                self.optimizer if optimizer is None else optimizer,
                num_warmup_steps=self.args.get_warmup_steps(num_training_steps),
                num_training_steps=num_training_steps,
                scheduler_specific_kwargs=self.args.lr_scheduler_kwargs,  # type: ignore[arg-type] # settled to a dict
            )
        return self.lr_scheduler

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the names of the parameters with weight decay; called by `create_optimizer`."""
        return decay_parameter_names(model)

    def get_learning_rates(self) -> list[float]:
        """Return the learning rate of every parameter group."""
        if self.optimizer is None:
            raise ConfigError("there is no optimizer yet: train() creates it")
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_num_trainable_parameters(self) -> int:
        """Return the number of trainable parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    # --- evaluation and prediction ------------------------------------------------------------------------------

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate the model, log the metrics and return them; the loop calls it too.

        Args:
            eval_dataset: None for the trainer's own; each dataset of a dict is evaluated under `<prefix>_<name>_`.
            ignore_keys: outputs of the model that are not predictions.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, Mapping):
            metrics: dict[str, float] = {}
            for name, each in dataset.items():
                chosen = name if eval_dataset is None else each
                prefix = f"{metric_key_prefix}_{name}"
                metrics |= self.evaluate(chosen, ignore_keys=ignore_keys, metric_key_prefix=prefix)
            return metrics
        with self.core.spending("evaluation"):
            loader = self.get_eval_dataloader(eval_dataset)
            start = time.time()
            with self.core.ready():
                output = self.evaluation_loop(
                    loader,
                    description="Evaluation",
                    prediction_loss_only=True if self.compute_metrics is None else None,
                    ignore_keys=ignore_keys,
                    metric_key_prefix=metric_key_prefix,
                )
                metrics = _timed(self.args, output, metric_key_prefix, start)
                # Keep requests that callbacks made meanwhile, in case user code started this evaluation.
                should_log, should_evaluate = self.control.should_log, self.control.should_evaluate
                self.log(metrics)
                self.call_event("on_evaluate", metrics=metrics)
                self.control.should_log |= should_log
                self.control.should_evaluate |= should_evaluate
        return metrics

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Run the model over a dataset and return predictions, labels and metrics."""
        with self.core.spending("evaluation"):
            loader = self.get_test_dataloader(test_dataset)
            start = time.time()
            with self.core.ready():
                output = self.evaluation_loop(
                    loader, description="Prediction", ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix
                )
            metrics = _timed(self.args, output, metric_key_prefix, start)
        self.call_event("on_predict", metrics=metrics)
        return PredictionOutput(output.predictions, output.label_ids, metrics)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Run once over a loader; called by `evaluate` and `predict`.

        The loss is the mean over all items, independent of the batch size. Predictions move to the CPU batch by batch,
        and only if needed.
        """
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        with self.core.spending("evaluation"), self.core.ready():  # an overridden `evaluate` may call this alone
            return EvaluationPass(self, description, loss_only, ignore_keys).run(dataloader, metric_key_prefix)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """Return loss, logits and labels of an evaluation batch, None if missing; called for every batch."""
        inputs = self._prepare_inputs(inputs)
        names = _labels_in(self, inputs)
        asked = inputs.get("return_loss")
        needs_no_labels = not self.label_names and bool(self.can_return_loss if asked is None else asked)
        labels = tuple(inputs[name] for name in names) if names or needs_no_labels else None
        if ignore_keys is None:
            ignore_keys = getattr(getattr(self.model, "config", None), "keys_to_ignore_at_inference", None) or []
        is_own_loss = not self.uses_default("compute_loss") and not self.label_names
        has_loss = bool(names) or self.can_return_loss or needs_no_labels or is_own_loss
        loss: Tensor | None = None
        with torch.no_grad(), self.compute_loss_context_manager():
            if has_loss:
                count = self.item_counter.count(inputs)
                loss, outputs = self.core.loss_of(model, inputs, count, wants_outputs=True)
                loss = loss.detach().mean()
            else:
                outputs = model(**inputs)
        if prediction_loss_only:
            return loss, None, None
        logits = None if outputs is None else model_predictions(outputs, [*ignore_keys, "loss"], has_loss)
        return loss, logits, labels[0] if labels is not None and len(labels) == 1 else labels

    # --- logging, saving ----------------------------------------------------------------------------------------

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Add an entry to `state.log_history` and pass it to the callbacks."""
        if self.state.epoch is not None:
            logs["epoch"] = self.state.epoch
        if self.args.include_num_input_tokens_seen != "no":
            logs["num_input_tokens_seen"] = self.state.num_input_tokens_seen
        self.state.log_history.append({**stored_metrics(logs), "step": self.state.global_step})
        self.call_event("on_log", logs=self.core.shown(logs))

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """Print metrics on rank 0."""
        if self.is_world_process_zero():
            files.log_metrics(split, metrics)

    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        """Write metrics to `<split>_results.json` and, if `combined`, into `all_results.json` of `output_dir`."""
        folder, values = Path(self.args.output_dir), stored_metrics(metrics)
        world_process_zero_only(files.save_metrics)(folder, split, values, combined)

    def save_model(self, output_dir: str | Path | None = None, _internal_call: bool = False) -> None:
        """Write the model, its tokenizer and the arguments to a folder for `from_pretrained`, and upload it if set."""
        with self.core.spending("save"):
            weights = (self.core.whole_weights(),) if is_sharded(self.model) else ()
            folder = str(self.args.output_dir if output_dir is None else output_dir)
            world_process_zero_only(self._save)(folder, *weights)
        if self.args.push_to_hub and not _internal_call:
            with hub.reporting_failures(self):
                self.push_to_hub(commit_message="Model save")

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write the files of `save_model` on rank 0; not called for checkpoints."""
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        files.save_model(folder, self.model, self.saved_processor(), self.args, state_dict)

    def save_state(self) -> None:
        """Write trainer_state.json to `output_dir`."""
        if self.is_world_process_zero():
            self.state.save_to_json(Path(self.args.output_dir) / STATE_FILE)

    create_model_card, init_hf_repo, push_to_hub = hub.create_model_card, hub.init_hf_repo, hub.push_to_hub
    _push_from_checkpoint, _finish_current_push = hub.push_from_checkpoint, hub.finish_current_push

    # --- callbacks and processes --------------------------------------------------------------------------------

    def add_callback(self, callback: Any) -> None:
        """Add a callback, or a class of callbacks."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback, by instance or class, and return it."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, by instance or class."""
        self.callback_handler.remove_callback(callback)

    def call_event(self, event: str, **kwargs: Any) -> None:
        """Call an event of all callbacks; their return value becomes the control."""
        self.control = getattr(self.callback_handler, event)(self.args, self.state, self.control, **kwargs)

    def is_local_process_zero(self) -> bool:
        """Whether this is the first process of its node."""
        return self.args.local_process_index == 0

    def is_world_process_zero(self) -> bool:
        """Whether this is the first of all processes."""
        return self.args.process_index == 0

    @property
    def accelerator(self) -> Any:
        """accelerate's object; its `backward` weights the loss of a micro-batch for its update."""
        return self.core.accelerator_view

    @property
    def model_wrapped(self) -> Any:
        """The model as the loop runs it, in its distributed wrapper if any."""
        return self.core.model

    def saved_processor(self) -> Any:
        """Return the tokenizer or processor to save with the model: the trainer's, or the collator's."""
        own = self.processing_class
        return getattr(self.data_collator, "tokenizer", None) if own is None else own


def _inspect_model(trainer: Trainer) -> None:
    """Inspect the model's inputs, and how its loss counts items; repeated for every model of `model_init`."""
    args, model = trainer.args, trainer.model
    trainer._signature_columns = None
    trainer.label_names = losses.find_label_names(model) if args.label_names is None else list(args.label_names)
    trainer.can_return_loss = losses.can_return_loss(model)
    factor = args.label_smoothing_factor
    trainer.label_smoother = losses.LabelSmoother(factor) if factor else None
    uses_model_loss = trainer.uses_default("compute_loss") and trainer.compute_loss_func is None
    trainer.item_counter = losses.ItemCounter(model, uses_model_loss and trainer.label_smoother is None)
    trainer.core.model = trainer.callback_handler.model = model
    if getattr(model, "config", None) is not None:
        model.config.use_cache = args.use_cache


def _labels_in(trainer: Trainer, inputs: Mapping[str, Any]) -> list[str]:
    """Return a batch's label keys: all of `label_names`, or the usual ones if the model has none."""
    if trainer.label_names or trainer.args.label_names is not None:
        return trainer.label_names if all(inputs.get(name) is not None for name in trainer.label_names) else []
    return [name for name in _LABEL_COLUMNS if inputs.get(name) is not None]


def _timed(args: TrainingArguments, output: EvalLoopOutput, prefix: str, start: float) -> dict[str, Any]:
    samples = output.num_samples or 0
    steps = math.ceil(samples / (args.eval_batch_size * args.world_size))
    return {**(output.metrics or {}), **speed_metrics(prefix, start, samples, steps)}
