"""Peak memory of training a GPT-2 with Trainer and hf.Trainer, against a loop written by hand.

    python benchmarks/memory.py                    # on CUDA: GPT-2 small, batches of 8 x 1024, bf16 autocast
    python benchmarks/memory.py --size tiny        # anywhere: shows that it runs

Every way of training has a process of its own; all of them run side by side. The figure is the most memory that tensors
took on the device (`torch.cuda.max_memory_allocated`), and without CUDA the most that the process took.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

THIS_FILE = Path(__file__).resolve()
SOURCE = THIS_FILE.parents[1] / "src"
WAYS = ("by hand", "Trainer", "hf.Trainer")
MODES = ("eager", "compile")
SIZES: dict[str, dict[str, Any]] = {
    "small": {"rows": 8, "length": 1024},  # GPT2Config's own size is GPT-2 small
    "tiny": {"rows": 2, "length": 32, "n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": 500},
}
UPDATES = 6
MOST = 1.02


def by_hand(model: Any, rows: list[dict[str, Any]], size: int, mode: str, folder: str) -> None:
    """Train with autocast, without any library around the loop."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if mode == "compile":
        model.compile()
    for start in range(0, len(rows), size):
        ids = torch.stack([row["input_ids"] for row in rows[start : start + size]]).to(device)
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def with_trainer(model: Any, rows: list[dict[str, Any]], size: int, mode: str, folder: str) -> None:
    """Train with loopwright's Trainer."""
    import torch

    from loopwright import Trainer

    trainer = Trainer(model, None, torch.optim.AdamW(model.parameters(), lr=1e-4), callbacks=[])
    options = {"train_dataloader_kwargs": {"num_workers": 0}, "mixed_precision": "bf16", "step_mode": mode}
    trainer.train(rows, num_epochs=1, per_device_batch_size=size, **options)


def with_hf(model: Any, rows: list[dict[str, Any]], size: int, mode: str, folder: str) -> None:
    """Train with the trainer of transformers' API."""
    from loopwright import hf

    args = hf.TrainingArguments(
        folder, per_device_train_batch_size=size, num_train_epochs=1, learning_rate=1e-4, max_grad_norm=0.0, bf16=True,
        step_mode=mode, save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    hf.Trainer(model, args, train_dataset=rows).train()


def child(way: str, mode: str, size: str) -> None:
    """Train a few updates, and print the most memory taken."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    options = dict(SIZES[size])
    rows, length = options.pop("rows"), options.pop("length")
    torch.manual_seed(0)
    config = GPT2Config(**options, bos_token_id=0, eos_token_id=0, use_cache=False)  # the cache is for generation
    ids = torch.randint(config.vocab_size, (UPDATES * rows, length))
    data = [{"input_ids": row, "labels": row} for row in ids]
    train = {"by hand": by_hand, "Trainer": with_trainer, "hf.Trainer": with_hf}[way]
    with tempfile.TemporaryDirectory() as folder:
        train(GPT2LMHeadModel(config), data, rows, mode, folder)
    if torch.cuda.is_available():
        peak, device = torch.cuda.max_memory_allocated(), torch.cuda.get_device_name()
    else:
        import resource

        peak, device = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "CPU"
    sys.stdout.write("\n" + json.dumps({"peak": peak, "device": device, "torch": torch.__version__}) + "\n")


def table(found: dict[tuple[str, str], dict[str, Any]], size: str) -> str:
    """Return the figures as a Markdown table."""
    any_one = next(iter(found.values()))
    shape = "{rows} x {length}".format(**SIZES[size])
    lines = [
        f"`python benchmarks/memory.py --size {size}`: GPT-2 ({size}), batches of {shape}, bf16 autocast, AdamW, "
        f"{UPDATES} updates, {any_one['device']}, torch {any_one['torch']}, Python {platform.python_version()}.",
        "",
        "| mode | way | peak memory | of the loop by hand |",
        "|---|---|--:|--:|",
    ]
    for (mode, way), figure in found.items():
        base = found.get((mode, WAYS[0]))
        ratio = f"{figure['peak'] / base['peak']:.3f}" if base else ""
        lines.append(f"| {mode} | {way} | {figure['peak'] / 2**20:,.0f} MiB | {ratio} |")
    return "\n".join([*lines, "", f"Promised: at most {MOST} of the loop by hand, on CUDA."]) + "\n"


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--output", type=Path, help="write the table to this file as well")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*options.child)
        return
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "HF_HUB_OFFLINE": "1"}
    running = {
        (mode, way): subprocess.Popen(
            [sys.executable, str(THIS_FILE), "--child", way, mode, options.size],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for mode in options.modes
        for way in WAYS
    }  # fmt: skip
    found = {}
    for key, process in running.items():
        printed, errors = process.communicate()
        if process.returncode:
            sys.stderr.write(f"{' '.join(key)} failed:\n{errors[-3000:]}\n")
        else:
            found[key] = json.loads(printed.strip().splitlines()[-1])
    if not found:
        sys.exit("every way has failed")
    text = table(found, options.size)
    sys.stdout.write(text)
    if options.output is not None:
        options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
