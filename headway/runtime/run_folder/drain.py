"""Takes records out of live rings while the ranks run, within a budget of bytes.

The launcher drains every ring a few times a second, so that nothing is
overwritten. A full spool is sealed; beyond the budget the oldest sealed
pieces go first, but for each process's first one, which holds its start-up.
A ring whose process is gone makes way for an empty file: its header stays as
JSON. Deep windows have a budget of the same size; the oldest go first there too.

>>> import tempfile
>>> drainer = Drainer(Path(tempfile.mkdtemp()), problems := Problems(), attempt=0, budget_bytes=1 << 20)
>>> drainer.start(); drainer.stop(); problems.lines()
[]
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import FormatError
from headway.runtime.run_folder.finalise import windows_of
from headway.runtime.run_folder.problems import Problems, disk_full
from headway.trace.rings import records as spool
from headway.trace.rings.records import RECORD_DTYPE, RecordRingReader, RingHeader
from headway.trace.rings.ring_folders import live_folder

DRAIN_S = 0.2
"""Seconds between drains: a ring of 16384 records holds that much at 80,000 records a second."""

SEAL_BYTES = 4 << 20

CHORES_EVERY = 25
"""Drains between two rounds of the chores."""

FAR_BYTES, FAR_S = 1 << 20, 5.0
"""Where spools do not lie beside the rings, records are held until there are so many bytes, or for so long."""

WAITING_BYTES = RECORD_DTYPE.itemsize << 16
"""Records of a process that wait while its spool cannot be written, in bytes."""

RECORDS = "records"
"""What a recording lacks whose disk is full."""

Listener = Callable[[RingHeader, NDArray[np.void]], None]
Looker = Callable[[Sequence[RecordRingReader]], None]


class _Ring:
    """One ring being drained."""

    def __init__(self, stem: Path, problems: Problems, seal_bytes: int) -> None:
        self._problems, self._every_bytes = problems, seal_bytes
        self.reader = RecordRingReader(spool.ring_of(stem))
        self.stem = stem
        self.hold_bytes = 0 if self.reader.path.parent == stem.parent else FAR_BYTES
        self._spool = os.open(stem.with_suffix(".spool"), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self.size = os.fstat(self._spool).st_size // RECORD_DTYPE.itemsize * RECORD_DTYPE.itemsize
        self.sealed = len(spool.sealed_pieces(self.stem))
        self.seal_bytes = seal_bytes
        """At how many bytes the spool is sealed."""
        self.quiet = 0
        self._waiting = bytearray()
        self._cause = disk_full()

    def take(self, *, final: bool = False) -> NDArray[np.void]:
        """Return new records after spooling them."""
        records = self.reader.drain(final=final)
        self._waiting += records.tobytes()
        if len(self._waiting) > self.hold_bytes:
            self.flush()
        self.quiet = 0 if len(records) else self.quiet + 1
        return records

    def flush(self) -> None:
        """Write the records that wait, whole ones; those that there is no room for wait on, and the oldest go first.

        What is gone shows as missing numbers. So a disk that was full for a while costs the records of that while.
        """
        whole, self._cause = 0, disk_full()
        try:
            written = os.pwrite(self._spool, self._waiting, self.size)
            whole = written - written % RECORD_DTYPE.itemsize  # the next write goes over the rest
        except OSError as found:
            self._cause = found
        self.size += whole
        del self._waiting[:whole]
        if len(self._waiting) > WAITING_BYTES:
            self._problems.add(RECORDS, self._cause)
            del self._waiting[:-WAITING_BYTES]

    def seal(self) -> bool:
        """Turn the spool into a sealed piece; a crash in between leaves doubles, which the reader drops.

        Returns whether there was room for it.
        """
        self.seal_bytes = self.size + self._every_bytes  # if it fails, try again then
        with self._problems.kept(RECORDS):
            self._seal()
        return not self.size

    def _seal(self) -> None:
        raw = self.stem.with_suffix(".spool")
        piece = self.stem.with_name(f"{self.stem.name}.{self.sealed:05d}.sealed")
        draft = piece.with_suffix(".draft")
        try:
            draft.write_bytes(spool.pack(np.fromfile(raw, RECORD_DTYPE)))
            os.replace(draft, piece)
        except OSError:
            draft.unlink(missing_ok=True)  # the room that it takes
            raise
        os.ftruncate(self._spool, 0)
        self.sealed, self.size, self.seal_bytes = self.sealed + 1, 0, self._every_bytes

    def retire(self) -> None:
        """Keep the header as JSON and put an empty file in the place of a process's ring; its name stays taken.

        The ring itself is never shortened: whoever has it mapped would end with SIGBUS.
        """
        with self._problems.kept(RECORDS):
            spool.write_header(self.stem, self.reader.header)
            blank = self.reader.path.with_suffix(".blank")
            with contextlib.suppress(FileNotFoundError):  # somebody removed the folder: no name is left to keep
                blank.touch()
                os.replace(blank, self.reader.path)
        self.close()

    def leave(self) -> None:
        """Let go of the ring; of one that somebody removed meanwhile the header is kept."""
        with self._problems.kept(RECORDS):
            if not self.reader.path.exists():
                spool.write_header(self.stem, self.reader.header)
        self.close()

    def close(self) -> None:
        self.flush()
        if self._waiting:
            self._problems.add(RECORDS, self._cause)
        os.close(self._spool)
        self.reader.close()


class Drainer:
    """A thread that drains the rings of one attempt."""

    def __init__(
        self,
        rings: Path,
        problems: Problems,
        *,
        attempt: int,
        budget_bytes: int,
        ranks: Set[int] | None = None,
        earlier: Drainer | None = None,
    ) -> None:
        self.rings, self.problems = rings, problems
        self.listeners: list[Listener] = list(earlier.listeners) if earlier else []
        """Called with (header, new records) of each drain, in the drain's thread."""
        self.lookers: list[Looker] = list(earlier.lookers) if earlier else []
        """Called after each drain but the last with the readers of all rings that are followed, in the same thread."""
        self.chores: list[Callable[[], None]] = []
        """Called now and then, and at the end."""
        self._attempt, self._ranks = attempt, ranks
        self._live = live_folder(rings)  # looked through at each drain: never a folder of another host's disk
        self._budget = budget_bytes
        self._seal_bytes = max(min(SEAL_BYTES, budget_bytes // 16), 64 * RECORD_DTYPE.itemsize)
        self._drains = 0
        self._followed: dict[Path, _Ring] = {}
        self._retired: set[Path] = set()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start draining."""
        self._thread = threading.Thread(target=self._run, name="headway-drain", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Drain a last time, with every writer gone, and stop."""
        self._done.set()
        if self._thread is not None:
            self._thread.join()
        with self.problems.kept(RECORDS):
            self.drain(final=True)
        for ring in self._followed.values():
            ring.leave()
        self._followed.clear()

    def drain(self, *, final: bool = False) -> None:
        """Take what is new from every ring once."""
        # Loader workers of thousands of epochs leave thousands of names: those are looked through less often.
        look = final or self._drains % (1 + len(self._retired) // 500) == 0
        found = spool.stems(self._live, attempt=self._attempt, ranks=self._ranks) if look else []
        for stem in (self.rings / live.name for live in found):
            if stem not in self._followed and stem not in self._retired:
                try:
                    self._followed[stem] = _Ring(stem, self.problems, self._seal_bytes)
                except (FormatError, OSError):
                    continue  # its writer has not finished the header: next time
        for stem, ring in list(self._followed.items()):
            records = ring.take(final=final)
            if len(records):
                self._call(self.listeners, ring.reader.header, records)
            if self._drains % round(FAR_S / DRAIN_S) == 0:
                ring.flush()
            if ring.size > ring.seal_bytes and ring.seal():
                self._rotate()
            if ring.quiet >= 5 and not final and _gone(ring.reader.header.pid):
                ring.take(final=True)
                ring.retire()
                self._retired.add(stem)
                del self._followed[stem]
        if not final:
            self._call(self.lookers, [ring.reader for ring in self._followed.values()])
        self._drains += 1
        if final or self._drains % CHORES_EVERY == 0:
            self._call(self.chores)

    def _call(self, called: Sequence[Callable[..., None]], *arguments: Any) -> None:
        """Call each one; what one of them raises is kept, and costs the others nothing."""
        for one in called:
            with self.problems.kept(f"what {getattr(one, '__qualname__', 'a listener')} writes"):
                one(*arguments)

    def _rotate(self) -> None:
        """Remove the oldest sealed pieces while all together exceed the budget."""
        pieces = sorted((p.stat().st_mtime_ns, p, p.stat().st_size) for p in self.rings.glob("*.sealed"))
        total = sum(size for _, _, size in pieces)
        for _, piece, size in pieces:
            if total <= self._budget:
                return
            if not piece.name.endswith(".00000.sealed"):
                piece.unlink(missing_ok=True)
                total -= size

    def _run(self) -> None:
        while not self._done.wait(DRAIN_S):
            with self.problems.kept(RECORDS):
                self.drain()


def _gone(pid: int) -> bool:
    return not os.path.exists(f"/proc/{pid}")


def prune_windows(windows: Path, budget_bytes: int, ranks: Set[int] | None = None) -> None:
    """Remove the oldest deep windows (of `ranks`, None = all) beyond the budget, all but each rank's newest."""
    files = sorted((p.stat().st_mtime_ns, p.stat().st_size, p) for p in windows_of(windows, ranks))
    newest = {path.name.partition("-w")[0]: path.name.partition(".")[0] for _, _, path in files}
    total = sum(size for _, size, _ in files)
    for _, size, path in files:
        if total <= budget_bytes:
            return
        if path.name.partition(".")[0] not in newest.values():
            path.unlink(missing_ok=True)
            total -= size
