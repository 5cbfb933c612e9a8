"""A trace: columns of events, plus the small tables their codes point into.

Use it for anything that was recorded: one rank, a whole run, a profiler
window, a published operation trace. Times are int64 nanoseconds on the clock
of the rank; clock alignment is kept apart and never written into them.

>>> trace = Trace.from_columns({"start_ns": [0, 5], "duration_ns": [5, 7]}, names=["matmul", "add"], name=[0, 1])
>>> len(trace), trace.span_ns, trace.name_of(1)
(2, (0, 12), 'add')
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.core.errors import InputError
from headway.core.tables import suggestion
from headway.core.units import NS_PER_S, format_seconds
from headway.trace.events.vocabulary import KIND, KINDS

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


@dataclass(frozen=True, slots=True, repr=False, eq=False)
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

    edges: NDArray[np.int64] | None = None
    """[2, e] Dependencies that the trace itself lists, by target, then source: row `edges[1, i]` starts after row
    `edges[0, i]` has ended. None where the format lists none."""

    def __len__(self) -> int:
        """Return the number of events."""
        return len(self.events["start_ns"])

    def __repr__(self) -> str:
        """Say how much of what this is, in one line."""
        low, high = self.span_ns
        parts = [f"{len(self)} events", f"{format_seconds((high - low) / NS_PER_S)}"]
        for column in ("rank", "step"):
            known = self.events[column][self.events[column] >= 0]
            if len(known):
                first, last = int(known.min()), int(known.max())
                parts.append(f"{column} {first}" if first == last else f"{column}s {first}..{last}")
        return f"<Trace: {', '.join(parts)}, {self.meta.get('source', 'unknown source')}>"

    def __eq__(self, other: object) -> bool:
        """Return whether every column and every table is equal; NaN equals NaN."""
        if not isinstance(other, Trace):
            return NotImplemented
        tables = ("names", "lanes", "groups", "ranks", "meta")
        one, two = self.edges, other.edges
        if not (one is two if one is None or two is None else np.array_equal(one, two)):
            return False
        return all(getattr(self, table) == getattr(other, table) for table in tables) and all(
            np.array_equal(self.events[column], other.events[column], equal_nan=column == "flops") for column in COLUMNS
        )

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
        edges: ArrayLike | None = None,
        **more: ArrayLike,
    ) -> Trace:
        """Check and complete `columns`; a column left out is filled with its 'unknown' value.

        Raises `InputError` on an unknown column, unequal lengths, a negative duration, a number that its column
        cannot hold, or an edge to a row that is not there.
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
            column: _as_column(column, given[column]) if column in given else np.full(n, blank, dtype)
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
        tables = (tuple(names), tuple(lanes), dict(groups or {}), dict(ranks or {}), dict(meta or {}))
        return cls(events, *tables, None if edges is None else in_order(edges, n))

    @classmethod
    def open(cls, path: str | Path | Sequence[str | Path]) -> Trace:
        """Read any format headway knows, told apart by content; several paths are merged.

        Raises `FormatError` when no reader recognises the file.
        """
        return concat(_formats().open_several([path] if isinstance(path, (str, Path)) else list(path)))

    def save(self, path: str | Path) -> None:
        """Write the format that the suffix names: `.parquet` (own) or `.json`/`.json.gz` (Chrome, Perfetto)."""
        _formats().save_any(self, Path(path))

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

    def head(self, count: int = 5) -> list[dict[str, object]]:
        """Return the `count` earliest events as dicts, codes replaced by their words, unknown columns left out."""
        rows = np.argsort(self.events["start_ns"], kind="stable")[:count].tolist()
        return [self._row(row) for row in rows]

    def _row(self, index: int) -> dict[str, Any]:
        """Return one event as a dict."""
        known: dict[str, Any] = {
            column: self.events[column][index].item()
            for column, (_, blank) in COLUMNS.items()
            if self.events[column][index] != blank or column in ("start_ns", "duration_ns")
        }
        words = {"name": self.name_of(index), "kind": KINDS[int(self.events["kind"][index])]}
        return {**known, **words, "lane": self.lanes[int(self.events["lane"][index])]}

    def where(self, mask: NDArray[Any]) -> Trace:
        """Return the events that `mask` (bool [n] or indices) picks, in that order, with the same tables.

        Of the edges those stay whose two rows stay.
        """
        events = {column: values[mask] for column, values in self.events.items()}
        if self.edges is None:
            return replace(self, events=events)
        rows = np.arange(len(self))[mask]
        place = np.full(len(self), -1, np.int64)
        place[rows] = np.arange(len(rows))
        moved = place[self.edges]
        return replace(self, events=events, edges=in_order(moved[:, (moved >= 0).all(axis=0)], len(rows)))

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


