"""Texts in the run folder: the first training batch as the model sees it, and the model's output at evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from loopwright.run_folder import write_atomically
from loopwright.run_folder.files import read_json_lines
from loopwright.tasks.base import Job
from loopwright.tasks.scoring import write_lines

FIRST_BATCH: Final = "train_batch0.txt"
SAMPLES: Final = "samples.jsonl"
_NUM_SHOWN: Final = 8
_MOST_CHARACTERS: Final = 2_000
_IGNORED: Final = -100


def add_samples(path: Path, update: int | None, samples: Sequence[Mapping[str, Any]]) -> None:
    """Add samples of an evaluation to a file, replacing those of the same update; a no-op without samples."""
    if samples:
        others = [line for line in read(path) if line["update"] != update]
        write_lines(path, [*others, {"update": update, "samples": list(samples)}])


def read(path: Path) -> list[dict[str, Any]]:
    """Return the samples of each evaluation, skipping lines that cannot be parsed."""
    return [line for line in read_json_lines(path) if "update" in line]


def write_batch(job: Job, path: Path, batch: Mapping[str, Any]) -> None:
    if described := describe_batch(job, batch):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, described)


def describe_batch(job: Job, batch: Mapping[str, Any]) -> str:
    """Describe a batch: a line about all of it, then a paragraph per sample; empty without tokens.

    A paragraph begins with the row of the sample; each further line is a name, a colon and a value.
    """
    ids = batch.get("input_ids")
    if ids is None or not hasattr(job.processor, "decode"):
        return ""
    mask = batch.get("attention_mask")
    share = 0.0 if mask is None else 1 - float(mask.float().mean())
    shape = " x ".join(map(str, ids.shape[1:]))
    parts = [f"{len(ids)} samples of {shape} tokens, {100 * share:.0f} % of them padding"]
    for index in range(min(_NUM_SHOWN, len(ids))):
        lines = [f"row {int(batch['position'][index])}"]
        lines += [f"{name}: {cut(value)}" for name, value in job.task.describe_sample(job, batch, index)]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def cut(text: str, most: int = _MOST_CHARACTERS) -> str:
    line = " ↵ ".join(text.splitlines())
    return line if len(line) <= most else f"{line[:most]} … ({len(line):,} characters)"


def tokens_of(job: Job, batch: Mapping[str, Any], *place: int) -> str:
    """Return the decoded tokens of a sample (or of one of its texts), special ones included; padding is counted."""
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    for number in place:
        ids, mask = ids[number], None if mask is None else mask[number]
    everything = ids.tolist()
    is_kept = [1] * len(everything) if mask is None else mask.tolist()
    kept = [token for token, is_real in zip(everything, is_kept, strict=True) if is_real]
    text = str(job.processor.decode(kept, skip_special_tokens=False))
    num_padding = len(everything) - len(kept)
    return f"{text} (+ {num_padding} padding)" if num_padding else text


def target_of(job: Job, labels: Any) -> str:
    plan = job.plan.labels
    names, kind = ([], None) if plan is None else (list(plan.names), plan.kind)
    wanted = labels.tolist()
    if isinstance(wanted, list):
        if kind == "multi":
            return ", ".join(name for name, is_on in zip(names, wanted, strict=False) if is_on) or "none"
        kept = [token for token in wanted if token != _IGNORED]
        text = str(job.processor.decode(kept, skip_special_tokens=False))
        return text if len(kept) == len(wanted) else f"{text} (+ {len(wanted) - len(kept)} not asked for)"
    if kind == "class" and isinstance(wanted, int) and wanted < len(names):
        return str(names[wanted])
    return str(wanted)
