"""Toys that many tests share: small data, nets and trainers, callbacks made of functions, and comparisons.

trainer = trained([stop_at(3)], data(16), num_epochs=2, checkpoints=saving(tmp_path))
assert trainer.result.updates == 3 and trainer.seen[0] == [5, 0, 9, 2]
"""

import ast
import dataclasses
import io
import math
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from loopwright import Checkpointing, Trainer
from loopwright.callbacks import StopTrainingError, TrainerCallback
from loopwright.run_folder import read_metrics

NO_WORKERS = {"num_workers": 0}


def data(num_samples: int = 16) -> TensorDataset:
    """Samples (x, y, id) of a noisy linear function of 4 features: the id tells which samples a batch holds."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_samples, 4, generator=generator)
    y = x.sum(dim=1, keepdim=True) + 0.1 * torch.randn(num_samples, 1, generator=generator)
    return TensorDataset(x, y, torch.arange(num_samples))


def pairs(num_samples: int = 8) -> TensorDataset:
    x = torch.randn(num_samples, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(dim=1, keepdim=True))


class Augmented(Dataset):
    """The samples of `data` that are never the same twice: noise from the generators of python, numpy and torch."""

    def __init__(self, num_samples: int = 16) -> None:
        self.samples = data(num_samples)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x, y, sample_id = self.samples[index]
        return x + 0.1 * (random.random() + float(np.random.rand()) + torch.rand(4)), y, sample_id


def labelled(num_samples: int, features: int = 4, classes: int = 3, seed: int = 0, **kwargs: Any) -> TensorDataset:
    """Samples (x, class); `kwargs` go to `torch.randn`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, features, generator=generator, **kwargs)
    return TensorDataset(x, torch.randint(classes, (num_samples,), generator=generator))


class Stream(IterableDataset):
    """Samples one after the other, without a length."""

    def __init__(self, samples: Iterable[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


def seeded(make: Callable[..., Any], *args: Any, seed: int = 0, **kwargs: Any) -> Any:
    """Call with torch seeded, and leave torch's generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make(*args, **kwargs)


def network(width: int = 0, dropout: float = 0.0) -> nn.Module:
    """The same weights every time: a linear model, or one hidden layer of that width with dropout."""
    if not width:
        return seeded(nn.Linear, 4, 1)
    return seeded(lambda: nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, 1)))


def net(forward: Callable[..., Any] | None = None, **parts: Any) -> nn.Module:
    """A module of named parts: net(lambda self, x: self.head(x).mean(1), head=nn.Linear(4, 3))."""
    module = type("Net", (nn.Module,), {"forward": forward or nn.Module.forward})()
    for name, part in parts.items():
        setattr(module, name, part)
    return module


class NanFrom(nn.Module):
    """A mean squared error that is nan from its n-th call on (counted from 1)."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.calls_left = call

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls_left -= 1
        loss = nn.functional.mse_loss(outputs, targets)
        return loss * torch.nan if self.calls_left <= 0 else loss


class WatchedLinear(nn.Linear):
    def forward(self, x: Any) -> Any:
        output = super().forward(x)
        self.dtype = output.dtype
        return output


class Pads:
    pad_token_id = 0
    model_input_names = ("input_ids", "attention_mask")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def weights(of: Any) -> torch.Tensor:
    """A copy of all weights of a model, or of a trainer's model, in one row."""
    return row(parameter.detach() for parameter in getattr(of, "model", of).parameters())


def row(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1).cpu() for tensor in tensors]).clone()


def state_of(of: Any) -> dict[str, torch.Tensor]:
    """A copy of the weights and buffers of a model, or of a trainer's model, by name."""
    return {name: tensor.clone() for name, tensor in getattr(of, "model", of).state_dict().items()}


def assert_same_weights(found: Any, expected: Any) -> None:
    """Two models, or the models of two trainers, have the same bits in weights and buffers."""
    assert_same(state_of(found), state_of(expected))


