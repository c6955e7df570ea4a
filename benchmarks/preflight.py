"""How long preflight takes for a large data file, and how much memory.

A file of sentence pairs with labels is written, with quotes, commas and line breaks inside fields, then indexed and
preflighted, each in a process of its own. CPU time is scaled to 1 GB; the target is 30 s and 400 MB for a csv file of
that size. The file lies in the page cache, and a busy machine shows in the wall time only.
"""

import argparse
import csv
import json
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

THIS_FILE = Path(__file__).resolve()
SOURCE = THIS_FILE.parents[1] / "src"
SECONDS_PER_GB = 30.0
MEMORY_MB = 400.0
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog,",
    "and",
    "says",
    "hello",
    "to",
    "all",
    "in",
    "town",
    "because",
    "it",
    "was",
    "a",
    "fine",
    "day",
]
LABELS = ["no", "maybe", "yes"]
KINDS = ["csv", "jsonl", "json"]
STAGES = ["index", "preflight"]


# ---------------------------------------------------------------------------------------------------- the file


def rows_of(num_bytes: int):
    """Yield rows until about that many bytes are out."""
    generator = random.Random(0)
    done = number = 0
    while done < num_bytes:
        first, second = (" ".join(generator.choices(WORDS, k=generator.randint(8, 30))) for _ in range(2))
        if number % 7 == 0:
            first += ' "so he said"'
        if number % 50 == 0:
            second += "\nand a second line"
        yield {"id": number, "sentence1": first, "sentence2": second, "label": LABELS[number % 3]}
        done += len(first) + len(second) + 20
        number += 1


def write_file(path: Path, num_bytes: int) -> None:
    rows = rows_of(num_bytes)
    with open(path, "w", encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            writer = csv.DictWriter(file, ["id", "sentence1", "sentence2", "label"])
            writer.writeheader()
            writer.writerows(rows)
        elif path.suffix == ".jsonl":
            file.writelines(json.dumps(row) + "\n" for row in rows)
        else:
            file.write("[")
            for number, row in enumerate(rows):
                file.write((",\n" if number else "") + json.dumps(row))
            file.write("]")


# ------------------------------------------------------------------------------------------------ measurements


def measure(path: str, stage: str) -> None:
    """Do one stage in this process and print what it took."""
    sys.path.insert(0, str(SOURCE))
    from loopwright.sources import SCHEMAS, open_table, preflight

    told = []
    work: dict[str, Callable[[], int]] = {
        "index": lambda: len(open_table(path, say=told.append)),
        "preflight": lambda: preflight(SCHEMAS["text-classification"], data=path, say=told.append).files[0].num_rows,
    }
    wall, cpu = time.perf_counter(), time.process_time()
    num_rows = work[stage]()
    result = {
        "rows": num_rows,
        "wall": time.perf_counter() - wall,
        "cpu": time.process_time() - cpu,
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "calls": len(told),
        "torch": "torch" in sys.modules,
    }
    print(json.dumps(result))


def run(path: Path, stage: str) -> dict:
    command = [sys.executable, str(THIS_FILE), "--measure", stage, "--file", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout)


def report(folder: Path, num_mb: int, kinds: list[str]) -> tuple[str, bool]:
    """Return the table, and whether csv keeps to the targets."""
    lines = [
        f"python {' '.join(sys.argv)}",
        f"Python {platform.python_version()}, {os.cpu_count()} cores, load at start {os.getloadavg()[0]:.1f}",
        "",
        "| file | rows | stage | wall s | CPU s | CPU s per GB | peak MB | progress calls |",
        "|---|---|---|---|---|---|---|---|",
    ]
    is_good = True
    for kind in kinds:
        path = folder / f"rows.{kind}"
        write_file(path, num_mb * 1_000_000)
        size = path.stat().st_size / 1e9
        for stage in STAGES:
            found = run(path, stage)
            assert not found["torch"], "preflight imports no torch"
            lines.append(
                f"| {size * 1000:.0f} MB {kind} | {found['rows']:,} | {stage} | {found['wall']:.1f} "
                f"| {found['cpu']:.1f} | {found['cpu'] / size:.1f} | {found['memory']:.0f} | {found['calls']} |"
            )
            if kind == "csv" and stage == "preflight":
                is_good = found["cpu"] / size <= SECONDS_PER_GB and found["memory"] <= MEMORY_MB
        path.unlink()
    lines += [
        "",
        f"Target for csv: {SECONDS_PER_GB:.0f} s per GB, {MEMORY_MB:.0f} MB: {'kept' if is_good else 'MISSED'}",
    ]
    return "\n".join(lines), is_good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=200, help="size of each file")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["csv"], help="which files")
    parser.add_argument("--folder", type=Path, default=None, help="where the file is written")
    parser.add_argument("--output", type=Path, default=None, help="also writes the report")
    parser.add_argument("--check", action="store_true", help="exit status 1 when a target is missed")
    parser.add_argument("--measure", choices=STAGES, help=argparse.SUPPRESS)
    parser.add_argument("--file", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.file, arguments.measure)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        text, is_good = report(Path(folder), arguments.megabytes, arguments.kinds)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n", encoding="utf-8")
    if arguments.check and not is_good:
        sys.exit(1)


if __name__ == "__main__":
    main()
