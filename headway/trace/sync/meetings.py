"""Which recorded calls of different ranks are one and the same collective or message.

Use it before anything that compares the clocks of ranks. A call of a
collective belongs with those of equal (group, seq); where the recorder wrote
no sequence number, with the n-th of the same group and step on the other
ranks, after a check that they are alike. A send belongs with the n-th receive
of its (group, source, target). Only collectives that no rank leaves before
all have entered count: a broadcast's source, for one, leaves at once. Of what
a host recorded itself beside an accelerator only barriers count, because its
other calls return when they are enqueued. A wait for DDP's gradients counts
from the begin of its backward: the rank may have sent its last gradients long
before it began to wait. Times are the raw ones, int64 ns, each on the clock of
its rank.

>>> trace = Trace.from_columns(
...     {"rank": [0, 1], "start_ns": [0, 930], "duration_ns": [50, 20], "group": [0, 0], "seq": [4, 4]},
...     names=["nccl:all_reduce"], name=[0, 0], kind=[KIND["COLL"]] * 2)
>>> met = match(trace)
>>> met.num_meetings, met.rank.tolist(), met.end_ns.tolist()
(1, [0, 1], [50, 950])

When asynchronous messages were posted: what is recorded as comm.send or comm.recv is only the wait for them.

A message can move once both ends are posted, so that, and not the start of a wait, is when an end arrived.

>>> key = message_key(np.array([0]), np.array([3]), np.array([False]), np.array([1]))
>>> posted_ns(key, np.array([90]), key, np.array([20])).tolist()
[20]
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.trace.events.intervals import number_alike
from headway.trace.events.trace import Trace
from headway.trace.events.vocabulary import COLLECTIVES, KIND

Ints = NDArray[np.int64]


def message_key(group: Ints, seq: Ints, receives: NDArray[np.bool_], peer: Ints) -> Ints:
    """[n, 4] What tells the messages of one rank apart: group, n-th between these two ranks, direction, peer."""
    return np.stack([group, seq, receives, peer], axis=1).astype(np.int64)


def posted_ns(key: Ints, start_ns: Ints, post_key: Ints, post_ns: Ints) -> Ints:
    """Return [n] when each wait's message was posted; its own start where that was not recorded (a blocking call).

    `key` [n, 4] and `start_ns` [n] are of the waits, `post_key` [k, 4] and `post_ns` [k] of the posts.
    """
    found = np.array(start_ns, np.int64)
    if not len(post_ns) or not len(found):
        return found
    code = number_alike(np.concatenate([post_key, key]))
    at = np.full(int(code.max()) + 1, -1, np.int64)
    at[code[: len(post_ns)]] = np.arange(len(post_ns))
    which = at[code[len(post_ns) :]]
    return np.where(which >= 0, np.minimum(found, np.asarray(post_ns)[which]), found)


Bools = NDArray[np.bool_]

VERBS: dict[str, str] = {
    "all_reduce": r"all[_-]?reduce",
    "all_gather": r"all[_-]?gather",
    "reduce_scatter": r"reduce[_-]?scatter",
    "all_to_all": r"all[_-]?to[_-]?all",
    "barrier": r"barrier",
}
"""Synchronising collective -> what its name looks like in any recorder's words, case apart."""

UNEVEN = "all_to_all"
"""The collective whose ranks may pass different sizes."""

OWN = ("comm.collective", "comm.wait", "comm.send", "comm.recv")
"""Names under which headway's own recorder writes calls; their seq counts alike on all ranks, messages included."""

DRAWN = ("annotation ", "sync ", "profiler")
"""Beginnings of lanes that only draw over others."""

DUMPED = re.compile(r" (scheduled|started|completed)(, retired)?$")
"""End of the lanes of Flight Recorder dumps, whose times are approximate."""

COLLECTIVE, WAIT, MESSAGE = range(3)
"""What a call is: a collective, the wait for DDP's gradients (counted apart), a send or receive."""


