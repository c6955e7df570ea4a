"""What people get wrong first, and what they are told: each message names what was given and the nearest fix."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from loopwright.errors import BatchLossError, ConfigError, DataError
from loopwright.hf import EarlyStoppingCallback, Trainer, TrainerCallback

from .tiny import Classifier, arguments, bert, rows


class Headless(nn.Module):
    """Returns a tensor, and takes no labels."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(x)


def trainer_of(folder, model=None, data=None, eval_dataset=None, callbacks=None, compute_metrics=None, **options):
    data = rows(8) if data is None else data
    given = {"eval_dataset": eval_dataset, "callbacks": callbacks, "compute_metrics": compute_metrics}
    return Trainer(Classifier() if model is None else model, arguments(folder, **options), train_dataset=data, **given)


def test_a_model_without_labels_is_told_to_compute_the_loss(tmp_path):
    unlabelled = [{"x": sample["x"]} for sample in rows(8)]
    with pytest.raises(
        BatchLossError, match="given x and returned a Tensor. Its forward takes no labels: override com"
    ):
        trainer_of(tmp_path, Headless(), unlabelled).train()
    with pytest.raises(
        DataError, match="the batch has labels, which Headless.forward does not take; it takes x. Add it"
    ):
        trainer_of(tmp_path, Headless()).train()


def test_an_error_of_the_models_own_is_not_explained_away(tmp_path):
    class Broken(Classifier):
        def forward(self, x, labels=None):
            return len(None)

    with pytest.raises(TypeError, match="NoneType"):
        trainer_of(tmp_path, Broken()).train()


def test_labels_by_another_name_are_looked_for_in_the_data(tmp_path):
    data = [{"x": sample["x"], "target": sample["labels"]} for sample in rows(8)]
    expected = r"given x and returned logits. It computes one when it is given labels: .* \(the data also has target\)"
    with pytest.raises(BatchLossError, match=expected):
        trainer_of(tmp_path, data=data).train()


def test_labels_that_are_text_are_told(tmp_path):
    pytest.importorskip("transformers")
    data = [{"input_ids": torch.arange(3, 9), "label": "yes"}] * 8
    with pytest.raises(BatchLossError, match=r"The column label holds text \('yes'\).*class_encode_column\('label'\)"):
        trainer_of(tmp_path, bert(), data).train()


def test_a_metric_that_nothing_computes_is_refused_before_training(tmp_path):
    options = {"eval_dataset": rows(4), "eval_strategy": "epoch", "metric_for_best_model": "accuracy"}
    with pytest.raises(ConfigError, match="'accuracy', but without compute_metrics an evaluation only has a loss"):
        trainer_of(tmp_path, callbacks=[EarlyStoppingCallback(1)], **options)

    class Adding(TrainerCallback):
        def on_evaluate(self, args, state, control, metrics, **kwargs):
            metrics["eval_accuracy"] = 0.5

    adding = trainer_of(tmp_path, callbacks=[Adding()], **options)
    adding.train()
    assert adding.state.best_metric == 0.5
    assert trainer_of(tmp_path, **{**options, "metric_for_best_model": "eval_loss"}).args.greater_is_better is False


def test_metrics_that_are_no_dict_are_told(tmp_path):
    with pytest.raises(ConfigError, match="compute_metrics must return a dict of metrics by name, it returned a float"):
        trainer_of(tmp_path, eval_dataset=rows(4), compute_metrics=lambda _: 0.5).evaluate()


def test_metrics_batch_by_batch_that_are_no_dict_in_the_end_are_told(tmp_path):
    trainer = trainer_of(tmp_path, batch_eval_metrics=True, compute_metrics=lambda prediction, compute_result: None)
    with pytest.raises(ConfigError, match="must return a dict of metrics by name, it returned a NoneType"):
        trainer.evaluate(rows(4))
    assert "eval_loss" not in trainer.evaluate([])


def test_data_that_is_no_dataset_is_told(tmp_path):
    with pytest.raises(ConfigError, match=r"dict of datasets \(train, test\).* datasets\['train'\]"):
        trainer_of(tmp_path, data={"train": rows(4), "test": rows(4)}).train()
    with pytest.raises(ConfigError, match="no batch. The dataset is empty, or smaller than a batch while dataloader"):
        trainer_of(tmp_path, data=[]).train()
    with pytest.raises(ConfigError, match="no batch"):
        trainer_of(tmp_path, data=rows(2), dataloader_drop_last=True).train()


def test_an_output_folder_that_is_a_file_is_told(tmp_path):
    (tmp_path / "run").write_text("notes")
    with pytest.raises(ConfigError, match="output_dir='.*run' is a file: give a folder"):
        trainer_of(tmp_path / "run")


def test_a_wrong_checkpoint_folder_is_told_with_those_that_are_there(tmp_path):
    run, empty = tmp_path / "run", tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match="is not a folder. There is no checkpoint in .*run either"):
        trainer_of(run).train(resume_from_checkpoint=run / "checkpoint-1")
    trainer_of(run, save_strategy="steps", save_steps=1).train()
    with pytest.raises(
        ConfigError, match="checkpoint-9' is not a folder. In .*run there are checkpoint-1, checkpoint-2;"
    ):
        trainer_of(run).train(resume_from_checkpoint=run / "checkpoint-9")
    with pytest.raises(ConfigError, match="resume_from_checkpoint='.*empty' holds no checkpoint: there is no MANIFEST"):
        trainer_of(run).train(resume_from_checkpoint=empty)
