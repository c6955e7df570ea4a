"""The verbs of the command line in Python: train, check, resume, evaluate, predict; and `Run`, which they return.

    run = loopwright.train("text-classification", data="reviews.csv", model="./minilm", epochs=3)
    run.metrics["accuracy"], run.predict(["what a film"]), run.path

This is also the door of the command line to everything that trains: it imports the other names from here. torch is
imported only when a model is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from loopwright.errors import InputError, nearest
from loopwright.quantities import counted
from loopwright.run_folder import RunFolder, find_run
from loopwright.run_folder.summaries import list_runs
from loopwright.runs.console.json_events import EventLines
from loopwright.runs.console.screen import Screen, lasted, metrics_text
from loopwright.runs.data import has_known_ending
from loopwright.runs.early_signals import ends_early
from loopwright.runs.kept_config import config_of
from loopwright.runs.prediction import ERROR, STRICT_FIX, Predictions, file_or_items, is_data_file
from loopwright.runs.provenance import data_facts, path_facts, place_facts
from loopwright.runs.resume import resume_run
from loopwright.runs.seeds import RESUMABLE, SeedRun, Seeds, next_commands, print_seeds, seeds_facts
from loopwright.runs.settings import Settings, create_parser, settle, task_of
from loopwright.runs.start import Outcome, check_files, check_settings, demo_settings, search_rate, start
from loopwright.runs.trained_model import (
    evaluate_run,
    export_run,
    load_run,
    open_dialogue,
    predict_run,
    task_of_run,
)
from loopwright.sources import CODES, DataPlan
from loopwright.sources.encodings import decode
from loopwright.sources.files import near_files
from loopwright.tasks import get_task, load_tasks, summaries, task_names
from loopwright.tasks.base import Task
from loopwright.tasks.pretrained import CONSENTS
from loopwright.tasks.scoring import as_json, intervals_as_json, write_csv
from loopwright.terminal import paint
from loopwright.version import package_version

if TYPE_CHECKING:
    from loopwright.checkpoint import Finding
    from loopwright.report import Watch
    from loopwright.results import LearningRateCurve

__all__ = ["DataPlan", "Run", "check", "demo", "evaluate", "find_lr", "predict", "rate_lines", "resume", "train"]

_BATCH_FLAG = "per_device_eval_batch_size"
OPENING_FLAGS = ("model", *CONSENTS)  # of every verb that opens the model of a run
# Of a file that is evaluated or predicted.
_READING_FLAGS = frozenset(
    ("file_kind", "encoding", "sheet", "delimiter", "quoting", "column_names", "text_unit")
    + ("image_dir", "bad_images", "bad_annotations")
)
_LABEL_FLAGS = ("label_map", "drop_labels", "unknown_labels", "decimal", "missing_values", "bad_rows")
_EVALUATION_FLAGS = ("max_eval_samples", "safe_csv", _BATCH_FLAG, *_LABEL_FLAGS)


@overload
def train(
    task: str, *, config: str | Path | None = None, quiet: bool = False, seeds: None = None, **flags: Any
) -> Run: ...


@overload
def train(
    task: str, *, config: str | Path | None = None, quiet: bool = False, seeds: int, **flags: Any
) -> list[Run]: ...


def train(
    task: str, *, config: str | Path | None = None, quiet: bool = False, seeds: int | None = None, **flags: Any
) -> Run | list[Run]:
    """Train a model and return its run, like `lw train TASK --flags`.

    Args:
        task: such as "text-classification".
        config: a YAML or JSON file of settings; flags override it.
        quiet: print nothing; log.txt still has the output.
        seeds: the number of runs to train, with consecutive seeds from `seed` on; returns the list of started runs.
        flags: named as on the command line, short names included; for images, `model` may be an `nn.Module`.

    Raises:
        InputError, ConfigError: the input cannot work; nothing is left behind.
    """
    settings = _settled(get_task(task), flags if seeds is None else {**flags, "seeds": seeds}, config)
    if seeds is None and settings.args.seeds > 1:
        raise InputError(
            "args.value",
            f"{config} asks for {settings.args.seeds} seeds, and train() without seeds returns one run",
            fix=f"seeds={settings.args.seeds}, which returns a list of runs",
        )
    if seeds is None:
        return Run(start(settings, Screen(is_quiet=quiet)).run)
    several = Seeds(settings)
    ended = []
    for seed in several.seeds:
        outcome = several.train(seed, Screen(is_quiet=quiet))
        ended.append(SeedRun(seed, outcome.run, outcome.state))
        if outcome.state == "stopped":  # `lw stop` stops all of them
            break
    if len(ended) > 1:
        print_seeds(ended, [], Screen(is_quiet=quiet))
    return [Run(each.run) for each in ended]


def check(task: str, *, config: str | Path | None = None, quiet: bool = False, **flags: Any) -> DataPlan:
    """Do everything except train, and return the data plan, like `lw check TASK --flags`."""
    return check_settings(_settled(get_task(task), flags, config), Screen(is_quiet=quiet))


def demo(task: str, *, variant: str | None = None, quiet: bool = False, **flags: Any) -> Run:
    """Train on data that comes with Python, without a network, like `lw demo TASK --flags`.

    Args:
        task: such as "text-classification".
        variant: the name of a demo on other data, such as "fashion" for images.
        quiet: print nothing; log.txt still has the output.
        flags: override those of the demo.
    """
    screen = Screen(is_quiet=quiet)
    return Run(start(demo_settings(get_task(task), flags, screen, variant), screen).run)


def find_lr(
    task: str,
    *,
    start: float = 1e-7,
    end: float = 10.0,
    num_updates: int = 100,
    config: str | Path | None = None,
    quiet: bool = False,
    **flags: Any,
) -> LearningRateCurve:
    """Train a few updates with a rising learning rate, and return the loss over it, like `lw find-lr TASK --flags`.

    Args:
        task: such as "text-classification".
        start: the learning rate of the first update.
        end: the learning rate of the last update.
        config: a YAML or JSON file of settings; flags override it.
        flags: as for `train`.
    """
    settings = _settled(get_task(task), flags, config)
    return search_rate(settings, Screen(is_quiet=quiet), start=start, end=end, num_updates=num_updates)


def rate_lines(curve: LearningRateCurve) -> tuple[list[str], float | None]:
    """Return a text plot of a learning-rate curve with the result in words, and the suggested rate, if any."""
    from loopwright.runs.auto import learning_rate

    return learning_rate.rate_lines(curve)


def resume(run: str | Path | Run, *, quiet: bool = False, **changes: Any) -> Run:
    """Resume or extend a run, like `lw resume RUN --flags`."""
    folder = _folder(run)
    changes, module = _without_module(task_of_run(folder), changes)
    return Run(resume_run(folder, changes, Screen(is_quiet=quiet), module).run)


def evaluate(
    run: str | Path | Run, data: str | Path | None = None, *, allow_changed_data: bool = False, **changes: Any
) -> dict[str, float]:
    """Return the metrics of a run's best model on its validation data or on another file.

    Predictions and the worst examples are written to `eval` in the run folder.

    Args:
        run: a folder, an id, "last", or a Run.
        data: a file with the columns of the training data, or with columns that can be inferred.
        allow_changed_data: evaluate even if the run's own data has changed.
        changes: task flags for this evaluation, such as max_eval_samples, label_column or num_beams; and `model`, the
            `nn.Module` that the run was given.
    """
    folder = _folder(run)
    changes, module = _without_module(task_of_run(folder), changes)
    _check_changes(changes, evaluation_flags(task_of_run(folder)))
    metrics, _, _ = evaluate_run(folder, data, Screen(is_quiet=True), allow_changed_data, changes, module)
    return metrics


def predict(
    run: str | Path | Run, inputs: str | Path | Iterable[Any], *, strict: bool = False, **changes: Any
) -> list[dict[str, Any]]:
    """Return predictions of a run's best model, one for each row of the inputs, in order.

    The prediction of a row that cannot be predicted has None for each value, and an "error" with a code.

    Args:
        run: a folder, an id, "last", or a Run.
        inputs: a data file, texts, images (paths or a folder), or rows as dicts by role or column.
        strict: raise an InputError if a row cannot be predicted.
        changes: task flags for this call, such as text_column, max_new_tokens or num_beams; and `model`, the
            `nn.Module` that the run was given.
    """
    folder = _folder(run)
    task = task_of_run(folder)
    changes, module = _without_module(task, changes)
    _check_changes(changes, prediction_flags(task))
    return predict_run(folder, file_or_items(task, inputs), changes, module, strict).collect()


@dataclass(frozen=True)
class Run:
    """A run: its folder, its results, and the operations on it."""

    folder: RunFolder

    @classmethod
    def find(cls, name: str | Path) -> Run:
        """Return a run by its folder, its id, or "last"."""
        return cls(find_run(name))

    @classmethod
    def all(cls) -> list[Run]:
        """Return all runs whose folders still exist, newest first, like `lw runs`."""
        return [cls(RunFolder(one.path)) for one in list_runs()[::-1] if one.path.is_dir()]

    def __repr__(self) -> str:
        result = self.result
        best = result.get("metrics", {}).get(result.get("metric"))
        score = "" if best is None else f", {result['metric']} {best:.4f}"
        return f"Run({self.id}, {self.folder.metadata.get('task', 'no task')}, {self.status}{score})"

    @property
    def path(self) -> Path:
        """The run folder."""
        return self.folder.path

    @property
    def id(self) -> str:
        """The run id."""
        return self.folder.id

    @property
    def status(self) -> str:
        """The state of the run: new, running, done, stopped, failed or preempted."""
        return str(self.folder.status["state"])

    @property
    def result(self) -> dict[str, Any]:
        """The content of result.json: metrics, intervals, baselines, seconds; empty until the run is done."""
        return self.folder.read_result()

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the best model on the validation data; empty until the run is done."""
        others = {name: float(word) for name, word in self.result.get("nonfinite", {}).items()}
        return {**self.result.get("metrics", {}), **others}

    @property
    def model(self) -> Any:
        """The best model in evaluation mode; every access loads it again."""
        return load_run(self.folder).model.eval()

    def predict(self, inputs: str | Path | Iterable[Any], **changes: Any) -> list[dict[str, Any]]:
        """Return predictions for a file, texts or rows, one each; see `loopwright.predict`, also for `strict`."""
        return predict(self, inputs, **changes)

    def evaluate(self, data: str | Path | None = None, **options: Any) -> dict[str, float]:
        """Return the metrics of the best model, on the validation data or on a file."""
        return evaluate(self, data, **options)

    def chat(self, system: str | None = None, **changes: Any) -> Any:
        """Return a dialogue with the best model: `answer(text)` returns its answer, `reset()` starts again."""
        return open_dialogue(self.folder, system, changes)

    def resume(self, **changes: Any) -> Run:
        """Resume the run."""
        return resume(self, **changes)

    def report(self, *, out: str | Path | None = None) -> Path:
        """Write the report of a run in any state, and return the file: by default report.html in its folder."""
        from loopwright.report import REPORT, page_path, write_report

        return write_report(self.path, page_path(out, self.path / REPORT, "out="))

    def compare(self, other: str | Path | Run, *more: str | Path | Run, out: str | Path | None = None) -> Path:
        """Write a page that compares this run with others, and return the file.

        Args:
            other: a folder, an id, "last", or a Run.
            out: the file to write; compare.html in the run folder by default.
        """
        from loopwright.report import COMPARISON, open_run, page_path, write_comparison

        others = [one.path if isinstance(one, Run) else open_run(one).path for one in (other, *more)]
        return write_comparison([self.path, *others], page_path(out, self.path / COMPARISON, "out="))

    def watch(self, port: int | None = None) -> Watch:
        """Serve a live report of the run on localhost, in the background.

        Args:
            port: on 127.0.0.1; 0 picks a free port, None the default port of `lw watch`.

        Returns:
            The server: `url` is its address; `close()`, a `with` block or the end of the program stops it.
        """
        from loopwright.report import Watch

        return Watch(self.path) if port is None else Watch(self.path, port)

    def verify(self, say: Callable[[int, int], None] | None = None) -> list[Finding]:
        """Verify every byte of the checkpoints, and return a finding for each; `say` gets the count and the total."""
        from loopwright.checkpoint import verify_all

        return verify_all(self.folder.checkpoints, say) if self.folder.checkpoints.is_dir() else []

    def export(
        self,
        folder: str | Path,
        *,
        merge: bool = False,
        adapters: bool = False,
        say: Callable[[str], None] | None = None,
        **changes: Any,
    ) -> Path:
        """Export the best model to a folder with a README.md on how to open it, and return the folder.

        `merge` merges the adapters of a run with --lora again, and checks that the outputs stay the same; `adapters`
        exports them alone, as peft reads them, with the same check. `say` is called with the result of the check.
        `changes` are consents, and `model`: the folder of the base model, if it has moved.
        """
        _check_changes(changes, OPENING_FLAGS)
        return export_run(self.folder, Path(folder), changes, merge, adapters, say)

    def _repr_html_(self) -> str:
        from loopwright.report import result_html

        return result_html(self.path)

    def stop(self) -> None:
        """Ask the run, possibly in another process, to stop gracefully after its next update and save."""
        self.folder.ask_to_stop()


