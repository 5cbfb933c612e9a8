"""Booked time of one rank: sub-line x step, and what it waited for each of its loaders. Times in int64 ns.

>>> sheet = RankAccount.blank(3)
>>> sheet.book("host.gc", 2, 9)
>>> sheet.ns.sum(axis=0).tolist()
[0, 0, 9, 0, 0]
"""

from __future__ import annotations

import numpy as np

from headway.core.integers import narrowed
from headway.ledger.buckets import SUB_CODE, SUBS
from headway.trace.events.intervals import Ints


class RankAccount:
    """Booked time of one rank: sub-line x column, where column 0 is before the first step, k + 1 is step k."""

    __slots__ = ("_columns", "_lines", "_ns", "loader_calls", "loader_ns")

    def __init__(self, ns: Ints) -> None:
        self._ns: Ints | None = ns
        self.loader_ns: dict[int, Ints] = {}
        """Loader (group; -1 = not known) -> [len(SUBS)] ns that the training thread spent on it."""
        self.loader_calls: dict[int, int] = {}
        """Loader -> calls of next(loader) by training, evaluations left out."""
        self._columns = int(ns.shape[1])
        self._lines: dict[int, tuple[Ints, Ints]] = {}

    @classmethod
    def blank(cls, num_steps: int) -> RankAccount:
        """Return a sheet with nothing booked."""
        return cls(np.zeros((len(SUBS), num_steps + 2), np.int64))

    @property
    def ns(self) -> Ints:
        """[len(SUBS), num_steps + 2] Nanoseconds; the last column is what follows the last step."""
        if self._ns is None:
            self._ns = np.zeros((len(SUBS), self._columns), np.int64)
            for line, (columns, amounts) in self._lines.items():
                self._ns[line, columns if len(columns) else slice(None)] = amounts
        return self._ns

    @property
    def columns(self) -> int:
        """num_steps + 2."""
        return self._columns

    def totals(self) -> Ints:
        """[len(SUBS)] Nanoseconds over all columns; a packed sheet stays packed."""
        if self._ns is not None:
            whole: Ints = self._ns.sum(axis=1)
            return whole
        sums = np.zeros(len(SUBS), np.int64)
        for line, (_, amounts) in self._lines.items():
            sums[line] = amounts.sum(dtype=np.int64)
        return sums

    def pack(self) -> None:
        """Keep no more than what is booked, in narrow types, until `ns` is asked for again.

        A sub-line is kept as columns and their amounts, or whole (without columns) where that takes less.
        """
        if self._ns is None:
            return
        self._lines = {}
        for line in np.flatnonzero(self._ns.any(axis=1)).tolist():
            columns = np.flatnonzero(self._ns[line])
            some = 2 * len(columns) < self._columns
            kept = self._ns[line, columns] if some else self._ns[line]
            self._lines[line] = (narrowed(columns) if some else columns[:0], narrowed(kept))
        self._ns = None

    def book(self, sub: str, column: int, duration_ns: int) -> None:
        """Add one amount."""
        self.ns[SUB_CODE[sub], column] += duration_ns

    def book_all(self, sub: Ints | int, column: Ints, duration_ns: Ints) -> None:
        """Add many: `sub` codes [n] or one code, `column` [n], `duration_ns` [n]."""
        np.add.at(self.ns, (np.broadcast_to(sub, column.shape), column), duration_ns)

    def book_loader(self, sub: Ints | int, loader: Ints, duration_ns: Ints) -> None:
        """Add what was spent on loaders: `sub` codes [n] or one code, `loader` [n], `duration_ns` [n]."""
        codes = np.broadcast_to(sub, loader.shape)
        for group in np.unique(loader).tolist():
            own = loader == group
            total = self.loader_ns.setdefault(group, np.zeros(len(SUBS), np.int64))
            np.add.at(total, codes[own], duration_ns[own])
