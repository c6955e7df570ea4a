"""File names of a run folder, the location of run folders, and lookup of a run by name. No torch.

    runs/index.jsonl                  a line when a run begins and one when it ends
    runs/last                         a link to the newest run
    runs/1115-0912-reviews-7c1e/      a run: time, data, 4 hex digits
      run.json                        what does not change: id, task, versions
      config.yaml                     every value, and where it came from
      command.txt                     how it was started, and with what
      data.json                       files and their hashes, columns, splits, labels
      status.json, metrics.jsonl      how it is doing (see `RunRecord`)
      log.txt                         what was printed
      result.json                     the metrics of the best model, and the trivial baselines
      checkpoints/                    training states
      model/                          config, tokenizer, and in the end the best weights
      eval/                           predictions.jsonl, worst.jsonl, suspects.csv
      trackers/                       what trackers wrote, where --report_to names any

No file of a run folder contains the folder's path, so it may be moved.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shlex
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from loopwright.errors import InputError, near_names
from loopwright.run_folder.files import (
    DamagedFileError,
    append,
    read_json,
    read_json_lines,
    warn_once,
    write_atomically,
    write_json,
)
from loopwright.run_folder.status import read as read_status

RUNS: Final = "runs"
LAST: Final = "last"
STOP: Final = "stop"
_INDEX: Final = "index.jsonl"
RUN_FILE: Final = "run.json"
_ROOT_VARIABLE: Final = "LOOPWRIGHT_RUNS"


class _Name:
    """A path inside a run folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunFolder, owner: type) -> Path:
        return run.path / self._name


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run, and the paths inside it.

    Attributes:
        data: the file of the data plan.
        model: the folder of the model, in transformers' format.
        evaluation: the folder of predictions and the worst examples.
    """

    path: Path

    config, command, data = _Name("config.yaml"), _Name("command.txt"), _Name("data.json")
    log, result = _Name("log.txt"), _Name("result.json")
    checkpoints, model, evaluation = _Name("checkpoints"), _Name("model"), _Name("eval")

    @property
    def metadata(self) -> dict[str, Any]:
        """The content of run.json."""
        return dict(read_json(self.path / RUN_FILE, {}))

    def record(self, **fields: Any) -> None:
        """Add fields to run.json, or replace them."""
        write_json(self.path / RUN_FILE, {**self.metadata, **fields}, is_sealed=True)

    @property
    def id(self) -> str:
        """The id of the run; its folder may have another name."""
        return str(self.metadata.get("id", self.path.name))

    @property
    def status(self) -> dict[str, Any]:
        """The content of status.json; `state` is "new" before the run begins."""
        return read_status(self.path) or {"state": "new"}

    @property
    def is_finished(self) -> bool:
        """Whether the model folder has the best weights of the whole run: it has ended, and was not continued since."""
        has_weights = (self.model / "model.safetensors").is_file()
        return has_weights and self.read_result().get("updates", -1) == self.status.get("update")

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write result.json, at the end of a run or of its evaluation."""
        write_json(self.result, dict(result), is_sealed=True)

    def read_result(self) -> dict[str, Any]:
        """Return the content of result.json; empty before the end of the run."""
        return dict(read_json(self.result, {}))

    def append_log(self, line: str) -> None:
        """Append printed output to log.txt; a write error does not stop the run."""
        with contextlib.suppress(OSError, DamagedFileError):
            append(self.log, f"{line}\n")

    def ask_to_stop(self) -> None:
        """Create the file that stops the run gracefully at its next update, with its state saved."""
        write_atomically(self.path / STOP, "stop\n")


def runs_root() -> Path:
    """Return the folder of new runs, where ids are looked up: `runs`, or LOOPWRIGHT_RUNS."""
    return Path(os.environ.get(_ROOT_VARIABLE) or RUNS)


def new_run_id(label: str, now: datetime | None = None, word: str | None = None) -> str:
    """Return an id: month, day, hour, minute, a label, an optional word, and 4 random hex digits.

    Letters of any script are kept: 24 of ASCII, fewer of others, since a file name has at most 255 bytes.
    """
    name = re.sub(r"[\W_]+", "-", unicodedata.normalize("NFC", label.lower())).strip("-")[:24].strip("-") or "run"
    names = name if word is None else f"{name}-{word}"
    return f"{now or datetime.now():%m%d-%H%M}-{names}-{os.urandom(2).hex()}"


