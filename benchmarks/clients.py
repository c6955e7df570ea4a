"""Which libraries on top of transformers' Trainer run on loopwright, with equal losses and the same files.

The programs are those of `tests/hf/clients.py`. Each library gets one process per side: transformers' own Trainer, and
loopwright after `loopwright.hf.install()`. Libraries that are not installed are left out, and named.

    python benchmarks/clients.py --output benchmarks/results/clients.md

The exit code is 1 if a program fails, or differs.
"""

import argparse
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ROOT / "tests" / "hf" / "clients.py"
LIBRARIES = ("trl", "sentence-transformers", "setfit", "peft")
# What transformers writes as pickles; loopwright has state.safetensors, state.json and MANIFEST.json instead.
STATE = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"}
EQUAL = ("bit for bit", "to 6 digits")
COLUMNS = ("client", "runs", "equal", "largest difference", "files", "resumed run")


def run(library: str, side: str, folder: Path) -> dict[str, Any]:
    paths = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, PROGRAMS, library, side, folder / side]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    return {line["case"]: line for line in lines}


def difference(theirs: dict[str, Any], ours: dict[str, Any]) -> float:
    """Return the largest relative difference of a logged loss, gradient norm or learning rate."""
    if len(theirs["logs"]) != len(ours["logs"]) or theirs["keys"] != ours["keys"]:
        return math.inf
    pairs = [
        (value, entry.get(name, math.inf))
        for other, entry in zip(theirs["logs"], ours["logs"], strict=True)
        for name, value in other.items()
    ]
    return max(abs(one - two) / max(1.0, abs(one)) for one, two in pairs)


def row(name: str, theirs: dict[str, Any], ours: dict[str, Any]) -> tuple[str, ...]:
    if "error" in theirs or "error" in ours:
        reason = (ours.get("error") or f"transformers: {theirs['error']}").strip().splitlines()[-1]
        return (name, f"no: {reason[:80]}", "", "", "", "")
    largest = difference(theirs, ours)
    bits = "bit for bit" if theirs["weights"] == ours["weights"] else "to 6 digits"
    missing = sorted(set(theirs["files"]) - STATE - set(ours["files"]))
    files = "all" if not missing else f"without {', '.join(missing)}"
    resumed = {True: "bit for bit", False: "differs", None: ""}[ours.get("resumed")]
    return (name, "yes", bits if largest <= 1e-6 else "no", f"{largest:.1e}", files, resumed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    asked = parser.parse_args()
    rows, versions, absent = [], [], []
    for library in LIBRARIES:
        try:
            versions.append(f"{library} {importlib.metadata.version(library)}")
        except importlib.metadata.PackageNotFoundError:
            absent.append(library)
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = {side: run(library, side, Path(folder)) for side in ("theirs", "ours")}
        names = dict.fromkeys([*found["theirs"], *found["ours"]]) or {"-": None}
        lost = {"error": "the process ended without a result"}
        rows += [row(f"{library}: {each}", *(found[side].get(each, lost) for side in found)) for each in names]
    others = [f"{name} {importlib.metadata.version(name)}" for name in ("transformers", "torch")]
    head = f"`python benchmarks/clients.py`: {', '.join(versions + others)}, Python {platform.python_version()}."
    lines = [head, *([f"Not installed: {', '.join(absent)}."] if absent else []), ""]
    lines += [f"| {' | '.join(each)} |" for each in (COLUMNS, ("---",) * len(COLUMNS), *rows)]
    runs, equal = (sum(each[index] in wanted for each in rows) for index, wanted in ((1, ["yes"]), (2, EQUAL)))
    lines += ["", f"{runs} of {len(rows)} run, {equal} are equal."]
    print("\n".join(lines))
    if asked.output is not None:
        asked.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    sys.exit(0 if runs == equal == len(rows) else 1)


if __name__ == "__main__":
    main()
