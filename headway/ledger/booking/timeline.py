"""Book one rank of one attempt: every nanosecond of its time, by sub-line and step.

The training thread owns the device; other threads never do. Start-up, the
steps and what follows them are booked by different tables of `buckets.py`.
Communication pieces are left open here, because splitting them takes the
arrivals of the other ranks (`arrivals.py`).

>>> bool(_swap("startup", "restart")[SUB_CODE["startup.import"]] == SUB_CODE["restart.import"])
True
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from headway.ledger.booking import core_waits
from headway.ledger.booking.rows import NAME_ID, NAMES, RankAccount, RankLifetime, RankRows
from headway.ledger.booking.waits import INPUT_IDS, book_evaluation, book_input
from headway.ledger.buckets import (
    BUCKET_OF,
    IN_EVALUATION,
    REMAINDER_SUB,
    STARTUP_OF,
    SUB_CODE,
    SUBS,
    Booking,
    bucket_of_sub,
)
from headway.trace.events.intervals import Intervals, Ints, Pieces, inside, merged, sweep
from headway.trace.events.vocabulary import BY_EVENTS
from headway.trace.recording.basis import ROLLOUT
from headway.trace.recording.rows import ON_DEVICE
from headway.trace.rings.rank_tables import CallFlops

# What the training thread was doing where no recorded name says so: evaluation, and the phases of a step.
#
#     |<------------------------- one step ------------------------->|
#     script   [forward]   loss   [ backward ]   clipping   [update]
#     host.    useful.     useful.  useful.      useful.    useful.
#     script   forward     forward  backward     optimizer  optimizer
#
# Recorded rows are in brackets (`host.script` is one as well). Where headway worked for itself behind an update, a row
# `host.recording` takes that out of the script's time. Times are int64 ns.


def evaluations_of(rows: RankRows, *, of_rollouts: bool = False) -> Intervals:
    """Return when the training thread evaluated, as sorted disjoint intervals; or only when a policy acted."""
    picked = rows.of("eval")
    if of_rollouts:
        picked = picked[rows.column("seq", picked) == ROLLOUT]
    return merged(rows.start_ns[picked], rows.end_ns[picked])


def device_phases(rows: RankRows) -> tuple[Intervals, ...]:
    """Return when a device ran forward, when backward, as its events say, and when graphs of whole steps.

    Sorted disjoint intervals of each; the third is all that follows the first replay behind the last backward.
    """
    found = []
    for name in ("segment.forward", "segment.backward"):
        picked = rows.of(name)
        picked = picked[rows.column("corr", picked) == ON_DEVICE]
        found.append(merged(rows.start_ns[picked], rows.end_ns[picked]))
    replay_ns = rows.start_ns[rows.of("graph.replay")]
    whole = replay_ns[replay_ns > max((int(end.max()) for _, end in found if len(end)), default=0)][:1]
    return found[0], found[1], (whole, np.full(len(whole), np.iinfo(np.int64).max))


def phase_of(moment_ns: Ints, phases: tuple[Intervals, ...]) -> Ints:
    """Return [m] the sub-line of moments at which a device was at work, by its `device_phases`."""
    forward, backward, whole = phases
    if not len(forward[0]) and not len(backward[0]):
        return np.full(len(moment_ns), SUB_CODE["useful.compute"], np.int64)
    sub: Ints = np.full(len(moment_ns), SUB_CODE["useful.optimizer"], np.int64)
    sub[inside(moment_ns, forward)] = SUB_CODE["useful.forward"]
    sub[inside(moment_ns, backward)] = SUB_CODE["useful.backward"]
    sub[inside(moment_ns, whole)] = SUB_CODE["useful.compute"]
    return sub


def by_host(rows: RankRows, picked: Ints) -> Ints:
    """Return those of the rows `picked` that tell what the training thread did: no segment timed by device events."""
    segment = rows.name[picked] == NAME_ID["segment.backward"]
    kept: Ints = picked[~(segment & (rows.column("corr", picked) == ON_DEVICE))]
    return kept


def remainder(rows: RankRows, life: RankLifetime, moment_ns: Ints, step: Ints) -> Ints:
    """Return [m] the sub-line of moments inside steps that no row owns, by the learning events around them.

    `step` [m] is the step of each moment. What precedes a backward of the same step is forward, what follows the last
    one belongs to the update; a step without a backward is not told apart.

        moment:            a            b            c
        events of step k:      backward     backward     update
        sub-line:       forward      forward      optimizer
    """
    backward = rows.start_ns[by_host(rows, rows.of("segment.backward", "segment.grad"))]
    # Backwards before the moment, in all and before its step began: the difference is those of its own step.
    before = np.searchsorted(backward, moment_ns)
    first = np.searchsorted(backward, life.step_start[step])
    beyond = np.searchsorted(backward, life.step_end[step])
    sub: Ints = np.full(len(moment_ns), SUB_CODE[REMAINDER_SUB], np.int64)
    sub[before < beyond] = SUB_CODE["useful.forward"]
    sub[(before == beyond) & (before > first)] = SUB_CODE["useful.optimizer"]
    return sub


COMM_NAMES = ("comm.wait", "comm.collective", "comm.send", "comm.recv")
"""Names whose time is split by the arrivals of other ranks."""

GAP_PRECEDENCE = 79
"""Gaps between a save and the fsync, rename or close that follow: checkpoint, below every recorded checkpoint row."""

GAP = -2
"""Owner code of such a gap."""


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
class BookedRank:
    """One rank of one attempt, booked but for its communication waits."""

    rows: RankRows
    """What the rank recorded."""
    life: RankLifetime
    """Its borders."""
    sheet: RankAccount
    """What is booked so far, ns."""
    waits: OpenWaits
    """What the arrivals of other ranks will split."""


def book_rank(rows: RankRows, life: RankLifetime, calls: Sequence[CallFlops] = (), *, restarted: bool) -> BookedRank:
    """Book the time of `life`; `restarted` says that an earlier attempt failed, `calls` how long a model's take."""
    sheet = RankAccount.blank(len(life.step_start))
    _book_startup(sheet, rows, life, "restart" if restarted else "startup")
    waits = _book_steps(sheet, rows, life, calls, restarted=restarted)
    end = len(life.step_start) + 1
    sheet.book("unknown.cut_short", end, life.died_ns - life.record_ns)
    sheet.book("idle.exit" if life.seen else "unknown.cut_short", end, life.until_ns - life.died_ns)
    return BookedRank(rows, life, sheet, waits)


