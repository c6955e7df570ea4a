"""The type of a trainer, for modules that cannot import it because it imports them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from loopwright.trainer import Trainer

    TrainerLike: TypeAlias = Trainer
else:
    TrainerLike = Any
