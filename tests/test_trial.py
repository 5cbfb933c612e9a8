"""The trial of a loader: no reading of it happens in the training process, and what children may not share is named."""

import atexit
import functools
import io
import multiprocessing
import os
import random
import socket
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

from headway.data.cached.apply import cache
from headway.data.guard.cache_trial import uncacheable
from headway.data.guard.trial import in_child, limited, unfit
from headway.data.guard.watch import listen_here, noting
from headway.data.service.apply import followed
from headway.data.service.stock import DataServer
from headway.data.workers.apply import untunable, workers
from tests.datasets import Sized
from tests.loaders_made import Reading, Squares, unthreadable
from tests.remedy_context import applied

COUNT = [0]
SHARED = np.frombuffer(multiprocessing.RawArray("q", 1), np.int64)
MOVED = tempfile.TemporaryFile()  # noqa: SIM115 - as scripts do: one file for as long as the process lives
MOVED.write(bytes(4096)), MOVED.flush()
ONE, OTHER = socket.socketpair()
GENERATOR = torch.Generator().manual_seed(1)


def counts_globally(index):
    COUNT[0] += 1
    return index


def counts_in_shared_memory(index):
    SHARED[0] += 1
    return index


def reads_a_global_file(index):
    os.lseek(MOVED.fileno(), index, os.SEEK_SET)
    return os.read(MOVED.fileno(), 3)


def asks_a_server(index):
    ONE.send(b"next")
    return index


def shards_by_worker(index):
    info = get_worker_info()
    return index if info is None else index * info.num_workers


def draws_from_a_samplers_generator(index):
    torch.rand(1, generator=GENERATOR)
    return index


def writes_a_file(index):
    with open(os.path.join(tempfile.gettempdir(), "headway-test-log"), "a") as file:
        file.write("read\n")
    return index


READINGS = {
    counts_globally: "changes a variable that workers would not share",
    counts_in_shared_memory: "writes to memory that processes share",
    reads_a_global_file: "reads from an open BufferedRandom, open before its workers start",
    asks_a_server: "reads from an open socket, open before its workers start",
    shards_by_worker: "in a worker, it reads something else",
    draws_from_a_samplers_generator: "draws random numbers",
    writes_a_file: "raised PermissionError: it opens '.*' for writing",
}


def state():
    return COUNT[0], int(SHARED[0]), os.lseek(MOVED.fileno(), 0, os.SEEK_CUR), GENERATOR.get_state().tolist()


@pytest.mark.slow
@pytest.mark.parametrize("read", READINGS, ids=lambda read: read.__name__)
def test_no_remedy_reads_a_dataset_here_and_each_reason_is_named(read):
    before = state()
    loader = DataLoader(Reading(read), 4, generator=GENERATOR)
    finding, _ = unfit(loader)
    for decide in (untunable, unthreadable, uncacheable, lambda loader: followed(loader, DataServer())):
        decide(loader)

    assert (finding is None) == (READINGS[read] is None)
    if finding is not None:
        with pytest.raises(AssertionError, match=READINGS[read]):
            raise AssertionError(finding)
    assert state() == before
    OTHER.setblocking(False)
    with pytest.raises(BlockingIOError):
        OTHER.recv(8)
    assert not os.path.exists(os.path.join(tempfile.gettempdir(), "headway-test-log"))


