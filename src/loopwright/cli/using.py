"""The verbs that use a trained model: evaluate, predict, export."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from loopwright.api import Run, evaluate_run, predict_run
from loopwright.cli.outcomes import DONE
from loopwright.errors import InputError
from loopwright.run_folder import RunFolder, find_run
from loopwright.tasks.screen import Screen, metrics_text

_FILE_KINDS = (".csv", ".tsv", ".json", ".jsonl", ".txt", ".parquet", ".gz")


def evaluate(words: list[str]) -> int:
    """Print the metrics of a run's best model."""
    parser = argparse.ArgumentParser("loopwright evaluate", allow_abbrev=False)
    parser.add_argument("run", help="folder, id, or last")
    parser.add_argument("--data", help="a file with the columns of the training data; unset is the validation data")
    parser.add_argument("--allow_changed_data", action="store_true", help="evaluate also if the run's data has changed")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    asked = parser.parse_args(words)
    screen = Screen(is_quiet=asked.json)
    metrics, intervals = evaluate_run(find_run(asked.run), asked.data, screen, asked.allow_changed_data)
    if asked.json:
        sys.stdout.write(json.dumps({"metrics": metrics, "intervals": intervals}) + "\n")
    else:
        screen.say(metrics_text(metrics, intervals))
    return DONE


def predict(words: list[str]) -> int:
    """Print or write predictions for texts, for the rows of a file, or for the lines of stdin."""
    parser = argparse.ArgumentParser("loopwright predict", allow_abbrev=False)
    parser.add_argument("run", help="folder, id, or last")
    parser.add_argument("inputs", nargs="+", help="texts, or one csv, tsv, json, jsonl or txt file, or - for stdin")
    parser.add_argument("--out", help="a csv or jsonl file to write; unset prints jsonl")
    asked = parser.parse_args(words)
    folder = find_run(asked.run)
    predictions = _predictions(folder, asked.inputs)
    if asked.out is None:
        _write_lines(predictions, sys.stdout)
        return DONE
    out = Path(asked.out)
    if out.suffix not in (".csv", ".jsonl"):
        raise InputError("args.value", f"--out {out} ends in neither .csv nor .jsonl", fix=f"--out {out.stem}.jsonl")
    aside = out.with_name(f".{out.name}.part")
    try:
        with aside.open("w", encoding="utf-8", newline="") as file:
            (_write_table if out.suffix == ".csv" else _write_lines)(predictions, file)
        aside.replace(out)
    finally:
        aside.unlink(missing_ok=True)
    return DONE


def export(words: list[str]) -> int:
    """Write the best model of a run into a folder."""
    parser = argparse.ArgumentParser("loopwright export", allow_abbrev=False)
    parser.add_argument("run", help="folder, id, or last")
    parser.add_argument("--to", required=True, help="a new folder; transformers' from_pretrained opens it")
    asked = parser.parse_args(words)
    target = Run(find_run(asked.run)).export(asked.to)
    sys.stdout.write(f"{target}\n")
    return DONE


def _predictions(folder: RunFolder, inputs: list[str]) -> Iterator[dict[str, Any]]:
    if inputs == ["-"]:
        texts = [line.rstrip("\n") for line in sys.stdin]
        return predict_run(folder, [text for text in texts if text])
    if len(inputs) == 1 and Path(inputs[0]).suffix in _FILE_KINDS and " " not in inputs[0]:
        if not Path(inputs[0]).is_file():
            raise InputError(
                "data.file", f"{inputs[0]} does not exist", fix="give its path, or a text that does not end like a file"
            )
        return predict_run(folder, inputs[0])
    return predict_run(folder, inputs)


def _write_lines(predictions: Iterable[dict[str, Any]], file: TextIO) -> None:
    for prediction in predictions:
        file.write(json.dumps(prediction, ensure_ascii=False) + "\n")


def _write_table(predictions: Iterable[dict[str, Any]], file: TextIO) -> None:
    writer: Any = None
    for prediction in predictions:
        if writer is None:
            writer = csv.DictWriter(file, list(prediction), lineterminator="\n")
            writer.writeheader()
        writer.writerow(
            {
                name: json.dumps(value) if isinstance(value, (list, dict)) else value
                for name, value in prediction.items()
            }
        )
