"""How long jobs take with a copy per device, beside the fluid bound and whole jobs under las: simulated, or one, run.

With speeds v_j and W steps in all, no schedule ends before W / sum(v): all
devices busy to the end, and nothing paid. Whole jobs on k devices, fewer than
there are, have at best the k fastest: what forking can win is the ratio.

>>> found = fork_answer([("a", 26_000)], [4.0, 4.0, 2.0, 2.0, 1.0])
>>> found["bound_s"], found["las_s"], round(found["total_s"])
(2000.0, 6500.0, 2006)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

import msgspec
import numpy as np

from headway.cluster.fork.coordinator import ForkOutcome
from headway.cluster.fork.slots import Copies
from headway.cluster.model import Cluster, Jobs
from headway.cluster.queue.engine import simulate
from headway.core.errors import FormatError, InputError
from headway.core.files.safe_files import MOST, read_json

ROUND_S = 360.0
"""Longest round of Gavel, and shortest slot here unless one is given."""

STEPS_PER_SLOT = 100
"""Steps of the slowest device in a slot, at least: of a step that does not fit at its end at most 1 % is lost."""

MOST_STEPS = 1e12
"""Of a job: shares of more steps are not exact to a step in float64."""

MOST_PLACEMENTS = 500_000
"""Slots times devices that are simulated at most: half a minute."""


class ForkedJob(TypedDict):
    """One job of the answer."""

    name: str
    steps: int
    end_s: float
    """When it is done with copies."""
    las_end_s: float
    """When it is done as a whole job under las."""
    copies: int
    """Most copies that it has at once."""
    slots: int
    """Slots in which it runs."""
    cost_s: float
    """Seconds of saving, averaging and restoring."""
    steps_on: list[int]
    """[devices with a speed] Steps that it does on each."""


class RunJob(ForkedJob):
    """The job of an answer that was run: `steps` are batches, and `las_end_s` is the fastest device alone."""

    steps_per_s: list[float]
    """[devices with a speed] Measured, while each trained."""
    lost: list[int]
    """Devices whose copy was lost."""


class ForkAnswer(TypedDict):
    """What `headway cluster fork --json` prints."""

    total_s: float
    bound_s: float
    las_s: float
    rows: Sequence[ForkedJob]


class _Job(msgspec.Struct):
    """A job of a file."""

    name: str
    steps: float


def read_speeds(text: str) -> list[float]:
    """Read "4,2,1", steps/s of each device; 0 = it is there and does nothing. Raises `InputError`."""
    try:
        speeds = [float(cell) for cell in text.split(",")]
    except ValueError:
        raise InputError(f"--speeds is {text!r}; write steps/s of each device, separated by commas: 4,2,1.") from None
    for speed in speeds:
        if not 0 <= speed <= MOST:
            raise InputError(f"--speeds has {speed:g}; give steps/s from 0 to {MOST:g}, 0 for a device without use.")
    if not any(speeds):
        raise InputError(f"--speeds is {text!r}: no device does a step. Give one a speed above 0.")
    return speeds


def read_jobs(path: Path) -> list[tuple[str, int]]:
    """Read a JSON list of `{"name", "steps"}`; raises `FormatError` that names the job, `InputError` without a file."""
    fix = 'Write a list such as [{"name": "a", "steps": 1000}].'
    try:
        jobs: list[_Job] = read_json(path, list[_Job], fix=fix)
    except OSError as cause:
        raise InputError(f"--jobs {path} cannot be read: {cause.strerror}. {fix}") from cause
    if not jobs:
        raise FormatError(f"{path} has no job. {fix}")
    for job in jobs:
        if not (1 <= job.steps <= MOST_STEPS and job.steps == int(job.steps)):
            raise FormatError(
                f"{path}: job {job.name!r} has {job.steps:g} steps; give a whole number from 1 to {MOST_STEPS:g}."
            )
    return [(job.name, int(job.steps)) for job in jobs]


def fork_answer(
    jobs: Sequence[tuple[str, int]], speeds: Sequence[float], *, slot_s: float = 0.0, slot_cost_s: float = 1.0
) -> ForkAnswer:
    """Simulate jobs (name, steps), all there at the start, on devices of `speeds` in steps/s; those of 0 are left out.

    `slot_s` 0: 360 s, or 100 steps of the slowest device where that is longer. `slot_cost_s` is what a job pays in
    each slot in which it has several copies or starts again elsewhere; under las, each time that it moves. las is
    Gavel's `las_aware`, whole jobs in rounds of `slot_s`. Raises `InputError` for names that occur twice, slots that
    are too short for their cost and a step, and more slots than can be simulated.
    """
    fast = np.array([speed for speed in speeds if speed > 0])
    slowest = float(fast.min())
    slot_s = slot_s or max(ROUND_S, STEPS_PER_SLOT / slowest)
    if not (0 <= slot_cost_s < math.inf and slot_cost_s + 1 / slowest <= slot_s < math.inf):
        raise InputError(
            f"a slot of {slot_s:g} s has no room for its cost, {slot_cost_s:g} s, and a step at {slowest:g} steps/s. "
            "Pass --slot-s above both together and --slot-cost-s not below 0, or leave them out."
        )
    names, steps = [name for name, _ in jobs], np.array([count for _, count in jobs], np.int64)
    bound_s = float(steps.sum() / fast.sum())
    if (bound_s / slot_s + steps.size) * fast.size > MOST_PLACEMENTS:
        raise InputError(
            f"{steps.size} jobs of {steps.sum():,} steps are {bound_s / slot_s:,.0f} slots on {fast.size} devices; "
            f"at most {MOST_PLACEMENTS:,} slots times devices are simulated. Pass a longer --slot-s, or fewer jobs."
        )
    amounts, gangs, arrival_s = steps.astype(np.float64), np.ones(steps.size, np.int64), np.zeros(steps.size)
    copies = Copies(steps, fast, slot_s, slot_cost_s)
    devices = Cluster.of({f"device{index}": 1 for index in range(fast.size)})
    forked = simulate(
        Jobs(names, gangs, amounts, arrival_s), devices, copies.place, rates=np.tile(fast, (steps.size, 1)),
        round_s=slot_s, adapting=copies,
    )  # fmt: skip
    # Whole jobs: devices of equal speed are one type, the fastest first.
    types, counts = np.unique(fast, return_counts=True)
    pools = Cluster.of(
        {f"{speed!r}": int(count) for speed, count in zip(types[::-1].tolist(), counts[::-1], strict=True)}
    )
    las = simulate(
        Jobs(names, gangs, amounts, arrival_s, restart_s=np.full(steps.size, slot_cost_s)), pools, "las_aware",
        rates=np.tile(types[::-1], (steps.size, 1)), round_s=slot_s,
    )  # fmt: skip
    rows = [
        ForkedJob(
            name=name, steps=int(steps[index]), end_s=float(forked.finish_s[index]),
            las_end_s=float(las.finish_s[index]), copies=int(copies.num_copies[index]),
            slots=int(copies.num_slots[index]), cost_s=float(copies.cost_s[index]),
            steps_on=copies.steps_on[index].tolist(),
        )
        for index, name in enumerate(names)
    ]  # fmt: skip
    return ForkAnswer(total_s=forked.makespan_s, bound_s=bound_s, las_s=las.makespan_s, rows=rows)


def run_answer(name: str, outcome: ForkOutcome) -> ForkAnswer:
    """Return what came of a script that ran in copies, beside its bounds by the speeds that were measured."""
    speeds = list(outcome.speeds.values())
    row = RunJob(
        name=name, steps=outcome.steps, end_s=outcome.seconds, las_end_s=outcome.steps / max(speeds),
        copies=len(speeds), slots=outcome.slots, cost_s=outcome.paid_s, steps_on=list(outcome.steps_on.values()),
        steps_per_s=speeds, lost=list(outcome.lost),
    )  # fmt: skip
    return ForkAnswer(
        total_s=outcome.seconds, bound_s=outcome.steps / math.fsum(speeds), las_s=row["las_end_s"], rows=[row]
    )
