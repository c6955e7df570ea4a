"""The tests in tests/gpu, each file in a process of its own and all at the same time.

python benchmarks/gpu_tests.py --output benchmarks/results/gpu_tests.md
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree

import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "gpu_tests.md"


def rows_of(file: Path, folder: Path) -> list[str]:
    """Return a line for each test of a file that has been run, and what those that failed have to say."""
    report = folder / f"{file.stem}.xml"
    if not report.exists():
        return [f"| {file.name} | | no report: {(folder / file.stem).read_text()[-300:]!r} | |"]
    rows = []
    for case in ElementTree.parse(report).iter("testcase"):
        found = next((each for each in case if each.tag in ("failure", "error", "skipped")), None)
        outcome = "passed" if found is None else f"{found.tag}: {(found.get('message') or '').splitlines()[0][:200]}"
        name = case.get("name", "").removeprefix("test_").replace("_", " ").replace("|", "/")
        rows.append(f"| {file.name} | {name} | {outcome.replace('|', '/')} | {float(case.get('time', 0)):.1f} |")
    return rows


def main() -> int:
    """Run the tests; return how many files have a test that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="these alone")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--timeout", type=float, default=150, help="seconds for all of them (default 150)")
    options = parser.parse_args()
    begun, failed = time.monotonic(), 0
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    paths = [str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(each for each in paths if each)}
    # Otherwise a library that looks for a GPU would initialize CUDA in a server that processes are forked from.
    environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    rows: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = ["-m", "pytest", "--noconftest", "-o", "addopts=", "-p", "no:cacheprovider", "-q", "--tb=short"]
        running = {}
        for file in options.files or sorted((ROOT / "tests" / "gpu").glob("test_*.py")):
            command = [sys.executable, *words, str(file), "--junitxml", str(folder / f"{file.stem}.xml")]
            with (folder / file.stem).open("w") as log:
                running[file] = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        for file, process in running.items():
            try:
                code = process.wait(max(1.0, begun + options.timeout - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            rows += rows_of(file, folder)
            if code:
                failed += 1
                sys.stderr.write((folder / file.stem).read_text()[-3000:])
            passed, seconds = sum("| passed |" in row for row in rows), time.monotonic() - begun
            lines = [
                "# Tests on a CUDA device",
                "",
                f"`python benchmarks/gpu_tests.py`: {device}, torch {torch.__version__}, Python "
                f"{platform.python_version()}, {passed} of {len(rows)} passed in {seconds:.0f} s.",
                "",
                "| file | test | outcome | seconds |",
                "|---|---|---|--:|",
                *rows,
            ]
            options.output.write_text("\n".join(lines) + "\n")
    return failed


if __name__ == "__main__":
    sys.exit(main())
