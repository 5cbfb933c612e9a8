"""Trace -> Chrome JSON for ui.perfetto.dev and chrome://tracing, and back.

Use it to look at a window of a run: one track group per rank, one track per
lane, arrows from launch to kernel, from forward to backward and from the last
rank of a collective to those that waited for it; on request an ideal timeline
under each rank. Times are written in microseconds from the first event, three
decimals, so no viewer rounds them; the base stands in `baseTimeNanoseconds`.
The file appears whole or not at all.

>>> import tempfile
>>> path = Path(tempfile.mkdtemp()) / "a.json"
>>> trace = Trace.from_columns({"start_ns": [10**18 + 1], "duration_ns": [5]}, names=["add"], name=[0])
>>> write(trace, path)
>>> Trace.open(path).events["start_ns"].tolist()
[1000000000000000001]

Which row of a trace made which other row possible, for drawing.

Use it for the arrows of a timeline: from the call that launched a kernel to
the kernel, from a forward op to its backward op, from a send to its receive,
and from the rank that came last to a collective to each rank that waited.
Times are int64 nanoseconds on the trace's clock.

>>> trace = Trace.from_columns(
...     {"rank": [0, 1], "start_ns": [0, 30], "duration_ns": [50, 20], "group": [0, 0], "seq": [4, 4]},
...     kind=[KIND["COLL"]] * 2)
>>> [(arrow.source, arrow.target, arrow.leave_ns, arrow.arrive_ns) for arrow in arrows(trace)]
[(1, 0, 30, 30)]
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.core.errors import FormatError, InputError
from headway.core.files.safe_files import check_room, cost_of, whole_file
from headway.trace.events.parquet import numbered, plain_tables
from headway.trace.events.trace import COLUMNS, Trace
from headway.trace.events.vocabulary import KIND, KINDS
from headway.trace.profiler.json_pieces import to_ns
from headway.trace.profiler.kineto_names import FORWARD

if TYPE_CHECKING:
    from headway.trace.events.content import Content


@dataclass(frozen=True, slots=True)
class Arrow:
    """One arrow between two rows."""

    name: str
    """'launch', 'backward', 'collective' or 'message'."""

    source: int
    """Row it leaves."""

    target: int
    """Row it points at."""

    leave_ns: int
    """Time at which it leaves, inside the source row."""

    arrive_ns: int
    """Time at which it arrives, inside the target row."""


def arrows(trace: Trace) -> list[Arrow]:
    """Return every arrow of `trace`, launches first."""
    return [*_launches(trace), *_backwards(trace), *_collectives(trace), *_messages(trace)]


def _launches(trace: Trace) -> Iterator[Arrow]:
    """Pair device rows with the host call that bears their correlation id."""
    corr = trace.events["corr"]
    device = np.isin(trace.events["lane"], [code for code, lane in enumerate(trace.lanes) if "stream " in lane])
    callers = np.isin(trace.events["kind"], [KIND["HOST"], KIND["SYNC"]]) & ~device & (corr >= 0)
    source_of = {key: row for row, key in _keyed(trace, np.flatnonzero(callers)[::-1])}
    for row, key in _keyed(trace, np.flatnonzero(device & (corr >= 0))):
        if key in source_of:
            yield _arrow(trace, "launch", source_of[key], row)


def _backwards(trace: Trace) -> Iterator[Arrow]:
    """Pair the two ends of the profiler's forward-backward links."""
    first: dict[tuple[int, int], int] = {}
    rows = np.flatnonzero(trace.events["corr"] >= FORWARD)
    for row, key in _keyed(trace, rows[np.argsort(trace.events["start_ns"][rows], kind="stable")]):
        if first.setdefault(key, row) != row:
            yield _arrow(trace, "backward", first[key], row)


def _keyed(trace: Trace, rows: NDArray[np.int64]) -> list[tuple[int, tuple[int, int]]]:
    """Return (row, (rank, corr)) of each row."""
    keys = zip(trace.events["rank"][rows].tolist(), trace.events["corr"][rows].tolist(), strict=True)
    return list(zip(rows.tolist(), keys, strict=True))


