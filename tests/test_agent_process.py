"""The agent as a process: what it is told, what it answers, and how it ends."""

import contextlib
import errno
import logging
import os
import re
import signal
import subprocess
import sys
import time
from unittest import mock

import psutil
import pytest

from headway.checkpoint.agent import agent as agents
from headway.checkpoint.agent.agent import pace_from, socket_path
from headway.checkpoint.agent.link import AgentLink, ask, environment, finish
from headway.checkpoint.agent.messages import (
    FROM_AGENT,
    FROM_CALLER,
    Committed,
    Failed,
    Finish,
    Hello,
    Persist,
    Persisted,
)
from headway.core.errors import InputError
from headway.core.files.private import runtime_directory
from headway.core.machine.arena import shared_memory
from headway.core.wire.channel import Listener, connect, pair
from headway.core.wire.pace import RateLimiter
from headway.storage.commit import committed

SIZE = 1 << 20


@contextlib.contextmanager
def link_to(root, rank=0, world_size=1, **facts):
    """Yield a link whose arena 0 holds SIZE bytes of 7."""
    file, memory = shared_memory("test", SIZE)
    memory[:] = b"\7" * SIZE
    link = AgentLink(Hello(root=str(root), attempt="a", rank=rank, world_size=world_size, **facts))
    link.arena(0, file.fileno(), SIZE)
    yield link
    link.close()
    file.close()


def save(step):
    return Persist(step=step, attempt="a", number=0, num_bytes=SIZE, begun_ns=time.perf_counter_ns())


def told(link, kind, timeout_s=30.0):
    """Wait for a report of one kind; those that come earlier are let go, later ones kept."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        link.heard = [*getattr(link, "heard", []), *link.poll(0.1)]
        while link.heard:
            message = link.heard.pop(0)
            if isinstance(message, kind):
                return message
    raise AssertionError(f"no {kind.__name__} came")


def gone(pid, timeout_s=20.0):
    """Say whether a process ends in time."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).wait(timeout_s) in (0, None)
    return True


def test_a_save_is_persisted_then_committed_and_its_image_can_be_had_from_memory(tmp_path):
    with link_to(tmp_path) as link:
        link.persist(save(3))
        persisted, done = told(link, Persisted), told(link, Committed)
        held, file = ask(str(tmp_path), 0, 3)
        same = os.pread(file, SIZE, 0) == b"\7" * SIZE
        os.close(file)

        assert persisted.phases[0].name == "checkpoint.persist"
        assert (done.step, done.path) == (3, str(tmp_path / "step-3"))
        assert (held.root, held.name, same) == (done.root, "rank-0/__0_0.distcp", True)
        assert ask(str(tmp_path), 0, 4) is None
        assert not finish(str(tmp_path), 0)  # its trainer lives
        assert psutil.Process(link.pid).nice() == agents.NICE


def test_an_agent_that_is_left_ends_once_it_has_finished_and_leaves_no_file_behind(tmp_path):
    with link_to(tmp_path) as link:
        link.persist(save(3))
        pid = link.pid

    assert gone(pid)
    assert [entry.step for entry in committed(tmp_path)] == [3]
    assert not list(socket_path(tmp_path, 0).parent.glob(socket_path(tmp_path, 0).stem + "*"))


