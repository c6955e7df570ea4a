"""A resumed run has the model of the first start, with all that its forward passes change, and ends where it ended."""

import random
import shutil
import time
from collections import defaultdict, deque
from functools import partial
from types import CellType, FunctionType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import relu

import toys
from loopwright import Checkpointing, Trainer
from loopwright.callbacks import (
    EarlyStoppingCallback,
    KeepStateCallback,
    ModelEmaCallback,
    SaveBestModelCallback,
    TrainerCallback,
)
from loopwright.checkpoint import ResumableState
from loopwright.checkpoint.hidden_state import changed_modules, describe_modules
from loopwright.cli.exit_codes import failure_of
from loopwright.errors import CheckpointError, StopTrainingError


class Wandering(nn.Module):
    """A model whose output depends on state that `state_dict` leaves out; `kind` says how it is kept."""

    def __init__(self, kind="buffer", size=3, act=relu):
        super().__init__()
        self.layer, self.kind, self.act, self.count = nn.Linear(4, 1), kind, act, 0
        if kind == "tensor":
            self.moved = torch.zeros(size)
        else:
            self.register_buffer("moved", None if kind == "late" else torch.zeros(size), persistent=False)

    def forward(self, inputs):
        if self.training:
            self.count += 1
            if self.kind == "in-place":
                self.moved += 0.25
            elif self.kind != "count":
                self.moved = (torch.zeros(3) if self.moved is None else self.moved) + 0.25
        shift = self.count if self.moved is None else self.moved[0] + self.count
        return self.act(self.layer(inputs)) + shift


def fit(folder, model, callbacks=(), num_epochs=2, dataset=None, loss=None, cls=Trainer, **kwargs):
    policy = {name: kwargs.pop(name) for name in ("allow_changed_model", "require_exact") if name in kwargs}
    checkpoints = None if folder is None else Checkpointing(folder, every_updates=1, keep_best=None, **policy)
    trainer = cls(model, loss or nn.MSELoss(), torch.optim.AdamW(model.parameters(), 0.01), callbacks=callbacks)
    resume_from = "auto" if folder is not None else None
    trainer.result = trainer.train(
        dataset or toys.data(16), num_epochs=num_epochs, per_device_batch_size=4, seed=1, checkpoints=checkpoints,
        resume_from=resume_from, **kwargs
    )  # fmt: skip
    return trainer


def made(make, seed=0):
    torch.manual_seed(seed)
    return make()


KINDS = ["buffer 3", "in-place 3", "in-place 70000", "buffer 70000", "late 3", "tensor 3", "count 3"]


@pytest.mark.parametrize("case", KINDS)
def test_state_outside_the_state_dict_is_saved_and_restored(case, tmp_path):
    kind, size = case.split()
    make = lambda: nn.Sequential(Wandering(kind, int(size)))  # noqa: E731
    whole = fit(None, made(make))
    fit(tmp_path, made(make), [toys.stop_at(3)])
    resumed = fit(tmp_path, made(make, seed=5))
    assert resumed.progress.update == 8 and torch.equal(toys.weights(resumed), toys.weights(whole))
    assert resumed.model[0].count == whole.model[0].count == 8
    assert kind == "count" or torch.equal(resumed.model[0].moved, whole.model[0].moved)


def test_the_buffers_of_averages_kept_parts_and_of_a_loop_of_ones_own_are_state_too(tmp_path):
    def run(folder, *callbacks):
        ema, part = ModelEmaCallback(0.5, False, tmp_path / "ema.pt"), Wandering("in-place")
        count = toys.callback(on_update_end=lambda trainer, **kwargs: part(torch.zeros(1, 4)))
        fit(folder, made(partial(Wandering, "in-place")), [ema, KeepStateCallback(part=part), count, *callbacks])
        return ema.ema_model.module.moved, part.moved

    whole = run(None)
    run(tmp_path / "run", toys.stop_at(3))
    assert all(map(torch.equal, run(tmp_path / "run"), whole)) and whole[1][0] == 2.0
    for steps in (1, 2):
        model = Wandering("in-place")
        state = ResumableState(
            Checkpointing(tmp_path / "own", keep_best=None), model, optimizer=torch.optim.SGD(model.parameters(), 0.1)
        )
        state.restore()
        model(torch.zeros(1, 4))
        state.save(steps, {})
        state.close()
    assert float(model.moved[0]) == 0.5


