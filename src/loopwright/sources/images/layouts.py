"""Detect the layout of an image folder and its splits, and return the settings to open its tables."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from shlex import quote

from loopwright.errors import InputError
from loopwright.sources import locations
from loopwright.sources.files import Say, folder_listing, missing_file
from loopwright.sources.formats import IMAGE_KINDS, KINDS_BY_ENDING, ending_of
from loopwright.sources.images.coco import is_coco
from loopwright.sources.images.folders import list_images, no_images
from loopwright.sources.images.image_file import is_image_name
from loopwright.sources.images.names import NAMES_FILES, find_names_file, read_yaml
from loopwright.sources.images.tables import TableOfImages
from loopwright.sources.locations import Given, Place, Settings
from loopwright.sources.options import DataOptions
from loopwright.sources.schema import Schema
from loopwright.sources.tables import Table

IMAGE_FOLDERS = ("images", "image", "imgs", "img", "JPEGImages")
MASK_FOLDERS = (
    *("masks", "mask", "annotations", "labels", "SegmentationClass", "SegmentationObject", "label", "annotation"),
    *("ground_truth", "groundtruth", "gt", "segmentation", "segmentations"),
)
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")


class Layout:
    """Finds the data of an image task. `wants`: label, mask, objects, or just the images ("")."""

    def __init__(self, schema: Schema, options: DataOptions, settings: Settings) -> None:
        scene = schema.scene_role
        self.wants = scene.kind if scene is not None else "label" if schema.label_role is not None else ""
        self.has_outlines = scene is not None and scene.has_outlines
        self.image_dir = options.image_dir
        self.names_file = Path(options.id2label).expanduser().resolve() if options.id2label is not None else None
        self.bad_annotations = {"bad_annotations": "drop"} if options.bad_annotations == "drop" else {}
        self.settings = settings
        self.notes: tuple[str, ...] = ()

    def open_all(self, data: str | Path | None, files: Given, say: Say | None) -> dict[str, Table]:
        names = str(self.names_file) if self.names_file is not None else None
        tables = locations.open_places(self.locate(data, files), say)
        tables = {split: TableOfImages(t, ".", names) if t.kind == "hub" else t for split, t in tables.items()}
        for table in [*tables.values()][:1]:
            table.notes += self.notes
        return tables

    def locate(self, data: str | Path | None, files: Given) -> dict[str, Place]:
        locations.check_given(data, files)
        given = {split: Path(file).expanduser() for split, file in files.items() if file is not None}
        flags = {"--data": data} if data is not None else {f"--{split}_file": file for split, file in given.items()}
        self.given = " ".join(f"{flag} {quote(str(path))}" for flag, path in flags.items())
        places = {split: self._locate_one(path, f"--{split}_file") for split, path in given.items()}
        if data is None:
            return places
        path = Path(data).expanduser()
        if path.is_dir():
            return self._splits(path) | places
        if path.suffix in (".yaml", ".yml") and path.is_file():
            return self._yaml_splits(path) | places
        return {"train": self._locate_one(path, "--data")} | places

    def _locate_one(self, path: Path, flag: str) -> Place:
        if path.is_dir():
            return self._folder(path, flag)
        if path.is_file():
            return self._file(path, flag)
        if locations.is_hub(str(path)):
            return Place(str(path), flag, {})
        raise missing_file(path, flag)

    def _file(self, path: Path, flag: str, image_dir: str | None = None) -> Place:
        """Return how to read a file: as an image, COCO's json, or a table with a column of images."""
        kind, folder = self.settings.get("kind"), path.resolve().parent
        if image_dir is None and self.image_dir is not None:
            given = Path(self.image_dir).expanduser()
            if not given.is_dir():
                raise missing_file(given, "--image_dir")
            image_dir = os.path.relpath(given.resolve(), folder)
        if is_image_name(path.name) and kind is None:
            return Place(str(path), flag, {"kind": "images"})
        if kind == "coco" or (kind is None and ending_of(path) == ".json" and is_coco(path)):
            if self.wants == "label":
                what, saw = f"{path} holds objects, not a class for each image", ["it is in COCO's format"]
                raise InputError("data.annotations", what, saw=saw, fix=f"lw train object-detection {self.given}")
            extra = {"encoding": self.settings.get("encoding"), "image_dir": image_dir, **self.bad_annotations}
            return Place(str(path), flag, {"kind": "coco"} | {name: value for name, value in extra.items() if value})
        names = self.names_file
        if names is None and self.wants in ("mask", "objects"):
            names = find_names_file(folder)
        names_file = {"names_file": os.path.relpath(names, folder)} if names is not None else {}
        return Place(str(path), flag, self.settings | {"image_dir": image_dir or ""} | names_file)

    def _folder(self, folder: Path, flag: str) -> Place:
        kind = self.settings.get("kind")
        if kind in IMAGE_KINDS:
            return self._place(folder, flag, kind)
        metadata = [folder / name for name in METADATA if (folder / name).is_file()]
        if metadata and self.wants:
            return self._file(metadata[0], flag, ".")
        inside = {path.name.lower(): path.name for path in folder.iterdir() if path.is_dir()}
        images = next((inside[name.lower()] for name in IMAGE_FOLDERS if name.lower() in inside), None)
        masks = next((inside[name.lower()] for name in MASK_FOLDERS if name.lower() in inside), None)
        if self.wants == "label" and images and masks:
            raise self._not_classes(folder, images, masks)
        if self.wants and not images:
            self._check_level(folder, flag)
        if self.wants == "label":
            return Place(str(folder), flag, {"kind": "image-folder"})
        if not self.wants:
            part = {"image_dir": images} if images and masks else {}
            return Place(str(folder), flag, {"kind": "images"} | part)
        if self.wants == "objects" and (coco := _only_coco(folder)) is not None:
            return self._file(coco, flag)
        if images and masks:
            return self._pair(folder, flag, images, masks)
        if self.wants == "objects" and any(_texts(folder)):
            return self._place(folder, flag, "yolo", ".", ".")
        if not list_images(folder)[0]:
            raise no_images(folder)
        found, expected = "masks", "the images into images/ and their masks into masks/, with equal names"
        if self.wants == "objects":
            found = "objects"
            expected = "COCO's json into it, or the images into images/ and a text file for each into labels/"
        what, fix = f"{flag} {folder} holds images and no {found}", f"put {expected}"
        classes = [folder / name for name in _folders_in(folder)]
        if len(classes) > 1 and all(map(_holds_images, classes)):
            fix = f"lw train image-classification {self.given}   or   {fix}"
        raise InputError("data.folder", what, saw=folder_listing(folder), fix=fix)

    def _not_classes(self, folder: Path, images: str, annotations: str) -> InputError:
        has_masks = bool(list_images(folder / annotations)[0])
        task = "semantic-segmentation" if has_masks else "object-detection"
        what = f"{folder} holds {images} and their {annotations}, not a folder for each class"
        fix = f"lw train {task} {self.given}   or   --file_kind image-folder"
        return InputError("data.folder", what, saw=folder_listing(folder), fix=fix)

    def _check_level(self, folder: Path, flag: str) -> None:
        """Refuse a folder above the data, and folders of splits in place of classes, whose names are all the same."""
        inside = {path: _folders_in(path) for path in map(folder.joinpath, _folders_in(folder))}
        if not inside or not all(inside.values()) or any(map(_holds_images, [folder, *inside])):
            return
        first, *others = sorted(inside, key=lambda path: -len(list_images(path)[0]))
        shared = sorted(set.intersection(*map(set, inside.values())))
        if not others:
            what, fix = f"{folder} holds only the folder {first.name}", f"{flag} {quote(str(first))}"
        elif self.wants == "label" and sum(not name.isdecimal() for name in shared) > 1:
            what = f"{folder}: {', '.join(path.name for path in inside)} look like splits, not classes"
            fix = f"--train_file {quote(str(first))} --validation_file {quote(str(others[0]))}"
            fix += f" instead of {flag} {quote(str(folder))}   or   --file_kind image-folder"
        else:
            return
        saw = [f"{path.name}/ holds the folders {', '.join(names[:5])}" for path, names in inside.items()]
        raise InputError("data.folder", what, saw=saw[:5], fix=fix)

    def _place(self, folder: Path, flag: str, kind: str, image_dir: str = "", annotation_dir: str = "") -> Place:
        folders = {"image_dir": image_dir, "annotation_dir": annotation_dir} if image_dir else {}
        names = {"names_file": os.path.relpath(self.names_file, folder.resolve())} if self.names_file else {}
        return Place(str(folder), flag, {"kind": kind} | folders | names)

    def _pair(self, folder: Path, flag: str, images: str, annotations: str) -> Place:
        is_text = self.wants == "objects" and any(_texts(folder / annotations))
        if self.wants == "objects" and not is_text and not self.has_outlines:
            what = f"{flag} {folder}: {annotations} holds no text file of objects"
            fix = "write one .txt per image: class x_center y_center width height"
            raise InputError("data.annotations", what, saw=folder_listing(folder / annotations), fix=fix)
        return self._place(folder, flag, "yolo" if is_text else "mask-folder", images, annotations)

    def _splits(self, folder: Path) -> dict[str, Place]:
        if self.wants in ("objects", "label") and (found := self._coco_splits(folder)):
            return found
        if found := self._file_splits(folder):
            return found
        parts = _split_folders(folder)
        if "train" in parts and not self._are_classes(folder, parts):
            unused = [name for name in _folders_in(folder) if name not in parts.values()]
            if unused := [name for name in unused if list_images(folder / name)[0]]:
                note = "not used: folders of splits are named train, validation and test"
                self.notes += (f"{folder.name} also holds images in {', '.join(unused[:5])}, {note}",)
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
        if self.wants in ("mask", "objects") or len(parts) > 1:
            return False
        others = [folder / name for name in _folders_in(folder) if name not in parts.values()]
        return _holds_images(folder / parts["train"]) and any(map(_holds_images, others))

    def _parallel_splits(self, folder: Path, images: str) -> dict[str, Place]:
        """Return the splits of images/train next to labels/train or masks/train."""
        found = {}
        for split, name in _split_folders(folder / images).items():
            if not self.wants:
                found[split] = Place(str(folder), "--data", {"kind": "images", "image_dir": f"{images}/{name}"})
                continue
            other = next((other for other in MASK_FOLDERS if (folder / other / name).is_dir()), None)
            if other is None:
                what = f"--data {folder} has {images}/{name} without annotations"
                fix = f"put its {'masks into masks' if self.wants == 'mask' else 'text files into labels'}/{name}"
                raise InputError("data.folder", what, saw=folder_listing(folder), fix=fix)
            found[split] = self._pair(folder, "--data", f"{images}/{name}", f"{other}/{name}")
        return found

    def _coco_splits(self, folder: Path) -> dict[str, Place]:
        """Return the splits of instances_train.json, train.json and similar, here or in annotations/."""
        for place in (folder, folder / "annotations"):
            splits = {path: _split_in(path.name) for path in sorted(place.glob("*.json"))}
            splits = {path: split for path, split in splits.items() if split and is_coco(path)}
            instances = {path: split for path, split in splits.items() if path.name.startswith("instances")}
            others = {path: split for path, split in splits.items() if split not in instances.values()}
            found = locations.files_by_split(folder, instances | others)
            if "train" in found:
                return {split: self._file(path, "--data") for split, path in found.items()}
        return {}

    def _file_splits(self, folder: Path) -> dict[str, Place]:
        endings = set(KINDS_BY_ENDING) - {".txt"}
        files = [path for path in sorted(folder.iterdir()) if path.is_file() and ending_of(path) in endings]
        found = locations.files_by_split(folder, {path: locations.split_of_file(path) for path in files})
        return {split: self._file(path, "--data") for split, path in found.items()} if "train" in found else {}

    def _yaml_splits(self, path: Path) -> dict[str, Place]:
        """Return the splits of a data.yaml; the text files are next to the images, with labels in place of images."""
        content = read_yaml(path)
        base = path.parent / str(content.get("path") or ".")
        base = base if base.is_dir() else path.parent
        found: dict[str, Place] = {}
        for split, names in locations.SPLIT_NAMES.items():
            given = next((content[name] for name in names if isinstance(content.get(name), str)), None)
            if not given or not (base / given).is_dir():
                continue
            images = os.path.relpath((base / given).resolve(), path.parent.resolve())
            labels = re.sub(r"(^|/)images(/|$)(?!.*images(/|$))", r"\1labels\2", images)
            settings = {"kind": "yolo", "image_dir": images, "annotation_dir": labels}
            settings |= {"names_file": path.name} if "names" in content else {}
            place = Place(str(path.parent), "--data", settings)
            if place in found.values():
                self.notes += (f"{path.name} has the same images for train and {split}, so {split} is not read",)
                continue
            found[split] = place
        if "train" not in found and "train" in content:
            what = f"{path}: there is no folder {content['train']!r}"
            raise InputError("data.folder", what, saw=[f"looked in {base}"], fix=f"correct the path of train in {path}")
        return found if "train" in found else {}


