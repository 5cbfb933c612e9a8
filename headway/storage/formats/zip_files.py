"""The zip archives that torch.save writes, down to every byte that is not a tensor's.

torch never checks the CRC-32s it writes; `faults` does. And it checks what
no CRC covers: local headers, padding, descriptors, the directory and its
ends are compared with what torch's writer puts there, so that a flip of any
bit shows, with its place. Archives of other writers are held to what the
directory says. All offsets are bytes from the start of the archive.

>>> import io, zipfile
>>> file = io.BytesIO()
>>> with zipfile.ZipFile(file, "w") as archive:
...     archive.writestr("a/data.pkl", b"payload")
>>> data = bytearray(file.getvalue())
>>> [entry.name for entry in entries(data, "x.pt")], list(faults(data))
(['a/data.pkl'], [])
>>> data[entries(data, "x.pt")[0].payload_offset] ^= 1
>>> [fault.what for fault in faults(data)]
['payload']
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from headway.core.errors import FormatError
from headway.core.files.safe_files import unpacked_room
from headway.core.units import MIB
from headway.storage.digests import crc32

if TYPE_CHECKING:
    from typing_extensions import Buffer

LOCAL = struct.Struct("<4sHHHHHIIIHH")
CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
END = struct.Struct("<4sHHHHIIH")
END64 = struct.Struct("<4sQHHIIQQQQ")
LOCATOR = struct.Struct("<4sIQI")
DESCRIPTOR, DESCRIPTOR64 = struct.Struct("<4sIII"), struct.Struct("<4sIQQ")

TORCH_FLAGS, EMPTY_FLAGS = 0x0808, 0x0800
"""Names are UTF-8; sizes and CRC follow the payload, where there is one."""

MINIZ_END64 = (0x031E, 45)
"""Versions that torch's writer puts into the end of the directory."""

ZIP64, PADDING = 0x0001, 0x4246
"""Extra fields: 64-bit sizes, and torch's "FB" with the Zs that align a payload."""

STRIDE_BYTES = 8 * MIB

BROKEN = (struct.error, ValueError, IndexError, OverflowError)
"""What reading numbers out of damaged bytes raises."""


@dataclass(frozen=True, slots=True)
class ZipEntry:
    """One file of an archive."""

    name: str
    """Its name."""

    offset: int
    """Where its local header begins."""

    payload_offset: int
    """Where its bytes begin."""

    stored_bytes: int
    """How many bytes are stored: fewer than `num_bytes` where they are compressed."""

    num_bytes: int
    """Its length."""

    crc32: int
    """CRC-32 of its bytes, as the directory has it."""

    flags: int
    """General purpose flags."""

    method: int
    """0 stored, 8 deflated."""


@dataclass(frozen=True, slots=True)
class ZipFault:
    """A place where an archive is not as its writer left it."""

    offset: int
    """Where: of the entry's payload, or of the part of the container that differs."""

    num_bytes: int
    """How many bytes are in doubt."""

    what: str
    """`payload`, or the part of the container: `header`, `descriptor`, `directory`, `end`."""

    entry: str | None
    """Name of the entry it belongs to."""


@dataclass(frozen=True, slots=True)
class _Directory:
    """Where the directory lies, and that the ends of the archive agree on it."""

    offset: int
    num_bytes: int
    count: int


def is_zip(head: Buffer) -> bool:
    """Say whether bytes begin as an archive does."""
    return bytes(memoryview(head)[:4]) == b"PK\x03\x04"


def entries(data: Buffer, name: str) -> list[ZipEntry]:
    """Return the entries of an archive, in the order of its directory.

    Raises `FormatError`, naming `name` and the place, when the ends, the directory or a local header are broken.
    """
    view = memoryview(data).cast("B")
    try:
        return [entry for entry, _ in _whole_list(view, _directory(view))]
    except BROKEN as cause:
        raise FormatError(f"{name} is no whole zip archive: {cause}. Check it: headway ckpt verify") from cause


def _directory(view: memoryview) -> _Directory:
    """Find the directory from the end of the archive; raise `ValueError` where it is not."""
    at = len(view) - END.size
    if at < 0 or bytes(view[at : at + 4]) != b"PK\x05\x06":
        at = bytes(view[max(0, len(view) - 0xFFFF - END.size) :]).rfind(b"PK\x05\x06")
        at += max(0, len(view) - 0xFFFF - END.size) if at >= 0 else 0
        if at < 0:
            raise ValueError("its end is missing")
    _, disk, first_disk, here, count, size, offset, comment = END.unpack_from(view, at)
    if disk or first_disk or here != count or at + END.size + comment != len(view):
        raise ValueError(f"its end at {at} contradicts itself")
    if at >= LOCATOR.size and bytes(view[at - LOCATOR.size : at - LOCATOR.size + 4]) == b"PK\x06\x07":
        far = END64.unpack_from(view, LOCATOR.unpack_from(view, at - LOCATOR.size)[2])
        if far[0] != b"PK\x06\x06" or far[6] != far[7]:
            raise ValueError("its 64-bit end contradicts itself")
        short = (min(far[7], 0xFFFF), min(far[8], 0xFFFFFFFF), min(far[9], 0xFFFFFFFF))
        if short != (count, size, offset):
            raise ValueError("its two ends differ")
        count, size, offset = far[7], far[8], far[9]
    if offset + size > at:
        raise ValueError(f"its directory ({offset} + {size}) does not lie before its end at {at}")
    return _Directory(offset, size, count)


