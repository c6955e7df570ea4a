"""The verbs of the command line in Python: train, check, resume, evaluate, predict; and `Run`, what they are about.

    run = loopwright.train("text-classification", data="reviews.csv", model="./minilm", epochs=3)
    run.metrics["accuracy"], run.predict(["what a film"]), run.path

torch is imported when a model is needed, not before.
"""

from __future__ import annotations

import importlib.metadata
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopwright.errors import InputError
from loopwright.run_folder import RunFolder, create_run, find_run, runs_root, write_atomically
from loopwright.sources import DataOptions, DataPlan, check_unchanged, preflight
from loopwright.tasks import get_task
from loopwright.tasks.base import Origin, Task
from loopwright.tasks.data import ReadingProgress, RunData, describe
from loopwright.tasks.screen import Screen
from loopwright.tasks.settings import Settings, settle, words_of
from loopwright.tasks.text import find_model
from loopwright.version import package_version

if TYPE_CHECKING:
    from loopwright.checkpoint import Finding
    from loopwright.tasks.base import Job
    from loopwright.tasks.job import Outcome

_DATA_FLAGS = ("data", "train_file", "validation_file", "test_file")
_PACKAGES = ("loopwright", "torch", "accelerate", "transformers", "tokenizers", "numpy", "peft", "datasets")


# ------------------------------------------------------------------------------------------------------ the verbs


def train(task: str, *, config: str | Path | None = None, quiet: bool = False, **flags: Any) -> Run:
    """Train a model and return its run; like `loopwright train TASK --flags`.

    Args:
        task: such as "text-classification".
        config: a YAML or JSON file of settings; flags win over it.
        quiet: print nothing; log.txt has it.
        flags: by their names on the command line, the short ones too.

    Raises:
        InputError, ConfigError: what was given cannot work; nothing is left behind.
    """
    settings = settle(get_task(task), words_of(flags), config)
    return Run(start(settings, Screen(is_quiet=quiet)).run)


def check(task: str, *, config: str | Path | None = None, quiet: bool = False, **flags: Any) -> DataPlan:
    """Do everything but the training, and return the plan of the data; like `loopwright check TASK --flags`."""
    settings = settle(get_task(task), words_of(flags), config)
    return check_settings(settings, Screen(is_quiet=quiet))


def resume(run: str | Path | Run, *, quiet: bool = False, **changes: Any) -> Run:
    """Go on with a run that was interrupted or is to be longer; like `loopwright resume RUN --flags`."""
    folder = _folder(run)
    return Run(go_on(folder, words_of(changes), Screen(is_quiet=quiet)).run)


def evaluate(
    run: str | Path | Run, data: str | Path | None = None, *, allow_changed_data: bool = False
) -> dict[str, float]:
    """Return the metrics of a run's best model on its validation data, or on a file of other data.

    Predictions and the worst examples are written into the run folder, under eval.

    Args:
        run: a folder, an id, "last", or a Run.
        data: a file with the columns of the training data.
        allow_changed_data: evaluate also if the run's own data has changed.
    """
    metrics, _ = evaluate_run(_folder(run), data, Screen(is_quiet=True), allow_changed_data)
    return metrics


def predict(run: str | Path | Run, inputs: str | Path | Iterable[Any]) -> list[dict[str, Any]]:
    """Return predictions of a run's best model.

    Args:
        run: a folder, an id, "last", or a Run.
        inputs: a data file, or texts, or rows as dicts by role or column.
    """
    folder = _folder(run)
    if isinstance(inputs, (str, Path)):
        return list(predict_run(folder, inputs if Path(inputs).is_file() else [str(inputs)]))
    return list(predict_run(folder, list(inputs)))


