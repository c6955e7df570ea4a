"""OneCycleLR with placeholders: numbers that only the trainer knows, and arithmetic on them.

Run it with `python examples/onecycle_placeholders.py`.
"""

from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import TensorDataset, random_split

from loopwright import Trainer, TrainerPlaceholderValues
from loopwright.callbacks import MoveModulesToDeviceCallback, TerminateOnNaNCallback, TrainerCallback

NUM_EPOCHS = TrainerPlaceholderValues.NUM_EPOCHS
UPDATES_PER_EPOCH = TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH


class RecordLr(TrainerCallback):
    """Keeps the learning rate of every update."""

    def __init__(self):
        self.lrs = []

    def on_before_optimizer_step(self, trainer, **kwargs):
        self.lrs.append(trainer.optimizer.param_groups[0]["lr"])


def main():
    torch.manual_seed(0)
    digits = load_digits()
    dataset = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    train_set, eval_set = random_split(dataset, [0.8, 0.2])
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    record = RecordLr()
    trainer = Trainer(
        model,
        nn.CrossEntropyLoss(),
        torch.optim.AdamW(model.parameters()),
        callbacks=(MoveModulesToDeviceCallback, TerminateOnNaNCallback, record),
    )
    # The optimizer is left out: the trainer calls this function with it, once the run's numbers are settled.
    create_scheduler_fn = partial(
        OneCycleLR,
        max_lr=0.01,
        total_steps=NUM_EPOCHS * UPDATES_PER_EPOCH,
        pct_start=2 / NUM_EPOCHS,  # rise for two epochs, whatever their number
    )
    result = trainer.train(
        train_set,
        num_epochs=10,
        eval_dataset=eval_set,
        per_device_batch_size=32,
        gradient_accumulation_steps=2,
        create_scheduler_fn=create_scheduler_fn,
        seed=0,
    )
    lrs = record.lrs
    peak = lrs.index(max(lrs))
    print(f"{result.updates} updates, {trainer.scheduler.total_steps} planned")
    print(f"learning rate: first {lrs[0]:.2g}, highest {lrs[peak]:.2g} at update {peak + 1}, last {lrs[-1]:.2g}")
    predicted = trainer.predict(eval_set, per_device_batch_size=128).outputs.argmax(dim=1)
    expected = torch.tensor([label for _, label in eval_set])
    print(f"accuracy: {(predicted == expected).float().mean().item():.4f}")


if __name__ == "__main__":
    main()
