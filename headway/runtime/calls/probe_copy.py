"""Probes of copies between host and device. They go in only where the kernel knows a device.

A copy to the device is `input.transfer`. The host waits for it, and until the device has done what came before, unless
it is asked for with `non_blocking=True` and comes from pinned memory: then only its launch is recorded. A copy back is
a wait for the device (`host.sync`).
Inside a compiled region neither is recorded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from headway.runtime.calls.probe_sync import waited
from headway.runtime.host.device import device_of, on_one_side
from headway.runtime.host.device_clock import DRAINED_NS
from headway.runtime.recorder.probes import Probes, now
from headway.trace.events.vocabulary import BLOCKING, SPANS

TRANSFER = SPANS["input.transfer"].code


def to_device(original: Callable[..., Any], probes: Probes) -> Callable[..., Any]:
    """Wrap `Tensor.to` or `Tensor.cuda`: recorded when a tensor went from host to device, or back."""
    import torch

    recorded = _recorder(probes)

    @functools.wraps(original)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Convert, and record a copy to or from a device."""
        if torch.compiler.is_compiling():
            return original(self, *args, **kwargs)
        start = now()
        result = original(self, *args, **kwargs)
        recorded(self, result, start, args, kwargs)
        return result

    return to


def copy_in(original: Callable[..., Any], probes: Probes) -> Callable[..., Any]:
    """Wrap `Tensor.copy_`: recorded when one of the two is on the host and the other on a device."""
    import torch

    recorded = _recorder(probes)

    @functools.wraps(original)
    def copy_(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Copy, and record a copy to or from a device; FSDP2 makes several copies inside it for each layer."""
        if (args and on_one_side(args[0], self)) or torch.compiler.is_compiling():
            return original(self, *args, **kwargs)
        start = now()
        result = original(self, *args, **kwargs)
        source = args[0] if args else kwargs.get("src", kwargs.get("other"))
        recorded(source, self, start, args, kwargs)
        return result

    return copy_


def _is_blocking(source: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether the host waits for a copy to a device that `Tensor.to`, `cuda` or `copy_` was asked for.

    All three take `non_blocking` by that name, or as the first bool among the others.
    """
    asked = kwargs.get("non_blocking", next((one for one in args if isinstance(one, bool)), False))
    return not (asked and source.is_pinned())


def _recorder(probes: Probes) -> Callable[[Any, Any, int, tuple[Any, ...], Mapping[str, Any]], None]:
    """Return what records a copy from one tensor to another, which began at `start_ns`."""
    emit = probes.emit

    def recorded(source: Any, target: Any, start_ns: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        try:
            if on_one_side(source, target):
                return
            reads = device_of(source) is not None
            if reads == (device_of(target) is not None):
                return
            if reads:
                waited(probes, emit, start_ns)
                return
            duration = now() - start_ns
            emit(TRANSFER, start_ns, duration, target.nbytes, BLOCKING if _is_blocking(source, args, kwargs) else 0)
            if duration > DRAINED_NS and probes.device_timers:
                probes.device_timers.copied()
        except Exception as cause:
            probes.failed("input.transfer", cause)

    return recorded
