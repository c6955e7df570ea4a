"""Image datasets through loopwright's loaders: the same pixels after a restart, bad files named or skipped, batches."""

import pickle
import re
from functools import partial

import numpy as np
import pytest
import torch
from PIL import ImageOps
from torch import nn
from torch.utils.data import DataLoader

import toys
from data import loaders
from loopwright import Trainer
from loopwright.data.images import (
    ColorJitter,
    Compose,
    HorizontalFlip,
    ImageDataset,
    RandomAffine,
    RandomResizedCrop,
    Resize,
    Scene,
    SceneFeatures,
    UnreadableSampleError,
    as_transform,
    classification_train,
    collate_images,
    denormalize,
    detection_train,
    load_scene,
    normalize,
    to_tensor,
)
from loopwright.errors import DataError, InputError

TRANSFORM = Compose([RandomResizedCrop(12), HorizontalFlip(), ColorJitter(0.3, 0.3, 0.3, 0.1), RandomAffine(10)])


def truncate(row: dict) -> None:
    with open(row["image"], "r+b") as file:
        file.truncate(200)


def dataset_of(rows, transform=TRANSFORM) -> ImageDataset:
    return ImageDataset(rows, load_scene, transform, SceneFeatures())


def adopted(dataset, num_workers=0, bad_samples="raise", seed=3, accumulation=1):
    source = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=num_workers, collate_fn=collate_images)
    return loaders.adopted(source, seed=seed, accumulation=accumulation, bad_samples=bad_samples)


def seen(windows) -> list[tuple[list[int], bytes]]:
    pieces = [piece for window in windows for piece in window.pieces]
    return [(piece.batch["position"].tolist(), piece.batch["pixel_values"].numpy().tobytes()) for piece in pieces]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_epoch_sees_the_same_images(rows, num_workers):
    dataset = dataset_of(rows)
    whole = seen(adopted(dataset).windows(epoch=1))
    assert len(whole) == len(rows) // 4
    assert seen(adopted(dataset, num_workers).windows(epoch=1)) == whole
    for position in (8, 20):
        np.random.seed(position)  # whatever has been drawn before
        assert seen(adopted(dataset, num_workers).windows(epoch=1, position=position)) == whole[position // 4 :]


def test_every_epoch_sees_other_images(rows):
    loader = adopted(dataset_of(rows))
    epochs = [
        {
            int(position): pixels.numpy().tobytes()
            for window in loader.windows(epoch)
            for piece in window.pieces
            for position, pixels in zip(piece.batch["position"], piece.batch["pixel_values"], strict=True)
        }
        for epoch in range(2)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(len(rows)))
    assert all(epochs[0][position] != epochs[1][position] for position in range(len(rows)))


class ImageTrainer(Trainer):
    def calculate_train_batch_loss(self, batch):
        self.__dict__.setdefault("seen", []).append(batch["pixel_values"].numpy().tobytes())
        logits = self.model(batch["pixel_values"])
        return {"loss": self.loss_func(logits, batch["labels"]), "model_outputs": logits, "batch_size": len(logits)}


def trained(dataset, num_epochs, **options):
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 12 * 12, 3))
    options |= {"model": model, "loss_func": nn.CrossEntropyLoss(), "cls": ImageTrainer, "collate_fn": collate_images}
    return toys.trained([], dataset, num_epochs, seed=5, **options)


def test_a_trainer_continues_without_a_truncated_image_when_told_to_skip(rows, caplog):
    truncate(rows[7])
    with pytest.raises(DataError, match=r"sample 7 \(position \d+ of epoch 0\) could not be read: .*image07\.jpg"):
        trained(dataset_of(rows), 1)
    assert len(trained(dataset_of(rows), 2, bad_samples="skip").seen) == 2 * len(rows) // 4
    assert [record.message for record in caplog.records if "image07.jpg" in record.message] != []


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_truncated_image_is_a_data_error_that_names_it_or_is_skipped_and_the_others_are_used(rows, num_workers):
    truncate(rows[5])
    problem = r"image05\.jpg cannot be read as an image"
    with pytest.raises(
        DataError, match=rf"sample 5 \(position \d+ of epoch 0\) could not be read: .*{problem}: it is truncated"
    ):
        list(adopted(dataset_of(rows), num_workers).windows())
    loader = adopted(dataset_of(rows), num_workers, bad_samples="skip")
    positions = sorted(position for positions, _ in seen(loader.windows()) for position in positions)
    assert positions == [index for index in range(len(rows)) if index != 5]
    assert list(loader.skipped) == [5] and re.search(problem, loader.skipped[5][1])


