"""Scenes made of rows: files, boxes, polygons and run-length encodings."""

import io
import sys

import numpy as np
import pytest
from PIL import Image, ImageDraw

from loopwright.data.images import Scene, boxes_of_masks, load_scene, rasterize
from loopwright.errors import DataError, InputError

HEIGHT, WIDTH = 30, 40


def png(values: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(values).save(buffer, "PNG")
    return buffer.getvalue()


def blank(height: int = HEIGHT, width: int = WIDTH) -> bytes:
    return png(np.zeros((height, width, 3), dtype=np.uint8))


def counts_of(mask: np.ndarray) -> list[int]:
    """The lengths of the runs of a mask, columns after one another, beginning with zeros: written out."""
    counts, value = [0], False
    for pixel in mask.T.ravel():
        if pixel != value:
            counts.append(0)
            value = pixel
        counts[-1] += 1
    return counts


def compressed(counts: list[int]) -> str:
    """COCO's text for runs: differences to the run before last, in groups of five bits, 48 added."""
    text = []
    for index, count in enumerate(counts):
        value = count - counts[index - 2] if index > 2 else count
        while True:
            bits = value & 0x1F
            value >>= 5
            is_last = value == (-1 if bits & 0x10 else 0)
            text.append(chr((bits if is_last else bits | 0x20) + 48))
            if is_last:
                break
    return "".join(text)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", ["list", "text", "bytes"])
def test_run_length_encodings_give_the_mask_they_were_made_of(seed, kind):
    mask = np.random.default_rng(seed).random((HEIGHT, WIDTH)) > (0.1 if seed else 0.5)
    if seed == 4:
        mask[:] = False
    counts = counts_of(mask)
    given = {"list": counts, "text": compressed(counts), "bytes": compressed(counts).encode()}[kind]
    segment = {"size": [HEIGHT, WIDTH], "counts": given}
    np.testing.assert_array_equal(rasterize([segment], (HEIGHT, WIDTH)), mask[None])


def test_polygons_cover_what_pillow_draws_but_for_their_border():
    polygon = [3.0, 4.0, 30.0, 6.0, 35.0, 25.0, 10.0, 28.0]
    canvas = Image.new("1", (WIDTH, HEIGHT))
    ImageDraw.Draw(canvas).polygon(polygon, fill=1)
    drawn, mask = np.asarray(canvas), rasterize([[polygon]], (HEIGHT, WIDTH))[0]
    assert (drawn & mask).sum() / (drawn | mask).sum() > 0.9
    np.testing.assert_allclose(boxes_of_masks(mask[None]), [[3, 4, 35, 28]], atol=1)


def test_the_polygons_of_one_object_are_joined_and_objects_are_kept_apart():
    squares = [[2, 2, 6, 2, 6, 6, 2, 6], [20, 10, 24, 10, 24, 14, 20, 14]]
    apart = rasterize([[squares[0]], [squares[1]]], (HEIGHT, WIDTH))
    joined = rasterize([squares], (HEIGHT, WIDTH))
    assert apart.shape == (2, HEIGHT, WIDTH) and apart.sum(axis=(1, 2)).tolist() == [16, 16]
    np.testing.assert_array_equal(joined[0], apart.any(axis=0))


def test_an_object_without_a_segment_gets_its_box():
    boxes = np.array([[2.2, 3, 10, 12.6]], dtype=np.float32)
    assert boxes_of_masks(rasterize([None], (HEIGHT, WIDTH), boxes)).tolist() == [[2, 3, 10, 13]]
    assert not rasterize([None], (HEIGHT, WIDTH)).any()
    assert rasterize([], (HEIGHT, WIDTH)).shape == (0, HEIGHT, WIDTH)


@pytest.mark.parametrize(
    ("segment", "message"),
    [
        *[(other, "must be a list of polygons, a run-length encoding or None, got") for other in ([], "abc", 3)],
        ({"size": [4, 4], "counts": [16]}, r"the \(height, width\) \[4, 4\], its image \[30, 40\]"),
    ],
)
def test_a_segment_of_another_kind_or_size_is_refused(segment, message):
    with pytest.raises(DataError, match=message):
        rasterize([segment], (HEIGHT, WIDTH))


def test_a_missing_package_is_reported_with_the_line_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "faster_coco_eval", None)
    with pytest.raises(InputError, match=r"needs the package faster-coco-eval") as raised:
        rasterize([{"size": [HEIGHT, WIDTH], "counts": [HEIGHT * WIDTH]}], (HEIGHT, WIDTH))
    assert raised.value.code == "install.extra" and raised.value.fix == "pip install 'loopwright[vision]'"


