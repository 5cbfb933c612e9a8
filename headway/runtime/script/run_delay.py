"""What a thread loses to others: time without a free core (its run delay), and collections of garbage.

The run delay is how long the calling thread was ready to run while no core was free, as the scheduler counts it.

Where a pool computes with it (OpenMP's, torch's), an operator ends when the slowest thread of the pool does: the
thread that called it then waits for a core too, though it sleeps or spins itself. So it waits as long as the longer of
the two delays, at the least; at the most as long as both together, where no two of the threads wait at once: beside one
busy process on two cores. Where a pool has more threads than cores, they wait for each other: the longer delay counts.

    calling thread   |--- part of the sum ---|. . spins at the barrier . .|no core . .|--- the next sum
    pool thread      |--- part ---|no core . . . . . . . .|--- the rest --|--- part ---|

How long the calling thread spins is what says how much of the other's delay it waited for. CPU time holds both; samples
of the code that it runs tell spinning from computing, where the kernel gives them. They are asked for when a thread of
the pool first goes without a core.

Field 2 of /proc/thread-self/schedstat, in ns. A thread that a CPU quota holds
back counts as ready, so throttling is in it too.

>>> read_delay(-1)
-1

Garbage collections of one process, timed without a line of Python inside the collector.

Python runs a signal's handler before the next line of Python code, and ignores every exception that leaves an entry of
`gc.callbacks`. An entry written in Python would therefore swallow the KeyboardInterrupt or the time-out of a signal
that arrived during a collection. The entry made here is a chain of built-in callables, which runs no handler:

    max(phase, info, key=next(kept))     calls its key twice, at the start and at the end of a collection
    kept:  append (time, thread) to `stamps`, yield whether that returned None (two equal values, for `max`)

    stamps   start start | end end | start start | end end |  ...       four for each collection

Probes that run in the script's own calls (`optimizer.step`, `next(loader)`, `gc.collect`, ...) turn the stamps into
records with `note`. The generation of a collection is told by `gc.get_stats`, which counts them: of several since the
last look the longest is taken for the oldest generation.
"""

from __future__ import annotations

import _thread
import functools
import gc
import itertools
import operator
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from time import monotonic_ns, perf_counter_ns

from headway.core.machine.arena import Descriptor
from headway.core.machine.hidden_thread import thread_times
from headway.core.machine.interruptions import pass_on
from headway.core.machine.thread_samples import MOST_SAMPLES, PERIOD_NS, ThreadSamples, code_of
from headway.trace.events.vocabulary import GC_CALLED, SPANS


def open_schedstat() -> int:
    """Return a descriptor of the calling thread's scheduler statistics, -1 where the kernel keeps none.

    It stays open as long as the thread: one per fetcher, closed with it would cost a finaliser per iterator.
    """
    if _SCHEDSTAT.pid != os.getpid():  # one inherited by fork describes the parent's thread
        try:
            _SCHEDSTAT.file = Descriptor(os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC))
        except OSError as cause:
            pass_on(cause)
            _SCHEDSTAT.file = Descriptor(-1)
        _SCHEDSTAT.pid = os.getpid()
    return _SCHEDSTAT.file.fileno()


class _Schedstat(threading.local):
    """What the calling thread has open; it ends with the thread."""

    pid = -1
    file = Descriptor(-1)


_SCHEDSTAT = _Schedstat()


def read_delay(descriptor: int) -> int:
    """Return the nanoseconds that the thread was ready to run but had no core; -1 if unknown."""
    if descriptor < 0:
        return -1
    try:
        return int(os.pread(descriptor, 96, 0).split()[1])
    except (OSError, ValueError, IndexError) as cause:
        pass_on(cause)  # a time-out is an OSError
        return -1


LOOK_NS = 250_000_000
"""The threads of the pool are looked at so often, at most: each costs some 10 us."""

MOST_THREADS = 64
"""Threads that are looked at."""

COMPUTES = 0.2
"""A thread belongs to the pool where it computes for this share of the calling thread's CPU time."""

STARVES = 0.1
"""A thread of the pool that waited for less of the time than this may have done so while it had nothing to compute."""

