"""Forward and backward rows: derived from what comes before a backward, never overlapping, inside their step."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headway.ledger.buckets import BUCKET_OF
from headway.trace.events.vocabulary import SPANS
from headway.trace.rings.ring import Recorder
from tests.rings_made import Process, built, rows

durations = st.integers(1, 10**6)


@given(steps=st.lists(st.lists(st.tuples(durations, durations, durations), min_size=1, max_size=3), min_size=1,
                      max_size=5))  # fmt: skip
def test_segments_are_disjoint_and_sum_to_no_more_than_their_step(steps, tmp_path_factory):
    """Each step is a list of micro-batches: wait, forward and backward, ns."""
    run = tmp_path_factory.mktemp("run")
    process = Process(run)
    process.write("input.iter", 1000, 0, 0, 0)
    for step in steps:
        carried = (0, 0)
        for wait, forward, backward in step:
            process.write("input.next", wait, 0, 0, -1, 0)
            process.now_ns += forward
            if carried[1]:
                process.write("segment.backward", carried[1], 0, start_ns=carried[0])
            carried = (process.now_ns, backward)
            process.now_ns += backward
        process.write("optimizer.step", 500, 0, 0, *carried)
    trace = built(run)
    flat = [microbatch for step in steps for microbatch in step]

    assert [duration for _, duration in rows(trace, "segment.forward")] == [forward for _, forward, _ in flat]
    assert [duration for _, duration in rows(trace, "segment.backward")] == [backward for _, _, backward in flat]
    spans = sorted(rows(trace, "segment.forward") + rows(trace, "segment.backward"))
    assert all(start + duration <= after for (start, duration), (after, _) in pairwise(spans))
    own = trace.named("segment.forward", "segment.backward")
    for step in range(len(steps)):
        inside = own & (trace.events["step"] == step)
        whole = trace.named("step") & (trace.events["step"] == step)
        assert trace.events["duration_ns"][inside].sum() <= trace.events["duration_ns"][whole].sum()
        assert sorted(trace.events["seq"][inside].tolist()) == sorted([*range(len(steps[step]))] * 2)


def test_a_backward_inside_a_backward_is_part_of_it(tmp_path):
    process = Process(tmp_path)
    process.write("input.next", 10, 0, 0, -1, 0)
    start = process.now_ns
    process.write("segment.backward", 20, 0, start_ns=start + 130)
    process.write("optimizer.step", 5, 0, 0, start + 100, 80, start_ns=start + 200)
    trace = built(tmp_path)

    assert rows(trace, "segment.backward") == [(start + 100, 80)]
    assert rows(trace, "segment.forward") == [(start, 100)]


def test_without_anything_before_it_a_backward_has_no_forward(tmp_path):
    process = Process(tmp_path)
    process.write("optimizer.step", 5, 0, 0, process.now_ns + 10, 80, start_ns=process.now_ns + 100)
    trace = built(tmp_path)

    assert len(rows(trace, "segment.backward")) == 1
    assert rows(trace, "segment.forward") == []


def test_device_segments_belong_to_the_step_that_launched_them_and_replace_the_hosts(tmp_path):
    process = Process(tmp_path)
    launched = []
    for _ in range(3):
        process.write("input.next", 10, 0, 0, -1, 0)
        launched.append(process.now_ns)
        process.write("optimizer.step", 50, 0, 0, process.now_ns, 20)
    late = process.now_ns + 1_000_000
    for moment in launched:  # the device is far behind its host
        process.write("segment.forward", 300, 1, moment, start_ns=late)
        process.write("segment.backward", 600, 1, moment, start_ns=late + 300)
        late += 1000
    trace = built(tmp_path)
    forward = trace.named("segment.forward")

    assert trace.events["step"][forward].tolist() == [0, 1, 2]
    assert trace.events["duration_ns"][forward].tolist() == [300] * 3
    assert trace.events["duration_ns"][trace.named("segment.backward")].tolist() == [600] * 3
    assert set(trace.events["corr"][forward].tolist()) == {1}


def test_forward_segments_own_no_time_and_segments_leave_the_depth_of_other_rows_alone(tmp_path):
    process = Process(tmp_path)
    process.train(3)
    before = built(tmp_path)
    for step in range(3):  # one before each update
        process.write("segment.backward", 10_000, 0, start_ns=process.now_ns - 300_000 - step * 1_000_000)
    after = built(tmp_path)
    kept = ~after.named("segment.forward", "segment.backward")

    assert "segment.forward" not in BUCKET_OF
    assert SPANS["segment.forward"].kind == SPANS["segment.backward"].kind == "MARK"
    for column in ("start_ns", "duration_ns", "depth", "step", "kind", "lane"):
        assert np.array_equal(after.events[column][kept], before.events[column]), column


def test_a_ring_of_an_older_version_whose_updates_carry_nothing_has_no_segments(tmp_path):
    recorder = Recorder(str(tmp_path / "rings"))
    assert recorder.open()
    recorder.emit(SPANS["optimizer.step"].code, recorder._clock[0], 10, 0, 0)

    assert rows(built(tmp_path), "segment.backward") == []
