"""Every kind of image file becomes the same upright RGB pixels, and every kind of broken one an error that names it."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from loopwright.data.images import decode_image, decode_mask
from loopwright.errors import DataError

HEIGHT, WIDTH = 12, 20
ORIENTATION = 0x0112


def picture() -> np.ndarray:
    """Smooth, and different in every corner, so that JPEG keeps it nearly as it is."""
    rows, columns = np.mgrid[0:HEIGHT, 0:WIDTH]
    return np.stack([rows * 20, columns * 12, 200 - rows * 8], axis=2).astype(np.uint8)


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def pixels(source) -> np.ndarray:
    image = decode_image(source)
    assert image.mode == "RGB"
    return np.asarray(image)


def test_paths_bytes_and_opened_images_give_the_same_pixels(tmp_path):
    path = tmp_path / "picture.png"
    data = encoded(Image.fromarray(picture()))
    path.write_bytes(data)
    for source in (str(path), path, data, Image.open(io.BytesIO(data))):
        np.testing.assert_array_equal(pixels(source), picture())


@pytest.mark.parametrize("orientation", [*range(1, 9), 17])
def test_the_exif_orientation_is_applied_as_pillow_does_if_it_exists(orientation):
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    kind = {"kind": "JPEG", "quality": 95} if orientation < 9 else {"kind": "PNG"}
    data = encoded(Image.fromarray(picture()), exif=exif, **kind)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data))) if orientation < 9 else Image.fromarray(picture())
    assert expected.size == ((HEIGHT, WIDTH) if 5 <= orientation < 9 else (WIDTH, HEIGHT))
    np.testing.assert_array_equal(pixels(data), np.asarray(expected))


@pytest.mark.parametrize("mode", ["L", "1"])
def test_a_grey_image_has_three_equal_channels(mode):
    image = Image.fromarray(picture()).convert(mode)
    grey = np.asarray(image.convert("L"))
    np.testing.assert_array_equal(pixels(encoded(image)), np.stack([grey] * 3, axis=2))


def test_a_palette_image_shows_its_colours_and_transparent_ones_as_white():
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.putdata([1, 0])
    assert pixels(encoded(image)).tolist() == [[[200, 100, 50], [10, 20, 30]]]
    for transparency in (1, b"\xff\x00"):  # of one colour, or one for each
        assert pixels(encoded(image, transparency=transparency)).tolist() == [[[255, 255, 255], [10, 20, 30]]]


@pytest.mark.parametrize(
    ("mode", "colors", "expected"),
    [
        ("RGBA", [(100, 0, 0, 255), (100, 0, 0, 0), (100, 0, 0, 51)], [[100, 0, 0], [255] * 3, [224, 204, 204]]),
        ("LA", [(100, 255), (100, 0)], [[100] * 3, [255] * 3]),
    ],
)
def test_alpha_is_laid_over_white(mode, colors, expected):
    image = Image.new(mode, (len(colors), 1))
    image.putdata(colors)
    assert pixels(encoded(image)).tolist() == [expected]


@pytest.mark.parametrize(("mode", "transparent", "black"), [("L", 7, 0), ("RGB", (7, 7, 7), (0, 0, 0))])
def test_the_one_transparent_colour_of_an_image_becomes_white(mode, transparent, black):
    image = Image.new(mode, (2, 1))
    image.putdata([transparent, black])
    assert pixels(encoded(image, transparency=transparent)).tolist() == [[[255] * 3, [0] * 3]]


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bits_are_scaled_to_8_by_their_whole_range_and_a_dark_image_stays_dark(kind):
    values = np.array([[0, 257, 128 * 257, 65535]], dtype=np.uint16)
    assert pixels(encoded(Image.fromarray(values), kind))[0, :, 0].tolist() == [0, 1, 128, 255]
    assert pixels(encoded(Image.fromarray(np.full((2, 2), 200, dtype=np.uint16)), kind)).max() == 1


@pytest.mark.parametrize(
    ("values", "expected"),
    [([0.0, 0.2, 1.0], [0, 51, 255]), ([0.0, 100.0, 255.0], [0, 100, 255]), ([0.0, 1e6, 4e6], [0, 64, 255])],
    ids=["up to 1", "up to 255", "beyond"],
)
def test_float_images_are_scaled_by_the_range_that_holds_them(values, expected):
    image = Image.fromarray(np.array([values], dtype=np.float32))
    assert pixels(encoded(image, "TIFF"))[0, :, 0].tolist() == expected


def test_a_cmyk_jpeg_has_the_colours_it_was_made_of():
    image = Image.fromarray(picture()).convert("CMYK")
    decoded = pixels(encoded(image, "JPEG", quality=95)).astype(int)
    assert np.abs(decoded - picture()).mean() < 6


IDS = (np.arange(HEIGHT * WIDTH).reshape(HEIGHT, WIDTH) % 7).astype(np.uint8)
PALETTE = Image.fromarray(IDS)
PALETTE.putpalette([value for index in range(7) for value in (255 - index, index * 3, 90)])


@pytest.mark.parametrize(
    ("image", "options", "mode", "expected"),
    [
        (Image.fromarray(IDS), {}, "L", IDS),
        (PALETTE, {}, "P", IDS),
        (PALETTE, {"transparency": 0}, "P", IDS),
        (Image.fromarray(IDS.astype(np.uint16) * 1000), {}, "I;16", IDS.astype(np.uint16) * 1000),
        (Image.fromarray(IDS % 2 * 255).convert("1"), {}, "1", IDS % 2),
        (Image.fromarray(np.stack([IDS] * 3, axis=2)), {}, "RGB", IDS),
    ],
    ids=["grey", "palette", "transparent palette", "16 bits", "one bit", "equal channels"],
)
def test_a_mask_gives_its_values_or_indices_and_not_its_colours(image, options, mode, expected):
    assert image.mode == mode
    mask = decode_mask(encoded(image, **options))
    assert mask.dtype == np.int32
    np.testing.assert_array_equal(mask, expected)


def test_a_mask_of_colours_is_refused(tmp_path):
    path = tmp_path / "colours.png"
    path.write_bytes(encoded(Image.fromarray(picture())))
    with pytest.raises(DataError, match=r"colours\.png is a colour image \(RGB\), where a mask of class ids"):
        decode_mask(path)


def large_picture() -> Image.Image:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    return Image.fromarray(noise)


@pytest.mark.filterwarnings("ignore:::PIL")  # it warns of what is odd in a file
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP", "GIF", "BMP"])
@pytest.mark.parametrize("share", [0.01, 0.5, 0.9])
def test_a_truncated_file_is_a_data_error_that_names_the_path(tmp_path, kind, share):
    path = tmp_path / f"broken.{kind.lower()}"
    data = encoded(large_picture(), kind)
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(DataError, match=rf"{path} cannot be read as an image: .*\. Replace it, or remove it"):
        decode_image(path)


@pytest.mark.parametrize("content", [b"", b"no image at all", b"\x89PNG\r\n\x1a\n"], ids=["empty", "text", "signature"])
def test_what_is_not_an_image_is_a_data_error_that_names_the_path(tmp_path, content):
    path = tmp_path / "nothing.png"
    path.write_bytes(content)
    for decode in (decode_image, decode_mask):
        with pytest.raises(DataError, match=r"nothing\.png cannot be read as an image: it is") as caught:
            decode(str(path))
        assert "<_io" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Path("folder/gone.png"), r"there is no image folder/gone\.png"),
        (b"x" * 1200, "an image of 1,200 bytes cannot be read"),
        (3, "an image is a path, bytes or an opened Pillow image, got int"),
    ],
    ids=["missing", "broken bytes", "something else"],
)
def test_what_cannot_be_opened_is_named(source, message):
    with pytest.raises(DataError, match=message):
        decode_image(source)


@pytest.mark.filterwarnings("ignore:::PIL")  # it warns of what is odd in a file
@pytest.mark.parametrize("seed", range(4))
def test_flipped_bytes_give_an_image_or_a_data_error_and_nothing_else(seed):
    rng = np.random.default_rng(seed)
    num_read = 0
    for kind in ("JPEG", "PNG", "GIF", "TIFF"):
        for _ in range(40):
            data = bytearray(encoded(large_picture().resize((16, 16)), kind))
            for position in rng.integers(0, len(data), 3):
                data[position] = rng.integers(256)
            try:
                assert decode_image(bytes(data)).mode == "RGB"
                num_read += 1
            except DataError as error:
                assert "cannot be read as an image" in str(error)
    assert num_read > 10
