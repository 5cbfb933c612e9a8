"""Digests of stored bytes: one per block, one root per file, one root per checkpoint.

Use it wherever bytes are written once and read later. A file is cut into
blocks of `block_bytes_for(size)` bytes; each has a 64-bit digest, so that a
read verifies only the blocks that it touches. The root of a file is a hash
over its length, its block size and its digests; the root of a checkpoint one
over its files in name order. `Digester` takes bytes in order and gives block
digests and CRC-32s from one pass. Offsets and sizes are bytes.

>>> whole = digest_of(b"x" * 10_000)
>>> whole.block_bytes, whole.digests.size
(4096, 3)
>>> damaged_blocks(b"x" * 9_999 + b"y", whole)
[2]
>>> crc32_combine(crc32(b"head"), crc32(b"way"), 3) == crc32(b"headway")
True
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from headway.core.errors import DamageError, FormatError, InputError
from headway.core.tables import pick
from headway.core.units import KIB, MIB

try:  # optional: three times zlib's speed where it is installed
    from isal.isal_zlib import crc32 as _crc32
except ImportError:
    from zlib import crc32 as _crc32

try:  # optional: the extra `integrity`
    import blake3
except ImportError:
    blake3 = None  # type: ignore[assignment]  # absent where the extra is

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer

SMALL_BLOCK_BYTES, LARGE_BLOCK_BYTES = 4 * KIB, 64 * KIB
LARGE_FILE_BYTES = 64 * MIB
"""From this size on a file has large blocks: digests then take 1/8192 of its bytes."""

CRC_STRIDE_BYTES = 256 * KIB
"""Bytes that stay in a core's cache between the CRC and the digests over them."""


@dataclass(frozen=True, slots=True)
class Digest:
    """How blocks and lists of digests are hashed."""

    block: Callable[[Buffer], int]
    """Bytes of one block -> 64 bits."""

    root: Callable[[Buffer], str]
    """Lengths and digests of a file -> hex text."""


def _blake3_hex(data: Buffer) -> str:
    if blake3 is None:
        raise InputError(
            "the digest 'blake3' needs the package blake3, which is not installed. Install headway[integrity], or use "
            "'xxh3_64'."
        )
    return str(blake3.blake3(data).hexdigest())


def _blake3_64(data: Buffer) -> int:
    return int.from_bytes(bytes.fromhex(_blake3_hex(data)[:16]), "little")


DIGESTS: dict[str, Digest] = {
    "xxh3_64": Digest(xxhash.xxh3_64_intdigest, xxhash.xxh3_128_hexdigest),
    "blake3": Digest(_blake3_64, _blake3_hex),
}
"""Every digest of blocks. xxh3 finds accidents at memory speed; blake3 also resists whoever forges a second block on
purpose, as far as 64 bits per block go, provided that the root is kept elsewhere."""


def block_bytes_for(num_bytes: int) -> int:
    """Return the block size of a file: 4 KiB below 64 MiB, else 64 KiB."""
    return SMALL_BLOCK_BYTES if num_bytes < LARGE_FILE_BYTES else LARGE_BLOCK_BYTES


def crc32(data: Buffer, value: int = 0) -> int:
    """Return the CRC-32 (zip's, IEEE) of `data`, continued from `value`."""
    return int(_crc32(data, value))


def checksum(data: Buffer) -> str:
    """Return the 128-bit checksum, as hex, by which small files guard themselves."""
    return str(xxhash.xxh3_128_hexdigest(data))


def block_digests(buffer: Buffer, block_bytes: int, *, digest: str = "xxh3_64") -> NDArray[np.uint64]:
    """Return the digest of each block of `buffer`: uint64 `[ceil(bytes / block_bytes)]`; the last may be short."""
    hash_block = pick(DIGESTS, digest, "digest").block
    view = memoryview(buffer).cast("B")
    found = [hash_block(view[start : start + block_bytes]) for start in range(0, len(view), block_bytes)]
    return np.array(found, dtype=np.uint64)


def merkle_root(digests: NDArray[np.uint64], num_bytes: int, block_bytes: int, *, digest: str = "xxh3_64") -> str:
    """Return the root of one file: a hash, as hex, over its length, its block size and its blocks' digests."""
    lengths = struct.pack("<QQ", num_bytes, block_bytes)
    return pick(DIGESTS, digest, "digest").root(lengths + digests.astype("<u8", copy=False).tobytes())


