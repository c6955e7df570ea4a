"""A test for each mainstream feature of transformers' Trainer: changing the option changes the behaviour."""

import json
import math
from collections import Counter
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Literal, Optional

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import loopwright.hf as hf
from distributed.launcher import launch
from loopwright.errors import DataError
from loopwright.hf import EarlyStoppingCallback, HfArgumentParser, Trainer, TrainerCallback, TrainingArguments
from toys import Stream

from . import tiny
from .tiny import Classifier, arguments, assert_refused, fit, logged, losses, made, on, rows, weights

# The features marked as mainstream in the table of 163; rows 95 and 144 are only partly.
MAINSTREAM = """1 2 3 4 5 6 10 12 13 14 15 23 24 25 26 28 29 31 33 34 35 45 46 47 48 49 50 51 54 55 56 57 59 61 63 65 71
72 77 80 81 85 92 93 95 98 99 100 101 102 104 105 106 108 110 114 115 116 117 120 121 126 127 128 130 133 134 135 136
137 138 139 140 141 142 144 147 148 149 150 151 157 161 162 163"""
COVERED: Counter[int] = Counter()


def row(*numbers):
    COVERED.update(numbers)
    return lambda function: function


def test_every_mainstream_row_has_its_test():
    assert len(COVERED) >= 84
    assert sorted(COVERED) == sorted(map(int, MAINSTREAM.split()))
    assert set(COVERED.values()) == {1}


class Spy(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        self.seen = [*getattr(self, "seen", []), inputs["x"].clone()]
        return super().training_step(model, inputs, num_items_in_batch)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return fit(tmp_path_factory.mktemp("plain"), kind=Spy)


def differ(one, other):
    return tiny.largest_difference(weights(one), weights(other)) > 0


@row(1)
def test_train_returns_steps_loss_and_metrics(plain):
    steps, loss, metrics = plain.output
    assert steps == 5 and loss == pytest.approx(np.mean(losses(plain)), rel=1e-6)
    speeds = {"train_runtime", "train_samples_per_second", "train_steps_per_second"}
    assert {*speeds, "train_loss", "epoch"} <= set(metrics)


@row(2, 3)
def test_epochs_may_be_a_fraction_and_max_steps_overrides_them(tmp_path):
    assert fit(tmp_path, num_train_epochs=1.5).state.global_step == math.ceil(1.5 * 5)
    assert fit(tmp_path, num_train_epochs=2).state.epoch == 2.0
    trainer = fit(tmp_path, max_steps=12, num_train_epochs=1)
    assert trainer.state.global_step == 12 and trainer.state.num_train_epochs == 3
    endless = Stream(rows(12))
    assert fit(tmp_path, data=endless, max_steps=7).state.global_step == 7
    assert_refused("max_steps", made, tmp_path, data=endless)


@row(4, 33)
def test_the_batch_size_is_per_device_and_a_short_last_batch_may_be_dropped(tmp_path):
    assert fit(tmp_path, data=rows(10)).state.global_step == 3
    assert fit(tmp_path, data=rows(10), dataloader_drop_last=True).state.global_step == 2
    for size in (10, 5):
        assert {len(x) for x in fit(tmp_path, kind=Spy, per_device_train_batch_size=size).seen} == {size}


@row(5)
def test_accumulation_makes_one_update_of_several_batches(tmp_path):
    whole = fit(tmp_path, per_device_train_batch_size=8, num_train_epochs=2)
    parts = fit(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4, num_train_epochs=2)
    assert whole.state.global_step == parts.state.global_step == 6
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-5)
    assert tiny.largest_difference(weights(whole), weights(parts)) < 1e-6


@row(6)
def test_the_loss_is_a_mean_over_the_tokens_of_the_update(tmp_path):
    options = {"data": tiny.token_rows(8), "max_grad_norm": 0, "train_sampling_strategy": "sequential"}
    whole = fit(tmp_path, model=tiny.llama(), per_device_train_batch_size=8, **options)
    parts = fit(tmp_path, model=tiny.llama(), per_device_train_batch_size=1, gradient_accumulation_steps=8, **options)
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-6)
    assert logged(whole, "grad_norm") == pytest.approx(logged(parts, "grad_norm"), rel=1e-5)


