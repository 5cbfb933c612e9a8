"""The drain: nothing is overwritten while it keeps up; beyond the budget the oldest goes, and is counted."""

import os
import resource
import subprocess
import sys

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headway.runtime.run_folder.drain import DRAIN_S, WAITING_BYTES, Drainer, prune_windows
from headway.runtime.run_folder.finalise import finalise
from headway.runtime.run_folder.problems import Problems
from headway.trace.events.parquet import read
from headway.trace.rings.records import recorded, stems
from tests.paths import ROOT
from tests.rings_made import Process


@given(bursts=st.lists(st.integers(0, 60), max_size=12))
def test_every_record_drained_in_time_is_there_in_the_end(bursts, tmp_path_factory):
    run = tmp_path_factory.mktemp("run")
    process = Process(run, capacity=256)
    drainer = Drainer(run / "rings", Problems(), attempt=0, budget_bytes=1 << 20)
    for burst in bursts:
        for _ in range(burst):
            process.write("host.logging", 10, 20)
        drainer.drain()
    drainer.stop()
    found = recorded(stems(run / "rings")[0])

    assert (len(found.records), found.dropped) == (sum(bursts), 0)
    assert (np.diff(found.records["start_ns"]) >= 0).all()


def test_listeners_see_every_record_once(tmp_path):
    process = Process(tmp_path)
    drainer = Drainer(tmp_path / "rings", Problems(), attempt=0, budget_bytes=1 << 20)
    seen: list[int] = []
    drainer.listeners.append(lambda header, records: seen.extend(records["number"].tolist()))
    for _ in range(3):
        for _ in range(10):
            process.write("host.logging", 10, 20)
        drainer.drain()
    drainer.stop()

    assert seen == list(range(1, 31))


def test_beyond_the_budget_the_oldest_pieces_go_but_not_the_start_and_the_loss_is_exact(tmp_path):
    rng = np.random.default_rng(0)
    process = Process(tmp_path, capacity=16384)
    drainer = Drainer(tmp_path / "rings", Problems(), attempt=0, budget_bytes=60_000)
    written = 0
    for _ in range(40):
        for _ in range(1000):
            process.write("input.next", int(rng.integers(1, 10**6)), 0, written, 0, int(rng.integers(1 << 40)))
            written += 1
        drainer.drain()
        size = sum(path.stat().st_size for path in (tmp_path / "rings").glob("*.sealed"))
        assert size <= 60_000 + 40_000  # one piece may stand above it until the next is sealed
    drainer.stop()
    finalise(tmp_path)
    trace = read(tmp_path / "events" / "a0-r0.parquet")
    lost = trace.where(trace.named("dropped"))
    kept = trace.events["seq"][trace.named("input.next")]

    assert int(lost.events["bytes"].sum()) + len(kept) == written
    assert int(lost.events["bytes"].sum()) == trace.meta["dropped"] > 0
    assert kept[0] == 0
    assert kept[-1] == written - 1


def test_the_ring_of_a_process_that_is_gone_is_emptied_and_keeps_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr("headway.runtime.run_folder.drain.FAR_S", DRAIN_S)  # spools are flushed at that very drain too
    code = (
        "import sys; from tests.rings_made import Process; from pathlib import Path;Process(Path(sys.argv[1])).train(3)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=True, timeout=60)
    drainer = Drainer(tmp_path / "rings", Problems(), attempt=0, budget_bytes=1 << 20)
    for _ in range(8):
        drainer.drain()
    ring = next((tmp_path / "rings").glob("*.ring"))

    assert ring.stat().st_size == 0
    drainer.stop()
    assert read(finalise(tmp_path)[0]).meta["num_steps"] == 3


def test_the_oldest_windows_go_but_never_the_newest_of_a_rank(tmp_path):
    (tmp_path / "windows").mkdir()
    for number in range(6):
        for rank in (0, 1):
            path = tmp_path / "windows" / f"r{rank}-w{number}.json"
            path.write_bytes(b"x" * 1000)
            os.utime(path, (number, number))
    prune_windows(tmp_path / "windows", 5000)
    names = sorted(path.name for path in (tmp_path / "windows").iterdir())

    assert names == ["r0-w4.json", "r0-w5.json", "r1-w3.json", "r1-w4.json", "r1-w5.json"]
    prune_windows(tmp_path / "windows", 0)
    assert sorted(path.name for path in (tmp_path / "windows").iterdir()) == ["r0-w5.json", "r1-w5.json"]


def test_only_the_rings_of_its_attempt_and_rank_are_touched(tmp_path):
    for rank in (0, 1):
        for attempt in (0, 1):
            Process(tmp_path, rank=rank, attempt=attempt).train(1)
    drainer = Drainer(tmp_path / "rings", Problems(), attempt=1, budget_bytes=1 << 20, ranks={0})
    drainer.drain()
    drainer.stop()

    assert [path.name.partition("-p")[0] for path in (tmp_path / "rings").glob("*.spool")] == ["a1-r0"]


def test_a_disk_that_was_full_for_a_while_costs_at_most_the_records_of_that_while(tmp_path):
    process, heard = Process(tmp_path), []
    drainer = Drainer(tmp_path / "rings", problems := Problems(), attempt=0, budget_bytes=1 << 30)
    drainer.listeners += [lambda *_: 1 / 0, lambda _, records: heard.append(len(records))]
    process.train(100)
    drainer.drain()
    (spool,) = (tmp_path / "rings").glob("*.spool")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for full in (1, WAITING_BYTES // 64 // 10_000 + 2):
        resource.setrlimit(resource.RLIMIT_FSIZE, (spool.stat().st_size + 100, before[1]))  # no multiple of a record
        try:
            for _ in range(full):
                process.train(5_000)
                drainer.drain()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        process.train(10)
        drainer.drain()
        found = recorded(stems(tmp_path / "rings")[0])
        assert found.dropped == 0 if full == 1 else 0 < found.dropped <= full * 10_001
        assert len(found.records) + found.dropped == sum(heard)
    drainer.stop()

    assert sorted(line.rpartition(":")[0].partition("<")[0] for line in problems.lines()) == [
        "the recording lacks records",
        "the recording lacks what test_a_disk_that_was_full_for_a_while_costs_at_most_the_records_of_that_while.",
    ]
