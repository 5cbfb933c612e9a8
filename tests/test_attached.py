"""`--no-launch`: a rank of somebody else's launch line records itself; local rank 0 writes the host's run.json."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.runtime.in_rank.bootstrap import rank_of
from headway.runtime.launching.launch import launch_line_id, place_of
from headway.trace.recording.runs import Run
from tests.launching import DDP, script, wait_for
from tests.paths import ROOT, python_path

ONE_RANK = """
import sys
from pathlib import Path
from headway.runtime.launching.options import LaunchOptions
from headway.runtime.launching.launch import launch
sys.exit(launch(LaunchOptions(out=Path(sys.argv[1]), no_launch=True, quiet=True), sys.argv[2:]).code)
"""


@given(world=st.integers(1, 64), local=st.integers(1, 8), data=st.data())
def test_torchs_variables_place_a_rank_on_its_host(world, local, data):
    rank = data.draw(st.integers(0, world - 1))
    env = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(local), "LOCAL_RANK": str(rank % local)}
    place = place_of(env)

    assert (place.rank, place.world_size, place.local_rank) == (rank, world, rank % local)
    assert place.group_rank == rank // local


def test_slurm_and_open_mpi_are_understood():
    slurm = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
    mpi = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "2"}

    assert (place_of(slurm).rank, place_of(slurm).local_rank, place_of(slurm).group_rank) == (5, 1, 1)
    assert (place_of(mpi).rank, place_of(mpi).local_rank, place_of(mpi).world_size) == (2, 2, 4)
    assert place_of({}).world_size == 1


LAUNCH_LINES = {
    "torchrun": {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"},
    "deepspeed": {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4", "CROSS_RANK": "1"},
    "srun": {
        "SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "4",
        "SLURM_NODEID": "1",
    },
    "mpirun": {
        "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_NODE_RANK": "1",
    },
    "mpiexec": {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"},
}  # fmt: skip
"""Launcher -> what it puts into the environment of rank 5 of 8, on the second of two hosts."""


@pytest.mark.parametrize("launcher", LAUNCH_LINES)
def test_the_launcher_and_the_rank_agree_on_every_launch_line(launcher):
    env = LAUNCH_LINES[launcher]
    place = place_of(env)

    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (5, 8, 1, 4)
    assert (place.group_rank, rank_of(env)) == (1, 5)


def test_a_rank_beyond_the_world_is_refused():
    with pytest.raises(InputError, match="rank 4 of 4"):
        place_of({"RANK": "4", "WORLD_SIZE": "4"})


def test_all_ranks_of_a_launch_line_agree_on_its_name():
    assert launch_line_id({"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "1"}) == "77.1"
    assert launch_line_id({"TORCHELASTIC_RUN_ID": "abc"}) == "abc"
    assert launch_line_id({"TORCHELASTIC_RUN_ID": "none"}) == launch_line_id({}) == f"p{os.getppid()}"


def test_a_lone_rank_passes_its_environment_and_its_exit_code_on(tmp_path):
    job = script(tmp_path, "import os, sys; print(os.environ['SLURM_PROCID'], 'RANK' in os.environ); sys.exit(3)")
    done = subprocess.run(
        [sys.executable, "-c", ONE_RANK, str(tmp_path / "run"), job], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "HEADWAY": "off"}, timeout=60,
    )  # fmt: skip

    assert (done.returncode, done.stdout) == (3, "0 False\n")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["exit"]["class"] == "user"


@pytest.mark.slow
def test_under_torchrun_two_ranks_share_one_run_folder(tmp_path):
    launcher = tmp_path / "one_rank.py"
    launcher.write_text(ONE_RANK)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(launcher),
         str(tmp_path / "run"), script(tmp_path, DDP)],
        cwd=ROOT, capture_output=True, text=True, timeout=110,
        env={**os.environ, "PYTHONPATH": python_path(ROOT), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )  # fmt: skip
    run = Run.open(tmp_path / "run")

    assert done.returncode == 0, done.stderr
    assert sorted(run.trace.ranks) == [0, 1]
    assert [row.rank for row in run.facts.ranks] == [0, 1]
    assert run.meta["exit"]["class"] == "ok"
    assert [int(run.trace.select(ranks=[r]).named("optimizer.step").sum()) for r in (0, 1)] == [5, 5]
    assert not list(Path(tmp_path / "run" / "rings").glob("*.spool"))


def test_a_fault_on_another_rank_explains_why_this_one_was_stopped(tmp_path):
    job = script(
        tmp_path,
        """
        import os, sys, time
        if os.environ["RANK"] == "1":
            raise KeyError("rank 1 has no shard; token=hf_AbCdEfGhIjKlMnOpQrStUvWxYz0123456789")
        time.sleep(600)
        """,
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", ONE_RANK, str(tmp_path / "run"), job], cwd=ROOT, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
                 "HEADWAY": "off"},
        )
        for rank in (0, 1)
    ]  # fmt: skip
    _, said = ranks[1].communicate(timeout=60)
    wait_for((tmp_path / "run" / "logs" / "r0.out").exists)
    ranks[0].send_signal(signal.SIGTERM)  # as torchrun does to the others
    ranks[0].communicate(timeout=60)
    facts = json.loads((tmp_path / "run" / "run.json").read_text())

    assert ranks[0].returncode == 143
    assert "KeyError" in said
    assert (facts["exit"]["class"], facts["exit"]["first_rank"]) == ("user", 1)
    assert "hf_AbCd" not in "".join(p.read_text() for p in (tmp_path / "run").glob("*/*.json"))


@pytest.mark.slow
def test_ranks_that_only_mpiexec_names_record_under_their_own_number(tmp_path):
    job = script(
        tmp_path,
        """
        import torch
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.ones(2, 4)).mean().backward()
            optimizer.step()
        """,
    )
    facts = {"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}
    launchers = [
        subprocess.Popen(
            [sys.executable, "-c", ONE_RANK, str(tmp_path / "run"), job],
            cwd=ROOT,
            env={**os.environ, "HEADWAY": "", **facts, "PMI_RANK": str(rank), "MPI_LOCALRANKID": str(rank)},
        )
        for rank in range(2)
    ]
    codes = [launcher.wait(timeout=100) for launcher in launchers]

    assert codes == [0, 0]
    trace = Run.open(tmp_path / "run").trace
    assert trace.events["rank"][trace.named("optimizer.step")].tolist() == [0, 0, 0, 1, 1, 1]
