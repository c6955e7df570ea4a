"""The first hour with dirty files: each kind goes by the printed fixes alone to a model and aligned predictions.

For each kind of `tests/cli/newcomers.py`, `lw train` is run on the file as it is. If it is refused, the first way of
the printed `fix:` is followed literally, and the command is run again, at most six times. Then `lw predict` is run on
the same file in the same way, and its rows are counted. Nothing else is known about the file.

    python benchmarks/first_hour.py --output benchmarks/results/first_hour.md
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT)]

from cli import newcomers  # noqa: E402
from cli.following import failure_in, follow  # noqa: E402

MOST_FIXES = 6
SHORT = ["--max_steps", "4", "--threads", "1", "--no_rehearsal", "--quiet"]
SMALL_IMAGES = ["--batch", "4"]


class Way(NamedTuple):
    """How a command got to its end: the codes met, the fixes followed, and why it did not end well, if so."""

    words: list[str]
    codes: list[str]
    fixes: list[str]
    problem: str


def run(words: list[str], folder: Path) -> tuple[int, str]:
    """Run `lw` in a folder; return its exit code and what it printed as errors."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    line = [sys.executable, "-m", "loopwright", *words]
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stderr


def lead(words: list[str], folder: Path) -> Way:
    """Run a command, following the first way of each printed fix, until it ends well."""
    codes: list[str] = []
    fixes: list[str] = []
    for _ in range(MOST_FIXES + 1):
        code, printed = run(words, folder)
        if code == 0:
            return Way(words, codes, fixes, "")
        try:
            failure = failure_in(printed)
            codes.append(failure.code)
            fixes.append(failure.ways[0])
            here = Path.cwd()
            os.chdir(folder)
            try:
                words = follow(words, failure.ways[0])
                words += SHORT if failure.ways[0].startswith("lw train ") else []
            finally:
                os.chdir(here)
        except AssertionError as error:
            return Way(words, codes, fixes, " ".join(str(error).split())[:200])
    return Way(words, codes, fixes, f"refused {MOST_FIXES} times")


def data_of(words: list[str]) -> list[str]:
    """Return the flags about reading the data that the fixes of a training command added, for `lw predict`."""
    found = []
    for flag in ("--encoding", "--file_kind", "--delimiter", "--quoting", "--sheet"):
        found += words[words.index(flag) : words.index(flag) + 2] if flag in words else []
    return found


def measure(name: str, kind: newcomers.Kind) -> tuple[bool, str]:
    """Lead one kind to its predictions; return whether that worked, and a line of the table."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place).resolve()
        data = kind.write(folder)
        extra = newcomers.MISTYPED.get(name, []) + (SMALL_IMAGES if kind.num_rows is None else [])
        train = lead(["train", kind.task, "--data", str(data), "--out", "run", *SHORT, *extra], folder)
        given = train.words[train.words.index("--data") + 1] if "--data" in train.words else str(data)
        images = Path(given) if Path(given).is_dir() else None
        if images is not None and (images / "images").is_dir():
            given = str(images / "images")
        predict = Way([], [], [], "not reached")
        num_found = 0
        if not train.problem:
            run_name = "run" if (folder / "run").is_dir() else "last"
            predict = lead(["predict", run_name, given, "--out", "out.jsonl", *data_of(train.words)], folder)
            out = folder / "out.jsonl"
            num_found = len(out.read_text(encoding="utf-8").splitlines()) if out.is_file() else 0
        expected = kind.num_rows or sum(1 for each in Path(given).rglob("*") if each.suffix in (".png", ".jpg"))
        works = not train.problem and not predict.problem and num_found == expected
        fixes = "; ".join(f"`{_short(fix, folder)}`" for fix in [*train.fixes, *predict.fixes]) or "none"
        codes = ", ".join(dict.fromkeys([*train.codes, *predict.codes])) or "none"
        problem = train.problem or predict.problem
        result = f"{num_found} of {expected} rows" + (f": {_short(problem, folder)}" if problem else "")
        return works, f"| {name} | {kind.task} | {codes} | {fixes} | {result} |"


def _short(text: str, folder: Path) -> str:
    return re.sub(r"\s+", " ", text.replace(f"{folder}/", "").replace(str(folder), "DATA")).replace("|", "\\|")[:160]


def main() -> None:
    """Measure all kinds, print the table, and write it where --output says."""
    parser = argparse.ArgumentParser(description="dirty files, led by the printed fixes alone")
    parser.add_argument("--kinds", nargs="+", help="parts of names of kinds; all if unset")
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()
    kinds = {**newcomers.KINDS, **newcomers.image_kinds()}
    if arguments.kinds:
        kinds = {name: kind for name, kind in kinds.items() if any(part in name for part in arguments.kinds)}
    lines, num_worked = [], 0
    for name, kind in kinds.items():
        works, line = measure(name, kind)
        num_worked += works
        lines.append(line)
        print(line, file=sys.stderr, flush=True)
    text = "\n".join(
        [
            f"`python benchmarks/first_hour.py`: Python {platform.python_version()}, {platform.machine()}.",
            "",
            f"{num_worked} of {len(kinds)} kinds reach a model and aligned predictions by the printed fixes alone.",
            "",
            "| kind | task | refused with | fixes followed | predictions |",
            "|---|---|---|---|---|",
            *lines,
            "",
        ]
    )
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
