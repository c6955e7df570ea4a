"""The demo data of a task by its name, as rows or as files; nothing is downloaded, and torch is not imported."""

from __future__ import annotations

from pathlib import Path

from loopwright.demos.demo_data import DemoData
from loopwright.demos.demo_folder import NOTES, check_folder, place_files
from loopwright.errors import ConfigError
from loopwright.tasks.registry import get_task


def load_demo(task: str) -> DemoData:
    """Return the demo data of a task as rows.

    The same Python gives the same rows on every machine; other versions differ slightly.

    Raises:
        DataError: there is no such task, its demo has images or it has none, or this Python has no sources of its
            standard library.
    """
    return get_task(task).demo_data()


def write_demo(
    task: str, folder: str | Path, *, variant: str | None = None, source: str | Path | None = None
) -> dict[str, Path]:
    """Write the demo data of a task as `train` and `validation` files that the command line reads.

    It also writes `demo.json`: the source, the licence, the number of rows, and the fingerprint. Idempotent.

    Args:
        folder: created if missing.
        variant: other data for the same task, such as "fashion" (Fashion-MNIST) for image-classification; None for
            the usual data, which is the same everywhere: it does not depend on installed packages.
        source: for "fashion", the folder of its four gz files; None for Debian's location.

    Returns:
        The paths of "train", "validation" and "notes"; for images the first two are folders or COCO files.

    Raises:
        ConfigError: the task has no such variant.
        DataError: as `load_demo`; or the folder has other files of these names, which stay unchanged.
    """
    found, target = get_task(task), Path(folder)
    if variant is not None and variant not in found.demo_variants:
        expected = " or ".join(map(repr, (*found.demo_variants, None)))
        raise ConfigError(f"the demo of {task} has no variant {variant!r}: expected {expected}")
    if source is not None and variant is None:
        raise ConfigError(f"source={str(source)!r} is for a variant that is read from files: give variant too")
    check_folder(target, task)
    demo = found.demo_files(variant, source)
    place_files(target, demo.files, {"task": task, **demo.notes})
    return {**{split: target / name for split, name in demo.splits.items()}, "notes": target / NOTES}
