"""Optimizers by name, their options as text, the weight-decay groups, and the greedy schedule."""

import copy
import random
import re
import sys

import pytest
import torch
from torch import nn

import toys
from loopwright import optimizers
from loopwright.optimizers import (
    Adafactor,
    create_optimizer,
    decay_parameter_names,
    optimizer_class_and_options,
    weight_decay_groups,
)
from loopwright.schedulers import get_scheduler

from . import tiny
from .tiny import assert_refused

SIX = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "adafactor")


def block():
    parts = {"scale": nn.Parameter(torch.ones(3)), "bias": nn.Parameter(torch.zeros(3)), "linear": nn.Linear(3, 3)}
    parts |= {"first": nn.LayerNorm(3), "norm": nn.BatchNorm1d(3)}
    parts |= {name: nn.Linear(3, 3, bias=False) for name in ("q_norm", "normal", "MyRMSNorm")}
    return toys.net(**parts, inner=nn.ModuleDict({"norm1": nn.GroupNorm(1, 3), "k_norm": nn.BatchNorm1d(3)}))


def a_model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Conv1d(7, 3, 1)).to(dtype)


def trained(optimizer, model, num_updates=12):
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_updates):
        for parameter in model.parameters():
            parameter.grad = (3 * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype)
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_biases_and_norms_do_not_decay():
    assert decay_parameter_names(block()) == ["scale", "linear.weight", "normal.weight", "inner.norm1.weight"]

    class Wrapped(nn.LayerNorm):
        def __init__(self):
            super().__init__(3)
            self.gain = nn.Linear(3, 3)

    assert decay_parameter_names(nn.Sequential(Wrapped(), nn.Linear(3, 2))) == ["1.weight"]
    assert decay_parameter_names(nn.LayerNorm(3)) == ["weight"]


def test_groups_hold_each_trainable_parameter_once_and_the_decaying_names_can_be_given():
    model = block()
    model.linear.weight.requires_grad_(False)
    model.inner["tied"] = model.normal
    decaying, others = weight_decay_groups(model, 0.01)
    assert [group["weight_decay"] for group in (decaying, others)] == [0.01, 0.0]
    expected = [model.scale, model.normal.weight, model.inner["norm1"].weight]
    assert list(map(id, decaying["params"])) == list(map(id, expected))
    num_trainable = sum(parameter.requires_grad for parameter in model.parameters())
    assert len(decaying["params"]) + len(others["params"]) == num_trainable == len(list(model.parameters())) - 1
    model = block()
    decaying, others = weight_decay_groups(model, 0.1, decay_names=["bias"])
    assert decaying["params"] == [model.bias]
    assert len(others["params"]) == len(list(model.parameters())) - 1


def test_the_groups_are_the_same_as_in_transformers():
    transformers = pytest.importorskip("transformers")
    sizes = {**tiny.SIZES, "vocab_size": 16}
    llama = transformers.LlamaConfig(num_key_value_heads=2, tie_word_embeddings=True, **sizes)
    looked_at = 0
    for model in (
        transformers.BertForMaskedLM(transformers.BertConfig(**sizes)),
        transformers.LlamaForCausalLM(llama),
        block(),
        nn.Sequential(nn.TransformerEncoderLayer(8, 2, 8), nn.Linear(8, 2)),
    ):
        theirs = transformers.Trainer.get_decay_parameter_names(None, model)
        existing = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        assert set(decay_parameter_names(model)) == set(theirs) & existing
        named = dict(model.named_parameters())
        expected = [name for name in named if name in theirs], [name for name in named if name not in theirs]
        groups = weight_decay_groups(model, 0.1)
        for group, names in zip(groups, expected, strict=True):
            assert [id(each) for each in group["params"]] == [id(named[name]) for name in names]
        looked_at += len(named)
    assert looked_at == 66


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("adamw_torch", torch.optim.AdamW),
        ("adamw_torch_fused", torch.optim.AdamW),
        ("sgd", torch.optim.SGD),
        ("adagrad", torch.optim.Adagrad),
        ("rmsprop", torch.optim.RMSprop),
        ("adafactor", Adafactor),
        ("AdamW", torch.optim.AdamW),
        ("nadam", torch.optim.NAdam),
        ("RAdam", torch.optim.RAdam),
        ("torch.optim.Adamax", torch.optim.Adamax),
        ("torch.optim.Adafactor", torch.optim.Adafactor),
    ],
)
def test_an_optimizer_is_found_by_its_name(name, expected):
    optimizer = create_optimizer(name, a_model().parameters(), lr=0.25)
    assert type(optimizer) is expected
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_options_come_by_name_and_as_text_and_adams_only_go_to_optimizers_with_betas():
    adam = {"adam_betas": (0.5, 0.75), "adam_eps": 0.125}
    for name in ("adamw_torch", "NAdam"):
        assert optimizer_class_and_options(name, **adam)[1] == {"betas": (0.5, 0.75), "eps": 0.125}
    assert [optimizer_class_and_options(name, **adam)[1] for name in ("sgd", "adagrad", "rmsprop")] == [{}] * 3
    text = "momentum=0.9, nesterov=True ,maximize=0,foreach=none"
    _, options = optimizer_class_and_options("sgd", optim_args=text, dampening=0.0)
    assert options == {"momentum": 0.9, "nesterov": True, "maximize": False, "foreach": None, "dampening": 0.0}
    text = "betas=(0.5,0.6),eps=1e-6"
    _, options = optimizer_class_and_options("adamw_torch", adam_betas=(0.9, 0.99), optim_args=text)
    assert options == {"betas": (0.5, 0.6), "eps": 1e-6}


