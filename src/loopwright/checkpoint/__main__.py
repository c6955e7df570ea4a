"""`python -m loopwright.checkpoint`: inspect checkpoints, and export the weights of one.

verify DIR            list every checkpoint: its update, its size and its problem
export DIR FILE       write the weights of one checkpoint, sharded or not, into one safetensors file
"""

from __future__ import annotations

import sys
from pathlib import Path

from loopwright.checkpoint.report import verify_all
from loopwright.checkpoint.whole_weights import export_weights
from loopwright.config.safe_text import visible
from loopwright.errors import CheckpointError

_USAGE = "usage: python -m loopwright.checkpoint verify DIR | export DIR FILE"


def main(arguments: list[str]) -> int:
    """Run the command; return 0 if every checkpoint is intact, 65 if one is damaged or none exists, 2 for bad usage."""
    is_export = len(arguments) == 3 and arguments[0] == "export"
    if not is_export and (len(arguments) != 2 or arguments[0] != "verify"):
        return _fail(_USAGE, 2)
    folder = Path(arguments[1])
    if not folder.is_dir():
        return _fail(f"error: {folder} is not a folder\n{_USAGE}", 2)
    if is_export:
        try:
            print(export_weights(folder, Path(arguments[2])))  # noqa: T201 - a command
        except CheckpointError as error:
            return _fail(f"error: {error}", 65)
        return 0
    found = verify_all(folder)
    print(visible("\n".join(map(str, found)) or f"no checkpoint in {folder}"))  # noqa: T201 - a command
    return 0 if found and all(entry.problem is None for entry in found) else 65


def _fail(text: str, code: int) -> int:
    print(visible(text), file=sys.stderr)  # noqa: T201 - a command
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
