"""Splits deal what a DataLoader deals, cover each rank once, and spread ranks over few workers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.data.bytes.order import TAILS
from headway.data.fleet.splits import FleetPass, partners

PASSES = st.builds(
    FleetPass, num_items=st.integers(1, 30), batch_size=st.integers(1, 7), world_size=st.integers(1, 4),
    seed=st.integers(0, 9), epoch=st.integers(0, 3), shuffle=st.booleans(), tail=st.sampled_from(sorted(TAILS)),
)  # fmt: skip


@given(work=PASSES, split_batches=st.integers(1, 5), taken=st.integers(0, 15))
def test_the_splits_of_a_rank_cover_what_it_has_not_taken_in_order(work, split_batches, taken):
    for rank in range(work.world_size):
        total = work.num_batches(rank)
        splits = work.splits(rank, min(taken, total), split_batches=split_batches, most=100)

        covered = [batch for split in splits for batch in range(split.first, split.end)]
        assert [batch for batch in covered if batch >= taken] == list(range(min(taken, total), total))
        assert all(split.first % split_batches == 0 for split in splits)
        assert splits[:2] == work.splits(rank, min(taken, total), split_batches=split_batches, most=2)


@given(work=PASSES)
def test_the_ranks_of_a_pass_get_every_item_as_its_tail_says(work):
    got = [i for r in range(work.world_size) for b in range(work.num_batches(r)) for i in work.keys(b, r).items]

    if work.tail == "short":
        assert sorted(got) == list(range(work.num_items))
    elif work.tail == "drop":
        assert len(set(got)) == len(got) == work.num_items - work.num_items % (work.batch_size * work.world_size)
    else:
        assert set(got) == set(range(work.num_items))


def test_an_item_that_comes_again_in_a_padded_tail_is_told_from_its_first_time():
    work = FleetPass(3, 2, tail="pad", shuffle=False, seed=4, epoch=2)

    first, last = work.keys(0, 0), work.keys(1, 0)

    assert (first.items, first.occurrence, first.batch) == ([0, 1], [0, 0], 0)
    assert (last.items, last.occurrence, last.batch) == ([2, 0], [0, 1], 1)
    assert (last.seed, last.epoch) == (4, 2)


def test_a_pass_from_the_middle_goes_on_where_another_world_stopped():
    whole = FleetPass(40, 2, world_size=2, seed=1)
    rest = FleetPass(40, 4, world_size=1, seed=1, start=whole.position(3))

    later = [item for batch in range(3, 10) for rank in (0, 1) for item in whole.keys(batch, rank).items]
    assert sorted(later) == sorted(i for b in range(rest.num_batches(0)) for i in rest.keys(b, 0).items)
    assert rest.keys(0, 0).batch == whole.keys(3, 0).batch


@given(num_ranks=st.integers(1, 20), num_workers=st.integers(0, 60), most=st.integers(1, 8))
def test_every_rank_has_its_workers_and_no_worker_is_idle_that_could_serve(num_ranks, num_workers, most):
    arcs = [partners(rank, num_ranks, num_workers=num_workers, most=most) for rank in range(num_ranks)]

    assert all(len(set(arc)) == len(arc) == min(most, num_workers) for arc in arcs)
    served = {worker for arc in arcs for worker in arc}
    assert served <= set(range(num_workers))
    if num_workers <= most * num_ranks:
        assert served == set(range(num_workers))


@pytest.mark.parametrize(("make", "message"), [
    (lambda: FleetPass(5, 0), r"batch_size is 0; it must be 1 or more"),
    (lambda: FleetPass(5, 1, seed=-1), r"the seed is -1"),
    (lambda: FleetPass(5, 1, tail="cut"), r"unknown tail 'cut'"),
    (lambda: partners(3, 2, num_workers=1, most=1), r"rank 3 of 2 .*Use ranks 0 to"),
])  # fmt: skip
def test_bad_input_is_told_with_rule_and_fix(make, message):
    with pytest.raises(InputError, match=message):
        make()
