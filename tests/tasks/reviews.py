"""Small made-up data for the tests of tasks and of the command line: words decide the label."""

import csv
import json
import random
from pathlib import Path

GOOD = ("great", "lovely", "fine", "superb", "nice")
BAD = ("awful", "bad", "poor", "boring", "dull")
NEUTRAL = ("the", "film", "a", "plot", "with", "and", "actors", "it", "was")


def rows(count: int = 96, seed: int = 0) -> list[dict[str, str]]:
    """Return reviews and whether they are positive; no two are alike."""
    chosen = random.Random(seed)
    made = []
    for number in range(count):
        is_good = chosen.random() < 0.5
        words = chosen.choices(NEUTRAL, k=5) + chosen.choices(GOOD if is_good else BAD, k=3)
        chosen.shuffle(words)
        made.append({"review": f"{' '.join(words)} {number}", "stars": "pos" if is_good else "neg"})
    return made


def write_csv(path: Path, made: list[dict[str, str]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(made[0]))
        writer.writeheader()
        writer.writerows(made)
    return path


def write_jsonl(path: Path, made: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")
    return path


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def events(run: Path) -> list[dict]:
    """Return what metrics.jsonl says of the training itself, without times."""
    return [
        {name: value for name, value in event.items() if name not in ("time", "seconds")}
        for event in read_lines(run / "metrics.jsonl")
        if event["event"] not in ("start", "checkpoint", "end", "speed")
    ]
