"""What a batch that is read ahead rests on: contents to the last entry, files as they were, nothing left in workers."""

import array
import functools
import os
import sqlite3
from collections import deque

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from headway.data.guard import contents as module
from headway.data.guard.contents import contents
from headway.data.guard.files_read import FilesRead, changed, noted, written_since
from headway.data.guard.process_state import circumstances
from headway.data.guard.trial import keeps, unfit
from headway.data.workers.apply import workers
from tests.loaders_made import Reading, Squares
from tests.remedy_context import applied

PLACE = 777
"""An entry that no sample of some entries hits."""


def rows():
    return [torch.zeros(2) for _ in range(1000)]


class Record:
    """What a list of annotations may hold."""

    def __init__(self):
        self.row, self.label = np.zeros(2), 0


EDITS = {
    "array": (lambda: np.zeros((1000, 3)), lambda value: value.__setitem__((PLACE, 1), 1)),
    "array of columns": (lambda: np.zeros((3, 1000)).T, lambda value: value.__setitem__((PLACE, 1), 1)),
    "tensor through numpy": (lambda: torch.zeros(1000), lambda value: value.numpy().__setitem__(PLACE, 1)),
    "bytes": (lambda: bytearray(1000), lambda value: value.__setitem__(PLACE, 1)),
    "numbers": (lambda: array.array("d", bytes(8000)), lambda value: value.__setitem__(PLACE, 1.0)),
    "list": (rows, lambda value: value.__setitem__(PLACE, value[PLACE] * 2)),
    "tuple's tensor": (lambda: tuple(rows()), lambda value: value[PLACE].add_(1)),
    "list's arrays": (lambda: [np.zeros(2) for _ in range(1000)], lambda value: value[PLACE].fill(1)),
    "list's lists": (lambda: [[n] for n in range(1000)], lambda value: value[PLACE].append(3)),
    "dict": (lambda: dict.fromkeys(range(1000), 0.0), lambda value: value.__setitem__(PLACE, 1.0)),
    "set": (lambda: set(range(1000)), lambda value: value.discard(PLACE)),
    "records": (lambda: [Record() for _ in range(1000)], lambda value: setattr(value[PLACE], "label", 1)),
    "records' arrays": (lambda: [Record() for _ in range(1000)], lambda value: value[PLACE].row.fill(1)),
    "dicts' arrays": (lambda: [{"row": np.zeros(2)} for _ in range(1000)], lambda value: value[PLACE]["row"].fill(1)),
    "deque": (lambda: deque(range(10)), lambda value: value.append(3)),
}  # fmt: skip


@pytest.mark.parametrize("memory_tells", [True, False])
@pytest.mark.parametrize("kind", EDITS)
def test_contents_differ_after_any_edit_and_only_then(kind, memory_tells, monkeypatch):
    monkeypatch.setattr(module, "_memory_tells", lambda: memory_tells)
    make, edit = EDITS[kind]
    value = make()
    before = contents([value])

    assert contents([value]) == before
    edit(value)
    assert contents([value]) != before


def test_a_look_reads_no_more_than_it_may(monkeypatch):
    large = [np.zeros(module.MOST_BYTES + 1, np.uint8), list(range(module.MOST_ENTRIES + 1))]
    monkeypatch.setattr(module.xxhash, "xxh3_128_digest", lambda raw: pytest.fail("it was read"))

    assert contents(large) == [(large[0].nbytes, None), len(large[1])]


def test_files_that_are_read_looked_at_or_missing_are_noted_as_they_were(tmp_path):
    files, read, missing = FilesRead(), tmp_path / "read", tmp_path / "missing"
    read.write_text("1")
    with files.noting() as noted:
        read.read_text()
        with pytest.raises(FileNotFoundError):
            missing.read_text()
    read.read_text()

    assert set(noted) == {str(read), str(missing)}
    assert changed(noted) is None
    assert written_since(noted, noted[str(read)][3]) == str(read)
    assert written_since(noted, noted[str(read)][4] + 10**9) is None
    missing.write_text("1")
    assert changed(noted) == str(missing)


class FromFile(Squares):
    """Its examples are multiples of what a file says."""

    def __init__(self, path):
        super().__init__(40)
        self.path = path

    def __getitem__(self, index):
        return index * int(self.path.read_text())


class FromFileOnce(FromFile):
    found = None

    def __getitem__(self, index):
        if self.found is None:
            self.found = int(self.path.read_text())
        return index * self.found


def test_a_file_that_the_loop_writes_is_read_when_the_loop_asks(tmp_path):
    def batches():
        path = tmp_path / "factor"
        path.write_text("1")
        seen = []
        for epoch in range(2):
            for step, batch in enumerate(DataLoader(FromFile(path), 4)):
                seen.append(batch.tolist())
                path.write_text(str(step + epoch))
        return seen

    plain = batches()
    with applied(workers, {"num_workers": 2}):
        assert batches() == plain


def test_what_only_the_first_reading_finds_is_not_read_by_workers_of_another_pass(tmp_path):
    path = tmp_path / "factor"
    path.write_text("1")

    def passes():
        loader = DataLoader(FromFileOnce(path), 4, num_workers=1)
        for factor in range(3):
            path.write_text(str(factor))
            yield [batch.tolist() for batch in loader]

    plain = list(passes())
    with applied(workers, {"num_workers": 2}) as context:
        assert list(passes()) == plain

    assert context.outcomes[-1].facts["loaders"][0]["num_workers"] == 2
    assert keeps(DataLoader(FromFile(path), 4)) == (None, {str(path): noted(str(path))})
    assert unfit(DataLoader(FromFileOnce(path), 4))[0] is None


class ByReader(FromFileOnce):
    """Its examples say which process has read them."""

    def __getitem__(self, index):
        super().__getitem__(index)
        return os.getpid()


def test_workers_that_have_opened_a_file_are_kept_until_it_changes(tmp_path):
    path = tmp_path / "factor"
    path.write_text("1")
    loader = DataLoader(ByReader(path), 4, num_workers=2)

    def readers():
        return {int(pid) for batch in loader for pid in batch}

    with applied(workers, {"num_workers": 2}):
        first = readers()
        assert readers() == first
        path.write_text("2")
        assert readers().isdisjoint(first)


BASE = sqlite3.connect(":memory:")


def asks_a_database(index):
    return BASE.execute("select 1").fetchone()[0]


def counts_threads(index):
    return torch.get_num_threads()


def test_what_torch_sets_in_the_environment_is_no_change_of_the_scripts(monkeypatch):
    before = circumstances()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/anywhere")
    assert circumstances() == before

    monkeypatch.setenv("SPLIT", "train")
    assert circumstances() != before


def test_open_connections_and_thread_counts_stay_with_the_process():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        before = circumstances()
        found = unfit(DataLoader(Reading(counts_threads), 4))[0]
        torch.set_num_threads(3)
        assert circumstances() != before
    finally:
        torch.set_num_threads(num_threads)

    assert "with one intra-op thread, as workers do, gives another result" in found
    assert "reads from an open Connection" in unfit(DataLoader(Reading(asks_a_database), 4))[0]


@functools.lru_cache
def factor_of(path):
    return int(path.read_text())


class ByACache(FromFile):
    def __getitem__(self, index):
        return index * factor_of(self.path)


def test_a_function_that_remembers_its_results_may_do_so_in_each_worker(tmp_path):
    (tmp_path / "factor").write_text("1")

    assert unfit(DataLoader(ByACache(tmp_path / "factor"), 4))[0] is None
