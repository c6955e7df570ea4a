"""The model freezer: which parameters and modes change, and which are reported."""

import pytest
import torch
from torch import nn

import toys
from loopwright.errors import ConfigError
from loopwright.finetuning import BN_MODULES, Layer, LayerGroup, ModelFreezer


def network():
    """Three groups: a layer, a nested block with batch norms, a head."""
    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))
    return toys.net(input=nn.Linear(4, 4), block=block, output=nn.Linear(4, 2))


INPUT = ["input.weight", "input.bias"]
BLOCK = ["block.0.weight", "block.0.bias", "block.2.0.weight", "block.2.0.bias"]  # without its batch norm


def vision_transformer():
    """Holds a class token itself, and an attention block with projections of its own."""
    attention = nn.MultiheadAttention(4, 2, dropout=0.5)
    token = nn.Parameter(torch.zeros(4))
    return toys.net(class_token=token, patches=nn.Linear(4, 4), attention=attention, head=nn.Linear(4, 2))


def tied_language_model():
    """The head's weight is the embedding's; its bias is its own."""
    model = toys.net(embedding=nn.Embedding(5, 4), body=nn.Linear(4, 4), head=nn.Linear(4, 5))
    model.head.weight = model.embedding.weight
    return model


def frozen_names(model):
    return {name for name, parameter in model.named_parameters() if not parameter.requires_grad}


def freezable(model):
    return model, ModelFreezer(model)


def names_of(model, parameters):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for parameter in parameters]


def test_a_freezer_unfreezes_everything_and_lists_groups_and_their_leaves_with_indexes_from_both_ends():
    model, freezer = freezable(network().requires_grad_(False))
    assert frozen_names(model) == set()
    assert (freezer.model, freezer.freeze_bn, freezer.num_groups) == (model, False, 3)
    groups = enumerate((model.input, model.block, model.output))
    assert freezer.get_layer_groups() == [LayerGroup((index, index - 3), module, False) for index, module in groups]
    layers = freezer.get_layers()
    leaves = [model.block[0], model.block[1], model.block[2][0], model.block[2][1]]
    assert layers == [
        Layer((0, -3), model.input, False),
        *(Layer((1, -2), leaf, False) for leaf in leaves),
        Layer((2, -1), model.output, False),
    ]
    assert (layers[0].layer_group_idx, layers[0].is_frozen) == ((0, -3), False)


def test_freeze_takes_all_groups_but_the_last_and_batch_norms_only_when_asked_for():
    model, freezer = freezable(network())
    assert freezer.freeze() is None
    assert frozen_names(model) == set(INPUT + BLOCK)
    assert [group.is_frozen for group in freezer.get_layer_groups()] == [True, True, False]
    assert [layer.is_frozen for layer in freezer.get_layers()] == [True, True, False, True, False, False]
    ModelFreezer(model, freeze_batch_norms=True).freeze(set_modules_as_eval=True)
    assert frozen_names(model) == {*INPUT, *BLOCK, "block.1.weight", "block.1.bias"}
    assert not model.block[1].training


@pytest.mark.parametrize("batch_norm_class", BN_MODULES)
def test_every_kind_of_batch_norm_is_passed_by(batch_norm_class):
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), batch_norm_class(2)), nn.Linear(2, 2))
    ModelFreezer(model).freeze()
    assert frozen_names(model) == {"0.0.weight", "0.0.bias"}


@pytest.mark.parametrize("sets_mode", [False, True])
def test_parameters_are_frozen_and_unfrozen_whatever_the_mode_is_to_be(sets_mode):
    model, freezer = freezable(network())
    freezer.freeze(0, 0, set_modules_as_eval=sets_mode)
    assert frozen_names(model) == {"input.weight", "input.bias"}
    assert model.input.training is not sets_mode
    freezer.freeze(set_modules_as_eval=True)
    freezer.unfreeze(set_modules_as_training=sets_mode)
    assert frozen_names(model) == set()
    assert model.input.training is model.block[2][1].training is sets_mode


def test_eval_mode_reaches_everything_in_the_groups_but_batch_norms_also_what_is_frozen_already():
    model, freezer = freezable(network())
    freezer.freeze()
    assert model.input.training
    freezer.freeze(set_modules_as_eval=True)
    assert {name for name, module in model.named_modules() if module.training} == {"", "block.1", "output"}


