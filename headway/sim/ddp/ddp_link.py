"""The link of a data-parallel job: what its collectives of a deep window took by themselves, and what rate that is.

Use it to give a duration to a collective of any size. A collective's own time
is from the last rank that started it to its end. Rate = bytes / time during
which at least one of them was running, less a fixed latency for each stretch:
two at once share the link, so their own times would count it twice. (A line
through two sizes gives nonsense latencies: the larger one is the one that
shared.) Bytes are those of the tensor, whatever the algorithm sends per byte.

>>> fit([Carried(0, 10_350_000, 10_000_000)], latency_ns=350_000)
CollectiveLink(latency_ns=350000.0, bytes_per_s=1000000000.0, spread=0.0)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headway.core.errors import InputError
from headway.core.units import NS_PER_S
from headway.trace.events.nesting import union_ns

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
