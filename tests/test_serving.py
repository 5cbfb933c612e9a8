"""A server is started once, detached from who started it, and says why when it cannot be."""

import os
import signal
import socket
import time

import pytest

from headway.core.errors import HeadwayError
from headway.core.wire.channel import hold_lock
from headway.data import DataServer
from headway.data.service import torch_start as serving
from headway.runtime.in_rank import bootstrap
from tests.datasets import Sized
from tests.launching import wait_for
from tests.served_made import end, has_ended, server_of
from tests.served_made import runtime as runtime
from tests.spawn import run_threads
from tests.test_server import facts


class Numbers(Sized):
    """Says in which process it is read; is odd in ways that are asked for."""

    def __init__(self, size=8, refuses=False, hangs=False):
        self.size, self.refuses, self.hangs = size, refuses, hangs

    def __getitem__(self, k):
        time.sleep(60 * self.hangs)
        return k

    def fingerprint(self):
        """Looked at when it is served."""
        if self.refuses:
            raise RuntimeError("this dataset refuses to be known")
        return "numbers"


def test_callers_at_once_start_one_server(runtime):
    path = serving.path_for(Numbers())
    run_threads(serving.start, [(path, Numbers(), DataServer()) for _ in range(3)])

    assert facts(path)["fingerprint"].startswith("numbers[8] ")
    assert path.with_suffix(".log").read_text().count(" serving ") == 1
    assert sorted(p.suffix for p in runtime.iterdir()) == [".lock", ".log", ".sock"]


def test_it_is_detached_and_keeps_no_socket_or_pipe_of_its_first_client(runtime):
    """A peer of the client must see the client's end, whatever the server still does."""
    ours, theirs = socket.socketpair()
    reads, writes = os.pipe()
    path = serving.path_for(Numbers())
    serving.start(path, Numbers(), DataServer())
    pid = server_of(path)
    ours.close()
    os.close(writes)

    assert theirs.recv(1) == b""
    assert os.read(reads, 1) == b""
    assert os.getsid(pid) != os.getsid(0)
    assert os.getpgid(pid) != os.getpgid(0)
    theirs.close()
    os.close(reads)


def test_it_ends_when_it_is_told_to_and_leaves_nothing(runtime):
    path = serving.path_for(Numbers())
    serving.start(path, Numbers(), DataServer())
    pid = server_of(path)
    os.kill(pid, signal.SIGTERM)

    wait_for(lambda: has_ended(pid))
    assert list(runtime.iterdir()) == []


def test_what_a_killed_server_left_goes_after_a_week_and_a_live_ones_log_stays(runtime):
    killed, alive, new = (serving.path_for(Numbers(size)) for size in (8, 9, 10))
    for size, path in ((8, killed), (9, alive)):
        serving.start(path, Numbers(size), DataServer())
    end(killed, signal.SIGKILL)
    for path in (killed, alive):
        os.utime(path.with_suffix(".log"), (0, 0))
    assert killed.exists()
    serving.start(new, Numbers(10), DataServer())

    assert {p.name.partition(".")[0] for p in runtime.iterdir()} == {alive.stem, new.stem}
    assert alive.with_suffix(".log").exists()


def test_a_server_that_hangs_in_its_dataset_is_ended(runtime, monkeypatch):
    monkeypatch.setattr(serving, "START_S", 0.5)
    path = serving.path_for(Numbers())
    with pytest.raises(HeadwayError, match="did not start: it did not within"):
        serving.start(path, Numbers(hangs=True), DataServer())
    monkeypatch.undo()

    wait_for(lambda: not serving._listens(path))
    serving.start(path, Numbers(), DataServer())
    assert facts(path)["size"] == 8


def test_who_waits_for_another_starter_waits_no_longer_than_asked(runtime):
    path = serving.path_for(Numbers())
    lock = hold_lock(serving._starting(path), wait=False)
    with pytest.raises(TimeoutError, match="another process still starts"):
        serving.start(path, Numbers(), DataServer(), timeout_s=0.1)

    serving._starting(path).unlink()
    os.close(lock)


def test_a_dataset_that_cannot_be_served_is_the_callers_to_hear(runtime):
    path = serving.path_for(Numbers())
    with pytest.raises(HeadwayError, match="did not start: RuntimeError: this dataset refuses to be known"):
        serving.start(path, Numbers(refuses=True), DataServer())

    assert "Traceback" in path.with_suffix(".log").read_text()
    assert not path.exists()
    serving.start(path, Numbers(), DataServer())
    end(path)


def test_a_fork_that_leaves_records_nothing_more(tmp_path):
    session = bootstrap.start_here({"HEADWAY_RUN": str(tmp_path)})
    try:
        bootstrap.leave()

        assert bootstrap.active() is None
        assert session.probes.recorder.broken
    finally:
        bootstrap._SESSIONS["active"] = session
        session.stop()