def _book_startup(sheet: RankAccount, rows: RankRows, life: RankLifetime, bucket: str) -> None:
    """Book everything before the first step; collections and log lines there are start-up too."""
    sheet.book(f"{bucket}.launch", 0, life.born_ns - life.from_ns)
    evaluations = evaluations_of(rows)
    picked = rows.of(*STARTUP_OF, *IN_EVALUATION)
    pieces = sweep(
        rows.start_ns[picked],
        rows.end_ns[picked],
        _STARTUP_TABLE.precedence[rows.name[picked]],
        window=(life.born_ns, life.first_ns),
        cuts=np.concatenate(evaluations),
    )
    name = np.append(rows.name[picked], -1)[pieces.row]
    sub = _swap("startup", bucket)[_STARTUP_TABLE.sub[name]]
    evaluates = inside(pieces.start_ns, evaluations) & ~np.isin(name, [NAME_ID[known] for known in STARTUP_OF])
    sub = np.where(evaluates, _evaluation_sub(rows, name, pieces), sub)
    book_evaluation(sheet, rows, pieces, np.where(evaluates, np.append(picked, -1)[pieces.row], -1))
    sheet.book_all(sub, np.zeros(len(sub), np.int64), pieces.duration_ns)


def _book_steps(
    sheet: RankAccount, rows: RankRows, life: RankLifetime, calls: Sequence[CallFlops], *, restarted: bool
) -> OpenWaits:
    """Sweep from the first step to the last trusted record; returns the communication pieces."""
    picked = by_host(rows, rows.of(*BUCKET_OF))
    evaluations, phases = evaluations_of(rows), device_phases(rows)
    gap_start, gap_end = checkpoint_gaps(rows)
    marked = core_waits.marks(rows)
    bounds = (*evaluations, *(bound for phase in phases for bound in phase))
    owner_of = np.concatenate([picked, np.full(len(gap_start), GAP, np.int64), np.array([-1])])
    pieces = sweep(
        np.concatenate([rows.start_ns[picked], gap_start]),
        np.concatenate([rows.end_ns[picked], gap_end]),
        np.concatenate([STEP_TABLE.precedence[rows.name[picked]], np.full(len(gap_start), GAP_PRECEDENCE, np.int64)]),
        window=(life.first_ns, life.record_ns),
        cuts=np.concatenate([life.step_start, life.step_end, marked.moment_ns, *bounds]),
    )
    owner = owner_of[pieces.row]
    name = np.where(owner >= 0, rows.name[owner], -1)
    column, place = _place(rows, pieces, life)
    column = np.where(name == NAME_ID["pause"], len(life.step_start) + 1, column)  # a pause is no time of any step
    # Collections with nothing else behind them are the interpreter going down: part of what follows the steps.
    over = (name == NAME_ID["host.gc"]) & (pieces.start_ns >= trained_until(rows, life))
    # Forwards and the like outside steps are no part of one.
    by_device = name == NAME_ID["device.work"]
    over |= (column == len(life.step_start) + 1) & _IS_USEFUL[STEP_TABLE.sub[name]] & ~by_device
    # What follows the last step trains nothing more: its forwards evaluate, whatever mode the model is in.
    tested = over & (name == NAME_ID["forward"]) & (not life.failed)
    sub = np.where((owner >= 0) & ~over, STEP_TABLE.sub[name], np.where(tested, SUB_CODE["eval.forward"], place))
    timed = np.isin(name, [NAME_ID[known] for known in BY_EVENTS])
    if timed.any():
        # What the host computes while its device has nothing to do is no work of the device. Before the first event, in
        # the first step, a library is loaded and kernels are chosen: what the device did then nobody knows.
        since = pieces.start_ns >= pieces.start_ns[timed][0]
        sub = np.where(_IS_COMPUTE[sub], np.where(since, SUB_CODE["host.launch"], SUB_CODE["unknown.device"]), sub)
        sub = np.where(by_device, phase_of(pieces.start_ns, phases), sub)
    evaluates = inside(pieces.start_ns, evaluations) & (EVALUATED[name] | over | (owner == -1) | _IS_USEFUL[sub])
    sub = np.where(evaluates, _evaluation_sub(rows, name, pieces), sub)
    sub = np.where(owner == GAP, SUB_CODE["checkpoint.persist"], sub)
    if restarted:
        sub = _swap("startup", "restart")[sub]
    input_piece = np.isin(name, INPUT_IDS) & ~evaluates
    book_evaluation(sheet, rows, pieces, np.where(evaluates, owner, -1))
    comm_piece = np.isin(name, [NAME_ID[known] for known in COMM_NAMES])
    plain = ~(input_piece | comm_piece)
    duration_ns = pieces.duration_ns
    if not timed.any():  # the training thread is the device: it computes only while it has a core
        most_ns = core_waits.most_of_steps(rows, life.step_start, calls)
        no_core_ns = np.where(plain, core_waits.without_core(rows, marked, pieces, sub, column, most_ns), 0)
        sheet.book_all(core_waits.CODE, column, no_core_ns)
        duration_ns = duration_ns - no_core_ns
    sheet.book_all(sub[plain], column[plain], duration_ns[plain])
    book_input(sheet, rows, pieces, np.where(evaluates, -1, owner), column)
    found = np.flatnonzero(comm_piece)
    return OpenWaits(owner[found], pieces.start_ns[found], pieces.end_ns[found], column[found])


