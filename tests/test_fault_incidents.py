"""Failures of real jobs under the supervisor: what is noted of them, and what `headway fault incidents` says."""

import json
import re

import pytest
import torch

from headway.checkpoint.engine import Checkpointer
from headway.core.errors import FormatError, InputError
from headway.fault.apply import follow_failures
from headway.ledger.answers.ledger import Ledger
from headway.runtime.launching.options import LaunchOptions, check
from headway.trace.recording.incident import FILE, Blamed, Incident, read_incidents, write_incidents
from headway.trace.recording.runs import Run
from headway.verbs.jobs.fault import incidents
from tests.launching import headway, run, script
from tests.remedy_context import applied

pytestmark = pytest.mark.usefixtures("whole_start")

SUPERVISOR = "headway.fault.supervise:supervisor"

DIES = """
import os, signal, sys
import torch, torch.distributed as dist
import headway
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
checkpoint = headway.Checkpointer(sys.argv[1], model=model.module, optimizer=optimizer)
step = checkpoint.restore().step or 0
while step < 12:
    optimizer.zero_grad()
    model(torch.full((2, 4), float(step))).square().mean().backward()
    optimizer.step()
    step += 1
    if step % 5 == 0:
        checkpoint.save(step, block="durable")
    if step == 7 and rank == 1 and attempt == 0:
        os.kill(os.getpid(), signal.SIGKILL)
print("loss", rank, float(next(model.parameters()).sum()))
checkpoint.close()
dist.destroy_process_group()
"""


def test_a_list_of_incidents_is_read_as_it_was_written_and_damage_is_an_error(tmp_path):
    one = Incident(
        number=0, attempt=0, cls="hang", suspects=Blamed([3], ["a"], "tp of ranks 2, 3", 0.5), detected_ns=1,
        located_ns=2, down_ns=3, decided_ns=4, action="restart",
    )  # fmt: skip
    write_incidents(tmp_path, [one])

    assert read_incidents(tmp_path) == [one]
    assert json.loads((tmp_path / FILE).read_text())["incidents"][0]["class"] == "hang"
    (tmp_path / FILE).write_text("[1]")
    with pytest.raises(FormatError, match="not a list of incidents"):
        read_incidents(tmp_path)


def test_failures_and_reroutes_are_written_apart_and_listed_by_time(tmp_path):
    lost = [Incident(detected_ns=ns, action="reroute") for ns in (1, 5)]
    write_incidents(tmp_path, lost[:1])
    write_incidents(tmp_path, [Incident(detected_ns=3, action="restart")])
    write_incidents(tmp_path, lost)

    assert [(row.number, row.detected_ns, row.ended_attempt) for row in read_incidents(tmp_path)] == [
        (0, 1, False), (1, 3, True), (2, 5, False),
    ]  # fmt: skip


@pytest.mark.slow
def test_a_killed_rank_is_named_and_its_job_goes_on_from_memory(tmp_path, capsys):
    job, out = script(tmp_path, DIES), tmp_path / "run"
    done = run(
        out, [job, str(tmp_path / "ckpt")], {"HEADWAY": ""}, nproc_per_node=2, max_restarts=3, supervisor=SUPERVISOR
    )
    incidents(out, json=True)
    answer = json.loads(capsys.readouterr().out)
    (row,) = answer["incidents"]
    times = [row[f"{name}_ns"] for name in ("detected", "located", "down", "decided", "first_step")]

    assert done.returncode == 0, done.stderr
    assert (row["class"], row["suspects"]["ranks"], row["step"], row["lost_steps"]) == ("infra", [1], 7, 2)
    assert (row["action"], row["restored"], row["checkpoint"]) == ("restart", "memory", 5)
    assert times == sorted(times)
    assert sum(row["phases_s"].values()) == pytest.approx(row["downtime_s"])
    assert 0 < answer["ettr"] < 1
    incidents(out)
    assert re.search(r"attempt 0, step 7: infra, rank 1", capsys.readouterr().out)
    ledger = Ledger.of(Run.open(out))
    assert ledger.sub_ns["restart.locate"] >= 0 < ledger.sub_ns["restart.decide"]
    assert sum(ledger.sub_ns.values()) == 2 * ledger.wall_ns
    losses = {line.split()[-1] for line in done.stdout.splitlines() if "loss" in line}
    assert len(losses) == 1


@pytest.mark.slow
def test_the_same_error_at_the_same_step_ends_a_job_before_its_restarts_are_used_up(tmp_path):
    job = script(
        tmp_path,
        """
        import torch
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for step in range(4):
            weight.sum().backward()
            optimizer.step()
        raise ValueError("row 17 is empty")
        """,
    )
    done = run(tmp_path / "run", [job], {"HEADWAY": ""}, max_restarts=5, supervisor=SUPERVISOR, quiet=False)
    found = read_incidents(tmp_path / "run")

    assert done.returncode == 1
    assert [row.action for row in found] == ["restart", "stop"]
    assert "no further attempt: the same error came again at step 4: ValueError: row 17 is empty" in done.stderr


