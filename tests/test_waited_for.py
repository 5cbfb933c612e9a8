"""Which rows waited for which: agrees with what times allow, with hand-made traces, and with the replayed order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks._synthetic import SyntheticJob, generate
from headway.ledger.operations.dependencies import infer
from headway.ledger.operations.operation_table import arrange
from headway.ledger.waited_for import waited_for
from headway.trace.events.trace import Trace
from headway.trace.events.vocabulary import KIND

NAMES = ["comm.wait", "comm.send", "comm.recv", "optimizer.step", "step"]
WAIT, SEND, RECV, UPDATE, STEP = range(5)


def recorded(rows: list[tuple[int, int, int, int, int, int]], **more) -> Trace:
    """Return rows (name, rank, start, duration, seq, peer) of group 0."""
    columns = ("name", "rank", "start_ns", "duration_ns", "seq", "peer")
    kinds = {WAIT: "COLL", SEND: "SEND", RECV: "RECV", UPDATE: "OPTIM", STEP: "MARK"}
    values = {column: [row[i] for row in rows] for i, column in enumerate(columns)}
    kind = [KIND[kinds[row[0]]] for row in rows]
    return Trace.from_columns({**values, "kind": kind, "group": [0] * len(rows)}, names=NAMES, **more)


def pairs(trace: Trace) -> set[tuple[int, int]]:
    return set(map(tuple, waited_for(trace).T.tolist()))


@given(st.permutations(range(6)), st.integers(2, 3))
def test_of_a_collective_all_others_wait_for_the_rank_that_came_last(starts, ranks):
    trace = recorded([(WAIT, rank, starts[rank], 10, 4, -1) for rank in range(ranks)])
    last = max(range(ranks), key=lambda rank: starts[rank])

    assert pairs(trace) == {(last, rank) for rank in range(ranks) if rank != last}


@given(st.integers(-(10**9), 10**9))
def test_offset_clocks_do_not_change_who_came_last(offset):
    trace = recorded([(WAIT, 0, 100, 10, 4, -1), (WAIT, 1, 50 - offset, 10, 4, -1)], ranks={1: {"offset_ns": offset}})

    assert pairs(trace) == {(0, 1)}


def test_a_receive_waits_for_its_send_and_a_thread_runs_in_order():
    rows = [(UPDATE, 0, 0, 2, -1, -1), (SEND, 0, 3, 1, 7, 1), (RECV, 1, 0, 5, 7, 0), (RECV, 1, 6, 5, 8, 0)]

    assert pairs(recorded([*rows, (STEP, 0, 0, 9, -1, -1)])) == {(0, 1), (1, 2), (2, 3)}


def test_collectives_of_another_number_have_nothing_to_do_with_each_other():
    trace = recorded([(WAIT, 0, 0, 5, 1, -1), (WAIT, 1, 0, 5, 2, -1)])

    assert pairs(trace) == set()


def test_an_operation_trace_has_the_order_that_its_analysis_infers():
    """Oracle: the inferred order, one step and one DP rank at a time."""
    trace = generate(SyntheticJob(dp=2, pp=2, num_microbatches=3, num_steps=2), seed=4).trace
    table = arrange(trace)
    order = infer(table)

    found = pairs(trace)

    for step in range(2):
        for dp in range(2):
            row = table.row[step, dp]
            assert {
                (row[a], row[b]) for a, b in zip(order.source.tolist(), order.target.tolist(), strict=True)
            } <= found
    crossing = {(a, b) for a, b in found if trace.events["rank"][a] != trace.events["rank"][b]}
    assert len({(int(trace.events["rank"][a]), int(trace.events["rank"][b])) for a, b in crossing}) >= 4
    assert all(trace.events["step"][a] == trace.events["step"][b] for a, b in found)


def test_in_a_window_of_the_profiler_nothing_ends_before_what_it_waited_for():
    trace = _window()
    found = waited_for(trace)
    start, end = trace.events["start_ns"], trace.events["start_ns"] + trace.events["duration_ns"]

    assert found.shape[1] > 0
    assert (start[found[0]] <= end[found[1]]).all()


def _window() -> Trace:
    """Return two threads' operators and a kernel stream of one rank."""
    rows = {"rank": [0] * 4, "lane": [0, 0, 1, 1], "start_ns": [0, 10, 12, 30], "duration_ns": [5, 9, 8, 5]}
    kind = [KIND["HOST"], KIND["HOST"], KIND["COMPUTE"], KIND["COMPUTE"]]
    columns = {**rows, "kind": kind, "name": [0, 1, 2, 2], "corr": [-1, 5, 5, -1]}
    return Trace.from_columns(columns, names=["aten::add", "cudaLaunchKernel", "gemm"], lanes=["main", "stream 7"])


def test_a_trace_that_lists_its_dependencies_keeps_them():
    trace = Trace.from_columns({"start_ns": [0, 5, 9]}, names=[])
    listed = type(trace)(trace.events, edges=np.array([[0, 1], [2, 2]]))

    assert waited_for(listed).tolist() == [[0, 1], [2, 2]]


@pytest.mark.parametrize("trace", [Trace.from_columns({}), Trace.from_columns({"start_ns": [1]}, names=["x"])])
def test_where_nothing_is_known_there_is_no_pair(trace):
    assert waited_for(trace).shape == (2, 0)
