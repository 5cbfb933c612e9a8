"""Trace -> Perfetto's own protobuf, for ui.perfetto.dev and its trace processor.

Use it where Chrome JSON is too large: names are interned, times are whole
nanoseconds, and the file is written a rank at a time, so a trace need not fit
into memory. One process group per rank, a track per lane (a further one where
rows of a lane overlap without nesting), the columns as annotations, times on
the common clock where clocks were aligned. Flows join
the rows of a collective, a send and its receive, a launch and its kernel, and
forward with backward: Perfetto orders the rows of a flow by time. Written
only: Parquet is the format to keep a trace in.

>>> import tempfile
>>> path = Path(tempfile.mkdtemp()) / "a.pftrace"
>>> write(Trace.from_columns({"rank": [3], "start_ns": [7], "duration_ns": [5]}, names=["add"], name=[0]), path)
>>> written = CLASSES["Trace"].FromString(path.read_bytes())
>>> [packet.timestamp for packet in written.packet if packet.HasField("timestamp")]
[7, 12]
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.core.files.safe_files import whole_file
from headway.trace.events.parts import Parts
from headway.trace.events.trace import COLUMNS, Trace
from headway.trace.events.vocabulary import KIND, KINDS
from headway.trace.profiler.kineto_names import FORWARD, OP
from headway.trace.profiler.messages import message_classes
from headway.trace.sync.clocks import on_common_clock

CLASSES = message_classes(
    "headway.perfetto",
    {
        "Trace": {"packet": (1, "*TracePacket")},
        "TracePacket": {
            "timestamp": (8, "uint64"), "trusted_packet_sequence_id": (10, "uint32"), "track_event": (11, "TrackEvent"),
            "interned_data": (12, "InternedData"), "sequence_flags": (13, "uint32"),
            "track_descriptor": (60, "TrackDescriptor"),
        },
        "InternedData": {
            "event_categories": (1, "*Interned"), "event_names": (2, "*Interned"),
            "debug_annotation_names": (3, "*Interned"),
        },
        "Interned": {"iid": (1, "uint64"), "name": (2, "string")},
        "TrackDescriptor": {
            "uuid": (1, "uint64"), "name": (2, "string"), "process": (3, "ProcessDescriptor"),
            "parent_uuid": (5, "uint64"), "child_ordering": (11, "int32"), "sibling_order_rank": (12, "int32"),
        },
        "ProcessDescriptor": {"pid": (1, "int32"), "process_name": (6, "string")},
        "TrackEvent": {
            "category_iids": (3, "*uint64"), "debug_annotations": (4, "*DebugAnnotation"), "type": (9, "int32"),
            "name_iid": (10, "uint64"), "track_uuid": (11, "uint64"), "flow_ids": (47, "*fixed64"),
        },
        "DebugAnnotation": {"name_iid": (1, "uint64"), "int_value": (4, "int64"), "double_value": (5, "double")},
    },
)  # fmt: skip
"""The messages of Perfetto's trace format that are written here, with the numbers of their fields."""

BEGIN, END, INSTANT = 1, 2, 3
CLEARED, NEEDED = 1, 2
"""Sequence flags: interned data start here; this packet needs them."""

EXPLICIT = 3
"""Order of a process's tracks: by their rank among siblings."""

ANNOTATED = ("step", "microbatch", "stage", "layer", "depth", "group", "seq", "peer", "bytes", "flops", "corr")
"""Columns that are written as annotations, where they are known; the index + 1 is the interned id."""

TOGETHER = 1000
"""Packets per write."""


def write(source: Trace | Parts, path: str | Path) -> None:
    """Write `source`, whole or not at all. Raises `InputError` on a time before 0, which the format cannot hold."""
    parts = Parts.of(source)
    with whole_file(path) as draft, draft.open("wb") as out:
        batch = CLASSES["Trace"]()
        for packet in _packets(parts):
            batch.packet.append(packet)
            if len(batch.packet) == TOGETHER:
                out.write(batch.SerializeToString())
                batch.Clear()
        out.write(batch.SerializeToString())


def _packets(parts: Parts) -> Iterator[Any]:
    """Yield every packet: the words first, then rank by rank its tracks and rows."""
    tables = parts.tables
    words = [("event_categories", KINDS), ("debug_annotation_names", ANNOTATED), ("event_names", tables.names)]
    flags = CLEARED
    for field, entries in words:
        for first in range(0, len(entries), TOGETHER):
            packet = CLASSES["TracePacket"](trusted_packet_sequence_id=1, sequence_flags=flags)
            for place, entry in enumerate(entries[first : first + TOGETHER], first):
                getattr(packet.interned_data, field).add(iid=place + 1, name=entry)
            yield packet
            flags = NEEDED
    for place, (number, raw) in enumerate(zip(parts.numbers, parts, strict=True)):
        part = on_common_clock(raw)
        if len(part) and int(part.events["start_ns"].min()) < 0:
            raise InputError(
                f"rank {number} has a row at {part.events['start_ns'].min()} ns; Perfetto's times start at 0. "
                "Write .json.gz, or add an offset to the times."
            )
        yield from _rank_packets(part, number, place, len(parts.numbers))