def free_path(path: Path) -> Path:
    """Return a path, or one beside it, that does not exist: name, name-2, name-3, ..."""
    names = itertools.chain([path.name], (f"{path.name}-{number}" for number in itertools.count(2)))
    return next(path.with_name(name) for name in names if not os.path.lexists(path.with_name(name)))


def note_in_index(run: RunFolder, **fields: Any) -> None:
    """Append a line to the index, in one write since runs share it, and make the run the last; ignore write errors."""
    root = runs_root()
    with contextlib.suppress(OSError, DamagedFileError):
        root.mkdir(parents=True, exist_ok=True)
        place = os.path.relpath(run.path, root)
        line = json.dumps({"id": run.id, "path": place, **fields}) + "\n"
        append(root / _INDEX, line)
        aside = root / f".last-{os.urandom(4).hex()}"
        aside.symlink_to(place)
        os.replace(aside, root / LAST)


def read_index(root: Path | None = None) -> list[dict[str, Any]]:
    """Return the index entries of each run, newest last; damaged ones are skipped."""
    root = runs_root() if root is None else root
    runs: dict[str, dict[str, Any]] = {}
    try:
        for entry in read_json_lines(root / _INDEX):
            if _is_name(entry.get("id")) and _is_name(entry.get("path")):
                runs[entry["id"]] = {**runs.pop(entry["id"], {}), **entry}
    except DamagedFileError as error:
        warn_once(f"{error.what}: the runs beside it are listed without it")
    return list(runs.values())


def _is_name(value: Any) -> bool:
    """Whether a value of the index can be an id or a path."""
    try:
        return isinstance(value, str) and b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False


def runs_in(root: Path) -> list[Path]:
    """Return the run folders in a folder, by name; hidden ones are being created, and links lead to others."""
    return [path for path in sorted(root.glob("[!.]*")) if (path / RUN_FILE).exists() and not path.is_symlink()]


def find_run(name: str | Path) -> RunFolder:
    """Return the run of a folder, an id, the start of one, or "last"; raise an InputError with the nearest name."""
    root = runs_root()
    folder = Path(name)
    if os.path.lexists(folder / RUN_FILE):
        return RunFolder(folder)
    entries = read_index(root)
    if str(name) == LAST:
        # A run that was killed before its first update is not in the index yet.
        # The link is right even if the end of the index is damaged.
        linked = [root / os.readlink(root / LAST)] if (root / LAST).is_symlink() else []
        noted_at = (root / _INDEX).stat().st_mtime if entries else 0.0
        known = {entry["id"] for entry in entries}
        fresh = [((path / RUN_FILE).stat().st_mtime, path) for path in runs_in(root) if path.name not in known]
        fresh = sorted((at, path) for at, path in fresh if at >= noted_at)
        for path in [*(root / entry["path"] for entry in entries), *linked, *(path for _, path in fresh)][::-1]:
            if (path / RUN_FILE).is_file():
                return RunFolder(path)
        raise InputError("run.unknown", f"there is no run yet in {root}", fix="lw demo text-classification")
    paths = {entry["id"]: root / entry["path"] for entry in entries}
    paths |= {path.name: path for path in runs_in(root)}
    matches = [one for one in paths if one == str(name)] or [one for one in paths if one.startswith(str(name))]
    found = [paths[one] for one in matches if (paths[one] / RUN_FILE).is_file()]
    if len(found) == 1:
        return RunFolder(found[0])
    near = [path.name for path in found] or near_names(str(name), paths)
    what = "is the start of several run ids" if found else "is neither a run folder nor the id of a run"
    raise InputError(
        "run.unknown",
        f"{str(name)!r} {what}",
        saw=[f"looked in {root}", *([f"near: {', '.join(near)}"] if near else [])],
        fix=f"{near[0]} instead of {shlex.quote(str(name))}" if near else "lw runs",
    )
