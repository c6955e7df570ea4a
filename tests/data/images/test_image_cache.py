"""Images that are decoded once: the same samples and draws as without a cache, shared by workers, never in the way."""

import pickle
import resource
import tempfile

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from loopwright.data import Share, adopt
from loopwright.data.images import (
    CacheChoice,
    ImageDataset,
    PixelCache,
    Resize,
    SceneFeatures,
    UnreadableSampleError,
    choose_cache,
    classification_eval,
    classification_train,
    collate_images,
    detection_train,
    fixed_part,
    from_bytes,
    load_scene,
)
from loopwright.engine.seeding import seed_generators

KINDS = ["ram", "disk"]


def dataset_of(rows, transform, kind=None, limit=1_000_000):
    dataset = ImageDataset(rows, load_scene, transform, SceneFeatures())
    if kind is not None:
        dataset.keep(PixelCache(len(rows), CacheChoice(kind, "", limit)), fixed_part(transform))
    return dataset


def epochs_of(dataset, num_epochs=3, **options):
    """Return the pixels, labels and positions of each micro-batch, and the draws of its process after it."""
    source = DataLoader(dataset, batch_size=5, shuffle=True, collate_fn=and_draw, **options)
    loader = adopt(source, seed=3, share=Share(), device=torch.device("cpu"))
    batches = [
        piece.batch for epoch in range(num_epochs) for window in loader.windows(epoch) for piece in window.pieces
    ]
    loader.close()
    return batches


def and_draw(samples):
    return {**collate_images(samples), "draw": torch.tensor(np.random.random(2))}


def assert_same(found, expected):
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert list(one) == list(other)
        assert all(torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in one)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "transform",
    [Resize(exact=12), classification_eval(12), classification_eval((8, 20), 0.8), classification_train(12, "strong")],
)
def test_batches_and_draws_are_those_without_a_cache(rows, transform, kind):
    assert_same(epochs_of(dataset_of(rows, transform, kind)), epochs_of(dataset_of(rows, transform)))


@pytest.mark.parametrize("transform", [classification_eval(12), classification_train((12, 20))])
def test_bytes_are_converted_later_to_the_same_pixels(rows, transform):
    dataset, features = dataset_of(rows, transform, "ram"), SceneFeatures()
    expected = epochs_of(dataset)
    dataset.sends_bytes = True
    found = epochs_of(dataset)
    assert all(batch["pixel_values"].dtype == torch.uint8 for batch in found)
    assert_same(
        [{**batch, "pixel_values": from_bytes(batch["pixel_values"], features.mean, features.std)} for batch in found],
        expected,
    )


def test_boxes_move_with_cached_images_as_without(rows):
    objects = {"boxes": [[2.0, 3.0, 12.0, 14.0]], "classes": [1]}
    rows, transform = [{**row, "objects": objects} for row in rows], detection_train(24)
    plain, cached = (ImageDataset(rows, load_scene, transform, SceneFeatures()) for _ in range(2))
    cached.keep(PixelCache(len(rows), CacheChoice("ram", "", 1_000_000)))
    for position in [0, 5, 0, 5]:
        seed_generators(position)
        expected = plain[position]
        seed_generators(position)
        found = cached[position]
        assert all(torch.equal(torch.as_tensor(found[name]), torch.as_tensor(expected[name])) for name in expected)


def test_workers_share_one_cache_so_that_later_epochs_need_no_files(rows, tmp_path):
    expected = epochs_of(dataset_of(rows, classification_train(12)), 2)
    dataset = dataset_of(rows, classification_train(12), "ram")
    assert_same(epochs_of(dataset, 2, num_workers=2), expected)
    for path in tmp_path.glob("*.jpg"):
        path.unlink()
    assert_same(epochs_of(dataset, 2), expected)
    assert_same(epochs_of(pickle.loads(pickle.dumps(dataset)), 2), expected)  # as for a worker that is not forked


def test_a_worker_that_cannot_open_the_cache_decodes_again(rows):
    expected = epochs_of(dataset_of(rows, classification_eval(12)), 2)
    pickled = pickle.dumps(dataset_of(rows, classification_eval(12), "ram"))  # its file is closed by now
    assert_same(epochs_of(pickle.loads(pickled), 2), expected)


