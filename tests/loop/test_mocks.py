"""Tests that people wrote for pytorch-accelerated: mocks as loaders, accelerators, optimizers and trainers."""

from unittest.mock import MagicMock, Mock

import pytest
import torch

from loopwright import Trainer, callbacks
from loopwright.callbacks import TrainerCallback
from loopwright.schedulers import CosineLrScheduler, WSDLrScheduler
from loopwright.trainer import replace_trainer_placeholder_values
from toys import stepped, trained, two_groups


class Stub(Trainer):
    def __init__(self, batches, **kwargs):
        super().__init__(Mock(), Mock(), Mock(param_groups=[{"lr": 0.1}], step_was_skipped=False), **kwargs)
        self.loader = MagicMock()
        self.loader.__len__.return_value = batches
        self.loader.__iter__.side_effect = lambda: iter([{"batch": 0}] * batches)

    def create_train_dataloader(self, batch_size, train_dl_kwargs):
        return self.loader

    create_eval_dataloader = create_train_dataloader

    def calculate_train_batch_loss(self, batch):
        return {"loss": torch.ones((), requires_grad=True), "model_outputs": MagicMock(), "batch_size": 1}

    calculate_eval_batch_loss = calculate_train_batch_loss


class Unprepared(Stub):
    """Prepares nothing, and assigns an accelerator of its own before the constructor."""

    def __init__(self, *args):
        self._accelerator = Mock(num_processes=1, mixed_precision="no", device="cpu", scaler=None)
        super().__init__(*args)

    def create_eval_dataloader(self, batch_size, eval_dl_kwargs):
        return self.loader

    def _create_accelerator(self):
        return self._accelerator

    def _prepare_model_optimizer_and_dataloaders(self):
        pass

    def _perform_forward_and_backward_passes(self, batch, step):
        self.calculate_train_batch_loss(batch)


@pytest.mark.parametrize("batches", [0, 3])
@pytest.mark.parametrize("kind", [Stub, Unprepared])
def test_a_magic_mock_is_a_loader_of_so_many_batches(kind, batches):
    trainer = kind(batches)
    result = trainer.train(Mock(), 2, None if kind is Stub else Mock(), gradient_accumulation_steps=2)
    assert result.updates == trainer.optimizer.step.call_count == 2 * -(-batches // 2)
    assert trainer.run_config.num_local_update_steps_per_epoch == -(-batches // 2)


def test_a_mock_accelerator_counts_in_the_run_config():
    trainer = Trainer(Mock(), Mock(), Mock())
    trainer._accelerator, trainer._train_dataloader = Mock(num_processes=4), range(20)
    config = trainer._create_run_config(64, 300, 1, None, None)
    assert (config.num_update_steps_per_epoch, config.max_num_train_steps) == (80, 24001)


def test_the_default_callbacks_may_be_called_with_a_magic_mock_as_their_trainer():
    trainer, made = MagicMock(), [each() for each in callbacks.DEFAULT_CALLBACKS]
    events = [name for name in vars(TrainerCallback) if name.startswith("on_")]
    for callback in made:
        for event in events:
            getattr(callback, event)(trainer, batch=Mock(), batch_output={"loss": torch.ones(())}, step=2)
    assert [callback.pbar.n for callback in made if hasattr(callback, "pbar")] == [3]


@pytest.mark.parametrize("kind", [CosineLrScheduler, WSDLrScheduler])
def test_a_scheduler_takes_its_numbers_from_a_mock_of_a_trainer(kind):
    trainer = Mock()
    trainer.run_config.num_epochs, trainer.run_config.num_local_update_steps_per_epoch = 2, 5
    scheduler = replace_trainer_placeholder_values(trainer, kind.create_scheduler_fn())(two_groups())
    assert stepped(scheduler, 11)[-1] != [0.01, 0.002]
    info = getattr(scheduler, "_get_checkpoint_info", None)
    assert info is None or (info.cache_clear(), info(4)) == (None, (10, 4))


def test_a_run_with_a_drawn_seed_prints_it_on_a_short_line(capsys):
    for seed, is_drawn in ((2**40, True), (42, False)):
        trained([callbacks.PrintProgressCallback], torch_seed=seed)
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"Seed {seed}")]
        assert len(lines) == is_drawn and all(len(line) < 80 for line in lines)
