"""Split what a training thread spent in next(loader), by what made the batch and by loader.

An awaited batch's own record says how much of the wait was storage, run queue
or preparation (`waits.py`). Every piece is booked twice: on the rank's sheet
by step, and in its table of loaders. Times in int64 ns.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from headway.ledger.booking.rows import NAME_ID, RankRows
from headway.ledger.booking.sheet import RankAccount
from headway.ledger.booking.waits import (
    DRAIN_GC,
    DRAIN_OTHER,
    PART_SUBS,
    InputLoads,
    drain,
    find_loads,
    inside_outside,
    match_batches,
)
from headway.ledger.kinds.buckets import SUB_CODE
from headway.trace.events.sweep import Ints, Pieces, share_out

PART_CODES = np.array([SUB_CODE[sub] for sub in PART_SUBS], np.int64)

INPUT_IDS = [NAME_ID[name] for name in ("input.next", "input.load", "input.iter")]
"""Rows of the training thread that belong to a loader."""


def book_input(sheet: RankAccount, rows: RankRows, pieces: Pieces, owner: Ints, column: Ints) -> None:
    """Split what the training thread spent in next(loader), in iter(loader) and in loads of its own.

    `owner` [m] is the row that owns each piece, negative for none, and `column` [m] the column of the sheet.
    """
    loads = find_loads(rows)
    name = np.where(owner >= 0, rows.name[owner], -1)
    loader = _loader_of(rows, owner)

    def book(sub: Ints | int, some: Ints, duration_ns: Ints) -> None:
        sheet.book_all(sub, column[some], duration_ns)
        sheet.book_loader(sub, loader[some], duration_ns)

    _book_inline(book, rows, loads, pieces, owner)
    created = np.flatnonzero(name == NAME_ID["input.iter"])
    book(SUB_CODE["input.start"], created, pieces.duration_ns[created])
    waits = rows.of("input.next")
    position = np.full(len(rows), -1, np.int64)
    position[waits] = np.arange(len(waits))
    found = np.flatnonzero(name == NAME_ID["input.next"])
    _, first = np.unique(owner[found], return_index=True)  # a call may be cut into pieces
    called, counts = np.unique(loader[found[first]], return_counts=True)
    sheet.loader_calls = dict(zip(called.tolist(), counts.tolist(), strict=True))
    load = match_batches(rows, waits, loads)[position[owner[found]]]
    made = load >= 0
    _book_awaited(book, loads, pieces, found[made], load[made])
    # Without a worker's record: what is left of next() around a load in the same thread is hand-off; the call that
    # finds the loader at its end stops the workers.
    rest = found[~made]
    sub = np.where(_holds_load(rows, loads, owner[rest]), SUB_CODE["input.transfer"], SUB_CODE["input.unsplit"])
    sub = np.where(_finds_end(rows, owner[rest]), SUB_CODE["input.start"], sub)
    book(sub, rest, pieces.duration_ns[rest])


def book_evaluation(sheet: RankAccount, rows: RankRows, pieces: Pieces, owner: Ints) -> None:
    """Note what the loaders of evaluations cost: input pieces, which are `eval.input` on the sheet already."""
    inputs = np.flatnonzero((owner >= 0) & np.isin(np.where(owner >= 0, rows.name[owner], -1), INPUT_IDS))
    sheet.book_loader(SUB_CODE["eval.input"], _loader_of(rows, owner[inputs]), pieces.duration_ns[inputs])


Book = Callable[[Ints | int, Ints, Ints], None]
"""Books (sub-line codes, pieces [n], durations [n])."""


def _loader_of(rows: RankRows, owner: Ints) -> Ints:
    """Return [m] the loader (group) of the input row that owns each piece, -1 for other owners.

    A load of the training thread need not name its loader: the call of next(loader) around it does.
    """
    inputs = rows.of("input.next", "input.load", "input.iter")
    loader = np.full(len(rows) + 1, -1, np.int64)
    loader[inputs] = rows.column("group", inputs)
    nameless = inputs[loader[inputs] < 0]
    calls = rows.of("input.next")
    if len(calls) and len(nameless):
        around = calls[np.maximum(np.searchsorted(rows.start_ns[calls], rows.start_ns[nameless], side="right") - 1, 0)]
        inside = rows.end_ns[nameless] <= rows.end_ns[around]
        loader[nameless[inside]] = loader[around[inside]]
    return loader[np.maximum(owner, -1)]


def _finds_end(rows: RankRows, waits: Ints) -> NDArray[np.bool_]:
    """Return whether each input.next row brought no batch, of a loader that brings numbered ones."""
    every = rows.of("input.next")
    numbered = every[rows.column("seq", every) >= 0]
    known = np.isin(rows.column("group", waits), np.unique(rows.column("group", numbered)))
    return known & (rows.column("seq", waits) < 0)


def _holds_load(rows: RankRows, loads: InputLoads, waits: Ints) -> NDArray[np.bool_]:
    """Return for each input.next row whether a load of the training thread lies inside it."""
    start = loads.start_ns[loads.key[:, 1] == -1]
    index = np.searchsorted(start, rows.start_ns[waits])
    edge = np.append(start, np.iinfo(np.int64).max)
    held: NDArray[np.bool_] = edge[index] < rows.end_ns[waits]
    return held


def _book_awaited(book: Book, loads: InputLoads, pieces: Pieces, found: Ints, load: Ints) -> None:
    """Split pieces `found` of input.next by the worker's record of the awaited batch."""
    before, loading, after = inside_outside(
        pieces.start_ns[found], pieces.end_ns[found], loads.start_ns[load], loads.end_ns[load]
    )
    early = np.where(loads.first[load] > 0, SUB_CODE["input.start"], SUB_CODE["input.transfer"])
    book(early, found, before)
    book(SUB_CODE["input.transfer"], found, after)
    _book_parts(book, found, loading, loads.parts[load])


