"""A slice holds what was asked for, whether it was cut in memory or read from files."""

from fnmatch import fnmatchcase

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.trace.events import parquet
from headway.trace.events.trace import Trace
from headway.trace.events.vocabulary import KIND, KINDS
from headway.trace.readers.formats import TraceSlice, moments
from tests.runs_made import RunMaker, write_folder
from tests.test_trace import rows
from tests.traces_made import traces

BOUNDS = st.none() | st.tuples(st.integers(-1, 3), st.integers(1, 6))
SLICES = st.builds(
    TraceSlice,
    steps=BOUNDS,
    ranks=BOUNDS,
    lanes=st.none() | st.sampled_from(["*", "?", "main", "a*"]),
    names=st.none() | st.sampled_from(["*", "?*", "[ab]*"]),
    kinds=st.none() | st.lists(st.sampled_from(KINDS), max_size=4).map(tuple),
    between_ns=st.none() | st.tuples(st.integers(0, 2**60), st.integers(2**60, 2**62)),
)


def twin(part: TraceSlice, trace: Trace) -> Trace:
    """Pick row by row: slow and obvious."""
    low = trace.span_ns[0]
    kept = []
    for row in range(len(trace)):
        value = {column: values[row].item() for column, values in trace.events.items()}
        good = all(first <= value[c] < end for c, (first, end) in part.ranges.items())
        good &= part.lanes is None or fnmatchcase(trace.lanes[value["lane"]], part.lanes)
        good &= part.names is None or (value["name"] >= 0 and fnmatchcase(trace.name_of(row), part.names))
        good &= part.kinds is None or KINDS[value["kind"]] in part.kinds
        if part.between_ns is not None:
            begin, end = (low + moment for moment in part.between_ns)
            good &= value["start_ns"] < end and value["start_ns"] + value["duration_ns"] >= begin
        kept.append(bool(good))
    return trace.where(np.array(kept, bool))


@pytest.mark.slow
@settings(max_examples=60)
@given(part=SLICES, trace=traces(wide=False))
def test_a_slice_equals_the_obvious_twin(part, trace):
    assert rows(part.of(trace)) == rows(twin(part, trace))


@pytest.mark.slow
@settings(max_examples=40)
@given(part=SLICES, trace=traces(wide=False))
def test_reading_a_slice_from_a_file_equals_cutting_it_in_memory(part, trace, tmp_path_factory, monkeypatch_groups):
    path = tmp_path_factory.mktemp("slices") / "a.parquet"
    parquet.write(trace, path)

    assert rows(part.read([path])) == rows(part.of(trace))


@pytest.fixture(scope="module")
def monkeypatch_groups():
    """Write row groups of three rows, so that small files have several."""
    before, parquet.ROW_GROUP = parquet.ROW_GROUP, 3
    yield
    parquet.ROW_GROUP = before


def test_of_a_run_folder_only_the_files_of_the_ranks_are_read(tmp_path):
    folder = write_folder(RunMaker(ranks=3, steps=6).make(), tmp_path / "run")
    whole = Trace.open(folder)
    bad = folder / "events" / "a0-r0.parquet"
    data = bytearray(bad.read_bytes())
    data[8:200] = b"\xff" * 192  # Its pages are damaged; its footer is not.
    bad.write_bytes(data)

    part = TraceSlice(ranks=(1, 3), steps=(2, 4)).read([folder])

    assert rows(part) == rows(
        whole.where(np.isin(whole.events["rank"], [1, 2]) & np.isin(whole.events["step"], [2, 3]))
    )


def test_what_is_listed_stays_listed_in_a_slice():
    trace = Trace.from_columns({"step": [0, 1, 1, 2]}, edges=[[0, 1, 2], [1, 2, 3]])

    assert TraceSlice(steps=(1, 3)).of(trace).edges.tolist() == [[0, 1], [1, 2]]


def test_moments_are_exact_in_every_unit():
    assert moments("1.5s:1.6s") == (1_500_000_000, 1_600_000_000)
    assert moments("0.1us:7ms") == (100, 7_000_000)
    assert moments(" 3 : 4ns") == (3, 4)


@pytest.mark.parametrize("text", ["5", "1:2:3", "a:b", "-1:5", "1.5.5s:2s"])
def test_what_is_no_stretch_says_how_to_write_one(text):
    with pytest.raises(InputError, match=r"is not a time range. Write FROM:TO, as in 1.5s:1.6s"):
        moments(text)


def test_an_empty_stretch_and_an_unknown_kind_are_refused():
    with pytest.raises(InputError, match=r"is an empty stretch: its end must lie after its start"):
        moments("7us:7us")
    with pytest.raises(InputError, match=r"unknown kind 'COMPTE'. Did you mean 'COMPUTE'"):
        TraceSlice(kinds=("COMPTE",))
    assert KIND["COMPUTE"] == 0
