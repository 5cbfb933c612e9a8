"""Fill jobs and their main job from a file, and which job runs on which rank in which order.

    {"main": {"stages": 4, "microbatches": 8, "forward_ns": 40000000, "backward_ns": 80000000, "schedule": "gpipe",
              "free_bytes": {"fill_drain": 8e9, "forward_backward": 4e9}},
     "jobs": [{"name": "bert", "samples": 6400, "deadline_s": 600, "run": "bert.py:chunk",
               "configurations": [{"name": "batch 32", "samples": 32,
                                   "chunks": [{"duration_ns": 9000000, "memory_bytes": 2e9}, ..]}]}]}

`main` may lack any of its keys. A job without `samples` never ends. When a rank has nothing to do, the job and rank
with the best score (`plan.fill_scores`) are taken; a job runs on one rank until it is done. Source: PipeFill (MLSys
2025), fill jobs and their scheduling.

The two large gaps of each rank, as a recorded pipeline run had them.

The ledger books what a stage waits for its neighbours, step by step and by kind; a gap here is the median of its rank
over the steps. When in a step it begins comes from the recorded order, replayed with the recorded times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.core.files.safe_files import decode_json, read_text
from headway.core.tables import pick
from headway.core.units import NS_PER_S
from headway.ledger.booking.waits import KINDS
from headway.ledger.buckets import SUB_CODE
from headway.ledger.runs.attempts import book_run
from headway.parallel.fill.gaps import LARGE, FillChunk, FillConfiguration, FillJob, RankFill, fit_fill
from headway.plan.fill_scores import SCORES, best_pair
from headway.sim.pipeline.actions import PipelineProgram
from headway.sim.pipeline.lower import lower
from headway.sim.pipeline.orders import PipelineShape
from headway.sim.pipeline.schedules import SCHEDULES
from headway.sim.pipeline.simulate import PipelineBubble, ProgramTimes, costs_of, simulate
from headway.sim.pipeline.simulate import bubbles as simulated_bubbles
from headway.sim.pipeline.weight_versions import FLUSH_FREE
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


Nanoseconds = Annotated[int, Meta(ge=1, le=1 << 50)]
Bytes = Annotated[float, Meta(ge=0, le=1e18)]
Count = Annotated[int, Meta(ge=1, le=1 << 40)]

PLENTY_BYTES = 1e18
"""Free memory where none is given."""


class MainJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The pipeline whose gaps are filled."""

    stages: Annotated[int, Meta(ge=2, le=1024)] = 4
    """p: stages, one per rank."""

    microbatches: Annotated[int, Meta(ge=1, le=65536)] = 8
    """m: microbatches of a step."""

    forward_ns: Nanoseconds = 40_000_000
    """Forward of a stage and microbatch."""

    backward_ns: Nanoseconds = 80_000_000
    """Its backward."""

    schedule: str = "gpipe"
    """A schedule with a flush, one stage per rank."""

    free_bytes: dict[str, Bytes] | Bytes = PLENTY_BYTES
    """What it leaves free: in all gaps, or for each kind of `packing.LARGE`."""

    def free(self) -> dict[str, int]:
        """Return kind of gap -> free bytes. Raises `InputError` on a kind that lacks them, or is none."""
        given = self.free_bytes if isinstance(self.free_bytes, dict) else dict.fromkeys(LARGE, self.free_bytes)
        if set(given) != set(LARGE):
            raise InputError(f"free_bytes has {sorted(given)}; give one number, or one for each of {', '.join(LARGE)}.")
        return {name: int(value) for name, value in given.items()}

    def gaps(self) -> tuple[int, tuple[PipelineBubble, ...]]:
        """Return the makespan of a step, and its gaps. Raises `InputError` on a schedule without a flush."""
        order = pick(SCHEDULES, self.schedule, "schedule")
        if self.schedule in FLUSH_FREE:
            raise InputError(f"{self.schedule} has no flush, and so no large gaps. Choose '1f1b' or 'gpipe'.")
        inputs = self.backward_ns // 2
        shape = PipelineShape(
            self.stages, self.microbatches, 1, self.forward_ns, inputs, self.backward_ns - inputs, cap=None
        )
        program = lower(order(shape), shape.graph)
        times = simulate(program, costs_of(shape))
        return times.makespan_ns, simulated_bubbles(program, times)


class _Chunk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    duration_ns: Nanoseconds
    memory_bytes: Bytes = 0.0


class _Configuration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    chunks: Annotated[tuple[_Chunk, ...], Meta(min_length=1)]
    name: str = "default"
    samples: Count = 1


class _FillRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    configurations: Annotated[tuple[_Configuration, ...], Meta(min_length=1)]
    samples: Count | None = None
    deadline_s: Annotated[float, Meta(gt=0)] | None = None
    run: str = ""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    jobs: Annotated[tuple[_FillRow, ...], Meta(min_length=1)]
    main: MainJob = MainJob()


