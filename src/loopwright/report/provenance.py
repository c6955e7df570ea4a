"""The panels below the task: the data, the time spent, and how to reproduce the run."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path, PurePath
from typing import Any, Final

from loopwright.errors import LoopwrightError
from loopwright.quantities import size
from loopwright.report.blocks import Block, Example, Examples, Facts, Panel, Piece, Table
from loopwright.report.formatting import cut, duration, number, percent, plural
from loopwright.report.run_view import RunView
from loopwright.sources import DataPlan

_NUM_ROWS_SHOWN: Final = 6
_MOST_BYTES_READ: Final = 64 * 1024 * 1024
_MOST_LABELS: Final = 40
_MUCH: Final = 0.2
_BATCH_TEXT: Final = "train_batch0.txt"


# -------------------------------------------------------------------------------------------------------- the data


def data_panel(run: RunView) -> Panel | None:
    """Return the contents of data.json, with a first look at the training rows; None without the file."""
    data = run.data
    if not data:
        return None
    blocks: list[Block] = []
    files = [
        [PurePath(str(file.get("path", ""))).name, file.get("kind", ""), file.get("num_rows", 0),
         size(float(file.get("num_bytes", 0))), str(file.get("sha256", ""))[:12]]
        for file in data.get("files") or ()
    ]  # fmt: skip
    blocks.append(Table("Files", ["file", "kind", "rows", "size", "sha256"], files))
    blocks += _counts(data)
    blocks += _lengths(data)
    facts = _data_facts(data)
    if facts:
        blocks.append(Facts("Checks", facts))
    blocks += _first_batch(run)
    return Panel("Data", blocks)


def _counts(data: Mapping[str, Any]) -> list[Block]:
    splits, counts = data.get("splits") or {}, data.get("counts") or {}
    if not counts:
        rows = [[name, int(split.get("num_rows", 0))] for name, split in splits.items()]
        return [Table("Splits", ["split", "rows"], rows)] if rows else []
    names = [name for name in splits if name in counts] or list(counts)
    labels = list(dict.fromkeys(label for name in names for label in counts[name]))
    first = counts[names[0]]
    total = sum(first.values()) or 1
    labels.sort(key=lambda label: -first.get(label, 0))
    rows = [[label, *(counts[name].get(label, 0) for name in names), first.get(label, 0) / total] for label in labels]
    shown = [[*row[:-1], percent(row[-1])] for row in rows[:_MOST_LABELS]]
    note = f"the {_MOST_LABELS} most frequent of {len(labels)}" if len(labels) > _MOST_LABELS else ""
    return [Table("Labels", ["label", *names, f"share of {names[0]}"], shown, note)]


def _lengths(data: Mapping[str, Any]) -> list[Block]:
    rows = [
        [role, unit, spread.get("p50"), spread.get("p95"), spread.get("max")]
        for role, units in (data.get("lengths") or {}).items()
        for unit, spread in units.items()
    ]
    sizes = (data.get("images") or {}).get("sizes") or {}
    rows += [["image", side, spread.get("p50"), "", spread.get("max")] for side, spread in sizes.items()]
    return [Table("Lengths", ["of", "in", "median", "95 %", "longest"], rows)] if rows else []


def _data_facts(data: Mapping[str, Any]) -> list[tuple[str, Any]]:
    facts: list[tuple[str, Any]] = []
    columns = data.get("columns") or {}
    facts += [("columns", ", ".join(f"{role} = {column}" for role, column in columns.items()))] if columns else []
    duplicates = data.get("duplicates") or {}
    told = ", ".join(f"{count:,} of {split}" for split, count in duplicates.items() if count)
    facts.append(("rows that are also in training", told or "none"))
    facts += [("left out", f"{count:,}: {reason}") for reason, count in (data.get("dropped") or {}).items()]
    images = data.get("images") or {}
    bad = images.get("bad") or {}
    if bad.get("number"):
        facts.append(("images that cannot be read", f"{bad['number']:,}: {', '.join(map(str, bad.get('first', ())))}"))
    facts += [("warning", warning) for warning in data.get("warnings") or ()]
    return facts


def _first_batch(run: RunView) -> list[Block]:
    """Return the first training batch as the run recorded it; else training rows, if available."""
    written = run.folder.path / "samples" / _BATCH_TEXT
    if written.is_file():
        return _batch_blocks(written.read_text(encoding="utf-8", errors="replace"))
    if (run.folder.path / "samples").is_dir() or sum(
        file.get("num_bytes", 0) for file in run.data.get("files", ())
    ) > _MOST_BYTES_READ:
        return []
    try:
        plan = DataPlan.from_json(run.folder.data.read_text(encoding="utf-8"))
        if any(not Path(file.path).is_file() for file in plan.files):
            return []
        rows = plan.rows("train")
        items = [
            Example(
                f"row {index}", [(str(role), [Piece(_shown(run, role, value))]) for role, value in rows[index].items()]
            )
            for index in range(min(_NUM_ROWS_SHOWN, len(rows)))
        ]
    except (LoopwrightError, OSError, KeyError, TypeError, ValueError):
        return []  # the files have changed or disappeared; the page can do without
    return [Examples("The first rows of the training data", items)] if items else []


def _batch_blocks(text: str) -> list[Block]:
    """Return a recorded batch: a line about all of it, then a paragraph of named lines per sample."""
    about, *paragraphs = text.split("\n\n")
    items = []
    for paragraph in paragraphs[:_NUM_ROWS_SHOWN]:
        head, *lines = paragraph.strip().splitlines()
        fields = [(name, [Piece(cut(value))]) for name, _, value in (line.partition(": ") for line in lines)]
        items.append(Example(head, fields))
    shown = "" if len(items) == len(paragraphs) else f"; {len(items)} of them"
    title = "The first training batch, as the model saw it"
    return [Examples(title, items, f"{about.strip()}{shown}")] if items else []


def _shown(run: RunView, role: str, value: Any) -> str:
    is_class = (run.data.get("kinds") or {}).get(role) in ("label", "tags")
    if is_class and isinstance(value, int) and value < len(run.labels):
        return run.labels[value]
    if is_class and isinstance(value, list) and all(isinstance(one, int) and one < len(run.labels) for one in value):
        return " ".join(run.labels[one] for one in value)
    return cut(" ".join(map(str, value)) if isinstance(value, list) else value)


# -------------------------------------------------------------------------------------------------------- the speed


def time_shares(run: RunView) -> list[tuple[str, float]]:
    """Return (activity, seconds) of the time spent, as far as the records show; zeros are left out."""
    spent = run.metrics.spent
    first, _ = run.metrics.times
    shares = [
        ("training", max(spent.training, 0.0)),
        ("waiting for data", spent.waiting),
        ("evaluation", spent.evaluation),
        ("saving", spent.saving),
        ("writing the profile", spent.profiling),
    ]
    prepared = _seconds_before(run, first)
    if prepared:
        shares.insert(0, ("preparing", prepared))
    return [(name, seconds) for name, seconds in shares if seconds > 0]


def speed_panel(run: RunView) -> Panel | None:
    """Return the time spent, the speed, and one piece of advice backed by a number; None without records."""
    shares = time_shares(run)
    if not shares:
        return None
    total = sum(seconds for _, seconds in shares)
    rows = [[name, duration(seconds), percent(seconds / total)] for name, seconds in shares]
    blocks: list[Block] = [Table("Where the time went", ["", "time", "share"], rows, bar=2)]
    facts: list[tuple[str, Any]] = []
    for key, name, form in (
        ("samples_per_second", "samples per second", number),
        ("tokens_per_second", "tokens per second", number),
        ("data_wait", "waiting for data", percent),
        ("padding_waste", "padding", percent),
        ("flops_utilisation", "utilisation of the device", percent),
        ("gpu_watts", "watts of the device", number),
    ):
        mean = run.metrics.series[key].mean() if key in run.metrics.series else None
        if mean is not None:
            facts.append((f"{name}, on average", form(mean)))
    watts = run.metrics.series["gpu_watts"].mean() if "gpu_watts" in run.metrics.series else None
    if watts is not None:
        hours = max(run.metrics.spent.training, 0.0) / 3_600
        facts.append(("watt-hours of the device in training, about", number(watts * hours)))
    if "peak_memory_bytes" in run.metrics.series:
        best = run.metrics.series["peak_memory_bytes"].best(is_more_better=True)
        facts.append(("memory at its peak", size(best[1] if best else 0)))
    if (
        not any(name.startswith("samples") for name, _ in facts)
        and run.metrics.update
        and run.metrics.spent.training > 0
    ):
        facts.append(("updates per second of training", number(run.metrics.update / run.metrics.spent.training, 3)))
    advice = advice_for(run)
    facts += [("advice", advice)] if advice else []
    return Panel("Speed", [*blocks, Facts("Figures", facts)])


def advice_for(run: RunView) -> str:
    """Return advice that would speed up the run, with its evidence; empty if nothing stands out."""
    shares = dict(time_shares(run))
    total = sum(shares.values()) or 1.0
    waiting = shares.get("waiting for data", 0.0) / total
    padding = run.metrics.series["padding_waste"].mean() if "padding_waste" in run.metrics.series else None
    if waiting > _MUCH:
        workers = run.config.get("dataloader_num_workers", 0)
        return (
            f"{percent(waiting)} of the time went into waiting for data: more --dataloader_num_workers (now {workers})"
        )
    if padding is not None and padding > _MUCH and run.config.get("train_sampling_strategy") != "group_by_length":
        return f"{percent(padding)} of all tokens were padding: --train_sampling_strategy group_by_length avoids most"
    if shares.get("evaluation", 0.0) / total > _MUCH:
        share = percent(shares["evaluation"] / total)
        return f"{share} of the time went into evaluation: less often (--eval_steps) or fewer rows (--max_eval_samples)"
    if shares.get("saving", 0.0) / total > _MUCH:
        return f"{percent(shares['saving'] / total)} of the time went into saving: save less often (--save_steps)"
    return ""


def _seconds_before(run: RunView, first: float | None) -> float:
    """Return the time between the creation of the run's folder and its first record."""
    created = run.about.get("created")
    if first is None or not isinstance(created, str):
        return 0.0
    try:
        began = datetime.fromisoformat(created).timestamp()
    except ValueError:
        return 0.0
    passed = first - began
    return passed if 0 < passed < 24 * 3600 else 0.0


