"""Small images with red and blue rectangles, in COCO files: objects to find."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

NAMES = ["blue", "red"]
COLORS = [(40, 60, 230), (220, 40, 40)]
FIRST_ID = 5


def write_split(folder: Path, split: str, number: int, size: tuple[int, int], seed: int) -> Path:
    """Write images of up to two rectangles and their COCO file; the first image has none, the second a crowd."""
    rng = np.random.default_rng(seed)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    (folder / split).mkdir(parents=True)
    for index in range(number):
        pixels = rng.integers(60, 120, (*size, 3)).astype(np.uint8)
        for which in range(0 if index == 0 else 1 + index % 2):
            height, width = (int(side) for side in rng.integers(max(size) // 3, max(size) // 2, 2))
            top, left = int(rng.integers(0, size[0] - height)), int(rng.integers(0, size[1] - width))
            label = (index + which) % 2
            pixels[top : top + height, left : left + width] = COLORS[label]
            right, bottom = left + width, top + height
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": 100 + index,
                    "category_id": FIRST_ID + label,
                    "bbox": [left, top, width, height],
                    "segmentation": [[left, top, right, top, right, bottom, left, bottom]],
                    "iscrowd": 0,
                    "area": width * height,
                }
            )
        if index == 1:
            whole = {"size": list(size), "counts": [0, size[0] * size[1]]}
            crowd = {"category_id": FIRST_ID, "iscrowd": 1, "segmentation": whole, "area": size[0] * size[1]}
            crowd |= {"id": 900, "image_id": 101, "bbox": [0, 0, size[1], size[0]]}
            annotations.append(crowd)
        Image.fromarray(pixels).save(folder / split / f"{index:03}.png")
        images.append({"id": 100 + index, "file_name": f"{index:03}.png", "height": size[0], "width": size[1]})
    categories = [{"id": FIRST_ID + number, "name": name} for number, name in enumerate(NAMES)]
    path = folder / f"{split}.json"
    path.write_text(json.dumps({"images": images, "annotations": annotations, "categories": categories}))
    return path


def write_boxes(folder: Path, number: int = 32) -> Path:
    """Write a data folder; the validation images are larger than those of training, and not square."""
    write_split(folder, "train", number, (32, 32), 0)
    write_split(folder, "validation", 8, (40, 56), 1)
    return folder


def write_sample(sample: Path, folder: Path) -> Path:
    """Write a COCO file of two images; the second has no objects. Return the file."""
    categories = {17: "cat", 63: "couch", 65: "bed", 75: "remote"}
    images = []
    folder.mkdir(parents=True)
    for number in (39769, 4016):
        name = f"{number:012}.png"
        shutil.copy(sample / name, folder / name)
        with Image.open(sample / name) as image:
            images.append({"id": number, "file_name": name, "width": image.width, "height": image.height})
    coco = {"images": images, "annotations": json.loads((sample / "coco_annotations.txt").read_text())}
    coco["categories"] = [{"id": number, "name": name} for number, name in categories.items()]
    path = folder / "photos.json"
    path.write_text(json.dumps(coco))
    return path
