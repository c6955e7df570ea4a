"""semantic-segmentation end to end: training, scores at the size of the masks, masks out, losses, bad data."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from loopwright import api, models
from loopwright.api import load_run
from loopwright.cli import main
from loopwright.data.images import decode_image, decode_mask
from loopwright.errors import DataError, InputError
from loopwright.tasks import get_task
from loopwright.tasks.adapters import add_adapters
from loopwright.tasks.vision.segmentation import MaskReader, class_map, count_pairs, image_iou
from report.demo_panels import assert_every_panel_has_data
from tasks.dirty_inputs import assert_aligned, damaged_images
from tasks.intervals import assert_loss_has_interval
from tasks.recomputed import assert_recomputed
from tasks.reviews import read_lines
from tasks.runs import check_resume

NAMES = ["background", "red", "blue"]
COLORS = [(220, 40, 40), (40, 60, 230)]
FLAGS = {"lr": 5e-3, "batch": 4, "threads": 1, "flip": False, "augmentation": "light", "quiet": True}


def write_scenes(folder: Path, number: int, size: tuple[int, int], seed: int, first_id: int = 0) -> None:
    """Write images of a red and a blue rectangle on noise, and their masks; a corner is of no class."""
    rng = np.random.default_rng(seed)
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
    for index in range(number):
        image = rng.integers(60, 120, (*size, 3)).astype(np.uint8)
        mask = np.full(size, first_id, np.uint8)
        for which, color in enumerate(COLORS):
            top, left = rng.integers(0, size[0] - 9), rng.integers(0, size[1] - 9)
            height, width = rng.integers(5, 10, 2)
            image[top : top + height, left : left + width] = color
            mask[top : top + height, left : left + width] = first_id + which + 1
        mask[:3, :3] = 255
        Image.fromarray(image).save(folder / "images" / f"{index:03}.png")
        Image.fromarray(mask).save(folder / "masks" / f"{index:03}.png")


def write_shapes(folder: Path, first_id: int = 0, number: int = 32) -> Path:
    """Write a data folder; the validation images are larger than those of training, and not square."""
    write_scenes(folder / "train", number, (24, 24), 0, first_id)
    write_scenes(folder / "validation", 6, (36, 52), 1, first_id)
    names = {str(first_id + index): name for index, name in enumerate(NAMES)}
    (folder / "id2label.json").write_text(json.dumps(names))
    return folder


@pytest.fixture(scope="module")
def shapes(tmp_path_factory) -> Path:
    return write_shapes(tmp_path_factory.mktemp("shapes") / "shapes")


@pytest.fixture(scope="module")
def trained(shapes, tmp_path_factory) -> api.Run:
    folder = tmp_path_factory.mktemp("trained") / "run"
    return api.train("semantic-segmentation", data=shapes, output_dir=folder, epochs=4, **FLAGS)


@pytest.fixture(scope="module")
def segformer(tmp_path_factory) -> Path:
    """Return the folder of a SegFormer of a few thousand weights, for other classes than those of the data."""
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    blocks = {"depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16], "patch_sizes": [7, 3], "strides": [4, 2]}
    heads = {"num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16}
    config = SegformerConfig(num_encoder_blocks=2, num_labels=2, **blocks, **heads)
    folder = tmp_path_factory.mktemp("models") / "segformer"
    torch.manual_seed(0)
    SegformerForSemanticSegmentation(config).save_pretrained(folder)
    return folder


def class_ious(predictions, references):
    """Return the IoU of each class over all images, worked out with sets of pixels."""
    found, true = (np.concatenate([each.ravel() for each in masks]) for masks in (predictions, references))
    found, true = found[true != 255], true[true != 255]
    return [((found == n) & (true == n)).sum() / ((found == n) | (true == n)).sum() for n in range(len(NAMES))]


def test_a_small_model_is_clearly_better_than_the_most_common_class_in_batches_of_any_size(trained):
    baseline = trained.result["baselines"]["majority"]
    assert trained.status == "done"
    assert set(trained.metrics) == {"mean_iou", "mean_accuracy", "overall_accuracy", "loss"}
    assert_recomputed(trained)
    assert trained.metrics["mean_iou"] >= 0.6 > 0.35 > baseline["mean_iou"]
    assert trained.metrics["overall_accuracy"] > baseline["overall_accuracy"] > 0.9
    low, high = trained.result["intervals"]["overall_accuracy"]
    assert low <= trained.metrics["overall_accuracy"] <= high
    assert "at least 50 samples" in trained.result["no_intervals"]["mean_iou"]
    assert_loss_has_interval(trained, "image_loss", "num_items")
    again = trained.evaluate(per_device_eval_batch_size=4)
    assert {name: again[name] for name in ("mean_iou", "mean_accuracy", "overall_accuracy")} == {
        name: value for name, value in trained.metrics.items() if name != "loss"
    }
    assert again["loss"] == pytest.approx(trained.metrics["loss"], rel=1e-5)


def test_the_most_common_class_is_counted_and_scored_on_the_masks_that_are_used(shapes, tmp_path):
    flags = {**FLAGS, "max_steps": 1, "rehearsal": False, "max_train_samples": 3, "max_eval_samples": 2}
    run = api.train("semantic-segmentation", data=shapes, output_dir=tmp_path / "run", **flags)
    masks = [decode_mask(path) for path in sorted((shapes / "validation" / "masks").iterdir())[:2]]
    pixels = np.concatenate([mask[mask != 255] for mask in masks])
    assert run.result["baselines"]["majority"]["overall_accuracy"] == np.mean(pixels == 0)


def test_predicted_masks_have_the_size_of_the_images_and_give_the_scores_of_the_run(trained, shapes, tmp_path):
    images = sorted((shapes / "validation" / "images").iterdir())
    assert_aligned(trained, [images[0]], damaged_images(tmp_path / "bad", images[0]))
    predicted = trained.predict([str(path) for path in images], overlays=tmp_path / "drawn")
    masks = [decode_mask(each["mask"]) for each in predicted]
    truth = [decode_mask(shapes / "validation" / "masks" / path.name) for path in images]
    assert [mask.shape for mask in masks] == [(36, 52)] * 6
    ious = class_ious(masks, truth)
    assert trained.metrics["mean_iou"] == pytest.approx(sum(ious) / 3, abs=1e-12)
    table = json.loads((trained.path / "eval" / "classes.json").read_text())
    assert [each["label"] for each in table] == NAMES
    assert [each["iou"] for each in table] == pytest.approx(ious, abs=1e-12)
    right = sum(int((mask == true).sum()) for mask, true in zip(masks, truth, strict=True))
    assert trained.metrics["overall_accuracy"] == pytest.approx(right / (6 * 36 * 52 - 6 * 9), abs=1e-12)
    for each, mask in zip(predicted, masks, strict=True):
        assert each["classes"] == {
            name: pytest.approx(float((mask == number).mean()), abs=1e-6)
            for number, name in enumerate(NAMES)
            if (mask == number).any()
        }
        assert min(decode_image(each["overlay"]).size) >= 36
    with Image.open(predicted[0]["mask"]) as shown:
        assert shown.mode == "P"  # with a palette: it can be looked at


def test_the_run_folder_has_pictures_the_confusion_and_the_worst_images_first(trained, shapes):
    for name in ("train_batch0.png", "predictions.png", "worst.png", "confusion.png"):
        assert min(decode_image(trained.path / "samples" / name).size) >= 100
    found = json.loads((trained.path / "eval" / "confusion.json").read_text())
    truth = [decode_mask(path) for path in sorted((shapes / "validation" / "masks").iterdir())]
    assert found["labels"] == NAMES
    assert [sum(row) for row in found["matrix"]] == [sum(int((mask == n).sum()) for mask in truth) for n in range(3)]
    worst = read_lines(trained.path / "eval" / "worst.jsonl")
    assert [each["iou"] for each in worst] == sorted(each["iou"] for each in worst) and len(worst) == 6
    assert all(Path(each["image"]).is_file() for each in worst)


def test_an_exported_model_is_opened_by_models_load(trained, tmp_path, shapes):
    model = models.load(trained.export(tmp_path / "exported")).eval()
    assert model.labels == NAMES and model.config["ignore_index"] == 255
    image = np.asarray(decode_image(shapes / "train" / "images" / "000.png"))
    with torch.no_grad():
        logits = model(torch.from_numpy(image.copy()).permute(2, 0, 1)[None] / 127.5 - 1).logits
    shares = trained.predict([shapes / "train" / "images" / "000.png"])[0]["classes"]
    counts = torch.bincount(logits.argmax(1).flatten(), minlength=3) / image[..., 0].size
    assert shares == {name: pytest.approx(float(n), abs=1e-6) for name, n in zip(NAMES, counts, strict=True) if n}


def test_a_moved_and_resumed_run_equals_an_uninterrupted_one(shapes, tmp_path):
    flags = {**FLAGS, "data": shapes, "max_train_samples": 12, "rehearsal": False, "save_strategy": "epoch"}
    check_resume("semantic-segmentation", tmp_path, {"epochs": 1}, {"epochs": 2}, **flags)


def test_a_segformer_trains_on_its_own_loss_our_cross_entropy_and_transformers_opens_it(shapes, segformer, tmp_path):
    from transformers import AutoImageProcessor, AutoModelForSemanticSegmentation

    flags = {**FLAGS, "image_size": 32, "max_steps": 3, "batch": 2, "ema": 0.9, "backbone_lr_factor": 0.1}
    run = api.train("semantic-segmentation", data=shapes, model=segformer, output_dir=tmp_path / "run", **flags)
    assert run.evaluate() == run.metrics and 0 <= run.metrics["mean_iou"] <= 1
    assert_recomputed(run)
    assert 'loss: "model"' in (run.path / "config.yaml").read_text()
    exported = run.export(tmp_path / "exported")
    model = AutoModelForSemanticSegmentation.from_pretrained(exported).eval()
    processor = AutoImageProcessor.from_pretrained(exported, backend="pil")
    assert model.config.id2label == dict(enumerate(NAMES)) and model.config.semantic_loss_ignore_index == 255
    path = shapes / "validation" / "images" / "000.png"
    with torch.no_grad():
        outputs = model(**processor(decode_image(path), return_tensors="pt"))
    (theirs,) = processor.post_process_semantic_segmentation(outputs, target_sizes=[(36, 52)])
    ours = decode_mask(run.predict([path], overlays=tmp_path / "drawn")[0]["mask"])
    assert np.mean(ours == theirs.numpy()) > 0.99
    job = load_run(run.folder)
    job.model.eval()
    batch = batch_of(job, range(2))
    assert_loss_has_interval(run, "image_loss", "num_items")
    own, outputs = job.task.compute_loss(job, job.model, batch)
    assert outputs.logits.shape[-2:] == (8, 8)  # smaller than the labels: made larger before the loss
    job.args.loss = "ce"
    assert job.task.compute_loss(job, job.model, batch)[0].item() == pytest.approx(own.item(), rel=1e-5)
    job.args.loss = "model"
    nothing = {**batch, "labels": torch.full_like(batch["labels"], 255), "num_items": torch.zeros(2)}
    assert torch.isfinite(job.task.compute_loss(job, job.model, nothing)[0])
    assert job.task.count_items(nothing) == 0


def batch_of(job, numbers: range) -> dict:
    dataset = job.task.create_dataset(job, job.data.rows("validation"), is_labelled=True)
    return job.collate_fn([dataset[number] for number in numbers])


def test_named_losses_ignore_pixels_and_count_their_items(trained):
    job = load_run(trained.folder)
    job.model.eval()

    def loss_of(name, weights=()):
        job.args.loss, job.args.class_weights = name, list(weights)
        batch = batch_of(job, range(3))
        with torch.no_grad():
            loss, outputs = job.task.compute_loss(job, job.model, batch)
        return float(loss), job.task.count_items(batch), outputs.logits, batch["labels"]

    value, items, logits, labels = loss_of("ce")
    plain = functional.cross_entropy(logits, labels, ignore_index=255)
    assert value == pytest.approx(float(plain), rel=1e-5)
    assert items == int((labels != 255).sum()) < labels.numel()
    value, items, _, _ = loss_of("ce", ["0.5", "2", "3"])
    weights = torch.tensor([0.5, 2.0, 3.0])
    weighted = functional.cross_entropy(logits, labels, weight=weights, ignore_index=255)
    assert value == pytest.approx(float(weighted), rel=1e-5)
    assert items == pytest.approx(float(weights[labels[labels != 255]].sum()), rel=1e-6)
    assert loss_of("ce+dice")[0] == pytest.approx(
        loss_of("dice")[0]
        + sum(float(functional.cross_entropy(logits[i : i + 1], labels[i : i + 1], ignore_index=255)) for i in range(3))
        / 3,
        rel=1e-5,
    )
    assert loss_of("dice")[1] == loss_of("ce+dice")[1] == 3
    assert 0 < loss_of("focal")[0] < float(plain)


def test_adapters_of_a_segformer_are_trained_with_its_whole_head_and_the_run_predicts(shapes, segformer, tmp_path):
    flags = {**FLAGS, "image_size": 32, "max_steps": 2, "rehearsal": False}
    run = api.train(
        "semantic-segmentation", data=shapes, model=segformer, output_dir=tmp_path / "run", lora=True, **flags
    )
    before, after = (load_file(folder / "model.safetensors") for folder in (segformer, run.path / "model"))
    assert set(before) == set(after)
    kept = {name for name in before if before[name].shape == after[name].shape}
    changed = {name for name in kept if not torch.equal(before[name], after[name])}
    assert {name for name in kept if name.startswith("decode_head")} <= changed
    below = {name for name in changed if not name.startswith("decode_head")}
    assert below and all("attention" in name or "mlp" in name for name in below)
    assert run.evaluate() == run.metrics
    (found,) = run.predict([shapes / "validation" / "images" / "000.png"], overlays=tmp_path / "drawn")
    assert decode_mask(found["mask"]).shape == (36, 52)


def test_adapters_of_an_uper_net_are_trained_with_its_heads():
    from transformers import ConvNextConfig, UperNetConfig, UperNetForSemanticSegmentation

    stages = [f"stage{number}" for number in range(1, 5)]
    below = ConvNextConfig(hidden_sizes=[8] * 4, depths=[1] * 4, out_features=stages)
    sizes = {"hidden_size": 16, "auxiliary_channels": 8, "auxiliary_in_channels": 8}
    model = UperNetForSemanticSegmentation(UperNetConfig(backbone_config=below, num_labels=3, **sizes))
    flags = SimpleNamespace(lora_rank=2, lora_alpha=4, lora_dropout=0.0, lora_target=[])
    adapted = add_adapters(model, flags, None)
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    for head in ("decode_head", "auxiliary_head"):
        assert f"base_model.model.{head}.modules_to_save.default.classifier.weight" in trained
    assert [name for name in trained if "backbone" in name and "lora_A" in name]
    assert not [name for name in trained if "backbone" in name and "lora" not in name]


def test_a_module_of_pytorch_with_scores_at_a_quarter_of_the_size_is_trained(shapes, tmp_path):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), nn.ReLU(), nn.Conv2d(8, 3, 1))
    flags = {**FLAGS, "max_steps": 4, "rehearsal": False}
    run = api.train("semantic-segmentation", data=shapes, model=module, output_dir=tmp_path / "run", **flags)
    assert 0 < run.metrics["mean_iou"] < 1 and run.status == "done"
    assert "at least 50 samples" in run.result["no_intervals"]["loss"]


def test_class_weights_are_checked_and_balanced_by_the_pixels_that_are_trained_on(shapes, segformer, tmp_path):
    flags = {**FLAGS, "data": shapes, "max_steps": 1, "rehearsal": False, "max_train_samples": 4}
    run = api.train("semantic-segmentation", class_weights=["balanced"], output_dir=tmp_path / "run", **flags)
    background, red, blue = run.model.config["class_weights"]
    used = np.concatenate([decode_mask(path).ravel() for path in sorted((shapes / "train" / "masks").iterdir())[:4]])
    counts = [int((used == number).sum()) for number in range(3)]
    assert red / background == pytest.approx((counts[0] / counts[1]) ** 0.5, rel=1e-4)
    assert blue / background == pytest.approx((counts[0] / counts[2]) ** 0.5, rel=1e-4)
    assert background + red + blue == pytest.approx(3, rel=1e-4)
    pixels = {"loss": "focal", "class_weights": ["0.05", "1", "2.5"], "output_dir": tmp_path / "pixels"}
    run = api.train("semantic-segmentation", **pixels, **flags)
    assert_loss_has_interval(run, "image_loss", "num_items")
    assert_recomputed(run)
    with pytest.raises(InputError, match="is not a number, 0 or more, for each of the 3 classes"):
        api.train("semantic-segmentation", class_weights=["1", "2"], **flags)
    with pytest.raises(InputError, match="--loss model does not use --class_weights"):
        api.train("semantic-segmentation", model=segformer, loss="model", class_weights=["1", "1", "2"], **flags)


def test_reduced_labels_are_trained_from_0_and_written_in_the_numbering_of_the_masks(tmp_path):
    data = write_shapes(tmp_path / "data", first_id=1, number=12)
    (data / "id2label.json").write_text(json.dumps(dict(enumerate(NAMES))))
    flags = {**FLAGS, "reduce_labels": True, "epochs": 12, "augmentation": "none", "rehearsal": False}
    run = api.train("semantic-segmentation", data=data, output_dir=tmp_path / "run", **flags)
    assert run.result["baselines"]["majority"]["overall_accuracy"] > 0.9
    predicted = run.predict(data / "train" / "images", overlays=tmp_path / "drawn")
    masks = [decode_mask(each["mask"]) for each in predicted]
    assert 1 in np.unique(masks) and set(np.unique(masks)) <= {1, 2, 3}
    truth = [decode_mask(path) for path in sorted((data / "train" / "masks").iterdir())]
    assert np.mean(np.array(masks) == np.array(truth)) > 0.85


def test_merged_scorers_of_two_processes_equal_one(trained):
    job = load_run(trained.folder)
    rng = np.random.default_rng(3)
    samples = []
    for position in range(8):
        reference = rng.integers(0, 3, (5 + position, 9)).astype(np.uint8)
        reference[0, :position] = 255
        prediction = np.where(rng.random(reference.shape) < 0.7, reference % 255, 1).astype(np.uint8)
        samples.append({"position": position, "prediction": prediction, "reference": reference})
    whole, first, second = (job.task.create_scorer(job) for _ in range(3))
    whole.add(samples)
    assert first.add(samples[::2]) == [{"position": position} for position in range(0, 8, 2)]
    second.add(samples[1::2])
    first.merge_state(second.state_dict())
    assert first.intervals() == whole.intervals()
    assert first.compute() == whole.compute()


def test_the_iou_of_an_image_covers_its_true_and_predicted_classes():
    reference = np.array([[0, 0, 1], [1, 255, 255]])
    prediction = np.array([[0, 2, 1], [0, 1, 2]])
    pairs = count_pairs(reference, prediction, 255)
    assert sorted(pairs) == [(0, 0, 1), (0, 2, 1), (1, 0, 1), (1, 1, 1)]
    assert image_iou(pairs) == pytest.approx((1 / 3 + 1 / 2 + 0) / 3)
    assert image_iou(count_pairs(np.full((2, 2), 255), np.zeros((2, 2), int), 255)) is None


def test_logits_are_interpolated_before_the_argmax():
    logits = torch.zeros(2, 1, 2)
    logits[1, 0, 1] = 4.0
    logits[0] = 1.5
    assert class_map(logits, (1, 2)).tolist() == [[0, 1]]
    # At 1/4 and 3/4 of the way the second class has 1 and 3 of its 4 points.
    assert class_map(logits, (1, 4)).tolist() == [[0, 0, 1, 1]]
    logits[0] = 0.5
    assert class_map(logits, (1, 4)).tolist() == [[0, 1, 1, 1]]


def _unknown_class(data: Path) -> None:
    path = data / "validation" / "masks" / "002.png"
    mask = decode_mask(path).astype(np.uint8)
    mask[3, 4:8] = 9
    Image.fromarray(mask).save(path)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        pytest.param(
            lambda data: Image.new("L", (24, 30)).save(data / "train/masks/004.png"),
            ["004.png", "24 x 30"],
            id="mask of another size",
        ),
        pytest.param(_unknown_class, ["masks contain class 9", "002.png", "4 pixels"], id="class out of range"),
        pytest.param(lambda data: (data / "train/masks/007.png").unlink(), ["007.png"], id="image without a mask"),
    ],
)
def test_bad_masks_are_reported_before_training(damage, said, shapes, tmp_path, capsys):
    data = shutil.copytree(shapes, tmp_path / "data")
    damage(data)
    assert main(["train", "semantic-segmentation", "--data", str(data), "--out", str(tmp_path / "run")]) != 0
    text = "".join(capsys.readouterr())
    assert all(words in text for words in said), text
    assert not (tmp_path / "run").exists()


def test_an_unknown_class_that_preflight_missed_is_named(shapes, tmp_path):
    data = shutil.copytree(shapes, tmp_path / "data")
    _unknown_class(data)
    row = {name: str(data / "validation" / f"{name}s" / "002.png") for name in ("image", "mask")}
    with pytest.raises(DataError, match=r"002.png has the class 9, but only 3 classes are known"):
        MaskReader(len(NAMES), False, 255)(row)
    assert MaskReader(10, False, 255)(row).semantic.max() == 255


def test_the_command_line_predicts_a_folder_of_images(trained, shapes, tmp_path, capsys):
    folder = shapes / "validation" / "images"
    assert main(["predict", str(trained.path), str(folder), "--overlays", str(tmp_path / "drawn")]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [Path(line["image"]).name for line in lines] == [f"{number:03}.png" for number in range(6)]
    assert all(set(line) == {"image", "classes", "overlay", "mask"} for line in lines)
    assert get_task("semantic-segmentation").name in (trained.path / "run.json").read_text()


@pytest.mark.slow
def test_a_shortened_demo_is_clearly_better_than_its_baseline(capsys, few_scenes):
    few_scenes(train=450, validation=60)
    # Images of half the size are enough to begin with, and a quarter of the work.
    words = ["--no_rehearsal", "--epochs", "4", "--class_weights", "balanced"]
    words += ["--image_size", "32", "--max_train_samples", "450", "--max_eval_samples", "60"]
    words += ["--eval_strategy", "no", "--save_strategy", "no"]
    assert main(["demo", "semantic-segmentation", *words]) == 0
    assert "best " in capsys.readouterr().out
    result = api.Run.find("last").result
    baseline = result["baselines"]["majority"]
    assert result["metrics"]["mean_iou"] > 0.098 > 0.09 > baseline["mean_iou"]
    assert result["metrics"]["mean_accuracy"] > 0.12 > 0.1 > baseline["mean_accuracy"]
    assert_every_panel_has_data(api.Run.find("last").path, has_evaluations=False)
    assert_recomputed(api.Run.find("last"))
