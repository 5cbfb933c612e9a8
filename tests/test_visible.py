"""What readings print, log and write is the script's, in its order and number, under every remedy of a loader."""

import json
import logging
import os
import resource
import signal
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset

from headway.core.machine.child import said
from headway.core.machine.hidden_thread import HiddenThread, running
from headway.data.bytes import scrutiny
from headway.data.cached.apply import cache
from headway.data.guard import contents
from headway.data.guard.watch import listen, noting
from headway.data.workers import torch_threads as switch
from headway.data.workers.apply import untunable, workers
from headway.data.workers.torch_threads import threads
from headway.runtime.calls.patches import replace_attribute
from tests.launching import wait_for
from tests.loaders_made import Squares, epochs
from tests.remedy_context import applied
from tests.spawn import in_fork

REMEDIES = {workers: {"num_workers": 2}, threads: {"num_workers": 2}, cache: {"bytes": 1 << 20}}
LOG = logging.getLogger("tests.visible")


@pytest.fixture(autouse=True)
def _chance_and_load_decide_nothing(monkeypatch):
    monkeypatch.setattr(scrutiny, "CHECK_FIRST", 0)
    monkeypatch.setattr(scrutiny, "CHECK_EVERY", 10**9)
    monkeypatch.setattr(switch, "lock_wait_fraction", lambda work, keys: 0.0)


class Logging(Squares):
    def __getitem__(self, index):
        if index % 3 == 2:
            LOG.warning("%d", index)
        return super().__getitem__(index)


class Printing(Squares):
    def __getitem__(self, index):
        if index % 3 == 2:
            print(index)
        return super().__getitem__(index)


class Warns(Squares):
    def __getitem__(self, index):
        if index % 3 == 2:
            warnings.warn(f"row {index} is corrupt", stacklevel=1)
        return super().__getitem__(index)


class Storing(Squares):
    """Keeps what it made in a folder, and does not mind where that fails; the first examples are there already."""

    def __init__(self, folder):
        super().__init__()
        self.folder = str(folder)

    def __getitem__(self, index):
        path = f"{self.folder}/{index}"
        if index > 4 and not os.path.exists(path):
            try:
                with open(path, "w") as file:
                    json.dump(index, file)
            except Exception:
                return torch.tensor([0, 0])
        return super().__getitem__(index)


@pytest.mark.slow
@pytest.mark.parametrize("remedy", REMEDIES)
@pytest.mark.parametrize("dataset", [Logging, Printing])
def test_lines_of_examples_come_as_often_and_between_the_same_batches(remedy, dataset, capsys):
    def lines():
        found = []
        handler = logging.Handler()
        handler.emit = lambda record: found.append(record.getMessage())
        LOG.addHandler(handler)
        loader = DataLoader(dataset(), 4)
        for _ in range(2):
            for batch in loader:
                found.append(batch.tolist())
                found.append(capsys.readouterr().out)
        LOG.removeHandler(handler)
        return found

    expected = lines()
    with applied(remedy, REMEDIES[remedy]):
        assert lines() == expected


@pytest.mark.parametrize("remedy", REMEDIES)
def test_warnings_of_examples_reach_the_script_that_collects_them(remedy):
    def seen():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loader, found = DataLoader(Warns(), 4), []
            for _ in range(2):
                for batch in loader:
                    found.append(
                        (batch.tolist(), [str(one.message) for one in caught if "corrupt" in str(one.message)])
                    )
        return found

    expected = seen()
    with applied(remedy, REMEDIES[remedy]):
        assert seen() == expected


@pytest.mark.parametrize("remedy", REMEDIES)
def test_a_script_of_limited_addresses_keeps_them_for_itself(remedy, monkeypatch):
    limits = {resource.RLIMIT_AS: (1 << 50, 1 << 50)}
    monkeypatch.setattr(resource, "getrlimit", lambda kind, of=resource.getrlimit: limits.get(kind) or of(kind))
    with applied(remedy, REMEDIES[remedy]) as context:
        list(DataLoader(Squares(), 4))

    assert "RLIMIT_AS" in context.outcomes[-1].reason


@pytest.mark.parametrize("remedy", REMEDIES)
def test_no_file_is_written_before_the_loop_asks_for_its_batch(remedy, tmp_path):
    with applied(remedy, REMEDIES[remedy]):
        for seen, batch in enumerate(DataLoader(Storing(tmp_path), 4)):
            assert batch[:, 0].tolist() == [index for index in range(4 * seen, 4 * seen + 4) if index < 37]
            assert len(list(tmp_path.iterdir())) == max(min(4 * seen + 4, 37) - 5, 0)


