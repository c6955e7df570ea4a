"""The bytes of a data file, read in order or at any offset, and the index of its rows.

The first read checks a file: UTF-8, no NUL bytes, no row over 10 MB; the same pass computes its sha256. Only the index
stays in memory: eight bytes per row. gz files are unpacked into memory, up to a limit.
"""

from __future__ import annotations

import difflib
import gzip
import hashlib
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loopwright.errors import InputError
from loopwright.run_folder.files import DamagedFileError, open_regular

CHUNK_BYTES = 4 << 20
BLOCK_BYTES = 2 << 20  # of rows parsed together
MAX_ROW_BYTES = 10_000_000
MAX_UNPACKED_BYTES = 256 << 20

_BOM = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
# The first bytes of files that are not text, their type, and the fix.
_PACKED = {
    b"\x1f\x8b": ("a gzip file", "mv {name} {name}.gz   and give that file"),
    b"PK\x03\x04": ("a zip file", "unzip {name}   and give the file that was in it; save a spreadsheet as csv"),
    b"PAR1": ("a parquet file", "--file_kind parquet, or rename it"),
    b"ARROW1": ("an arrow file", "in Python: datasets.Dataset.from_file({name!r}).to_parquet('train.parquet')"),
    b"%PDF": ("a pdf file", "save its text as a txt file"),
}

Offsets = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]


class Progress(NamedTuple):
    """The progress of reading one file: `stage` is "indexing" or "checking"; "checking images" counts images."""

    path: str
    stage: str
    num_bytes_done: int
    num_bytes: int


Say = Callable[[Progress], None]


class RowSplitter(ABC):
    """Finds row starts in a buffer that begins at a row start."""

    @abstractmethod
    def split(self, buffer: bytes, is_last: bool) -> tuple[Places, int]:
        """Return the row starts, and the number of bytes consumed. The rest comes again, with more after it."""

    def explain_long_row(self, source: FileBytes, start: int, buffer: bytes) -> InputError | None:
        """Return a better error than "too long" for a row that does not end, if there is one."""
        return None


