"""`python -m loopwright.checkpoint verify DIR`: list every checkpoint: its update, its size, what is wrong with it."""

from __future__ import annotations

import sys
from pathlib import Path

from loopwright.checkpoint.report import verify_all

_USAGE = "usage: python -m loopwright.checkpoint verify DIR"


def main(arguments: list[str]) -> int:
    """Run the command; return 0 if every checkpoint is whole, 65 if one is not or there is none, 2 for bad usage."""
    if len(arguments) != 2 or arguments[0] != "verify":
        print(_USAGE, file=sys.stderr)  # noqa: T201 - a command
        return 2
    folder = Path(arguments[1])
    if not folder.is_dir():
        print(f"error: {folder} is not a folder\n{_USAGE}", file=sys.stderr)  # noqa: T201 - a command
        return 2
    found = verify_all(folder)
    for entry in found:
        print(entry)  # noqa: T201 - a command
    if not found:
        print(f"no checkpoint in {folder}")  # noqa: T201 - a command
    return 0 if found and all(entry.problem is None for entry in found) else 65


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
