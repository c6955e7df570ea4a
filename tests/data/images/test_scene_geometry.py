"""Image, boxes, masks and class ids move together through every geometric transform, for random scenes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image

from loopwright.data.images import (
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
    Scene,
    VerticalFlip,
    boxes_of_masks,
    moved_boxes,
)
from loopwright.data.images.geometry import cropped, resized, warped

GEOMETRIC = {
    "resize to a shorter side": Resize(shorter=70),
    "resize to a longer side": Resize(longest=150),
    "resize with both": Resize(shorter=90, longest=120),
    "resize exactly": Resize(exact=(75, 130)),
    "pad": PadTo((140, 128), multiple=16),
    "centre crop": CenterCrop((60, 72)),
    "random crop": RandomCrop((64, 56)),
    "random resized crop": RandomResizedCrop(96, (0.3, 1.0)),
    "horizontal flip": HorizontalFlip(1.0),
    "vertical flip": VerticalFlip(1.0),
    "affine": RandomAffine(degrees=30, translate=0.2, scale=(0.7, 1.4), shear=10),
    "all after one another": Compose(
        [Resize(longest=110), PadTo(112), RandomAffine(10, 0.1, (0.8, 1.2), 4), HorizontalFlip(), RandomCrop(90)]
    ),
}
PHOTOMETRIC = {"jitter": ColorJitter(0.4, 0.4, 0.4, 0.1), "erasing": RandomErasing(1.0)}
every_geometric = pytest.mark.parametrize("transform", GEOMETRIC.values(), ids=GEOMETRIC.keys())
PARTS = ("image", "boxes", "classes", "masks", "semantic", "crowd")
examples = settings(max_examples=25)
seeds = st.integers(0, 2**32 - 1)


def random_scene(seed: int, kind: str = "ellipse", least: int = 10) -> Scene:
    """Objects of random size and place, each with a class, a crowd flag and a colour of its own, some overlapping."""
    rng = np.random.default_rng(seed)
    height, width = (int(side) for side in rng.integers(64, 129, 2))
    num_objects = int(rng.integers(1, 5))
    rows, columns = np.mgrid[0:height, 0:width] + 0.5
    masks = np.zeros((num_objects, height, width), dtype=bool)
    image = np.zeros((height, width, 3), dtype=np.uint8)
    semantic = np.zeros((height, width), dtype=np.int32)
    for index in range(num_objects):
        own_height, own_width = rng.integers(least, height // 2 + 1), rng.integers(least, width // 2 + 1)
        top, left = rng.integers(0, height - own_height + 1), rng.integers(0, width - own_width + 1)
        if kind == "ellipse":
            middle = (top + own_height / 2, left + own_width / 2)
            distance = ((rows - middle[0]) / own_height) ** 2 + ((columns - middle[1]) / own_width) ** 2
            masks[index] = distance <= 0.25
        else:
            masks[index, top : top + own_height, left : left + own_width] = True
        image[masks[index]] = (255, 40 * (index + 1), 0)
        semantic[masks[index]] = index + 1
    classes = np.arange(num_objects)
    return Scene(image, boxes_of_masks(masks), classes, masks, semantic, classes % 2 == 1)


def ious(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The overlap of each pair of boxes, written out."""
    overlaps = []
    for (left, top, right, bottom), other in zip(first.tolist(), second.tolist(), strict=True):
        width = max(0.0, min(right, other[2]) - max(left, other[0]))
        height = max(0.0, min(bottom, other[3]) - max(top, other[1]))
        both = (right - left) * (bottom - top) + (other[2] - other[0]) * (other[3] - other[1])
        overlaps.append(width * height / (both - width * height))
    return np.array(overlaps)


def assert_equal(first, second):
    for name in PARTS:
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name), err_msg=name)


@every_geometric
@examples
@given(seed=seeds)
def test_boxes_fit_the_moved_masks_nothing_leaves_the_image_and_what_goes_takes_all_its_parts_along(transform, seed):
    scene = random_scene(seed)
    moved = transform(scene, np.random.default_rng(seed))
    height, width = moved.size
    assert (ious(moved.boxes, boxes_of_masks(moved.masks)) >= 0.9).all()
    assert (moved.boxes >= 0).all() and (moved.boxes <= [width, height, width, height]).all()
    assert (moved.boxes[:, :2] < moved.boxes[:, 2:]).all() and moved.masks.any(axis=(1, 2)).all()
    kinds = [getattr(moved, name).dtype.name for name in PARTS]
    assert kinds == ["uint8", "float32", "int64", "bool", "int32", "bool"]
    assert moved.masks.shape == (len(moved.boxes), height, width) and moved.semantic.shape == (height, width)
    assert len(moved.boxes) == len(moved.classes) == len(moved.masks) == len(moved.crowd) <= scene.num_objects
    np.testing.assert_array_equal(moved.crowd, moved.classes % 2 == 1)
    assert (np.diff(moved.classes) > 0).all()


