"""All measurements that need a GPU, in four parts of at most ten minutes each.

    python benchmarks/gpu.py --list                   what there is, and about how many seconds each takes
    python benchmarks/gpu.py 1                        pretraining: GPT-2 and a 0.6 B decoder, all sides
    python benchmarks/gpu.py 2                        BERT at batch 8 and 32, all sides
    python benchmarks/gpu.py 3                        conversations beside trl, a whole run, start, MLP, ready images
    python benchmarks/gpu.py 4                        images from files, tests/gpu, memory
    python benchmarks/gpu.py --only gpt2 tests        these alone
    python benchmarks/gpu.py --check                  whether all of it starts, on the CPU with tiny models

Every command writes its table to the output folder after each side, so what was measured is kept if time runs out.
The output folder is $OUT, or results/. A command that takes longer than what is left is ended, those that would not
fit are left out, and a command that fails does not stop the others: what it has printed last is printed here.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results")
FULL = (
    "chat.py --settings full --sides trl loopwright-compile loopwright-compile-flat loopwright-auto loopwright-eager "
    "trl-flex transformers"
)
LORA = (
    "chat.py --settings lora --sides trl loopwright-compile loopwright-compile-flat loopwright-auto loopwright-eager "
    "transformers"
)
EAGER = "chat.py --settings full --sides trl loopwright-eager"
WHOLE = "finetune.py --settings bert8run --sides loopwright-auto hand loopwright-hf"
MLP = "finetune.py --settings mlp --sides hand loopwright-eager loopwright-auto"
START = "start.py --runs 1 --tasks"
VISION = "vision.py --sides compile-device hand auto-device auto"


class Item(NamedTuple):
    """A command, with the seconds that it takes on an H200 with 16 cores, by estimate."""

    part: str
    command: str
    seconds: int
    check: str = ""  # the command on a CPU


ITEMS = {
    "pretrain": Item("1", "pretrain.py --timeout 100", 440, "pretrain.py --tiny"),
    "bert": Item("2", "finetune.py --settings bert8 bert32 --timeout 60", 545, "finetune.py --settings bert8 --tiny"),
    "chat_lora": Item("3", f"{LORA} --timeout 70", 190, f"{LORA} --tiny"),
    "bert8run": Item("3", f"{WHOLE} --timeout 100", 165, f"{WHOLE} --tiny"),
    "chat_eager": Item("3", f"{EAGER} --timeout 70", 70, f"{EAGER} --tiny"),
    "start": Item("3", f"{START} text-classification chat image-classification", 50, f"{START} chat"),
    "mlp": Item("3", f"{MLP} --timeout 30", 40, f"{MLP} --tiny"),
    "ready": Item("3", "vision.py --settings ready --timeout 50", 60, "vision.py --settings ready --tiny"),
    "chat_full": Item("4", f"{FULL} --timeout 70", 230, f"{FULL} --tiny"),
    "tests": Item("4", "gpu_tests.py", 100),
    "vit": Item("4", f"{VISION} --settings vit --timeout 60", 95, f"{VISION} --settings vit --tiny"),
    "digits": Item("4", "vision.py --settings digits --timeout 60", 40, "vision.py --settings digits --tiny"),
    "memory": Item("4", "memory.py", 60, "memory.py --size tiny"),
}


def main() -> int:
    """Run a part; return how many of its commands failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=sorted({item.part for item in ITEMS.values()}))
    parser.add_argument("--only", nargs="+", choices=ITEMS, help="these alone, in this order")
    parser.add_argument("--list", action="store_true", help="print what there is")
    parser.add_argument("--check", action="store_true", help="whether all of it starts, on the CPU")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the tables (default $OUT, or results/)")
    parser.add_argument("--seconds", type=float, default=560, help="how long all of it may take (default 560)")
    options = parser.parse_args()
    names = options.only or [name for name, item in ITEMS.items() if options.part in (None, item.part)]
    if options.list:
        for name in names:
            print(f"{ITEMS[name].part}  {name:10} {ITEMS[name].seconds:4} s  {ITEMS[name].command}")
        return 0
    options.output.mkdir(parents=True, exist_ok=True)
    end, failed = time.monotonic() + options.seconds, 0
    for name in names:
        command = ITEMS[name].check if options.check else ITEMS[name].command
        left = end - time.monotonic()
        if left < 25 or not command:
            print(f"{name}: {'left out, as time is over' if command else 'needs a GPU'}", flush=True)
            continue
        failed += not _run(name, command, left, options.output)
    return failed


def _run(name: str, command: str, left: float, output: Path) -> bool:
    script, *words = command.split()
    paths = [str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(each for each in paths if each), "HF_HUB_OFFLINE": "1"}
    table, begun = output / f"{name}.md", time.monotonic()
    call = [sys.executable, str(ROOT / "benchmarks" / script), *words, "--output", str(table)]
    log = output / "log.txt"  # of all commands
    with log.open("a") as file:
        begins = file.tell()
        try:
            done = subprocess.run(call, cwd=ROOT, env=environment, timeout=left, stdout=file, stderr=file)
            outcome = "done" if done.returncode == 0 else f"failed with exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            outcome = "ended, as time is over"
    print(f"{name}: {outcome} after {time.monotonic() - begun:.0f} s", flush=True)
    with log.open() as file:
        file.seek(begins)
        shown = file.read()[-3000:] if outcome != "done" else ""
    print(shown, table.read_text() if table.exists() else "", sep="\n", flush=True)
    return outcome == "done"


if __name__ == "__main__":
    sys.exit(main())
