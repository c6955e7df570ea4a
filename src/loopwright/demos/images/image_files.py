"""The demos of the vision tasks as files: folders of PNGs by class, PNGs with masks, PNGs with COCO files."""

from __future__ import annotations

import io
import json
import platform
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loopwright.data.pictures.palette import palette
from loopwright.data.vision_extra import pillow
from loopwright.demos.demo_data import DemoFiles
from loopwright.demos.demo_folder import digest_of
from loopwright.demos.images.digits import LabelledImages, load_digits
from loopwright.demos.images.fashion import FOLDER, load_fashion
from loopwright.demos.images.scenes import NAMES, SIDE, DigitScene, SceneParts, digit_scenes, load_parts
from loopwright.sources.images.masks import run_lengths

SPLITS = ("train", "validation")
NUM_VALIDATION = 120
_PURPOSE = "demo data of images"


def class_folders(variant: str | None, source: str | Path | None) -> DemoFiles:
    """Return `train/<class>/<number>.png` and `validation/...`; the numbering continues across the splits."""
    pillow(purpose=_PURPOSE)
    found = load_fashion(FOLDER if source is None else source) if variant == "fashion" else load_digits()
    digits = max(4, len(str(len(found.images) - 1)))
    files = {
        f"{split}/{found.names[found.labels[position]]}/{position:0{digits}}.png": _png(found.images[position])
        for split in SPLITS
        for position in found.positions(split)
    }
    num_rows = {split: len(found.positions(split)) for split in SPLITS}
    return _described(files, {split: split for split in SPLITS}, num_rows, found.names, found, variant)


def mask_folders(num_train: int) -> DemoFiles:
    """Return `train/images`, `train/masks` of class ids with a palette, both for validation, and `id2label.json`."""
    pillow(purpose=_PURPOSE)
    parts, num_scenes = load_parts(), {"train": num_train, "validation": NUM_VALIDATION}
    names = ("background", *NAMES)
    files: dict[str, bytes] = {}
    for split in SPLITS:
        for index, scene in enumerate(digit_scenes(parts, split, num_scenes[split])):
            files[f"{split}/images/{index:04}.png"] = _png(scene.image)
            files[f"{split}/masks/{index:04}.png"] = _png(scene.semantic, has_palette=True)
    files["id2label.json"] = json.dumps(dict(enumerate(names)), indent=1).encode() + b"\n"
    return _described(files, {split: split for split in SPLITS}, num_scenes, names, parts)


def coco_files(num_train: int, has_masks: bool) -> DemoFiles:
    """Return `train.json` and `validation.json` in COCO's format, with digits as category ids, and `images`."""
    pillow(purpose=_PURPOSE)
    parts, num_scenes = load_parts(), {"train": num_train, "validation": NUM_VALIDATION}
    files: dict[str, bytes] = {}
    for split in SPLITS:
        images: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        for index, scene in enumerate(digit_scenes(parts, split, num_scenes[split])):
            name = f"{split}_{index:04}.png"
            files[f"images/{name}"] = _png(scene.image)
            images.append({"id": index + 1, "file_name": name, "width": SIDE, "height": SIDE})
            annotations += _annotations(scene, index + 1, len(annotations), has_masks)
        content = {
            "info": {"description": f"digit scenes, {split}: {parts.source}"},
            "licenses": [{"id": 1, "name": parts.licence, "url": ""}],
            "images": images,
            "annotations": annotations,
            "categories": [{"id": digit, "name": name, "supercategory": "digit"} for digit, name in enumerate(NAMES)],
        }
        files[f"{split}.json"] = json.dumps(content, separators=(",", ":")).encode() + b"\n"
    return _described(files, {split: f"{split}.json" for split in SPLITS}, num_scenes, NAMES, parts)


def _described(
    files: dict[str, bytes],
    splits: dict[str, str],
    num_rows: dict[str, int],
    classes: Sequence[str],
    origin: LabelledImages | SceneParts,
    variant: str | None = None,
) -> DemoFiles:
    """Return the files with their notes, which name the versions of the packages that their bytes depend on."""
    packages = {}
    for name in ("numpy", "pillow", "scikit-learn"):
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    notes = {
        "variant": variant,
        "source": origin.source,
        "licence": origin.licence,
        "python": platform.python_version(),
        "packages": packages,
        "classes": list(classes),
        "rows": num_rows,
        "fingerprint": digest_of(files),
    }
    return DemoFiles(files, splits, notes)


def _annotations(scene: DigitScene, image_id: int, num_before: int, has_masks: bool) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for mask, digit, (x0, y0, x1, y1) in zip(scene.masks, scene.classes, scene.boxes, strict=True):
        number = num_before + len(found) + 1  # from 1 on: some readers treat 0 as none
        annotation: dict[str, Any] = {"id": number, "image_id": image_id, "category_id": digit}
        annotation |= {"bbox": [x0, y0, x1 - x0, y1 - y0], "area": int(mask.sum()), "iscrowd": 0}
        if has_masks:
            annotation["segmentation"] = run_lengths(mask)
        found.append(annotation)
    return found


def _png(pixels: npt.NDArray[np.uint8], has_palette: bool = False) -> bytes:
    """Return an image of one or three channels as a PNG without a timestamp."""
    image = pillow().fromarray(pixels)
    if has_palette:
        # The background is black; each other class has its own color. The values stay unchanged.
        image.putpalette([0, 0, 0, *palette().ravel().tolist()])
    content = io.BytesIO()
    image.save(content, "PNG", compress_level=1)  # twice as fast as the default
    return content.getvalue()
