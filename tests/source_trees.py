"""The source of the package, parsed once for all tests that look at it."""

import ast
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "loopwright"


@cache
def modules() -> dict[str, ast.Module]:
    """Return the syntax tree of each module of the package, by its path inside it."""
    return {
        path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(SOURCE.rglob("*.py"))
    }
