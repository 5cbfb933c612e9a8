"""How long the segments of the training threads take after edits: `unroll` gives them an order, `program` replays it.

A collective counts from the last arrival on, compute follows its own factors, those of a slow rank or of a stage of a
pipeline, and what is rare has its rate over the whole run. Times are ns.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from headway.sim.pipeline.actions import F
from headway.sim.recorded.lane import COMPUTE, LABEL, LABELS, Lane
from headway.sim.recorded.loader_costs import Costs
from headway.sim.recorded.recording import Recording
from headway.sim.whatif import ResolvedEdits

COMM = np.array([label.startswith("comm.") for label in LABELS])
"""[LABELS] Communication."""

BESIDE_LOADS = 1.3
"""Times as long as work on one core may take while another core works too, in the low end of an interval.

Caches and memory are shared, hardware threads share a core, and whether a virtual core has one to itself only the
hypervisor knows. Two processes on two virtual cores did 1.55 to 2.14 times (median 1.95) the work of one alone.
"""

USUALLY_BESIDE = 1.15
"""The same as it usually is, where the compute of a step keeps its core busy while workers load.

Of ten scripts whose loads and steps both compute, on two virtual cores, replays without it promised .74 to 1.35 times
(median 1.18) what was won; of 211 remedies of jobs whose steps leave their core alone, .99 times.
"""


def last_of_steps(lane: Lane) -> NDArray[np.int64]:
    """Return [k] the last segment of each step."""
    return np.searchsorted(lane.step, np.arange(lane.step_end_ns.size - 1), side="right") - 1


def edited_segments(
    recording: Recording, scenario: ResolvedEdits, costs: Costs, *, whole: bool = True
) -> tuple[NDArray[np.float64], ...]:
    """Return, per rank, [m] durations of the segments after the edits; collectives keep their own time only.

    `whole` scales what is rare to its rate over the whole run, where only a part of it is replayed.
    """
    own = _own_comm(recording)
    factor = np.array([scenario.factor(label) for label in LABELS])
    factor[COMM] /= scenario.bandwidth
    factor[LABEL["input.transfer"]] *= scenario.transfer
    factor[LABEL["host.rereading"]] = 0
    pace = straggler_pace(recording, scenario.straggler)
    result = []
    for index, lane in enumerate(recording.lanes):
        duration, work = own[index] * factor[lane.label], recording.devices[index]
        if work is None:
            duration[COMPUTE[lane.label]] /= scenario.accelerator
        else:
            duration = np.where(COMPUTE[lane.label], duration * work.own[lane.step], duration)
            duration[work.waits] = work.after_wait_ns * factor[lane.label[work.waits]]
        if whole:
            duration *= recording.cut_factor[index][lane.label]
        duration = np.where(COMPUTE[lane.label], duration * pace[index, lane.step], duration)
        stage_work = recording.stages[index]
        if stage_work is not None:
            for stage, forward, backward in scenario.stages:
                times = np.where(stage_work.op == F, forward, backward)
                of_part = np.append(np.where(stage_work.stage == stage, times, 1.0), 1.0)[stage_work.part]
                duration = np.where(COMPUTE[lane.label], duration * of_part, duration)
        if scenario.buffered_logging:
            logs = lane.label == LABEL["host.logging"]
            duration[logs] = np.minimum(duration[logs], costs.log_ns)
        if scenario.gc_every is not None:
            duration[lane.label == LABEL["host.gc"]] = 0
            # Each rank pays for its own collection at the same step, so nobody waits for another's.
            at = last_of_steps(lane)[scenario.gc_every - 1 :: scenario.gc_every]
            duration[at] += costs.collect_ns
        result.append(duration)
    return tuple(result)


@functools.lru_cache(maxsize=1)  # a plan replays one recording under dozens of edits, which change none of this
def _own_comm(recording: Recording) -> list[NDArray[np.float64]]:
    """Return, per rank, [m] durations in which a collective over ranks counts from the last arrival only."""
    own = [lane.duration_ns.astype(np.float64) for lane in recording.lanes]
    for meeting in recording.meetings:
        for index, segment, own_ns in zip(meeting.rank_index, meeting.segment, meeting.own_ns, strict=True):
            row = recording.lanes[index].row
            at = int(segment)
            while at >= 0 and row[at] == row[segment]:
                own[index][at] = 0.0
                at -= 1
            own[index][segment] = own_ns
    messages = recording.messages
    for index, lane in enumerate(recording.lanes if messages.point.size else ()):
        waits = messages.of_rank(index)
        segments = messages.segment[waits]
        rows = lane.row[segments]
        own[index][np.isin(lane.row, rows[rows >= 0])] = 0.0
        own[index][segments] = messages.own_ns[waits]
    for durations in own:
        durations.setflags(write=False)
    return own


def straggler_pace(recording: Recording, excess: float) -> NDArray[np.float64]:
    """Return [ranks, k] factor on compute that leaves `excess` of what a slow rank, or a slow step of it, has too much.

    The yardstick is the lower median over ranks: a rank whose mean step is
    more than 2 % above it is slow, a step more than 25 % above that of its
    peers is slow.
    """
    num_ranks = len(recording.lanes)
    pace = np.ones((num_ranks, recording.num_steps))
    if num_ranks == 1 or excess == 1.0:
        return pace
    work = np.array([lane.compute_ns() for lane in recording.lanes], np.float64)
    mean = np.median(work, axis=1)
    typical = np.quantile(mean, 0.5, method="lower")
    slow = np.where(mean > 1.02 * typical, typical / np.maximum(mean, 1), 1.0)
    paced = work * slow[:, None]
    cap = 1.25 * np.quantile(paced, 0.5, axis=0, method="lower")
    sudden = np.where(paced > cap, cap / np.maximum(paced, 1), 1.0)
    return np.asarray(1 + (excess - 1) * (1 - slow[:, None] * sudden))


def brings_workers(recording: Recording, scenario: ResolvedEdits) -> bool:
    """Say whether the edits bring workers to a run that had none."""
    recorded = max((int(batches.workers.max(initial=0)) for batches in recording.batches), default=0)
    return bool(scenario.workers) and recorded == 0


def beside_loads(recording: Recording, scenario: ResolvedEdits, busy: float) -> ResolvedEdits:
    """Return the edits with what new workers usually cost compute that occupies `busy` of a core, and it costs them."""
    if not brings_workers(recording, scenario) or any(work is not None for work in recording.devices):
        return scenario
    return on_busy_cores(recording, scenario, 1 + (USUALLY_BESIDE - 1) * busy)


def on_busy_cores(recording: Recording, scenario: ResolvedEdits, longer: float = BESIDE_LOADS) -> ResolvedEdits:
    """Return the edits where loads, and the compute that they run beside, take `longer` times as long."""
    loads_ns = sum(float(batches.part_ns[:, 2:].sum()) for batches in recording.batches)
    compute_ns = sum(float(lane.duration_ns[COMPUTE[lane.label]].sum()) for lane in recording.lanes)
    on_host = all(work is None for work in recording.devices)
    slower = 1 + (longer - 1) * min(1.0, loads_ns / max(compute_ns, 1.0)) * on_host
    return replace(scenario, prep=scenario.prep * longer, accelerator=scenario.accelerator / slower)
