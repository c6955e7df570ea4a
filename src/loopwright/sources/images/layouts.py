"""Detect the layout of an image folder and its splits, and return the settings to open its tables."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from loopwright.errors import InputError
from loopwright.sources.files import Say, given_twice
from loopwright.sources.hub import open_hub
from loopwright.sources.images.coco import is_coco
from loopwright.sources.images.folders import list_images, no_images
from loopwright.sources.images.names import NAMES_FILES, find_names_file, read_yaml
from loopwright.sources.images.reading import is_image_name
from loopwright.sources.images.tables import TableOfImages
from loopwright.sources.opening import (
    IMAGE_KINDS,
    KINDS_BY_ENDING,
    SHARD,
    SPLIT_NAMES,
    SPLITS,
    folder_listing,
    is_hub,
    missing_file,
    open_table,
    refuse_empty_names,
    split_of_hub,
)
from loopwright.sources.schema import Schema
from loopwright.sources.tables import Table

IMAGE_FOLDERS = ("images", "image", "imgs", "img", "JPEGImages")
MASK_FOLDERS = ("masks", "mask", "annotations", "labels", "SegmentationClass")
TEXT_FOLDERS = ("labels",)
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")

Settings = dict[str, Any]


class Place(NamedTuple):
    """The location of a split's data, the option that named it, and the settings for `open_table`."""

    path: str
    flag: str
    settings: Settings


