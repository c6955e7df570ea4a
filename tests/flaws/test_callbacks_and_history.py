"""Flaws 35 to 41: callbacks and history. One test per flaw, each named after the right behaviour."""

import copy
import warnings

import pytest
import torch
from torch.nn.utils import parameters_to_vector
from torch.utils.data import RandomSampler, TensorDataset

from . import subject


def make_handler(callbacks):
    """A handler of callbacks with events of their own; a warning about those is welcome."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return subject.callbacks.CallbackHandler(callbacks)


def test_flaw_35_errors_inside_callbacks_are_raised():
    class Misspelt(subject.callbacks.TrainerCallback):
        def on_train_epoch_start(self, trainer, **kwargs):
            self.was_called = True
            self.no_such_attribute  # noqa: B018

    class Plain(subject.callbacks.TrainerCallback):
        def __init__(self):
            self.values = [1, 2]

    class Custom(subject.callbacks.TrainerCallback):
        def __init__(self):
            self.calls = []

        def on_my_event(self, trainer, **kwargs):
            self.calls.append((trainer, kwargs))

    class CustomButMisspelt(subject.callbacks.TrainerCallback):
        def on_my_event(self, trainer, **kwargs):
            self.no_such_attribute  # noqa: B018

    class WithUnknownEvent(subject.callbacks.TrainerCallback):
        def on_train_epoch_finish(self, trainer, **kwargs):
            """There is no such event."""

    misspelt = Misspelt()
    with pytest.raises(AttributeError, match="no_such_attribute"):
        subject.fit(subject.trainer([misspelt]), subject.data())
    assert misspelt.was_called

    # A callback is an ordinary object.
    plain = Plain()
    assert not hasattr(plain, "no_such_attribute")
    assert getattr(plain, "no_such_attribute", "default") == "default"
    twin = copy.deepcopy(plain)
    assert twin.values == [1, 2] and twin.values is not plain.values

    # Custom events skip the callbacks that lack them, and only those.
    custom = Custom()
    make_handler([plain, custom, misspelt]).call_event("on_my_event", trainer="a trainer", answer=42)
    assert custom.calls == [("a trainer", {"answer": 42})]
    with pytest.raises(AttributeError, match="no_such_attribute"):
        make_handler([CustomButMisspelt()]).call_event("on_my_event", trainer="a trainer")

    with pytest.warns(UserWarning, match="on_train_epoch_finish"):
        subject.callbacks.CallbackHandler([WithUnknownEvent()])


def test_flaw_36_a_nan_loss_stops_the_run_and_not_the_process():
    x, y, ids = subject.data(16).tensors
    poisoned = TensorDataset(x, torch.where(ids.unsqueeze(1) < 8, torch.nan, y), ids)
    events = []
    witness = subject.callback(
        on_train_epoch_start=lambda trainer, **kwargs: events.append("epoch"),
        on_stop_training_error=lambda trainer, **kwargs: events.append("stop"),
        on_training_run_end=lambda trainer, **kwargs: events.append("end"),
    )
    trainer = subject.trainer([*subject.module("trainer").DEFAULT_CALLBACKS, witness], momentum=0.0)

    try:
        result = subject.fit(trainer, poisoned, num_epochs=3)
    except SystemExit as error:
        pytest.fail(f"train() ended the process: SystemExit({error.code!r})")
    assert events == ["epoch", "stop", "end"]
    assert isinstance(result.stop_reason, str) and result.stop_reason

    # The same trainer, with healthy weights and data, goes on as if nothing had happened.
    trainer.model.load_state_dict(subject.network().state_dict())
    events.clear()
    try:
        result = subject.fit(trainer, subject.data(16), num_epochs=2)
    except SystemExit as error:
        pytest.fail(f"a healthy run after one with NaN ended the process: SystemExit({error.code!r})")
    assert events == ["epoch", "epoch", "end"]
    assert result.stop_reason is None


def test_flaw_37_ema_follows_every_update(tmp_path):
    decay = 0.8
    path = tmp_path / "ema.pt"
    ema = subject.callbacks.ModelEmaCallback(decay, evaluate_during_training=False, save_path=str(path))
    trainer = subject.trainer([ema])
    start = subject.weights(trainer)
    subject.fit(trainer, subject.data(32), num_epochs=2, gradient_accumulation_steps=2)

    after_each_update = [*trainer.weights_before[2::2], subject.weights(trainer)]
    assert len(after_each_update) == 8
    expected = start
    for weights in after_each_update:
        expected = decay * expected + (1 - decay) * weights
    torch.testing.assert_close(parameters_to_vector(ema.ema_model.module.parameters()), expected)
    saved = torch.load(path, weights_only=True)["model_state_dict"]
    torch.testing.assert_close(parameters_to_vector(saved.values()), expected)


def test_flaw_38_a_stop_inside_the_ema_evaluation_leaves_the_trainer_as_it_was(tmp_path):
    def raise_a_bug(trainer, **kwargs):
        raise RuntimeError("a bug")

    def ema_trainer(*callbacks):
        ema = subject.callbacks.ModelEmaCallback(save_path=str(tmp_path / "ema.pt"), callbacks=callbacks)
        trainer = subject.trainer([ema])
        return trainer, trainer.model, trainer.callback_handler

    trainer, model, handler = ema_trainer(subject.stop_at("on_eval_step_end"))
    subject.fit(trainer, subject.data(), num_epochs=2, eval_dataset=subject.data())
    assert set(trainer.epochs) == {1}, "the stop was not heard"
    assert trainer.model is model
    assert trainer.callback_handler is handler
    assert trainer.run_history.metric_name_prefix == ""

    trainer, model, handler = ema_trainer(subject.callback(on_eval_step_end=raise_a_bug))
    with pytest.raises(RuntimeError, match="a bug"):
        subject.fit(trainer, subject.data(), num_epochs=2, eval_dataset=subject.data())
    assert trainer.get_model() is model
    assert trainer.callback_handler is handler
    assert trainer.run_history.metric_name_prefix == ""

    # Before the first train() there is no EMA model to evaluate.
    trainer, model, handler = ema_trainer()
    trainer.evaluate(subject.data(), dataloader_kwargs={"num_workers": 0})
    names = trainer.run_history.get_metric_names()
    assert "evaluation_loss" in names
    assert not any(name.startswith("ema_model_") for name in names)
    assert trainer.model is model


def test_flaw_39_two_callbacks_of_one_class_are_allowed(tmp_path):
    paths = {metric: tmp_path / f"{metric}.pt" for metric in ("train_loss_epoch", "eval_loss_epoch")}
    pair = [
        subject.callbacks.SaveBestModelCallback(str(path), watch_metric=metric, load_saved_checkpoint=False)
        for metric, path in paths.items()
    ]
    trainer = subject.trainer(pair)
    subject.fit(trainer, subject.data(), num_epochs=2, eval_dataset=subject.data())

    assert list(trainer.callback_handler) == pair
    assert trainer.callback_handler.callback_list == ["SaveBestModelCallback"] * 2
    for callback, (metric, path) in zip(pair, paths.items(), strict=True):
        assert callback.best_metric == min(trainer.run_history.get_metric_values(metric))
        assert "model_state_dict" in torch.load(path, weights_only=True)


def test_flaw_40_reading_an_unknown_metric_does_not_create_it():
    history = subject.tracking.InMemoryRunHistory()
    assert list(history.get_metric_values("accuracy")) == []
    with pytest.raises(ValueError, match="No values have been recorded for the metric accuracy"):
        history.get_latest_metric("accuracy")
    assert history.get_metric_names() == set()

    logged = []

    class Log(subject.callbacks.LogMetricsCallback):
        def log_metrics(self, trainer, metrics):
            logged.extend(metrics)

    curious = subject.callback(
        on_training_run_start=lambda trainer, **kwargs: trainer.run_history.get_metric_values("accuracy")
    )
    subject.fit(subject.trainer([curious, Log()]), subject.data(), eval_dataset=subject.data())
    assert "accuracy" not in logged
    assert {"train_loss_epoch", "eval_loss_epoch"} <= set(logged)

    history.set_metric_name_prefix("ema_model_")
    history.update_metric("accuracy", 0.5)
    history.reset()
    assert history.metric_name_prefix == ""
    history.update_metric("accuracy", 0.5)
    assert history.get_metric_names() == {"accuracy"}


def test_flaw_41_run_config_to_dict_works_without_an_eval_loader_and_changes_nothing():
    dataset = subject.data()
    # A generator cannot be deep-copied, which is why samplers need care.
    sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(1))
    loader = {"sampler": sampler}

    trainer = subject.trainer()
    subject.fit(trainer, dataset, train_dataloader_kwargs=loader)
    first, second = trainer.run_config.to_dict(), trainer.run_config.to_dict()
    assert first["num_epochs"] == 1
    assert first["train_dl_kwargs"]["sampler"] is sampler
    assert second["train_dl_kwargs"]["sampler"] is sampler
    assert trainer.run_config.train_dl_kwargs["sampler"] is sampler

    loaders = {"train_dataloader_kwargs": loader, "eval_dataloader_kwargs": loader}
    subject.fit(trainer, dataset, eval_dataset=dataset, **loaders)
    as_dict = trainer.run_config.to_dict()
    for name in ("train_dl_kwargs", "eval_dl_kwargs"):
        assert as_dict[name]["sampler"] is sampler
        assert getattr(trainer.run_config, name)["sampler"] is sampler

    # The dictionary is a copy: writing to it does not reach the frozen configuration.
    as_dict["train_dl_kwargs"]["batch_size"] = -1
    assert trainer.run_config.train_dl_kwargs["batch_size"] == 4
