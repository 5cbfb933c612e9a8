"""Remedies of the host's own work: garbage collection at agreed steps, and logging off the training thread.

'host.gc': after the first step everything that is alive is frozen and
automatic collection is switched off; every rank collects at the same steps
instead, so that no rank makes the others wait at a step of its own. When the
process grows by more than `rss_growth_bytes`, automatic collection comes back.

'host.logging': handlers run on a thread. Order is kept and nothing is
dropped: a full queue makes the caller wait. The queue is flushed at exit,
before a fork and after a record of level ERROR or above. A record whose
arguments could change is formatted at once. Relative to what the script
prints itself, log lines may come later than before.

>>> frozen_arguments(("epoch %d", 3, None)), frozen_arguments(([1],))
(True, False)
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from headway.core.errors import InputError
from headway.core.worker import Worker
from headway.runtime.probes import NEVER, now
from headway.runtime.remedy import Applied, Context, Refused
from headway.trace.vocabulary import SPANS

EVERY_STEPS = 1000
"""Optimizer steps between two collections by default."""

RSS_GROWTH_BYTES = 1 << 30
"""Growth of the process after which automatic collection comes back, by default."""

QUEUE = 1024
"""Log records that may wait; more make the caller wait."""

LOGGING = SPANS["host.logging"].code


def collect_together(parameters: Mapping[str, Any], context: Context) -> Applied | Refused:
    """Install 'host.gc'. Parameters: every_steps (optimizer steps), rss_growth_bytes.

    Raises `InputError` when every_steps is not a positive whole number.
    """
    every = parameters.get("every_steps", EVERY_STEPS)
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise InputError(f"every_steps is {every!r}; it must be a whole number of at least 1. Plan another one.")
    collector = Collector(context, every, int(parameters.get("rss_growth_bytes", RSS_GROWTH_BYTES)))
    context.listen(collector.step)
    context.undos.append(collector.undo)
    return Applied("host.gc", collector.facts)


class Collector:
    """Collects garbage at the same steps on every rank."""

    def __init__(self, context: Context, every: int, growth_bytes: int) -> None:
        self.context, self.every, self.growth_bytes = context, every, growth_bytes
        self.facts: dict[str, Any] = {"every_steps": every, "frozen": 0, "collections": 0, "guard": False}
        self._base_bytes = 0
        self._active = False
        self._look = max(1, every // 8)

    def step(self, _: int) -> int:
        """Act at an optimizer step; returns the steps until the next one."""
        steps = self.context.probes.steps[0]
        if not self._active:
            return self._begin(steps) if not self.facts["guard"] else NEVER
        if steps % self.every == 0:
            gc.collect()
            self.facts["collections"] += 1
        elif rss_bytes() > self._base_bytes + self.growth_bytes:
            self.facts["guard"] = True
            self.undo()
            gc.collect()
            return NEVER
        return min(self._look - steps % self._look, self.every - steps % self.every)

    def _begin(self, steps: int) -> int:
        if not gc.isenabled():
            self.context.note(Refused("host.gc", "the script has switched automatic collection off itself"))
            return NEVER
        gc.collect()
        gc.freeze()
        gc.disable()
        self._active = True
        self._base_bytes = rss_bytes()
        self.facts["frozen"] = gc.get_freeze_count()
        return self.every - steps % self.every

    def undo(self) -> None:
        """Bring automatic collection back."""
        if self._active:
            self._active = False
            gc.unfreeze()
            gc.enable()


def rss_bytes() -> int:
    """Return the resident memory of this process, 0 where the kernel does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def log_on_a_thread(parameters: Mapping[str, Any], context: Context) -> Applied | Refused:
    """Install 'host.logging'. Parameters: queue (records that may wait, default 1024)."""
    capacity = parameters.get("queue", QUEUE)
    if not isinstance(capacity, int) or isinstance(capacity, bool) or capacity < 1:
        raise InputError(f"queue is {capacity!r}; it must be a whole number of at least 1. Plan another one.")
    buffer = LogBuffer(context.probes.emit, capacity)
    context.patch("logging:Logger.callHandlers", buffer.around_call_handlers)
    context.undos.append(buffer.close)
    atexit.register(buffer.close)  # after logging's own atexit, so before it in time: handlers are still open
    os.register_at_fork(before=buffer.flush, after_in_child=buffer.forget)
    return Applied("host.logging", {"queue": capacity})


class LogBuffer:
    """Hands log records to a thread that calls the handlers."""

    def __init__(self, emit: Callable[..., None], capacity: int) -> None:
        self._emit, self._capacity = emit, capacity
        self._worker: Worker[Callable[[], None]] | None = None
        self._closed = False
        self._pid = os.getpid()

    def around_call_handlers(self, original: Callable[..., None]) -> Callable[..., None]:
        """Wrap `Logger.callHandlers`."""

        @functools.wraps(original)
        def callHandlers(logger: logging.Logger, record: logging.LogRecord) -> None:  # noqa: N802  # logging's name
            """Queue the record; the thread calls the handlers."""
            if self._closed or self._pid != os.getpid():
                original(logger, record)  # in a loader worker, say, which may end without warning
                return
            start = now()
            if not frozen_arguments(record.args):
                record.msg, record.args = record.getMessage(), None
            self._put(functools.partial(original, logger, record))
            if record.levelno >= logging.ERROR:
                self.flush()
            self._emit(LOGGING, start, now() - start, record.levelno)

        return callHandlers

    def _put(self, call: Callable[[], None]) -> None:
        if self._worker is None:
            self._worker = Worker(guarded, capacity=self._capacity, name="headway logging")
        self._worker.put(call)

    def flush(self) -> None:
        """Wait until every handler has seen every record so far."""
        if self._worker is not None and self._pid == os.getpid():
            self._worker.flush()

    def forget(self) -> None:
        """In a forked child: the thread is not there, so handlers are called directly."""
        self._worker = None

    def close(self) -> None:
        """Flush and call handlers directly from now on."""
        self._closed = True
        worker, self._worker = self._worker, None
        if worker is not None and self._pid == os.getpid():
            with contextlib.suppress(InputError):
                worker.close()


def guarded(call: Callable[[], None]) -> None:
    """Call the handlers; what one raises is reported the way logging reports it, and the thread goes on."""
    try:
        call()
    except Exception:
        if logging.raiseExceptions:
            import traceback

            traceback.print_exc()


def frozen_arguments(args: object) -> bool:
    """Whether nothing that a log record still has to format can change: numbers, text and None only."""
    values = args if isinstance(args, tuple) else (args,)
    return all(value is None or type(value) in (int, float, str, bool) for value in values)
