"""Orders that split the backward: the gradient of the input first, that of the weights where it fills a gap.

Source: *Zero Bubble Pipeline Parallelism* (ICLR 2024) and *Pipeline Parallelism with Controllable Memory*
(NeurIPS 2024). With one stage per rank the hand-made forms have these closed forms, for m >= 3p microbatches:

    form   span idle                 activations
    H1     (p - 1)(tF + tI - tW)     p
    H2     (p - 1)(tF + tI - 2 tW)   2p - 1

They are upper bounds, not optima. So the order is searched: hand-made forms
where they fit the cap, list scheduling (`sim.greedy`) under several
priorities, then a local search over the priorities. A cap is a set of edges:
a stage's forward of microbatch j waits for its weight gradient of j - cap.

>>> from headway.sim.pipeline.simulate import evaluate
>>> evaluate(zero_bubble, PipelineShape(4, 12, cap=7)).span_idle_ns
0
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.core.rng import stream
from headway.sim.graph.dag import Dag
from headway.sim.graph.replay import greedy
from headway.sim.pipeline.actions import Action, F, I, Orders, W
from headway.sim.pipeline.lower import lower, peak_activations
from headway.sim.pipeline.orders import PipelineShape
from headway.sim.pipeline.simulate import StageCosts, costs_of, simulate

MOST_TRIALS, MOST_OPERATIONS = 1500, 3_000_000
"""The local search ends after so many trials, or operations scheduled: about a second."""

KINDS = (F, I, W)
"""The computations of a stage and microbatch, in this order."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def zero_bubble(shape: PipelineShape, costs: StageCosts | None = None) -> Orders:
    """Return an order with split backwards under the cap: one stage per rank, or two in a V.

    `costs` are the times of unequal stages, in 1/interleave ns; without them all stages take those of the shape.

    In a V a rank has stage r and stage 2p - 1 - r, so that the first and the last stage are on one rank. The answer is
    deterministic, and never worse than a hand-made form that fits, in makespan and in span. Raises `InputError` for
    more than two stages per rank.
    """
    if shape.interleave > 2:
        raise InputError(f"zero_bubble has 1 or 2 stages per rank, not {shape.interleave}. Give 2.")
    costs = costs or costs_of(shape)
    cap = shape.num_microbatches if shape.cap is None else min(shape.num_microbatches, int(shape.cap))
    made = [
        (figures, orders)
        for orders in (_hand_made(shape) if shape.interleave == 1 else [_v_form(shape)])
        if (figures := _figures(orders, shape, cap, costs)) is not None
    ]
    limit = min((figures for figures, _ in made), default=None)
    found = [*made]
    for orders in _searched(shape, cap, costs):
        figures = _figures(orders, shape, cap, costs)
        if figures is not None and (limit is None or (figures[1] <= limit[1] and figures[2] <= limit[2])):
            found.append((figures, orders))
    if not found:
        raise InputError(f"no order of {shape.num_ranks} ranks under the cap {shape.cap} was found. Raise the cap.")
    return min(found, key=lambda pair: pair[0])[1]


def v_shape(shape: PipelineShape) -> Orders:
    """Return `zero_bubble` with two stages per rank; raises `InputError` for another number."""
    if shape.interleave != 2:
        raise InputError(f"v has 2 stages per rank, not {shape.interleave}. Give 2.")
    return zero_bubble(shape)


def _figures(orders: Orders, shape: PipelineShape, cap: int, costs: StageCosts) -> tuple[int, int, int] | None:
    """Return (makespan + span, makespan, span); None where the order cannot run or exceeds the cap."""
    try:
        program = lower(orders)
    except InputError:
        return None
    if (peak_activations(program) > cap * shape.interleave).any():
        return None
    times = simulate(program, costs)
    span = int((times.last_ns - times.first_ns).max())
    return times.makespan_ns + span, times.makespan_ns, span


def _hand_made(shape: PipelineShape) -> Iterator[Orders]:
    """Yield H1 and H2: warm-up forwards, then I and F in turn, W so many microbatches behind I, the rest at the end."""
    p, m = shape.num_ranks, shape.num_microbatches
    for ahead in (1, 2):
        orders = []
        for rank in range(p):
            warm_up, behind = min(m, ahead * (p - rank) - (ahead - 1)), ahead * rank
            actions = [Action(F, rank, j) for j in range(warm_up)]
            for j in range(m):
                actions.append(Action(I, rank, j))
                actions += [Action(W, rank, j - behind)] if j >= behind else []
                actions += [Action(F, rank, warm_up + j)] if warm_up + j < m else []
            orders.append((*actions, *(Action(W, rank, j) for j in range(max(0, m - behind), m))))
        yield tuple(orders)


