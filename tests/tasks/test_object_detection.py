"""object-detection end to end: training, scores in pixels of the files, DETR, modules, bad data, a real sample."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from loopwright import api, models
from loopwright.api import Run, load_run
from loopwright.cli import main
from loopwright.data.images import decode_image, detection_eval, load_scene
from loopwright.errors import ConfigError, InputError
from loopwright.tasks.vision.detection import in_square, squeezing
from loopwright.tasks.vision.predicted_objects import count_hits, f1_of, in_file, mask_tools
from sample_data import SAMPLES
from tasks.boxes import FIRST_ID, NAMES, write_boxes, write_sample
from tasks.dirty_inputs import assert_aligned, damaged_images
from tasks.intervals import assert_loss_has_interval
from tasks.recomputed import assert_recomputed
from tasks.reviews import read_lines
from tasks.runs import check_kill

TASK = "object-detection"
FLAGS = {"lr": 5e-3, "batch": 4, "threads": 1, "flip": False, "augmentation": "light", "quiet": True}
SHORT = {**FLAGS, "max_steps": 3, "rehearsal": False, "image_size": 32}


@pytest.fixture(scope="module")
def boxes(tmp_path_factory) -> Path:
    return write_boxes(tmp_path_factory.mktemp("boxes") / "boxes")


@pytest.fixture(scope="module")
def trained(boxes, tmp_path_factory) -> Run:
    return api.train(TASK, data=boxes, output_dir=tmp_path_factory.mktemp("trained") / "run", epochs=5, **FLAGS)


@pytest.fixture(scope="module")
def detr(tmp_path_factory) -> Path:
    """Return the folder of a DETR of a few thousand weights, for other classes than those of the data."""
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    sizes = {"embedding_size": 8, "hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1]}
    layer = {"layers": 1, "ffn_dim": 16, "attention_heads": 2}
    layers = {f"{part}_{name}": value for part in ("encoder", "decoder") for name, value in layer.items()}
    below = ResNetConfig(layer_type="basic", out_features=["stage4"], **sizes)
    layers |= {"use_timm_backbone": False, "backbone": None, "backbone_config": below}
    config = DetrConfig(num_queries=5, d_model=16, num_labels=7, **layers)
    folder = tmp_path_factory.mktemp("models") / "detr"
    torch.manual_seed(0)
    DetrForObjectDetection(config).save_pretrained(folder)
    return folder


def assert_truth_is_that_of_the_file(annotations: Path, predictions: Path) -> None:
    """Assert that the true objects that a run has written, and scored, are those of the data."""
    given = json.loads(annotations.read_text())["annotations"]
    for line in read_lines(predictions):
        own = [each for each in given if each["image_id"] == int(line["image_id"])]
        expected = [(each["bbox"], NAMES[each["category_id"] - FIRST_ID], bool(each["iscrowd"])) for each in own]
        written = [([*each["box"][:2], *np.subtract(each["box"][2:], each["box"][:2])], each) for each in line["truth"]]
        assert [(box, each["label"], each.get("crowd", False)) for box, each in written] == expected
        assert all(
            abs(mask_tools().area(each["mask"]) - np.prod(box[2:])) <= 1 for box, each in written if "mask" in each
        )


def test_a_small_model_finds_objects_where_nothing_is_the_baseline_and_has_pictures(trained):
    assert trained.status == "done"
    assert set(trained.metrics) == {"map", "map_50", "map_75", "map_small", "mar_100", "loss"}
    assert trained.metrics["map_50"] >= 0.5 and trained.metrics["map"] >= 0.15
    assert_recomputed(trained)
    assert trained.result["baselines"]["nothing"] == {"map": 0.0, "map_50": 0.0, "map_75": 0.0}
    assert "threshold: 0.4  # data" in (trained.path / "config.yaml").read_text()
    assert_loss_has_interval(trained, "image_loss")
    samples = {path.name for path in (trained.path / "samples").iterdir()}
    assert samples == {"train_batch0.png", "predictions.png", "worst.png"}
    assert all(min(decode_image(trained.path / "samples" / name).size) >= 100 for name in samples)


def test_the_truth_is_that_of_the_data_file_and_hits_are_sums_over_the_images(trained, boxes):
    assert_truth_is_that_of_the_file(boxes / "validation.json", trained.path / "eval" / "predictions.jsonl")
    table = json.loads((trained.path / "eval" / "classes.json").read_text())
    assert [each["label"] for each in table] == NAMES
    assert sum(each["map"] for each in table) / 2 == pytest.approx(trained.metrics["map"], abs=1e-12)
    lines = read_lines(trained.path / "eval" / "predictions.jsonl")
    for each in table:
        hits, wrong, missed = np.sum([line["counts"].get(each["label"], [0, 0, 0]) for line in lines], axis=0)
        assert (each["found"], each["there"]) == (hits + wrong, hits + missed)
        assert each["recall"] == hits / (hits + missed)
    assert sum(each["there"] for each in table) == 11  # the crowd is no object to find
    # What is found in the crowd of the second image is right or does not count.
    sure = [[found for found in line["objects"] if found["score"] >= 0.4] for line in lines]
    for line, objects in zip(lines[2:], sure[2:], strict=True):
        assert sum(hits + wrong for hits, wrong, _ in line["counts"].values()) == len(objects)
    assert lines[1]["counts"]["blue"][1] == 0
    assert lines[0]["truth"] == [] and lines[1]["truth"][-1]["crowd"] is True
    worst = read_lines(trained.path / "eval" / "worst.jsonl")
    assert [each["f1"] for each in worst] == sorted(each["f1"] for each in worst) and len(worst) == 8


def test_evaluating_again_gives_the_same_numbers_whatever_the_batch_size(trained, boxes):
    assert trained.evaluate() == trained.metrics
    again = trained.evaluate(boxes / "validation.json", per_device_eval_batch_size=3)
    assert {name: value for name, value in again.items() if name != "loss"} == pytest.approx(
        {name: value for name, value in trained.metrics.items() if name != "loss"}, abs=1e-6
    )


def test_the_command_line_finds_objects_in_pixels_of_the_files_and_draws_them(trained, boxes, tmp_path, capsys):
    folder = boxes / "validation"
    assert main(["predict", str(trained.path), str(folder), "--overlays", "drawn", "--threshold", "0.05"]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    evaluated = read_lines(trained.path / "eval" / "predictions.jsonl")
    for each, line in zip(told, evaluated, strict=True):
        assert each["image"] == line["image"] and min(decode_image(each["overlay"]).size) >= 150
        sure = [found for found in line["objects"] if found["score"] >= 0.05]
        assert [found["label"] for found in each["objects"]] == [found["label"] for found in sure]
        for found, expected in zip(each["objects"], sure, strict=True):
            assert found["box"] == pytest.approx(expected["box"], abs=0.02)
            assert found["score"] == pytest.approx(expected["score"], abs=1e-3)
            left, top, right, bottom = found["box"]
            assert 0 <= left < right <= 56 and 0 <= top < bottom <= 40
    assert sum(len(each["objects"]) for each in told) > 10
    image = next(folder.glob("*.png"))
    assert_aligned(trained, [image], damaged_images(tmp_path / "bad", image))
    few = trained.predict(folder, threshold=0.05, max_detections=1)
    assert [len(each["objects"]) for each in few] == [min(1, len(each["objects"])) for each in told]
    with pytest.raises(ConfigError, match="threshold must be from 0 to 1"):
        trained.predict(folder, threshold=3)


def test_an_exported_model_is_opened_by_models_load(trained, boxes, tmp_path):
    model = models.load(trained.export(tmp_path / "exported")).eval()
    assert model.labels == NAMES
    path = boxes / "train" / "003.png"
    pixels = torch.from_numpy(np.array(decode_image(path))).movedim(-1, 0)[None] / 127.5 - 1
    (found,) = model.decode(model(pixels), 0.1)
    objects = trained.predict([path], threshold=0.1)[0]["objects"]
    assert [each["score"] for each in objects] == pytest.approx(found["scores"].tolist(), abs=1e-4)
    assert [each["box"] for each in objects] == [pytest.approx(box, abs=0.02) for box in found["boxes"].tolist()]
    assert [each["label"] for each in objects] == [NAMES[number] for number in found["classes"]]


@pytest.mark.slow
def test_a_killed_moved_and_resumed_run_equals_an_uninterrupted_one(boxes, tmp_path):
    words = ["train", TASK, "--data", boxes, "--epochs", 2, "--batch", 8, "--threads", 1, "--lr", 1e-3]
    words += ["--augmentation", "strong", "--no_rehearsal", "--save_strategy", "steps", "--save_steps", 2]
    check_kill(tmp_path, words, 6, "eval/classes.json", "samples/train_batch0.png", resume=("--workers", 2))


def test_a_detr_is_trained_evaluated_and_exported_with_its_processor(boxes, detr, tmp_path):
    from transformers import AutoImageProcessor, AutoModelForObjectDetection

    run = api.train(TASK, data=boxes, model=detr, backbone_lr_factor=0.1, **SHORT)
    assert run.result["updates"] == 3 and run.evaluate() == run.metrics
    assert run.result["intervals"] == {}  # its loss is divided by the objects of a batch
    assert_recomputed(run)
    exported = run.export(tmp_path / "exported")
    model = AutoModelForObjectDetection.from_pretrained(exported).eval()
    processor = AutoImageProcessor.from_pretrained(exported, backend="pil")
    assert model.config.id2label == dict(enumerate(NAMES))
    path = boxes / "train" / "003.png"
    with torch.no_grad():
        outputs = model(**processor(decode_image(path), return_tensors="pt"))
    (theirs,) = processor.post_process_object_detection(outputs, threshold=0.05, target_sizes=[(32, 32)])
    ours = run.predict([path], threshold=0.05)[0]["objects"]
    scores, order = theirs["scores"].sort(descending=True)
    assert len(ours) == 5 and [each["score"] for each in ours] == pytest.approx(scores.tolist(), abs=1e-3)
    for each, box in zip(ours, theirs["boxes"][order].clamp(0, 32).tolist(), strict=True):
        assert each["box"] == pytest.approx(box, abs=0.05)
    resumed = api.resume(run, max_steps=4, quiet=True)
    assert resumed.result["updates"] == 4
    job = load_run(resumed.folder)
    dataset = job.task.create_dataset(job, job.data.rows("train"), is_labelled=True, is_training=True)
    batch = job.collate_fn([dataset[0], dataset[0]])
    assert [len(each["boxes"]) for each in batch["labels"]] == [0, 0]  # a batch without any object has a loss, too
    loss, _ = job.task.compute_loss(job, job.model.train(), batch)
    loss.backward()
    assert torch.isfinite(loss)


def test_images_are_squeezed_if_the_processor_squeezes_them_and_fitted_otherwise():
    from transformers import DetrImageProcessorPil, RTDetrImageProcessorPil

    squeezed, fitted = in_square(RTDetrImageProcessorPil(), 48), in_square(DetrImageProcessorPil(), 48)
    assert dict(squeezed.size)["height"] == dict(squeezed.size)["width"] == 48
    assert dict(fitted.size)["shortest_edge"] == dict(fitted.size)["longest_edge"] == 48
    assert [each.exact for each in squeezing(squeezed)] == [48] and squeezing(fitted) == []


class Middle(nn.Module):
    """Says that there is a red object in the middle of each image, however it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, pixel_values, labels=None):
        """Return scores that say how many images there are, and a loss."""
        return {"logits": self.weight.expand(len(pixel_values)), "loss": (self.weight - 1).abs().sum()}

    def decode(self, outputs, threshold, max_detections):
        """Return the middle of each square of 32 pixels."""
        middle = {"boxes": [[8.0, 8.0, 24.0, 24.0]], "scores": [0.9], "classes": [1]}
        return [{name: torch.tensor(values) for name, values in middle.items()} for _ in outputs.logits]


