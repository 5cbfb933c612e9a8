"""What this process may use of the host it runs on, and how it waits there.

>>> host_cores() >= 1
True
"""

from __future__ import annotations

import os
import select


def host_cores() -> int:
    """Return the cores that this process may run on; all of the host's where the system has no affinities."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def readable(fd: int, timeout_s: float) -> bool:
    """Whether `fd` has something to read, or its end, within `timeout_s` seconds.

    `select.select` refuses descriptors of 1024 and above, which a process with many files open hands out.
    """
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(timeout_s, 0.0) * 1e3))
