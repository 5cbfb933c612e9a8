"""The loader's static cache: exact hits, shared by all workers, copies handed out, and every way to refuse."""

import mmap
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from headway.core.errors import InputError
from headway.data import DataLoader
from headway.data.bytes import account
from headway.data.cached.apply import CachedDataset
from headway.data.cached.cached_examples import data_bytes
from headway.data.guard.picture import BatchEntries
from tests.datasets import Sized

READS = mmap.mmap(-1, 4096)
"""How often each example was read, shared with forked workers."""

SIZE = 4000
MODES = [
    {}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}, {"num_workers": 2, "workers": "threads"},
    {"num_workers": 3, "workers": "threads", "persistent_workers": True},
]  # fmt: skip


class Counted(Sized):
    """Examples of `SIZE` bytes and a label; the reads are counted outside."""

    size = 40

    def __getitem__(self, item):
        READS[item] = (READS[item] + 1) % 256
        return torch.full((SIZE // 8,), item), item


class Noisy(Counted):
    def __getitem__(self, item):
        return torch.rand(3)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


def epoch(loader):
    """Read one epoch; return its items, and how many readings reached the dataset. Batches are spoilt afterwards."""
    READS[:] = bytes(4096)
    items = []
    for data, labels in loader:
        assert torch.equal(data, labels[:, None].expand_as(data))
        items += labels.tolist()
        data.zero_()
    return items, sum(READS[:])


@pytest.mark.slow
@settings(max_examples=12)
@given(n=st.integers(1, 60), kept=st.integers(0, 70), slack=st.integers(0, SIZE - 1), seed=st.integers(0, 9))
def test_each_later_epoch_hits_exactly_what_fits(n, kept, slack, seed):
    loader = DataLoader(Counted(n), 7, True, seed=seed, cache_bytes=max(kept * SIZE + slack, 1))
    expected = DataLoader(Counted(n), 7, True, seed=seed)
    fits = min(kept, n)

    epoch(loader), epoch(expected)
    filled = loader.cache.hits
    for later in (1, 2):
        compared = loader.cache.compared
        items, reads = epoch(loader)
        assert (items, reads) == (epoch(expected)[0], n - fits + loader.cache.compared - compared)
        assert loader.cache.hits - filled == later * fits
    assert (loader.cache.bytes, loader.cache.hits + loader.cache.misses) == (fits * SIZE, 3 * n)
    assert loader.cache.refused == 3 * (n - fits)


class Rows(Sized):
    """Rows of an array, and their labels, which read like an index of it."""

    size = 12

    def __init__(self):
        self.rows, self.labels = np.arange(12 * 2**14, dtype=float).reshape(12, -1), torch.arange(12).flip(0)

    def __getitem__(self, index):
        return self.rows[index].copy(), int(self.labels[index])


@given(st.lists(st.integers(0, 11), min_size=1, max_size=8))
def test_entries_of_a_batch_are_those_of_its_examples(indices):
    aligned = BatchEntries(Rows())

    assert len(aligned.large) == 1
    assert aligned.each(indices) == [aligned.of([index]) for index in indices]


def test_a_batch_is_looked_at_once_and_an_edited_row_is_read_anew(monkeypatch):
    looks, is_of_now = [], CachedDataset.is_of_now
    monkeypatch.setattr(CachedDataset, "is_of_now", lambda *args: looks.append(1) or is_of_now(*args))
    dataset = Rows()
    loader = DataLoader(dataset, 4, cache_bytes=10**7)
    passes = [list(loader) for _ in range(2)]
    dataset.rows[5] += 1
    assert len(looks) == 6
    passes.append(list(loader))

    for read, rows in zip(passes, (0, 0, 1), strict=True):
        expected = Rows().rows
        expected[5] += rows
        assert torch.equal(torch.cat([batch[0] for batch in read]), torch.from_numpy(expected))


@pytest.mark.slow
@pytest.mark.parametrize("options", MODES, ids=str)
@pytest.mark.parametrize("fraction", [0.2, 0.35, 0.65])
def test_workers_share_what_is_kept_over_epochs(options, fraction):
    loader = DataLoader(Counted(40), 4, True, cache_bytes=int(fraction * 40 * SIZE), **options)
    plain, fits = DataLoader(Counted(40), 4, True), int(fraction * 40)

    seen, compared = [], [0]
    for _ in range(3):
        seen.append(epoch(loader))
        compared.append(loader.cache.compared)

    assert [items for items, _ in seen] == [epoch(plain)[0] for _ in range(3)]
    # Of two workers that count a comparison at once one may lose it (`Scrutiny`).
    lost = 2 if loader.num_workers and loader.workers_used == "processes" else 0
    for k in (1, 2):
        assert 0 <= seen[k][1] - (40 - fits + compared[k + 1] - compared[k]) <= lost
    assert loader.cache.hits == 2 * fits


@pytest.mark.slow
def test_choosing_between_threads_and_processes_leaves_the_cache_alone():
    loader = DataLoader(Counted(), 4, cache_bytes=10 * SIZE, num_workers=2, workers="auto")

    list(loader), list(loader)

    assert (loader.cache.hits, loader.cache.misses, loader.cache.bytes) == (10, 70, 10 * SIZE)


def test_the_state_is_what_it_is_without_a_cache():
    loaders = [DataLoader(Counted(), 4, True, cache_bytes=number) for number in (0, 10 * SIZE)]
    batches = [iter(loader) for loader in loaders]
    for one in batches:
        next(one)

    assert loaders[0].state_dict() == loaders[1].state_dict()
    assert loaders[0].cache is None


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (Noisy(), {}, r"Noisy.__getitem__ \(test_loader_cache.py:\d+\): reading example 0 draws random numbers"),
        (Noisy(), {"num_workers": 1}, "reading example 0 draws random numbers"),
        (Counted(), {"num_workers": 1, "multiprocessing_context": "spawn"}, "start by spawn, and would not share"),
        (Stream(), {}, "a stream's examples have no index"),
        (Counted(), {"cache_bytes": -1}, "a cache holds 0 or more"),
    ],
    ids=["noisy", "noisy in workers", "spawn", "stream", "negative"],
)
def test_what_cannot_be_kept_is_refused_with_its_reason(dataset, options, message):
    with pytest.raises(InputError, match=message):
        iter(DataLoader(dataset, 2, **{"cache_bytes": 1000, **options}))


