"""The drill: what is planted is fair, what is noticed is scored, losses are guarded, and real faults are named."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.core.files.planfile import PlanFile, Remedy, write_plan
from headway.fault.fleet import FleetTimes, GivenFailure, Scenario, simulate
from headway.fault.incidents import expected
from headway.fault.supervise import RecoveryLimits, Seen, decide, of_hang
from headway.fault.torch_drill import FAULTS, NOTHING_TO_STRIKE, schedule, score
from headway.fault.torch_guard import guard
from headway.ledger.answers.metrics import ettr
from headway.runtime.launching.supervision import LOOKS, proven
from headway.runtime.recorder.timers import LOOK_EVERY
from headway.runtime.script.bad_loss import FEWEST, SPIKE, judge
from headway.trace.recording.incident import Blamed, Incident
from headway.verbs.jobs.drill import exit_code
from tests.launching import headway, headway_here, script
from tests.remedy_context import TestContext, apply

JOB = """
import sys, time
import torch, torch.distributed as dist
import headway
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(0)
net = torch.nn.Linear(8, 1)
model, optimizer = DistributedDataParallel(net), torch.optim.SGD(net.parameters(), lr=0.01)
checkpoint = headway.Checkpointer(sys.argv[1], model=net, optimizer=optimizer)
step = checkpoint.restore().step or 0
while step < 2000:
    optimizer.zero_grad()
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
    step += 1
    time.sleep(0.02)
    if step % 5 == 0:
        checkpoint.save(step)
