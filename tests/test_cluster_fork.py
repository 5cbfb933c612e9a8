"""Copies of jobs on unlike devices: what they come to, simulated."""

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.cli import main
from headway.cluster.advise import propose
from headway.cluster.fork.answer import fork_answer, read_jobs, read_speeds
from headway.cluster.fork.slots import deal
from headway.core.errors import HeadwayError
from headway.ledger.answers.ledger import Ledger
from headway.ledger.booking.arrivals import RankLateness
from headway.plan.setup import PlanLimits, Setup

SPEEDS = [4.0, 4.0, 2.0, 2.0, 1.0]

speeds_of_devices = st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0, 7.3]), min_size=1, max_size=6)


@given(num_steps=st.integers(0, 12), speeds=st.lists(st.floats(0.1, 10), min_size=1, max_size=3))
def test_dealt_steps_sum_up_and_no_other_dealing_ends_sooner(num_steps, speeds):
    steps = deal(num_steps, np.array(speeds))

    ways = itertools.product(range(num_steps + 1), repeat=len(speeds))
    ends = [max(n / v for n, v in zip(way, speeds, strict=True)) for way in ways if sum(way) == num_steps]
    assert steps.sum() == num_steps
    assert (steps / speeds).max() == pytest.approx(min(ends))


@pytest.mark.parametrize("num_jobs", [1, 3, 5, 8, 12])
@pytest.mark.parametrize("steps", [1_000, 26_000, 100_000])
def test_total_time_is_near_the_fluid_bound_and_never_above_las(num_jobs, steps):
    answer = fork_answer([(f"job{index}", steps) for index in range(num_jobs)], SPEEDS)

    assert answer["bound_s"] == num_jobs * steps / 13
    assert answer["bound_s"] <= answer["total_s"] <= 1.05 * answer["bound_s"]
    assert answer["total_s"] <= 1.01 * answer["las_s"]
    if num_jobs == 1:
        assert answer["total_s"] <= 0.35 * answer["las_s"]


@pytest.mark.slow
@given(
    speeds=speeds_of_devices, steps=st.lists(st.integers(1, 20_000), min_size=1, max_size=9),
    slot_cost_s=st.sampled_from([0.0, 1.0, 20.0]),
)  # fmt: skip
def test_each_step_is_done_once_and_costs_are_all_that_is_lost(speeds, steps, slot_cost_s):
    answer = fork_answer([(f"{index}", count) for index, count in enumerate(steps)], speeds, slot_cost_s=slot_cost_s)

    assert [sum(row["steps_on"]) for row in answer["rows"]] == steps
    assert answer["total_s"] == max(row["end_s"] for row in answer["rows"])
    assert answer["total_s"] >= answer["bound_s"] * (1 - 1e-9)
    assert answer["total_s"] <= 1.01 * answer["las_s"] + slot_cost_s
    # A slot loses its cost and less than a step of the slowest device; each ends after its length, or with a job.
    slot_s, lost_s = max(360, 100 / min(speeds)), slot_cost_s + 1 / min(speeds)
    num_slots = answer["total_s"] / slot_s + len(steps)
    assert answer["total_s"] <= answer["bound_s"] + num_slots * lost_s + slot_cost_s * len(speeds)


@pytest.mark.slow
@given(steps=st.lists(st.integers(1, 20_000), min_size=1, max_size=5))
def test_one_device_runs_jobs_as_they_are_and_pays_for_changes_alone(steps):
    answer = fork_answer([(f"{index}", count) for index, count in enumerate(steps)], [2.0], slot_cost_s=0.0)

    assert answer["total_s"] == pytest.approx(sum(steps) / 2)
    assert {row["copies"] for row in answer["rows"]} == {1}
    if len(steps) == 1:
        assert fork_answer([("a", steps[0])], [2.0])["rows"][0]["cost_s"] == 0


def test_a_job_that_is_done_before_forking_pays_stays_whole():
    answer = fork_answer([("short", 4)], SPEEDS)

    assert (answer["total_s"], answer["las_s"], answer["rows"][0]["copies"]) == (1.0, 1.0, 1)


