"""instance-segmentation end to end: masks at the size of the files, Mask2Former, resuming, bad data."""

import json
import shutil

import numpy as np
import pytest
import torch
from torch import nn

from loopwright import api, models
from loopwright.api import load_run
from loopwright.cli import main
from loopwright.data.images import decode_image
from loopwright.errors import InputError
from loopwright.tasks.vision.predicted_objects import count_hits, in_file, mask_tools, masks_of_queries, run_lengths
from tasks.boxes import NAMES, write_boxes
from tasks.dirty_inputs import assert_aligned, damaged_images
from tasks.intervals import assert_loss_has_interval
from tasks.recomputed import assert_recomputed
from tasks.reviews import read_lines
from tasks.test_object_detection import assert_truth_is_that_of_the_file

TASK = "instance-segmentation"
FLAGS = {"lr": 5e-3, "batch": 4, "threads": 1, "flip": False, "augmentation": "light", "quiet": True}
SHORT = {**FLAGS, "max_steps": 3, "rehearsal": False, "image_size": 32}


@pytest.fixture(scope="module")
def boxes(tmp_path_factory):
    return write_boxes(tmp_path_factory.mktemp("boxes") / "boxes")


@pytest.fixture(scope="module")
def trained(boxes, tmp_path_factory):
    """Return a finished run of the small model; its folder is left as it is."""
    return api.train(TASK, data=boxes, output_dir=tmp_path_factory.mktemp("trained") / "run", epochs=5, **FLAGS)


@pytest.fixture(scope="module")
def mask2former(tmp_path_factory):
    """Return the folder of a Mask2Former with few weights, for other classes than those of the data."""
    from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation, SwinConfig

    stages = {"depths": [1] * 4, "num_heads": [1] * 4, "out_features": [f"stage{n}" for n in range(1, 5)]}
    backbone = SwinConfig(image_size=32, patch_size=2, embed_dim=8, window_size=4, **stages)
    sizes = {"hidden_dim": 32, "feature_size": 32, "mask_feature_size": 32}  # its norms have 32 groups
    sizes |= {"encoder_layers": 1, "decoder_layers": 2, "encoder_feedforward_dim": 16, "dim_feedforward": 16}
    sizes |= {"num_queries": 5, "num_attention_heads": 2, "train_num_points": 64, "num_labels": 7}
    folder = tmp_path_factory.mktemp("models") / "mask2former"
    torch.manual_seed(0)
    config = Mask2FormerConfig(backbone_config=backbone, **sizes)
    Mask2FormerForUniversalSegmentation(config).save_pretrained(folder)
    return folder


def test_a_small_model_finds_objects_and_their_masks(trained, boxes):
    boxed, masked = {"map", "map_50"}, {"mask_map", "mask_map_50", "mask_map_75", "mask_map_small", "mask_mar_100"}
    assert set(trained.metrics) == {*boxed, *masked, "loss"}
    assert_recomputed(trained)
    assert trained.metrics["mask_map_50"] >= 0.5 and trained.metrics["map_50"] >= 0.5
    assert trained.result["baselines"]["nothing"]["mask_map"] == 0.0
    assert_truth_is_that_of_the_file(boxes / "validation.json", trained.path / "eval" / "predictions.jsonl")
    table = json.loads((trained.path / "eval" / "classes.json").read_text())
    assert [each["label"] for each in table] == NAMES and sum(each["there"] for each in table) == 11
    assert sum(each["mask_map"] for each in table) / 2 == pytest.approx(trained.metrics["mask_map"], abs=1e-12)
    assert trained.evaluate() == trained.metrics
    assert_loss_has_interval(trained, "image_loss")


