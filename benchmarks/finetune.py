"""Time per update of small-batch fine-tuning on a GPU: loopwright in every step mode against five other ways.

    python benchmarks/finetune.py                                  everything, written to results/finetune.md
    python benchmarks/finetune.py --settings bert8 --sides hand loopwright-auto
    python benchmarks/finetune.py --tiny --output /tmp/tiny.md     tiny models, on the CPU too: whether every side runs

The model is BERT-base from its config with random weights, the texts are generated token ids with lengths like those of
MRPC's pairs, in bf16; or a tiny MLP in float32. Each side runs in a process of its own: where updates run eagerly, a
forward and backward pass of every length that may come (the first one of a length takes several times as long as the
next), some updates to warm up and to compile, more of them where graphs are recorded (a length in a hundred batches has
to come before the clock starts), then the timed ones between two waits for the device.
Everybody pads to the longest text of a batch; loopwright's graphs pad on to the next of a few lengths, since each
length is a graph of its own. In the setting bert8run they do not: the padding function is the same for every side, and
the clock runs from the first update on, over as many as three epochs of MRPC have: it counts every recording, and for
sides without graphs the first pass of every length.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from sides import preload, run_side
from torch import nn
from torch.utils.data import DataLoader, Dataset

THIS_FILE = Path(__file__).resolve()
RESULTS = THIS_FILE.parent / "results" / "finetune.md"
BUCKETS = (32, 48, 64, 80, 96, 128)
RECORDING = 400
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LOG_EVERY = 50


@dataclass(frozen=True)
class Setting:
    """What is trained.

    Attributes:
        title: in the table.
        batch_size: samples of a batch.
        warm_up: updates before the clock starts.
        timed: updates between its start and its end.
        shortest: padded length below which next to no batch falls.
        is_whole: graphs get the padding function of the others, and the clock counts their recording.
    """

    title: str
    batch_size: int
    warm_up: int
    timed: int
    shortest: int = 0
    is_whole: bool = False

    @property
    def lengths(self) -> tuple[int, ...]:
        """What graphs pad to."""
        return () if self.is_whole else BUCKETS


SETTINGS = {
    "bert8": Setting("BERT-base, batch 8, bf16", 8, 60, 200, 48),
    "bert8run": Setting("BERT-base, batch 8, bf16, plain padding, a whole run", 8, 1, 3 * 459 - 1, 48, is_whole=True),
    "bert32": Setting("BERT-base, batch 32, bf16", 32, 60, 150, 64),
    "mlp": Setting("MLP 32-64-64-4, batch 32, float32", 32, 300, 1500),
}


def make_tiny() -> None:
    """Measure next to nothing; called in every process."""
    for name, setting in SETTINGS.items():
        SETTINGS[name] = replace(setting, warm_up=3, timed=4, shortest=127)
    globals().update(RECORDING=3)


def wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


class Clock:
    """Counts updates, and takes the time between two of them."""

    def __init__(self, setting: Setting) -> None:
        self.first, self.last = setting.warm_up, setting.warm_up + setting.timed
        self.count = 0
        self.seconds = 0.0
        self.graphed: float | None = None
        self.began, self.start_seconds = (
            time.perf_counter(),
            0.0,
        )  # to the end of the second update, in which things compile
        self.recordings: list[float] = []  # seconds of updates in which a graph was recorded
        self._num_graphs, self._before = 0, 0.0

    def tick(self) -> None:
        """Count an update; called after each."""
        self.count += 1
        if self.count == 2:
            wait()
            self.start_seconds = time.perf_counter() - self.began
        if self.count in (self.first, self.last):
            wait()
            now = time.perf_counter()
            self.seconds = now if self.count == self.first else now - self.seconds

    def note_graphs(self, num_graphs: int) -> None:
        """Take the time of an update that has recorded a graph, but for the first; it waits for the device itself."""
        now = time.perf_counter()
        if num_graphs > self._num_graphs > 0:
            self.recordings.append(now - self._before)
        self._num_graphs, self._before = num_graphs, now


# ---------------------------------------------------------------------------------------- the work, for every side


class Texts(Dataset):
    """Token ids with lengths like those of MRPC's pairs: 53 on average, from 20 to 110."""

    longest = 110

    def __init__(self, rows: int) -> None:
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn(rows, generator=generator) * 14 + 53
        lengths = drawn.round().clamp(20, self.longest).long().tolist()
        self.rows = [torch.randint(1000, 30000, (length,), generator=generator).tolist() for length in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = self.rows[index]
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": len(ids) % 2}


class Numbers(Dataset):
    """Features and classes of the tiny MLP."""

    def __init__(self, rows: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.features = torch.randn(1024, 32, generator=generator)
        self.classes = torch.randint(4, (1024,), generator=generator)
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"features": self.features[index % 1024], "labels": self.classes[index % 1024]}


class Pad:
    """Pads a batch to its longest text, or on to one of a few lengths."""

    def __init__(self, lengths: tuple[int, ...] = ()) -> None:
        self.bucket_lengths = lengths

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        if "features" in samples[0]:
            return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
        length = max(len(sample["input_ids"]) for sample in samples)
        length = next((each for each in self.bucket_lengths if each >= length), length)
        batch = {
            name: torch.tensor([sample[name] + [0] * (length - len(sample[name])) for sample in samples])
            for name in ("input_ids", "attention_mask")
        }
        return batch | {"labels": torch.tensor([sample["labels"] for sample in samples])}


class Mlp(nn.Module):
    """A tiny model with the interface of transformers'."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(features)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def parts(name: str, eager: bool = True) -> tuple[nn.Module, Dataset, torch.optim.Optimizer, str]:
    """Return model, data, optimizer and precision of a setting."""
    setting = SETTINGS[name]
    rows = (setting.warm_up + setting.timed + 2) * setting.batch_size
    torch.manual_seed(0)
    if name == "mlp":
        model: nn.Module = Mlp()
        data: Dataset = Numbers(rows)
    else:
        from transformers import BertConfig, BertForSequenceClassification

        small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
        config = BertConfig(problem_type="single_label_classification", **(small if RECORDING < 10 else {}))
        with DEVICE:  # random numbers for 110 M weights take the host ten seconds
            model = BertForSequenceClassification(config)
        data = Texts(rows)
        if eager and not setting.is_whole:
            meet_lengths(model, setting)
    model.to(DEVICE)
    return model, data, torch.optim.AdamW(model.parameters(), lr=2e-5), "no" if name == "mlp" else "bf16"


def meet_lengths(model: nn.Module, setting: Setting) -> None:
    """Run forward and backward once for every length: libraries choose kernels and memory then, for each side alike."""
    for length in range(setting.shortest, Texts.longest + 1):
        ids = torch.full((setting.batch_size, length), 1000, device=DEVICE)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids[:, 0] * 0)["loss"]
        loss.backward()
        model.zero_grad()


def loader_of(data: Dataset, setting: Setting) -> DataLoader:
    return DataLoader(data, setting.batch_size, shuffle=True, collate_fn=Pad(), pin_memory=True)


# -------------------------------------------------------------------------------------------------------- the sides


def run_hand(name: str, clock: Clock) -> None:
    model, data, optimizer, precision = parts(name)
    model.train()
    for batch in loader_of(data, SETTINGS[name]):
        batch = {key: value.to(DEVICE, non_blocking=True) for key, value in batch.items()}
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=precision == "bf16"):
            loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.tick()


def run_accelerate(name: str, clock: Clock) -> None:
    from accelerate import Accelerator

    model, data, optimizer, precision = parts(name)
    accelerator = Accelerator(mixed_precision=precision)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader_of(data, SETTINGS[name]))
    model.train()
    for batch in loader:
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
        clock.tick()


def run_pytorch_accelerated(name: str, clock: Clock) -> None:
    from pytorch_accelerated import Trainer
    from pytorch_accelerated.callbacks import TrainerCallback

    class Ticks(TrainerCallback):
        def on_train_step_end(self, trainer: Any, **kwargs: Any) -> None:
            clock.tick()

    class Own(Trainer):
        def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
            outputs = self.model(**batch)
            return {"loss": outputs["loss"], "model_outputs": outputs, "batch_size": len(batch["labels"])}

    model, data, optimizer, os.environ["ACCELERATE_MIXED_PRECISION"] = parts(name)
    trainer = Own(model, None, optimizer, callbacks=[Ticks])
    trainer.train(
        data, 1, per_device_batch_size=SETTINGS[name].batch_size, collate_fn=Pad(),
        train_dataloader_kwargs={"num_workers": 0},
    )  # fmt: skip


def _hf_arguments(kind: Any, name: str, **more: Any) -> Any:
    return kind(
        "output", num_train_epochs=1, per_device_train_batch_size=SETTINGS[name].batch_size, bf16=name != "mlp",
        report_to="none", save_strategy="no", logging_steps=LOG_EVERY, max_grad_norm=0.0, dataloader_num_workers=0,
        disable_tqdm=True, use_cpu=DEVICE.type == "cpu", **more,
    )  # fmt: skip


def run_transformers(name: str, clock: Clock) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    _run_hf(Trainer, TrainerCallback, TrainingArguments, name, clock, Pad())


def _run_hf(trainer: Any, callback: Any, arguments: Any, name: str, clock: Clock, pad: Pad, **more: Any) -> None:
    class Ticks(callback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            clock.tick()

    is_recorded = hasattr(arguments, "step_mode")
    model, data, optimizer, _ = parts(name, eager=not is_recorded)
    made = trainer(
        model, _hf_arguments(arguments, name, **more), data_collator=pad, train_dataset=data,
        optimizers=(optimizer, None), callbacks=[Ticks()],
    )  # fmt: skip
    made.train()
    if hasattr(made, "core"):
        clock.graphed = made.core.num_graphed_updates / made.state.global_step


def run_lightning(name: str, clock: Clock) -> None:
    import pytorch_lightning as lightning

    model, data, optimizer, precision = parts(name)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any) -> torch.Tensor:
            return self.model(**batch)["loss"]

        def on_train_batch_end(self, *args: Any) -> None:
            clock.tick()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

    model.train()
    trainer = lightning.Trainer(
        max_epochs=1, precision="32-true" if precision == "no" else "bf16-mixed", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, log_every_n_steps=LOG_EVERY, devices=1,
    )  # fmt: skip
    trainer.fit(Module(), loader_of(data, SETTINGS[name]))


def run_loopwright(mode: str, name: str, clock: Clock, padding: str = "keep") -> None:
    from loopwright import Trainer
    from loopwright.callbacks import TrainerCallback
    from loopwright.training.run import run_of

    class Ticks(TrainerCallback):
        def on_update_end(self, trainer: Any, **kwargs: Any) -> None:
            clock.tick()
            clock.note_graphs(run_of(trainer).stepper.num_graphs)

    model, data, optimizer, precision = parts(name, eager=mode == "eager")
    mode = "auto" if mode == "graph" and DEVICE.type == "cpu" else mode
    trainer = Trainer(model, None, optimizer, callbacks=[Ticks])
    pad = Pad(() if mode == "eager" else SETTINGS[name].lengths)
    trainer.train(
        data, 1, per_device_batch_size=SETTINGS[name].batch_size, collate_fn=pad,
        train_dataloader_kwargs={"num_workers": 0}, mixed_precision=precision, step_mode=mode, log_every=LOG_EVERY,
        padding=padding,
    )  # fmt: skip
    clock.graphed = trainer.num_graphed_updates / trainer.progress.update


def run_loopwright_casts(name: str, clock: Clock) -> None:
    """Run graphs in which autocast casts the weights, as it does elsewhere."""
    from loopwright.stepping.cast_weights import CastWeights

    CastWeights.refresh = lambda casts: None
    CastWeights.substituted = lambda casts: contextlib.nullcontext()
    run_loopwright("graph", name, clock)


def run_loopwright_hf(name: str, clock: Clock) -> None:
    from loopwright import hf

    lengths = SETTINGS[name].lengths
    more = {} if lengths else {"length_buckets": "off"}
    _run_hf(hf.Trainer, hf.TrainerCallback, hf.TrainingArguments, name, clock, Pad(lengths), **more)


SIDES: dict[str, tuple[str, str, Callable[[str, Clock], None]]] = {
    "hand": ("hand-written loop", "torch", run_hand),
    "accelerate": ("hand-written + Accelerator", "accelerate", run_accelerate),
    "pytorch-accelerated": ("pytorch-accelerated", "pytorch_accelerated", run_pytorch_accelerated),
    "transformers": ("transformers.Trainer", "transformers", run_transformers),
    "lightning": ("Lightning", "pytorch_lightning", run_lightning),
    "loopwright-eager": ("loopwright, eager", "loopwright", lambda name, clock: run_loopwright("eager", name, clock)),
    "loopwright-graph": ("loopwright, graph", "loopwright", lambda name, clock: run_loopwright("graph", name, clock)),
    "loopwright-casts": ("loopwright, graph, weights cast in every forward pass", "loopwright", run_loopwright_casts),
    "loopwright-free": (
        "loopwright, graph, no padding",
        "loopwright",
        lambda name, clock: run_loopwright("graph", name, clock, "free"),
    ),
    "loopwright-compile": (
        "loopwright, compile",
        "loopwright",
        lambda name, clock: run_loopwright("compile", name, clock),
    ),
    "loopwright-all": (
        "loopwright, compile, no padding",
        "loopwright",
        lambda name, clock: run_loopwright("compile", name, clock, "free"),
    ),
    "loopwright-auto": ("loopwright, auto", "loopwright", lambda name, clock: run_loopwright("auto", name, clock)),
    "loopwright-hf": ("loopwright.hf, auto", "loopwright", run_loopwright_hf),
}
RECORDING_SIDES = tuple(side for side in SIDES if side.startswith("loopwright-") and side != "loopwright-eager")


# -------------------------------------------------------------------------------------------------------- the table


def child(side: str, name: str, is_tiny: bool) -> dict[str, Any]:
    """Measure one side; called in a process of its own."""
    if is_tiny:
        make_tiny()
    if side in RECORDING_SIDES and not SETTINGS[name].is_whole:
        SETTINGS[name] = replace(SETTINGS[name], warm_up=RECORDING)
    clock = Clock(SETTINGS[name])
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    SIDES[side][2](name, clock)
    assert clock.count >= clock.last, f"{clock.count} updates, expected {clock.last}"
    milliseconds = 1000 * clock.seconds / (clock.last - clock.first)
    memory = torch.cuda.max_memory_allocated() / 2**20 if DEVICE.type == "cuda" else 0.0
    figures = {"ms": milliseconds, "graphed": clock.graphed, "memory": memory, "start_seconds": clock.start_seconds}
    if clock.recordings:
        figures |= {"recorded": len(clock.recordings) + 1, "recording_seconds": statistics.median(clock.recordings)}
        figures["slowest_recording_seconds"] = max(clock.recordings)
    return figures


def measure(side: str, name: str, is_tiny: bool, timeout: float) -> dict[str, Any] | str:
    """Run a side, and return its figures or why there are none."""
    if importlib.util.find_spec(SIDES[side][1]) is None:
        return "not installed"
    return run_side(child, side, name, is_tiny, timeout=timeout)


def table(name: str, figures: dict[str, list[Any]]) -> list[str]:
    """Return the lines of one setting's table."""
    known = {side: [one for one in found if isinstance(one, dict)] for side, found in figures.items()}
    medians = {side: statistics.median(one["ms"] for one in found) for side, found in known.items() if found}
    lines = [
        f"### {SETTINGS[name].title}",
        "",
        "| side | ms per update | over the hand-written loop | over transformers.Trainer | graphed | peak MiB "
        "| two updates after |",
        "|---|---|---|---|---|---|---|",
    ]
    for side, found in figures.items():
        title = SIDES[side][0]
        if not found:
            continue
        if side not in medians:
            lines.append(f"| {title} | {found[0]} | | | | | |")
            continue
        ratios = [
            f"{medians[side] / medians[other]:.3f}" if other in medians else "" for other in ("hand", "transformers")
        ]
        graphed = known[side][0]["graphed"]
        share = "" if graphed is None else f"{100 * graphed:.1f} %"
        lines.append(
            f"| {title} | {medians[side]:.3f} | {ratios[0]} | {ratios[1]} | {share} | {known[side][0]['memory']:.0f} | "
            f"{known[side][0]['start_seconds']:.1f} s |"
        )
    return [*lines, ""]


def _words_without_output(words: list[str]) -> list[str]:
    return [word for before, word in zip(["", *words], words, strict=False) if "--output" not in (before, word)]


def main() -> None:
    """Measure, print and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=SIDES)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=240.0)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--tiny", action="store_true", help="tiny models, on the CPU too: whether every side runs")
    options = parser.parse_args()
    preload("pytorch_lightning")
    if not (torch.cuda.is_available() or options.tiny):
        sys.exit("finetune.py measures a GPU, and there is none here; --tiny shows whether every side runs")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    lines = [
        "# Time per update of fine-tuning",
        "",
        f"`{' '.join(['python benchmarks/finetune.py', *_words_without_output(sys.argv[1:])])}`",
        "",
        f"{device}, torch {torch.__version__}, Python {platform.python_version()}, medians over "
        f"{options.rounds} round{'s' if options.rounds > 1 else ''}.",
        "",
    ]
    for name in options.settings:
        figures: dict[str, list[Any]] = {side: [] for side in options.sides}
        for side in options.sides * options.rounds:
            start = time.perf_counter()
            figures[side].append(measure(side, name, options.tiny, options.timeout))
            sys.stderr.write(f"{name} {side}: {figures[side][-1]}, {time.perf_counter() - start:.0f} s in all\n")
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text("\n".join([*lines, *table(name, figures)]))
        lines += table(name, figures)
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
