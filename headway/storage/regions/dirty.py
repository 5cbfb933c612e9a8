"""Which pages of a buffer were written since they were last taken.

Use it where state in memory changes in place and something must follow the
changes without reading all of it: checksums and parity of a protected region,
deltas between checkpoints. Three back-ends, one literal table:

    pagemap_scan    the kernel notes each page's first store (Linux 6.7+, no privilege); every store counts,
                    also the kernel's own, of this process only
    explicit        writers say what they write: `with tracker.writing(offset, num_bytes): ...`
    rehash          hashes everything at each question; sees any writer, in any process, but no store that puts
                    the old bytes back

"auto" takes pagemap_scan where its self-test passes, else rehash, and says so
in the log. Soft-dirty bits are never used: many kernels lack them and report
every page as clean. Ranges are int64 `[n, 2]` in pages of `PAGE_BYTES`, end
exclusive. With transparent huge pages a first store may show as 2 MiB.

>>> import mmap
>>> memory = mmap.mmap(-1, 8 * PAGE_BYTES)
>>> with DirtyTracker(memory, backend="explicit") as tracker:
...     with tracker.writing(PAGE_BYTES, 10):
...         memory[PAGE_BYTES : PAGE_BYTES + 10] = b"0123456789"
...     tracker.peek().tolist(), tracker.take().tolist(), tracker.take().tolist()
([[1, 2]], [[1, 2]], [])
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import HeadwayError, InputError
from headway.core.tables import pick
from headway.storage.digests import block_digests
from headway.storage.regions.pagemap import PAGE_BYTES, Runs, WrittenPages, self_test

if TYPE_CHECKING:
    from typing_extensions import Buffer

_log = logging.getLogger(__name__)


class DirtyPageTracker(Protocol):
    """How written pages are found. Pages are counted from the start of the buffer."""

    def runs(self, first: int, end: int, *, clear: bool) -> Runs:
        """Return the pages of `[first, end)` written since they were cleared; clear those, if so told."""
        ...

    def mark(self, first: int, end: int) -> None:
        """Note that pages were written, where nobody else does."""
        ...

    def hold(self, first: int, end: int, change: int) -> None:
        """Count writers that begin (+1) and end (-1) on pages, where nobody else does."""
        ...

    def close(self) -> None:
        """Give back what it took."""
        ...


class DirtyTracker:
    """Follows the stores into `buf`: a writable buffer that begins and ends on page boundaries (an mmap does).

    All pages are clean at first. The buffer cannot be unmapped before
    `close`. It belongs to the process that made it: a forked child may not
    ask, and what a child stores is seen by "rehash" only.
    """

    def __init__(self, buf: Buffer, backend: str = "auto") -> None:
        """Begin to follow. Raises `InputError` on a buffer that is not whole pages, or a back-end that fails here."""
        self._bytes = whole_pages(buf)
        self.num_pages = self._bytes.size // PAGE_BYTES
        """Pages of the buffer, `PAGE_BYTES` each."""
        self.backend, self._back = _begun(self._bytes, backend)
        """Name of the back-end in use."""
        self._pid = os.getpid()

    def peek(self, first: int = 0, end: int | None = None) -> Runs:
        """Return the pages (of `[first, end)`) written since they were last taken."""
        return self._asked().runs(first, self.num_pages if end is None else end, clear=False)

    def take(self) -> Runs:
        """Return the written pages and make them clean, atomically page by page.

        A store is in this answer, and then its bytes are in memory, or it is
        in a later one.
        """
        return self._asked().runs(0, self.num_pages, clear=True)

    def mark(self, offset: int, num_bytes: int) -> None:
        """Note that bytes were written; needed by "explicit" only, harmless elsewhere.

        A mark covers stores only while nobody takes: a store after the mark
        may be missed, one before it looks clean in between. Where passes run
        beside the writers, use `writing`.
        """
        self._asked().mark(*self._pages(offset, num_bytes))

    @contextmanager
    def writing(self, offset: int, num_bytes: int) -> Iterator[None]:
        """Hold the pages of a range dirty while the block writes there, whoever takes meanwhile."""
        first, end = self._pages(offset, num_bytes)
        back = self._asked()
        back.hold(first, end, +1)
        try:
            yield
        finally:
            back.mark(first, end)  # before it is let go: no moment in between looks clean
            back.hold(first, end, -1)

    def close(self) -> None:
        """Stop; calling it again does nothing."""
        back, self._back = self._back, None
        if back is not None:
            back.close()
            self._bytes = np.empty(0, np.uint8)  # the buffer may be unmapped now

    def __enter__(self) -> DirtyTracker:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def _asked(self) -> DirtyPageTracker:
        """Return the back-end, if this process may still ask it."""
        if self._back is None:
            raise InputError("this tracker is closed; ask it before close().")
        if self._pid != os.getpid():
            raise HeadwayError(
                f"this tracker follows process {self._pid}, not {os.getpid()}. Make one in the process that writes."
            )
        return self._back

    def _pages(self, offset: int, num_bytes: int) -> tuple[int, int]:
        if min(offset, num_bytes) < 0 or offset + num_bytes > self._bytes.size:
            raise InputError(
                f"bytes {offset}..{offset + num_bytes} do not lie in a buffer of {self._bytes.size}. Mark inside of it."
            )
        return offset // PAGE_BYTES, -(-(offset + num_bytes) // PAGE_BYTES)


class _PagemapScan:
    """The kernel notes the first store to each page."""

    def __init__(self, bytes_: NDArray[np.uint8]) -> None:
        self._written = WrittenPages(bytes_.ctypes.data, bytes_.size)

    def runs(self, first: int, end: int, *, clear: bool) -> Runs:
        return self._written.runs(first, end, clear=clear)

    def mark(self, first: int, end: int) -> None:
        pass  # seen already

    def hold(self, first: int, end: int, change: int) -> None:
        pass  # a store after a take is seen again

    def close(self) -> None:
        self._written.close()


class _Explicit:
    """Writers say what they write."""

    def __init__(self, bytes_: NDArray[np.uint8]) -> None:
        self._marked = np.zeros(bytes_.size // PAGE_BYTES, np.bool_)
        self._writers = np.zeros(bytes_.size // PAGE_BYTES, np.int32)
        self._lock = threading.Lock()

    def runs(self, first: int, end: int, *, clear: bool) -> Runs:
        with self._lock:
            dirty = self._marked[first:end] | (self._writers[first:end] > 0)
            if clear:
                self._marked[first:end] = False
        return runs_of(np.flatnonzero(dirty) + first)

    def mark(self, first: int, end: int) -> None:
        with self._lock:
            self._marked[first:end] = True

    def hold(self, first: int, end: int, change: int) -> None:
        with self._lock:
            self._writers[first:end] += change

    def close(self) -> None:
        pass  # nothing was taken


class _Rehash:
    """Pages whose digest is not what it was when they were last taken."""

    def __init__(self, bytes_: NDArray[np.uint8]) -> None:
        self._bytes = bytes_
        self._digests = block_digests(bytes_.data, PAGE_BYTES)

    def runs(self, first: int, end: int, *, clear: bool) -> Runs:
        now = block_digests(self._bytes[first * PAGE_BYTES : end * PAGE_BYTES].data, PAGE_BYTES)
        changed = np.flatnonzero(now != self._digests[first:end])
        if clear:
            self._digests[first:end] = now
        return runs_of(changed + first)

    def mark(self, first: int, end: int) -> None:
        pass  # seen by its digest

    def hold(self, first: int, end: int, change: int) -> None:
        pass  # a store after a take changes the digest again

    def close(self) -> None:
        self._bytes = np.empty(0, np.uint8)


BACKENDS: dict[str, Callable[[NDArray[np.uint8]], DirtyPageTracker]] = {
    "pagemap_scan": _PagemapScan,
    "explicit": _Explicit,
    "rehash": _Rehash,
}
"""Every way to find written pages."""


def works(backend: str) -> str:
    """Return why a back-end does not work on this host, "" where it does."""
    pick(BACKENDS, backend, "back-end")
    reasons = self_test() if backend == "pagemap_scan" else {}
    return "; ".join(f"{kind} memory: {reason}" for kind, reason in reasons.items() if reason)


def _begun(bytes_: NDArray[np.uint8], backend: str) -> tuple[str, DirtyPageTracker | None]:
    """Return the name and the back-end that follows these bytes."""
    name = "pagemap_scan" if backend == "auto" else backend
    reason = works(name)
    if not reason:
        try:
            return name, BACKENDS[name](bytes_)
        except OSError as fault:  # this very memory is refused, of a kind that the self-test does not know
            reason = str(fault)
    if backend != "auto":
        raise InputError(
            f"the back-end {name!r} does not work here (Linux {os.uname().release}): {reason}. It needs Linux 6.7 and "
            "userfaultfd allowed; use 'explicit' or 'rehash'."
        )
    _log.warning("pages are followed by hashing all of them (rehash): Linux %s: %s", os.uname().release, reason)
    return "rehash", _Rehash(bytes_)


def whole_pages(buf: Buffer) -> NDArray[np.uint8]:
    """Return the bytes of a buffer, shared with it. Raises `InputError` unless it is whole, writable pages."""
    view = memoryview(buf)
    if view.readonly or not view.c_contiguous:
        raise InputError("the buffer is read-only or not contiguous. Pass a writable mmap, or an array over one.")
    bytes_ = np.frombuffer(view, np.uint8)
    if bytes_.ctypes.data % PAGE_BYTES or bytes_.size % PAGE_BYTES or not bytes_.size:
        raise InputError(
            f"the buffer has {bytes_.size} bytes at {bytes_.ctypes.data:#x}; it must begin and end on page boundaries "
            f"(multiples of {PAGE_BYTES}). Pass an mmap of whole pages."
        )
    return bytes_


def runs_of(pages: NDArray[np.int64]) -> Runs:
    """Return the ranges that ascending page numbers form.

    >>> runs_of(np.array([1, 2, 3, 7])).tolist()
    [[1, 4], [7, 8]]
    """
    starts = np.flatnonzero(np.diff(pages, prepend=-2) != 1)
    ends = np.append(starts[1:], len(pages))[: len(starts)]
    return np.stack([pages[starts], pages[ends - 1] + 1], axis=1)


def pages_of(runs: Runs) -> NDArray[np.int64]:
    """Return the page numbers in some ranges, ascending.

    >>> pages_of(np.array([[1, 4], [7, 8]])).tolist()
    [1, 2, 3, 7]
    """
    lengths = runs[:, 1] - runs[:, 0]
    before = np.cumsum(lengths) - lengths
    return np.repeat(runs[:, 0] - before, lengths) + np.arange(int(lengths.sum()), dtype=np.int64)