def verb_of(name: str) -> int:
    """Return the index in `VERBS` of the synchronising collective that `name` means, -1 for none.

    >>> [verb_of(n) for n in ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "gloo:broadcast", "reduce_scatter_tensor")]
    [0, -1, 2]
    """
    return next((code for code, shape in enumerate(VERBS.values()) if re.search(shape, name.lower())), -1)


@dataclass(frozen=True, slots=True)
class CommunicationRows:
    """Rows [n] that take part in a collective or a message; column by column."""

    row: Ints
    """[n] Row of the trace."""

    rank: Ints
    """[n] Its rank."""

    start_ns: Ints
    """[n] Raw start."""

    end_ns: Ints
    """[n] Raw end."""

    what: Ints
    """[n] `COLLECTIVE`, `WAIT` or `MESSAGE`."""

    group: Ints
    """[n] Process group."""

    source: Ints
    """[n] Rank that sends; 0 for collectives."""

    target: Ints
    """[n] Rank that receives; 0 for collectives."""

    seq: Ints
    """[n] Number that all members agree on, -1 = to be counted."""

    step: Ints
    """[n] Step."""

    verb: Ints
    """[n] Index in `VERBS`, -1 for messages."""

    size_bytes: Ints
    """[n] Bytes; 0 = unknown."""

    def where(self, mask: Bools | Ints) -> CommunicationRows:
        """Return the calls that `mask` picks."""
        return CommunicationRows(*(getattr(self, column.name)[mask] for column in fields(self)))

    @property
    def sends(self) -> Bools:
        """[n] The call is the sending side of a message."""
        return np.asarray((self.what == MESSAGE) & (self.rank == self.source), dtype=bool)

    @staticmethod
    def join(parts: Sequence[CommunicationRows]) -> CommunicationRows:
        """Put calls one behind the other."""
        return CommunicationRows(
            *(np.concatenate([getattr(part, c.name) for part in parts]) for c in fields(CommunicationRows))
        )


@dataclass(frozen=True, slots=True)
class Meetings:
    """Calls [n] by the meeting they belong to: `num_meetings` collectives and messages of at least two ranks."""

    row: Ints
    """[n] Row of the trace."""

    rank: Ints
    """[n] Its rank."""

    start_ns: Ints
    """[n] Raw start."""

    end_ns: Ints
    """[n] Raw end."""

    first: Ints
    """[num_meetings + 1] Members of meeting `m` are calls `first[m]` to `first[m + 1]`."""

    channel: Ints
    """[num_meetings] Meetings of one channel have the same members: a group, or a pair of ranks and a direction."""

    message: Bools
    """[num_meetings] It is a message; else a collective."""

    sends: Bools
    """[n] The call is the sending side of a message."""

    skipped: int = 0
    """Calls that found no partner: cut off by the edge of a window, or of a group with one recorded rank."""

    @property
    def num_meetings(self) -> int:
        """Return how many there are."""
        return len(self.first) - 1

    @property
    def meeting(self) -> Ints:
        """[n] Number of each call's meeting."""
        return np.repeat(np.arange(self.num_meetings), np.diff(self.first))

    def bounds_ns(self, side: Bools) -> tuple[int, int] | None:
        """Return (lower, upper) of what to add to the clock of the ranks where `side` [n] is True.

        A collective ends nowhere before its last start. None when no
        collective has members on both sides.
        """
        if not self.num_meetings:
            return None
        begin = self.first[:-1]
        low, high = np.iinfo(np.int64).min, np.iinfo(np.int64).max
        both = (np.add.reduceat(side, begin) > 0) & (np.add.reduceat(~side, begin) > 0) & ~self.message
        if not both.any():
            return None

        def last_start(mine: Bools) -> Ints:
            return np.asarray(np.maximum.reduceat(np.where(mine, self.start_ns, low), begin)[both])

        def first_end(mine: Bools) -> Ints:
            return np.asarray(np.minimum.reduceat(np.where(mine, self.end_ns, high), begin)[both])

        return int((last_start(~side) - first_end(side)).max()), int((first_end(~side) - last_start(side)).min())


