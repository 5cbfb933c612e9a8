"""Perfetto's protobuf: every row comes back from the packets, tracks nest, flows join what belongs together."""

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from headway.core.errors import InputError
from headway.trace.events import parquet
from headway.trace.events.parts import Parts
from headway.trace.events.trace import COLUMNS, Trace, concat
from headway.trace.events.vocabulary import KIND, KINDS
from headway.trace.profiler.kineto_names import FORWARD
from headway.trace.readers import perfetto
from headway.trace.readers.perfetto import ANNOTATED, BEGIN, CLASSES, CLEARED, END, INSTANT
from tests.paths import shared
from tests.traces_made import traces


class Viewer:
    """Reads a file the way Perfetto does: interned words, tracks below processes, a stack per track."""

    def __init__(self, path: Path) -> None:
        self.packets = CLASSES["Trace"].FromString(path.read_bytes()).packet
        self.words: dict[tuple[str, int], str] = {}
        self.tracks: dict[int, tuple[str, str]] = {}
        self.rows: list[tuple] = []
        self.flows: dict[int, list[tuple[str, int]]] = defaultdict(list)
        processes: dict[int, str] = {}
        still: dict[int, list[tuple[int, tuple]]] = defaultdict(list)
        for packet in self.packets:
            for field, entries in packet.interned_data.ListFields():
                self.words |= {(field.name, entry.iid): entry.name for entry in entries}
            track = packet.track_descriptor
            if track.HasField("process"):
                processes[track.uuid] = track.name
            elif track.uuid:
                self.tracks[track.uuid] = (processes[track.parent_uuid], track.name)
            if packet.HasField("track_event"):
                self._event(packet.timestamp, packet.track_event, still[packet.track_event.track_uuid])
        assert not any(still.values()), "a row never ends"

    def _event(self, at_ns: int, event, still: list) -> None:
        where = self.tracks[event.track_uuid]
        if event.type == END:
            begin, facts = still.pop()
            self.rows.append((*where, begin, at_ns, *facts))
            return
        name = self.words[("event_names", event.name_iid)] if event.HasField("name_iid") else ""
        notes = {
            self.words["debug_annotation_names", note.name_iid]: note.double_value
            if note.HasField("double_value")
            else note.int_value
            for note in event.debug_annotations
        }
        facts = (name, self.words["event_categories", event.category_iids[0]], tuple(sorted(notes.items())))
        for flow in event.flow_ids:
            self.flows[flow].append((where[0], at_ns))
        assert not still or at_ns >= still[-1][0], "a track's rows are out of order"
        if event.type == INSTANT:
            self.rows.append((*where, at_ns, at_ns, *facts))
        else:
            assert event.type == BEGIN
            still.append((at_ns, facts))


def expected(trace: Trace) -> list[tuple]:
    """Return the rows as the viewer shows them."""
    found = []
    for row in range(len(trace)):
        value = {column: trace.events[column][row].item() for column in COLUMNS}
        notes = {column: value[column] for column in ANNOTATED if value[column] != COLUMNS[column][1]}
        process = f"rank {value['rank']}" if value["rank"] >= 0 else "launcher"
        end = value["start_ns"] + value["duration_ns"]
        facts = (trace.name_of(row), KINDS[value["kind"]], tuple(sorted(notes.items())))
        found.append((process, trace.lanes[value["lane"]], value["start_ns"], end, *facts))
    return found


def on_lane(row: tuple) -> tuple:
    """Return a shown row without the number of a further track."""
    process, track, *rest = row
    return (process, track.rpartition(" (")[0] if track.endswith(")") else track, *rest)


@settings(max_examples=60)
@given(trace=traces(wide=False))
def test_every_row_comes_back_with_its_columns(trace, tmp_path_factory):
    path = tmp_path_factory.mktemp("perfetto") / "a.pftrace"
    trace = Trace(trace.events, trace.names, ("main", "stream 7", "x", "y")[: len(trace.lanes)])
    trace.save(path)

    assert sorted(map(str, map(on_lane, Viewer(path).rows))) == sorted(map(str, expected(trace)))


