"""Long jobs and forks: passes leave no descriptor, thread or process behind, and a fork takes nothing along."""

import contextlib
import contextvars
import gc

import numpy as np
import psutil
import pytest
import torch

from headway.core.errors import InputError
from headway.data import DataLoader, Fleet, Pipeline
from headway.data.bytes.torch_keyed import Draws, generators_kept
from headway.data.fleet.splits import FleetPass
from headway.data.fleet.torch_fleet import prepared
from headway.data.partitioned.partitioned import Partitioned
from headway.data.partitioned.peers import listen
from tests.datasets import Sized
from tests.launching import wait_for
from tests.served_made import runtime as runtime
from tests.spawn import in_fork

NUM, BATCH = 40, 4


class Numbers(Sized):
    size = NUM

    def __getitem__(self, item):
        return torch.full((3,), item)


class Rows:
    """A source of arrays."""

    def __len__(self):
        return NUM

    def read(self, index):
        return np.full(3, index)

    def meta(self, index):
        return {}

    def fingerprint(self):
        return "rows"


PROCESSES = {"num_workers": 2, "timeout": 20}
THREADS = {"num_workers": 2, "workers": "threads"}
OPTIONS = {
    "none": {}, "processes": PROCESSES, "kept processes": {**PROCESSES, "persistent_workers": True}, "threads": THREADS,
    "kept threads": {**THREADS, "persistent_workers": True}, "cache": {**THREADS, "cache_bytes": 1 << 20},
    "server": {"server": "auto", "timeout": 20},
}  # fmt: skip
KINDS = [*OPTIONS, "pipeline", "partitioned", "fleet"]


@contextlib.contextmanager
def made(kind):
    """A list of a loader of that kind, which the caller may empty."""
    with contextlib.ExitStack() as stack:
        if kind == "fleet":
            yield [stack.enter_context(Fleet(Numbers(), num_workers=1)).batches(BATCH)]
        elif kind == "pipeline":
            yield [Pipeline(Rows()).batch(BATCH).loader(**THREADS)]
        elif kind == "partitioned":
            port = listen("127.0.0.1", 0, "secret")
            hosts = {"here": f"127.0.0.1:{port.port}"}
            cached = Partitioned(Rows(), hosts=hosts, host="here", capacity_bytes=10**5, token="secret", listener=port)
            yield [Pipeline(stack.enter_context(cached)).batch(BATCH).loader(**THREADS)]
        else:
            yield [DataLoader(Numbers(), BATCH, **OPTIONS[kind])]


def ids(batches):
    tensors = [batch["data"] if isinstance(batch, dict) else batch for batch in batches]
    return torch.cat(tensors)[:, 0].tolist()


def held():
    """Return the descriptors, threads and children of this process, with no garbage among them."""
    gc.collect()
    process = psutil.Process()
    return process.num_fds(), process.num_threads(), len(process.children(recursive=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_further_passes_whole_and_broken_off_leave_nothing_behind(kind):
    def passes(loader):
        next(iter(loader))
        assert ids(loader) == list(range(NUM))

    with made(kind) as loaders:
        passes(*loaders)
        before = held()
        for _ in range(2):
            passes(*loaders)

        # A reader that was broken off ends on its own time.
        wait_for(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))


def test_batches_of_a_worker_keep_none_of_the_random_numbers_of_those_before():
    def alive():
        return sum(type(one) is Draws for one in gc.get_objects())

    _, make = prepared(Numbers())
    work = FleetPass(NUM, BATCH)

    def growth():
        make(work.keys(0, 0))
        before = alive()
        for batch in range(1, NUM // BATCH):
            make(work.keys(batch, 0))
        return alive() - before

    with generators_kept():  # as a process of its own has them, which this one is not
        assert contextvars.copy_context().run(growth) == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_fork_that_drops_a_loader_or_reads_it_anew_takes_nothing_from_the_loop_it_left(kind):
    with made(kind) as kept:
        kept.append(iter(kept[0]))
        got = [next(kept[1])]

        def drops():
            kept.clear()
            gc.collect()

        def goes_on():
            with pytest.raises(InputError, match=r"fork.*Call iter\(\) again"):
                next(kept[1])

        def reads_anew():
            assert ids(kept[0]) == list(range(NUM))

        assert in_fork(drops) == 0
        assert kind == "none" or in_fork(goes_on) == 0
        assert in_fork(reads_anew) == 0
        assert ids([*got, *kept[1]]) == list(range(NUM))
        assert ids(kept[0]) == list(range(NUM))


def test_a_fork_that_leaves_the_block_of_a_fleet_does_not_end_it():
    with Fleet(Numbers(), num_workers=1) as fleet:
        assert in_fork(fleet.close) == 0

        assert ids(fleet.batches(BATCH)) == list(range(NUM))
