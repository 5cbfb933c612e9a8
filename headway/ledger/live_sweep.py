"""Book the complete steps of several ranks at once: one sweep, whatever the number of ranks.

The windows are laid end to end on one axis, so that the cost of a call hardly
depends on how many ranks there are. Names go to buckets by `BUCKET_OF`, waits
for other ranks are split at the last arrival. Times in ns.

>>> from headway.ledger.live_rank import STEP
>>> records = np.zeros(1, RECORD_DTYPE)
>>> records["code"], records["start_ns"], records["duration_ns"] = STEP, 90, 10
>>> ((window, duration_ns, step_ns),) = book_windows([BookingWindow(0, 0, 40, np.array([100]), records)])
>>> duration_ns.tolist(), dict(zip(BUCKETS, step_ns[0].tolist()))["useful"]
([60], 60)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from headway.ledger.booking import core_waits
from headway.ledger.booking.arrivals import COLLECTIVES, MESSAGES, RankCalls, last_arrivals, meetings
from headway.ledger.booking.rows import NAME_ID, RankRows
from headway.ledger.booking.timeline import EVALUATED, GAP_PRECEDENCE, STEP_TABLE, checkpoint_gaps
from headway.ledger.buckets import BUCKET_CODE_OF_SUB, BUCKETS
from headway.ledger.live_rank import CPU_MARK, DEVICE_WORK, SPINS, BookingWindow, Records, phases
from headway.sim.recorded.core_use import unspun_ns
from headway.trace.events.intervals import Ints, inside, sweep
from headway.trace.events.vocabulary import SPANS
from headway.trace.rings.records import RECORD_DTYPE

_USEFUL, _EVAL, _COMM, _BUBBLE, _STRAGGLER, _CHECKPOINT, _STARTUP, _RESTART, _HOST, _UNKNOWN = (
    BUCKETS.index(name)
    for name in ("useful", "eval", "comm", "bubble", "straggler", "checkpoint", "startup", "restart", "host", "unknown")
)
_GAP = 0
"""Code of a gap inside a checkpoint; no record bears it."""

_NAME = np.full(1 + max(span.code for span in SPANS.values()), -1)
_NAME[[span.code for span in SPANS.values()]] = [NAME_ID[name] for name in SPANS]
_PRECEDENCE, _BUCKET = STEP_TABLE.precedence[_NAME], np.array(BUCKET_CODE_OF_SUB)[STEP_TABLE.sub[_NAME]]
_PRECEDENCE[_GAP], _BUCKET[_GAP] = GAP_PRECEDENCE, _CHECKPOINT
# By code, whether its name is one of these: looked up much faster than searched for.
_IN_EVALUATION = EVALUATED[_NAME] | np.isin(_NAME, NAME_ID["host.script"])
_IS_MESSAGE, _IS_COMM, _IS_STATE = (
    np.isin(_NAME, [NAME_ID[name] for name in names])
    for names in (MESSAGES, (*COLLECTIVES, *MESSAGES), [name for name in SPANS if name.startswith("checkpoint.")])
)


def book_windows(
    windows: Sequence[BookingWindow], *, restarted: bool = False
) -> Iterator[tuple[BookingWindow, Ints, Ints]]:
    """Return for each window the length of its steps [n] and their buckets [n, len(BUCKETS)], all ns.

    `restarted` books compilation inside steps to the restart.
    """
    found = [phases(window) for window in windows]
    parts = [np.concatenate([_with_gaps(window), script]) for window, (script, _) in zip(windows, found, strict=True)]
    records = np.concatenate(parts)
    which = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    low = np.array([window.low_ns for window in windows], np.int64)
    high = np.array([window.ends_ns[-1] for window in windows], np.int64)
    base = np.concatenate([[0], np.cumsum(high - low)])
    shift = base[:-1] - low
    own = _PRECEDENCE[records["code"]] > 0
    records, which = records[own], which[own]
    arrival_ns = _arrivals(records, which, np.array([window.rank for window in windows]))
    start = np.clip(records["start_ns"], low[which], high[which])
    end = np.clip(records["start_ns"] + records["duration_ns"], start, high[which])
    cuts = np.concatenate([window.ends_ns + moved for window, moved in zip(windows, shift, strict=True)])
    code = records["code"]
    spans = [
        np.clip(edges, lower, upper) + moved
        for (_, own_spans), lower, upper, moved in zip(found, low, high, shift, strict=True)
        for edges in own_spans
    ]
    without_from, without_share = _core_shares(windows, base)
    pieces = sweep(
        start + shift[which], end + shift[which], _PRECEDENCE[code], window=(0, int(base[-1])),
        cuts=np.concatenate([cuts, without_from, *spans]),
    )  # fmt: skip
    step = np.searchsorted(cuts, pieces.start_ns, side="right")
    owner, duration = pieces.row, pieces.duration_ns
    bucket = np.where(owner >= 0, np.append(_BUCKET[code], _USEFUL)[owner], _USEFUL)
    # What the host computes while its device has nothing to do is no work of the device; before the device was first
    # seen, nobody knows.
    first_ns = np.array([window.device_ns for window in windows], np.int64)
    seen_from = np.clip(first_ns, low, high) + shift
    window_of = np.searchsorted(base[1:], pieces.start_ns, side="right")
    on_host = (first_ns >= 0)[window_of] & (np.append(code, 0)[owner] != DEVICE_WORK) & (bucket == _USEFUL)
    bucket[on_host] = np.where(pieces.start_ns >= seen_from[window_of], _HOST, _UNKNOWN)[on_host]
    if restarted:
        bucket[bucket == _STARTUP] = _RESTART
    # As in the finished ledger: collections, saves, log lines and collectives of an evaluation keep their buckets.
    taken = _IN_EVALUATION[np.append(code, 0)[owner]] | (bucket == _USEFUL) | (owner < 0)
    evaluates = inside(pieces.start_ns, (np.concatenate(spans[::2]), np.concatenate(spans[1::2])))
    bucket[evaluates & taken] = _EVAL
    late = _late_ns(pieces.start_ns, duration, owner, code, arrival_ns + shift[which])
    waits = np.flatnonzero(late)
    messages = _IS_MESSAGE[code[owner[waits]]]
    # Where the training thread is the device, it computes only while it has a core.
    share = without_share[np.searchsorted(without_from, pieces.start_ns, side="right") - 1]
    no_core = np.rint(np.where((bucket == _USEFUL) | (bucket == _EVAL), duration * share, 0)).astype(np.int64)
    steps_ns = np.zeros((len(cuts), len(BUCKETS)), np.int64)
    np.add.at(steps_ns, (step, bucket), duration - late - no_core)
    np.add.at(steps_ns, (step, np.full(len(step), _HOST)), no_core)
    np.add.at(steps_ns, (step[waits], np.where(messages, _BUBBLE, _STRAGGLER)), late[waits])
    place = 0
    for window, lower in zip(windows, low.tolist(), strict=True):
        count = len(window.ends_ns)
        yield window, np.diff(window.ends_ns, prepend=lower), steps_ns[place : place + count]
        place += count


def _core_shares(windows: Sequence[BookingWindow], base: Ints) -> tuple[Ints, NDArray[np.float64]]:
    """Return instants on the common axis, and the share of computing without a core from each on.

    `base` [windows + 1] is where each window begins there, and the end. 0 before a window's first mark, and where a
    device tells when it was at work.
    """
    instants: list[NDArray[np.int64]] = []
    shares: list[NDArray[np.float64]] = []
    for window, begin, end in zip(windows, base[:-1].tolist(), base[1:].tolist(), strict=True):
        marks = window.marks if window.device_ns < 0 else window.marks[:0]
        when, total, waited = (
            marks[marks["code"] == CPU_MARK][name].astype(np.int64) for name in ("start_ns", "a", "b")
        )
        spins = marks[marks["code"] == SPINS]
        spun = total - unspun_ns(when, total, spins["start_ns"].astype(np.int64), spins["a"].astype(np.int64))
        spent = total - np.maximum.accumulate(np.nan_to_num(spun)).astype(np.int64)
        moment_ns, share = core_waits.shares_from(when, spent, waited)
        instants += [np.array([begin]), np.clip(moment_ns - window.low_ns + begin, begin, end)]
        shares += [np.zeros(1), share]
    return np.concatenate(instants), np.concatenate(shares)


def _late_ns(start: Ints, duration: Ints, owner: Ints, code: NDArray[np.uint16], arrival: Ints) -> Ints:
    """Return how much of each piece lay before the last rank's arrival; 0 for pieces that are no communication."""
    late = np.zeros(len(start), np.int64)
    found = np.flatnonzero((owner >= 0) & _IS_COMM[np.append(code, 0)[owner]])
    late[found] = np.clip(arrival[owner[found]] - start[found], 0, duration[found])
    return late


