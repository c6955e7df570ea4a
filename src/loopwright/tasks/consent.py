"""What the user has allowed, a line each, in the user's state folder: the sender of a run folder cannot write there."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import json
import os
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from loopwright.errors import InputError
from loopwright.run_folder import RunFolder
from loopwright.sources import DataFile

_MOST_BYTES = 16_000_000


def allowed_file() -> Path:
    """Return allowed.jsonl in the state folder of the user."""
    root = os.environ.get("XDG_STATE_HOME", "")
    return Path(root if os.path.isabs(root) else Path.home() / ".local" / "state") / "loopwright" / "allowed.jsonl"


def is_remembered(*word: str) -> bool:
    """Whether the user has allowed this; a file of somebody else does not count."""
    with suppress(OSError, RuntimeError), allowed_file().open("rb") as file:  # RuntimeError: there is no home
        is_own = os.fstat(file.fileno()).st_uid == os.geteuid()
        return is_own and json.dumps(word).encode() in file.read(_MOST_BYTES).splitlines()
    return False


def remember(*word: str) -> None:
    """Remember what the user allows; a folder that cannot be written means that the next call asks again."""
    if is_remembered(*word):
        return
    with suppress(OSError, RuntimeError):
        path = allowed_file()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0), 0o600)
        with open(descriptor, "ab", buffering=0) as file:
            file.write(json.dumps(word).encode() + b"\n")


def trusts(run: RunFolder, is_given: bool = False) -> bool:
    """Whether the user has created this run, here, or trusts it; remembered by its place, since others know its id."""
    word = ("run", os.path.realpath(run.path), run.id)
    if is_given:
        remember(*word)
    return is_given or is_remembered(*word)


def check_foreign(settings: Any, *names: Any, files: Sequence[DataFile] = (), links: bool = False) -> None:
    """Refuse what leads out of a run that the user neither created here nor trusts; nothing is looked up.

    A name that is not given in this call and is not a local file is a name on the Hub. `files` are the data files.
    """
    if settings.foreign is None:
        return
    hub = [name for name in names if name not in (None, *settings.args.typed) and not os.path.exists(name)]
    hub += [file.path for file in files if "hub" in (file.kind, file.settings.get("kind"))]
    found, root = [f"{name} would be looked up on the Hub" for name in hub], os.path.realpath(settings.foreign.path)
    for place, folders, others in os.walk(root) if links else ():
        paths = {path: os.path.realpath(path) for path in (os.path.join(place, name) for name in (*folders, *others))}
        found += [f"{path} is a link to {to}" for path, to in paths.items() if not to.startswith(root + os.sep)]
    if found:
        what = f"{found[0]}, and {settings.foreign.path} is not a run that you created here"
        saw = ["look into the folder first; in Python it is trust_run=True"]
        raise InputError("run.trust", what, saw=saw, fix="--trust_run", flag="--trust_run")


def check_code(name: str, flag: str, args: Any) -> None:
    """Refuse an object that this call does not name itself, unless its code was allowed; nothing is imported."""
    place, digest = _source_of(name.partition(":")[0])
    if not (name in args.typed or args.allow_code or is_remembered("code", name, place, digest)):
        raise InputError(
            "code.allow",
            f"{flag}: {name} comes from a file or a folder, and you have not allowed its code",
            saw=[
                f"it would be imported from {place}, as it is now: read that file first",
                "in Python: allow_code=True",
            ],
            fix="--allow_code",
            flag="--allow_code",
        )
    remember("code", name, place, digest)


def _source_of(module: str) -> tuple[str, str]:
    """Return the file of a module, and the hash of the files that importing it runs first; the same if installed."""
    try:
        spec = importlib.util.find_spec(module.partition(".")[0])
    except ValueError:  # __main__
        return "the running program", ""
    files = []
    for part in [*module.split(".")[1:], None]:
        if spec is None:
            raise ModuleNotFoundError(f"No module named {module!r}")
        files += [spec.origin] if spec.has_location and spec.origin is not None else []
        if part is not None:
            places = spec.submodule_search_locations or []
            spec = importlib.machinery.PathFinder.find_spec(f"{spec.name}.{part}", places)
    place = os.path.realpath(files[-1]) if files else f"Python itself ({module})"
    installed = [os.path.realpath(sysconfig.get_path(each)) for each in ("purelib", "platlib", "stdlib")]
    if not files or any(place.startswith(folder + os.sep) for folder in installed):
        return place, "installed"
    return place, hashlib.sha256(b"\0".join(Path(each).read_bytes() for each in files)).hexdigest()
