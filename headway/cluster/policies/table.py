"""Every policy by name; adding one is adding a line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from headway.cluster.adaptive.decide import optimus, pollux, tiresias
from headway.cluster.model import Allocation, Cluster, QueueState
from headway.cluster.policies import baselines, fairness
from headway.cluster.policies.baselines import fill, fill_deadline, fill_makespan, hadar


class SchedulingPolicy(Protocol):
    """A policy. Write a function of this shape; there is nothing to subclass."""

    def __call__(self, state: QueueState, cluster: Cluster, now_s: float, /) -> Allocation:
        """Decide who should run where, from now on."""
        ...


POLICIES: Mapping[str, SchedulingPolicy] = {
    "fifo": baselines.fifo,
    "fifo_aware": baselines.fifo_aware,
    "fifo_released": baselines.fifo_released,
    "backfill": baselines.backfill,
    "easy": baselines.easy,
    "las": fairness.las,
    "las_aware": fairness.las_aware,
    "las_packed": fairness.las_packed,
    "ftf": fairness.ftf_blind,
    "ftf_aware": fairness.ftf,
    "makespan": fairness.makespan,
    "max_sum": fairness.max_sum,
    "min_cost": fairness.min_cost,
    "hierarchical": fairness.hierarchical,
    "allox": baselines.allox,
    "gandiva": baselines.gandiva,
    "fill": fill,
    "fill_makespan": fill_makespan,
    "fill_deadline": fill_deadline,
    "hadar": hadar,
    "pollux": pollux,
    "tiresias": tiresias,
    "optimus": optimus,
}
"""Policies of a queue."""

MIXING: frozenset[SchedulingPolicy] = frozenset({hadar, pollux, tiresias, optimus})
"""Those that run a gang on several types at once."""

SERVED: Mapping[str, SchedulingPolicy] = {
    name: POLICIES[name] for name in ("fifo", "fifo_aware", "las", "las_aware", "max_sum", "min_cost", "hierarchical")
}
"""Those that need to know of no job how long it is, and run each by itself: what a service can go by."""

LENDING: frozenset[SchedulingPolicy] = frozenset({baselines.allox})
"""Those whose jobs without a share take free devices under the published rules; by our own rules they wait."""

AT_ONCE: frozenset[SchedulingPolicy] = frozenset({baselines.backfill, baselines.easy})
"""Those that give devices away the moment they fall free, not at the end of a round."""
