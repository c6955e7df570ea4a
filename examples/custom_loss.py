"""A loss of your own by overriding one method: digits must be classified alike with and without noise.

Run it with `python examples/custom_loss.py`.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split

from loopwright import Trainer
from loopwright.callbacks import MoveModulesToDeviceCallback, TerminateOnNaNCallback

NOISE = 0.5


class ConsistencyTrainer(Trainer):
    """Adds to the usual loss how far the predictions for a noisy copy are from those for the image itself."""

    def __init__(self, *args, consistency_weight, **kwargs):
        super().__init__(*args, **kwargs)
        self.consistency_weight = consistency_weight

    def calculate_train_batch_loss(self, batch):
        # `loss`, `model_outputs` and `batch_size` are what the loop needs; it weighs, scales and clips as ever.
        # The noise follows from the run's seed and the place in it, so the same seed gives the same run.
        output = super().calculate_train_batch_loss(batch)
        images = batch[0]
        noisy = self.model(images + NOISE * torch.randn_like(images))
        target = output["model_outputs"].detach().softmax(dim=1)
        consistency = F.kl_div(noisy.log_softmax(dim=1), target, reduction="batchmean")
        output["loss"] = output["loss"] + self.consistency_weight * consistency
        return output


def accuracy_under_noise(consistency_weight, train_set, eval_set):
    """Train one model, and return its accuracy on noisy images that it has never seen."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    trainer = ConsistencyTrainer(
        model,
        nn.CrossEntropyLoss(),
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        callbacks=(MoveModulesToDeviceCallback, TerminateOnNaNCallback),
        consistency_weight=consistency_weight,
    )
    trainer.train(train_set, num_epochs=10, per_device_batch_size=32, seed=0)
    images, labels = eval_set
    noisy = images + NOISE * torch.randn(images.shape, generator=torch.Generator().manual_seed(1))
    predicted = trainer.predict(TensorDataset(noisy), per_device_batch_size=128).outputs.argmax(dim=1)
    return (predicted == labels).float().mean().item()


def main():
    digits = load_digits()
    dataset = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    train_set, eval_subset = random_split(dataset, [0.8, 0.2], generator=torch.Generator().manual_seed(0))
    eval_set = dataset[eval_subset.indices]
    for weight in (0.0, 1.0):
        accuracy = accuracy_under_noise(weight, train_set, eval_set)
        print(f"consistency weight {weight}: accuracy under noise {accuracy:.4f}")


if __name__ == "__main__":
    main()
