"""Geometry of scenes: each function moves image, boxes and masks together.

Images are sampled bilinearly (with antialiasing when they shrink), masks by the nearest pixel. After resampling, or if
a border cuts an object, its box is computed from the moved mask if there is one. An object with nothing left, or less
than `min_visible`, is dropped with its class, mask and crowd flag.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from loopwright.data.images.scene import IGNORED_CLASS, Scene, boxes_of_masks
from loopwright.data.vision_extra import pillow

Boxes: TypeAlias = "NDArray[np.float32]"
Matrix: TypeAlias = "NDArray[np.float64]"
Color: TypeAlias = "tuple[int, int, int]"

MIDDLE_GREY: Color = (124, 116, 104)  # ImageNet's mean: about zero once normalized


def moved_boxes(boxes: Boxes, matrix: Matrix) -> Boxes:
    """Return the smallest upright boxes around boxes with corners moved by a (3, 3) matrix."""
    corners = boxes[:, [0, 1, 2, 1, 2, 3, 0, 3]].reshape(-1, 4, 2).astype(np.float64)
    moved = corners @ matrix[:2, :2].T + matrix[:2, 2]
    return np.concatenate([moved.min(axis=1), moved.max(axis=1)], axis=1).astype(np.float32)


def cropped(scene: Scene, top: int, left: int, height: int, width: int, min_visible: float = 0.0) -> Scene:
    """Return the part of a scene from (top, left) on; it must lie inside."""
    if (top, left, height, width) == (0, 0, *scene.size):
        return scene
    rows, columns = slice(top, top + height), slice(left, left + width)
    image, matrix = scene.image[rows, columns], _translation(-left, -top)
    return _moved(scene, image, lambda layer, fill: layer[..., rows, columns], matrix, min_visible)


def resized(scene: Scene, height: int, width: int) -> Scene:
    """Return a scene of this size; the aspect ratio may change."""
    if (height, width) == scene.size:
        return scene
    old_height, old_width = scene.size
    source = pillow().fromarray(np.ascontiguousarray(scene.image))
    image = np.asarray(source.resize((width, height), pillow().Resampling.BILINEAR))
    matrix = np.diag([width / old_width, height / old_height, 1.0])

    def move(layer: NDArray[Any], fill: int) -> NDArray[Any]:
        return layer[..., _nearest(height, old_height), :][..., _nearest(width, old_width)]

    return _moved(scene, image, move, matrix, is_resampled=True)


def flipped(scene: Scene, is_vertical: bool = False) -> Scene:
    """Return the mirror image, horizontally or vertically."""
    height, width = scene.size
    axis, step = (-2, (1.0, -1.0)) if is_vertical else (-1, (-1.0, 1.0))
    matrix = np.diag([*step, 1.0])
    matrix[:2, 2] = (0, height) if is_vertical else (width, 0)
    image = np.flip(scene.image, axis - 1)  # its last axis is the colour
    return _moved(scene, image, lambda layer, fill: np.flip(layer, axis), matrix)


def padded(scene: Scene, top: int, left: int, bottom: int, right: int, fill: Color, ignore_index: int) -> Scene:
    """Return a scene padded on each side; the new pixels have the class `ignore_index`."""
    if not (top or left or bottom or right):
        return scene
    height, width = scene.size
    size = (height + top + bottom, width + left + right)
    rows, columns = slice(top, top + height), slice(left, left + width)
    image = np.empty((*size, 3), dtype=np.uint8)
    image[:] = fill
    image[rows, columns] = scene.image

    def enlarge(layer: NDArray[Any], fill: int) -> NDArray[Any]:
        larger = np.full((*layer.shape[:-2], *size), fill, dtype=layer.dtype)
        larger[..., rows, columns] = layer
        return larger

    return _moved(scene, image, enlarge, _translation(left, top), ignore_index=ignore_index)


def warped(
    scene: Scene, matrix: Matrix, fill: Color = MIDDLE_GREY, ignore_index: int = IGNORED_CLASS, min_visible: float = 0.0
) -> Scene:
    """Return a scene of the same size with points moved by a (3, 3) matrix."""
    height, width = scene.size
    inverse = np.linalg.inv(matrix)
    source = pillow().fromarray(np.ascontiguousarray(scene.image))
    kinds: tuple[Any, Any] = (pillow().Transform.AFFINE, pillow().Resampling.BILINEAR)
    image = source.transform((width, height), kinds[0], inverse[:2].ravel().tolist(), kinds[1], fillcolor=fill)

    def move(layer: NDArray[Any], fill: int) -> NDArray[Any]:
        columns, rows = np.meshgrid(np.arange(width) + 0.5, np.arange(height) + 0.5)
        from_x = np.floor(inverse[0, 0] * columns + inverse[0, 1] * rows + inverse[0, 2]).astype(np.int64)
        from_y = np.floor(inverse[1, 0] * columns + inverse[1, 1] * rows + inverse[1, 2]).astype(np.int64)
        is_inside = (from_x >= 0) & (from_x < width) & (from_y >= 0) & (from_y < height)
        moved = layer[..., from_y.clip(0, height - 1), from_x.clip(0, width - 1)]
        return np.where(is_inside, moved, layer.dtype.type(fill))

    return _moved(scene, np.asarray(image), move, matrix, min_visible, ignore_index, is_resampled=True)


def _moved(
    scene: Scene,
    image: NDArray[np.uint8],
    move: Callable[[NDArray[Any], int], NDArray[Any]],
    matrix: Matrix,
    min_visible: float = 0.0,
    ignore_index: int = IGNORED_CLASS,
    *,
    is_resampled: bool = False,
) -> Scene:
    """Return the moved scene: `move` gets masks and classes, and the fill for new pixels; lost objects are dropped."""
    masks = None if scene.masks is None else move(scene.masks, 0)
    semantic = None if scene.semantic is None else move(scene.semantic, ignore_index)
    boxes, size = scene.boxes, (image.shape[0], image.shape[1])
    share: NDArray[Any] | None = None
    if boxes is not None:
        unclipped = moved_boxes(boxes, matrix)
        boxes = unclipped.clip(0, np.array([size[1], size[0]] * 2, dtype=np.float32))
        share = _areas(boxes) / np.maximum(_areas(unclipped), 1e-9)
    if masks is not None and scene.masks is not None:
        before, after = scene.masks.sum(axis=(1, 2)), masks.sum(axis=(1, 2))
        share = after / np.maximum(before * abs(np.linalg.det(matrix)), 1e-9)
        if boxes is not None:
            is_from_mask = np.ones(len(boxes), dtype=np.bool_) if is_resampled else after < before
            boxes = np.where(is_from_mask[:, None], boxes_of_masks(masks), boxes)
    moved = replace(scene, image=image, boxes=boxes, masks=masks, semantic=semantic, matrix=matrix @ scene.matrix)
    return moved if share is None else moved.with_objects((share >= min_visible) & (share > 0))


def _areas(boxes: Boxes) -> NDArray[np.float64]:
    return np.asarray((boxes[:, 2:].astype(np.float64) - boxes[:, :2]).prod(axis=1))


def _translation(x: float, y: float) -> Matrix:
    return np.array([[1.0, 0.0, x], [0.0, 1.0, y], [0.0, 0.0, 1.0]])


def _nearest(new: int, old: int) -> NDArray[np.int64]:
    """Return for each of `new` pixels the index of the `old` pixel at its centre."""
    return ((np.arange(new) * 2 + 1) * old // (2 * new)).astype(np.int64)
