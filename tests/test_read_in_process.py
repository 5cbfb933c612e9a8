"""A batch that a worker or a thread cannot make is read in the process: the script meets what it would have met."""

import os
import pickle
import signal

import pytest
import torch
from torch.utils.data import DataLoader

from headway.data.workers.apply import workers
from headway.data.workers.torch_threads import threads
from tests.loaders_made import Squares
from tests.remedy_context import applied

PARAMETERS = {"num_workers": 2, "prefetch_factor": 2}
PARENT = os.getpid()


class DamagedError(Exception):
    def __init__(self, index):
        super().__init__()
        self.index = index


def raises(index):
    raise DamagedError(index)


def exits(index):
    raise SystemExit(index)


def not_to_be_pickled(index):
    return (value for value in [index])


def not_a_leaf(index):
    return torch.ones(2, requires_grad=True) * index


def ends_a_worker(index):
    if os.getpid() != PARENT:
        os.kill(os.getpid(), signal.SIGKILL)
    return index


class OneRowApart(Squares):
    def __init__(self, row):
        super().__init__(20)
        self.row = row

    def __getitem__(self, index):
        return self.row(index) if index == 13 else index


def seen(row):
    """Return what a loop sees of each batch: rows, exceptions with their attributes, settings of the loader."""
    loader, found = DataLoader(OneRowApart(row), 4, collate_fn=list), []
    batches = iter(loader)
    while True:
        try:
            found.append(
                [float(value) if isinstance(value, torch.Tensor) else str(value)[:12] for value in next(batches)]
            )
        except StopIteration:
            break
        except BaseException as error:
            found.append((type(error), str(error), vars(error), error.__context__))
        found.append((loader.num_workers, loader.prefetch_factor, loader.persistent_workers))
    pickle.dumps(loader)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("remedy", [workers, threads])
@pytest.mark.parametrize("row", [raises, exits, not_to_be_pickled, not_a_leaf, ends_a_worker])
def test_a_loop_sees_batches_and_exceptions_of_its_own(row, remedy, monkeypatch):
    monkeypatch.setattr("headway.data.workers.torch_threads.lock_wait_fraction", lambda work, keys: 0.0)
    expected = seen(row)

    with applied(remedy, PARAMETERS):
        assert seen(row) == expected


@pytest.mark.parametrize("remedy", [workers, threads])
def test_a_fork_in_a_pass_reads_the_rest_by_itself(remedy, monkeypatch):
    monkeypatch.setattr("headway.data.workers.torch_threads.lock_wait_fraction", lambda work, keys: 0.0)

    with applied(remedy, PARAMETERS):
        batches = iter(DataLoader(Squares(20), 4))
        next(batches)
        child = os.fork()
        if child == 0:
            os._exit(sum(1 for _ in batches))
        rest = sum(1 for _ in batches)

        assert (os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), rest) == (4, 4)