def test_a_host_without_the_memory_says_so():
    class Vast(Counted):
        def __len__(self):
            return 1 << 40

        def __getitem__(self, item):
            return torch.zeros(1000)

    with pytest.raises(InputError, match=r"this host has \d+ bytes of memory left"):
        iter(DataLoader(Vast(), 2, cache_bytes=1 << 60))


def test_an_empty_dataset_has_nothing_to_keep():
    assert list(DataLoader(Counted(0), 2, cache_bytes=1000)) == []


def test_an_example_that_cannot_be_encoded_is_read_anew():
    class Odd(Counted):
        def __getitem__(self, item):
            READS[item] = (READS[item] + 1) % 256
            return threading.Lock() if item == 3 else bytes(SIZE)

    loader = DataLoader(Odd(6), None, cache_bytes=6 * SIZE)
    list(loader)
    READS[:] = bytes(4096)
    list(loader)

    assert READS[3] == 1
    assert sum(READS[:6]) == 1 + loader.cache.compared
    assert loader.cache.bytes == 5 * SIZE


@pytest.mark.parametrize("taken", [1, 40])
def test_the_recorder_hears_of_every_reading_once(taken, monkeypatch):
    told = []
    monkeypatch.setattr(account, "counted", lambda name, **numbers: told.append((name, numbers)))
    loader = DataLoader(Counted(), 4, cache_bytes=10 * SIZE)

    list(loader), list(loader)

    assert {name for name, _ in told} == {"cache.loader"}
    sums = {key: sum(numbers[key] for _, numbers in told) for key in told[0][1]}
    assert sums == {"hits": 10, "misses": 70, "bytes": 10 * SIZE, "refused": 60}


def test_data_is_counted_and_framing_is_not():
    nested = {"image": torch.zeros(10), "meta": (np.zeros(3, np.int16), ["cat", b"raw", 7, None])}

    assert data_bytes(nested) == 40 + 6 + 3 + 3
