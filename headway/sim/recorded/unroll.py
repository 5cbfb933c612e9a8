"""A recorded run, unrolled into operations with an order: what `program` replays.

Every segment of a training thread and every load becomes operations; cores
are a lane with as many places as the host has usable cores, shared storage is a lane
with one place, all else is bounded by its edges only. Long CPU work is cut into
quanta, as an operating system shares cores. What else wants the cores
(`contention`) has operations of its own. Times are ns; the Dag is for `greedy`.

>>> [LABELS[code] for code in np.flatnonzero(ON_CORE)]
['input.next', 'host.gc', 'host.collect']
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headway.core.units import NS_PER_MS
from headway.sim.graph.dag import Dag, greedy
from headway.sim.recorded.core_use import Contention, rival_cycles
from headway.sim.recorded.lane import LABELS, ON_THREAD, DeviceWork, Lane
from headway.sim.recorded.loader_model import Loading
from headway.sim.recorded.recording import Recording
from headway.sim.recorded.segment_times import last_of_steps

QUANTUM_NS = 5 * NS_PER_MS
"""CPU work is cut into quanta of this length where more threads want cores than there are."""

MAX_QUANTA = 16
"""Into how many at most: longer work gets longer quanta."""

BURST = 8
"""Pieces of CPU work that a thread does before the token of the first is due: below its share a job is not delayed."""

LEAST_BESIDE = 0.1
"""Cores beside the training thread below which no thread of kernels is replayed: marks and wakers take as much."""

CORES, STORAGE, TOKENS, POOLS, FREE = 0, 1, 2, 3, -1
"""Lanes of the first host, those of host h are 4 h more; operations on FREE are bounded by their edges only."""

HOST_LANES = 4
"""Lanes of a host."""

ON_CORE = np.isin(LABELS, ["host.gc", "host.collect", "input.next"])
"""[LABELS] What surely occupies a core of the host, compute aside."""


@dataclass(frozen=True, slots=True, eq=False)
class Unrolled:
    """Operations of all ranks, and where their steps end."""

    dag: Dag
    """The order."""

    duration_ns: NDArray[np.int64]
    """[n] How long each takes."""

    capacity: NDArray[np.int64]
    """[4 x hosts] Places on CORES, STORAGE, TOKENS and POOLS of each host."""

    step_op: NDArray[np.int64]
    """[ranks, k] Operation that ends each step."""

    last_op: tuple[NDArray[np.int64], ...]
    """Per rank [m]: the last operation of each segment of its training thread."""

    def step_end_ns(self) -> NDArray[np.int64]:
        """Replay it and return [ranks, k] when each step ends, from 0."""
        times = greedy(self.dag, self.duration_ns, capacity=self.capacity)
        return np.asarray(times.end_ns[self.step_op], dtype=np.int64)


@dataclass(slots=True)
class _Ops:
    """Operations and edges as they are collected."""

    lane: list[NDArray[np.int64]] = field(default_factory=list)
    duration: list[NDArray[np.int64]] = field(default_factory=list)
    src: list[NDArray[np.int64]] = field(default_factory=list)
    dst: list[NDArray[np.int64]] = field(default_factory=list)
    lag: list[NDArray[np.int64]] = field(default_factory=list)
    quantum: int = 0
    """Length of the pieces into which CPU work is cut, ns; 0 = it is not cut."""
    limit: float = float("inf")
    """Cores' worth of CPU work for which tokens are given out."""
    n: int = 0
    moved: int = 0

    def add(self, lane: NDArray[np.int64], duration: NDArray[np.int64]) -> int:
        """Append operations; returns the index of the first."""
        self.lane.append(lane)
        self.duration.append(duration)
        self.n += lane.size
        return self.n - lane.size

    def move(self, offset: int) -> None:
        """Put what was appended since the last call on the lanes of another host: `offset` more, FREE stays."""
        self.lane[self.moved :] = [np.where(lane >= 0, lane + offset, lane) for lane in self.lane[self.moved :]]
        self.moved = len(self.lane)

    def link(self, src: NDArray[np.int64], dst: NDArray[np.int64], lag: NDArray[np.int64] | None = None) -> None:
        """Append edges."""
        self.src.append(src)
        self.dst.append(dst)
        self.lag.append(np.zeros(src.size, np.int64) if lag is None else lag)


