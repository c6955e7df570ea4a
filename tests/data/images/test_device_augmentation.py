"""Images augmented in batches on the device (here the CPU): what is drawn, the pixels, and what has no such form."""

import copy
import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from loopwright.data import MicroBatch, Share, adopt
from loopwright.data.batch_parts import cut_rows
from loopwright.data.images import (
    CacheChoice,
    ColorJitter,
    Compose,
    HorizontalFlip,
    ImageBatch,
    ImageDataset,
    PixelCache,
    RandomAffine,
    RandomCrop,
    RandomErasing,
    RandomResizedCrop,
    Resize,
    SceneFeatures,
    VerticalFlip,
    classification_eval,
    classification_train,
    collate_images,
    denormalize,
    fixed_part,
    load_scene,
    masked_image_train,
)
from loopwright.engine.nested import map_tensors, to_device
from loopwright.engine.seeding import seed_generators
from loopwright.errors import DataError

CPU = torch.device("cpu")
SIZES = [(40, 60), (64, 64), (90, 50), (33, 120), (64, 64), (20, 24), (64, 80), (70, 64)]
CROP = RandomResizedCrop((24, 32), (0.5, 1.0))
TRANSFORMS = [
    Compose([RandomResizedCrop(32)]),
    Compose([CROP, HorizontalFlip(), VerticalFlip()]),
    *(Compose([CROP, ColorJitter(*(0.4 * (index == one) for index in range(3)))]) for one in range(3)),
    Compose([CROP, ColorJitter(hue=0.3)]),
    Compose([CROP, RandomAffine(degrees=20, shear=10, translate=0.2)]),
    Compose([CROP, RandomErasing(0.7)]),
    *(classification_train(24, strength) for strength in ("light", "standard", "strong")),
    masked_image_train(24),
]


