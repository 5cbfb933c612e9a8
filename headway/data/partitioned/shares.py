"""What one host of a partitioned cache holds and knows, in memory that all its processes share.

A `CacheShare` keeps payloads by item (`headway.core.machine.arena`: never evicted, as in
CoorDL), which items it had no room for, how far down each item's list of
hosts is full, which hosts are away, and counts of what was read from where.
Forked loader workers see and change all of it; by pickle other processes of
the user get at the same memory. Any thread may call anything.

>>> share = CacheShare(num_items=4, capacity_bytes=10, own=[0, 1], num_hosts=2)
>>> share.keep(0, b"jpeg"), share.keep(1, b"a longer one"), share.refused(1), bytes(share.get(0))
(True, False, True, b'jpeg')
>>> share.count(local_hits=1, local_bytes=4)
>>> share.counts()["local_hits"], share.held_items, share.held_bytes, share.settled
(1, 1, 4, True)
"""

from __future__ import annotations

import fcntl
import threading
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.core.machine.arena import Arena, Descriptor, held_at, reopened, shared_memory

COUNTS: dict[str, str] = {
    "local_hits": "reads that this host's own memory served", "local_bytes": "their bytes",
    "peer_hits": "reads that another host served", "peer_bytes": "their bytes",
    "storage_reads": "reads of the source", "storage_bytes": "their bytes",
    "served_hits": "reads of other hosts that this one served", "served_bytes": "bytes that were sent for them",
    "copies": "items of other hosts that were fetched into room left over",
    "peer_losses": "times that another host was found dead or silent",
    "settled": "items of this host's own that it holds, or has no room for",
}  # fmt: skip
"""What is counted, over all processes of a host."""

THERE, AWAY, BACK = range(3)
"""Standing of another host: never missed; found dead or silent; seen again since."""

_PLACE = {name: index for index, name in enumerate(COUNTS)}


class CacheShare:
    """One host's part of the cache. Hosts go by number, 0..num_hosts - 1."""

    def __init__(self, num_items: int, capacity_bytes: int, *, own: ArrayLike, num_hosts: int) -> None:
        """Begin empty; `own` are the [k] items that are this host's. Raises `InputError` on 0 items or bytes."""
        self._arena = Arena(num_items, capacity_bytes)
        self.num_items = num_items
        """Items are numbered 0..num_items - 1."""
        self._num_hosts = num_hosts
        self._own = np.zeros(num_items, np.bool_)
        self._own[np.asarray(own, np.int64)] = True
        size = 8 * (len(COUNTS) + num_hosts) + 3 * num_items
        self._file, self._memory = shared_memory("headway-share", size)
        self.after_fork()
        self._lay_out()

    @property
    def capacity_bytes(self) -> int:
        """Most bytes that the payloads may take."""
        return self._arena.capacity_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes that the payloads take now."""
        return self._arena.used_bytes

    @property
    def held_items(self) -> int:
        """Items that are here; counts them one by one."""
        return self._arena.num_filled

    def get(self, item: int) -> memoryview | None:
        """Return the payload of `item` without copying it, or None when it is not here."""
        return self._arena.get(item)

    @property
    def settled(self) -> bool:
        """Whether each of this host's own items is here, or had no room."""
        return int(self._counts[_PLACE["settled"]]) >= int(self._own.sum())

    def keep(self, item: int, payload: bytes) -> bool:
        """Store a payload, or return False where it does not fit; then it is never asked for again."""
        with self._lock:
            known = self._refused[item] or self._arena.get(item) is not None
            kept = not self._refused[item] and self._arena.put(item, payload)
            self._refused[item] = not kept
        if self._own[item] and not known:
            self.count(settled=1)
        return kept

    def copy(self, item: int, payload: bytes) -> bool:
        """Store a payload that another host holds too, if there is room."""
        with self._lock:
            if self._arena.capacity_bytes - self._arena.used_bytes < len(payload):
                return False
            return self._arena.put(item, payload)

    def refused(self, item: int) -> bool:
        """Return whether `item` had no room here."""
        return bool(self._refused[item])

    def level(self, item: int) -> int:
        """Return how many hosts, from the front of the item's list, are known to have had no room for it."""
        return int(self._level[item])

    def raise_level(self, item: int, level: int) -> None:
        """Note that host number `level` of the item's list has no room either, if that is known of those before it."""
        if self._level[item] == level - 1:
            self._level[item] = level

    def away(self, host: int) -> bool:
        """Return whether host number `host` is AWAY."""
        return bool(self._standing[host] == AWAY)

    def set_standing(self, host: int, standing: int) -> int:
        """Note whether a host is THERE, AWAY or BACK; returns what it was before."""
        with self._exclusive():
            before = int(self._standing[host])
            self._standing[host] = standing
        return before

    def count(self, **numbers: int) -> None:
        """Add to counts of COUNTS."""
        with self._exclusive():
            for name, number in numbers.items():
                self._counts[_PLACE[name]] += number

    def counts(self) -> dict[str, int]:
        """Return all counts of COUNTS."""
        return dict(zip(COUNTS, self._counts.tolist(), strict=True))

    def __getstate__(self) -> dict[str, Any]:
        """Name the memory: a copy in another process is the same share."""
        kept = ("_arena", "num_items", "_num_hosts", "_own")
        return {**{name: self.__dict__[name] for name in kept}, "_file": held_at(self._file)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Map the sender's memory."""
        self.__dict__.update(state)
        self._file, self._memory = reopened(state["_file"])
        self.after_fork()
        self._lay_out()

    def after_fork(self) -> None:
        """Make locks of this process's own: a thread that is not here may hold the parent's."""
        self._lock, self._counting = threading.Lock(), threading.Lock()

    def _lay_out(self) -> None:
        """Name the parts of the memory."""
        whole: NDArray[np.uint8] = np.frombuffer(self._memory, np.uint8)
        numbers, levels = 8 * (len(COUNTS) + self._num_hosts), 2 * self.num_items
        self._counts = whole[:numbers].view(np.int64)[: len(COUNTS)]
        self._standing = whole[:numbers].view(np.int64)[len(COUNTS) :]
        self._level = whole[numbers : numbers + levels].view(np.uint16)
        self._refused = whole[numbers + levels :]

    def _exclusive(self) -> _Exclusive:
        return _Exclusive(self._counting, self._file)


class _Exclusive:
    """Keeps other threads out with a lock, other processes with a record lock that the kernel drops with its owner."""

    __slots__ = ("_file", "_lock")

    def __init__(self, lock: threading.Lock, file: Descriptor) -> None:
        self._lock, self._file = lock, file

    def __enter__(self) -> None:
        self._lock.acquire()
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1)

    def __exit__(self, *failure: object) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1)
        self._lock.release()
