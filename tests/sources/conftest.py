"""Fixtures that write the data file of a test."""

from functools import partial

import pytest
from tests.sources.refusing import write_csv, write_jsonl


@pytest.fixture
def jsonl(tmp_path):
    return partial(write_jsonl, tmp_path / "rows.jsonl")


@pytest.fixture
def table(tmp_path):
    return partial(write_csv, tmp_path / "rows.csv")
