"""Placeholders: arithmetic before the numbers are known, and their replacement."""

import copy
import math
import operator
import pickle
from collections import OrderedDict, namedtuple
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

import toys
from loopwright import Trainer
from loopwright.errors import ConfigError
from loopwright.schedulers import CosineLrScheduler, WSDLrScheduler, get_scheduler
from loopwright.schedulers.placeholders import TrainerPlaceholderValues, replace_trainer_placeholder_values, resolve

EPOCHS = TrainerPlaceholderValues.NUM_EPOCHS
UPDATES = TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH
LOCAL_UPDATES = TrainerPlaceholderValues.PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH
TRAIN_LENGTH = TrainerPlaceholderValues.TRAIN_DATALOADER_LEN
EVAL_LENGTH = TrainerPlaceholderValues.EVAL_DATALOADER_LEN

NUMBERS = {EPOCHS: 3, UPDATES: 8, LOCAL_UPDATES: 8, TRAIN_LENGTH: 16, EVAL_LENGTH: 5}
TRAINER = SimpleNamespace(
    run_config=SimpleNamespace(num_epochs=3, num_update_steps_per_epoch=32, num_local_update_steps_per_epoch=8),
    _train_dataloader=range(16),
    _eval_dataloader=range(5),
)


def an_optimizer():
    return torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)


def collect(*args, **kwargs):
    return args, kwargs


BINARY = [operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow]
UNARY = [operator.neg, operator.pos, abs, round, math.floor, math.ceil]


def paired(symbolic, plain):
    return SimpleNamespace(symbolic=symbolic, plain=plain)


def apply(function, *operands):
    # What Python cannot compute on the numbers, or not soon, is not a case.
    if function is operator.pow and abs(operands[1].plain) > 20:
        return operands[0]
    try:
        plain = function(*(operand.plain for operand in operands))
    except (ArithmeticError, ValueError):
        return operands[0]
    if isinstance(plain, complex) or abs(plain) > 1e9:
        return operands[0]
    return paired(function(*(operand.symbolic for operand in operands)), plain)


leaves = st.sampled_from([paired(placeholder, number) for placeholder, number in NUMBERS.items()])
constants = (st.integers(-20, 20) | st.floats(-20, 20).map(lambda number: round(number, 3))).map(
    lambda number: paired(number, number)
)
expressions = st.recursive(
    leaves,
    lambda inner: (
        st.builds(apply, st.sampled_from(BINARY), inner, inner | constants)
        | st.builds(apply, st.sampled_from(BINARY), constants, inner)
        | st.builds(apply, st.sampled_from(UNARY), inner)
        | st.builds(lambda each, digits: apply(partial(round, ndigits=digits), each), inner, st.integers(0, 3))
    ),
    max_leaves=8,
)


@given(expressions)
def test_arithmetic_on_placeholders_is_arithmetic_on_their_numbers_also_after_pickling_and_copying(expression):
    result = resolve(TRAINER, expression.symbolic)
    assert result == expression.plain and type(result) is type(expression.plain)
    for twin in (pickle.loads(pickle.dumps(expression.symbolic)), copy.deepcopy(expression.symbolic)):
        assert twin == expression.symbolic
        assert resolve(TRAINER, twin) == expression.plain


def test_each_of_the_five_placeholders_is_a_number_of_the_trainer():
    assert {each: resolve(TRAINER, each) for each in TrainerPlaceholderValues} == NUMBERS
    names = "NUM_EPOCHS NUM_UPDATE_STEPS_PER_EPOCH PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH TRAIN_DATALOADER_LEN"
    assert TrainerPlaceholderValues.placeholder_set() == {*names.split(), "EVAL_DATALOADER_LEN"}
    assert len(TrainerPlaceholderValues) == 5
    assert resolve(TRAINER, "NUM_EPOCHS") == "NUM_EPOCHS"