def _collectives(trace: Trace) -> Iterator[Arrow]:
    """Point from the last rank that came to a collective at the others."""
    for rows in _matched(trace, "COLL").values():
        of_rank = {int(trace.events["rank"][row]): row for row in reversed(rows)}
        if len(of_rank) < 2:
            continue
        last = max(of_rank.values(), key=lambda row: int(trace.events["start_ns"][row]))
        for row in of_rank.values():
            if row != last:
                yield _arrow(trace, "collective", last, row, leave_ns=int(trace.events["start_ns"][last]))


def _messages(trace: Trace) -> Iterator[Arrow]:
    """Point from each send at the receive of its peer."""
    receives = _matched(trace, "RECV")
    rank, peer = trace.events["rank"], trace.events["peer"]
    for key, rows in _matched(trace, "SEND").items():
        for send in rows:
            for receive in receives.get(key, []):
                if rank[receive] == peer[send] and peer[receive] in (rank[send], -1):
                    yield _arrow(trace, "message", send, receive)
                    break


def _matched(trace: Trace, kind: str) -> dict[tuple[int, int], list[int]]:
    """Return the rows of one kind by (group, seq), where both are known."""
    group, seq = trace.events["group"], trace.events["seq"]
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row in np.flatnonzero((trace.events["kind"] == KIND[kind]) & (group >= 0) & (seq >= 0)).tolist():
        found[int(group[row]), int(seq[row])].append(row)
    return found


def _arrow(trace: Trace, name: str, source: int, target: int, *, leave_ns: int | None = None) -> Arrow:
    """Build an arrow that leaves at the source's start and arrives inside the target, no earlier if it can."""
    start_ns, duration_ns = trace.events["start_ns"], trace.events["duration_ns"]
    leave = int(start_ns[source]) if leave_ns is None else leave_ns
    begin = int(start_ns[target])
    arrive = min(max(begin, leave), begin + int(duration_ns[target]))
    return Arrow(name, source, target, leave, arrive)


SCHEMA = "headway.chrome/1"
"""Marks our own files, which come back with every column; stands near the beginning."""

ARGUMENTS = ("step", "microbatch", "stage", "layer", "depth", "group", "seq", "peer", "bytes", "flops", "corr")
"""Columns that are written as arguments, where they are known."""

ROOM = 1_000_000
"""Process ids: a rank is its own. Rows without rank stand at the first multiple of this above all ranks, the ideal
timeline at twice that; both numbers are in the file."""


def write(
    trace: Trace, path: str | Path, *, window_ns: tuple[int, int] | None = None, ideal: Trace | None = None
) -> None:
    """Write the rows of `trace` that overlap `window_ns` (None = all); gzip when `path` ends in `.gz`.

    `ideal` stands under each rank, moved so that both start together; reading the file back leaves it out.
    Raises `InputError` on an empty window or a missing folder.
    """
    shown = trace if window_ns is None else _window(trace, window_ns)
    with whole_file(path) as draft, draft.open("wb") as raw:
        packed = gzip.GzipFile("", "wb", 5, raw, 0) if str(path).endswith(".gz") else None
        out: IO[bytes] = cast(IO[bytes], packed or raw)
        for text in _texts(shown, ideal):
            out.write(text)
        if packed is not None:
            packed.close()


def read(content: Content) -> Trace:
    """Read a file that `write` wrote, with every column.

    Raises `FormatError` when it is damaged or of another version.
    """
    return parse(content.data, str(content.path))


