"""Images as data: folders, COCO, YOLO, masks, and tables with a column of images. Pillow is imported lazily.

* `layouts` finds out what a folder holds; `folders`, `coco`, `yolo` and `wrapping` are the tables. * `reading` looks at
an image: its size, upright, and its content; `objects` and `masks` at what is in it. * `scanning` goes over all rows of
a file; `summary` says what that means for labels and for data.json.
"""

from __future__ import annotations
