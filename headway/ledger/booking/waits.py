"""What a wait was for: the parts of a batch's load, the last rank of a collective, the peer of a message.

An input wait is split by the awaited batch's own record: blocked = fetch,
CPU = prep, run queue = cpu_wait, in proportion to the load they happened in;
what lies after the worker had finished is transfer. A communication wait up
to the last arrival is somebody's lateness, the rest is communication.
All times int64 ns.

>>> inside_outside(np.array([2]), np.array([10]), np.array([4]), np.array([9]))
(array([2]), array([5]), array([1]))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.core.units import NS_PER_MS
from headway.ledger.booking.rows import NAME_ID, RankAccount, RankRows
from headway.ledger.buckets import SUB_CODE
from headway.trace.events.intervals import Ints, Pieces, enclosing, number_alike, share_out
from headway.trace.events.vocabulary import STAGE_PARTS

PART_SUBS = ("input.fetch", "input.cpu_wait", "input.prep", "input.transfer")
"""Sub-lines of the columns of `InputLoads.parts`."""

PARTS = {"input.fetch": 0, "input.cpu_wait": 1, "input.prep": 2, "input.collate": 2}
"""Child of input.load -> its column."""

OPENING_NS, OPENING_TIMES = 20 * NS_PER_MS, 1.0
"""The first load of a worker opens something where it takes so much longer than later ones, in ns and in times."""

DRAIN_GC = (2, 1, 0)
"""Order in which a collection inside a load is taken out of its parts: it is CPU time, so out of prep first."""

DRAIN_OTHER = (0, 2, 1)
"""The same for saves and log lines, which block."""


@dataclass(frozen=True, slots=True)
class InputLoads:
    """Every input.load of one rank, in order of start."""

    row: Ints
    """[n] Row of each load."""

    start_ns: Ints
    """[n] Start of the load."""

    end_ns: Ints
    """[n] End of the load."""

    parts: Ints
    """[n, 4] ns of fetch, run queue, prep (collate included) and transfer (none of it: filled by callers)."""

    first: Ints
    """[n] 1 if the load is the first of its worker in its iterator."""

    key: Ints
    """[n, 4] (loader, worker, iterator, n-th load of that worker in that iterator)."""


def inside_outside(start: Ints, end: Ints, low: Ints, high: Ints) -> tuple[Ints, Ints, Ints]:
    """Cut intervals at `low` and `high`: the lengths before, between and after, each [n]."""
    before = np.maximum(np.minimum(end, low) - start, 0)
    after = np.maximum(end - np.maximum(start, high), 0)
    return before, end - start - before - after, after


def find_loads(rows: RankRows) -> InputLoads:
    """Collect the loads of one rank with their parts, in whatever process they ran."""
    row = rows.of("input.load", main=False)
    start, end, worker = rows.start_ns[row], rows.end_ns[row], rows.worker[row]
    group = rows.column("group", row)
    named = rows.column("corr", row)
    iterator = np.where(named >= 0, named, _iterator_of(rows, group, start))
    nth = _nth(np.stack([group, worker, iterator], axis=1), rows.column("seq", row))
    parts = np.zeros((len(row), len(PART_SUBS)), np.int64)
    for name, column in PARTS.items():
        child = rows.of(name, main=False)
        owner = _containing(rows, child, row)
        held = owner >= 0
        np.add.at(parts[:, column], owner[held], (rows.end_ns - rows.start_ns)[child[held]])
    key = np.stack([group, worker, iterator, nth], axis=1)
    return InputLoads(row, start, end, parts, (nth == 0).astype(np.int64), key)


def _iterator_of(rows: RankRows, group: Ints, start: Ints) -> Ints:
    """Return the corr of the iterator that was the loader's newest one at `start`, -1 when none was created."""
    created = rows.of("input.iter")
    result = np.full(len(start), -1, np.int64)
    for loader in np.unique(group).tolist():
        mine = created[rows.column("group", created) == loader]
        if not len(mine):
            continue
        picked = group == loader
        index = np.searchsorted(rows.start_ns[mine], start[picked], side="right") - 1
        result[picked] = np.where(index >= 0, rows.column("corr", mine)[np.maximum(index, 0)], -1)
    return result


