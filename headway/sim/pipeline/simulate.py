"""How long a pipeline step takes and how much a rank holds: a program replayed as a Dag.

A rank is a lane that runs its computations in its order; a message occupies
the link between two ranks (a lane per direction and kind) and delays nobody
but its receiver. Two figures say what a pipeline loses, and both are given:

    makespan idle = last end - work of a rank               (an optimizer that waits for all)
    span idle     = longest (last end - first start) of a rank - work     (one that steps per rank)

>>> from headway.sim.pipeline.orders import PipelineShape, one_f_one_b
>>> score = evaluate(one_f_one_b, PipelineShape(4, 8, forward_ns=10, input_ns=10, weight_ns=10))
>>> score.makespan_ns, score.bubble_overhead, score.peak_activations
(330, 0.375, (4.0, 3.0, 2.0, 1.0))

Where a rank of a pipeline has no work: each gap, and which of three kinds it is.

Source: *PipeFill* (MLSys 2025) for the kinds. With one stage per rank, m >= p
microbatches, equal stages and free messages, rank r of p idles in one step

    order   fill_drain     forward_backward      scattered
    gpipe   r (F + B)      (p - 1 - r)(F + B)    0
    1f1b    r (F + B)      (p - 1 - r) B         (p - 1 - r) F

fill_drain is before a rank's first and after its last computation,
forward_backward the gap before its first backward: the two that are long
enough to be used. scattered are all others. They add up to the idle time.

>>> from headway.sim.pipeline.lower import lower
>>> from headway.sim.pipeline.orders import PipelineShape, one_f_one_b
>>> from headway.sim.pipeline.simulate import costs_of, simulate
>>> shape = PipelineShape(num_ranks=3, num_microbatches=4)
>>> program = lower(one_f_one_b(shape))
>>> found = bubbles(program, simulate(program, costs_of(shape)))
>>> [(gap.start_ns, gap.duration_ns, gap.kind) for gap in found if gap.rank == 1]
[(0, 1, 'fill_drain'), (3, 2, 'forward_backward'), (13, 1, 'scattered'), (16, 2, 'fill_drain')]

List scheduling of the stages of a pipeline under caps on their activations, and the order of a stage graph by it.

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

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.core.errors import InputError
from headway.sim.graph.dag import Dag, ReplayTimes, greedy, replay
from headway.sim.pipeline.actions import RECV, SEND, Action, B, F, I, Orders, PipelineProgram, R, StageGraph, W
from headway.sim.pipeline.lower import check, lower, matched_messages, message_owners, peak_activations
from headway.sim.pipeline.orders import OrderFn, PipelineShape, one_f_one_b, one_stage_per_rank
from headway.sim.pipeline.weight_versions import FLUSH_FREE


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Durations per stage and microbatch, int64 ns."""

    forward_ns: NDArray[np.int64]
    """[stages] Forward, and forward again."""

    input_ns: NDArray[np.int64]
    """[stages] Gradient of the input."""

    weight_ns: NDArray[np.int64]
    """[stages] Gradient of the weights; the whole backward is the sum of both."""

    comm_ns: int = 0
    """One message."""

    between_ns: NDArray[np.int64] | None = None
    """[stages, stages] A message from the row's stage to the column's; None = each takes `comm_ns`."""


@dataclass(frozen=True, slots=True, eq=False)
class ProgramTimes:
    """When each action of a program runs."""

    start_ns: NDArray[np.int64]
    """[n] Start; of a RECV, when its message has arrived."""

    end_ns: NDArray[np.int64]
    """[n] End."""

    first_ns: NDArray[np.int64]
    """[ranks] Start of the rank's first computation."""

    last_ns: NDArray[np.int64]
    """[ranks] End of its last."""

    busy_ns: NDArray[np.int64]
    """[ranks] Sum of its computations."""

    @property
    def makespan_ns(self) -> int:
        """End of the last computation of all ranks."""
        return int(self.last_ns.max())


