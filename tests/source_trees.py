"""The source of the package, parsed once for all tests that look at it."""

import ast
import gc
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "loopwright"


@cache
def modules() -> dict[str, ast.Module]:
    """Return the syntax tree of each module of the package, by its path inside it."""
    gc.disable()  # each collection would look at all nodes so far, and later ones at all of them
    texts = {path.relative_to(SOURCE).as_posix(): path.read_text("utf-8") for path in sorted(SOURCE.rglob("*.py"))}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    gc.freeze()
    gc.enable()
    return trees


@cache
def nodes() -> list[tuple[str, ast.AST]]:
    """Return every syntax node of the package as ('file:line', node)."""
    trees = modules().items()
    return [(f"{name}:{getattr(node, 'lineno', 0)}", node) for name, tree in trees for node in ast.walk(tree)]
