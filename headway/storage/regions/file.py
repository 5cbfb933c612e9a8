"""The two files of a protected region: the data, and a sidecar with its checksums, parity and dirty pages.

Use it through `protected.ProtectedRegion`, or offline through `scrub`.
Layout and headers: `layout`. Lengths are checked before each read, so
that a file cut short is an error and not a signal.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import DamageError, InputError
from headway.core.files.safe_files import whole_file
from headway.core.units import MIB
from headway.storage.digests import DIGESTS, block_digests
from headway.storage.redundancy.erasure import RS
from headway.storage.regions.dirty import runs_of
from headway.storage.regions.layout import (
    ALIGN_BYTES,
    SALT,
    Geometry,
    SidecarHeader,
    descriptor,
    read_header,
    sidecar_of,
)
from headway.storage.stores import sync_folder

Pages = NDArray[np.int64]
"""[n] Page numbers, ascending."""

BATCH_BYTES = MIB
"""Data read, hashed and coded at once: it stays in a core's cache in between."""


class RegionFile:
    """Both files, opened; who has it open for writing holds a lock on the sidecar.

    No threads: its user takes turns. Nothing here knows which pages are
    dirty: `protected` and `scrub` do.
    """

    def __init__(self, path: str | Path, sidecar: str | Path | None = None, *, writable: bool = True) -> None:
        """Open an existing region. Raises `InputError`, `FormatError` or `DamageError` (a file of the wrong size)."""
        self.path = Path(path)
        self.sidecar = Path(sidecar) if sidecar else sidecar_of(self.path)
        self.header = read_header(self.sidecar)
        self.geometry = g = self.header.geometry
        self._coder = _coder(self.header)
        self._memory: NDArray[np.uint8] | None = None
        flags = os.O_RDWR if writable else os.O_RDONLY
        self.fd = self._guard = self._locked = -1
        try:
            self.fd = descriptor(self.path, flags)
            # A sidecar that nobody named is not written through a link: it would lead to a file that nobody named.
            self._guard = descriptor(self.sidecar, flags | (os.O_NOFOLLOW if writable and not sidecar else 0))
            # An open file of its own: a map holds a copy of its descriptor, in a forked child too, and a lock with it.
            self._locked = descriptor(self.sidecar, os.O_RDONLY)
            _lock(self._locked, self.path, fcntl.LOCK_EX if writable else fcntl.LOCK_SH)
            self.check_sizes()
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            self._map = mmap.mmap(self._guard, 0, mmap.MAP_SHARED, protection)
        except BaseException:
            self.forget()
            raise
        shadow, table, parity, end = g.places()
        bytes_ = np.frombuffer(self._map, np.uint8)
        self._bitmap = bytes_[shadow : shadow + -(-g.num_pages // 8)]
        self.table = bytes_[table : table + 8 * g.num_stripes * g.width].view("<u8").reshape(-1, g.width)
        """[stripes, width] Checksums, as on disk."""
        self._weights = np.arange(1, 2 * g.width - 1, 2).astype(np.uint64) * np.uint64(SALT)
        self.parity = bytes_[parity:end].reshape(g.num_stripes, g.parity, g.page)
        """[stripes, parity, page] Parity, as on disk."""
        self._scratch = np.empty((max(1, BATCH_BYTES // (g.stripe * g.page)), g.stripe, g.page), np.uint8)

    @property
    def batch(self) -> int:
        """Stripes read at once."""
        return len(self._scratch)

    def shadow(self) -> NDArray[np.bool_]:
        """Return which pages the shadow bitmap on disk names: `[num_pages]`."""
        return np.unpackbits(self._bitmap, count=self.geometry.num_pages, bitorder="little").astype(np.bool_)

    def set_shadow(self, shadow: NDArray[np.bool_]) -> None:
        """Write the shadow bitmap; `persist` makes it durable."""
        self._bitmap[:] = np.packbits(shadow, bitorder="little")

    def set_header(self, *, is_open: bool, epoch: int) -> None:
        """Write the next header, durably, into the place of the older one."""
        self.header = replace(self.header, is_open=is_open, epoch=epoch, number=self.header.number + 1)
        os.pwrite(self._guard, self.header.packed(), ALIGN_BYTES * (self.header.number % 2))
        os.fsync(self._guard)

    def persist(self) -> None:
        """Make durable what was written to the sidecar."""
        os.fdatasync(self._guard)

    def persist_data(self) -> None:
        """Make the data durable."""
        os.fdatasync(self.fd)

    def check_sizes(self) -> None:
        """Raise `DamageError` when a file is not as long as it must be: the map of a file cut short is a trap."""
        for file, path, expected in (
            (self.fd, self.path, self.geometry.num_bytes),
            (self._guard, self.sidecar, self.geometry.places()[-1]),
        ):
            size = os.fstat(file).st_size
            if size != expected:
                raise DamageError(
                    f"{path} has {size} bytes, but its protection covers {expected}: somebody cut or extended it. Put "
                    "back a copy of that length; stores beyond the end of a cut file kill the process (SIGBUS)."
                )

    def refresh(self, pages: Pages) -> int:
        """Bring the checksums of `pages` and the parity of their stripes up to the data; return the stripes."""
        g = self.geometry
        named = np.zeros((g.num_stripes, g.stripe), np.bool_)
        named.reshape(-1)[pages] = True
        stripes = np.flatnonzero(named.any(axis=1))
        for some, data in self.read(stripes):
            which, before = named[some], self.table[some]
            rows, coded = before.copy(), self.encode(data)
            # One copy of the page gives both its checksum and its share of the parity.
            rows[:, : g.stripe][which] = self._digests(data, which)
            rows[:, g.stripe : -1] = self._digests(coded).reshape(-1, g.parity)
            # By the difference: a guard that did not fit must not come to fit what it accused.
            rows[:, -1] += self._guards(rows) - self._guards(before)
            self.parity[some], self.table[some] = coded, rows
        return len(stripes)

    def reguard(self, stripes: Pages) -> None:
        """Let the guards of some rows fit whatever the rows hold."""
        self.table[stripes, -1] = self._guards(self.table[stripes])

    def _guards(self, rows: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return the guard of each row: linear, so that it also follows from what changed."""
        sums: NDArray[np.uint64] = (rows[:, :-1] * self._weights).sum(axis=1, dtype=np.uint64)
        return sums + np.uint64(SALT)

    def examine(self, stripes: Pages) -> Iterator[tuple[Pages, NDArray[np.bool_]]]:
        """Yield some of `stripes` at a time, with what does not match: pages, parity, the row's guard `[n, width]`."""
        g = self.geometry
        for some, data in self.read(stripes):
            rows, coded = self.table[some], self.parity[some]
            wrong = np.empty((len(some), g.width), np.bool_)
            wrong[:, : g.stripe] = self._digests(data).reshape(-1, g.stripe) != rows[:, : g.stripe]
            wrong[:, g.stripe : -1] = self._digests(coded).reshape(-1, g.parity) != rows[:, g.stripe : -1]
            wrong[:, -1] = self._guards(rows) != rows[:, -1]
            # What fills the last stripe up is not stored: it cannot be wrong.
            wrong[:, : g.stripe] &= some[:, None] * g.stripe + np.arange(g.stripe) < g.num_pages
            yield some, wrong

    def rebuilt(self, stripe: int, wrong: NDArray[np.bool_]) -> NDArray[np.uint8] | None:
        """Return the data of a stripe `[stripe, page]` with its wrong pages rebuilt from the others, None if it cannot.

        A rebuilt page must match its checksum. If the row of checksums itself
        is damaged, they prove nothing; the data is then right if parity fits it.
        """
        g = self.geometry
        data = next(data.copy() for _, data in self.read(np.array([stripe])))[0]
        if wrong[-1]:
            return data if np.array_equal(self.encode(data[None])[0], self.parity[stripe]) else None
        if wrong.sum() > g.parity:
            return None
        parts = enumerate([*data, *self.parity[stripe]])
        whole = self._decode({index: part for index, part in parts if not wrong[index]})
        return whole if (self._digests(whole) == self.table[stripe, : g.stripe])[wrong[: g.stripe]].all() else None

    def put_back(self, stripe: int, whole: NDArray[np.uint8]) -> None:
        """Make the data of a stripe, its parity and its row of checksums what they should be.

        Of the data only bytes that differ are written.
        """
        g = self.geometry
        start = stripe * g.stripe * g.page
        data = next(data.copy() for _, data in self.read(np.array([stripe])))[0]
        for index in np.flatnonzero((data != whole).any(axis=1)):
            differs = np.flatnonzero(data[index] != whole[index])
            first, end = int(differs[0]), int(differs[-1]) + 1
            os.pwrite(self.fd, whole[index, first:end].data, start + int(index) * g.page + first)
        self.parity[stripe] = self.encode(whole[None])[0]
        self.table[stripe, : g.stripe] = self._digests(whole)
        self.table[stripe, g.stripe : -1] = self._digests(self.parity[stripe])
        self.reguard(np.array([stripe]))

    def read(self, stripes: Pages) -> Iterator[tuple[Pages, NDArray[np.uint8]]]:
        """Yield some of `stripes` at a time with their data `[n, stripe, page]`, good until the next is asked for."""
        for start in range(0, len(stripes), self.batch):
            some = stripes[start : start + self.batch]
            target = self._scratch[: len(some)]
            if self._memory is None:
                self._read_file(some, target)
            else:
                self._read_memory(self._memory, some, target)
            yield some, target

    def follow(self, memory: NDArray[np.uint8] | None) -> None:
        """Read the data from the map of it from now on, at a third of the cost; None: from the file again."""
        self._memory = memory

    def _read_memory(self, memory: NDArray[np.uint8], stripes: Pages, target: NDArray[np.uint8]) -> None:
        """Copy whole stripes, the last apart if it lacks pages."""
        self.check_sizes()  # right before: what a file lost must not be touched
        g = self.geometry
        whole = g.num_pages // g.stripe
        count = len(stripes) - bool(stripes[-1] == whole)
        full = memory[: whole * g.stripe * g.page].reshape(whole, g.stripe, g.page)
        np.take(full, stripes[:count], axis=0, out=target[:count], mode="clip")
        if count < len(stripes):
            rest = memory[whole * g.stripe * g.page :]
            target[-1].reshape(-1)[: rest.size] = rest
            target[-1].reshape(-1)[rest.size :] = 0

    def _read_file(self, stripes: Pages, target: NDArray[np.uint8]) -> None:
        """Read stripes, those that follow each other at once."""
        g = self.geometry
        size, at = g.stripe * g.page, 0
        for first, end in runs_of(stripes).tolist():
            part = target[at : at + end - first].reshape(-1)
            want = min(end * size, g.num_bytes) - first * size
            if os.preadv(self.fd, [part[:want].data], first * size) != want:
                self.check_sizes()
                raise DamageError(f"{self.path} gave fewer bytes than asked for. Check its file system.")
            part[want:] = 0
            at += end - first

    def encode(self, data: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the parity `[n, parity, page]` of `data` `[n, stripe, page]`."""
        g = self.geometry
        if self._coder is None:
            words: NDArray[np.uint64] = np.bitwise_xor.reduce(data.view(np.uint64), axis=1, keepdims=True)
            return words.view(np.uint8)
        columns = np.ascontiguousarray(data.transpose(1, 0, 2)).reshape(g.stripe, -1)
        coded = self._coder.encode(columns).reshape(g.parity, -1, g.page)
        return np.ascontiguousarray(coded.transpose(1, 0, 2))

    def _decode(self, parts: dict[int, NDArray[np.uint8]]) -> NDArray[np.uint8]:
        """Return the data `[stripe, page]` from those pages of a stripe that are left."""
        g = self.geometry
        if self._coder is not None:
            return self._coder.decode(parts)
        (lost,) = {*range(g.stripe + 1)} - set(parts) or {g.stripe}
        others = np.stack([part for index, part in parts.items() if index != lost])
        whole = {**parts, lost: np.bitwise_xor.reduce(others, axis=0)}
        return np.stack([whole[index] for index in range(g.stripe)])

    def _digests(self, pages: NDArray[np.uint8], which: NDArray[np.bool_] | None = None) -> NDArray[np.uint64]:
        """Return the checksum of each page of an array, or of `which` of them, flat."""
        size, view = self.geometry.page, np.ascontiguousarray(pages).reshape(-1).data
        if which is None or which.all():
            return block_digests(view, size)
        hash_page = DIGESTS["xxh3_64"].block  # copying pages together would cost more than hashing them
        places = (np.flatnonzero(which) * size).tolist()
        return np.array([hash_page(view[place : place + size]) for place in places], np.uint64)

    def close(self) -> None:
        """Close both files, leaving the header as it is; calling it again does nothing."""
        if self.fd < 0:
            return
        self._memory = None
        self._bitmap = self.table = self.parity = np.empty(0, np.uint8)  # type: ignore[assignment]  # lets the map go
        self._map.close()
        fcntl.flock(self._locked, fcntl.LOCK_UN)  # also if a forked child has a copy of the descriptor
        self.forget()

    def forget(self) -> None:
        """Close the descriptors only, as a forked child does with its copies: the lock then dies with its owner."""
        for file in (self.fd, self._guard, self._locked):
            if file >= 0:
                os.close(file)
        self.fd = self._guard = self._locked = -1


class Coder(Protocol):
    """Erasure coding of `stripe` rows of bytes into `parity` more."""

    def encode(self, data: NDArray[np.uint8], /) -> NDArray[np.uint8]:
        """Return the parity rows of `data`."""
        ...

    def decode(self, parts: dict[int, NDArray[np.uint8]], /) -> NDArray[np.uint8]:
        """Return the data rows from any `stripe` of the rows, by their number."""
        ...


def _coder(header: SidecarHeader) -> Coder | None:
    """Return what codes a stripe; None for a single page of parity, which is the XOR."""
    g = header.geometry
    if g.parity == 1:
        return None
    matrix = np.frombuffer(header.code, np.uint8).reshape(g.parity, g.stripe).tolist()
    return RS(g.stripe, g.parity, header.w, cell_bytes=g.page, matrix=matrix)


def _first_header(geometry: Geometry) -> SidecarHeader:
    """Return the header of a new region, with the code that is the default today."""
    code = RS(geometry.stripe, geometry.parity)
    return SidecarHeader(geometry, w=code.w, code=code.matrix.astype(np.uint8).tobytes())


def create(path: Path, geometry: Geometry) -> None:
    """Protect a data file as it is: write its sidecar, whole or not at all; a missing data file is made of zeros.

    Room for both is taken on disk, so that later stores cannot find it full.
    """
    with path.open("r+b" if path.exists() else "x+b") as data:
        os.posix_fallocate(data.fileno(), 0, geometry.num_bytes)
        os.fsync(data.fileno())
    with whole_file(sidecar_of(path)) as draft:
        with draft.open("x+b") as guard:
            os.posix_fallocate(guard.fileno(), 0, geometry.places()[-1])
            header = _first_header(geometry)
            for number in (0, 1):
                os.pwrite(guard.fileno(), replace(header, number=number).packed(), ALIGN_BYTES * number)
        file = RegionFile(path, draft)
        try:
            file.table[:, -1] = SALT
            file.refresh(np.arange(geometry.num_pages))
            file.persist()
        finally:
            file.close()
    sync_folder(path.parent)


def _lock(guard: int, path: Path, kind: int) -> None:
    """Take the lock that one writer holds, or any number of readers."""
    try:
        fcntl.flock(guard, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(
            f"{path} is open as a protected region already, here or in another process. Close it there first."
        ) from None
