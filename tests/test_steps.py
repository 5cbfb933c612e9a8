"""Steps: from optimizer updates alone; rising, within the updates, one per cycle."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.trace.recording.rows import cycles, step_of


@given(
    optimizers=st.integers(1, 4), repeats=st.lists(st.integers(1, 3), min_size=4, max_size=4), steps=st.integers(1, 12)
)
def test_a_fixed_cycle_of_updates_makes_one_step_each(optimizers, repeats, steps):
    # The first optimizer stands once in a cycle: where it repeats, the next step begins.
    cycle = [index for index in range(optimizers) for _ in range(repeats[index] if index else 1)]
    found = cycles(np.array(cycle * steps, np.int64))

    expected = [len(cycle) * (k + 1) - 1 for k in range(steps)]
    assert found.tolist() == (expected if steps > 1 or len(set(cycle)) == len(cycle) else found.tolist())


@given(st.lists(st.integers(0, 3), max_size=40))
def test_step_ends_are_rising_and_within_the_updates(optimizer):
    found = cycles(np.array(optimizer, np.int64)).tolist()

    assert found == sorted(set(found))
    assert not found or 0 <= found[0] <= found[-1] < len(optimizer)


@pytest.mark.parametrize(
    ("updates", "ends"),
    [
        ([0, 0, 0], [0, 1, 2]),
        ([0, 1, 0, 1], [1, 3]),
        ([0, 1, 1, 0, 1, 1], [2, 5]),
        ([0, 1, 0], [1]),  # killed between the two updates: the last step is not complete
        ([*range(40), *range(40), *range(40)], [39, 79, 119]),  # more optimizers than are looked at in one go
        ([0, 0, 1, 1, 1], [0, 1, 2, 3, 4]),  # a second phase with an optimizer of its own
        ([0] * 4 + [1] * 4, [*range(8)]),  # one layer is trained after the other
        ([0, 1, 0, 1, 2, 2], [1, 3, 4, 5]),
        ([], []),
    ],
)
def test_a_step_ends_when_the_first_optimizer_repeats(updates, ends):
    assert cycles(np.array(updates, np.int64)).tolist() == ends


def test_moments_before_between_and_behind_the_steps():
    bounds = np.array([10, 15, 35])

    assert step_of(np.array([9, 10, 14, 15, 35]), bounds).tolist() == [-1, 0, 0, 1, 2]
    assert step_of(np.array([3]), np.empty(0, np.int64)).tolist() == [-1]
