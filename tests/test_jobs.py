"""No job is broken: scripts give the same losses bit for bit with and without headway, even a broken headway."""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from functools import cache

import pytest

from headway.verbs.runs.why import why
from tests.paths import ROOT

JOBS = {
    "image": ("tests/jobs/image.py", [], 1),
    "image with workers": ("tests/jobs/image.py", ["2"], 1),
    "language model": ("tests/jobs/language_model.py", [], 1),
    "gan": ("tests/jobs/gan.py", [], 1),
    "iterable": ("tests/jobs/iterable.py", [], 1),
    "iterable with workers": ("tests/jobs/iterable.py", ["2"], 1),
    "amp": ("tests/jobs/amp.py", [], 1),
    "compiled": ("tests/jobs/compiled.py", [], 1),
    "ddp": ("tests/jobs/ddp.py", [], 2),
    "fsdp2": ("tests/jobs/fsdp2.py", [], 2),
    "spawned": ("tests/jobs/spawned.py", [], 1),
}
"""Job -> script, arguments, ranks."""

STEPS = {"image": 30, "language model": 8, "gan": 30, "iterable": 20, "amp": 16, "compiled": 8, "ddp": 12, "fsdp2": 8}
"""Job -> optimizer steps that its recording must show (of rank 0)."""


def losses(output: str) -> list[str]:
    """Return what the job printed about its numbers; ranks may come in any order."""
    # "[default0]:" stands where a launcher names the rank; two ranks may write one behind the other on one line.
    lines = re.sub(r"\[\w+\]:|(?=rank \d)", "\n", output).splitlines()
    return sorted(line for line in lines if re.match(r"rank \d+ loss|loss|val|breaks", line))


def environment(tmp_path, **more: str) -> dict[str, str]:
    names = {k: v for k, v in os.environ.items() if not k.startswith("HEADWAY")}
    return {
        **names, "OMP_NUM_THREADS": "1", "JOB_OUT": str(tmp_path), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **more,
    }  # fmt: skip


@cache
def plain(job: str) -> list[str]:
    """Run the job without headway, once per session."""
    with tempfile.TemporaryDirectory() as out:
        return run_plain(job, out)


def run_plain(job: str, out: str) -> list[str]:
    """Start the ranks of a job as torchrun does, without its own process."""
    script, arguments, ranks = JOBS[job]
    for _attempt in range(8):  # gloo aborts now and then at teardown of a job that is done: not what is tested here
        with socket.create_server(("localhost", 0)) as free:
            meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}
        started = [
            subprocess.Popen(
                [sys.executable, script, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                cwd=ROOT, env=environment(out, RANK=f"{rank}", LOCAL_RANK=f"{rank}", WORLD_SIZE=f"{ranks}", **meeting),
            )
            for rank in range(ranks)
        ]  # fmt: skip
        said = []
        for process in started:
            said.append(process.communicate(timeout=100))
            for other in started if process.returncode else ():
                other.kill()
        if not any(process.returncode for process in started):
            break
    assert not any(process.returncode for process in started), said
    return losses("\n".join(stdout for stdout, _ in said))


def recorded(job: str, tmp_path, **more: str) -> tuple[list[str], dict]:
    """Run the job under headway; return its losses and the JSON object of `headway run`."""
    script, arguments, ranks = JOBS[job]
    command = [sys.executable, "-m", "headway.cli", "run", "--json", "--nproc-per-node", str(ranks)]
    command += ["--out", str(tmp_path / "run"), "--", script, *arguments]
    env = environment(tmp_path, **more)
    answer = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=110)
    assert answer.stdout.strip(), answer.stderr
    return losses(answer.stderr), {**json.loads(answer.stdout), "stderr": answer.stderr}


QUICK = ("image with workers", "language model", "amp", "ddp", "fsdp2")
"""Jobs that stand for the others where there is little time."""


@pytest.mark.parametrize("job", [pytest.param(job, marks=[] if job in QUICK else pytest.mark.slow) for job in JOBS])
def test_losses_are_the_same_bit_for_bit(job, tmp_path, capsys):
    bare = plain(job)

    with_headway, run = recorded(job, tmp_path)

    assert with_headway == bare, run["stderr"]
    assert len(bare) > 4
    if run["exit"]["class"] != "infra":  # the abort of gloo at teardown
        assert run["exit"]["code"] == 0
    if job in STEPS:
        why(tmp_path / "run", json=True)
        assert json.loads(capsys.readouterr().out)["steps"] == STEPS[job]


@pytest.mark.parametrize(
    "job", ["ddp", *(pytest.param(job, marks=pytest.mark.slow) for job in ("iterable with workers", "spawned"))]
)
def test_a_headway_whose_patches_all_fail_still_lets_the_job_finish(job, tmp_path):
    bare = plain(job)

    with_headway, run = recorded(job, tmp_path, HEADWAY_BREAK="all")

    assert with_headway == bare
    assert "headway" in run["stderr"]  # it says that it sees less


def test_switched_off_it_does_nothing(tmp_path):
    bare = plain("amp")

    with_headway, run = recorded("amp", tmp_path, HEADWAY="off")

    assert with_headway == bare
    assert run["exit"]["code"] == 0
