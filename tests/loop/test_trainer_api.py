"""The trainer's surface: what it accepts, what it holds, what it returns, what it leaves behind."""

import copy
import functools
import gc
import inspect
import io
import pickle
import shutil
import weakref
from collections import namedtuple
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

import toys
from loop.preparation import OwnPreparation
from loopwright import Trainer
from loopwright.callbacks import CONSOLE_CALLBACKS, DEFAULT_CALLBACKS, LimitBatchesCallback, PrintProgressCallback
from loopwright.checkpoint import Checkpointing
from loopwright.errors import CheckpointError, ConfigError
from loopwright.optimizers import apply_gradients, drop_gradients
from loopwright.results import EvaluationResult, PredictionResult, TrainResult
from loopwright.run_config import TrainerRunConfig
from loopwright.tracking import InMemoryRunHistory
from loopwright.trainer import TrainerWithTimmScheduler
from loopwright.training.run import run_of
from toys import Stream, pairs, weights

STEP_LR = partial(torch.optim.lr_scheduler.StepLR, step_size=1)


def trainer_of(model=None, callbacks=(), lr: float = 0.01, cls=Trainer, **kwargs):
    return toys.trainer_of(callbacks, nn.Linear(4, 1) if model is None else model, lr, cls=cls, **kwargs)


# Signatures