@dataclass(frozen=True, slots=True, eq=False)
class Occupancy:
    """What compute does with the cores of its host, [ranks] each, as shares of its duration."""

    busy: NDArray[np.float64]
    """The training thread occupies a core."""

    waiting: NDArray[np.float64]
    """It was ready to run and had none; contention makes such waits anew."""

    beside: NDArray[np.float64]
    """Cores that other threads of the rank occupy meanwhile (those of torch's kernels)."""


def unroll(
    recording: Recording,
    loading: tuple[Loading, ...],
    *,
    segment_ns: tuple[NDArray[np.float64], ...],
    occupancy: Occupancy,
    contention: Contention,
    shared_storage: bool,
    horizon_ns: float,
    accelerator: float = 1.0,
) -> Unrolled:
    """Build the operations.

    `loading` and `segment_ns` ([m] durations after the edits) are per rank.
    Other load competes until `horizon_ns`; devices that were seen are
    `accelerator` times as fast.
    """
    wanted = [
        int(busy > 0 or (part.workers == 0).any()) + math.ceil(beside) + int(part.workers.max(initial=0))
        for busy, beside, part in zip(occupancy.busy, occupancy.beside, loading, strict=True)
    ]
    threads = np.bincount(recording.host, weights=wanted).max()
    bound = contention.bound and threads > contention.limit
    ops = _Ops(
        quantum=QUANTUM_NS if bound or threads + contention.rivals > contention.cores else 0,
        limit=contention.limit if bound else float("inf"),
    )
    first, last = [], []
    for index, lane in enumerate(recording.lanes):
        parts, lanes = _segment_parts(recording, index, loading[index], segment_ns[index], occupancy, shared_storage)
        begin, end = _chain(ops, parts, lanes, keep=2)
        ops.link(end[:-1], begin[1:])
        first.append(begin)
        last.append(end)
        threads = pool_threads(float(occupancy.beside[index]))
        had, has = (int(part.workers.max(initial=0)) for part in (recording.batches[index], loading[index]))
        stall = standstill(threads, 0 if had else has, contention.cores)
        compute_ns = parts[:, 1] * ON_THREAD[lane.label]
        _beside(ops, lane, compute_ns, float(occupancy.beside[index]), begin, end, stalls=stall > 0)
        _workers(ops, recording, index, loading[index], begin, end, shared_storage, stall=stall)
        work = recording.devices[index]
        if work is not None:
            _device(ops, work, begin, end, accelerator)
        assert begin.size == lane.label.size
        ops.move(HOST_LANES * int(recording.host[index]))
    _meet(ops, recording, first, last)
    _exchange(ops, recording, first, last)
    for host in range(int(recording.host.max()) + 1):
        _others(ops, contention, horizon_ns)
        ops.move(HOST_LANES * host)
    dag = Dag.from_edges(
        ops.n,
        np.concatenate(ops.src),
        np.concatenate(ops.dst),
        lane=np.concatenate(ops.lane),
        lag_ns=np.concatenate(ops.lag),
        lane_order=False,
    )
    step_op = np.array([end[last_of_steps(lane)] for end, lane in zip(last, recording.lanes, strict=True)])
    capacity = np.tile([contention.cores, 1, 1, 1], int(recording.host.max()) + 1)
    return Unrolled(dag, np.concatenate(ops.duration), capacity, step_op, tuple(last))


def _others(ops: _Ops, contention: Contention, horizon_ns: float) -> None:
    """Append the threads that queue for the cores beside the job's own; no token is theirs, their work comes cut."""
    ops.quantum, ops.limit = 0, float("inf")
    for cycles in rival_cycles(contention, horizon_ns, QUANTUM_NS):
        begin, end = _chain(ops, cycles, np.tile(np.array([CORES, FREE]), (len(cycles), 1)), keep=0)
        ops.link(end[:-1], begin[1:])


def pool_threads(cores: float) -> int:
    """Return how many threads share an operator, if others than the training thread occupy `cores` meanwhile.

    >>> pool_threads(0.05), pool_threads(0.9)
    (1, 2)
    """
    return 1 + max(0, math.ceil(cores - LEAST_BESIDE))


