"""What a recorded run did, rank by rank: the training thread cut into segments, and the batches it consumed.

Use it below `program`: it turns rows (names of `SPANS`) into arrays that can
be replayed (`lane` says what owns an instant that several cover), and what
the device of each rank did beside it. All times are int64 ns on the clock of
the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.sim.pipeline.actions import StageGraph
from headway.sim.recorded.core_use import cores_used
from headway.sim.recorded.lane import GARBAGE, LABEL, LABELS, ON_THREAD, PRIORITY, DeviceWork, Lane
from headway.sim.recorded.stage_work import MessagePoints, StageWork, cuts_of
from headway.trace.events.intervals import enclosing, sweep
from headway.trace.events.parts import Parts
from headway.trace.events.trace import Trace
from headway.trace.events.vocabulary import GC_CALLED, READ_AGAIN
from headway.trace.recording.gaps import steps_before_slowing, without_pauses

Events = Mapping[str, NDArray[Any]]
"""Columns of a trace."""

LOAD_PARTS: tuple[str, ...] = ("input.fetch", "input.cpu_wait", "input.prep", "input.collate")
"""Children of input.load, in the order in which they partition it."""


@dataclass(frozen=True, slots=True, eq=False)
class ConsumedBatches:
    """The `b` batches that one rank consumed, in that order, and what loading each of them took."""

    segment: NDArray[np.int64]
    """[b] Segment of the training thread that ends when the batch is there."""

    iterator: NDArray[np.int64]
    """[b] Which pass over a loader it belongs to (index into the four arrays below)."""

    seq: NDArray[np.int64]
    """[b] n-th batch of that pass."""

    start_ns: NDArray[np.int64]
    """[b] When next(loader) was called."""

    end_ns: NDArray[np.int64]
    """[b] When it returned."""

    load_start_ns: NDArray[np.int64]
    """[b] When its loading began; -1 when that was not recorded."""

    load_ns: NDArray[np.int64]
    """[b] Wall time of loading."""

    part_ns: NDArray[np.int64]
    """[b, 4] The load split into `LOAD_PARTS`."""

    bytes: NDArray[np.int64]
    """[b] Size of the batch."""

    group: NDArray[np.int64]
    """[i] Loader of each pass."""

    workers: NDArray[np.int64]
    """[i] Workers of each pass, as recorded."""

    epoch: NDArray[np.int64]
    """[i] n-th pass over that loader."""

    iter_segment: NDArray[np.int64]
    """[i] Segment in which the iterator was created, -1 if that lies before step 0 or was not recorded."""

    end_segment: NDArray[np.int64]
    """[i] Segment in which next(loader) found the pass at its end (workers that do not persist end there), or -1."""

    together: NDArray[np.bool_]
    """[i] Whether threads made each batch together: its load is the sum of their times, and ended when it did."""


@dataclass(frozen=True, slots=True, eq=False)
class MatchedCollective:
    """One collective over ranks: who took part, and how long it went on after the last one had come."""

    rank_index: NDArray[np.int64]
    """[p] Index of the rank's `Lane`."""

    segment: NDArray[np.int64]
    """[p] Its segment."""

    own_ns: NDArray[np.int64]
    """[p] From the last arrival to the end at that rank."""


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """All ranks of a run, over the steps that every rank completed."""

    lanes: tuple[Lane, ...]
    """One per rank, in rank order."""

    batches: tuple[ConsumedBatches, ...]
    """One per rank."""

    meetings: tuple[MatchedCollective, ...]
    """Collectives in which at least two ranks were seen."""

    num_steps: int
    """Steps that are kept."""

    recorded_steps: int
    """Steps that say what the job takes; more than `num_steps` when the run is long."""

    job_steps: int
    """Steps that the run completed, those too that a profiler slowed."""

    cut_factor: NDArray[np.float64]
    """[ranks, LABELS] Time per step over all recorded steps / over the kept ones; 1 when all are kept."""

    busy: NDArray[np.float64]
    """[ranks] Share of compute during which the training thread occupied a core; NaN where that was not recorded."""

    waiting: NDArray[np.float64]
    """[ranks] Share of compute during which it was ready to run but had no core; 0 = none, or not recorded."""

    beside: NDArray[np.float64]
    """[ranks] Cores that other threads of the rank occupied during compute; 0 where that was not recorded."""

    host: NDArray[np.int64]
    """[ranks] Index of the rank's host; ranks of one host share its cores."""

    last_end_ns: NDArray[np.int64]
    """[ranks] End of the last step that the run completed."""

    devices: tuple[DeviceWork | None, ...]
    """[ranks] What the device of each did; None where it was not seen, or is the training thread itself."""

    messages: MessagePoints
    """Sends and receives between two ranks."""

    stages: tuple[StageWork | None, ...]
    """[ranks] What the pipeline stages of each computed; None where none was recorded."""

    stage_graph: StageGraph | None
    """Which stages feed which, where they are no chain; None: each feeds the next one."""

    @classmethod
    def from_trace(cls, source: Trace | Parts, *, max_steps: int) -> Recording:
        """Cut a finalised run into segments; keep the first `max_steps` steps.

        Of parts the rows of one rank are in memory at a time, and of all ranks those of the kept steps.
        Raises `InputError` when no rank has a complete step, or its steps took no time.
        """
        parts = Parts.of(source)
        counts = _count_steps(parts)
        ranks = list(counts)
        if not ranks:
            raise InputError(
                "the run has no complete step: nothing to replay. Record a run that takes at least one training step."
            )
        # Steps that a profiler slowed say nothing of the job without it.
        own_rows = parts.read({"rank": (ranks[0], ranks[0] + 1)}, ("name", "start_ns", "duration_ns"))
        recorded = min(*counts.values(), steps_before_slowing(own_rows) or min(counts.values()))
        kept = min(recorded, max_steps)
        own, lanes, batches, cut, seen, last, used, devices, stages = [], [], [], [], [], [], [], [], []
        for rank in ranks:
            rows = without_pauses(parts.read({"rank": (rank, rank + 1)}))
            # In order of start, outer spans first.
            rows = rows.where(np.lexsort((-rows.events["duration_ns"], rows.events["start_ns"])))
            lanes.append(_lane(rows, rank, kept))
            own.append(rows.where(np.arange(np.searchsorted(rows.events["start_ns"], lanes[-1].step_end_ns[-1]))))
            batches.append(_batches(own[-1], lanes[-1]))
            mean = _mean_ns(rows, kept)
            cut.append(_mean_ns(rows, recorded) / np.maximum(mean, 1e-9))
            seen.append(mean > 0)
            last.append(_step_ends(rows, recorded)[-1])
            used.append(cores_used(rows, lanes[-1], batches[-1], ON_THREAD, GARBAGE))
            devices.append(DeviceWork.of(rows, lanes[-1], used[-1][0]))
            stages.append(StageWork.of(own[-1], lanes[-1]))
        busy, waiting, beside = np.array(used).T
        # Beside a device, compute is launches: one more thread launches those of backward. What other threads took is
        # that of loads in the training thread, whose kernels wait for each other on all cores.
        beside = np.where([device is not None for device in devices], np.minimum(beside, 1.0), beside)
        return cls(
            tuple(lanes),
            tuple(batches),
            _meetings(own, tuple(lanes)),
            kept,
            recorded,
            min(counts.values()),
            np.where(np.array(seen), np.array(cut), 1.0),
            busy,
            waiting,
            beside,
            _hosts(parts.ranks, ranks),
            np.array(last, dtype=np.int64),
            tuple(devices),
            MessagePoints.of(own, lanes),
            tuple(stages),
            _stage_graph(parts),
        )


