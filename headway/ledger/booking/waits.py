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

from dataclasses import dataclass

import numpy as np

from headway.ledger.booking.rows import RankRows
from headway.trace.events.nesting import enclosing, number_alike
from headway.trace.events.sweep import Ints

PART_SUBS = ("input.fetch", "input.cpu_wait", "input.prep", "input.transfer")
"""Sub-lines of the columns of `InputLoads.parts`."""

PARTS = {"input.fetch": 0, "input.cpu_wait": 1, "input.prep": 2, "input.collate": 2}
"""Child of input.load -> its column."""

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
