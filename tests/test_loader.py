"""The drop-in loader: torch's behaviour where the user can see it, an exact place in the data where torch has none."""

import pickle
import random
import sys
import time

import numpy as np
import pytest
import torch
import torch.utils.data
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, RandomSampler, TensorDataset

from headway.core.errors import InputError
from headway.data import DataLoader, DatasetChangedError
from tests.datasets import Sized
from tests.refusals import refused


class Augmented(Sized):
    """Examples that draw from all three generators."""

    def __getitem__(self, item):
        return item, random.random(), np.random.randn(), torch.rand(2)


class Counted(IterableDataset):
    """A stream of numbers, dealt to workers, that knows where it is."""

    def __init__(self, n, ends=True):
        self.n, self.at = n, 0

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        step, first = (1, 0) if info is None else (info.num_workers, info.id)
        while first + self.at * step < self.n:
            self.at += 1
            yield first + (self.at - 1) * step
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def rows(batch):
    """Return a batch of `Augmented` as a list of hashable examples."""
    items, a, b, c = batch
    return list(zip(items.tolist(), a.tolist(), b.tolist(), map(tuple, c.tolist()), strict=True))


def dealt(batches_of_ranks):
    """Return the global batch that ranks got together, in the order of its positions."""
    width = max(map(len, batches_of_ranks))
    return [batch[k] for k in range(width) for batch in batches_of_ranks if k < len(batch)]


def uninterrupted(n, global_batch, epochs, **options):
    """Return [epoch][global batch] of one rank without workers."""
    loader = DataLoader(Augmented(n), global_batch, True, **options)
    return [[rows(batch) for batch in loader] for _ in range(epochs)]


@pytest.mark.slow
@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), n=st.integers(1, 120), global_batch=st.sampled_from([1, 2, 4, 6, 12]), seed=st.integers(0, 99))
def test_interruptions_and_other_worlds_change_nothing_of_what_is_delivered(data, n, global_batch, seed):
    tail = data.draw(st.sampled_from(["short", "pad", "drop"]))
    expected = [batch for epoch in uninterrupted(n, global_batch, 2, seed=seed, tail=tail) for batch in epoch]
    delivered, state = [], None
    for _ in range(25):
        world = data.draw(st.sampled_from([w for w in (1, 2, 3, 4, 6) if global_batch % w == 0]))
        ranks = [
            DataLoader(Augmented(n), global_batch // world, True, seed=seed, tail=tail, rank=r, world_size=world)
            for r in range(world)
        ]
        if state is not None:
            for loader in ranks:
                loader.load_state_dict(state)
        iterators = [iter(loader) for loader in ranks]
        for _ in range(data.draw(st.integers(0, 12))):
            parts = [rows(batch) for batch in (next(it, None) for it in iterators) if batch is not None]
            if not parts:
                iterators = [iter(loader) for loader in ranks]
                continue
            delivered.append(dealt(parts))
        state = pickle.loads(pickle.dumps(ranks[data.draw(st.integers(0, world - 1))].state_dict()))
        assert len(pickle.dumps(state)) < 1024
        if len(delivered) >= len(expected):
            break
    assert delivered[: len(expected)] == expected[: len(delivered)]
    assert expected or tail == "drop"


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"persistent_workers": False}, {}, {"multiprocessing_context": "spawn"}])
def test_workers_change_nothing_and_read_ahead_counts_for_nothing(options):
    expected = uninterrupted(23, 4, 2, seed=5)
    loader = DataLoader(Augmented(23), 4, True, seed=5, num_workers=2, **{"persistent_workers": True, **options})
    assert [rows(batch) for batch in loader] == expected[0]
    batches = iter(loader)
    first = [rows(next(batches)) for _ in range(2)]
    later = DataLoader(Augmented(23), 4, True, seed=5, num_workers=1)
    later.load_state_dict(loader.state_dict())
    assert first + [rows(batch) for batch in later] == expected[1]
    assert first + [rows(batch) for batch in batches] == expected[1]


def test_the_callers_generators_stay_where_they_are():
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    for batch in DataLoader(Augmented(10), 3, True, collate_fn=lambda examples: [*examples, torch.rand(1)]):
        assert len(batch) >= 2
    assert random.getstate() == states[0]
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), states[1], strict=True))
    assert torch.equal(torch.get_rng_state(), states[2])