def _v_form(shape: PipelineShape) -> Orders:
    """Return the hand-made V order: p activations, no idle time between first and last where F = I = W and m >= 2p.

    Rank r, first stage a and second stage b: 2(p - r) - 1 forwards of a; r times b, a; p - r times F I W of b;
    then F I W of a and F I W of b in turn; at the end r times I of both, p - r times I W of a, and the W left.
    """
    p, m = shape.num_ranks, shape.num_microbatches
    a, b = [(kind, 0) for kind in KINDS], [(kind, 1) for kind in KINDS]
    orders = []
    for rank in range(p):
        stages, done = (rank, 2 * p - 1 - rank), dict.fromkeys([*a, *b], 0)
        actions: list[Action] = []
        phases = [
            (a[:1], 2 * (p - rank) - 1), ([b[0], a[0]], rank), (b, p - rank), ([*a, *b], max(0, m - p)),
            ([a[1], b[1]], rank), (a[1:], p - rank), (b[2:], m), (a[2:], m),
        ]  # fmt: skip
        for key in (key for keys, times in phases for key in keys * times):
            if done[key] < m:
                actions.append(Action(key[0], stages[key[1]], done[key]))
                done[key] += 1
        orders.append(tuple(actions))
    return tuple(orders)


@dataclass(frozen=True, slots=True, eq=False)
class _ListSchedule:
    """List scheduling of one shape. Operation (kind k, stage s, microbatch j) has index (k S + s) m + j."""

    shape: PipelineShape
    """The shape."""

    rank: Ints
    """[S] Rank of each stage."""

    duration_ns: Ints
    """[3 S m] In 1/interleave ns."""

    def dag(self, caps: Ints) -> Dag:
        """Return the dependencies, with at most `caps` [S] activations of each stage.

        F(s, j) -> F(s + 1, j)       F(s, j) -> I(s, j) -> W(s, j)       microbatches of a stage in order
        I(s + 1, j) -> I(s, j)       W(s, j) -> F(s, j + cap)
        """
        num_stages, m = self.rank.size, self.shape.num_microbatches
        index = np.arange(3 * num_stages * m).reshape(3, num_stages, m)
        crossing = (self.rank[:-1] != self.rank[1:]) * self.shape.comm_ns * self.shape.interleave
        delay = np.repeat(crossing, m)
        parts = [
            (index[0, :-1], index[0, 1:], delay),
            (index[1, 1:], index[1, :-1], delay),
            (index[:2], index[1:], None),
            (index[:, :, :-1], index[:, :, 1:], None),
        ]
        parts += [(index[2, s, : m - cap], index[0, s, cap:], None) for s, cap in enumerate(caps.tolist()) if cap < m]
        lags = [np.zeros(a.size, np.int64) if lag is None else lag for a, _, lag in parts]
        return Dag.from_edges(
            index.size,
            np.concatenate([a.ravel() for a, _, _ in parts]),
            np.concatenate([b.ravel() for _, b, _ in parts]),
            lag_ns=np.concatenate(lags),
            lane=np.tile(np.repeat(self.rank, m), 3),
            lane_order=False,
        )

    def run(self, dag: Dag, offset: Floats) -> tuple[float, Ints]:
        """Schedule by priority offset(kind, stage) + j x period; return what the search lowers, and the starts.

        It is makespan + span + a fifth of the mean idle time of a rank: the mean tells apart what the maxima do not.
        """
        m = self.shape.num_microbatches
        priority = (offset[:, :, None] + np.arange(m) * self.period).ravel()
        times = greedy(replace(dag, priority=priority), self.duration_ns)
        start, end = times.start_ns.astype(np.int64), times.end_ns.astype(np.int64)
        first = np.full(self.shape.num_ranks, np.iinfo(np.int64).max)
        last = np.zeros(self.shape.num_ranks, np.int64)
        np.minimum.at(first, dag.lane, start)
        np.maximum.at(last, dag.lane, end)
        span = last - first
        return float(last.max() + span.max() + 0.2 * span.mean()), start

    @property
    def period(self) -> float:
        """Work of a rank per microbatch, in 1/interleave ns."""
        return float(self.shape.interleave * (self.shape.forward_ns + self.shape.input_ns + self.shape.weight_ns))

    def orders(self, start: Ints) -> Orders:
        """Return each rank's computations by start; of two at once the one that feeds the other is first."""
        num_stages, m = self.rank.size, self.shape.num_microbatches
        kind, stage, microbatch = np.unravel_index(np.arange(start.size), (3, num_stages, m))
        along = np.where(kind == 1, -stage, stage)
        rows = np.lexsort((along, kind, start + self.duration_ns, start))
        orders: list[list[Action]] = [[] for _ in range(self.shape.num_ranks)]
        for k, s, j in zip(kind[rows].tolist(), stage[rows].tolist(), microbatch[rows].tolist(), strict=True):
            orders[self.rank[s]].append(Action(KINDS[k], s, j))
        return tuple(map(tuple, orders))


