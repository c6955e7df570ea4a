"""What loopwright adds to each update of a plain DDP loop on several processes, and what an exact sum costs.

Every side trains the same MLP on the same data in memory with the same AdamW, on the same processes (gloo, CPU, one
torch thread each), which torchrun has started. So that a slow minute hits all of them, the sides take turns within one
start.

    plain        DistributedDataParallel and a DistributedSampler, written by hand
    loopwright   Trainer with its default callbacks: the same, and agreement on requests at every update (T0, T2)
    at the end   the same with a callback that may ask at the end of an update: the processes agree there, and wait
    exact        loopwright with reduction="exact": the same bits for any number of processes (T1)

A figure is the time between the first and the last of so many updates, divided by their number, on the slowest process.
The sides begin in another order in every round. The table shows medians over the rounds, and medians of the ratios
within a round, which a slow minute does not change. Next to the time on the clock stands that of the processor, all
threads of the slowest process, which other work on the machine changes less.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

THIS_FILE = Path(__file__).resolve()
SOURCE = THIS_FILE.parents[1] / "src"
sys.path.insert(0, str(SOURCE))  # the package of this checkout, whichever is installed

from loopwright import Trainer  # noqa: E402
from loopwright.callbacks import TrainerCallback  # noqa: E402

SIDES = ("plain", "loopwright", "at the end", "exact")
RATIO_LIMIT = 1.10  # --check: loopwright's time per update over the plain loop's
WARM_UP_UPDATES = 20
Time = tuple[float, float]  # on the clock, and of the processor
LOG_EVERY = 50


# ------------------------------------------------------------------ the work, the same for every side


def network(width: int) -> nn.Module:
    """An MLP with three layers of this width: about 2 width^2 parameters."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8))


def samples(count: int) -> TensorDataset:
    """Features and classes, repeating a small pool."""
    generator = torch.Generator().manual_seed(0)
    features, classes = torch.randn(512, 64, generator=generator), torch.randint(8, (512,), generator=generator)
    indexes = torch.arange(count) % 512
    return TensorDataset(features[indexes], classes[indexes])


def now() -> Time:
    """The time on the clock, and what this process has used of the processor."""
    return time.perf_counter(), time.process_time()


def plain(options: argparse.Namespace, updates: int) -> list[Time]:
    """The loop by hand; return when each update ended."""
    dataset = samples(updates * options.batch_size * dist.get_world_size())
    sampler = DistributedSampler(dataset, shuffle=True, seed=1)
    loader = DataLoader(dataset, options.batch_size, sampler=sampler)
    model = nn.parallel.DistributedDataParallel(network(options.width))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    loss_function, ends, total = nn.CrossEntropyLoss(), [], torch.zeros(())
    model.train()
    for number, (features, classes) in enumerate(loader, start=1):
        loss = loss_function(model(features), classes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
        if number % LOG_EVERY == 0:
            shared = total.clone()
            dist.all_reduce(shared)
            shared.item()
        ends.append(now())
    return ends


class Ends(TrainerCallback):
    """Notes when each update ended."""

    asks_alike = True  # it asks for nothing

    def __init__(self) -> None:
        self.times: list[Time] = []

    def on_update_end(self, trainer: Any, **kwargs: Any) -> None:
        self.times.append(now())


class LateEnds(Ends):
    """The same, by a class that does not say that it asks for nothing."""

    def on_update_end(self, trainer: Any, **kwargs: Any) -> None:
        self.times.append(now())


def trained(options: argparse.Namespace, updates: int, side: str) -> list[Time]:
    """The same by loopwright; return when each update ended."""
    from loopwright.trainer import DEFAULT_CALLBACKS

    dataset = samples(updates * options.batch_size * dist.get_world_size())
    model, ends = network(options.width), LateEnds() if side == "at the end" else Ends()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=[*DEFAULT_CALLBACKS, ends])
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        trainer.train(
            dataset,
            1,
            per_device_batch_size=options.batch_size,
            train_dataloader_kwargs={"num_workers": 0},
            seed=1,
            log_every=LOG_EVERY,
            reduction="exact" if side == "exact" else "fast",
        )
    return ends.times


