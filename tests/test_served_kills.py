"""A served loader outlives its server: killed, or with a rank that is done or gone; by hand, it ends with one error."""

import gc
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from pathlib import Path

import psutil
import pytest

from headway.core.errors import BackgroundError, HeadwayError
from headway.data import DataLoader, DataServer
from headway.data.service import server
from headway.data.service import torch_links as links
from headway.data.service import torch_start as serving
from tests.launching import wait_for
from tests.paths import ROOT
from tests.served_made import Rows, end, ids, only, server_of
from tests.served_made import runtime as runtime
from tests.test_server import facts


def test_it_outlives_its_server_killed_in_mid_epoch_up_to_three_times(runtime):
    loader = DataLoader(Rows(nap_s=0.002), batch_size=2, shuffle=True, server="auto")
    taken, kills = [], 0
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for batch in loader:
            taken += batch["id"].tolist()
            if len(taken) in (6, 14, 22):  # 20 batches, 8 at most ahead: behind each of them one is missing
                kills += end(only(runtime), signal.SIGKILL)  # the next one may not answer yet

    assert sorted(taken) == list(range(40))
    assert 1 <= kills <= 3
    # From Python 3.12 on, forking beside threads warns too.
    found = [re.search(r"behind the (\d+) batches .* none is lost", str(one.message)) for one in told]
    behind = [int(match[1]) for match in found if match]
    # What had come before the kill is taken first: up to the slots that there are. A server that ends before its first
    # batch came is told with the one before it.
    assert behind == sorted(behind)
    assert 1 <= len(behind) <= 3
    assert all(any(killed <= at <= killed + 8 for killed in (3, 7, 11)) for at in behind), behind
    assert loader._links[0].restarts == kills
    iterator = iter(loader)
    next(iterator)
    end(only(runtime), signal.SIGKILL)
    with pytest.raises(BackgroundError, match=r"was lost 4 times.*state_dict"):
        list(iterator)