class Moving(nn.Module):
    """A model that adds `shift(self, inputs)`, which changes what `setup(self)` made."""

    total = 0

    def __init__(self, setup, shift):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.__dict__["shift"] = shift
        setup(self)

    def forward(self, inputs):
        return self.layer(inputs) + self.shift(self, inputs.detach())


class Meter:
    value = 0.0


def sets(**values):
    return lambda self: [setattr(self, name, make()) for name, make in values.items()]


def carries(self, inputs):
    h, c = self.x or (torch.zeros(3), torch.zeros(3))
    self.x = (h + inputs.mean(), c + 1)
    return h.sum()


def adds(self, inputs):
    self.x += 1
    return float(self.x.sum())


def counts(change):
    def shift(self, inputs):
        change(self.x)
        return float(len(self.x))

    return shift


def shares(self):
    self.x = self.y = []


def late_twin(self, inputs):
    if "twin" not in vars(self):
        del self.x
        self.twin = torch.zeros(2)
    self.total += 1
    self.twin += self.total
    return float(self.twin.sum())


SAVED = {
    "tuple of tensors": (sets(x=lambda: None), carries),
    "vector": (sets(x=float), lambda self, x: setattr(self, "x", 0.9 * self.x + 0.1 * x.mean(0)) or self.x.sum()),
    "list": (sets(x=list), counts(lambda x: x.append(0.5))),
    "dict": (sets(x=dict), counts(lambda x: x.update({len(x): torch.ones(2)}))),
    "deque": (sets(x=lambda: deque(maxlen=4)), counts(lambda x: x.append((1, "a")))),
    "set": (sets(x=set), counts(lambda x: x.add(len(x)))),
    "array": (sets(x=lambda: np.zeros(3)), adds),
    "generator": (sets(x=lambda: torch.Generator().manual_seed(3)), lambda self, x: torch.randn(1, generator=self.x)),
    "numpy generator": (sets(x=lambda: np.random.default_rng(3)), lambda self, x: self.x.random()),
    "python generator": (sets(x=lambda: random.Random(3)), lambda self, x: self.x.random()),
    "namespace": (sets(x=lambda: SimpleNamespace(n=0)), lambda self, x: setattr(self.x, "n", self.x.n + 1) or self.x.n),
    "large tensor": (sets(x=lambda: torch.zeros(70_000)), lambda self, x: self.x.data.add_(0.25)[0].item()),
    "two names": (shares, lambda self, x: self.x.append(1) or len(self.y)),
    "new, deleted and of the class": (sets(x=int), late_twin),
    "defaultdict": (sets(x=lambda: defaultdict(list)), counts(lambda x: x[len(x)].append(1))),
}  # fmt: skip
LOST = {
    "object": (sets(x=Meter), lambda self, x: setattr(self.x, "value", self.x.value + 1) or self.x.value),
    "objects": (sets(x=lambda: [Meter()]), lambda self, x: setattr(self.x[0], "value", 2.0) or 1.0),
    "iterator": (sets(x=lambda: iter(range(99))), lambda self, x: next(self.x)),
}  # fmt: skip


