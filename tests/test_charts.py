"""Arrays on a page: the encoding gives back what it was given, downsampling loses no extreme, sums stay sums."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.report.page.charts import (
    HEAT_COLUMNS,
    HEAT_ROWS,
    MOST_LINES,
    HeatMap,
    encode,
    heat_chart,
    joined_cells,
    share_chart,
    step_chart,
    thinned,
    worker_heat_map,
)
from headway.why.answer import StragglerRow
from tests.refusals import refused
from tests.report_data import decode

times_s = st.one_of(st.floats(0, 1e5), st.just(math.nan), st.just(math.inf))


@given(values=st.lists(st.one_of(st.integers(-(2**40), 2**40), st.none()), max_size=60))
def test_whole_numbers_and_gaps_come_back_exactly(values: list[int | None]) -> None:
    array = np.array([math.nan if v is None else float(v) for v in values])

    assert np.array_equal(decode(encode(array, 1)), array, equal_nan=True)


@given(values=st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=60))
def test_a_series_comes_back_to_a_ten_thousandth_of_its_median(values: list[float]) -> None:
    array = np.array(values)

    error = np.abs(decode(encode(array)) - array)

    # The grid is at most 1e-4 of the median, or what 2**51 steps leave of the largest value.
    assert error.max() <= max(1e-4 * np.median(array), 1e-12 * array.max())


@given(values=st.lists(st.lists(times_s, min_size=7, max_size=7), min_size=1, max_size=4), bins=st.integers(1, 5))
def test_downsampling_keeps_the_extremes_of_every_group(values: list[list[float]], bins: int) -> None:
    array = np.where(np.isfinite(np.array(values)), np.array(values), np.nan)

    line = thinned(np.array(values), bins)

    for group, first in enumerate(line.first_step):
        cells = array[:, first : first + line.width]
        known = cells[~np.isnan(cells)]
        if len(known):
            assert (line.low[group], line.high[group]) == (known.min(), known.max())
            assert line.middle[group] == pytest.approx(np.median(known))
        else:
            assert np.isnan([line.low[group], line.middle[group], line.high[group]]).all()


@given(values=st.lists(st.floats(0, 1e3), min_size=9, max_size=40))
def test_a_ranks_line_passes_through_its_extremes_in_order(values: list[float]) -> None:
    line = thinned(np.array([values]), bins=4)

    for group, first in enumerate(line.first_step):
        cells = values[first : first + line.width]
        pair = line.lines[0, 2 * group : 2 * group + 2].tolist()
        assert sorted(pair) == [min(cells), max(cells)]
        assert cells.index(min(cells)) <= cells.index(max(cells)) or pair[0] == max(cells)


@pytest.mark.parametrize("shape", [(0, 0), (3, 0), (0, 5)])
def test_no_step_is_no_chart(shape: tuple[int, int]) -> None:
    assert step_chart(np.zeros(shape), range(shape[0])) is None
    assert share_chart({}) is None
    assert share_chart({"input": np.zeros(0)}) is None


def test_a_thousand_ranks_send_the_slowest_lines_and_the_band_of_all() -> None:
    step_s = np.full((1000, 50), 0.1)
    step_s[417] = 0.3

    chart = step_chart(step_s, range(1000))

    assert len(chart["lines"]) == MOST_LINES
    assert 417 in chart["ranks"]
    assert max(decode(chart["high"])) == pytest.approx(0.3)


@given(seconds=st.lists(st.lists(st.floats(0, 1e3), min_size=3, max_size=3), min_size=1, max_size=30))
def test_shares_are_of_sums_and_add_up_to_one(seconds: list[list[float]]) -> None:
    columns = np.array(seconds).T
    chart = share_chart({"useful": columns[0], "input": columns[1], "comm": columns[2]})

    assert chart is not None
    total = sum((decode(coded) for coded in chart["shares"].values()), np.zeros(len(seconds)))
    spent = columns.sum(axis=0) > 0
    if chart["shares"]:
        assert np.allclose(total[spent], 1.0, atol=2e-4)


test_arrays_that_do_not_fit_are_refused = refused(
    (
        lambda: share_chart({"useful": np.ones(2), "input": np.ones(3)}),
        r"length: \[2, 3\]. Give every bucket one value",
    ),
    (lambda: thinned(np.ones(4)), r"1 axes; they need two"),
    (HeatMap("slowdown", np.ones((2, 2)), "dp", "pp", ("0",), ()).names, r"is 2 x 2 but names 1 rows"),
)


def test_a_large_heat_map_keeps_its_hottest_cell() -> None:
    values = np.ones((1024, 5000))
    values[1000, 4321] = 7.0

    small = joined_cells(HeatMap("slowdown", values, "rank", "step"))

    assert small.values.shape[0] <= HEAT_ROWS
    assert small.values.shape[1] <= HEAT_COLUMNS
    row, column = np.unravel_index(small.values.argmax(), small.values.shape)
    assert small.values.max() == 7.0
    assert (small.row_names[row], small.column_names[column]) == ("1000–1003", "4305–4325")
    assert len(heat_chart(small)["values"]["data"]) < 400_000


def test_the_workers_of_an_operation_trace_become_a_matrix() -> None:
    heat = worker_heat_map(StragglerRow(by={"worker": {"0/0": 1.3, "0/1": 1.0, "10/0": 1.1, "2/1": None}}))

    assert heat.row_names == ("0", "2", "10")
    assert np.array_equal(heat.values, [[1.3, 1.0], [np.nan, np.nan], [1.1, np.nan]], equal_nan=True)
    assert worker_heat_map(StragglerRow()) is None
