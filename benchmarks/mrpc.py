"""MRPC with a small BERT, as in the Hugging Face course: three ways beside transformers' Trainer.

The same data, weights, epochs, batch size and learning rate for all; each seed on each side is a run of its own, and
the sides take turns. Accuracy and F1 are those after the last epoch on the test file; seconds are those of training
with the evaluation after each epoch (the task also saves checkpoints and takes intervals of its metrics meanwhile).

    python benchmarks/mrpc.py --data FOLDER --model FOLDER --seeds 42 43 44 --output benchmarks/results/mrpc.md
    python benchmarks/mrpc.py --data FOLDER --model FOLDER --rows 400 --epochs 1        # a subset, for a CPU
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[1] / "src"
sys.path.insert(0, str(SOURCE))  # the package of this checkout, whichever is installed

import torch  # noqa: E402
from transformers import AutoModelForSequenceClassification, AutoTokenizer  # noqa: E402

from loopwright import metrics  # noqa: E402

_ALL = 1_000_000

Outcome = tuple[float, float, float]  # accuracy, F1, seconds


def read_rows(path: Path, limit: int | None) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return rows[:limit]


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def scores(predictions: Any, labels: Any) -> dict[str, float]:
    return metrics.load("glue", "mrpc").compute(predictions=predictions, references=labels)


def of_the_task(arguments: argparse.Namespace, seed: int, folder: Path) -> Outcome:
    """The command line's task, through its Python mirror."""
    from loopwright import train

    run = train(
        "text-classification",
        train_file=str(arguments.files / "train.csv"),
        validation_file=str(arguments.files / "test.csv"),
        glue="mrpc",
        keep_duplicates=True,
        model=str(arguments.model),
        num_train_epochs=arguments.epochs,
        per_device_train_batch_size=arguments.batch,
        learning_rate=arguments.lr,
        seed=seed,
        bf16=arguments.bf16,
        output_dir=str(folder),
        quiet=True,
    )
    from loopwright.run_folder import read_metrics

    records = list(read_metrics(Path(run.path) / "metrics.jsonl"))
    last = [record for record in records if record["event"] == "evaluation"][-1]
    named = {name.removeprefix("eval_"): value for name, value in last.items()}
    begun = [record["seconds"] for record in records if record["event"] == "start"][0]
    return float(named["accuracy"]), float(named["f1"]), float(last["seconds"]) - float(begun)


def of_a_trainer(library: Any, arguments: argparse.Namespace, seed: int, folder: Path, **kwargs: Any) -> Outcome:
    """A Trainer of transformers' shape."""
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)

    def encoded(name: str) -> list[dict[str, Any]]:
        return [
            {**tokenizer(row["sentence1"], row["sentence2"], truncation=True), "labels": int(row["label"])}
            for row in read_rows(arguments.files / name, None)
        ]

    train_set, test_set = encoded("train.csv"), encoded("test.csv")
    settings = library.TrainingArguments(
        str(folder),
        num_train_epochs=arguments.epochs,
        per_device_train_batch_size=arguments.batch,
        learning_rate=arguments.lr,
        seed=seed,
        bf16=arguments.bf16,
        eval_strategy="epoch",
        save_strategy="no",
        disable_tqdm=True,
        report_to="none",
        **kwargs,
    )
    torch.manual_seed(seed)
    trainer = library.Trainer(
        model=AutoModelForSequenceClassification.from_pretrained(arguments.model),
        args=settings,
        data_collator=library.DataCollatorWithPadding(tokenizer),
        train_dataset=train_set,
        eval_dataset=test_set,
        compute_metrics=lambda found: scores(found.predictions.argmax(-1), found.label_ids),
    )
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    last = [entry for entry in trainer.state.log_history if "eval_accuracy" in entry][-1]
    return last["eval_accuracy"], last["eval_f1"], seconds


def of_transformers(arguments: argparse.Namespace, seed: int, folder: Path) -> Outcome:
    import transformers

    return of_a_trainer(transformers, arguments, seed, folder)


def of_hf(arguments: argparse.Namespace, seed: int, folder: Path) -> Outcome:
    import loopwright.hf

    return of_a_trainer(loopwright.hf, arguments, seed, folder)


SIDES: dict[str, Callable[[argparse.Namespace, int, Path], Outcome]] = {
    "transformers.Trainer": of_transformers,
    "loopwright.hf.Trainer": of_hf,
    "lw train text-classification": of_the_task,
}


def report(arguments: argparse.Namespace, outcomes: dict[str, list[Outcome]]) -> str:
    import transformers

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"
    names = ["epochs", "batch"] + ([] if arguments.rows == _ALL else ["rows"])
    given = [text for name in names for text in (f"--{name}", str(getattr(arguments, name)))]
    command = " ".join(["--data FOLDER --model FOLDER", *given, *(["--bf16"] if arguments.bf16 else [])])
    lines = [
        f"`python benchmarks/mrpc.py {command} --seeds {' '.join(map(str, arguments.seeds))}`: lr {arguments.lr}. "
        f"{device}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}.",
        "",
        "| side | accuracy per seed | mean | F1 per seed | mean | seconds per seed | median | ratio |",
        "|---|---|--:|---|--:|---|--:|--:|",
    ]
    base = statistics.median(seconds for _, _, seconds in outcomes["transformers.Trainer"])
    for side, found in outcomes.items():
        accuracies, f1s, seconds = zip(*found, strict=True)
        median = statistics.median(seconds)
        cells = [" ".join(f"{value:.3f}" for value in values) for values in (accuracies, f1s)]
        times = " ".join(f"{value:.1f}" for value in seconds)
        lines.append(
            f"| {side} | {cells[0]} | {statistics.mean(accuracies):.3f} | {cells[1]} | {statistics.mean(f1s):.3f} | "
            f"{times} | {median:.1f} | {median / base:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="MRPC: accuracy, F1 and seconds beside transformers' Trainer")
    parser.add_argument("--data", type=Path, required=True, help="folder with train.csv and test.csv")
    parser.add_argument("--model", type=Path, required=True, help="folder of a pretrained encoder")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--rows", type=int, default=_ALL, help="of each file, at most")
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()
    outcomes: dict[str, list[Outcome]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(name)
        arguments.files = folder / "data"
        arguments.files.mkdir()
        for file in ("train.csv", "test.csv"):
            write_rows(arguments.files / file, read_rows(arguments.data / file, arguments.rows))
        for seed in arguments.seeds:
            for number, (side, measure) in enumerate(SIDES.items()):
                with contextlib.redirect_stdout(io.StringIO()):
                    outcomes[side].append(measure(arguments, seed, folder / f"run-{seed}-{number}"))
                print(f"seed {seed}, {side}: {outcomes[side][-1]}", file=sys.stderr)
    text = report(arguments, outcomes)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