def match(trace: Trace) -> Meetings:
    """Find the meetings of a recorded run or of profiler windows.

    Raises `InputError` on a send without receive or the other way round
    (naming group, number and ranks), and on calls that would be one by their
    number but differ in operation or size.
    """
    return meet(calls(trace))


def calls(trace: Trace) -> CommunicationRows:
    """Return the calls of ranks >= 0 whose group, or peer, is known."""
    events = trace.events
    own = trace.named(*OWN)
    lanes = np.array([lane.startswith(DRAWN) for lane in trace.lanes] or [False])
    kind = events["kind"]
    foreign = np.isin(kind, [KIND["COLL"], KIND["SEND"], KIND["RECV"]]) & ~own & ~lanes[events["lane"]]
    foreign &= ~trace.named("comm.init")
    foreign &= events["duration_ns"] > 0  # A dump gives no end to what was not seen to be complete.
    dumped = foreign & np.array([bool(DUMPED.search(lane)) for lane in trace.lanes] or [False])[events["lane"]]
    if bool((foreign & ~dumped).any()):
        foreign &= ~dumped  # The same calls stand beside them with better times.
    sends = trace.named("comm.send") | (foreign & (kind == KIND["SEND"]))
    receives = trace.named("comm.recv") | (foreign & (kind == KIND["RECV"]))
    message, wait = sends | receives, trace.named("comm.wait")
    verb = np.where(message, -1, _verbs(trace, own, wait))
    grouped = events["group"] >= 0
    if trace.meta.get("source") != "straggler" and not (foreign & ~message & grouped).any():
        grouped = grouped | foreign  # A recorder that names no group (gloo's) is taken at one group; sizes are checked.
    known = np.where(message, events["peer"] >= 0, grouped & ((verb >= 0) | wait))
    if str(trace.meta.get("device_type") or "cpu") != "cpu":
        known &= ~own | (verb == list(VERBS).index("barrier"))  # The host only enqueues; a barrier it waits for.
    row = np.flatnonzero((own | foreign) & known & (events["rank"] >= 0))
    start_ns = events["start_ns"].astype(np.int64)
    waits = row[wait[row]]
    start_ns[waits] = _backward_start_ns(trace, waits)
    messages = row[(message & own)[row]]
    start_ns[messages] = _posted_ns(trace, messages)

    def column(name: str) -> Ints:
        return np.asarray(events[name][row], dtype=np.int64)

    rank, peer, sends, message = column("rank"), column("peer"), sends[row], message[row]
    # The profiler numbers messages on each rank for itself.
    seq = np.where(message & ~own[row], -1, column("seq"))
    return CommunicationRows(
        row=row, rank=rank, start_ns=start_ns[row], end_ns=column("start_ns") + column("duration_ns"),
        what=np.where(message, MESSAGE, np.where(wait[row], WAIT, COLLECTIVE)), group=column("group"),
        source=np.where(message, np.where(sends, rank, peer), 0),
        target=np.where(message, np.where(sends, peer, rank), 0),
        seq=seq, step=column("step"), verb=verb[row].astype(np.int64), size_bytes=column("bytes"),
    )  # fmt: skip


def _posted_ns(trace: Trace, messages: Ints) -> Ints:
    """[k] When each recorded send and receive was posted: the other end may be through before this one waits for it."""
    events, posts = trace.events, np.flatnonzero(trace.named("comm.post"))
    rank, group, seq, peer = (events[name] for name in ("rank", "group", "seq", "peer"))

    def keys(rows: Ints, receives: Bools) -> Ints:
        return np.column_stack([rank[rows], message_key(group[rows], seq[rows], receives, peer[rows])])

    key = keys(messages, trace.named("comm.recv")[messages])
    post_key = keys(posts, events["corr"][posts] == 1)
    return posted_ns(key, events["start_ns"][messages], post_key, events["start_ns"][posts])


