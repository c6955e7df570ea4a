"""Kills, faults and flipped bits: does a run that is broken off again and again end as if nothing had happened?

The run has dropout, augmentation that draws from torch, numpy and random, two loader workers, two micro-batches per
update, AdamW, a schedule, clipping, evaluations, and checkpoints written in the background. Every start of it is a
process of its own with `resume_from="auto"`, and every kill is a SIGKILL. First it runs without a fault. Every later
run must end with the same weights, must have fed the same augmented samples to the same updates (also those that a kill
made it repeat), and must report the same metrics.

    random kills      SIGKILL after a random time, again and again until the run is complete
    fault points      SIGKILL at a named point of the code, at a random one of its hits, through all points in turn
    flipped bits      one bit anywhere in the newest checkpoint: it must be found, and the run go on from the one before
    rank kills        --ranks: the run on two processes under torchrun, which starts both again when one is killed; the
                      oracle is a run of two processes without a fault

After every kill a valid checkpoint must be there, if there ever was one. Loader workers are not killed: they must end
by themselves, and those that are left are counted. The exit code is 1 if anything differed or failed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

SOURCE = Path(__file__).resolve().parents[1] / "src"
sys.path.insert(0, str(SOURCE))  # the package of this checkout, whichever is installed

from loopwright import Checkpointing, Trainer, failpoints  # noqa: E402
from loopwright.callbacks import TrainerCallback  # noqa: E402
from loopwright.checkpoint import Finding, verify_all  # noqa: E402

SAMPLES, BATCH_SIZE, ACCUMULATION, EPOCHS = 190, 4, 2, 2
UPDATES = EPOCHS * -(-SAMPLES // (BATCH_SIZE * ACCUMULATION))  # the last window of an epoch is short
SAVE_EVERY, EVALUATE_EVERY = 4, 10  # updates
SECONDS_PER_SAMPLE = 0.002  # so that the loop is long enough for kills to land everywhere in it
CHECKPOINTS, OUTCOME, OUTPUT, COMMITTED = "checkpoints", "outcome.json", "output.txt", "committed"
CLOCK_FIELDS = {"time", "seconds", "samples_per_second"}
EVENTS = {"log", "evaluation", "epoch"}  # other records of metrics.jsonl tell of starts and saves
ORPHAN_SECONDS = (3.0, 10.0)  # after a kill: when processes that are left are counted
HANGING_SECONDS = 120.0
FLIPS_PER_BASE = 20
MOST_RESTARTS = 1000
CHECKPOINTS_NEEDED = {"mid_load": 1, "mid_quarantine": 2}  # valid ones, for a start to pass that point at all


# ------------------------------------------------------------------ the run


class Samples(Dataset):
    """Samples that are augmented with all three generators; the target carries the sample's id."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(SECONDS_PER_SAMPLE)
        features = torch.sin(torch.arange(8) * (index + 1.0))
        features = features * random.uniform(0.8, 1.2) + torch.from_numpy(np.random.normal(0, 0.1, 8)).float()
        return torch.where(torch.rand(8) < 0.1, 0.0, features), torch.tensor([index % 3.0, float(index)])


def loss_function(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The squared error to the first column of the targets; the second one is the ids."""
    return (outputs - targets[:, :1]).square().mean()


class Journal(TrainerCallback):
    """Keeps what every update saw, and that a checkpoint was committed, in files that outlive the process."""

    asks_alike = True  # it asks for nothing

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.digest = hashlib.sha256()

    def on_train_step_end(self, trainer: Any, batch: Any = None, **kwargs: Any) -> None:
        for tensor in batch:
            self.digest.update(tensor.numpy().tobytes())

    def on_update_end(self, trainer: Any, **kwargs: Any) -> None:
        line = json.dumps([trainer.progress.update, self.digest.hexdigest()]) + "\n"
        with open(self.folder / f"seen-{os.environ.get('RANK', '0')}.jsonl", "ab", buffering=0) as file:
            file.write(line.encode())  # one system call: a kill leaves the whole line or none
        self.digest = hashlib.sha256()

    def on_checkpoint_saved(self, trainer: Any, **kwargs: Any) -> None:
        (self.folder / COMMITTED).touch()


def train(folder: Path) -> dict[str, Any]:
    """Start the run in a folder, or go on with it, and return what is compared once it is complete."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    trainer = Trainer(model, loss_function, optimizer, callbacks=[Journal(folder)])
    result = trainer.train(
        Samples(SAMPLES),
        EPOCHS,
        Samples(12),
        per_device_batch_size=BATCH_SIZE,
        gradient_accumulation_steps=ACCUMULATION,
        gradient_clip_norm=1.0,
        create_scheduler_fn=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=UPDATES),
        train_dataloader_kwargs={"num_workers": 2},
        eval_dataloader_kwargs={"num_workers": 0},
        seed=5,
        log_every=1,
        evaluate_every=EVALUATE_EVERY,
        checkpoints=Checkpointing(folder / CHECKPOINTS, every_updates=SAVE_EVERY),
        resume_from="auto",
    )
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    metrics = {"final": result.metrics, "history": trainer.run_history.state_dict(), "log": metrics_log(folder)}
    return {
        "weights": hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
        "sequence": hashlib.sha256(json.dumps(samples_seen(folder)).encode()).hexdigest(),
        "metrics": metrics,
    }


