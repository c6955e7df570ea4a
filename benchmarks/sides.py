"""The sides of a GPU benchmark: each in a process of its own, forked from one that has imported the libraries."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[1] / "src"
_LIBRARIES = ("torch", "transformers.trainer", "transformers.models.bert.modeling_bert", "accelerate", "loopwright.hf")
_context = multiprocessing.get_context("forkserver")


def preload(*modules: str) -> None:
    """Import these modules, those that are installed, before the first side is run, and once for all."""
    sys.path.insert(0, str(SOURCE))
    # Otherwise a library that looks for a GPU while it is imported would initialize CUDA, which no fork survives.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    names = [*_LIBRARIES, *modules]
    _context.set_forkserver_preload([each for each in names if importlib.util.find_spec(each.partition(".")[0])])


def run_side(
    function: Callable[..., Mapping[str, Any]], *args: Any, timeout: float, is_cold: bool = False
) -> dict[str, Any] | str:
    """Call a function of a script in a separate process; return its figures, or why there are none.

    Its working directory is a temporary one; `is_cold`: nothing is compiled there yet. What a side without figures has
    printed last goes to stderr.
    """
    with tempfile.TemporaryDirectory() as folder:
        process = _context.Process(target=_side, args=(function, args, folder, is_cold))
        process.start()
        process.join(timeout)
        is_late = process.is_alive()
        with contextlib.suppress(ProcessLookupError):  # with its loader workers and compilers
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
        figures, log = Path(folder) / "figures.json", Path(folder) / "log.txt"
        if figures.exists():
            found: dict[str, Any] = json.loads(figures.read_text())
            return found
        text = log.read_text(errors="replace") if log.exists() else ""
        sys.stderr.write(text[-3000:] + "\n")
        last = (text.strip().splitlines() or [f"exit code {process.exitcode}"])[-1][:150]
        return f"not done after {timeout:.0f} s: {last}" if is_late else f"failed: {last}"


def _side(function: Callable[..., Any], args: tuple[Any, ...], folder: str, is_cold: bool) -> None:
    os.setsid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no side outlives its benchmark, on Linux
    os.chdir(folder)
    if is_cold:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder) / "inductor")
    with Path("log.txt").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    figures = json.dumps(function(*args))
    Path("new.json").write_text(figures)
    Path("new.json").rename("figures.json")
