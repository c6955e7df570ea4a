"""The Trainer of all tasks: the core's loop with the task's loss, streaming metrics and worst examples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from loopwright.callbacks import CallbackHandler, TrainerCallback
from loopwright.checkpoint.fingerprint import Change
from loopwright.data.batch_parts import cut_rows
from loopwright.engine import create_accelerator
from loopwright.engine.memory import MemorySaving, list_savings
from loopwright.engine.nested import iter_tensors, num_rows
from loopwright.engine.processes import gather_objects
from loopwright.engine.sharding import Sharding
from loopwright.metrics import Intervals
from loopwright.metrics.paired import RowKeeper, RowScores
from loopwright.protocols import TrainerLike
from loopwright.results import EvaluationResult
from loopwright.run_folder import RunFolder
from loopwright.runs.early_signals import left_to_the_loop
from loopwright.runs.kept_config import kept_config
from loopwright.runs.ownership import Ownership
from loopwright.stepping.eager import MicroBatchStep
from loopwright.tasks.base import Job
from loopwright.tasks.scoring import Examples, Scorer, prediction_file
from loopwright.trainer import Trainer
from loopwright.training.boundary import Boundary
from loopwright.training.checkpoints import RunCheckpoints
from loopwright.training.evaluation import run_eval_epoch, swapped
from loopwright.training.logbook import Logbook
from loopwright.training.resume import LENGTHS
from loopwright.training.run import TrainingRun, run_of

TRAIN_LOSS = "train_eval_loss"
LENGTH_FLAGS = ("max_length", "block_size", "max_source_length")
_NUM_FIRST = 3


class HeedStop(TrainerCallback):
    """Ends what is not the training loop once `lw stop` was called; of several processes none may end alone."""

    asks_alike = True

    def __init__(self, owner: Ownership) -> None:
        self._owner = owner

    def on_update_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        if not run_of(trainer).engine.is_distributed:
            self._owner.heed()

    def on_eval_step_end(self, trainer: TrainerLike, *args: Any, **kwargs: Any) -> None:
        self.on_update_end(trainer)


class TaskStep(MicroBatchStep):
    """Keeps everything that is not a tensor out of graphs: texts are for scoring, and differ each time."""

    def graph_inputs(self, batch: Any, index: int) -> Any:
        tensors = {name: value for name, value in batch.items() if any(True for _ in iter_tensors(value))}
        return super().graph_inputs(tensors, index)


class TaskBoundary(Boundary):
    """Skips an evaluation by steps that would only repeat the one at the end of the epoch."""

    def request_due(self) -> None:
        super().request_due()
        ends_epoch = self.run.progress.batch == self.run.train_loader.num_batches or self.is_complete()
        if ends_epoch and self.evaluation_is_due():
            self.run.requests.evaluate = False


class TaskLogbook(Logbook):
    """Passes every record to the trainer's `on_record`, and leaves signals to the loop."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        with left_to_the_loop(), super().recording():
            self.record.listener = _task_trainer(self.run).on_record
            yield


class TaskCheckpoints(RunCheckpoints):
    """Announces the arguments of the task that have changed, and how a new length changes the schedule."""

    def own_changes(self) -> list[Change]:
        return _task_trainer(self.run).changed_arguments

    def announce(self, path: Path, changes: list[Change], that_matter: list[Change], are_settings: bool = True) -> None:
        super().announce(path, changes, that_matter, are_settings)
        trainer = _task_trainer(self.run)
        schedule = trainer.job.training.lr_scheduler_type
        if any(change.name in LENGTHS for change in changes) and schedule != "constant":
            self.is_changed = True
            text = f"Changed with it: the {schedule} schedule of the learning rate now ends at the new end"
            trainer.notify("resume.schedule", text, schedule=schedule)


