"""Which sampler decides an order is found wherever it hides; remedies read ahead only what nothing can change."""

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from headway.data import DataLoader as OwnLoader
from headway.data.loader.read_ahead import CHANGED
from headway.data.service.apply import followed
from headway.data.service.stock import DataServer
from headway.data.workers.apply import untunable, workers
from headway.data.workers.torch_threads import threads
from headway.runtime.calls.probe_input import loader_facts
from headway.runtime.script.draws import order_generators, sampler_of
from tests.loaders_made import ByTurns, Ratio, Squares, epochs, unthreadable
from tests.remedy_context import applied

REMEDIES = {
    "threads": (threads, {"num_workers": 3, "prefetch_factor": 2}),
    "workers": (workers, {"num_workers": 2, "prefetch_factor": 2}),
}


@pytest.fixture(autouse=True)
def _threads_that_do_not_wait(monkeypatch):
    monkeypatch.setattr("headway.data.workers.torch_threads.lock_wait_fraction", lambda work, keys: 0.0)


class OwnBatches(BatchSampler):
    """A batch sampler of the script's own class, over one of torch's."""


def around(sampler, times=1):
    for _ in range(times):
        sampler = BatchSampler(sampler, 5, False)
    return sampler


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_the_sampler_inside_batch_samplers_is_the_one_that_decides(depth):
    sampler = ByTurns()
    loader = DataLoader(Squares(), batch_sampler=around(sampler, depth))

    assert type(loader.sampler) is SequentialSampler
    assert sampler_of(loader) is sampler
    assert loader_facts(loader)["sampler"] == "ByTurns"


def test_a_batch_sampler_of_another_class_decides_itself():
    batches = OwnBatches(RandomSampler(Squares()), 5, False)

    assert sampler_of(DataLoader(Squares(), batch_sampler=batches)) is batches
    assert isinstance(sampler_of(DataLoader(Squares(), 5, shuffle=True)), RandomSampler)
    assert isinstance(sampler_of(DataLoader(Squares(), None)), SequentialSampler)


def test_generators_are_found_in_loader_batch_sampler_and_samplers_inside():
    one, two = torch.Generator(), torch.Generator()
    inside = RandomSampler(Squares(), generator=one)
    batches = OwnBatches(inside, 5, False)
    batches.rng = two

    found = order_generators(DataLoader(Squares(), batch_sampler=batches, generator=one))
    assert sorted(map(id, found)) == sorted(map(id, (one, two)))


@pytest.mark.parametrize(
    ("sampler", "reason"),
    [
        (around(ByTurns()), r"its own class \(ByTurns\)"),
        (around(ByTurns(), 2), r"its own class \(ByTurns\)"),
        (OwnBatches(RandomSampler(range(37)), 5, False), r"its own class \(OwnBatches\)"),
        (around(RandomSampler(range(37), replacement=True, generator=torch.Generator())), "all along"),
        (around(SubsetRandomSampler([1, 2, 3])), "give it a tuple"),
    ],
    ids=["own", "nested", "own batches", "draws all along", "list of indices"],
)
def test_no_remedy_reads_ahead_what_the_loop_may_steer(sampler, reason):
    loader = DataLoader(Squares(), batch_sampler=sampler)

    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(unthreadable(loader))
    assert untunable(loader) == unthreadable(loader) == followed(loader, DataServer())


MADE = {
    "inside": lambda: DataLoader(Squares(), batch_sampler=around(RandomSampler(range(37)))),
    "own generator inside": lambda: DataLoader(
        Squares(), batch_sampler=around(RandomSampler(range(37), generator=torch.Generator().manual_seed(3)))
    ),
    "weighted": lambda: DataLoader(Squares(), 5, sampler=WeightedRandomSampler(torch.ones(37), 30)),
    "subset": lambda: DataLoader(Squares(), 5, sampler=SubsetRandomSampler(tuple(range(30)))),
}


