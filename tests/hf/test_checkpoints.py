"""Checkpoint folders: their files, exact resumes, the best model, and refusals."""

import json
import os
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file

from loopwright.errors import CheckpointError, DataError, Preempted
from loopwright.hf import EarlyStoppingCallback, TrainerCallback, TrainerState

from . import tiny
from .tiny import TOKENS, Classifier, assert_refused, at_step, fit, made, on, rows, weights

EVERY_SECOND = {"save_strategy": "steps", "save_steps": 2}
EVERY_UPDATE = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}


def crash_after(update):
    """Return a callback that ends the run after an update as a crash would: without the events of an end."""

    def crash(args, state, control, **kwargs):
        if state.global_step == update:
            raise KeyboardInterrupt

    return on(step_begin=crash)


def trained(folder, *callbacks, **options):
    torch.manual_seed(0)
    return fit(folder, *callbacks, **{"model": Classifier(dropout=0.3), "eval_dataset": rows(12, seed=5), **options})


def holds(trainer, saved):
    return all(torch.equal(weights(trainer)[name], value) for name, value in saved.items())


def assert_same_run(one, other):
    assert one.output.global_step == other.output.global_step
    assert one.output.training_loss == other.output.training_loss
    assert weights(one).keys() == weights(other).keys() and holds(one, weights(other))
    entries = [
        [{key: value for key, value in entry.items() if "second" not in key and "runtime" not in key} for entry in log]
        for log in (one.state.log_history, other.state.log_history)
    ]
    assert entries[0] == entries[1]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    options = {"num_train_epochs": 2, "save_steps": 1, "save_strategy": "steps", "gradient_accumulation_steps": 2}
    options |= {"per_device_train_batch_size": 2, "eval_strategy": "steps", "eval_steps": 2, "data": tiny.NoisyRows()}
    return trained(tmp_path_factory.mktemp("whole"), **options), options


@pytest.mark.parametrize("cut", [3, 5, 8])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path, whole_run, cut):
    whole, options = whole_run
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path, crash_after(cut), **options)
    assert_same_run(whole, trained(tmp_path, resume=True, **options))


def test_a_checkpoint_of_a_transformers_model_is_read_by_from_pretrained(tmp_path):
    transformers = pytest.importorskip("transformers")

    def collate(samples):
        labels = torch.tensor([sample["labels"] for sample in samples])
        return {"input_ids": torch.stack([sample["input_ids"] for sample in samples]), "labels": labels}

    options = {"processing_class": tiny.CharacterTokenizer(), "data_collator": collate, **EVERY_SECOND}
    trainer = fit(tmp_path, model=tiny.bert(), data=TOKENS, **options)
    names = sorted(path.name for path in (tmp_path / "checkpoint-2").iterdir())
    assert {"model.safetensors", "config.json", "tokenizer.json", "trainer_state.json", "MANIFEST.json"} <= set(names)
    assert not {"optimizer.pt", "scheduler.pt", "training_args.bin", "rng_state.pth"} & set(names)
    loaded = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "checkpoint-2")
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in weights(trainer).items())
    state = TrainerState.load_from_json(tmp_path / "checkpoint-2" / "trainer_state.json")
    assert state.global_step == 2 and [entry["step"] for entry in state.log_history] == [1, 2]


def test_files_that_callbacks_add_to_a_checkpoint_do_not_spoil_it(tmp_path):
    def add(args, state, control, **kwargs):
        with open(os.path.join(args.output_dir, f"checkpoint-{state.global_step}", "notes.txt"), "w") as file:
            file.write("mine")

    trained(tmp_path, on(save=add), **EVERY_SECOND)
    resumed = trained(tmp_path, on(save=add), **EVERY_SECOND, num_train_epochs=2, resume=True)
    assert resumed.state.global_step == 10
    assert (tmp_path / "checkpoint-10" / "notes.txt").read_text() == "mine"


