"""The losses of preference tuning, on the log-probabilities of a chosen and a rejected answer.

dpo: Rafailov et al. 2023, and its conservative form with label smoothing (Mitchell 2023). ipo: Azar et al. 2023, on
log-ratios per token. simpo: Meng et al. 2024, per token and without a reference model.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

LOSSES: Final = ("dpo", "ipo", "simpo")
DEFAULT_BETAS: Final = MappingProxyType({"dpo": 0.1, "ipo": 0.1, "simpo": 2.0})
DEFAULT_GAMMA: Final = 1.0


class PairLosses(NamedTuple):
    """Of each pair: its loss, and the rewards of its answers, (pairs, 2), the chosen one first."""

    losses: Tensor
    rewards: Tensor


@dataclass(frozen=True)
class PreferenceLoss:
    """A loss with its settings; `needs_reference` unless it compares with no other model."""

    name: str
    beta: float
    gamma: float = 0.0
    label_smoothing: float = 0.0

    @property
    def needs_reference(self) -> bool:
        return self.name != "simpo"

    def __call__(self, log_probs: Tensor, num_tokens: Tensor, reference: Tensor | None = None) -> PairLosses:
        """Return the losses of pairs.

        Args:
            log_probs: of each answer, summed over its tokens: (pairs, 2), the chosen one first.
            num_tokens: of each answer.
            reference: the log-probabilities of the reference model.
        """
        from torch.nn import functional

        if reference is None:
            assert not self.needs_reference, f"{self.name} needs the log-probabilities of a reference model"
            rewards = self.beta * log_probs / num_tokens
            logits = rewards[:, 0] - rewards[:, 1] - self.gamma
        else:
            ratios = log_probs - reference
            rewards = self.beta * ratios
            if self.name == "ipo":
                means = ratios / num_tokens
                return PairLosses((means[:, 0] - means[:, 1] - 1 / (2 * self.beta)) ** 2, rewards.detach())
            logits = rewards[:, 0] - rewards[:, 1]
        losses = -(1 - self.label_smoothing) * functional.logsigmoid(logits)
        if self.label_smoothing:
            losses = losses - self.label_smoothing * functional.logsigmoid(-logits)
        return PairLosses(losses, rewards.detach())
