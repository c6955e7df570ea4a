"""Preparing a run: the arguments checked, an engine, the model, the optimizer and the loaders made ready for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from loopwright.data.defaults import without_preparation
from loopwright.engine import Engine, forget_precision
from loopwright.errors import ConfigError
from loopwright.hooks import TrainerHooks
from loopwright.settings import RunSettings, check_dataset, check_is_idle, is_overridden
from loopwright.stepping.graphs import check_graphs, has_graphs
from loopwright.training.run import TrainingRun, run_of

if TYPE_CHECKING:
    from loopwright.trainer import Trainer


def check_data(
    trainer: Trainer, part: str, dataset: Any, kwargs: Any, batch_size: int, collate_fn: Any, name: str
) -> None:
    """Check a dataset and its loader's arguments, unless the hook that creates the loader is overridden."""
    if is_overridden(trainer, TrainerHooks, f"create_{part}_dataloader"):
        return
    check_dataset(dataset, name, kwargs or {}, batch_size)
    if isinstance(dataset, DataLoader):
        is_set = batch_size not in (RunSettings.per_device_batch_size, dataset.batch_size)
        names = "per_device_batch_size", name.replace("dataset", "dataloader_kwargs"), "collate_fn"
        if ignored := [each for each, given in zip(names, (is_set, kwargs, collate_fn), strict=True) if given]:
            text = f"{name} is a ready DataLoader, which does not use {', '.join(ignored)}. Set them in the DataLoader."
            trainer.notify("loader.ready", text, ignored=ignored)


def check_step_mode(trainer: Trainer, step_mode: str) -> None:
    """Raise a ConfigError for graphs where there are none; called before anything is changed."""
    if not has_graphs(trainer):
        check_graphs(step_mode, trainer.device)


def prepare(run: TrainingRun) -> None:
    """Prepare everything; the loaders are ours afterwards, even if an overridden hook prepared them."""
    trainer, given, before = run.trainer, (run.train_loader, run.eval_loader), run.engine
    forget_precision()
    trainer._prepare_model_optimizer_and_dataloaders()
    if run.engine.accelerator is not run.accelerator:  # an override has made its own
        run.engine = Engine(run.accelerator, run.settings.reduction)
    elif run.engine is before:  # an override has prepared nothing
        run.start_engine()
    engine = run.engine
    engine.follow(trainer.model, trainer.optimizer)
    run.train_loader = without_preparation(run.train_loader, given[0])
    run.eval_loader = without_preparation(run.eval_loader, given[1])
    run.losses.follow(engine)
    run.adopt_loaders()
    if run.train_loader is not None:
        run.train_loader.limit = trainer.callback_handler.batch_limit(trainer, training=True)
        if engine.device.type == "cuda" and not engine.is_distributed and torch.cuda.device_count() > 1:
            num_devices = torch.cuda.device_count()
            trainer.notify("devices.unused", unused_devices(num_devices), num_devices=num_devices)
    if run.eval_loader is not None:
        run.eval_loader.limit = trainer.callback_handler.batch_limit(trainer, training=False)
    if isinstance(trainer.loss_func, torch.nn.Module):
        trainer.loss_func.to(engine.device)  # before a resume gives the optimizer state for its parameters


def start_evaluation(
    trainer: Trainer,
    dataset: Any,
    batch_size: int,
    kwargs: dict[str, Any] | None,
    collate_fn: Any,
    may_be_empty: bool = False,
) -> TrainingRun:
    """Prepare the run of an evaluation or a prediction, and install it; `run.close()` has to follow.

    Without a dataset it takes the evaluation dataset of the last call, and its collate function unless one is given.
    """
    training = run_of(trainer)
    check_is_idle(training.is_running)
    if dataset is None:
        dataset, collate_fn = trainer.eval_dataset, collate_fn or trainer.collate_fn
    if dataset is None:
        raise ConfigError("there is nothing to evaluate: pass a dataset (no earlier call had one either)")
    if not may_be_empty:
        check_data(trainer, "eval", dataset, kwargs, batch_size, collate_fn, "dataset")
    settings = RunSettings(per_device_batch_size=batch_size, mixed_precision=training.settings.mixed_precision)
    run = TrainingRun(trainer, settings, previous=training)
    run.install(training)
    trainer.eval_dataset, trainer.collate_fn = dataset, collate_fn
    try:
        run.eval_loader = trainer.create_eval_dataloader(batch_size=batch_size, eval_dl_kwargs=kwargs)
        prepare(run)
        trainer.run_config = trainer._create_run_config(batch_size, 1, 1, 1, None)
    except BaseException:
        run.close()
        raise
    return run


def unused_devices(num_devices: int) -> str:
    """Return the message of a run that uses one of several GPUs: how to train on all of them."""
    return (
        f"Training on 1 of {num_devices} GPUs. All of them: lw launch -n {num_devices} -- train ..., "
        f"or torchrun --nproc-per-node {num_devices} with a script"
    )
