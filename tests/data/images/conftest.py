"""A few small photos with their classes."""

import numpy as np
import pytest
from PIL import Image

NUM_IMAGES = 24


@pytest.fixture
def rows(tmp_path) -> list[dict]:
    rng = np.random.default_rng(0)
    rows = []
    for index in range(NUM_IMAGES):
        path = tmp_path / f"image{index:02}.jpg"
        height, width = rng.integers(16, 33, 2)
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(path)
        rows.append({"image": str(path), "label": index % 3})
    return rows