def _backward_start_ns(trace: Trace, waits: Ints) -> Ints:
    """[k] Start of the backward that each wait for gradients lies in; its own where no backward was recorded.

    Gradients are sent while the backward goes on, and their reduction may end on another rank before this rank, whose
    thread has lost its core, begins to wait: that the backward has begun is all that such an end proves.
    """
    events = trace.events
    start_ns = events["start_ns"][waits].astype(np.int64)
    rows = np.flatnonzero(trace.named("segment.backward"))
    for rank in np.unique(events["rank"][waits]).tolist():
        mine = np.flatnonzero(events["rank"][waits] == rank)
        own = rows[events["rank"][rows] == rank]
        own = own[np.argsort(events["start_ns"][own], kind="stable")]
        begin = events["start_ns"][own]
        # The backward that began last before the wait, if it reaches up to the wait's start.
        place = np.searchsorted(begin, start_ns[mine], side="right") - 1
        mine, place = mine[place >= 0], place[place >= 0]
        inside = begin[place] + events["duration_ns"][own][place] >= start_ns[mine]
        start_ns[mine[inside]] = begin[place[inside]]
    return start_ns


def _verbs(trace: Trace, own: Bools, wait: Bools) -> Ints:
    """[rows] Index in `VERBS` of each row, by its name; by `corr` for rows of headway's own recorder."""
    by_name = np.array([*(verb_of(name) for name in trace.names), -1])
    by_corr = np.array([*(verb_of(name) for name in COLLECTIVES), -1])
    corr = np.clip(np.where(trace.events["corr"] < 0, len(COLLECTIVES), trace.events["corr"]), 0, len(COLLECTIVES))
    return np.asarray(np.where(own & ~wait, by_corr[corr], by_name[trace.events["name"]]), dtype=np.int64)


def meet(found: CommunicationRows) -> Meetings:
    """Group calls into meetings. Raises `InputError` as `match` does."""
    there = np.isin(found.source, found.rank) & np.isin(found.target, found.rank) & (found.source != found.target)
    rows = found.where(there | (found.what != MESSAGE))
    counted = rows.seq < 0
    # A cell is what is counted through: one number of a group, or all calls of a group in one step without numbers.
    channel = number_alike(np.stack([rows.what, rows.group, rows.source, rows.target], axis=1))
    cell = number_alike(np.stack([channel, rows.seq, np.where(counted, rows.step, -1)], axis=1))
    order = np.lexsort((rows.start_ns, rows.rank, cell))
    rows, counted, channel, cell = rows.where(order), counted[order], channel[order], cell[order]
    nth, size = _nth(cell, rows.rank)
    good = _even(rows, cell, counted, nth, size)
    key = number_alike(np.stack([cell, nth], axis=1)[good])
    rows, channel = rows.where(good), channel[good]
    order = np.lexsort((rows.rank, key))
    rows, key, channel = rows.where(order), key[order], channel[order]
    counts = np.bincount(key) if len(key) else np.zeros(0, np.int64)
    shared = counts[key] > 1 if len(key) else np.zeros(0, bool)
    _refuse_lone_messages(rows, channel, shared)
    kept, counts = rows.where(shared), counts[counts > 1]
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    _check_alike(kept, first)
    begin = first[:-1]
    return Meetings(
        kept.row, kept.rank, kept.start_ns, kept.end_ns, first, channel[shared][begin],
        kept.what[begin] == MESSAGE, kept.sends, skipped=len(found.row) - len(kept.row),
    )  # fmt: skip


