"""Pictures: lines, colors and captions are where they should be, pixel by pixel."""

import io
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import toys
from data.tiny_font import tiny_font
from loopwright.data import pictures
from loopwright.data.pictures import (
    NUM_COLORS,
    as_image,
    color_of,
    confusion_picture,
    draw_boxes,
    draw_masks,
    draw_semantic,
    drawable_names,
    encode,
    fit,
    palette,
    reconstruction_row,
    scale_for,
    sheet,
    side_by_side,
)
from loopwright.data.pictures.canvas import LEAST_SIDE
from loopwright.data.pictures.sheets import GAP
from loopwright.data.pictures.text import line_height, readable_on, shorten, text_width
from loopwright.errors import DataError, InputError

RED, BLUE = (255, 0, 0), (0, 0, 255)


def noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def pixels(image: Image.Image) -> np.ndarray:
    assert image.mode == "RGB"
    return np.asarray(image)


def is_color(image: Image.Image, color: tuple[int, int, int]) -> np.ndarray:
    return (pixels(image) == color).all(axis=-1)


def test_arrays_of_every_kind_become_the_pixels_they_stand_for():
    grey = np.array([[0, 128], [200, 255]], np.uint8)
    expected = np.repeat(grey[:, :, None], 3, axis=2)
    for image in (grey, grey[:, :, None], expected, grey / 255, Image.fromarray(grey)):
        assert np.array_equal(pixels(as_image(image)), expected)
    assert pixels(as_image(np.array([[True, False]])))[0].tolist() == [[255] * 3, [0] * 3]
    assert pixels(as_image(np.array([[-1.0, 2.0, np.nan]])))[0, :, 0].tolist() == [0, 255, 0]


def test_an_image_is_copied_never_drawn_on():
    given = Image.new("RGB", (300, 300))
    array = np.zeros((300, 300, 3), np.uint8)
    for image in (given, array):
        draw_boxes(image, [[10, 10, 50, 50]], ["a"], [0.5])
        draw_masks(image, np.ones((1, 300, 300), bool))
        sheet([image], ["a"])
        assert not np.asarray(image).any()


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((4, 4, 4), np.uint8, r"shape \(4, 4, 4\); expected \(H, W\)"),
        ((4,), np.uint8, "expected"),
        ((0, 4), np.uint8, "expected"),
        ((4, 4), np.int64, "dtype int64; expected uint8"),
    ],
)
def test_arrays_that_are_not_images_are_refused(shape, dtype, message):
    with pytest.raises(DataError, match=message):
        as_image(np.zeros(shape, dtype))


def test_small_images_are_enlarged_by_a_whole_factor_and_large_ones_shrunk():
    digit = noise(8, 8)
    large = fit(digit, 100)
    assert large.size == (96, 96)
    assert np.array_equal(pixels(large), np.repeat(np.repeat(digit, 12, axis=0), 12, axis=1))
    assert fit(noise(100, 400), 100).size == (100, 25)
    assert fit(noise(1, 4000), 100).size == (100, 1)
    assert (scale_for(8, 8), scale_for(64, 64), scale_for(64, 300), scale_for(5000, 10)) == (28, 4, 1, 1)


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
def test_an_encoded_image_is_always_the_same_and_opens_again(kind):
    image = np.tile(np.arange(64, dtype=np.uint8) * 4, (64, 1))
    content = encode(image, kind)
    assert content == encode(image, kind)
    opened = Image.open(io.BytesIO(content))
    assert (opened.format, opened.size, opened.mode) == (kind.upper(), (64, 64), "RGB")
    difference = np.abs(pixels(opened)[:, :, 0].astype(int) - image)
    assert difference.max() <= (0 if kind == "png" else 12)
    if kind != "png":
        assert len(encode(noise(64, 64), kind, quality=10)) < len(encode(noise(64, 64), kind, quality=90))


def test_an_unknown_kind_of_file_and_a_missing_pillow_are_reported(monkeypatch):
    with pytest.raises(DataError, match="'gif'; expected 'png', 'jpeg' or 'webp'"):
        encode(noise(4, 4), "gif")
    monkeypatch.setitem(sys.modules, "PIL", None)
    for draw in (
        lambda: sheet([noise(4, 4)], ["a"]),
        lambda: draw_boxes(noise(4, 4), [[0, 0, 1, 1]], ["a"]),
        lambda: confusion_picture([[1]], ["a"]),
        lambda: encode(noise(4, 4)),
    ):
        with pytest.raises(InputError, match=r"error\[install.extra\].*pillow\n.*pip install 'loopwright\[vision\]'"):
            draw()


