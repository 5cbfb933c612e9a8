"""A training step over all ranks, with every collective expanded to its hops: what choices are checked on.

Every rank computes, an In and an Out per rank tie each bucket's producer, its SEND and RECV hops and the update
together, and stragglers may differ. Replayed in fixed order it is what synchronous collectives do; `lane_order=False`
leaves the order to `greedy`, with forward before output before backward before update before communication. Times are
int64 ns.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from benchmarks._hops import Hops, expand
from headway.core.errors import InputError
from headway.sim.graph.attribution import critical_path
from headway.sim.graph.dag import Dag
from headway.sim.training_step import FORWARD, UPDATE, Ints, TrainingStep

LEAD, IN, SEND, RECV, OUT = 4, 5, 6, 7, 8
"""Kinds besides those of compute: micro-batches before the last, a rank's entry to a collective, its hops, its end."""

KIND_NAMES: tuple[str, ...] = ("forward", "output", "backward", "update", "earlier", "in", "send", "recv", "out")
"""Kind -> name."""


@dataclass(frozen=True, slots=True, eq=False)
class StepDag:
    """Every operation of every rank. Build it with `expand_step`."""

    dag: Dag
    """Per rank: lead, compute, Ins; then all hops (SEND, RECV each); then Outs."""

    duration_ns: Ints
    """[ops] For `replay` or `greedy`."""

    kind: Ints
    """[ops] FORWARD .. UPDATE, LEAD, IN, SEND, RECV, OUT."""

    rank: Ints
    """[ops] Where it runs: a SEND at its sender, a RECV at its receiver."""

    index: Ints
    """[ops] Operation of the profile, bucket (IN, OUT), or hop (SEND, RECV)."""

    hops: Hops
    """The transfers."""

    step: TrainingStep
    """What it was made from."""

    def path(self, duration_ns: ArrayLike | None = None) -> Ints:
        """Return the critical path over all ranks, in time order."""
        return critical_path(self.dag, self.duration_ns if duration_ns is None else duration_ns)

    def path_ns(self, duration_ns: ArrayLike | None = None) -> dict[str, int]:
        """Return kind -> time on the critical path; the times add up to the makespan."""
        duration = self.duration_ns if duration_ns is None else np.asarray(duration_ns)
        total = Counter[str]()
        for op in self.path(duration).tolist():
            total[KIND_NAMES[self.kind[op]]] += int(duration[op])
        return {name: total[name] for name in KIND_NAMES if total[name]}

    def describe(self, op: int) -> str:
        """Return one operation in words."""
        kind, rank, index = int(self.kind[op]), int(self.rank[op]), int(self.index[op])
        profile = self.step.profile
        if kind in (SEND, RECV):
            part = ", ".join(f"{name} {int(column[index])}" for name, column in self.hops.identity().items())
            return f"{KIND_NAMES[kind]}: {part}"
        if kind <= UPDATE and profile.block[index] >= 0:
            return f"rank {rank}: {KIND_NAMES[kind]} of block {profile.block[index]}"
        return f"rank {rank}: {KIND_NAMES[kind]} {index}"