def test_a_module_with_decode_is_trained_and_one_without_is_refused(boxes, tmp_path):
    run = api.train(TASK, data=boxes, model=Middle(), output_dir=tmp_path / "run", **SHORT)
    (found,) = run.predict([boxes / "validation" / "002.png"], model=Middle())
    # 56 x 40 pixels are fitted into 32 x 23: a pixel of the square is 1.75 of the file across, and 40 / 23 down.
    expected = [14.0, 8 * 40 / 23, 42.0, 40.0]
    assert found["objects"] == [{"label": "red", "score": 0.9, "box": pytest.approx(expected, abs=0.01)}]
    with pytest.raises(InputError, match="Linear has no known way to return the objects") as caught:
        api.train(TASK, data=boxes, model=nn.Linear(2, 2), **SHORT)
    assert caught.value.code == "model.task" and "decode(outputs, threshold" in caught.value.fix


def test_objects_are_mapped_back_to_the_pixels_of_the_file(boxes):
    annotations = json.loads((boxes / "validation.json").read_text())["annotations"]
    left, top, width, height = annotations[0]["bbox"]
    row = {"image": str(boxes / "validation" / "001.png")}
    row["objects"] = {"boxes": [[left, top, left + width, top + height]], "classes": [0]}
    seen = detection_eval(32)(load_scene(row), np.random.default_rng(0))
    assert seen.size == (32, 32)
    found = {"boxes": seen.boxes, "classes": seen.classes, "scores": np.ones(1)}
    assert in_file(found, seen.matrix, (40, 56))["boxes"][0] == pytest.approx(row["objects"]["boxes"][0], abs=1e-4)


