"""The ledger of a run that still goes on: booked step by step, from records as they are drained.

Use it for what is shown while a job runs (status line, live page, metrics,
experiment loggers); the finished run's `Ledger` decides. A step is booked once
it is complete on every rank that keeps up, by the same table, the same sweep
and the same meetings of ranks. Known differences: buckets only, start-up is
one piece, and steps end as `live_rank` says. int64 ns on
CLOCK_MONOTONIC; one `LiveLedger` may be fed and read by different threads.

>>> ledger = LiveLedger(start_ns=0, world_size=1)
>>> ledger.figures(2_000_000_000).bucket_ns["startup"]
2000000000
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.ledger.buckets import BUCKETS
from headway.ledger.growth import slowed
from headway.ledger.live_rank import FORWARD, LEARNING, BookingWindow, LiveRank, Records
from headway.ledger.live_sweep import book_windows
from headway.trace.events.intervals import Ints
from headway.trace.recording.basis import LEARNS
from headway.trace.rings.records import RingHeader

USEFUL, STARTUP, RESTART, REWORK, IDLE, UNKNOWN = (
    BUCKETS.index(name) for name in ("useful", "startup", "restart", "rework", "idle", "unknown")
)

STRAY_STEPS = 64
"""A rank this many steps behind the first one is not waited for: its ranks do not move together."""

OVERDUE_STEPS, OVERDUE_NS = 3, 2_000_000_000
"""A step under way counts as unknown from so many usual steps, and at least so long, after its start."""

LOOKED_AT = 4096
"""Steps that are looked at, about so many at most, to tell whether they get slower."""

STEP_BOUNDS_S = tuple(float(f"{digit}e{power}") for power in range(-3, 3) for digit in (1, 2, 5))
"""Upper bounds of the histogram of step times; one more takes what is longer."""


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank as it stands."""

    rank: int
    """Global rank."""

    pid: int
    """Its process; 0 before any was seen."""

    steps: int
    """Complete steps of this attempt."""

    step_ns: int
    """Length of its newest booked step; 0 before the first."""

    begun: bool
    """Whether it has entered its first step."""

    last_step_ns: int
    """End of its newest complete step; 0 before the first."""

    ended: bool
    """Whether its process has noted its end."""


@dataclass(frozen=True, slots=True)
class LiveFigures:
    """What is known of a run at one moment."""

    now_ns: int
    """The moment."""

    start_ns: int
    """Launcher start."""

    attempt: int
    """The attempt that runs, from 0."""

    steps: int
    """Steps of this attempt that every rank which keeps up has completed."""

    total_steps: int
    """Booked steps over all attempts, those done twice included; of the rank that made most."""

    steps_per_s: float
    """Over the last ten seconds, of the rank that made the fewest; 0 before the second step."""

    steps_per_s_then: float
    """The same at the end of that rank's newest step: a step that is overdue, or teardown, does not lower it."""

    rank_ns: Mapping[int, Ints]
    """Rank -> [len(BUCKETS)] ns: booked time, the start-up that goes on, and what is overdue."""

    booked_ns: Ints
    """[len(BUCKETS)] Device-ns that are booked for good, over all ranks; only `useful` may shrink (to `rework`)."""

    ranks: tuple[RankState, ...]
    """Every rank seen, in order."""

    dropped: int
    """Records that were overwritten before they were drained, and those given up of a step that had too many."""

    step_counts: Ints
    """[len(STEP_BOUNDS_S) + 1] Booked steps by length, over all ranks and attempts."""

    step_sum_s: float
    """Sum of their lengths in seconds."""

    by_device: bool = False
    """Whether records of devices say when these were at work; else `useful` is what host records leave over."""

    charted: tuple[str, ...] = ()
    """Buckets with time in the booked steps of this attempt; empty before the first of them."""

    slower: float = 1.0
    """How many times as long steps take now as at the start of this attempt; 1 where they do not get slower."""

    calls: Mapping[int, int] = field(default_factory=dict)
    """Model -> its calls in training, of rank 0 in this attempt."""

    @property
    def devices(self) -> int:
        """Devices that the account is about."""
        return len(self.rank_ns)

    @property
    def bucket_ns(self) -> dict[str, int]:
        """Bucket -> device-ns over all ranks."""
        total: Ints = sum(self.rank_ns.values(), start=np.zeros(len(BUCKETS), np.int64))
        return dict(zip(BUCKETS, total.tolist(), strict=True))

    @property
    def wall_ns(self) -> int:
        """Accounted time per device: the launcher's start to the last complete step, and what is overdue."""
        return sum(self.bucket_ns.values()) // max(self.devices, 1)

    @property
    def tells_goodput(self) -> bool:
        """Whether the share of useful work is known: not where events leave more time open than they tell."""
        return not self.by_device or self.bucket_ns["unknown"] <= self.bucket_ns["useful"]

    @property
    def goodput(self) -> float:
        """Useful device-time / accounted device-time, 0..1."""
        amounts = self.bucket_ns
        total = sum(amounts.values())
        return amounts["useful"] / total if total else 0.0


