"""Who was late: split the communication waits of all ranks of one attempt at the last arrival.

A collective starts for good when its last rank arrives. Until then the others
wait for that rank (`straggler`; `bubble` for a pipeline message), after it
they communicate (`comm`). The late rank is blamed for what it did more of
than the others in that step.

>>> last_arrivals(np.array([7, 7, 9]), np.array([0, 1, 0]), np.array([100, 130, 50])).arrival_ns.tolist()
[130, 130, 50]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from headway.ledger.buckets import BLAME, BUCKET_CODE_OF_SUB, BUCKETS, SUB_CODE
from headway.ledger.rows import NAME_ID
from headway.ledger.timeline import RankBook
from headway.trace.nesting import number_alike
from headway.trace.sweep import Ints

BLAME_BUCKETS = tuple(BLAME)
BLAME_CODES = np.array([SUB_CODE[sub] for sub in BLAME.values()], np.int64)
COLLECTIVES = ("comm.wait", "comm.collective")
MESSAGES = ("comm.send", "comm.recv")


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The last arrival at each row's collective."""

    arrival_ns: Ints
    """[n] When the last rank arrived; the row's own start when nobody else is known."""

    last: Ints
    """[n] Row (position in the input) of the last arrival."""

    margin_ns: Ints
    """[n] How much later the last one was than the one before it; 0 when alone."""


@dataclass(frozen=True, slots=True)
class Lateness:
    """What the ranks waited for each other, by the rank that was late."""

    blamed_ns: dict[int, dict[str, int]] = field(default_factory=dict)
    """Late rank -> bucket of its largest excess -> device-ns that others waited for it."""

    times_last: dict[int, int] = field(default_factory=dict)
    """Rank -> how often it alone arrived last at a collective of at least two ranks."""

    median_margin_ns: dict[int, int] = field(default_factory=dict)
    """Rank -> median of how much later it was than the next one, over those times."""

    num_collectives: int = 0
    """Collectives of at least two known ranks."""


def last_arrivals(key: Ints, rank: Ints, start_ns: Ints) -> Arrivals:
    """Find the last arrival of each collective; rows [n] of one collective share a `key`, a negative key has none.

    Equal arrivals: the lower rank counts as last, so that the answer does not depend on the order of rows.
    """
    n = len(key)
    alone = key < 0
    lone_key = np.where(alone, -1 - np.arange(n), key)
    order = np.lexsort((-rank, start_ns, lone_key))
    ends = np.append(np.flatnonzero(np.diff(lone_key[order])), n - 1) if n else np.zeros(0, np.int64)
    size = np.diff(ends, prepend=-1)
    last_of = np.repeat(order[ends], size)
    before = order[np.maximum(ends - 1, 0)]
    margin = np.where(size > 1, start_ns[order[ends]] - start_ns[before], 0)
    last, margins = np.empty(n, np.int64), np.empty(n, np.int64)
    last[order], margins[order] = last_of, np.repeat(margin, size)
    return Arrivals(start_ns[last], last, margins)


@dataclass(frozen=True, slots=True)
class _Calls:
    """Every communication row of an attempt, over all ranks."""

    book: Ints
    """[n] Position of the rank's book."""
    row: Ints
    """[n] Row inside that rank."""
    start_ns: Ints
    key: Ints
    """[n] Same for the rows that meet; -1 when it cannot be known."""
    message: Ints
    """[n] 1 for point-to-point."""


def settle(books: Sequence[RankBook]) -> Lateness:
    """Book the open communication waits of all ranks; returns who was late, why and how often."""
    calls = _collect(books)
    rank = np.array([book.rows.rank for book in books], np.int64)
    met = last_arrivals(calls.key, rank[calls.book], calls.start_ns)
    column = _columns(books, calls)
    why = _largest_excess(books, calls.book[met.last], column[met.last])
    lateness = _count(calls, met, rank)
    for index, book in enumerate(books):
        mine = np.flatnonzero(calls.book == index)
        _settle_rank(book, calls, met, why, mine, rank, lateness)
    return lateness


def _collect(books: Sequence[RankBook]) -> _Calls:
    """Gather the communication rows and give those that meet the same key."""
    parts = []
    for index, book in enumerate(books):
        rows = book.rows
        row = rows.of(*COLLECTIVES, *MESSAGES)
        name = rows.name[row]
        message = np.isin(name, [NAME_ID[known] for known in MESSAGES])
        peer, mine = rows.column("peer", row), np.full(len(row), rows.rank, np.int64)
        sends = name == NAME_ID["comm.send"]
        source, target = np.where(sends, mine, peer), np.where(sends, peer, mine)
        group, seq = rows.column("group", row), rows.column("seq", row)
        kind = np.where(message, -1, name)
        identity = np.stack([kind, group, np.where(message, source, 0), np.where(message, target, seq)], axis=1)
        lost = np.where(message, peer < 0, seq < 0)
        parts.append((np.full(len(row), index), row, rows.start_ns[row], identity, message, lost))
    book_of, row, start, identity, message, lost = (np.concatenate(part) for part in zip(*parts, strict=True))
    return _Calls(book_of, row, start, _keys(identity, book_of, start, lost), message.astype(np.int64))


