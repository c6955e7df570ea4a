"""Every message of an error, a warning or a notice stands in golden/messages.txt; `make golden` writes that file anew.

A change of wording shows as a diff of one file. Values in a message appear as the expression in braces.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from loopwright.runs.settings import create_parser
from loopwright.tasks import get_task, task_names
from source_trees import modules

GOLDEN = Path(__file__).resolve().parent / "golden" / "messages.txt"
_OTHER_CALLS = {"Finding", "Preempted", "warn", "notify"}


def name_of(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def texts_in(node: ast.expr) -> str | None:
    """Return a text with its values in braces; None for an expression without any text."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        parts = (
            part.value if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}" for part in node.values
        )
        return "".join(parts)
    inner = ast.unparse(node)
    return inner if any(isinstance(each, (ast.JoinedStr, ast.Constant)) for each in ast.walk(node)) else None


def assigned(tree: ast.Module) -> dict[str, list[tuple[int, ast.expr]]]:
    """Return what each name of a module is set to, with the line: `what, fix = ..., ...` stands before its error."""
    found: dict[str, list[tuple[int, ast.expr]]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            names, values = (getattr(each, "elts", [each]) for each in (node.targets[0], node.value))
            for name, value in zip(names, values, strict=False):
                found.setdefault(ast.unparse(name), []).append((node.lineno, value))
    return found


def messages(tree: ast.Module) -> Iterator[str]:
    """Return a line for each message of a module."""
    values = assigned(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not (name_of(node).endswith("Error") or name_of(node) in _OTHER_CALLS):
            continue
        given = [(None, each) for each in node.args] + [(each.arg, each.value) for each in node.keywords]
        for place, (name, each) in enumerate(given):
            earlier = [value for value in values.get(ast.unparse(each), ()) if value[0] < node.lineno]
            if ast.unparse(each) in ("what", "saw", "fix", "text") and earlier:
                given[place] = (name, max(earlier, key=lambda value: value[0])[1])
        texts = [(name, text) for name, each in given if (text := texts_in(each)) is not None]
        if any(" " in text for _, text in texts):
            shown = " | ".join(text if name is None else f"{name}: {text}" for name, text in texts)
            yield f"{name_of(node)}: {shown}".replace("\n", "\\n")


def all_messages() -> str:
    lines = []
    for path, tree in modules().items():
        found = sorted(messages(tree))
        lines += [path, *(f"  {line}" for line in found), ""] if found else []
    return "\n".join(lines)


def test_every_message_is_in_the_golden_file():
    found, golden = all_messages().splitlines(), GOLDEN.read_text(encoding="utf-8").splitlines()
    assert len(found) >= 800
    assert sorted(set(found) - set(golden)) == [], "run `make golden` and read the diff"
    assert sorted(set(golden) - set(found)) == [], "run `make golden` and read the diff"


def fixes(tree: ast.Module) -> Iterator[str]:
    """Return the texts that a module passes as `fix`, or gives that name."""
    found = [node.value for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == "fix"]
    found += [value for name, values in assigned(tree).items() if name in ("fix", "error.fix") for _, value in values]
    found += [node.value for node in ast.walk(tree) if isinstance(node, ast.AugAssign) and "fix" in ast.unparse(node)]
    for value in found:
        inside = {id(part) for each in ast.walk(value) if isinstance(each, ast.JoinedStr) for part in each.values}
        for node in ast.walk(value):
            if id(node) not in inside and isinstance(node, (ast.Constant, ast.JoinedStr)) and (text := texts_in(node)):
                yield text


# A way of a fix is a command, flags or an edit; flags do not stand inside of words, nor words in capitals for values.
NO_WAY = re.compile(
    r" {3}|\bor --|[:,] --\w|\b(and|with|name|give) --\w|\bleave (--|\{)"
    r"|--\w+ (with|if|and|for|to) |--\w+ [A-Z_]{3,}\b|\(instead of"
)


# A flag that is written out in full, but of a program that is not ours.
FLAG = re.compile(r"(?<!\S)(?<!pip install )--[A-Za-z]\w*(?![\w{-])")


def test_every_fix_has_the_grammar_of_fixes():
    found = [(path, fix) for path, tree in modules().items() for fix in fixes(tree)]
    assert len(found) >= 250
    ways = [(path, way) for path, fix in found for way in re.split(" {3}(?:or|then)(?: {3}|$)", fix)]
    assert [(path, way) for path, way in ways if NO_WAY.search(way.strip())] == []


def known_flags() -> set[str]:
    """Return the flags of all tasks, and those that a verb adds, in cli/."""
    parsers = [create_parser(get_task(name)) for name in task_names()]
    found = {flag for parser in parsers for flag in parser._option_string_actions}
    calls = [node for path, tree in modules().items() if path.startswith("cli/") for node in ast.walk(tree)]
    calls = [node for node in calls if isinstance(node, ast.Call) and name_of(node) == "add_argument"]
    named = {each.value for call in calls for each in call.args if isinstance(each, ast.Constant)}
    return found | named | {f"--{name}" for parser in parsers for name in parser._full_names}


def test_every_flag_of_a_fix_exists():
    named = [(path, flag) for path, tree in modules().items() for fix in fixes(tree) for flag in FLAG.findall(fix)]
    assert len(named) >= 150
    known = known_flags()
    assert [(path, flag) for path, flag in named if flag not in known] == []


if __name__ == "__main__":
    GOLDEN.write_text(all_messages(), encoding="utf-8")
    sys.stdout.write(f"{GOLDEN}: {len(all_messages().splitlines())} lines\n")
