"""Chains of stages behind a computation: how long a step takes that sends each result through stages of its own.

Use it to score many choices of chains at once: which codec and which collectives bring each gradient together. The
computation is a row of segments on lane 0; behind segment i, result i goes through its chain of (lane, duration):

    lane 0   |seg 0|enc 0|  seg 1  |dec 0| seg 2 |          a first stage on lane 0 delays the segments behind it
    lane 3         ......|=====0=====|.......|==2==|        others wait in order of readiness, ties to the earlier

It is list scheduling: `score` equals `greedy(order="ready,priority,index")` on the Dag with one operation per segment
and stage, priority = tensor, to the nanosecond. A stage that is ready before lane 0 is free goes before the next
segment; nothing is interrupted. Time O(k s log n) for k plans of s stages.

>>> chains = StageChains(np.array([10, 10]), np.array([[[3, 0]], [[3, -1]]]), np.array([[[5, 2]], [[4, 0]]]))
>>> chains.score(np.array([[0, 0]]))  # 10, 10 on lane 0; 5 on lane 3, then 2 on lane 0; 4 on lane 3
(array([24]), array([1]))
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.sim.graph.dag import kernels

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class StageChains:
    """n segments, and the chains that each result may go through; checked where it is built."""

    segment_ns: Ints
    """[n] Computation before each result, in order, on lane 0."""

    lane: Ints
    """[n, options, stages] Lane of each stage; -1 after a chain's end."""

    duration_ns: Ints
    """[n, options, stages] Time of each stage."""

    gap_lane: int = 3
    """The lane whose idle gaps `score` looks for."""

    def __post_init__(self) -> None:
        """Raise `InputError` on shapes that differ, negative times, and stages behind a chain's end."""
        for name in ("segment_ns", "lane", "duration_ns"):
            object.__setattr__(self, name, np.ascontiguousarray(getattr(self, name), np.int64))
        if self.lane.ndim != 3 or self.lane.shape != self.duration_ns.shape or len(self.lane) != self.segment_ns.size:
            raise InputError(
                f"{self.segment_ns.shape} segments, lanes {self.lane.shape} and durations {self.duration_ns.shape} do "
                "not fit; pass [n], [n, options, stages] and the same again."
            )
        if (self.segment_ns < 0).any() or (self.duration_ns < 0).any() or (self.lane < -1).any():
            raise InputError("a segment or stage has a negative time or lane; pass times >= 0 and lanes >= -1.")
        if ((self.lane[:, :, 1:] >= 0) & (self.lane[:, :, :-1] < 0)).any():
            raise InputError("a stage follows the end of its chain; put the lanes -1 last.")

    def score(self, plans: Ints) -> tuple[Ints, Ints]:
        """Return the ns [k] that plans [k, n] take, and for each the first result that used `gap_lane` after its last
        idle gap. Raises `InputError` on options that are not there."""
        plans = np.ascontiguousarray(plans, np.int64)
        num, options, _ = self.lane.shape
        if plans.ndim != 2 or plans.shape[1] != num or ((plans < 0) | (plans >= options)).any():
            raise InputError(
                f"plans of shape {plans.shape} for {num} results; give an option 0..{options - 1} of each."
            )
        makespan, gap = np.zeros(len(plans), np.int64), np.zeros(len(plans), np.int64)
        num_lanes = max(int(self.lane.max(initial=0)), self.gap_lane) + 1
        kernels("plan_kernels").stage_chains(
            plans, self.segment_ns, self.lane, self.duration_ns, (num_lanes, self.gap_lane), makespan, gap
        )
        return makespan, gap
