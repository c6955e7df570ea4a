"""The pictures of a run folder as data URIs, scaled down to fit."""

from __future__ import annotations

import base64
import io
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from loopwright.report.blocks import Picture
from loopwright.run_folder.files import DamagedFileError, read_bytes
from loopwright.sources.images.image_file import FORMATS

_KINDS: Final = {".png": "image/png", ".webp": "image/webp", ".jpg": "image/jpeg", ".jpeg": "image/jpeg"}
# File names that tasks use, most informative first; confusion.png is drawn better from the counts.
_TITLES: Final = {
    "predictions": "Predictions, sampled from the validation data",
    "worst": "The samples with the largest losses",
    "train_batch0": "The first training batch, as the model saw it",
}
_LEFT_OUT: Final = frozenset(("confusion",))
_MOST_SIDE: Final = 1600
_SMALLEST_SIDE: Final = 160
_QUALITY: Final = 80
_SHRINK: Final = 0.75


def pictures_of(folder: Path, num_bytes: int) -> tuple[list[Picture], list[str]]:
    """Return the pictures in a run's samples folder, of `num_bytes` in total, and notes about them."""
    samples = folder / "samples"  # not one elsewhere
    found = [] if samples.is_symlink() else sorted(samples.glob("*"))
    paths = [path for path in found if path.suffix.lower() in _KINDS and path.stem not in _LEFT_OUT]
    order = list(_TITLES)
    paths.sort(key=lambda path: order.index(path.stem) if path.stem in order else len(order))
    pictures, notes = [], _class_numbers(samples / "class_numbers.txt") if paths else []
    left = num_bytes
    for index, path in enumerate(paths):
        room = left // (len(paths) - index)
        content, kind, note = _fitted(path, room * 3 // 4 - 100)
        if content is None:
            notes.append(f"samples/{path.name} {note}")
            continue
        uri = f"data:{kind};base64,{base64.b64encode(content).decode()}"
        left -= len(uri)
        title = _TITLES.get(path.stem, path.stem.replace("_", " "))
        pictures.append(Picture(title, path.name, uri, note))
    return pictures, notes


def _class_numbers(path: Path) -> list[str]:
    """Return a note with the names of the classes that the pictures show as numbers."""
    try:
        lines = read_bytes(path).decode(errors="replace").splitlines()
    except (OSError, DamagedFileError):
        return []
    return [f"The pictures show numbers for classes whose letters no font had: {', '.join(lines)}."]


def _fitted(path: Path, most: int) -> tuple[bytes | None, str, str]:
    """Return a picture of at most `most` bytes, its kind, and how it was changed; None if impossible."""
    kind = _KINDS[path.suffix.lower()]
    try:
        content = read_bytes(path)
    except (OSError, DamagedFileError) as error:
        return None, kind, f"cannot be read: {getattr(error, 'strerror', 'it is not a plain file')}"
    if len(content) <= most:
        return content, kind, ""
    if find_spec("PIL") is None:
        return None, kind, "is too large for the page, and scaling it down needs Pillow"
    image_module: Any = import_module("PIL.Image")
    try:
        with image_module.open(io.BytesIO(content), formats=FORMATS) as opened:
            image = opened.convert("RGB")
    except (OSError, ValueError, SyntaxError, image_module.DecompressionBombError):
        return None, kind, "cannot be opened as an image"
    full = image.size
    side = min(max(full), _MOST_SIDE)
    while side >= _SMALLEST_SIDE:
        scale = side / max(full)
        smaller = image.resize((max(round(full[0] * scale), 1), max(round(full[1] * scale), 1)))
        buffer = io.BytesIO()
        smaller.save(buffer, "WEBP", quality=_QUALITY)
        if buffer.tell() <= most:
            return buffer.getvalue(), "image/webp", f"scaled down; samples/{path.name} is the original"
        side = int(side * _SHRINK)
    return None, kind, "is too large for the page"