def test_the_package_imports_numpy_and_pillow_only_when_something_is_drawn():
    files = sorted(Path(pictures.__file__).parent.glob("*.py"))
    assert len(files) >= 6
    assert toys.imported_by(files) == {"loopwright", "numpy"}


def to_lab(colors):
    """Return sRGB colors of shape (n, 3) as CIELAB, by IEC 61966-2-1 and the white point of D65."""
    share = colors / 255
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    ratio = linear @ to_xyz.T / np.array([0.9505, 1.0, 1.089])
    curved = np.where(ratio > (6 / 29) ** 3, np.cbrt(ratio), ratio / (3 * (6 / 29) ** 2) + 4 / 29)
    x, y, z = curved[:, 0], curved[:, 1], curved[:, 2]
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], axis=1)


def test_two_hundred_colors_can_be_told_apart_and_never_change():
    assert palette().shape == (NUM_COLORS, 3)
    lab = to_lab(palette())
    distance = np.linalg.norm(lab[:, None] - lab[None], axis=-1) + 1000 * np.eye(NUM_COLORS)
    assert distance.min() > 12 and distance[:10, :10].min() > 55 and distance[:20, :20].min() > 35
    assert [color_of(index) for index in range(4)] == [(230, 25, 25), (0, 255, 0), (105, 0, 255), (30, 210, 255)]
    assert color_of(NUM_COLORS + 3) == color_of(3) and color_of(-1) == (128, 128, 128)


def test_lab_has_black_white_and_red_where_the_standard_has_them():
    found = to_lab(np.array([[0, 0, 0], [255, 255, 255], [255, 0, 0]]))
    assert np.allclose(found, [[0, 0, 0], [100, 0, 0], [53.24, 80.09, 67.2]], atol=0.05)


def test_text_on_every_color_of_the_palette_can_be_read():
    for color in [*map(tuple, palette().tolist()), (0, 0, 0), (255, 255, 255)]:
        lightness = to_lab(np.array([color, readable_on(color)]))[:, 0]
        assert abs(lightness[0] - lightness[1]) > 45, color


def test_a_box_runs_along_the_inside_of_its_edges():
    image = np.zeros((300, 400, 3), np.uint8)
    drawn = draw_boxes(image, [[50, 100, 250, 200]], colors=[RED])
    expected = np.zeros((300, 400), bool)
    expected[100:200, 50:250] = True
    expected[102:198, 52:248] = False
    assert drawn.size == (400, 300)
    assert np.array_equal(is_color(drawn, RED), expected)
    assert not pixels(drawn)[~expected].any()


def test_a_small_image_is_enlarged_together_with_its_boxes():
    image = noise(64, 64)
    drawn = draw_boxes(image, [[10, 20, 30, 40]], colors=[RED])
    assert drawn.size == (256, 256)
    ys, xs = np.nonzero(is_color(drawn, RED))
    assert (xs.min(), ys.min(), xs.max(), ys.max()) == (40, 80, 119, 159)
    assert np.array_equal(pixels(drawn)[84:156:4, 44:116:4], image[21:39, 11:29])
    assert draw_boxes(image, [[10, 20, 30, 40]], scale=1).size == (64, 64)


def test_boxes_beyond_the_image_and_boxes_of_nothing_are_drawn_as_far_as_they_are_there():
    image = np.zeros((300, 300, 3), np.uint8)
    drawn = is_color(draw_boxes(image, [[-50, 280, 100, 400]], colors=[RED]), RED)
    assert drawn[280:282, :100].all() and drawn[280:, 98:100].all() and drawn.sum() == 200 + 18 * 2
    assert is_color(draw_boxes(image, [[20, 20, 20, 20]], colors=[RED]), RED)[20, 20]
    for none in (np.zeros((0, 4)), []):
        assert not pixels(draw_boxes(image, none, [], [])).any()


