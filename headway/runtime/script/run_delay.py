"""How long the calling thread was ready to run while no core was free: its run delay, as the scheduler counts it.

Field 2 of /proc/thread-self/schedstat, in ns. A thread that a CPU quota holds
back counts as ready, so throttling is in it too.

>>> read_delay(-1)
-1
"""

from __future__ import annotations

import os
import threading

from headway.core.machine.arena import Descriptor
from headway.core.machine.interruptions import pass_on


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