def _as_column(column: str, values: ArrayLike) -> NDArray[Any]:
    """Return `values` in the type of `column`; numbers too large for it raise instead of wrapping round."""
    dtype = np.dtype(COLUMNS[column][0])
    array = np.asarray(values)
    if array.dtype.kind in "iuf" and dtype.kind in "iu" and array.size and not np.can_cast(array.dtype, dtype):
        bounds = np.iinfo(dtype)
        if not (bounds.min <= array.min() and array.max() <= bounds.max):
            row = int(np.argmax((array < bounds.min) | (array > bounds.max)))
            raise InputError(
                f"{column}[{row}] is {array[row]}; the column holds {bounds.min}..{bounds.max}. Number from 0 upwards."
            )
    try:
        return np.ascontiguousarray(array, dtype=dtype)
    except OverflowError as cause:
        raise InputError(f"a number in {column} is beyond {dtype}: {cause}. Leave it unknown (-1).") from cause


def in_order(edges: ArrayLike, n: int) -> NDArray[np.int64]:
    """Return `edges` [2, e] over `n` rows sorted by target, then source, each once.

    Raises `InputError` on an edge to a row that is not there.

    >>> in_order([[4, 0, 0], [1, 1, 1]], 5).tolist()
    [[0, 4], [1, 1]]
    """
    pairs = np.asarray(edges, np.int64).reshape(2, -1)
    if pairs.size and (int(pairs.min()) < 0 or int(pairs.max()) >= n):
        raise InputError(f"an edge names row {pairs.max()} or {pairs.min()} of {n} rows. Number rows from 0.")
    pairs = pairs[:, np.lexsort(pairs)]
    fresh = np.ones(pairs.shape[1], bool)
    fresh[1:] = (np.diff(pairs) != 0).any(axis=0)
    return pairs[:, fresh]


def concat(traces: Sequence[Trace]) -> Trace:
    """Put traces one behind the other, joining their tables; a group id that two of them use differently is renumbered.

    Of facts that differ the last one stays; their coverage is listed per trace. Raises `InputError` on no trace.
    """
    if not traces:
        raise InputError("there is no trace to open: the list of paths is empty. Name at least one file.")
    if len(traces) == 1:
        return traces[0]
    joint = TableMerger()
    parts = [joint.enter(trace).events(trace.events) for trace in traces]
    return replace(
        joint.tables([trace.ranks for trace in traces], [trace.meta for trace in traces]),
        events={column: np.concatenate([part[column] for part in parts]) for column in COLUMNS},
        edges=_joined_edges(traces),
    )


def _joined_edges(traces: Sequence[Trace]) -> NDArray[np.int64] | None:
    """Return the edges of all traces, rows counted on from one to the next; None where no trace lists any."""
    first = np.cumsum([0, *(len(trace) for trace in traces)])
    parts = [trace.edges + first[k] for k, trace in enumerate(traces) if trace.edges is not None]
    return np.concatenate(parts, axis=1) if parts else None


