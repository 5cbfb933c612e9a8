"""The plan file: written by the planner, read by every rank."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import FormatError, InputError
from headway.core.files.planfile import ALLOWANCES, PlanFile, Remedy, read_plan, write_plan

values = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
speedups = st.floats(0.01, 100)
remedies = st.builds(
    Remedy,
    st.text(min_size=1),
    st.dictionaries(st.text(), values | st.lists(values, max_size=3)),
    predicted_speedup=st.none() | speedups,
    interval=st.none() | st.tuples(speedups, speedups).map(lambda pair: tuple(sorted(pair))),
    allow=st.sampled_from([None, *ALLOWANCES]),
)


@given(rows=st.lists(remedies, unique_by=lambda remedy: remedy.name, max_size=4))
def test_reading_returns_what_was_written(rows, tmp_path_factory) -> None:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    write_plan(PlanFile(tuple(rows)), path)

    assert read_plan(path) == PlanFile(tuple(rows))
    assert [file.name for file in path.parent.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"plan.json is not JSON.*Write a plan"),
        ("[]", r'a plan is an object with a list "remedies"'),
        ('{"schema": "headway.plan-file/1", "remedies": [], "baseline": 7}', r"baseline is 7; write the path"),
        ('{"remedies": []}', r"schema is '', this headway reads 'headway.plan-file/1'. Make the plan again"),
        ('{"schema": "headway.plan-file/2", "remedies": []}', r"schema is 'headway.plan-file/2'"),
        ('{"schema": "headway.plan-file/1", "remedies": [3]}', r'a remedy is 3; write an object with at least "name"'),
    ],
)
def test_a_file_that_is_no_plan_is_refused(text: str, message: str, tmp_path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(FormatError, match=message):
        read_plan(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": ""}, r"a remedy is named ''; give it a name"),
        ({"parameters": [1]}, r"parameters of host.gc are \[1\]; pass a mapping"),
        ({"predicted_speedup": 0}, r"speedups of host.gc are \[0\]; write finite numbers > 0"),
        ({"predicted_speedup": True}, r"speedups of host.gc are \[True\]"),
        ({"interval": [2, 1]}, r"interval of host.gc is \[2, 1\]; write \[low, high\]"),
        ({"interval": [1]}, r"interval of host.gc is \[1\]"),
        ({"interval": "wide"}, r"interval of host.gc is 'wide'"),
        ({"allow": ["lossy"]}, r"asks for --allow \['lossy'\]"),
        ({"predicted_speedup": 10**400}, r"the speedups of host.gc are \[1000"),
        ({"allow": "anything"}, r"asks for --allow 'anything'; choose one of: result-equivalent, lossy"),
        ({"speed": 1}, r"remedy host.gc has unknown keys: speed. Remove them"),
    ],
)
def test_a_bad_remedy_is_refused(change: dict, message: str, tmp_path) -> None:
    row = {"name": "host.gc", "parameters": {"every_steps": 10}} | change
    (tmp_path / "plan.json").write_text(json.dumps({"schema": "headway.plan-file/1", "remedies": [row]}))
    with pytest.raises(InputError, match=message):
        read_plan(tmp_path / "plan.json")


@pytest.mark.parametrize(
    "change", [{"step_s": 10**400}, {"predicted_speedup": "x"}, {"interval": [3, 1]}, {"predicted_speedup": -1}]
)
def test_figures_of_a_whole_plan_are_checked_like_those_of_a_remedy(change: dict, tmp_path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"schema": "headway.plan-file/1", "remedies": [], **change}))
    with pytest.raises(InputError, match=r"plan.json: the (plan's step_s|speedups of the plan|interval of the plan)"):
        read_plan(tmp_path / "plan.json")


def test_a_remedy_comes_once() -> None:
    with pytest.raises(InputError, match=r"holds host.gc more than once; keep one"):
        PlanFile((Remedy("host.gc"), Remedy("host.gc")))


def test_missing_files_and_folders_are_named(tmp_path) -> None:
    with pytest.raises(InputError, match=r"cannot read the plan .*absent.json: No such file"):
        read_plan(tmp_path / "absent.json")
    with pytest.raises(InputError, match=r"cannot be written: the folder .* does not exist. Create it first"):
        write_plan(PlanFile(), tmp_path / "absent" / "plan.json")


def test_a_parameter_that_is_no_json_value_is_refused_and_leaves_the_old_plan(tmp_path) -> None:
    path = tmp_path / "plan.json"
    write_plan(PlanFile(), path)
    with pytest.raises(InputError, match=r"no JSON value"):
        write_plan(PlanFile((Remedy("host.gc", {"x": float("nan")}),)), path)

    assert read_plan(path) == PlanFile()