def test_hits_are_counted_by_class_and_a_true_object_is_found_once():
    reference = {
        "boxes": np.array([[0, 0, 10, 10], [20, 20, 30, 30], [40, 0, 50, 10], [0, 0, 50, 50]], np.float32),
        "classes": np.array([0, 0, 1, 1]),
        "crowd": np.array([False, False, False, True]),
    }
    found = {
        "boxes": np.array([[0, 0, 10, 9], [0, 0, 10, 10], [20, 25, 30, 35], [60, 0, 70, 10]], np.float32),
        "classes": np.array([0, 0, 0, 2]),
        "scores": np.array([0.9, 0.8, 0.7, 0.6]),
    }
    counts = count_hits(found, reference)
    # The second box is a second one of the first object; the third overlaps by a third only; the crowd is no miss.
    assert counts == {"0": [1, 2, 1], "1": [0, 0, 1], "2": [0, 1, 0]}
    # Of the class of the crowd the fourth one is outside of it: wrong; the others lie in it.
    assert count_hits({**found, "classes": np.ones(4, int)}, reference)["1"] == [0, 1, 1]
    assert f1_of(counts) == 2 / (2 + 3 + 2) and f1_of({}) == 1.0


def test_merged_scorers_of_two_processes_equal_one(trained):
    job = load_run(trained.folder)
    dataset = job.task.create_dataset(job, job.data.rows("validation"), is_labelled=True)
    batch = job.collate_fn([dataset[number] for number in range(8)])
    with torch.no_grad():
        _, outputs = job.task.compute_loss(job, job.model.eval(), batch)
    samples = job.task.score_batch(job, batch, outputs)
    whole, first, second = (job.task.create_scorer(job) for _ in range(3))
    whole.add(samples)
    kept = first.add(samples[::2])
    assert [set(each) for each in kept] == [{"position", "objects", "truth", "counts", "f1", "loss", "image_loss"}] * 4
    second.add(samples[1::2] + samples[:1])  # an image that was evaluated twice counts once
    first.merge_state(second.state_dict())
    assert first.compute() == whole.compute()