@pytest.mark.parametrize("kind", [*SAVED, *LOST])
def test_what_forward_passes_change_is_saved_or_lowers_the_guarantee(kind, tmp_path, capsys):
    make = partial(Moving, *(SAVED | LOST)[kind])

    def interrupt(trainer, step, **kwargs):
        if (trainer.progress.update, step) == (3, 3):  # inside an update
            raise KeyboardInterrupt

    options = {"gradient_accumulation_steps": 2, "num_epochs": 4}
    whole = fit(None, made(make), **options)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, made(make), [toys.callback(on_train_step_end=interrupt)], **options)
    capsys.readouterr()
    resumed = fit(tmp_path, made(make, seed=5), **options)
    said = capsys.readouterr().out
    if kind in SAVED:
        assert "guarantee T0, bit-exact" in said and torch.equal(toys.weights(resumed), toys.weights(whole))
    else:
        assert "Resuming without the state of model.x:" in said and "guarantee T2" in said
        with pytest.raises(CheckpointError, match=r"require_exact is set.*model\.x"):
            fit(tmp_path, made(make), require_exact=True, **options)


@pytest.mark.parametrize("freezes", [False, True])
def test_which_parameters_are_frozen_is_state(freezes, tmp_path):
    def make(is_frozen=not freezes):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        model[0].requires_grad_(not is_frozen)
        return model

    def change(trainer, **kwargs):
        if trainer.progress.update == 2:
            trainer.get_model()[0].requires_grad_(not freezes)

    callback = toys.callback(on_update_end=change)
    whole = fit(None, made(make), [callback])
    fit(tmp_path / "run", made(make), [callback, toys.stop_at(3)])
    for is_frozen in (not freezes, freezes):  # as built at first, or already as it is to be
        shutil.copytree(tmp_path / "run", tmp_path / str(is_frozen))
        resumed = fit(tmp_path / str(is_frozen), made(partial(make, is_frozen), seed=5), [callback])
        assert torch.equal(toys.weights(resumed), toys.weights(whole))


def test_attributes_of_ones_own_classes_are_printed_and_not_refused(tmp_path, capsys):
    names = iter(("a", "b", "c"))
    make = lambda: Moving(sets(x=lambda: next(names), y=lambda: tuple(range(700_000))), lambda self, x: 0.0)  # noqa: E731
    fit(tmp_path, made(make), [toys.stop_at(3)])
    assert fit(tmp_path, made(make)).progress.update == 8
    said = capsys.readouterr().out
    assert "(new value used): model.x: 'a' -> 'b'" in said and "but for the changes above" in said
    with pytest.raises(CheckpointError, match="require_exact"):
        fit(tmp_path, made(make), require_exact=True)


def stack(*layers):
    return lambda: nn.Sequential(*layers)


CHANGES = {
    "p": (stack(nn.Linear(4, 1), nn.Dropout(0.1)), stack(nn.Linear(4, 1), nn.Dropout(0.2))),
    "class": (stack(nn.Linear(4, 1), nn.Identity()), stack(nn.Linear(4, 1), nn.Dropout(0.2))),
    "more": (stack(nn.Linear(4, 1)), stack(nn.Linear(4, 1), nn.Tanh())),
    "frozen": (stack(nn.Linear(4, 4), nn.Linear(4, 1)), lambda: frozen(nn.Linear(4, 4), nn.Linear(4, 1))),
    "momentum": (stack(nn.BatchNorm1d(4), nn.Linear(4, 1)), stack(nn.BatchNorm1d(4, momentum=0.5), nn.Linear(4, 1))),
}
NAMED = {
    "p": "model.1.p: 0.1 -> 0.2", "class": "model.1: 'Identity' -> 'Dropout'", "more": "model.1: None -> 'Tanh'",
    "frozen": r"model.0.frozen parameters: \[\] -> \['weight'\]",
    "momentum": "model.0.momentum: 0.1 -> 0.5",
}  # fmt: skip