def test_a_missing_package_is_never_taken_for_a_bad_sample(rows):
    def load_without_package(row):
        raise InputError("install.extra", "needs a package", fix="pip install it")

    dataset = ImageDataset(rows, load_without_package, None, SceneFeatures())
    with pytest.raises(InputError, match="needs a package"):
        list(adopted(dataset, bad_samples="skip").windows())


def test_the_error_of_a_sample_can_cross_processes(rows):
    truncate(rows[0])
    with pytest.raises(UnreadableSampleError, match=r"image00\.jpg") as raised:
        dataset_of(rows)[0]
    assert isinstance(raised.value.__cause__, DataError)
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


def test_a_dataset_can_be_pickled_and_gives_the_same(rows):
    dataset = dataset_of(rows, classification_train(12))
    copy = pickle.loads(pickle.dumps(dataset))
    assert len(copy) == len(rows)
    samples = []
    for one in (dataset, copy):
        np.random.seed(1)
        samples.append(one[3]["pixel_values"])
    assert torch.equal(*samples)


def test_the_generator_of_a_sample_comes_from_numpys_global_one_and_from_nowhere_else(rows):
    drawn = []
    dataset = dataset_of(rows, lambda scene, rng: drawn.append(rng.random()) or scene)
    for seed in (0, 0, 1):
        np.random.seed(seed)
        torch.rand(3)
        dataset[0]
    assert drawn[0] == drawn[1] != drawn[2]


def test_features_hold_the_position_of_the_row_and_are_the_same_each_time_after_a_fixed_transform(rows):
    dataset = dataset_of(rows, Resize(exact=8))
    assert [dataset[index]["position"] for index in (0, np.int64(5))] == [0, 5]
    assert torch.equal(dataset[2]["pixel_values"], dataset[2]["pixel_values"])
    assert dataset[2]["labels"] == 2


def small_scene(**known):
    return Scene(np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3), **known)


def on_array(image: np.ndarray):
    image[:] = image[::-1].copy()
    return image


IMAGE_FUNCTIONS = {
    "Pillow to Pillow": ImageOps.flip,
    "Pillow to array": lambda image: np.asarray(image)[::-1],
    "array to array": on_array,
    "to uint8 tensor": lambda image: torch.from_numpy(np.array(image)[::-1].copy()).permute(2, 0, 1),
    "to float tensor": lambda image: torch.from_numpy(np.array(image)[::-1].copy()).permute(2, 0, 1) / 255,
    "several": lambda *images: ImageOps.flip(images[0]),
    "another mode": lambda image: ImageOps.flip(image).convert("RGBA"),
}


@pytest.mark.parametrize("function", IMAGE_FUNCTIONS.values(), ids=IMAGE_FUNCTIONS.keys())
def test_a_function_of_an_image_alone_can_be_the_transform(function):
    scene, untouched = small_scene(), small_scene()
    scene.image.setflags(write=False)
    moved = as_transform(function)(scene, np.random.default_rng(0))
    np.testing.assert_array_equal(moved.image, untouched.image[::-1])


def test_a_function_of_scene_and_generator_is_used_as_it_is():
    def own(scene, rng):
        return scene

    assert as_transform(own) is own
    assert as_transform(TRANSFORM) is TRANSFORM
    scene = small_scene()
    assert as_transform(None)(scene, np.random.default_rng(0)) is scene


def test_a_function_of_an_image_alone_is_refused_where_boxes_have_to_move():
    scene = small_scene(boxes=np.array([[0, 0, 2, 2]], dtype=np.float32), classes=np.array([0]))
    with pytest.raises(DataError, match="flip takes only an image, and would not move the boxes and masks"):
        as_transform(ImageOps.flip)(scene, np.random.default_rng(0))


@pytest.mark.parametrize(
    "result",
    [torch.zeros(3, 4, 6) - 1.5, np.zeros((4, 6), np.uint8), 3, torch.zeros(1, 3, 4, 6)],
    ids=["normalized", "no channels", "a number", "a batch"],
)
def test_a_function_that_returns_no_image_is_told_what_was_expected(result):
    def own(image):
        return result

    with pytest.raises(DataError, match=r"own returned .* expected a Pillow image, an array .* Remove its last step"):
        as_transform(own)(small_scene(), np.random.default_rng(0))


