"""Run folders as the tasks leave them, small enough to be worked out by hand."""

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from loopwright.report import ReportServer

LABELS = ["cat", "dog", "owl"]
# (true, predicted, confidence): 3 cats of which 1 is taken for a dog, 2 dogs, 1 owl taken for a cat.
CLASSIFIED = [
    ("cat", "cat", 0.9),
    ("cat", "dog", 0.8),
    ("cat", "cat", 0.7),
    ("dog", "dog", 0.95),
    ("dog", "dog", 0.6),
    ("owl", "cat", 0.55),
]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def records(num_updates: int = 40, resumed_at: int | None = None) -> list[dict[str, Any]]:
    """Return the records of a run: a log and its speed every 10 updates, an evaluation and a save every 20.

    An update takes 0.1 s, of which a quarter is spent waiting for data; an evaluation 2 s, a save 0.5 s.
    """
    seconds, rows = 0.0, []
    spent = {"train_seconds": 0.0, "wait_seconds": 0.0, "evaluation_seconds": 0.0, "save_seconds": 0.0}

    def log(event: str, **fields: Any) -> None:
        rows.append({"event": event, **fields, "seconds": round(seconds, 3), "time": 1_800_000_000 + seconds})

    log("start", update=0, epoch=1, run_id="a", resumed_from=None, tier="T0", seed=42)
    for update in range(10, num_updates + 1, 10):
        seconds += 1.0
        spent["train_seconds"] += 0.75
        spent["wait_seconds"] += 0.25
        log("log", update=update, epoch=1, loss=2.0 / update, lr=0.1 / update, gradient_norm=1.0 + update % 20)
        speed = {"samples_per_second": 160.0, "data_wait": 0.25, "peak_memory_bytes": 5e8, "padding_waste": 0.4}
        log("speed", update=update, epoch=1, tokens_per_second=900.0, **speed, **spent)
        if update % 20 == 0:
            seconds += 2.0
            value = 0.5 + update / 200
            bounds = {"eval_accuracy_low": value - 0.1, "eval_accuracy_high": value + 0.1}
            log("evaluation", update=update, epoch=1, eval_accuracy=value, eval_loss=1.0 / update, **bounds)
            seconds += 0.5
            spent["evaluation_seconds"] += 2.0
            spent["save_seconds"] += 0.5
            log("checkpoint", update=update, checkpoint=f"step-{update:010d}")
        if update == resumed_at:
            log("start", update=update, epoch=1, run_id="a", resumed_from=f"step-{update:010d}", tier="T0", seed=42)
    log("end", state="done", message=None, **spent)
    return rows


def data_plan(task: str, labels: list[str] | None = None, sha: str = "a1") -> dict[str, Any]:
    counts = {"train": {"cat": 6, "dog": 3, "owl": 1}, "validation": {"cat": 3, "dog": 2, "owl": 1}}
    file = {"kind": "csv", "num_bytes": 1234, "settings": {"kind": "csv"}}
    return {
        "format": 1,
        "task": task,
        "files": [
            {"path": "/gone/train.csv", "sha256": sha * 32, "num_rows": 10, **file},
            {"path": "/gone/validation.csv", "sha256": "b2" * 32, "num_rows": 6, **file},
        ],
        "columns": {"text": "text", "label": "label"},
        "kinds": {"text": "text", "label": "label"},
        "labels": None if labels is None else {"kind": "class", "names": labels, "label_map": {}, "separator": "|"},
        "splits": {
            "train": {"num_rows": 10, "parts": [{"file": 0, "rows": "all"}]},
            "validation": {"num_rows": 6, "parts": [{"file": 1, "rows": "all"}]},
        },
        "counts": counts if labels else {},
        "lengths": {"text": {"characters": {"p50": 11, "p95": 30, "max": 44}}},
        "duplicates": {"validation": 2},
        "dropped": {"empty text": 4},
        "warnings": ["owl is rare"],
        "guesses": [],
    }


def classified(wrong_text: str = "a small cat") -> list[dict[str, Any]]:
    rows = []
    for position, (true, predicted, confidence) in enumerate(CLASSIFIED):
        row = {"position": position, "prediction": predicted, "reference": true, "confidence": confidence}
        rows.append({**row, "loss": 0.1 + position, "text": f"{wrong_text} {'x' * position}"})
    return rows


def make_run(
    path: Path,
    task: str = "text-classification",
    predictions: list[dict[str, Any]] | None = None,
    *,
    labels: list[str] | None = None,
    metrics: list[dict[str, Any]] | None = None,
    result: dict[str, Any] | None = None,
    config: dict[str, tuple[Any, str]] | None = None,
    state: str = "done",
) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    write_json(path / "status.json", {"state": state, "update": 40, "epoch": 1, "last_checkpoint": "step-0000000040"})
    write_lines(path / "metrics.jsonl", records() if metrics is None else metrics)
    write_json(path / "data.json", data_plan(task, labels))
    default = {"learning_rate": (0.1, "flag"), "seed": (42, "default"), "dataloader_num_workers": (0, "default")}
    settings = config or default
    lines = [f"{name}: {json.dumps(value)}  # {source}\n" for name, (value, source) in settings.items()]
    (path / "config.yaml").write_text("".join(lines), encoding="utf-8")
    recorded = {
        "sources": {name: source for name, (_, source) in settings.items()},
        "environment": {
            "command": "loopwright train x --data d.csv",
            "folder": "/gone",
            "torch": "2.9",
            "git commit": "abc",
            "uncommitted changes": "2 lines of diff in command.txt",
        },
        "model": "tiny  1 M parameters",
        "rehearsal": "1 step: bit for bit the same",
        "guarantee": "T0, bit-exact: as ever",
    }
    created = {"id": path.name, "task": task, "created": "2027-01-15T07:59:58+00:00"}
    write_json(path / "run.json", {**created, **recorded})
    if result is not None:
        write_json(path / "result.json", result)
    if predictions is not None:
        write_lines(path / "eval" / "predictions.jsonl", predictions)
        worst = sorted((row for row in predictions if "loss" in row), key=lambda row: -row["loss"])
        write_lines(path / "eval" / "worst.jsonl", worst[:50])
    return path


def finished_run(path: Path, **changes: Any) -> Path:
    return make_run(path, **{"predictions": classified(), "labels": LABELS, "result": RESULT, **changes})


@contextlib.contextmanager
def served(run: Path) -> Iterator[ReportServer]:
    with ReportServer(run, 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


RESULT = {
    "task": "text-classification",
    "metric": "accuracy",
    "direction": "max",
    "update": 40,
    "metrics": {"accuracy": 0.7, "f1": 0.6, "loss": 0.4},
    "intervals": {"accuracy": [0.62, 0.78]},
    "baselines": {"majority": {"accuracy": 0.5}, "word-count": {"accuracy": 0.6}},
    "updates": 40,
    "epochs": 1,
    "seconds": 8.5,
}
