"""The order inferred from profiler traces: exact with delays, right about what waits for what."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import BarMissedError, InputError, UnknownNameError
from headway.sim.graph.dag import Dag, greedy, replay
from headway.sim.observed import MODELS, listed, listed_dag, observe
from headway.sim.observed_edges import EDGE_CLASSES, FINDERS
from headway.sim.recorded.program import Program
from headway.trace.events.trace import Trace
from headway.trace.events.vocabulary import KIND
from tests.paths import shared
from tests.refusals import refused
from tests.runs_made import RunMaker

FILES = (
    "nccl_data", "trace_diff_control", "ns_resolution", "sampled_rank-0", "sampled_rank-1", "cuda_event_sync",
    "cpu_only", "rocm_mi250",
)  # fmt: skip
LANES = ("main", "thread 2", "stream 7", "stream 8", "annotation 7")


def trace_of(*rows: tuple[str, str, str, int, int], ranks: list[int] | None = None, **columns: list[int]) -> Trace:
    """Return a trace of (name, kind, lane, start, duration) rows."""
    names = sorted({row[0] for row in rows})
    return Trace.from_columns(
        {
            "name": [names.index(row[0]) for row in rows], "kind": [KIND[row[1]] for row in rows],
            "lane": [LANES.index(row[2]) for row in rows], "start_ns": [row[3] for row in rows],
            "duration_ns": [row[4] for row in rows], "rank": [0] * len(rows) if ranks is None else ranks, **columns,
        },
        names=names,
        lanes=LANES,
    )  # fmt: skip


def step() -> Trace:
    """Return a made window: two launches, a blocking synchronisation, work after it."""
    return trace_of(
        ("prepare", "HOST", "main", 0, 10), ("cudaLaunchKernel", "HOST", "main", 12, 6),
        ("mm", "COMPUTE", "stream 7", 20, 100), ("cudaLaunchKernel", "HOST", "main", 20, 6),
        ("add", "COMPUTE", "stream 7", 121, 30), ("cudaDeviceSynchronize", "SYNC", "main", 30, 125),
        ("log", "HOST", "main", 160, 10), corr=[-1, 1, 1, 2, 2, 3, -1],
    )  # fmt: skip


# Laws


rows_of_hosts = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 50), st.integers(0, 20), st.booleans()), min_size=1, max_size=25
)


@given(rows_of_hosts)
def test_with_delays_the_replay_is_the_trace_whatever_it_holds(rows: list[tuple[int, int, int, bool]]) -> None:
    """Overlaps, gaps, zero durations, orphan kernels: every start is reproduced."""
    made = [("work", "COLL" if coll else "COMPUTE", LANES[lane], start, size) for lane, start, size, coll in rows]
    seen = observe(trace_of(*made), delays="all")

    assert replay(seen.dag, seen.duration_ns).start_ns.tolist() == seen.start_ns.tolist()


@pytest.mark.parametrize("name", FILES)
def test_with_delays_the_replay_of_a_published_trace_is_exact(name: str) -> None:
    seen = observe(Trace.open(shared(f"kineto/{name}.json.gz")), delays="all")

    assert np.array_equal(replay(seen.dag, seen.duration_ns).start_ns, seen.start_ns)
    assert seen.dag.fidelity == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_without_unexplained_delays_a_published_trace_still_replays_within_five_percent(name: str) -> None:
    dag = Dag.from_trace(Trace.open(shared(f"kineto/{name}.json.gz")))

    assert dag.fidelity == pytest.approx(1.0, abs=0.05)
    assert dag.coverage is not None
    assert 0.7 < dag.coverage <= 1.0


@pytest.mark.parametrize("name", EDGE_CLASSES)
def test_each_class_can_be_switched_off(name: str) -> None:
    others = [other for other in EDGE_CLASSES if other != name]

    assert observe(step(), classes=others).edges[name] == 0
    assert name in FINDERS


# What waits for what


def test_a_kernel_waits_for_its_launch_and_a_synchronising_call_for_the_kernel() -> None:
    seen = observe(step())

    assert (seen.edges["launch"], seen.edges["sync"]) == (2, 1)
    assert seen.dag.fidelity == pytest.approx(1.0, abs=0.02)
    # Twice the speed of the device: 65 ns of kernels less, all of them awaited.
    end_ns = replay(seen.dag, seen.durations(["accelerator=2x"])).end_ns.max()
    assert seen.start_ns.max() + 10 - end_ns == pytest.approx(65, abs=2)


def test_without_the_wait_of_the_host_faster_kernels_would_win_nothing() -> None:
    seen = observe(step(), classes=["program", "launch"])

    assert replay(seen.dag, seen.durations(["accelerator=2x"])).end_ns.max() == 170


def test_parents_are_no_operations() -> None:
    seen = observe(
        trace_of(
            ("aten::linear", "COMPUTE", "main", 0, 100),
            ("aten::mm", "COMPUTE", "main", 10, 50),
            ("aten::add", "COMPUTE", "main", 70, 20),
        )
    )

    assert [seen.trace.name_of(row) for row in seen.row.tolist() if row >= 0] == ["aten::mm", "aten::add"]


def collective(starts: list[int], end: int, **columns: list[int]) -> Trace:
    """Return an all-reduce over ranks, each computing until it comes."""
    rows, ranks = [], []
    for rank, start in enumerate(starts):
        rows += [("mm", "COMPUTE", "stream 7", 0, start), ("ncclAllReduce", "COLL", "stream 7", start, end - start)]
        ranks += [rank, rank]
    return trace_of(*rows, ranks=ranks, **columns)


def test_a_collective_begins_when_the_last_rank_has_come() -> None:
    seen = observe(collective([50, 90], 100))

    assert seen.edges["collective"] == 2
    assert seen.duration_ns[[2, 4]].tolist() == [10, 10]
    faster = replay(seen.dag, np.where(seen.duration_ns == 90, 50, seen.duration_ns)).end_ns.max()
    assert faster == 60


def test_the_origin_is_when_the_first_rank_came_though_it_then_waited_for_the_others() -> None:
    """Rank 0 enters at 5 as the first operation of all, and its collective begins at 90."""
    rows = [("ncclAllReduce", "COLL", "stream 7", 5, 95), ("mm", "COMPUTE", "stream 7", 20, 70)]
    rows += [("ncclAllReduce", "COLL", "stream 7", 90, 10)]
    seen = observe(trace_of(*rows, ranks=[0, 1, 1]))

    assert seen.start_ns.tolist() == [0, 85, 15, 85, 85]
    assert replay(seen.dag, seen.duration_ns).end_ns.max() == 95
    assert seen.dag.fidelity == 1.0


def test_collectives_of_other_sizes_are_not_taken_for_one() -> None:
    with pytest.raises(InputError, match=r"collective 0 of group -1 has sizes \[4, 8\].*windows of the same steps"):
        observe(collective([50, 90], 100, bytes=[0, 4, 0, 8]))


def test_a_receive_waits_for_its_send() -> None:
    rows = [("mm", "COMPUTE", "stream 7", 0, 80), ("send", "SEND", "stream 7", 80, 10)]
    seen = observe(trace_of(*rows, ("recv", "RECV", "stream 7", 5, 90), ranks=[0, 0, 1], peer=[-1, 1, 0]))

    assert seen.edges["p2p"] == 2
    assert replay(seen.dag, seen.durations(["op:mm=0.5x"])).end_ns.max() == 55


def test_a_receive_without_its_send_is_named() -> None:
    rows = [("send", "SEND", "stream 7", 80, 10), ("send", "SEND", "stream 7", 95, 10)]
    with pytest.raises(InputError, match=r"rank 0 sends 2 times to rank 1, which receives 1 times"):
        observe(trace_of(*rows, ("recv", "RECV", "stream 7", 5, 90), ranks=[0, 0, 1], peer=[1, 1, 0]))


def test_a_stream_waits_for_another_after_a_stream_wait_event() -> None:
    seen = observe(
        trace_of(
            ("cudaLaunchKernel", "HOST", "main", 0, 2), ("mm", "COMPUTE", "stream 7", 3, 50),
            ("cudaStreamWaitEvent", "HOST", "main", 4, 1), ("cudaLaunchKernel", "HOST", "main", 6, 2),
            ("ncclAllReduce", "COLL", "stream 8", 54, 20), corr=[1, 1, -1, 2, 2],
        )
    )  # fmt: skip

    assert seen.edges["event"] == 1
    assert replay(seen.dag, seen.durations(["op:mm=0x"])).end_ns.max() < 50


def test_the_thread_that_asked_for_backward_goes_on_after_it() -> None:
    arrow = (1 << 41) + 5
    seen = observe(
        trace_of(
            ("forward", "COMPUTE", "main", 0, 10),
            ("backward", "COMPUTE", "thread 2", 12, 60),
            ("optimizer", "OPTIM", "main", 75, 5),
            corr=[arrow, arrow, -1],
        )
    )

    assert seen.edges["backward"] >= 2
    assert replay(seen.dag, seen.durations(["op:backward=0.5x"])).end_ns.max() == 50


def test_a_send_or_receive_of_a_device_scales_with_communication() -> None:
    seen = observe(
        trace_of(("mm", "COMPUTE", "stream 7", 0, 10), ("ncclDevKernel_SendRecv", "RECV", "stream 7", 10, 40))
    )

    assert replay(seen.dag, seen.durations(["comm=0.5x"])).end_ns.max() == 30


def test_gloo_collectives_follow_their_enqueueing_and_hold_the_finaliser() -> None:
    seen = observe(
        trace_of(
            ("c10d::allreduce_", "HOST", "main", 0, 5),
            ("gloo:all_reduce", "COLL", "thread 2", 6, 40),
            ("copy_bucket_to_grad", "COMPUTE", "main", 47, 3),
        )
    )

    assert (seen.edges["enqueue"], seen.edges["sync"]) == (1, 1)
    assert replay(seen.dag, seen.durations(["comm=0.5x"])).end_ns.max() == 30


# Bad input


test_an_empty_trace_is_refused = refused((lambda: observe(trace_of()), r"no operation to order"))


@pytest.mark.parametrize("model", MODELS)
def test_every_model_gives_a_dag_of_what_it_is_for(model: str) -> None:
    trace = RunMaker(ranks=2, steps=20).make().trace if model == "recorded" else collective([5, 9], 12)
    dag = Dag.from_trace(trace, model)

    assert dag.n > 0
    assert dag.fidelity == pytest.approx(1.0)


def test_a_run_of_headways_own_is_recognised_and_runs_greedily() -> None:
    made = RunMaker(ranks=2, steps=20, num_workers=2, cores=64).make()
    program = Program.from_trace(made.trace, made.meta)
    unrolled = program.unrolled()

    assert Dag.from_trace(made.trace).n == unrolled.dag.n
    end_ns = greedy(unrolled.dag, unrolled.duration_ns, capacity=unrolled.capacity).end_ns.max()
    assert end_ns == pytest.approx(program.measured_s * 1e9 * 20, rel=0.1)


test_ddp_needs_collectives = refused((lambda: Dag.from_trace(step(), "ddp"), r"no collective.*Use model='observed'"))


def test_unknown_names_are_answered_with_the_valid_ones() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown model 'observd'. Did you mean 'observed'"):
        Dag.from_trace(step(), "observd")
    with pytest.raises(UnknownNameError, match=r"Did you mean 'launch'"):
        observe(step(), classes=["lunch"])
    with pytest.raises(UnknownNameError, match=r"Choose one of: all, host, none"):
        observe(step(), delays="some")


def test_a_window_refuses_edits_that_it_cannot_answer() -> None:
    with pytest.raises(InputError, match=r"Ask the rest of a run"):
        observe(step()).durations(["workers=2"])
    with pytest.raises(InputError, match=r"no operation of the window matches 'gemm'"):
        observe(step()).durations(["op:gemm=2x"])


def test_a_window_that_does_not_replay_refuses_what_ifs() -> None:
    seen = observe(step(), delays="none")
    broken = replace(seen, dag=replace(seen.dag, fidelity=1.2))

    with pytest.raises(BarMissedError, match=r"misses the trace by 20.0 %"):
        broken.durations(["comm=none"])


# Dependencies written down between rows: complete, within a rank, and never a cycle.


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
