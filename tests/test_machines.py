"""Machines that compute slowly are found, whatever the clocks, and unlike work is not held against anybody."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks._synthetic import SyntheticFault, SyntheticJob, generate
from headway.core.errors import InputError
from headway.ledger.machines import LEAST_MACHINES, PASSES, MachineTimes, machine_times
from headway.trace.events.parts import Parts
from headway.trace.events.trace import Trace
from tests.paths import shared

JOB = SyntheticJob(dp=4, pp=2, num_microbatches=4, num_steps=4, noise=0.01)
FLEET_HOSTS, RANKS_PER_HOST = 200, 8


def times(trace: Trace | Parts, **options) -> MachineTimes:
    found = machine_times(trace, **options)
    assert found is not None
    return found


def fleet(seed: int, slow: dict[int, float], *, hosts: int = FLEET_HOSTS, noise: float = 0.02) -> Trace:
    """Return 3 steps of `hosts` x 8 ranks in four stages of unlike work; `slow` maps hosts to factors."""
    rng = np.random.default_rng(seed)
    ranks = np.arange(hosts * RANKS_PER_HOST)
    rank = np.tile(ranks, 6)
    backward = np.repeat([0, 1] * 3, len(ranks))
    stage = rank // RANKS_PER_HOST % 4
    work = np.array([1.0, 1.2, 0.9, 1.7])[stage] * (1 + backward)
    factor = np.ones(hosts)
    for host, times_slower in slow.items():
        factor[host] = times_slower
    duration = 1e8 * work * factor[rank // RANKS_PER_HOST] * np.exp(noise * rng.standard_normal(len(rank)))
    where = {r: {"pp": r // RANKS_PER_HOST % 4, "host": f"h{r // RANKS_PER_HOST:04}"} for r in ranks.tolist()}
    columns = {
        "rank": rank, "name": backward, "duration_ns": duration.astype(np.int64), "step": 1 + np.arange(len(rank)),
    }  # fmt: skip
    return Trace.from_columns(columns, names=["segment.forward", "segment.backward"], ranks=where)


@given(st.lists(st.integers(-(10**12), 10**12), min_size=8, max_size=8))
def test_the_view_does_not_depend_on_clocks(offsets):
    trace = generate(JOB, seed=5).trace
    moved = trace.events["start_ns"] + np.array(offsets)[trace.events["rank"]]

    found = times(replace(trace, events={**trace.events, "start_ns": moved}))

    np.testing.assert_array_equal(found.slowdown, times(trace).slowdown)


@given(st.integers(1, 50), st.integers(0, 100))
def test_equal_machines_are_as_fast_as_expected_however_long_their_passes_are(factor, seed):
    trace = fleet(seed, {}, hosts=8, noise=0.0)
    longer = replace(trace, events={**trace.events, "duration_ns": factor * trace.events["duration_ns"]})

    np.testing.assert_allclose(times(longer).machine_slowdown, 1.0, rtol=1e-6)


@given(st.permutations(range(40)))
def test_the_order_of_rows_does_not_matter(order):
    trace = fleet(3, {2: 1.5}, hosts=5)
    rows = np.argsort(np.array(order)[np.arange(len(trace)) % 40], kind="stable")

    assert times(trace.where(rows)).outliers == pytest.approx(times(trace).outliers)


def test_means_are_those_of_the_rows():
    """Oracle: plain sums."""
    trace = fleet(1, {}, hosts=6)
    found = times(trace)

    for index, rank in enumerate(found.ranks.tolist()):
        for column, name in enumerate(("segment.forward", "segment.backward")):
            mine = trace.named(name) & (trace.events["rank"] == rank)
            assert found.mean_s[index, column] == pytest.approx(trace.events["duration_ns"][mine].mean() / 1e9)


@pytest.mark.parametrize("seed", range(10))
def test_one_slow_machine_in_two_hundred_is_found_and_no_other(seed):
    """The share of slow machines that MegaScale reports: about 0.5 %. Ten per cent slower, noise of 2 % per pass."""
    host = seed * 19 % FLEET_HOSTS
    (found,) = times(fleet(seed, {host: 1.1})).outliers

    assert found.machine == f"h{host:04}"
    assert found.ranks == tuple(range(host * RANKS_PER_HOST, (host + 1) * RANKS_PER_HOST))
    assert found.slowdown == pytest.approx(1.1, abs=0.02)
    stage_s = 3 * 0.3 * [1.0, 1.2, 0.9, 1.7][host % 4]
    assert found.lost_s == pytest.approx(0.1 * stage_s, rel=0.5)


@pytest.mark.parametrize("seed", range(10))
def test_equal_machines_raise_no_alarm_though_their_stages_do_unlike_work(seed):
    assert times(fleet(seed, {})).outliers == ()


@pytest.mark.parametrize("dp", range(4))
def test_a_slow_worker_of_an_operation_trace_is_found(dp):
    made = generate(JOB, seed=dp, faults=[SyntheticFault("worker", 1.5, dp=dp, stage=1)])

    (found,) = times(made.trace).outliers

    assert found.machine == f"dp {dp} pp 1"
    assert found.slowdown == pytest.approx(1.5, rel=0.05)


def test_a_slow_last_stage_and_uneven_sequences_are_no_machine_s_fault():
    for fault in (SyntheticFault("last_stage", 1.6), SyntheticFault("sequence", 0.05)):
        assert times(generate(JOB, seed=2, faults=[fault]).trace).outliers == ()


def test_the_published_traces_name_the_slow_worker_and_no_machine_where_sequences_are_uneven():
    slow = times(Trace.open(shared("straggler/trace-AR.parquet"))).outliers

    assert [found.machine for found in slow] == ["dp 0 pp 0"]
    assert slow[0].slowdown == pytest.approx(2.35, abs=0.01)
    assert times(Trace.open(shared("straggler/trace-SE.parquet"))).outliers == ()


def test_flops_of_rows_say_what_work_was():
    rows = {"rank": [0, 1, 2, 3], "duration_ns": [10, 20, 30, 80], "flops": [1e9, 2e9, 3e9, 4e9], "name": [0] * 4}

    found = times(Trace.from_columns(rows, names=["segment.forward"]))

    assert found.basis == "flops"
    assert found.machine_slowdown.tolist() == pytest.approx([1, 1, 1, 2])
    assert math.isnan(found.slowdown[0, 1])


@given(st.lists(st.integers(1, 50), min_size=3, max_size=3), st.integers(1, 10**9))
def test_a_rank_is_not_slow_for_waiting_for_a_slow_one(waits, offset):
    """Rank 0 computes 100 ns and waits inside its backward; the wait is another's fault, and clocks need not agree."""
    rows = []
    for step, wait in enumerate(waits, 1):
        rows += [(0, 0, 100 + wait, step), (1, 100, wait, step), (0, 1000, 300, step)]
    columns = {
        "name": [row[0] for row in rows], "start_ns": [row[1] + 10_000 * row[3] + offset for row in rows],
        "duration_ns": [row[2] for row in rows], "step": [row[3] for row in rows], "rank": [0] * len(rows),
    }  # fmt: skip
    trace = Trace.from_columns(columns, names=["segment.backward", "comm.wait"])

    found = times(trace)

    assert found.own_s[0] == pytest.approx(3 * 400e-9)


