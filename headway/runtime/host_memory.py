"""How much memory this host (or its container) has, and how much of it is free. Bytes.

>>> memory = host_memory()
>>> 0 < memory["memory_available_bytes"] <= memory["memory_total_bytes"]
True
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

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


def process_memory() -> dict[str, int]:
    """Return the most memory that this process has held: of the host, and of its CUDA device where it used one."""
    facts = {"peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is not None and cuda.is_initialized():
        facts["device_peak_bytes"] = int(cuda.max_memory_reserved())
        facts["device_total_bytes"] = int(cuda.get_device_properties(cuda.current_device()).total_memory)
    return facts


def meminfo(root: Path, name: str) -> int | None:
    """Return one line of /proc/meminfo in bytes."""
    for line in lines_of(root / "proc/meminfo"):
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def cgroup_memory(root: Path) -> tuple[int | None, int | None]:
    """Return (limit, use) of this cgroup's memory, None where there is no limit."""
    for limit_name, use_name in (
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        limit, use = number_in(root / limit_name), number_in(root / use_name)
        if limit is not None and limit < NO_LIMIT:
            return limit, use
    return None, None


def lines_of(path: Path) -> list[str]:
    """Return a file's lines, none when it cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def number_in(path: Path) -> int | None:
    """Return the whole number that a file holds, None when it holds none."""
    lines = lines_of(path)
    text = lines[0].strip() if lines else ""
    return int(text) if text.lstrip("-").isdigit() else None
