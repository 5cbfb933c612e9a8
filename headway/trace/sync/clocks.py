"""Clocks of ranks and hosts: the one map from a rank's raw time to the common clock, and offsets of hosts of a run.

Events keep raw times. What is known of a rank's clock stands in `trace.ranks`:
`offset_ns` is added to every time of the rank, and `drift_ns`, a list of
[raw time, further ns], is interpolated between its knots (the first and last
stretch continue outside). `aligned_ns` is that map; everything that compares
times of different ranks reads them through it. Times in int64 ns.

Each host of a run pairs its monotonic clock with the realtime clock, which
puts the offset right to what the hosts' time service achieves. A collective
proves more: it ends nowhere before the last of its ranks has started it. From
every matched one follow an upper and a lower bound of the offset. An estimate
outside them is moved to their middle.

>>> aligned_ns({"offset_ns": 5, "drift_ns": [[0, 0], [1000, 10]]}, np.array([0, 500, 2000])).tolist()
[5, 510, 2025]
>>> within(5, -10, 10), within(500, -10, 10), within(5, 10, -10)
(5, 0, 5)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.trace.events.trace import Trace
from headway.trace.sync.meetings import MESSAGE, CommunicationRows, Ints, calls, meet

WORLD = 0
"""The default process group: the only one whose number is the same on every rank, whoever recorded it."""

MAPPED = ("offset_ns", "drift_ns")
"""Keys of a rank in `trace.ranks` that say how to map its clock."""


@dataclass(frozen=True, slots=True)
class ClockMap:
    """Maps of C clocks to a common one: what to add, at Q knots; linear between them and beyond. Q = 1: constant."""

    knot_ns: Ints
    """[C, Q] Raw times, ascending."""

    theta_ns: Ints
    """[C, Q] What to add there."""

    def aligned_ns(self, clock: Ints, raw_ns: Ints) -> Ints:
        """[n] Times `raw_ns` [n] of clocks `clock` [n] on the common clock, in whole ns; order is kept per clock."""
        # One pass per clock: cuts[c] : cuts[c + 1] are the places of clock c among the times in order of clock.
        order = np.argsort(clock, kind="stable")
        cuts = np.searchsorted(clock[order], np.arange(len(self.knot_ns) + 1))
        result = np.empty(len(raw_ns), np.int64)
        for index in np.flatnonzero(np.diff(cuts)).tolist():
            own = order[cuts[index] : cuts[index + 1]]
            result[own] = raw_ns[own] + offset_at(raw_ns[own], self.knot_ns[index], self.theta_ns[index])
        return result


def stretch_of(raw_ns: Ints, knot_ns: Ints) -> tuple[Ints, NDArray[np.float64]]:
    """Return [n] the knot before each time and how far on the way to the next it lies (outside 0..1 beyond the ends).

    >>> [x.tolist() for x in stretch_of(np.array([5, 30]), np.array([0, 10, 20]))]
    [[0, 1], [0.5, 2.0]]
    """
    if len(knot_ns) == 1:
        return np.zeros(len(raw_ns), np.int64), np.zeros(len(raw_ns))
    # knot:      0         10        20        time 5: at 0, half of the way; 30: at 1, twice the way (the last line
    #            at=0      at=1                goes on); the clip leaves the last stretch to whatever lies beyond.
    at = np.clip(np.searchsorted(knot_ns, raw_ns, side="right") - 1, 0, len(knot_ns) - 2)
    return at, (raw_ns - knot_ns[at]) / (knot_ns[at + 1] - knot_ns[at])


def offset_at(raw_ns: Ints, knot_ns: Ints, theta_ns: Ints) -> Ints:
    """Return [n] what to add to times of one clock: `theta_ns` [Q] at `knot_ns` [Q], linear between and beyond."""
    at, way = stretch_of(raw_ns, knot_ns)
    after = np.minimum(at + 1, len(knot_ns) - 1)
    # Only the small rise goes through a float: the times themselves stay exact.
    return np.asarray(theta_ns[at] + np.rint((theta_ns[after] - theta_ns[at]) * way).astype(np.int64))


def aligned_ns(known: Mapping[str, Any], raw_ns: NDArray[np.int64]) -> Ints:
    """Return times [n] of one rank on the common clock; `known` is its entry in `trace.ranks`."""
    # common = raw + offset + drift(raw): the drift is read at the raw time, not at the moved one.
    moved: Ints = np.asarray(raw_ns, np.int64) + int(known.get("offset_ns") or 0)
    drift = known.get("drift_ns")
    if drift:
        knot_ns, more_ns = np.array(drift, np.int64).T
        moved = moved + offset_at(np.asarray(raw_ns, np.int64), knot_ns, more_ns)
    return moved


def is_mapped(trace: Trace) -> bool:
    """Say whether some rank's clock has to be mapped."""
    return any(known.get(key) for known in trace.ranks.values() for key in MAPPED)


def common_ns(trace: Trace) -> tuple[Ints, Ints]:
    """Return starts and ends [n] of all events on the common clock."""
    start = trace.events["start_ns"].astype(np.int64)
    end = start + trace.events["duration_ns"]
    if is_mapped(trace):
        for rank, known in trace.ranks.items():
            if any(known.get(key) for key in MAPPED):
                own = trace.events["rank"] == rank
                start[own], end[own] = aligned_ns(known, start[own]), aligned_ns(known, end[own])
    return start, end


def on_common_clock(trace: Trace) -> Trace:
    """Return `trace` with the maps of its clocks applied to its times and taken out of `ranks`; itself without any.

    For formats and drawings that know one clock only.
    """
    if not is_mapped(trace):
        return trace
    start, end = common_ns(trace)
    ranks = {rank: {k: v for k, v in known.items() if k not in MAPPED} for rank, known in trace.ranks.items()}
    return replace(trace, events={**trace.events, "start_ns": start, "duration_ns": end - start}, ranks=ranks)


def within(offset_ns: int, lower_ns: int, upper_ns: int) -> int:
    """Return the offset if it keeps the bounds, else their middle; bounds that exclude each other prove nothing."""
    if lower_ns > upper_ns or lower_ns <= offset_ns <= upper_ns:
        return offset_ns
    return (lower_ns + upper_ns) // 2


def refined(offset_ns: int, reference: Trace, other: Trace) -> int:
    """Return the offset that puts `other` on the clock of `reference`, held to their matched collectives."""
    bounds = offset_bounds(reference, other)
    return offset_ns if bounds is None else within(offset_ns, *bounds)


def offset_bounds(reference: Trace, other: Trace) -> tuple[int, int] | None:
    """Return (lower, upper) of the offset of `other`, None when no collective is matched."""
    ours, theirs = _numbered(reference), _numbered(other)
    # The ranks of the other trace get numbers of their own, so that rank 0 of both may meet itself.
    above = int(ours.rank.max(initial=0)) + 1
    met = meet(CommunicationRows.join([ours, replace(theirs, rank=theirs.rank + above)]))
    return met.bounds_ns(met.rank >= above)


def _numbered(trace: Trace) -> CommunicationRows:
    """Return the collectives of the world group that carry a number: those match whoever recorded them."""
    found = calls(trace)
    return found.where((found.what != MESSAGE) & (found.group == WORLD) & (found.seq >= 0))
