"""Rings followed from outside: every record once and in order, nothing touched, whatever the writer and launcher do."""

import os
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import FormatError
from headway.runtime.run_folder.drain import Drainer
from headway.runtime.run_folder.problems import Problems
from headway.trace.rings import follow
from headway.trace.rings.follow import RingFollower, RunFollower
from headway.trace.rings.records import IN_FLIGHT, PATIENCE, RECORD_DTYPE, remove
from headway.trace.rings.ring import CHILD, HEADER_BYTES, LOADER, SPAWNED, Recorder
from tests.rings_made import read_ring


def writer(rings, *, rank=0, capacity=256, role=0) -> Recorder:
    recorder = Recorder(str(rings), rank=rank, capacity=capacity, role=role)
    assert recorder.open()
    return recorder


def write(recorder, count, first=0):
    for number in range(first, first + count):
        recorder.emit(10, 1000 + number, 5, number)


def values(found):
    return [int(a) for _, records in found for a in records["a"]]


@settings(max_examples=40)
@given(bursts=st.lists(st.integers(0, 700), min_size=1, max_size=8), capacity=st.sampled_from([128, 256, 1024]))
def test_every_record_is_returned_once_and_in_order_or_counted_as_lost(tmp_path_factory, bursts, capacity):
    rings = tmp_path_factory.mktemp("rings")
    recorder, follower = writer(rings, capacity=capacity), RunFollower(rings)
    seen, written = [], 0
    for burst in bursts:
        write(recorder, burst, written)
        written += burst
        seen += values(follower.poll())

    assert seen == sorted(set(seen))
    assert len(seen) + follower.lost == written
    assert follower.lost == 0 or max(bursts) > capacity - 2 * IN_FLIGHT


def test_it_reads_what_the_mapped_reader_reads(tmp_path):
    recorder = writer(tmp_path, capacity=1024)
    write(recorder, 700)
    header, expected, lost = read_ring(recorder.path)

    ((followed, records),) = RunFollower(tmp_path).poll()

    assert (records == expected).all()
    assert followed == header
    assert lost == 0


def test_what_was_overwritten_comes_from_the_launchers_spool(tmp_path):
    recorder = writer(tmp_path / "rings", capacity=256)
    drainer = Drainer(tmp_path / "rings", Problems(), attempt=0, budget_bytes=1 << 20)
    follower = RunFollower(tmp_path / "rings")
    follower.poll()
    for part in range(20):
        write(recorder, 100, 100 * part)
        drainer.drain()

    assert values(follower.poll()) == list(range(2000))
    assert follower.lost == 0


def test_a_late_reader_gets_everything_from_the_beginning_sealed_pieces_too(tmp_path):
    recorder = writer(tmp_path / "rings", capacity=256)
    drainer = Drainer(tmp_path / "rings", Problems(), attempt=0, budget_bytes=64 * 64 * 16)
    for part in range(30):
        write(recorder, 100, 100 * part)
        drainer.drain()
    assert list((tmp_path / "rings").glob("*.sealed"))

    assert values(RunFollower(tmp_path / "rings").poll()) == list(range(3000))


def test_a_ring_that_the_launcher_empties_ends_from_its_spool_and_harms_nobody(tmp_path):
    recorder = writer(tmp_path / "rings")
    follower = RunFollower(tmp_path / "rings")
    write(recorder, 10)
    assert len(values(follower.poll())) == 10
    drainer = Drainer(tmp_path / "rings", Problems(), attempt=0, budget_bytes=1 << 20)
    write(recorder, 7, 10)
    drainer.drain()
    for ring in drainer._followed.values():
        ring.retire()

    assert values(follower.poll()) == list(range(10, 17))
    assert follower.poll() == []
    assert values(RunFollower(tmp_path / "rings").poll()) == list(range(17))  # one who comes after that


def test_records_of_a_ring_that_was_removed_meanwhile_are_still_read(tmp_path):
    recorder = writer(tmp_path)
    follower = RunFollower(tmp_path)
    follower.poll()
    write(recorder, 9)
    for stem in follow.spool.stems(tmp_path):
        remove(stem)

    assert values(follower.poll()) == list(range(9))
    assert follower.headers() == []


