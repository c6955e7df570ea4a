"""The run config: its fields, reading by name, and a dict that is apart from the run."""

import copy
from dataclasses import FrozenInstanceError, fields

import pytest
import torch
from torch.utils.data import RandomSampler

from loopwright.run_config import TrainerRunConfig

VALUES = {
    "num_epochs": 2,
    "train_per_device_batch_size": 8,
    "train_dl_kwargs": {"batch_size": 8, "shuffle": True, "prefetch": [1, 2]},
    "eval_per_device_batch_size": 16,
    "eval_dl_kwargs": {"batch_size": 16},
    "gradient_accumulation_steps": 4,
    "gradient_clip_value": None,
    "train_total_batch_size": 32,
    "eval_total_batch_size": 16,
    "num_update_steps_per_epoch": 5,
    "num_local_update_steps_per_epoch": 5,
    "max_num_train_steps": 11,
    "is_local_process_zero": True,
    "is_world_process_zero": True,
    "is_distributed": False,
    "mixed_precision": "no",
    "num_processes": 1,
}


class RefusesToBeCopied:
    """Stands for a lock, a socket or a compiled object in a loader's arguments."""

    def __init__(self, error):
        self.error = error

    def __deepcopy__(self, memo):
        raise self.error


def create_run_config(**changes):
    return TrainerRunConfig(**{**copy.deepcopy(VALUES), **changes})


def test_the_fields_have_the_documented_order_none_has_a_default_and_none_can_be_changed():
    assert [field.name for field in fields(TrainerRunConfig)] == list(VALUES)
    assert TrainerRunConfig(*VALUES.values()) == create_run_config()
    with pytest.raises(TypeError, match="num_processes"):
        TrainerRunConfig(*list(VALUES.values())[:-1])
    with pytest.raises(FrozenInstanceError):
        create_run_config().num_epochs = 3


def test_every_field_can_be_read_and_looked_for_by_name():
    run_config = create_run_config()
    assert {name: run_config[name] for name in run_config} == VALUES
    assert run_config["train_dl_kwargs"] is run_config.train_dl_kwargs
    assert "num_epochs" in run_config and "learning_rate" not in run_config


def test_an_unknown_name_or_a_method_is_a_key_error_with_the_nearest_name():
    with pytest.raises(KeyError, match="num_epoch'.*'num_epochs'"):
        create_run_config()["num_epoch"]
    with pytest.raises(KeyError, match="nearest name|its names are"):
        create_run_config()[0]
    with pytest.raises(KeyError, match="to_dict"):
        create_run_config()["to_dict"]


def test_the_dict_holds_every_field_in_order():
    as_dict = create_run_config().to_dict()
    assert list(as_dict.items()) == list(VALUES.items())


@pytest.mark.parametrize("missing", [["eval_dl_kwargs"], ["train_dl_kwargs"], ["train_dl_kwargs", "eval_dl_kwargs"]])
def test_the_dict_can_be_made_without_loaders(missing):
    as_dict = create_run_config(**dict.fromkeys(missing)).to_dict()
    assert all(as_dict[name] is None for name in missing)
    assert as_dict["num_epochs"] == 2


def test_changing_the_dict_does_not_change_the_run():
    run_config = create_run_config()
    as_dict = run_config.to_dict()
    as_dict["train_dl_kwargs"]["prefetch"].append(3)
    as_dict["eval_dl_kwargs"].clear()
    assert run_config == create_run_config()


@pytest.mark.parametrize("name", ["sampler", "batch_sampler"])
def test_samplers_are_kept_by_reference_and_stay_in_the_live_config(name):
    sampler = RandomSampler(range(10), generator=torch.Generator())
    run_config = create_run_config(train_dl_kwargs={name: sampler}, eval_dl_kwargs={name: sampler})
    for kwargs in ("train_dl_kwargs", "eval_dl_kwargs"):
        assert run_config.to_dict()[kwargs][name] is sampler
        assert run_config[kwargs] == {name: sampler}


@pytest.mark.parametrize("error", [TypeError("cannot pickle"), RuntimeError("not a leaf"), NotImplementedError()])
def test_what_cannot_be_copied_is_kept_by_reference(error):
    stubborn = RefusesToBeCopied(error)
    as_dict = create_run_config(train_dl_kwargs={"worker": stubborn, "other": [1]}).to_dict()
    assert as_dict["train_dl_kwargs"] == {"worker": stubborn, "other": [1]}
