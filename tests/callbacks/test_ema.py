"""The moving average of a model: its arithmetic, and the callback that keeps, evaluates and saves it."""

from operator import attrgetter

import pytest
import torch
from torch import nn

import toys
from loopwright import Trainer, callbacks
from toys import state_of


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.head(self.second(torch.tanh(self.first(x))))


class WithBuffers(nn.Module):
    """Batch norm (float buffers and an integer one), buffers of other types, and a weight that is not trained."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.inner = nn.Linear(4, 3)
            self.norm = nn.BatchNorm1d(3)
            self.outer = nn.Linear(3, 1).requires_grad_(False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.zeros(2, dtype=torch.bool))
        self.register_buffer("sixteen", torch.zeros(2, dtype=torch.float16))

    def forward(self, x):
        self.count += 1
        self.mask[0] = True
        self.sixteen += 1.0
        return self.outer(self.norm(self.inner(x)))


def states():
    """A callback that keeps the model's state at the start of a run and after each update."""

    def look(trainer, **kwargs):
        return state_of(trainer.get_model())

    return toys.watch(on_training_run_start=look, on_update_end=look)


def expected_average(states, decay, every=1):
    average = dict(states[0])
    for update, new in enumerate(states[1:], start=1):
        if update % every:
            continue
        for name, tensor in new.items():
            is_float = tensor.is_floating_point()
            average[name] = average[name] * decay + tensor * (1 - decay) if is_float else tensor
    return average


def no_save(tmp_path, **kwargs):
    return callbacks.ModelEmaCallback(evaluate_during_training=False, save_path=tmp_path / "ema.pt", **kwargs)


def test_the_average_is_a_frozen_copy_in_eval_mode_and_set_makes_it_a_copy_again():
    model = WithBuffers()
    ema = callbacks.ModelEma(model)
    assert ema.decay == 0.9999
    toys.assert_same_weights(ema.module, model)
    assert not any(parameter.requires_grad for parameter in ema.module.parameters())
    assert not any(module.training for module in ema.module.modules())
    assert model.training and model.inner.weight.requires_grad
    with torch.no_grad():
        model.inner.weight.fill_(5.0)
    assert not torch.equal(ema.module.inner.weight, model.inner.weight)
    model(torch.randn(4, 4))
    ema.set(model)
    toys.assert_same_weights(ema.module, model)


def test_update_takes_a_step_towards_the_model_and_copies_what_is_not_a_float():
    model, ema = WithBuffers(), callbacks.ModelEma(WithBuffers(), decay=0.75)
    for _ in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        model(torch.randn(4, 4))
        before, new = state_of(ema.module), state_of(model)
        ema.update(model)
        for name, average in ema.module.state_dict().items():
            if new[name].is_floating_point():
                torch.testing.assert_close(average, 0.75 * before[name] + 0.25 * new[name], msg=name)
            else:
                assert torch.equal(average, new[name]), name
            assert average.dtype == new[name].dtype, name
    assert int(ema.module.count) == 3 and bool(ema.module.mask[0])
    assert torch.equal(ema.update_fn(torch.tensor([4.0]), torch.tensor([8.0])), torch.tensor([5.0])), "by hand"


def test_another_rule_can_be_given_by_overriding_update_fn():
    class Largest(callbacks.ModelEma):
        def update_fn(self, ema_model_weights, updated_model_weights):
            return torch.maximum(ema_model_weights, updated_model_weights)

    first, second = WithBuffers(), WithBuffers()
    with torch.no_grad():
        second.inner.weight.copy_(-first.inner.weight)
        second.count.fill_(7)
    ema = Largest(first, decay=0.5)
    ema.update(second)
    assert torch.equal(ema.module.inner.weight, first.inner.weight.abs())
    assert int(ema.module.count) == 7


