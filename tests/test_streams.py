"""Streams: rank 0 byte for byte, others by line; logs and memory bounded; a slow or absent reader harms nobody."""

import os
import pty
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.runtime.run_folder.problems import Problems
from headway.runtime.run_folder.streams import BoundedLog, Streams, Tail, write_all
from tests.paths import ROOT


@given(writes=st.lists(st.binary(min_size=1, max_size=40), max_size=40), limit=st.integers(2, 200))
def test_a_log_never_exceeds_its_limit_and_ends_with_what_was_written_last(writes, limit, tmp_path_factory):
    log = BoundedLog(tmp_path_factory.mktemp("logs") / "r0.out", limit)
    for data in writes:
        log.write(data)
    log.close()
    kept = (log.rotated.read_bytes() if log.rotated.exists() else b"") + log.path.read_bytes()

    assert len(kept) <= limit
    assert b"".join(writes).endswith(log.path.read_bytes())
    if sum(map(len, writes)) <= limit // 2:
        assert kept == b"".join(writes)


def test_a_log_without_room_costs_no_output(tmp_path, capfd):
    (tmp_path / "r0.out").symlink_to("/dev/full")
    streams = Streams(tmp_path, problems := Problems(), limit_bytes=1 << 16)
    ends = streams.attach(0, plain=True, label="default0", alone=True)
    streams.start()
    for _ in range(3):
        os.write(ends[0], b"x" * 10_000)
        streams.finish()
    for end in ends:
        os.close(end)
    streams.close()

    assert capfd.readouterr().out == "x" * 30_000
    assert problems.lines() == [f"the recording lacks 30000 bytes of {tmp_path / 'r0.out'}: No space left on device"]


@given(writes=st.lists(st.binary(min_size=1, max_size=30), max_size=60), limit=st.integers(1, 100))
def test_a_tail_is_a_bounded_end_and_knows_when_its_parts_came(writes, limit):
    tail = Tail(limit)
    for moment, data in enumerate(writes):
        tail.add(data, moment)
    whole = b"".join(writes)

    assert whole.endswith(bytes(tail._data))
    assert min(len(whole), limit) <= len(tail._data) <= 2 * limit + 30
    if writes:
        assert tail.arrival_ns(bytes(tail._data[-1:])) == len(writes) - 1
    assert Tail().arrival_ns(b"x") is None


def test_the_moment_of_a_word_is_that_of_its_last_occurrence():
    tail = Tail()
    for moment, data in enumerate([b"Trace", b"back: one\n", b"noise\n", b"Traceback: two\n"]):
        tail.add(data, moment)

    assert tail.arrival_ns(b"Traceback") == 3
    assert tail.text().count("Traceback") == 2


def captured(tmp_path: Path, writes: list[tuple[int, str, bytes]], *, json: bool = False) -> tuple[bytes, bytes, Path]:
    """Pass `writes` (rank, stream, data) through `Streams` in a process of its own; returns its stdout and stderr."""
    code = f"""
import os
from pathlib import Path
from headway.runtime.run_folder.problems import Problems
from headway.runtime.run_folder.streams import Streams
streams = Streams(Path({str(tmp_path / "logs")!r}), Problems(), limit_bytes=1 << 20, stdout_to_stderr={json})
fds = {{rank: dict(zip(("out", "err"), streams.attach(rank, plain=rank == 0, label=f"default{{rank}}")))
       for rank in (0, 1)}}
streams.start()
for rank, stream, data in {writes!r}:
    os.write(fds[rank][stream], data)
for ends in fds.values():
    for fd in ends.values():
        os.close(fd)
streams.close()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, timeout=60, check=True)
    return done.stdout, done.stderr, tmp_path / "logs"


def test_rank_0_comes_through_byte_for_byte_and_the_others_by_line(tmp_path):
    bar = b"\rstep 1/2\rstep 2/2"
    out, err, logs = captured(
        tmp_path,
        [
            (0, "out", b"\xff\x00no newline"), (0, "err", bar), (1, "out", b"one\ntw"), (1, "out", b"o\n"),
            (1, "err", bar),
        ],
    )  # fmt: skip

    assert b"\xff\x00no newline" in out
    assert out.endswith(b"two\n") or b"one\ntwo\n" in out
    assert b"default1" not in out
    assert err.startswith(bar)
    assert err.endswith(b"[default1]:step 1/2\n[default1]:step 2/2\n")
    assert (logs / "r1.out").read_bytes() == b"one\ntwo\n"
    assert (logs / "r0.err").read_bytes() == bar


def test_a_line_that_never_ends_is_passed_on_in_pieces(tmp_path):
    out, _, _ = captured(tmp_path, [(1, "out", b"x" * 60_000), (1, "out", b"y" * 60_000)])

    assert out.count(b"x") == out.count(b"y") == 60_000


def test_a_reader_that_went_away_costs_the_output_not_the_log(tmp_path):
    code = f"""
