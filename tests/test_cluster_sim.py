"""The simulated queue: laws of rounds, the published generator and figures, bad input."""

import random

import numpy as np
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.cluster import POLICIES, Cluster, Jobs, Resize, simulate
from headway.cluster.model import Rates
from headway.cluster.policies import SERVED
from headway.cluster.queue.engine import RoundEngine
from headway.cluster.queue.logs import MODELS, RateTable, generate, read_trace
from headway.cluster.queue.rounds import Timing
from headway.core.errors import FormatError, HeadwayError, InputError, UnknownNameError
from tests.launching import json_of
from tests.paths import shared
from tests.refusals import refused


@pytest.fixture(scope="module")
def table():
    return RateTable.read(shared("cluster/gavel/throughputs.parquet"))


def some_jobs(rng, n, *, restart_s=0.0):
    arrival_s = np.sort(rng.uniform(0, 5000, n))
    scale = rng.choice([1, 1, 2, 4], n)
    return Jobs(
        [f"j{i}" for i in range(n)], scale, rng.uniform(500, 20000, n), arrival_s, restart_s=np.full(n, restart_s)
    )


@pytest.mark.slow
@given(st.integers(0, 1000), st.sampled_from(["headway", "gavel"]))
@settings(max_examples=3)
def test_every_job_ends_no_sooner_than_alone_and_one_seed_gives_one_history(seed, rules):
    rng = np.random.default_rng(seed)
    jobs = some_jobs(rng, 8)
    rates = rng.uniform(0.5, 3.0, (8, 2))
    cluster = Cluster.of({"v100": 4, "k80": 4})
    for name in sorted(set(POLICIES) - {"allox"}):
        outcome = simulate(jobs, cluster, name, rates=rates, seed=seed, rules=rules)
        much_later = [Resize(1e9, "v100", 1)]  # changes nothing, bit for bit
        again = simulate(jobs, cluster, name, rates=rates, seed=seed, rules=rules, resizes=much_later)

        assert (outcome.jct_s >= outcome.alone_s * (1 - 1e-9)).all()
        assert outcome.jct_s.tolist() == again.jct_s.tolist()
        assert outcome.figures()["used_fraction"] <= 1 + 1e-9
        work = (jobs.steps * jobs.scale / rates.max(axis=1)).sum() / 8
        assert outcome.makespan_s >= max(work, outcome.alone_s.max()) * (1 - 1e-9)


def test_a_share_is_received_within_two_rounds_of_what_it_says():
    jobs = Jobs([f"j{i}" for i in range(6)], [1, 1, 1, 2, 2, 4], [3e4] * 6, [0.0] * 6)
    outcome = simulate(jobs, {"v100": 4}, "las", rates=np.ones((6, 1)), reset_s=1e9)

    # Equal device time: 11 devices are asked for, of 4; with scale x share equal, gangs get 1/2 and 1/4 of the others.
    assert outcome.finish_s[:3].max() - outcome.finish_s[:3].min() <= 2 * 360
    assert outcome.finish_s[3:5].min() > outcome.finish_s[:3].max()
    assert outcome.finish_s[5] == outcome.finish_s.max()


def test_finish_time_fairness_is_the_time_over_that_on_a_share_of_the_jobs_that_were_there():
    """One device, 1 h and 2 h at once: 2 jobs for an hour, then 1. b: T_independent = 2 h x (2 + 2 x 1) / 3 h."""
    found = simulate(Jobs(["a", "b"], [1, 1], [3600.0, 7200.0], [0.0, 0.0]), {"v100": 1}, "fifo", rates=[[1.0], [1.0]])

    assert found.rho.tolist() == pytest.approx([1 / 2, 3 / (2 * 4 / 3)])
    # By itself, on types of which one is half as fast: an equal share of both takes 4 / 3 of the fastest one's time.
    alone = simulate(Jobs(["a"], [1], [900.0], [0.0]), {"v100": 1, "k80": 1}, "fifo_aware", rates=[[1.0, 0.5]])
    assert alone.rho.tolist() == pytest.approx([3 / 4])