def _joined_facts(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the facts of all traces, and the coverage of each under 'parts'."""
    facts = {k: v for meta in metas for k, v in meta.items()}
    known = [meta["coverage"] for meta in metas if isinstance(meta.get("coverage"), Mapping)]
    parts = [part for coverage in known for part in coverage.get("parts", [coverage])]
    if parts:
        mapped = min(float(part.get("mapped", 1.0)) for part in parts)
        facts["coverage"] = {"mapped": mapped, "parts": [dict(part) for part in parts]}
    return facts


@dataclass(frozen=True, slots=True)
class CodeRemap:
    """What turns the codes of one trace into those of the tables that it shares with others."""

    names: NDArray[np.int64]
    """[old names] New code of each name."""

    lanes: NDArray[np.int64]
    """[old lanes] New code of each lane."""

    groups: tuple[tuple[int, int], ...] = ()
    """(old, new) id of each group that is renumbered, in communication rows only."""

    def events(self, events: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return the columns with new codes."""
        group = events["group"]
        for old, new in self.groups:
            moving = (events["group"] == old) & np.isin(events["kind"], [KIND["COLL"], KIND["SEND"], KIND["RECV"]])
            group = np.where(moving, new, group).astype(group.dtype)
        recoded = {"name": _recoded(events["name"], self.names), "lane": _recoded(events["lane"], self.lanes)}
        return {**events, **recoded, "group": group}


def _recoded(codes: NDArray[Any], mapping: NDArray[np.int64]) -> NDArray[Any]:
    """Return new codes; negative ones stay, and so do those without a table."""
    if not len(mapping):
        return codes
    return np.where(codes >= 0, mapping[np.maximum(codes, 0)], codes).astype(codes.dtype)


class TableMerger:
    """The growing tables that several traces share."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.lanes: dict[str, int] = {}
        self.groups: dict[int, Mapping[str, Any]] = {}

    def enter(self, trace: Trace) -> CodeRemap:
        """Enter the tables of `trace` (its rows are not looked at) and return what recodes its rows."""
        names = [self.names.setdefault(entry, len(self.names)) for entry in trace.names]
        lanes = [self.lanes.setdefault(entry, len(self.lanes)) for entry in trace.lanes]
        placed = [
            (number, self._enter_group(number, entry, max(trace.groups))) for number, entry in trace.groups.items()
        ]
        moved = tuple((old, new) for old, new in placed if old != new)
        return CodeRemap(np.array(names, np.int64), np.array(lanes, np.int64), moved)

    def tables(self, ranks: Sequence[Mapping[int, Any]], metas: Sequence[Mapping[str, Any]]) -> Trace:
        """Return the tables as a trace without rows, with the facts of its ranks and its own joined.

        Of facts that differ the last one stays; their coverage is listed per trace.
        """
        known: dict[int, dict[str, Any]] = {}
        for each in ranks:
            for rank, facts in each.items():
                known[rank] = {**known.get(rank, {}), **facts}
        return Trace.from_columns(
            {}, names=tuple(self.names), lanes=tuple(self.lanes), groups=self.groups, ranks=known,
            meta=_joined_facts(metas),
        )  # fmt: skip

    def _enter_group(self, number: int, entry: Mapping[str, Any], highest: int) -> int:
        """Enter one group and return the id under which it stands: its own, that of its equal, or one above all."""
        target = number
        if number in self.groups and _differ(self.groups[number], entry):
            same = [at for at, known in self.groups.items() if known.get("name") == entry.get("name")]
            above = max(highest, *self.groups) + 1
            target = next((at for at in same if not _differ(self.groups[at], entry)), above)
        known = self.groups.get(target, {})
        self.groups[target] = {**entry, **{key: value for key, value in known.items() if value}}
        return target


def _differ(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two entries cannot be the same group: both know a name, or ranks, and these differ."""
    return any(one.get(key) and other.get(key) and one[key] != other[key] for key in ("name", "ranks"))


def _formats() -> Any:
    """Return the module of all formats, which stands above this one: it is imported when a file is opened or saved."""
    return importlib.import_module("headway.trace.readers.formats")
