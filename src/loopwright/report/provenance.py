"""The panels below the task: the data, the time spent, and how to reproduce the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any, Final

from loopwright.errors import LoopwrightError
from loopwright.quantities import counted, size
from loopwright.report.blocks import Block, Example, Examples, Facts, Panel, Piece, Table, without_empty
from loopwright.report.formats import cut, duration, number, percent
from loopwright.report.run_view import RunView
from loopwright.run_folder.files import read_bytes
from loopwright.run_folder.summaries import seconds_since_1970
from loopwright.sources import DataPlan, check_unchanged

_NUM_ROWS_SHOWN: Final = 6
_MOST_BYTES_READ: Final = 64 * 1024 * 1024
_MOST_LABELS: Final = 40
_MUCH: Final = 0.2
_BATCH_TEXT: Final = "train_batch0.txt"
# Logged series with a mean in the speed panel: their names and formats.
_FIGURES: Final[Mapping[str, tuple[str, Callable[[float | None], str]]]] = {
    "samples_per_second": ("samples per second", number),
    "tokens_per_second": ("tokens per second", number),
    "data_wait": ("waiting for data", percent),
    "padding_waste": ("padding", percent),
    "flops_utilisation": ("device utilisation", percent),
    "gpu_watts": ("watts of the device", number),
}


def data_panel(run: RunView) -> Panel | None:
    data = run.data
    if not data:
        return None
    files = [
        [PurePath(str(file.get("path", ""))).name, file.get("kind", ""), file.get("num_rows", 0),
         size(float(file.get("num_bytes") or 0)), str(file.get("sha256", ""))[:12]]
        for file in data.get("files") or ()
    ]  # fmt: skip
    blocks: list[Block] = [_counts(data), _lengths(data), Facts("Checks", _checks(data)), _first_batch(run)]
    return Panel("Data", [Table("Files", ["file", "kind", "rows", "size", "sha256"], files), *without_empty(blocks)])


def _counts(data: Mapping[str, Any]) -> Table:
    splits, counts = data.get("splits") or {}, data.get("counts") or {}
    if not counts:
        rows = [[name, int(each.get("num_rows", 0))] for name, each in splits.items()]
        return Table("Splits", ["split", "rows"], rows)
    names = [name for name in splits if name in counts] or list(counts)
    first = counts[names[0]]
    labels = list(dict.fromkeys(label for name in names for label in counts[name]))
    labels.sort(key=lambda label: -first.get(label, 0))
    total = sum(first.values()) or 1
    rows = [
        [label, *(counts[name].get(label, 0) for name in names), percent(first.get(label, 0) / total)]
        for label in labels[:_MOST_LABELS]
    ]
    note = f"the {_MOST_LABELS} most frequent of {len(labels)}" if len(labels) > _MOST_LABELS else ""
    return Table("Labels", ["label", *names, f"share of {names[0]}"], rows, note)


def _lengths(data: Mapping[str, Any]) -> Table:
    rows = [
        [role, unit, spread.get("p50"), spread.get("p95"), spread.get("max")]
        for role, units in (data.get("lengths") or {}).items()
        for unit, spread in units.items()
    ]
    sizes = (data.get("images") or {}).get("sizes") or {}
    rows += [["image", side, spread.get("p50"), "", spread.get("max")] for side, spread in sizes.items()]
    return Table("Lengths", ["of", "in", "median", "95 %", "longest"], rows)


def _checks(data: Mapping[str, Any]) -> list[tuple[str, Any]]:
    columns = ", ".join(f"{role} = {column}" for role, column in (data.get("columns") or {}).items())
    duplicates = [f"{count:,} of {split}" for split, count in (data.get("duplicates") or {}).items() if count]
    bad = (data.get("images") or {}).get("bad") or {}
    facts: list[tuple[str, Any]] = [("columns", columns)] if columns else []
    facts.append(("rows that are also in training", ", ".join(duplicates) or "none"))
    facts += [("left out", f"{count:,}: {reason}") for reason, count in (data.get("dropped") or {}).items()]
    if bad.get("number"):
        facts.append(("images that cannot be read", f"{bad['number']:,}: {', '.join(map(str, bad.get('first', ())))}"))
    return facts + [("warning", warning) for warning in data.get("warnings") or ()]


def _first_batch(run: RunView) -> Examples:
    """Return the first training batch as the run recorded it; else training rows, if available."""
    samples = run.folder.path / "samples"
    if (samples / _BATCH_TEXT).is_file():
        return _batch_block(read_bytes(samples / _BATCH_TEXT).decode(errors="replace"))
    items: list[Example] = []
    num_bytes = sum(file.get("num_bytes", 0) for file in run.data.get("files", ()))
    try:
        plan = DataPlan.read(run.folder.data)
        is_there = all(Path(file.path).is_file() for file in plan.files)
        if is_there and not samples.is_dir() and num_bytes <= _MOST_BYTES_READ:
            check_unchanged(plan)  # or a run could show any file
            rows = plan.rows("train")
            for index in range(min(_NUM_ROWS_SHOWN, len(rows))):
                fields = [(str(role), [Piece(_shown(run, role, value))]) for role, value in rows[index].items()]
                items.append(Example(f"row {index}", fields))
    except (LoopwrightError, OSError, KeyError, TypeError, ValueError):
        items = []  # the files have changed or disappeared; the page can do without
    return Examples("The first rows of the training data", items)


def _batch_block(text: str) -> Examples:
    """Return a recorded batch: a line about all of it, then a paragraph of named lines per sample."""
    summary, *paragraphs = text.split("\n\n")
    items = []
    for paragraph in paragraphs[:_NUM_ROWS_SHOWN]:
        head, *lines = paragraph.strip().splitlines()
        fields = [(name, [Piece(cut(value))]) for name, _, value in (line.partition(": ") for line in lines)]
        items.append(Example(head, fields))
    shown = "" if len(items) == len(paragraphs) else f"; {len(items)} of them"
    return Examples("The first training batch, as the model saw it", items, f"{summary.strip()}{shown}")


def _shown(run: RunView, role: str, value: Any) -> str:
    is_class = (run.data.get("kinds") or {}).get(role) in ("label", "tags")
    values = value if isinstance(value, list) else [value]
    if is_class and all(isinstance(one, int) and one < len(run.labels) for one in values):
        return " ".join(run.labels[one] for one in values)
    return cut(" ".join(map(str, value)) if isinstance(value, list) else value)


def time_shares(run: RunView) -> list[tuple[str, float]]:
    """Return (activity, seconds) of the time spent, as far as the records show; zeros are left out."""
    shares = {"preparing": _seconds_before(run), **run.metrics.spent}
    return [(name, seconds) for name, seconds in shares.items() if seconds > 0]


def speed_panel(run: RunView) -> Panel | None:
    """Return the time spent, the speed, and one piece of advice backed by a number; None without records."""
    shares = time_shares(run)
    if not shares:
        return None
    total = sum(seconds for _, seconds in shares)
    rows = [[name, duration(seconds), percent(seconds / total)] for name, seconds in shares]
    metrics, trained = run.metrics, run.metrics.spent["training"]
    means = {key: mean for key in _FIGURES if (mean := metrics.mean(key)) is not None}
    facts: list[tuple[str, Any]] = [(f"{_FIGURES[key][0]}, on average", _FIGURES[key][1](means[key])) for key in means]
    if "gpu_watts" in means:
        watt_hours = means["gpu_watts"] * max(trained, 0.0) / 3_600
        facts.append(("watt-hours of the device in training", number(watt_hours)))
    if "peak_memory_bytes" in metrics.series:
        best = metrics.series["peak_memory_bytes"].best(is_more_better=True)
        facts.append(("peak memory", size(best[1] if best else 0)))
    if "samples_per_second" not in means and metrics.update and trained > 0:
        facts.append(("updates per second of training", number(metrics.update / trained, 3)))
    advice = advice_for(run)
    facts += [("advice", advice)] if advice else []
    return Panel("Speed", [Table("Where the time went", ["", "time", "share"], rows, bar=2), Facts("Figures", facts)])


def advice_for(run: RunView) -> str:
    """Return advice that would speed up the run, with its evidence; empty if nothing stands out."""
    seconds = dict(time_shares(run))
    shares = {name: each / sum(seconds.values()) for name, each in seconds.items()}
    if run.config.get("train_sampling_strategy") != "group_by_length":
        shares["padding"] = run.metrics.mean("padding_waste") or 0.0
    workers = run.config.get("dataloader_num_workers", 0)
    advice = {
        "waiting for data": f"of the time was spent on waiting: try more --dataloader_num_workers (now {workers})",
        "padding": "of all tokens were padding: --train_sampling_strategy group_by_length avoids most of it",
        "evaluation": "of the time was spent on evaluation: try --eval_steps (fewer) or --max_eval_samples (smaller)",
        "saving": "of the time was spent saving: save less often (--save_steps)",
    }
    worthwhile = (f"{percent(shares[name])} {text}" for name, text in advice.items() if shares.get(name, 0.0) > _MUCH)
    return next(worthwhile, "")


def _seconds_before(run: RunView) -> float:
    """Return the time between the creation of the run's folder and its first record."""
    created, first = seconds_since_1970(run.metadata.get("created")), run.metrics.first_time
    passed = 0.0 if created is None or first is None else first - created
    return passed if 0 < passed < 24 * 3600 else 0.0


