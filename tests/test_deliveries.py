"""Audit rows are thinned without losing what judges need; counts add up over ranks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.trace.recording.loads import EVERY, counts_of, thinned
from tests.rings_made import Process, built


def notes(tmp_path, passes):
    """Write the notes of some passes, one after the other; return the audit rows of the trace as (pass, seq)."""
    process = Process(tmp_path)
    for number, count in enumerate(passes):
        process.write("input.audit", 0, number, -1, 3, 0)
        for taken in range(1, count + 1):
            process.write("input.audit", 0, number, 8 * taken, taken, -taken)
    trace = built(tmp_path)
    rows = np.flatnonzero(trace.named("input.audit"))
    return [tuple(int(trace.events[key][row]) for key in ("peer", "seq", "corr", "bytes")) for row in rows]


@pytest.mark.parametrize("count", [0, 1, EVERY - 1, EVERY, 3 * EVERY + 5])
def test_the_beginning_the_last_and_one_in_sixty_four_are_kept(tmp_path, count):
    rows = notes(tmp_path, [count])
    kept = [taken for taken in range(1, count + 1) if taken % EVERY == 0 or taken == count]

    assert rows == [(0, -1, 3, 0), *((0, 8 * taken, taken, -taken) for taken in kept)]


def test_passes_are_thinned_apart(tmp_path):
    rows = notes(tmp_path, [3, 2])

    assert [(number, seq) for number, seq, _, _ in rows] == [(0, -1), (0, 24), (1, -1), (1, 16)]


def test_rows_without_notes_stay_as_they_are(tmp_path):
    process = Process(tmp_path)
    process.write("input.next", 1000, 0, 0, -1, 0)

    assert built(tmp_path).named("input.next").sum() == 1
    assert callable(thinned)


counts = st.dictionaries(
    st.sampled_from(["cache", "order"]), st.dictionaries(st.sampled_from("abc"), st.integers(0, 99), min_size=1)
)


@given(st.lists(counts, max_size=4))
def test_counts_of_ranks_add_up_key_by_key(ranks):
    found = counts_of([{"input": each} for each in ranks])

    for name in ("cache", "order"):
        for key in "abc":
            total = sum(each.get(name, {}).get(key, 0) for each in ranks)
            assert found.get(name, {}).get(key, 0) == total
