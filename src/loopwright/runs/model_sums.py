"""The sha256 of each file of a model folder, in SHA256SUMS beside them: written with the files, checked before loading.

`sha256sum -c SHA256SUMS` checks it as well.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any

from loopwright.errors import InputError
from loopwright.run_folder import write_atomically
from loopwright.run_folder.files import DamagedFileError, open_regular, read_bytes

SUMS = "SHA256SUMS"
BASE = "base.json"  # in the model folder of a run with adapters: the base model that its checkpoints leave out
BASE_CONFIG = "base_config.json"  # beside exported adapters: the config of the base model with head and vocabulary
_CARD = "README.md"  # only shown, and edited by people


def write_sums(folder: Path) -> None:
    """Record the sha256 of each file of a model folder beside them; called when all are written."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    sums = [f"{_file_digest(folder / name)}  {name}\n" for name in names if name not in (SUMS, _CARD)]
    write_atomically(folder / SUMS, "".join(sums))


def check_sums(folder: Path) -> None:
    """Raise a DamagedFileError for a file of a model folder that changed since `write_sums`; a no-op without sums."""
    try:
        lines = read_bytes(folder / SUMS).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        digest, _, name = line.partition("  ")
        if re.fullmatch("[0-9a-f]{64}", digest) is None:
            continue  # a comment, or another form of such files
        what = f"{folder / name} is damaged: its sha256 is not the one in {SUMS}"
        try:
            found = _file_digest(folder / name)
        except (FileNotFoundError, ValueError):  # ValueError: a name with a null byte, in damaged sums
            found, what = "", f"{folder / name} is missing, and {SUMS} lists it"
        if found != digest:
            raise DamagedFileError(what, f"restore the file; if you changed it on purpose, remove {folder / SUMS}")


def identify_base(name: str, revision: str | None = None) -> dict[str, Any] | None:
    """Return the name, folder, revision and hashes of a pretrained model; None if it has no weights."""
    folder = Path(name)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        kinds = ["*.json", "*.safetensors", "*.bin"]
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=kinds, ignore_patterns=["*/*"]))
        revision = folder.name
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    sums = {path.name: _file_digest(path) for path in files}
    return {"model": name, "folder": str(folder), "revision": revision, "sha256": sums} if sums else None


def find_base(name: str, kept: dict[str, Any]) -> str:
    """Return the folder of the base model of a run; raise InputError if its weights are not those of its start."""
    found = identify_base(name, kept.get("revision")) or {}
    then, now = kept.get("sha256", {}), found.get("sha256", {})
    if then != now:
        pairs = [(file, then.get(file), now.get(file)) for file in sorted({**then, **now})]
        raise InputError(
            "resume.model",
            f"the base model {name} is not the one that the adapters of this run were trained on",
            saw=[f"{file}: sha256 {str(old)[:12]} then, {str(new)[:12]} now" for file, old, new in pairs if old != new],
            fix=f"put the weights of {name} back as they were   or   give the folder they are in now as --model",
        )
    return str(found["folder"])


def _file_digest(path: Path) -> str:
    digest = hashlib.sha256()
    with os.fdopen(open_regular(path, follows_links=True), "rb", buffering=0) as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
