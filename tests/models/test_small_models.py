"""The small models: what they return, how they are saved, and that they learn."""

import json

import pytest
import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F

from loopwright import models
from loopwright.errors import CheckpointError, ConfigError, DataError
from loopwright.models import DetectionOutput
from loopwright.models.center_point import heatmap

SMALL = {
    "conv_net": {"num_labels": 3, "width": 8, "loss": "focal"},
    "u_net": {"num_labels": 3, "width": 8, "class_weights": [0.1, 1, 1]},
    "center_point": {"num_labels": 3, "width": 8, "num_prototypes": 4},
    "masked_vit": {"width": 16, "num_layers": 1, "num_heads": 2},
}


def outputs_of(model, images):
    output = model(images)
    return output.reconstruction if model.name == "masked_vit" else output.logits


def objects(*boxes, classes=(0,), size=(16, 16)):
    """Return labels of an image: boxes as centre, width and height in pixels, masks that fill them."""
    height, width = size
    shares = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
    masks = torch.zeros(len(boxes), height, width, dtype=torch.bool)
    for mask, (x, y, w, h) in zip(masks, shares.tolist(), strict=True):
        mask[int(y - h / 2) : int(y + h / 2), int(x - w / 2) : int(x + w / 2)] = True
    return {
        "class_labels": torch.tensor(classes[: len(boxes)], dtype=torch.long),
        "boxes": shares / torch.tensor([width, height, width, height]),
        "masks": masks,
    }


def fit(model, batches, lr, max_lr=None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr, total_steps=6 * 45) if max_lr else None
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(*batch).loss
        loss.backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", list(models.MODELS))
def test_a_model_that_was_saved_comes_back_the_same(tmp_path, name):
    labels = None if name == "masked_vit" else ["a", "b", "c"]
    model = models.create(name, labels, **SMALL[name]).train()
    images = torch.randn(4, 3, 8, 8)
    outputs_of(model, images)  # moves the running means
    model.eval().save_pretrained(tmp_path / "new" / "folder")
    again = models.load(tmp_path / "new" / "folder")
    assert not again.training and type(again) is type(model)
    assert again.config == model.config and again.labels == labels
    assert torch.equal(outputs_of(again, images), outputs_of(model, images))
    config = json.loads((tmp_path / "new" / "folder" / "config.json").read_text())
    assert config["loopwright_model"] == name and SMALL[name].items() <= config.items()


def test_there_are_four_models_of_the_sizes_they_say_with_the_classes_of_their_names():
    made = [
        models.create("conv_net", num_labels=10),
        models.create("u_net", num_labels=11),
        models.create("center_point", num_labels=10),
        models.create("center_point", num_labels=10, num_prototypes=8),
        models.create("masked_vit"),
    ]
    sizes = [sum(parameter.numel() for parameter in model.parameters()) for model in made]
    assert {model.name for model in made} == set(models.MODELS) and len(models.MODELS) == 4
    assert all(50_000 < size < 500_000 for size in sizes), sizes
    assert models.create("conv_net", labels=["cat", "dog"]).config["num_labels"] == 2
    with pytest.raises(ConfigError, match="the model 'conv_net' has 3 classes, got 2 names"):
        models.create("conv_net", labels=["cat", "dog"], num_labels=3)


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        ("conv_nte", {}, "there is no model 'conv_nte': did you mean 'conv_net'?"),
        ("conv_net", {"num_labels": 2, "depth": 3}, "does not know depth: it takes num_labels, num_channels"),
        ("u_net", {}, "the model 'u_net' needs num_labels"),
        ("u_net", {"num_labels": 0}, "num_labels of the model 'u_net' must be at least 1, got 0"),
        ("u_net", {"num_labels": 2, "loss": "mse"}, "there is no loss 'mse': use ce, focal"),
        ("u_net", {"num_labels": 2, "class_weights": [1.0]}, "one for each of the 2 classes, got 1"),
        ("center_point", {"num_labels": 2, "num_prototypes": -1}, "must be 0 or more, got -1"),
        ("masked_vit", {"patch_size": 3}, "must be a multiple of patch_size, got 8 and 3"),
        ("masked_vit", {"num_heads": 5}, "must be a multiple of num_heads, got 96 and 5"),
    ],
)
def test_impossible_models_are_refused(name, config, expected):
    with pytest.raises(ConfigError) as caught:
        models.create(name, **config)
    assert expected in str(caught.value)


def test_a_folder_without_a_model_or_with_a_damaged_one_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="there is no model in"):
        models.load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(CheckpointError, match="does not describe a small model: it has no 'loopwright_model'"):
        models.load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="holds a list instead of an object"):
        models.load(tmp_path)
    models.create("conv_net", num_labels=2, width=8).save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="is damaged"):
        models.load(tmp_path)
    weights.write_bytes(whole)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "width": 16}))
    with pytest.raises(CheckpointError, match=r"is damaged: Error\(s\) in loading state_dict"):
        models.load(tmp_path)


