"""What a run of `hf.Trainer` does around the loop: how long it is, what it logs, what it saves, which model is best."""

from __future__ import annotations

import inspect
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from loopwright.checkpoint import Checkpointing, read
from loopwright.engine.sharding import load_weights
from loopwright.errors import ConfigError
from loopwright.hf.adapters import completed
from loopwright.hf.callbacks import metric_key
from loopwright.hf.files import FolderFiles, align_special_tokens
from loopwright.hf.outputs import TrainOutput, stored_metrics
from loopwright.hf.resuming import resume_source
from loopwright.hf.schedule import MetricSchedule
from loopwright.hf.state import STATE_FILE, TrainerState
from loopwright.resuming import stored_window

if TYPE_CHECKING:
    from loopwright.hf.trainer import Trainer

# Arguments that say how much to report or where; another value does not make another run.
_NOT_COMPARED = frozenset(("output_dir", "run_name", "logging_dir", "disable_tqdm", "report_to", "log_level"))

# Keys of gradient_checkpointing_kwargs that say which layers are computed again, and where their inputs are kept.
_OF_MODEL = ("every_n_layers", "offload")


class Flow:
    """One run: made by `Trainer.train`, called by the core and the bridge while it lasts.

    Attributes:
        learning_rate: of the last update.
        output: what `train` returns; None before the end.
    """

    def __init__(self, trainer: Trainer, ignore_keys: list[str] | None = None) -> None:
        self.learning_rate: Any = None
        self.output: TrainOutput | None = None
        self._trainer = trainer
        self._ignore_keys = ignore_keys
        self._files: FolderFiles | None = None
        self._last_evaluated: int | None = None
        self._passes_items = "num_items_in_batch" in inspect.signature(trainer.training_step).parameters

    # --- before -------------------------------------------------------------------------------------------------

    def start(self, resume_from_checkpoint: Any) -> None:
        """Prepare model, data, optimizer and folder, and run the core's loop."""
        trainer, args, core = self._trainer, self._trainer.args, self._trainer.core
        resume_from = resume_source(resume_from_checkpoint, args.output_dir)
        self._prepare_model()
        loader = trainer.callback_handler.train_dataloader = trainer.get_train_dataloader()
        per_epoch = core.num_updates_per_epoch(loader, self._accumulation(resume_from))
        max_steps, num_epochs = self._length(per_epoch)
        trainer.state = self._first_state(max_steps, num_epochs)
        trainer.lr_scheduler = trainer.given_scheduler
        if trainer.uses_default("create_optimizer_and_scheduler"):
            trainer.create_optimizer()
        else:
            trainer.create_optimizer_and_scheduler(max_steps)
        core.forget()
        core.model, core.optimizer = trainer.model, trainer.optimizer
        checkpoints = self._checkpointing()
        if checkpoints is None and resume_from == "auto":
            resume_from = args.output_dir
        core.train(
            trainer.train_dataset,
            num_epochs=num_epochs,
            per_device_batch_size=args.train_batch_size,
            # Where whole epochs are trained there is no limit to reach, and none to tell of.
            max_num_train_steps=None if per_epoch is not None and max_steps == num_epochs * per_epoch else max_steps,
            gradient_accumulation_steps=args.gradient_accumulation_steps,
            gradient_clip_norm=args.max_grad_norm if args.max_grad_norm > 0 else math.inf,
            create_scheduler_fn=self.schedule,
            resume_from=resume_from,
            seed=args.seed,
            mixed_precision=args.mixed_precision,
            step_mode="compile" if args.torch_compile else args.step_mode,
            checkpoints=checkpoints,
            log_every=sys.maxsize,
            nan=args.nan,
            bad_samples=args.bad_samples,
            reduction=args.reduction,
            oom="split" if args.auto_find_batch_size else "stop",
        )

    def _accumulation(self, resume_from: str | None) -> int:
        """Return the micro-batches of an update on each process: of a run that goes on as when it began."""
        args, num_processes = self._trainer.args, self._trainer.core.num_processes
        folder = args.output_dir if resume_from == "auto" else resume_from
        window = None if folder is None else stored_window(folder)
        given: int = args.gradient_accumulation_steps
        return given if window is None or window % num_processes else window // num_processes

    def _prepare_model(self) -> None:
        trainer, model = self._trainer, self._trainer.model
        if trainer.args.tf32 is not None:
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = trainer.args.tf32
        if trainer.args.gradient_checkpointing:
            if not callable(getattr(model, "gradient_checkpointing_enable", None)):
                raise ConfigError(
                    f"gradient_checkpointing=True needs a model with gradient_checkpointing_enable(), which "
                    f"{type(model).__name__} has not. Use torch.utils.checkpoint in its forward instead."
                )
            given: dict[str, Any] = dict(trainer.args.gradient_checkpointing_kwargs or {})  # type: ignore[arg-type] # settled
            # What the model itself is told; the rest is for torch's checkpoint function.
            options = {name: given.pop(name) for name in _OF_MODEL if name in given}
            model.gradient_checkpointing_enable(
                **({"gradient_checkpointing_kwargs": given} if given else {}), **options
            )
        if trainer.processing_class is not None:
            align_special_tokens(model, trainer.processing_class)

    def _length(self, per_epoch: int | None) -> tuple[int, int]:
        """Return the updates and the epochs of the run."""
        args = self._trainer.args
        if per_epoch == 0:
            raise ConfigError(
                "there is nothing to train on: the training loader has no batch. The dataset is empty, or smaller than "
                "a batch with dataloader_drop_last=True."
            )
        if args.max_steps > 0:
            return args.max_steps, sys.maxsize if per_epoch is None else math.ceil(args.max_steps / per_epoch)
        if per_epoch is None:
            raise ConfigError("the training data has no length, so the end of an epoch is not known: set max_steps")
        return math.ceil(args.num_train_epochs * per_epoch), math.ceil(args.num_train_epochs)

    def _first_state(self, max_steps: int, num_epochs: int) -> TrainerState:
        trainer = self._trainer
        state = TrainerState(
            max_steps=max_steps,
            num_train_epochs=num_epochs,
            train_batch_size=trainer.args.train_batch_size,
            is_local_process_zero=trainer.is_local_process_zero(),
            is_world_process_zero=trainer.is_world_process_zero(),
        )
        state.compute_steps(trainer.args, max_steps)
        return state

    def schedule(self, optimizer: Any) -> Any:
        """Return the schedule as the core steps it; called by the core once the run is prepared."""
        trainer = self._trainer
        if trainer.lr_scheduler is None or trainer.lr_scheduler is trainer.given_scheduler:
            trainer.create_scheduler(trainer.state.max_steps, trainer.optimizer)
        if isinstance(trainer.lr_scheduler, ReduceLROnPlateau):
            return MetricSchedule(trainer.lr_scheduler)
        return trainer.lr_scheduler

    def _checkpointing(self) -> Checkpointing | None:
        args = self._trainer.args
        if args.save_strategy == "no" and not args.load_best_model_at_end:
            return None
        best = None
        if self._keeps_best():
            best = (metric_key(str(args.metric_for_best_model)), "max" if args.greater_is_better else "min")
        return Checkpointing(
            args.output_dir,
            keep_last=sys.maxsize if args.save_total_limit is None else args.save_total_limit,
            keep_best=best,
            asynchronous=False,
            name="checkpoint-{update}",
            is_open=True,
        )

    def _keeps_best(self) -> bool:
        args = self._trainer.args
        return bool(args.load_best_model_at_end or args.save_strategy == "best")

    # --- while it lasts -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin the run, or go on with it; called by the core when everything is prepared and restored."""
        trainer = self._trainer
        trainer.state.global_step = trainer.core.progress.update
        handler = trainer.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = trainer.model, trainer.optimizer, trainer.lr_scheduler
        trainer.call_event("on_train_begin")
        if trainer.args.eval_on_start:
            trainer.evaluate(ignore_keys=self._ignore_keys)

    def training_step(self, model: Any, batch: Any, items: Tensor) -> Any:
        """Call the trainer's `training_step` with the arguments that it takes."""
        if self._passes_items:
            return self._trainer.training_step(model, batch, items)
        return self._trainer.training_step(model, batch)

    def count_update(self) -> None:
        """Count an update in HF's state."""
        state, core = self._trainer.state, self._trainer.core
        batches = core.num_batches_per_epoch()
        if batches is None:
            batches = state.max_steps * core.run_config.gradient_accumulation_steps
        state.global_step = core.progress.update
        state.epoch = core.progress.epoch + core.progress.batch / batches

    def log_update(self, loss: float) -> dict[str, Any]:
        """Log the mean loss since the last log, and return what was logged."""
        core = self._trainer.core
        logs: dict[str, Any] = {"loss": loss}
        if core.gradient_norm is not None:
            logs["grad_norm"] = float(core.gradient_norm)
        logs["learning_rate"] = float(self.learning_rate)
        self._trainer.log(logs)
        return logs

    def evaluate(self) -> None:
        """Evaluate during the run: step a schedule that goes by a metric, and note whether this is the best model."""
        trainer, args = self._trainer, self._trainer.args
        trainer.control.should_evaluate = False
        metrics = trainer.evaluate(ignore_keys=self._ignore_keys) or {}  # people's own may return nothing
        self._last_evaluated = trainer.state.global_step
        trainer.core.record("evaluation", stored_metrics(metrics))
        if isinstance(trainer.lr_scheduler, ReduceLROnPlateau):
            trainer.lr_scheduler.step(self._metric(metrics, args.metric_for_best_model or "loss"))
        if args.metric_for_best_model is None:
            return
        value = self._metric(metrics, args.metric_for_best_model)
        trainer.core.run_history.update_metric(metric_key(args.metric_for_best_model), value)
        state = trainer.state
        best = state.best_metric
        if best is None and math.isnan(value):  # as in transformers: the first that is a number will be better
            state.best_metric = -math.inf if args.greater_is_better else math.inf
            return
        if best is not None and not (value > best if args.greater_is_better else value < best):
            return
        state.best_metric, state.best_global_step = value, state.global_step
        if self._keeps_best():
            path = self.checkpoint_path(state.global_step)
            state.best_model_checkpoint = self._told(path)
            trainer.core.request_save(path)

    @staticmethod
    def _metric(metrics: dict[str, Any], name: str) -> float:
        found = metrics.get(metric_key(name))
        if found is None:
            raise ConfigError(
                f"metric_for_best_model is {name!r}, but the evaluation has no {metric_key(name)}. It has "
                f"{', '.join(metrics)}: choose one of these, or return it from compute_metrics."
            )
        return float(found)

    # --- saving -------------------------------------------------------------------------------------------------

    def checkpoint_path(self, update: int) -> Path:
        """Return the folder of the checkpoint after an update."""
        return Path(self._trainer.args.output_dir) / f"checkpoint-{update}"

    def checkpoint_files(self) -> dict[str, bytes]:
        """Return what lies in a checkpoint beside the core's files; called by the core for every checkpoint."""
        trainer = self._trainer
        if self._files is None:
            self._files = FolderFiles(trainer.model, trainer.saved_processor(), trainer.args)
        trainer.state.collect([*trainer.callback_handler.callbacks, trainer.control])
        return {**self._files.current(), STATE_FILE: trainer.state.to_json_string().encode()}

    def note_checkpoint(self, path: Path) -> None:
        """Take note of a checkpoint that was written, which may be that of the best model so far."""
        state = self._trainer.state
        if state.best_global_step == state.global_step:
            state.best_model_checkpoint = self._told(path)

    def _told(self, path: Path) -> str:
        """Return a checkpoint's folder as people compare it: `output_dir` as they wrote it, and its name."""
        return os.path.join(self._trainer.args.output_dir, path.name)

    def saved_arguments(self) -> dict[str, Any]:
        """Return the arguments that decide a run's result, as its checkpoints keep them."""
        values: dict[str, Any] = self._trainer.args.to_dict()
        return {name: value for name, value in values.items() if name not in _NOT_COMPARED}

    # --- the end ------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Report the run, load the best model, and tell the callbacks; also of a run that was stopped."""
        trainer, core, state = self._trainer, self._trainer.core, self._trainer.state
        seconds, loss = core.seconds, core.mean_loss()
        metrics = {
            "train_runtime": round(seconds, 4),
            "train_samples_per_second": round(core.samples_seen / max(seconds, 1e-9), 3),
            "train_steps_per_second": round(state.global_step / max(seconds, 1e-9), 3),
            "train_loss": loss,
        }
        trainer.log(metrics)
        core.switch_optimizer("eval")
        if trainer.args.load_best_model_at_end:
            self._load_best(state.best_model_checkpoint)
        if self._last_evaluated == state.global_step:
            trainer.model.eval()  # as an evaluation by transformers leaves it
        self.output = TrainOutput(state.global_step, loss, metrics)
        trainer.call_event("on_train_end")

    def _load_best(self, found: str | None) -> None:
        if found is None:
            self._trainer.core.print("No evaluation found a best model: the model keeps the weights of the last update")
            return
        path = Path(found)
        if not path.is_dir():  # the folder of the run may have been moved since
            path = Path(self._trainer.args.output_dir) / path.name
        if not path.is_dir():
            self._trainer.core.print(
                f"The best checkpoint {path} is gone: the model keeps the weights of the last update"
            )
            return
        best = completed(self._trainer.model, read(path))
        load_weights(self._trainer.model, {**best.model, **best.state["model_extra"]})
