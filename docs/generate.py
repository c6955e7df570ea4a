"""The generated pages of the documentation, and the hooks by which mkdocs gets them (`hooks` in mkdocs.yml).

`generated_pages()` returns them as Markdown by the path that they have in the site: the command line and its flags from
the parsers, the API from the docstrings, the error codes from their registry, the benchmarks from their results, and
the examples from their sources. Nothing of it is kept in a file, so nothing of it can be out of date.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import io
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
LOOP_MARK = "<!-- the loop: put here by docs/generate.py -->"

# For each page of the API reference: its title, a line about it, and its modules; of some only these names.
API_PAGES: Mapping[str, tuple[str, str, Mapping[str, tuple[str, ...] | None]]] = {
    "loopwright": (
        "loopwright",
        "What `import loopwright` offers. Nothing is imported before a name is used.",
        {"loopwright": None, "loopwright.results": ("TrainResult", "EvaluationResult", "PredictionResult")},
    ),
    "hf": (
        "loopwright.hf",
        "The names of transformers over the same loop; [more](../../migrating/hf.md).",
        {"loopwright.hf": None},
    ),
    "callbacks": (
        "loopwright.callbacks",
        "Events, and every callback that is built in; [more](../../guides/callbacks.md).",
        {"loopwright.callbacks": None},
    ),
    "schedulers": (
        "loopwright.schedulers",
        "Learning rates; [more](../../guides/schedulers.md).",
        {"loopwright.schedulers": None},
    ),
    "checkpoint": (
        "loopwright.checkpoint",
        "Checkpoints, also for a loop of your own; [more](../../concepts/saving_and_resuming.md).",
        {"loopwright.checkpoint": None},
    ),
    "metrics": (
        "loopwright.metrics",
        "Metrics that stream, merge exactly and have intervals; [more](../../guides/metrics.md).",
        {"loopwright.metrics": None},
    ),
    "tasks": (
        "loopwright.tasks",
        "What a task is made of; [more](../../tasks/index.md).",
        {"loopwright.tasks": None, "loopwright.tasks.base": ("Task", "Job", "Origin")},
    ),
    "data": (
        "loopwright.data",
        "Order, loaders and collators; [more](../../concepts/data_order.md).",
        {"loopwright.data": None, "loopwright.data.collators": None, "loopwright.data.chats": None},
    ),
    "more": (
        "Other modules",
        "Finetuning, histories, errors, run folders and small tools.",
        {
            "loopwright.finetuning": ("ModelFreezer", "LayerGroup", "Layer"),
            "loopwright.tracking": None,
            "loopwright.errors": (),
            "loopwright.run_folder": ("RunFolder", "MetricsLog", "Lease", "find_run", "read_metrics", "read_status"),
            "loopwright.report": None,
            "loopwright.utils": None,
        },
    ),
}

_EXAMPLES = (
    "digits",
    "metrics_in_subclass",
    "custom_callback_event",
    "custom_loss",
    "onecycle_placeholders",
    "own_loop",
    "own_task",
    "hf_text_pair",
    "hf_two_tower",
    "hf_manual_loop",
)
_MOST_SHOWN_PARAMETERS = 40
_LONGEST_SIGNATURE = 100
_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Yields|Example|Examples|Note):\s*$")
_SECTION_TITLES = {"Args": "Arguments", "Example": "Example", "Examples": "Example"}
_ITEM = re.compile(r"^(?! )([*\w.\"'][^:]*?): +(.*)$")
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def generated_pages() -> dict[str, str]:
    """Return the Markdown of every generated page by its path in the site."""
    pages = {
        "reference/cli.md": cli_page(),
        "reference/flags.md": flags_page(),
        "reference/errors.md": errors_page(),
        "reference/benchmarks.md": benchmarks_page(),
        "start/examples.md": examples_page(),
        "concepts/decisions.md": decisions_page(),
        "reference/changelog.md": (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
        "reference/contributing.md": (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"),
    }
    for name in API_PAGES:
        pages[f"reference/api/{name}.md"] = api_page(name)
    return pages


# ------------------------------------------------------------------------------------------------------ the loop


def loop_source() -> str:
    """Return THE LOOP of trainer.py as it stands there, without its indentation."""
    lines = (ROOT / "src" / "loopwright" / "trainer.py").read_text(encoding="utf-8").splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("    # --- THE LOOP"))
    rest = (number for number, line in enumerate(lines) if number > first and line.startswith("    # ---"))
    return "\n".join(line.removeprefix("    ") for line in lines[first + 1 : next(rest)]).strip("\n")


# ---------------------------------------------------------------------------------------------- the command line


def help_of(*words: str) -> str:
    """Return what `loopwright WORDS` prints, 100 columns wide."""
    from loopwright.cli import main

    printed = io.StringIO()
    columns = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            main(words)
    finally:
        if columns is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = columns
    return printed.getvalue()


def cli_page() -> str:
    """Return the page of all verbs, with what each says about itself."""
    from loopwright.api import evaluation_flags, prediction_flags
    from loopwright.cli import VERBS
    from loopwright.tasks import get_task, task_names

    lines = [
        "# Verbs of the command line",
        "",
        "Generated from the parsers of the installed version. `loopwright` and `lw` are the same command. See also how",
        "to use [the command line](../start/command_line.md), the [task flags](flags.md) and the",
        "[error codes](errors.md).",
        "",
        "| verb | |",
        "|---|---|",
    ]
    for verb, (_, arguments, text) in VERBS.items():
        usage = f"lw {verb} {arguments}".strip().replace("|", "or")
        lines.append(f"| [`{usage}`](#{verb}) | {text} |")
    for verb in VERBS:
        lines += ["", f"## {verb}", ""]
        text = help_of(verb, "--help")
        if text.startswith("usage:"):
            lines += ["```text", text.rstrip("\n"), "```"]
        else:
            lines += [f"`loopwright {verb}` takes no flags."]
    lines += ["", "## Flags of a task for predict and evaluate", ""]
    lines += ["| task | `lw predict RUN` takes | `lw evaluate RUN` takes |", "|---|---|---|"]
    for name in task_names():
        task = get_task(name)
        own = [" ".join(f"`--{flag}`" for flag in flags(task)) for flags in (prediction_flags, evaluation_flags)]
        lines.append(f"| {name} | {own[0]} | {own[1]} |")
    return "\n".join(lines) + "\n"


def flags_page() -> str:
    """Return the page of the flags: those that all tasks share, then those of each task."""
    from loopwright.config import TrainingArguments
    from loopwright.runs.settings import create_parser
    from loopwright.tasks import get_task, task_names
    from loopwright.tasks.arguments import TaskArguments

    parsers = {name: create_parser(get_task(name)) for name in task_names()}
    shared = set.intersection(*({action.dest for action in shown(parser)} for parser in parsers.values()))
    any_parser = next(iter(parsers.values()))
    training = {name for name in shared if name in TrainingArguments.__dataclass_fields__}
    about_data = {name for name in shared if name in TaskArguments.__dataclass_fields__}
    lines = [
        "# Task flags",
        "",
        "Generated from the parsers of the installed version. `train`, `check`, `demo` and `resume` take all flags",
        "of a task, [in a file, as flags or in Python](../start/command_line.md#flags). `-` and `_` are equal.",
        "`--no_NAME` switches a flag off. Short names: `--lr` is `--learning_rate`, `--epochs` is",
        "`--num_train_epochs`, `--batch` is `--per_device_train_batch_size`, `--out` is `--output_dir`.",
        "",
        "## Of every task: data and model",
        "",
        *_flag_table(action for action in shown(any_parser) if action.dest in about_data),
        "",
        "## Of every task: training",
        "",
        "The fields of [`TrainingArguments`](training_arguments.md) that have an effect here.",
        "",
        *_flag_table(action for action in shown(any_parser) if action.dest in training),
    ]
    for name, parser in parsers.items():
        task = get_task(name)
        lines += ["", f"## {name}", "", f"[{name}](../tasks/{name}.md): {task.summary}.", ""]
        own = [action for action in shown(parser) if action.dest not in shared]
        lines += _flag_table(own) if own else ["No flags of its own."]
        changed = {key: value for key, value in task.defaults.items() if key in shared}
        if changed:
            texts = ", ".join(f"`{key}` {value}" for key, value in changed.items())
            lines += ["", f"Defaults that this task sets: {texts}."]
    return "\n".join(lines) + "\n"


def shown(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the flags of a parser that its help shows, without `--help` and without the `--no_` forms."""
    return [
        action
        for action in parser._actions
        if action.help is not argparse.SUPPRESS
        and action.dest != "help"
        and not any(option.startswith("--no_") and option != f"--{action.dest}" for option in action.option_strings)
    ]


