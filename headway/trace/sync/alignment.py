"""The clocks of all ranks put on that of the first: offset and drift from what the ranks did together [dPRO].

Use it when ranks of several hosts, or profiler files of several ranks, are to
be compared. `align` estimates offset and drift of every clock from the ends
of matched collectives and messages (`end_differences`), then holds the
estimate to causality (`causality`): no collective ends before its last start,
no message is received before it is sent. Ranks of one host read one clock.

The raw times stay as they are. What was found goes into `trace.ranks`, and
`headway.trace.sync.clocks` applies it: aligned = raw + offset_ns + drift at raw.
Times in int64 ns; drift in ns per ns (1e-6 = 1 ppm); residuals in us.

>>> trace = Trace.from_columns(
...     {"rank": [0, 1, 0, 1], "start_ns": [0, 930, 500, 1430], "duration_ns": [50, 20, 50, 20], "group": [0] * 4,
...      "seq": [4, 4, 5, 5]}, names=["nccl:all_reduce"], name=[0] * 4, kind=[1] * 4)
>>> found = align(trace)
>>> found.theta_ns[:, 0].tolist(), found.violations_before, found.violations
([0, -900], 2, 0)
>>> found.apply(trace).ranks[1]["offset_ns"]
-900
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import CycleError, InputError
from headway.core.units import NS_PER_US
from headway.trace.events.trace import Trace
from headway.trace.sync.causality import Link, Projection, middle_end, project, violations
from headway.trace.sync.clocks import MAPPED, ClockMap, aligned_ns
from headway.trace.sync.end_differences import ACCURACY_NS, Break, estimate
from headway.trace.sync.meetings import Ints, Meetings, match

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Alignment:
    """What puts the clocks of R ranks on that of the first one; Q = 2 knots, 1 without drift."""

    ranks: Ints
    """[R] Ranks, ascending; the first is the reference."""

    hosts: tuple[str, ...]
    """[R] Host of each rank, '' = unknown; ranks of one host have equal maps."""

    knot_ns: Ints
    """[R, Q] First and last time of all ranks, on each rank's raw clock."""

    theta_ns: Ints
    """[R, Q] What to add to a rank's raw time there; linear between the knots and beyond them."""

    residual_us: Floats
    """[R] Median distance of the rank's aligned ends from the middle end of their meetings, NaN without any."""

    violations_before: int
    """Ends before a start they had to wait for, with the clocks as they were."""

    violations: int
    """The same after alignment."""

    estimate_violations: int
    """The same with the estimate, before its projection onto causality."""

    moved_ns: Ints
    """[R] Largest move of the rank's map by the projection."""

    shortfall_us: float
    """Worst violation left; above 0 only where no clocks fulfil the order and that was tolerated."""

    num_meetings: int
    """Collectives and messages that were matched."""

    skipped: int
    """Calls without a partner, at the edges of windows."""

    @property
    def drift_ppm(self) -> Floats:
        """[R] Drift, parts per million; 0 for offsets alone."""
        rise, span = self.theta_ns[:, -1] - self.theta_ns[:, 0], self.knot_ns[:, -1] - self.knot_ns[:, 0]
        return np.asarray(1e6 * rise / np.maximum(span, 1))

    def apply(self, trace: Trace) -> Trace:
        """Return `trace` with the maps in `trace.ranks`, in place of older ones; its times stay raw."""
        ranks = {rank: {k: v for k, v in known.items() if k not in MAPPED} for rank, known in trace.ranks.items()}
        for index, rank in enumerate(self.ranks.tolist()):
            ranks[rank] = {**ranks.get(rank, {}), "offset_ns": int(self.theta_ns[index, 0])}
            # `offset_ns` holds the first knot, `drift_ns` what the others differ from it by: nothing, for most.
            more = self.theta_ns[index] - self.theta_ns[index, 0]
            if more.any():
                ranks[rank]["drift_ns"] = np.stack([self.knot_ns[index], more], axis=1).tolist()
        return replace(trace, ranks=ranks)

    def to_json(self) -> dict[str, object]:
        """Return the figures per rank and in all, plain values."""
        drift = self.drift_ppm
        return {
            "reference": int(self.ranks[0]),
            "meetings": self.num_meetings,
            "skipped": self.skipped,
            "violations_before": self.violations_before,
            "estimate_violations": self.estimate_violations,
            "violations": self.violations,
            "shortfall_us": self.shortfall_us,
            "ranks": [
                {
                    "rank": rank,
                    "host": self.hosts[index],
                    "offset_ns": int(self.theta_ns[index, 0]),
                    "drift_ppm": float(drift[index]),
                    "residual_us": float(self.residual_us[index]),
                    "moved_us": float(self.moved_ns[index]) / NS_PER_US,
                }
                for index, rank in enumerate(self.ranks.tolist())
            ],
        }


