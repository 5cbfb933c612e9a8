"""The run as it would have been: the same segments, end to end, as long as the prediction says."""

import numpy as np
import pytest

from headway.sim.recorded.ideal import LOSSLESS, replayed_trace
from headway.sim.recorded.program import Program
from headway.trace.recording.runs import Run
from tests.paths import GOLDEN


@pytest.fixture(scope="module")
def program():
    return Program.from_run(Run.open(GOLDEN / "runs" / "before"))


@pytest.mark.parametrize("edits", [(), LOSSLESS, ("workers=2",)], ids=["as it was", "without losses", "workers"])
def test_its_steps_are_as_long_as_predicted(program, edits):
    trace = replayed_trace(program, edits)
    rows = trace.select(ranks=[0]).events
    end_ns = rows["start_ns"] + rows["duration_ns"]
    last = {int(step): int(end_ns[rows["step"] == step].max()) for step in np.unique(rows["step"])}
    steps = sorted(last)[program.warm - 1 :]
    mean_s = (last[steps[-1]] - last[steps[0]]) / (len(steps) - 1) / 1e9

    assert mean_s == pytest.approx(program.predict(edits).step_s, rel=0.03)


def test_segments_of_a_rank_follow_each_other_without_overlap(program):
    for rank in (0, 1):
        rows = replayed_trace(program).select(ranks=[rank]).events

        assert (rows["start_ns"][1:] >= (rows["start_ns"] + rows["duration_ns"])[:-1]).all()


def test_without_losses_nothing_waits_for_input(program):
    trace = replayed_trace(program)
    waits = trace.where(trace.named("input.next", "host.logging", "host.gc")).events["duration_ns"].sum()

    assert waits < 0.01 * trace.events["duration_ns"].sum()
