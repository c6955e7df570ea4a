"""`python -m loopwright.checkpoint`: inspect checkpoints, and export the weights of one.

verify DIR            list every checkpoint: its update, its size, what is wrong with it export DIR FILE       write the
weights of one checkpoint, sharded or not, into one safetensors file
"""

from __future__ import annotations

import sys
from pathlib import Path

from loopwright.checkpoint.report import verify_all
from loopwright.checkpoint.whole_weights import export_weights
from loopwright.errors import CheckpointError

_USAGE = "usage: python -m loopwright.checkpoint verify DIR | export DIR FILE"


def main(arguments: list[str]) -> int:
    """Run the command; return 0 if every checkpoint is intact, 65 if one is damaged or none exists, 2 for bad usage."""
    is_export = len(arguments) == 3 and arguments[0] == "export"
    if not is_export and (len(arguments) != 2 or arguments[0] != "verify"):
        print(_USAGE, file=sys.stderr)  # noqa: T201 - a command
        return 2
    folder = Path(arguments[1])
    if not folder.is_dir():
        print(f"error: {folder} is not a folder\n{_USAGE}", file=sys.stderr)  # noqa: T201 - a command
        return 2
    if is_export:
        return _export(folder, Path(arguments[2]))
    found = verify_all(folder)
    for entry in found:
        print(entry)  # noqa: T201 - a command
    if not found:
        print(f"no checkpoint in {folder}")  # noqa: T201 - a command
    return 0 if found and all(entry.problem is None for entry in found) else 65


def _export(folder: Path, file: Path) -> int:
    try:
        print(export_weights(folder, file))  # noqa: T201 - a command
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - a command
        return 65
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
