"""Which chunks of a fill job run in which gap of a pipeline.

A rank of a synchronous pipeline has two large gaps in each step; the fill job's chunks go there in their order, and
over again, a chunk never across two gaps:

    main job   |  fill-drain  |FFFF|  forward-backward  |BBBBBBBB|
    fill job   |[0][1][2].    |    |[3][0][1][2].       |        |     . = the next chunk does not fit

After some steps a step starts with the chunk that an earlier one started with: what lies between repeats for ever, and
its mean is the rate of the fill job. Small scattered gaps are left empty. Source: PipeFill (MLSys 2025), plan of a fill
job; bubbles per stage are (p-1-s)(tF+tB) and s(tF+tB) in GPipe, (p-1-s)tB and s(tF+tB) in 1F1B.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from headway.core.errors import InputError
from headway.sim.pipeline.simulate import PipelineBubble

LARGE = ("fill_drain", "forward_backward")
"""Kinds of gaps that are filled."""

MARGIN, SLACK_NS = 0.05, 2_000_000
"""Share of a gap, and ns, that are left free of a gap that is lent: gaps vary, and a process has to wake up."""


@dataclass(frozen=True, slots=True)
class FillChunk:
    """A part of a fill job that runs without a break."""

    duration_ns: int
    """Its time, above 0."""

    memory_bytes: int
    """Its peak memory."""

    def __post_init__(self) -> None:
        """Raise `InputError` on a time below 1 ns or memory below 0."""
        if self.duration_ns < 1 or self.memory_bytes < 0:
            raise InputError(
                f"a chunk takes {self.duration_ns} ns and {self.memory_bytes} bytes; give at least 1 ns and 0 bytes."
            )


@dataclass(frozen=True, slots=True)
class FillConfiguration:
    """One way to run a fill job, e.g. a batch size with or without recomputation."""

    name: str
    """Its name."""

    chunks: tuple[FillChunk, ...]
    """Chunks of one pass over a batch, in order."""

    samples: int
    """Samples of one pass."""

    def __post_init__(self) -> None:
        """Raise `InputError` on no chunks or no samples."""
        if not self.chunks or self.samples < 1:
            raise InputError(
                f"configuration {self.name!r} has {len(self.chunks)} chunks and {self.samples} samples; "
                "give at least one of both."
            )


@dataclass(frozen=True, slots=True)
class FillJob:
    """A job that can run in gaps; every rank runs a copy."""

    name: str
    """Its name."""

    configurations: tuple[FillConfiguration, ...]
    """What can be chosen from."""

    samples: int | None = None
    """Samples after which it is done; None = it never is."""

    deadline_s: float = math.inf
    """Seconds from now until when it has to be."""

    run: str = ""
    """FILE:FUNCTION that runs a chunk, called with a configuration's name and the chunk's index; '' = a sleep."""


@dataclass(frozen=True, slots=True)
class RankFill:
    """What the gaps of a rank hold; a mean over the steps that repeat."""

    rank: int
    """Rank."""

    large_ns: int
    """Its large gaps in one step."""

    configuration: str | None
    """Name of the one with most samples per step; None = no chunk fits."""

    used_ns: float
    """Time of chunks per step."""

    samples: float
    """Samples of the fill job per step."""

    reason: str
    """Why nothing fits; empty where something does."""


def lent(bubbles: Sequence[PipelineBubble]) -> list[PipelineBubble]:
    """Return what is lent of the large gaps of one step where steps follow each other, by rank.

    The drain of a step and the fill of the next one are one gap; of each gap the margin is left free.
    """
    sums: dict[tuple[int, str], int] = {}
    starts: dict[tuple[int, str], int] = {}
    for gap in bubbles:
        if gap.kind in LARGE:
            key = gap.rank, gap.kind
            sums[key] = sums.get(key, 0) + gap.duration_ns
            starts[key] = gap.start_ns  # the later one: behind the last computation of the step
    joined = [PipelineBubble(key[0], starts[key], lent_ns(length_ns), key[1]) for key, length_ns in sums.items()]
    return sorted((gap for gap in joined if gap.duration_ns > 0), key=lambda gap: (gap.rank, gap.start_ns))


def lent_ns(gap_ns: float) -> int:
    """Return how much of a gap is lent to a fill process."""
    return max(0, int(gap_ns * (1 - MARGIN)) - SLACK_NS)


def fit_fill(job: FillJob, bubbles: Sequence[PipelineBubble], free_bytes: Mapping[str, int]) -> tuple[RankFill, ...]:
    """Return the fill of each rank that has gaps, by rank: the configuration with most samples per step.

    `bubbles` are those of one step; `free_bytes` says for each kind of `LARGE` what the main job leaves free in it.
    Raises `InputError` on a job without configurations, a kind without memory, and memory below one chunk of each.
    """
    if not job.configurations:
        raise InputError(f"fill job {job.name!r} has no configurations; give at least one.")
    if wrong := [name for name in LARGE if free_bytes.get(name, -1) < 0]:
        raise InputError(f"free_bytes of {wrong[0]!r} is {free_bytes.get(wrong[0])}; give bytes >= 0 for each kind.")
    free_most = max(free_bytes[name] for name in LARGE)
    need = min(max(chunk.memory_bytes for chunk in choice.chunks) for choice in job.configurations)
    if need > free_most:
        raise InputError(
            f"fill job {job.name!r} needs {need:,} bytes for a chunk, {free_most:,} free. Make batches smaller."
        )
    rows = []
    for rank in sorted({gap.rank for gap in bubbles}):
        gaps = [gap for gap in bubbles if gap.rank == rank and gap.kind in LARGE]
        large_ns = sum(gap.duration_ns for gap in gaps)
        fills = [(choice, *_rate(choice, gaps, free_bytes)) for choice in job.configurations]
        best, used, passes, reason = max(fills, key=lambda fill: fill[2] * fill[0].samples)
        rows.append(
            RankFill(
                rank, large_ns, None if reason else best.name, used, 0.0 if reason else passes * best.samples, reason
            )
        )
    return tuple(rows)


def _rate(
    configuration: FillConfiguration, gaps: Sequence[PipelineBubble], free_bytes: Mapping[str, int]
) -> tuple[float, float, str]:
    """Return ns and passes per step in the steps that repeat, and why there are none."""
    chunks = configuration.chunks
    count, ends = len(chunks), list(accumulate((chunk.duration_ns for chunk in chunks), initial=0))
    blocked = {name: [k for k, chunk in enumerate(chunks) if chunk.memory_bytes > free_bytes[name]] for name in LARGE}
    done, step_of, starts = 0, dict[int, int](), list[int]()
    while done % count not in step_of:
        step_of[done % count] = len(starts)
        starts.append(done)
        before = done
        for gap in gaps:
            first = done % count
            # Chunks laid end to end, pass after pass: the last end at or before the start of `first` + the gap.
            passes, offset_ns = divmod(ends[first] + gap.duration_ns, ends[-1])
            by_time = passes * count + bisect_right(ends, offset_ns) - 1 - first
            by_memory = min(((k - first) % count for k in blocked[gap.kind]), default=by_time)
            done += min(by_time, by_memory)
        if done == before:
            chunk = chunks[done % count]
            longest = max((gap.duration_ns for gap in gaps), default=0)
            return (
                0.0,
                0.0,
                (
                    f"chunk {done % count} of {configuration.name!r} takes {chunk.duration_ns:,} ns and "
                    f"{chunk.memory_bytes:,} bytes: no large gap (longest {longest:,} ns) has both"
                ),
            )
    back = step_of[done % count]
    # Between two steps that start with the same chunk lie whole passes.
    per_step = (done - starts[back]) // count / (len(starts) - back)
    return per_step * ends[-1], per_step, ""