def _nth(key: Ints, seq: Ints) -> Ints:
    """Return the position of each row among those of its key, by `seq` where it was recorded, else by order."""
    result = np.zeros(len(key), np.int64)
    if not len(key):
        return result
    group = number_alike(key)
    order = np.argsort(group, kind="stable")
    first = np.searchsorted(group[order], np.arange(group.max() + 1))
    result[order] = np.arange(len(key)) - first[group[order]]
    if bool((seq >= 0).all()):
        lowest = np.full(int(group.max()) + 1, np.iinfo(np.int64).max)
        np.minimum.at(lowest, group, seq)
        result = seq - lowest[group]
    return result


def _containing(rows: RankRows, child: Ints, parent: Ints) -> Ints:
    """Return the position in `parent` of the row that holds each child, -1 for none.

    Both are on one lane, of one loader and iterator, and the n-th of its worker: batches that the same threads made may
    overlap there.
    """
    mine, theirs = (
        np.stack([rows.worker[some], *(rows.column(key, some) for key in ("group", "corr", "seq"))], axis=1)
        for some in (parent, child)
    )
    found = enclosing(mine, rows.start_ns[parent], theirs, rows.start_ns[child])
    held = found >= 0
    held[held] = rows.end_ns[child[held]] <= rows.end_ns[parent[found[held]]]
    return np.where(held, found, -1)