def test_pixels_are_scaled_and_normalized_as_written_out():
    image = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    expected = ((image / 255 - mean) / std).transpose(2, 0, 1)
    for given in (image, image[:, ::-1][:, ::-1]):
        pixels = normalize(to_tensor(given))
        assert pixels.dtype == torch.float32 and pixels.is_contiguous()
        np.testing.assert_allclose(pixels.numpy(), expected, atol=1e-5)
    np.testing.assert_array_equal(denormalize(pixels), image)
    np.testing.assert_array_equal(denormalize(pixels[None]), image[None])


def scenes() -> list[Scene]:
    """Two scenes of different sizes, with two objects and none."""
    masks = np.zeros((2, 4, 6), dtype=bool)
    masks[0, 1:3, 1:4] = masks[1, 0:2, 2:6] = True
    boxes = np.array([[1, 1, 4, 3], [2, 0, 6, 2]], dtype=np.float32)
    known = {"boxes": boxes, "classes": np.array([4, 2]), "masks": masks, "crowd": np.array([False, True])}
    first = small_scene(**known, semantic=np.ones((4, 6), np.int32))
    empty = {
        "boxes": np.zeros((0, 4), np.float32),
        "classes": np.zeros(0, np.int64),
        "masks": np.zeros((0, 8, 3), bool),
        "crowd": np.zeros(0, bool),
    }
    return [first, Scene(np.zeros((8, 3, 3), np.uint8), **empty, semantic=np.zeros((8, 3), np.int32))]


def test_images_of_different_sizes_are_padded_with_a_mask_that_says_where_they_are():
    samples = [
        {**SceneFeatures()(scene, {}), "position": index + 7, "name": "ab"[index]}
        for index, scene in enumerate(scenes())
    ]
    batch = collate_images(samples, is_padded=True, multiple=4)
    assert batch["pixel_values"].shape == (2, 3, 8, 8) and batch["pixel_mask"].dtype == torch.int64
    for index, (height, width) in enumerate([(4, 6), (8, 3)]):
        assert torch.equal(batch["pixel_values"][index, :, :height, :width], samples[index]["pixel_values"])
        assert batch["pixel_mask"][index, :height, :width].all() and batch["pixel_mask"][index].sum() == height * width
        assert (batch["pixel_values"][index] * (1 - batch["pixel_mask"][index])).abs().sum() == 0
        assert (batch["labels"][index] == 255).sum() == 64 - height * width
    assert [len(boxes) for boxes in batch["boxes"]] == [2, 0] and batch["classes"][0].tolist() == [4, 2]
    assert [tuple(masks.shape) for masks in batch["masks"]] == [(2, 8, 8), (0, 8, 8)]
    assert batch["masks"][0].sum() == 14 and batch["crowd"][0].tolist() == [False, True]
    assert batch["position"].tolist() == [7, 8] and batch["name"] == ["a", "b"]
    assert batch["matrix"].shape == (2, 3, 3)


def test_images_of_one_size_are_stacked_without_a_mask(rows):
    samples = [dataset_of(rows)[index] for index in range(3)]
    batch = collate_images(samples)
    assert sorted(batch) == ["labels", "pixel_values", "position"]
    assert torch.equal(batch["pixel_values"], torch.stack([sample["pixel_values"] for sample in samples]))
    assert batch["labels"].tolist() == [0, 1, 2] and batch["position"].dtype == torch.int64


def test_images_of_different_sizes_are_refused_unless_they_may_be_padded():
    samples = [SceneFeatures()(scene, {}) for scene in scenes()]
    with pytest.raises(
        DataError, match=r"'pixel_values' cannot be stacked: the shapes are \[\(3, 4, 6\), \(3, 8, 3\)\]"
    ):
        collate_images(samples)


def test_a_whole_detection_batch_comes_out_of_rows_on_disk(rows):
    square = [[2, 2, 12, 2, 12, 12, 2, 12]]
    objects = {"boxes": [[2, 2, 12, 12]], "classes": [1], "segments": [square], "crowd": [False]}
    rows = [{"image": row["image"], "objects": objects} for row in rows]
    dataset = ImageDataset(rows, partial(load_scene, with_masks=True), detection_train(32), SceneFeatures())
    batch = next(iter(adopted(dataset, num_workers=2)))
    assert batch["pixel_values"].shape == (4, 3, 32, 32)
    assert len(batch["boxes"]) == len(batch["masks"]) == len(batch["classes"]) == 4
    assert all(boxes.shape == (len(masks), 4) for boxes, masks in zip(batch["boxes"], batch["masks"], strict=True))
    assert sum(len(boxes) for boxes in batch["boxes"]) > 0
