"""Room for memory images, agreed between the processes of a host before any of them takes it.

Each rank of a host that looks for itself finds the same free memory, and all take it together: then the kernel ends
one of them. So what is planned is written into a small file of this user, boot and container, under a lock, and a plan
has to fit beside those of the others. The entries of processes that have ended do not count. Bytes:

    room = min(MemAvailable - planned by all and not filled yet,
               limit of the control group, or all memory - planned and filled by all in that group)

Users do not see each other's plans, nor do containers. Where the file cannot be written each looks for itself.

>>> share = take_room(1 << 12)
>>> share.filled()
>>> share.give_back()
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from headway.core.errors import HeadwayError, InputError
from headway.core.files.private import runtime_directory
from headway.core.machine.host import host_id, process_stat
from headway.core.units import format_bytes
from headway.core.wire.channel import hold_lock
from headway.runtime.host.host_memory import host_memory, meminfo, tightest_group

LOG = logging.getLogger(__name__)
LOG.addHandler(logging.NullHandler())

_ROOT = Path("/")
_KEYS = itertools.count()


@dataclass(frozen=True, slots=True)
class _Entry:
    """One image of one process."""

    pid: int
    started_ticks: int
    """When the process was started, in clock ticks since boot: numbers of processes come again."""
    key: int
    """Which of the process's images."""
    num_bytes: int
    is_planned: int
    """1 while the memory is not filled, so that MemAvailable does not show it yet."""
    group: str
    """Folder of the control group that limits the process's memory; '-' = none does."""


class ImageRoom:
    """Room for one image, of the process that took it."""

    def __init__(self, key: int) -> None:
        self._pid, self._key = os.getpid(), key

    def filled(self) -> None:
        """Note that all of the memory is there."""
        with _ledger() as entries:
            entries[:] = [replace(entry, is_planned=0) if self._is(entry) else entry for entry in entries]

    def give_back(self) -> None:
        """Note that the memory is gone, or is not wanted any more."""
        if os.getpid() == self._pid:
            with _ledger() as entries:
                entries[:] = [entry for entry in entries if not self._is(entry)]

    def _is(self, entry: _Entry) -> bool:
        return (entry.pid, entry.key) == (self._pid, self._key)


def take_room(num_bytes: int) -> ImageRoom:
    """Plan an image. Raises `HeadwayError` where it does not fit beside what the processes of this host plan."""
    pid, group = os.getpid(), _group()
    with _ledger() as entries:
        _check(num_bytes, entries, group)
        entry = _Entry(pid, _started_ticks(pid) or 0, next(_KEYS), num_bytes, 1, group)
        entries.append(entry)
    return ImageRoom(entry.key)


def check_room(num_bytes: int) -> None:
    """Raise `HeadwayError` for more than the host has left: the kernel would end a process rather than say so."""
    with _ledger() as entries:
        _check(num_bytes, entries, _group())


def _check(num_bytes: int, entries: list[_Entry], group: str) -> None:
    available, total = meminfo(_ROOT, "MemAvailable"), host_memory()["memory_total_bytes"]
    planned = sum(entry.num_bytes for entry in entries if entry.is_planned)
    # Of a group's limit the whole counts: what it uses now includes cached files, which give way.
    taken = sum(entry.num_bytes for entry in entries if entry.group == group)
    limits = [None if available is None else available - planned, None if total is None else total - taken]
    room = max(0, min((limit for limit in limits if limit is not None), default=num_bytes))
    if num_bytes > room:
        others = len({entry.pid for entry in entries} - {os.getpid()})
        beside = f" beside the images of {others} other processes" if others else ""
        raise HeadwayError(
            f"a snapshot takes {format_bytes(num_bytes)} of host memory, and there are {format_bytes(room)}{beside}. "
            "Save with inflight=1, on more ranks, or give the host more memory."
        )


@contextmanager
def _ledger() -> Iterator[list[_Entry]]:
    """Yield the entries of the processes that live, under the lock; what is in the list then is written."""
    try:
        path = runtime_directory() / f"images-{host_id()}.ledger"
        file = hold_lock(path, wait=True)
    except (OSError, InputError) as cause:
        LOG.debug("no agreement on memory between the processes of this host: %s", cause)
        yield []
        return
    try:
        text = os.pread(file, os.fstat(file).st_size, 0).decode("utf-8", "surrogateescape")
        started = functools.cache(_started_ticks)  # a process has several images, and is asked for once
        # Of two lines of one image the later one is the rest of a longer file, whose writer was killed.
        rows = reversed(text.splitlines())
        found = {(e.pid, e.key): e for row in rows if (e := _entry(row, started)) is not None}
        entries = [*reversed(found.values())]
        yield entries
        lines = [f"{e.pid} {e.started_ticks} {e.key} {e.num_bytes} {e.is_planned} {e.group}\n" for e in entries]
        content = "".join(lines).encode("utf-8", "surrogateescape")
        os.pwrite(file, content, 0)
        os.ftruncate(file, len(content))
    finally:
        if not os.fstat(file).st_size:
            path.unlink(missing_ok=True)  # a process that waits for the lock finds that out, and makes another file
        os.close(file)


def _entry(line: str, started: Callable[[int], int | None]) -> _Entry | None:
    """Return what a line says; None for one of a process that has ended, and for one that was not written whole."""
    words = line.split(maxsplit=5)
    if len(words) < 6 or not all(word.isdigit() for word in words[:5]):
        return None
    pid, started_ticks, key, num_bytes, is_planned = map(int, words[:5])
    is_alive = started(pid) == started_ticks
    return _Entry(pid, started_ticks, key, num_bytes, is_planned, words[5]) if is_alive else None


def _started_ticks(pid: int) -> int | None:
    """Return when a process was started; None where it has ended."""
    try:
        fields = process_stat(pid)
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _group() -> str:
    found = tightest_group(_ROOT)
    return "-" if found is None else str(found[0])
