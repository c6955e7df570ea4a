"""The tasks by name: built in, registered in Python, or offered by an installed package.

A package offers a task through the entry point group `loopwright.tasks`:

    [project.entry-points."loopwright.tasks"]
    tabular-regression = "my_package.tasks:TabularRegression"

A task is imported when it is first used, and one that cannot be loaded never affects the others.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from loopwright.errors import ConfigError, InputError, nearest

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from loopwright.sources import Schema
    from loopwright.tasks.base import Task

GROUP = "loopwright.tasks"
TASKS: Mapping[str, str] = MappingProxyType(
    {
        "text-classification": "text.classification:TextClassification",
        "token-classification": "text.token_classification:TokenClassification",
        "multiple-choice": "text.multiple_choice:MultipleChoice",
        "sentence-embedding": "text.embedding:SentenceEmbedding",
        "summarization": "text.summarization:Summarization",
        "translation": "text.translation:Translation",
        "question-answering": "text.question_answering:QuestionAnswering",
        "chat": "text.chat:ChatTuning",
        "causal-lm": "text.causal_lm:CausalLanguageModel",
        "masked-lm": "text.masked_lm:MaskedLanguageModel",
        "preference": "text.preference:PreferenceTuning",
        "image-classification": "vision.classification:ImageClassification",
        "semantic-segmentation": "vision.segmentation:SemanticSegmentation",
        "object-detection": "vision.detection:ObjectDetection",
        "instance-segmentation": "vision.detection:InstanceSegmentation",
        "masked-image-modeling": "vision.masked_modeling:MaskedImageModeling",
    }
)
"""The built-in tasks: module and class within this package, by name."""

_registered: dict[str, type[Task]] = {}

AnyTask = TypeVar("AnyTask", bound="type[Task]")


def register(task: AnyTask) -> AnyTask:
    """Make a task available in this process under its `name`; also works as a class decorator.

    Registering a name again replaces the class, as in a notebook cell that is run twice. Other processes, such as
    `lw predict`, find a task only through an entry point.

    Raises:
        ConfigError: it is not a subclass of `Task`, has no name, or has the name of a built-in task.
    """
    problem = _problem_with(task)
    if problem is None and task.name in TASKS:
        problem = f"the name {task.name!r} is taken by a built-in task"
    if problem is not None:
        raise ConfigError(f"{getattr(task, '__name__', task)!s} cannot be registered: {problem}")
    _registered[task.name] = task
    return task


def task_names() -> list[str]:
    """Return the names of all tasks, the built-in ones first; no task is imported."""
    return list(dict.fromkeys([*TASKS, *_registered, *_offered()]))


def get_task(name: str) -> Task:
    """Return the task of a name; its module is imported on first use.

    Raises:
        InputError: there is no such task, or an installed package offers it and it cannot be loaded.
    """
    if name in TASKS:
        module, _, attribute = TASKS[name].partition(":")
        return _instance(getattr(importlib.import_module(f"loopwright.tasks.{module}"), attribute))
    if name in _registered:
        return _instance(_registered[name])
    offered = _offered()
    if name not in offered:
        names = task_names()
        near = nearest(name, names)
        what, fix = f"{name!r} is not a task", f"{near} instead of {name}" if near else "lw tasks"
        raise InputError("args.task", what, saw=[f"the tasks are {', '.join(names)}"], fix=fix)
    entries = offered[name]
    if len(entries) > 1:
        raise _unusable(name, entries, "several packages offer a task of this name")
    try:
        task = entries[0].load()
    except Exception as error:  # importing another package may raise anything
        raise _unusable(name, entries, f"{type(error).__name__}: {error}") from error
    problem = _problem_with(task) or (None if task.name == name else f"the class is named {task.name!r}")
    if problem is not None:
        raise _unusable(name, entries, problem)
    return _instance(task)


def load_tasks() -> tuple[list[Task], list[InputError]]:
    """Return all tasks, and an error for each entry point that cannot be used; imports every task, but not torch."""
    tasks, errors = [], []
    for name in task_names():
        try:
            tasks.append(get_task(name))
        except InputError as error:
            errors.append(error)
    for name, entries in _offered().items():
        if name in TASKS:
            errors.append(_unusable(name, entries, "the name is taken by a built-in task"))
    return tasks, errors


def schemas() -> dict[str, Schema]:
    """Return the schemas of the built-in tasks by name, before any flag changes them."""
    from loopwright.tasks.base import Task

    return {name: Task.schema(get_task(name), None) for name in TASKS}


def summaries() -> dict[str, str]:
    """Return the summary of each task that can be loaded."""
    return {task.name: task.summary for task in load_tasks()[0]}


def _offered() -> dict[str, list[EntryPoint]]:
    """Return the entry points of installed packages by name; more than one is a conflict."""
    from importlib.metadata import entry_points

    found: dict[str, list[EntryPoint]] = defaultdict(list)
    for entry in entry_points(group=GROUP):
        if entry not in found[entry.name]:  # a package may be on the path twice
            found[entry.name].append(entry)
    return dict(found)


def _problem_with(task: Any) -> str | None:
    from loopwright.tasks.base import Task

    if not isinstance(task, type) or not issubclass(task, Task):
        return "it is not a subclass of loopwright.tasks.Task"
    missing = [*sorted(task.__abstractmethods__), *(name for name in ("name", "summary") if not hasattr(task, name))]
    return f"it does not define {', '.join(missing)}" if missing else None


def _unusable(name: str, entries: Iterable[EntryPoint], why: str) -> InputError:
    packages = [f"{entry.dist.name} {entry.dist.version}" if entry.dist else "unknown" for entry in entries]
    return InputError(
        "install.task",
        f"the task {name!r} of the package {' and of '.join(packages)} cannot be used: {why}",
        saw=[f"entry point {entry.name} = {entry.value}" for entry in entries],
        fix=f"pip install --upgrade {packages[0].split()[0]}   or   pip uninstall {packages[0].split()[0]}",
    )


@cache
def _instance(task: type[Task]) -> Task:
    return task()
