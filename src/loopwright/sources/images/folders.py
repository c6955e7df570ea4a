"""Folders of images: a folder per class, images with masks, or images alone."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from pathlib import Path

from loopwright.errors import InputError
from loopwright.quantities import agreeing, counted
from loopwright.sources.files import folder_listing
from loopwright.sources.images.image_file import UNREAD_ENDINGS, is_image_name
from loopwright.sources.images.names import names_of_folder
from loopwright.sources.images.tables import ListedTable
from loopwright.sources.tables import Row

# How the stem of a mask may be made of its image's.
MASK_NAMES = ("{}", "{}_mask", "{}_label", "{}_seg", "mask_{}", "{}_gtFine_labelIds")
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


def images_of(path: Path, folder: str = ".", what: str = "images") -> tuple[list[str], int, tuple[str, ...]]:
    """Return `list_images` and a note about unsupported image types; refuse a folder without images."""
    unread: Counter[str] = Counter()
    files, num_bytes = list_images(Path(os.path.abspath(path)), folder, unread)
    if not files:
        raise no_images(path / folder, what)
    if not unread:
        return files, num_bytes, ()
    note = f"{unread.total():,} files of {path.name} have unsupported formats: {', '.join(sorted(unread))}"
    return files, num_bytes, (f"{note}; save them as .jpg or .png",)


def no_images(folder: Path, what: str = "images") -> InputError:
    fix = "give a folder with .jpg or .png files (also .bmp .gif .webp .tif .ppm)"
    return InputError("data.folder", f"{folder} holds no {what}", saw=folder_listing(folder), fix=fix)


def digest_of(kind: str, lines: list[str]) -> str:
    """Return the sha256 of a listing. The content of the images is added when they are read."""
    return hashlib.sha256("\n".join([kind, *lines]).encode("utf-8", "surrogateescape")).hexdigest()


def stem_of(file: str, folder: str) -> str:
    """Return the path of a file relative to a folder, without its ending."""
    return os.path.splitext(os.path.relpath(file, folder))[0]


class ImagesTable(ListedTable):
    """All images of a folder, recursively, or one image, without annotations."""

    def __init__(self, path: Path, image_dir: str | None = None) -> None:
        super().__init__(path, "images", ("image",))
        self.image_dir = image_dir or None
        if path.is_dir():
            self.files, self.num_bytes, self.notes = images_of(path, image_dir or ".")
        else:
            self.root = os.path.dirname(self.root)
            self.files, self.num_bytes = [path.name], path.stat().st_size
        self.sha256 = digest_of(self.kind, self.files)

    def row(self, index: int) -> Row:
        return {"image": self.files[index]}


class ImageFolderTable(ListedTable):
    """A folder with a folder of images for each class."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "image-folder", ("image", "label"))
        self.files, self.num_bytes, self.notes = images_of(path)
        loose = [name for name in self.files if "/" not in name]
        if loose:
            are = agreeing(len(loose), "is")
            what = f"{path}: {len(loose):,} of {counted(len(self.files), 'image')} {are} not in a class folder"
            example = Path(path.name, "cat", loose[0])
            fix = f"move each image into a folder of its class ({example}), or give a csv file with image and label"
            raise InputError("data.folder", what, saw=loose[:_MOST_NAMED], fix=fix)
        self.sha256 = digest_of(self.kind, self.files)
        classes = {name.partition("/")[0] for name in self.files}
        folders = [entry.name for entry in sorted(Path(self.root).iterdir()) if entry.is_dir()]
        empty = [name for name in folders if name not in classes and not name.startswith((".", "__"))]
        if empty:
            what = f"{path.name}: {counted(len(empty), 'folder', 'holds')} no image and makes no class"
            self.notes += (f"{what}: {', '.join(empty[:5])}",)

    def row(self, index: int) -> Row:
        return {"image": self.files[index], "label": self.files[index].partition("/")[0]}


class MaskFolderTable(ListedTable):
    """Images and masks of the same names, or one of `MASK_NAMES`, in two folders; the ending may differ."""

    def __init__(self, path: Path, image_dir: str, annotation_dir: str, names_file: str | None) -> None:
        super().__init__(path, "mask-folder", ("image", "mask"))
        self.image_dir, self.annotation_dir = image_dir, annotation_dir
        self.files, image_bytes, _ = images_of(path, image_dir)
        masks, mask_bytes, _ = images_of(path, annotation_dir, "masks")
        self.num_bytes = image_bytes + mask_bytes
        self._masks = self._pair(masks, image_dir, annotation_dir)
        self.names_file, self.names = names_of_folder(Path(self.root), names_file)
        self.sha256 = digest_of(self.kind, [*self.files, *masks, *(f"{k} {name}" for k, name in self.names.items())])

    def _pair(self, masks: list[str], image_dir: str, annotation_dir: str) -> list[str | None]:
        by_stem: dict[str, str] = {}
        for mask in masks:
            first = by_stem.setdefault(stem_of(mask, annotation_dir), mask)
            if first != mask:
                what = f"{self.path}: two masks have the same name"
                raise InputError("data.masks", what, saw=[first, mask], fix="keep one of them")
        places = [os.path.split(stem_of(image, image_dir)) for image in self.files]
        names = [[os.path.join(head, form.format(tail)) for form in MASK_NAMES] for head, tail in places]
        pairs = [next((by_stem[name] for name in forms if name in by_stem), None) for forms in names]
        unused = sorted(set(masks) - set(filter(None, pairs)))
        if len(unused) == len(masks):
            saw = [f"images: {', '.join(self.files[:3])}", f"masks:  {', '.join(masks[:3])}"]
            fix = "name each mask after its image: images/street_1.jpg and masks/street_1.png"
            raise InputError("data.masks", f"{self.path}: no mask has the name of an image", saw=saw, fix=fix)
        if unused:
            self.notes = (f"{counted(len(unused), 'mask', 'belongs')} to no image: {', '.join(unused[:5])}",)
        return pairs

    def row(self, index: int) -> Row:
        return {"image": self.files[index], "mask": self._masks[index]}
