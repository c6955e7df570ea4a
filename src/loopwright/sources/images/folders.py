"""Folders of images: a folder per class, images with masks, or images alone."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from pathlib import Path
from typing import Any

from loopwright.errors import InputError
from loopwright.sources.images.names import find_names_file, read_names
from loopwright.sources.images.reading import UNREAD_ENDINGS, is_image_name
from loopwright.sources.images.tables import ListedTable
from loopwright.sources.tables import Row

MASK_ENDINGS = ("", "_mask", "_label", "_seg")  # suffix of the stem of a mask after its image's
_MOST_NAMED = 5


def list_images(root: Path, folder: str = ".", unread: Counter[str] | None = None) -> tuple[list[str], int]:
    """Return the images of a folder, recursively, as sorted paths relative to root, and their total bytes.

    Links are followed, each folder once; dot files are skipped. `unread` counts the endings of unsupported image types.
    """
    found: list[str] = []
    num_bytes = 0
    pending, seen = [os.path.normpath(root / folder)], set()
    while pending:
        current = pending.pop()
        if (real := os.path.realpath(current)) in seen:
            continue
        seen.add(real)
        with os.scandir(current) as entries:
            for entry in entries:
                if entry.name.startswith(".") or entry.name == "__MACOSX":
                    continue
                if entry.is_dir():
                    pending.append(entry.path)
                elif is_image_name(entry.name):
                    found.append(os.path.relpath(entry.path, root).replace(os.sep, "/"))
                    num_bytes += entry.stat().st_size if entry.is_file() else 0
                elif unread is not None and (ending := os.path.splitext(entry.name)[1].lower()) in UNREAD_ENDINGS:
                    unread[ending] += 1
    return sorted(found), num_bytes


def note_unread(path: Path, unread: Counter[str]) -> tuple[str, ...]:
    """Return a note about unsupported image types, if there are any."""
    if not unread:
        return ()
    what = f"{unread.total():,} files of {path.name} are of kinds that are not read: {', '.join(sorted(unread))}"
    return (f"{what}; save them as .jpg or .png",)


def digest_of(kind: str, lines: list[str]) -> str:
    """Return the sha256 of a listing. The content of the images is added when they are read."""
    return hashlib.sha256("\n".join([kind, *lines]).encode("utf-8", "surrogateescape")).hexdigest()


def no_images(folder: Path, what: str = "holds no images") -> InputError:
    """Return the error about a folder without images."""
    names = sorted(path.name + ("/" if path.is_dir() else "") for path in folder.iterdir())
    shown = f"it holds: {', '.join(names[:8])}" + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return InputError(
        "data.folder",
        f"{folder} {what}",
        saw=[shown if names else "the folder is empty"],
        fix="give a folder with .jpg or .png files (also .bmp .gif .webp .tif .ppm)",
    )


class ImagesTable(ListedTable):
    """All images of a folder, recursively, or one image, without annotations."""

    def __init__(self, path: Path, image_dir: str | None = None) -> None:
        self.path = str(path)
        self.kind = "images"
        self.columns = ("image",)
        self.names = {}
        self.image_dir = image_dir
        if path.is_dir():
            self.root = os.path.abspath(path)
            unread: Counter[str] = Counter()
            self.files, self.num_bytes = list_images(Path(self.root), image_dir or ".", unread)
            if not self.files:
                raise no_images(path / (image_dir or "."))
            self.notes = note_unread(path, unread)
        else:
            self.root = os.path.dirname(os.path.abspath(path))
            self.files, self.num_bytes = [path.name], path.stat().st_size
        self.sha256 = digest_of(self.kind, self.files)

    def row(self, index: int) -> Row:
        """Return the image."""
        return {"image": self.files[index]}

    def settings(self) -> dict[str, Any]:
        """Return the kind, and the part of the folder that is read."""
        return {"kind": self.kind} | ({"image_dir": self.image_dir} if self.image_dir else {})


class ImageFolderTable(ListedTable):
    """A folder with a folder of images for each class."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.kind = "image-folder"
        self.columns = ("image", "label")
        self.names = {}
        self.root = os.path.abspath(path)
        unread: Counter[str] = Counter()
        self.files, self.num_bytes = list_images(Path(self.root), ".", unread)
        if not self.files:
            raise no_images(path)
        self.notes = note_unread(path, unread)
        loose = [name for name in self.files if "/" not in name]
        if loose:
            raise InputError(
                "data.folder",
                f"{path}: {len(loose):,} of {len(self.files):,} images lie in no class folder",
                saw=loose[:_MOST_NAMED],
                fix=f"put each image into a folder of its class ({Path(path.name, 'cat', loose[0])}), "
                "or give a csv file with the columns image and label",
            )
        self.sha256 = digest_of(self.kind, self.files)
        classes = {name.partition("/")[0] for name in self.files}
        empty = [
            entry.name
            for entry in sorted(Path(self.root).iterdir())
            if entry.is_dir() and entry.name not in classes and not entry.name.startswith((".", "__"))
        ]
        if empty:
            self.notes += (
                f"{len(empty)} folders of {path.name} hold no image and are no class: {', '.join(empty[:5])}",
            )

    def row(self, index: int) -> Row:
        """Return the image and the folder it is in."""
        name = self.files[index]
        return {"image": name, "label": name.partition("/")[0]}