def test_two_jobs_and_the_ranks_of_one_outlive_the_same_server(runtime, monkeypatch):
    """Whoever notices first starts another, the others find it; each rank tells what it had."""
    monkeypatch.setattr(links, "_number", itertools.repeat(0))
    data, taken, begun = Rows(60, nap_s=0.001), {}, threading.Barrier(4, timeout=60)

    def train(name, **options):
        loader = DataLoader(data, batch_size=3, shuffle=True, server=DataServer(job=name[0]), **options)
        taken[name] = []
        for number, batch in enumerate(loader):
            taken[name] += batch["id"].tolist()
            if number == 4:
                begun.wait()
                begun.wait()

    names = {"a": {}, "b0": {"rank": 0, "world_size": 2}, "b1": {"rank": 1, "world_size": 2}}
    threads = [threading.Thread(target=train, args=(name,), kwargs=options) for name, options in names.items()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the restarts
        for thread in threads:
            thread.start()
        begun.wait()
        end(only(runtime), signal.SIGKILL)
        begun.wait()
        for thread in threads:
            thread.join(60)

    assert sorted(taken["a"]) == sorted(taken["b0"] + taken["b1"]) == list(range(60))


def two_ranks(monkeypatch, world_size=2, data=None, **options):
    """Loaders of the first two ranks of a job, in one process."""
    monkeypatch.setattr(links, "_number", itertools.repeat(0))
    options = {"batch_size": 3, "shuffle": True, "world_size": world_size, "server": DataServer(job="one", **options)}
    return [DataLoader(data or Rows(60), rank=rank, **options) for rank in (0, 1)]


@pytest.mark.parametrize("kills", [1, 2, 3])
def test_a_server_that_is_killed_while_it_starts_is_started_again_up_to_twice(runtime, monkeypatch, kills):
    run, killed = serving.run, runtime.parent / "killed"

    def killed_at_first(*arguments):
        with open(killed, "a+") as file:
            file.write("x")
        if killed.stat().st_size <= kills:
            os.kill(os.getpid(), signal.SIGKILL)
        run(*arguments)

    monkeypatch.setattr(serving, "run", killed_at_first)
    if kills == 3:
        with pytest.raises(HeadwayError, match=r"no data server at .*: it was killed while it started; see .*\.log"):
            iter(DataLoader(Rows(), batch_size=2, server="auto"))
    else:
        assert ids(DataLoader(Rows(), batch_size=2, server="auto")) == list(range(40))


def test_a_rank_that_waits_for_one_that_has_gone_says_so_and_what_ends_the_wait(runtime, monkeypatch):
    monkeypatch.setattr(server, "WAITS_S", 0.1)
    first, second = two_ranks(monkeypatch, data=Rows(600))  # so many that the lost server had not decided them all
    ahead, iterator = iter(first), iter(second)
    taken = ids(next(one) for one in (ahead, iterator) for _ in range(3))
    end(only(runtime), signal.SIGKILL)
    waiting = threading.Thread(target=lambda: taken.extend(ids(iterator)))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        waiting.start()
        wait_for(lambda: any("has waited" in str(one.message) for one in told))
        taken += ids(ahead)
        waiting.join(30)

    assert sorted(taken) == list(range(600))
    (text,) = [str(one.message) for one in told if "has waited" in str(one.message)]
    assert re.search(r"waited 0.1 s for rank 0 of this job.*after 600 s \(DataServer\(grace_s=...\)\).*again", text)


class Forking(Rows):
    """Its reading starts a helper, as decoders do, which outlives the server."""

    def __getitem__(self, k):
        if k == 7 and not os.fork():
            signal.pause()
        return super().__getitem__(k)


@pytest.mark.parametrize(("dataset", "num_forks"), [(Rows, 0), (Forking, 1)])
def test_a_rank_in_mid_epoch_goes_on_exactly_behind_a_lost_server_also_while_a_fork_of_it_lives(
    runtime, monkeypatch, dataset, num_forks
):
    first, second = two_ranks(monkeypatch, data=dataset(60))
    iterator = iter(second)
    taken = ids(next(iterator) for _ in range(3)) + ids(first)
    del first
    gc.collect()
    wait_for(lambda: facts(only(runtime))["clients"] == 1)
    pid = server_of(only(runtime))
    forks = psutil.Process(pid).children()
    os.kill(pid, signal.SIGKILL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the restart
            taken += ids(iterator)
    finally:
        for fork in forks:
            fork.kill()

    assert sorted(taken) == list(range(60))
    assert len(forks) == num_forks


def test_what_a_server_that_lives_told_of_a_rank_that_went_lets_nobody_wait_for_one_that_never_came(monkeypatch):
    first, second = two_ranks(monkeypatch, world_size=3, grace_s=0.3)
    iterator = iter(second)
    had = len(ids([next(iterator)]))
    sizes = [len(ids(first)) for _ in range(2)]
    del first
    gc.collect()
    sizes += [had + len(ids(iterator)), len(ids(second)), len(ids(second))]

    assert [size in (20, 21) for size in sizes] == [True] * 5


def test_a_rank_that_went_with_the_server_is_named_after_the_grace_and_the_other_jobs_go_on(runtime, monkeypatch):
    first, second = two_ranks(monkeypatch, grace_s=0.3)
    third = DataLoader(Rows(60), 4, server=DataServer(grace_s=0.3))
    iterators = [iter(loader) for loader in (first, second, third)]
    taken = [ids([next(iterator)]) for iterator in iterators]
    end(only(runtime), signal.SIGKILL)
    del first, iterators[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(BackgroundError, match=r"job 'one.0' .* waits for rank 0: .* has not come for 0.3 s"):
            list(iterators[0])
        taken[2] += ids(iterators[1])

    assert sorted(taken[2]) == list(range(60))
    assert "one.0" not in facts(only(runtime))["jobs"]


def test_a_server_started_by_hand_ends_its_clients_with_one_clear_error(runtime):
    command = [sys.executable, "-m", "headway.cli", "data", "serve", "tests.served_made:Rows", "--socket"]
    path = Path(tempfile.mkdtemp()) / "s"
    served = subprocess.Popen([*command, str(path)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert served.stdout.readline().decode().strip() == str(path)
    loader = DataLoader(Rows(), batch_size=2, server=str(path))
    iterator = iter(loader)
    next(iterator)
    served.kill()
    served.communicate()

    with pytest.raises(BackgroundError, match="Start it again; state_dict"):
        list(iterator)
    shutil.rmtree(path.parent)
