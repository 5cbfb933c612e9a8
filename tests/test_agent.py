"""The ranks as processes: settled blame, forwarded signals, nothing left running."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.runtime.host.rank_env import INJECT
from headway.runtime.launching.agent import Group, RankSpec, Signals
from tests.paths import ROOT, python_path


def group_of(*scripts: str) -> Group:
    """Return a started group of Python one-liners, one per rank, writing to our own streams."""
    specs = [
        RankSpec(rank, rank, (sys.executable, "-S", "-c", f"import os, signal, sys, time\n{text}"), dict(os.environ))
        for rank, text in enumerate(scripts)
    ]
    group = Group(specs)
    group.start(lambda spec: (1, 2))
    return group


WAIT = "for _ in range(1200): time.sleep(0.05)"
"""Python does not see a signal that arrives right before its sleep begins until that has ended."""


def test_a_group_that_is_overdue_is_stopped_and_says_so():
    group = group_of("time.sleep(60)", "time.sleep(60)")
    group.overdue = lambda: True
    with Signals() as signals:
        group.wait(signals, grace_s=5.0)

    assert group.hung
    assert [rank.code for rank in group.ranks] == [-signal.SIGTERM] * 2


@settings(max_examples=5)
@given(codes=st.lists(st.integers(0, 255), min_size=1, max_size=3))
def test_the_first_failure_ends_the_others_and_successes_end_by_themselves(codes):
    group = group_of(*[f"sys.exit({code})" for code in codes])
    with Signals() as signals:
        group.wait(signals, grace_s=1.0)

    assert not group.running
    assert group.failed == any(codes)
    for rank, code in zip(group.ranks, codes, strict=True):
        assert rank.code == code or (rank.told and rank.code == -signal.SIGTERM)
        assert rank.start_ns < rank.end_ns


def test_a_rank_that_blames_its_connection_gives_the_guilty_one_time_to_show():
    group = group_of("sys.exit(1)", "time.sleep(0.3); sys.exit(2)", "time.sleep(60)")
    with Signals() as signals:
        group.wait(signals, grace_s=1.0, is_secondary=lambda rank: rank.code == 1)

    assert [rank.code for rank in group.ranks] == [1, 2, -signal.SIGTERM]
    assert [rank.told for rank in group.ranks] == [False, False, True]


def test_a_rank_that_ignores_sigterm_is_killed_after_its_grace():
    group = group_of(
        "signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(60)", "time.sleep(0.5); sys.exit(3)"
    )
    with Signals() as signals:
        group.wait(signals, grace_s=0.2)

    assert [rank.code for rank in group.ranks] in ([-signal.SIGKILL, 3], [-signal.SIGTERM, 3])


def test_user_signals_are_handed_on_and_stop_nothing():
    with Signals() as signals:
        group = group_of(f"signal.signal(10, lambda *_: sys.exit(0)); os.kill(os.getppid(), 10)\n{WAIT}")
        group.wait(signals, grace_s=1.0)

    assert group.ranks[0].code == 0
    assert not signals.stop


@pytest.mark.parametrize(("number", "preempted"), [(signal.SIGTERM, True), (signal.SIGINT, False)])
def test_a_stop_signal_is_forwarded_as_it_came(number, preempted):
    code = f"signal.signal({int(number)}, lambda *_: sys.exit(5)); os.kill(os.getppid(), {int(number)})\n{WAIT}"
    with Signals() as signals:  # before the rank, which may be quick
        group = group_of(code)
        group.wait(signals, grace_s=30.0)

    assert group.ranks[0].code == 5
    assert signals.preempted is preempted


def test_the_previous_handlers_come_back():
    before = signal.getsignal(signal.SIGTERM)
    with Signals():
        assert signal.getsignal(signal.SIGTERM) != before

    assert signal.getsignal(signal.SIGTERM) == before


def test_outside_the_main_thread_signals_stay_the_callers():
    seen: list[bool] = []

    def other() -> None:
        before = signal.getsignal(signal.SIGTERM)
        with Signals():
            seen.append(signal.getsignal(signal.SIGTERM) == before)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()

    assert seen == [True]


def test_a_program_that_does_not_exist_ends_the_ranks_that_had_started():
    specs = [
        RankSpec(0, 0, (sys.executable, "-c", "import time; time.sleep(60)"), dict(os.environ)),
        RankSpec(1, 1, ("/no/such/program",), dict(os.environ)),
    ]
    group = Group(specs)
    with pytest.raises(FileNotFoundError):
        group.start(lambda spec: (1, 2))

    assert group.ranks[0].code == -signal.SIGKILL


def test_a_rank_has_the_files_that_the_launcher_was_given_to_hand_on():
    reading, writing = os.pipe()
    try:
        os.set_inheritable(reading, True)
        os.write(writing, b"four")
        group = group_of(f"sys.exit(len(os.read({reading}, 9)))")
        with Signals() as signals:
            group.wait(signals, grace_s=5.0)
    finally:
        os.close(reading)
        os.close(writing)

    assert group.ranks[0].code == 4


def test_a_rank_may_ask_for_the_session_and_the_group_that_it_leads_already(tmp_path):
    script = "import os; os.setpgrp(); os.setpgid(0, 0); os.setsid(); assert os.getpgrp() == os.getpid()"
    env = {**os.environ, "HEADWAY_RUN": str(tmp_path), "PYTHONPATH": python_path(INJECT)}
    group = Group([RankSpec(0, 0, (sys.executable, "-c", script), env)])
    group.start(lambda spec: (1, 2))
    with Signals() as signals:
        group.wait(signals, grace_s=5.0)

    assert group.ranks[0].code == 0


def test_what_a_clean_rank_leaves_running_is_left_alone(tmp_path):
    pid = str(tmp_path / "pid")
    group = group_of(f"import subprocess; p = subprocess.Popen(['sleep', '60']); open({pid!r}, 'w').write(str(p.pid))")
    with Signals() as signals:
        group.wait(signals, grace_s=1.0)
    child = int((tmp_path / "pid").read_text())

    os.kill(child, 0)
    os.kill(child, signal.SIGKILL)


def test_a_rank_whose_launcher_is_killed_is_asked_to_end_and_may_save_first(tmp_path):
    rank = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (open('saved', 'w').close(), sys.exit(0)));"
        "open('ready', 'w').close(); time.sleep(60)"
    )
    launcher = (
        "import os, sys, time; from pathlib import Path\n"
        "from headway.runtime.launching.agent import RankProcess, RankSpec\n"
        f"RankProcess(RankSpec(0, 0, (sys.executable, '-c', {rank!r}), os.environ), 1, 2)\n"
        "while not Path('ready').exists(): time.sleep(0.01)\n"
        "os.kill(os.getpid(), 9)"
    )
    environ = {**os.environ, "PYTHONPATH": python_path(ROOT)}
    subprocess.run([sys.executable, "-c", launcher], cwd=tmp_path, env=environ, timeout=60, check=False)

    for _ in range(1000):
        if (tmp_path / "saved").exists():
            return
        time.sleep(0.01)
    raise AssertionError("it was not asked to end")