def trained_until(rows: RankRows, life: RankLifetime) -> int:
    """Return the end of the last step, or of the last record after it that is no collection."""
    others = rows.of(*(name for name in BUCKET_OF if name != "host.gc"))
    return max(life.last_ns, int(rows.end_ns[others].max()) if len(others) else 0)


def _place(rows: RankRows, pieces: Pieces, life: RankLifetime) -> tuple[Ints, Ints]:
    """Return each piece's column, and the sub-line it has when no row owns it."""
    num_steps = len(life.step_start)
    index = np.searchsorted(life.step_start, pieces.start_ns, side="right")
    within = np.zeros(len(index), bool)
    if num_steps:
        within = (index > 0) & (pieces.start_ns < life.step_end[np.maximum(index, 1) - 1])
    after = ~within & (index == num_steps)
    column = np.where(after, num_steps + 1, index)
    tail = SUB_CODE["rework.partial" if life.failed else "idle.teardown"]
    sub = np.where(after, tail, SUB_CODE["unknown.dropped"])
    sub[within] = remainder(rows, life, pieces.start_ns[within], index[within] - 1)
    return column, sub


def checkpoint_gaps(rows: RankRows) -> tuple[Ints, Ints]:
    """Find what lies between a save and the fsync, rename or close that follow it: writing that no probe saw.

    A gap counts when nothing else that belongs to training (input, optimizer, communication, a save of headway's own)
    begins inside it.
    """
    names = ("checkpoint.save", "checkpoint.sync", "checkpoint.rename")
    training = ("input.next", "input.iter", "optimizer.step", "comm.wait", "comm.collective", "step", "pause")
    other = (*training, "checkpoint.snapshot", "checkpoint.wait", "checkpoint.restore")
    picked = rows.of(*names, *other)
    state = np.isin(rows.name[picked], [NAME_ID[name] for name in names])
    follows = np.isin(rows.name[picked], [NAME_ID[name] for name in names[1:]])
    joined = np.flatnonzero(state[:-1] & follows[1:]) if len(picked) else np.zeros(0, np.int64)
    reach = np.maximum.accumulate(np.where(state, rows.end_ns[picked], 0)) if len(picked) else joined
    start, end = reach[joined], rows.start_ns[picked[joined + 1]]
    open_gap = end > start
    return start[open_gap], end[open_gap]


