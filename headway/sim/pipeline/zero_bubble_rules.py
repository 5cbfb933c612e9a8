"""Orders by the rules of the zero-bubble paper: eight of them, one per combination of three choices.

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

from headway.sim.pipeline.actions import Action, F, I, Orders, W


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
        if _run(clock, num_microbatches, waits=waits, yields=yields, eager=eager):
            yield tuple(map(tuple, clock.orders))


def _run(clock: _Clock, m: int, *, waits: bool, yields: bool, eager: bool) -> bool:
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
