"""Methods of transformers' Trainer that libraries override: each is called, and means the same."""

import functools
import json
import re
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import loopwright.hf as ours
from loopwright.checkpoint import read, verify
from loopwright.checkpoint.hidden_state import Attributes, HiddenState
from loopwright.errors import BatchLossError, CheckpointError
from loopwright.hf import Trainer
from toys import seeded

from .tiny import Classifier, GreedyKeywords, bert, fit, folders, largest_difference, losses, made, rows, same, weights

theirs = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers")

SAVES = {"save_strategy": "steps", "save_steps": 2}


class Described(Trainer):
    """Saves a description beside the model, as libraries do that have a format of their own."""

    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)
        folder = Path(output_dir) / "1_Pooling"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"step": self.state.global_step}))


class Renamed(Trainer):
    """Writes the weights under other names, in the file that a checkpoint usually has for its own."""

    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, {f"inner.{name}": value for name, value in self.model.state_dict().items()})


@pytest.mark.parametrize("kind", [Described, Renamed])
def test_the_files_of_an_overridden_save_are_part_of_the_checkpoint(kind, tmp_path):
    whole, plain = fit(tmp_path / "own", kind=kind, **SAVES), fit(tmp_path / "plain", **SAVES)
    assert same(whole, plain)
    checkpoint = tmp_path / "own" / "checkpoint-4"
    listed = verify(checkpoint)["files"]
    saved = load_file(checkpoint / "model.safetensors")
    if kind is Described:
        assert json.loads((checkpoint / "1_Pooling" / "config.json").read_text()) == {"step": 4}
        assert "1_Pooling/config.json" in listed and "weights.safetensors" not in listed  # they are stored once
        (checkpoint / "1_Pooling" / "config.json").write_text("{}")
    else:
        assert all(name.startswith("inner.") for name in saved) and "weights.safetensors" in listed
        save_file({**saved, "more": torch.ones(1)}, checkpoint / "model.safetensors")
    assert not list((tmp_path / "own").glob(".tmp-*"))
    with pytest.raises(CheckpointError, match="damaged"):
        verify(checkpoint)


@pytest.mark.parametrize("kind", [Described, Renamed])
def test_a_run_with_an_overridden_save_resumes_exactly(kind, tmp_path):
    whole = fit(tmp_path, kind=kind, **SAVES)
    resumed = fit(tmp_path, kind=kind, resume=tmp_path / "checkpoint-2", **SAVES)
    assert same(whole, resumed)
    assert largest_difference(read(tmp_path / "checkpoint-4").model, read_weights(tmp_path / "checkpoint-4")) == 0


def test_a_file_that_a_checkpoint_cannot_hold_is_left_out_and_the_run_goes_on(tmp_path, caplog):
    class Hiding(Trainer):
        def _save(self, output_dir=None, state_dict=None):
            super()._save(output_dir, state_dict)
            (Path(output_dir) / ".cache file").write_text("")

    assert fit(tmp_path, kind=Hiding, **SAVES).state.global_step == 5
    assert "'.cache file'" in caplog.text and "training_args.json" in verify(tmp_path / "checkpoint-4")["files"]


def read_weights(folder):
    name = "weights" if (folder / "weights.safetensors").exists() else "model"
    return load_file(folder / f"{name}.safetensors")


