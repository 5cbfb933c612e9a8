"""Where a rank of a pipeline has no work: each gap, and which of three kinds it is.

Source: *PipeFill* (MLSys 2025) for the kinds. With one stage per rank, m >= p
microbatches, equal stages and free messages, rank r of p idles in one step

    order   fill_drain     forward_backward      scattered
    gpipe   r (F + B)      (p - 1 - r)(F + B)    0
    1f1b    r (F + B)      (p - 1 - r) B         (p - 1 - r) F

fill_drain is before a rank's first and after its last computation,
forward_backward the gap before its first backward: the two that are long
enough to be used. scattered are all others. They add up to the idle time.

>>> from headway.sim.pipeline.lower import lower
>>> from headway.sim.pipeline.orders import PipelineShape, one_f_one_b
>>> from headway.sim.pipeline.simulate import costs_of, simulate
>>> shape = PipelineShape(num_ranks=3, num_microbatches=4)
>>> program = lower(one_f_one_b(shape))
>>> found = bubbles(program, simulate(program, costs_of(shape)))
>>> [(gap.start_ns, gap.duration_ns, gap.kind) for gap in found if gap.rank == 1]
[(0, 1, 'fill_drain'), (3, 2, 'forward_backward'), (13, 1, 'scattered'), (16, 2, 'fill_drain')]
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from headway.sim.pipeline.actions import RECV, SEND, B, I, PipelineProgram
from headway.sim.pipeline.simulate import ProgramTimes

KINDS = ("fill_drain", "forward_backward", "scattered")
"""Kinds of gaps."""


@dataclass(frozen=True, slots=True)
class PipelineBubble:
    """A gap in the work of a rank."""

    rank: int
    """Rank."""

    start_ns: int
    """Its start, from the start of the step."""

    duration_ns: int
    """Its length, above 0."""

    kind: str
    """One of `KINDS`."""


def bubbles(program: PipelineProgram, times: ProgramTimes) -> tuple[PipelineBubble, ...]:
    """Return every gap of every rank between the start of the step and the end of the last computation.

    `times` are those of `simulate`. By rank, then by start; their sum is makespan - work of each rank.
    """
    found = []
    for rank in range(program.num_ranks):
        rows = np.flatnonzero((program.rank == rank) & (program.op != SEND) & (program.op != RECV))
        # Gap k is before computation k; the last one is behind all. A rank's order is its order in time.
        starts = np.concatenate([times.start_ns[rows], [times.makespan_ns]])
        ends = np.concatenate([[0], times.end_ns[rows]])
        backward = np.flatnonzero(np.isin(program.op[rows], (B, I)))
        for gap in np.flatnonzero(starts > ends).tolist():
            outer = gap in (0, rows.size)
            kind = KINDS[0 if outer else 1 if backward.size and gap == backward[0] else 2]
            found.append(PipelineBubble(rank, int(ends[gap]), int(starts[gap] - ends[gap]), kind))
    return tuple(found)


def bubble_sums(gaps: Iterable[PipelineBubble], num_ranks: int) -> dict[str, list[int]]:
    """Return kind -> [ranks] its nanoseconds."""
    sums = {kind: [0] * num_ranks for kind in KINDS}
    for gap in gaps:
        sums[gap.kind][gap.rank] += gap.duration_ns
    return sums
