"""One rank of a running job: where its steps begin and end, whatever optimizers and threads it has."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.ledger.live_rank import MOST_AHEAD, OPEN_RECORDS, RECENT, STRAY_UPDATES, LiveRank
from headway.trace.events.vocabulary import SPANS
from headway.trace.recording.rows import cycles
from headway.trace.rings.records import RECORD_DTYPE
from tests.rings_made import record_made as row

MS = 1_000_000


def updates(optimizers, *, first_ns=0, step_ns=10 * MS, lane=0):
    """Return one update per entry of `optimizers`, each 1 ms long and ending its 10 ms."""
    records = np.zeros(len(optimizers), RECORD_DTYPE)
    records["code"], records["a"], records["lane"] = SPANS["optimizer.step"].code, optimizers, lane
    records["start_ns"] = first_ns + step_ns * np.arange(1, len(optimizers) + 1) - MS
    records["duration_ns"] = MS
    return records


@given(cut=st.lists(st.integers(0, 40), max_size=5), horizons=st.lists(st.integers(0, 45), min_size=1, max_size=6))
def test_windows_hand_out_every_step_once_and_in_order(cut, horizons):
    rank, ends = LiveRank(0, 1, 0), []
    for part in np.split(updates([0] * 40), sorted(cut)):
        if len(part):
            rank.take(part)
    assert rank.begin()
    for horizon in [*sorted(horizons), 40]:
        window = rank.window(horizon)
        if window is not None:
            assert window.first_step == len(ends)
            assert window.low_ns == (ends[-1] if ends else rank.first_ns)
            ends += window.ends_ns.tolist()

    assert ends == [10 * MS * step for step in range(1, 41)]


def test_steps_are_booked_once_it_is_known_what_the_device_did_in_them():
    rank = LiveRank(0, 1, 0)
    rank.take(updates([0] * 8))
    assert rank.bookable == 8
    rank.take(row("device.work", 5 * MS, 30 * MS))
    assert rank.bookable == 3
    rank.take(row("device.work", 40 * MS, 12 * MS))
    assert rank.bookable == 5
    rank.take(updates([0] * (MOST_AHEAD + 1), first_ns=80 * MS))
    assert rank.bookable == rank.steps == 9 + MOST_AHEAD  # what the device does is not seen any more


@pytest.mark.parametrize("cycle", [[0], [0, 1], [3, 1, 2]])
def test_as_many_steps_are_found_as_the_finished_run_has(cycle):
    optimizers = cycle * 12
    rank = LiveRank(0, 1, 0)
    for part in np.array_split(updates(optimizers), 5):
        rank.take(part)

    assert rank.steps == len(cycles(np.array(optimizers)))


@pytest.mark.parametrize("cut", [1, 2, 4])
def test_the_update_that_a_restore_makes_before_the_first_gradient_is_no_step(cut):
    records = updates([0] * 6)
    records["d"][1:] = MS
    rank = LiveRank(0, 1, 0)
    for part in np.split(records, [cut]):
        rank.take(part)
    assert rank.begin()

    assert rank.steps == 5
    assert rank.window(5).ends_ns.tolist() == [10 * MS * step for step in range(2, 7)]


@pytest.mark.parametrize("cut", [10, 30, 34])
def test_forwards_before_the_first_update_were_an_evaluation(cut):
    forwards = np.concatenate([row("forward", step * MS, MS // 2) for step in range(30)])
    trained = updates([0] * 6, first_ns=40 * MS)
    trained["d"] = MS
    rank = LiveRank(0, 1, 0)
    parts = np.split(np.concatenate([forwards, trained]), [cut])
    rank.take(parts[0])
    before = rank.steps_made
    rank.take(parts[1])

    assert before == {10: 0, 30: 10, 34: 4}[cut]
    assert rank.steps_made == 6


@pytest.mark.parametrize(
    ("parts", "steps"),
    [
        ([([0] * 5, 0, 0), ([7] * STRAY_UPDATES, 50, 0), ([7] * 10, 50 + 10 * STRAY_UPDATES, 0)], 15 + STRAY_UPDATES),
        ([([0] * 2, 0, 3), ([0] * 4, 20, 0), ([0] * 4, 60, 3)], 6),
    ],
    ids=["the first optimizer is done for good", "updates of the main thread go before those of others"],
)
def test_steps_end_with_the_updates_of_one_optimizer_in_one_thread(parts, steps):
    rank = LiveRank(0, 1, 0)
    for optimizers, first_ms, lane in parts:
        rank.take(updates(optimizers, first_ns=first_ms * MS, lane=lane))

    assert rank.steps == steps


def test_step_0_begins_with_the_first_iterator():
    rank = LiveRank(0, 1, 0)
    rank.take(row("host.import", 0, 4 * MS))
    assert not rank.begin()
    rank.take(row("input.iter", 5 * MS, 2 * MS))
    assert rank.begin()
    assert not rank.begin()

    assert rank.first_ns == 5 * MS


def test_training_in_another_thread_is_followed_there():
    rank = LiveRank(0, 1, 0)
    rank.take(np.concatenate([row("host.gc", MS, MS), updates([0] * 6, lane=2), row("host.gc", 3 * MS, MS, lane=2)]))
    rank.begin()
    window = rank.window(6)

    assert set(window.records["lane"].tolist()) == {2}


def test_a_record_that_reaches_into_the_next_steps_is_handed_out_with_both():
    rank = LiveRank(0, 1, 0)
    rank.take(np.concatenate([updates([0] * 3), row("checkpoint.save", 15 * MS, 10 * MS)]))
    rank.begin()
    save = SPANS["checkpoint.save"].code
    held = [save in rank.window(step).records["code"] for step in (1, 2, 3)]

    assert held == [False, True, True]
    assert rank.saved == 1


def test_a_save_of_headways_own_counts_once_its_commit_is_seen_however_late():
    rank, saved = LiveRank(0, 1, 0), []
    copies = [row("checkpoint.snapshot", start, MS, b=number) for start, number in ((19_500_000, 7), (32 * MS, 8))]
    rank.take(np.concatenate([updates([0] * 4), *copies]))
    rank.begin()
    for horizon in (3, 4):
        rank.window(horizon)
        saved.append(rank.saved)
    for number, first in ((7, 5), (8, 6)):
        # Its own time lies in a step that is booked already.
        rank.take(
            np.concatenate([row("checkpoint.commit", 21 * MS, MS, b=number), updates([0], first_ns=first * 10 * MS)])
        )
        rank.window(first)
        saved.append(rank.saved)

    assert saved == [-1, -1, 2, 3]


def test_the_rate_is_that_of_the_last_ten_seconds_and_falls_when_nothing_comes():
    rank = LiveRank(0, 1, 0)
    rank.take(updates([0] * 100, step_ns=100 * MS))
    rank.take(updates([0] * 200, first_ns=10_000 * MS, step_ns=50 * MS))
    end = rank.last_step_ns

    assert rank.steps_per_s(end) == pytest.approx(20.0)
    assert rank.steps_per_s(end + 10_000 * MS) == pytest.approx(10.0, rel=0.05)
    rank.take(updates([0] * 3 * RECENT, first_ns=end, step_ns=MS))
    assert rank.steps_per_s(rank.last_step_ns) == pytest.approx(1000.0, rel=0.01)


def test_before_the_second_step_there_is_no_rate():
    rank = LiveRank(0, 1, 0)
    rank.take(updates([0]))

    assert rank.steps_per_s(10**9) == 0.0
    assert rank.window(0) is None


def fetches(count, first_ns):
    """Return `count` calls of next(loader), 1 us each."""
    records = np.zeros(count, RECORD_DTYPE)
    records["code"], records["duration_ns"] = SPANS["input.next"].code, 1000
    records["start_ns"] = first_ns + 2000 * np.arange(count)
    return records


@pytest.mark.parametrize("first", [0, 3])
def test_a_rank_that_never_updates_holds_a_bounded_number_of_records(first):
    rank, size = LiveRank(0, 1, 0), OPEN_RECORDS // 8
    if first:
        rank.take(updates([0] * first))
    for part in range(40):
        rank.take(fetches(size, (100 + part * 100) * MS))
        rank.begin()
    held = sum(map(len, rank._held))

    assert held <= OPEN_RECORDS + first
    assert rank.begin() is False, "its first step had begun with its first record"


def test_what_a_very_long_step_gave_up_is_counted_and_complete_steps_lose_nothing():
    rank, size = LiveRank(0, 1, 0), OPEN_RECORDS // 4
    rank.take(updates([0] * 5))
    rank.begin()
    for part in range(8):
        rank.take(fetches(size, (100 + part * 100) * MS))
    whole = rank.window(5)
    rank.take(updates([0], first_ns=1000 * MS))
    long = rank.window(6)

    assert (len(whole.records), whole.given_up) == (5, 0)
    assert long.given_up > 0
    assert len(long.records) + long.given_up == 8 * size + 1
