"""object-detection: the objects of an image, each with a class and a box."""

from __future__ import annotations

from loopwright.sources import Role
from loopwright.tasks.vision.base import IMAGE, IMAGE_ID
from loopwright.tasks.vision.detection import DETECTION_DEMO, DetectionTask


class ObjectDetection(DetectionTask):
    """Trains a detector of objects."""

    name = "object-detection"
    summary = "the objects of an image, each with a class and a box"
    roles = (
        IMAGE,
        Role("objects", "objects", names=("objects", "annotations"), is_input=False, may_be_empty=True),
        IMAGE_ID,
    )
    explanation = (
        "data      a folder with train.json and validation.json as COCO has them and the images beside; or images and",
        "          labels folders as YOLO has them, with data.yaml or classes.txt; json, jsonl or parquet with a",
        '          column "objects" of {"bbox": [[left, top, width, height]], "category": [...]}; a Hub id',
        "boxes     are cut at the border of their image; those outside and of no size are left out, and counted",
        "models    none: a small net that finds centres; a folder or Hub id of transformers (DETR and its family);",
        "          package.module:function that makes a module with a loss and a decode",
        "metric    average precision and recall as COCO has them, at the size of the images; hits and misses of each",
        "          class are in eval/classes.json",
        "predict   lw predict RUN a.jpg b.png photos/ --threshold 0.5 --overlays drawn/",
    )
    example = "lw train object-detection --data scenes/ --model ./detr --epochs 20 --batch 8 --lr 5e-5"
    auto_class = "AutoModelForObjectDetection"
    demo = DETECTION_DEMO
    demo_note = "digits on photos, found by a small net: mAP 0.65 (nothing found 0), 105 s"