def align(trace: Trace, *, drift: bool = True, tolerate: bool = False, meetings: Meetings | None = None) -> Alignment:
    """Estimate the clocks of the ranks of `trace` from its raw times.

    Without `drift` each has an offset alone. `meetings` are those of `headway.trace.sync.meetings.match`
    unless given. Raises `InputError` on a rank without events or without
    anything in common with the others, on unmatched messages, on mixed clock
    units and on a clock that was set while it recorded; `CycleError`, with the
    offending calls, when no clocks fulfil the order: a result that promises an
    order must not lack it in silence. With `tolerate` the estimate stands as
    it is in both cases, a line through the medians of many ends: what
    contradicts it is counted.
    """
    _check_events(trace)
    met = match(trace) if meetings is None else meetings
    ranks = np.unique(trace.events["rank"][trace.events["rank"] >= 0]).astype(np.int64)
    hosts = tuple(str(trace.ranks.get(rank, {}).get("host") or "") for rank in ranks.tolist())
    # [R] one clock per known host, a rank's own otherwise; numbered from 0 in order of rank
    table: dict[str, int] = {}
    numbers = [table.setdefault(host or f"\0{index}", len(table)) for index, host in enumerate(hosts)]
    clock_of_rank = np.array(numbers, np.int64)
    # met is call by call: [n] rank -> its place in `ranks` -> the clock that it reads.
    clock = clock_of_rank[np.searchsorted(ranks, met.rank)]
    num_clocks = int(clock_of_rank.max(initial=0)) + 1
    # 1. estimate the maps   2. hold them to causality
    first = estimate(met, clock, num_clocks, drift=drift)
    _check_reached(first.reached[clock_of_rank], ranks, met)
    if first.broken is not None and not tolerate:
        raise InputError(_broken(first.broken, ranks, clock_of_rank))
    found = project(met, clock, first.clocks)
    if found.contradiction and not tolerate:
        raise CycleError(
            _contradiction(trace, met, found, drift=drift),
            tuple(int(met.row[call]) for link in found.contradiction for call in link),
        )
    return _alignment(trace, ranks, hosts, clock_of_rank, met, clock, first.clocks, found)


def _check_events(trace: Trace) -> None:
    """Raise when the trace knows a rank of which it holds nothing."""
    if not (trace.events["rank"] >= 0).any():
        raise InputError("the trace has no event of a rank, so there is no clock to align. Open the traces of ranks.")
    silent = sorted({rank for rank in trace.ranks if rank >= 0} - set(np.unique(trace.events["rank"]).tolist()))
    if silent:
        raise InputError(f"rank {silent[0]} has no events, so its clock is unknown. Add its trace, or leave it out.")


def _check_reached(reached: NDArray[np.bool_], ranks: Ints, met: Meetings) -> None:
    """Raise when a rank's clock hangs on nothing."""
    alone = np.flatnonzero(~reached)
    if len(alone):
        what = (
            "any collective or message" if met.num_meetings else "anything, because no call of two ranks was matched,"
        )
        raise InputError(
            f"rank {ranks[alone[0]]} does not share {what} with rank {ranks[0]}, directly or through others "
            f"({len(alone)} of {len(ranks)} ranks do not). Record windows of the same steps on all ranks, or select "
            "ranks that communicate."
        )