def test_the_sums_people_write_work():
    expressions = [2 * EPOCHS, EPOCHS * 2 + 1, (EPOCHS + 2) * 3, UPDATES // 3, EPOCHS * EPOCHS, EPOCHS - 1, 10 - EPOCHS]
    expressions.append(EPOCHS * UPDATES)
    assert [resolve(TRAINER, expression) for expression in expressions] == [6, 7, 15, 2, 9, 2, 7, 24]


def test_an_expression_reads_as_it_was_written_and_cannot_be_changed():
    for expression in (EPOCHS * 2, EPOCHS + 1, (2 * EPOCHS - 1) ** EPOCHS):
        assert expression.name == "NUM_EPOCHS"
    assert (EPOCHS * UPDATES).name == "(NUM_EPOCHS * NUM_UPDATE_STEPS_PER_EPOCH)"
    assert repr(round(0.5 * EPOCHS, 1) - 1) == "(round((0.5 * NUM_EPOCHS), 1) - 1)"
    with pytest.raises(AttributeError):
        (EPOCHS * 2).operator = "+"


@pytest.mark.parametrize("other", ["2", None, [1], object()])
def test_only_numbers_and_placeholders_combine(other):
    with pytest.raises(TypeError, match="combine with numbers"):
        EPOCHS + other
    with pytest.raises(TypeError):
        other + EPOCHS


def test_an_object_that_only_looks_like_a_placeholder_is_never_touched():
    imposter = SimpleNamespace(name="NUM_EPOCHS", value="1 / 0")
    replaced = replace_trainer_placeholder_values(TRAINER, partial(collect, imposter, x=imposter))
    assert replaced() == ((imposter,), {"x": imposter})


def test_keywords_positions_and_nested_places_are_replaced():
    Pair = namedtuple("Pair", "a b")
    nested = partial(collect, EPOCHS, x=UPDATES + 1)
    places = {"inside": [EPOCHS, (1, UPDATES), {"deep": [EVAL_LENGTH]}], "pair": Pair(EPOCHS, 0)}
    ordered = OrderedDict(a=1, b=EPOCHS)
    instance = partial(collect, EPOCHS, "text", nested, total=EPOCHS * UPDATES, **places, ordered=ordered)
    args, kwargs = replace_trainer_placeholder_values(TRAINER, instance)()
    assert args[:2] == (3, "text")
    assert args[2]() == ((3,), {"x": 9})
    expected = {"total": 24, "inside": [3, (1, 8), {"deep": [5]}], "pair": Pair(3, 0)}
    assert kwargs == {**expected, "ordered": OrderedDict(a=1, b=3)}
    assert isinstance(kwargs["ordered"], OrderedDict)
    assert nested.args == (EPOCHS,)
    assert instance.keywords["inside"][0] is EPOCHS


def test_a_partial_comes_back_as_a_new_one_with_the_same_objects_where_there_is_no_placeholder():
    milestones, options = [1, 2], {"a": (1, 2)}
    replaced = replace_trainer_placeholder_values(TRAINER, partial(collect, milestones, options=options, epochs=EPOCHS))
    assert replaced.args[0] is milestones
    assert replaced.keywords["options"] is options
    instance = partial(collect, 1)
    replaced = replace_trainer_placeholder_values(TRAINER, instance)
    assert replaced is not instance and replaced() == instance()


@pytest.mark.parametrize("instance", [collect, None, EPOCHS, [EPOCHS], CosineLrScheduler])
def test_anything_but_a_partial_comes_back_as_it_is(instance):
    assert replace_trainer_placeholder_values(TRAINER, instance) is instance


def test_what_the_run_does_not_know_is_reported_and_only_when_it_is_needed():
    counts = SimpleNamespace(num_epochs=3, num_local_update_steps_per_epoch=None)
    trainer = SimpleNamespace(run_config=counts, _train_dataloader=range(4), _eval_dataloader=None)
    assert resolve(trainer, TRAIN_LENGTH) == 4
    with pytest.raises(ConfigError, match="EVAL_DATALOADER_LEN is used, but this run has no evaluation loader"):
        resolve(trainer, EVAL_LENGTH * 2)
    with pytest.raises(ConfigError, match="NUM_UPDATE_STEPS_PER_EPOCH is not known"):
        resolve(trainer, EPOCHS * UPDATES)
    trainer._train_dataloader = iter([])
    with pytest.raises(ConfigError, match="the train loader has no length"):
        resolve(trainer, TRAIN_LENGTH)


@pytest.mark.parametrize("create", [CosineLrScheduler.create_scheduler_fn(), WSDLrScheduler.create_scheduler_fn()])
def test_a_run_over_a_stream_says_that_its_updates_are_not_known_before_it_starts(create):
    trainer, stream = toys.trainer_of(cls=Trainer), toys.Stream(toys.pairs(8))
    with pytest.raises(ConfigError, match="NUM_UPDATE_STEPS_PER_EPOCH is not known for this run, whose train loader"):
        trainer.train(stream, 1, create_scheduler_fn=create)
    known = partial(create, num_update_steps_per_epoch=1)
    assert trainer.train(stream, 1, create_scheduler_fn=known).updates == 1


def test_schedulers_of_torch_and_ours_get_their_counts():
    make = partial(replace_trainer_placeholder_values, TRAINER)
    one_cycle = make(partial(OneCycleLR, max_lr=0.5, epochs=EPOCHS, steps_per_epoch=UPDATES))(an_optimizer())
    assert one_cycle.total_steps == 24
    one_cycle.optimizer.step()
    toys.stepped(one_cycle, 23)
    assert one_cycle.get_last_lr()[0] == pytest.approx(0.5 / 25 / 1e4)
    cosine = make(CosineLrScheduler.create_scheduler_fn(num_warmup_epochs=1))(an_optimizer())
    assert (cosine.total_iterations, cosine.warmup_iterations) == (24, 8)
    wsd = make(WSDLrScheduler.create_scheduler_fn(num_warmup_epochs=2))(an_optimizer())
    assert (wsd.total_steps, wsd.num_warmup_steps) == (24, 16)
    named = make(partial(get_scheduler, "linear", num_training_steps=EPOCHS * UPDATES))(an_optimizer())
    assert named.lr_lambdas[0](12) == 0.5


@pytest.mark.parametrize("updates", [UPDATES, LOCAL_UPDATES])
@pytest.mark.parametrize(("limit", "total"), [(18, 18), (24, 24), (100, 24)])  # of 3 epochs of 8 updates
def test_the_epochs_times_the_updates_per_epoch_are_at_most_the_limit_on_updates(updates, limit, total):
    config = SimpleNamespace(**vars(TRAINER.run_config), max_num_train_steps=limit)
    trainer, product = SimpleNamespace(**{**vars(TRAINER), "run_config": config}), EPOCHS * updates
    whole = [product, updates * EPOCHS, product + 1, 2 * EPOCHS * (updates * 2), product // 5, round(product / 4)]
    assert resolve(trainer, whole) == [total, total, total + 1, 4 * total, total // 5, round(total / 4)]
    shares = [0.1 * EPOCHS * updates, EPOCHS / 10 * updates, updates * (EPOCHS / 10), product / 10]
    assert resolve(trainer, shares) == pytest.approx([total / 10] * 4, rel=1e-15)
    # Each alone keeps its value, and so does whatever is not their product.
    others = [EPOCHS, updates, 2 * EPOCHS, updates + EPOCHS, (EPOCHS - 1) * updates]
    assert resolve(trainer, others) == [3, 8, 6, 11, 16]
    multiply, once = resolve(trainer, [partial(operator.mul, EPOCHS, updates), partial(operator.mul, EPOCHS, 8)])
    assert multiply() == copy.deepcopy(multiply)() == total and once() == 24
    assert {type(each) for each in (multiply(), *once.args)} == {int}  # what a scheduler keeps can be saved


MINIMUM = {"scheduler_specific_kwargs": {"min_lr": 0.01}}


@pytest.mark.parametrize(
    "create",
    [
        CosineLrScheduler.create_scheduler_fn(lr_min=0.01),
        partial(CosineLrScheduler, total_num_epochs=EPOCHS, num_update_steps_per_epoch=UPDATES, lr_min=0.01),
        WSDLrScheduler.create_scheduler_fn(lr_min=0.1, decay_phase_ratio=0.4),
        partial(get_scheduler, "cosine_with_min_lr", num_training_steps=EPOCHS * UPDATES, **MINIMUM),
        partial(CosineAnnealingLR, T_max=EPOCHS * UPDATES, eta_min=0.01),
    ],
)
def test_a_schedule_ends_where_the_limit_on_updates_ends_the_run(create):
    trainer = toys.trainer_of(lr=0.1, cls=Trainer)
    assert toys.fit(trainer, toys.pairs(16), 9, max_num_train_steps=9, create_scheduler_fn=create).updates == 9
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