# ---------------------------------------------------------------------------------------------- to get it again


def again_panel(run: RunView) -> Panel:
    """Return how to reproduce the run: command, settings, hashes, versions, and the resume guarantee."""
    blocks: list[Block] = []
    command = dict(run.command)
    facts: list[tuple[str, Any]] = [("command", command.pop("command"))] if "command" in command else []
    facts += [("again", f"lw train {run.id}"), ("go on", f"lw resume {run.id}")] if run.config else []
    facts += [("model", run.model)] if run.model else []
    seed = run.config.get("seed", run.metrics.starts[0].get("seed") if run.metrics.starts else None)
    facts += [("seed", seed)] if seed is not None else []
    guarantee = run.guarantee or run.metrics.tier
    facts += [("resume guarantee", guarantee)] if guarantee else []
    facts += [("rehearsal", run.rehearsal)] if run.rehearsal else []
    checkpoint = run.status.get("last_checkpoint")
    facts += [("last checkpoint", checkpoint)] if checkpoint else []
    blocks.append(Facts("Command", facts))
    given = [
        [name, _value(value), run.sources.get(name, "")]
        for name, value in run.config.items()
        if run.sources.get(name, "default") != "default"
    ]
    if given:
        blocks.append(Table("Settings that are not the defaults", ["setting", "value", "from"], given, is_left=True))
    hashes = [
        [PurePath(str(file.get("path", ""))).name, str(file.get("sha256", ""))] for file in run.data.get("files") or ()
    ]
    if hashes:
        blocks.append(Table("Hashes of the data", ["file", "sha256"], hashes, is_left=True))
    if command:
        blocks.append(Facts("Versions", list(command.items())))
    return Panel("How to get it again", blocks)


def all_settings(run: RunView) -> Table | None:
    """Return every setting; None without config.yaml."""
    rows = [[name, _value(value), run.sources.get(name, "")] for name, value in run.config.items()]
    return (
        Table(f"All {plural(len(rows), 'setting')}", ["setting", "value", "from"], rows, is_left=True) if rows else None
    )


def _value(value: Any) -> str:
    return "–" if value is None else cut(value, 160)
