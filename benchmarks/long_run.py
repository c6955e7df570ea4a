"""Save and resume runs of any length: 1,000,000 history values of the Trainer, 200,000 log entries of loopwright.hf.

    python benchmarks/long_run.py [--values 1000000] [--entries 200000]

Prints the processor time of the training thread in each save (the rest is written in the background), the size of the
state, and whether the resumed run holds exactly what was saved.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from loopwright import Checkpointing, Trainer, hf
from loopwright.callbacks import TrainerCallback
from loopwright.training.checkpoints import RunCheckpoints


class Timed:
    """Measures the processor time that saves take of the training thread."""

    def __init__(self) -> None:
        self.saves: list[float] = []
        self._serve = RunCheckpoints._save

    def __enter__(self) -> Timed:
        def save(checkpoints: Any, saves: Any) -> None:
            begin = time.thread_time()
            self._serve(checkpoints, saves)
            self.saves.append(time.thread_time() - begin)

        RunCheckpoints._save = save  # type: ignore[method-assign]
        return self

    def __exit__(self, *exc_info: object) -> None:
        RunCheckpoints._save = self._serve  # type: ignore[method-assign]

    def __str__(self) -> str:
        return " ".join(f"{1000 * seconds:.0f}" for seconds in self.saves) + " ms"


class Record(TrainerCallback):
    """Adds values to the history at the second update."""

    def __init__(self, num_values: int) -> None:
        self.num_values = num_values

    def on_update_end(self, trainer: Any, **kwargs: Any) -> None:
        if trainer.progress.update == 2:
            for index in range(self.num_values):
                trainer.run_history.update_metric("recorded", 0.6931471805599453 + index * 1e-7)


class Logs(hf.TrainerCallback):
    """Adds entries to the log at the second update."""

    def __init__(self, num_entries: int) -> None:
        self.num_entries = num_entries

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            rest = {"accuracy": 0.5, "learning_rate": 4.123e-05}
            for step in range(self.num_entries):
                state.log_history.append({"loss": 0.6931 + step, **rest, "epoch": 0.01 * step, "step": step})


def core(folder: Path, num_values: int, resume_from: str | None, num_epochs: int) -> Trainer:
    """Train a tiny model with one save per update."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    trainer = Trainer(model, nn.MSELoss(), optimizer, callbacks=[Record(num_values)])
    policy = Checkpointing(folder, every_updates=1, keep_best=None)
    data = TensorDataset(torch.randn(16, 4), torch.randn(16, 1))
    trainer.train(data, num_epochs, per_device_batch_size=4, seed=1, checkpoints=policy, resume_from=resume_from)
    return trainer


class Regression(nn.Module):
    """A model in the style of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.layer(x)[:, 0]
        return {"loss": ((out - labels) ** 2).mean(), "logits": out}


def drop_in(folder: Path, num_entries: int, resume: bool, num_epochs: int) -> hf.Trainer:
    """Train with `loopwright.hf` and one save per two updates."""
    args = hf.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=num_epochs,
        per_device_train_batch_size=4,
        save_steps=2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    rows = [{"x": torch.full((4,), index / 16), "labels": torch.tensor(index / 16)} for index in range(16)]
    trainer = hf.Trainer(Regression(), args, train_dataset=rows, callbacks=[Logs(num_entries)])
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def newest_size(folder: Path, pattern: str) -> str:
    """Return the size of the newest state.json and state.safetensors."""
    newest = max(folder.glob(pattern), key=lambda path: int(path.name.split("-")[1]))
    sizes = [f"{name} {(newest / name).stat().st_size:,} bytes" for name in ("state.json", "state.safetensors")]
    return ", ".join(sizes)


def main() -> None:
    """Run both, twice each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=1_000_000)
    parser.add_argument("--entries", type=int, default=200_000)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        for kind, pattern in (("core", "step-*"), ("hf", "checkpoint-*")):
            folder, whole = Path(name) / kind, ""
            for is_resumed in (False, True):
                with Timed() as timed, contextlib.redirect_stdout(io.StringIO()):
                    if kind == "core":
                        first = core(folder, given.values, "auto" if is_resumed else None, 2 + is_resumed)
                        found: Any = first.run_history.get_metric_values("recorded")
                        expected: Any = [0.6931471805599453 + index * 1e-7 for index in range(given.values)]
                    else:
                        log = drop_in(folder, given.entries, is_resumed, 2 + is_resumed).state.log_history
                        found = [entry["loss"] for entry in log if "accuracy" in entry]
                        expected = [0.6931 + step for step in range(given.entries)]
                whole = "exact" if found == expected else "DIFFERENT"
                print(f"{kind}, {'resumed' if is_resumed else 'first'}: saves {timed}; {whole}")
            print(f"  {newest_size(folder, pattern)}")


if __name__ == "__main__":
    main()