def _stage_graph(parts: Parts) -> StageGraph | None:
    """Return the graph of the stages of a runner; None where it is a chain, or the ranks do not agree on one."""
    tables = [row["pipeline"].get("preds") for row in parts.ranks.values() if "pipeline" in row]
    if not tables or tables[0] is None or any(preds != tables[0] for preds in tables):
        return None
    graph = StageGraph(tuple(map(tuple, tables[0])))
    return None if graph == StageGraph.chain(len(graph.preds)) else graph


def _count_steps(parts: Parts) -> dict[int, int]:
    """Return rank -> its rows named 'step', for the ranks that have some."""
    named = (parts.read({"rank": (rank, rank + 1)}, ("name",)) for rank in parts.numbers)
    counts = zip(parts.numbers, (int(part.named("step").sum()) for part in named), strict=True)
    return {rank: count for rank, count in counts if rank >= 0 and count}


def _hosts(known: Mapping[int, Mapping[str, Any]], ranks: list[int]) -> NDArray[np.int64]:
    """Return [ranks] the index of each rank's host; ranks of which nothing is known are taken to share one."""
    names = [str(known.get(rank, {}).get("host", "")) for rank in ranks]
    return np.unique(names, return_inverse=True)[1].astype(np.int64)


def _codes(rows: Trace) -> NDArray[np.int64]:
    """Return [n] the label of each row, -1 for rows that do not occupy the training thread."""
    table = np.array([LABEL.get(name, -1) for name in rows.names] + [-1])
    code = table[rows.events["name"]]
    called = (code == LABEL["host.gc"]) & (rows.events["corr"] >= GC_CALLED)
    code = np.where(called, LABEL["host.collect"], code)
    again = (code == LABEL["host.recording"]) & (rows.events["corr"] == READ_AGAIN)
    code = np.where(again, LABEL["host.rereading"], code)
    main = [index for index, lane in enumerate(rows.lanes) if lane == "main"]
    return np.where(np.isin(rows.events["lane"], main), code, -1)


