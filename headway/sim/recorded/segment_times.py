"""How long the segments of the training threads take after edits: `unroll` gives them an order, `program` replays it.

A collective counts from the last arrival on, compute follows its own factors, those of a slow rank or of a stage of a
pipeline, and what is rare has its rate over the whole run. Times are ns.

What loaders cost: typical values of what a run could not show, and the hand-offs of workers that it did show.

Times are int64 ns; [b] is one value per batch, [i] one per pass.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headway.core.units import NS_PER_MS, NS_PER_US
from headway.sim.pipeline.actions import F
from headway.sim.recorded.lane import COMPUTE, LABEL, LABELS, Lane
from headway.sim.recorded.recording import ConsumedBatches, Recording
from headway.sim.whatif import ResolvedEdits

SLACK_NS = 3 * NS_PER_MS
"""A batch that was loaded this long before it was asked for had surely been handed over."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs that a run without workers, or without a cache, cannot show: typical of torch 2.13 and fork on Linux."""

    handoff_ns: int = 700 * NS_PER_US
    """From the end of a load until the training thread can take the batch: pickling, a pipe, a wake-up."""

    receive_ns: int = 1_100 * NS_PER_US
    """Taking a batch that is ready: one descriptor per tensor, a mapping, the next index handed out."""

    pack_ns: int = 1_500 * NS_PER_US
    """What a remedy's worker does beside making a batch: generators, files and output looked at, the batch packed and,
    by a thread of its own, written to a pipe."""

    turn_ns: int = 200 * NS_PER_US
    """What torch's own worker does between two loads: an index taken out of a queue, a batch put into one."""

    send_ns: int = 900 * NS_PER_US
    """CPU time of the other threads of torch's own worker for a batch, which pickle it and answer for its open files,
    beside the next load: .5 to .9 ms for 2 KB to 3 MB, 1.3 where each load computed 11 ms."""

    elsewhere: float = 1.07
    """CPU time of a load in a worker, of the same in the training process: with other processes on its core, and memory
    new from the system. 10.9 ms become 11.7; loads of MNIST 9.5 ms 10.3."""

    per_byte_ns: float = 0.12
    """More of each of the two for each byte of the batch."""

    fork_ns: int = 9 * NS_PER_MS
    """Making one worker, on the training thread."""

    first_ns: int = 10 * NS_PER_MS
    """From the iterator's creation until its workers begin to load."""

    stop_ns: int = 7 * NS_PER_MS
    """Ending one worker, on the training thread."""

    reset_ns: int = NS_PER_MS
    """A new pass over workers that persist."""

    thread_handoff_ns: int = 120 * NS_PER_US
    """The same from a thread of the rank: a wake-up, whatever the size."""

    thread_pack_ns: int = 400 * NS_PER_US
    """What a remedy's thread does beside making a batch."""

    thread_receive_ns: int = 50 * NS_PER_US
    """Taking a batch that a thread made."""

    thread_ns: int = 400 * NS_PER_US
    """Making one thread, on the training thread; ending it takes as long as the example that it reads."""

    trial_ns: int = 40 * NS_PER_MS
    """Trying in a forked child whether workers may make a loader's batches: once for loaders with the same facts."""

    thread_trial_ns: int = 400 * NS_PER_MS
    """The same for threads, and how long two of them wait for the interpreter's lock."""

    cache_trial_ns: int = 200 * NS_PER_MS
    """Trying in forked children whether a loader's examples may be kept."""

    hit_ns: int = 90 * NS_PER_US
    """Serving one example from the cache, between steps of training: its tensors are made anew."""

    keep_ns: int = 420 * NS_PER_US
    """Keeping one example: whether it drew random numbers is watched while it is read, which leaves the caches cold."""

    look_ns: int = 1_000 * NS_PER_US
    """The least that a look before a batch of a first pass takes: has the script changed what it is made of?"""

    look_in_training: float = 1.5
    """How much longer a look takes between steps of training than in a rehearsal: what it reads has left the caches."""

    full_looks: int = 64
    """Batches before each of which is looked, however short the passes are; later it takes a hundredth of the time."""

    cold_ns: int = 900 * NS_PER_US
    """Looking, behind each batch of which examples are kept, whether reading it has changed the dataset."""

    hit_per_byte_ns: float = 0.25
    """More of it for each byte: the copy that is handed out."""

    log_ns: int = 150 * NS_PER_US
    """What a log record still costs when a background thread handles it: the hand-over, and the handler's own CPU time,
    which comes back through the interpreter's lock. Only what blocks is won."""

    collect_ns: int = 2 * NS_PER_MS
    """One collection of garbage when everything old is frozen."""

    def slowed(self, factor: float) -> Costs:
        """Return the costs on a host whose other work makes CPU time take `factor` times as long."""
        names = (
            "handoff_ns", "receive_ns", "pack_ns", "turn_ns", "send_ns", "fork_ns", "first_ns", "stop_ns", "reset_ns",
            "log_ns", "thread_handoff_ns", "thread_pack_ns", "thread_receive_ns", "thread_ns", "trial_ns",
            "cache_trial_ns", "keep_ns", "look_ns", "cold_ns",
        )  # fmt: skip
        return replace(self, **{name: round(getattr(self, name) * factor) for name in names})