def test_moving_costs_what_the_job_says_and_staying_costs_nothing():
    rng = np.random.default_rng(1)
    rates = np.ones((20, 2))
    free, dear = (
        simulate(some_jobs(np.random.default_rng(1), 20, restart_s=cost), {"a": 3, "b": 4}, "las", rates=rates, seed=1)
        for cost in (0.0, 120.0)
    )
    stays = simulate(some_jobs(rng, 3, restart_s=1e4), {"a": 16}, "fifo", rates=np.ones((3, 1)))

    assert dear.makespan_s > free.makespan_s
    assert dear.moves.sum() > 0
    assert stays.moves.sum() == 0


def test_no_gang_starves_among_many_small_jobs_by_our_rules():
    arrival_s = np.arange(60) * 1800.0
    scale = np.where(np.arange(60) % 10 == 5, 8, 1)
    jobs = Jobs([str(i) for i in range(60)], scale, np.full(60, 9 * 3600.0), arrival_s)
    ours, published = (
        simulate(jobs, {"v100": 16}, "las", rates=np.ones((60, 1)), rules=rules).figures()
        for rules in ("headway", "gavel")
    )
    ratio = [found["by_scale"]["8"]["mean_slowdown"] / found["mean_slowdown"] for found in (ours, published)]

    assert ratio[0] < 0.8 * ratio[1]


def test_gangs_of_odd_sizes_need_types_mixed_and_are_refused_otherwise():
    jobs = Jobs(["six", "seven"], [6, 7], [1000.0, 1000.0], [0.0, 0.0])
    cluster, rates = Cluster.of({"v100": 5, "p100": 4, "k80": 3}), [[3.0, 2.0, 1.0]] * 2
    with pytest.raises(
        InputError, match=r"'six' needs 6 devices of one type; the largest pool that runs it, v100, has 5"
    ):
        simulate(jobs, cluster, "las_aware", rates=rates)
    outcome = simulate(jobs, cluster, "hadar", rates=rates)

    # One after the other, on 5 v100 and one or two p100, at the rate of the p100.
    assert sorted(outcome.jct_s) == pytest.approx([500.0, 1000.0])
    assert outcome.prices


@pytest.mark.parametrize("rules", ["headway", "gavel"])
@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"allox", "pollux", "tiresias", "optimus"}))
def test_a_gang_whose_devices_leave_waits_or_moves_and_every_step_is_done_once(name, rules):
    jobs = Jobs(["gang", "one", "two"], [8, 1, 2], [9000.0, 9000.0, 9000.0], [0.0, 0.0, 0.0])
    cluster, rates = Cluster.of({"v100": 8, "k80": 8}), [[2.0, 1.0]] * 3
    leaving = Resize.parse("1000:v100=1, 2000:k80=7, 50000:k80=8")
    found = simulate(jobs, cluster, name, rates=rates, rules=rules, resizes=leaving)

    # Both pools are too small for the gang from second 2000 on, until one is back; hadar runs it on both together.
    assert np.isfinite(found.finish_s).all()
    assert (found.finish_s[0] > 50_000) == (name != "hadar")
    assert found.figures()["used_fraction"] <= 1 + 1e-9
    assert (found.jct_s >= found.alone_s * (1 - 1e-9)).all()


def test_a_pause_takes_as_long_as_the_devices_are_away_and_a_restart():
    jobs = Jobs(["a"], [2], [3600.0], [0.0], restart_s=np.array([100.0]))
    away = simulate(jobs, {"v100": 2}, "fifo", rates=[[1.0]], resizes=Resize.parse("1000:v100=1,5000:v100=2"))

    assert away.jct_s.tolist() == pytest.approx([5000 + 100 + 2600])
    assert away.moves.tolist() == [1]
    assert away.figures()["used_fraction"] == pytest.approx(2 * 3700 / (2 * 7700 - 4000))


@pytest.mark.parametrize("name", ["fifo", "allox"])
def test_jobs_that_run_to_their_end_keep_the_devices_that_stay_in_order_of_arrival(name):
    jobs = Jobs(["a", "b", "c", "d"], [1] * 4, [3600.0] * 4, [0.0] * 4)
    found = simulate(jobs, {"v100": 4}, name, rates=np.ones((4, 1)), resizes=[Resize(1000.0, "v100", 2)])

    assert found.finish_s.tolist() == pytest.approx([3600, 3600, 6200, 6200])
    assert found.moves.tolist() == [0, 0, 1, 1]