def run_side(side: str, options: argparse.Namespace, updates: int) -> Time:
    """Milliseconds per update of the slowest process, on the clock and of the processor."""
    ends = plain(options, updates) if side == "plain" else trained(options, updates, side)
    assert len(ends) == updates
    spent = [(last - first) / (updates - 1) * 1000 for first, last in zip(ends[0], ends[-1], strict=True)]
    slowest = torch.tensor(spent, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    clock, processor = slowest.tolist()
    return clock, processor


def work(options: argparse.Namespace) -> None:
    """What each process does: all sides in turn, so often; the first leaves the figures in a file."""
    torch.set_num_threads(1)
    Trainer(network(8), None, None, callbacks=())  # joins the process group as a run does
    figures: dict[str, list[Time]] = {side: [] for side in SIDES}
    for number in range(options.rounds + 1):
        first = number % len(SIDES)
        for side in (*SIDES[first:], *SIDES[:first]):
            value = run_side(side, options, WARM_UP_UPDATES if number == 0 else options.updates)
            if number > 0:
                figures[side].append(value)
    if dist.get_rank() == 0:
        Path(options.result).write_text(json.dumps(figures))
    dist.barrier()


# ------------------------------------------------------------------ starting and reporting


def measured(options: argparse.Namespace, num_processes: int) -> dict[str, list[Time]]:
    """Start the processes and return their figures."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "figures.json"
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            str(num_processes),
            "--standalone",
        ]
        command += [str(THIS_FILE), "--result", str(result), "--rounds", str(options.rounds)]
        command += ["--updates", str(options.updates), "--width", str(options.width)]
        command += ["--batch-size", str(options.batch_size)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        subprocess.run(command, env=environment, check=True)
        figures: dict[str, list[Time]] = json.loads(result.read_text())
        return figures


def ratio(figures: dict[str, list[Time]], side: str, other: str, kind: int) -> float:
    """The median over the rounds of one side's time over another's."""
    both = zip(figures[side], figures[other], strict=True)
    return statistics.median(one[kind] / against[kind] for one, against in both)


def parse_arguments() -> argparse.Namespace:
    """The command line; options without help are for the processes that are started."""
    parser = argparse.ArgumentParser(description="Time per update on several processes against a plain DDP loop")
    parser.add_argument("--processes", type=int, nargs="+", default=[2], help="numbers of processes (default 2)")
    parser.add_argument("--rounds", type=int, default=7, help="measurements per side (default 7)")
    parser.add_argument("--updates", type=int, default=300, help="updates per measurement (default 300)")
    parser.add_argument("--width", type=int, default=512, help="of the layers (default 512: 0.3 M parameters)")
    parser.add_argument("--batch-size", type=int, default=32, help="samples per process and update (default 32)")
    parser.add_argument("--output", type=Path, help="also write the report to this file")
    parser.add_argument("--check", action="store_true", help="exit 1 when loopwright is over budget")
    parser.add_argument("--result", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Measure, print a table, and judge it with --check."""
    options = parse_arguments()
    if options.result:
        work(options)
        return 0
    load = os.getloadavg()[0]
    parameters = sum(parameter.numel() for parameter in network(options.width).parameters())
    machine = f"Python {platform.python_version()}, torch {torch.__version__}, {platform.platform()}"
    settings = f"{options.rounds} rounds of {options.updates} updates, {parameters:,} parameters, gloo"
    heading = f"`python {' '.join(sys.argv)}`: {settings}. {machine}, {os.cpu_count()} cores, load at start {load:.1f}."
    columns = ("processes", "side", "ms per update", "smallest", "largest", "of plain", "of loopwright")
    columns += ("processor ms", "of plain", "of loopwright")
    report = [heading, "", f"| {' | '.join(columns)} |", "|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|"]
    is_good = True
    for num_processes in options.processes:
        figures = measured(options, num_processes)
        for side, values in figures.items():
            cells = []
            for kind, spread in ((0, (statistics.median, min, max)), (1, (statistics.median,))):
                cells += [f"{function([each[kind] for each in values]):.3f}" for function in spread]
                cells += [f"{ratio(figures, side, other, kind):.2f}" for other in ("plain", "loopwright")]
            report.append(f"| {num_processes} | {side} | {' | '.join(cells)} |")
        is_good = is_good and ratio(figures, "loopwright", "plain", 0) <= RATIO_LIMIT
    report += ["", f"Budget: loopwright at most {RATIO_LIMIT:.2f} of plain. Exact is the cost of tier T1 against T2."]
    print("\n".join(report))
    if options.output:
        options.output.write_text("\n".join(report) + "\n")
    return 0 if is_good or not options.check else 1


if __name__ == "__main__":
    sys.exit(main())
