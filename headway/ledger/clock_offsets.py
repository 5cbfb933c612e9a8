"""How far the clocks of the ranks of an operation trace stand apart, found only where they must.

Use it before comparing times of different ranks. What communicates ends at
about the same moment for all its members, and never before the last of them
has started. Where that is broken by more than clock noise, offsets are
estimated: the median difference of the ends of each pair of ranks that
communicate, along the spanning tree of the least scattered pairs. A trace
whose clocks agree is left alone, to the last bit. Offsets are kept in
`trace.ranks`, never written into the times.

>>> from headway.trace.synthetic import Job, generate
>>> trace = generate(Job(dp=2, pp=2, num_microbatches=4, num_steps=2), seed=1).trace
>>> aligned(trace) is trace
True
"""

from __future__ import annotations

import heapq
import logging
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from headway.core.units import NS_PER_S
from headway.ledger.dependencies import Dependencies, infer
from headway.ledger.operation_table import OperationTable, arrange, clock_ns
from headway.ledger.whatif_groups import CLOCK_NOISE_S
from headway.trace.trace import Trace

Ints = NDArray[np.int64]
Worker = tuple[int, int]

NOISE_NS = round(CLOCK_NOISE_S * NS_PER_S)
"""Disagreement of clocks that counts as noise."""

_log = logging.getLogger(__name__)


def aligned(trace: Trace, *, unknown_as_compute: bool = False) -> Trace:
    """Return `trace` with `offset_ns` in `trace.ranks` where clocks disagree, `trace` itself where they do not.

    Raises `InputError` as `arrange` and `infer` do.
    """
    table = arrange(trace, unknown_as_compute=unknown_as_compute)
    order = infer(table)
    start = clock_ns(trace)[table.row]
    end = start + trace.events["duration_ns"][table.row]
    if not _broken(order, start, end):
        return trace
    offsets = _offsets(table, order, end)
    ranks = {rank: dict(known) for rank, known in trace.ranks.items()}
    for (d, p), offset in offsets.items():
        rank = int(table.rank[d, p])
        ranks[rank]["offset_ns"] = int(ranks[rank].get("offset_ns", 0)) + offset
    _log.warning("clocks of %d of %d ranks stand apart; the analysis shifts them", len(offsets), table.rank.size)
    return replace(trace, ranks=ranks)


def _broken(order: Dependencies, start: Ints, end: Ints) -> bool:
    """Say whether some operation ends, in most steps, well before the last of its group has started."""
    for group, joint in zip(order.groups, order.synchronised, strict=True):
        members = list(group)
        arrival = start[:, :, members].max(axis=2, keepdims=True)
        if joint:
            arrival = arrival.max(axis=1, keepdims=True)
        early = arrival - end[:, :, members] > NOISE_NS
        if bool((early.mean(axis=0) > 0.5).any()):
            return True
    return False


def _offsets(table: OperationTable, order: Dependencies, end: Ints) -> dict[Worker, int]:
    """Return what to add to the clock of each worker that stands more than noise apart from the median one."""
    beside: dict[Worker, list[tuple[float, Worker, float]]] = {}
    for (ours, theirs), apart in _links(table, order, end).items():
        middle = float(np.median(apart))
        scatter = float(np.median(np.abs(apart - middle)))
        beside.setdefault(ours, []).append((scatter, theirs, middle))
        beside.setdefault(theirs, []).append((scatter, ours, -middle))
    offset: dict[Worker, float] = {}
    queue: list[tuple[float, Worker, float]] = [(0.0, (0, 0), 0.0)]
    while queue:
        _, worker, value = heapq.heappop(queue)
        if worker in offset:
            continue
        offset[worker] = value
        for scatter, neighbour, middle in beside.get(worker, ()):
            heapq.heappush(queue, (scatter, neighbour, value + middle))
    reference = float(np.median(list(offset.values())))
    moved = {worker: round(value - reference) for worker, value in offset.items()}
    return {worker: value for worker, value in moved.items() if abs(value) > NOISE_NS}


def _links(table: OperationTable, order: Dependencies, end: Ints) -> dict[tuple[Worker, Worker], NDArray[np.float64]]:
    """Return, per pair of workers that communicate, how much later each operation ended at the first one, ns."""
    num_dp = end.shape[1]
    found: dict[tuple[Worker, Worker], list[Ints]] = {}
    for group, joint in zip(order.groups, order.synchronised, strict=True):
        stages = [int(table.stage[op]) for op in group]
        for d in range(num_dp):
            for op, stage in zip(group[1:], stages[1:], strict=True):
                pair = ((d, stages[0]), (d, stage))
                found.setdefault(pair, []).append(end[:, d, group[0]] - end[:, d, op])
            if joint and d:
                pair = ((0, stages[0]), (d, stages[0]))
                found.setdefault(pair, []).append(end[:, 0, group[0]] - end[:, d, group[0]])
    return {pair: np.concatenate(apart).astype(np.float64) for pair, apart in found.items()}
