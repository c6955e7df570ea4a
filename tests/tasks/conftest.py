"""A folder of their own for the runs of each test, and a run to look at that all tests share."""

from pathlib import Path

import pytest

from loopwright import api
from tasks.reviews import rows, write_csv
from tasks.runs import train_in

FLAGS = {"lr": 2e-3, "epochs": 2, "batch": 16, "threads": 1, "quiet": True}


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Run each test in an empty folder, without the network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("LOOPWRIGHT_RUNS", raising=False)


@pytest.fixture
def reviews(tmp_path) -> Path:
    """Return a csv file of reviews."""
    return write_csv(tmp_path / "reviews.csv", rows())


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> api.Run:
    """Return a run that has ended; its folder must be left as it is."""
    folder = tmp_path_factory.mktemp("finished")
    data = write_csv(folder / "reviews.csv", rows())
    return train_in(folder, "text-classification", data=data, **FLAGS)
