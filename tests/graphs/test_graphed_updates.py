"""Updates as graphs, with a stand-in for CUDA: which ones are graphs, that they are the same updates, and when not."""

import gc
import random
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import toys
from graphs.recorder import EagerTrainer, FakeCapturer, GraphedTrainer
from loopwright import Trainer
from loopwright.callbacks import DEFAULT_CALLBACKS, StepBasedEvaluationCallback, TrainerCallback
from loopwright.checkpoint import Checkpointing
from loopwright.data.buckets import with_buckets
from loopwright.data.collators import (
    DataCollatorForLanguageModeling,
    DataCollatorForMultipleChoice,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
)
from loopwright.engine.graphs import NotYetCapturableError, Step, UpdateGraphs
from loopwright.errors import ConfigError
from loopwright.schedulers import CosineLrScheduler
from loopwright.stepping.graphs import prepare_optimizer


def a_model() -> nn.Module:
    def layers() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Dropout(0.2), nn.Linear(12, 3))

    return toys.seeded(layers, seed=1)


def a_dataset(rows: int = 42) -> TensorDataset:
    return toys.labelled(rows, 6, seed=2)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)


def trained(kind: type[Trainer], make_optimizer: Any = adamw, **options: Any) -> Any:
    model = a_model()
    trainer = kind(model, nn.CrossEntropyLoss(), make_optimizer(model), callbacks=options.pop("callbacks", []))
    settings = {"num_epochs": 3, "per_device_batch_size": 8, "seed": 5, "log_every": 2, **options}
    trainer.train(a_dataset(), **settings)
    return trainer


