"""A recorded run, unrolled into operations with an order: what `program` replays.

Every segment of a training thread and every load becomes operations; cores
are a lane with as many places as the host has usable cores, shared storage is
a lane with one place, all else is bounded by its edges only. Long CPU work is
cut into quanta, as the scheduler of an operating system shares cores. Times
are ns; the Dag is for `greedy`.

>>> [LABELS[code] for code in np.flatnonzero(COMPUTE)]
['compute', 'optimizer.step']
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headway.core.units import NS_PER_MS
from headway.sim.dag import Dag
from headway.sim.edits import Scenario
from headway.sim.greedy import greedy
from headway.sim.loader_model import Costs, Loading
from headway.sim.recording import LABEL, LABELS, Lane, Recording

QUANTUM_NS = 5 * NS_PER_MS
"""CPU work is cut into quanta of this length where more threads want cores than there are."""

MAX_QUANTA = 16
"""Into how many at most: longer work gets longer quanta."""

CORES, STORAGE, FREE = 0, 1, -1
"""Lanes of the first host, those of host h are 2 h more; operations on FREE are bounded by their edges only."""

COMPUTE = np.isin(LABELS, ["compute", "optimizer.step"])
"""[LABELS] What the accelerator does."""

COMM = np.array([label.startswith("comm.") for label in LABELS])
"""[LABELS] Communication."""

ON_CORE = np.isin(LABELS, ["host.gc", "input.next"])
"""[LABELS] What surely occupies a core of the host, compute aside."""


@dataclass(frozen=True, slots=True, eq=False)
class Unrolled:
    """Operations of all ranks, and where their steps end."""

    dag: Dag
    """The order."""

    duration_ns: NDArray[np.int64]
    """[n] How long each takes."""

    capacity: NDArray[np.int64]
    """[2 x hosts] Places on CORES and STORAGE of each host."""

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


def unroll(
    recording: Recording,
    loading: tuple[Loading, ...],
    *,
    segment_ns: tuple[NDArray[np.float64], ...],
    busy: NDArray[np.float64],
    cores: int,
    shared_storage: bool,
) -> Unrolled:
    """Build the operations.

    `loading` and `segment_ns` ([m] durations after the edits) are per rank;
    `busy` [ranks] is the share of compute that occupies a core of the host.
    """
    ops = _Ops()
    threads = [int(share > 0) + int(part.workers.max(initial=0)) for share, part in zip(busy, loading, strict=True)]
    quantum = QUANTUM_NS if np.bincount(recording.host, weights=threads).max() > cores else 0
    first, last = [], []
    for index, lane in enumerate(recording.lanes):
        parts, lanes = _segment_parts(recording, index, loading[index], segment_ns[index], busy[index], shared_storage)
        begin, end = _chain(ops, parts, lanes, quantum, keep=2)
        ops.link(end[:-1], begin[1:])
        first.append(begin)
        last.append(end)
        _workers(ops, recording, index, loading[index], begin, end, quantum, shared_storage)
        assert begin.size == lane.label.size
        ops.move(2 * int(recording.host[index]))
    _meet(ops, recording, first, last)
    dag = Dag.from_edges(
        ops.n,
        np.concatenate(ops.src),
        np.concatenate(ops.dst),
        lane=np.concatenate(ops.lane),
        lag_ns=np.concatenate(ops.lag),
        lane_order=False,
    )
    step_op = np.array([end[_last_of_steps(lane)] for end, lane in zip(last, recording.lanes, strict=True)])
    return Unrolled(
        dag, np.concatenate(ops.duration), np.tile([cores, 1], int(recording.host.max()) + 1), step_op, tuple(last)
    )


def _last_of_steps(lane: Lane) -> NDArray[np.int64]:
    """Return [k] the last segment of each step."""
    return np.searchsorted(lane.step, np.arange(lane.step_end_ns.size - 1), side="right") - 1


def _segment_parts(
    recording: Recording,
    index: int,
    loading: Loading,
    segment_ns: NDArray[np.float64],
    busy: float,
    shared_storage: bool,
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return [m, 3] durations (blocked before, on a core, blocked after) of each segment, and their lanes."""
    lane, batches = recording.lanes[index], recording.batches[index]
    core_share = np.where(COMPUTE[lane.label], busy, ON_CORE[lane.label].astype(np.float64))
    parts = np.zeros((lane.label.size, 3))
    parts[:, 1] = segment_ns * core_share
    parts[:, 2] = segment_ns * (1 - core_share)
    lanes = np.full(parts.shape, FREE, np.int64)
    lanes[:, 1] = CORES
    # What a call for a batch costs is known better than by its duration, all of it in the call's last segment.
    called = np.isin(lane.row, lane.row[batches.segment]) & (lane.row >= 0)
    parts[called] = 0
    inline = loading.workers[batches.iterator] == 0
    parts[batches.segment, 0] = np.where(inline, loading.fetch_ns, 0)
    parts[batches.segment, 1] = np.where(inline, loading.cpu_ns, 0) + loading.take_ns
    if shared_storage:
        lanes[batches.segment, 0] = STORAGE
    for segments, turn_ns in ((batches.iter_segment, loading.iter_ns), (batches.end_segment, loading.stop_ns)):
        seen = segments >= 0
        parts[segments[seen]] = 0
        parts[segments[seen], 2] = turn_ns[seen]
    return parts, lanes


