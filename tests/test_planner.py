"""The planner: compositions are replayed, limits hold, and where nothing is to be won nothing is chosen."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.catalog import ADVISERS, REMEDIES
from headway.core.errors import BarMissedError, InputError
from headway.core.files.planfile import ALLOWANCES, read_plan
from headway.plan.planner import (
    GIVEN_UP,
    IN_FORCE,
    KINDS,
    Plan,
    compose,
    reason_of,
    resolve,
    unless_excluded,
    unless_given_up,
    unless_in_force,
)
from headway.plan.proposal import MIN_SPEEDUP, Proposal, Refusal
from headway.plan.setup import Setup
from headway.report.answers import PlanAnswer
from headway.report.page.sections import plan_part
from headway.report.screens import render_plan
from headway.sim.recorded.program import Program
from headway.trace.events.loader_facts import GivenUp
from tests.runs_made import MS, RunMaker

JOB: dict[str, Any] = {
    "ranks": 2, "steps": 120, "epoch_steps": 30, "cores": 8, "fetch_ns": 20 * MS, "prep_ns": 2 * MS,
    "compute_ns": 8 * MS, "logging_ns": 2 * MS, "save_ns": lambda rank, step: 60 * MS if step % 20 == 0 else 0,
}  # fmt: skip

CONTROLS: dict[str, dict[str, Any]] = {
    "light input": {"fetch_ns": 0, "prep_ns": MS // 5},
    "enough workers": {"fetch_ns": 6 * MS, "prep_ns": MS, "num_workers": 3, "persistent": True, "iter_ns": MS},
    "compute only": {"fetch_ns": 0, "prep_ns": MS // 20, "compute_ns": 30 * MS},
    "links": {"fetch_ns": 0, "prep_ns": MS // 5, "comm_ns": 8 * MS},
    "cached already": {"fetch_ns": 0, "prep_ns": MS // 10, "epoch_steps": 120, "gc_ns": MS // 20},
}
"""Jobs that no remedy of this room makes faster."""


def program_of(**changes: Any) -> tuple[Program, Setup]:
    made = RunMaker(**{**JOB, **changes}).make()
    return Program.from_trace(made.trace, made.meta), Setup.from_facts(made.meta, memory_bytes=10**9)


def plan_of(**changes: Any) -> Plan:
    program, setup = program_of(**changes)
    return Plan.of(None, program, setup, ADVISERS)


def proposal(name: str, *edits: str, speedup: float = 1.5, **more: Any) -> Proposal:
    fields: dict[str, Any] = {"predicted_speedup": speedup, "interval": (speedup * 0.98, speedup * 1.02), **more}
    return Proposal(name, "test", edits, applies=fields.pop("applies", True), **fields)


# Laws


subsets = st.sets(
    st.sampled_from(["input.fetch=none", "checkpoint=none", "logging=buffered", "input.prep=none", "comm=none"]),
    min_size=1,
)


@pytest.mark.slow
@given(subsets)
def test_the_chosen_set_is_at_least_as_fast_as_each_of_its_members(edits: set[str]) -> None:
    program, setup = PROGRAM
    rows = [proposal(edit, edit, speedup=program.predict([edit], interval=False).speedup) for edit in sorted(edits)]
    plan = compose(rows, program, setup)

    best = max([row.predicted_speedup for row in rows if row.clear], default=1.0)
    assert plan.predicted_speedup >= best / MIN_SPEEDUP
    assert set(plan.chosen) <= {row.name for row in rows if row.clear}


@pytest.mark.slow
@given(subsets, st.booleans())
def test_what_protects_a_job_is_chosen_without_a_gain_but_not_without_its_grant(edits: set[str], granted: bool) -> None:
    program, setup = PROGRAM
    setup = replace(setup, limits=replace(setup.limits, allow=("lossy",) if granted else ()))
    rows = [proposal(edit, edit, speedup=program.predict([edit], interval=False).speedup) for edit in sorted(edits)]
    guard = proposal("guard", speedup=1.0, allow="lossy", protects=True, reason="it met a nan")
    plan, without = compose([*rows, guard], program, setup), compose(rows, program, setup)

    assert set(plan.chosen) == {*without.chosen, *(["guard"] if granted else [])}
    assert plan.predicted_speedup == without.predicted_speedup
    assert granted or any("it met a nan; --allow lossy" in row.reason for row in plan.refused)


@pytest.mark.parametrize("name", CONTROLS)
def test_a_job_with_nothing_to_win_gets_no_plan(name: str) -> None:
    changes: dict[str, Any] = {"logging_ns": 0, "save_ns": 0, **CONTROLS[name]}
    plan = plan_of(**changes)

    assert plan.chosen == ()
    assert plan.predicted_speedup == 1.0


def test_a_composition_is_replayed_not_multiplied() -> None:
    """Workers and a cache fight the same loss: together they win little more than the better one."""
    plan = plan_of(fetch_ns=5 * JOB["fetch_ns"])

    alone = {row.name: row.predicted_speedup for row in plan.proposals}
    assert alone["data.workers"] > 2
    assert alone["data.cache"] > 1.3
    assert plan.predicted_speedup < 0.8 * alone["data.workers"] * alone["data.cache"]
    assert plan.interval[0] * (1 - 1e-9) <= plan.predicted_speedup <= plan.interval[1] * (1 + 1e-9)


def test_proposals_are_ranked_by_device_hours() -> None:
    gains = [row.predicted_speedup for row in plan_of().proposals]

    assert gains == sorted(gains, reverse=True)


def test_a_member_that_adds_less_than_two_percent_is_left_out_and_what_excludes_each_other_is_not_chosen() -> None:
    program, setup = PROGRAM
    first = proposal("a", "input.fetch=none")
    excluded = [proposal("b", "checkpoint=none", conflicts=("a",)), proposal("c", "input.fetch=0.5x")]

    for others in ([proposal("idle", "input.prep=1x")], excluded):
        assert compose([first, *others], program, setup).chosen == ("a",)


def test_memory_is_a_limit_for_one_and_for_all_together() -> None:
    program, setup = PROGRAM
    free = setup.limits.memory_per_rank_bytes(setup)
    rows = [
        proposal("a", "input.fetch=none", memory_bytes=free * 2 // 3),
        proposal("b", "checkpoint=none", memory_bytes=free // 2),
        proposal("c", "input.prep=none", memory_bytes=2 * free),
    ]
    plan = compose(rows, program, setup)

    assert plan.chosen == ("a",)
    assert [row.name for row in plan.refused] == ["c"]
    assert "are free" in plan.refused[0].reason


@pytest.mark.parametrize("grant", ALLOWANCES)
def test_a_change_of_results_needs_its_own_grant(grant: str) -> None:
    program, setup = PROGRAM
    rows = [proposal("a", "input.fetch=none", speedup=1.75, allow=grant)]
    others = Setup.from_facts(
        {"world_size": 2}, memory_bytes=10**9, allow=tuple(word for word in ALLOWANCES if word != grant)
    )
    granted = Setup.from_facts({"world_size": 2}, memory_bytes=10**9, allow=(grant,))

    for refusing in (setup, others):
        plan = compose(rows, program, refusing)
        assert plan.chosen == ()
        assert f"predicted 1.75x (1.71 to 1.79) with --allow {grant}" in plan.refused[0].reason
    plan = compose(rows, program, granted)
    assert plan.chosen == ("a",)
    assert plan.plan_file().remedies[0].allow == grant


def test_each_proposal_that_is_not_chosen_has_the_reason_that_decided() -> None:
    program, setup = PROGRAM
    free = setup.limits.memory_per_rank_bytes(setup)
    rows = [
        proposal("taken", "input.fetch=none", speedup=3.0),
        proposal("noise", "gc=frozen:9", speedup=1.005),
        proposal("memory", "cache_cold=1", memory_bytes=free + 1),
        proposal("grant", "comm=none", speedup=1.75, allow="result-equivalent", risk="draws anew"),
        proposal("short", "logging=buffered", speedup=1.5, start_s=1e6),
        proposal("excluded", "input.fetch=0.5x"),
        proposal("little", "input.prep=1x"),
        proposal("hand", "checkpoint=none", applies=False),
    ]
    plan = compose(rows, program, setup)

    assert plan.chosen == ("taken",)
    assert {row.name: row.kind for row in plan.left_out} == {name: name for name in KINDS}
    reasons = {row["name"]: row["left_out"] for row in plan.to_json()["proposals"]}
    assert reasons["taken"] is None
    assert "predicted 1.75x" in reasons["grant"]["reason"]
    assert "taken" in reasons["excluded"]["reason"]
    assert "won back after about" in reasons["short"]["reason"]


def test_what_a_job_is_too_short_to_win_back_is_planned_for_a_longer_one() -> None:
    program, setup = PROGRAM
    rows = [proposal("data.workers", "input.fetch=none", speedup=1.5, start_s=2.0)]
    base_s = program.predict().base_step_s
    pays_from = math.ceil(rows[0].pays_from(base_s))

    def chosen(steps: int) -> tuple[str, ...]:
        return compose(rows, program, replace(setup, limits=replace(setup.limits, steps=steps))).chosen

    assert pays_from == math.ceil(2.0 / (base_s / 3))
    assert (chosen(pays_from - 1), chosen(2 * pays_from)) == ((), ("data.workers",))


def test_of_a_whole_job_a_plan_wins_less_by_what_headway_costs() -> None:
    program, setup = PROGRAM
    long = replace(setup, limits=replace(setup.limits, steps=100_000))
    plan = compose([proposal("data.workers", "input.fetch=none", start_s=0.5)], program, long)
    gain, plain_s = plan.predicted_speedup, plan.base_step_s * 100_000

    assert plan.of_job(gain) == pytest.approx(plain_s / (plain_s / gain + 0.5))
    assert plan.of_job(gain) > replace(plan, recording_s=1.0).of_job(gain)
    assert plan.to_json()["job"]["steps"] == 100_000
    assert replace(plan, chosen=()).of_job(1.0) == 1.0


def test_no_consent_is_asked_for_what_the_job_is_too_short_for() -> None:
    program, setup = PROGRAM
    row = proposal("data.threads", "input.fetch=none", speedup=1.75, allow="data.threads", start_s=2.0)
    kinds = {}
    for steps in (1, 10**6):
        limits = replace(setup.limits, steps=steps)
        [left_out] = compose([row], program, replace(setup, limits=limits)).left_out
        granted = compose([row], program, replace(setup, limits=replace(limits, allow=("data.threads",))))
        kinds[left_out.kind] = granted.chosen

    assert kinds == {"short": (), "grant": ("data.threads",)}


@pytest.mark.parametrize(("recording_s", "kind"), [(0.2, "little"), (2.0, "short")])
def test_what_headway_itself_costs_is_won_back_or_nothing_is_promised(recording_s: float, kind: str) -> None:
    row = proposal("data.cache", "input.fetch=none", speedup=1.25)  # 10 s become 8
    job = {"room_bytes": 10**12, "allowed": (), "steps": 100, "base_step_s": 0.1}

    assert reason_of(row, (), **job, recording_s=recording_s).kind == kind


def test_a_gain_that_the_run_is_too_noisy_to_tell_says_what_to_do() -> None:
    row = replace(proposal("data.cache", "input.fetch=none", speedup=1.3), interval=(0.19, 7.72))

    text = reason_of(row, (), room_bytes=10**12, allowed=()).reason
    assert text == "predicted 1.30x (0.19 to 7.72): not resolved; record for longer, or on a quieter host"


def test_a_screen_without_a_plan_names_what_keeps_the_best_gain_out() -> None:
    program, setup = PROGRAM
    rows = [proposal("data.workers", "input.fetch=none", speedup=1.75, allow="result-equivalent")]
    refusal = Refusal("data.cache", "data", "its examples change", unsafe=True)

    barred = render_plan(compose(rows, program, setup, refused=[refusal]).to_json(), source="runs/a 1")
    unsafe = render_plan(compose([], program, setup, refused=[refusal]).to_json())
    assert "needs your consent: data.workers, predicted 1.75x" in barred
    assert "headway plan 'runs/a 1' --allow result-equivalent" in " ".join(barred.split())
    assert "noise" not in barred
    assert "data.cache could change results here" in unsafe
    assert "its examples change" in unsafe
    page = plan_part(PlanAnswer.of({"proposals": [{"name": "data.workers"}], "refused": [refusal.to_json()]}), "")
    assert "data.cache could change results here" in page
    assert "data.cache: its examples change" in page
    asked = replace(refusal, unsafe=False, reason="results change: grant --allow lossy to have it predicted")
    assert "consent (--allow) is not counted." in render_plan(compose([], program, setup, refused=[asked]).to_json())


def test_every_remedy_that_is_said_to_apply_is_in_the_catalogue() -> None:
    for row in plan_of().proposals:
        assert (row.name in REMEDIES) == row.applies


@pytest.mark.slow
def test_the_numbers_of_the_ranks_decide_nothing() -> None:
    made = RunMaker(**{**JOB, "ranks": 3, "compute_ns": lambda rank, step: (6 + 4 * (rank == 0)) * MS}).make()
    numbers = np.array([2, 0, 1])
    events = made.trace.events
    renamed = {**events, "rank": np.where(events["rank"] >= 0, numbers[events["rank"]], -1).astype(np.int32)}
    other = replace(made.trace, events=renamed, ranks={int(numbers[r]): k for r, k in made.trace.ranks.items()})
    setup = Setup.from_facts(made.meta, memory_bytes=10**9)

    ours, theirs = (
        Plan.of(None, Program.from_trace(trace, made.meta), setup, ADVISERS) for trace in (made.trace, other)
    )

    assert ours.chosen
    assert theirs.chosen == ours.chosen
    assert theirs.plan_file().remedies[0].parameters == ours.plan_file().remedies[0].parameters
    assert theirs.step_s == pytest.approx(ours.step_s, rel=0.01)


# Files and JSON


def test_the_plan_file_holds_the_chosen_remedies_with_their_parameters(tmp_path: Path) -> None:
    plan = plan_of()
    plan.save(tmp_path / "plan.json")

    remedies = read_plan(tmp_path / "plan.json").remedies
    assert {remedy.name for remedy in remedies} == set(plan.chosen)
    assert next(r for r in remedies if r.name == "data.workers").parameters["num_workers"] >= 1


def test_the_json_has_the_promised_keys() -> None:
    content = json.loads(json.dumps(plan_of().to_json()))

    assert content["schema"] == "headway.plan/1"
    assert {"proposals", "chosen", "predicted_speedup"} <= content.keys()
    wanted = {"name", "room", "predicted_speedup", "interval", "applies", "cost", "risk"}
    assert all(wanted <= row.keys() for row in content["proposals"])


# Bad input


def test_an_adviser_is_named_by_module_and_function() -> None:
    with pytest.raises(InputError, match=r"Write module:function"):
        resolve("headway.data.advise")


def test_a_function_can_be_an_adviser() -> None:
    def propose(ledger: object, program: Program, setup: Setup) -> Iterator[Proposal | Refusal]:
        yield Refusal("x", "test", "because")

    program, setup = PROGRAM
    assert Plan.of(None, program, setup, {"test": propose}).refused[0].reason == "because"


def test_an_interval_the_wrong_way_round_is_refused() -> None:
    with pytest.raises(InputError, match=r"give \(low, high\)"):
        proposal("a", "input=none", interval=(2.0, 1.0))


def test_a_run_that_does_not_replay_gets_no_plan() -> None:
    made = RunMaker(**JOB).make()
    events = dict(made.trace.events)
    events["duration_ns"] = events["duration_ns"].copy()
    events["duration_ns"][made.trace.named("input.fetch")] *= 3
    program = Program.from_trace(replace(made.trace, events=events), made.meta)
    with pytest.raises(BarMissedError, match=r"Record a longer or a quieter run"):
        Plan.of(None, program, Setup.from_facts(made.meta), ADVISERS)


PROGRAM = program_of()
"""One program for the tests that only compose."""


def in_force(num_workers: int, **changes: Any) -> tuple[Plan, Program, Setup]:
    """Return the plan of a run that read its loader by `num_workers`, because a remedy gave it those."""
    made = RunMaker(**{**JOB, "num_workers": num_workers, "persistent": True, "iter_ns": MS, **changes}).make()
    given = {"num_workers": num_workers, "prefetch_factor": 2, "persistent_workers": True, "pin_memory": False}
    dataset = made.meta["loaders"]["0"].get("dataset", "")
    row = {"dataset": dataset, "before": 0, "num_workers": num_workers}
    applied = [{"name": "data.workers", "reason_not_applied": None, "facts": {**given, "loaders": [row]}}]
    loaders = {"0": {**made.meta["loaders"]["0"], "num_workers": 0, "persistent": False}}
    meta = {**made.meta, "applied": applied, "loaders": loaders}
    program, setup = Program.from_trace(made.trace, meta), Setup.from_facts(meta, memory_bytes=10**9)
    return Plan.of(None, program, setup, ADVISERS), program, setup


def test_a_remedy_in_force_is_not_followed_by_one_that_excludes_it() -> None:
    row = proposal("data.threads", conflicts=("data.workers", "data.cache"))
    found = unless_excluded(row, {"data.workers", "host.gc"})

    assert isinstance(found, Refusal)
    assert found.reason.startswith(f"it excludes data.workers, which {IN_FORCE}; in its place predicted 1.50x")
    assert unless_excluded(row, {"host.gc"}) == row == unless_excluded(row, {"data.threads", "data.workers"})


def test_a_remedy_in_force_is_proposed_again_only_where_other_parameters_win_more_than_the_noise() -> None:
    enough, _, setup = in_force(6)
    few, _, _ = in_force(1)
    refused = {row.name: row.reason for row in enough.refused}
    more = next(row for row in few.proposals if row.name == "data.workers")

    assert (setup.loaders["0"].num_workers, setup.loaders["0"].persistent) == (6, True)
    assert "data.workers" not in {row.name for row in enough.proposals}
    assert refused["data.workers"].startswith(f"it {IN_FORCE} (num_workers=6")
    assert more.clear
    assert more.parameters["num_workers"] > 1


@pytest.mark.parametrize(("speedup", "given", "again"), [(1.5, 8, False), (1.5, 4, True), (1.01, 4, False)])
def test_the_same_parameters_are_refused_whatever_they_are_predicted_to_win(speedup, given, again):
    row = proposal("host.gc", speedup=speedup, parameters={"every_steps": 8})

    found = unless_in_force(row, {"every_steps": given, "more": 1})

    assert (found == row) == again
    assert unless_in_force(row, None) == row
    assert again or found.reason.startswith(f"it {IN_FORCE} (every_steps={given})")


@pytest.mark.parametrize(("given", "again"), [(8, False), (4, True)])
def test_a_remedy_that_was_refused_or_withdrawn_is_proposed_with_other_parameters_only(given: int, again: bool) -> None:
    row = proposal("data.workers", parameters={"num_workers": 8}, loaders=(3,))

    found = unless_given_up(row, GivenUp({"num_workers": given, "more": 1}, "slower than recorded"))

    assert (found == row) == again
    assert unless_given_up(row, None) == row
    assert again or (found.reason, found.left_alone) == (
        f"it {GIVEN_UP} (num_workers=8): slower than recorded",
        {3: found.reason},
    )


def test_a_plan_of_a_run_in_which_a_dataset_proved_unfit_says_who_found_it() -> None:
    made = RunMaker(**JOB).make()
    loaders = {"0": {**made.meta["loaders"]["0"], "dataset": "D"}}
    left = {"dataset": "D", "reason_not_applied": "it draws", "about": "dataset"}
    applied = [
        {
            "name": "data.cache",
            "parameters": {"bytes": 1},
            "facts": {"loaders": [left]},
            "reason_not_applied": "it draws",
        }
    ]
    plain, unfit = (
        Plan.of(None, Program.from_trace(made.trace, meta), Setup.from_facts(meta, memory_bytes=10**9), ADVISERS)
        for meta in ({**made.meta, "loaders": loaders}, {**made.meta, "loaders": loaders, "applied": applied})
    )

    assert any(row.name.startswith("data.") for row in plain.proposals)
    assert not any(row.name.startswith("data.") for row in unfit.proposals)
    refused = {row.name: row for row in unfit.refused}
    for name in ("data.workers", "data.threads", "data.cache", "data.server"):
        assert "it draws (data.cache found it in this run)" in refused[name].reason
        assert refused[name].unsafe