@row(10, 12)
def test_compute_loss_is_overridden_and_labels_are_smoothed(tmp_path, plain):
    class Doubled(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
            return (2 * loss, outputs) if return_outputs else 2 * loss

    doubled = fit(tmp_path, kind=Doubled, max_steps=1)
    assert losses(doubled) == pytest.approx([2 * losses(plain)[0]], rel=1e-6)
    data = rows(4)
    trainer = fit(tmp_path, data=data, label_smoothing_factor=0.2, max_steps=1, train_sampling_strategy="sequential")
    torch.manual_seed(0)
    logits = Classifier().linear(torch.stack([sample["x"] for sample in data]))
    labels = torch.tensor([sample["labels"] for sample in data])
    expected = nn.functional.cross_entropy(logits, labels, label_smoothing=0.2)
    assert losses(trainer) == pytest.approx([expected.item()], rel=1e-6)
    assert losses(fit(tmp_path, data=data, max_steps=1)) != losses(trainer)


@row(13)
def test_gradients_are_clipped_and_their_norm_is_logged(tmp_path):
    free, clipped = fit(tmp_path, max_grad_norm=0, optim="sgd"), fit(tmp_path, max_grad_norm=0.01, optim="sgd")
    first = [logged(each, "grad_norm")[0] for each in (free, clipped)]
    assert first[0] == first[1] > 0.01  # the norm before clipping, also where nothing is clipped
    start = weights(made(tmp_path))
    assert tiny.largest_difference(weights(clipped), start) < tiny.largest_difference(weights(free), start)


@row(14)
def test_callbacks_end_an_epoch_or_the_run(tmp_path):
    def ends(flag):
        return on(step_end=lambda args, state, control, **kwargs: setattr(control, flag, state.global_step == 2))

    assert fit(tmp_path, ends("should_training_stop")).state.global_step == 2
    trainer = fit(tmp_path, ends("should_epoch_stop"), num_train_epochs=2, kind=Spy)
    assert trainer.state.global_step == 2 + 5 and trainer.state.epoch == 2.0


@row(15)
def test_model_init_creates_a_fresh_model_for_every_run(tmp_path):
    trainer = fit(tmp_path, model_init=Classifier)
    first, model = weights(trainer), trainer.model
    trainer.train()
    assert trainer.model is not model and tiny.largest_difference(first, weights(trainer)) == 0
    assert_refused("model or model_init", Trainer, Classifier(), arguments(tmp_path), model_init=Classifier)


@row(23, 24)
def test_datasets_of_several_kinds_a_dict_for_evaluation_and_a_collator(tmp_path, plain):
    metrics = made(tmp_path, eval_dataset={"near": rows(8), "far": rows(8, seed=9)}).evaluate()
    assert {"eval_near_loss", "eval_far_loss"} <= set(metrics) and metrics["eval_near_loss"] != metrics["eval_far_loss"]
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list([{"x": row["x"].tolist(), "labels": row["labels"]} for row in rows(20)])
    assert losses(fit(tmp_path, data=table)) == pytest.approx(losses(plain), rel=1e-6)

    def halved(samples):
        batch = hf.default_data_collator(samples)
        return {**batch, "x": batch["x"] / 2}

    assert losses(fit(tmp_path, data_collator=halved)) != losses(plain)


@row(25)
def test_the_processing_class_pads_aligns_special_tokens_and_is_saved(tmp_path):
    tokenizer = tiny.CharacterTokenizer()
    data = [{**tokenizer("ab" * (index + 1)), "label": index % 3} for index in range(4)]
    model = tiny.bert(pad_token_id=5)
    trainer = fit(tmp_path, model=model, data=data, processing_class=tokenizer, save_strategy="epoch")
    assert model.config.pad_token_id == tokenizer.pad_token_id
    assert (tmp_path / "checkpoint-1" / "tokenizer.json").exists()
    assert type(trainer.data_collator).__name__ == "DataCollatorWithPadding"
    assert trainer.tokenizer is tokenizer


@row(26)
def test_columns_that_the_model_does_not_take_are_removed(tmp_path):
    data = [{**sample, "text": "a", "index": 3} for sample in rows(8)]
    assert fit(tmp_path, data=data).state.global_step == 2
    text = "the batch has index, which Classifier.forward does not take; it takes x, labels"
    assert_refused(text, fit, tmp_path, data=data, remove_unused_columns=False, error=DataError)
    data = [{"text": "a", "label": 1}] * 8
    assert_refused("text.*forward takes x, labels", fit, tmp_path, data=data, error=DataError)


@row(28)
def test_dataloaders_are_overridden(tmp_path):
    class Own(Trainer):
        def get_train_dataloader(self):
            return DataLoader(rows(6), batch_size=3)

        def get_eval_dataloader(self, eval_dataset=None):
            return DataLoader(rows(9), batch_size=3)

        def get_test_dataloader(self, test_dataset):
            return DataLoader(rows(3), batch_size=3)

    trainer = fit(tmp_path, kind=Own)
    assert trainer.state.global_step == 2
    assert len(trainer.predict(rows(20)).predictions) == 3
    assert trainer.evaluation_loop and trainer.evaluate()["eval_samples_per_second"] > 0


@row(29, 31)
def test_the_sampling_strategy_and_the_seed_order_the_data_of_every_epoch(tmp_path, plain):
    def order(**options):
        return torch.cat(fit(tmp_path, kind=Spy, **options).seen)

    in_order = torch.stack([sample["x"] for sample in rows(20)])
    assert torch.equal(order(train_sampling_strategy="sequential"), in_order)
    assert not torch.equal(torch.cat(plain.seen), in_order)
    one, two, other = (order(num_train_epochs=2, data_seed=seed) for seed in (None, None, 7))
    assert torch.equal(one, two) and not torch.equal(one[:20], one[20:]) and not torch.equal(one, other)
    long = [{**sample, "length": index % 7} for index, sample in enumerate(rows(600))]
    grouped = fit(tmp_path, kind=Spy, data=long, train_sampling_strategy="group_by_length").seen
    lengths = {tuple(sample["x"].tolist()): sample["length"] for sample in long}
    spread = [{lengths[tuple(x.tolist())] for x in batch} for batch in grouped]
    assert np.mean([max(each) - min(each) for each in spread]) < 1
    assert len({tuple(x.tolist()) for batch in grouped for x in batch}) == 600


@row(34, 35)
def test_workers_load_the_same_data_and_pinned_memory_needs_a_device(tmp_path, plain):
    for is_set in (True, False):
        loader = made(tmp_path, dataloader_pin_memory=is_set).get_train_dataloader()
        assert loader.pin_memory == (is_set and torch.accelerator.is_available())
    there = fit(tmp_path, kind=Spy, dataloader_num_workers=2)
    assert torch.equal(torch.cat(plain.seen), torch.cat(there.seen))
    assert there.get_train_dataloader().num_workers == 2 and plain.get_train_dataloader().num_workers == 0


@row(45)
def test_inputs_are_moved_and_an_empty_batch_is_refused(plain):
    moved = plain._prepare_inputs({"x": torch.ones(2), "deep": [torch.ones(1), (torch.ones(1),)]})
    assert moved["deep"][1][0].device == plain.accelerator.device
    assert_refused("forward takes: x, labels", plain._prepare_inputs, {}, error=DataError)


@row(46, 47, 48, 51)
def test_collators_stack_rename_pad_and_flatten():
    batch = hf.default_data_collator([{"x": [1.0, 2.0], "label": 1, "name": "a"}] * 2)
    assert batch["labels"].dtype == torch.long and sorted(batch) == ["labels", "x"]
    assert hf.DefaultDataCollator()([{"label": 0.5}])["labels"].dtype == torch.float

    tokenizer = tiny.CharacterTokenizer()
    longest = [hf.DataCollatorWithPadding(tokenizer)([tokenizer("ab"), tokenizer(text)]) for text in ("abcde", "abc")]
    assert [batch["input_ids"].shape for batch in longest] == [(2, 5), (2, 3)]
    assert longest[0]["attention_mask"].tolist()[0] == [1, 1, 0, 0, 0]

    samples = [{**tokenizer("ab"), "labels": [1, 2]}, {**tokenizer("abc"), "labels": [1, 2, 3]}]
    assert hf.DataCollatorForTokenClassification(tokenizer)(samples)["labels"].tolist()[0] == [1, 2, -100]
    assert hf.DataCollatorForTokenClassification(tokenizer, label_pad_token_id=-1)(samples)["labels"][0, 2] == -1

    sample = {"input_ids": [[3, 4], [3, 4, 5]], "attention_mask": [[1, 1], [1, 1, 1]], "label": 1}
    batch = hf.DataCollatorForMultipleChoice(tokenizer)([sample, sample])
    assert batch["input_ids"].shape == (2, 2, 3) and batch["labels"].tolist() == [1, 1] and "label" in sample


@row(49, 50)
def test_collators_create_the_inputs_of_a_decoder_and_mask_or_copy_for_language_models():
    tokenizer = tiny.CharacterTokenizer()
    samples = [{**tokenizer("abc"), "labels": [5]}, {**tokenizer("a"), "labels": [5, 6]}]
    batch = hf.DataCollatorForSeq2Seq(tokenizer, model=tiny.t5())(samples)
    assert batch["labels"].tolist() == [[5, -100], [5, 6]] and batch["decoder_input_ids"].tolist()[1] == [0, 5]
    tokenizer = tiny.PlainTokenizer(size=32)
    samples = [{"input_ids": list(range(5, 45))} for _ in range(8)]
    causal = hf.DataCollatorForLanguageModeling(tokenizer, mlm=False)(samples)
    assert torch.equal(causal["labels"], causal["input_ids"])
    masked = hf.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3)(samples)
    assert 0.1 < float((masked["labels"] != -100).float().mean()) < 0.5
    assert (masked["input_ids"] == tokenizer.mask_token_id).any()