def frozen(*layers):
    layers[0].weight.requires_grad_(False)
    return nn.Sequential(*layers)


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_is_built_differently_is_refused_by_name(name, tmp_path, capsys):
    first, second = CHANGES[name]
    fit(tmp_path, made(first), [toys.stop_at(3)])
    with pytest.raises(CheckpointError, match=f"(?s){NAMED[name]}.*allow_changed_model=True") as caught:
        fit(tmp_path, made(second))
    assert caught.value.code == "resume.model" and failure_of(caught.value).exit_code == 2
    assert fit(tmp_path, made(second), allow_changed_model=True).progress.update == 8
    assert "Changed since the checkpoint (new value used): " + NAMED[name].replace("\\", "") in capsys.readouterr().out


def test_nan_equals_nan():
    model = nn.Linear(1, 1)
    model.unknown = float("nan")
    tree = describe_modules(model=model)
    assert changed_modules(tree, {**tree}, ()) == ([], [])


def test_a_changed_loss_function_is_reported(tmp_path, capsys):
    fit(tmp_path, made(Wandering), [toys.stop_at(3)], loss=nn.HuberLoss())
    assert fit(tmp_path, made(Wandering), loss=nn.HuberLoss(delta=0.5)).progress.update == 8
    assert "loss_func.delta: 1.0 -> 0.5" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------ the end of a run


class Stops(TrainerCallback):
    """Counts updates, and holds what a new object never has again."""

    def __init__(self, limit, how="request"):
        self.limit, self.how, self.count, self.worst, self.begun = limit, how, 0, float("inf"), time.time()
        self.function = FunctionType((lambda: limit).__code__, {}, closure=(CellType(),))  # the cell is empty

    def on_update_end(self, trainer, **kwargs):
        self.count += 1
        if self.limit <= (self.count if "count" in self.how else trainer.progress.update):
            if self.how == "error":
                raise StopTrainingError("enough")
            trainer.request_stop("enough")

    def state_dict(self):
        return {"count": self.count} if self.how == "counts on" else {}

    def load_state_dict(self, state):
        vars(self).update(state)


STOPS = {
    "early stopping": lambda more=0: EarlyStoppingCallback(1 + more, 100.0, "train_loss_epoch"),
    "lambda": lambda more=0: toys.stop_at(5 + more),
    **{how: lambda more=0, how=how: Stops(5 + more, how) for how in ("request", "error", "counts", "counts on")},
}


@pytest.mark.parametrize("point", ["before_final_save", "run_end", "after", "last state"])
@pytest.mark.parametrize("stop", STOPS)
def test_a_run_that_ended_by_its_own_rule_stays_ended_until_the_rule_is_changed(stop, point, tmp_path, monkeypatch):
    whole = fit(None, made(lambda: nn.Linear(4, 1)), [STOPS[stop]()], num_epochs=4)

    def killed(name):
        if name == point:
            raise SystemError

    monkeypatch.setattr("loopwright.training.run.failpoint", killed)
    monkeypatch.setattr("loopwright.training.checkpoints.failpoint", killed)
    try:
        fit(tmp_path, made(lambda: nn.Linear(4, 1)), [STOPS[stop]()], num_epochs=4)
    except SystemError:
        assert point in ("before_final_save", "run_end")
    monkeypatch.undo()
    for _ in range(2):
        resumed = fit(tmp_path, made(lambda: nn.Linear(4, 1), seed=3), [STOPS[stop]()], num_epochs=4)
        assert resumed.progress.update == whole.progress.update < 16
        assert resumed.result.stop_reason == whole.result.stop_reason
        assert resumed.result.stop_reason.kind == whole.result.stop_reason.kind
        assert torch.equal(toys.weights(resumed), toys.weights(whole))
    on = fit(tmp_path, made(lambda: nn.Linear(4, 1)), [STOPS[stop](1)], num_epochs=4)
    assert on.progress.update == whole.progress.update + {"early stopping": 4, "counts": 6}.get(stop, 1)
    assert fit(tmp_path, made(lambda: nn.Linear(4, 1)), num_epochs=4).progress.update == 16


class StopsInAHook(Trainer):
    limit = 5

    def optimizer_zero_grad(self):
        super().optimizer_zero_grad()
        if self.progress.update + 1 >= self.limit:
            self.request_stop("enough")


