"""Metrics of a trainer: numbers as scikit-learn has them, over batches, kinds of outputs, resumes and directions."""

import functools

import pytest
import torch
from sklearn import metrics as sk
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

import toys
from loopwright import Trainer, metrics
from loopwright.callbacks import (
    EarlyStoppingCallback,
    ModelEmaCallback,
    SaveBestModelCallback,
    SaveTrainingStateCallback,
    TrainerCallback,
)
from loopwright.callbacks.metrics import direction_of
from loopwright.errors import BatchLossError, ConfigError, DataError
from loopwright.metrics.batches import NAMES

CLASSES = toys.labelled(37)


def trainer_of(given, data=CLASSES, loss=None, model=None, callbacks=(), **options):
    model = toys.seeded(nn.Linear, 4, 3) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, loss or nn.CrossEntropyLoss(), optimizer, callbacks, metrics=given)
    options = {"num_epochs": 2, "eval_dataset": data, "per_device_batch_size": 5, "seed": 0, **options}
    trainer.result = trainer.train(data, **options)
    return trainer


def accuracy(outputs, targets):
    return (outputs.argmax(1) == targets).double().mean()


def test_numbers_are_those_of_scikit_learn_whatever_the_kind_of_metric():
    given = ["accuracy", "f1", "precision_micro", "recall_weighted", "top_2_accuracy", "auroc", "matthews_correlation"]
    collection = MetricCollection({"macro": MulticlassF1Score(3), "each": MulticlassF1Score(3, average=None)})
    given += [MulticlassAccuracy(3, average="micro"), collection]
    given += [metrics.load("precision", average="macro")]
    trainer = trainer_of(given)
    latest, x, y = trainer.result.metrics, *CLASSES.tensors
    logits = trainer.model(x).detach()
    guess, scores = logits.argmax(1), logits.softmax(1)
    f1 = sk.f1_score(y, guess, average="macro")
    expected = {
        "accuracy": sk.accuracy_score(y, guess),
        "f1": f1,
        "precision_micro": sk.precision_score(y, guess, average="micro"),
        "recall_weighted": sk.recall_score(y, guess, average="weighted"),
        "top_2_accuracy": sk.top_k_accuracy_score(y, scores, k=2),
        "auroc": sk.roc_auc_score(y, scores, multi_class="ovr"),
        "matthews_correlation": sk.matthews_corrcoef(y, guess),
        "multiclass_accuracy": sk.accuracy_score(y, guess),
        "macro": f1,
        **{f"each_{index}": each for index, each in enumerate(sk.f1_score(y, guess, average=None))},
        "precision": sk.precision_score(y, guess, average="macro", zero_division=0),
    }
    assert {name: latest[f"eval_{name}"] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert {f"train_{name}" for name in expected} < latest.keys()
    trainer = trainer_of({"mine": accuracy, "named": "accuracy"})
    assert trainer.result.metrics["eval_mine"] == pytest.approx(trainer.result.metrics["eval_named"])
    assert trainer.evaluate().metrics.keys() == {"evaluation_loss", "evaluation_mine", "evaluation_named"}


def of(loss, outputs, targets, names, batch_size=7):
    """Evaluate an identity: the outputs are what the model gets."""
    model = nn.Linear(1, 1)
    model.forward = lambda x: x + 0 * model.weight.sum()
    trainer = Trainer(model, loss, torch.optim.SGD(model.parameters(), lr=0.0), (), metrics=names)
    found = trainer.evaluate(TensorDataset(outputs, targets), per_device_batch_size=batch_size).metrics
    return {name: found[f"evaluation_{name}"] for name in names}


def test_outputs_of_every_kind_are_understood():
    draw = torch.Generator().manual_seed(1)
    logits, truth = torch.randn(40, generator=draw), torch.randint(2, (40,), generator=draw)
    guess, names = (logits > 0).long(), ["accuracy", "f1", "auroc"]
    binary = [sk.accuracy_score(truth, guess), sk.f1_score(truth, guess), sk.roc_auc_score(truth, logits)]
    for outputs, targets in ((logits, truth), (logits[:, None], truth[:, None]), (logits[:, None], truth[:, None])):
        found = of(nn.BCEWithLogitsLoss(), outputs, targets.float(), names)
        assert list(found.values()) == pytest.approx(binary)
    assert list(of(nn.BCELoss(), logits.sigmoid(), truth.float(), names).values()) == pytest.approx(binary)
    two = torch.stack([-logits, logits], 1)
    assert list(of(nn.CrossEntropyLoss(), two, truth, names).values()) == pytest.approx(binary)

    many, truths = torch.randn(40, 5, generator=draw), torch.randint(2, (40, 5), generator=draw)
    expected = [sk.accuracy_score(truths, many > 0), sk.f1_score(truths, many > 0, average="macro")]
    expected += [sk.f1_score(truths, many > 0, average="micro"), sk.roc_auc_score(truths, many)]
    found = of(nn.BCEWithLogitsLoss(), many, truths.float(), ["accuracy", "f1", "f1_micro", "auroc"])
    assert list(found.values()) == pytest.approx(expected)

    tokens, labels = torch.randn(40, 6, 5, generator=draw), torch.randint(5, (40, 6), generator=draw)
    labels[:, 3:] = -100  # of HF's (samples, tokens, classes), and torch's (samples, classes, tokens)
    expected = sk.accuracy_score(labels[:, :3].reshape(-1), tokens[:, :3].argmax(-1).reshape(-1))
    token_loss = lambda outputs, targets: outputs.mean()  # noqa: E731
    assert of(token_loss, tokens, labels, ["accuracy"])["accuracy"] == pytest.approx(expected)
    assert of(nn.CrossEntropyLoss(), tokens.movedim(1, 2), labels, ["accuracy"])["accuracy"] == pytest.approx(expected)
    soft = nn.functional.one_hot(truth, 2).float()
    assert of(nn.CrossEntropyLoss(), two, soft, ["accuracy"])["accuracy"] == pytest.approx(binary[0])

    numbers, references = many[:, :1], many[:, 1:2] * 2
    names = ["mse", "mae", "rmse", "r2", "pearsonr", "spearmanr"]
    expected = [sk.mean_squared_error(references, numbers), sk.mean_absolute_error(references, numbers)]
    expected += [expected[0] ** 0.5, sk.r2_score(references, numbers)]
    found = list(of(nn.MSELoss(), numbers, references, names).values())
    assert found[:4] == pytest.approx(expected, rel=1e-5)


def test_batches_and_outputs_that_are_mappings_have_metrics_too():
    def mapped(self, features, labels):
        logits = self.layer(features)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    rows = [{"features": x, "labels": y} for x, y in CLASSES]
    model = toys.net(mapped, layer=toys.seeded(nn.Linear, 4, 3))
    trainer = Trainer(model, None, torch.optim.SGD(model.parameters(), lr=0.1), (), metrics=["accuracy", accuracy][:1])
    found = trainer.train(rows, 1, rows, seed=0).metrics
    plain = trainer_of(["accuracy"], num_epochs=1, per_device_batch_size=8).result.metrics
    assert found["eval_accuracy"] == plain["eval_accuracy"] and found["train_accuracy"] == plain["train_accuracy"]


def test_training_counts_every_sample_of_every_applied_update_once():
    class Watching(TrainerCallback):
        right = 0

        def on_train_step_end(self, trainer, batch, batch_output, **kwargs):
            self.right += int((batch_output["model_outputs"].argmax(1) == batch[1]).sum())

    watching = Watching()
    trainer = trainer_of(
        ["accuracy"], callbacks=[watching], num_epochs=1, gradient_accumulation_steps=3, evaluate_every=1
    )
    assert trainer.result.metrics["train_accuracy"] == watching.right / 37
    assert trainer.run_history.get_metric_values("intermediate_eval_accuracy")


def given_all():
    return {"accuracy": "accuracy", "f1": "f1", "own": accuracy, "tm": MulticlassF1Score(3), "roc": "auroc"}


def test_a_run_resumed_in_the_middle_of_an_epoch_has_the_same_metrics(tmp_path):
    whole = trainer_of(given_all())
    saver = SaveTrainingStateCallback(tmp_path, save_every_n_steps=5)
    trainer_of(given_all(), callbacks=[saver, toys.stop_at(5)])
    again = trainer_of(given_all(), resume_from=tmp_path / "step_5")
    names = whole.run_history.get_metric_names()
    assert len(names) == 12
    for name in names:
        assert again.run_history.get_metric_values(name) == whole.run_history.get_metric_values(name), name


def test_best_model_early_stopping_and_the_average_use_metrics_and_know_their_direction(tmp_path, capsys):
    best = SaveBestModelCallback(tmp_path / "best.pt", "accuracy")
    stop = EarlyStoppingCallback(5, watch_metric="eval_f1")
    average = ModelEmaCallback(save_path=tmp_path / "ema.pt", watch_metric="ema_model_eval_accuracy")
    trainer = trainer_of(["accuracy", "f1"], callbacks=[best, stop, average], num_epochs=3)
    history = trainer.run_history
    assert best.best_metric == max(history.get_metric_values("eval_accuracy")) and best.greater_is_better
    assert stop.best_metric is not None and stop.greater_is_better
    assert average.best_metric == max(history.get_metric_values("ema_model_eval_accuracy"))
    out = capsys.readouterr().out
    assert "(higher is better)" in out and "lower is better" not in out


def never(outputs, targets):
    raise AssertionError("the first epoch was run")


@pytest.mark.parametrize("kind", [EarlyStoppingCallback, SaveBestModelCallback])
@pytest.mark.parametrize(("name", "near"), [("acuracy", "accuracy"), ("val_accuracy", "eval_accuracy")])
def test_a_misspelt_watched_metric_is_refused_before_the_first_epoch(kind, name, near):
    with pytest.raises(ConfigError) as caught:
        trainer_of(["accuracy"], loss=never, callbacks=[kind(watch_metric=name)])
    assert (caught.value.given, caught.value.nearest) == (name, near)


def test_watched_metrics_need_an_evaluation_and_are_suggested_from_the_history():
    for name in ("accuracy", "eval_accuracy", "eval_loss_epoch"):
        with pytest.raises(ConfigError, match="eval_dataset"):
            trainer_of(
                ["accuracy"], loss=never, callbacks=[EarlyStoppingCallback(watch_metric=name)], eval_dataset=None
            )
    with pytest.raises(ConfigError) as caught:
        trainer_of(None, callbacks=[EarlyStoppingCallback(watch_metric="val_loss_epoch")])
    assert caught.value.nearest == "eval_loss_epoch"
    trainer_of(["accuracy"], callbacks=[EarlyStoppingCallback(watch_metric="train_accuracy")], eval_dataset=None)


@pytest.mark.parametrize("kind", [EarlyStoppingCallback, SaveBestModelCallback])
def test_an_explicit_direction_wins_and_an_unknown_one_is_lower_with_a_note(kind, tmp_path, capsys):
    options = {"save_path": tmp_path / "best.pt"} if kind is SaveBestModelCallback else {}
    assert kind(watch_metric="eval_loss_epoch", **options).greater_is_better is False
    assert kind(watch_metric="eval_accuracy", **options, greater_is_better=False).greater_is_better is False
    watching = kind(watch_metric="eval_foo", **options)
    trainer_of({"foo": accuracy}, callbacks=[watching], num_epochs=1)
    assert "eval_foo: lower is better (default of" in capsys.readouterr().out
    trainer_of({"foo": MulticlassAccuracy(3)}, callbacks=[kind(watch_metric="foo", **options)], num_epochs=1)
    assert "default of" not in capsys.readouterr().out  # torchmetrics says which is better
    trainer_of({"foo": accuracy}, callbacks=[kind(watch_metric="foo", **options, greater_is_better=True)], num_epochs=1)
    assert "default of" not in capsys.readouterr().out


def test_directions_of_common_names():
    greater = "accuracy eval_accuracy ema_model_eval_f1 my_auroc top_5_accuracy eval_r2 val_mean_iou bleu rouge1"
    lower = "eval_loss_epoch rmse eval_mae word_error perplexity accuracy_loss"
    assert all(direction_of(name) is True for name in greater.split())
    assert all(direction_of(name) is False for name in lower.split())
    assert direction_of("eval_foo") is None and direction_of("seconds") is None


def signed(outputs, targets):
    return nn.functional.soft_margin_loss(outputs, targets)


LOGITS, TRUTH = torch.linspace(-2, 3, 40), (torch.arange(40) * 7 % 40 > 14).float()
KINDS = {  # the loss of (outputs, targets), whose name says nothing in the first five
    "lambda": (lambda outputs, targets: nn.functional.binary_cross_entropy(outputs, targets), LOGITS.sigmoid(), TRUTH),
    "class": (nn.MSELoss(), LOGITS.sigmoid(), TRUTH),
    "logits": (lambda outputs, targets: outputs.mean(), LOGITS, TRUTH),
    "signs": (signed, LOGITS, TRUTH * 2 - 1),
    "sign loss": (nn.SoftMarginLoss(), LOGITS, TRUTH * 2 - 1),
    "partial": (functools.partial(nn.functional.binary_cross_entropy), LOGITS.sigmoid(), TRUTH),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_size", [1, 7, 40])
def test_probabilities_logits_and_signs_are_told_apart_whatever_the_loss_and_the_batch_size(kind, batch_size):
    loss, outputs, targets = KINDS[kind]
    names = {"accuracy": "accuracy", "f1": "f1", "auroc": "auroc", "ece": metrics.load("ece")}
    found = of(loss, outputs, targets, names, batch_size)
    expected = of(nn.BCEWithLogitsLoss(), LOGITS, TRUTH, names, batch_size)
    assert found == pytest.approx(expected) and expected["accuracy"] == sk.accuracy_score(TRUTH, LOGITS > 0)


def test_probabilities_of_classes_and_labels_are_scores_as_they_are():
    draw = torch.Generator().manual_seed(1)
    logits, truth = torch.randn(40, 3, generator=draw), torch.randint(3, (40,), generator=draw)
    own, names = lambda outputs, targets: outputs.mean(), {"ece": metrics.load("ece"), "auroc": "auroc"}
    assert of(own, logits.softmax(1), truth, names) == pytest.approx(of(nn.CrossEntropyLoss(), logits, truth, names))
    labels = torch.randint(2, (40, 3), generator=draw).float()
    expected = of(nn.BCEWithLogitsLoss(), logits, labels, ["accuracy", "f1"])
    assert of(own, logits.sigmoid(), labels, ["accuracy", "f1"]) == pytest.approx(expected)


@pytest.mark.parametrize("how", ["module", "partial"])
def test_the_ignored_index_of_the_loss_is_left_out(how):
    logits, truth = torch.randn(40, 3, generator=torch.Generator().manual_seed(1)), torch.arange(40) % 3
    names = ["accuracy", "f1", "top_2_accuracy", "auroc"]
    expected = of(nn.CrossEntropyLoss(), logits[10:], truth[10:], names)
    function = functools.partial(nn.functional.cross_entropy, ignore_index=255)
    loss = nn.CrossEntropyLoss(ignore_index=255) if how == "module" else function
    assert of(loss, logits, truth.masked_fill(torch.arange(40) < 10, 255), names) == pytest.approx(expected)


def broken(outputs, targets):
    raise KeyError("gone")


WRONG = {
    "one": lambda outputs: 0.0,
    "three": lambda outputs, targets, more: 0.0,
    "raises": broken,
    "nested": lambda outputs, targets: [[1, 2], [3, 4]],
    "torchmetrics": MulticlassAccuracy(2),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_metric_that_cannot_work_is_named(name):
    with pytest.raises((ConfigError, DataError), match=rf"metrics\['{name}'\]"):
        trainer_of({name: WRONG[name]})
    if name in ("one", "three"):  # before anything is run
        with pytest.raises(ConfigError, match=name):
            Trainer(None, None, None, metrics={name: WRONG[name]})


def test_wrong_metrics_are_refused_with_the_nearest_name():
    near = {"acc": "accuracy", "acuracy": "accuracy", "F1-score": "f1", "roc_auc_score": "auroc", "r2_score": "r2"}
    for given, expected in {**near, "accuracy_score": "accuracy", "foo": None, "ece": None}.items():
        with pytest.raises(ConfigError) as caught:
            Trainer(None, None, None, metrics=[given])
        assert caught.value.nearest == expected and caught.value.choices == NAMES
        assert ("metrics.load('ece')" in str(caught.value)) is (given == "ece")
    for given in ([3], metrics.F1, ["f1", "f1"], {"loss_epoch": accuracy}, {"loss": accuracy}):
        with pytest.raises(ConfigError):
            Trainer(None, None, None, metrics=given)
    with pytest.raises(ConfigError, match="number"):
        trainer_of({"text": lambda outputs, targets: "good"})
    with pytest.raises(DataError):
        of(nn.MSELoss(), torch.rand(8, 1), torch.rand(8, 1), ["accuracy"])
    with pytest.raises(DataError):
        of(nn.MSELoss(), torch.rand(8, 2), torch.rand(8, 2), ["r2"])


class Bare(Trainer):
    def calculate_eval_batch_loss(self, batch):
        output = super().calculate_eval_batch_loss(batch)
        return {"loss": output["loss"], "batch_size": output["batch_size"]}


def test_metrics_say_what_they_miss_in_a_batch():
    model = nn.Linear(4, 3)
    trainer = Bare(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), (), metrics="accuracy")
    with pytest.raises(BatchLossError, match="model_outputs"):
        trainer.evaluate(CLASSES)
