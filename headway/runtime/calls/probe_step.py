"""Probes of the optimizer: what ends a step wherever a script has one.

Every `Optimizer` subclass gets its `step` from `Optimizer.profile_hook_step`
when the first instance is made, so one patch there sees all optimizers, fused
or not, several at once, under a scheduler or a scaler. An optimizer that
steps another one inside is one step. Inside a compiled region nothing is
recorded: the wrapper is traced away. A closure is recorded apart: what it
computes is forward and backward, not the optimizer's own work.
"""

from __future__ import annotations

import _thread
import functools
from collections.abc import Callable
from typing import Any

from headway.runtime.recorder.probes import Probes, now
from headway.runtime.recorder.timers import hidden
from headway.runtime.script.gradients import BACKWARD
from headway.trace.events.vocabulary import BEHIND_UPDATE, CLOSED, SPANS
from headway.trace.rings.ring import OP, PROGRESS_NS
from headway.trace.rings.ring import STEP as STEPS

STEP, CLOSURE, FORWARD = (SPANS[name].code for name in ("optimizer.step", "optimizer.closure", "forward"))


def profile_hook_step(original: Callable[..., Any], probes: Probes) -> staticmethod[..., Any]:
    """Wrap what `Optimizer.profile_hook_step` makes of a `step` function."""

    @functools.wraps(original)
    def hook(func: Callable[..., Any]) -> Callable[..., Any]:
        """Return `func` with torch's own hooks and the recording around it."""
        return recorded(original(func), probes)

    return staticmethod(hook)


def join_existing(optimizer_class: Any, probes: Probes) -> Callable[[], None]:
    """Record the optimizer classes that were in use before headway came; the undo frees those and all later ones."""
    pending, classes = [optimizer_class], []
    while pending:
        for subclass in pending.pop().__subclasses__():
            pending.append(subclass)
            if getattr(vars(subclass).get("step"), "hooked", False):
                classes.append(subclass)
    for subclass in classes:
        step = recorded(getattr(subclass.step, "headway_inner", subclass.step), probes)
        step.hooked = True  # type: ignore[attr-defined]  # the mark by which torch knows a class that is done
        subclass.step = step

    def undo() -> None:
        """Leave the wrappers where they are, idle: other wrappers may stand around them by now."""
        probes.live[0] = False

    return undo


def recorded(inner: Callable[..., Any], probes: Probes) -> Callable[..., Any]:
    """Return the `step` function `inner` with a clock around it."""
    import torch  # here, not above: the factories run in the middle of torch's own import

    emit, steps, due, wake, live = probes.emit, probes.steps, probes.due, probes.wake, probes.live
    is_compiling, index_of, indices = torch.compiler.is_dynamo_compiling, probes.index_of, probes.indices
    stepping, cells, last, forward = probes.stepping, probes.page.cells, probes.last_backward, probes.last_forward
    gradients, gap, collections = probes.gradients, probes.gap, probes.garbage.stamps
    begun, counted, gap_open, gap_asks = gradients.begun, gradients.counted, gap.open, gap.asks
    watching, uses = gradients.uses.on, gradients.uses

    @functools.wraps(inner)
    def step(*args: Any, **kwargs: Any) -> Any:
        """Call the optimizer's step and record how long it took."""
        if is_compiling() or stepping[0] or not live[0]:
            return inner(*args, **kwargs)
        if kwargs or len(args) > 1:
            args, kwargs = with_closure(args, kwargs, probes)
        gap_open[0] = CLOSED
        start = now()
        try:
            stepping[0] = True
            result = inner(*args, **kwargs)
        finally:
            stepping[0] = False
        try:
            duration = now() - start
            index = indices.get(id(args[0]), -1)
            if index < 0:
                index = index_of(args[0])
            if collections:
                probes.garbage.note()
            if forward[0] is not None:
                emit(FORWARD, *forward[0])
                forward[0] = None
            emit(STEP, start, duration, index, 0, last[0], last[1])
            last[1] = 0
            if watching[0]:
                uses.updated(index)
            page = cells[0]
            page[PROGRESS_NS] = start + duration
            page[OP] = 0  # whatever was open is over, also what an exception left
            now_begun = begun[0]
            if now_begun != counted.get(index, 0):
                counted[index] = now_begun
                gradients.optimized[0] = True
            elif not gradients.counts(index):
                return result
            steps[0] = count = steps[0] + 1
            page[STEPS] = count
            if count == 1:
                probes.after_first_step()
            gap_open[0] = BEHIND_UPDATE
            if gap_asks[0]:
                gap.note_loop()
            if count >= due[0]:
                wake(index, start + duration)
        except Exception as cause:
            probes.failed("optimizer.step", cause)
        return result

    step.headway_inner = inner  # type: ignore[attr-defined]  # a later session starts from the bare function
    return hidden(step)


def with_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], probes: Probes
) -> tuple[tuple[Any, ...], dict[str, object]]:
    """Return the arguments of a step with a clock around the closure, if they hold one."""
    closure = kwargs.get("closure")
    if callable(closure):
        return args, {**kwargs, "closure": timed_closure(closure, args[0], probes)}
    if len(args) > 1 and callable(args[1]):
        return (args[0], timed_closure(args[1], args[0], probes), *args[2:]), kwargs
    return args, kwargs


def timed_closure(closure: Callable[[], Any], optimizer: Any, probes: Probes) -> Callable[[], Any]:
    """Return `closure` with a clock around it."""
    emit = probes.emit

    def timed(*args: Any, **kwargs: Any) -> Any:
        """Call the closure and record how long that took."""
        start = now()
        result = closure(*args, **kwargs)
        try:
            emit(CLOSURE, start, now() - start, probes.index_of(optimizer))
        except Exception as cause:
            probes.failed("optimizer.closure", cause)
        return result

    timed.__wrapped__ = closure  # type: ignore[attr-defined]  # for those who look through wrappers
    return timed


def scaler_step(original: Callable[..., Any], probes: Probes) -> Callable[..., Any]:
    """Wrap `GradScaler.step`: a step that it skips (gradients not finite) counts, with seq = 1."""
    emit, cells, index_of = probes.emit, probes.page.cells, probes.index_of

    @functools.wraps(original)
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the scaler's step; record the optimizer step that did not happen."""
        before, start = cells[0][PROGRESS_NS], now()
        result = original(self, optimizer, *args, **kwargs)
        try:
            if cells[0][PROGRESS_NS] == before:
                index = index_of(optimizer)
                emit(STEP, start, now() - start, index, 1)
                if probes.gradients.counts(index):
                    probes.advance(index)
        except Exception as cause:
            probes.failed("GradScaler.step", cause)
        return result

    return step


# Probes of gradients that no `backward()` computes: torch.autograd.grad, torch.func, replays of captured graphs.
#
# They count as steps only where nothing else does; see `headway.trace.recording.basis`.

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
            gradients.uses.differentiated()
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
            timers.replaying()
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
