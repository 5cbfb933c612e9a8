"""Orders that split the backward: the gradient of the input first, that of the weights where it fills a gap.

Source: *Zero Bubble Pipeline Parallelism* (ICLR 2024) and *Pipeline Parallelism with Controllable Memory*
(NeurIPS 2024). With one stage per rank the hand-made forms have these closed forms, for m >= 3p microbatches:

    form   span idle                 activations
    H1     (p - 1)(tF + tI - tW)     p
    H2     (p - 1)(tF + tI - 2 tW)   2p - 1

They are upper bounds, not optima. So the order is searched: hand-made forms
where they fit the cap, the paper's rules (`zero_bubble_rules`), list scheduling
(`sim.greedy`) under several priorities, then a local search over the priorities. A cap is a set of edges:
a stage's forward of microbatch j waits for its weight gradient of j - cap.

>>> from headway.sim.pipeline.simulate import evaluate
>>> evaluate(zero_bubble, PipelineShape(4, 12, cap=7)).span_idle_ns
0

Orders by the rules of the zero-bubble paper: eight of them, one per combination of three choices.

Source: *Zero Bubble Pipeline Parallelism* (ICLR 2024), section 3.1, and the choices of the released scheduler. Rules
decide microbatch by microbatch, with the time at which each rank is done as the only clock:

    warm-up    before its first I a rank runs as many forwards as fit before that I arrives, under the cap
    then       one F, one I in turn, while there are forwards; a rank is always at least one F ahead of the next one
    W          where the next F or I arrives later than it would end; where the cap wants room; the rest at the end

The choices: whether the last forward of the warm-up may delay the first I, whether an F is left out where it would
delay the next rank's turn, and whether a gap that is shorter than a W takes one although no rank waits longer for it.

>>> orders = next(rule_orders([1, 1], [1, 1], [1, 1], num_microbatches=2, cap=2))
>>> [" ".join(map(str, rank)) for rank in orders]
['0F0 0F1 0I0 0W0 0I1 0W1', '1F0 1I0 1F1 1I1 1W0 1W1']
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.core.rng import stream
from headway.sim.graph.dag import Dag
from headway.sim.pipeline.actions import Action, F, I, Orders, W
from headway.sim.pipeline.lower import lower, peak_activations
from headway.sim.pipeline.orders import PipelineShape
from headway.sim.pipeline.simulate import ListSchedule, StageCosts, costs_of, simulate


@dataclass(slots=True)
class _Clock:
    """What each rank has done, and when it is done with it."""

    times: tuple[Sequence[int], Sequence[int], Sequence[int]]
    """[3][p] ns of F, I, W on each rank."""
    comm_ns: int
    cap: int
    count: list[list[int]] = field(init=False)
    """[3][p] F, I, W so far."""
    done_ns: list[int] = field(init=False)
    """[p] When each rank is done."""
    idle_ns: list[int] = field(init=False)
    """[p] What each rank has waited since its first forward."""
    end_ns: list[list[list[int]]] = field(init=False)
    """[3][p] Ends of all F, I, W in turn."""
    orders: list[list[Action]] = field(init=False)
    """[p] The computations in order."""

    def __post_init__(self) -> None:
        p = len(self.times[0])
        self.count, self.end_ns = [[0] * p for _ in range(3)], [[[] for _ in range(p)] for _ in range(3)]
        self.done_ns, self.idle_ns, self.orders = [0] * p, [0] * p, [[] for _ in range(p)]

    def arrival_ns(self, op: int, rank: int) -> int:
        """Return when the input of the next F or I of a rank is there: from the rank before, or behind."""
        source = rank - 1 if op == 0 else rank + 1
        if op == 2 or not 0 <= source < len(self.done_ns):
            return 0
        return self.end_ns[op][source][self.count[op][rank]] + self.comm_ns

    def put(self, op: int, rank: int) -> None:
        """Run the next F, I or W of a rank as soon as it can."""
        begin_ns = max(self.done_ns[rank], self.arrival_ns(op, rank))
        if self.count[0][rank]:
            self.idle_ns[rank] += begin_ns - self.done_ns[rank]
        self.done_ns[rank] = begin_ns + self.times[op][rank]
        self.end_ns[op][rank].append(self.done_ns[rank])
        self.orders[rank].append(Action((F, I, W)[op], rank, self.count[op][rank]))
        self.count[op][rank] += 1

    def may_put_weight(self, rank: int) -> bool:
        """Say whether a gradient of the weights is left to compute."""
        return self.count[2][rank] < self.count[1][rank]

    def held(self, rank: int) -> int:
        """Return the activations of a rank."""
        return self.count[0][rank] - self.count[2][rank]

    def spare_ns(self, rank: int) -> int:
        """Return how much longer a rank may wait until it is the one that waits most."""
        return max(self.idle_ns) - self.idle_ns[rank]

    def fill(self, op: int, rank: int, *, eager: bool) -> None:
        """Compute gradients of weights while the next F or I of a rank is under way."""
        until_ns = self.arrival_ns(op, rank)
        while self.may_put_weight(rank) and self.done_ns[rank] + self.times[2][rank] <= until_ns:
            self.put(2, rank)
        gap_ns = until_ns - self.done_ns[rank]
        if self.may_put_weight(rank) and gap_ns > 0 and (eager or gap_ns > self.spare_ns(rank)):
            self.put(2, rank)


def rule_orders(
    forward_ns: Sequence[int], input_ns: Sequence[int], weight_ns: Sequence[int], *, num_microbatches: int, cap: int,
    comm_ns: int = 0,
) -> Iterator[Orders]:  # fmt: skip
    """Yield the orders that keep to `cap` activations per rank, one stage per rank; times [p] of each of them."""
    for waits, yields, eager in itertools.product((True, False), repeat=3):
        clock = _Clock((forward_ns, input_ns, weight_ns), comm_ns, cap)
        if _run_rules(clock, num_microbatches, waits=waits, yields=yields, eager=eager):
            yield tuple(map(tuple, clock.orders))


def _run_rules(clock: _Clock, m: int, *, waits: bool, yields: bool, eager: bool) -> bool:
    """Run all microbatches; False where the rules do not fit the cap."""
    p, (forwards, inputs, weights) = len(clock.done_ns), clock.count
    _warm_up(clock, m, waits=waits)
    for _ in range(1, m):
        takes = [forwards[rank] < m and not (yields and _leaves_out(clock, rank)) for rank in range(p)]
        for rank in range(p - 2, -1, -1):  # a rank runs ahead of the next one no further than the rules let it
            takes[rank] = takes[rank] and takes[rank + 1]
        for rank in itertools.compress(range(p), takes):
            while clock.held(rank) >= clock.cap:
                if not clock.may_put_weight(rank):
                    return False
                clock.put(2, rank)
            clock.fill(0, rank, eager=eager)
            clock.put(0, rank)
        for rank in range(p - 1, -1, -1):
            if inputs[rank] >= forwards[rank]:
                return False
            clock.fill(1, rank, eager=eager)
            while rank == 0 and forwards[0] == m and clock.may_put_weight(0):
                clock.put(2, 0)
            clock.put(1, rank)
    for rank in range(p):
        while weights[rank] < m:
            clock.put(2, rank)
    return True


def _warm_up(clock: _Clock, m: int, *, waits: bool) -> None:
    """Run the forwards before the first I of each rank, and that one."""
    p, (forward_ns, input_ns, _) = len(clock.done_ns), clock.times
    for rank in range(p):
        clock.put(0, rank)
    more, first_ns = [0] * p, clock.done_ns[p - 1] + input_ns[p - 1]
    for rank in range(p - 2, -1, -1):
        at_ns, comes_ns = clock.done_ns[rank], first_ns + clock.comm_ns
        while 1 + more[rank] < min(m, clock.cap):
            if at_ns + forward_ns[rank] > comes_ns if waits else at_ns >= comes_ns:
                break
            at_ns += forward_ns[rank]
            more[rank] += 1
        first_ns = max(at_ns, comes_ns) + input_ns[rank]
    for rank in range(1, p):  # one forward less than the rank before, which feeds it
        if 1 + min(more[rank], more[rank - 1]) < m:
            more[rank] = min(more[rank], max(more[rank - 1] - 1, 0))
    for rank in range(p):
        for _ in range(more[rank]):
            clock.put(0, rank)
    for rank in range(p - 1, -1, -1):
        clock.put(1, rank)


def _leaves_out(clock: _Clock, rank: int) -> bool:
    """Say whether a rank that is two forwards ahead of the next one leaves its own out for now."""
    forwards, inputs, weights = clock.count
    after = rank + 1
    if after == len(clock.done_ns) or forwards[rank] < forwards[after] + 2:
        return False
    turn_ns = clock.done_ns[after] + clock.times[0][after] + clock.times[1][after] + clock.comm_ns
    if clock.done_ns[rank] >= turn_ns:
        return True
    room = min(max(clock.held(rank) + 1 - clock.cap, 0), inputs[rank] - weights[rank])
    if clock.done_ns[rank] + clock.times[0][rank] + room * clock.times[2][rank] <= turn_ns:
        return False
    return turn_ns - clock.done_ns[rank] <= clock.spare_ns(rank)


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
    deterministic; its span is never above that of a hand-made form or of the paper's rules where they fit the cap, and
    its makespan never above that of the one of these with the least span. Raises `InputError` for
    more than two stages per rank.
    """
    if shape.interleave > 2:
        raise InputError(f"zero_bubble has 1 or 2 stages per rank, not {shape.interleave}. Give 2.")
    costs = costs or costs_of(shape)
    cap = shape.num_microbatches if shape.cap is None else min(shape.num_microbatches, int(shape.cap))
    rules = list(_by_rules(shape, cap, costs))
    made: list[tuple[tuple[int, int, int], Orders]] = [
        (figures, orders)
        for orders in (*(_hand_made(shape) if shape.interleave == 1 else [_v_form(shape)]), *rules)
        if (figures := _figures(orders, shape, cap, costs)) is not None
    ]
    least_span_ns = min((figures[2] for figures, _ in made), default=None)
    found = [pair for pair in made if pair[0][2] == least_span_ns]
    limit = min((figures for figures, _ in found), default=None)
    for orders in _searched(shape, cap, costs, [_starts_of(orders, shape, costs) for orders in rules]):
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
        program = lower(orders, shape.graph)
    except InputError:
        return None
    if (peak_activations(program) > cap * shape.interleave).any():
        return None
    times = simulate(program, costs)
    span = int((times.last_ns - times.first_ns).max())
    return times.makespan_ns + span, times.makespan_ns, span