@pytest.mark.parametrize(
    ("speeds", "jobs", "options", "error"),
    [
        ("4,fast", '[{"name": "a", "steps": 1}]', {}, "'4,fast'; write steps/s of each device"),
        ("", '[{"name": "a", "steps": 1}]', {}, "write steps/s of each device"),
        ("0,0", '[{"name": "a", "steps": 1}]', {}, "no device does a step"),
        ("4,-1", '[{"name": "a", "steps": 1}]', {}, "has -1; give steps/s"),
        ("4,nan", '[{"name": "a", "steps": 1}]', {}, "has nan"),
        ("4", "", {}, "jobs.json cannot be read: No such file"),
        ("4", "[]", {}, "has no job"),
        ("4", '{"name": "a"}', {}, "is not JSON that headway reads.*Write a list such as"),
        ("4", '[{"name": "a"}]', {}, "missing required field `steps`"),
        ("4", '[{"name": "a", "steps": 0}]', {}, "job 'a' has 0 steps; give a whole number"),
        ("4", '[{"name": "a", "steps": 1.5}]', {}, "job 'a' has 1.5 steps"),
        ("4", '[{"name": "a", "steps": 1}, {"name": "a", "steps": 2}]', {}, "job id 'a' occurs twice"),
        ("4", '[{"name": "a", "steps": 1}]', {"slot_cost_s": -1.0}, "--slot-cost-s not below 0"),
        (
            "4",
            '[{"name": "a", "steps": 1}]',
            {"slot_s": 1.0},
            "a slot of 1 s has no room for its cost, 1 s, and a step",
        ),
        ("4", '[{"name": "a", "steps": 1000000000}]', {}, "at most 500,000 slots times devices"),
    ],
)
def test_what_cannot_be_simulated_is_refused_with_the_value_and_the_rule(tmp_path, speeds, jobs, options, error):
    if jobs:
        (tmp_path / "jobs.json").write_text(jobs)

    with pytest.raises(HeadwayError, match=error):
        fork_answer(read_jobs(tmp_path / "jobs.json"), read_speeds(speeds), **options)


def test_the_verb_prints_the_four_keys_and_names_the_device_that_it_leaves_out(tmp_path, capsys):
    path = tmp_path / "jobs.json"
    path.write_text('[{"name": "a", "steps": 7000}, {"name": "b", "steps": 1400.0}]')

    with pytest.raises(SystemExit, match=r"^0$"):
        main(["cluster", "fork", "--speeds", "4,2,0,1", "--jobs", str(path), "--json"])

    printed = capsys.readouterr()
    answer = json.loads(printed.out)
    assert list(answer) == ["total_s", "bound_s", "las_s", "rows"]
    assert answer["bound_s"] == 1200
    assert [row["name"] for row in answer["rows"]] == ["a", "b"]
    assert "device 2 does 0 steps/s and is left out" in printed.err
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["cluster", "fork", "--speeds", "4,2,1", "--jobs", str(path)])
    assert "no schedule sooner than" in capsys.readouterr().out


@pytest.mark.parametrize(("own_s", "times_last", "allow", "said"), [
    ([0.1, 0.1, 0.4], 99, ("lossy",), (0.4 * (10 + 10 + 2.5) / 3, "--speeds 10,10,2.5 -- train.py")),
    ([0.1, 0.1, 0.4], 99, (), (None, "grant --allow lossy")),
    ([0.1, 0.1, 0.4], 30, ("lossy",), None),
    ([0.1, 0.1, 0.11], 99, ("lossy",), None),
    ([0.1], 0, ("lossy",), None),
])  # fmt: skip
def test_copies_are_proposed_where_a_rank_is_slower_all_along(own_s, times_last, allow, said):
    rows = {rank: {"useful": int(seconds * 100e9), "straggler": 10**9} for rank, seconds in enumerate(own_s)}
    late = RankLateness(num_collectives=100, times_last={len(own_s) - 1: times_last})
    ledger = Ledger(
        devices=len(own_s), steps=100, wall_ns=10**11, ledger_ns={}, sub_ns={},
        basis={}, coverage=1.0, by_rank_ns=rows, lateness=late,
    )  # fmt: skip
    setup = Setup(len(own_s), len(own_s), 4, "cpu", PlanLimits(10**9, 4, allow))
    (answer,) = list(propose(ledger, SimpleNamespace(run=None, measured_s=0.4), setup)) or [None]

    assert (answer is None) == (said is None)
    if said:
        assert getattr(answer, "predicted_speedup", None) == (said[0] and pytest.approx(said[0]))
        assert said[1] in answer.reason
