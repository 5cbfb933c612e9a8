"""The controller of the interval between checkpoints: laws, closed loop, both modes, bad input."""

import math
import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.checkpoint import CheckpointPolicy, StepTiming
from headway.checkpoint.costs import best_interval_s, budget_steps, overlap_steps
from headway.checkpoint.policy import FIRST_STEPS, MOST_GROWTH
from tests.checkpoint_jobs import Conditions, Job, disturbed, phase, random_conditions
from tests.refusals import refused

log_seconds = st.floats(-3, 2).map(lambda exponent: 10.0**exponent)
CALM = Conditions(step_s=0.1, stall_s=0.05, write_s=1.0)


class Fixed:
    """Saves every `steps` steps, whatever happens."""

    def __init__(self, steps):
        self.steps = steps

    def observe(self, timing):
        pass

    def interval(self):
        return self.steps


@settings(max_examples=40)
@given(log_seconds, log_seconds, log_seconds, st.floats(0.005, 0.2))
def test_without_noise_stalls_stay_within_the_budget_and_saves_never_meet(step_s, stall_s, write_s, budget):
    conditions = Conditions(step_s, stall_s, min(write_s, 300 * step_s))
    if stall_s / (budget * step_s) > 3000:
        return
    policy = CheckpointPolicy(budget=budget)
    job = Job(policy)
    job.window(conditions)
    job.window(conditions)
    seen = []
    last = phase(job, conditions, 3, seen.append)

    bounds = {"stall_s": stall_s, "duration_s": stall_s + conditions.write_s, "step_s": step_s}
    k1 = overlap_steps(**bounds)
    k2 = budget_steps(cost_s=stall_s, step_s=step_s, budget=budget)
    assert last.steps in (max(k1, k2), max(k1, k2) + 1)  # sums of floats may pass a whole number by one ulp
    assert all(window.overhead_fraction <= budget * (1 + 1e-6) for window in seen)
    report = policy.explain()
    assert report.steps >= max(report.overlap_steps, report.budget_steps)
    assert report.stall_s == pytest.approx(stall_s)  # no window waited for the save before it


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.floats(0.01, 0.1))
def test_no_interval_below_the_oracles_keeps_the_budget_without_saves_that_meet(seed, budget):
    """What the controller is held to is what a search over fixed intervals finds."""
    rng = random.Random(seed)
    conditions = random_conditions(rng)
    best = conditions.oracle(budget)
    if not 1 < best < 400:
        return
    played = {}
    for steps in (best - 1, best):
        job = Job(Fixed(steps))
        job.window(conditions)
        played[steps] = phase(job, conditions, 3)

    assert played[best].overhead_fraction <= budget * (1 + 1e-6)
    met = conditions.write_s > (best - 1) * conditions.step_s * (1 + conditions.slowdown) * (1 - 1e-9)
    assert met or played[best - 1].overhead_fraction > budget * (1 - 1e-6)


def near_best(seeds, jitter):
    """Return the share of phases (calm, interference, calm) whose usual interval is within 20 % of the best one."""
    near = []
    for seed in seeds:
        rng = random.Random(seed)
        calm, budget = random_conditions(rng), rng.uniform(0.01, 0.1)
        job = Job(CheckpointPolicy(budget=budget), jitter=jitter, seed=seed)
        job.window(calm)
        for conditions in (calm, disturbed(calm, rng), calm):
            phase(job, conditions, 3)
            usual = statistics.median(job.window(conditions).steps for _ in range(9))
            best = conditions.oracle(budget)
            near.append(abs(usual - best) <= max(0.2 * best, 1 if best < 5 else 0))
    return statistics.mean(near)


@pytest.mark.slow
@pytest.mark.parametrize(("jitter", "least"), [(0.05, 0.98), (0.1, 0.92)])
def test_the_interval_is_near_the_best_one_however_much_steps_vary(jitter, least):
    assert near_best(range(40), jitter) >= least


