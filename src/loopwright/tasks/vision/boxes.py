"""object-detection: the objects of an image, each with a class and a box."""

from __future__ import annotations

from loopwright.sources import Role
from loopwright.tasks.vision.base import IMAGE, IMAGE_ID
from loopwright.tasks.vision.detection import DETECTION_DEMO, DetectionTask


class ObjectDetection(DetectionTask):
    name = "object-detection"
    summary = "the objects of an image, each with a class and a box"
    roles = (
        IMAGE,
        Role("objects", "objects", names=("objects", "annotations"), is_input=False, may_be_empty=True),
        IMAGE_ID,
    )
    explanation = {
        "data": "A folder with COCO's train.json and validation.json beside the images; YOLO's images and labels "
        'folders with data.yaml or classes.txt; json, jsonl or parquet with a column "objects" of {"bbox": [[left, '
        'top, width, height]], "category": [...]}; or a Hub id.',
        "boxes": "Boxes are clipped to their image. Those outside it or without an area are dropped and counted.",
        "models": "By default a small net that finds centres. Else a folder or Hub id of transformers (the DETR "
        "family), or package.module:function that returns a module with a loss and a decode method.",
        "metric": "COCO's average precision and recall, at the size of the images. eval/classes.json has the hits and "
        "misses of each class.",
        "predict": "lw predict RUN a.jpg b.png photos/ --threshold 0.5 --overlays drawn/",
    }
    example = "lw train object-detection --data scenes/ --model ./detr --epochs 20 --batch 8 --lr 5e-5"
    auto_class = "AutoModelForObjectDetection"
    demo = DETECTION_DEMO
    demo_note = "digits on photos, found by a small net: mAP 0.65 (nothing found 0), 105 s"
