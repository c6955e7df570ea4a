"""Metrics from torchmetrics in a subclass of Trainer: updated per batch, recorded and reset after each evaluation.

Run it with `python examples/metrics_in_subclass.py`.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from loopwright import Trainer
from loopwright.callbacks import MoveModulesToDeviceCallback, TerminateOnNaNCallback, TrainerCallback


class TrainerWithMetrics(Trainer):
    """Evaluates accuracy and F1 score besides the loss."""

    def __init__(self, *args, num_classes, **kwargs):
        super().__init__(*args, **kwargs)
        # A module that is an attribute of the trainer is moved to the device by MoveModulesToDeviceCallback.
        # Each process sees all rows (by `gather`, below), so the metrics need not talk to each other.
        options = {"num_classes": num_classes, "sync_on_compute": False}
        self.metrics = MetricCollection(
            {"accuracy": MulticlassAccuracy(average="micro", **options), "f1": MulticlassF1Score(**options)}
        )

    def calculate_eval_batch_loss(self, batch):
        output = super().calculate_eval_batch_loss(batch)
        predictions = output["model_outputs"].argmax(dim=1)
        self.metrics.update(*self.gather((predictions, batch[1])))
        return output

    def eval_epoch_end(self):
        for name, value in self.metrics.compute().items():
            self.run_history.update_metric(name, value.item())
        self.metrics.reset()


class PrintMetrics(TrainerCallback):
    """Prints what the evaluation recorded: it is in the history, where any callback finds it by its name."""

    def on_eval_epoch_end(self, trainer, **kwargs):
        metrics = trainer.run_history.latest()
        trainer.print(
            f"epoch {trainer.run_history.current_epoch}   eval loss {metrics['eval_loss_epoch']:.4f}   "
            f"accuracy {metrics['accuracy']:.4f}   F1 {metrics['f1']:.4f}"
        )


def main():
    torch.manual_seed(0)
    digits = load_digits()
    dataset = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    train_set, eval_set = random_split(dataset, [0.8, 0.2])
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    trainer = TrainerWithMetrics(
        model,
        nn.CrossEntropyLoss(),
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        callbacks=(MoveModulesToDeviceCallback, TerminateOnNaNCallback, PrintMetrics),
        num_classes=10,
    )
    result = trainer.train(train_set, num_epochs=8, eval_dataset=eval_set, per_device_batch_size=32, seed=0)
    print(f"\nafter {result.epochs} epochs: accuracy {result.metrics['accuracy']:.4f}, F1 {result.metrics['f1']:.4f}")


if __name__ == "__main__":
    main()