def test_random_numbers_of_collate_are_keyed_by_batch():
    def collate(examples):
        return torch.rand(3).tolist()

    loader = DataLoader(Augmented(10), 3, True, collate_fn=collate, seed=2)
    batches = iter(loader)
    whole = [next(batches) for _ in range(4)]
    assert len({tuple(numbers) for numbers in whole}) == 4
    again = DataLoader(Augmented(10), 3, True, collate_fn=collate, seed=2)
    first = iter(again)
    next(first)
    later = DataLoader(Augmented(10), 3, True, collate_fn=collate, seed=2)
    later.load_state_dict(again.state_dict())
    assert list(later) == whole[1:]


@pytest.mark.parametrize("after_the_end", [False, True])
def test_a_state_at_the_end_of_an_epoch_is_the_start_of_the_next(after_the_end):
    loader = DataLoader(Augmented(8), 4, True)
    batches = iter(loader)
    next(batches), next(batches)
    if after_the_end:
        assert next(batches, None) is None
    assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (1, 0)


def test_a_billion_items_resume_at_once():
    class Huge:
        def __len__(self):
            return 1_000_000_000

        def __getitem__(self, item):
            return item

    loader = DataLoader(Huge(), 256, True)
    state = {**loader.state_dict(), "position": 999_999_744 - 256}
    loader.load_state_dict(state)
    start = time.process_time()
    batch = next(iter(loader))
    assert batch.unique().numel() == 256
    assert time.process_time() - start < 0.05 * 20  # the bar is 50 ms; a table of a billion items would take minutes


def test_another_global_batch_is_an_error_unless_it_is_asked_for():
    loader = DataLoader(Augmented(20), 4, True)
    batches = iter(loader)
    taken = rows(next(batches))
    other = DataLoader(Augmented(20), 5, True)
    with pytest.raises(InputError, match=r"global_batch 4, the loader 5.*allow_batch_change"):
        other.load_state_dict(loader.state_dict())
    other.load_state_dict(loader.state_dict(), allow_batch_change=True)
    rest = [row for batch in other for row in rows(batch)]
    assert sorted(row[0] for row in taken + rest) == list(range(20))


def test_a_padded_tail_repeats_items_with_new_random_numbers():
    loader = DataLoader(Augmented(3), 4, True, tail="pad")
    (batch,) = [rows(batch) for batch in loader]
    assert batch[0][0] == batch[3][0]
    assert batch[0][1] != batch[3][1]


def test_a_users_sampler_is_followed_and_resumed():
    def make(workers=0):
        weights = torch.utils.data.WeightedRandomSampler(torch.rand(30), 30)
        torch.manual_seed(4)
        return DataLoader(Augmented(30), 4, sampler=weights, seed=3, num_workers=workers)

    torch.manual_seed(0)
    loader = make()
    torch.manual_seed(0)
    later = make(2)
    batches = iter(loader)
    first = [rows(next(batches)) for _ in range(3)]
    later.load_state_dict(loader.state_dict())
    rest = [rows(batch) for batch in batches]
    assert [rows(batch) for batch in later] == rest
    repeated = [row for batch in first + rest for row in batch]
    assert len({row[0] for row in repeated}) < 30  # with replacement: some came twice,
    assert len(set(repeated)) == 30  # and were augmented anew each time


def test_a_samplers_own_generator_is_put_back():
    def make(seed):
        generator = torch.Generator().manual_seed(seed)
        return DataLoader(Augmented(12), sampler=RandomSampler(range(12), generator=generator), batch_size=3)

    loader = make(7)
    list(loader)  # an epoch, so that the generator is under way
    batches = iter(loader)
    next(batches)
    later = make(1)
    later.load_state_dict(loader.state_dict())
    assert [rows(batch) for batch in later] == [rows(batch) for batch in batches]


def test_a_set_epoch_sampler_is_put_back_into_its_epoch():
    def make():
        return torch.utils.data.distributed.DistributedSampler(range(16), num_replicas=2, rank=1, seed=3)

    sampler = make()
    loader = DataLoader(Augmented(16), 2, sampler=sampler)
    sampler.set_epoch(5)
    batches = iter(loader)
    next(batches)
    later = DataLoader(Augmented(16), 2, sampler=make())
    later.load_state_dict(loader.state_dict())
    assert [rows(b) for b in later] == [rows(b) for b in batches]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("taken", [0, 1, 4])
def test_a_stream_that_knows_where_it_is_goes_on_from_there(workers, taken):
    whole = [batch.tolist() for batch in DataLoader(Counted(29), 3, num_workers=workers)]
    loader = DataLoader(Counted(29), 3, num_workers=workers)
    batches = iter(loader)
    first = [next(batches).tolist() for _ in range(taken)]
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    later = DataLoader(Counted(29), 3, num_workers=workers)
    later.load_state_dict(state)
    assert first + [batch.tolist() for batch in later] == whole
    assert sorted(number for batch in whole for number in batch) == list(range(29))
    assert [batch.tolist() for batch in later] == whole  # and the next epoch is whole


