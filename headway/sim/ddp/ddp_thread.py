"""The training thread of one rank in a deep window, or its device's stream, cut where it meets communication.

Use it between `ddp_window` and `ddp_link`. The thread is a chain of items:
work, a gradient that becomes ready, a call that puts a collective into the
queue, a wait for one, a copy out of a bucket. A wait keeps only what followed
the end of its collective (waking up); the rest of it is not the thread's own
time. Times are int64 ns.

What is a wait: before the first copy of each bucket (the finaliser of
backward goes through its buckets in order), and wherever the thread stood
still when a collective ended that it had queued.

>>> WORK, CALL, len(ITEMS)
(0, 2, 5)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headway.core.errors import InputError
from headway.sim.ddp.ddp_window import DeviceWindow, Ints, collectives
from headway.trace.events.intervals import leaves
from headway.trace.events.trace import Trace

ITEMS: tuple[str, ...] = ("work", "grad", "call", "wait", "copy")
"""Kinds of items, by value."""

WORK, GRAD, CALL, WAIT, COPY = range(len(ITEMS))

GRADIENT = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
FORWARD = "DistributedDataParallel.forward"
COPIED = "torch.distributed.ddp.reducer::copy_bucket_to_grad"
LATE_NS = 500_000
"""Without copies: how long after the end of a collective the thread may go on to count as released by it."""

STILL_NS = 20_000
"""A gap of the training thread shorter than this is Python, not a wait."""


@dataclass(frozen=True, slots=True, eq=False)
class Thread:
    """`m` items of one rank's training thread, in order, from the start of the window to its end."""

    rank: int
    """Which rank."""

    what: Ints
    """[m] Kind: index into `ITEMS`."""

    begin_ns: Ints
    """[m] When it began."""

    own_ns: Ints
    """[m] Its own time; of a wait what was left after its collective had ended."""

    ref: Ints
    """[m] Call, wait: index of the collective; gradient, copy: number within its backward; work: -1."""

    backward: Ints
    """[m] Which backward a gradient, the call of a bucket, its wait and its copies belong to; -1 for other items."""

    ran: Ints
    """[c] Row of the trace that ran each collective."""

    ended_ns: Ints
    """[c] When each was done: the end of that row, or sooner when this thread went on before the other was stamped."""


@dataclass(slots=True)
class _Points:
    """Items other than work, as they are found."""

    what: list[int]
    begin: list[int]
    end: list[int]
    own: list[int]
    ref: list[int]
    backward: list[int]

    def add(self, what: int, begin: int, end: int, *, own: int, ref: int, backward: int = -1) -> None:
        """Append one."""
        for values, value in zip(
            (self.what, self.begin, self.end, self.own, self.ref, self.backward),
            (what, begin, end, own, ref, backward),
            strict=True,
        ):
            values.append(value)


def thread_of(window: Trace, rank: int) -> Thread:
    """Cut the training thread of `rank`. Raises `InputError` when a call has no collective that ran, or none was made.

    A collective that ran outside the window's steps takes its call with it.
    """
    trace = window.where(window.events["rank"] == rank)
    device = DeviceWindow.of(trace)
    calls, ran = collectives(trace) if device is None else (device.calls, device.ran)
    if not calls.size:
        raise InputError(f"rank {rank} queued no collective in the window. Take a window of a data-parallel job.")
    if (ran < 0).any():
        raise InputError(
            f"{int((ran < 0).sum())} of {calls.size} collectives of rank {rank} did not run on a thread of the host, "
            "nor on its device. Take a window of whole steps of a gloo or NCCL job."
        )
    points = _Points([], [], [], [], [], [])
    start, duration = trace.events["start_ns"], trace.events["duration_ns"]
    if device is None:
        lanes = [code for code, name in enumerate(trace.lanes) if name == "main"]
        host = main = trace.where(np.isin(trace.events["lane"], lanes))
        # A collective may run before the call that queued it returns: the call is cut there.
        queued = np.clip(start[ran], start[calls], (start + duration)[calls])
    else:
        host, main, queued = device.host, device.main, start[calls]
    buckets = _gradients_and_calls(host, start[calls], queued, points)
    if device is not None:
        points.begin, points.end = (device.stream.at(np.array(one)).tolist() for one in (points.begin, points.end))
    resumed = _Resumes.of(main)
    ended = np.asarray((start + duration)[ran])
    _finalisers(main, buckets, ended, resumed, points)
    of_buckets = {call for bucket in buckets for call, _ in bucket}
    _other_waits([call for call in range(calls.size) if call not in of_buckets], ended, resumed, points)
    return _chain(rank, main, points, np.flatnonzero(window.events["rank"] == rank)[ran], ended)


