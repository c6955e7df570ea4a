"""masked-image-modeling end to end: what is hidden, the small model, transformers' models, pictures, bad input."""

import json

import numpy as np
import pytest
import torch

import toys
from loopwright import api, models
from loopwright.cli import main
from loopwright.errors import ConfigError, InputError
from loopwright.tasks.vision.masked_modeling import Masking, small_sizes
from report.demo_panels import assert_every_panel_has_data
from tasks.dirty_inputs import assert_aligned, damaged_images
from tasks.intervals import assert_loss_has_interval
from tasks.recomputed import assert_recomputed
from tasks.reviews import events, read_lines
from tasks.runs import check_kill, train_in
from tasks.squares import images_in, pixels_of, write_squares

TASK = "masked-image-modeling"
FLAGS = {"lr": 2e-3, "epochs": 4, "batch": 8, "threads": 1, "augmentation": "none", "quiet": True}
SHORT = {**FLAGS, "epochs": 1, "max_steps": 3, "rehearsal": False}


@pytest.fixture(scope="module")
def trained(squares, tmp_path_factory):
    """Return a run that has ended; its folder must be left as it is."""
    return train_in(tmp_path_factory.mktemp("trained"), TASK, data=squares, **FLAGS)


def test_a_small_model_is_scored_against_the_mean_image(trained):
    assert trained.status == "done" and set(trained.metrics) == {"masked_mse", "loss"}
    assert 0 < trained.result["baselines"]["mean image"]["masked_mse"] < 0.2
    assert trained.result["direction"] == "min"
    first, *_, last = [event["eval_masked_mse"] for event in events(trained.path) if "eval_masked_mse" in event]
    assert trained.metrics["masked_mse"] <= last < first
    assert trained.metrics["masked_mse"] == pytest.approx(trained.metrics["loss"] * 0.25, rel=1e-5)  # std is 0.5
    assert trained.evaluate() == trained.metrics
    assert_loss_has_interval(trained, "image_loss")


def test_the_mean_image_is_computed_from_the_training_images(tmp_path):
    write_squares(tmp_path / "data", number=6, seed=1, split="validation")
    few = write_squares(tmp_path / "data", number=12, split="train")
    short = {**SHORT, "max_steps": 1}
    limited = api.train(TASK, data=few, output_dir=tmp_path / "limited", max_train_samples=4, **short)
    for path in images_in(few / "train")[4:]:
        path.unlink()
    alone = api.train(TASK, data=few, output_dir=tmp_path / "alone", **short)
    assert limited.result["baselines"] == alone.result["baselines"]


def test_the_worst_images_are_listed_and_there_are_pictures_of_visible_and_rebuilt_parts(trained):
    told = read_lines(trained.path / "eval" / "predictions.jsonl")
    assert_recomputed(trained)
    worst = [each["loss"] for each in read_lines(trained.path / "eval" / "worst.jsonl")]
    assert worst == sorted(worst, reverse=True) and len(worst) == len(told)
    assert not [name for name in told[0] if name in ("prediction", "reference", "mask")]
    samples = {path.name for path in (trained.path / "samples").iterdir()}
    assert samples == {"train_batch0.png", "predictions.png", "worst.png"}
    assert pixels_of(trained.path / "samples" / "predictions.png").shape[1] > 800