def test_a_module_with_a_mode_of_its_own_keeps_it():
    class AlwaysEval(nn.Linear):
        def train(self, mode=True):
            return super().train(False)

    model = nn.Sequential(AlwaysEval(2, 2), nn.Linear(2, 2)).train()
    ModelFreezer(model).unfreeze()
    assert [module.training for module in model] == [False, True]


def test_a_layer_without_parameters_counts_as_frozen_in_eval_mode():
    model, freezer = freezable(nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))
    assert [layer.is_frozen for layer in freezer.get_layers()] == [False, False]
    freezer.freeze(0, 0, set_modules_as_eval=True)
    assert [layer.is_frozen for layer in freezer.get_layers()] == [True, False]
    assert [group.is_frozen for group in freezer.get_layer_groups()] == [False, False]


@pytest.mark.parametrize("bounds", [(0, 1), (1, 0), (-3, -2), (-2, 0), (0, -2), (1, -3)])
def test_bounds_are_included_count_from_both_ends_and_may_be_reversed(bounds):
    model, freezer = freezable(nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(3))))
    freezer.freeze(*bounds)
    assert frozen_names(model) == {"0.weight", "1.weight"}
    assert sorted(freezer.unfreeze(*bounds)) == [0, 1]
    assert frozen_names(model) == set()


@pytest.mark.parametrize("index", [3, -4, 100])
@pytest.mark.parametrize("method", ["freeze", "unfreeze"])
def test_an_index_out_of_range_is_a_config_error_that_names_the_groups(method, index):
    model, freezer = freezable(network())
    with pytest.raises(ConfigError, match=rf"no layer group {index}: Net has 3 \(input, block, output\)"):
        getattr(freezer, method)(0, index)
    with pytest.raises(ValueError, match="0 to 2, or -3 to -1"):
        getattr(freezer, method)(index, 0)
    assert frozen_names(model) == set()


def test_all_but_the_last_of_one_group_is_a_config_error_and_not_a_frozen_model():
    model, freezer = freezable(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ConfigError, match="index 0 for both bounds"):
        freezer.freeze()
    assert frozen_names(model) == set()
    freezer.freeze(0, 0)
    assert frozen_names(model) == {"0.weight", "0.bias"}


def test_a_model_without_children_is_its_own_only_group():
    model, freezer = freezable(nn.Linear(2, 2))
    assert freezer.get_layer_groups() == [LayerGroup((0, -1), model, False)]
    freezer.freeze(0, 0, set_modules_as_eval=True)
    assert freezer.get_layers() == [Layer((0, -1), model, True)]
    assert not model.training
    assert freezer.unfreeze() == {0: {"params": [model.weight, model.bias]}}


def test_unfreeze_returns_what_was_frozen_by_group():
    model, freezer = freezable(network())
    freezer.freeze()
    unfrozen = freezer.unfreeze(1)
    assert {index: names_of(model, group["params"]) for index, group in unfrozen.items()} == {0: INPUT, 1: BLOCK}
    assert list(unfrozen) == [0, 1]
    assert freezer.unfreeze() == {}
    freezer.freeze()
    model.input.bias.requires_grad_(True)
    assert names_of(model, freezer.unfreeze(0, 0)[0]["params"]) == ["input.weight"]
    model.requires_grad_(False)  # batch norms too
    freezer.unfreeze()
    assert frozen_names(model) == set()


def test_parameters_of_modules_with_children_are_frozen():
    model, freezer = freezable(vision_transformer())
    freezer.freeze(1, 1)
    names = ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
    assert frozen_names(model) == {f"attention.{name}" for name in names}
    layers = [layer for layer in freezer.get_layers() if layer.layer_group_idx[0] == 1]
    assert layers == [Layer((1, -2), each, True) for each in (model.attention, model.attention.out_proj)]


def test_parameters_of_the_model_itself_belong_to_group_0():
    model, freezer = freezable(vision_transformer())
    assert freezer.num_groups == 3
    freezer.freeze(0, 0, set_modules_as_eval=True)
    assert frozen_names(model) == {"class_token", "patches.weight", "patches.bias"}
    assert model.training
    assert freezer.get_layers()[:2] == [Layer((0, -3), model, True), Layer((0, -3), model.patches, True)]
    unfrozen = freezer.unfreeze(0, 0)
    assert names_of(model, unfrozen[0]["params"]) == ["class_token", "patches.weight", "patches.bias"]
    model.class_token.requires_grad_(False)
    assert [group.is_frozen for group in freezer.get_layer_groups()] == [True, False, False]
    freezer.freeze(0, -1)
    assert freezer.get_trainable_parameters() == []