@dataclass(frozen=True)
class Run:
    """A run: what is in its folder, and what can be done with it.

    Attributes:
        folder: the folder and the names inside it.
    """

    folder: RunFolder

    @classmethod
    def find(cls, name: str | Path) -> Run:
        """Return a run by its folder, its id, or "last"."""
        return cls(find_run(name))

    @property
    def path(self) -> Path:
        """The run folder."""
        return self.folder.path

    @property
    def id(self) -> str:
        """The id of the run."""
        return self.folder.id

    @property
    def status(self) -> str:
        """How the run is doing: new, running, done, stopped, failed or preempted."""
        return str(self.folder.status["state"])

    @property
    def result(self) -> dict[str, Any]:
        """What result.json says: metrics, intervals, baselines, seconds; nothing before the end."""
        return self.folder.read_result()

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the best model on the validation data; nothing before the end."""
        return dict(self.result.get("metrics", {}))

    @property
    def model(self) -> Any:
        """The best model, loaded anew each time it is asked for, in evaluation mode."""
        return load_run(self.folder).model.eval()

    def predict(self, inputs: str | Path | Iterable[Any]) -> list[dict[str, Any]]:
        """Return predictions for a file, texts or rows."""
        return predict(self, inputs)

    def evaluate(self, data: str | Path | None = None, **options: Any) -> dict[str, float]:
        """Return the metrics of the best model, on the validation data or on a file."""
        return evaluate(self, data, **options)

    def resume(self, **changes: Any) -> Run:
        """Go on with the run."""
        return resume(self, **changes)

    def verify(self) -> list[Finding]:
        """Check every byte of the checkpoints, and return a finding for each."""
        from loopwright.checkpoint import verify_all

        return verify_all(self.folder.checkpoints) if self.folder.checkpoints.is_dir() else []

    def export(self, folder: str | Path) -> Path:
        """Write the best model into a folder that transformers opens, and return it."""
        return export_run(self.folder, Path(folder))

    def stop(self) -> None:
        """Ask the run, which may be in another process, to end in order at its next update, saved."""
        self.folder.ask_to_stop()


def _folder(run: str | Path | Run) -> RunFolder:
    return run.folder if isinstance(run, Run) else find_run(run)


# ------------------------------------------------------------------------------------------------------ training


def start(settings: Settings, screen: Screen, command: Sequence[str] | None = None) -> Outcome:
    """Train in a new run folder; called by `train` and by the command line."""
    task = get_task(settings.args.task)
    plan = check_files(task, settings, screen)
    from loopwright.tasks.job import train as train_job

    def make_run() -> RunFolder:
        is_named = settings.is_given("output_dir")
        about = {"task": task.name, "created": datetime.now(timezone.utc).isoformat(timespec="seconds")}
        label = Path(plan.files[0].path).stem if len(plan.files) == 1 else Path(plan.files[0].path).parent.name
        folder = create_run(label, about, settings.training.output_dir if is_named else None)
        write_atomically(folder.data, plan.to_json())
        write_atomically(folder.command, _command_text(command))
        screen.block("run", f"{folder.id} -> {folder.path}")
        return folder

    return train_job(task, settings, RunData(plan), screen, None, make_run)


def check_files(task: Task, settings: Settings, screen: Screen) -> DataPlan:
    """Check the model's name and the data files, say what was found, and return the plan; imports no torch."""
    if settings.args.model is not None:
        find_model(settings.args.model)
    if all(getattr(settings.args, name) is None for name in _DATA_FLAGS):
        raise InputError(
            "data.file",
            "there is no data: neither --data nor --train_file is given",
            fix=f"--data FILE   or   loopwright demo {task.name}",
        )
    screen.say(f"loopwright {package_version()} · {task.name}")
    plan = task.preflight(settings.args, ReadingProgress())
    screen.block("data", *describe(plan))
    return plan


def check_settings(settings: Settings, screen: Screen) -> DataPlan:
    """Do everything up to the first update, rehearsal included, and leave nothing behind."""
    task = get_task(settings.args.task)
    plan = check_files(task, settings, screen)
    from loopwright.tasks.job import rehearse_only

    root = runs_root()
    had_root = root.exists()
    folder = root / f".check-{datetime.now():%H%M%S%f}"
    folder.mkdir(parents=True)
    try:
        rehearse_only(task, settings, RunData(plan), RunFolder(folder), screen)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if not had_root:
            root.rmdir()
    return plan


def go_on(folder: RunFolder, words: list[str], screen: Screen) -> Outcome:
    """Go on with a run in its folder; called by `resume` and by the command line."""
    task = get_task(str(folder.about["task"]))
    settings = settle(task, words, folder.config)
    if settings.sources["output_dir"] == "flag":
        raise InputError(
            "args.value", "a run goes on in its own folder", fix=f"loopwright train {folder.path} --output_dir ..."
        )
    screen.attach(folder)
    screen.say(f"resume {folder.id}  {' '.join(words)}")
    plan = _same_plan(task, settings, folder, is_moved=any(settings.sources[name] == "flag" for name in _DATA_FLAGS))
    from loopwright.tasks.job import train as train_job

    return train_job(task, settings, RunData(plan), screen, folder, None)


def _same_plan(task: Task, settings: Settings, folder: RunFolder, is_moved: bool) -> DataPlan:
    """Return the plan of a run, if its data is what it was; or that of the data as it is now, if that is allowed."""
    plan = DataPlan.from_json(folder.data.read_text(encoding="utf-8"))
    is_changed_allowed = settings.args.allow_changed_data
    if not is_moved and not is_changed_allowed:
        check_unchanged(plan)
        return plan
    fresh = task.preflight(settings.args, ReadingProgress())
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


