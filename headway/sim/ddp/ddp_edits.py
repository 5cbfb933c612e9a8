"""Edits of a data-parallel step: one operation N times as slow, compute faster, another bucket size.

Pure functions from a `DdpStep` to a `DdpStep`. An operation is what its name matches
on the training thread, with everything inside it; of a forward operation also
its backward, by the profiler's arrows: an annotated layer is both. Bucket
sizes are laid out by DDP's rule over the gradients in their observed order;
what it costs to copy a gradient moves with it. Sizes in bytes, times in ns.

>>> covered(np.array([0, 20]), np.array([10, 30]), np.array([0, 5, 25, 40])).tolist()
[0, 5, 15, 20]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.core.units import NS_PER_S
from headway.cost.codecs import MIN_BYTES, CodecTimes, TensorRange, partitions, wire_bytes
from headway.sim.ddp import ddp_link as ddp_buckets
from headway.sim.ddp.ddp_link import DdpStep
from headway.sim.ddp.ddp_thread import CALL, COPY, GRAD, WAIT, WORK, Thread
from headway.sim.ddp.ddp_window import Ints, rows_of
from headway.trace.events.intervals import merged
from headway.trace.events.trace import Trace
from headway.trace.profiler.kineto_names import FORWARD
from headway.trace.rings.rank_tables import DdpModel


@dataclass(frozen=True, slots=True)
class GradientOrder:
    """The gradients of a model in the order in which they become ready."""

    size: tuple[int, ...]
    """[g] Bytes."""

    kind: tuple[str, ...]
    """[g] Type: gradients of two types never share a bucket."""

    limit: tuple[int, int]
    """Limits of the first and of further buckets in the recorded run, bytes."""


def gradients_of(models: Sequence[DdpModel]) -> GradientOrder:
    """Return the gradients that the run noted. Raises `InputError` when it noted none, several models, or no order."""
    if len(models) != 1:
        raise InputError(
            f"the run noted {len(models)} DistributedDataParallel models; another bucket size can be laid out for one. "
            "Record it again with deep windows (headway run --windows), or try the size live."
        )
    model = models[0]
    sizes, types, order = model.parameter_bytes, model.parameter_types, model.order
    if sorted(order) != list(range(len(sizes))):
        raise InputError(
            f"DDP has rebuilt its buckets for {len(order)} of {len(sizes)} parameters: the order in which gradients "
            "become ready is not known. Try the size live."
        )
    return GradientOrder(
        tuple(sizes[index] for index in order),
        tuple(types[index] for index in order),
        (model.first_bucket_bytes, model.bucket_bytes),
    )


def matched(names: Sequence[str], pattern: str) -> NDArray[np.bool_]:
    """Return [names] bool: which names `pattern` (a glob) matches."""
    return np.array([fnmatchcase(name, pattern) for name in names], dtype=bool)


def scaled(step: DdpStep, window: Trace, factors: Sequence[tuple[str, float]]) -> DdpStep:
    """Return `step` with operations that match each (glob, factor) taking that many times as long."""
    threads = []
    for thread in step.threads:
        trace = rows_of(window.where(window.events["rank"] == thread.rank))
        own = thread.own_ns.astype(np.float64)
        for pattern, factor in factors:
            begin, end = _stretches(trace, pattern)
            inside = covered(begin, end, thread.begin_ns + thread.own_ns) - covered(begin, end, thread.begin_ns)
            share = np.where(thread.what == WAIT, 0.0, inside / np.maximum(thread.own_ns, 1))
            own *= 1 + (factor - 1) * share
        threads.append(replace(thread, own_ns=np.rint(own).astype(np.int64)))
    return replace(step, threads=tuple(threads))


def accelerated(step: DdpStep, speed: float) -> DdpStep:
    """Return `step` with all work of the training threads `speed` times as fast."""
    works = [np.isin(thread.what, (WORK, COPY)) for thread in step.threads]
    threads = [
        replace(thread, own_ns=np.where(work, np.rint(thread.own_ns / speed), thread.own_ns).astype(np.int64))
        for thread, work in zip(step.threads, works, strict=True)
    ]
    return replace(step, threads=tuple(threads))


def paced(step: DdpStep, paces: Mapping[int, float]) -> DdpStep:
    """Return `step` with the work of each rank times its pace (`ddp_link`); a rank not listed keeps its own."""
    threads = [
        replace(
            thread,
            own_ns=np.where(thread.what == WORK, np.rint(thread.own_ns * paces.get(thread.rank, 1.0)), thread.own_ns)
            .astype(np.int64),
        )
        for thread in step.threads
    ]  # fmt: skip
    return replace(step, threads=tuple(threads))


def _stretches(trace: Trace, pattern: str) -> tuple[Ints, Ints]:
    """Return the stretches of the main thread that matching operations and their backward cover, apart from others."""
    events = trace.events
    main = np.isin(events["lane"], [code for code, name in enumerate(trace.lanes) if name == "main"])
    start, end = events["start_ns"], events["start_ns"] + events["duration_ns"]
    hit = main & matched([*trace.names, ""], pattern)[events["name"]]
    begin, until = merged(start[hit], end[hit])
    arrows = main & (events["corr"] >= FORWARD)
    inside = arrows & (covered(begin, until, end) - covered(begin, until, start) >= np.maximum(end - start, 1))
    partner = arrows & np.isin(events["corr"], events["corr"][inside])
    return merged(start[hit | partner], end[hit | partner])


def covered(begin: Ints, end: Ints, at: Ints) -> Ints:
    """Return how much of the time up to each instant `at` the disjoint stretches cover."""
    if not begin.size:
        return np.zeros(at.size, np.int64)
    total = np.concatenate([[0], np.cumsum(end - begin)])
    place = np.searchsorted(begin, at, side="right") - 1
    inside = np.minimum(at, end[np.maximum(place, 0)]) - begin[np.maximum(place, 0)]
    return np.where(place >= 0, total[np.maximum(place, 0)] + inside, 0)


def with_buckets(step: DdpStep, gradients: GradientOrder, bucket_mb: float | str) -> DdpStep:
    """Return `step` with the gradients in buckets of another size (MiB, or 'default').

    Raises `InputError` when the recorded buckets are not those that DDP's rule gives for the recorded limits: then the
    rule does not tell what another size would do.
    """
    recorded = ddp_buckets.assign(gradients.size, gradients.kind, gradients.limit)
    _check(step, gradients, recorded)
    buckets = ddp_buckets.assign(gradients.size, gradients.kind, ddp_buckets.limits(bucket_mb))
    threads, layout = [], []
    for thread in step.threads:
        walk = _ItemRelayout(thread, buckets)
        threads.append(walk.thread())
        layout.append(walk.collectives)
    if any(other != layout[0] for other in layout[1:]):
        raise InputError("ranks would queue their collectives in different orders. Try the size live.")
    sizes = [sum(gradients.size[index] for index in bucket) for bucket in buckets]
    old = np.array([index for index, _ in layout[0]], np.int64)
    bucket_of = np.array([bucket for _, bucket in layout[0]], np.int64)
    return replace(
        step,
        threads=tuple(threads),
        size=np.where(bucket_of >= 0, np.array(sizes)[bucket_of], step.size[old]),
        own_ns=np.where(bucket_of >= 0, 0, step.own_ns[old]),
        alone=np.where((bucket_of >= 0)[:, None], False, step.alone[old]),
    )


def _check(step: DdpStep, gradients: GradientOrder, recorded: list[list[int]]) -> None:
    """Refuse a step whose buckets are not `recorded`."""
    expected = [sum(gradients.size[index] for index in bucket) for bucket in recorded]
    thread = step.threads[0]
    calls = (thread.what == CALL) & (thread.backward >= 0)
    for backward in np.unique(thread.backward[calls]):
        seen = step.size[thread.ref[calls & (thread.backward == backward)]].tolist()
        if seen != expected:
            raise InputError(
                f"the window shows buckets of {seen} bytes, DDP's rule gives {expected} for this run: another size "
                "cannot be laid out. Try it live."
            )


class _ItemRelayout:
    """One rank's items laid out anew: gradients queue other buckets, the finaliser waits for those."""

    def __init__(self, thread: Thread, buckets: list[list[int]]) -> None:
        self.old, self.buckets = thread, buckets
        self.collectives: list[tuple[int, int]] = []
        """(old index or 0, bucket or -1) of each collective in the order of its call."""
        self._rows: list[tuple[int, int, int, int, int]] = []
        self._renamed: dict[int, int] = {}

    def thread(self) -> Thread:
        """Walk the items and return the new thread."""
        old = self.old
        synced = np.unique(old.backward[(old.what == CALL) & (old.backward >= 0)]).tolist()
        plans = {backward: _Backward(old, backward, self.buckets) for backward in synced}
        for row in range(old.what.size):
            plan = plans.get(int(old.backward[row]))
            inside = next((p for p in plans.values() if p.first <= row <= p.last), None)
            if inside is not None and (plan is inside or old.what[row] == WORK):
                if row == inside.first:
                    self._finalise(inside)
            elif plan is None:
                self._keep(row)
            elif old.what[row] == GRAD:
                self._keep(row)
                for bucket in plan.ready(int(old.ref[row])):
                    self._call(plan, bucket, row)
        columns = np.array(self._rows, np.int64).reshape(-1, 5).T
        return replace(
            old, what=columns[0], begin_ns=columns[1], own_ns=columns[2], ref=columns[3], backward=columns[4]
        )

    def _keep(self, row: int) -> None:
        """Keep an item; its collective may have another number now."""
        old, ref = self.old, int(self.old.ref[row])
        if old.what[row] == CALL:
            self._renamed[ref] = len(self.collectives)
            self.collectives.append((ref, -1))
        if old.what[row] in (CALL, WAIT):
            ref = self._renamed[ref]
        self._add(int(old.what[row]), row, int(old.own_ns[row]), ref)

    def _call(self, plan: _Backward, bucket: int, row: int) -> None:
        """Queue a bucket after the gradient that completed it."""
        plan.queued[bucket] = len(self.collectives)
        self._add(CALL, row, plan.call_ns, len(self.collectives))
        self.collectives.append((0, bucket))

    def _finalise(self, plan: _Backward) -> None:
        """Wait for each bucket in order, then copy its gradients out."""
        for bucket, members in enumerate(self.buckets):
            self._add(WAIT, plan.first, plan.wait_ns, plan.queued[bucket])
            self._add(WORK, plan.first, round(plan.rest_ns * len(members) / plan.count), -1)
            for index in members:
                if plan.copy_ns[index]:
                    self._add(COPY, plan.first, plan.copy_ns[index], index)

    def _add(self, what: int, row: int, own: int, ref: int) -> None:
        self._rows.append((what, int(self.old.begin_ns[row]), own, ref, int(self.old.backward[row])))


