"""A data-parallel step whose gradients travel compressed: what `compress=CODEC` makes of a `Step`.

Each rank gets a second thread, which takes the buckets one after the other. Of a bucket's partitions it encodes the
next one while the last travels:

    training  ..grad call .............................................. wait copy
    lane           | encode 0  encode 1 | sum 0  sum 1 | decode 0  decode 1 |
    link                     [ to owners 0 ][ ... 1 ][ to all 0 ][ ... 1 ]

A rank sends (W - 1) / W of its packets to their owners and as much to all others afterwards; a plain all-reduce of s
bytes sends 2 (W - 1) / W of s. So a packet costs the link half of its bytes in each direction, at the rate of the
recorded all-reduces. Where there are not two cores per rank, both threads of a rank share one.

What a partition of n numbers costs the lane, with e and d the seconds of encoding and decoding (`CodecTimes`):

    encode  e(n), and d(n) for the residual;  sum  W d(n / W) + e(n / W), and d(n / W) for the residual;  decode  d(n)

each with the passes over memory that adding and copying take (the entry `raw` of the table). What a sparse packet says
is added and subtracted in its places, without a pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from headway.core.units import NS_PER_S
from headway.cost.codecs import CodecName, CodecTimes, read_codec, wire_bytes
from headway.sim.ddp_step import Step
from headway.sim.ddp_thread import CALL, WAIT, WORK, Thread
from headway.sim.ddp_window import Ints

PARTITION_BYTES = 4_000_000
"""Raw bytes that are encoded, sent and decoded as one (BytePS: 4,096,000)."""

MIN_BYTES = 65_536
"""Smaller tensors travel raw, together (BytePS: 65,536)."""

RAW = "raw"
"""Entry of a table of codecs: `encode_s` of one pass that adds two tensors, `decode_s` of one that copies."""

UNBIASED = ("half", "bfloat16", "dither", "natural")
"""Kinds that keep no residual."""

SPARSE = ("topk", "randomk")
"""Kinds that send places."""

FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Compression:
    """How gradients are compressed, and what that costs this host."""

    codec: str
    """Name, as `headway.cost.codecs.read_codec` reads it."""

    times: CodecTimes
    """What was measured."""

    raw_fraction: float = 0.0
    """Share of the gradients' bytes in tensors that are too small."""

    shared_cores: bool = False
    """Whether the two threads of a rank share a core."""

    def lane_ns(self, n: int, ranks: int) -> tuple[int, int, int]:
        """Return what encoding, summing and decoding a partition of `n` numbers takes, ns."""
        own = -(-n // ranks)
        kind = read_codec(self.codec).kind
        residual, dense = kind not in UNBIASED, kind not in SPARSE
        (encode, decode), (encode_own, decode_own) = (self.times.seconds(self.codec, count) for count in (n, own))
        (add, copy), (add_own, _) = (self.times.seconds(RAW, count) for count in (n, own))
        # The check for NaN reads a tensor once, about what a copy costs.
        first = copy + encode + residual * (decode + (1 + dense) * add)
        middle = ranks * (decode_own + dense * add_own) + encode_own + residual * (decode_own + (2 + dense) * add_own)
        found = (first, middle, decode + copy)
        return round(found[0] * NS_PER_S), round(found[1] * NS_PER_S), round(found[2] * NS_PER_S)


def packet_bytes(codec: CodecName, n: int, ranks: int) -> int:
    """Return the bytes of a rank's packets of `n` numbers, one for each owner."""
    own = -(-n // ranks)
    return sum(wire_bytes(codec, min(own, n - first)) or 0 for first in range(0, n, own))


class _Lane:
    """The items of one rank's second thread."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.items: list[tuple[int, int, int]] = []

    def add(self, what: int, own_ns: int = 0, ref: int = -1) -> None:
        """Append one: kind, own time, collective."""
        self.items.append((what, own_ns, ref))

    def thread(self, begin_ns: int, empty: Thread) -> Thread:
        """Return the thread; all that orders it is its items."""
        what, own, ref = np.array([(WORK, 0, -1), *self.items], np.int64).T
        blank = np.full(what.size, -1, np.int64)
        return replace(empty, what=what, begin_ns=blank + 1 + begin_ns, own_ns=own, ref=ref, backward=blank)


def with_codec(step: Step, compression: Compression) -> Step:
    """Return `step` with every bucket compressed. Raises `InputError` where the codec is unknown or was not measured.

    A training thread hands a bucket to its lane by a collective of one, and waits for another one that its lane calls.
    """
    ranks, codec = len(step.threads), read_codec(compression.codec)
    main = step.threads[0]
    buckets = main.ref[(main.what == CALL) & (main.backward >= 0)]
    lanes = [_Lane(thread.rank) for thread in step.threads]
    made = _Collectives(step)
    handed = {int(bucket): [made.handover() for _ in lanes] for bucket in buckets}
    done = {int(bucket): [made.handover() for _ in lanes] for bucket in buckets}
    for bucket in map(int, buckets):
        for lane, number in zip(lanes, handed[bucket], strict=True):
            lane.add(WAIT, ref=number)
        _reduced(int(step.size[bucket]), codec, compression, lanes, made)
        for lane, number in zip(lanes, done[bucket], strict=True):
            lane.add(CALL, ref=number)
    threads = []
    for index, thread in enumerate(step.threads):
        ref = thread.ref.copy()
        for bucket in map(int, buckets):
            of_bucket = thread.ref == bucket
            ref[of_bucket & (thread.what == CALL)] = handed[bucket][index]
            ref[of_bucket & (thread.what == WAIT)] = done[bucket][index]
        threads.append(replace(thread, ref=ref))
    for lane, thread in zip(lanes, step.threads, strict=True):
        threads.append(lane.thread(int(thread.begin_ns[0]), thread))
    cores = np.tile(np.arange(ranks, dtype=np.int64), 2) if compression.shared_cores else None
    return made.step(tuple(threads), {int(bucket) for bucket in buckets}, cores)


def _reduced(size: int, codec: CodecName, compression: Compression, lanes: list[_Lane], made: _Collectives) -> None:
    """Add what the lanes do with a bucket of `size` bytes: all partitions through each stage, then the next stage."""
    ranks = len(lanes)
    raw = round(size * compression.raw_fraction)
    numbers = (size - raw) // FLOAT_BYTES
    most = PARTITION_BYTES // FLOAT_BYTES
    counts = [min(most, numbers - first) for first in range(0, numbers, most)]
    costs = [compression.lane_ns(n, ranks) for n in counts]
    small = made.collective(raw) if raw else -1
    pushed = [made.collective(packet_bytes(codec, n, ranks) // 2) for n in counts]
    pulled = [made.collective(packet_bytes(codec, n, ranks) // 2) for n in counts]
    for lane in lanes:
        if raw:
            lane.add(CALL, ref=small)
        for number, (encode, _, _) in zip(pushed, costs, strict=True):
            lane.add(WORK, encode)
            lane.add(CALL, ref=number)
        for push, pull, (_, middle, _) in zip(pushed, pulled, costs, strict=True):
            lane.add(WAIT, ref=push)
            lane.add(WORK, middle)
            lane.add(CALL, ref=pull)
        for number, (_, _, decode) in zip(pulled, costs, strict=True):
            lane.add(WAIT, ref=number)
            lane.add(WORK, decode)
        if raw:
            lane.add(WAIT, ref=small)


class _Collectives:
    """The collectives of a step, with those that compression adds."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._size = step.size.tolist()
        self._pool = [0] * step.size.size

    def handover(self) -> int:
        """Add one between two threads of a rank."""
        return self._add(0, -1)

    def collective(self, size: int) -> int:
        """Add one of all ranks; returns its number."""
        return self._add(size, 1)

    def _add(self, size: int, pool: int) -> int:
        self._size.append(size)
        self._pool.append(pool)
        return len(self._size) - 1

    def step(self, threads: tuple[Thread, ...], gone: set[int], cores: Ints | None) -> Step:
        """Return the step; `gone` are replaced: nobody calls them any more."""
        step, count = self._step, len(self._size)
        own = np.zeros(count, np.int64)
        own[: step.size.size] = step.own_ns
        pool = np.array(self._pool, np.int64)
        pool[sorted(gone)] = -1
        size = np.array(self._size, np.int64)
        size[sorted(gone)] = 0
        own[sorted(gone)] = 0
        alone = np.zeros((count, len(threads)), bool)
        alone[: step.size.size, : len(step.threads)] = step.alone
        offset = np.concatenate([step.offset_ns, step.offset_ns])
        return replace(
            step, threads=threads, size=size, own_ns=own, alone=alone, offset_ns=offset, pool=pool, cores=cores
        )
