"""Small images to train on: squares of a colour on noise, in folders or in a table."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

COLORS = {"blue": (40, 60, 220), "green": (40, 200, 60), "red": (220, 50, 40)}
SIDE = 12


def write_squares(folder, number=45, seed=0, split=None, names=tuple(COLORS)):
    """Write a folder per class with images of squares, and return the folder."""
    rng = np.random.default_rng(seed)
    for index in range(number):
        name = names[index % len(names)]
        pixels = rng.integers(0, 120, (SIDE, SIDE, 3), dtype=np.uint8)
        left, top = rng.integers(0, SIDE - 6, 2)
        pixels[top : top + 6, left : left + 6] = COLORS[name]
        target = folder / split / name if split else folder / name
        target.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(target / f"{index:03}.png")
    return folder


def write_paths(path, images, labels=None):
    """Write a jsonl file with a path per line, and a label where there are labels; return it."""
    rows = [{"image": str(image)} for image in images]
    if labels is not None:
        rows = [{**row, "label": label} for row, label in zip(rows, labels, strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def images_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.png"))


def pixels_of(path):
    with Image.open(path) as image:
        return np.array(image.convert("RGB"))
