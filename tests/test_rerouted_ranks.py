"""Replicas of a pipeline on processes: what a rank does that is killed, the others do, and nothing else changes."""

import json
import math

import pytest
import torch
import torch.nn.functional as functional

from headway.core.errors import InputError
from headway.parallel import pipeline
from headway.runtime.launching.peers import PeerBoard
from headway.runtime.launching.save_and_leave import LeaveBoard
from headway.trace.recording.incident import read_incidents
from headway.trace.recording.runs import Run
from tests.launching import headway_here, run, script
from tests.paths import ROOT
from tests.pipelining_rank import merged, synchronous, trained
from tests.spawn import on_ranks
from tests.test_pipelining import agree

JOB = str(ROOT / "benchmarks" / "jobs" / "rerouted.py")


def killed(tmp_path, kills, *, ranks=4, steps=10, **options):
    """Run the job of two replicas; return how it ended, and step -> the losses that ranks of the last stage logged."""
    folder = tmp_path / "job"
    folder.mkdir()
    plan = json.dumps({"steps": steps, "stages": ranks // 2, "kills": kills})
    done = run(tmp_path / "recorded", [JOB, str(folder), plan], nproc_per_node=ranks, **{"quiet": False, **options})
    rows: dict[int, list[list[float]]] = {}
    for file in folder.glob("log-*"):
        for step, _, losses in map(json.loads, file.read_text().splitlines()):
            rows.setdefault(step, []).append(losses)
    return done, rows


def differ(ours, theirs) -> float:
    """Return the largest difference of a loss, inf where a step or a micro-batch lacks."""
    if ours.keys() != theirs.keys():
        return math.inf
    pairs = [(row, theirs[step][0]) for step, rows in ours.items() for row in rows]
    return max(abs(a - b) for row, other in pairs for a, b in zip(row, other, strict=True))


def test_a_killed_replica_is_done_without(tmp_path):
    """One stage on two ranks, the fast case: the survivor computes the whole batch alone."""
    done, ours = killed(tmp_path, [[0, 3, 8.0]], ranks=2, steps=6, env={"HEADWAY": ""})

    assert done.returncode == 0, done.stderr
    assert "rank 0 was killed by signal 9; the other ranks do its work" in done.stderr
    assert sorted(ours) == list(range(6))
    assert all(len(row) == 8 for rows in ours.values() for row in rows)
    (row,) = read_incidents(tmp_path / "recorded")
    assert (row.action, row.cls, row.suspects.ranks, row.step) == ("reroute", "infra", [0], 3)
    assert (row.evidence, row.reason) == ("rank 0: signal 9", "its stage of the model is on rank 1 too")
    assert row.downtime_s is not None
    assert row.downtime_s > 0
    shown = headway_here("fault", "incidents", tmp_path / "recorded").stdout
    assert "from detection until the other ranks went on" in shown
    assert Run.open(tmp_path / "recorded").facts.incidents == ()  # no attempt ended by it


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """Step -> losses of a run without failures."""
    done, losses = killed(tmp_path_factory.mktemp("calm"), [])
    assert done.returncode == 0, done.stderr
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("kills", [[[0, 4, 21.0]], [[3, 2, 30.0]], [[1, 5, 2.0], [2, "switch", 12.0]]])
def test_losses_are_those_of_a_run_without_failures(tmp_path, calm, kills):
    done, ours = killed(tmp_path, kills)

    assert done.returncode == 0, done.stderr
    assert differ(ours, calm) < 1e-5


@pytest.mark.slow
def test_without_a_peer_the_job_ends_and_may_be_restarted(tmp_path):
    done, ours = killed(tmp_path, [[1, 3, 5.0], [3, "switch", 20.0]], max_restarts=1)

    assert done.returncode == 0, done.stderr
    assert "rank 3 was killed by signal 9; no other rank has its stage: the job ends" in done.stderr
    assert "attempt 0 failed; starting attempt 1 of 1" in done.stderr
    assert sorted(ours) == list(range(10))


SAVES = """
import os, signal, sys, torch, torch.distributed as dist
import headway
from headway.parallel import pipeline
dist.init_process_group("gloo")
torch.manual_seed(0)
runner = pipeline(
    torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.zeros(1, 2), loss=torch.nn.functional.mse_loss,
    optimizer=lambda p: torch.optim.SGD(p, lr=0.1), num_microbatches=2, replicas=2, elastic=True,
)
checkpoint = headway.Checkpointer(sys.argv[1], model=runner)
for step in range(1, 7):
    if step == 4 and dist.get_rank() == 0:  # the rank that all others meet at
        os.kill(os.getpid(), signal.SIGKILL)
    runner.step(torch.ones(4, 2), torch.ones(4, 2))
    if step in (2, 5):
        print("failure", checkpoint.save(step, block="durable" if step == 2 else "snapshot").failure)
checkpoint.close()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_save_after_a_switch_is_refused_and_the_job_goes_on(tmp_path):
    done = run(tmp_path / "recorded", [script(tmp_path, SAVES), str(tmp_path / "saved")], nproc_per_node=2)

    assert done.returncode == 0, done.stderr
    last = (tmp_path / "recorded" / "logs" / "r1.out").read_text().splitlines()[-1]
    assert last.startswith("failure rank 0 was killed and others do its work: no checkpoint can be saved")
    assert "RuntimeWarning: rank 0 was killed" in done.stderr
    assert [path.name for path in (tmp_path / "saved").glob("step-*")] == ["step-2"]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble", "gpipe"])
def test_two_replicas_train_as_the_whole_model(schedule):
    answers = on_ranks(trained, 4, schedule, "sgd", 3, {"replicas": 2})
    states = [parameters(merged([answer])) for answer in answers]

    assert agree({**states[0], **states[1]}, parameters(synchronous("sgd", 3)), 1e-10)
    assert all(torch.equal(states[rank][name], states[rank + 2][name]) for rank in (0, 1) for name in states[rank])
    assert [len(losses[0]) for _, losses, _ in answers] == [0, 4, 0, 4]


def parameters(state):
    """Return a state without what BatchNorm has seen, which is that of a replica."""
    return {name: value for name, value in state.items() if "running" not in name and "tracked" not in name}


def test_the_board_covers_a_rank_as_long_as_another_has_its_stage():
    leave = LeaveBoard.make(num_ranks=4)
    board = PeerBoard(leave.descriptor, 4)
    assert not board.cover([2])
    for rank in range(4):
        board.announce(rank, rank % 2)
    board.note_steps(2, 1 << 40)

    assert not board.cover([0, 2])
    assert not board.killed()
    assert board.cover([2])
    assert not board.cover([0])
    assert board.cover([3])
    assert (board.killed(), board.steps(2), leave.left_s()) == ({2, 3}, 1 << 40, None)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"replicas": 2}, "with 1 ranks and 4 micro-batches; it is at least 1 and divides both"),
        ({"replicas": 0}, "replicas is 0"),
        ({"elastic": True}, "needs another rank with each stage. Pass replicas=2"),
    ],
)
def test_replicas_that_cannot_be_are_refused(options, words):
    with pytest.raises(InputError, match=words):
        pipeline(
            torch.nn.Linear(2, 2), torch.zeros(1, 2), loss=functional.mse_loss, num_microbatches=4,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), **options,
        )  # fmt: skip
