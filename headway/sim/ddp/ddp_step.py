"""A data-parallel step as a Dag: the training threads of all ranks, their collectives, and the link these share.

Use it to replay a deep window, as it was or with edits. Built from
`ddp_thread`: items of a rank follow each other; a collective begins when every
rank has queued it and a thread of the backend is free (first in, first out),
takes its latency, then its bytes in pieces on the one link, so that
collectives at once share it fairly; a wait ends after its collective. Replayed
by `greedy` (ready first): whose piece goes next depends on durations. int64 ns.

>>> PIECE_BYTES
262144
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.core.units import KIB
from headway.sim.ddp.ddp_link import Carried, CollectiveLink
from headway.sim.ddp.ddp_thread import CALL, WAIT, Thread
from headway.sim.ddp.ddp_window import Ints
from headway.sim.graph.dag import Dag
from headway.sim.graph.replay import greedy
from headway.trace.events.trace import Trace

PIECE_BYTES = 256 * KIB
"""A collective goes over the link in pieces of this size: the grain at which several share it."""

MOST_PIECES = 256
"""A larger collective gets larger pieces."""

MOST_PASSES = 4
"""Replays until it is settled which backend thread runs which collective."""


@dataclass(frozen=True, slots=True, eq=False)
class DdpStep:
    """The threads of a window and its `c` collectives, ready to be replayed."""

    threads: tuple[Thread, ...]
    """One per rank; `ref` of a call or wait is an index into the collectives."""

    size: Ints
    """[c] Bytes of each collective, in the order in which they were queued."""

    own_ns: Ints
    """[c] What each took as recorded, from the last rank's start to its end; 0 for one that was never run."""

    alone: NDArray[np.bool_]
    """[c, ranks] A rank that was done before the last one had come does not wait for it (the source of a broadcast)."""

    slots: int
    """Threads of the backend that run collectives, per rank."""

    offset_ns: Ints
    """[ranks] When each rank's window began, from the first one."""

    observed_ns: int
    """Start of the first rank to the end of the last one."""

    pool: Ints | None = None
    """[c] Whose threads of the backend run it, each process group has its own; -1 = nobody's: it hands something over
    between two threads of a rank, and takes no time. None = all are of one group."""

    cores: Ints | None = None
    """[threads] Core of each thread, where some share one; None = each has its own."""


def step_of(window: Trace, threads: Sequence[Thread]) -> tuple[DdpStep, list[Carried]]:
    """Match the collectives of all ranks; returns the step and what the link carried.

    Raises `InputError` when ranks queued different numbers or sizes of collectives.
    """
    events = window.events
    counts = {thread.rank: thread.ran.size for thread in threads}
    if len(set(counts.values())) > 1:
        raise InputError(f"ranks queued different numbers of collectives: {counts}. Take windows of the same steps.")
    # [collectives, ranks] here and below: line k is the k-th collective that each rank queued. It is the same one on
    # all ranks if their groups, numbers and sizes agree.
    ran = np.stack([thread.ran for thread in threads], axis=1)
    group, seq, size = (events[column][ran].astype(np.int64) for column in ("group", "seq", "bytes"))
    known = (seq >= 0).all(axis=1)
    wrong = known & ((group != group[:, :1]).any(axis=1) | (seq != seq[:, :1]).any(axis=1))
    wrong |= (size != size[:, :1]).any(axis=1)
    if wrong.any():
        which = int(np.flatnonzero(wrong)[0])
        raise InputError(
            f"collective {which} has group {group[which].tolist()}, seq {seq[which].tolist()} and bytes "
            f"{size[which].tolist()} on its ranks: they are not the same one. Take windows of the same steps from each "
            "rank."
        )
    start = events["start_ns"][ran]
    end = np.stack([thread.ended_ns for thread in threads], axis=1)
    last = start.max(axis=1)
    alone = end < last[:, None]
    begins = np.array([thread.begin_ns[0] for thread in threads])
    ends = np.array([thread.begin_ns[-1] + thread.own_ns[-1] for thread in threads])
    lanes = [np.unique(events["lane"][thread.ran]).size for thread in threads]
    step = DdpStep(
        threads=tuple(threads),
        size=size.max(axis=1),
        own_ns=np.maximum(end.max(axis=1) - last, 0),
        alone=alone,
        slots=max(lanes),
        offset_ns=begins - begins.min(),
        observed_ns=int(ends.max() - begins.min()),
    )
    carried = [Carried(int(s), int(e), int(b)) for s, e, b in zip(last, end.max(axis=1), step.size, strict=True)]
    return step, [one for one in carried if one.end_ns > one.start_ns]


@dataclass(frozen=True, slots=True, eq=False)
class CompiledStep:
    """A step as a Dag with the durations it has on a link."""

    dag: Dag
    """For `greedy` in the order 'ready,priority,index'."""

    duration_ns: Ints
    """[n] Of each operation."""

    last: Ints
    """[ranks] Last operation of each rank."""

    ends: Ints
    """[c] Last piece of each collective."""


