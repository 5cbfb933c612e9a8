"""A recorded data-parallel job as a training step that moves can change.

Use it on a run whose deep windows `headway.sim.ddp.ddp_replay` can replay. One
step stands for all: the mean over the windows of the slowest rank, cut at its
gradients, which DDP's notes name and size; the link that carried them, as a
ring. What forward and update share on the thread is one operation, because a
window does not need to tell them apart. The step replayed with the recorded
buckets must come within 5 % of the recorded step, or it is refused. Collectives
run one after the other here, where gloo may run two at once. int64 ns, bytes.

    step = recorded_step(DdpReplay.from_run(run))

>>> MAX_DISCREPANCY
0.05
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from headway.core.errors import BarMissedError, InputError
from headway.core.units import NS_PER_S, format_fraction
from headway.cost.specs import LinkSpec
from headway.sim.ddp.ddp_buckets import assign
from headway.sim.ddp.ddp_edits import GradientOrder, gradients_of
from headway.sim.ddp.ddp_replay import MAX_DISCREPANCY, DdpReplay
from headway.sim.ddp.ddp_thread import COPY, GRAD, WAIT, Thread
from headway.sim.graph.hops import Network
from headway.sim.training.step_view import StepView
from headway.sim.training.training_step import BACKWARD, FORWARD, UPDATE, Ints, StepProfile, TrainingStep
from headway.sim.whatif.edits import ResolvedEdits


@dataclass(frozen=True, slots=True)
class _Mean:
    """What one rank's steps take, mean over those that lie whole in a window."""

    segment_ns: Ints
    """[g] Its own work up to each gradient, from the one before (from the end of the last update for the first)."""

    rest_ns: int
    """Work of backward after the last gradient."""

    copy_ns: int
    """Copies of gradients out of the buckets."""

    update_ns: int
    """What else the finaliser of backward takes: waking up, bookkeeping."""

    @property
    def total_ns(self) -> int:
        """Everything but waits."""
        return int(self.segment_ns.sum()) + self.rest_ns + self.copy_ns + self.update_ns


def recorded_step(replay: DdpReplay) -> TrainingStep:
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
    slowest = max(means, key=lambda mean: mean.total_ns)
    step = TrainingStep.of(_profile(slowest, gradients), _network(replay, ranks))
    joined = np.ones(step.joined.size, np.bool_)
    joined[[bucket[-1] for bucket in assign(gradients.size, gradients.kind, gradients.limit)]] = False
    step = TrainingStep(
        step.profile, step.network, fused=step.fused, joined=joined, parts=step.parts, half=step.half,
        recomputed=step.recomputed,
    )  # fmt: skip
    _check(step, replay)
    return step


def _check(step: TrainingStep, replay: DdpReplay) -> None:
    """Refuse a step that does not take the time that was recorded."""
    took_s = int(StepView.of(step).score([step])[0]) / NS_PER_S
    gap = took_s / replay.step_s - 1 if replay.step_s > 0 else float("nan")
    if not abs(gap) <= MAX_DISCREPANCY:
        raise BarMissedError(
            f"the step takes {took_s:.4f} s when replayed as one worker's, {replay.step_s:.4f} s in the windows "
            f"({format_fraction(abs(gap))} off; at most {format_fraction(MAX_DISCREPANCY, 0)}). Use headway plan for "
            "this run, which replays all threads."
        )


def _mean(threads: list[Thread], count: int) -> _Mean:
    """Average the whole steps of one rank over its windows."""
    steps = [found for thread in threads for found in _whole_steps(thread, count)]
    if not steps:
        raise InputError(
            f"no window holds a whole step, from the end of one update to the next, with all {count} gradients. Record "
            "wider windows (headway run --windows)."
        )
    mean = np.rint(np.mean(steps, axis=0)).astype(np.int64)
    return _Mean(mean[:count], *(int(value) for value in mean[count:]))


def _whole_steps(thread: Thread, count: int) -> Iterator[list[int]]:
    """Yield [count + 3] times of each step that the window holds whole: segments, rest, copies, other update."""
    # total[i] is the thread's own time before item i, so that the own time from one item to another is a difference.
    # Step k reaches from the end of the finaliser of backward k - 1 (waits and copies) to that of backward k:
    #
    #     ... copy | work grad work grad ... work grad work | wait copy ... wait copy | work ...
    #                begin                        grads[-1]   final[0]           final[-1]
    own = thread.own_ns
    total = np.concatenate([[0], np.cumsum(own)])
    ends: dict[int, int] = {}
    for number in np.unique(thread.backward[thread.backward >= 0]).tolist():
        mine = thread.backward == number
        grads = np.flatnonzero(mine & (thread.what == GRAD))
        final = np.flatnonzero(mine & np.isin(thread.what, (WAIT, COPY)))
        if not final.size:
            continue
        begin = ends.get(number - 1)
        ends[number] = int(final[-1]) + 1
        if begin is None or grads.size != count:
            continue
        segments = np.diff(total[np.concatenate([[begin], grads[np.argsort(thread.ref[grads])]])])
        copies = int(own[mine & (thread.what == COPY)].sum())
        finalised = int(total[final[-1] + 1] - total[final[0]])
        rest = int(total[final[0]] - total[grads[-1]])
        yield [*segments.tolist(), rest, copies, finalised - copies]


def _profile(mean: _Mean, gradients: GradientOrder) -> StepProfile:
    """Lay the mean out: forward with the first segment, backward with the others, one update."""
    size = np.array(gradients.size, np.int64)
    count = size.size
    rate = mean.copy_ns / max(1, int(size.sum()))
    # Segments hold the copies into the buckets already; a step adds them by itself.
    segment = np.maximum(mean.segment_ns - np.rint(size * rate).astype(np.int64), 0)
    duration = np.concatenate([segment[:1], [0], segment[1:], [mean.rest_ns, mean.update_ns]]).astype(np.int64)
    nothing = np.zeros(duration.size, np.int64)
    return StepProfile(
        kind=np.array([FORWARD, *[BACKWARD] * (count + 1), UPDATE], np.int64),
        duration_ns=duration,
        fixed_ns=nothing,
        half_ns=duration,
        block=np.array([0, *range(count - 1, -1, -1), 0, -1], np.int64),
        tensor=np.array([-1, *range(count), -1, -1], np.int64),
        tensor_bytes=size,
        activation_bytes=np.zeros(count, np.int64),
        input_bytes=np.zeros(count, np.int64),
        block_kind=np.arange(count),
        names=tuple(f"gradient {count - 1 - index}" for index in range(count)),
        copy_ns_per_byte=rate,
    )


def _network(replay: DdpReplay, ranks: int) -> Network:
    """Return the ring whose all-reduce of n bytes takes the fitted latency + n / rate."""
    latency_s = float(np.median([link.latency_ns for link in replay.links])) / NS_PER_S
    rate = float(np.median([link.bytes_per_s for link in replay.links]))
    rounds = 2 * (ranks - 1)
    return Network(
        "ring", ranks, LinkSpec("recorded", rate * rounds / ranks, latency_s / rounds, "fit of deep windows")
    )