def test_jobs_that_no_pool_can_run_again_are_left_unfinished_and_named():
    jobs = Jobs(["large", "small", "late"], [4, 1, 4], [9e4, 3600.0, 9.0], [0.0, 0.0, 5000.0])
    found = simulate(jobs, {"v100": 5}, "las", rates=np.ones((3, 1)), resizes=[Resize(1000.0, "v100", 2)]).figures()

    assert (found["num_jobs"], found["unfinished"], found["max_jct_s"]) == (1, 2, 3600.0)
    assert found["notes"] == [f"job {name!r} needs 4 devices: none are left for it" for name in ("large", "late")]
    with pytest.raises(HeadwayError, match="no job of the window was done"):
        simulate(jobs, {"v100": 5}, "las", rates=np.ones((3, 1)), window=(0, 1),
                 resizes=[Resize(1.0, "v100", 2)]).figures()  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("9:x=1", r"unknown device type of the cluster 'x'\. .*Choose one of: k80, v100"),
        ("9:v100=1,20:k80", r"'20:k80' cannot be read as a change of a pool\. Write seconds:type=count"),
        ("9:v100=-1", "v100 has -1 devices from 9 s on; pass both >= 0"),
        ("9:v100=0,20:k80=0", "the cluster has no device left at 20 s; keep one"),
    ],
)
def test_changes_of_pools_that_make_no_sense_say_so(text, message):
    with pytest.raises(InputError, match=message):
        simulate(Jobs(["a"], [1], [1.0], [0.0]), {"v100": 2, "k80": 2}, "las", rates=[[1.0, 1.0]],
                 resizes=Resize.parse(text))  # fmt: skip


@pytest.mark.parametrize("name", ["single", "multi"])
def test_the_generator_gives_the_published_jobs_bit_for_bit(table, name):
    stored = pyarrow.parquet.read_table(shared(f"cluster/gavel/jobs_seed0_{name}.parquet")).to_pydict()
    jobs = generate(7000, 0, table.alone["v100"], jobs_per_hour=1.0, multi=name == "multi")

    assert list(jobs.model) == stored["model"]
    assert jobs.scale.tolist() == stored["scale"]
    assert jobs.steps.tolist() == stored["steps"]
    assert (jobs.arrival_s / 3600).tolist() == stored["arrival_unit"]


@pytest.mark.slow
def test_the_published_makespan_of_500_jobs_is_reached(table):
    cluster = Cluster.parse("v100=36,p100=36,k80=36")
    jobs = generate(500, 1, table.alone["v100"], jobs_per_hour=0, multi=True)
    outcome = simulate(jobs, cluster, "makespan", rates=table.of(jobs, cluster), rules="gavel", seed=1)

    assert outcome.makespan_s / 3600 == pytest.approx(177.5, rel=0.02)  # 169.4 is the published mean of three seeds


RELEASED_H = [660.82, 177.99, 182.69, 153.37]
"""Makespan of 100 jobs of seeds 0 to 3 under `fifo` of the released code (c4fa400), run beside ours."""


@pytest.mark.parametrize("seed", range(4))
def test_the_released_fifo_takes_as_long_as_the_released_code(table, seed):
    cluster = Cluster.parse("v100=36,p100=36,k80=36")
    jobs = generate(100, seed, table.alone["v100"], jobs_per_hour=0.0, multi=True)
    found = simulate(jobs, cluster, "fifo_released", rates=table.of(jobs, cluster), rules="gavel", seed=seed)

    assert found.makespan_s / 3600 == pytest.approx(RELEASED_H[seed], rel=0.01)


@pytest.mark.parametrize("seed", range(6))
def test_the_released_fifo_gives_the_last_type_by_name_and_strikes_off_the_one_that_it_drew(seed):
    """Two types of one device: the first job gets the v100; the second the k80 where that was not struck off."""
    drawn = random.Random(seed).randrange(2)
    jobs = Jobs(["a", "b"], [1, 1], [36000.0, 36000.0], [0.0, 0.0])
    found = simulate(jobs, {"v100": 1, "k80": 1}, "fifo_released", rates=[[1.0, 0.5]] * 2, seed=seed, rules="gavel")

    # Without the k80 the second job waits for the first one, and follows it on its v100.
    assert found.finish_s.tolist() == pytest.approx([36000.0, 72000.0])
    assert found.start_s[1] == (0.0 if drawn else 36000.0)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["allox", "gandiva"])