def _nth(cell: Ints, rank: Ints) -> tuple[Ints, Ints]:
    """[n] Position of each call among those of its rank in its cell, and their number; rows are sorted so."""
    n = len(cell)
    opens = np.ones(n, bool)
    opens[1:] = (np.diff(cell) != 0) | (np.diff(rank) != 0)
    begin = np.flatnonzero(opens)
    size = np.diff(np.append(begin, n))
    return np.arange(n) - np.repeat(begin, size), np.repeat(size, size)


def _even(rows: CommunicationRows, cell: Ints, counted: Bools, nth: Ints, size: Ints) -> Bools:
    """[n] Calls of cells that may be counted through: every rank has as many, or they carry numbers."""
    if not len(cell):
        return np.zeros(0, bool)
    begin = np.flatnonzero(np.diff(cell, prepend=-1))
    uneven = np.minimum.reduceat(size, begin) != np.maximum.reduceat(size, begin)
    members = np.add.reduceat(nth == 0, begin)
    lone = np.flatnonzero((uneven | (members < 2)) & counted[begin] & (rows.what[begin] == MESSAGE))
    if len(lone):
        here = rows.where(cell == cell[begin[lone[0]]])
        source, target, step = int(here.source[0]), int(here.target[0]), int(here.step[0])
        sends, receives = int(here.sends.sum()), int((~here.sends).sum())
        when = f" in step {step}" if step >= 0 else ""
        side = "receive" if sends > receives else "send"
        raise InputError(
            f"rank {source} sends {sends} times to rank {target} in group {here.group[0]}{when}, which receives "
            f"{receives} times: message {min(sends, receives)} has no {side}. "
            "Take windows of the same steps from both ranks."
        )
    return ~np.repeat(uneven & counted[begin], np.diff(np.append(begin, len(cell))))


def _refuse_lone_messages(rows: CommunicationRows, channel: Ints, shared: Bools) -> None:
    """Raise on a numbered message with one side, unless it lies at the edge of what both sides recorded."""
    lone = np.flatnonzero((rows.what == MESSAGE) & ~shared)
    if not len(lone):
        return
    for pair in np.unique(channel[lone]).tolist():
        here = rows.where(channel == pair)
        sides = [here.seq[here.sends], here.seq[~here.sends]]
        if not all(len(side) for side in sides):
            continue
        low, high = max(int(side.min()) for side in sides), min(int(side.max()) for side in sides)
        inside = lone[(channel[lone] == pair) & (rows.seq[lone] >= low) & (rows.seq[lone] <= high)]
        if len(inside):
            at = int(inside[0])
            have, lack = ("send", "receive") if rows.sends[at] else ("receive", "send")
            raise InputError(
                f"{have} {rows.seq[at]} of group {rows.group[at]} from rank {rows.source[at]} to rank "
                f"{rows.target[at]}, recorded on rank {rows.rank[at]}, has no {lack}. "
                "Record both ranks again, or drop the step."
            )


def _check_alike(rows: CommunicationRows, first: Ints) -> None:
    """Raise where calls that were matched by counting differ in operation or size."""
    begin = first[:-1]
    counted = (rows.seq < 0) & (rows.what != MESSAGE)
    if not counted.any():
        return
    for column, what in ((rows.verb, "operations"), (rows.size_bytes, "sizes")):
        odd = np.minimum.reduceat(column, begin) != np.maximum.reduceat(column, begin)
        odd &= counted[begin] & ((what == "operations") | (rows.verb[begin] != list(VERBS).index(UNEVEN)))
        if odd.any():
            at = int(np.flatnonzero(odd)[0])
            span = slice(first[at], first[at + 1])
            names = list(VERBS)
            values = sorted({names[v] if what == "operations" else int(v) for v in column[span].tolist()}, key=str)
            raise InputError(
                f"a collective of group {rows.group[first[at]]} in step {rows.step[first[at]]} has the {what} {values} "
                f"on the ranks {rows.rank[span].tolist()}: they are not the same one. "
                "Take windows of the same steps from each rank."
            )
