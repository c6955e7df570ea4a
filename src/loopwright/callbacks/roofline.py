"""How near the updates of a run are to the limit of the machine: matrix work, memory traffic, launches, data.

The matrix work is counted in one update, and the rates of the machine are measured by a large product and a large
copy. The traffic is that of the weights, gradients and optimizer state alone. So the limits are estimates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from loopwright.engine.memory import is_out_of_memory
from loopwright.quantities import size

_SECONDS = 0.06  # of each measurement
_SIDE = {"cuda": 4096, "cpu": 512}  # of the matrices that are multiplied
_COPIED_BYTES = {"cuda": 2**28, "cpu": 2**25}
_PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def weight_traffic(model: torch.nn.Module, optimizer: Any) -> int:
    """Return the bytes that an update has to move at least: weights, gradients and optimizer state.

    Weights are read forward, backward and by the optimizer, which writes them; gradients are written and read.
    """
    parameters = list(model.parameters())
    trained = sum(each.nbytes for each in parameters if each.requires_grad)
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return 2 * sum(each.nbytes for each in parameters) + 4 * trained + 2 * sum(each.nbytes for each in states)


def machine_rates(device: torch.device, precision: str, dtype: torch.dtype) -> tuple[float, float] | None:
    """Return the FLOP/s of a product in the precision of a run and the bytes/s of a copy; None without the memory."""
    kind = "cuda" if device.type == "cuda" else "cpu"
    side, num_bytes = _SIDE[kind], _COPIED_BYTES[kind]
    try:
        left = torch.ones(side, side, dtype=_PRECISIONS.get(precision, dtype), device=device)
        product = torch.empty_like(left)
        flops = _rate(lambda: torch.mm(left, left, out=product), 2 * side**3, device)
        source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return flops, _rate(lambda: target.copy_(source), 2 * num_bytes, device)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return None


def _rate(function: Callable[[], Any], work: int, device: torch.device) -> float:
    best, end = 0.0, time.perf_counter() + _SECONDS
    while not best or time.perf_counter() < end:
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = max(best, work / (time.perf_counter() - start))
    return best


def limits_of(
    seconds: float, waited: float, busy: float | None, flops: int, traffic: int, rates: tuple[float, float]
) -> dict[str, Any]:
    """Return the least time that an update needs, by part, and the share of that limit it reaches.

    `busy` is the time in which the device runs kernels; None if it has no clock of its own.
    """
    matrix, memory = flops / rates[0], traffic / rates[1]
    idle = {} if busy is None else {"launch_seconds": max(seconds - waited - busy, 0.0)}
    return {
        "flops": flops, "flops_per_second": rates[0], "matrix_seconds": matrix,
        "traffic_bytes": traffic, "bytes_per_second": rates[1], "memory_seconds": memory,
        "data_seconds": waited, **idle, "share": min(max(matrix, memory) / seconds, 1.0),
    }  # fmt: skip


def limit_lines(found: Mapping[str, Any]) -> list[str]:
    """Return the limits as readable lines."""
    each = {name: f"{1e3 * value:.3g} ms" for name, value in found.items() if name.endswith("_seconds")}
    parts = [
        f"matrix work at least {each['matrix_seconds']} ({found['flops'] / 1e9:.3g} GFLOP)",
        f"weights and optimizer at least {each['memory_seconds']} ({size(found['traffic_bytes'])})",
        f"data {each['data_seconds']}",
        *([f"launch at most {each['launch_seconds']}"] if "launch_seconds" in each else []),
    ]
    rates = f"{found['flops_per_second'] / 1e12:.3g} TFLOP/s and {size(found['bytes_per_second'])}/s"
    share = f"reached about {100 * found['share']:.0f} % of the machine's limit, estimated from its measured {rates}"
    return [f"        limit   {' · '.join(parts)}", f"        {share}"]
