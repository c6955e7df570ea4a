"""Images: decoding, scenes with boxes and masks, transforms for all of them, datasets and batches.

Needs the extra `vision` (Pillow; faster-coco-eval for masks of objects). It is imported lazily.
"""

from loopwright.data.images.dataset import ImageDataset, ImageOnly, UnreadableSampleError, as_transform
from loopwright.data.images.decoding import decode_image, decode_mask
from loopwright.data.images.geometry import moved_boxes
from loopwright.data.images.presets import (
    STRENGTHS,
    classification_eval,
    classification_train,
    detection_eval,
    detection_train,
    masked_image_eval,
    masked_image_train,
    segmentation_eval,
    segmentation_train,
)
from loopwright.data.images.scene import IGNORED_CLASS, Scene, boxes_of_masks, load_scene, rasterize
from loopwright.data.images.tensors import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    SceneFeatures,
    collate_images,
    denormalize,
    normalize,
    to_tensor,
)
from loopwright.data.images.transforms import (
    CenterCrop,
    ColorJitter,
    Compose,
    HorizontalFlip,
    PadTo,
    RandomAffine,
    RandomCrop,
    RandomErasing,
    RandomResizedCrop,
    Resize,
    Transform,
    VerticalFlip,
)

__all__ = [
    "IGNORED_CLASS",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "STRENGTHS",
    "CenterCrop",
    "ColorJitter",
    "Compose",
    "HorizontalFlip",
    "ImageDataset",
    "ImageOnly",
    "PadTo",
    "RandomAffine",
    "RandomCrop",
    "RandomErasing",
    "RandomResizedCrop",
    "Resize",
    "Scene",
    "SceneFeatures",
    "Transform",
    "UnreadableSampleError",
    "VerticalFlip",
    "as_transform",
    "boxes_of_masks",
    "classification_eval",
    "classification_train",
    "collate_images",
    "decode_image",
    "decode_mask",
    "denormalize",
    "detection_eval",
    "detection_train",
    "load_scene",
    "masked_image_eval",
    "masked_image_train",
    "moved_boxes",
    "normalize",
    "rasterize",
    "segmentation_eval",
    "segmentation_train",
    "to_tensor",
]
