"""A file mapped into memory whose pages get checksums and parity behind the writers' backs (Vilamb).

Use it for state that is changed in place and lives long: a cache on NVMe, an
optimizer's state offloaded to a disk, an arena between saves. Writers store
into `.buf` and do nothing else. Every `period_s` a pass brings the checksums
of the pages that were written, and the parity of their stripes, up to date;
so a page costs one pass however often it was written in between. What a page
is worth meanwhile: a flip in a clean page of a clean stripe is found by the
next scrub and repaired bit for bit; one in a dirty page, or beside one, is
not. `vulnerable()` counts those pages, `headway bench mttdl` says
what they cost.

A pass keeps four rules, in this order:

    I1  a page is made clean before it is hashed, never after: a store meanwhile makes it dirty again
    I2  the shadow bitmap names it, on disk, before it is made clean (one written in between: before its checksum
        changes): a crash in the middle of a pass never forgets it
    I3  a scrub believes a mismatch only if the page was clean before and is clean after
    I4  parity is used only while no page of its stripe is dirty

A process that dies leaves its region open. Whoever opens it next hashes all of
it: pages in the shadow, and pages that do not match, are unverified after a
crash; they are adopted as they are, counted in `.opened`, and never rebuilt
from parity that may be older. Files: see `file`.

>>> import tempfile
>>> with ProtectedRegion(tempfile.mkdtemp() + "/state", num_bytes=16 * 4096, period_s=math.inf) as region:
...     region.buf[5000:5003] = b"abc"
...     dirty = region.vulnerable()
...     dirty, region.update().pages, region.vulnerable(), region.scrub().status
(4, 1, 0, 'good')

Source: Vilamb (CMU-PDL-20-101, arXiv 2004.09619); dirty bits come from
`dirty.DirtyTracker` instead of the page table of a DAX mapping.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import os
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import BackgroundError, Closing, DamageError, HeadwayError, InputError
from headway.core.wire.pace import RateLimiter
from headway.storage.regions.dirty import DirtyTracker, pages_of
from headway.storage.regions.file import Pages, RegionFile, create
from headway.storage.regions.layout import Geometry, sidecar_of
from headway.storage.regions.pagemap import PAGE_BYTES, Runs, make_read_only
from headway.storage.regions.scrub import ScrubReport, scrub

if TYPE_CHECKING:
    from typing_extensions import Buffer

_log = logging.getLogger(__name__)

LAST_PASSES = 4
"""Passes that `close` makes before it says that somebody still writes."""


@dataclass(frozen=True, slots=True)
class PassStats:
    """What one pass did."""

    pages: int
    """Pages whose checksums were brought up to date."""
    stripes: int
    """Stripes whose parity was."""
    again: int
    """Pages that were written again meanwhile: the next pass does them."""
    elapsed_s: float
    """How long it took."""


@dataclass(frozen=True, slots=True)
class OpenReport:
    """How the region was found when it was opened."""

    clean: bool
    """It was new, or had been closed."""
    shadow: Pages
    """[n] Pages that were known to be dirty when the process died."""
    unverified: Pages
    """[n] Pages that did not match their checksum after a crash: written since the last pass, or damaged, nobody can
    tell. They were adopted as they are."""


class ProtectedRegion(Closing):
    """A mapped file with checksums, parity and a thread that keeps them up. Close it, or use a `with` block.

    One process opens it at a time, and its stores are what the tracker sees;
    with the back-end "explicit" every store stands in `with
    region.writing(...)` or goes through `write`. With "rehash" a flip looks
    like a store while the region is open: damage is then found only between a
    close and the next scrub after opening, and `vulnerable` counts all pages.
    A forked child may read `buf`; a store there is a segmentation fault.
    Passes come by themselves, scrubs do not: call `scrub` or `repair` from
    time to time, from any thread; writers and passes go on meanwhile.
    """

    _gives_way = HeadwayError

    def __init__(
        self,
        path: str | Path,
        *,
        page: int = 4096,
        stripe: int = 4,
        parity: int = 1,
        period_s: float = 1.0,
        backend: str = "auto",
        num_bytes: int | None = None,
        durable: bool = True,
    ) -> None:
        """Open a region; make it, of `num_bytes` zeros, where there is no file, or protect a file that has no sidecar.

        A `period_s` of infinity means no thread: call `update`. Without
        `durable` passes do not wait for the disk: they then survive the death
        of the process, but not of the machine. Raises `InputError` on sizes
        that cannot work or differ from those it was made with, `DamageError`
        on a file of the wrong length.
        """
        if not period_s > 0:
            raise InputError(f"period_s is {period_s}; passes need time between them. Pass more than 0 s.")
        self.path, self.period_s, self._durable = Path(path), period_s, durable
        self._file = _opened(self.path, page, stripe, parity, num_bytes)
        with contextlib.ExitStack() as undo:
            undo.callback(self._file.close)
            self._map = mmap.mmap(self._file.fd, self._file.geometry.num_bytes, mmap.MAP_SHARED)
            with contextlib.suppress(OSError):  # a kernel without huge pages refuses, and needs no telling
                self._map.madvise(mmap.MADV_NOHUGEPAGE)  # or one store would make 512 pages dirty
            self._tracker = DirtyTracker(self._map, backend)
            undo.callback(self._tracker.close)
            self.opened = self._recover()
            """How the region was found."""
            undo.pop_all()
        bytes_ = np.frombuffer(self._map, np.uint8)
        self._address = bytes_.ctypes.data
        self._file.follow(bytes_)
        self._view = memoryview(self._map)
        self._shadow = np.zeros(self._file.geometry.num_pages, np.bool_)
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._pid, self._closed = os.getpid(), False
        _OPEN.add(self)
        self._thread = threading.Thread(target=self._run, name="headway-region", daemon=True)
        if math.isfinite(period_s):
            self._thread.start()

    @property
    def buf(self) -> memoryview:
        """The region's bytes, writable; read-only in a forked child."""
        if self._pid != os.getpid():
            return self._view.toreadonly()
        self._check()
        return self._view

    @property
    def geometry(self) -> Geometry:
        """Sizes of the region."""
        return self._file.geometry

    @property
    def backend(self) -> str:
        """How written pages are found: a name of `dirty.BACKENDS`."""
        return self._tracker.backend

    @contextlib.contextmanager
    def writing(self, offset: int, num_bytes: int) -> Iterator[None]:
        """Hold a range dirty while the block stores there; needed by the back-end "explicit" only."""
        self._check()
        with self._tracker.writing(offset, num_bytes):
            yield

    def write(self, offset: int, data: Buffer) -> None:
        """Store `data` at `offset`, with any back-end."""
        view = memoryview(data).cast("B")
        with self.writing(offset, len(view)):
            self._view[offset : offset + len(view)] = view

    def update(self) -> PassStats:
        """Make one pass now. Raises `DamageError` when a file was cut short, `BackgroundError` after a failed pass."""
        with self._lock:
            self._check()
            return self._pass()

    def scrub(self, rate_mb_s: float | None = None, *, repair: bool = False) -> ScrubReport:
        """Compare every clean page with its checksum, at most `rate_mb_s` (10**6 bytes) per second.

        With `repair` what can be rebuilt is put back at once. Damage raises
        nothing: look at the report. Passes go on meanwhile.
        """
        self._check()
        if rate_mb_s is not None and not rate_mb_s > 0:
            raise InputError(f"rate_mb_s is {rate_mb_s}; pass more than 0, or None for no limit.")
        pace = RateLimiter(0.0 if rate_mb_s is None else rate_mb_s * 1e6)
        return scrub(self._file, self._dirty, lock=self._lock, pace=pace, repair=repair)

    def repair(self) -> ScrubReport:
        """Scrub, and put back what can be rebuilt; what cannot be is reported and left as it is.

        Only bytes that differ are written, and only while the whole stripe is
        clean; a store to those very bytes within the microsecond between the
        last look and the write may be lost.
        """
        return self.scrub(repair=True)

    def vulnerable(self) -> int:
        """Return how many pages a flip would hurt for good: those in a stripe with a dirty page."""
        with self._lock:
            self._check()
            g = self.geometry
            if self.backend == "rehash":
                return g.num_pages
            stripes = np.unique(np.flatnonzero(self._dirty(0, g.num_pages)) // g.stripe)
            short = g.num_stripes * g.stripe - g.num_pages if g.num_stripes - 1 in stripes else 0
            return len(stripes) * g.stripe - short

    def close(self) -> None:
        """Make the last passes, make all durable, and mark the region as closed; calling it again does nothing.

        Writers must have stopped: `InputError` says when they have not.
        Arrays over `buf` that live on can be read; a store through them is a
        segmentation fault. After a failed pass the region stays marked as
        open, and the failure is raised.
        """
        if self._closed or self._pid != os.getpid():
            return
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        with self._lock:
            try:
                self._check()
                still_written = not self._quiet()
                if not still_written:
                    self._finish()
            except BaseException:
                self._release()
                raise
            if still_written:
                raise InputError(f"{self.path} is still being written to. Stop the writers, then close() again.")
            self._release()

    def _pass(self) -> PassStats:
        """Do the steps of a pass."""
        begin_s = time.monotonic()
        self._file.check_sizes()
        done = dict(self._steps())
        pages, stripes, again = (done.get(step, 0) for step in ("claimed", "hashed", "settled"))
        return PassStats(pages, stripes, again, time.monotonic() - begin_s)

    def _steps(self) -> Iterator[tuple[str, int]]:
        """Do a pass step by step, and say after each which it was; a crash may come, and stores do, at any point."""
        self._note(self._tracker.peek())  # I2: named on disk first
        yield "noted", int(self._shadow.sum())
        if not self._shadow.any():
            return
        self._note(self._tracker.take())  # I1: made clean, then hashed
        work = np.flatnonzero(self._shadow)  # also what a pass that failed left behind
        yield "claimed", len(work)
        stripes = self._file.refresh(work)
        yield "hashed", stripes
        self._persist()
        self._shadow[:] = False
        self._shadow[self._pages(self._tracker.peek())] = True
        self._file.set_shadow(self._shadow)
        self._persist()
        yield "settled", int(self._shadow.sum())

    def _note(self, runs: Runs) -> None:
        """Add pages to the shadow, on disk too if it grew."""
        pages = self._pages(runs)
        if not self._shadow[pages].all():
            self._shadow[pages] = True
            self._file.set_shadow(self._shadow)
            self._persist()

    def _persist(self) -> None:
        if self._durable:
            self._file.persist()

    def _pages(self, runs: Runs) -> Pages:
        """Return the region's pages that some of the system's pages touch."""
        per_page = self.geometry.page // PAGE_BYTES
        return pages_of(runs) if per_page == 1 else np.unique(pages_of(runs) // per_page)

    def _dirty(self, first: int, end: int) -> NDArray[np.bool_]:
        """Return which of the pages are in the shadow or were written since."""
        self._check()
        per_page = self.geometry.page // PAGE_BYTES
        dirty = self._shadow[first:end].copy()
        dirty[self._pages(self._tracker.peek(first * per_page, end * per_page)) - first] = True
        return dirty

    def _recover(self) -> OpenReport:
        """Mark the region as open; after a crash adopt what cannot be verified."""
        file, none = self._file, np.empty(0, np.int64)
        clean = not file.header.is_open
        shadow = none if clean else np.flatnonzero(file.shadow())
        file.set_header(is_open=True, epoch=file.header.epoch + 1)
        unverified = none
        if not clean:
            unverified = self._adopt(shadow)
            _log.warning(
                "%s was not closed: %d pages were dirty, %d do not match their checksums; all are adopted as they are.",
                self.path, len(shadow), len(unverified),
            )  # fmt: skip
        file.set_shadow(np.zeros(file.geometry.num_pages, np.bool_))
        file.persist()
        return OpenReport(clean, shadow, unverified)

    def _adopt(self, shadow: Pages) -> Pages:
        """Bring checksums and parity up to the data after a crash; return the pages that did not match."""
        file, g = self._file, self._file.geometry
        wrong = np.concatenate([bad for _, bad in file.examine(np.arange(g.num_stripes))])
        unverified = np.flatnonzero(wrong[:, : g.stripe].reshape(-1)[: g.num_pages])
        stale = np.flatnonzero(wrong[:, g.stripe :].any(axis=1))  # killed between parity and checksums, perhaps
        file.refresh(np.unique(np.concatenate([shadow, unverified, stale * g.stripe])))
        file.reguard(stale)
        file.persist()  # before the shadow forgets them
        return unverified

    def _quiet(self) -> bool:
        """Make passes until nothing is dirty; say whether that came."""
        return any(self._pass().again == 0 and not self._tracker.peek().size for _ in range(LAST_PASSES))

    def _finish(self) -> None:
        """See that nothing can become dirty any more, make all durable, and mark the region as closed."""
        make_read_only(self._address, self.geometry.num_bytes)
        self._pass()
        self._file.persist_data()
        self._file.persist()
        self._file.set_header(is_open=False, epoch=self._file.header.epoch)

    def _release(self) -> None:
        """Let go of map and files, whatever state they are in."""
        self._closed = True
        _OPEN.discard(self)
        self._tracker.close()
        self._file.follow(None)
        with contextlib.suppress(BufferError):  # arrays over it live on: the map goes with the last of them
            self._view.release()
            self._map.close()
        self._file.close()

    def _run(self) -> None:
        """Make a pass every period until told to stop, or one fails."""
        while not self._stop.wait(self.period_s):
            try:
                with self._lock:
                    self._pass()
            except BaseException as failure:  # nothing may be lost here: it surfaces at the caller's next call
                self._failure = failure
                return

    def _check(self) -> None:
        """Raise what happened behind the caller's back."""
        if self._closed:
            raise InputError(f"the region {self.path} is closed; open it again.")
        if self._pid != os.getpid():
            raise HeadwayError(
                f"the region {self.path} belongs to process {self._pid}, not {os.getpid()}. Open it in one process."
            )
        if self._failure is not None:
            raise BackgroundError(
                f"a pass over {self.path} failed: {self._failure}. Its redundancy is not kept up any more: close it, "
                "remove the cause, and open it again."
            ) from self._failure


def _opened(path: Path, page: int, stripe: int, parity: int, num_bytes: int | None) -> RegionFile:
    """Return the files of a region, made if need be, of the sizes that were asked for."""
    known = sidecar_of(path).exists()
    if not path.exists():
        if known:
            raise DamageError(f"{path} is missing, but its sidecar is there. Put the file back, or remove the sidecar.")
        if num_bytes is None:
            raise InputError(f"{path} does not exist. Pass num_bytes to make it.")
        create(path, Geometry(num_bytes, page, stripe, parity))
    elif not known:
        size = path.stat().st_size
        if num_bytes not in (None, size):
            raise InputError(
                f"{path} has {size} bytes, not num_bytes={num_bytes}. Drop num_bytes to protect it as it is."
            )
        create(path, Geometry(size, page, stripe, parity))
    file = RegionFile(path)
    g = file.geometry
    if (g.page, g.stripe, g.parity, g.num_bytes) != (page, stripe, parity, num_bytes or g.num_bytes):
        file.close()
        raise InputError(
            f"{path} was made with page={g.page}, stripe={g.stripe}, parity={g.parity}, num_bytes={g.num_bytes}. Pass "
            "those, or remove its sidecar to protect it anew."
        )
    return file


_OPEN: weakref.WeakSet[ProtectedRegion] = weakref.WeakSet()
"""Regions open in this process."""


def _forked() -> None:
    """In a forked child: make what it inherited readable only. Its stores would change the file unseen."""
    for region in list(_OPEN):
        make_read_only(region._address, region.geometry.num_bytes)
        region._file.forget()


os.register_at_fork(after_in_child=_forked)
