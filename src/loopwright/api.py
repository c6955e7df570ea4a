"""The verbs of the command line in Python: train, check, resume, evaluate, predict; and `Run`, which they return.

    run = loopwright.train("text-classification", data="reviews.csv", model="./minilm", epochs=3)
    run.metrics["accuracy"], run.predict(["what a film"]), run.path

torch is imported only when a model is needed.
"""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from loopwright.errors import InputError
from loopwright.run_folder import RunFolder, find_run, write_atomically
from loopwright.run_folder.summaries import list_runs
from loopwright.runs.console.screen import Screen
from loopwright.runs.data import ReadingProgress, describe
from loopwright.runs.kept_config import config_of
from loopwright.runs.other_data import by_role, plan_of_file
from loopwright.runs.seeds import SeedRun, say_seeds
from loopwright.runs.settings import Settings, settle
from loopwright.runs.start import DATA_FLAGS, Seeds, check_settings, start
from loopwright.sources import DataPlan, check_unchanged
from loopwright.tasks import get_task
from loopwright.tasks.base import Origin, Task
from loopwright.tasks.data import RunData

if TYPE_CHECKING:
    from loopwright.checkpoint import Finding
    from loopwright.report import Watch
    from loopwright.runs.job import Outcome
    from loopwright.tasks.base import Job

_BATCH_FLAG = "per_device_eval_batch_size"
_EVALUATION_FLAGS = ("max_eval_samples", _BATCH_FLAG)


# ------------------------------------------------------------------------------------------------------ the verbs


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
        say_seeds(ended, [], Screen(is_quiet=quiet))
    return [Run(each.run) for each in ended]


def check(task: str, *, config: str | Path | None = None, quiet: bool = False, **flags: Any) -> DataPlan:
    """Do everything except train, and return the data plan, like `lw check TASK --flags`."""
    return check_settings(_settled(get_task(task), flags, config), Screen(is_quiet=quiet))


def resume(run: str | Path | Run, *, quiet: bool = False, **changes: Any) -> Run:
    """Resume or extend a run, like `lw resume RUN --flags`."""
    folder = _folder(run)
    changes, module = _without_module(_task_of(folder), changes)
    return Run(go_on(folder, changes, Screen(is_quiet=quiet), module).run)


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
    changes, module = _without_module(_task_of(folder), changes)
    _check_changes(changes, evaluation_flags(_task_of(folder)))
    metrics, _ = evaluate_run(folder, data, Screen(is_quiet=True), allow_changed_data, changes, module)
    return metrics


def predict(run: str | Path | Run, inputs: str | Path | Iterable[Any], **changes: Any) -> list[dict[str, Any]]:
    """Return predictions of a run's best model.

    Args:
        run: a folder, an id, "last", or a Run.
        inputs: a data file, texts, images (paths or a folder), or rows as dicts by role or column.
        changes: task flags for this call, such as text_column, max_new_tokens or num_beams; and `model`, the
            `nn.Module` that the run was given.
    """
    folder = _folder(run)
    task = _task_of(folder)
    changes, module = _without_module(task, changes)
    _check_changes(changes, prediction_flags(task))
    if isinstance(inputs, (str, Path)):
        is_file = Path(inputs).is_file() and not task.is_input(str(inputs))
        return list(predict_run(folder, inputs if is_file else [str(inputs)], changes, module))
    given = [str(each) if isinstance(each, Path) else each for each in inputs]
    return list(predict_run(folder, given, changes, module))