def _mean_ns(rows: Trace, recorded: int) -> NDArray[np.float64]:
    """Return [LABELS] time per step by label over steps 1..recorded - 1."""
    code, step = _codes(rows), rows.events["step"]
    used = (code >= 0) & (step >= 1) & (step < recorded)
    total = np.bincount(code[used], weights=rows.events["duration_ns"][used], minlength=len(LABELS))
    return np.asarray(total / max(1, recorded - 1))


def _step_ends(rows: Trace, count: int) -> NDArray[np.int64]:
    """Return [count + 1] the start of step 0 and the end of each of the first `count` steps."""
    marks = rows.where(rows.named("step"))
    start, duration = marks.events["start_ns"][:count], marks.events["duration_ns"][:count]
    return np.concatenate([start[:1], start + duration])


def _lane(rows: Trace, rank: int, kept: int) -> Lane:
    """Give every instant of the steps to the strongest span over it, and cut where the owner or the step changes."""
    step_end = _step_ends(rows, kept)
    if step_end[0] == step_end[-1]:
        raise InputError(f"the steps of rank {rank} took no time: nothing to replay. Record a run with steps that do.")
    code = _codes(rows)
    begin, duration = rows.events["start_ns"], rows.events["duration_ns"]
    low, high = int(step_end[0]), int(step_end[-1])
    inside = np.flatnonzero((code >= 0) & (begin < high) & (begin + duration > low))
    level = np.array(list(PRIORITY.values()))[code[inside]]
    cuts = cuts_of(rows)
    pieces = sweep(
        begin[inside], (begin + duration)[inside], level, window=(low, high), cuts=np.concatenate([step_end, cuts])
    )
    owner = np.append(inside, -1)[pieces.row]
    step = np.searchsorted(step_end, pieces.start_ns, side="right") - 1
    # A segment is a run of pieces with one owner in one step, with no cut inside; owner -1 is compute.
    changes = (owner[1:] != owner[:-1]) | (step[1:] != step[:-1]) | np.isin(pieces.start_ns[1:], cuts)
    change = np.flatnonzero(np.concatenate([[True], changes]))
    starts, owners = pieces.start_ns[change], owner[change]
    return Lane(
        rank=rank,
        label=np.where(owners >= 0, code[owners], LABEL["compute"]),
        step=step[change].astype(np.int64),
        start_ns=starts,
        duration_ns=np.diff(starts, append=high),
        row=owners,
        step_end_ns=step_end,
    )


