"""How a protected region lies on disk: sizes, places, headers of the file and its sidecar.

`file` reads and writes what this describes. The data file holds the
region's bytes and nothing else. Page `p` (of `page` bytes) belongs to stripe
`p // stripe`; a stripe has `stripe` pages of data and `parity` pages of
parity; the last one is filled up with zeros that are not stored. The sidecar
`FILE.guard`, little-endian, every section at a multiple of 4096 bytes:

    0       header, twice (at 0 and 4096, written in turn: a torn write leaves the other whole)
    8192    shadow bitmap: one bit per page, lowest first: its checksum and its stripe's parity may be old
    ...     checksums: uint64 [stripes, stripe + parity + 1], xxh3_64 of each page of data, then of parity; the last
            guards its row: SALT + the sum of the others, each times its odd weight, modulo 2**64
    ...     parity: [stripes, parity, page] bytes; one page: XOR; more: Cauchy Reed-Solomon (`erasure.RS`)

A header says magic, geometry, code, epoch (how often the region was opened),
whether it is open, and its own checksum.

>>> Geometry(64 * 1024, stripe=4, parity=1).places()
(8192, 12288, 16384, 32768)
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from headway.core.errors import FormatError, InputError
from headway.core.units import KIB
from headway.storage.regions.pagemap import PAGE_BYTES

SUFFIX = ".guard"
"""What the sidecar's name has behind that of the data."""

ALIGN_BYTES = 4 * KIB
SALT = 0x9E3779B97F4A7C15
"""Guard of a row of zeros; its odd multiples are the weights of the others."""

MOST_COEFFICIENTS = 2048
"""Of a code: they fit into a header."""

_HEADER = struct.Struct("<16sQIIIIQQQ")
"""Magic, bytes of data, page, stripe, parity, open, epoch, number of this header, bits per element of the code; then
the code's [parity, stripe] coefficients, a byte each, and a checksum over all that."""

_MAGIC = b"headway.region/1"
_CHECKSUM = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of a region, and where the sections of its sidecar lie."""

    num_bytes: int
    """Bytes of data, a multiple of `page`."""
    page: int = 4 * KIB
    """Bytes with one checksum; a multiple of the system's page."""
    stripe: int = 4
    """Pages of data that share parity."""
    parity: int = 1
    """Pages of parity per stripe: so many lost pages of a stripe come back."""

    def __post_init__(self) -> None:
        """Raise `InputError` on sizes that cannot work."""
        if self.page < 1 or self.page % PAGE_BYTES:
            raise InputError(f"page is {self.page}; stores are seen per {PAGE_BYTES} bytes. Pass a multiple of that.")
        if self.stripe < 1 or self.parity < 1:
            raise InputError(
                f"stripe is {self.stripe} and parity {self.parity}; a stripe needs at least 1 page of each. Pass 1 or "
                "more."
            )
        if self.stripe * self.parity > MOST_COEFFICIENTS:
            raise InputError(
                f"stripe x parity is {self.stripe * self.parity}; the header has room for {MOST_COEFFICIENTS} "
                "coefficients. Pass narrower stripes."
            )
        if self.num_bytes < 1 or self.num_bytes % self.page:
            raise InputError(
                f"{self.num_bytes} bytes are not whole pages of {self.page}. Make the file a multiple of that."
            )

    @property
    def num_pages(self) -> int:
        """Pages of data."""
        return self.num_bytes // self.page

    @property
    def num_stripes(self) -> int:
        """Stripes; the last may lack pages."""
        return -(-self.num_pages // self.stripe)

    @property
    def width(self) -> int:
        """Entries in a row of checksums: pages of data, of parity, the row's guard."""
        return self.stripe + self.parity + 1

    def places(self) -> tuple[int, int, int, int]:
        """Return the offsets of shadow, checksums and parity, and the end of the sidecar."""
        sizes = (-(-self.num_pages // 8), 8 * self.num_stripes * self.width)
        shadow = 2 * ALIGN_BYTES
        table = shadow + -(-sizes[0] // ALIGN_BYTES) * ALIGN_BYTES
        parity = table + -(-sizes[1] // ALIGN_BYTES) * ALIGN_BYTES
        return shadow, table, parity, parity + self.num_stripes * self.parity * self.page


@dataclass(frozen=True, slots=True)
class SidecarHeader:
    """What the head of a sidecar says."""

    geometry: Geometry
    is_open: bool = False
    """Somebody has it open, or died while they had."""
    epoch: int = 0
    """How often the region was opened."""
    number: int = 0
    """Larger than that of the header before it; headers with even and odd numbers have a place each."""
    w: int = 1
    """Bits per element of the code."""
    code: bytes = b""
    """[parity, stripe] Its coefficients, by which parity is decoded whatever the default has become since."""

    def packed(self) -> bytes:
        """Return the bytes on disk."""
        g = self.geometry
        body = _HEADER.pack(
            _MAGIC, g.num_bytes, g.page, g.stripe, g.parity, self.is_open, self.epoch, self.number, self.w
        )  # fmt: skip
        body += self.code
        return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))


def read_header(path: Path) -> SidecarHeader:
    """Return the newest header of a sidecar.

    If one of the two copies is damaged, the other may be older: the region
    then counts as left open. Raises `FormatError` when neither is a header.
    """
    file = descriptor(path, os.O_RDONLY)
    try:
        copies = [_unpacked(os.pread(file, ALIGN_BYTES, ALIGN_BYTES * place)) for place in (0, 1)]
    finally:
        os.close(file)
    whole = [header for header in copies if header is not None]
    if not whole:
        raise FormatError(
            f"{path} is no sidecar of a protected region, or both of its headers are damaged. Remove it to protect the "
            "data as it is now."
        )
    newest = max(whole, key=lambda header: header.number)
    return newest if len(whole) == 2 else replace(newest, is_open=True)


def _unpacked(data: bytes) -> SidecarHeader | None:
    """Return the header in these bytes, None when they hold none."""
    if not data.startswith(_MAGIC) or len(data) < _HEADER.size:
        return None
    _, num_bytes, page, stripe, parity, is_open, epoch, number, w = _HEADER.unpack_from(data)
    end = _HEADER.size + stripe * parity
    body, rest = data[:end], data[end : end + _CHECKSUM.size]
    if len(rest) < _CHECKSUM.size or _CHECKSUM.unpack(rest)[0] != xxhash.xxh3_64_intdigest(body):
        return None
    return SidecarHeader(
        Geometry(num_bytes, page, stripe, parity), bool(is_open), epoch, number, w, body[_HEADER.size :]
    )


def sidecar_of(path: Path) -> Path:
    """Return where the sidecar of a data file lies."""
    return path.with_name(path.name + SUFFIX)


def descriptor(path: Path, flags: int) -> int:
    """Open one of the two files. Raises `InputError`."""
    try:
        return os.open(path, flags | os.O_CLOEXEC)
    except OSError as fault:
        raise InputError(
            f"{path} cannot be opened: {fault.strerror}. A protected region is a file and its sidecar, FILE{SUFFIX}; "
            "name the file of one that ProtectedRegion made."
        ) from fault