def _only_coco(folder: Path) -> Path | None:
    found = [path for path in sorted(folder.glob("*.json")) if path.name not in NAMES_FILES and is_coco(path)]
    if len(found) > 1:
        what, saw = f"{folder} has several files of annotations", [path.name for path in found]
        fix = f"--train_file {quote(str(found[0]))} instead of --data {quote(str(folder))}"
        raise InputError("data.folder", what, saw=saw, fix=fix)
    return found[0] if found else None


def _texts(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*.txt") if path.name not in ("classes.txt", "labels.txt", "README.txt"))


def _folders_in(folder: Path) -> list[str]:
    names = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    return [name for name in names if not name.startswith((".", "__"))]


def _holds_images(folder: Path) -> bool:
    return any(is_image_name(name) for name in os.listdir(folder))


def _split_folders(folder: Path) -> dict[str, str]:
    """Return the folders train, validation and test in a folder, by split; train2017 and seg_train count too."""
    names = reversed(sorted(_folders_in(folder), key=len))  # of several for a split the shortest is kept
    found = {_split_in(name): name for name in names if not set(_words(name)) & set(MASK_FOLDERS)}
    return {split: found[split] for split in locations.SPLITS if split in found}


def _split_in(name: str) -> str:
    """Return the split among the words of a name, or ""."""
    found = [*map(locations.split_of, _words(name))]
    return next((split for split in locations.SPLITS if split in found), "")


def _words(name: str) -> list[str]:
    return re.split(r"[\W\d_]+|set\b|集", name.lower())
