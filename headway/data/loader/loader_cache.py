"""CoorDL's static cache inside a loader: examples stay in memory from their first reading on, nothing is evicted.

`DataLoader(cache_bytes=...)` makes one. Whatever the first epoch reaches first
is kept until the data of the examples fill the budget: under a shuffled order
a seeded random subset, and the best choice there is when every epoch reads
everything once (any eviction loses a later hit). So each later epoch hits
exactly what fits. The memory is shared by threads and by forked workers, and
outlives them. Copies are handed out. A dataset that is not pure is refused
(`purity`); of one that seems to be, no example is kept that draws random
numbers when it is read. What is found is compared with the dataset at times:
should it differ, or the script have changed the dataset, nothing of it is
used any more, and a warning says so (`scrutiny`).

The budget counts data: bytes of tensors, arrays, bytes and text. What is
stored besides, to know their types, is some 0.2 kB per example.

>>> cache = ExampleCache(1 << 20)
>>> (cache.hits, cache.misses, cache.bytes, cache.refused)
(0, 0, 0, 0)
>>> data_bytes({"image": np.zeros((4, 4), np.uint8), "label": 3, "name": "cat"})
19
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import psutil

from headway.core.errors import InputError
from headway.core.machine.arena import shared_memory
from headway.data.bytes import account
from headway.data.bytes.scrutiny import ALTERED
from headway.data.cached.apply import CachedDataset
from headway.data.cached.cached_examples import CachedExamples, ExampleOrigin, packed
from headway.data.guard.cache_trial import uncacheable
from headway.data.guard.outcome import speak
from headway.data.loader.views import View

_COUNTS = struct.Struct("<qqqq")
"""Hits, misses, bytes, refused."""

FRAMING_BYTES = 4096
"""Room for what an example's encoding adds to its data, per example; memory is taken only where it is used."""


class ExampleCache:
    """What one loader keeps, and how often that helped, over all its workers and epochs."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        """Most data to keep."""
        self._file, self._counts = shared_memory("headway-loader-cache", mmap.PAGESIZE)
        self._turn, self._pid = threading.Lock(), os.getpid()
        self._stored: CachedDataset | None = None
        self._reported = (0, 0, 0, 0)

    @property
    def hits(self) -> int:
        """Readings that found their example here."""
        return self._numbers()[0]

    @property
    def misses(self) -> int:
        """Readings that did not."""
        return self._numbers()[1]

    @property
    def bytes(self) -> int:
        """Data kept; 0 when it may not be used any more."""
        return 0 if self.finding else self._numbers()[2]

    @property
    def refused(self) -> int:
        """Missed examples that found no room."""
        return self._numbers()[3]

    @property
    def compared(self) -> int:
        """Hits that were read anew and compared."""
        return 0 if self._stored is None else self._stored.scrutiny.compared

    @property
    def finding(self) -> str:
        """Why nothing that was kept is used any more; '' while it is."""
        return "" if self._stored is None else self._stored.scrutiny.finding

    @property
    def num_slots(self) -> int:
        """Examples of the dataset; 0 before the first iterator."""
        return 0 if self._stored is None else self._stored.arena.num_slots

    def in_front(self, loader: Any) -> CachedExamples | None:
        """Return the loader's dataset with this cache in front, None for an empty one.

        Raises `InputError` on a dataset whose examples must be read anew each
        time, workers that could not share the memory, and too little of it.
        """
        if self._pid != os.getpid():  # a thread of the process that forked may have held the lock just then
            self._turn, self._pid = threading.Lock(), os.getpid()
        dataset, size = loader.dataset, len(loader.dataset)
        if not size:
            return None
        stored = self._stored
        if stored is None:
            stored = self._stored = self._opened(loader, size)
            if loader.num_workers and loader._workers != "threads":  # else the first example read may open a file
                stored.note(dataset)
        elif stored.is_other(dataset):
            stored.scrutiny.end(ALTERED)
        speak(dataset, stored.scrutiny)
        return stored.in_front(dataset, self)

    def get(self, index: int) -> memoryview | None:
        """Return the encoding of example `index`, None when it is not here; counts."""
        assert self._stored is not None
        found = self._stored.arena.get(index)
        with self._alone():
            self._add(hits=found is not None, misses=found is None)
        return found

    def keep(self, index: int, example: Any, origin: ExampleOrigin) -> None:
        """Keep an example that was missed, and read from `origin`, while there is room."""
        size, payload = data_bytes(example), None
        if self.bytes + size <= self.budget_bytes:  # else it is refused below, without being encoded
            payload = packed(example, origin)
            size = size or len(payload)
        assert self._stored is not None
        arena = self._stored.arena
        with self._alone():
            if arena.get(index) is not None:
                return  # another worker was faster
            fits = payload is not None and self.bytes + size <= self.budget_bytes
            fits = fits and arena.put(index, payload or b"")
            self._add(bytes=size if fits else 0, refused=not fits)

    def report(self) -> None:
        """Tell the recorder what has come since the last report."""
        numbers = self._numbers()
        if self.finding:
            account.told("cache", {"finding": self.finding})
        hits, misses, kept, refused = (now - before for now, before in zip(numbers, self._reported, strict=True))
        self._reported = numbers
        account.counted("cache.loader", hits=hits, misses=misses, bytes=kept, refused=refused)

    def _opened(self, loader: Any, size: int) -> CachedDataset:
        """Probe the dataset and return the memory for it."""
        # Threads need nothing of what only separate processes do.
        alike: Any = View(loader, num_workers=0) if loader._workers == "threads" else loader
        reason, example_bytes = uncacheable(alike, fresh=False)
        if reason is not None:
            raise InputError(f"cache_bytes is {self.budget_bytes}, but {reason}. Fix that, or leave cache_bytes out.")
        wanted, free = min(self.budget_bytes, example_bytes * size), psutil.virtual_memory().available
        if wanted > free:
            raise InputError(
                f"cache_bytes is {self.budget_bytes}, of which {wanted} would be used; this host has {free} bytes of "
                "memory left. Pass less."
            )
        return CachedDataset.empty(loader.dataset, size, self.budget_bytes + size * FRAMING_BYTES, any_type=True)

    def _numbers(self) -> tuple[int, int, int, int]:
        hits, misses, kept, refused = _COUNTS.unpack_from(self._counts)
        return hits, misses, kept, refused

    def _add(self, *, hits: int = 0, misses: int = 0, bytes: int = 0, refused: int = 0) -> None:
        now = self._numbers()
        _COUNTS.pack_into(self._counts, 0, now[0] + hits, now[1] + misses, now[2] + bytes, now[3] + refused)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep the other threads and processes out; the kernel lets go of the lock of one that dies."""
        with self._turn:
            fcntl.lockf(self._file, fcntl.LOCK_EX, 1)
            try:
                yield
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1)


def data_bytes(value: Any) -> int:
    """Return the bytes of tensors, arrays, bytes and text in a nested example; numbers are free."""
    size = getattr(value, "nbytes", None)
    if isinstance(size, (int, np.integer)):
        return int(size)
    if isinstance(value, (bytes, bytearray, str)):
        return len(value)
    if isinstance(value, dict):
        return sum(map(data_bytes, value.values()))
    return sum(map(data_bytes, value)) if isinstance(value, (list, tuple)) else 0
