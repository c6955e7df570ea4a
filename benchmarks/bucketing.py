"""What an order by length saves: epochs of a small BERT on texts of MRPC's lengths, in a random order and by length.

Both sides are the same trainer, model, data, batch size and number of updates on the CPU. One draws its order at
random and pads each batch to its longest text, as usual; the other takes `LengthGroupedSampler`. Sides take turns
within one process, and the table shows medians of processor time over the rounds, so a busy machine hits both or none.
The label of a text follows from its tokens, so that losses can be compared: of every round the mean loss of the last
epoch, and the loss on texts that neither side was trained on.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from loopwright import Trainer
from loopwright.data.buckets import LengthGroupedSampler, sample_lengths
from loopwright.data.collators import DataCollatorWithPadding

VOCABULARY = 200
WRONG_LABELS = 0.15
TARGET = 1.25  # --check: seconds of an epoch in a random order over those by length
LOSS_TOLERANCE = 0.03  # --check: difference of the losses on unseen texts, which are about 0.69 before training
SIDES = ("random", "by length")


class Tokenizer:
    """What a padding collator asks for."""

    pad_token_id = 0
    model_input_names = ("input_ids", "attention_mask")


class Measured(NamedTuple):
    """One side of one round."""

    seconds: float
    loss: float
    unseen_loss: float
    padding: float


def make_texts(count: int, seed: int) -> list[dict[str, Any]]:
    """Pairs of sentences as BERT's tokenizer makes them of MRPC: 53 tokens on average, 15 to 105 of them.

    The label says which of two tokens is in the text; some labels are wrong, so that no loss comes near zero.
    """
    numbers = np.random.default_rng(seed)
    lengths = np.clip(np.rint(numbers.normal(53, 17, count)), 15, 105).astype(int)
    texts = []
    for length in lengths:
        ids = numbers.integers(5, VOCABULARY, length)
        label = int(numbers.integers(2))
        ids[numbers.random(length) < 0.3] = 3 + label
        is_wrong = bool(numbers.random() < WRONG_LABELS)
        texts.append({"input_ids": ids.tolist(), "label": label ^ is_wrong})
    return texts


def make_model(layers: int, width: int) -> torch.nn.Module:
    """A BERT with random weights and no dropout."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=max(width // 32, 1),
        intermediate_size=4 * width,
        max_position_embeddings=128,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


class Quiet(Trainer):
    """A trainer that keeps its figures to itself, and the padding of its last log."""

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Say nothing."""


def measure(side: str, options: argparse.Namespace, seed: int) -> Measured:
    """Train one side and return its figures."""
    texts, unseen = make_texts(options.texts, 0), make_texts(200, 1)
    model = make_model(options.layers, options.width)
    trainer = Quiet(model, None, torch.optim.AdamW(model.parameters(), lr=3e-4), callbacks=())
    sampler = {"sampler": LengthGroupedSampler(sample_lengths(texts), options.batch)} if side == "by length" else {}
    begin = time.process_time()  # one thread and no workers: what other processes do does not count
    result = trainer.train(
        texts,
        num_epochs=options.epochs,
        per_device_batch_size=options.batch,
        collate_fn=DataCollatorWithPadding(Tokenizer()),
        train_dataloader_kwargs={"num_workers": 0, **sampler},
        seed=seed,
        log_every=10**6,
    )
    seconds = (time.process_time() - begin) / options.epochs
    padding = trainer.speed["padding_waste"]
    scored = trainer.evaluate(unseen, 32, {"num_workers": 0}, DataCollatorWithPadding(Tokenizer()))
    return Measured(
        seconds, float(result.metrics["train_loss_epoch"]), float(scored.metrics["evaluation_loss"]), padding
    )


def report(found: dict[str, list[Measured]], options: argparse.Namespace) -> tuple[str, bool]:
    """The table, and whether the target is met."""
    medians = {side: Measured(*map(statistics.median, zip(*rounds, strict=True))) for side, rounds in found.items()}
    ratios = [one.seconds / other.seconds for one, other in zip(found["random"], found["by length"], strict=True)]
    ratio = statistics.median(ratios)
    difference = abs(medians["random"].unseen_loss - medians["by length"].unseen_loss)
    lines = [
        "# Order by length against a random order",
        "",
        f"`python benchmarks/bucketing.py --texts {options.texts} --epochs {options.epochs} --batch {options.batch} "
        f"--layers {options.layers} --width {options.width} --rounds {options.rounds}`",
        "",
        f"{platform.machine()}, torch {torch.__version__}, {torch.get_num_threads()} thread, CPU. BERT of "
        f"{options.layers} layers of {options.width}, {options.texts} texts of MRPC's lengths, batch {options.batch}, "
        f"{options.epochs} epochs. Medians of {options.rounds} round(s); both sides in one process, taking turns.",
        "",
        "| order | processor seconds per epoch | padding | loss of the last epoch | loss on unseen texts |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {side} | {one.seconds:.2f} | {100 * one.padding:.1f} % | {one.loss:.4f} | {one.unseen_loss:.4f} |"
        for side, one in medians.items()
    ]
    lines += [
        "",
        f"Speed: **{ratio:.2f}x** (rounds: {min(ratios):.2f} to {max(ratios):.2f}; target {TARGET}). Losses on unseen "
        f"texts differ by {difference:.4f}.",
        "",
    ]
    return "\n".join(lines), ratio >= TARGET and difference <= LOSS_TOLERANCE


def main() -> int:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=int, default=3668, help="samples of an epoch; MRPC has 3668")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    parser.add_argument("--check", action="store_true", help="exit status 1 when the target is missed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[Measured]] = {side: [] for side in SIDES}
    for number in range(options.rounds):
        for side in SIDES if number % 2 == 0 else SIDES[::-1]:
            found[side].append(measure(side, options, seed=number))
    text, is_met = report(found, options)
    print(text)
    if options.output is not None:
        options.output.write_text(text, encoding="utf-8")
    return 1 if options.check and not is_met else 0


if __name__ == "__main__":
    raise SystemExit(main())
