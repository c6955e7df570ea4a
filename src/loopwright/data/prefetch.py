"""Prefetch batches to the device: copied and finished one update ahead, in parallel with the computation.

Only for CUDA; on other devices `prefetched` returns its iterator unchanged. Small windows (token ids, rows of a table)
are not worth a separate stream: they are copied at their turn, without waiting. The first window of an epoch is used at
once, instead of after the second was read.

Prefetched windows are not state: a resumed run reads them again, under the same keys. An error in reading a window is
raised at its turn, not an update earlier. A window that does not fit into memory is copied at its turn, too.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from loopwright.data.loader import Window
from loopwright.engine.memory import forget_frames, is_out_of_memory
from loopwright.engine.nested import UnfinishedBatch, iter_tensors, map_tensors

# Copying this much takes a device about 10 us; a stream, an event and their bookkeeping take the host 30 us.
_SMALL_BYTES = 256 * 1024


class Copier(Protocol):
    """Copies batches to a device in parallel with its computation."""

    def start(self, batches: list[Any]) -> tuple[list[Any], Any]:
        """Begin to copy batches; return the copies and a ticket to wait for, without a device sync.

        None in place of a batch means that it is copied at its turn, and None in place of the ticket that all are.
        """

    def await_copies(self, moved: list[Any], ticket: Any) -> None:
        """Make later work on the device wait for the copies; called before they are used."""


class CudaCopier:
    """Copies from pinned memory on its own stream; small windows are not prefetched."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def start(self, batches: list[Any]) -> tuple[list[Any], Any]:
        """Pin unpinned tensors, and copy them on the stream; batches that are not finished are finished there."""
        is_small = sum([tensor.nbytes for tensor in iter_tensors(batches)]) <= _SMALL_BYTES
        if is_small and not any(isinstance(batch, UnfinishedBatch) for batch in batches):
            return [None] * len(batches), None
        with torch.cuda.stream(self._stream):
            moved = [batch if _moves_itself(batch) else map_tensors(batch, self._copied) for batch in batches]
            moved = [batch.finish() if isinstance(batch, UnfinishedBatch) else batch for batch in moved]
            done = torch.cuda.Event()
            done.record(self._stream)
        return moved, done

    def await_copies(self, moved: list[Any], ticket: Any) -> None:
        """Order the current stream after the copies; their memory is not reused before it is done with it."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(ticket)
        for tensor in iter_tensors(moved):
            if tensor.is_cuda:
                tensor.record_stream(current)

    def _copied(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu":
            return tensor  # a dataset on a device
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        return pinned.to(self._device, non_blocking=True)


def prefetched(
    windows: Iterator[Window], device: torch.device, create_copier: Callable[[torch.device], Copier] | None = None
) -> Iterator[Window]:
    """Return the windows of an epoch, each with its batches on the device as `MicroBatch.moved`.

    While the loop works on a window, the next one is being copied. Tensors in tuples, lists, mappings, dataclasses and
    named tuples are copied; a batch with its own `.to` is left to `MicroBatch.on`, except a tokenizer's. The default
    copier is a `CudaCopier` on CUDA, none elsewhere.
    """
    if create_copier is None:
        if device.type != "cuda":
            return windows
        create_copier = CudaCopier
    return _ahead(windows, create_copier(device))


def _ahead(windows: Iterator[Window], copier: Copier) -> Iterator[Window]:
    coming, is_first = _started(windows, copier), True
    while coming is not None:
        (window, ticket), error = coming, None
        try:
            coming = None if is_first else _started(windows, copier)
        except Exception as raised:  # noqa: BLE001 - raised again below, at its turn
            error = raised
        if ticket is not None:
            copier.await_copies([piece.moved for piece in window.pieces], ticket)
        yield window
        if error is not None:
            raise error
        if is_first:  # the device works by now
            coming, is_first = _started(windows, copier), False


def _started(windows: Iterator[Window], copier: Copier) -> tuple[Window, Any] | None:
    """Read the next window and begin to copy it, if memory suffices; None at the end."""
    window = next(windows, None)
    if window is None:
        return None
    try:
        moved, ticket = copier.start([piece.batch for piece in window.pieces])
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        forget_frames(error)  # they hold the copies so far
        return window, None
    if ticket is None:  # nothing is on its way
        return window, None
    pieces = [piece._replace(moved=batch) for piece, batch in zip(window.pieces, moved, strict=True)]
    return window._replace(pieces=pieces), ticket


def _moves_itself(batch: Any) -> bool:
    """Whether a batch may contain more than is visible: then only its own `.to` knows what to copy."""
    return not isinstance(batch, (Tensor, UserDict)) and callable(getattr(batch, "to", None))