def _batches(rows: Trace, lane: Lane) -> ConsumedBatches:
    """Match every next(loader) of the kept steps with the load of its batch."""
    events = rows.events
    calls = np.flatnonzero(rows.named("input.next") & (events["seq"] >= 0))
    segment = lane.last_segment(calls)
    calls, segment = calls[segment >= 0], segment[segment >= 0]
    made = np.flatnonzero(rows.named("input.iter"))
    keys = np.unique(np.stack([events["group"][calls], events["corr"][calls]], axis=1), axis=0)
    keys = keys[np.argsort([_first(events, calls, key) for key in keys], kind="stable")] if len(keys) else keys
    index_of = {(int(group), int(corr)): index for index, (group, corr) in enumerate(keys)}
    iterator = np.array(
        [index_of[pair] for pair in zip(events["group"][calls].tolist(), events["corr"][calls].tolist(), strict=True)],
        dtype=np.int64,
    )
    created = np.array([_row_of(events, made, key) for key in keys], dtype=np.int64)
    ends = np.flatnonzero(rows.named("input.next") & (events["seq"] < 0))
    ended = np.array([_row_of(events, ends, key) for key in keys], dtype=np.int64)
    # A pass is named by its loader and a running number, so the n-th pass of a loader is its n-th epoch.
    epoch = np.array([int((keys[:index, 0] == key[0]).sum()) for index, key in enumerate(keys)], dtype=np.int64)
    peer = np.array([int(events["peer"][calls[iterator == index]].max()) for index in range(len(keys))], dtype=np.int64)
    workers = np.where(created >= 0, np.maximum(events["peer"][created] if made.size else 0, 0), peer + 1)
    workers = np.where(peer < 0, 0, workers) if len(keys) else workers
    loads = _loads(rows, calls, iterator, keys, workers)
    return ConsumedBatches(
        segment=segment,
        iterator=iterator,
        seq=events["seq"][calls],
        start_ns=events["start_ns"][calls],
        end_ns=events["start_ns"][calls] + events["duration_ns"][calls],
        load_start_ns=np.where(loads >= 0, events["start_ns"][loads], -1),
        load_ns=np.where(loads >= 0, events["duration_ns"][loads], 0),
        part_ns=_parts(rows, loads),
        bytes=np.where(loads >= 0, events["bytes"][loads], 0),
        group=keys[:, 0].astype(np.int64),
        workers=workers.astype(np.int64),
        epoch=epoch,
        iter_segment=np.where(created >= 0, lane.last_segment(np.maximum(created, 0)), -1),
        end_segment=np.where(ended >= 0, lane.last_segment(np.maximum(ended, 0)), -1),
        together=(workers > 0) & ~np.isin(keys[:, 0], events["group"][rows.named("input.worker")]),
    )


def _first(events: Events, calls: NDArray[np.int64], key: NDArray[np.int64]) -> int:
    """Return when the pass `key` was first asked for a batch."""
    mine = (events["group"][calls] == key[0]) & (events["corr"][calls] == key[1])
    return int(events["start_ns"][calls[mine]].min())


def _row_of(events: Events, rows: NDArray[np.int64], key: NDArray[np.int64]) -> int:
    """Return the first of `rows` that belongs to the pass `key`, -1 when none does."""
    mine = rows[(events["group"][rows] == key[0]) & (events["corr"][rows] == key[1])]
    return int(mine[0]) if mine.size else -1