@dataclass(frozen=True, slots=True)
class _Resumes:
    """Leaves of the training thread, to ask when it worked."""

    start: Ints
    """[l] When each begins."""

    reach: Ints
    """[l] Latest end up to each."""

    @classmethod
    def of(cls, main: Trace) -> _Resumes:
        """Take the leaves in order."""
        events = main.events
        rows = np.flatnonzero(leaves(events["lane"], events["start_ns"], events["duration_ns"]))
        rows = rows[np.argsort(events["start_ns"][rows], kind="stable")]
        ends = events["start_ns"][rows] + events["duration_ns"][rows]
        return cls(events["start_ns"][rows], np.maximum.accumulate(ends))

    def longest_gap(self, low: int, high: int) -> tuple[int, int]:
        """Return the longest stretch between `low` and `high` in which no work was going on; (low, low) for none."""
        first, last = np.searchsorted(self.start, [low, high])
        held = int(self.reach[first - 1]) if first else low
        starts = np.concatenate([self.start[first:last], [high]])
        ends = np.maximum(np.concatenate([[max(low, held)], self.reach[first:last]]), low)
        gaps = starts - ends
        at = int(np.argmax(gaps))
        return (int(ends[at]), int(starts[at])) if gaps[at] > 0 else (low, low)

    def around(self, instant: int) -> tuple[int, int]:
        """Return when the work begun before `instant` had ended, and when the next begins (both `instant` if never)."""
        at = int(np.searchsorted(self.start, instant))
        before = int(self.reach[at - 1]) if at else instant
        return before, int(self.start[at]) if at < self.start.size else max(instant, before)


def _rows(main: Trace, name: str) -> Ints:
    """Return rows of that name in order of time."""
    rows = np.flatnonzero(main.named(name))
    return np.asarray(rows[np.argsort(main.events["start_ns"][rows], kind="stable")])


def _gradients_and_calls(main: Trace, call_begin: Ints, call_end: Ints, points: _Points) -> list[list[tuple[int, int]]]:
    """Add gradients and calls; return, per backward, its buckets as (call, gradients so far in this backward)."""
    events = main.events
    grads = _rows(main, GRADIENT)
    begin, end = events["start_ns"][grads], events["start_ns"][grads] + events["duration_ns"][grads]
    inside = np.searchsorted(begin, call_begin, side="right") - 1
    nested = (
        (inside >= 0) & (call_begin < end[np.maximum(inside, 0)]) if grads.size else np.zeros(call_begin.size, bool)
    )
    # A finaliser ends a backward; without copies (gradients are views of the buckets) the next forward does.
    copies = events["start_ns"][_rows(main, COPIED)]
    steps = events["start_ns"][np.flatnonzero(main.named(FORWARD))]
    cut = np.searchsorted(np.sort(np.concatenate([copies, steps])), begin)
    number = np.unique(cut, return_inverse=True)[1] if grads.size else np.zeros(0, np.int64)
    ready = end.copy()
    buckets: dict[int, list[tuple[int, int]]] = {}
    for call in range(call_begin.size):
        backward = -1
        if nested[call]:
            grad = int(inside[call])
            ready[grad] = min(int(ready[grad]), int(call_begin[call]))
            backward = int(number[grad])
            so_far = grad - int(np.searchsorted(number, backward)) + 1
            buckets.setdefault(backward, []).append((call, so_far))
        points.add(
            CALL, int(call_begin[call]), int(call_end[call]), own=int(call_end[call] - call_begin[call]), ref=call,
            backward=backward,
        )  # fmt: skip
    for grad, when in enumerate(ready.tolist()):
        first = int(np.searchsorted(number, number[grad]))
        points.add(GRAD, when, when, own=0, ref=grad - first, backward=int(number[grad]))
    return list(buckets.values())


