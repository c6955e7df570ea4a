"""The bytes of a data file, read in order or at any offset, and the index of its rows.

The first read checks a file: UTF-8, no NUL bytes, no row over 10 MB; the same pass computes its sha256. Only the index
stays in memory: eight bytes per row. Packed files, up to a limit, and files in another encoding are converted once,
into a temporary file without a name.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import os
import tempfile
import unicodedata
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from shlex import quote
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from loopwright.errors import InputError, near_names
from loopwright.run_folder.files import DamagedFileError, open_regular
from loopwright.sources.encodings import REPLACE, check_encoding, decode_chunks, detect, encoding_by_mark, is_utf8

CHUNK_BYTES = 4 << 20
BLOCK_BYTES = 2 << 20  # of rows parsed together
MAX_ROW_BYTES = 10_000_000
MAX_UNPACKED_BYTES = 256 << 20

PACKINGS = (".gz", ".bz2", ".xz", ".zip")

BOM = b"\xef\xbb\xbf"
# The first bytes of files that are not text, their type, and the fix.
_PACKED = {
    b"\x1f\x8b": ("a gzip file", "mv {name} {name}.gz && gunzip {name}.gz"),
    b"PK\x03\x04": ("a zip file", "mv {name} {name}.zip && unzip -p {name}.zip > {name}"),
    b"PAR1": ("a parquet file", "--file_kind parquet"),
    b"ARROW1": ("an arrow file", "--file_kind arrow"),
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
Opened = TypeVar("Opened")


class RowSplitter(ABC):
    """Finds row starts in a buffer that begins at a row start."""

    @abstractmethod
    def split(self, buffer: bytes, is_last: bool) -> tuple[Places, int]:
        """Return the row starts, and the number of bytes consumed. The rest comes again, with more after it."""

    def explain_long_row(self, source: FileBytes, start: int, buffer: bytes) -> InputError | None:
        """Return a better error than "too long" for a row that does not end, if there is one."""
        return None


class OtherEncodingError(Exception):
    """A file whose encoding was not given is not UTF-8."""


class FileBytes:
    """The bytes of one file in UTF-8, unpacked and converted if it is something else.

    Can be pickled and used in forked processes: reading has no position, and each process opens the file itself.
    `encoding` is the given one, or that of the file's mark; None for plain UTF-8.
    """

    unit = "line"

    def __init__(
        self, path: Path, encoding: str | None = None, keeps_damaged: bool = False, keeps_blank: bool = False
    ) -> None:
        self.keeps_damaged = keeps_damaged  # whether its table keeps the place of rows that cannot be read
        self.keeps_blank = keeps_blank  # and that of blank lines before the last row
        self.path = path
        self._descriptor = -1
        self.packing = path.suffix.lower() if path.suffix.lower() in PACKINGS else ""
        self.encoding = encoding
        self._is_given = encoding is not None
        self._last_line = (0, 1)  # the last offset of `line_at`, and its line
        self._stamp: tuple[int, ...] = ()  # size and time when it was first opened
        self._converts_from: tuple[str, ...] = ()
        self._rewritten: Callable[[Iterator[bytes]], Iterator[bytes]] | None = None
        if encoding is None:
            self.encoding = encoding = encoding_by_mark(self.read(0, 4096))
        if encoding is not None and not is_utf8(names := check_encoding(encoding)):
            self._close()
            self._converts_from = names
        try:
            self.num_bytes = os.fstat(self._open()).st_size
        except InputError as error:
            if error.code != "data.encoding":
                raise
            error.fix = self._encoding_fix()  # of the mark, or of what the content looks like
            raise
        self.sha256 = ""
        head = self.read(0, 4096)
        self.start = len(BOM) if head.startswith(BOM) else 0
        for mark, (kind, fix) in _PACKED.items():
            if head.startswith(mark):
                what, fix = f"{path} is {kind}, despite its name", fix.format(name=quote(str(path)))
                raise InputError("data.ending", what, saw=[f"it starts with {head[:8]!r}"], fix=fix)
        if not head.strip(b" \t\r\n" + BOM) and self.num_bytes <= len(head):
            size = f"{self.num_bytes} bytes, nothing but blanks" if head else "0 bytes"
            raise InputError("data.empty", f"{path} is empty", saw=[size], fix="give a file with rows")

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_descriptor": -1}

    def __del__(self) -> None:
        self._close()

    def _close(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def settings(self) -> dict[str, Any]:
        encoding = {"encoding": self.encoding} if self.encoding is not None else {}
        return encoding | {name: True for name in ("keeps_damaged", "keeps_blank") if getattr(self, name)}

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return the bytes from offset on; fewer only at the end of the file."""
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

    def detect(self) -> str:
        return detect(
            (self.read(start, CHUNK_BYTES) for start in range(0, self.num_bytes, CHUNK_BYTES)), str(self.path)
        )

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
            if b"\0" in chunk and not self.keeps_damaged:  # otherwise the row is damaged, not the file
                raise self.nul(offset + chunk.index(b"\0"))
            if pending or not chunk.isascii():
                pending = self._check_utf8(pending + chunk, offset - len(pending))
            yield chunk
            offset += len(chunk)
            if say is not None:
                say(Progress(str(self.path), "indexing", offset, self.num_bytes))
        if pending:
            self._check_utf8(pending + b" ", self.num_bytes - len(pending))
        self.sha256 = sha256_of(self.path) if self.is_converted else digest.hexdigest()

    def line_at(self, offset: int) -> int:
        known, line = self._last_line if self._last_line[0] <= offset else (0, 1)  # many rows are located in order
        starts = range(known, offset, CHUNK_BYTES)
        line += sum(self.read(start, min(CHUNK_BYTES, offset - start)).count(b"\n") for start in starts)
        self._last_line = (offset, line)
        return line

    def _open(self) -> int:
        if self._descriptor < 0:
            try:
                descriptor = open_data(self.path)
            except OSError as error:
                raise unreadable(self.path, error) from error
            status = os.fstat(descriptor)
            stamp = (status.st_size, status.st_mtime_ns)
            if self._stamp not in ((), stamp):
                os.close(descriptor)
                raise self._changed()
            self._stamp = stamp
            self._descriptor = self._convert(descriptor) if self.is_converted else descriptor
        return self._descriptor

    @property
    def is_converted(self) -> bool:
        return bool(self.packing or self._converts_from or self._rewritten)

    def rewrite(self, convert: Callable[[Iterator[bytes]], Iterator[bytes]]) -> None:
        """Convert the content in another way, too, and read the result from now on."""
        self._close()
        self._rewritten = convert
        self.num_bytes = os.fstat(self._open()).st_size

    def _convert(self, descriptor: int) -> int:
        """Write the content as UTF-8 into a temporary file, and return its descriptor."""
        with os.fdopen(descriptor, "rb") as file, tempfile.TemporaryFile() as target:
            for chunk in self.convert(file):
                try:
                    target.write(chunk)
                except OSError as error:
                    what = f"{self.path} cannot be converted: no room for a temporary file"
                    fix = f"free some space in {tempfile.gettempdir()}, or name another folder: export TMPDIR=FOLDER"
                    raise InputError("disk.write", what, saw=[str(error)], fix=fix) from error
            target.flush()
            return os.dup(target.fileno())

    def convert(self, file: BinaryIO) -> Iterator[bytes]:
        chunks = self._unpacked(file) if self.packing else iter(lambda: file.read(CHUNK_BYTES), b"")
        if self._converts_from:
            chunks = (text.encode("utf-8") for text in decode_chunks(chunks, self._converts_from, str(self.path)))
        return self._rewritten(chunks) if self._rewritten is not None else chunks

    def _unpacked(self, packed: BinaryIO) -> Iterator[bytes]:
        num_bytes = 0
        try:
            with unpack(packed, self.path, self.packing) as file:
                while chunk := file.read(CHUNK_BYTES):
                    num_bytes += len(chunk)
                    if num_bytes > MAX_UNPACKED_BYTES:
                        what = f"{self.path} unpacks to more than {MAX_UNPACKED_BYTES >> 20} MB, the limit"
                        fix = _unpacking(self.path, getattr(file, "name", ""))
                        raise InputError("data.gzip", what, saw=["it may be made to fill the disk"], fix=fix)
                    yield chunk
        except (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, RuntimeError) as error:
            what = f"{self.path} cannot be unpacked"
            raise InputError("data.gzip", what, saw=[str(error)], fix="copy or download it again") from error

    def _check_utf8(self, data: bytes, offset: int) -> bytes:
        """Refuse bytes that are not UTF-8; return the start of an incomplete character."""
        try:
            data.decode("utf-8")
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                return data[error.start :]
            if self.encoding is None:
                raise OtherEncodingError from error
            line, byte = self.line_at(offset + error.start), data[error.start]
            what = f"{self.path} is not {self.encoding}: byte 0x{byte:02x} in line {line:,}"
            raise InputError("data.encoding", what, fix=self._encoding_fix(), flag="--encoding") from None
        return b""

    def _encoding_fix(self) -> str:
        """Return the flag that reads the file: its own encoding, or else the given one for the lines that are in it."""
        if not self._is_given:
            return f"--encoding {self.encoding},{REPLACE}"
        try:
            source = FileBytes(self.path)
            name = (source.encoding or "utf-8") if is_evident(self.path) else source.detect()
        except InputError as error:
            return error.fix or ""
        return f"--encoding {name if name != self.encoding else f'{name},{REPLACE}'}"

    def nul(self, offset: int) -> InputError:
        what = f"{self.path} holds a NUL byte in line {self.line_at(offset)}"
        saw = [f"byte {offset:,} of {self.num_bytes:,}"]
        path, clean = (quote(str(each)) for each in (self.path, self.path.with_name(f"clean_{self.path.name}")))
        command = f"tr -d '\\000' < {path} > {clean}   then   {clean} instead of {path}"
        return InputError("data.nul", what, saw=saw, fix=f"--bad_rows drop   or   {command}")

    def _changed(self) -> InputError:
        saw, fix = f"it had {self._stamp[0]:,} bytes when it was opened", "put the file back, or start again"
        return InputError("data.changed", f"{self.path} changed while it was being read", saw=[saw], fix=fix)


