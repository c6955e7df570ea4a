"""The documentation site: what is generated is complete, every page is in the menu, and it builds without a warning."""

import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest
import yaml

import loopwright
import toys
from loopwright.cli import VERBS
from loopwright.runs.settings import create_parser
from loopwright.sources import CODES
from loopwright.tasks import get_task, task_names

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def load_generate():
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = load_generate()


@cache
def pages() -> dict[str, str]:
    return generate.generated_pages()


def nav_paths(entries) -> list[str]:
    if isinstance(entries, str):
        return [entries]
    values = entries.values() if isinstance(entries, dict) else entries
    return [path for value in values for path in nav_paths(value)]


def settings() -> dict:
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def test_the_menu_has_every_page_once_and_no_other():
    listed = nav_paths(settings()["nav"])
    written = [str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md") if path.parent.name != "decisions"]
    assert sorted(listed) == sorted([*written, *pages()])
    assert len(listed) >= 69


def test_each_section_of_the_menu_is_a_folder():
    looked_at, elsewhere = 0, []
    for section in settings()["nav"]:
        [(title, entries)] = section.items()
        folder = {"Coming from": "migrating"}.get(title, title.lower())
        paths = [] if title == "Home" else nav_paths(entries)
        looked_at += len(paths)
        elsewhere += [path for path in paths if not path.startswith(f"{folder}/") and path != "log.md"]
    assert looked_at >= 68
    assert elsewhere == []


def test_the_reference_has_every_verb_and_every_code():
    verbs, codes = pages()["reference/cli.md"], pages()["reference/errors.md"]
    assert [verb for verb in VERBS if f"\n## {verb}\n" not in verbs] == []
    assert [code for code in CODES if f"| `{code}` |" not in codes] == []
    assert "usage: lw predict" in verbs


def test_the_reference_has_every_flag_of_every_task_that_its_help_shows():
    head, *sections = re.split(r"^## ", pages()["reference/flags.md"], flags=re.MULTILINE)
    by_title = {section.partition("\n")[0]: section for section in sections}
    shared = "".join(text for title, text in by_title.items() if title.startswith("Of every task"))
    assert "parsers" in head and "`--learning_rate`" in shared and "`--model`" in shared
    for name in task_names():
        told = set(re.findall(r"`--(\w+)`", shared + by_title[name]))
        flags = {action.dest for action in generate.shown(create_parser(get_task(name)))}
        assert flags <= told, name
        assert len(flags) > 80


def test_the_reference_has_every_public_name():
    text = pages()["reference/api/loopwright.md"]
    names = [name for name in loopwright.__all__ if not name.startswith("__")]
    assert [name for name in names if f"\n### {name}\n" not in text] == []
    assert "\n#### Trainer.train\n" in text and "\n#### Trainer.calculate_train_batch_loss\n" in text
    assert "- `num_epochs`: total epochs, including those before a resume." in text
    for path, page in pages().items():
        assert " at 0x" not in page, f"{path} shows the address of an object"


def test_the_benchmarks_page_has_every_result_with_its_tables():
    text = pages()["reference/benchmarks.md"]
    results = sorted((ROOT / "benchmarks" / "results").glob("*.md"))
    assert len(results) >= 14
    for path in results:
        assert f"{{ #{path.stem} }}" in text
        rows = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
        assert [row for row in rows if row not in text] == []


def test_the_loop_of_the_page_is_that_of_the_source():
    loop = generate.loop_source()
    assert loop.startswith("def _run_training(self) -> None:")
    assert "self.backward_step(loss)" in loop and "underscore methods" not in loop
    source = (ROOT / "src" / "loopwright" / "trainer.py").read_text(encoding="utf-8")
    assert [line for line in loop.splitlines() if line not in source] == []
    assert (DOCS / "concepts" / "the_loop.md").read_text(encoding="utf-8").count(generate.LOOP_MARK) == 1


def test_examples_are_all_on_their_page():
    text = pages()["start/examples.md"]
    assert [path.stem for path in (ROOT / "examples").glob("*.py") if f"\n## {path.stem}\n" not in text] == []


@pytest.mark.parametrize(
    ("path", "before", "after"),
    [
        ("index.md", "[f](../benchmarks/results/faults.md)", "[f](reference/benchmarks.md#faults)"),
        ("concepts/speed.md", "[f](../../benchmarks/results/faults.md)", "[f](../reference/benchmarks.md#faults)"),
        ("start/trainer.md", "[e](../../examples/custom_loss.py)", "[e](../start/examples.md#custom_loss)"),
        ("start/trainer.md", "[source](../../src/loopwright/trainer.py)", "source"),
        ("start/trainer.md", "[c](../guides/callbacks.md#requests)", "[c](../guides/callbacks.md#requests)"),
        ("index.md", "[why](decisions)", "[why](concepts/decisions.md)"),
        ("reference/contributing.md", "[a](docs/concepts/architecture.md)", "[a](../concepts/architecture.md)"),
        ("reference/contributing.md", "[c](CHANGELOG.md)", "[c](../reference/changelog.md)"),
        ("index.md", "![p](images/report.png)", "![p](images/report.png)"),
        ("index.md", "[w](https://example.org/a#b)", "[w](https://example.org/a#b)"),
    ],
)
def test_links_that_leave_the_folder_lead_to_the_generated_pages(path, before, after):
    assert generate.turned_links(before, path) == after


def test_a_docstring_becomes_lists_and_code():
    text = "Do it.\n\nArgs:\n    one: the first,\n        of <two>.\n    **more: rest.\n\nExample:\n    >>> 1\n    1"
    arguments = ["**Arguments**", "", "- `one`: the first,", "  of &lt;two>.", "- `**more`: rest."]
    example = ["**Example**", "", "```pycon", ">>> 1\n1", "```", ""]
    assert generate.docstring_lines(text) == ["Do it.", "", "", *arguments, "", "", *example]


def test_pictures_are_small_and_nothing_is_loaded_from_elsewhere():
    sizes = {path.name: path.stat().st_size for path in (DOCS / "images").iterdir()}
    assert "report.png" in sizes
    assert {name: size for name, size in sizes.items() if size > 200_000} == {}
    stated = settings()
    assert stated["theme"]["font"] is False and stated["strict"] is True
    assert not any("://" in str(value) for key, value in stated.items() if key.startswith("extra"))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="mkdocs-material comes with `make docs`")
def test_the_site_builds_without_a_warning_and_needs_no_network(tmp_path):
    command = ("-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site")
    done = toys.python(*command, cwd=ROOT, timeout=110, NO_MKDOCS_2_WARNING="1")
    assert done.returncode == 0, done.stderr
    built = sorted((tmp_path / "site").rglob("*.html"))
    assert len(built) >= 68
    for path in built:
        loaded = re.findall(r"<(?:script|img|iframe)[^>]* src=\"?(https?:[^\" >]+)", path.read_text(encoding="utf-8"))
        loaded += re.findall(r"<link[^>]* href=\"?(https?:[^\" >]+)", path.read_text(encoding="utf-8"))
        assert loaded == [], path
    assert generate.LOOP_MARK not in (tmp_path / "site" / "concepts" / "the_loop.html").read_text(encoding="utf-8")
