"""How a wait is split: by the awaited batch's record, by the last rank's arrival."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.ledger.answers.ledger import Ledger
from headway.ledger.booking.arrivals import last_arrivals
from headway.ledger.booking.rows import rows_by_rank
from headway.ledger.booking.waits import drain, find_loads, inside_outside, match_batches
from headway.trace.events.trace import Trace, concat
from tests.runs_made import MS, NAMES, RunMaker

moments = st.integers(0, 100)


@given(moments, moments, moments, moments)
def test_before_inside_and_after_add_up(a, b, c, d):
    start, end = sorted((a, b))
    low, high = sorted((c, d))

    parts = [int(part[0]) for part in inside_outside(*(np.array([x]) for x in (start, end, low, high)))]

    moments_in = range(start, end)
    assert parts == [
        sum(t < low for t in moments_in),
        sum(low <= t < high for t in moments_in),
        sum(t >= high for t in moments_in),
    ]


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 50), min_size=3, max_size=3), st.integers(0, 200)), min_size=1),
    st.permutations([0, 1, 2]),
)
def test_draining_takes_the_amount_in_order_and_never_goes_below_zero(rows, order):
    parts = np.array([row[0] for row in rows], np.int64)
    amount = np.array([row[1] for row in rows], np.int64)

    rest = drain(parts, amount, tuple(order))

    assert (rest >= 0).all()
    assert (parts.sum(axis=1) - rest.sum(axis=1)).tolist() == np.minimum(amount, parts.sum(axis=1)).tolist()
    first = order[0]
    assert rest[:, first].tolist() == np.maximum(parts[:, first] - amount, 0).tolist()


@given(st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 3), st.integers(0, 20)), max_size=16))
def test_the_last_arrival_is_the_latest_start_of_the_meeting(rows):
    key, rank, start = (np.array([row[i] for row in rows], np.int64) for i in range(3))

    met = last_arrivals(key, rank, start)

    for index, (meeting, _, begin) in enumerate(rows):
        group = [row for row in rows if row[0] == meeting] if meeting >= 0 else [rows[index]]
        times = sorted(row[2] for row in group)
        assert met.arrival_ns[index] == times[-1]
        assert met.margin_ns[index] == (times[-1] - times[-2] if len(times) > 1 else 0)
        assert start[met.last[index]] == times[-1]
        assert met.arrival_ns[index] >= begin


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("epoch_steps", [None, 5])
def test_every_batch_is_matched_with_the_load_that_made_it(num_workers, epoch_steps):
    made = RunMaker(
        ranks=1, steps=17, num_workers=num_workers, epoch_steps=epoch_steps, fetch_ns=lambda rank, step: (1 + step) * MS
    ).make()
    rows = rows_by_rank(made.trace)[0]
    waits, loads = rows.of("input.next"), find_loads(rows)

    match = match_batches(rows, waits, loads)

    assert (match >= 0).all()
    assert ((loads.end_ns - loads.start_ns)[match] // MS).tolist() == list(range(1, 18))
    assert loads.parts.sum(axis=1).tolist() == (loads.end_ns - loads.start_ns).tolist()


def test_a_batch_whose_load_was_not_recorded_stays_unsplit():
    made = RunMaker(ranks=1, steps=8, num_workers=2, fetch_ns=20 * MS).make()
    loads = made.trace.named("input.load")
    lost = np.flatnonzero(loads)[[2, 5]]
    keep = np.ones(len(made.trace), bool)
    keep[lost] = False

    ledger = Ledger.of(replace(made, trace=made.trace.where(keep)))

    assert ledger.ledger_ns["input"] == made.truth_ns["input"]
    assert ledger.sub_ns["input.unsplit"] > 0


def test_waiting_for_a_loader_that_no_probe_sees_is_unsplit():
    rows = [("process", 0, 100), ("step", 10, 80), ("input.next", 20, 30)]
    trace = Trace.from_columns(
        {"rank": [0] * 3, "start_ns": [r[1] for r in rows], "duration_ns": [r[2] for r in rows]},
        names=NAMES,
        name=[NAMES.index(r[0]) for r in rows],
    )

    assert Ledger.of(trace).sub_ns["input.unsplit"] == 30


def test_waiting_before_the_first_load_is_the_start_of_workers_and_after_the_last_part_is_transfer():
    """next() 10..100, the worker's load 40..80: 30 start, 40 in proportion 3:1, 20 transfer."""
    names, lanes = NAMES, ("main", "loader/0")
    rows = [
        ("process", 0, 200, 0, {}),
        ("step", 5, 190, 0, {}),
        ("input.iter", 5, 5, 0, {"corr": 0, "peer": 1, "group": 0}),
        ("input.next", 10, 90, 0, {"corr": 0, "peer": 0, "group": 0, "seq": 0}),
        ("input.load", 40, 40, 1, {"peer": 0, "group": 0, "seq": 0}),
        ("input.fetch", 40, 30, 1, {"peer": 0, "group": 0, "seq": 0}),
        ("input.prep", 70, 10, 1, {"peer": 0, "group": 0, "seq": 0}),
    ]
    extra = {key: [row[4].get(key, -1) for row in rows] for key in ("corr", "peer", "group", "seq")}
    trace = Trace.from_columns(
        {
            "rank": [0] * len(rows), "start_ns": [r[1] for r in rows], "duration_ns": [r[2] for r in rows],
            "lane": [r[3] for r in rows], "name": [names.index(r[0]) for r in rows], **extra,
        },
        names=names,
        lanes=lanes,
    )  # fmt: skip

    sub = Ledger.of(trace).sub_ns

    assert (sub["input.start"], sub["input.fetch"], sub["input.prep"], sub["input.transfer"]) == (5 + 30, 30, 10, 20)


