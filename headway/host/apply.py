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
import inspect
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

from headway.core.errors import HeadwayError
from headway.core.machine.interruptions import raised_behind, suppress_own
from headway.core.machine.worker import BackgroundWorker
from headway.host.handlers import files, later
from headway.host.remedies import CollectParameters, LoggingParameters
from headway.runtime.in_rank.remedy import Applied, Context, RefusedRemedy
from headway.runtime.in_rank.state_account import before_looks, related
from headway.runtime.recorder.probes import NEVER, now
from headway.trace.events.vocabulary import SPANS

YOUNG_OBJECTS = 1_000_000
"""New objects after which the youngest generation is collected all the same: a loop may wait for just that."""

MOST_IMMORTAL = 2000
"""Collections of Python 3.12 count its immortal objects, some hundreds, as frozen; a script that freezes has more: an
interpreter has 5,000 objects before it imports anything."""

USED_BY_SCRIPTS = ("set_threshold", "set_debug", "freeze", "unfreeze", "get_objects", "get_referrers")
"""Functions of gc through which a script sees the remedy or contradicts it: from then on it is undone."""

gc_freeze, gc_unfreeze, gc_frozen = gc.freeze, gc.unfreeze, gc.get_freeze_count

FLUSHED_BEFORE = (
    "logging:Logger.addHandler", "logging:Logger.removeHandler", "logging:shutdown", "logging:Handler.setLevel",
    "logging:Handler.setFormatter", "logging:Filterer.addFilter", "logging:Filterer.removeFilter",
    "logging:StreamHandler.flush", "logging:FileHandler.close", "logging:Handler.close", "logging:Handler.acquire",
)  # fmt: skip
"""Functions after which a record that waits would come too late, or would be handled in another way."""

RECORDS_OWN = frozenset({"args", "exc_info"})
"""Attributes of a log record that are no plain values and are dealt with."""

LOGGING = SPANS["host.logging"].code


def collect_together(parameters: CollectParameters, context: Context) -> Applied | RefusedRemedy:
    """Install 'host.gc'."""
    collector = Collector(context, parameters.every_steps, parameters.rss_growth_bytes)
    context.listen(collector.step)
    atexit.register(collector.undo)  # the interpreter finalises what is in cycles as it ends, but nothing frozen
    context.undos += [collector.undo, lambda: atexit.unregister(collector.undo)]
    context.patch("gc:collect", collector.around_collect)
    context.patch("gc:get_threshold", collector.around_get_threshold)
    context.patch("gc:get_freeze_count", collector.around_get_freeze_count)
    for name in USED_BY_SCRIPTS:
        context.patch(f"gc:{name}", collector.ended_by)
    os.register_at_fork(after_in_child=collector.forked)
    return Applied("host.gc", collector.facts)


