"""translation end to end: training, generating, scoring, resuming, languages, bad input."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from loopwright import api
from sample_data import SAMPLES
from tasks.dirty_inputs import assert_aligned
from tasks.phrases import pairs, tiny_t5
from tasks.recomputed import assert_recomputed
from tasks.reviews import write_csv

FLAGS = {"lr": 5e-3, "epochs": 6, "batch": 8, "threads": 1, "vocabulary_size": 400, "quiet": True}
SHORT = {**FLAGS, "epochs": 1, "max_train_samples": 16, "rehearsal": False}
TEXTS = [text for row in pairs() for text in row.values()]
WMT16 = SAMPLES / "wmt16" / "sample.json"


@pytest.fixture
def phrases(tmp_path) -> Path:
    return write_csv(tmp_path / "phrases.csv", pairs())


@pytest.mark.parametrize("what", ["1", "backbone"])
def test_the_encoder_is_what_is_frozen(phrases, tmp_path, what):
    model = tiny_t5(tmp_path / "t5", TEXTS)
    run = api.train("translation", data=phrases, model=model, freeze=what, **SHORT)
    assert_recomputed(run)
    assert_aligned(run, [TEXTS[0]], {"": "data.missing"})
    before, after = (load_file(folder / "model.safetensors") for folder in (model, run.path / "model"))
    same = {name for name in before if torch.equal(before[name], after[name])}
    encoder = {name for name in before if name.startswith("encoder.block")} | {"shared.weight"}
    assert encoder <= same and len(encoder) >= 5
    assert [name for name in same if name.startswith("decoder")] == []
    assert ("encoder.final_layer_norm.weight" in same) == (what == "backbone")
