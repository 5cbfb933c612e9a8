"""Jobs that are stopped save first: at one step on all ranks, within the grace, and only where they saved before."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.rng import derived_seed
from headway.runtime.launching.save_and_leave import LeaveBoard, Leaving
from tests.launching import ROOT, run, script, start, wait_for
from tests.recorded import environment

JOB = str(ROOT / "tests" / "jobs" / "leaving.py")


@given(st.integers(1, 4), st.randoms(use_true_random=False))
def test_ranks_that_are_asked_at_unlike_moments_save_one_step(num_ranks: int, draws: random.Random) -> None:
    """Any order of step ends in which no rank is a step ahead of one that has not entered the next."""
    board = LeaveBoard.make(num_ranks)
    ranks = [Leaving(board.variable(index)) for index in range(num_ranks)]
    for rank in ranks:
        rank.announce()
    done, numbers, saved = [0] * num_ranks, dict[int, int](), dict[int, list[int]]()
    asked_at = draws.randrange(20)
    for turn in range(40 * num_ranks):
        if turn == asked_at:
            assert board.ask(60.0)
        index = draws.choice([i for i in range(num_ranks) if done[i] == min(done)] or [0])
        done[index] += 1

        def said(step: int, index: int = index) -> list[int] | None:
            numbers.setdefault(index, step)
            return list(numbers.values()) if len(numbers) == num_ranks else None

        if ranks[index].is_due(done[index], said):
            saved.setdefault(index, []).append(done[index])

    assert len({tuple(steps) for steps in saved.values()}) == 1
    assert len(saved) == num_ranks
    assert all(len(steps) == 1 for steps in saved.values())


def test_nobody_is_asked_where_one_rank_never_saved():
    board = LeaveBoard.make(2)
    first, second = (Leaving(board.variable(index)) for index in range(2))
    first.announce()

    assert not board.ask(1.0)
    assert not first.is_asked
    second.announce()
    assert board.ask(1.0)
    assert first.is_asked
    assert second.is_asked


@pytest.mark.parametrize("value", [None, "0:0:1", "99999:0:1", "many"])
def test_without_the_board_nothing_is_asked(value):
    leaving = Leaving({} if value is None else {"HEADWAY_LEAVE": value})
    leaving.announce()

    assert not leaving.is_asked
    assert not leaving.is_due(1, lambda step: [step])


def test_programs_that_a_rank_starts_do_not_inherit_the_board(tmp_path):
    job = script(tmp_path, 'import os; os.system("ls -l /proc/self/fd"); print(os.environ["HEADWAY_LEAVE"])')
    found = run(tmp_path / "run", [job], nproc_per_node=1)

    assert "/proc/" in found.stdout, found.stderr
    assert "headway-leave" not in found.stdout


def stopped(folder, out, steps, *words, ranks=1, after_s=0.0, grace_s=30.0, twice=False):
    """Start the job and send SIGTERM `after_s` after all ranks are ready; returns (exit class, stderr, seconds)."""
    for path in folder.glob("ready-*"):
        path.unlink()
    process = start(out, [JOB, str(folder), str(steps), *words], nproc_per_node=ranks, grace_s=grace_s)
    wait_for(lambda: len(list(folder.glob("ready-*"))) == ranks or process.poll() is not None)
    time.sleep(after_s)
    began_s = time.monotonic()
    process.send_signal(signal.SIGTERM)
    if twice:
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=90)
    return json.loads((out / "run.json").read_text())["exit"]["class"], stderr, time.monotonic() - began_s


def undisturbed(folder, steps, ranks):
    folder.mkdir()
    assert run(folder / "run", [JOB, str(folder), str(steps)], nproc_per_node=ranks).returncode == 0
    return [(folder / f"final-{rank}").read_text() for rank in range(ranks)]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("moments", [2])
def test_a_job_that_is_stopped_again_and_again_ends_bit_for_bit_as_undisturbed(tmp_path, moments):
    steps, draws, left = 100 * moments, random.Random(derived_seed(7, "moments", moments)), [0]
    for moment in range(moments):
        out = tmp_path / f"run-{moment}"
        cls, stderr, _ = stopped(tmp_path, out, steps, ranks=2, after_s=draws.random() * 0.15)

        assert cls == "preempted", stderr
        found = re.findall(r"step (\d+) is saved; leaving, as SIGTERM", stderr)
        assert found, stderr
        left.append(int(found[0]))
        assert left[-1] > left[-2]
        assert not list(tmp_path.glob("final-*")), "the job must be long enough to be stopped"
    last = run(tmp_path / "run-last", [JOB, str(tmp_path), str(steps)], nproc_per_node=2)

    assert last.returncode == 0, last.stderr
    assert [(tmp_path / f"final-{rank}").read_text() for rank in (0, 1)] == undisturbed(tmp_path / "plain", steps, 2)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_job_that_is_stopped_while_it_saves_leaves_behind_a_later_step_and_goes_on_from_it(tmp_path):
    """At every step a save of 32 MB begins: whenever the signal comes, one is under way."""
    cls, stderr, _ = stopped(tmp_path, tmp_path / "run", 60, "saving", after_s=0.2)
    (left,) = re.findall(r"step (\d+) is saved; leaving, as SIGTERM", stderr)
    last = run(tmp_path / "run-last", [JOB, str(tmp_path), "60", "saving"], nproc_per_node=1)

    assert (cls, last.returncode) == ("preempted", 0), stderr + last.stderr
    assert 0 < int(left) < 60
    (tmp_path / "plain").mkdir()
    plain = subprocess.run([sys.executable, JOB, tmp_path / "plain", "60", "saving"], env=environment(None), timeout=90)
    assert plain.returncode == 0
    assert (tmp_path / "final-0").read_text() == (tmp_path / "plain" / "final-0").read_text()


@pytest.mark.slow
def test_the_scripts_own_handler_runs_after_the_save(tmp_path):
    cls, stderr, _ = stopped(tmp_path, tmp_path / "run", 100_000, "own")

    step = int(re.findall(r"step (\d+) is saved", stderr)[0])
    assert cls == "preempted"
    assert int((tmp_path / "own-0").read_text()) == step + 1  # the update that found the save finished its step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "options", "most_s"),
    [("never", {}, 15.0), ("stuck", {"twice": True, "grace_s": 60.0}, 30.0)],  # half of the grace
    ids=["a script that never saved", "a second signal to a job that saves"],
)
def test_what_will_not_be_saved_is_not_waited_for(tmp_path, way, options, most_s):
    cls, stderr, took_s = stopped(tmp_path, tmp_path / "run", 100_000, way, **options)

    assert cls == "preempted"
    assert "is saved" not in stderr
    assert took_s < most_s