def test_an_average_of_tied_weights_stays_tied_and_takes_one_step():
    model = Tied()
    ema = callbacks.ModelEma(model, decay=0.5)
    start = ema.module.first.weight.clone()
    with torch.no_grad():
        model.first.weight.add_(1.0)
    ema.update(model)
    assert ema.module.first.weight is ema.module.second.weight
    torch.testing.assert_close(ema.module.first.weight, start + 0.5)


def test_the_callback_has_the_documented_arguments_and_attributes():
    names = ("decay", "evaluate_during_training", "save_path", "watch_metric", "greater_is_better", "model_ema")
    found, default = attrgetter(*names), callbacks.ModelEmaCallback()
    assert isinstance(default, callbacks.SaveBestModelCallback) and default.ema_model is None
    assert found(default) == (0.99, True, "ema_model.pt", "ema_model_eval_loss_epoch", False, callbacks.ModelEma)
    assert tuple(default.callbacks) == ()
    assert (default.reset_on_train, default.save_optimizer, default.update_every) == (False, False, 1)
    given = (0.5, False, "a.pt", "ema_model_accuracy", True, dict)
    callback = callbacks.ModelEmaCallback(*given, (callbacks.TrainerCallback,))
    assert found(callback) == given and tuple(callback.callbacks) == (callbacks.TrainerCallback,)


@pytest.mark.parametrize("every", [1, 3])
def test_the_average_moves_with_every_update_or_as_often_as_asked(every, tmp_path):
    # Seven updates per epoch of two micro-batches, the last of one: the count goes on over the epochs.
    after_updates = states()
    ema = no_save(tmp_path, decay=0.8, update_every=every)
    trainer = toys.trainer_of([ema, after_updates], WithBuffers(), cls=Trainer)
    toys.fit(trainer, toys.data(52), num_epochs=2, gradient_accumulation_steps=2)
    assert len(after_updates.seen) == 1 + 14
    expected = expected_average(after_updates.seen, 0.8, every)
    for name, average in ema.ema_model.module.state_dict().items():
        torch.testing.assert_close(average, expected[name], msg=name)


def test_the_average_is_evaluated_after_the_model_under_its_own_prefix(tmp_path):
    class Measured(Trainer):
        def eval_epoch_end(self):
            self.run_history.update_metric("bias", self.model.outer.bias.item())
            self.run_history.update_metric("sum", sum(p.sum().item() for p in self.model.parameters()))

    ema = callbacks.ModelEmaCallback(decay=0.8, save_path=tmp_path / "ema.pt")
    trainer = toys.trainer_of([ema], WithBuffers(), cls=Measured)
    eval_set = toys.data(12)
    toys.fit(trainer, toys.data(16), num_epochs=3, eval_dataset=eval_set)
    names = set(trainer.run_history.get_metric_names())
    assert names == {"train_loss_epoch"} | {
        f"{prefix}{name}" for prefix in ("", "ema_model_") for name in ("eval_loss_epoch", "bias", "sum")
    }
    assert len(trainer.run_history.get_metric_values("ema_model_eval_loss_epoch")) == 3
    x, y, _ = eval_set.tensors
    with torch.no_grad():
        loss = nn.functional.mse_loss(ema.ema_model.module(x), y).item()
    assert trainer.run_history.get_latest_metric("ema_model_eval_loss_epoch") == pytest.approx(loss, rel=1e-5)
    own = trainer.run_history.get_latest_metric("sum")
    assert own == pytest.approx(sum(p.sum().item() for p in trainer.model.parameters()))
    assert trainer.run_history.get_latest_metric("ema_model_sum") != own


def test_the_model_trains_as_if_there_were_no_average(tmp_path):
    plain = toys.trainer_of(model=toys.network(6, dropout=0.4))
    with_ema = toys.trainer_of(
        [callbacks.ModelEmaCallback(save_path=tmp_path / "ema.pt")], toys.network(6, dropout=0.4)
    )
    for trainer in (plain, with_ema):
        toys.fit(trainer, toys.data(16), num_epochs=3, eval_dataset=toys.data(8))
    # Neither its evaluation nor the end of the run changes the model: the average is never loaded into it.
    assert torch.equal(toys.weights(plain), toys.weights(with_ema))
    for name in ("train_loss_epoch", "eval_loss_epoch"):
        assert plain.run_history.get_metric_values(name) == with_ema.run_history.get_metric_values(name)
    assert with_ema.model.training == plain.model.training


