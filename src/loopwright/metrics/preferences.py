"""Metrics of pairs of answers by their rewards: how often the chosen one is ahead, and by how much."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from loopwright.metrics.base import Column, Columns, Metric, Options, ShareMetric
from loopwright.metrics.intervals import Bounds
from loopwright.metrics.regression import PowerSums, mean_interval
from loopwright.metrics.sums import ExactSums

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
    columns = _COLUMNS

    def create_state(self) -> ExactSums:
        return ExactSums(3 * len(_NAMES))

    def update(self, columns: Columns) -> None:
        chosen, rejected = (np.asarray(columns[name], np.float64) for name in _COLUMNS)
        values = (chosen - rejected, chosen, rejected)
        self._state.add(len(chosen), [each**power for each in values for power in (1, 2, 3)])

    def result(self, options: Options) -> dict[str, Any]:
        return {name: sums.first.mean(sums.number) for name, sums in self.power_sums().items()}

    def own_interval(self, level: float, groups: Mapping[int, Any] | None = None) -> dict[str, Bounds | str]:
        others = None if groups is None else {number: each.power_sums() for number, each in groups.items()}
        return {
            name: mean_interval(sums, level, others and {number: each[name] for number, each in others.items()})
            for name, sums in self.power_sums().items()
        }

    def power_sums(self) -> dict[str, PowerSums]:
        sums = self._state.sums
        return {
            name: PowerSums(self.num_samples, *sums[3 * place : 3 * place + 3]) for place, name in enumerate(_NAMES)
        }
