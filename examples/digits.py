"""Train a small convolutional network on scikit-learn's digits: a model, a loss function, an optimizer, a Trainer.

Run it with `python examples/digits.py`.
"""

import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split

from loopwright import Trainer
from loopwright.callbacks import MoveModulesToDeviceCallback, TerminateOnNaNCallback, TrainerCallback
from loopwright.schedulers import CosineLrScheduler


class OneLinePerEpoch(TrainerCallback):
    """Prints the losses of an epoch on one line, instead of the progress bars that a trainer has by default."""

    def on_training_run_epoch_end(self, trainer, **kwargs):
        metrics = trainer.run_history.latest()
        trainer.print(
            f"epoch {trainer.run_history.current_epoch:2d}   "
            f"train loss {metrics['train_loss_epoch']:.4f}   eval loss {metrics['eval_loss_epoch']:.4f}"
        )


def load_data():
    """Return 1438 digits to train on and 359 to evaluate on: images of 8 x 8 pixels in 0..1, and their labels."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    dataset = TensorDataset(images, torch.tensor(digits.target))
    return random_split(dataset, [0.8, 0.2], generator=torch.Generator().manual_seed(0))


def create_model():
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(32 * 4 * 4, 10),
    )


def main():
    torch.manual_seed(0)
    train_set, eval_set = load_data()
    model = create_model()
    trainer = Trainer(
        model,
        loss_func=nn.CrossEntropyLoss(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=6e-3),
        callbacks=(MoveModulesToDeviceCallback, TerminateOnNaNCallback, OneLinePerEpoch),
    )
    start = time.perf_counter()
    result = trainer.train(
        train_set,
        num_epochs=8,
        eval_dataset=eval_set,
        per_device_batch_size=32,
        create_scheduler_fn=CosineLrScheduler.create_scheduler_fn(num_warmup_epochs=1),
        seed=0,
    )
    seconds = time.perf_counter() - start
    predicted = trainer.predict(eval_set, per_device_batch_size=128).outputs.argmax(dim=1)
    expected = torch.tensor([label for _, label in eval_set])
    accuracy = (predicted == expected).float().mean().item()
    print(f"\n{result.updates} updates in {seconds:.1f} s, accuracy on {len(eval_set)} unseen digits: {accuracy:.4f}")


if __name__ == "__main__":
    main()
