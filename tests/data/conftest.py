"""Shared by tests of loader workers."""

import multiprocessing

import pytest


@pytest.fixture
def no_worker_is_left_behind():
    yield
    left = multiprocessing.active_children()
    for process in left:
        process.kill()
        process.join()
    assert left == []
