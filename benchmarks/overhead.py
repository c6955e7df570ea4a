"""What a training library adds to each update of the same hand-written loop, and what importing it costs.

Every side trains the same tiny MLP on the same Python dataset with the same AdamW: batch 32, CPU, one torch
thread, no loader workers, no evaluation, nothing saved. So small a model lets the library's own work show.

A figure: a fresh process trains three times with new models: a warm-up, a short run and a long run. The time
per update is (long - short) / (updates more in long), so what a run costs once cancels out. Sides take turns
(A B C, A B C, ...), so that a slow minute hits all of them; the table shows medians over the rounds.
"""

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate

THIS_FILE = Path(__file__).resolve()
SOURCE = THIS_FILE.parents[1] / "src"
BATCH_SIZE, POOL = 32, 1024
WARM_UP_UPDATES = 200  # also the length of the short run
LOG_EVERY = 50  # updates; loopwright's default, given to every library that has such an option
RATIO_LIMIT = 1.10  # --check: loopwright's time per update over the hand-written loop's
IMPORT_LIMIT = 0.3  # --check: seconds that importing loopwright may take, after torch
RESULT = "result.txt"  # a child leaves its figure there: its output belongs to the library
NOISE_LIMIT = 1.05  # --check: a side's median over its minimum; beyond it a ratio would be luck
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


# ------------------------------------------------------------------ the work, the same for every side


class TinyDataset(Dataset):
    """Map-style data in memory: `updates` batches of (features, class), repeating a small pool."""

    def __init__(self, updates: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.size = updates * BATCH_SIZE
        self.features = torch.randn(POOL, 32, generator=generator)
        self.classes = torch.randint(4, (POOL,), generator=generator)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.features[index % POOL], self.classes[index % POOL]


def make_parts(updates: int) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, TinyDataset]:
    """Model, loss function, optimizer and data of one run."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, nn.CrossEntropyLoss(), optimizer, TinyDataset(updates)


def make_loader(dataset: TinyDataset) -> DataLoader:
    """The loader of the sides that are given one; the others build the same from their options."""
    return DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True, num_workers=0)


# ------------------------------------------------------------------ the sides

Prepared = tuple[Callable[[], Any], torch.optim.Optimizer]  # trains for one epoch; the optimizer it steps


def prepare_hand(updates: int) -> Prepared:
    """The loop of every PyTorch tutorial, with nothing logged or shown."""
    model, loss_function, optimizer, dataset = make_parts(updates)

    def train() -> None:
        model.train()
        for features, classes in make_loader(dataset):
            loss = loss_function(model(features), classes)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return train, optimizer


def prepare_accelerate(updates: int) -> Prepared:
    """The hand-written loop with an Accelerator, as accelerate's documentation shows it."""
    from accelerate import Accelerator

    model, loss_function, inner_optimizer, dataset = make_parts(updates)
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(model, inner_optimizer, make_loader(dataset))

    def train() -> None:
        model.train()
        for features, classes in loader:
            loss = loss_function(model(features), classes)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    return train, inner_optimizer


def prepare_trainer(package: str, updates: int) -> Prepared:
    """The Trainer of loopwright or pytorch-accelerated with its default callbacks: the same call for both."""
    model, loss_function, optimizer, dataset = make_parts(updates)
    trainer = importlib.import_module(package).Trainer(model, loss_function, optimizer)
    options = {"per_device_batch_size": BATCH_SIZE, "train_dataloader_kwargs": {"num_workers": 0}}
    return lambda: trainer.train(dataset, num_epochs=1, **options), optimizer


class ModelWithLoss(nn.Module):
    """What transformers expects of a model: named inputs, a dict with the loss."""

    def __init__(self, model: nn.Module, loss_function: nn.Module) -> None:
        super().__init__()
        self.model, self.loss_function = model, loss_function

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.model(features)
        return {"loss": self.loss_function(logits, labels), "logits": logits}


def prepare_transformers(updates: int) -> Prepared:
    """transformers.Trainer, with batches as the dicts it wants."""
    from transformers import Trainer, TrainingArguments

    def collate(samples: list) -> dict[str, torch.Tensor]:
        features, labels = default_collate(samples)
        return {"features": features, "labels": labels}

    model, loss_function, optimizer, dataset = make_parts(updates)
    quiet = {"save_strategy": "no", "report_to": "none", "logging_steps": LOG_EVERY, "max_grad_norm": 0.0}
    data = {"per_device_train_batch_size": BATCH_SIZE, "dataloader_num_workers": 0}
    arguments = TrainingArguments("transformers_output", num_train_epochs=1, use_cpu=True, **data, **quiet)
    parts = {"data_collator": collate, "train_dataset": dataset, "optimizers": (optimizer, None)}
    return Trainer(ModelWithLoss(model, loss_function), arguments, **parts).train, optimizer