@pytest.fixture
def without_packages(monkeypatch):
    """Hide the packages that optimizers come from, whether they are installed or not."""
    roots = {package.replace("-", "_").removeprefix("torch_") for package, *_ in optimizers._FOREIGN_NAMES.values()}
    for name in {*roots, *(each for each in sys.modules if each.partition(".")[0] in roots)}:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize(
    ("name", "optim_args", "expected"),
    [
        ("sgd", "momentm=0.9", "has no option 'momentm': did you mean 'momentum'? It takes momentum, dampening"),
        ("sgd", "momentum", "must look like 'momentum=0.9,nesterov=true': 'momentum' does not"),
        ("sgd", "momentum=fast", "momentum is a number like 0, got 'fast'"),
        ("sgd", "nesterov=2", "nesterov is true or false, got '2'"),
        ("adamw_torch", "betas=0.9", "betas is 2 numbers like (0.9,0.999), got '0.9'"),
        ("sgd", "momentum=0.9,momentum=0.8", "gives 'momentum' twice"),
        ("sgd", "lr=0.1", "pass it as learning_rate"),
        ("sgd", {"momentum": 0.9}, "must be text like 'momentum=0.9,nesterov=true', got {'momentum': 0.9}"),
        ("adamw_troch", None, "did you mean 'adamw_torch'?"),
        ("Addam", None, "did you mean 'adam'?"),
        ("adamw_8bt", None, "did you mean 'adamw_8bit'?"),
        ("adamw_hf", None, "use 'adamw_torch'"),
        ("paged_adamw_8bit", None, "pip install -U bitsandbytes, or use 'adafactor'"),
        ("lbfgs", None, "evaluates the loss several times in one update"),
    ],
)
def test_wrong_names_and_options_are_refused_with_the_nearest_match(name, optim_args, expected, without_packages):
    assert_refused(re.escape(expected), optimizer_class_and_options, name, optim_args=optim_args)


def test_bad_values_and_frozen_models_are_refused():
    groups, frozen = (weight_decay_groups(a_model().requires_grad_(trains), 0.1) for trains in (True, False))
    for text, name, parameters, options in (
        ("'sgd' cannot be created: Invalid momentum value", "sgd", a_model().parameters(), {"momentum": -1.0}),
        ("no parameters to train: is the whole model frozen", "sgd", frozen, {}),
        ("clip_threshold of Adafactor must be positive", "adafactor", a_model().parameters(), {"clip_threshold": 0.0}),
        ("weight_decay would have no effect", "sgd", groups, {"optim_args": "weight_decay=0.5"}),
    ):
        assert_refused(text, create_optimizer, name, parameters, lr=0.1, **options)


def test_every_name_of_transformers_is_known_or_refused_with_its_package_and_an_alternative(without_packages):
    names = {each.value for each in pytest.importorskip("transformers.training_args").OptimizerNames}
    assert len(names) == 41 and names > set(SIX)
    for name in SIX:
        optimizer_class_and_options(name)
    for name in names - set(SIX):
        package, kind, instead = optimizers._FOREIGN_NAMES[name]
        told = f"needs the package {package} .*: pip install -U {package}, or use '{instead}'"
        assert_refused(told if kind else f"{name}' {package}: use '{instead}'", optimizer_class_and_options, name)
    alternatives = {instead for _, _, instead in optimizers._FOREIGN_NAMES.values()}
    assert len(alternatives) >= 5
    for name in sorted(alternatives):
        assert issubclass(optimizer_class_and_options(name)[0], torch.optim.Optimizer)


@pytest.mark.parametrize("name", SIX)
def test_the_updates_are_the_same_as_in_transformers_bit_by_bit(name):
    transformers = pytest.importorskip("transformers")
    ours, theirs = a_model(), a_model()
    options = {"learning_rate": 0.01, "adam_beta1": 0.8, "adam_epsilon": 1e-6, "weight_decay": 0.1}
    args = transformers.TrainingArguments(optim=name, use_cpu=True, report_to=[], **options)
    kind, options = transformers.Trainer.get_optimizer_cls_and_kwargs(args)
    their_optimizer = kind(weight_decay_groups(theirs, 0.1), **options)
    adam = {"adam_betas": (0.8, 0.999), "adam_eps": 1e-6}
    our_optimizer = create_optimizer(name, weight_decay_groups(ours, 0.1), lr=0.01, **adam)
    toys.assert_same(trained(our_optimizer, ours), trained(their_optimizer, theirs))
    assert our_optimizer.defaults.get("fused") == options.get("fused")


