"""Booking several ranks in one sweep: the sums of each alone, and waits split at the last arrival."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headway.ledger.buckets import BUCKET_OF, BUCKETS, bucket_of_sub
from headway.ledger.live_rank import BookingWindow
from headway.ledger.live_sweep import book_windows
from headway.trace.rings.records import RECORD_DTYPE
from tests.rings_made import record_made as record

MS = 1_000_000
COMM = ("comm.wait", "comm.collective", "comm.send", "comm.recv")
SIMPLE = [name for name in BUCKET_OF if not name.startswith(COMM) and name != "forward"]
"""Names that own their time whatever else there is; forwards also say what is evaluation, and what the script's."""


def window(rank, ends, records, low=0):
    rows = np.concatenate(records) if records else np.zeros(0, RECORD_DTYPE)
    return BookingWindow(rank, 0, low, np.array(ends, np.int64), rows)


def named(step_ns):
    return {name: int(amount) for name, amount in zip(BUCKETS, step_ns, strict=True) if amount}


spans = st.lists(st.tuples(st.sampled_from(SIMPLE), st.integers(-20, 120), st.integers(0, 60)), max_size=12)
"""Records of one rank: name, start and length."""


@given(ranks=st.lists(st.tuples(spans, st.integers(1, 3)), min_size=1, max_size=4))
def test_together_each_rank_gets_what_it_gets_alone_and_no_nanosecond_is_lost(ranks):
    windows = [
        window(number, [40 * step + 7 * number for step in range(1, steps + 1)], [record(*span) for span in rows])
        for number, (rows, steps) in enumerate(ranks)
    ]

    together = list(book_windows(windows))

    for one, (_, duration_ns, step_ns) in zip(windows, together, strict=True):
        ((_, alone_duration_ns, alone_ns),) = book_windows([one])
        assert (step_ns == alone_ns).all()
        assert (duration_ns == alone_duration_ns).all()
        assert (step_ns.sum(axis=1) == duration_ns).all()
        assert (step_ns >= 0).all()


@given(rows=spans)
def test_each_nanosecond_goes_to_the_name_of_highest_precedence_over_it(rows):
    ((_, _, step_ns),) = book_windows([window(0, [100], [record(*span) for span in rows])])

    expected = dict.fromkeys(BUCKETS, 0)
    for moment in range(100):
        over = [BUCKET_OF[name] for name, start, length in rows if start <= moment < start + length]
        best = max(over, key=lambda booking: booking.precedence, default=None)
        expected["useful" if best is None else bucket_of_sub(best.sub)] += 1
    state = [name for name, *_ in rows if name in ("checkpoint.save", "checkpoint.sync", "checkpoint.rename")]
    if len(state) < 2:  # with two of them the gap between them counts, too
        assert named(step_ns[0]) == {name: amount for name, amount in expected.items() if amount}


def test_from_its_first_work_on_a_device_is_useful_only_while_it_is_at_work():
    rows = [record("device.work", 20, 30), record("device.work", 70, 20), record("input.next", 40, 25)]
    one = replace(window(0, [100], rows), device_ns=20)
    ((_, _, step_ns),) = book_windows([one])

    assert named(step_ns[0]) == {"unknown": 20, "useful": 30 + 20, "input": 15, "host": 5 + 10}


