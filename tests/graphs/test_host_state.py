"""A replay runs no Python: what that reads may change between updates, and then graphs are recorded again, or ended."""

import weakref
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

import toys
from graphs.recorder import EagerTrainer, FakeCapturer, GraphedTrainer
from graphs.tape import TapedTrainer
from loopwright.callbacks import TrainerCallback
from loopwright.training.run import run_of


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.dropout, self.options = nn.Dropout(0.2), {"scale": 1.0}

    def forward(self, inputs):
        return self.head(self.dropout(torch.tanh(self.norm(self.inner(inputs))))) * self.options["scale"]


def adamw(parameters, rate=2**-7):
    return torch.optim.AdamW(parameters, lr=rate, fused=True)


def trained(kind, model=Net, callbacks=(), loss=None, **options):
    """Train for six updates; `trainer.modes` has a letter for each: g for a graph, e for eager."""
    model = toys.seeded(model, seed=1)
    counts = toys.watch(on_update_end=lambda trainer, **kwargs: trainer.num_graphed_updates)
    loss = nn.CrossEntropyLoss() if loss is None else loss()
    trainer = kind(model, loss, adamw(model.parameters()), callbacks=[counts, *callbacks])
    settings = {"num_epochs": 2, "per_device_batch_size": 8, "seed": 5, "gradient_clip_norm": 0.5, **options}
    trainer.train(toys.labelled(20, 6, seed=2), train_dataloader_kwargs=toys.NO_WORKERS, **settings)
    trainer.modes = "".join("eg"[now - before] for before, now in zip([0, *counts.seen], counts.seen, strict=False))
    return trainer


def assert_same_as_eager(kind=TapedTrainer, callbacks=(), **options):
    graphed = trained(kind, callbacks=[make() for make in callbacks], **options)
    eager = trained(EagerTrainer, callbacks=[make() for make in callbacks], step_mode="eager", **options)
    toys.assert_same_weights(graphed, eager)
    losses = [each.run_history.get_metric_values("train_loss_epoch") for each in (graphed, eager)]
    assert losses[0] == losses[1]
    return graphed


@torch.no_grad()
def replace_data(trainer):
    trainer.model.inner.weight.data = trainer.model.inner.weight.data * 0.5


def replace_weight(trainer):
    trainer.model.head.weight = nn.Parameter(trainer.model.head.weight.detach() * 2)


def assign_state(trainer):
    state = {name: each.clone() for name, each in trainer.model.state_dict().items()}
    trainer.model.load_state_dict(state, assign=True)


def add_weights(trainer):
    model, extra = trainer.model, nn.Linear(3, 3, bias=False)
    model.extra = extra
    nn.init.eye_(extra.weight)
    model.register_forward_hook(lambda model, inputs, output: extra(output))
    trainer.optimizer.add_param_group({"params": list(extra.parameters())})


def watch_steps(trainer):
    class Shrinking(TrainerCallback):
        def on_before_optimizer_step(self, trainer, **kwargs):
            trainer.model.head.weight.grad.mul_(0.1)

    trainer.callback_handler.add_callbacks([Shrinking()])


def shrink_gradients(trainer):
    backward_step = trainer.backward_step
    trainer.backward_step = lambda loss: backward_step(loss * 0.1)


CHANGES = {
    "data": replace_data,
    "weight": replace_weight,
    "state": assign_state,
    "buffer": lambda trainer: setattr(trainer.model.norm, "running_mean", torch.ones(8)),
    "module": lambda trainer: setattr(trainer.model, "dropout", nn.Identity()),
    "number": lambda trainer: setattr(trainer.model.dropout, "p", 0.7),
    "entry": lambda trainer: trainer.model.options.update(scale=0.5),
    "mode": lambda trainer: trainer.model.norm.eval(),
    "loss": lambda trainer: setattr(trainer.loss_func, "label_smoothing", 0.3),
    "loss function": lambda trainer: setattr(trainer, "loss_func", nn.CrossEntropyLoss(label_smoothing=0.3)),
    "gradient hook": lambda trainer: trainer.model.head.weight.register_hook(lambda gradient: gradient * 0.1),
    "forward hook": lambda trainer: trainer.model.inner.register_forward_hook(lambda part, given, output: output / 2),
    "optimizer state": lambda trainer: trainer.optimizer.state.clear(),
    "optimizer": lambda trainer: setattr(trainer, "optimizer", adamw(trainer.model.parameters(), 2**-8)),
    "more weights": add_weights,
    "step callback": watch_steps,
    "step hook": shrink_gradients,
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_callback_changes_between_updates_is_followed(name):
    change = CHANGES[name]
    accumulation = 1 + list(CHANGES).index(name) % 2
    graphed = assert_same_as_eager(
        callbacks=[lambda: toys.at_update(3, change)], gradient_accumulation_steps=accumulation, num_epochs=3
    )
    last = {
        "step callback": "e",
        "step hook": "e",
        "optimizer state": "eg",
        "optimizer": "eg",
        "more weights": "eg",
    }.get(name, "gg")
    assert graphed.modes.startswith("egg" + last[0]) and set(graphed.modes[4:]) == {last[-1]}


def test_weights_that_are_replaced_before_every_update_end_graphs(tmp_path, capsys):
    def replacing(**options):
        replace = toys.callback(on_update_end=lambda trainer, **kwargs: replace_data(trainer))
        return trained(TapedTrainer, callbacks=[replace], num_epochs=3, **options)

    whole = replacing(checkpoints=toys.saving(tmp_path))
    assert whole.modes == "egggg" + "eeee"
    assert capsys.readouterr().out.count("not as CUDA graphs: weights are replaced") == 1
    for update in (2, 4):
        resumed = replacing(resume_from=toys.step(tmp_path, update))
        assert resumed.modes == whole.modes[update:]
        toys.assert_same_weights(resumed, whole)


class Counting(Net):
    def forward(self, inputs):
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(inputs) / self.calls


class Averaging(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, inputs):
        outputs = super().forward(inputs)
        self.mean = 0.9 * self.mean + 0.1 * outputs.detach().mean(0)
        return outputs - self.mean


class Drawing(Net):
    def __init__(self):
        super().__init__()
        self.generator = np.random.default_rng(1)

    def forward(self, inputs):
        return super().forward(inputs + self.generator.random())


class Nested(Net):
    def __init__(self):
        super().__init__()
        self.state = {"counts": [{"calls": 0}]}

    def forward(self, inputs):
        self.state["counts"][0]["calls"] += 1
        return super().forward(inputs) / self.state["counts"][0]["calls"]


class Remembering(Net):
    def __init__(self):
        super().__init__()
        self.lengths = deque(maxlen=4)

    def forward(self, inputs):
        self.lengths.append(len(self.lengths) + len(inputs))
        return super().forward(inputs) / sum(self.lengths)


class Fading:
    calls = 0

    def __call__(self, outputs, targets):
        self.calls += 1
        return nn.functional.cross_entropy(outputs, targets) * 0.9**self.calls


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"model": Counting}, "Counting.calls"),
        ({"model": Averaging}, "Averaging._buffers.mean"),
        ({"model": Drawing}, "Drawing.generator"),
        ({"model": Nested}, "Nested.state.counts.0.calls"),
        ({"model": Remembering}, "Remembering.lengths"),
        ({"loss": Fading}, "Fading.calls"),
    ],
)
@pytest.mark.parametrize("kind", [TapedTrainer, GraphedTrainer])
def test_a_forward_pass_that_changes_what_the_next_one_reads_is_not_recorded(kind, options, place, capsys):
    graphed = assert_same_as_eager(kind, **options)
    assert set(graphed.modes) == {"e"} and place in run_of(graphed).recordings.ended
    assert capsys.readouterr().out.count(f"the forward pass changes {place} on the host") == 1


