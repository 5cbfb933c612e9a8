"""A pipeline of sleeping stages with a fill process beside each rank: what filling costs and uses, measured here.

The stages sleep where a device would compute, and so do the fill jobs that have no code of their own; messages, gaps,
instructions and answers are real. Blocks of steps with filling and without take turns in one run.

`measure` starts a process per stage; each prints a JSON object.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from headway.core.errors import BackgroundError, InputError
from headway.core.units import NS_PER_S
from headway.parallel.fill.gaps import PROFILES, FillJob, FillProcess, GapWatch, lent
from headway.parallel.fill.queue import FillFile, place_jobs
from headway.parallel.pipelining.torch_runner import PipelineRunner, pipeline
from headway.runtime.in_rank import bootstrap
from headway.trace.recording.runs import Run

WIDTH, BLOCK = 8, 4
"""Features of a stage, and steps of a block."""

START_S = 60.0


class SleepContext(torch.autograd.function.FunctionCtx):
    """What a forward keeps for its backward."""

    seconds: float
    """Time of the backward."""


class TimedGradient(torch.autograd.Function):
    """The identity, whose backward sleeps."""

    @staticmethod
    def forward(ctx: SleepContext, value: torch.Tensor, seconds: float) -> torch.Tensor:
        """Return the value."""
        ctx.seconds = seconds
        return value.view_as(value)

    @staticmethod
    def backward(ctx: SleepContext, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Sleep, and return the gradient."""
        time.sleep(ctx.seconds)
        return grads[0], None


class SleepingStage(nn.Module):
    """A linear layer whose forward and backward take a given time."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.linear, self.forward_s, self.backward_s = nn.Linear(WIDTH, WIDTH), forward_s, backward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute on [batch, width]."""
        time.sleep(self.forward_s)
        weight = TimedGradient.apply(self.linear.weight, self.backward_s)  # type: ignore[no-untyped-call]  # torch's apply has no types
        return torch.tanh(nn.functional.linear(x, weight, self.linear.bias))


@dataclass(frozen=True, slots=True)
class FilledRank:
    """What a rank measured."""

    rank: int
    """Rank."""

    large_ns: int
    """Its large gaps of the steps with filling."""

    used_ns: int
    """Time of chunks in them."""

    late_ns: int
    """What the rank waited for chunks that took longer than its gaps."""

    chunks: int
    """Chunks that ran."""

    ended: str
    """Why its fill process ended before the run did; '' = it did not."""

    steps_s: tuple[tuple[bool, float], ...]
    """(whether gaps were filled, seconds) of each step; of rank 0 those of the pipeline."""


@dataclass(frozen=True, slots=True)
class FillReport:
    """What a run measured."""

    ranks: tuple[FilledRank, ...]
    """By rank."""

    @property
    def used_fraction(self) -> float:
        """Share of the large gaps, in steps with filling, in which chunks ran."""
        large_ns = sum(row.large_ns for row in self.ranks)
        return sum(row.used_ns for row in self.ranks) / large_ns if large_ns else 0.0

    @property
    def main_slowdown(self) -> float:
        """Median step with filling over that without, less 1."""
        steps = self.ranks[0].steps_s
        filled, plain = ([seconds for fills, seconds in steps if fills == lends] for lends in (True, False))
        return statistics.median(filled) / statistics.median(plain) - 1


