"""Model and optimizer state by name, whatever the order; and the files of `save_checkpoint`, which hold both."""

import copy
import resource
from collections import deque
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import StepLR

import toys
from loopwright import Trainer
from loopwright.checkpoint.state_by_name import fitted_state, optimizer_state, parameter_names, untied
from loopwright.errors import CheckpointError, ConfigError
from toys import assert_same_weights


def net(**more):
    parts = {"inner": nn.Linear(4, 3), "outer": nn.Linear(3, 1), **more}
    return toys.net(lambda self, x: self.outer(torch.tanh(self.inner(x))), **parts)


def names(model, **others):
    return parameter_names(model=model, **others)


def stepped(model, optimizer, steps=2):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).pow(2).mean().backward()
        optimizer.step()
    return optimizer


# Names


def test_the_first_module_has_plain_names_and_the_others_a_prefix_and_each_parameter_has_one():
    model, loss = net(), nn.Bilinear(1, 1, 1)
    found = names(model, loss_func=loss)
    expected = {f"{layer}.{kind}" for layer in ("inner", "outer") for kind in ("weight", "bias")}
    assert set(found.values()) == expected | {"loss_func.weight", "loss_func.bias"}
    assert found[id(model.inner.weight)] == "inner.weight" and found[id(loss.weight)] == "loss_func.weight"
    assert names(None, loss_func=nn.functional.mse_loss) == {}
    assert len(names(model, loss_func=model.inner)) == 4


def test_tied_tensors_are_told_from_equal_ones():
    shared = torch.ones(2, 2)
    kept, tied = untied({"a": shared, "b": shared.clone(), "c": shared, "d": shared.view(4), "e": shared.t()})
    assert list(kept) == ["a", "b", "d", "e"] and tied == {"c": "a"}
    kept, tied = untied({"a": torch.zeros(0), "b": torch.zeros(0)})
    assert list(kept) == ["a", "b"] and tied == {}


# Optimizers


@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
        partial(torch.optim.Adam, lr=0.01, amsgrad=True),
        partial(torch.optim.AdamW, lr=0.01, betas=(0.8, 0.99)),
        partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
        partial(torch.optim.Adagrad, lr=0.01),
        partial(torch.optim.NAdam, lr=0.01),
    ],
    ids=lambda make: make.func.__name__,
)
def test_the_state_goes_by_name_whatever_the_order_and_grouping_of_the_parameters(make):
    torch.manual_seed(3)
    first = net()
    saved = copy.deepcopy(optimizer_state(stepped(first, make(first.parameters())), names(first)))
    assert set(saved["state"]) == set(names(first).values())
    assert saved["param_groups"][0]["params"] == ["inner.weight", "inner.bias", "outer.weight", "outer.bias"]

    second = net()
    second.load_state_dict(first.state_dict())
    groups = [
        {"params": [second.outer.bias, second.inner.weight], "lr": 123.0},
        {"params": [second.inner.bias, second.outer.weight], "lr": 456.0},
    ]
    other = make(groups)
    other.load_state_dict(fitted_state(other, copy.deepcopy(saved), names(second)))
    assert [group["lr"] for group in other.param_groups] == [saved["param_groups"][0]["lr"]] * 2

    # Both go on exactly alike.
    third = net()
    third.load_state_dict(first.state_dict())
    plain = make(third.parameters())
    plain.load_state_dict(fitted_state(plain, saved, names(third)))
    for model, optimizer in ((second, other), (third, plain)):
        torch.manual_seed(4)
        stepped(model, optimizer, steps=3)
    assert_same_weights(second, third)


def test_each_group_gets_the_options_that_its_parameters_had_which_must_not_differ():
    first, second = net(), net()
    groups = [{"params": first.inner.parameters(), "lr": 0.5}, {"params": first.outer.parameters(), "lr": 0.25}]
    saved = optimizer_state(torch.optim.SGD(groups, lr=1.0, momentum=0.9), names(first))
    swapped = [{"params": second.outer.parameters()}, {"params": second.inner.parameters()}]
    optimizer = torch.optim.SGD(swapped, lr=1.0)
    optimizer.load_state_dict(fitted_state(optimizer, copy.deepcopy(saved), names(second)))
    assert [(group["lr"], group["momentum"]) for group in optimizer.param_groups] == [(0.25, 0.9), (0.5, 0.9)]
    with pytest.raises(CheckpointError, match=r"'inner\.weight'.* into one group, but .* with different options"):
        fitted_state(torch.optim.SGD(second.parameters(), lr=0.1), saved, names(second))


