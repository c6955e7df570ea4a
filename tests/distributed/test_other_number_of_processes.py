"""A run of the command line or of hf goes on with fewer processes: as long as before, on the same schedule."""

import json
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from distributed.launcher import run
from loopwright.checkpoint import read
from loopwright.checkpoint.store import find_newest
from loopwright.engine.processes import world_process_zero_only

pytest.importorskip("transformers")
pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def logged(metrics: Path) -> list[tuple[int, float]]:
    """Updates with their learning rates, as metrics.jsonl has them."""
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    rates = ("lr", "learning_rate")
    return [
        (each["update"], each[name])
        for each in records
        for name in rates
        if each.get("event") == "log" and name in each
    ]


def bits_of(folder: Path) -> dict[str, bytes]:
    newest, _ = find_newest(folder)
    return {name: tensor.numpy().tobytes() for name, tensor in read(newest).model.items()}


def copied(folder: Path, to: Path) -> None:
    """Copy a folder, on the first process; the others wait."""
    world_process_zero_only(shutil.copytree)(folder, to)


def train_task(results) -> None:
    from loopwright.cli import main

    if os.environ["WORLD_SIZE"] == "2":
        words = ["train", "text-classification", "--data", "reviews.csv", "--epochs", "1", "--lr", "2e-3"]
        words += ["--batch", "8", "--threads", "1", "--no_rehearsal", "--logging_steps", "1", "--reduction", "exact"]
        results["code"] = main([*words, "--out", "two"])
        copied(Path("two"), Path("one"))
    results["code of resume"] = main(["resume", os.environ["RUN"], "--epochs", "2"])


def test_a_task_resumed_on_one_process_is_as_long_as_on_two_and_ends_with_the_same_bits(tmp_path):
    from tasks.reviews import rows, write_csv

    write_csv(tmp_path / "reviews.csv", rows(64))
    for name, num_processes in (("two", 2), ("one", 1)):
        ranks = run(train_task, tmp_path, num_processes, 100, RUN=name)
        assert [rank["code of resume"] for rank in ranks] == [0] * num_processes, ranks[0].output[-4000:]
    assert "accum 2 × 1 device = 16" in ranks[0].output
    two, one = (logged(tmp_path / name / "metrics.jsonl") for name in ("two", "one"))
    assert one == two and one[-1][1] == 0
    assert bits_of(tmp_path / "one" / "checkpoints") == bits_of(tmp_path / "two" / "checkpoints")


def stop_task(results) -> None:
    from loopwright.cli import main

    def stop_it() -> None:
        while not logged_something(Path("stopped") / "metrics.jsonl"):
            time.sleep(0.05)
        main(["stop", "stopped"])

    if os.environ["RANK"] == "0":
        threading.Thread(target=stop_it, daemon=True).start()
    words = ["train", "text-classification", "--data", "reviews.csv", "--epochs", "1000", "--batch", "8"]
    words += ["--threads", "1", "--no_rehearsal", "--logging_steps", "1", "--eval_strategy", "no", "--out", "stopped"]
    results["code"] = main(words)


def logged_something(metrics: Path) -> bool:
    return metrics.exists() and '"log"' in metrics.read_text()


def test_a_task_on_two_processes_is_stopped_on_both_and_reported_once(tmp_path):
    from tasks.reviews import rows, write_csv

    write_csv(tmp_path / "reviews.csv", rows(64))
    first, second = run(stop_task, tmp_path)
    assert first["code"] == second["code"] == 75
    assert "stopped and saved; continue with: lw resume stopped" in first.output and second.output == ""


def fit(folder: Path, is_begun: bool) -> dict:
    from hf import tiny
    from loopwright.hf import Trainer, TrainerCallback

    class StopAtThree(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 3

    model = tiny.gpt2()
    args = tiny.arguments(
        folder, num_train_epochs=2, per_device_train_batch_size=2, save_strategy="steps", save_steps=3,
        logging_steps=1, learning_rate=0.01, reduction="exact",
    )  # fmt: skip
    callbacks = [] if is_begun else [StopAtThree()]
    trainer = Trainer(model, args, train_dataset=tiny.token_rows(26), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=is_begun)
    return {
        "max_steps": trainer.state.max_steps,
        "rates": [[log["step"], log["learning_rate"]] for log in trainer.state.log_history if "learning_rate" in log],
        "weights": [parameter.detach().flatten().tolist() for parameter in model.parameters()],
        "epoch": trainer.state.epoch,
    }


def train_hf(results) -> dict:
    folder = Path.cwd()
    if os.environ["WORLD_SIZE"] == "1":
        return fit(folder / "one", is_begun=True)
    results["begun"] = fit(folder / "two", is_begun=False)
    copied(folder / "two", folder / "one")
    return fit(folder / "two", is_begun=True)


def test_an_hf_run_resumed_on_one_process_is_as_long_as_on_two_and_ends_with_the_same_bits(tmp_path):
    first, second = run(train_hf, tmp_path, 2, 100)
    assert first["begun"]["max_steps"] == 14 and len(first["begun"]["rates"]) == 3
    (alone,) = run(train_hf, tmp_path, 1, 100)
    assert alone["returned"] == first["returned"] == second["returned"]
    assert [step for step, _ in alone["returned"]["rates"]] == list(range(1, 15)) and alone["returned"]["epoch"] == 2
