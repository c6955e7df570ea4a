"""Streams split by process: each process reads its own part completely.

A dataset or loader declares this by an attribute, `is_split_by_process = True`. `split_dataset_by_node` of the
`datasets` library is recognised without it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from loopwright.data.loader import MicroBatch, ReplayLoader, Window
from loopwright.data.order import Share
from loopwright.engine.processes import Agreement, gather_objects
from loopwright.errors import ConfigError
from loopwright.keys import KeyStream


def is_split(source: Any, share: Share) -> bool:
    """Return whether a loader yields each process its own part; raise a ConfigError if split for another world size."""
    dataset = getattr(source, "dataset", None)
    if share.processes == 1:
        return False
    if any(getattr(each, "is_split_by_process", False) for each in (source, dataset)):
        return True
    # datasets keeps the result of split_dataset_by_node under a private name only.
    parts = int(getattr(getattr(dataset, "_distributed", None), "world_size", 1))
    if parts not in (1, share.processes):
        raise ConfigError(
            f"the dataset is split over {parts} processes, and there are {share.processes}. Call "
            f"split_dataset_by_node with world_size={share.processes}, or not at all."
        )
    return parts > 1


class SplitLoader(ReplayLoader):
    """A loader over a stream split by process, counted over all of them.

    The parts may have any lengths: an epoch ends with the longest, and processes that are done run pads. The processes
    exchange their sample counts once per update.
    """

    def windows(self, epoch: int = 0, position: int = 0) -> Iterator[Window]:
        """Yield the windows of an epoch after `position` samples, reading and dropping those before."""
        share, agreement = self.share, Agreement()
        keys = KeyStream(self.seed, epoch, purpose=self._purpose)
        batches = itertools.islice(self._batches(epoch), self.limit)
        spare: Any = None
        for number in itertools.count():
            own = itertools.islice(batches, share.accumulation)
            mine = [MicroBatch(batch, keys.at(self._own_place(start)), rows) for start, rows, batch in own]
            samples = int(agreement.total(sum(piece.rows for piece in mine)))
            if samples == 0:
                return
            if number == 0:
                spare = mine[0] if mine else None
                if agreement.largest(spare is None)[0]:  # the part of some process is empty
                    spare = next(piece for piece in gather_objects(spare) if piece is not None)
            position -= samples
            if position < 0:
                pads = [spare._replace(rows=0)] * share.num_pads(len(mine), share.accumulation)
                yield Window(mine + pads, samples)

    def _own_place(self, start: int) -> int:
        """Return a position for the key of a micro-batch that no other process uses."""
        return start * self.share.processes + self.share.rank

    def _num_global_batches(self) -> int | None:
        return None