def test_damaged_newest_checkpoints_are_skipped(tmp_path, capsys):
    options = {**EVERY_SECOND, "num_train_epochs": 2}
    whole = trained(tmp_path / "a", **options)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for name in ("checkpoint-10", "checkpoint-8"):
        path = tmp_path / "b" / name / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-4] + b"xxxx")
    resumed = trained(tmp_path / "b", **options, resume=True)
    assert capsys.readouterr().out.count("Skipping a bad checkpoint") == 2
    assert_same_run(whole, resumed)


def test_a_checkpoint_of_another_model_or_other_data_and_a_missing_one_are_refused(tmp_path):
    assert_refused("holds no checkpoint", trained, tmp_path, resume=True)
    assert_refused("not a folder", trained, tmp_path, resume=tmp_path / "checkpoint-7")
    trained(tmp_path, **EVERY_SECOND)
    other = {"model": Classifier(classes=5), "resume": True}
    assert_refused("another model", trained, tmp_path, error=CheckpointError, **other)
    text = "20 samples|started with 20"
    assert_refused(text, trained, tmp_path, data=rows(24), resume=True, error=DataError)


def test_the_newest_checkpoints_and_the_best_one_are_kept(tmp_path):
    values = iter([1.0, 0.2, 0.6, 0.5, 0.4])
    options = {"save_total_limit": 1, "metric_for_best_model": "score", "greater_is_better": False, **EVERY_UPDATE}
    options |= {"load_best_model_at_end": True, "compute_metrics": lambda prediction: {"score": next(values)}}
    trainer = trained(tmp_path, **options)
    assert tiny.folders(tmp_path) == ["checkpoint-2", "checkpoint-5"]
    assert trainer.state.best_metric == 0.2 and trainer.state.best_global_step == 2
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    assert holds(trainer, load_file(tmp_path / "checkpoint-2" / "model.safetensors"))


@pytest.mark.parametrize("save", ["no", "steps", "epoch", "best"])
@pytest.mark.parametrize("evaluate", ["steps", "epoch"])
def test_the_best_model_is_loaded_whatever_the_strategies(tmp_path, save, evaluate):
    values = iter([0.5, 0.1, 0.9, 0.3, 0.2, 0.2, 0.2])
    seen = {}

    def compute_metrics(prediction):
        seen[trainer.state.global_step] = weights(trainer)
        return {"score": next(values)}

    options = {"num_train_epochs": 3, "save_strategy": save, "save_steps": 4, "eval_strategy": evaluate}
    options |= {"eval_steps": 3, "load_best_model_at_end": True, "metric_for_best_model": "score"}
    trainer = made(tmp_path, eval_dataset=rows(8), compute_metrics=compute_metrics, **options)
    trainer.train()
    best = {"steps": 9, "epoch": 15}[evaluate]
    assert trainer.state.best_metric == 0.9 and trainer.state.best_global_step == best
    assert holds(trainer, seen[best])


def test_a_new_run_in_the_same_folder_sets_the_old_checkpoints_aside(tmp_path, caplog):
    trained(tmp_path, **EVERY_SECOND)
    trained(tmp_path, save_strategy="steps", save_steps=3)
    assert tiny.folders(tmp_path) == ["checkpoint-3", "checkpoint-5"]
    assert len(list(tmp_path.glob(".superseded-*"))) == 3
    assert "set aside" in caplog.text and "resume_from_checkpoint=True" in caplog.text
    trained(tmp_path, save_strategy="steps", save_steps=4)
    assert len(list(tmp_path.glob(".superseded-*"))) == 2