@pytest.mark.parametrize("size", [(8, 8), (5, 7), (33, 18)], ids=["even", "tiny", "odd"])
def test_images_of_any_size_can_be_trained_on(size):
    images = torch.randn(3, 3, *size)
    pixels = torch.randint(0, 3, (3, *size))
    pixels[0] = 255
    box = (size[1] / 2, size[0] / 2, 3.0, 3.0)
    labels = [objects(box, size=size), objects(size=size), objects(box, box, classes=(1, 1), size=size)]
    for name, target in (("conv_net", torch.tensor([0, 1, 2])), ("u_net", pixels), ("center_point", labels)):
        model = models.create(name, **SMALL[name])
        output = model(images, target)
        output.loss.backward()
        assert torch.isfinite(output.loss)
        assert all(parameter.grad is not None for parameter in model.parameters()), name
        if name == "u_net":
            assert output.logits.shape == (3, 3, *size) and output.num_items == 2


def test_the_heatmap_has_a_peak_per_object_and_the_higher_of_two_counts():
    images, classes = torch.tensor([0, 0, 1]), torch.tensor([1, 1, 0])
    row, column = torch.tensor([2, 2, 5]), torch.tensor([3, 4, 0])
    sizes = torch.tensor([[6.0, 12.0], [6.0, 12.0], [0.25, 0.25]])
    maps = heatmap((2, 2, 6, 8), images, classes, row, column, sizes)
    expected = torch.zeros(2, 2, 6, 8)
    for image, label, y, x, (w, h) in zip(images, classes, row, column, sizes.tolist(), strict=True):
        for i in range(6):
            for j in range(8):
                across, down = (j - x) / max(w / 6, 0.5), (i - y) / max(h / 6, 0.5)
                height = torch.exp(-(across**2 + down**2) / 2)
                expected[image, label, i, j] = torch.maximum(expected[image, label, i, j], height)
    torch.testing.assert_close(maps, expected)
    assert maps[0, 1, 2, 3] == 1 and maps[0, 1, 2, 4] == 1 and maps[1, 0, 5, 0] == 1 and not maps[0, 0].any()


def test_maps_are_decoded_to_boxes_scores_classes_and_masks():
    model = models.create("center_point", **SMALL["center_point"])
    peaks, places = torch.full((2, 3, 4, 6), -9.0), torch.zeros(2, 4, 4, 6)
    coefficients, prototypes = torch.zeros(2, 4, 4, 6), torch.full((2, 4, 8, 12), -1.0)
    peaks[0, 2, 1, 3], peaks[0, 0, 3, 5], peaks[0, 2, 1, 2] = 3.0, 1.0, 2.0  # the last is beside a surer one
    places[0, :, 1, 3] = torch.tensor([2.0, 1.0, 0.0, 0.0]).log().nan_to_num(neginf=0.0)
    places[0, 2:, 1, 3] = torch.tensor([0.5, 0.25])
    coefficients[0, 1, 1, 3], prototypes[0, 1, :, :7] = 1.0, 1.0
    output = DetectionOutput(
        logits=peaks, places=places, coefficients=coefficients, prototypes=prototypes, image_size=(14, 22)
    )
    first, second = model.decode(output, threshold=0.3)
    assert second["boxes"].shape == (0, 4) and second["masks"].shape == (0, 14, 22)
    assert first["classes"].tolist() == [2, 0]
    assert first["scores"].tolist() == pytest.approx(torch.tensor([3.0, 1.0]).sigmoid().tolist())
    # Centre (3.5, 1.25) in cells, 2 x 1 cells; the other sticks out of the image and is cut.
    assert first["boxes"].tolist() == [[10.0, 3.0, 18.0, 7.0], [18.0, 10.0, 22.0, 14.0]]
    inside = torch.zeros(14, 22, dtype=torch.bool)
    inside[3:7, 10:14] = True
    assert torch.equal(first["masks"][0], inside) and not first["masks"][1].any()
    assert len(model.decode(output, threshold=0.3, max_detections=1)[0]["scores"]) == 1


def test_the_loss_of_a_detector_is_a_mean_over_images_with_and_without_objects():
    model = models.create("center_point", **SMALL["center_point"]).eval()
    images = torch.randn(3, 3, 16, 16)
    labels = [objects((5, 5, 4, 6), (11, 9, 6, 6), classes=(0, 2)), objects(), objects((8, 8, 10, 10), classes=(1,))]
    with torch.no_grad():
        whole = model(images, labels).loss
        single = [model(images[index : index + 1], labels[index : index + 1]).loss for index in range(3)]
    assert float(whole) == pytest.approx(float(sum(single)) / 3, rel=1e-5)


