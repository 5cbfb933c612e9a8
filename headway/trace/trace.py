"""A trace: columns of events, plus the small tables their codes point into.

Use it for anything that was recorded: one rank, a whole run, a profiler
window, a published operation trace. Times are int64 nanoseconds on the clock
of the rank; clock alignment is kept apart and never written into them.

>>> trace = Trace.from_columns({"start_ns": [0, 5], "duration_ns": [5, 7]}, names=["matmul", "add"], name=[0, 1])
>>> len(trace), trace.span_ns, trace.name_of(1)
(2, (0, 12), 'add')
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.core.errors import InputError
from headway.core.tables import suggestion
from headway.trace.vocabulary import KIND

COLUMNS: dict[str, tuple[type[np.generic], float]] = {
    "rank": (np.int32, -1),
    "step": (np.int32, -1),
    "microbatch": (np.int16, -1),
    "stage": (np.int16, -1),
    "layer": (np.int16, -1),
    "kind": (np.uint8, KIND["MARK"]),
    "name": (np.int32, -1),
    "lane": (np.int16, 0),
    "depth": (np.int16, 0),
    "start_ns": (np.int64, 0),
    "duration_ns": (np.int64, 0),
    "group": (np.int32, -1),
    "seq": (np.int64, -1),
    "peer": (np.int32, -1),
    "bytes": (np.int64, 0),
    "flops": (np.float64, 0.0),
    "corr": (np.int64, -1),
}
"""Column -> (dtype, value that means 'not applicable' or 'unknown')."""


@dataclass(frozen=True, slots=True)
class Trace:
    """`n` events in columns. Build one with `from_columns`, `concat` or `open`; it is never changed."""

    events: Mapping[str, NDArray[Any]]
    """Column name -> array [n]; every column of `COLUMNS` is there."""

    names: tuple[str, ...] = ()
    """`names[events["name"][i]]` is the name of event `i`."""

    lanes: tuple[str, ...] = ("main",)
    """`lanes[events["lane"][i]]` is the lane of event `i`: 'main', 'loader/0', 'stream 7', ... (per rank)."""

    groups: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Communication group -> {'name': str, 'ranks': [int, ...]} where known."""

    ranks: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Rank -> what is known of it: host, device, coordinates (dp, pp, tp), clock pairs."""

    meta: Mapping[str, Any] = field(default_factory=dict)
    """Facts of the whole trace: 'source' (format), 'device_type', 'world_size', parallel sizes, versions."""

    def __len__(self) -> int:
        """Return the number of events."""
        return len(self.events["start_ns"])

    @classmethod
    def from_columns(
        cls,
        columns: Mapping[str, ArrayLike],
        *,
        names: Sequence[str] = (),
        lanes: Sequence[str] = ("main",),
        groups: Mapping[int, Mapping[str, Any]] | None = None,
        ranks: Mapping[int, Mapping[str, Any]] | None = None,
        meta: Mapping[str, Any] | None = None,
        **more: ArrayLike,
    ) -> Trace:
        """Check and complete `columns`; a column left out is filled with its 'unknown' value.

        Raises `InputError` on an unknown column, unequal lengths, or a negative duration.
        """
        given = {**columns, **more}
        for column in given:
            if column not in COLUMNS:
                raise InputError(f"{column!r} is not a trace column. {suggestion(COLUMNS, column)}")
        sizes = {column: len(np.asarray(values)) for column, values in given.items()}
        if len(set(sizes.values())) > 1:
            raise InputError(f"columns differ in length: {sizes}. Give each the same number of rows.")
        n = next(iter(sizes.values()), 0)
        events = {
            column: np.ascontiguousarray(given[column], dtype=dtype) if column in given else np.full(n, blank, dtype)
            for column, (dtype, blank) in COLUMNS.items()
        }
        if n and int(events["duration_ns"].min()) < 0:
            row = int(events["duration_ns"].argmin())
            raise InputError(
                f"event {row} lasts {events['duration_ns'][row]} ns. A duration must not be negative; drop the row."
            )
        if n and int(events["name"].max()) >= len(names):
            raise InputError(
                f"name code {events['name'].max()} has no entry among {len(names)} names. Pass the full name table."
            )
        return cls(events, tuple(names), tuple(lanes), dict(groups or {}), dict(ranks or {}), dict(meta or {}))

    @classmethod
    def open(cls, path: str | Path | Sequence[str | Path]) -> Trace:
        """Read any format headway knows, told apart by content; several paths are merged.

        Raises `FormatError` when no reader recognises the file.
        """
        from headway.trace.formats import open_any

        paths = [path] if isinstance(path, (str, Path)) else list(path)
        return concat([open_any(Path(p)) for p in paths])

    def save(self, path: str | Path) -> None:
        """Write the format that the suffix names: `.parquet` (own) or `.json`/`.json.gz` (Chrome, Perfetto)."""
        from headway.trace.formats import save_any

        save_any(self, Path(path))

    @property
    def span_ns(self) -> tuple[int, int]:
        """Earliest start and latest end, (0, 0) when empty."""
        if not len(self):
            return (0, 0)
        start, duration = self.events["start_ns"], self.events["duration_ns"]
        return int(start.min()), int((start + duration).max())

    def name_of(self, index: int) -> str:
        """Return the name of event `index`, '' when it has none."""
        code = int(self.events["name"][index])
        return self.names[code] if code >= 0 else ""

    def where(self, mask: NDArray[Any]) -> Trace:
        """Return the events that `mask` (bool [n] or indices) picks, in that order, with the same tables."""
        return replace(self, events={column: values[mask] for column, values in self.events.items()})

    def named(self, *names: str) -> NDArray[np.bool_]:
        """Return bool [n]: events that bear one of `names`."""
        codes = [code for code, name in enumerate(self.names) if name in names]
        return np.isin(self.events["name"], codes)

    def select(self, *, steps: Iterable[int] | None = None, ranks: Iterable[int] | None = None) -> Trace:
        """Return the events of these steps and ranks; None means all."""
        mask = np.ones(len(self), dtype=bool)
        if steps is not None:
            mask &= np.isin(self.events["step"], list(steps))
        if ranks is not None:
            mask &= np.isin(self.events["rank"], list(ranks))
        return self.where(mask)


def concat(traces: Sequence[Trace]) -> Trace:
    """Put traces one behind the other, joining their name and lane tables.

    Raises `InputError` when there is none.
    """
    if not traces:
        raise InputError("there is no trace to open: the list of paths is empty. Name at least one file.")
    if len(traces) == 1:
        return traces[0]
    names, lanes = _Table(), _Table()
    parts: list[dict[str, NDArray[Any]]] = []
    for trace in traces:
        part = dict(trace.events)
        part["name"] = names.recode(part["name"], trace.names)
        part["lane"] = lanes.recode(part["lane"], trace.lanes)
        parts.append(part)
    events = {column: np.concatenate([part[column] for part in parts]) for column in COLUMNS}
    return Trace(
        events,
        tuple(names.entries),
        tuple(lanes.entries),
        {k: v for t in traces for k, v in t.groups.items()},
        {k: v for t in traces for k, v in t.ranks.items()},
        {k: v for t in traces for k, v in t.meta.items()},
    )


class _Table:
    """A growing string table."""

    def __init__(self) -> None:
        self.entries: dict[str, int] = {}

    def recode(self, codes: NDArray[Any], table: Sequence[str]) -> NDArray[Any]:
        """Translate codes of `table` into codes of this one; negative codes stay."""
        if not len(table):
            return codes
        mapping = np.array([self.entries.setdefault(entry, len(self.entries)) for entry in table], dtype=codes.dtype)
        return np.where(codes >= 0, mapping[np.maximum(codes, 0)], codes).astype(codes.dtype)