POOLS = ("libgomp", "libiomp", "libomp")
"""File names of OpenMP's runtimes: GNU's, Intel's, LLVM's."""


class PoolDelay:
    """The run delay of a training thread and of the pool that computes with it, added up. One per process."""

    def __init__(self) -> None:
        self._next_ns = 0
        self._begin()

    def _begin(self) -> None:
        """Know no thread of this process yet."""
        self._pid, self._extra_ns, self._more_ns, self._own = os.getpid(), 0, 0, (0, 0, 0)
        self.spun_ns, self.sampled = 0, False
        """CPU time of the calling thread in which it spun for its pool, and whether the last call sampled it anew."""
        self.headway_ns = 0
        """CPU time of the calling thread so far that went into headway's own work beside steps."""
        self._before: dict[int, tuple[int, int]] = {}
        self._spins: Spins | None = None
        self._thread = 0

    def with_pool(self, cpu_ns: int, delay_ns: int) -> tuple[int, int]:
        """Return the ns that the calling thread waited so far, itself or for its pool, at least; and what may be more.

        `cpu_ns` and `delay_ns` are the calling thread's own CPU time and run delay so far; a delay of -1 is returned
        as it is. Costs 10 us and more for each thread of the process, up to four times a second.
        """
        if delay_ns < 0:
            return delay_ns, 0
        self.sampled = False
        if (moment_ns := monotonic_ns()) >= self._next_ns:
            self._next_ns = moment_ns + LOOK_NS
            self._look(moment_ns, cpu_ns, delay_ns)
        return delay_ns + self._extra_ns, self._more_ns

    def _look(self, moment_ns: int, cpu_ns: int, delay_ns: int) -> None:
        """Compare what each thread computed and waited since the look before."""
        if self._pid != os.getpid():  # a fork has none of these threads
            self._begin()
        of_python = {thread.native_id for thread in threading.enumerate()}
        try:
            threads = [int(name) for name in os.listdir("/proc/self/task")]
        except OSError as cause:
            pass_on(cause)
            return
        times = {tid: thread_times(tid) for tid in threads[:MOST_THREADS] if tid not in of_python}
        thread, self._thread = self._thread, threading.get_native_id()
        if thread != self._thread:  # the first look, or two threads train in turns: what passed is told of neither
            self._before, self._own = times, (moment_ns, cpu_ns, delay_ns)
            return
        passed_ns, spent_ns, waited_ns = moment_ns - self._own[0], cpu_ns - self._own[1], delay_ns - self._own[2]
        delays = [
            delay - then[1]
            for tid, (cpu, delay) in times.items()
            if cpu - (then := self._before.get(tid, (0, 0)))[0] > COMPUTES * spent_ns  # or it began since
        ]
        longest, fits = max(delays, default=0), len(delays) < len(os.sched_getaffinity(0))
        starved_ns = sum(delay for delay in delays if delay > STARVES * passed_ns)
        # Threads of a pool that has more of them than there are cores sleep at once in place of spinning.
        spun_ns = self._spun_ns(spent_ns, starts=starved_ns > 0) if fits else None
        if spun_ns is not None:
            self.spun_ns, self.sampled = self.spun_ns + spun_ns, True
            self._extra_ns += min(spun_ns, max(longest, starved_ns))
            self._more_ns += max(0, min(max(longest, starved_ns), passed_ns - waited_ns) - spun_ns)  # it slept as well
        else:
            self._extra_ns += max(0, longest - waited_ns)
            if fits and starved_ns:
                self._more_ns += max(0, min(longest, waited_ns, passed_ns - max(longest, waited_ns)))
        self._before, self._own = times, (moment_ns, cpu_ns, delay_ns)

    def _spun_ns(self, spent_ns: int, *, starts: bool) -> int | None:
        """Return for how much of its CPU time since the look before the thread spun for its pool; None: not known.

        Where `starts` and nobody counts that yet, it is counted from now on.
        """
        if self._spins is None:
            self._spins = Spins() if starts else None
            return None
        return self._spins.spun_ns(spent_ns)