class _Backward:
    """What one synchronised backward of a thread costs, apart from how its gradients are put into buckets."""

    def __init__(self, thread: Thread, number: int, buckets: list[list[int]]) -> None:
        mine = thread.backward == number
        self.count = sum(len(bucket) for bucket in buckets)
        grads = int((mine & (thread.what == GRAD)).sum())
        if grads != self.count:
            raise InputError(
                f"a backward of the window made {grads} gradients ready, the model has {self.count}. Another bucket "
                "size can be laid out only when each step's backward makes all of them ready once; try it live."
            )
        region = np.flatnonzero(mine & np.isin(thread.what, (WAIT, COPY)))
        self.first, self.last = int(region.min()), int(region.max())
        """Rows of the finaliser."""
        rows = np.arange(thread.what.size)
        inside = (rows >= self.first) & (rows <= self.last)
        self.call_ns = round(float(np.median(thread.own_ns[mine & (thread.what == CALL)])))
        self.wait_ns = round(float(np.median(thread.own_ns[mine & (thread.what == WAIT)])))
        self.rest_ns = int(thread.own_ns[inside & (thread.what == WORK)].sum())
        self.copy_ns = [0] * self.count
        for row in np.flatnonzero(mine & (thread.what == COPY)).tolist():
            self.copy_ns[int(thread.ref[row])] = int(thread.own_ns[row])
        self.queued: dict[int, int] = {}
        self._open = [max(bucket) for bucket in buckets]

    def ready(self, index: int) -> range:
        """Return the buckets that can be queued once gradients up to `index` are ready: in order, none before it."""
        first = len(self.queued)
        last = first
        while last < len(self._open) and self._open[last] <= index:
            last += 1
        return range(first, last)


# A data-parallel step whose gradients travel compressed: what `compress=CODEC` makes of a `DdpStep`.
#
# Each rank gets a second thread, which takes the buckets one after the other. Of a bucket's partitions it encodes the
# next one while the last travels:
#
#     training  ..grad call .............................................. wait copy
#     lane           | encode 0  encode 1 | sum 0  sum 1 | decode 0  decode 1 |
#     link                     [ to owners 0 ][ ... 1 ][ to all 0 ][ ... 1 ]
#
# A rank sends (W - 1) / W of its packets to their owners and as much to all others afterwards; a plain all-reduce of s
# bytes sends 2 (W - 1) / W of s. So a packet costs the link half of its bytes in each direction, at the rate of the
# recorded all-reduces. Where there are not two cores per rank, both threads of a rank share one.
#
# What a partition costs the lane is the sum over its stretches (`headway.cost.codecs.partitions`: each tensor is cut
# into a share per owner) of the measured stages (`CodecTimes.stages`): many small tensors cost more than one large one.

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


def _places(thread: Thread) -> dict[int, int]:
    """Return collective -> number of the bucket within its backward."""
    calls = (thread.what == CALL) & (thread.backward >= 0)
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
