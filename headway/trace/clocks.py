"""How far the clocks of two hosts stand apart: from paired readings, held to what collectives prove.

Each host pairs its monotonic clock with the realtime clock, which puts the
offset right to what the hosts' time service achieves. A collective proves
more: it ends nowhere before the last of its ranks has started it. From every
matched one follow an upper and a lower bound of the offset. An estimate
outside them is moved to their middle. Times in int64 ns.

>>> within(5, -10, 10), within(500, -10, 10), within(5, 10, -10)
(5, 0, 5)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headway.trace.trace import Trace
from headway.trace.vocabulary import COLLECTIVES

SYNCHRONISING = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor",
    "all_to_all", "all_to_all_single", "barrier", "monitored_barrier", "all_gather_object",
)  # fmt: skip
"""Collectives that no rank leaves before all have entered; a broadcast's source, for one, leaves at once."""

WORLD = 0
"""The default process group: the only one whose number is the same on every rank."""


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
    key_a, start_a, end_a = _meetings(reference)
    key_b, start_b, end_b = _meetings(other)
    _, a, b = np.intersect1d(key_a, key_b, assume_unique=True, return_indices=True)
    if not len(a):
        return None
    return int((start_a[a] - end_b[b]).max()), int((end_a[a] - start_b[b]).min())


def _meetings(trace: Trace) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return (key, latest start, earliest end) over the trace's ranks of each synchronising call of the world group."""
    events = trace.events
    wait = trace.named("comm.wait")
    codes = [COLLECTIVES.index(name) for name in SYNCHRONISING]
    mask = (wait | (trace.named("comm.collective") & np.isin(events["corr"], codes))) & (events["group"] == WORLD)
    mask &= events["seq"] >= 0
    raw = events["seq"][mask] * 2 + wait[mask]
    key, index = np.unique(raw, return_inverse=True)
    start = np.full(len(key), np.iinfo(np.int64).min)
    end = np.full(len(key), np.iinfo(np.int64).max)
    np.maximum.at(start, index, events["start_ns"][mask])
    np.minimum.at(end, index, events["start_ns"][mask] + events["duration_ns"][mask])
    return key, start, end
