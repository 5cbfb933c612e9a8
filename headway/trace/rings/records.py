"""Read the rings that recorded processes write: while they run, and after they died.

Use `RecordRingReader` to follow a ring (the launcher does). Records come as a numpy structured array of `RECORD_DTYPE`
in the order in which they were written. What the writer overwrote before it
was read is counted in `lost`, never guessed.

What the numbers a, b, c, d of a record mean: `SPANS[name].columns` in order.
Two names are raw and become other rows when a run is finalised:

- `input.parts` follows the `input.load` it measures (same lane, same start):
  a = thread CPU ns, b = run delay ns (-1: the kernel does not say), c = CPU ns
  of collate (part of a), d = ns of garbage collection (part of a).
  Fetch = duration - a - b. In the main process only some loads have parts: all
  those longer than 0.2 ms, and every 16th of the others.
- `input.worker` says which process is worker `peer` of iterator `corr`: pid =
  `seq`. The loads in that pid's ring carry group = n-th life of the worker's
  dataset (0, 1, ... : one per iterator, more than one with persistent workers)
  and peer = worker; the n-th `input.worker` row of a pid names their iterator.

>>> RECORD_DTYPE.itemsize, RECORD_DTYPE.names[-1]
(64, 'number')

What a process has recorded so far: its ring, the spool drained from it, and the sealed pieces of that.

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
import platform
import re
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import FormatError
from headway.core.files.safe_files import read_json
from headway.trace.rings.ring import (
    FIELDS,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    PAGE,
    PAGE_OFFSET,
    RECORD_BYTES,
    ROLES,
    THREAD_BYTES,
    THREADS_OFFSET,
)
from headway.trace.rings.ring_folders import live_folder, ring_folders

RECORD_DTYPE = np.dtype(
    [
        ("code", "u2"), ("lane", "u2"), ("step", "i4"), ("start_ns", "i8"), ("duration_ns", "i8"),
        ("a", "i8"), ("b", "i8"), ("c", "i8"), ("d", "i8"), ("number", "u8"),
    ]
)  # fmt: skip
"""One record; `number` counts from 1 and is 0 in a slot that was never written."""

IN_FLIGHT = 64
"""Writers that may be inside a record at one moment: the oldest this many slots of a full ring are not trusted."""

PATIENCE = 256
"""A number still missing after this many later ones is given up: its writer failed between taking and storing it."""

ORDERED_STORES = platform.machine() in ("x86_64", "AMD64", "i686")
"""Whether stores become visible in program order; elsewhere the newest record waits for the next drain."""


@dataclass(frozen=True, slots=True)
class RingHeader:
    """Who wrote a ring, and when."""

    pid: int
    """Process that writes the ring."""

    rank: int
    """Rank that the process is, or belongs to. It wins over the file's name: a spawned rank learns it late."""

    worker: int = -1
    """Loader worker, -1 for any other process."""

    attempt: int = 0
    """Attempt of the job, from 0."""

    local_rank: int = 0
    """Rank on this host."""

    role: str = "main"
    """One of `headway.trace.rings.ring.ROLES`."""

    capacity: int = 0
    """Records that the ring holds."""

    process_start_ns: int = 0
    """Start of the process to 10 ms, clock of `time.perf_counter_ns`; 0 if unknown."""

    clock_ns: int = 0
    """`time.perf_counter_ns()` at the same moment as `realtime_ns`."""

    realtime_ns: int = 0
    """`time.time_ns()` at the same moment as `clock_ns`."""

    end_ns: int = 0
    """End of the process; 0 while it runs or when it was killed."""

    threads: tuple[str, ...] = ()
    """Names of lanes 1, 2, ...; lane 0 is the main thread."""


@dataclass(frozen=True, slots=True)
class Page:
    """What a process was doing when its progress page was read."""

    step: int
    """Optimizer updates so far, all optimizers together."""

    progress_ns: int
    """End of the last one; 0 before the first."""

    op: int
    """Code of the operation that the process is in (`vocabulary.SPANS`), 0 for none."""

    group: int
    """Process group of the operation, -1 where that does not apply."""

    peer: int
    """Rank at the other end of a send or receive, -1 where that does not apply."""

    seq: int
    """Its number in that group, -1 where that does not apply."""

    since_ns: int
    """Its begin."""

    loss: float
    """Value of a tensor that a backward began from, taken now and then; NaN while unknown."""

    stack_signal: int
    """Signal that makes the process write its Python stacks, 0 for none."""