def test_a_record_that_its_writer_never_completed_is_passed_over(tmp_path):
    recorder = writer(tmp_path, capacity=1024)
    write(recorder, PATIENCE + 20)
    with open(recorder.path, "r+b") as file:  # record 5 was begun and never stored
        file.seek(HEADER_BYTES + 5 * 64 + 56)
        file.write(bytes(8))
    follower = RunFollower(tmp_path)

    seen = values(follower.poll())

    assert seen == [n for n in range(PATIENCE + 20) if n != 5]
    assert follower.lost == 1
    remove(next(iter(follow.spool.stems(tmp_path))))

    assert follower.poll() == []
    assert follower.lost == 1  # what a ring lost stays lost when the ring is over


def test_only_ranks_are_followed_and_a_child_that_becomes_one_is_met(tmp_path):
    loader, child = writer(tmp_path / "r", role=LOADER), writer(tmp_path / "c", rank=3, role=CHILD)
    write(loader, 3)
    write(child, 4)
    rings = tmp_path / "rings"
    rings.mkdir()
    for number, recorder in enumerate((loader, child)):
        shutil.move(recorder.path, rings / f"a0-r{number}-p{number + 1}.ring")
    follower = RunFollower(rings)
    before = follower.poll()
    child.set_rank(3, role=SPAWNED)

    assert before == []
    assert [(header.rank, len(records)) for header, records in follower.poll()] == [(3, 4)]


def test_the_end_of_a_process_is_seen_in_its_header(tmp_path):
    recorder, follower = writer(tmp_path), RunFollower(tmp_path)
    write(recorder, 1)
    follower.poll()
    running = follower.headers()[0].end_ns
    recorder.close()
    follower.poll()

    assert running == 0
    assert follower.headers()[0].end_ns == recorder.end_ns > 0


def test_following_changes_no_file(tmp_path):
    recorder = writer(tmp_path)
    write(recorder, 500)
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()}
    follower = RunFollower(tmp_path)
    follower.poll()
    follower.poll()
    follower.close()

    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()} == before


def test_a_ring_without_a_header_yet_is_looked_at_again(tmp_path):
    follower = RunFollower(tmp_path / "rings")
    assert follower.poll() == []  # not even a folder
    (tmp_path / "rings").mkdir()
    (tmp_path / "rings" / "a0-r0-p1.ring").write_bytes(b"")
    assert follower.poll() == []
    recorder = writer(tmp_path / "other")
    write(recorder, 2)
    os.replace(recorder.path, tmp_path / "rings" / "a0-r0-p1.ring")

    assert values(follower.poll()) == [0, 1]


def test_a_file_that_is_no_ring_is_refused(tmp_path):
    (tmp_path / "a0-r0-p1.ring").write_bytes(b"x" * HEADER_BYTES)
    with pytest.raises(FormatError, match=r"not a headway ring.*Leave it out"):
        RingFollower(tmp_path / "a0-r0-p1")


def test_nothing_new_is_an_empty_array_of_records(tmp_path):
    follower = RingFollower(follow.spool.stems(_with_ring(tmp_path))[0])
    follower.take()

    assert follower.take().dtype == RECORD_DTYPE
    assert np.shape(follower.take()) == (0,)


def _with_ring(rings):
    write(writer(rings), 3)
    return rings


def test_what_a_rank_is_doing_is_read_from_its_progress_page(tmp_path):
    recorder, follower = writer(tmp_path, rank=2), RunFollower(tmp_path)
    write(recorder, 1)
    follower.poll()
    idle = follower.pages()
    recorder.page.opened(40, 12_345, group=0, seq=7)
    busy = follower.pages()
    recorder.page.closed()

    assert (idle, follower.pages()) == ({}, {})
    assert (busy[2].op, busy[2].since_ns, busy[2].seq) == (40, 12_345, 7)