def photo(rng, height, width):
    """Return an image that is smooth with some noise, as photos are."""
    coarse = rng.integers(0, 256, (max(2, height // 10), max(2, width // 10), 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)).astype(np.int64)
    return (smooth + rng.integers(-20, 21, smooth.shape)).clip(0, 255).astype(np.uint8)


def rows_of(sizes=SIZES, number=None):
    rng = np.random.default_rng(0)
    sizes = [sizes[index % len(sizes)] for index in range(number or len(sizes))]
    return [{"image": photo(rng, *size), "label": index % 3} for index, size in enumerate(sizes)]


def dataset_of(rows, transform, on_device=True):
    dataset = ImageDataset(rows, load_scene, transform, SceneFeatures())
    if on_device:
        assert dataset.augment_on_device() is None and dataset.augments_on_device
    return dataset


def batch_of(dataset, positions):
    """Return a batch, and a draw of numpy's generator after it."""
    seed_generators(3)
    return collate_images(dataset.__getitems__(positions)), np.random.random()


def differences_of_levels(images, pixel_values):
    return (images.int() - torch.from_numpy(denormalize(pixel_values)).int()).abs().float()


@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
def test_the_pixels_are_those_of_the_cpu_but_for_rounding(transform):
    rows = rows_of()
    positions = list(range(len(rows))) * 2
    expected, draw = batch_of(dataset_of(rows, transform, on_device=False), positions)
    batch, own_draw = batch_of(dataset_of(rows, transform), positions)
    assert type(batch) is ImageBatch and own_draw == draw, "what is drawn is the same"
    found = to_device(batch, CPU)
    assert type(found) is dict and list(found) == list(expected)
    images = found.pop("pixel_values")
    assert images.dtype == torch.uint8
    differing = differences_of_levels(images, expected.pop("pixel_values"))
    assert differing.mean() < 0.05 and (differing > 1).float().mean() < 0.005
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_large_parts_are_shrunk_by_the_workers_first_as_pillow_does_it_with_a_gap():
    (row, small), crop = rows_of([(400, 300), (33, 40)]), RandomResizedCrop(16, (0.9, 1.0))
    batch, _ = batch_of(dataset_of([row, small], crop), [0, 1])
    assert max(batch["pixel_values"].shape[1:3]) <= 4 * 16
    seed_generators(3)
    rng = np.random.default_rng(np.random.randint(0, 2**63, dtype=np.int64))
    top, left, height, width = crop.draw(row["image"].shape[:2], rng)
    part = Image.fromarray(row["image"][top : top + height, left : left + width])
    expected = np.asarray(part.resize((16, 16), Image.Resampling.BILINEAR, reducing_gap=2.0)).astype(np.int64)
    found = to_device(batch, CPU)["pixel_values"][0].numpy()
    assert np.abs(found - expected).mean() < 0.05 and np.abs(found - expected).max() <= 1


@pytest.mark.parametrize("transform", [classification_train(24, "strong"), Compose([CROP, RandomErasing(0.5)])])
def test_the_pixels_of_an_image_do_not_depend_on_the_others_of_its_batch(transform, monkeypatch):
    rows = rows_of([*SIZES, (300, 200)])
    dataset = dataset_of(rows, transform)
    seed_generators(1)
    samples = [dataset[position] for position in range(len(rows))]
    whole = to_device(collate_images(samples), CPU)["pixel_values"]
    alone = [to_device(collate_images([sample]), CPU)["pixel_values"] for sample in samples]
    assert torch.equal(whole, torch.cat(alone))
    monkeypatch.setattr("loopwright.data.images.device._MOST_LEVELS", 1)  # one image at a time
    assert torch.equal(whole, to_device(collate_images(samples), CPU)["pixel_values"])


@pytest.mark.parametrize("kind", [None, "ram"])
def test_the_pixels_do_not_depend_on_workers_cache_or_where_the_epoch_begins(kind):
    rows, transform = rows_of(number=22), classification_train(24, "strong")

    def epochs(position=0, **options):
        dataset = dataset_of(rows, transform)
        if kind is not None:
            dataset.keep(PixelCache(len(rows), CacheChoice(kind, "", 2_000_000)), fixed_part(transform))
        source = DataLoader(dataset, batch_size=5, shuffle=True, collate_fn=collate_images, **options)
        loader = adopt(source, seed=3, share=Share(), device=CPU)
        pieces = [piece for epoch in (0, 1) for window in loader.windows(epoch, position) for piece in window.pieces]
        loader.close()
        return [piece.on(CPU) for piece in pieces]

    expected = epochs()
    assert len(expected) == 10
    for found, wanted in ((epochs(num_workers=2), expected), (epochs(position=15), expected[3:5] + expected[8:])):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in other)


def test_a_batch_can_be_sent_pinned_copied_and_cut_before_it_is_finished():
    dataset = dataset_of(rows_of(), classification_train(24, "strong"))
    batch, _ = batch_of(dataset, list(range(8)))
    expected = to_device(batch, CPU)
    pinned = copy.copy(batch)  # as torch pins a mapping
    pinned.update({name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in batch.items()})
    for other in (pickle.loads(pickle.dumps(batch)), pinned, map_tensors(batch, torch.clone)):
        assert torch.equal(to_device(other, CPU)["pixel_values"], expected["pixel_values"])
    parts = [to_device(cut_rows(batch, 8, *bounds, lists_are_rows=True), CPU) for bounds in ((0, 3), (3, 8))]
    assert torch.equal(torch.cat([part["pixel_values"] for part in parts]), expected["pixel_values"])
    piece = MicroBatch(batch, 0, 8)
    assert torch.equal(piece.for_graph(CPU)["labels"], expected["labels"])
    assert "num_taps" in batch and "num_taps" not in piece.on(CPU)
    assert piece._replace(moved=expected).for_graph(CPU) is expected


def test_transforms_without_a_form_for_batches_are_named():
    class Own(HorizontalFlip):
        pass

    refused = {
        "begins with Resize": classification_eval(24),
        "begins with RandomCrop": RandomCrop(8),
        "begins with shorter_of_mine": shorter_of_mine,
        "Own has no form for a batch": Compose([CROP, Own()]),
        "Resize has no form": Compose([CROP, Resize(exact=8)]),
        "erases more than once": Compose([CROP, RandomErasing(), RandomErasing()]),
    }
    for reason, transform in refused.items():
        dataset = ImageDataset(rows_of(), load_scene, transform, SceneFeatures())
        assert reason in dataset.augment_on_device() and not dataset.augments_on_device


def shorter_of_mine(image):
    return image


def test_boxes_and_masks_are_refused():
    objects = {"boxes": [[2.0, 3.0, 12.0, 14.0]], "classes": [1]}
    dataset = dataset_of([{**rows_of()[0], "objects": objects}], classification_train(24))
    with pytest.raises(DataError, match="boxes and masks do not move"):
        dataset[0]