def measure_handoff(
    batches: ConsumedBatches, known: NDArray[np.bool_], take: NDArray[np.float64], handoff: NDArray[np.float64]
) -> None:
    """Replace the typical costs of one loader's batches by measured ones where workers were recorded (in place).

    A batch that had been ready for long costs its receiver alone; one that was
    awaited also shows the hand-off: what it took after its load ended, less
    the usual cost of receiving. Both are those of the batch itself, so that
    slow ones count with what they took. Other batches get medians. The first
    batch of each worker takes longer: its pipe and its threads are made then.

        next()    |----------- waits -----------|= take =|
        worker    ----- load -----|- hand-off --|

    A thread of the worker hands over, while the worker loads on. A dataset
    that holds the interpreter's lock keeps it waiting, up to the end of that
    next load: a batch that is asked for before then may still be on its way.

        next()                     |-- waits --|= take =|
        worker    -- load --|---- next load ---|
        its thread          |----- hand-off ---|
    """
    load_end = batches.load_start_ns + batches.load_ns
    arrival = (batches.end_ns - load_end).astype(np.float64)
    after = np.minimum(arrival, batches.end_ns - batches.start_ns).clip(min=0)
    free = _worker_free_ns(batches, load_end)
    ready = known & (free + SLACK_NS < batches.start_ns)
    if ready.any():
        take[known] = np.median(after[ready])
        take[ready] = after[ready]
    waited = (load_end <= batches.start_ns) & (free > batches.start_ns) & (after > take + SLACK_NS)
    awaited = known & ((load_end > batches.start_ns) | waited)
    opening = batches.seq < batches.workers[batches.iterator]
    for which in (opening, ~opening):
        seen = awaited & which
        if not seen.any():
            continue
        whole = float(np.median(arrival[seen]))
        rest = known & which & ~ready
        typical = float(np.median(take[rest])) if rest.any() else 0.0
        part = min(typical, whole) if ready.any() else min(typical, whole / 2)
        take[rest], handoff[known & which] = part, whole - part
        take[seen] = np.minimum(part, after[seen])
        handoff[which & known] = np.minimum(handoff, np.maximum(arrival - take, 0))[which & known]
        handoff[seen] = arrival[seen] - take[seen]


