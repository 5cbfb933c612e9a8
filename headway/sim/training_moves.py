"""Moves: what an optimiser may change about a training step, and the step of a recorded data-parallel job.

A choice is a flag of `TrainingStep`, and a move is `dataclasses.replace`: the profile stays, so the opposite move
restores the step exactly. Here are those that need a rule: buckets by size and by each framework's default, operations
that may be fused. `headway.plan.optimiser` lists all of them. Sizes are bytes.

`recorded_step` is for a run whose deep windows `headway.sim.ddp.ddp_replay` can replay. One
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

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from headway.core.errors import BarMissedError, InputError
from headway.core.tables import pick
from headway.core.units import MIB, NS_PER_S, format_fraction
from headway.cost.specs import LinkSpec
from headway.sim.ddp.ddp_edits import GradientOrder, gradients_of
from headway.sim.ddp.ddp_link import assign, limits
from headway.sim.ddp.ddp_replay import DdpReplay
from headway.sim.ddp.ddp_thread import COPY, GRAD, WAIT, Thread
from headway.sim.graph.hops import Network
from headway.sim.graph.intervals import MAX_DISCREPANCY
from headway.sim.step_view import StepView
from headway.sim.training_step import BACKWARD, FORWARD, UPDATE, Flags, Ints, StepProfile, TrainingStep
from headway.sim.whatif import ResolvedEdits

HOROVOD_CAP_BYTES = 64 * MIB
"""Horovod's fusion threshold."""


def with_buckets(step: TrainingStep, joined: Flags) -> TrainingStep:
    """Return the step with other buckets; `joined` [T] as in `TrainingStep`."""
    return replace(step, joined=np.asarray(joined, np.bool_).copy())


def bucket_by_size(step: TrainingStep, cap_bytes: float) -> TrainingStep:
    """Bucket as DDP does: in order of readiness, a bucket closes once it holds `cap_bytes`."""
    if not cap_bytes >= 1:
        raise InputError(f"a bucket of {cap_bytes} bytes holds nothing; give a size of at least 1.")
    return with_buckets(step, _by_ddp(step.gradient_bytes(), (int(cap_bytes), int(cap_bytes))))


def default_buckets(step: TrainingStep, framework: str = "ddp") -> TrainingStep:
    """Return the step as a framework of `DEFAULTS` buckets it."""
    return with_buckets(step, pick(DEFAULTS, framework, "framework")(step.gradient_bytes()))


def _by_ddp(sizes: Ints, limit: tuple[int, int] | None = None) -> Flags:
    """Return [T] joined flags by DDP's rule (`headway.sim.ddp.ddp_link`), for gradients of one type."""
    joined = np.ones(sizes.size, np.bool_)
    kept = assign(sizes.tolist(), ["gradient"] * sizes.size, limit or limits("default"))
    joined[[bucket[-1] for bucket in kept]] = False
    return joined


def _by_horovod(sizes: Ints) -> Flags:
    """Return [T] joined flags of buckets that never exceed the threshold, unless one gradient does."""
    joined, held = np.ones(sizes.size, np.bool_), 0
    for tensor, size in enumerate(sizes.tolist()):
        if held and held + size > HOROVOD_CAP_BYTES:
            joined[tensor - 1], held = False, 0
        held += size
    joined[-1:] = False
    return joined


DEFAULTS: dict[str, Callable[[Ints], Flags]] = {"ddp": _by_ddp, "horovod": _by_horovod}
"""Framework -> its buckets: DDP's close once they hold 25 MiB (the first 1 MiB), Horovod's before they exceed 64 MiB.

Horovod fuses what is ready within a cycle; the threshold is the most that it fuses, taken here as always reached.
"""


def fuse_ops(step: TrainingStep, ops: Iterable[int], *, on: bool = True) -> TrainingStep:
    """Run each of `ops` as one with the operation after it, or no longer: one launch less, a gradient ready later."""
    fused = step.fused.copy()
    fused[list(ops)] = on
    return replace(step, fused=fused)


def fusible(step: TrainingStep) -> Flags:
    """Return [n] whether an operation may run as one with the next: same block, both forward or both backward."""
    profile = step.profile
    same = (profile.kind[1:] == profile.kind[:-1]) & (profile.block[1:] == profile.block[:-1])
    inside = (profile.kind[1:] == FORWARD) | (profile.kind[1:] == BACKWARD)
    return np.concatenate([same & inside, [False]])


# A recorded data-parallel job as a training step that moves can change.


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
    _check_replay(step, replay)
    return step


def _check_replay(step: TrainingStep, replay: DdpReplay) -> None:
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