def standstill(threads: int, workers: int, cores: int) -> float:
    """Return how long torch's `threads` stand still per ns that one of new `workers` computes; 0 where all have a core.

    An operator that is shared among n threads ends when the last of them has had a core. With W workers that compute, a
    thread has a core for a share s = cores / (n + W) of the time, and while one of the n has none, the others spin:

        core 0   train  train  spin   spin   train       2 cores, n = 2, W = 1: in 3 quanta of each core
        core 1   pool   pool   worker worker pool        the worker gets 2, and the operators 1 of them

    So each ns of the W workers' CPU time, of which W s are served at once, is one of standstill over W s: nothing is
    won by making batches beside such operators. A run that had workers has these waits in what it recorded.

    >>> standstill(2, 1, 2), standstill(1, 1, 2), standstill(2, 1, 4)
    (1.0, 0.0, 0.0)
    """
    if threads == 1 or not workers or threads + workers <= cores:
        return 0.0
    return min(1.0, (threads + workers) / (workers * cores))


def _beside(
    ops: _Ops,
    lane: Lane,
    compute_ns: NDArray[np.float64],
    cores: float,
    begin: NDArray[np.int64],
    end: NDArray[np.int64],
    *,
    stalls: bool,
) -> None:
    """Append the threads that compute beside the training thread: each of its kernels ends when the last one has.

    Where workers make all of them stand still (`stalls`) one lane is theirs and the workers'.
    """
    count = pool_threads(cores) - 1
    which = np.flatnonzero(compute_ns > 0)
    if count <= 0 or not which.size:
        return
    parts = compute_ns[which, None] * min(1.0, cores / count)
    for _ in range(1 if stalls else count):
        side_begin, side_end = _chain(ops, parts, np.full(parts.shape, POOLS if stalls else CORES, np.int64), keep=0)
        after = which > 0
        ops.link(end[which[after] - 1], side_begin[after])
        before = which < lane.label.size - 1
        ops.link(side_end[before], begin[which[before] + 1])


