"""Measures what a device reaches: large matrix products by dtype, a copy inside the device, a small launch.

Each takes a few milliseconds at its rate on a recent device; the median of five counts, timed by events. A device whose
memory is nearly taken is measured with smaller operands. Kept in `headway.cost.specs`, for the predictions of the
compute room.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from headway.cost.specs import Ceilings
from headway.runtime.host.device import Device, module_of

if TYPE_CHECKING:
    import torch

SIDE = 8192
"""Rows and columns of the matrices: large enough that every device is filled."""

NUM_LAUNCHES = 1000


def measure(device: Device) -> Ceilings:
    """Return the rates of a device; the flags of torch are put back as they were."""
    import torch

    on = torch.device(device.kind, device.index)
    memory = device.free_memory()
    side = SIDE if memory is None or memory[0] > 3 * 4 * SIDE * SIDE + (1 << 30) else SIDE // 4
    before = torch.get_float32_matmul_precision()
    rates = dict[str, float]()
    try:
        for name, dtype, precision in _dtypes():
            torch.set_float32_matmul_precision(precision)
            first, second = (torch.randn(side, side, device=on, dtype=dtype) for _ in range(2))
            rates[name] = 2 * side**3 / _seconds(device, functools.partial(torch.mm, first, second))
    finally:
        torch.set_float32_matmul_precision(before)
    source = torch.ones(side * side * 2, device=on)
    target = torch.empty_like(source)
    copy_s = _seconds(device, lambda: target.copy_(source))
    small, module = torch.zeros(8, device=on), module_of(device.kind)
    module.synchronize()
    begin = time.perf_counter()
    for _ in range(NUM_LAUNCHES):
        small.add_(1)
    launch_s = (time.perf_counter() - begin) / NUM_LAUNCHES
    module.synchronize()
    return Ceilings(flops_per_s=rates, bytes_per_s=2 * source.nbytes / copy_s, launch_s=launch_s, is_measured=True)


def _dtypes() -> list[tuple[str, torch.dtype, str]]:
    """Return the name of each rate, the dtype of its operands, and torch's precision for float32."""
    import torch

    return [
        ("fp32", torch.float32, "highest"), ("tf32", torch.float32, "high"), ("bf16", torch.bfloat16, "highest"),
        ("fp16", torch.float16, "highest"),
    ]  # fmt: skip


def _seconds(device: Device, function: Callable[[], object]) -> float:
    """Return how long the device takes for one call, the median of five."""
    for _ in range(2):
        function()
    times = []
    for _ in range(5):
        begin = device.record()
        function()
        end = device.record()
        module_of(device.kind).synchronize()
        times.append(float(begin.elapsed_time(end)) / 1e3)
    return statistics.median(times)