def simulate(program: PipelineProgram, costs: StageCosts) -> ProgramTimes:
    """Replay a lowered program. Raises `InputError` on costs of another number of stages or a message without end."""
    per_op = np.zeros((len("FBIWR") + 3, program.num_stages), np.int64)
    for name, op in (("forward_ns", F), ("input_ns", I), ("weight_ns", W)):
        values = np.asarray(getattr(costs, name))
        if values.shape != (program.num_stages,):
            raise InputError(
                f"{name} has shape {list(values.shape)}; give one for each of {program.num_stages} stages."
            )
        per_op[op] = values
    per_op[B], per_op[R], per_op[SEND] = per_op[I] + per_op[W], per_op[F], costs.comm_ns
    table = program.positions()
    sends, receives = matched_messages(program, table)
    made, used = message_owners(program, table, sends)
    lane = program.rank.copy()
    # One lane per channel: (sender, receiver, kind). A message goes when the one before it has left the link.
    forward = program.graph.feeds()[program.stage[sends], program.peer_stage[sends]]
    channel = (program.rank[sends].astype(np.int64) * program.num_ranks + program.peer[sends]) * 2 + forward
    lane[sends] = program.num_ranks + np.unique(channel, return_inverse=True)[1]
    lane[receives] = -1
    dag = Dag.from_edges(
        program.rank.size,
        np.concatenate([made, sends, receives]),
        np.concatenate([sends, receives, used]),
        lane=lane,
    )
    duration = per_op[program.op, program.stage]
    if costs.between_ns is not None:
        duration[sends] = costs.between_ns[program.stage[sends], program.peer_stage[sends]]
    times = replay(dag, duration)
    start, end = times.start_ns.astype(np.int64), times.end_ns.astype(np.int64)
    rows = np.flatnonzero((program.op != SEND) & (program.op != RECV))
    first, last = np.full(program.num_ranks, np.iinfo(np.int64).max), np.zeros(program.num_ranks, np.int64)
    np.minimum.at(first, program.rank[rows], start[rows])
    np.maximum.at(last, program.rank[rows], end[rows])
    busy = np.bincount(program.rank[rows], duration[rows], program.num_ranks).astype(np.int64)
    return ProgramTimes(start, end, np.minimum(first, last), last, busy)


@dataclass(frozen=True, slots=True)
class PipelineScore:
    """What an order costs for a shape."""

    makespan_ns: float
    """From the start of the step to the end of the last computation."""

    span_ns: float
    """The longest time from a rank's first start to its last end."""

    span_idle_ns: float
    """Of it, the part without work of that rank."""

    bubble_fraction: float
    """Share of the makespan in which a rank has no work, the mean of ranks."""

    bubble_overhead: float
    """Time without work, of the makespan, in relation to the work of a rank."""

    peak_activations: tuple[float, ...]
    """[ranks] Activations held at once, in shares of a whole rank."""


def evaluate(order: OrderFn, shape: PipelineShape) -> PipelineScore:
    """Make an order, lower it, replay it, check its memory against the cap of the shape.

    Exact: the replay counts in 1/interleave ns, so that a stage's share of a rank's time is a whole number. Of a
    schedule without a flush the step is one in the steady state: what a stream of one more step takes longer. Raises
    `InputError` as the order does, and where a rank needs more activations than the cap allows.
    """
    shapes = steady_shapes(order, shape)
    shorter, longer = (score(lower(order(streamed), streamed.graph), streamed) for streamed in shapes)
    if shapes[0] == shapes[1]:
        return longer
    costs = costs_of(shape)
    work = shape.num_microbatches * int((costs.forward_ns + costs.input_ns + costs.weight_ns).sum()) / shape.num_ranks
    makespan, span = longer.makespan_ns - shorter.makespan_ns, longer.span_ns - shorter.span_ns
    idle = makespan - work
    return replace(
        longer, makespan_ns=makespan, span_ns=span, span_idle_ns=span - work, bubble_fraction=idle / makespan,
        bubble_overhead=idle / work,
    )  # fmt: skip


