"""What only a CUDA device can show; skipped elsewhere."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import toys
from loopwright import Trainer
from loopwright.callbacks import DEFAULT_CALLBACKS, TrainerCallback
from toys import weights

pytestmark = pytest.mark.gpu


def network(dropout: float = 0.0) -> nn.Module:
    return toys.seeded(lambda: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 3)))


def data(size: int = 60) -> TensorDataset:
    return toys.labelled(size, 8, seed=1)


def trainer_of(model: nn.Module, callbacks=(), lr: float = 0.05) -> Trainer:
    return Trainer(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr), callbacks=callbacks)


def test_fp16_with_accumulation_and_clipping_trains_like_fp32():
    trained = {}
    for precision in ("no", "fp16"):
        trainer = trainer_of(network())
        options = {"gradient_accumulation_steps": 3, "gradient_clip_norm": 0.5, "gradient_clip_value": 0.1, "seed": 3}
        result = trainer.train(data(), 2, mixed_precision=precision, **options)
        assert result.updates == 6
        trained[precision] = weights(trainer)
    assert torch.allclose(trained["no"], trained["fp16"], atol=5e-3)
    assert not torch.equal(trained["no"], trained["fp16"])


def test_an_update_skipped_by_the_scaler_steps_neither_weights_nor_scheduler():
    trainer = trainer_of(network())
    steps = []

    class Counting(torch.optim.lr_scheduler.LambdaLR):
        def step(self, *args):
            steps.append(1)
            super().step(*args)

    class Overflow(TrainerCallback):
        def on_train_step_end(self, trainer, batch=None, batch_output=None, **kwargs):
            if kwargs["step"] == 0:
                batch_output["loss"] = batch_output["loss"] * 1e30

    trainer.callback_handler.add_callback(Overflow())
    trainer.train(
        data(16), 1, mixed_precision="fp16", create_scheduler_fn=lambda optimizer: Counting(optimizer, lambda n: 1.0)
    )
    assert len(steps) - 1 == 1  # one by torch when it is made, one for the update that was not skipped
    assert torch.isfinite(weights(trainer)).all()


def test_bf16_trains_and_leaves_the_models_own_forward_behind():
    trainer = trainer_of(network())
    trainer.train(data(), 1, mixed_precision="bf16")
    assert "forward" not in vars(trainer.model)
    assert trainer.model(torch.zeros(1, 8, device="cuda")).dtype == torch.float32


def test_nothing_waits_for_the_device_between_two_logs():
    class Watch(TrainerCallback):
        def on_update_end(self, trainer, **kwargs):
            torch.cuda.set_sync_debug_mode("error" if 2 <= trainer.progress.update < 48 else "default")

    trainer = trainer_of(network(), [*DEFAULT_CALLBACKS, Watch])
    try:
        result = trainer.train(data(400), 1, gradient_clip_norm=1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert result.updates == 50


class Noisy(Dataset):
    def __init__(self, size: int) -> None:
        self.inner = data(size)

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int):
        inputs, target = self.inner[index]
        return inputs + torch.randn(8), target


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_run_is_bit_equal_with_dropout_on_the_device(tmp_path, workers):
    save = toys.at_update(5, lambda trainer: trainer.request_save(tmp_path / "state"))
    kwargs = {"seed": 7, "train_dataloader_kwargs": {"num_workers": workers}}
    start = network(dropout=0.3)
    whole = trainer_of(copy.deepcopy(start), [save])
    whole.train(Noisy(60), 2, **kwargs)
    resumed = trainer_of(copy.deepcopy(start))
    resumed.train(Noisy(60), 2, resume_from=tmp_path / "state", **kwargs)
    assert torch.equal(weights(whole), weights(resumed))
