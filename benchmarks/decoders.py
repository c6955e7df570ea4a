"""Shared code of pretrain.py and chat.py: decoders from configs, a clock, processes for the sides, and tables."""

from __future__ import annotations

import argparse
import importlib.util
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sides import preload, run_side
from torch import nn

PEAK = 989e12  # FLOP/s of an H100 or H200 in dense bf16, by the datasheet
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IS_HALF = DEVICE.type == "cuda"  # bf16 autocast; on the CPU only --tiny runs, in float32
FORMULA = (
    "MFU counts (6 x parameters + 6 x layers x heads x head size x sequence length) FLOP per token, over 989 TFLOP/s. "
    "Tied embeddings count once, as the output layer. Attention is causal, so its term is half of PaLM's. A frozen "
    "weight counts 4 instead of 6, since it gets no gradient."
)


@dataclass
class Clock:
    """The time of the first update, of the warm-up, and of the updates after it."""

    warm_up: int
    timed: int
    count: int = 0
    seconds: float = 0.0
    first_seconds: float = 0.0
    warm_up_seconds: float = 0.0
    graphed: float | None = None
    flops_per_token: float = 0.0

    @property
    def num_updates(self) -> int:
        return self.warm_up + self.timed

    def begin(self, model: nn.Module, seen: float) -> None:
        """Start the clock; `seen` is the mean length of the sequence that a token is in."""
        self.flops_per_token = flops_per_token(model, seen)
        reset_memory()
        self._begun = self._now()

    def tick(self) -> None:
        """Count an update; called after each."""
        self.count += 1
        if self.count == 1:
            self.first_seconds = self._now() - self._begun
        if self.count == self.warm_up:
            self._started = self._now()
            self.warm_up_seconds = self._started - self._begun
        if self.count == self.num_updates:
            self.seconds = self._now() - self._started

    def figures(self, tokens_per_update: float) -> dict[str, Any]:
        """Return what the table shows."""
        assert self.count >= self.num_updates, f"{self.count} updates, expected {self.num_updates}"
        rate = tokens_per_update * self.timed / self.seconds
        found = {
            "ms": 1000 * self.seconds / self.timed,
            "tokens": rate,
            "mfu": rate * self.flops_per_token / PEAK,
            "first": self.first_seconds,
            "warm_up": self.warm_up_seconds,
            "graphed": self.graphed,
        }
        if DEVICE.type == "cuda":
            found |= {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        return found

    def _now(self) -> float:
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def reset_memory() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def flops_per_token(model: nn.Module, seen: float) -> float:
    """Return the matrix work of forward and backward, by `FORMULA`."""
    config: Any = model.config
    parameters = {id(each): each for each in model.parameters()}.values()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 6 * config.num_hidden_layers * config.num_attention_heads * size * seen
    return sum((6 if each.requires_grad else 4) * each.numel() for each in parameters) + attention


def gpt2(is_tiny: bool) -> nn.Module:
    """Return GPT-2 small without dropout, as it is pretrained today."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 512, "n_positions": 64} if is_tiny else {}
    config = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    with DEVICE:  # random numbers for so many weights take the host long
        return GPT2LMHeadModel(config)


def decoder(is_tiny: bool, vocabulary: int) -> nn.Module:
    """Return a decoder with the config of Qwen3-0.6B."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    large = dict(hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8)
    large |= dict(head_dim=128, intermediate_size=3072, max_position_embeddings=40_960)
    small = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    small |= dict(head_dim=8, intermediate_size=64, max_position_embeddings=512)
    sizes = small if is_tiny else large
    config = Qwen3Config(vocab_size=vocabulary, tie_word_embeddings=True, use_cache=False, **sizes)
    with DEVICE:
        return Qwen3ForCausalLM(config)


# ------------------------------------------------------------------------------------------------------- processes


def table(title: str, titles: dict[str, str], figures: dict[str, Any], baseline: str) -> list[str]:
    """Return the lines of one setting's table."""
    base = figures.get(baseline)
    lines = [
        f"### {title}",
        "",
        f"| side | ms per update | tokens/s | over {titles[baseline]} | MFU | GiB allocated | GiB reserved "
        "| first update, s | warm-up, s | graphed |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for side, found in figures.items():
        if not isinstance(found, dict):
            lines.append(f"| {titles[side]} | {found} | | | | | | | | |")
            continue
        ratio = f"{found['tokens'] / base['tokens']:.2f}" if isinstance(base, dict) else ""
        memory = [f"{found[name] / 2**30:.1f}" if name in found else "" for name in ("allocated", "reserved")]
        graphed = "" if found["graphed"] is None else f"{100 * found['graphed']:.0f} %"
        cells = [titles[side], f"{found['ms']:.2f}", f"{found['tokens']:,.0f}", ratio, f"{100 * found['mfu']:.1f} %"]
        cells += [*memory, f"{found['first']:.1f}", f"{found['warm_up']:.1f}", graphed]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def run_sides(
    script: Path,
    heading: str,
    notes: Iterable[str],
    settings: dict[str, str],  # titles by name
    sides: dict[str, tuple[str, str]],  # title and required package by name
    child: Callable[[str, str, bool, str], dict[str, Any]],  # of setting, side, is_tiny and folder; returns the figures
    baseline: str,
    prepare: Callable[[str, bool, str], dict[str, Any]] | None = None,  # writes the files of a setting to the folder
) -> None:
    """Parse the arguments, measure, and write the tables after every side."""
    parser = argparse.ArgumentParser(
        description=sys.modules["__main__"].__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--settings", nargs="+", default=list(settings), choices=settings)
    parser.add_argument("--sides", nargs="+", default=list(sides), choices=sides)
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds of a side")
    parser.add_argument("--output", type=Path, default=script.parent / "results" / f"{script.stem}.md")
    parser.add_argument("--tiny", action="store_true", help="tiny models, on the CPU too: whether every side runs")
    options = parser.parse_args()
    models = [f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "qwen3")]
    preload("pytorch_lightning", "trl", "peft", "loopwright.runs.trainer", *models)
    if not (torch.cuda.is_available() or options.tiny):
        sys.exit(f"{script.name} measures a GPU, and there is none here; --tiny shows whether every side runs")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    versions = ", ".join(
        f"{name} {version}" for name in ("torch", "transformers", "trl") if (version := _version(name))
    )
    flags = [word for before, word in zip(["", *sys.argv[1:]], sys.argv[1:], strict=False)
             if "--output" not in (before, word)]  # fmt: skip
    lines = [
        f"# {heading}",
        "",
        f"`{' '.join([f'python benchmarks/{script.name}', *flags])}`: {device}, {versions}, Python "
        f"{platform.python_version()}.",
        "",
        *[line for note in (*notes, FORMULA) for line in (note, "")],
    ]
    with tempfile.TemporaryDirectory() as folder:
        for name in options.settings:
            figures: dict[str, Any] = {}
            begun = time.monotonic()
            failed = prepare and run_side(prepare, name, options.tiny, folder, timeout=options.timeout)
            sys.stderr.write(f"{name}: prepared in {time.monotonic() - begun:.0f} s\n")
            for side in options.sides:
                begun = time.monotonic()
                if isinstance(failed, str):
                    figures[side] = failed
                elif importlib.util.find_spec(sides[side][1]) is None:
                    figures[side] = "not installed"
                else:  # every side compiles from scratch
                    arguments = (name, side, options.tiny, folder)
                    figures[side] = run_side(child, *arguments, timeout=options.timeout, is_cold=True)
                sys.stderr.write(f"{name} {side}: {figures[side]}, {time.monotonic() - begun:.0f} s in all\n")
                shown = table(settings[name], {each: title for each, (title, _) in sides.items()}, figures, baseline)
                options.output.parent.mkdir(parents=True, exist_ok=True)
                options.output.write_text("\n".join([*lines, *shown]))
            lines += shown
    sys.stdout.write("\n".join(lines) + "\n")


def _version(name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None