@row(54, 55, 56, 57)
def test_the_arguments_select_the_optimizer_and_its_options(tmp_path, plain):
    kinds = {"adamw_torch": "AdamW", "sgd": "SGD", "adagrad": "Adagrad", "rmsprop": "RMSprop", "NAdam": "NAdam"}
    for name, kind in kinds.items():
        assert type(made(tmp_path, optim=name).create_optimizer()).__name__ == kind
    trainer = made(tmp_path, learning_rate=0.25)
    trainer.create_optimizer()
    assert trainer.get_learning_rates() == [0.25, 0.25]
    group = made(tmp_path, adam_beta1=0.5, adam_beta2=0.6, adam_epsilon=1e-3).create_optimizer().param_groups[0]
    assert group["betas"] == (0.5, 0.6) and group["eps"] == 1e-3
    groups = made(tmp_path, weight_decay=0.1).create_optimizer().param_groups
    assert [(group["weight_decay"], len(group["params"])) for group in groups] == [(0.1, 1), (0.0, 1)]
    assert differ(fit(tmp_path, weight_decay=0.5), plain)


@row(59, 61)
def test_a_given_optimizer_and_scheduler_are_used_and_overridden_methods_called(tmp_path):
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    trainer = fit(tmp_path, model=model, optimizers=(optimizer, schedule), max_steps=3)
    assert trainer.optimizer is optimizer and trainer.lr_scheduler is schedule
    assert logged(trainer, "learning_rate") == [0.5, 0.25, 0.125]

    class Own(Trainer):
        def create_optimizer(self, model=None):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.125)
            return self.optimizer

        def create_scheduler(self, num_training_steps, optimizer=None):
            self.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer, 1.0, 1)
            return self.lr_scheduler

    assert set(logged(fit(tmp_path, kind=Own, max_steps=2), "learning_rate")) == {0.125}


