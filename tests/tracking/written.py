"""Reading back what trackers have written, and a folder of a test for trackio."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the points of each curve that TensorBoard shows for a folder."""
    accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return {tag: [(point.step, point.value) for point in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def points(name: str, project: str = "loopwright") -> dict[str, list[tuple[int, float]]]:
    """Return the points of each curve that trackio has for a run."""
    storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
    curves: dict[str, list[tuple[int, float]]] = {}
    for entry in storage.get_logs(project, name):
        for curve, value in entry.items():
            if curve not in ("step", "timestamp"):
                curves.setdefault(curve, []).append((entry["step"], value))
    return curves


def configs(project: str = "loopwright") -> dict[str, dict]:
    """Return the settings of each run that trackio has, by its name."""
    return {run.name: run.config for run in importlib.import_module("trackio").Api().runs(project)}


@contextmanager
def trackio_in(folder: Path) -> Iterator[Path]:
    """Let trackio write into a folder: it reads the name of its folder once, when it is imported."""

    def forget() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
            del sys.modules[name]

    forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(folder))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield folder
    forget()
