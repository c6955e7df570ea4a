"""Small images, masks and COCO files for the tests of images."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def draw(path: Path, number: int = 0, size: tuple[int, int] = (8, 6), **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, **options)
    return path


def draw_turned(path: Path, number: int = 0, size: tuple[int, int] = (8, 6)) -> Path:
    """Write an image that EXIF says to turn by a quarter; size is as stored."""
    exif = Image.Exif()
    exif[274] = 6
    return draw(path, number, size, exif=exif)


def draw_ids(path: Path, ids: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(ids, np.uint8)).save(path)
    return path


def class_folders(folder: Path, num_each: int = 10, start: int = 0) -> Path:
    for place, name in enumerate(("cat", "dog")):
        for number in range(num_each):
            draw(folder / name / f"{number:03}.png", start + 1000 * place + number)
    return folder


def mask_folders(folder: Path, num_images: int = 10, num_classes: int = 3, start: int = 0) -> Path:
    for number in range(num_images):
        draw(folder / "images" / f"{number:03}.jpg", start + number)
        ids = (np.arange(48).reshape(6, 8) + number) % num_classes
        draw_ids(folder / "masks" / f"{number:03}.png", ids)
    return folder


def coco(
    path: Path,
    annotations: list[dict[str, Any]],
    num_images: int = 6,
    images: list[dict[str, Any]] | None = None,
    categories: list[dict[str, Any]] | None = None,
    start: int = 0,
) -> Path:
    """Write a COCO json and its images (20 x 10) in images/ beside it; ids are 100, 101, ..., categories 7 and 3."""
    if images is None:
        images = []
        for number in range(start, start + num_images):
            draw(path.parent / "images" / f"{number}.png", number, (20, 10))
            images.append({"id": 100 + number, "file_name": f"{number}.png", "width": 20, "height": 10})
    if categories is None:
        categories = [{"id": 7, "name": "dog"}, {"id": 3, "name": "cat"}]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"images": images, "annotations": annotations, "categories": categories}))
    return path


def annotation(image_id: int, category_id: int = 7, bbox: Any = (2, 3, 4, 5), **more: Any) -> dict[str, Any]:
    return {"image_id": image_id, "category_id": category_id, "bbox": list(bbox), "iscrowd": 0, "area": 20} | more
