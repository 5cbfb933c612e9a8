"""The ranks that block a job: found on every grid, for one fault and for two, and in real jobs."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.core.mesh import Mesh
from headway.ledger.hang import RankReport, Wait, localise
from tests.hung_jobs import HungJob, hung_reports, random_job
from tests.refusals import refused

seeds = st.integers(0, 10**6)


@given(seeds)
def test_a_planted_silent_rank_is_the_origin_and_every_other_rank_waits_for_it(seed):
    job = random_job(seed, most=96)
    (faulty,) = job.stops

    verdict = localise(hung_reports(job), job.mesh)

    assert [(o.ranks, o.reason, o.num_waiting) for o in verdict.origins] == [
        ((faulty,), "silent", job.mesh.world_size - 1)
    ]
    assert verdict.deadlocks == ()
    assert all(verdict.chain(rank)[-1] == faulty for rank in range(job.mesh.world_size))


@given(seeds)
def test_a_rank_that_answers_but_did_not_enter_is_found_from_the_waits_of_the_others(seed):
    job = random_job(seed, most=96)
    job = HungJob(job.mesh, job.num_microbatches, job.stops, frozenset(job.stops))

    verdict = localise(hung_reports(job), job.mesh)

    assert verdict.ranks == tuple(job.stops)
    assert verdict.origins[0].reason == "absent"


@given(seeds, st.booleans())
def test_two_faults_at_once_are_both_found(seed, answering):
    job = random_job(seed, most=96, num_faults=2, answering=answering)

    verdict = localise(hung_reports(job), job.mesh)

    assert verdict.ranks == tuple(sorted(job.stops))
    assert {o.ranks[0]: o.reason for o in verdict.origins} == {
        rank: "absent" if rank in job.answering else "silent" for rank in job.stops
    }


@given(seeds)
def test_the_verdict_does_not_depend_on_the_order_of_the_reports(seed):
    job = random_job(seed, most=64, num_faults=2, answering=True)
    reports = hung_reports(job)
    shuffled = random.Random(seed).sample(reports, len(reports))

    assert localise(shuffled, job.mesh).origins == localise(reports, job.mesh).origins


@given(seeds)
def test_each_step_of_a_chain_is_a_rank_that_the_one_before_really_waits_for(seed):
    """Oracle: the waits of a rank, spelled out member by member."""
    job = random_job(seed, most=48, num_faults=2, answering=True)
    reports = {report.rank: report for report in hung_reports(job)}

    verdict = localise(reports.values(), job.mesh)

    for rank, target in verdict.next_rank.items():
        awaited = set()
        for wait in reports[rank].waits:
            if wait.op in ("send", "recv"):
                awaited.add(wait.peer)
            else:
                members = job.mesh.group_of(rank, *wait.group.split("-"))
                awaited |= {m for m in members if m not in reports or wait not in reports[m].waits}
        assert target in awaited


def test_ten_thousand_ranks_are_localised():
    job = HungJob(Mesh({"tp": 8, "pp": 8, "dp": 160}), 1, {4_321: 1})

    verdict = localise(hung_reports(job), job.mesh)

    assert verdict.ranks == (4_321,)
    assert verdict.origins[0].num_waiting == 10_239
    assert verdict.place(4_321) == "rank 4321 (tp 1, pp 4, dp 67)"


def all_in(op: str, *ranks: int, seq: int = 5) -> list[RankReport]:
    return [RankReport(rank, (Wait(op, 0, seq),)) for rank in ranks]


def test_a_collective_that_all_entered_and_that_does_not_end_is_its_own_origin():
    waiting = RankReport(4, (Wait("recv", "dp", 0, 1),))

    verdict = localise([*all_in("all_reduce", 0, 1, 2, 3), waiting], Mesh({"dp": 5}), groups={0: range(4)})

    assert [(o.ranks, o.reason, o.num_waiting) for o in verdict.origins] == [((0, 1, 2, 3), "stuck", 1)]
    assert verdict.states() == ["stuck"] * 4 + ["waiting"]


def test_members_that_are_past_a_collective_are_not_waited_for():
    past = RankReport(1, (), doing="computes", reached={0: 5})

    verdict = localise([*all_in("all_reduce", 0), past], Mesh({"dp": 2}), groups={0: (0, 1)})

    assert {o.ranks: o.reason for o in verdict.origins} == {(0,): "stuck", (1,): "absent"}


def test_ranks_that_enter_two_collectives_in_different_orders_are_a_deadlock():
    reports = [RankReport(0, (Wait("all_reduce", 1, 3),)), RankReport(1, (Wait("all_reduce", 2, 8),))]

    verdict = localise(reports, Mesh({"dp": 2}), groups={1: (0, 1), 2: (0, 1)})

    assert (verdict.origins, verdict.deadlocks) == ((), ((0, 1),))
    assert verdict.states() == ["deadlock", "deadlock"]


def test_different_collectives_under_one_number_are_a_deadlock():
    reports = [*all_in("all_reduce", 0), *all_in("broadcast", 1)]

    assert localise(reports, Mesh({"dp": 2}), groups={0: (0, 1)}).deadlocks == ((0, 1),)


def test_a_message_whose_two_halves_are_open_is_stuck_once():
    reports = [RankReport(0, (Wait("send", "pp", 2, 1),)), RankReport(1, (Wait("recv", "pp", 2, 0),))]

    assert [(o.ranks, o.reason) for o in localise(reports, Mesh({"pp": 2})).origins] == [((0, 1), "stuck")]


def test_blocking_sends_towards_each_other_are_a_deadlock_and_asynchronous_ones_hold_nobody():
    def sends(blocking: bool) -> list[RankReport]:
        return [RankReport(rank, (Wait("send", "pp", 0, 1 - rank, blocking),), "computes") for rank in (0, 1)]

    assert localise(sends(True), Mesh({"pp": 2})).deadlocks == ((0, 1),)
    assert [o.reason for o in localise(sends(False), Mesh({"pp": 2})).origins] == ["absent", "absent"]


def test_ranks_that_all_compute_block_nobody():
    verdict = localise([RankReport(0), RankReport(1)], Mesh({"dp": 2}))

    assert (verdict.ranks, verdict.states()) == ((), ["busy", "busy"])


def test_reports_of_another_attempt_are_ignored_and_counted():
    old = RankReport(1, (Wait("barrier", "dp", 9),), attempt=0)
    new = RankReport(0, (Wait("barrier", "dp", 1),), attempt=1)

    verdict = localise([old, new], Mesh({"dp": 2}))

    assert (verdict.ranks, verdict.num_ignored) == ((1,), 1)
    assert localise([old, new], Mesh({"dp": 2}), attempt=0).ranks == (0,)


test_reports_that_cannot_be_are_refused = refused(
    ([RankReport(0), RankReport(0)], r"rank 0 reports twice in attempt 0.*Keep the newer report"),
    ([RankReport(2)], r"rank 2 is not in dp\(2\) = 2; use 0\.\.1"),
    ([RankReport(0, (Wait("recv", "dp", peer=5),))], r"rank 5 is not in dp\(2\)"),
    ([RankReport(0, (Wait("barrier", "pd"),))], r"group 'pd' is not known. Did you mean 'dp'"),
    ([RankReport(0, (Wait("barrier", 7),))], r"rank 0 reports group 7, whose ranks are 1"),
    by=lambda reports: localise(reports, Mesh({"dp": 2}), groups={7: [1]}),
)


def test_a_mesh_must_be_as_large_as_the_world():
    with pytest.raises(InputError, match=r"tp\(2\) \* dp\(2\) = 4 is not the world size 6"):
        Mesh({"tp": 2, "dp": 2}, world_size=6)
