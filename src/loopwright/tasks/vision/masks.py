"""instance-segmentation: the objects of an image, each with a class and a mask."""

from __future__ import annotations

from loopwright.sources import Role
from loopwright.tasks.vision.base import IMAGE, IMAGE_ID
from loopwright.tasks.vision.detection import DETECTION_DEMO, DetectionTask


class InstanceSegmentation(DetectionTask):
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
    explanation = {
        "data": "A folder with COCO's train.json and validation.json (polygons or run lengths) beside the images; "
        'YOLO\'s images and labels folders with polygons; json, jsonl or parquet with a column "objects" that has '
        '"segmentation", or "annotation" with class and object in two channels; or a Hub id.',
        "models": "By default a small net that finds centres and mixes masks. Else a folder or Hub id of transformers "
        "(Mask2Former, MaskFormer), or package.module:function that returns a module with a loss and a decode method.",
        "metric": "COCO's average precision and recall of masks, and of their boxes, at the size of the images. "
        "eval/classes.json has the hits and misses of each class.",
        "predict": "lw predict RUN a.jpg b.png photos/ --overlays drawn/ (masks as run lengths)",
    }
    example = "lw train instance-segmentation --data scenes/ --model ./mask2former --epochs 20 --lr 5e-5"
    auto_class = "AutoModelForUniversalSegmentation"
    has_masks = True
    demo = DETECTION_DEMO
    demo_note = "digits on photos, found and outlined by a small net: mask mAP 0.72 (nothing found 0), 140 s"
