"""image-classification end to end: small nets, transformers' models, any module; pictures, flags, bad input."""

import csv
import errno
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from graphs.recorder import FakeCapturer
from loopwright import api, models
from loopwright.checkpoint import read
from loopwright.cli import main
from loopwright.data.images import from_bytes
from loopwright.errors import ConfigError, InputError
from loopwright.runs.job import build_job, given_origin, make_optimizer
from loopwright.runs.settings import settle
from loopwright.runs.trainer import TaskTrainer
from loopwright.runs.weights import best_checkpoint
from loopwright.tasks import get_task
from loopwright.tasks.data import RunData
from loopwright.tasks.vision.classification import ImageClassification
from loopwright.tasks.weight_average import average_in
from report.demo_panels import assert_every_panel_has_data
from tasks.dirty_inputs import assert_aligned, damaged_images
from tasks.intervals import assert_loss_has_interval
from tasks.recomputed import assert_recomputed
from tasks.reviews import read_lines
from tasks.runs import WEIGHTS, assert_same_files, check_kill, train_in
from tasks.squares import images_in, pixels_of, write_paths, write_squares

TASK = "image-classification"
FLAGS = {"lr": 3e-3, "epochs": 3, "batch": 8, "threads": 1, "augmentation": "light", "quiet": True}
SHORT = {**FLAGS, "epochs": 1, "max_steps": 3, "rehearsal": False}


@pytest.fixture(scope="module")
def trained(squares, tmp_path_factory):
    return train_in(tmp_path_factory.mktemp("trained"), TASK, data=squares, **FLAGS)


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    """Return the folder of a ViT of a few thousand weights, without a processor."""
    from transformers import ViTConfig, ViTForImageClassification

    folder = tmp_path_factory.mktemp("models") / "vit"
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, **sizes)).save_pretrained(folder)
    return folder


def test_a_small_net_learns_colours_and_leaves_pictures_and_the_confusion(trained):
    assert trained.status == "done" and trained.metrics["accuracy"] == 1.0
    assert set(trained.metrics) == {"accuracy", "f1", "ece", "loss"}
    assert_recomputed(trained)
    assert trained.result["baselines"]["majority"]["accuracy"] < 0.6
    assert trained.evaluate() == trained.metrics
    samples = {path.name for path in (trained.path / "samples").iterdir()}
    assert samples == {"train_batch0.png", "predictions.png", "worst.png", "confusion.png"}
    assert all(min(pixels_of(trained.path / "samples" / name).shape[:2]) >= 64 for name in samples)
    found = json.loads((trained.path / "eval" / "confusion.json").read_text())
    assert found["labels"] == ["blue", "green", "red"]
    predictions = read_lines(trained.path / "eval" / "predictions.jsonl")
    assert np.sum(found["matrix"]) == len(predictions) == np.trace(found["matrix"])
    assert all(each["image"].endswith(".png") for each in predictions)


def test_a_disk_without_room_for_the_cache_of_one_dataset_means_no_cache(squares, tmp_path, monkeypatch, caplog):
    write, calls = os.pwrite, []

    def pwrite(file, values, start):
        calls.append(start)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, values, start)

    monkeypatch.setattr(os, "pwrite", pwrite)
    run = train_in(tmp_path, TASK, data=squares, cache="disk", **SHORT)
    assert "No space left on device (--cache disk)" in (run.path / "log.txt").read_text()
    assert len(calls) == 2 and not caplog.records


def test_paths_folders_tables_and_rows_are_predicted_alike(trained, squares, tmp_path):
    paths = images_in(squares)[:20]
    expected = trained.predict(paths)
    assert [each["label"] for each in expected] == [path.parent.name for path in paths]
    assert [each["image"] for each in expected] == [str(path) for path in paths]
    assert list(expected[0]["scores"])[0] == expected[0]["label"] and len(expected[0]["scores"]) == 3
    assert trained.predict(write_paths(tmp_path / "some.jsonl", paths)) == expected
    assert trained.predict([{"image": str(path)} for path in paths]) == expected
    assert trained.predict(str(paths[0])) == expected[:1]
    assert trained.predict(squares / "blue") == trained.predict(images_in(squares / "blue"))
    in_memory = trained.predict([{"image": path.read_bytes()} for path in paths])
    assert in_memory == [{name: value for name, value in each.items() if name != "image"} for each in expected]