def _flag_table(actions: Iterable[argparse.Action]) -> list[str]:
    lines = ["| flag | value | default | |", "|---|---|---|---|"]
    for action in actions:
        flags = " ".join(f"`{option}`" for option in action.option_strings)
        default = "" if action.default in (None, [], argparse.SUPPRESS) else f"`{_plain(action.default)}`"
        lines.append(f"| {flags} | {_value_of(action)} | {default} | {_cell(action.help or '')} |")
    return lines


def _value_of(action: argparse.Action) -> str:
    if action.choices is not None:
        return ", ".join(f"`{choice}`" for choice in action.choices)
    name = action.metavar if isinstance(action.metavar, str) else action.dest
    return {"BOOL": "yes or no", "TEXT": "text", "INT": "whole number", "FLOAT": "number"}.get(name, name)


def _plain(value: Any) -> str:
    return str(getattr(value, "value", value))


def _cell(text: str) -> str:
    return _escaped(" ".join(text.split())).replace("|", "\\|")


# --------------------------------------------------------------------------------- errors, benchmarks, examples


def errors_page() -> str:
    """Return the page of the error codes."""
    from loopwright.sources import CODES

    lines = [
        "# Error codes",
        "",
        "An error about what you gave has a code, what was given, what was seen, and the nearest fix. The codes stay",
        "the same from version to version; `lw explain errors` prints this list, and the exit codes of the command are",
        "[here](../start/command_line.md#ends).",
        "",
        "| code | meaning |",
        "|---|---|",
    ]
    lines += [f"| `{code}` | {_cell(text)} |" for code, text in sorted(CODES.items())]
    return "\n".join(lines) + "\n"


