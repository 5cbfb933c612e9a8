"""How much memory this host (or its container) has, and how much of it is free. Bytes.

>>> memory = host_memory()
>>> 0 < memory["memory_available_bytes"] <= memory["memory_total_bytes"]
True
"""

from __future__ import annotations

import resource
from pathlib import Path

from headway.core.machine.host import group_folders, lines_of, number_in
from headway.runtime.host.device import device_memory

NO_LIMIT = 1 << 60
"""A cgroup limit as large as this is none."""


def host_memory(root: Path = Path("/")) -> dict[str, int | None]:
    """Return total and available memory, cut to the cgroup's limit; None where the system does not say."""
    total, available = meminfo(root, "MemTotal"), meminfo(root, "MemAvailable")
    limit, used = cgroup_memory(root)
    if limit is not None:
        total = limit if total is None else min(total, limit)
        free = max(0, limit - (used or 0))
        available = free if available is None else min(available, free)
    return {"memory_total_bytes": total, "memory_available_bytes": available}


def address_limit() -> str | None:
    """Say which limit this process has on its addresses, None without one.

    Threads reserve stacks and arenas of 64 MB each, and a cache its room: where a script has been given just enough,
    they would take what it allocates later, and its life.
    """
    for name, limit in {"RLIMIT_AS": resource.RLIMIT_AS, "RLIMIT_DATA": resource.RLIMIT_DATA}.items():
        if (most := resource.getrlimit(limit)[0]) != resource.RLIM_INFINITY:
            return f"this process may take no more than {most} bytes of addresses ({name}), which the script may need"
    return None


def process_memory() -> dict[str, int]:
    """Return the most memory that this process has held: of the host, and of its device where it used one."""
    facts = {"peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    return {**facts, **device_memory()}


def meminfo(root: Path, name: str) -> int | None:
    """Return one line of /proc/meminfo in bytes."""
    for line in lines_of(root / "proc/meminfo"):
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def cgroup_memory(root: Path) -> tuple[int | None, int | None]:
    """Return (limit, use) of the tightest of this process's cgroups and their ancestors; None without a limit."""
    found = tightest_group(root)
    return (None, None) if found is None else found[1:]


def tightest_group(root: Path) -> tuple[Path, int, int | None] | None:
    """Return (folder, limit, use) of that cgroup; None without a limit."""
    found = []
    for folder in group_folders("memory", root):
        for limit_name, use_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, use = number_in(folder / limit_name), number_in(folder / use_name)
            if limit is not None and limit < NO_LIMIT:
                found.append((folder, limit, use))
    return min(found, key=lambda group: group[1] - (group[2] or 0), default=None)