import os, sys
from pathlib import Path
from headway.runtime.run_folder.problems import Problems
from headway.runtime.run_folder.streams import Streams
streams = Streams(Path({str(tmp_path)!r}), Problems(), limit_bytes=1 << 20)
out, err = streams.attach(0, plain=True, label="default0")
streams.start()
os.write(out, b"first\\n"); sys.stdin.read()
os.write(out, b"second\\n"); os.close(out); os.close(err); streams.close()
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdout.readline() == b"first\n"
    process.stdout.close()
    process.stdin.close()

    assert process.wait(60) == 0
    assert (tmp_path / "r0.out").read_bytes() == b"first\nsecond\n"


def test_a_full_disk_ends_a_run_as_it_ends_python(tmp_path):
    script = tmp_path / "prints.py"
    script.write_text("print('x' * 100_000)\n")
    plain = [sys.executable, str(script)]
    recorded = [sys.executable, "-m", "headway.cli", "run", "--out", str(tmp_path / "run"), "--", str(script)]
    with open("/dev/full", "wb") as full:
        codes = [
            subprocess.run(command, stdout=full, stderr=subprocess.PIPE, cwd=ROOT) for command in (plain, recorded)
        ]

    assert {done.returncode for done in codes} <= {1, 120}
    assert codes[1].returncode == 120
    assert b"stdout was cut short" in codes[1].stderr


def test_a_slow_reader_gets_every_byte():
    read, write = os.pipe()
    os.set_blocking(write, False)
    got = bytearray()

    def slowly() -> None:
        while data := os.read(read, 65536):
            got.extend(data)
            time.sleep(0.0001)

    reader = threading.Thread(target=slowly)
    reader.start()
    write_all(write, b"z" * 1_000_000)
    os.close(write)
    reader.join()
    os.close(read)

    assert len(got) == 1_000_000


@pytest.mark.slow
def test_on_a_terminal_rank_0_sees_one_too_and_the_status_line_never_cuts_into_its_lines(tmp_path):
    job = tmp_path / "job.py"
    job.write_text(
        "import os, sys, time\n"
        "print('tty', sys.stdout.isatty(), os.get_terminal_size().columns)\n"
        "sys.stderr.write('bar 1/2'); sys.stderr.flush(); time.sleep(1.5)\n"
        "sys.stderr.write('\\rbar 2/2\\n'); sys.stderr.flush(); time.sleep(1.5)\n"
    )
    code = (
        "import sys; from pathlib import Path; from headway.runtime.launching.launch import LaunchOptions, launch;"
        f"launch(LaunchOptions(out=Path({str(tmp_path / 'run')!r})), [{str(job)!r}])"
    )
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=terminal, stdout=terminal, stderr=terminal, cwd=ROOT,
        env={**os.environ, "HEADWAY": "off", "NO_COLOR": "1", "COLUMNS": "80", "TERM": "xterm"},
    )  # fmt: skip
    os.close(terminal)
    screen = bytearray()
    try:
        while data := os.read(controller, 65536):
            screen += data
    except OSError:
        pass
    process.wait(60)
    os.close(controller)

    assert b"tty True" in screen
    assert b"bar 1/2\rbar 2/2" in screen  # nothing was drawn while the bar's line was unfinished
    assert b"starting up" in screen.split(b"bar 2/2")[1]
    assert b"\x1b[3" not in screen  # NO_COLOR


def test_a_process_left_behind_with_the_pipes_open_does_not_hold_the_end_up_and_nothing_is_lost(tmp_path):
    streams = Streams(tmp_path / "logs", Problems(), limit_bytes=1 << 24, stdout_to_stderr=True)
    out, err = streams.attach(3, plain=False, label="default3")
    streams.start()
    text = b"a line\n" * 100_000

    for begin in range(0, len(text), 1 << 16):
        os.write(out, text[begin : begin + (1 << 16)])
    streams.finish(float("inf"), rank=3)  # returns, although nobody has closed them

    assert (tmp_path / "logs" / "r3.out").stat().st_size == len(text)
    os.close(out), os.close(err)
    streams.close()