def _by_rules(shape: PipelineShape, cap: int, costs: StageCosts) -> Iterator[Orders]:
    """Yield the orders of the paper's rules: for a chain with one stage per rank."""
    if shape.interleave == 1 and shape.graph is None:
        times = (costs.forward_ns.tolist(), costs.input_ns.tolist(), costs.weight_ns.tolist())
        yield from rule_orders(*times, num_microbatches=shape.num_microbatches, cap=cap, comm_ns=shape.comm_ns)


def _starts_of(orders: Orders, shape: PipelineShape, costs: StageCosts) -> Floats:
    """Return [3, stages, m] when an order starts its computations: a priority that leads back to it."""
    program = lower(orders, shape.graph)
    starts, rows = simulate(program, costs).start_ns, np.flatnonzero(program.op <= W)
    found = np.zeros((3, shape.num_stages, shape.num_microbatches))
    found[np.searchsorted(KINDS, program.op[rows]), program.stage[rows], program.microbatch[rows]] = starts[rows]
    return found


def _hand_made(shape: PipelineShape) -> Iterator[Orders]:
    """Yield H1 and H2: warm-up forwards, then I and F in turn, W so many microbatches behind I, the rest at the end."""
    m, in_flight = shape.num_microbatches, shape.stages.in_flight()
    for ahead in (1, 2):
        orders = []
        for rank, depth in enumerate(in_flight):
            warm_up, behind = min(m, ahead * depth - (ahead - 1)), ahead * (max(in_flight) - depth)
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