def _loads(
    rows: Trace,
    calls: NDArray[np.int64],
    iterator: NDArray[np.int64],
    keys: NDArray[np.int64],
    workers: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return [b] the input.load row of each batch, -1 when it was not recorded.

    Without workers the load lies inside the call; with workers the n-th batch
    that a pass took from a worker is the n-th load of that worker for this
    pass, or since it began where loads do not name their pass (torch hands
    batches out in turn).
    """
    events = rows.events
    load = np.flatnonzero(rows.named("input.load"))
    found = np.full(calls.size, -1, np.int64)
    for index, (group, corr) in enumerate(keys.tolist()):
        mine = np.flatnonzero(iterator == index)
        own = load[events["group"][load] == group]
        if workers[index] == 0:
            # The call that encloses a load in the main process says whose it is; the load itself need not.
            own = load[(events["peer"][load] < 0) & ((events["group"][load] == group) | (events["group"][load] < 0))]
            place = np.searchsorted(events["start_ns"][own], events["start_ns"][calls[mine]])
            for batch, at in zip(mine.tolist(), place.tolist(), strict=True):
                call = calls[batch]
                if (
                    at < own.size
                    and events["start_ns"][own[at]] < events["start_ns"][call] + events["duration_ns"][call]
                ):
                    found[batch] = own[at]
            continue
        begin, end = _pass_bounds(rows, keys, index, calls, iterator)
        within = (events["start_ns"][own] >= begin) & (events["start_ns"][own] < end)
        own = own[np.where(events["corr"][own] >= 0, events["corr"][own] == corr, within)]
        for worker in range(int(workers[index])):
            taken = mine[events["seq"][calls[mine]] % workers[index] == worker]
            turns = events["seq"][calls[taken]] // workers[index]
            loads = own[events["peer"][own] == worker]
            # Not by start: a batch that several threads made is recorded with the sum of their times.
            nth = events["seq"][loads] - events["seq"][loads].min(initial=np.iinfo(np.int64).max)
            numbers, first = np.unique(nth, return_index=True)
            place = np.searchsorted(numbers, turns)
            known = np.append(numbers, -1)[place] == turns
            found[taken[known]] = loads[first[place[known]]]
    return found


def _pass_bounds(
    rows: Trace, keys: NDArray[np.int64], index: int, calls: NDArray[np.int64], iterator: NDArray[np.int64]
) -> tuple[int, int]:
    """Return from when to when workers load for pass `index`: its creation to that of the next pass of the loader."""
    events, made = rows.events, np.flatnonzero(rows.named("input.iter"))
    same = made[events["group"][made] == keys[index, 0]]
    row = _row_of(events, made, keys[index])
    begin = int(events["start_ns"][row]) if row >= 0 else 0
    later = events["start_ns"][same]
    later = later[later > max(begin, int(events["start_ns"][calls[iterator == index]].min()))]
    return begin, int(later.min()) if later.size else np.iinfo(np.int64).max


def _parts(rows: Trace, loads: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return [b, 4] the children of each load; loads without children get the average split of those that have them."""
    events = rows.events
    parts = np.zeros((len(rows), len(LOAD_PARTS)), np.int64)
    load = np.flatnonzero(rows.named("input.load"))
    for column, name in enumerate(LOAD_PARTS):
        child = np.flatnonzero(rows.named(name))
        # Workers of several loaders, or of two passes of one, may share a lane while they overlap; so may two batches
        # that the same threads made.
        outer, inner = (
            np.stack([events[key][some] for key in ("lane", "group", "corr", "seq")], axis=1).astype(np.int64)
            for some in (load, child)
        )
        place = enclosing(outer, events["start_ns"][load], inner, events["start_ns"][child])
        np.add.at(parts[:, column], load[place[place >= 0]], events["duration_ns"][child[place >= 0]])
    split = np.where((loads >= 0)[:, None], parts[loads], 0) if loads.size else np.zeros((0, 4), np.int64)
    duration = np.where(loads >= 0, events["duration_ns"][loads], 0) if loads.size else np.zeros(0, np.int64)
    bare = (split.sum(axis=1) == 0) & (duration > 0)
    total = split.sum(axis=0)
    share = total / total.sum() if total.sum() else np.array([0.0, 0.0, 1.0, 0.0])
    split[bare] = (duration[bare, None] * share).astype(np.int64)
    return split


def _meetings(own: list[Trace], lanes: tuple[Lane, ...]) -> tuple[MatchedCollective, ...]:
    """Join collectives over ranks by (name, group, seq)."""
    found = []
    for index, (rows, lane) in enumerate(zip(own, lanes, strict=True)):
        events = rows.events
        for which, name in enumerate(("comm.wait", "comm.collective")):
            row = np.flatnonzero(rows.named(name) & (events["seq"] >= 0))
            segment = lane.last_segment(row)
            row, segment = row[segment >= 0], segment[segment >= 0]
            start = events["start_ns"][row]
            # Columns: name, group, seq (one collective has equal ones), segment, start, end, index of the rank.
            columns = [events["group"][row], events["seq"][row], segment, start, start + events["duration_ns"][row]]
            found.append(np.stack([np.full(row.size, which), *columns, np.full(row.size, index)], axis=1))
    table = np.concatenate(found) if found else np.zeros((0, 7), np.int64)
    table = table[np.lexsort((table[:, 6], table[:, 2], table[:, 1], table[:, 0]))]
    cut = np.flatnonzero((np.diff(table[:, :3], axis=0) != 0).any(axis=1)) + 1
    # A collective's own time is what is left after the last arrival.
    return tuple(
        MatchedCollective(part[:, 6], part[:, 3], np.maximum(part[:, 5] - part[:, 4].max(), 0))
        for part in np.split(table, cut)
        if len(part) > 1
    )


def first_steady(recording: Recording) -> int:
    """Return the first step that counts: step 0 never does, nor the start-up transient that follows it."""
    compute = np.zeros(recording.num_steps)
    for lane in recording.lanes:
        compute += lane.compute_ns()
    warm, most = 1, min(10, recording.num_steps // 10)
    usual = float(np.median(compute))
    while warm < most and compute[warm] > 2 * usual:
        warm += 1
    return warm


def first_alone(recording: Recording, warm: int, until_ns: int) -> int:
    """Return the first step from `warm` on that says how long the job's steps take.

    Those that began before `until_ns` shared the cores with children of headway's, which asked about loaders and
    models; they count where fewer than half of the recorded steps are left behind them.
    """
    behind = steps_beside(recording, until_ns)
    return max(warm, behind) if 2 * behind <= recording.num_steps else warm


def steps_beside(recording: Recording, until_ns: int) -> int:
    """Return how many steps began before `until_ns`, beside headway's own children, on the rank with most of them."""
    return max(int(np.searchsorted(lane.step_end_ns, until_ns)) for lane in recording.lanes)
