"""Parameters of a plan: what remedies take passes, anything else is refused with the rule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.catalog import PARAMETERS, REMEDIES
from headway.core.errors import InputError
from headway.core.files.planfile import PlanFile, Remedy
from headway.plan.parameters import KINDS, check_parameters

GOOD = {
    "count": [0, 3], "size": [1, 10**9], "number": [0.5, 25], "flag": [True, False], "numbers": [[25], [1, 0.5]],
    "names": [[], ["D"]], "name": ["skip"], "codec": ["topk:0.01", {"*.weight": "sign"}],
}  # fmt: skip
BAD = {
    "count": [-1, 1.5, 2.0, True, "2", None, [2]],
    "size": [0, 2.5, False, "1", None],
    "number": [0, -1.0, float("nan"), float("inf"), True, "25", None],
    "flag": [0, 1, "true", None],
    "names": ["D", [1], None],
    "name": [1, None, ["skip"]],
    "codec": [3, None, {}, {"*": 1}, ["sign"], "zzz", "topk:-1"],
    "numbers": [[], [0], [1, "2"], 25, "25", None],
}


def checked(name, parameters):
    check_parameters(PlanFile((Remedy(name, parameters),)), PARAMETERS)


@pytest.mark.parametrize("name", REMEDIES)
def test_every_remedy_says_what_its_parameters_are(name):
    kinds = PARAMETERS[name]
    for parameter, kind in kinds.items():
        for value in GOOD[kind]:
            checked(name, {parameter: value})
        for value in BAD[kind]:
            with pytest.raises(InputError, match=f"{parameter} of {name} is .*; it must be .*Mend it"):
                checked(name, {parameter: value})


@pytest.mark.parametrize("kind", KINDS)
@given(value=st.one_of(st.none(), st.text(), st.lists(st.integers()), st.floats(), st.integers(), st.booleans()))
def test_every_json_value_is_judged_without_an_accident(kind, value):
    fits, rule = KINDS[kind]

    assert fits(value) in (True, False)
    assert rule


def test_an_unknown_parameter_gets_the_nearest_name():
    with pytest.raises(InputError, match=r"unknown parameter of data.workers 'num_worker'. Did you mean 'num_workers'"):
        checked("data.workers", {"num_worker": 2})


def test_no_parameters_are_needed():
    checked("data.workers", {})