@pytest.mark.parametrize("noise", [0.05, 0.1])
def test_where_hardly_a_step_is_without_a_save_noise_is_not_taken_for_a_slowdown(noise):
    """Few steps of the profile were all that the steps beside saves were compared with."""
    long = Conditions(step_s=0.1, stall_s=0.01, write_s=20.0)
    far_off = 0
    for seed in range(20):
        job = Job(CheckpointPolicy(budget=0.03), jitter=noise, seed=seed)
        job.window(long)
        phase(job, long, 4)
        usual = statistics.median(job.window(long).steps for _ in range(7))
        far_off += usual > 1.2 * long.oracle(0.03)

    assert far_off <= 1


@pytest.mark.parametrize("slowdown", [0.1, 0.3])
def test_a_slowdown_within_the_noise_of_one_step_is_found_by_averaging_windows(slowdown):
    slow = replace(CALM, slowdown=slowdown)
    policy = CheckpointPolicy()
    job = Job(policy, jitter=0.1, seed=1)
    job.window(slow)
    phase(job, slow, 30)

    assert policy.explain().slowed_s == pytest.approx(slow.cost_s() - slow.stall_s, rel=0.2)


def test_hiccups_of_single_steps_are_no_slowdown():
    policy = CheckpointPolicy(budget=0.05)
    job = Job(policy, jitter=0.02, hiccups=0.005, seed=2)
    job.window(CALM)
    seen = [job.window(CALM).steps for _ in range(40)]

    assert statistics.median(seen[4:]) <= 1.2 * CALM.oracle(0.05)


@pytest.mark.parametrize("seed", range(12))
def test_in_closed_loop_the_budget_holds_and_the_interval_comes_back_after_interference(seed):
    rng = random.Random(1000 + seed)
    calm, budget = random_conditions(rng), rng.uniform(0.02, 0.1)
    job = Job(CheckpointPolicy(budget=budget), jitter=0.01, seed=seed)
    job.window(calm)
    for conditions in (calm, disturbed(calm, rng), calm):
        phase(job, conditions, 3)
        settled = []
        last = phase(job, conditions, 4, settled.append)
        total = sum(window.steps for window in settled)
        overhead = sum(window.overhead_fraction * window.steps for window in settled) / total

        assert overhead <= budget + 0.01
        assert abs(last.steps - conditions.oracle(budget)) <= max(1, 0.25 * conditions.oracle(budget))


def test_one_dear_window_at_most_doubles_the_interval_and_two_raise_it_as_far_as_they_need():
    policy = CheckpointPolicy()
    job = Job(policy)
    job.window(CALM)
    usual = phase(job, CALM, 4).steps
    dear = replace(CALM, stall_s=50 * CALM.stall_s)
    first = job.window(dear).steps
    second = job.window(dear).steps

    assert first == MOST_GROWTH * usual
    assert second == dear.oracle(policy.budget)
    back = [job.window(CALM).steps for _ in range(3)]
    assert (back[0], back[2]) == (second, usual)


def test_a_save_under_way_for_longer_than_any_before_is_not_followed_by_another():
    policy = CheckpointPolicy()
    job = Job(policy)
    job.window(CALM)
    phase(job, CALM, 3)
    slow = replace(CALM, write_s=40 * CALM.write_s)
    stalls = []
    phase(job, slow, 2, lambda window: stalls.append(window.overhead_fraction))

    assert policy.explain().limit == "persist"
    assert max(stalls) < 1.1 * CALM.stall_s / (15 * CALM.step_s)  # the copy alone, nothing waited for


def test_a_step_that_grows_longer_by_itself_is_not_blamed_on_the_saves():
    policy = CheckpointPolicy()
    job = Job(policy, jitter=0.01)
    job.window(CALM)
    phase(job, CALM, 4)
    longer = replace(CALM, step_s=2 * CALM.step_s)
    last = phase(job, longer, 12)

    assert policy.explain().base_s == pytest.approx(longer.step_s, rel=0.05)
    assert last.steps <= longer.oracle(policy.budget) + 1