def changed(boxes, folder, part, number, name, value):
    """Return a copy of the data with another value in an annotation, or image, of the training data."""
    data = shutil.copytree(boxes, folder)
    coco = json.loads((data / "train.json").read_text())
    coco[part][number][name] = value
    (data / "train.json").write_text(json.dumps(coco))
    return data


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("annotations", 0, "category_id"), 77, ["error[data.classes]", "a category without a name: 77"]),
        (("annotations", 0, "image_id"), 7, ["error[data.annotations]", "image_id 7"]),
        (("annotations", 0, "bbox"), [1, 2, "x", 4], ["error[data.boxes]", "001.png", "'x'"]),
        (("images", 3, "file_name"), "gone.png", ["error[data.image]", "gone.png does not exist"]),
    ],
    ids=["category without a name", "unknown image_id", "box that is none", "missing image"],
)
def test_bad_annotations_are_reported_before_training(place, value, said, boxes, tmp_path, capsys):
    data = changed(boxes, tmp_path / "data", *place, value)
    assert main(["train", TASK, "--data", str(data), "--out", str(tmp_path / "run")]) == 2
    text = "".join(capsys.readouterr())
    assert all(words in text for words in said), text
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("box", "said"),
    [([200, 5, 4, 4], "outside the image"), ([3, 5, 0, 4], "without a size")],
    ids=["outside", "no size"],
)
def test_invisible_boxes_are_dropped_and_counted(box, said, boxes, tmp_path, capsys):
    data = changed(boxes, tmp_path / "data", "annotations", 0, "bbox", box)
    words = ["--max_steps", "1", "--no_rehearsal", "--threads", "1", "--max_eval_samples", "2"]
    assert main(["train", TASK, "--data", str(data), "--out", str(tmp_path / "run"), *words]) == 0
    assert f"left out: 1 box of train.json {said}: " in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("task", [TASK, "instance-segmentation"])
def test_a_killed_run_resumes_and_finds_objects_in_the_sample(task, tmp_path):
    data = write_sample(SAMPLES / "COCO", tmp_path / "data")
    words = ["train", task, "--train_file", data, "--validation_file", data, "--keep_duplicates", "--batch", 1]
    words += ["--epochs", 3, "--image_size", 64, "--threads", 1, "--no_rehearsal", "--lr", 1e-3, "--workers", 0]
    moved = tmp_path / "moved"
    used = ["predict", moved, data.parent, "--threshold", 0.01, "--overlays", "drawn", "--out", "found.jsonl"]
    then = (used, ["evaluate", moved, "--json"])
    whole = check_kill(tmp_path, words, 4, "eval/classes.json", then=then)
    found = read_lines(tmp_path / "found.jsonl")
    assert len(found) == 2 and all(Path(each["overlay"]).is_file() for each in found)
    names = json.loads((whole / "eval" / "classes.json").read_text())
    assert sum(each["there"] for each in names) == 6
