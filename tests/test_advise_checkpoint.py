"""What the checkpoint room proposes for recorded saves, and what it says a failure would lose."""

import io
import os
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import headway
from headway.checkpoint.advise import (
    BUDGET,
    CALL_S,
    START_S,
    RecordedSaves,
    behind_s,
    measured_mtbf_s,
    propose,
    recorded_saves,
)
from headway.checkpoint.costs import best_interval_s
from headway.ledger.answers.ledger import Ledger
from headway.plan.proposal import Proposal, Refusal
from headway.plan.setup import Setup
from headway.sim.recorded.program import Program
from headway.trace.recording.run_facts import RunFacts
from headway.trace.recording.runs import Run
from tests.runs_made import MS, RunMaker, joined, write_folder

SAVES: dict[str, Any] = {"save_ns": lambda rank, step: 40 * MS if step % 10 == 5 else 0}


def advice(ledger: object = None, **changes: Any) -> dict[str, Proposal | Refusal]:
    made = RunMaker(**{"ranks": 2, "steps": 60, "cores": 8, **changes}).make()
    program = Program.from_trace(made.trace, made.meta)
    return {row.name: row for row in propose(ledger, program, Setup.from_facts(made.meta))}


def test_a_job_that_hardly_saves_is_left_alone() -> None:
    rows = advice()

    assert set(rows) == {"checkpoint.interval"}
    assert isinstance(rows["checkpoint.interval"], Refusal)
    assert "too little" in rows["checkpoint.interval"].reason


def test_saves_that_cost_too_much_are_made_as_rare_as_the_budget_says() -> None:
    """A save of 40 ms every 10 steps of 6.6 ms; 3.5 % of the time allow one every 174."""
    row = advice(**SAVES)["checkpoint.interval"]

    assert row.parameters["every_steps"] == pytest.approx(40 / (BUDGET * 6.6), rel=0.03)
    assert row.predicted_speedup == pytest.approx(10.6 / (6.6 * (1 + BUDGET)), rel=0.02)
    assert row.interval[0] * (1 - 1e-9) <= row.predicted_speedup <= row.interval[1] * (1 + 1e-9)
    assert not row.applies
    assert "a failure loses" in row.risk


def test_saves_within_the_budget_stay_as_they_are() -> None:
    row = advice(save_ns=lambda rank, step: 4 * MS if step % 20 == 5 else 0)["checkpoint.interval"]

    assert isinstance(row, Refusal)
    assert "of the steps' time: within the budget" in row.reason or "too little" in row.reason


def test_a_failure_rate_that_was_lived_through_decides_instead_of_the_budget() -> None:
    maker = RunMaker(ranks=2, steps=60, cores=8, **SAVES)
    first = maker.make()
    run = joined(first, RunMaker(ranks=2, steps=60, cores=8, attempt=1, start_ns=first.meta["end_ns"], **SAVES).make())
    ledger = Ledger.of(run)
    mtbf_s = measured_mtbf_s(ledger)
    row = advice(ledger, **SAVES)["checkpoint.interval"]

    assert mtbf_s == pytest.approx(ledger.wall_ns / 1e9)
    assert row.parameters["every_steps"] == pytest.approx(best_interval_s(0.04, mtbf_s) / 0.0066, rel=0.03)
    assert "failures" in row.reason
    assert measured_mtbf_s(Ledger.of(first)) is None


def test_headways_own_saves_need_no_other_way_to_save() -> None:
    made = RunMaker(ranks=1, steps=60, **SAVES).make()
    swapped = {"checkpoint.save": "checkpoint.snapshot", "checkpoint.snapshot": "checkpoint.save"}
    trace = replace(made.trace, names=tuple(swapped.get(name, name) for name in made.trace.names))
    program = Program.from_trace(trace, made.meta)
    rows = {row.name: row for row in propose(None, program, Setup.from_facts(made.meta))}

    assert isinstance(rows["checkpoint.interval"], Proposal)
    assert "already" in rows["checkpoint.async"].reason