def compiled(
    step: DdpStep, link: CollectiveLink, *, comm: float = 1.0, bandwidth: float = 1.0, as_recorded: bool = False
) -> CompiledStep:
    """Return the step on `link`; `comm` multiplies what collectives take, `bandwidth` the rate.

    `as_recorded`: each takes what it took, whoever shared the link with it, for there is no rate that explains it.

    Which backend thread takes a collective depends on when the others end, and that on who took which: settled by
    replaying until it stays.
    """
    if as_recorded:
        latency, duration = np.rint(step.own_ns * comm / bandwidth), np.zeros(step.size.size)
    else:
        latency = np.full(step.size.size, round(comm * link.latency_ns))
        duration = np.array([comm * link.duration_ns(int(size)) / bandwidth for size in step.size])
    pool = np.zeros(step.size.size, np.int64) if step.pool is None else step.pool
    latency, duration = np.where(pool >= 0, latency, 0), np.where(pool >= 0, duration, 0)
    pools = [np.flatnonzero(pool == number) for number in range(int(pool.max(initial=0)) + 1)]
    # waits [c]: the collective whose end frees the backend thread that takes this one, -1 where a thread is free. The
    # first guess is that collectives of a pool end in the order in which they were queued.
    waits = np.full(step.size.size, -1, np.int64)
    for rows in pools:
        waits[rows[step.slots :]] = rows[: -step.slots]
    for _ in range(MOST_PASSES):
        built = _build(step, latency.astype(np.int64), duration, waits)
        end = replayed_ns(built)[built.ends]
        after = np.full(waits.size, -1, np.int64)
        for rows in pools:
            freed = _freed(end[rows], step.slots)
            after[rows] = np.where(freed >= 0, rows[freed], -1) if rows.size else rows
        if (after == waits).all():
            break
        waits = after
    return built


def makespan_ns(built: CompiledStep) -> int:
    """Return when the last rank ends its last item."""
    return int(replayed_ns(built)[built.last].max())


def replayed_ns(built: CompiledStep) -> Ints:
    """Return [n] the end of every operation."""
    return np.asarray(greedy(built.dag, built.duration_ns, order="ready,priority,index").end_ns)


def _freed(end: Ints, slots: int) -> Ints:
    """Return [c] the collective whose end frees the backend thread that takes each one, -1 for none."""
    busy: list[tuple[int, int]] = []
    waits = np.full(end.size, -1, np.int64)
    for collective, when in enumerate(end.tolist()):
        if len(busy) == slots:
            busy.sort()
            waits[collective] = busy.pop(0)[1]
        busy.append((when, collective))
    return waits


def _build(step: DdpStep, latency_ns: Ints, duration: NDArray[np.float64], waits: Ints) -> CompiledStep:
    """Lay out operations: an origin, the items of each rank, then per collective its latency and its pieces."""
    count = step.size.size
    # Numbers of the operations: firsts[i] begins the items of thread i, and each collective has a latency and its
    # pieces:
    #
    #     origin | items of thread 0 | items of thread 1 | ... | latency piece ... piece | latency piece ... piece | ...
    #     0        firsts[0] = 1       firsts[1]                 head[0]           tail[0]   head[1]           tail[1]
    #
    # Only pieces are on lane 0, the link: a latency occupies nothing, and collectives at once share the link by pieces.
    firsts = np.cumsum([1, *(thread.what.size for thread in step.threads)])
    pieces = np.clip(-(-step.size // PIECE_BYTES), 1, MOST_PIECES)
    head = firsts[-1] + np.cumsum(pieces + 1) - (pieces + 1)
    tail = head + pieces
    src, dst, lag = [], [], []

    def edge(sources: Ints, targets: Ints, delay: Ints | int = 0) -> None:
        src.append(np.broadcast_to(sources, targets.shape))
        dst.append(targets)
        lag.append(np.broadcast_to(np.asarray(delay, np.int64), targets.shape))

    for index, thread in enumerate(step.threads):
        ops = np.arange(thread.what.size) + firsts[index]
        edge(np.zeros(1, np.int64), ops[:1], int(step.offset_ns[index]))
        edge(ops[:-1], ops[1:])
        calls, waiting = ops[thread.what == CALL], ops[thread.what == WAIT]
        edge(calls, head[thread.ref[thread.what == CALL]])
        awaited = thread.ref[thread.what == WAIT]
        bound = ~step.alone[awaited, index]
        edge(tail[awaited[bound]], waiting[bound])
    follows = np.flatnonzero(waits >= 0)
    edge(tail[waits[follows]], head[follows])
    chain = np.concatenate([np.arange(a, b) for a, b in zip(head, tail, strict=True)]) if count else head
    edge(chain, chain + 1)
    n = int(firsts[-1] + (pieces + 1).sum())
    lane = np.full(n, -1, np.int64)
    lane[chain + 1] = 0
    if step.cores is not None:  # lane 0 is the link
        sizes = [thread.what.size for thread in step.threads]
        lane[1 : firsts[-1]] = 1 + np.repeat(step.cores, sizes)
    total = np.zeros(n, np.int64)
    total[1 : firsts[-1]] = np.concatenate([thread.own_ns for thread in step.threads])
    total[head] = latency_ns
    share = np.rint(duration / pieces).astype(np.int64)
    total[chain + 1] = np.repeat(share, pieces)
    dag = Dag.from_edges(
        n, np.concatenate(src), np.concatenate(dst), lane=lane, lag_ns=np.concatenate(lag), lane_order=False
    )
    return CompiledStep(dag, total, firsts[1:] - 1, tail)
