"""Orders: bijections for any size, even ones, the same in every process; sequences that cover an epoch exactly."""

import itertools
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headway.data.bytes import order
from headway.data.bytes.order import TAILS, Sequence, in_order, item_seeds, occurrences, permute
from tests.refusals import refused

sequences = st.builds(
    Sequence, st.integers(1, 200), st.integers(1, 9), st.integers(1, 5), tail=st.sampled_from(sorted(TAILS))
)


@given(n=st.integers(0, 3000), seed=st.integers(0, 1 << 40), epoch=st.integers(0, 9))
def test_every_order_holds_every_item_once(n, seed, epoch):
    assert sorted(permute(n, seed, epoch)(np.arange(n)).tolist()) == list(range(n))


@given(n=st.integers(1, 3000), seed=st.integers(0, 99))
def test_a_computed_order_holds_every_item_once_too(n, seed):
    walked = order.Permutation(n, order._Feistel(n, seed).walk)
    assert sorted(walked(np.arange(n)).tolist()) == list(range(n))


def test_orders_of_four_items_are_all_equally_likely():
    counts = Counter(tuple(permute(4, seed, 0)(range(4)).tolist()) for seed in range(4800))
    chi_square = sum((counts[p] - 200) ** 2 / 200 for p in itertools.permutations(range(4)))
    assert chi_square < 49.7  # 23 degrees of freedom, p = 0.001


def test_a_computed_order_sends_every_tenth_to_every_tenth_evenly():
    n = order.TABLE_ITEMS + 12345
    found = permute(n, 11, 3)(np.arange(0, n, 7))
    table = np.histogram2d(np.arange(0, n, 7), found, bins=10, range=[[0, n], [0, n]])[0]
    expected = found.size / 100
    assert ((table - expected) ** 2 / expected).sum() < 142  # 81 degrees of freedom, p = 0.00003
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.01


def test_orders_of_two_epochs_or_seeds_are_unrelated():
    base = permute(5000, 1, 0)(np.arange(5000))
    for other in (permute(5000, 1, 1), permute(5000, 2, 0)):
        assert (other(np.arange(5000)) == base).sum() < 10
        assert abs(np.corrcoef(other(np.arange(5000)), base)[0, 1]) < 0.06


def test_an_order_is_the_same_for_ever():
    assert permute(10, 7, 2)(range(10)).tolist() == [8, 2, 4, 7, 5, 1, 3, 0, 9, 6]
    assert [permute(10**12, 7, 2)(i) for i in (0, 10**12 - 1)] == [415749747494, 790818828931]


@given(sequences)
def test_ranks_together_read_every_position_once_and_no_other(sequence):
    parts = [
        sequence.positions(g, rank).tolist()
        for g in range(sequence.num_global_batches)
        for rank in range(sequence.world_size)
    ]
    read = sorted(itertools.chain.from_iterable(parts))
    whole = sequence.num_global_batches * sequence.global_batch
    assert read == list(range(whole if sequence.tail != "short" else sequence.num_items))


@given(sequences, st.data())
def test_another_world_goes_on_at_any_position_as_if_nothing_had_happened(sequence, data):
    batches = data.draw(st.integers(0, sequence.num_global_batches))
    worlds = [w for w in range(1, 10) if sequence.global_batch % w == 0]
    world = data.draw(st.sampled_from(worlds))
    start = sequence.position_after(batches)
    later = Sequence(sequence.num_items, sequence.global_batch // world, world, tail=sequence.tail, start=start)
    if start == sequence.num_items:
        assert later.num_global_batches == 0
        return
    for g in range(later.num_global_batches):
        theirs = np.sort(np.concatenate([later.positions(g, r) for r in range(world)]))
        ours = np.concatenate([sequence.positions(batches + g, r) for r in range(sequence.world_size)])
        assert theirs.tolist() == np.sort(ours).tolist()


@given(sequences)
def test_a_rank_has_as_many_batches_as_it_has_items_for(sequence):
    for rank in range(sequence.world_size):
        sizes = [sequence.positions(g, rank).size for g in range(sequence.num_global_batches)]
        assert sequence.num_batches(rank) == sum(size > 0 for size in sizes)


def test_item_seeds_are_functions_of_item_and_occurrence_and_never_collide_here():
    items, again = (a.ravel() for a in np.meshgrid(np.arange(2000), np.arange(5)))
    seeds = item_seeds(3, 1, items, again)
    assert np.unique(seeds).size == seeds.size
    mixed = np.random.default_rng(0).permutation(items.size)
    assert (item_seeds(3, 1, items[mixed], again[mixed]) == seeds[mixed]).all()
    assert not np.isin(item_seeds(3, 2, items, again), seeds).any()


def test_occurrences_count_over_several_batches():
    seen: dict[int, int] = {}
    assert occurrences([1, 2, 1], seen) == [0, 0, 1]
    assert occurrences([2, 1], seen) == [1, 2]


def test_the_identity_is_in_order():
    assert in_order(5)(np.arange(5)).tolist() == [0, 1, 2, 3, 4]
    assert in_order(5)(3) == 3


test_bad_input_is_one_clear_error = refused(
    (lambda: permute(-1, 0, 0), "n is -1"),
    (lambda: permute(5, 0, 0)(5), "index 5 lies outside an order of 5 items"),
    (lambda: permute(5, -3, 0), "seed is -3"),
    (lambda: Sequence(5, 0), "batch_size is 0"),
    (lambda: Sequence(5, 2, 0), "world_size is 0"),
    (lambda: Sequence(5, 2, tail="shrot"), "short"),
    (lambda: Sequence(5, 2, start=6), "no such position"),
    (lambda: Sequence(5, 2, 2).positions(0, 2), "ranks 0 to 1"),
)
