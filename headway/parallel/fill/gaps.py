"""What a rank does around its two large gaps: measure them, and lend them to a fill process.

    main job   |  fill-drain  |FFFF|  forward-backward  |BBBBBBBB|
    rank        begin      end      begin            end
    fill              runs                  runs

The first `PROFILES` gaps of a kind are measured only. After that a gap begins with an instruction to the fill process,
whose budget is the median of the last measured gaps less a margin. It answers before its budget is over; the rank waits
for the answer before it computes on, as it would for a kernel in flight on its device. A process that does not answer
within `PATIENCE` of the gap is ended, and training goes on without it. Source: PipeFill (MLSys 2025), instructions to
the fill process.

Which chunks of a fill job run in which gap of a pipeline.

A rank of a synchronous pipeline has two large gaps in each step; the fill job's chunks go there in their order, and
over again, a chunk never across two gaps:

    main job   |  fill-drain  |FFFF|  forward-backward  |BBBBBBBB|
    fill job   |[0][1][2].    |    |[3][0][1][2].       |        |     . = the next chunk does not fit

After some steps a step starts with the chunk that an earlier one started with: what lies between repeats for ever, and
its mean is the rate of the fill job. Small scattered gaps are left empty. Source: PipeFill (MLSys 2025), plan of a fill
job; bubbles per stage are (p-1-s)(tF+tB) and s(tF+tB) in GPipe, (p-1-s)tB and s(tF+tB) in 1F1B.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import statistics
import sys
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from headway.core.errors import InputError
from headway.core.machine.child import START_S, is_able, start_idle
from headway.core.units import NS_PER_S
from headway.parallel.fill.worker import ANSWER, INSTRUCTION
from headway.sim.pipeline.simulate import PipelineBubble
from headway.trace.events.vocabulary import SPANS

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


SCRIPT = Path(__file__).with_name("worker.py")

PROFILES, WINDOW = 2, 8
"""Gaps of a kind that are measured before one is lent, and of how many the median is taken."""

PATIENCE = 5.0
"""Budgets after which a fill process that has not answered is ended; at least a second."""


CHUNKS, LATE = SPANS["fill.chunks"].code, SPANS["fill.late"].code


class FillProcess:
    """A fill process beside this rank."""

    def __init__(self, jobs: Sequence[FillJob], free_bytes: Mapping[str, int]) -> None:
        """Start it. Raises `InputError` where the system cannot, or it does not come up."""
        if not is_able():
            raise InputError("this system has no scheduling class idle: a fill job could take cores from training.")
        rows = [
            {
                "name": job.name, "samples": job.samples, "run": job.run,
                "configurations": [
                    {
                        "name": choice.name, "samples": choice.samples,
                        "chunks": [
                            (chunk.duration_ns, [chunk.memory_bytes <= free_bytes[name] for name in LARGE])
                            for chunk in choice.chunks
                        ],
                    }
                    for choice in job.configurations
                ],
            }
            for job in jobs
        ]  # fmt: skip
        requests, self._instructions = os.pipe()
        self._answers, replies = os.pipe()
        arguments = [str(requests), str(replies), str(os.getpid()), json.dumps(rows)]
        pid = start_idle([sys.executable, "-I", str(SCRIPT), *arguments], pass_fds=(requests, replies))
        os.close(requests)
        os.close(replies)
        if pid is None:
            raise InputError(f"the fill process did not start within {START_S:g} s.")
        self.pid, self._handle = pid, os.pidfd_open(pid)
        self.ended = ""
        """Why it runs no more; '' while it does."""
        self._number = 0

    def instruct(self, gap_kind: str, budget_ns: int) -> bool:
        """Lend it a gap; say whether it runs."""
        if self.ended:
            return False
        self._number += 1
        try:
            os.write(self._instructions, INSTRUCTION.pack(self._number, LARGE.index(gap_kind), budget_ns))
        except BrokenPipeError:
            self.ended = "the fill process is gone"
        return not self.ended

    def returned(self, budget_ns: int) -> tuple[int, int]:
        """Wait for its answer: chunks, and their time in ns. One that does not answer in time is ended."""
        patience_s = max(1.0, PATIENCE * budget_ns / NS_PER_S)
        if not select.select([self._answers], [], [], patience_s)[0]:
            self.stop(f"the fill process did not return within {patience_s:.1f} s of a gap; it was ended")
            return 0, 0
        message = os.read(self._answers, ANSWER.size)
        if len(message) < ANSWER.size:
            self.ended = "the fill process is gone"
            return 0, 0
        _, chunks, used_ns, job = ANSWER.unpack(message)
        if job < 0:
            self.stop("all fill jobs are done")
        return chunks, used_ns

    def stop(self, reason: str = "stopped") -> None:
        """End it; once."""
        if not self.ended:
            self.ended = reason
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            for descriptor in (self._handle, self._instructions):
                os.close(descriptor)


class GapWatch:
    """The large gaps of this rank; `pipelining` calls `begin` and `end` around them."""

    def __init__(self, process: FillProcess | None = None, emit: Callable[..., None] | None = None) -> None:
        """Lend gaps to `process`; `emit` writes what ran in them into a recording, as `Probes.emit` does."""
        self.process, self._emit = process, emit
        self.lends = True
        """Whether gaps are lent; measuring goes on without."""
        self.large_ns = self.used_ns = self.late_ns = self.chunks = 0
        """While gaps are lent: their time, that of chunks, what chunks ran over the gaps, and how many they were."""
        self.lengths_ns: dict[str, deque[int]] = {name: deque(maxlen=WINDOW) for name in LARGE}
        """Kind -> the last measured gaps."""
        self._kind, self._start_ns, self._budget_ns = "", 0, 0

    def budget_ns(self, gap_kind: str) -> int:
        """Return what may be lent of the next gap of a kind; 0 while it is not known."""
        lengths = self.lengths_ns[gap_kind]
        if len(lengths) < PROFILES:
            return 0
        return lent_ns(statistics.median(lengths))

    def begin(self, gap_kind: str) -> None:
        """The rank has nothing to compute from now on."""
        self._kind, self._start_ns, self._budget_ns = gap_kind, time.perf_counter_ns(), 0
        budget_ns = self.budget_ns(gap_kind)
        if self.process is not None and self.lends and budget_ns > 0 and self.process.instruct(gap_kind, budget_ns):
            self._budget_ns = budget_ns

    def end(self) -> None:
        """What the rank waited for is there: it computes on as soon as the fill process has returned."""
        if not self._kind:
            return
        gap_ns = time.perf_counter_ns() - self._start_ns
        self.lengths_ns[self._kind].append(gap_ns)
        self.large_ns += gap_ns if self.lends and self.process is not None else 0
        if self._budget_ns and self.process is not None:
            chunks, used_ns = self.process.returned(self._budget_ns)
            self.used_ns, self.chunks = self.used_ns + used_ns, self.chunks + chunks
            late_ns = max(0, time.perf_counter_ns() - self._start_ns - gap_ns)
            self.late_ns += late_ns
            if self._emit is not None and chunks:
                # Chunks run from the start of the gap on, one after the other.
                self._emit(CHUNKS, self._start_ns, min(used_ns, gap_ns), LARGE.index(self._kind), chunks)
                self._emit(LATE, self._start_ns + gap_ns, late_ns)
        self._kind = ""
