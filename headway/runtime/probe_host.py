"""Probes of the host's own work: garbage collection, logging, compilation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from headway.runtime.probes import Probes, now
from headway.trace.vocabulary import SPANS

GC = SPANS["host.gc"].code
LOGGING = SPANS["host.logging"].code
COMPILE = SPANS["host.compile"].code


def join_gc(callbacks: list[Any], probes: Probes) -> Callable[[], None]:
    """Join `gc.callbacks`; keeps the running total of `probes.gc_ns`. Returns the undo."""
    emit, total = probes.emit, probes.gc_ns
    started = 0

    def collected(phase: str, info: dict[str, int]) -> None:
        """Record one collection."""
        nonlocal started
        if phase == "start":
            started = now()
            return
        duration = now() - started
        total[0] += duration
        try:
            emit(GC, started, duration, info["generation"], info["collected"])
        except Exception as cause:
            probes.failed("gc", cause)

    callbacks.append(collected)
    return functools.partial(leave, callbacks, collected)


def leave(callbacks: list[Any], callback: object) -> None:
    """Take `callback` out of a list of callbacks, if it is still there."""
    if callback in callbacks:
        callbacks.remove(callback)


def call_handlers(original: Callable[..., Any], probes: Probes) -> Callable[..., Any]:
    """Wrap `logging.Logger.callHandlers`: all handlers of one log record, none when the level is off."""
    emit = probes.emit

    @functools.wraps(original)
    def callHandlers(self: Any, record: Any) -> Any:  # noqa: N802  # the name it has in logging
        """Call the handlers and record how long they took."""
        start = now()
        result = original(self, record)
        try:
            emit(LOGGING, start, now() - start, record.levelno)
        except Exception as cause:
            probes.failed("logging", cause)
        return result

    return callHandlers


def join_compile(handler: Any, probes: Probes) -> Callable[[], None]:
    """Join dynamo's compilation callbacks: forward, and backward when that is compiled later. Returns the undo."""
    emit = probes.emit
    started = 0

    def start(*_: object) -> None:
        nonlocal started
        started = now()

    def end(*_: object) -> None:
        try:
            emit(COMPILE, started, now() - started)
        except Exception as cause:
            probes.failed("torch.compile", cause)

    handler.register_start_callback(start)
    handler.register_end_callback(end)

    def undo() -> None:
        leave(handler.start_callbacks, start)
        leave(handler.end_callbacks, end)

    return undo
