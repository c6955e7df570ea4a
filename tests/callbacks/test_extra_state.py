"""Parts beside the model and the optimizer: saved with the run on request, and warned about if they would be lost."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import toys
from loopwright import Checkpointing, Trainer
from loopwright.callbacks import KeepStateCallback, SaveTrainingStateCallback, TrainerCallback
from loopwright.errors import CheckpointError, ConfigTypeError

DATA = TensorDataset(torch.randn(24, 2, generator=torch.Generator().manual_seed(0)) + 2)


class Adversarial(Trainer):
    """A generator, with a discriminator that is trained inside the loss."""

    def __init__(self, keep=True):
        torch.manual_seed(0)
        generator, discriminator = nn.Linear(3, 2), nn.Linear(2, 1)
        optimizer = torch.optim.Adam(discriminator.parameters(), lr=0.01)
        parts = {"discriminator": discriminator, "discriminator_optimizer": optimizer}
        callbacks = [KeepStateCallback(**parts)] if keep else []
        super().__init__(generator, None, torch.optim.Adam(generator.parameters(), lr=0.01), callbacks=callbacks)
        self.discriminator, self.discriminator_optimizer = discriminator, optimizer

    def calculate_train_batch_loss(self, batch):
        real = batch[0]
        made = self.model(torch.randn(len(real), 3))
        gap = self.discriminator(made.detach()).sigmoid().mean() - self.discriminator(real).sigmoid().mean()
        self.discriminator_optimizer.zero_grad()
        gap.backward()
        self.discriminator_optimizer.step()
        return {"loss": -self.discriminator(made).mean(), "model_outputs": made, "batch_size": len(real)}


def test_a_second_model_and_its_optimizer_resume_bit_for_bit(tmp_path):
    whole = Adversarial()
    whole.train(DATA, 4, seed=1)
    Adversarial().train(DATA, 2, seed=1, checkpoints=Checkpointing(tmp_path))
    resumed = Adversarial()
    resumed.train(DATA, 4, checkpoints=Checkpointing(tmp_path), resume_from="auto")
    toys.assert_same_weights(resumed, whole)
    toys.assert_same_weights(resumed.discriminator, whole.discriminator)


def test_an_optimizer_that_would_not_be_saved_is_warned_about_where_a_run_saves_itself(tmp_path):
    message = r"trainer.discriminator_optimizer .* KeepStateCallback\(discriminator_optimizer"
    with pytest.warns(UserWarning, match=message):
        Adversarial(keep=False).train(DATA, 1, checkpoints=Checkpointing(tmp_path / "one"))
    trainer = Adversarial(keep=False)
    trainer.callback_handler.add_callback(SaveTrainingStateCallback(tmp_path / "two"))
    with pytest.warns(UserWarning, match="training states do not hold"):
        trainer.train(DATA, 1)


def test_no_warning_without_saves_nor_for_an_optimizer_that_a_custom_callback_holds(tmp_path):
    class Own(TrainerCallback):
        def __init__(self, optimizer):
            self.optimizer = optimizer

    trainer = Adversarial(keep=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.train(DATA, 1)
        trainer.callback_handler.add_callback(Own(trainer.discriminator_optimizer))
        assert trainer.train(DATA, 1, checkpoints=Checkpointing(tmp_path)).updates == 3


def test_other_parts_than_those_that_were_saved_are_refused_with_both_lists(tmp_path):
    saved = KeepStateCallback(first=nn.Linear(1, 1))
    with pytest.raises(CheckpointError, match="has second, and the checkpoint holds first: pass the same names"):
        KeepStateCallback(second=nn.Linear(1, 1)).load_state_dict(saved.state_dict())


def test_a_part_without_a_state_is_refused_when_it_is_given():
    message = r"\(rates=...\) got a list, which has no state_dict and no load_state_dict"
    with pytest.raises(ConfigTypeError, match=message):
        KeepStateCallback(rates=[1.0])