def _worker_free_ns(batches: ConsumedBatches, load_end: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return [b] when its worker had loaded the batch, and the one after it if that had begun when b was asked for."""
    free = load_end.copy()
    for index in range(batches.group.size):
        own = np.flatnonzero(batches.iterator == index)
        workers = int(batches.workers[index])
        if workers and own.size > workers and not batches.together[index]:
            this, following = own[:-workers], own[workers:]
            begun = batches.load_start_ns[following] < batches.start_ns[this]
            free[this] = np.where(begun, load_end[following], free[this])
    return free


def between_loads(batches: ConsumedBatches, prefetch: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return [b] what the worker did between its load before and this one; medians where it may have been idle.

    A worker that has been told of a batch begins it at once: what passes until then is its own (a batch put into a
    queue, an index taken out of one). It had been told if the batch that makes room for this one was taken by then.
    """
    between = np.zeros(batches.seq.size)
    load_end = batches.load_start_ns + batches.load_ns
    for index in range(batches.group.size):
        own = np.flatnonzero(batches.iterator == index)
        workers = int(batches.workers[index])
        if not workers or batches.together[index] or own.size <= workers or (batches.load_start_ns[own] < 0).any():
            continue
        bound = workers * int(prefetch[index])
        # W workers take turns: batches k - W and k are of one worker, and position k - W of `gap` is the time between
        # them. The worker is busy without a break if it knew of batch k, because batch k - bound was taken, before load
        # k - W had ended.
        gap = (batches.load_start_ns[own[workers:]] - load_end[own[:-workers]]).astype(np.float64)
        known_ns = np.full(own.size, np.iinfo(np.int64).min)
        known_ns[bound:] = batches.end_ns[own[:-bound]] if own.size > bound else known_ns[bound:]
        busy = known_ns[workers:] <= load_end[own[:-workers]]
        usual = float(np.median(gap[busy])) if busy.any() else 0.0
        between[own[workers:]] = np.maximum(np.where(busy, gap, usual), 0.0)
    return between


def first_loads(batches: ConsumedBatches, lane: Lane, costs: Costs) -> NDArray[np.float64]:
    """Return [i] when the workers of each pass began to load, after the end of its creation."""
    first = np.full(batches.group.size, float(costs.first_ns))
    for index in range(batches.group.size):
        mine = (batches.iterator == index) & (batches.load_start_ns >= 0)
        segment = batches.iter_segment[index]
        if batches.workers[index] > 0 and segment >= 0 and mine.any():
            made_ns = lane.start_ns[segment] + lane.duration_ns[segment]
            first[index] = max(0, int(batches.load_start_ns[mine].min() - made_ns))
    return first


def loads_first(batches: ConsumedBatches, workers: NDArray[np.int64], reused: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return [b] whether a load is the first of its process: of each new worker, or of the training process in all.

    `workers` [i] of each pass, 0 = the training process loads; `reused` [i]: they are those of the pass before.
    Workers take turns, so that the first W batches of a pass are the first ones of its W workers.
    """
    of_pass = batches.iterator
    by_new = (batches.seq < workers[of_pass]) & ~reused[of_pass]
    inline = (workers[of_pass] == 0) & (batches.epoch[of_pass] == 0) & (batches.seq == 0)
    return np.asarray(by_new | inline)


def opening_parts(batches: ConsumedBatches, first: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return [b, 4] what a first load takes beyond a later one of its loader: the difference of the medians, by parts.

    A new process opens files and connections, and imports, in its first load. Where a loader's first loads take no
    longer than later ones, or it has loads of one kind alone, it is 0.
    """
    opening, group = np.zeros(batches.part_ns.shape), batches.group[batches.iterator]
    for loader in np.unique(group).tolist():
        of_loader = group == loader
        new, old = of_loader & first, of_loader & ~first
        if new.any() and old.any():
            extra = np.median(batches.part_ns[new], axis=0) - np.median(batches.part_ns[old], axis=0)
            opening[of_loader] = np.maximum(extra, 0.0)
    return opening


COMM = np.array([label.startswith("comm.") for label in LABELS])
"""[LABELS] Communication."""

BESIDE_LOADS = 1.3
"""Times as long as work on one core may take while another core works too, in the low end of an interval.

Caches and memory are shared, hardware threads share a core, and whether a virtual core has one to itself only the
hypervisor knows. Two processes on two virtual cores did 1.55 to 2.14 times (median 1.95) the work of one alone.
"""

USUALLY_BESIDE = 1.15
"""The same as it usually is, where the compute of a step keeps its core busy while workers load.

Of ten scripts whose loads and steps both compute, on two virtual cores, replays without it promised .74 to 1.35 times
(median 1.18) what was won; of 211 remedies of jobs whose steps leave their core alone, .99 times.
"""


def last_of_steps(lane: Lane) -> NDArray[np.int64]:
    """Return [k] the last segment of each step."""
    return np.searchsorted(lane.step, np.arange(lane.step_end_ns.size - 1), side="right") - 1


def edited_segments(
    recording: Recording,
    scenario: ResolvedEdits,
    costs: Costs,
    *,
    whole: bool = True,
    longer: tuple[NDArray[np.float64], ...] | None = None,
) -> tuple[NDArray[np.float64], ...]:
    """Return, per rank, [m] durations of the segments after the edits; collectives keep their own time only.

    `whole` scales what is rare to its rate over the whole run, where only a part of it is replayed. What the host
    computes takes `longer` [k] times as long, per rank.
    """
    own = _own_comm(recording)
    factor = np.array([scenario.factor(label) for label in LABELS])
    factor[COMM] /= scenario.bandwidth
    factor[LABEL["input.transfer"]] *= scenario.transfer
    factor[LABEL["host.rereading"]] = 0
    pace = straggler_pace(recording, scenario.straggler)
    result = []
    for index, lane in enumerate(recording.lanes):
        duration, work = own[index] * factor[lane.label], recording.devices[index]
        if work is None:
            slower = 1.0 if longer is None else longer[index][lane.step]
            duration = np.where(COMPUTE[lane.label], duration * slower / scenario.accelerator, duration)
        else:
            duration = np.where(COMPUTE[lane.label], duration * work.own[lane.step], duration)
            duration[work.waits] = work.after_wait_ns * factor[lane.label[work.waits]]
        if whole:
            duration *= recording.cut_factor[index][lane.label]
        duration = np.where(COMPUTE[lane.label], duration * pace[index, lane.step], duration)
        stage_work = recording.stages[index]
        if stage_work is not None:
            for stage, forward, backward in scenario.stages:
                times = np.where(stage_work.op == F, forward, backward)
                of_part = np.append(np.where(stage_work.stage == stage, times, 1.0), 1.0)[stage_work.part]
                duration = np.where(COMPUTE[lane.label], duration * of_part, duration)
        if scenario.buffered_logging:
            logs = lane.label == LABEL["host.logging"]
            duration[logs] = np.minimum(duration[logs], costs.log_ns)
        if scenario.gc_every is not None:
            duration[lane.label == LABEL["host.gc"]] = 0
            # Each rank pays for its own collection at the same step, so nobody waits for another's.
            at = last_of_steps(lane)[scenario.gc_every - 1 :: scenario.gc_every]
            duration[at] += costs.collect_ns
        result.append(duration)
    return tuple(result)


@functools.lru_cache(maxsize=1)  # a plan replays one recording under dozens of edits, which change none of this
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
    messages = recording.messages
    for index, lane in enumerate(recording.lanes if messages.point.size else ()):
        waits = messages.of_rank(index)
        segments = messages.segment[waits]
        rows = lane.row[segments]
        own[index][np.isin(lane.row, rows[rows >= 0])] = 0.0
        own[index][segments] = messages.own_ns[waits]
    for durations in own:
        durations.setflags(write=False)
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
    work = np.array([lane.compute_ns() for lane in recording.lanes], np.float64)
    mean = np.median(work, axis=1)
    typical = np.quantile(mean, 0.5, method="lower")
    slow = np.where(mean > 1.02 * typical, typical / np.maximum(mean, 1), 1.0)
    paced = work * slow[:, None]
    cap = 1.25 * np.quantile(paced, 0.5, axis=0, method="lower")
    sudden = np.where(paced > cap, cap / np.maximum(paced, 1), 1.0)
    return np.asarray(1 + (excess - 1) * (1 - slow[:, None] * sudden))


def brings_workers(recording: Recording, scenario: ResolvedEdits) -> bool:
    """Say whether the edits bring workers to a run that had none."""
    recorded = max((int(batches.workers.max(initial=0)) for batches in recording.batches), default=0)
    return bool(scenario.workers) and recorded == 0


def beside_loads(recording: Recording, scenario: ResolvedEdits, busy: float) -> ResolvedEdits:
    """Return the edits with what new workers usually cost compute that occupies `busy` of a core, and it costs them."""
    if not brings_workers(recording, scenario) or any(work is not None for work in recording.devices):
        return scenario
    return on_busy_cores(recording, scenario, 1 + (USUALLY_BESIDE - 1) * busy)


def on_busy_cores(recording: Recording, scenario: ResolvedEdits, longer: float = BESIDE_LOADS) -> ResolvedEdits:
    """Return the edits where loads, and the compute that they run beside, take `longer` times as long."""
    loads_ns = sum(float(batches.part_ns[:, 2:].sum()) for batches in recording.batches)
    compute_ns = sum(float(lane.duration_ns[COMPUTE[lane.label]].sum()) for lane in recording.lanes)
    on_host = all(work is None for work in recording.devices)
    slower = 1 + (longer - 1) * min(1.0, loads_ns / max(compute_ns, 1.0)) * on_host
    return replace(scenario, prep=scenario.prep * longer, accelerator=scenario.accelerator / slower)