def load_run(folder: RunFolder, plan: DataPlan | None = None) -> Job:
    """Return a job with the best weights of a run, on its device; its data is not opened.

    Args:
        folder: of the run.
        plan: of other data; that of the run if None.
    """
    from loopwright.tasks.job import build_job, prepare_torch
    from loopwright.tasks.restoring import load_weights

    task = get_task(str(folder.about["task"]))
    settings = settle(task, [], folder.config)
    if plan is None:
        plan = DataPlan.from_json(folder.data.read_text(encoding="utf-8"))
    prepare_torch(settings)
    is_finished = folder.status["state"] == "done" and (folder.model / "model.safetensors").is_file()
    if is_finished:
        settings.args.lora, settings.args.freeze = False, None  # the adapters are in the weights
    job = build_job(task, RunData(plan), settings, Origin(str(folder.model), is_run=True))
    if not is_finished:
        load_weights(job, folder)
    job.model.to(settings.training.device)
    return job


def evaluate_run(
    folder: RunFolder, data: str | Path | None, screen: Screen, allow_changed_data: bool = False
) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    """Evaluate the best model of a run; return the metrics and their intervals."""
    own = DataPlan.from_json(folder.data.read_text(encoding="utf-8"))
    task = get_task(str(folder.about["task"]))
    if data is None:
        if not allow_changed_data:
            check_unchanged(own)
        plan, split, place = own, "validation", folder.evaluation
    else:
        args = settle(task, [], folder.config).args
        plan = preflight(
            task.schema(args), validation_file=data, columns=own.columns, options=_trained_options(task, args, own)
        )
        split, place = "validation", folder.evaluation / Path(data).stem
    screen.block("data", *describe(plan))
    job = load_run(folder, plan)
    from loopwright.tasks.finishing import evaluate as evaluate_job

    dataset = task.create_dataset(job, job.data.rows(split), is_labelled=True)
    metrics, intervals, _ = evaluate_job(job, dataset, place, screen.say)
    return metrics, intervals


def predict_run(folder: RunFolder, inputs: str | Path | Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Yield a prediction for each row of a data file, or for each text or row."""
    task = get_task(str(folder.about["task"]))
    plan = DataPlan.from_json(folder.data.read_text(encoding="utf-8"))
    rows: Any
    if isinstance(inputs, (str, Path)):
        args = settle(task, [], folder.config).args
        schema = task.schema(args).for_prediction()
        roles = {role.name for role in schema.roles}
        columns = {role: column for role, column in plan.columns.items() if role in roles}
        rows = preflight(schema, test_file=inputs, columns=columns, options=_trained_options(task, args, plan)).rows(
            "test"
        )
    elif all(isinstance(each, str) for each in inputs):
        rows = task.rows_of_texts(plan, [str(each) for each in inputs])
    else:
        rows = [_by_role(plan, each) for each in inputs if not isinstance(each, str)]
    job = load_run(folder)
    job.model.eval()
    yield from task.predict_rows(job, rows)


def _by_role(plan: DataPlan, row: Mapping[str, Any]) -> dict[str, Any]:
    named = {column: role for role, column in plan.columns.items() if isinstance(column, str)}
    return {named.get(name, name): value for name, value in row.items()}


def _trained_options(task: Task, args: Any, plan: DataPlan) -> DataOptions:
    """Return how other data is read for a model: with its labels."""
    from dataclasses import replace

    if plan.labels is None:
        return task.data_options(args)
    kind = plan.labels.kind if plan.labels.kind in ("class", "multi", "float") else None
    return replace(
        task.data_options(args), label_kind=kind, label_names=plan.labels.names or None, label_map=plan.labels.label_map
    )


def export_run(folder: RunFolder, target: Path) -> Path:
    """Write the best model of a run into a new folder, which transformers opens."""
    if target.exists() and any(target.iterdir()):
        raise InputError("args.value", f"--to {target} is not empty", fix=f"--to {target / folder.id}")
    job = load_run(folder)
    from loopwright.tasks.adapting import merged

    job.model = merged(job.model)
    target.mkdir(parents=True, exist_ok=True)
    job.task.save(job, target)
    card = folder.model / "README.md"
    if card.is_file():
        shutil.copy(card, target / "README.md")
    return target


def _command_text(command: Sequence[str] | None) -> str:
    """Return what command.txt says: how the run was started, where, and with which versions."""
    lines = [
        f"command: {shlex.join(command if command is not None else sys.argv)}",
        f"folder: {Path.cwd()}",
        f"python: {platform.python_version()} on {platform.platform()}",
    ]
    for name in _PACKAGES:
        try:
            lines.append(f"{name}: {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    git = shutil.which("git")
    if git is not None:
        done = subprocess.run([git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=False)
        changed = subprocess.run([git, "diff", "HEAD"], capture_output=True, text=True, timeout=10, check=False)
        if done.returncode == 0:
            lines += [f"git commit: {done.stdout.strip()}", *(["", changed.stdout] if changed.stdout else [])]
    return "\n".join(lines) + "\n"
