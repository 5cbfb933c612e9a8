"""'comm.loose' in an unmodified DDP script: proposed from a recorded run, applied, and withdrawn where it must be."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from headway.comm.advise import propose
from headway.comm.skew.apply import loosening
from headway.plan.proposal import Refusal
from headway.plan.setup import Setup
from headway.sim.ddp.ddp_replay import DdpReplay
from headway.sim.recorded.program import Program
from headway.trace.rings.rank_tables import DdpModel
from headway.verbs.runs.compare import compare
from tests.ddp_made import Job, play
from tests.launching import under_plan
from tests.remedy_context import applied
from tests.runs_made import MS, RunMaker
from tests.spawn import on_ranks

JOB = """
import os, signal, sys
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.GroupNorm(2, 32), nn.Linear(32, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
draws = torch.Generator().manual_seed(rank)
for step in range(40):
    labels = torch.randint(2, (8,), generator=draws) + 2 * rank  # each rank has classes of its own
    loss = nn.functional.cross_entropy(model(torch.randn(8, 16, generator=draws) + labels[:, None]), labels)
    optimizer.zero_grad()
    loss.backward()
    if step == 20 and rank == 1 and "die" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
dist.destroy_process_group()
"""


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    """Run the job loosely synchronised; returns the exit code, and what headway said."""
    remedy = {"name": "comm.loose", "parameters": {"rule": "fedavg:5", "travel_steps": 10}, "allow": "lossy"}
    return under_plan(folder, JOB, remedy, *arguments)


@pytest.mark.slow  # starts two ranks that import torch
def test_an_unmodified_script_synchronises_loosely_and_says_what_each_travel_lost(tmp_path, capsys):
    code, said = run(tmp_path)

    assert code == 0, said
    for rank in range(2):
        (remedy,) = json.loads((tmp_path / "run" / "applied" / f"r{rank}.json").read_text())["remedies"]
        facts = remedy["facts"]
        assert (remedy["name"], remedy["applied"], facts["models"]) == ("comm.loose", True, 1)
        assert [row["step"] for row in facts["travels"]] == [10, 20, 30, 40]
        assert facts["travels"][1]["accuracy_loss"] > 0.2
        assert facts["travels"][1]["next"] < 5 == facts["travels"][0]["next"]
    compare(tmp_path / "run", tmp_path / "run", json=True)
    assert any(
        "accuracy lost per travel, and setting: " in note for note in json.loads(capsys.readouterr().out)["notes"]
    )


@pytest.mark.slow  # the same
def test_a_rank_that_is_killed_ends_the_job_with_its_class(tmp_path: Path) -> None:
    code, said = run(tmp_path, "die")

    assert code == 137
    assert "rank 1 failed first (killed by signal 9)" in said


def trained(way: str) -> tuple[list[float], list[str]]:
    """Train under the remedy, or plainly where `way` is ''; return the last weights, and why it was refused."""

    def job() -> list[float]:
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(4, 2))
        half = list(model.parameters())[:1] if way == "two optimizers" else list(model.parameters())
        first = (torch.optim.Adam if way == "dgc:0.1" else torch.optim.SGD)(half, lr=0.1)
        second = torch.optim.SGD(list(model.parameters())[1:], lr=0.1) if way == "two optimizers" else None
        for step in range(6):
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            model(x).square().mean().backward()
            if step == 3 and way == "hook":
                model.register_comm_hook(None, allreduce_hook)
            for optimizer in filter(None, (first, second)):
                optimizer.step()
            model.zero_grad()
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()

    if not way.endswith("plain"):
        rule = way if ":" in way else "fedavg:4"
        with applied(loosening, {"rule": rule, "control": False}, allow="lossy") as context:
            last = job()
            reasons = [getattr(outcome, "reason", "") for outcome in context.outcomes]
        return last, [reason for reason in reasons if reason]
    return job(), []


@pytest.mark.parametrize(
    ("way", "says"), [("dgc:0.1", "is Adam"), ("two optimizers", "two optimizers hold"), ("hook", "hook of its own")]
)
def test_a_script_that_does_not_suit_is_given_its_all_reduce_back_and_its_replicas_are_equal(way, says):
    (first, reasons), (second, _) = on_ranks(trained, 2, way)

    assert first == second
    assert any(says in reason for reason in reasons)


def pair(rule: str) -> tuple[Any, Any]:
    return trained("plain")[0], trained(rule)


@pytest.mark.parametrize("rule", ["fedavg:1", "gaia:0", "dgc:1"])
def test_the_tightest_rules_give_the_weights_of_ddp(rule: str) -> None:
    for plain, (loosely, reasons) in on_ranks(pair, 2, rule):
        assert loosely == pytest.approx(plain, rel=1e-5, abs=1e-6)
        assert not reasons


def proposed(allow: tuple[str, ...], **facts: Any) -> Any:
    """Return what is said of comm.loose for a made run whose windows show a slow link."""
    job = Job(size=(400_000,) * 4, bytes_per_s=2e7)
    made = RunMaker(ranks=2, steps=60, cores=8, comm_ns=80 * MS).make()
    deep = DdpReplay.from_windows([play(job).window], models=[DdpModel(**{**job.model(), **facts})], cores=8)
    program = replace(Program.from_trace(made.trace, made.meta), deep=[deep])
    setup = Setup.from_facts(made.meta)
    setup = replace(setup, limits=replace(setup.limits, allow=allow))
    return {row.name: row for row in propose(None, program, setup)}["comm.loose"], program


def test_rare_averages_are_proposed_with_their_bytes_and_the_step_that_the_replay_gives() -> None:
    row, program = proposed(("lossy",))
    bare_s = program.predict(["comm=instant"]).step_s
    link = program.windows().links[0]

    assert (row.parameters, row.allow) == ({"rule": "fedavg:20", "control": True}, "lossy")
    average_s = (link.latency_ns + link.duration_ns(1_600_000)) / 1e9
    assert program.measured_s / row.predicted_speedup == pytest.approx(bare_s + average_s / 20)
    assert program.predict(row.edits).speedup == pytest.approx(row.predicted_speedup, rel=0.05)
    assert "sends 80.0 KB per step in place of 1.6 MB" in row.reason


def test_without_the_grant_nothing_is_proposed() -> None:
    row, _ = proposed(())

    assert isinstance(row, Refusal)
    assert "grant --allow lossy" in row.reason
