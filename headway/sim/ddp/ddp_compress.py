"""A data-parallel step whose gradients travel compressed: what `compress=CODEC` makes of a `DdpStep`.

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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headway.core.units import NS_PER_S
from headway.cost.codecs import MIN_BYTES, CodecTimes, TensorRange, partitions, wire_bytes
from headway.sim.ddp.ddp_step import DdpStep
from headway.sim.ddp.ddp_thread import CALL, WAIT, WORK, Thread

FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Compression:
    """How gradients are compressed, and what that costs this host."""

    codec: str
    """Name, as `headway.cost.codecs.read_codec` reads it."""

    times: CodecTimes
    """What was measured."""

    buckets: Sequence[Sequence[tuple[int, str]]] = ()
    """Bytes and codec of each gradient of each bucket of a backward, '' = raw; a bucket that has other bytes counts as
    one tensor with `codec`."""

    shared_cores: bool = False
    """Whether the two threads of a rank share a core."""

    def gradients(self, place: int, size: int) -> Sequence[tuple[int, str]]:
        """Return bytes and codec of the gradients in a bucket of `size` bytes, the one at `place` of a backward."""
        if place < len(self.buckets) and sum(count for count, _ in self.buckets[place]) == size:
            return self.buckets[place]
        return [(size, self.codec)]

    def stages_ns(self, part: Sequence[tuple[TensorRange, str]], ranks: int) -> tuple[int, int, int]:
        """Return what sending, answering and taking a partition costs a rank, ns; its share of owning is a mean."""
        costs = [self.times.stages(codec, one.stop - one.start, ranks) for one, codec in part]
        push, answer, pull = (sum(column) * NS_PER_S for column in zip(*costs, strict=True))
        return round(push), round(answer / ranks), round(pull)


def message_bytes(part: Sequence[tuple[TensorRange, str]], ranks: int) -> int:
    """Return the bytes of a rank's packets of a partition for all owners, each row as long as the longest."""
    rows = [0] * ranks
    for one, codec in part:
        rows[one.owner] += wire_bytes(codec, one.stop - one.start)
    return ranks * max(rows)


Items = list[tuple[int, int, int]]
"""What a lane does, in order: (kind as in `ddp_thread`, own time, collective or -1)."""


def with_codec(step: DdpStep, compression: Compression) -> DdpStep:
    """Return `step` with every bucket compressed. Raises `InputError` where the codec is unknown or was not measured.

    A training thread hands a bucket to its lane by a collective of one, and waits for another one that its lane calls.
    """
    ranks, count = len(step.threads), step.size.size
    places = _places(step.threads[0])
    buckets = sorted(places)
    sizes, pools = step.size.tolist(), [0] * count

    def added(size: int, pool: int) -> int:
        sizes.append(size)
        pools.append(pool)
        return len(sizes) - 1

    lanes: list[Items] = [[(WORK, 0, -1)] for _ in step.threads]
    refs = [thread.ref.copy() for thread in step.threads]
    for bucket in buckets:
        given, done = ([added(0, -1) for _ in lanes] for _ in range(2))
        work = _reduced(compression.gradients(places[bucket], int(step.size[bucket])), ranks, compression, added)
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


def _places(thread: Thread) -> dict[int, int]:
    """Return collective -> number of the bucket within its backward."""
    calls = _of_buckets(thread)
    found: dict[int, int] = {}
    for number in np.unique(thread.backward[calls]):
        refs = thread.ref[calls & (thread.backward == number)].tolist()
        found |= {ref: place for place, ref in enumerate(refs)}
    return found


def _thread(items: Items, like: Thread) -> Thread:
    """Return a thread beside another one; all that orders it is its items."""
    what, own, ref = np.array(items, np.int64).T
    blank = np.full(what.size, -1, np.int64)
    return replace(like, what=what, begin_ns=blank + 1 + like.begin_ns[0], own_ns=own, ref=ref, backward=blank)


def _reduced(
    whole: Sequence[tuple[int, str]], ranks: int, compression: Compression, added: Callable[[int, int], int]
) -> Items:
    """Return what a lane does with a bucket: all partitions through a stage, then the next stage."""

    def collective(size: int) -> int:
        return added(size, 1)

    sent = [(count // FLOAT_BYTES, codec) for count, codec in whole if count >= MIN_BYTES and codec]
    raw = sum(count for count, codec in whole if count < MIN_BYTES or not codec)
    cut = partitions([count for count, _ in sent], ranks)
    parts = [[(stretch, sent[stretch.tensor][1]) for stretch in part] for part in cut]
    small, queue = [collective(raw)] if raw else [], round(compression.times.collective_s * NS_PER_S)
    pushed, pulled = ([collective(message_bytes(part, ranks) // 2) for part in parts] for _ in range(2))
    items: Items = [(CALL, queue, number) for number in small]
    costs = [compression.stages_ns(part, ranks) for part in parts]
    for push, (encode, _, _) in zip(pushed, costs, strict=True):
        items += [(WORK, encode, -1), (CALL, queue, push)]
    for push, pull, (_, middle, _) in zip(pushed, pulled, costs, strict=True):
        items += [(WAIT, 0, push), (WORK, middle, -1), (CALL, queue, pull)]
    for pull, (_, _, decode) in zip(pulled, costs, strict=True):
        items += [(WAIT, 0, pull), (WORK, decode, -1)]
    return items + [(WAIT, 0, number) for number in small]