class Collector:
    """Collects garbage at the same steps on every rank."""

    def __init__(self, context: Context, every: int, growth_bytes: int) -> None:
        self.context, self.every, self.growth_bytes = context, every, growth_bytes
        self.facts: dict[str, Any] = {"every_steps": every, "frozen": 0, "collections": 0, "guard": False}
        self._base_bytes = 0
        self._active = False
        self._began = 0
        self._look = max(1, every // 8)
        self._thresholds = gc.get_threshold()
        self._frozen_before = 0
        self._get_threshold, self._set_threshold = gc.get_threshold, gc.set_threshold
        self._collect = inspect.unwrap(gc.collect)  # what the remedy collects, the script has not called for

    def step(self, _: int) -> int:
        """Act at an optimizer step; returns the steps until the next one."""
        steps = self.context.probes.steps[0]
        if not self._active:
            return self._begin(steps) if not self.facts["guard"] else NEVER
        if steps % self.every == 0:
            if gc.isenabled():
                self._collect_now()
                self.facts["collections"] += 1
        elif rss_bytes() + device_bytes() > self._base_bytes + self.growth_bytes:
            self.facts["guard"] = True
            self.undo()
            if gc.isenabled():
                self._collect_now()
            return NEVER
        since = max(1, steps - self._began)  # often at first: what leaks fast fills the memory within some steps
        return min(since, self._look - steps % self._look, self.every - steps % self.every)

    def _begin(self, steps: int) -> int:
        self._thresholds = self._get_threshold()
        self._frozen_before = gc.get_freeze_count()
        has_frozen = self._frozen_before > MOST_IMMORTAL
        if not gc.isenabled() or not self._thresholds[0] or gc.get_debug() or has_frozen:
            self.context.note(
                RefusedRemedy("host.gc", "the script has switched, frozen or debugged automatic collection itself")
            )
            return NEVER
        self._collect_now()
        gc_freeze()
        self._set_threshold(YOUNG_OBJECTS, *self._thresholds[1:])
        self._active, self._began = True, steps
        self._base_bytes = rss_bytes() + device_bytes()
        self.facts["frozen"] = gc_frozen()
        return 1

    def _collect_now(self) -> None:
        """Collect; a signal's handler that runs in a finaliser, whose exceptions Python ignores, has its raised here.

        A collection takes tenths of a second, and most signals that arrive in it are handled in the first finaliser.
        """
        with raised_behind():
            self._collect()

    def undo(self) -> None:
        """Bring automatic collection back as it was."""
        if self._active:
            self._active = False
            gc_unfreeze()
            self._set_threshold(*self._thresholds)

    def forked(self) -> None:
        """In a forked child, which takes no steps, collection is automatic."""
        self.undo()
        self.facts["guard"] = True

    def around_collect(self, original: Callable[..., int]) -> Callable[..., int]:
        """Wrap `gc.collect`: the script's own call looks at what is frozen too."""

        @functools.wraps(original)
        def collect(*args: Any, **kwargs: Any) -> int:
            """Collect as if nothing was frozen."""
            if not self._active:
                return original(*args, **kwargs)
            gc_unfreeze()
            try:
                return original(*args, **kwargs)
            finally:
                if self._active:
                    gc_freeze()

        return collect

    def around_get_threshold(self, original: Callable[[], tuple[int, int, int]]) -> Callable[[], tuple[int, int, int]]:
        """Wrap `gc.get_threshold`: the script sees its own."""

        @functools.wraps(original)
        def get_threshold() -> tuple[int, int, int]:
            """Return the thresholds that the remedy found."""
            return self._thresholds if self._active else original()

        return get_threshold

    def around_get_freeze_count(self, original: Callable[[], int]) -> Callable[[], int]:
        """Wrap `gc.get_freeze_count`: the script has frozen nothing, or the remedy would be over."""

        @functools.wraps(original)
        def get_freeze_count() -> int:
            """Return what was frozen before."""
            return self._frozen_before if self._active else original()

        return get_freeze_count

    def ended_by(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function through which a script sees what is frozen, or says itself how to collect."""

        @functools.wraps(original)
        def called(*args: Any, **kwargs: Any) -> Any:
            """End the remedy, then call."""
            if self._active:
                self.undo()
                self.facts["guard"] = True
                self.context.note(RefusedRemedy("host.gc", f"the script calls gc.{original.__name__} itself"))
            return original(*args, **kwargs)

        return called


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


def log_on_a_thread(parameters: LoggingParameters, context: Context) -> Applied | RefusedRemedy:
    """Install 'host.logging'."""
    facts = parameters.to_json()
    buffer = LogBuffer(context.probes.emit, parameters.queue)
    if context.allow != "result-equivalent":
        buffer.judges = Judgements(context, facts)
    context.patch("logging:Logger.callHandlers", buffer.around_call_handlers)
    for target in FLUSHED_BEFORE:
        context.patch(target, buffer.flushed_before)
    before_looks(context, buffer.looked_at)
    context.undos.append(buffer.close)
    atexit.register(buffer.close)  # after logging's own atexit, so before it in time: handlers are still open
    os.register_at_fork(before=buffer.flush, after_in_child=buffer.forget)
    return Applied("host.logging", facts)


class Judgements:
    """Whether handlers may be called later, each looked at once; what is found is reported."""

    def __init__(self, context: Context, facts: dict[str, Any]) -> None:
        self._context, self._facts = context, facts
        self._known: WeakKeyDictionary[logging.Handler, tuple[object, str | None]] = WeakKeyDictionary()
        self.files: set[str] = set()
        """Absolute paths of the files that handlers write later."""

    def all_may_wait(self, handlers: Iterable[logging.Handler]) -> bool:
        """Whether every one of `handlers` may be called later."""
        return all(self._may_wait(handler) for handler in handlers)

    def _may_wait(self, handler: logging.Handler) -> bool:
        form = handler.formatter, tuple(handler.filters)
        if handler not in self._known or self._known[handler][0] != form:
            reason = later(handler)
            self._known[handler] = form, reason
            self.files.update(files(handler) if reason is None else ())
            self._report()
        return self._known[handler][1] is None

    def _report(self) -> None:
        reasons = list(dict.fromkeys(reason for _, reason in self._known.values() if reason is not None))
        if len(reasons) and all(reason is not None for _, reason in self._known.values()):
            self._context.note(RefusedRemedy("host.logging", "; ".join(reasons)))
        else:
            self._context.note(Applied("host.logging", {**self._facts, "left_alone": reasons}))


class As:
    """A logger that has just these handlers: what the handlers of a record were when it was logged."""

    def __init__(self, handlers: list[logging.Handler]) -> None:
        self.handlers, self.propagate, self.parent = handlers, False, None


def handlers_of(logger: logging.Logger | None) -> list[logging.Handler]:
    """Return the handlers that a record of `logger` is given to, in order."""
    found: list[logging.Handler] = []
    while logger is not None:
        found += logger.handlers
        logger = logger.parent if logger.propagate else None
    return found


class LogBuffer:
    """Hands log records to a thread that calls the handlers."""

    def __init__(self, emit: Callable[..., None], capacity: int) -> None:
        self._emit, self._capacity = emit, capacity
        self.judges: Judgements | None = None
        """Which handlers may be called later; None: all of them."""
        self._worker: BackgroundWorker[Callable[[], None]] | None = None
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
            handlers = handlers_of(logger)
            if any(map(_is_held, handlers)):  # the thread could not have it: what came before is handled by now
                original(logger, record)
                return
            if not handlers or (self.judges is not None and not self.judges.all_may_wait(handlers)):
                self.flush()
                original(logger, record)
                return
            if not frozen_arguments(tuple(value for name, value in vars(record).items() if name not in RECORDS_OWN)):
                self.flush()
                original(logger, record)
                return
            if not frozen_arguments(record.args):
                record.msg, record.args = record.getMessage(), None
            # Handlers may ask for context variables of the code that logs.
            self._put(functools.partial(contextvars.copy_context().run, original, As(handlers), record))
            if record.levelno >= logging.ERROR:
                self.flush()
            with suppress_own():
                self._emit(LOGGING, start, now() - start, record.levelno)

        return callHandlers

    def flushed_before(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that must find every record handled."""

        @functools.wraps(original)
        def called(*args: Any, **kwargs: Any) -> Any:
            """Flush, then call."""
            if not (args and isinstance(args[0], logging.Handler) and _is_held(args[0])):
                self.flush()  # else the thread may be waiting for just that lock
            return original(*args, **kwargs)

        return called

    def looked_at(self, path: object) -> None:
        """Write what waits before the script reads the log, or another program may."""
        worker = self._worker
        if worker is not None and (path is None or any(related(path, file) for file in self._files())):
            self.flush()

    def _files(self) -> set[str]:
        return self.judges.files if self.judges is not None else set()

    def _put(self, call: Callable[[], None]) -> None:
        try:
            with self._starting:
                if self._worker is None:
                    self._worker = BackgroundWorker(self._work, capacity=self._capacity, name="headway logging")
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


def _is_held(handler: logging.Handler) -> bool:
    """Whether the calling thread has the lock of a handler, as code does that writes to its stream by hand."""
    owned = getattr(handler.lock, "_is_owned", None)
    return bool(owned is not None and owned())


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