def _folder(run: str | Path | Run) -> RunFolder:
    return run.folder if isinstance(run, Run) else find_run(run)


def _settled(task: Task, flags: Mapping[str, Any], config: str | Path | None) -> Settings:
    values, module = _without_module(task, flags)
    settings = replace(settle(task, values, config, has_module=module is not None), module=module)
    if settings.sources.get("oom") == "default":
        settings.args.oom = "stop"  # in Python, settings change only on request
    return settings


def _without_module(task: Task, flags: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Split off a module given as the model from the flags; refuse it if the task does not accept modules."""
    module = flags.get("model")
    if module is None or isinstance(module, (str, Path)):
        return dict(flags), None
    if not task.takes_modules:
        raise InputError(
            "args.value",
            f"{task.name} takes the name of a model, got a {type(module).__name__}",
            fix="model.save_pretrained('my-model'), and model='my-model'",
        )
    return {name: value for name, value in flags.items() if name != "model"}, module


def evaluation_flags(task: Task) -> tuple[str, ...]:
    """Return the task flags that `evaluate` accepts."""
    return (*_EVALUATION_FLAGS, *OPENING_FLAGS, *_data_flags(task), *task.prediction_flags)


def prediction_flags(task: Task) -> tuple[str, ...]:
    """Return the task flags that `predict` accepts."""
    return (_BATCH_FLAG, *OPENING_FLAGS, *_data_flags(task), *task.prediction_flags)


def _data_flags(task: Task) -> list[str]:
    names = [field.name for field in fields(task.arguments)]
    return [name for name in names if name.endswith(("_column", "_columns")) or name in _READING_FLAGS]


def _check_changes(changes: Mapping[str, Any], names: Sequence[str]) -> None:
    for name in changes:
        if name not in names:
            near = nearest(name, names)
            raise InputError(
                "args.unknown",
                f"{name} cannot be changed for a model that is trained",
                saw=[f"what can be: {', '.join(names)}"],
                fix=f"{near} instead of {name}" if near else f"loopwright.train(..., {name}=...)",
            )