def _whole_list(view: memoryview, directory: _Directory) -> list[tuple[ZipEntry, tuple[int, int]]]:
    """Return the entries, with their lines; `ValueError` where two share bytes, or they unpack to too much.

    Many lines over one payload, or a run of one value that is packed, make gigabytes of a few kilobytes.
    """
    listed = list(_listed(view, directory))
    ordered = sorted((entry for entry, _ in listed), key=lambda entry: entry.offset)
    for entry, after in pairwise(ordered):
        if entry.payload_offset + entry.stored_bytes > after.offset:
            raise ValueError(f"its entries {entry.name!r} and {after.name!r} overlap")
    unpacked = sum(entry.num_bytes for entry in ordered if entry.method)
    if unpacked > unpacked_room(len(view)):
        raise ValueError(f"it has {len(view)} bytes and says that they unpack to {unpacked}")
    return listed


def _listed(view: memoryview, directory: _Directory) -> Iterator[tuple[ZipEntry, tuple[int, int]]]:
    """Yield each entry, with the place of its line in the directory."""
    at = directory.offset
    for _ in range(directory.count):
        line = CENTRAL.unpack_from(view, at)
        if line[0] != b"PK\x01\x02":
            raise ValueError(f"its directory is broken at {at}")
        flags, method, crc, stored, size = line[3], line[4], line[7], line[8], line[9]
        name_bytes, extra_bytes, comment_bytes, offset = line[10], line[11], line[12], line[16]
        body = at + CENTRAL.size
        name = bytes(view[body : body + name_bytes]).decode("utf-8")
        wide = _wide(view[body + name_bytes : body + name_bytes + extra_bytes])
        size = wide.pop(0) if size == 0xFFFFFFFF else size
        stored = wide.pop(0) if stored == 0xFFFFFFFF else stored
        offset = wide.pop(0) if offset == 0xFFFFFFFF else offset
        local = LOCAL.unpack_from(view, offset)
        payload = offset + LOCAL.size + local[9] + local[10]
        if method == 0 and stored != size:
            raise ValueError(f"its entry {name!r} is not packed, and has {stored} bytes for {size}")
        if payload + stored > directory.offset:
            raise ValueError(f"its entry {name!r} does not lie before its directory")
        after = body + name_bytes + extra_bytes + comment_bytes
        yield ZipEntry(name, offset, payload, stored, size, crc, flags, method), (at, after)
        at = after
    if at != directory.offset + directory.num_bytes:
        raise ValueError(f"its directory ends at {at}, not at {directory.offset + directory.num_bytes}")