def test_what_the_recording_writes_while_a_batch_is_read_is_not_the_scripts(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_RUN", str(tmp_path / "run"))
    (tmp_path / "run").mkdir()
    undos = []
    listen(lambda target, wrapper: undos.append(replace_attribute(target, wrapper)))
    try:
        with noting() as acts:
            (tmp_path / "run" / "facts.json").write_text("{}")
            assert acts == []
            (tmp_path / "other").write_text("{}")
    finally:
        for undo in undos:
            undo()

    assert acts == ["changes files"]


class Filed(Squares):
    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def __getitem__(self, index):
        return torch.frombuffer(bytearray((self.folder / str(index)).read_bytes()), dtype=torch.float32)


@pytest.mark.parametrize("remedy", REMEDIES)
def test_one_file_of_many_that_is_written_between_passes_or_in_one_is_read_anew(remedy, tmp_path):
    for index in range(37):
        (tmp_path / str(index)).write_bytes(np.full(2, index, np.float32).tobytes())
        os.utime(tmp_path / str(index), (1e9, 1e9))
    with applied(remedy, REMEDIES[remedy]) as context:
        loader = DataLoader(Filed(tmp_path), 4)
        list(loader)
        (tmp_path / "17").write_bytes(np.full(2, -1, np.float32).tobytes())
        second = []
        for batch in loader:
            second += batch[:, 0].tolist()
            (tmp_path / "9").write_bytes(np.full(2, -2, np.float32).tobytes())

    assert second == [{17: -1, 9: -2}.get(index, index) for index in range(37)]
    assert "loaders" in context.outcomes[0].facts, "the remedy was applied"


class Bank(Squares):
    """Rows in an array, and in a list of records, that are too large to be looked through before each batch."""

    def __init__(self):
        super().__init__(2000)
        self.features, self.records = np.zeros((2000, 1200)), [{"label": 0.0} for _ in range(2000)]

    def __getitem__(self, index):
        return torch.tensor([index, self.features[index, 3], self.records[index]["label"]])


@pytest.mark.parametrize("remedy", REMEDIES)
def test_rows_of_large_memory_that_the_loop_edits_are_read_as_they_are(remedy, monkeypatch):
    monkeypatch.setattr(contents, "MOST_INSIDE", 0)
    monkeypatch.setattr(contents, "MOST_BYTES", 0)

    def seen():
        found, data = [], Bank()
        loader = DataLoader(Subset(data, range(1, 41)), 4)
        for _ in range(2):
            for step, batch in enumerate(loader):
                found.append(batch.tolist())
                data.features[3 * step + 7, 3] += 1
                data.records[3 * step + 8]["label"] += 1.0
        return found

    expected = seen()
    with applied(remedy, REMEDIES[remedy]):
        assert seen() == expected


@pytest.mark.parametrize("remedy", [workers, threads])
def test_a_host_without_room_for_workers_or_threads_reads_as_before(remedy, monkeypatch):
    def make():
        return DataLoader(Squares(), 5, shuffle=True)

    here = os.getpid()

    def start(thread, original=HiddenThread.start):
        if thread.name == "headway-loader-1" and os.getpid() == here:
            raise RuntimeError("can't start new thread")
        return original(thread)

    plain, _ = epochs(make)
    monkeypatch.setattr(HiddenThread, "start", start)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with applied(remedy, REMEDIES[remedy]) as context:
        taken = {int(name) for name in os.listdir("/proc/self/fd")}
        resource.setrlimit(resource.RLIMIT_NOFILE, ([n for n in range(soft) if n not in taken][6], hard))
        try:
            limited, _ = epochs(make)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert limited == plain
    assert "could not be started" in str(context.outcomes[-1].facts)
    assert wait_for(lambda: not any(name.startswith("headway-loader") for name in running.copy().values()))


def test_a_handler_of_the_scripts_hears_only_of_its_own_children():
    heard = []
    before = signal.signal(signal.SIGCHLD, lambda *_: heard.append(1))
    try:
        assert said(lambda: b"done") == (b"done", 0)
        reason = untunable(DataLoader(Squares(), 5))
        silent = list(heard)
        in_fork(list)
    finally:
        signal.signal(signal.SIGCHLD, before)

    assert (silent, heard) == ([], [1])
    assert "end of its child processes" in reason


@pytest.mark.parametrize("remedy", [workers, threads])
def test_a_batch_size_that_the_loop_sets_holds_from_the_next_batch_on(remedy):
    def sizes():
        torch.manual_seed(3)
        loader, found = DataLoader(Squares(), 3, shuffle=True), []
        for batch in loader:
            found.append(batch.tolist())
            loader.batch_sampler.batch_size += 1
        return found

    expected = sizes()
    with applied(remedy, REMEDIES[remedy]):
        assert sizes() == expected


class Standardised(Squares):
    def __getitem__(self, index):
        image = torch.arange(10_000.0) * index
        return (image - image.mean())[:4]


@pytest.mark.slow
@pytest.mark.parametrize("remedy", [workers, threads])
def test_sums_that_several_threads_of_torch_compute_are_left_to_them(remedy):
    count = torch.get_num_threads()
    try:
        for num_threads, is_refused in [(2, True), (1, False)]:
            torch.set_num_threads(num_threads)
            with applied(remedy, REMEDIES[remedy]) as context:
                list(DataLoader(Standardised(), 5))
            assert ("computes mean of many numbers with 2 threads" in str(context.outcomes[-1])) == is_refused
    finally:
        torch.set_num_threads(count)


class Current(Squares):
    current = 0

    def __getitem__(self, index):
        self.current = index
        return torch.tensor([self.current, 1])


def test_threads_leave_a_dataset_alone_that_keeps_the_index_under_way():
    with applied(threads, REMEDIES[threads]) as context:
        list(DataLoader(Current(), 5))

    assert "keeps something of each example that it reads" in str(context.outcomes[-1])
