"""Recovery: how much time and work does a supervised run lose when its process is killed again and again?

`lw train --supervise` trains a text classifier whose samples take their time to be fetched: an update mostly waits for
data, so that the figures depend little on the number of cores. The process that trains is killed with SIGKILL at
exponentially distributed intervals, from its first update to its end, also while it restarts and evaluates; the
supervisor is not. The reference is the same run without a kill and without supervision.

    goodput           wall time of the undisturbed run over wall time of this one, for the same updates
    work lost         seconds of training before a kill that the restarted process repeats
    to next update    seconds from a kill to the first update of the restarted process

The final weights and predictions, the samples of every update (repeated ones included), and the records of
metrics.jsonl without their clock must equal those of the undisturbed run. All runs are executed at the same time unless
`--one-by-one` is given. The exit code is 1 if anything differs or a run fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

SOURCE = Path(__file__).resolve().parents[1] / "src"
ROWS, BATCH = 4000, 8
SECONDS_PER_SAMPLE = 0.004
SECONDS_PER_UPDATE = 0.042  # about, with its computation
CLOCK_FIELDS = {"time", "seconds", "samples_per_second"}
OTHER_EVENTS = {"start", "checkpoint", "end", "speed"}  # they tell of starts, saves and the clock
LOOK_SECONDS = 0.01
COMMAND = [sys.executable, "-m", "loopwright"]
# A package that offers a task: text classification with slow samples and a journal of its updates.
PACKAGE = {
    "slow_reviews-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: slow-reviews\nVersion: 1.0\n",
    "slow_reviews-1.0.dist-info/entry_points.txt": "[loopwright.tasks]\nslow-reviews = slow_reviews:SlowReviews\n",
    "slow_reviews.py": """
from loopwright.tasks.text.classification import TextClassification

class SlowReviews(TextClassification):
    name = "slow-reviews"

    def create_dataset(self, job, rows, *, is_labelled, is_training=False):
        dataset = super().create_dataset(job, rows, is_labelled=is_labelled, is_training=is_training)
        if is_training:
            from slow_parts import slowed
            dataset.__class__ = slowed(type(dataset))
        return dataset

    def callbacks(self, job, run):
        from slow_parts import Journal
        return [*super().callbacks(job, run), Journal(run.path)]
""",
    "slow_parts.py": f"""
import functools, hashlib, os, time
from loopwright.callbacks import TrainerCallback

@functools.cache
def slowed(kind):
    class Slow(kind):
        def __getitem__(self, index):
            time.sleep({SECONDS_PER_SAMPLE})
            return super().__getitem__(index)
    return Slow

