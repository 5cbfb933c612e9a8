"""One step of a recorded data-parallel job, and how long it takes with other buckets.

For a run whose deep windows `headway.sim.ddp.ddp_replay` can replay. One step stands for all: the mean over the windows
of the slowest rank, cut at its gradients, which DDP's notes name and size; the link that carried them, as a ring. What
forward and update share on the thread is one operation, because a window does not need to tell them apart. The step
with the recorded buckets must come within 5 % of the recorded step, or it is refused. Collectives run one after the
other here, where gloo may run two at once. int64 ns, bytes.

    step = recorded_step(DdpReplay.from_run(run))

Buckets travel in the order in which their last gradients are ready, so the ring is one lane: a bucket is through at
max(its own readiness, the one before is through) + its time. `best_buckets` is exact on one lane.

>>> MAX_DISCREPANCY
0.05
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.core.errors import BarMissedError, InputError
from headway.core.units import NS_PER_S, format_fraction
from headway.cost.specs import LinkSpec
from headway.sim.ddp.ddp_edits import GradientOrder, gradients_of
from headway.sim.ddp.ddp_link import assign
from headway.sim.ddp.ddp_replay import DdpReplay
from headway.sim.ddp.ddp_thread import COPY, GRAD, WAIT, Thread
from headway.sim.graph.intervals import MAX_DISCREPANCY
from headway.sim.whatif import ResolvedEdits

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class RecordedStep:
    """What one worker computes in a step, T gradients in the order in which they are ready, and their buckets."""

    segment_ns: Ints
    """[T] Work up to each gradient, from the one before; the first one's holds the forward pass."""

    gradient_bytes: Ints
    """[T] Size of each gradient."""

    rest_ns: int
    """Work of backward after the last gradient."""

    update_ns: int
    """The update, which waits for backward and for every bucket."""

    copy_ns_per_byte: float
    """Cost of copying a gradient into its bucket, and the same again for copying it out."""

    num_ranks: int
    """Ranks of the ring."""

    link: LinkSpec
    """What each hop of the ring crosses."""

    joined: Flags
    """[T] Gradient t travels in one bucket with gradient t + 1; never the last."""

    gradient_view: bool = False
    """Gradients live inside the buckets: no copies, and one copy of the gradients less in memory."""

    def bucket_ends(self) -> Ints:
        """Return [b] the last gradient of each bucket, in the order of readiness."""
        return np.flatnonzero(~self.joined)

    def bucket_bytes(self) -> Ints:
        """Return [b] the size of each bucket."""
        sizes: Ints = np.diff(np.cumsum(self.gradient_bytes)[self.bucket_ends()], prepend=0)
        return sizes

    def copies_ns(self) -> Ints:
        """Return [T] what copying each gradient into its bucket takes."""
        rate = 0.0 if self.gradient_view else self.copy_ns_per_byte
        return np.asarray(np.rint(self.gradient_bytes * rate), np.int64)

    def ready_ns(self) -> Ints:
        """Return [T] when each gradient is complete, from the start of the step."""
        return np.cumsum(self.segment_ns + self.copies_ns())

    def ring_ns(self, num_bytes: ArrayLike) -> Ints:
        """Return how long the ring sums buckets of `num_bytes`: 2 (p - 1) hops of a p-th each."""
        share = -(-np.asarray(num_bytes, np.int64) // self.num_ranks)
        hop_ns = np.rint((self.link.latency_s + share / self.link.bytes_per_s) * NS_PER_S).astype(np.int64)
        return np.asarray(2 * (self.num_ranks - 1) * hop_ns)

    def step_ns(self) -> int:
        """Return the time from the start of the step to the end of its update."""
        ready, takes = self.ready_ns(), self.ring_ns(self.bucket_bytes())
        # Bucket k is through at the maximum over i <= k of ready(i) + t(i) + .. + t(k): the ring is busy from some
        # bucket i on, which it took up as it was ready. The step waits for the last one.
        before = np.cumsum(takes) - takes
        through = takes.sum() + np.max(ready[self.bucket_ends()] - before)
        return max(int(through), int(ready[-1]) + self.rest_ns) + self.update_ns + int(self.copies_ns().sum())

    def in_buckets(self, cap_bytes: float) -> RecordedStep:
        """Return the step with DDP's buckets: in order of readiness, one closes once it holds `cap_bytes`."""
        cap, sizes = int(cap_bytes), self.gradient_bytes.tolist()
        joined = np.ones_like(self.joined)
        joined[[bucket[-1] for bucket in assign(sizes, ["gradient"] * len(sizes), (cap, cap))]] = False
        return replace(self, joined=joined)

    def best_buckets(self) -> Flags:
        """Return [T] joined flags of the buckets that are through soonest: no others make the step shorter."""
        return best_buckets(self.ready_ns(), self.gradient_bytes, self.ring_ns)


def best_buckets(ready_ns: Ints, gradient_bytes: Ints, takes_ns: Callable[[Ints], Ints]) -> Flags:
    """Return [T] joined flags of the buckets that are through soonest, sent in order of readiness on one lane.

    `takes_ns` returns t, the time of buckets of so many bytes. F(j) = min over i of max(F(i), ready(j)) + t(bytes of
    i+1..j) is when the first j gradients are through. O(T^2) sizes; of equal answers, the one with the largest last
    bucket.
    """
    tensors = ready_ns.size
    total = np.concatenate([[0], np.cumsum(gradient_bytes)])
    through, begin = np.zeros(tensors + 1, np.int64), np.zeros(tensors + 1, np.int64)
    for last in range(1, tensors + 1):
        end = np.maximum(through[:last], ready_ns[last - 1]) + takes_ns(total[last] - total[:last])
        begin[last] = np.argmin(end)
        through[last] = end[begin[last]]
    joined, last = np.ones(tensors, np.bool_), tensors
    while last > 0:
        joined[last - 1] = False
        last = int(begin[last])
    return joined


def recorded_step(replay: DdpReplay) -> RecordedStep:
    """Return the step with the buckets that were recorded.

    Raises `InputError` when the windows cannot tell what buckets do (busy
    cores, several models, gradients of several types, no whole step),
    `BarMissedError` when the replayed step misses the recorded one.
    """
    replay.check(ResolvedEdits(bucket_mb=1.0))
    gradients = gradients_of(replay.models)
    if len(set(gradients.kind)) > 1:
        raise InputError(
            f"gradients are of {len(set(gradients.kind))} types, which never share a bucket; the optimiser takes one. "
            "Use headway plan, which lays out sizes for several."
        )
    ranks = len(replay.steps[0].threads)
    means = [_mean([step.threads[rank] for step in replay.steps], len(gradients.size)) for rank in range(ranks)]
    step = _step(max(means, key=lambda mean: int(mean.sum())), gradients, replay, ranks)
    took_s = step.step_ns() / NS_PER_S
    gap = took_s / replay.step_s - 1 if replay.step_s > 0 else float("nan")
    if not abs(gap) <= MAX_DISCREPANCY:
        raise BarMissedError(
            f"the step takes {took_s:.4f} s when replayed as one worker's, {replay.step_s:.4f} s in the windows "
            f"({format_fraction(abs(gap))} off; at most {format_fraction(MAX_DISCREPANCY, 0)}). Use headway plan for "
            "this run, which replays all threads."
        )
    return step


def _mean(threads: list[Thread], count: int) -> Ints:
    """Average the whole steps of one rank over its windows: [count + 3] as of `_whole_steps`."""
    steps = [times for thread in threads for times in _whole_steps(thread, count)]
    if not steps:
        raise InputError(
            f"no window holds a whole step, from the end of one update to the next, with all {count} gradients. Record "
            "wider windows (headway run --windows)."
        )
    mean: Ints = np.rint(np.mean(steps, axis=0)).astype(np.int64)
    return mean


def _whole_steps(thread: Thread, count: int) -> Iterator[list[int]]:
    """Yield [count + 3] own times of each step that the window holds whole.

    Up to each gradient, the rest of backward, copies out of buckets, what else the finaliser of backward takes.
    """
    # total[i] is the thread's own time before item i, so that the own time from one item to another is a difference.
    # Step k reaches from the end of the finaliser of backward k - 1 (waits and copies) to that of backward k:
    #
    #     ... copy | work grad work grad ... work grad work | wait copy ... wait copy | work ...
    #                begin                        grads[-1]   final[0]           final[-1]
    own = thread.own_ns
    total = np.concatenate([[0], np.cumsum(own)])
    ends: dict[int, int] = {}
    for number in np.unique(thread.backward[thread.backward >= 0]).tolist():
        of_backward = thread.backward == number
        grads = np.flatnonzero(of_backward & (thread.what == GRAD))
        final = np.flatnonzero(of_backward & np.isin(thread.what, (WAIT, COPY)))
        if not final.size:
            continue
        begin = ends.get(number - 1)
        ends[number] = int(final[-1]) + 1
        if begin is None or grads.size != count:
            continue
        segments = np.diff(total[np.concatenate([[begin], grads[np.argsort(thread.ref[grads])]])])
        copies = int(own[of_backward & (thread.what == COPY)].sum())
        finalised = int(total[final[-1] + 1] - total[final[0]])
        rest = int(total[final[0]] - total[grads[-1]])
        yield [*segments.tolist(), rest, copies, finalised - copies]


def _step(mean: Ints, gradients: GradientOrder, replay: DdpReplay, ranks: int) -> RecordedStep:
    """Return the step of these own times; its ring sums n bytes in the fitted latency + n / rate."""
    size = np.array(gradients.size, np.int64)
    rest, copies, update = mean[size.size :].tolist()
    rate = copies / max(1, int(size.sum()))
    latency_s = float(np.median([link.latency_ns for link in replay.links])) / NS_PER_S
    bytes_per_s = float(np.median([link.bytes_per_s for link in replay.links]))
    rounds = 2 * (ranks - 1)
    joined = np.ones(size.size, np.bool_)
    joined[[bucket[-1] for bucket in assign(gradients.size, gradients.kind, gradients.limit)]] = False
    return RecordedStep(
        # Segments hold the copies into the buckets already; a step adds them by itself.
        segment_ns=np.maximum(mean[: size.size] - np.rint(size * rate).astype(np.int64), 0),
        gradient_bytes=size,
        rest_ns=rest,
        update_ns=update,
        copy_ns_per_byte=rate,
        num_ranks=ranks,
        link=LinkSpec("recorded", bytes_per_s * rounds / ranks, latency_s / rounds, "fit of deep windows"),
        joined=joined,
    )
