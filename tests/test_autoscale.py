"""The autoscaler: as many workers as demand needs, quickly, and then it leaves them alone."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.data.fleet.autoscale import AGREEING, Autoscaler, Load
from headway.data.fleet.model import simulate

PERIOD_S = 10.0


def steady(demand_per_s: float, rate_per_s: float, num_workers: int) -> Load:
    """What a fleet without noise does in a period: it makes what is taken, and no more than it can."""
    made = min(demand_per_s, num_workers * rate_per_s) * PERIOD_S
    enough = num_workers * rate_per_s > demand_per_s
    return Load(
        num_workers=num_workers, prepared=made, busy_s=made / rate_per_s, buffered=4 if enough else 0, taken=made,
        waited_fraction=max(1 - made / (demand_per_s * PERIOD_S), 0.0), period_s=PERIOD_S,
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


def test_a_fleet_that_nobody_reads_or_that_has_made_nothing_stays_as_it_is():
    scaler = Autoscaler(least=2, most=9)
    nothing = Load(num_workers=5, prepared=0, busy_s=0.0, buffered=8, taken=0, waited_fraction=0.0, period_s=1.0)

    assert [scaler.decide(nothing) for _ in range(5)] == [5] * 5


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
