"""The account of a run that goes on: exact sums, the same however it is fed, and where the finished ledger ends."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.ledger.answers.ledger import Ledger
from headway.ledger.buckets import BUCKETS
from headway.ledger.live_ledger import OVERDUE_NS, STEP_BOUNDS_S, LiveLedger
from headway.runtime.run_folder.live_feed import records_of
from headway.trace.rings.records import RingHeader
from tests.runs_made import MS, Made, RunMaker, cut_short, joined

S = 1_000_000_000


def header(rank=0, attempt=0, pid=0, role="main", end_ns=0):
    return RingHeader(pid or 1000 * (attempt + 1) + rank, rank, attempt=attempt, role=role, end_ns=end_ns)


def parts_of(made: Made):
    """Return (header, records) of every rank and attempt of a made run, in order."""
    return [
        (header(rank, attempt), records_of(trace.select(ranks=[rank])))
        for attempt, trace in enumerate(made.attempts())
        for rank in sorted({int(rank) for rank in trace.events["rank"]})
    ]


def fed(made: Made, ranks: int) -> LiveLedger:
    ledger = LiveLedger(start_ns=made.meta["start_ns"], world_size=ranks)
    for facts, records in parts_of(made):
        ledger.add(facts, records)
    return ledger


MIXED = RunMaker(
    ranks=3, steps=60, fetch_ns=3 * MS, num_workers=2, compute_ns=lambda rank, step: (5 + 3 * (rank == 1)) * MS,
    gc_ns=lambda rank, step: 2 * MS * (step % 10 == 4), save_ns=lambda rank, step: 20 * MS * (step % 20 == 5),
    sync_ns=lambda rank, step: 10 * MS * (step % 20 == 5), logging_ns=MS // 4,
)  # fmt: skip
JOBS = {
    "one rank, no loader workers": RunMaker(ranks=1, steps=40, fetch_ns=2 * MS, prep_ns=MS),
    "a mixed job of three ranks": MIXED,
    "compilation inside the first step": RunMaker(
        ranks=2, steps=20, compile_ns=lambda rank, step: 300 * MS * (step == 0)
    ),
    "a straggler": RunMaker(ranks=4, steps=30, compute_ns=lambda rank, step: (4 + 6 * (rank == 3)) * MS),
}


@settings(max_examples=25)
@given(data=st.data())
def test_however_the_records_arrive_the_account_ends_the_same(data):
    made = MIXED.make()
    parts = parts_of(made)
    whole = fed(made, 3).figures(0)
    ledger = LiveLedger(start_ns=made.meta["start_ns"], world_size=3)
    cuts = [sorted(data.draw(st.lists(st.integers(0, len(records)), max_size=4))) for _, records in parts]
    queues = [list(np.split(records, cut)) for (_, records), cut in zip(parts, cuts, strict=True)]
    while any(queues):
        chosen = data.draw(st.sampled_from([number for number, queue in enumerate(queues) if queue]))
        ledger.add(parts[chosen][0], queues[chosen].pop(0))
        if data.draw(st.booleans()):
            ledger.figures(0)

    figures = ledger.figures(0)

    assert figures.rank_ns.keys() == whole.rank_ns.keys()
    assert figures.steps == whole.steps == 60
    assert figures.step_counts.sum() == 3 * 60
    assert sum(figures.bucket_ns.values()) == sum(whole.bucket_ns.values())
    for name in ("useful", "input", "checkpoint", "startup", "host"):
        assert figures.bucket_ns[name] == whole.bucket_ns[name]
    # Whom a rank waited for is known once the others have told: a rank that is booked alone is waited for less.
    assert figures.bucket_ns["straggler"] <= whole.bucket_ns["straggler"]


@pytest.mark.parametrize("name", JOBS)
def test_every_nanosecond_up_to_the_last_complete_step_is_booked_once(name):
    made = JOBS[name].make()
    figures = fed(made, JOBS[name].ranks).figures(0)

    for rank in figures.ranks:
        assert int(figures.rank_ns[rank.rank].sum()) == rank.last_step_ns - made.meta["start_ns"]
    assert int(figures.booked_ns.sum()) == sum(figures.bucket_ns.values())


@pytest.mark.parametrize("name", JOBS)
def test_it_ends_where_the_ledger_of_the_finished_run_does(name):
    made = JOBS[name].make()
    figures, ledger = fed(made, JOBS[name].ranks).figures(0), Ledger.of(made)

    for bucket in set(BUCKETS) - {"idle", "startup"}:
        # Before the first iterator step 0 has not begun: what it saved or logged until then counts as start-up.
        assert figures.bucket_ns[bucket] == pytest.approx(ledger.ledger_ns[bucket], abs=3 * MS * JOBS[name].ranks)
    assert figures.bucket_ns["startup"] == pytest.approx(ledger.ledger_ns["startup"], abs=40 * MS * JOBS[name].ranks)
    assert figures.steps == ledger.steps


@pytest.mark.parametrize("loads", [True, False])
def test_a_restart_turns_what_was_not_saved_into_rework_as_the_finished_ledger_does(loads):
    job = RunMaker(ranks=2, steps=40, save_ns=lambda rank, step: 5 * MS * (step == 20))
    first = job.make()
    first = cut_short(first, first.meta["end_ns"] - 55 * MS)
    again = replace(job, load_ns=30 * MS * loads, attempt=1, start_ns=first.meta["end_ns"], save_ns=0)
    made = joined(first, again.make())

    figures, ledger = fed(made, 2).figures(0), Ledger.of(made)

    assert figures.attempt == 1
    assert figures.bucket_ns["rework"] == pytest.approx(ledger.ledger_ns["rework"], abs=15 * MS)
    assert figures.bucket_ns["useful"] == pytest.approx(ledger.ledger_ns["useful"], abs=15 * MS)
    assert figures.bucket_ns["restart"] == pytest.approx(ledger.ledger_ns["restart"], abs=65 * MS)
    assert (figures.bucket_ns["rework"] < 300 * MS) == loads  # without a load all of the first attempt is done again


@settings(max_examples=20)
@given(steps=st.lists(st.integers(2, 30), min_size=1, max_size=4), looks=st.integers(1, 5))
def test_booked_losses_never_shrink_over_attempts(steps, looks):
    ledger, now = LiveLedger(start_ns=0, world_size=2), 0
    before = np.zeros(len(BUCKETS), np.int64)
    for attempt, count in enumerate(steps):
        made = RunMaker(ranks=2, steps=count, start_ns=now, attempt=attempt).make()
        for rank in (0, 1):
            for part in np.array_split(records_of(made.trace.select(ranks=[rank])), looks):
                ledger.add(header(rank, attempt), part)
                booked = ledger.figures(now).booked_ns
                assert (np.delete(booked - before, BUCKETS.index("useful")) >= 0).all()
                before = booked
        now = made.meta["end_ns"]

    assert ledger.figures(now).total_steps == sum(steps)


def test_ranks_that_have_not_begun_are_starting_up():
    made = RunMaker(ranks=1, steps=5).make()
    ledger = LiveLedger(start_ns=made.meta["start_ns"], world_size=3)
    ledger.add(*parts_of(made)[0])

    figures = ledger.figures(made.meta["start_ns"] + 2 * S)

    assert figures.devices == 3
    startup = BUCKETS.index("startup")
    assert [int(figures.rank_ns[rank][startup]) for rank in (1, 2)] == [2 * S, 2 * S]


def test_a_rank_that_falls_silent_loses_goodput():
    made = RunMaker(ranks=1, steps=50).make()
    ((_, records),) = parts_of(made)
    ledger = fed(made, 1)
    end = int((records["start_ns"] + records["duration_ns"]).max())

    soon, late = ledger.figures(end + OVERDUE_NS // 2), ledger.figures(end + OVERDUE_NS + 7 * S)

    assert soon.bucket_ns["unknown"] == 0
    assert late.bucket_ns["unknown"] == 7 * S
    assert late.goodput < soon.goodput
    assert late.steps_per_s < soon.steps_per_s


def test_a_rank_whose_process_ended_is_idle_and_holds_nobody_up():
    made = RunMaker(ranks=2, steps=20).make()
    (first, some), (second, every) = parts_of(made)
    ledger = LiveLedger(start_ns=made.meta["start_ns"], world_size=2)
    ledger.add(first, some[: len(some) // 2])
    ledger.add(second, every)
    held = ledger.figures(0).steps
    ledger.look([replace(first, end_ns=1)])
    figures = ledger.figures(made.meta["end_ns"])

    assert held < 20
    assert figures.steps == 20
    assert figures.ranks[0].ended
    assert figures.bucket_ns["idle"] > 0


def test_gaps_in_the_record_numbers_are_counted():
    made = RunMaker(ranks=1, steps=30).make()
    ((facts, records),) = parts_of(made)
    ledger = LiveLedger(start_ns=made.meta["start_ns"], world_size=1)
    ledger.add(facts, records[:40])
    ledger.add(facts, records[45:])

    assert ledger.figures(0).dropped == 5


def test_step_times_and_shares_are_kept_for_the_charts():
    made = RunMaker(ranks=2, steps=30, compute_ns=lambda rank, step: (5 + 20 * (step == 11)) * MS).make()
    series = fed(made, 2)
    series.figures(0)
    kept = series.series()

    assert kept.ranks == (0, 1)
    assert kept.step_s.shape == (2, 30)
    assert int(kept.step_s[0].argmax()) == 11
    assert kept.step_s[1, 5] == pytest.approx(Ledger.of(made).step_wall_ns[5] / 1e9, rel=1e-5)
    total = sum(values[11] for values in kept.bucket_s.values())
    assert total == pytest.approx(kept.step_s[:, 11].sum(), rel=1e-5)


@pytest.mark.parametrize("grows", [True, False])
def test_steps_that_take_longer_and_longer_are_told_while_the_run_goes_on(grows):
    made = RunMaker(ranks=1, steps=160, compute_ns=lambda rank, step: (5 + grows * step // 10) * MS).make()
    ratio = fed(made, 1).figures(0).slower

    assert 2.5 < ratio < 4 if grows else ratio == 1  # from 6 to 21 ms, by blocks of 20 steps


def test_of_very_many_steps_the_oldest_are_given_up():
    made = RunMaker(ranks=2, steps=300).make()
    ledger = LiveLedger(start_ns=made.meta["start_ns"], world_size=2, limit=200)
    for part in range(10):
        for facts, records in parts_of(made):
            ledger.add(facts, np.array_split(records, 10)[part])
        ledger.figures(0)
    kept = ledger.series()

    assert kept.step_s.size <= 200 + 2 * 30
    assert kept.first_step + kept.step_s.shape[1] == 300
    assert ledger.figures(0).step_counts.sum() == 600


def test_a_spawned_rank_stands_in_its_parents_place():
    made = RunMaker(ranks=1, steps=10).make()
    ((facts, records),) = parts_of(made)
    ledger = LiveLedger(start_ns=made.meta["start_ns"], world_size=1)
    ledger.add(replace(facts, pid=1), records[:1])
    ledger.add(replace(facts, pid=2, role="spawned"), records)
    ledger.add(replace(facts, pid=1), records[:20])
    ledger.add(replace(facts, pid=3, role="loader"), records)

    assert ledger.figures(0).steps == 10


def test_the_histogram_holds_every_step_at_its_length():
    made = RunMaker(ranks=1, steps=40, compute_ns=30 * MS, optimizer_ns=MS).make()
    figures = fed(made, 1).figures(0)

    assert figures.step_counts[STEP_BOUNDS_S.index(0.05)] == 40
    assert figures.step_sum_s == pytest.approx(Ledger.of(made).step_wall_ns.sum() / 1e9, abs=0.001)