def benchmarks_page() -> str:
    """Return the page of all measured figures: every file of benchmarks/results under a heading of its own."""
    lines = [
        "# Benchmarks",
        "",
        "The files of `benchmarks/results`, as their scripts wrote them, each with the command that measured it.",
        "",
    ]
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.md")):
        text = path.read_text(encoding="utf-8").strip()
        title, rest = path.stem.replace("_", " "), text
        if text.startswith("# "):
            title, _, rest = text[2:].partition("\n")
        rest = re.sub(r"^(#+ )", r"#\1", rest, flags=re.MULTILINE)
        lines += [f"## {title} {{ #{path.stem} }}", "", f"From `benchmarks/results/{path.name}`.", "", rest.strip(), ""]
    return "\n".join(lines)


def examples_page() -> str:
    """Return the page of the examples, each with its source."""
    lines = [
        "# Examples",
        "",
        "Each is one file under 80 lines in `examples/`, run by the tests. `python examples/digits.py` starts one.",
        "",
    ]
    for name in _EXAMPLES:
        source = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8").strip()
        lines += [f"## {name}", "", f'```python title="examples/{name}.py"', source, "```", ""]
    return "\n".join(lines)


def decisions_page() -> str:
    """Return the list of the decisions, by the first heading of each."""
    lines = [
        "# Decisions",
        "",
        "Why things are as they are: what was chosen, what else was thought of, and what it costs.",
        "",
    ]
    for path in sorted((DOCS / "decisions").glob("*.md")):
        title = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        lines.append(f"- [{title}](../decisions/{path.name})")
    return "\n".join(lines) + "\n"


# ------------------------------------------------------------------------------------------------------- the API


def api_page(name: str) -> str:
    """Return a page of the API reference: the public names of its modules with their docstrings."""
    title, about, modules = API_PAGES[name]
    lines = [f"# {title}", "", about, ""]
    for module_name, only in modules.items():
        module = importlib.import_module(module_name)
        if len(modules) > 1:
            lines += [f"## Module {module_name}", ""]
        heading = "###" if len(modules) > 1 else "##"
        for public in only or _public_names(module):
            lines += _entry(public, getattr(module, public), heading)
    return "\n".join(lines) + "\n"


def _public_names(module: Any) -> list[str]:
    if hasattr(module, "__all__"):
        return [name for name in module.__all__ if not name.startswith("__")]
    found = vars(module).items()
    return [
        name
        for name, value in found
        if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
    ]


