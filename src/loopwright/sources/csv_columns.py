"""Cut columns out of many csv rows at once, with numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from loopwright.sources.files import Places

QUOTE = 34

Bytes = npt.NDArray[np.uint8]


def cut_columns(
    data: bytes, row_places: Sequence[int], delimiter: str, has_quotes: bool, num_columns: int, wanted: Sequence[int]
) -> list[list[str]] | None:
    """Return the wanted columns of complete UTF-8 rows, or None if a row has to be read field by field.

    `row_places` has the start of each row, and the end of the last one.
    """
    starts = np.array(row_places[:-1], np.int64)
    stops = _without_line_breaks(np.frombuffer(data, np.uint8), starts, np.array(row_places[1:], np.int64))
    if stops is None:
        return None
    # From here on each field ends with a delimiter, including the last one of a row.
    bytes_ = np.frombuffer(bytearray(data + b"\n"), np.uint8)
    bytes_[stops] = ord(delimiter)
    is_special = bytes_ == ord(delimiter)
    if has_quotes and b'"' in data:
        is_special |= bytes_ == QUOTE
    special = np.flatnonzero(is_special)
    is_quote = bytes_[special] == QUOTE
    quotes = special[is_quote]
    ends = special[~is_quote & (np.cumsum(is_quote) % 2 == 0)]
    if len(ends) != len(starts) * num_columns or not np.array_equal(ends[num_columns - 1 :: num_columns], stops):
        return None
    if not _are_well_placed(bytes_, quotes, starts, ord(delimiter)):
        return None
    return _values(data, bytes_, starts, ends.reshape(-1, num_columns), quotes, wanted)


def _without_line_breaks(bytes_: Bytes, starts: Places, stops: Places) -> Places | None:
    """Return the row ends without line breaks, or None if a row has nothing else."""
    while True:
        last = bytes_[stops - 1]
        is_break = (last == ord("\n")) | (last == ord("\r"))
        if not is_break.any():
            return stops
        stops = stops - is_break
        if (stops <= starts).any():
            return None


def _are_well_placed(bytes_: Bytes, quotes: Places, starts: Places, delimiter: int) -> bool:
    """Whether every quote opens or closes a field, or is doubled inside a quoted field."""
    opening, closing = quotes[::2], quotes[1::2]
    before, after = bytes_[np.maximum(opening - 1, 0)], bytes_[closing + 1]
    is_opening = (before == delimiter) | (before == QUOTE)
    if not is_opening.all():
        found = opening[~is_opening]
        places = np.minimum(np.searchsorted(starts, found), len(starts) - 1)
        if not np.array_equal(starts[places], found):
            return False
    return bool(((after == delimiter) | (after == QUOTE)).all())


def _values(
    data: bytes, bytes_: Bytes, starts: Places, ends: Places, quotes: Places, wanted: Sequence[int]
) -> list[list[str]]:
    closing, reopening = quotes[1::2][:-1], quotes[2::2]
    doubled = np.unique(np.searchsorted(ends.ravel(), closing[closing + 1 == reopening]))
    text = data.decode("ascii") if data.isascii() else None
    columns = []
    for place in wanted:
        first = ends[:, place - 1] + 1 if place else starts
        last = ends[:, place]
        if len(quotes):
            is_quoted = bytes_[first] == QUOTE
            first, last = first + is_quoted, last - is_quoted
        spans = zip(first.tolist(), last.tolist(), strict=True)
        if text is not None:
            values = [text[a:b] for a, b in spans]
        else:
            values = [data[a:b].decode("utf-8") for a, b in spans]
        for row in (doubled[doubled % ends.shape[1] == place] // ends.shape[1]).tolist():
            values[row] = values[row].replace('""', '"')
        columns.append(values)
    return columns
