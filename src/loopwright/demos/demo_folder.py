"""The files of a demo in their folder: written atomically, and never over user changes."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any

from loopwright.errors import DataError
from loopwright.run_folder import DamagedFileError, fsync_folder, read_json, write_atomically, write_json

NOTES = "demo.json"

Files = Mapping[str, bytes]
# Names of data files and folders, without their endings.
_DATA = {"train", "validation", "test", "images", "id2label"}


def check_folder(folder: Path, task: str) -> None:
    """Raise a DataError if a folder contains data other than an unchanged earlier demo of the task."""
    try:
        notes = read_json(folder / NOTES)
    except DamagedFileError:
        notes = None
    digests = notes.get("sha256") if isinstance(notes, dict) and notes.get("task") == task else None
    written = digests if isinstance(digests, dict) else {}
    present = {path.name: path for path in sorted(folder.glob("*")) if path.stem in _DATA}
    foreign = [name for name, path in present.items() if name not in written or digest_on_disk(path) != written[name]]
    if foreign:
        raise DataError(
            f"{folder} already has {', '.join(foreign)}, which the demo of {task} did not write. Give a "
            "folder that is new or empty."
        )


def place_files(folder: Path, files: Files, notes: Mapping[str, Any]) -> None:
    """Write the files of a demo, replacing existing ones, and `demo.json` with these notes and the digests of all.

    A folder of files appears atomically; an existing one is kept. Its files are not synced one by one: the digest
    reveals damage from a power cut at the next call.
    """
    entries: dict[str, dict[str, bytes]] = {}
    for name, content in files.items():
        entry, _, rest = name.partition("/")
        entries.setdefault(entry, {})[rest] = content
    digests = {entry: digest_of(contents) for entry, contents in entries.items()}
    folder.mkdir(parents=True, exist_ok=True)
    # The notes come first: a folder that has them may be written again, even after a crash in between.
    write_json(folder / NOTES, {**notes, "sha256": digests})
    for entry, contents in entries.items():
        if "" in contents:
            write_atomically(folder / entry, contents[""])
        elif digest_on_disk(folder / entry) != digests[entry]:
            _place_folder(folder / entry, contents)


def digest_of(contents: Files) -> str:
    """Return the sha256 of one content, under the name "", or of all names and contents of a folder."""
    if "" in contents:
        return sha256(contents[""]).hexdigest()
    listing = (f"{name} {sha256(content).hexdigest()}\n" for name, content in sorted(contents.items()))
    return sha256("".join(listing).encode()).hexdigest()


def digest_on_disk(path: Path) -> str | None:
    """Return the digest of a file or folder, as from `digest_of`; None if it is missing."""
    if path.is_file():
        return sha256(path.read_bytes()).hexdigest()
    if not path.is_dir():
        return None
    names = (Path(root, name) for root, _, names in os.walk(path) for name in names)
    return digest_of({name.relative_to(path).as_posix(): name.read_bytes() for name in names})


def _place_folder(final: Path, contents: Files) -> None:
    """Replace the folder of an earlier call by one with these files, by renaming."""
    aside = final.with_name(f".tmp-{final.name}-{os.urandom(4).hex()}")
    old = aside.with_name(f"{aside.name}-old")
    try:
        for parent in sorted({PurePosixPath(name).parent for name in contents}):
            (aside / parent).mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (aside / name).write_bytes(content)
        with contextlib.suppress(FileNotFoundError):
            final.rename(old)
        aside.rename(final)
        fsync_folder(final.parent)
    finally:
        for leftover in (aside, old):
            shutil.rmtree(leftover, ignore_errors=True)