def expand_step(step: TrainingStep, *, factor: ArrayLike | None = None, lane_order: bool = True) -> StepDag:
    """Expand `step` over all ranks of its network.

    `factor` [ranks] multiplies the compute of each rank (stragglers). With
    `lane_order=False` the Dag is for `greedy`: buckets may overtake each other
    by `step.order`. Raises `InputError` on a wrong factor.
    """
    ranks = step.network.num_ranks
    slow = np.ones(ranks) if factor is None else np.asarray(factor, np.float64)
    if slow.shape != (ranks,) or not (np.isfinite(slow).all() and (slow >= 0).all()):
        raise InputError(f"factor has shape {list(slow.shape)}; pass one finite number >= 0 for each of {ranks} ranks.")
    ends, profile = step.bucket_ends(), step.profile
    hops = expand(step.bucket_bytes(), step.parts[ends], step.network)
    before, takes = step.op_ns()
    work = np.concatenate([[before], takes])
    buckets, width, num_hops = ends.size, 1 + takes.size + ends.size, hops.src.size
    # Numbers of the operations, with R ranks and h hops:
    #
    #     lead ops Ins | lead ops Ins | ... | SEND RECV | SEND RECV | ... | Outs [R, buckets]
    #     base[0] = 0    base[1] = width      sends[0]    sends[1]          outs[0, 0] = R width + 2 h
    #
    # Rank r computes on lane r, SENDs are on lanes R and up; Ins, RECVs and Outs have no lane (-1).
    base = np.arange(ranks) * width
    sends = ranks * width + 2 * np.arange(num_hops)
    outs = ranks * width + 2 * num_hops + np.arange(ranks * buckets).reshape(ranks, buckets)

    per_rank = np.concatenate([work, np.zeros(buckets, np.int64)])
    kinds = np.concatenate([[LEAD], profile.kind, np.full(buckets, IN)])
    index = np.concatenate([[0], np.arange(takes.size), np.arange(buckets)])
    duration = np.concatenate([
        np.rint(slow[:, None] * per_rank).astype(np.int64).reshape(-1),
        np.stack([hops.send_ns, hops.recv_ns], axis=1).reshape(-1),
        np.zeros(outs.size, np.int64),
    ])  # fmt: skip
    lane = np.concatenate([
        np.where(np.tile(kinds, ranks) == IN, -1, np.repeat(np.arange(ranks), width)),
        np.stack([ranks + hops.lane, np.full(num_hops, -1)], axis=1).reshape(-1),
        np.full(outs.size, -1),
    ])  # fmt: skip
    src, dst = _edges(step, hops, base, sends, outs, lane_order=lane_order)
    return StepDag(
        dag=Dag.from_edges(
            duration.size,
            src,
            dst,
            lane=lane,
            lane_order=lane_order,
            priority=None if lane_order else _priority(step, hops, kinds, ranks, outs.size),
        ),
        duration_ns=duration,
        kind=np.concatenate([np.tile(kinds, ranks), np.tile([SEND, RECV], num_hops), np.full(outs.size, OUT)]),
        rank=np.concatenate([
            np.repeat(np.arange(ranks), width), np.stack([hops.src, hops.dst], axis=1).reshape(-1),
            np.repeat(np.arange(ranks), buckets),
        ]),
        index=np.concatenate([
            np.tile(index, ranks), np.repeat(np.arange(num_hops), 2), np.tile(np.arange(buckets), ranks),
        ]),
        hops=hops,
        step=step,
    )  # fmt: skip


def _edges(
    step: TrainingStep, hops: Hops, base: Ints, sends: Ints, outs: NDArray[np.int64], *, lane_order: bool
) -> tuple[Ints, Ints]:
    """Return the order: producer -> In -> SEND -> RECV -> SEND ... -> Out -> update, and In -> Out."""
    profile, ends = step.profile, step.bucket_ends()
    num_ops, buckets = profile.kind.size, ends.size
    produced = base[:, None] + 1 + profile.producer[ends][None, :]
    ins = base[:, None] + 1 + num_ops + np.arange(buckets)[None, :]
    updates = np.flatnonzero(profile.kind == UPDATE)
    waited = profile.tensor[updates]
    bucket_of = np.searchsorted(ends, np.maximum(waited, 0))
    pairs = [
        (produced, ins),
        (ins, outs),
        (ins[hops.enters[1], hops.enters[0]], sends[hops.enters[2]]),
        (sends, sends + 1),
        (sends[hops.after[0]] + 1, sends[hops.after[1]]),
        (sends[hops.leaves[0]] + 1, outs[hops.leaves[2], hops.leaves[1]]),
    ]
    for update, tensor, bucket in zip(updates.tolist(), waited.tolist(), bucket_of.tolist(), strict=True):
        awaited = outs if tensor < 0 else outs[:, bucket : bucket + 1]
        pairs.append((awaited, np.broadcast_to((base + 1 + update)[:, None], awaited.shape)))
    if not lane_order:
        chain = base[:, None] + np.arange(int(updates[0]) + 1)[None, :]  # lead, then all but updates in program order
        pairs += [(chain[:, :-1], chain[:, 1:]), (sends[hops.then[0]], sends[hops.then[1]])]
    return (
        np.concatenate([np.reshape(a, -1) for a, _ in pairs]).astype(np.int64),
        np.concatenate([np.reshape(b, -1) for _, b in pairs]).astype(np.int64),
    )


def _priority(step: TrainingStep, hops: Hops, kinds: Ints, ranks: int, num_outs: int) -> NDArray[np.float64]:
    """Return [ops] what goes first: compute by kind, then buckets as launched, or those that forward needs first."""
    bucket = np.repeat(np.arange(step.bucket_ends().size), step.parts[step.bucket_ends()])[hops.seq]
    turn = hops.seq if step.order == "ready" else -bucket
    return np.concatenate([
        np.tile(np.where(kinds == LEAD, FORWARD, kinds), ranks).astype(np.float64),
        np.repeat(turn, 2).astype(np.float64),
        np.zeros(num_outs),
    ])  # fmt: skip
