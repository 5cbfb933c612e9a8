"""When and whereto a disk changes scheme: laws of the choice, and policies that cannot be meant."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.core.rng import stream
from headway.lab.afr import AfrModel
from headway.lab.fleet_plan import NEVER, POLICIES, Policy, choose, outlook

PLANNED = [name for name, policy in POLICIES.items() if policy.looks_ahead and name != "static"]


def seen(policy, afr, disks, seed=0):
    """A failure log of `disks` disks with true `afr` [ages]."""
    model = policy.model()
    ages = np.arange(len(afr))
    model.add(np.full(len(ages), float(disks)), stream(seed, "seen").poisson(afr * disks / 365), ages)
    return model


def bathtub(base, wear, days=500):
    ages = np.arange(days)
    return base + 0.06 * np.exp(-ages / 12) + wear * np.maximum(0, ages - 250)


@pytest.mark.parametrize("name", PLANNED)
@settings(max_examples=20)
@given(base=st.floats(0.005, 0.05), wear=st.floats(0, 2e-4), least=st.integers(1, 400), seed=st.integers(0, 3))
def test_no_scheme_is_chosen_that_will_not_do_for_as_long_as_it_must_last(name, base, wear, least, seed):
    policy = POLICIES[name]
    view = outlook(seen(policy, bathtub(base, wear), 12_000, seed), policy)
    assert view is not None

    chosen = choose(view, policy, np.full(len(policy.schemes), float(least)))

    for age in range(0, len(chosen), 97):
        stay = view.planned[age : age + least]
        assert chosen[age] == 0 or np.all(stay < policy.tolerated()[chosen[age]])


@settings(max_examples=20)
@given(base=st.floats(0.005, 0.05), least=st.integers(1, 300))
def test_a_longer_stay_that_must_be_worth_it_never_leads_to_less_redundancy(base, least):
    policy = Policy()
    view = outlook(seen(policy, bathtub(base, 1e-5), 12_000), policy)
    assert view is not None
    short, long = (choose(view, policy, np.full(len(policy.schemes), float(days))) for days in (least, least + 100))

    assert np.all(long <= short)


def test_crossings_are_the_first_ages_that_are_too_much_for_a_scheme():
    policy = Policy()
    view = outlook(seen(policy, bathtub(0.012, 1e-4), 30_000), policy)

    for scheme, limit in list(enumerate(policy.tolerated()))[1::4]:
        for age in (0, 100, 300, len(view.planned) - 1):
            later = np.flatnonzero(view.planned[age:] >= limit)
            assert view.crossing[scheme, age] == (age + later[0] if len(later) else NEVER)
    assert np.all(view.crossing[0] == NEVER)


def test_what_is_planned_with_is_never_below_the_estimate_over_the_threshold_or_its_upper_end():
    policy = Policy()
    model = seen(policy, bathtub(0.012, 0), 30_000)
    view = outlook(model, policy)
    flat = np.arange(view.infancy_end, view.frontier - 60)

    assert np.all(view.planned[flat] >= view.sure[flat])
    assert view.planned[200] == pytest.approx(0.012 / policy.threshold_fraction, rel=0.25)


def test_too_few_disks_have_no_outlook_so_that_they_stay_in_default():
    policy = Policy()

    assert outlook(seen(policy, bathtub(0.01, 0), 900), policy) is None
    assert outlook(AfrModel(), policy) is None


def test_the_schemes_of_a_policy_start_with_its_default_and_save_more_and_more():
    for policy in POLICIES.values():
        savings = policy.savings()

        assert policy.schemes[0].name == "6-of-9"
        assert savings[0] == 0
        assert np.all(np.diff(savings) > 0)
        assert np.all(np.diff(policy.tolerated()) < 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"peak_io_fraction": 0.0}, {"average_io_fraction": -1.0}, {"threshold_fraction": 1.5}, {"review_days": 0},
        {"canary_disks": -1}, {"mttr_h": math.nan},
    ],
)  # fmt: skip
def test_limits_that_cannot_be_meant_are_refused(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        Policy(**wrong)