@row(63, 65)
def test_schedules_have_names_and_warmup_is_a_number_or_a_ratio_of_updates(tmp_path):
    def rates(**options):
        return logged(fit(tmp_path, learning_rate=1.0, **options), "learning_rate")

    names = "linear cosine cosine_with_restarts polynomial constant constant_with_warmup inverse_sqrt"
    by_name = {name: rates(lr_scheduler_type=name, warmup_steps=1) for name in names.split()}
    assert by_name["linear"] == [0.0, 1.0, 0.75, 0.5, 0.25] and by_name["constant"] == [1.0] * 5
    assert len({tuple(each) for each in by_name.values()}) == 6  # one cosine wave is the same with and without restarts
    options = {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0, "mode": "max"}}
    options |= {"eval_dataset": rows(4), "eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "same"}
    plateau = fit(tmp_path, compute_metrics=lambda prediction: {"same": 1.0}, **options)
    assert logged(plateau, "learning_rate") == pytest.approx([1e-2, 1e-2, 1e-3, 1e-4, 1e-5])
    with pytest.warns(UserWarning, match="warmup_ratio"):
        old = rates(warmup_ratio=0.4)
    assert rates(warmup_steps=2) == rates(warmup_steps=0.4) == old and old[:3] == [0.0, 0.5, 1.0]


@row(71)
def test_the_schedule_waits_for_a_skipped_update(tmp_path):
    data = [*rows(4), {"x": torch.full((4,), math.nan), "labels": 0}, *rows(3)]
    trainer = fit(tmp_path, nan="skip", data=data, train_sampling_strategy="sequential", learning_rate=1.0)
    assert trainer.lr_scheduler.last_epoch == 1 and trainer.state.global_step == 2


@row(72)
def test_forward_passes_run_in_bfloat16(tmp_path):
    class Looks(Classifier):
        def forward(self, x, labels=None):
            outputs = super().forward(x, labels)
            self.seen = self.linear(x).dtype
            return outputs

    trainer = fit(tmp_path, model=Looks(), bf16=True)
    assert trainer.model.seen == torch.bfloat16 and fit(tmp_path, model=Looks()).model.seen == torch.float32
    assert trainer.predict(rows(4)).predictions.dtype == np.float32
    assert_refused("fp16=True and bf16=True", arguments, tmp_path, bf16=True, fp16=True)


@row(77)
def test_gradient_checkpointing_changes_no_number(tmp_path):
    data = tiny.token_rows(8)
    one = fit(tmp_path, model=tiny.llama(), data=data)
    two = fit(tmp_path, model=tiny.llama(), data=data, gradient_checkpointing=True)
    assert two.model.is_gradient_checkpointing and not one.model.is_gradient_checkpointing
    assert losses(one) == pytest.approx(losses(two), rel=1e-6)
    assert_refused("gradient_checkpointing_enable", fit, tmp_path, gradient_checkpointing=True)


@row(80, 81)
def test_predictions_are_on_the_host_and_logits_are_reduced_before_they_are_stored(tmp_path):
    seen = []
    for steps in (None, 2):
        options = {"compute_metrics": lambda prediction: seen.append(prediction.predictions) or {}}
        made(tmp_path, eval_accumulation_steps=steps, **options).evaluate(rows(20))
    assert isinstance(seen[0], np.ndarray) and np.array_equal(*seen)
    assert_refused("eval_accumulation_steps", arguments, tmp_path, eval_accumulation_steps=0)
    options = {"preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1)}
    trainer = made(tmp_path, compute_metrics=lambda prediction: {"dims": prediction.predictions.ndim}, **options)
    assert trainer.evaluate(rows(8))["eval_dims"] == 1


def on_two_processes():
    trainer = fit("unused", max_steps=3, per_device_train_batch_size=2, per_device_eval_batch_size=2)
    predictions = trainer.predict(rows(5)).predictions
    loss = trainer.evaluate(rows(5))["eval_loss"]
    values = [float(value) for tensor in weights(trainer).values() for value in tensor.flatten()]
    return [values, predictions.tolist(), loss, trainer.args.world_size, trainer.is_world_process_zero()]


@row(85, 127)
@pytest.mark.distributed
@pytest.mark.slow
def test_two_processes_train_as_one_with_twice_the_batch_and_predict_no_sample_twice(tmp_path):
    first, second = launched = launch(on_two_processes, tmp_path, timeout_seconds=100)
    alone = fit(tmp_path, max_steps=3, per_device_train_batch_size=4)
    assert first[0] == second[0] and [each[3:] for each in launched] == [[2, True], [2, False]]
    mine = [float(value) for tensor in weights(alone).values() for value in tensor.flatten()]
    assert first[0] == pytest.approx(mine, abs=1e-6)
    for _, predictions, loss, *_ in launched:
        assert np.allclose(predictions, alone.predict(rows(5)).predictions, atol=1e-5)
        assert loss == pytest.approx(alone.evaluate(rows(5))["eval_loss"], rel=1e-5)


@row(92, 93, 95)
def test_the_arguments_know_device_and_process(tmp_path, monkeypatch):
    trainer = fit(tmp_path, use_cpu=True)
    assert trainer.args.device == torch.device("cpu") == trainer.accelerator.device
    args = arguments(tmp_path)
    assert args.device.type in ("cpu", "cuda", "mps", "xpu")
    with args.main_process_first(desc="tokenizing"):
        done = True
    assert done
    assert (args.world_size, args.process_index, args.should_save, args.n_gpu >= 0) == (1, 0, True, True)
    assert trainer.is_world_process_zero() and trainer.is_local_process_zero()
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "1"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert (args.world_size, args.process_index, args.should_save) == (2, 1, False)


@row(98, 114)
def test_the_output_folder_is_created_and_its_last_checkpoint_is_found_by_the_number(tmp_path):
    made(tmp_path / "new" / "folder")
    assert (tmp_path / "new" / "folder").is_dir()
    assert TrainingArguments("~/x").output_dir != "~/x"
    for name in ("checkpoint-9", "checkpoint-10", "other"):
        (tmp_path / name).mkdir()
    assert hf.get_last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"save_strategy": "epoch", "num_train_epochs": 2}, [5, 10]),
        ({"save_strategy": "no"}, []),
        ({"save_strategy": "steps", "save_steps": 2}, [2, 4, 5]),
        ({"save_strategy": "steps", "save_steps": 3}, [3, 5]),
        ({"save_strategy": "steps", "save_steps": 0.4}, [2, 4, 5]),
        ({"save_strategy": "steps", "save_steps": 0.2}, [1, 2, 3, 4, 5]),
        ({"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}, [4, 5]),
    ],
    ids=str,
)
@row(99, 100, 101)
def test_the_save_strategy_and_the_limit_decide_which_checkpoints_exist(tmp_path, options, steps):
    fit(tmp_path, **options)
    names = [f"checkpoint-{step}" for step in steps]
    assert tiny.folders(tmp_path) == names
    assert hf.get_last_checkpoint(tmp_path) == (str(tmp_path / names[-1]) if steps else None)
    assert steps or list(tmp_path.iterdir()) == []


