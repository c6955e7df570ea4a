"""Eager updates of a tiny MLP on a GPU: a hand-written loop and loopwright, in turns in one process.

    python benchmarks/eager_turns.py --output benchmarks/results/eager_turns.md

So small a model is bound by the host, so this shows what the library adds to each update. Processes differ from each
other by more than that (finetune.py measures each side in its own), so both sides take turns here, and the median
counts. The first updates of each run are not timed.
"""

import argparse
import contextlib
import io
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from overhead import BATCH_SIZE, TinyDataset
from torch import nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
from loopwright import Trainer
from loopwright.callbacks import TrainerCallback

NOT_TIMED = 200


class Clock(TrainerCallback):
    """Takes the time of all updates but the first."""

    def __init__(self, updates: int) -> None:
        self.updates, self.count, self.begin, self.milliseconds = updates, 0, 0.0, 0.0

    def on_update_end(self, trainer: Any = None, **kwargs: Any) -> None:
        self.count += 1
        if self.count in (NOT_TIMED, self.updates):
            torch.cuda.synchronize()
            now = time.perf_counter()
            self.milliseconds = (now - self.begin) * 1e3 / (self.updates - NOT_TIMED)
            self.begin = now


def parts() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)).cuda()
    return model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters(), lr=1e-3)


def by_hand(updates: int) -> float:
    (model, loss_function, optimizer), clock = parts(), Clock(updates)
    model.train()
    for features, classes in DataLoader(TinyDataset(updates), batch_size=BATCH_SIZE, shuffle=True, num_workers=0):
        loss_function(model(features.cuda()), classes.cuda()).backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.on_update_end()
    return clock.milliseconds


def by_loopwright(updates: int) -> float:
    clock = Clock(updates)
    trainer = Trainer(*parts(), callbacks=[clock])
    options = {"per_device_batch_size": BATCH_SIZE, "train_dataloader_kwargs": {"num_workers": 0}, "step_mode": "eager"}
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train(TinyDataset(updates), num_epochs=1, **options)
    return clock.milliseconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("eager_turns.py measures a GPU, and there is none here")
    by_hand(options.updates), by_loopwright(options.updates)
    rounds = [(by_hand(options.updates), by_loopwright(options.updates)) for _ in range(options.rounds)]
    hand, ours = (statistics.median(side) for side in zip(*rounds, strict=True))
    text = "\n".join(
        [
            f"`python benchmarks/eager_turns.py --rounds {options.rounds} --updates {options.updates}`: "
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {platform.python_version()}.",
            "",
            "| MLP 32-64-64-4, batch 32, float32, eager | ms per update, median | ratio |",
            "|---|--:|--:|",
            f"| hand-written loop | {hand:.3f} | 1.000 |",
            f"| loopwright, eager | {ours:.3f} | {ours / hand:.3f} |",
            "",
            f"Ratios of the rounds: {', '.join(f'{b / a:.3f}' for a, b in rounds)}.",
            "",
        ]
    )
    sys.stdout.write(text)
    if options.output is not None:
        options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