@pytest.mark.slow
@pytest.mark.parametrize("remedy", REMEDIES)
@pytest.mark.parametrize("name", MADE)
def test_samplers_of_torch_give_the_same_batches_read_ahead(name, remedy):
    expected, _ = epochs(MADE[name], stop_after=4)

    with applied(*REMEDIES[remedy]) as context:
        assert epochs(MADE[name], stop_after=4)[0] == expected
    assert context.outcomes[-1].json()["reason_not_applied"] is None


def steered(change):
    """Read an epoch whose script changes its sampler after `iter` and again after each batch; return the batches."""
    torch.manual_seed(3)
    generator = torch.Generator().manual_seed(4)
    sampler = WeightedRandomSampler(torch.ones(37, dtype=torch.double), 30, generator=generator)
    iterator, seen = iter(DataLoader(Squares(), 5, sampler=sampler)), []
    for _ in range(4):
        change(sampler, generator)
        seen.append(next(iterator).tolist())
    return seen, torch.rand(1).item(), torch.rand(1, generator=generator).item()


@pytest.mark.slow
@pytest.mark.parametrize("remedy", REMEDIES)
@pytest.mark.parametrize(
    "change",
    [
        lambda sampler, generator: sampler.weights[:20].zero_(),
        lambda sampler, generator: sampler.weights.numpy().__setitem__(slice(20), 0.0),
        lambda sampler, generator: setattr(sampler, "num_samples", 25),
        lambda sampler, generator: torch.rand(1, generator=generator),
    ],
    ids=["weights", "weights behind torch's back", "size", "draws"],
)
def test_a_sampler_is_read_when_torch_would_read_it(change, remedy):
    expected = steered(change)

    with applied(*REMEDIES[remedy]):
        assert steered(change) == expected


class Shard(Sampler):
    """Passes on the batches of a batch sampler, as Accelerate's does."""

    def __init__(self, batches):
        self.batch_sampler = batches

    def __iter__(self):
        return iter(self.batch_sampler)


class Nested(Sampler):
    """Draws its order from a generator of its own, by the epoch that it is told."""

    def __init__(self):
        self.generator, self.epoch = torch.Generator().manual_seed(1), 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([(k + self.epoch) % 12 for k in torch.randperm(12, generator=self.generator).tolist()])

    def __len__(self):
        return 12


def test_headways_loader_goes_on_in_the_order_of_a_sampler_inside_batch_samplers():
    def make():
        sampler = Nested()
        return sampler, OwnLoader(Squares(), batch_sampler=Shard(around(sampler)), collate_fn=str)

    sampler, loader = make()
    list(loader)
    sampler.set_epoch(5)
    batches = iter(loader)
    next(batches)
    _, later = make()
    later.load_state_dict(loader.state_dict())

    assert list(later) == list(batches)


def steered_dataset(first):
    """Read two epochs of a dataset that the loop changes after each batch from number `first` on."""
    torch.manual_seed(3)
    dataset, seen = Ratio(), []
    dataset.ratio = 0.0
    loader = DataLoader(dataset, 5, shuffle=True, generator=torch.Generator().manual_seed(2))
    for _ in range(2):
        for number, batch in enumerate(loader):
            seen.append(batch.tolist())
            dataset.ratio += number >= first
    return seen, torch.rand(1).item()


@pytest.mark.slow
@pytest.mark.parametrize("remedy", REMEDIES)
@pytest.mark.parametrize("first", [0, 3, 8])
def test_a_dataset_that_the_loop_changes_during_a_pass_is_read_as_it_is_now(first, remedy):
    expected = steered_dataset(first)

    with applied(*REMEDIES[remedy]) as context:
        assert steered_dataset(first) == expected
    left = {fact.get("reason_not_applied"): fact for fact in context.outcomes[-1].facts["loaders"]}
    assert (CHANGED in left) == (first < 8)
    assert CHANGED not in left or (left[CHANGED]["dataset"], left[CHANGED]["about"]) == ("Ratio", "dataset")
