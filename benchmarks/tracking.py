"""What keeping track of a run costs: its log and its live report, a report of a million points, and `--help`.

The first table trains the same model in one process, in rounds that take turns: without a record, and with
metrics.jsonl, status.json and a live report, logged every 50 updates (the default) and every single one. The batch is
chosen so that an update takes about 10 ms: 100 updates a second.

A share is CPU time over CPU time, since on a machine that others use, the wall clock measures them. "against none" is
the run with a record over the one without in the same round: the median of the rounds, and the lowest and the highest,
which show the noise. "metered" is what passes inside logging itself (the losses are read, records written, the page
made anew), over all of the run. It is less noisy and more than the truth: the first code of the interpreter after a
large product of matrices waits for its caches, whatever it is. The first of the two is held against the limit; where it
is noise (its range is wider than two limits), the second.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import TensorDataset

from loopwright import Checkpointing, Trainer
from loopwright.callbacks import TrainerCallback
from loopwright.report import LiveReport, write_report
from loopwright.training.logbook import Logbook
from loopwright.training.run import run_of

WANTED_SECONDS = 0.01  # of an update
WIDTH = 768
SIDES = {"none": None, "every 50 updates": 50, "every update": 1}
MOST_SHARE = 0.01
MOST_REPORT_SECONDS, MOST_REPORT_BYTES = 10.0, 2_000_000
MOST_HELP_SECONDS = 0.3


class Cost(NamedTuple):
    """Of one run: CPU seconds in all and inside logging, seconds on the wall, pages that were made."""

    cpu: float
    metered: float
    wall: float
    num_pages: int


class MeteredLogbook(Logbook):
    """Knows the CPU time that its logging took."""

    metered = 0.0

    def log(self) -> None:
        begin = time.process_time()
        super().log()
        self.metered += time.process_time() - begin


class MeteredTrainer(Trainer):
    """A trainer with such a logbook."""

    def create_logbook(self, run: Any) -> MeteredLogbook:
        return MeteredLogbook(run)


class KeepsReport(TrainerCallback):
    """Keeps report.html fresh, as the tasks do."""

    def __init__(self, folder: Path) -> None:
        self._live = LiveReport(folder)
        self.num_pages = 0

    def on_log(self, trainer: Any, **kwargs: Any) -> None:
        self.num_pages += self._live.refresh() is not None


def train(num_updates: int, batch: int, log_every: int | None) -> Cost:
    """Train a new model for so many updates, with a record and a report or without."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(batch * num_updates, 1).expand(-1, WIDTH)
    dataset = TensorDataset(inputs, torch.randint(10, (len(inputs),)))
    folder = Path(tempfile.mkdtemp())
    options: dict[str, Any] = {"log_every": sys.maxsize}
    report = KeepsReport(folder)
    trainer = MeteredTrainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=[] if log_every is None else [report])
    if log_every is not None:
        options = {"log_every": log_every, "checkpoints": Checkpointing(folder)}
    begin, wall = time.process_time(), time.perf_counter()
    trainer.train(dataset, 1, per_device_batch_size=batch, **options)
    cost = Cost(
        time.process_time() - begin, run_of(trainer).logbook.metered, time.perf_counter() - wall, report.num_pages
    )
    shutil.rmtree(folder)
    return cost


def chosen_batch() -> int:
    """Return a batch with which an update takes about as long as is wanted."""
    small, large = (train(60, batch, None).cpu / 60 for batch in (32, 256))
    per_sample = max(large - small, 1e-6) / (256 - 32)
    return max(8, round(32 + (WANTED_SECONDS - small) / per_sample))


