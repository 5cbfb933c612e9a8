"""Schedules of a job with replicas of a pipeline for the failures that may come, made before they come.

Workers of a stage hold the same weights, so a failure is known by its stage alone: whichever worker of the stage
failed, the survivors share its roles in the same schedule (SlipStream's normalisation of failures; source:
`elastic.reroute`). The schedules are made for failed roles in the last replicas, on all stages the same ones, because
one pipeline that lost several workers disturbs the others less than several that lost one each:

    failed workers        0:1  2:2              failed roles     2:1  2:2
    who has which role    0:2 and 1:2 their own; 2:1 has 0:1; all others their own

No weights are copied for that; where optimizer states are cut over the replicas of a stage, theirs are.

>>> plan = ElasticPlan.build(PipelineShape(num_ranks=4, num_microbatches=6), num_replicas=3)
>>> found = replan(plan, [(1, 2)])
>>> found.span_ns, found.makespan_ns, found.fault_free_span_ns, found.bound_ns, found.roles[6], found.roles[10]
(27, 29, 27, 27, -1, 6)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from headway.core.errors import InputError
from headway.parallel.elastic.reroute import checked_workers, replicate, reroute, stage_span_ns
from headway.sim.pipeline.actions import PipelineProgram
from headway.sim.pipeline.list_schedule import graph_1f1b
from headway.sim.pipeline.lower import lower
from headway.sim.pipeline.orders import PipelineShape, one_stage_per_rank
from headway.sim.pipeline.simulate import costs_of, simulate

MOST_SCHEDULES = 1000
"""Schedules of a plan; each takes some 10 ms to make."""

Counts = tuple[int, ...]
"""[stages] Failed workers of each stage."""


@dataclass(frozen=True, slots=True)
class Replanned:
    """What a job does without some of its workers."""

    program: PipelineProgram
    """What each rank does; a failed one does nothing. Rank d S + s is worker (d, s) of S stages."""

    roles: tuple[int, ...]
    """[ranks] The rank of the schedule that each rank is; -1 for a failed one."""

    span_ns: int
    """A step with a staggered optimizer: the longest time that the workers of a stage are at work on it."""

    makespan_ns: int
    """A step with an optimizer that waits for all stages."""

    fault_free_span_ns: int
    """A step without failures under 1F1B."""

    bound_ns: float
    """The longer of that and the work of the stage with the fewest workers for its microbatches, shared evenly."""


@dataclass(frozen=True, slots=True, eq=False)
class ElasticPlan:
    """A job of replicas of a pipeline with one stage per rank, and its schedules by failed workers per stage."""

    shape: PipelineShape
    """One replica: its stages, their times, its microbatches, and how many activations a worker may hold."""

    num_replicas: int
    """D: replicas."""

    fault_free_span_ns: int
    """A step without failures, under 1F1B or the order that was given."""

    schedules: dict[Counts, PipelineProgram]
    """Failed workers per stage -> the program without those roles of the last replicas. (0, ..., 0) is 1F1B."""

    @classmethod
    def build(
        cls, shape: PipelineShape, num_replicas: int, *, most_failures: int = 1, order: PipelineProgram | None = None
    ) -> ElasticPlan:
        """Make the schedules for up to so many failures; a cap that is not given is twice the number of stages.

        `order` is what a replica does without failures, 1F1B if not given.

        Raises `InputError` for several stages per rank, less than one replica, and more schedules than
        `MOST_SCHEDULES`.
        """
        one_stage_per_rank(shape, "an elastic plan")
        shape = replace(shape, cap=2 * shape.num_stages if shape.cap is None else int(shape.cap))
        # C(S + K, K) ways to have at most K failures on S stages.
        ways = math.comb(shape.num_stages + max(most_failures, 0), shape.num_stages)
        if most_failures < 0 or ways > MOST_SCHEDULES:
            raise InputError(
                f"{most_failures} failures on {shape.num_stages} stages would be {ways} schedules; give 0 or more "
                f"failures with at most {MOST_SCHEDULES} schedules. Others are made when they are needed."
            )
        order = order or lower(graph_1f1b(shape), shape.graph)
        times = simulate(order, costs_of(shape))
        none = (0,) * shape.num_stages
        plan = cls(shape, num_replicas, stage_span_ns(order, times), {none: replicate(order, num_replicas)})
        for counts in _counts(shape.num_stages, most_failures, num_replicas):
            plan.schedules[counts] = plan.schedule(counts)
        return plan

    def schedule(self, counts: Counts) -> PipelineProgram:
        """Return the program without so many workers of each stage, of those made before or made now."""
        if counts in self.schedules:
            return self.schedules[counts]
        roles = [(self.num_replicas - 1 - k, stage) for stage, count in enumerate(counts) for k in range(count)]
        healthy = self.schedules[(0,) * self.shape.num_stages]
        cap = None if self.shape.cap is None else int(self.shape.cap)
        return reroute(healthy, roles, costs=costs_of(self.shape), cap=cap)

    def bound_ns(self, counts: Counts) -> float:
        """Return the longer of the step without failures and M D / (D - f) of a stage's work, f of D workers failed."""
        costs, d = costs_of(self.shape), self.num_replicas
        work_ns = (costs.forward_ns + costs.input_ns + costs.weight_ns) * self.shape.num_microbatches
        # As whole numbers where they are, which is exact.
        shares = [divmod(int(ns) * d, d - failed) for ns, failed in zip(work_ns, counts, strict=True)]
        loads = [q + r / (d - failed) if r else q for (q, r), failed in zip(shares, counts, strict=True)]
        return max(self.fault_free_span_ns, *loads)


def replan(plan: ElasticPlan, failures: Iterable[Sequence[int]]) -> Replanned:
    """Return what the job does without the failed workers, pairs (replica, stage).

    Its schedule is the one made before for as many failures per stage, or is made now. Raises `InputError` for an
    unknown worker, and where no worker of a stage is left.
    """
    num_stages, d = plan.shape.num_stages, plan.num_replicas
    lost = checked_workers(failures, d, num_stages)
    counts = tuple(np.bincount([worker.stage for worker in lost], minlength=num_stages).tolist())
    logical = plan.schedule(counts)
    roles = [-1] * (d * num_stages)
    for stage, count in enumerate(counts):
        gone = {worker.replica for worker in lost if worker.stage == stage}
        # Workers of replicas that have no role in the schedule take those of failed workers; all others have their own.
        vacated = iter(sorted(gone & set(range(d - count))))
        for replica in sorted(set(range(d)) - gone):
            roles[replica * num_stages + stage] = (
                replica if replica < d - count else next(vacated)
            ) * num_stages + stage
    orders = logical.orders()
    program = lower(tuple(() if role < 0 else orders[role] for role in roles), logical.graph)
    times = simulate(program, costs_of(plan.shape))
    span_ns = stage_span_ns(program, times)
    return Replanned(program, tuple(roles), span_ns, times.makespan_ns, plan.fault_free_span_ns, plan.bound_ns(counts))


def _counts(num_stages: int, most_failures: int, num_replicas: int) -> Iterator[Counts]:
    """Yield how many workers of each stage may have failed, fewest failures first, never all of a stage."""
    for failures in range(1, most_failures + 1):
        for stages in itertools.combinations_with_replacement(range(num_stages), failures):
            counts = tuple(np.bincount(stages, minlength=num_stages).tolist())
            if max(counts) < num_replicas:
                yield counts