def _arrivals(records: Records, which: Ints, ranks: Ints) -> Ints:
    """Return [n] when the last rank arrived at what each record communicates; its own start for all others."""
    arrival = records["start_ns"].astype(np.int64)
    code = records["code"]
    found = np.flatnonzero(_IS_COMM[code])
    if not len(found):
        return arrival
    rows, rank = records[found], ranks[which[found]]
    nothing = np.zeros(len(found), np.int64)
    # Columns of both kinds: a = group, b = seq; a message has its peer in d.
    calls = RankCalls(_NAME[rows["code"]], rows["start_ns"], rows["a"], rows["b"], rows["d"], nothing, nothing)
    identity, lost = calls.identity(rank, slice(None))
    key = meetings(identity, which[found], rows["start_ns"], lost)
    arrival[found] = last_arrivals(key, rank, rows["start_ns"]).arrival_ns
    return arrival


def _with_gaps(window: BookingWindow) -> Records:
    """Return the records of a window, and one for each gap between a save and the fsync or rename that follows it."""
    records = window.records
    if not _IS_STATE[records["code"]].any():
        return records
    order = np.argsort(records["start_ns"], kind="stable")
    ordered = records[order]
    end_ns = ordered["start_ns"] + ordered["duration_ns"]
    main = np.full(len(ordered), -1, np.int64)
    start, end = checkpoint_gaps(RankRows(window.rank, _NAME[ordered["code"]], ordered["start_ns"], end_ns, main, {}))
    gaps = np.zeros(len(start), RECORD_DTYPE)
    gaps["code"], gaps["start_ns"], gaps["duration_ns"] = _GAP, start, end - start
    return np.concatenate([records, gaps])