class Stateful(Squares):
    """Its examples depend on how often it was read."""

    count = 0

    def __getitem__(self, index):
        self.count += 1
        return index * (1 + self.count // 8)


class Keeping(Squares):
    """It keeps what it has read."""

    def __init__(self):
        super().__init__()
        self.kept = {}

    def __getitem__(self, index):
        return self.kept.setdefault(index, index * index)


class Augmented(Sized):
    """Draws from Python's generator, as random crops written by hand do."""

    size = 9

    def __getitem__(self, index):
        return torch.tensor([index, random.random()])


def test_a_dataset_that_draws_from_pythons_generator_takes_workers_with_the_grant():
    loader = DataLoader(Augmented(), 4)

    assert "draws random numbers" in unfit(loader)[0]
    assert unfit(loader, may_draw=True)[0] is None


SHARED_FILE = open(__file__, "rb")  # noqa: SIM115 - open as long as the tests run, like a script's own


for opened in (MOVED, ONE, OTHER, SHARED_FILE):
    atexit.register(opened.close)  # also where this file is collected, and another process runs its tests


class ReadsOn(Sized):
    """Its later examples read on in a file that the script holds open."""

    size = 9

    def __getitem__(self, index):
        return torch.tensor(list(SHARED_FILE.read(2)) if index > 4 else [index, index])


def test_a_dataset_that_gets_at_an_open_file_is_unfit_before_an_example_reads_it():
    finding, _ = unfit(DataLoader(ReadsOn(), 2))

    assert finding.startswith("it reads from an open BufferedReader, open before its workers start")
    assert SHARED_FILE.tell() == 0


class Pickles(Squares):
    num_pickled = 0

    def __getstate__(self):
        type(self).num_pickled += 1
        return {}


def test_not_even_its_pickling_runs_here():
    unfit(DataLoader(Pickles(), 2))

    assert Pickles.num_pickled == 0


class Normalised(Squares):
    """Its examples are sums over so many numbers that intra-op threads share them."""

    rows = torch.randn(4, 1 << 18, generator=torch.Generator().manual_seed(1))

    def __getitem__(self, index):
        return self.rows[index % 4].sum()


class Scaled(Normalised):
    def __getitem__(self, index):
        return self.rows[index % 4] * 2


def test_what_intra_op_threads_share_is_read_with_as_many_of_them_as_the_script_has():
    before, sums = torch.get_num_threads(), []
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            sums.append([Normalised()[index].item() for index in range(2)])
        with limited(10.0):
            found = [unfit(DataLoader(dataset(), 4))[0] for dataset in (Normalised, Scaled)]
    finally:
        torch.set_num_threads(before)

    assert sums[0] != sums[1]
    assert "with one intra-op thread, as workers do, gives another result" in found[0]
    assert found[1] is None


@functools.lru_cache
def remembered(index):
    return index


def with_an_attribute(rows):
    batch = torch.stack([torch.tensor([row]) for row in rows])
    batch.source = "here"
    return batch


def with_its_array(rows):
    batch = torch.stack([torch.tensor([row]) for row in rows])
    return batch, batch.numpy()


@pytest.mark.parametrize(
    ("dataset", "why"),
    [
        (Stateful(), "changes attributes"),
        (Keeping(), "keeps something of each example"),
        (Reading(remembered), "keeps something of each example"),
    ],
)
def test_a_dataset_that_counts_or_keeps_what_it_reads_is_left_as_it_was(dataset, why):
    before = repr(vars(dataset))

    assert why in unfit(DataLoader(dataset, 4))[0]
    assert repr(vars(dataset)) == before


@pytest.mark.parametrize(
    ("collate", "why"), [(with_an_attribute, "attributes of its own"), (with_its_array, "shares memory")]
)
def test_a_batch_that_its_copy_would_not_equal_is_refused(collate, why):
    assert why in unfit(DataLoader(Reading(int), 4, collate_fn=collate))[0]


def test_libraries_write_their_caches_where_they_are_thrown_away(tmp_path, monkeypatch):
    """Compilers refuse to work where they can keep nothing (numba: "no locator available")."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def writes(folder):
        path = Path(folder) / "compiled"
        path.mkdir()
        (path / "part").write_text("code")
        (path / "part").rename(path / "whole")
        return None, (path / "whole").read_text()

    found = in_child(lambda: (None, [writes(os.environ["XDG_CACHE_HOME"])[1], os.environ["XDG_CACHE_HOME"]]))
    assert found[0] is None, found
    assert found[1][0] == "code"
    assert not Path(found[1][1]).exists()
    assert "PermissionError" in in_child(lambda: writes(tmp_path))[0]
    assert list(tmp_path.iterdir()) == []


def test_a_child_that_computes_has_longer_than_one_that_hangs():
    def computes():
        end = time.monotonic() + 0.7  # wall time: a busy host gives it less to compute, and no later an end
        while time.monotonic() < end:
            pass
        return None, 7

    with limited(0.6) as limit:
        assert in_child(computes) == (None, 7)
        assert not limit.reached
        assert "hangs" in in_child(lambda: time.sleep(60))[0]


def test_a_text_in_memory_is_nothing_that_others_see():
    def reading(file):
        listen_here()
        with noting() as acts:
            print("numba annotates what it compiles", file=file)
        return None, acts

    assert in_child(lambda: reading(io.StringIO()))[1] == []
    with open(os.devnull, "w", encoding="utf-8") as file:
        assert in_child(lambda: reading(file))[1] == ["prints"]


@pytest.mark.parametrize(("remedy", "parameters"), [(workers, {"num_workers": 2}), (cache, {"bytes": 2**20})])
def test_a_loader_that_is_dear_to_look_at_before_each_batch_is_left_alone(remedy, parameters, monkeypatch):
    monkeypatch.setattr("headway.trace.events.loader_facts.LOOK_S", -1.0)
    monkeypatch.setattr("headway.trace.events.loader_facts.LOOK_SHARE", 0.0)
    with applied(remedy, parameters) as context:
        assert len(list(DataLoader(Squares(8), 4))) == 2

    assert "looking, before each batch" in str(context.outcomes[-1])