def _segment_parts(
    recording: Recording,
    index: int,
    loading: Loading,
    segment_ns: NDArray[np.float64],
    occupancy: Occupancy,
    shared_storage: bool,
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return [m, 3] durations (blocked before, on a core, blocked after) of each segment, and their lanes."""
    lane, batches = recording.lanes[index], recording.batches[index]
    computes = ON_THREAD[lane.label]
    core_share = np.where(computes, occupancy.busy[index], ON_CORE[lane.label].astype(np.float64))
    free_share = 1 - core_share - np.where(computes, occupancy.waiting[index], 0.0)
    parts = np.zeros((lane.label.size, 3))
    parts[:, 1] = segment_ns * core_share
    parts[:, 2] = segment_ns * np.maximum(free_share, 0.0)
    lanes = np.full(parts.shape, FREE, np.int64)
    lanes[:, 1] = CORES
    # What a call for a batch costs is known better than by its duration, all of it in the call's last segment.
    called = np.isin(lane.row, lane.row[batches.segment]) & (lane.row >= 0)
    parts[called] = 0
    inline = loading.workers[batches.iterator] == 0
    parts[batches.segment, 0] = np.where(inline, loading.fetch_ns, 0)
    parts[batches.segment, 1] = np.where(inline, loading.cpu_ns, 0) + loading.take_ns
    parts[batches.segment, 2] = np.where(inline, loading.waiting_ns, 0) + loading.late_ns
    if shared_storage:
        lanes[batches.segment, 0] = STORAGE
    for segments, turn_ns in ((batches.iter_segment, loading.iter_ns), (batches.end_segment, loading.stop_ns)):
        seen = segments >= 0
        parts[segments[seen]] = 0
        parts[segments[seen], 2] = turn_ns[seen]
    return parts, lanes


def _chain(
    ops: _Ops, parts: NDArray[np.float64], lanes: NDArray[np.int64], *, keep: int, stall: float = 0.0
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Append rows of parts, each row a chain of operations; return [m] their first and last operation.

    Empty parts are left out, but for column `keep` of rows that would be empty. `stall` as `standstill` returns it.
    """
    used = parts > 0
    used[~used.any(axis=1), keep] = True
    flat, lane = parts[used], lanes[used]
    row = np.nonzero(used)[0]
    copies = np.ones(flat.size, np.int64)
    if ops.quantum:
        on_core = (lane == CORES) | (lane == POOLS)
        copies[on_core] = np.clip(np.ceil(flat[on_core] / ops.quantum), 1, MAX_QUANTA)
    row, lane = np.repeat(row, copies), np.repeat(lane, copies)
    # Rounding the running sum, not each operation, keeps the total of every rank exact to 1 ns.
    total = np.cumsum(np.repeat(flat / copies, copies))
    duration = np.diff(np.rint(total), prepend=0.0).astype(np.int64)
    base = ops.add(lane, duration)
    begin = np.searchsorted(row, np.arange(parts.shape[0])) + base
    end = np.searchsorted(row, np.arange(parts.shape[0]), side="right") - 1 + base
    inner = np.flatnonzero(row[1:] == row[:-1]) + base
    if not stall and math.isinf(ops.limit):
        ops.link(inner, inner + 1)
        return begin, end
    return _with_tokens(ops, base, lane, duration, inner, (begin, end), stall)


def _with_tokens(
    ops: _Ops,
    base: int,
    lane: NDArray[np.int64],
    duration: NDArray[np.int64],
    inner: NDArray[np.int64],
    ends: tuple[NDArray[np.int64], NDArray[np.int64]],
    stall: float,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Put each operation between two points, and beside those on cores a token: both begin and end together.

    point --- operation --- point (of the next one in its row, or the end of the row)
      `------- token ---------'

    A token of the job's bound, where it has one, and one of `stall` times the operation where pools stand still.
    """
    begin, end = ends
    count = lane.size
    before = ops.add(np.full(count, FREE, np.int64), np.zeros(count, np.int64))
    after = ops.add(np.full(count, FREE, np.int64), np.zeros(count, np.int64))
    # Operation base + i lies between the points before + i and after + i; token + t is the token of worked[t]. Tokens
    # take duration / limit on a lane with one place, so that work is done at `limit` cores' worth at most. A token is
    # due at the end of the piece that is BURST pieces later.
    each = np.arange(count)
    ops.link(before + each, base + each)
    ops.link(base + each, after + each)
    ops.link(after + inner - base, before + inner + 1 - base)
    worked = np.flatnonzero(lane == CORES)
    tokens = [(POOLS, duration[worked] * stall, 0)] if stall else []
    tokens += [] if math.isinf(ops.limit) else [(TOKENS, duration[worked] / ops.limit, BURST)]
    for on, length, later in tokens:
        token = ops.add(np.full(worked.size, on, np.int64), np.rint(length).astype(np.int64))
        ops.link(before + worked, token + np.arange(worked.size))
        ops.link(token + np.arange(worked[later:].size), after + worked[later:])
    return before + begin - base, after + end - base


def _workers(
    ops: _Ops,
    recording: Recording,
    index: int,
    loading: Loading,
    begin: NDArray[np.int64],
    end: NDArray[np.int64],
    shared_storage: bool,
    *,
    stall: float,
) -> None:
    """Append the loads that workers do, and the edges that hold them: turns, queue bounds, hand-off."""
    batches = recording.batches[index]
    mine = np.flatnonzero(loading.workers[batches.iterator] > 0)
    if not mine.size:
        return
    fetch_lane = STORAGE if shared_storage else FREE
    parts = np.stack([loading.fetch_ns[mine], loading.waiting_ns[mine], loading.cpu_ns[mine]], axis=1)
    lanes = np.tile(np.array([fetch_lane, FREE, CORES]), (mine.size, 1))
    load_begin, load_end = _chain(ops, parts, lanes, keep=2, stall=stall)
    sent, send_ns = load_end, loading.send_ns[mine, None]
    if send_ns.any():
        send_begin, sent = _chain(ops, send_ns, np.full(send_ns.shape, CORES, np.int64), keep=0, stall=stall)
        ops.link(load_end, send_begin)
    ops.link(sent, begin[batches.segment[mine]], np.rint(loading.handoff_ns[mine]).astype(np.int64))
    # Of W workers, the one that makes batch k has made batch k - W. It learns of k when batch k - bound is taken, bound
    # = W x prefetch; of the first `bound` batches when the pass begins (`before` is the segment that ends then).
    for which in np.unique(batches.iterator[mine]):
        own = np.flatnonzero(batches.iterator[mine] == which)
        workers, bound = int(loading.workers[which]), int(loading.workers[which] * loading.prefetch[which])
        between = np.rint(loading.between_ns[mine[own[workers:]]]).astype(np.int64)
        ops.link(load_end[own[:-workers]], load_begin[own[workers:]], between)
        ops.link(end[batches.segment[mine[own[:-bound]]]], load_begin[own[bound:]])
        created = int(batches.iter_segment[which])
        before = created if created >= 0 else int(batches.segment[mine[own[0]]]) - 1
        if before >= 0:
            starts = own[:bound]
            lag = np.full(starts.size, round(loading.first_ns[which]), np.int64)
            ops.link(np.full(starts.size, end[before]), load_begin[starts], lag)


def _device(ops: _Ops, work: DeviceWork, begin: NDArray[np.int64], end: NDArray[np.int64], accelerator: float) -> None:
    """Append what a device does beside its training thread, and the edges by which each holds up the other."""
    total = np.cumsum(work.duration_ns / accelerator)
    base = ops.add(np.full(total.size, FREE, np.int64), np.diff(np.rint(total), prepend=0.0).astype(np.int64))
    done = ops.add(np.full(total.size, FREE, np.int64), np.zeros(total.size, np.int64))
    each = np.arange(total.size)
    ops.link(base + each, done + each)
    ops.link(done + each[:-1], base + each[1:])
    launched = work.after_segment >= 0
    ops.link(end[work.after_segment[launched]], base + each[launched])
    ops.link(end[work.launched_segment], done + each)
    # The host goes on when so much of its work is left as the queue holds.
    left = total - work.ahead_ns / accelerator
    by = np.searchsorted(total, left, side="right") - 1
    held = np.flatnonzero((work.ahead_ns > 0) & (by >= 0) & (work.launched_segment + 1 < begin.size))
    lag = np.rint(left[held] - total[by[held]]).astype(np.int64)
    ops.link(done + by[held], begin[work.launched_segment[held] + 1], lag)
    freed = np.flatnonzero(work.freed_segment >= 0)
    ops.link(done + freed, begin[work.freed_segment[freed]])
    # Where it waits, for all that it had launched by then.
    last = np.searchsorted(work.launched_segment, work.waits, side="left") - 1
    ops.link(done + last[last >= 0], begin[work.waits[last >= 0]])


def _meet(ops: _Ops, recording: Recording, first: list[NDArray[np.int64]], last: list[NDArray[np.int64]]) -> None:
    """Append a point at which the ranks of each collective have all come."""
    if not recording.meetings:
        return
    count = np.array([meeting.segment.size for meeting in recording.meetings])
    rank = np.concatenate([meeting.rank_index for meeting in recording.meetings])
    segment = np.concatenate([meeting.segment for meeting in recording.meetings])
    base = ops.add(np.full(count.size, FREE, np.int64), np.zeros(count.size, np.int64))
    point = np.repeat(np.arange(count.size), count) + base
    for index in range(len(first)):
        mine = rank == index
        ops.link(point[mine], first[index][segment[mine]])
        came = mine & (segment > 0)
        ops.link(last[index][segment[came] - 1], point[came])


def _exchange(ops: _Ops, recording: Recording, first: list[NDArray[np.int64]], last: list[NDArray[np.int64]]) -> None:
    """Append a point at which the ends of each message have been posted."""
    messages = recording.messages
    if not messages.point.size:
        return
    count = int(messages.point.max()) + 1
    point = messages.point + ops.add(np.full(count, FREE, np.int64), np.zeros(count, np.int64))
    for index in range(len(first)):
        mine = messages.rank_index == index
        waits, posts = mine & messages.waits, mine & (messages.post > 0)
        ops.link(point[waits], first[index][messages.segment[waits]])
        ops.link(last[index][messages.post[posts] - 1], point[posts])
