"""The best model of a run: load, evaluate, predict, export. torch is imported only when the model is loaded."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopwright.errors import InputError
from loopwright.run_folder import RunFolder, write_atomically
from loopwright.run_folder.files import read_bytes
from loopwright.run_folder.layout import free_path
from loopwright.runs.console.screen import Screen
from loopwright.runs.data import ReadingProgress, describe, plan_of_file
from loopwright.runs.kept_config import config_of
from loopwright.runs.model_sums import BASE_CONFIG
from loopwright.runs.prediction import InputRows, Predictions, read_inputs
from loopwright.runs.settings import settle
from loopwright.sources import DataPlan, check_unchanged
from loopwright.tasks import get_task
from loopwright.tasks.base import Origin, Task
from loopwright.tasks.consent import check_foreign
from loopwright.tasks.data import RunData
from loopwright.tasks.pretrained import consenting

if TYPE_CHECKING:
    from loopwright.metrics import Intervals
    from loopwright.tasks.adapters import MergeCheck
    from loopwright.tasks.base import Job


def task_of_run(folder: RunFolder) -> Task:
    return get_task(str(folder.metadata["task"]))


def load_run(
    folder: RunFolder,
    plan: DataPlan | None = None,
    changes: Mapping[str, Any] | None = None,
    module: Any = None,
    has_adapters: bool = False,
) -> Job:
    """Return a job with the best weights of a run, on its device; its data, or that of `plan`, is not opened.

    The model of a finished run has its adapters merged, unless it is to have adapters.
    """
    from loopwright.runs.finish import model_source
    from loopwright.runs.job import build_job, prepare_torch
    from loopwright.runs.weights import load_weights

    task = task_of_run(folder)
    settings = settle(task, changes or {}, config_of(folder))
    check_foreign(settings, links=True)
    prepare_torch(settings)
    model_source(folder)  # before the look whether it is finished: a killed process may have moved it
    is_finished = folder.is_finished and not has_adapters
    if is_finished:
        settings.args.lora, settings.args.freeze, settings.args.load_in = False, None, None  # it is whole, and merged
    data = RunData(DataPlan.read(folder.data) if plan is None else plan)
    job = build_job(task, data, settings, Origin(str(model_source(folder, is_finished)), is_run=True, module=module))
    job.folder = folder.path
    if "model" in (changes or {}) and not settings.args.lora and getattr(job, "reference", None) is None:
        what = f"--model has no effect: {folder.path} has a whole model, and needs no base"
        raise InputError("args.value", what, fix="leave out --model", flag="--model")
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
) -> tuple[dict[str, float], Intervals, dict[str, str]]:
    """Evaluate the best model of a run on a file or, by default, on its validation data, limited as in the run."""
    own = DataPlan.read(folder.data)
    task = task_of_run(folder)
    settings = settle(task, changes or {}, config_of(folder))
    limit = settings.args.max_eval_samples
    if data is None:
        check_foreign(settings, files=own.files)
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
        screen.remark("warning", f"{num_seen:,} of these rows were trained on: the metrics are too good")
    job = load_run(folder, plan, changes, module)
    from loopwright.runs.finish import evaluate

    rows = job.data.rows("validation")
    if limit is not None and limit < len(rows):
        screen.print(f"evaluated on the first {limit:,} of {len(rows):,} rows (--max_eval_samples)")
    dataset = task.create_dataset(job, job.data.first_rows("validation", limit), is_labelled=True)
    with screen.waiting("evaluating") as waiting:
        metrics, intervals, tokens, *_ = evaluate(job, dataset, place, screen.print, waiting)
    return metrics, intervals, tokens


def predict_run(
    folder: RunFolder,
    inputs: str | Path | Sequence[Any],
    changes: Mapping[str, Any] | None = None,
    module: Any = None,
    is_strict: bool = False,
) -> Predictions:
    """Return a prediction for each row of a data file, or for each text or row; `changes` override the settings."""
    task = task_of_run(folder)
    plan, settings = DataPlan.read(folder.data), settle(task, changes or {}, config_of(folder))

    def predict(rows: InputRows) -> Iterator[dict[str, Any]]:
        job = load_run(folder, changes=changes, module=module)
        job.model.eval()
        yield from task.predict_rows(job, rows)

    return Predictions(task, plan, read_inputs(task, settings, plan, inputs), predict, is_strict)


def open_dialogue(folder: RunFolder, system: str | None = None, changes: Mapping[str, Any] | None = None) -> Any:
    """Return a dialogue with the best model of a run, whose `answer` streams; InputError if its task has none."""
    task = task_of_run(folder)
    if task.dialogue is None:
        what = f"lw chat is for models that answer, and this is a run of {task.name}"
        raise InputError("args.task", what, fix=f"lw predict {shlex.quote(str(folder.path))} 'a text'")
    job = load_run(folder, changes=changes)
    job.model.eval()
    return task.dialogue(job, system)


def export_run(
    folder: RunFolder,
    target: Path,
    changes: Mapping[str, Any] | None = None,
    merge: bool = False,
    adapters: bool = False,
    say: Callable[[str], None] | None = None,
) -> Path:
    """Export the best model; `merge` merges the adapters again and checks them, `adapters` exports them alone."""
    if (merge or adapters) and not (args := settle(task_of_run(folder), changes or {}, config_of(folder)).args).lora:
        flag = "--merge" if merge else "--adapters"
        saw = [f"it trained {'all weights' if args.freeze is None else 'what --freeze left'}, without --lora"]
        raise InputError("args.value", f"{flag}: {folder.path} has no adapters", saw=saw, fix=f"leave out {flag}")
    if target.exists() and any(target.iterdir()):
        free = shlex.quote(str(free_path(target / folder.id)))
        raise InputError("args.value", f"--to {target} is not empty", fix=f"--to {free}")
    job = load_run(folder, changes=changes, has_adapters=merge or adapters)
    from loopwright.runs.creation import removed_on_error
    from loopwright.runs.model_card import card_so_far, model_card
    from loopwright.tasks.adapters import merged

    check, is_kept = None, folder.is_finished and (folder.model / "README.md").is_file()
    if not adapters:
        job.model, check = merged(job.model)
        if merge and (check is None or not check.is_passed):
            what = "the adapters cannot be merged: the merged model computes something else"
            saw = [check.text if check is not None else "its outputs cannot be compared: it takes unusual inputs"]
            raise InputError("model.merge", what, saw=saw, fix="--adapters instead of --merge")
        card = read_bytes(folder.model / "README.md") if is_kept else card_so_far(job, folder)
    else:
        card = model_card(job, folder, folder.read_result()) if folder.is_finished else card_so_far(job, folder)
    with removed_on_error(target):
        target.mkdir(parents=True, exist_ok=True)
        if adapters:
            check = _write_adapters(job, target)
        else:
            job.task.save(job, target)
        write_atomically(target / "README.md", card)
    if (merge or adapters) and check is not None and say is not None:
        say(check.text)
    return target


def _write_adapters(job: Job, folder: Path) -> MergeCheck | None:
    """Write adapters with what opening them takes, and open them as a check; the job is left without its model."""
    from loopwright.run_folder.files import give_usual_mode
    from loopwright.runs.job import resized_embeddings
    from loopwright.tasks.adapters import compared, four_bits, leave_out_base, open_adapters, outputs_of, save_adapters

    inner, base = job.model.get_base_model(), job.args.model and job.task.find_model(job.args.model)
    if base is None or not hasattr(inner, "config_class"):
        what = f"--adapters: a {type(inner).__name__} from {job.args.model or 'random weights'} is not opened by peft"
        raise InputError("args.value", what, fix="leave out --adapters")
    if job.base is None:  # its checkpoints have the whole model
        leave_out_base(job.model, resized_embeddings(job, base))
    before, device = outputs_of(job.model.eval()), next(inner.parameters()).device
    quantization = four_bits(job.training.bf16) if job.args.load_in else None
    computed_in = [quantization.bnb_4bit_compute_dtype] if quantization else []
    job.model.peft_config["default"].base_model_name_or_path = job.args.model
    job.task.save_skeleton(job, folder)
    if inner.can_generate():
        inner.generation_config.save_pretrained(folder)
    save_adapters(job.model, folder)
    give_usual_mode(folder)
    job.model = inner = None  # two of them may not fit into memory
    with consenting(job.args):
        origin = Origin(str(folder), is_run=True, base=base, quantization=quantization)
        opened = open_adapters(job.task.build(job.data, job.args, job.training, origin).model, folder)
    check = compared("outputs of the exported adapters", before, opened.to(device), computed_in)
    if check is not None and not check.is_passed:
        what = "the adapters cannot be exported alone: on the base model they compute something else"
        raise InputError("model.merge", what, saw=[check.text], fix="--merge instead of --adapters")
    (folder / "config.json").rename(folder / BASE_CONFIG)  # or transformers takes the folder for a whole model
    return check
