"""How launched runs end: the first failure named, exits classed, signals obeyed, nothing left behind."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time

import pytest

from headway.runtime.launching.launch import launch
from headway.runtime.launching.options import LaunchOptions
from headway.trace.recording.run_facts import CUT
from headway.trace.recording.runs import Run
from headway.why.verdict import ending
from tests.launching import DDP, alive, run, script, start, wait_for
from tests.paths import ROOT


def test_the_first_failing_ranks_traceback_comes_last_and_its_code_is_the_exit(tmp_path):
    job = script(
        tmp_path,
        """
        import os, sys, time
        rank = int(os.environ["RANK"])
        if rank == 2:
            raise ValueError("boom über rank 2")
        time.sleep(60)
        """,
    )
    done = run(tmp_path / "run", [job], nproc_per_node=4)
    code, cls, first, traceback, _ = json.loads((tmp_path / "run" / "report.json").read_text())

    assert done.stderr.rstrip().endswith("ValueError: boom über rank 2")
    assert (done.returncode, code, cls, first) == (1, 1, "user", 2)
    assert traceback.startswith("Traceback (most recent call last):")
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["exit"] == {"code": 1, "class": "user", "first_rank": 2, "traceback": traceback}
    assert [row["rank"] for row in facts["ranks"]] == [0, 1, 2, 3]


def test_ranks_that_end_together_are_all_named_in_run_json(tmp_path):
    job = script(tmp_path, "import sys, os; sys.exit(0)")
    done = run(tmp_path / "run", [job], nproc_per_node=3)
    facts = json.loads((tmp_path / "run" / "run.json").read_text())

    assert done.returncode == 0
    assert facts["exit"] == {"code": 0, "class": "ok", "first_rank": None, "traceback": None}
    for row in facts["ranks"]:
        assert facts["start_ns"] < row["start_ns"] < row["end_ns"] < facts["end_ns"]
        assert row["exit_code"] == 0


@pytest.mark.parametrize(
    ("line", "cls", "code"),
    [
        ("sys.exit(7)", "user", 7),
        ("os.kill(os.getpid(), 9)", "infra", 137),
        ("os.kill(os.getpid(), 15)", "preempted", 143),
        ("os.abort()", "infra", 134),
        ("raise MemoryError('no room')", "oom", 1),
        ("raise ConnectionResetError('Connection reset by peer')", "infra", 1),
    ],
)
def test_the_exit_is_classed(tmp_path, line, cls, code):
    job = script(tmp_path, f"import os, sys\n{line}\n")
    report = launch(LaunchOptions(out=tmp_path / "run", quiet=True), [job])

    assert (report.cls, report.code, report.first_rank) == (cls, code, 0)


def test_sigterm_reaches_every_rank_and_the_exit_is_preempted(tmp_path):
    job = script(
        tmp_path,
        """
        import os, signal, sys, time
        def leave(*_):
            open(f"{sys.argv[1]}/left-{os.environ['RANK']}", "w").close()
            sys.exit(0)
        signal.signal(signal.SIGTERM, leave)
        open(f"{sys.argv[1]}/ready-{os.environ['RANK']}", "w").close()
        time.sleep(60)
        """,
    )
    process = start(tmp_path / "run", [job, str(tmp_path)], nproc_per_node=2)
    wait_for(lambda: len(list(tmp_path.glob("ready-*"))) == 2)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)

    assert len(list(tmp_path.glob("left-*"))) == 2
    assert json.loads((tmp_path / "run" / "run.json").read_text())["exit"]["class"] == "preempted"


@pytest.mark.parametrize("leave", ["pass", "sys.exit(130)"])
def test_ctrl_c_ends_the_loop_of_the_shell_where_it_ends_a_plain_scripts(tmp_path, leave):
    """A shell goes on after a command that exits, with 130 as well, and ends after one that the signal killed."""
    job = script(
        tmp_path,
        f"""
        import sys, time
        try:
            open(sys.argv[1], "w").close()
            time.sleep(60)
        except KeyboardInterrupt:
            {leave}
            raise
        """,
    )
    ours = [sys.executable, "-m", "headway.cli", "run", "--quiet", "--out", str(tmp_path / "run"), "--"]
    seen = []
    for number, command in enumerate(([sys.executable], ours)):
        ready = tmp_path / f"ready{number}"
        line = shlex.join([*command, job, str(ready)])
        shell = subprocess.Popen(
            ["bash", "-c", f"trap - INT; for turn in 1; do {line}; done; echo on"], cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        wait_for(ready.exists)
        os.killpg(shell.pid, signal.SIGINT)
        stdout, _ = shell.communicate(timeout=60)
        seen.append((stdout, shell.returncode))

    assert seen[0] == seen[1]
    assert seen[0] == (("", -signal.SIGINT) if leave == "pass" else ("on\n", 0))


def test_a_second_interrupt_kills_a_rank_that_ignores_the_first(tmp_path):
    job = script(
        tmp_path,
        """
        import os, signal, sys, time
        signal.signal(signal.SIGINT, lambda *_: open(f"{sys.argv[1]}/asked", "w").close())
        print(os.getpid(), flush=True)
        open(f"{sys.argv[1]}/ready", "w").close()
        while True:
            time.sleep(1)
        """,
    )
    process = start(tmp_path / "run", [job, str(tmp_path)], grace_s=600.0)
    wait_for((tmp_path / "ready").exists)
    process.send_signal(signal.SIGINT)
    wait_for((tmp_path / "asked").exists)
    process.send_signal(signal.SIGINT)
    stdout, _ = process.communicate(timeout=60)

    assert process.returncode == 137
    assert not alive(int(stdout.split()[0]))


def test_a_signal_that_is_ignored_from_the_start_is_ignored_by_launcher_and_ranks(tmp_path):
    """As by a plain script in the background of a shell script that gets Ctrl-C."""
    job = script(
        tmp_path,
        """
        import os, sys, time
        open(f"{sys.argv[1]}/ready", "w").close()
        while not os.path.exists(f"{sys.argv[1]}/go"):
            time.sleep(0.05)
        """,
    )
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = start(tmp_path / "run", [job, str(tmp_path)])
    finally:
        signal.signal(signal.SIGINT, before)
    wait_for((tmp_path / "ready").exists)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    (tmp_path / "go").touch()
    process.communicate(timeout=60)

    assert process.returncode == 0


def test_no_rank_survives_a_killed_launcher_and_what_it_wrote_stays_readable(tmp_path):
    job = script(tmp_path, "import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    process = start(tmp_path / "run", [job], nproc_per_node=2)
    logs = [tmp_path / "run" / "logs" / f"r{rank}.out" for rank in (0, 1)]
    pids = wait_for(lambda: all(p.exists() for p in logs) and [int(p.read_text() or 0) for p in logs])
    pids = wait_for(lambda: all(found := [int(p.read_text() or 0) for p in logs]) and found)
    process.kill()
    process.communicate(timeout=60)
    wait_for(lambda: not any(alive(pid) for pid in pids))

    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (facts["schema"], facts["end_ns"]) == ("headway.run-folder/1", None)


def test_what_a_killed_rank_had_started_is_killed_with_it(tmp_path):
    job = script(
        tmp_path,
        """
        import os, subprocess, sys, time
        if os.environ["RANK"] == "1":
            child = subprocess.Popen(["sleep", "600"])
            open(sys.argv[1] + "/child", "w").write(f"{child.pid}\\n")
            time.sleep(600)
        while not os.path.exists(sys.argv[1] + "/child") or not open(sys.argv[1] + "/child").read().endswith("\\n"):
            time.sleep(0.01)
        sys.exit(4)
        """,
    )
    done = run(tmp_path / "run", [job, str(tmp_path)], nproc_per_node=2)
    child = int((tmp_path / "child").read_text())

    assert done.returncode == 4
    wait_for(lambda: not alive(child))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_of_four_ranks_the_one_that_gave_up_is_blamed_and_as_soon_as_torchrun_says_anything(tmp_path):
    # The same comparison over several rounds, with its figures, is benchmarks/failure_report.py.
    job = script(tmp_path, DDP)
    moments = [tmp_path / "ours", tmp_path / "theirs"]
    done = run(tmp_path / "run", [job, "fail", str(moments[0])], {"HEADWAY": ""}, nproc_per_node=4)
    ended_ns = [time.perf_counter_ns()]
    peer = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", job, "fail",
         str(moments[1])], capture_output=True, text=True, timeout=90,
        env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )  # fmt: skip
    ended_ns.append(time.perf_counter_ns())
    ours_s, theirs_s = ((end - int(m.read_text())) / 1e9 for end, m in zip(ended_ns, moments, strict=True))
    _, cls, first, traceback, _ = json.loads((tmp_path / "run" / "report.json").read_text())

    assert (cls, first) == ("user", 1)
    assert done.returncode == peer.returncode == 1 or done.returncode == 134  # gloo may abort the teardown
    assert done.stderr.rstrip().endswith("RuntimeError: rank 1 gives up")
    assert traceback.splitlines()[-1] == "RuntimeError: rank 1 gives up"
    assert not peer.stderr.rstrip().endswith("RuntimeError: rank 1 gives up")
    assert ours_s < max(2.0, 2 * theirs_s)
    assert Run.open(tmp_path / "run").trace.named("optimizer.step").any()


@pytest.mark.slow
def test_a_run_whose_launcher_was_killed_opens_with_the_steps_that_were_made(tmp_path):
    job = script(
        tmp_path,
        """
        import sys, time, torch
        weight = torch.nn.Parameter(torch.ones(4))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for step in range(10**9):
            weight.sum().backward()
            optimizer.step()
            if step == 50:
                open(sys.argv[1], "w").close()
            time.sleep(0.001)
        """,
    )
    process = start(tmp_path / "run", [job, str(tmp_path / "trained")], {"HEADWAY": ""})
    wait_for((tmp_path / "trained").exists)
    process.kill()
    process.communicate(timeout=60)
    wait_for(lambda: Run.open(tmp_path / "run").meta["exit"] is not None)  # its rank is gone, too
    opened = Run.open(tmp_path / "run")

    assert opened.trace.meta["num_steps"] >= 50
    assert opened.meta["end_ns"] is None
    assert opened.facts.exit.cls == CUT
    assert ending(opened.facts.exit, 51) == "The run was cut off after 51 steps: its launcher was killed."
