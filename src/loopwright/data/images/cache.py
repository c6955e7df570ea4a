"""Decoded images of a run, kept as uint8 so that each file is decoded once.

The pixels lie in a file without a name, in memory or on disk, which loader workers share. It goes away with the
processes that hold it, even killed ones: nothing is left behind, and no other run can read or damage it. It is not
state: a resumed run decodes again. An image that does not fit is decoded each time, as without a cache.
"""

from __future__ import annotations

import logging
import mmap
import os
import sys
import tempfile
import threading
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from loopwright.engine.memory import free_bytes
from loopwright.quantities import size

_logger = logging.getLogger("loopwright")
_SHARE = {"auto": 0.5, "ram": 0.9, "disk": 0.9}  # of the free space that a cache may take
_SPARE = 4  # times the estimate, since images may be larger than the typical one
_PLACE = np.dtype([("end", "<i8"), ("height", "<i4"), ("width", "<i4")])  # an end of 0: not stored


class CacheChoice(NamedTuple):
    """Where the images of a run are kept, and why."""

    kind: str  # "ram", "disk" or "off"
    reason: str
    limit: int = 0  # the most bytes that they may take


def choose_cache(wanted: str, num_bytes: int) -> CacheChoice:
    """Return where about so many bytes of pixels are kept in this process: what was asked for, or what fits."""
    if wanted == "off":
        return CacheChoice("off", "images are decoded each time (--cache off)")
    if sys.platform == "win32":
        return CacheChoice("off", "images are decoded each time: this system has no memory that workers can share")
    try:
        folder = tempfile.gettempdir()
        on_disk = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    except OSError as error:  # a folder that is gone, or none that can be written
        folder, on_disk = str(error.filename or error.strerror), 0
    free = {"ram": free_bytes(torch.device("cpu")), "disk": on_disk}
    where = {"ram": "in memory", "disk": f"on disk in {folder}"}
    for kind in ("ram", "disk") if wanted == "auto" else (wanted,):
        limit = int(free[kind] * _SHARE[wanted]) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if wanted != "auto" or num_bytes <= limit:
            text = f"images are decoded once and kept {where[kind]}: about {size(num_bytes)} of {size(free[kind])} free"
            return CacheChoice(kind, text, min(limit, _SPARE * num_bytes + mmap.PAGESIZE))
    text = f"images are decoded each time: about {size(num_bytes)} of pixels fit neither into half of the free memory "
    return CacheChoice("off", f"{text}({size(free['ram'])}) nor of the disk ({size(free['disk'])} in {folder})")


class PixelCache:
    """The pixels of the images of one dataset, by position."""

    def __init__(self, num_images: int, choice: CacheChoice) -> None:
        if choice.kind == "ram" and hasattr(os, "memfd_create"):
            self._file = os.memfd_create("loopwright-images")
        else:  # without memfd the page cache of the system keeps it in memory
            with tempfile.TemporaryFile() as file:
                self._file = os.dup(file.fileno())
        self._num_images, self._limit = num_images, choice.limit
        self._start = -(-(num_images + 1) * _PLACE.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
        os.ftruncate(self._file, self._start + self._limit)
        self._write(np.zeros(self._start, np.uint8), 0)
        self._map()

    def _map(self) -> None:
        content = mmap.mmap(self._file, self._start + self._limit, prot=mmap.PROT_READ)
        # The last place has the end of all pixels, and as its height whether the cache is full.
        self._places = np.frombuffer(content, _PLACE, self._num_images + 1)
        self._pixels: NDArray[np.uint8] = np.frombuffer(content, np.uint8, self._limit, self._start)
        self._lock = threading.Lock()
        self._is_full = False

    def __reduce__(self) -> tuple[Any, ...]:
        """For a worker that is not forked: it opens the file of this process, or has no cache."""
        kept = {name: getattr(self, name) for name in ("_num_images", "_limit", "_start")}
        return _reopened, (f"/proc/{os.getpid()}/fd/{self._file}", kept)

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)

    def get(self, position: int) -> NDArray[np.uint8] | None:
        """Return the image at a position, read-only; None if it is not stored."""
        end, height, width = self._places[position].item()
        if not end:
            return None
        return self._pixels[end - height * width * 3 : end].reshape(height, width, 3)

    def gather(self, positions: NDArray[np.int64]) -> NDArray[np.uint8] | None:
        """Return images of one size as (images, height, width, 3); None if one is not stored or differs."""
        places = self._places[positions]
        height, width = places["height"][0], places["width"][0]
        if not places["end"].all() or (places["height"] != height).any() or (places["width"] != width).any():
            return None
        num_bytes = int(height) * int(width) * 3
        numbers, rest = np.divmod(places["end"], num_bytes)
        if rest.any():  # stored after images of other sizes
            parts = [self._pixels[end - num_bytes : end] for end in places["end"]]
            return np.stack(parts).reshape(-1, height, width, 3)
        whole: NDArray[np.uint8] = self._pixels[: self._limit // num_bytes * num_bytes].reshape(-1, height, width, 3)
        return np.asarray(whole[numbers - 1])

    def put(self, position: int, image: NDArray[np.uint8]) -> None:
        """Store an image, unless there is no room; that is reported once."""
        import fcntl

        if self._is_full or self._places["height"][-1]:
            return
        try:
            with self._lock:
                fcntl.lockf(self._file, fcntl.LOCK_EX)  # against other workers
                try:
                    self._append(position, image)
                finally:
                    fcntl.lockf(self._file, fcntl.LOCK_UN)
        except OSError as error:
            self._close(str(error.strerror))

    def _append(self, position: int, image: NDArray[np.uint8]) -> None:
        start = int(self._places["end"][-1])
        if start + image.nbytes > self._limit:
            self._close("they are larger than estimated")
            return
        self._write(np.ascontiguousarray(image), self._start + start)
        # A worker that is killed in between leaves bytes that nothing refers to.
        self._place(self._num_images, (start + image.nbytes, 0, 0))
        self._place(position, (start + image.nbytes, *image.shape[:2]))

    def _close(self, reason: str) -> None:
        self._is_full = True
        if not self._places["height"][-1]:
            with suppress(OSError):
                self._place(self._num_images, (int(self._places["end"][-1]), 1, 0))
            text = "the cache of images is full (%s): those that are not in it are decoded each time"
            _logger.warning(text, reason)

    def _place(self, number: int, place: tuple[int, ...]) -> None:
        self._write(np.array(place, _PLACE), number * _PLACE.itemsize)

    def _write(self, values: NDArray[Any], start: int) -> None:
        # Not through the mapping, where a full disk would kill the process.
        left = memoryview(values.tobytes())
        while left:
            written = os.pwrite(self._file, left, start)
            left, start = left[written:], start + written


def _reopened(path: str, kept: dict[str, Any]) -> PixelCache | None:
    cache = PixelCache.__new__(PixelCache)
    try:
        cache._file = os.open(path, os.O_RDWR)
    except OSError:
        return None
    cache.__dict__.update(kept)
    cache._map()
    return cache
