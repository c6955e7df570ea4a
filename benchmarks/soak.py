"""A fault every few seconds for a given time: do the runs end as if nothing had happened?

    python benchmarks/soak.py --minutes 30 [--seed N] [--kinds SIGKILL,flipped] [--output soak.md]

Three runs take turns: a text classifier and an image classifier of the command line, with dropout or augmentation, two
loader workers, evaluations and many saves, and a script with a plain Trainer (that of faults.py). Each is first done
without a fault. Then each is started again and again until it is complete, while faults hit it: between two starts, at
a start, and in a running process. Every second round is gentle: only faults that a process outlives, so that its
memory and its descriptors can be followed over a whole run.

A start that refuses with an error is given the fix: what was damaged is put back, and the run goes on. A traceback, an
exit code that the fault does not explain, an error that does not name the damaged file, a hang, a refusal without end,
processes that outlive their run, or another result is a failure: its folder is kept, and the exit status is 1.

Most starts are forks of a process that has imported everything; some are `python -m loopwright` itself.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any

import faults
import torch
from safetensors.torch import load_file
from soak_faults import (
    COMMANDS,
    KINDS,
    LENGTHS,
    OUTPUT,
    REFUSED,
    RUN,
    SERVER,
    Kind,
    Start,
    Trial,
    child,
    descendants,
    left_alive,
)

from loopwright.errors import LoopwrightError
from loopwright.run_folder import read_json

EVENTS = faults.EVENTS | {"training"}
HANGING_SECONDS, ORPHAN_SECONDS = 60.0, {True: 2.0, False: 8.0}  # the latter: of a launched run, of others
MOST_REFUSALS, MOST_STARTS, NO_CHECKPOINT = 3, 60, 65
GROWTH = 1.05  # of memory from the second to the last third of a process's life: more is a failure
KILLED = "SIGKILL of a supervised trainer"
REAL = 0.25  # of the starts with nothing armed: the command line itself


# ------------------------------------------------------------------ what is compared


def digest(path: Path) -> str:
    """The sha256 of a file without what may differ: names of the run beside tensors, the last use of a tokenizer."""
    if path.name == "tokenizer.json":
        content = json.loads(path.read_text())
        return repr([value for name, value in content.items() if name not in ("truncation", "padding")])
    if path.suffix != ".safetensors":
        return hashlib.sha256(path.read_bytes()).hexdigest()
    tensors = load_file(path)
    return hashlib.sha256(b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors))).hexdigest()


def without_clock(record: Any) -> Any:
    return {name: value for name, value in record.items() if name not in faults.CLOCK_FIELDS}


def records(path: Path) -> list[Any]:
    """The records of metrics.jsonl that a fault must not change; damaged lines are left out."""
    found = []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and record.get("event") in EVENTS:
            found.append(json.dumps(without_clock(record), sort_keys=True))
    return found


def outcome(trial: Trial) -> dict[str, Any]:
    """What a complete run leaves."""
    seen: dict[int, list[str]] = {}
    for (_, update), digests in faults.samples_seen(trial.folder):
        seen[update] = digests
    if trial.name == "script":
        found = json.loads((trial.folder / faults.OUTCOME).read_text())
        metrics = [found["metrics"]["final"], found["metrics"]["history"]]
        weights: Any = found["weights"]
    else:
        metrics = [without_clock(read_json(trial.run / "result.json"))]
        metrics.append(digest(trial.run / "eval" / "predictions.jsonl"))
        newest = max(trial.checkpoints()) / "model.safetensors"
        model = [trial.run / "model" / name for name in ("config.json", "model.safetensors", "tokenizer.json")]
        weights = [digest(path) for path in (newest, *model) if path.exists()]
    return {"weights": weights, "order": seen, "metrics": metrics, "log": records(trial.run / "metrics.jsonl")}


def differences(found: dict[str, Any], oracle: dict[str, Any], trial: Trial) -> list[str]:
    """What differs from the run without a fault."""
    # A run whose best checkpoint was destroyed ends with another best model; its last weights are the same.
    best = f"step-{oracle['metrics'][0].get('update', -1):010d}" if trial.name != "script" else ""
    if best and any(best in line or "best.json" in line for line in trial.described):
        different = ["weights"] if found["weights"][0] != oracle["weights"][0] else []
    else:
        different = [name for name in ("weights", "metrics") if found[name] != oracle[name]]
    seen, expected = found["order"], oracle["order"]
    if any(digests != expected.get(update) for update, digests in seen.items()) or (
        trial.is_journal_whole and len(seen) != len(expected)
    ):
        different.append("order")
    log = set(oracle["log"])
    strange = [line for line in found["log"] if line not in log]
    # A damaged metrics.jsonl may lack lines, and a flipped digit is a line of its own; a whole one may not.
    if len(strange) > trial.log_damages or (found["log"] != oracle["log"] and not trial.log_damages):
        different.append(f"metrics.jsonl ({len(strange)} other lines)")
    return different


# ------------------------------------------------------------------ the soak


class Soak:
    """Runs under faults, and what came of them."""

    def __init__(self, root: Path, kinds: dict[str, Kind], seed: int, scale: float) -> None:
        self.root, self.kinds, self.draw, self.scale = root, kinds, random.Random(seed), scale
        self.injected: Counter[str] = Counter()
        self.survived: Counter[str] = Counter()
        self.fixed: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.starts, self.real_starts, self.complete = 0, 0, Counter[str]()
        self.differences: Counter[str] = Counter()
        self.failures: list[str] = []
        self.lives: list[tuple[str, Start]] = []  # whose memory was followed
        self.oracles: dict[str, tuple[dict[str, Any], float]] = {}
        self.begin = time.monotonic()

    def tell(self, text: str) -> None:
        print(f"{time.monotonic() - self.begin:7.1f} s  {text}", file=sys.stderr, flush=True)

    # -------------------------------------------------------------- runs

    def prepare(self, name: str) -> Trial:
        folder = self.root / f"{name}-{sum(self.complete.values()) + len(self.failures):03d}"
        folder.mkdir()
        total = len(self.oracles[name][0]["order"]) if name in self.oracles else 0
        return Trial(name, folder, total, self.draw)

    def undisturbed(self, name: str) -> None:
        """Run without a fault: what every later run is compared with."""
        trial = self.prepare(name)
        start = self.start(trial, {}, is_real=False)
        while start.code is None:
            time.sleep(0.5)
            start.sample()
        if start.code != 0:
            raise SystemExit(f"the run without a fault failed:\n{(trial.folder / OUTPUT).read_text()[-4000:]}")
        seconds = time.monotonic() - start.begin
        self.oracles[name] = (outcome(trial), seconds)
        self.lives.append((f"{name}, undisturbed", start))
        self.tell(f"{name}: {len(self.oracles[name][0]['order'])} updates in {seconds:.0f} s without a fault")
        shutil.rmtree(trial.folder)

    def disturbed(self, name: str, is_gentle: bool, deadline: float) -> None:
        """Start a run again and again, under faults, until it is complete."""
        trial, refusals = self.prepare(name), 0
        for _ in range(MOST_STARTS):
            kinds: list[str] = []
            if refusals == 0 and not is_gentle and time.monotonic() < deadline and trial.run.exists():
                self.inject_one(trial, "rest", None, kinds, 0.7)
            options = self.options(trial, kinds) if refusals == 0 and not is_gentle else {}
            is_real = not options and not is_gentle and name != "script" and self.draw.random() < REAL
            begin = size(trial.folder / OUTPUT)
            # A refusal that nothing explains may say that there is no run: the other verb is its fix.
            start = self.start(trial, options, is_real, is_new=refusals == 2)
            problem = self.attend(trial, start, options, kinds, is_gentle or refusals > 0, deadline)
            said = (trial.folder / OUTPUT).read_bytes()[begin:].decode(errors="replace")
            trial.described.append(f"{start.code} after {time.monotonic() - start.begin:.1f} s: {', '.join(kinds)}")
            self.restore_moved(trial)
            problem = problem or self.problem_of(trial, start.code, said, kinds, refusals)
            if problem is not None:
                return self.fail(trial, kinds, problem, said)
            if start.code == 0:
                return self.finish(trial, start, kinds, is_gentle)
            if start.code in REFUSED:
                is_known = any(
                    start.code in self.kinds[name].codes for name in kinds if self.kinds[name].when != "rest"
                )
                refusals = 0 if is_known else refusals + 1
                self.fix(trial, kinds, said, start.code)
            else:
                refusals = 0
                self.survived.update(kinds)
        self.fail(trial, kinds, f"not complete after {MOST_STARTS} starts", said)

    def fix(self, trial: Trial, kinds: list[str], said: str, code: int) -> None:
        """Do what the error says: put back what was damaged, make the folder writable, raise the limit."""
        for damage in reversed(trial.damages):
            has_gone_on = "Resumed training state" in said or damage.kind not in kinds
            if damage.whole and has_gone_on and code != NO_CHECKPOINT:
                continue  # from another checkpoint: this one belongs to what was given up
            damage.undo()
            if damage.kind not in kinds and damage.path.name in said:  # done to an earlier start, and found now
                self.survived[damage.kind] -= 1
                self.fixed[damage.kind] += 1
        trial.damages.clear()
        guilty = [name for name in kinds if self.kinds[name].codes & REFUSED]
        self.fixed.update(guilty)
        self.survived.update(name for name in kinds if name not in guilty)

    def finish(self, trial: Trial, start: Start, kinds: list[str], is_gentle: bool) -> None:
        """Compare a complete run with the one without a fault."""
        try:
            different = differences(outcome(trial), self.oracles[trial.name][0], trial)
        except (OSError, ValueError, LoopwrightError) as error:
            different = [f"what it left cannot be read: {error}"]
        self.complete[trial.name] += 1
        self.differences.update(name.partition(" ")[0] for name in different)
        if different:
            return self.fail(trial, kinds, f"other than without a fault: {', '.join(different)}", "")
        self.survived.update(kinds)
        if is_gentle:
            self.lives.append((trial.name, start))
        self.tell(f"{trial.name}: complete and equal, {len(trial.described)} faults and ends; {self.summary()}")
        shutil.rmtree(trial.folder)

    def summary(self) -> str:
        return f"{sum(self.injected.values())} faults, {self.starts} starts, {len(self.failures)} failures"

    def fail(self, trial: Trial, kinds: list[str], problem: str, said: str) -> None:
        self.failed.update(kinds)
        text = "\n".join([f"{trial.folder}: {problem}", *(f"    {line}" for line in trial.described[-12:])])
        tail = "\n".join(f"    | {line}" for line in said.splitlines()[-25:])
        self.failures.append(text)
        self.tell(f"FAILED {text}\n{tail}")

    # -------------------------------------------------------------- starts

    def start(self, trial: Trial, options: dict[str, Any], is_real: bool, is_new: bool = False) -> Start:
        self.starts += 1
        words = [*COMMANDS[trial.name], str(int(LENGTHS[trial.name] * self.scale))]
        if trial.name != "script" and trial.run.exists() and not is_new:
            words = ["resume", RUN, "--plain"]
        if is_real or "prefix" in options:
            self.real_starts += 1
            trial.is_journal_whole = False
            words = [*options.get("prefix", []), *words, *options.get("suffix", [])]
            with open(trial.folder / OUTPUT, "ab") as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", "loopwright", *words],
                    cwd=trial.folder,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            return Start(process, is_supervised="suffix" in options)
        weather = RawArray("d", 2)
        job = (trial.folder, words, weather, options.get("failpoint"), options.get("limits", {}))
        process = SERVER.Process(target=child, args=job)
        process.start()
        return Start(process, weather)

    def options(self, trial: Trial, kinds: list[str]) -> dict[str, Any]:
        """Draw a fault that is armed at the start, perhaps."""
        if self.draw.random() < 0.45:
            return {}
        name = self.draw_kind("start")
        options = self.kinds[name].act(trial, None) if name else None
        if not options:
            return {}
        options["kind"] = name
        if not options.get("failpoint", "").endswith("kill"):
            self.note(trial, name, kinds)
        return dict(options)

    def draw_kind(self, when: str, is_gentle: bool = False) -> str | None:
        """Draw a kind, those that were drawn less often before the others."""
        found = {name: kind for name, kind in self.kinds.items() if kind.when == when and kind.weight}
        found = {name: kind for name, kind in found.items() if kind.is_gentle or not is_gentle}
        weights = [
            kind.weight * (0.3 if kind.is_gentle and not is_gentle else 1) / (1 + self.injected[name])
            for name, kind in found.items()
        ]
        return self.draw.choices(list(found), weights)[0] if found else None

    def note(self, trial: Trial, name: str, kinds: list[str]) -> None:
        self.injected[name] += 1
        kinds.append(name)

    def inject_one(self, trial: Trial, when: str, start: Any, kinds: list[str], chance: float, **more: Any) -> None:
        name = self.draw_kind(when, **more) if self.draw.random() < chance else None
        before = len(trial.damages)
        with contextlib.suppress(FileNotFoundError):  # the run was faster
            if name and self.kinds[name].act(trial, start):
                self.note(trial, name, kinds)
        for damage in trial.damages[before:]:
            damage.kind = name or ""

    def attend(
        self, trial: Trial, start: Start, options: dict[str, Any], kinds: list[str], is_gentle: bool, deadline: float
    ) -> str | None:
        """Hit a process with faults until it ends; return what is wrong with its end."""
        limit = start.begin + HANGING_SECONDS + 6 * self.oracles[trial.name][1]
        next_fault = start.begin + self.draw.uniform(1, 4)
        kill_at = start.begin + options["kill_after"] if "kill_after" in options else None
        below: dict[int, str] = {}
        while start.code is None:
            time.sleep(0.1)
            now = time.monotonic()
            if len(start.samples) < 2 * (now - start.begin):
                start.sample()
                below = descendants(start.pid) or below
            if kill_at is None and "kill_at_end" in options and trial.update >= trial.total:
                kill_at = now + options["kill_at_end"]
            if kill_at is not None and now >= kill_at:
                below = descendants(start.pid)
                start.process.kill()
                start.process.wait() if "prefix" in options else start.process.join()
                break
            if now > limit:
                start.process.kill()
                return f"still running after {now - start.begin:.0f} s: hangs"
            if now >= next_fault and start.is_supervised:
                if trial.checkpoints() and KILLED in self.kinds and self.kinds[KILLED].act(trial, start):
                    self.note(trial, KILLED, kinds)
                next_fault = time.monotonic() + self.draw.uniform(3, 10)
            elif now >= next_fault and now < deadline and not options.get("is_quiet") and "prefix" not in options:
                self.inject_one(trial, "live", start, kinds, 1.0, is_gentle=is_gentle)
                next_fault = time.monotonic() + self.draw.uniform(1, 3)
                codes = self.kinds[kinds[-1]].codes if kinds else set()
                if codes & {-9, 75, 130} and "dead" not in kinds[-1] and "moved" not in kinds[-1]:
                    limit, next_fault = min(limit, now + HANGING_SECONDS), limit
        if start.code == -9 and "SIGKILL at a random time" not in kinds and options.get("kind") not in (None, *kinds):
            self.note(trial, options["kind"], kinds)  # its point was reached
        return self.orphans(below, "prefix" in options)

    def orphans(self, below: dict[int, str], is_launched: bool) -> str | None:
        """What a process left behind is to end by itself."""
        begin = time.monotonic()
        while living := left_alive(below):
            if time.monotonic() - begin > ORPHAN_SECONDS[is_launched]:
                for pid in living:
                    os.kill(pid, 9)
                return f"{len(living)} processes outlived their run by {ORPHAN_SECONDS[is_launched]:.0f} s"
            time.sleep(0.05)
        return None

    def restore_moved(self, trial: Trial) -> None:
        """Put a folder that was moved back, and make read-only ones writable."""
        away = trial.folder / "away"
        if away.exists() and not (trial.folder / faults.OUTCOME).exists():
            shutil.rmtree(trial.run, ignore_errors=True)
            away.rename(trial.run)
        for path in (trial.run, trial.run / "checkpoints"):
            if path.is_dir():
                path.chmod(0o755)

    def problem_of(self, trial: Trial, code: int | None, said: str, kinds: list[str], refusals: int) -> str | None:
        """What is wrong with the end of a process; None if its faults explain it."""
        # Workers whose parent is gone, or which lack descriptors, may print one of multiprocessing itself.
        shown = said.split("Traceback (most recent call last)")[1:]
        if any("/multiprocessing/" not in text[:200] for text in shown):
            return f"a traceback (exit {code})"
        if code == 0 or any(code in self.kinds[name].codes for name in kinds):
            named = code not in REFUSED or refusals or trial.is_named(said)
            return None if named else f"an error that names nothing of what was damaged (exit {code})"
        if code in REFUSED and (trial.damages or refusals) and refusals < MOST_REFUSALS:
            return None
        return f"refused again and again (exit {code})" if code in REFUSED and refusals else f"exit {code}"

    # -------------------------------------------------------------- the report

    def memory(self) -> list[str]:
        """Lines on memory and descriptors, and failures where they grow."""
        lines = []
        for name, start in self.lives:
            count = len(start.samples)
            if count < 30:
                continue
            middle, last = start.samples[count // 3 : 2 * count // 3], start.samples[2 * count // 3 :]
            seconds, sizes = [sample[0] for sample in middle + last], [sample[1] for sample in middle + last]
            slope = statistics.linear_regression(seconds, sizes).slope * 60
            (before, fds), (after, more) = (
                (statistics.median(s[1] for s in part), min(s[2] for s in part)) for part in (middle, last)
            )
            lines.append(
                f"| {name} | {seconds[-1]:.0f} | {before:.0f} | {after:.0f} | {slope:+.1f} | {fds:.0f} | {more:.0f} |"
            )
            if after > GROWTH * before or more > fds + 4:
                self.failures.append(f"{name}: memory {before:.0f} -> {after:.0f} MB, descriptors {fds} -> {more}")
        return lines

    def report(self, heading: str) -> str:
        rows = [
            f"| {name} | {self.injected[name]} | {self.survived[name]} | {self.fixed[name]} | {self.failed[name]} |"
            for name in self.kinds
        ]
        counters = (self.injected, self.survived, self.fixed, self.failed)
        rows.append("| all | " + " | ".join(str(sum(counter.values())) for counter in counters) + " |")
        runs = ", ".join(f"{count} {name}" for name, count in sorted(self.complete.items()))
        compared = ("weights", "order", "metrics", "metrics.jsonl")
        different = ", ".join(f"{name} {self.differences[name]}" for name in compared)
        lives = self.memory()
        parts = [
            heading,
            "",
            "| fault | injected | went on | refused, fixed | in a failed run |",
            "|---|--:|--:|--:|--:|",
        ]
        parts += [*rows, "", f"{sum(self.complete.values())} runs complete ({runs}) in {self.starts} starts,"]
        parts += [
            f"{self.real_starts} of them the command line itself. Different from the run without a fault: {different}."
        ]
        head = [
            "",
            "| process | seconds | MB, middle | MB, last third | MB per minute | descriptors at least, middle | last |",
        ]
        parts += [*head, "|---|--:|--:|--:|--:|--:|--:|", *lives, "", f"Failures: {len(self.failures)}."]
        return "\n".join([*parts, *(f"\n```\n{failure}\n```" for failure in self.failures)])


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


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
    parser.add_argument("--scale", type=float, default=1.0, help="length of the runs (default 1.0: some 1000 updates)")
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
    load, soak, names = (
        os.getloadavg()[0],
        Soak(root, kinds, arguments.seed, arguments.scale),
        arguments.runs.split(","),
    )
    for name in names:
        soak.undisturbed(name)
    soak.begin = time.monotonic()
    deadline, number = soak.begin + 60 * arguments.minutes, 0
    while time.monotonic() < deadline:
        soak.disturbed(names[number % len(names)], number // len(names) % 2 == 1, deadline)
        number += 1
    machine = f"Python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} cores, load {load:.1f}"
    report = soak.report(f"`python {' '.join(sys.argv)}`. {machine}.")
    if not soak.failures:
        shutil.rmtree(root)
    print(report)
    if arguments.output:
        arguments.output.write_text(report + "\n")
    return 1 if soak.failures else 0


if __name__ == "__main__":
    sys.exit(main())
