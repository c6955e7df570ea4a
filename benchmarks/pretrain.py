"""Pretraining of decoders on a GPU: loopwright in three step modes against hand-written loops and other trainers.

    python benchmarks/pretrain.py                                both models and all sides, to results/pretrain.md
    python benchmarks/pretrain.py --settings gpt2 --sides hand hand-compile loopwright-compile
    python benchmarks/pretrain.py --tiny --output /tmp/tiny.md   whether every side runs

GPT-2 small on 8 rows of 1024 tokens, and a 0.6 B decoder (the config of Qwen3-0.6B) on 2 rows of 4096. Random weights,
random tokens, weights in fp32 with bf16 autocast, fused AdamW, no clipping, no loader workers; the loss is the model's
own, on every side. Each side runs in a process of its own: 8 updates to warm up, then the timed ones between two waits
for the device. The first update includes compiling, if there is any.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from decoders import DEVICE, IS_HALF, Clock, decoder, gpt2, run_sides
from torch import nn
from torch.utils.data import DataLoader, Dataset


@dataclass(frozen=True)
class Setting:
    title: str
    build: Callable[[bool], nn.Module]
    rows: int
    width: int
    timed: int


def build_decoder(is_tiny: bool) -> nn.Module:
    return decoder(is_tiny, 512 if is_tiny else 151_936)


SETTINGS = {
    "gpt2": Setting("GPT-2 small, 8 x 1024 tokens", gpt2, 8, 1024, 40),
    "decoder": Setting("0.6 B decoder, 2 x 4096 tokens", build_decoder, 2, 4096, 20),
}
WARM_UP, TINY_WIDTH = 8, 64


class Tokens(Dataset):
    """Rows of random tokens, each the target of the one before it."""

    def __init__(self, rows: int, width: int, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(vocabulary, (rows, width), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class Work:
    """Model, data and optimizer of a side."""

    def __init__(self, name: str, is_tiny: bool) -> None:
        self.setting = SETTINGS[name]
        self.width = TINY_WIDTH if is_tiny else self.setting.width
        self.clock = Clock(WARM_UP, 4 if is_tiny else self.setting.timed)
        torch.manual_seed(0)
        self.model = self.setting.build(is_tiny).train()
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        self.data = Tokens(self.setting.rows * (self.clock.num_updates + 1), self.width, vocabulary)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)

    @property
    def loader(self) -> DataLoader:
        return DataLoader(self.data, self.setting.rows, shuffle=True, pin_memory=IS_HALF)

    def begin(self) -> None:
        self.clock.begin(self.model, self.width)


def run_hand(work: Work, *, is_compiled: bool) -> None:
    work.begin()
    model = torch.compile(work.model) if is_compiled else work.model
    for batch in work.loader:
        batch = {key: value.to(DEVICE, non_blocking=True) for key, value in batch.items()}
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=IS_HALF):
            loss = model(**batch)["loss"]
        loss.backward()
        work.optimizer.step()
        work.optimizer.zero_grad()
        work.clock.tick()


def run_transformers(work: Work, *, is_compiled: bool) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Ticks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            work.clock.tick()

    arguments = TrainingArguments(
        "output", num_train_epochs=1, per_device_train_batch_size=work.setting.rows, bf16=IS_HALF, report_to="none",
        save_strategy="no", logging_steps=50, max_grad_norm=0.0, disable_tqdm=True, torch_compile=is_compiled,
        use_cpu=not IS_HALF,
    )  # fmt: skip
    work.begin()
    optimizers = (work.optimizer, None)
    Trainer(work.model, arguments, train_dataset=work.data, optimizers=optimizers, callbacks=[Ticks()]).train()


def run_lightning(work: Work) -> None:
    import pytorch_lightning as lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = work.model

        def training_step(self, batch: Any) -> torch.Tensor:
            return self.model(**batch)["loss"]

        def on_train_batch_end(self, *args: Any) -> None:
            work.clock.tick()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return work.optimizer

    work.begin()
    trainer = lightning.Trainer(
        max_epochs=1, precision="bf16-mixed" if IS_HALF else "32-true", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, log_every_n_steps=50, devices=1, accelerator="gpu" if IS_HALF else "cpu",
    )  # fmt: skip
    trainer.fit(Module(), work.loader)


def run_loopwright(work: Work, mode: str) -> None:
    from loopwright import Trainer
    from loopwright.callbacks import TrainerCallback

    class Ticks(TrainerCallback):
        def on_update_end(self, trainer: Any, **kwargs: Any) -> None:
            work.clock.tick()

    trainer = Trainer(work.model, None, work.optimizer, callbacks=[Ticks])
    work.begin()
    trainer.train(
        work.data, 1, per_device_batch_size=work.setting.rows, train_dataloader_kwargs={"num_workers": 0},
        mixed_precision="bf16" if IS_HALF else "no", step_mode=mode,
    )  # fmt: skip
    work.clock.graphed = trainer.num_graphed_updates / trainer.progress.update


SIDES: dict[str, tuple[str, str, Callable[[Work], None]]] = {
    "hand": ("hand-written loop", "torch", lambda work: run_hand(work, is_compiled=False)),
    "hand-compile": ("hand-written loop, torch.compile", "torch", lambda work: run_hand(work, is_compiled=True)),
    "transformers": (
        "transformers.Trainer", "transformers", lambda work: run_transformers(work, is_compiled=False)
    ),
    "transformers-compile": (
        "transformers.Trainer, torch_compile", "transformers", lambda work: run_transformers(work, is_compiled=True)
    ),
    "lightning": ("Lightning", "pytorch_lightning", run_lightning),
    "loopwright-eager": ("loopwright, eager", "loopwright", lambda work: run_loopwright(work, "eager")),
    "loopwright-auto": ("loopwright, auto", "loopwright", lambda work: run_loopwright(work, "auto")),
    "loopwright-compile": ("loopwright, compile", "loopwright", lambda work: run_loopwright(work, "compile")),
}  # fmt: skip


def child(name: str, side: str, is_tiny: bool, folder: str) -> dict[str, Any]:
    """Measure one side; called in a process of its own."""
    work = Work(name, is_tiny)
    SIDES[side][2](work)
    return work.clock.figures(work.setting.rows * work.width)


if __name__ == "__main__":
    run_sides(
        Path(__file__).resolve(),
        "Pretraining of decoders",
        ["Weights in fp32, bf16 autocast, fused AdamW; 8 updates to warm up."],
        {name: setting.title for name, setting in SETTINGS.items()},
        {name: (title, package) for name, (title, package, _) in SIDES.items()},
        child,
        "hand",
    )
