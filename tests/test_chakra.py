"""Chakra execution traces: what is written comes back, other tools' files open, damage is named."""

import gzip
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import FormatError, InputError
from headway.sim.graph.dag import Dag, replay
from headway.sim.observed import listed, listed_dag, observe
from headway.trace.events.trace import COLUMNS, Trace, in_order
from headway.trace.events.vocabulary import KIND
from headway.trace.profiler.messages import delimited, prefixed
from headway.trace.readers import chakra
from headway.trace.readers.chakra import CLASSES
from tests.paths import shared
from tests.test_trace import rows
from tests.traces_made import traces


@st.composite
def ranked(draw: st.DrawFn) -> Trace:
    """A trace of a few ranks with random edges from earlier to later rows of one rank."""
    trace = draw(traces(wide=False))
    n = len(trace)
    events = {**trace.events, "rank": np.array(draw(st.lists(st.integers(0, 2), min_size=n, max_size=n)), np.int32)}
    pairs = draw(st.lists(st.tuples(st.integers(0, max(n - 1, 0)), st.integers(0, max(n - 1, 0))), max_size=8))
    good = [(a, b) for a, b in pairs if a < b < n and events["rank"][a] == events["rank"][b]]
    tables = (trace.names, trace.lanes, trace.groups, trace.ranks, trace.meta)
    return Trace(events, *tables, in_order(np.array(good, np.int64).reshape(-1, 2).T, n))


