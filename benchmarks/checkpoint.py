"""What a checkpoint costs: the stall of training per save, saving and loading, memory, and the start of a resumed run.

The model has about 100 million parameters in a few large layers, AdamW holds two more numbers for each, all in float32
on the CPU with one torch thread: 1.2 GB of state. The stall per save is what a user loses: the time of a training run
with saves minus that of the same run without, divided by the saves. Beside it stand the pause of the loop at a save,
from the end of an update to the next forward pass, and what `torch.save` and accelerate's `save_state` take for the
same model and optimizer. Everything but the memory is measured in one process, in rounds that do everything once; the
table shows medians over the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

SOURCE = Path(__file__).resolve().parents[1] / "src"
sys.path.insert(0, str(SOURCE))  # the package of this checkout, whichever is installed

from loopwright import Checkpointing, Trainer  # noqa: E402
from loopwright.callbacks import TrainerCallback  # noqa: E402
from loopwright.checkpoint import find_newest, verify  # noqa: E402
from loopwright.data import Share, adopt  # noqa: E402

BATCH_SIZE, TOKENS, LAYERS = 2, 8, 12
STALL_LIMIT = 0.20  # of the time of torch.save
STALL_BYTES_PER_SECOND, STALL_SECONDS = 2.5e9, 0.010  # the stall may be bytes / the first + the second
MEMORY_LIMIT, MEMORY_SLOPE_LIMIT = 1.1, 1e6  # times the state; bytes per save
VERIFY_LIMIT = 0.9e9  # bytes per second
RESUME_LIMIT = 1.0  # seconds
RESUME_SAMPLES, RESUME_BATCH_SIZE = 10**9, 32
RESULT = "peaks.json"

Samples = dict[str, list[float]]


# ------------------------------------------------------------------ the work


class Model(nn.Module):
    """An embedding of 4 x width rows and twelve square layers with a way around each: 16 x width^2 weights."""

    def __init__(self, num_parameters: int) -> None:
        super().__init__()
        width = max(8, round((num_parameters / 16) ** 0.5))
        self.embedding = nn.EmbeddingBag(4 * width, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(LAYERS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + torch.relu(layer(hidden))
        return hidden


def make_parts(num_parameters: int) -> tuple[Model, torch.optim.Optimizer]:
    """A model, and an AdamW that has made an update and so holds its state."""
    torch.manual_seed(0)
    model = Model(num_parameters)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    model(torch.zeros(1, TOKENS, dtype=torch.long)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def make_data(model: Model, num_updates: int) -> TensorDataset:
    """Tokens and classes for so many updates."""
    rows, width = model.embedding.weight.shape
    generator = torch.Generator().manual_seed(0)
    num_samples = num_updates * BATCH_SIZE
    tokens = torch.randint(rows, (num_samples, TOKENS), generator=generator)
    return TensorDataset(tokens, torch.randint(width, (num_samples,), generator=generator))


def state_of(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What the other sides save."""
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def tensor_bytes(value: Any) -> int:
    """The bytes of all tensors in a state."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(tensor_bytes(item) for item in value.values()) if isinstance(value, dict) else 0


class Clock(TrainerCallback):
    """Notes when the forward pass of each update starts, and when each update ends; saves come after that."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.ends: list[float] = []

    def on_train_step_start(self, trainer: Any, **kwargs: Any) -> None:
        self.starts.append(time.perf_counter())

    def on_update_end(self, trainer: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())

    @property
    def seconds(self) -> float:
        """From the first forward pass to the end of the last update, before the save that ends a run."""
        return self.ends[-1] - self.starts[0]

    def excesses(self, every: int) -> list[float]:
        """For each save: its pause, and what the updates up to the next one took beyond an undisturbed update.

        Undisturbed are those in the second half between two saves, when nothing is written any more.
        """
        seconds = [end - start for start, end in zip(self.starts, self.ends, strict=True)]
        undisturbed = statistics.median(
            each for update, each in enumerate(seconds) if update >= every and update % every >= every // 2
        )
        slower = [
            sum(each - undisturbed for each in seconds[first : first + every])
            for first in range(every, len(seconds) - every + 2, every)
        ]
        return [pause + extra for pause, extra in zip(self.pauses(every), slower, strict=True)]

    def pauses(self, every: int) -> list[float]:
        """Seconds between the end of an update that is followed by a save, and the next forward pass."""
        return [self.starts[update] - self.ends[update - 1] for update in range(every, len(self.ends), every)]