@dataclass(frozen=True)
class Run:
    """A run: its folder, its results, and the operations on it.

    Attributes:
        folder: the run folder and the names of its files.
    """

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
        told = "" if best is None else f", {result['metric']} {best:.4f}"
        return f"Run({self.id}, {self.folder.metadata.get('task', 'no task')}, {self.status}{told})"

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
        """Return predictions for a file, texts or rows."""
        return predict(self, inputs, **changes)

    def evaluate(self, data: str | Path | None = None, **options: Any) -> dict[str, float]:
        """Return the metrics of the best model, on the validation data or on a file."""
        return evaluate(self, data, **options)

    def resume(self, **changes: Any) -> Run:
        """Resume the run."""
        return resume(self, **changes)

    def report(self, *, out: str | Path | None = None) -> Path:
        """Write the run's report in whatever state the run is, and return the file.

        Args:
            out: the file to write; report.html in the run folder by default.
        """
        from loopwright.report import REPORT, page_path, write_report

        return write_report(self.path, page_path(out, self.path / REPORT, "out="))

    def compare(self, other: str | Path | Run, *more: str | Path | Run, out: str | Path | None = None) -> Path:
        """Write a page that compares this run with others, and return the file.

        Args:
            other: a folder, an id, "last", or a Run.
            more: further runs.
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
        """Verify every byte of the checkpoints, and return a finding for each.

        Args:
            say: called after each checkpoint with the number verified and the total.
        """
        from loopwright.checkpoint import verify_all

        return verify_all(self.folder.checkpoints, say) if self.folder.checkpoints.is_dir() else []

    def export(self, folder: str | Path) -> Path:
        """Export the best model to a folder with a README.md on how to open it, and return the folder."""
        return export_run(self.folder, Path(folder))

    def _repr_html_(self) -> str:
        """Return the header of the report, for notebooks."""
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
            fix="model='FOLDER' that save_pretrained has written",
        )
    return {name: value for name, value in flags.items() if name != "model"}, module


# ------------------------------------------------------------------------------------------------------ training


def go_on(folder: RunFolder, changes: Sequence[str] | Mapping[str, Any], screen: Screen, module: Any = None) -> Outcome:
    """Resume a run in its folder; called by `resume` and the command line."""
    task = get_task(str(folder.metadata["task"]))
    config = config_of(folder)
    settings = replace(settle(task, changes, config), module=module)
    if "output_dir" in settings.given:
        raise InputError(
            "args.value", "a run is resumed in its own folder", fix=f"lw train {folder.path} --output_dir ..."
        )
    if settings.args.seeds > 1:
        again = f"lw train {folder.path} --seeds {settings.args.seeds}"
        raise InputError("args.value", "a resumed run has a single seed", fix=f"leave out --seeds   or   {again}")
    screen.attach(folder)
    told = [f"{name}={value}" for name, value in changes.items()] if isinstance(changes, Mapping) else changes
    screen.say(f"resume {folder.id}  {' '.join(told)}")
    if config != folder.config:
        screen.say(f"note: config.yaml was cut off; it is written anew from {config.parent.relative_to(folder.path)}")
        write_atomically(folder.config, config.read_bytes())
    if settings.training.max_steps > 0 and "num_train_epochs" in settings.given:
        screen.say(f"note: --max_steps {settings.training.max_steps} decides how long the run is, not --epochs")
    with ReadingProgress(screen) as progress:
        plan = _same_plan(task, settings, folder, bool(settings.given & set(DATA_FLAGS)), progress)
    status, ended_at = folder.status, folder.read_result().get("updates")  # of an earlier end, after a kill
    if status["state"] == "done" and status["update"] == ended_at and not _is_changed(settings, task, folder):
        return _already_done(folder, settings, screen)
    screen.block("data", *describe(plan, settings.args))
    from loopwright.runs.job import train as train_job

    return train_job(task, settings, RunData(plan), screen, folder, None)


def _is_changed(settings: Settings, task: Task, folder: RunFolder) -> bool:
    """Whether the settings differ from the run's; epochs are ignored if max_steps sets the length."""
    then, now = settle(task, config=folder.config).values(), settings.values()
    epochs = {"num_train_epochs": None} if settings.training.max_steps > 0 else {}
    return {**then, **epochs} != {**now, **epochs}


def _already_done(folder: RunFolder, settings: Settings, screen: Screen) -> Outcome:
    from loopwright.runs.job import Outcome

    steps = settings.training.max_steps
    longer = f"--max_steps {2 * steps}" if steps > 0 else f"--epochs {2 * settings.training.num_train_epochs:g}"
    screen.say(f"already done: all of its updates are made, and result.json has its metrics; {longer} goes on")
    return Outcome(folder, "done", None)


def _same_plan(task: Task, settings: Settings, folder: RunFolder, is_moved: bool, say: ReadingProgress) -> DataPlan:
    """Return the run's plan if its data is unchanged, or a new plan of the changed data if that is allowed."""
    plan = DataPlan.read(folder.data)
    is_changed_allowed = settings.args.allow_changed_data
    if not is_moved and not is_changed_allowed:
        check_unchanged(plan, say)
        return plan
    fresh = task.preflight(settings.args, say)
    same = [file.sha256 for file in fresh.files] == [file.sha256 for file in plan.files]
    if not same and not is_changed_allowed:
        raise InputError(
            "resume.data",
            "the data given is not the data that the run began with",
            saw=[f"then: {file.path} {file.sha256[:12]}" for file in plan.files]
            + [f"now:  {file.path} {file.sha256[:12]}" for file in fresh.files],
            fix="give the same files, or --allow_changed_data",
        )
    if fresh.labels != plan.labels:
        raise InputError(
            "resume.data",
            "the data has other labels than the model",
            saw=[f"then: {plan.labels}", f"now:  {fresh.labels}"],
            fix="put the data back, or begin a new run",
        )
    write_atomically(folder.data, fresh.to_json())
    return fresh


# ------------------------------------------------------------------------------------------------ a trained model


def evaluation_flags(task: Task) -> tuple[str, ...]:
    """Return the task flags that `evaluate` accepts."""
    return (*_EVALUATION_FLAGS, *_column_flags(task), *task.prediction_flags)


def prediction_flags(task: Task) -> tuple[str, ...]:
    """Return the task flags that `predict` accepts."""
    return (_BATCH_FLAG, *_column_flags(task), *task.prediction_flags)


def _column_flags(task: Task) -> list[str]:
    return [field.name for field in fields(task.arguments) if field.name.endswith("_column")]


