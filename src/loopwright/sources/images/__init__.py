"""Images as data: folders, COCO, YOLO, masks, and tables with a column of images. Pillow is imported lazily.

* `layouts` detects the layout of a folder; `folders`, `coco`, `yolo` and `tables` hold the tables.
* `image_file` inspects an image: its upright size and its content; `objects` and `masks` read its annotations.
* `scene_scan` goes over all rows of a file; `scenes` derives labels, counts and data.json from the scans.
"""