def test_only_the_callbacks_given_to_it_are_active_while_the_average_is_evaluated(tmp_path):
    inside, outside = (toys.watch(on_eval_epoch_end=lambda trainer, **kwargs: trainer.model) for _ in range(2))
    ema = callbacks.ModelEmaCallback(save_path=tmp_path / "ema.pt", callbacks=[inside])
    trainer = toys.trainer_of([outside, ema])
    model, handler = trainer.model, trainer.callback_handler
    result = toys.fit(trainer, toys.data(8), num_epochs=2, eval_dataset=toys.data(8))
    assert result.metrics.keys() == {"train_loss_epoch", "eval_loss_epoch", "ema_model_eval_loss_epoch"}
    assert len(inside.seen) == 2 and all(seen is ema.ema_model.module for seen in inside.seen)
    assert len(outside.seen) == 2 and all(seen is model for seen in outside.seen)
    assert trainer.callback_handler is handler and trainer.model is model
    assert trainer.run_history.metric_name_prefix == ""


def test_the_best_average_is_saved_without_the_optimizer(tmp_path):
    class Scored(Trainer):
        scores = (3.0, 1.0, 2.0)

        def eval_epoch_end(self):
            self.run_history.update_metric("score", self.scores[self.run_history.current_epoch - 1])

    ema = callbacks.ModelEmaCallback(0.8, save_path=tmp_path / "ema.pt", watch_metric="ema_model_score")
    averages = toys.watch(on_training_run_epoch_end=lambda trainer, **kwargs: state_of(ema.ema_model.module))
    toys.trained([ema, averages], model=WithBuffers(), cls=Scored, num_epochs=3, eval_dataset=toys.data(8))
    saved = torch.load(tmp_path / "ema.pt", weights_only=True)
    assert set(saved) == {"model_state_dict", "ema_model_score"}
    assert saved["ema_model_score"] == ema.best_metric == 1.0
    assert ema.best_metric_epoch == 2
    toys.assert_same(dict(saved["model_state_dict"]), averages.seen[1])


def test_an_average_that_is_not_evaluated_is_saved_after_every_epoch(tmp_path):
    def read_file(trainer, **kwargs):
        return torch.load(tmp_path / "ema.pt", weights_only=True)

    ema, watch = no_save(tmp_path, decay=0.8), toys.watch(on_training_run_epoch_end=read_file)
    trainer = toys.trained([ema, watch], toys.data(8), num_epochs=2, eval_dataset=toys.data(8))
    assert [set(file) for file in watch.seen] == [{"model_state_dict"}] * 2
    first, second = (file["model_state_dict"]["weight"] for file in watch.seen)
    assert not torch.equal(first, second) and torch.equal(second, ema.ema_model.module.weight)
    assert not any(name.startswith("ema_model_") for name in trainer.run_history.get_metric_names())


def test_without_an_evaluation_dataset_there_is_nothing_to_watch(tmp_path):
    trainer = toys.trainer_of([callbacks.ModelEmaCallback(save_path=tmp_path / "ema.pt")])
    with pytest.raises(ValueError, match="No values have been recorded for the metric ema_model_eval_loss_epoch"):
        toys.fit(trainer, toys.data(8))


