"""Sensible default transforms for each task: one for training, in four strengths, and one for evaluation.

Strengths: "none" equals the evaluation, "light" moves a little, "standard" is the usual recipe, "strong" is for long
runs on little data. Pass `flip=False` if left and right matter (digits, text, traffic signs). Every transform returns
images of one size, so that they can be stacked.
"""

from __future__ import annotations

from loopwright.data.images.scene import IGNORED_CLASS
from loopwright.data.images.transforms import (
    CenterCrop,
    ColorJitter,
    Compose,
    HorizontalFlip,
    PadTo,
    RandomAffine,
    RandomErasing,
    RandomResizedCrop,
    Resize,
    Size,
    Transform,
    height_and_width,
)
from loopwright.errors import ConfigError

STRENGTHS = ("none", "light", "standard", "strong")

_SCALES = {"light": (0.67, 1.0), "standard": (0.35, 1.0), "strong": (0.2, 1.0)}
_JITTER = {
    "light": ColorJitter(0.1, 0.1, 0.1),
    "standard": ColorJitter(0.2, 0.2, 0.2),
    "strong": ColorJitter(0.4, 0.4, 0.4, 0.1),
}


def classification_train(size: Size, strength: str = "standard", flip: bool = True) -> Compose:
    """Return the training transform for image-classification: a random crop, resized to `size`."""
    if _checked(strength) == "none":
        return classification_eval(size)
    extra: list[Transform] = [RandomAffine(degrees=10, shear=5), RandomErasing(0.25)] if strength == "strong" else []
    return Compose([RandomResizedCrop(size, _SCALES[strength]), *_flips(flip), _JITTER[strength], *extra])


def classification_eval(size: Size, crop_share: float = 1.0) -> Compose:
    """Return the evaluation transform for image-classification: resize, then crop the center (usually 0.875)."""
    if not 0 < crop_share <= 1:
        raise ConfigError(f"crop_share must be above 0 and at most 1, got {crop_share}")
    return Compose([Resize(shorter=round(max(height_and_width(size)) / crop_share)), CenterCrop(size)])


def segmentation_train(
    size: Size, strength: str = "standard", flip: bool = True, ignore_index: int = IGNORED_CLASS
) -> Compose:
    """Return the training transform for semantic-segmentation: a random crop, resized to `size`."""
    if _checked(strength) == "none":
        return segmentation_eval(size)
    extra = [RandomAffine(degrees=10, shear=5, ignore_index=ignore_index)] if strength == "strong" else []
    return Compose([RandomResizedCrop(size, _SCALES[strength]), *_flips(flip), _JITTER[strength], *extra])


def segmentation_eval(size: Size) -> Compose:
    """Return the evaluation transform for semantic-segmentation: resized to `size`, so that every pixel counts."""
    return Compose([Resize(exact=size)])


def detection_train(size: int, strength: str = "standard", flip: bool = True) -> Compose:
    """Return the training transform for object detection: fitted into a square, then shifted, scaled and rotated."""
    fitted = detection_eval(size).transforms
    if _checked(strength) == "none":
        return Compose(fitted)
    affine = {
        "light": RandomAffine(translate=0.05, scale=(0.9, 1.1)),
        "standard": RandomAffine(degrees=3, translate=0.1, scale=(0.7, 1.4)),
        "strong": RandomAffine(degrees=10, translate=0.2, scale=(0.5, 1.6), shear=3),
    }[strength]
    return Compose([*fitted, affine, *_flips(flip), _JITTER[strength]])


def detection_eval(size: int) -> Compose:
    """Return the evaluation transform for object-detection: fitted into a square and padded."""
    return Compose([Resize(longest=size), PadTo(size)])


def masked_image_train(size: Size, strength: str = "standard", flip: bool = True) -> Compose:
    """Return the training transform for masked-image-modeling: colours are the target, so they stay unchanged."""
    if _checked(strength) == "none":
        return classification_eval(size)
    least = {"light": 0.85, "standard": 0.67, "strong": 0.35}[strength]
    return Compose([RandomResizedCrop(size, (least, 1.0)), *_flips(flip)])


def _flips(flip: bool) -> list[Transform]:
    return [HorizontalFlip()] if flip else []


def _checked(strength: str) -> str:
    if strength not in STRENGTHS:
        raise ConfigError(f"strength must be one of {', '.join(STRENGTHS)}, got {strength!r}")
    return strength
