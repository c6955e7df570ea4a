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

from loopwright.data.pictures.canvas import as_image as as_image
from loopwright.data.pictures.canvas import encode as encode
from loopwright.data.pictures.canvas import fit as fit
from loopwright.data.pictures.canvas import scale_for as scale_for
from loopwright.data.pictures.confusion import confusion_picture as confusion_picture
from loopwright.data.pictures.objects import draw_boxes as draw_boxes
from loopwright.data.pictures.objects import draw_masks as draw_masks
from loopwright.data.pictures.objects import draw_semantic as draw_semantic
from loopwright.data.pictures.palette import NUM_COLORS as NUM_COLORS
from loopwright.data.pictures.palette import color_of as color_of
from loopwright.data.pictures.palette import palette as palette
from loopwright.data.pictures.sheets import reconstruction_row as reconstruction_row
from loopwright.data.pictures.sheets import sheet as sheet
from loopwright.data.pictures.sheets import side_by_side as side_by_side
from loopwright.data.pictures.text import drawable_names as drawable_names