class TaskTrainer(Trainer):
    """Trains and evaluates the model of a job; without an optimizer it only evaluates."""

    create_step = staticmethod(TaskStep)
    create_boundary = staticmethod(TaskBoundary)
    create_logbook = staticmethod(TaskLogbook)
    create_checkpoints = staticmethod(TaskCheckpoints)

    def __init__(
        self,
        job: Job,
        optimizer: Any = None,
        callbacks: Iterable[Any] = (),
        report: Callable[..., None] | None = None,
        *,
        is_rehearsal: bool = False,
    ) -> None:
        self.job = job
        self._evaluates_training = job.args.eval_on_train and not is_rehearsal
        self.intervals = Intervals()  # (low, high) of the metrics of the last evaluation, and why some have none
        self.tokens: dict[str, str] = {}  # of its metrics for which the script of the texts decides
        self.examples = Examples()  # the worst and the suspected samples of the last `evaluate_fully`
        self.rows: dict[str, RowScores] = {}  # the scores of each row of the last `evaluate_fully`, by metric
        self._keepers: list[RowKeeper] = []
        self.first_samples: list[dict[str, Any]] = []
        # Called once with the next training micro-batch, then reset.
        self.look_at_first_batch: Callable[[Any], None] | None = None
        self.changed_arguments: list[Change] = []  # since the checkpoint that the run resumes from
        # Called once the run has begun, or all of its checkpoint is restored.
        self.on_begun: Callable[[], None] | None = None
        # Called with each record of metrics.jsonl as it is written.
        self.on_record: Callable[[dict[str, Any]], None] | None = None
        self._report = report
        self._prefix = "eval_"
        self._scorer: Scorer = job.task.create_scorer(job)
        self._add_predictions: Callable[[list[dict[str, Any]]], None] = lambda samples: None
        self._is_full = False
        super().__init__(job.model, None, optimizer, callbacks)

    def training_run_start(self) -> None:
        if self.on_begun is not None:
            self.on_begun()

    def count_batch_items(self, batch: Any) -> float | None:
        return self.job.task.count_items(batch)

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        if self.look_at_first_batch is not None:
            look, self.look_at_first_batch = self.look_at_first_batch, None
            look(batch)
        loss, outputs = self.job.task.compute_loss(self.job, self.model, batch)
        return {"loss": loss, "model_outputs": outputs, "batch_size": num_rows(batch)}

    def calculate_eval_batch_loss(self, batch: Any) -> dict[str, Any]:
        task = self.job.task
        with torch.no_grad():
            loss, outputs = task.compute_loss(self.job, self.model, batch)
            samples = task.score_batch(self.job, batch, outputs) if self.current_rows else []
        self._add_groups(samples)
        if samples:
            mean = float(loss.mean())
            exact = self._scorer.exact_loss(samples, mean)
            if exact is not None:  # so that the losses in predictions.jsonl give the reported one
                loss = torch.tensor(exact, dtype=torch.float64)
            samples = [{**sample, "batch_loss": mean} for sample in samples] if exact is None else samples
        complete = self._scorer.add(samples)
        self.first_samples += [sample for sample in complete if sample["position"] < _NUM_FIRST]
        if self._is_full:
            self._keep(complete)
        return {"loss": loss, "model_outputs": None, "batch_size": num_rows(batch)}

    def _add_groups(self, samples: list[dict[str, Any]]) -> None:
        """Add the group of each sample; blocks of several rows mix groups, so all of them count as one."""
        if "group" in self.job.plan.columns and self._prefix == "eval_":
            find = getattr(getattr(self.eval_dataset, "rows", None), "group", lambda position: 0)
            for sample in samples:
                sample |= {} if (number := find(sample["position"])) is None else {"group": number}

    def _keep(self, samples: list[dict[str, Any]]) -> None:
        everyone = [sample for one in gather_objects(samples) for sample in one]
        task, rows = self.job.task, getattr(self.eval_dataset, "rows", None)
        readable = []
        for sample in everyone:
            row = None if rows is None else rows[sample["position"]]
            shown = task.readable(self.job, sample, row)
            group = {"group": row["group"]} if row is not None and "group" in row else {}
            readable.append(shown if row is None else {**shown, **group, **task.describe_row(row)})
        self.examples.add(readable)
        self._add_predictions(readable)

    def eval_epoch_start(self) -> None:
        super().eval_epoch_start()
        self._scorer = self.job.task.create_scorer(self.job)
        self._keepers = self._scorer.keep_rows() if self._is_full else []
        self.first_samples = []

    def eval_epoch_end(self) -> None:
        super().eval_epoch_end()
        late = self._scorer.finish()
        if self._is_full:
            self._keep(late)
        mine, *others = gather_objects(self._scorer.state_dict()) if self.num_processes > 1 else [None]
        if mine is not None:
            self._scorer = self.job.task.create_scorer(self.job)
            for state in (mine, *others):
                self._scorer.merge_state(state)
        for keeper in self._keepers if self.num_processes > 1 else ():
            for rank, state in enumerate(gather_objects(keeper.state_dict())):
                if rank != run_of(self).engine.rank:
                    keeper.merge(state)
        self.rows = {name: rows for keeper in reversed(self._keepers) for name, rows in keeper.scores().items()}
        self.intervals = self._scorer.intervals()
        self.tokens = self._scorer.tokens()
        metrics = self._scorer.compute()
        for name, value in metrics.items():
            self.run_history.update_metric(f"{self._prefix}{name}", value)
        if self._prefix == "eval_":
            for name, (low, high) in self.intervals.items():
                self.run_history.update_metric(f"eval_{name}_low", low)
                self.run_history.update_metric(f"eval_{name}_high", high)

    def training_run_epoch_end(self) -> None:
        super().training_run_epoch_end()
        if not self._evaluates_training:
            return
        run, batch_size = run_of(self), self.job.training.eval_batch_size
        loader = run.as_loader(
            DataLoader(self.job.train_dataset, batch_size=batch_size, collate_fn=self.job.collate_fn),
            is_evaluation=True,
        )
        intervals, self._prefix = self.intervals, "train_"
        try:
            with swapped(self, self.model, CallbackHandler([]), ""):
                run_eval_epoch(run, loader, TRAIN_LOSS, is_intermediate=True)
        finally:
            self.intervals, self._prefix = intervals, "eval_"

    def evaluate_fully(self, dataset: Any, predictions: Path | None) -> EvaluationResult:
        """Evaluate, and keep the worst and suspected samples; rank 0 writes the predictions to a file, if given."""
        training = self.job.training
        self.examples = Examples()
        self._is_full = True
        try:
            with prediction_file(predictions if self.is_first else None) as self._add_predictions:
                return self.evaluate(
                    dataset,
                    per_device_batch_size=training.eval_batch_size,
                    dataloader_kwargs=loader_options(training),
                    collate_fn=self.job.collate_fn,
                )
        finally:
            self._is_full = False

    @property
    def num_graphs(self) -> int:
        return run_of(self).stepper.num_graphs

    @property
    def is_first(self) -> bool:
        return run_of(self).engine.rank == 0

    def cut_batch(self, batch: Any, rows: int, start: int, stop: int) -> Any:
        return cut_rows(batch, rows, start, stop, lists_are_rows=True)

    def why_not_cut(self) -> str | None:
        return self.job.task.why_not_cut(self.job)

    def remedy_of_policy(self) -> str:
        return "--oom split"

    def remedies_of_step(self) -> str:
        return "--optim adafactor   or   --lora"

    def remedies_of_batch(self, rows: int, length: int | None, savings: list[MemorySaving]) -> str:
        training, args = self.job.training, self.job.args
        halved = f"--batch {rows // 2} --gradient_accumulation_steps {2 * training.gradient_accumulation_steps}"
        changes = {"half_batch": halved, "bf16": "--bf16", "checkpointing": "--gradient_checkpointing"}
        flag = next((name for name in LENGTH_FLAGS if getattr(args, name, None)), None)
        if flag is not None and length is not None:
            changes["half_length"] = f"--{flag} {length // 2}"
        known = [saving for saving in savings if saving.name in changes]
        others = f"--batch {max(rows // 2, 1)}   or   --bf16   or   --gradient_checkpointing"
        return list_savings(changes, known) or others

    def remedies_of_evaluation(self) -> str:
        smaller = max(self.job.training.eval_batch_size // 2, 1)
        return f"--per_device_eval_batch_size {smaller}   or   --bf16"

    def remedies_of_unused_parameters(self) -> tuple[str, str]:
        return "set --ddp_find_unused_parameters", "--freeze with their names"

    def checkpoint_path(self) -> Path | None:
        saver = run_of(self).checkpoints.saver
        return None if saver is None else saver.path(self.progress.update)

    def checkpoint_files(self) -> dict[str, bytes]:
        policy = run_of(self).settings.checkpoints
        folder = None if policy is None else policy.run_folder
        return {} if folder is None else kept_config(RunFolder(Path(folder)))

    def improves(self) -> bool:
        """Whether the latest evaluation beats all earlier ones in the history; the loss decides between equal ones."""
        policy = run_of(self).settings.checkpoints
        if policy is None or policy.keep_best is None:
            return False
        name, direction, *ties = policy.keep_best
        values, *losses = ([float(each) for each in self.run_history.get_metric_values(key)] for key in (name, *ties))
        losses = [each for each in losses if len(each) == len(values)]  # some tasks record it twice
        sign = -1 if direction == "max" else 1
        ranks = [(sign * value, *loss) for value, *loss in zip(values, *losses, strict=True)]
        *earlier, latest = ranks or [(math.nan,)]
        return math.isfinite(latest[0]) and all(latest < other for other in earlier if math.isfinite(other[0]))

    def _create_accelerator(self) -> Any:
        training = self.job.training
        sharding = Sharding.parse(training.fsdp, training.fsdp_config)
        return create_accelerator(training.mixed_precision, training.use_cpu, sharding, training.ddp_options)

    def notify(self, kind: str, text: str, **fields: Any) -> None:
        if self._report is None:
            super().notify(kind, text.strip(), **fields)
        elif run_of(self).engine.accelerator.is_local_main_process:
            self._report(kind, text.strip(), **fields)

    def print(self, *args: Any, **kwargs: Any) -> None:
        if self._report is None:
            super().print(*args, **kwargs)
        else:
            self.notify("print", " ".join(map(str, args)))


def _task_trainer(run: TrainingRun) -> TaskTrainer:
    assert isinstance(run.trainer, TaskTrainer)
    return run.trainer


def loader_options(training: Any, *, has_workers: bool = True) -> dict[str, Any]:
    workers = training.dataloader_num_workers if has_workers else 0
    options: dict[str, Any] = {
        "num_workers": workers,
        "pin_memory": training.dataloader_pin_memory and torch.cuda.is_available() and not training.use_cpu,
    }
    if workers:
        options |= {
            "persistent_workers": training.dataloader_persistent_workers,
            "prefetch_factor": training.dataloader_prefetch_factor,
            "multiprocessing_context": training.dataloader_multiprocessing_context,
        }
    return options
