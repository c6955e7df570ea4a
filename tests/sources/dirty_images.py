"""Dirty image data as people have it, a function per kind: each writes a data set of its own into a folder.

`FIXABLE` lists the kinds that are refused, by name: (task, function, code, the flags that the fix has to offer first).
"""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tests.sources.drawing import annotation, class_folders, coco, draw, mask_folders

NUM_IMAGES = 12
PALETTE = np.array([[0, 0, 0], [255, 0, 0], [0, 0, 255]], np.uint8)


def scenes(folder: Path, save: Callable[[Path, np.ndarray], Any], num_classes: int = 2, side: int = 24) -> Path:
    """Write images with a bright square on a dark ground, and masks by `save(path without ending, class ids)`."""
    for number in range(NUM_IMAGES):
        rng = np.random.default_rng(number)
        ids = np.zeros((side, side), np.uint8)
        x, y = rng.integers(0, side // 2, 2)
        ids[y : y + side // 2, x : x + side // 2] = 1 + number % (num_classes - 1)
        pixels = (ids[..., None] * 90 + rng.integers(0, 40, (side, side, 3))).clip(0, 255).astype(np.uint8)
        for name in ("images", "masks"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / "images" / f"{number}.png")
        save(folder / "masks" / str(number), ids)
    return folder


def masks_of_0_and_255(folder: Path) -> Path:
    return scenes(folder, lambda path, ids: Image.fromarray(ids * 255).save(f"{path}.png"))


def masks_of_0_and_255_with_names(folder: Path) -> Path:
    masks_of_0_and_255(folder)
    (folder / "id2label.json").write_text('{"0": "ground", "255": "square"}')
    return folder


def masks_of_far_values(folder: Path) -> Path:
    """Grey masks of 0, 2000 and 4000, in 16 bits."""
    return scenes(folder, lambda path, ids: Image.fromarray(ids.astype(np.uint16) * 2000).save(f"{path}.png"), 3)


def masks_of_colors(folder: Path) -> Path:
    return scenes(folder, lambda path, ids: Image.fromarray(PALETTE[ids]).save(f"{path}.png"), 3)


def masks_with_alpha(folder: Path) -> Path:
    return scenes(folder, lambda path, ids: Image.fromarray(PALETTE[ids]).convert("RGBA").save(f"{path}.png"), 3)


def masks_as_jpeg(folder: Path) -> Path:
    return scenes(folder, lambda path, ids: Image.fromarray(ids * 255).save(f"{path}.jpg", quality=70))


def masks_of_colors_as_jpeg(folder: Path) -> Path:
    return scenes(folder, lambda path, ids: Image.fromarray(PALETTE[ids]).save(f"{path}.jpg", subsampling=0), 3)


def masks_with_blurred_edges(folder: Path) -> Path:
    def save(path: Path, ids: np.ndarray) -> None:
        Image.fromarray(ids * 255).resize((240, 240), Image.Resampling.BICUBIC).save(f"{path}.png")
        Image.open(path.parent.parent / "images" / f"{path.name}.png").resize((240, 240)).save(
            path.parent.parent / "images" / f"{path.name}.png"
        )

    return scenes(folder, save)


def masks_that_need_no_flag(folder: Path) -> Path:
    """Class ids as one bit, with a palette, as grey RGB, and as RGBA with equal channels, at half the size too."""

    def save(path: Path, ids: np.ndarray) -> None:
        image = Image.fromarray(ids)
        palette = image.copy()
        palette.putpalette(PALETTE.ravel().tolist())
        kinds = [Image.fromarray(ids == 1), palette, image.convert("RGB"), image.convert("RGBA")]
        kinds.append(image.resize((12, 12), Image.Resampling.NEAREST))
        kinds[int(path.name) % len(kinds)].save(f"{path}.png")

    return scenes(folder, save)


def a_mask_of_another_shape(folder: Path) -> Path:
    mask_folders(folder)
    Image.fromarray(np.zeros((8, 6), np.uint8)).save(folder / "masks" / "002.png")
    return folder


def a_photo_among_masks(folder: Path) -> Path:
    draw(mask_folders(folder) / "masks" / "002.png", 1)
    return folder


def _coco(folder: Path, *extra: dict[str, Any], **changed: Any) -> Path:
    outline = {"segmentation": [[2, 3, 6, 3, 6, 8]]}
    path = coco(folder / "train.json", [annotation(100 + n, 3 + 4 * (n % 2), **outline) for n in range(6)])
    content = json.loads(path.read_text())
    content["annotations"] += extra
    for name, entries in changed.items():
        content[name] += entries
    path.write_text(json.dumps(content))
    return folder


def coco_of_unknown_images(folder: Path) -> Path:
    return _coco(folder, annotation(999), annotation(998))


def coco_of_unnamed_categories(folder: Path) -> Path:
    return _coco(folder, annotation(101, 9), annotation(102, 9))


def coco_without_outlines(folder: Path) -> Path:
    return _coco(folder, annotation(101), annotation(102, segmentation=[]))


def coco_of_impossible_boxes(folder: Path) -> Path:
    boxes: list[Any] = [(float("nan"), 1, 2, 3), (1, 2, 3), (1, 2, "a", 4), (5, 5, 0, 0), (90, 90, 5, 5), (15, 5, 9, 9)]
    return _coco(folder, *(annotation(101, bbox=box) for box in boxes))


def coco_of_repeated_ids(folder: Path) -> Path:
    draw(folder / "images" / "again.png", 77, (20, 10))
    images = [{"id": 100, "file_name": "again.png", "width": 20, "height": 10}, {"file_name": "x.png"}]
    again = annotation(101, 3, segmentation=[[1, 1, 5, 1, 5, 5]])
    return _coco(folder, again, again, images=images, categories=[{"id": 7, "name": "cow"}, {"id": 8}])


def coco_of_another_size(folder: Path) -> Path:
    _coco(folder)
    draw(folder / "images" / "3.png", 3, (40, 30))
    return folder


def _yolo(folder: Path, *lines: str) -> Path:
    for number in range(6):
        draw(folder / "images" / f"{number}.png", number, (20, 10))
        (folder / "labels").mkdir(exist_ok=True)
        (folder / "labels" / f"{number}.txt").write_text(f"\ufeff{number % 2} 0.5 0.5 0.4 0.4\n")
    (folder / "labels" / "1.txt").write_text("\n".join(["0 0.5 0.5 0.2 0.2", *lines]))
    (folder / "labels" / "without_image.txt").write_text("0 0.5 0.5 0.4 0.4\n")
    (folder / "classes.txt").write_text("cat\ndog\n")
    return folder


def yolo_of_damaged_lines(folder: Path) -> Path:
    return _yolo(folder, "cat 0.5 0.5 0.1 0.1", "0 0.5 0.5 0.1", "1 nan 0.5 0.1 0.1")


def yolo_of_unnamed_classes(folder: Path) -> Path:
    return _yolo(folder, "4 0.5 0.5 0.1 0.1", "-1 0.5 0.5 0.1 0.1")


def objects_that_are_none(folder: Path) -> Path:
    """A jsonl file whose objects are broken JSON, have no category, or fewer boxes than categories in some rows."""
    broken: list[Any] = ["[broken", {"bbox": [[1, 2, 3, 4]]}, {"bbox": [[1, 2, 3, 4]], "category": ["a", "b"]}]
    lines = []
    for number in range(9):
        draw(folder / f"{number}.png", number, (20, 10))
        good = {"bbox": [[1, 2, 3, 4]], "category": ["ab"[number % 2]]}
        lines.append(json.dumps({"image": f"{number}.png", "objects": broken[number] if number < 3 else good}))
    (folder / "train.jsonl").write_text("\n".join(lines))
    return folder


def images_and_masks_as_classes(folder: Path) -> Path:
    train = masks_of_0_and_255(folder / "train")
    (train / "images").rename(train / "JPEGImages")
    (train / "masks").rename(train / "SegmentationClass")
    return folder


def images_and_texts_as_classes(folder: Path) -> Path:
    return _yolo(folder)


def header_of_a_huge_png(path: Path, width: int = 60_000, height: int = 60_000) -> Path:
    """Write a valid PNG of a few bytes that would decode to gigabytes: nothing reads beyond its header."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + b"\x08\x02\0\0\0"
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(bytes(100))), chunk(b"IEND", b"")]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))
    return path


def a_huge_image(folder: Path) -> Path:
    header_of_a_huge_png(class_folders(folder) / "cat" / "huge.png")
    return folder


def damaged_images(folder: Path) -> Path:
    """A photo that is cut off, an empty file, a text and a web page with the ending of an image, and a dead link."""
    class_folders(folder)
    cut = draw(folder / "cat" / "cut.jpg", 5, (64, 64))
    cut.write_bytes(cut.read_bytes()[:700])
    (folder / "cat" / "empty.png").touch()
    (folder / "dog" / "notes.jpg").write_text("not an image")
    (folder / "dog" / "page.webp").write_text("<html>404</html>")
    (folder / "dog" / "link.png").symlink_to("nowhere.png")
    return folder


def a_cluttered_folder(folder: Path) -> Path:
    """Class folders with what other programs leave there, and with images of all kinds; 26 can be read."""
    class_folders(folder)
    for name in (".DS_Store", "Thumbs.db", "desktop.ini", "cat/.DS_Store", "cat/Thumbs.db", "dog/._001.png"):
        (folder / name).write_bytes(b"\0\1")
    draw(folder / "__MACOSX" / "cat" / "001.png")
    draw(folder / ".cache" / "001.png")
    (folder / "cat" / "photo.HEIC").write_bytes(b"ftypheic")
    draw(folder / "cat" / "UPPER.JPG", 91)
    draw(folder / "cat" / "a name with spaces 猫.png", 92)
    draw(folder / "cat" / "nested" / "deeper" / "1.webp", 93)
    Image.fromarray(np.full((6, 8), 40_000, np.uint16)).save(folder / "dog" / "deep.png")
    Image.new("CMYK", (8, 6), (9, 99, 9, 9)).save(folder / "dog" / "print.jpg")
    frames = [Image.new("P", (8, 6), number) for number in (3, 200)]
    frames[0].save(folder / "dog" / "moving.gif", save_all=True, append_images=frames[1:])
    return folder


SEGMENT, DETECT, INSTANCES = "semantic-segmentation", "object-detection", "instance-segmentation"
DROP = "--bad_annotations drop"
FIXABLE: dict[str, tuple[str, Callable[[Path], Path], str, str]] = {
    function.__name__: (task, function, code, flags)
    for task, function, code, flags in [
        (SEGMENT, masks_of_0_and_255, "data.one_class", "--mask_values 0,255"),
        (SEGMENT, masks_of_0_and_255_with_names, "data.one_class", "--mask_values 0,255"),
        (SEGMENT, masks_of_far_values, "data.classes", "--mask_values auto"),
        (SEGMENT, masks_of_colors, "data.masks", "--mask_values auto"),
        (SEGMENT, masks_with_alpha, "data.masks", "--mask_values auto"),
        (SEGMENT, masks_as_jpeg, "data.masks", "--mask_values 0,255"),
        (SEGMENT, masks_of_colors_as_jpeg, "data.masks", "--mask_values"),
        (SEGMENT, a_mask_of_another_shape, "data.size", DROP),
        (SEGMENT, a_photo_among_masks, "data.masks", DROP),
        (DETECT, coco_of_unknown_images, "data.annotations", DROP),
        (DETECT, coco_of_unnamed_categories, "data.classes", DROP),
        (INSTANCES, coco_without_outlines, "data.outlines", DROP),
        (DETECT, coco_of_impossible_boxes, "data.boxes", DROP),
        (DETECT, coco_of_repeated_ids, "data.annotations", DROP),
        (DETECT, coco_of_another_size, "data.size", DROP),
        (DETECT, yolo_of_damaged_lines, "data.boxes", DROP),
        (DETECT, yolo_of_unnamed_classes, "data.classes", DROP),
        (DETECT, objects_that_are_none, "data.boxes", DROP),
        ("image-classification", damaged_images, "data.image", "--bad_images drop"),
        ("image-classification", a_huge_image, "data.image", "--bad_images drop"),
        ("image-classification", images_and_masks_as_classes, "data.folder", "--file_kind image-folder"),
    ]
}
