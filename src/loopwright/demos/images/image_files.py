"""The demos of the vision tasks as files: folders of PNGs by class, PNGs with masks, PNGs with COCO files."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loopwright.data.pictures.palette import palette
from loopwright.data.vision_extra import pillow
from loopwright.demos.images.digits import load_digits
from loopwright.demos.images.fashion import FOLDER, load_fashion
from loopwright.demos.images.scenes import NAMES, SIDE, DigitScene, SceneParts, digit_scenes, load_parts

NUM_SCENES: Mapping[str, Mapping[str, int]] = {
    "semantic-segmentation": {"train": 800, "validation": 120},
    "object-detection": {"train": 1000, "validation": 120},
    "instance-segmentation": {"train": 1000, "validation": 120},
}
SPLITS = ("train", "validation")
_PACKAGES = ("numpy", "pillow", "scikit-learn")


@dataclass(frozen=True)
class ImageFiles:
    """The files of a demo, and their description.

    Attributes:
        files: contents by path, with "/" between the parts.
        splits: the file or folder of "train" and of "validation".
        num_rows: the number of images of each.
        names: the names of the classes, by id.
    """

    files: dict[str, bytes]
    splits: dict[str, str]
    num_rows: dict[str, int]
    names: tuple[str, ...]
    source: str
    licence: str


def make_image_files(task: str, variant: str = "digits", source: str | Path | None = None) -> ImageFiles:
    """Return the files of a vision task's demo; `write_demo` has checked task and variant.

    Args:
        variant: "digits", or "fashion" for image-classification and masked-image-modeling.
        source: for "fashion", the folder of its four gz files; None for Debian's location.

    Raises:
        InputError: Pillow is not installed.
        DataError: the files of "fashion" are missing or damaged.
    """
    pillow(purpose="demo data of images")
    if task not in NUM_SCENES:
        return _class_folders(variant, source)
    parts = load_parts()
    return _mask_folders(parts, NUM_SCENES[task]) if task == "semantic-segmentation" else _coco_files(parts, task)


def package_versions() -> dict[str, str]:
    """Return the versions of the installed packages that the bytes of the files depend on."""
    found: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def run_lengths(mask: npt.NDArray[np.bool_]) -> list[int]:
    """Return a mask as COCO's counts: column by column, alternating lengths of 0s and 1s."""
    values = mask.T.ravel()
    changes = np.flatnonzero(values[1:] != values[:-1]) + 1
    lengths = np.diff(np.concatenate([[0], changes, [len(values)]])).tolist()
    return [0, *lengths] if values[0] else lengths


def _class_folders(variant: str, source: str | Path | None) -> ImageFiles:
    """Return `train/<class>/<number>.png` and `validation/...`; the numbering continues across the splits."""
    found = load_fashion(FOLDER if source is None else source) if variant == "fashion" else load_digits()
    digits = max(4, len(str(len(found.images) - 1)))
    files = {
        f"{split}/{found.names[found.labels[position]]}/{position:0{digits}}.png": _png(found.images[position])
        for split in SPLITS
        for position in found.positions(split)
    }
    num_rows = {split: len(found.positions(split)) for split in SPLITS}
    return ImageFiles(files, {split: split for split in SPLITS}, num_rows, found.names, found.source, found.licence)


def _mask_folders(parts: SceneParts, num_scenes: Mapping[str, int]) -> ImageFiles:
    """Return `train/images`, `train/masks`, the same for validation, and `id2label.json`.

    Mask values are class ids, with a palette that shows them in color.
    """
    names = ("background", *NAMES)
    files: dict[str, bytes] = {}
    for split in SPLITS:
        for index, scene in enumerate(digit_scenes(parts, split, num_scenes[split])):
            files[f"{split}/images/{index:04}.png"] = _png(scene.image)
            files[f"{split}/masks/{index:04}.png"] = _png(scene.semantic, has_palette=True)
    files["id2label.json"] = json.dumps(dict(enumerate(names)), indent=1).encode() + b"\n"
    splits = {split: split for split in SPLITS}
    return ImageFiles(files, splits, dict(num_scenes), names, parts.source, parts.licence)


def _coco_files(parts: SceneParts, task: str) -> ImageFiles:
    """Return `train.json` and `validation.json` in COCO's format, and all images in `images`.

    A category's id is its digit. Masks are for instance-segmentation only, as uncompressed counts.
    """
    files: dict[str, bytes] = {}
    for split in SPLITS:
        images: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        for index, scene in enumerate(digit_scenes(parts, split, NUM_SCENES[task][split])):
            name = f"{split}_{index:04}.png"
            files[f"images/{name}"] = _png(scene.image)
            images.append({"id": index + 1, "file_name": name, "width": SIDE, "height": SIDE})
            annotations += _annotations(scene, index + 1, len(annotations), has_masks=task == "instance-segmentation")
        content = {
            "info": {"description": f"digit scenes, {split}: {parts.source}"},
            "licenses": [{"id": 1, "name": parts.licence, "url": ""}],
            "images": images,
            "annotations": annotations,
            "categories": [{"id": digit, "name": name, "supercategory": "digit"} for digit, name in enumerate(NAMES)],
        }
        files[f"{split}.json"] = json.dumps(content, separators=(",", ":")).encode() + b"\n"
    splits = {split: f"{split}.json" for split in SPLITS}
    return ImageFiles(files, splits, dict(NUM_SCENES[task]), NAMES, parts.source, parts.licence)


def _annotations(scene: DigitScene, image_id: int, num_before: int, has_masks: bool) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for mask, digit, (x0, y0, x1, y1) in zip(scene.masks, scene.classes, scene.boxes, strict=True):
        annotation: dict[str, Any] = {
            # From 1 on: some readers treat 0 as none.
            "id": num_before + len(found) + 1,
            "image_id": image_id,
            "category_id": digit,
            "bbox": [x0, y0, x1 - x0, y1 - y0],
            "area": int(mask.sum()),
            "iscrowd": 0,
        }
        if has_masks:
            annotation["segmentation"] = {"size": [SIDE, SIDE], "counts": run_lengths(mask)}
        found.append(annotation)
    return found


def _png(pixels: npt.NDArray[np.uint8], has_palette: bool = False) -> bytes:
    """Return an image of one or three channels as a PNG without a timestamp."""
    image = pillow().fromarray(pixels)
    if has_palette:
        # The background is black; each other class has its own color. The values stay unchanged.
        image.putpalette([0, 0, 0, *palette().ravel().tolist()])
    content = io.BytesIO()
    image.save(content, "PNG")
    return content.getvalue()
