"""Edge cases of evaluation: metrics that are not numbers, datasets by name, options of generation, log levels."""

import json
import logging
import math
import os
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import toys
from loopwright.hf import EarlyStoppingCallback, Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, set_seed

from .tiny import Classifier, arguments, assert_refused, fit, largest_difference, made, on, rows, same, t5, weights


def scored(folder, scores, *callbacks, **options):
    """Train with an evaluation of the given score after each epoch of five updates."""
    values = iter(scores)
    options = {"metric_for_best_model": "score", "eval_strategy": "epoch", "num_train_epochs": len(scores), **options}
    return fit(folder, *callbacks, eval_dataset=rows(4), compute_metrics=lambda _: {"score": next(values)}, **options)


def test_a_metric_that_is_not_a_number_is_never_the_best(tmp_path):
    options = {"lr_scheduler_type": "constant", "save_total_limit": 1}
    longer = scored(tmp_path / "longer", [math.nan, 1.0, 2.0, 1.5], load_best_model_at_end=True, **options)
    assert (longer.state.best_metric, longer.state.best_global_step) == (2.0, 15)
    shorter = scored(tmp_path / "shorter", [math.nan, 1.0, 2.0], **options)
    assert largest_difference(weights(shorter), weights(longer)) == 0


def test_the_last_weights_are_kept_and_reported_if_no_metric_is_a_number(tmp_path, capsys):
    options = {"load_best_model_at_end": True, "save_strategy": "epoch"}
    trainer = scored(tmp_path, [math.nan] * 3, EarlyStoppingCallback(2), **options)
    assert trainer.state.global_step == 15 and trainer.state.best_global_step is None
    assert "No evaluation found a best model" in capsys.readouterr().out
    resumed = scored(tmp_path, [math.nan, 4.0], num_train_epochs=5, resume=True, **options)
    assert (resumed.state.best_metric, resumed.state.best_global_step) == (4.0, 25)


def test_metrics_may_be_arrays_which_are_written_as_lists_or_replace_the_loss(tmp_path):
    given = {"each": np.array([0.5, math.nan]), "counts": torch.tensor([1, 2]), "pair": (np.float32(0.5), 2)}
    given["kind"] = {1}
    options = {"eval_strategy": "epoch", "save_strategy": "epoch", "data": rows(8), "eval_dataset": rows(4)}
    trainer = fit(tmp_path, compute_metrics=lambda _: given, **options)
    metrics = trainer.evaluate()
    assert metrics["eval_each"] is given["each"] and metrics["eval_counts"] is given["counts"]
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    entry = next(entry for entry in state["log_history"] if "eval_each" in entry)
    assert entry["eval_each"][0] == 0.5 and math.isnan(entry["eval_each"][1])
    assert (entry["eval_counts"], entry["eval_pair"], entry["eval_kind"]) == ([1, 2], [0.5, 2], "{1}")
    trainer.save_metrics("eval", metrics)
    assert json.loads((tmp_path / "eval_results.json").read_text())["eval_counts"] == [1, 2]

    def evaluated(**metrics):
        return made(tmp_path, compute_metrics=lambda _: metrics).evaluate(rows(4))["eval_loss"]

    assert evaluated(loss=9.0) == 9.0 and evaluated(eval_loss=9.0) < 9.0


def test_the_model_is_left_in_evaluation_mode_where_transformers_leaves_it_so(tmp_path):
    trainer = fit(tmp_path, data=rows(8), eval_dataset=rows(4))
    assert trainer.model.training
    trainer.evaluate()
    assert not trainer.model.training and not trainer.model.dropout.training
    trainer.args.eval_strategy = "epoch"
    trainer.train()
    assert not trainer.model.training
    trainer.model.train()
    trainer.predict(rows(4))
    assert not trainer.model.training


def test_an_overridden_evaluate_may_return_nothing_and_a_prediction_step_a_number(tmp_path):
    class Silent(Trainer):
        def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
            super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            return 0.5, None, None

    options = {"eval_strategy": "epoch", "save_strategy": "epoch", "data": rows(8), "eval_dataset": rows(4)}
    trainer = fit(tmp_path, kind=Silent, **options)
    assert [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry] == [0.5]