def test_the_command_line_predicts_images_and_draws_overlays(trained, squares, capsys):
    first, second = images_in(squares)[:2]
    assert main(["predict", str(trained.path), str(first), str(second), "--overlays", "drawn"]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["overlay"] for each in told] == [f"drawn/{first.stem}.png", f"drawn/{second.stem}.png"]
    assert all(min(pixels_of(each["overlay"]).shape[:2]) >= 200 for each in told)
    assert main(["predict", str(trained.path), "nothing.png", "--strict"]) == 2
    assert "nothing.png" in capsys.readouterr().err


def test_other_images_are_evaluated_and_the_exported_net_is_opened_without_the_tasks(trained, squares, tmp_path):
    other = write_squares(tmp_path / "other", 12, seed=9, names=("red", "blue"))
    assert trained.evaluate(other)["accuracy"] >= 0.9
    assert (trained.path / "eval" / "other" / "predictions.jsonl").is_file()
    model = models.load(trained.export(tmp_path / "exported"))
    assert model.labels == ["blue", "green", "red"]
    image = images_in(squares)[0]
    pixels = torch.from_numpy(pixels_of(image)).movedim(-1, 0).float() / 255
    with torch.no_grad():
        scores = model((pixels[None] - 0.5) / 0.5).logits.softmax(-1)
    (found,) = trained.predict([image])
    assert scores.max().item() == pytest.approx(found["score"], abs=1e-5)


def test_a_net_of_an_earlier_run_is_fine_tuned_on_other_classes(trained, tmp_path):
    data = write_squares(tmp_path / "two", 24, seed=3, names=("red", "green"))
    run = api.train(TASK, data=data, model=trained.path, **SHORT)
    assert "new: head.bias, head.weight" in (run.path / "log.txt").read_text()
    assert run.metrics["accuracy"] >= 0.5 and {each["label"] for each in run.predict(data)} <= {"red", "green"}


def test_the_weights_are_the_same_wherever_decoded_images_are_kept(squares):
    for augmentation, others in {"none": ({"cache": "ram"}, {"cache": "disk"}), "strong": ({"workers": 2},)}.items():
        flags = {**FLAGS, "augmentation": augmentation, "epochs": 2, "rehearsal": False}
        plain = api.train(TASK, data=squares, cache="off", **flags)
        assert "images are decoded each time (--cache off)" in (plain.path / "log.txt").read_text()
        for other in others:
            run = api.train(TASK, data=squares, **other, **flags)
            assert_same_files(run.path, plain.path, WEIGHTS, "eval/predictions.jsonl")
            where = "on disk in" if other.get("cache") == "disk" else "in memory"
            assert f"images are decoded once and kept {where}" in (run.path / "log.txt").read_text()


def test_the_weights_are_the_same_if_images_are_sent_as_bytes_and_converted_on_the_device(squares, monkeypatch):
    flags = {**FLAGS, "epochs": 2, "rehearsal": False, "class_weights": ["balanced"]}
    plain = api.train(TASK, data=squares, **flags)
    seen, convert = [], from_bytes
    monkeypatch.setattr(ImageClassification, "sends_bytes", lambda *_: True)  # as on a GPU
    monkeypatch.setattr("loopwright.data.images.from_bytes", lambda *args: seen.append(1) or convert(*args))
    for workers in (0, 2):
        run = api.train(TASK, data=squares, workers=workers, **flags)
        names = ("eval/predictions.jsonl", "samples/train_batch0.png", "samples/worst.png")
        assert_same_files(run.path, plain.path, WEIGHTS, *names)
        assert len(seen) > run.result["updates"]
        seen.clear()


DEVICE_NOTE = "training images are augmented in batches on the device (--augment_on device)"


