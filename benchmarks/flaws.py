"""Which of pytorch-accelerated's known flaws each library has: one table, from the same tests run on both.

`tests/flaws` holds one test per flaw, named after the right behaviour and written to the public API that the
libraries share. Each library that can be imported gets one run of pytest in a process of its own.

    python benchmarks/flaws.py
    PYTHONPATH=/where/pytorch_accelerated/is python benchmarks/flaws.py --output flaws.md

The exit code is 1 if loopwright fails any of them.
"""

import argparse
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests" / "flaws"
OURS, PEER = "loopwright", "pytorch_accelerated"
TEST_NAME = re.compile(r"test_flaw_(\d\d)_(\w+)")
FROM_BEST_TO_WORST = ["pass", "skip", "fail"]


def flaws_tested() -> dict[int, str]:
    """The right behaviours by number, as the names of the tests state them."""
    definitions = [
        match
        for path in sorted(TESTS.glob("test_*.py"))
        for match in re.finditer(rf"^def {TEST_NAME.pattern}\(", path.read_text(), re.MULTILINE)
    ]
    if not definitions:
        raise SystemExit(f"{TESTS}: no tests of flaws")
    repeated = [number for number, count in Counter(match[1] for match in definitions).items() if count > 1]
    if repeated:
        raise SystemExit(f"{TESTS}: more than one test for {', '.join(repeated)}")
    return {int(match[1]): match[2].replace("_", " ") for match in sorted(definitions, key=lambda m: m[1])}


def run_python(package: str, *arguments: str) -> subprocess.CompletedProcess:
    """Run Python with the package as the subject of the tests and this checkout's loopwright on the path."""
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"LOOPWRIGHT_FLAWS_SUBJECT": package, "PYTHONPATH": os.pathsep.join(paths)}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, **streams)


def can_be_tested(package: str) -> bool:
    """Whether the package can be imported; otherwise every test would fail, and the table would be a lie."""
    done = run_python(package, "-c", f"from {package} import Trainer")
    if done.returncode:
        print(f"{package} is left out: {done.stdout.strip().splitlines()[-1]}", file=sys.stderr)
    return done.returncode == 0


def version_of(package: str) -> str:
    """The installed version of a package."""
    try:
        return importlib.metadata.version(package.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return "(this checkout)"


def outcomes_of(package: str) -> dict[int, str]:
    """Run the tests on a package: pass, fail or skip by number; a test that never ran is left out."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        # Warnings are shown, not raised: a library is judged by what it does.
        options = ["-q", "-p", "no:cacheprovider", "-W", "default", "--continue-on-collection-errors"]
        done = run_python(package, "-m", "pytest", str(TESTS), *options, f"--junitxml={report}")
        if not report.exists():
            raise SystemExit(f"{done.stdout[-3000:]}\npytest on {package}: exit code {done.returncode}")
        cases = list(ElementTree.parse(report).iter("testcase"))

    outcomes: dict[int, str] = {}
    for case in cases:
        match = TEST_NAME.match(case.get("name", ""))
        if match:  # of a test with parameters, the worst counts
            number, outcome = int(match[1]), outcome_of(case)
            outcomes[number] = max(outcome, outcomes.get(number, outcome), key=FROM_BEST_TO_WORST.index)
    return outcomes


def outcome_of(case: ElementTree.Element) -> str:
    """What pytest reported of one test."""
    if case.find("failure") is not None or case.find("error") is not None:
        return "fail"
    return "skip" if case.find("skipped") is not None else "pass"


def table(flaws: dict[int, str], outcomes: dict[str, dict[int, str]]) -> list[str]:
    """The markdown table: a row per flaw, and the totals; a dash for a package that is not there."""
    lines = ["| # | right behaviour | loopwright | pytorch-accelerated |", "|--:|---|---|---|"]
    columns = [outcomes.get(package) for package in (OURS, PEER)]
    for number, behaviour in flaws.items():
        cells = ["-" if column is None else column.get(number, "not run") for column in columns]
        lines.append(f"| {number} | {behaviour} | {' | '.join(cells)} |")
    passed = ["-" if column is None else list(column.values()).count("pass") for column in columns]
    return [*lines, f"| | **passed, of {len(flaws)}** | **{passed[0]}** | **{passed[1]}** |"]


def main() -> int:
    """Run the tests on every library that is there, print the table, and judge loopwright."""
    parser = argparse.ArgumentParser(description="The flaw tests, on loopwright and on pytorch-accelerated")
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()

    flaws = flaws_tested()
    outcomes = {}
    for package in filter(can_be_tested, (OURS, PEER)):
        print(f"testing {package} {version_of(package)}", file=sys.stderr)
        outcomes[package] = outcomes_of(package)

    versions = [f"{package} {version_of(package)}" for package in (*outcomes, "accelerate", "torch")]
    versions.append(f"Python {platform.python_version()}")
    report = [f"`python benchmarks/flaws.py`: {', '.join(versions)}.", "", *table(flaws, outcomes)]
    print("\n".join(report))
    if arguments.output:
        arguments.output.write_text("\n".join(report) + "\n")

    failed = [number for number in flaws if outcomes.get(OURS, {}).get(number) != "pass"]
    if OURS in outcomes and failed:
        print(f"loopwright fails {len(failed)}: {', '.join(map(str, failed))}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
