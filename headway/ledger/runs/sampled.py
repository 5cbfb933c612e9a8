"""Runs on devices: what sampled profiler windows say about the time between them.

The always-on records of a device's run tell what the training thread did, and
by events when the device had nothing to do between the parts of a step; pauses
between its kernels, and what the kernels are for, show in profiler windows
only. A window slows the host, and with it the steps that it shows: it tells how
many nanoseconds of a step a device spends on what, and no share of its own wall.

    events    | idle: input |      at work       |    not known    |    a step that was not profiled
    window                    k k k k k   c c  k                        ns of whole steps
    ledger    | input       | k and c as they are to each other | launch gaps |

Where events tell when a device is at work, that stays: the window splits this time
by what it saw, and the time of which events know nothing into work that is missing
and launch gaps. Without events a window is cut against the host's labels, and what
it shows splits the time under each. Whole nanoseconds that add up exactly; how much
of the step time was seen is part of the basis.

A window shows the kernels that were launched in it. Where the host is ahead,
the device is busy before the first of them with what was launched earlier and
is not seen: the window says nothing of that time.

    host      | launches 1 | launches 2 | launches 3 |
    device    ( not seen )[ kernels 1  ][ kernels 2  ]

The kernel that runs when a window closes, and what waits behind it, are not
seen either: steps count up to the first launch that shows no kernel.

>>> WindowSamples({}, num_windows=4, window_ns=3_000, step_ns=1_000_000).basis
'sampled (4 windows, 0.30 % of step time)'
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from headway.core.units import format_fraction
from headway.ledger.booking.account import KernelTimes
from headway.ledger.booking.arrivals import Booked
from headway.ledger.booking.rows import NAMES, RankRows
from headway.ledger.booking.timeline import by_host, evaluations_of
from headway.ledger.buckets import BUCKET_CODE_OF_SUB, BUCKET_OF, BUCKETS, SUB_CODE, bucket_of_sub
from headway.ledger.runs.attempts import RunBook
from headway.ledger.runs.kernels import WAITED, DeviceBook, device_books, kernel_times, lateness_of
from headway.trace.events.intervals import Ints, inside, share_out, sweep
from headway.trace.events.trace import Trace, concat
from headway.trace.events.vocabulary import BY_EVENTS

SEEN = ("useful.compute", "comm.exposed", "straggler.device", "input.transfer", "host.copy", "comm.p2p", "bubble.p2p")
"""What a window can show of a device at work; a last column, 'own', holds the time in which it did not work."""

OWN = len(SEEN)

CLASSES: tuple[tuple[str, ...], ...] = (
    ("useful",),
    ("input",),
    ("comm", "straggler", "bubble"),
    ("checkpoint",),
    ("host",),
    ("startup",),
)
"""Buckets of the host's label that are split together."""

LAUNCHES = ("useful",)
"""Those of which the time that no device works in is a launch gap: nothing else is known of what the host did."""

BY_HOST = ("input.transfer", "host.copy")
"""Copies of which the host's records tell where it waited for them: of these only the rest is work beside it."""

ALIKE = 0.2
"""Distance of the quartiles of steps / their median up to which a few steps stand for all, and the share of the time
at work up to which these may say that there was none."""

CLASS_OF_BUCKET = {bucket: index for index, buckets in enumerate(CLASSES) for bucket in buckets}

_CLASS_OF_NAME = np.array(
    [CLASS_OF_BUCKET.get(bucket_of_sub(BUCKET_OF[name].sub), 0) if name in BUCKET_OF else 0 for name in NAMES] + [0]
)
_AT_WORK = [SUB_CODE[sub] for sub in SEEN]
_IN_USEFUL = np.array(BUCKET_CODE_OF_SUB) == BUCKETS.index("useful")
_SEEN_OF_SUB = np.array([SEEN.index(sub) if sub in SEEN else OWN for sub in SUB_CODE])


@dataclass(frozen=True, slots=True)
class WindowShare:
    """What windows showed of whole steps."""

    ns: Ints
    """[len(CLASSES), len(SEEN) + 1] By host label and device activity."""

    num_steps: int
    """Steps whose launches all show what they launched."""

    kernels: KernelTimes = field(default_factory=KernelTimes)
    """What each kernel took of them."""

    def __add__(self, other: WindowShare) -> WindowShare:
        """Return what both showed."""
        return WindowShare(self.ns + other.ns, self.num_steps + other.num_steps, self.kernels + other.kernels)


