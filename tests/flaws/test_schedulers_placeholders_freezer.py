"""Flaws 42 to 50: schedulers, placeholders, freezer. One test per flaw, named after the right behaviour."""

import gc
import math
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import toys

from . import subject


def optimizer(*lrs: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs])


def test_flaw_42_cosine_with_warmup_decays_until_the_last_update():
    cosine_class = subject.schedulers.CosineLrScheduler
    base, floor, total, warmup = 1.0, 0.001, 100, 20

    for cooldown in (0, 10):
        phases = {"num_warmup_epochs": warmup // 10, "num_cooldown_epochs": cooldown // 10}
        scheduler = cosine_class(optimizer(base), total // 10, 10, lr_min=floor, **phases)
        end = total - cooldown
        values = [scheduler.get_updated_values(n)[0] for n in range(total + 5)]
        expected = [
            floor + 0.5 * (base - floor) * (1 + math.cos(math.pi * (n - warmup) / (end - warmup)))
            for n in range(warmup, end)
        ]
        assert values[warmup:end] == pytest.approx(expected)
        assert values[warmup] == base
        assert values[end:] == [floor] * (total + 5 - end)


def test_flaw_43_warmup_from_a_ratio_starts_there_and_never_overshoots():
    bases, ratio, warmup = (1.0, 0.1), 0.5, 10
    groups = optimizer(*bases)
    warming = {"num_warmup_epochs": 1, "warmup_starting_lr_ratio": ratio}
    scheduler = subject.schedulers.CosineLrScheduler(groups, 10, 10, **warming)
    assert [group["lr"] for group in groups.param_groups] == [ratio * base for base in bases]
    for n in range(warmup + 1):
        expected = [base * (ratio + (1 - ratio) * n / warmup) for base in bases]
        assert list(scheduler.get_updated_values(n)) == pytest.approx(expected)
    assert max(scheduler.get_updated_values(n)[0] for n in range(100)) == bases[0]


def test_flaw_44_wsd_with_several_checkpoints_uses_the_whole_run():
    steps = subject.module("schedulers.wsd_scheduler").estimate_checkpoint_steps
    assert steps(1000, 1) == [1000]
    assert steps(1000, 3) == [250, 500, 1000]
    assert steps(100_000, 2) == [50_000, 100_000]
    assert steps(200_000, 4) == [25_000, 50_000, 100_000, 200_000]
    for total in (1001, 1002, 1003, 999):
        for count in (2, 3, 4):
            checkpoints = steps(total, count)
            assert len(checkpoints) == count
            assert checkpoints == sorted(set(checkpoints)) and checkpoints[-1] == total

    base = 0.5
    scheduler = subject.schedulers.WSDLrScheduler(
        optimizer(base), total_steps=1000, num_warmup_steps=0, num_checkpoints=2
    )
    assert list(scheduler.get_checkpoint_steps()) == [500, 1000]
    values = [scheduler.get_updated_values(n)[0] for n in range(1001)]
    stable = [*range(0, 450), *range(500, 950)]
    assert {values[n] for n in stable} == {base}
    for end in (500, 1000):
        decay = values[end - 50 : end]
        assert decay == sorted(decay, reverse=True) and decay[-1] < 0.02 * base
    assert values[1000] == pytest.approx(1e-6 * base)


def test_flaw_45_wsd_allows_a_minimum_of_zero_and_no_decay_and_can_be_freed():
    wsd_class = subject.schedulers.WSDLrScheduler
    base, total = 0.5, 100

    inverse_to_zero = wsd_class(optimizer(base), total_steps=total, lr_min=0, use_inverse_sqrt_decay=False)
    values = [inverse_to_zero.get_updated_values(n)[0] for n in range(total + 1)]
    assert values[:90] == [base] * 90
    assert values == sorted(values, reverse=True)
    assert 0 <= values[total] <= 1e-6 * base

    for count in (1, 3):
        no_decay = wsd_class(optimizer(base), total_steps=total, decay_phase_ratio=0, num_checkpoints=count)
        values = [no_decay.get_updated_values(n)[0] for n in range(total + 2)]
        assert values[:total] == [base] * total
        assert all(0 <= value <= base for value in values)

    scheduler = wsd_class(optimizer(base), total_steps=total)
    scheduler.get_updated_values(50)
    alive = weakref.ref(scheduler)
    del scheduler
    gc.collect()
    assert alive() is None, "something keeps the scheduler and its optimizer alive"


def test_flaw_46_update_n_uses_value_n_of_the_schedule():
    cosine_class = subject.schedulers.CosineLrScheduler

    class Staircase(subject.schedulers.StatefulSchedulerBase):
        def get_updated_values(self, num_updates):
            return 0.001 * (num_updates + 1)

        def state_dict(self):
            return {"num_updates": self._num_updates}

        def load_state_dict(self, state):
            self._num_updates = state["num_updates"]

    trainer = subject.trainer()
    subject.fit(trainer, subject.data(16), num_epochs=2, create_scheduler_fn=Staircase)
    assert trainer.lrs == pytest.approx([0.001 * n for n in range(1, 9)])

    trainer = subject.trainer(lr=0.1)
    schedule = cosine_class.create_scheduler_fn(num_warmup_epochs=1)
    subject.fit(trainer, subject.data(16), num_epochs=3, create_scheduler_fn=schedule)
    reference = cosine_class(optimizer(0.1), 3, 4, num_warmup_epochs=1)
    assert trainer.lrs == pytest.approx([reference.get_updated_values(n)[0] for n in range(12)])

    # On its own, a scheduler goes on as documented: the first step() gives the value of update 0.
    alone = optimizer(0.1)
    Staircase(alone).step()
    assert alone.param_groups[0]["lr"] == pytest.approx(0.001)


def test_flaw_47_placeholders_are_arithmetic_and_nothing_else_is_evaluated():
    placeholders = subject.module("trainer").TrainerPlaceholderValues
    replace = subject.module("trainer").replace_trainer_placeholder_values
    epochs, updates = placeholders.NUM_EPOCHS, placeholders.NUM_UPDATE_STEPS_PER_EPOCH

    class Impostor:
        name = "NUM_EPOCHS"
        value = "setattr(trainer, 'was_executed', True)"

    impostor = Impostor()
    # In a run of 3 epochs of 4 updates each.
    cases = {
        "P": (lambda: partial(dict, n=updates), {"n": 4}),
        "2*P": (lambda: partial(dict, n=2 * updates), {"n": 8}),
        "P*2+1": (lambda: partial(dict, n=updates * 2 + 1), {"n": 9}),
        "(P+2)*3": (lambda: partial(dict, n=(updates + 2) * 3), {"n": 18}),
        "P//2": (lambda: partial(dict, n=updates // 2), {"n": 2}),
        "P*P": (lambda: partial(dict, n=updates * updates), {"n": 16}),
        "P*Q": (lambda: partial(dict, n=epochs * updates), {"n": 12}),
        "P-1": (lambda: partial(dict, n=updates - 1), {"n": 3}),
        "positional": (lambda: partial(lambda *args: args, epochs, updates * 2, 7), (3, 8, 7)),
        "nested": (lambda: partial(lambda inner: inner(), inner=partial(dict, n=updates * 2)), {"n": 8}),
        "impostor": (lambda: partial(dict, n=impostor), {"n": impostor}),
    }
    expected = {name: value for name, (_, value) in cases.items()}
    observed = {}

    def replace_all(trainer, **kwargs):
        for name, (make, _) in cases.items():
            try:
                observed[name] = replace(trainer, make())()
            except Exception as error:  # noqa: BLE001 - so that the report is complete
                observed[name] = repr(error)

    trainer = subject.trainer([subject.callback(on_training_run_start=replace_all)])
    subject.fit(trainer, subject.data(16), num_epochs=3)
    assert observed == expected
    assert not hasattr(trainer, "was_executed"), "the text in .value was executed"

    # Through the front door: of 12 updates, the second half at a tenth of the rate.
    trainer = subject.trainer(lr=0.05)
    schedule = partial(StepLR, step_size=epochs * updates // 2)
    subject.fit(trainer, subject.data(16), num_epochs=3, create_scheduler_fn=schedule)
    assert trainer.lrs == pytest.approx([0.05] * 6 + [0.005] * 6)


def test_flaw_48_timm_schedulers_get_true_counts_of_updates_and_epochs():
    class TimmShaped:
        """The shape of a timm scheduler; it only writes down its calls."""

        def __init__(self, optimizer):
            self.updates, self.epochs = [], []

        def step_update(self, num_updates, metric=None):
            self.updates.append(num_updates)

        def step(self, epoch, metric=None):
            self.epochs.append(epoch)

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    observed, expected = {}, {}
    for evaluates in (True, False):
        for accumulation, updates_per_epoch in ((1, 4), (3, 2)):
            trainer = subject.trainer(cls=subject.module("trainer").TrainerWithTimmScheduler)
            options = {"gradient_accumulation_steps": accumulation, "create_scheduler_fn": TimmShaped}
            eval_dataset = subject.data(4) if evaluates else None
            subject.fit(trainer, subject.data(16), num_epochs=2, eval_dataset=eval_dataset, **options)
            case = f"evaluates={evaluates}, accumulation={accumulation}"
            observed[case] = (trainer.scheduler.updates, trainer.scheduler.epochs)
            expected[case] = (list(range(1, 2 * updates_per_epoch + 1)), [1, 2])
    assert observed == expected


def test_flaw_49_freeze_with_eval_mode_freezes_and_unfreeze_without_train_mode_unfreezes():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Linear(2, 2), nn.Linear(2, 1))
    freezer = subject.finetuning.ModelFreezer(model)

    def frozen():
        return [not parameter.requires_grad for parameter in model.parameters()]

    def ids(parameters):
        return [id(parameter) for parameter in parameters]

    def modes():
        return [module.training for module in model]

    freezer.freeze(set_modules_as_eval=True)
    assert frozen() == [True] * 4 + [False] * 2
    assert modes() == [False, False, False, True]
    assert ids(freezer.get_trainable_parameters()) == ids(model[3].parameters())

    unfrozen = freezer.unfreeze(set_modules_as_training=False)
    assert frozen() == [False] * 6
    assert modes() == [False, False, False, True]
    assert unfrozen.keys() == {0, 2}
    assert all(ids(unfrozen[index]["params"]) == ids(model[index].parameters()) for index in unfrozen)

    model.train()
    freezer.freeze()
    assert frozen() == [True] * 4 + [False] * 2
    assert modes() == [True] * 4

    model.eval()
    freezer.unfreeze()
    assert frozen() == [False] * 6
    assert modes()[0] and modes()[2]


def test_flaw_50_parameters_of_nested_modules_are_frozen_too():
    embeddings = toys.net(class_token=nn.Parameter(torch.zeros(1, 4)), projection=nn.Linear(2, 4))
    scale = nn.Parameter(torch.ones(4))
    block = toys.net(attention=nn.MultiheadAttention(4, 2), scale=scale, norm=nn.BatchNorm1d(4))
    position = nn.Parameter(torch.zeros(1, 4))
    model = toys.net(position=position, embeddings=embeddings, block=block, head=nn.Linear(4, 1))
    freezer = subject.finetuning.ModelFreezer(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def frozen():
        return {name for name, parameter in model.named_parameters() if not parameter.requires_grad}

    def starting_with(*prefixes):
        return {name for name in names.values() if name.startswith(prefixes)}

    body = set(names.values()) - starting_with("head.", "block.norm.")  # batch norms stay unfrozen
    assert {"position", "embeddings.class_token", "block.attention.in_proj_weight", "block.scale"} <= body

    freezer.freeze()
    assert frozen() == body
    assert [group.is_frozen for group in freezer.get_layer_groups()] == [True, True, False]

    unfrozen = freezer.unfreeze()
    assert frozen() == set()
    returned = [names[id(parameter)] for group in unfrozen.values() for parameter in group["params"]]
    assert sorted(returned) == sorted(body)  # each once
    assert {names[id(parameter)] for parameter in unfrozen[1]["params"]} == body & starting_with("block.")

    # Freezing one group leaves the nested parameters of the others alone.
    freezer.freeze(1, 1)
    assert frozen() == body & starting_with("block.")
