"""Follow the rings of a run from outside while it goes on: read-only, through plain file reads.

Use it to watch a run that another process launched. Nothing is mapped: the
launcher empties the ring of a process that is gone, and a mapping of it would
end the reader. A poll reads the records that are new and little else. Records
that were overwritten before a poll come from the launcher's spool; what is
nowhere is counted in `lost`, never guessed. Times in ns on CLOCK_MONOTONIC.

>>> import tempfile
>>> from headway.trace.rings.ring import Recorder
>>> rings = Path(tempfile.mkdtemp())
>>> recorder = Recorder(str(rings), rank=3)
>>> recorder.emit(10, 1_000, 50, 0, 0)
>>> follower = RunFollower(rings)
>>> [(header.rank, len(records)) for header, records in follower.poll()], follower.poll()
([(3, 1)], [])
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import FormatError
from headway.trace.rings import records as spool
from headway.trace.rings.records import (
    IN_FLIGHT,
    ORDERED_STORES,
    PATIENCE,
    RECORD_DTYPE,
    Page,
    RingHeader,
    header_of,
    read_page,
)
from headway.trace.rings.ring import HEADER, HEADER_BYTES, PAGE, PAGE_OFFSET, RECORD_BYTES
from headway.trace.rings.ring_folders import live_folder, ring_folders

Records = NDArray[np.void]

NOTHING: Records = np.empty(0, RECORD_DTYPE)

BLOCK = 512
"""Records read at a time."""

LEADING = ("main", "spawned")
"""Roles of the processes that are ranks."""


class RingFollower:
    """Follows one ring; `take` returns what is new since the last call, oldest first."""

    def __init__(self, stem: Path) -> None:
        """Open the ring of `stem`, or what is left of it. Raises `FormatError` or `OSError` while it has no header."""
        self.stem = stem
        self.next = 0
        """Records up to this number were returned, or counted as lost."""
        self.lost = 0
        """Records overwritten before they were read and not in a spool either, or never completed."""
        self._file, self._start = -1, b""
        head = spool.read_header(stem)
        if head is None:
            self._file = os.open(spool.ring_of(stem), os.O_RDONLY | os.O_CLOEXEC)
            try:
                head = header_of(os.pread(self._file, HEADER_BYTES, 0))
            except FormatError:
                self.close()
                raise
        self.header = head
        self._spooled = True

    def take(self) -> Records:
        """Return the new records; what the launcher has spooled comes first on the first call."""
        parts = [self._from_spool()] if self._spooled else []
        self._spooled = False
        parts.append(self._from_ring())
        if self._lapped():
            parts += [self._from_spool(), self._skip_ahead(), self._from_ring()]
        held = [part for part in parts if len(part)]
        return held[0] if len(held) == 1 else np.concatenate(held) if held else NOTHING

    def look(self) -> RingHeader:
        """Read the header anew: a child learns late that it is a rank, and every process notes its end."""
        if self._file >= 0:
            start = os.pread(self._file, HEADER.size, 0)
            head = os.pread(self._file, HEADER_BYTES, 0) if start not in (b"", self._start) else b""
            if len(head) == HEADER_BYTES:
                self._start, self.header = head[: HEADER.size], header_of(head)
        return self.header

    def page(self) -> Page | None:
        """Return the progress page as it stands; None when the ring is gone."""
        size = PAGE_OFFSET + PAGE.size
        raw = os.pread(self._file, size, 0) if self._file >= 0 else b""
        return read_page(raw) if len(raw) == size else None

    @property
    def over(self) -> bool:
        """Whether nothing can follow: the ring was retired, or removed when the events were written."""
        return self._file < 0 or os.fstat(self._file).st_nlink == 0

    def close(self) -> None:
        """Let go of the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _read(self, first: int, count: int) -> Records:
        """Return the slots of the records numbered `first` + 1 and on, as they stand; not beyond the ring's end."""
        capacity = self.header.capacity
        slot = first & (capacity - 1)
        count = min(count, capacity - slot)
        if self._file < 0:
            return NOTHING
        raw = os.pread(self._file, count * RECORD_BYTES, HEADER_BYTES + slot * RECORD_BYTES)
        return np.frombuffer(raw[: len(raw) // RECORD_BYTES * RECORD_BYTES], RECORD_DTYPE)

    def _number(self, at: int) -> int:
        """Return the number in the slot of record `at` + 1; 0 when there is none."""
        found = self._read(at, 1)
        return int(found["number"][0]) if len(found) else 0

    def _from_ring(self) -> Records:
        """Return the complete records from `next` on; a record its writer gave up is passed over."""
        parts: list[Records] = []
        while True:
            records = self._run_of_records()
            parts.append(records)
            if len(records) < BLOCK and not self._pass_over():
                return np.concatenate(parts) if len(parts) > 1 else records

    def _run_of_records(self) -> Records:
        """Return up to `BLOCK` complete records without a gap.

        They are read twice: what bore its number at the first reading was complete before the second one began.
        """
        parts: list[Records] = []
        left = BLOCK
        while left:
            # Without ordered stores a record may show its number before its other fields: the newest one waits.
            seen = max(self._complete(self._read(self.next, left)) - (not ORDERED_STORES), 0)
            again = self._read(self.next, seen) if seen else NOTHING
            records = NOTHING if self._lapped() else again[: self._complete(again)]
            parts.append(records)
            self.next += len(records)
            left -= len(records)
            wrapped = self.next & (self.header.capacity - 1) == 0
            if not len(records) or not wrapped:
                break
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def _complete(self, block: Records) -> int:
        """Return how many records at the head of `block` bear the number that their place should have."""
        right = block["number"] == np.arange(self.next + 1, self.next + 1 + len(block), dtype=np.uint64)
        return len(right) if right.all() else int(right.argmin())

    def _pass_over(self) -> bool:
        """Give up a record that is missing while much later ones are there; returns whether it did."""
        if self._lapped() or self._number(self.next + PATIENCE) != self.next + PATIENCE + 1:
            return False
        ahead = self._read(self.next, PATIENCE)["number"]
        there = np.flatnonzero(ahead > self.next)
        step = int(there[0]) if len(there) else PATIENCE
        self.next += step
        self.lost += step
        return step > 0

    def _lapped(self) -> bool:
        """Return whether the writer has come round to `next`, or so near that its slot cannot be trusted."""
        guard = self.next - IN_FLIGHT
        return self._number(self.next) > self.next + 1 or (guard >= 0 and self._number(guard) > guard + 1)

    def _from_spool(self) -> Records:
        """Return what the launcher took out of the ring and was not returned yet."""
        parts = [part[part["number"] > self.next] for part in spool.drained(self.stem)]
        fresh = np.concatenate(parts) if parts else NOTHING
        if not len(fresh):
            return NOTHING
        _, first = np.unique(fresh["number"], return_index=True)
        records = fresh[first]
        self.lost += int(records["number"][-1]) - self.next - len(records)
        self.next = int(records["number"][-1])
        return records

    def _skip_ahead(self) -> Records:
        """Go on at the oldest record of the ring that is safe to read; the ones before it are lost."""
        capacity = self.header.capacity
        raw = os.pread(self._file, capacity * RECORD_BYTES, HEADER_BYTES) if self._file >= 0 else b""
        numbers = np.frombuffer(raw[: len(raw) // RECORD_BYTES * RECORD_BYTES], RECORD_DTYPE)["number"]
        oldest = int(numbers.max(initial=0)) - capacity + 2 * IN_FLIGHT
        if oldest > self.next:
            self.lost += oldest - self.next
            self.next = oldest
        return NOTHING


class RunFollower:
    """Follows the ranks of a run: every ring that appears in its folders and belongs to a rank itself."""

    def __init__(self, rings: Path, *, rank: int | None = None) -> None:
        """Follow `rings`, which may not exist yet; `rank` restricts it to one rank's own processes."""
        self._folders: Callable[[], list[Path]] = lambda: [rings]
        self._ranks = None if rank is None else {rank}
        self._seen_ns: dict[Path, int] = {}
        self._followed: dict[Path, RingFollower] = {}
        self._lost = 0
        self._others: set[Path] = set()

    @classmethod
    def of_run(cls, run: Path) -> Self:
        """Follow the rings of a whole run, those of other hosts so far as they can be reached from here."""
        follower = cls(run)
        follower._folders = lambda: ring_folders(run)
        return follower

    def poll(self) -> list[tuple[RingHeader, Records]]:
        """Return (header, new records) of every process that has any."""
        self._find()
        found = []
        for stem, ring in list(self._followed.items()):
            header = ring.look()
            if header.role == "loader":
                self._leave(stem)
                continue
            if header.role not in LEADING:
                continue  # a child that may yet become a rank
            over, records = ring.over, ring.take()
            if len(records):
                found.append((header, records))
            if over:
                self._leave(stem)
        return found

    @property
    def lost(self) -> int:
        """Records that nothing holds any more, those of rings that are over included."""
        return self._lost + sum(ring.lost for ring in self._followed.values())

    def headers(self) -> list[RingHeader]:
        """Return the headers, as of the last poll, of the ranks that are followed."""
        return [ring.header for ring in self._followed.values() if ring.header.role in LEADING]

    def pages(self) -> dict[int, Page]:
        """Return rank -> what it is doing, for the ranks that are followed and say so."""
        rings = [ring for ring in self._followed.values() if ring.header.role in LEADING]
        return {ring.header.rank: page for ring in rings if (page := ring.page()) is not None and page.op}

    def close(self) -> None:
        """Let go of every file."""
        for stem in list(self._followed):
            self._leave(stem)

    def _leave(self, stem: Path) -> None:
        self._others.add(stem)
        ring = self._followed.pop(stem)
        self._lost += ring.lost
        ring.close()

    def _find(self) -> None:
        """Open the rings that are new; a folder is read only when it changed."""
        for rings in self._folders():
            try:
                changed_ns = live_folder(rings).stat().st_mtime_ns
            except OSError:
                continue
            if changed_ns == self._seen_ns.get(rings):
                continue
            self._seen_ns[rings] = changed_ns
            for stem in spool.stems(rings, ranks=self._ranks):
                if stem not in self._followed and stem not in self._others:
                    try:
                        self._followed[stem] = RingFollower(stem)
                    except (FormatError, OSError):
                        self._seen_ns[rings] = -1  # its writer has not finished the header: look at the next poll
