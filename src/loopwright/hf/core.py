"""The core trainer that an `hf.Trainer` owns; its hooks call HF's override points.

Nothing here loops. A micro-batch goes to `training_step` (`step.py`), an evaluation batch to `prediction_step`. The
control flags of HF's callbacks become requests to the core (`run.py`, `boundary.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from loopwright.engine import create_accelerator
from loopwright.engine.compilation import CompiledModel
from loopwright.engine.memory import MemorySaving, list_savings
from loopwright.engine.modes import kept_modes
from loopwright.engine.nested import num_rows
from loopwright.engine.sharding import Sharding
from loopwright.hf.boundary import HfBoundary, HfLogbook
from loopwright.hf.checkpoints import HfCheckpoints
from loopwright.hf.loss import LossCall
from loopwright.hf.model_setup import cast_weights
from loopwright.hf.run import HfRun
from loopwright.hf.step import HfStep
from loopwright.settings import RunSettings
from loopwright.trainer import Trainer as CoreTrainer
from loopwright.training.evaluation import run_eval_epoch
from loopwright.training.run import TrainingRun, run_of

if TYPE_CHECKING:
    from loopwright.hf.trainer import Trainer

EvaluationStep = Callable[[Any], tuple[Tensor, Any]]  # from a batch on the device to its mean loss and item count


class Core(CoreTrainer):
    """The loop of an `hf.Trainer`, its `owner`; `hf_run`, the current run in transformers' terms, is its callback."""

    create_step, create_boundary = HfStep, HfBoundary
    create_logbook, create_checkpoints = HfLogbook, HfCheckpoints

    def __init__(self, owner: Trainer) -> None:
        self.owner = owner
        self.hf_run = HfRun(owner)
        self._evaluation_step: EvaluationStep | None = None
        self.own_names: set[str] = set()  # attributes of the owner that its own class sets
        self._is_ready = False
        self._loss_call: LossCall | None = None
        self.accelerator_view = AcceleratorView(self)  # one object: what users set on it stays
        super().__init__(owner.model, None, None, callbacks=[self.hf_run])
        run_of(self).seed = owner.args.seed

    @property
    def accelerator(self) -> Any:
        return run_of(self).engine.accelerator

    def replace_run(self, hf_run: HfRun) -> None:
        callbacks = self.callback_handler.callbacks
        callbacks[callbacks.index(self.hf_run)] = hf_run
        self.hf_run = hf_run
        self.callback_handler.refresh()

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Prepare the model for an evaluation, unless a run or an outer evaluation has already done so."""
        training = run_of(self)
        if self._is_ready:
            yield
            return
        if training.is_running:
            self._is_ready = True
            try:
                with kept_modes(self.model):
                    yield
            finally:
                self._is_ready = False
            return
        run = TrainingRun(self, RunSettings(mixed_precision=self.owner.args.mixed_precision), previous=training)
        run.install(training)
        run.memory.parts = training.memory.parts
        run.start_engine()
        optimizer, self.optimizer = self.optimizer, None
        self.model, _ = run.engine.prepare(self.owner.model, None)
        self._is_ready = True
        try:
            with cast_weights(self.owner.model, self.owner.args):
                yield
        finally:
            self._is_ready = False
            run.close()
            self.optimizer = optimizer
            self.owner.model.eval()  # as transformers leaves it

    def run_evaluation(self, dataloader: Any, step: EvaluationStep) -> float:
        """Run a step over every batch of a loader, and return the mean loss over all items; nan if there are none."""
        run = run_of(self)
        loader = run.as_loader(dataloader, is_evaluation=True)
        self.switch_optimizer("eval")
        outer, self._evaluation_step = self._evaluation_step, step
        try:
            run_eval_epoch(run, loader, "evaluation_loss", is_intermediate=True)
        finally:
            self._evaluation_step = outer
            loader.close()
        self.owner.model.eval()  # until the metrics are logged, as in transformers
        return float(self.run_history.get_latest_metric("evaluation_loss"))

    def loss_of(self, model: Any, inputs: Any, items: Any, wants_outputs: bool = False) -> tuple[Tensor, Any]:
        """Call the owner's `compute_loss` with the arguments it takes; return the loss and any outputs."""
        if self._loss_call is None or self._loss_call.function != self.owner.compute_loss:
            self._loss_call = LossCall(self.owner.compute_loss)
        return self._loss_call(model, inputs, items, wants_outputs)

    def shown(self, logs: dict[str, Any]) -> dict[str, Any]:
        """Return the logs for callbacks; next to a loss, add the share of pad tokens if there are any."""
        # The history omits it: a resumed run starts counting in the middle, and would get another value.
        waste = self.speed.get("padding_waste") if "loss" in logs else None
        return {**logs, "padding_waste": waste} if waste else logs

    def switch_optimizer(self, mode: str) -> None:
        """Switch to the "train" or "eval" weights of a schedule-free optimizer, which has a method for each."""
        switch = getattr(self.owner.optimizer, mode, None)
        if callable(switch):
            switch()

    def create_train_dataloader(self, batch_size: int, train_dl_kwargs: dict[str, Any] | None = None) -> Any:
        return self.owner.callback_handler.train_dataloader

    def calculate_eval_batch_loss(self, batch: Any) -> dict[str, Any]:
        assert self._evaluation_step is not None
        with torch.no_grad():
            loss, items = self._evaluation_step(batch)
        return {"loss": loss, "batch_size": num_rows(batch), "num_items_in_batch": items}

    def checkpoint_files(self) -> dict[str, bytes]:
        return self.hf_run.checkpoint_files()

    def request_evaluation(self) -> None:
        self.requests.evaluate = True

    def train_epoch_end(self) -> None:
        super().train_epoch_end()
        if self.progress.batch == 0:
            epoch, update = run_of(self).epoch, self.progress.update
            text = f"Epoch {epoch} has not a single batch: stopping at update {update}"
            self.notify("epoch.empty", text, epoch=epoch, update=update)
            self.owner.control.should_training_stop = True

    def _create_accelerator(self) -> Any:
        args = self.owner.args
        sharding = Sharding.parse(args.fsdp, args.fsdp_config)
        return create_accelerator(args.mixed_precision, args.use_cpu, sharding, args.ddp_options)

    def create_compiled_model(self, model: torch.nn.Module) -> CompiledModel:
        args = self.owner.args
        return CompiledModel(model, backend=args.torch_compile_backend or "inductor", mode=args.torch_compile_mode)

    def optimizer_zero_grad(self) -> None:
        super().optimizer_zero_grad()
        for parameter in run_of(self).engine.parameters:  # a callback may have unfrozen some that no optimizer holds
            parameter.grad = None

    def _perform_forward_and_backward_passes(self, batch: Any, step: int) -> None:
        run_of(self).micro_batch_step.perform(self.model, batch)  # type: ignore[attr-defined] # an HfStep

    def _run_eval_epoch(self, valid_dl: Any, is_training: bool = True, is_intermediate: bool = False) -> None:
        self.hf_run.evaluate()
        self.hf_run.take_requests()

    def remedy_of_policy(self) -> str:
        return "auto_find_batch_size=True"

    def remedies_of_unused_parameters(self) -> tuple[str, str]:
        return "set ddp_find_unused_parameters=True", super().remedies_of_unused_parameters()[1]

    def remedies_of_batch(self, rows: int, length: int | None, savings: list[MemorySaving]) -> str:
        changes = {
            "half_batch": f"per_device_train_batch_size={rows // 2} with twice the gradient_accumulation_steps",
            "bf16": "bf16=True",
            "checkpointing": "gradient_checkpointing=True",
            "half_length": f"rows of {(length or 0) // 2} tokens",
        }
        return list_savings(changes, savings) or "a smaller per_device_train_batch_size, or bf16=True"

    def remedies_of_evaluation(self) -> str:
        return "a smaller per_device_eval_batch_size, shorter samples, or bf16=True"


class AcceleratorView:
    """`trainer.accelerator`: accelerate's object, except that the loop weights losses and shards the data."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward on the mean loss of a micro-batch; called by `training_step`, yours or ours."""
        run = run_of(self._core)
        run.engine.backward(run.micro_batch_step.weigh(loss))  # type: ignore[attr-defined] # an HfStep

    def prepare(self, *objects: Any, **options: Any) -> Any:
        """Return loaders unchanged, since the loop shards their data; accelerate prepares everything else."""
        others = [each for each in objects if not isinstance(each, DataLoader)]
        prepared = self._core.accelerator.prepare(*others, **options) if others else ()
        rest = iter(prepared if len(others) > 1 else (prepared,))
        result = tuple(each if isinstance(each, DataLoader) else next(rest) for each in objects)
        return result[0] if len(result) == 1 else result

    def __getattr__(self, name: str) -> Any:
        core: Any = vars(self).get("_core")  # a copy asks before it has one
        return getattr(core.accelerator, name)
