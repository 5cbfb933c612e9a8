"""What a process has recorded so far: its ring, the spool drained from it, and the sealed pieces of that.

`<stem>` is `a<attempt>-r<rank>-p<pid>`. Records go as they are from the ring
into `<stem>.spool`; a full spool is sealed into `<stem>.<k>.sealed` (columns,
delta-coded, zstd). `<stem>.head` keeps the header of a ring that was removed.
The ring itself may lie elsewhere (`headway.trace.rings.ring_folders`).
What is gone shows as missing record numbers, so the count of dropped records
is exact and needs no book-keeping.

>>> records = np.zeros(3, RECORD_DTYPE); records["number"] = [1, 2, 3]
>>> (unpack(pack(records)) == records).all()
np.True_
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import FormatError
from headway.core.files.bounded_json import read_json
from headway.trace.rings.records import RECORD_DTYPE, RecordRingReader, RingHeader
from headway.trace.rings.ring_folders import live_folder, ring_folders

MAGIC = b"HWSEAL1\0"
_STEM = re.compile(r"a(?P<attempt>\d+)-r(?P<rank>\d+)-p(?P<pid>\d+)(?:-\d+)?")
_DELTA = ("start_ns", "number")


def pack(records: NDArray[np.void]) -> bytes:
    """Return `records` as compressed columns."""
    import pyarrow

    columns = []
    for name in RECORD_DTYPE.names or ():
        column = np.ascontiguousarray(records[name])
        if name in _DELTA:
            column = np.diff(column, prepend=column.dtype.type(0))
        columns.append(column.tobytes())
    body = pyarrow.compress(b"".join(columns), codec="zstd", asbytes=True)
    return MAGIC + len(records).to_bytes(8, "little") + body  # type: ignore[no-any-return]  # pyarrow has no types


def unpack(data: bytes) -> NDArray[np.void]:
    """Return what `pack` packed; raises `FormatError` on anything else."""
    import pyarrow

    if data[:8] != MAGIC or len(data) < 16:
        raise FormatError(f"a sealed piece starts with {data[:8]!r}, not {MAGIC!r}. Remove the file from RUN/rings.")
    count = int.from_bytes(data[8:16], "little")
    try:
        raw = pyarrow.decompress(data[16:], decompressed_size=count * RECORD_DTYPE.itemsize, codec="zstd", asbytes=True)
    except (pyarrow.ArrowException, OSError) as cause:
        raise FormatError(f"a sealed piece is damaged: {cause}. Remove the file from RUN/rings.") from cause
    records, at = np.empty(count, RECORD_DTYPE), 0
    for name in RECORD_DTYPE.names or ():
        dtype = RECORD_DTYPE[name]
        column = np.frombuffer(raw, dtype, count, at)
        records[name] = np.cumsum(column, dtype=dtype) if name in _DELTA else column
        at += count * dtype.itemsize
    return records


def sealed_pieces(stem: Path) -> list[Path]:
    """Return the sealed pieces of one process, oldest first."""
    return sorted(stem.parent.glob(f"{stem.name}.*.sealed"))


def write_header(stem: Path, header: RingHeader) -> None:
    """Keep a ring's header beside its spool."""
    stem.with_suffix(".head").write_text(json.dumps(asdict(header)))


@dataclass(frozen=True, slots=True)
class Recorded:
    """Everything one process recorded that is still there."""

    header: RingHeader
    """Who recorded it."""

    records: NDArray[np.void]
    """[n] `RECORD_DTYPE`, by number, each once."""

    dropped: int
    """Records that were written but are gone."""


def stems(rings: Path, *, attempt: int | None = None, ranks: Collection[int] | None = None) -> list[Path]:
    """Return the stems of the processes that left anything in `rings`; `ranks` restricts it to theirs."""
    found = set()
    for folder in {rings, live_folder(rings)}:
        for path in folder.iterdir() if folder.is_dir() else ():
            match = _STEM.match(path.name)
            if (
                match
                and path.suffix in (".ring", ".head")
                and attempt in (None, int(match["attempt"]))
                and (ranks is None or int(match["rank"]) in ranks)
            ):
                found.add(rings / match[0])
    return sorted(found)


def stems_of_run(run: Path, *, attempt: int | None = None) -> list[Path]:
    """Return the stems of all hosts' processes, so far as they can be reached from here."""
    return [stem for rings in ring_folders(run) for stem in stems(rings, attempt=attempt)]


def attempt_of(stem: Path) -> int:
    """Return the attempt of the job that the process of `stem` was part of."""
    return int(stem.name[1 : stem.name.index("-")])


def ring_of(stem: Path) -> Path:
    """Return where the ring of `stem` lies."""
    return live_folder(stem.parent) / f"{stem.name}.ring"


def recorded(stem: Path) -> Recorded | None:
    """Return what the process of `stem` recorded, from pieces, spool and ring; None when nothing can be read."""
    parts, ring = drained(stem), ring_of(stem)
    header = None
    if ring.exists():
        try:
            reader = RecordRingReader(ring)
        except FormatError:
            pass
        else:
            header = reader.header
            parts.append(reader.drain(final=True))
            reader.close()
    if header is None:
        header = read_header(stem)
    if header is None:
        return None
    records = np.concatenate(parts) if parts else np.empty(0, RECORD_DTYPE)
    _, first = np.unique(records["number"], return_index=True)
    records = records[first]
    records = records[records["number"] > 0]
    written = int(records["number"][-1]) if len(records) else 0
    return Recorded(header, records, written - len(records))


def drained(stem: Path) -> list[NDArray[np.void]]:
    """Return what was taken out of the ring of `stem` so far, oldest first: sealed pieces, then the spool."""
    parts: list[NDArray[np.void]] = []
    for piece in sealed_pieces(stem):
        try:
            parts.append(unpack(piece.read_bytes()))
        except (FormatError, OSError):
            continue  # its numbers are then missing, and counted as dropped
    try:
        raw = stem.with_suffix(".spool").read_bytes()
    except OSError:
        return parts
    return [*parts, np.frombuffer(raw[: len(raw) // RECORD_DTYPE.itemsize * RECORD_DTYPE.itemsize], RECORD_DTYPE)]


def read_header(stem: Path) -> RingHeader | None:
    """Return the header that `write_header` kept, None when there is none."""
    try:
        saved = read_json(stem.with_suffix(".head"))
        return RingHeader(**{**saved, "threads": tuple(saved["threads"])})
    except (OSError, ValueError, TypeError):
        return None


def remove(stem: Path) -> None:
    """Remove every file of one process."""
    for path in _files(stem):
        path.unlink(missing_ok=True)


def _files(stem: Path) -> Iterator[Path]:
    yield from sealed_pieces(stem)
    yield stem.with_suffix(".spool")
    yield stem.with_suffix(".head")
    yield ring_of(stem)
    yield ring_of(stem).with_suffix(".stacks")
    yield ring_of(stem).with_suffix(".ask")
