"""A training step as one worker sees it: the small Dag on which choices are scored in batches.

Use it to score many variants of a step at once. Equal workers advance in
step, so one worker and one lane per stage of the network stand for all
(symmetry); operations between two gradients are one segment (coarsening); and
whatever comes before the first gradient that variants differ in is one
operation per lane (partial replay). All three are exact. Fusing, cutting and
everything about durations only changes durations, never the order: the Dag is
compiled once and k variants are one replay of [ops, k]. Times are int64 ns.
`benchmarks/_step_dag.py` expands a step over all ranks to check it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks._step_model import UPDATE, Flags, Ints, TrainingStep
from headway.sim.graph.dag import Dag, ReplayTimes, replay


@dataclass(frozen=True, slots=True, eq=False)
class Variants:
    """k variants of a step, as the view needs them. T gradients."""

    ready_ns: Ints
    """[T, k] (or [T, 1], equal for all) when each gradient is complete."""

    compute_ns: Ints
    """[k] or [1]: end of the last backward operation."""

    update_ns: Ints
    """[k] or [1]: the update."""

    gradient_bytes: Ints
    """[T, k] or [T, 1]."""

    joined: Flags
    """[T, k]."""

    parts: Ints
    """[T, k]."""

    @classmethod
    def of(cls, steps: Sequence[TrainingStep]) -> Variants:
        """Collect whole steps."""
        timed = [_times(step) for step in steps]
        return cls(
            ready_ns=np.stack([ready for ready, _, _ in timed], axis=1),
            compute_ns=np.array([compute for _, compute, _ in timed], np.int64),
            update_ns=np.array([update for _, _, update in timed], np.int64),
            gradient_bytes=np.stack([step.gradient_bytes() for step in steps], axis=1),
            joined=np.stack([step.joined for step in steps], axis=1),
            parts=np.stack([step.parts for step in steps], axis=1),
        )

    @classmethod
    def of_buckets(cls, step: TrainingStep, joined: Flags, parts: Ints | None = None) -> Variants:
        """Return variants of `step` in its buckets only: `joined` [T, k], `parts` [T, k] (as in `step` if None)."""
        ready, compute, update = _times(step)
        return cls(
            ready_ns=ready[:, None],
            compute_ns=np.array([compute]),
            update_ns=np.array([update]),
            gradient_bytes=step.gradient_bytes()[:, None],
            joined=joined,
            parts=np.broadcast_to(step.parts[:, None], joined.shape) if parts is None else parts,
        )


def _times(step: TrainingStep) -> tuple[Ints, int, int]:
    """Return ([T] ready, end of backward, duration of the update)."""
    profile = step.profile
    before, takes = step.op_ns()
    end = before + np.cumsum(takes)
    update = int(takes[profile.kind == UPDATE].sum())
    return end[profile.producer], int(end[-1]) - update, update


@dataclass(frozen=True, slots=True, eq=False)
class StepView:
    """The compiled Dag. Build it with `of`."""

    dag: Dag
    """One operation per lane for what came before, a segment per gradient, three operations per gradient and stage."""

    step: TrainingStep
    """The step that it was made for: its network, and what came before `first`."""

    first: int
    """First gradient that variants may differ in."""

    busy_ns: Ints
    """[stages] Until when the earlier buckets occupy each stage."""

    @classmethod
    def of(cls, step: TrainingStep, *, first: int = 0) -> StepView:
        """Compile the view; variants scored with it agree with `step` on every gradient before `first`.

        No bucket of `step` reaches across `first`.
        """
        tensors = step.profile.tensor_bytes.size
        stages = len(step.network.stages(0)) if tensors else 0
        busy = np.zeros(stages, np.int64)
        if first and stages:
            whole = cls.of(step)
            busy = np.asarray(whole.replay([step]).end_ns[whole.ops(first - 1)[:, 2], 0], np.int64)
        return cls(_compile(tensors - first, stages, step.network.recv_ns), step, first, busy)

    def ops(self, tensor: int) -> Ints:
        """Return [stages, 3] the operations of a gradient: first job, jobs between, last job on each stage."""
        ops: Ints = _ops(self.step.profile.tensor_bytes.size - self.first, self.busy_ns.size)[tensor - self.first]
        return ops

    @property
    def update(self) -> int:
        """The last operation."""
        return self.dag.n - 1

    def score(self, steps: Sequence[TrainingStep]) -> Ints:
        """Return [k] the step time of each variant."""
        return self.score_variants(Variants.of(steps))

    def score_variants(self, variants: Variants) -> Ints:
        """Return [k] the step time of each variant."""
        return np.asarray(replay(self.dag, self.durations(variants)).end_ns[self.update], np.int64)

    def replay(self, steps: Sequence[TrainingStep]) -> ReplayTimes:
        """Return when each operation runs in each variant, [ops, k]."""
        return replay(self.dag, self.durations(Variants.of(steps)))

    def durations(self, variants: Variants) -> Ints:
        """Return [ops, k] durations."""
        first, stages = self.first, self.busy_ns.size
        ready, joined = variants.ready_ns[first:], variants.joined[first:]
        tensors, k = joined.shape[0], max(joined.shape[1], ready.shape[1])
        duration = np.zeros((self.dag.n, k), np.int64)
        duration[:stages] = self.busy_ns[:, None]
        segment = np.diff(ready, axis=0, prepend=0)
        duration[stages : stages + tensors] = segment
        duration[stages + tensors] = variants.compute_ns - (ready[-1] if tensors else 0)
        duration[self.update] = variants.update_ns
        if not (tensors and stages):
            return duration
        size, parts = bucket_sizes(variants.gradient_bytes[first:], joined), variants.parts[first:]
        ends = ~joined
        shape = (tensors, k)
        jobs_ns = self.step.network.stages((size[ends] + parts[ends] - 1) // parts[ends])
        ops = _ops(tensors, stages)
        # A bucket passes a stage as `jobs` equal jobs, which are three operations: the first, all between, the last.
        # Gradients that end no bucket have zeros there.
        for index, stage in enumerate(jobs_ns):
            job, jobs = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
            job[ends], jobs[ends] = stage.job_ns, parts[ends] * stage.jobs
            duration[ops[:, index, 0]] = job
            duration[ops[:, index, 1]] = np.maximum(jobs - 2, 0) * job
            duration[ops[:, index, 2]] = np.where(jobs > 1, job, 0)
        return duration


def bucket_sizes(gradient_bytes: Ints, joined: Flags) -> Ints:
    """Return [T, k] the bytes of the bucket that ends with each gradient; 0 where none ends."""
    total = np.broadcast_to(np.cumsum(gradient_bytes, axis=0), joined.shape)
    closed = np.where(joined, 0, total)
    before = np.zeros_like(closed)
    np.maximum.accumulate(closed[:-1], axis=0, out=before[1:])
    return np.where(joined, 0, total - before)


def _ops(tensors: int, stages: int) -> NDArray[np.int64]:
    """Return [T, stages, 3] operations: after the lanes' past, the segments and the rest of backward."""
    return stages + tensors + 1 + np.arange(tensors * stages * 3, dtype=np.int64).reshape(tensors, stages, 3)


