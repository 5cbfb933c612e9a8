"""What native code reads, and what others are asked, is found in the trial of a loader; what Python opens is not."""

from __future__ import annotations

import ctypes
import os
import socket
import sqlite3
import threading
from contextlib import closing

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from headway.data.runtime import system_calls
from headway.data.runtime.cache_trial import uncacheable
from headway.data.runtime.trial import unfit
from tests.loaders_made import Squares


class Reading(Squares):
    """Reads a file, or something else, by a function."""

    def __init__(self, read, path):
        super().__init__(20)
        self.read, self.path = read, str(path)
        self.descriptor = os.open(path, os.O_RDONLY)

    def __getitem__(self, index):
        self.read(self)
        return index

    def __del__(self):
        os.close(self.descriptor)


def of_torch(data):
    torch.from_file(data.path, size=4, dtype=torch.uint8)


def of_the_c_library(data):
    library = ctypes.CDLL(None)
    library.close(library.open(os.fsencode(os.path.relpath(data.path)), os.O_RDONLY))


def of_a_descriptor(data):
    os.pread(data.descriptor, 4, 0)


def in_a_thread(data):
    thread = threading.Thread(target=lambda: open(data.path).close())
    thread.start()
    thread.join()


def over_a_connection(data):
    with socket.socket() as one:
        one.connect_ex(("127.0.0.1", 9))


def that_only_writes(data):
    library = ctypes.CDLL(None)
    library.close(library.open(os.fsencode(f"{data.path}.new"), os.O_WRONLY | os.O_CREAT, 0o600))


def by_python(data):
    with open(data.path, "rb") as file:
        file.read()
    np.memmap(data.path, np.uint8, "r")
    torch.load(f"{data.path}.pt")
    np.load(f"{data.path}.npy")
    with closing(sqlite3.connect(f"file:{data.path}.db?mode=ro", uri=True)) as base:
        base.execute("select * from sqlite_master").fetchall()


REASONS = {
    of_torch: "opens {} in native code", of_the_c_library: "opens {} in native code",
    of_a_descriptor: "reads {} through a descriptor", in_a_thread: "opens {} in native code, or in a thread",
    over_a_connection: "asks others over the network",
    that_only_writes: None, by_python: None,
}  # fmt: skip


@pytest.fixture
def path(tmp_path):
    (tmp_path / "data").write_bytes(bytes(64))
    torch.save({"x": torch.zeros(3)}, tmp_path / "data.pt")
    np.save(tmp_path / "data.npy", np.zeros(3))
    with closing(sqlite3.connect(tmp_path / "data.db")) as base:
        base.execute("create table rows (x)")
    return tmp_path / "data"


@pytest.mark.parametrize("read", REASONS, ids=lambda read: read.__name__)
def test_what_python_does_not_report_is_a_reason_and_what_it_reports_is_none(read, path):
    loader = DataLoader(Reading(read, path), 4)

    for decide in (unfit, uncacheable):
        finding, _ = decide(loader)
        assert finding is None if REASONS[read] is None else REASONS[read].format(path) in (finding or "")


def test_where_the_kernel_does_not_tell_packages_that_open_files_are_named(path, monkeypatch):
    monkeypatch.setattr(system_calls, "NUMBERS", {})
    monkeypatch.setattr(system_calls, "READERS", {"ctypes": frozenset({"open"})})
    reasons = {read: unfit(DataLoader(Reading(read, path), 4))[0] for read in (of_the_c_library, by_python)}

    assert "names ctypes, which opens files itself" in reasons[of_the_c_library]
    assert reasons[by_python] is None