def parse(data: bytes, where: str) -> Trace:
    """Decode the JSON text of a file that `write` wrote; `where` names it in messages."""
    check_room(cost_of(data), len(data), where, "JSON values")
    try:
        document = msgspec.json.decode(data, type=_Document)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as cause:
        raise FormatError(f"{where} is damaged within its {len(data)} bytes: {cause}. Export it again.") from cause
    facts = document.facts
    if facts.schema != SCHEMA:
        raise FormatError(f"{where} has the schema {facts.schema!r}; this version reads {SCHEMA!r}. Export it again.")
    rows = [event for event in document.events if event.phase == "X" and event.pid < facts.ideal_pid]
    names: dict[str, int] = {}
    columns: dict[str, Any] = {
        "rank": [event.pid if event.pid < facts.rankless_pid else -1 for event in rows],
        "kind": [KIND.get(event.kind, KIND["MARK"]) for event in rows],
        "name": [names.setdefault(event.name, len(names)) if event.name else -1 for event in rows],
        "lane": [event.tid for event in rows],
        "start_ns": to_ns([event.start for event in rows]) + document.base_ns,
        "duration_ns": to_ns([event.duration for event in rows]),
    }
    for column in ARGUMENTS:
        columns[column] = [getattr(event.args, column) for event in rows]
    return Trace.from_columns(
        columns,
        names=list(names),
        lanes=facts.lanes,
        groups=numbered(facts.groups),
        ranks=numbered(facts.ranks),
        meta=facts.meta,
    )


class _Arguments(msgspec.Struct, frozen=True):
    """The columns of `ARGUMENTS`."""

    step: int = -1
    microbatch: int = -1
    stage: int = -1
    layer: int = -1
    depth: int = 0
    group: int = -1
    seq: int = -1
    peer: int = -1
    bytes: int = 0
    flops: float = 0.0
    corr: int = -1


_UNKNOWN = _Arguments()


class _Event(msgspec.Struct):
    """One entry of `traceEvents` as we write it."""

    phase: str = msgspec.field(name="ph")
    pid: int = 0
    tid: int = 0
    name: str = ""
    kind: str = msgspec.field(default="MARK", name="cat")
    start: msgspec.Raw = msgspec.field(default=msgspec.Raw(b"0"), name="ts")
    duration: msgspec.Raw = msgspec.field(default=msgspec.Raw(b"0"), name="dur")
    args: _Arguments = _UNKNOWN


class _ChromeTables(msgspec.Struct):
    """The tables, under `otherData`."""

    schema: str = ""
    rankless_pid: int = ROOM
    ideal_pid: int = 2 * ROOM
    lanes: list[str] = []
    groups: dict[str, Any] = {}
    ranks: dict[str, Any] = {}
    meta: dict[str, Any] = {}


class _Document(msgspec.Struct):
    """The whole file."""

    facts: _ChromeTables = msgspec.field(name="otherData")
    base_ns: int = msgspec.field(name="baseTimeNanoseconds")
    events: list[_Event] = msgspec.field(name="traceEvents")


def _window(trace: Trace, window_ns: tuple[int, int]) -> Trace:
    """Return the rows that overlap the window."""
    begin, end = window_ns
    start_ns = trace.events["start_ns"]
    shown = trace.where((start_ns < end) & (start_ns + trace.events["duration_ns"] >= begin))
    if not len(shown):
        low, high = trace.span_ns
        raise InputError(f"no event lies in [{begin}, {end}) ns; the trace spans [{low}, {high}). Move the window.")
    return shown


