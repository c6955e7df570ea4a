"""The tasks: from a data file to a trained model. Importing this package imports neither torch nor a model library.

    get_task("text-classification")     the task of a name (`loopwright.tasks.base.Task`)
    task_names()                        all names
    summaries()                         a line about each

Each task is one file in `text` or `vision` with the code specific to it. `base` defines the interface of a task,
`arguments` the shared flags, `scoring` the results of an evaluation. `loopwright.runs` turns a task into a run.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import TYPE_CHECKING

from loopwright.errors import InputError

if TYPE_CHECKING:
    from loopwright.tasks.base import Task

__all__ = ["TASKS", "get_task", "summaries", "task_names"]

TASKS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "text-classification": ("text.classification", "a label, several labels or a number for a text or a pair"),
        "token-classification": ("text.token_classification", "a tag for each word of a sentence, such as names"),
        "multiple-choice": ("text.multiple_choice", "which of several texts goes on from a text, or answers it"),
        "sentence-embedding": ("text.embedding", "vectors that are near for texts that belong together"),
        "summarization": ("text.summarization", "a short text for a long one"),
        "translation": ("text.translation", "a text in other words, such as those of another language"),
        "question-answering": ("text.question_answering", "the answer to a question, a span of a context or generated"),
        "causal-lm": ("text.causal_lm", "a model that continues texts, from scratch or fine-tuned"),
        "masked-lm": ("text.masked_lm", "a model that fills in masked tokens, from scratch or fine-tuned"),
        "image-classification": ("vision.classification", "a class for an image"),
        "semantic-segmentation": ("vision.segmentation", "the class of each pixel of an image"),
        "object-detection": ("vision.boxes", "the objects of an image, each with a class and a box"),
        "instance-segmentation": ("vision.masks", "the objects of an image, each with a class and a mask"),
        "masked-image-modeling": ("vision.masked_modeling", "a model that fills in hidden parts of images"),
    }
)
"""For each task: its module in this package, and a line about it."""


def task_names() -> list[str]:
    """Return the names of all tasks."""
    return list(TASKS)


def summaries() -> dict[str, str]:
    """Return a line about each task, without importing the tasks."""
    return {name: summary for name, (_, summary) in TASKS.items()}


def get_task(name: str) -> Task:
    """Return the task of a name; its module is imported on first use.

    Raises:
        InputError: there is no such task; it suggests the nearest name.
    """
    if name not in TASKS:
        near = get_close_matches(name, TASKS, n=1, cutoff=0.3)
        raise InputError(
            "args.task",
            f"{name!r} is not a task",
            saw=[f"the tasks are {', '.join(TASKS)}"],
            fix=f"did you mean {near[0]}?" if near else "lw tasks says what each is for",
        )
    module = importlib.import_module(f"loopwright.tasks.{TASKS[name][0]}")
    task: Task = module.TASK
    return task