def _book_parts(book: Book, found: Ints, duration_ns: Ints, parts: Ints) -> None:
    """Book durations [n] of the pieces `found` in proportion to `parts` [n, 4]; without parts they stay unsplit."""
    known = parts.sum(axis=1) > 0
    book(SUB_CODE["input.unsplit"], found[~known], duration_ns[~known])
    shares = share_out(duration_ns[known], parts[known])
    for index, code in enumerate(PART_CODES.tolist()):
        book(code, found[known], shares[:, index])


def _book_inline(book: Book, rows: RankRows, loads: InputLoads, pieces: Pieces, owner: Ints) -> None:
    """Split loads that ran in the training thread; collections inside them are not prep, log lines not fetch."""
    name = np.where(owner >= 0, rows.name[owner], -1)
    found = np.flatnonzero(name == NAME_ID["input.load"])
    if not len(found):
        return
    position = np.full(len(rows), -1, np.int64)
    position[loads.row] = np.arange(len(loads.row))
    load = position[owner[found]]
    # The parts add up to the whole load; `owned` is the time that collections, saves and log lines inside left to it.
    # The difference is taken out of the parts, and what a load owns beyond its parts is transfer.
    owned = np.zeros(len(loads.row), np.int64)
    np.add.at(owned, load, pieces.duration_ns[found])
    missing = np.where(owned > 0, np.maximum(loads.parts.sum(axis=1) - owned, 0), 0)
    by_gc = np.minimum(_time_inside(loads, pieces, name == NAME_ID["host.gc"]), missing)
    parts = drain(drain(loads.parts, by_gc, DRAIN_GC), missing - by_gc, DRAIN_OTHER)
    known = loads.parts.sum(axis=1) > 0
    parts[:, 3] = np.where(known, np.maximum(owned - parts[:, :3].sum(axis=1), 0), 0)
    _book_parts(book, found, pieces.duration_ns[found], parts[load])


def _time_inside(loads: InputLoads, pieces: Pieces, picked: NDArray[np.bool_]) -> Ints:
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
