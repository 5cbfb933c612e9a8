"""Probes of gradients that no `backward()` computes: torch.autograd.grad, torch.func, replays of captured graphs.

They count as steps only where nothing else does; see `headway.trace.recording.basis`.
"""

from __future__ import annotations

import _thread
import functools
from collections.abc import Callable
from typing import Any

from headway.runtime.recorder.probes import Probes, now
from headway.runtime.script.gradients import BACKWARD
from headway.trace.events.vocabulary import SPANS

GRAD, REPLAY = SPANS["segment.grad"].code, SPANS["graph.replay"].code


def autograd_grad(original: Callable[..., Any], probes: Probes) -> Callable[..., Any]:
    """Wrap `torch.autograd.grad`."""
    return _outermost(original, probes, 0)


def func_grad(original: Callable[..., Any], probes: Probes) -> Callable[..., Any]:
    """Wrap what torch.func's `grad` and `grad_and_value` do when they are called."""
    return _outermost(original, probes, 1)


def _outermost(original: Callable[..., Any], probes: Probes, kind: int) -> Callable[..., Any]:
    import torch

    emit, gradients, inside = probes.emit, probes.gradients, probes.differentiating
    is_compiling = torch.compiler.is_compiling

    @functools.wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        """Compute the gradients; the outermost call is recorded."""
        if is_compiling() or inside[0]:
            return original(*args, **kwargs)
        probes.trainer[0] = _thread.get_ident()
        start = now()
        try:
            inside[0] = True
            gradients.begun[0] += 1
            result = original(*args, **kwargs)
        finally:
            inside[0] = False
        try:
            emit(GRAD, start, now() - start, kind)
            if gradients.differentiated():
                probes.advance(BACKWARD)
        except Exception as cause:
            probes.failed("segment.grad", cause)
        return result

    return called


_GRAPHS: dict[int, int] = {}
"""id of a graph -> its number; graphs of both kinds are counted together."""


def graphs_captured() -> bool:
    """Whether this process captured a graph, or replayed one."""
    return bool(_GRAPHS)


def graph_capture(original: Callable[..., Any], _: Probes) -> Callable[..., Any]:
    """Wrap `CUDAGraph.capture_begin` or `accelerator.Graph.capture_begin`: the graph gets its number."""
    numbers = _GRAPHS

    @functools.wraps(original)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Note the graph, and begin to capture it."""
        numbers.setdefault(id(self), len(numbers))
        return original(self, *args, **kwargs)

    return capture_begin


def graph_replay(original: Callable[..., Any], probes: Probes) -> Callable[..., Any]:
    """Wrap `CUDAGraph.replay` or `accelerator.Graph.replay`: the host launches everything that the graph holds.

    By events it is work of the device like a step, unless a module or a backward replays it: then it is a part of that.
    """
    emit, numbers, inside = probes.emit, _GRAPHS, probes.forwarding

    @functools.wraps(original)
    def replay(self: Any) -> Any:
        """Replay the graph and record how long its launch took."""
        timers = None if inside[0] else probes.device_timers
        if timers:
            timers.begun()
        start = now()
        result = original(self)
        try:
            emit(REPLAY, start, now() - start, numbers.setdefault(id(self), len(numbers)))
            if timers:
                timers.updated()
        except Exception as cause:
            probes.failed("graph.replay", cause)
        return result

    return replay
