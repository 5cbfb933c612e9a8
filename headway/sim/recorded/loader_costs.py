"""What loaders cost: typical values of what a run could not show, and the hand-offs of workers that it did show.

Times are int64 ns; [b] is one value per batch, [i] one per pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headway.core.units import NS_PER_MS, NS_PER_US
from headway.sim.recorded.lane import Lane
from headway.sim.recorded.recording import ConsumedBatches

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
    by a thread of its own, written to a pipe. Of torch's own workers on the same host it is 1.3 to 1.9 ms."""

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
            "handoff_ns", "receive_ns", "pack_ns", "fork_ns", "first_ns", "stop_ns", "reset_ns", "log_ns",
            "thread_handoff_ns", "thread_pack_ns", "thread_receive_ns", "thread_ns", "trial_ns", "cache_trial_ns",
            "keep_ns", "look_ns", "cold_ns",
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