"""


def incident(attempt: int, cls: str, ranks: list[int], detected_ns: int = 9, **more) -> Incident:
    return Incident(
        number=0, attempt=attempt, cls=cls, suspects=Blamed(ranks), detected_ns=detected_ns, located_ns=0, decided_ns=0,
        down_ns=0, action="restart", **more,
    )  # fmt: skip


@given(st.permutations([*FAULTS]), st.integers(1, 64), st.integers(0, 99))
def test_each_fault_strikes_a_rank_of_the_job_later_than_the_one_before(faults, world, seed):
    """So a job that saves nothing makes progress with each attempt, and the ladder never stops it."""
    due = schedule(faults, world=world, seed=seed)
    seen = [Seen("infra", step=step) for _, _, step in due]

    assert [name for name, _, _ in due] == faults
    assert all(0 <= rank < world for _, rank, _ in due)
    assert [step for _, _, step in due] == sorted({step for _, _, step in due})
    assert all(decide(one, seen[:index], RecoveryLimits(9)).action == "restart" for index, one in enumerate(seen))


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_counts_as_noticed_with_its_class_and_where_it_has_one_its_rank(name):
    fault = FAULTS[name]
    mark = {"name": name, "rank": 2, "attempt": 0, "injected_ns": 5}

    def verdict(**found) -> object:
        rows, _ = score([name], [mark], [incident(0, **{"cls": fault.cls, "ranks": [2], **found})], steps=9)
        return rows[0]["ok"]

    assert verdict() is True
    assert verdict(ranks=[1]) is not fault.blames
    assert verdict(cls="oom") is False
    assert verdict(detected_ns=4) is False
    assert score([name], [mark], [], steps=9)[0][0]["ok"] is False


@pytest.mark.parametrize("named", [True, False])
def test_a_fault_that_was_not_played_is_no_missed_one_and_says_why(named):
    mark = {"name": "kill", "rank": 2, "attempt": 0, "injected_ns": 5}
    rows, _ = score(
        ["kill", "hanging_loader", "nan"], [mark, {**mark, "injected_ns": None}], [incident(0, "infra", [2])], steps=9
    )

    assert [row["ok"] for row in rows] == [True, None, None]
    needs = f"{NOTHING_TO_STRIKE}: it needs batches that a DataLoader reads"
    assert [row["not_played"] for row in rows][1:] == [needs, "the run ended at step 9 before it"]
    assert exit_code(rows, 0, named=named) == (2 if named else 0)
    assert exit_code(rows[1:], 0, named=named) == 2
    assert exit_code([*rows, {"ok": False}], 0, named=named) == 3
    assert exit_code(rows, 1, named=named) == 3


def test_an_incident_without_a_fault_is_a_false_alarm():
    mark = {"name": "kill", "rank": 0, "attempt": 1, "injected_ns": 5}

    assert score(["kill"], [mark], [incident(0, "hang", []), incident(1, "infra", [0])], steps=9)[1] == 1


@pytest.mark.parametrize("faults", [["kil"], ["kill", "kill"], []])
def test_faults_that_cannot_be_played_are_one_error(faults):
    with pytest.raises(InputError, match=r"Did you mean 'kill'|name each one once"):
        schedule(faults, world=2, seed=0)


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=8), st.floats(0.1, 10.0), st.data())
def test_losses_are_bad_exactly_when_one_is_broken_or_a_spike(losses, usual, data):
    before = [usual] * FEWEST
    rank = data.draw(st.integers(0, len(losses) - 1))
    bad = judge(losses, before)

    assert (bad is not None) == (max(losses) > SPIKE * usual)
    for value in (float("nan"), float("inf"), -float("inf")):
        assert judge([*losses[:rank], value, *losses[rank + 1 :]], []).ranks == (rank,)
    assert judge(losses, before[1:]) is None  # too few to know what is usual
    spike = judge([usual] * rank + [SPIKE * usual * 1.01] + [usual] * 3, before)

    assert spike.ranks == (rank,)


def test_a_guard_without_a_grant_is_refused_and_one_with_an_unknown_action_is_an_error():
    assert "grant --allow lossy" in apply(guard, {}, TestContext()).reason
    with pytest.raises(InputError, match=r"action of fault.guard is 'skipp'; it must be rollback or skip or stop"):
        apply(guard, {"action": "skipp"}, TestContext("lossy"))


def rows(stacks: dict[int, str], **special) -> list[dict[str, object]]:
    found = []
    for rank, place in stacks.items():
        stack = f'Current thread 0x1 (most recent call first):\n  File "train.py", line 3 in {place}'
        waits = {"rank": rank, "state": "S", "op": "comm.wait", "phase": "backward", "silent": False, "step": 7}
        found.append({**waits, "group": -1, "seq": 4, "peer": -1, "since_ns": 1, "stack": stack})
    for rank, changes in special.items():
        found[int(rank[1:])].update(changes)
    return found


def test_a_hang_is_blamed_on_the_odd_stack_or_on_who_runs_nothing_and_on_nobody_without_a_majority():
    stuck = rows({0: "wait", 1: "wait", 2: "read", 3: "wait"}, r2={"op": None, "silent": True})
    stopped = rows({0: "wait", 1: "wait", 2: "wait", 3: "wait"}, r1={"state": "T", "stack": "not asked"})
    torn = rows({0: "wait", 1: "wait", 2: "read", 3: "read"})

    assert of_hang({"ranks": stuck, "world_size": 4}).ranks == [2]
    assert of_hang({"ranks": stopped, "world_size": 4}).ranks == [1]
    assert of_hang({"ranks": torn, "world_size": 4}).ranks == []
    assert of_hang({}).ranks == []  # a report that a full disk has cut off


def test_a_standstill_is_proven_by_a_halted_or_a_runaway_rank_and_never_by_one_that_is_late():
    def looks(**special) -> list[list[dict[str, object]]]:
        return [rows({0: "wait", 1: "wait", 2: "wait"}, **special)] * LOOKS

    away = [rows({0: "wait", 1: "wait", 2: "run"}, r2={"op": None, "step": step}) for step in (20, 40, 60)]

    assert proven(looks(r2={"state": "T"})) == [2]
    assert proven(looks(r2={"state": "D"})) == [2]
    assert proven(away) == [2]
    assert proven(away[:2]) == []
    assert proven(looks(r2={"op": None, "silent": True, "step": 7})) == []  # it may evaluate, without a word
    assert proven(looks(r0={"state": "T"}, r1={"state": "T"}, r2={"state": "T"})) == []  # all are suspended alike
    moving = [rows({0: "wait", 1: place, 2: "run"}, r2={"op": None, "step": 40}) for place in ("a", "b", "a")]
    assert proven(moving) == []


def test_failures_that_are_given_are_those_that_are_played():
    """Three failures: 10 s of work saved every 4 s lose 2, 2 and 0 s, and 3 s each until training goes on."""
    scenario = Scenario(hosts=1, devices_per_host=1, days=49.0 / 86400, mtbf_s=1.0, times=FleetTimes(save_every_s=4.0))
    outcome = simulate(
        scenario, 0, failures=[GivenFailure(10.0, 1.0, 2.0), GivenFailure(23.0, 1.0, 2.0), GivenFailure(24.0, 1.0, 2.0)]
    )

    assert outcome.num_incidents == 3
    assert outcome.unproductive_s["rework"] == pytest.approx(4.0)
    assert 49.0 * (1 - outcome.ettr) == pytest.approx(4.0 + 3.0 + 1.0 + 3.0)


@given(st.floats(20.0, 200.0), st.floats(0.1, 2.0), st.integers(3, 30))
def test_what_a_run_lets_expect_is_the_closed_form_of_its_own_times(apart_s, restart_s, count):
    second, moments = 10**9, [apart_s * (index + 1) for index in range(count)]
    failed = [
        incident(
            index, "infra", [0], detected_ns=int(at * second), first_step_ns=int((at + restart_s) * second),
            trained_from_ns=0, trained_until_ns=int(at * second),
        )
        for index, at in enumerate(moments)
    ]  # fmt: skip
    wall_s = apart_s * (count + 1)
    found = expected(failed, wall_s=wall_s, stepped_s=wall_s - count * restart_s, interval_s=1.0)
    closed = ettr(wall_s / count, restart_s=restart_s, interval_s=1.0, save_s=0.0)

    assert found.outside_s == pytest.approx(0.0, abs=1e-6)
    assert found.closed_form == pytest.approx(closed, rel=1e-6)
    assert found.simulated >= 1 - count * (restart_s + 1.0) / wall_s - 1e-9
    assert expected([], wall_s=wall_s, stepped_s=wall_s, interval_s=1.0) is None


@pytest.mark.slow
def test_real_faults_are_played_noticed_and_recovered_from(tmp_path):
    """Reason for its length: three real failures of two processes, each seen and recovered from."""
    job, out = script(tmp_path, JOB), tmp_path / "run"
    faults = "kill,skipped_collective,nan"
    done = headway(
        "drill", "--faults", faults, "--seed", 3, "--quiet", "--json", "--out", out, "--", job, tmp_path / "ckpt"
    )
    answer = json.loads(done.stdout)

    assert done.returncode == 0, done.stderr
    assert [row["ok"] for row in answer["faults"]] == [True] * 3, answer
    assert answer["false_alarms"] == 0
    assert 0 < answer["ettr"] < 1
    assert answer["ettr_simulated"] is not None


@pytest.mark.slow
def test_a_guard_leaves_a_bad_update_out_on_all_ranks_and_names_the_batch(tmp_path):
    text = JOB.replace("model(torch.ones(4, 8))", "model(torch.ones(4, 8) * (SCALE if step == 9 else 1.0))")
    text = text.replace("step < 2000", "step < 15") + '\nprint("loss", float(net.weight.sum()))\n'
    text = 'SCALE = float("nan") if __import__("os").environ["RANK"] == "1" else 1.0\n' + text
    plan, out = tmp_path / "plan.json", tmp_path / "run"
    write_plan(PlanFile((Remedy("fault.guard", {"action": "skip"}, allow="lossy"),)), plan)
    job = script(tmp_path, text)
    done = headway("run", "--nproc-per-node", 2, "--apply", plan, "--out", out, "--", job, tmp_path / "ckpt")
    remedies = [json.loads((out / "applied" / f"r{rank}.json").read_text())["remedies"][0] for rank in (0, 1)]
    losses = {line.split()[-1] for line in done.stdout.splitlines() if "loss" in line}

    assert done.returncode == 0, done.stderr
    assert [one["facts"]["bad"] for one in remedies] == [[{"step": 10, "ranks": [1], "what": "nan"}]] * 2
    assert len(losses) == 1
    assert "nan" not in losses.pop()


@pytest.mark.slow
def test_a_run_whose_loss_broke_is_offered_the_guard_and_its_plan_holds_it_once_granted(tmp_path):
    job = script(
        tmp_path,
        """
        import time, torch
        net = torch.nn.Linear(8, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for step in range(60):
            optimizer.zero_grad()
            net(torch.ones(4, 8) * (float("nan") if step == 30 else 1.0)).square().mean().backward()
            optimizer.step()
            time.sleep(0.005)
        """,
    )
    out = tmp_path / "run"
    headway("run", "--quiet", "--out", out, "--", job)
    asked, given = (
        json.loads(headway_here("plan", out, "--json", *allow).stdout) for allow in ((), ("--allow", "lossy"))
    )
    seen = json.loads((out / "run.json").read_text())["bad_losses"]["0"]

    assert {row["what"] for row in seen} == {"nan"}
    assert 31 <= seen[0]["step"] < 31 + LOOK_EVERY
    assert "fault.guard" not in asked["chosen"]
    assert any(row["name"] == "fault.guard" and f"step {seen[0]['step']}" in row["reason"] for row in asked["refused"])
    assert "fault.guard" in given["chosen"]
    assert json.loads((out / "plan.json").read_text())["remedies"][-1]["parameters"] == {"action": "skip"}