def test_images_are_rebuilt_on_the_command_line_and_the_exported_model_is_opened(trained, squares, tmp_path, capsys):
    first, second = images_in(squares)[:2]
    assert main(["predict", str(trained.path), str(first), str(second), "--overlays", "drawn"]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [set(each) for each in told] == [{"image", "masked_mse", "overlay"}] * 2
    assert pixels_of(told[0]["overlay"]).shape[1] > 400
    assert_aligned(trained, [first], damaged_images(tmp_path / "bad", first))
    again = trained.predict([first, second])
    assert [each["masked_mse"] for each in again] == [each["masked_mse"] for each in told]
    model = models.load(trained.export(tmp_path / "exported"))
    assert model.config["image_size"] == 12 and model.config["patch_size"] == 2


@pytest.mark.slow
def test_a_killed_moved_and_resumed_run_equals_an_uninterrupted_one(squares, tmp_path):
    words = ["train", TASK, "--data", squares, "--epochs", 3, "--batch", 8, "--threads", 1, "--lr", 1e-3]
    words += ["--no_rehearsal", "--save_strategy", "steps", "--save_steps", 2]
    check_kill(tmp_path, words, 7)


@pytest.mark.slow
def test_the_demo_learns_to_fill_in_digits_better_than_the_mean_image():
    assert main(["demo", TASK, "--max_steps", "150", "--no_rehearsal", "--max_eval_samples", "120"]) == 0
    run = api.Run.find("last")
    assert run.metrics["masked_mse"] < 0.97 * run.result["baselines"]["mean image"]["masked_mse"]
    assert_every_panel_has_data(run.path)
    assert_recomputed(run)


VIT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
VIT |= {"image_size": 8, "patch_size": 4}
SWIN = {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2, "image_size": 16, "patch_size": 2}


@pytest.mark.parametrize(("kind", "sizes"), [("vit", VIT), ("swin", SWIN)], ids=["vit", "swin"])
def test_transformers_models_are_trained_evaluated_used_and_exported(kind, sizes, squares, tmp_path):
    from transformers import AutoConfig, AutoModelForMaskedImageModeling

    config = AutoConfig.for_model(kind, encoder_stride=4, **sizes)
    model = AutoModelForMaskedImageModeling.from_config(config)
    model.save_pretrained(tmp_path / "model")
    run = api.train(TASK, data=squares, model=tmp_path / "model", **SHORT)
    assert run.result["updates"] == 3 and run.evaluate() == run.metrics
    assert_loss_has_interval(run, "image_loss")
    assert_recomputed(run)
    assert f"image_size: {model.config.image_size}" in (run.path / "config.yaml").read_text()
    assert len(run.predict(squares / "red")) == 15
    exported = AutoModelForMaskedImageModeling.from_pretrained(run.export(tmp_path / "exported"))
    assert type(exported) is type(model)
    assert api.resume(run, max_steps=4, quiet=True).result["updates"] == 4


def test_a_users_module_receives_the_hidden_patches(squares):
    def rebuild(self, pixel_values, bool_masked_pos):
        rebuilt = self.value.expand_as(pixel_values)
        return {"loss": (rebuilt - pixel_values).square().mean(), "reconstruction": rebuilt}

    grey = toys.net(rebuild, value=torch.nn.Parameter(torch.zeros(3, 1, 1)))
    run = api.train(TASK, data=squares, model=grey, patch_size=4, mask_patch_size=4, **SHORT)
    assert 0 < run.metrics["masked_mse"] < 0.3
    assert_recomputed(run)


def test_the_requested_fraction_is_hidden_in_whole_squares():
    masking = Masking(side=12, patch=2, unit=4, ratio=0.5)
    hidden = masking.draw(np.random.default_rng(0))
    assert hidden.shape == (36,) and hidden.sum() == 16  # four squares of nine, each of four patches
    pixels = masking.pixels(hidden)
    blocks = pixels.reshape(3, 4, 3, 4).transpose(0, 2, 1, 3).reshape(9, 16)
    assert pixels.shape == (12, 12) and set(blocks.sum(1)) == {0, 16}
    assert Masking(side=4, patch=2, unit=4, ratio=0.6).draw(np.random.default_rng(0)).all()
    for ratio, expected in ((0.001, 1), (0.999, 35)):
        assert Masking(12, 2, 2, ratio).draw(np.random.default_rng(0)).sum() == expected


def test_training_draws_new_masks_each_time_and_evaluation_does_not(trained):
    job = api.load_run(trained.folder)
    rows = job.data.rows("train")
    train = job.task.create_dataset(job, rows, is_labelled=True, is_training=True)
    held = job.task.create_dataset(job, rows, is_labelled=True)
    assert not torch.equal(train[0]["bool_masked_pos"], train[0]["bool_masked_pos"])
    assert torch.equal(held[0]["bool_masked_pos"], held[0]["bool_masked_pos"])
    assert not torch.equal(held[0]["bool_masked_pos"], held[1]["bool_masked_pos"])


def test_the_sizes_of_a_small_model_follow_from_the_images_and_invalid_ones_are_refused(squares):
    for side, patch, *expected in ((8, None, 8, 2), (29, None, 28, 2), (128, None, 128, 8), (30, 7, 28, 7)):
        assert small_sizes(side, patch) == dict(zip(("image_size", "patch_size"), expected, strict=True))
    with pytest.raises(ConfigError, match="mask_ratio must be between 0 and 1"):
        api.train(TASK, data=squares, mask_ratio=1.0, **SHORT)
    with pytest.raises(InputError, match="do not consist of whole patches"):
        api.train(TASK, data=squares, mask_patch_size=5, **SHORT)


def test_images_augmented_on_the_device_are_hidden_alike(squares):
    flags = {**SHORT, "augmentation": "strong", "max_steps": 4}
    runs = [api.train(TASK, data=squares, augment_on=where, **flags) for where in ("cpu", "device")]
    assert "in batches on the device" in (runs[1].path / "log.txt").read_text()
    shown = [pixels_of(run.path / "samples" / "train_batch0.png").astype(int) for run in runs]
    assert np.abs(shown[0] - shown[1]).mean() < 1
    assert runs[0].metrics["loss"] == pytest.approx(runs[1].metrics["loss"], rel=0.02)
    again = api.train(TASK, data=squares, augment_on="device", workers=2, **flags)
    assert again.metrics == runs[1].metrics