class FileBytes:
    """The bytes of one file, or the unpacked content of a gz file.

    Can be pickled and used in forked processes: reading has no position, and each process opens the file itself.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1
        self._unpacked: bytes | None = None
        try:
            with os.fdopen(open_data(path), "rb") as file:
                status = os.fstat(file.fileno())
        except OSError as error:
            raise unreadable(path, error) from error
        self._stamp = (status.st_size, status.st_mtime_ns)
        self.is_gzip = path.suffix == ".gz"
        self.num_bytes = len(self._unpack()) if self.is_gzip else status.st_size
        self.sha256 = ""
        head = self.read(0, 4096)
        self.start = len(_BOM) if head.startswith(_BOM) else 0
        for mark, (kind, fix) in _PACKED.items():
            if head.startswith(mark):
                what, fix = f"{path} is {kind}, despite its name", fix.format(name=quote(str(path)))
                raise InputError("data.ending", what, saw=[f"it starts with {head[:8]!r}"], fix=fix)
        if head.startswith(_UTF16_MARKS):
            raise self._wrong_encoding(0, head[0])
        if not head.strip(b" \t\r\n" + _BOM) and self.num_bytes <= len(head):
            size = f"{self.num_bytes} bytes, nothing but blanks" if head else "0 bytes"
            raise InputError("data.empty", f"{path} is empty", saw=[size], fix="give a file with rows")

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_descriptor": -1, "_unpacked": None}

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            os.close(self._descriptor)

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return the bytes from offset on; fewer only at the end of the file."""
        if self.is_gzip:
            return self._unpack()[offset : offset + num_bytes]
        parts = []
        while num_bytes > 0 and (part := os.pread(self._open(), min(num_bytes, 1 << 30), offset)):
            parts.append(part)
            offset += len(part)
            num_bytes -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_row(self, offset: int, end: int) -> bytes:
        """Return the bytes of a row; refuse if the file has shrunk since it was indexed."""
        row = self.read(offset, end - offset)
        if len(row) != end - offset:
            raise self._changed()
        return row

    def checked_chunks(self, say: Say | None) -> Iterator[bytes]:
        """Yield the file after its byte order mark, refuse bytes that are not text, and compute the sha256."""
        digest = hashlib.sha256(self.read(0, self.start))
        pending = b""  # the first bytes of a character that continues in the next chunk
        offset = self.start
        while offset < self.num_bytes:
            chunk = self.read(offset, CHUNK_BYTES)
            if not chunk:
                raise self._changed()
            digest.update(chunk)
            if b"\0" in chunk:
                raise self._nul(offset + chunk.index(b"\0"))
            if pending or not chunk.isascii():
                pending = self._check_utf8(pending + chunk, offset - len(pending))
            yield chunk
            offset += len(chunk)
            if say is not None:
                say(Progress(str(self.path), "indexing", offset, self.num_bytes))
        if pending:
            raise self._wrong_encoding(self.num_bytes - len(pending), pending[0])
        self.sha256 = sha256_of(self.path) if self.is_gzip else digest.hexdigest()

    def line_at(self, offset: int) -> int:
        starts = range(0, offset, CHUNK_BYTES)
        return 1 + sum(self.read(start, min(CHUNK_BYTES, offset - start)).count(b"\n") for start in starts)

    def _open(self) -> int:
        if self._descriptor < 0:
            try:
                self._descriptor = open_data(self.path)
            except OSError as error:
                raise unreadable(self.path, error) from error
            status = os.fstat(self._descriptor)
            if (status.st_size, status.st_mtime_ns) != self._stamp:
                raise self._changed()
        return self._descriptor

    def _unpack(self) -> bytes:
        if self._unpacked is not None:
            return self._unpacked
        try:
            with os.fdopen(open_data(self.path), "rb") as packed, gzip.open(packed) as file:
                data = file.read(MAX_UNPACKED_BYTES + 1)
        except (OSError, EOFError, zlib.error) as error:
            what, fix = f"{self.path} cannot be unpacked", "copy or download it again"
            raise InputError("data.gzip", what, saw=[str(error)], fix=fix) from error
        if len(data) > MAX_UNPACKED_BYTES:
            what = f"{self.path} unpacks to more than {MAX_UNPACKED_BYTES >> 20} MB, too much to keep in memory"
            saw, fix = ["a gz file cannot be read from the middle"], f"gunzip {self.path}   and give the unpacked file"
            raise InputError("data.gzip", what, saw=saw, fix=fix)
        self._unpacked = data
        return data

    def _check_utf8(self, data: bytes, offset: int) -> bytes:
        """Refuse bytes that are not UTF-8; return the start of an incomplete character."""
        try:
            data.decode("utf-8")
        except UnicodeDecodeError as error:
            if error.reason != "unexpected end of data":
                raise self._wrong_encoding(offset + error.start, data[error.start]) from None
            return data[error.start :]
        return b""

    def _wrong_encoding(self, offset: int, byte: int) -> InputError:
        around = self.read(max(0, offset - 20), 40).decode("latin-1").replace("\n", " ").strip()
        encoding, saw = "LATIN1", f"around it: {around!r}"
        if self.read(0, 2) in _UTF16_MARKS:
            encoding, saw = "UTF-16", "the file starts with the mark of UTF-16"
        elif byte == 0:
            encoding = "UTF-16BE" if offset % 2 == 0 else "UTF-16LE"
        what = f"{self.path} is not UTF-8: byte 0x{byte:02x} in line {self.line_at(offset)}"
        fix = f"iconv -f {encoding} -t UTF-8 {quote(str(self.path))} > {self._beside('utf8_')}"
        return InputError("data.encoding", what, saw=[saw], fix=fix)

    def _nul(self, offset: int) -> InputError:
        head = self.read(0, 400)
        if max(head[::2].count(0), head[1::2].count(0)) > len(head) // 4:
            return self._wrong_encoding(head.index(0), 0)  # every other byte: UTF-16 without its mark
        what = f"{self.path} holds a NUL byte in line {self.line_at(offset)}"
        saw = [f"byte {offset:,} of {self.num_bytes:,}"]
        command = f"tr -d '\\000' < {quote(str(self.path))} > {self._beside('clean_')}"
        return InputError("data.nul", what, saw=saw, fix=f"write the file again as UTF-8 text, or: {command}")

    def _beside(self, prefix: str) -> str:
        """Return the path of a new file beside this one, quoted for a shell."""
        return quote(str(self.path.with_name(prefix + self.path.name)))

    def _changed(self) -> InputError:
        saw, fix = f"it had {self._stamp[0]:,} bytes when it was opened", "put the file back, or start again"
        return InputError("data.changed", f"{self.path} changed while it was being read", saw=[saw], fix=fix)


def open_data(path: str | os.PathLike[str]) -> int:
    """Open a file that the user or another file named, and return its descriptor; OSErrors are left to the caller.

    A pipe, a socket, a device or a folder in its place raises an InputError, without waiting for a writer.
    """
    try:
        return open_regular(Path(path), follows_links=True)
    except DamagedFileError:
        what = f"{path} is {'a pipe' if Path(path).is_fifo() else 'not a regular file'}"
        saw, fix = ["files are read more than once, and in any order"], "write it to a file first, and give that"
        raise InputError("data.file", what, saw=saw, fix=fix) from None