@pytest.mark.parametrize("make", [network, lambda: nn.Transformer(8, 2, 1, 1, 16)], ids=["network", "transformer"])
def test_every_parameter_is_frozen_and_unfrozen_once_and_goes_straight_into_an_optimizer(make):
    model, freezer = freezable(make())
    names = [name for name, _ in model.named_parameters()]
    ModelFreezer(model, freeze_batch_norms=True).freeze(0, -1)
    assert len(frozen_names(model)) == len(names)
    unfrozen = [parameter for group in freezer.unfreeze().values() for parameter in group["params"]]
    assert sorted(names_of(model, unfrozen)) == sorted(names)
    freezer.freeze()
    optimizer = torch.optim.SGD(freezer.get_trainable_parameters(), lr=0.1)
    for group in freezer.unfreeze().values():
        optimizer.add_param_group(group)
    in_optimizer = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(names_of(model, in_optimizer)) == sorted(names)


def test_a_tied_parameter_is_returned_once_and_unfrozen_with_either_group():
    model, freezer = freezable(tied_language_model())
    freezer.freeze(0, -1)
    unfrozen = freezer.unfreeze()
    assert names_of(model, unfrozen[0]["params"]) == ["embedding.weight"]
    assert names_of(model, unfrozen[2]["params"]) == ["head.bias"]
    assert len(freezer.get_trainable_parameters()) == 4
    freezer.freeze()
    assert [layer.is_frozen for layer in freezer.get_layers()] == [True, True, False]
    assert names_of(model, freezer.unfreeze(-1, -1)[2]["params"]) == ["embedding.weight"]
    assert frozen_names(model) == {"body.weight", "body.bias"}


def test_a_module_used_in_two_groups_is_frozen_with_either():
    shared = nn.Linear(2, 2)
    model, freezer = freezable(nn.Sequential(nn.Sequential(shared), nn.Sequential(shared, nn.ReLU())))
    freezer.freeze(1, 1)
    assert not shared.weight.requires_grad
    assert [layer.is_frozen for layer in freezer.get_layers()] == [True, True, False]
    assert list(freezer.unfreeze()) == [0]


def test_a_half_frozen_layer_or_model_is_a_value_error_that_names_it():
    model, freezer = freezable(network())
    model.block[2][0].bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"'block.2.0' \(Linear\).*bias frozen, weight not"):
        freezer.get_layers()
    freezer.freeze()
    assert freezer.get_layers()[3] == Layer((1, -2), model.block[2][0], True)
    model, freezer = freezable(vision_transformer())
    model.scale = nn.Parameter(torch.ones(1), requires_grad=False)
    with pytest.raises(ValueError, match="Net itself.*scale frozen, class_token not"):
        freezer.get_layers()


def test_parameters_of_integers_are_left_alone():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].codes = nn.Parameter(torch.zeros(2, dtype=torch.uint8), requires_grad=False)
    freezer = ModelFreezer(model)
    assert not model[0].codes.requires_grad
    assert [layer.is_frozen for layer in freezer.get_layers()] == [False, False]
    freezer.freeze(0, -1)
    assert sum(len(group["params"]) for group in freezer.unfreeze().values()) == 4


def test_a_head_replaced_later_is_seen():
    model, freezer = freezable(network())
    model.output = nn.Linear(4, 3)
    model.extra = nn.Linear(3, 3)
    assert freezer.num_groups == 4
    freezer.freeze()
    assert {"output.weight", "output.bias"} <= frozen_names(model)
    assert model.extra.weight.requires_grad


def test_a_frozen_backbone_does_not_move_while_the_head_learns():
    torch.manual_seed(0)
    model, freezer = freezable(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)))
    freezer.freeze()
    before = toys.state_of(model)
    optimizer = torch.optim.SGD(freezer.get_trainable_parameters(), lr=0.1)
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"2.weight", "2.bias"}