@dataclass(frozen=True, slots=True)
class FillFile:
    """What a file of fill jobs says."""

    main: MainJob
    """The pipeline."""

    jobs: tuple[FillJob, ...]
    """The fill jobs, each name once."""

    @classmethod
    def read(cls, path: Path) -> FillFile:
        """Read a file. Raises `FormatError` on another format, `InputError` on no file and on bad names or code."""
        fix = 'Write {"main": {..}, "jobs": [{"name", "configurations": [{"samples", "chunks": [{"duration_ns"}]}]}]}.'
        content = decode_json(read_text(path, "fill jobs as JSON"), str(path), _File, fix=fix)
        names = [job.name for job in content.jobs]
        if twice := [name for name in names if names.count(name) > 1]:
            raise InputError(f"{path} has two fill jobs called {twice[0]!r}. Rename one.")
        return cls(content.main, tuple(_job(job, path.parent) for job in content.jobs))

    def gaps(self, run: Run | str | Path | None = None) -> tuple[int, tuple[PipelineBubble, ...]]:
        """Return the ns of a step and its gaps: those of a recorded run, or those of `main`, simulated.

        Raises `InputError` as `RecordedGaps.of` and `MainJob.gaps` do.
        """
        if run is None:
            return self.main.gaps()
        recorded = RecordedGaps.of(run if isinstance(run, Run) else Run.open(run))
        return recorded.step_ns, recorded.gaps

    def under(self, schedule: str) -> FillFile:
        """Return it with another schedule of the main job."""
        return replace(self, main=msgspec.structs.replace(self.main, schedule=schedule))


def _job(row: _FillRow, folder: Path) -> FillJob:
    choices = tuple(
        FillConfiguration(
            choice.name, tuple(FillChunk(chunk.duration_ns, int(chunk.memory_bytes)) for chunk in choice.chunks),
            choice.samples,
        )
        for choice in row.configurations
    )  # fmt: skip
    run = row.run
    if run:
        file, _, function = run.rpartition(":")
        path = (folder / file).resolve()
        if not function.isidentifier() or not path.is_file():
            raise InputError(f"fill job {row.name!r} runs {run!r}; give FILE.py:FUNCTION, a file beside the jobs.")
        run = f"{path}:{function}"
    return FillJob(row.name, choices, row.samples, math.inf if row.deadline_s is None else row.deadline_s, run)


@dataclass(frozen=True, slots=True)
class PlacedFill:
    """A fill job on a rank."""

    job: str
    """Name of the job."""

    rank: int
    """Rank."""

    start_s: float
    """Seconds from now until it begins."""

    end_s: float
    """Until it is done; infinite for one that never is."""

    fill: RankFill
    """What it makes of the rank's gaps."""


def place_jobs(
    jobs: Sequence[FillJob], gaps: Sequence[PipelineBubble], free_bytes: dict[str, int], step_ns: int,
    *, score: str = "shortest",
) -> list[PlacedFill]:  # fmt: skip
    """Return which job runs on which rank when, by rank and start; jobs that never end come last, on every rank.

    `gaps` are those of one step of `step_ns`. Raises `InputError` as `fit_fill` does, and on an unknown score.
    """
    scored = pick(SCORES, score, "score")
    fills = [fit_fill(job, gaps, free_bytes) for job in jobs]
    ranks = [fill.rank for fill in fills[0]] if fills else []
    step_s = step_ns / NS_PER_S
    rates = np.array([[fill.samples / step_s for fill in row] for row in fills]).reshape(len(jobs), len(ranks))
    remaining = np.array([math.inf if job.samples is None else float(job.samples) for job in jobs])
    deadlines = np.array([job.deadline_s for job in jobs])
    with np.errstate(divide="ignore", invalid="ignore"):
        takes_s: NDArray[np.float64] = np.where(rates > 0, remaining[:, None] / rates, np.inf)
    waiting: NDArray[np.bool_] = np.asarray(np.isfinite(takes_s).any(axis=1))
    free_s, placed = np.zeros(len(ranks)), list[PlacedFill]()
    while waiting.any():
        open_ranks = np.isfinite(takes_s[waiting]).any(axis=0)
        now_s = float(free_s[open_ranks].min())
        may = np.isfinite(takes_s) & waiting[:, None] & (free_s <= now_s) & open_ranks
        index, column = best_pair(scored, np.where(may, now_s + takes_s, np.inf), deadlines, may)
        end_s = now_s + float(takes_s[index, column])
        placed.append(PlacedFill(jobs[index].name, ranks[column], now_s, end_s, fills[index][column]))
        waiting[index], free_s[column] = False, end_s
    for index in np.flatnonzero(np.isinf(remaining)).tolist():
        for column, rank in enumerate(ranks):
            if rates[index, column] > 0:
                placed.append(PlacedFill(jobs[index].name, rank, float(free_s[column]), math.inf, fills[index][column]))
                free_s[column] = math.inf
    return sorted(placed, key=lambda entry: (entry.rank, entry.start_s))
