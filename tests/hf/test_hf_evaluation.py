"""Evaluation at its edges: metrics that are no numbers, datasets by name, what generation is told, levels of logs."""

from __future__ import annotations

import json
import logging
import math
import os
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from loopwright.errors import ConfigError
from loopwright.hf import EarlyStoppingCallback, Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, set_seed

from .tiny import Classifier, arguments, largest_difference, rows, t5, weights


def scored(folder, scores, *callbacks, **options):
    """Return a trainer with an evaluation of the given score after each of its epochs of five updates."""
    values = iter(scores)
    options = {"metric_for_best_model": "score", "eval_strategy": "epoch", "num_train_epochs": len(scores), **options}
    torch.manual_seed(0)
    return Trainer(
        Classifier(),
        arguments(folder, **options),
        train_dataset=rows(20),
        eval_dataset=rows(4),
        compute_metrics=lambda _: {"score": next(values)},
        callbacks=list(callbacks),
    )


def test_a_metric_that_is_no_number_is_never_the_best(tmp_path):
    options = {"lr_scheduler_type": "constant", "save_total_limit": 1}
    longer = scored(tmp_path / "longer", [math.nan, 1.0, 2.0, 1.5], load_best_model_at_end=True, **options)
    longer.train()
    assert (longer.state.best_metric, longer.state.best_global_step) == (2.0, 15)
    shorter = scored(tmp_path / "shorter", [math.nan, 1.0, 2.0], **options)
    shorter.train()
    assert largest_difference(weights(shorter), weights(longer)) == 0


def test_where_no_metric_is_a_number_the_last_weights_stay_and_that_is_told(tmp_path, capsys):
    options = {"load_best_model_at_end": True, "save_strategy": "epoch"}
    trainer = scored(tmp_path, [math.nan] * 3, EarlyStoppingCallback(2), **options)
    trainer.train()
    assert trainer.state.global_step == 15 and trainer.state.best_global_step is None
    assert "No evaluation found a best model" in capsys.readouterr().out
    resumed = scored(tmp_path, [math.nan, 4.0], num_train_epochs=5, **options)
    resumed.train(resume_from_checkpoint=True)
    assert (resumed.state.best_metric, resumed.state.best_global_step) == (4.0, 25)


def test_metrics_that_are_arrays_are_returned_as_they_are_and_written_as_lists(tmp_path):
    told = {
        "each": np.array([0.5, math.nan]),
        "counts": torch.tensor([1, 2]),
        "pair": (np.float32(0.5), 2),
        "kind": {1},
    }
    torch.manual_seed(0)
    trainer = Trainer(
        Classifier(),
        arguments(tmp_path, eval_strategy="epoch", save_strategy="epoch"),
        train_dataset=rows(8),
        eval_dataset=rows(4),
        compute_metrics=lambda _: told,
    )
    trainer.train()
    metrics = trainer.evaluate()
    assert metrics["eval_each"] is told["each"] and metrics["eval_counts"] is told["counts"]
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    entry = next(entry for entry in state["log_history"] if "eval_each" in entry)
    assert entry["eval_each"][0] == 0.5 and math.isnan(entry["eval_each"][1])
    assert (entry["eval_counts"], entry["eval_pair"], entry["eval_kind"]) == ([1, 2], [0.5, 2], "{1}")
    trainer.save_metrics("eval", metrics)
    assert json.loads((tmp_path / "eval_results.json").read_text())["eval_counts"] == [1, 2]


def test_a_loss_among_the_metrics_counts_as_with_transformers(tmp_path):
    def evaluated(**metrics):
        trainer = Trainer(Classifier(), arguments(tmp_path), compute_metrics=lambda _: metrics)
        return trainer.evaluate(rows(4))["eval_loss"]

    assert evaluated(loss=9.0) == 9.0 and evaluated(eval_loss=9.0) < 9.0


def test_the_model_is_left_in_evaluation_mode_where_transformers_leaves_it_so(tmp_path):
    trainer = Trainer(Classifier(), arguments(tmp_path), train_dataset=rows(8), eval_dataset=rows(4))
    trainer.train()
    assert trainer.model.training
    trainer.evaluate()
    assert not trainer.model.training and not trainer.model.dropout.training
    trainer.args.eval_strategy = "epoch"
    trainer.train()
    assert not trainer.model.training
    trainer.model.train()
    trainer.predict(rows(4))
    assert not trainer.model.training


def test_an_evaluation_of_ones_own_may_return_nothing_and_a_prediction_step_a_number(tmp_path):
    class Silent(Trainer):
        def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
            super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            return 0.5, None, None

    args = arguments(tmp_path, eval_strategy="epoch", save_strategy="epoch")
    trainer = Silent(Classifier(), args, train_dataset=rows(8), eval_dataset=rows(4))
    trainer.train()
    assert [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry] == [0.5]


def test_a_batch_may_ask_for_a_loss_that_needs_no_labels(tmp_path):
    class Pairs(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x, other, return_loss=None):
            logits = self.linear(x) @ self.linear(other).T
            if not return_loss:
                return {"logits": logits}
            return {"loss": nn.functional.cross_entropy(logits, torch.arange(len(x))), "logits": logits}

    def collate(samples, **more):
        columns = {name: torch.stack([sample[name] for sample in samples]) for name in ("x", "other")}
        return {**columns, **more}

    data = [{"x": sample["x"], "other": 2 * sample["x"]} for sample in rows(8)]
    asks = partial(collate, return_loss=True)
    args = arguments(tmp_path, per_device_eval_batch_size=4)
    trainer = Trainer(Pairs(), args, data_collator=asks, compute_metrics=lambda p: {"rows": len(p.predictions)})
    metrics = trainer.evaluate(data)
    assert metrics["eval_rows"] == 8
    halves = [trainer.model(**asks(half))["loss"].item() for half in (data[:4], data[4:])]
    assert metrics["eval_loss"] == pytest.approx(sum(halves) / 2, rel=1e-6)
    assert "eval_loss" not in Trainer(Pairs(), args, data_collator=collate).evaluate(data)