@row(102, 104)
def test_a_checkpoint_has_weights_and_state_and_a_run_resumes_from_the_newest_or_a_given_one(tmp_path):
    fit(tmp_path, save_strategy="steps", save_steps=2)
    files = {"model.safetensors", "state.safetensors", "state.json", "trainer_state.json", "training_args.json"}
    assert {path.name for path in (tmp_path / "checkpoint-5").iterdir()} == {*files, "MANIFEST.json"}
    for source, begins in ((True, 5), (str(tmp_path / "checkpoint-2"), 2)):
        trainer = fit(tmp_path, num_train_epochs=2, kind=Spy, resume=source)
        assert trainer.state.global_step == 10 and len(trainer.seen) == 10 - begins


@row(105)
def test_a_resumed_run_reads_no_sample_again(tmp_path):
    class Counts(list):
        read = 0

        def __getitem__(self, index):
            Counts.read += 1
            return super().__getitem__(index)

    fit(tmp_path, save_strategy="steps", save_steps=3, data=Counts(rows(20)))
    Counts.read = 0
    fit(tmp_path, data=Counts(rows(20)), resume=str(tmp_path / "checkpoint-3"))
    assert Counts.read == 8


@row(106)
def test_random_numbers_continue_after_a_resume(tmp_path):
    whole = fit(tmp_path, model=Classifier(dropout=0.5), save_strategy="steps", save_steps=2)
    again = fit(tmp_path, model=Classifier(dropout=0.5), resume=str(tmp_path / "checkpoint-2"))
    assert not differ(whole, again)
    assert differ(whole, fit(tmp_path, model=Classifier(dropout=0.5), seed=1))


EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "score"}


def scores(*values):
    """Return a compute_metrics that returns these scores, one after the other."""
    remaining = iter(values)
    return lambda prediction: {"score": next(remaining)}


