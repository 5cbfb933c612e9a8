"""Which processes are devices: ranks, and children that train by themselves; loader workers go with their own."""

import numpy as np

from headway.trace.events.vocabulary import SPANS
from headway.trace.recording.assemble import by_rank, lead_of
from headway.trace.rings.records import RECORD_DTYPE, Recorded, RingHeader


def recorded(pid, role, updates, *, workers=(), rank=0):
    """Return a process that made `updates` updates and started loader workers."""
    records = np.zeros(updates + len(workers), RECORD_DTYPE)
    records["code"][:updates] = SPANS["optimizer.step"].code
    records["code"][updates:], records["d"][updates:] = SPANS["input.worker"].code, workers
    header = RingHeader(pid=pid, rank=rank, worker=-1, attempt=0, local_rank=0, role=role, capacity=16,
                        process_start_ns=pid, clock_ns=pid, realtime_ns=0, end_ns=0, threads=())  # fmt: skip
    return Recorded(header, records, 0)


def grouped(monkeypatch, *processes):
    """Return rank -> process ids, the one that leads first."""
    monkeypatch.setattr("headway.trace.recording.assemble.spool.recorded", lambda process: process)
    found = {}
    for rank, group in by_rank(processes).items():
        lead = lead_of(group).header.pid
        found[rank] = [lead, *sorted(one.header.pid for one in group if one.header.pid != lead)]
    return found


def test_children_that_train_take_the_place_of_a_parent_that_waits(monkeypatch):
    parent = recorded(1, "main", 0)
    first, second = recorded(2, "child", 20, workers=[4]), recorded(3, "child", 30, workers=[5])
    workers = [recorded(4, "loader", 0), recorded(5, "loader", 0)]

    assert grouped(monkeypatch, parent, first, second, *workers) == {0: [2, 1, 4], 1: [3, 5]}


def test_a_parent_that_trains_is_rank_0_and_its_children_follow(monkeypatch):
    assert grouped(monkeypatch, recorded(1, "main", 5), recorded(2, "child", 20)) == {0: [1], 1: [2]}


def test_children_without_updates_and_spawned_ranks_are_as_ever(monkeypatch):
    assert grouped(monkeypatch, recorded(1, "main", 5), recorded(2, "child", 0)) == {0: [1, 2]}
    assert grouped(monkeypatch, recorded(1, "main", 0), recorded(2, "spawned", 3), recorded(3, "child", 9)) == {
        0: [2, 1, 3]
    }


def test_free_numbers_lie_behind_those_of_all_ranks(monkeypatch):
    ranks = [recorded(1, "main", 5), recorded(2, "main", 5, rank=1)]

    assert grouped(monkeypatch, *ranks, recorded(3, "child", 2)) == {0: [1], 1: [2], 2: [3]}