def test_labels_lie_above_their_box_in_its_color_and_stay_inside_the_image():
    image = np.zeros((300, 300, 3), np.uint8)
    plain = is_color(draw_boxes(image, [[100, 100, 200, 200]], colors=[BLUE]), BLUE)
    labelled = is_color(draw_boxes(image, [[100, 100, 200, 200]], ["cat"], [0.875], [BLUE]), BLUE)
    ys, xs = np.nonzero(labelled & ~plain)
    assert (xs.min(), ys.max()) == (100, 99) and 10 <= ys.max() - ys.min() <= 20
    assert xs.max() - xs.min() + 1 == text_width("cat 0.88", 11) + 4
    light = (pixels(draw_boxes(image, [[100, 100, 200, 200]], ["cat"], None, [BLUE])) > 150).all(axis=-1)
    assert light.sum() > 20 and not light[100:].any()
    corner = is_color(draw_boxes(image, [[280, 0, 300, 20]], ["a long name"], None, [BLUE]), BLUE)
    assert corner[:14, -70:].mean() > 0.5
    narrow = draw_boxes(image[:, :40], [[0, 100, 30, 200]], ["no room for a name of this length"], scale=1)
    assert narrow.size == (40, 300)


def test_the_surest_box_is_drawn_last():
    image = np.zeros((300, 300, 3), np.uint8)
    boxes = [[50, 50, 150, 150]] * 2
    assert is_color(draw_boxes(image, boxes, None, [0.9, 0.4], [RED, BLUE]), RED)[60, 50]
    assert is_color(draw_boxes(image, boxes, None, np.array([0.4, 0.9]), [RED, BLUE]), BLUE)[60, 50]


def test_mask_pixels_are_blended_with_their_color_and_the_others_left():
    image = noise(20, 20)
    masks = np.zeros((2, 20, 20), bool)
    masks[0, 2:10, 2:10] = True
    masks[1, 8:15, 8:15] = True
    drawn = pixels(draw_masks(image, masks, [RED, BLUE], alpha=0.25))
    first = np.rint(0.75 * image + 0.25 * np.array(RED)).astype(np.uint8)
    assert np.array_equal(drawn[2:8, 2:8], first[2:8, 2:8])
    # The later mask lies over the earlier one.
    assert np.array_equal(drawn[9, 9], np.rint(0.75 * first[9, 9] + 0.25 * np.array(BLUE)).astype(np.uint8))
    assert np.array_equal(drawn[~masks.any(axis=0)], image[~masks.any(axis=0)])
    assert np.array_equal(pixels(draw_masks(image, masks[:0])), image)
    assert np.array_equal(
        pixels(draw_masks(image, masks)), pixels(draw_masks(image, masks, [color_of(0), color_of(1)]))
    )


def test_masks_of_larger_images_have_a_line_around_them():
    image = np.zeros((300, 300), np.uint8)
    mask = np.zeros((300, 300), bool)
    mask[100:200, :50] = True
    drawn = draw_masks(image, [mask], [RED], alpha=0.5)
    line = np.zeros_like(mask)
    line[100, :50] = line[199, :50] = line[100:200, 49] = True
    assert np.array_equal(is_color(drawn, RED), line)
    assert np.array_equal(is_color(drawn, (128, 0, 0)), mask & ~line)


def test_class_ids_are_shown_in_the_colors_of_their_classes():
    image = noise(10, 10)
    ids = np.zeros((10, 10), np.int32)
    ids[2:4], ids[4:6], ids[6:8] = 1, 255, -1
    drawn = pixels(draw_semantic(image, ids, alpha=1, unpainted=(0, 255)))
    assert (drawn[2:4] == color_of(1)).all()
    assert np.array_equal(drawn[ids != 1], image[ids != 1])
    # Only the id to ignore is left out unless told otherwise.
    drawn = pixels(draw_semantic(image, ids, [RED, BLUE], alpha=0.5))
    assert np.array_equal(drawn[0], np.rint(0.5 * image[0] + 0.5 * np.array(RED)).astype(np.uint8))
    assert np.array_equal(drawn[4:8], image[4:8])
    ids[0] = NUM_COLORS + 1
    assert (pixels(draw_semantic(image, ids, alpha=1))[0] == color_of(1)).all()


