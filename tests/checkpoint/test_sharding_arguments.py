"""What `sharding=` and hf's `fsdp` may ask for, and what is refused before anything is done."""

import pytest
import torch
from torch import nn

import toys
from loopwright import Trainer
from loopwright.engine.sharding import Sharding, copy_model, is_sharded, load_weights, local, whole, whole_model
from loopwright.errors import ConfigError

ASKED = {
    "nothing": (None, None, None),
    "false": (False, None, None),
    "no word": ("", None, None),
    "no words": ([], None, None),
    "true": (True, None, Sharding()),
    "a word": ("full_shard", None, Sharding()),
    "two words": ("full_shard auto_wrap", None, Sharding()),
    "a list": (["shard_grad_op", "auto_wrap"], None, Sharding(reshard_after_forward=False)),
    "itself": (Sharding(min_num_params=7), None, Sharding(min_num_params=7)),
    "layers": (True, {"transformer_layer_cls_to_wrap": ["Block"]}, Sharding(layers=("Block",))),
    "prefixed": ("full_shard", {"fsdp_transformer_layer_cls_to_wrap": "A,B", "version": 2}, Sharding(("A", "B"))),
    "size": ("full_shard", {"min_num_params": 10, "limit_all_gathers": True}, Sharding(min_num_params=10)),
    "kept": ("full_shard", {"reshard_after_forward": "false"}, Sharding(reshard_after_forward=False)),
}


@pytest.mark.parametrize("name", ASKED)
def test_what_is_asked_in_the_shape_of_hf_is_understood(name):
    value, config, expected = ASKED[name]
    assert Sharding.parse(value, config) == expected


@pytest.mark.parametrize(
    ("value", "config", "told"),
    [
        ("full_shard offload", None, "host memory"),
        ("hybrid_shard", None, "not supported"),
        ("everything", None, "full_shard, shard_grad_op"),
        ("auto_wrap", None, "is incomplete"),
        ("full_shard", {"version": 1}, "version 1"),
        ("full_shard", {"activation_checkpointing": True}, "gradient_checkpointing=True"),
        ("full_shard", {"xla": True}, "xla"),
    ],
    ids=["offload", "hybrid", "unknown", "no-how", "version", "recomputing", "xla"],
)
def test_what_is_not_offered_is_refused_with_a_reason(value, config, told):
    with pytest.raises(ConfigError, match=told):
        Sharding.parse(value, config)


def test_train_refuses_it_before_anything_is_touched():
    with pytest.raises(ConfigError, match="hybrid_shard"):
        toys.trained(sharding="hybrid_shard")


def test_one_process_has_nothing_to_split():
    model = nn.Linear(4, 1)
    trainer = toys.trained(model=model, cls=Trainer, sharding="full_shard")
    assert not is_sharded(model) and type(model) is nn.Linear
    assert trainer.whole_model() is model and whole_model(model) is model
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in trainer.whole_weights().items())
    copied = copy_model(model)
    assert copied is not model and torch.equal(copied.weight, model.weight)
    assert local(model.weight) is model.weight and whole(model.weight) is model.weight
    load_weights(copied, {"weight": torch.zeros(1, 4), "bias": torch.ones(1)})
    assert copied.weight.sum() == 0 and copied.bias == 1
