"""The verbs that use a trained model: evaluate, predict, export."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from loopwright import api
from loopwright.cli.exit_codes import DONE
from loopwright.cli.json_output import json_events
from loopwright.cli.parser import VerbParser, add_json, add_run, parse_for_run
from loopwright.errors import InputError
from loopwright.report import missing_intervals
from loopwright.run_folder import RunFolder, find_run

# Characters that a terminal obeys, as JSON writes them; json.dumps escapes the others.
_ESCAPES = {code: f"\\u{code:04x}" for code in (*range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))}
_MORE = " With a run before --help, the flags of its task are listed too."


def evaluate(argv: list[str]) -> int:
    description = "Print the metrics of a run's best model, with their 95 % intervals." + _MORE
    parser = VerbParser("evaluate", description, "last")
    add_run(parser)
    parser.add_argument("--data", help="a file with rows like those of the training; unset is the validation data")
    parser.add_argument("--allow_changed_data", action="store_true", help="evaluate also if the run's data has changed")
    add_json(parser)
    parser.add_argument("--quiet", action="store_true", help="print the metrics and nothing else")
    asked, changes = parse_for_run(parser, argv, api.evaluation_flags)
    with json_events(asked.json) as events:
        screen, run = api.Screen(is_quiet=asked.quiet, events=events), find_run(asked.run)
        metrics, intervals, tokens = api.evaluate_run(run, asked.data, screen, asked.allow_changed_data, changes)
        if events is not None:
            events.lines({**api.as_json(metrics, tokens), **api.intervals_as_json(intervals)})
        else:
            notes = [] if asked.quiet else missing_intervals(intervals.missing)
            sys.stdout.write("\n".join([api.metrics_text(metrics, intervals, tokens), *notes]) + "\n")
    return DONE


def predict(argv: list[str]) -> int:
    description = "Print a prediction of a run's best model for each text, image or row." + _MORE
    parser = VerbParser("predict", description, 'last "a text"')
    add_run(parser)
    parser.add_argument(
        "inputs", nargs="+", help="texts, images, or one csv, tsv, json, jsonl or txt file, or - for stdin"
    )
    parser.add_argument("--out", help="a csv or jsonl file to write; unset prints jsonl")
    parser.add_argument("--safe_csv", action="store_true", help="put ' before csv cells that are formulas (= + - @)")
    parser.add_argument("--quiet", action="store_true", help="do not show how far a file is predicted")
    asked, changes = parse_for_run(parser, argv, api.prediction_flags)
    if not all(text.strip() for text in asked.inputs):
        raise InputError("args.value", "lw predict was given an empty input", fix='lw predict RUN "a text"')
    _refuse_other_bytes([text for text in asked.inputs if not Path(text).exists()], "an input of lw predict")
    folder = find_run(asked.run)
    predictions = _predictions(folder, asked.inputs, changes)
    if asked.out is None:
        _write_lines(predictions, sys.stdout)
        return DONE
    out = Path(asked.out)
    if out.suffix not in (".csv", ".jsonl"):
        raise InputError("args.value", f"--out {out} ends in neither .csv nor .jsonl", fix=f"--out {out.stem}.jsonl")
    aside = out.with_name(f".{out.name}.part")
    try:
        screen = api.Screen(is_quiet=asked.quiet)
        with aside.open("w", encoding="utf-8", newline="") as file, screen.waiting(f"predicting into {out}") as waiting:
            rows = waiting.over(predictions)
            _write_lines(rows, file) if out.suffix == ".jsonl" else _write_table(rows, file, asked.safe_csv)
        aside.replace(out)
    finally:
        aside.unlink(missing_ok=True)
    return DONE


def export(argv: list[str]) -> int:
    parser = VerbParser("export", "Write the best model of a run into a folder of its own.", "last --to my-model")
    add_run(parser)
    parser.add_argument("--to", required=True, help="a new folder; its README.md says how to open it")
    asked, consents = parse_for_run(parser, argv, lambda task: api.CONSENTS)
    target = api.Run(find_run(asked.run)).export(asked.to, **consents)
    sys.stdout.write(f"{target}\n")
    return DONE


def _predictions(folder: RunFolder, inputs: list[str], changes: dict[str, str]) -> Iterator[dict[str, Any]]:
    if inputs == ["-"]:
        try:
            texts = [line.rstrip("\n") for line in sys.stdin]
        except UnicodeDecodeError as error:
            raise _other_bytes("what lw predict reads from stdin", f"byte 0x{error.object[error.start]:02x}") from error
        _refuse_other_bytes(texts, "what lw predict reads from stdin")
        return api.predict_run(folder, [text for text in texts if text], changes)
    first = inputs[0]
    is_sentence = " " in first and not Path(first).is_file()  # one that ends in a file name
    if len(inputs) > 1 or not api.has_known_ending(first) or is_sentence:
        return api.predict_run(folder, inputs, changes)
    if Path(first).is_file():
        return api.predict_run(folder, first, changes)
    if Path(first).exists():
        what = "a folder" if Path(first).is_dir() else "no ordinary file"
        raise InputError("data.file", f"{first} is {what}", fix="give a file with rows, or a text that does not end so")
    folder_of_file = Path(first).parent
    beside = [path.name for path in folder_of_file.iterdir()] if folder_of_file.is_dir() else []
    near = get_close_matches(Path(first).name, beside, n=1)
    fix = f"did you mean {folder_of_file / near[0]}?" if near else "give its path, or a text that does not end so"
    raise InputError("data.file", f"{first} does not exist", fix=fix)


def _refuse_other_bytes(texts: list[str], what: str) -> None:
    """Refuse texts that are not valid UTF-8: Python decodes such bytes as lone surrogates."""
    for text in texts:
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise _other_bytes(what, repr(text[:60]))


def _other_bytes(what: str, seen: str) -> InputError:
    return InputError("data.encoding", f"{what} is not UTF-8", saw=[seen], fix="iconv -f LATIN1 -t UTF-8   before it")


def _write_lines(predictions: Iterable[dict[str, Any]], file: TextIO) -> None:
    for prediction in predictions:
        file.write(json.dumps(prediction, ensure_ascii=False).translate(_ESCAPES) + "\n")


def _write_table(predictions: Iterable[dict[str, Any]], file: TextIO, is_safe: bool) -> None:
    rows = (
        {name: json.dumps(value) if isinstance(value, (list, dict)) else value for name, value in prediction.items()}
        for prediction in predictions
    )
    for first in rows:
        api.write_csv(file, list(first), chain([first], rows), is_safe)
