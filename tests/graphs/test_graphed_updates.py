"""Updates as graphs, with a stand-in for CUDA: which ones are graphs, that they are the same updates, and when not."""

import gc
import random
import weakref

import pytest
import torch
from torch import nn

import toys
from graphs.recorder import EagerTrainer, FakeCapturer, GraphedTrainer
from loopwright import Trainer
from loopwright.callbacks import DEFAULT_CALLBACKS, StepBasedEvaluationCallback, TrainerCallback
from loopwright.checkpoint import Checkpointing
from loopwright.data import collators
from loopwright.data.buckets import with_buckets
from loopwright.engine.graphs import NotYetCapturableError, Step, UpdateGraphs, draws_on_host
from loopwright.engine.layers import num_idle_draws
from loopwright.engine.seeding import generator_states
from loopwright.errors import ConfigError
from loopwright.schedulers import CosineLrScheduler
from loopwright.stepping.graphs import prepare_optimizer


def a_model():
    def layers():
        return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Dropout(0.2), nn.Linear(12, 3))

    return toys.seeded(layers, seed=1)


def a_dataset(rows=42):
    return toys.labelled(rows, 6, seed=2)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)


def trained(kind=GraphedTrainer, make_optimizer=adamw, callbacks=(), **options):
    model = a_model()
    trainer = kind(model, nn.CrossEntropyLoss(), make_optimizer(model), callbacks=callbacks)
    trainer.train(a_dataset(), **{"num_epochs": 3, "per_device_batch_size": 8, "seed": 5, "log_every": 2, **options})
    return trainer


def assert_same(one, other):
    toys.assert_same_weights(one, other)
    losses = [trainer.run_history.get_metric_values("train_loss_epoch") for trainer in (one, other)]
    assert losses[0] == losses[1]


def assert_same_as_eager(**options):
    """Updates as graphs have the bits of eager ones; return the trainer that ran graphs."""
    graphed = trained(**options)
    assert graphed.capturer.num_replays > 0
    assert_same(trained(EagerTrainer, step_mode="eager", **options), graphed)
    return graphed


@pytest.mark.parametrize("make_optimizer", [adamw, momentum], ids=["adamw", "sgd with momentum"])
@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_graphed_updates_have_the_bits_of_eager_ones(make_optimizer, accumulation):
    options = {"gradient_accumulation_steps": accumulation, "gradient_clip_norm": 1.0}
    schedule = CosineLrScheduler.create_scheduler_fn(3, 3, num_warmup_epochs=1)
    assert_same_as_eager(make_optimizer=make_optimizer, create_scheduler_fn=schedule, **options)


def test_the_first_update_is_not_a_graph_and_a_window_is_several():
    capturer = trained().capturer  # 42 rows by 8: five full batches and one of 2
    assert (capturer.num_captures, capturer.num_replays) == (2, 3 * 6 - 1)
    capturer = trained(gradient_accumulation_steps=2).capturer  # for 8 rows, for 2 rows, and for the optimizer
    assert capturer.num_captures == 3
    assert capturer.num_replays == (3 * 3 - 1) * 3  # three windows per epoch, two micro-batches and a step
    capturer = trained(gradient_accumulation_steps=4).capturer  # the last window has two micro-batches: no new shape
    assert (capturer.num_captures, capturer.num_replays) == (3, 2 * 5 + 3 * 3)


def test_a_trainer_that_is_done_keeps_no_graphs_and_needs_no_garbage_collector():
    gc.collect()
    gc.disable()
    try:
        trainer = trained()
        held = weakref.ref(trainer.capturer)
        trainer.capturer = None
        assert held() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", [Trainer, GraphedTrainer], ids=["eager", "graphs"])
def test_nothing_of_an_update_is_kept_when_it_is_over(kind):
    trainer = trained(kind, max_num_train_steps=1)
    weight = trainer.model[0].weight
    accumulator = weight.view_as(weight).grad_fn.next_functions[0][0]  # the same one as long as a backward pass lives
    assert not accumulator.metadata
    alive = []

    class Mark(TrainerCallback):
        graph_safe = True

        def on_train_step_end(self, trainer, **kwargs):
            weight.view_as(weight).grad_fn.next_functions[0][0].metadata["seen"] = True

        def on_update_end(self, trainer, **kwargs):
            alive.append(bool(weight.view_as(weight).grad_fn.next_functions[0][0].metadata))

    del accumulator
    trainer.callback_handler.add_callbacks([Mark()])
    trainer.train(a_dataset(), num_epochs=1, per_device_batch_size=8)
    assert alive and not any(alive)


