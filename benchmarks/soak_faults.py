"""The processes and the faults of soak.py."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import multiprocessing
import os
import platform
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any

import faults  # the script with a plain Trainer, and the package of this checkout
import torch
import yaml

from loopwright import failpoints
from loopwright.errors import LoopwrightError

RUN, OUTPUT = "run", "output.txt"
TEXT = "text-classification --data ../data/rows.csv --dropout 0.1 --dataloader_num_workers 2"
IMAGE = "image-classification --data ../data/pictures --image_size 24 --workers 2"
COMMON = (
    "--batch 8 --save_strategy steps --save_steps 25 --eval_strategy steps --eval_steps 50 --logging_steps 1 --plain"
)
COMMANDS = {
    "text": f"train {TEXT} {COMMON} --out run --max_steps".split(),
    "image": f"train {IMAGE} {COMMON} --out run --max_steps".split(),
    "script": ["script"],
}
LENGTHS = {"text": 900, "image": 1000, "script": 60}  # updates, updates, epochs
HANGING_SECONDS = 60.0
REFUSED = {2, 65, 74}


# ------------------------------------------------------------------ what runs in a process of its own


def journal(folder: Path) -> None:
    """Write down what every update sees, in a file that outlives the process."""
    from loopwright.runs.trainer import TaskTrainer

    digest, call_event, create = hashlib.sha256(), TaskTrainer.call_event, TaskTrainer.__init__

    def remember(self: Any, *args: Any, **kwargs: Any) -> None:
        self.is_soaked = not kwargs.get("is_rehearsal", False)
        create(self, *args, **kwargs)

    def listen(self: Any, event: str, **kwargs: Any) -> None:
        nonlocal digest
        call_event(self, event, **kwargs)
        if self.is_soaked and event == "on_train_step_end":
            for leaf in torch.utils._pytree.tree_leaves(kwargs["batch"]):
                digest.update(leaf.numpy().tobytes() if isinstance(leaf, torch.Tensor) else repr(leaf).encode())
        elif self.is_soaked and event == "on_update_end":
            with open(folder / "seen-0.jsonl", "ab", buffering=0) as file:
                file.write((json.dumps([self.progress.update, digest.hexdigest()]) + "\n").encode())
            digest = hashlib.sha256()

    TaskTrainer.__init__, TaskTrainer.call_event = remember, listen


def change_weather(weather: Any) -> None:
    """Let the soak slow down every sync, and shift the clock, of this process."""
    sync, clock = os.fsync, time.time
    time.time = lambda: clock() + weather[1]

    def slow(descriptor: Any) -> None:
        time.sleep(weather[0])
        sync(descriptor)

    os.fsync = slow


def obey_permissions() -> None:
    """Take from root the right to write what is read-only."""
    head, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None)
    libc.capget(head, data)
    data[0] &= ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH: effective
    libc.capset(head, data)


def child(folder: Path, words: list[str], weather: Any, failpoint: str | None, limits: dict[int, int]) -> None:
    """Run a command line, or the script, in a folder."""
    os.setsid()
    os.chdir(folder)
    multiprocessing.set_start_method("fork", force=True)  # of the workers, as for a command line
    output = os.open(folder / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    obey_permissions()
    change_weather(weather)
    if failpoint is not None:
        failpoints.arm(failpoint)
    for name, most in limits.items():
        resource.setrlimit(name, (most, resource.getrlimit(name)[1]))
    if words[0] == "script":
        code = script(folder, int(words[1]))
    else:
        from loopwright.cli import main

        journal(folder)
        code = main(words)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def script(folder: Path, epochs: int) -> int:
    """Train as faults.py does; return an exit code as the command line would."""
    faults.EPOCHS, faults.UPDATES = epochs, 24 * epochs
    try:
        outcome = faults.train(folder)
        if any(record["event"] == "end" and record["state"] == "stopped" for record in last_records(folder)):
            return 75
        (folder / faults.OUTCOME).write_text(json.dumps(outcome))
        return 0
    except KeyboardInterrupt:
        return 130
    except (LoopwrightError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 75 if type(error).__name__ == "Preempted" else 74 if isinstance(error, OSError) else 2
    except Exception:  # noqa: BLE001 - told by the exit code
        faults.traceback.print_exc()
        return 1


def last_records(folder: Path) -> list[dict[str, Any]]:
    """The last record of the script's metrics.jsonl, if it can be read."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return [json.loads((folder / faults.CHECKPOINTS / "metrics.jsonl").read_text().splitlines()[-1])]
    return []