def _wide(extra: memoryview) -> list[int]:
    """Return the 64-bit numbers of an entry's extra field."""
    for kind, body in _extras(extra):
        if kind == ZIP64:
            return list(struct.unpack(f"<{len(body) // 8}Q", body[: len(body) // 8 * 8]))
    return []


def _extras(extra: memoryview) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, at)
        if at + 4 + size > len(extra):
            raise ValueError("an extra field is longer than it may be")
        yield kind, bytes(extra[at + 4 : at + 4 + size])
        at += 4 + size
    if at != len(extra):
        raise ValueError("an extra field is cut short")


def has_checksums(listed: Sequence[ZipEntry]) -> bool:
    """Say whether an archive has CRCs at all: torch can be told to leave them 0."""
    return not listed or any(entry.crc32 for entry in listed if entry.num_bytes)


def faults(data: Buffer, *, payloads: bool = True) -> Iterator[ZipFault]:
    """Yield every place where an archive differs from what its writer left; nothing for a good one.

    Payloads are held to their CRC-32, unless `payloads` is off. An archive of torch's is also held, byte by byte, to
    torch's form; one of another writer to its own directory.
    """
    view = memoryview(data).cast("B")
    try:
        directory = _directory(view)
        listed = _whole_list(view, directory)
    except BROKEN:  # without its directory nothing in it can be told apart
        yield ZipFault(max(0, len(view) - END.size), min(len(view), END.size), "end", None)
        return
    found = [entry for entry, _ in listed]
    strict = any(entry.flags == TORCH_FLAGS for entry in found)
    ordered = sorted(found, key=lambda entry: entry.offset)
    ends = [entry.offset for entry in ordered[1:]] + [directory.offset]
    at, summed = 0, payloads and has_checksums(found)
    for entry, end in zip(ordered, ends, strict=True):
        if strict and entry.offset != at:
            yield ZipFault(at, max(entry.offset - at, 0), "header", entry.name)
        yield from _entry_faults(view, entry, end, strict, summed)
        at = end
    if strict:
        yield from _directory_faults(view, listed)
        yield from _end_faults(view, directory)


def _entry_faults(view: memoryview, entry: ZipEntry, end: int, strict: bool, summed: bool) -> Iterator[ZipFault]:
    """Yield what is wrong between an entry's local header and the next one's."""
    if not _header_is_good(view, entry, strict):
        yield ZipFault(entry.offset, entry.payload_offset - entry.offset, "header", entry.name)
    if summed and _payload_crc(view, entry) != entry.crc32:
        yield ZipFault(entry.payload_offset, entry.stored_bytes, "payload", entry.name)
    if strict and not _descriptor_is_good(view, entry, end):
        start = entry.payload_offset + entry.stored_bytes
        yield ZipFault(start, max(end - start, 0), "descriptor", entry.name)


def _header_is_good(view: memoryview, entry: ZipEntry, strict: bool) -> bool:
    sig, version, flags, method, time, date, crc, stored, size, name_bytes, _ = LOCAL.unpack_from(view, entry.offset)
    name = bytes(view[entry.offset + LOCAL.size : entry.offset + LOCAL.size + name_bytes])
    told = (sig, flags, method, name)
    if told != (b"PK\x03\x04", entry.flags, entry.method, entry.name.encode()):
        return False
    if not strict:
        return True
    if any((version, time, date, crc, stored, size)) or flags != _torch_flags(entry):
        return False
    extra = view[entry.offset + LOCAL.size + name_bytes : entry.payload_offset]
    try:
        return all(_extra_is_good(kind, body, entry) for kind, body in _extras(extra))
    except ValueError:
        return False


def _torch_flags(entry: ZipEntry) -> int:
    return TORCH_FLAGS if entry.num_bytes else EMPTY_FLAGS


def _extra_is_good(kind: int, body: bytes, entry: ZipEntry) -> bool:
    if kind == PADDING:
        return not body.strip(b"Z")
    known = {entry.num_bytes, entry.offset, 0}
    return kind == ZIP64 and len(body) % 8 == 0 and set(struct.unpack(f"<{len(body) // 8}Q", body)) <= known


def _payload_crc(view: memoryview, entry: ZipEntry) -> int:
    """Return the CRC-32 of an entry's bytes, unpacked; -1 where they cannot be, or are not as many as it says."""
    payload = view[entry.payload_offset : entry.payload_offset + entry.stored_bytes]
    crc = 0
    if entry.method != 8:
        for start in range(0, len(payload), STRIDE_BYTES):
            crc = crc32(payload[start : start + STRIDE_BYTES], crc)
        return crc
    unpack, size, packed = zlib.decompressobj(-15), 0, b""
    try:
        for start in range(0, len(payload), MIB):
            packed = bytes(payload[start : start + MIB])
            while packed and size <= entry.num_bytes:
                part = unpack.decompress(packed, STRIDE_BYTES)
                crc, size, packed = crc32(part, crc), size + len(part), unpack.unconsumed_tail
    except zlib.error:
        return -1
    return crc if unpack.eof and size == entry.num_bytes else -1


def _descriptor_is_good(view: memoryview, entry: ZipEntry, end: int) -> bool:
    """Say whether what stands between a payload and the next header is its descriptor, of 32 or of 64 bits."""
    told = bytes(view[entry.payload_offset + entry.stored_bytes : end])
    if not entry.num_bytes:
        return not told
    facts = (b"PK\x07\x08", entry.crc32, entry.stored_bytes, entry.num_bytes)
    if len(told) == DESCRIPTOR64.size:
        return told == DESCRIPTOR64.pack(*facts)
    return entry.num_bytes < 1 << 32 and told == DESCRIPTOR.pack(*facts)


def _directory_faults(view: memoryview, listed: Sequence[tuple[ZipEntry, tuple[int, int]]]) -> Iterator[ZipFault]:
    """Yield the lines of the directory that are not torch's."""
    for entry, (at, after) in listed:
        line = CENTRAL.unpack_from(view, at)
        made, needed, flags, method, time, date = line[1:7]
        idle = (made, needed, method, time, date, *line[12:16])
        if any(idle) or flags != _torch_flags(entry) or after - at != CENTRAL.size + line[10] + line[11]:
            yield ZipFault(at, after - at, "directory", entry.name)


def _end_faults(view: memoryview, directory: _Directory) -> Iterator[ZipFault]:
    """Yield the ends of the archive where they are not, to the byte, what torch writes."""
    at = directory.offset + directory.num_bytes
    count, size, offset = directory.count, directory.num_bytes, directory.offset
    far = END64.pack(b"PK\x06\x06", END64.size - 12, *MINIZ_END64, 0, 0, count, count, size, offset)
    locator = LOCATOR.pack(b"PK\x06\x07", 0, at, 1)
    short = (min(count, 0xFFFF), min(count, 0xFFFF), min(size, 0xFFFFFFFF), min(offset, 0xFFFFFFFF))
    end = END.pack(b"PK\x05\x06", 0, 0, *short, 0)
    if bytes(view[at:]) not in (far + locator + end, end):
        yield ZipFault(at, len(view) - at, "end", None)