def test_the_first_step_of_a_recorded_run_is_left_out():
    rows = {"rank": [0, 0], "duration_ns": [10**9, 10], "step": [0, 1], "name": [0, 0]}

    assert times(Trace.from_columns(rows, names=["segment.forward"])).mean_s[0, 0] == pytest.approx(1e-8)


def test_work_of_a_rank_is_taken_out():
    rows = {"rank": [0, 1, 2, 3], "duration_ns": [10, 20, 30, 40], "name": [0] * 4}
    trace = Trace.from_columns(rows, names=["segment.forward"])

    assert times(trace, work={0: 1, 1: 2, 2: 3, 3: 4}).machine_slowdown.tolist() == pytest.approx([1] * 4)


def test_without_a_second_rank_of_a_stage_the_basis_says_so():
    trace = generate(replace(JOB, dp=1), seed=1).trace

    assert times(trace).basis == "all"


def test_ranks_of_one_host_stand_for_themselves_and_few_machines_have_no_outlier():
    rows = {"rank": [0, 1], "duration_ns": [10, 90], "name": [0, 0]}
    one = Trace.from_columns(rows, names=["segment.forward"], ranks={0: {"host": "a"}, 1: {"host": "a"}})

    assert times(one).machines == ("rank 0", "rank 1")
    assert len(times(one).machines) < LEAST_MACHINES
    assert times(one).outliers == ()
    assert times(Trace.from_columns(rows, names=["segment.forward"]), ranks_per_host=2).machines == ("rank 0", "rank 1")


def test_a_trace_in_files_gives_the_same_as_one_in_memory(tmp_path):
    trace = fleet(2, {1: 1.4}, hosts=4)
    for rank in range(32):
        trace.select(ranks=[rank]).save(tmp_path / f"r{rank}.parquet")

    found = times(Parts.of_files(sorted(tmp_path.glob("*.parquet"))))

    assert found.to_json() == times(trace).to_json()


def test_a_trace_that_names_no_rank_has_no_such_view():
    rows = {"rank": [-1, -1], "duration_ns": [10, 11], "name": [0, 0]}

    assert machine_times(Parts.of(Trace.from_columns(rows, names=["segment.forward"]))) is None


def test_a_trace_without_passes_has_no_such_view():
    assert machine_times(Trace.from_columns({"rank": [0], "duration_ns": [1], "name": [0]}, names=["step"])) is None
    assert set(PASSES) == {"forward", "backward"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"work": {0: 1.0}}, r"rank 1 has work None; give every rank"),
        ({"work": {0: 1.0, 1: -2.0}}, r"rank 1 has work -2.0"),
        ({"ranks_per_host": 0}, r"ranks_per_host is 0; give a whole number"),
    ],
)
def test_bad_shares_are_refused(options, message):
    rows = {"rank": [0, 1], "duration_ns": [10, 90], "name": [0, 0]}

    with pytest.raises(InputError, match=message):
        machine_times(Trace.from_columns(rows, names=["segment.forward"]), **options)
