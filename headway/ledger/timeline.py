"""Book one rank of one attempt: every nanosecond of its time, by sub-line and step.

The training thread owns the device; other threads never do. Start-up, the
steps and what follows them are booked by different tables of `buckets.py`.
Communication pieces are left open here, because splitting them takes the
arrivals of the other ranks (`arrivals.py`).

>>> sheet = Sheet.blank(3)
>>> sheet.book("host.gc", 2, 9)
>>> sheet.ns.sum(axis=0).tolist()
[0, 0, 9, 0, 0]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.core.integers import narrowed
from headway.ledger.buckets import BUCKET_OF, REMAINDER_SUB, STARTUP_OF, SUB_CODE, SUBS, Booking
from headway.ledger.rows import NAME_ID, NAMES, Life, Rows
from headway.ledger.waits import (
    DRAIN_GC,
    DRAIN_OTHER,
    PART_SUBS,
    Loads,
    drain,
    find_loads,
    inside_outside,
    match_batches,
)
from headway.trace.sweep import Ints, Pieces, share_out, sweep

COMM_NAMES = ("comm.wait", "comm.collective", "comm.send", "comm.recv")
"""Names whose time is split by the arrivals of other ranks."""

GAP_PRECEDENCE = 79
"""Gaps between a save and the fsync, rename or close that follow: checkpoint, below every recorded checkpoint row."""

GAP = -2
"""Owner code of such a gap."""

PART_CODES = np.array([SUB_CODE[sub] for sub in PART_SUBS], np.int64)


class Sheet:
    """Booked time of one rank: sub-line x column, where column 0 is before the first step, k + 1 is step k."""

    __slots__ = ("_columns", "_lines", "_ns")

    def __init__(self, ns: Ints) -> None:
        self._ns: Ints | None = ns
        self._columns = int(ns.shape[1])
        self._lines: dict[int, tuple[Ints, Ints]] = {}

    @classmethod
    def blank(cls, num_steps: int) -> Sheet:
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


@dataclass(frozen=True, slots=True)
class OpenWaits:
    """Pieces of time owned by communication rows, not booked yet."""

    row: Ints
    """[n] Row that owns the piece."""

    start_ns: Ints
    """[n] Start of the piece."""

    end_ns: Ints
    """[n] End of the piece."""

    column: Ints
    """[n] Column of the sheet."""


@dataclass(frozen=True, slots=True)
class RankBook:
    """One rank of one attempt, booked but for its communication waits."""

    rows: Rows
    """What the rank recorded."""
    life: Life
    """Its borders."""
    sheet: Sheet
    """What is booked so far, ns."""
    waits: OpenWaits
    """What the arrivals of other ranks will split."""


def book_rank(rows: Rows, life: Life, *, restarted: bool) -> RankBook:
    """Book the time of `life`; `restarted` says that an earlier attempt failed."""
    sheet = Sheet.blank(len(life.step_start))
    _book_startup(sheet, rows, life, "restart" if restarted else "startup")
    waits = _book_steps(sheet, rows, life, restarted=restarted)
    end = len(life.step_start) + 1
    sheet.book("unknown.cut_short", end, life.died_ns - life.record_ns)
    sheet.book("idle.exit" if life.seen else "unknown.cut_short", end, life.until_ns - life.died_ns)
    return RankBook(rows, life, sheet, waits)


def _book_startup(sheet: Sheet, rows: Rows, life: Life, bucket: str) -> None:
    """Book everything before the first step; collections and log lines there are start-up too."""
    sheet.book(f"{bucket}.launch", 0, life.born_ns - life.from_ns)
    picked = rows.of(*STARTUP_OF)
    pieces = sweep(
        rows.start_ns[picked],
        rows.end_ns[picked],
        _STARTUP_TABLE.precedence[rows.name[picked]],
        window=(life.born_ns, life.first_ns),
    )
    swap = _swap("startup", bucket)
    owner = np.append(_STARTUP_TABLE.sub[rows.name[picked]], SUB_CODE["startup.script"])[pieces.row]
    sheet.book_all(swap[owner], np.zeros(len(owner), np.int64), pieces.duration_ns)


def _book_steps(sheet: Sheet, rows: Rows, life: Life, *, restarted: bool) -> OpenWaits:
    """Sweep from the first step to the last trusted record; returns the communication pieces."""
    picked = rows.of(*BUCKET_OF)
    gap_start, gap_end = checkpoint_gaps(rows)
    owner_of = np.concatenate([picked, np.full(len(gap_start), GAP, np.int64), np.array([-1])])
    pieces = sweep(
        np.concatenate([rows.start_ns[picked], gap_start]),
        np.concatenate([rows.end_ns[picked], gap_end]),
        np.concatenate([_STEP_TABLE.precedence[rows.name[picked]], np.full(len(gap_start), GAP_PRECEDENCE, np.int64)]),
        window=(life.first_ns, life.record_ns),
        cuts=np.concatenate([life.step_start, life.step_end]),
    )
    owner = owner_of[pieces.row]
    name = np.where(owner >= 0, rows.name[owner], -1)
    column, place = _place(pieces, life)
    # Collections with nothing else behind them are the interpreter going down: part of what follows the steps.
    over = (name == NAME_ID["host.gc"]) & (pieces.start_ns >= trained_until(rows, life))
    sub = np.where((owner >= 0) & ~over, _STEP_TABLE.sub[name], place)
    sub = np.where(owner == GAP, SUB_CODE["checkpoint.persist"], sub)
    if restarted:
        sub = _swap("startup", "restart")[sub]
    input_piece = np.isin(name, [NAME_ID["input.next"], NAME_ID["input.load"]])
    comm_piece = np.isin(name, [NAME_ID[known] for known in COMM_NAMES])
    plain = ~(input_piece | comm_piece)
    sheet.book_all(sub[plain], column[plain], pieces.duration_ns[plain])
    _book_input(sheet, rows, pieces, owner, column)
    found = np.flatnonzero(comm_piece)
    return OpenWaits(owner[found], pieces.start_ns[found], pieces.end_ns[found], column[found])


def trained_until(rows: Rows, life: Life) -> int:
    """Return the end of the last step, or of the last record after it that is no collection."""
    others = rows.of(*(name for name in BUCKET_OF if name != "host.gc"))
    return max(life.last_ns, int(rows.end_ns[others].max()) if len(others) else 0)


def _place(pieces: Pieces, life: Life) -> tuple[Ints, Ints]:
    """Return each piece's column, and the sub-line it has when no row owns it."""
    num_steps = len(life.step_start)
    index = np.searchsorted(life.step_start, pieces.start_ns, side="right")
    inside = np.zeros(len(index), bool)
    if num_steps:
        inside = (index > 0) & (pieces.start_ns < life.step_end[np.maximum(index, 1) - 1])
    after = ~inside & (index == num_steps)
    column = np.where(after, num_steps + 1, index)
    tail = SUB_CODE["rework.partial" if life.failed else "idle.teardown"]
    sub = np.where(after, tail, np.where(inside, SUB_CODE[REMAINDER_SUB], SUB_CODE["unknown.dropped"]))
    return column, sub


