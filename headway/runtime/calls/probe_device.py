"""Probes that tell the timers of devices where a step stands: batch, backward, update. See `device_timers`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

from headway.runtime.host.device import Device, device_of
from headway.runtime.host.device_clock import Clock
from headway.runtime.recorder.device_timers import AllTimers, DeviceTimers, timers_of
from headway.runtime.recorder.probes import Probes
from headway.runtime.recorder.timers import out_of_compiler


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

    return out_of_compiler(backward)


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
