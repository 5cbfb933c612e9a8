"""What a client knows of its epoch: one bit per item, good for every rank and world, exact at the ends."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.data.service.batches import JobProgress


@given(st.sets(st.integers(0, 60), min_size=1), st.data())
def test_what_remains_is_what_was_not_taken_wherever_the_state_goes(items, data):
    order = data.draw(st.permutations(sorted(items)))
    cut = data.draw(st.integers(0, len(order)))
    progress = JobProgress(sorted(items))
    for item in order[:cut]:
        progress.took([item])
    again = JobProgress(sorted(items), global_batch=5)
    again.load_state_dict(msgspec.msgpack.decode(msgspec.msgpack.encode(progress.state_dict())))

    assert progress.remaining().tolist() == sorted(order[cut:])
    ended = cut == len(order)
    assert again.epoch == (1 if ended else 0)
    assert again.remaining().tolist() == sorted(items if ended else order[cut:])
    assert (again.base() is None) == (cut in (0, len(order)))


def test_a_tail_that_is_dropped_ends_the_epoch():
    progress = JobProgress(range(10), global_batch=4, tail="drop")
    progress.took([0, 1, 2, 3])
    assert progress.state_dict()["epoch"] == 0
    progress.took([4, 5, 6, 7])
    assert progress.state_dict()["epoch"] == 1


def test_a_padded_batch_counts_its_items_once():
    progress = JobProgress(range(3), global_batch=2, tail="pad")
    progress.took([0, 1])
    progress.took([2, 0])

    assert progress.remaining().size == 0
    assert progress.state_dict()["epoch"] == 1


def test_nothing_to_read_is_an_epoch_that_is_over():
    progress = JobProgress([])

    assert (progress.base(), progress.remaining().tolist(), progress.state_dict()["epoch"]) == (None, [], 1)
    JobProgress([]).load_state_dict(progress.state_dict())


def test_a_state_takes_an_eighth_of_a_byte_per_item():
    progress = JobProgress(range(1_000_000))
    progress.took(np.random.default_rng(0).permutation(1_000_000)[:500_000])

    assert len(progress.state_dict()["remaining"][1]) <= 1_000_000 / 8 + 100


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"version": 2}, "version 2; pass one of version 1"),
        (JobProgress(range(9)).state_dict(), "of 9 items, this job reads 4"),
        (JobProgress([0, 3]).state_dict(), "or others of them"),
    ],
)
def test_a_state_of_something_else_is_one_clear_error(state, message):
    with pytest.raises(InputError, match=message):
        JobProgress([0, 1, 2] if "others" in message else range(4)).load_state_dict(state)