def test_fused_is_dropped_for_parameters_that_do_not_support_it():
    plain = create_optimizer("adamw_torch_fused", [nn.Parameter(torch.ones(2, dtype=torch.complex64))], lr=0.1)
    fused = create_optimizer("adamw_torch_fused", [("weight", nn.Parameter(torch.ones(2)))], lr=0.1)
    assert [plain.defaults["fused"], fused.defaults["fused"]] == [None, True]


def test_adafactor_evaluates_a_closure():
    def closure():
        loss = weight.square().sum()
        loss.backward()
        return loss

    weight = nn.Parameter(torch.ones(2))
    assert Adafactor([weight], lr=0.1).step(closure).item() == 2.0
    # The first update is the gradient over its own size: the lr itself.
    assert weight.tolist() == pytest.approx([0.9, 0.9])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("options", ["beta1=0.9", "scale_parameter=true,weight_decay=0.01", "clip_threshold=0.5"])
def test_adafactor_matches_transformers_with_any_option(options, dtype):
    optimization = pytest.importorskip("transformers.optimization")
    ours, theirs = a_model(dtype), a_model(dtype)
    _, typed = optimizer_class_and_options("adafactor", optim_args=options)
    theirs_options = {"scale_parameter": False, "relative_step": False, **typed}
    their_optimizer = optimization.Adafactor(theirs.parameters(), lr=0.01, **theirs_options)
    our_optimizer = create_optimizer("adafactor", ours.parameters(), lr=0.01, optim_args=options)
    toys.assert_same(trained(our_optimizer, ours), trained(their_optimizer, theirs))
    assert {type(our_optimizer).__name__, type(their_optimizer).__name__} == {"Adafactor"}
    assert not isinstance(our_optimizer, type(their_optimizer)), "our own code, their numbers"


def test_adafactor_of_bfloat16_weights_resumes_exactly_from_its_state():
    model = a_model(torch.bfloat16)
    optimizer = Adafactor(model.parameters(), lr=0.01, beta1=0.9)
    trained(optimizer, model, 5)
    resumed_model = copy.deepcopy(model)
    resumed = Adafactor(resumed_model.parameters(), lr=0.5)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    toys.assert_same(trained(resumed, resumed_model, 5), trained(optimizer, model, 5))
    dtypes = {each.dtype for state in resumed.state.values() for each in state.values() if torch.is_tensor(each)}
    assert dtypes == {torch.float32}


def stepped(scheduler, metrics):
    return [scheduler.step(metric) or toys.lrs(scheduler)[0] for metric in metrics]


def a_scheduler(make, options):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    return make("greedy", optimizer, None, None, scheduler_specific_kwargs=options)


def test_greedy_raises_and_lowers_the_lr_within_bounds_that_fit_the_groups():
    options = {"patience": 1, "factor": 0.5, "max_lr": 0.3, "min_lr": 0.06}
    lrs = stepped(a_scheduler(get_scheduler, options), [5.0, 4.0, 3.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0])
    # Better twice in a row: 0.1 / 0.5. Twice more: bounded by 0.3. Then no better, twice each: halved, and bounded.
    assert lrs == pytest.approx([0.1, 0.2, 0.2, 0.3, 0.3, 0.15, 0.15, 0.075, 0.075, 0.06])
    text = "max_lr has 2 values for 1 parameter groups"
    assert_refused(text, a_scheduler, get_scheduler, {"max_lr": [0.1, 0.2]})


def test_greedy_matches_transformers():
    optimization = pytest.importorskip("transformers.optimization")
    draw = random.Random(0)
    num_changed = 0
    for _ in range(60):
        options = {
            "mode": draw.choice(["min", "max"]),
            "patience": draw.randint(0, 2),
            "factor": draw.choice([0.5, 0.9]),
            "threshold_mode": draw.choice(["abs", "rel"]),
            "threshold": draw.choice([0.0, 1e-6, 0.1]),
            "cooldown": draw.randint(0, 2),
            "warmup": draw.randint(0, 2),
            "min_lr": draw.choice([1e-3, 0.05, 0.2]),
            "max_lr": draw.choice([0.15, 1.0]),
            "smooth": draw.random() < 0.3,
            "window_size": 3,
            "reset_start": draw.randint(1, 4),
        }
        metrics = [draw.choice([draw.random(), 0.5]) for _ in range(50)]
        ours = stepped(a_scheduler(get_scheduler, options), metrics)
        assert ours == stepped(a_scheduler(optimization.get_scheduler, options), metrics), options
        num_changed += len(set(ours)) > 1
    assert num_changed >= 50


def test_greedy_resumes_from_its_state():
    options = {"patience": 0, "factor": 0.5, "smooth": True, "window_size": 2, "min_lr": 1e-4}
    metrics = [3.0, 2.0, 2.5, 2.4, 2.0, 1.0]
    whole, first, second = (a_scheduler(get_scheduler, options) for _ in range(3))
    expected = stepped(whole, metrics)
    stepped(first, metrics[:3])
    second.load_state_dict(first.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    assert stepped(second, metrics[3:]) == expected[3:]
    assert second.get_last_lr() == expected[-1:]