@dataclass(frozen=True, slots=True)
class WindowSamples:
    """What the windows of a run showed."""

    shares: Mapping[int, WindowShare]
    """Rank -> what its windows showed."""

    num_windows: int
    """Windows used, over all ranks."""

    window_ns: int
    """Device-ns inside windows."""

    step_ns: int
    """Device-ns inside steps."""

    num_blind: int = 0
    """Windows that show no kernel."""

    by_events: bool = False
    """Whether events of the devices say when these were at work."""

    num_ranks: int = 1
    """Ranks of the run."""

    kernels: KernelTimes = field(default_factory=KernelTimes)
    """What their kernels took."""

    @property
    def basis(self) -> str:
        """How the split buckets are known."""
        seen = self.window_ns / self.step_ns if self.step_ns else 0.0
        return f"sampled ({self.num_windows} windows, {format_fraction(seen, 2)} of step time)"

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know."""
        notes = []
        if self.num_blind:
            notes.append(
                f"{self.num_blind} profiler windows show no kernel and are not used: another profiler has the device, "
                "the profiler's library is missing or not allowed, or the device was a whole window behind its host"
            )
        if self.num_windows:
            notes.append(f"device activity is extrapolated: {self.basis}")
        elif self.by_events:
            notes.append("pauses of the device between the kernels of one forward or backward are not seen")
            if self.num_ranks > 1:
                notes.append(
                    "what the device spends on communication stands inside `useful` until a deep window was recorded: "
                    "headway run --window-at 50"
                )
        else:
            notes.append("device work is not seen: `useful` is what host records leave over, device gaps included")
        return tuple(notes)


def window_shares(book: RunBook, windows: Mapping[int, Sequence[Trace]]) -> WindowSamples:
    """Cut every window of the run's last attempt against the host's labels.

    `windows` maps a window's number to the traces of its ranks, their times on the clock of the book.
    """
    ranks = {one.rank: one for one in book.attempts[-1].books}
    seen: dict[int, list[tuple[DeviceBook, Ints, Trace]]] = {}
    blind = 0
    for traces in windows.values():
        trace = concat(list(traces))
        found = device_books(trace, any_device=True)
        late, _ = lateness_of(trace, found)
        for device, waited in zip(found, late, strict=True):
            if np.isin(device.sub, _AT_WORK).any():
                seen.setdefault(device.rank, []).append((device, waited, trace))
            else:
                blind += 1
    shares: dict[int, WindowShare] = {}
    used = 0
    for rank in sorted(seen.keys() & ranks.keys()):  # rank by rank, because the host's labels are read again
        rows = book.rows(rank)
        for table in [_cut(device, waited, ranks[rank], rows, trace) for device, waited, trace in seen[rank]]:
            if table is not None:
                shares[rank] = shares[rank] + table if rank in shares else table
                used += 1
    step_ns = sum(int(one.step_wall_ns.sum()) for one in ranks.values())
    window_ns = sum(int(share.ns.sum()) for share in shares.values())
    by_events = not book.attempts[-1].spans.keys().isdisjoint(BY_EVENTS)
    kernels = functools.reduce(operator.add, (share.kernels for share in shares.values()), KernelTimes())
    return WindowSamples(
        shares, used, window_ns, step_ns, num_blind=blind, by_events=by_events, num_ranks=len(ranks), kernels=kernels
    )


def _cut(device: DeviceBook, waited: Ints, host: Booked, rows: RankRows, trace: Trace) -> WindowShare | None:
    """Return what one window of one device shows of whole steps; None where it shows none.

    What lies in an evaluation is left out: it says nothing about training.
    """
    pieces, steps = device.pieces, rows.of("step")
    # Steps are whole from the one of the first launch on, to the first launch that shows no kernel.
    step = np.searchsorted(rows.end_ns[steps], device.launched_ns, side="right")
    works = np.isin(device.sub, _AT_WORK)
    ends = (
        rows.end_ns[steps] if device.unseen_ns is None else rows.end_ns[steps][rows.end_ns[steps] <= device.unseen_ns]
    )
    works &= step < len(ends)
    if not works.any():
        return None
    # Behind the last kernel of a window its device is idle, in a step that the window does not show.
    num_steps = int(step[works].max() - step[works].min()) + 1
    # Every piece in two: before `middle` it waited for another rank, after it it worked. Empty halves are dropped.
    middle = pieces.start_ns + waited
    start = np.stack([pieces.start_ns, middle], axis=1).reshape(-1)
    end = np.stack([middle, pieces.end_ns], axis=1).reshape(-1)
    seen = _SEEN_OF_SUB[np.stack([WAITED[device.sub], device.sub], axis=1).reshape(-1)]
    kept = end > start
    start, end, seen, works = start[kept], end[kept], seen[kept], works.repeat(2)[kept]
    low, high = max(int(start[works].min()), host.first_ns), min(int(end[works].max()), host.last_ns)
    if high <= low:
        return None
    seen = np.where(works, seen, OWN)
    picked, evaluations = by_host(rows, rows.of(*BUCKET_OF)), evaluations_of(rows)
    level = np.array([BUCKET_OF[NAMES[code]].precedence for code in rows.name[picked].tolist()], np.int64)
    # The host's labels are cut where the activity of the device changes, so that each lies in one activity: the one
    # that began last.
    cuts = np.concatenate([start, *evaluations])
    labels = sweep(rows.start_ns[picked], rows.end_ns[picked], level, window=(low, high), cuts=cuts)
    name = np.append(rows.name[picked], -1)[labels.row]
    activity = seen[np.clip(np.searchsorted(start, labels.start_ns, side="right") - 1, 0, len(seen) - 1)]
    table = np.zeros((len(CLASSES), OWN + 1), np.int64)
    trained = ~inside(labels.start_ns, evaluations)
    np.add.at(table, (_CLASS_OF_NAME[name][trained], activity[trained]), labels.duration_ns[trained])
    if not table.any():
        return None
    computes = (step < len(ends)) & (device.sub == SUB_CODE["useful.compute"])
    return WindowShare(table, num_steps, kernel_times(trace, pieces, computes, num_steps))


def apply_windows(book: RunBook, windows: WindowSamples) -> None:
    """Split the time inside steps by what the windows showed; ranks without windows take what all of them showed."""
    if not windows.shares:
        return
    everyone = functools.reduce(operator.add, windows.shares.values())
    for attempt in book.attempts:
        for one in attempt.books:
            ns, share = one.sheet.ns[:, 1:-1], windows.shares.get(one.rank, everyone)
            if windows.by_events:
                _split_work(ns, share)
            else:
                _split_labels(ns, share, everyone)
            one.sheet.pack()


def _split_work(ns: Ints, share: WindowShare) -> None:
    """Split the time at work, and that of which events know nothing, by what a step's kernels take; in place.

    In the first step, in which libraries are loaded, no more than in the others is taken for launch gaps. Pauses
    between the kernels of one forward or backward are at work by events; where steps are alike, so that the steps of a
    window stand for all, what the kernels leave of that time is launch gaps too.
    """
    useful, unknown = np.flatnonzero(_IN_USEFUL), SUB_CODE["unknown.device"]
    kernels = share.ns[:, :OWN].sum(axis=0) * ns.shape[1] // share.num_steps
    for sub in BY_HOST:
        kernels[SEEN.index(sub)] = max(0, kernels[SEEN.index(sub)] - int(ns[SUB_CODE[sub]].sum()))
    known, told = ns[useful].sum(axis=0), ns[unknown].copy()
    if len(told) > 1:
        told[0] = min(told[0], int(told[1:].mean()))
    missing = min(max(int(kernels.sum() - known.sum()), 0), int(told.sum()))
    parts = share_out(told, np.broadcast_to([missing, told.sum() - missing], (len(told), 2)))
    pauses = np.zeros_like(known)
    low, middle, high = np.quantile((known + told)[1:] if len(told) > 1 else known + told, (0.25, 0.5, 0.75))
    if high - low <= ALIKE * middle:
        pauses = np.maximum(known - kernels.sum() // len(told), 0)
        pauses[0] = min(pauses[0], int(pauses[1:].mean())) if len(told) > 1 else 0
        if pauses.sum() > ALIKE * known.sum():  # a step that shows so little stands for no other
            pauses[:] = 0
    work = share_out(known + parts[:, 0] - pauses, np.broadcast_to(kernels, (len(told), OWN)))
    if not kernels.any():
        return
    ns[useful] = 0
    ns[unknown] -= told
    ns[SUB_CODE["host.launch"]] += parts[:, 1] + pauses
    ns[_AT_WORK] += work.T


def _split_labels(ns: Ints, share: WindowShare, everyone: WindowShare) -> None:
    """Split the time under each label of the host by what the device did under it; in place."""
    bucket = np.array(BUCKET_CODE_OF_SUB)
    added = np.zeros_like(ns)
    for index, buckets in enumerate(CLASSES):
        own = share if share.ns[index].any() else everyone
        weights = own.ns[index].copy()
        lines = np.flatnonzero(np.isin(bucket, [BUCKETS.index(name) for name in buckets]))
        total = ns[lines].sum(axis=0)
        launches = buckets == LAUNCHES
        if launches and weights.any():  # what the window took by itself is launches; a step without it tells these
            weights[OWN] = max(0, int(total.mean()) * own.num_steps - int(weights[:OWN].sum()))
        if not weights.any():
            continue
        split = share_out(total, np.broadcast_to(weights, (len(total), OWN + 1)))
        for column, sub in enumerate(SEEN):
            added[SUB_CODE[sub]] += split[:, column]
        if launches:
            ns[lines] = 0
            added[SUB_CODE["host.launch"]] += split[:, OWN]
        else:
            ns[lines] = share_out(split[:, OWN], ns[lines].T).T
    ns += added


def moved(trace: Trace, rank: int, shift: int) -> Trace:
    """Return a window's trace, every row of `rank` (the file's name knows it), its times less `shift`."""
    events = trace.events
    ranks = np.full(len(trace), rank, np.int32)
    return replace(trace, events={**events, "rank": ranks, "start_ns": events["start_ns"] - shift})
