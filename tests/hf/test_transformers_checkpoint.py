"""Runs of transformers that are continued here: the same numbers, what is refused, and which checkpoint is newest."""

import os
import pickle
import random
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import loopwright.hf as ours
from loopwright.checkpoint import store
from loopwright.errors import CheckpointError

from . import tiny
from .test_checkpoints import assert_same_run, crash_after, lora
from .tiny import assert_refused, largest_difference, logged, losses, on, weights

theirs = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers")

ROWS = [{"input_ids": torch.arange(3, 9) + index % 20, "labels": index % 3} for index in range(40)]
BY_LOSS = {"eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True, "optim": "sgd"}


def trained(library, folder, *callbacks, make=tiny.bert, data=ROWS, resume=None, metrics=None, **options):
    """Return a trainer after a run of 20 updates, or 8 with accumulation, in the order of the data."""
    options = {"num_train_epochs": 2, "per_device_train_batch_size": 4, "warmup_steps": 3, "save_steps": 3, **options}
    options |= {"weight_decay": 0.01, "logging_steps": 1, "train_sampling_strategy": "sequential", "use_cpu": True}
    options |= {"disable_tqdm": True, "report_to": "none"}
    args = library.TrainingArguments(str(folder), **{"learning_rate": 1e-3, **options})
    given = {"eval_dataset": data[:8], "compute_metrics": metrics, "callbacks": list(callbacks)}
    trainer = library.Trainer(make(), args, train_dataset=data, **given)
    trainer.output = trainer.train(resume_from_checkpoint=resume)
    return trainer


def scores(values):
    remaining = iter(values)
    return lambda prediction: {"score": next(remaining)}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(theirs, tmp_path_factory.mktemp("theirs"))


@pytest.fixture
def folder(run, tmp_path):
    """A copy of the folder of a run of transformers, stopped after update 8."""
    for step in (3, 6):
        shutil.copytree(f"{run.args.output_dir}/checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    return tmp_path


CASES = {
    "a classifier": (tiny.bert, ROWS, 6, {}),
    "the end of an epoch": (tiny.bert, ROWS, 10, {"save_strategy": "epoch", "max_steps": 15}),
    "accumulation": (tiny.llama, tiny.token_rows(40), 3, {"gradient_accumulation_steps": 3}),
    "a tied weight": (tiny.t5, tiny.token_rows(40), 6, {"lr_scheduler_type": "cosine"}),
    "an adapter": (lora, ROWS, 6, {}),
    "a schedule by metric": (tiny.bert, ROWS, 6, {"lr_scheduler_type": "reduce_lr_on_plateau", **BY_LOSS}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_continued_run_has_the_numbers_of_transformers(tmp_path, case, capsys):
    make, data, step, options = CASES[case]
    options = {"make": make, "data": data, **options}
    whole = trained(theirs, tmp_path / "theirs", **options)
    again = trained(ours, tmp_path / "ours", resume=tmp_path / "theirs" / f"checkpoint-{step}", **options)
    assert len(losses(again)) == len(losses(whole)) > step
    assert max(abs(one - other) for one, other in zip(losses(again), losses(whole), strict=True)) < 1e-6
    assert logged(again, "learning_rate") == logged(whole, "learning_rate")
    assert largest_difference(weights(again), weights(whole)) < 1e-6
    for name in ("global_step", "epoch", "max_steps", "best_global_step"):
        assert getattr(again.state, name) == getattr(whole.state, name)
    printed = capsys.readouterr().out
    assert f"T3, counted: transformers wrote checkpoint-{step}" in printed and "Changed" not in printed


def test_after_its_first_checkpoint_a_continued_run_resumes_exactly(folder, tmp_path_factory):
    options = {"save_steps": 2, "save_total_limit": 1}
    elsewhere = tmp_path_factory.mktemp("whole")
    whole = trained(ours, elsewhere, resume=folder / "checkpoint-6", **options)
    with pytest.raises(KeyboardInterrupt):
        trained(ours, folder, crash_after(7), resume=True, **options)
    assert tiny.folders(folder) == ["checkpoint-3", "checkpoint-6"]
    with pytest.raises(KeyboardInterrupt):
        trained(ours, folder, crash_after(11), resume=True, **options)
    assert tiny.folders(folder) == ["checkpoint-3", "checkpoint-6", "checkpoint-10"]  # never rotated away
    assert store.verify(folder / "checkpoint-10")["about"]["tier"] == "T3"
    assert_same_run(whole, trained(ours, folder, resume=True, **options))


def test_the_state_of_callbacks_and_the_best_model_of_transformers_are_kept(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True, "save_total_limit": 2}
    options["metric_for_best_model"] = "score"
    values, stopping = [0.1, 0.9, 0.5, 0.4, 0.3, 0.2], ours.EarlyStoppingCallback(early_stopping_patience=4)
    patience = theirs.EarlyStoppingCallback(early_stopping_patience=4)
    with pytest.raises(KeyboardInterrupt):
        trained(theirs, tmp_path, patience, crash_after(9), metrics=scores(values), **options)
    best = load_file(tmp_path / "checkpoint-6" / "model.safetensors")
    trainer = trained(ours, tmp_path, stopping, resume=True, metrics=scores(values[3:]), **options)
    assert trainer.state.global_step == 18 and stopping.early_stopping_patience_counter == 4
    assert trainer.state.best_metric == 0.9 and trainer.state.best_model_checkpoint.endswith("checkpoint-6")
    assert all(torch.equal(weights(trainer)[name], value) for name, value in best.items())


def test_the_newest_checkpoint_is_taken_whoever_wrote_it(folder):
    def resumed(**options):
        found = []
        note = on(train_begin=lambda args, state, control, **kwargs: found.append(state.global_step))
        trained(ours, folder, note, resume=True, max_steps=9, save_steps=2, **options)
        return found[0]

    (folder / "checkpoint-8").mkdir()  # transformers was killed while it wrote this one
    assert resumed() == 6
    assert resumed() == 9
    (folder / "checkpoint-8" / "model.safetensors").write_bytes(b"damaged")
    (folder / "checkpoint-9" / "MANIFEST.json").unlink()
    assert resumed() == 6
    trained(ours, folder, resume=folder / "checkpoint-3", max_steps=4)
    assert tiny.folders(folder) == ["checkpoint-3", "checkpoint-4"]  # what belongs to the other way is set aside
    assert resumed() == 4
    trained(ours, folder, max_steps=2)  # a new run
    assert tiny.folders(folder) == ["checkpoint-2"] and len(list(folder.glob(".superseded-checkpoint-3-*"))) == 1


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "pytorch_model.bin"])
def test_code_in_a_file_is_refused_and_not_run(folder, name):
    class Hostile:
        def __reduce__(self):
            return os.mkdir, (str(folder / "hacked"),)

    source = folder / "checkpoint-6"
    (source / "model.safetensors").rename(source / "model.kept")
    if name != "pytorch_model.bin":
        (source / "model.kept").rename(source / "model.safetensors")
    torch.save({"state": Hostile()}, source / name)
    assert_refused(f"{name} is not read: it holds .*mkdir", trained, ours, folder, resume=True, error=CheckpointError)
    (source / name).write_bytes(pickle.dumps(Hostile()))
    assert_refused(f"{name} is", trained, ours, folder, resume=source, error=CheckpointError)
    assert not (folder / "hacked").exists()


def test_what_does_not_fit_is_refused_by_name(folder):
    source = folder / "checkpoint-6"
    refused = partial(assert_refused, error=CheckpointError)
    continued = partial(trained, ours, folder, resume=True)
    refused("'betas'.*'momentum'.*Set optim", continued, optim="sgd")
    refused(
        "lr_lambdas.*num_bad_epochs",
        continued,
        lr_scheduler_type="reduce_lr_on_plateau",
        **{**BY_LOSS, "optim": "adamw_torch"},
    )
    refused(r"another model.*classifier.bias: \(3,\) saved, \(5,\)", continued, make=partial(tiny.bert, labels=5))
    frozen = tiny.bert()
    frozen.classifier.requires_grad_(False)
    refused(r"groups of the sizes \[\d+, \d+\].*group", continued, make=lambda: frozen)
    saved = torch.load(source / "optimizer.pt")
    saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg_sq"] = torch.zeros(2, 2)
    torch.save(saved, source / "optimizer.pt")
    refused(r"\(2, 2\).*for bert.embeddings.word_embeddings.weight", continued)
    (source / "optimizer.pt").unlink()
    refused("no optimizer.pt.*save_only_model.*from_pretrained", continued)
    assert tiny.folders(folder) == ["checkpoint-3", "checkpoint-6"]


def test_shards_and_generators_are_read_and_changed_settings_are_printed(folder, capsys):
    source, drawn = folder / "checkpoint-6", []
    every = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    for index, names in enumerate((list(every)[:5], list(every)[5:]), 1):
        save_file({name: every[name] for name in names}, source / f"model-0000{index}-of-00002.safetensors")
    states = torch.load(source / "rng_state.pth", weights_only=False)
    draw = on(train_begin=lambda *_, **__: drawn.append((random.random(), np.random.rand(), float(torch.rand(())))))
    trained(ours, folder, draw, resume=True, per_device_train_batch_size=8, learning_rate=5e-4)
    random.setstate(states["python"]), np.random.set_state(states["numpy"]), torch.set_rng_state(states["cpu"])
    assert drawn == [(random.random(), np.random.rand(), float(torch.rand(())))]
    printed = capsys.readouterr().out
    assert "batch_size: 4 -> 8" in printed and "updates per epoch: 10.0 -> 5" in printed
    assert "0.001 -> 0.0005" in printed and "but for the changes above" in printed
