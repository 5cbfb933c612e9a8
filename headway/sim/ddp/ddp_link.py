"""The link of a data-parallel job: what its collectives of a deep window took by themselves, and what rate that is.

Use it to give a duration to a collective of any size. A collective's own time
is from the last rank that started it to its end. Rate = bytes / time during
which at least one of them was running, less a fixed latency for each stretch:
two at once share the link, so their own times would count it twice. (A line
through two sizes gives nonsense latencies: the larger one is the one that
shared.) Bytes are those of the tensor, whatever the algorithm sends per byte.

>>> fit([Carried(0, 10_350_000, 10_000_000)], latency_ns=350_000)
CollectiveLink(latency_ns=350000.0, bytes_per_s=1000000000.0, spread=0.0)

DDP's published rule: which gradients go into which bucket.

Use it to lay out the buckets of a size that was never run. Gradients are taken
in the order in which they become ready; those of one type fill a bucket until
it holds at least its limit, the tensor that crosses the limit included. The
first bucket of each type has a limit of its own (1 MiB by default), so that
the first all-reduce starts early. Sizes in bytes, `bucket_mb` in MiB as in
torch's `bucket_cap_mb`.

>>> assign([3, 3, 3, 3], ["f"] * 4, limits(6 / 2**20))
[[0, 1], [2, 3]]
>>> assign([3, 3, 3, 3], ["f"] * 4, (1, 100))
[[0], [1, 2, 3]]
>>> limits("default")
(1048576, 26214400)

How much slower a rank computes while a deep window profiles it, from the always-on records of the same run.

Use it to take the profiler's own cost out of a window's work: a quarter of
small operations' time. Per step a rank's own work is forward + backward +
update, less what it waited for communication; those are recorded at every
step, profiled or not. The pace is that work beside the window over that work
in it, 1 where the records do not say.

>>> pace(np.array([8, 8, 9]), np.array([10, 11, 10]))
0.8
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.core.units import MIB, NS_PER_S
from headway.sim.ddp.ddp_window import Ints
from headway.trace.events.intervals import union_ns
from headway.trace.events.trace import Trace
from headway.trace.recording.runs import Run

IDLE_LATENCY_NS = 350_000
"""A small all-reduce of two gloo ranks on an idle host: 0.3 to 0.4 ms measured."""

SMALL_BYTES = 64 * 1024
"""Collectives up to this size say nothing about the rate."""


@dataclass(frozen=True, slots=True)
class Carried:
    """One collective as the link saw it, ns and bytes."""

    start_ns: int
    """When the last rank had started it."""

    end_ns: int
    """When it had ended on every rank."""

    size: int
    """Bytes of its tensor."""


@dataclass(frozen=True, slots=True)
class CollectiveLink:
    """What a collective takes: latency + bytes / rate, while it is alone."""

    latency_ns: float
    """Fixed part of each collective."""

    bytes_per_s: float
    """Rate that collectives running at once share."""

    spread: float
    """How much the rate differs between busy stretches: half the range of their middle half / their median."""

    def duration_ns(self, size: int) -> int:
        """Return what the bytes of a collective take on the link, without the latency."""
        return round(size / self.bytes_per_s * NS_PER_S)


def fit(carried: Sequence[Carried], *, latency_ns: float | None = None) -> CollectiveLink:
    """Return the link behind the collectives of one or more windows (their times must not overlap between windows).

    `latency_ns` None: the median own time of small collectives where there are at least three, never more than the
    idle latency allows for; else `IDLE_LATENCY_NS`. Raises `InputError` when no collective carried more than
    `SMALL_BYTES`.
    """
    large = [one for one in carried if one.size > SMALL_BYTES]
    if not large:
        raise InputError(
            f"no collective of the window carried more than {SMALL_BYTES} bytes, so the rate of the link is not known. "
            "Take a window of a job with larger gradients."
        )
    latency = float(IDLE_LATENCY_NS if latency_ns is None else latency_ns)
    rates, busy_ns, total = [], 0.0, 0
    for stretch in _stretches(large):
        start, duration = np.array([(one.start_ns, one.end_ns - one.start_ns) for one in stretch], np.int64).T
        own_ns = max(union_ns(start, duration) - latency, 1.0)
        size = sum(one.size for one in stretch)
        rates.append(size / own_ns * NS_PER_S)
        busy_ns, total = busy_ns + own_ns, total + size
    low, middle, high = np.quantile(rates, [0.25, 0.5, 0.75])
    return CollectiveLink(latency, total / busy_ns * NS_PER_S, float((high - low) / 2 / middle))


def _stretches(carried: Sequence[Carried]) -> list[list[Carried]]:
    """Split into stretches of time during which at least one collective was running."""
    found: list[list[Carried]] = []
    reach = -1
    for one in sorted(carried, key=lambda c: c.start_ns):
        if not found or one.start_ns > reach:
            found.append([])
        found[-1].append(one)
        reach = max(reach, one.end_ns)
    return found


# DDP's published rule: which gradients go into which bucket.

DEFAULT_FIRST_BYTES, DEFAULT_CAP_BYTES = MIB, 25 * MIB
"""Limits of the first and of every further bucket when the script names none (torch.nn.parallel.distributed)."""


def limits(bucket_mb: float | str) -> tuple[int, int]:
    """Return (first, further) limit in bytes for a size in MiB, or for 'default'."""
    if bucket_mb == "default":
        return DEFAULT_FIRST_BYTES, DEFAULT_CAP_BYTES
    size = int(float(bucket_mb) * MIB)
    return size, size


def assign(sizes: Sequence[int], types: Sequence[str], limit: tuple[int, int]) -> list[list[int]]:
    """Return the buckets, each a list of indices into `sizes`, in the order in which DDP reduces them.

    `sizes` [g] bytes and `types` [g] of the gradients in order of readiness; `limit` as `limits` gives it. Full
    buckets come in the order in which they filled, what is left over follows by type. Raises `InputError` when the two
    lists differ in length.
    """
    if len(sizes) != len(types):
        raise InputError(f"{len(sizes)} sizes and {len(types)} types; give each gradient one of both.")
    full: list[list[int]] = []
    held: dict[str, list[int]] = {}
    filled: dict[str, int] = {}
    bound: dict[str, int] = {}
    for index, (size, kind) in enumerate(zip(sizes, types, strict=True)):
        held.setdefault(kind, []).append(index)
        filled[kind] = filled.get(kind, 0) + size
        if filled[kind] >= bound.get(kind, limit[0]):
            full.append(held.pop(kind))
            filled[kind], bound[kind] = 0, limit[1]
    return [*full, *held.values()]


# How much slower a rank computes while a deep window profiles it, from the always-on records of the same run.

WARM = 8
"""First steps, which are no measure of others."""

BESIDE = 10
"""Steps on either side of a window that it is compared with: other work on the host comes and goes."""

AFTER = 3
"""Steps after a window that may still pay for it: its files are written then."""

SLOWEST = 0.5
"""A pace below is no cost of profiling: something else happened."""


def pace(beside_ns: Ints, inside_ns: Ints) -> float:
    """Return median work beside a window / in it, in [`SLOWEST`, 1]; 1 when either is empty."""
    if not beside_ns.size or not inside_ns.size:
        return 1.0
    return float(np.clip(np.median(beside_ns) / max(float(np.median(inside_ns)), 1.0), SLOWEST, 1.0))


def paces_of(run: Run, ranks: list[int]) -> dict[tuple[int, int], float]:
    """Return (number of a window, rank) -> pace, for every window that the records of the rank hold."""
    found: dict[tuple[int, int], float] = {}
    for rank in ranks:
        trace = run.parts.select([rank]).whole()
        steps = trace.where(np.flatnonzero(trace.named("step"))).events
        windows = trace.where(np.flatnonzero(trace.named("window"))).events
        work = _work_ns(trace, steps)
        begin, end = windows["start_ns"], windows["start_ns"] + windows["duration_ns"]
        # Steps first .. last - 1 of each window are those that end inside it. Steps that no window touches or delays
        # are `free`; those nearest to a window's middle are what its steps are compared with.
        first = np.searchsorted(steps["start_ns"] + steps["duration_ns"], begin, side="right")
        last = np.searchsorted(steps["start_ns"] + steps["duration_ns"], end, side="right")
        free = np.ones(work.size, bool)
        free[:WARM] = False
        for a, b in zip(first.tolist(), last.tolist(), strict=True):
            free[max(a - 1, 0) : b + AFTER] = False
        for number, a, b in zip(windows["seq"].tolist(), first.tolist(), last.tolist(), strict=True):
            near = np.flatnonzero(free)
            near = near[(near >= a - 2 * BESIDE) & (near < b + 2 * BESIDE)]
            near = near[np.argsort(np.abs(near - (a + b) / 2), kind="stable")][: 2 * BESIDE]
            found[int(number), rank] = pace(work[near], work[a:b])
    return found


def _work_ns(trace: Trace, steps: Mapping[str, NDArray[Any]]) -> Ints:
    """Return [steps] forward + backward + update - waits for communication of each step; 0 where none was recorded."""
    total = np.zeros(steps["start_ns"].size, np.int64)
    ends = steps["start_ns"] + steps["duration_ns"]
    for name, sign in (("segment.forward", 1), ("segment.backward", 1), ("optimizer.step", 1), ("comm.wait", -1)):
        rows = trace.where(np.flatnonzero(trace.named(name))).events
        at = np.searchsorted(ends, rows["start_ns"], side="right")
        inside = at < total.size
        np.add.at(total, at[inside], sign * rows["duration_ns"][inside])
    return np.maximum(total, 0)
