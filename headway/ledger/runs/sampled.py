"""Runs on devices: what sampled profiler windows say about the time between them.

The always-on records of a device's run tell what the training thread did, and
by events when the device had nothing to do between the parts of a step; pauses
between its kernels, and what the kernels are for, show in profiler windows
only. Each window is cut against the host's labels at the same moments; the
shares found there split the whole run's time under each label. Whole
nanoseconds that add up exactly; how much of the step time was seen is part of
the basis.

A window shows the kernels that were launched in it. Where the host is ahead,
the device is busy before the first of them with what was launched earlier and
is not seen: the window says nothing of that time.

    host      | launches 1 | launches 2 | launches 3 |
    device    ( not seen )[ kernels 1  ][ kernels 2  ]

The kernel that runs when a window closes, and what waits behind it, are not
seen either: where the last launch shows no kernel, a window ends with the last
kernel that it shows.

>>> WindowSamples({}, num_windows=4, window_ns=3_000, step_ns=1_000_000).basis
'sampled (4 windows, 0.30 % of step time)'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from headway.core.units import format_fraction
from headway.ledger.booking.arrivals import Booked
from headway.ledger.booking.phases import by_host, evaluations_of
from headway.ledger.booking.rows import NAMES, RankRows
from headway.ledger.kinds.buckets import BUCKET_CODE_OF_SUB, BUCKET_OF, BUCKETS, SUB_CODE, bucket_of_sub
from headway.ledger.runs.attempts import RunBook
from headway.ledger.runs.kernels import WAITED, DeviceBook, device_books, lateness_of
from headway.trace.events.intervals import inside
from headway.trace.events.sweep import Ints, share_out, sweep
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
    ("unknown",),
)
"""Buckets of the host's label that are split together."""

LAUNCHES = (("useful",), ("unknown",))
"""Those of which the time that no device works in is a launch gap: nothing else is known of what the host did."""

CLASS_OF_BUCKET = {bucket: index for index, buckets in enumerate(CLASSES) for bucket in buckets}

_CLASS_OF_NAME = np.array(
    [CLASS_OF_BUCKET.get(bucket_of_sub(BUCKET_OF[name].sub), 0) if name in BUCKET_OF else 0 for name in NAMES] + [0]
)
_AT_WORK = [SUB_CODE[sub] for sub in SEEN]
_SEEN_OF_SUB = np.array([SEEN.index(sub) if sub in SEEN else OWN for sub in SUB_CODE])


@dataclass(frozen=True, slots=True)
class WindowSamples:
    """What the windows of a run showed."""

    shares: Mapping[int, Ints]
    """Rank -> [len(CLASSES), len(SEEN) + 1] ns seen in windows, by host label and device activity."""

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
    seen: dict[int, list[tuple[DeviceBook, Ints]]] = {}
    blind = 0
    for traces in windows.values():
        trace = concat(list(traces))
        found = device_books(trace, any_device=True)
        late, _ = lateness_of(trace, found)
        for device, waited in zip(found, late, strict=True):
            if np.isin(device.sub, _AT_WORK).any():
                seen.setdefault(device.rank, []).append((device, waited))
            else:
                blind += 1
    shares: dict[int, Ints] = {}
    used = 0
    for rank in sorted(seen.keys() & ranks.keys()):  # rank by rank, because the host's labels are read again
        rows = book.rows(rank)
        for table in [_cut(device, waited, ranks[rank], rows) for device, waited in seen[rank]]:
            if table is not None and table.any():
                shares[rank] = shares.get(rank, 0) + table
                used += 1
    step_ns = sum(int(one.step_wall_ns.sum()) for one in ranks.values())
    window_ns = sum(int(table.sum()) for table in shares.values())
    by_events = not book.attempts[-1].spans.keys().isdisjoint(BY_EVENTS)
    return WindowSamples(shares, used, window_ns, step_ns, num_blind=blind, by_events=by_events, num_ranks=len(ranks))


def _cut(device: DeviceBook, waited: Ints, host: Booked, rows: RankRows) -> Ints | None:
    """Return [len(CLASSES), len(SEEN) + 1] ns of one window of one device, only inside steps; None outside them.

    What lies in an evaluation is left out: it says nothing about training.
    """
    pieces = device.pieces
    # Every piece in two: before `middle` it waited for another rank, after it it worked. Empty halves are dropped.
    middle = pieces.start_ns + waited
    start = np.stack([pieces.start_ns, middle], axis=1).reshape(-1)
    end = np.stack([middle, pieces.end_ns], axis=1).reshape(-1)
    seen = _SEEN_OF_SUB[np.stack([WAITED[device.sub], device.sub], axis=1).reshape(-1)]
    kept = end > start
    start, end, seen = start[kept], end[kept], seen[kept]
    closed = end[seen != OWN] if device.cut_off else end
    low, high = max(int(start[seen != OWN].min()), host.first_ns), min(int(closed.max()), host.last_ns)
    if high <= low:
        return None
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
    return table


def apply_windows(book: RunBook, windows: WindowSamples) -> None:
    """Split the time inside steps by what the windows showed; ranks without windows take the shares of all."""
    if not windows.shares:
        return
    everyone = np.sum(list(windows.shares.values()), axis=0)
    for attempt in book.attempts:
        for one in attempt.books:
            _apply(one.sheet.ns[:, 1:-1], windows.shares.get(one.rank, everyone), everyone)
            one.sheet.pack()


def _apply(ns: Ints, shares: Ints, everyone: Ints) -> None:
    """Split the columns of one sheet in place."""
    bucket = np.array(BUCKET_CODE_OF_SUB)
    added = np.zeros_like(ns)
    for index, buckets in enumerate(CLASSES):
        weights = shares[index] if shares[index].any() else everyone[index]
        if not weights.any():
            continue
        lines = np.flatnonzero(np.isin(bucket, [BUCKETS.index(name) for name in buckets]))
        if buckets == ("unknown",):
            lines = np.array([SUB_CODE["unknown.device"]])
        total = ns[lines].sum(axis=0)
        split = share_out(total, np.broadcast_to(weights, (len(total), OWN + 1)))
        for column, sub in enumerate(SEEN):
            added[SUB_CODE[sub]] += split[:, column]
        if buckets in LAUNCHES:
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