def again_panel(run: RunView) -> Panel:
    versions = {name: value for name, value in run.command.items() if name != "command"}
    start = run.metrics.starts[0] if run.metrics.starts else {}
    facts = {
        "command": run.command.get("command"),
        "run again": f"lw train {run.id}" if run.config else None,
        "resume": f"lw resume {run.id}" if run.config else None,
        "model": run.model,
        "seed": run.config.get("seed", start.get("seed")),
        "resume guarantee": run.guarantee or run.metrics.tier,
        "rehearsal": run.rehearsal,
        "last checkpoint": run.status.get("last_checkpoint"),
    }
    given = [(name, value) for name, value in run.config.items() if run.sources.get(name, "default") != "default"]
    files = run.data.get("files") or ()
    hashes = [[PurePath(str(file.get("path", ""))).name, str(file.get("sha256", ""))] for file in files]
    blocks: list[Block] = [
        _settings(run, "Non-default settings", given),
        Table("Hashes of the data", ["file", "sha256"], hashes, is_left=True),
        Facts("Versions", list(versions.items())),
    ]
    command = Facts("Command", [(name, value) for name, value in facts.items() if value not in (None, "")])
    return Panel("How to reproduce it", [command, *without_empty(blocks)])


def all_settings(run: RunView) -> Table | None:
    title = f"All {counted(len(run.config), 'setting')}"
    return _settings(run, title, run.config.items()) if run.config else None


def _settings(run: RunView, title: str, settings: Iterable[tuple[str, Any]]) -> Table:
    rows = [[name, "–" if value is None else cut(value, 160), run.sources.get(name, "")] for name, value in settings]
    return Table(title, ["setting", "value", "from"], rows, is_left=True)
