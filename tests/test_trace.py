"""The trace itself: columns, tables, selection, joining."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.trace.events.trace import COLUMNS, Trace, concat
from headway.trace.events.vocabulary import KIND
from tests.traces_made import traces


def rows(trace: Trace) -> list[tuple]:
    """Return every event in words."""
    columns = [column for column in COLUMNS if column not in ("name", "lane", "group")]
    return [
        (trace.name_of(i), trace.lanes[trace.events["lane"][i]], *(trace.events[c][i].item() for c in columns))
        for i in range(len(trace))
    ]


@pytest.mark.slow
@given(parts=st.lists(traces(wide=False), min_size=1, max_size=4))
def test_joining_keeps_every_event_and_its_words(parts):
    assert rows(concat(parts)) == [row for part in parts for row in rows(part)]


@pytest.mark.slow
@given(trace=traces(), seed=st.integers(0, 9))
def test_a_selection_keeps_the_tables_and_the_chosen_rows(trace, seed):
    mask = np.random.default_rng(seed).random(len(trace)) < 0.5

    chosen = trace.where(mask)

    assert rows(chosen) == [row for row, kept in zip(rows(trace), mask, strict=True) if kept]
    assert (chosen.names, chosen.lanes, chosen.meta) == (trace.names, trace.lanes, trace.meta)


@pytest.mark.slow
@given(trace=traces())
def test_a_trace_equals_its_copy_and_nothing_else(trace):
    copy = trace.where(np.arange(len(trace)))

    assert copy == trace
    assert trace != "a trace"
    if len(trace):
        assert trace.where(slice(1, None)) != trace


def test_select_by_step_and_rank():
    trace = Trace.from_columns({"step": [0, 1, 1, 2], "rank": [0, 0, 1, 1]})

    assert len(trace.select(steps=[1, 2])) == 3
    assert trace.select(steps=[1], ranks=[1]).events["step"].tolist() == [1]


def test_what_is_left_out_is_unknown():
    trace = Trace.from_columns({"start_ns": [5]})

    assert {column: trace.events[column][0] for column in COLUMNS} == {c: v for c, (_, v) in COLUMNS.items()} | {
        "start_ns": 5
    }


def test_one_line_says_what_a_trace_is():
    trace = Trace.from_columns(
        {"rank": [0, 3], "step": [4, 4], "duration_ns": [5, 2_000_000]}, meta={"source": "kineto"}
    )

    assert repr(trace) == "<Trace: 2 events, 2 ms, ranks 0..3, step 4, kineto>"
    assert repr(Trace.from_columns({})) == "<Trace: 0 events, 0 us, unknown source>"


def test_head_shows_the_earliest_events_in_words():
    trace = Trace.from_columns(
        {"start_ns": [9, 3], "duration_ns": [1, 2], "kind": [KIND["COLL"], KIND["HOST"]]}, names=["a", "b"], name=[0, 1]
    )

    assert trace.head(1) == [{"name": "b", "kind": "HOST", "lane": "main", "start_ns": 3, "duration_ns": 2}]


def communication(name: str, ranks: list[int]) -> Trace:
    """Return a trace with a collective in group 1, called `name`, and a loader row with the same number."""
    return Trace.from_columns(
        {"group": [1, 1], "kind": [KIND["COLL"], KIND["DATA"]]}, groups={1: {"name": name, "ranks": ranks}}
    )


def test_groups_that_share_a_number_but_not_a_meaning_are_kept_apart():
    one, other = communication("1", [0, 1]), communication("1", [2, 3])

    joined = concat([one, other, one, other])

    first, second = joined.events["group"][[0, 2]].tolist()
    assert first != second
    assert joined.events["group"].tolist() == [first, 1, second, 1] * 2
    assert {key: value["ranks"] for key, value in joined.groups.items()} == {first: [0, 1], second: [2, 3]}


def test_groups_that_mean_the_same_are_one():
    joined = concat([communication("tp", [0, 1]), communication("tp", [])])

    assert joined.groups == {1: {"name": "tp", "ranks": [0, 1]}}
    assert joined.events["group"].tolist() == [1, 1, 1, 1]


def test_the_coverage_of_every_part_is_kept():
    parts = [Trace.from_columns({}, meta={"coverage": {"mapped": share}}) for share in (1.0, 0.5, 0.75)]

    joined = concat([concat(parts[:2]), parts[2]])

    assert joined.meta["coverage"] == {"mapped": 0.5, "parts": [{"mapped": 1.0}, {"mapped": 0.5}, {"mapped": 0.75}]}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"start": [1]}, "'start' is not a trace column. Did you mean 'start_ns'"),
        ({"start_ns": [1], "rank": [1, 2]}, r"columns differ in length.*same number of rows"),
        ({"duration_ns": [4, -2]}, r"event 1 lasts -2 ns.*drop the row"),
        ({"lane": [0, 40_000]}, r"lane\[1\] is 40000; the column holds -32768..32767"),
        ({"stage": np.array([-40_000])}, r"stage\[0\] is -40000; the column holds"),
        ({"seq": [2**80]}, r"a number in seq is beyond int64.*Leave it unknown"),
        ({"bytes": [1e30]}, r"bytes\[0\] is 1e\+30; the column holds"),
        ({"name": [0]}, r"name code 0 has no entry.*full name table"),
    ],
)
def test_columns_that_cannot_be_and_no_path_at_all_are_refused(columns, message):
    with pytest.raises(InputError, match=message):
        Trace.from_columns(columns)
    with pytest.raises(InputError, match="list of paths is empty"):
        Trace.open([])


@given(data=st.data(), parts=st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_edges_follow_their_rows_through_joining_and_selection(data, parts):
    def part(n: int) -> Trace:
        ends = st.lists(st.integers(0, n - 1), min_size=2, max_size=2)
        return Trace.from_columns({"start_ns": np.arange(n)}, edges=[data.draw(ends), data.draw(ends)])

    made = [part(n) for n in parts]
    joined = concat(made)
    order = np.array(data.draw(st.permutations(range(len(joined)))))
    kept = order[: data.draw(st.integers(0, len(joined)))]

    first = np.cumsum([0, *parts])
    expected = {(a + first[k], b + first[k]) for k, trace in enumerate(made) for a, b in trace.edges.T.tolist()}
    place = {int(row): at for at, row in enumerate(kept)}
    assert set(map(tuple, joined.edges.T.tolist())) == expected
    assert set(map(tuple, joined.where(kept).edges.T.tolist())) == {
        (place[a], place[b]) for a, b in expected if a in place and b in place
    }


def test_an_edge_to_a_row_that_is_not_there_is_refused():
    with pytest.raises(InputError, match=r"an edge names row 2 or 0 of 2 rows. Number rows from 0"):
        Trace.from_columns({"start_ns": [1, 2]}, edges=[[0], [2]])


def test_what_two_recorders_know_of_one_rank_is_joined():
    """A profiler file knows the host, the Flight Recorder's dump beside it the groups' states."""
    profile, dump = (Trace.from_columns({"rank": [0]}, ranks=ranks) for ranks in ({0: {"host": "a"}}, {0: {"pid": 7}}))

    assert concat([profile, dump]).ranks == {0: {"host": "a", "pid": 7}}
    assert concat([profile, replace(profile, ranks={0: {"host": "b"}})]).ranks == {0: {"host": "b"}}
