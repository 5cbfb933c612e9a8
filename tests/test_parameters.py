"""Parameters of a plan: what the records of remedies take passes, anything else is refused with the rule."""

import contextlib
import importlib
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.catalog import ADVISERS, RECORDS, REMEDIES
from headway.core.errors import InputError
from headway.core.files.planfile import ALLOWANCES
from headway.core.remedies import Count, Flag, Names, Positive, Size, Sizes, record_at
from tests.refusals import refused

GOOD = {
    Count: [0, 3], Size: [1, 10**9], Positive: [0.5, 25], Flag: [True, False], Sizes: [[25], [1, 0.5]],
    Names: [[], ["D"]],
}  # fmt: skip
BAD = {
    Count: [-1, 1.5, 2.0, True, "2", [2]], Size: [0, 2.5, False, "1"],
    Positive: [0, -1.0, float("nan"), float("inf"), True, "25"], Flag: [0, 1, "true"], Names: ["D", [1]],
    Sizes: [[], [0], [1, "2"], [True], 25, "25"],
}  # fmt: skip
REQUIRED = {
    "data.cache": {"bytes": 1}, "comm.bucket": {"bucket_mb": 1}, "comm.compress": {"codec": "sign"},
    "comm.overlap": {"shapes": {"8x8x8": "ring:W"}},
    "comm.loose": {"rule": "fedavg:5"},
    "parallel.schedule": {"order": ["0F0", "1F0"]}, "model.precision": {"operators": {"0": {"fc": "bf16"}}},
    "cluster.batch": {"batch_size": 1, "own_batch_size": 1, "initial_batch": 1, "noise_scale": 1},
}  # fmt: skip
OTHERS = [
    ("fault.guard", "action", "skipp", "rollback or skip or stop"),
    ("fault.guard", "action", None, "rollback or skip or stop"),
    ("power.filler", "level", 1.5, "a number above 0, 1 at most"),
    ("parallel.schedule", "order", ["0F0"], "a row of torch's CSV for each of at least 2 ranks"),
    ("model.precision", "operators", ["fc"], "rank -> operator -> int8, bf16 or float32"),
    ("comm.compress", "codec", 3, "a codec such as 'topk:0.01', or patterns"),
    ("comm.loose", "rule", 5, "a rule such as 'fedavg:20'"),
    ("comm.compress", "codec", {"*": 1}, "a codec such as 'topk:0.01', or patterns"),
    ("comm.overlap", "shapes", {"8x8x8": 2}, "shapes 'MxKxN' or 'rs:MxKxN' with a form each"),
]


def fields(name):
    """Return (parameter, type without None) of a remedy."""
    for field in msgspec.structs.fields(RECORDS[name].parameters):
        inner = [one for one in get_args(field.type) if one is not type(None)]
        yield field.name, inner[0] if type(None) in get_args(field.type) else field.type


@pytest.mark.parametrize("name", REMEDIES)
def test_every_remedy_takes_what_its_record_says_and_nothing_else(name):
    record, required = RECORDS[name], REQUIRED.get(name, {})

    assert record.read(required) == record.parameters(**required)
    for parameter, kind in fields(name):
        for value in GOOD.get(kind, []):
            assert getattr(record.read({**required, parameter: value}), parameter) == value
        for value in BAD.get(kind, []):
            with pytest.raises(InputError, match=f"{parameter} of {name} is .*; it must be .*Fix it"):
                record.read({**required, parameter: value})
    for parameter in required:
        with pytest.raises(InputError, match=f"of {name} is missing; it must be |{name} takes {parameter}, .*, or "):
            record.read({key: value for key, value in required.items() if key != parameter})


@pytest.mark.parametrize(("name", "parameter", "value", "rule"), OTHERS)
def test_rules_of_one_remedy_are_said_in_words(name, parameter, value, rule):
    with pytest.raises(InputError, match=f"{parameter} of {name} is .*; it must be {rule}"):
        RECORDS[name].read({parameter: value})


test_forms_shapes_and_codecs_are_checked_by_their_own_rules_before_anything_starts = refused(
    ("comm.overlap", {"shapes": {"8x8": "plain"}}, "is not MxKxN"),
    ("comm.overlap", {"shapes": {"8x8x8": "ring"}}, "Did you mean 'ring:W'"),
    ("comm.compress", {"codec": "zzz"}, "unknown codec 'zzz'"),
    ("comm.compress", {"codec": "topk:-1"}, "k is '-1'"),
    ("comm.compress", {"codec": {}}, "at least"),
    by=lambda remedy, parameters: RECORDS[remedy].read(parameters),
)


@given(value=st.one_of(st.none(), st.text(), st.lists(st.integers()), st.floats(), st.integers(), st.booleans()))
def test_every_json_value_is_judged_without_an_accident(value):
    for record in RECORDS.values():
        for name in record.parameters.__struct_fields__:
            with contextlib.suppress(InputError):
                assert record.read({**REQUIRED.get(record.name, {}), name: value})


def test_unknown_parameters_get_the_nearest_name_or_hear_that_there_are_none():
    with pytest.raises(InputError, match=r"unknown parameter of data.workers 'num_worker'. Did you mean 'num_workers'"):
        RECORDS["data.workers"].read({"num_worker": 2})
    with pytest.raises(InputError, match=r"comm.gradient_view takes no parameters, but the plan gives \['on'\]"):
        RECORDS["comm.gradient_view"].read({"on": True})


def test_every_record_lies_in_the_room_that_advises_it_and_what_it_names_is_there():
    assert set(REMEDIES) == {name for name, record in RECORDS.items() if record.apply}
    for name, place in REMEDIES.items():
        record = record_at(place, name)
        module, _, function = record.apply.partition(":")
        assert record is RECORDS[name]
        assert name.split(".")[0] in ADVISERS
        assert callable(getattr(importlib.import_module(module), function))
        assert (record.allow is None) == (record.changes == "")
        assert record.allow in (None, *ALLOWANCES)