def steady_shapes(order: OrderFn, shape: PipelineShape) -> tuple[PipelineShape, PipelineShape]:
    """Return shapes whose replays differ by a step in the steady state; twice the same one where steps are flushed."""
    if order not in FLUSH_FREE.values():
        return shape, shape
    settled = 2 + math.ceil(2 * shape.num_ranks / shape.num_microbatches)
    return replace(shape, num_steps=settled), replace(shape, num_steps=settled + 1)


def score(program: PipelineProgram, shape: PipelineShape) -> PipelineScore:
    """Return what a lowered program of this shape costs; raises `InputError` as `evaluate` does."""
    v = shape.interleave
    if shape.cap is not None:
        check(program, caps=shape.cap * v)
    times = simulate(program, costs_of(shape))
    spans = times.last_ns - times.first_ns
    longest = int(np.argmax(spans))
    span, makespan = int(spans[longest]), times.makespan_ns
    work, all_ranks = int(times.busy_ns.sum()), makespan * program.num_ranks
    return PipelineScore(
        makespan_ns=_divided(makespan, v),
        span_ns=_divided(span, v),
        span_idle_ns=_divided(span - int(times.busy_ns[longest]), v),
        bubble_fraction=(all_ranks - work) / all_ranks,
        bubble_overhead=(all_ranks - work) / work,
        peak_activations=tuple((peak_activations(program) / v).tolist()),
    )


def costs_of(shape: PipelineShape) -> StageCosts:
    """Return the costs of the stages, in units of 1/interleave ns."""
    equal = ((shape.forward_ns, shape.input_ns, shape.weight_ns),) * shape.num_stages
    forward, inputs, weights = np.array(shape.stage_ns or equal, np.int64).T
    return StageCosts(forward, inputs, weights, shape.comm_ns * shape.interleave)


def _divided(value: int, by: int) -> float:
    """Return value / by, as an int where it is whole."""
    return value // by if value % by == 0 else value / by


# Where a rank of a pipeline has no work: each gap, and which of three kinds it is.

KINDS = ("fill_drain", "forward_backward", "scattered")
"""Kinds of gaps."""


@dataclass(frozen=True, slots=True)
class PipelineBubble:
    """A gap in the work of a rank."""

    rank: int
    """Rank."""

    start_ns: int
    """Its start, from the start of the step."""

    duration_ns: int
    """Its length, above 0."""

    kind: str
    """One of `KINDS`."""


def bubbles(program: PipelineProgram, times: ProgramTimes) -> tuple[PipelineBubble, ...]:
    """Return every gap of every rank between the start of the step and the end of the last computation.

    `times` are those of `simulate`. By rank, then by start; their sum is makespan - work of each rank.
    """
    found = []
    for rank in range(program.num_ranks):
        rows = np.flatnonzero((program.rank == rank) & (program.op != SEND) & (program.op != RECV))
        # Gap k is before computation k; the last one is behind all. A rank's order is its order in time.
        starts = np.concatenate([times.start_ns[rows], [times.makespan_ns]])
        ends = np.concatenate([[0], times.end_ns[rows]])
        backward = np.flatnonzero(np.isin(program.op[rows], (B, I)))
        for gap in np.flatnonzero(starts > ends).tolist():
            outer = gap in (0, rows.size)
            kind = KINDS[0 if outer else 1 if backward.size and gap == backward[0] else 2]
            found.append(PipelineBubble(rank, int(ends[gap]), int(starts[gap] - ends[gap]), kind))
    return tuple(found)


def bubble_sums(gaps: Iterable[PipelineBubble], num_ranks: int) -> dict[str, list[int]]:
    """Return kind -> [ranks] its nanoseconds."""
    sums = {kind: [0] * num_ranks for kind in KINDS}
    for gap in gaps:
        sums[gap.kind][gap.rank] += gap.duration_ns
    return sums


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
