"""Jobs that adapt: the knapsack against brute force, the fit of a speed, Pollux' published figures, bad input."""

import itertools
import sys
from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.cluster import POLICIES, elastic, fit_speed
from headway.cluster.adaptive.speed import BatchLimits, Speed, best_batch, gain
from headway.core.errors import InputError
from tests.launching import json_of, refusal
from tests.paths import shared
from tests.refusals import refused

needs_scipy = pytest.mark.skipif(find_spec("scipy") is None, reason="the extra `cluster` (scipy) is not installed")


@given(st.integers(0, 10_000), st.integers(1, 2))
def test_the_knapsack_is_the_best_of_all_choices(seed, num_types):
    rng = np.random.default_rng(seed)
    jobs, configurations = int(rng.integers(1, 6)), int(rng.integers(2, 5))
    values = np.where(rng.random((jobs, configurations)) < 0.2, -np.inf, rng.normal(size=(jobs, configurations)))
    values[:, 0] = rng.normal(size=jobs)
    usage = rng.integers(0, 9, (configurations, num_types))
    usage[0] = 0
    capacity = rng.integers(0, 9, num_types)
    chosen = elastic(values, usage if num_types > 1 else usage[:, 0], capacity)
    best = max(
        values[range(jobs), list(choice)].sum()
        for choice in itertools.product(range(configurations), repeat=jobs)
        if (usage[list(choice)].sum(axis=0) <= capacity).all()
    )

    assert (usage[chosen].sum(axis=0) <= capacity).all()
    assert values[range(jobs), chosen].sum() == pytest.approx(best)


test_a_knapsack_without_an_answer_is_refused = refused(
    ([[0.0, 1.0]], [0], "values have shape .*pass values"),
    ([[0.0, float("nan")]], [0, 1], "Use -inf for what is not possible"),
    ([[-float("inf"), 1.0]], [0, 9], "no choice of configurations fits the capacity"),
    by=lambda values, usage: elastic(values, usage, 8),
)


@given(st.floats(0, 1e6), st.floats(1e-3, 1e6), st.floats(1, 1e4))
def test_efficiency_is_one_at_the_initial_batch_and_falls(var, sqr, scale):
    worth = float(gain(scale, sqr=sqr, var=var))

    assert float(gain(1.0, sqr=sqr, var=var)) == 1.0
    assert 1 - 1e-9 <= worth <= scale * (1 + 1e-9)
    assert float(gain(2 * scale, sqr=sqr, var=var)) / 2 <= worth * (1 + 1e-9)


def test_the_best_batch_is_useful_at_most_as_fast_as_it_is_processed():
    speed, limits = Speed(0.05, 0.002, 0.1, 0.01, 0.02, 0.005, 1.5), BatchLimits(64, 4096, 8, 128)
    hosts, replicas = np.array([1, 1, 1, 2]), np.array([1, 2, 4, 8])
    best = best_batch(speed, limits, hosts, replicas, sqr=1.0, var=20.0)
    batch = replicas * best.microbatch_size * (best.accumulation + 1)

    assert (best.useful_per_s <= batch / speed.step_s(hosts, replicas, best.microbatch_size, best.accumulation)).all()
    assert (best.useful_per_s > 0).all()
    assert (np.diff(batch) >= 0).all()
    with pytest.raises(InputError, match=r"the largest batch is 32, the initial one 64; the largest must be at least"):
        BatchLimits(64, 32, 1, 8)


