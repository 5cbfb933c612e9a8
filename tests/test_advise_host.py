"""What the host room proposes, and what it finds too small to change."""

from typing import Any

import pytest

from headway.host.advise import COLLECT_EVERY, propose
from headway.ledger.answers.causes import find_causes
from headway.ledger.answers.ledger import Ledger
from headway.plan.proposal import Proposal, Refusal
from headway.plan.setup import Setup
from headway.sim.recorded.program import Program
from tests.runs_made import MS, RunMaker


def advice(**changes: Any) -> dict[str, Proposal | Refusal]:
    hosts = changes.pop("hosts", ["one", "other"])
    made = RunMaker(**{"ranks": 2, "steps": 60, "cores": 8, **changes}).make()
    program = Program.from_trace(made.trace, {**made.meta, "hosts": hosts})
    return {row.name: row for row in propose(None, program, Setup.from_facts(made.meta))}


def test_a_quiet_job_is_left_alone() -> None:
    rows = advice()

    assert set(rows) == {"host.logging", "host.gc", "straggler.remove"}
    assert all(isinstance(row, Refusal) and "too little" in row.reason for row in rows.values())


@pytest.mark.parametrize(
    ("changes", "name", "applies", "speedup"),
    [
        ({"logging_ns": 2 * MS}, "host.logging", True, 8.6 / 6.95),
        ({"gc_ns": lambda rank, step: 8 * MS if step % 4 == 0 else 0}, "host.gc", True, 8.6 / 6.62),
        ({"compute_ns": lambda rank, step: (5 + 3 * rank) * MS}, "straggler.remove", False, 9.6 / 6.6),
    ],
)
def test_a_cause_that_costs_is_proposed_with_its_gain(changes, name, applies, speedup):
    row = advice(**changes)[name]

    assert row.applies == applies
    assert row.predicted_speedup == pytest.approx(speedup, rel=0.03)
    assert row.interval[0] * (1 - 1e-9) <= row.predicted_speedup <= row.interval[1] * (1 + 1e-9)


def test_a_slow_rank_is_not_sent_to_another_host_where_all_ranks_share_one() -> None:
    row = advice(compute_ns=lambda rank, step: (5 + 3 * rank) * MS, hosts=["one"])["straggler.remove"]

    assert isinstance(row, Refusal)
    assert "share one host" in row.reason


def test_short_log_records_win_nothing_in_the_background() -> None:
    """Their handler computes rather than waits, and the interpreter's lock brings that back."""
    assert isinstance(advice(logging_ns=MS // 8)["host.logging"], Refusal)


def test_collections_are_no_rarer_than_they_need_to_be() -> None:
    row = advice(steps=240, gc_ns=lambda rank, step: 8 * MS if step % 4 == 0 else 0)["host.gc"]

    assert row.parameters["every_steps"] in COLLECT_EVERY[:2]


def test_collections_that_the_script_calls_for_are_not_put_off() -> None:
    costs = {"gc_ns": lambda rank, step: 8 * MS if step % 4 == 0 else 0, "gc_called": True, "ranks": 1}
    made = RunMaker(**{"steps": 60, "cores": 8, **costs}).make()
    program = Program.from_trace(made.trace, made.meta)

    assert "calls gc.collect() itself" in advice(**costs)["host.gc"].reason
    assert program.predict(["gc=frozen:50"]).speedup <= 1
    assert program.predict(["host.gc=none"]).speedup > 1.2
    assert "less often" in next(cause for cause in find_causes(Ledger.of(made)) if cause.cause == "host.gc").fix


def test_one_rank_has_no_straggler() -> None:
    assert "straggler.remove" not in advice(ranks=1)