def _entry(name: str, value: Any, heading: str) -> list[str]:
    """Return the lines about one public name."""
    if inspect.isclass(value):
        return [f"{heading} {name}", "", *_described(value, name), *_members(value, f"{heading}#")]
    if inspect.isroutine(value):
        return [f"{heading} {name}", "", *_described(value, name)]
    return [f"{heading} {name}", "", _constant(value), ""]


def _described(value: Any, name: str) -> list[str]:
    home = value.__module__
    if not home.startswith("loopwright"):
        return [f"`{home}.{value.__name__}`, handed on as it is.", ""]
    return [*_signature(value, name), *docstring_lines(inspect.getdoc(value) or ""), ""]


def _members(kind: type, heading: str) -> list[str]:
    """Return the public methods and properties of a class, those of its bases in loopwright included."""
    lines: list[str] = []
    if not kind.__module__.startswith("loopwright"):
        return lines
    seen: set[str] = set()
    for owner in kind.__mro__:
        if owner is not kind and not _belongs_to(owner, kind):
            continue
        for name, member in vars(owner).items():
            if name.startswith("_") or name in seen:
                continue
            seen.add(name)
            target = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
            if isinstance(target, property):
                text = docstring_lines(inspect.getdoc(target) or "")
                lines += [f"{heading} {kind.__name__}.{name}", "", *text, ""]
            elif inspect.isfunction(target) and inspect.getdoc(target):
                lines += [f"{heading} {kind.__name__}.{name}", "", *_signature(target, name)]
                lines += [*docstring_lines(inspect.getdoc(target) or ""), ""]
    return lines


def _belongs_to(owner: type, kind: type) -> bool:
    """Whether a base is a part of the class that has no page of its own, such as the hooks of the Trainer."""
    return kind.__name__ == "Trainer" and owner.__module__.startswith("loopwright")


def _signature(value: Any, name: str) -> list[str]:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return []
    parameters = [one for one in signature.parameters.values() if one.name not in ("self", "cls")]
    if len(parameters) > _MOST_SHOWN_PARAMETERS:
        return [f"`{name}` has {len(parameters)} fields: [all of them](../flags.md).", ""]
    texts: list[str] = []
    has_star = False
    for one in parameters:
        if one.kind is one.KEYWORD_ONLY and not has_star:
            texts.append("*")
            has_star = True
        has_star = has_star or one.kind is one.VAR_POSITIONAL
        texts.append(_parameter(one))
    result = signature.return_annotation
    is_told = result is not signature.empty and not inspect.isclass(value)
    end = f") -> {_annotation(result)}" if is_told else ")"
    line = f"{name}({', '.join(texts)}{end}"
    if len(line) > _LONGEST_SIGNATURE:
        line = "\n".join([f"{name}(", *(f"    {text}," for text in texts), end])
    return ["```python", line, "```", ""]


def _parameter(one: inspect.Parameter) -> str:
    star = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
    text = f"{star}{one.name}"
    if one.annotation is not one.empty:
        text += f": {_annotation(one.annotation)}"
    if one.default is one.empty:
        return text
    shown_default = getattr(one.default, "__name__", None) or repr(one.default)
    if " at 0x" in shown_default or len(shown_default) > 60:
        shown_default = "..."
    return f"{text} = {shown_default}" if one.annotation is not one.empty else f"{text}={shown_default}"