def test_images_are_augmented_on_the_device_with_any_workers_parts_and_weights(squares):
    flags = {**FLAGS, "epochs": 2, "rehearsal": False, "augmentation": "strong", "class_weights": ["balanced"]}
    first = api.train(TASK, data=squares, augment_on="device", eval_on_train=True, **flags)
    assert DEVICE_NOTE in (first.path / "log.txt").read_text() and first.metrics["accuracy"] > 0.5
    other = api.train(TASK, data=squares, augment_on="device", eval_on_train=True, workers=2, cache="off", **flags)
    assert_same_files(other.path, first.path, WEIGHTS, "samples/train_batch0.png")
    plain = api.train(TASK, data=squares, **flags)
    assert 'augment_on: "cpu"' in (plain.path / "config.yaml").read_text()
    assert "--augment_on" not in (plain.path / "log.txt").read_text()
    assert plain.metrics["loss"] == pytest.approx(first.metrics["loss"], rel=0.05)
    shown = [pixels_of(run.path / "samples" / "train_batch0.png").astype(int) for run in (first, plain)]
    assert np.abs(shown[0] - shown[1]).mean() < 2, "the same parts of the same images"


def test_a_graph_gets_finished_batches(squares, monkeypatch):
    def capturer(trainer):
        capturers.append(FakeCapturer(trainer.model, trainer.optimizer))
        return capturers[-1]

    capturers = []
    monkeypatch.setattr(TaskTrainer, "create_capturer", capturer, raising=False)
    flags = {**FLAGS, "augment_on": "device", "epochs": 2, "rehearsal": False, "optim": "sgd"}
    eager = api.train(TASK, data=squares, step_mode="eager", **flags)
    graphed = api.train(TASK, data=squares, **flags)
    assert capturers and capturers[-1].num_replays > 0 and capturers[-1].num_captures <= 2, "of all sizes of parts"
    weights = [load_file(run.path / "model" / "model.safetensors") for run in (eager, graphed)]
    assert all(torch.allclose(weights[0][name], weights[1][name], atol=1e-5) for name in weights[0])


def test_where_images_are_augmented_is_a_part_of_what_a_resume_compares(squares, tmp_path):
    flags = {**SHORT, "augment_on": "device", "save_strategy": "steps", "save_steps": 1, "quiet": False}
    run = api.train(TASK, data=squares, output_dir=tmp_path / "run", **flags)
    copy = shutil.copytree(run.path, tmp_path / "copy")
    run.resume(max_steps=5)
    api.resume(copy, max_steps=5, augment_on="cpu")
    texts = [(folder / "log.txt").read_text() for folder in (run.path, copy)]
    change = "Changed environment since the checkpoint: augmentation: 'device' -> None"
    assert change in texts[1] and change not in texts[0]
    tiers = [
        [each["tier"] for each in read_lines(folder / "metrics.jsonl") if "tier" in each] for folder in (run.path, copy)
    ]
    assert tiers == [["T0", "T0"], ["T0", "T2"]]


def test_what_cannot_be_augmented_on_the_device_is_augmented_on_the_cpu_with_the_reason(squares, tmp_path):
    (tmp_path / "own_changes.py").write_text("def black(image):\n    return image.point(lambda value: 0)\n")
    short = {**SHORT, "augment_on": "device"}
    run = api.train(TASK, data=squares, augment_with="own_changes:black", **short)
    text = "training images are augmented on the CPU: it begins with black"
    assert (run.path / "log.txt").read_text().count(text) == 1
    plain = api.train(TASK, data=squares, **{**short, "augmentation": "none"})
    assert "--augment_on" not in (plain.path / "log.txt").read_text()


@pytest.mark.slow
def test_a_killed_run_that_augments_on_the_device_equals_an_uninterrupted_one(squares, tmp_path):
    words = ["train", TASK, "--data", squares, "--epochs", 3, "--batch", 8, "--threads", 1, "--lr", 1e-3]
    words += ["--augmentation", "strong", "--augment_on", "device", "--no_rehearsal", "--save_strategy", "steps"]
    check_kill(tmp_path, [*words, "--save_steps", 2], 7, "samples/train_batch0.png", resume=("--workers", 2))


@pytest.mark.slow
def test_a_killed_moved_and_resumed_run_equals_an_uninterrupted_one(squares, tmp_path):
    words = ["train", TASK, "--data", squares, "--epochs", 3, "--batch", 8, "--threads", 1, "--lr", 1e-3]
    words += ["--augmentation", "strong", "--ema", 0.9, "--no_rehearsal", "--save_strategy", "steps", "--save_steps", 2]
    check_kill(tmp_path, words, 7, "samples/train_batch0.png", resume=("--workers", 2, "--cache", "disk"))


