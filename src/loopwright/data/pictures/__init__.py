"""Pictures of a model's inputs and predictions, for reports: pure functions from arrays to images.

    from loopwright.data.pictures import color_of, draw_boxes, draw_masks, encode, sheet, side_by_side

    colors = [color_of(class_id) for class_id in classes]
    truth = draw_boxes(draw_masks(image, masks, colors), boxes, names, colors=colors)
    page = sheet([side_by_side(truth, prediction)], ["0031.png"], columns=1, size=640)
    jpeg = encode(page, "jpeg", quality=80)

An image is a Pillow image, or an array of shape (H, W), (H, W, 1) or (H, W, 3): uint8, bool, or floats from 0 to 1. The
result is always a new Pillow image in RGB. Boxes and sheets enlarge small images by a whole factor, so that their
pixels can be seen; masks keep the size, so draw them first. Nothing here imports torch, and Pillow is imported lazily.
"""

from __future__ import annotations

from loopwright.data.pictures.canvas import Color, ImageLike, as_image, encode, fit, scale_for
from loopwright.data.pictures.confusion import confusion_picture
from loopwright.data.pictures.objects import draw_boxes, draw_masks, draw_semantic
from loopwright.data.pictures.palette import NUM_COLORS, color_of, palette
from loopwright.data.pictures.sheets import reconstruction_row, sheet, side_by_side

__all__ = [
    "NUM_COLORS",
    "Color",
    "ImageLike",
    "as_image",
    "color_of",
    "confusion_picture",
    "draw_boxes",
    "draw_masks",
    "draw_semantic",
    "encode",
    "fit",
    "palette",
    "reconstruction_row",
    "scale_for",
    "sheet",
    "side_by_side",
]