def test_boxes_of_masks_are_the_smallest_around_them():
    rng = np.random.default_rng(0)
    masks = rng.random((20, 9, 13)) > 0.96
    masks[0] = False
    expected = []
    for mask in masks:
        rows, columns = np.nonzero(mask)
        has = len(rows) > 0
        expected.append([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1] if has else [0, 0, 0, 0])
    np.testing.assert_array_equal(boxes_of_masks(masks), expected)


def test_a_row_with_objects_gives_boxes_classes_and_crowd_and_masks_only_when_asked():
    segments = [[[2, 2, 6, 2, 6, 6, 2, 6]], None]
    boxes = [[2, 2, 6, 6], [0, 0, 9, 8]]
    objects = {"boxes": boxes, "classes": [3, 1], "segments": segments, "crowd": [False, True]}
    row = {"image": blank(), "objects": objects}
    scene = load_scene(row)
    assert scene.boxes.tolist() == boxes and scene.classes.tolist() == [3, 1]
    assert scene.crowd.tolist() == [False, True] and scene.masks is None and scene.num_objects == 2
    assert boxes_of_masks(load_scene(row, with_masks=True).masks).tolist() == boxes


def test_a_row_without_objects_is_an_empty_scene_and_an_image_alone_has_nothing_else():
    scene = load_scene({"image": blank(), "objects": {"boxes": [], "classes": []}}, with_masks=True)
    assert scene.num_objects == 0
    assert scene.boxes.shape == (0, 4) and scene.masks.shape == (0, HEIGHT, WIDTH) and scene.crowd.shape == (0,)
    scene = load_scene({"image": blank(), "label": 3})
    assert scene.size == (HEIGHT, WIDTH) and scene.num_objects == 0
    assert (scene.boxes, scene.masks, scene.semantic) == (None, None, None)


def test_reduced_labels_count_from_zero_and_class_0_is_ignored():
    ids = np.array([[0, 1, 2, 150, 255]], dtype=np.uint8)
    row = {"image": png(np.zeros((1, 5, 3), dtype=np.uint8)), "mask": png(ids)}
    assert load_scene(row).semantic.tolist() == [[0, 1, 2, 150, 255]]
    assert load_scene(row, reduce_labels=True).semantic.tolist() == [[255, 0, 1, 149, 255]]
    assert load_scene(row, reduce_labels=True, ignore_index=2).semantic.tolist() == [[2, 0, 2, 149, 254]]


def test_a_mask_of_another_size_than_its_image_is_refused(tmp_path):
    path = tmp_path / "mask.png"
    path.write_bytes(png(np.zeros((HEIGHT, WIDTH + 1), dtype=np.uint8)))
    with pytest.raises(DataError, match=r"the mask .*mask\.png is 41 x 30, its image \(\d+ bytes\) 40 x 30"):
        load_scene({"image": blank(), "mask": str(path)})


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({"boxes": np.zeros((2, 4)), "classes": np.zeros(1)}, r"one box, class, mask and crowd flag .*'classes': 1"),
        ({"masks": np.zeros((1, 5, 5), bool)}, r"masks must have .* got \(5, 5\) instead of \(4, 6\)"),
        ({"semantic": np.zeros((6, 4), int)}, r"semantic must have the height and width of the image"),
        ({"image": np.zeros((4, 6), np.uint8)}, r"must be uint8 with the shape \(height, width, 3\), got"),
        ({"image": np.zeros((4, 6, 3))}, r"must be uint8 with the shape \(height, width, 3\), got"),
    ],
    ids=["counts", "size of masks", "size of ids", "grey", "floats"],
)
def test_a_scene_whose_parts_do_not_fit_is_refused(known, expected):
    with pytest.raises(DataError, match=expected):
        Scene(**{"image": np.zeros((4, 6, 3), np.uint8), **known})