@dataclass(frozen=True, slots=True)
class LiveSeries:
    """What the charts over steps show."""

    ranks: tuple[int, ...]
    """[ranks] Numbers of the rows of `step_s`."""

    step_s: NDArray[np.float64]
    """[ranks, steps] Seconds; NaN where nothing is booked."""

    bucket_s: Mapping[str, NDArray[np.float64]]
    """Bucket -> [steps] device-seconds over all ranks."""

    first_step: int
    """Number of the first step."""

    clock: str = ""
    """'host' where a device works behind what the host launches, '' where there is none."""


@dataclass(slots=True)
class StepSeries:
    """Step times and bucket shares of one attempt, the oldest given up beyond `limit` values."""

    limit: int
    """Values [ranks x steps] kept at most."""

    first: int = 0
    """Number of the first step kept."""

    step_s: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    """Rank -> [steps kept] seconds; NaN where nothing was booked."""

    useful_ns: dict[int, Ints] = field(default_factory=dict)
    """Rank -> [steps kept] ns."""

    bucket_s: NDArray[np.float32] = field(default_factory=lambda: np.zeros((len(BUCKETS), 0), np.float32))
    """[len(BUCKETS), steps kept] Device-seconds over all ranks."""

    used: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(len(BUCKETS), bool))
    """[len(BUCKETS)] Whether a bucket ever took time."""

    forgotten_ns: dict[int, int] = field(default_factory=dict)
    """Rank -> useful ns of the steps given up."""

    def put(self, window: BookingWindow, duration_ns: Ints, step_ns: Ints) -> None:
        """Add the steps of `window`: `duration_ns` [n] and their buckets `step_ns` [n, len(BUCKETS)]."""
        # Columns hold the steps `first`, `first` + 1, ...; steps of the window that were given up already are skipped.
        rank, at = window.rank, window.first_step - self.first
        skip = max(-at, 0)
        duration_ns, step_ns, at = duration_ns[skip:], step_ns[skip:], max(at, 0)
        end = at + len(duration_ns)
        times = self.step_s.get(rank, np.zeros(0, np.float32))
        useful = self.useful_ns.get(rank, np.zeros(0, np.int64))
        self.step_s[rank] = _grown(times, end, np.nan)
        self.useful_ns[rank] = _grown(useful, end, 0)
        self.bucket_s = _grown(self.bucket_s, end, 0)
        self.step_s[rank][at:end] = duration_ns / 1e9
        self.useful_ns[rank][at:end] = step_ns[:, USEFUL]
        # Times and useful time stand per rank; the buckets are summed over ranks as they come.
        self.bucket_s[:, at:end] += step_ns.T / 1e9
        self.used |= step_ns.any(axis=0)
        # Half of the steps at once, so that forgetting costs a copy once in many steps.
        if end * len(self.step_s) > self.limit:
            self._forget(end // 2)

    def slower(self, rank: int) -> float:
        """Return how many times as long a rank's steps take now as at first; 1 where they do not get slower."""
        steps = self.step_s.get(rank, np.zeros(0, np.float32))[0 if self.first else 1 :]
        steps = steps[:: 1 + len(steps) // LOOKED_AT]
        ends = slowed(steps[np.isfinite(steps)])
        return 1.0 if ends is None else round(ends[1] / ends[0], 1)

    def _forget(self, count: int) -> None:
        self.first += count
        for rank, useful in self.useful_ns.items():
            self.forgotten_ns[rank] = self.forgotten_ns.get(rank, 0) + int(useful[:count].sum())
            self.useful_ns[rank], self.step_s[rank] = useful[count:].copy(), self.step_s[rank][count:].copy()
        self.bucket_s = self.bucket_s[:, count:].copy()

    def useful_from(self, rank: int, step: int) -> int:
        """Return the useful ns of a rank's steps from `step` on; steps given up count when `step` is one of them."""
        useful = self.useful_ns.get(rank, np.zeros(0, np.int64))
        forgotten = self.forgotten_ns.get(rank, 0) if step < self.first else 0
        return int(useful[max(step - self.first, 0) :].sum()) + forgotten


def _grown(array: NDArray[Any], size: int, blank: float) -> NDArray[Any]:
    """Return `array` with room for `size` entries along its last axis, doubled when it grows."""
    held = array.shape[-1]
    if held >= size:
        return array
    # Doubled: n steps cost about 2 n copies in all, whatever the size of a batch of them.
    more = np.full((*array.shape[:-1], max(size, 2 * held, 64) - held), blank, array.dtype)
    return np.concatenate([array, more], axis=-1)


@dataclass(frozen=True, slots=True)
class _Failed:
    """A failed attempt, until the next one shows what of it was kept."""

    saved: int
    """Step of the last save that every saving rank made; 0 without one."""

    series: StepSeries


class LiveLedger:
    """Books a run while it goes on; feed it with `add`, read it with `figures` and `series`."""

    def __init__(self, *, start_ns: int, world_size: int, limit: int = 1 << 21) -> None:
        """Begin at the launcher's start; `world_size` ranks are expected, `limit` step times kept (rank x step)."""
        self._start_ns, self._world_size, self._limit = start_ns, max(world_size, 1), limit
        self._lock = threading.Lock()
        self._attempt = 0
        self._ranks: dict[int, LiveRank] = {}
        self._children: dict[int, int] = {}
        self._from_ns: dict[int, int] = {}
        self._booked: dict[int, Ints] = {}
        self._failed: _Failed | None = None
        self._series = StepSeries(limit)
        self._numbers: dict[int, int] = {}
        self._dropped = 0
        self._total_steps: dict[int, int] = {}
        self._counts = np.zeros(len(STEP_BOUNDS_S) + 1, np.int64)
        self._sum_ns = 0
        self._calls: dict[int, int] = {}

    def add(self, header: RingHeader, records: Records) -> None:
        """Take in new records of one process; only ranks count, and children that train, of the present attempt."""
        if header.role not in ("main", "spawned", "child") or not len(records):
            return
        with self._lock:
            self._count_dropped(header, records)
            if header.attempt > self._attempt:
                self._next_attempt(header.attempt)
            if header.attempt == self._attempt and self._is_device(header, records):
                rank = self._rank(header)
                if rank.pid == header.pid:  # else the parent of a rank that the script spawned
                    rank.take(records)
                    if not rank.rank:
                        self._count_calls(records)
                    if rank.begin():
                        self._begun(rank)

    def _count_calls(self, records: Records) -> None:
        learns = (records["code"] == FORWARD) & (records["b"] & LEARNS > 0) & (records["a"] >= 0)
        for model, count in zip(*np.unique(records["a"][learns], return_counts=True), strict=True):
            self._calls[int(model)] = self._calls.get(int(model), 0) + int(count)

    def look(self, headers: Sequence[RingHeader]) -> None:
        """Take in what only the headers say: which processes have noted their end."""
        with self._lock:
            for header in headers:
                rank = self._ranks.get(self._children.get(header.pid, header.rank))
                if rank is not None and rank.pid == header.pid and header.attempt == self._attempt:
                    rank.ended = header.end_ns > 0

    def figures(self, now_ns: int) -> LiveFigures:
        """Book what is complete and return how things stand at `now_ns`."""
        with self._lock:
            moving = self._moving()
            self._book(min((rank.bookable for rank in moving), default=0))
            ranks = [self._ranks[number] for number in sorted(self._ranks)]
            slowest = min(moving, key=lambda rank: rank.steps, default=None)
            return LiveFigures(
                now_ns=now_ns,
                start_ns=self._start_ns,
                attempt=self._attempt,
                steps=min((rank.steps_made for rank in moving), default=0),
                total_steps=max(self._total_steps.values(), default=0),
                steps_per_s=slowest.steps_per_s(now_ns) if slowest else 0.0,
                steps_per_s_then=slowest.steps_per_s(slowest.last_step_ns) if slowest else 0.0,
                rank_ns={number: self._so_far(number, now_ns) for number in self._expected()},
                booked_ns=sum(self._booked.values(), start=np.zeros(len(BUCKETS), np.int64)),
                ranks=tuple(
                    RankState(r.rank, r.pid, r.steps_made, r.newest_ns, r.first_ns >= 0, r.last_step_ns, r.ended)
                    for r in ranks
                ),
                dropped=self._dropped,
                step_counts=self._counts.copy(),
                step_sum_s=self._sum_ns / 1e9,
                by_device=any(rank.device_ns >= 0 for rank in ranks),
                charted=tuple(name for name, used in zip(BUCKETS, self._series.used.tolist(), strict=True) if used),
                slower=self._series.slower(slowest.rank) if slowest else 1.0,
                calls=dict(self._calls),
            )

    def series(self) -> LiveSeries:
        """Return the step times and bucket shares of the present attempt, as far as they are booked and kept."""
        with self._lock:
            held, first = self._series, self._series.first
            ranks = tuple(sorted(held.step_s))
            size = max((self._ranks[rank].booked_steps - first for rank in ranks), default=0)
            rows = [_grown(held.step_s[rank], size, np.nan)[:size] for rank in ranks]
            times = np.stack(rows).astype(np.float64) if rows else np.zeros((0, 0))
            buckets = {name: held.bucket_s[code, :size].astype(np.float64) for code, name in enumerate(BUCKETS)}
            devices = any(rank.device_ns >= 0 for rank in self._ranks.values())
            return LiveSeries(ranks, times, buckets, first, "host" if devices else "")

    def _rank(self, header: RingHeader) -> LiveRank:
        """Return the state of a rank; a process that the script spawned for it stands in its parent's place."""
        number = self._children.get(header.pid, header.rank)
        known = self._ranks.get(number)
        if known is None or (known.pid != header.pid and header.role in ("spawned", "child")):
            known = LiveRank(number, header.pid, self._from(number))
            self._ranks[number] = known
        return known

    def _is_device(self, header: RingHeader, records: Records) -> bool:
        """Say whether a process is a rank; a child becomes one when it first trains, and gets its number.

        It takes the number of a parent that has made no step, or the next free one: as in the finished run.
        """
        if header.role != "child" or header.pid in self._children:
            return True
        if not np.isin(records["code"], LEARNING).any():
            return False
        parent = self._ranks.get(header.rank)
        idle = header.rank not in self._children.values() and (parent is None or not parent.steps)
        taken = {*self._ranks, *range(self._world_size), *self._children.values()}
        self._children[header.pid] = header.rank if idle else max(taken) + 1
        return True

    def _from(self, rank: int) -> int:
        """Return from when on the present attempt answers for `rank`."""
        return self._from_ns.get(rank, min(self._from_ns.values(), default=self._start_ns))

    def _expected(self) -> list[int]:
        """Return the ranks that time is accounted for: those seen, and numbers for those that are still to come."""
        seen = set(self._ranks) | set(self._from_ns)
        missing = self._world_size - len(seen)
        return sorted(seen | set([n for n in range(self._world_size + len(seen)) if n not in seen][: max(missing, 0)]))

    def _count_dropped(self, header: RingHeader, records: Records) -> None:
        last = self._numbers.get(header.pid, 0)
        newest = int(records["number"][-1])
        self._dropped += max(newest - last - len(records), 0)
        self._numbers[header.pid] = newest

    def _moving(self) -> list[LiveRank]:
        """Return the ranks that the others are booked together with."""
        # A rank far behind the front, or one that has ended, would hold up the booking of all others.
        begun = [rank for rank in self._ranks.values() if rank.first_ns >= 0]
        front = max((rank.steps for rank in begun), default=0)
        return [rank for rank in begun if front - rank.steps <= STRAY_STEPS and not rank.ended] or begun

    def _begun(self, rank: LiveRank) -> None:
        """Book a rank's way to its first step; the first rank of a later attempt shows what the failed one kept."""
        self._book_for(rank.rank)[RESTART if self._attempt else STARTUP] += rank.first_ns - rank.from_ns
        failed, self._failed = self._failed, None
        if failed is None:
            return
        kept = failed.saved if rank.loaded else 0
        # steps of the failed attempt   0 ....... kept ....... last
        #                               |- useful -|- rework --|      what the next attempt had to do again
        for number in failed.series.useful_ns:
            lost_ns = failed.series.useful_from(number, kept)
            amounts = self._book_for(number)
            amounts[USEFUL] -= lost_ns
            amounts[REWORK] += lost_ns

    def _book_for(self, rank: int) -> Ints:
        return self._booked.setdefault(rank, np.zeros(len(BUCKETS), np.int64))

    def _book(self, horizon: int) -> None:
        """Book the steps up to `horizon` of every rank."""
        windows = [window for rank in self._ranks.values() if (window := rank.window(horizon)) is not None]
        if not windows:
            return
        booked = book_windows(windows, restarted=self._attempt > 0)
        for window, duration_ns, step_ns in booked:
            self._book_for(window.rank)[:] += step_ns.sum(axis=0)
            self._series.put(window, duration_ns, step_ns)
            self._total_steps[window.rank] = self._total_steps.get(window.rank, 0) + len(duration_ns)
            # A histogram of step lengths: bin i holds lengths up to STEP_BOUNDS_S[i], the last one all longer ones.
            place = np.searchsorted(STEP_BOUNDS_S, duration_ns / 1e9)
            self._counts += np.bincount(place, minlength=len(self._counts))
            self._sum_ns += int(duration_ns.sum())
            self._dropped += window.given_up

    def _next_attempt(self, number: int) -> None:
        """Close the present attempt, which failed: its unfinished steps are rework, what follows is the restart."""
        self._book(max((rank.steps for rank in self._ranks.values()), default=0))
        saved = [rank.saved for rank in self._ranks.values() if rank.saved >= 0]
        for rank in self._ranks.values():
            begun = rank.first_ns >= 0
            since = rank.booked_ns if begun else rank.from_ns
            until = max(rank.last_ns, since)
            bucket = REWORK if begun else RESTART if self._attempt else STARTUP
            self._book_for(rank.rank)[bucket] += until - since
            self._from_ns[rank.rank] = until
        if self._ranks:
            self._failed = _Failed(min(saved, default=0), self._series)
        self._ranks, self._series, self._attempt = {}, StepSeries(self._limit), number
        self._children, self._calls = {}, {}

    def _so_far(self, number: int, now_ns: int) -> Ints:
        """Return [len(BUCKETS)]: what is booked for a rank, and what can be said of the time since."""
        amounts = self._booked.get(number, np.zeros(len(BUCKETS), np.int64)).copy()
        rank = self._ranks.get(number)
        if rank is None or rank.first_ns < 0:
            since = self._from(number) if rank is None else rank.from_ns
            amounts[RESTART if self._attempt else STARTUP] += max(now_ns - since, 0)
        elif rank.ended:
            amounts[IDLE] += max(now_ns - rank.booked_ns, 0)
        else:
            # The time since the last record is a step that goes on, until it has lasted too long for one.
            patience = max(OVERDUE_STEPS * rank.usual_ns, OVERDUE_NS)
            amounts[UNKNOWN] += max(now_ns - max(rank.last_ns, rank.booked_ns) - patience, 0)
        return amounts
