"""`AcceleratorConfig`: settings of accelerate, with the names and defaults of transformers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from loopwright.config.choices import must_be, not_among
from loopwright.config.conversion import build
from loopwright.config.files import load_yaml, plain, read_mapping

# Of accelerate's GradientAccumulationPlugin.
_ACCUMULATION = ("num_steps", "adjust_scheduler", "sync_with_dataloader", "sync_each_batch")


@dataclass
class AcceleratorConfig:
    """The value of `accelerator_config` once the arguments are checked.

    `split_batches` (batch sizes are of all processes together) and `num_steps` of `gradient_accumulation_kwargs` have
    their effect. The others cannot change a result: each process reads its own samples, each once, in an order that
    follows from the seed; gradients are shared once per update; accelerate's state of the process is always reused.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = True
    non_blocking: bool = False
    gradient_accumulation_kwargs: dict[str, Any] | None = None
    use_configured_state: bool = False

    @classmethod
    def of(cls, given: Any) -> AcceleratorConfig:
        """Return the settings of a dict, of JSON text, of a file, or of an object like this one."""
        if isinstance(given, str):
            given = load_yaml(given) if "{" in given else read_mapping(given)  # JSON is YAML
        values = {} if given is None else plain(given)
        if not isinstance(values, dict):
            raise must_be("accelerator_config", "a dict, a JSON or YAML file, or an AcceleratorConfig", given)
        config = build(cls, values)
        for name in config.gradient_accumulation_kwargs or {}:
            if name not in _ACCUMULATION:
                raise not_among("gradient_accumulation_kwargs takes", name, _ACCUMULATION, flag="accelerator_config")
        return config

    def to_dict(self) -> dict[str, Any]:
        """Return the settings by name."""
        return dataclasses.asdict(self)