class Spins:
    """For how much of its CPU time the thread that makes this object waits in OpenMP's own code for its pool."""

    def __init__(self) -> None:
        self._thread = threading.get_native_id()
        self._code: list[tuple[int, int]] = []
        self._samples: ThreadSamples | None = None
        try:
            self._code = code_of(POOLS)
            self._samples = ThreadSamples() if self._code else None
        except OSError as cause:
            pass_on(cause)

    def spun_ns(self, spent_ns: int) -> int | None:
        """Return it since the last call, of `spent_ns` in all; None where it cannot be told.

        Time in the kernel has no samples and is none of it. A full ring tells the share alone.
        """
        if self._samples is None or self._thread != threading.get_native_id():
            return None
        addresses = self._samples.addresses()
        spinning = sum(any(begin <= address < end for begin, end in self._code) for address in addresses)
        if not addresses:
            return None
        if len(addresses) < MOST_SAMPLES:
            return spinning * PERIOD_NS
        return spent_ns * spinning // len(addresses)


GC = SPANS["host.gc"].code

STAMPS = 4
"""Stamps of one collection."""

MOST = 4096
"""Collections kept between two looks; where there were more, none of them is recorded."""


class Garbage:
    """The collections of this process; `emit` writes a record, `failed` is told where that is impossible."""

    def __init__(self, emit: Callable[..., None], failed: Callable[[str, BaseException], None]) -> None:
        self.stamps: deque[tuple[int, int]] = deque(maxlen=STAMPS * MOST)
        """(time in ns, thread) of the starts and ends that were not looked at yet."""
        self.called = 0
        """Calls of `gc.collect` by the script that are under way."""
        self._emit, self._failed, self._total_ns = emit, failed, 0
        self._lock = _thread.allocate_lock()
        self._counts = _counts()
        self._of_threads: dict[int, deque[tuple[int, ...]]] = {}
        os.register_at_fork(after_in_child=self.stamps.clear)

    def callback(self) -> Callable[..., object]:
        """Return an entry for `gc.callbacks`."""
        stamps = zip(iter(perf_counter_ns, None), iter(_thread.get_ident, None), strict=True)
        kept = map(operator.is_, map(self.stamps.append, stamps), itertools.repeat(None))
        return functools.partial(max, key=functools.partial(next, kept))

    def so_far_ns(self) -> int:
        """Return the nanoseconds of all collections so far."""
        if self.stamps:
            self.note()
        return self._total_ns

    def note(self) -> None:
        """Record the calling thread's collections since the last look; those of other threads wait until they look.

        Where a second thread looks, or a signal's handler in the middle of a look, the next look has them.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            for thread, row in self._new():
                self._of_threads.setdefault(thread, deque(maxlen=MOST)).append(row)
            mine = self._of_threads.pop(_thread.get_ident(), ())
        finally:
            self._lock.release()
        try:
            for row in mine:
                self._emit(GC, *row)
        except Exception as cause:
            self._failed("gc", cause)

    def _new(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield (thread, (start, duration, generation, objects collected)) of the whole collections in `stamps`."""
        stamps = self.stamps
        if len(stamps) + STAMPS > STAMPS * MOST:
            stamps.clear()
        taken = [[stamps.popleft() for _ in range(STAMPS)] for _ in range(len(stamps) // STAMPS)]
        rows = [(start, end - start) for _, (start, _), (end, _), _ in taken]
        before, self._counts = self._counts, _counts()
        generations = [
            (generation, (after[1] - then[1]) // (after[0] - then[0]))
            for generation, (then, after) in enumerate(zip(before, self._counts, strict=True))
            for _ in range(after[0] - then[0])
        ]
        longest_last = sorted(range(len(rows)), key=lambda at: rows[at][1])
        kinds = dict(zip(reversed(longest_last), reversed(generations), strict=False))
        for at, row in enumerate(rows):
            self._total_ns += row[1]
            generation, collected = kinds.get(at, (0, 0))
            yield taken[at][0][1], (*row, generation + (GC_CALLED if self.called else 0), collected)


def _counts() -> list[tuple[int, int]]:
    """Return (collections, objects collected) so far of each generation."""
    return [(counts["collections"], counts["collected"]) for counts in gc.get_stats()]