def _chain(
    ops: _Ops, parts: NDArray[np.float64], lanes: NDArray[np.int64], quantum: int, *, keep: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Append rows of parts, each row a chain of operations; return [m] their first and last operation.

    Empty parts are left out, but for column `keep` of rows that would be empty.
    """
    used = parts > 0
    used[~used.any(axis=1), keep] = True
    flat, lane = parts[used], lanes[used]
    row = np.nonzero(used)[0]
    copies = np.ones(flat.size, np.int64)
    if quantum:
        on_core = lane == CORES
        copies[on_core] = np.clip(np.ceil(flat[on_core] / quantum), 1, MAX_QUANTA)
    row = np.repeat(row, copies)
    # Rounding the running sum, not each operation, keeps the total of every rank exact to 1 ns.
    total = np.cumsum(np.repeat(flat / copies, copies))
    duration = np.diff(np.rint(total), prepend=0.0).astype(np.int64)
    base = ops.add(np.repeat(lane, copies), duration)
    begin = np.searchsorted(row, np.arange(parts.shape[0])) + base
    end = np.searchsorted(row, np.arange(parts.shape[0]), side="right") - 1 + base
    inner = np.flatnonzero(row[1:] == row[:-1]) + base
    ops.link(inner, inner + 1)
    return begin, end


def _workers(
    ops: _Ops,
    recording: Recording,
    index: int,
    loading: Loading,
    begin: NDArray[np.int64],
    end: NDArray[np.int64],
    quantum: int,
    shared_storage: bool,
) -> None:
    """Append the loads that workers do, and the edges that hold them: turns, queue bounds, hand-off."""
    batches = recording.batches[index]
    mine = np.flatnonzero(loading.workers[batches.iterator] > 0)
    if not mine.size:
        return
    fetch_lane = STORAGE if shared_storage else FREE
    parts = np.stack([loading.fetch_ns[mine], loading.cpu_ns[mine]], axis=1)
    lanes = np.tile(np.array([fetch_lane, CORES]), (mine.size, 1))
    load_begin, load_end = _chain(ops, parts, lanes, quantum, keep=1)
    ops.link(load_end, begin[batches.segment[mine]], np.rint(loading.handoff_ns[mine]).astype(np.int64))
    for which in np.unique(batches.iterator[mine]):
        own = np.flatnonzero(batches.iterator[mine] == which)
        workers, bound = int(loading.workers[which]), int(loading.workers[which] * loading.prefetch[which])
        ops.link(load_end[own[:-workers]], load_begin[own[workers:]])
        ops.link(end[batches.segment[mine[own[:-bound]]]], load_begin[own[bound:]])
        created = int(batches.iter_segment[which])
        before = created if created >= 0 else int(batches.segment[mine[own[0]]]) - 1
        if before >= 0:
            starts = own[:bound]
            lag = np.full(starts.size, round(loading.first_ns[which]), np.int64)
            ops.link(np.full(starts.size, end[before]), load_begin[starts], lag)


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


def edited_segments(
    recording: Recording, scenario: Scenario, costs: Costs, *, whole: bool = True
) -> tuple[NDArray[np.float64], ...]:
    """Return, per rank, [m] durations of the segments after the edits; collectives keep their own time only.

    `whole` scales what is rare to its rate over the whole run, where only a part of it is replayed.
    """
    own = _own_comm(recording)
    factor = np.array([scenario.factor(label) for label in LABELS])
    factor[COMPUTE] /= scenario.accelerator
    factor[COMM] /= scenario.bandwidth
    factor[LABEL["input.transfer"]] *= scenario.transfer
    pace = straggler_pace(recording, scenario.straggler)
    result = []
    for index, lane in enumerate(recording.lanes):
        duration = own[index] * factor[lane.label]
        if whole:
            duration *= recording.cut_factor[index][lane.label]
        duration = np.where(COMPUTE[lane.label], duration * pace[index, lane.step], duration)
        if scenario.buffered_logging:
            logs = lane.label == LABEL["host.logging"]
            duration[logs] = np.minimum(duration[logs], costs.log_ns)
        if scenario.gc_every is not None:
            duration[lane.label == LABEL["host.gc"]] = 0
            # Each rank pays for its own collection at the same step, so nobody waits for another's.
            at = _last_of_steps(lane)[scenario.gc_every - 1 :: scenario.gc_every]
            duration[at] += costs.collect_ns
        result.append(duration)
    return tuple(result)


def _own_comm(recording: Recording) -> list[NDArray[np.float64]]:
    """Return, per rank, [m] durations in which a collective over ranks counts from the last arrival only."""
    own = [lane.duration_ns.astype(np.float64) for lane in recording.lanes]
    for meeting in recording.meetings:
        for index, segment, own_ns in zip(meeting.rank_index, meeting.segment, meeting.own_ns, strict=True):
            row = recording.lanes[index].row
            at = int(segment)
            while at >= 0 and row[at] == row[segment]:
                own[index][at] = 0.0
                at -= 1
            own[index][segment] = own_ns
    return own


def straggler_pace(recording: Recording, excess: float) -> NDArray[np.float64]:
    """Return [ranks, k] factor on compute that leaves `excess` of what a slow rank, or a slow step of it, has too much.

    The yardstick is the lower median over ranks: a rank whose mean step is
    more than 2 % above it is slow, a step more than 25 % above that of its
    peers is slow.
    """
    num_ranks = len(recording.lanes)
    pace = np.ones((num_ranks, recording.num_steps))
    if num_ranks == 1 or excess == 1.0:
        return pace
    work = np.zeros_like(pace)
    for index, lane in enumerate(recording.lanes):
        compute = COMPUTE[lane.label]
        np.add.at(work[index], lane.step[compute], lane.duration_ns[compute])
    mean = np.median(work, axis=1)
    typical = np.quantile(mean, 0.5, method="lower")
    slow = np.where(mean > 1.02 * typical, typical / np.maximum(mean, 1), 1.0)
    paced = work * slow[:, None]
    cap = 1.25 * np.quantile(paced, 0.5, axis=0, method="lower")
    sudden = np.where(paced > cap, cap / np.maximum(paced, 1), 1.0)
    return np.asarray(1 + (excess - 1) * (1 - slow[:, None] * sudden))