def test_a_stream_without_a_state_is_read_and_refuses_to_name_its_place():
    class Plain(IterableDataset):
        def __iter__(self):
            return iter(range(5))

    loader = DataLoader(Plain(), 2)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]
    with pytest.raises(InputError, match="Plain is an IterableDataset without state_dict"):
        loader.state_dict()


class Fails(Augmented):
    def __getitem__(self, item):
        if item == 5:
            raise ValueError("cannot decode example 5")
        return item


@pytest.mark.parametrize("workers", [0, 2])
def test_an_exception_of_the_dataset_arrives_with_its_traceback_and_the_next_batch_after_it(workers):
    loader = DataLoader(Fails(12), 4, num_workers=workers)
    batches = iter(loader)
    assert next(batches).tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="cannot decode example 5"):
        next(batches)
    assert next(batches).tolist() == [8, 9, 10, 11]
    assert loader.state_dict()["epoch"] == 1


class Dated(Augmented):
    def __getitem__(self, item):
        return torch.utils.data.get_worker_info().dataset.tag


def tagged(_worker):
    torch.utils.data.get_worker_info().dataset.tag = 42


def test_a_worker_init_function_sees_the_users_own_dataset():
    batches = list(DataLoader(Dated(4), 2, num_workers=1, worker_init_fn=tagged))
    assert [batch.tolist() for batch in batches] == [[42, 42], [42, 42]]


def test_it_is_a_dataloader_with_torchs_arguments_in_torchs_order():
    loader = DataLoader(TensorDataset(torch.arange(10)), 4, False, None, None, 0, None, False, True)
    assert isinstance(loader, torch.utils.data.DataLoader)
    assert [batch[0].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(loader) == 2
    assert loader.dataset.tensors[0].numel() == 10
    ours, theirs = (sys.modules[m].DataLoader.__init__ for m in ("headway.data.loader.loader", "torch.utils.data"))
    names = ours.__code__.co_varnames[: ours.__code__.co_argcount]
    assert names == theirs.__code__.co_varnames[: theirs.__code__.co_argcount]


def test_set_epoch_says_once_that_it_is_not_needed():
    loader = DataLoader(Augmented(4), 2)
    with pytest.warns(UserWarning, match="counts its epochs itself"):
        loader.set_epoch(3)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda s: None, InputError, "no state of a headway DataLoader"),
        (lambda s: {**s, "version": 9}, InputError, "version 9, this headway reads up to 1"),
        (lambda s: {**s, "dataset": "Other[20]"}, DatasetChangedError, r"over Other\[20\]"),
        (lambda s: {**s, "shuffle": False}, InputError, "shuffle False, the loader True"),
        (lambda s: {**s, "position": 999}, InputError, "position 999 lies outside a dataset of 20 items"),
        (lambda s: {k: v for k, v in s.items() if k != "position"}, InputError, "lacks position"),
        (lambda s: {**s, "kind": "stream"}, InputError, "kind 'stream', the loader 'order'"),
    ],
)
def test_a_state_that_cannot_be_continued_is_one_clear_error_and_changes_nothing(change, error, message):
    loader = DataLoader(Augmented(20), 4, True)
    before = loader.state_dict()
    with pytest.raises(error, match=message):
        loader.load_state_dict(change(before))
    assert loader.state_dict() == before


test_bad_options_are_clear_errors = refused(
    ({"server": 3}, "server is 3; pass 'auto', the path of a socket"),
    ({"rank": 2, "world_size": 2}, "rank is 2 of 2"),
    ({"world_size": 0}, "rank is 0 of 0"),
    ({"tail": "lost"}, "lost"),
    ({"seed": -1}, "seed is -1"),
    ({"workers": "fibers"}, "unknown kind of workers 'fibers'"),
    ({"server": "auto", "sampler": [1]}, "the server owns the order"),
    ({"server": "auto", "batch_sampler": [[1]], "batch_size": 1}, "the server owns the order"),
    ({"server": "auto", "cache_bytes": 10}, r"DataServer\(cache_bytes=...\)"),
    by=lambda options: DataLoader(Augmented(4), **{"batch_size": 2, **options}),
)


def test_what_it_loads_with_is_visible():
    seen = []
    for options in ({}, {"num_workers": 1}, {"num_workers": 1, "workers": "threads"}):
        loader = DataLoader(range(4), 2, **options)
        seen.append((loader.workers_used, [batch.tolist() for batch in loader], loader.workers_used))

    assert seen == [("none", [[0, 1], [2, 3]], used) for used in ("none", "processes", "threads")]
