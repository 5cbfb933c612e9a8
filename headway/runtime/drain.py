"""Takes records out of live rings while the ranks run, within a budget of bytes.

The launcher drains every ring a few times a second, so that nothing is
overwritten. A full spool is sealed; beyond the budget the oldest sealed
pieces go first, but for each process's first one, which holds its start-up.
A ring whose process is gone makes way for an empty file: its header stays as
JSON. Deep windows have a budget of the same size; the oldest go first there too.

>>> import tempfile
>>> drainer = Drainer(Path(tempfile.mkdtemp()), attempt=0, budget_bytes=1 << 20)
>>> drainer.start(); drainer.stop(); drainer.failure is None
True
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence, Set
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import FormatError
from headway.runtime.finalise import windows_of
from headway.trace import spool
from headway.trace.records import RECORD_DTYPE, RingHeader, RingReader
from headway.trace.ring_folders import live_folder

DRAIN_S = 0.2
"""Seconds between drains: a ring of 16384 records holds that much at 80,000 records a second."""

SEAL_BYTES = 4 << 20

CHORES_EVERY = 25
"""Drains between two rounds of the chores."""

FAR_BYTES, FAR_S = 1 << 20, 5.0
"""Where spools do not lie beside the rings, records are held until there are so many bytes, or for so long."""

Listener = Callable[[RingHeader, NDArray[np.void]], None]
Looker = Callable[[Sequence[RingReader]], None]


class _Ring:
    """One ring being drained."""

    def __init__(self, stem: Path) -> None:
        self.reader = RingReader(spool.ring_of(stem))
        self.stem = stem
        near = self.reader.path.parent == stem.parent
        self.spool = stem.with_suffix(".spool").open("ab", buffering=0 if near else FAR_BYTES)
        self.size = self.spool.tell()
        self.sealed = len(spool.sealed_pieces(self.stem))
        self.quiet = 0

    def take(self, *, final: bool = False) -> NDArray[np.void]:
        """Return new records after spooling them."""
        records = self.reader.drain(final=final)
        if len(records):
            self.spool.write(records.tobytes())
            self.size += records.nbytes
        self.quiet = 0 if len(records) else self.quiet + 1
        return records

    def seal(self) -> None:
        """Turn the spool into a sealed piece; a crash in between leaves doubles, which the reader drops."""
        self.spool.flush()
        raw = self.stem.with_suffix(".spool")
        piece = self.stem.with_name(f"{self.stem.name}.{self.sealed:05d}.sealed")
        draft = piece.with_suffix(".draft")
        draft.write_bytes(spool.pack(np.fromfile(raw, RECORD_DTYPE)))
        os.replace(draft, piece)
        self.spool.truncate(0)
        self.sealed, self.size = self.sealed + 1, 0

    def retire(self) -> None:
        """Keep the header as JSON and put an empty file in the place of a process's ring; its name stays taken.

        The ring itself is never shortened: whoever has it mapped would end with SIGBUS.
        """
        spool.write_header(self.stem, self.reader.header)
        self.close()
        blank = self.reader.path.with_suffix(".blank")
        with contextlib.suppress(FileNotFoundError):  # somebody removed the folder: no name is left to keep
            blank.touch()
            os.replace(blank, self.reader.path)

    def leave(self) -> None:
        """Let go of the ring; of one that somebody removed meanwhile the header is kept."""
        if not self.reader.path.exists():
            spool.write_header(self.stem, self.reader.header)
        self.close()

    def close(self) -> None:
        self.spool.close()
        self.reader.close()


class Drainer:
    """A thread that drains the rings of one attempt."""

    def __init__(
        self,
        rings: Path,
        *,
        attempt: int,
        budget_bytes: int,
        ranks: Set[int] | None = None,
        earlier: Drainer | None = None,
    ) -> None:
        self.rings = rings
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
        self.failure: BaseException | None = None
        """What stopped the drain; the rings themselves then still hold their newest records."""

    def start(self) -> None:
        """Start draining."""
        self._thread = threading.Thread(target=self._run, name="headway-drain", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Drain a last time, with every writer gone, and stop."""
        self._done.set()
        if self._thread is not None:
            self._thread.join()
        if self.failure is None:
            self._try(lambda: self.drain(final=True))
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
                    self._followed[stem] = _Ring(stem)
                except (FormatError, OSError):
                    continue  # its writer has not finished the header: next time
        for stem, ring in list(self._followed.items()):
            records = ring.take(final=final)
            if len(records):
                for listener in self.listeners:
                    listener(ring.reader.header, records)
            if self._drains % round(FAR_S / DRAIN_S) == 0:
                ring.spool.flush()
            if ring.size > self._seal_bytes:
                ring.seal()
                self._rotate()
            if ring.quiet >= 5 and not final and _gone(ring.reader.header.pid):
                ring.take(final=True)
                ring.retire()
                self._retired.add(stem)
                del self._followed[stem]
        for looker in () if final else self.lookers:
            looker([ring.reader for ring in self._followed.values()])
        self._drains += 1
        for chore in self.chores if final or self._drains % CHORES_EVERY == 0 else ():
            chore()

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
            self._try(self.drain)
            if self.failure is not None:
                return

    def _try(self, action: Callable[[], None]) -> None:
        """Keep a failure (a full disk) for the launcher to report: it must never end the job."""
        try:
            action()
        except Exception as cause:
            self.failure = cause


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
