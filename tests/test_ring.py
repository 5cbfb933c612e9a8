"""The ring: what is written is read, in order, complete; what is overwritten is counted; a fork starts anew."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import FormatError
from headway.trace.records import RECORD_DTYPE, RingReader, read_ring
from headway.trace.ring import HEADER_BYTES, RECORD, WORKER_CAPACITY, Recorder, process_start_ns


def recorder(tmp_path: Path, **options) -> Recorder:
    """Return an open recorder in a folder of its own."""
    made = Recorder(str(tmp_path / "rings"), **options)
    assert made.open()
    return made


def write(target: Recorder, first: int, count: int) -> None:
    """Write records whose numbers all follow from their index."""
    for i in range(first, first + count):
        target.emit(10, i, 2 * i, i + 1, i + 2, i + 3, i + 4)


@given(bursts=st.lists(st.integers(0, 40), max_size=8), capacity=st.sampled_from([16, 64, 256]))
def test_every_record_is_read_once_in_order_or_counted_as_lost(bursts, capacity, tmp_path_factory):
    target = recorder(tmp_path_factory.mktemp("ring"), capacity=capacity)
    reader = RingReader(target.path)
    seen: list[int] = []
    written = 0
    for burst in bursts:
        write(target, written, burst)
        written += burst
        seen += reader.drain()["start_ns"].tolist()
    seen += reader.drain(final=True)["start_ns"].tolist()

    assert seen == sorted(set(seen))
    assert len(seen) + reader.lost == written
    assert seen[-1:] == ([written - 1] if written else [])


def test_nothing_is_lost_while_the_reader_keeps_up(tmp_path):
    target = recorder(tmp_path, capacity=256)
    reader = RingReader(target.path)
    parts = []
    for i in range(50):
        write(target, i * 100, 100)
        parts.append(reader.drain())
    records = np.concatenate(parts)

    assert records["start_ns"].tolist() == list(range(5000))
    assert reader.lost == 0
    assert (records["d"] == records["start_ns"] + 4).all()
    assert (records["step"] == -1).all()


def test_the_structured_type_is_the_record_of_the_writer(tmp_path):
    assert RECORD_DTYPE.itemsize == RECORD.size == 64
    offsets = [RECORD_DTYPE.fields[name][1] for name in RECORD_DTYPE.names]
    assert offsets == [0, 2, 4, 8, 16, 24, 32, 40, 48, 56]


def test_a_record_that_is_still_being_written_is_waited_for_and_in_the_end_given_up(tmp_path):
    target = recorder(tmp_path, capacity=1024)
    write(target, 0, 10)
    with pytest.raises(Exception, match="integer"):
        target.emit(10, "not a number", 0)  # takes a number and fails: a hole
    write(target, 11, 10)
    reader = RingReader(target.path)

    assert len(reader.drain()) == 10
    assert len(reader.drain()) == 0
    write(target, 21, 300)
    assert len(reader.drain()) == 310
    assert reader.lost == 1


def test_threads_get_lanes_and_names(tmp_path):
    target = recorder(tmp_path)
    target.emit(1, 0, 0)
    for name in ("saver", "logger"):
        thread = threading.Thread(target=target.emit, args=(2, 0, 0), name=name)
        thread.start()
        thread.join()
    header, records, lost = read_ring(target.path)

    assert header.threads == ("saver", "logger")
    assert records["lane"].tolist() == [0, 1, 2]
    assert lost == 0


def test_threads_writing_at_once_lose_nothing(tmp_path):
    target = recorder(tmp_path)
    threads = [threading.Thread(target=write, args=(target, i * 1000, 1000)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _, records, lost = read_ring(target.path)

    assert lost == 0
    assert sorted(records["start_ns"].tolist()) == list(range(4000))
    assert records["number"].tolist() == list(range(1, 4001))


def test_a_forked_child_opens_its_own_ring_at_its_first_record(tmp_path):
    target = recorder(tmp_path, rank=1, attempt=2)
    target.emit(10, 1, 0)
    pid = os.fork()
    if pid == 0:
        target.set_worker(3)
        target.emit(22, 2, 0)
        target.emit(22, 3, 0)
        os._exit(0)
    os.waitpid(pid, 0)
    target.emit(10, 4, 0)
    child_header, child, _ = read_ring(tmp_path / "rings" / f"a2-r1-p{pid}.ring")
    header, mine, _ = read_ring(target.path)

    assert mine["start_ns"].tolist() == [1, 4]
    assert child["start_ns"].tolist() == [2, 3]
    assert (header.role, header.worker, header.rank, header.attempt) == ("main", -1, 1, 2)
    assert (child_header.role, child_header.worker, child_header.pid) == ("loader", 3, pid)
    assert child_header.capacity == WORKER_CAPACITY


def test_a_child_that_records_nothing_leaves_no_ring(tmp_path):
    target = recorder(tmp_path)
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)

    assert [path.name for path in (tmp_path / "rings").iterdir()] == [Path(target.path).name]


def test_a_recycled_pid_does_not_overwrite_an_older_ring(tmp_path):
    first, second = recorder(tmp_path), recorder(tmp_path)
    first.emit(10, 1, 0)
    second.emit(10, 2, 0)

    assert first.path != second.path
    assert read_ring(first.path)[1]["start_ns"].tolist() == [1]


def test_the_header_says_when_the_process_started_and_ended(tmp_path):
    target = recorder(tmp_path)
    assert RingReader(target.path).header.end_ns == 0
    target.close()
    header = RingReader(target.path).header

    assert 0 < header.process_start_ns <= header.clock_ns + 20_000_000 <= header.end_ns + 20_000_000
    assert process_start_ns("0") == 0


def test_records_survive_a_process_that_is_killed(tmp_path):
    code = (
        "import os, signal; from headway.trace.ring import Recorder\n"
        f"r = Recorder({str(tmp_path)!r})\n"
        "for i in range(100): r.emit(10, i, 0)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    (ring,) = tmp_path.glob("*.ring")

    assert read_ring(ring)[1]["start_ns"].tolist() == list(range(100))


def test_a_folder_that_cannot_be_written_is_one_warning_and_no_failure(tmp_path, capsys):
    (tmp_path / "rings").write_text("a file, not a folder")
    target = Recorder(str(tmp_path / "rings"))
    target.emit(10, 0, 0)
    target.emit(10, 1, 0)

    assert target.broken
    assert capsys.readouterr().err.count("nothing is recorded") == 1


@pytest.mark.parametrize("content", [b"", b"hello", b"x" * HEADER_BYTES])
def test_a_file_that_is_no_ring_is_a_clear_error(content, tmp_path):
    (tmp_path / "a.ring").write_bytes(content)
    with pytest.raises(FormatError, match=r"is not a headway ring.*Leave it out"):
        RingReader(tmp_path / "a.ring")


def test_a_ring_that_was_cut_off_is_a_clear_error(tmp_path):
    target = recorder(tmp_path)
    (tmp_path / "cut.ring").write_bytes(Path(target.path).read_bytes()[: HEADER_BYTES + 100])
    with pytest.raises(FormatError, match="is cut off"):
        RingReader(tmp_path / "cut.ring")


def test_a_capacity_that_is_no_power_of_two_is_refused(tmp_path):
    with pytest.raises(ValueError, match="power of two"):
        Recorder(str(tmp_path), capacity=1000)


def test_a_record_in_the_middle_of_opening_the_ring_is_left_out_and_hangs_nothing(tmp_path):
    code = (
        "from headway.trace.ring import Recorder\n"
        f"r = Recorder({str(tmp_path)!r})\n"
        "claim = r._claim\n"
        "def collected(stem): r.emit(1, 0, 0); return claim(stem)\n"  # as a garbage collection may
        "r._claim = collected\n"
        "r.emit(10, 1, 0); r.emit(10, 2, 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    (ring,) = tmp_path.glob("*.ring")

    assert read_ring(ring)[1]["start_ns"].tolist() == [1, 2]


def test_a_full_disk_is_a_warning_and_leaves_no_file(tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    target = Recorder(str(tmp_path))
    target.emit(10, 0, 0)

    assert "No space left" in target.broken
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err.count("nothing is recorded") == 1


def test_a_warning_without_a_stderr_stops_nothing(tmp_path, monkeypatch):
    (tmp_path / "rings").write_text("a file, not a folder")
    monkeypatch.setattr(sys, "stderr", None)
    Recorder(str(tmp_path / "rings")).emit(10, 0, 0)