def signature(function) -> str:
    """The arguments that may be given by position, as they are written; without the trainer itself."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    return " ".join(
        parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default!r}"
        for parameter in parameters
        if parameter.kind is not parameter.KEYWORD_ONLY
    )


def keyword_only(function) -> dict:
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


def test_the_constructor_and_train_take_the_contracts_arguments_in_order_and_ours_by_keyword():
    expected = f"model loss_func optimizer callbacks={CONSOLE_CALLBACKS!r} run_history=None"
    assert signature(Trainer.__init__) == expected
    assert keyword_only(Trainer.__init__) == {"metrics": None}
    expected = """
        train_dataset num_epochs eval_dataset=None per_device_batch_size=8 max_num_train_steps=None
        gradient_accumulation_steps=1 gradient_clip_value=None create_scheduler_fn=None train_dataloader_kwargs=None
        eval_dataloader_kwargs=None reset_run_history=True collate_fn=None resume_from=None
    """
    assert signature(Trainer.train).split() == expected.split()
    ours = keyword_only(Trainer.train)
    unset = ("seed", "mixed_precision", "gradient_clip_norm", "checkpoints", "evaluate_every")
    assert ours.items() >= {**dict.fromkeys(unset), "step_mode": "auto", "log_every": 50}.items()
    assert inspect.Parameter.empty not in ours.values(), "every argument of ours has a default"


def test_the_other_methods_take_the_contracts_arguments():
    for name, arguments in {
        "evaluate": "dataset=None per_device_batch_size=8 dataloader_kwargs=None collate_fn=None",
        "predict": "dataset per_device_batch_size=8 dataloader_kwargs=None collate_fn=None",
        "gather": "tensor padding_value=None",
        "get_model": "keep_torch_compile=True",
        "save_checkpoint": (
            "save_path checkpoint_kwargs=None save_optimizer=True save_scheduler=True save_per_node=True"
        ),
        "load_checkpoint": "checkpoint_path load_optimizer=True load_scheduler=True",
        "save_training_state": "output_dir checkpoint_kwargs=None",
        "load_training_state": "input_dir",
    }.items():
        assert signature(getattr(Trainer, name)) == arguments, name
    for name, arguments in {
        "create_train_dataloader": "batch_size train_dl_kwargs",
        "create_eval_dataloader": "batch_size eval_dl_kwargs",
        "get_default_train_dl_kwargs": "batch_size",
        "get_default_eval_dl_kwargs": "batch_size",
        "calculate_train_batch_loss": "batch",
        "calculate_eval_batch_loss": "batch",
        "backward_step": "loss",
        "_run_train_epoch": "train_dl",
        "_run_eval_epoch": "valid_dl is_training is_intermediate",
        "_perform_forward_and_backward_passes": "batch step",
        "_create_run_config": (
            "per_device_batch_size num_epochs gradient_accumulation_steps max_num_train_steps gradient_clip_value"
        ),
        **dict.fromkeys(["_clip_gradients", "_create_accelerator", "_run_training"], ""),
        "_prepare_model_optimizer_and_dataloaders": "",
    }.items():
        names = [argument.partition("=")[0] for argument in signature(getattr(Trainer, name)).split()]
        assert names == arguments.split(), name


# The constructor


@pytest.mark.parametrize("arguments", [(Mock(), Mock(), Mock()), ("model", "loss", "optimizer"), (None, None, None)])
def test_the_constructor_stores_and_checks_nothing(arguments):
    trainer = Trainer(*arguments, callbacks=())
    assert (trainer.model, trainer.loss_func, trainer.optimizer) == arguments


def test_the_public_attributes_are_there_from_the_start_and_may_be_assigned():
    trainer = trainer_of()
    names = "create_scheduler_fn scheduler collate_fn train_dataset eval_dataset run_config"
    marker = object()
    for name in [*names.split(), "_train_dataloader", "_eval_dataloader"]:
        assert getattr(trainer, name) is None, name
        setattr(trainer, name, marker)
        assert getattr(trainer, name) is marker
    assert isinstance(trainer.run_history, InMemoryRunHistory)
    assert trainer.callback_handler.callbacks == []
    assert isinstance(trainer.device, torch.device)
    assert trainer._accelerator.device == trainer.device


def test_callbacks_may_be_instances_or_classes_none_is_a_type_error_and_there_are_default_ones():
    instance = LimitBatchesCallback(3)
    trainer = trainer_of(callbacks=(PrintProgressCallback, instance, PrintProgressCallback))
    names = ["PrintProgressCallback", "LimitBatchesCallback", "PrintProgressCallback"]
    assert trainer.callback_handler.callback_list == names
    assert trainer.callback_handler.callbacks[1] is instance
    with pytest.raises(TypeError):
        Trainer(Mock(), Mock(), Mock(), callbacks=None)
    trainer = Trainer(Mock(), Mock(), Mock())
    assert [type(callback) for callback in trainer.callback_handler] == list(CONSOLE_CALLBACKS)
    trainer = Trainer(Mock(), Mock(), Mock(), DEFAULT_CALLBACKS)
    assert [type(callback) for callback in trainer.callback_handler] == list(DEFAULT_CALLBACKS)


@pytest.mark.parametrize("value", ["none", "None", "NONE"])
def test_the_environment_limits_the_batches_of_trainers_made_under_it(monkeypatch, value):
    monkeypatch.setenv("PT_ACC_LIMIT_BATCHES", "2")
    limited = trainer_of(callbacks=[PrintProgressCallback])
    assert limited.callback_handler.callback_list == ["LimitBatchesCallback", "PrintProgressCallback"]
    monkeypatch.setenv("PT_ACC_LIMIT_BATCHES", value)
    assert trainer_of().callback_handler.callbacks == []
    monkeypatch.delenv("PT_ACC_LIMIT_BATCHES")
    assert trainer_of().callback_handler.callbacks == []
    assert limited.train(pairs(40), 2, pairs(40), per_device_batch_size=4).updates == 4
    assert limited.run_config.num_update_steps_per_epoch == 2


def test_a_given_history_is_used_as_it_is_and_may_be_kept_over_several_runs():
    class Counted(InMemoryRunHistory):
        updates = 0

        def update_metric(self, metric_name, metric_value):
            self.updates += 1
            super().update_metric(metric_name, metric_value)

    history = Counted()
    trainer = trainer_of(run_history=history)
    trainer.train(pairs(8), 2, pairs(4))
    assert trainer.run_history is history
    assert history.updates == 4
    trainer.train(pairs(8), 3, reset_run_history=False)
    assert len(trainer.run_history.get_metric_values("train_loss_epoch")) == 5
    assert trainer.run_history.current_epoch == 6
    trainer.train(pairs(8), 1)
    assert len(trainer.run_history.get_metric_values("train_loss_epoch")) == 1


def test_the_init_event_is_the_constructors_last_act():
    watch = toys.watch(on_init_end=lambda trainer, **kwargs: (trainer.model, trainer.run_config, trainer.device))
    trainer = trainer_of(callbacks=[watch])
    assert watch.seen == [(trainer.model, None, trainer.device)]


# Numbers of a run


def test_the_run_config_holds_the_contracts_arithmetic():
    trainer = trainer_of()
    trainer.train(pairs(20), 3, pairs(10), per_device_batch_size=4, gradient_accumulation_steps=2)
    config = trainer.run_config
    assert isinstance(config, TrainerRunConfig)
    numbers = {name: config[name] for name in config if not name.endswith("dl_kwargs")}
    sizes = {"train_per_device_batch_size": 4, "eval_per_device_batch_size": 4, "gradient_accumulation_steps": 2}
    totals = {"train_total_batch_size": 8, "eval_total_batch_size": 4, "max_num_train_steps": 3 * 3 + 1}
    updates = {"num_update_steps_per_epoch": 3, "num_local_update_steps_per_epoch": 3}
    processes = {"is_local_process_zero": True, "is_world_process_zero": True, "is_distributed": False}
    others = {"num_epochs": 3, "gradient_clip_value": None, "mixed_precision": "no", "num_processes": 1}
    assert numbers == {**sizes, **totals, **updates, **processes, **others}
    assert config["num_epochs"] == config.num_epochs == 3
    assert config.train_dl_kwargs["batch_size"] == config.eval_dl_kwargs["batch_size"] == 4
    assert (config.train_dl_kwargs["shuffle"], config.eval_dl_kwargs["shuffle"]) == (True, False)
    assert config.to_dict()["num_epochs"] == 3
    with pytest.raises(KeyError, match="num_epochs"):
        config["num_epoch"]


def test_batch_sizes_in_the_loader_arguments_win_and_a_given_limit_is_reported_as_it_is():
    trainer = trainer_of()
    loading = {"train_dataloader_kwargs": {"batch_size": 10}, "eval_dataloader_kwargs": {"batch_size": 5}}
    trainer.train(pairs(20), 9, pairs(10), 4, max_num_train_steps=5, gradient_clip_value=0.5, **loading)
    config = trainer.run_config
    assert (config.train_per_device_batch_size, config.eval_per_device_batch_size) == (10, 5)
    assert config.max_num_train_steps == 5
    assert config.num_epochs == 3, "2 updates per epoch: 5 updates take 3 epochs"
    assert config.gradient_clip_value == 0.5


class OwnLoader(Trainer):
    def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
        return DataLoader(self.train_dataset, batch_size=4)


@pytest.mark.parametrize(
    ("dataset", "kwargs", "cls"),
    [
        (DataLoader(pairs(16), batch_size=4), None, Trainer),
        (pairs(16), {"sampler": SequentialSampler(range(16)), "batch_size": 4}, Trainer),
        (pairs(16), {"batch_sampler": BatchSampler(SequentialSampler(range(16)), 4, drop_last=False)}, Trainer),
        (Stream(pairs(16)), {"batch_size": 4}, Trainer),
        (pairs(16), None, OwnLoader),
    ],
    ids=["loader", "sampler", "batch_sampler", "stream", "hook"],
)
def test_the_run_config_tells_the_batch_size_and_arguments_that_the_loader_really_has(dataset, kwargs, cls):
    """8 is what `train` was told: 4 is what the loader has, and nothing torch would have refused is listed."""
    trainer = trainer_of(cls=cls)
    options = {"gradient_accumulation_steps": 2, "train_dataloader_kwargs": kwargs}
    trainer.train(dataset, 1, per_device_batch_size=8, **options)
    config = trainer.run_config
    assert (config.train_per_device_batch_size, config.train_total_batch_size) == (4, 8)
    assert (config.num_update_steps_per_epoch, trainer.progress.update) == (0 if isinstance(dataset, Stream) else 2, 2)
    listed = config.train_dl_kwargs or {}
    assert "shuffle" not in listed and listed.get("batch_size", 4) == 4


def test_the_run_config_of_an_evaluation():
    trainer = trainer_of()
    trainer.evaluate(pairs(10), per_device_batch_size=4)
    config = trainer.run_config
    assert (config.num_epochs, config.max_num_train_steps, config.gradient_accumulation_steps) == (1, 1, 1)
    assert (config.num_update_steps_per_epoch, config.num_local_update_steps_per_epoch) == (0, 0)
    assert config.train_dl_kwargs is config.gradient_clip_value is None


@pytest.mark.parametrize(
    ("num_samples", "num_epochs", "accumulation", "limit", "updates", "epochs_begun"),
    [
        (40, 2, 1, None, 20, 2),
        (80, 2, 2, 15, 15, 2),  # 15 of 20 updates, accumulation 2
        (40, 2, 1, 7, 7, 1),  # 7 of 2 x 10
        (40, 2, 1, 20, 20, 2),  # both limits meet
        (40, 2, 1, 99, 20, 2),  # the smaller one counts
        (40, 1, 1, 99, 10, 1),
        (40, 9, 1, 10, 10, 1),  # the limit is an epoch's end
        (38, 2, 4, 4, 4, 2),  # windows of 4, 4, 2 micro-batches
    ],
)
def test_a_run_ends_at_the_smaller_of_its_two_limits(
    num_samples, num_epochs, accumulation, limit, updates, epochs_begun, capsys
):
    trainer = trainer_of()
    limits = {"gradient_accumulation_steps": accumulation, "max_num_train_steps": limit}
    result = trainer.train(pairs(num_samples), num_epochs, pairs(4), per_device_batch_size=4, **limits)
    assert result.updates == trainer.progress.update == updates
    # The epoch in which the limit is reached is closed as any other: loss, evaluation, epoch count.
    assert len(trainer.run_history.get_metric_values("train_loss_epoch")) == epochs_begun
    assert len(trainer.run_history.get_metric_values("eval_loss_epoch")) == epochs_begun
    assert trainer.run_history.current_epoch == epochs_begun + 1
    assert result.stop_reason is None
    line = f"Reached max number of training steps {limit} in epoch {epochs_begun}"
    assert (line in capsys.readouterr().out) == (limit == updates)


# Results


def test_training_returns_its_metrics_counts_and_seed():
    trainer = trainer_of()
    result = trainer.train(pairs(20), 3, pairs(8), per_device_batch_size=4, seed=5)
    assert isinstance(result, TrainResult)
    names = ("eval_loss_epoch", "train_loss_epoch")
    metrics = {name: trainer.run_history.get_latest_metric(name) for name in names}
    assert result == TrainResult(metrics=metrics, epochs=3, updates=15, stop_reason=None, seed=5)
    assert 0 < result.seconds < 60
    assert all(type(value) is float for value in result.metrics.values())


def test_evaluating_returns_its_metrics_and_those_of_the_hooks():
    class WithMetric(Trainer):
        def eval_epoch_end(self):
            self.run_history.update_metric("accuracy", 0.5)

    trainer = trainer_of(cls=WithMetric)
    result = trainer.evaluate(pairs(8))
    assert isinstance(result, EvaluationResult)
    assert result.stop_reason is None
    assert result.metrics.keys() == {"accuracy", "evaluation_loss"}
    expected = nn.functional.mse_loss(trainer.model(pairs(8).tensors[0]), pairs(8).tensors[1]).item()
    assert result.metrics["evaluation_loss"] == pytest.approx(expected)


def test_evaluating_without_a_dataset_takes_and_collates_that_of_the_last_call():
    trainer = trainer_of()
    first = trainer.train(pairs(8), 1, pairs(6)).metrics["eval_loss_epoch"]
    assert trainer.evaluate().metrics["evaluation_loss"] == pytest.approx(first)
    assert trainer.eval_dataset is not None

    def collate(rows):
        return torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows])

    rows = [(*row, None) for row in pairs(6)]  # nothing that the default can collate
    first = trainer.train(rows, 1, rows, collate_fn=collate).metrics["eval_loss_epoch"]
    assert trainer.evaluate().metrics["evaluation_loss"] == pytest.approx(first)
    assert trainer.collate_fn is collate
    trainer.evaluate(pairs(4))
    assert trainer.collate_fn is None, "another dataset is collated as it is said, or by the default"


# Prediction


def test_predictions_come_in_the_order_of_the_dataset():
    trainer = trainer_of()
    x = pairs(11).tensors[0]
    with torch.no_grad():
        expected = trainer.model(x)
    for batch_size in (1, 4, 11, 100):
        result = trainer.predict(pairs(11), per_device_batch_size=batch_size)
        assert isinstance(result, PredictionResult)
        assert torch.allclose(result.outputs, expected)
        outputs = result.outputs
        assert (outputs.shape, outputs.device.type, outputs.requires_grad) == ((11, 1), "cpu", False)
        assert result.metrics == {"num_samples": 11}


Pair = namedtuple("Pair", ["double", "rows"])


class Outputs(nn.Module):
    def __init__(self, make=lambda x: x):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.make = make

    def forward(self, x):
        return self.make(x)


def predicted(make):
    return trainer_of(Outputs(make), loss_func=None).predict(pairs(11), per_device_batch_size=4).outputs


def test_predictions_keep_the_structure_of_the_outputs_or_become_a_list_if_shapes_differ():
    x = pairs(11).tensors[0]
    for make in (
        lambda x: (x * 2, x.sum(dim=1)),
        lambda x: {"double": x * 2, "parts": [x, x + 1]},
        lambda x: Pair(x * 2, x),
    ):
        toys.assert_same(predicted(make), make(x))
    assert torch.equal(predicted(lambda x: SimpleNamespace(logits=x)), x), "of outputs with logits, the logits"
    lengths = iter([3, 5, 4])
    ragged = predicted(lambda x: x[:, :1].expand(-1, next(lengths)))
    assert [row.shape[0] for row in ragged] == [3] * 4 + [5] * 4 + [4] * 3
    assert all(torch.equal(row, x[index, :1].expand(len(row))) for index, row in enumerate(ragged))


def test_predictions_take_streams_mappings_and_ready_loaders():
    x = pairs(5).tensors[0]
    trainer = trainer_of(Outputs(), loss_func=None)
    rows = [{"x": row, "labels": torch.zeros(1)} for row in x]
    for dataset in (Stream(x), list(x), rows, DataLoader(TensorDataset(x), batch_size=2)):
        result = trainer.predict(dataset, per_device_batch_size=2)
        assert torch.equal(result.outputs, x)
        assert result.metrics == {"num_samples": 5}
    assert trainer.predict([]).outputs == []


def test_predicting_writes_no_history_and_draws_nothing():
    trainer = trainer_of(nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 1)))
    trainer.train(pairs(8), 1)
    before = trainer.run_history.state_dict(), torch.get_rng_state(), weights(trainer)
    first, second = trainer.predict(pairs(8)).outputs, trainer.predict(pairs(8)).outputs
    assert torch.equal(first, second), "dropout is off"
    assert trainer.run_history.state_dict() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert torch.equal(weights(trainer), before[2])


def test_a_custom_prediction_hook_is_used():
    class Probabilities(Trainer):
        def calculate_prediction(self, batch):
            return self.model(batch[0]).sigmoid()

    trainer = trainer_of(cls=Probabilities)
    outputs = trainer.predict(pairs(6)).outputs
    assert torch.equal(outputs, trainer.model(pairs(6).tensors[0]).detach().sigmoid())


# Saving and loading one file


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors", "deeper/folder/model.pt"])
def test_a_saved_model_can_be_loaded_into_another_trainer(tmp_path, name):
    trainer = trainer_of()
    trainer.train(pairs(16), 2, create_scheduler_fn=STEP_LR)
    trainer.save_checkpoint(str(tmp_path / name))
    other = trainer_of(lr=0.7)
    loaded = other.load_checkpoint(tmp_path / name)
    assert torch.equal(weights(other), weights(trainer))
    if name.endswith(".pt"):
        assert loaded.keys() == {"model_state_dict", "optimizer_state_dict", "scheduler_state_dict"}
        assert other.optimizer.param_groups[0]["lr"] == trainer.optimizer.param_groups[0]["lr"]
        assert len([state["momentum_buffer"] for state in other.optimizer.state.values()]) == 2
    else:
        assert other.optimizer.param_groups[0]["lr"] == 0.7


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_a_file_with_weights_of_other_names_or_shapes_is_refused_by_name_and_changes_nothing(name, tmp_path):
    trainer_of(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))).save_checkpoint(tmp_path / name)
    trainer = trainer_of(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2), nn.Linear(2, 1)))
    before = weights(trainer)
    with pytest.raises(CheckpointError) as raised:
        trainer.load_checkpoint(tmp_path / name)
    assert str(raised.value) == (
        f"{tmp_path / name} is of another model. 1.bias: (1,) saved, (2,) in the model; "
        "1.weight: (1, 3) saved, (2, 3) in the model; 2.bias: absent saved, (1,) in the model; "
        "2.weight: absent saved, (1, 2) in the model"
    )
    assert torch.equal(weights(trainer), before)


@pytest.mark.parametrize(("groups", "sizes"), [("weight,bias;", "[2, 0]"), ("weight", "[1]")])
def test_a_file_whose_optimizer_has_other_groups_is_refused_and_changes_nothing(groups, sizes, tmp_path):
    trainer_of(nn.Linear(4, 1)).save_checkpoint(tmp_path / "model.pt")
    model = nn.Linear(4, 1)
    named = [[getattr(model, name) for name in group.split(",") if name] for group in groups.split(";")]
    optimizer = torch.optim.SGD([{"params": parameters} for parameters in named], lr=0.7)
    trainer = trainer_of(model, optimizer=optimizer)
    before = weights(model)
    with pytest.raises(CheckpointError) as raised:
        trainer.load_checkpoint(tmp_path / "model.pt")
    assert str(raised.value) == (
        f"{tmp_path / 'model.pt'} is of another optimizer: its parameter groups have the sizes [2], the "
        f"trainer's {sizes}. Group the parameters as when it was saved, or pass load_optimizer=False."
    )
    assert torch.equal(weights(model), before)
    assert trainer.optimizer.param_groups[0]["lr"] == 0.7
    trainer.load_checkpoint(tmp_path / "model.pt", load_optimizer=False)
    assert not torch.equal(weights(model), before)


def test_a_file_is_loaded_into_a_model_whose_shapes_are_not_known_yet(tmp_path):
    trainer = trainer_of(nn.Sequential(nn.Linear(4, 1)))
    trainer.save_checkpoint(tmp_path / "model.pt")
    other = nn.Sequential(nn.LazyLinear(1))
    Trainer(other, None, None).load_checkpoint(tmp_path / "model.pt", load_optimizer=False)
    assert torch.equal(weights(other), weights(trainer))


@pytest.mark.parametrize(
    ("name", "make", "told"),
    [
        ("tensor.pt", lambda path: torch.save(torch.ones(2), path), "has no model_state_dict, but Tensor"),
        ("text.pt", lambda path: path.write_text("nothing of torch's"), "is damaged, or not a checkpoint file"),
        ("empty.pt", lambda path: path.write_bytes(b""), "is damaged, or not a checkpoint file"),
        ("text.safetensors", lambda path: path.write_text("nothing"), "is damaged, or not a checkpoint file"),
        ("code.pt", lambda path: torch.save({"model_state_dict": {}, "x": path}, path), "it holds pathlib"),
        ("folder.pt", Path.mkdir, "is a folder, not a checkpoint file"),
    ],
)
def test_files_that_cannot_be_read_are_refused_in_words(name, make, told, tmp_path):
    make(tmp_path / name)
    with pytest.raises(CheckpointError, match=told):
        trainer_of().load_checkpoint(tmp_path / name)


class Notes:
    """An object of the user's own."""


