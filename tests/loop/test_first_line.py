"""Errors of somebody's first line: they name the right argument, or what is wrong with the data."""

import functools
import re
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

import toys
from loopwright import Trainer
from loopwright.callbacks import EarlyStoppingCallback, SaveBestModelCallback
from loopwright.errors import BatchLossError, ConfigError, ConfigTypeError

ROWS = toys.labelled(12)
X, Y = ROWS.tensors


def trainer_of(loss=None, optimizer=None, width=3, **options):
    model = nn.Linear(4, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer
    return Trainer(model, loss or nn.CrossEntropyLoss(), optimizer, callbacks=(), **options)


NAMES = {
    "epochs": "num_epochs",
    "num_epoch": "num_epochs",
    "batch_size": "per_device_batch_size",
    "val_dataset": "eval_dataset",
    "max_grad_norm": "gradient_clip_norm",
    "eval_data": "eval_dataset",
    "eval_steps": "evaluate_every",
    "grad_accum": "gradient_accumulation_steps",
    "clip_grad": "gradient_clip_norm",
    "save_dir": "checkpoints",
    "foo": None,
}


@pytest.mark.parametrize("given", NAMES)
def test_a_wrong_argument_of_train_is_named_with_the_right_one(given):
    with pytest.raises(ConfigTypeError) as caught:
        trainer_of().train(ROWS, **{"num_epochs": 1, given: 3})
    assert (caught.value.given, caught.value.nearest) == (given, NAMES[given])
    assert isinstance(caught.value, TypeError) and given in str(caught.value)


def test_arguments_of_something_else_are_sent_there():
    with pytest.raises(ConfigTypeError, match="optimizer"):
        trainer_of().train(ROWS, 1, lr=0.1)
    with pytest.raises(ConfigTypeError, match=r"num_epochs= to train"):
        trainer_of(epochs=3)
    with pytest.raises(ConfigTypeError) as caught:
        Trainer(nn.Linear(1, 1), loss=1, optimizer=2)
    assert caught.value.nearest == "loss_func"
    with pytest.raises(ConfigTypeError, match="num_epochs"):
        trainer_of().train(ROWS)
    with pytest.raises(ConfigTypeError) as caught:
        trainer_of().evaluate(ROWS, batch_size=2)
    assert caught.value.nearest == "per_device_batch_size"


CALLBACKS = {
    "patience": (EarlyStoppingCallback, "early_stopping_patience"),
    "monitor": (EarlyStoppingCallback, "watch_metric"),
    "path": (SaveBestModelCallback, "save_path"),
    "watch_metrics": (SaveBestModelCallback, "watch_metric"),
}


@pytest.mark.parametrize("given", CALLBACKS)
def test_a_wrong_argument_of_a_callback_is_named_with_the_right_one(given):
    kind, right = CALLBACKS[given]
    with pytest.raises(ConfigTypeError, match=kind.__name__) as caught:
        kind(**{given: 3})
    assert (caught.value.given, caught.value.nearest) == (given, right)


def test_a_type_error_of_the_users_own_code_stays_as_it_is():
    class Own(Trainer):
        def calculate_train_batch_loss(self, batch):
            return len(3)

    model = nn.Linear(4, 3)
    with pytest.raises(TypeError, match="has no len") as caught:
        Own(model, None, torch.optim.SGD(model.parameters(), lr=0.1), ()).train(ROWS, 1)
    assert not isinstance(caught.value, ConfigTypeError)


def test_swapped_arguments_are_named_when_the_trainer_is_made():
    model, loss = nn.Linear(4, 3), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for order in (
        (loss, model, optimizer),
        (model, optimizer, loss),
        (optimizer, model, loss),
        (loss, model, model),
        (model, optimizer, None),
    ):
        with pytest.raises(ConfigTypeError, match=r"Trainer\(model, loss_func, optimizer\)"):
            Trainer(*order)


MADE = {
    "class": torch.optim.SGD,
    "function": lambda parameters: None,
    "partial": functools.partial(torch.optim.SGD, lr=0.1),
    "text": "adam",
    "parameters": nn.Linear(1, 1).parameters(),
}


@pytest.mark.parametrize("kind", MADE)
def test_what_is_no_optimizer_is_refused_before_the_run(kind):
    with pytest.raises(ConfigTypeError, match=r"model.parameters\(\)"):
        trainer_of(optimizer=MADE[kind]).train(ROWS, 1)


DATA = {
    "pair": ((X, Y), ConfigTypeError, "TensorDataset"),
    "inputs": (X, BatchLossError, "TensorDataset"),
    "no_target": (TensorDataset(X), BatchLossError, "TensorDataset"),
    "none": (None, ConfigTypeError, "train_dataset"),
    "frame": (type("DataFrame", (list,), {})([1, 2]), ConfigTypeError, "DataFrame.*TensorDataset"),
    "dict": ({"x": X, "y": Y}, ConfigTypeError, "dict.*TensorDataset"),
    "path": ("train.csv", ConfigTypeError, "str.*TensorDataset"),
    "generator": ((row for row in ROWS), ConfigTypeError, "generator.*IterableDataset"),
    "class": (TensorDataset, ConfigTypeError, "a class.*an instance"),
    "float": (TensorDataset(X, Y.float()), BatchLossError, r"float32.*targets.long\(\)"),
    "int32": (TensorDataset(X, Y.int()), BatchLossError, r"int32.*targets.long\(\)"),
    "column": (TensorDataset(X, Y[:, None]), BatchLossError, r"squeeze\(1\)"),
    "above": (TensorDataset(X, Y + 5), BatchLossError, r"out of range: the model has 3 outputs, for classes 0 to 2"),
    "below": (TensorDataset(X, Y - 5), BatchLossError, "out of range"),
}


@pytest.mark.parametrize("kind", DATA)
def test_data_that_cannot_work_is_explained(kind):
    data, error, text = DATA[kind]
    with pytest.raises(error, match=text):
        trainer_of().train(data, 1)


def test_arguments_that_a_ready_loader_does_not_use_are_named_once(capsys):
    loader = DataLoader(ROWS, batch_size=4)
    trainer_of().train(loader, 2, loader, 4, eval_dataloader_kwargs={"num_workers": 1}, collate_fn=default_collate)
    notes = re.findall(r"(\w+) is a ready DataLoader, which does not use (.*?)\.", capsys.readouterr().out)
    assert notes == [("train_dataset", "collate_fn"), ("eval_dataset", "eval_dataloader_kwargs, collate_fn")]
    trainer_of().train(loader, 1, per_device_batch_size=5)
    assert "does not use per_device_batch_size." in capsys.readouterr().out
    trainer_of().train(loader, 1)
    assert "does not use" not in capsys.readouterr().out


def test_wrong_arguments_of_a_loader_are_named_before_the_run():
    with pytest.raises(ConfigTypeError) as caught:
        trainer_of().train(ROWS, 1, train_dataloader_kwargs={"num_worker": 1})
    assert (caught.value.given, caught.value.nearest) == ("num_worker", "num_workers")
    with pytest.raises(ConfigTypeError, match="eval_dataloader_kwargs must be a dict"):
        trainer_of().train(ROWS, 1, ROWS, eval_dataloader_kwargs=4)


def test_numbers_losses_and_shapes_that_cannot_work_are_explained():
    for epochs in ("3", 2.5, Y):
        with pytest.raises(ConfigError, match="num_epochs"):
            trainer_of().train(ROWS, epochs)
    with pytest.raises(ConfigError, match=r"num_epochs=\.\.\., eval_dataset="):
        trainer_of().train(ROWS, ROWS, 3)
    with pytest.raises(ConfigTypeError, match="seed"):
        trainer_of().train(ROWS, 1, seed="a")
    with pytest.raises(ConfigTypeError, match="model is a function"):
        Trainer(lambda x: x, nn.MSELoss(), torch.optim.SGD(nn.Linear(1, 1).parameters())).train(ROWS, 1)
    with pytest.raises(BatchLossError, match="cannot be called"):
        trainer_of(loss="mse").train(ROWS, 1)
    with pytest.raises(BatchLossError, match="equal shapes"):
        trainer_of(nn.BCEWithLogitsLoss(), width=1).train(TensorDataset(X, (Y > 1).float()), 1)
    with pytest.raises(BatchLossError, match=r"targets.float\(\)"):
        trainer_of(nn.BCEWithLogitsLoss(), width=1).train(TensorDataset(X, (Y > 1).long()[:, None]), 1)


def squares(outputs, targets):
    return ((outputs - targets) ** 2).mean()


ELEMENTWISE = [nn.MSELoss(), nn.L1Loss(), nn.SmoothL1Loss(), nn.HuberLoss(), nn.BCEWithLogitsLoss()]
SHAPED = {(-1, 1): (Y.float(), r"\(-1, 1\)"), (-1,): (Y.float()[:, None], r"\(-1\)")}


@pytest.mark.parametrize(
    "loss", [*ELEMENTWISE, nn.functional.mse_loss], ids=lambda loss: getattr(loss, "__name__", repr(loss))
)
@pytest.mark.parametrize("shape", SHAPED)
def test_shapes_that_would_be_broadcast_are_an_error_with_the_fix(loss, shape):
    targets, fix = SHAPED[shape]
    model = nn.Sequential(nn.Linear(4, 1), nn.Flatten(1 - len(shape) if len(shape) == 1 else 1))
    trainer = Trainer(model, loss, torch.optim.SGD(model.parameters()), callbacks=())
    with pytest.raises(BatchLossError, match=rf"the shape \(8,.*targets \(8,.*targets.reshape{fix}"):
        trainer.train(TensorDataset(X, targets), 1)


def test_a_function_that_broadcasts_gets_a_note_and_one_that_reshapes_gets_none(capsys):
    data = TensorDataset(X, Y.float())
    trainer_of(squares, width=1).train(data, 2, data)
    assert capsys.readouterr().out.count("squares needs equal shapes. Pass targets.reshape(-1, 1).") == 1
    for fine in (lambda o, t: squares(o.squeeze(1), t), lambda o, t: squares(o[:, 0], t), lambda o, t: o.mean()):
        trainer_of(fine, width=1).train(data, 1)
        assert "equal shapes" not in capsys.readouterr().out


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python has notes from 3.11 on")
def test_an_error_of_the_model_in_the_first_batch_keeps_its_type_and_gets_the_batch():
    for x, kind in ((X.double(), "torch.float64"), (X[:, :3], r"torch.float32 \(8, 3\)")):
        with pytest.raises(RuntimeError) as caught:
            trainer_of().train(TensorDataset(x, Y), 1)
        (note,) = caught.value.__notes__
        assert re.search(rf"holds {kind}.*torch.int64 \(8,\).*parameters are torch.float32", note)


def test_samples_that_are_not_finite_are_named(capsys):
    x = X.clone()
    x[7, 2] = torch.nan
    result = trainer_of().train(TensorDataset(x, Y), 1, per_device_batch_size=6)
    assert result.stop_reason is not None
    assert "nan or infinite: sample 7\n" in capsys.readouterr().out


def test_entries_of_a_batch_that_the_model_does_not_take_are_left_out_with_one_note(capsys):
    rows = [{"features": x, "labels": y, "id": index, "weight": 1.0} for index, (x, y) in enumerate(ROWS)]
    model = toys.net(lambda self, features: self.layer(features), layer=nn.Linear(4, 3))
    trainer = Trainer(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks=())
    assert trainer.train(rows, 2, rows, per_device_batch_size=4).epochs == 2
    out = capsys.readouterr().out
    assert out.count("does not take them: id, weight\n") == 1
    assert trainer.predict(rows).outputs.shape == (12, 3)
    with pytest.raises(BatchLossError, match="takes features, but the batch has id"):
        trainer.evaluate([{"id": 1, "labels": row["labels"]} for row in rows])