def prepare_lightning(updates: int) -> Prepared:
    """Lightning's Trainer."""
    import pytorch_lightning as lightning

    model, loss_function, optimizer, dataset = make_parts(updates)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            features, classes = batch
            return loss_function(self.model(features), classes)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

    options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(max_epochs=1, log_every_n_steps=LOG_EVERY, **options)
    return lambda: trainer.fit(Module(), make_loader(dataset)), optimizer


class Side(NamedTuple):
    """One row of the table: its name there, the package it measures, how it prepares a run."""

    title: str
    package: str
    prepare: Callable[[int], Prepared]


SIDES = {
    "hand": Side("hand-written loop", "torch", prepare_hand),
    "loopwright": Side("loopwright.Trainer", "loopwright", partial(prepare_trainer, "loopwright")),
    "accelerate": Side("hand-written + Accelerator", "accelerate", prepare_accelerate),
    "pytorch-accelerated": Side(
        "pytorch-accelerated", "pytorch_accelerated", partial(prepare_trainer, "pytorch_accelerated")
    ),
    "transformers": Side("transformers.Trainer", "transformers", prepare_transformers),
    "lightning": Side("Lightning", "pytorch_lightning", prepare_lightning),
}

NOTES = """\
Same on all sides: model (32-64-64-4 MLP), AdamW, dataset class, shuffling, batch 32, 0 workers, 1 thread,
CPU, number of updates (checked against the optimizer's own count); no evaluation, clipping or files; output
does not reach a terminal. Other defaults are kept: the four libraries with a Trainer draw progress bars;
loopwright and transformers log the loss every 50 updates, pytorch-accelerated once per epoch, the Lightning
module nothing; transformers steps its linear schedule. Switched off by documented options: transformers
`save_strategy="no"`, `report_to="none"`, `max_grad_norm=0`; Lightning `logger=False`,
`enable_checkpointing=False`. The two hand-written loops show and log nothing."""


# ------------------------------------------------------------------ measuring


def measure_here(side: Side, updates: int, clock: Callable[[], float]) -> float:
    """Seconds per update of a side in this process: warm-up, then a short and a long run."""
    torch.set_num_threads(1)

    def seconds(run_updates: int) -> float:
        train, optimizer = side.prepare(run_updates)
        start = clock()
        train()
        elapsed = clock() - start
        made = {int(state["step"]) for state in optimizer.state.values()}
        if made != {run_updates}:
            raise RuntimeError(f"{side.title} made {made or 'no'} updates instead of {run_updates}")
        return elapsed

    seconds(WARM_UP_UPDATES)
    short = seconds(WARM_UP_UPDATES)
    return (seconds(WARM_UP_UPDATES + updates) - short) / updates


def run_child(*arguments: str) -> None:
    """Run Python with one thread and no terminal or pipe, whose speed would count; show a failure."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as errors:
        streams = {"stdout": subprocess.DEVNULL, "stderr": errors}
        code = subprocess.call([sys.executable, *arguments], env=environment, **streams)
        errors.seek(0)
        if code:
            raise SystemExit(f"{errors.read()[-3000:]}\npython {' '.join(arguments)}: status {code}")


def microseconds_per_update(name: str, updates: int, clock: str) -> float:
    """One measurement of one side in a fresh process and an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--updates", str(updates), "--clock", clock, "--folder", folder]
        run_child(str(THIS_FILE), "--child", name, *options)
        return 1e6 * float(Path(folder, RESULT).read_text())


def import_seconds(rounds: int) -> dict[str, float]:
    """Median seconds to import loopwright, after torch, in fresh processes; a first round fills caches."""
    statements = {"import loopwright": "pass", "from loopwright import Trainer": "import torch"}
    seconds: dict[str, list[float]] = {statement: [] for statement in statements}
    for _ in range(rounds + 1):
        for statement, before in statements.items():
            code = f"import sys, time; sys.path.insert(0, {str(SOURCE)!r}); {before}; "
            code += f"start = time.perf_counter(); {statement}; print(time.perf_counter() - start)"
            seconds[statement].append(float(subprocess.check_output([sys.executable, "-c", code])))
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


# ------------------------------------------------------------------ reporting


