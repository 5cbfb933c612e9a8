"""A window of a trace as rows: nothing is drawn outside it, nothing visible is lost, the remainder is what is left."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.ledger.buckets import BUCKET_OF, BUCKETS, bucket_of_sub
from headway.report.answers import BUCKET_STYLES
from headway.report.page.timeline import ANNOTATION, HIDDEN, MOST_ROWS, Timeline, timeline
from headway.trace.events.trace import Trace
from headway.trace.events.vocabulary import KIND, SPANS
from tests.report_data import decode, demo_trace

HOST = {"device_type": "NVIDIA H200"}
"""A device whose remainder is not drawn: a CUDA run's steps are told by its kernels."""


def spans_of(rows: list[tuple[int, int, int]], **more: object) -> Trace:
    """Return a trace of (lane, start, duration) rows of rank 0."""
    columns = {"lane": [r[0] for r in rows], "start_ns": [r[1] for r in rows], "duration_ns": [r[2] for r in rows]}
    full = {**columns, "rank": np.zeros(len(rows)), "name": np.zeros(len(rows)), "kind": np.zeros(len(rows)), **more}
    return Trace.from_columns(full, names=["matmul"], lanes=["main", "stream 7", "stream 20"], meta=HOST)


rows_strategy = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1000), st.integers(1, 50)), max_size=40)


@given(rows=rows_strategy, window=st.tuples(st.integers(0, 1000), st.integers(0, 1000)))
def test_spans_are_cut_at_the_window(rows: list[tuple[int, int, int]], window: tuple[int, int]) -> None:
    start, end = sorted(window)
    line = timeline(spans_of(rows), start_ns=start, end_ns=end)

    expected = sorted((max(s, start) - start, min(s + d, end)) for _, s, d in rows if s < end and s + d > start)
    drawn = sorted(
        (int(s), int(s + d + start)) for r in line.rows for s, d in zip(r.start_ns, r.duration_ns, strict=True)
    )
    assert drawn == expected


@given(rows=rows_strategy, most=st.integers(1, 10))
def test_joining_keeps_the_number_of_spans_and_obeys_the_limit(rows: list[tuple[int, int, int]], most: int) -> None:
    line = timeline(spans_of(rows), most_spans=most)

    assert sum(len(row.start_ns) for row in line.rows) <= max(most, 0)
    assert sum(int(row.joined.sum()) for row in line.rows) + line.hidden == len(rows)


def test_a_million_short_spans_become_a_solid_stretch() -> None:
    number = 200_000
    trace = spans_of([(1, 10 * i, 9) for i in range(number)])

    line = timeline(trace)

    assert len(line.rows[0].start_ns) == 1
    assert line.rows[0].joined.tolist() == [number]
    assert (line.rows[0].start_ns[0], line.rows[0].duration_ns[0]) == (0, 10 * number - 1)


def test_the_training_thread_comes_first_and_lanes_in_natural_order() -> None:
    line = timeline(spans_of([(2, 0, 5), (1, 0, 5), (0, 0, 5)]))

    assert [row.name for row in line.rows] == ["rank 0", "rank 0 · stream 7", "rank 0 · stream 20"]


@pytest.mark.parametrize("name", BUCKET_OF)
def test_every_booked_name_wears_the_colour_of_its_bucket(name: str) -> None:
    kind = KIND[SPANS[name].kind]
    columns = {"start_ns": [0], "duration_ns": [5], "rank": [0], "name": [0], "kind": [kind]}
    line = timeline(Trace.from_columns(columns, names=[name], meta=HOST))

    drawn = [BUCKETS[code] for row in line.rows for code in row.bucket]
    assert drawn == ([] if name in HIDDEN else [bucket_of_sub(BUCKET_OF[name].sub)])


def test_the_page_and_the_ledger_number_buckets_alike() -> None:
    assert tuple(BUCKET_STYLES) == BUCKETS


def test_what_no_span_covers_inside_steps_is_the_remainder() -> None:
    trace = demo_trace(ranks=1, steps=5)
    line = timeline(trace)

    main = line.rows[0]
    outer = main.depth == 0
    steps = trace.where(trace.named("step"))
    covered_ns = int(main.duration_ns[outer].sum())
    assert covered_ns == int(steps.events["duration_ns"].sum())
    assert line.names[int(main.name_code.max())] == "compute"
    assert [step for step, _ in line.steps] == [0, 1, 2, 3, 4]


def test_a_device_with_kernels_has_no_remainder() -> None:
    trace = demo_trace(ranks=1, steps=2)
    device = Trace(trace.events, trace.names, trace.lanes, trace.groups, trace.ranks, HOST)

    codes = np.concatenate([row.name_code for row in timeline(device).rows])
    assert (codes < len(trace.names)).all()


def test_chosen_steps_set_the_window() -> None:
    trace = demo_trace(ranks=2, steps=6)

    line = timeline(trace, steps=[2, 3])

    assert (line.start_ns, line.end_ns) == trace.select(steps=[2, 3]).span_ns


def test_the_encoded_rows_are_the_rows() -> None:
    line = timeline(demo_trace())

    for row, coded in zip(line.rows, line.to_json()["rows"], strict=True):
        assert decode(coded["start"]).tolist() == row.start_ns.tolist()
        assert decode(coded["duration"]).tolist() == row.duration_ns.tolist()


def test_of_many_ranks_evenly_spread_ones_are_drawn() -> None:
    trace = demo_trace(ranks=100, steps=1)

    line = timeline(trace)

    assert len(line.rows) <= MOST_ROWS + 3
    assert (line.ranks[0], line.ranks[-1], line.all_ranks) == (0, 99, 100)
    assert timeline(trace, ranks=[3, 50]).ranks == (3, 50)


def test_marks_are_no_use_of_time() -> None:
    columns = {"start_ns": [0], "duration_ns": [5], "rank": [0], "name": [0], "kind": [KIND["MARK"]]}
    line = timeline(Trace.from_columns(columns, names=["ProfilerStep#4"], meta=HOST))

    assert line.rows[0].bucket.tolist() == [ANNOTATION]


def test_an_empty_trace_has_no_rows() -> None:
    empty = Trace.from_columns({"start_ns": [], "duration_ns": []})

    assert timeline(empty) == Timeline(0, 0, (), ("compute",))


def test_ranks_are_drawn_on_the_common_clock_of_an_aligned_trace() -> None:
    rows = {"rank": [0, 1], "start_ns": [100, 5_100], "duration_ns": [10, 10], "name": [0, 0], "kind": [0, 0]}
    rows["lane"] = [0, 0]
    trace = Trace.from_columns(rows, names=["matmul"], lanes=["main"], ranks={1: {"offset_ns": -5_000}}, meta=HOST)
    drawn = timeline(trace)

    assert (drawn.start_ns, drawn.end_ns) == (100, 110)
    assert [row.start_ns.tolist() for row in drawn.rows] == [[0], [0]]


def test_a_window_that_ends_before_it_starts_is_refused() -> None:
    with pytest.raises(InputError, match=r"ends 5 ns before it starts. Swap"):
        timeline(demo_trace(), start_ns=10, end_ns=5)


def test_hostile_names_lose_what_could_steer() -> None:
    columns = {"start_ns": [0], "duration_ns": [5], "rank": [0], "name": [0]}

    line = timeline(Trace.from_columns(columns, names=["</script>\x1b[2J"]))

    assert line.names[0] == "</script> [2J"
