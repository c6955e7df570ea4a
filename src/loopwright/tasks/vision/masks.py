"""instance-segmentation: the objects of an image, each with a class and a mask."""

from __future__ import annotations

from loopwright.sources import Role
from loopwright.tasks.vision.base import IMAGE, IMAGE_ID
from loopwright.tasks.vision.detection import DETECTION_DEMO, DetectionTask


class InstanceSegmentation(DetectionTask):
    """Trains a model that finds objects and their masks."""

    name = "instance-segmentation"
    summary = "the objects of an image, each with a class and a mask"
    roles = (
        IMAGE,
        Role(
            "objects",
            "objects",
            names=("objects", "annotations", "annotation", "mask"),
            is_input=False,
            may_be_empty=True,
            has_outlines=True,
        ),
        IMAGE_ID,
    )
    explanation = (
        "data      a folder with train.json and validation.json as COCO has them (polygons or run lengths) and the",
        "          images beside; images and labels folders as YOLO has them, with polygons; json, jsonl or parquet",
        '          with a column "objects" that has "segmentation", or "annotation" with class and object in two',
        "          channels; a Hub id",
        "models    none: a small net that finds centres and mixes masks; a folder or Hub id of transformers",
        "          (Mask2Former, MaskFormer); package.module:function that makes a module with a loss and a decode",
        "metric    average precision and recall of masks as COCO has them, and of their boxes, at the size of the",
        "          images; hits and misses of each class are in eval/classes.json",
        "predict   lw predict RUN a.jpg b.png photos/ --overlays drawn/   (masks as run lengths)",
    )
    example = "lw train instance-segmentation --data scenes/ --model ./mask2former --epochs 20 --lr 5e-5"
    auto_class = "AutoModelForUniversalSegmentation"
    has_masks = True
    demo = DETECTION_DEMO
    demo_note = "digits on photos, found and outlined by a small net: mask mAP 0.72 (nothing found 0), 140 s"
