"""What a process and its children have used so far, from /proc: read twice, the difference is a rate.

Children that have ended are part of their parent's figures, so that the sum
over the living never goes back.

>>> first, second = usage(), usage()
>>> second["cpu_s"] >= first["cpu_s"] and second["seconds"] > first["seconds"]
True
"""

from __future__ import annotations

import os
from pathlib import Path
from time import perf_counter

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def usage() -> dict[str, float]:
    """Return seconds (a clock), cpu_s, read_bytes (storage), rss_bytes; shm_bytes and page_cache_bytes of the host.

    The resident bytes count a page once for each process that shares it.
    """
    total = {"cpu_s": 0.0, "read_bytes": 0.0, "rss_bytes": 0.0}
    for pid in family(os.getpid()):
        for key, value in _of(pid).items():
            total[key] += value
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    return {
        "seconds": perf_counter(),
        **total,
        "shm_bytes": float((shm.f_blocks - shm.f_bfree) * shm.f_frsize) if shm else 0.0,
        "page_cache_bytes": 1024.0 * int(_lines("/proc/meminfo").get("Cached", "0 kB").split()[0]),
    }


def family(pid: int) -> list[int]:
    """Return `pid` and all its living descendants."""
    found = [pid]
    for task in _listed(f"/proc/{pid}/task"):
        for child in _text(f"/proc/{pid}/task/{task}/children").split():
            found += family(int(child))
    return found


def _of(pid: int) -> dict[str, float]:
    """Return the figures of one process; one that ends meanwhile has none left."""
    stat = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    pages = _text(f"/proc/{pid}/statm").split()
    return {
        "cpu_s": sum(map(int, stat[11:15])) / _TICKS_PER_S,  # fields 14-17 of proc(5): own and ended children's
        "read_bytes": float(_lines(f"/proc/{pid}/io").get("read_bytes", "0")),
        "rss_bytes": float(pages[1]) * _PAGE_BYTES if pages else 0.0,
    }


def _lines(path: str) -> dict[str, str]:
    """Return the 'key: value' lines of a file."""
    pairs = (line.partition(":") for line in _text(path).splitlines())
    return {key: value.strip() for key, _, value in pairs}


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _listed(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []
