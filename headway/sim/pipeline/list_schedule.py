"""List scheduling of the stages of a pipeline under caps on their activations, and the order of a stage graph by it.

A rank that is free takes what is ready, by priority (`sim.graph.replay.greedy`);
a cap is a set of edges: a stage's forward of microbatch j waits until the stage
is done with j - cap. Source of `graph_1f1b`: *GraphPipe* (ASPLOS 2025): stages
form a graph, and a stage has in flight what it works on itself plus the most
of those that take its output, so that no stage starves and none holds more.

    chain   0 - 1 - 2 - 3        in flight  4 3 2 1          idle / work    3 / m
    graph   0 - 1 - 3            in flight  3 2 2 1                         2 / m
              `- 2 -'

>>> from headway.sim.pipeline.actions import StageGraph
>>> from headway.sim.pipeline.simulate import evaluate
>>> diamond = StageGraph(((), (0,), (0,), (1, 2)))
>>> found = evaluate(graph_1f1b, PipelineShape.of_graph(diamond, 8, [10] * 4, [10] * 4, [10] * 4))
>>> found.bubble_overhead, found.peak_activations
(0.25, (3.0, 2.0, 2.0, 1.0))
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.sim.graph.dag import Dag
from headway.sim.graph.replay import ReplayTimes, greedy, replay
from headway.sim.pipeline.actions import Action, B, F, Orders, StageGraph
from headway.sim.pipeline.lower import lower
from headway.sim.pipeline.orders import PipelineShape, one_f_one_b, one_stage_per_rank
from headway.sim.pipeline.simulate import costs_of, simulate

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class ListSchedule:
    """What there is to schedule. The operation of kind k, stage s, microbatch j has index (k S + s) m + j."""

    kinds: tuple[int, ...]
    """The K computations of a stage and microbatch in order: F B, or F I W. The second feeds the stages before."""

    graph: StageGraph
    """Which of the S stages feed which."""

    rank: Ints
    """[S] Rank of each stage; [S, m] of each stage and microbatch, where several ranks share a stage."""

    num_microbatches: int
    """m."""

    duration_ns: Ints
    """[K, S] Of each kind and stage."""

    comm_ns: int
    """One message between ranks."""

    def dag(self, caps: Ints) -> Dag:
        """Return the dependencies, with at most `caps` [S] activations of each stage on a rank.

        F(s, j) -> F(taker of s, j)      F(s, j) -> I(s, j) -> W(s, j)      microbatches of a rank's stage in order
        I(taker of s, j) -> I(s, j)      W(s, j) -> F(s, j + cap)           with F B alone, B is I and W

        (j + cap is the cap-th microbatch behind j of those on its rank.)
        """
        rank = self._ranks
        index = np.arange(len(self.kinds) * rank.size).reshape(len(self.kinds), *rank.shape)
        source, target = np.nonzero(self.graph.feeds())
        delay = (rank[source] != rank[target]) * self.comm_ns
        parts = [
            (index[0, source], index[0, target], delay),
            (index[1, target], index[1, source], delay),
            (index[:-1], index[1:], None),
        ]
        for s, cap in enumerate(caps.tolist()):
            for of_rank in (np.flatnonzero(rank[s] == r) for r in np.unique(rank[s])):
                parts.append((index[:, s, of_rank[:-1]], index[:, s, of_rank[1:]], None))
                parts.append((index[-1, s, of_rank[: max(0, of_rank.size - cap)]], index[0, s, of_rank[cap:]], None))
        lags = [np.zeros(a.size, np.int64) if lag is None else lag.ravel() for a, _, lag in parts]
        return Dag.from_edges(
            index.size,
            np.concatenate([a.ravel() for a, _, _ in parts]),
            np.concatenate([b.ravel() for _, b, _ in parts]),
            lag_ns=np.concatenate(lags),
            lane=np.tile(rank.ravel(), len(self.kinds)),
            lane_order=False,
        )

    def run(self, dag: Dag, priority: ArrayLike) -> ReplayTimes:
        """Schedule by `priority` [K, S, m] (or what becomes it), the smallest first; `dag` is what `dag` returned."""
        shape = (*self.duration_ns.shape, self.num_microbatches)
        first = np.ascontiguousarray(np.broadcast_to(priority, shape), np.float64).ravel()
        return greedy(replace(dag, priority=first), np.repeat(self.duration_ns.ravel(), self.num_microbatches))

    def orders(self, start: Ints) -> Orders:
        """Return each rank's computations by start [K S m]; of two at once the one that feeds the other is first."""
        ranks = self._ranks
        kind, stage, microbatch = np.unravel_index(np.arange(start.size), (len(self.kinds), *ranks.shape))
        depth = np.array(self.graph.in_flight())[stage]
        end = start + self.duration_ns[kind, stage]
        rows = np.lexsort((np.where(kind == 1, depth, -depth), kind, end, start))
        orders: list[list[Action]] = [[] for _ in range(int(ranks.max()) + 1)]
        columns = (column[rows].tolist() for column in (kind, stage, microbatch, ranks[stage, microbatch]))
        for k, s, j, r in zip(*columns, strict=True):
            orders[r].append(Action(self.kinds[k], s, j))
        return tuple(map(tuple, orders))

    @property
    def _ranks(self) -> Ints:
        """[S, m] Rank of each stage and microbatch."""
        rank = self.rank if self.rank.ndim == 2 else self.rank[:, None]
        return np.broadcast_to(rank, (len(self.graph.preds), self.num_microbatches))


def graph_1f1b(shape: PipelineShape) -> Orders:
    """Return one forward, one backward on a graph of stages (GraphPipe), with the caps of `StageGraph.in_flight`.

    Greedy, what has most work behind it first; where that takes longer than the fixed order of `1f1b` under the same
    caps, which stages of unequal times can cause, it is that order. `shape.cap` lowers the caps that exceed it. Equal
    stages, D of them on the longest path, take m + D - 1 times the work of one.
    """
    one_stage_per_rank(shape, "graph_1f1b")
    costs, m, in_flight = costs_of(shape), shape.num_microbatches, shape.stages.in_flight()
    times_ns, cap = np.array([costs.forward_ns, costs.input_ns + costs.weight_ns]), min(m, shape.cap or m)
    work = ListSchedule((F, B), shape.stages, np.arange(shape.num_ranks), m, times_ns, shape.comm_ns)
    dag = work.dag(np.minimum(in_flight, int(cap)))
    ends = np.repeat(np.arange(dag.n), np.diff(dag.indptr))
    back = Dag.from_edges(dag.n, dag.indices, ends, lag_ns=dag.lag_ns)
    behind = replay(back, np.repeat(times_ns.ravel(), m)).end_ns.reshape(2, -1, m)
    times = work.run(dag, -behind)
    orders = work.orders(times.start_ns.astype(np.int64))
    if min(m, max(in_flight)) <= cap:
        fixed = one_f_one_b(shape)
        if simulate(lower(fixed, shape.graph), costs).makespan_ns < times.makespan_ns:
            return fixed
    return orders
