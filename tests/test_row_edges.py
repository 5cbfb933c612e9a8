"""Dependencies written down between rows: complete, within a rank, and never a cycle."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.sim.graph.dag import replay
from headway.sim.observed import listed, listed_dag
from headway.trace.events.trace import Trace
from headway.trace.events.vocabulary import KIND
from tests.paths import shared

KINDS = [KIND[name] for name in ("COMPUTE", "HOST", "SYNC", "DATA", "COLL")]


@st.composite
def windows(draw: st.DrawFn) -> Trace:
    """Random rows of two ranks on a thread and a stream, some launched by others."""
    n = draw(st.integers(1, 14))
    ints = {"start_ns": (0, 40), "duration_ns": (0, 12), "rank": (0, 1), "lane": (0, 1), "corr": (-1, 4)}
    columns = {name: draw(st.lists(st.integers(*bounds), min_size=n, max_size=n)) for name, bounds in ints.items()}
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=n, max_size=n))
    group = draw(st.lists(st.integers(-1, 0), min_size=n, max_size=n))
    return Trace.from_columns(
        {**columns, "kind": kinds, "group": group, "seq": np.arange(n)}, lanes=["main", "stream 7"]
    )


@settings(max_examples=120)
@given(trace=windows())
def test_edges_stay_within_a_rank_point_forward_and_form_no_cycle(trace):
    found = listed(trace)

    source, target = found.edges
    rank, start = trace.events["rank"], trace.events["start_ns"]
    assert (rank[source] == rank[target]).all()
    assert (start[source] <= start[target]).all()
    replay(listed_dag(found), trace.events["duration_ns"])  # a cycle would raise


@settings(max_examples=60)
@given(trace=windows())
def test_rows_of_one_lane_are_a_chain(trace):
    """What runs on one thread or stream without overlap is ordered by the edges, whatever else they say."""
    plain = trace.where(np.flatnonzero((trace.events["lane"] == 1) & (trace.events["rank"] == 0)))
    start = np.arange(len(plain)) * 100
    if not len(plain):
        return
    apart = Trace.from_columns({**plain.events, "start_ns": start}, lanes=plain.lanes)

    pairs = set(zip(*listed(apart).edges.tolist(), strict=True))

    assert pairs == {(row, row + 1) for row in range(len(plain) - 1)}


def test_a_blocking_copy_is_waited_for_by_what_follows_its_call():
    """The copy ends inside the call that launched it: the call cannot wait for it as a row, the next one does."""
    trace = Trace.from_columns(
        {"start_ns": [0, 5, 25], "duration_ns": [20, 10, 5], "corr": [3, 3, -1], "name": [0, 1, 2]},
        rank=[0] * 3, lane=[0, 1, 0], kind=[KIND["HOST"], KIND["DATA"], KIND["HOST"]],
        names=["cudaMemcpyAsync", "Memcpy DtoH", "aten::item"], lanes=["main", "stream 7"],
    )  # fmt: skip

    assert set(zip(*listed(trace).edges.tolist(), strict=True)) == {(0, 1), (0, 2), (1, 2)}


def test_a_trace_that_lists_its_own_is_left_alone():
    trace = Trace.from_columns({"start_ns": [0, 9], "duration_ns": [5, 2], "kind": [0, 0]}, edges=[[], []])

    assert listed(trace) is trace


@pytest.mark.parametrize("name", ["cpu_only", "cuda_event_sync", "ns_resolution", "rocm_mi250"])
def test_replayed_by_its_edges_a_real_profile_is_no_longer_than_it_was(name):
    trace = listed(Trace.open(shared(f"kineto/{name}.json.gz")))

    makespan_ns = int(replay(listed_dag(trace), trace.events["duration_ns"]).end_ns.max())

    assert 0 < makespan_ns <= trace.span_ns[1] - trace.span_ns[0]


def test_a_trace_without_operations_says_so():
    with pytest.raises(InputError, match="no operation to order"):
        listed(Trace.from_columns({"kind": [KIND["MARK"]]}))
