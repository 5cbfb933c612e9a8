"""A partitioned cache over the ranks of a real gloo job, below the loader and its forked workers."""

import pytest
import torch.distributed as dist

from headway.core.errors import InputError
from headway.data.bytes.source import SyntheticJpeg
from headway.data.loader.loader import DataLoader
from headway.data.orders.job_order import DataShareError
from headway.data.partitioned import apply as partitioned
from headway.data.partitioned.apply import over_ranks, own_address
from tests.spawn import on_ranks

NUM_IMAGES, EPOCHS = 26, 3


class Read:
    """A dataset of (index, bytes) over a source."""

    def __init__(self, source):
        self.source = source

    def __len__(self):
        return len(self.source)

    def __getitem__(self, index):
        return index, self.source.read(index)


def as_they_are(examples):
    return examples


def train(num_workers):
    """Read all epochs on one rank; returns the items of each, and what was read from where."""
    images = SyntheticJpeg(NUM_IMAGES, 32, 24)
    with over_ranks(images, capacity_bytes=10**6) as cached:
        # Forked, whatever the pool's own start method is: others take seconds to begin.
        context = "fork" if num_workers else None
        loader = DataLoader(
            Read(cached), 2, shuffle=True, num_workers=num_workers, collate_fn=as_they_are,
            multiprocessing_context=context,
        )  # fmt: skip
        items, storage = [], []
        for _ in range(EPOCHS):
            before = cached.statistics().storage_bytes
            batches = [example for batch in loader for example in batch]
            assert all(payload == images.read(index) for index, payload in batches)
            items.append([index for index, _ in batches])
            dist.barrier()
            storage.append(cached.statistics().storage_bytes - before)
        found = cached.statistics()
        dist.barrier()
    return items, storage, found.peer_hits + found.copies, found.peer_losses


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_ranks_read_each_byte_from_storage_once_per_job(num_workers):
    ranks = on_ranks(train, 2, num_workers)
    images = SyntheticJpeg(NUM_IMAGES, 32, 24)
    total = sum(len(images.read(index)) for index in range(NUM_IMAGES))

    for epoch in range(EPOCHS):
        assert sorted(item for rank in ranks for item in rank[0][epoch]) == list(range(NUM_IMAGES))
    assert [sum(rank[1][epoch] for rank in ranks) for epoch in range(EPOCHS)] == [total, 0, 0]
    assert all(rank[2] > 0 and rank[3] == 0 for rank in ranks)


def mismatched():
    """Share other data on each rank; returns what that says."""
    try:
        over_ranks(SyntheticJpeg(4 + dist.get_rank(), 32, 24), capacity_bytes=1000, wait_s=20.0)
    except DataShareError as error:
        return str(error)
    return ""


def test_ranks_with_different_data_are_told_so():
    for message in on_ranks(mismatched, 2):
        assert "4x32x24" in message
        assert "5x32x24" in message


def test_without_a_process_group_it_says_what_to_call():
    with pytest.raises(InputError, match="Call init_process_group first"):
        over_ranks(SyntheticJpeg(2, 8, 8), capacity_bytes=100)


def test_the_own_address_is_the_one_towards_the_master():
    assert own_address("127.0.0.1") == "127.0.0.1"
    with pytest.raises(InputError, match="Pass address="):
        own_address("no such host.invalid")


@pytest.mark.parametrize(
    ("addresses", "wrong"),
    [
        (["127.0.1.1", "10.0.0.2"], "rank 0 has the address 127.0.1.1"),
        (["10.0.0.1", "::1"], "rank 1"),
        (["localhost", "trainer-2"], "rank 0"),
    ],
)
def test_an_address_that_only_its_own_machine_reaches_is_refused(addresses, wrong):
    with pytest.raises(InputError, match=wrong):
        partitioned._check_reachable(addresses)
    partitioned._check_reachable(["127.0.0.1", "127.0.0.1"])
    partitioned._check_reachable(["10.0.0.1", "trainer-2"])
