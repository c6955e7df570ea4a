"""Every Python block of the README and of docs/ runs, and every link to a file or a heading leads somewhere.

The blocks of a page run in order, in one namespace, in an empty folder unless it is prepared here. Blocks that only
sketch are fenced as text.
"""

import re
import shlex
from pathlib import Path

import pytest

from loopwright.cli import main

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "README.zh-CN.md",
    *sorted(path for path in DOCS.rglob("*.md") if path.parent.name != "decisions"),
]
LEAST_PAGES = 55
LEAST_BLOCKS = 127
MOST_INDEX_LINES = 50

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[tuple[int, str, str]]:
    """Return (line of its first line, language, code) for each fenced block of a page."""
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, match.start(2)) + 1, match[1], match[2]) for match in FENCE.finditer(text)]


def python_blocks(page: Path) -> list[tuple[int, str]]:
    return [(line, code) for line, language, code in blocks(page) if language == "python"]


def anchors(page: Path) -> set[str]:
    outside = FENCE.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.+)$", outside, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def write_small_mrpc(folder: Path) -> None:
    """Write what docs/tasks/index.md works on: train.csv, test.csv, and a BERT of a few thousand weights in minilm/."""
    from transformers import BertConfig, BertForSequenceClassification

    from loopwright.tasks.text.masked_lm import train_tokenizer

    texts = [
        f"the {animal} sat on the {place}" for animal in ("cat", "dog", "cow") for place in ("mat", "roof", "wall")
    ]
    pairs = [(first, second) for first in texts for second in texts[:3]]
    rows = [f"{int(first == second)},{first},{second}" for first, second in pairs]
    (folder / "train.csv").write_text("\n".join(["label,sentence1,sentence2", *rows]), encoding="utf-8")
    (folder / "test.csv").write_text("\n".join(["label,sentence1,sentence2", *rows[:9]]), encoding="utf-8")
    tokenizer = train_tokenizer(texts, 100)
    tokenizer.model_max_length = 32
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=32, **sizes)
    BertForSequenceClassification(config).save_pretrained(folder / "minilm")
    tokenizer.save_pretrained(folder / "minilm")


# What the blocks of a page find in their folder; the others begin in an empty one.
PREPARED = {"docs/tasks/index.md": write_small_mrpc}


def test_there_are_pages_and_blocks_to_run():
    assert len(PAGES) >= LEAST_PAGES
    assert sum(len(python_blocks(page)) for page in PAGES) >= LEAST_BLOCKS


@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page)], ids=name_of)
def test_the_python_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    PREPARED.get(name_of(page), lambda folder: None)(tmp_path)
    namespace = {"__name__": "__main__"}
    num_run = 0
    for line, code in python_blocks(page):
        # Blank lines in front, so that a traceback names the line of the page.
        exec(compile("\n" * (line - 1) + code, str(page), "exec"), namespace)
        num_run += 1
    assert num_run > 0


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_links_of_a_page_lead_somewhere(page):
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    local = [link for link in LINK.findall(text) if not link.startswith(("http://", "https://"))]
    broken = []
    for link in local:
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_code_of_a_page_is_at_most_120_columns_wide_and_its_fences_are_closed(page):
    assert len(re.findall(r"^```", page.read_text(encoding="utf-8"), re.MULTILINE)) == 2 * len(blocks(page))
    wide = [
        f"{page.name}:{first + offset}"
        for first, _, code in blocks(page)
        for offset, line in enumerate(code.splitlines())
        if len(line) > 120
    ]
    # architecture.md draws its layers wider than that.
    assert [place for place in wide if not place.startswith("architecture.md")] == []


def test_the_index_lists_every_page_but_those_of_the_tasks_and_fits_on_a_screen():
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    listed = LINK.findall(text)
    others = [str(page.relative_to(DOCS)) for page in PAGES[2:] if page.parent.name != "tasks"]
    others.remove("index.md")
    assert len(others) >= LEAST_PAGES - 17
    assert [name for name in others if name not in listed] == []
    assert len(text.splitlines()) <= MOST_INDEX_LINES


def test_the_page_of_the_tasks_lists_the_page_of_every_task():
    from loopwright.tasks import task_names

    listed = LINK.findall((DOCS / "tasks" / "index.md").read_text(encoding="utf-8"))
    assert [name for name in task_names() if f"{name}.md" not in listed] == []
    pages = {page.stem for page in (DOCS / "tasks").glob("*.md")}
    assert set(task_names()) == pages - {"index", "data_files"}


def test_the_readme_example_is_at_most_15_lines_long():
    (_, example), *more = python_blocks(ROOT / "README.md")
    assert more == []
    assert len([line for line in example.splitlines() if line.strip()]) <= 15


def test_the_chinese_readme_has_the_same_headings_commands_links_and_tables():
    pages = [ROOT / "README.md", ROOT / "README.zh-CN.md"]
    texts = [page.read_text(encoding="utf-8") for page in pages]
    outside = [FENCE.sub("", text) for text in texts]
    levels = [re.findall(r"^(#+) ", text, re.MULTILINE) for text in outside]
    assert levels[0] == levels[1] and len(levels[0]) == 9
    assert [code for _, _, code in blocks(pages[0])] == [code for _, _, code in blocks(pages[1])]
    commands = [re.findall(r"`((?:make|lw|python|pip) [^`]+)`", text) for text in outside]
    assert commands[0] == commands[1] and len(commands[0]) >= 14
    tables = [[line.count("|") for line in text.splitlines() if line.startswith("|")] for text in outside]
    assert tables[0] == tables[1] and len(tables[0]) > 40
    links = [[link for link in LINK.findall(text) if not link.startswith(("README", "examples/"))] for text in outside]
    assert links[0] == links[1] and "README.zh-CN.md" in texts[0] and "README.md" in texts[1]
    figures = [re.findall(r"\d+(?:[.,]\d+)*", "".join(re.findall(r"^\|.*$", text, re.MULTILINE))) for text in outside]
    assert sorted(figures[0]) == sorted(figures[1]) and len(figures[0]) > 25
    assert len(re.findall("[\u4e00-\u9fff]", texts[1])) > 1000


def write_reviews(folder: Path) -> None:
    """Write what the commands of the README work on: reviews.csv, and a small BERT in minilm/."""
    write_small_mrpc(folder)
    words = {"pos": ("great", "lovely"), "neg": ("awful", "dull")}
    lines = [f"{words[kind][number % 2]} film {number},{kind}" for number in range(30) for kind in words]
    (folder / "reviews.csv").write_text("\n".join(["review,stars", *lines]), encoding="utf-8")


@pytest.mark.parametrize(
    ("page", "first"),
    [("README.md", "lw train text-classification"), ("docs/start/quickstart.md", "lw check text-classification")],
    ids=["readme", "quickstart"],
)
def test_the_commands_on_data_of_ones_own_run_as_they_stand(page, first, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_reviews(tmp_path)
    (block,) = [code for _, language, code in blocks(ROOT / page) if language == "sh" and code.startswith(first)]
    for line in block.splitlines():
        words = [word for word in shlex.split(line, comments=True)[1:] if word != "--open"]  # no browser here
        assert main(words) == 0, line
    (run,) = (path for path in (tmp_path / "runs").iterdir() if (path / "run.json").is_file() and not path.is_symlink())
    assert (run / "report.html").is_file() and (run / "model").is_dir()