def test_the_average_is_not_evaluated_in_intermediate_evaluations_or_outside_a_training_run(tmp_path):
    trainer = toys.trainer_of([callbacks.ModelEmaCallback(save_path=tmp_path / "ema.pt")])
    toys.fit(trainer, toys.data(16), eval_dataset=toys.data(8), evaluate_every=1)
    assert len(trainer.run_history.get_metric_values("intermediate_eval_loss")) == 4
    assert len(trainer.run_history.get_metric_values("ema_model_eval_loss_epoch")) == 1
    assert "ema_model_intermediate_eval_loss" not in trainer.run_history.get_metric_names()

    result = trainer.evaluate(toys.data(8), dataloader_kwargs={"num_workers": 0})
    assert set(result.metrics) == {"evaluation_loss"}


@pytest.mark.parametrize("error", [callbacks.StopTrainingError("enough"), RuntimeError("a bug")])
def test_whatever_ends_its_evaluation_the_trainer_is_as_before(error, tmp_path):
    ema = callbacks.ModelEmaCallback(save_path=tmp_path / "ema.pt", callbacks=[toys.raising("on_eval_step_end", error)])
    trainer = toys.trainer_of([ema])
    model, handler = trainer.model, trainer.callback_handler
    if isinstance(error, callbacks.StopTrainingError):
        result = toys.fit(trainer, toys.data(8), num_epochs=2, eval_dataset=toys.data(8))
        assert result.stop_reason == "enough" and result.updates == 2
    else:
        with pytest.raises(RuntimeError, match="a bug"):
            toys.fit(trainer, toys.data(8), num_epochs=2, eval_dataset=toys.data(8))
    assert trainer.callback_handler is handler and trainer.model is model
    assert trainer.run_history.metric_name_prefix == ""


def test_a_prefix_of_the_users_own_is_put_back(tmp_path):
    prefix = toys.callback(
        on_training_run_start=lambda trainer, **kwargs: trainer.run_history.set_metric_name_prefix("mine_")
    )
    trainer = toys.trainer_of([prefix, callbacks.ModelEmaCallback(save_path=tmp_path / "ema.pt")])
    toys.fit(trainer, toys.data(8), num_epochs=2, eval_dataset=toys.data(8))
    names = {"mine_train_loss_epoch", "mine_eval_loss_epoch", "ema_model_eval_loss_epoch"}
    assert set(trainer.run_history.get_metric_names()) == names


def test_a_rule_of_the_users_own_is_used(tmp_path):
    class Latest(callbacks.ModelEma):
        def update_fn(self, ema_model_weights, updated_model_weights):
            return updated_model_weights

    ema = no_save(tmp_path, decay=0.8, model_ema=Latest)
    trainer = toys.trained([ema], model=WithBuffers(), cls=Trainer, num_epochs=2)
    assert isinstance(ema.ema_model, Latest) and ema.ema_model.decay == 0.8
    toys.assert_same_weights(ema.ema_model.module, trainer)


def test_a_second_run_starts_from_the_model_and_remembers_the_best_value(tmp_path):
    ema = callbacks.ModelEmaCallback(0.999, save_path=tmp_path / "ema.pt")
    trainer = toys.trained([ema], num_epochs=2, eval_dataset=toys.data(8))
    first_average, best = ema.ema_model, ema.best_metric
    toys.fit(trainer, toys.data(16), num_epochs=1, eval_dataset=toys.data(8))
    assert ema.ema_model is not first_average
    assert ema.best_metric is not None and ema.best_metric <= best


def test_the_average_of_a_model_with_tied_weights_is_saved_with_the_training_state_and_resumed(tmp_path):
    def run(folder, **kwargs):
        ema = no_save(tmp_path, decay=0.8)
        saver = callbacks.SaveTrainingStateCallback(tmp_path / folder, save_every_n_steps=1)
        trainer = toys.trained([ema, saver], model=Tied(), **kwargs)
        return state_of(ema.ema_model.module), trainer

    whole, trainer = run("whole")
    resumed, again = run("resumed", resume_from=tmp_path / "whole" / "step_2")
    toys.assert_same(resumed, whole)
    assert again.model.first.weight is again.model.second.weight
    assert torch.equal(toys.weights(again), toys.weights(trainer))