@every_geometric
@examples
@given(seed=seeds)
def test_boxes_without_masks_go_where_the_masks_go(transform, seed):
    scene = random_scene(seed, "rectangle", least=30)
    with_masks = transform(scene, np.random.default_rng(seed))
    without = transform(replace(scene, masks=None), np.random.default_rng(seed))
    both = np.intersect1d(with_masks.classes, without.classes)
    moved = moved_boxes(scene.boxes, without.matrix)
    height, width = without.size
    is_whole = ((moved >= 0) & (moved <= [width, height, width, height])).all(axis=1)
    # What a border cuts of a turned object has a smaller box than its corners say, and small ones are all rounding.
    judged = [index for index in both if is_whole[index] and (moved[index, 2:] - moved[index, :2]).min() >= 25]
    assume(judged)
    first = boxes_of_masks(with_masks.masks[np.isin(with_masks.classes, judged)])
    assert (ious(first, without.boxes[np.isin(without.classes, judged)]) >= 0.9).all()


@every_geometric
@examples
@given(seed=seeds)
def test_the_mask_covers_the_pixels_that_the_object_has_in_the_moved_image(transform, seed):
    scene = random_scene(seed, least=30)
    alone = replace(scene, image=np.repeat(scene.masks[0][:, :, None] * np.uint8(255), 3, axis=2))
    moved = transform(alone, np.random.default_rng(seed))
    assume(0 in moved.classes)
    drawn, mask = moved.image[:, :, 0] > 127, moved.masks[list(moved.classes).index(0)]
    assume(mask.sum() >= 300)
    assert (drawn & mask).sum() / (drawn | mask).sum() >= 0.9


@every_geometric
@examples
@given(seed=seeds)
def test_class_ids_and_masks_agree_after_moving(transform, seed):
    scene = random_scene(seed)
    moved = transform(scene, np.random.default_rng(seed))
    painted = np.zeros(moved.size, dtype=np.int32)
    for own_class, mask in zip(moved.classes, moved.masks, strict=True):
        painted[mask] = own_class + 1
    dropped = np.setdiff1d(scene.classes, moved.classes) + 1
    judged = (moved.semantic != 255) & ~np.isin(moved.semantic, dropped)
    assert judged.any()
    np.testing.assert_array_equal(moved.semantic[judged], painted[judged])


@pytest.mark.parametrize("transform", [*GEOMETRIC.values(), *PHOTOMETRIC.values()], ids=[*GEOMETRIC, *PHOTOMETRIC])
@settings(max_examples=10)
@given(seed=seeds)
def test_the_same_seed_gives_the_same_pixels_and_the_scene_itself_is_left_alone(transform, seed):
    scene, untouched = random_scene(seed), random_scene(seed)
    first, second = (transform(scene, np.random.default_rng(seed)) for _ in range(2))
    assert_equal(first, second)
    assert_equal(scene, untouched)


@pytest.mark.parametrize("transform", PHOTOMETRIC.values(), ids=PHOTOMETRIC.keys())
@settings(max_examples=10)
@given(seed=seeds)
def test_what_changes_colours_moves_nothing(transform, seed):
    scene = random_scene(seed)
    changed = transform(scene, np.random.default_rng(seed))
    assert (changed.image != scene.image).any()
    assert_equal(replace(changed, image=scene.image), scene)


@pytest.mark.parametrize("flip", [HorizontalFlip(1.0), VerticalFlip(1.0)], ids=["horizontal", "vertical"])
@examples
@given(seed=seeds)
def test_flipping_twice_changes_nothing(flip, seed):
    scene, rng = random_scene(seed), np.random.default_rng(seed)
    once = flip(scene, rng)
    assert_equal(flip(once, rng), scene)
    np.testing.assert_array_equal(flip(once, rng).matrix, np.eye(3))


@examples
@given(seed=seeds)
def test_the_matrix_takes_points_to_where_they_lie_now_and_back(seed):
    scene = random_scene(seed, "rectangle")
    moved = Compose([Resize(exact=(80, 100)), HorizontalFlip(1.0), PadTo(128)])(scene, np.random.default_rng(seed))
    scale = np.array([100 / scene.size[1], 80 / scene.size[0]] * 2)
    left, top, right, bottom = (scene.boxes * scale).T
    expected = np.stack([100 - right, top, 100 - left, bottom], axis=1)
    np.testing.assert_allclose(moved_boxes(scene.boxes, moved.matrix), expected, atol=1e-4)
    there = moved_boxes(scene.boxes, moved.matrix)
    np.testing.assert_allclose(moved_boxes(there, np.linalg.inv(moved.matrix)), scene.boxes, atol=1e-4)


