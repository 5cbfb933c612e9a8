"""A slice of a trace: some steps, ranks, lanes, names, kinds, and a stretch of time; read without the rest if possible.

Use it to look at a window of a long run. Our own Parquet, files and run
folders, is read by row groups, so that a slice costs what it holds; every
other format is read whole and then cut. Times in int64 ns, `between` from the
first event of the whole trace on.

>>> trace = Trace.from_columns({"start_ns": [50, 60, 70], "duration_ns": [5, 5, 5], "name": [0, 1, 0]},
...                            names=["aten::mm", "copy"])
>>> len(TraceSlice(names="aten::*").of(trace)), len(TraceSlice(between_ns=(12, 99)).of(trace))
(2, 2)
>>> moments("0.5us:2us"), moments("100:200")
((500, 2000), (100, 200))
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from headway.core.errors import InputError
from headway.core.tables import pick
from headway.core.units import NS_PER_MS, NS_PER_S, NS_PER_US
from headway.trace.events.parts import Parts
from headway.trace.events.trace import Trace
from headway.trace.events.vocabulary import KIND
from headway.trace.readers.formats import stored_parts

UNITS = {"": 1, "ns": 1, "us": NS_PER_US, "ms": NS_PER_MS, "s": NS_PER_S}
"""Unit of a moment -> ns."""


@dataclass(frozen=True, slots=True)
class TraceSlice:
    """What to keep; None keeps all."""

    steps: tuple[int, int] | None = None
    """First step and the one after the last."""

    ranks: tuple[int, int] | None = None
    """First rank and the one after the last."""

    lanes: str | None = None
    """Pattern of lane names, as of file names: 'stream *'."""

    names: str | None = None
    """Pattern of event names."""

    kinds: tuple[str, ...] | None = None
    """Kinds of `headway.trace.events.vocabulary.KINDS`."""

    between_ns: tuple[int, int] | None = None
    """Rows that overlap this stretch, ns from the first event of the whole trace."""

    def __post_init__(self) -> None:
        """Check the kinds."""
        for kind in self.kinds or ():
            pick(KIND, kind, "kind")

    @property
    def ranges(self) -> dict[str, tuple[int, int]]:
        """Column -> first value and the one after the last: what a reader can skip by."""
        given = {"step": self.steps, "rank": self.ranks}
        return {column: bounds for column, bounds in given.items() if bounds is not None}

    def of(self, trace: Trace, *, origin_ns: int | None = None) -> Trace:
        """Return the slice of a trace in memory; `origin_ns` is the first event of the whole, if this is not it."""
        events = trace.events
        mask = np.ones(len(trace), bool)
        for column, (first, end) in self.ranges.items():
            mask &= (events[column] >= first) & (events[column] < end)
        for pattern, words, column in ((self.lanes, trace.lanes, "lane"), (self.names, trace.names, "name")):
            if pattern is not None:
                # A row without a word has code -1, the last one of the table, and never matches.
                mask &= np.array([fnmatchcase(word, pattern) for word in words] + [False])[events[column]]
        if self.kinds is not None:
            mask &= np.isin(events["kind"], [KIND[kind] for kind in self.kinds])
        if self.between_ns is not None:
            origin = trace.span_ns[0] if origin_ns is None else origin_ns
            begin, end = (origin + moment for moment in self.between_ns)
            mask &= (events["start_ns"] < end) & (events["start_ns"] + events["duration_ns"] >= begin)
        return trace if mask.all() else trace.where(mask)

    def read(self, paths: Sequence[Path]) -> Trace:
        """Return the slice of what lies at `paths`, a run or traces. Raises as `Trace.open` does."""
        parts = stored_parts(paths)
        if parts is None:
            return self.of(Trace.open(list(paths)))
        origin = _origin(parts) if self.between_ns is not None else None
        ranges = dict(self.ranges)
        if self.between_ns is not None and origin is not None:
            ranges["start_ns"] = (np.iinfo(np.int64).min, origin + self.between_ns[1])
        return self.of(parts.read(ranges), origin_ns=origin)


def _origin(parts: Parts) -> int | None:
    """Return the start of the first event of all ranks, None when there is none."""
    starts = (parts.read({"rank": (rank, rank + 1)}, ["start_ns"]).events["start_ns"] for rank in parts.numbers)
    return min((int(start.min()) for start in starts if len(start)), default=None)


def moments(text: str) -> tuple[int, int]:
    """Parse FROM:TO, each a number in ns or with us, ms or s behind it. Raises `InputError` on anything else."""
    found = [re.fullmatch(r"(\d+(?:\.\d+)?)(ns|us|ms|s|)", part.strip()) for part in text.split(":")]
    if len(found) != 2 or not all(found):
        raise InputError(f"{text!r} is not a time range. Write FROM:TO, as in 1.5s:1.6s or 2000:9000 (ns).")
    begin, end = (int(Decimal(match[1]) * UNITS[match[2]]) for match in found if match)
    if end <= begin:
        raise InputError(f"{text!r} is an empty stretch: its end must lie after its start. Write {begin}:{begin + 1}.")
    return begin, end
