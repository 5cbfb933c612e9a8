"""Scrub and repair of a protected region: find pages that changed without a store, rebuild them from parity.

A page is judged only if it was clean before its checksum was computed and
still is afterwards (a store in between is no damage); it is rebuilt only if
its whole stripe was clean, for the parity of a dirty stripe is old. While a
region is open, `ProtectedRegion.scrub` and `.repair` call `scrub` with what
is dirty at the moment; offline, when nothing is, `inspect` does. Pages are
read through the page cache: what the medium holds beneath a cached page is
met once the cache lets it go, so `inspect` asks it to.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.core.wire.pace import RateLimiter
from headway.storage.regions.file import Pages, RegionFile
from headway.storage.regions.layout import Geometry

Dirty = Callable[[int, int], NDArray[np.bool_]]
"""First page and end -> which of these pages are dirty now: `[end - first]`."""


@dataclass(frozen=True, slots=True)
class ScrubReport:
    """What a scrub saw. Pages are page numbers, ascending."""

    checked_pages: int
    """Pages whose bytes were compared with their checksum."""
    skipped_pages: int
    """Pages that were dirty: neither right nor wrong."""
    corrupt: Pages
    """[n] Pages of data that changed without a store."""
    corrupt_sidecar: Pages
    """[n] Stripes of which parity or checksums changed in the sidecar."""
    repairing: bool
    """It was told to put back what can be rebuilt, parity too."""
    repaired: Pages
    """[n] Corrupt pages of data that were rebuilt and put back."""
    unrepairable: Pages
    """[n] Corrupt pages of data that cannot be rebuilt: too many in one stripe, or the stripe was dirty. They were left
    as they are."""
    num_bytes: int
    """Bytes of data read."""
    elapsed_s: float
    """How long it took."""

    @property
    def status(self) -> str:
        """What is to be said of the region now: "good", "repairable" or "lost"."""
        if self.unrepairable.size:
            return "lost"
        damaged = self.corrupt.size or self.corrupt_sidecar.size
        return "repairable" if damaged and not self.repairing else "good"

    def to_json(self) -> dict[str, object]:
        """Return the report as JSON holds it."""
        pages = {
            name: getattr(self, name).tolist() for name in ("corrupt", "corrupt_sidecar", "repaired", "unrepairable")
        }
        return {
            "checked_pages": self.checked_pages, "skipped_pages": self.skipped_pages, **pages,
            "checked_bytes": self.num_bytes, "elapsed_s": self.elapsed_s,
        }  # fmt: skip


@dataclass(slots=True)
class _Found:
    """What a scrub has seen so far."""

    skipped: int = 0
    corrupt: list[int] = field(default_factory=list)
    sidecar: list[int] = field(default_factory=list)
    repaired: list[int] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)


def scrub(
    file: RegionFile,
    dirty: Dirty,
    *,
    lock: AbstractContextManager[object] | None = None,
    pace: RateLimiter | None = None,
    repair: bool = False,
) -> ScrubReport:
    """Compare every clean page of a region with its checksum, some stripes at a time under `lock`.

    With `repair` what can be rebuilt is written back at once, durably. A
    report is returned either way; damage raises nothing.
    """
    begin_s = time.monotonic()
    lock, pace, found = lock or nullcontext(), pace or RateLimiter(), _Found()
    g = file.geometry
    for first in range(0, g.num_stripes, file.batch):
        stripes = np.arange(first, min(first + file.batch, g.num_stripes))
        with lock:
            _scrub_batch(file, dirty, stripes, found, repair)
        pace.wait(len(stripes) * g.stripe * g.page)
    return ScrubReport(
        g.num_pages - found.skipped, found.skipped,
        _pages(found.corrupt), _pages(found.sidecar), repair, _pages(found.repaired), _pages(found.lost),
        g.num_bytes, time.monotonic() - begin_s,
    )  # fmt: skip


def _pages(numbers: list[int]) -> Pages:
    return np.array(numbers, np.int64)


def _scrub_batch(file: RegionFile, dirty: Dirty, stripes: Pages, found: _Found, repair: bool) -> None:
    """Check stripes that follow each other, and repair them if so told."""
    width = file.geometry.stripe
    unsure = _unsure(file, dirty, stripes)
    ((_, wrong),) = file.examine(stripes)
    if wrong.any():
        unsure |= _unsure(file, dirty, stripes)  # a store while we read is no damage
        wrong[:, :width] &= ~unsure
    found.skipped += int(unsure.sum())
    for row in np.flatnonzero(wrong.any(axis=1)):
        stripe = int(stripes[row])
        pages = (np.flatnonzero(wrong[row, :width]) + stripe * width).tolist()
        good = not unsure[row].any() and _mended(file, dirty, stripe, wrong[row], repair)
        if wrong[row, width:].any():
            found.sidecar.append(stripe)
        if wrong[row, -1] and good:
            continue  # its checksums were damaged, and the data is right
        found.corrupt += pages
        if not good:
            found.lost += pages
        elif repair:
            found.repaired += pages


def _mended(file: RegionFile, dirty: Dirty, stripe: int, wrong: NDArray[np.bool_], repair: bool) -> bool:
    """Say whether a clean stripe can be put right; do it, if so told, and read it again."""
    whole = file.rebuilt(stripe, wrong)
    one = np.array([stripe])
    if whole is None or _unsure(file, dirty, one).any():
        return False
    if repair:
        file.put_back(stripe, whole)
        file.persist_data()
        file.persist()
        ((_, still),) = file.examine(one)
        return not still.any()
    return True


def _unsure(file: RegionFile, dirty: Dirty, stripes: Pages) -> NDArray[np.bool_]:
    """Return which pages of stripes that follow each other are dirty: `[n, stripe]`."""
    g = file.geometry
    first, end = int(stripes[0]) * g.stripe, (int(stripes[-1]) + 1) * g.stripe
    answer = np.zeros(end - first, np.bool_)
    stop = min(end, g.num_pages)
    answer[: stop - first] = dirty(first, stop)
    return answer.reshape(-1, g.stripe)


def nothing_dirty(first: int, end: int) -> NDArray[np.bool_]:
    """Say that no page is dirty: so it is after a clean close."""
    return np.zeros(end - first, np.bool_)


@dataclass(frozen=True, slots=True)
class Inspection:
    """A region that nobody has open."""

    geometry: Geometry
    """Sizes of the region."""
    was_closed: bool
    """It was closed cleanly: every page has a valid checksum, and what differs from it is damage."""
    epoch: int
    """How often it was opened."""
    shadow_pages: int
    """Pages known to have been dirty when its process died."""
    report: ScrubReport
    """Of a region that was not closed, `corrupt` are pages written since the last pass, or damaged: nobody can tell."""

    @property
    def status(self) -> str:
        """As of its report, or "unclean": its process died, and whoever opens it next adopts what is there."""
        return self.report.status if self.was_closed else "unclean"


def inspect(path: str | Path, *, repair: bool = False, rate_bytes_per_s: float = 0.0) -> Inspection:
    """Scrub a region that nobody has open, and repair it if so told.

    A region that was not closed is only looked at: its parity may be older
    than its data, so a repair could undo stores. Raises `InputError` when it
    is open somewhere, or when told to repair one that was not closed.
    """
    file = RegionFile(path, writable=repair)
    try:
        closed, shadow = not file.header.is_open, file.shadow()
        if repair and not closed:
            raise InputError(
                f"{path} was not closed: its process died, and pages written since the last pass look like damage. "
                "Open it as a ProtectedRegion, which adopts them, and close it; then repair."
            )
        os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)  # judge the medium, where the kernel lets us
        report = scrub(file, nothing_dirty, pace=RateLimiter(rate_bytes_per_s), repair=repair)
        return Inspection(file.geometry, closed, file.header.epoch, 0 if closed else int(shadow.sum()), report)
    finally:
        file.close()
