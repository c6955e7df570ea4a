"""The verbs that use a trained model: evaluate, predict, export."""

from __future__ import annotations

import io
import os
import shlex
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from loopwright import api
from loopwright.cli.exit_codes import DONE
from loopwright.cli.json_output import json_events
from loopwright.cli.parser import VerbParser, add_json, add_run, parse_for_run
from loopwright.cli.prediction_output import check_out, complete, write_file, write_lines
from loopwright.errors import InputError
from loopwright.report import missing_intervals
from loopwright.run_folder import RunFolder, find_run

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
    parser.add_argument("--out", help="a csv, jsonl or parquet file for the inputs and their predictions")
    parser.add_argument("--only_predictions", action="store_true", help="write the predictions without the inputs")
    parser.add_argument("--strict", action="store_true", help="refuse inputs that hold a row that cannot be predicted")
    parser.add_argument("--safe_csv", action="store_true", help="put ' before csv cells that are formulas (= + - @)")
    add_json(parser)
    parser.add_argument("--quiet", action="store_true", help="do not show how far a file is predicted")
    asked, changes = parse_for_run(parser, argv, api.prediction_flags)
    encoding = changes.get("encoding")
    asked.inputs = [text if os.path.exists(text) else _decoded(text, encoding) for text in asked.inputs]
    with json_events(asked.json) as events, _followable(argv):
        folder = find_run(asked.run)
        read = [*asked.inputs, *(file.path for file in api.DataPlan.read(folder.data).files)]
        out = None if asked.out is None else check_out(Path(asked.out), read)
        predictions = api.predict_run(folder, _inputs(folder, asked.inputs, changes), changes, None, asked.strict)
        is_table = out is not None and out.suffix.lower() != ".jsonl"
        rows = predictions.rows(with_inputs=out is not None and not asked.only_predictions, is_table=is_table)
        if out is not None:
            screen = api.Screen(is_quiet=asked.quiet, events=events)
            with screen.waiting(f"predicting into {out}") as waiting:
                write_file(waiting.over(rows), out, asked.safe_csv)
        else:
            printed = chain.from_iterable(complete(rows)) if asked.strict else rows
            write_lines(printed, sys.stdout) if events is None else deque(map(events.lines, printed), 0)
        _report(predictions, out, events)
    return DONE


@contextmanager
def _followable(argv: list[str]) -> Iterator[None]:
    """Give the refusal of --strict a command to run instead as its fix."""
    try:
        yield
    except InputError as error:
        if error.fix == api.STRICT_FIX:
            error.fix = shlex.join(["lw", "predict", *(word for word in argv if word != "--strict")])
        raise


def _report(predictions: api.Predictions, out: Path | None, events: api.EventLines | None) -> None:
    """Report the rows without a prediction, and the fields with another name, on standard error or as an event."""
    renamed = predictions.renamed
    if events is not None:
        place = {} if out is None else {"out": str(out)}
        counts = {"num_rows": predictions.num_rows, "num_failed": predictions.num_failed}
        events.emit("end", **place, **counts, renamed=renamed, exit_code=DONE)
        return
    for note in predictions.notes:
        sys.stderr.write(f"note: {note}\n")
    for name, other in renamed.items():
        taken = name if other == f"predicted_{name}" else other.removeprefix("predicted_")
        sys.stderr.write(f"note: the inputs have a column {taken!r}: the predicted {name} is {other!r}\n")
    if predictions.num_failed:
        where = "field" if out is None or out.suffix.lower() == ".jsonl" else "column"
        sys.stderr.write(f"note: {predictions.failures}; see the {where} {renamed.get(api.ERROR, api.ERROR)}\n")


def export(argv: list[str]) -> int:
    parser = VerbParser("export", "Write the best model of a run into a folder of its own.", "last --to my-model")
    add_run(parser)
    parser.add_argument("--to", required=True, help="a new folder; its README.md says how to open it")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--merge", action="store_true", help="merge the adapters of --lora again, and check the outputs")
    kind.add_argument("--adapters", action="store_true", help="the adapters of --lora alone, as peft reads them")
    asked, changes = parse_for_run(parser, argv, lambda task: api.OPENING_FLAGS)
    run = api.Run(find_run(asked.run))
    target = run.export(asked.to, merge=asked.merge, adapters=asked.adapters, say=_remark, **changes)
    sys.stdout.write(f"{target}\n")
    return DONE


def _remark(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _inputs(folder: RunFolder, inputs: list[str], changes: dict[str, str]) -> str | list[str]:
    """Return the data file among the arguments of `predict`, or the texts or images."""
    if inputs == ["-"]:
        data = sys.stdin.buffer.read() if hasattr(sys.stdin, "buffer") else os.fsencode(sys.stdin.read())
        text = api.decode(data, changes.get("encoding"), "what lw predict reads from stdin")[0]
        return [line.rstrip("\r\n") for line in io.StringIO(text.rstrip("\r\n") or text, newline=None)]
    first = inputs[0]
    if len(inputs) == 1 and api.is_data_file(api.task_of_run(folder), first):
        return first
    if len(inputs) > 1 or not api.has_known_ending(first) or " " in first:  # a sentence can end in a file name
        return inputs
    if Path(first).exists():
        what = "a folder" if Path(first).is_dir() else "no ordinary file"
        raise InputError("data.file", f"{first} is {what}", fix="give a file with rows, or a text that does not end so")
    near = api.near_files(Path(first))
    fix = f"{shlex.quote(near[0])} instead of {shlex.quote(first)}" if near else f"put the file there: {first}"
    raise InputError("data.file", f"{first} does not exist", fix=fix)


def _decoded(text: str, encoding: str | None) -> str:
    """Return an argument in its own encoding if it is not UTF-8: Python decodes such bytes as lone surrogates."""
    if not any("\ud800" <= character <= "\udfff" for character in text):
        return text
    return api.decode(os.fsencode(text), encoding, "an input of lw predict")[0]