@needs_scipy
class TestFit:
    """What a fit recovers, and what it refuses."""

    @pytest.mark.parametrize("seed", range(15))  # of 200 the mean error is below .011 in 95 %, .047 at the most
    def test_a_fit_recovers_times_from_measured_configurations(self, seed):
        rng = np.random.default_rng(seed)
        true = Speed(
            *(10 ** rng.uniform([-2, -4, -1.5, -4, -2.5, -4], [-1, -2, 0, -2, -1, -3])), float(rng.uniform(1, 3))
        )
        grid = [(n, k, b) for n, k in ((1, 1), (1, 2), (1, 4), (2, 4), (2, 8), (4, 16)) for b in (8, 32, 128)]
        hosts, replicas, size = np.array(grid).T
        found = fit_speed(hosts, replicas, size, true.compute_s(size), true.step_s(hosts, replicas, size))
        error = np.log(found.step_s(hosts, replicas, size) / true.step_s(hosts, replicas, size))

        assert np.sqrt((error**2).mean()) < 0.05

    def test_one_measurement_gives_an_optimistic_speed(self):
        found = fit_speed([1], [1], [32], [0.2], [0.2])

        assert found.alpha_c == pytest.approx(0.1)
        assert float(found.step_s(1, 1, 32)) == pytest.approx(0.2, rel=0.02)
        assert float(found.step_s(4, 16, 32)) == pytest.approx(0.2, rel=0.02)

    def test_a_time_that_is_not_above_0_is_refused_with_its_key(self):
        with pytest.raises(InputError, match=r"step_s is 0 with 1 hosts, 2 replicas and micro-batches of 16"):
            fit_speed([1, 1], [1, 2], [16, 16], [0.1, 0.1], [0.1, 0.0])


def test_without_scipy_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(InputError, match=r"pip install 'headway\[cluster\]'"):
        fit_speed([1], [1], [16], [0.1], [0.1])


def simulated(workload, policy, *options):
    """Return the answer of `headway cluster sim` on one of Pollux' workloads."""
    folder = shared("cluster/pollux/workloads.parquet").parent
    return json_of(
        "cluster", "sim", "--trace", f"pollux:{workload}", "--policy", policy, "--data", str(folder), "--json", *options
    )


@pytest.mark.slow
@needs_scipy
@pytest.mark.parametrize(("policy", "workload"), [("tiresias", 6), ("tiresias", 2), ("optimus", 6)])
def test_policies_that_are_deterministic_give_the_published_completion_times(policy, workload):
    found = simulated(workload, policy)

    figures = {("tiresias", 6): 3469.69375, ("optimus", 6): 5301.875, ("tiresias", 2): 5144.9625}
    assert found["published_mean_jct_s"] == figures[policy, workload]
    assert found["mean_jct_s"] == pytest.approx(found["published_mean_jct_s"], rel=1e-6)


@pytest.mark.slow
@needs_scipy
def test_pollux_completes_jobs_as_fast_as_published():
    found = simulated(1, "pollux", "--load", "0.5")

    assert found["published_mean_jct_s"] == 1059.5125
    assert found["mean_jct_s"] <= 1.03 * 1059.5125
    assert found["used_fraction"] <= 1


@pytest.mark.slow
@needs_scipy
def test_placements_on_more_hosts_than_a_number_has_digits_are_told_apart():
    found = simulated(6, "pollux", "--load", "0.5", "--devices", "t4=512")

    assert found["moves"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--trace", "pollux:3"], "unknown workload '3'"),
        (["--trace", "pollux:6", "--load", "2"], "unknown load '2'"),
        (["--trace", "pollux:six"], "write pollux:6"),
        (["--trace", "pollux:6", "--devices", "t4=63"], "a multiple of 4"),
    ],
)
def test_a_workload_that_is_not_there_is_refused(options, message):
    folder = shared("cluster/pollux/workloads.parquet").parent
    assert message in refusal("cluster", "sim", *options, "--policy", "pollux", "--data", str(folder))


@needs_scipy
def test_a_policy_that_places_nothing_on_hosts_is_refused():
    folder = shared("cluster/pollux/workloads.parquet").parent
    assert "Choose pollux, tiresias or optimus" in refusal(
        "cluster", "sim", "--trace", "pollux:6", "--policy", "las", "--data", str(folder)
    )

    assert {"pollux", "tiresias", "optimus"} <= set(POLICIES)
