"""The speed of a run: samples and tokens per second, padding, data wait, memory, device utilisation, watts.

It counts training time alone: waiting for data is in it, evaluations, saves and logs are not. An update costs a counter
and two clock reads; everything else is computed when something is logged.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from loopwright.engine.processes import is_distributed, sum_over_processes

# Dense peaks in FLOP/s from the makers' data sheets, without sparsity: with 16-bit inputs, and with TF32 ones.
# The first name contained in the device's name counts.
_PEAKS: tuple[tuple[str, float, float], ...] = (
    ("B200", 2250e12, 1125e12),
    ("H200", 989e12, 494e12),
    ("H100 PCIe", 756e12, 378e12),
    ("H100", 989e12, 494e12),
    ("A100", 312e12, 156e12),
    ("L40S", 362e12, 183e12),
    ("L4", 121e12, 60e12),
    ("A10", 125e12, 62e12),
    ("RTX 4090", 165e12, 82e12),
    ("RTX 3090", 71e12, 36e12),
    ("V100", 125e12, 16e12),
    ("T4", 65e12, 8e12),
)
_SECONDS_BETWEEN_WATTS = 1.0
_FLOPS_PER_PARAMETER_AND_TOKEN = 6  # two forward, four backward (Kaplan et al. 2020, section 2.1)

W = TypeVar("W")  # a data.Window


class Stopwatch:
    """Counts the seconds of a run by activity: "train", "wait" (for data), "evaluation" and "save".

    Every moment counts for at most one of them: the innermost. Logs, and whatever comes between epochs, count for none.
    """

    def __init__(self) -> None:
        self._seconds = {"train": 0.0, "wait": 0.0, "evaluation": 0.0, "save": 0.0}
        self._activity: str | None = None
        self._since = 0.0

    def switch(self, activity: str | None) -> str | None:
        """Count for this activity from now on; return the one before."""
        now, before = time.perf_counter(), self._activity
        if before is not None:
            self._seconds[before] += now - self._since
        self._activity, self._since = activity, now
        return before

    @contextmanager
    def during(self, activity: str | None) -> Iterator[None]:
        """Count a block for this activity, then continue with the one before."""
        before = self.switch(activity)
        try:
            yield
        finally:
            self.switch(before)

    def read(self) -> dict[str, float]:
        """Return the seconds so far, by activity."""
        self.switch(self._activity)
        return dict(self._seconds)


class Throughput:
    """Counts samples and tokens, and reports the speed since the last call.

    The utilisation needs the model's `num_parameters` and the `peak_flops` of one device, in FLOP/s. The `stopwatch`
    counts the time; others tell it of evaluations and saves.
    """

    def __init__(
        self,
        device: torch.device | None = None,
        num_parameters: int | None = None,
        peak_flops: float | None = None,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        self._device = torch.device("cpu") if device is None else device
        self._num_parameters = num_parameters
        self._peak_flops = peak_flops
        self._power = PowerMeter(self._device)
        self._stopwatch = Stopwatch() if stopwatch is None else stopwatch
        self._forget()

    def watch(self, windows: Iterator[W]) -> Iterator[W]:
        """Yield the windows of an epoch, counting them, the time spent waiting for them, and the time in between."""
        self._stopwatch.switch("wait")
        for window in windows:
            self._stopwatch.switch("train")
            self._count(window)
            yield window
            self._stopwatch.switch("wait")
        self._stopwatch.switch(None)

    def take(self) -> dict[str, float]:
        """Return the figures since the last call and reset; called at every log, by all processes.

        The caller has just read losses from the device, so all counted work is complete.

        Returns:
            samples_per_second, data_wait (share of training time) and peak_memory_bytes; tokens_per_second and
            padding_waste (share of pad tokens) if batches have "input_ids"; flops_utilisation if the device's peak is
            known, gpu_watts if readable. Empty if nothing was counted.
        """
        now = self._stopwatch.read()
        trained, waited = (now[name] - self._before[name] for name in ("train", "wait"))
        if not self._samples:
            self._forget()
            return {}
        seconds = max(trained + waited, 1e-9)
        tokens, slots = float(self._tokens), float(self._slots)
        if is_distributed():
            tokens, slots = sum_over_processes([tokens, slots], self._device)
        found = {
            "samples_per_second": self._samples / seconds,
            "data_wait": waited / seconds,
            "peak_memory_bytes": float(peak_memory(self._device)),
        }
        if slots:
            found |= {"tokens_per_second": tokens / seconds, "padding_waste": 1 - tokens / slots}
            if self._num_parameters is not None and self._peak_flops is not None:
                flops = _FLOPS_PER_PARAMETER_AND_TOKEN * self._num_parameters * self._tokens
                found["flops_utilisation"] = flops / seconds / self._peak_flops
        if (watts := self._power.watts()) is not None:
            found["gpu_watts"] = watts
        self._forget()
        return found

    def _count(self, window: Any) -> None:
        self._samples += window.samples
        for piece in window.pieces:
            if piece.rows and isinstance(piece.batch, Mapping):
                tokens, slots = count_tokens(piece.batch)
                self._tokens += tokens
                self._slots += slots

    def _forget(self) -> None:
        self._before = self._stopwatch.read()
        self._samples = self._tokens = self._slots = 0


class PowerMeter:
    """Reads the power draw of a CUDA device through nvidia-ml-py, if the package and the driver allow it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_figures = device.type == "cuda"
        self._watts: float | None = None
        self._read_at = -math.inf

    def watts(self) -> float | None:
        """Return the watts of about the last second; None if unreadable, which is not retried.

        More frequent calls return the cached value: querying the driver takes longer than a small update.
        """
        now = time.monotonic()
        if self._has_figures and now - self._read_at >= _SECONDS_BETWEEN_WATTS:
            self._read_at = now
            try:
                self._watts = float(torch.cuda.power_draw(self._device)) / 1_000
            except Exception:  # noqa: BLE001 - an optional library, for an optional figure
                self._has_figures, self._watts = False, None
        return self._watts


def count_tokens(batch: Mapping[str, Any]) -> tuple[int, int]:
    """Return the tokens of a batch without and with padding; (0, 0) if unknown on the host."""
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor):
        return 0, 0
    slots = ids.numel()
    mask, sequences = batch.get("attention_mask"), batch.get("sequence_ids")
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        return (int(mask.count_nonzero()), slots) if mask.device.type == "cpu" else (0, 0)
    if isinstance(sequences, Tensor):  # of packed rows
        return (int((sequences >= 0).count_nonzero()), slots) if sequences.device.type == "cpu" else (0, 0)
    return slots, slots


def peak_flops(device: torch.device, precision: str | None) -> float | None:
    """Return the dense peak of a device in FLOP/s; None if unlisted.

    "bf16" and "fp16" are 16-bit inputs; anything else counts as TF32, which float32 falls short of.
    """
    return peak_of(torch.cuda.get_device_name(device), precision) if device.type == "cuda" else None


def peak_of(name: str, precision: str | None) -> float | None:
    """Return the dense peak of a device of this name in FLOP/s; None if unlisted."""
    for part, half, single in _PEAKS:
        if part in name:
            return half if precision in ("bf16", "fp16") else single
    return None


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes: of tensors on a CUDA device, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # not on Windows
        return 0
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024