def test_an_optimizer_over_named_parameters_keeps_the_names_of_its_own_groups():
    first = net()
    saved = optimizer_state(torch.optim.SGD(first.named_parameters(), lr=0.5), names(first))
    second = net()
    optimizer = torch.optim.SGD([*second.outer.named_parameters(), *second.inner.named_parameters()], lr=0.1)
    expected = list(optimizer.param_groups[0]["param_names"])
    optimizer.load_state_dict(fitted_state(optimizer, saved, names(second)))
    assert optimizer.param_groups[0]["param_names"] == expected
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_an_optimizer_that_has_not_stepped_has_options_only():
    model = net()
    saved = optimizer_state(torch.optim.Adam(model.parameters(), lr=0.5), names(model))
    assert saved["state"] == {}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer.load_state_dict(fitted_state(optimizer, saved, names(model)))
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_parameters_without_a_name_go_by_their_number():
    model, loose = net(), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*model.parameters(), loose], lr=0.1)
    saved = optimizer_state(optimizer, names(model))
    assert saved["param_groups"][0]["params"][-1] == "unnamed.4"
    optimizer.load_state_dict(fitted_state(optimizer, saved, names(model)))
    with pytest.raises(CheckpointError, match="unnamed.4"):
        fitted_state(torch.optim.SGD(model.parameters(), lr=0.1), saved, names(model))


def test_other_parameters_than_those_saved_are_refused_by_name():
    model = net()
    everything = torch.optim.SGD(model.parameters(), lr=0.1)
    head = torch.optim.SGD(model.outer.parameters(), lr=0.1)
    with pytest.raises(
        CheckpointError, match=r"(?s)not saved: none.*in the optimizer: \['inner.bias', 'inner.weight'\]"
    ):
        head.load_state_dict(fitted_state(head, optimizer_state(everything, names(model)), names(model)))
    with pytest.raises(CheckpointError, match=r"(?s)not saved: \['inner.weight', 'inner.bias'\].*none"):
        everything.load_state_dict(fitted_state(everything, optimizer_state(head, names(model)), names(model)))
    assert everything.param_groups[0]["lr"] == 0.1


# The files of save_checkpoint


def trained(**kwargs):
    schedule = partial(StepLR, step_size=2, gamma=0.5)
    return toys.trained(model=net(), cls=Trainer, create_scheduler_fn=schedule, **kwargs)


def fresh(model=None):
    return toys.trainer_of(model=model or net(), cls=Trainer)


def test_the_file_is_a_dict_with_the_documented_keys(tmp_path):
    trainer = trained()
    trainer.save_checkpoint(tmp_path / "deep" / "all.pt", checkpoint_kwargs={"epoch": 3, "note": "hello"})
    saved = torch.load(tmp_path / "deep" / "all.pt", weights_only=True)
    documented = {"model_state_dict", "optimizer_state_dict", "scheduler_state_dict"}
    assert set(saved) == documented | {"epoch", "note"}
    assert set(saved["model_state_dict"]) == {"inner.weight", "inner.bias", "outer.weight", "outer.bias"}
    assert saved["scheduler_state_dict"]["last_epoch"] == 4

    trainer.save_checkpoint(tmp_path / "weights.pt", save_optimizer=False, save_scheduler=False, save_per_node=False)
    assert set(torch.load(tmp_path / "weights.pt", weights_only=True)) == {"model_state_dict"}


@pytest.mark.parametrize("name", ["all.pt", "best"])  # a name needs no suffix
def test_what_was_saved_is_loaded_and_returned(name, tmp_path):
    trainer = trained()
    trainer.save_checkpoint(tmp_path / name, {"note": "hello"})
    assert toys.names_in(tmp_path) == {name}
    other = fresh()
    found = other.load_checkpoint(tmp_path / name)
    assert found["note"] == "hello"
    assert_same_weights(trainer, other)
    assert other.optimizer.param_groups[0]["lr"] == trainer.optimizer.param_groups[0]["lr"] == 0.0125
    toys.assert_same(other.optimizer.state_dict()["state"], trainer.optimizer.state_dict()["state"])


def test_optimizer_and_scheduler_are_left_alone_when_asked_and_a_missing_optimizer_is_an_error(tmp_path):
    trainer = trained()
    trainer.save_checkpoint(tmp_path / "all.pt")
    other = trained()
    other.optimizer.param_groups[0]["lr"] = 7.0
    other.scheduler.last_epoch = 77
    other.load_checkpoint(tmp_path / "all.pt", load_optimizer=False, load_scheduler=False)
    assert_same_weights(trainer, other)
    assert other.optimizer.param_groups[0]["lr"] == 7.0 and other.scheduler.last_epoch == 77
    other.load_checkpoint(tmp_path / "all.pt")
    assert other.optimizer.param_groups[0]["lr"] == 0.0125 and other.scheduler.last_epoch == 4
    other = Trainer(net(), nn.MSELoss(), None, callbacks=())
    with pytest.raises(ConfigError, match=r"no optimizer\. Pass one, or load_optimizer=False"):
        other.load_checkpoint(tmp_path / "all.pt")
    other.load_checkpoint(tmp_path / "all.pt", load_optimizer=False)
    assert_same_weights(other, trainer)


def test_values_that_the_safe_loader_refuses_are_made_plain(tmp_path):
    extras = {
        "scalar": (np.float64(0.5), 0.5),
        "count": (np.int64(3), 3),
        "flag": (np.bool_(True), True),
        "array": (np.arange(3), torch.arange(3)),
        "zero_dim": (np.array(2.0), torch.tensor(2.0, dtype=torch.float64)),
        "path": (Path("a") / "b", "a/b"),
        "queue": (deque([1, np.int64(2)]), [1, 2]),
        "nested": ({"pair": (np.float32(1.5), [Path("c"), None])}, {"pair": (1.5, ["c", None])}),
        "epoch": (4, 4),
    }
    fresh().save_checkpoint(tmp_path / "x.pt", {name: given for name, (given, _) in extras.items()})
    found = fresh().load_checkpoint(tmp_path / "x.pt")
    toys.assert_same({name: found[name] for name in extras}, {name: plain for name, (_, plain) in extras.items()})


