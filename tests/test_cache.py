"""The example cache as a remedy: equal batches, each example read once, copies handed out; else left alone."""

from __future__ import annotations

import mmap

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from headway.data.runtime.cache import cache
from headway.data.runtime.examples import encode
from headway.runtime.remedy import Applied, Refused
from tests.remedy_context import applied

READS = mmap.mmap(-1, 4096)
"""How often each example was read, shared with forked workers."""


class Counted(Dataset):
    """Pure as far as anybody can see; the reads are counted outside."""

    def __init__(self, size=30):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        READS[index] += 1
        return {"x": torch.full((3,), float(index)), "y": index}


class CountedMany(Counted):
    """Reads many at once."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Noisy(Counted):
    def __getitem__(self, index):
        return torch.rand(1)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(5))


def read(loader, num_epochs=3):
    """Return all batches as plain lists; every batch is spoilt after reading, as training might."""
    READS[:] = bytes(4096)
    seen = []
    for _ in range(num_epochs):
        for batch in loader:
            seen.append((batch["x"].tolist(), batch["y"].tolist()))
            batch["x"].zero_()
    return seen


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("dataset", [Counted, CountedMany])
def test_batches_are_equal_and_each_example_is_read_once(dataset, num_workers):
    def make():
        torch.manual_seed(1)
        return DataLoader(dataset(), 4, shuffle=True, num_workers=num_workers)

    plain = read(make())
    with applied(cache, {"bytes": 1 << 20}) as context:
        cached = read(make())

    probed = 5  # the probe reads the first and the last example twice, and one more to size the arena
    assert cached == plain
    assert sum(READS[:30]) == 30 + probed
    assert isinstance(context.outcomes[-1], Applied)


def test_the_budget_holds_and_the_rest_is_read_as_before():
    size = len(encode(Counted()[3]))
    with applied(cache, {"bytes": 10 * size}):
        cached = read(DataLoader(Counted(), 4), num_epochs=2)

    assert cached == read(DataLoader(Counted(), 4), num_epochs=2)
    with applied(cache, {"bytes": 10 * size}):
        read(DataLoader(Counted(), 4), num_epochs=2)
    assert 50 <= sum(READS[:30]) - 5 <= 52  # 60 reads less the ten that fit, give or take the sizes of small numbers


def test_the_users_objects_stay_what_they_are():
    dataset = Counted()
    loader = DataLoader(dataset, 4)
    with applied(cache, {"bytes": 1 << 20}):
        read(loader)

        assert loader.dataset is dataset
        assert vars(dataset) == {"size": 30}


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        (Noisy(), "draws random numbers"),
        (Stream(), "not map-style"),
        ([{"x": torch.zeros(1), "y": 0}], "in memory as it is"),
        (Counted(0), "empty"),
    ],
    ids=["noisy", "stream", "list", "empty"],
)
def test_what_cannot_be_kept_is_left_alone_with_a_reason(dataset, reason):
    with applied(cache, {"bytes": 1 << 20}) as context:
        list(DataLoader(dataset, 2))

    assert isinstance(context.outcomes[-1], Refused)
    assert reason in context.outcomes[-1].reason


def test_two_datasets_share_one_budget():
    with applied(cache, {"bytes": 40 * len(encode(Counted()[3]))}) as context:
        read(DataLoader(Counted(30), 4), 1)
        read(DataLoader(Counted(30), 4), 1)
        read(DataLoader(Counted(30), 4), 1)

    decisions = context.outcomes[-1].facts["loaders"]
    assert ["reason_not_applied" in decision for decision in decisions] == [False, False, True]


def test_no_budget_is_refused():
    with applied(cache, {"bytes": 0}) as context:
        pass

    assert context.undos == []