def test_a_vit_is_trained_evaluated_and_exported_with_its_processor(squares, vit, tmp_path):
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    run = api.train(TASK, data=squares, model=vit, **SHORT)
    assert run.result["updates"] == 3 and run.evaluate() == run.metrics
    folder = run.export(tmp_path / "exported")
    model = AutoModelForImageClassification.from_pretrained(folder).eval()
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    image = images_in(squares)[4]
    with torch.no_grad():
        logits = model(**processor(Image.fromarray(pixels_of(image)), return_tensors="pt")).logits
    (found,) = run.predict([image])
    assert model.config.id2label[int(logits.argmax())] == found["label"]
    assert float(logits.softmax(-1).max()) == pytest.approx(found["score"], abs=2e-3)


def test_a_vit_stretches_its_positions_over_larger_images(squares, vit):
    run = api.train(TASK, data=squares, model=vit, image_size=16, **{**SHORT, "max_steps": 1})
    assert run.status == "done" and len(run.predict(squares / "red")) == 15
    assert api.resume(run, max_steps=2, quiet=True).result["updates"] == 2


def test_adapters_of_a_vit_are_trained_with_its_head_and_merged(squares, vit):
    run = api.train(TASK, data=squares, model=vit, lora=True, **SHORT)
    before, after = (load_file(folder / "model.safetensors") for folder in (vit, run.path / "model"))
    names = {name for name in after if name in before and before[name].shape == after[name].shape}
    changed = {name for name in names if not torch.equal(before[name], after[name])}
    assert set(before) == set(after) and any("layer" in name and "weight" in name for name in changed)
    assert not [name for name in changed if "norm" in name or "embeddings" in name]
    assert run.evaluate() == pytest.approx(run.metrics, rel=1e-5)  # merging rounds


MODULE = """
from torch import nn


def make(num_labels):
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_labels))


def nothing():
    return 3
"""


def test_a_users_function_makes_the_model(squares, tmp_path):
    (tmp_path / "own_nets.py").write_text(MODULE)
    run = api.train(TASK, data=squares, model="own_nets:make", **{**FLAGS, "lr": 0.03})
    assert run.metrics["accuracy"] >= 0.6 and run.evaluate() == run.metrics
    assert set(load_file(run.path / "model" / "model.safetensors")) == {"0.weight", "0.bias", "4.weight", "4.bias"}
    assert api.resume(run, epochs=4, quiet=True).status == "done"
    for wrong, code in (
        ("own_nets:mke", "args.value"),
        ("no_nets:make", "args.value"),
        ("own_nets:nothing", "model.task"),
    ):
        with pytest.raises(InputError) as caught:
            api.train(TASK, data=squares, model=wrong, **SHORT)
        assert caught.value.code == code


def test_a_module_passed_in_python_has_to_be_passed_again(squares, tmp_path):
    def module():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 12 * 12, 3))

    run = api.train(TASK, data=squares, model=module(), output_dir=tmp_path / "run", **SHORT)
    assert run.metrics == run.evaluate(model=module()) and "at least 50 samples" in run.result["no_intervals"]["loss"]
    assert len(run.predict(squares / "red", model=module())) == 15
    assert api.resume(run, max_steps=5, model=module(), quiet=True).result["updates"] == 5
    for use in (run.evaluate, lambda: run.resume(max_steps=6), lambda: run.predict(squares / "red")):
        with pytest.raises(InputError, match="which no file can recreate"):
            use()
    with pytest.raises(InputError, match="takes the name of a model, got a Sequential"):
        api.train("text-classification", data="x.csv", model=module())


def test_the_configured_loss_is_used(squares):
    def loss(**flags):
        run = api.train(TASK, data=squares, **{**SHORT, "lr": 1e-9, "max_steps": 1, **flags})
        assert_loss_has_interval(run, "image_loss" if flags else "loss")
        assert_recomputed(run)
        return run.metrics["loss"]

    plain, focal, smooth = loss(), loss(loss="focal"), loss(label_smoothing=0.5)
    assert focal < plain and smooth != plain
    with pytest.raises(ConfigError, match="label_smoothing"):
        api.train(TASK, data=squares, loss="focal", label_smoothing=0.1, **SHORT)