def test_an_overridden_save_checkpoint_wraps_every_save(tmp_path):
    class Own(Trainer):
        def _save_checkpoint(self, model, trial):
            order.append(f"before {self.state.global_step}")
            super()._save_checkpoint(model, trial)
            order.append((self.folder_of_step() / "MANIFEST.json").exists())

        def folder_of_step(self):
            return tmp_path / f"checkpoint-{self.state.global_step}"

    order = []
    fit(tmp_path, kind=Own, **SAVES)
    assert order == ["before 2", True, "before 4", True, "before 5", True]
    assert folders(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-5"]


def test_a_save_checkpoint_that_saves_nothing_is_reported_each_time(tmp_path, capsys):
    class Own(Trainer):
        def _save_checkpoint(self, model, trial):
            pass

    fit(tmp_path, kind=Own, **SAVES)
    reported = re.findall(r"checkpoint-(\d): Own._save_checkpoint never called super", capsys.readouterr().out)
    assert folders(tmp_path) == [] and set(reported) == {"2", "4", "5"}


def test_checkpoints_go_to_the_overridden_output_folder(tmp_path):
    class Own(Trainer):
        def _get_output_dir(self, trial):
            return f"{self.args.output_dir}/elsewhere"

    options = {**SAVES, "eval_strategy": "steps", "eval_steps": 2, "eval_dataset": rows(4)}
    trainer = fit(tmp_path, kind=Own, load_best_model_at_end=True, **options)
    assert folders(tmp_path / "elsewhere") == ["checkpoint-2", "checkpoint-4", "checkpoint-5"]
    assert folders(tmp_path) == [] and "elsewhere" in trainer.state.best_model_checkpoint


def test_an_overridden_inner_loop_is_called_around_ours(tmp_path):
    class Timed(Trainer):
        @functools.wraps(Trainer._inner_training_loop)
        def _inner_training_loop(self, *args, **kwargs):
            calls.append("begin")
            output = super()._inner_training_loop(*args, **kwargs)
            calls.append(output.global_step)
            return output

    calls = []
    assert same(fit(tmp_path, kind=Timed), fit(tmp_path)) and calls == ["begin", 5]


def test_a_copied_inner_loop_is_reported_and_not_called(tmp_path, caplog):
    class Copied(Trainer):
        def _inner_training_loop(self, batch_size=None, args=None, **kwargs):
            for inputs in self.get_train_dataloader():
                self.training_step(self.model, inputs)

    assert same(fit(tmp_path, kind=Copied), fit(tmp_path))
    assert caplog.text.count("Copied._inner_training_loop is not called") == 1


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_loss_that_is_scaled_for_the_update_is_added_up_as_in_transformers(accumulation, tmp_path):
    """GRPO divides by the tokens of the whole update, by itself."""

    def kind(library):
        class Scaled(library.Trainer):
            loss_is_scaled_for_ga = True

            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                outputs = model(**inputs)
                loss = nn.functional.cross_entropy(outputs["logits"], inputs["labels"], reduction="sum")
                loss = loss / num_items_in_batch + outputs["logits"].mean() / self.current_gradient_accumulation_steps
                return (loss, outputs) if return_outputs else loss

        return Scaled

    options = {"gradient_accumulation_steps": accumulation, "per_device_train_batch_size": 2, "max_steps": 5}
    options |= {"train_sampling_strategy": "sequential", "logging_steps": 1, "save_strategy": "no"}
    trained = []
    for library in (ours, theirs):
        torch.manual_seed(0)
        args = library.TrainingArguments(str(tmp_path), disable_tqdm=True, use_cpu=True, report_to="none", **options)
        trainer = kind(library)(GreedyKeywords(), args, train_dataset=rows(14))
        trainer.train()
        trained.append(trainer)
    assert losses(trained[0]) == pytest.approx(losses(trained[1]), rel=1e-6)
    assert largest_difference(weights(trained[0]), weights(trained[1])) < 1e-7


def test_get_batch_samples_may_replace_the_batches_and_their_count(tmp_path):
    class Doubled(Trainer):
        def get_batch_samples(self, epoch_iterator, num_batches, device):
            batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
            return [{**batch, "x": batch["x"] * 2} for batch in batches], count * 2

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            return (
                nn.functional.cross_entropy(outputs["logits"], inputs["labels"], reduction="sum") / num_items_in_batch
            )

    class Halved(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return model(**inputs)["loss"] / 2

    options = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 3, "max_grad_norm": 0}
    double = [{**sample, "x": sample["x"] * 2} for sample in rows(20)]
    one, other = fit(tmp_path, kind=Doubled, **options), fit(tmp_path, kind=Halved, data=double, **options)
    assert losses(one) == pytest.approx(losses(other), rel=1e-6)
    assert largest_difference(weights(one), weights(other)) < 1e-6


def test_get_batch_samples_must_return_as_many_batches(tmp_path):
    class Fewer(Trainer):
        def get_batch_samples(self, epoch_iterator, num_batches, device):
            return [], None

    with pytest.raises(BatchLossError, match="returned 0 batches for an update of 1"):
        fit(tmp_path, kind=Fewer)


def test_the_signature_columns_decide_which_columns_reach_the_collator(tmp_path):
    class Own(Trainer):
        def _set_signature_columns_if_needed(self):
            if self._signature_columns is None:
                self._signature_columns = ["x", "labels", "note"]

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            seen.append(sorted(inputs))
            inputs.pop("note")
            return model(**inputs)["loss"]

    seen = []
    data = [{**sample, "note": 1, "other": 2} for sample in rows(8)]
    fit(tmp_path, kind=Own, data=data, max_steps=1)
    assert seen == [["labels", "note", "x"]]


def test_an_overridden_load_best_model_is_called_with_the_files_of_the_checkpoint(tmp_path):
    class Own(Described):
        def _load_best_model(self):
            super()._load_best_model()
            loaded.append(weights(self))
            self._load_from_checkpoint(self.state.best_model_checkpoint)

    loaded = []
    options = {**SAVES, "eval_strategy": "steps", "eval_steps": 2, "eval_dataset": rows(4)}
    options |= {"metric_for_best_model": "loss", "greater_is_better": True, "load_best_model_at_end": True}
    trainer = fit(tmp_path, kind=Own, **options)
    best = load_file(f"{trainer.state.best_model_checkpoint}/model.safetensors")
    assert trainer.state.best_global_step < 5
    assert largest_difference(loaded[0], best) == largest_difference(weights(trainer), best) == 0


def test_overridden_loading_is_called_on_resume_and_cannot_change_the_restored_state(tmp_path):
    class Own(Trainer):
        def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
            calls.append(resume_from_checkpoint)
            nn.init.zeros_(self.model.linear.weight)

        def _load_optimizer_and_scheduler(self, checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            calls.append(self.optimizer.state_dict()["state"][0]["step"].item())

    calls = []
    whole = fit(tmp_path, kind=Own, **SAVES)
    assert calls == []
    assert same(whole, fit(tmp_path, kind=Own, resume=tmp_path / "checkpoint-2", **SAVES))
    assert calls == [str(tmp_path / "checkpoint-2"), 2.0]


def test_the_model_is_in_evaluation_mode_until_the_metrics_are_logged(tmp_path):
    class Own(Trainer):
        def log(self, logs, start_time=None):
            modes.append(self.model.training)
            super().log(logs, start_time)

    modes = []
    fit(tmp_path, kind=Own, eval_strategy="steps", eval_steps=3, eval_dataset=rows(4), logging_steps=3)
    assert modes[:2] == [True, False]


def test_a_sampler_function_without_arguments_works_as_in_transformers_4(tmp_path):
    class Old(Trainer):
        def _get_train_sampler(self):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    assert same(fit(tmp_path, kind=Old), fit(tmp_path, train_sampling_strategy="sequential"))


def test_the_accelerator_takes_attributes(tmp_path):
    trainer = made(tmp_path, model=bert())
    trainer.accelerator.even_batches = False
    assert trainer.accelerator.even_batches is False
    assert trainer.gather_function(torch.ones(2)).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_what_a_library_keeps_on_its_trainer_is_state_of_the_run(steps, tmp_path):
    """trl counts tokens, buffers generated batches, and collects metrics until they are logged."""

    class Buffering(Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self._metrics, self._step, self._buffered, self.unsaved = {"train": defaultdict(list)}, 0, None, object()

        def training_step(self, model, inputs, num_items_in_batch=None):
            self._buffered = inputs if self._step % 3 == 0 else self._buffered
            self._step += 1
            self._metrics["train"]["seen"].append(self._step)
            return super().training_step(model, self._buffered, num_items_in_batch)

        def log(self, logs, start_time=None):
            super().log({**logs, "seen": sum(self._metrics["train"].pop("seen", []))}, start_time)

    options = {"kind": Buffering, "save_strategy": "steps", "save_steps": 1, "logging_steps": 2}
    whole = fit(tmp_path, **options)
    resumed = fit(tmp_path, resume=tmp_path / f"checkpoint-{steps}", **options)
    assert same(whole, resumed) and resumed._step == 5
    assert type(resumed._metrics["train"]) is defaultdict and resumed._metrics == whole._metrics
    assert [entry["seen"] for entry in resumed.state.log_history] == [
        entry["seen"] for entry in whole.state.log_history
    ]


def test_an_attribute_that_becomes_an_object_or_was_one_is_left_alone_on_resume(tmp_path, capsys):
    class Lazy(Trainer):
        def __init__(self, *args, **kwargs):
            self.train_dataset = kwargs["train_dataset"]
            super().__init__(*args, **kwargs)
            self.helper, self.cache = None, {}

        def training_step(self, model, inputs, num_items_in_batch=None):
            self.helper = self.helper or object()
            self.cache["steps"] = self.state.global_step
            return super().training_step(model, inputs, num_items_in_batch)

    class Rewritten(Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.cache = self.first = object()

    options = {"save_strategy": "steps", "save_steps": 2}
    whole = fit(tmp_path, kind=Lazy, **options)
    assert "train_dataset" in whole.core.own_names
    assert same(whole, fit(tmp_path, kind=Lazy, resume=tmp_path / "checkpoint-2", **options))
    resumed = fit(tmp_path, kind=Rewritten, resume=tmp_path / "checkpoint-2", **options)
    assert resumed.cache is resumed.first and "without the state of trainer.cache" in capsys.readouterr().out


def test_a_checkpoint_cannot_set_attributes_of_the_trainer_itself(tmp_path):
    trainer = made(tmp_path)
    hidden = HiddenState(trainer=Attributes(trainer, trainer.core.own_names))
    assert hidden.restore({"trainer.hub_model_id": "other/name"}, torch.device("cpu")) == ["trainer.hub_model_id"]
    assert trainer.hub_model_id is None


@pytest.mark.parametrize(("divides", "first"), [(True, 0), (False, 0), (True, 1)])
def test_a_training_step_that_reads_the_accumulation_has_the_gradients_of_ours(divides, first, tmp_path):
    """A first loss of 0 does not tell whether it divides; `/=` also changes the loss that was computed."""

    class Copied(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss = super().compute_loss(model, inputs)
            return loss * first if self.state.global_step == 0 else loss

        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = self.compute_loss(model, inputs)
            loss /= self.args.gradient_accumulation_steps if divides else 1
            self.accelerator.backward(loss)
            return loss.detach()

    class Plain(Copied):
        training_step = Trainer.training_step

    options = {"gradient_accumulation_steps": 2, "optim": "sgd", "max_grad_norm": 0}
    assert same(fit(tmp_path, kind=Copied, **options), fit(tmp_path, kind=Plain, **options))


def test_the_weights_of_other_models_and_losses_on_a_trainer_are_state_of_the_run(tmp_path):
    """trl moves a reference model towards the trained one; sentence-transformers trains parameters of its loss."""

    class Following(Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.reference, self.loss = seeded(Classifier), nn.ModuleList([self.model, seeded(nn.Linear, 3, 3)])

        def create_optimizer(self, model=None):
            self.optimizer = torch.optim.AdamW(self.loss.parameters(), lr=0.05)
            return self.optimizer

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            with torch.no_grad():
                for mine, other in zip(self.reference.parameters(), model.parameters(), strict=True):
                    mine.data.lerp_(other, 0.5)
            logits = self.loss[1](model(**inputs)["logits"]) + self.reference(inputs["x"])["logits"]
            return nn.functional.cross_entropy(logits, inputs["labels"])

    options = {"kind": Following, "save_strategy": "steps", "save_steps": 2}
    whole = fit(tmp_path, **options)
    resumed = fit(tmp_path, resume=tmp_path / "checkpoint-2", **options)
    assert same(whole, resumed)
    for one, other in ((whole.reference, resumed.reference), (whole.loss, resumed.loss)):
        assert largest_difference(one.state_dict(), other.state_dict()) == 0


def test_what_a_callback_keeps_is_state_of_the_run(tmp_path):
    class Averaging(ours.TrainerCallback):
        def __init__(self):
            self.average, self.steps, self.started = seeded(Classifier), 0, object()

        def on_step_end(self, args, state, control, model=None, **kwargs):
            self.steps += 1
            for mine, other in zip(self.average.parameters(), model.parameters(), strict=True):
                mine.data.lerp_(other.data, 1 / self.steps)

    callbacks = [Averaging(), Averaging()]
    fit(tmp_path, callbacks[0], **SAVES)
    fit(tmp_path, callbacks[1], resume=tmp_path / "checkpoint-2", **SAVES)
    assert callbacks[1].steps == callbacks[0].steps == 5
    assert largest_difference(callbacks[0].average.state_dict(), callbacks[1].average.state_dict()) == 0