def test_a_hook_and_a_callback_that_is_used_again_are_rules_too(tmp_path):
    other, same = type("StopsInAHook", (StopsInAHook,), {"limit": 7}), Stops(5, "counts")
    for name, cls, update in (*2 * [("hook", StopsInAHook, 5)], ("hook", other, 7), *2 * [("same", Trainer, 5)]):
        trainer = fit(tmp_path / name, made(lambda: nn.Linear(4, 1)), [same] if name == "same" else [], cls=cls)
        assert trainer.progress.update == update


class Bank(nn.Module):
    """Keeps the mean of every batch in a buffer, which grows; `first` is its length at the start."""

    def __init__(self, first=0):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("bank", None if first is None else torch.zeros(first))

    def forward(self, inputs):
        if self.training:
            bank = torch.zeros(0) if self.bank is None else self.bank
            self.bank = torch.cat([bank, inputs.detach().mean().reshape(1)])
        return self.layer(inputs) + (0 if self.bank is None else self.bank.sum())


class BankLoss(Bank):
    def forward(self, outputs, targets):
        return super().forward(torch.cat([outputs, targets, targets, targets], dim=1)).square().mean()


class LoadsItself(Bank):
    def _load_from_state_dict(self, state, prefix, *args):
        self.bank = torch.zeros(len(state[f"{prefix}bank"]))
        super()._load_from_state_dict(state, prefix, *args)


class LoadsAll(nn.Sequential):
    def load_state_dict(self, state, *args, **kwargs):
        self[0].bank = torch.zeros(len(state["0.bank"]))
        return super().load_state_dict(state, *args, **kwargs)


@pytest.mark.parametrize("make", [Bank, partial(Bank, None), partial(Bank, 2), LoadsItself, lambda: LoadsAll(Bank())])
def test_a_buffer_that_grew_in_training_resumes_with_its_shape(make, tmp_path):
    whole = fit(None, made(make), loss=BankLoss())
    fit(tmp_path, made(make), [toys.stop_at(3)], loss=BankLoss())
    resumed = fit(tmp_path, made(make, seed=5), loss=BankLoss(), require_exact=True)
    toys.assert_same_weights(resumed, whole)
    toys.assert_same_weights(resumed.loss_func, whole.loss_func)
    assert len(resumed.loss_func.bank) == 8


def test_a_model_built_with_another_buffer_is_refused_and_unchanged(tmp_path):
    fit(tmp_path, made(partial(Bank, 2)), [toys.stop_at(3)])
    model = made(partial(Bank, 3), seed=5)
    before = toys.state_of(model)
    with pytest.raises(CheckpointError, match=r"bank: \(5,\) saved, \(3,\) in the model"):
        fit(tmp_path, model)
    toys.assert_same(toys.state_of(model), before)


def test_best_models_averages_and_a_loop_of_ones_own_have_buffers_that_grow(tmp_path):
    average = partial(ModelEmaCallback, evaluate_during_training=False, save_path=tmp_path / "ema.pt", update_every=3)
    best = SaveBestModelCallback(tmp_path / "best.pt", watch_metric="train_loss_epoch", greater_is_better=True)
    trainer = fit(tmp_path / "run", made(Bank), [average(), best, toys.stop_at(7)])
    assert len(trainer.model.bank) == 4, "the first epoch was the best"
    fit(tmp_path / "run", made(Bank, seed=5), [again := average()])
    assert len(again.ema_model.module.bank) == 6
    for update in (1, 2):
        model, policy = Bank(), Checkpointing(tmp_path / "own", keep_best=None)
        with ResumableState(policy, model) as state:
            state.restore()
            model(torch.ones(2, 4))
            state.save(update, {}, wait=True)
        assert len(model.bank) == update
    with pytest.raises(CheckpointError, match="is from another model"):
        ResumableState(policy, Bank(4)).restore()
