"""Probes of the host's own work: garbage collection, logging, compilation."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from headway.runtime.recorder.probes import Probes, now
from headway.trace.events.vocabulary import FROM_CACHE, GC_CALLED, SPANS

GC = SPANS["host.gc"].code
LOGGING = SPANS["host.logging"].code
COMPILE = SPANS["host.compile"].code


def join_gc(callbacks: list[Any], probes: Probes) -> Callable[[], None]:
    """Join `gc.callbacks`; keeps the running total of `probes.gc_ns`. Returns the undo."""
    emit, total, recorder, called = probes.emit, probes.gc_ns, probes.recorder, probes.gc_called
    started = 0

    def collected(phase: str, info: dict[str, int]) -> None:
        """Record one collection."""
        nonlocal started
        if phase == "start":
            started = now()
            return
        duration = now() - started
        total[0] += duration
        if not recorder.path:
            return  # a forked child that has recorded nothing else: it gets no ring for its collections
        try:
            emit(GC, started, duration, info["generation"] + (GC_CALLED if called[0] else 0), info["collected"])
        except Exception as cause:
            probes.failed("gc", cause)

    callbacks.append(collected)
    return functools.partial(leave, callbacks, collected)


def collect(original: Callable[..., int], probes: Probes) -> Callable[..., int]:
    """Wrap `gc.collect`: a collection that the script calls for is one that no remedy may put off."""
    called = probes.gc_called

    @functools.wraps(original)
    def collect(*args: Any, **kwargs: Any) -> int:
        """Collect."""
        called[0] += 1
        try:
            return original(*args, **kwargs)
        finally:
            called[0] -= 1

    return collect


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


def compile_start(original: Callable[..., Any], probes: Probes) -> Callable[..., Any]:
    """Wrap dynamo's call of its start callbacks (a callback of ours would not survive `torch._dynamo.reset`)."""
    started, page = probes.compile_started, probes.page

    @functools.wraps(original)
    def run_start_callbacks(self: Any, *args: Any) -> Any:
        """Note when the compiler begins."""
        started[0] = now()
        page.opened(COMPILE, started[0])
        try:
            started[1:] = _cache_counts()
        except Exception as cause:
            probes.failed("torch.compile", cause)
        return original(self, *args)

    return run_start_callbacks


def compile_end(original: Callable[..., Any], probes: Probes) -> Callable[..., Any]:
    """Wrap dynamo's call of its end callbacks: forward, and backward when that is compiled later."""
    emit, started = probes.emit, probes.compile_started

    @functools.wraps(original)
    def run_end_callbacks(self: Any, *args: Any) -> Any:
        """Record how long the compiler worked."""
        try:
            probes.page.closed()
            hits, misses = _cache_counts()
            from_cache = hits > started[1] and misses == started[2]
            emit(COMPILE, started[0], now() - started[0], FROM_CACHE if from_cache else 0)
        except Exception as cause:
            probes.failed("torch.compile", cause)
        return original(self, *args)

    return run_end_callbacks


def _cache_counts() -> tuple[int, int]:
    """Return how often torch's caches of compiled graphs held one so far, and how often not."""
    counted = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    found, cached = counted.get("inductor", {}), counted.get("aot_autograd", {})
    hits = found.get("fxgraph_cache_hit", 0) + cached.get("autograd_cache_hit", 0)
    return hits, found.get("fxgraph_cache_miss", 0) + found.get("fxgraph_cache_bypass", 0)
