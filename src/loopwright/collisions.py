"""Private names of a Trainer that a subclass defines as well.

Everyday names (`_run`, `_log`, `_losses`, ...) are free for subclasses, and the contract's underscore names may be
overridden. A subclass that takes one of the few other private names gets a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

# Underscore names that are documented, to be overridden or used (docs/start/trainer.md).
CORE_CONTRACT = frozenset(
    ("_accelerator", "_clip_gradients", "_create_accelerator", "_create_run_config", "_eval_dataloader")
    + ("_perform_forward_and_backward_passes", "_prepare_model_optimizer_and_dataloaders", "_run_eval_epoch")
    + ("_run_train_epoch", "_run_training", "_train_dataloader")
)


def private_names(base: type, contract: frozenset[str]) -> set[str]:
    """Return the private names that a class of ours and its bases define, without the contract's."""
    owners = [each for each in base.__mro__ if each.__module__.partition(".")[0] == "loopwright"]
    names = {name for owner in owners for name in vars(owner)}
    return {name for name in names if name.startswith("_") and not name.endswith("__")} - contract


def warn_of_collisions(
    trainer: object, base: type, contract: frozenset[str], state: Mapping[str, type] | None = None
) -> None:
    """Warn of private names of ours that a subclass has taken; called before a run.

    `state` has the private attributes that instances of `base` have, each with its type.
    """
    ours, state = private_names(base, contract), state or {}
    users = [kind for kind in type(trainer).__mro__ if kind.__module__.partition(".")[0] != "loopwright"]
    places = [f"{kind.__name__}.{name}" for kind in users for name in sorted(ours & vars(kind).keys())]
    owned = [name for name, value in vars(trainer).items() if not isinstance(value, state.get(name, ()))]
    places += [f"{type(trainer).__name__}().{name}" for name in owned if name in ours]
    for place in places:
        warnings.warn(
            f"{place} has the name of a private part of loopwright's {base.__qualname__}, which the training loop "
            "uses. Rename it.",
            stacklevel=4,  # the line that makes the trainer, or calls train
        )
