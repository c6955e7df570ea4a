"""The same training twice, by hand and by loopwright.hf.Trainer: every number of the two is the same.

Run it with `python examples/hf_manual_loop.py`. It prints a few losses: by hand, then by the Trainer.
"""

import copy
import tempfile

import torch
from torch import nn
from torch.utils.data import DataLoader

from loopwright.data.order import Shuffled
from loopwright.hf import Trainer, TrainingArguments, default_data_collator, get_scheduler
from loopwright.optimizers import weight_decay_groups

NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS, LEARNING_RATE, WEIGHT_DECAY, SEED = 256, 32, 3, 5e-3, 0.01, 42


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, features, labels=None):
        predictions = self.layers(features).squeeze(-1)
        loss = None if labels is None else nn.functional.mse_loss(predictions, labels)
        return {"loss": loss, "logits": predictions}


def create_data():
    features = torch.randn(NUM_SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    return [{"features": each, "labels": each[:4].prod()} for each in features]


def train_by_hand(model, data):
    optimizer = torch.optim.AdamW(weight_decay_groups(model, WEIGHT_DECAY), lr=LEARNING_RATE, fused=True)
    steps = NUM_EPOCHS * NUM_SAMPLES // BATCH_SIZE
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=steps)
    losses = []
    model.train()
    for epoch in range(NUM_EPOCHS):
        order = Shuffled(NUM_SAMPLES, SEED).ids(epoch, 0, NUM_SAMPLES).tolist()
        for batch in DataLoader(data, BATCH_SIZE, sampler=order, collate_fn=default_data_collator):
            loss = model(**batch)["loss"]
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def train_by_trainer(model, data):
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder, num_train_epochs=NUM_EPOCHS, per_device_train_batch_size=BATCH_SIZE, seed=SEED,
            learning_rate=LEARNING_RATE, weight_decay=WEIGHT_DECAY, logging_steps=1, save_strategy="no",
            disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model, args, train_dataset=data)
        trainer.pop_callback(type(trainer.callback_handler.callbacks[-1]))  # print nothing
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main():
    one, data = Network(), create_data()
    other = copy.deepcopy(one)
    by_hand, by_trainer = train_by_hand(one, data), train_by_trainer(other, data)
    for step in range(0, len(by_hand), 6):
        print(f"update {step + 1:2d}   {by_hand[step]:.6f}   {by_trainer[step]:.6f}")
    is_same = all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    print("losses are equal:", by_hand == by_trainer, "  weights are equal:", is_same)


if __name__ == "__main__":
    main()
