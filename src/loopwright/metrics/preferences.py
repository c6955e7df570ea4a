"""Metrics of pairs of answers by their rewards: how often the chosen one is ahead, and by how much."""

from __future__ import annotations

import numpy as np

from loopwright.metrics.base import Column, Columns, ShareMetric
from loopwright.metrics.regression import MeanError
from loopwright.metrics.sums import Numbers

_COLUMNS = ("chosen_rewards", "rejected_rewards")


class RewardAccuracy(ShareMetric):
    """The share of pairs whose chosen answer has the higher reward; equal rewards are wrong."""

    name = "reward_accuracy"
    names = ("reward_accuracy",)
    columns = _COLUMNS

    def hits(self, columns: Columns) -> list[Column]:
        return [np.asarray(columns["chosen_rewards"] > columns["rejected_rewards"], dtype=np.bool_)]


class RewardMargin(MeanError):
    """The mean of the chosen answer's reward minus the rejected one's."""

    name = "reward_margin"
    greater_is_better = True
    columns = _COLUMNS

    def update(self, columns: Columns) -> None:
        super().update({"predictions": columns["chosen_rewards"], "references": columns["rejected_rewards"]})

    def errors(self, predictions: Numbers, references: Numbers) -> Numbers:
        return predictions - references


class ChosenReward(RewardMargin):
    """The mean reward of chosen answers."""

    name = "chosen_reward"

    def errors(self, predictions: Numbers, references: Numbers) -> Numbers:
        return predictions


class RejectedReward(RewardMargin):
    """The mean reward of rejected answers."""

    name = "rejected_reward"

    def errors(self, predictions: Numbers, references: Numbers) -> Numbers:
        return references