SERVER = multiprocessing.get_context("forkserver")  # one thread, everything imported: a start takes milliseconds
MODELS = "transformers.models.modernbert.modeling_modernbert"
SERVER.set_forkserver_preload(
    ["torch._dynamo", "accelerate", "loopwright.runs.train", "PIL.Image", MODELS, "soak_faults"]
)


class Start:
    """A started process, and its memory and descriptors over time."""

    def __init__(self, process: Any, weather: Any = None, is_supervised: bool = False) -> None:
        self.process, self.pid, self.weather, self.is_supervised = process, process.pid, weather, is_supervised
        self.begin = time.monotonic()
        self.samples: list[tuple[float, float, int]] = []  # seconds, MB, descriptors

    @property
    def code(self) -> int | None:
        return self.process.poll() if isinstance(self.process, subprocess.Popen) else self.process.exitcode

    def sample(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
            descriptors = len(os.listdir(f"/proc/{self.pid}/fd"))
            self.samples.append((time.monotonic() - self.begin, pages * resource.getpagesize() / 1e6, descriptors))

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


def parent_of(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def descendants(pid: int) -> dict[int, str]:
    """The living processes below one, with the tick at which each started."""
    parents, ticks = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            values = path.read_text().rpartition(")")[2].split()
            if values[0] not in "ZX":
                parents[int(path.parent.name)], ticks[int(path.parent.name)] = int(values[1]), values[19]
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return {process: ticks[process] for process in found - {pid}}


def left_alive(processes: dict[int, str]) -> list[int]:
    """Those that still live."""
    living = []
    for pid, tick in processes.items():
        with contextlib.suppress(OSError):
            values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if values[0] not in "ZX" and values[19] == tick:
                living.append(pid)
    return living


# ------------------------------------------------------------------ a run under faults


@dataclass
class Damage:
    """Something that a fault did to a file or folder, and what it was before."""

    path: Path
    before: Path | None  # a copy; None: there was nothing
    after: bytes | None  # the content that the fault left; None: not a plain file
    whole: Path | None = None  # the checkpoint that it belongs to
    kind: str = ""

    def undo(self) -> None:
        """Put it back, unless the run has replaced it since."""
        target = self.whole or self.path
        is_file = self.path.is_file()
        if self.whole is None and is_file and self.path.read_bytes() != self.after:
            return
        with contextlib.suppress(OSError):
            shutil.rmtree(target) if target.is_dir() else target.unlink()
        if self.before is not None and self.before.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if self.before.is_dir() else shutil.copy2)(self.before, target)


@dataclass
class Trial:
    """A run from its first start to its end."""

    name: str
    folder: Path
    total: int  # updates
    draw: random.Random
    damages: list[Damage] = field(default_factory=list)
    described: list[str] = field(default_factory=list)  # every fault and every end, in order
    log_damages: int = 0  # of metrics.jsonl: lines that a fault may have changed
    is_journal_whole: bool = True

    @property
    def run(self) -> Path:
        return self.folder / (RUN if self.name != "script" else faults.CHECKPOINTS)

    @property
    def update(self) -> int:
        """The newest update that is surely done."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            return json.loads((self.folder / "seen-0.jsonl").read_text().splitlines()[-1])[0]
        return 0

    def checkpoints(self) -> list[Path]:
        """The finished checkpoints, the newest last."""
        return sorted(path.parent for path in self.run.rglob("MANIFEST.json") if path.parent.name.startswith("step-"))

    def any_file(self) -> Path | None:
        """A random plain file of the run folder."""
        found = [path for path in sorted(self.run.rglob("*")) if path.is_file() and path.name != ".lock"]
        return self.draw.choice(found) if found else None

    def damage(self, path: Path, change: Callable[[Path], None]) -> bool:
        """Change a file or folder, and keep what it was."""
        kept = self.folder / f"kept-{len(self.described)}-{time.monotonic_ns()}"
        whole = next((part for part in (path, *path.parents) if part.name.startswith("step-")), None)
        source = whole or path
        try:
            if source.exists():
                (shutil.copytree if source.is_dir() else shutil.copy2)(source, kept)
            change(path)
        except OSError:  # the run has removed it meanwhile
            return False
        after = path.read_bytes() if path.is_file() else None
        self.log_damages += path.name == "metrics.jsonl"
        self.damages.append(Damage(path, kept if kept.exists() else None, after, whole))
        self.described.append(f"      {path.relative_to(self.folder)}")
        return True

    def is_named(self, text: str) -> bool:
        """Whether an error names something that was damaged."""
        names = {part for damage in self.damages for part in (damage.path.name, damage.path.parent.name)}
        return not self.damages or any(name in text for name in names - {RUN, "checkpoints"}) or "checkpoint" in text


# ------------------------------------------------------------------ the kinds of faults

Act = Callable[[Trial, Any], Any]


@dataclass
class Kind:
    """A kind of fault.

    Attributes:
        when: "rest": between two starts; "start": armed at a start; "live": in a running process.
        act: does it. At rest and live it returns whether there was something to do; at a start, what to start with.
        codes: exit codes that it explains.
        is_gentle: a process outlives it.
    """

    when: str
    act: Act
    codes: set[int] = field(default_factory=set)
    is_gentle: bool = False
    weight: float = 1.0


def flip(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    with open(path, "r+b") as file:
        file.write(content)


def on_any_file(change: Callable[[Path, random.Random], None]) -> Act:
    def act(trial: Trial, start: Any) -> bool:
        path = trial.any_file()
        if not path or not path.stat().st_size or not trial.damage(path, lambda path: change(path, trial.draw)):
            return False
        if change is flip and path == trial.run / "config.yaml" and is_edited(trial.damages[-1]):
            trial.damages.pop().undo()
            return False
        return True

    return act


def is_edited(damage: Damage) -> bool:
    """Whether a damaged config.yaml reads as settings: it is taken for an edit of the user, whose values count."""
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
        return isinstance(yaml.safe_load(damage.path.read_text()), dict)
    return False


def cut(path: Path, draw: random.Random) -> None:
    os.truncate(path, draw.randrange(path.stat().st_size))


def make_fifo(path: Path, draw: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def lose_status(trial: Trial, start: Any) -> bool:
    path = trial.run / "status.json"
    return path.is_file() and trial.damage(path, Path.unlink)


def lose_newest(trial: Trial, start: Any) -> bool:
    found = trial.checkpoints()
    return bool(found) and trial.damage(found[-1], shutil.rmtree)


def leave_litter(trial: Trial, start: Any) -> bool:
    """What killed programs leave behind: temporary files, empty folders, half a checkpoint."""
    if not trial.run.is_dir():
        return False
    places = [path for path in (trial.run, trial.run / "checkpoints", trial.run / "model") if path.is_dir()]
    place, number = trial.draw.choice(places), trial.draw.randrange(10**6)
    names = [f".tmp-{number}", f"status.json.{number}.tmp", f".step-{number:010d}.tmp", f"step-{number:010d}"]
    path = place / trial.draw.choice(names)
    if path.suffix == ".tmp" and "step" not in path.name:
        path.write_bytes(os.urandom(100))
    else:
        path.mkdir(exist_ok=True)
        (path / "model.safetensors").write_bytes(os.urandom(100))
    trial.described.append(f"      {path.relative_to(trial.folder)}")
    return True


def spoil_index(trial: Trial, start: Any) -> bool:
    path = trial.folder / "runs" / "index.jsonl"
    if not path.is_file():
        return False
    lines = [b'{"id": "x"', b"\xff\xfe\x00junk", b"[1, 2]", b'{"id": 7, "path": null}', b"null", b'"', b"{}", b"9" * 9]
    with path.open("ab") as file:
        file.write(trial.draw.choice(lines) + b"\n")
    return True


def leave_lease(trial: Trial, start: Any) -> bool:
    """A lease of a dead process, of another host, of the future, or nonsense."""
    if not trial.run.is_dir():
        return False
    now, path = time.time(), trial.run / "lease.json"
    owner = {"incarnation": "0" * 32, "host": platform.node(), "pid": 2**22 - 1, "boot_id": "", "process_start": 1}
    owner |= {"started_at": now - 1e5, "heartbeat": now - 9e4}
    other = {**owner, "host": "elsewhere", "boot_id": "another"}
    kinds = [owner, {**owner, "heartbeat": now}, other, {**other, "heartbeat": now + 1e6}, {"host": 3}]
    text = json.dumps(trial.draw.choice(kinds))
    return trial.damage(path, lambda path: path.write_text(text) and None)


def forbid_writing(trial: Trial, start: Start | None) -> bool:
    """A folder that cannot be written: for a start, or for two seconds of a running process."""
    folders = [path for path in (trial.run, trial.run / "checkpoints") if path.is_dir()]
    if not folders:
        return False
    folder = trial.draw.choice(folders)
    folder.chmod(0o555)
    if start is not None:
        time.sleep(2)
        with contextlib.suppress(OSError):
            folder.chmod(0o755)
    return True


def stop_and_go(trial: Trial, start: Start) -> bool:
    start.signal(signal.SIGSTOP)
    time.sleep(trial.draw.uniform(0.5, 4))
    start.signal(signal.SIGCONT)
    return True


def slow_disk(trial: Trial, start: Start) -> bool:
    if start.weather is not None:
        start.weather[0] = trial.draw.uniform(0.05, 0.5) if start.weather[0] == 0 else 0.0
    return start.weather is not None


def jump_clock(trial: Trial, start: Start) -> bool:
    if start.weather is not None:
        start.weather[1] = trial.draw.choice([-1, 1]) * 10 ** trial.draw.uniform(1, 7)
    return start.weather is not None


def kill_worker(trial: Trial, start: Start) -> bool:
    found = sorted(descendants(start.pid))
    if found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(trial.draw.choice(found), signal.SIGKILL)
    return bool(found)


def move_folder(trial: Trial, start: Start | None) -> bool:
    """Move the folder away and back after a while; what the process wrote to a new one is given up."""
    away = trial.folder / "away"
    if not trial.run.is_dir() or away.exists():
        return False
    trial.run.rename(away)
    deadline = time.monotonic() + trial.draw.uniform(0.05, 3)
    while start is not None and time.monotonic() < deadline and start.code is None:
        time.sleep(0.05)
    if start is None or not trial.run.exists():
        away.rename(trial.run)
    return True


def send(number: int) -> Act:
    def act(trial: Trial, start: Start) -> bool:
        start.signal(number)
        return True

    return act


def ask_to_stop(trial: Trial, start: Start) -> bool:
    if trial.name == "script" or not (trial.run / "status.json").exists():
        return False
    process = SERVER.Process(target=child, args=(trial.folder, ["stop", RUN], RawArray("d", 2), None, {}))
    process.start()
    process.join(HANGING_SECONDS)
    return True


def at(names: str, most: int, action: str) -> Act:
    """Arm one of some points of the code, at one of its first hits."""
    return lambda trial, _: {"failpoint": f"{trial.draw.choice(names.split())}:{trial.draw.randint(1, most)}:{action}"}


def in_rehearsal(trial: Trial, start: Any) -> dict[str, Any] | None:
    points = "after_backward after_optimizer_step mid_eval mid_write pre_rename after_commit mid_load"
    return None if trial.run.exists() or trial.name == "script" else at(points, 1, "kill")(trial, start)


def in_resume(trial: Trial, start: Any) -> dict[str, Any] | None:
    if not trial.checkpoints():
        return None
    return trial.draw.choice([{"failpoint": "mid_load:1:kill"}, {"kill_after": trial.draw.uniform(0.05, 1.5)}])


def in_final_phase(trial: Trial, start: Any) -> dict[str, Any] | None:
    if trial.update < 0.6 * trial.total:
        return None
    armed = {"failpoint": f"{trial.draw.choice(['before_final_save', 'run_end'])}:1:kill"}
    return {**trial.draw.choice([armed, {"kill_at_end": trial.draw.uniform(0, 1.5)}]), "is_quiet": True}


def of_launcher(trial: Trial, start: Any) -> dict[str, Any] | None:
    if trial.name == "script" or not trial.checkpoints():
        return None
    return {"prefix": ["launch", "-n", "1", "--"], "kill_after": trial.draw.uniform(1, 14)}


def of_supervisor(trial: Trial, start: Any) -> dict[str, Any] | None:
    if trial.name == "script":
        return None
    return {"prefix": [], "suffix": ["--supervise"], "kill_after": trial.draw.uniform(10, 60)}


def kill_trainer(trial: Trial, start: Start) -> bool:
    """Kill the process that a supervisor has started."""
    found = [pid for pid in descendants(start.pid) if parent_of(pid) == start.pid] if start.is_supervised else []
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    return bool(found)


def limited(name: int, low: int, high: int) -> Act:
    return lambda trial, _: {"limits": {name: trial.draw.randint(low, high)}}


POINTS = " ".join(failpoints.FAILPOINTS)
SAVING = "mid_write pre_fsync pre_manifest pre_rename after_snapshot writer_start mid_metrics_append pre_status"
KINDS: dict[str, Kind] = {
    "SIGKILL at a random time": Kind("live", send(signal.SIGKILL), {-9}),
    "SIGKILL at a fault point": Kind("start", at(POINTS, 12, "kill"), {-9}, weight=2),
    "kill in the rehearsal": Kind("start", in_rehearsal, {-9}, weight=9),
    "kill in the resume": Kind("start", in_resume, {-9}),
    "kill in the final phase": Kind("start", in_final_phase, {-9}, weight=2),
    "SIGKILL of the launcher": Kind("start", of_launcher, {-9}, weight=0.5),
    "SIGKILL of the supervisor": Kind("start", of_supervisor, {-9}),
    "SIGKILL of a supervised trainer": Kind("live", kill_trainer, weight=0),
    "SIGTERM": Kind("live", send(signal.SIGTERM), {75, -15}),  # -15, -2: before or after the handlers
    "SIGINT": Kind("live", send(signal.SIGINT), {130, -2}),
    "lw stop": Kind("live", ask_to_stop, {75}),
    "SIGSTOP, then SIGCONT": Kind("live", stop_and_go, is_gentle=True),
    "flipped bit, at rest": Kind("rest", on_any_file(flip), REFUSED, weight=2),
    "flipped bit, while running": Kind("live", on_any_file(flip), REFUSED),
    "truncated file": Kind("rest", on_any_file(cut), REFUSED),
    "deleted file": Kind("rest", on_any_file(lambda path, draw: path.unlink()), REFUSED),
    "FIFO in place of a file": Kind("rest", on_any_file(make_fifo), REFUSED),
    "lost status.json": Kind("live", lose_status, is_gentle=True),
    "deleted newest checkpoint": Kind("rest", lose_newest, REFUSED),
    "leftover temporary files": Kind("live", leave_litter, is_gentle=True),
    "leftovers, at rest": Kind("rest", leave_litter),
    "full disk (ENOSPC)": Kind("start", at(SAVING, 12, "raise:ENOSPC"), {74}),
    "file size limit (EFBIG)": Kind("start", limited(resource.RLIMIT_FSIZE, 10_000, 3_000_000), {74}),
    "too many open files (EMFILE)": Kind("start", limited(resource.RLIMIT_NOFILE, 12, 60), {2, 74}),
    "slow disk": Kind("live", slow_disk, is_gentle=True),
    "read-only folder, at rest": Kind("rest", forbid_writing, {2, 74}),
    "read-only folder, while running": Kind("live", forbid_writing, {74}),
    "clock jump": Kind("live", jump_clock, is_gentle=True),
    "dead loader worker": Kind("live", kill_worker, {2, 74, 75}),
    "folder moved, while running": Kind("live", move_folder, {2, 74, 75}),
    "damaged index": Kind("live", spoil_index, is_gentle=True),
    "stale lease": Kind("rest", leave_lease, {2}),
}
