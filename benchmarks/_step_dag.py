"""A training step over all ranks, with every collective expanded to its hops: what choices are checked on.

Every rank computes, an In and an Out per rank tie each bucket's producer, its SEND and RECV hops and the update
together. Times are int64 ns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks._hops import Hops, expand
from benchmarks._step_model import UPDATE, Ints, TrainingStep
from headway.sim.graph.dag import Dag


@dataclass(frozen=True, slots=True, eq=False)
class StepDag:
    """Every operation of every rank. Build it with `expand_step`."""

    dag: Dag
    """Per rank: lead, compute, Ins; then all hops (SEND, RECV each); then Outs."""

    duration_ns: Ints
    """[ops] For `replay`."""


def expand_step(step: TrainingStep) -> StepDag:
    """Expand `step` over all ranks of its network."""
    ranks, ends = step.network.num_ranks, step.bucket_ends()
    hops = expand(step.bucket_bytes(), step.parts[ends], step.network)
    before, takes = step.op_ns()
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
    is_in = np.arange(width) > takes.size
    lane = np.concatenate([
        np.where(is_in[None, :], -1, np.arange(ranks)[:, None]).reshape(-1),
        np.stack([ranks + hops.lane, np.full(num_hops, -1)], axis=1).reshape(-1),
        np.full(outs.size, -1),
    ])  # fmt: skip
    duration = np.concatenate([
        np.tile(np.concatenate([[before], takes, np.zeros(buckets, np.int64)]), ranks),
        np.stack([hops.send_ns, hops.recv_ns], axis=1).reshape(-1),
        np.zeros(outs.size, np.int64),
    ])  # fmt: skip
    return StepDag(Dag.from_edges(duration.size, *_edges(step, hops, base, sends, outs), lane=lane), duration)


def _edges(step: TrainingStep, hops: Hops, base: Ints, sends: Ints, outs: Ints) -> tuple[Ints, Ints]:
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
    return (
        np.concatenate([np.reshape(a, -1) for a, _ in pairs]).astype(np.int64),
        np.concatenate([np.reshape(b, -1) for _, b in pairs]).astype(np.int64),
    )