def checkpoint_gaps(rows: Rows) -> tuple[Ints, Ints]:
    """Find what lies between a save and the fsync, rename or close that follow it: writing that no probe saw.

    A gap counts when nothing else that belongs to training (input, optimizer, communication, a save of headway's own)
    begins inside it.
    """
    names = ("checkpoint.save", "checkpoint.sync", "checkpoint.rename")
    training = ("input.next", "input.iter", "optimizer.step", "comm.wait", "comm.collective", "step")
    other = (*training, "checkpoint.snapshot", "checkpoint.wait", "checkpoint.restore")
    picked = rows.of(*names, *other)
    state = np.isin(rows.name[picked], [NAME_ID[name] for name in names])
    follows = np.isin(rows.name[picked], [NAME_ID[name] for name in names[1:]])
    joined = np.flatnonzero(state[:-1] & follows[1:]) if len(picked) else np.zeros(0, np.int64)
    reach = np.maximum.accumulate(np.where(state, rows.end_ns[picked], 0)) if len(picked) else joined
    start, end = reach[joined], rows.start_ns[picked[joined + 1]]
    open_gap = end > start
    return start[open_gap], end[open_gap]


def _book_input(sheet: Sheet, rows: Rows, pieces: Pieces, owner: Ints, column: Ints) -> None:
    """Split what the training thread spent in next(loader) and in loads of its own."""
    loads = find_loads(rows)
    name = np.where(owner >= 0, rows.name[owner], -1)
    _book_inline(sheet, rows, loads, pieces, owner, column)
    waits = rows.of("input.next")
    position = np.full(len(rows), -1, np.int64)
    position[waits] = np.arange(len(waits))
    found = np.flatnonzero(name == NAME_ID["input.next"])
    load = match_batches(rows, waits, loads)[position[owner[found]]]
    made = load >= 0
    _book_awaited(sheet, loads, pieces, column, found[made], load[made])
    # Without a worker's record: what is left of next() around a load in the same thread is hand-off; the call that
    # finds the loader at its end stops the workers.
    rest = found[~made]
    sub = np.where(_holds_load(rows, loads, owner[rest]), SUB_CODE["input.transfer"], SUB_CODE["input.unsplit"])
    sub = np.where(_finds_end(rows, owner[rest]), SUB_CODE["input.start"], sub)
    sheet.book_all(sub, column[rest], pieces.duration_ns[rest])


def _finds_end(rows: Rows, waits: Ints) -> NDArray[np.bool_]:
    """Return whether each input.next row brought no batch, of a loader that brings numbered ones."""
    every = rows.of("input.next")
    numbered = every[rows.column("seq", every) >= 0]
    known = np.isin(rows.column("group", waits), np.unique(rows.column("group", numbered)))
    return known & (rows.column("seq", waits) < 0)