@dataclass(frozen=True, slots=True)
class _Table:
    """A table of bookings as arrays over `NAMES`, with a blank at the end for 'no name' (-1)."""

    sub: Ints
    precedence: Ints


def _evaluation_sub(rows: RankRows, name: Ints, pieces: Pieces) -> Ints:
    """Return [n] the sub-line of each piece, of what bears a name, if it lies inside an evaluation."""
    acting = inside(pieces.start_ns, evaluations_of(rows, of_rollouts=True))
    return np.where(acting, SUB_CODE["eval.rollout"], _EVALUATION_SUB[name])


def _as_table(bookings: Mapping[str, Booking], otherwise: str) -> _Table:
    """Lay a table of bookings out by name; names without one have sub-line `otherwise` and precedence 0."""
    sub = [SUB_CODE[bookings[name].sub if name in bookings else otherwise] for name in NAMES]
    precedence = [bookings[name].precedence if name in bookings else 0 for name in NAMES]
    return _Table(np.array([*sub, SUB_CODE[otherwise]], np.int64), np.array([*precedence, 0], np.int64))


STEP_TABLE = _as_table(BUCKET_OF, REMAINDER_SUB)
_STARTUP_TABLE = _as_table(STARTUP_OF, "startup.script")
_EVALUATION_SUB = np.array([SUB_CODE[IN_EVALUATION.get(name, "eval.other")] for name in (*NAMES, "")], np.int64)
"""[len(NAMES) + 1] Sub-line of each name inside an evaluation; the last entry is that of time which no name owns."""
EVALUATED = np.array([name in IN_EVALUATION for name in (*NAMES, "")])
"""[len(NAMES) + 1] Whether an evaluation takes over what bears the name."""
_IS_COMPUTE = np.array([bucket_of_sub(sub) == "useful" for sub in SUBS])
_IS_USEFUL = np.array([bucket_of_sub(sub) == "useful" or sub == "host.script" for sub in SUBS])
"""[len(SUBS)] What an evaluation takes over, and what there is none of after the last step."""


def _swap(old: str, new: str) -> Ints:
    """Return sub-line codes with those of bucket `old` replaced by the ones of bucket `new`."""
    codes = [SUB_CODE[new + sub.removeprefix(old)] if sub.startswith(old + ".") else SUB_CODE[sub] for sub in SUBS]
    return np.array(codes, np.int64)
