"""What each demo learns, and what it costs: `lw demo TASK` in a process of its own, one thread, nothing downloaded.

Each demo runs twice in a temporary folder: once for a single update with a learning rate of 0, which is the metric
before training, and once as it is. Both end with the evaluation of the model that they keep. CPU seconds are those of
the whole process, from its first import to the last file; "of training" is the difference between the two processes,
so it has the updates, the evaluations and the checkpoints between them, and no import and no reading of data.

    python benchmarks/demos.py --output benchmarks/results/demos.md          # all demos, some twenty minutes
    python benchmarks/demos.py --tasks translation text-classification
    python benchmarks/demos.py --rates --output benchmarks/results/rates.md  # each also with --lr auto
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

SOURCE = Path(__file__).resolve().parents[1] / "src"
sys.path.insert(0, str(SOURCE))  # the package of this checkout, whichever is installed

from loopwright.tasks import get_task, task_names  # noqa: E402

# What the prototypes of the demos reached, on one thread: before, after, CPU seconds of training alone.
PROTOTYPES = {
    "text-classification": "0.097 → 0.797 in 45",
    "token-classification": "0.03 → 0.746 in 111",
    "question-answering": "0.0 → 92.5 (exact match) in 82",
    "multiple-choice": "0.23 → 0.79 in 70",
    "sentence-embedding": "0.682 → 0.742 in 68",
    "causal-lm": "3.93 → 2.62 in 46",
    "masked-lm": "0.00 → 0.451 in 106",
    "translation": "0.00 → 0.930 in 39",
    "image-classification": "0.833 (one epoch) → 0.997 in 2",
    "semantic-segmentation": "0.089 → 0.708 in 79",
    "object-detection": "0.028 → 0.625 in 70",
    "instance-segmentation": "0.129 → 0.730 in 87",
    "masked-image-modeling": "0.233 → 0.044 in 44",
}


class Outcome(NamedTuple):
    """What one process did: its result.json, its CPU seconds and its wall seconds."""

    result: dict[str, Any]
    cpu: float
    wall: float

    @property
    def value(self) -> float:
        """The metric that decides which model is best."""
        return float(self.result["metrics"][self.result["metric"]])


def run_demo(task: str, flags: tuple[str, ...], folder: Path) -> Outcome:
    """Run a demo to its end in a folder of its own."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "LOOPWRIGHT_RUNS": str(folder),
        "PYTHONPATH": str(SOURCE),
    }
    used, started = cpu_of_children(), time.monotonic()
    process = subprocess.run(
        [sys.executable, "-m", "loopwright", "demo", task, "--threads", "1", *flags],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    seconds, wall = cpu_of_children() - used, time.monotonic() - started
    if process.returncode != 0:
        raise SystemExit(f"the demo of {task} ended with {process.returncode}:\n{process.stdout[-3000:]}")
    result = (folder / "last" / "result.json").read_text(encoding="utf-8")
    return Outcome(json.loads(result), seconds, wall)


def untrained(task: str) -> tuple[str, ...]:
    """Return the flags of a run that changes no weight; a flag is given under the name that the demo has for it."""
    rate = "--learning_rate" if "learning_rate" in get_task(task).demo else "--lr"
    return (rate, "0", "--max_steps", "1", "--no_rehearsal")


def cpu_of_children() -> float:
    """Return the CPU seconds of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def row(task: str, before: Outcome, after: Outcome) -> str:
    """Return a line of the table."""
    result = after.result
    metric = result["metric"]
    floors = [f"{name} {values[metric]:.3f}" for name, values in result["baselines"].items() if metric in values]
    better = "↑" if result["direction"] == "max" else "↓"
    cells = [
        task,
        f"{metric} {better}",
        f"{before.value:.3f}",
        f"**{after.value:.3f}**",
        others(result),
        ", ".join(floors) or "none",
        f"{after.cpu - before.cpu:.0f}",
        f"{after.cpu:.0f}",
        f"{after.wall:.0f}",
        PROTOTYPES.get(task, "none"),
    ]
    return f"| {' | '.join(cells)} |"


def others(result: dict[str, Any]) -> str:
    """Return the other metrics after training."""
    return ", ".join(
        f"{name} {value:.3f}" for name, value in result["metrics"].items() if name not in (result["metric"], "loss")
    )


def row_of_rates(task: str, usual: Outcome, found: Outcome, search: dict[str, Any]) -> str:
    """Return a line of the table of rates."""
    better = "↑" if usual.result["direction"] == "max" else "↓"
    trials = ", ".join(f"{rate}: {loss:.4g}" for rate, loss in search["trials"].items())
    cells = [task, f"{usual.result['metric']} {better}", f"{search['default']:g}", f"{usual.value:.3f}"]
    cells += [f"{search['chosen']:g}", f"{found.value:.3f}", trials]
    return f"| {' | '.join(cells)} |"


def measure_rates(tasks: list[str]) -> list[str]:
    """Run each demo with its own learning rate and with `--lr auto`, and return the table."""
    rows = [
        "| task | metric | rate of the demo | with it | `--lr auto` chose | with it | loss after the trials |",
        "|---|---|--:|--:|--:|--:|---|",
    ]
    for task in tasks:
        with tempfile.TemporaryDirectory() as name:
            usual = run_demo(task, (), Path(name) / "usual")
            found = run_demo(task, ("--lr", "auto"), Path(name) / "auto")
            search = json.loads((Path(name) / "auto" / "last" / "lr_find.json").read_text(encoding="utf-8"))
        rows.append(row_of_rates(task, usual, found, search))
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def main() -> None:
    """Measure, print the table, and write it where --output says."""
    demos = [name for name in task_names() if get_task(name).demo_note]
    parser = argparse.ArgumentParser(description="metric, floors and seconds of each demo")
    parser.add_argument("--tasks", nargs="+", choices=demos, default=demos, metavar="TASK")
    parser.add_argument("--rates", action="store_true", help="compare each demo's learning rate with --lr auto")
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()
    if arguments.rates:
        text = "\n".join(
            ["`python benchmarks/demos.py --rates`: one thread, one run each.", "", *measure_rates(arguments.tasks), ""]
        )
        print(text)
        if arguments.output is not None:
            arguments.output.write_text(text, encoding="utf-8")
        return
    load = os.getloadavg()[0]
    rows = []
    for task in arguments.tasks:
        with tempfile.TemporaryDirectory() as name:
            before = run_demo(task, untrained(task), Path(name) / "before")
            after = run_demo(task, (), Path(name) / "after")
        rows.append(row(task, before, after))
        print(rows[-1], file=sys.stderr, flush=True)
    machine = f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores, load at start"
    named = "" if arguments.tasks == demos else f" --tasks {' '.join(arguments.tasks)}"
    lines = [
        f"`python benchmarks/demos.py{named}`: one thread, one run each. {machine} {load:.1f}.",
        "",
        "| task | metric | before | after | also | floors | CPU-s of training | CPU-s in all | wall-s | prototype |",
        "|---|---|--:|--:|---|---|--:|--:|--:|---|",
        *rows,
        "",
        "Floors are what methods without a model reach on the same validation rows. `before` is the same model after",
        "one update with a learning rate of 0. The prototype's seconds are CPU seconds of its training alone.",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