def _holds_load(rows: Rows, loads: Loads, waits: Ints) -> NDArray[np.bool_]:
    """Return for each input.next row whether a load of the training thread lies inside it."""
    start = loads.start_ns[loads.key[:, 1] == -1]
    index = np.searchsorted(start, rows.start_ns[waits])
    edge = np.append(start, np.iinfo(np.int64).max)
    held: NDArray[np.bool_] = edge[index] < rows.end_ns[waits]
    return held


def _book_awaited(sheet: Sheet, loads: Loads, pieces: Pieces, column: Ints, found: Ints, load: Ints) -> None:
    """Split pieces `found` of input.next by the worker's record of the awaited batch."""
    before, loading, after = inside_outside(
        pieces.start_ns[found], pieces.end_ns[found], loads.start_ns[load], loads.end_ns[load]
    )
    early = np.where(loads.first[load] > 0, SUB_CODE["input.start"], SUB_CODE["input.transfer"])
    sheet.book_all(early, column[found], before)
    sheet.book_all(SUB_CODE["input.transfer"], column[found], after)
    _book_parts(sheet, column[found], loading, loads.parts[load])


def _book_parts(sheet: Sheet, column: Ints, duration_ns: Ints, parts: Ints) -> None:
    """Book durations [n] in proportion to `parts` [n, 4]; without parts they stay unsplit."""
    known = parts.sum(axis=1) > 0
    sheet.book_all(SUB_CODE["input.unsplit"], column[~known], duration_ns[~known])
    shares = share_out(duration_ns[known], parts[known])
    for index, code in enumerate(PART_CODES.tolist()):
        sheet.book_all(code, column[known], shares[:, index])


def _book_inline(sheet: Sheet, rows: Rows, loads: Loads, pieces: Pieces, owner: Ints, column: Ints) -> None:
    """Split loads that ran in the training thread; collections inside them are not prep, log lines not fetch."""
    name = np.where(owner >= 0, rows.name[owner], -1)
    found = np.flatnonzero(name == NAME_ID["input.load"])
    if not len(found):
        return
    position = np.full(len(rows), -1, np.int64)
    position[loads.row] = np.arange(len(loads.row))
    load = position[owner[found]]
    owned = np.zeros(len(loads.row), np.int64)
    np.add.at(owned, load, pieces.duration_ns[found])
    missing = np.where(owned > 0, np.maximum(loads.parts.sum(axis=1) - owned, 0), 0)
    by_gc = np.minimum(_time_inside(loads, pieces, name == NAME_ID["host.gc"]), missing)
    parts = drain(drain(loads.parts, by_gc, DRAIN_GC), missing - by_gc, DRAIN_OTHER)
    known = loads.parts.sum(axis=1) > 0
    parts[:, 3] = np.where(known, np.maximum(owned - parts[:, :3].sum(axis=1), 0), 0)
    _book_parts(sheet, column[found], pieces.duration_ns[found], parts[load])


def _time_inside(loads: Loads, pieces: Pieces, picked: NDArray[np.bool_]) -> Ints:
    """Return for each load of the training thread the ns of the `picked` pieces that lie inside it."""
    total = np.zeros(len(loads.row), np.int64)
    mine = np.flatnonzero(loads.key[:, 1] == -1)
    inner = np.flatnonzero(picked)
    if not len(mine) or not len(inner):
        return total
    index = np.searchsorted(loads.start_ns[mine], pieces.start_ns[inner], side="right") - 1
    load = mine[np.maximum(index, 0)]
    held = (index >= 0) & (pieces.start_ns[inner] < loads.end_ns[load])
    np.add.at(total, load[held], pieces.duration_ns[inner[held]])
    return total


@dataclass(frozen=True, slots=True)
class _Table:
    """A table of bookings as arrays over `NAMES`, with a blank at the end for 'no name' (-1)."""

    sub: Ints
    precedence: Ints


def _as_table(bookings: Mapping[str, Booking]) -> _Table:
    """Lay a table of bookings out by name."""
    sub = [SUB_CODE[bookings[name].sub] if name in bookings else 0 for name in NAMES]
    precedence = [bookings[name].precedence if name in bookings else 0 for name in NAMES]
    return _Table(np.array([*sub, 0], np.int64), np.array([*precedence, 0], np.int64))


_STEP_TABLE = _as_table(BUCKET_OF)
_STARTUP_TABLE = _as_table(STARTUP_OF)


def _swap(old: str, new: str) -> Ints:
    """Return sub-line codes with those of bucket `old` replaced by the ones of bucket `new`."""
    codes = [SUB_CODE[new + sub.removeprefix(old)] if sub.startswith(old + ".") else SUB_CODE[sub] for sub in SUBS]
    return np.array(codes, np.int64)