def cost_table(num_rounds: int, num_updates: int) -> tuple[list[str], bool]:
    """Return the table of shares, and whether all are below the limit."""
    batch = chosen_batch()
    found: dict[str, list[Cost]] = {name: [] for name in SIDES}
    for _ in range(num_rounds):
        for name, log_every in SIDES.items():
            found[name].append(train(num_updates, batch, log_every))
    lines = [
        f"{num_rounds} rounds of {num_updates} updates, batch {batch}, one thread.",
        "",
        "| logged | updates/s | CPU ms per update | pages made | against none | lowest .. highest | metered |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    is_good = True
    for name, costs in found.items():
        cpu, wall = (
            statistics.median(values) for values in ([cost.cpu for cost in costs], [cost.wall for cost in costs])
        )
        pages = statistics.median(cost.num_pages for cost in costs)
        line = f"| {name} | {num_updates / wall:.0f} | {1000 * cpu / num_updates:.2f} | {pages:.0f} |"
        if name == "none":
            lines.append(f"{line} | | |")
            continue
        shares = [cost.cpu / base.cpu - 1 for cost, base in zip(costs, found["none"], strict=True)]
        share, metered = statistics.median(shares), statistics.median(cost.metered / cost.cpu for cost in costs)
        is_noise = max(shares) - min(shares) > 2 * MOST_SHARE
        is_good = is_good and (metered if is_noise else share) < MOST_SHARE
        spread = f"{100 * min(shares):+.1f} % .. {100 * max(shares):+.1f} %"
        lines.append(f"{line} {100 * share:+.2f} % | {spread} | {100 * metered:.2f} % |")
    return lines, is_good


def report_row(num_points: int) -> tuple[str, bool]:
    """Return how long the report of a run with so many logs takes, and how large it is."""
    folder = Path(tempfile.mkdtemp())
    (folder / "status.json").write_text(json.dumps({"state": "done"}))
    line = '{{"event":"log","update":{0},"epoch":1,"loss":{1:.6f},"seconds":{2},"time":{2}}}\n'
    with (folder / "metrics.jsonl").open("w") as file:
        file.writelines(line.format(update, 1 + update % 97 / 50, update / 100) for update in range(1, num_points + 1))
    begin, wall = time.process_time(), time.perf_counter()
    size = write_report(folder).stat().st_size
    cpu, wall = time.process_time() - begin, time.perf_counter() - wall
    shutil.rmtree(folder)
    is_good = cpu < MOST_REPORT_SECONDS and size < MOST_REPORT_BYTES
    return f"| report of {num_points:,} logs | {wall:.1f} | {cpu:.1f} | {size / 1e6:.2f} MB | 10 s, 2 MB |", is_good


def help_row(num_rounds: int) -> tuple[str, bool]:
    """Return how long `loopwright --help` takes, from its start to its end."""
    walls, cpus = [], []
    for _ in range(num_rounds + 1):
        before, begin = os.times(), time.perf_counter()
        command = [sys.executable, "-m", "loopwright", "--help"]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        after = os.times()
        walls.append(time.perf_counter() - begin)
        cpus.append(sum(after[2:4]) - sum(before[2:4]))
    wall, cpu = statistics.median(walls[1:]), statistics.median(cpus[1:])  # the first has to read files from the disk
    return f"| `loopwright --help` | {wall:.2f} | {cpu:.2f} | | 0.3 s |", cpu < MOST_HELP_SECONDS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="of the first table")
    parser.add_argument("--updates", type=int, default=1500, help="of a run")
    parser.add_argument("--points", type=int, default=1_000_000, help="of the report")
    parser.add_argument("--output", type=Path, default=None, help="also writes the tables")
    parser.add_argument("--check", action="store_true", help="exit status 1 when a limit is missed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    help_line, has_fast_help = help_row(5)
    report_line, has_fast_report = report_row(arguments.points)
    costs, is_cheap = cost_table(arguments.rounds, arguments.updates)
    lines = [
        f"`python {' '.join(sys.argv)}`: Python {platform.python_version()}, {os.cpu_count()} cores, load at start "
        f"{load:.1f}. {costs[0]} Limit: 1 % of the CPU time.",
        *costs[1:],
        "",
        "| | seconds | CPU seconds | size | limit |",
        "|---|--:|--:|--:|---|",
        report_line,
        help_line,
        "",
        "All limits kept." if is_cheap and has_fast_report and has_fast_help else "A limit is MISSED.",
    ]
    text = "\n".join(lines)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n", encoding="utf-8")
    if arguments.check and not (is_cheap and has_fast_report and has_fast_help):
        sys.exit(1)


if __name__ == "__main__":
    main()