def test_the_call_that_finds_the_loader_at_its_end_stops_the_workers():
    made = RunMaker(ranks=1, steps=6, num_workers=2, fetch_ns=MS).make()
    end = int(made.trace.where(made.trace.named("step")).events["start_ns"][-1])
    last = Trace.from_columns(
        {"rank": [0], "start_ns": [end + 7 * MS // 2], "duration_ns": [MS], "group": [0], "corr": [0]},
        names=["input.next"],
        name=[0],
    )

    ledger = Ledger.of(replace(made, trace=concat([made.trace, last])))

    assert ledger.sub_ns["input.start"] == made.sub_truth_ns["input.start"] + MS
    assert "input.unsplit" not in ledger.sub_ns


def message(late_by: int) -> Trace:
    """Rank 0 sends to rank 1, which waits for it; rank 0 sends `late_by` after rank 1 began to wait."""
    rows = [(0, "process", 0, 200, -1), (1, "process", 0, 200, -1), (0, "step", 0, 200, -1), (1, "step", 0, 200, -1),
            (0, "comm.send", 50 + late_by, 10, 1), (1, "comm.recv", 50, late_by + 12, 0)]  # fmt: skip
    return Trace.from_columns(
        {
            "rank": [r[0] for r in rows], "name": [NAMES.index(r[1]) for r in rows], "start_ns": [r[2] for r in rows],
            "duration_ns": [r[3] for r in rows], "peer": [r[4] for r in rows],
        },
        names=NAMES,
    )  # fmt: skip


@pytest.mark.slow
@given(st.integers(0, 90))
def test_a_receive_is_bubble_until_the_sender_arrives_and_comm_after_it(late_by):
    ledger = Ledger.of(message(late_by))

    assert ledger.ledger_ns["bubble"] == late_by
    assert ledger.by_rank_ns[1]["comm"] == 12
    assert ledger.by_rank_ns[0]["comm"] == 10


BLAMED = {
    "input": RunMaker(ranks=3, steps=6, fetch_ns=lambda rank, step: 9 * MS * (rank == 1)),
    "compute": RunMaker(ranks=3, steps=6, compute_ns=lambda rank, step: (5 + 7 * (rank == 1)) * MS),
    "checkpoint": RunMaker(ranks=3, steps=6, save_ns=lambda rank, step: 8 * MS * (rank == 1)),
    "host": RunMaker(ranks=3, steps=6, gc_ns=lambda rank, step: 4 * MS * (rank == 1)),
    "startup": RunMaker(ranks=3, steps=6, compile_ns=lambda rank, step: 50 * MS * (rank == 1 and step == 0)),
}


@pytest.mark.parametrize("why", BLAMED)
def test_the_late_rank_is_blamed_for_what_it_did_more_of(why):
    made = BLAMED[why].make()

    ledger = Ledger.of(made)

    assert ledger.sub_ns[f"straggler.{why}"] == made.truth_ns["straggler"] > 0
    assert set(ledger.lateness.blamed_ns) == {1}
    assert ledger.lateness.num_collectives == 6


def test_equal_ranks_are_never_late():
    ledger = Ledger.of(RunMaker(ranks=4, steps=5).make())

    assert ledger.ledger_ns["straggler"] == 0
    assert set(ledger.lateness.times_last.values()) == {0}
