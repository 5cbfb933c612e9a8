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
"""

from __future__ import annotations

from typing import Any

import psutil

from headway.core.errors import InputError
from headway.data.bytes import account
from headway.data.bytes.scrutiny import ALTERED
from headway.data.cached.apply import CachedDataset
from headway.data.cached.cached_examples import COUNTS, CachedExamples, ExampleStore
from headway.data.guard.cache_trial import uncacheable
from headway.data.guard.outcome import speak
from headway.data.loader.views import View


class ExampleCache:
    """What one loader keeps, and how often that helped, over all its workers and epochs."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        """Most data to keep."""
        self._stored: CachedDataset | None = None
        self._reported = self._counts()

    @property
    def hits(self) -> int:
        """Readings that found their example here."""
        return self._counts()[0]

    @property
    def misses(self) -> int:
        """Readings that did not."""
        return self._counts()[1]

    @property
    def bytes(self) -> int:
        """Data kept; 0 when it may not be used any more."""
        return 0 if self.finding else self._counts()[2]

    @property
    def refused(self) -> int:
        """Missed examples that found no room."""
        return self._counts()[3]

    @property
    def compared(self) -> int:
        """Hits that were read anew and compared."""
        return 0 if self._stored is None else self._stored.scrutiny.compared

    @property
    def finding(self) -> str:
        """Why nothing that was kept is used any more; '' while it is."""
        return "" if self._stored is None else self._stored.scrutiny.finding

    def in_front(self, loader: Any) -> CachedExamples | None:
        """Return the loader's dataset with this cache in front, None for an empty one.

        Raises `InputError` on a dataset whose examples must be read anew each
        time, workers that could not share the memory, and too little of it.
        """
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
        return stored.in_front(dataset)

    def report(self) -> None:
        """Tell the recorder what has come since the last report."""
        counts = self._counts()
        if self.finding:
            account.told("cache", {"finding": self.finding})
        account.counted(
            "cache.loader",
            **{name: now - before for name, now, before in zip(COUNTS, counts, self._reported, strict=True)},
        )
        self._reported = counts

    def _counts(self) -> list[int]:
        return [0] * len(COUNTS) if self._stored is None else self._stored.store.counts.tolist()

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
        return CachedDataset.empty(loader.dataset, ExampleStore(size, self.budget_bytes, counted=True), any_type=True)
