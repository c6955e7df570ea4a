"""Images: decoding, scenes with boxes and masks, transforms for all of them, datasets and batches.

Needs the extra `vision` (Pillow; faster-coco-eval for masks of objects). It is imported lazily.
"""

from loopwright.data.images.cache import CacheChoice as CacheChoice
from loopwright.data.images.cache import PixelCache as PixelCache
from loopwright.data.images.cache import choose_cache as choose_cache
from loopwright.data.images.dataset import ImageDataset as ImageDataset
from loopwright.data.images.dataset import UnreadableSampleError as UnreadableSampleError
from loopwright.data.images.dataset import as_transform as as_transform
from loopwright.data.images.dataset import fixed_part as fixed_part
from loopwright.data.images.decoding import decode_image as decode_image
from loopwright.data.images.decoding import decode_mask as decode_mask
from loopwright.data.images.device import ImageBatch as ImageBatch
from loopwright.data.images.geometry import moved_boxes as moved_boxes
from loopwright.data.images.presets import STRENGTHS as STRENGTHS
from loopwright.data.images.presets import classification_eval as classification_eval
from loopwright.data.images.presets import classification_train as classification_train
from loopwright.data.images.presets import detection_eval as detection_eval
from loopwright.data.images.presets import detection_train as detection_train
from loopwright.data.images.presets import masked_image_train as masked_image_train
from loopwright.data.images.presets import segmentation_eval as segmentation_eval
from loopwright.data.images.presets import segmentation_train as segmentation_train
from loopwright.data.images.scene import Scene as Scene
from loopwright.data.images.scene import boxes_of_masks as boxes_of_masks
from loopwright.data.images.scene import load_scene as load_scene
from loopwright.data.images.scene import rasterize as rasterize
from loopwright.data.images.tensors import SceneFeatures as SceneFeatures
from loopwright.data.images.tensors import collate_images as collate_images
from loopwright.data.images.tensors import denormalize as denormalize
from loopwright.data.images.tensors import from_bytes as from_bytes
from loopwright.data.images.tensors import normalize as normalize
from loopwright.data.images.tensors import to_tensor as to_tensor
from loopwright.data.images.transforms import CenterCrop as CenterCrop
from loopwright.data.images.transforms import ColorJitter as ColorJitter
from loopwright.data.images.transforms import Compose as Compose
from loopwright.data.images.transforms import HorizontalFlip as HorizontalFlip
from loopwright.data.images.transforms import PadTo as PadTo
from loopwright.data.images.transforms import RandomAffine as RandomAffine
from loopwright.data.images.transforms import RandomCrop as RandomCrop
from loopwright.data.images.transforms import RandomErasing as RandomErasing
from loopwright.data.images.transforms import RandomResizedCrop as RandomResizedCrop
from loopwright.data.images.transforms import Resize as Resize
from loopwright.data.images.transforms import Transform as Transform
from loopwright.data.images.transforms import VerticalFlip as VerticalFlip
