"""What a job is owed: global batches for ranks of any speed, tails as declared, passes in order, none kept too long."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.data.bytes.order import TAILS, Sequence
from headway.data.service.jobs import JobPass, JobTerms, Known, ServedJob


def walk(num, terms, history=()):
    return JobPass(0, terms, iter([*range(num), None]).__next__, history)


@given(
    num=st.integers(0, 40), batch_size=st.integers(1, 6), world_size=st.integers(1, 4), tail=st.sampled_from([*TAILS]),
    asked=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3)), max_size=20),
)  # fmt: skip
def test_ranks_get_their_slices_in_whatever_order_they_ask(num, batch_size, world_size, tail, asked):
    terms = JobTerms(batch_size, world_size, tail=tail)
    found, oracle = walk(num, terms), Sequence(num, batch_size, world_size, tail)
    for number, rank in [*asked, *((g, r) for g in range(13) for r in range(world_size))]:
        if rank >= world_size:
            continue
        items, positions = found.batch(number, rank), oracle.positions(number, rank)
        assert (items is None) == (number >= oracle.num_global_batches)
        if items is not None:
            assert items.tolist() == [position % num for position in positions]
            assert found.occurrence(number, rank).tolist() == [position // num for position in positions]


def test_a_pass_goes_on_behind_its_history_and_pads_from_its_beginning():
    found = walk(3, JobTerms(4, tail="pad"), [np.array([7, 8, 9, 6])])

    assert found.batch(0, 0).tolist() == [7, 8, 9, 6]
    assert found.batch(1, 0).tolist() == [0, 1, 2, 7]
    assert found.occurrence(1, 0).tolist() == [0, 0, 0, 1]
    assert found.batch(2, 0) is None


def test_what_every_rank_has_had_is_forgotten():
    found = walk(12, JobTerms(2))
    found.decide_all()
    found.forget(4)

    assert found.everybody(3) is None
    assert found.everybody(4).tolist() == [8, 9]
    assert found.num_batches == 6


def job(world_size=2, size=5):
    return ServedJob("a", JobTerms(1, world_size), np.arange(size), np.ones(size, bool))


def test_passes_start_in_order_and_wait_for_histories_only():
    here = job()
    assert here.may_start() is None
    here.enter(0, 0, here.subset, [])
    assert here.may_start() is None
    here.enter(0, 1, here.subset, None)
    assert here.may_start() is None
    here.enter(1, 0, here.subset, [np.array([2, 3])])
    assert here.may_start() == 0
    assert [items.tolist() for items in here.openings[0].longest("a")] == [[2, 3]]
    here.openings[0].started = True
    assert here.may_start() == 1


def test_a_rank_that_left_the_lost_server_is_not_waited_for_one_that_left_without_a_word_is():
    here = job(world_size=3)
    here.enter(0, 0, here.subset, [], known=Known([np.array([1, 2, 3])], gone=[2]))
    here.ranks[1].left = True
    assert here.missing() == [1]
    here.enter(1, 0, here.subset, [])

    assert here.may_start() == 0
    assert here.ranks[2].left


def test_a_pass_of_which_all_is_known_waits_for_nobody_and_who_is_ahead_comes_into_its_own():
    here = job()
    here.enter(1, 1, here.subset, [], index=1)
    assert here.missing() == [0]
    here.enter(0, 0, here.subset, [np.array([3, 1])], index=0, known=Known([np.array([0, 2])], complete=True))
    assert here.may_start() == 0
    here.openings[0].started = True

    assert here.may_start() == 1
    assert [items.tolist() for items in here.openings[0].longest("a")] == [[3, 1], [0, 2]]


def test_passes_behind_all_ranks_are_dropped():
    here = job()
    for rank in (0, 1):
        here.enter(rank, 0, here.subset, None)
    here.passes[0] = walk(5, here.terms)
    here.enter(0, 1, here.subset, None)
    assert here.tidy() == []
    here.ranks[1].left = True
    assert [found.num_batches for found in here.tidy()] == [0]
    assert here.passes == {}


def test_how_a_pass_began_is_forgotten_once_it_has_started_and_every_rank_has_it_behind():
    here = job()
    for epoch in range(9):
        here.enter(0, epoch, here.subset, None)
        here.enter(1, epoch, here.subset, None)
        assert here.may_start() == epoch
        here.openings[epoch].started = True
        here.tidy()

        assert list(here.openings) == [epoch]
    here.enter(0, 9, here.subset, None)
    here.tidy()
    assert list(here.openings) == [8, 9]


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda here: here.rank(2), "rank is 2; job 'a' has ranks 0 to 1"),
        (lambda here: here.part([1, 5]), "does not read item 5"),
        (lambda here: here.part([-1]), "does not read item -1"),
        (lambda here: here.enter(1, 3, here.subset, None), "begins epoch 3 elsewhere"),
        (lambda here: here.enter(1, 0, here.part([1]), None), "begins epoch 0 elsewhere"),
        (lambda here: JobTerms(1, 0), "world_size 0; pass 1 or more"),
    ],
)
def test_bad_input_is_one_clear_error(act, message):
    here = job()
    here.enter(0, 0, here.subset, None)
    with pytest.raises(InputError, match=message):
        act(here)
