"""Verbs of the command line in Python that return something else than a run of your own data."""

import pytest

from loopwright import api
from loopwright.errors import InputError


def test_find_lr_returns_the_curve_and_leaves_nothing(reviews, tmp_path):
    curve = api.find_lr("text-classification", data=reviews, threads=1, num_updates=12, end=1.0, quiet=True)
    assert len(curve.rates) == len(curve.losses) <= 12 and curve.rates[0] == pytest.approx(1e-7)
    assert api.rate_lines(curve)[0][-1].startswith(("in ", "the loss fell at no", "ended there"))
    assert [path.name for path in tmp_path.iterdir()] == ["reviews.csv"]


def test_a_demo_takes_flags_and_refuses_a_variant_that_it_has_not(monkeypatch, tmp_path):
    flags = {"max_train_samples": 64, "max_eval_samples": 32, "max_steps": 1, "threads": 1, "rehearsal": False}
    run = api.demo("image-classification", out=tmp_path / "run", quiet=True, **flags)
    assert run.status == "done" and run.result["updates"] == 1
    with pytest.raises(InputError) as refused:
        api.demo("image-classification", variant="none", quiet=True)
    assert refused.value.code == "args.value" and refused.value.fix == "lw demo image-classification"
