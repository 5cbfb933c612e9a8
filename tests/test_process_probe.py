"""Questions to a process from outside: its state, and its stacks by a signal that it catches, never for long."""

import os
import signal
import subprocess
import sys
import time

import pytest

from headway.runtime.host.process_probe import HALTED, SIGNAL, ask, catches, register_stacks, state
from tests.launching import wait_for

ASLEEP = """
import sys, time
sys.path.insert(0, {root!r})
from headway.runtime.host.process_probe import register_stacks
number = register_stacks({path!r})
def waits_here():
    print(number, flush=True)
    time.sleep(300)
waits_here()
"""


@pytest.fixture
def asleep(tmp_path):
    """Yield (process, file of its stacks) of one that has registered, and sleeps."""
    path = tmp_path / "a0-r0-p1.stacks"
    file = tmp_path / "schläft" / "wait α.py"
    file.parent.mkdir()
    file.write_text(ASLEEP.format(root=os.getcwd(), path=str(path)))
    process = subprocess.Popen([sys.executable, str(file)], stdout=subprocess.PIPE, text=True)
    assert int(process.stdout.readline()) == SIGNAL
    wait_for(lambda: state(process.pid) == "S")  # it sleeps; until then it is one line above
    yield process, path
    process.kill()
    process.communicate()


def test_a_sleeping_process_writes_where_it_sleeps_and_sleeps_on(asleep):
    process, path = asleep
    for _ in range(2):
        answer = ask({3: process.pid}, {3: SIGNAL}, {3: path}, deadline_s=20.0)[3]

        assert 'schläft/wait α.py", line 8 in waits_here' in answer["stack"]
        assert answer["stack"].count("waits_here") == 1
        assert answer["cpu_fraction"] < 0.5
    assert process.poll() is None


def test_a_stopped_process_does_not_answer_and_is_not_waited_for(asleep):
    process, path = asleep
    os.kill(process.pid, signal.SIGSTOP)
    wait_for(lambda: state(process.pid) == "T")
    began = time.monotonic()
    answer = ask({0: process.pid}, {0: SIGNAL}, {0: path}, deadline_s=0.5)[0]

    assert answer["stack"] == HALTED
    assert time.monotonic() - began < 10


def test_a_process_without_a_handler_is_never_signalled(tmp_path):
    process = subprocess.Popen(["sleep", "300"])
    try:
        answer = ask({0: process.pid}, {0: SIGNAL}, {0: tmp_path / "none"}, deadline_s=0.3)[0]

        assert not catches(process.pid, SIGNAL)
        assert answer["stack"].startswith("not asked")
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_a_process_that_is_gone_is_gone(tmp_path):
    process = subprocess.Popen(["true"])
    process.wait()
    answer = ask({0: process.pid}, {0: SIGNAL}, {0: tmp_path / "none"}, deadline_s=0.3)[0]

    assert state(process.pid) == "X"
    assert (answer["cpu_fraction"], answer["wait_channel"]) == (0.0, "")


def test_a_signal_that_somebody_else_handles_is_left_to_them(tmp_path):
    before = signal.signal(SIGNAL, lambda *_: None)
    try:
        assert register_stacks(str(tmp_path / "x")) == 0
    finally:
        signal.signal(SIGNAL, before)