def _texts(trace: Trace, ideal: Trace | None) -> Iterator[bytes]:
    """Yield the file, a piece at a time."""
    base_ns = trace.span_ns[0]
    highest = max(int(each.events["rank"].max(initial=0)) for each in (trace, ideal or trace))
    rankless = (highest // ROOM + 1) * ROOM
    facts = {"schema": SCHEMA, "rankless_pid": rankless, "ideal_pid": 2 * rankless}
    try:
        head = json.dumps({**facts, **plain_tables(trace)}, allow_nan=False)
    except ValueError as cause:
        raise InputError(f"a table of the trace holds a number JSON lacks: {cause}. Write None instead.") from cause
    yield f'{{"otherData":{head},"displayTimeUnit":"ns","baseTimeNanoseconds":{base_ns},"traceEvents":['.encode()
    first = True
    for line in _lines(trace, ideal, rankless):
        yield ("\n" if first else ",\n").encode() + line.encode()
        first = False
    yield b"\n]}\n"


def _lines(trace: Trace, ideal: Trace | None, rankless: int) -> Iterator[str]:
    """Yield every entry as JSON."""
    base_ns = trace.span_ns[0]
    pids = _pids(trace, rankless)
    yield from _titles(trace, pids, "")
    yield from _rows(trace, pids, base_ns)
    yield from _arrow_lines(trace, pids, base_ns)
    if ideal is not None:
        pids = _pids(ideal, rankless) + 2 * rankless
        yield from _titles(ideal, pids, ", ideal")
        yield from _rows(ideal, pids, ideal.span_ns[0])


def _pids(trace: Trace, rankless: int) -> NDArray[np.int64]:
    """[n] Process id of each row."""
    rank = trace.events["rank"].astype(np.int64)
    return np.where(rank >= 0, rank, rankless)


def _titles(trace: Trace, pids: NDArray[np.int64], suffix: str) -> Iterator[str]:
    """Yield names and order of the track groups and tracks; an ideal one stands right under the real one."""
    lanes = trace.events["lane"]
    for pid, row in zip(*(found.tolist() for found in np.unique(pids, return_index=True)), strict=True):
        rank = int(trace.events["rank"][row])
        title = f"rank {rank}{suffix}" if rank >= 0 else f"launcher{suffix}"
        yield _title("process_name", pid, 0, "name", title)
        yield _title("process_sort_index", pid, 0, "sort_index", 2 * rank + bool(suffix))
        for lane in np.unique(lanes[pids == pid]).tolist():
            yield _title("thread_name", pid, lane, "name", trace.lanes[lane])
            yield _title("thread_sort_index", pid, lane, "sort_index", lane)


def _title(name: str, pid: int, tid: int, key: str, value: object) -> str:
    """Return one metadata entry."""
    return json.dumps({"ph": "M", "name": name, "pid": pid, "tid": tid, "args": {key: value}})


def _rows(trace: Trace, pids: NDArray[np.int64], base_ns: int) -> Iterator[str]:
    """Yield the events."""
    names = [*(json.dumps(name) for name in trace.names), '""']  # Code -1, no name, is the last.
    kinds = [json.dumps(kind) for kind in KINDS]
    extra = _arguments(trace)
    columns = (
        pids, trace.events["lane"], trace.events["kind"], trace.events["name"],
        trace.events["start_ns"] - base_ns, trace.events["duration_ns"],
    )  # fmt: skip
    for row, (pid, lane, kind, name, start, duration) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        yield (
            f'{{"ph":"X","name":{names[name]},"cat":{kinds[kind]},"pid":{pid},"tid":{lane},'
            f'"ts":{_us(start)},"dur":{_us(duration)},"args":{{{extra[row]}}}}}'
        )


def _arguments(trace: Trace) -> list[str]:
    """[n] The inside of each row's `args`: the columns that hold more than 'unknown'."""
    texts: list[list[str]] = [[] for _ in range(len(trace))]
    for column in ARGUMENTS:
        values, blank = trace.events[column], COLUMNS[column][1]
        rows = np.flatnonzero((values != blank) & np.isfinite(values))
        for row, value in zip(rows.tolist(), values[rows].tolist(), strict=True):
            texts[row].append(f'"{column}":{value!r}')
    return [",".join(parts) for parts in texts]


def _arrow_lines(trace: Trace, pids: NDArray[np.int64], base_ns: int) -> Iterator[str]:
    """Yield both ends of every arrow."""
    lanes = trace.events["lane"]
    for number, arrow in enumerate(arrows(trace)):
        ends: Iterable[tuple[str, int, int]] = (
            ("s", arrow.source, arrow.leave_ns),
            ("f", arrow.target, arrow.arrive_ns),
        )
        for phase, row, at_ns in ends:
            yield (
                f'{{"ph":"{phase}","name":"{arrow.name}","cat":"{arrow.name}","id":{number},"pid":{pids[row]},'
                f'"tid":{lanes[row]},"ts":{_us(at_ns - base_ns)}' + (',"bp":"e"}' if phase == "f" else "}")
            )


def _us(time_ns: int) -> str:
    """Return nanoseconds as decimal microseconds.

    >>> _us(1523041), _us(-7)
    ('1523.041', '-0.007')
    """
    sign, size = ("-", -time_ns) if time_ns < 0 else ("", time_ns)
    return f"{sign}{size // 1000}.{size % 1000:03d}"
