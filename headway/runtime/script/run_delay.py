"""How long the calling thread was ready to run while no core was free: its run delay, as the scheduler counts it.

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
"""

from __future__ import annotations

import os
import threading
from time import monotonic_ns

from headway.core.machine.arena import Descriptor
from headway.core.machine.hidden_thread import thread_times
from headway.core.machine.interruptions import pass_on
from headway.core.machine.thread_samples import MOST_SAMPLES, PERIOD_NS, ThreadSamples, code_of


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
