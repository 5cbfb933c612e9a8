"""A data server as a remedy: each example once per epoch, for every job; only where the user allows another order."""

import pytest
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from headway.data import DataLoader as OwnLoader
from headway.data.guard.decisions import Decisions
from headway.data.service.apply import followed, server
from headway.data.service.stock import DataServer
from headway.runtime.in_rank.remedy import Applied, RefusedRemedy
from tests.loaders_made import ByTurns, Squares, Stream
from tests.remedy_context import TestContext, applied, apply

PARAMETERS = {"idle_s": 1.0}


@pytest.fixture(autouse=True)
def _runtime_folder(monkeypatch, tmp_path):
    """Servers of these tests live in a folder of their own, and end soon."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def numbers(loader, epochs):
    """Return the examples of each epoch."""
    return [[int(row[0]) for batch in loader for row in batch] for _ in range(epochs)]


def test_two_jobs_get_each_example_once_per_epoch_from_one_server():
    with applied(server, PARAMETERS, allow="result-equivalent") as context:
        first, second = (DataLoader(Squares(), 5, shuffle=True) for _ in range(2))
        both = [(a.tolist(), b.tolist()) for a, b in zip(first, second, strict=True)]
        later = numbers(first, 2)

    assert isinstance(context.outcomes[-1], Applied)
    for job in range(2):
        rows = [row for pair in both for row in pair[job]]
        assert sorted(rows) == [[k, k * k] for k in range(37)]
    assert [sorted(epoch) for epoch in later] == [list(range(37))] * 2
    assert later[0] != later[1]


def test_the_batches_of_a_server_are_compared_by_their_examples_not_by_their_order():
    with applied(server, PARAMETERS, allow="result-equivalent", verify=True) as context:
        assert sorted(numbers(DataLoader(Squares(), 5, shuffle=True), 1)[0]) == list(range(37))

    # Of 8 batches: 0 and 2.
    counts = context.outcomes[-1].json()["facts"]["verification"]
    assert counts == {"batches": 8, "compared": 2, "equal": 2, "unequal": 0}


def test_a_cache_larger_than_the_memory_of_the_host_is_refused_with_both_sizes():
    found = apply(server, {"cache_bytes": 10**25}, TestContext("result-equivalent"))

    assert isinstance(found, RefusedRemedy)
    assert found.reason.startswith("its cache_bytes of 1e+25 is more than this host's memory of ")


def test_a_loader_that_does_not_shuffle_keeps_its_order():
    with applied(server, PARAMETERS, allow="result-equivalent"):
        assert numbers(DataLoader(Squares(), 5), 1) == [list(range(37))]


def test_a_distributed_samplers_place_and_tail_are_taken_over_and_another_number_of_batches_is_not():
    padded, dropped = (
        DataLoader(Squares(), 4, sampler=DistributedSampler(Squares(), 2, 1, drop_last=drop)) for drop in (False, True)
    )
    decisions = Decisions(TestContext().shared["data.trials"])
    own = followed(padded, DataServer(), decisions)

    assert (own._place(), own._tail, own._shuffle, len(own)) == ((1, 2), "pad", True, len(padded))
    assert followed(dropped, DataServer(), decisions) == "its epoch would have 4 batches and not 5"


def test_without_the_users_leave_nothing_changes():
    context = TestContext()

    assert isinstance(apply(server, {}, context), RefusedRemedy)
    assert context.undos == []


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (DataLoader(Stream()), "IterableDataset"),
        (DataLoader(Squares(), sampler=ByTurns()), "its own class"),
        (DataLoader(Squares(), worker_init_fn=print), "worker_init_fn"),
        (DataLoader(Squares(), sampler=RandomSampler(Squares(), replacement=True)), "does not give each example once"),
        (OwnLoader(Squares()), "headway's own loader"),
    ],
    ids=["stream", "own sampler", "worker_init_fn", "replacement", "own loader"],
)
def test_a_loader_that_no_server_can_stand_for_is_left_alone(loader, reason):
    assert reason in followed(loader, DataServer())