@pytest.mark.parametrize("num_prototypes", [0, 4])
def test_the_loss_of_a_detector_is_the_mean_of_its_image_losses_in_evaluation(num_prototypes):
    images = torch.rand(3, 3, 16, 16)
    labels = [objects((8, 8, 8, 8), (4, 4, 6, 6), classes=(0, 2)), objects(), objects((10, 6, 8, 8))]
    model = models.create("center_point", num_labels=3, width=8, num_prototypes=num_prototypes)
    assert model(images, labels=labels).image_losses is None
    whole = model.eval()(images, labels=labels)
    alone = [model(images[index : index + 1], labels=labels[index : index + 1]).loss.item() for index in range(3)]
    assert whole.image_losses.tolist() == pytest.approx(alone, rel=1e-5)
    assert sum(alone) / 3 == pytest.approx(whole.loss.item(), rel=1e-6)


@pytest.mark.parametrize("num_prototypes", [0, 4])
def test_a_detector_learns_a_scene_by_heart(num_prototypes):
    torch.manual_seed(1)
    images = torch.randn(2, 3, 32, 32) / 4
    labels = [
        objects((10, 10, 8, 12), (24, 22, 10, 10), classes=(0, 2), size=(32, 32)),
        objects((16, 12, 14, 8), classes=(1,), size=(32, 32)),
    ]
    for image, label in zip(images, labels, strict=True):
        for mask, kind in zip(label["masks"], label["class_labels"], strict=True):
            image[kind] += 2.0 * mask
    model = models.create("center_point", num_labels=3, width=8, num_prototypes=num_prototypes)
    fit(model, [(images, labels)] * 80, lr=1e-2)
    found = model.decode(model(images), threshold=0.5)
    assert [each["classes"].sort().values.tolist() for each in found] == [[0, 2], [1]]
    torch.testing.assert_close(found[1]["boxes"][0], torch.tensor([9.0, 8.0, 23.0, 16.0]), atol=1.0, rtol=0.0)
    if num_prototypes:
        both, either = found[1]["masks"][0] & labels[1]["masks"][0], found[1]["masks"][0] | labels[1]["masks"][0]
        assert both.sum() / either.sum() > 0.8


def test_masks_of_another_size_than_their_image_are_refused():
    model = models.create("center_point", **SMALL["center_point"])
    with pytest.raises(DataError, match="do not fit images of shape"):
        model(torch.randn(1, 3, 16, 16), [objects((8, 8, 4, 4), size=(18, 18))])


def test_hidden_patches_are_not_seen_and_only_they_count():
    model = models.create("masked_vit", **SMALL["masked_vit"]).eval()
    images, hidden = torch.randn(2, 3, 8, 8), torch.zeros(2, 16, dtype=torch.bool)
    hidden[0, 5], hidden[1, [0, 15]] = True, True
    others = images.clone()
    others[0, :, 2:4, 2:4] = 9.0  # patch 5: second row, second column
    with torch.no_grad():
        first, second = model(images, hidden), model(others, hidden)
    assert torch.equal(first.reconstruction[0], second.reconstruction[0])
    pixels = hidden.reshape(2, 1, 4, 4).repeat_interleave(2, dim=2).repeat_interleave(2, dim=3).expand(-1, 3, -1, -1)
    expected = F.mse_loss(first.reconstruction[pixels], images[pixels])
    assert first.num_items == 3 and float(first.loss) == pytest.approx(float(expected), rel=1e-5)
    assert model(images).loss is None
    with pytest.raises(DataError, match="takes images of 8 x 8, got \\(6, 8\\)"):
        model(torch.randn(1, 3, 6, 8))


def test_hidden_patches_are_learned_from_visible_ones():
    model = models.create("masked_vit", **SMALL["masked_vit"])
    # Each image has one colour.
    batches = ((torch.randn(32, 3, 1, 1).expand(-1, -1, 8, 8), torch.rand(32, 16) < 0.5) for _ in range(60))
    losses = fit(model, batches, lr=1e-2)
    # The mean image has an error of 1.
    assert losses[0] > 0.9 and max(losses[-5:]) < 0.2


def test_a_conv_net_reads_digits_after_a_few_cpu_seconds():
    data = load_digits()
    images = (torch.tensor(data.images, dtype=torch.float32)[:, None].expand(-1, 3, -1, -1) / 16 - 0.5) / 0.5
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    model = models.create("conv_net", num_labels=10)
    orders = [torch.randperm(1437, generator=torch.Generator().manual_seed(epoch)) for epoch in range(6)]
    fit(model, ((images[part], labels[part]) for each in orders for part in each.split(32)), lr=2e-3, max_lr=2e-3)
    with torch.no_grad():
        guesses = model.eval()(images[1437:]).logits.argmax(dim=1)
    assert (guesses == labels[1437:]).float().mean() >= 0.98
