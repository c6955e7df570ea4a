"""Operations per update beyond those of a hand-written loop: on a GPU each is a launch, or host time at least.

    python benchmarks/launches.py

Both sides train the MLP of overhead.py on the CPU; operations are the same on every device, but for copies to it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
from overhead import SIDES
from torch.utils._python_dispatch import TorchDispatchMode

SHORT, LONG = 50, 250  # updates; what a run costs once cancels out


class Operations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


def counts_of(side: str, updates: int) -> Counter[str]:
    """Return the operations of a run."""
    train, _ = SIDES[side].prepare(updates)
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere), Operations() as operations:
        train()
    return operations.counts


def main() -> None:
    """Print the operations of which the sides run different numbers."""
    hand, ours = (
        {name: (count - short[name]) / (LONG - SHORT) for name, count in counts_of(side, LONG).items()}
        for side in ("hand", "loopwright")
        for short in [counts_of(side, SHORT)]
    )
    lines = ["| operation | by hand, per update | loopwright |", "|---|--:|--:|"]
    for name in sorted({*hand, *ours}):
        one, other = hand.get(name, 0.0), ours.get(name, 0.0)
        if abs(one - other) > 1e-9:
            lines.append(f"| {name} | {one:.2f} | {other:.2f} |")
    lines.append(f"| all | {sum(hand.values()):.2f} | {sum(ours.values()):.2f} |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
