"""An image and its annotations: boxes, classes and masks of objects, or a class for each pixel.

`load_scene` creates one from a row of `sources`. Coordinates are pixels of the upright image: x to the right, y
downwards, pixel i covers [i, i + 1). Boxes are (left, top, right, bottom).

Example:
    scene = load_scene({"image": "cat.jpg", "objects": {"boxes": [[3, 4, 40, 50]], "classes": [0]}})
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopwright.data.images.decoding import decode_image, decode_mask
from loopwright.data.vision_extra import vision_module
from loopwright.errors import DataError
from loopwright.sources.images.masks import has_same_shape

IGNORED_CLASS = 255


@dataclass(frozen=True)
class Scene:
    """An image with the annotations that move with it."""

    image: NDArray[np.uint8]  # uint8, (height, width, 3)
    boxes: NDArray[np.float32] | None = None  # float32, (objects, 4): left, top, right, bottom
    classes: NDArray[np.int64] | None = None  # int64, (objects,)
    masks: NDArray[np.bool_] | None = None  # bool, (objects, height, width)
    semantic: NDArray[np.int32] | None = None  # int32, (height, width): a class id for each pixel
    crowd: NDArray[np.bool_] | None = None  # bool, (objects,): the object stands for a group
    # float64, (3, 3): maps a point (x, y, 1) of the decoded image to its place now. Its inverse maps predicted boxes
    # back: `moved_boxes(boxes, np.linalg.inv(scene.matrix))`.
    matrix: NDArray[np.float64] = field(default_factory=lambda: np.eye(3))

    def __post_init__(self) -> None:
        if self.image.ndim != 3 or self.image.shape[2] != 3 or self.image.dtype != np.uint8:
            raise DataError(
                f"the image of a scene must be uint8 with the shape (height, width, 3), got {self.image.dtype} with "
                f"{self.image.shape}"
            )
        counts = {name: len(value) for name, value in self._objects().items()}
        if len(set(counts.values())) > 1:
            raise DataError(f"a scene must have one box, class, mask and crowd flag for each object, got {counts}")
        for name, value in (("masks", self.masks), ("semantic", self.semantic)):
            if value is not None and value.shape[-2:] != self.image.shape[:2]:
                sizes = f"{value.shape[-2:]} instead of {self.image.shape[:2]}"
                raise DataError(f"{name} must have the height and width of the image, got {sizes}")

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.image.shape[0], self.image.shape[1]

    @property
    def num_objects(self) -> int:
        """The number of objects; 0 if none are known."""
        return next((len(value) for value in self._objects().values()), 0)

    def with_objects(self, chosen: NDArray[np.bool_]) -> Scene:
        """Return the scene with the chosen objects only, each with its class, mask and crowd flag."""
        return self if chosen.all() else replace(self, **{name: own[chosen] for name, own in self._objects().items()})

    def _objects(self) -> dict[str, NDArray[Any]]:
        named = {"boxes": self.boxes, "classes": self.classes, "masks": self.masks, "crowd": self.crowd}
        return {name: value for name, value in named.items() if value is not None}


def load_scene(
    row: Mapping[str, Any],
    *,
    with_masks: bool = False,
    reduce_labels: bool = False,
    ignore_index: int = IGNORED_CLASS,
    mask_values: Sequence[str] = (),
) -> Scene:
    """Return the scene of a row: its "image", and its "mask" and "objects" if it has any.

    Args:
        row: as from `plan.rows(split)[i]`; its image may be decoded already, as an array.
        with_masks: create masks from the segments of the objects; one without a segment uses its box.
        reduce_labels: class 0 of "mask" becomes `ignore_index`, and the others shift down by one.
        ignore_index: the id in "mask" for no class.
        mask_values: the values or colours of the classes in "mask", if they are not its ids; as for `decode_mask`.
    """
    source = row["image"]
    image: NDArray[np.uint8] = source if isinstance(source, np.ndarray) else np.asarray(decode_image(source))
    known: dict[str, Any] = {}
    if row.get("mask") is not None:
        semantic = decode_mask(row["mask"], mask_values, ignore_index)
        height, width = image.shape[:2]
        if semantic.shape != (height, width) and has_same_shape(semantic.shape, (height, width)):
            rows, columns = (np.arange(b) * a // b for a, b in zip(semantic.shape, (height, width), strict=True))
            semantic = semantic[rows[:, None], columns]
        if semantic.shape != image.shape[:2]:
            raise DataError(
                f"the mask {_text(row['mask'])} is {semantic.shape[1]} x {semantic.shape[0]}, its image "
                f"{_text(row['image'])} {width} x {height}. They must have the same size."
            )
        if reduce_labels:
            has_class = (semantic != 0) & (semantic != ignore_index)
            semantic = np.where(has_class, semantic - 1, ignore_index).astype(np.int32)
        known["semantic"] = semantic
    objects = row.get("objects")
    if objects is not None:
        boxes = np.asarray(objects["boxes"], dtype=np.float32).reshape(-1, 4)
        known["boxes"] = boxes
        known["classes"] = np.asarray(objects["classes"], dtype=np.int64)
        known["crowd"] = np.asarray(objects.get("crowd") or np.zeros(len(boxes)), dtype=np.bool_)
        if with_masks:
            segments = objects.get("segments") or [None] * len(boxes)
            known["masks"] = rasterize(segments, image.shape[:2], boxes)
    return Scene(image, **known)


def rasterize(
    segments: Sequence[Any], size: tuple[int, int], boxes: NDArray[np.float32] | None = None
) -> NDArray[np.bool_]:
    """Return a mask for each segment: bool, (segments, height, width).

    Args:
        segments: each a list of polygons (flat lists of x, y), a run-length encoding {"size": [height, width],
            "counts": a string or a list}, or None.
        boxes: fill a segment that is None; without them it stays empty.
    """
    masks = np.zeros((len(segments), *size), dtype=np.bool_)
    for index, segment in enumerate(segments):
        if segment is not None:
            masks[index] = _drawn(segment, size)
        elif boxes is not None:
            left, top, right, bottom = np.rint(boxes[index]).astype(int).clip(0)
            masks[index, top:bottom, left:right] = True
    return masks


def boxes_of_masks(masks: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Return the smallest box around each mask: float32, (masks, 4). The box of an empty mask is all zeros."""
    columns: NDArray[np.bool_] = np.any(masks, axis=1)
    rows: NDArray[np.bool_] = np.any(masks, axis=2)
    left, top = columns.argmax(axis=1), rows.argmax(axis=1)
    right = masks.shape[2] - columns[:, ::-1].argmax(axis=1)
    bottom = masks.shape[1] - rows[:, ::-1].argmax(axis=1)
    boxes = np.stack([left, top, right, bottom], axis=1).astype(np.float32)
    boxes[~columns.any(axis=1)] = 0
    return boxes


def _drawn(segment: Any, size: tuple[int, int]) -> NDArray[np.bool_]:
    coco = vision_module("faster_coco_eval.core.mask", "faster-coco-eval", "drawing the masks of objects")
    height, width = size
    if isinstance(segment, Mapping):
        if list(segment["size"]) != [height, width]:
            raise DataError(
                f"a run-length encoding has the (height, width) {list(segment['size'])}, its image {[height, width]}. "
                "They must have the same size."
            )
        counts = segment["counts"]
        encoded = dict(segment) if isinstance(counts, (str, bytes)) else coco.frPyObjects(dict(segment), height, width)
    elif isinstance(segment, Sequence) and not isinstance(segment, str) and segment:
        polygons = [[float(value) for value in polygon] for polygon in segment]
        encoded = coco.merge(coco.frPyObjects(polygons, height, width))
    else:
        raise DataError(
            f"a segment must be a list of polygons, a run-length encoding or None, got {segment!r:.80}. "
            "See the COCO format for both."
        )
    return np.asarray(coco.decode(encoded)).astype(np.bool_).reshape(size)


def _text(source: Any) -> str:
    return f"({len(source):,} bytes)" if isinstance(source, bytes) else str(source)
