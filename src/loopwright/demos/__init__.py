"""Demo data without network or download, for every built-in task. Each task says what its demo is.

    from loopwright.demos import find_minilm, load_demo, write_demo

    demo = load_demo("question-answering")      # demo.train, demo.validation: lists of dicts; demo.fingerprint
    paths = write_demo("translation", "dates")  # paths of "train", "validation" (csv here) and "notes" (demo.json)
    minilm = find_minilm()                      # minilm.folder for from_pretrained, or None and minilm.problem

Columns and files, by task:

    text-classification    text, label                                   csv
    token-classification   tokens, ner_tags (IOB2: PARAM, EXC, VALUE)    jsonl
    question-answering     id, question, context, answers (as SQuAD)     jsonl
    causal-lm, masked-lm   text                                          jsonl
    multiple-choice        sent1, sent2, ending0 to ending3, label       csv
    summarization          document, summary                             jsonl
    sentence-embedding     anchor, positive                              csv
    translation            source, target                                csv

The texts are the docstrings of the running Python's own standard library (`stdlib_docs`) and generated dates (`dates`);
`dates.written_dates` generates more of these endlessly. Training and validation share no function name (language
modelling: no module; areas: no paragraph; dates: no day). Nothing here imports torch.

Images are only written as files (`images`):

    image-classification, masked-image-modeling    train/<digit>/0000.png, validation/...        1,437 and 360
    semantic-segmentation                          train/images, train/masks, validation/...     800 and 120
    object-detection, instance-segmentation        train.json, validation.json (COCO), images    1,000 and 120

The digits are scikit-learn's, the scenes of segmentation and detection are digits on its two photos; training and
validation share no digit and no half of a photo. `write_demo("image-classification", folder, variant="fashion")` uses
Fashion-MNIST instead, if Debian's package is installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from loopwright.demos.demo_data import DemoData, DemoFiles
from loopwright.demos.minilm import MiniLM, find_minilm

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    load_demo: Callable[[str], DemoData]
    write_demo: Callable[..., dict[str, Path]]

__all__ = ["DemoData", "DemoFiles", "MiniLM", "find_minilm", "load_demo", "write_demo"]


def __getattr__(name: str) -> Any:
    """Import what looks up tasks on first use: this package is below them, and generates the data of several."""
    if name in {"load_demo", "write_demo"}:
        return getattr(import_module("loopwright.tasks.demos"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