def _unpacking(path: Path, member: str) -> str:
    """Return the fix that unpacks a file by hand, and gives the result instead."""
    packed, bare = quote(str(path)), path.with_suffix("")
    commands = {".gz": "gunzip -kf", ".bz2": "bunzip2 -kf", ".xz": "unxz -kf"}
    if command := commands.get(path.suffix.lower()):
        return f"{command} {packed}   then   {quote(str(bare))} instead of {packed}"
    folder = bare.with_name(f"{bare.name}_files")
    return f"unzip -oq {packed} -d {quote(str(folder))}   then   {quote(str(folder / member))} instead of {packed}"


def unpack(packed: BinaryIO, path: Path, packing: str) -> Any:
    """Open a packed file; a zip file has to hold one file."""
    if packing != ".zip":
        openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
        return openers[packing](packed)
    archive = zipfile.ZipFile(packed)
    names = [name for name in archive.namelist() if not name.endswith("/") and not name.startswith("__MACOSX/")]
    if len(names) != 1:
        saw = [f"it holds: {', '.join(names[:8])}"]
        if not names:
            raise InputError("data.gzip", f"{path} holds no file", fix="copy or download it again")
        largest = max(names, key=lambda name: archive.getinfo(name).file_size)
        raise InputError(
            "data.gzip", f"{path} holds {len(names):,} files, not one", saw=saw, fix=_unpacking(path, largest)
        )
    return archive.open(names[0])


