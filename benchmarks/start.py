"""The seconds from the command to the first update, phase by phase: `lw demo TASK --profile start` for every demo.

Each demo runs for one update, in a process of its own and a temporary folder, after one such process has warmed the
file cache; of three such runs (`--runs`) the middle one counts. "data" is making, reading, checking and tokenizing the
rows; "beyond" is everything else until the first update begins, which should be at most 5 seconds. "CPU" is the CPU
time of the process until that update has ended: on a busy machine the wall seconds are mostly waiting. Packages that
are installed besides loopwright[text,vision] count: rouge-score imports scikit-learn and pandas if they are there.

    python benchmarks/start.py --output benchmarks/results/start.md          # all demos, some six minutes
    python benchmarks/start.py --runs 1 --tasks causal-lm image-classification
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[1] / "src"
sys.path.insert(0, str(SOURCE))  # the package of this checkout, whichever is installed

from loopwright.tasks import load_tasks  # noqa: E402

DATA = ("demo data", "read and check data", "rows")
MOST_SECONDS = 5.0


def start_of(task: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        words = ["demo", task, "--max_steps", "1", "--max_eval_samples", "16", "--profile", "start", "--json"]
        environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
        command = [sys.executable, "-m", "loopwright", *words]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.stderr.write(done.stdout[-1000:] + done.stderr[-3000:])
            done.check_returncode()
    events = map(json.loads, done.stdout.splitlines())
    return next(event for event in events if event["event"] == "start_profile")


def middle_of(task: str, runs: int) -> dict[str, Any]:
    found = sorted((start_of(task) for _ in range(runs)), key=lambda one: float(one["total_seconds"]))
    return found[runs // 2]


def row(task: str, found: dict[str, Any]) -> str:
    seconds = found["seconds"]
    data = sum(seconds.get(phase, 0.0) for phase in DATA)
    rest = sorted(((each, phase) for phase, each in seconds.items() if phase not in DATA), reverse=True)
    phases = " · ".join(f"{phase} {each:.2f}" for each, phase in rest if each >= 0.05)
    beyond, cpu = found["total_seconds"] - data - seconds["first update"], found["cpu_seconds"]
    return f"| {task} | {data:.1f} | **{beyond:.1f}** | {found['total_seconds']:.1f} | {cpu:.1f} | {phases} |"


def device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()


def main() -> None:
    names = [task.name for task in load_tasks()[0] if task.demo_note]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=names, choices=names)
    parser.add_argument("--runs", type=int, default=3, help="of which the middle one counts (default 3)")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    load = os.getloadavg()[0]
    with contextlib.suppress(subprocess.CalledProcessError):  # it warms the file cache
        start_of(asked.tasks[0])
    lines = [
        "# From the command to the first update\n",
        f"`python benchmarks/start.py`: the middle one of {asked.runs} runs, with `loopwright[text,vision]` installed. "
        f"{device()}, Python {platform.python_version()}, {os.cpu_count()} cores, load before {load:.1f}.\n",
        "| demo | data, s | beyond, s | in all, s | CPU, s | phases beyond the data, s |",
        "|---|--:|--:|--:|--:|---|",
    ]
    for task in asked.tasks:
        try:
            lines.append(row(task, middle_of(task, asked.runs)))
        except subprocess.CalledProcessError as error:
            lines.append(f"| {task} | | exit code {error.returncode} | | | |")
        print(lines[-1], flush=True)
        if asked.output is not None:
            asked.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
