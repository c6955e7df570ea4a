"""A folder of their own for the runs of each test, and a run to look at that all tests share."""

import shutil

import pytest

from loopwright import api
from loopwright.demos.images import image_files
from tasks.reviews import rows, write_csv
from tasks.runs import train_in
from tasks.squares import write_squares
from tasks.texts import lines, write_text

FLAGS = {"lr": 2e-3, "epochs": 2, "batch": 16, "threads": 1, "quiet": True}


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Run each test in an empty folder, without the network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("LOOPWRIGHT_RUNS", raising=False)


@pytest.fixture
def reviews(tmp_path):
    return write_csv(tmp_path / "reviews.csv", rows())


@pytest.fixture
def text_file(tmp_path):
    return write_text(tmp_path / "lines.txt", lines())


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """Return a run that has ended; its folder must be left as it is."""
    folder = tmp_path_factory.mktemp("finished")
    data = write_csv(folder / "reviews.csv", rows())
    return train_in(folder, "text-classification", data=data, **FLAGS)


@pytest.fixture
def copied(finished, tmp_path):
    return api.Run.find(shutil.copytree(finished.path, tmp_path / "copied"))


@pytest.fixture(scope="session")
def squares(tmp_path_factory):
    """Return a folder with a folder of images per colour; it must be left as it is."""
    return write_squares(tmp_path_factory.mktemp("squares"))


@pytest.fixture
def few_scenes(monkeypatch):
    """Return a function that limits the scenes that a demo draws, by split: a shortened run reads no others."""

    def limit(**most):
        draw = image_files.digit_scenes
        few = lambda parts, split, number: draw(parts, split, min(number, most[split]))  # noqa: E731
        monkeypatch.setattr(image_files, "digit_scenes", few)

    return limit
