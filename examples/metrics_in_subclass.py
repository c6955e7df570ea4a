"""Metrics without a subclass: by name, or as an object of torchmetrics; early stopping watches one of them.

Run it with `python examples/metrics_in_subclass.py`.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split
from torchmetrics.classification import MulticlassF1Score

from loopwright import Trainer
from loopwright.callbacks import CONSOLE_CALLBACKS, EarlyStoppingCallback

torch.manual_seed(0)
digits = load_digits()
dataset = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
train_set, eval_set = random_split(dataset, [0.8, 0.2])
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
callbacks = [*CONSOLE_CALLBACKS, EarlyStoppingCallback(3, watch_metric="accuracy")]
metrics = {"accuracy": "accuracy", "f1": MulticlassF1Score(num_classes=10)}
trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=callbacks, metrics=metrics)
result = trainer.train(train_set, num_epochs=8, eval_dataset=eval_set, per_device_batch_size=32, seed=0)
print(f"after {result.epochs} epochs: {result.metrics['eval_accuracy']:.4f}, F1 {result.metrics['eval_f1']:.4f}")
