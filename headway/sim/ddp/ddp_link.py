"""The link of a data-parallel job: what its collectives of a deep window took by themselves, and what rate that is.

Use it to give a duration to a collective of any size. A collective's own time
is from the last rank that started it to its end. Rate = bytes / time during
which at least one of them was running, less a fixed latency for each stretch:
two at once share the link, so their own times would count it twice. (A line
through two sizes gives nonsense latencies: the larger one is the one that
shared.) Bytes are those of the tensor, whatever the algorithm sends per byte.

>>> fit([Carried(0, 10_350_000, 10_000_000)], latency_ns=350_000)
CollectiveLink(latency_ns=350000.0, bytes_per_s=1000000000.0, spread=0.0)

DDP's published rule: which gradients go into which bucket.

Use it to lay out the buckets of a size that was never run. Gradients are taken
in the order in which they become ready; those of one type fill a bucket until
it holds at least its limit, the tensor that crosses the limit included. The
first bucket of each type has a limit of its own (1 MiB by default), so that
the first all-reduce starts early. Sizes in bytes, `bucket_mb` in MiB as in
torch's `bucket_cap_mb`.

>>> assign([3, 3, 3, 3], ["f"] * 4, limits(6 / 2**20))
[[0, 1], [2, 3]]
>>> assign([3, 3, 3, 3], ["f"] * 4, (1, 100))
[[0], [1, 2, 3]]
>>> limits("default")
(1048576, 26214400)

How much slower a rank computes while a deep window profiles it, from the always-on records of the same run.

Use it to take the profiler's own cost out of a window's work: a quarter of
small operations' time. Per step a rank's own work is forward + backward +
update, less what it waited for communication; those are recorded at every
step, profiled or not. The pace is that work beside the window over that work
in it, 1 where the records do not say.

>>> pace(np.array([8, 8, 9]), np.array([10, 11, 10]))
0.8

A data-parallel step as a Dag: the training threads of all ranks, their collectives, and the link these share.

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.core.units import KIB, MIB, NS_PER_S
from headway.sim.ddp.ddp_thread import CALL, WAIT, Thread
from headway.sim.ddp.ddp_window import Ints
from headway.sim.graph.dag import Dag, greedy
from headway.trace.events.intervals import union_ns
from headway.trace.events.trace import Trace
from headway.trace.recording.runs import Run

IDLE_LATENCY_NS = 350_000
"""A small all-reduce of two gloo ranks on an idle host: 0.3 to 0.4 ms measured."""

SMALL_BYTES = 64 * 1024
"""Collectives up to this size say nothing about the rate."""


@dataclass(frozen=True, slots=True)
class Carried:
    """One collective as the link saw it, ns and bytes."""

    start_ns: int
    """When the last rank had started it."""

    end_ns: int
    """When it had ended on every rank."""

    size: int
    """Bytes of its tensor."""


@dataclass(frozen=True, slots=True)
class CollectiveLink:
    """What a collective takes: latency + bytes / rate, while it is alone."""

    latency_ns: float
    """Fixed part of each collective."""

    bytes_per_s: float
    """Rate that collectives running at once share."""

    spread: float
    """How much the rate differs between busy stretches: half the range of their middle half / their median."""

    def duration_ns(self, size: int) -> int:
        """Return what the bytes of a collective take on the link, without the latency."""
        return round(size / self.bytes_per_s * NS_PER_S)


def fit(carried: Sequence[Carried], *, latency_ns: float | None = None) -> CollectiveLink:
    """Return the link behind the collectives of one or more windows (their times must not overlap between windows).

    `latency_ns` None: the median own time of small collectives where there are at least three, never more than the
    idle latency allows for; else `IDLE_LATENCY_NS`. Raises `InputError` when no collective carried more than
    `SMALL_BYTES`.
    """
    large = [one for one in carried if one.size > SMALL_BYTES]
    if not large:
        raise InputError(
            f"no collective of the window carried more than {SMALL_BYTES} bytes, so the rate of the link is not known. "
            "Take a window of a job with larger gradients."
        )
    latency = float(IDLE_LATENCY_NS if latency_ns is None else latency_ns)
    rates, busy_ns, total = [], 0.0, 0
    for stretch in _stretches(large):
        start, duration = np.array([(one.start_ns, one.end_ns - one.start_ns) for one in stretch], np.int64).T
        own_ns = max(union_ns(start, duration) - latency, 1.0)
        size = sum(one.size for one in stretch)
        rates.append(size / own_ns * NS_PER_S)
        busy_ns, total = busy_ns + own_ns, total + size
    low, middle, high = np.quantile(rates, [0.25, 0.5, 0.75])
    return CollectiveLink(latency, total / busy_ns * NS_PER_S, float((high - low) / 2 / middle))


def _stretches(carried: Sequence[Carried]) -> list[list[Carried]]:
    """Split into stretches of time during which at least one collective was running."""
    found: list[list[Carried]] = []
    reach = -1
    for one in sorted(carried, key=lambda c: c.start_ns):
        if not found or one.start_ns > reach:
            found.append([])
        found[-1].append(one)
        reach = max(reach, one.end_ns)
    return found


# DDP's published rule: which gradients go into which bucket.

DEFAULT_FIRST_BYTES, DEFAULT_CAP_BYTES = MIB, 25 * MIB
"""Limits of the first and of every further bucket when the script names none (torch.nn.parallel.distributed)."""


def limits(bucket_mb: float | str) -> tuple[int, int]:
    """Return (first, further) limit in bytes for a size in MiB, or for 'default'."""
    if bucket_mb == "default":
        return DEFAULT_FIRST_BYTES, DEFAULT_CAP_BYTES
    size = int(float(bucket_mb) * MIB)
    return size, size


def assign(sizes: Sequence[int], types: Sequence[str], limit: tuple[int, int]) -> list[list[int]]:
    """Return the buckets, each a list of indices into `sizes`, in the order in which DDP reduces them.

    `sizes` [g] bytes and `types` [g] of the gradients in order of readiness; `limit` as `limits` gives it. Full
    buckets come in the order in which they filled, what is left over follows by type. Raises `InputError` when the two
    lists differ in length.
    """
    if len(sizes) != len(types):
        raise InputError(f"{len(sizes)} sizes and {len(types)} types; give each gradient one of both.")
    full: list[list[int]] = []
    held: dict[str, list[int]] = {}
    filled: dict[str, int] = {}
    bound: dict[str, int] = {}
    for index, (size, kind) in enumerate(zip(sizes, types, strict=True)):
        held.setdefault(kind, []).append(index)
        filled[kind] = filled.get(kind, 0) + size
        if filled[kind] >= bound.get(kind, limit[0]):
            full.append(held.pop(kind))
            filled[kind], bound[kind] = 0, limit[1]
    return [*full, *held.values()]


# How much slower a rank computes while a deep window profiles it, from the always-on records of the same run.

WARM = 8
"""First steps, which are no measure of others."""

BESIDE = 10
"""Steps on either side of a window that it is compared with: other work on the host comes and goes."""

AFTER = 3
"""Steps after a window that may still pay for it: its files are written then."""

SLOWEST = 0.5
"""A pace below is no cost of profiling: something else happened."""


def pace(beside_ns: Ints, inside_ns: Ints) -> float:
    """Return median work beside a window / in it, in [`SLOWEST`, 1]; 1 when either is empty."""
    if not beside_ns.size or not inside_ns.size:
        return 1.0
    return float(np.clip(np.median(beside_ns) / max(float(np.median(inside_ns)), 1.0), SLOWEST, 1.0))


def paces_of(run: Run, ranks: list[int]) -> dict[tuple[int, int], float]:
    """Return (number of a window, rank) -> pace, for every window that the records of the rank hold."""
    found: dict[tuple[int, int], float] = {}
    for rank in ranks:
        trace = run.parts.select([rank]).whole()
        steps = trace.where(np.flatnonzero(trace.named("step"))).events
        windows = trace.where(np.flatnonzero(trace.named("window"))).events
        work = _work_ns(trace, steps)
        begin, end = windows["start_ns"], windows["start_ns"] + windows["duration_ns"]
        # Steps first .. last - 1 of each window are those that end inside it. Steps that no window touches or delays
        # are `free`; those nearest to a window's middle are what its steps are compared with.
        first = np.searchsorted(steps["start_ns"] + steps["duration_ns"], begin, side="right")
        last = np.searchsorted(steps["start_ns"] + steps["duration_ns"], end, side="right")
        free = np.ones(work.size, bool)
        free[:WARM] = False
        for a, b in zip(first.tolist(), last.tolist(), strict=True):
            free[max(a - 1, 0) : b + AFTER] = False
        for number, a, b in zip(windows["seq"].tolist(), first.tolist(), last.tolist(), strict=True):
            near = np.flatnonzero(free)
            near = near[(near >= a - 2 * BESIDE) & (near < b + 2 * BESIDE)]
            near = near[np.argsort(np.abs(near - (a + b) / 2), kind="stable")][: 2 * BESIDE]
            found[int(number), rank] = pace(work[near], work[a:b])
    return found


def _work_ns(trace: Trace, steps: Mapping[str, NDArray[Any]]) -> Ints:
    """Return [steps] forward + backward + update - waits for communication of each step; 0 where none was recorded."""
    total = np.zeros(steps["start_ns"].size, np.int64)
    ends = steps["start_ns"] + steps["duration_ns"]
    for name, sign in (("segment.forward", 1), ("segment.backward", 1), ("optimizer.step", 1), ("comm.wait", -1)):
        rows = trace.where(np.flatnonzero(trace.named(name))).events
        at = np.searchsorted(ends, rows["start_ns"], side="right")
        inside = at < total.size
        np.add.at(total, at[inside], sign * rows["duration_ns"][inside])
    return np.maximum(total, 0)


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
