"""The autoscaler: as many workers as demand needs, quickly, and then it leaves them alone."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.data.fleet.autoscale import AGREEING, Autoscaler, Load
from tests.made.fleet_model import simulate

PERIOD_S = 10.0


def steady(demand_per_s: float, rate_per_s: float, num_workers: int) -> Load:
    """What a fleet without noise does in a period: it makes what is taken, and no more than it can."""
    made = min(demand_per_s, num_workers * rate_per_s) * PERIOD_S
    enough = num_workers * rate_per_s > demand_per_s
    waited = max(1 - made / (demand_per_s * PERIOD_S), 0.0) if demand_per_s else 0.0
    return Load(
        num_workers=num_workers, prepared=made, busy_s=made / rate_per_s, buffered=4 if enough else 0, taken=made,
        waited_fraction=waited, period_s=PERIOD_S,
    )  # fmt: skip


@given(
    needed=st.lists(st.floats(0.6, 30.0), min_size=1, max_size=3), rate=st.floats(1.0, 8.0), first=st.integers(1, 60)
)
def test_without_noise_every_step_of_demand_is_met_within_five_periods(needed, rate, first):
    scaler, workers = Autoscaler(most=200), first
    for wanted in needed:
        seen = []
        for _ in range(12):
            workers = scaler.decide(steady(wanted * rate, rate, workers))
            seen.append(workers)

        near = [k for k, number in enumerate(seen) if abs(number - math.ceil(wanted - 1e-9)) <= 1]
        assert near
        assert near[0] < 5
        assert sum(one != other for one, other in itertools.pairwise(seen[near[0] :])) <= 2


@settings(max_examples=15)
@given(seed=st.integers(0, 10_000), needed=st.floats(2.2, 8.0), noise=st.floats(0.0, 0.4))
def test_a_noisy_fleet_settles_near_what_suffices_and_its_readers_hardly_wait(seed, needed, noise):
    history = simulate(
        [(2.0 * needed, 400.0)], rate_per_s=2.0, scaler=Autoscaler(most=30), seed=seed, noise=noise,
        first_workers=math.ceil(needed / 2),
    )  # fmt: skip

    settled = history.num_workers[5:]
    assert all(abs(number - math.ceil(needed)) <= 1 for number in settled)
    assert sum(history.waited_per_period_s[5:]) <= 0.02 * history.total_s


def test_a_history_follows_from_its_seed():
    runs = [simulate([(6.0, 100.0)], rate_per_s=2.0, scaler=Autoscaler(), seed=seed) for seed in (3, 3, 4)]

    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("worked", [False, True])
def test_a_fleet_that_nobody_reads_shrinks_to_its_least_and_grows_again_at_once(worked):
    scaler = Autoscaler(least=2, most=9)
    if worked:
        scaler.decide(steady(4.5, 1.0, 5))
    nothing = Load(num_workers=5, prepared=0, busy_s=0.0, buffered=8, taken=0, waited_fraction=0.0, period_s=1.0)
    workers = [scaler.decide(nothing) for _ in range(AGREEING)]

    assert workers == [5] * (AGREEING - 1) + [2]
    assert scaler.decide(steady(4.5, 1.0, 2)) >= 4


def test_readers_that_wait_for_their_first_batch_keep_the_workers_that_make_it():
    waiting = Load(num_workers=5, prepared=0, busy_s=50.0, buffered=0, taken=0, waited_fraction=1.0, period_s=PERIOD_S)
    scaler = Autoscaler(least=2, most=9)

    assert [scaler.decide(waiting) for _ in range(2 * AGREEING)] == [5] * 2 * AGREEING


@pytest.mark.slow
@given(
    steps=st.lists(
        st.tuples(st.sampled_from([0.0, 6.6, 14.8, 29.2, 57.0]), st.sampled_from([1.6, 2.0, 4.0, 8.0])),
        min_size=2,
        max_size=4,
    )
)
def test_without_noise_every_step_of_demand_or_of_the_workers_rate_is_met_within_five_periods(steps):
    scaler, workers = Autoscaler(most=200), 5
    for demand_per_s, rate in steps:
        seen = []
        for _ in range(30):
            workers = scaler.decide(steady(demand_per_s, rate, workers))
            seen.append(workers)

        assert all(abs(number - max(math.ceil(demand_per_s / rate), 1)) <= 1 for number in seen[4:])


@pytest.mark.parametrize("noise", [0.05, 0.5])
@pytest.mark.parametrize(("demands", "rates"), [
    ((21.0, 21.0, 21.0), (2.0, 1.0, 2.0)),
    ((21.0, 9.0, 21.0), (2.0, 1.2, 1.6)),
    ((21.0, 0.0, 15.0), (2.0, 2.0, 1.0)),
], ids=["rate halves and doubles", "both", "nobody reads"])  # fmt: skip
def test_a_noisy_fleet_follows_both_rates_and_its_readers_hardly_wait_in_steady_state(noise, demands, rates):
    history = simulate(
        [(demand, 300.0) for demand in demands], rate_per_s=[(rate, 300.0) for rate in rates],
        scaler=Autoscaler(most=99), seed=7, noise=noise, first_workers=6,
    )  # fmt: skip

    for step, (demand, rate) in enumerate(zip(demands, rates, strict=True)):
        steady_periods = slice(30 * step + 5, 30 * (step + 1))
        needed = max(math.ceil(demand / rate), 1)
        assert all(abs(number - needed) <= 1 for number in history.num_workers[steady_periods])
        assert sum(history.waited_per_period_s[steady_periods]) <= 0.02 * 250.0


def test_shrinking_waits_until_several_periods_agree_and_growing_does_not():
    scaler = Autoscaler()

    assert [scaler.decide(steady(2.0, 1.0, 8)) for _ in range(AGREEING)] == [8] * (AGREEING - 1) + [3]
    assert scaler.decide(steady(9.0, 1.0, 3)) > 3


def test_readers_that_wait_for_one_batch_while_workers_have_time_are_no_reason_to_grow():
    one_late = Load(
        num_workers=4, prepared=40, busy_s=20.0, buffered=6, taken=40, waited_fraction=0.05, period_s=PERIOD_S
    )

    assert Autoscaler().decide(one_late) == 4


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Autoscaler(least=0), r"least is 0 and most 64; pass 1 <= least <= most"),
    (lambda: Autoscaler(least=5, most=4), r"least is 5 and most 4"),
    (lambda: Load(1, 0, 0.0, 0, 0, 1.5, 1.0), r"1.5 waited: pass counts"),
    (lambda: Load(1, 0, 0.0, 0, 0, 0.5, 0.0), r"a period above 0 s"),
])  # fmt: skip
def test_bad_input_is_told_with_rule_and_fix(make, message):
    with pytest.raises(InputError, match=message):
        make()
