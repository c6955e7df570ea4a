"""An event of your own: the trainer fires `on_mistakes` after each evaluation batch, a callback collects them.

Run it with `python examples/custom_callback_event.py`.
"""

from collections import Counter

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split

from loopwright import Trainer
from loopwright.callbacks import MoveModulesToDeviceCallback, TrainerCallback


class MistakeTrainer(Trainer):
    """Tells its callbacks which evaluation samples the model got wrong."""

    def calculate_eval_batch_loss(self, batch):
        output = super().calculate_eval_batch_loss(batch)
        predicted, expected = output["model_outputs"].argmax(dim=1), batch[1]
        wrong = predicted != expected
        self.callback_handler.call_event(
            "on_mistakes", self, predicted=predicted[wrong].tolist(), expected=expected[wrong].tolist()
        )
        return output


class CountConfusions(TrainerCallback):
    """Counts which digit was taken for which in the last evaluation."""

    custom_events = ("on_mistakes",)  # says that the name is meant; an unknown on_... is warned about

    def __init__(self):
        self.confusions = Counter()

    def on_eval_epoch_start(self, trainer, **kwargs):
        self.confusions.clear()

    def on_mistakes(self, trainer, predicted, expected, **kwargs):
        self.confusions.update(zip(expected, predicted, strict=True))

    def on_eval_epoch_end(self, trainer, **kwargs):
        trainer.print(f"epoch {trainer.run_history.current_epoch}: {self.confusions.total()} mistakes")

    def on_training_run_end(self, trainer, **kwargs):
        for (expected, predicted), times in self.confusions.most_common(3):
            trainer.print(f"a {expected} was taken for a {predicted} {times} times")


def main():
    torch.manual_seed(0)
    digits = load_digits()
    dataset = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    train_set, eval_set = random_split(dataset, [0.5, 0.5])
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    trainer = MistakeTrainer(
        model,
        nn.CrossEntropyLoss(),
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        callbacks=(MoveModulesToDeviceCallback, CountConfusions),
    )
    trainer.train(train_set, num_epochs=10, eval_dataset=eval_set, per_device_batch_size=32, seed=0)


if __name__ == "__main__":
    main()
