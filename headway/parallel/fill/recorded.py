"""The two large gaps of each rank, as a recorded pipeline run had them.

The ledger books what a stage waits for its neighbours, step by step and by kind; a gap here is the median of its rank
over the steps. When in a step it begins comes from the recorded order, replayed with the recorded times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.core.units import NS_PER_S
from headway.ledger.booking.waits import KINDS
from headway.ledger.buckets import SUB_CODE
from headway.ledger.runs.attempts import book_run
from headway.parallel.fill.packing import LARGE
from headway.sim.pipeline.actions import PipelineProgram
from headway.sim.pipeline.lower import lower
from headway.sim.pipeline.simulate import PipelineBubble, ProgramTimes, simulate
from headway.sim.pipeline.simulate import bubbles as simulated_bubbles
from headway.sim.recorded.program import Program
from headway.sim.recorded.stage_orders import RecordedPipeline
from headway.trace.recording.runs import Run

FILLED = "bubble.filled"
"""Sub-line of gaps in which chunks of another job ran."""


def booked_waits(run: Run, program: Program, pipeline: RecordedPipeline) -> Mapping[str, NDArray[np.int64]]:
    """Return sub-line of a bubble -> [stages, steps] ns, of all steps but the first.

    Raises `InputError` on a run of one step: a pipeline fills before the first.
    """
    book = book_run([run.parts], run.facts).attempts[-1]
    if book.num_steps < 2:
        raise InputError("the run has one step; record at least two, because a pipeline fills before the first.")
    ranks = [program.recording.lanes[index].rank for index in pipeline.rank_index]
    # Column 0 is before the first step, the last one behind all.
    return {
        sub: np.array([book.sheets[rank].ns[SUB_CODE[sub]][2:-1] for rank in ranks])
        for sub in (*(f"bubble.{name}" for name in KINDS), FILLED)
    }


@dataclass(frozen=True, slots=True)
class RecordedGaps:
    """What a run's pipeline leaves free in a step."""

    step_ns: int
    """Mean step."""

    gaps: tuple[PipelineBubble, ...]
    """The large gaps, by rank, then by start."""

    @classmethod
    def of(cls, run: Run, program: Program | None = None) -> RecordedGaps:
        """Measure them. Raises `InputError` where no pipeline with one stage per rank ran, and where it was filled."""
        program = program or Program.from_run(run)
        pipeline = RecordedPipeline.of(program.recording)
        waits = booked_waits(run, program, pipeline)
        if waits[FILLED].any():
            raise InputError("chunks of another job ran in the gaps of this run. Record it without, to measure them.")
        order = lower(pipeline.orders, pipeline.graph)
        starts = {
            (gap.rank, gap.kind): gap.start_ns for gap in simulated_bubbles(order, simulate(order, pipeline.costs))
        }
        gaps = [
            PipelineBubble(program.recording.lanes[index].rank, starts[stage, name], int(length_ns), name)
            for stage, index in enumerate(pipeline.rank_index)
            for name in LARGE
            if (length_ns := np.median(waits[f"bubble.{name}"][stage])) >= 1 and (stage, name) in starts
        ]
        gaps.sort(key=lambda gap: (gap.rank, gap.start_ns))
        return cls(round(program.measured_s * NS_PER_S), tuple(gaps))


def bubbles(
    source: PipelineProgram | Run | Path | str, times: ProgramTimes | None = None
) -> tuple[PipelineBubble, ...]:
    """Return the gaps of a pipeline's ranks in one step, by rank, then by start, in ns.

    Of a program with its `times` (of `simulate`) every gap; of a recorded run, or the path of its folder, the two large
    ones of each rank, the medians over its steps: what `fit_fill` packs chunks into. Raises `InputError` as
    `RecordedGaps.of` does, and for a program without times.
    """
    if isinstance(source, PipelineProgram):
        if times is None:
            raise InputError("a program has gaps under given times only. Give those of simulate(program, costs).")
        return simulated_bubbles(source, times)
    return RecordedGaps.of(source if isinstance(source, Run) else Run.open(source)).gaps