UPDATED = """
import os, signal, sys
import torch
import headway
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], lr=0.1)
checkpoint = headway.Checkpointer(sys.argv[1], optimizer=optimizer)
step = checkpoint.restore().step or 0
while step < 12:
    weight.sum().backward()
    optimizer.step()
    step += 1
    if step < 7 or VERSION == 1:
        checkpoint.save(step, block="durable")
    if VERSION == 1 and step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    if VERSION == 2 and step == 7:
        raise KeyError("hidden_size")
print("version", VERSION, "ends at step", step)
checkpoint.close()
"""


@pytest.mark.slow
def test_newer_code_is_taken_at_the_next_restart_and_undone_when_it_fails_twice_in_the_same_words(tmp_path):
    newer = tmp_path / "newer"
    newer.mkdir()
    script(newer, "VERSION = 2" + UPDATED)
    job, out = script(tmp_path, "VERSION = 1" + UPDATED), tmp_path / "run"
    options = [*["run", "--max-restarts", "5", "--warm", "off", "--update-from"], newer, "--out", out]
    done = headway(*options, "--", job, tmp_path / "ckpt")
    found = read_incidents(out)

    assert done.returncode == 0, done.stderr
    assert [row.action for row in found] == ["restart", "restart", "rollback"]
    assert "version 1 ends at step 12" in done.stdout
    assert (out / "code" / "1" / "job.py").read_text() == (newer / "job.py").read_text()


def test_a_source_of_newer_code_that_cannot_be_is_one_error(tmp_path):
    job = script(tmp_path, "pass")

    for source, restarts, error in (
        (tmp_path / "no", 1, "is not a folder"),
        (tmp_path, 1, "is the folder that the job runs from"),
        (tmp_path, 0, "Pass --max-restarts"),
    ):
        with pytest.raises(InputError, match=error):
            check(LaunchOptions(update_from=source, max_restarts=restarts), [job])


STOCK = """
import os, signal, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank, path, step = dist.get_rank(), sys.argv[1], 0
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
if os.path.exists(path):
    step = torch.load(path)["step"]
while step < 40:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().mean().backward()
    time.sleep(0.05)
    optimizer.step()
    step += 1
    if step % 15 == 0:
        if rank == 0:
            torch.save({"step": step}, path)
        dist.barrier()
    if step == 25 and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_cold_restarts_are_the_cause_that_a_plan_makes_warm_and_the_ettr_comes_out_as_predicted(tmp_path):
    job, first, again = script(tmp_path, STOCK), tmp_path / "first", tmp_path / "again"
    ranks = ("--nproc-per-node", 2, "--max-restarts", 2)
    cold = headway("run", *ranks, "--warm", "off", "--json", "--out", first, "--", job, tmp_path / "a")
    why = json.loads(headway("why", first, "--json").stdout)
    text = headway("plan", first).stdout
    command = re.search(r"headway run (--apply \S+) -- ", text.replace("\n", " "))
    plan = command[1].split()
    warm = headway("run", *ranks, *plan, "--json", "--out", again, "--", job, tmp_path / "b")
    before, after = (json.loads(done.stdout) for done in (cold, warm))
    names = [row["cause"] for row in why["causes"]]
    refused = headway("run", *ranks, "--warm", "off", *plan, "--", job, tmp_path / "c")

    assert "restart" in names
    assert "rework" in names
    assert (why["verdict"]["cause"], why["verdict"]["remedy"]) == ("restart", "fault.warm")
    assert [row["reason_not_applied"] for row in after["applied"] if row["name"] == "fault.warm"] == [None]
    assert [row["warm"] for row in before["incidents"] + after["incidents"]] == [False, True]
    assert before["ettr"] < after["ettr"]
    assert after["ettr"] == pytest.approx(after["ettr_predicted"], rel=0.5)
    assert after["ettr_predicted"] < 2 * before["ettr"]
    assert "--warm off" in refused.stderr


def test_a_plan_lets_the_policy_of_a_checkpointer_follow_the_failure_rate_until_it_is_undone(tmp_path):
    with applied(follow_failures, {"mtbf_s": 50.0}):
        followed = Checkpointer(tmp_path, model=torch.nn.Linear(1, 1))

    assert (followed._policy.mode, followed._policy.mtbf_s) == ("goodput", 50.0)
    assert Checkpointer(tmp_path, model=torch.nn.Linear(1, 1))._policy.mode == "budget"
