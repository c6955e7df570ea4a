"""Sizes, shapes and colours: what each transform does, against sums done by hand."""

import colorsys
import pickle

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from loopwright.data.images import (
    STRENGTHS,
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
    classification_eval,
    classification_train,
    detection_eval,
    detection_train,
    masked_image_train,
    segmentation_eval,
    segmentation_train,
)
from loopwright.errors import ConfigError


def noise(height: int, width: int, seed: int = 0) -> Scene:
    image = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Scene(image, semantic=image[:, :, 0].astype(np.int32) % 5)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (Resize(shorter=50), (50, 100)),
        (Resize(longest=50), (25, 50)),
        (Resize(shorter=80, longest=100), (50, 100)),
        (Resize(shorter=40, longest=100), (40, 80)),
        (Resize(exact=30), (30, 30)),
        (Resize(exact=(30, 70)), (30, 70)),
        (Resize(longest=1), (1, 1)),
        (PadTo(150), (150, 200)),
        (PadTo((120, 300)), (120, 300)),
        (PadTo(multiple=64), (128, 256)),
        (CenterCrop(60), (60, 60)),
        (CenterCrop((150, 60)), (150, 60)),
        (RandomCrop((130, 220)), (130, 220)),
        (RandomResizedCrop((32, 48)), (32, 48)),
        (RandomAffine(45), (100, 200)),
    ],
    ids=lambda value: str(value) if isinstance(value, tuple) else type(value).__name__,
)
def test_an_image_of_100_x_200_gets_this_size(transform, expected):
    assert transform(noise(100, 200), rng()).size == expected


@pytest.mark.parametrize(
    "transform",
    [Resize(exact=(20, 30)), Resize(shorter=20), PadTo(20), CenterCrop((20, 30)), RandomCrop((20, 30))],
    ids=repr,
)
def test_a_size_that_is_right_already_changes_nothing(transform):
    scene = noise(20, 30)
    assert transform(scene, rng()) is scene


def test_padding_comes_at_the_right_and_bottom_in_the_colour_and_class_asked_for():
    scene = noise(10, 12)
    moved = PadTo((16, 14), fill=(1, 2, 3), ignore_index=77)(scene, rng())
    np.testing.assert_array_equal(moved.image[:10, :12], scene.image)
    np.testing.assert_array_equal(moved.semantic[:10, :12], scene.semantic)
    for part in (np.s_[10:], np.s_[:, 12:]):
        assert (moved.image[part] == (1, 2, 3)).all() and (moved.semantic[part] == 77).all()


def test_the_centre_is_cut_out_and_a_small_image_is_put_into_the_middle():
    scene = noise(11, 21)
    np.testing.assert_array_equal(CenterCrop(5)(scene, rng()).image, scene.image[3:8, 8:13])
    grown = CenterCrop((15, 21), fill=(0, 0, 0))(scene, rng())
    np.testing.assert_array_equal(grown.image[2:13], scene.image)
    assert not grown.image[:2].any() and not grown.image[13:].any()


def test_random_crops_are_parts_of_the_image_and_reach_every_corner():
    scene = noise(12, 14)
    corners = set()
    for seed in range(200):
        moved = RandomCrop((10, 10))(scene, rng(seed))
        left, top = (-moved.matrix[:2, 2]).astype(int)
        np.testing.assert_array_equal(moved.image, scene.image[top : top + 10, left : left + 10])
        corners.add((top, left))
    assert corners == {(top, left) for top in range(3) for left in range(5)}


def test_random_resized_crops_keep_to_their_scale_and_ratio():
    shares, ratios = [], []
    for seed in range(300):
        moved = RandomResizedCrop(50, (0.2, 0.6), (0.5, 2.0))(noise(300, 400), rng(seed))
        height, width = 50 / moved.matrix[1, 1], 50 / moved.matrix[0, 0]
        shares.append(height * width / (300 * 400))
        ratios.append(width / height)
    assert 0.19 < min(shares) < 0.25 and 0.5 < max(shares) < 0.61
    assert 0.49 < min(ratios) < 0.6 and 1.7 < max(ratios) < 2.02


