"""What remedies would say of a loader is asked while it is recorded, apart, and is what they say when applied."""

import json
import os
import random
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader

from headway.catalog import REHEARSALS
from headway.data.workers.apply import untunable, workers
from headway.data.workers.torch_threads import different
from headway.runtime.recorder import rehearsals
from headway.trace.events.loader_facts import LoaderFacts
from headway.trace.recording.assemble import loaders
from tests.loaders_made import ByTurns, HoldsAFile, Noisy, Squares
from tests.remedy_context import applied

FACTOR = [1]


class Counted(Squares):
    count = 0

    def __getitem__(self, index):
        self.count += 1
        return torch.tensor([index, self.count // 100])


class Scaled(Squares):
    def __getitem__(self, index):
        return torch.tensor([index * FACTOR[0]])


class Hangs(Squares):
    def __getitem__(self, index):
        time.sleep(600)


def seed_worker(worker, offset=0):
    seed = torch.initial_seed() % 2**32 + offset
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)


def rehearse(loader, run):
    """Rehearse `loader`; return its facts by number."""
    probes = SimpleNamespace(run=str(run), remedied=False, leads=True, recorder=SimpleNamespace(rank=0))
    rehearsals.begin(probes, 0, loader)
    rehearsals.settle(run, patience_s=60)
    return loaders(run)


def rehearsed(loader, run, monkeypatch):
    """Return the facts of `loader` after a rehearsal."""
    monkeypatch.setenv("HEADWAY_REMEDIES", json.dumps(REHEARSALS))
    return LoaderFacts.of(rehearse(loader, run)["0"]).rehearsal


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Squares(), 4), lambda: DataLoader(Counted(), 4), lambda: DataLoader(HoldsAFile(), 4),
        lambda: DataLoader(Squares(), 4, sampler=ByTurns()), lambda: DataLoader(Noisy(), 4),
        lambda: DataLoader(Squares(), 4, worker_init_fn=seed_worker),
    ],
    ids=["pure", "counts its readings", "open file", "own sampler", "draws", "seeds its workers"],
)  # fmt: skip
def test_a_rehearsal_says_what_the_remedies_say(make, tmp_path, monkeypatch):
    loader = make()
    found = rehearsed(loader, tmp_path, monkeypatch)

    assert found.processes == (untunable(loader, may_draw=True) or "")
    assert bool(found.threads) == bool(different(loader) or isinstance(loader.sampler, ByTurns))
    assert found.processes_s > 0
    assert getattr(loader.dataset, "count", 0) == 0


@pytest.mark.slow
def test_a_dataset_that_hangs_leaves_no_fact_and_no_process(tmp_path, monkeypatch):
    monkeypatch.setattr("headway.core.machine.child.TIMEOUT_S", 1)
    before = {process.pid for process in psutil.process_iter()}
    monkeypatch.setenv("HEADWAY_REMEDIES", json.dumps(REHEARSALS))

    assert rehearse(DataLoader(Hangs(), 4), tmp_path) == {}
    ours = [p for p in psutil.process_iter(["cmdline"]) if p.pid not in before and p.info["cmdline"] == CMDLINE]
    psutil.wait_procs(ours, timeout=20)
    assert not [process for process in ours if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


CMDLINE = psutil.Process().cmdline()


def sets_a_variable(worker):
    os.environ["HEADWAY_TEST_WORKER"] = "1"


def sets_a_global(worker):
    FACTOR[0] = 2


def sets_the_dataset(worker):
    torch.utils.data.get_worker_info().dataset.size = 5


def writes_a_file(worker):
    open(os.devnull + "x", "w").close()


@pytest.mark.parametrize(
    ("start", "reason"),
    [
        (seed_worker, None), (partial(seed_worker, offset=3), None), (sets_a_variable, "environment variables"),
        (sets_a_global, "the dataset"), (sets_the_dataset, "the dataset"), (writes_a_file, "for writing"),
    ],
)  # fmt: skip
def test_a_worker_init_fn_may_run_where_it_only_seeds(start, reason):
    found = untunable(DataLoader(Scaled(), 4, worker_init_fn=start))

    assert found is None if reason is None else reason in found
    assert FACTOR == [1]
    assert "HEADWAY_TEST_WORKER" not in os.environ


def test_a_worker_init_fn_that_seeds_stays_out_where_examples_are_drawn():
    loader = DataLoader(Noisy(), 4, worker_init_fn=seed_worker)

    assert "draws random numbers" in untunable(loader, may_draw=True)


def test_batches_and_generators_are_the_scripts_own_under_a_worker_init_fn():
    def seen():
        torch.manual_seed(3), random.seed(3), np.random.seed(3)
        loader = DataLoader(Squares(), 4, shuffle=True, worker_init_fn=seed_worker)
        batches = [batch.tolist() for _ in range(2) for batch in loader]
        return batches, torch.rand(1).item(), random.random(), np.random.rand()

    expected = seen()
    with applied(workers, {"num_workers": 2}) as context:
        assert seen() == expected
    assert context.outcomes[-1].facts["loaders"][0]["num_workers"] == 2