def test_the_share_of_computing_without_a_core_is_no_useful_time():
    def marks(*rows):
        return np.concatenate(
            [record("host.cpu", when * MS, 0, a=cpu * MS, b=waited * MS) for when, cpu, waited in rows]
        )

    rows = [record("forward", 0, 3000 * MS), record("input.next", 2000 * MS, 400 * MS)]
    one = window(0, [1000 * MS, 3000 * MS], rows)
    # A quarter without a core up to 1,000 ms, half of it from there on, and behind the last mark as in front of it.
    marked = replace(one, marks=marks((0, 0, 0), (1000, 600, 200), (2000, 1000, 600)))
    ((_, _, step_ns),) = book_windows([marked])

    assert named(step_ns[0]) == {"useful": 750 * MS, "host": 250 * MS}
    assert named(step_ns[1]) == {"useful": 800 * MS, "input": 400 * MS, "host": 800 * MS}
    for nothing in (marks((0, 0, 0)), marks((0, 0, 0), (1000, 600, -1))):
        ((_, _, step_ns),) = book_windows([replace(one, marks=nothing)])
        assert named(step_ns[1]) == {"useful": 1600 * MS, "input": 400 * MS}
    # What it spun of its CPU time, and is said to have waited: three quarters of what it took from 0 to 1,000 ms.
    spun = [marks((0, 0, 0), (1000, 800, 600)), record("host.spins", 1000 * MS, 0, a=600 * MS)]
    ((_, _, step_ns),) = book_windows([replace(one, marks=np.concatenate(spun))])
    assert named(step_ns[0]) == {"useful": 250 * MS, "host": 750 * MS}
    ((_, _, step_ns),) = book_windows([replace(marked, device_ns=0)])  # a device computes without a core of the host
    assert "useful" not in named(step_ns[1])


def test_a_wait_is_the_stragglers_until_it_arrives_and_communication_after():
    waits = [record("comm.wait", start, 90 - start, a=0, b=5) for start in (20, 50, 70)]
    booked = book_windows([window(rank, [100], [wait]) for rank, wait in enumerate(waits)])

    assert [named(step_ns[0]) for _, _, step_ns in booked] == [
        {"useful": 30, "comm": 20, "straggler": 50},
        {"useful": 60, "comm": 20, "straggler": 20},
        {"useful": 80, "comm": 20},
    ]


def test_a_message_waits_for_its_peer_as_a_bubble():
    sent = record("comm.send", 60, 20, a=0, b=0, d=1)
    received = record("comm.recv", 10, 70, a=0, b=0, d=0)
    booked = book_windows([window(0, [100], [sent]), window(1, [100], [received])])

    assert [named(step_ns[0]) for _, _, step_ns in booked] == [
        {"useful": 80, "comm": 20},
        {"useful": 30, "comm": 20, "bubble": 50},
    ]


def test_a_collective_without_a_number_waits_for_nobody():
    waits = [record("comm.collective", start, 90 - start, a=0, b=-1) for start in (20, 50)]
    booked = book_windows([window(rank, [100], [wait]) for rank, wait in enumerate(waits)])

    assert all("straggler" not in named(step_ns[0]) for _, _, step_ns in booked)


def test_the_gap_between_a_save_and_its_sync_is_checkpoint_time():
    rows = [record("checkpoint.save", 10, 10), record("checkpoint.sync", 50, 10), record("optimizer.step", 90, 10)]
    ((_, _, step_ns),) = book_windows([window(0, [100], rows)])

    assert named(step_ns[0]) == {"useful": 50, "checkpoint": 50}


def test_compilation_of_a_later_attempt_belongs_to_the_restart():
    rows = [record("host.compile", 10, 30)]
    ((_, _, first),), ((_, _, again),) = (book_windows([window(0, [100], rows)], restarted=r) for r in (False, True))

    assert named(first[0])["startup"] == named(again[0])["restart"] == 30


def test_evaluation_and_the_scripts_own_time_are_booked_while_the_job_runs():
    learns, quiet = {"a": 0, "b": 3, "c": -1}, {"a": 0, "b": 0, "c": -1}
    step = [
        record("forward", 20, 10, **learns), record("segment.backward", 35, 10, c=1), record("optimizer.step", 50, 50),
        record("host.recording", 100, 6), record("mode", 110, 0, a=0, b=0), record("input.next", 115, 15),
        record("forward", 130, 20, **quiet), record("host.gc", 150, 5), record("host.recording", 158, 4),
        record("mode", 170, 0, a=0, b=1),
        record("forward", 180, 5, **learns), record("segment.backward", 186, 4, c=1), record("optimizer.step", 190, 10),
    ]  # fmt: skip
    ((_, _, step_ns),) = book_windows([window(0, [100, 200], step)])

    assert named(step_ns[0]) == {"useful": 80, "host": 20}
    assert named(step_ns[1]) == {"useful": 20, "eval": 60 - 5 - 4, "host": 5 + 4 + 20}