def match_batches(rows: RankRows, waits: Ints, loads: InputLoads) -> Ints:
    """Return for each input.next row the load that made its batch, -1 when it was not recorded.

    Batch `s` of an iterator with W workers is the (s // W)-th load of the worker that delivered it.
    """
    match = np.full(len(waits), -1, np.int64)
    peer = rows.column("peer", waits)
    picked = np.flatnonzero(peer >= 0)
    if not len(picked) or not len(loads.row):
        return match
    next_rows = waits[picked]
    group, corr = rows.column("group", next_rows), rows.column("corr", next_rows)
    seq, worker = rows.column("seq", next_rows), peer[picked]
    by_order = _nth(np.stack([group, worker, corr], axis=1), np.full(len(next_rows), -1, np.int64))
    created = rows.of("input.iter")
    workers_of = dict(zip(rows.column("corr", created).tolist(), rows.column("peer", created).tolist(), strict=True))
    count = np.array([workers_of.get(value, 0) for value in corr.tolist()], np.int64)
    # Workers take turns, so batch s comes from worker s mod W. Where that does not hold, the n-th batch that was taken
    # from a worker is its n-th load.
    regular = (count > 0) & (seq >= 0)
    regular &= worker == np.where(regular, seq % np.maximum(count, 1), worker)
    nth = np.where(regular, seq // np.maximum(count, 1), by_order)
    wanted = np.stack([group, worker, corr, nth], axis=1)
    # Join on (loader, worker, iterator, n-th): equal keys have equal numbers, and `owner` is a table over the numbers.
    code = number_alike(np.concatenate([loads.key, wanted]))
    owner = np.full(int(code.max()) + 1, -1, np.int64)
    owner[code[: len(loads.row)]] = np.arange(len(loads.row))
    match[picked] = owner[code[len(loads.row) :]]
    return match


def drain(parts: Ints, amount: Ints, order: tuple[int, ...]) -> Ints:
    """Take `amount` [n] out of the columns of `parts` [n, k] in `order`, never below zero; returns the rest."""
    left, parts = amount.copy(), parts.copy()
    for column in order:
        taken = np.minimum(parts[:, column], left)
        parts[:, column] -= taken
        left -= taken
    return parts


# Split what a training thread spent in next(loader), by what made the batch and by loader.
#
# An awaited batch's own record says how much of the wait was storage, run queue
# or preparation (`waits.py`). Every piece is booked twice: on the rank's sheet
# by step, and in its table of loaders. Times in int64 ns.

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
    # What is awaited of a new worker's first load is opening in the share that the whole load spends on it.
    took = np.maximum(loads.end_ns - loads.start_ns, 1)
    opening = np.rint(loading * (opening_ns(loads) / took)[load]).astype(np.int64)
    book(SUB_CODE["input.open"], found, opening)
    _book_parts(book, found, loading - opening, loads.parts[load])


def opening_ns(loads: InputLoads) -> Ints:
    """Return [n] what the first load of each worker took beyond the median of its loader's later loads.

    A new worker opens files and connections, and imports, in its first load. 0 for other loads, for those of the
    training thread, and where it is less than `OPENING_TIMES` the median and `OPENING_NS`: that is a cold cache.
    """
    took, result = loads.end_ns - loads.start_ns, np.zeros(len(loads.row), np.int64)
    by_worker, loader = loads.key[:, 1] >= 0, loads.key[:, 0]
    for group in np.unique(loader[by_worker]).tolist():
        of_loader = by_worker & (loader == group)
        first, others = of_loader & (loads.first > 0), of_loader & (loads.first == 0)
        if first.any() and others.any():
            usual_ns = int(np.median(took[others]))
            extra = took - usual_ns
            result = np.where(first & (extra > max(OPENING_NS, OPENING_TIMES * usual_ns)), extra, result)
    return result


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


# Which kind of pipeline bubble a wait for another stage is: three sub-lines, told by what the rank computes around it.
#
#     fill_drain          before the first or after the last computation of a pass of the rank
#     forward_backward    right before its first backward
#     scattered           between other computations
#
# A pass is one call of the schedule's step. The kinds are those of
# `headway.sim.pipeline.simulate`, there of a simulated order. A rank that
# recorded no stage, such as one with a pipeline of its own, keeps `bubble.p2p`.

STAGES = tuple(f"stage.{part}" for part in STAGE_PARTS)
BACKWARDS = [NAME_ID[name] for name in ("stage.backward", "stage.input")]

KINDS = ("fill_drain", "forward_backward", "scattered")
FILL_DRAIN, FORWARD_BACKWARD, SCATTERED = (SUB_CODE[f"bubble.{kind}"] for kind in KINDS)


def bubble_subs(rows: RankRows, wait_ns: Ints) -> Ints:
    """Return [n] the sub-line that a wait which begins at `wait_ns` [n] goes to where it is a bubble."""
    parts = rows.of(*STAGES)
    if not len(parts):
        return np.full(len(wait_ns), SUB_CODE["bubble.p2p"], np.int64)
    name, stage, microbatch = rows.name[parts], rows.column("corr", parts), rows.column("seq", parts)
    opens = (name == NAME_ID["stage.forward"]) & (microbatch == 0) & (stage == stage.min())
    passes = np.cumsum(opens)
    backward = np.isin(name, BACKWARDS)
    before: Ints = np.cumsum(backward) - backward  # backwards before each computation, all passes
    first_of_pass = np.searchsorted(passes, passes)
    first_backward = backward & (before == before[first_of_pass])
    # The computation that follows each wait; a wait inside one, which torch has none of, counts to the next one too.
    after = np.searchsorted(rows.start_ns[parts], wait_ns, side="left")
    outer = (after == 0) | (after == len(parts))
    after = np.clip(after, 1, len(parts) - 1) if len(parts) > 1 else np.zeros(len(wait_ns), np.int64)
    outer |= passes[after] != passes[after - 1]
    return np.where(outer, FILL_DRAIN, np.where(first_backward[after], FORWARD_BACKWARD, SCATTERED))
