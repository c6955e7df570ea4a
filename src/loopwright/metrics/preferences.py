"""Metrics of pairs of answers by their rewards: how often the chosen one is ahead, and by how much."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from loopwright.metrics.base import Column, Columns, Metric, Options, ShareMetric
from loopwright.metrics.intervals import Bounds
from loopwright.metrics.regression import PowerSums

_COLUMNS = ("chosen_rewards", "rejected_rewards")
_NAMES = ("reward_margin", "chosen_reward", "rejected_reward")


class RewardAccuracy(ShareMetric):
    """The share of pairs whose chosen answer has the higher reward; equal rewards are wrong."""

    name = "reward_accuracy"
    names = ("reward_accuracy",)
    columns = _COLUMNS

    def hits(self, columns: Columns) -> list[Column]:
        return [np.asarray(columns["chosen_rewards"] > columns["rejected_rewards"], dtype=np.bool_)]


class Rewards(Metric):
    """The mean rewards of chosen and rejected answers, and of their difference."""

    name = "rewards"
    state = partial(PowerSums, len(_NAMES))
    columns = _COLUMNS

    def update(self, columns: Columns) -> None:
        chosen, rejected = (np.asarray(columns[name], np.float64) for name in _COLUMNS)
        self._state.add_values(chosen - rejected, chosen, rejected)

    def result(self, options: Options) -> dict[str, Any]:
        return dict(zip(_NAMES, self._state.means(), strict=True))

    def own_interval(self, level: float, groups: Mapping[int, Any] | None = None) -> dict[str, Bounds | str]:
        return dict(zip(_NAMES, self._state.intervals(level, groups), strict=True))