def _run(work: ListSchedule, dag: Dag, offset: Floats, base: Floats) -> tuple[float, Ints]:
    """Schedule by priority offset(kind, stage) + base; return what the search lowers, and the starts.

    It is makespan + span + a fifth of the mean idle time of a rank: the mean tells apart what the maxima do not.
    """
    times = work.run(dag, offset[:, :, None] + base)
    start, end = times.start_ns.astype(np.int64), times.end_ns.astype(np.int64)
    num_ranks = dag.num_lanes
    first, last = np.full(num_ranks, np.iinfo(np.int64).max), np.zeros(num_ranks, np.int64)
    np.minimum.at(first, dag.lane, start)
    np.maximum.at(last, dag.lane, end)
    span = last - first
    return float(last.max() + span.max() + 0.2 * span.mean()), start


def _searched(shape: PipelineShape, cap: int, costs: StageCosts, more: Sequence[Floats]) -> Iterator[Orders]:
    """Yield the best order of plain list scheduling, then that of the local search from there.

    A start is an offset for each kind and stage on top of j x period, or on top of one of `more` [3, stages, m].

    A trial moves the priority of one kind of operation (of one stage, of all first or all second stages), or gives one
    activation of a rank from one of its stages to the other. It is kept where it is no worse.
    """
    p, v, num_stages = shape.num_ranks, shape.interleave, shape.num_stages
    ranks = np.arange(p)
    rank = ranks if v == 1 else np.concatenate([ranks, ranks[::-1]])
    each = np.array([costs.forward_ns, costs.input_ns, costs.weight_ns], np.int64)
    case = ListSchedule(KINDS, shape.stages, rank, shape.num_microbatches, each, shape.comm_ns * v)
    period = float(v * (shape.forward_ns + shape.input_ns + shape.weight_ns))
    # Activations of the second stage: one more for each rank nearer to the turn of the V, in shares of the cap.
    second = np.clip((ranks + 1) * cap // p, 1, 2 * cap - 1)
    dag = case.dag(_caps(second, cap, v))
    line = np.asarray(np.arange(shape.num_microbatches) * period, np.float64)
    none = np.zeros((3, num_stages))
    pairs: list[tuple[Floats, Floats]] = [
        *((offset, line) for offset in _starts(shape)),
        *((none, base) for base in more),
    ]
    tried = [_run(case, dag, offset, base) for offset, base in pairs]
    best = min(range(len(tried)), key=lambda k: tried[k][0])
    (offset, base), (value, start) = pairs[best], tried[best]
    yield case.orders(start)
    generator = stream(0, "zero_bubble", p, shape.num_microbatches)
    for _ in range(min(MOST_TRIALS, MOST_OPERATIONS // (each.size * shape.num_microbatches))):
        moved, shares, order = offset.copy(), second, dag
        kind, move = int(generator.integers(3)), generator.random()
        step = generator.normal() * period
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
        other, when = _run(case, order, moved, base)
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
    depth = np.array(shape.stages.in_flight())
    forward = (depth.max() - depth) * float(shape.forward_ns)
    back = depth.max() * float(shape.forward_ns) + (depth - 1) * float(shape.input_ns)
    starts = [np.array([forward, back, back + shape.input_ns])]
    for turn in itertools.permutations(range(3)):
        for shift in (0.0, -0.3, 0.3) if shape.interleave == 2 else (0.0,):
            offset = np.repeat(np.array(turn, float)[:, None] * far, num_stages, axis=1)
            offset[:, shape.num_ranks :] += shift * far
            starts.append(offset)
    return starts