@pytest.mark.parametrize("size", [(31, 17), (100, 64), (64, 129)], ids=["smaller", "the same width", "larger"])
def test_masks_take_the_nearest_pixel_and_images_are_antialiased_as_pillow_does(size):
    scene = random_scene(3)
    moved = resized(scene, *size)
    image = Image.fromarray(scene.image).resize(size[::-1], Image.Resampling.BILINEAR)
    mask = Image.fromarray(scene.semantic.astype(np.uint8)).resize(size[::-1], Image.Resampling.NEAREST)
    np.testing.assert_array_equal(moved.image, np.asarray(image))
    np.testing.assert_array_equal(moved.semantic, np.asarray(mask))


def test_a_turn_by_a_quarter_is_numpys():
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (40, 40, 3), dtype=np.uint8)
    masks = rng.random((2, 40, 40)) > 0.5
    semantic = rng.integers(0, 9, (40, 40), dtype=np.int32)
    turn = np.array([[0.0, -1.0, 40.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])  # clockwise on the screen, as y points down
    moved = warped(Scene(image, masks=masks, semantic=semantic), turn)
    np.testing.assert_array_equal(moved.image, np.rot90(image, -1))
    np.testing.assert_array_equal(moved.masks, np.rot90(masks, -1, axes=(1, 2)))
    np.testing.assert_array_equal(moved.semantic, np.rot90(semantic, -1))


def two_boxes() -> Scene:
    """Two boxes of 20 x 10: one of which columns 0-19 of 100 hold a quarter, one that they hold whole."""
    boxes = np.array([[15, 5, 35, 15], [0, 20, 20, 30]], dtype=np.float32)
    masks = np.zeros((2, 40, 100), dtype=bool)
    masks[0, 5:15, 15:35] = masks[1, 20:30, 0:20] = True
    image = np.zeros((40, 100, 3), dtype=np.uint8)
    return Scene(image, boxes, np.array([7, 8]), masks, crowd=np.array([True, False]))


@pytest.mark.parametrize("has_masks", [True, False], ids=["masks", "boxes alone"])
@pytest.mark.parametrize(("min_visible", "kept"), [(0.0, [7, 8]), (0.25, [7, 8]), (0.26, [8])])
def test_an_object_is_dropped_when_less_than_min_visible_of_it_is_left(has_masks, min_visible, kept):
    scene = two_boxes() if has_masks else replace(two_boxes(), masks=None)
    moved = cropped(scene, 0, 0, 40, 20, min_visible)
    assert moved.classes.tolist() == kept
    assert moved.crowd.tolist() == [one == 7 for one in kept]
    assert moved.boxes[-1].tolist() == [0, 20, 20, 30]
    assert moved.boxes[0].tolist() == ([15, 5, 20, 15] if 7 in kept else [0, 20, 20, 30])


def test_an_object_that_is_gone_is_dropped_at_any_min_visible():
    moved = cropped(two_boxes(), 0, 40, 40, 20, min_visible=0.0)
    assert moved.num_objects == 0
    assert moved.boxes.shape == (0, 4) and moved.masks.shape == (0, 40, 20)


def test_a_turned_or_cut_object_gets_the_box_of_its_mask_and_else_that_of_its_corners():
    rows, columns = np.mgrid[0:100, 0:100] + 0.5
    disc = (rows - 50) ** 2 + (columns - 50) ** 2 <= 20**2
    scene = Scene(np.zeros((100, 100, 3), np.uint8), boxes_of_masks(disc[None]), np.array([0]), disc[None])
    half = np.sqrt(0.5)
    turn = np.array([[half, -half, 50], [half, half, 50 - 100 * half], [0, 0, 1.0]])
    np.testing.assert_allclose(warped(scene, turn).boxes, [[30, 30, 70, 70]], atol=1)
    corners = 20 * np.sqrt(2)
    expected = [[50 - corners, 50 - corners, 50 + corners, 50 + corners]]
    np.testing.assert_allclose(warped(replace(scene, masks=None), turn).boxes, expected, atol=1e-4)
    mask = np.tri(40, dtype=bool)[None]  # the lower left half
    scene = Scene(np.zeros((40, 40, 3), np.uint8), boxes_of_masks(mask), np.array([0]), mask)
    assert cropped(scene, 0, 20, 40, 20).boxes.tolist() == [[0, 20, 20, 40]]
