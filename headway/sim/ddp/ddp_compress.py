"""A data-parallel step whose gradients travel compressed: what `compress=CODEC` makes of a `Step`.

Each rank gets a second thread, which takes the buckets one after the other. Of a bucket's partitions it encodes the
next one while the last travels:

    training  ..grad call .............................................. wait copy
    lane           | encode 0  encode 1 | sum 0  sum 1 | decode 0  decode 1 |
    link                     [ to owners 0 ][ ... 1 ][ to all 0 ][ ... 1 ]

A rank sends (W - 1) / W of its packets to their owners and as much to all others afterwards; a plain all-reduce of s
bytes sends 2 (W - 1) / W of s. So a packet costs the link half of its bytes in each direction, at the rate of the
recorded all-reduces. Where there are not two cores per rank, both threads of a rank share one.

What a partition costs the lane is the sum over its stretches (`headway.cost.codecs.partitions`: each tensor is cut
into a share per owner) of the measured stages (`CodecTimes.stages`): many small tensors cost more than one large one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from headway.core.units import NS_PER_S
from headway.cost.codecs import CodecName, CodecTimes, Stretch, partitions, read_codec, wire_bytes
from headway.sim.ddp.ddp_step import Step
from headway.sim.ddp.ddp_thread import CALL, WAIT, WORK, Thread

MIN_BYTES = 65_536
"""Smaller tensors travel raw, together (BytePS: 65,536)."""

FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Compression:
    """How gradients are compressed, and what that costs this host."""

    codec: str
    """Name, as `headway.cost.codecs.read_codec` reads it."""

    times: CodecTimes
    """What was measured."""

    tensors: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Bytes of a bucket -> bytes of the gradients in it; a bucket that is not listed counts as one tensor."""

    shared_cores: bool = False
    """Whether the two threads of a rank share a core."""

    def stages_ns(self, stretches: Sequence[Stretch], ranks: int) -> tuple[int, int, int]:
        """Return what sending, answering and taking a partition costs a rank, ns; its share of owning is a mean."""
        costs = [self.times.stages(self.codec, one.stop - one.start, ranks) for one in stretches]
        push, answer, pull = (sum(column) * NS_PER_S for column in zip(*costs, strict=True))
        return round(push), round(answer / ranks), round(pull)


def message_bytes(codec: CodecName, stretches: Sequence[Stretch], ranks: int) -> int:
    """Return the bytes of a rank's packets of a partition for all owners, each row as long as the longest."""
    rows = [0] * ranks
    for one in stretches:
        rows[one.owner] += wire_bytes(codec, one.stop - one.start)
    return ranks * max(rows)


Items = list[tuple[int, int, int]]
"""What a lane does, in order: (kind as in `ddp_thread`, own time, collective or -1)."""


def with_codec(step: Step, compression: Compression) -> Step:
    """Return `step` with every bucket compressed. Raises `InputError` where the codec is unknown or was not measured.

    A training thread hands a bucket to its lane by a collective of one, and waits for another one that its lane calls.
    """
    ranks, count = len(step.threads), step.size.size
    buckets = sorted(set(step.threads[0].ref[_of_buckets(step.threads[0])].tolist()))
    sizes, pools = step.size.tolist(), [0] * count

    def added(size: int, pool: int) -> int:
        sizes.append(size)
        pools.append(pool)
        return len(sizes) - 1

    lanes: list[Items] = [[(WORK, 0, -1)] for _ in step.threads]
    refs = [thread.ref.copy() for thread in step.threads]
    for bucket in buckets:
        given, done = ([added(0, -1) for _ in lanes] for _ in range(2))
        work = _reduced(int(step.size[bucket]), ranks, compression, lambda size: added(size, 1))
        for rank, (lane, thread) in enumerate(zip(lanes, step.threads, strict=True)):
            lane += [(WAIT, 0, given[rank]), *work, (CALL, 0, done[rank])]
            refs[rank][(thread.ref == bucket) & (thread.what == CALL)] = given[rank]
            refs[rank][(thread.ref == bucket) & (thread.what == WAIT)] = done[rank]
        sizes[bucket], pools[bucket] = 0, -1  # nobody calls it any more
    mains = [replace(thread, ref=ref) for thread, ref in zip(step.threads, refs, strict=True)]
    own_ns, alone = np.zeros(len(sizes), np.int64), np.zeros((len(sizes), 2 * ranks), bool)
    own_ns[:count] = np.where(np.isin(np.arange(count), buckets), 0, step.own_ns)
    alone[:count, :ranks] = step.alone
    return replace(
        step,
        threads=(*mains, *(_thread(lane, thread) for lane, thread in zip(lanes, step.threads, strict=True))),
        size=np.array(sizes, np.int64),
        own_ns=own_ns,
        alone=alone,
        offset_ns=np.tile(step.offset_ns, 2),
        pool=np.array(pools, np.int64),
        cores=np.tile(np.arange(ranks, dtype=np.int64), 2) if compression.shared_cores else None,
    )


def _of_buckets(thread: Thread) -> NDArray[np.bool_]:
    return np.asarray((thread.what == CALL) & (thread.backward >= 0))


def _thread(items: Items, like: Thread) -> Thread:
    """Return a thread beside another one; all that orders it is its items."""
    what, own, ref = np.array(items, np.int64).T
    blank = np.full(what.size, -1, np.int64)
    return replace(like, what=what, begin_ns=blank + 1 + like.begin_ns[0], own_ns=own, ref=ref, backward=blank)


def _reduced(size: int, ranks: int, compression: Compression, collective: Callable[[int], int]) -> Items:
    """Return what a lane does with a bucket of `size` bytes: all partitions through a stage, then the next stage."""
    codec, whole = read_codec(compression.codec), compression.tensors.get(size, [size])
    raw = sum(one for one in whole if one < MIN_BYTES)
    parts = partitions([one // FLOAT_BYTES for one in whole if one >= MIN_BYTES], ranks)
    small = [collective(raw)] if raw else []
    pushed, pulled = ([collective(message_bytes(codec, part, ranks) // 2) for part in parts] for _ in range(2))
    items: Items = [(CALL, 0, number) for number in small]
    costs = [compression.stages_ns(part, ranks) for part in parts]
    for push, (encode, _, _) in zip(pushed, costs, strict=True):
        items += [(WORK, encode, -1), (CALL, 0, push)]
    for push, pull, (_, middle, _) in zip(pushed, pulled, costs, strict=True):
        items += [(WAIT, 0, push), (WORK, middle, -1), (CALL, 0, pull)]
    for pull, (_, _, decode) in zip(pulled, costs, strict=True):
        items += [(WAIT, 0, pull), (WORK, decode, -1)]
    return items + [(WAIT, 0, number) for number in small]
