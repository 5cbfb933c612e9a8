"""The bytes behind a path, unpacked, a piece at a time.

Use it to look into a file before choosing a reader, and to read it without
holding all of it. gzip is recognised by its first bytes, never by a suffix.

>>> import gzip, tempfile
>>> path = Path(tempfile.mkdtemp()) / "a.json"
>>> _ = path.write_bytes(gzip.compress(b' {"traceEvents": []}'))
>>> content = Content(path)
>>> content.opening[:6], content.holds(b"traceEvents"), b"".join(content) == content.data
(b'{"trac', True, True)

One number per communication group, the same in every file that speaks of it.

torch names its process groups '0', '1', ... on every rank alike; the profiler
and the Flight Recorder both write that name. A name that is a number is its
own id; any other gets one from its text, so that ranks agree without talking.

>>> group_id("3"), group_id("mesh_tp") == group_id("mesh_tp"), group_id("")
(3, True, -1)
>>> parse_ranks("[0, 1, 2]"), parse_ranks("[0, 1, ...]"), parse_ranks("", start=4, stride=2, size=3)
([0, 1, 2], [], [4, 6, 8])
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from headway.core.errors import FormatError
from headway.core.files.safe_files import decode_json, open_regular, unpacked_room

GZIP_MAGIC = b"\x1f\x8b"
PARQUET_MAGIC = b"PAR1"

PIECE_BYTES = 1 << 20
"""How much is unpacked and handed on at a time."""


class Content:
    """A file's bytes; iterating over it yields them unpacked, in pieces, from the start each time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @functools.cached_property
    def head(self) -> bytes:
        """The first 512 bytes as they stand on disk; b'' for a folder."""
        if self.path.is_dir():
            return b""
        with open_regular(self.path) as file:
            return file.read(512)

    @functools.cached_property
    def opening(self) -> bytes:
        """The first 4096 bytes after unpacking, white space and byte-order mark removed."""
        return next(iter(self), b"")[:4096].removeprefix(b"\xef\xbb\xbf").lstrip()

    @property
    def data(self) -> bytes:
        """All bytes, unpacked."""
        return b"".join(self)

    def __iter__(self) -> Iterator[bytes]:
        """Yield the unpacked bytes; nothing for a folder and for Parquet, which has its own reader.

        Raises `FormatError` with the offset where a truncated or damaged gzip stream stops.
        """
        if self.path.is_dir() or self.head.startswith(PARQUET_MAGIC):
            return
        with open_regular(self.path) as file:
            if self.head.startswith(GZIP_MAGIC):
                yield from _unpacked(file, self.path)
            else:
                while piece := file.read(PIECE_BYTES):
                    yield piece

    def holds(self, *keys: bytes) -> bool:
        """Return whether the unpacked bytes hold one of `keys`; stops at the first."""
        overlap = max(map(len, keys)) - 1
        seam = b""
        for piece in self:
            text = seam + piece
            if any(key in text for key in keys):
                return True
            seam = text[-overlap:]
        return False


def _unpacked(file: IO[bytes], path: Path) -> Iterator[bytes]:
    """Yield the gzip streams in `file` unpacked; what follows the last stream is ignored, as gzip does.

    Raises `FormatError` where they unpack to more than a trace can: a run of blanks is 1,000 times its packed size.
    """
    most = unpacked_room(path.stat().st_size)
    inflater, size, inside = zlib.decompressobj(wbits=31), 0, False
    while packed := file.read(PIECE_BYTES // 8):
        while packed:
            inside = True
            try:
                piece = inflater.decompress(packed, PIECE_BYTES)
            except zlib.error as cause:
                raise FormatError(
                    f"{path} is damaged gzip before byte {file.tell()} ({size} bytes unpacked): {cause}. "
                    "Copy the file again."
                ) from cause
            size += len(piece)
            if size > most:
                raise FormatError(
                    f"{path} is no packed trace: its {path.stat().st_size} bytes unpack to more than {most}. "
                    "Use another copy."
                )
            yield piece
            packed = inflater.unconsumed_tail
            if inflater.eof:
                packed, inside = inflater.unused_data, False
                if not GZIP_MAGIC.startswith(packed[:2]):
                    return
                inflater = zlib.decompressobj(wbits=31)
    if inside:
        yield inflater.flush()
    if inside and not inflater.eof:
        raise FormatError(
            f"{path} is truncated gzip: it ends at byte {path.stat().st_size} inside a stream "
            f"({size} bytes unpacked). Copy the file again."
        )


HASHED = 1 << 30
"""Ids at and above this one come from a name that is no number."""

MOST_RANKS = 1 << 20
"""Ranks of a group that are listed one by one; a larger one is damage."""


def group_id(name: str) -> int:
    """Return the id (int32) of the group called `name`, -1 for no name."""
    if not name:
        return -1
    if name.isdecimal() and len(name) <= 10 and int(name) < HASHED:
        return int(name)
    return HASHED + zlib.crc32(name.encode("utf-8", "surrogatepass")) % HASHED


def parse_ranks(text: Any, *, start: int = 0, stride: int = 0, size: int = 0) -> list[int]:
    """Return the ranks of a group from a list or its text; long lists are cut short with '...' by torch.

    Then, or without any text, `size` ranks from `start` in steps of `stride` (0 counts as 1); [] when that is unknown.
    """
    if isinstance(text, str):
        try:
            text = decode_json(text, "the ranks of a group")
        except FormatError:
            text = None
    if isinstance(text, list) and text and all(type(rank) is int and 0 <= rank < 1 << 31 for rank in text):
        return text
    return [start + index * max(stride, 1) for index in range(size if size <= MOST_RANKS else 0)]
