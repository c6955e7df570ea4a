"""The settings that decide the bits of a run besides its state, and the guarantee that holds on resume."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from loopwright.version import package_version

TIERS = {
    "T0": "bit-exact: weights, optimizer and metrics as in a run that was never interrupted",
    "T1": "bit-exact elastic: weights and optimizer as on any other number of processes",
    "T2": "sequence-exact: the same samples, augmentation and dropout; sums may round differently",
    "T3": "counted: the position is found by reading again; exact if the source gives the same once more",
}
EXACT = ("T0", "T1")
# Changing these gives the same samples, but possibly other bits.
_ROUNDING = frozenset(
    ("torch", "device", "threads", "deterministic", "tf32", "matmul_precision", "precision", "step_mode", "processes")
    + ("reduction", "sharding", "augmentation", "graphs")
)


@dataclass(frozen=True)
class Change:
    """A setting that differs from the one in a checkpoint; `str()` gives a line for people."""

    name: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.name}: {self.before!r} -> {self.after!r}"


def fingerprint(device: torch.device, **settings: Any) -> dict[str, Any]:
    """Return versions, device, flags and the given settings, as stored in every manifest."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "loopwright": package_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "device": f"{device.type} {name}",
        "threads": torch.get_num_threads(),
        "deterministic": [torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic],
        "tf32": [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32],
        "matmul_precision": torch.get_float32_matmul_precision(),
        **settings,
    }


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[Change]:
    """Return the values that differ between two mappings, by name."""
    changes = [Change(name, saved.get(name), current.get(name)) for name in sorted(saved.keys() | current.keys())]
    return [change for change in changes if change.before != change.after]


def tier(saved: Mapping[str, Any], current: Mapping[str, Any], is_counted: bool) -> str:
    """Return which of `TIERS` holds under the current fingerprint; `is_counted`: the data has no random access."""
    if is_counted:
        return "T3"
    differing = {name for name in _ROUNDING if saved.get(name) != current.get(name)}
    if differing == {"processes"} and current.get("reduction") == "exact":
        return "T1"
    return "T2" if differing else "T0"