@row(108, 134)
def test_the_best_value_is_tracked_and_its_model_loaded_at_the_end(tmp_path, plain):
    options = {**EVALUATED, "eval_dataset": rows(4)}
    trainer = fit(tmp_path, compute_metrics=scores(3.0, 1.0, 2.0, 4.0, 5.0), greater_is_better=False, **options)
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (1.0, 2)
    other = {**options, "compute_metrics": scores(1.0), "metric_for_best_model": "other"}
    assert_refused("eval_other.*It has eval_loss, eval_score", fit, tmp_path, **other)
    options["compute_metrics"] = scores(0.1, 0.9, 0.3, 0.2, 0.1)
    trainer = fit(tmp_path, load_best_model_at_end=True, **options)
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    assert differ(trainer, plain)


@row(110)
def test_the_model_is_saved_as_transformers_reads_it(tmp_path):
    transformers = pytest.importorskip("transformers")
    trainer = made(tmp_path, model=tiny.bert())
    trainer.save_model(tmp_path / "model")
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    assert tiny.largest_difference(loaded.state_dict(), weights(trainer)) == 0


@row(115, 121)
def test_evaluate_returns_and_logs_the_metrics_and_prediction_loss_only_computes_no_predictions(tmp_path):
    trainer = made(tmp_path, eval_dataset=rows(8))
    metrics = trainer.evaluate()
    speeds = {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}
    assert set(metrics) == {"eval_loss", *speeds, "epoch"}
    assert trainer.state.log_history == [{**metrics, "step": 0}]
    assert "late_loss" in trainer.evaluate(rows(4), metric_key_prefix="late")
    trainer = made(tmp_path, prediction_loss_only=True, compute_metrics=lambda prediction: pytest.fail("called"))
    assert "eval_loss" in trainer.evaluate(rows(4))
    assert made(tmp_path, prediction_loss_only=True).predict(rows(4)).predictions is None


@row(116, 130)
def test_predict_returns_padded_arrays_metrics_and_speed(tmp_path):
    class Ragged(Classifier):
        def forward(self, x, labels=None):
            outputs = super().forward(x, labels)
            return {**outputs, "logits": outputs["logits"].repeat(1, len(x))}

    output = made(tmp_path, model=Ragged(), per_device_eval_batch_size=3).predict(rows(5))
    assert output.predictions.shape == (5, 9) and (output.predictions[3:, 6:] == -100).all()
    metrics = output.metrics
    assert output.label_ids.shape == (5,) and "test_loss" in metrics
    assert metrics["test_samples_per_second"] == pytest.approx(5 / metrics["test_runtime"], rel=0.2)
    assert metrics["test_steps_per_second"] > 0


@row(117)
def test_the_evaluation_strategy_decides_when(tmp_path):
    def steps(**options):
        trainer = fit(tmp_path, eval_dataset=rows(4), num_train_epochs=2, logging_strategy="no", **options)
        return [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry]

    assert steps(eval_strategy="no") == []
    assert steps(eval_strategy="epoch") == [5, 10]
    assert steps(eval_strategy="steps", eval_steps=4) == [4, 8, 10]
    assert steps(eval_strategy="steps", eval_steps=0.5) == [5, 10]
    with pytest.warns(UserWarning, match="evaluation_strategy"):
        assert steps(evaluation_strategy="epoch") == [5, 10]


@row(120)
def test_the_evaluation_batch_size_changes_the_batches_and_not_the_loss(tmp_path):
    seen = []

    class Looks(Trainer):
        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            seen.append(len(inputs["x"]))
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    results = [made(tmp_path, kind=Looks, per_device_eval_batch_size=size).evaluate(rows(10)) for size in (3, 10)]
    assert seen == [3, 3, 3, 1, 10]
    assert results[0]["eval_loss"] == pytest.approx(results[1]["eval_loss"], rel=1e-6)


@row(126)
def test_a_seq2seq_trainer_generates(tmp_path):
    data = [{"input_ids": torch.arange(3, 8), "labels": torch.arange(3, 6)} for _ in range(4)]
    seen = []

    def compute_metrics(prediction):
        seen.append(prediction.predictions)
        return {"rows": len(prediction.predictions)}

    options = {"predict_with_generate": True, "generation_max_length": 6, "disable_tqdm": True}
    args = hf.Seq2SeqTrainingArguments(str(tmp_path), **options)
    trainer = hf.Seq2SeqTrainer(tiny.t5(), args, eval_dataset=data, compute_metrics=compute_metrics)
    metrics = trainer.evaluate()
    assert metrics["eval_rows"] == 4 and "eval_loss" in metrics
    assert trainer.predict(data, max_length=4).predictions.shape[1] <= 4
    assert seen[0].dtype == np.int64 and (seen[0] >= 0).all()