def test_jobs_that_hardly_meet_take_the_same_time_under_policies_with_the_same_published_figure(table, policy):
    """At 0.8 jobs/h all three are published with 17.64 h: whoever is there runs on the fastest type."""
    cluster = Cluster.parse("v100=36,p100=36,k80=36")
    jobs = generate(40, 0, table.alone["v100"], jobs_per_hour=0.8, multi=False)
    rates = table.of(jobs, cluster)
    aware, found = (simulate(jobs, cluster, name, rates=rates, rules="gavel") for name in ("las_aware", policy))

    assert found.jct_s.mean() == pytest.approx(aware.jct_s.mean(), rel=1e-3)


def test_a_queue_without_the_shared_table_has_rates_of_its_own():
    v100 = {(model, scale): 10.0 for model in MODELS for scale in (1, 2, 4, 8)}
    jobs = generate(50, 3, v100, jobs_per_hour=6.0, multi=True)
    later = generate(60, 3, v100, jobs_per_hour=6.0, multi=True)

    assert jobs.arrival_s.tolist() == later.arrival_s[:50].tolist()
    assert list(jobs.model) == list(later.model[:50])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": ["a", "a"]}, "job id 'a' occurs twice"),
        ({"weight": np.array([1.0, 0.0])}, r"job 'b' has weight 0: give a number above 0"),
        ({"arrival_s": [5.0, 1.0]}, "job 'b' has arrival_s 1: it is before that of the job in front; sort"),
        ({"deadline_s": np.array([9.0, 0.5])}, "job 'b' has deadline_s 0.5: it has passed when the job arrives"),
        ({"scale": [1, 0]}, "job 'b' has scale 0: a job needs at least 1 device"),
        ({"steps": [1.0, np.nan]}, "job 'b' has steps nan"),
        ({"scale": [1, 16]}, "'b' needs 16 devices of one type; the largest pool that runs it, v100, has 4"),
        ({"rates": [[1.0, 1.0], [np.nan, 1.0]]}, r"job 'b' has nan steps/s on v100"),
        ({"rates": [[1.0, 1.0], [-1.0, 1.0]]}, r"job 'b' has -1 steps/s on v100"),
        ({"rates": [[1.0, 1.0], [0.0, 0.0]]}, "job 'b' runs on none of v100, k80; add a device type"),
        ({"cluster": {}}, "give at least one type a count above 0"),
        ({"window": (1, 9)}, "the window is 1:9, there are 2 jobs"),
        ({"policy": "min_cost", "cluster": {"v100": 4, "x9": 4}}, "device type 'x9' has no price above 0"),
    ],
)
def test_bad_input_names_the_job_and_the_field(change, message):
    given_ = {"ids": ["a", "b"], "scale": [1, 1], "steps": [1.0, 1.0], "arrival_s": [0.0, 1.0], **change}
    given_ = {key: value for key, value in given_.items() if key not in ("rates", "cluster", "policy", "window")}
    rates = change.get("rates", [[1.0, 1.0], [1.0, 1.0]])

    with pytest.raises(InputError, match=message):
        simulate(
            Jobs(**given_), change.get("cluster", {"v100": 4, "k80": 4}), change.get("policy", "las"), rates=rates,
            window=change.get("window"),
        )  # fmt: skip


test_devices_and_prices_are_read_or_refused = refused(
    ("v100=x", "", "'v100' says no number of devices"),
    ("v100=4,v100=8", "", "device type 'v100' is given twice"),
    ("v100=4", "v100=cheap", "'v100=cheap' cannot be read as prices. Write type=number"),
    ("v100=4", "v100=-1", "'v100=-1' is out of range for prices: give a finite number above 0"),
    by=Cluster.parse,
)