@pytest.mark.parametrize(
    ("value", "told"), [(Notes(), "test_trainer_api.Notes"), (lambda: 1, "lambda")], ids=["object", "function"]
)
def test_what_could_not_be_loaded_again_is_not_saved_and_leaves_the_old_file(value, told, tmp_path):
    trainer = trainer_of()
    trainer.save_checkpoint(tmp_path / "model.pt", {"epoch": 1})
    with pytest.raises(CheckpointError, match=f"is not written: .*{told}.*tensors, arrays, numbers"):
        trainer.save_checkpoint(tmp_path / "model.pt", {"notes": value})
    assert trainer.load_checkpoint(tmp_path / "model.pt")["epoch"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


def test_a_scheduler_that_cannot_be_saved_is_left_out_of_a_model_file_with_a_warning(tmp_path):
    class Stateless:
        def __init__(self, optimizer):
            self.num_steps = 0

        def step(self):
            self.num_steps += 1

        def state_dict(self):
            raise NotImplementedError("nothing to save")

    trainer = trainer_of()
    trainer.train(pairs(16), 2, create_scheduler_fn=Stateless)
    assert trainer.scheduler.num_steps == 4
    with pytest.warns(UserWarning, match="lacks the state of the Stateless, which cannot be saved: nothing to save"):
        trainer.save_checkpoint(tmp_path / "model.pt")
    assert sorted(trainer_of().load_checkpoint(tmp_path / "model.pt")) == ["model_state_dict", "optimizer_state_dict"]


def test_another_model_than_the_trainers_own_may_be_saved(tmp_path):
    trainer, other = trainer_of(), nn.Linear(4, 1)
    trainer.save_checkpoint(tmp_path / "other.pt", model=other)
    saved = torch.load(tmp_path / "other.pt", weights_only=True)["model_state_dict"]
    assert torch.equal(saved["weight"], other.weight)


def test_evaluating_and_predicting_leave_what_a_later_save_needs(tmp_path):
    trainer = trainer_of()
    trainer.train(pairs(16), 2, create_scheduler_fn=STEP_LR)
    before = trainer.progress.state_dict()
    trainer.evaluate(pairs(8))
    trainer.predict(pairs(8))
    assert trainer.progress.state_dict() == before
    trainer.save_checkpoint(tmp_path / "model.pt")
    assert "scheduler_state_dict" in torch.load(tmp_path / "model.pt", weights_only=True)
    trainer.save_training_state(tmp_path / "state")
    resumed = trainer_of()
    result = resumed.train(pairs(16), 3, create_scheduler_fn=STEP_LR, resume_from=tmp_path / "state")
    assert (result.epochs, result.updates) == (3, 6)
    assert len(resumed.run_history.get_metric_values("train_loss_epoch")) == 1


# Small tools


def test_get_model_may_strip_torch_compile_and_print_prints(capsys):
    trainer = trainer_of()
    assert trainer.get_model() is trainer.model
    trainer.print("some", "words", sep="-")
    assert capsys.readouterr().out == "some-words\n"
    stream = io.StringIO()
    trainer.print("elsewhere", file=stream)
    assert stream.getvalue() == "elsewhere\n"
    model = nn.Linear(4, 1)
    compiled = torch.compile(model, backend="eager")
    trainer = trainer_of(compiled)
    assert trainer.get_model() is compiled
    assert trainer.get_model(keep_torch_compile=False) is model


def test_gathering_in_one_process_gives_the_same_values_back():
    trainer = trainer_of()
    rows = torch.arange(6).reshape(3, 2)
    assert torch.equal(trainer.gather(rows), rows)
    assert torch.equal(trainer.gather(rows, padding_value=0), rows), "rows that equal the padding are kept"
    assert trainer.gather(torch.tensor(3.0)).item() == 3.0
    nested = trainer.gather({"a": rows, "b": (rows, [rows])})
    assert torch.equal(nested["b"][1][0], rows)
    assert not trainer.gather(torch.ones(2, requires_grad=True)).requires_grad


def test_the_loaders_of_a_run_can_be_asked_for_their_length_and_device():
    def look(trainer, **kwargs):
        train, evaluation = trainer._train_dataloader, trainer._eval_dataloader
        assert (len(train), len(evaluation), train.device) == (3, 2, trainer.device)
        assert trainer.train_loader is train
        return [batch[0].shape[0] for batch in evaluation]

    watch = toys.watch(on_training_run_start=look)
    trainer_of(callbacks=[watch]).train(pairs(10), 1, pairs(6), per_device_batch_size=4)
    assert watch.seen == [[4, 2]]


def test_a_hook_may_return_any_iterable_of_batches():
    x, y = pairs(8).tensors

    class Own(Trainer):
        def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
            return [(x[:4], y[:4]), (x[4:], y[4:])]

    trainer = trainer_of(cls=Own, lr=0.0)
    result = trainer.train(pairs(8), 2)
    assert result.updates == 4
    assert result.metrics["train_loss_epoch"] == pytest.approx(nn.functional.mse_loss(trainer.model(x), y).item())


def test_a_collate_function_makes_the_batches():
    def collate(samples):
        xs, ys = zip(*samples, strict=True)
        return torch.stack(xs), torch.stack(ys), "made here"

    def last(trainer, batch, **kwargs):
        return batch[2]

    watch = toys.watch(on_train_step_end=last, on_eval_step_end=last)
    trainer_of(callbacks=[watch]).train(pairs(4), 1, pairs(4), collate_fn=collate)
    assert watch.seen == ["made here"] * 2


def test_the_model_is_in_training_mode_while_training_and_in_evaluation_mode_while_evaluating():
    watch = toys.watch(
        on_train_step_start=lambda trainer, **kwargs: ("train", trainer.model.training),
        on_eval_step_start=lambda trainer, **kwargs: ("eval", trainer.model.training),
    )
    trainer = trainer_of(callbacks=[watch])
    trainer.model.eval()
    trainer.train(pairs(8), 2, pairs(4), per_device_batch_size=4, evaluate_every=1)
    assert watch.seen == [("train", True), ("eval", False), ("train", True), ("eval", False), ("eval", False)] * 2


# Precision and step modes


def test_a_bf16_run_computes_in_bf16_and_leaves_the_model_as_the_user_made_it():
    def dtypes(trainer, batch_output, **kwargs):
        return model.dtype, batch_output["model_outputs"].dtype

    model, watch = toys.WatchedLinear(4, 1), toys.watch(on_train_step_end=dtypes)
    trainer = trainer_of(model, [watch])
    result = trainer.train(pairs(32), 4, pairs(8), per_device_batch_size=4, mixed_precision="bf16")
    assert set(watch.seen) == {(torch.bfloat16, torch.float32)}
    losses = trainer.run_history.get_metric_values("train_loss_epoch")
    assert losses[-1] < losses[0]
    assert result.updates == 32
    assert trainer.run_config.mixed_precision == "bf16"

    assert trainer.model is model
    assert "forward" not in vars(model)
    assert model.weight.dtype == torch.float32
    model(torch.ones(1, 4))
    assert model.dtype == torch.float32


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_run_that_breaks_leaves_the_model_as_the_user_made_it_too(error):
    model = toys.WatchedLinear(4, 1)
    trainer = trainer_of(model, [toys.raising("on_train_step_end", error())])
    with pytest.raises(error):
        trainer.train(pairs(8), 1, mixed_precision="bf16")
    assert trainer.model is model
    assert "forward" not in vars(model)


ROWS = [{"x": torch.full((4,), float(index)), "labels": torch.ones(1)} for index in range(8)]


class Holding(nn.Module):
    """A model with a part of the name that distributed wrappers use for theirs."""

    class _Part(nn.Linear):
        def forward(self, x, labels=None):
            return super().forward(x)

    def __init__(self):
        super().__init__()
        self.module = self._Part(4, 1)

    def forward(self, x):
        return self.module(x)


@pytest.mark.parametrize(
    ("make_model", "kwargs"),
    [
        pytest.param(lambda: toys.WatchedLinear(4, 1), {}, id="plain"),
        pytest.param(lambda: toys.WatchedLinear(4, 1), {"mixed_precision": "bf16"}, id="bf16"),
        pytest.param(lambda: torch.compile(toys.WatchedLinear(4, 1), backend="eager"), {}, id="compiled"),
        pytest.param(Holding, {}, id="a part called module"),
    ],
)
def test_labels_go_to_the_model_only_if_it_takes_them(make_model, kwargs):
    result = trainer_of(make_model()).train(ROWS, 1, ROWS, **kwargs)
    assert result.updates == 1
    assert result.metrics.keys() == {"train_loss_epoch", "eval_loss_epoch"}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_a_compiled_run_gives_the_same_weights_and_leaves_the_model_uncompiled():
    trained = {}
    for step_mode in ("eager", "compile"):
        model = toys.network(8)
        watch = toys.watch(on_train_step_start=lambda trainer, **kwargs: isinstance(trainer.model.forward, partial))
        trainer = trainer_of(model, [watch])
        trainer.train(pairs(16), 2, pairs(8), per_device_batch_size=8, step_mode=step_mode, seed=1)
        assert watch.seen == [step_mode == "compile"] * 4
        assert "forward" not in vars(model)
        assert trainer.model is model
        trained[step_mode] = weights(model)
    torch.testing.assert_close(trained["compile"], trained["eager"])


# Schedulers that are stepped in other ways


def test_a_plateau_scheduler_is_stepped_after_each_epoch_with_its_evaluation_loss():
    stepped = []

    class Plateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
        def step(self, metrics, epoch=None):
            stepped.append(metrics)
            super().step(metrics, epoch)

    trainer = trainer_of(lr=1e-9)  # so that nothing improves
    schedule = partial(Plateau, patience=1, factor=0.1, eps=0)
    trainer.train(pairs(16), 5, pairs(8), per_device_batch_size=4, create_scheduler_fn=schedule)
    assert stepped == trainer.run_history.get_metric_values("eval_loss_epoch")
    # The first epoch is the best; the rate falls after every second one without improvement.
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(1e-11, rel=1e-6, abs=0)

    stepped.clear()
    trainer.train(pairs(16), 3, per_device_batch_size=4, create_scheduler_fn=Plateau)
    assert stepped == trainer.run_history.get_metric_values("train_loss_epoch"), "without an evaluation set"


class WithoutRate(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= 0.01 * parameter.grad


def test_an_optimizer_need_not_have_a_learning_rate(tmp_path):
    watch = toys.watch(on_log=lambda trainer, logs, **kwargs: sorted(logs))
    for num_epochs in (1, 2):  # the second goes on with the first
        model = toys.network()
        trainer = trainer_of(model, [watch], optimizer=WithoutRate(model.parameters()))
        result = trainer.train(pairs(8), num_epochs, checkpoints=Checkpointing(tmp_path), resume_from="auto")
        assert result.updates == num_epochs
    assert watch.seen == [["epoch", "loss", "update"]] * 2


@pytest.mark.parametrize("accumulation", [1, 2])
def test_torchs_schedulers_step_once_per_update(accumulation):
    trainer = trainer_of(lr=1.0)
    halving = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    options = {"gradient_accumulation_steps": accumulation, "create_scheduler_fn": halving}
    trainer.train(pairs(16), 2, per_device_batch_size=4, **options)
    updates = 8 // accumulation
    assert trainer.scheduler.last_epoch == updates
    assert trainer.optimizer.param_groups[0]["lr"] == 0.5**updates


def test_the_scheduler_hook_may_be_overridden_to_step_per_epoch():
    class PerEpoch(Trainer):
        def scheduler_step(self):
            pass

        def training_run_epoch_end(self):
            self.scheduler.step()

    trainer = trainer_of(cls=PerEpoch)
    trainer.train(pairs(16), 3, create_scheduler_fn=STEP_LR)
    assert trainer.scheduler.last_epoch == 3


class TimmShaped:
    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.calls = []

    def step_update(self, num_updates, metric=None):
        self.calls.append(("update", num_updates))

    def step(self, epoch, metric=None):
        self.calls.append(("epoch", epoch))


@pytest.mark.parametrize("eval_dataset", [None, pairs(4)], ids=["without evaluation", "with evaluation"])
def test_a_timm_scheduler_hears_of_every_update_and_every_epoch_and_may_be_left_out(eval_dataset):
    trainer = trainer_of(cls=TrainerWithTimmScheduler)
    assert trainer.num_updates is None
    for reset in (True, False):  # a later run has a scheduler of its own, which starts anew
        options = {"create_scheduler_fn": TimmShaped, "reset_run_history": reset}
        trainer.train(pairs(10), 2, eval_dataset, 4, gradient_accumulation_steps=2, **options)
        first, second = ([("update", 2 * epoch - 1), ("update", 2 * epoch), ("epoch", epoch)] for epoch in (1, 2))
        assert trainer.scheduler.calls == first + second
        assert trainer.num_updates == 4
    assert trainer_of(cls=TrainerWithTimmScheduler).train(pairs(8), 2).updates == 2


# Nothing is left behind


def test_stand_ins_of_a_users_own_tests_can_be_trained():
    """Mocks are not checked: only real modules, optimizers and datasets are."""

    class Stub(Trainer):
        def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
            return [torch.ones(2, 1)] * 3

        def calculate_train_batch_loss(self, batch):
            return {"loss": torch.ones((), requires_grad=True), "model_outputs": None, "batch_size": 2}

    optimizer = Mock(param_groups=[{"lr": 0.1}], step_was_skipped=False)
    trainer = Stub(Mock(), Mock(), optimizer, callbacks=())
    result = trainer.train(Mock(), 2, train_dataloader_kwargs=None)
    assert result.updates == optimizer.step.call_count == 6
    assert result.metrics["train_loss_epoch"] == 1.0


def test_a_run_that_the_user_prepares_with_accelerate_is_the_same_run(tmp_path):
    """Clipping, resuming and another precision included; afterwards the model is as the user made it."""
    outcomes = []
    for cls in (Trainer, OwnPreparation):
        torch.manual_seed(0)
        trainer = trainer_of(cls=cls)
        trainer.train(pairs(16), 2, pairs(8), seed=1, gradient_clip_value=0.01, gradient_clip_norm=0.02)
        trainer.save_training_state(tmp_path / cls.__name__)
        metrics = trainer.train(pairs(16), 3, pairs(8), resume_from=tmp_path / cls.__name__).metrics
        assert run_of(trainer).engine.accelerator is trainer._accelerator
        assert trainer.train(pairs(16), 1, mixed_precision="bf16").updates == 2
        assert (trainer.run_config.mixed_precision, trainer.model(torch.ones(1, 4)).dtype) == ("bf16", torch.float32)
        assert "forward" not in vars(trainer.model) and type(trainer.optimizer) is torch.optim.SGD
        outcomes.append((metrics, weights(trainer).tolist()))
    assert outcomes[0] == outcomes[1]


def test_a_training_epoch_may_be_all_the_users_own():
    """It is over when the override returns, and iterating the loader gives each epoch an order of its own."""

    class OwnEpoch(Trainer):
        def _run_train_epoch(self, train_dl):
            assert len(orders) < 9, "the run goes on for ever"
            self.train_epoch_start()
            orders.append([])
            for batch in train_dl:
                orders[-1] += batch[1].flatten().tolist()
                self.backward_step(self.calculate_train_batch_loss(batch)["loss"])
                self.optimizer_step()
                self.optimizer_zero_grad()
            self.run_history.update_metric("train_loss_epoch", 1.0)

    orders = []
    trainer = trainer_of(cls=OwnEpoch)
    before = weights(trainer)
    result = trainer.train(pairs(16), 3, pairs(8), per_device_batch_size=4, seed=1)
    assert (result.epochs, len(trainer.run_history.get_metric_values("eval_loss_epoch"))) == (3, 3)
    assert not torch.equal(weights(trainer), before)

    watch = toys.watch(on_train_step_end=lambda trainer, batch, **kwargs: batch[1].flatten().tolist())
    trainer_of(callbacks=[watch]).train(pairs(16), 3, per_device_batch_size=4, seed=1)
    assert sum(orders, []) == sum(watch.seen, [])
    assert orders[0] != orders[1] != orders[2]


def test_an_epoch_of_the_users_own_cannot_run_micro_batches_of_updates_that_are_ours():
    class OwnEpoch(Trainer):
        def _run_train_epoch(self, train_dl):
            for step, batch in enumerate(train_dl):
                self._perform_forward_and_backward_passes(batch, step)

    with pytest.raises(ConfigError, match="outside of an update, by an overridden epoch"):
        trainer_of(cls=OwnEpoch).train(pairs(8), 1)


def test_a_run_may_be_all_the_users_own_around_the_trainers_epochs():
    class OwnRun(Trainer):
        def _run_training(self):
            self.training_run_start()
            self.call_event("on_training_run_start")
            for _ in range(self.run_config.num_epochs):
                self._run_train_epoch(self._train_dataloader)
                self._run_eval_epoch(self._eval_dataloader)
                self.run_history._increment_epoch()
            self.training_run_end()

    outcomes = []
    for cls in (Trainer, OwnRun):
        torch.manual_seed(0)
        trainer = trainer_of(cls=cls)
        for _ in range(2):  # the second run begins anew
            result = trainer.train(pairs(16), 3, pairs(8), seed=1, gradient_clip_norm=1.0)
        outcomes.append((result.metrics, result.updates, weights(trainer).tolist()))
    assert outcomes[0] == outcomes[1]


def test_two_trainers_may_share_a_process_and_interleave():
    first, second = trainer_of(), trainer_of(toys.WatchedLinear(4, 1))
    first.train(pairs(8), 1)
    second.train(pairs(8), 1, mixed_precision="bf16")
    assert first.train(pairs(8), 1).updates == 1
    assert first.run_config.mixed_precision == "no"
    assert second.evaluate(pairs(8)).metrics["evaluation_loss"] > 0


def test_every_run_of_a_model_has_the_precision_that_it_asked_for():
    class Probe(nn.Linear):
        def forward(self, x):
            seen.append(torch.is_autocast_enabled("cpu"))
            return super().forward(x)

    model, seen = Probe(4, 1), []
    for _ in range(2):
        trainer = trainer_of(model)
        trainer.train(pairs(4), 1, pairs(4), mixed_precision="bf16")
        trainer.evaluate(pairs(4))
    assert seen == [True] * 6
    trainer.train(pairs(4), 1, mixed_precision="no")
    assert seen[6:] == [False]


def test_gradients_of_all_groups_are_dropped_in_the_optimizers_own_way_if_it_has_one():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.2}], 0.1)
    model(torch.ones(1, 2)).sum().backward()
    drop_gradients(optimizer)
    assert [parameter.grad for parameter in model.parameters()] == [None] * 4

    of_its_class = type("Own", (torch.optim.SGD,), {"zero_grad": Mock()})(model.parameters(), lr=0.1)
    optimizer.zero_grad = Mock()
    for each in (of_its_class, optimizer):
        drop_gradients(each)
        each.zero_grad.assert_called_once()


