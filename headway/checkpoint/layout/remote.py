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

Damaged blocks rebuilt from parity while a checkpoint is being read; the files stay as they are.

The first damaged block makes the whole checkpoint be verified, once: which
members of its stripe are good has to be known. After that a block costs the
reading of as many others as its stripe has data members. For putting files
right for good there is `headway ckpt repair`.

>>> import tempfile
>>> ParityRepair(tempfile.mkdtemp())("rank-0/__0_0.distcp", 0, 4096) is None
True
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headway.checkpoint.layout.fetch import Room, Source, StoreFiles
from headway.core.errors import HeadwayError
from headway.core.units import MIB
from headway.storage.checks.repair import rebuilt
from headway.storage.checks.verification import verify
from headway.storage.commits.commit import commit_record
from headway.storage.redundancy.losses import Losses
from headway.storage.redundancy.parity import best
from headway.storage.redundancy.parity_files import Images
from headway.storage.stored.store import LocalStore, Store

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


# Damaged blocks rebuilt from parity while a checkpoint is being read; the files stay as they are.


class ParityRepair:
    """Rebuilds blocks of one checkpoint in a folder: see `fetch.Mend`."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._lock = threading.Lock()
        self._known: Losses | None = None
        self._looked = False

    def __call__(self, file: str, start: int, stop: int) -> bytes | None:
        """Return bytes `start` to `stop` of a file, at most a block of it, or None where parity does not give them."""
        with self._lock:
            if not self._looked:
                self._known, self._looked = self._losses(), True
        losses = self._known
        ranks = [rank for rank, entry in losses.images.entries.items() if entry.name == file] if losses else []
        return rebuilt(losses, ranks[0], start, stop) if losses and ranks else None

    def _losses(self) -> Losses | None:
        """Find out what is damaged; None where there is nothing to rebuild from."""
        record = commit_record(LocalStore(self._folder))
        if record is None:
            return None
        try:
            return best(Images(self._folder, record), list(verify(self._folder).damaged))[0]
        except HeadwayError:
            return None