def assert_same(one: Any, other: Any) -> None:
    toys.assert_same_weights(one, other)
    losses = [trainer.run_history.get_metric_values("train_loss_epoch") for trainer in (one, other)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("make_optimizer", [adamw, momentum], ids=["adamw", "sgd with momentum"])
@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_graphed_updates_have_the_bits_of_eager_ones(make_optimizer: Any, accumulation: int) -> None:
    schedule = CosineLrScheduler.create_scheduler_fn(3, 3, num_warmup_epochs=1)
    options: dict[str, Any] = {"gradient_accumulation_steps": accumulation, "create_scheduler_fn": schedule}
    options["gradient_clip_norm"] = 1.0
    eager = trained(EagerTrainer, make_optimizer, step_mode="eager", **options)
    graphed = trained(GraphedTrainer, make_optimizer, **options)
    assert graphed.capturer is not None and graphed.capturer.num_replays > 0
    assert_same(eager, graphed)


def test_the_first_update_and_short_batches_are_not_graphs() -> None:
    trainer = trained(GraphedTrainer)  # 42 rows by 8: five full batches and one of 2
    assert trainer.capturer.num_captures == 1
    assert trainer.capturer.num_replays == 3 * 5 - 1


def test_a_window_of_several_micro_batches_is_one_graph_for_them_and_one_for_the_optimizer() -> None:
    trainer = trained(GraphedTrainer, gradient_accumulation_steps=2)
    assert trainer.capturer.num_captures == 2
    assert trainer.capturer.num_replays == (3 * 2 - 1) * 3  # two full windows per epoch, two micro-batches and a step


def test_a_trainer_that_is_done_keeps_no_graphs_and_needs_no_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        trainer = trained(GraphedTrainer)
        held = weakref.ref(trainer.capturer)
        trainer.capturer = None
        assert held() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", [Trainer, GraphedTrainer], ids=["eager", "graphs"])
def test_nothing_of_an_update_is_kept_when_it_is_over(kind: type[Trainer]) -> None:
    trainer = trained(kind, max_num_train_steps=1)
    weight = trainer.model[0].weight
    accumulator = weight.view_as(weight).grad_fn.next_functions[0][0]  # the same one as long as a backward pass lives
    assert not accumulator.metadata
    alive = []

    class Mark(TrainerCallback):
        graph_safe = True

        def on_train_step_end(self, trainer: Any, **kwargs: Any) -> None:
            weight.view_as(weight).grad_fn.next_functions[0][0].metadata["seen"] = True

        def on_update_end(self, trainer: Any, **kwargs: Any) -> None:
            alive.append(bool(weight.view_as(weight).grad_fn.next_functions[0][0].metadata))

    del accumulator
    trainer.callback_handler.add_callbacks([Mark()])
    trainer.train(a_dataset(), num_epochs=1, per_device_batch_size=8)
    assert alive and not any(alive)


def test_the_share_of_graphed_updates_is_logged() -> None:
    logs = toys.watch(on_log=lambda trainer, logs, **kwargs: logs["graphed_updates"])
    assert trained(GraphedTrainer, callbacks=[logs]).capturer.num_replays == sum(logs.seen)


def test_warming_up_and_recording_leave_no_trace() -> None:
    eager, graphed = (toys.watch(on_update_end=lambda trainer, **kwargs: toys.state_of(trainer)) for _ in range(2))
    trained(EagerTrainer, callbacks=[eager], step_mode="eager")
    trained(GraphedTrainer, callbacks=[graphed])
    toys.assert_same(eager.seen, graphed.seen)


def test_an_update_that_cannot_be_recorded_is_run_and_the_reason_is_reported_once(capsys: Any) -> None:
    class Failing(GraphedTrainer):
        fails_with = "operation not permitted when stream is capturing\nmore lines"

    assert_same(trained(Trainer, step_mode="eager"), trained(Failing))
    said = capsys.readouterr().out
    assert said.count("not as CUDA graphs: operation not permitted when stream is capturing\n") == 1


def test_a_forward_pass_that_draws_on_the_host_is_not_recorded(capsys: Any) -> None:
    class Jitter(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs) * random.random()

    model = Jitter(6, 3)
    GraphedTrainer(model, nn.CrossEntropyLoss(), adamw(model), callbacks=[]).train(a_dataset(), num_epochs=1, seed=1)
    assert "draws random numbers on the host" in capsys.readouterr().out


def test_an_overridden_step_hook_means_eager_unless_it_is_declared_safe(capsys: Any) -> None:
    class Overriding(GraphedTrainer):
        def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
            return super().calculate_train_batch_loss(batch)

    assert trained(Overriding).capturer is None
    assert "Overriding.calculate_train_batch_loss must see every step" in capsys.readouterr().out
    Overriding.graph_safe = True
    assert trained(Overriding).capturer.num_replays > 0


def test_a_callback_of_steps_means_eager_unless_it_is_declared_safe(capsys: Any) -> None:
    class Stepping(TrainerCallback):
        def on_before_optimizer_step(self, trainer: Any, **kwargs: Any) -> None:
            pass

    assert trained(GraphedTrainer, callbacks=[Stepping]).capturer is None
    assert "Stepping.on_before_optimizer_step must see every step" in capsys.readouterr().out
    Stepping.graph_safe = True
    assert trained(GraphedTrainer, callbacks=[Stepping]).capturer.num_replays > 0


def test_the_callbacks_of_loopwright_do_not_stand_in_the_way() -> None:
    callbacks = [*DEFAULT_CALLBACKS, StepBasedEvaluationCallback(2)]
    assert trained(GraphedTrainer, callbacks=callbacks).capturer.num_replays > 0


def test_skipping_updates_means_eager(capsys: Any) -> None:
    assert trained(GraphedTrainer, nan="skip").capturer is None
    assert "checks every update" in capsys.readouterr().out


def test_an_optimizer_that_reads_its_rate_on_the_host_means_eager(capsys: Any) -> None:
    class Own(torch.optim.SGD):
        pass

    assert trained(GraphedTrainer, lambda model: Own(model.parameters(), lr=0.1)).capturer is None
    assert "Own is not one of torch's optimizers" in capsys.readouterr().out


def test_unfreezing_weights_records_again() -> None:
    class Unfreeze(TrainerCallback):
        def on_train_epoch_start(self, trainer: Any, **kwargs: Any) -> None:
            trainer.model[0].requires_grad_(trainer.run_history.current_epoch > 1)

    eager = trained(EagerTrainer, callbacks=[Unfreeze], step_mode="eager")
    graphed = trained(GraphedTrainer, callbacks=[Unfreeze])
    assert graphed.capturer.num_captures >= 2
    assert_same(eager, graphed)


def test_a_changed_setting_of_the_optimizer_is_followed() -> None:
    class Change(TrainerCallback):
        def on_update_end(self, trainer: Any, **kwargs: Any) -> None:
            trainer.optimizer.param_groups[0]["weight_decay"] = 0.5 if trainer.progress.update > 6 else 0.01

    eager = trained(EagerTrainer, callbacks=[Change], step_mode="eager")
    assert_same(eager, trained(GraphedTrainer, callbacks=[Change]))


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Any) -> None:
    whole = trained(GraphedTrainer)
    options = {"checkpoints": Checkpointing(tmp_path / "run", every_updates=4), "resume_from": "auto"}
    trained(GraphedTrainer, callbacks=[toys.stop_at(8)], **options)
    resumed = trained(GraphedTrainer, **options)
    assert resumed.capturer.num_replays > 0
    toys.assert_same_weights(resumed, whole)


def test_asking_for_graphs_on_the_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match='needs a CUDA device, and this run is on cpu. Use "auto"'):
        trained(Trainer, step_mode="graph")


