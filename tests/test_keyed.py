"""Generators of the example being loaded: equal in every mode, new for every example, kept apart from the caller's."""

import random
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Subset

from headway.data import DataLoader, generator, torch_generator
from headway.data.bytes.torch_keyed import Draws, generator_states, generators_kept, reads_batches, set_generators
from tests.datasets import Sized
from tests.spawn import run_threads

MODES = [{}, {"num_workers": 2}, {"num_workers": 2, "workers": "threads"}]


class Drawn(Sized):
    """Draws from whatever it is told to."""

    def __init__(self, n, draw):
        self.size, self.draw = n, draw

    def __getitem__(self, item):
        return item, self.draw()


def keyed():
    return generator().random(), float(torch.rand(1, generator=torch_generator())), generator().random()


def shared():
    return random.random(), np.random.rand(), float(torch.rand(1))


@given(seed=st.integers(0, 2**70), other=st.integers(0, 2**70))
def test_a_block_draws_what_its_seed_says_and_goes_on_where_it_was(seed, other):
    def numbers(seed):
        with Draws(seed):
            return [generator().random(), generator().random(), float(torch.rand(1, generator=torch_generator()))]

    assert numbers(seed) == numbers(seed)
    assert len(set(numbers(seed))) == 3
    assert (numbers(seed) == numbers(other)) == (seed % 2**64 == other % 2**64)


def test_blocks_lie_inside_each_other_and_threads_have_their_own():
    seen = {}

    def inside(name, seed):
        with Draws(seed):
            first = generator()
            with Draws(seed + 1):
                seen[name] = generator().random()
            assert generator() is first

    with Draws(1):
        outer = generator()
        run_threads(inside, [(k, k % 2) for k in range(4)])
        assert generator() is outer

    assert seen[0] == seen[2] != seen[1] == seen[3]


@pytest.mark.parametrize("options", MODES, ids=str)
@pytest.mark.parametrize("batch_size", [3, None])
def test_examples_and_batches_draw_the_same_in_every_mode(options, batch_size):
    def collate(examples):
        return examples, keyed()

    def epochs(options):
        loader = DataLoader(Drawn(8, keyed), batch_size, True, collate_fn=collate, seed=4, **options)
        return [list(loader) for _ in range(2)]

    expected = epochs({})

    assert epochs(options) == expected
    numbers = re.findall(r"0\.\d+", repr(expected))
    assert len(numbers) == len(set(numbers)) >= 2 * 8 * 3


def test_the_global_generators_are_keyed_beside_them_where_they_are_not_shared():
    expected = [row for batch in DataLoader(Drawn(8, shared), 4, True, collate_fn=list) for row in batch]

    processes = DataLoader(Drawn(8, shared), 2, True, collate_fn=list, num_workers=2)

    assert [row for batch in processes for row in batch] == expected
    assert len({row[1] for row in expected}) == 8


def test_nothing_of_a_batch_stays_behind_in_the_caller():
    torch.manual_seed(1)
    before = generator().random()
    list(DataLoader(Drawn(4, keyed), 2))
    torch.manual_seed(1)

    # Outside of a loader it follows torch's seed, as all that torch starts does.
    assert generator().random() == before != generator().random()


def test_states_are_put_back_also_after_an_exception():
    states = generator_states()

    def draw_and_fail():
        with generators_kept():
            shared()
            raise KeyError

    with pytest.raises(KeyError):
        draw_and_fail()
    first = shared()
    set_generators(states)

    assert shared() == first


def test_the_generators_of_devices_in_use_are_put_back_too(monkeypatch):
    device = torch.Generator().manual_seed(3)
    monkeypatch.setattr("headway.data.bytes.torch_keyed.device_generators", lambda: (device,))
    before = device.get_state()
    with generators_kept():
        torch.rand(2, generator=device)
        assert not torch.equal(device.get_state(), before)

    assert torch.equal(device.get_state(), before)


@pytest.mark.parametrize("draw", [keyed, shared])
def test_a_subset_is_keyed_by_example_for_any_world(draw):
    def delivered(world):
        dataset = Subset(Drawn(30, draw), list(range(3, 27)))
        ranks = [
            DataLoader(dataset, 12 // world, True, collate_fn=list, rank=r, world_size=world) for r in range(world)
        ]
        return sorted(row for loader in ranks for batch in loader for row in batch)

    assert delivered(1) == delivered(2) == delivered(4)


def test_only_what_reads_whole_batches_itself_is_asked_for_them():
    class Many(Drawn):
        def __getitems__(self, items):
            return items

    assert reads_batches(Many(3, keyed))
    assert reads_batches(Subset(Subset(Many(3, keyed), [0]), [0]))
    assert not reads_batches(Subset(Drawn(3, keyed), [0]))
    assert not reads_batches(ConcatDataset([Many(3, keyed)]))
