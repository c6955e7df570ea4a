"""All measurements that need a GPU, in parts of under ten minutes each, the most telling ones first.

    python benchmarks/gpu.py 1 --output FOLDER    tests/gpu, and BERT in every mode
    python benchmarks/gpu.py 2 --output FOLDER    decoders and vision
    python benchmarks/gpu.py 3 --output FOLDER    chats beside trl, and what is left

Each command writes its table to FOLDER after every side, so what was measured is kept if time runs out. A command that
takes longer than what is left of the part is ended, and the next ones are not started.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODES = "loopwright-casts loopwright-graph loopwright-free loopwright-compile loopwright-all"
WHOLE_RUN = "finetune.py --settings bert8run --sides hand transformers loopwright-auto loopwright-hf --timeout 150"
# The table's name and the command, in the order in which they are run.
PARTS = {
    "1": [
        ("gpu_tests", "-m pytest tests/gpu --noconftest -o addopts= -p no:cacheprovider -q --durations=5"),
        ("finetune_modes", f"finetune.py --settings bert8 bert32 --sides hand transformers {MODES} --timeout 60"),
        ("finetune_whole", WHOLE_RUN),
        ("finetune_hf", "finetune.py --settings bert8 --sides hand transformers loopwright-auto loopwright-hf"),
    ],
    "2": [
        ("pretrain", "pretrain.py --timeout 100"),
        ("vision", "vision.py --settings vit ready digits --timeout 60"),
    ],
    "3": [
        ("chat_full", "chat.py --settings full --timeout 90"),
        ("chat_lora", "chat.py --settings lora --timeout 90"),
        ("finetune_mlp", "finetune.py --settings mlp --sides hand loopwright-eager loopwright-auto --timeout 30"),
        ("memory", "memory.py"),
    ],
}


def main() -> int:
    """Run a part; return how many of its commands failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--output", type=Path, required=True, help="the folder of the tables")
    parser.add_argument("--seconds", type=float, default=540, help="how long the part may take (default 540)")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    end, failed = time.monotonic() + options.seconds, 0
    paths = [str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(each for each in paths if each)}
    for name, command in PARTS[options.part]:
        left = end - time.monotonic()
        if left < 15:
            sys.stderr.write(f"not started, as time is over: {name}\n")
            failed += 1
            continue
        words, table = command.split(), options.output / f"{name}.md"
        if words[0] == "-m":
            words += ["--junitxml", str(table.with_suffix(".xml"))]
        else:
            words = [str(ROOT / "benchmarks" / words[0]), *words[1:], "--output", str(table)]
        begun = time.monotonic()
        try:
            done = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, timeout=left)
            outcome = f"exit code {done.returncode}"
            failed += done.returncode != 0
        except subprocess.TimeoutExpired:
            outcome, failed = "ended, as time is over", failed + 1
        sys.stderr.write(f"{name}: {outcome} after {time.monotonic() - begun:.0f} s\n")
    return failed


if __name__ == "__main__":
    sys.exit(main())
