"""Pictures in the run folder: the first training batch as the model sees it, and predictions beside the truth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from loopwright.data.pictures import confusion_picture, drawable_names, encode, sheet
from loopwright.engine.nested import to_device
from loopwright.run_folder import RunFolder, write_atomically, write_json
from loopwright.tasks.base import Job

if TYPE_CHECKING:
    from loopwright.tasks.vision.base import VisionTask

_NUM_SHOWN = 24
_NUM_ROWS = 6
_MOST_CLASSES_DRAWN = 200


def write_batch(task: VisionTask, job: Job, path: Path, batch: Mapping[str, Any]) -> None:
    number = min(_NUM_SHOWN, len(batch["position"]))
    write_sheet(path, [task.draw_sample(job, batch, index) for index in range(number)], 8)


def write_prediction_sheets(
    task: VisionTask, job: Job, run: RunFolder, worst: Sequence[Mapping[str, Any]]
) -> list[Path]:
    """Write samples/predictions.png, with rows spread over the validation data, and samples/worst.png; return both.

    If no font has the letters of a class, pictures show its number, and samples/class_numbers.txt its name.
    """
    number = min(_NUM_SHOWN, _NUM_ROWS * task.sheet_columns)
    num_rows = len(job.eval_dataset)
    places = {
        "predictions": sorted({index * num_rows // number for index in range(number)}),
        "worst": [int(sample["position"]) for sample in worst[:number]],
    }
    written = []
    for name, positions in places.items():
        pictures = _pictures(task, job, positions)
        if pictures:
            written.append(run.path / "samples" / f"{name}.png")
            write_sheet(written[-1], pictures, task.sheet_columns, task.sheet_size)
    names = job.label_names
    legend = [f"{shown} {name}" for shown, name in zip(drawable_names(names), names, strict=True) if shown != name]
    if legend:
        written.append(run.path / "samples" / "class_numbers.txt")
        write_atomically(written[-1], "\n".join([*legend, ""]))
    return written


def write_sheet(path: Path, pictures: Sequence[tuple[Any, str]], columns: int, size: int = 160) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    images, captions = zip(*pictures, strict=True)
    write_atomically(path, encode(sheet(images, captions, columns=columns, size=size)))


def write_confusion(run: RunFolder, names: list[str], matrix: list[list[int]]) -> list[Path]:
    """Write eval/confusion.json and, unless there are too many classes, samples/confusion.png; return both."""
    written = [run.evaluation / "confusion.json"]
    write_json(written[0], {"labels": names, "matrix": matrix})
    if len(names) <= _MOST_CLASSES_DRAWN:
        written.append(run.path / "samples" / "confusion.png")
        write_atomically(written[-1], encode(confusion_picture(matrix, names)))
    return written


def _pictures(task: VisionTask, job: Job, positions: list[int]) -> list[tuple[Any, str]]:
    rows = job.eval_dataset.rows
    dataset = task.create_dataset(job, rows, is_labelled=False)
    size, device = job.training.eval_batch_size, next(job.model.parameters()).device
    job.model.eval()
    drawn = []
    for start in range(0, len(positions), size):
        chosen = positions[start : start + size]
        features = [dataset[position] for position in chosen]
        with torch.inference_mode():
            predictions = task.predict_batch(job, job.model, to_device(job.collate_fn(features), device))
        drawn += [task.draw(job, rows[position], each) for position, each in zip(chosen, predictions, strict=True)]
    return drawn