def test_what_does_not_fit_together_is_refused():
    image = noise(10, 10)
    with pytest.raises(DataError, match="2 names for 1 boxes; expected one of them for each"):
        draw_boxes(image, [[0, 0, 1, 1]], ["a", "b"])
    with pytest.raises(DataError, match="1 colors for 2 masks"):
        draw_masks(image, np.zeros((2, 10, 10), bool), [RED])
    with pytest.raises(DataError, match=r"masks of the shape \(1, 9, 10\) for an image of 10 x 10"):
        draw_masks(image, np.zeros((1, 9, 10), bool))
    with pytest.raises(DataError, match=r"ids of the shape \(9, 10\)"):
        draw_semantic(image, np.zeros((9, 10), int))
    with pytest.raises(DataError, match="class id 2 has no color: there are 2"):
        draw_semantic(image, np.full((10, 10), 2), [RED, BLUE])
    with pytest.raises(DataError, match="1 captions for 2 images"):
        sheet([image, image], ["a"])
    with pytest.raises(DataError, match="a sheet of no images"):
        sheet([])
    with pytest.raises(DataError, match=r"masked has the shape \(5, 5\); expected \(10, 10\)"):
        reconstruction_row(image, np.zeros((5, 5), bool), image)
    with pytest.raises(DataError, match=r"shape \(2, 3\) for 2 names; expected \(2, 2\)"):
        confusion_picture(np.zeros((2, 3)), ["a", "b"])


def test_a_sheet_has_a_place_for_each_image_and_a_line_for_each_caption():
    images = [np.full((8, 8), 10 * index, np.uint8) for index in range(5)]
    plain = sheet(images, columns=3, size=80)
    assert plain.size == (GAP + 3 * (80 + GAP), GAP + 2 * (80 + GAP))
    for index in range(5):
        row, column = divmod(index, 3)
        x, y = GAP + column * (80 + GAP), GAP + row * (80 + GAP)
        assert (pixels(plain)[y : y + 80, x : x + 80] == 10 * index).all()
    captioned = sheet(images, ["one", "two\nlines", "", "four", "five"], columns=3, size=80)
    assert captioned.size == (plain.width, plain.height + 2 * 2 * line_height())
    text = (pixels(captioned) < 128).all(axis=-1)[GAP + 80 : GAP + 80 + 2 * line_height()]
    below = [text[:, GAP + column * (80 + GAP) : (column + 1) * (80 + GAP)] for column in range(3)]
    assert [half[: line_height()].any() for half in below] == [True, True, False]
    assert [half[line_height() :].any() for half in below] == [False, True, False]


def test_a_sheet_takes_as_many_columns_as_it_needs():
    image = np.zeros((8, 8), np.uint8)
    assert sheet([image] * 3, size=80).size == (GAP + 3 * (80 + GAP), GAP + 80 + GAP)
    assert sheet([image] * 20, size=80).size == (GAP + 8 * (80 + GAP), GAP + 3 * (80 + GAP))
    # Images of other shapes are centred in columns of the same width.
    mixed = sheet([np.zeros((8, 8), np.uint8), np.zeros((8, 4), np.uint8)], size=80)
    assert is_color(mixed, (0, 0, 0))[GAP].nonzero()[0].tolist() == [*range(8, 88), *range(116, 156)]


def test_a_caption_wider_than_its_column_is_cut():
    assert shorten("short", 200) == "short"
    cut = shorten("a caption that is much too long for its column", 100)
    assert cut.endswith("...") and cut.startswith("a caption") and text_width(cut) <= 100
    assert shorten("wide", 3) == ""
    page = sheet([np.zeros((8, 8), np.uint8)] * 2, ["a caption that is much too long for its column"] * 2, size=64)
    assert not (pixels(page)[:, 72:80] < 255).any()


def test_truth_and_prediction_stand_beside_each_other_in_one_size():
    truth, prediction = noise(64, 64), 255 - noise(64, 64)
    pair = side_by_side(truth, prediction)
    side = 3 * 64
    assert side <= LEAST_SIDE
    assert pair.size == (3 * GAP + 2 * side, 2 * GAP + side + line_height())
    assert np.array_equal(pixels(pair)[GAP : GAP + side : 3, GAP : GAP + side : 3], truth)
    assert np.array_equal(pixels(pair)[GAP : GAP + side : 3, 2 * GAP + side : 2 * GAP + 2 * side : 3], prediction)
    large = side_by_side(noise(500, 400), noise(500, 400))
    assert large.size == (3 * GAP + 2 * 400, 2 * GAP + 500 + line_height())


