"""Cached images on a GPU: the weights of a run do not depend on where decoded images are kept."""

import pytest
import torch

from loopwright import api
from loopwright.data.images import SceneFeatures, from_bytes
from tasks.squares import write_squares

pytestmark = pytest.mark.gpu
FLAGS = {"lr": 3e-3, "epochs": 2, "batch": 8, "augmentation": "strong", "quiet": True, "rehearsal": False}


@pytest.mark.parametrize("options", [{"cache": "ram"}, {"cache": "disk", "workers": 2}])
def test_the_weights_are_those_without_a_cache(tmp_path, options):
    data = write_squares(tmp_path / "squares")
    runs = [
        api.train(
            "image-classification", data=data, output_dir=tmp_path / name, full_determinism=True, **flags, **FLAGS
        )
        for name, flags in (("plain", {"cache": "off"}), ("cached", options))
    ]
    weights = [(run.path / "model" / "model.safetensors").read_bytes() for run in runs]
    assert weights[0] == weights[1]


def test_bytes_are_normalized_on_the_device_to_the_bits_of_the_host():
    pixels = torch.randint(0, 256, (4, 9, 7, 3), dtype=torch.uint8)
    features = SceneFeatures()
    found = from_bytes(pixels.cuda(), features.mean, features.std)
    assert found.is_contiguous() and torch.equal(found.cpu(), features.pixels(pixels.numpy()))
