"""Probes of copies from host to device. They go in only where there is a CUDA device; tests run them on the CPU.

The host's time in the call is recorded: all of a copy from pageable memory,
only the launch of one from pinned memory. Inside a compiled region nothing is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from headway.runtime.probes import Probes, now
from headway.trace.vocabulary import SPANS

TRANSFER = SPANS["input.transfer"].code


def to_device(original: Callable[..., Any], probes: Probes) -> Callable[..., Any]:
    """Wrap `Tensor.to` or `Tensor.cuda`: recorded when a CPU tensor became one of a device."""
    import torch

    emit = probes.emit

    @functools.wraps(original)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Convert, and record a copy to a device."""
        if torch.compiler.is_compiling():
            return original(self, *args, **kwargs)
        start = now()
        result = original(self, *args, **kwargs)
        try:
            if self.device.type == "cpu" and result.device.type != "cpu":
                emit(TRANSFER, start, now() - start, result.nbytes)
        except Exception as cause:
            probes.failed("input.transfer", cause)
        return result

    return to


def copy_in(original: Callable[..., Any], probes: Probes) -> Callable[..., Any]:
    """Wrap `Tensor.copy_`: recorded when the source is on the CPU and the target on a device."""
    import torch

    emit = probes.emit

    @functools.wraps(original)
    def copy_(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Copy, and record a copy to a device."""
        if torch.compiler.is_compiling():
            return original(self, *args, **kwargs)
        start = now()
        result = original(self, *args, **kwargs)
        try:
            source: Any = args[0] if args else kwargs.get("src", kwargs.get("other"))
            if self.device.type != "cpu" and source.device.type == "cpu":
                emit(TRANSFER, start, now() - start, self.nbytes)
        except Exception as cause:
            probes.failed("input.transfer", cause)
        return result

    return copy_