def test_warming_up_and_recording_leave_no_trace_and_the_share_of_graphed_updates_is_logged():
    eager, graphed = (toys.watch(on_update_end=lambda trainer, **kwargs: toys.state_of(trainer)) for _ in range(2))
    logs = toys.watch(on_log=lambda trainer, logs, **kwargs: logs["graphed_updates"])
    trained(EagerTrainer, callbacks=[eager], step_mode="eager")
    assert trained(callbacks=[graphed, logs]).capturer.num_replays == sum(logs.seen)
    toys.assert_same(eager.seen, graphed.seen)


def test_an_update_that_cannot_be_recorded_is_run_and_the_reason_is_reported_once(capsys):
    class Failing(GraphedTrainer):
        fails_with = "operation not permitted when stream is capturing\nmore lines"

    assert_same(trained(Trainer, step_mode="eager"), trained(Failing))
    said = capsys.readouterr().out
    assert said.count("not as CUDA graphs: operation not permitted when stream is capturing\n") == 1


def test_a_forward_pass_that_draws_on_the_host_is_not_recorded(capsys):
    class Jitter(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs) * random.random()

    model = Jitter(6, 3)
    GraphedTrainer(model, nn.CrossEntropyLoss(), adamw(model), callbacks=[]).train(a_dataset(), num_epochs=1, seed=1)
    assert "draws random numbers on the host" in capsys.readouterr().out


@pytest.mark.parametrize(("layerdrop", "extra", "is_refused"), [(0.0, 0, False), (0.0, 1, True), (0.1, 0, True)])
def test_numbers_drawn_to_skip_no_layer_do_not_keep_a_model_from_being_recorded(layerdrop, extra, is_refused):
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 8, "vocab_size": 20, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "dropout": 0.0}
    layers = {"encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = transformers.BartConfig(**sizes, **layers, encoder_layerdrop=layerdrop)
    model = transformers.BartForConditionalGeneration(config).train()
    torch.manual_seed(0)
    before = generator_states()
    ids = torch.ones(2, 4, dtype=torch.long)
    model(input_ids=ids, labels=ids)
    torch.rand(extra)
    # On a GPU nothing else of this forward pass is drawn on the host.
    assert draws_on_host(before, torch.device("cuda"), num_idle_draws(model)) == is_refused
    assert draws_on_host(generator_states(), torch.device("cuda"), num_idle_draws(model)) is False


def test_an_optimizer_that_was_recorded_on_a_gpu_steps_on_the_cpu():
    def recorded(model):
        optimizer = torch.optim.RMSprop(model.parameters(), lr=2**-9)
        optimizer.param_groups[0]["capturable"] = True  # as a checkpoint of a run on a GPU says
        return optimizer

    plain = trained(Trainer, make_optimizer=lambda model: torch.optim.RMSprop(model.parameters(), lr=2**-9))
    assert_same(trained(Trainer, make_optimizer=recorded), plain)


def test_numbers_of_a_model_in_double_precision_are_not_rounded():
    def in_double(kind, **options):
        model = a_model().double()
        trainer = kind(model, nn.CrossEntropyLoss(), adamw(model), callbacks=[])
        inputs, labels = a_dataset().tensors
        data = torch.utils.data.TensorDataset(inputs.double(), labels)
        trainer.train(data, num_epochs=1, per_device_batch_size=8, gradient_accumulation_steps=3, seed=5, **options)
        return trainer

    toys.assert_same_weights(in_double(GraphedTrainer), in_double(EagerTrainer, step_mode="eager"))


def test_what_must_see_every_step_means_eager_unless_it_is_declared_safe(capsys):
    class Overriding(GraphedTrainer):
        def calculate_train_batch_loss(self, batch):
            return super().calculate_train_batch_loss(batch)

    class Stepping(TrainerCallback):
        def on_before_optimizer_step(self, trainer, **kwargs):
            pass

    for watcher, hook, options in (
        (Overriding, "calculate_train_batch_loss", {"kind": Overriding}),
        (Stepping, "on_before_optimizer_step", {"callbacks": [Stepping]}),
    ):
        assert trained(**options).capturer is None
        assert f"{watcher.__name__}.{hook} must see every step" in capsys.readouterr().out
        watcher.graph_safe = True
        assert trained(**options).capturer.num_replays > 0
    assert trained(callbacks=[*DEFAULT_CALLBACKS, StepBasedEvaluationCallback(2)]).capturer.num_replays > 0


def test_skipping_updates_and_an_optimizer_that_reads_its_rate_on_the_host_mean_eager(capsys):
    class Own(torch.optim.SGD):
        pass

    assert trained(nan="skip").capturer is None
    assert "checks every update" in capsys.readouterr().out
    assert trained(make_optimizer=lambda model: Own(model.parameters(), lr=0.1)).capturer is None
    assert "Own is not one of torch's optimizers" in capsys.readouterr().out


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_that_the_optimizer_does_not_hold_keep_their_gradients_or_are_frozen(frozen, tmp_path, capsys):
    def head(model):
        model[:4].requires_grad_(not frozen)
        return torch.optim.SGD(model[4].parameters(), lr=2**-7, fused=True)

    def step_another(trainer, **kwargs):
        with torch.no_grad():
            for each in trainer.model[:4].parameters():
                each.sub_(0.1 * each.grad if each.requires_grad else 0.0)

    options = {"make_optimizer": head, "gradient_clip_norm": 0.1, "num_epochs": 1}
    options["callbacks"] = [toys.callback(on_update_end=step_another)]
    graphed = trained(checkpoints=Checkpointing(tmp_path, every_updates=2), **options)
    assert_same(trained(EagerTrainer, step_mode="eager", **options), graphed)
    said = capsys.readouterr().out
    # They are clipped too, and not in a checkpoint.
    assert (graphed.capturer is None) == ("the optimizer does not hold (freeze" in said) == ("T2 from here on" in said)
    assert (graphed.capturer is None) == (not frozen)


def test_unfreezing_weights_records_again_and_a_changed_setting_of_the_optimizer_is_followed():
    def unfreeze(trainer, **kwargs):
        trainer.model[0].requires_grad_(trainer.run_history.current_epoch > 1)

    def change(trainer, **kwargs):
        trainer.optimizer.param_groups[0]["weight_decay"] = 0.5 if trainer.progress.update > 6 else 0.01

    graphed = assert_same_as_eager(callbacks=[toys.callback(on_train_epoch_start=unfreeze)])
    assert graphed.capturer.num_captures >= 2
    assert_same_as_eager(callbacks=[toys.callback(on_update_end=change)])


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    options = {"checkpoints": Checkpointing(tmp_path / "run", every_updates=4), "resume_from": "auto"}
    trained(callbacks=[toys.stop_at(8)], **options)
    resumed = trained(**options)
    assert resumed.capturer.num_replays > 0
    toys.assert_same_weights(resumed, trained())


def test_graphs_on_the_cpu_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ConfigError, match='needs a CUDA device, and this run is on cpu. Use "auto"'):
        trained(Trainer, step_mode="graph", checkpoints=Checkpointing(tmp_path / "run", every_updates=1))
    assert not (tmp_path / "run").exists()