@row(128)
def test_compute_metrics_sees_all_predictions_once(tmp_path):
    calls = []

    def compute_metrics(prediction):
        predictions, labels = prediction
        calls.append((predictions.shape, labels.shape))
        return {"accuracy": np.float32((predictions.argmax(-1) == labels).mean())}

    metrics = made(tmp_path, compute_metrics=compute_metrics).evaluate(rows(10))
    assert calls == [((10, 3), (10,))] and type(metrics["eval_accuracy"]) is float


@row(133)
def test_metrics_are_printed_and_written(tmp_path, capsys):
    trainer = made(tmp_path)
    trainer.log_metrics("eval", {"eval_loss": 0.123456, "eval_runtime": 3723.456, "eval_samples": 12})
    trainer.save_metrics("eval", {"eval_loss": 0.5})
    trainer.save_metrics("test", {"test_loss": np.float32(0.25)}, combined=False)
    expected = ["eval_loss    =     0.1235", "eval_runtime = 1:02:03.46", "eval_samples =         12"]
    assert capsys.readouterr().out.splitlines() == ["***** eval metrics *****", *(f"  {line}" for line in expected)]
    for split, values in (("eval", {"eval_loss": 0.5}), ("all", {"eval_loss": 0.5}), ("test", {"test_loss": 0.25})):
        assert json.loads((tmp_path / f"{split}_results.json").read_text()) == values


@row(135)
def test_callbacks_are_added_and_removed(tmp_path):
    class Counting(TrainerCallback):
        steps = 0

        def on_step_end(self, args, state, control, **kwargs):
            Counting.steps += 1

    trainer = fit(tmp_path, Counting)
    assert Counting.steps == 5
    assert isinstance(trainer.pop_callback(Counting), Counting)
    trainer.add_callback(Counting())
    trainer.remove_callback(Counting)
    trainer.train()
    assert Counting.steps == 5
    names = [type(callback).__name__ for callback in trainer.callback_handler.callbacks]
    assert names == ["DefaultFlowCallback", "PrinterCallback"]


@row(136)
def test_sixteen_events_with_their_keyword_arguments(tmp_path):
    seen = {}

    def recording(event):
        return lambda args, state, control, **kwargs: seen.setdefault(event, set(kwargs)) and None

    events = [name for name in dir(TrainerCallback) if name.startswith("on_")]
    every = on(**{event.removeprefix("on_"): recording(event) for event in events})
    options = {"eval_strategy": "epoch", "save_strategy": "epoch", "gradient_accumulation_steps": 2}
    trainer = fit(tmp_path, every, eval_dataset=rows(4), **options)
    trainer.predict(rows(4))
    assert len(events) == 16 and set(events) - set(seen) == {"on_push_begin"}
    always = {"model", "processing_class", "tokenizer", "optimizer", "lr_scheduler"}
    always |= {"train_dataloader", "eval_dataloader"}
    assert all(always <= names for names in seen.values())
    assert "metrics" in seen["on_evaluate"] and "metrics" in seen["on_predict"] and "logs" in seen["on_log"]


@row(137, 138)
def test_control_flags_request_logs_evaluations_and_checkpoints_and_the_state_is_written(tmp_path, plain):
    request = tiny.at_step(3, lambda control: replace(control, should_log=True, should_evaluate=True, should_save=True))
    trainer = fit(tmp_path, request, eval_dataset=rows(4), logging_strategy="no")
    kinds = [("eval_loss" in entry, entry["step"]) for entry in trainer.state.log_history]
    assert kinds == [(False, 3), (True, 3), (False, 5)] and tiny.folders(tmp_path) == ["checkpoint-3"]
    plain.state.save_to_json(tmp_path / "state.json")
    assert hf.TrainerState.load_from_json(tmp_path / "state.json") == plain.state
    assert (plain.state.epoch, plain.state.global_step, plain.state.max_steps) == (1.0, 5, 5)


@row(139)
def test_the_run_ends_early_when_nothing_improves(tmp_path):
    options = {**EVALUATED, "num_train_epochs": 3, "eval_dataset": rows(4), "load_best_model_at_end": True}
    options["compute_metrics"] = scores(1.0, 2.0, 1.0, 1.0, 1.0, 1.0)
    trainer = fit(tmp_path, EarlyStoppingCallback(2), **options)
    assert trainer.state.global_step == 4 and trainer.state.best_metric == 2.0
    assert_refused("eval_strategy", fit, tmp_path, EarlyStoppingCallback(), metric_for_best_model="loss")


@row(140, 141)
def test_the_logging_strategy_decides_when_and_log_is_overridden(tmp_path):
    class Louder(Trainer):
        def log(self, logs, start_time=None):
            super().log({**logs, "extra": 7}, start_time)

    def steps(**options):
        return logged(fit(tmp_path, **options), "step")

    assert steps(logging_steps=2) == [2, 4]
    assert steps(logging_steps=3, logging_first_step=True) == [1, 3]
    assert steps(logging_strategy="epoch", num_train_epochs=2) == [5, 10]
    assert steps(logging_strategy="no") == []
    every, rarely = fit(tmp_path, num_train_epochs=2), fit(tmp_path, num_train_epochs=2, logging_steps=10)
    assert losses(rarely) == pytest.approx([np.mean(losses(every))], rel=1e-6)  # over the end of an epoch
    assert all(entry["extra"] == 7 for entry in fit(tmp_path, kind=Louder).state.log_history)