class Journal(TrainerCallback):
    asks_alike = True

    def __init__(self, path):
        self.file = os.open(str(path) + ".updates", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def on_train_step_end(self, trainer, batch=None, **kwargs):
        self.digest = hashlib.sha256(batch["input_ids"].numpy().tobytes()).hexdigest()

    def on_update_end(self, trainer, **kwargs):
        line = f"{{trainer.progress.update}} {{time.time()}} {{os.getpid()}} {{self.digest}}\\n"
        os.write(self.file, line.encode())
""",
}


@dataclass
class Update:
    number: int
    time: float
    process: int
    digest: str


@dataclass
class Trial:
    """A run, and when its process was killed; `mean_seconds` is between two kills, None for the undisturbed run."""

    folder: Path
    num_updates: int
    mean_seconds: float | None
    seed: int
    kills: list[tuple[float, int]] = field(default_factory=list)  # time, process
    seconds: float = 0.0
    code: int | None = None

    def run(self) -> None:
        words = ["train", "slow-reviews", "--data", "reviews.csv", "--batch", str(BATCH), "--threads", "1"]
        words += ["--max_steps", str(self.num_updates), "--max_eval_samples", "200", "--quiet"]
        words += ["--out", self.folder.name, *([] if self.mean_seconds is None else ["--supervise"])]
        begin = time.monotonic()
        with open(f"{self.folder}.txt", "wb") as output:
            process = subprocess.Popen([*COMMAND, *words], cwd=self.folder.parent, stdout=output, stderr=output)
            if self.mean_seconds is not None:
                self._kill(process)
            self.code = process.wait()
        self.seconds = time.monotonic() - begin

    def _kill(self, supervisor: subprocess.Popen[bytes]) -> None:
        draw = random.Random(self.seed)
        journal = Path(f"{self.folder}.updates")
        while not journal.exists() and supervisor.poll() is None:
            time.sleep(LOOK_SECONDS)
        children = Path(f"/proc/{supervisor.pid}/task/{supervisor.pid}/children")
        while True:
            moment = time.time() + draw.expovariate(1 / self.mean_seconds)
            while time.time() < moment:
                if supervisor.poll() is not None:
                    return
                time.sleep(LOOK_SECONDS)
            with contextlib.suppress(OSError, IndexError):
                child = int(children.read_text().split()[0])
                os.kill(child, signal.SIGKILL)
                self.kills.append((time.time(), child))

    def updates(self) -> list[Update]:
        lines = [line.split() for line in Path(f"{self.folder}.updates").read_text().splitlines()]
        return [Update(int(number), float(when), int(process), digest) for number, when, process, digest in lines]

    def recoveries(self) -> tuple[list[float], list[float]]:
        """Return the seconds of work lost, and to the next update; of kills that another one followed first, none."""
        updates, lost, waited = self.updates(), [], []
        for index, (when, process) in enumerate(self.kills):
            after = next((each for each in updates if each.time > when and each.process != process), None)
            next_kill = self.kills[index + 1][0] if index + 1 < len(self.kills) else float("inf")
            if after is None or after.time > next_kill:
                continue
            waited.append(after.time - when)
            done = [each for each in updates if each.time <= when and each.process == process]
            repeated = [each for each in done if each.number >= after.number]
            # What the killed process did from the first of them on; also what was in progress.
            begun = repeated[0].time - SECONDS_PER_UPDATE if repeated else (done[-1].time if done else when)
            lost.append(when - begun)
        return lost, waited

    def outcome(self) -> dict[str, Any]:
        records = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        seen: dict[int, set[str]] = {}
        for update in self.updates():
            seen.setdefault(update.number, set()).add(update.digest)
        return {
            "weights": (self.folder / "model" / "model.safetensors").read_bytes(),
            "predictions": (self.folder / "eval" / "predictions.jsonl").read_bytes(),
            "order": seen,
            "metrics": [
                {name: value for name, value in record.items() if name not in CLOCK_FIELDS}
                for record in records
                if record["event"] not in OTHER_EVENTS
            ],
        }


def prepare(root: Path) -> None:
    for name, text in PACKAGE.items():
        path = root / "package" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    draw, words = random.Random(0), {"pos": ("great", "lovely", "superb"), "neg": ("awful", "dull", "poor")}
    rows = [(number, draw.choice(("pos", "neg"))) for number in range(ROWS)]
    lines = [f"{draw.choice(words[label])} film {draw.random():.6f} {number},{label}" for number, label in rows]
    (root / "reviews.csv").write_text("\n".join(["review,stars", *lines]))
    paths = [str(root / "package"), str(SOURCE), os.environ.get("PYTHONPATH", "")]
    os.environ.update(PYTHONPATH=os.pathsep.join(paths), OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")


def figures(values: list[float]) -> str:
    return f"{fmean(values):.2f} / {max(values):.2f}" if values else "-"


def row(trial: Trial, reference: Trial, different: list[str]) -> str:
    lost, waited = trial.recoveries()
    cells = [f"one per {trial.mean_seconds:g} s", len(trial.kills), f"{reference.seconds:.1f}", f"{trial.seconds:.1f}"]
    cells += [f"{100 * reference.seconds / trial.seconds:.1f} %", figures(lost), figures(waited)]
    cells += [len(trial.kills) - len(waited), ", ".join(different) or "none"]
    return f"| {' | '.join(map(str, cells))} |"


HEADER = """\
| kills | number | seconds undisturbed | seconds | goodput | work lost, s: mean / max | to next update, s: mean / max \
| of kills before the next update, or after the last | differences |
|---|--:|--:|--:|--:|--:|--:|--:|---|"""


def main() -> int:
    parser = argparse.ArgumentParser(description="A supervised run that is killed again and again")
    parser.add_argument("--seconds", type=float, default=600, help="of the undisturbed training (default 600)")
    parser.add_argument("--means", type=float, nargs="+", default=[20, 120], help="seconds between kills (20 120)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default 0)")
    parser.add_argument("--one-by-one", action="store_true", help="one run after the other")
    parser.add_argument("--output", type=Path, help="also write the report to this file")
    arguments = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="loopwright-recovery-"))
    prepare(root)
    load, num_updates = os.getloadavg()[0], round(arguments.seconds / SECONDS_PER_UPDATE)
    names = [("whole", None), *((f"killed-{mean:g}", mean) for mean in arguments.means)]
    trials = [Trial(root / name, num_updates, mean, arguments.seed) for name, mean in names]
    threads = [threading.Thread(target=trial.run) for trial in trials]
    for thread in threads:
        thread.start()
        if arguments.one_by_one:
            thread.join()
    for thread in threads:
        thread.join()
    reference, *killed = trials
    failed = [trial for trial in trials if trial.code != 0]
    for trial in failed:
        print(f"{trial.folder.name} ended with {trial.code}:\n{Path(f'{trial.folder}.txt').read_text()[-3000:]}")
    if failed:
        return 1
    expected, rows, is_good = reference.outcome(), [], True
    for trial in killed:
        outcome = trial.outcome()
        different = [name for name in expected if outcome[name] != expected[name]]
        is_good = is_good and not different
        rows.append(row(trial, reference, different))
    how = "one after the other" if arguments.one_by_one else "at the same time"
    machine = f"Python {platform.python_version()}, {platform.platform()}, {os.cpu_count()} cores"
    heading = (
        f"`python {' '.join(sys.argv)}`: {num_updates:,} updates, {len(trials)} runs {how}. {machine}, load {load:.1f}."
    )
    report = "\n".join([heading, "", HEADER, *rows])
    print(report)
    if arguments.output:
        arguments.output.write_text(report + "\n")
    print(f"the runs are in {root}", file=sys.stderr)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
