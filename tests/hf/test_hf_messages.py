"""Common mistakes and their messages: each names the given value and the nearest fix."""

import torch
from torch import nn

from loopwright.errors import BatchLossError, DataError
from loopwright.hf import EarlyStoppingCallback

from .tiny import Classifier, assert_refused, bert, fit, made, on, rows


class Headless(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(x)


def test_a_missing_loss_is_explained(tmp_path):
    unlabelled = [{"x": sample["x"]} for sample in rows(8)]
    text = "given x and returned a Tensor. Its forward takes no labels: override com"
    assert_refused(text, fit, tmp_path, model=Headless(), data=unlabelled, error=BatchLossError)
    text = "the batch has labels, which Headless.forward does not take; it takes x. Add it"
    assert_refused(text, fit, tmp_path, model=Headless(), error=DataError)
    data = [{"x": sample["x"], "target": sample["labels"]} for sample in rows(8)]
    text = r"given x and returned logits. It computes one when it is given labels: .* \(the data also has target\)"
    assert_refused(text, fit, tmp_path, data=data, error=BatchLossError)


def test_labels_that_are_text_are_explained_and_an_error_inside_the_model_is_not_replaced(tmp_path):
    class Broken(Classifier):
        def forward(self, x, labels=None):
            return len(None)

    assert_refused("NoneType", fit, tmp_path, model=Broken(), error=TypeError)
    data = [{"input_ids": torch.arange(3, 9), "label": "yes"}] * 8
    text = r"The column label holds text \('yes'\).*class_encode_column\('label'\)"
    assert_refused(text, fit, tmp_path, model=bert(), data=data, error=BatchLossError)


def test_a_metric_that_nothing_computes_is_refused_before_training(tmp_path):
    options = {"eval_dataset": rows(4), "eval_strategy": "epoch", "metric_for_best_model": "accuracy"}
    text = "'accuracy', but without compute_metrics an evaluation only has a loss"
    assert_refused(text, made, tmp_path, EarlyStoppingCallback(1), **options)
    adding = on(evaluate=lambda args, state, control, metrics, **kwargs: metrics.update(eval_accuracy=0.5))
    assert fit(tmp_path, adding, **options).state.best_metric == 0.5
    assert made(tmp_path, **{**options, "metric_for_best_model": "eval_loss"}).args.greater_is_better is False


def test_metrics_must_be_a_dict(tmp_path):
    trainer = made(tmp_path, compute_metrics=lambda _: 0.5)
    text = "compute_metrics must return a dict of metrics by name, it returned a float"
    assert_refused(text, trainer.evaluate, rows(4))
    trainer = made(tmp_path, batch_eval_metrics=True, compute_metrics=lambda prediction, compute_result: None)
    assert_refused("must return a dict of metrics by name, it returned a NoneType", trainer.evaluate, rows(4))
    assert "eval_loss" not in trainer.evaluate([])


def test_data_that_cannot_be_trained_on_and_a_file_as_output_folder_are_refused(tmp_path):
    data = {"train": rows(4), "test": rows(4)}
    assert_refused(r"dict of datasets \(train, test\).* datasets\['train'\]", fit, tmp_path, data=data)
    text = "no batch. The dataset is empty, or smaller than a batch while dataloader"
    assert_refused(text, fit, tmp_path, data=[])
    assert_refused("no batch", fit, tmp_path, data=rows(2), dataloader_drop_last=True)
    (tmp_path / "run").write_text("notes")
    assert_refused("output_dir='.*run' is a file: give a folder", made, tmp_path / "run")


def test_a_wrong_checkpoint_folder_is_refused_and_the_existing_ones_are_named(tmp_path):
    run, empty = tmp_path / "run", tmp_path / "empty"
    empty.mkdir()
    text = "is not a folder. There is no checkpoint in .*run either"
    assert_refused(text, fit, run, resume=run / "checkpoint-1")
    fit(run, save_strategy="steps", save_steps=1, max_steps=2)
    text = "checkpoint-9' is not a folder. In .*run there are checkpoint-1, checkpoint-2;"
    assert_refused(text, fit, run, resume=run / "checkpoint-9")
    text = "resume_from_checkpoint='.*empty' holds no checkpoint: there is no MANIFEST"
    assert_refused(text, fit, run, resume=empty)