class Noting(Net):
    """Keeps values of one pass for a look at them, which no other pass reads, and masks of all sizes."""

    def __init__(self):
        super().__init__()
        self.masks, self.mask = {}, None

    def forward(self, inputs):
        if len(inputs) not in self.masks:
            self.masks[len(inputs)] = torch.full((len(inputs), 3), 0.5)
            made.append(weakref.ref(self.masks[len(inputs)]))
        if self.mask is None or len(self.mask) != len(inputs):
            self.mask = torch.full((len(inputs), 1), 2.0)
            made.append(weakref.ref(self.mask))
        outputs = super().forward(inputs) * self.masks[len(inputs)] * self.mask
        self.penalty, self.shape = outputs.square().mean(), inputs.shape
        return outputs


made: list[weakref.ref] = []


@pytest.mark.parametrize("kind", [TapedTrainer, GraphedTrainer])
def test_values_of_one_pass_and_caches_do_not_keep_a_model_from_being_recorded(kind):
    graphed = assert_same_as_eager(kind, model=Noting, eval_dataset=toys.labelled(11, 6), evaluate_every=2)
    assert graphed.modes == "eggggg"


def test_graphs_keep_what_a_warm_up_made_for_them():
    alive = toys.watch(on_update_end=lambda trainer, **kwargs: [each() is not None for each in made])
    made.clear()
    trained(GraphedTrainer, model=Noting, callbacks=[alive], num_epochs=1)
    assert alive.seen[2][:4] == [True] * 4  # masks for eight rows, and those of the warm-up for four


class Reading(GraphedTrainer):
    """Does with its batches what user code does: takes out entries, counts classes from 1, asks for a gradient."""

    graph_safe = True

    def calculate_train_batch_loss(self, batch):
        targets, inputs = batch.pop("targets"), batch["inputs"].requires_grad_()
        targets -= 1
        outputs = self.model(inputs)
        (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        loss = nn.functional.cross_entropy(outputs, targets) + slope.square().mean()
        return {"loss": loss, "batch_size": len(targets)}


def as_batch(**others):
    def collate(samples):
        inputs, targets = default_collate(samples)
        return {"inputs": inputs, "targets": targets + 1, **others}

    return collate


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_step_may_change_its_batch(accumulation):
    options = {"collate_fn": as_batch(shape=torch.Size([2, 3])), "gradient_accumulation_steps": accumulation}
    graphed = trained(Reading, **options)
    toys.assert_same_weights(graphed, trained(Reading, step_mode="eager", **options))
    assert set(graphed.modes[1:]) == {"g"}


def test_a_batch_with_a_nested_tensor_is_run_eagerly(capsys):
    rows = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert set(trained(Reading, collate_fn=as_batch(rows=rows)).modes) == {"e"}
    assert "which cannot become a buffer" in capsys.readouterr().out


def test_any_error_of_a_recording_means_eager(capsys):
    class Failing(Net):
        def forward(self, inputs):
            if FakeCapturer.is_active:
                raise NotImplementedError if len(inputs) == 4 else KeyError("no such kernel")
            return super().forward(inputs)

    assert set(trained(GraphedTrainer, model=Failing).modes) == {"e"}
    assert capsys.readouterr().out.count("not as CUDA graphs: 'no such kernel'") == 1