@row(142)
def test_the_progress_bar_can_be_disabled(tmp_path, capsys):
    fit(tmp_path, disable_tqdm=True)
    assert "it/s" not in capsys.readouterr().err
    fit(tmp_path, disable_tqdm=False, eval_dataset=rows(4), eval_strategy="epoch")
    assert "5/5" in capsys.readouterr().err


@row(144)
def test_trackers_are_callbacks_of_transformers(tmp_path):
    pytest.importorskip("tensorboard")
    pytest.importorskip("transformers")
    trainer = fit(tmp_path, report_to="tensorboard")
    assert "TensorBoardCallback" in trainer.callback_handler.callback_list
    assert list((tmp_path / "runs").rglob("events.out*"))
    with pytest.warns(UserWarning, match="logging_dir"):
        fit(tmp_path, report_to="tensorboard", logging_dir=str(tmp_path / "board"))
    assert list((tmp_path / "board").rglob("events.out*"))
    assert "TensorBoardCallback" not in made(tmp_path).callback_handler.callback_list
    assert_refused("nonsense", made, tmp_path, report_to="nonsense")


class Color(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Options:
    name: str = field(default="a", metadata={"help": "A name."})
    is_fast: bool = True
    sizes: list[int] = field(default_factory=lambda: [1])
    color: Color = Color.RED
    kind: Literal["x", "y"] = "x"
    limit: Optional[int] = None  # noqa: UP045 - as people write it


def parse(*argv):
    return HfArgumentParser((Options, TrainingArguments)).parse_args_into_dataclasses(list(argv))


@row(147, 148, 149, 150, 151)
def test_flags_and_files_become_dataclasses(tmp_path):
    options, args = parse("--name", "b", "--learning_rate", "0.5", "--output_dir", "out")
    assert options.name == "b" and args.learning_rate == 0.5 and args.output_dir == "out"
    assert parse("--learning-rate", "0.5", "--is-fast", "false")[1].learning_rate == 0.5
    assert parse("--no_is_fast")[0].is_fast is False and parse("--is_fast", "no")[0].is_fast is False
    assert parse("--bf16")[1].bf16 is True
    options, _ = parse("--sizes", "1", "2", "--color", "blue", "--kind", "y", "--limit", "3")
    assert options == Options(sizes=[1, 2], color=Color.BLUE, kind="y", limit=3)
    (tmp_path / "run.yaml").write_text("learning_rate: 0.5\nname: from_file\n")
    options, args = HfArgumentParser((Options, TrainingArguments)).parse_yaml_file(tmp_path / "run.yaml")
    assert (options.name, args.learning_rate) == ("from_file", 0.5)
    options, args = parse("--config", str(tmp_path / "run.yaml"), "--name", "from_flag")
    assert (options.name, args.learning_rate) == ("from_flag", 0.5)


@row(157)
def test_the_seed_decides_the_run(tmp_path):
    one, two, other = (fit(tmp_path, model_init=Classifier, seed=seed) for seed in (3, 3, 4))
    assert not differ(one, two) and differ(one, other)
    hf.set_seed(5)
    first = torch.rand(2)
    hf.set_seed(5)
    assert torch.equal(first, torch.rand(2))


@row(161, 162)
def test_flags_for_scripts_are_kept_and_conflicting_options_refused(tmp_path):
    args = arguments(tmp_path, do_train=True, resume_from_checkpoint="x", eval_strategy="epoch")
    assert args.do_train and args.do_eval and args.resume_from_checkpoint == "x" and not args.do_predict
    optimizer = torch.optim.SGD(Classifier().parameters())
    for text, options in (
        ("no eval_dataset", {"eval_strategy": "epoch"}),
        ("eval_strategy", {"load_best_model_at_end": True}),
        ("dataloader_num_workers", {"dataloader_prefetch_factor": 2}),
        ("compute_result", {"batch_eval_metrics": True, "compute_metrics": lambda prediction: {}}),
        ("model_init", {"optimizers": (optimizer, None), "model_init": Classifier}),
    ):
        assert_refused(text, made, tmp_path, **options)


@row(163)
def test_any_module_that_takes_the_batch_and_returns_a_loss_works(tmp_path, plain):
    class Tuple(Classifier):
        def forward(self, x, labels=None):
            outputs = super().forward(x, labels)
            return (outputs["loss"], outputs["logits"]) if labels is not None else (outputs["logits"],)

    for kind in (Tuple, tiny.GreedyKeywords):
        torch.manual_seed(0)
        assert losses(fit(tmp_path, model=kind())) == losses(plain)
    assert made(tmp_path, model=Tuple()).predict(rows(4)).predictions.shape == (4, 3)
    data = [{"x": torch.zeros(4)}] * 4
    assert_refused("given x and returned logits", fit, tmp_path, data=data, error=ValueError)