def test_a_batch_may_request_a_loss_that_needs_no_labels(tmp_path):
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
    options = {"model": Pairs(), "per_device_eval_batch_size": 4}
    trainer = made(tmp_path, data_collator=asks, compute_metrics=lambda p: {"rows": len(p.predictions)}, **options)
    metrics = trainer.evaluate(data)
    assert metrics["eval_rows"] == 8
    halves = [trainer.model(**asks(half))["loss"].item() for half in (data[:4], data[4:])]
    assert metrics["eval_loss"] == pytest.approx(sum(halves) / 2, rel=1e-6)
    assert "eval_loss" not in made(tmp_path, data_collator=collate, **options).evaluate(data)


def test_a_dataset_is_selected_by_its_name_and_a_wrong_name_is_refused(tmp_path):
    trainer = made(tmp_path, eval_dataset={"easy": rows(4), "hard": rows(6)}, label_names="labels")
    assert trainer.label_names == ["labels"] and "eval_loss" in trainer.evaluate(rows(4))  # one needs no list
    assert trainer.evaluate("hard")["eval_loss"] == trainer.evaluate(rows(6))["eval_loss"]
    assert_refused("eval_dataset has no 'hart', it has easy, hard: did you mean hard?", trainer.evaluate, "hart")
    text = "'hard' is not a dataset: to select one by its name, eval_dataset must be a dict"
    assert_refused(text, made(tmp_path, eval_dataset=rows(4)).evaluate, "hard")


def test_options_of_generation_hold_for_one_evaluation(tmp_path):
    data = [{"input_ids": torch.arange(3, 8), "labels": torch.arange(3, 6)} for _ in range(2)]
    options = {"predict_with_generate": True, "generation_max_length": 9, "disable_tqdm": True}
    args = Seq2SeqTrainingArguments(str(tmp_path), **options)
    trainer = Seq2SeqTrainer(t5(), args, compute_metrics=lambda p: {"length": p.predictions.shape[1]})
    trainer.model.generation_config.eos_token_id = None  # so that every text is as long as it may be
    assert trainer.evaluate(data, max_length=4)["eval_length"] == 4
    assert trainer.evaluate(data, metric_key_prefix="eval_late")["eval_late_length"] == 9
    both = trainer.evaluate({"a": data, "b": data}, max_length=5)
    assert (both["eval_a_length"], both["eval_b_length"]) == (5, 5)


def test_bad_input_of_evaluations_is_refused(tmp_path):
    text = "a generator has no length and is not an IterableDataset: add a __len__"
    assert_refused(text, made(tmp_path).evaluate, (sample for sample in rows(4)))
    args = Seq2SeqTrainingArguments(str(tmp_path), predict_with_generate=True, disable_tqdm=True)
    text = r"needs a model with generate\(\): Classifier has none"
    assert_refused(text, Seq2SeqTrainer(Classifier(), args).predict, rows(2))
    options = {"callbacks": EarlyStoppingCallback()}
    text = "callbacks must be a list, got a EarlyStoppingCallback"
    assert_refused(text, Trainer, Classifier(), arguments(tmp_path), **options)
    for text in ("{half", "[1]"):
        (tmp_path / "all_results.json").write_text(text)
        assert_refused("all_results.json is not a JSON object", made(tmp_path).save_metrics, "eval", {"eval_loss": 0.5})


def test_the_log_level_applies_and_replicas_have_their_own(tmp_path, monkeypatch, capsys):
    logger = logging.getLogger("loopwright")
    for name, value in (("handlers", []), ("propagate", False), ("level", logger.level)):
        monkeypatch.setattr(logger, name, value)  # as in a program that has not set up logging
    made(tmp_path)
    assert logger.handlers == []
    made(tmp_path, log_level="info")
    made(tmp_path, log_level="info")
    logging.getLogger("loopwright.hf").info("one line")
    assert capsys.readouterr().err == "one line\n"
    monkeypatch.setenv("LOCAL_RANK", "1")
    made(tmp_path, log_level_replica="error")
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


@pytest.mark.parametrize("event", ["step_begin", "substep_end"])
def test_an_evaluation_within_an_update_changes_neither_its_loss_nor_its_gradients(event, tmp_path):
    options = {"eval_dataset": rows(6), "gradient_accumulation_steps": 2}
    trainer = made(tmp_path, model=toys.seeded(Classifier, dropout=0.3), **options)
    trainer.add_callback(on(**{event: lambda *args, **kwargs: trainer.evaluate() and None}))
    trainer.train()
    assert same(trainer, fit(tmp_path, model=toys.seeded(Classifier, dropout=0.3), **options))