def test_a_loss_with_a_term_that_no_sample_has_gets_no_interval(squares):
    class PenaltyNet(torch.nn.Linear):
        def forward(self, pixel_values, labels=None):
            logits = super().forward(pixel_values.flatten(1))
            penalty = self.weight.square().sum()
            return {"logits": logits, "loss": torch.nn.functional.cross_entropy(logits, labels) + penalty}

    run = api.train(TASK, data=squares, model=PenaltyNet(3 * 12 * 12, 3), **{**SHORT, "max_steps": 1})
    assert run.result["no_intervals"]["loss"] == "the losses of the samples do not add up to it"
    assert set(run.result["intervals"]) == {"accuracy"} and "loss" in run.metrics
    assert_recomputed(run)


def test_averaged_weights_are_evaluated_and_kept(squares):
    flags = {**FLAGS, "epochs": 1, "rehearsal": False}
    plain, averaged = (api.train(TASK, data=squares, **flags, **extra) for extra in ({}, {"ema": 0.9}))
    first, second = (load_file(run.path / "model" / "model.safetensors") for run in (plain, averaged))
    assert not torch.equal(first["head.weight"], second["head.weight"])
    assert averaged.evaluate() == averaged.metrics
    saved = read(best_checkpoint(averaged.folder))
    assert torch.equal(saved.model["head.weight"], first["head.weight"])  # training itself is not changed
    assert torch.equal(average_in(saved.state)["head.weight"], second["head.weight"])


def test_channels_last_changes_the_memory_format_and_not_the_result(squares):
    flags = {**SHORT, "lr": 1e-3}
    plain, last = (api.train(TASK, data=squares, channels_last=each, **flags) for each in (False, True))
    assert last.metrics["loss"] == pytest.approx(plain.metrics["loss"], rel=1e-3)
    assert "channels_last: true" in (last.path / "config.yaml").read_text()


def test_the_backbone_has_its_own_learning_rate_or_is_frozen(squares, vit):
    task = get_task(TASK)
    for model in ((), ("--model", str(vit))):
        words = ["--data", str(squares), "--lr", "0.1", "--backbone_lr_factor", "0.1", *model]
        settings = settle(task, words)
        job = build_job(task, RunData(task.preflight(settings.args)), settings, given_origin(task, settings))
        rates = {
            name: group["lr"]
            for group in make_optimizer(job).param_groups
            for name, parameter in job.model.named_parameters()
            if any(parameter is each for each in group["params"])
        }
        heads = {name for name in rates if name.startswith(("head", "classifier"))}
        assert heads and len(rates) == len(list(job.model.parameters()))
        assert {rates[name] for name in heads} == {0.1}
        assert {round(rate, 9) for name, rate in rates.items() if name not in heads} == {0.01}
    run = api.train(TASK, data=squares, freeze="backbone", **SHORT)
    assert "frozen" in (run.path / "log.txt").read_text()


def test_a_users_augmentation_changes_only_training_images(squares, tmp_path):
    (tmp_path / "own_changes.py").write_text("def black(image):\n    return image.point(lambda value: 0)\n")
    run = api.train(TASK, data=squares, augment_with="own_changes:black", **SHORT)
    shown = {name: pixels_of(run.path / "samples" / f"{name}.png") for name in ("train_batch0", "predictions")}
    assert shown["train_batch0"][20:100, 20:100].max() == 0
    assert shown["predictions"][20:100, 20:100].max() > 0


