"""The files of a checkpoint in a bucket: a reader that goes on where it stopped is read ahead for.

A request to a bucket takes tens of milliseconds whatever its size, so small
windows of a long tensor, one request each, would be slow. Where a thread goes
on right behind what it read last, twice as much is asked for each time, up to
`AHEAD_BYTES`; a read elsewhere gets just what it wants. So at most as much is
read in vain as was wanted. Offsets are bytes.

>>> from headway.storage.stored.store import LocalStore
>>> import tempfile
>>> store = LocalStore(tempfile.mkdtemp())
>>> store.put("a", [bytes(range(100))])
>>> files = BucketFiles(store)
>>> [bytes(files.span("a", start, start + 2, bytearray)) for start in (0, 2, 4, 50)]
[b'\\x00\\x01', b'\\x02\\x03', b'\\x04\\x05', b'23']
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.checkpoint.reading.fetch import Room, Source, StoreFiles
from headway.core.units import MIB
from headway.storage.stored.store import Store

if TYPE_CHECKING:
    from typing_extensions import Buffer

AHEAD_BYTES = 16 * MIB
"""Most that is asked for at a time for a reader that goes on."""


@dataclass(slots=True)
class _Last:
    """What a thread was given last, and what of the file it has beyond that."""

    name: str
    start: int
    data: memoryview
    stop: int  # where the reader is
    asked_bytes: int


class BucketFiles:
    """Files under a store whose requests are slow. Safe for several threads."""

    source: Source = "remote"

    def __init__(self, store: Store) -> None:
        """`store` is rooted at the checkpoint."""
        self.store = store
        """Where they are."""
        self._files = StoreFiles(store)
        self._sizes: dict[str, int] | None = None
        self._local = threading.local()

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Buffer:
        """Return bytes of a file, as the store gives them."""
        return self._files.read(name, start, stop)

    def span(self, name: str, start: int, stop: int, room: Room) -> memoryview:
        """Return bytes of a file: `Files.span`."""
        last: _Last | None = getattr(self._local, "last", None)
        if last is not None and last.name == name and last.start <= start and stop <= last.start + len(last.data):
            last.stop = stop
            return last.data[start - last.start : stop - last.start]
        goes_on = last is not None and last.name == name and last.stop == start
        asked = max(stop - start, min(2 * last.asked_bytes, AHEAD_BYTES)) if last and goes_on else stop - start
        data = self._files.span(name, start, min(start + asked, max(self._size(name), stop)), room)
        self._local.last = _Last(name, start, data, stop, asked)
        return data[: stop - start]

    def _size(self, name: str) -> int:
        """Return how long a file is, 0 if there is none; all are listed once."""
        if self._sizes is None:
            self._sizes = self.store.list()
        return self._sizes.get(name, 0)
