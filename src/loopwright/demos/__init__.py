"""Demo data without network or download, for every built-in task. Each task says what its demo is.

    from loopwright.demos import find_minilm, load_demo, write_demo

    demo = load_demo("question-answering")      # demo.train, demo.validation: lists of dicts; demo.fingerprint
    paths = write_demo("translation", "dates")  # paths of "train", "validation" (csv here) and "notes" (demo.json)
    minilm = find_minilm()                      # minilm.folder for from_pretrained, or None and minilm.problem

Texts are the docstrings of the running Python's own standard library (`stdlib_docs`) and generated dates (`dates`).
Training and validation share no function name (language modelling: no module; areas: no paragraph; dates: no day).
Images are scikit-learn's digits, alone or on its two photos (`images`); training and validation share no digit and no
half of a photo. The "fashion" variant is Fashion-MNIST, if Debian's package is installed. Nothing here imports torch.
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