def test_more_than_five_classes_have_a_top_5_accuracy(tmp_path):
    rng = np.random.default_rng(0)
    images = [tmp_path / f"{index}.png" for index in range(28)]
    for path in images:
        Image.fromarray(rng.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(path)
    data = write_paths(tmp_path / "all.jsonl", images, [f"class {index % 7}" for index in range(28)])
    run = api.train(TASK, train_file=data, validation_file=data, keep_duplicates=True, **SHORT)
    low, high = run.result["intervals"]["top_5_accuracy"]
    assert low <= run.metrics["top_5_accuracy"] <= high
    assert run.metrics["top_5_accuracy"] >= run.metrics["accuracy"]
    assert_recomputed(run)


def test_damaged_and_missing_images_are_reported_before_training_or_dropped(tmp_path, capsys):
    data = write_squares(tmp_path / "data", 24)
    broken = images_in(data)[3]
    broken.write_bytes(broken.read_bytes()[:200])
    words = ["train", TASK, "--data", str(data), "--batch", "8", "--max_steps", "2", "--no_rehearsal", "--threads", "1"]
    assert main([*words, "--out", "refused"]) == 2
    told = capsys.readouterr().err
    assert "error[data.image]" in told and broken.name in told
    assert not (tmp_path / "refused").exists()
    assert main([*words, "--bad_images", "drop", "--out", "dropped"]) == 0


def test_one_class_no_class_and_a_model_of_another_task_or_of_texts_are_refused(squares, tmp_path):
    from transformers import BertConfig, BertModel

    one = write_squares(tmp_path / "one", 6, names=("red",))
    (tmp_path / "none").mkdir()
    models.create("masked_vit").save_pretrained(tmp_path / "other")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    BertModel(BertConfig(vocab_size=30, **sizes)).save_pretrained(tmp_path / "bert")
    for flags, code, message in (
        ({"data": one}, "data.one_class", None),
        ({"data": tmp_path / "none"}, "data.folder", None),
        ({"data": squares, "model": tmp_path / "other"}, "model.task", "this task needs a conv_net"),
        ({"data": squares, "model": tmp_path / "bert"}, "model.task", "such as a ViT or a ResNet"),
    ):
        with pytest.raises(InputError, match=message) as caught:
            api.train(TASK, **flags, **SHORT)
        assert caught.value.code == code


@pytest.mark.slow
def test_the_demo_learns_digits_in_two_epochs_and_lists_its_variants(capsys):
    assert main(["demo", TASK, "--epochs", "2", "--no_rehearsal"]) == 0
    run = api.Run.find("last")
    assert run.metrics["accuracy"] >= 0.85 and run.result["baselines"]["majority"]["accuracy"] == 0.1
    assert_every_panel_has_data(run.path)
    assert_recomputed(run)
    capsys.readouterr()
    assert main(["demo", TASK, "--variant", "hats"]) == 2
    assert "its variants: fashion" in capsys.readouterr().err


def test_every_image_of_a_folder_has_its_row_and_damaged_ones_an_error(trained, squares, tmp_path, capsys):
    good = images_in(squares)[:2]
    assert_aligned(trained, good, damaged_images(tmp_path / "bad", good[0]))
    shutil.copy(good[0], tmp_path / "bad" / "fine.png")
    (tmp_path / "bad" / "notes.txt").write_text("not an image")
    (tmp_path / "bad" / "phone.heic").write_bytes(b"ftypheic")
    assert main(["predict", str(trained.path), "bad", "--out", "found.csv", "--overlays", "drawn"]) == 0
    with open("found.csv", newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    assert list(found[0]) == ["image", "label", "score", "scores", "overlay", "error"]
    assert [Path(each["image"]).name for each in found if not each["error"]] == ["fine.png"]
    assert {each["error"][:10] for each in found} == {"", "data.image"} and len(found) == 5
    assert "4 of 5 rows could not be predicted" in capsys.readouterr().err
    assert main(["predict", str(trained.path), "bad", "--out", "other.csv", "--strict"]) == 2
    assert not Path("other.csv").exists() and "error[data.image]" in capsys.readouterr().err
    table = write_paths(tmp_path / "some.jsonl", [good[0], tmp_path / "gone.png", "https://host/a.png", "", good[1]])
    codes = [each.get("error", "").partition(":")[0] for each in trained.predict(table)]
    assert codes == ["", "data.image", "data.image", "data.missing", ""]


def test_a_missing_image_is_a_row_but_a_missing_folder_is_refused(trained):
    (found,) = trained.predict(["nothing.png"])
    assert found["label"] is None and found["error"].startswith("data.image") and "nothing.png" in found["image"]
    with pytest.raises(InputError, match="nothing does not exist"):
        trained.predict("nothing")
