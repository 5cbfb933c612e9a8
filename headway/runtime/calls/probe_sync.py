"""Probes of what makes the host wait for a device: `.cpu()`, `synchronize`; `probe_copy` has other copies back.

They go in only where the host has devices. What the host waits for is the device at work, no time of its own. `item()`
and the like are left alone: torch.compile traces them by identity, and a function around them would break its graphs.
That the host waited there shows in the device's events (`headway.sim.recorded.device_work`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from headway.runtime.host.device import device_of
from headway.runtime.recorder.probes import Probes, now
from headway.trace.events.vocabulary import SPANS

SYNC = SPANS["host.sync"].code

LEAST_NS = 20_000
"""A wait that took less has no record."""

READS = ("cpu",)
"""Methods of `torch.Tensor` that read what a device computed, and that a compiled region may call as ever."""

SYNCHRONIZES = (
    "torch.cuda:synchronize", "torch.cuda:Event.synchronize", "torch.cuda:Stream.synchronize",
    "torch.xpu:synchronize", "torch.accelerator:synchronize",
)  # fmt: skip
"""Functions that wait for a device or for a stream of it."""


def read(original: Callable[..., Any], probes: Probes) -> Callable[..., Any]:
    """Wrap a method of READS: recorded for tensors on a device."""
    import torch

    emit = probes.emit

    @functools.wraps(original)
    def reads(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Read the value and record how long the host waited for it."""
        if torch.compiler.is_compiling() or device_of(self) is None:
            return original(self, *args, **kwargs)
        start = now()
        result = original(self, *args, **kwargs)
        waited(probes, emit, start)
        return result

    return reads


def synchronize(original: Callable[..., Any], probes: Probes) -> Callable[..., Any]:
    """Wrap a function of SYNCHRONIZES."""
    emit = probes.emit

    @functools.wraps(original)
    def synchronizes(*args: Any, **kwargs: Any) -> Any:
        """Wait, and record how long that took."""
        start = now()
        result = original(*args, **kwargs)
        waited(probes, emit, start)
        return result

    return synchronizes


def waited(probes: Probes, emit: Callable[..., None], start_ns: int) -> None:
    """Record a wait since `start_ns`."""
    try:
        duration = now() - start_ns
        if duration >= LEAST_NS:
            emit(SYNC, start_ns, duration)
    except Exception as cause:
        probes.failed("host.sync", cause)
