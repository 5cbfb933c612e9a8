"""Remedies of the host's own work: garbage collection at agreed steps, and logging off the training thread.

'host.gc': after the first step everything that is alive is frozen and
automatic collection is switched off; every rank collects at the same steps
instead, so that no rank makes the others wait at a step of its own. When the
process, or what it holds on its device, grows by more than `rss_growth_bytes`,
automatic collection comes back. Forked children (loader workers) have it. To
the script, `gc.isenabled` says what the script itself wanted last; while that
is no collection, there is none.

'host.logging': handlers run on a thread. Order is kept and nothing is
dropped: a full queue makes the caller wait. The queue is flushed at exit,
before a fork, before handlers come or go, before the process ends itself
(`os._exit`, `os.exec*`, `os.abort`) and after a record of level ERROR or
above. A record whose arguments could change is formatted at once, one that
carries objects of the script is handled at once. Relative to what the script
prints itself, log lines may come later than before.

>>> frozen_arguments(("epoch %d", 3, None)), frozen_arguments(([1],))
(True, False)
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import functools
import gc
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from headway.core.errors import HeadwayError, InputError
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

FLUSHED_BEFORE = (
    "logging:Logger.addHandler", "logging:Logger.removeHandler", "logging:shutdown",
    "os:_exit", "os:abort", "os:execv", "os:execve",
)  # fmt: skip
"""Functions after which a record that waits would come too late."""

RECORDS_OWN = frozenset({"args", "exc_info"})
"""Attributes of a log record that are no plain values and are dealt with."""

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
    for name in ("enable", "disable", "isenabled"):
        context.patch(f"gc:{name}", getattr(collector, f"around_{name}"))
    os.register_at_fork(after_in_child=collector.forked)
    return Applied("host.gc", collector.facts)


class Collector:
    """Collects garbage at the same steps on every rank."""

    def __init__(self, context: Context, every: int, growth_bytes: int) -> None:
        self.context, self.every, self.growth_bytes = context, every, growth_bytes
        self.facts: dict[str, Any] = {"every_steps": every, "frozen": 0, "collections": 0, "guard": False}
        self._base_bytes = 0
        self._active = False
        self._wanted = True
        self._began = 0
        self._look = max(1, every // 8)
        self._enable, self._disable = gc.enable, gc.disable

    def step(self, _: int) -> int:
        """Act at an optimizer step; returns the steps until the next one."""
        steps = self.context.probes.steps[0]
        if not self._active:
            return self._begin(steps) if not self.facts["guard"] else NEVER
        if steps % self.every == 0:
            if self._wanted:
                gc.collect()
                self.facts["collections"] += 1
        elif rss_bytes() + device_bytes() > self._base_bytes + self.growth_bytes:
            self.facts["guard"] = True
            self.undo()
            if self._wanted:
                gc.collect()
            return NEVER
        since = max(1, steps - self._began)  # often at first: what leaks fast fills the memory within some steps
        return min(since, self._look - steps % self._look, self.every - steps % self.every)

    def _begin(self, steps: int) -> int:
        if not gc.isenabled():
            self.context.note(Refused("host.gc", "the script has switched automatic collection off itself"))
            return NEVER
        gc.collect()
        gc.freeze()
        self._disable()
        self._active, self._wanted, self._began = True, True, steps
        self._base_bytes = rss_bytes() + device_bytes()
        self.facts["frozen"] = gc.get_freeze_count()
        return 1

    def undo(self) -> None:
        """Bring automatic collection back."""
        if self._active:
            self._active = False
            gc.unfreeze()
            if self._wanted:
                self._enable()

    def forked(self) -> None:
        """In a forked child: nobody steps here, so collection is automatic."""
        self.undo()
        self.facts["guard"] = True

    def around_enable(self, original: Callable[[], None]) -> Callable[[], None]:
        """Wrap `gc.enable`: while the remedy is in effect, only note it."""

        @functools.wraps(original)
        def enable() -> None:
            """Want collection."""
            self._wanted = True
            if not self._active:
                original()

        return enable

    def around_disable(self, original: Callable[[], None]) -> Callable[[], None]:
        """Wrap `gc.disable`: from then on there is none at agreed steps either."""

        @functools.wraps(original)
        def disable() -> None:
            """Want no collection."""
            self._wanted = False
            original()

        return disable

    def around_isenabled(self, original: Callable[[], bool]) -> Callable[[], bool]:
        """Wrap `gc.isenabled`: code that switches off for a while asks it what to go back to."""

        @functools.wraps(original)
        def isenabled() -> bool:
            """Return what the script wanted last."""
            return self._wanted if self._active else original()

        return isenabled


def device_bytes() -> int:
    """Return the memory that tensors hold on this process's CUDA device; 0 when it uses none."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return int(cuda.memory_allocated()) if cuda is not None and cuda.is_initialized() else 0


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
    for target in FLUSHED_BEFORE:
        context.patch(target, buffer.flushed_before)
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
        self._starting = threading.RLock()
        self._thread = -1

    def around_call_handlers(self, original: Callable[..., None]) -> Callable[..., None]:
        """Wrap `Logger.callHandlers`."""

        @functools.wraps(original)
        def callHandlers(logger: logging.Logger, record: logging.LogRecord) -> None:  # noqa: N802  # logging's name
            """Queue the record; the thread calls the handlers."""
            if self._closed or self._pid != os.getpid() or threading.get_ident() == self._thread:
                original(logger, record)  # in a loader worker, say, which may end without warning; or in a handler
                return
            start = now()
            if not frozen_arguments(tuple(value for name, value in vars(record).items() if name not in RECORDS_OWN)):
                self.flush()
                original(logger, record)
                return
            if not frozen_arguments(record.args):
                record.msg, record.args = record.getMessage(), None
            # Handlers may ask for context variables of the code that logs.
            self._put(functools.partial(contextvars.copy_context().run, original, logger, record))
            if record.levelno >= logging.ERROR:
                self.flush()
            with contextlib.suppress(Exception):
                self._emit(LOGGING, start, now() - start, record.levelno)

        return callHandlers

    def flushed_before(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that must find every record handled."""

        @functools.wraps(original)
        def called(*args: Any, **kwargs: Any) -> Any:
            """Flush, then call."""
            self.flush()
            return original(*args, **kwargs)

        return called

    def _put(self, call: Callable[[], None]) -> None:
        try:
            with self._starting:
                if self._worker is None:
                    self._worker = Worker(self._work, capacity=self._capacity, name="headway logging")
                worker = self._worker
            worker.put(call)
        except HeadwayError:  # closed meanwhile
            guarded(call)

    def _work(self, call: Callable[[], None]) -> None:
        self._thread = threading.get_ident()
        guarded(call)

    def flush(self) -> None:
        """Wait until every handler has seen every record so far; in a handler itself there is nothing to wait for."""
        worker = self._worker
        if worker is not None and self._pid == os.getpid() and threading.get_ident() != self._thread:
            with contextlib.suppress(HeadwayError):
                worker.flush()

    def forget(self) -> None:
        """In a forked child: the thread is not there, so handlers are called directly."""
        self._worker, self._starting = None, threading.RLock()

    def close(self) -> None:
        """Flush and call handlers directly from now on."""
        self._closed = True
        worker, self._worker = self._worker, None
        if worker is not None and self._pid == os.getpid():
            with contextlib.suppress(HeadwayError):
                worker.close()


def guarded(call: Callable[[], None]) -> None:
    """Call the handlers; what one raises is reported the way logging reports it, and the thread goes on."""
    try:
        call()
    except BaseException:  # a handler that ends the program ends no more than its call
        if logging.raiseExceptions:
            import traceback

            traceback.print_exc()


def frozen_arguments(args: object) -> bool:
    """Whether nothing that a log record still has to format can change: numbers, text and None only."""
    values = args if isinstance(args, tuple) else (args,)
    return all(value is None or type(value) in (int, float, str, bool) for value in values)