def open_text(path: Path, encoding: str | None, read: Callable[[FileBytes], Opened], *keeps: bool) -> Opened:
    """Return what `read` makes of a text file, again with the detected encoding if it is not UTF-8."""
    source = FileBytes(path, encoding, *keeps)
    try:
        return read(source)
    except OtherEncodingError:
        return read(FileBytes(path, source.detect(), *keeps))


def is_evident(path: Path) -> bool:
    """Whether a file is UTF-8, or has a mark of its encoding."""
    try:
        for _ in FileBytes(path).checked_chunks(None):
            pass
    except OtherEncodingError:
        return False
    return True


def open_data(path: str | os.PathLike[str]) -> int:
    """Open a file that the user or another file named, and return its descriptor; OSErrors are left to the caller.

    A pipe, a socket, a device or a folder in its place raises an InputError, without waiting for a writer.
    """
    try:
        return open_regular(Path(path), follows_links=True)
    except DamagedFileError:
        what = f"{path} is {'a pipe' if Path(path).is_fifo() else 'not a regular file'}"
        fix = f"write its content to a file, and give that instead of {path}"
        raise InputError("data.file", what, saw=["files are read more than once, and in any order"], fix=fix) from None


def read_data(path: str | os.PathLike[str], most: int = -1) -> bytes:
    """Return the first bytes of a data file, or all of them."""
    with os.fdopen(open_data(path), "rb") as file:
        return file.read(most)


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
    starts, end = np.concatenate([np.zeros(0, np.uint64), *found]), np.array([source.num_bytes], np.uint64)
    while source.keeps_blank and len(starts) and not source.read(int(starts[-1]), MAX_ROW_BYTES).strip(b"\r\n"):
        starts = starts[:-1]  # blank lines at the end are no rows
    index = np.concatenate([starts, end])
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
    fix = f"chmod u+rX {quote(str(path))}" if isinstance(error, PermissionError) else f"check the disk of {path}"
    return InputError("data.file", f"{path} cannot be read", saw=[str(error)], fix=fix)


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
    folder, near = path.parent, near_files(path)
    saw = [f"looked in {'the current folder' if folder == Path('.') else folder}"]
    if not folder.is_dir():
        saw = [f"there is no folder {folder}"]
    elif near:
        saw.append(f"similar names there: {', '.join(Path(each).name for each in near)}")
    else:
        saw += folder_listing(folder)
    fix = f"{flag} {quote(near[0])}" if near else f"put the file there: {quote(str(path))}"
    return InputError("data.file", f"{flag} {path} does not exist", saw=saw, fix=fix)


def as_on_disk(path: str | Path) -> Path:
    """Return the path, in Unicode's other normal form if only that exists: macOS decomposes letters, others do not."""
    path = Path(path).expanduser()
    forms = (Path(unicodedata.normalize(form, str(path))) for form in ("NFC", "NFD"))
    return path if path.exists() else next((each for each in forms if each.exists()), path)


def near_files(path: Path, endings: tuple[str, ...] = ()) -> list[str]:
    """Return the paths beside a missing one that were probably meant: files for a name with an ending."""
    beside = list(path.parent.iterdir()) if path.parent.is_dir() else []
    names = {each.name: each.name for each in beside if each.is_file() or not path.suffix}
    names |= {} if path.suffix else {each.stem: each.name for each in beside if each.is_file()}
    near = dict.fromkeys(names[name] for name in near_names(path.name, names))
    return [str(path.parent / name) for name in near if name.endswith(endings or "")]
