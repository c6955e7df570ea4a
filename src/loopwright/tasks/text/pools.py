"""Retrieval scores: each text of a pool of pairs has to find its partner among all partners of the pool.

Rows are assigned to pools by position, so batch size and order do not matter. A pool is scored and dropped once it is
full: memory does not grow with the data. numpy only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from loopwright.metrics import Bootstrap, Intervals, MeanLoss, similarity_rows
from loopwright.metrics import load as load_metric
from loopwright.metrics.paired import RowKeeper
from loopwright.tasks.scoring import Scorer, groups_of

KS = (1, 5, 10)
_SHARES = ("mrr", *(f"recall@{k}" for k in KS), f"ndcg@{max(KS)}")
_PRIVATE = ("first", "second", "keys")


class PoolScorer(Scorer):
    """Recall at 1, 5 and 10, mean reciprocal rank, NDCG at 10, and the mean loss against all partners of the pool.

    A sample has "position", "first" and "second" (the embeddings of its two texts), and "keys" (a hash of each text).
    Partners with the same text as the right one, or from a row with the same first text, are not counted as rivals. A
    complete sample has "rank" (from 1), "similarity", "loss", and "nearest_other": the similarity of the best rival,
    None without one.
    """

    directions: Mapping[str, bool] = {**dict.fromkeys(_SHARES, True), "pool_loss": False}

    def __init__(
        self, pool_size: int, temperature: float, gather: Callable[[Any], list[Any]] | None = None, rank: int = 0
    ) -> None:
        self._pool_size = pool_size
        self._temperature = temperature
        self._gather = gather
        self._rank = rank
        self._waiting: dict[int, dict[int, dict[str, Any]]] = {}
        self._metric = Bootstrap(load_metric("retrieval", ks=KS))
        self._loss = Bootstrap(MeanLoss())
        self._keeper: RowKeeper | None = None

    def add(self, samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
        self._wait(samples)
        full = [number for number, pool in self._waiting.items() if len(pool) == self._pool_size]
        return [sample for number in full for sample in self._score(self._waiting.pop(number))]

    def finish(self) -> list[dict[str, Any]]:
        """Score the remaining pools; pools spread over several processes are divided among them."""
        waiting = [sample for pool in self._waiting.values() for sample in pool.values()]
        everyone = [waiting] if self._gather is None else self._gather(waiting)
        self._waiting.clear()
        for samples in everyone:
            self._wait(samples)
        pools, self._waiting = self._waiting, {}
        mine = [pool for number, pool in sorted(pools.items()) if number % len(everyone) == self._rank]
        return [sample for pool in mine for sample in self._score(pool)]

    def compute(self) -> dict[str, float]:
        found = {name: float(value) for name, value in self._metric.compute().items()}
        return {"mrr": found.pop("mrr"), **found, "pool_loss": float(self._loss.compute()["loss"])}

    def intervals(self) -> Intervals:
        return Intervals({**self._metric.interval().entries, "pool_loss": self._loss.interval().entries["loss"]})

    def keep_rows(self) -> list[RowKeeper]:
        self._keeper = RowKeeper(self._metric.metric)
        return [self._keeper]

    def state_dict(self) -> dict[str, Any]:
        return {"metric": self._metric.state_dict(), "loss": self._loss.state_dict()}

    def merge_state(self, state: Mapping[str, Any]) -> None:
        metric, loss = Bootstrap(load_metric("retrieval", ks=KS)), Bootstrap(MeanLoss())
        metric.load_state_dict(state["metric"])
        loss.load_state_dict(state["loss"])
        self._metric.merge(metric)
        self._loss.merge(loss)

    def _wait(self, samples: Iterable[dict[str, Any]]) -> None:
        for sample in samples:
            self._waiting.setdefault(sample["position"] // self._pool_size, {})[sample["position"]] = sample

    def _score(self, pool: Mapping[int, dict[str, Any]]) -> list[dict[str, Any]]:
        samples = [pool[position] for position in sorted(pool)]
        first, second = (np.stack([sample[name] for sample in samples]) for name in ("first", "second"))
        keys = np.asarray([sample["keys"] for sample in samples])
        scored = []
        for start, rows in similarity_rows(first, second):
            places = np.arange(start, start + len(rows))
            # Partners that are as right as the row's own are not rivals.
            same = (keys[places, None] == keys[None, :]).any(axis=-1)
            same[np.arange(len(rows)), places] = False
            rows[same] = -np.inf
            positions = [sample["position"] for sample in samples[start : start + len(rows)]]
            groups = groups_of(samples[start : start + len(rows)])
            self._metric.add_batch(positions=positions, groups=groups, predictions=rows, references=places)
            if self._keeper is not None:
                self._keeper.add({"predictions": rows, "references": places}, positions, groups or ())
            right = rows[np.arange(len(rows)), places]
            ranks = rows.shape[1] - (rows < right[:, None]).sum(axis=1)
            logits = rows / self._temperature
            largest = logits.max(axis=1)
            losses = largest + np.log(np.exp(logits - largest[:, None]).sum(axis=1)) - right / self._temperature
            counts = np.ones(len(rows), dtype=np.int64)
            self._loss.add_batch(positions=positions, groups=groups, sums=losses, counts=counts)
            rows[np.arange(len(rows)), places] = -np.inf
            rivals = rows.max(axis=1)
            columns = zip(samples[start:], ranks, right, rivals, losses, strict=False)
            for sample, rank, similarity, rival, loss in columns:
                shown = {name: value for name, value in sample.items() if name not in _PRIVATE}
                shown |= {"rank": int(rank), "similarity": round(float(similarity), 6), "loss": float(loss)}
                scored.append({**shown, "nearest_other": round(float(rival), 6) if np.isfinite(rival) else None})
        return scored
