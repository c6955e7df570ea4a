"""What the report of each demo has to show; the tests that train the shortened demos ask for it."""

from pathlib import Path
from typing import Any

from loopwright.report.curves import charts_of
from loopwright.report.page import MOST_BYTES
from loopwright.report.panels import read_findings
from loopwright.report.pictures import pictures_of
from loopwright.report.provenance import again_panel, data_panel, speed_panel
from loopwright.report.run_view import RunView, view
from loopwright.report.summary import card_of
from loopwright.run_folder import RunFolder

_CLASSES = ["Confusion matrix", "Most confused", "By class", "Confidence", "Calibration", "Most confident mistakes"]
_OBJECTS = ["By class", "Precision and recall", "Scores of the objects found", "Average precision"]
_WRITTEN = ["Texts", "Samples that differ", "Generated texts at each evaluation"]

# By task: the blocks of its panel, and the tables of the metric by slice.
PANELS: dict[str, tuple[list[str], list[str]]] = {
    "text-classification": (_CLASSES, ["By class", "By length, in characters"]),
    "token-classification": (
        ["By entity", "Most confused", "Calibration", "Sentences with mistakes"],
        ["By length, in words"],
    ),
    "question-answering": (["Questions", "Misses", "Hits"], ["By length, in characters"]),
    "multiple-choice": (
        ["Chosen positions", "Confidence", "Calibration", "Misses", "Hits"],
        ["By length, in characters"],
    ),
    "sentence-embedding": (
        ["Similarity of the pairs", "Rank of the matching text", "Not ranked first", "Ranked first"],
        ["By length, in characters"],
    ),
    "causal-lm": (
        ["Difficulty of the parts", "Samples", "Generated texts at each evaluation"],
        ["By length, in characters"],
    ),
    "chat": (
        ["Difficulty of the parts", "Samples", "Generated texts at each evaluation"],
        ["By length, in characters"],
    ),
    "masked-lm": (["Most frequent tokens", "Most confused", "Samples"], ["By length, in characters"]),
    "preference": (["Loss by sample", "Generated texts at each evaluation"], []),
    "summarization": (_WRITTEN, ["By length, in characters"]),
    "translation": (_WRITTEN, ["By length, in characters"]),
    "image-classification": (_CLASSES, ["By class"]),
    "semantic-segmentation": (["By class", "Confusion matrix", "Most confused", "Mean IoU by image"], []),
    "object-detection": (_OBJECTS, ["By number of objects"]),
    "instance-segmentation": (_OBJECTS, ["By number of objects"]),
    "masked-image-modeling": (["Loss by sample"], []),
}
IMAGES = {name for name in PANELS if "image" in name or "segmentation" in name or "detection" in name}
_PICTURES = ["predictions.png", "worst.png", "train_batch0.png"]
_COURSE = ["Loss", "Learning rate", "Gradient norm", "Samples per second", "Waiting for data", "Peak memory"]
_OF_TEXTS = ["Tokens per second", "Padding"]
_AGAIN = ["Command", "Non-default settings", "Hashes of the data", "Versions"]


def assert_every_panel_has_data(folder: str | Path, has_evaluations: bool = True) -> None:
    """Check the report of a run: it is there, of a size that can be mailed, and nothing named for its task is empty.

    Args:
        folder: of a run that has ended.
        has_evaluations: whether it was evaluated on the way, so that there are curves of that too.
    """
    run = view(RunFolder(Path(folder)))
    page = (Path(folder) / "report.html").read_bytes()
    assert len(page) < MOST_BYTES
    assert not run.notes
    card = card_of(run)
    assert card.value is not None and card.bars and card.verdict and len(card.facts) >= 5
    assert_curves_are_drawn(run, has_evaluations)
    blocks, slices = PANELS[run.task]
    findings = read_findings(run.folder.evaluation, run.labels)
    assert not findings.notes and findings.num_samples > 0
    assert findings.panel is not None and findings.worst is not None
    assert_have_data(findings.panel.blocks, blocks)
    assert_have_data(findings.slices, slices)
    assert_have_data([findings.worst], [findings.worst.title])
    text = page.decode()
    for section in (findings.panel.title, "Data", "Speed", "How to reproduce it"):
        assert f"<h2>{section}</h2>" in text
    data, speed = data_panel(run), speed_panel(run)
    assert data is not None and speed is not None
    batch = [] if run.task in IMAGES else ["The first training batch, as the model saw it"]
    counts = "Labels" if run.data.get("counts") else "Splits"
    assert_have_data(data.blocks, ["Files", counts, "Lengths", "Checks", *batch])
    assert_have_data(speed.blocks, ["Where the time went", "Figures"])
    assert_have_data(again_panel(run).blocks, _AGAIN)
    assert run.model and run.guarantee
    drawn = [picture.name for picture in pictures_of(run.folder.path, MOST_BYTES)[0]]
    assert drawn == (_PICTURES if run.task in IMAGES else [])
    assert text.count("<img ") == len(drawn)


def assert_curves_are_drawn(run: RunView, has_evaluations: bool) -> None:
    """Check that each chart of a run's course has points, and the metric that decides too."""
    charts = {chart.title: chart for chart in charts_of([run])}
    wanted = [*_COURSE, *([] if run.task in IMAGES else _OF_TEXTS)]
    assert set(wanted) <= set(charts)
    assert all(curve.points for chart in charts.values() for curve in chart.curves)
    if has_evaluations:
        assert [curve.name for curve in charts["Loss"].curves] == ["training", "evaluation"]
        assert str(run.decisive).replace("_", " ") in charts


def assert_have_data(blocks: Any, titles: list[str]) -> None:
    found = {block.title: block for block in blocks}
    assert set(titles) <= set(found), sorted(set(titles) - set(found))
    for title in titles:
        assert has_data(found[title]), title


def has_data(block: Any) -> bool:
    if block.kind == "table":
        return any(cell not in ("–", "", 0) for row in block.rows for cell in row[1:])
    if block.kind == "matrix":
        return sum(map(sum, block.counts)) > 0
    if block.kind == "histogram":
        return any(sum(counts) > 0 for _, counts in block.groups)
    if block.kind == "lines":
        return any(len(points) > 1 for _, points in block.groups)
    if block.kind == "examples":
        return bool(block.items) and all(item.fields or item.head for item in block.items)
    return bool(block.items)
