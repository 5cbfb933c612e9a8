"""Probes that tell the timers of devices where a step stands: batch, backward, update. See `device_timers`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from headway.runtime.host.device import DRAINED_NS, Clock, Device, device_of, on_one_side
from headway.runtime.recorder.device_timers import AllTimers, DeviceTimers, timers_of
from headway.runtime.recorder.probes import Probes, now
from headway.runtime.recorder.timers import hidden, out_of_compiler
from headway.trace.events.vocabulary import BLOCKING, SPANS


def device_backward(original: Callable[..., Any], probes: Probes) -> Callable[..., Any]:
    """Wrap `torch.autograd.backward` where the host has devices: events around what begins on one of them."""
    every = timers_of(probes)
    ours: list[Callable[..., Any]] = [device_of, timers_of, *_methods(AllTimers, DeviceTimers, Device, Clock)]
    for function in ours:
        out_of_compiler(function)

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        """Run backward between two events."""
        root = args[0] if args else kwargs.get("tensors")
        timers = every.of(root[0] if isinstance(root, (list, tuple)) and root else root)
        if timers is None:
            return original(*args, **kwargs)
        try:
            every.act(timers, DeviceTimers.turned)
            return original(*args, **kwargs)
        finally:
            every.act(timers, DeviceTimers.ended)

    return out_of_compiler(hidden(backward))


def _methods(*owners: type) -> list[FunctionType]:
    """Return the functions in these classes, those of properties included."""
    found = [getattr(value, "fget", value) for owner in owners for value in vars(owner).values()]
    return [function for function in found if isinstance(function, FunctionType)]


def batch_ready(original: Callable[..., Any], probes: Probes) -> Callable[..., Any]:
    """Wrap `_BaseDataLoaderIter.__next__` where the host has devices: forward may begin when the batch is there."""
    every = timers_of(probes)

    @functools.wraps(original)
    def __next__(self: Any) -> Any:  # noqa: N807  # the name it has in torch
        """Get the batch, then mark its moment on the devices."""
        batch = original(self)
        if every:
            every.ready()
        return batch

    return __next__


def join_updates(register: Callable[..., Any], probes: Probes) -> Callable[[], None]:
    """Join the hooks behind every optimizer step: there what has passed is written."""
    every = timers_of(probes)

    def updated(*_: object) -> None:
        import torch  # not above: that is in the middle of torch's own import, before it has a compiler

        if not torch.compiler.is_compiling() and every:
            every.updated()

    undo: Callable[[], None] = register(updated).remove
    return undo


# Probes of what makes the host wait for a device: `.cpu()`, `synchronize`; other copies back are below.
#
# They go in only where the host has devices. What the host waits for is the device at work, no time of its own.
# `item()` and the like are left alone: torch.compile traces them by identity, and a function around them would break
# its graphs. That the host waited there shows in the device's events (`headway.sim.recorded.lane`).

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


# Probes of copies between host and device. They go in only where the kernel knows a device.
#
# A copy to the device is `input.transfer`. The host waits for it, and until the device has done what came before,
# unless it is asked for with `non_blocking=True` and comes from pinned memory: then only its launch is recorded. A copy
# back is a wait for the device (`host.sync`).
# Inside a compiled region neither is recorded.

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