def version_of(side: Side) -> str | None:
    """The installed version of a side's package; None when there is no such package."""
    spec = importlib.util.find_spec(side.package)
    if spec is None or spec.origin is None:  # no origin: a folder without __init__.py
        return None
    try:
        return importlib.metadata.version(side.package.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return "this checkout"


def update_table(samples: dict[str, list[float]]) -> list[str]:
    """The markdown table of times per update."""
    base = statistics.median(samples["hand"]) if "hand" in samples else float("nan")
    lines = ["| side | version | median µs per update | min .. max | ratio to hand-written | overhead µs |"]
    lines += ["|---|---|--:|--:|--:|--:|"]
    for name, values in samples.items():
        side, median = SIDES[name], statistics.median(values)
        row = [side.title, version_of(side), f"{median:.1f}", f"{min(values):.1f} .. {max(values):.1f}"]
        row += [f"{median / base:.3f}", f"{median - base:+.1f}"]
        lines.append(f"| {' | '.join(row)} |")
    return lines


def over_budget(samples: dict[str, list[float]], imports: dict[str, float]) -> list[str]:
    """What --check objects to, one line each."""
    if not {"hand", "loopwright"} <= samples.keys():
        return ["cannot tell without figures of both hand and loopwright"]
    hand, ours = (statistics.median(samples[name]) for name in ("hand", "loopwright"))
    noise = max(hand / min(samples["hand"]), ours / min(samples["loopwright"]))
    lines = [f"over budget: `{name}` takes {s:.3f} s" for name, s in imports.items() if s > IMPORT_LIMIT]
    lines += [f"over budget: ratio {ours / hand:.3f}, limit {RATIO_LIMIT}"] * (ours / hand > RATIO_LIMIT)
    return lines + [f"too noisy to tell: median {noise:.2f} x minimum"] * (noise > NOISE_LIMIT)


def parse_arguments() -> argparse.Namespace:
    """The command line; options without help are for the child processes."""
    parser = argparse.ArgumentParser(description="Time per update against a hand-written loop, import cost")
    parser.add_argument("--rounds", type=int, help="measurements per side (default 7)")
    parser.add_argument("--updates", type=int, help="updates timed per measurement (default 2000)")
    parser.add_argument("--quick", action="store_true", help="defaults of 3 rounds and 500 updates")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="default: all")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: for a machine that is not idle")
    parser.add_argument("--output", type=Path, help="also write the report to this file")
    parser.add_argument("--check", action="store_true", help="exit 1 when over budget, or too noisy to tell")
    parser.add_argument("--child", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    rounds, updates = (3, 500) if arguments.quick else (7, 2000)
    arguments.rounds, arguments.updates = arguments.rounds or rounds, arguments.updates or updates
    return arguments


def main() -> int:
    """Measure what was asked for, print it, and judge it with --check."""
    arguments = parse_arguments()
    if arguments.child in (None, "loopwright"):  # not for others: accelerate searches the path at each update
        sys.path.insert(0, str(SOURCE))
    if arguments.child:
        os.chdir(arguments.folder)
        seconds = measure_here(SIDES[arguments.child], arguments.updates, CLOCKS[arguments.clock])
        Path(RESULT).write_text(str(seconds))
        return 0

    load = os.getloadavg()[0]  # before the measurements add to it
    sides = [name for name in SIDES if name in arguments.sides and version_of(SIDES[name])]
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for round_number in range(1, arguments.rounds + 1):
        for name, values in samples.items():
            values.append(microseconds_per_update(name, arguments.updates, arguments.clock))
            print(f"round {round_number}/{arguments.rounds} {name}: {values[-1]:.1f} µs", file=sys.stderr)
    imports = import_seconds(arguments.rounds) if "loopwright" in sides else {}

    settings = f"{arguments.rounds} rounds of {arguments.updates} updates, {arguments.clock} clock"
    machine = f"Python {platform.python_version()}, {platform.platform()}, {os.cpu_count()} cores"
    heading = f"`python {' '.join(sys.argv)}`: {settings}. {machine}, load at start {load:.1f}."
    report = [heading, "", *update_table(samples), ""]
    report += [f"Skipped, not installed: {name}\n" for name in arguments.sides if name not in sides]
    report += [NOTES, ""]
    if imports:
        report += ["| import, beyond torch's own | seconds | budget |", "|---|--:|--:|"]
        report += [f"| `{name}` | {seconds:.3f} | {IMPORT_LIMIT} |" for name, seconds in imports.items()]
    print("\n".join(report))
    if arguments.output:
        arguments.output.write_text("\n".join(report) + "\n")

    objections = over_budget(samples, imports) if arguments.check else []
    print("".join(f"{objection}\n" for objection in objections), end="", file=sys.stderr)
    return 1 if objections else 0


if __name__ == "__main__":
    sys.exit(main())
