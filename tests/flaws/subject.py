"""The package under test, and the small things the flaw tests train.

`LOOPWRIGHT_FLAWS_SUBJECT` names the package (default: loopwright). Its modules and names are looked up on
first use, so a package that lacks one fails only the tests that need it:

    subject.Trainer, subject.callbacks.EarlyStoppingCallback, subject.module("tracking").LossTracker
"""

from __future__ import annotations

import functools
import importlib
import os

import torch
from torch import nn
from torch.utils.data import TensorDataset

from distributed.launcher import launch  # noqa: F401 - for all tests that start processes

PACKAGE = os.environ.get("LOOPWRIGHT_FLAWS_SUBJECT", "loopwright")
MODULES = ("trainer", "callbacks", "tracking", "run_config", "schedulers", "finetuning", "utils", "errors")

torch.set_num_threads(1)  # the thread count changes the last bits of a sum


def module(name: str = ""):
    """The package's module of that name; the package itself without one."""
    return importlib.import_module(f"{PACKAGE}.{name}" if name else PACKAGE)


def __getattr__(name: str):
    if name.startswith("_"):
        raise AttributeError(name)
    return module(name) if name in MODULES else getattr(module(), name)


# What is trained


def data(num_samples: int = 16) -> TensorDataset:
    """Samples (x, y, id) of a noisy linear function: the id tells which samples a batch holds."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_samples, 4, generator=generator)
    y = x.sum(dim=1, keepdim=True) + 0.1 * torch.randn(num_samples, 1, generator=generator)
    return TensorDataset(x, y, torch.arange(num_samples))


def network(width: int = 0, dropout: float = 0.0) -> nn.Module:
    """The same weights every time: a linear model, or one hidden layer of that width with dropout."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if not width:
            return nn.Linear(4, 1)
        return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, 1))


def weights(trainer) -> torch.Tensor:
    """A copy of all weights of a trainer's model, in one row."""
    return _row(parameter.detach() for parameter in trainer.model.parameters())


def _row(tensors) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1).cpu() for tensor in tensors]).clone()


# Trainers and callbacks


def callback(**events):
    """A callback made of functions: callback(on_train_step_start=lambda trainer, **kwargs: ...)."""
    functions = {name: staticmethod(function) for name, function in events.items()}
    return type("Functions", (module("callbacks").TrainerCallback,), functions)()


def stop_at(event: str, reason: str = "enough"):
    """A callback that ends the run at an event."""

    def stop(trainer, **kwargs):
        raise module("callbacks").StopTrainingError(reason)

    return callback(**{event: stop})


@functools.cache
def recording_trainer_class():
    """The package's Trainer, writing down what its loop does."""

    class RecordingTrainer(module("trainer").Trainer):
        def __init__(self, *args, **kwargs):
            self.seen = []  # per micro-batch: the ids of its samples
            self.epochs = []  # per micro-batch: the history's epoch
            self.weights_before = []  # per micro-batch: the weights it met
            self.gradients = []  # per update: the gradients the optimizer got
            self.lrs = []  # per update: the learning rate it used
            super().__init__(*args, **kwargs)

        def calculate_train_batch_loss(self, batch):
            self.seen.append(batch[2].tolist())
            self.epochs.append(self.run_history.current_epoch)
            self.weights_before.append(weights(self))
            return super().calculate_train_batch_loss(batch)

        def optimizer_step(self):
            self.gradients.append(_row(parameter.grad for parameter in self.model.parameters()))
            self.lrs.append(self.optimizer.param_groups[0]["lr"])
            super().optimizer_step()

    return RecordingTrainer


def trainer(callbacks=(), model=None, lr: float = 0.05, momentum: float = 0.9, cls=None, **kwargs):
    """A trainer of a small model with SGD; a recording one unless `cls` says otherwise."""
    model = network() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    return (cls or recording_trainer_class())(model, nn.MSELoss(), optimizer, callbacks=callbacks, **kwargs)


def fit(trainer, dataset, num_epochs: int = 1, torch_seed: int | None = 7, **kwargs):
    """Train with micro-batches of 4, loaded in this process; return what `train` returns."""
    if torch_seed is not None:
        torch.manual_seed(torch_seed)
    kwargs.setdefault("per_device_batch_size", 4)
    for loader in ("train_dataloader_kwargs", "eval_dataloader_kwargs"):
        kwargs[loader] = {"num_workers": 0, **kwargs.get(loader, {})}
    return trainer.train(dataset, num_epochs, **kwargs)
