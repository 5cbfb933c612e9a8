"""Load and memory of the host over the time of a run, as the launcher sampled them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headway.core.machine.host import affinity_cores
from headway.core.machine.host_load import MOST_READINGS, HostCounters, other_cores
from headway.core.machine.host_load import spans as spans_of


class HostSeries(msgspec.Struct, frozen=True, kw_only=True):
    """Load and memory over the time of a run, [n] spans without gaps; run.json holds it as `host_series`."""

    start_ns: int = 0
    """When the first span began, on the clock of the run."""

    end_s: tuple[float, ...] = ()
    """End of each span, seconds since then."""

    own_cores: tuple[float, ...] = ()
    """Mean cores that the job kept busy."""

    other_cores: tuple[float, ...] = ()
    """Mean cores that other processes kept busy."""

    memory_bytes: tuple[int, ...] = ()
    """Memory of the job's processes at the end of the span."""

    cores: int = 0
    """Cores of the affinity."""

    rank_bytes: tuple[int, ...] = ()
    """Memory of the ranks at the end of the span, shared pages split among who shares them; () = not known."""

    worker_bytes: tuple[int, ...] = ()
    """The same of the ranks' children: loader workers."""

    @classmethod
    def of(cls, readings: Sequence[HostCounters], most: int = 240) -> HostSeries:
        """Return what readings say, in at most `most` spans of equal numbers of them."""
        spans = spans_of(readings) if len(readings) > 1 else []
        width = -(-len(spans) // most) if spans else 1
        groups = [(spans[at][0], spans[min(at + width, len(spans)) - 1][1]) for at in range(0, len(spans), width)]
        start_s = readings[0].at_s if readings else 0.0
        shared = any(last.shares_bytes[0] for _, last in groups)
        return cls(
            start_ns=round(start_s * 1e9),
            end_s=tuple(round(last.at_s - start_s, 3) for _, last in groups),
            own_cores=tuple(
                round((last.own_s - first.own_s) / max(last.at_s - first.at_s, 1e-9), 3) for first, last in groups
            ),
            other_cores=tuple(round(other_cores(first, last), 3) for first, last in groups),
            memory_bytes=tuple(last.memory_bytes for _, last in groups),
            cores=affinity_cores(),
            rank_bytes=tuple(last.shares_bytes[0] for _, last in groups) if shared else (),
            worker_bytes=tuple(last.shares_bytes[1] for _, last in groups) if shared else (),
        )

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> HostSeries | None:
        """Return what run.json says; None for a run recorded without it, or with something else there."""
        try:
            found = msgspec.convert(facts.get("host_series"), cls)
        except msgspec.ValidationError:
            return None
        columns: tuple[Sequence[float], ...] = (found.end_s, found.own_cores, found.other_cores, found.memory_bytes)
        columns += tuple(column for column in (found.rank_bytes, found.worker_bytes) if column)
        values = [value for column in columns for value in column]
        ends = [0.0, *found.end_s]
        fits = len({len(column) for column in columns}) == 1 and 0 < len(found.end_s) <= MOST_READINGS
        fits = fits and all(0 <= value < 1e18 for value in values) and all(a < b for a, b in itertools.pairwise(ends))
        return found if fits and found.cores >= 0 else None