def samples_seen(folder: Path) -> list[tuple[tuple[str, int], list[str]]]:
    """The digests of what each update saw on each rank: one, unless a repeated one saw something else than before."""
    seen: dict[tuple[str, int], set[str]] = {}
    for path in sorted(folder.glob("seen-*.jsonl")):
        for line in path.read_text().splitlines():
            update, digest = json.loads(line)
            seen.setdefault((path.stem, update), set()).add(digest)
    return [(place, sorted(digests)) for place, digests in sorted(seen.items())]


def metrics_log(folder: Path) -> list[dict[str, Any]] | None:
    """The records of metrics.jsonl that a fault must not change, without their clock; None if there is no such file."""
    path = folder / CHECKPOINTS / "metrics.jsonl"
    if not path.exists():
        return None
    records = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [record for record in records if record.get("event") in EVENTS]
    return [{name: value for name, value in record.items() if name not in CLOCK_FIELDS} for record in kept]


# ------------------------------------------------------------------ processes

SERVER = multiprocessing.get_context("forkserver")  # one thread, everything imported: a start takes milliseconds
SERVER.set_forkserver_preload(["torch._dynamo", "accelerate", "loopwright.trainer", "__main__"])


def job(folder: Path, spec: str | None, is_counting: bool) -> None:
    """What a process does: train, perhaps with a fault armed, and leave the outcome in a file."""
    os.setsid()  # its loader workers are found by it when it is gone
    multiprocessing.set_start_method("fork", force=True)  # of the workers, as in a script: "forkserver" is inherited
    output = os.open(folder / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        if is_counting:
            failpoints.arm(",".join(f"{name}:*:sleep:0" for name in failpoints.FAILPOINTS))
        elif spec is not None:
            failpoints.arm(spec)
        outcome = train(folder)
        if is_counting:
            outcome["hits"] = {name: next(point[0]) - 1 for name, point in failpoints._points.items()}
        (folder / OUTCOME).write_text(json.dumps(outcome))
    except BaseException:  # noqa: BLE001 - told by the exit code
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


def launch_ranks(folder: Path, num_ranks: int) -> None:
    """What the launcher does: start the ranks, and start all of them again when one is lost."""
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.setsid()
    output = os.open(folder / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id="faults",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=MOST_RESTARTS,
        start_method="fork",
        logs_specs=DefaultLogsSpecs(str(folder / "logs")),
    )
    try:
        elastic_launch(config, rank_job)(folder)
    except BaseException:  # noqa: BLE001 - told by the exit code
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def rank_job(folder: Path) -> None:
    """What a rank does: train; the first leaves the outcome in a file."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    multiprocessing.set_start_method("fork", force=True)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # not the launcher's handlers, which a fork hands on
    rank = int(os.environ["RANK"])
    aside = folder / f".rank-{rank}"
    aside.write_text(str(os.getpid()))
    aside.rename(folder / f"rank-{rank}")
    outcome = train(folder)
    # What it hands to the launcher now goes through a pipe that a kill would block.
    (folder / f"rank-{rank}").unlink(missing_ok=True)
    if rank == 0:
        (folder / OUTCOME).write_text(json.dumps(outcome))


class Starter:
    """Starts processes, kills them if asked to, and counts what they leave behind."""

    def __init__(self) -> None:
        self.starts = 0
        self.orphans = [0, 0]  # processes still there after each of ORPHAN_SECONDS
        self._watched: deque[tuple[float, int, int]] = deque()  # when to look, for which session, for which figure

    def start(
        self, folder: Path, spec: str | None = None, kill_after: float | None = None, is_counting: bool = False
    ) -> int:
        """Run a process to its end, or to its kill, and return its exit code: -9 for a kill."""
        process = SERVER.Process(target=job, args=(folder, spec, is_counting))
        process.start()
        self.starts += 1
        process.join(HANGING_SECONDS if kill_after is None else kill_after)
        is_hanging = process.exitcode is None and kill_after is None
        process.kill()
        process.join()
        if is_hanging:
            with open(folder / OUTPUT, "a") as file:
                file.write(f"still running after {HANGING_SECONDS} s\n")
            return 1
        self.watch_session(process.pid)
        return process.exitcode

    def watch_session(self, process_id: int) -> None:
        """Count later what is left of the session of a process that has ended."""
        now = time.monotonic()
        self._watched.extend((now + seconds, process_id, index) for index, seconds in enumerate(ORPHAN_SECONDS))
        self.count_orphans()

    def count_orphans(self) -> None:
        """Count what is left of processes that ended long enough ago, and end what is left of the oldest."""
        now = time.monotonic()
        due = [entry for entry in self._watched if entry[0] <= now]
        if not due:
            return
        self._watched = deque(entry for entry in self._watched if entry[0] > now)
        living = processes_by_session()
        for _, session, index in due:
            self.orphans[index] += len(living.get(session, ()))
            if index == len(ORPHAN_SECONDS) - 1:
                for process_id in living.get(session, ()):
                    os.kill(process_id, signal.SIGKILL)

    def wait_for_orphans(self) -> None:
        """Wait until everything that was started is counted."""
        while self._watched:
            time.sleep(max(0.0, min(entry[0] for entry in self._watched) - time.monotonic()))
            self.count_orphans()


def processes_by_session() -> dict[int, list[int]]:
    """The living processes of this machine by their session; ended ones that nobody waited for do not count."""
    found: dict[int, list[int]] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                state, _, _, session = (path / "stat").read_text().rpartition(")")[2].split()[:4]
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended meanwhile
            if state not in "ZX":
                found.setdefault(int(session), []).append(int(path.name))
    return found


# ------------------------------------------------------------------ comparing


@dataclass
class Tally:
    """The figures of one section."""

    title: str
    faults: int = 0
    completed: int = 0
    divergences: Counter[str] = field(default_factory=Counter)
    moments_without_checkpoint: int = 0
    failed_starts: int = 0
    not_found: int = 0
    orphans: tuple[int, ...] = (0, 0)
    seconds_per_trial: float = 0.0

    @property
    def is_good(self) -> bool:
        bad = self.divergences.total() + self.moments_without_checkpoint + self.failed_starts + self.not_found
        return bad == 0


@dataclass
class Bench:
    """What the sections share: where they work, the run without faults, how long it takes, and how often it hits."""

    root: Path
    starter: Starter
    oracle: dict[str, Any]
    hits: dict[str, int]
    run_seconds: float

    def new_folder(self) -> Path:
        """A fresh, empty folder for a run."""
        return Path(tempfile.mkdtemp(prefix="run-", dir=self.root))

    def examine(self, folder: Path, tally: Tally) -> None:
        """After a kill: is there a valid checkpoint, if there ever was one?"""
        if valid_checkpoints(folder):
            (folder / COMMITTED).touch()
        elif (folder / COMMITTED).exists():
            tally.moments_without_checkpoint += 1
            print(f"{tally.title}: no valid checkpoint in {folder}", file=sys.stderr)

    def judge(self, folder: Path, code: int, tally: Tally) -> None:
        """At the end of a run: compare it; a folder without trouble is removed, another one kept."""
        if code != 0:
            tally.failed_starts += 1
            print(f"{tally.title}: {folder} failed\n{(folder / OUTPUT).read_text()[-2000:]}", file=sys.stderr)
            return
        tally.completed += 1
        outcome = json.loads((folder / OUTCOME).read_text())
        different = [name for name, expected in self.oracle.items() if outcome[name] != expected]
        tally.divergences.update(different)
        if different:
            print(f"{tally.title}: {folder} differs in {', '.join(different)}", file=sys.stderr)
        else:
            shutil.rmtree(folder)


def valid_checkpoints(folder: Path) -> list[Finding]:
    """The checkpoints of a run of which every byte is right, oldest first."""
    if not (folder / CHECKPOINTS).is_dir():
        return []
    return [finding for finding in verify_all(folder / CHECKPOINTS) if finding.problem is None]


def flip_bit(checkpoint: Path, draw: random.Random) -> str:
    """Flip one bit of a checkpoint, each bit of all its files being as likely, and say which."""
    files = sorted(path for path in checkpoint.iterdir() if path.is_file())
    position = draw.randrange(sum(path.stat().st_size for path in files))
    for path in files:
        if position < path.stat().st_size:
            break
        position -= path.stat().st_size
    data, bit = bytearray(path.read_bytes()), draw.randrange(8)
    data[position] ^= 1 << bit
    path.write_bytes(data)
    return f"{path.name}, byte {position}, bit {bit}"


def prepare(root: Path) -> Bench:
    """Run without faults: once for the oracle, once more to count the hits of every point and to take the time."""
    starter = Starter()
    outcomes = []
    for number in range(2):
        folder = root / f"oracle-{number}"
        folder.mkdir(parents=True)
        begin = time.monotonic()
        if starter.start(folder, is_counting=number == 1) != 0:
            raise SystemExit(f"the run without faults failed:\n{(folder / OUTPUT).read_text()}")
        seconds = time.monotonic() - begin
        outcomes.append(json.loads((folder / OUTCOME).read_text()))
        shutil.rmtree(folder)
    oracle, counted = outcomes
    hits = counted.pop("hits")
    if oracle != counted:
        raise SystemExit("two runs without faults differ, so there is nothing to compare with")
    log = oracle["metrics"]["log"]
    logged = range(1, UPDATES + 1) if log is None else [one["update"] for one in log if one["event"] == "log"]
    if list(logged) != list(range(1, UPDATES + 1)):
        raise SystemExit(f"metrics.jsonl of the run without faults does not hold each update once, in order: {logged}")
    return Bench(root, starter, oracle, hits, seconds)


# ------------------------------------------------------------------ the sections


def random_kills(bench: Bench, tally: Tally, count: int, draw: random.Random) -> None:
    """Kill runs at random moments; the last one is let go to its end."""
    while tally.faults < count:
        folder = bench.new_folder()
        code = -signal.SIGKILL
        while code == -signal.SIGKILL:
            seconds = draw.uniform(0, 0.9 * bench.run_seconds) if tally.faults < count else None
            code = bench.starter.start(folder, kill_after=seconds)
            if code == -signal.SIGKILL:
                tally.faults += 1
                bench.examine(folder, tally)
        bench.judge(folder, code, tally)
        tell(tally, count)


def failpoint_kills(bench: Bench, tally: Tally, count: int, draw: random.Random, kills: Counter[str]) -> None:
    """Kill runs at every named point in turn; a point that a start does not reach is tried again in the next run."""
    waiting = [name for name in failpoints.FAILPOINTS if bench.hits[name] or name in CHECKPOINTS_NEEDED]
    while tally.faults < count:
        folder = bench.new_folder()
        code = -signal.SIGKILL
        while code == -signal.SIGKILL:
            valid = valid_checkpoints(folder)
            left = UPDATES - (valid[-1].update if valid else 0)
            name = next(name for name in waiting if len(valid) >= CHECKPOINTS_NEEDED.get(name, 0))
            hit = draw.randint(1, max(1, bench.hits[name] * left // UPDATES))
            if tally.faults < count and name == "mid_quarantine":
                flip_bit(valid[-1].path, draw)
            code = bench.starter.start(folder, f"{name}:{hit}:kill" if tally.faults < count else None)
            if code == -signal.SIGKILL:
                tally.faults += 1
                kills[name] += 1
                waiting.remove(name)
                waiting.append(name)
                bench.examine(folder, tally)
        bench.judge(folder, code, tally)
        tell(tally, count)


def bit_flips(bench: Bench, tally: Tally, count: int, draw: random.Random) -> None:
    """Flip a bit of the newest checkpoint of copies of a killed run, and go on with each copy."""
    for base in bases(bench, count, draw):
        folder = bench.new_folder()
        shutil.copytree(base, folder, dirs_exist_ok=True)
        newest = valid_checkpoints(folder)[-1].path
        flipped = flip_bit(newest, draw)
        tally.faults += 1
        if newest in [finding.path for finding in valid_checkpoints(folder)]:
            tally.not_found += 1
            print(f"{tally.title}: not found in {newest}: {flipped}", file=sys.stderr)
        bench.examine(folder, tally)
        bench.judge(folder, bench.starter.start(folder), tally)
        tell(tally, count)


def run_ranks(bench: Bench, folder: Path, num_ranks: int, kill: Callable[[], float | None]) -> int:
    """Run the ranks under their launcher to the end, and return its exit code; -9 if they hung.

    Args:
        bench: counts starts and orphans.
        folder: of the run.
        num_ranks: how many.
        kill: kills a rank, perhaps, and returns the seconds until it is to be called again; None is never.
    """
    process = SERVER.Process(target=launch_ranks, args=(folder, num_ranks))
    process.start()
    bench.starter.starts += 1
    deadline = time.monotonic() + HANGING_SECONDS
    while process.exitcode is None and time.monotonic() < deadline:
        wait = kill()
        if wait is not None:
            deadline = time.monotonic() + HANGING_SECONDS
        process.join(HANGING_SECONDS if wait is None else wait)
    process.kill()
    process.join()
    bench.starter.watch_session(process.pid)
    return process.exitcode


def rank_kills(bench: Bench, tally: Tally, count: int, draw: random.Random, num_ranks: int) -> None:
    """Kill a random rank at random moments; nobody but the launcher starts the ranks again."""
    outcomes, begin = [], time.monotonic()
    for number in range(2):
        folder = bench.root / f"ranks-{number}"
        folder.mkdir()
        if run_ranks(bench, folder, num_ranks, lambda: None) != 0:
            raise SystemExit(f"the ranks without a fault failed:\n{(folder / OUTPUT).read_text()[-4000:]}")
        outcomes.append(json.loads((folder / OUTCOME).read_text()))
        shutil.rmtree(folder)
    if outcomes[0] != outcomes[1]:
        raise SystemExit("two runs of the ranks without faults differ, so there is nothing to compare with")
    seconds = (time.monotonic() - begin) / 2
    bench = replace(bench, oracle=outcomes[0])

    while tally.faults < count:
        folder = bench.new_folder()

        def kill(folder: Path = folder) -> float | None:
            path = folder / f"rank-{draw.randrange(num_ranks)}"
            if path.exists() and tally.faults < count:
                with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                    os.kill(int(path.read_text()), signal.SIGKILL)
                    tally.faults += 1
                    path.unlink()  # the next one has to have begun before it can be killed
                    tell(tally, count)
            return draw.uniform(0.2, 0.9) * seconds if tally.faults < count else None

        code = run_ranks(bench, folder, num_ranks, kill)
        bench.examine(folder, tally)
        bench.judge(folder, code, tally)
        tell(tally, count)


def bases(bench: Bench, count: int, draw: random.Random) -> Iterator[Path]:
    """Yield killed runs with three checkpoints or more, the same one several times in a row."""
    for number in range(count):
        if number % FLIPS_PER_BASE == 0:
            base = bench.new_folder()
            hit = draw.randint(3, max(3, bench.hits["after_commit"] - 2))
            code = bench.starter.start(base, f"after_commit:{hit}:kill")
            if code != -signal.SIGKILL or len(valid_checkpoints(base)) < 3:
                raise SystemExit(f"{base} should hold a killed run with three checkpoints; its exit code was {code}")
        yield base
        if number % FLIPS_PER_BASE == FLIPS_PER_BASE - 1 or number == count - 1:
            shutil.rmtree(base)


def tell(tally: Tally, count: int) -> None:
    """Show how far a section is."""
    print(f"\r{tally.title}: {tally.faults}/{count}, {tally.completed} runs complete", end="", file=sys.stderr)


# ------------------------------------------------------------------ reporting

HEADER = """\
| section | faults | runs completed | divergences: weights / sequence / metrics | moments without a valid checkpoint \
| not found | failed starts | orphans after 3 s / 10 s | seconds per trial |
|---|--:|--:|--:|--:|--:|--:|--:|--:|"""

NOTES = """\
A trial is one start of a process. Weights: sha256 of the final weights. Sequence: sha256 over the ids and augmented
samples of every update, repeated updates included. Metrics: final metrics, the whole history, and the records of
metrics.jsonl without their clock. Not found: flipped bits that verifying did not find. Orphans: processes of killed
runs that are still there so long after; nothing but their own watch on their parent ends them."""


def row(tally: Tally) -> str:
    """A line of the table."""
    different = " / ".join(str(tally.divergences[name]) for name in ("weights", "sequence", "metrics"))
    figures = [tally.faults, tally.completed, different, tally.moments_without_checkpoint, tally.not_found]
    figures += [tally.failed_starts, " / ".join(map(str, tally.orphans)), f"{tally.seconds_per_trial:.2f}"]
    return f"| {tally.title} | {' | '.join(map(str, figures))} |"


def measured(bench: Bench, title: str, count: int, seed: int, section: Callable[..., None], *more: Any) -> Tally:
    """Run a section from a seed of its own, and return its figures."""
    tally = Tally(title)
    starts, orphans, begin = bench.starter.starts, list(bench.starter.orphans), time.monotonic()
    section(bench, tally, count, random.Random(f"{seed} {title}"), *more)
    tally.seconds_per_trial = (time.monotonic() - begin) / max(bench.starter.starts - starts, 1)
    bench.starter.wait_for_orphans()
    tally.orphans = tuple(after - before for after, before in zip(bench.starter.orphans, orphans, strict=True))
    print(file=sys.stderr)
    return tally


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Kills, faults and flipped bits against a run without them")
    parser.add_argument("--random-kills", type=int, default=200, help="kills at random moments (default 200, 0: none)")
    parser.add_argument("--failpoint-kills", type=int, default=200, help="kills at named points (default 200, 0: none)")
    parser.add_argument("--bit-flips", type=int, default=200, help="flipped bits (default 200, 0: none)")
    parser.add_argument("--ranks", type=int, nargs="?", const=2, help="run the rank kills alone, on so many ranks (2)")
    parser.add_argument("--rank-kills", type=int, default=50, help="kills of a rank, with --ranks (default 50)")
    parser.add_argument("--seed", type=int, default=0, help="of moments, hits and bits (default 0)")
    parser.add_argument("--folder", type=Path, help="where the runs lie (default: a temporary folder)")
    parser.add_argument("--output", type=Path, help="also write the report to this file")
    return parser.parse_args()


def main() -> int:
    """Run what was asked for, print the table, and judge it."""
    arguments = parse_arguments()
    # The server is a fresh process: it finds the package and its one thread by these.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
    os.environ.update({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"})
    load = os.getloadavg()[0]
    if arguments.folder is not None:
        arguments.folder.mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix="loopwright-faults-", dir=arguments.folder))
    bench = prepare(root)
    kills: Counter[str] = Counter()
    sections = [
        ("random kills", arguments.random_kills, arguments.seed, random_kills),
        ("fault points", arguments.failpoint_kills, arguments.seed, failpoint_kills, kills),
        ("flipped bits", arguments.bit_flips, arguments.seed, bit_flips),
    ]
    if arguments.ranks is not None:
        sections = [("rank kills", arguments.rank_kills, arguments.seed, rank_kills, arguments.ranks)]
    tallies = [measured(bench, *section) for section in sections if section[1] > 0]

    machine = f"Python {platform.python_version()}, torch {torch.__version__}, {platform.platform()}"
    settings = f"a run of {UPDATES} updates and {bench.run_seconds:.1f} s, "
    log = bench.oracle["metrics"]["log"]
    settings += "without a metrics.jsonl" if log is None else f"{len(log)} records of metrics.jsonl compared"
    heading = f"`python {' '.join(sys.argv)}`: {settings}. {machine}, {os.cpu_count()} cores, load at start {load:.1f}."
    report = [heading, "", HEADER, *(row(tally) for tally in tallies), "", NOTES]
    if kills:
        report += ["", f"Kills by point: {', '.join(f'{name} {kills[name]}' for name in failpoints.FAILPOINTS)}."]
    is_good = all(tally.is_good for tally in tallies)
    if is_good:
        shutil.rmtree(root)
    else:
        print(f"what went wrong lies in {root}", file=sys.stderr)
    print("\n".join(report))
    if arguments.output:
        arguments.output.write_text("\n".join(report) + "\n")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
