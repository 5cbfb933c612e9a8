"""What this process may use of the host it runs on, and how it waits there.

The cores of a job are those of its CPU affinity, cut to the tightest CPU
quota of its control groups: a container started with `--cpus=1.5` sees every
core of the machine and gets one and a half of them.

>>> host_cores() >= 1, available_cores() <= affinity_cores()
(True, True)
"""

from __future__ import annotations

import math
import os
import re
import select
import socket
import zlib
from pathlib import Path

from headway.core.machine.cgroups import cpu_quota

ROOT = Path("/")


def affinity_cores() -> int:
    """Return the cores that this process may run on; all of the host's where the system has no affinities."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_cores(root: Path = ROOT) -> float:
    """Return how many cores' worth of time this process may use: its affinity, cut to its cgroups' quota."""
    quota = cpu_quota(root)
    return min(float(affinity_cores()), quota.cores) if quota else float(affinity_cores())


def host_cores() -> int:
    """Return how many threads of this process can be busy at once: `available_cores`, rounded up, at least 1."""
    return max(1, math.ceil(available_cores()))


def host_id() -> str:
    """Return a name for where process numbers mean what they mean here: this boot of the host, and the container on it.

    It can be part of a file's name.
    """
    try:
        place = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        place = ""
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '_', socket.gethostname())}-{zlib.crc32(place.encode()):08x}"


def readable(fd: int, timeout_s: float) -> bool:
    """Whether `fd` has something to read, or its end, within `timeout_s` seconds.

    `select.select` refuses descriptors of 1024 and above, which a process with many files open hands out.
    """
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(timeout_s, 0.0) * 1e3))
