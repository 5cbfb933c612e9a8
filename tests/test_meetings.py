"""Which calls belong together: by number, else by counting, and what cannot belong together is refused."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.trace.events.trace import Trace
from headway.trace.events.vocabulary import COLLECTIVES, KIND
from headway.trace.sync.meetings import VERBS, match, verb_of
from tests.refusals import refused


def kineto(rows: list[dict], **tables) -> Trace:
    """Return profiler rows, each {rank, start_ns, ...}; an all-reduce of group 3 unless it says otherwise."""
    blank = {
        "rank": 0, "start_ns": 0, "duration_ns": 10, "name": 0, "kind": KIND["COLL"], "group": 3, "seq": -1, "step": 7,
        "peer": -1, "bytes": 64,
    }  # fmt: skip
    rows = [{**blank, **row} for row in rows]
    names = ["ncclDevKernel_AllReduce_Sum_f32_RING_LL", "ncclDevKernel_Broadcast_RING_LL", "send", "recv", "all_gather"]
    columns = {key: [row[key] for row in rows] for key in blank}
    return Trace.from_columns(columns, names=names, meta={"source": "kineto"}, **tables)


def own(rows: list[dict]) -> Trace:
    """Return rows of headway's own recorder: name is 'comm.send' and the like, by number."""
    names = ["comm.collective", "comm.wait", "comm.send", "comm.recv", "comm.init", "segment.backward"]
    blank = {
        "rank": 0, "start_ns": 0, "duration_ns": 10, "name": 0, "kind": KIND["COLL"], "group": 0, "seq": 0, "peer": -1,
        "corr": 0,
    }  # fmt: skip
    rows = [{**blank, **row} for row in rows]
    return Trace.from_columns({key: [row[key] for row in rows] for key in blank}, names=names)


def members(trace: Trace) -> list[list[int]]:
    """Return the rows of each meeting."""
    met = match(trace)
    return sorted(sorted(met.row[a:b].tolist()) for a, b in itertools.pairwise(met.first.tolist()))


@pytest.mark.slow
@given(
    ranks=st.integers(2, 5), count=st.integers(1, 6), numbered=st.booleans(), seed=st.integers(0, 99),
    apart=st.integers(-(10**15), 10**15),
)  # fmt: skip
def test_calls_meet_whatever_the_order_of_rows_and_the_clocks(ranks, count, numbered, seed, apart):
    rng = np.random.default_rng(seed)
    rows = [
        {"rank": r, "start_ns": 1000 * k + int(rng.integers(900)) + r * apart, "seq": k if numbered else -1, "bytes": k}
        for r in range(ranks)
        for k in range(count)
    ]
    order = rng.permutation(len(rows))
    met = match(kineto([rows[i] for i in order]))
    sizes = np.array([rows[i]["bytes"] for i in order])[met.row].reshape(count, ranks)

    assert met.num_meetings == count
    assert (np.diff(met.first) == ranks).all()
    assert met.rank.reshape(count, ranks).tolist() == [list(range(ranks))] * count
    assert (sizes == sizes[:, :1]).all()


@pytest.mark.parametrize("name", [n for n in COLLECTIVES if not n.startswith(("broadcast", "gather", "scatter"))])
def test_every_recorded_collective_that_synchronises_is_a_verb(name):
    synchronises = name not in ("reduce", "wait")

    assert (verb_of(name) >= 0) is synchronises


@pytest.mark.parametrize(
    "name", ["broadcast", "gather_object", "scatter", "reduce", "nccl:reduce", "ncclKernel_SendRecv"]
)
def test_what_has_a_root_proves_nothing(name):
    assert verb_of(name) == -1


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_means_itself(verb):
    assert list(VERBS)[verb_of(verb)] == verb
    assert list(VERBS)[verb_of(verb.replace("_", "").upper())] == verb


def test_groups_and_kinds_of_calls_do_not_mix():
    rows = [{"rank": r, "group": g} for g in (3, 4) for r in (0, 1)]

    assert members(kineto(rows)) == [[0, 1], [2, 3]]
    assert members(own([{"rank": r, "name": n} for n in (0, 1) for r in (0, 1)])) == [[0, 1], [2, 3]]


def test_a_broadcast_and_the_creation_of_a_group_are_no_meetings():
    assert not members(kineto([{"rank": r, "name": 1, "seq": 5} for r in (0, 1)]))
    assert not members(own([{"rank": r, "name": 4, "seq": -1} for r in (0, 1)]))