def test_a_dataset_is_named_and_a_wrong_name_is_told(tmp_path):
    trainer = Trainer(Classifier(), arguments(tmp_path), eval_dataset={"easy": rows(4), "hard": rows(6)})
    assert trainer.evaluate("hard")["eval_loss"] == trainer.evaluate(rows(6))["eval_loss"]
    with pytest.raises(ConfigError, match="eval_dataset has no 'hart', it has easy, hard: did you mean hard?"):
        trainer.evaluate("hart")
    with pytest.raises(
        ConfigError, match="'hard' is not a dataset: to select one by its name, eval_dataset must be a dict"
    ):
        Trainer(Classifier(), arguments(tmp_path), eval_dataset=rows(4)).evaluate("hard")


def test_data_without_a_length_is_told_what_it_needs(tmp_path):
    trainer = Trainer(Classifier(), arguments(tmp_path))
    with pytest.raises(ConfigError, match="a generator has no length and is not an IterableDataset: add a __len__"):
        trainer.evaluate(sample for sample in rows(4))


def test_inputs_for_the_metrics_are_those_of_the_main_input_or_told_to_be_missing(tmp_path):
    class Named(Classifier):
        main_input_name = "x"

    def evaluated(model):
        args = arguments(tmp_path, include_for_metrics="inputs")
        return Trainer(model, args, compute_metrics=lambda p: {"rows": len(p.inputs)}).evaluate(rows(4))

    assert evaluated(Named())["eval_rows"] == 4
    with pytest.raises(ConfigError, match="a batch has no input_ids: it has x, labels. Set main_input_name"):
        evaluated(Classifier())


def test_one_label_name_may_be_given_as_it_is(tmp_path):
    trainer = Trainer(Classifier(), arguments(tmp_path, label_names="labels"))
    assert trainer.label_names == ["labels"] and "eval_loss" in trainer.evaluate(rows(4))


def test_what_one_evaluation_generates_with_is_forgotten_by_the_next(tmp_path):
    pytest.importorskip("transformers")
    data = [{"input_ids": torch.arange(3, 8), "labels": torch.arange(3, 6)} for _ in range(2)]
    args = Seq2SeqTrainingArguments(
        str(tmp_path), predict_with_generate=True, generation_max_length=9, disable_tqdm=True
    )
    trainer = Seq2SeqTrainer(t5(), args, compute_metrics=lambda p: {"length": p.predictions.shape[1]})
    trainer.model.generation_config.eos_token_id = None  # so that every text is as long as it may be
    assert trainer.evaluate(data, max_length=4)["eval_length"] == 4
    assert trainer.evaluate(data, metric_key_prefix="eval_late")["eval_late_length"] == 9
    both = trainer.evaluate({"a": data, "b": data}, max_length=5)
    assert (both["eval_a_length"], both["eval_b_length"]) == (5, 5)


def test_a_model_that_cannot_generate_is_told(tmp_path):
    args = Seq2SeqTrainingArguments(str(tmp_path), predict_with_generate=True, disable_tqdm=True)
    with pytest.raises(ConfigError, match=r"needs a model with generate\(\): Classifier has none"):
        Seq2SeqTrainer(Classifier(), args).predict(rows(2))


def test_callbacks_that_are_no_list_are_told(tmp_path):
    with pytest.raises(ConfigError, match="callbacks must be a list, got a EarlyStoppingCallback"):
        Trainer(Classifier(), arguments(tmp_path), callbacks=EarlyStoppingCallback())


def test_metrics_cannot_be_added_to_a_file_that_is_no_json(tmp_path):
    (tmp_path / "all_results.json").write_text("{half")
    with pytest.raises(ConfigError, match="all_results.json is not a JSON file"):
        Trainer(Classifier(), arguments(tmp_path)).save_metrics("eval", {"eval_loss": 0.5})


def test_the_log_level_shows_what_it_says_and_that_of_a_replica_is_its_own(tmp_path, monkeypatch, capsys):
    logger = logging.getLogger("loopwright")
    for name, value in (("handlers", []), ("propagate", False), ("level", logger.level)):
        monkeypatch.setattr(logger, name, value)  # as in a program that has not set up logging
    Trainer(Classifier(), arguments(tmp_path))
    assert logger.handlers == []
    Trainer(Classifier(), arguments(tmp_path, log_level="info"))
    Trainer(Classifier(), arguments(tmp_path, log_level="info"))
    logging.getLogger("loopwright.hf").info("one line")
    assert capsys.readouterr().err == "one line\n"
    monkeypatch.setenv("LOCAL_RANK", "1")
    Trainer(Classifier(), arguments(tmp_path, log_level_replica="error"))
    assert logger.level == logging.ERROR


def test_full_determinism_gives_cublas_what_it_needs(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    try:
        set_seed(1, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
        set_seed(1, deterministic=True)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    finally:
        torch.use_deterministic_algorithms(False)
