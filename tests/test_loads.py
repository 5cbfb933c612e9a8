"""Loads: their children partition them, collections keep their time, unmeasured ones get fair shares."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headway.trace.recording.loads import CHILDREN, LoadParts
from tests.rings_made import Process, built, rows


@given(st.lists(st.tuples(*[st.integers(0, 1000)] * 5), min_size=1, max_size=20))
def test_the_parts_of_a_load_and_its_collections_add_up_to_it(loads):
    columns = [np.array(column, np.int64) for column in zip(*loads, strict=True)]
    parts = LoadParts.parts_of(*columns)

    assert all((part >= 0).all() for part in parts)
    assert (sum(parts) + np.clip(columns[4], 0, columns[0]) == columns[0]).all()


def test_a_load_in_the_main_process_lies_in_its_wait_and_its_children_in_it(tmp_path):
    process = Process(tmp_path)
    start = process.now_ns
    process.write("input.load", 1_000_000, 0, 0, -1, 64, start_ns=start + 1000)
    process.write("input.parts", 0, 600_000, 100_000, 200_000, 0, start_ns=start + 1000)
    process.write("input.next", 1_002_000, 0, 0, -1, 0, start_ns=start)
    trace = built(tmp_path)
    depth = {trace.name_of(i): int(trace.events["depth"][i]) for i in range(len(trace))}
    durations = {name: rows(trace, name)[0][1] for name in CHILDREN}

    assert (depth["input.next"], depth["input.load"], depth["input.prep"]) == (0, 1, 2)
    assert list(durations.values()) == [300_000, 100_000, 400_000, 200_000]
    assert rows(trace, "input.fetch")[0][0] == start + 1000
    assert not trace.named("input.parts").any()


def test_children_leave_the_time_of_a_collection_free(tmp_path):
    process = Process(tmp_path)
    start = process.now_ns
    process.write("host.gc", 100_000, 2, 5, start_ns=start + 250_000)
    process.write("input.load", 1_000_000, 0, 0, -1, 64, start_ns=start)
    process.write("input.parts", 0, 700_000, 0, 0, 100_000, start_ns=start)
    trace = built(tmp_path)

    assert rows(trace, "input.fetch") == [(start, 250_000), (start + 350_000, 50_000)]
    assert rows(trace, "input.prep") == [(start + 400_000, 600_000)]


def test_short_loads_that_were_not_measured_get_the_shares_of_those_that_were(tmp_path):
    process = Process(tmp_path)
    for index in range(4):
        start = process.write("input.load", 1000, 0, index, -1, 8)
        if index == 0:
            process.write("input.parts", 0, 600, 0, 100, 0, start_ns=start)
    trace = built(tmp_path)

    assert [d for _, d in rows(trace, "input.fetch")] == [400] * 4
    assert [d for _, d in rows(trace, "input.collate")] == [100] * 4
