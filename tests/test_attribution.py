"""Attribution: one group at a time, in one pass."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.sim import Dag, attribute, replay
from headway.sim.graph import attribution as attribution_module
from headway.sim.graph.attribution import MODES
from tests import oracles
from tests.strategies import Case, cases


@given(cases(), st.data())
def test_the_last_columns_are_the_plain_replays(case: Case, data: st.DataObject) -> None:
    ideal = data.draw(st.lists(st.integers(0, 30), min_size=case.n, max_size=case.n))
    code = data.draw(st.lists(st.integers(-1, 2), min_size=case.n, max_size=case.n))
    dag = case.dag()
    for mode in MODES:
        table = attribute(dag, base=case.duration_ns, ideal=ideal, code=code, mode=mode)

        assert table[0, -2] == replay(dag, case.duration_ns).makespan_ns
        assert table[0, -1] == replay(dag, ideal).makespan_ns


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@given(case=cases(most=8), copies=st.integers(1, 3), data=st.data())
def test_every_column_and_component_equals_the_pure_python_twin(mode, case, copies, data):
    n = case.n * copies
    numbers = st.lists(st.integers(0, 30), min_size=n, max_size=n)
    base, ideal = data.draw(numbers), data.draw(numbers)
    code = data.draw(st.lists(st.integers(-1, 4), min_size=n, max_size=n))
    component = [op // case.n for op in range(n)]
    finish = sorted({c * case.n + data.draw(st.integers(0, case.n - 1)) for c in range(copies) for _ in range(2)})
    edges = [(c * case.n + a, c * case.n + b, lag) for c in range(copies) for a, b, lag in case.all_edges]
    expected = oracles.attribute(n, edges, base, ideal, code, finish, component, mode == "keep")
    dag = case.dag().tile(copies)
    arguments = {"code": code, "finish": finish, "component": component, "mode": mode}
    got = attribute(dag, base=base, ideal=ideal, **arguments)
    floats = attribute(dag, base=np.array(base) / 8, ideal=ideal, **arguments)

    assert got.dtype == np.int64
    assert got.tolist() == expected
    assert floats[:, -1].tolist() == [row[-1] for row in expected]


@given(cases(most=8), st.data())
def test_threads_and_blocks_change_nothing(case: Case, data: st.DataObject) -> None:
    copies = data.draw(st.integers(1, 5))
    n = case.n * copies
    ideal = data.draw(st.lists(st.integers(0, 30), min_size=n, max_size=n))
    code = [op % 7 for op in range(n)]
    component = [op // case.n for op in range(n)] if data.draw(st.booleans()) else None
    dag = case.dag().tile(copies)

    def run() -> list:
        return attribute(dag, base=case.duration_ns * copies, ideal=ideal, code=code, component=component).tolist()

    alone = run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attribution_module, "PARALLEL_FROM", 0)
        patch.setattr(attribution_module, "BLOCK_BYTES", 1)

        assert run() == alone


def test_an_empty_dag_has_no_components() -> None:
    assert attribute(Dag.from_edges(0, [], []), base=[], ideal=[], code=[]).shape == (0, 2)


def test_a_mask_names_the_same_operations_as_indices() -> None:
    dag = Dag.from_edges(3, [0], [1])
    arguments = {"base": [5, 1, 99], "ideal": [4, 1, 98], "code": [0, 0, 0]}

    assert attribute(dag, **arguments, finish=[1]).tolist() == [[6, 6, 5]]
    assert attribute(dag, **arguments, finish=[False, True, False]).tolist() == [[6, 6, 5]]


def test_float_columns_are_not_the_rounded_sum_of_a_difference() -> None:
    dag = Dag.from_edges(1, [], [])

    assert attribute(dag, base=[0.1], ideal=[1e17], code=[0])[0, 0] == 0.1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"base": [1, 2]}, r"base has shape \[2\]; pass \[3\]"),
        ({"ideal": [1, 2, -3]}, r"ideal of operation 2 is -3"),
        ({"code": [0, 0]}, r"code is int64 of shape \[2\]; pass 3 integers"),
        ({"code": [0, 0, -2]}, r"code\[2\] is -2; number from 0"),
        (
            {"component": [0, 1, 1]},
            r"operation 1 of component 1 waits for another component.*[Gg]ive each its own lanes",
        ),
        ({"component": [0, 0, 9]}, r"component 9 leaves numbers unused"),
        ({"component": [0, 0, 2]}, r"component 1 has no operation in finish"),
        ({"finish": [3]}, r"finish names operation 3; use indices 0\.\.2"),
        ({"finish": [0.5]}, r"finish is float64 of shape \[1\]; pass indices or 3 booleans"),
        ({"finish": []}, r"component 0 has no operation in finish; name at least one"),
        ({"mode": "kep"}, r"unknown mode 'kep'. Did you mean 'keep'"),
    ],
)
def test_bad_input_is_refused(arguments: dict, message: str) -> None:
    good = {"base": [1, 2, 3], "ideal": [1, 1, 1], "code": [0, 1, -1]}
    with pytest.raises(InputError, match=message):
        attribute(Dag.from_edges(3, [0], [1]), **(good | arguments))
