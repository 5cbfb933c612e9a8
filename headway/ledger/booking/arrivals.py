"""Who was late: split the communication waits of all ranks of one attempt at the last arrival.

A collective starts for good when its last rank arrives. Until then the others
wait for that rank (`straggler`; `bubble` for a pipeline message), after it
they communicate (`comm`). The late rank is blamed for what it did more of
than the others in that step.

>>> last_arrivals(np.array([7, 7, 9]), np.array([0, 1, 0]), np.array([100, 130, 50])).arrival_ns.tolist()
[130, 130, 50]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headway.core.integers import narrowed
from headway.ledger.booking.rows import NAME_ID, RankAccount, RankRows, RankSaves
from headway.ledger.booking.timeline import BookedRank, OpenWaits
from headway.ledger.booking.waits import bubble_subs
from headway.ledger.buckets import BLAME, BUCKET_CODE_OF_SUB, BUCKETS, SUB_CODE
from headway.trace.events.intervals import Ints, merged, number_alike
from headway.trace.recording.gaps import elapsed
from headway.trace.sync.meetings import message_key, posted_ns

BLAME_BUCKETS = tuple(BLAME)
BLAME_CODES = np.array([SUB_CODE[sub] for sub in BLAME.values()], np.int64)
COLLECTIVES = ("comm.wait", "comm.collective")
MESSAGES = ("comm.send", "comm.recv")

TOGETHER = 1 << 19
"""Calls that are matched at a time."""


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
class RankLateness:
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

    Equal arrivals: the lower rank counts as last, so that the answer does not depend on the order of rows. Many rows
    are taken some collectives at a time, to stay small.
    """
    n = len(key)
    if n <= TOGETHER:
        return _last_of_few(key, rank, start_ns)
    found = Arrivals(np.array(start_ns, np.int64), np.arange(n), np.zeros(n, np.int64))
    turns = -(-n // TOGETHER)
    for turn in range(turns):
        mine = np.flatnonzero((key >= 0) & (key % turns == turn))
        some = _last_of_few(key[mine], rank[mine], start_ns[mine])
        found.arrival_ns[mine], found.last[mine], found.margin_ns[mine] = (
            some.arrival_ns,
            mine[some.last],
            some.margin_ns,
        )
    return found


def _last_of_few(key: Ints, rank: Ints, start_ns: Ints) -> Arrivals:
    """Find the last arrivals of all rows at once."""
    n = len(key)
    alone = key < 0
    lone_key = np.where(alone, -1 - np.arange(n), key)
    # In order of (key, start, rank descending) the last row of each run of one key is the last arrival, of equal ones
    # the lowest rank, and the row before it gives the margin. A row without a key gets one of its own, below 0.
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
class RankCalls:
    """Communication rows of one rank; [n] each, in types as narrow as they can be."""

    name: Ints
    """Index into `NAMES`."""
    start_ns: Ints
    """When the rank came: the start of the call, or when its asynchronous message was posted."""
    group: Ints
    seq: Ints
    peer: Ints
    column: Ints
    """Column of the sheet that each row starts in."""
    bubble: Ints
    """Sub-line of what the row's rank waits before its peer has come."""

    def identity(self, rank: int | Ints, rows: Ints | slice) -> tuple[Ints, Ints]:
        """Return for `rows` of one or more ranks what tells their meeting, [k, 4], and whether it is unknown, [k]."""
        name, peer = self.name[rows].astype(np.int64), self.peer[rows].astype(np.int64)
        message, sends = self.is_message(rows), name == NAME_ID["comm.send"]
        source, target = np.where(sends, rank, peer), np.where(sends, peer, rank)
        seq = self.seq[rows].astype(np.int64)
        last = np.where(message, target, seq)
        columns = [np.where(message, -1, name), self.group[rows].astype(np.int64), np.where(message, source, 0), last]
        return np.stack(columns, axis=1), np.where(message, peer < 0, seq < 0)

    def is_message(self, rows: Ints | slice = slice(None)) -> NDArray[np.bool_]:
        """Return whether `rows` are point-to-point."""
        return np.isin(self.name[rows], [NAME_ID[known] for known in MESSAGES])

    def bucket(self, rank: int, count: int) -> Ints:
        """[n] A number below `count`, the same for all rows that can meet."""
        message, sends = self.is_message(), self.name == NAME_ID["comm.send"]
        peer = self.peer.astype(np.int64)
        ends = np.where(sends, rank * 31 + peer, peer * 31 + rank)
        numbers: Ints = np.where(message, ends, self.seq.astype(np.int64)) % count
        return numbers


@dataclass(frozen=True, slots=True)
class Booked:
    """A booked rank with no more of its rows than what others ask for: 64 of them must fit into memory."""

    rank: int
    first_ns: int
    """Start of step 0."""
    last_ns: int
    """End of the last complete step."""
    seen: bool
    """Whether somebody saw its process end."""
    step_wall_ns: Ints
    """[k] Wall of each complete step, without pauses."""
    saves: RankSaves
    """What it saved."""
    sheet: RankAccount
    waits: OpenWaits
    """What is not booked yet; `row` counts the calls."""
    calls: RankCalls

    @classmethod
    def of(cls, book: BookedRank) -> Booked:
        """Keep what others need of a booked rank."""
        rows, life, waits = book.rows, book.life, book.waits
        kept = rows.of(*COLLECTIVES, *MESSAGES)
        place = np.full(len(rows), -1, np.int64)
        place[kept] = np.arange(len(kept))
        start = rows.start_ns[kept]
        column = np.searchsorted(life.step_start, start, side="right")
        if len(life.step_end):
            column += start >= life.step_end[-1]
        group, seq, peer = (rows.column(name, kept) for name in ("group", "seq", "peer"))
        came = posts_of(rows, kept)
        calls = RankCalls(
            narrowed(rows.name[kept]), came, narrowed(group), narrowed(seq), narrowed(peer), narrowed(column),
            narrowed(bubble_subs(rows, start)),
        )  # fmt: skip
        few = OpenWaits(narrowed(place[waits.row]), waits.start_ns, waits.end_ns, narrowed(waits.column))
        book.sheet.pack()
        away = rows.of("pause")
        pauses = merged(rows.start_ns[away], rows.end_ns[away])
        walls = narrowed(elapsed(life.step_end, pauses) - elapsed(life.step_start, pauses))
        saves = RankSaves.of(rows, life)
        return cls(rows.rank, life.first_ns, life.last_ns, life.seen, walls, saves, book.sheet, few, calls)


def posts_of(rows: RankRows, calls: Ints) -> Ints:
    """Return [n] when the rank came to each of `calls`: its start, or when its message was posted."""
    posts, messages = rows.of("comm.post"), np.isin(rows.name[calls], [NAME_ID[name] for name in MESSAGES])
    came = rows.start_ns[calls]
    mine = calls[messages]
    receives = rows.name[mine] == NAME_ID["comm.recv"], rows.column("corr", posts) == 1
    key, post_key = (
        message_key(rows.column("group", some), rows.column("seq", some), to, rows.column("peer", some))
        for some, to in zip((mine, posts), receives, strict=True)
    )
    came[messages] = posted_ns(key, came[messages], post_key, rows.start_ns[posts])
    return came


@dataclass(frozen=True, slots=True)
class _Met:
    """The last arrival at the meeting of every call of all ranks, [n] each, rank behind rank."""

    arrival_ns: Ints
    last: Ints
    """Call that arrived last."""

    margins: dict[int, list[Ints]]
    """Position of a rank -> how much later it was, for each collective at which it was last."""

    num_collectives: int
    """Collectives of at least two known ranks."""


def settle(books: Sequence[Booked]) -> RankLateness:
    """Book the open communication waits of all ranks; returns who was late, why and how often."""
    first = np.cumsum([0, *(len(book.calls.start_ns) for book in books)])
    met = _meet(books, first)
    why = _largest_excess(books, first, met.last)
    lateness = RankLateness({}, {}, {}, met.num_collectives)
    for index, book in enumerate(books):
        late = [margin[margin > 0] for margin in met.margins.get(index, [])]
        mine = np.concatenate(late) if late else np.zeros(0, np.int64)
        lateness.times_last[book.rank] = len(mine)
        lateness.median_margin_ns[book.rank] = int(np.median(mine)) if len(mine) else 0
    ranks = np.array([book.rank for book in books], np.int64)

    def rank_of(calls: Ints) -> Ints:
        found: Ints = ranks[np.searchsorted(first, calls, side="right") - 1]
        return found

    for index, book in enumerate(books):
        _settle_rank(book, int(first[index]), met, why, rank_of, lateness)
    return lateness


def _meet(books: Sequence[Booked], first: Ints) -> _Met:
    """Match the calls of all ranks, so many meetings at a time that it stays small."""
    total = int(first[-1])
    arrival = np.zeros(total, np.int64)
    last: Ints = np.zeros(total, np.int32 if total < 1 << 31 else np.int64)
    margins: dict[int, list[Ints]] = {}
    count, met_by_many = -(-total // TOGETHER) or 1, 0
    buckets = [narrowed(book.calls.bucket(book.rank, count)) for book in books] if count > 1 else []
    for bucket in range(count):
        parts = []
        for index, book in enumerate(books):
            own = np.flatnonzero(buckets[index] == bucket) if buckets else np.arange(len(book.calls.start_ns))
            identity, lost = book.calls.identity(book.rank, own)
            parts.append((np.full(len(own), index), own + first[index], book.calls.start_ns[own], identity, lost))
        book_of, call, start, identity, lost = (np.concatenate(part) for part in zip(*parts, strict=True))
        rank = np.array([book.rank for book in books], np.int64)[book_of]
        found = last_arrivals(meetings(identity, book_of, start, lost), rank, start)
        arrival[call], last[call] = found.arrival_ns, call[found.last]
        # Own row last, others there, and no message: a collective that this rank held up.
        held = (found.last == np.arange(len(call))) & (np.bincount(found.last, minlength=len(call)) > 1)
        held &= identity[:, 0] >= 0
        met_by_many += int(held.sum())
        for index in np.unique(book_of[held]).tolist():
            margins.setdefault(index, []).append(found.margin_ns[held & (book_of == index)])
    return _Met(arrival, last, margins, met_by_many)


def meetings(identity: Ints, book: Ints, start: Ints, lost: Ints) -> Ints:
    """Number the meetings [n]: rows of equal `identity` [n, k] meet by their order within each rank's `book`.

    `start` are ns; rows that are `lost` meet nobody and get -1.
    """
    key = np.full(len(identity), -1, np.int64)
    good = np.flatnonzero(~lost)
    if not len(good):
        return key
    code = number_alike(identity[good])
    order = np.lexsort((start[good], book[good], code))
    # In order of (identity, rank, start), the n-th of a rank is its position less that of the first of its run, which
    # the running maximum carries along:
    #
    #     identity, rank   a0 a0 a0 a1 a1 b0
    #     begin             0  0  0  3  3  5
    #     n-th              0  1  2  0  1  0
    opens = np.ones(len(good), bool)
    opens[1:] = (np.diff(code[order]) != 0) | (np.diff(book[good][order]) != 0)
    begin = np.maximum.accumulate(np.where(opens, np.arange(len(good)), 0))
    nth = np.empty(len(good), np.int64)
    nth[order] = np.arange(len(good)) - begin
    identity = np.stack([code, nth], axis=1)
    del order, opens, begin, code, nth  # Of millions of calls each of these is tens of megabytes.
    key[good] = number_alike(identity)
    return key


def _largest_excess(books: Sequence[Booked], first: Ints, last: Ints) -> NDArray[np.int8]:
    """Return for each call the index in `BLAME_BUCKETS` of what its last rank did more of than the others just then."""
    width = max(book.sheet.columns for book in books)
    total = np.zeros((len(BLAME_BUCKETS), width), np.int64)
    for book in books:
        total[:, : book.sheet.columns] += _blame(book.sheet)
    why = np.zeros(len(last), np.int8)
    for index, book in enumerate(books):
        mine = np.flatnonzero((last >= first[index]) & (last < first[index + 1]))
        column = book.calls.column[last[mine] - first[index]]
        excess = _blame(book.sheet)[:, column] * len(books) - total[:, column]
        why[mine] = np.argmax(excess, axis=0)
    return why


def _blame(sheet: RankAccount) -> Ints:
    """Return [len(BLAME_BUCKETS), columns] ns of the buckets that a late rank can be blamed for."""
    bucket = np.array(BUCKET_CODE_OF_SUB)
    amounts = np.stack([sheet.ns[bucket == BUCKETS.index(name)].sum(axis=0) for name in BLAME_BUCKETS])
    sheet.pack()
    return amounts


def _settle_rank(
    book: Booked, first: int, met: _Met, why: NDArray[np.int8], rank_of: Callable[[Ints], Ints], lateness: RankLateness
) -> None:
    """Split the open waits of one rank, whose calls begin at `first`, and book them."""
    waits = book.waits
    call = waits.row.astype(np.int64) + first
    arrival = met.arrival_ns[call]
    late = np.clip(arrival - waits.start_ns, 0, waits.end_ns - waits.start_ns)
    after = waits.end_ns - waits.start_ns - late
    name = book.calls.name[waits.row]
    sub = np.full(len(name), SUB_CODE["comm.p2p"], np.int64)
    sub[name == NAME_ID["comm.wait"]] = SUB_CODE["comm.exposed"]
    sub[name == NAME_ID["comm.collective"]] = SUB_CODE["comm.collective"]
    book.sheet.book_all(sub, waits.column, after)
    message, bubble = book.calls.is_message(waits.row), book.calls.bubble[waits.row].astype(np.int64)
    book.sheet.book_all(np.where(message, bubble, BLAME_CODES[why[call]]), waits.column, late)
    blamed, slot = rank_of(met.last[call]), why[call]
    for late_rank, bucket in {*zip(blamed[~message].tolist(), slot[~message].tolist(), strict=True)}:
        waited = int(late[~message & (blamed == late_rank) & (slot == bucket)].sum())
        if waited:
            by_bucket = lateness.blamed_ns.setdefault(late_rank, {})
            name_of = BLAME_BUCKETS[bucket]
            by_bucket[name_of] = by_bucket.get(name_of, 0) + waited
    book.sheet.pack()
