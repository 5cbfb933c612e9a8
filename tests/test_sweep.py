"""The sweep and the exact splitting of whole numbers."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headway.trace.events.intervals import MAX_LAYERS, share_out, sweep
from tests.refusals import refused

WINDOW = (0, 60)

intervals = st.lists(
    st.tuples(st.integers(-5, 65), st.integers(0, 30), st.integers(0, 3)).map(lambda t: (t[0], t[0] + t[1], t[2])),
    max_size=14,
)


def columns(rows):
    return [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows]


def owner_oracle(rows, moment):
    """Return the row that owns one unit of time, by looking at all of them."""
    over = [i for i, (start, end, _) in enumerate(rows) if start <= moment < end]
    clipped = [(max(start, WINDOW[0]), min(end, WINDOW[1]), level) for start, end, level in rows]
    return max(over, key=lambda i: (clipped[i][2], clipped[i][0], -clipped[i][1], i), default=-1)


@given(intervals, st.lists(st.integers(-5, 65), max_size=4))
def test_pieces_tile_the_window_exactly(rows, cuts):
    pieces = sweep(*columns(rows), window=WINDOW, cuts=cuts)

    assert int(pieces.duration_ns.sum()) == WINDOW[1] - WINDOW[0]
    assert (pieces.duration_ns > 0).all()
    assert pieces.start_ns[1:].tolist() == pieces.end_ns[:-1].tolist()
    assert {cut for cut in cuts if 0 < cut < 60} <= set(pieces.start_ns.tolist())


@given(intervals)
def test_every_unit_of_time_has_the_owner_that_the_oracle_names(rows):
    pieces = sweep(*columns(rows), window=WINDOW)

    owners = np.repeat(pieces.row, pieces.duration_ns).tolist()
    assert owners == [owner_oracle(rows, moment) for moment in range(*WINDOW)]


@given(intervals, st.randoms())
def test_the_order_of_rows_changes_no_sum(rows, random):
    shuffled = rows[:]
    random.shuffle(shuffled)

    def by_level(case):
        pieces = sweep(*columns(case), window=WINDOW)
        level = np.append([row[2] for row in case], -1).astype(int)[pieces.row]
        return {value: int(pieces.duration_ns[level == value].sum()) for value in set(level.tolist())}

    assert by_level(rows) == by_level(shuffled)


def test_deep_overlaps_are_painted_row_by_row_with_the_same_result():
    """A staircase of more rows than `MAX_LAYERS`: each reaches into the next, so every layer holds one."""
    n = 3 * MAX_LAYERS
    start = np.arange(n) * 10
    pieces = sweep(start, start + 15, np.zeros(n), window=(0, 10 * n + 5))

    owners = np.repeat(pieces.row, pieces.duration_ns)
    assert owners.tolist() == np.append(np.repeat(np.arange(n), 10), [n - 1] * 5).tolist()


def test_nothing_recorded_leaves_the_window_to_nobody():
    pieces = sweep([], [], [], window=(3, 9))

    assert (pieces.start_ns.tolist(), pieces.end_ns.tolist(), pieces.row.tolist()) == ([3], [9], [-1])
    assert len(sweep([], [], [], window=(3, 3)).row) == 0


@given(
    st.lists(st.tuples(st.integers(0, 10**15), st.lists(st.integers(0, 10**12), min_size=3, max_size=3)), max_size=5)
)
def test_shares_add_up_and_are_off_by_less_than_one(rows):
    total = np.array([row[0] for row in rows], np.int64)
    weights = np.array([row[1] for row in rows], np.int64).reshape(-1, 3)

    shares = share_out(total, weights)

    whole = weights.sum(axis=1)
    assert shares.sum(axis=1).tolist() == np.where(whole > 0, total, 0).tolist()
    assert (shares >= 0).all()
    for amount, weight, share in zip(total.tolist(), weights.tolist(), shares.tolist(), strict=True):
        for part, got in zip(weight, share, strict=True):
            assert sum(weight) == 0 or abs(got - amount * part / sum(weight)) <= 1 + amount * 1e-15


test_bad_intervals_are_named = refused(
    (lambda: sweep([0, 9], [1, 4], [0, 0], window=WINDOW), r"interval 1 ends at 4 ns, before its start at 9 ns.*Drop"),
    (lambda: sweep([], [], [], window=(5, 1)), r"window ends at 1 ns, before its start at 5 ns.*Swap"),
)