def assert_resumed(resumed: Any, whole: Any, micro_batches: int) -> None:
    """A recording trainer went on after so many micro-batches of the whole run, and ended as that did."""
    assert resumed.seen == whole.seen[micro_batches:]
    assert_same_weights(resumed, whole)
    assert resumed.run_history.latest() == whole.run_history.latest()


def assert_same(found: Any, expected: Any, path: str = "") -> None:
    """Equal bit by bit and type by type, also inside of dicts, lists and tuples."""
    assert type(found) is type(expected), path
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and torch.equal(found, expected), path
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype and np.array_equal(found, expected), path
    elif isinstance(expected, dict):
        assert list(found) == list(expected), path
        for name in expected:
            assert_same(found[name], expected[name], f"{path}.{name}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), path
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{path}.{index}")
    else:
        assert found == expected, path


def plain(value: Any) -> Any:
    """The same structure without tensors, so that == compares it to the last bit."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [plain(item) for item in value]
    if dataclasses.is_dataclass(value):
        return type(value).__name__, plain(vars(value))
    return value


def two_groups(first_lr: float = 0.01, second_lr: float = 0.002, **options: Any) -> torch.optim.Optimizer:
    first, second = nn.Linear(2, 1).parameters()
    return torch.optim.SGD([{"params": [first]}, {"params": [second], "lr": second_lr}], lr=first_lr, **options)


def lrs(of: Any) -> list[float]:
    """The learning rates of the groups of an optimizer, or of a scheduler's or trainer's optimizer."""
    return [group["lr"] for group in getattr(of, "optimizer", of).param_groups]


def stepped(scheduler: Any, num_steps: int) -> list[list[float]]:
    """Step a scheduler; return the learning rates after each step."""
    return [scheduler.step() or lrs(scheduler) for _ in range(num_steps)]


def callback(base: type = TrainerCallback, **events: Callable[..., Any]) -> Any:
    """A callback made of functions: callback(on_update_end=lambda trainer, **kwargs: ...)."""
    return type("Functions", (base,), {name: staticmethod(function) for name, function in events.items()})()


def watch(**events: Callable[..., Any]) -> Any:
    """A callback that keeps in its list `seen` what the functions return at their events."""

    def kept(function: Callable[..., Any]) -> Callable[..., None]:
        return lambda trainer, **kwargs: watching.seen.append(function(trainer, **kwargs))

    watching = callback(**{name: kept(function) for name, function in events.items()})
    watching.seen = []
    return watching


def at_update(update: int | None, act: Callable[[Any], Any]) -> TrainerCallback:
    """A callback that calls a function of the trainer at the end of an update."""
    return callback(on_update_end=lambda trainer, **kwargs: trainer.progress.update == update and act(trainer))


def stop_at(update: int | None, reason: str = "enough") -> TrainerCallback:
    return at_update(update, lambda trainer: trainer.request_stop(reason))


def save_at_updates(folder: Path) -> TrainerCallback:
    return callback(
        on_update_end=lambda trainer, **kwargs: trainer.request_save(folder / f"update_{trainer.progress.update}")
    )


def raising(event: str, error: BaseException | None = None) -> TrainerCallback:
    """A callback that raises at an event, by default what stops the run there."""

    def act(trainer: Any, **kwargs: Any) -> None:
        raise StopTrainingError("enough") if error is None else error

    return callback(**{event: act})


class Recording:
    """Writes down what the loop of a trainer does; a base before the trainer's own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seen: list[list[int]] = []  # per micro-batch: the ids of its samples
        self.epochs: list[int] = []  # per micro-batch: the history's epoch
        self.weights_before: list[torch.Tensor] = []  # per micro-batch: the weights it met
        self.gradients: list[torch.Tensor] = []  # per update: the gradients the optimizer got
        self.lrs: list[float] = []  # per update: the learning rate it used
        super().__init__(*args, **kwargs)

    def calculate_train_batch_loss(self, batch):
        self.seen.append(batch[2].tolist())
        self.epochs.append(self.run_history.current_epoch)
        self.weights_before.append(weights(self))
        return super().calculate_train_batch_loss(batch)

    def optimizer_step(self):
        self.gradients.append(row(parameter.grad for parameter in self.model.parameters()))
        self.lrs.append(self.optimizer.param_groups[0]["lr"])
        super().optimizer_step()


class RecordingTrainer(Recording, Trainer):
    """The Trainer, writing down what its loop does."""


class PoisonedOnOne(Trainer):
    """The loss of one update is nan on the second of several processes alone."""

    poisoned_update = 2

    def calculate_train_batch_loss(self, batch):
        output = super().calculate_train_batch_loss(batch)
        is_bad = self.progress.update + 1 == self.poisoned_update and os.environ["RANK"] == "1"
        return {**output, "loss": output["loss"] * math.nan} if is_bad else output


def trainer_of(
    callbacks: Any = (), model: Any = None, lr: float = 0.05, momentum: float = 0.9, cls: Any = None, **kwargs: Any
) -> Any:
    """A trainer of a small model with SGD and a squared error; a recording one unless `cls` says otherwise."""
    model = network() if model is None else model
    loss_func = kwargs.pop("loss_func", nn.MSELoss())
    optimizer = kwargs.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    return (cls or RecordingTrainer)(model, loss_func, optimizer, callbacks=callbacks, **kwargs)


def fit(trainer: Any, dataset: Any, num_epochs: int = 1, torch_seed: int | None = 7, **kwargs: Any) -> Any:
    """Train with micro-batches of 4, loaded in this process; return what `train` returns."""
    if torch_seed is not None:
        torch.manual_seed(torch_seed)
    kwargs.setdefault("per_device_batch_size", 4)
    for loader in ("train_dataloader_kwargs", "eval_dataloader_kwargs"):
        kwargs[loader] = {**NO_WORKERS, **kwargs.get(loader, {})}
    return trainer.train(dataset, num_epochs, **kwargs)


def trained(callbacks: Any = (), dataset: Any = None, num_epochs: int = 1, **kwargs: Any) -> Any:
    """Make a trainer as `trainer_of` does and train it as `fit` does; what `train` returned is `trainer.result`."""
    names = ("model", "lr", "momentum", "cls", "loss_func", "optimizer", "run_history")
    trainer = trainer_of(callbacks, **{name: kwargs.pop(name) for name in names if name in kwargs})
    trainer.result = fit(trainer, data() if dataset is None else dataset, num_epochs, **kwargs)
    return trainer


def saving(folder: Path, **policy: Any) -> Checkpointing:
    """Checkpoints after every update, all of which are kept; `policy` wins."""
    return Checkpointing(folder, **{"every_updates": 1, "keep_last": 99, "keep_best": None, **policy})


def step(folder: Path, update: int) -> Path:
    return folder / f"step-{update:010d}"


def at_once(*functions: Callable[[], Any]) -> None:
    """Call each function in a thread of its own, and wait for all of them."""
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of each file below a folder, by its path in it."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def records(folder: Path, *events: str) -> list[dict[str, Any]]:
    """The records of metrics.jsonl, or those of some events."""
    return [record for record in read_metrics(folder / "metrics.jsonl") if not events or record["event"] in events]


def numbers(folder: Path, *events: str) -> list[dict[str, Any]]:
    """What a record says of the training, without clock times; by default without starts, saves and ends too."""
    found = records(folder, *(events or ("log", "training", "evaluation", "epoch", "skipped_update")))
    return [{name: value for name, value in one.items() if name not in ("time", "seconds")} for one in found]


def imported_by(files: Iterable[Path]) -> set[str]:
    """The packages that these sources import at their top level or inside of functions, less Python's own."""
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names)


def python(*arguments: Any, timeout: float = 100, cwd: Path | None = None, **environment: str) -> Any:
    """Run Python in a process of its own that can import what this one can; return what `subprocess.run` does."""
    path = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=timeout)
