"""Packing of fill jobs into the gaps of a pipeline."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.parallel.fill.gaps import LARGE, FillChunk, FillConfiguration, FillJob, fit_fill
from headway.sim.pipeline.simulate import PipelineBubble
from tests.refusals import refused

TIMES = st.integers(1, 30)


def job(chunks: list[tuple[int, int]], samples: int = 1) -> FillJob:
    return FillJob("fill", (FillConfiguration("only", tuple(FillChunk(*chunk) for chunk in chunks), samples),))


@given(st.lists(st.tuples(TIMES, st.integers(0, 3)), min_size=1, max_size=5), TIMES, TIMES, st.integers(0, 3))
def test_a_plan_does_what_packing_chunk_by_chunk_does(chunks, outer, inner, free):
    gaps = [PipelineBubble(0, 0, outer, LARGE[0]), PipelineBubble(0, 50, inner, LARGE[1])]
    [row] = fit_fill(job(chunks), gaps, {LARGE[0]: 3, LARGE[1]: free})
    steps, at, used, stuck = 60 * len(chunks), 0, 0, False
    for step in range(2 * steps):
        before = at
        for gap, memory in zip(gaps, (3, free), strict=True):
            left = gap.duration_ns
            while chunks[at % len(chunks)][0] <= left and chunks[at % len(chunks)][1] <= memory:
                left -= chunks[at % len(chunks)][0]
                used += chunks[at % len(chunks)][0] if step >= steps else 0
                at += 1
        stuck |= at == before
    # 60 * chunks is a multiple of each cycle of 1 to 5 steps.
    assert row.used_ns == pytest.approx(0 if stuck else used / steps)
    assert bool(row.reason) == stuck
    assert row.used_ns <= row.large_ns == outer + inner


def test_the_configuration_with_most_samples_per_step_is_chosen() -> None:
    small, large = (FillConfiguration(str(n), (FillChunk(n * 10, n),), n * n) for n in (1, 4))
    gaps = [PipelineBubble(0, 0, 30, LARGE[0]), PipelineBubble(1, 0, 80, LARGE[0])]
    rows = fit_fill(FillJob("two", (small, large)), gaps, dict.fromkeys(LARGE, 4))
    assert [(row.configuration, row.samples) for row in rows] == [("1", 3), ("4", 32)]


def test_a_chunk_longer_than_any_gap_is_said_and_not_used() -> None:
    [row] = fit_fill(job([(31, 0)]), [PipelineBubble(0, 0, 30, LARGE[0])], dict.fromkeys(LARGE, 0))
    assert (row.configuration, row.used_ns, row.samples) == (None, 0, 0)
    assert "takes 31 ns" in row.reason


test_bad_input_is_named = refused(
    ([(1, 9)], {LARGE[0]: 8, LARGE[1]: 1}, "needs 9 bytes"),
    ([(1, 1)], {LARGE[0]: 8}, "forward_backward"),
    ([(0, 1)], dict.fromkeys(LARGE, 8), "0 ns"),
    ([(1, -1)], dict.fromkeys(LARGE, 8), "-1 bytes"),
    ([], dict.fromkeys(LARGE, 8), "0 chunks"),
    by=lambda chunks, free: fit_fill(job(chunks), [PipelineBubble(0, 0, 30, LARGE[0])], free),
)
