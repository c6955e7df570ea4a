"""A fault every few seconds for a given time: do the runs end as if nothing had happened?

    python benchmarks/soak.py --minutes 30 [--seed N] [--kinds SIGKILL,flipped] [--output soak.md]

Three runs take turns: a text classifier and an image classifier of the command line, with dropout or augmentation, two
loader workers, evaluations and many saves, and a script with a plain Trainer (that of faults.py). Each is first done
without a fault. Then each is started again and again until it is complete, while faults hit it: between two starts, at
a start, and in a running process. Every third round is gentle: only faults that a process outlives, so that its
memory and its descriptors can be followed over a whole run.

A start that refuses has to name what was damaged: that, and nothing else, is put back, and the run goes on. A
traceback, an exit code that no fault explains, an error that names nothing of what was damaged, updates after a request
to stop, no progress for minutes, processes that outlive their run, or another result is a failure: its folder is kept,
and the exit status is 1.

Most starts are forks of a process that has imported everything; some are `python -m loopwright` itself.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import platform
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import faults
import torch
from safetensors.torch import load_file
from soak_faults import COMMANDS, KILLED, KINDS, REFUSED, Damage, Fault, Kind, Start, Trial, descendants, processes

from loopwright.errors import LoopwrightError
from loopwright.run_folder import read_json

EVENTS = faults.EVENTS | {"training"}
COMPARED = ("weights", "order", "metrics", "metrics.jsonl")
FATES = ("found", "rebuilt", "harmless", "ended", "failed")
HANGING_SECONDS, ORPHAN_SECONDS = 240.0, 30.0  # generous: a busy machine must not decide
MOST_STARTS, MOST_UPDATES_TO_STOP, MOST_OUTPUT = 60, 3, 100_000_000
GROWTH, MORE_DESCRIPTORS = 1.05, 2  # from the first to the last quarter of the updates of a process: more is a failure
REAL = 0.25  # of the starts with nothing armed: the command line itself
FINDING = re.compile("error|note|warn|bad|damage|cannot|missing|skip|lost|delete|changed|not ", re.IGNORECASE)


# ------------------------------------------------------------------ what is compared


def digest(path: Path) -> str:
    """The sha256 of a file; of tensors, without the names of the run beside them."""
    tensors = load_file(path) if path.suffix == ".safetensors" else None
    content = b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors)) if tensors else path.read_bytes()
    return hashlib.sha256(content).hexdigest()


def without_clock(record: Any) -> Any:
    return {name: value for name, value in record.items() if name not in faults.CLOCK_FIELDS}


def records(path: Path) -> list[Any]:
    """The records of metrics.jsonl that a fault must not change; damaged lines are left out."""
    found = []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and record.get("event") in EVENTS:
                found.append(without_clock(record))
    return found


def outcome(trial: Trial) -> dict[str, Any]:
    """What a complete run leaves."""
    seen: dict[int, list[str]] = {}
    for (_, update), digests in faults.samples_seen(trial.folder):
        seen[update] = digests
    if trial.name == "script":
        found = json.loads((trial.folder / faults.OUTCOME).read_text())
        metrics, weights = [found["metrics"]["final"], found["metrics"]["history"]], [found["weights"]]
    else:
        metrics = [without_clock(read_json(trial.run / "result.json")), digest(trial.run / "eval/predictions.jsonl")]
        names = ("config.json", "tokenizer.json", "model.safetensors")
        paths = [max(trial.checkpoints()) / "model.safetensors", *(trial.run / "model" / name for name in names)]
        weights = [digest(path) for path in paths if path.exists()]
    return {"weights": weights, "order": seen, "metrics": metrics, "log": records(trial.run / "metrics.jsonl")}


def differences(found: dict[str, Any], oracle: dict[str, Any], trial: Trial) -> list[str]:
    """What differs from the run without a fault."""
    result, expected = found["metrics"][0], oracle["metrics"][0]
    best = f"The best checkpoint, step-{expected.get('update', -1):010d} "
    if trial.name != "script" and result["update"] != expected["update"] and best in trial.said():
        # It was destroyed, and the run has said so: the metrics of another one must be those that it was saved with.
        metrics = {f"eval_{name}": value for name, value in result["metrics"].items()}
        is_true = any(metrics.items() <= one.items() for one in oracle["log"] if one["update"] == result["update"])
        different = [] if is_true else ["metrics"]
        different += ["weights"] if found["weights"][:-1] != oracle["weights"][:-1] else []
    else:
        different = [name for name in ("weights", "metrics") if found[name] != oracle[name]]
    seen = {update: oracle["order"].get(update) for update in found["order"]}
    if found["order"] != seen or (trial.is_journal_whole and len(seen) != len(oracle["order"])):
        different.append("order")
    strange = [record for record in found["log"] if record not in oracle["log"]]
    # A damaged metrics.jsonl may lack lines, and a flipped digit is a line of its own; a whole one may not.
    damages = sum(fault.damage is not None and fault.damage.path.name == "metrics.jsonl" for fault in trial.faults)
    if len(strange) > damages or (found["log"] != oracle["log"] and not damages):
        different.append(f"metrics.jsonl ({len(strange)} other lines)")
    return different


def is_named(damage: Damage, lines: list[str]) -> bool:
    """Whether a message names a damaged file or its checkpoint; other lines may name it as well."""
    return any(name in line for name in damage.names for line in lines if FINDING.search(line))


# ------------------------------------------------------------------ the soak


class Soak:
    """Runs under faults, and what came of them."""

    def __init__(self, root: Path, kinds: dict[str, Kind], seed: int, scale: float) -> None:
        self.root, self.kinds, self.draw, self.scale = root, kinds, random.Random(seed), scale
        self.fates: Counter[tuple[str, str]] = Counter()
        self.drawn: Counter[str] = Counter()
        self.complete: Counter[str] = Counter()
        self.different: Counter[str] = Counter()
        self.starts = self.real_starts = 0
        self.longest_orphan = 0.0
        self.failures: list[str] = []
        self.lives: list[tuple[str, Start]] = []  # whose memory was followed
        self.oracles: dict[str, dict[str, Any]] = {}
        self.begin = time.monotonic()

    def tell(self, text: str) -> None:
        print(f"{time.monotonic() - self.begin:7.1f} s  {text}", file=sys.stderr, flush=True)

    def prepare(self, name: str) -> Trial:
        folder = self.root / f"{name}-{self.complete.total() + len(self.failures):03d}"
        folder.mkdir()
        return Trial(name, folder, self.draw, self.scale)

    def undisturbed(self, name: str) -> None:
        """Run without a fault: what every later run is compared with."""
        trial = self.prepare(name)
        start = Start(trial, {})
        self.attend(trial, start, {}, is_gentle=True, deadline=0)
        if start.code != 0:
            raise SystemExit(f"the run without a fault failed:\n{trial.said()[-4000:]}")
        self.oracles[name] = outcome(trial)
        self.lives.append((f"{name}, undisturbed", start))
        seconds = time.monotonic() - start.begin
        self.tell(f"{name}: {len(self.oracles[name]['order'])} updates in {seconds:.0f} s without a fault")
        shutil.rmtree(trial.folder)

    def disturbed(self, name: str, is_gentle: bool, deadline: float) -> None:
        """Start a run again and again, under faults, until it is complete."""
        trial, is_calm = self.prepare(name), is_gentle
        for _ in range(MOST_STARTS):
            first, position = len(trial.faults), trial.sizes()[0]
            is_calm = is_calm or time.monotonic() > deadline
            if not is_calm and trial.run.exists() and self.draw.random() < 0.7:
                self.inject(trial, self.draw_kind("rest", trial), None)
            options = {} if is_calm else self.arm(trial)
            start = Start(trial, options)
            self.starts += 1
            self.real_starts += "prefix" in options
            problem = self.attend(trial, start, options, is_gentle, deadline)
            trial.put_back()
            said, new = trial.said(position), trial.faults[first:]
            kinds = ", ".join(fault.kind for fault in new)
            trial.history.append(f"{start.code} after {time.monotonic() - start.begin:.1f} s: {kinds}")
            problem = problem or self.problem_of(trial, start.code, new, said)
            if problem is None and start.code == 0:
                problem = self.compare(trial)
                if problem is None and is_gentle:
                    self.lives.append((trial.name, start))
            if problem is not None or start.code == 0:
                return self.end(trial, problem, said)
            is_calm = is_gentle or start.code in REFUSED  # the fix is tried without another fault
        self.end(trial, f"not complete after {MOST_STARTS} starts", said)

    def problem_of(self, trial: Trial, code: int | None, new: list[Fault], said: str) -> str | None:
        """What is wrong with the end of a process; None if faults explain it. What its error names is put back."""
        # Workers whose parent is gone, or which lack descriptors, may print one of multiprocessing itself.
        if any("/multiprocessing/" not in text[:200] for text in said.split("Traceback (most recent call last)")[1:]):
            return f"a traceback (exit {code})"
        guilty = [fault for fault in new if fault.damage is None and code in self.kinds[fault.kind].codes]
        for fault in guilty:
            fault.fate = "ended"
        for fault in trial.faults if code in REFUSED else ():
            if fault.damage and is_named(fault.damage, said.splitlines()[-8:]) and fault.damage.undo():
                fault.fate = "found"
                guilty.append(fault)
        return None if guilty or code == 0 else f"exit {code}, and no fault of this start explains it"

    def compare(self, trial: Trial) -> str | None:
        """What differs in a complete run; None if it is equal to the one without a fault."""
        self.complete[trial.name] += 1
        try:
            different = differences(outcome(trial), self.oracles[trial.name], trial)
        except (OSError, ValueError, KeyError, LoopwrightError) as error:
            different = [f"what it left, which cannot be read: {error}"]
        self.different.update(name.partition(" ")[0] for name in different)
        return f"other than without a fault: {', '.join(different)}" if different else None

    def end(self, trial: Trial, problem: str | None, said: str) -> None:
        """Count the fates of the faults of a run, and report how it ended."""
        for fault in trial.faults:
            self.fates[fault.kind, "failed" if problem else fault.fate or self.fate_of(fault, trial)] += 1
        summary = f"{self.drawn.total()} faults, {self.starts} starts, {len(self.failures) + bool(problem)} failures"
        if problem is None:
            self.tell(f"{trial.name}: complete and equal after {len(trial.faults)} faults; {summary}")
            return shutil.rmtree(trial.folder)
        self.failures.append(
            "\n".join([f"{trial.folder}: {problem}", *(f"    {line}" for line in trial.history[-12:])])
        )
        tail = "\n".join(f"    | {line}" for line in said.splitlines()[-25:])
        self.tell(f"FAILED {self.failures[-1]}\n{tail}\n{summary}")

    def fate_of(self, fault: Fault, trial: Trial) -> str:
        """The fate of a fault that ended no process: a message names it, or the file was replaced, or nothing."""
        if fault.damage is None:
            return "harmless"
        if is_named(fault.damage, trial.said(fault.position).splitlines()):
            return "found"
        path, after = fault.damage.path, fault.damage.after
        is_rebuilt = path.is_file() and (after is None or not path.read_bytes().startswith(after))
        return "rebuilt" if is_rebuilt or path.is_dir() else "harmless"

    # -------------------------------------------------------------- starts and faults

    def arm(self, trial: Trial) -> dict[str, Any]:
        """Draw a fault that is armed at the start, perhaps, or a start as `python -m loopwright`."""
        name = self.draw_kind("start", trial) if self.draw.random() < 0.75 else None
        if name is None:
            return {"prefix": []} if trial.name != "script" and self.draw.random() < REAL else {}
        options: dict[str, Any] = self.kinds[name].act(trial, None)
        if options.get("failpoint", "").endswith("kill"):
            return {**options, "kind": name}  # counted if its point is reached
        self.note(trial, name)
        return options

    def draw_kind(self, when: str, trial: Trial, is_gentle: bool = False) -> str | None:
        """Draw a kind that can hit a run now; those that were drawn less often come before the others."""
        rare = {
            name: kind.weight * (0.2 if kind.is_gentle and not is_gentle else 1) / (1 + self.drawn[name])
            for name, kind in self.kinds.items()
            if kind.when == when and kind.weight and kind.is_gentle >= is_gentle and kind.is_possible(trial)
        }
        return self.draw.choices(list(rare), list(rare.values()))[0] if rare else None

    def inject(self, trial: Trial, name: str | None, start: Start | None) -> Kind | None:
        """Let a fault hit, and return its kind; None if there was nothing to hit."""
        position = trial.sizes()[0]
        with contextlib.suppress(FileNotFoundError, IndexError):  # the run was faster, or has nothing yet
            if name in self.kinds and (done := self.kinds[name].act(trial, start)):
                self.note(trial, name, done if isinstance(done, Damage) else None, position)
                return self.kinds[name]
        return None

    def note(self, trial: Trial, name: str, damage: Damage | None = None, position: int = 0) -> None:
        self.drawn[name] += 1
        trial.faults.append(Fault(name, position, damage))

    def attend(
        self, trial: Trial, start: Start, options: dict[str, Any], is_gentle: bool, deadline: float
    ) -> str | None:
        """Hit a process with faults until it ends; return what is wrong with its end."""
        first, now = len(trial.faults), start.begin
        changed = sampled = now
        next_fault, kill_at = now + self.draw.uniform(1, 4), now + options.get("kill_after", math.inf)
        sizes, below, last_update = [0, 0, 0], {}, math.inf
        while start.code is None:
            time.sleep(0.1)
            now = time.monotonic()
            if now > sampled + 0.5:
                below, sampled = descendants(start.pid) or below, now
                if trial.is_training():
                    start.sample()
            if trial.sizes() != sizes:
                sizes, changed = trial.sizes(), now
            if "kill_at_end" in options and kill_at == math.inf and trial.update and not trial.is_training():
                kill_at = now + options["kill_at_end"]
            if sizes[0] > MOST_OUTPUT or now > min(kill_at, changed + HANGING_SECONDS):
                below = descendants(start.pid)
                start.kill()
                if now <= kill_at:
                    return f"no progress for {now - changed:.0f} s, {sizes[0]:,} bytes of output: hangs"
            elif now > next_fault and now < deadline:
                next_fault = now + self.draw.uniform(1, 3)
                if "suffix" in options:
                    self.inject(trial, KILLED, start)
                    next_fault += 8
                elif not options.get("is_quiet"):
                    kind = self.inject(trial, self.draw_kind("live", trial, is_gentle), start)
                    if kind and kind.is_stop:
                        # A run looks for the file of `lw stop` twice a second; a signal takes effect at once.
                        waited = 0 if -signal.SIGTERM in kind.codes or 75 not in kind.codes else math.inf
                        next_fault, last_update = math.inf, trial.update + MOST_UPDATES_TO_STOP + waited
        killed = any(-9 in self.kinds[fault.kind].codes for fault in trial.faults[first:])
        if start.code == -9 and "kind" in options and not killed:
            self.note(trial, options["kind"])  # its point was reached
        if trial.update > last_update:
            return f"{trial.update - last_update + MOST_UPDATES_TO_STOP} updates after {trial.faults[-1].kind}"
        return self.orphans(below)

    def orphans(self, below: dict[int, str]) -> str | None:
        """What a process left behind is to end by itself."""
        begin = time.monotonic()
        while living := [pid for pid, (_, tick) in processes().items() if below.get(pid) == tick]:
            self.longest_orphan = max(self.longest_orphan, time.monotonic() - begin)
            if self.longest_orphan > ORPHAN_SECONDS:
                for pid in living:
                    os.kill(pid, signal.SIGKILL)
                return f"{len(living)} processes outlived their run by {ORPHAN_SECONDS:.0f} s"
            time.sleep(0.05)
        return None

    # -------------------------------------------------------------- the report

    def memory(self) -> list[str]:
        """Lines on memory and descriptors between the first and the last update; failures where they grow."""
        lines = []
        for name, start in self.lives:
            if (quarter := len(start.samples) // 4) < 5:
                continue
            (before, opened), (after, open_later) = (
                [statistics.median(values) for values in zip(*part, strict=True)]
                for part in (start.samples[:quarter], start.samples[-quarter:])
            )
            lines.append(f"| {name} | {before:.0f} | {after:.0f} | {opened:.0f} | {open_later:.0f} |")
            if after > GROWTH * before or open_later > opened + MORE_DESCRIPTORS:
                self.failures.append(f"{name}: {before:.0f} -> {after:.0f} MB, {opened} -> {open_later} descriptors")
        return lines

    def report(self, heading: str) -> str:
        rows = [[name, self.drawn[name], *(self.fates[name, fate] for fate in FATES)] for name in self.kinds]
        rows.append(["all", *(sum(column) for column in list(zip(*rows, strict=True))[1:])])
        runs = ", ".join(f"{count} {name}" for name, count in sorted(self.complete.items()))
        equal = ", ".join(f"{name} {self.complete.total() - self.different[name]}" for name in COMPARED)
        lives = self.memory()
        parts = [
            heading,
            "",
            "| fault | drawn | found | rebuilt | harmless | process ended, run continued | in a failed run |",
            "|---|--:|--:|--:|--:|--:|--:|",
            *(f"| {' | '.join(map(str, row))} |" for row in rows),
            "",
            "Found: an error or a note names it, and what an error named was put back. Rebuilt: the file was replaced.",
            "",
            f"{self.complete.total()} runs complete ({runs}) in {self.starts} starts, {self.real_starts} of them",
            f"`python -m loopwright` itself. Equal to the run without a fault, of {self.complete.total()}: {equal}.",
            f"Processes that outlived their run ended after {self.longest_orphan:.1f} s at most.",
            "",
            "| process | MB at the start | at the end | descriptors at the start | at the end |",
            "|---|--:|--:|--:|--:|",
            *lives,
            "",
            "Medians over the first and the last quarter of its time between the first and the last update.",
            "",
            f"Failures: {len(self.failures)}.",
        ]
        return "\n".join([*parts, *(f"\n```\n{failure}\n```" for failure in self.failures)])


def make_data(folder: Path) -> None:
    """Rows of made-up words, and pictures of noise with a bright corner."""
    from PIL import Image

    draw, words = random.Random(1), [f"w{number}" for number in range(60)]
    rows = []
    for _ in range(400):
        label = draw.randrange(3)
        text = [*draw.choices(words, k=draw.randint(4, 20)), *draw.choices(words[label * 5 : label * 5 + 5], k=3)]
        rows.append(f"{' '.join(draw.sample(text, len(text)))},{'abc'[label]}")
    folder.mkdir()
    (folder / "rows.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    for number in range(180):
        label = number % 3
        place = folder / "pictures" / "abc"[label]
        place.mkdir(parents=True, exist_ok=True)
        picture = Image.frombytes("RGB", (24, 24), draw.randbytes(24 * 24 * 3))
        picture.paste((250, 80 * label, 20), (8 * label, 0, 8 * label + 6, 10))
        picture.save(place / f"{number}.png")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A fault every few seconds, for a given time")
    parser.add_argument("--minutes", type=float, default=30.0, help="how long faults go on (default 30)")
    parser.add_argument("--seed", type=int, default=0, help="of faults and moments (default 0)")
    parser.add_argument("--kinds", help="only kinds whose name contains one of these, as in SIGKILL,flipped")
    parser.add_argument("--scale", type=float, default=1.0, help="length of the runs (default 1.0: some 500 updates)")
    parser.add_argument("--runs", default=",".join(COMMANDS), help=f"default {','.join(COMMANDS)}")
    parser.add_argument("--folder", type=Path, help="where the runs lie (default: a temporary folder)")
    parser.add_argument("--output", type=Path, help="also write the report to this file")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(faults.SOURCE), str(Path(__file__).resolve().parent)])
    os.environ.update({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    if arguments.folder is not None:
        arguments.folder.mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix="loopwright-soak-", dir=arguments.folder))
    asked = arguments.kinds.split(",") if arguments.kinds else [""]
    kinds = {name: kind for name, kind in KINDS.items() if any(word in name for word in asked)}
    make_data(root / "data")
    # A shell ignores Ctrl-C for what it starts in the background; the runs would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    soak, names = Soak(root, kinds, arguments.seed, arguments.scale), arguments.runs.split(",")
    for name in names:
        soak.undisturbed(name)
    soak.begin = time.monotonic()
    deadline, number = soak.begin + 60 * arguments.minutes, 0
    while time.monotonic() < deadline:
        soak.disturbed(names[number % len(names)], number // len(names) % 3 == 1, deadline)
        number += 1
    machine = f"Python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} cores"
    report = soak.report(f"`python {' '.join(sys.argv)}`, seed {arguments.seed}. {machine}.")
    if not soak.failures:
        shutil.rmtree(root)
    print(report)
    if arguments.output:
        arguments.output.write_text(report + "\n")
    return 1 if soak.failures else 0


if __name__ == "__main__":
    sys.exit(main())