TRAINER = """
import os, sys, time
sys.path.insert(0, {root!r})
from tests.test_agent_process import link_to, save, told
from headway.checkpoint.agent.messages import Committed
with link_to({folder!r}) as link:
    link.persist(save(1))
    told(link, Committed)
    link.persist(save(2))
    print(link.pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
def test_an_agent_outlives_its_trainer_finishes_and_hands_its_image_to_the_next_attempt(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_CKPT_RATE_MB_S", "5")
    code = TRAINER.format(root=str(os.getcwd()), folder=str(tmp_path))
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid = int(trainer.stdout.readline())
    trainer.send_signal(signal.SIGKILL)  # while step 2 is under way
    trainer.wait()
    trainer.stdout.close()

    had_died = finish(str(tmp_path), 0)
    held, file = ask(str(tmp_path), 0, 2)
    os.close(file)

    assert had_died
    assert held.step == 2
    assert [entry.step for entry in committed(tmp_path)] == [1, 2]
    with link_to(tmp_path) as link:  # the next attempt's first save takes the place
        link.persist(save(3))
        told(link, Committed)
        assert gone(pid)
        assert ask(str(tmp_path), 0, 2) is None


def test_an_orphan_gives_up_a_save_that_the_other_ranks_agents_will_never_finish(tmp_path, monkeypatch):
    monkeypatch.setattr(agents, "ORPHAN_S", 0.0)
    with link_to(tmp_path, 0, 2) as link:
        link.persist(save(3))
        told(link, Persisted)
        assert finish(str(tmp_path), 0, timeout_s=0.3) is False  # it waits for rank 1
        (tmp_path / ".step-3.a.draft" / ".gone-1").touch()

        failed = told(link, Failed)

    assert "rank 1 could not write its part" in failed.text
    assert not list(tmp_path.glob("*step-3*"))


def test_a_rank_that_cannot_write_tells_its_trainer_and_rank_0(tmp_path):
    blocked = tmp_path / ".step-3.a.draft"
    blocked.mkdir()
    (blocked / "rank-1").write_text("a file in the way")
    with link_to(tmp_path, 0, 2) as first, link_to(tmp_path, 1, 2) as second:
        second.persist(save(3))
        first.persist(save(3))

        assert told(second, Failed).kind in ("NotADirectoryError", "FileExistsError", "OSError")
        assert "rank 1" in told(first, Failed).text


def test_what_killed_agents_left_goes_in_time_and_an_agent_that_lives_on_stays(tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("rt")))
    monkeypatch.setattr("headway.core.wire.channel.KEEP_LOG_S", -1.0)
    folder = runtime_directory()
    dead = f"ckpt-{os.urandom(8).hex()}-0"
    for suffix in (".7.log", ".sock", ".sock.lock"):
        (folder / f"{dead}{suffix}").touch()
    with link_to(tmp_path / "old") as old:
        old.persist(save(3))
        told(old, Committed)
        with link_to(tmp_path / "new") as new:
            new.persist(save(1))  # starts an agent, which sweeps first
            told(new, Committed)
        found = ask(str(tmp_path / "old"), 0, 3)

    os.close(found[1])
    assert not list(folder.glob(f"{dead}*"))


def test_a_successor_that_is_gone_before_its_answer_leaves_room_for_the_next(tmp_path):
    ours, theirs = pair(types=FROM_CALLER)
    agent, path = agents.Agent(theirs, pace=RateLimiter()), tmp_path / "s"
    agent._listener = Listener(path, types=FROM_CALLER)
    agent._loop.admit(agent._listener, agent._call)
    for _ in range(3):
        caller = connect(path, types=FROM_AGENT)
        caller.send(Finish())
        agent._loop.turn(20.0)
        agent._loop.turn(20.0)
        assert agent._loop.num_callers == 1
        caller.close()
        agent._answer_successors()

        assert (len(agent._callers), agent._loop.num_callers) == (0, 0)
    agent.close("the test ends")
    ours.close()


@pytest.mark.filterwarnings("ignore:the checkpoint agent:RuntimeWarning")
def test_a_save_whose_agent_dies_is_given_up_where_no_other_can_be_started_and_the_next_save_tries(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("HEADWAY_CKPT_RATE_MB_S", "1")
    with link_to(tmp_path) as link:
        link.persist(save(3))
        os.kill(link.pid, signal.SIGKILL)
        monkeypatch.setattr(subprocess, "Popen", mock.Mock(side_effect=OSError(errno.ENOMEM, "no memory")))

        assert re.search("killed by signal 9, and no other one could be started: .*no memory", told(link, Failed).text)
        assert link.outstanding == []
        with pytest.raises(OSError, match="no memory"):
            link.persist(save(3))
        assert link.outstanding == []
        monkeypatch.undo()
        link.persist(save(3))
        assert told(link, Committed).step == 3


def test_the_log_of_an_agent_for_which_everything_goes_wrong_ends_growing(tmp_path, monkeypatch):
    monkeypatch.setattr(agents, "MOST_LOG_BYTES", 5000)
    with open(tmp_path / "log", "a") as said:
        monkeypatch.setattr(sys, "stderr", said)
        handler, log = logging.StreamHandler(said), logging.Logger("everything")
        handler.addFilter(agents._has_room)
        log.addHandler(handler)
        sizes = []
        for _ in range(100):
            log.error("x" * 99)
            sizes.append(os.path.getsize(said.name))

    assert sizes[0] == 100
    assert sizes[-1] == sizes[50] == 5000


def test_the_agents_environment_runs_this_release_and_records_nothing():
    made = environment({"PYTHONPATH": "/elsewhere", "HEADWAY_RUN": "/run", "HOME": "/h"})

    assert made["PYTHONPATH"].split(os.pathsep)[1:] == ["/elsewhere"]
    assert (made["HEADWAY"], made["HOME"]) == ("off", "/h")


@pytest.mark.parametrize("text", ["fast", "-1", "inf", "nan"])
def test_a_rate_that_is_no_number_is_refused(text):
    with pytest.raises(InputError, match=r"HEADWAY_CKPT_RATE_MB_S is .*Set it to one, or unset it"):
        pace_from({"HEADWAY_CKPT_RATE_MB_S": text})
