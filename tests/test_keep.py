"""Which checkpoints stay."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.checkpoint import Keep
from headway.core.errors import InputError

steps = st.lists(st.integers(0, 10_000), max_size=30)


@given(steps=steps, last=st.integers(1, 5), every=st.none() | st.integers(1, 100))
def test_the_newest_stay_and_every_step_either_stays_or_goes(steps, last, every):
    keep = Keep(last, every)

    kept, surplus = keep.kept(steps), keep.surplus(steps)

    assert kept | surplus == set(steps)
    assert not kept & surplus
    assert set(sorted(set(steps))[-last:]) <= kept
    assert all(step % every == 0 for step in kept - set(sorted(set(steps))[-last:]) if every)


@given(steps=steps, last=st.integers(1, 5))
def test_what_went_before_a_commit_would_go_after_it_too(steps, last):
    keep = Keep(last)
    later = [*steps, 20_000]

    assert keep.surplus(steps) <= keep.surplus(later)


@pytest.mark.parametrize("wrong", [{"last": 0}, {"every": 0}])
def test_numbers_that_keep_nothing_are_refused(wrong):
    with pytest.raises(InputError, match=r"Pass 1 or more"):
        Keep(**wrong)