def test_the_state_of_callbacks_is_restored(tmp_path, capsys):
    options = {**EVERY_UPDATE, "metric_for_best_model": "score", "load_best_model_at_end": True, "num_train_epochs": 3}
    options["compute_metrics"] = lambda prediction: {"score": -float(len(os.listdir(tmp_path)))}  # ever worse
    stopping, again = (EarlyStoppingCallback(early_stopping_patience=4) for _ in range(2))
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path, crash_after(3), stopping, **options)
    assert stopping.early_stopping_patience_counter == 2
    counts = TrainerCallback()
    trainer = trained(tmp_path, again, counts, resume=True, **options)
    assert trainer.state.global_step == 5 and again.early_stopping_patience_counter == 4
    counts.seen = 100  # of another kind than the callback that has stopped the run
    trainer = trained(tmp_path, EarlyStoppingCallback(early_stopping_patience=4), counts, resume=True, **options)
    assert trainer.state.global_step == 5  # it has ended, and stays so until its rule is changed
    options["model"] = Classifier(dropout=0.5)
    trainer = trained(tmp_path, EarlyStoppingCallback(early_stopping_patience=5), resume=True, **options)
    assert trainer.state.global_step == 6 and "model.dropout.p: 0.3 -> 0.5" in capsys.readouterr().out


def test_a_signal_saves_and_the_run_resumes_exactly(tmp_path):
    options = {"save_strategy": "epoch", "num_train_epochs": 2}
    whole = trained(tmp_path / "whole", **options)
    with pytest.raises(Preempted):
        trained(tmp_path / "cut", at_step(3, lambda control: signal.raise_signal(signal.SIGTERM)), **options)
    assert tiny.folders(tmp_path / "cut") == ["checkpoint-3"]
    assert_same_run(whole, trained(tmp_path / "cut", resume=True, **options))


def test_save_model_and_save_state_write_loadable_files(tmp_path):
    trainer = trained(tmp_path / "run")
    trainer.save_model(tmp_path / "model")
    trainer.save_state()
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in weights(trainer).items())
    assert json.loads((tmp_path / "model" / "training_args.json").read_text())["learning_rate"] == 1e-2
    assert TrainerState.load_from_json(tmp_path / "run" / "trainer_state.json").log_history == trainer.state.log_history
    assert len(tiny.losses(trainer)) == 5


def lora(seed=0):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = tiny.bert()
    if seed:
        with torch.no_grad():
            base.bert.encoder.layer[0].output.dense.weight.add_(seed)
    return peft.get_peft_model(base, peft.LoraConfig(target_modules=["query"], r=2, task_type="SEQ_CLS"))


def test_a_peft_model_saves_its_adapter_without_the_base_model(tmp_path):
    peft = pytest.importorskip("peft")
    trainer = trained(tmp_path, model=lora(), data=TOKENS, eval_dataset=TOKENS, **EVERY_UPDATE)
    loaded = peft.PeftModel.from_pretrained(tiny.bert(), tmp_path / "checkpoint-2")
    adapter = {name: value for name, value in weights(trainer).items() if "lora" in name}
    assert adapter and all(torch.equal(loaded.state_dict()[name], value) for name, value in adapter.items())
    saved = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    frozen = {name for name, value in trainer.model.named_parameters() if not value.requires_grad}
    assert adapter.keys() <= saved.keys() and not frozen & saved.keys()
    assert not (tmp_path / "checkpoint-2" / "config.json").exists()


def test_a_peft_model_is_resumed_and_its_best_adapter_loaded_exactly(tmp_path):
    scores = iter([1.0, 3.0, 2.0, 0.0])
    options = {**EVERY_UPDATE, "num_train_epochs": 2, "data": TOKENS, "eval_dataset": TOKENS}
    whole = trained(tmp_path / "whole", model=lora(), **options)
    resumed = trained(tmp_path / "resumed", model=lora(), resume=tmp_path / "whole" / "checkpoint-2", **options)
    assert holds(whole, weights(resumed))
    tracked = {**options, "load_best_model_at_end": True, "metric_for_best_model": "score"}
    best = trained(tmp_path / "best", model=lora(), compute_metrics=lambda _: {"score": next(scores)}, **tracked)
    kept = load_file(tmp_path / "whole" / "checkpoint-2" / "model.safetensors")
    assert kept and holds(best, kept)
    other = {"model": lora(seed=1), "resume": True, "error": CheckpointError, **options}
    assert_refused("trained on another base model", trained, tmp_path / "whole", **other)
