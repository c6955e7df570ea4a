"""Every error code that is raised is listed, and every listed one is raised and tested."""

import ast
from collections.abc import Iterator
from pathlib import Path

from loopwright.sources import CODES
from source_trees import nodes

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "loopwright"
LEAST_CODES = 25
LEAST_RAISES = 45


def calls(folder: Path, *names: str) -> Iterator[tuple[str, ast.Call]]:
    """Yield ('file:line', call) for each call of a function of one of these names in a folder."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in names:
                yield f"{path.name}:{node.lineno}", node


def codes_of(found: list[tuple[str, ast.Call]]) -> set[str]:
    return {call.args[0].value for _, call in found if call.args and isinstance(call.args[0], ast.Constant)}


def test_each_code_is_listed_and_those_of_the_readers_are_literals():
    raised = list(calls(PACKAGE / "sources", "InputError"))
    assert len(raised) >= LEAST_RAISES
    assert [place for place, call in raised if not isinstance(call.args[0], ast.Constant)] == []
    named = [each for each in nodes() if getattr(getattr(each[1], "func", None), "id", "") in ("InputError", "failed")]
    assert len(named) >= LEAST_RAISES + 20 and codes_of(named) - set(CODES) == set()


def test_each_code_of_the_readers_is_triggered_by_a_test():
    raised = codes_of(list(calls(PACKAGE / "sources", "InputError")))
    tested = codes_of(list(calls(Path(__file__).parent, "assert_refused", "refused")))
    tables = [call for _, call in calls(Path(__file__).parent, "parametrize") if "code" in ast.unparse(call.args[0])]
    tested |= {node.value for table in tables for node in ast.walk(table) if isinstance(node, ast.Constant)} & set(
        CODES
    )
    assert len(raised) >= LEAST_CODES
    assert raised - tested == set()


def test_no_code_is_listed_in_vain_and_each_has_one_sentence():
    constants = [node for place, node in nodes() if isinstance(node, ast.Constant) and "/codes.py:" not in place]
    literals = {node.value for node in constants if isinstance(node.value, str)}
    assert len(CODES) >= LEAST_CODES
    assert set(CODES) - literals == set()
    assert [code for code, text in CODES.items() if not text.endswith(".") or text.count(". ") or "." not in code] == []
    assert list(CODES) == sorted(CODES)