def _check_changes(changes: Mapping[str, Any], names: Sequence[str]) -> None:
    """Refuse flags that a trained model cannot change."""
    for name in changes:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            raise InputError(
                "args.unknown",
                f"{name} cannot be changed for a model that is trained",
                saw=[f"what can be: {', '.join(names)}"],
                fix=f"did you mean {near[0]}?" if near else f"loopwright.train(..., {name}=...)",
            )


def _task_of(folder: RunFolder) -> Task:
    return get_task(str(folder.metadata["task"]))


def load_run(
    folder: RunFolder, plan: DataPlan | None = None, changes: Mapping[str, Any] | None = None, module: Any = None
) -> Job:
    """Return a job with the best weights of a run, on its device; its data is not opened.

    Args:
        folder: the run folder.
        plan: the plan of other data; None for the run's own.
        changes: settings that override the run's.
        module: the model that the run was given in Python.
    """
    from loopwright.runs.job import build_job, prepare_torch
    from loopwright.runs.weights import load_weights

    task = _task_of(folder)
    settings = settle(task, changes or {}, config_of(folder))
    if plan is None:
        plan = DataPlan.read(folder.data)
    prepare_torch(settings)
    is_finished = folder.is_finished
    if is_finished:
        settings.args.lora, settings.args.freeze = False, None  # the adapters are in the weights
    job = build_job(task, RunData(plan), settings, Origin(str(folder.model), is_run=True, module=module))
    if not is_finished:
        load_weights(job, folder)
    job.model.to(settings.training.device)
    return job


def evaluate_run(
    folder: RunFolder,
    data: str | Path | None,
    screen: Screen,
    allow_changed_data: bool = False,
    changes: Mapping[str, Any] | None = None,
    module: Any = None,
) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    """Evaluate the best model of a run; return the metrics and their intervals.

    Args:
        folder: the run folder.
        data: a file; None for the run's validation data, limited as in the run.
        screen: prints the progress.
        allow_changed_data: evaluate even if the run's own data has changed.
        changes: settings that override the run's.
        module: the model that the run was given in Python.
    """
    own = DataPlan.read(folder.data)
    task = _task_of(folder)
    settings = settle(task, changes or {}, config_of(folder))
    limit = settings.args.max_eval_samples
    if data is None:
        if not allow_changed_data:
            with ReadingProgress(screen) as progress:
                check_unchanged(own, progress)
        plan, place = own, folder.evaluation
    else:
        plan = plan_of_file(task, task.schema(settings.args), settings, own, validation_file=data)
        place = folder.evaluation / Path(data).stem
        if "max_eval_samples" not in settings.given:
            limit = None
    screen.block("data", *describe(plan))
    num_seen = 0 if data is None else own.num_trained_on(plan)
    if num_seen:
        screen.say(f"warning: {num_seen:,} of these rows were trained on: the metrics are too good")
    job = load_run(folder, plan, changes, module)
    from loopwright.runs.finish import evaluate as evaluate_job

    rows = job.data.rows("validation")
    if limit is not None and limit < len(rows):
        screen.say(f"evaluated on the first {limit:,} of {len(rows):,} rows (--max_eval_samples)")
    dataset = task.create_dataset(job, rows, is_labelled=True, limit=limit)
    with screen.waiting("evaluating") as waiting:
        metrics, intervals, _ = evaluate_job(job, dataset, place, screen.say, waiting)
    return metrics, intervals


def predict_run(
    folder: RunFolder, inputs: str | Path | Sequence[Any], changes: Mapping[str, Any] | None = None, module: Any = None
) -> Iterator[dict[str, Any]]:
    """Yield a prediction for each row of a data file, or for each text or row.

    Args:
        folder: the run folder.
        inputs: a file, texts, or rows as dicts by role or column.
        changes: settings that override the run's.
        module: the model that the run was given in Python.
    """
    task = _task_of(folder)
    plan = DataPlan.read(folder.data)
    rows: Any
    if isinstance(inputs, (str, Path)):
        settings = settle(task, changes or {}, config_of(folder))
        schema = task.schema(settings.args).for_prediction()
        rows = plan_of_file(task, schema, settings, plan, test_file=inputs).rows("test")
    elif all(isinstance(each, str) for each in inputs):
        rows = task.rows_of_texts(plan, [str(each) for each in inputs])
    else:
        rows = [by_role(plan, each) for each in inputs if not isinstance(each, str)]
    job = load_run(folder, changes=changes, module=module)
    job.model.eval()
    yield from task.predict_rows(job, rows)


def export_run(folder: RunFolder, target: Path) -> Path:
    """Export the best model of a run to a new folder."""
    if target.exists() and any(target.iterdir()):
        raise InputError("args.value", f"--to {target} is not empty", fix=f"--to {target / folder.id}")
    job = load_run(folder)
    from loopwright.runs.model_card import card_so_far
    from loopwright.tasks.adapters import merged

    job.model = merged(job.model)
    target.mkdir(parents=True, exist_ok=True)
    job.task.save(job, target)
    card = folder.model / "README.md"
    if folder.is_finished and card.is_file():
        shutil.copy(card, target / "README.md")
    else:
        write_atomically(target / "README.md", card_so_far(job, folder))
    return target
