"""Probes of the host's own work: garbage collection, logging, compilation."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from headway.runtime.recorder.probes import Probes, now
from headway.trace.events.vocabulary import FROM_CACHE, SPANS

LOGGING = SPANS["host.logging"].code
COMPILE = SPANS["host.compile"].code


def join_gc(callbacks: list[Any], probes: Probes) -> Callable[[], None]:
    """Join `gc.callbacks` by a callable without a line of Python in it, see `garbage`. Returns the undo."""
    callback = probes.garbage.callback()
    callbacks.append(callback)
    return functools.partial(leave, callbacks, callback)


def collect(original: Callable[..., int], probes: Probes) -> Callable[..., int]:
    """Wrap `gc.collect`: a collection that the script calls for is one that no remedy may put off."""
    garbage = probes.garbage

    @functools.wraps(original)
    def collect(*args: Any, **kwargs: Any) -> int:
        """Collect; what was collected before is told apart."""
        note_garbage(probes)
        outer = garbage.called
        try:
            garbage.called = outer + 1
            try:
                return original(*args, **kwargs)
            finally:
                note_garbage(probes)
        finally:
            garbage.called = outer

    return collect


def note_garbage(probes: Probes) -> None:
    """Record the collections so far; a forked child that has recorded nothing else gets no ring for them."""
    if probes.recorder.path and probes.garbage.stamps:
        probes.garbage.note()


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