def _finalisers(
    main: Trace, buckets: list[list[tuple[int, int]]], ended: Ints, resumed: _Resumes, points: _Points
) -> None:
    """Add, for each backward, the wait for each of its buckets and the copies out of it."""
    events = main.events
    copies = _rows(main, COPIED)
    begin, end = events["start_ns"][copies], events["start_ns"][copies] + events["duration_ns"][copies]
    forwards = events["start_ns"][_rows(main, FORWARD)]
    done: dict[int, int] = {}
    for when, backward in zip(points.end, points.backward, strict=True):
        done[backward] = max(when, done.get(backward, when))
    rows = zip(points.what, points.ref, points.backward, strict=True)
    number_of = {ref: backward for what, ref, backward in rows if what == CALL}
    for bucket in buckets:
        backward = number_of[bucket[0][0]]
        at, before, count = done[backward], 0, bucket[-1][1]
        first = int(np.searchsorted(begin, at))
        # Gradients that are views of their buckets are not copied: then the next copies belong to a later step.
        next_forward = forwards[np.searchsorted(forwards, at) :][:1]
        copied = first + count <= begin.size and not (next_forward < begin[first + count - 1]).any()
        for call, so_far in bucket:
            # A call without gradients of its own sums up which parameters were used: nothing is copied after it.
            until = int(begin[first + before]) if copied and so_far > before else int(ended[call]) + LATE_NS
            at = _wait(call, ended, (at, until), resumed, points, backward)
            for copy in range(before, so_far) if copied else ():
                row = first + copy
                points.add(COPY, int(begin[row]), int(end[row]), own=int(end[row] - begin[row]), ref=copy,
                           backward=backward)  # fmt: skip
            at = int(end[first + so_far - 1]) if copied else at
            before = so_far


def _wait(call: int, ended: Ints, within: tuple[int, int], resumed: _Resumes, points: _Points, backward: int) -> int:
    """Add the finaliser's wait for a bucket; returns when the thread went on.

    It is the longest gap of the thread in `within`, between what came before and the first copy out of the bucket. A
    thread that goes on sooner than the other one is stamped shows when the collective was done.
    """
    begin, back = resumed.longest_gap(*within)
    if ended[call] <= max(begin, within[0]) or back - begin < STILL_NS:
        points.add(WAIT, within[0], within[0], own=0, ref=call, backward=backward)
        return within[0]
    ended[call] = min(int(ended[call]), back)
    points.add(WAIT, begin, back, own=back - int(ended[call]), ref=call, backward=backward)
    return back


def _other_waits(calls: list[int], ended: Ints, resumed: _Resumes, points: _Points) -> None:
    """Add a wait where the thread stood still when a collective ended that is none of DDP's buckets."""
    gaps: dict[tuple[int, int], list[int]] = {}
    for call in calls:
        before, back = resumed.around(int(ended[call]))
        if before <= ended[call] <= back and back - before >= STILL_NS:
            gaps.setdefault((before, back), []).append(call)
    for (before, back), waited in gaps.items():
        last = max(waited, key=lambda call: int(ended[call]))
        for call in waited:  # What comes after the last one has ended is the thread's own, once.
            points.add(WAIT, before, back, own=back - int(ended[call]) if call == last else 0, ref=call)


def _chain(rank: int, main: Trace, points: _Points, ran: Ints, ended: Ints) -> Thread:
    """Put the items in order and fill what lies between them with work."""
    columns = np.array([points.begin, points.end, points.what, points.own, points.ref, points.backward], np.int64)
    # At one instant: a gradient is ready before the call that it causes; waits come in the order of their collectives.
    columns = columns[:, np.lexsort((columns[4], columns[2], columns[0]))]
    begin, end, what, own, ref, backward = columns
    reach = np.maximum.accumulate(end)
    low = int(main.events["start_ns"].min())
    high = int((main.events["start_ns"] + main.events["duration_ns"]).max())
    free_from = np.concatenate([[low], reach])
    free_to = np.concatenate([begin, [high]])
    gap = np.maximum(free_to - free_from, 0)
    m = begin.size
    position = np.concatenate([np.arange(m + 1) * 2, np.arange(m) * 2 + 1])
    order = np.argsort(position, kind="stable")
    blank = np.full(m + 1, -1, np.int64)

    def merged(of_work: Ints, of_points: Ints) -> Ints:
        return np.asarray(np.concatenate([of_work, of_points])[order])

    kept = merged(gap, np.ones(m, np.int64)) > 0
    return Thread(
        rank=rank,
        what=merged(np.full(m + 1, WORK), what)[kept],
        begin_ns=merged(free_from, begin)[kept],
        own_ns=merged(gap, own)[kept],
        ref=merged(blank, ref)[kept],
        backward=merged(blank, backward)[kept],
        ran=ran,
        ended_ns=ended,
    )