def test_an_image_too_narrow_for_any_ratio_is_cut_in_the_middle():
    moved = RandomResizedCrop(16, (0.9, 1.0))(noise(400, 10), rng())
    height, width = 16 / moved.matrix[1, 1], 16 / moved.matrix[0, 0]
    assert width == pytest.approx(10) and height == pytest.approx(13)
    assert -moved.matrix[1, 2] / moved.matrix[1, 1] == pytest.approx((400 - 13) // 2)


def test_a_flip_mirrors_the_pixels_with_its_probability():
    scene = noise(6, 8)
    np.testing.assert_array_equal(HorizontalFlip(1.0)(scene, rng()).image, scene.image[:, ::-1])
    np.testing.assert_array_equal(VerticalFlip(1.0)(scene, rng()).image, scene.image[::-1])
    generator = rng()
    flips = sum(HorizontalFlip(0.3)(scene, generator) is not scene for _ in range(1000))
    assert 250 < flips < 350
    assert all(HorizontalFlip(0.0)(scene, generator) is scene for _ in range(50))


@pytest.mark.parametrize("transform", [RandomAffine(), ColorJitter()], ids=repr)
def test_an_affine_and_a_jitter_of_nothing_leave_every_pixel(transform):
    scene = noise(30, 40)
    moved = transform(scene, rng())
    np.testing.assert_array_equal(moved.image, scene.image)
    np.testing.assert_array_equal(moved.semantic, scene.semantic)


def test_an_affine_stays_within_what_was_asked_for():
    for seed in range(100):
        matrix = RandomAffine(20, 0.1, (0.5, 2.0))(noise(50, 80), rng(seed)).matrix
        factor = np.sqrt(np.linalg.det(matrix))
        angle = np.degrees(np.arctan2(matrix[1, 0], matrix[0, 0]))
        shift = (matrix @ [40, 25, 1])[:2] - [40, 25]
        assert 0.5 <= factor <= 2 and abs(angle) <= 20 and (np.abs(shift) <= [8, 5]).all()


@pytest.mark.parametrize(
    ("setting", "kind"),
    [("brightness", ImageEnhance.Brightness), ("contrast", ImageEnhance.Contrast), ("saturation", ImageEnhance.Color)],
)
def test_jitter_is_an_enhancement_by_a_factor_within_the_strength(setting, kind):
    scene, transform = noise(12, 12), ColorJitter(**{setting: 0.5})
    for seed in range(5):
        drawn = rng(seed)
        drawn.permutation(4)
        factor = 1 + drawn.uniform(-0.5, 0.5)
        expected = np.asarray(kind(Image.fromarray(scene.image)).enhance(factor))
        np.testing.assert_array_equal(transform(scene, rng(seed)).image, expected)


def test_a_turn_of_the_hue_keeps_saturation_and_value():
    image = np.full((4, 4, 3), (200, 40, 40), dtype=np.uint8)
    hues = []
    for seed in range(40):
        color = ColorJitter(hue=0.1)(Scene(image), rng(seed)).image[0, 0] / 255
        hue, saturation, value = colorsys.rgb_to_hsv(*color)
        hues.append((hue + 0.5) % 1 - 0.5)
        assert saturation == pytest.approx(0.8, abs=0.02) and value == pytest.approx(200 / 255, abs=0.01)
    assert -0.11 < min(hues) < -0.05 and 0.05 < max(hues) < 0.11


def test_erasing_changes_one_rectangle_of_the_share_asked_for():
    scene = noise(60, 80)
    for seed in range(20):
        changed = (RandomErasing(1.0, (0.1, 0.2))(scene, rng(seed)).image != scene.image).any(axis=2)
        rows, columns = np.nonzero(changed)
        area = (rows.max() + 1 - rows.min()) * (columns.max() + 1 - columns.min())
        assert 0.09 < area / (60 * 80) < 0.22 and changed.sum() / area > 0.9
    assert RandomErasing(0.0)(scene, rng()) is scene


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Resize(), "either exact, or shorter, longest or both"),
        (lambda: Resize(shorter=3, exact=4), "either exact, or shorter, longest or both"),
        (lambda: Resize(exact=(3, 0)), "must be at least 1 pixel, got 0"),
        (lambda: PadTo(multiple=0), "multiple must be at least 1"),
        (lambda: RandomResizedCrop(8, (0.5, 0.2)), r"scale must be \(least, largest\), both above 0, got \(0.5, 0.2\)"),
        (lambda: RandomResizedCrop(8, ratio=(0, 1)), "ratio must be"),
        (lambda: RandomAffine(scale=(0, 1)), "scale must be"),
        (lambda: RandomAffine(shear=45), "below 45 degrees, got 45"),
        (lambda: RandomErasing(scale=(0, 1)), "scale must be"),
        (lambda: ColorJitter(hue=0.6), "hue of at most 0.5"),
        (lambda: ColorJitter(brightness=-1), "strengths of at least 0"),
        (lambda: classification_train(8, "wild"), "one of none, light, standard, strong, got 'wild'"),
        (lambda: classification_eval(8, crop_share=0), "crop_share must be above 0 and at most 1, got 0"),
    ],
)
def test_settings_that_cannot_work_are_refused_when_made(make, expected):
    with pytest.raises(ConfigError, match=expected):
        make()


TRAINING = [classification_train, segmentation_train, detection_train, masked_image_train]


@pytest.mark.parametrize("preset", TRAINING, ids=lambda preset: preset.__name__)
@pytest.mark.parametrize("strength", STRENGTHS)
def test_every_preset_gives_one_size_for_all_images_and_can_be_sent_to_workers(preset, strength):
    transform = pickle.loads(pickle.dumps(preset(32, strength)))
    for index, size in enumerate([(20, 30), (64, 40), (32, 32), (9, 200)]):
        assert transform(noise(*size), rng(index)).size == (32, 32)


@pytest.mark.parametrize("preset", TRAINING, ids=lambda preset: preset.__name__)
def test_presets_flip_unless_told_not_to_and_only_strength_none_gives_the_same_image_each_time(preset):
    scene = noise(50, 40)
    for strength in STRENGTHS:
        images = [preset(32, strength)(scene, rng(seed)).image.tobytes() for seed in range(8)]
        assert len(set(images)) == (1 if strength == "none" else 8)
    for flip in (True, False):
        transforms = preset(32, "light", flip=flip).transforms
        assert any(isinstance(one, HorizontalFlip) for one in transforms) == flip


@pytest.mark.parametrize(
    "preset",
    [classification_eval, segmentation_eval, detection_eval],
    ids=lambda preset: preset.__name__,
)
def test_an_evaluation_leaves_an_image_of_the_right_size_as_it_is(preset):
    scene = noise(32, 32)
    np.testing.assert_array_equal(preset(32)(scene, rng()).image, scene.image)


def test_a_crop_share_leaves_the_borders_out():
    scene = noise(100, 100)
    moved = classification_eval(70, crop_share=0.7)(scene, rng())
    np.testing.assert_array_equal(moved.image, scene.image[15:85, 15:85])


def test_a_pipeline_says_what_it_does():
    assert repr(Compose([Resize(exact=8), HorizontalFlip()])) == (
        "Compose(transforms=[Resize(shorter=None, longest=None, exact=8), HorizontalFlip(probability=0.5)])"
    )