class MaskFolderTable(ListedTable):
    """Images and masks of the same names in two folders; a mask may have another ending, or the suffix `_mask`."""

    def __init__(self, path: Path, image_dir: str, annotation_dir: str, names_file: str | None) -> None:
        self.path = str(path)
        self.kind = "mask-folder"
        self.columns = ("image", "mask")
        self.root = os.path.abspath(path)
        self.image_dir, self.annotation_dir = image_dir, annotation_dir
        self.files, image_bytes = list_images(Path(self.root), image_dir)
        if not self.files:
            raise no_images(path / image_dir)
        masks, mask_bytes = list_images(Path(self.root), annotation_dir)
        if not masks:
            raise no_images(path / annotation_dir, "holds no masks")
        self.num_bytes = image_bytes + mask_bytes
        self._masks = self._pair(masks)
        if names_file is None:
            found = find_names_file(Path(self.root))
            names_file = os.path.relpath(found, self.root) if found is not None else None
        self.names_file = names_file
        self.names = read_names(Path(self.root, names_file)) if names_file is not None else {}
        self.sha256 = digest_of(self.kind, [*self.files, *masks, *(f"{k} {name}" for k, name in self.names.items())])

    def _pair(self, masks: list[str]) -> list[str | None]:
        by_stem: dict[str, str] = {}
        for mask in masks:
            stem = os.path.splitext(os.path.relpath(mask, self.annotation_dir))[0]
            if stem in by_stem:
                raise InputError(
                    "data.masks",
                    f"{self.path}: two masks have the same name",
                    saw=[by_stem[stem], mask],
                    fix="keep one of them",
                )
            by_stem[stem] = mask
        pairs: list[str | None] = []
        for image in self.files:
            stem = os.path.splitext(os.path.relpath(image, self.image_dir))[0]
            pairs.append(next((by_stem[stem + end] for end in MASK_ENDINGS if stem + end in by_stem), None))
        unused = sorted(set(masks) - {mask for mask in pairs if mask is not None})
        if len(unused) == len(masks):
            raise InputError(
                "data.masks",
                f"{self.path}: no mask has the name of an image",
                saw=[f"images: {', '.join(self.files[:3])}", f"masks:  {', '.join(masks[:3])}"],
                fix="name each mask as its image: images/street_1.jpg and masks/street_1.png",
            )
        if unused:
            self.notes = (f"{len(unused):,} masks belong to no image: {', '.join(unused[:5])}",)
        return pairs

    def row(self, index: int) -> Row:
        """Return the image and its mask."""
        return {"image": self.files[index], "mask": self._masks[index]}

    def settings(self) -> dict[str, Any]:
        """Return the kind, the two folders, and the file of names."""
        return {
            "kind": self.kind,
            "image_dir": self.image_dir,
            "annotation_dir": self.annotation_dir,
        } | ({"names_file": self.names_file} if self.names_file is not None else {})
