"""One image, inspected without decoding: is it valid and complete, its upright size, its content hash."""

from __future__ import annotations

import hashlib
import importlib
import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from loopwright.errors import InputError
from loopwright.sources.files import open_data, read_data
from loopwright.sources.values import UnusableValueError

IMAGE_ENDINGS = (*(".jpg", ".jpeg", ".jfif", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm"),)
# The only readers of Pillow that are used, whatever the name of a file: others start programs, such as Ghostscript.
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF", "PPM")
UNREAD_ENDINGS = (
    *(".heic", ".heif", ".avif", ".jp2", ".svg", ".psd", ".dng"),
    *(".cr2", ".nef", ".arw", ".raw", ".exr", ".dcm"),
)
TOO_LARGE = "is too large"
# The command that makes images smaller in place: by less memory for a JPEG, which is decoded at a fraction of its size.
SHRINK = (
    'python -c "import sys; from PIL import Image; Image.MAX_IMAGE_PIXELS = None; '
    '[(i := Image.open(p)).thumbnail((4096, 4096)) or i.save(p, exif=i.getexif()) for p in sys.argv[1:]]" '
)
_URL = re.compile(r"(https?|ftp|s3|gs)://")
ORIENTATION = 274  # the EXIF tag
_TURNED = (5, 6, 7, 8)  # orientations with width and height swapped
_PNG_ORIENTATION_MARKS = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")

Source = str | bytes


class ImageFacts(NamedTuple):
    """The upright size of an image after its EXIF orientation, whether it is stored turned, its sha256 and bytes."""

    width: int
    height: int
    is_turned: bool
    sha256: str
    num_bytes: int


class BadImageError(ValueError):
    """A missing, truncated or invalid image; the message has the reason. `fingerprint` is (sha256, number of bytes)."""

    def __init__(self, what: str, fingerprint: tuple[str, int] = ("", 0)) -> None:
        super().__init__(what)
        self.fingerprint = fingerprint


def is_image_name(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in IMAGE_ENDINGS


def import_pillow(module: str = "Image") -> Any:
    """Return a module of Pillow; raise an InputError, install.extra, if it is not installed."""
    try:
        return importlib.import_module(f"PIL.{module}")
    except ImportError as error:
        what, fix = "reading images needs the package pillow", "pip install 'loopwright[vision]'"
        raise InputError("install.extra", what, saw=[str(error)], fix=fix) from error


def shown_source(source: Source) -> str:
    return f"an image of {len(source):,} bytes" if isinstance(source, bytes) else source


def read_bytes(source: Source) -> bytes:
    if isinstance(source, bytes):
        return source
    if "\0" in source:
        raise BadImageError("has a NUL byte in its name")
    if _URL.match(source):
        raise BadImageError("is a URL: download the images, and give their paths")
    try:
        data = read_data(source)
    except InputError as error:
        raise BadImageError("is not a regular file") from error
    except FileNotFoundError as error:
        raise BadImageError("does not exist") from error
    except OSError as error:
        raise BadImageError(f"cannot be read: {error.strerror or error}") from error
    if not data:
        raise BadImageError("is empty", (hashlib.sha256(b"").hexdigest(), 0))
    return data


def inspect_image(source: Source) -> ImageFacts:
    data = read_bytes(source)
    with open_image(data) as image:
        width, height = image.size
        is_turned = _is_turned(image, data)
        if not _has_end(image.format, data):
            image.load()  # Some writers omit the end or add to it; if it can be decoded, it is complete.
    if is_turned:
        width, height = height, width
    return ImageFacts(width, height, is_turned, hashlib.sha256(data).hexdigest(), len(data))


@contextmanager
def open_image(data: bytes) -> Iterator[Any]:
    """Open an image with Pillow; raise a BadImageError for all that Pillow raises about it."""
    pillow = import_pillow()
    try:
        with pillow.open(io.BytesIO(data), formats=FORMATS) as image:
            yield image
    except (OSError, ValueError, SyntaxError, EOFError, pillow.DecompressionBombError) as error:
        what = f"is truncated or damaged: {error}"
        if type(error).__name__ == "UnidentifiedImageError":
            what = f"is not an image: it starts with {data[:8]!r}"
        elif isinstance(error, pillow.DecompressionBombError):
            pixels, limit = re.findall(r"\d+", str(error))[:2]
            what = f"{TOO_LARGE}: {int(pixels) // 10**6:,} megapixels, and at most {int(limit) // 10**6} are decoded"
        raise BadImageError(what, (hashlib.sha256(data).hexdigest(), len(data))) from error


def upright_size(source: Source) -> tuple[int, int]:
    """Return the upright (width, height) of an image from its header; raise a BadImageError if there is none."""
    pillow = import_pillow()
    try:
        file = io.BytesIO(source) if isinstance(source, bytes) else os.fdopen(open_data(source), "rb")
        with file, pillow.open(file, formats=FORMATS) as image:
            width, height = image.size
            is_turned = _is_turned(image, read_bytes(source) if image.format == "PNG" else b"")
            return (height, width) if is_turned else (width, height)
    except (InputError, OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
        raise BadImageError("does not exist" if isinstance(error, FileNotFoundError) else "is not an image") from error


def _is_turned(image: Any, data: bytes) -> bool:
    """Whether EXIF rotates the image by 90 degrees. Pillow decodes a PNG for that, so its bytes are checked first."""
    if image.format == "PNG" and not any(mark in data for mark in _PNG_ORIENTATION_MARKS):
        return False
    return image.getexif().get(ORIENTATION) in _TURNED


def _has_end(kind: str | None, data: bytes) -> bool:
    """Whether the file ends properly; a cheap check, True for formats without an end mark."""
    if kind == "PNG":
        return b"IEND" in data[-64:]
    if kind in ("JPEG", "MPO"):
        # The end mark of a thumbnail precedes the start of the last scan.
        return data.rfind(b"\xff\xd9") > data.rfind(b"\xff\xda")
    if kind == "GIF":
        return data.rstrip(b"\0").endswith(b";")
    if kind == "WEBP":
        return len(data) >= int.from_bytes(data[4:8], "little") + 8
    if kind == "BMP":
        return len(data) >= int.from_bytes(data[2:6], "little")
    return kind not in ("PPM", "TIFF")


def path_of(folder: str, name: str) -> str:
    """Return the path of a file in a folder; backslashes from Windows work everywhere.

    If the file's own folder does not exist, as on another machine, the longest end of its path in `folder` counts.
    """
    path = os.path.join(folder, name)
    if os.path.exists(path):
        return path
    parts = name.replace("\\", "/").split("/")
    path = os.path.join(folder, *parts) if "\\" in name else path
    ends = ["/".join(parts[place:]).replace("//", "/") for place in range(1, len(parts))]
    found = (os.path.join(folder, end) for end in ends if not os.path.isdir(os.path.dirname(path)))
    return next(filter(os.path.isfile, found), path)


def as_source(value: Any, folder: str) -> Source | None:
    """Return an image (a path in `folder`, bytes, or the dict of `datasets`) as a full path or bytes; None if empty."""
    if isinstance(value, dict) and ("bytes" in value or "path" in value):
        value = value.get("bytes") or value.get("path")
    if value is None or value == "":
        return None
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        if _URL.match(value.strip()):
            return value.strip()
        return os.path.normpath(path_of(folder, os.path.expanduser(value.strip())))
    raise UnusableValueError(f"the path or the bytes of an image are needed, not {repr(value)[:60]}")