def _keys(identity: Ints, book: Ints, start: Ints, lost: Ints) -> Ints:
    """Number the meetings: rows of equal identity meet by their order within each rank."""
    key = np.full(len(identity), -1, np.int64)
    good = np.flatnonzero(~lost)
    if not len(good):
        return key
    code = number_alike(identity[good])
    order = np.lexsort((start[good], book[good], code))
    opens = np.ones(len(good), bool)
    opens[1:] = (np.diff(code[order]) != 0) | (np.diff(book[good][order]) != 0)
    begin = np.maximum.accumulate(np.where(opens, np.arange(len(good)), 0))
    nth = np.empty(len(good), np.int64)
    nth[order] = np.arange(len(good)) - begin
    key[good] = number_alike(np.stack([code, nth], axis=1))
    return key


def _columns(books: Sequence[RankBook], calls: _Calls) -> Ints:
    """Return the sheet column that each row starts in."""
    column = np.zeros(len(calls.row), np.int64)
    for index, book in enumerate(books):
        mine = calls.book == index
        start, life = calls.start_ns[mine], book.life
        column[mine] = np.searchsorted(life.step_start, start, side="right")
        if len(life.step_end):
            column[mine] += start >= life.step_end[-1]
    return column


def _largest_excess(books: Sequence[RankBook], late: Ints, column: Ints) -> Ints:
    """Return for each late arrival the index in `BLAME_BUCKETS` of what that rank did more of than the others."""
    width = max(book.sheet.ns.shape[1] for book in books)
    own = np.zeros((len(books), len(BLAME_BUCKETS), width), np.int64)
    bucket = np.array(BUCKET_CODE_OF_SUB)
    for index, book in enumerate(books):
        for slot, name in enumerate(BLAME_BUCKETS):
            own[index, slot, : book.sheet.ns.shape[1]] = book.sheet.ns[bucket == BUCKETS.index(name)].sum(axis=0)
    excess = own * len(books) - own.sum(axis=0)
    largest: Ints = np.argmax(excess[late, :, column], axis=1)
    return largest


def _count(calls: _Calls, met: Arrivals, rank: Ints) -> Lateness:
    """Count how often each rank was last, and by how much."""
    own = met.last == np.arange(len(met.last))
    shared = np.bincount(met.last, minlength=len(met.last)) > 1
    found = np.flatnonzero(own & shared & (calls.message == 0))
    lateness = Lateness({}, {}, {}, len(found))
    for index, value in enumerate(rank.tolist()):
        mine = met.margin_ns[found[(calls.book[found] == index) & (met.margin_ns[found] > 0)]]
        lateness.times_last[value] = len(mine)
        lateness.median_margin_ns[value] = int(np.median(mine)) if len(mine) else 0
    return lateness


def _settle_rank(
    book: RankBook, calls: _Calls, met: Arrivals, why: Ints, mine: Ints, rank: Ints, lateness: Lateness
) -> None:
    """Split the open waits of one rank and book them."""
    waits, rows = book.waits, book.rows
    call = mine[np.searchsorted(calls.row[mine], waits.row)]
    arrival = met.arrival_ns[call]
    late = np.clip(arrival - waits.start_ns, 0, waits.end_ns - waits.start_ns)
    after = waits.end_ns - waits.start_ns - late
    name = rows.name[waits.row]
    sub = np.full(len(name), SUB_CODE["comm.p2p"], np.int64)
    sub[name == NAME_ID["comm.wait"]] = SUB_CODE["comm.exposed"]
    sub[name == NAME_ID["comm.collective"]] = SUB_CODE["comm.collective"]
    book.sheet.book_all(sub, waits.column, after)
    message = calls.message[call] > 0
    book.sheet.book_all(np.where(message, SUB_CODE["bubble.p2p"], BLAME_CODES[why[call]]), waits.column, late)
    blamed, slot = rank[calls.book[met.last[call]]], why[call]
    for late_rank, bucket in {*zip(blamed[~message].tolist(), slot[~message].tolist(), strict=True)}:
        waited = int(late[~message & (blamed == late_rank) & (slot == bucket)].sum())
        if waited:
            by_bucket = lateness.blamed_ns.setdefault(late_rank, {})
            name_of = BLAME_BUCKETS[bucket]
            by_bucket[name_of] = by_bucket.get(name_of, 0) + waited