def test_losses_per_item_are_weighed_the_same_in_graphs():
    def counting(kind):
        return type("Counting", (kind,), {"count_batch_items": lambda self, batch: float(batch[1].sum()) + 1})

    graphed = trained(counting(GraphedTrainer), gradient_accumulation_steps=2)
    assert graphed.capturer.num_replays > 0
    assert_same(trained(counting(EagerTrainer), step_mode="eager", gradient_accumulation_steps=2), graphed)


def padded_to(*lengths):
    """Return a collator that pads to one of these lengths, all of which but the last are buckets."""

    def collate(samples):
        length = min(each for each in lengths if each >= max(map(len, samples)))
        ids = torch.stack([nn.functional.pad(sample, (0, length - len(sample))) for sample in samples])
        return {"inputs": ids.float(), "labels": ids.sum(1).remainder(2).long()}

    if lengths[1:]:
        collate.bucket_lengths = lengths[:-1]
    return collate


def reader():
    return toys.net(lambda self, inputs: self.layer(inputs.mean(1, keepdim=True)), layer=nn.Linear(1, 2))


def read(samples, kind=GraphedTrainer, **options):
    """Train a reader on samples in their order, as graphs."""
    model = toys.seeded(reader)
    trainer = kind(model, nn.CrossEntropyLoss(), adamw(model), callbacks=[])
    trainer.train(samples, train_dataloader_kwargs={"shuffle": False}, **options)
    return trainer.capturer


def test_lengths_beyond_the_buckets_of_a_collator_are_graphs_too():
    samples = [torch.arange(length) for length in [2] * 8 + [6] * 8 + [11] * 8]
    capturer = read(samples, num_epochs=2, per_device_batch_size=4, collate_fn=padded_to(4, 8, 12))
    assert (capturer.num_captures, capturer.num_replays) == (3, 2 * 6 - 1)


@pytest.mark.parametrize("lengths", [(4, 8, 12), (3,)], ids=["to bucket lengths", "as they are"])
@pytest.mark.parametrize("num_bad", [1, 8], ids=["one is bad", "all are bad"])
def test_bad_samples_in_the_first_micro_batch_leave_the_others_as_graphs(lengths, num_bad):
    class SomeAreBad(torch.utils.data.Dataset):
        def __len__(self):
            return 120

        def __getitem__(self, index):
            if index < num_bad:
                raise ValueError("damaged")
            return torch.arange(3)

    options = {"per_device_batch_size": 8, "collate_fn": padded_to(*lengths), "bad_samples": "skip"}
    assert read(SomeAreBad(), num_epochs=1, **options).num_replays == 120 // 8 - 1


