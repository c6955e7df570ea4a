"""Seed, save and restore the global random generators of a process.

Generators are seeded through their own `manual_seed`: `torch.manual_seed` also visits every
accelerator and costs about a hundred times as much.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

_NUMPY_MASK = 0xFFFFFFFF
_python_generator = random.seed.__self__  # type: ignore[attr-defined]
_seed_python = super(random.Random, _python_generator).seed  # the C function, without its wrapper
_seed_numpy = np.random.seed
_seed_torch_cpu = torch.default_generator.manual_seed


def seed_generators(key: int, device: torch.device | None = None) -> None:
    """Seed python, numpy and torch (CPU, and the device's own generator if it has one) from a key."""
    _seed_python(key)
    _python_generator.gauss_next = None  # as the wrapper does
    _seed_numpy(key & _NUMPY_MASK)
    seed_torch(key, device)


def seed_torch(key: int, device: torch.device | None = None) -> None:
    """Seed torch's CPU generator, and the device's own if it has one, from a key."""
    _seed_torch_cpu(key)
    if device is not None and device.type != "cpu":
        _device_generator(device).manual_seed(key)


def use_deterministic_algorithms() -> None:
    """Restrict torch to deterministic algorithms for the rest of the process.

    Older torch then refuses matrix products on GPUs without a cuBLAS workspace setting; an existing one is kept.
    cuDNN's benchmark mode is off.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)


def generator_states(device: torch.device | None = None) -> dict[str, Any]:
    """Return the states of all global generators, in plain types and tensors."""
    version, words, gauss = random.getstate()
    name, numpy_words, position, has_gauss, cached = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [name, torch.from_numpy(np.asarray(numpy_words).astype(np.int64)), position, has_gauss, cached],
        "torch": torch.default_generator.get_state(),
    }
    if device is not None and device.type != "cpu":
        states["device"] = _device_generator(device).get_state()
    return states


def restore_generator_states(states: dict[str, Any], device: torch.device | None = None) -> None:
    """Restore states from `generator_states`; a device state is skipped if there is no such device."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    name, numpy_words, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, numpy_words.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.default_generator.set_state(states["torch"])
    if "device" in states and device is not None and device.type != "cpu":
        _device_generator(device).set_state(states["device"])


@contextmanager
def preserved_generators(device: torch.device | None = None) -> Iterator[None]:
    states = generator_states(device)
    try:
        yield
    finally:
        restore_generator_states(states, device)


def _device_generator(device: torch.device) -> Any:
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    if device.type == "mps":
        return torch.mps._get_default_mps_generator()  # torch.mps has no default_generators
    module = getattr(torch, device.type)  # an accelerator with module functions only (torch.xpu, ...)
    return SimpleNamespace(
        manual_seed=module.manual_seed, get_state=module.get_rng_state, set_state=module.set_rng_state
    )