def test_graphs_on_the_cpu_are_refused_before_anything_is_written(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        trained(Trainer, step_mode="graph", checkpoints=Checkpointing(tmp_path / "run", every_updates=1))
    assert not (tmp_path / "run").exists()


def test_losses_per_item_are_weighed_the_same_in_graphs() -> None:
    def counting(kind: type[Trainer]) -> type[Trainer]:
        return type("Counting", (kind,), {"count_batch_items": lambda self, batch: float(batch[1].sum()) + 1})

    options = {"gradient_accumulation_steps": 2}
    graphed = trained(counting(GraphedTrainer), **options)
    assert graphed.capturer.num_replays > 0
    assert_same(trained(counting(EagerTrainer), step_mode="eager", **options), graphed)


class Padding:
    """Pads sequences to one of a few lengths."""

    bucket_lengths = (4, 8)

    def __call__(self, samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        longest = max(len(sample) for sample in samples)
        length = min(each for each in (4, 8, 12) if each >= longest)
        ids = torch.stack([nn.functional.pad(sample, (0, length - len(sample))) for sample in samples])
        return {"inputs": ids.float(), "labels": ids.sum(1).remainder(2).long()}


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs.mean(1, keepdim=True))


def read(samples: Any, **options: Any) -> Any:
    """Train a reader on samples in their order, as graphs."""
    model = toys.seeded(Reader)
    trainer = GraphedTrainer(model, nn.CrossEntropyLoss(), adamw(model), callbacks=[])
    trainer.train(samples, train_dataloader_kwargs={"shuffle": False}, **options)
    assert trainer.capturer is not None
    return trainer


def test_the_lengths_that_a_collator_pads_to_are_graphs_and_others_are_not() -> None:
    lengths = [2] * 8 + [6] * 8 + [11] * 8
    samples = [torch.arange(length) for length in lengths]
    trainer = read(samples, num_epochs=2, per_device_batch_size=4, collate_fn=Padding())
    assert trainer.capturer.num_captures == 2  # of length 4 and of length 8
    assert trainer.capturer.num_replays == 2 * 4 - 1  # of six updates per epoch two have another length


def stacked(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    ids = torch.stack(samples)
    return {"inputs": ids.float(), "labels": ids.sum(1).remainder(2).long()}


@pytest.mark.parametrize("collate_fn", [Padding(), stacked], ids=["to bucket lengths", "as they are"])
@pytest.mark.parametrize("num_bad", [1, 8], ids=["one is bad", "all are bad"])
def test_bad_samples_in_the_first_micro_batch_leave_the_others_as_graphs(collate_fn: Any, num_bad: int) -> None:
    class SomeAreBad(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 120

        def __getitem__(self, index: int) -> torch.Tensor:
            if index < num_bad:
                raise ValueError("damaged")
            return torch.arange(3)

    options = {"per_device_batch_size": 8, "collate_fn": collate_fn, "bad_samples": "skip"}
    assert read(SomeAreBad(), num_epochs=1, **options).capturer.num_replays == 120 // 8 - 1


def test_garbage_is_collected_once_before_the_first_recording() -> None:
    model = a_model()
    optimizer = adamw(model)
    inputs, labels = a_dataset(8).tensors

    def micro_batch(given: Any) -> dict[str, torch.Tensor]:
        loss = nn.functional.cross_entropy(model(given["inputs"]), given["labels"])
        loss.backward()
        return {"loss": loss.detach()}

    step = Step(
        micro_batch=micro_batch,
        apply=lambda: optimizer.step(),
        begin=lambda: None,
        restore=lambda: None,
        parameters=list(model.parameters()),
        optimizer=optimizer,
        device=torch.device("cpu"),
    )
    model[3].p = 0.0  # on the CPU it would be drawn on the host
    graphs = UpdateGraphs(step, FakeCapturer(model, optimizer))
    collected = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            collected.append(info)

    gc.disable()
    gc.callbacks.append(note)
    try:
        for _ in range(3):  # the optimizer has no state yet, each time
            with pytest.raises(NotYetCapturableError):
                graphs.replay([{"inputs": inputs, "labels": labels}], lambda index: None, lambda index, output: None)
    finally:
        gc.callbacks.remove(note)
        gc.enable()
    assert len(collected) == 1


class Pads:
    """All that a padding collator needs of a tokenizer."""

    pad_token_id = 0
    model_input_names = ("input_ids", "attention_mask")


class Counting(nn.Module):
    """Scores of what tokens have in common, whatever the number of texts of a sample."""

    def __init__(self, num_scores: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(1, num_scores)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.layer((input_ids * attention_mask).float().mean(-1, keepdim=True)).squeeze(-1)


class Scoring(GraphedTrainer):
    graph_safe = True

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        scores = self.model(batch["input_ids"], batch["attention_mask"])
        return {"loss": self.loss_func(scores, batch["labels"]), "batch_size": len(scores)}


def scored(collate: Any, samples: list[dict[str, Any]], num_scores: int, loss: nn.Module) -> Any:
    model = Counting(num_scores)
    trainer = Scoring(model, loss, adamw(model), callbacks=[])
    options: dict[str, Any] = {"collate_fn": with_buckets(collate, (4, 8)), "seed": 1}
    trainer.train(samples, num_epochs=2, per_device_batch_size=4, train_dataloader_kwargs={"shuffle": False}, **options)
    return trainer


def test_batches_with_several_labels_are_graphs_and_those_of_another_length_are_not() -> None:
    samples = [{"input_ids": [1] * length, "labels": [1.0, 0.0, 1.0]} for length in [2] * 8 + [6] * 8 + [11] * 4]
    trainer = scored(DataCollatorWithPadding(Pads()), samples, 3, nn.BCEWithLogitsLoss())
    assert trainer.capturer is not None
    assert trainer.capturer.num_captures == 2  # of length 4 and of length 8
    assert trainer.capturer.num_replays == 2 * 4 - 1


def test_choices_are_graphs_and_another_number_of_choices_is_not() -> None:
    def sample(length: int, num_choices: int) -> dict[str, Any]:
        return {"input_ids": [[1] * length, *[[2] * 2] * (num_choices - 1)], "labels": 0}

    samples = [sample(length, 3) for length in [3] * 8 + [7] * 4 + [12] * 4] + [sample(3, 2) for _ in range(4)]
    trainer = scored(DataCollatorForMultipleChoice(Pads()), samples, 1, nn.CrossEntropyLoss())
    assert trainer.capturer is not None
    assert trainer.capturer.num_captures == 2  # of length 4 and of length 8
    assert trainer.capturer.num_replays == 2 * 3 - 1  # of five updates per epoch


def test_every_padding_collator_says_which_dimensions_are_lengths() -> None:
    tokens = {"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1]}
    whole = {"input_ids": 1, "attention_mask": 1}
    cases: list[tuple[Any, dict[str, Any], dict[str, int]]] = [
        (DataCollatorWithPadding(Pads()), {**tokens, "labels": [1.0, 0.0]}, whole),
        (DataCollatorForTokenClassification(Pads()), {**tokens, "labels": [1, 2, 3]}, {**whole, "labels": 1}),
        (DataCollatorForSeq2Seq(Pads()), {**tokens, "labels": [1, 2]}, {**whole, "labels": 1}),
        (DataCollatorForLanguageModeling(Pads(), mlm=False), tokens, {**whole, "labels": 1}),
        (
            DataCollatorForMultipleChoice(Pads()),
            {**{name: [value, value] for name, value in tokens.items()}, "labels": 1},
            {"input_ids": 2, "attention_mask": 2},
        ),
    ]
    for collate, sample, expected in cases:
        batch = with_buckets(collate, (5,))([sample])
        said = collate.padded_dimensions(batch)
        assert {name: dimension for name, dimension in said.items() if name in batch} == expected, collate
        assert all(batch[name].shape[dimension] == 5 for name, dimension in expected.items()), collate
    assert len(cases) == 5


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        (torch.optim.AdamW, {}, {"fused": True, "capturable": False}),
        (torch.optim.Adam, {"fused": False}, {"fused": False, "capturable": True}),
        (torch.optim.AdamW, {"foreach": True}, {"fused": None, "foreach": True, "capturable": True}),
        (torch.optim.SGD, {"momentum": 0.9}, {"fused": True}),
        (torch.optim.NAdam, {}, {"capturable": True}),
    ],
    ids=["AdamW", "Adam not fused", "AdamW foreach", "SGD", "NAdam"],
)
def test_an_optimizer_that_is_recorded_takes_its_fused_kernel_unless_it_says_otherwise(kind, given, expected):
    optimizer = kind([nn.Parameter(torch.ones(2))], lr=0.1, **given)

    prepare_optimizer(optimizer)

    (group,) = optimizer.param_groups
    assert {name: group[name] for name in expected} == expected


def test_only_updates_that_are_graphs_change_how_an_optimizer_computes():
    kernels = {}
    for kind in (GraphedTrainer, Trainer):
        model = nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        toys.trained(model=model, optimizer=optimizer, cls=kind)
        kernels[kind] = optimizer.param_groups[0]["fused"]

    assert kernels == {GraphedTrainer: True, Trainer: None}
