"""What the communication room proposes."""

from __future__ import annotations

from typing import Any

from headway.comm.advise import propose
from headway.plan.proposal import Proposal, Refusal
from headway.plan.setup import Setup
from headway.sim.program import Program
from tests.runs_made import MS, RunMaker


def advice(**changes: Any) -> dict[str, Proposal | Refusal]:
    made = RunMaker(**{"ranks": 2, "steps": 60, "cores": 8, **changes}).make()
    program = Program.from_trace(made.trace, made.meta)
    return {row.name: row for row in propose(None, program, Setup.from_facts(made.meta))}


def test_faster_links_are_predicted_but_not_applied() -> None:
    row = advice(comm_ns=5 * MS)["comm.links"]

    assert isinstance(row, Proposal)
    assert not row.applies
    assert 1.2 < row.predicted_speedup < row.interval[1]


def test_the_bucket_size_is_offered_for_a_live_try_without_a_promise() -> None:
    row = advice(comm_ns=5 * MS)["comm.bucket"]

    assert isinstance(row, Proposal)
    assert (row.predicted_speedup, row.clear, row.applies) == (1.0, False, True)
    assert row.interval[0] < 1 < row.interval[1]
    assert "Try it live" in row.reason


def test_hidden_communication_leaves_nothing_to_win() -> None:
    row = advice(comm_ns=MS // 100)["comm.bucket"]

    assert isinstance(row, Refusal)
    assert "no bucket size can win more" in row.reason


def test_one_rank_has_no_collective() -> None:
    assert "no collective" in advice(ranks=1)["comm.bucket"].reason
