"""Where the calling thread computes: samples of its instruction pointer, which the kernel takes while the thread runs.

CPU time does not tell a thread that computes from one that spins until others of its pool are ready; the code that it
runs does. At every so many nanoseconds of the thread's own CPU time the kernel writes the address of the instruction,
in user space, into a ring that this process maps (`perf_event_open(2)`, the software event "task clock"):

    page 0: ... head | tail ...     pages from 1 on: type, size | address | type, size | address | ...

A process may watch itself so where `kernel.perf_event_paranoid` is 2 or less; many containers forbid the call. No
descriptor stays open: the mapping keeps the event, and a fork has neither.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path

from headway.core.machine.host import mapped_memory

_CALLS = {"x86_64": 298, "aarch64": 241}
"""Machine -> number of the system call."""

_ATTRIBUTES = struct.Struct("<IIQQQQQIIQ")
"""`perf_event_attr` of 64 bytes: type, size, event, period, fields of a sample, of a reading, flags, 4 more fields."""

_SOFTWARE, _TASK_CLOCK, _ADDRESS, _USER_ONLY = 1, 1, 1, 1 << 5 | 1 << 6
_SAMPLE = 9

_PAGES = 2
"""Pages of the ring, a power of two."""

MOST_SAMPLES = 500
"""Samples between two readings from which on some may have been lost: 512 fill the ring."""

_HEAD, _TAIL = 1024, 1032
"""Offsets in the first page: bytes that the kernel wrote so far, and that were read."""

PERIOD_NS = 2_000_000
"""CPU time between two samples: each costs a few microseconds."""


class ThreadSamples:
    """Samples of the thread that makes this object, read in its process only. Raises `OSError` where there are none."""

    def __init__(self) -> None:
        number = _CALLS.get(os.uname().machine)
        if number is None:
            raise OSError("the number of perf_event_open is not known for this machine")
        if _is_filtered():
            raise OSError("this process may not make every system call (seccomp), and one that it may not can end it")
        libc, page = ctypes.CDLL(None, use_errno=True), os.sysconf("SC_PAGE_SIZE")
        attributes = _ATTRIBUTES.pack(
            _SOFTWARE, _ATTRIBUTES.size, _TASK_CLOCK, PERIOD_NS, _ADDRESS, 0, _USER_ONLY, 0, 0, 0
        )
        close_on_exec = 1 << 3
        file = int(libc.syscall(number, attributes, 0, -1, -1, close_on_exec))
        if file < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        try:
            libc.mmap.restype = ctypes.c_void_p
            libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
            start = libc.mmap(None, (1 + _PAGES) * page, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file, 0)
            if start in (None, ctypes.c_void_p(-1).value):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        finally:
            os.close(file)
        self._head = ctypes.c_uint64.from_address(start + _HEAD)
        self._tail = ctypes.c_uint64.from_address(start + _TAIL)
        self._ring = (ctypes.c_char * (_PAGES * page)).from_address(start + page)

    def addresses(self) -> list[int]:
        """Return the addresses sampled since the last call, in order; the oldest where there were `MOST_SAMPLES`."""
        head = self._head.value
        addresses = list(self._records(self._tail.value, head))
        self._tail.value = head
        return addresses

    def _records(self, tail: int, head: int) -> Iterator[int]:
        """Yield the addresses between two positions."""
        size, ring = len(self._ring), self._ring.raw * 2  # a record may go over the end
        while tail < head:
            record, _, length, address = struct.unpack_from("<IHHQ", ring, tail % size)
            if record == _SAMPLE:
                yield address
            tail += max(length, 8)


def _is_filtered() -> bool:
    """Whether a filter decides which system calls this process makes: some filters end who makes another one."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields.get("Seccomp", "0")) > 0


def code_of(libraries: tuple[str, ...]) -> list[tuple[int, int]]:
    """Return begin and end of the code of the loaded libraries whose file names begin with one of `libraries`."""
    code = (row for row in mapped_memory() if "x" in row.access)
    return [(row.start, row.end) for row in code if os.path.basename(row.path).startswith(libraries)]