def test_a_reconstruction_shows_the_image_what_was_seen_of_it_and_what_was_made_of_that():
    image, rebuilt = noise(8, 8), 255 - noise(8, 8)
    hidden = np.zeros((8, 8), bool)
    hidden[:4, :4] = True
    row = pixels(reconstruction_row(image, hidden, rebuilt, size=80))
    whole, seen, made = (
        row[GAP : GAP + 80 : 10, GAP + column * 88 : GAP + column * 88 + 80 : 10] for column in range(3)
    )
    assert np.array_equal(whole, image) and np.array_equal(made, rebuilt)
    assert np.array_equal(seen[~hidden], image[~hidden])
    assert len(np.unique(seen[hidden], axis=0)) == 1 and seen[0, 0].max() - seen[0, 0].min() > 50


def square_colors(picture: Image.Image, num: int, cell: int) -> np.ndarray:
    """Return the color in a corner of each square, which no count reaches."""
    left = picture.width - num * cell - 7
    return pixels(picture)[6 + 2 : 6 + num * cell : cell, left + 2 : left + num * cell : cell]


def test_right_answers_are_blue_wrong_ones_red_and_darker_the_more_there_are():
    matrix = np.array([[90, 10, 0], [50, 40, 10], [0, 0, 0]])
    colors = square_colors(confusion_picture(matrix, ["a", "b", "c"]), 3, 38).astype(int)
    assert colors.shape == (3, 3, 3)
    assert (colors[2] == 255).all() and (colors[0, 2] == 255).all()
    for row, column in np.argwhere(matrix):
        red, _, blue = colors[row, column]
        assert (blue > red) == (row == column)
    lightness = colors.sum(axis=2)
    assert lightness[0, 0] < lightness[1, 1] and lightness[1, 0] < lightness[1, 2] == lightness[0, 1]


def test_counts_are_written_where_there_is_room_and_names_are_thinned_out():
    empty, full = np.zeros((10, 10), int), np.eye(10, dtype=int) * 5 + 1
    names = list("0123456789")
    picture = confusion_picture(full, names)
    left = picture.width - 380 - 7
    without = np.repeat(np.repeat(square_colors(picture, 10, 38), 38, axis=0), 38, axis=1)
    inked = (pixels(picture)[6:386, left : left + 380] != without).any(axis=-1)
    inner = inked.reshape(10, 38, 10, 38).transpose(0, 2, 1, 3)[:, :, 4:34, 4:34]
    assert inner.any(axis=(2, 3)).all()
    assert confusion_picture(empty, names).size == picture.size
    for num, side in [(2, 76), (21, 798), (40, 800), (200, 800), (300, 1200)]:
        picture = confusion_picture(np.eye(num, dtype=int), [f"class {index}" for index in range(num)])
        assert side < picture.width < side + 140 and side < picture.height < side + 140
    long = confusion_picture(np.eye(2, dtype=int), ["a name of very many words that goes on for long", "b"])
    assert long.width < 76 + 160


@pytest.fixture
def fonts(tmp_path, monkeypatch):
    """A user with no fonts but those of a folder, on a system without any."""
    cached = (pictures.text.font_files, pictures.text.font_for, pictures.text.font, pictures.text._has)
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("WINDIR", str(tmp_path))
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    (tmp_path / "Fonts" / "noto").mkdir(parents=True)
    [each.cache_clear() for each in cached]
    yield tmp_path / "Fonts" / "noto"
    [each.cache_clear() for each in cached]


def test_names_are_drawn_in_a_font_that_has_their_letters_or_else_as_numbers(fonts):
    names = ["cat", "猫 1", "قطة"]
    assert drawable_names(names) == ["cat", "#1", "#2"]
    numbered = confusion_picture(np.eye(3, dtype=int), names)
    pictures.text.font_for.cache_clear(), pictures.text.font_files.cache_clear()
    (fonts / "broken.ttf").write_bytes(b"no font")
    (fonts / "NotoSansCJK.ttc").write_bytes(tiny_font("猫 1#2cat"))
    assert drawable_names(names) == ["cat", "猫 1", "#2"]
    drawn = confusion_picture(np.eye(3, dtype=int), names)
    assert (drawn.size, pixels(drawn).tolist()) != (numbered.size, pixels(numbered).tolist())