def test_a_failed_save_leaves_the_older_file(tmp_path, monkeypatch):
    trainer = trained()
    trainer.save_checkpoint(tmp_path / "x.pt")
    before = (tmp_path / "x.pt").read_bytes()

    def fail(*args, **kwargs):
        Path(args[1]).write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="no space left"):
        trainer.save_checkpoint(tmp_path / "x.pt")
    assert (tmp_path / "x.pt").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["x.pt"]


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_a_file_that_grows_too_large_for_the_disk_is_an_error_of_the_system_that_names_it(name, tmp_path):
    trainer = trained()
    trainer.save_checkpoint(tmp_path / name)
    before = (tmp_path / name).read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # Python ignores the signal that comes with it
    try:
        with pytest.raises(OSError, match="maybe the disk is full") as error:
            trainer.save_checkpoint(tmp_path / name)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error.value.filename == str(tmp_path / name)
    assert (tmp_path / name).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_file_that_is_not_there_is_an_error_that_names_it(tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no checkpoint file .*nowhere\.pt"):
        fresh().load_checkpoint(tmp_path / "nowhere.pt")


def test_a_file_that_would_run_code_is_not_loaded(tmp_path):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "touched",))

    torch.save({"model_state_dict": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(Exception, match=r"(?i)weights.only"):
        fresh().load_checkpoint(tmp_path / "evil.pt")
    assert not (tmp_path / "touched").exists()


def test_a_safetensors_path_gets_the_weights_alone(tmp_path):
    trainer = trained()
    trainer.save_checkpoint(tmp_path / "x.safetensors", {"note": "hello", "epoch": 3})
    assert set(load_file(tmp_path / "x.safetensors")) == set(trainer.model.state_dict())
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "note": "hello", "epoch": "3"}
    other = fresh()
    found = other.load_checkpoint(tmp_path / "x.safetensors")
    assert set(found) == {"model_state_dict"}
    assert_same_weights(trainer, other)


def tied():
    model = net(copy=nn.Linear(4, 3))
    model.copy.weight = model.inner.weight
    return model


def test_tied_weights_are_one_tensor_in_a_safetensors_file_and_stay_tied(tmp_path):
    trainer = fresh(tied())
    for name in ("x.pt", "x.safetensors"):
        trainer.save_checkpoint(tmp_path / name)
        other = fresh(tied())
        other.load_checkpoint(tmp_path / name)
        assert_same_weights(trainer, other)
        assert other.model.copy.weight is other.model.inner.weight
    assert set(load_file(tmp_path / "x.safetensors")) == set(trainer.model.state_dict()) - {"copy.weight"}


def test_a_safetensors_file_of_another_model_is_refused_by_name_before_anything_is_touched(tmp_path):
    fresh(tied()).save_checkpoint(tmp_path / "tied.safetensors")
    plain = fresh()
    plain.save_checkpoint(tmp_path / "plain.safetensors")
    before = toys.state_of(plain)
    with pytest.raises(CheckpointError, match=r"of another model\. copy\.bias: \(3,\) saved, absent in the model"):
        plain.load_checkpoint(tmp_path / "tied.safetensors")
    toys.assert_same(toys.state_of(plain), before)
    with pytest.raises(CheckpointError, match=r"of another model\. copy\.bias: absent saved, \(3,\) in the model"):
        fresh(tied()).load_checkpoint(tmp_path / "plain.safetensors")


# Training states of one trainer


def test_loading_a_training_state_restores_the_model_and_not_the_run(tmp_path):
    trainer = trained()
    trainer.save_training_state(tmp_path / "state", {"note": "hello"})
    other = trained(num_epochs=3)
    losses = list(other.run_history.get_metric_values("train_loss_epoch"))
    metadata = other.load_training_state(tmp_path / "state")
    assert metadata == {"current_epoch": 2, "note": "hello"}
    assert_same_weights(other, trainer)
    assert other.scheduler.last_epoch == 4 and other.optimizer.param_groups[0]["lr"] == 0.0125
    assert other.run_history.get_metric_values("train_loss_epoch") == losses
    assert other.run_history.current_epoch == 4
    assert other.progress.update == 12


def test_tied_weights_of_a_training_state_stay_tied(tmp_path):
    trainer = toys.trained((), toys.data(8), model=tied(), cls=Trainer)
    trainer.save_training_state(tmp_path / "state")
    assert "copy.weight" not in load_file(tmp_path / "state" / "model.safetensors")
    other = toys.trained((), toys.data(8), model=tied(), cls=Trainer, num_epochs=1, resume_from=tmp_path / "state")
    assert other.model.copy.weight is other.model.inner.weight
    assert_same_weights(trainer, other)