def test_predicted_masks_lie_in_their_boxes_at_the_size_of_the_files(trained, boxes, capsys):
    paths = [str(boxes / "validation" / f"{number:03}.png") for number in (2, 3, 4)]
    assert main(["predict", str(trained.path), *paths, "--overlays", "drawn", "--threshold", "0.1"]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    objects = [found for each in told for found in each["objects"]]
    assert len(objects) >= 3 and all(set(each) == {"label", "score", "box", "mask"} for each in objects)
    for each in objects:
        mask = mask_tools().decode(each["mask"])
        rows, columns = np.nonzero(mask)
        left, top, right, bottom = each["box"]
        assert mask.shape == (40, 56) and mask.any()
        assert left - 2 <= columns.min() and columns.max() + 1 <= right + 2
        assert top - 2 <= rows.min() and rows.max() + 1 <= bottom + 2
    plain = np.asarray(decode_image(paths[0]).resize((224, 160), 0))
    drawn = np.asarray(decode_image(told[0]["overlay"]))
    assert drawn.shape[0] > 160 and drawn.shape[1] >= 224 and not np.array_equal(drawn[8:168, 8:232], plain)
    samples = {path.name for path in (trained.path / "samples").iterdir()}
    assert samples == {"train_batch0.png", "predictions.png", "worst.png"}


def test_an_exported_model_is_opened_by_models_load(trained, boxes, tmp_path):
    model = models.load(trained.export(tmp_path / "exported")).eval()
    path = boxes / "train" / "003.png"
    pixels = torch.from_numpy(np.array(decode_image(path))).movedim(-1, 0)[None] / 127.5 - 1
    (found,) = model.decode(model(pixels), 0.1)
    assert_aligned(trained, [path], damaged_images(tmp_path / "bad", path))
    objects = trained.predict([path], threshold=0.1)[0]["objects"]
    assert model.labels == NAMES and len(objects) == len(found["masks"]) > 0
    for each, mask in zip(objects, found["masks"].numpy(), strict=True):
        assert np.mean(mask_tools().decode(each["mask"]) == mask) > 0.99


def test_training_images_are_scored_as_the_model_sees_them(boxes):
    run = api.train(TASK, data=boxes, **{**SHORT, "max_steps": 1, "max_train_samples": 4, "eval_on_train": True})
    told = [line for line in read_lines(run.path / "metrics.jsonl") if "train_mask_map" in json.dumps(line)]
    assert told and run.status == "done"


@pytest.mark.slow
def test_a_mask2former_is_trained_on_images_with_and_without_objects_resumed_and_exported(boxes, mask2former, tmp_path):
    from transformers import AutoModelForUniversalSegmentation

    flags = {**SHORT, "data": boxes, "model": mask2former, "batch": 8, "lr_scheduler_type": "constant"}
    flags |= {"max_train_samples": 8, "save_strategy": "steps", "save_steps": 1}
    run = api.train(TASK, output_dir=tmp_path / "run", **{**flags, "max_steps": 2})
    assert run.evaluate() == run.metrics and np.isfinite(run.metrics["loss"])
    assert len(run.predict(boxes / "validation", threshold=0.0)) == 8
    # The loss draws the points that it looks at: a run that goes on draws the same ones.
    longer = api.train(TASK, output_dir=tmp_path / "longer", **flags)
    resumed = api.resume(run, max_steps=3, quiet=True)
    weights = [(each.path / "model" / "model.safetensors").read_bytes() for each in (resumed, longer)]
    assert weights[0] == weights[1] and resumed.metrics == longer.metrics
    model = AutoModelForUniversalSegmentation.from_pretrained(longer.export(tmp_path / "exported"))
    assert model.config.id2label == dict(enumerate(NAMES))
    job = load_run(longer.folder)
    dataset = job.task.create_dataset(job, job.data.rows("train"), is_labelled=True, is_training=True)
    batch = job.collate_fn([dataset[0], dataset[0]])
    assert [tuple(each["masks"].shape) for each in batch["labels"]] == [(0, 32, 32)] * 2
    loss, _ = job.task.compute_loss(job, job.model.train(), batch)
    loss.backward()
    assert torch.isfinite(loss)


def test_masks_of_queries_equal_those_of_transformers():
    from transformers import Mask2FormerImageProcessorPil
    from transformers.models.mask2former.modeling_mask2former import Mask2FormerForUniversalSegmentationOutput

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 6, 4, generator=generator)
    masks = nn.functional.interpolate(torch.randn(2, 6, 4, 4, generator=generator), size=(96, 96), mode="bicubic")
    outputs = Mask2FormerForUniversalSegmentationOutput(class_queries_logits=logits, masks_queries_logits=masks)
    options = {"threshold": 0.2, "target_sizes": [(384, 384)] * 2, "return_binary_maps": True}
    theirs = Mask2FormerImageProcessorPil().post_process_instance_segmentation(outputs, **options)
    for ours, expected in zip(masks_of_queries(outputs, (384, 384), 0.2, 6), theirs, strict=True):
        infos = expected["segments_info"]
        order = sorted(range(len(infos)), key=lambda number: -infos[number]["score"])
        own = ours["scores"].argsort(descending=True)
        assert len(infos) == len(own) > 0
        assert ours["scores"][own].tolist() == pytest.approx([infos[number]["score"] for number in order], abs=1e-5)
        assert ours["classes"][own].tolist() == [infos[number]["label_id"] for number in order]
        assert torch.equal(ours["masks"][own], expected["segmentation"][order] > 0)


def test_a_model_that_cannot_be_trained_on_masks_is_refused(boxes):
    with pytest.raises(InputError, match="Linear has no known way to return the objects") as caught:
        api.train(TASK, data=boxes, model=nn.Linear(2, 2), **SHORT)
    assert "boxes, scores, classes and masks" in caught.value.fix


def test_masks_are_mapped_back_to_the_pixels_of_the_file_and_decide_what_is_hit():
    square = np.zeros((1, 32, 32), bool)
    square[0, 4:10, 8:24] = True
    found = {"boxes": np.array([[8, 4, 24, 10]], np.float32), "classes": np.zeros(1, int), "masks": square}
    back = in_file(found, np.diag([0.5, 0.5, 1.0]), (40, 64))  # 64 x 40 pixels were fitted into 32 x 20
    expected = np.zeros((40, 64))
    expected[8:20, 16:48] = 1
    assert np.array_equal(mask_tools().decode(back["masks"][0]), expected)
    assert back["boxes"].tolist() == [[16, 8, 48, 20]]
    whole = np.ones((10, 10), bool)  # two triangles that have the same box
    box = {"boxes": np.array([[0, 0, 10, 10]], np.float32), "classes": np.zeros(1, int), "crowd": np.zeros(1, bool)}
    one, other = ({**box, "masks": [run_lengths(half)]} for half in (np.tril(whole), np.triu(whole)))
    assert count_hits(one, other) == {"0": [0, 1, 1]}
    assert count_hits(one, one) == {"0": [1, 0, 0]}


def test_run_lengths_of_another_size_than_their_image_are_refused(boxes, tmp_path, capsys):
    data = shutil.copytree(boxes, tmp_path / "data")
    coco = json.loads((data / "train.json").read_text())
    coco["annotations"][0]["segmentation"] = {"size": [10, 10], "counts": [20, 80]}
    (data / "train.json").write_text(json.dumps(coco))
    assert main(["train", TASK, "--data", str(data), "--out", str(tmp_path / "run")]) == 2
    output = capsys.readouterr()
    assert "001.png" in output.out + output.err and "10 x 10" in output.out + output.err
    assert not (tmp_path / "run").exists()