def _searched(shape: PipelineShape, cap: int, costs: StageCosts) -> Iterator[Orders]:
    """Yield the best order of plain list scheduling, then that of the local search from there.

    A trial moves the priority of one kind of operation (of one stage, of all first or all second stages), or gives one
    activation of a rank from one of its stages to the other. It is kept where it is no worse.
    """
    p, v, num_stages = shape.num_ranks, shape.interleave, shape.num_stages
    ranks = np.arange(p)
    rank = ranks if v == 1 else np.concatenate([ranks, ranks[::-1]])
    each = np.repeat(np.concatenate([costs.forward_ns, costs.input_ns, costs.weight_ns]), shape.num_microbatches)
    case = _ListSchedule(shape, rank, each.astype(np.int64))
    # Activations of the second stage: one more for each rank nearer to the turn of the V, in shares of the cap.
    second = np.clip((ranks + 1) * cap // p, 1, 2 * cap - 1)
    dag = case.dag(_caps(second, cap, v))
    offsets = _starts(shape)
    tried = [case.run(dag, offset) for offset in offsets]
    best = min(range(len(tried)), key=lambda k: tried[k][0])
    offset, (value, start) = offsets[best], tried[best]
    yield case.orders(start)
    generator = stream(0, "zero_bubble", p, shape.num_microbatches)
    for _ in range(min(MOST_TRIALS, MOST_OPERATIONS // each.size)):
        moved, shares, order = offset.copy(), second, dag
        kind, move = int(generator.integers(3)), generator.random()
        step = generator.normal() * case.period
        if move < 0.5:
            moved[kind, generator.integers(num_stages)] += step
        elif move < 0.65:
            moved[kind] += step * generator.random() * np.linspace(-1, 1, num_stages)
        elif move < 0.85 or v == 1:
            moved[kind, : p if move < 0.75 else None] += step
        else:
            shares = second.copy()
            shares[generator.integers(p)] += generator.choice([-1, 1])
            shares = np.clip(shares, 1, 2 * cap - 1)
            order = case.dag(_caps(shares, cap, v))
        other, when = case.run(order, moved)
        if other <= value:
            value, start, offset, second, dag = other, when, moved, shares, order
    yield case.orders(start)


def _caps(second: Ints, cap: int, stages_per_rank: int) -> Ints:
    """Return [stages] the activations of each stage: all of a rank's, or shared with its second stage."""
    if stages_per_rank == 1:
        return np.full(second.size, cap)
    return np.concatenate([2 * cap - second, second[::-1]])


def _starts(shape: PipelineShape) -> list[Floats]:
    """Return priorities [3, stages] to start from: by the time in an empty pipeline, and by kind in every order."""
    num_stages, far = shape.num_stages, 1e12
    along = np.arange(num_stages)
    forward = along * float(shape.forward_ns)
    back = num_stages * float(shape.forward_ns) + along[::-1] * float(shape.input_ns)
    starts = [np.array([forward, back, back + shape.input_ns])]
    for turn in itertools.permutations(range(3)):
        for shift in (0.0, -0.3, 0.3) if shape.interleave == 2 else (0.0,):
            offset = np.repeat(np.array(turn, float)[:, None] * far, num_stages, axis=1)
            offset[:, shape.num_ranks :] += shift * far
            starts.append(offset)
    return starts
