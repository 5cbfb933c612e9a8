"""The filler's process: burns a core while a rank waits. Started by `apply.py`; the standard library only.

Arguments: ring, pid of the rank, on_after_s, off_within_s, level, then where the progress page is, the indices of its
numbers, its size, and the codes of operations in which a rank waits. Writes its own id once it runs.
"""

from __future__ import annotations

import mmap
import os
import select
import sys
import time

SLICE_S = 0.01
"""Time over which the level is an average."""


def main(arguments: list[str]) -> None:
    """Leave the rank's family, then watch its page until it ends."""
    ring, rank = arguments[0], int(arguments[1])
    on_after_s, off_within_s, level = (float(word) for word in arguments[2:5])
    offset, op, since, size = (int(word) for word in arguments[5:9])
    waits = frozenset(int(code) for code in arguments[9].split(","))
    watched = os.pidfd_open(rank)
    with open(ring, "rb") as file:
        page = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))[offset : offset + size].cast("q")
    pid = os.fork()
    if pid:
        os.write(1, str(pid).encode())
        os._exit(0)
    os.setsid()
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    poll_s = min(on_after_s, off_within_s) / 2
    while not select.select([watched], [], [], poll_s)[0]:
        while page[op] in waits and time.perf_counter_ns() - page[since] >= on_after_s * 1e9:
            burn(page, op, waits, level * SLICE_S)
            if level < 1 and select.select([watched], [], [], (1 - level) * SLICE_S)[0]:
                return


def burn(page: memoryview, op: int, waits: frozenset[int], seconds: float) -> None:
    """Work for some time, or until the rank waits no more; it looks every 50 us or so."""
    end = time.thread_time() + seconds
    while page[op] in waits and time.thread_time() < end:
        sum(range(2000))


if __name__ == "__main__":
    main(sys.argv[1:])