def test_before_anything_is_known_the_first_save_comes_early_and_says_so():
    policy = CheckpointPolicy()

    assert (policy.interval(), policy.explain().limit) == (FIRST_STEPS, "profile")
    assert policy.explain().wall_factor is None


def test_two_saves_at_once_may_follow_each_other_twice_as_closely():
    steps = []
    for inflight in (1, 2):
        policy = CheckpointPolicy(inflight=inflight)
        for _ in range(FIRST_STEPS):
            policy.observe(StepTiming(0.125))
        policy.observe(StepTiming(0.125, saved=True, in_flight=True))
        for _ in range(38):
            policy.observe(StepTiming(0.125, in_flight=True))
        policy.observe(StepTiming(0.125, in_flight=True, durable_s=5.0))
        policy.observe(StepTiming(0.125))
        steps.append(policy.interval())

    assert steps == [40, 20]


def test_goodput_mode_takes_the_interval_that_loses_least_at_the_given_failure_rate():
    policy = CheckpointPolicy(mode="goodput", mtbf_s=36_000.0)
    job = Job(policy)
    job.window(CALM)
    last = phase(job, CALM, 5)

    report = policy.explain()
    assert report.limit == "goodput"
    assert last.steps == pytest.approx(best_interval_s(CALM.stall_s, 36_000.0) / CALM.step_s, rel=0.02)
    assert 1 < (report.wall_factor or 0) < 1.01
    assert report.exposure_s == pytest.approx(report.steps * CALM.step_s / 2 + CALM.write_s, rel=0.01)


def test_goodput_mode_measures_the_failure_rate_and_the_budget_holds_until_it_has_one():
    policy = CheckpointPolicy(mode="goodput")
    job = Job(policy)
    job.window(CALM)
    phase(job, CALM, 5)
    policy.load_state_dict({"ran_s": 90_000.0, "num_failures": 0.0})
    before = policy.explain()
    for _ in range(4):
        policy.observe_failure()
    after = policy.explain()
    again = CheckpointPolicy(mode="goodput")
    again.load_state_dict(policy.state_dict())

    assert (before.limit, before.mtbf_s) == ("budget", None)
    assert (after.limit, after.num_failures) == ("goodput", 4)
    assert after.mtbf_s == pytest.approx(policy.state_dict()["ran_s"] / 4)
    assert again.explain().mtbf_s == after.mtbf_s


@given(st.integers(0, 20), st.floats(10, 1e6))
def test_more_failures_never_make_saves_rarer(failures, mtbf_s):
    def steps(count):
        policy = CheckpointPolicy(mode="goodput", mtbf_s=mtbf_s)
        job = Job(policy)
        job.window(CALM)
        job.window(CALM, most_steps=30)
        for _ in range(count):
            policy.observe_failure()
        return policy.interval()

    assert steps(failures + 1) <= steps(failures)


test_what_cannot_be_is_refused_by_its_name = refused(
    (lambda: CheckpointPolicy(budget=0.0), "budget"),
    (lambda: CheckpointPolicy(budget=-0.1), "budget"),
    (lambda: CheckpointPolicy(budget=math.nan), "budget"),
    (lambda: CheckpointPolicy(mtbf_s=0.0), "mtbf_s"),
    (lambda: CheckpointPolicy(mode="godput"), "Did you mean 'goodput'"),
    (lambda: CheckpointPolicy(inflight=0), "inflight"),
    (lambda: StepTiming(0.0), "step_s"),
    (lambda: StepTiming(math.nan), "step_s"),
    (lambda: StepTiming(1.0, stall_s=-0.5), "stall_s"),
    (lambda: StepTiming(1.0, stall_s=1.5), "stall_s"),
    (lambda: StepTiming(1.0, durable_s=math.nan), "durable_s"),
    (lambda: CheckpointPolicy().load_state_dict({"ran_s": -1.0, "num_failures": 0.0}), "ran_s"),
)