@settings(max_examples=40)
@given(trace=ranked(), packed=st.booleans())
def test_reading_gives_back_every_row_column_table_and_edge(trace, packed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("chakra")
    trace.save(folder / "a.et")
    if packed:
        for file in folder.iterdir():
            file.write_bytes(gzip.compress(file.read_bytes()))
    if not len(trace):
        assert not list(folder.iterdir())
        return

    back = Trace.open(folder / "a.et")

    by_rank = trace.where(np.argsort(trace.events["rank"], kind="stable"))
    assert rows(back) == rows(by_rank)
    assert back.events["group"].tolist() == by_rank.events["group"].tolist()
    assert back.edges.tolist() == by_rank.edges.tolist()
    assert (back.lanes, back.groups, back.ranks) == (trace.lanes, trace.groups, trace.ranks)
    assert {k: v for k, v in back.meta.items() if k != "coverage"} == {
        k: v for k, v in trace.meta.items() if k != "coverage"
    }


@settings(max_examples=30)
@given(trace=ranked(), order=st.randoms(use_true_random=False))
def test_nodes_may_stand_in_any_order(trace, order):
    messages = list(chakra.messages(trace, 0))
    head, ops = messages[0], messages[1:]
    order.shuffle(ops)

    back = chakra.parse(b"".join([head, *ops]), "a.0.et")

    expected = chakra.parse(b"".join(messages), "a.0.et")
    assert sorted(map(str, rows(back))) == sorted(map(str, rows(expected)))
    assert back.edges.shape == expected.edges.shape


def named(trace: Trace) -> list[tuple[str, ...]]:
    """Return the columns that a foreign reader sees, of rank 0."""
    found = delimited(b"".join(chakra.messages(trace, 0)), "a")
    next(found)
    return [CLASSES["Node"].FromString(text) for _, text in found]


def attributes(node) -> dict[str, object]:
    return {entry.name: entry.ListFields()[-1][1] for entry in node.attr}


def test_other_tools_find_their_own_attributes():
    trace = Trace.from_columns(
        {"start_ns": [1500, 4000, 9000], "duration_ns": [2000, 3000, 1000], "bytes": [4096, 512, 64]},
        rank=[0] * 3, peer=[-1, 1, 3], name=[0, 1, 2], lane=[1, 1, 0], group=[7, 7, -1], seq=[2, 5, -1],
        kind=[KIND["COLL"], KIND["SEND"], KIND["DATA"]], names=["ncclDevKernel_ReduceScatter_Sum", "send", "load"],
        lanes=["main", "stream 20"], groups={7: {"name": "tp", "ranks": [0, 1]}}, edges=[[0, 1], [1, 2]],
    )  # fmt: skip

    collective, send, load = named(trace)

    assert (collective.type, send.type, load.type) == (7, 5, 4)
    assert (collective.start_time_micros, collective.duration_micros) == (1, 2)
    assert attributes(collective).items() >= {"comm_type": 7, "comm_size": 4096, "pg_name": "tp", "stream": 20}.items()
    assert attributes(send).items() >= {"comm_src": 0, "comm_dst": 1, "comm_tag": 5, "comm_size": 512}.items()
    assert attributes(load).items() >= {"is_cpu_op": True, "tensor_size": 64}.items()
    assert [list(node.data_deps) for node in (collective, send, load)] == [[], [0], [1]]


def test_rows_around_others_do_not_count_twice():
    trace = Trace.from_columns(
        {"start_ns": [0, 10], "duration_ns": [100, 20], "kind": [4, 0], "rank": [0, 0]}, edges=[[], []]
    )

    outer, inner = named(trace)

    assert (outer.type, inner.type) == (chakra.METADATA, chakra.COMPUTE)


def foreign(*, micros: tuple[int, ...] = (10, 20, 40), version: str | None = "0.0.4") -> bytes:
    """Return a file as a generator writes it: compute, all-gather, receive, each after the one before."""
    head = CLASSES["GlobalMetadata"](version=version) if version else CLASSES["GlobalMetadata"]()
    if not version:
        head.attr.add(name="schema", string_val="1.0.2-chakra.0.0.4")
    texts = [prefixed(head.SerializeToString())]
    for place, (kind, name) in enumerate([(4, "gemm"), (7, "ncclKernel"), (6, "recv")]):
        node = CLASSES["Node"](id=100 + place, name=name, type=kind, duration_micros=5, start_time_micros=micros[place])
        node.attr.add(name="is_cpu_op", bool_val=False)
        if place:
            node.data_deps.append(99 + place)
            node.attr.add(name="comm_size", uint64_val=1024)
        if place == 1:
            node.attr.add(name="comm_type", int64_val=2)
            node.attr.add(name="pg_name", string_val="3")
        if place == 2:
            node.attr.add(name="comm_src", int32_val=4)
            node.attr.add(name="comm_tag", uint32_val=9)
        texts.append(prefixed(node.SerializeToString()))
    return b"".join(texts)


@pytest.mark.parametrize("version", ["0.0.4", None])
def test_a_generated_file_opens(version, tmp_path):
    path = tmp_path / "job.5.et"
    path.write_bytes(foreign(version=version))

    trace = Trace.open(path)

    events = trace.events
    assert events["rank"].tolist() == [5, 5, 5]
    assert [trace.name_of(i) for i in range(3)] == ["gemm", "ncclKernel [ALL_GATHER]", "recv"]
    assert events["kind"].tolist() == [KIND["COMPUTE"], KIND["COLL"], KIND["RECV"]]
    assert events["start_ns"].tolist() == [10_000, 20_000, 40_000]
    assert (events["group"][1], events["bytes"][1], events["peer"][2], events["seq"][2]) == (3, 1024, 4, 9)
    assert trace.edges.tolist() == [[0, 1], [1, 2]]
    assert observe(trace).edges["listed"] == 2


def test_a_file_without_times_is_replayed_by_its_dependencies(tmp_path):
    (tmp_path / "job.0.et").write_bytes(foreign(micros=(0, 0, 0)))

    trace = Trace.open(tmp_path / "job.0.et")
    times = replay(Dag.from_trace(trace), trace.events["duration_ns"])

    assert trace.meta["timed"] is False
    assert times.end_ns.tolist() == [5000, 10_000, 15_000]


def test_what_was_imported_keeps_its_dependencies_on_the_way_out(tmp_path):
    (tmp_path / "job.0.et").write_bytes(foreign())
    listed(Trace.open(tmp_path / "job.0.et")).save(tmp_path / "again.et")

    first, again = Trace.open(tmp_path / "job.0.et"), Trace.open(tmp_path / "again.et")

    assert again.edges.tolist() == first.edges.tolist()
    assert {column: again.events[column].tolist() for column in COLUMNS} == {
        column: first.events[column].tolist() for column in COLUMNS
    }


def test_no_kernel_of_a_real_profile_is_left_hanging():
    """All but the last kernel of each stream are waited for by something, and the order has no cycle."""
    trace = listed(Trace.open(shared("kineto/nccl_data.json.gz")))
    streams = [code for code, lane in enumerate(trace.lanes) if lane.startswith("stream ")]
    kernels = np.flatnonzero(np.isin(trace.events["lane"], streams) & (trace.events["kind"] != KIND["MARK"]))

    hanging = np.setdiff1d(kernels, trace.edges[0])

    assert kernels.size > 1000
    assert len(hanging) <= len(streams)
    assert (
        int(replay(listed_dag(trace), trace.events["duration_ns"]).end_ns.max()) <= trace.span_ns[1] - trace.span_ns[0]
    )


def test_truncated_and_damaged_files_tell_the_byte():
    data = foreign()

    with pytest.raises(FormatError, match=r"job.0.et is truncated: the message at byte \d+ needs \d+ bytes"):
        chakra.parse(data[:-3], "job.0.et")
    with pytest.raises(FormatError, match=r"is damaged at byte 9: no Node of Chakra"):
        chakra.parse(data[:9] + b"\xff" * data[8] + data[9 + data[8] :], "job.0.et")


def test_a_dependency_on_nothing_and_a_second_node_of_one_id_are_refused():
    head = prefixed(CLASSES["GlobalMetadata"](version="0.0.4").SerializeToString())
    one = prefixed(CLASSES["Node"](id=1, data_deps=[7]).SerializeToString())

    with pytest.raises(FormatError, match=r"node 1 depends on node 7, which is not in the file. Add it"):
        chakra.parse(head + one, "a.0.et")
    with pytest.raises(FormatError, match=r"two nodes with the id 1"):
        chakra.parse(head + one + one, "a.0.et")


def test_a_trace_that_lists_no_dependency_is_not_written(tmp_path):
    with pytest.raises(InputError, match=r"the trace lists none. `headway trace export"):
        Trace.from_columns({"rank": [0]}).save(tmp_path / "a.et")
    with pytest.raises(InputError, match="lists no dependencies"):
        listed_dag(Trace.from_columns({"rank": [0]}))


def test_a_file_of_a_later_version_of_ours_is_refused():
    head = CLASSES["GlobalMetadata"](version="0.0.4")
    head.attr.add(name=chakra.TABLES, string_val=json.dumps({"schema": "headway.chakra/9"}))

    with pytest.raises(FormatError, match=r"schema 'headway.chakra/9'; this version reads"):
        chakra.parse(prefixed(head.SerializeToString()), "a.0.et")


def test_text_that_is_no_utf_8_and_tables_of_no_shape_are_damage():
    data = foreign()
    head = CLASSES["GlobalMetadata"](version="0.0.4")
    head.attr.add(name=chakra.TABLES, string_val="[1]")

    with pytest.raises(FormatError, match=r"job.0.et is damaged: .*not UTF-8. Write it again"):
        chakra.parse(data.replace(b"gemm", b"ge\xffm"), "job.0.et")
    with pytest.raises(FormatError, match=r"a.0.et is damaged: .*Write it again"):
        chakra.parse(prefixed(head.SerializeToString()), "a.0.et")