BEHIND = RecordedSaves(
    num_saves=4, every_steps=30, cost_s=0.3, step_s=0.02, own=False, num_bytes=80_000_000, written_bytes=80_000_000,
    synced=True, dcp=True, late_s=0.0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "busy", "facts", "crowding_s"),
    [
        (1, 0.0, {"env": {"OMP_NUM_THREADS": "1"}}, 0.0),
        (1, 1.0, {"env": {"OMP_NUM_THREADS": "1"}}, 0.0),
        (2, 1.0, {"env": {"OMP_NUM_THREADS": "1"}}, 0.04),
        (1, 1.0, {}, 0.04),
        (1, 1.0, {"device_type": "NVIDIA H200"}, 0.0),
    ],
    ids=["asleep", "a core is idle", "no core is idle", "torch's threads take all cores", "on an accelerator"],
)
def test_writing_behind_the_steps_costs_what_it_finds_no_idle_core_for(ranks, busy, facts, crowding_s) -> None:
    """80 MB take 80 ms of one of two cores, while the save of 300 ms is written."""
    program: Any = SimpleNamespace(cores=2, busy=np.full(ranks, busy), facts=RunFacts.of(facts))
    setup = Setup.from_facts({"world_size": ranks, "cores": 2, **facts})

    each_s, once_s = behind_s(program, BEHIND, setup)

    assert each_s == pytest.approx(0.02 + CALL_S + crowding_s)
    assert once_s == pytest.approx(0.08)
    assert behind_s(program, replace(BEHIND, dcp=False), setup)[1] == pytest.approx(0.08 + START_S)


@pytest.mark.parametrize(("replicated", "num_bytes"), [(True, 10**6), (False, 5 * 10**5)])
def test_under_ddp_each_rank_copies_all_of_what_the_ranks_write_together(tmp_path, replicated, num_bytes) -> None:
    made = RunMaker(ranks=2, steps=60, cores=8, **SAVES).make()
    saved = made.trace.named("checkpoint.save")
    events = {**made.trace.events, "corr": np.where(saved, 1, made.trace.events["corr"])}
    names = made.trace.names if replicated else ["host.cpu" if n == "comm.wait" else n for n in made.trace.names]
    made = replace(made, trace=replace(made.trace, events=events, names=tuple(names)))
    found = recorded_saves(Program.from_run(Run.open(write_folder(made, tmp_path))))

    assert (found.dcp, found.num_bytes, found.written_bytes) == (True, num_bytes, 10**6)


def test_saves_at_uneven_steps_are_said_to_come_at_a_whole_number_of_them() -> None:
    """Gaps of 1 and 2 in turn: 1.5 steps are no interval. What a save costs is the time of all over their number."""
    made = RunMaker(ranks=1, steps=60, cores=8, save_ns=lambda rank, step: 40 * MS if step % 3 else 0).make()
    found = recorded_saves(Program.from_trace(made.trace, made.meta))

    assert (found.every_steps, type(found.every_steps)) == (1, int)
    assert found.cost_s == pytest.approx(0.04, rel=0.02)


class Slow(io.FileIO):
    """A file on a disk that takes its time."""

    def write(self, data) -> int:
        time.sleep(0.004)
        return super().write(data)


@pytest.fixture(scope="module")
def saving_run(tmp_path_factory) -> Run:
    """A real run that saves 4 MB durably, on a slow disk, at every third step of 4 ms."""
    folder = tmp_path_factory.mktemp("saving")
    model = torch.nn.Linear(1000, 1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with headway.run(folder / "run"):
        for step in range(90):
            time.sleep(0.004)
            model(torch.ones(1, 1000)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 3 == 2:
                with Slow(folder / "w.tmp", "wb") as file:
                    torch.save(model.state_dict(), file)
                    os.fsync(file.fileno())
                os.replace(folder / "w.tmp", folder / "w.pt")
    return Run.open(folder / "run")


@pytest.mark.slow
def test_a_real_run_that_saves_too_often_is_told_what_both_remedies_would_win(saving_run) -> None:
    ledger, program = Ledger.of(saving_run), Program.from_run(saving_run)
    saves = recorded_saves(program)
    rows = {row.name: row for row in propose(ledger, program, Setup.from_facts(saving_run.meta))}
    interval, behind = rows["checkpoint.interval"], rows["checkpoint.async"]

    assert saves.every_steps == 3
    assert saves.num_bytes == pytest.approx(4_004_000, rel=0.01)
    stall_s = sum(ns for sub, ns in ledger.sub_ns.items() if sub.startswith("checkpoint.")) / 1e9 / 30
    assert saves.cost_s == pytest.approx(stall_s, rel=0.35)  # the first, cold one is no steady state
    assert interval.predicted_speedup > 1.02
    assert behind.interval[0] <= behind.predicted_speedup <= behind.interval[1]
    assert "save behind" not in behind.reason
    assert (interval.conflicts, behind.conflicts) == (("checkpoint.async",), ("checkpoint.interval",))
