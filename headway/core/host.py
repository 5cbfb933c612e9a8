"""What this process may use of the host it runs on.

>>> host_cores() >= 1
True
"""

from __future__ import annotations

import os


def host_cores() -> int:
    """Return the cores that this process may run on; all of the host's where the system has no affinities."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
