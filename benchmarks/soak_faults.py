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
from functools import partial
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any

import faults  # the script with a plain Trainer, and the package of this checkout
import torch
import yaml

from loopwright import failpoints
from loopwright.errors import CheckpointError, LoopwrightError, Preempted

RUN, OUTPUT = "run", "output.txt"
TEXT = "text-classification --data ../data/rows.csv --dropout 0.1 --dataloader_num_workers 2"
IMAGE = "image-classification --data ../data/pictures --image_size 24 --workers 2"
SAVES = "--save_strategy steps --save_steps 25 --eval_strategy steps --eval_steps 50 --logging_steps 1"
COMMANDS = {
    "text": f"train {TEXT} {SAVES} --batch 8 --plain --out run --max_steps",
    "image": f"train {IMAGE} {SAVES} --batch 8 --plain --out run --max_steps",
    "script": "script",
}
LENGTHS = {"text": 500, "image": 600, "script": 40}  # updates, updates, epochs
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
        (folder / faults.OUTCOME).write_text(json.dumps(outcome))
        return 0
    except KeyboardInterrupt:
        return 130
    except (LoopwrightError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 75 if isinstance(error, Preempted) else 74 if isinstance(error, (OSError, CheckpointError)) else 2
    except Exception:  # noqa: BLE001 - told by the exit code
        faults.traceback.print_exc()
        return 1


SERVER = multiprocessing.get_context("forkserver")  # one thread, everything imported: a start takes milliseconds
MODELS = "transformers.models.modernbert.modeling_modernbert"
PRELOADED = ["torch._dynamo", "accelerate", "loopwright.runs.train", "PIL.Image", MODELS, "soak_faults"]
SERVER.set_forkserver_preload(PRELOADED)


class Start:
    """A started process, and its memory and descriptors over time.

    Args:
        trial: the run to start, or to go on with.
        options: `failpoint`, `limits` and `prefix`, `suffix` (a real command line) are for the process itself.
    """

    def __init__(self, trial: Trial, options: dict[str, Any]) -> None:
        self.begin, self.weather = time.monotonic(), None
        self.samples: list[tuple[float, int]] = []  # MB, descriptors
        words = [*COMMANDS[trial.name].split(), str(trial.length)]
        if trial.name != "script" and trial.run.exists():
            words = ["resume", RUN, "--plain"]
        if "prefix" in options:
            words = [sys.executable, "-m", "loopwright", *options["prefix"], *words, *options.get("suffix", [])]
            trial.is_journal_whole = False
            with open(trial.folder / OUTPUT, "ab") as output:
                place = {"cwd": trial.folder, "stdout": output, "stderr": output, "start_new_session": True}
                self.process: Any = subprocess.Popen(words, **place)
        else:
            self.weather = RawArray("d", 2)
            job = (trial.folder, words, self.weather, options.get("failpoint"), options.get("limits", {}))
            self.process = SERVER.Process(target=child, args=job)
            self.process.start()
        self.pid: int = self.process.pid

    @property
    def code(self) -> int | None:
        return self.process.poll() if isinstance(self.process, subprocess.Popen) else self.process.exitcode

    def sample(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
            self.samples.append((pages * resource.getpagesize() / 1e6, len(os.listdir(f"/proc/{self.pid}/fd"))))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait() if isinstance(self.process, subprocess.Popen) else self.process.join()

    def signal(self, number: int) -> bool:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)
            return True
        return False


def processes() -> dict[int, tuple[int, str]]:
    """The parent of every living process, and the tick at which it started."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            values = path.read_text().rpartition(")")[2].split()
            if values[0] not in "ZX":
                found[int(path.parent.name)] = int(values[1]), values[19]
    return found


def descendants(pid: int) -> dict[int, str]:
    """The living processes below one, with the tick at which each started."""
    living, found = processes(), {pid}
    while more := {each for each, (parent, _) in living.items() if parent in found} - found:
        found |= more
    return {each: living[each][1] for each in found - {pid}}


# ------------------------------------------------------------------ a run under faults


@dataclass
class Damage:
    """What a fault did to a file or folder."""

    path: Path
    before: Path | None  # a copy; None: there was nothing
    after: bytes | None  # the content that the fault left; None: not a plain file

    @property
    def names(self) -> set[str]:
        """What an error may call it: its own name, or that of its checkpoint."""
        return {self.path.name, *(part.name for part in self.path.parents if part.name.startswith("step-"))}

    def is_there(self) -> bool:
        """Whether the damage is still there: the run has not replaced or rewritten the file, nor moved it away."""
        is_plain = self.path.is_file() or self.path.is_dir()
        return not is_plain if self.after is None else self.path.is_file() and self.path.read_bytes() == self.after

    def undo(self) -> bool:
        """Put it back as it was; return whether the damage was still there."""
        if not self.is_there():
            return False
        self.path.unlink(missing_ok=True)
        if self.before is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if self.before.is_dir() else shutil.copy2)(self.before, self.path)
        return True


@dataclass
class Fault:
    """A fault that has hit a run: what it damaged, if a file, and its fate, as in the table of the report."""

    kind: str
    position: int  # of the output
    damage: Damage | None = None
    fate: str = ""


@dataclass
class Trial:
    """A run from its first start to its end."""

    name: str
    folder: Path
    draw: random.Random
    scale: float = 1.0
    faults: list[Fault] = field(default_factory=list)
    history: list[str] = field(default_factory=list)  # every fault and every end, in order
    is_journal_whole: bool = True

    @property
    def length(self) -> int:
        return int(LENGTHS[self.name] * self.scale)

    @property
    def total(self) -> int:
        """All updates."""
        return self.length * (24 if self.name == "script" else 1)

    def is_new(self) -> bool:
        return self.name != "script" and not self.run.exists()

    def is_saved(self) -> bool:
        return bool(self.checkpoints())

    def is_command(self) -> bool:
        return self.name != "script" and self.is_saved()

    def is_late(self) -> bool:
        return self.update > 0.6 * self.total

    def is_training(self) -> bool:
        """Whether it is between its first and its last update."""
        return 0 < self.update < self.total

    @property
    def run(self) -> Path:
        return self.folder / (RUN if self.name != "script" else faults.CHECKPOINTS)

    @property
    def update(self) -> int:
        """The newest update that is surely done."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            return json.loads((self.folder / "seen-0.jsonl").read_text().splitlines()[-1])[0]
        return 0

    def sizes(self) -> list[int]:
        """What grows while the run makes progress."""
        paths = (self.folder / OUTPUT, self.folder / "seen-0.jsonl", self.run / "metrics.jsonl")
        return [path.stat().st_size if path.exists() else 0 for path in paths]

    def said(self, position: int = 0) -> str:
        """The output from a position on."""
        return (self.folder / OUTPUT).read_bytes()[position:].decode(errors="replace")

    def checkpoints(self) -> list[Path]:
        """The finished checkpoints, the newest last."""
        return sorted(path.parent for path in self.run.rglob("MANIFEST.json") if path.parent.name.startswith("step-"))

    def damage(self, path: Path, change: Callable[[Path], Any]) -> Damage | None:
        """Change a file or folder, and keep what it was."""
        kept = self.folder / f"kept-{time.monotonic_ns()}"
        try:
            if path.exists():
                (shutil.copytree if path.is_dir() else shutil.copy2)(path, kept)
            change(path)
        except OSError:  # the run has removed it meanwhile
            return None
        self.history.append(f"      {path.relative_to(self.folder)}")
        return Damage(path, kept if kept.exists() else None, path.read_bytes() if path.is_file() else None)

    def put_back(self) -> None:
        """Put a folder that was moved back, and make read-only ones writable."""
        away = self.folder / "away"
        if away.exists() and not (self.folder / faults.OUTCOME).exists():
            shutil.rmtree(self.run, ignore_errors=True)
            away.rename(self.run)
        for path in (self.run, self.run / "checkpoints"):
            if path.is_dir():
                path.chmod(0o755)


# ------------------------------------------------------------------ the kinds of faults

Act = Callable[[Trial, Any], Any]


@dataclass
class Kind:
    """A kind of fault.

    Attributes:
        when: "rest": between two starts; "start": armed at a start; "live": in a running process.
        act: does it. At a start it returns what to start with; else a Damage, or whether there was something to do.
        codes: exit codes that it explains. An error about a damaged file must name the file besides.
        is_gentle: a process outlives it.
        is_stop: the process has to end: nothing else is done to it, and it may do three more updates at most.
        is_possible: whether a run can be hit by it now.
    """

    when: str
    act: Act
    codes: set[int] = field(default_factory=set)
    is_gentle: bool = False
    is_stop: bool = False
    weight: float = 1.0
    is_possible: Callable[[Trial], bool] = lambda trial: True


def on_any_file(change: Callable[[Path, random.Random], Any]) -> Act:
    def act(trial: Trial, start: Any) -> Damage | None:
        found = [path for path in sorted(trial.run.rglob("*")) if path.is_file() and path.stat().st_size]
        path = trial.draw.choice(found) if found else None
        damage = trial.damage(path, lambda path: change(path, trial.draw)) if path else None
        # A config.yaml that still reads as settings is an edit of the user, whose values count.
        if damage and path == trial.run / "config.yaml" and is_settings(damage.after):
            damage.undo()
            return None
        return damage

    return act


def is_settings(content: bytes | None) -> bool:
    with contextlib.suppress(ValueError, yaml.YAMLError):
        return isinstance(yaml.safe_load((content or b"").decode()), dict)
    return False


def flip(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    with open(path, "r+b") as file:
        file.write(content)


def cut(path: Path, draw: random.Random) -> None:
    os.truncate(path, draw.randrange(path.stat().st_size))


def make_fifo(path: Path, draw: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def leave_litter(trial: Trial, start: Any) -> bool:
    """What killed programs leave behind: temporary files, empty folders, half a checkpoint."""
    places = [path for path in (trial.run, trial.run / "checkpoints", trial.run / "model") if path.is_dir()]
    place, number = trial.draw.choice(places), trial.draw.randrange(10**6)
    names = [f".tmp-{number}", f"status.json.{number}.tmp", f".step-{number:010d}.tmp", f"step-{number:010d}"]
    path = place / trial.draw.choice(names)
    if path.suffix == ".tmp" and "step" not in path.name:
        path.write_bytes(os.urandom(100))
    else:
        path.mkdir(exist_ok=True)
        (path / "model.safetensors").write_bytes(os.urandom(100))
    trial.history.append(f"      {path.relative_to(trial.folder)}")
    return True


def spoil_index(trial: Trial, start: Any) -> bool:
    lines = [b'{"id": "x"', b"\xff\xfe\x00junk", b"[1, 2]", b'{"id": 7, "path": null}', b"null", b'"', b"{}", b"9" * 9]
    with open(trial.folder / "runs" / "index.jsonl", "r+b") as file:
        file.seek(0, os.SEEK_END)
        return bool(file.write(trial.draw.choice(lines) + b"\n"))


def leave_lease(trial: Trial, start: Any) -> Damage | None:
    """A lease of a dead process, of another host, of the future, or nonsense."""
    now, path = time.time(), trial.run / "lease.json"
    owner = {"incarnation": "0" * 32, "host": platform.node(), "pid": 2**22 - 1, "boot_id": "", "process_start": 1}
    owner |= {"started_at": now - 1e5, "heartbeat": now - 9e4}
    other = {**owner, "host": "elsewhere", "boot_id": "another"}
    kinds = [owner, {**owner, "heartbeat": now}, other, {**other, "heartbeat": now + 1e6}, {"host": 3}]
    text = json.dumps(trial.draw.choice(kinds))
    return trial.damage(path, lambda path: path.write_text(text))


def forbid_writing(trial: Trial, start: Start | None) -> bool:
    """A folder that cannot be written: for a start, or for two seconds of a running process."""
    folder = trial.draw.choice([path for path in (trial.run, trial.run / "checkpoints") if path.is_dir()])
    folder.chmod(0o555)
    if start is not None:
        time.sleep(2)
        with contextlib.suppress(OSError):
            folder.chmod(0o755)
    return True


def stop_and_go(trial: Trial, start: Start) -> bool:
    start.signal(signal.SIGSTOP)
    time.sleep(trial.draw.uniform(0.5, 4))
    return start.signal(signal.SIGCONT)


def weather(index: int, change: Callable[[random.Random, float], float]) -> Act:
    """Change the slowness of the disk, or the clock, of a process that is not a real command line."""

    def act(trial: Trial, start: Start) -> bool:
        if start.weather is not None:
            start.weather[index] = change(trial.draw, start.weather[index])
        return start.weather is not None

    return act


def kill_worker(trial: Trial, start: Start) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(trial.draw.choice(sorted(descendants(start.pid))), signal.SIGKILL)
        return True
    return False


def move_folder(trial: Trial, start: Start) -> bool:
    """Move the folder away, and back after a while; `put_back` does that if the process has made a new one."""
    away, deadline = trial.folder / "away", time.monotonic() + trial.draw.uniform(0.05, 3)
    if away.exists():
        return False
    trial.run.rename(away)
    while time.monotonic() < deadline and start.code is None:
        time.sleep(0.05)
    if not trial.run.exists():
        away.rename(trial.run)
    return True


def ask_to_stop(trial: Trial, start: Start) -> bool:
    process = SERVER.Process(target=child, args=(trial.folder, ["stop", RUN], RawArray("d", 2), None, {}))
    process.start()
    process.join()
    return True


def at(names: str, most: int, action: str) -> Act:
    """Arm one of some points of the code, at one of its first hits."""
    return lambda trial, _: {"failpoint": f"{trial.draw.choice(names.split())}:{trial.draw.randint(1, most)}:{action}"}


def in_resume(trial: Trial, start: Any) -> dict[str, Any]:
    return trial.draw.choice([{"failpoint": "mid_load:1:kill"}, {"kill_after": trial.draw.uniform(0.05, 1.5)}])


def in_final_phase(trial: Trial, start: Any) -> dict[str, Any]:
    armed = {"failpoint": f"{trial.draw.choice(['before_final_save', 'run_end'])}:1:kill"}
    return {**trial.draw.choice([armed, {"kill_at_end": trial.draw.uniform(0, 1.5)}]), "is_quiet": True}


def kill_trainer(trial: Trial, start: Start) -> bool:
    """Kill the process that a supervisor has started."""
    found = [pid for pid, (parent, _) in processes().items() if parent == start.pid] if trial.checkpoints() else []
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    return bool(found)


def of_parent(low: float, high: float, **words: list[str]) -> Act:
    """Start the command line below a launcher or a supervisor, and kill that after a while."""
    return lambda trial, _: {"kill_after": trial.draw.uniform(low, high), "is_quiet": True, "prefix": [], **words}


def limited(name: int, low: int, high: int) -> Act:
    return lambda trial, _: {"limits": {name: trial.draw.randint(low, high)}}


def sends(number: int) -> Act:
    return lambda _, start: start.signal(number)


LAUNCH, SUPERVISE = ["launch", "-n", "1", "--"], ["--supervise"]
REHEARSAL = "after_backward after_optimizer_step mid_eval mid_write pre_rename after_commit mid_load"
POINTS = " ".join(failpoints.FAILPOINTS)
SAVING = "mid_write pre_fsync pre_manifest pre_rename after_snapshot writer_start mid_metrics_append pre_status"
KILLED = "SIGKILL of a supervised trainer"
rest, armed, live = partial(Kind, "rest"), partial(Kind, "start"), partial(Kind, "live")
stop, gentle = partial(live, is_stop=True, weight=2), partial(live, is_gentle=True)
KINDS: dict[str, Kind] = {
    "SIGKILL at a random time": stop(sends(signal.SIGKILL), {-9}),
    "SIGKILL at a fault point": armed(at(POINTS, 12, "kill"), {-9}, weight=2),
    "kill in the rehearsal": armed(at(REHEARSAL, 1, "kill"), {-9}, weight=9, is_possible=Trial.is_new),
    "kill in the resume": armed(in_resume, {-9}, is_possible=Trial.is_saved),
    "kill in the final phase": armed(in_final_phase, {-9}, weight=2, is_possible=Trial.is_late),
    "SIGKILL of the launcher": armed(of_parent(1, 14, prefix=LAUNCH), {-9}, is_possible=Trial.is_command),
    "SIGKILL of the supervisor": armed(of_parent(10, 60, suffix=SUPERVISE), {-9}, is_possible=Trial.is_command),
    KILLED: live(kill_trainer, {137}, weight=0),  # the supervisor gives up after six without a new update
    "SIGTERM": stop(sends(signal.SIGTERM), {75, -15}),  # -15, -2: before or after the handlers
    "SIGINT": stop(sends(signal.SIGINT), {130, -2}),
    "lw stop": stop(ask_to_stop, {75}, is_possible=Trial.is_command),
    "SIGSTOP, then SIGCONT": gentle(stop_and_go),
    "flipped bit, at rest": rest(on_any_file(flip), weight=2),
    "flipped bit, while running": live(on_any_file(flip)),
    "truncated file": rest(on_any_file(cut)),
    "deleted file": rest(on_any_file(lambda path, _: path.unlink())),
    "FIFO in place of a file": rest(on_any_file(make_fifo)),
    "lost status.json": gentle(lambda trial, _: trial.damage(trial.run / "status.json", Path.unlink)),
    "deleted newest checkpoint": rest(lambda trial, _: trial.damage(trial.checkpoints()[-1], shutil.rmtree)),
    "leftover temporary files": gentle(leave_litter),
    "leftovers, at rest": rest(leave_litter),
    "full disk (ENOSPC)": armed(at(SAVING, 12, "raise:ENOSPC"), {74}),
    "file size limit (EFBIG)": armed(limited(resource.RLIMIT_FSIZE, 10_000, 3_000_000), {74}),
    "too many open files (EMFILE)": armed(limited(resource.RLIMIT_NOFILE, 12, 60), {2, 74}),
    "slow disk": gentle(weather(0, lambda draw, before: 0.0 if before else draw.uniform(0.05, 0.5))),  # per fsync
    "read-only folder, at rest": rest(forbid_writing, {2, 74}),
    "read-only folder, while running": live(forbid_writing, {74}),
    "clock jump": gentle(weather(1, lambda draw, _: draw.choice([-1, 1]) * 10 ** draw.uniform(1, 7))),
    "dead loader worker": live(kill_worker, {2, 74, 75}),
    "folder moved, while running": live(move_folder, {2, 74, 75}),
    "damaged index": gentle(spoil_index),
    "stale lease": rest(leave_lease),
}