def measure(file: FillFile, jobs_of: Sequence[Sequence[str]], blocks: int = 4) -> FillReport:
    """Run the main job of a file, with the fill jobs `jobs_of` [ranks], names in their order, beside each rank.

    `blocks` of steps each are filled and are not. Raises `BackgroundError` where a rank fails.
    """
    with tempfile.TemporaryDirectory(prefix="headway-fill-") as folder:
        given = Path(folder) / "jobs.msgpack"
        given.write_bytes(msgspec.msgpack.encode((file, [list(names) for names in jobs_of])))
        ranks = [
            subprocess.Popen(
                [
                    sys.executable, "-m", __name__, str(given), str(rank), str(len(jobs_of)), str(blocks),
                    str(Path(folder) / "store"),
                ],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
            for rank in range(len(jobs_of))
        ]  # fmt: skip
        try:
            answers = [process.communicate() for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    for rank, (process, (_, errors)) in enumerate(zip(ranks, answers, strict=True)):
        if process.returncode:
            last = errors.strip().splitlines()[-1:] or ["no message"]
            raise BackgroundError(f"rank {rank} of the rehearsal failed: {last[0]}")
    return FillReport(tuple(msgspec.json.decode(output, type=FilledRank) for output, _ in answers))


def rehearse(file: FillFile, rank: int, names: Sequence[str], blocks: int) -> FilledRank:
    """Train as one rank of a gloo group; every rank calls it."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    main = file.main
    times_s = main.forward_ns / NS_PER_S, main.backward_ns / NS_PER_S
    model = nn.Sequential(*(SleepingStage(*times_s) for _ in range(main.stages)))
    runner = pipeline(
        model, torch.zeros(1, WIDTH), loss=nn.functional.mse_loss, num_microbatches=main.microbatches,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01), schedule=main.schedule, timeout_s=START_S,
    )  # fmt: skip
    watch = _watched(runner, file, names)
    process = watch.process
    x, y = torch.ones(main.microbatches, WIDTH), torch.ones(main.microbatches, WIDTH)
    steps: list[tuple[bool, float]] = []
    before = 0.0
    for step in range(1 + PROFILES + 2 * blocks * BLOCK):
        # The first steps make connections and profile gaps; then blocks without filling and with it take turns.
        watch.lends = step > PROFILES and (step - 1 - PROFILES) // BLOCK % 2 == 1
        runner.step(x, y)
        now = time.perf_counter()
        if step > PROFILES:
            steps.append((watch.lends, now - before))
        before = now
    watch.lends = False
    if process is not None and not process.ended:
        process.stop("")
    ended = process.ended if process is not None else ""
    return FilledRank(rank, watch.large_ns, watch.used_ns, watch.late_ns, watch.chunks, ended, tuple(steps))


def fill_gaps(
    runner: PipelineRunner, jobs: str | Path, *, run: Run | str | Path | None = None, score: str = "shortest"
) -> GapWatch:
    """Run the jobs of a file in the large gaps of this rank's stage from now on (PipeFill); every rank calls it.

    The runner's schedule is one with a flush. Which job is on which rank is decided by the gaps of `run`, an earlier
    recording of this job, or by the times of `main` in the file. No result of the runner changes; the two first gaps of
    a kind are measured and not lent. Raises `InputError` as `FillFile.read` does, on another number of ranks, and where
    the system has no scheduling class idle.
    """
    file = FillFile.read(Path(jobs))
    step_ns, gaps = file.gaps(run)
    ranks = max(gap.rank for gap in gaps) + 1 if gaps else 0
    if ranks != runner.program.num_ranks:
        where = f"the gaps are those of {ranks} ranks, the runner has {runner.program.num_ranks}"
        raise InputError(f"{where}. Give a run of this job, or its stages in the file's main.")
    placed = place_jobs(file.jobs, lent(gaps), file.main.free(), step_ns, score=score)
    return _watched(runner, file, [entry.job for entry in placed if entry.rank in runner.holders])


def _watched(runner: PipelineRunner, file: FillFile, names: Sequence[str]) -> GapWatch:
    """Start a fill process with these jobs, in their order, and lend it the gaps of a runner; none without jobs."""
    jobs: list[FillJob] = [next(job for job in file.jobs if job.name == name) for name in names]
    session = bootstrap.active()
    emit = None if session is None else session.probes.emit
    watch = GapWatch(FillProcess(jobs, file.main.free()) if jobs else None, emit)
    runner.watch_gaps(watch)
    return watch


def main(path: str, rank: str, world_size: str, blocks: str, store: str) -> None:
    """Run one rank and print what it measured."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world_size))
    file, jobs_of = msgspec.msgpack.decode(Path(path).read_bytes(), type=tuple[FillFile, list[list[str]]])
    report = rehearse(file, int(rank), jobs_of[int(rank)], int(blocks))
    dist.barrier()
    os.write(1, msgspec.json.encode(report))
    os._exit(0)  # gloo's threads may abort an orderly exit once a peer is gone


if __name__ == "__main__":
    main(*sys.argv[1:])