def train(parts: tuple[Any, Any], num_updates: int, callback: Any, checkpoints: Checkpointing | None) -> Trainer:
    """Make so many updates with the real trainer, and return it."""
    model, optimizer = parts
    trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=[callback])
    options = {"per_device_batch_size": BATCH_SIZE, "train_dataloader_kwargs": {"num_workers": 0}}
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for the report
        trainer.train(make_data(model, num_updates), 1, seed=0, checkpoints=checkpoints, **options)
    return trainer


# ------------------------------------------------------------------ measuring


def timed(action: Callable[[], Any]) -> float:
    """Seconds that an action takes, with the disk at rest before it."""
    os.sync()
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def measure_training(parts: tuple[Any, Any], arguments: argparse.Namespace, folder: Path, samples: Samples) -> Trainer:
    """Train without saves, with synchronous and with asynchronous ones; return the last trainer."""
    # The last update is not followed by a save, and the last save by as many updates as any other: its background
    # work falls into the time measured. The save that ends a run does not.
    num_updates = arguments.every * (arguments.saves + 1) - 1
    clocks, trainers = {}, {}
    for name in ("none", "synchronous", "asynchronous"):
        checkpoints = None
        if name != "none":
            policy = {"every_updates": arguments.every, "keep_last": 2, "keep_best": None}
            checkpoints = Checkpointing(folder / name, asynchronous=name == "asynchronous", **policy)
        clocks[name] = Clock()
        os.sync()
        trainers[name] = train(parts, num_updates, clocks[name], checkpoints)
    samples["update"].append(clocks["none"].seconds / num_updates)
    for name in ("synchronous", "asynchronous"):
        samples[f"{name} stall"].append((clocks[name].seconds - clocks["none"].seconds) / arguments.saves)
        first, *later = clocks[name].pauses(arguments.every)
        samples[f"{name} first pause"].append(first)
        samples[f"{name} pause"].append(statistics.median(later or [first]))
        samples[f"{name} excess"].append(statistics.median(clocks[name].excesses(arguments.every)))
    return trainers["asynchronous"]


def measure_files(parts: tuple[Any, Any], trainer: Trainer, folder: Path, samples: Samples) -> int:
    """Save the same state in the other ways, and load it in all; return the bytes of loopwright's checkpoint."""
    model, optimizer = parts
    state = state_of(model, optimizer)
    path, ours = folder / "state.pt", find_newest(folder / "asynchronous")[0]

    def save_synced() -> None:
        with open(path, "wb") as file:
            torch.save(state, file)
            os.fsync(file.fileno())

    def load() -> None:
        loaded = torch.load(path)
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])

    samples["torch.save"].append(timed(lambda: torch.save(state, path)))
    path.unlink()
    samples["torch.save + fsync"].append(timed(save_synced))
    samples["verify"].append(timed(lambda: verify(ours)))
    samples["loopwright load"].append(timed(lambda: trainer.load_training_state(ours)))
    samples["torch.load"].append(timed(load))
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.prepare(model, optimizer)
    samples["accelerate save"].append(timed(lambda: accelerator.save_state(str(folder / "accelerate"))))
    samples["accelerate load"].append(timed(lambda: accelerator.load_state(str(folder / "accelerate"))))
    accelerator.free_memory()
    return sum(file.stat().st_size for file in ours.iterdir())


class Endless(Dataset):
    """A map-style dataset so large that nothing may look at all of it."""

    def __len__(self) -> int:
        return RESUME_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


def measure_resume(samples: Samples) -> None:
    """Time from making a shuffled loader to its first batch, at the start and near the end of the epoch."""
    for percent in (0, 99):
        start = time.perf_counter()
        loader = DataLoader(Endless(), RESUME_BATCH_SIZE, shuffle=True)
        position = RESUME_SAMPLES * percent // 100 // RESUME_BATCH_SIZE * RESUME_BATCH_SIZE
        windows = adopt(loader, seed=0, share=Share(), device=torch.device("cpu")).windows(0, position)
        next(windows)
        samples[f"first batch at {percent} %"].append(time.perf_counter() - start)


class PeakMemory(TrainerCallback):
    """Notes the largest resident memory between the ends of two updates; a save falls between them."""

    def __init__(self) -> None:
        self.peaks: list[int] = []

    def on_update_end(self, trainer: Any, **kwargs: Any) -> None:
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        self.peaks.append(int(lines["VmHWM"].split()[0]) * 1024)
        Path("/proc/self/clear_refs").write_text("5")  # the kernel forgets the peak


