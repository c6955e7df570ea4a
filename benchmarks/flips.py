"""One flipped bit in each file of a run folder: is it detected and named, repaired, or harmless?

A small text-classification run is killed after its first checkpoint, and a copy of it is finished. Each trial flips one
random bit of one file. The killed run is then resumed to the end, and the finished one evaluates and predicts, each in
a process of its own. Weights, metrics and predictions are compared with those of the undamaged folders:

    named       refused with an error that names the file or its folder
    told        a message names the file, and the run goes on: from an older checkpoint, or with a setting as it is now
    rebuilt     the same outcome, and the file is as before the flip
    harmless    the same outcome

The exit code is 1 if an outcome differed without a word, or if an error was not one of ours.

    OMP_NUM_THREADS=1 python benchmarks/flips.py --trials 3
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[1] / "src"
sys.path.insert(0, str(SOURCE))  # the package of this checkout, whichever is installed
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import loopwright.runs.train  # noqa: E402, F401 - once, before the processes are forked
from loopwright import api, failpoints  # noqa: E402
from loopwright.errors import LoopwrightError  # noqa: E402

ENDINGS = ("named", "told", "rebuilt", "harmless", "SILENT", "TRACEBACK")
WORDS = ("good", "bad", "fine", "dull", "great", "awful", "warm", "cold")


def in_a_fork(do: Callable[[], Any], place: Path) -> dict[str, Any]:
    """Run a function in a forked process, and return its result, its error and what it printed."""
    place.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        said, found = io.StringIO(), {"error": "", "is_ours": True, "result": None}
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                found["result"] = do()
            except LoopwrightError as error:
                found["error"] = str(error)
            except BaseException:  # noqa: BLE001 - it is reported
                found.update(error=traceback.format_exc(), is_ours=False)
        place.write_text(json.dumps({**found, "said": said.getvalue()}, default=str))
        os._exit(0)
    os.waitpid(pid, 0)
    return json.loads(place.read_text()) if place.exists() else {"error": "", "is_ours": True, "result": None}


def weights_of(run: Path) -> str:
    return hashlib.sha256((run / "model" / "model.safetensors").read_bytes()).hexdigest()


def resumed(run: Path) -> Any:
    finished = api.resume(run)
    return weights_of(run), finished.metrics


def used(run: Path) -> Any:
    opened = api.Run.find(run)
    return list(opened.predict(["a good film", "an awful plot"])), opened.evaluate()


def flip(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def ending(found: dict[str, Any], expected: Any, path: Path, before: bytes) -> str:
    names = (path.name, path.parent.name, "checkpoint" if "checkpoints" in path.parts else path.name)
    if not found["is_ours"]:
        return "TRACEBACK"
    if found["error"]:
        return "named" if any(name in found["error"] for name in names) else "TRACEBACK"
    if path.name in found["said"] or (path.parent.name in found["said"] and "damaged" in found["said"]):
        return "told"
    if found["result"] != expected:
        return "SILENT"
    return "rebuilt" if path.exists() and path.read_bytes() == before else "harmless"


def prepare(folder: Path) -> tuple[Path, Path]:
    """Return a run that was killed after its first checkpoint, and one that is finished."""
    draw = random.Random(0)
    rows = ["text,label"]
    for _ in range(48):
        words = [draw.choice(WORDS) for _ in range(draw.randint(3, 12))]
        rows.append(f"{' '.join(words)},{'pos' if words[0] in WORDS[::2] else 'neg'}")
    (folder / "rows.csv").write_text("\n".join(rows) + "\n")
    flags = {"data": folder / "rows.csv", "epochs": 2, "batch": 16, "threads": 1, "lr": 1e-3, "rehearsal": False}

    def train() -> None:
        failpoints.arm("after_commit:1:kill")
        flags["train_sampling_strategy"] = "group_by_length"
        api.train("text-classification", output_dir=folder / "killed", quiet=True, **flags)

    found = in_a_fork(train, folder / "found.json")
    if found["error"]:
        raise SystemExit(found["error"])
    shutil.copytree(folder / "killed", folder / "finished")
    found = in_a_fork(lambda: resumed(folder / "finished"), folder / "found.json")
    if found["error"]:
        raise SystemExit(found["error"])
    return folder / "killed", folder / "finished"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=3, help="flips per file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--act", choices=("resumed", "used"), help="only one of the two")
    asked = parser.parse_args()
    started, counts = time.monotonic(), defaultdict[str, Counter[str]](Counter)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.chdir(folder)
        sides = dict(zip(prepare(folder), (resumed, used), strict=True))
        print("| file | " + " | ".join(ENDINGS) + " |\n|---" + "|---" * len(ENDINGS) + "|", flush=True)
        for original, act in sides.items():
            if asked.act not in (None, act.__name__):
                continue
            oracle = shutil.copytree(original, folder / "oracle")
            expected = in_a_fork(lambda act=act, oracle=oracle: act(oracle), folder / "found.json")["result"]
            assert expected, original
            shutil.rmtree(oracle)
            for path in sorted(path for path in original.rglob("*") if path.is_file() and path.stat().st_size):
                place = path.relative_to(original)
                for trial in range(asked.trials):
                    copy = shutil.copytree(original, folder / "copy")
                    flip(copy / place, random.Random(f"{asked.seed} {original.name} {place} {trial}"))
                    found = in_a_fork(lambda act=act, copy=copy: act(copy), folder / "found.json")
                    kind = ending(found, expected, copy / place, path.read_bytes())
                    counts[f"{place.as_posix()} ({act.__name__})"][kind] += 1
                    if kind.isupper():
                        print(
                            f"{kind}: {place} ({act.__name__})\n{found['error']}\n{found.get('said')}", file=sys.stderr
                        )
                    shutil.rmtree(copy)
                row = counts[f"{place.as_posix()} ({act.__name__})"]
                cells = " | ".join(str(row[kind] or "") for kind in ENDINGS)
                print(f"| {place.as_posix()} ({act.__name__}) | {cells} |", flush=True)
    total = sum(counts.values(), Counter[str]())
    print(f"\n{sum(total.values())} flips in {time.monotonic() - started:.0f} s: {dict(total)}")
    return int(bool(total["SILENT"] + total["TRACEBACK"]))


if __name__ == "__main__":
    sys.exit(main())