def _broken(found: Break, ranks: Ints, clock_of_rank: Ints) -> str:
    """Say which clock does not keep one offset and drift."""
    rank, partner = (int(ranks[clock_of_rank == which][0]) for which in (found.clock, found.partner))
    return (
        f"the clock of rank {rank} was set while it recorded, or its drift changed: about {found.after_ns / 1e9:.3g} s "
        f"after its first call it jumps by {found.jump_ns / NS_PER_US:+.0f} us against rank {partner} and drifts by "
        f"{1e6 * found.drift:+.1f} ppm more, and one offset and drift would be {found.missed_ns / NS_PER_US:.0f} us "
        f"off; at most {ACCURACY_NS / NS_PER_US:.0f} us are allowed. Align what lies before and after on its own (cut "
        "it out with headway trace export --between), or take the best line (tolerate=True, --tolerate)."
    )


def _contradiction(trace: Trace, met: Meetings, found: Projection, *, drift: bool) -> str:
    """Say which calls contradict each other."""
    parts = [_words(trace, met, link) for link in found.contradiction[:6]]
    more = f"; and {len(found.contradiction) - 6} more" if len(found.contradiction) > 6 else ""
    return (
        f"no offsets{' and drifts' if drift else ''} of the clocks fulfil the order of these calls; one of them "
        f"is {found.contradiction_ns / NS_PER_US:.3f} us short, whatever the clocks: {'; '.join(parts)}{more}. "
        f"{'Correct the matching or the host names' if drift else 'Let clocks drift (drift=True)'}, drop "
        "these steps, or take the estimate without the order (tolerate=True, --tolerate)."
    )


def _words(trace: Trace, met: Meetings, link: Link) -> str:
    end, start = link
    row = int(met.row[end])
    name = trace.name_of(row) or "a call"
    group, seq = int(trace.events["group"][row]), int(trace.events["seq"][row])
    place = " ".join(f"{what} {value}" for what, value in (("group", group), ("seq", seq)) if value >= 0)
    return f"rank {met.rank[end]} ends {name} ({place or f'row {row}'}) before rank {met.rank[start]} starts it"


def _alignment(
    trace: Trace,
    ranks: Ints,
    hosts: tuple[str, ...],
    clock_of_rank: Ints,
    met: Meetings,
    clock: Ints,
    estimated: ClockMap,
    found: Projection,
) -> Alignment:
    """Gather the figures."""
    # [C, K] of clocks -> [R, K] of ranks: those of one host share a row.
    knots, theta = found.clocks.knot_ns[clock_of_rank], found.clocks.theta_ns[clock_of_rank]
    start, end = as_known(met, trace.ranks)
    aligned = found.clocks.aligned_ns(clock, met.end_ns)
    return Alignment(
        ranks=ranks,
        hosts=hosts,
        knot_ns=knots,
        theta_ns=theta,
        residual_us=_residual_us(met, ranks, aligned),
        violations_before=violations(met, start, end)[0],
        violations=found.violations,
        estimate_violations=found.violations_before,
        moved_ns=np.abs(theta - estimated.theta_ns[clock_of_rank]).max(axis=1),
        shortfall_us=found.shortfall_ns / NS_PER_US,
        num_meetings=met.num_meetings,
        skipped=met.skipped,
    )


def as_known(met: Meetings, ranks: Mapping[int, Mapping[str, Any]]) -> tuple[Ints, Ints]:
    """Return starts and ends [n] of calls on the clock that `ranks`, a trace's table, makes of them."""
    start, end = met.start_ns.copy(), met.end_ns.copy()
    for rank, known in ranks.items():
        if any(known.get(key) for key in MAPPED):
            own = met.rank == rank
            start[own], end[own] = aligned_ns(known, start[own]), aligned_ns(known, end[own])
    return start, end


def _residual_us(met: Meetings, ranks: Ints, end_ns: Ints) -> Floats:
    """[R] Median distance of each rank's ends from the middle one of their meeting."""
    result = np.full(len(ranks), np.nan)
    if not met.num_meetings:
        return result
    away = np.abs(end_ns - middle_end(met, end_ns)[met.meeting])
    # The calls in order of rank, cut where the next rank begins: part r holds those of ranks[r].
    by_rank = np.argsort(met.rank, kind="stable")
    cuts = np.searchsorted(met.rank[by_rank], ranks)
    for index, part in enumerate(np.split(away[by_rank], cuts[1:])):
        if len(part):
            result[index] = float(np.median(part)) / NS_PER_US
    return result
