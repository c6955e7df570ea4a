"""The tasks: from a data file to a trained model. Importing this package imports neither torch nor a model library.

    get_task("text-classification")     the task of a name, a `Task`
    task_names()                        all names
    summaries()                         a line about each
    register(MyTask)                    adds a task; packages add theirs by an entry point
    Task, Job, TaskArguments, ...       what a module with a task needs

Each task is one file in `text` or `vision` with the code specific to it. `base` defines the interface of a task,
`arguments` the shared flags, `scoring` the results of an evaluation. `loopwright.runs` turns a task into a run.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from loopwright.tasks.registry import TASKS, get_task, load_tasks, register, summaries, task_names

if TYPE_CHECKING:
    from loopwright.tasks.arguments import TaskArguments, flag
    from loopwright.tasks.base import Job, Origin, Task
    from loopwright.tasks.data import RowDataset
    from loopwright.tasks.scoring import MetricScorer, samples_of, score_baselines, score_rows

__all__ = [
    "TASKS",
    "Job",
    "MetricScorer",
    "Origin",
    "RowDataset",
    "Task",
    "TaskArguments",
    "flag",
    "get_task",
    "load_tasks",
    "register",
    "samples_of",
    "score_baselines",
    "score_rows",
    "summaries",
    "task_names",
]

# Imported on first use: `lw --help` needs only the names of the tasks.
_MODULES = {
    **dict.fromkeys(("Job", "Origin", "Task"), "base"),
    **dict.fromkeys(("TaskArguments", "flag"), "arguments"),
    **dict.fromkeys(("MetricScorer", "samples_of", "score_baselines", "score_rows"), "scoring"),
    "RowDataset": "data",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"loopwright.tasks.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