class Ranges(TorchDispatchMode):
    """Counts the profiler ranges that are entered."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "record_function_enter" in str(func)
        return func(*args, **(kwargs or {}))


def test_a_step_has_a_profiler_range_under_a_profiler_and_its_hooks_and_patches_always(monkeypatch):
    class Own(torch.optim.SGD):
        def step(self, closure=None):
            called.append("own")
            return super().step(closure)

    called, weight = [], nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)

    def ranges(optimizer) -> int:
        with Ranges() as entered:
            apply_gradients(optimizer)
        return entered.count

    optimizer = torch.optim.SGD([weight], lr=0.25)
    assert ranges(optimizer) == 0 and weight.item() == 0.75
    with torch.profiler.profile() as profiler:
        apply_gradients(optimizer)
    assert "Optimizer.step#SGD.step" in {event.key for event in profiler.key_averages()} and weight.item() == 0.5
    for register in (
        optimizer.register_step_pre_hook,
        optimizer.register_step_post_hook,
        register_optimizer_step_pre_hook,
        register_optimizer_step_post_hook,
    ):
        hook = register(lambda *args: called.append("hook"))
        assert ranges(optimizer) == 1
        hook.remove()
    assert called == ["hook"] * 4 and ranges(optimizer) == 0

    called.clear()
    apply_gradients(Own([weight], lr=0.0)), apply_gradients(Mock(step=lambda: called.append("mock")))
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)  # patches the step of its optimizer to watch the order
    assert ranges(optimizer) == 1 and optimizer._opt_called
    schedule.step()
    patched, original = torch.optim.SGD([weight], lr=0.0), torch.optim.SGD.step
    wrapper = functools.wraps(original)(lambda *args: called.append("class") or original(*args))
    monkeypatch.setattr(torch.optim.SGD, "step", wrapper)
    apply_gradients(patched)
    assert called == ["own", "mock", "class"]


@pytest.mark.parametrize("use", ["train", "evaluate", "find_lr", "checkpoints"])
def test_a_trainer_and_its_model_are_freed_without_the_garbage_collector(use, tmp_path) -> None:
    """`del trainer` has to give the memory of a GPU back at once: a run and its parts hold their owners weakly."""

    def used() -> list:
        trainer = trainer_of()
        if use == "evaluate":
            trainer.evaluate(pairs(8))
        elif use == "find_lr":
            trainer.find_lr(pairs(8), num_updates=3)
        else:
            trainer.train(pairs(8), 1, pairs(8), checkpoints=Checkpointing(tmp_path) if use == "checkpoints" else None)
        return [weakref.ref(trainer), weakref.ref(trainer.model), weakref.ref(run_of(trainer))]

    used_before = used()  # libraries make their own cycles when they are first used
    gc.collect()
    assert [one() for one in used_before] == [None] * 3
    gc.disable()
    try:
        if use == "checkpoints":
            shutil.rmtree(tmp_path)
        assert [one() for one in used()] == [None] * 3
    finally:
        gc.enable()


@pytest.mark.parametrize("has_trained", [False, True])
@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, lambda trainer: pickle.loads(pickle.dumps(trainer))])
def test_a_copy_of_a_trainer_trains_its_own_model(make, has_trained) -> None:
    trainer = trainer_of()
    if has_trained:
        trainer.train(pairs(8), 2, seed=3)
    copied = make(trainer)
    assert (copied.progress.update, copied.seed) == (trainer.progress.update, trainer.seed)
    copied.model = nn.Linear(4, 1)
    copied.optimizer = torch.optim.SGD(copied.model.parameters(), 0.1)
    ours, theirs = weights(copied), weights(trainer)
    assert copied.train(pairs(16), 1).updates == 2
    assert not torch.equal(weights(copied), ours) and torch.equal(weights(trainer), theirs)
    assert run_of(copied) is not run_of(trainer) and run_of(copied).trainer is copied
    assert trainer.progress.update == (2 if has_trained else 0)


def test_a_state_saved_after_an_evaluation_keeps_the_metrics_of_the_run(tmp_path) -> None:
    policy = Checkpointing(tmp_path / "run", every_updates=1)
    trainer = trainer_of()
    trainer.train(pairs(16), 1, pairs(8), checkpoints=policy)
    trainer.evaluate(pairs(8))
    trainer.save_training_state(tmp_path / "state")
    before = toys.records(tmp_path / "run", "log")
    result = trainer_of().train(pairs(16), 2, pairs(8), resume_from=tmp_path / "state", checkpoints=policy)
    after = toys.records(tmp_path / "run", "log")
    assert result.updates == 4 and before and after[: len(before)] == before


def test_any_accelerator_may_be_assigned_between_runs() -> None:
    trainer = trainer_of()
    for accelerator in (None, Mock()):
        trainer._accelerator = accelerator
        assert trainer._accelerator is accelerator
        assert trainer.train(pairs(8), 1).updates == 1