def _rank_packets(part: Trace, number: int, place: int, count: int) -> Iterator[Any]:
    """Yield the process of one rank, its tracks, and its rows track by track."""
    process = (place + 1) << 32
    packet = CLASSES["TracePacket"](trusted_packet_sequence_id=1)
    title = f"rank {number}" if number >= 0 else "launcher"
    packet.track_descriptor.uuid, packet.track_descriptor.name = process, title
    packet.track_descriptor.process.pid = place + 1  # Process 0 means the kernel's idle thread to the viewer.
    packet.track_descriptor.process.process_name = title
    packet.track_descriptor.child_ordering = EXPLICIT
    packet.track_descriptor.sibling_order_rank = place if number >= 0 else count
    yield packet
    flows = _flows(part)
    lanes = part.events["lane"]
    for lane in np.unique(lanes).tolist():
        yield from _lane_packets(part, lane, np.flatnonzero(lanes == lane), process, flows)


def _lane_packets(
    part: Trace, lane: int, rows: NDArray[np.int64], process: int, flows: dict[int, list[int]]
) -> Iterator[Any]:
    """Yield the tracks of one lane, and its rows in order of start, each with its end.

    Rows of a track nest: one that overlaps the innermost open row without lying inside it goes to a further track.
    """
    start, duration = part.events["start_ns"], part.events["duration_ns"]
    rows = rows[np.lexsort((-duration[rows], start[rows]))]
    tracks: list[list[int]] = []
    for row, begin, length in zip(rows.tolist(), start[rows].tolist(), duration[rows].tolist(), strict=True):
        for track, ends in enumerate(tracks):
            while ends and ends[-1] <= begin:
                yield _edge_packet(END, ends.pop(), _uuid(process, lane, track))
            if not ends or begin + length <= ends[-1]:
                break
        else:
            track = len(tracks)
            tracks.append([])
            yield _track_packet(part.lanes[lane], lane, track, process)
        packet = _edge_packet(BEGIN if length else INSTANT, begin, _uuid(process, lane, track))
        _fill(packet.track_event, part, row, flows.get(row, ()))
        yield packet
        if length:
            tracks[track].append(begin + length)
    for track, ends in enumerate(tracks):
        for end in reversed(ends):
            yield _edge_packet(END, end, _uuid(process, lane, track))


def _uuid(process: int, lane: int, track: int) -> int:
    """Return the id of a track: lanes hold 15 bits, what overlaps on one of them 16."""
    return process + 1 + (lane << 16) + track


def _track_packet(title: str, lane: int, track: int, process: int) -> Any:
    """Return what introduces a track."""
    packet = CLASSES["TracePacket"](trusted_packet_sequence_id=1)
    packet.track_descriptor.uuid = _uuid(process, lane, track)
    packet.track_descriptor.parent_uuid = process
    packet.track_descriptor.name = title if not track else f"{title} ({track + 1})"
    packet.track_descriptor.sibling_order_rank = lane
    return packet


def _edge_packet(phase: int, at_ns: int, track: int) -> Any:
    """Return the begin or the end of a row."""
    packet = CLASSES["TracePacket"](timestamp=at_ns, trusted_packet_sequence_id=1, sequence_flags=NEEDED)
    packet.track_event.type, packet.track_event.track_uuid = phase, track
    return packet


def _fill(event: Any, part: Trace, row: int, flows: list[int] | tuple[()]) -> None:
    """Write what the row is."""
    events = part.events
    event.category_iids.append(int(events["kind"][row]) + 1)
    if events["name"][row] >= 0:
        event.name_iid = int(events["name"][row]) + 1
    for place, column in enumerate(ANNOTATED):
        value = events[column][row].item()
        if value != COLUMNS[column][1]:
            kind = "double_value" if column == "flops" else "int_value"
            event.debug_annotations.add(name_iid=place + 1, **{kind: value})
    event.flow_ids.extend(flows)


def _flows(part: Trace) -> dict[int, list[int]]:
    """Return row -> ids of the flows that it is part of; the same on every rank, so no rank need know another."""
    events = part.events
    group, seq, peer, corr, kind = (events[name] for name in ("group", "seq", "peer", "corr", "kind"))
    rank = events["rank"]
    found: dict[int, list[int]] = {}

    def enter(rows: NDArray[np.int64], what: str, *keys: NDArray[Any]) -> None:
        columns = [key[rows].tolist() for key in keys]
        for row, *values in zip(rows.tolist(), *columns, strict=True):
            found.setdefault(row, []).append(xxhash.xxh3_64_intdigest(f"{what} {values}".encode()))

    known = (group >= 0) & (seq >= 0)
    enter(np.flatnonzero((kind == KIND["COLL"]) & known), "collective", group, seq)
    sends = kind == KIND["SEND"]
    ends = np.where(sends, rank, peer), np.where(sends, peer, rank)
    enter(np.flatnonzero((sends | (kind == KIND["RECV"])) & known & (peer >= 0)), "message", group, seq, *ends)
    device = np.isin(events["lane"], [code for code, lane in enumerate(part.lanes) if "stream " in lane])
    callers = np.isin(kind, [KIND["HOST"], KIND["SYNC"]]) & ~device
    linked = (corr >= 0) & (corr < OP)
    # A launch whose kernel is not in this part, or the reverse, would be a flow of one row.
    both = np.intersect1d(corr[device & linked], corr[callers & linked])
    enter(np.flatnonzero((device | callers) & linked & np.isin(corr, both)), "launch", rank, corr)
    enter(np.flatnonzero(corr >= FORWARD), "backward", rank, corr)
    return found