def read_data(path: str | os.PathLike[str]) -> bytes:
    with os.fdopen(open_data(path), "rb") as file:
        return file.read()


def sha256_of(path: Path, say: Say | None = None) -> str:
    digest = hashlib.sha256()
    try:
        with os.fdopen(open_data(path), "rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
                if say is not None:
                    say(Progress(str(path), "hashing", file.tell(), num_bytes))
    except OSError as error:
        raise unreadable(path, error) from error
    return digest.hexdigest()


def index_rows(source: FileBytes, splitter: RowSplitter, say: Say | None) -> Offsets:
    """Return the start of each row, and the end of the last one, in one pass over the file."""
    found: list[Offsets] = []
    rest, offset = b"", source.start
    for chunk in chain(source.checked_chunks(say), [b""]):  # with nothing after the last chunk, the rest is final
        buffer = rest + chunk if rest else chunk
        if not buffer:
            continue
        starts, num_done = splitter.split(buffer, not chunk)
        found.append(starts.astype(np.uint64) + np.uint64(offset))
        rest, offset = buffer[num_done:], offset + num_done
        if len(rest) > MAX_ROW_BYTES or (rest and not chunk):
            raise splitter.explain_long_row(source, offset, rest) or _long_row(source, offset)
    index = np.concatenate([*found, np.array([source.num_bytes], np.uint64)])
    lengths = np.diff(index)
    if len(lengths) and int(lengths.max()) > MAX_ROW_BYTES:
        raise _long_row(source, int(index[int(lengths.argmax())]))
    return index


def _long_row(source: FileBytes, start: int) -> InputError:
    what = f"{source.path}: the row in line {source.line_at(start):,} is longer than {MAX_ROW_BYTES // 1_000_000} MB"
    saw = [f"it starts with {source.read(start, 60).decode('utf-8', 'replace')!r}"]
    fix = "check that line for missing line breaks, or split long texts into several rows"
    return InputError("data.long_row", what, saw=saw, fix=fix)


def unreadable(path: Path, error: OSError) -> InputError:
    return InputError("data.file", f"{path} cannot be read", saw=[str(error)], fix="check the name and its permissions")


def line_starts(buffer: bytes, is_last: bool) -> tuple[Places, npt.NDArray[np.bool_], int]:
    """Return the starts of the complete lines of a buffer, which of them are blank, and their total bytes."""
    bytes_ = np.frombuffer(buffer, np.uint8)
    ends = np.flatnonzero(bytes_ == 10) + 1
    if is_last and (not len(ends) or ends[-1] != len(buffer)):
        ends = np.append(ends, len(buffer))
    starts = np.concatenate([np.zeros(min(1, len(ends)), ends.dtype), ends[:-1]])
    return starts, blank_lines(bytes_, starts, ends), int(ends[-1]) if len(ends) else 0


def blank_lines(bytes_: npt.NDArray[np.uint8], starts: Places, ends: Places) -> npt.NDArray[np.bool_]:
    lengths = ends - starts
    firsts = bytes_[np.minimum(starts, max(len(bytes_) - 1, 0))]
    is_break = (firsts == 10) | (firsts == 13)
    is_crlf = (firsts == 13) & (bytes_[ends - 1] == 10)
    blank: npt.NDArray[np.bool_] = is_break & ((lengths == 1) | ((lengths == 2) & is_crlf))
    return blank


def folder_listing(folder: Path) -> list[str]:
    names = sorted(path.name + ("/" if path.is_dir() else "") for path in folder.iterdir())
    if not names:
        return ["the folder is empty"]
    return [f"it holds: {', '.join(names[:8])}" + (f" and {len(names) - 8} more" if len(names) > 8 else "")]


def missing_file(path: Path, flag: str) -> InputError:
    if path.is_symlink():
        target = os.readlink(path)
        what = f"{flag} {path} is a link to {target}, which does not exist"
        return InputError("data.file", what, fix=f"create {target}, or give another file")
    folder, near = path.parent, near_names(path)
    saw = [f"looked in {'the current folder' if folder == Path('.') else folder}"]
    if not folder.is_dir():
        saw = [f"there is no folder {folder}"]
    elif near:
        saw.append(f"similar names there: {', '.join(near)}")
    else:
        saw += folder_listing(folder)
    fix = f"{flag} {quote(str(folder / near[0]))}" if near else f"{flag} with a file that exists"
    return InputError("data.file", f"{flag} {path} does not exist", saw=saw, fix=fix)


def near_names(path: Path) -> list[str]:
    names = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
    return difflib.get_close_matches(path.name, names, n=3, cutoff=0.7)
