"""A training step in steady state: the next forward pass starts while gradients still travel.

One worker's steps are list scheduled, forward before output before backward before update before communication; by
symmetry one lane per stage of the network stands for all ranks. `benchmarks/_step_dag.py` expands a step over all ranks
to check it. Times are int64 ns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.sim.graph.dag import Dag
from headway.sim.graph.replay import greedy
from headway.sim.training.training_step import BACKWARD, FORWARD, UPDATE, Ints, TrainingStep

STEADY_STEPS = 4
"""Steps unrolled for a steady state; the first one fills the pipeline."""


def steady_ns(step: TrainingStep, *, num_steps: int = STEADY_STEPS) -> int:
    """Return the step time in steady state, by list scheduling of `num_steps` steps of one worker.

    The next forward pass of a block waits for the updates of its own weights
    if `profile.overlaps_forward`, else for all of them. By symmetry one lane
    per stage of the network stands for all ranks. Raises `InputError` for
    fewer than 3 steps.
    """
    if num_steps < 3:
        raise InputError(f"num_steps is {num_steps}; a steady state needs at least 3.")
    one = _WorkerStep.of(step)
    n, size = one.duration_ns.size, step.profile.kind.size
    shift = np.arange(num_steps) * n
    profile = step.profile
    updates = 1 + np.flatnonzero(profile.kind == UPDATE)
    backward = 1 + int(np.flatnonzero(profile.kind == BACKWARD)[-1]) if (profile.kind == BACKWARD).any() else 0
    waits = [(backward, 0)]
    for update in updates.tolist():
        block = int(profile.block[update - 1])
        mine = np.flatnonzero((profile.kind == FORWARD) & (profile.block == block))
        alone = profile.overlaps_forward and mine.size > 0 and one.duration_ns[0] == 0
        waits.append((update, 1 + int(mine[0]) if alone else 0))
    # One step of the worker is n operations, and step k has the numbers k n .. k n + n - 1. `across` [e, 2] holds the
    # edges from a step to the next one: the last backward -> the lead (operation 0), and each update -> the first
    # forward of its block where forwards overlap, else the lead.
    across = np.array(waits, np.int64)
    src = np.concatenate([(one.src[None, :] + shift[:, None]).reshape(-1), *(across[:, 0] + s for s in shift[:-1])])
    dst = np.concatenate([(one.dst[None, :] + shift[:, None]).reshape(-1), *(across[:, 1] + s for s in shift[1:])])
    lag = np.concatenate([np.tile(one.lag_ns, num_steps), np.zeros(across.shape[0] * (num_steps - 1), np.int64)])
    dag = Dag.from_edges(
        n * num_steps,
        src,
        dst,
        lane=np.tile(one.lane, num_steps),
        lag_ns=lag,
        priority=np.tile(one.priority, num_steps),
        lane_order=False,
    )
    ends = greedy(dag, np.tile(one.duration_ns, num_steps)).end_ns.reshape(num_steps, n)[:, 1 : 1 + size]
    # The first step fills the pipeline: the mean distance between the ends of the later ones is the steady state.
    finished = ends[:, updates - 1].max(axis=1)
    return round(int(finished[-1] - finished[0]) / (num_steps - 1))


@dataclass(frozen=True, slots=True, eq=False)
class _WorkerStep:
    """One step of one worker, every job of every part an operation: 0 = lead, then compute, then jobs."""

    duration_ns: Ints
    lane: Ints
    priority: NDArray[np.float64]
    src: Ints
    dst: Ints
    lag_ns: Ints

    @classmethod
    def of(cls, step: TrainingStep) -> _WorkerStep:
        profile, ends = step.profile, step.bucket_ends()
        before, takes = step.op_ns()
        parts, size = step.parts[ends], step.bucket_bytes()
        stages = step.network.stages((size + parts - 1) // parts)
        jobs = parts * (stages[0].jobs if stages else 0)
        bucket = np.repeat(np.arange(ends.size), jobs)
        at = 1 + takes.size + np.arange(bucket.size * len(stages)).reshape(bucket.size, len(stages))
        ordered = np.arange(int(np.argmax(profile.kind == UPDATE)) + 1)  # lead and everything before the updates
        pairs = [(ordered[:-1], ordered[1:], 0)]
        if stages:
            pairs.append((1 + profile.producer[ends][bucket], at[:, 0], 0))
            pairs.append((at[:, :-1].reshape(-1), at[:, 1:].reshape(-1), step.network.recv_ns))
        updates = np.flatnonzero(profile.kind == UPDATE)
        for update in updates.tolist():
            tensor = int(profile.tensor[update])
            mine = slice(None) if tensor < 0 else bucket == np.searchsorted(ends, tensor)
            if stages:
                last = at[mine, -1]
                pairs.append((last, np.full(last.size, 1 + update), step.network.recv_ns))
            pairs.append((ordered[-1:] if tensor < 0 else 1 + profile.producer[[tensor]], np.array([1 + update]), 0))
        turn = bucket if step.order == "ready" else -bucket
        kinds = np.concatenate([[FORWARD], profile.kind])
        return cls(
            duration_ns=np.concatenate([
                [before], takes, np.stack([stage.job_ns[bucket] for stage in stages], axis=1).reshape(-1),
            ] if stages else [[before], takes]).astype(np.int64),
            lane=np.concatenate([np.zeros(1 + takes.size, np.int64), np.tile(1 + np.arange(len(stages)), bucket.size)]),
            priority=np.concatenate([kinds, np.repeat(turn, len(stages))]).astype(np.float64),
            src=np.concatenate([np.reshape(a, -1) for a, _, _ in pairs]).astype(np.int64),
            dst=np.concatenate([np.reshape(b, -1) for _, b, _ in pairs]).astype(np.int64),
            lag_ns=np.concatenate([np.full(np.size(a), lag) for a, _, lag in pairs]).astype(np.int64),
        )  # fmt: skip