def test_a_cache_without_room_or_on_a_full_disk_is_reported_once_and_changes_no_pixel(rows, caplog):
    transform = classification_eval(12)
    expected = epochs_of(dataset_of(rows, transform))
    assert_same(epochs_of(dataset_of(rows, transform, "ram", limit=10 * 12 * 12 * 3)), expected)
    assert [record.getMessage() for record in caplog.records] == [
        "the cache of images is full (they are larger than estimated): those that are not in it are decoded each time"
    ]
    caplog.clear()
    dataset, limits = dataset_of(rows, transform, "disk"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
    try:
        assert_same(epochs_of(dataset), expected)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [record.getMessage()[:44] for record in caplog.records] == ["the cache of images is full (File too large)"]


def test_a_bad_image_is_reported_each_time_and_never_stored(rows, tmp_path):
    (tmp_path / "image03.jpg").write_bytes(b"\xff\xd8\xff")
    dataset = dataset_of(rows, classification_eval(12), "ram")
    for _ in range(2):
        with pytest.raises(UnreadableSampleError, match="image03"):
            dataset[3]
    assert dataset[4]["position"] == 4


def test_the_cache_is_chosen_by_size_and_the_reason_is_given():
    assert choose_cache("auto", 1_000_000).kind == "ram"
    assert "kept in memory: about 1.0 MB of" in choose_cache("auto", 1_000_000).reason
    huge = choose_cache("auto", 10**18)
    assert huge.kind == "off" and "fit neither into" in huge.reason
    assert choose_cache("disk", 1_000_000).kind == "disk"
    assert choose_cache("off", 1).kind == "off"


def test_a_temporary_folder_that_is_gone_leaves_memory_to_choose(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    assert choose_cache("auto", 1_000_000).kind == "ram"
    assert choose_cache("auto", 10**18).kind == "off"
    with pytest.raises(OSError, match="No such file"):
        PixelCache(3, choose_cache("disk", 1_000_000))


@pytest.mark.parametrize("label", [1, 0.25])
def test_batches_without_randomness_are_gathered_once_all_images_were_read(rows, monkeypatch, label):
    rows = [{**row, "label": index} for index, row in enumerate(rows)]

    def features(scene, row):
        return {**SceneFeatures()(scene, row), "weight": label * row["label"]}

    features.pixels = SceneFeatures().pixels
    expected = epochs_of(ImageDataset(rows, load_scene, classification_eval(12), features))
    dataset = ImageDataset(rows, load_scene, classification_eval(12), features)
    dataset.keep(PixelCache(len(rows), CacheChoice("ram", "", 1_000_000)), fixed_part(classification_eval(12)))
    state = np.random.get_state()[1].tolist()
    dataset.warm()
    assert np.random.get_state()[1].tolist() == state, "nothing is drawn"
    monkeypatch.setattr(dataset, "rows", [None] * len(rows))
    assert_same(epochs_of(dataset), expected)
    samples = dataset.__getitems__([2, 5])
    assert len(samples) == 2 and samples[1]["position"] == 5 and samples[1]["weight"] == label * 5
    assert torch.equal(samples[-1]["pixel_values"], collate_images(samples)["pixel_values"][1])


def test_features_that_are_not_numbers_are_made_again_for_each_batch(rows):
    def features(scene, row):
        return {**SceneFeatures()(scene, row), "name": "a" * row["label"]}

    features.pixels = SceneFeatures().pixels
    dataset = ImageDataset(rows, load_scene, classification_eval(12), features)
    dataset.keep(PixelCache(len(rows), CacheChoice("ram", "", 1_000_000)), fixed_part(classification_eval(12)))
    dataset.warm()
    assert collate_images(dataset.__getitems__([0, 2]))["name"] == ["", "aa"]


def test_a_bad_image_is_left_out_when_the_cache_is_warmed(rows, tmp_path):
    (tmp_path / "image03.jpg").write_bytes(b"\xff\xd8\xff")
    dataset = dataset_of(rows, classification_eval(12), "ram")
    dataset.warm()
    assert len(dataset.__getitems__([2, 4])) == 2
    with pytest.raises(UnreadableSampleError, match="image03"):
        dataset.__getitems__([2, 3])