def test_garbage_is_collected_once_before_the_first_recording():
    model = a_model()
    optimizer = adamw(model)
    inputs, labels = a_dataset(8).tensors

    def micro_batch(given):
        loss = nn.functional.cross_entropy(model(given["inputs"]), given["labels"])
        loss.backward()
        return {"loss": loss.detach()}

    step = Step(
        micro_batch=micro_batch,
        apply=lambda: optimizer.step(),
        refresh=lambda: None,
        begin=lambda: None,
        restore=lambda: None,
        num_idle_draws=0,
        parameters=list(model.parameters()),
        optimizer=optimizer,
        device=torch.device("cpu"),
    )
    model[3].p = 0.0  # on the CPU it would be drawn on the host
    graphs = UpdateGraphs(step, FakeCapturer(model, optimizer))
    collected = []

    def note(phase, info):
        if phase == "start" and info["generation"] == 2:
            collected.append(info)

    gc.disable()
    gc.callbacks.append(note)
    try:
        for _ in range(3):  # the optimizer has no state yet, each time
            with pytest.raises(NotYetCapturableError):
                given = [{"inputs": inputs, "labels": labels}]
                graphs.replay(["one"], given, lambda index: None, lambda index, output: None)
    finally:
        gc.callbacks.remove(note)
        gc.enable()
    assert len(collected) == 1


def counting(num_scores):
    """Scores of what tokens have in common, whatever the number of texts of a sample."""

    def forward(self, input_ids, attention_mask):
        return self.layer((input_ids * attention_mask).float().mean(-1, keepdim=True)).squeeze(-1)

    return toys.net(forward, layer=nn.Linear(1, num_scores))


class Scoring(GraphedTrainer):
    graph_safe = True

    def calculate_train_batch_loss(self, batch):
        scores = self.model(batch["input_ids"], batch["attention_mask"])
        return {"loss": self.loss_func(scores, batch["labels"]), "batch_size": len(scores)}


def scored(collate, samples, num_scores, loss):
    model = toys.seeded(counting, num_scores, seed=3)
    trainer = Scoring(model, loss, adamw(model), callbacks=[])
    options = {"collate_fn": with_buckets(collate, (4, 8)), "seed": 1, "train_dataloader_kwargs": {"shuffle": False}}
    trainer.train(samples, num_epochs=2, per_device_batch_size=4, **options)
    return trainer.capturer.num_captures, trainer.capturer.num_replays


def test_batches_of_several_labels_and_of_choices_are_graphs_for_each_length_and_number_of_choices():
    samples = [{"input_ids": [1] * length, "labels": [1.0, 0.0, 1.0]} for length in [2] * 8 + [6] * 8 + [11] * 4]
    found = scored(collators.DataCollatorWithPadding(toys.Pads()), samples, 3, nn.BCEWithLogitsLoss())
    assert found == (3, 2 * 5 - 1)  # of length 4, of length 8, and of length 11

    def sample(length, num_choices):
        return {"input_ids": [[1] * length, *[[2] * 2] * (num_choices - 1)], "labels": 0}

    samples = [sample(length, 3) for length in [3] * 8 + [7] * 4 + [12] * 4] + [sample(3, 2) for _ in range(4)]
    found = scored(collators.DataCollatorForMultipleChoice(toys.Pads()), samples, 1, nn.CrossEntropyLoss())
    assert found == (4, 2 * 5 - 1)  # of three lengths, and of two choices


def test_every_padding_collator_pads_to_its_bucket_lengths():
    tokens = {"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1]}
    choices = {name: [value, value] for name, value in tokens.items()}
    whole, deep = dict.fromkeys(tokens, 1), dict.fromkeys(tokens, 2)
    cases = [
        (collators.DataCollatorWithPadding(toys.Pads()), {**tokens, "labels": [1.0, 0.0]}, whole),
        (
            collators.DataCollatorForTokenClassification(toys.Pads()),
            {**tokens, "labels": [1, 2, 3]},
            {**whole, "labels": 1},
        ),
        (collators.DataCollatorForSeq2Seq(toys.Pads()), {**tokens, "labels": [1, 2]}, {**whole, "labels": 1}),
        (collators.DataCollatorForLanguageModeling(toys.Pads(), mlm=False), tokens, {**whole, "labels": 1}),
        (collators.DataCollatorForMultipleChoice(toys.Pads()), {**choices, "labels": 1}, deep),
    ]
    for collate, sample, padded in cases:
        batch = with_buckets(collate, (5,))([sample])
        assert all(batch[name].shape[dimension] == 5 for name, dimension in padded.items()), collate


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
    for kind, kernel in ((GraphedTrainer, True), (Trainer, None)):
        model = toys.network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        toys.trained(model=model, optimizer=optimizer, cls=kind)
        assert optimizer.param_groups[0]["fused"] is kernel