def read_page(buffer: Any) -> Page:
    """Return the progress page of a mapped ring as it stands; one that changes meanwhile is read again."""
    area = slice(PAGE_OFFSET, PAGE_OFFSET + PAGE.size)
    raw = bytes(buffer[area])
    for _ in range(4):
        before, raw = raw, bytes(buffer[area])
        if raw == before:
            break
    return Page(*PAGE.unpack(raw))


class RecordRingReader:
    """Follows one ring; `drain` returns what is new since the last call."""

    def __init__(self, path: str | Path) -> None:
        """Map the file; raises `FormatError` when it is not a ring, or not yet one."""
        self.path = Path(path)
        self.next = 0
        """Records up to this number have been returned or counted as lost."""
        self.lost = 0
        """Records overwritten before they were read, or never completed."""
        with self.path.open("rb") as file:
            head = file.read(HEADER_BYTES)
            if len(head) < HEADER_BYTES or head[:8] != MAGIC:
                raise FormatError(f"{path} is not a headway ring: its first bytes are {head[:8]!r}. Leave it out.")
            self._map = mmap(file.fileno(), 0, access=ACCESS_READ)
        capacity = self.header.capacity
        if len(self._map) < HEADER_BYTES + capacity * RECORD_BYTES:
            raise FormatError(
                f"{path} is cut off: {len(self._map)} bytes for {capacity} records. Copy the run folder again."
            )
        self._slots: NDArray[np.void] = np.frombuffer(self._map, RECORD_DTYPE, capacity, HEADER_BYTES)

    @property
    def header(self) -> RingHeader:
        """The header as it stands now."""
        return header_of(self._map)

    @property
    def page(self) -> Page:
        """The progress page as it stands now."""
        return read_page(self._map)

    def drain(self, *, final: bool = False) -> NDArray[np.void]:
        """Return new records, oldest first; `final` when the writer is gone: nothing is waited for then."""
        capacity = len(self._slots)
        head = int(self._slots["number"].max(initial=0)) - (0 if final or ORDERED_STORES else 1)
        if head <= self.next:
            return np.empty(0, RECORD_DTYPE)
        first = max(self.next, head - capacity)
        wanted = np.arange(first, head)
        block = self._slots[wanted & (capacity - 1)]
        unsafe = int(self._slots["number"].max()) + (0 if final else IN_FLIGHT) - capacity
        complete = (block["number"] == wanted + 1) & (wanted >= unsafe)
        # Up to the first number that may still be being written.
        fresh = wanted[~complete & (wanted >= head - PATIENCE)]
        end = head if final or not len(fresh) else int(fresh[0])
        taken = complete & (wanted < end)
        records: NDArray[np.void] = block[taken]
        self.lost += end - self.next - int(taken.sum())
        self.next = end
        return records

    def close(self) -> None:
        """Let go of the file."""
        del self._slots
        self._map.close()


def header_of(data: bytes | mmap) -> RingHeader:
    """Return the header that the first `HEADER_BYTES` of a ring hold. Raises `FormatError` when they hold none."""
    if len(data) < HEADER_BYTES or data[:8] != MAGIC:
        raise FormatError(f"this is not a headway ring: its first bytes are {data[:8]!r}. Leave it out.")
    numbers = dict(zip(FIELDS, HEADER.unpack_from(data, 0), strict=True))
    spans = [THREADS_OFFSET + i * THREAD_BYTES for i in range(numbers["num_threads"])]
    names = tuple(data[at : at + THREAD_BYTES].rstrip(b"\0").decode(errors="replace") for at in spans)
    wanted = {name: numbers[name] for name in RingHeader.__dataclass_fields__ if name in numbers}
    return RingHeader(**{**wanted, "role": ROLES[numbers["role"]], "threads": names})


SEAL_MAGIC = b"HWSEAL1\0"
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
    return SEAL_MAGIC + len(records).to_bytes(8, "little") + body  # type: ignore[no-any-return]  # pyarrow has no types


def unpack(data: bytes) -> NDArray[np.void]:
    """Return what `pack` packed; raises `FormatError` on anything else."""
    import pyarrow

    if data[:8] != SEAL_MAGIC or len(data) < 16:
        raise FormatError(
            f"a sealed piece starts with {data[:8]!r}, not {SEAL_MAGIC!r}. Remove the file from RUN/rings."
        )
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