def test_rows_that_overlap_without_nesting_get_a_further_track(tmp_path):
    trace = Trace.from_columns({"start_ns": [0, 5, 7, 20], "duration_ns": [10, 10, 1, 5], "rank": [0] * 4})
    trace.save(tmp_path / "a.pftrace")

    rows = Viewer(tmp_path / "a.pftrace").rows

    assert sorted((track, begin) for _, track, begin, *_ in rows) == [
        ("main", 0), ("main", 7), ("main", 20), ("main (2)", 5),
    ]  # fmt: skip


def test_words_are_written_once_and_the_first_packet_clears_the_state(tmp_path):
    trace = Trace.from_columns(
        {"start_ns": np.arange(5000), "name": np.arange(5000) % 2500}, names=[f"op {i}" for i in range(2500)]
    )
    trace.save(tmp_path / "a.perfetto-trace")

    viewer = Viewer(tmp_path / "a.perfetto-trace")

    assert viewer.packets[0].sequence_flags == CLEARED
    assert sum(len(packet.interned_data.event_names) for packet in viewer.packets) == 2500
    assert (tmp_path / "a.perfetto-trace").read_bytes().count(b"op 2499") == 1


def test_collectives_messages_launches_and_backwards_are_flows(tmp_path):
    trace = Trace.from_columns(
        {
            "rank": [0, 1, 0, 1, 0, 0, 0, 0],
            "kind": [KIND[k] for k in ("COLL", "COLL", "SEND", "RECV", "HOST", "COMPUTE", "HOST", "HOST")],
            "lane": [0, 0, 0, 0, 0, 1, 0, 0], "start_ns": np.arange(8) * 10, "duration_ns": [5] * 8,
            "group": [3, 3, 3, 3, -1, -1, -1, -1], "seq": [8, 8, 1, 1, -1, -1, -1, -1],
            "peer": [-1, -1, 1, 0, -1, -1, -1, -1], "corr": [-1, -1, -1, -1, 44, 44, FORWARD + 2, FORWARD + 2],
        },
        lanes=["main", "stream 7"],
    )  # fmt: skip
    trace.save(tmp_path / "a.pftrace")

    flows = sorted(Viewer(tmp_path / "a.pftrace").flows.values())

    assert flows == [
        [("rank 0", 0), ("rank 1", 10)], [("rank 0", 20), ("rank 1", 30)], [("rank 0", 40), ("rank 0", 50)],
        [("rank 0", 60), ("rank 0", 70)],
    ]  # fmt: skip


def test_writing_by_rank_from_files_gives_the_same_bytes_as_from_memory(tmp_path):
    parts = [Trace.open(shared(f"kineto/sampled_rank-{rank}.json.gz")) for rank in (0, 1)]
    for rank, trace in enumerate(parts):
        parquet.write(trace, tmp_path / f"r{rank}.parquet")

    perfetto.write(concat(parts), tmp_path / "memory.pftrace")
    perfetto.write(Parts.of_files([tmp_path / "r0.parquet", tmp_path / "r1.parquet"]), tmp_path / "files.pftrace")

    assert (tmp_path / "memory.pftrace").read_bytes() == (tmp_path / "files.pftrace").read_bytes()
    assert len(Viewer(tmp_path / "files.pftrace").rows) == sum(map(len, parts))


def test_a_time_before_zero_is_refused_and_leaves_no_file(tmp_path):
    with pytest.raises(InputError, match=r"rank 2 has a row at -5 ns; Perfetto's times start at 0. Write .json.gz"):
        Trace.from_columns({"rank": [2], "start_ns": [-5]}).save(tmp_path / "a.pftrace")

    assert not list(tmp_path.iterdir())