def tree_root(files: Iterable[tuple[str, int, str]], *, digest: str = "xxh3_64") -> str:
    """Return the root over many files, each (name, num_bytes, root), in the order of their names."""
    lines = "".join(f"{name}\0{num_bytes}\0{root}\n" for name, num_bytes, root in sorted(files))
    return pick(DIGESTS, digest, "digest").root(lines.encode())


@dataclass(frozen=True, slots=True)
class Digested:
    """The digests of one file."""

    num_bytes: int
    """Length of the file."""

    block_bytes: int
    """Length of each block but the last."""

    digests: NDArray[np.uint64]
    """[ceil(num_bytes / block_bytes)] One digest per block."""

    digest: str = "xxh3_64"
    """A name of `DIGESTS`."""

    @property
    def root(self) -> str:
        """The Merkle root of the file, as hex."""
        return merkle_root(self.digests, self.num_bytes, self.block_bytes, digest=self.digest)

    def covering(self, start: int, stop: int) -> tuple[int, int]:
        """Return the smallest range of bytes, of whole blocks, that holds `[start, stop)`.

        Raises `InputError` when the range does not lie in the file.
        """
        if not 0 <= start <= stop <= self.num_bytes:
            raise InputError(
                f"bytes {start}..{stop} do not lie in a file of {self.num_bytes} bytes. Read inside of it."
            )
        first = start // self.block_bytes * self.block_bytes
        return first, min(-(-stop // self.block_bytes) * self.block_bytes, self.num_bytes)


def digest_of(buffer: Buffer, block_bytes: int | None = None, *, digest: str = "xxh3_64") -> Digested:
    """Return the digests of `buffer`, by default in blocks of `block_bytes_for` its size."""
    num_bytes = memoryview(buffer).nbytes
    block_bytes = block_bytes or block_bytes_for(num_bytes)
    return Digested(num_bytes, block_bytes, block_digests(buffer, block_bytes, digest=digest), digest)


def damaged_blocks(buffer: Buffer, written: Digested, *, start: int = 0) -> list[int]:
    """Return the indices of the blocks of `buffer` that differ from what was `written`.

    `buffer` holds the file's bytes from `start` on, a multiple of the block
    size, and ends with a block or with the file: see `Digested.covering`.
    Only these blocks are hashed.
    """
    first, rest = divmod(start, written.block_bytes)
    stop = start + memoryview(buffer).nbytes
    if rest or (stop % written.block_bytes and stop != written.num_bytes):
        raise InputError(f"bytes {start}..{stop} are not whole blocks of {written.block_bytes} bytes. Use covering().")
    found = block_digests(buffer, written.block_bytes, digest=written.digest)
    differ = np.flatnonzero(found != written.digests[first : first + found.size])
    return [int(index) + first for index in differ]


class Digester:
    """Takes the bytes of a file in order; gives block digests and CRC-32s, from one pass.

    >>> digester = Digester(4096)
    >>> digester.update(b"header"), digester.take_crc32() == crc32(b"header")
    (None, True)
    >>> digester.update(b"payload"), digester.take_crc32() == crc32(b"payload")
    (None, True)
    >>> digester.finish().root == digest_of(b"headerpayload").root
    True
    """

    def __init__(self, block_bytes: int, *, digest: str = "xxh3_64") -> None:
        if block_bytes < 1:
            raise InputError(f"block_bytes is {block_bytes}; it must be at least 1. Use block_bytes_for(num_bytes).")
        self._block_bytes, self._digest = block_bytes, digest
        self._hash_block = pick(DIGESTS, digest, "digest").block
        self._digests: list[int] = []
        self._open = bytearray()  # the begun block
        self._num_bytes = self._crc = 0

    def update(self, data: Buffer) -> None:
        """Take the next bytes."""
        view = memoryview(data).cast("B")
        self._num_bytes += len(view)
        for start in range(0, len(view), CRC_STRIDE_BYTES):
            part = view[start : start + CRC_STRIDE_BYTES]
            self._crc = crc32(part, self._crc)
            self._take(part)

    def _take(self, part: memoryview) -> None:
        """Hash the blocks that `part` completes; keep what is left of it."""
        size, hash_block = self._block_bytes, self._hash_block
        at = 0
        if self._open:
            at = min(size - len(self._open), len(part))
            self._open += part[:at]
            if len(self._open) < size:
                return
            self._digests.append(hash_block(self._open))
            self._open.clear()
        end = at + (len(part) - at) // size * size
        self._digests += [hash_block(part[i : i + size]) for i in range(at, end, size)]
        self._open += part[end:]

    def take_crc32(self) -> int:
        """Return the CRC-32 of the bytes since the last call (or the start), and begin the next one."""
        crc, self._crc = self._crc, 0
        return crc

    def finish(self) -> Digested:
        """Return the digests of all bytes taken; the digester may go on afterwards."""
        last = [self._hash_block(self._open)] if self._open else []
        digests = np.array(self._digests + last, dtype=np.uint64)
        return Digested(self._num_bytes, self._block_bytes, digests, self._digest)


HEADER = struct.Struct("<8sIIQQ16s")
"""Head of `digests.bin`: magic, version, block bytes, file bytes, count, name of the digest; then the digests as
little-endian uint64; then 16 bytes of checksum over all before them."""

MAGIC, VERSION = b"HWDIGEST", 1


def pack_digests(written: Digested) -> bytes:
    """Return the bytes of a `digests.bin`."""
    head = HEADER.pack(
        MAGIC, VERSION, written.block_bytes, written.num_bytes, written.digests.size, written.digest.encode()
    )
    body = head + written.digests.astype("<u8", copy=False).tobytes()
    return body + bytes.fromhex(checksum(body))


def unpack_digests(data: bytes, name: str = "digests.bin") -> Digested:
    """Return what `pack_digests` packed.

    Raises `FormatError` for bytes of another kind or version, `DamageError` for damaged ones; both name the file.
    """
    if len(data) < HEADER.size + 16 or not data.startswith(MAGIC):
        raise FormatError(
            f"{name} is no file of block digests: it does not start with {MAGIC!r}. Run: headway ckpt verify"
        )
    if checksum(data[:-16]) != data[-16:].hex():
        raise DamageError(f"{name} is damaged: its own checksum differs. Run: headway ckpt repair")
    _, version, block_bytes, num_bytes, count, digest = HEADER.unpack_from(data)
    if version != VERSION:
        raise FormatError(f"{name} has version {version}; this headway reads version {VERSION}. Install a newer one.")
    digests = np.frombuffer(data, "<u8", count=count, offset=HEADER.size).astype(np.uint64, copy=False)
    return Digested(num_bytes, block_bytes, digests, digest.rstrip(b"\0").decode())


CRC_POLYNOMIAL = 0xEDB88320
"""CRC-32 of zip and Ethernet, bits reflected."""


def _times(matrix: tuple[int, ...], vector: int) -> int:
    """Multiply a 32 x 32 matrix over GF(2), a row of bits per column, with a vector of bits."""
    total = 0
    for column in matrix:
        if vector & 1:
            total ^= column
        vector >>= 1
    return total


@cache
def _zeros(power: int) -> tuple[int, ...]:
    """Return the matrix that carries a CRC over 2**power zero bits."""
    if power == 0:  # one bit: shift, and subtract the polynomial where a bit falls out
        return (CRC_POLYNOMIAL, *(1 << bit for bit in range(31)))
    half = _zeros(power - 1)
    return tuple(_times(half, column) for column in half)


def crc32_shift(crc: int, num_bytes: int) -> int:
    """Return what `crc`, as a linear map without its conditioning, becomes over `num_bytes` zero bytes: O(log n)."""
    power, bits = 3, num_bytes
    while bits:
        if bits & 1:
            crc = _times(_zeros(power), crc)
        power, bits = power + 1, bits >> 1
    return crc


def crc32_combine(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC-32 of two byte strings on end, from their CRCs and the second one's length. Exact; O(log n)."""
    if second_bytes < 0:
        raise InputError(f"second_bytes is {second_bytes}; a length is at least 0. Pass the second string's length.")
    return crc32_shift(first, second_bytes) ^ second