def measure_memory_here(num_parameters: int, num_saves: int, folder: Path, is_asynchronous: bool) -> list[int]:
    """Save after every update, and return the peak of memory with each save after the first."""
    peak = PeakMemory()
    policy = {"every_updates": 1, "keep_last": 1, "keep_best": None}
    checkpoints = Checkpointing(folder / "memory", asynchronous=is_asynchronous, **policy)
    train(make_parts(num_parameters), num_saves + 2, peak, checkpoints)
    return peak.peaks[2:]


def measure_memory(arguments: argparse.Namespace, folder: Path) -> dict[str, list[int]]:
    """The peaks with synchronous and with asynchronous saves, each in a process of its own."""
    peaks = {}
    for name in ("synchronous", "asynchronous"):
        own = Path(tempfile.mkdtemp(dir=folder))
        options = ["--parameters", str(arguments.parameters), "--memory-saves", str(arguments.memory_saves)]
        command = [sys.executable, str(Path(__file__).resolve()), "--child", name, "--folder", str(own), *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        peaks[name] = json.loads((own / RESULT).read_text())
        shutil.rmtree(own)
    return peaks


# ------------------------------------------------------------------ reporting


class Report:
    """The lines of the table, and which targets were missed."""

    def __init__(self, samples: Samples, num_bytes: int) -> None:
        self.samples, self.num_bytes = samples, num_bytes
        self.lines = ["| what | median | min .. max | MB/s | target |", "|---|--:|--:|--:|---|"]
        self.missed: list[str] = []

    def time(self, title: str, name: str, limit: float | None = None, reason: str = "", has_rate: bool = False) -> None:
        """Add a row of seconds."""
        values = self.samples[name]
        median = statistics.median(values)
        rate = f"{self.num_bytes / median / 1e6:,.0f}" if has_rate else ""
        target = "" if limit is None else self.judged(title, median <= limit, f"<= {limit:.3f} s {reason}".strip())
        spread = f"{min(values):.3f} .. {max(values):.3f}"
        self.lines.append(f"| {title} | {median:.3f} s | {spread} | {rate} | {target} |")

    def figure(self, title: str, text: str, is_met: bool, target: str) -> None:
        """Add a row of another kind."""
        self.lines.append(f"| {title} | {text} | | | {self.judged(title, is_met, target)} |")

    def judged(self, title: str, is_met: bool, target: str) -> str:
        """Return the target with what came of it."""
        if not is_met:
            self.missed.append(title)
        return f"{target}: {'met' if is_met else 'MISSED'}"


def make_report(samples: Samples, peaks: dict[str, list[int]], num_bytes: int, state_bytes: int) -> Report:
    """All rows of the table."""
    report = Report(samples, num_bytes)
    torch_save = statistics.median(samples["torch.save"])
    by_bytes = num_bytes / STALL_BYTES_PER_SECOND + STALL_SECONDS
    stall = statistics.median(samples["asynchronous stall"])
    report.time("`torch.save`", "torch.save", has_rate=True)
    report.time("`torch.save` + fsync", "torch.save + fsync", has_rate=True)
    report.time("accelerate `save_state`", "accelerate save", has_rate=True)
    report.time("one update without saves", "update")
    report.time("synchronous: stall per save", "synchronous stall", has_rate=True)
    report.time("synchronous: pause at a save", "synchronous pause")
    report.time("asynchronous: stall per save", "asynchronous stall", by_bytes, "= bytes / 2.5 GB/s + 10 ms")
    share = stall / torch_save
    limit = f"<= {STALL_LIMIT:.0%}"
    report.figure("asynchronous: stall as part of `torch.save`", f"{share:.1%}", share <= STALL_LIMIT, limit)
    report.time("asynchronous: stall per save, within the run", "asynchronous excess")
    report.time("asynchronous: pause at a save", "asynchronous pause")
    report.time("asynchronous: pause at the first save", "asynchronous first pause")
    verify_seconds = num_bytes / VERIFY_LIMIT
    report.time("verify every byte", "verify", verify_seconds, "= bytes / 0.9 GB/s", has_rate=True)
    report.time("load into model and optimizer, every byte verified", "loopwright load", has_rate=True)
    report.time("`torch.load` into model and optimizer", "torch.load", has_rate=True)
    report.time("accelerate `load_state`", "accelerate load", has_rate=True)
    for percent in (0, 99):
        title = f"first batch at {percent} %"
        report.time(f"{title} of an epoch of 1e9 shuffled samples", title, RESUME_LIMIT)
    if peaks:
        extra = statistics.median(peaks["asynchronous"]) - statistics.median(peaks["synchronous"])
        multiple = extra / state_bytes
        slope = float(np.polyfit(range(len(peaks["asynchronous"])), peaks["asynchronous"], 1)[0])
        title, limit = "asynchronous: memory beyond synchronous, times the state", f"<= {MEMORY_LIMIT}"
        report.figure(title, f"{multiple:.2f}", multiple <= MEMORY_LIMIT, limit)
        title = f"asynchronous: growth of memory per save, over {len(peaks['asynchronous'])} saves"
        report.figure(title, f"{slope / 1e6:+.2f} MB", slope <= MEMORY_SLOPE_LIMIT, "<= 1 MB")
    return report


NOTES = """\
Stall: (training with saves - training without) / saves, from the first forward pass to the end of the last update; the
save that ends a run comes after it. Within the run: the pause at a save, and what the updates after it took beyond
those of the second half of the interval, when nothing is written any more; no difference between two runs is in it.
Pause: from the end of an update to the next forward pass when a save lies between.
`torch.save`, accelerate and the loads take place while nothing else runs, after a sync of the disk, with the
files in the page cache. Only `torch.save` + fsync and loopwright's saves are on the disk when they are done, and only
loopwright's are hashed.
"""


def parse_arguments() -> argparse.Namespace:
    """The command line; options without help are for the child processes."""
    parser = argparse.ArgumentParser(description="Stall, speed and memory of checkpoints; start of a resumed run")
    parser.add_argument("--parameters", type=int, default=100_000_000, help="of the model (default 100 million)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of everything (default 5)")
    parser.add_argument("--every", type=int, default=6, help="updates between saves (default 6)")
    parser.add_argument("--saves", type=int, default=3, help="saves in a training run (default 3)")
    parser.add_argument("--memory-saves", type=int, default=10, help="saves that memory is watched over; 0: not at all")
    parser.add_argument("--folder", type=Path, help="where the files lie (default: a temporary folder)")
    parser.add_argument("--output", type=Path, help="also write the report to this file")
    parser.add_argument("--check", action="store_true", help="exit 1 when a target is missed")
    parser.add_argument("--child", choices=("synchronous", "asynchronous"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Measure, print the table, and judge it with --check."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    if arguments.child:
        is_asynchronous = arguments.child == "asynchronous"
        peaks = measure_memory_here(arguments.parameters, arguments.memory_saves, arguments.folder, is_asynchronous)
        (arguments.folder / RESULT).write_text(json.dumps(peaks))
        return 0

    load = os.getloadavg()[0]  # before the measurements add to it
    if arguments.folder is not None:
        arguments.folder.mkdir(parents=True, exist_ok=True)
    samples: Samples = defaultdict(list)
    parts = make_parts(arguments.parameters)
    state_bytes = tensor_bytes(state_of(*parts))
    with tempfile.TemporaryDirectory(prefix="loopwright-checkpoint-", dir=arguments.folder) as root:
        peaks = measure_memory(arguments, Path(root)) if arguments.memory_saves else {}
        train(parts, 2, Clock(), None)  # to warm up
        for number in range(1, arguments.rounds + 1):
            with tempfile.TemporaryDirectory(dir=root) as folder:
                trainer = measure_training(parts, arguments, Path(folder), samples)
                num_bytes = measure_files(parts, trainer, Path(folder), samples)
            measure_resume(samples)
            print(f"round {number}/{arguments.rounds}: {samples['asynchronous stall'][-1]:.3f} s", file=sys.stderr)

    report = make_report(samples, peaks, num_bytes, state_bytes)
    num_parameters = sum(parameter.numel() for parameter in parts[0].parameters())
    settings = f"{arguments.rounds} rounds, {arguments.saves} saves each, one every {arguments.every} updates"
    size = f"{num_parameters / 1e6:.1f} million parameters, {state_bytes / 1e6:,.1f} MB of tensors"
    machine = f"Python {platform.python_version()}, torch {torch.__version__}, accelerate {accelerate.__version__}, "
    machine += f"{platform.platform()}, {os.cpu_count()} cores, load at start {load:.1f}"
    heading = f"`python {' '.join(sys.argv)}`: {settings}. {size}, {num_bytes / 1e6:,.1f} MB of files. {machine}."
    lines = [heading, "", *report.lines, "", NOTES]
    print("\n".join(lines))
    if arguments.output:
        arguments.output.write_text("\n".join(lines) + "\n")
    print("".join(f"target missed: {title}\n" for title in report.missed), end="", file=sys.stderr)
    return 1 if arguments.check and report.missed else 0


if __name__ == "__main__":
    sys.exit(main())
