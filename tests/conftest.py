"""What every test gets: one thread, seeded generators, fixed hypothesis examples, and no hollow tests."""

import os
import sys
import tempfile

# Read by OpenMP and MKL when torch is first imported, so set before it.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
# As in an activated environment: printed commands then begin with lw.
os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
# What a user allows is remembered in the home folder: not in that of whoever runs the tests.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="loopwright-state-")

import ast
import atexit
import gc
import logging
import random
import shutil
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch

from loopwright import failpoints

# No test cuts the power, and every sync waits for the disk. Processes that tests start sync for real.
os.fsync = os.fstat
# Enabled once the tests are collected: little is garbage until then, and a collection looks at all that is imported.
gc.disable()
torch.set_num_threads(1)
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

# A shell starts what runs in its background with SIGINT ignored, and every process of a test would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A library's handler may hold the captured, closed stream of the test that imported it: nothing to print about.
logging.raiseExceptions = False

# The same examples on every run and machine; no limit on time, since the first may compile or import.
hypothesis.settings.register_profile(
    "loopwright", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("loopwright")

_CHECKING_CALLS = {"raises", "warns", "deprecated_call", "fail"}
_CHECKING_PREFIXES = ("assert", "check")


def _checks_something(node: ast.AST) -> bool:
    """Whether this node can fail a test by what it finds."""
    if isinstance(node, ast.Assert):
        return True
    if not isinstance(node, ast.Call):
        return False
    name = getattr(node.func, "attr", getattr(node.func, "id", "")).lstrip("_")
    return name in _CHECKING_CALLS or name.startswith(_CHECKING_PREFIXES)


@cache
def _hollow_tests(path: Path) -> tuple[str, ...]:
    """Return 'name (line n)' for each test function of the file that checks nothing."""
    return tuple(
        f"{function.name} (line {function.lineno})"
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        and function.name.startswith("test")
        and not any(_checks_something(node) for node in ast.walk(function))
    )


def pytest_pycollect_makeitem(collector: pytest.Collector) -> None:
    """Refuse a test file that holds a test without an assertion."""
    module = collector.getparent(pytest.Module)
    if module is not None and (hollow := _hollow_tests(module.path)):
        raise pytest.Collector.CollectError(
            f"{module.path.name}: no assertion in {', '.join(hollow)}. A test must hold an assert, a "
            "pytest.raises or pytest.warns, or call something whose name starts with assert or check."
        )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    needing_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if needing_gpu and not torch.cuda.is_available():
        for item in needing_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> None:
    """Keep what was imported and parsed before a file of tests out of all garbage collections that follow."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Start each test, and the fixtures made for it, from the same state, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    failpoints.disarm()


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """Undo changes of the environment, such as those of `lw launch` for the processes that it starts."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture
def shared_data() -> Path:
    """Return the folder of real data that may lie beside the checkout."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no shared/data beside the checkout")
    return folder