def test_unknown_names_list_the_valid_ones(tmp_path, table):
    jobs = Jobs(["a"], [1], [1.0], [0.0])
    with pytest.raises(
        UnknownNameError, match=r"unknown policy 'last'. Did you mean 'las'\? Choose one of: allox, backfill"
    ):
        simulate(jobs, {"v100": 1}, "last", rates=[[1.0]])
    with pytest.raises(InputError, match=r"no rates of device type 'v10'"):
        table.of(jobs, Cluster.of({"v10": 1}))
    trace = tmp_path / "a.trace"
    trace.write_text("A3C\tonly three\tfields\n")
    with pytest.raises(FormatError, match=r"a\.trace:1 has 3 fields; a trace has 10"):
        read_trace(trace, {})


def test_the_verb_prints_one_object(table):
    arguments = "--trace gavel:multi --jobs-per-hour 6 --num-jobs 40 --seed 1 --window 10:30 --devices v100=8,k80=8"
    answer = json_of(
        "cluster", "sim", *arguments.split(), "--data", str(shared("cluster").parent), "--policy", "hadar", "--explain",
        "--json",
    )  # fmt: skip

    assert answer["schema"] == "headway.cluster-sim/1"
    assert answer.keys() >= {
        "policy", "num_jobs", "mean_jct_s", "p99_jct_s", "max_jct_s", "makespan_s", "mean_rho", "used_fraction", "usd",
        "moves", "decide_s", "by_scale",
    }  # fmt: skip
    assert answer["by_scale"]["1"].keys() >= {"num_jobs", "mean_jct_s", "mean_slowdown"}
    assert answer["num_jobs"] == 20
    assert answer["prices"][0].keys() == {"time_s", "v100", "k80"}
    assert sum(row["num_jobs"] for row in answer["by_scale"].values()) == 20


@given(
    jobs=st.lists(st.tuples(st.floats(0, 3000), st.floats(1, 2000)), min_size=1, max_size=12), count=st.integers(1, 4),
    policy=st.sampled_from(["las", "las_aware", "hierarchical"]),
)  # fmt: skip
@settings(max_examples=40)
def test_with_fills_no_device_stands_idle_while_a_job_waits_and_who_runs_stays_to_the_end_of_the_round(
    jobs, count, policy
):
    arrival_s, steps = (np.array(column) for column in zip(*sorted(jobs), strict=True))
    queue, cluster = (
        Jobs([f"{k}" for k in range(len(jobs))], np.ones(len(jobs), int), steps, arrival_s),
        {"a100": count},
    )
    table = Rates.of(np.ones((len(jobs), 1)), queue, Cluster.of(cluster))
    timing = Timing("headway", 360.0, 1920.0, fills=True)
    engine = RoundEngine(queue, Cluster.of(cluster), SERVED[policy], table, 0, (0, len(jobs)), timing)
    now_s, before, border_s = float(arrival_s[0]), set(), -1.0
    while (length_s := engine.advance(now_s)) is not None:
        runs = set() if engine.running is None else set(engine.running.a.tolist())
        assert not engine.num_free or runs == set(engine.active.tolist())
        if engine.border_s == border_s:  # the same round: who had a device has it, unless it is done
            assert {job for job in before if np.isnan(engine.finish_s[job])} <= runs
        before, border_s, now_s = runs, engine.border_s, now_s + length_s

    assert np.isfinite(engine.finish_s).all()
    outcome = simulate(queue, cluster, policy, rates=table, fills=True)
    assert outcome.finish_s == pytest.approx(engine.finish_s)


@pytest.mark.parametrize("fills", [False, True])
def test_time_before_a_job_came_is_owed_to_nobody(fills):
    arrival_s = np.array([0.0, 50_000.0, 50_064.0])  # the second one comes to a cluster that has been idle for long
    jobs = Jobs(["a", "b", "c"], np.ones(3, int), np.array([64.0, 6400.0, 6400.0]), arrival_s)

    outcome = simulate(jobs, {"slot": 1}, "las", rates=np.ones((3, 1)), round_s=64.0, reset_s=341.0, fills=fills)

    assert outcome.start_s[2] <= 50_064 + 2 * 64
    assert abs(outcome.finish_s[2] - outcome.finish_s[1]) <= 4 * 64  # from then on they took turns
