"""Made-up fleets: as many disks as they say, deployed as they say, with rates that are rates."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import UnknownNameError
from headway.lab.fleet_sim import MIXES, made


@pytest.mark.parametrize("name", MIXES)
@settings(max_examples=10)
@given(seed=st.integers(0, 10_000))
def test_a_fleet_has_its_disks_and_its_mix_of_deployments(name, seed):
    fleet, mix = made(name, seed=seed), MIXES[name]
    steps = [model for model in fleet if model.step_days()]

    assert sum(model.num_disks for model in fleet) == mix.num_disks
    assert len(fleet) == mix.num_trickle + mix.num_step
    assert {model.name.split("-")[0] for model in steps} <= {"step"}
    assert 110_000 <= mix.num_disks <= 450_000
    for model in fleet:
        assert 0 < model.true_afr(2000).max() < 0.16  # the default scheme protects every disk
        assert model.arrivals[-1][0] < mix.days


def test_equal_seeds_give_equal_fleets_and_others_others():
    assert made("step", seed=3) == made("step", seed=3) != made("step", seed=4)


def test_an_unknown_fleet_is_refused_with_the_nearest():
    with pytest.raises(UnknownNameError, match="Did you mean 'trickle'"):
        made("trickel")
