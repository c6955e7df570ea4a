"""One safetensors file: hashed while it is streamed to disk, read only after its header was checked.

The safetensors library cannot sync or hash while it writes, and its in-memory form doubles the memory. It still does
the reading, and opens files written here.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from loopwright.checkpoint.files import TOO_LARGE, HashedFile, open_regular, within
from loopwright.errors import CheckpointError
from loopwright.failpoints import failpoint

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.complex64: "C64",
}
TYPES = {name: dtype for dtype, name in DTYPES.items()}
_LARGEST_HEADER_BYTES = 10_000_000  # for a small file; a reader of a large one has memory for more
_LARGEST_HEADER_SHARE = 64  # for a large file: one byte in this many
# Python objects take far more memory than their JSON text. This holds 30,000 tensors; larger files may have more.
_MOST_PARSED_BYTES = 40_000_000
_MOST_DIMENSIONS = 64


def write_tensors(file: HashedFile, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write contiguous CPU tensors in order, with this metadata in the header."""
    write_header(file, tensors, metadata)
    failpoint("mid_write")
    for tensor in tensors.values():
        write_data(file, tensor)


def write_header(file: HashedFile, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write the header of a file; only dtypes and shapes of the tensors are read."""
    text = header_text(tensors, metadata)
    file.write(struct.pack("<Q", len(text)) + text)


def header_text(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return the header of a file; raise a CheckpointError for one that reading would refuse."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts at a multiple of 8, so that it can be mapped
    what, size = f"the list of {len(tensors):,} tensors", 8 + len(text) + offset
    check_parsable(text, what, size)
    return within(text, _largest_header_bytes(size), what)


def write_data(file: HashedFile, tensor: torch.Tensor) -> None:
    """Write the data of one contiguous CPU tensor, the next in header order."""
    file.write(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]


def check_kind(name: str, tensor: torch.Tensor) -> None:
    """Raise a CheckpointError for a tensor that the format cannot hold."""
    is_plain = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta
    if not is_plain or tensor.dtype not in DTYPES:
        raise CheckpointError(f"{name} is a {tensor.layout} {tensor.dtype} on {tensor.device}: cannot be saved")


def check_header(path: Path, expected_metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return the entries of a header in bounded memory and time; refuse one that `write_tensors` cannot write."""
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > min(size - 8, _largest_header_bytes(size)):
            raise CheckpointError(f"{path} is damaged: its header claims {length} bytes of {size}")
        header = parse_json(file.read(length), path, size)
    metadata, expected = header.pop("__metadata__", None), dict(expected_metadata)
    if metadata != expected:
        raise CheckpointError(f"{path} belongs to another checkpoint: its metadata is {metadata}, not {expected}")
    end = 0
    for name, entry in header.items():
        try:
            if len(entry["shape"]) > _MOST_DIMENSIONS:
                raise ValueError(f"it has {len(entry['shape'])} dimensions")
            count = math.prod(map(_natural, entry["shape"]))
            first, last = (_natural(offset) for offset in entry["data_offsets"])
            if first != end or last - first != count * TYPES[entry["dtype"]].itemsize:
                raise ValueError("offsets and shape do not agree")
            end = last
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged: the entry of {name!r} is inconsistent ({error})") from None
    if end != size - 8 - length:
        raise CheckpointError(f"{path} is damaged: its tensors take {end} bytes of {size - 8 - length}")
    return header


def check_parsable(data: bytes | int, what: str | Path, tensor_bytes: int = 0) -> None:
    """Raise a CheckpointError for JSON, or a size of it, whose objects exceed 40 MB and a 16th of its tensors."""
    most, needed = max(_MOST_PARSED_BYTES, tensor_bytes // 16), 3 * (data if isinstance(data, int) else len(data))
    if isinstance(data, bytes):
        needed += 200 * (data.count(b"{") + data.count(b"[")) + 50 * data.count(b",")
    if needed > most:
        raise CheckpointError(
            f"{what} would take about {needed:,} bytes of memory, and {most:,} are the limit", code=TOO_LARGE
        )


def parse_json(data: bytes, path: Path, tensor_bytes: int = 0) -> dict[str, Any]:
    """Return the JSON object in these bytes.

    CheckpointError if there is none, it is too large (`check_parsable`) or too deep, repeats a key, or contains nan.
    """
    check_parsable(data, path, tensor_bytes)
    try:
        value = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is damaged: it holds a {type(value).__name__} instead of an object")
    return value


def _largest_header_bytes(file_bytes: int) -> int:
    return max(_LARGEST_HEADER_BYTES, file_bytes // _LARGEST_HEADER_SHARE)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key occurs twice")
    return result


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r} is not a size")
    return value
