"""A run of `hf.Trainer` in transformers' terms: its length, its logs and checkpoints, its best model.

It is the core's callback: it turns the core's events into transformers' events, and control flags into requests.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from loopwright.callbacks import TrainerCallback
from loopwright.checkpoint import Checkpointing, read
from loopwright.checkpoint.fingerprint import Change
from loopwright.checkpoint.store import refusing_damage
from loopwright.data import Share, adopt
from loopwright.data.buckets import loop_padding
from loopwright.engine.memory import release_memory
from loopwright.engine.processes import gather_objects, sum_over_processes, world_process_zero_only
from loopwright.engine.sharding import load_weights
from loopwright.errors import ConfigError
from loopwright.hf import hub, search
from loopwright.hf.callbacks import follows_metric, metric_key, metric_value
from loopwright.hf.checkpoints import resume_source
from loopwright.hf.files import completed, configuration_files, pretrained_files
from loopwright.hf.model_setup import prepare_model
from loopwright.hf.outputs import TrainOutput, stored_metrics
from loopwright.hf.state import STATE_FILE, TrainerState, shallow
from loopwright.hf.transformers_checkpoint import is_foreign, read_weights
from loopwright.progress import TRAINING
from loopwright.protocols import TrainerLike
from loopwright.settings import holds_parameters
from loopwright.tracking import LossTracker
from loopwright.tracking.loss import combined
from loopwright.training.resume import stored_window
from loopwright.training.run import run_of

if TYPE_CHECKING:
    from loopwright.hf.trainer import Trainer

_logger = logging.getLogger("loopwright.hf")

# Arguments about how much to report or where; a new value does not change the run.
_NOT_COMPARED = frozenset(("output_dir", "run_name", "logging_dir", "disable_tqdm", "report_to", "log_level"))
_OF_HUB = ("push_to_hub", "hub_")

# The core keeps the micro-batches of an update and the order of the samples, and prints any change.
_PRINTED_BY_CORE = ("gradient_accumulation_steps", "seed", "accelerator_config")

# Taken from the arguments of a resumed run, not from its checkpoint.
_OF_THIS_RUN = (
    *("max_steps", "logging_steps", "eval_steps", "save_steps", "num_train_epochs", "train_batch_size"),
    *("is_local_process_zero", "is_world_process_zero"),
)


class MetricSchedule:
    """A schedule that is stepped after evaluations, not after updates; the core saves it."""

    def __init__(self, schedule: Any) -> None:
        self.state_dict, self.load_state_dict = schedule.state_dict, schedule.load_state_dict

    def step(self) -> None:
        pass


class HfRun(TrainerCallback):
    """One run: created by `Trainer.train`, called by the core.

    Attributes:
        folder: of the checkpoints.
        logged: loss, items and updates as of the last log.
        owner_saves: whether `_save` or `save_model` is overridden, and writes the model's files of a checkpoint.
    """

    # `HfStep` and `HfBoundary` check this for transformers' callbacks.
    graph_safe = asks_alike = True
    name_in_checkpoints = "Bridge"  # since the first release

    def __init__(self, owner: Trainer, ignore_keys: list[str] | None = None, trial: Any = None) -> None:
        self.learning_rate: Any = None
        self.output: TrainOutput | None = None
        self.logged, self.logs = (0.0, 0.0, 0), dict[str, Any]()
        self.last_saved: int | None = None
        self._trainer, self._ignore_keys, self.trial = owner, ignore_keys, trial
        self.folder = str(owner.args.output_dir)
        self._keeps_best = owner.args.load_best_model_at_end or owner.args.save_strategy == "best"
        self.counters = Counters(owner)
        self._losses = LossTracker()  # over the whole run, each a mean with its number of items
        self._samples_seen = 0  # over all processes
        self._fixed_files: dict[str, bytes] = {}  # of every checkpoint
        self.owner_saves = not (owner.uses_default("_save") and owner.uses_default("save_model"))
        self._begun: int | None = None  # the update whose on_step_begin was called
        self._last_evaluated: int | None = None

    def prepare(self, resume_from_checkpoint: Any) -> dict[str, Any]:
        """Prepare model, data, optimizer and folder; return the arguments of the core's `train`."""
        trainer, args, core = self._trainer, self._trainer.args, self._trainer.core
        self.folder = trainer._get_output_dir(self.trial)
        resume_from = resume_source(resume_from_checkpoint, self.folder)
        prepare_model(trainer)
        loader = trainer.callback_handler.train_dataloader = trainer.get_train_dataloader()
        engine = run_of(core).engine
        share = Share(engine.rank, engine.num_processes, self._accumulation(resume_from))
        per_epoch = adopt(loader, seed=0, share=share, device=engine.device).num_updates
        max_steps, num_epochs = self._length(per_epoch)
        trainer.state = TrainerState(train_batch_size=args.train_batch_size, **search.begun(trainer, self.trial))
        trainer.state.init_training_references(trainer, max_steps, num_epochs, self.trial)
        trainer.state.compute_steps(args, max_steps)
        trainer.lr_scheduler = trainer.given_scheduler
        is_of_last_run = trainer.optimizer is not trainer.given_optimizer and trainer.optimizer is core.optimizer
        if is_of_last_run and not holds_parameters(trainer.optimizer, trainer.model):
            trainer.optimizer = None  # the model was replaced since
        if trainer.uses_default("create_optimizer_and_scheduler"):
            trainer.create_optimizer()
        else:
            trainer.create_optimizer_and_scheduler(max_steps)
        core.model, core.optimizer = trainer.model, trainer.optimizer
        _logger.info("training %d updates of %d samples", max_steps, trainer.get_total_train_batch_size(args))
        checkpoints = self._checkpointing()
        if checkpoints is None and resume_from == "auto":
            resume_from = self.folder
        # Whole epochs have no limit to reach, so none is reported. Beginning an epoch again makes it longer.
        is_whole = per_epoch is not None and max_steps == num_epochs * per_epoch and not args.ignore_data_skip
        return {
            "train_dataset": trainer.train_dataset,
            "num_epochs": num_epochs,
            "per_device_batch_size": args.train_batch_size,
            "max_num_train_steps": None if is_whole else max_steps,
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
            "gradient_clip_norm": args.max_grad_norm if args.max_grad_norm > 0 else math.inf,
            "create_scheduler_fn": self.schedule,
            "resume_from": resume_from,
            "seed": args.seed,
            "mixed_precision": args.mixed_precision,
            "step_mode": "compile" if args.torch_compile else args.step_mode,
            "padding": loop_padding(args.padding),
            "checkpoints": checkpoints,
            "log_every": sys.maxsize,
            "nan": args.nan,
            "bad_samples": args.bad_samples,
            "reduction": args.reduction,
            "oom": "split" if args.auto_find_batch_size else "stop",
        }

    def _accumulation(self, resume_from: str | None) -> int:
        """Return the micro-batches per update and process; a resumed run keeps its original number."""
        args, num_processes = self._trainer.args, self._trainer.core.num_processes
        folder = self.folder if resume_from == "auto" else resume_from
        window = None if folder is None else stored_window(folder)
        given: int = args.gradient_accumulation_steps
        return given if window is None or window % num_processes else window // num_processes

    def _length(self, per_epoch: int | None) -> tuple[int, int]:
        args = self._trainer.args
        if per_epoch == 0:
            raise ConfigError(
                "there is nothing to train on: the training loader has no batch. The dataset is empty, or smaller than "
                "a batch while dataloader_drop_last=True."
            )
        if args.max_steps > 0:
            return args.max_steps, sys.maxsize if per_epoch is None else math.ceil(args.max_steps / per_epoch)
        if per_epoch is None:
            raise ConfigError("the training data has no length, so the end of an epoch is unknown: set max_steps")
        return math.ceil(args.num_train_epochs * per_epoch), math.ceil(args.num_train_epochs)

    def schedule(self, optimizer: Any) -> Any:
        """Return the schedule as the core steps it; called once the run is prepared."""
        trainer = self._trainer
        if trainer.lr_scheduler is None or trainer.lr_scheduler is trainer.given_scheduler:
            trainer.create_scheduler(trainer.state.max_steps, trainer.optimizer)
        if follows_metric(trainer.lr_scheduler):
            return MetricSchedule(trainer.lr_scheduler)
        return trainer.lr_scheduler

    def _checkpointing(self) -> Checkpointing | None:
        args = self._trainer.args
        if args.save_strategy == "no" and not args.load_best_model_at_end:
            return None
        best = metric_key(str(args.metric_for_best_model)), "max" if args.greater_is_better else "min"
        return Checkpointing(
            self.folder,
            keep_last=sys.maxsize if args.save_total_limit is None else args.save_total_limit,
            keep_best=best if self._keeps_best else None,
            asynchronous=False,
            name="checkpoint-{update}",
            is_open=True,
            allow_changed_model=True,  # as in transformers, but the differences are printed
        )

    def begin(self) -> None:
        trainer, handler = self._trainer, self._trainer.callback_handler
        trainer.state.global_step = trainer.core.progress.update
        handler.model, handler.optimizer, handler.lr_scheduler = trainer.model, trainer.optimizer, trainer.lr_scheduler
        trainer.call_event("on_train_begin")
        if trainer.args.eval_on_start:
            trainer._evaluate(self.trial, self._ignore_keys, skip_scheduler=True)

    def on_train_epoch_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._trainer.call_event("on_epoch_begin")

    def on_train_step_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Begin an update, once, even if it is retried after running out of memory."""
        if self._begun != trainer.progress.update and run_of(trainer).losses.index == 0:
            self._begun = trainer.progress.update
            self._trainer.call_event("on_step_begin")

    def on_before_optimizer_step(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._trainer.call_event("on_pre_optimizer_step")
        rate = trainer.optimizer.param_groups[0]["lr"]
        self.learning_rate = rate.clone() if isinstance(rate, Tensor) else rate  # a schedule changes it in place

    def on_optimizer_step_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._trainer.call_event("on_optimizer_step")

    def on_update_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        state, core = self._trainer.state, self._trainer.core
        batches = core.train_loader.num_batches  # per epoch on this process, if known
        if batches is None:
            batches = state.max_steps * core.run_config.gradient_accumulation_steps
        state.global_step = core.progress.update
        state.epoch = core.progress.epoch + core.progress.batch / batches
        every = self._trainer.args.torch_empty_cache_steps
        if every is not None and state.global_step % every == 0:
            release_memory(core.device)
        self._trainer.call_event("on_step_end")
        self.take_requests()

    def on_training_run_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._trainer.call_event("on_epoch_end")
        self.take_requests()

    def on_checkpoint_saved(self, trainer: TrainerLike, path: Any = None, **kwargs: Any) -> None:
        state = self._trainer.state
        self.last_saved = trainer.progress.update
        best = None if state.best_global_step is None else self.checkpoint_path(state.best_global_step)
        if best is not None and best.is_dir():  # maybe saved before the evaluation
            state.best_model_checkpoint = self._shown(best)
        if self._trainer.args.push_to_hub:
            with hub.reporting_failures(self._trainer):
                self._trainer._push_from_checkpoint(self._shown(Path(path)))
        self._trainer.call_event("on_save")

    def take_requests(self) -> None:
        """Turn the control's flags into requests; called after every event that may set them."""
        control, core = self._trainer.control, self._trainer.core
        if control.should_log and core.progress.update > self.logged[2]:
            core.request_log()
        if control.should_evaluate:
            core.request_evaluation()
        if control.should_save:
            core.request_save(self.checkpoint_path(core.progress.update))

    def count_losses(self, entries: list[tuple[Tensor, float]], samples: int) -> None:
        """Count an update's losses and samples once its weights are in the model."""
        self._samples_seen += samples
        for loss, items in entries:
            self._losses.update(loss, items, is_ours=True)

    def take_logged(self, update: int) -> list[float]:
        """Return this process's loss and items since the last log, and record this update as logged."""
        total, count = self._losses.total_loss, self._losses.running_count
        new = [total - self.logged[0], count - self.logged[1]]
        self.logged = (total, count, update)
        return new

    def evaluate(self) -> None:
        """Evaluate during the run, and record whether this model is the best."""
        trainer, args = self._trainer, self._trainer.args
        trainer.control.should_evaluate = False
        self.counters.store()
        metrics = trainer._evaluate(self.trial, self._ignore_keys)
        self._last_evaluated = trainer.state.global_step
        logbook: Any = run_of(trainer.core).logbook
        logbook.write_logs("evaluation", stored_metrics(metrics))
        if args.metric_for_best_model is None:
            return
        value = metric_value(metrics, args.metric_for_best_model)
        trainer.core.run_history.update_metric(metric_key(args.metric_for_best_model), value)
        state = trainer.state
        best = state.best_metric
        if best is None and math.isnan(value):  # as in transformers: the first number counts as better
            state.best_metric = -math.inf if args.greater_is_better else math.inf
            return
        if best is not None and not (value > best if args.greater_is_better else value < best):
            return
        state.best_metric, state.best_global_step = value, state.global_step
        if self._keeps_best:
            path = self.checkpoint_path(state.global_step)
            state.best_model_checkpoint = self._shown(path)
            trainer.core.request_save(path)

    def checkpoint_path(self, update: int) -> Path:
        return Path(self.folder) / f"checkpoint-{update}"

    def checkpoint_files(self) -> dict[str, bytes]:
        trainer = self._trainer
        if not self._fixed_files:
            arguments = trainer.args.to_json_string().encode()
            processor = None if self.owner_saves else trainer.saved_processor()
            self._fixed_files = {"training_args.json": arguments, **pretrained_files(processor)}
        trainer.state.collect([*trainer.callback_handler.callbacks, trainer.control])
        state = trainer.state.to_json_string().encode()
        configuration = {} if self.owner_saves else configuration_files(trainer.model)
        return {**self._fixed_files, **configuration, STATE_FILE: state}

    def _shown(self, path: Path) -> str:
        """Return a checkpoint's folder with `output_dir` as the user wrote it."""
        return os.path.join(self.folder, path.name)

    def state_dict(self) -> dict[str, Any]:
        """Return transformers' state, the losses of the run, and the arguments; every process must call it."""
        owner = self._trainer
        logged = sum_over_processes(list(self.logged[:2]), owner.core.device)
        owner.state.collect([*owner.callback_handler.callbacks, owner.control])
        return {
            "state": shallow(owner.state),
            "losses": combined(gather_objects(self._losses.state_dict())),
            "logged": [*logged, self.logged[2]],
            "samples_seen": self._samples_seen,
            "objective": stored_metrics(owner.objective),
            "arguments": self._saved_arguments(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        owner = self._trainer
        current = {name: getattr(owner.state, name) for name in _OF_THIS_RUN}
        owner.state = TrainerState(**{**state["state"], **current})
        owner._load_callback_state()
        loss, items, update = state["logged"]
        self.logged = (0.0, 0.0, update)
        if owner.is_world_process_zero():  # sums over all processes: one of them continues with them
            self._losses.load_state_dict(state["losses"])
            self.logged = (loss, items, update)
        self._samples_seen, owner.objective = state["samples_seen"], state.get("objective")
        if owner.args.ignore_data_skip and owner.core.progress.stage == TRAINING:
            owner.core.progress.batch = owner.core.progress.samples = 0
        now = self._saved_arguments()
        for name, before in state["arguments"].items():
            if now.get(name) != before and name not in _PRINTED_BY_CORE and not name.startswith(_OF_HUB):
                change = Change(name, before, now.get(name))
                text = f"Changed since the checkpoint (new value used): {change}"
                owner.core.notify("resume.changes", text, change=change)

    def _saved_arguments(self) -> dict[str, Any]:
        values: dict[str, Any] = self._trainer.args.to_dict()
        return {name: values[name] for name in values if name not in _NOT_COMPARED and not name.startswith(_OF_HUB)}

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        owner, core, state = self._trainer, self._trainer.core, self._trainer.state
        seconds, rates = run_of(core).logbook.record.seconds, self.counters.store()
        total, items = sum_over_processes([self._losses.total_loss, self._losses.running_count], core.device)
        loss = total / items if items else 0.0
        metrics = {
            "train_runtime": round(seconds, 4),
            "train_samples_per_second": round(self._samples_seen / max(seconds, 1e-9), 3),
            "train_steps_per_second": round(state.global_step / max(seconds, 1e-9), 3),
            "total_flos": float(state.total_flos),
            "train_loss": loss,
            **rates,
        }
        owner.log(metrics)
        core.switch_optimizer("eval")
        if owner.args.load_best_model_at_end:
            self._trainer._load_best_model()
        if self._last_evaluated == state.global_step:
            owner.model.eval()  # as transformers leaves it after an evaluation
        self.output = TrainOutput(state.global_step, loss, metrics)
        owner.call_event("on_train_end")
        if owner.args.push_to_hub:
            world_process_zero_only(owner._finish_current_push)()

    def load_best(self) -> None:
        core, found = self._trainer.core, self._trainer.state.best_model_checkpoint
        if found is None:
            text = "No evaluation found a best model: the model keeps the weights of the last update"
            core.notify("best.missing", text)
            return
        path = Path(found)
        if not path.is_dir():  # the run's folder may have been moved since
            path = Path(self.folder) / path.name
        if not path.is_dir():
            text = f"The best checkpoint {path} is gone: the model keeps the weights of the last update"
            core.notify("best.missing", text, path=path)
            return
        self.load_weights(path)

    def load_weights(self, path: Path) -> None:
        """Load the weights of a checkpoint into the model."""
        model = self._trainer.model
        with refusing_damage(path):
            best = None if is_foreign(path) else completed(model, read(path))
            weights = {**best.model, **best.state["model_extra"]} if best else read_weights(path, model)
            load_weights(model, weights)


class Counters:
    """Counts tokens and floating-point operations here; `store` sums over all, at logs, evaluations and saves."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._tokens: Tensor | int = 0  # since the last `store`; on the batch's device, so that no update waits
        self._flops: dict[Any, int] = {}  # by model and shapes, since counting parameters takes long

    def count(self, batch: Any) -> None:
        """Count a micro-batch once its update is done."""
        trainer = self._trainer
        trainer.current_flos += trainer.floating_point_ops(batch)
        if trainer.args.include_num_input_tokens_seen != "no":
            self._tokens = self._tokens + self._num_tokens(batch)

    def store(self) -> dict[str, float]:
        """Add the counts to the trainer's state; return the tokens per second. Every process must call it."""
        trainer, state = self._trainer, self._trainer.state
        trainer.store_flos()
        if trainer.args.include_num_input_tokens_seen == "no":
            return {}
        state.num_input_tokens_seen += int(sum_over_processes([float(self._tokens)], trainer.core.device)[0])
        self._tokens = 0
        seconds = max(run_of(trainer.core).logbook.record.seconds, 1e-9)
        return {"train_tokens_per_second": round(state.num_input_tokens_seen / seconds, 3)}

    def flops_of(self, batch: Any) -> int:
        """Return the model's own estimate, or 6 per token and parameter outside embeddings; 0 if neither is known."""
        if not isinstance(batch, Mapping):
            return 0
        model, tokens = self._trainer.model, batch.get(self._trainer.main_input_name)
        key = (id(model), *((name, value.shape) for name, value in batch.items() if isinstance(value, Tensor)))
        if key not in self._flops:
            own: Any = getattr(model, "floating_point_ops", None)
            if own is None and hasattr(model, "num_parameters") and isinstance(tokens, Tensor):
                self._flops[key] = 6 * tokens.numel() * model.num_parameters(exclude_embeddings=True)
            else:
                self._flops[key] = 0 if own is None else own(batch)
        return self._flops[key]

    def _num_tokens(self, batch: Any) -> Any:
        trainer, how = self._trainer, self._trainer.args.include_num_input_tokens_seen
        tokens: Any = batch.get(trainer.main_input_name) if isinstance(batch, Mapping) else None
        if not isinstance(tokens, Tensor):
            warnings.warn(f"no tokens are counted: a batch has no {trainer.main_input_name}", stacklevel=2)
            return 0
        padding: Any = getattr(trainer.processing_class, "pad_token_id", None)
        mask: Any = batch.get("attention_mask")
        if how == "non_padding" and mask is None and padding is None:
            warnings.warn("padding is counted too: there is no attention_mask, and no pad_token_id", stacklevel=2)
        if how == "all" or (mask is None and padding is None):
            return tokens.numel()
        return tokens.ne(padding).sum() if mask is None else mask.sum()
