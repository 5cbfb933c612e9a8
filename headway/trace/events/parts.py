"""A trace that is read a rank at a time, for analyses that must not hold all of it.

Use it on a trace of any size: `Parts.of` takes one in memory or this, and
`Parts.of_files` opens Parquet files of ours of which it reads the tables only.
Iterating yields one `Trace` per rank, in order of rank, all with the same
tables; what is read is let go of before the next one comes. The tables, and so
every code in the rows, are those that `concat` gives the whole.

>>> trace = Trace.from_columns({"rank": [1, 0, 1], "start_ns": [5, 6, 7]})
>>> [(rank, part.events["start_ns"].tolist()) for rank, part in zip(Parts.of(trace).numbers, Parts.of(trace))]
[(0, [6]), (1, [5, 7])]
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.trace.events.parquet import StoredTrace
from headway.trace.events.trace import COLUMNS, CodeRemap, TableMerger, Trace


class _InMemory:
    """A trace as a source."""

    def __init__(self, trace: Trace) -> None:
        self._trace = replace(trace, edges=None)
        self.tables = replace(trace, events={c: v[:0] for c, v in trace.events.items()}, edges=None)

    def __len__(self) -> int:
        return len(self._trace)

    @functools.cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(np.unique(self._trace.events["rank"]).tolist())

    @functools.cached_property
    def _by_rank(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rows in order of rank, each rank's in their own order, and where each rank begins."""
        rank = self._trace.events["rank"]
        order = np.argsort(rank, kind="stable")
        return order, np.searchsorted(rank[order], [*self.ranks, np.iinfo(np.int64).max])

    def read(self, ranges: Mapping[str, tuple[int, int]] | None = None, columns: Sequence[str] | None = None) -> Trace:
        wanted = dict(ranges or {})
        trace = self._trace
        one = wanted.get("rank", (0, 0))
        if one[1] - one[0] == 1:
            del wanted["rank"]
            if self.ranks != one[:1]:
                order, begins = self._by_rank
                place = int(np.searchsorted(self.ranks, one[0]))
                found = place < len(self.ranks) and self.ranks[place] == one[0]
                trace = trace.where(order[begins[place] : begins[place + 1]] if found else order[:0])
        for column, (first, end) in wanted.items():
            trace = trace.where((trace.events[column] >= first) & (trace.events[column] < end))
        return trace


@dataclass(frozen=True, slots=True)
class _Piece:
    """One source among several."""

    source: StoredTrace | _InMemory

    recodings: tuple[CodeRemap, ...] = ()
    """What leads from its own tables to the common ones."""

    only: frozenset[int] | None = None
    """The ranks taken from it, None = all."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that it gives rows of."""
        return tuple(rank for rank in self.source.ranks if self.only is None or rank in self.only)

    def read(
        self, ranges: Mapping[str, tuple[int, int]] | None, columns: Sequence[str] | None
    ) -> Mapping[str, NDArray[Any]]:
        """Return columns in the common codes."""
        if columns is not None and "group" in columns:
            columns = [*columns, "kind"]  # It tells which rows a renumbered group stands in.
        trace = self.source.read(ranges, columns)
        if self.only is not None and not self.only >= set(self.source.ranks):
            trace = trace.select(ranks=self.only)
        events = trace.events
        for recoding in self.recodings:
            events = recoding.events(events)
        return events


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """Rows by rank. Build it with `of`, `of_files` or `joined`."""

    tables: Trace
    """The common tables, without rows."""

    pieces: tuple[_Piece, ...]
    """Where the rows come from, in order."""

    @classmethod
    def of(cls, source: Trace | Parts) -> Parts:
        """Return the parts of a trace; parts as they are."""
        if isinstance(source, Parts):
            return source
        own = _InMemory(source)
        return cls(own.tables, (_Piece(own),))

    @classmethod
    def of_files(cls, paths: Iterable[Path]) -> Parts:
        """Return the parts of files that `Trace.save` wrote as Parquet.

        Raises `FormatError` when one of them is none, `InputError` on no file.
        """
        sources = [StoredTrace(path) for path in paths]
        return cls.joined([cls(source.tables, (_Piece(source),)) for source in sources])

    @classmethod
    def joined(cls, parts: Sequence[Parts]) -> Parts:
        """Put parts one behind the other, as `concat` does with traces. Raises `InputError` on none."""
        if not parts:
            raise InputError("there is no trace to join: the list is empty. Name at least one file.")
        if len(parts) == 1:
            return parts[0]
        joint = TableMerger()
        pieces = []
        for part in parts:
            recoding = joint.enter(part.tables)
            pieces += [replace(piece, recodings=(*piece.recodings, recoding)) for piece in part.pieces]
        tables = joint.tables([part.tables.ranks for part in parts], [part.tables.meta for part in parts])
        return cls(tables, tuple(pieces))

    def __len__(self) -> int:
        """Return the number of rows in the sources, those of ranks left out by `select` included."""
        return sum(len(piece.source) for piece in self.pieces)

    def __iter__(self) -> Iterator[Trace]:
        """Yield one trace per rank, in order of rank."""
        for rank in self.numbers:
            yield self.read({"rank": (rank, rank + 1)})

    @property
    def numbers(self) -> tuple[int, ...]:
        """The ranks that have rows, in order; -1 for rows without one."""
        return tuple(sorted({rank for piece in self.pieces for rank in piece.ranks}))

    @property
    def ranks(self) -> Mapping[int, Mapping[str, Any]]:
        """Rank -> what is known of it, as `Trace.ranks`."""
        return self.tables.ranks

    @property
    def meta(self) -> Mapping[str, Any]:
        """Facts of the whole, as `Trace.meta`."""
        return self.tables.meta

    def read(self, ranges: Mapping[str, tuple[int, int]] | None = None, columns: Sequence[str] | None = None) -> Trace:
        """Return the rows whose columns lie in `ranges` (column -> first and end, the end excluded), in file order.

        `columns` names what is needed; where a source can leave the others out, they are unknown.
        """
        one = (ranges or {}).get("rank")
        chosen = [piece for piece in self.pieces if one is None or any(one[0] <= rank < one[1] for rank in piece.ranks)]
        found = [piece.read(ranges, columns) for piece in chosen]
        if len(found) == 1:
            return replace(self.tables, events=found[0])
        blank = self.tables.events
        events = {column: np.concatenate([blank[column], *(each[column] for each in found)]) for column in COLUMNS}
        return replace(self.tables, events=events)

    def where(self, keep: Callable[[Trace], NDArray[np.bool_]]) -> Trace:
        """Return the rows that `keep` chooses of each rank's trace, by rank; one rank is read at a time."""
        chosen = [part.where(keep(part)).events for part in self]
        blank = self.tables.events
        events = {column: np.concatenate([blank[column], *(each[column] for each in chosen)]) for column in COLUMNS}
        return replace(self.tables, events=events)

    def whole(self) -> Trace:
        """Return all rows as one trace."""
        return self.read()

    def select(self, ranks: Iterable[int]) -> Parts:
        """Return the parts of these ranks only, with the same tables."""
        kept = frozenset(ranks)
        return replace(
            self,
            pieces=tuple(
                replace(piece, only=kept if piece.only is None else kept & piece.only) for piece in self.pieces
            ),
        )

    def with_meta(self, meta: Mapping[str, Any]) -> Parts:
        """Return the same rows with other facts."""
        return replace(self, tables=replace(self.tables, meta=dict(meta)))