def _annotation(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def _constant(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"A mapping with the keys {', '.join(f'`{key}`' for key in value)}."
    if isinstance(value, (tuple, list, set, frozenset)):
        names = [getattr(one, "__name__", str(one)) for one in value]
        return f"Holds {', '.join(f'`{name}`' for name in names)}."
    if isinstance(value, (str, int, float)):
        return f"`{value!r}`"
    if hasattr(value, "__origin__"):
        return f"Another name of `{str(value).replace('typing.', '').replace('collections.abc.', '')}`."
    return f"An object of `{type(value).__name__}`."


def docstring_lines(text: str) -> list[str]:
    """Return a Google-style docstring as lines of Markdown: its sections become lists."""
    lines: list[str] = []
    section = ""
    code: list[str] = []
    for line in text.splitlines():
        header = _SECTION.match(line)
        if header or (section and line and not line.startswith(" ")):
            lines += _fenced(code)
            code = []
            section = header[1] if header else ""
            if header:
                lines += ["", f"**{_SECTION_TITLES.get(section, section)}**", ""]
                continue
        if section.startswith("Example"):
            code.append(line.removeprefix("    "))
        elif section and line.strip():
            lines.append(_section_line(section, line.removeprefix("    ")))
        else:
            lines.append(line if line.startswith("    ") else _escaped(line))
    return lines + _fenced(code)


def _section_line(section: str, line: str) -> str:
    if line.startswith(" "):
        return f"  {_escaped(line.strip())}"
    item = _ITEM.match(line)
    if item and section != "Returns" and section != "Note":
        return f"- `{item[1]}`: {_escaped(item[2])}"
    return f"- {_escaped(line)}" if section in ("Args", "Attributes", "Raises") else _escaped(line)


def _fenced(code: list[str]) -> list[str]:
    text = "\n".join(code).strip("\n")
    return ["```pycon" if text.startswith(">>>") else "```python", text, "```", ""] if text else []


def _escaped(line: str) -> str:
    """Return a line in which nothing outside of code spans is taken for HTML or emphasis."""
    parts = re.split(r"(`[^`]*`)", line)
    return "".join(part if part.startswith("`") else part.replace("<", "&lt;").replace("*", "\\*") for part in parts)


# ------------------------------------------------------------------------------------------------------- mkdocs


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages; called by mkdocs once it has found those in docs/."""
    from mkdocs.structure.files import File

    for path, text in generated_pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Put the loop in, and turn links to files outside of docs/ to their pages; called by mkdocs for each page."""
    if page.file.src_uri == "index.md":
        page.meta["hide"] = ["navigation", "toc"]
    markdown = markdown.replace(LOOP_MARK, f"```python\n{loop_source()}\n```")
    return turned_links(markdown, page.file.src_uri)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Mark flags, which are not to be broken after their hyphens; called by mkdocs for the HTML of each page."""
    return re.sub(r"<code>(?=--[^<]{1,40}</code>)", '<code class="flag">', html)


def on_post_build(config: Any) -> None:
    """Write the index of the search as a script too, for pages opened as files; called by mkdocs at the end."""
    folder = Path(config["site_dir"]) / "search"
    index = (folder / "search_index.json").read_text(encoding="utf-8")
    (folder / "search_index.js").write_text(f"var __index = {index}", encoding="utf-8")


def turned_links(markdown: str, path: str) -> str:
    """Return a page with links that work in the site.

    Links to results, examples, the changelog and the guide of contributing lead to their pages; of other links that
    leave docs/, such as those to sources, the text is left.

    Args:
        markdown: of the page.
        path: of the page, from docs/ on.
    """
    is_from_root = path in ("reference/changelog.md", "reference/contributing.md")
    folder = ROOT if is_from_root else (DOCS / path).parent
    up = "../" * path.count("/")

    def turned(match: re.Match[str]) -> str:
        picture, text, link = match.groups()
        name, hash_mark, anchor = link.partition("#")
        if picture or not name or "://" in name or name.startswith("mailto:"):
            return match[0]
        target = (folder / name).resolve()
        if target.is_relative_to(DOCS):
            if target == DOCS / "decisions":
                return f"[{text}]({up}concepts/decisions.md)"
            return f"[{text}]({up}{target.relative_to(DOCS)}{hash_mark}{anchor})" if is_from_root else match[0]
        if not target.is_relative_to(ROOT):
            return match[0]
        place = _page_of(target.relative_to(ROOT))
        return text if place is None else f"[{text}]({up}{place})"

    return _LINK.sub(turned, markdown)


def _page_of(path: Path) -> str | None:
    """Return the generated page, with its anchor, that shows a file of the project; None where there is none."""
    if path.parent == Path("benchmarks/results"):
        return f"reference/benchmarks.md#{path.stem}"
    if path.parent == Path("examples") and path.stem in _EXAMPLES:
        return f"start/examples.md#{path.stem}"
    pages = {
        "examples": "start/examples.md",
        "CHANGELOG.md": "reference/changelog.md",
        "CONTRIBUTING.md": "reference/contributing.md",
    }
    return pages.get(str(path))