def _compile(tensors: int, stages: int, recv_ns: int) -> Dag:
    """Compile: lane 0 is the worker's compute, lanes 1.. are the stages.

    A part of a bucket passes the stages as jobs. Only the first and the last
    job matter to the next stage: a job's start is a maximum of linear
    functions of its number, so the largest is at one of the ends.
    """
    # Numbers of the operations, with S stages and T gradients:
    #
    #     earlier buckets, per stage | segments of compute | rest of backward | ops [T, S, 3] | update
    #     0                            S                     S + T              S + T + 1       n - 1
    #
    # Edges: segment t -> the first job of bucket t on stage 0; first -> first and last -> last job on the next stage;
    # the last job of all -> update. The order on the lanes says the rest.
    ops = _ops(tensors, stages)
    segment = stages + np.arange(tensors)
    update = stages + tensors + 1 + ops.size
    lane = np.zeros(update + 1, np.int64)
    lane[:stages] = 1 + np.arange(stages)
    lane[ops] = 1 + np.arange(stages)[None, :, None]
    src, dst, lag = [], [], []
    if tensors and stages:
        src, dst, lag = [segment], [ops[:, 0, 0]], [np.zeros(tensors, np.int64)]
        for end in (0, 2):
            src.append(ops[:, :-1, end].reshape(-1))
            dst.append(ops[:, 1:, end].reshape(-1))
        src.append(ops[-1:, -1, 2])
        dst.append(np.array([update]))
        lag.append(np.full(sum(part.size for part in src) - tensors, recv_ns, np.int64))
    elif stages:
        src, dst, lag = [np.arange(stages)], [np.full(stages, update)], [np.full(stages, recv_ns)]
    empty = [np.empty(0, np.int64)]
    return Dag.from_edges(
        update + 1,
        np.concatenate(src or empty),
        np.concatenate(dst or empty),
        lane=lane,
        lag_ns=np.concatenate(lag or empty),
    )