class Layout:
    """Finds the data of an image task. `wants`: label, mask, objects, or just the images.

    Args:
        schema: Of the task.
        image_dir: The folder of images, if given.
        names_file: The file of class names, if given.
        settings: Other settings of `open_table`.
    """

    def __init__(self, schema: Schema, image_dir: str | None, names_file: str | None, settings: Settings) -> None:
        scene = schema.scene_role
        self.wants = scene.kind if scene is not None else "label" if schema.label_role is not None else ""
        self.has_outlines = scene is not None and scene.has_outlines
        self.image_dir = image_dir
        self.names_file = names_file
        self.settings = settings

    def open_all(
        self, data: str | Path | None, files: dict[str, str | Path | None], say: Say | None
    ) -> dict[str, Table]:
        """Return the tables by split."""
        places = self.locate(data, files)
        tables: dict[str, Table] = {}
        for split, place in places.items():
            if not Path(place.path).exists() and is_hub(place.path):
                for key, table in open_hub(place.path).items():
                    if split_of_hub(key):
                        names = str(Path(self.names_file).resolve()) if self.names_file is not None else None
                        tables[split_of_hub(key)] = TableOfImages(table, ".", names)
            else:
                tables[split] = open_table(place.path, flag=place.flag, say=say, **place.settings)
        return {split: tables[split] for split in SPLITS if split in tables}

    def locate(self, data: str | Path | None, files: dict[str, str | Path | None]) -> dict[str, Place]:
        """Return the location of each split."""
        refuse_empty_names(data, files)
        named = {
            split: self._named(Path(file).expanduser(), f"--{split}_file")
            for split, file in files.items()
            if file is not None
        }
        if data is None:
            if not named:
                raise InputError("args.value", "no data was given", fix="--data FOLDER   or   --train_file FOLDER")
            return named
        if "train" in named:
            raise given_twice(data, named["train"].path)
        path = Path(data).expanduser()
        if path.is_dir():
            return self._splits(path) | named
        if path.suffix in (".yaml", ".yml") and path.is_file():
            return self._yaml_splits(path) | named
        return {"train": self._named(path, "--data")} | named

    # ------------------------------------------------------------------------------------------- one file or folder

    def _named(self, path: Path, flag: str) -> Place:
        if path.is_dir():
            return self._folder(path, flag)
        if path.is_file():
            return self._file(path, flag)
        if is_hub(str(path)):
            return Place(str(path), flag, {})
        raise missing_file(path, flag)

    def _file(self, path: Path, flag: str, image_dir: str | None = None) -> Place:
        """Return how to read a file: as an image, COCO's json, or a table with a column of images."""
        folder = path.resolve().parent
        if image_dir is None and self.image_dir is not None:
            given = Path(self.image_dir).expanduser()
            if not given.is_dir():
                raise missing_file(given, "--image_dir")
            image_dir = os.path.relpath(given.resolve(), folder)
        if is_image_name(path.name) and self.settings.get("kind") is None:
            return Place(str(path), flag, {"kind": "images"})
        kind = self.settings.get("kind")
        if kind == "coco" or (kind is None and path.name.lower().endswith((".json", ".json.gz")) and is_coco(path)):
            return Place(str(path), flag, {"kind": "coco"} | ({"image_dir": image_dir} if image_dir else {}))
        names: Path | None = None
        if self.names_file is not None:
            names = Path(self.names_file).expanduser().resolve()
        elif self.wants in ("mask", "objects"):
            names = find_names_file(folder)
        found = {"names_file": os.path.relpath(names, folder)} if names is not None else {}
        return Place(str(path), flag, self.settings | {"image_dir": image_dir or ""} | found)

    def _folder(self, folder: Path, flag: str) -> Place:
        kind = self.settings.get("kind")
        if kind in IMAGE_KINDS:
            return Place(str(folder), flag, {"kind": kind} | self._names(folder))
        metadata = [folder / name for name in METADATA if (folder / name).is_file()]
        if metadata and self.wants:
            return self._file(metadata[0], flag, ".")
        inside = {path.name.lower(): path.name for path in folder.iterdir() if path.is_dir()}
        images = next((inside[name.lower()] for name in IMAGE_FOLDERS if name.lower() in inside), None)
        masks = next((inside[name.lower()] for name in MASK_FOLDERS if name.lower() in inside), None)
        if self.wants == "label":
            return Place(str(folder), flag, {"kind": "image-folder"})
        if not self.wants:
            part = {"image_dir": images} if images and masks else {}
            return Place(str(folder), flag, {"kind": "images"} | part)
        if self.wants == "objects" and (coco := self._only_coco(folder)) is not None:
            return self._file(coco, flag)
        if images and masks:
            return self._pair(folder, flag, images, masks)
        if self.wants == "objects" and any(_texts(folder)):
            return Place(
                str(folder), flag, {"kind": "yolo", "image_dir": ".", "annotation_dir": "."} | self._names(folder)
            )
        if not list_images(folder)[0]:
            raise no_images(folder)
        expected = {
            "mask": "images/ and masks/ in it, with equal names",
            "objects": "COCO's json in it, or images/ and labels/ with a text file for each image",
        }[self.wants]
        raise InputError(
            "data.folder",
            f"{flag} {folder} holds images and no {'masks' if self.wants == 'mask' else 'objects'}",
            saw=folder_listing(folder),
            fix=f"{flag} with a folder that has {expected}",
        )

    def _pair(self, folder: Path, flag: str, images: str, annotations: str) -> Place:
        """Return how to read two folders, one of images and one of masks or text files."""
        is_text = self.wants == "objects" and any(_texts(folder / annotations))
        if self.wants == "objects" and not is_text and not self.has_outlines:
            raise InputError(
                "data.annotations",
                f"{flag} {folder}: {annotations} holds no text file of objects",
                saw=folder_listing(folder / annotations),
                fix="write one .txt per image: class x_center y_center width height",
            )
        kind = {"kind": "yolo" if is_text else "mask-folder", "image_dir": images, "annotation_dir": annotations}
        return Place(str(folder), flag, kind | self._names(folder))

    def _names(self, folder: Path) -> Settings:
        if self.names_file is None:
            return {}
        return {"names_file": os.path.relpath(Path(self.names_file).expanduser().resolve(), folder.resolve())}

    def _only_coco(self, folder: Path) -> Path | None:
        found = [path for path in sorted(folder.glob("*.json")) if path.name not in NAMES_FILES and is_coco(path)]
        if len(found) > 1:
            raise InputError(
                "data.folder",
                f"{folder} has several files of annotations",
                saw=[path.name for path in found],
                fix=f"--train_file {found[0]}",
            )
        return found[0] if found else None

    # ----------------------------------------------------------------------------------------- a folder with splits

    def _splits(self, folder: Path) -> dict[str, Place]:
        if self.wants == "objects" and (found := self._coco_splits(folder)):
            return found
        files = self._file_splits(folder)
        if files:
            return files
        parts = _split_folders(folder)
        if "train" in parts and not self._are_classes(folder, parts):
            return {split: self._folder(folder / name, "--data") for split, name in parts.items()}
        images = next((name for name in IMAGE_FOLDERS if "train" in _split_folders(folder / name)), None)
        if images is not None and self.wants != "label":
            return self._parallel_splits(folder, images)
        for name in ("data.yaml", "data.yml", "dataset.yaml"):
            if self.wants == "objects" and (folder / name).is_file() and (found := self._yaml_splits(folder / name)):
                return found
        return {"train": self._folder(folder, "--data")}

    def _are_classes(self, folder: Path, parts: dict[str, str]) -> bool:
        """Whether a folder `train` is one class among others, as with vehicles."""
        if self.wants == "mask" or self.wants == "objects" or len(parts) > 1:
            return False
        others = [path for path in folder.iterdir() if path.is_dir() and path.name not in parts.values()]
        return any(is_image_name(name) for path in others for name in os.listdir(path))

    def _parallel_splits(self, folder: Path, images: str) -> dict[str, Place]:
        """Return the splits of images/train next to labels/train or masks/train."""
        found = {}
        for split, name in _split_folders(folder / images).items():
            if not self.wants:
                found[split] = Place(str(folder), "--data", {"kind": "images", "image_dir": f"{images}/{name}"})
                continue
            other = next((other for other in MASK_FOLDERS if (folder / other / name).is_dir()), None)
            if other is None:
                raise InputError(
                    "data.folder",
                    f"--data {folder} has {images}/{name} and nothing that belongs to it",
                    saw=folder_listing(folder),
                    fix=f"put its {'masks' if self.wants == 'mask' else 'text files'} into "
                    f"{'masks' if self.wants == 'mask' else 'labels'}/{name}",
                )
            found[split] = self._pair(folder, "--data", f"{images}/{name}", f"{other}/{name}")
        return found

    def _coco_splits(self, folder: Path) -> dict[str, Place]:
        """Return the splits of instances_train.json, train.json and similar, here or in annotations/."""
        for place in (folder, folder / "annotations"):
            files = sorted(place.glob("*.json")) if place.is_dir() else []
            found: dict[str, Place] = {}
            for split in SPLITS:
                matching = [path for path in files if _split_in(path.name) == split and is_coco(path)]
                matching = [path for path in matching if path.name.startswith("instances")] or matching
                if len(matching) > 1:
                    raise InputError(
                        "data.folder",
                        f"--data {folder} has several files for {split}",
                        saw=[path.name for path in matching],
                        fix=f"--train_file {matching[0]}   and leave --data out",
                    )
                if matching:
                    found[split] = self._file(matching[0], "--data")
            if "train" in found:
                return found
        return {}

    def _file_splits(self, folder: Path) -> dict[str, Place]:
        """Return the splits of train.csv, validation.csv and similar, if there is one for training."""
        found: dict[str, Place] = {}
        for path in sorted(folder.iterdir()):
            split = _split_in(SHARD.sub("", path.name.partition(".")[0]), is_whole=True)
            ending = Path(path.name.lower().removesuffix(".gz")).suffix
            if path.is_file() and split and ending in KINDS_BY_ENDING and ending != ".txt":
                if split in found:
                    raise InputError(
                        "data.folder",
                        f"--data {folder} has several files for {split}",
                        saw=[Path(found[split].path).name, path.name],
                        fix="keep one of them, or name the files one by one",
                    )
                found[split] = self._file(path, "--data")
        return {split: found[split] for split in SPLITS if split in found} if "train" in found else {}

    def _yaml_splits(self, path: Path) -> dict[str, Place]:
        """Return the splits of a data.yaml; the text files are next to the images, with labels in place of images."""
        content = read_yaml(path)
        base = path.parent / str(content.get("path") or ".")
        base = base if base.is_dir() else path.parent
        found: dict[str, Place] = {}
        for split, names in SPLIT_NAMES.items():
            given = next((content[name] for name in names if isinstance(content.get(name), str)), None)
            folder = base / given if given else None
            if folder is None or not folder.is_dir():
                continue
            images = os.path.relpath(folder.resolve(), path.parent.resolve())
            labels = re.sub(r"(^|/)images(/|$)(?!.*images(/|$))", r"\1labels\2", images)
            settings = {"kind": "yolo", "image_dir": images, "annotation_dir": labels, "names_file": path.name}
            found[split] = Place(str(path.parent), "--data", settings)
        if "train" not in found and "train" in content:
            raise InputError(
                "data.folder",
                f"{path}: there is no folder {content['train']!r}",
                saw=[f"looked in {base}"],
                fix="correct the path of train in it",
            )
        return found if "train" in found else {}


def _texts(folder: Path) -> Iterator[Path]:
    """Yield the text files of a folder, recursively, that could contain objects."""
    return (path for path in folder.rglob("*.txt") if path.name not in ("classes.txt", "labels.txt", "README.txt"))


def _split_folders(folder: Path) -> dict[str, str]:
    """Return the folders train, validation and test in a folder, by split; train2017 counts too."""
    if not folder.is_dir():
        return {}
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    found = {}
    for split in SPLITS:
        matching = [name for name in names if re.sub(r"[\d_-]+$", "", name.lower()) in SPLIT_NAMES[split]]
        if matching:
            found[split] = matching[0]
    return found


def _split_in(name: str, is_whole: bool = False) -> str:
    """Return the split in a file name, or ""."""
    words = [name.lower()] if is_whole else re.split(r"[^a-z]+", name.lower())
    return next((split for split in SPLITS if any(word in SPLIT_NAMES[split] for word in words)), "")