def test_messages_pair_send_and_receive_of_one_direction():
    rows = [
        {"rank": 0, "name": 2, "kind": KIND["SEND"], "peer": 1},
        {"rank": 1, "name": 3, "kind": KIND["RECV"], "peer": 0},
        {"rank": 1, "name": 2, "kind": KIND["SEND"], "peer": 0},
        {"rank": 0, "name": 3, "kind": KIND["RECV"], "peer": 1},
    ]
    met = match(own(rows))

    assert members(own(rows)) == [[0, 1], [2, 3]]
    assert met.message.all()
    assert met.sends[np.argsort(met.row)].tolist() == [True, False, True, False]
    assert len(set(met.channel.tolist())) == 2


def test_an_unfinished_step_of_one_rank_is_left_out_and_counted():
    rows = [{"rank": r, "step": s, "start_ns": 100 * s} for s in (7, 8) for r in (0, 1)]
    met = match(kineto([*rows, {"rank": 0, "step": 8, "start_ns": 850}]))

    assert members(kineto(rows)) == [[0, 1], [2, 3]]
    assert (met.num_meetings, met.skipped) == (1, 3)


def test_calls_without_any_group_are_taken_at_one():
    assert members(kineto([{"rank": r, "group": -1} for r in (0, 1)])) == [[0, 1]]
    assert not members(kineto([{"rank": 0, "group": -1}, {"rank": 1, "group": -1}, {"rank": 1, "group": 3}]))


def messages(received):
    """Four sends from rank 0 to rank 1, and the receives of these numbers."""
    sends = [{"rank": 0, "name": 2, "kind": KIND["SEND"], "peer": 1, "seq": s} for s in range(4)]
    return own([*sends, *({"rank": 1, "name": 3, "kind": KIND["RECV"], "peer": 0, "seq": s} for s in received)])


def test_a_message_at_the_edge_of_what_both_recorded_is_left_out():
    assert match(messages(range(1, 6))).num_meetings == 3


def test_a_send_without_receive_is_named():
    with pytest.raises(InputError, match=r"send 1 of group 0 from rank 0 to rank 1, .* has no receive\. Record"):
        match(messages((0, 2, 3)))


def test_more_receives_than_sends_are_named():
    rows = [
        {"rank": 0, "kind": KIND["SEND"], "name": 2, "peer": 1},
        *({"rank": 1, "kind": KIND["RECV"], "name": 3, "peer": 0, "start_ns": k} for k in range(2)),
    ]

    with pytest.raises(InputError, match=r"rank 0 sends 1 times to rank 1 in group 3 in step 7.*message 1 has no send"):
        match(kineto(rows))


test_calls_that_are_counted_through_must_be_alike = refused(
    ({"bytes": 65}, r"sizes \[64, 65\] on the ranks \[0, 1\]"),
    ({"name": 4}, r"operations \['all_gather', 'all_reduce'"),
    by=lambda change: match(kineto([{"rank": 0}, {"rank": 1, **change}])),
)


def test_beside_an_accelerator_the_hosts_calls_prove_nothing_but_barriers():
    barrier = COLLECTIVES.index("barrier")
    rows = [{"rank": r, "seq": s, "corr": c} for r in (0, 1) for s, c in ((0, 0), (1, barrier))]
    trace = own(rows)
    beside = replace(trace, meta={"device_type": "cuda"})

    assert match(trace).num_meetings == 2
    assert members(beside) == [[1, 3]]


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(1, 60), st.integers(0, 60)), min_size=2, max_size=4))
def test_a_wait_for_gradients_proves_no_more_than_that_its_backward_had_begun(ranks):
    """A thread without a core begins to wait late: others may have ended their wait of the same number before."""
    rows = []
    for rank, (begin, work, wait) in enumerate(ranks):
        rows.append({"rank": rank, "name": 5, "start_ns": begin, "duration_ns": work + wait, "seq": -1, "group": -1})
        rows.append({"rank": rank, "name": 1, "start_ns": begin + work, "duration_ns": wait})
    met = match(own(rows))

    assert met.start_ns.tolist() == [begin for begin, _, _ in ranks]
    assert met.end_ns.tolist() == [begin + work + wait for begin, work, wait in ranks]


def test_a_wait_outside_every_backward_counts_from_its_own_start():
    backward = {"rank": 0, "name": 5, "start_ns": 0, "duration_ns": 20, "seq": -1, "group": -1}
    waits = [{"rank": rank, "name": 1, "start_ns": 50, "duration_ns": 9} for rank in range(2)]

    assert match(own([backward, *waits])).start_ns.tolist() == [50, 50]
