"""Loader workers as a remedy: same batches, same order, same random numbers after; else left alone with a reason."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, TensorDataset

from headway.data.runtime.workers import untunable, workers
from headway.runtime.remedy import Applied, Refused
from tests.remedy_context import applied

PARAMETERS = {"num_workers": 2, "prefetch_factor": 2, "persistent_workers": True}


class Squares(Dataset):
    """A pure dataset."""

    def __init__(self, size=37):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.tensor([index, index**2])


class Noisy(Squares):
    def __getitem__(self, index):
        return torch.rand(2)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(5))


class OwnSampler(Sampler):
    def __iter__(self):
        return iter(range(4))

    def __len__(self):
        return 4


class OwnLoader(DataLoader):
    """A subclass with a constructor of its own."""

    def __init__(self, size):
        super().__init__(Squares(size), batch_size=4, shuffle=True, drop_last=True)


def epochs(make, num_epochs=3, stop_after=None):
    """Read a loader for some epochs; return its batches and a random number drawn after each epoch."""
    torch.manual_seed(5)
    loader = make()
    seen = []
    for _ in range(num_epochs):
        for number, batch in enumerate(loader):
            seen.append(batch.tolist())
            if number == stop_after:
                break
        seen.append(torch.rand(1).item())
    return seen, loader


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Squares(), 5, shuffle=True),
        lambda: DataLoader(Squares(), 5),
        lambda: DataLoader(Squares(), 5, sampler=RandomSampler(Squares(), replacement=True, num_samples=20)),
        lambda: DataLoader(Squares(), 5, shuffle=True, generator=torch.Generator().manual_seed(3)),
        lambda: OwnLoader(21),
        lambda: DataLoader(Squares(), 5, shuffle=True, num_workers=1),
        lambda: DataLoader(Squares(), 5, shuffle=True, num_workers=1, persistent_workers=True),
    ],
    ids=["shuffled", "in order", "own count", "own generator", "subclass", "one worker", "one kept worker"],
)
def test_batches_and_later_random_numbers_are_the_same(make):
    plain, _ = epochs(make)

    with applied(workers, PARAMETERS) as context:
        tuned, loader = epochs(make)
        loader._iterator = None

    assert tuned == plain
    assert loader.num_workers == 2
    assert isinstance(context.outcomes[-1], Applied)


def test_an_epoch_that_ends_early_does_not_shift_the_next():
    def make():
        return DataLoader(Squares(), 5, shuffle=True)

    plain, _ = epochs(make, stop_after=2)

    with applied(workers, PARAMETERS):
        tuned, loader = epochs(make, stop_after=2)
        loader._iterator = None

    assert tuned == plain


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (DataLoader(Stream()), "every worker would yield all of it"),
        (DataLoader(Squares(), sampler=OwnSampler()), "read it ahead"),
        (DataLoader(Squares(), worker_init_fn=print), "worker_init_fn has never run"),
        (DataLoader(Noisy()), "draws random numbers"),
        (DataLoader(Squares(0)), "empty"),
    ],
    ids=["stream", "own sampler", "worker_init_fn", "noisy", "empty"],
)
def test_a_loader_that_workers_could_change_is_left_alone(loader, reason):
    assert reason in untunable(loader)

    with applied(workers, PARAMETERS) as context:
        list(loader)

    assert loader.num_workers == 0
    assert isinstance(context.outcomes[-1], Refused)
    assert reason in context.outcomes[-1].reason


def test_never_more_workers_than_batches():
    with applied(workers, {**PARAMETERS, "num_workers": 8, "persistent_workers": False}):
        loader = DataLoader(TensorDataset(torch.arange(6.0)), 3)
        list(loader)

    assert loader.num_workers == 2


def test_undone_means_undone():
    before = DataLoader.__iter__
    with applied(workers, PARAMETERS):
        assert DataLoader.__iter__ is not before

    assert DataLoader.__iter__ is before
